"""
The compiler cache: a unit that any checkout, stack or build folder compiled is not compiled again.

ccache comes from the machine's own packages and works in its depend mode: the includes of a unit
are known from the compiler's own list, so that a lookup costs milliseconds and no preprocessor.
Machines share results if ``CCACHE_REMOTE_STORAGE`` names a server, in ccache's own words. Without
ccache a build works all the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.core import config, process
from sparkwright.core.console import console
from sparkwright.core.files import content_key
from sparkwright.forks.context import RunContext

#: The one setting of the user that reaches a build; it may hold a password.
REMOTE = "CCACHE_REMOTE_STORAGE"
#: The path of ccache, for `sparkwright.builder.compile.launcher`.
PROGRAM = "SPARKWRIGHT_CCACHE"


def variables(context: RunContext, env: Mapping[str, str], base: Path | None) -> dict[str, str]:
    """
    Return the variables *env* with those of the compiler cache, without the user's own settings.

    Args:
        base: Paths below it mean the same in every checkout; None if they have the same name
            everywhere already.
    """
    clean = {name: text for name, text in env.items() if not name.startswith("CCACHE_")}
    wanted, program = config.config().compiler_cache, shutil.which("ccache")
    if wanted.tool == "none" or not context.cached:
        return clean
    if not program:
        console.note(
            "ccache is not installed: units that are compiled here are compiled again in the next "
            "checkout (sudo apt-get install ccache)"
        )
        return clean
    wheels = pylock.wheels(context.project)
    compilers = {
        "wheels": [sha256 for name, _, sha256 in wheels if name in pylock.CODE_GENERATORS],
        "host": [process.output([*name, "--version"]) for name in toolchain.compilers(context)],
    }
    settings = {
        PROGRAM: program,
        "CCACHE_DIR": str(context.store.folder("ccache")),
        "CCACHE_CONFIGPATH": os.devnull,
        "CCACHE_MAXSIZE": wanted.size,
        "CCACHE_DEPEND": "true",
        # ccache would examine nvcc and the host compiler's driver alone; the code is made by the
        # programs that these call.
        "CCACHE_COMPILERCHECK": f"string:{content_key('compilers', compilers)[:32]}",
        # Objects hold no name of their folder: there is no debug information in them.
        "CCACHE_NOHASHDIR": "true",
        "CCACHE_TEMPDIR": str(context.store.folder("ccache", "tmp")),
    }
    if base:
        settings["CCACHE_BASEDIR"] = str(base)
    if remote := os.environ.get(REMOTE):
        settings[REMOTE] = remote
    return {**clean, **settings}
