"""Wheels for another machine: what is selected, unpacked and believed, and what a graft refuses."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.builder import pylock, toolchain
from sparkwright.builder.pylock import Interpreter
from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.wheel import graft
from sparkwright.cli import main, options
from sparkwright.forks.stack import MACHINES, Project

ROOT = Path(__file__).parents[2]
HERE = platform.machine()
OTHER = next(machine for machine in MACHINES if machine != HERE)


@pytest.mark.parametrize("stack", ["2026.05", "2026.11"])
def test_one_lock_selects_the_same_projects_for_both_machines(stack: str) -> None:
    """For either machine every project has one wheel, of that machine or of none; whatever this one is."""
    project = Project(ROOT, stack)
    chosen = {machine: pylock.wheels(project, Interpreter("3.12.3", machine)) for machine in MACHINES}

    assert [name for name, _, _ in chosen["x86_64"]] == [name for name, _, _ in chosen["aarch64"]]
    for machine, wheels in chosen.items():
        other = next(name for name in MACHINES if name != machine)
        assert not [filename for _, filename, _ in wheels if other in filename]
        assert any(machine in filename for _, filename, _ in wheels)


def test_a_missing_cross_compiler_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is downloaded, the error says which program is missing and how Debian installs it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain.compiler_version.cache_clear()
    context = options.checkout(main.parse(["plan", "--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--target", OTHER]))

    with refusal("tool-missing") as failure:
        toolchain.target(context, Toolchain("key", tmp_path))

    assert failure.value.what.startswith(f"{OTHER}-linux-gnu-g++ is not installed")
    assert failure.value.todo == f"sudo apt-get install g++-{OTHER.replace('_', '-')}-linux-gnu"


def wanting(folder: Path, versions: Sequence[str]) -> bytes:
    """Return a shared library that wants the given symbol versions, as of a C++ runtime that has them."""
    symbols = {f"f{number}": version for number, version in enumerate(("OWN", *versions))}
    (folder / "versions").write_text("".join(f"{version} {{ global: {name}; }};\n" for name, version in symbols.items()))
    calls = f"void g(void) {{ {' '.join(f'{name}();' for name in symbols)} }}\n"
    for library, text, more in (
        ("runtime", "".join(f"void {name}(void) {{}}\n" for name in symbols), ["-Wl,--version-script=versions"]),
        ("user", "".join(f"void {name}(void);\n" for name in symbols) + calls, ["-L.", "-l:runtime.so"]),
    ):
        (folder / f"{library}.c").write_text(text)
        command = ["cc", "-shared", "-fPIC", "-nostdlib", f"{library}.c", "-o", f"{library}.so", f"-Wl,-soname,{library}.so", *more]
        subprocess.run(command, cwd=folder, check=True)
    return (folder / "user.so").read_bytes()


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        ((), "manylinux_2_28"),
        (("GLIBC_2.17", "GLIBCXX_3.4.24", "CXXABI_1.3.11"), "manylinux_2_28"),
        (("GLIBCXX_3.4.25",), "manylinux_2_31"),
        (("CXXABI_1.3.12",), "manylinux_2_31"),
        (("GLIBCXX_3.4.29",), "manylinux_2_34"),
        (("GLIBCXX_3.4.30", "GLIBC_2.34"), "manylinux_2_35"),
        (("GLIBC_2.38", "GLIBCXX_3.4.21"), "manylinux_2_38"),
        (("CXXABI_1.3.15",), "manylinux_2_39"),
    ],
)
def test_the_platform_tag_is_the_lowest_that_promises_what_is_wanted(tmp_path: Path, versions: tuple[str, ...], tag: str) -> None:
    """It follows from the symbol versions alone, is never below the base's, and the machine in it stays, whatever this one is."""
    library = wanting(tmp_path, versions)

    for machine in MACHINES:
        assert graft.platform_tag(f"manylinux_2_28_{machine}", [library]) == f"{tag}_{machine}"


def test_a_tag_without_versions_stays_and_a_newer_runtime_than_any_tag_promises_is_refused(tmp_path: Path) -> None:
    library = wanting(tmp_path, ["GLIBCXX_3.4.99"])

    assert graft.platform_tag(f"linux_{OTHER}", [library]) == f"linux_{OTHER}"
    with refusal("target-mismatch", match="newer C\\+\\+ runtime"):
        graft.platform_tag(f"manylinux_2_17_{HERE}", [library])
