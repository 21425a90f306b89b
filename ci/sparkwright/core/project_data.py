"""
The place of the reviewed data: a checkout, or, for machines that only serve, the installed
program.

The wheel of the program carries `CARRIED` below ``sparkwright/data``, laid out as in a checkout, so
that whoever reads them need not know which of the two it reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sparkwright import __version__

#: What travels with the program; pyproject.toml says the same to the build backend.
CARRIED = ("ci/gates/contract.yaml", "ci/gates/workloads.yaml", "ci/recipes/*")

PACKAGE = Path(__file__).parents[1]
#: Of an installed program.
DATA = PACKAGE / "data"


def checkout() -> Path | None:
    """
    Return the checkout to work on: the nearest folder upwards that holds stacks, else the one this
    program lies in, if it does.
    """
    places = (Path.cwd(), *Path.cwd().parents, PACKAGE.parents[1])
    return next((folder for folder in places if any(folder.glob("forks/*/stack.yaml"))), None)


def root(named: Path | None = None) -> Path:
    """
    Return the folder below which ``ci/recipes`` and ``ci/gates`` lie: *named*, else a checkout's,
    else the program's own.
    """
    return named or checkout() or DATA


def install_full() -> str:
    """Return the command that installs the program with the part `full`."""
    own = PACKAGE.parents[1]
    part = f"'sparkwright[full]=={__version__}'"
    if (own / "pyproject.toml").exists():
        part = f"--editable '{own}[full]'"
    return f"{sys.executable} -m pip install {part}"


def carried() -> dict[str, bytes]:
    """
    Return the files that the program's wheel carries, by their names in it; the same from a
    checkout and from an installed program.
    """
    own = PACKAGE.parents[1]
    source = own if (own / "ci" / "recipes").is_dir() else DATA
    files = sorted(path for pattern in CARRIED for path in source.glob(pattern))
    return {
        f"{PACKAGE.name}/data/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in files
    }
