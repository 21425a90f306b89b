"""Where wheels are kept: one interface for the folder of the index itself and for other hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

#: Told what happens next, before it happens; the tests end the program there.
Observe = Callable[[str], None]
#: Told how many bytes have moved, of which file.
Moved = Callable[[int, str], None]


def unobserved(_: str) -> None:
    """Observe nothing."""


def unmoved(_: int, __: str) -> None:
    """Count nothing."""


class Host(Protocol):
    """
    A place that keeps files under names that never change.

    Attributes:
        name: For people and for the journal: ``folder``, ``github:OWNER/REPOSITORY@TAG``.
        sent: Places of the files that this run sent. *there*: of those that were there already, with the same bytes.
    """

    name: str
    sent: list[str]
    there: list[str]

    def ready(self) -> None:
        """
        Look whether the host takes files, sending none.

        Raises:
            github-unreachable, github-refused, github-limited: It cannot be asked.
            release-mutable: It would let somebody replace them.
        """

    def address(self, place: str) -> str:
        """Return where the file for *place* (``files/<sha256>/<filename>``) will be fetched from, as `records.Wheel.url` has it."""

    def put(self, place: str, path: Path, sha256: str, moved: Moved = unmoved) -> str:
        """
        Bring the file at *path* to *place*, read it back, and return its address; nothing is sent where it is there already.

        Raises:
            wheel-name-taken: Other bytes are there under that name.
            publish-failed: The host keeps other bytes than it was sent, or takes no file of that size.
            disk-full: There is no room.
        """

    def finish(self) -> None:
        """
        Make what was put visible to everybody; nothing can be put after it.

        Raises:
            publish-failed: What is there is not what was put.
            release-mutable: Somebody could replace it.
        """

    def remove(self, places: tuple[str, ...]) -> None:
        """Remove the files for *places*, which no index refers to; those that are not there are no error."""
