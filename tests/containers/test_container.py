"""``sparkwright build --container``, what one container may do, and the builder image, or a reason why there is none."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from docker import DockerClient
from docker.types import Mount
from tests.containers.conftest import OTHER, Run, until
from tests.refusals import refusal

from sparkwright.builder import container
from sparkwright.builder.container import bind
from sparkwright.builder.pylock import Interpreter
from sparkwright.cli import main
from sparkwright.core.files import sha256_bytes
from sparkwright.forks.context import RunContext

pytestmark = pytest.mark.containers

def wheel_of(folder: Path) -> dict[str, str]:
    """
    Return the hash of each file of the one wheel of vllm in *folder* that does not say where it was made: the Python and the compiler
    of the image are others than those out here.
    """
    (path,) = folder.glob("mini_vllm-*.whl")
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if Path(name).name not in ("RECORD", "sparkwright.json")]
        return {name: sha256_bytes(archive.read(name)) for name in names}


def test_inside_and_outside_the_same_code_is_made(contained_run: Run) -> None:
    """A container without a network makes the very libraries that a build out here makes, and a second run reuses its wheel."""
    document = json.loads(contained_run.build("--json").stdout)
    outside = contained_run.folder / "outside"
    assert main.run(contained_run.command("build", "--fork", "vllm", "--output", str(outside))[3:]) == 0

    assert [made["audit"]["findings"] for made in document["wheels"]] == [[]]
    assert wheel_of(contained_run.folder / "dist") == wheel_of(outside)
    assert "reused: nothing changed" in contained_run.build().stderr


def test_a_failure_inside_comes_out_as_it_is(contained_run: Run) -> None:
    """An expected failure of the program inside keeps its exit status, its words and its document."""
    source = contained_run.folder / "project" / "build" / "demo" / "archs.yaml"
    source.write_text(source.read_text().replace('expect: "8.0+PTX"', 'expect: "9.9"'))
    done = contained_run.build("--json", status=1)

    assert json.loads(done.stdout)["error"]["reference"] == "rule-mismatch"
    assert "error: rule-mismatch" in done.stderr
    contained_run.build("--jobs", "0", status=2)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_build_leaves_no_container(
    contained_run: Run, engine: DockerClient, builder: tuple[str, str, Interpreter], by: signal.Signals
) -> None:
    """It is gone when an interrupted program has ended; what kill -9 leaves the next run ends first. That finishes the work."""
    calls = "*/*/demo/vllm/build/launch/calls.jsonl"
    with contained_run.building() as child:
        until(lambda: child.poll() is not None or any((contained_run.folder / "store" / "containers").glob(calls)))
        child.send_signal(by)
        _, output = child.communicate(timeout=1500)
    left = engine.containers.list(all=True, filters={"name": "sparkwright-run-"}, ignore_removed=True)
    done = contained_run.build()

    assert child.returncode == (130 if by == signal.SIGINT else -signal.SIGKILL), output[-2000:]
    assert len(left) == (by == signal.SIGKILL)
    assert all(f"removed the container of a run that was killed: {item.name}" in done.stderr for item in left)


# One container.


def said(engine: DockerClient, image: str, script: str, folders: Sequence[Mount] = ()) -> tuple[int, list[str]]:
    """Return the status of a shell script in a container, and the lines that it printed."""
    lines: list[str] = []
    return container.run(engine, image, ["/bin/sh", "-c", script], folders=folders, on_out=lines.append, on_err=lines.append), lines


def test_a_program_inside_has_no_network_and_no_rights(engine: DockerClient, base: str) -> None:
    """It is the caller, without capabilities, cannot gain any, and cannot write to the image."""
    script = "ls /sys/class/net; id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | cut -f2; touch /etc/x 2>/dev/null || echo refused"

    assert said(engine, base, script)[1] == ["lo", str(os.getuid()), "0" * 16, "0" * 16, "1", "refused"]


def test_a_folder_is_written_only_where_it_may_be(engine: DockerClient, base: str, tmp_path: Path) -> None:
    """A folder is to be read unless it was lent for writing, and files made there belong to the caller."""
    (tmp_path / "read").mkdir()
    (tmp_path / "write").mkdir()
    folders = [bind(tmp_path / "read", Path("/one")), bind(tmp_path / "write", Path("/two"), writable=True)]
    status, _ = said(engine, base, "touch /two/made && touch /one/made", folders=folders)

    assert status != 0
    assert not (tmp_path / "read" / "made").exists()
    assert (tmp_path / "write" / "made").stat().st_uid == os.getuid()


def test_a_program_that_takes_too_much_memory_is_ended(engine: DockerClient, base: str) -> None:
    """The limit is the kernel's, and that it was met is known."""
    with refusal("container-killed") as caught:
        container.run(engine, base, ["python3", "-c", "held = bytearray(10**9)"], memory=200 * 10**6, on_err=lambda _line: None)

    assert caught.value.details == ("status: 137", "killed for lack of memory: True")


# The builder image: from a base that is named by digest.

DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_a_complete_base_needs_no_network(contained_demo: RunContext, engine: DockerClient, base: str) -> None:
    """With the files of the package index in the store, the image is made offline; equal inputs give the same image."""
    first = container.builder_image(contained_demo, engine, base)
    engine.images.remove(first[1], force=True)
    offline = dataclasses.replace(contained_demo, offline=True)
    again = container.builder_image(offline, engine, base)

    assert again[0] == first[0]
    assert again == container.builder_image(offline, engine, base)


def test_what_a_base_lacks_is_installed(contained_demo: RunContext, engine: DockerClient, plain_base: str) -> None:
    """A bare base gets compilers and Python from its own archive; offline it is refused, with what it lacks."""
    with refusal("image-build-failed") as caught:
        container.builder_image(dataclasses.replace(contained_demo, offline=True), engine, plain_base)

    assert any("the base lacks" in line and "python3-venv" in line for line in caught.value.details)
    assert container.builder_image(contained_demo, engine, plain_base)[2].machine


def test_a_base_that_the_engine_lacks(contained_demo: RunContext, engine: DockerClient) -> None:
    """An id that the engine does not have is unresolved; a digest is pulled, unless there is no network or nobody who has it."""
    with refusal("base-unresolved"):
        container.builder_image(contained_demo, engine, DIGEST)
    with refusal("offline"):
        container.builder_image(dataclasses.replace(contained_demo, offline=True), engine, f"127.0.0.1:9/debian@{DIGEST}")
    with refusal("source-unreachable"):
        container.builder_image(contained_demo, engine, f"127.0.0.1:9/debian@{DIGEST}")


def test_a_base_of_another_platform_is_refused(contained_demo: RunContext, engine: DockerClient, base: str) -> None:
    with refusal("image-mismatch"):
        container.prepare_base(contained_demo, engine, base, f"linux/{OTHER}")
