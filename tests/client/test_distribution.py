"""The distribution `sparkwright-install`: what it consists of, and that it works with nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from tests.client.world import World, wheel
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


def _site(folder: Path, made: Path) -> Path:
    """Return a folder with links to the requirements of the wheel *made*."""
    with zipfile.ZipFile(made) as archive:
        metadata = archive.read(
            next(name for name in archive.namelist() if name.endswith("/METADATA"))
        ).decode()
    lines = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    wanted = [Requirement(line) for line in lines if "extra ==" not in line]
    names = set[str]().union(*(_required(each.name, frozenset(each.extras)) for each in wanted))
    folder.mkdir()
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {
            Path(file.parts[0])
            for file in distribution.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }
        for top in tops:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def test_the_client_needs_exactly_its_modules_and_requirements(
    world: World, tmp_path: Path
) -> None:
    """Every command works with the wheel and what it requires, knows its index, and no module is there in vain."""
    world.publish("2026.11.1", [wheel("demo")], [wheel("other", "2.0")])
    root = (world.root / "metadata/1.root.json").read_bytes()
    carried = (world.url, world.fingerprint, root)
    made = client_wheel.write(tmp_path, *carried, label="1")
    again = client_wheel.write(_folder(tmp_path / "again"), *carried, label="1")
    assert made.read_bytes() == again.read_bytes()
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(made) as archive:
        archive.extractall(unpacked)
        present = {
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for name in archive.namelist()
            if name.endswith(".py")
        }
    site, user = _site(tmp_path / "site", made), world.user()
    del user.environment["SPARKWRIGHT_INDEX"]
    # One of the places in which the module `uv` looks for the program.
    (_folder(site / "bin") / "uv").symlink_to(find_uv_bin())
    options: dict[str, Any] = {
        "env": {**user.environment, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        "text": True,
        "capture_output": True,
    }
    used = set()
    for words in (
        ["install"],
        ["list"],
        ["doctor"],
        ["verify", str(made)],
        ["rollback"],
        ["uninstall"],
    ):
        done = subprocess.run(
            [sys.executable, "-S", "-c", RUN, str(unpacked), str(site), *words],
            check=False,
            **options,
        )
        expected = {"verify": "release-unknown", "rollback": "nothing-installed"}.get(words[0], "")
        assert done.returncode == bool(expected), done.stderr
        assert expected in done.stderr
        used |= set(json.loads(done.stdout.splitlines()[-1]))
    assert used == present
    assert not present & {"sparkwright.core.git", "sparkwright.core.strict_yaml"}


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
