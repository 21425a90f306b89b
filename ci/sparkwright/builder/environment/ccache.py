"""
The compiler cache: a unit that any checkout, stack or build folder compiled is not compiled again.

ccache comes from the machine's own packages and works in its depend mode: the includes of a unit
are known from the compiler's own list, so that a lookup costs milliseconds and no preprocessor.
Machines share results by ccache's own remote storage. Without ccache a build works all the same.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from sparkwright.builder.environment import cross, pylock
from sparkwright.core import digest, process
from sparkwright.core.config import CompilerCache
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.forks.context import RunContext

#: The objects of all units of vLLM's core are some hundred megabytes; this holds those of many
#: stacks and patches.
SIZE = "10G"
#: The first release with depend mode for nvcc and remote storage under this name; Debian 12 has
#: 4.7.5, Ubuntu 24.04 has 4.9.1.
OLDEST = (4, 7)
#: Password of a remote cache; a file must not hold one.
PASSWORD = "SPARKWRIGHT_CACHE_PASSWORD"  # noqa: S105  a name, not a password


class Cache(msgspec.Struct, frozen=True):
    """
    A compiler cache, ready for a build.

    Attributes:
        program: Path of ccache.
        environment: Its variables; the address and the password of a remote cache are among them.
        remote: Is there a cache on another host, so that compilers need the network?
    """

    program: str
    environment: dict[str, str]
    remote: bool = False


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* without the user's own settings of a compiler cache."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("CCACHE_", "SCCACHE_", PASSWORD))
    }


def of(session: RunContext, wanted: CompilerCache, base: Path | None) -> Cache | None:
    """
    Return the ccache of *session*, or nothing where there is none.

    Args:
        base: Paths below it mean the same in every checkout; None if they have the same name
            everywhere already.

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
                "tool-missing",
                f"{has}.",
                todo=f"Install ccache {'.'.join(map(str, OLDEST))}: sudo apt-get install ccache",
            )
        console.note(
            f"{has}: what is compiled here is compiled again in the next checkout "
            "(sudo apt-get install ccache)"
        )
        return None
    settings = {
        "CCACHE_DIR": str(session.store.folder("ccache")),
        "CCACHE_CONFIGPATH": os.devnull,
        "CCACHE_MAXSIZE": wanted.size,
        "CCACHE_DEPEND": "true",
        # ccache would look at nvcc and at the host compiler's driver alone; the code is made by
        # what these call.
        "CCACHE_COMPILERCHECK": f"string:{compilers(session)}",
        # Objects hold no name of their folder: there is no debug information in them.
        "CCACHE_NOHASHDIR": "true",
        "CCACHE_TEMPDIR": str(session.store.folder("ccache", "tmp")),
    }
    if base:
        settings["CCACHE_BASEDIR"] = str(base)
    if wanted.remote:
        settings["CCACHE_REMOTE_STORAGE"] = remote_storage(
            wanted.remote, os.environ.get(PASSWORD, "")
        )
    return Cache(program, settings, bool(wanted.remote))


def remote_storage(url: str, password: str) -> str:
    """
    Return the remote cache *url* as ccache takes it, with the *password* of a user or server.

    Raises:
        file-invalid: It is of no kind that ccache knows, or holds a password.
    """
    what = f"compiler_cache: the remote {url!r} is none of redis://HOST, http://HOST/…."
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise FileError("file-invalid", what) from error
    if parts.password:
        raise FileError(
            "file-invalid",
            "compiler_cache: the address of the remote holds a password.",
            todo=f"Put it into the variable {PASSWORD}.",
        )
    # A blank or a bar would begin an attribute of ccache's.
    if parts.scheme not in ("redis", "http") or not parts.hostname or re.search(r"[\s|]", url):
        raise FileError("file-invalid", what)
    if not password:
        return url
    # ccache decodes before it looks for the colon; Redis has the user "default" since version 6.
    user = parts.username or ("default" if parts.scheme == "http" or ":" in password else "")
    login = f"{user}:{quote(password, safe='')}" if user else quote(password, safe="")
    return parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}").geturl()


@cache
def version(program: str) -> tuple[int, int]:
    """Return the first two numbers of ccache's version."""
    match = re.search(r"ccache version (\d+)\.(\d+)", process.output([program, "--version"]))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def compilers(session: RunContext) -> str:
    """Return the address of all compilers: the CUDA wheels, and the host compiler's programs."""
    decisive = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
    wheels = [sha256 for name, _, sha256 in pylock.wheels(session.project) if name in decisive]
    driver = cross.driver(session)
    return digest.key(
        "compilers",
        {
            "wheels": wheels,
            "host": [_program(driver, name) for name in ("", "cc1plus", "cc1", "as")],
        },
    )[:32]


@cache
def _program(driver: str, name: str) -> str:
    """Return the hash of *driver*, or of the program *name* that it calls; empty if it has none."""
    try:
        said = process.output([driver, f"-print-prog-name={name}"]).strip() if name else driver
    except CommandError:
        return ""
    path = shutil.which(said)
    return digest.sha256_file(Path(path).resolve()) if path else ""
