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
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from sparkwright.builder.environment import pylock, toolchain
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


class Ccache(msgspec.Struct, frozen=True):
    """
    A compiler cache, ready for a build.

    Attributes:
        program: Path of ccache.
        environment: Its variables, with the address and the password of a remote cache.
        remote: Whether there is a cache on another host, so that compilers need the network.
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


def of(session: RunContext, wanted: CompilerCache, base: Path | None) -> Ccache | None:
    """
    Return the ccache of *session*, None if it is switched off or not installed.

    Args:
        base: Paths below it mean the same in every checkout; None if they have the same name
            everywhere already.

    Raises:
        tool-missing: The user's configuration asks for ccache, and it is not installed or too old.
        file-invalid: The remote's address holds a password, or is of no known kind.
    """
    if wanted.tool == "none" or not session.cached:
        return None
    program = shutil.which("ccache")
    version = _version(program) if program else (0, 0)
    if not program or version < OLDEST:
        number = ".".join(map(str, version))
        what = f"ccache {number} is too old" if program else "ccache is not installed"
        if wanted.tool == "ccache":
            todo = f"Install ccache {'.'.join(map(str, OLDEST))}: sudo apt-get install ccache"
            raise CommandError("tool-missing", f"{what}.", todo=todo)
        console.note(
            f"{what}: units that are compiled here are compiled again in the next checkout "
            "(sudo apt-get install ccache)"
        )
        return None
    settings = {
        "CCACHE_DIR": str(session.store.folder("ccache")),
        "CCACHE_CONFIGPATH": os.devnull,
        "CCACHE_MAXSIZE": wanted.size,
        "CCACHE_DEPEND": "true",
        # ccache would examine nvcc and the host compiler's driver alone; the code is made by the
        # programs that these call.
        "CCACHE_COMPILERCHECK": f"string:{_compilers(session)}",
        # Objects hold no name of their folder: there is no debug information in them.
        "CCACHE_NOHASHDIR": "true",
        "CCACHE_TEMPDIR": str(session.store.folder("ccache", "tmp")),
    }
    if base:
        settings["CCACHE_BASEDIR"] = str(base)
    if wanted.remote:
        password = os.environ.get(PASSWORD, "")
        settings["CCACHE_REMOTE_STORAGE"] = remote_storage(wanted.remote, password)
    return Ccache(program, settings, bool(wanted.remote))


def remote_storage(url: str, password: str) -> str:
    """
    Return the remote cache *url* as ccache takes it, with the *password* of a user or server.

    Raises:
        file-invalid: It is of no kind that ccache knows, or holds a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.password:
        raise FileError(
            "file-invalid",
            "compiler_cache: the address of the remote holds a password.",
            todo=f"Put it into the variable {PASSWORD}.",
        )
    # A blank or a bar would begin an attribute of ccache's.
    if parts.scheme not in ("redis", "http") or not parts.hostname or re.search(r"[\s|]", url):
        what = f"compiler_cache: the remote {url!r} is none of redis://HOST, http://HOST/…."
        raise FileError("file-invalid", what)
    if not password:
        return url
    # ccache decodes before it splits at the colon; Redis has the user "default" since version 6.
    user = parts.username or ("default" if parts.scheme == "http" or ":" in password else "")
    login = f"{user}:{quote(password, safe='')}" if user else quote(password, safe="")
    return parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}").geturl()


def _version(program: str) -> tuple[int, int]:
    match = re.search(r"ccache version (\d+)\.(\d+)", process.output([program, "--version"]))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _compilers(session: RunContext) -> str:
    """Return the address of all compilers: the CUDA wheels, and the host compilers' programs."""
    wheels = [
        sha256
        for name, _, sha256 in pylock.wheels(session.project)
        if name in pylock.CODE_GENERATORS
    ]
    programs = [
        _program_digest(command, name)
        for command in toolchain.compilers(session)
        for name in ("", "cc1plus", "cc1", "as")
    ]
    return digest.key("compilers", {"wheels": wheels, "host": programs})[:32]


def _program_digest(command: list[str], name: str) -> str:
    """Return the hash of a compiler, or of the program *name* that it calls; empty if missing."""
    try:
        query = [*command, f"-print-prog-name={name}"]
        path = shutil.which(process.output(query).strip() if name else command[0])
    except CommandError:
        return ""
    return digest.sha256_file(Path(path).resolve()) if path else ""
