"""
Where programs of an installed set keep what they compile: a folder in the environment for each build (see `release.jitdir`).

A ``.pth`` file sets the variables whenever the environment's Python starts, so that nobody has to remember them; one that the user
has set stays. With the environment the folders go, too.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from sparkwright.release import jitdir
from sparkwright.release.client.state import Installed, folder
from sparkwright.release.environment import Environment, access_guard

MODULE, PTH = "_sparkwright_caches.py", "_sparkwright_caches.pth"

_TEXT = '''\
"""Written by `sparkwright install`: what is compiled at run time stays apart from what another build compiled."""

import os
import sys


def use(key):
    base = os.path.join(sys.prefix, "sparkwright", "caches")
    if os.access(base, os.W_OK):
        for name, folder in {variables!r}.items():
            os.environ.setdefault(name, os.path.join(base, key, folder))
'''


def place(environment: Environment) -> str:
    """Make the folder of what is installed now, write what points to it, and return its name."""
    key = jitdir.key(environment)[: jitdir.DIGITS]
    with access_guard(environment.prefix):
        (_base(environment) / key).mkdir(parents=True, exist_ok=True)
        for name, text in texts(key).items():
            _write(environment.site / name, text)
    return key


def texts(key: str) -> dict[str, str]:
    """
    Return the files that point to the folder *key*, by name.

    The folder stands in the ``.pth``: Python compiles the module, and takes what it compiled for new when the source has the same
    size and second, as that of another set may have.
    """
    variables = {cache.variable: cache.folder for cache in jitdir.CACHES}
    return {MODULE: _TEXT.format(variables=variables), PTH: f"import {Path(MODULE).stem}; {Path(MODULE).stem}.use({key!r})\n"}


def _base(environment: Environment) -> Path:
    return folder(environment) / "caches"


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_bytes() == text.encode():
        return
    temporary = path.with_name(f".{path.name}.sparkwright")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def clean(environment: Environment, keys: Collection[str]) -> list[Path]:
    """Remove the folders of builds that are not among *keys*, and return them."""
    name = re.compile(rf"[0-9a-f]{{{jitdir.DIGITS}}}")
    with access_guard(environment.prefix):
        gone = [path for path in sorted(_base(environment).glob("*")) if name.fullmatch(path.name) and path.name not in keys]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
    return gone


def remove(environment: Environment) -> None:
    """Remove what points to the folders; these lie with the records, and go with them."""
    with access_guard(environment.site):
        for name in (PTH, MODULE):
            (environment.site / name).unlink(missing_ok=True)
        for compiled in (environment.site / "__pycache__").glob(f"{Path(MODULE).stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (environment.site / "__pycache__").rmdir()


def lost(environment: Environment, known: Installed) -> Iterator[str]:
    """Yield what of it is not there any more, or says something else."""
    key = known.caches.get(known.chosen.release, "")
    for name, wanted in texts(key).items():
        try:
            if key and (environment.site / name).read_text("utf-8") != wanted:
                yield name
        except (OSError, UnicodeDecodeError):
            yield name


def present(environment: Environment) -> list[str]:
    """Return the names of the folders that are there."""
    return sorted(path.name for path in _base(environment).glob("*") if path.is_dir())
