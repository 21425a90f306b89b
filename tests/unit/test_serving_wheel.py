"""The program serves without a checkout: its wheel carries the reviewed data, and needs nothing but its base requirements for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.standin import Machine, _machine, _standin

from sparkwright.builder.wheel import source_wheel
from sparkwright.core import config

__all__ = ["_machine", "_standin"]

ROOT = Path(__file__).parents[2]

#: What `pip install sparkwright` does not bring.
ABSENT = ("git", "numpy", "scipy", "jinja2", "pypi_simple", "pynvml", "docker", "elftools", "zstandard", "matplotlib",
          "ml_dtypes", "cyclonedx", "auditwheel")  # fmt: skip
BARE = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from sparkwright.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module", name="unpacked")
def _unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the program as its wheel lays it down."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(source_wheel.write_program(folder, extra=""), folder / "site", "zip")
    return folder / "site"


def test_the_wheel_carries_the_reviewed_data_as_a_checkout_has_it(unpacked: Path) -> None:
    """Byte for byte; both builders of the wheel are told the same files."""
    data = unpacked / "sparkwright" / "data"
    carried = sorted(path.relative_to(data) for path in data.rglob("*") if path.is_file())
    assert "toy-cpu.yaml" in {path.name for path in carried}
    assert all((data / path).read_bytes() == (ROOT / path).read_bytes() for path in carried)
    forced = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    named = {path for source in forced for path in ([ROOT / source] if (ROOT / source).is_file() else (ROOT / source).iterdir())}
    assert {path.relative_to(ROOT) for path in named} == set(carried)
    assert all(target == f"sparkwright/data/{source}" for source, target in forced.items())


def bare(machine: Machine, unpacked: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a *program* with the unpacked one and nothing but what it requires, in a folder of no checkout."""
    environment = {**machine.environment, "PYTHONPATH": str(unpacked)}
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *words], env=environment, cwd=machine.folder, capture_output=True, text=True, check=False, timeout=120
    )


def test_it_serves_without_a_checkout_and_without_the_rest_of_the_program(machine: Machine, unpacked: Path) -> None:
    """From a recipe of its own data; and its wheel, made again from there, carries the same."""
    done = bare(machine, unpacked, BARE, *machine.words("toy-cpu", "--dry-run", "--json")[3:])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"] == "toy-cpu"
    assert bare(machine, unpacked, BARE, "serve", "--health").returncode == 1
    again = bare(machine, unpacked, "from sparkwright.core import config; print(len(config.carried()), config.root())")
    assert again.stdout.split() == [str(len(config.carried())), str(unpacked / "sparkwright" / "data")]
