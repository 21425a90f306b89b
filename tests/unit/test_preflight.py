"""Preflight reports every failure that needs no compiler, in one answer."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec
from tests.refusals import refusal
from tests.unit.conftest import Mini

from sparkwright.builder import pipeline, preflight
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


def check(context: RunContext, changed: Mapping[str, str], base: Path | None = None, before: Mapping[str, str] = FILES) -> None:
    """Check vllm as if upstream had the files *before*, and our series *changed* some."""
    old, new = (
        context.objects.store_files((path, REGULAR, text.encode()) for path, text in files.items())
        for files in (before, {**before, **changed})
    )
    source = SourceTree("vllm", FetchedSource("vllm", "git", "upstream @ v1", "1" * 40, old, True), new, new, (), ())
    preflight.check(context, source, base)


def test_every_finding_is_listed_not_the_first_alone(mini: Mini) -> None:
    """A requirement for another Python is none."""
    project = PROJECT.replace('"ninja"', "\"ninja<1; python_version < '3.9'\"")
    broken = {
        "mini_vllm/a.py": "def f(:\n",
        "mini_vllm/deep.py": "x = 1\n\0\n",
        "pyproject.toml": project.replace(">=3.9", ">=3.99").replace(">=77", "<60"),
    }
    with refusal("early-check-failed") as caught:
        check(mini.context(), broken)
    words = ("mini_vllm/a.py:1: ", "mini_vllm/deep.py:", "wants Python >=3.99; this is", "requires setuptools<60, and pylock.toml has ")

    assert [word for line in caught.value.details for word in words if word in line] == list(words)
    assert len(caught.value.details) == 4


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_build(mini: Mini, tmp_path: Path) -> None:
    """Also before the wheel is taken from the store."""
    (tmp_path / "file").touch()
    context = dataclasses.replace(mini.context(), output=tmp_path / "file" / "dist")
    for _ in range(2):
        with refusal("early-check-failed", match="no folder for the wheels") as caught:
            pipeline.build(context, "cutlass")
        assert caught.value.details[0].startswith(f"output: {context.output} cannot be written")
        pipeline.build(mini.context(), "cutlass")


LIBRARIES = ("mini_vllm/_C_stable_libtorch.abi3.so", "mini_vllm/_moe_C_stable_libtorch.abi3.so")


def test_the_stack_meets_the_requirements_of_the_official_wheel(mini: Mini) -> None:
    """Requirements that environment.yaml replaces and those of extras do not count; a wheel of other sources, or damaged in the store, is refused."""
    name = WheelName("mini_vllm", "0.33.0", f"cp38-abi3-linux_{platform.machine()}")
    files = {path: text.encode() for path, text in FILES.items() if path.endswith(".py")} | dict.fromkeys(LIBRARIES, b"\x7fELF")
    requires = "Requires-Dist: mini-flashinfer==0.6.8\nRequires-Dist: requests>=2\nRequires-Dist: mini-cutlass==1; extra == 'x'\n"
    metadata = f"Metadata-Version: 2.4\nName: mini-vllm\nVersion: 0.33.0\n{requires}"
    base, context = archive.write(mini.root, name, files, metadata, pure=False), mini.context()
    locked = FileLock("mini-vllm", "0.33.0", base.name, sha256_file(base), base.stat().st_size)
    fork = msgspec.structs.replace(context.lock.forks["vllm"], bases={platform.machine(): locked})
    changed = msgspec.structs.replace(context.lock, forks={**context.lock.forks, "vllm": fork})
    context.project.lock_file.write_text(lock.render(changed), "utf-8")
    with refusal("early-check-failed") as caught:
        check(mini.context(), {}, base)

    (line,) = caught.value.details
    assert "the wheel would require mini-flashinfer==0.6.8, and the stack has 0.7.2" in line
    mini.edit("build/demo/environment.yaml", "    package: mini_vllm\n", "    package: mini_vllm\n    requires: {mini-flashinfer: mini-flashinfer==0.7.2}\n")
    check(mini.context(), {}, base)
    with refusal("base-mismatch", match=base.name) as caught:
        check(mini.context(), {}, base, FILES | {"mini_vllm/a.py": "A = 2\n"})
    assert caught.value.details[1:] == ("mini_vllm/a.py",)
    base.write_bytes(base.read_bytes() + b"\n")
    with refusal("source-mismatch"):
        check(mini.context(), {}, base)
