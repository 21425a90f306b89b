"""Preflight reports every failure that needs no compiler, in one answer."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec
from tests.refusals import refusal
from tests.unit.conftest import Mini

from sparkwright.builder import BuildError, pipeline, preflight
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.workspace import SourceTree
from sparkwright.core.files import sha256_file
from sparkwright.core.git import REGULAR
from sparkwright.forks import lock
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.lock import FileLock

PROJECT = '[build-system]\nrequires = ["setuptools>=77", "ninja"]\n[project]\nname = "mini-vllm"\nrequires-python = ">=3.9"\n'
FILES = {
    "pyproject.toml": PROJECT,
    "mini_vllm/__init__.py": "",
    "mini_vllm/a.py": "A = 1\n",
}


def source_of(context: RunContext, changed: Mapping[str, str | bytes | None], before: Mapping[str, str] = FILES) -> SourceTree:
    """Return vllm as if upstream had the files *before*, and our series *changed* some; None removes one."""

    def store(files: Mapping[str, str | bytes]) -> str:
        listed = ((path, REGULAR, text if isinstance(text, bytes) else text.encode()) for path, text in files.items())
        return context.objects.store_files(listed)

    old = store(before)
    new = store({path: text for path, text in {**before, **changed}.items() if text is not None})
    return SourceTree("vllm", FetchedSource("vllm", "git", "upstream @ v1", "1" * 40, old, True), new, new, (), ())


def findings(context: RunContext, changed: Mapping[str, str | bytes | None], base: Path | None = None) -> tuple[str, ...]:
    """Return the findings about a series that *changed* some files, empty if there are none."""
    try:
        preflight.check(context, source_of(context, changed), base)
    except BuildError as error:
        if error.reference != "early-check-failed":
            raise
        return error.details
    return ()


def test_every_finding_is_listed_not_the_first_alone(mini: Mini) -> None:
    broken: dict[str, str | bytes | None] = {
        "mini_vllm/a.py": "def f(:\n",
        "mini_vllm/deep.py": b"x = 1\n\0\n",
        "pyproject.toml": PROJECT.replace(">=3.9", ">=3.99").replace(">=77", "<60"),
    }
    listed = findings(mini.context(), broken)
    words = ("mini_vllm/a.py:1: ", "mini_vllm/deep.py:", "wants Python >=3.99; this is", "requires setuptools<60, and pylock.toml has ")

    assert [[word in line for line in listed].count(True) for word in words] == [1, 1, 1, 1]


def test_a_build_requirement_for_another_python_does_not_count(mini: Mini) -> None:
    project = PROJECT.replace('"ninja"', "\"setuptools<60; python_version < '3.9'\"")
    assert findings(mini.context(), {"pyproject.toml": project}) == ()


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_build(mini: Mini, tmp_path: Path) -> None:
    """Also before the wheel is taken from the store."""
    (tmp_path / "file").touch()
    context = dataclasses.replace(mini.context(), output=tmp_path / "file" / "dist")
    for _ in range(2):
        with refusal("early-check-failed", match="no folder for the wheels") as caught:
            pipeline.build(context, "cutlass")
        assert caught.value.details[0].startswith(f"output: {context.output} cannot be written")
        pipeline.build(mini.context(), "cutlass")


def base_of(mini: Mini, requires: str = "") -> Path:
    """Return an official wheel of vllm that is in the store and that the lock names."""
    name = WheelName("mini_vllm", "0.33.0", f"cp38-abi3-linux_{platform.machine()}")
    files = {path: text.encode() for path, text in FILES.items() if path.endswith(".py")} | dict.fromkeys(LIBRARIES, b"\x7fELF")
    metadata = f"Metadata-Version: 2.4\nName: mini-vllm\nVersion: 0.33.0\n{requires}"
    path = archive.write(mini.root, name, files, metadata, pure=False)
    context, sha256 = mini.context(), sha256_file(path)
    locked = FileLock("mini-vllm", "0.33.0", path.name, sha256, path.stat().st_size)
    fork = msgspec.structs.replace(context.lock.forks["vllm"], bases={platform.machine(): locked})
    changed = msgspec.structs.replace(context.lock, forks={**context.lock.forks, "vllm": fork})
    context.project.lock_file.write_text(lock.render(changed), "utf-8")
    return path.rename(context.store.folder("downloads", sha256) / path.name)


LIBRARIES = ("mini_vllm/_C_stable_libtorch.abi3.so", "mini_vllm/_moe_C_stable_libtorch.abi3.so")


def test_a_base_that_was_damaged_in_the_store_is_refused(mini: Mini) -> None:
    base = base_of(mini)
    base.write_bytes(base.read_bytes() + b"\n")

    with refusal("source-mismatch"):
        findings(mini.context(), {}, base)


def test_the_stack_meets_the_requirements_of_the_official_wheel(mini: Mini) -> None:
    """Requirements that environment.yaml replaces and those of extras do not count."""
    base = base_of(mini, "Requires-Dist: mini-flashinfer==0.6.8\nRequires-Dist: requests>=2\nRequires-Dist: mini-cutlass==1; extra == 'x'\n")
    (line,) = findings(mini.context(), {}, base)

    assert "the wheel would require mini-flashinfer==0.6.8, and the stack has 0.7.2" in line
    mini.edit("build/demo/environment.yaml", "    package: mini_vllm\n", "    package: mini_vllm\n    requires: {mini-flashinfer: mini-flashinfer==0.7.2}\n")
    assert findings(mini.context(), {}, base) == ()
