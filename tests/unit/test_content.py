"""The content of an installed wheel: the same from the wheel, from pip's environment and from uv's, and another after any change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import wheels
from uv import find_uv_bin

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.release import content

NAME = WheelName("mini", "1.0+spark.2026.11.p0", "py3-none-any")
FILES = {
    "mini/__init__.py": b"print(1)\n",
    "mini/data/a,b.txt": b"a comma\n",
    "mini/old.pyc": b"compiled elsewhere",
    f"{NAME.distribution}-{NAME.version}.data/scripts/mini": b"#!python\nprint(1)\n",
    f"{NAME.distribution}-{NAME.version}.data/purelib/beside.py": b"x = 1\n",
    f"{NAME.distribution}-{NAME.version}.data/data/share/mini.txt": b"shared\n",
    f"{NAME.info}/entry_points.txt": b"[console_scripts]\nmini-run = mini:main\n",
}


def pip(folder: Path, wheel: Path) -> Path:
    """Install with pip, which compiles and notes what it did, and return the site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    options = ["--quiet", "--no-index", "--no-deps", "--compile", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", *options, wheel], check=True)
    return next(folder.glob("lib/python3*/site-packages"))


def uv(folder: Path, wheel: Path) -> Path:
    """Install with uv, and return the site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    subprocess.run(
        [find_uv_bin(), "pip", "install", "--quiet", "--no-index", "--no-deps", "--python", folder / "bin" / "python", wheel], check=True
    )
    return next(folder.glob("lib/python3*/site-packages"))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Return a wheel with everything that installers treat in their own way."""
    path = tmp_path / NAME.filename
    archive.write(path.parent, NAME, FILES, wheels.metadata("mini", NAME.version), pure=True)
    return path


@pytest.mark.parametrize("install", [pip, uv])
def test_installed_is_recognised(wheel: Path, tmp_path: Path, install: Callable[[Path, Path], Path]) -> None:
    """pip and uv leave the same content, by what RECORD says and by the files themselves, and it is the wheel's."""
    site = install(tmp_path / "env", wheel)
    info = site / NAME.info
    assert content.of_installed(info) == content.of_installed(info, deep=True) == content.of_wheel(wheel)
    assert content.facts(site) == {"content mini": content.of_wheel(wheel)}


def test_any_change_is_seen(wheel: Path, tmp_path: Path) -> None:
    """One changed byte is seen by its hash; a changed RECORD, a missing file and a missing RECORD are no content of the wheel's."""
    site = uv(tmp_path / "env", wheel)
    info, known = site / NAME.info, content.of_wheel(wheel)
    (site / "mini" / "__init__.py").write_bytes(b"print(2)\n")
    assert content.of_installed(info) == known  # RECORD is only a claim
    assert content.of_installed(info, deep=True) != known
    assert content.facts(site)["content mini"] != known
    (site / "mini" / "__init__.py").unlink()
    assert content.of_installed(info, deep=True) == ""
    assert content.facts(site) == {}
    record = (info / "RECORD").read_text()
    (info / "RECORD").write_text(record.replace("mini/data", "mini/date"))
    assert content.of_installed(info) not in ("", known)
    (info / "RECORD").unlink()
    assert content.of_installed(info) == ""


def test_only_ours_are_facts(tmp_path: Path) -> None:
    """A package of others is none of the facts."""
    site = uv(tmp_path / "env", wheels.plain(tmp_path, "theirs", "1.0"))
    assert content.facts(site) == {}


def test_another_build_is_another_content(tmp_path: Path) -> None:
    """Two builds of one version differ in their content."""
    first, second = wheels.vllm(tmp_path / "a"), wheels.vllm(tmp_path / "b", size=10)
    assert first.name == second.name
    assert content.of_wheel(first) != content.of_wheel(second)


def test_hostile_records(tmp_path: Path, wheel: Path) -> None:
    """What is no wheel, has no sha256, two rows of one name, or a name that leaves its folder, has no content."""
    (tmp_path / "none.whl").write_bytes(b"<!DOCTYPE html>")
    with refusal("wheel-invalid"):
        content.of_wheel(tmp_path / "none.whl")
    with refusal("wheel-invalid"):
        content.of_wheel(tmp_path / "absent.whl")
    for name, row in {"bare": "mini/__init__.py,,9\n", "twice": 2 * f"x.py,sha256={'A' * 43},1\n"}.items():
        with refusal("wheel-invalid", match="sha256" if name == "bare" else "two rows"):
            content.of_wheel(wheels.packed(tmp_path / f"{name}.whl", {f"{NAME.info}/RECORD": row.encode()}))
    with refusal("archive-unsafe"):
        content.of_wheel(wheels.packed(tmp_path / "leaves.whl", {"../x.py": b"", f"{NAME.info}/RECORD": b""}))
