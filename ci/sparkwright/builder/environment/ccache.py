"""
The compiler cache: a unit that was compiled once, in whatever checkout, stack or build folder, is not compiled again.

ccache comes from the machine's own packages. It works in its depend mode: what a unit includes is known from the compiler's own list,
so that the question for a result costs milliseconds and no preprocessor. Where ccache is absent, a build works without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from sparkwright.builder.environment import cross, pylock, remote_cache
from sparkwright.builder.environment.remote_cache import Shelf
from sparkwright.core import digest, process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError
from sparkwright.forks.context import CompilerCache, Session

#: The objects of all units of vLLM's core are some hundred megabytes; this holds those of many stacks and patches.
SIZE = "10G"
#: The first release with depend mode for nvcc and remote storage under this name; Debian 12 has 4.7.5, Ubuntu 24.04 has 4.9.1.
OLDEST = (4, 7)
#: Bytes of a socket's address (unix(7)), less the one that ends it.
LONGEST = 107


class Cache(msgspec.Struct, frozen=True):
    """
    A compiler cache, ready for a build.

    Attributes:
        program: What stands before the compiler.
        environment: Its variables.
        shelf: The results that machines share; ccache reaches them at the door of a build (`remotecache.Door`).
    """

    program: str
    environment: dict[str, str]
    shelf: Shelf | None = None

    @contextlib.contextmanager
    def door(self, launch: Path, inside: Path) -> Iterator[dict[str, str]]:
        """Yield the variables for ccache while the door to what machines share, if anything, is open in *launch*, seen as *inside*."""
        if self.shelf is None:
            yield {}
            return
        place = str(inside / remote_cache.SOCKET)
        if len(place.encode()) > LONGEST:
            console.warn(f"{inside} is too long a path for a socket; the shared compiler cache is left out")
            yield {}
            return
        with remote_cache.Door(launch, self.shelf):
            yield {"CCACHE_REMOTE_STORAGE": f"redis+unix:{place}"}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* without the user's own settings of a cache, which would change what a build takes from where."""
    return {name: value for name, value in environment.items() if not name.startswith(("CCACHE_", "SCCACHE_"))}


def of(session: Session, wanted: CompilerCache, base: Path | None) -> Cache | None:
    """
    Return the ccache of *session*, or nothing where there is none.

    Args:
        base: Paths below it are the same place in every checkout; None where they already have the same name everywhere.

    Raises:
        tool-missing: The user's configuration asks for ccache, and it is not here or is too old.
        file-invalid: The remote's address holds a password, or is of no known kind.
    """
    program = shutil.which("ccache")
    if wanted.tool == "none" or not session.cached:
        return None
    found = version(program) if program else (0, 0)
    if not program or found < OLDEST:
        has = f"ccache {found[0]}.{found[1]} is too old" if program else "ccache is not installed"
        if wanted.tool == "ccache":
            raise CommandError(
                "tool-missing", f"{has}.", todo=f"Install ccache {OLDEST[0]}.{OLDEST[1]} or newer: sudo apt-get install ccache"
            )
        console.note(f"{has}: what is compiled here is compiled again in the next checkout (sudo apt-get install ccache)")
        return None
    settings = {
        "CCACHE_DIR": str(session.store.folder("ccache")),
        "CCACHE_CONFIGPATH": os.devnull,
        "CCACHE_MAXSIZE": wanted.size,
        "CCACHE_DEPEND": "true",
        # ccache would look at nvcc and at the host compiler's driver alone; the code is made by what these call.
        "CCACHE_COMPILERCHECK": f"string:{compilers(session)}",
        # Objects hold no name of their folder: there is no debug information in them.
        "CCACHE_NOHASHDIR": "true",
        "CCACHE_TEMPDIR": str(session.store.folder("ccache", "tmp")),
    }
    if base:
        settings["CCACHE_BASEDIR"] = str(base)
    return Cache(program, settings, remote_cache.shelf(wanted.remote) if wanted.remote else None)


@cache
def version(program: str) -> tuple[int, int]:
    """Return the first two numbers of ccache's version."""
    match = re.search(r"ccache version (\d+)\.(\d+)", process.output([program, "--version"]))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def compilers(session: Session) -> str:
    """Return the address of everything that turns a unit into an object: the CUDA wheels, and the host compiler's programs."""
    decisive = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
    wheels = [sha256 for name, _, sha256 in pylock.wheels(session.project) if name in decisive]
    driver = cross.driver(session)
    return digest.key("compilers", {"wheels": wheels, "host": [_program(driver, name) for name in ("", "cc1plus", "cc1", "as")]})[:32]


@cache
def _program(driver: str, name: str) -> str:
    """Return the hash of *driver*, or of the program *name* that it calls; empty where there is none."""
    try:
        said = process.output([driver, f"-print-prog-name={name}"]).strip() if name else driver
    except CommandError:
        return ""
    path = shutil.which(said)
    return digest.sha256_file(Path(path).resolve()) if path else ""
