"""The builder image: from a base that is named by digest, with a network or without one, or a reason why not."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from docker import DockerClient
from tests.refusals import refusal

from sparkwright.builder import container
from sparkwright.builder.container import PROGRAM
from sparkwright.builder.environment.pylock import Interpreter
from sparkwright.forks.context import RunContext

pytestmark = pytest.mark.containers

DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_a_complete_base_needs_no_network(contained_demo: RunContext, engine: DockerClient, base: str) -> None:
    """With the files of the package index in the store, the image is made offline; the same inputs give the same image, at once."""
    container.builder_image(contained_demo, engine, base)
    engine.images.remove("sparkwright-builder:" + tag_of(engine, "builder"), force=True)
    offline = dataclasses.replace(contained_demo, offline=True)
    made = container.builder_image(offline, engine, base)

    assert made == container.builder_image(offline, engine, base)


def tag_of(engine: DockerClient, stage: str) -> str:
    """Return the tag of the newest image of *stage*."""
    found = engine.images.list(name=f"sparkwright-{stage}")
    return str(found[0].tags[0]).partition(":")[2]


def test_the_image_holds_this_very_program(engine: DockerClient, builder: tuple[str, str, Interpreter]) -> None:
    """What runs inside is the program that started it, with all that it requires."""
    said: list[str] = []
    script = "import sparkwright.cli.main, auditwheel, sys; print(sparkwright.__version__, sys.prefix)"
    assert container.run(engine, builder[1], [PROGRAM, "-c", script], on_out=said.append) == 0
    assert said == ["0.1.0 /usr/local/lib/sparkwright"]


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


def test_a_base_of_another_platform_is_refused(contained_demo: RunContext, engine: DockerClient, base: str, other: str) -> None:
    """An id names one image; asking for another platform of it is a contradiction."""
    with refusal("image-mismatch"):
        container.prepare_base(contained_demo, engine, base, other)


def test_programs_that_nothing_runs_want_an_emulator(
    contained_demo: RunContext, engine: DockerClient, other: str, take: Callable[[Path, str], str], tmp_path: Path
) -> None:
    """Where the kernel knows no interpreter for the image's programs, the package that brings one is named."""
    # An ELF header of a machine that no interpreter is registered for stands for a processor without emulation.
    shell = b"\x7fELF\x02\x01\x01" + bytes(9) + (2).to_bytes(2, "little") + (0xFEED).to_bytes(2, "little") + bytes(108)
    with tarfile.open(tmp_path / "alien.tar", mode="w") as archive:
        info = tarfile.TarInfo("bin/sh")
        info.size, info.mode = len(shell), 0o755
        archive.addfile(info, io.BytesIO(shell))
    alien = take(tmp_path / "alien.tar", other)
    recipe = contained_demo.project.root / "build" / "builder.Dockerfile"
    with refusal("emulation-missing") as caught:
        container.build_image(contained_demo, engine, "system", "0", {"BASE": alien}, other, {"Dockerfile": recipe.read_bytes()})

    assert "qemu-user-static" in caught.value.todo


def test_a_recipe_that_fails_shows_its_last_lines(contained_demo: RunContext, engine: DockerClient, base: str) -> None:
    """The engine's last lines and the place of the whole log are in the failure."""
    recipe = contained_demo.project.root / "build" / "builder.Dockerfile"
    recipe.write_text("ARG BASE\nFROM ${BASE} AS system\nRUN echo before; echo why >&2; exit 3\n")
    with refusal("image-build-failed") as caught:
        container.builder_image(contained_demo, engine, base)

    assert "why" in " ".join(caught.value.details)
    log = Path(caught.value.details[-1].removeprefix("full log: "))
    assert "before" in log.read_text()
