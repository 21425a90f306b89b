"""
Emptying folders that somebody hostile has written to, without following a link out of them.

Everything is done by the handles of open folders. What lies deep is renamed to the top before it is looked into, so that neither the depth
nor the length of a path matters, and no more than two folders are open at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import msgspec

#: Of linux/fs.h: ask for and set a file's flags; the two that keep even root from removing it.
_GET, _SET, _IMMUTABLE, _APPEND = 0x80086601, 0x40086602, 0x10, 0x20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Emptied(msgspec.Struct, frozen=True):
    """What was removed: entries, and the bytes of disk that this gave back; *stubborn* are paths that did not go, with the reason."""

    entries: int = 0
    bytes: int = 0
    stubborn: tuple[str, ...] = ()

    def __add__(self, other: Emptied) -> Emptied:
        return Emptied(self.entries + other.entries, self.bytes + other.bytes, self.stubborn + other.stubborn)


def empty(folder: Path, owner: int | None = None) -> Emptied:
    """
    Remove what lies in *folder*, which itself stays; a folder that is not there is empty.

    Args:
        owner: Remove only entries of this user, and what is in those of them that are folders.
    """
    try:
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return Emptied()
    try:
        return _Work(top, folder).run(owner)
    finally:
        os.close(top)


class _Work:
    def __init__(self, top: int, shown: Path) -> None:
        self._top, self._shown = top, shown
        self._device = os.fstat(top).st_dev
        self._entries = self._bytes = self._moved = 0
        self._stubborn: dict[str, str] = {}
        # Folders that were ours at the top: everything inside them goes, whoever it belongs to.
        self._taken: set[str] = set()

    def run(self, owner: int | None) -> Emptied:
        again = True
        while again:
            again = False
            for name, found in list(self._entries_of(self._top)):
                if name in self._stubborn or not (owner is None or found.st_uid == owner or name in self._taken):
                    continue
                if stat.S_ISDIR(found.st_mode):
                    again |= self._folder(name, found)
                else:
                    self._unlink(self._top, name, found)
        stubborn = tuple(f"{self._shown / name}: {reason}" for name, reason in sorted(self._stubborn.items()))
        return Emptied(self._entries, self._bytes, stubborn)

    def _entries_of(self, handle: int) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(handle) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)

    def _folder(self, name: str, found: os.stat_result) -> bool:
        """Empty and remove a folder of the top, its own folders moved to the top; return whether there are new ones."""
        if found.st_dev != self._device:
            self._stubborn[name] = "another file system is mounted there"
            return False
        before = self._moved
        try:
            handle = self._opened(name)
            try:
                for inner, state in list(self._entries_of(handle)):
                    if stat.S_ISDIR(state.st_mode):
                        self._lift(handle, inner)
                    else:
                        self._unlink(handle, inner, state, top=name)
            finally:
                os.close(handle)
            self._freely(self._top, name, lambda: os.rmdir(name, dir_fd=self._top))
        except OSError as error:
            self._stubborn.setdefault(name, error.strerror or type(error).__name__)
        else:
            self._entries += 1
            self._bytes += found.st_blocks * 512
        return self._moved != before

    def _opened(self, name: str) -> int:
        try:
            handle = os.open(name, _FOLDER, dir_fd=self._top)
        except PermissionError:
            # Not root's: a folder of our own that nobody may read. Links are no folders and never come here.
            os.chmod(name, 0o700, dir_fd=self._top, follow_symlinks=True)
            return os.open(name, _FOLDER, dir_fd=self._top)
        if os.geteuid() != 0:
            # One that may be read and not searched gives names alone.
            with contextlib.suppress(PermissionError):
                os.fchmod(handle, 0o700)
        return handle

    def _lift(self, handle: int, inner: str) -> None:
        """Move the folder *inner* to the top, under a name that nothing has."""
        self._moved += 1
        new = f".emptied-{os.getpid()}-{self._moved}"

        def move() -> None:
            # Without the right to write to it, its ".." could not be changed.
            if os.geteuid() != 0:
                os.chmod(inner, 0o700, dir_fd=handle)
            os.rename(inner, new, src_dir_fd=handle, dst_dir_fd=self._top)

        self._freely(handle, inner, move)
        self._taken.add(new)

    def _unlink(self, handle: int, name: str, found: os.stat_result, top: str = "") -> None:
        try:
            self._freely(handle, name, lambda: os.unlink(name, dir_fd=handle))
        except OSError as error:
            self._stubborn.setdefault(top or name, error.strerror or type(error).__name__)
            return
        self._entries += 1
        # A hard link gives nothing back while another name is left.
        self._bytes += found.st_blocks * 512 if found.st_nlink == 1 else 0

    def _freely(self, handle: int, name: str, do: object) -> None:
        """Do it; where it is not permitted, take the flags from the entry and its folder, make the folder writable, and try again."""
        assert callable(do)
        try:
            do()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES):
                raise
            _unflag(handle)
            with contextlib.suppress(OSError):
                os.fchmod(handle, 0o700) if handle != self._top else None
            # Opening a device or a pipe could do something; opening what is neither file nor folder does not help anyway.
            kind = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
            if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
                with contextlib.suppress(OSError):
                    inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
                    try:
                        _unflag(inner)
                    finally:
                        os.close(inner)
            do()


def _unflag(handle: int) -> None:
    """Take the immutable and the append-only flag from an open file; file systems without flags have nothing to take."""
    with contextlib.suppress(OSError):
        flags = int.from_bytes(ioctl(handle, _GET, bytes(8))[:4], "little")
        if flags & (_IMMUTABLE | _APPEND):
            ioctl(handle, _SET, (flags & ~(_IMMUTABLE | _APPEND)).to_bytes(8, "little"))
