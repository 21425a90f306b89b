"""What a tree says of a source that lies elsewhere, and what an address in it may look like."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from sparkwright.forks.errors import SourceError

#: ``submodule`` and ``fetchcontent`` are git repositories and can be locked; the others are reported, so that nothing is silent.
Kind = Literal["submodule", "fetchcontent", "externalproject", "download", "cargo"]

#: git runs a program of the name before the colons (gitremote-helpers(7)); an option's dash would reach git's command line.
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*::")
_LONGEST = 2048


class Vendored(msgspec.Struct, frozen=True):
    """
    A source that a build of the tree would download, or take from a submodule.

    Attributes:
        name: What FetchContent calls it, or the submodule's path.
        url: Empty where the tree does not say it in a way that can be read beyond doubt.
        ref: The tag, branch or commit as the tree says it (for an archive its hash); empty as *url*.
        variable: What hands over a local folder instead: a CMake variable, or ``ENV{NAME}`` where only the environment does; empty
            where nothing does.
        file: Where it is declared.
        line: From 1; 0 where it is not written in a line of its own.
        condition: Under which it is declared, in CMake's words; empty when always.
        submodules: Those of its own submodules that the build takes as well; None stands for all of them.
    """

    name: str
    kind: Kind
    url: str
    ref: str
    file: str
    line: int = 0
    variable: str = ""
    condition: str = ""
    submodules: tuple[str, ...] | None = None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


def plain(text: str, place: str) -> str:
    """
    Return *text*, an address or a ref that a tree names, known to be no option, no program and no trick on a terminal.

    Raises:
        declaration-unsafe: It is one.
    """
    if text.startswith("-") or _HELPER.match(text) or len(text) > _LONGEST or not text.isprintable():
        raise SourceError(
            "declaration-unsafe", f"{place} names a source by an address that may run a command.", details=[f"{text[:_LONGEST]!r}"]
        )
    return text
