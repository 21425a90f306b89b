"""
What set-up consists of: steps that say why, how to see that they are done, what does them and what undoes them.

A step is data. It can be printed before anything is done, and what was printed is what `perform` does, word for word.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Folder(msgspec.Struct, frozen=True, tag="folder"):
    """A folder is there, with this mode and owner."""

    path: str
    mode: int = 0o755
    owner: str = "root"


class File(msgspec.Struct, frozen=True, tag="file"):
    """A file has exactly this text; it appears whole or not at all."""

    path: str
    text: str
    mode: int = 0o644
    owner: str = "root"


class Run(msgspec.Struct, frozen=True, tag="run"):
    """A program is run to its end, and must succeed."""

    words: tuple[str, ...]


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A file, or a folder that is empty, is removed; one that holds something stays."""

    path: str


class ByHand(msgspec.Struct, frozen=True, tag="by-hand"):
    """What only a person can do: bring a secret, or a program from elsewhere."""

    says: str


Act = Folder | File | Run | Gone | ByHand


class AsApplied(msgspec.Struct, frozen=True, tag="as-applied"):
    """Every folder and file of the step is there as it says."""


class Exists(msgspec.Struct, frozen=True, tag="exists"):
    """There is a file or folder of root's, which nobody else can write and, where it is *secret*, nobody else can read."""

    path: str
    secret: bool = False


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """A program ends well, and its output fits the regular expression *pattern*."""

    words: tuple[str, ...]
    pattern: str = ""


Check = AsApplied | Exists | Answers


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """
    One step.

    Attributes:
        name: Short, for tables and for ``check``.
        live: It needs a running systemd, which a chroot and most containers have not.
        undo: What takes it back, in the order of doing; what a job left is gone by then.
    """

    name: str
    what: str
    why: str
    check: Check
    apply: tuple[Act, ...]
    undo: tuple[Act, ...] = ()
    live: bool = False


State = Literal["there", "missing", "differs", "by-hand", "not-run"]


class Stand(msgspec.Struct, frozen=True):
    """How a step stands on a machine: *says* what differs."""

    name: str
    state: State
    says: str = ""


def printed(act: Act) -> list[str]:
    """Return *act* as lines that a person could type or paste."""
    import shlex

    match act:
        case Folder():
            return [f"install -d -m {act.mode:04o} -o {act.owner} -g {act.owner} {shlex.quote(act.path)}"]
        case File():
            head = f"write {act.path} (mode {act.mode:04o}, {act.owner}):"
            return [head, *(f"    {line}".rstrip() for line in act.text.splitlines())]
        case Run():
            return [shlex.join(act.words)]
        case Gone():
            return [f"remove {act.path}"]
        case ByHand():
            return [f"by hand: {act.says}"]
