"""Preflight reports every failure that needs no compiler, in one answer."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.builder import preflight
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import EnvironmentSpec
from sparkwright.builder.errors import BuildError
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import digest, strict_yaml
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import REGULAR
from sparkwright.forks import lock
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.lock import FileLock

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

ENVIRONMENT = "build/demo/environment.yaml"
PROJECT = '[build-system]\nrequires = ["setuptools>=77", "ninja"]\n[project]\nname = "mini-vllm"\nrequires-python = ">=3.9"\n'
FILES = {
    "pyproject.toml": PROJECT,
    "mini_vllm/__init__.py": "",
    "mini_vllm/a.py": "A = 1\n",
}


def source_of(session: RunContext, changed: Mapping[str, str | bytes | None], before: Mapping[str, str] = FILES) -> SourceTree:
    """Return vllm as if upstream had the files *before*, and our series *changed* some; None removes one."""

    def store(files: Mapping[str, str | bytes]) -> str:
        listed = ((path, REGULAR, text if isinstance(text, bytes) else text.encode()) for path, text in files.items())
        return session.objects.store_files(listed)

    old = store(before)
    new = store({path: text for path, text in {**before, **changed}.items() if text is not None})
    return SourceTree("vllm", FetchedSource("vllm", "git", "upstream @ v1", "1" * 40, old, True), new, new, (), ())


def findings(session: RunContext, source: SourceTree, *, building: bool = False) -> list[str]:
    """Return what the check finds, none when it is content."""
    try:
        preflight.check(session, source, building=building)
    except BuildError as error:
        if error.reference != "early-check-failed":
            raise
        return list(error.details)
    return []


def test_a_sound_change_is_let_through(mini: Mini) -> None:
    """Upstream's own oddities are none of our patches' faults, nor is a file that was removed."""
    run = mini.session()
    sound: dict[str, str | bytes | None] = {
        "mini_vllm/a.py": None,
        "mini_vllm/b.py": "def f(x):\n    return '\\d'\n",
    }

    assert findings(run, source_of(run, sound), building=True) == []


def test_every_finding_is_listed_not_the_first_alone(mini: Mini) -> None:
    """Two Python files, a Python that is too old and a tool of another version: one error names all four."""
    run = mini.session()
    broken: dict[str, str | bytes | None] = {
        "mini_vllm/a.py": "def f(:\n",
        "mini_vllm/deep.py": b"x = 1\n\0\n",
        "pyproject.toml": PROJECT.replace(">=3.9", ">=3.99").replace(">=77", "<60"),
    }

    with refusal("early-check-failed") as caught:
        preflight.check(run, source_of(run, broken), building=False)

    found = "\n".join(caught.value.details)
    assert len(caught.value.details) == 4
    assert "mini_vllm/a.py:1: " in found
    assert "mini_vllm/deep.py:" in found
    assert f"wants Python >=3.99; this is {platform.python_version()}" in found
    assert "requires setuptools<60, and pylock.toml has " in found
    assert caught.value.document()["findings"] == list(caught.value.details)


def with_base(mini: Mini, *members: str, requires: str = "", damage: bool = False) -> RunContext:
    """Return a run whose lock names an official wheel of vllm for this machine, with *members* beside its Python files."""
    tag = f"cp38-abi3-linux_{platform.machine()}"
    name = WheelName("mini_vllm", "0.33.0", tag)
    path = mini.root / name.filename
    files = {path: text.encode() for path, text in FILES.items() if path.endswith(".py")} | dict.fromkeys(members, b"\x7fELF")
    metadata = f"Metadata-Version: 2.4\nName: mini-vllm\nVersion: 0.33.0\n{requires}"
    archive.write(path.parent, name, files, metadata, pure=False)
    sha256 = digest.sha256_file(path)
    run = mini.session()
    place = run.store.folder("downloads", sha256) / path.name
    path.rename(place)
    if damage:
        place.write_bytes(place.read_bytes() + b"\n")
    locked = FileLock("mini-vllm", "0.33.0", path.name, sha256, place.stat().st_size)
    fork = msgspec.structs.replace(run.lock.forks["vllm"], bases={platform.machine(): locked})
    changed = msgspec.structs.replace(run.lock, forks={**run.lock.forks, "vllm": fork})
    run.project.lock_file.write_text(lock.render(changed), "utf-8")
    return mini.session()


LIBRARIES = ("mini_vllm/_C_stable_libtorch.abi3.so", "mini_vllm/_moe_C_stable_libtorch.abi3.so")


def failure(session: RunContext, changed: Mapping[str, str | bytes | None]) -> SparkwrightError:
    """Return the one failure of a graft onto the base."""
    with pytest.raises(SparkwrightError) as caught:
        preflight.check(session, source_of(session, changed))
    return caught.value


def test_several_failures_of_the_base_and_the_source_come_together(mini: Mini) -> None:
    """A failure with a class of its own stands in one list with the findings that have none."""
    error = failure(with_base(mini, damage=True), {"mini_vllm/a.py": "def f(:\n"})

    assert error.reference == "early-check-failed"
    assert error.details[0].startswith("mini_vllm/a.py:1: ")
    assert "(source-mismatch)" in error.details[1]


def test_what_the_official_wheel_requires_of_the_stack_must_be_there(mini: Mini) -> None:
    """A requirement on another fork that its locked state does not meet is found; one that environment.yaml replaces is not counted."""
    requires = "Requires-Dist: mini-flashinfer==0.6.8\nRequires-Dist: requests>=2\nRequires-Dist: mini-cutlass==1; extra == 'x'\n"
    run = with_base(mini, *LIBRARIES, requires=requires)

    (line,) = findings(run, source_of(run, {}), building=True)

    assert line.endswith("the wheel would require mini-flashinfer==0.6.8, and the stack's flashinfer is 0.7.2")
    spec = toolchain.spec(run.project)
    vllm = msgspec.structs.replace(spec.forks["vllm"], requires={"mini-flashinfer": "mini-flashinfer==0.7.2"})
    (mini.root / ENVIRONMENT).write_text(strict_yaml.dump(EnvironmentSpec({**spec.forks, "vllm": vllm})), "utf-8")
    assert findings(mini.session(), source_of(run, {}), building=True) == []


def test_an_entry_without_effect_on_the_base_keeps_its_own_class(mini: Mini) -> None:
    """A requirement to change that the official wheel does not have is still a requirement-mismatch."""
    run = with_base(mini, *LIBRARIES)
    spec = toolchain.spec(run.project)
    vllm = msgspec.structs.replace(spec.forks["vllm"], requires={"requests": "requests>=3"})
    (mini.root / ENVIRONMENT).write_text(strict_yaml.dump(EnvironmentSpec({**spec.forks, "vllm": vllm})), "utf-8")

    assert failure(mini.session(), {}).reference == "requirement-mismatch"
