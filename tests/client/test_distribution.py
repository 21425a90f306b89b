"""The distribution `sparkwright-install`: what it consists of, and that it works with nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.client.world import User

from sparkwright.release import client_wheel

#: Runs the client from a folder, without the modules that it does not require, and prints those of its own that it loaded.
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
absent = set(json.loads(sys.argv[2]))
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from sparkwright.client import load_check
from sparkwright.client.main import main
code = main(sys.argv[3:])
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "sparkwright")))
sys.exit(code)
"""


def _required(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add the distribution *name* with *extras*, and all that it requires here, to *seen*."""
    key = (canonicalize_name(name), extras)
    if key not in seen:
        seen.add(key)
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            contexts = [{"extra": extra} for extra in ("", *extras)]
            if requirement.marker is None or any(map(requirement.marker.evaluate, contexts)):
                _required(requirement.name, frozenset(requirement.extras), seen)


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
    required: set[tuple[str, frozenset[str]]] = set()
    for line in importlib.metadata.Distribution.at(info).requires or ():
        if "extra ==" not in line:
            _required(Requirement(line).name, frozenset(Requirement(line).extras), required)
    owners = importlib.metadata.packages_distributions()
    names = {name for name, _ in required}
    absent = [top for top, parts in owners.items() if names.isdisjoint(map(canonicalize_name, parts)) and top != "sparkwright"]
    assert {"git", "numpy", "docker"} <= set(absent)
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
        words = [sys.executable, "-c", RUN, str(unpacked), json.dumps(absent), *command.split()]
        done = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)
        assert (done.returncode, reference in done.stderr) == (bool(reference), True), done.stderr
        used |= set(json.loads(done.stdout.splitlines()[-1]))
    assert used == present
