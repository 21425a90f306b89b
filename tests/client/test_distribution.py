"""The distribution `sparkwright-install`: what it consists of, and that it works with nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from tests.client.world import User
from uv import find_uv_bin

from sparkwright.release import client_wheel

#: Runs the client with the wheel and the distributions that it requires alone, and prints its modules.
RUN = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from sparkwright.client import load_check
from sparkwright.client.main import main
code = main(sys.argv[3:])
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "sparkwright")))
sys.exit(code)
"""


def _required(
    name: str,
    extras: frozenset[str] = frozenset(),
    seen: set[tuple[str, frozenset[str]]] | None = None,
) -> set[str]:
    """Return the names of the distribution *name* and of all that it requires here."""
    seen = set() if seen is None else seen
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    found = {name}
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if any(
            requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            for extra in ("", *extras)
        ):
            found |= _required(requirement.name, frozenset(requirement.extras), seen)
    return found


def _site(folder: Path, wanted: Iterable[str]) -> Path:
    """Return a folder with links to the distributions of the requirements *wanted*, and the program uv."""
    (folder / "bin").mkdir(parents=True)
    # One of the places in which the module `uv` looks for the program.
    (folder / "bin" / "uv").symlink_to(find_uv_bin())
    parsed = [Requirement(line) for line in wanted if "extra ==" not in line]
    names = set[str]().union(*(_required(each.name, frozenset(each.extras)) for each in parsed))
    for distribution in map(importlib.metadata.distribution, names):
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def test_the_client_needs_exactly_its_modules_and_requirements(user: User, tmp_path: Path) -> None:
    """Every command works with the wheel and what it requires, knows its index, and no module is there in vain."""
    root = (user.world.root / "metadata/1.root.json").read_bytes()
    carried = (user.world.url, user.world.fingerprint, root)
    made, again = (
        client_wheel.write(folder, *carried, label="1")[1] for folder in (tmp_path, user.folder)
    )
    assert made.read_bytes() == again.read_bytes()
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(made, unpacked, "zip")
    sources = [path.relative_to(unpacked).with_suffix("") for path in unpacked.rglob("*.py")]
    present = {".".join(path.parts).removesuffix(".__init__") for path in sources}
    [info] = unpacked.glob("*.dist-info")
    site = _site(tmp_path / "site", importlib.metadata.Distribution.at(info).requires or ())
    environment = {**user.environment, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    for name in ("SPARKWRIGHT_INDEX", "PYTHONPATH"):
        del environment[name]
    used = set()
    for command, reference in (
        ("install", ""),
        ("list", ""),
        ("doctor", ""),
        (f"verify {made}", "release-unknown"),
        ("rollback", "nothing-installed"),
        ("uninstall", ""),
    ):
        words = [sys.executable, "-S", "-c", RUN, str(unpacked), str(site), *command.split()]
        done = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)
        assert (done.returncode, reference in done.stderr) == (bool(reference), True), done.stderr
        used |= set(json.loads(done.stdout.splitlines()[-1]))
    assert used == present
