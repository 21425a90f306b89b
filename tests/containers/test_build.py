"""``sparkwright build --container``, from the command line to the wheel, and whatever happens to it on the way."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from docker import DockerClient

from sparkwright.builder.pylock import Interpreter
from sparkwright.cli import main
from sparkwright.core.files import sha256_bytes
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext

if TYPE_CHECKING:
    from tests.containers.conftest import Run

pytestmark = pytest.mark.containers

#: What of a wheel says where it was made: the Python and the compiler of the image are others than those out here.
RECORDS = ("RECORD", "sparkwright.json")
PATIENCE = 1500


def members(wheel: Path) -> dict[str, str]:
    """Return the hash of each file of *wheel* that does not say where it was made."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: sha256_bytes(archive.read(name)) for name in archive.namelist() if Path(name).name not in RECORDS}


def wheel_of(folder: Path) -> Path:
    """Return the one wheel of vllm in *folder*."""
    (path,) = folder.glob("mini_vllm-*.whl")
    return path


def ours(engine: DockerClient) -> list[Any]:
    """Return the containers that some sparkwright owns."""
    return list(engine.containers.list(all=True, filters={"name": "sparkwright-run-"}, ignore_removed=True))


def test_inside_and_outside_the_same_code_is_made(contained_run: Run, contained_demo: RunContext) -> None:
    """A container without a network makes the very libraries that a build out here makes, and a second run reuses its wheel."""
    document = json.loads(contained_run.run("--json").stdout)
    inside = wheel_of(contained_run.folder / "dist")
    outside = contained_run.folder / "outside"
    mirror = f"{upstreams.HOST}={contained_run.folder / 'upstreams'}{os.sep}"
    common = ["--root", str(contained_run.folder / "project"), "--stack", "demo", "--cache-dir", str(contained_run.store)]
    assert main.run(["build", *common, "--source", "git", "--mirror", mirror, "--fork", "vllm", "--output", str(outside)]) == 0

    assert [made["path"] for made in document["wheels"]] == [str(inside)]
    assert document["wheels"][0]["audit"]["findings"] == []
    assert members(inside) == members(wheel_of(outside))
    assert "reused: nothing changed" in contained_run.run().stderr


def test_a_failure_inside_comes_out_as_it_is(contained_run: Run) -> None:
    """An expected failure of the program inside keeps its exit status, its words and its document."""
    source = contained_run.folder / "project" / "build" / "demo" / "archs.yaml"
    text = source.read_text()
    assert 'expect: "8.0+PTX"' in text
    source.write_text(text.replace('expect: "8.0+PTX"', 'expect: "9.9"'))
    done = contained_run.run("--json", status=1)

    assert json.loads(done.stdout)["error"]["reference"] == "rule-mismatch"
    assert "error: rule-mismatch" in done.stderr
    assert contained_run.run("--jobs", "0", status=2).returncode == 2


def compiling(run: Run) -> bool:
    """Return whether a compiler of *run* has begun."""
    return any((run.store / "containers").glob("*/*/demo/vllm/build/launch/calls.jsonl"))


def test_an_interruption_leaves_no_container(
    contained_run: Run, engine: DockerClient, builder: tuple[str, str, Interpreter], until: Callable[..., Any]
) -> None:
    """The container is gone when the program has ended, and the next run finishes the work."""
    with contained_run.running() as child:
        until(lambda: child.poll() is not None or compiling(contained_run))
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)

    assert child.returncode == 130, said[-2000:]
    assert not ours(engine)
    contained_run.run()


def test_what_kill_leaves_the_next_run_removes(
    contained_run: Run, engine: DockerClient, builder: tuple[str, str, Interpreter], until: Callable[..., Any]
) -> None:
    """After kill -9 the container lives on, and the next run ends it before it does anything else, and then finishes the work."""
    with contained_run.running() as child:
        until(lambda: child.poll() is not None or compiling(contained_run))
        child.kill()
        child.communicate()
    (left,) = ours(engine)
    done = contained_run.run()

    assert f"removed the container of a run that was killed: {left.name}" in done.stderr
    assert wheel_of(contained_run.folder / "dist")
