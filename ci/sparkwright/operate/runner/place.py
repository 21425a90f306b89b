"""The machine that is set up: this one, or one that is being made in a folder."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

#: Seconds that a program of a step may take; making a file system of 200 GB takes some.
PATIENCE = 900.0


class Place(msgspec.Struct, frozen=True):
    """The machine whose root is *root*: this one, or one that is being made in a folder, whose programs are run by chroot."""

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def words(self, words: Sequence[str]) -> list[str]:
        return list(words) if self.root == Path("/") else ["chroot", str(self.root), *words]

    @property
    def live(self) -> bool:
        """Does systemd run here?"""
        return self.path("/run/systemd/system").is_dir()

    def number(self, user: str, *, group: bool = False) -> int | None:
        """Return the number of *user*, or of the group of that name; None where there is none. A chroot has users of its own."""
        with contextlib.suppress(OSError):
            for line in self.path("/etc/group" if group else "/etc/passwd").read_text("utf-8", "replace").splitlines():
                fields = line.split(":")
                if len(fields) > 2 and fields[0] == user and fields[2].isdigit():
                    return int(fields[2])
        return None

    def ask(self, words: Sequence[str], text: str = "") -> tuple[int, str]:
        """Return status and output of a program that reads *text*; 127 where there is none."""
        try:
            done = subprocess.run(
                self.words(words), env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}, input=text,
                capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            return 127, f"{words[0]} is not installed"
        except subprocess.TimeoutExpired:
            return 124, f"{words[0]} did not end within {PATIENCE:g} s"
        return done.returncode, done.stdout + (done.stderr if done.returncode else "")
