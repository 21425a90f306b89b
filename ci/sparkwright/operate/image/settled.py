"""
Run inside an image by its own sparkwright, after `install`: what is there gets one time and its compiled form, and is noted so.

Layers keep times in whole seconds, and equal files should make equal layers whenever they are made. Nobody can write compiled files into
the image later, so all of them are made here, valid whatever the time of their source is.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from msgspec.structs import replace

from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.release import environment
from sparkwright.release.client import packages, state

#: 1980-01-01, the oldest time that a wheel's archive can hold.
TIME = 315532800
#: Seconds that compiling may take: some 20,000 files, under emulation perhaps.
PATIENCE = 7200


def settle(root: Path, venv: Path) -> None:
    """
    Compile everything below *root*, give it all one time, and note the set in *venv* as it then lies there.

    Raises:
        nothing-installed, environment-broken, environment-unusable: There is no set in *venv*.
    """
    place = environment.probe(venv)
    known = state.required(place)
    for cache in [*root.rglob("__pycache__")]:
        shutil.rmtree(cache, ignore_errors=True)
    for python in sorted(root.glob("*/bin/python")):
        _compile(python)
    _same_time(root)
    placed = {name: replace(one, stat=packages.stat(place.site / one.info)) for name, one in known.placed.items()}
    state.end(place, replace(known, placed=placed))
    _same_time(root)
    os.utime(root.parent, (TIME, TIME))


def _compile(python: Path) -> None:
    """Compile what is below *python*'s environment; sources that no Python of today can read stay as they are."""
    site = [str(path) for path in sorted(python.parents[1].glob("lib/python3.*/site-packages"))]
    options = ["-q", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    command: list[str | os.PathLike[str]] = [python, "-m", "compileall", *options, *site]
    # Sets of constants are written in the order of their hashes.
    try:
        process.output(command, env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}, timeout=PATIENCE)
    except CommandError as error:
        if error.reference != "command-failed":
            raise


def _same_time(root: Path) -> None:
    for folder, names, files in os.walk(root, topdown=False):
        for name in (*files, *names):
            os.utime(Path(folder, name), (TIME, TIME), follow_symlinks=False)
    os.utime(root, (TIME, TIME))


if __name__ == "__main__":
    settle(Path(sys.argv[1]), Path(sys.argv[1], "set"))
