"""Steps on a machine, or on a folder that will be one's root: how each stands, doing it, undoing it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from sparkwright.core.console import console
from sparkwright.core.errors import CommandError
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner.place import Place
from sparkwright.operate.runner.steps import (
    Answers,
    AsApplied,
    ByHand,
    Exists,
    File,
    Folder,
    Gone,
    Run,
    Stand,
    State,
    Step,
)


def stand(step: Step, place: Place) -> Stand:
    """Return how *step* stands at *place*, changing nothing."""
    if step.live and not place.live:
        return Stand(step.name, "not-run", "systemd does not run here")
    match step.check:
        case AsApplied():
            return _as_applied(step, place)
        case Exists() as check:
            wrong, there = _exists(check, place), os.path.lexists(place.path(check.path))
            absent: State = "by-hand" if any(isinstance(act, ByHand) for act in step.apply) else "missing"
            return Stand(step.name, "there" if not wrong else "differs" if there else absent, wrong)
        case Answers() as check:
            status, said = place.ask(check.words)
            if status == 0 and re.search(check.pattern, said):
                return Stand(step.name, "there")
            return Stand(step.name, "differs" if status == 0 else "missing", " ".join(said.split())[:200])


def _as_applied(step: Step, place: Place) -> Stand:
    made = [act for act in step.apply if isinstance(act, Folder | File)]
    wrong = [text for act in made if (text := differs(act, place))]
    missing = all(not os.path.lexists(place.path(act.path)) for act in made)
    return Stand(step.name, "missing" if missing else "differs" if wrong else "there", "; ".join(wrong))


def differs(act: Folder | File, place: Place) -> str:
    """Return in what the folder or file at *place* differs from *act*; nothing where it does not."""
    path = place.path(act.path)
    try:
        found = path.lstat()
    except OSError:
        return f"{act.path} is not there"
    kind = stat.S_ISDIR if isinstance(act, Folder) else stat.S_ISREG
    if not kind(found.st_mode):
        return f"{act.path} is no {'folder' if isinstance(act, Folder) else 'plain file'}"
    if stat.S_IMODE(found.st_mode) != act.mode:
        return f"{act.path} has mode {stat.S_IMODE(found.st_mode):04o}, not {act.mode:04o}"
    if found.st_uid != place.number(act.owner):
        return f"{act.path} does not belong to {act.owner}"
    if isinstance(act, File):
        try:
            same = found.st_size == len(act.text.encode()) and path.read_bytes() == act.text.encode()
        except OSError as error:
            return f"{act.path} cannot be read: {error.strerror}"
        return "" if same else f"{act.path} has another text"
    return ""


def _exists(check: Exists, place: Place) -> str:
    path = place.path(check.path)
    try:
        found = path.stat()
    except OSError:
        return f"{check.path} is not there"
    if found.st_uid != 0:
        return f"{check.path} does not belong to root"
    if found.st_mode & 0o022 and not stat.S_ISLNK(path.lstat().st_mode):
        return f"others than root can write {check.path}"
    if check.secret and found.st_mode & 0o077:
        return f"others than root can read {check.path}"
    return ""


def missing_programs(steps: Sequence[Step], place: Place) -> list[str]:
    """Return the programs that *steps* need and that are not at *place*."""
    words = {act.words[0] for step in steps for act in step.apply if isinstance(act, Run) and (place.live or not step.live)}
    folders = ("usr/sbin", "usr/bin", "sbin", "bin")
    return sorted(word for word in words if not any((place.root / folder / word).exists() for folder in folders))


def set_up(steps: Sequence[Step], place: Place, before: Callable[[Step], None] = lambda _: None) -> tuple[Stand, ...]:
    """
    Do every step of *steps* that is not done, in order, and return how each stands afterwards.

    Args:
        before: Called with each step that is about to be done.

    Raises:
        tool-missing: A program that a step needs is not installed; nothing was done.
        runner-setup: A step did not succeed, or its check does not hold after it; what was done stays, and the next run goes on there.
    """
    if missing := missing_programs(steps, place):
        raise CommandError("tool-missing", f"Set-up needs {', '.join(missing)}.", todo=f"apt-get install {' '.join(_packages(missing))}")
    found, changed = [], False
    for step in steps:
        now = stand(step, place)
        # What systemd has read is older than what was just written.
        if now.state == "there" and not (step.live and changed):
            console.note(f"{step.name}: there already")
        elif now.state not in ("by-hand", "not-run"):
            before(step)
            console.note(f"{step.name}: {step.what}")
            for act in step.apply:
                _do(step, act, place)
            changed = True
            now = stand(step, place)
            if now.state not in ("there", "by-hand"):
                raise LabError("runner-setup", f"The step {step.name!r} was done, and does not hold.", details=[now.says])
        found.append(now)
    return tuple(found)


def _packages(programs: Sequence[str]) -> list[str]:
    known = {"nft": "nftables", "mkfs.ext4": "e2fsprogs", "systemctl": "systemd", "useradd": "passwd", "fallocate": "util-linux"}
    return sorted({known.get(program, program) for program in programs})


def take_back(steps: Sequence[Step], place: Place) -> tuple[Stand, ...]:
    """
    Undo *steps*, the last first, and return what is left; what is not there is no error.

    Raises:
        runner-setup: Something that is there does not go.
    """
    found = []
    for step in reversed(steps):
        if step.live and not place.live:
            found.append(Stand(step.name, "not-run", "systemd does not run here"))
            continue
        there = stand(step, place).state != "missing"
        for act in step.undo:
            if isinstance(act, Gone) or there:
                _do(step, act, place)
        found.append(stand(step, place))
    return tuple(found)


def _do(step: Step, act: object, place: Place) -> None:
    try:
        match act:
            case Folder():
                _folder(act, place)
            case File():
                _file(act, place)
            case Gone():
                _gone(place.path(act.path))
            case Run():
                status, said = place.ask(act.words)
                if status:
                    raise LabError(
                        "runner-setup",
                        f"The step {step.name!r} did not succeed: {act.words[0]} ended with status {status}.",
                        details=[" ".join(act.words), *said.splitlines()[-20:]],
                    )
    except OSError as error:
        raise LabError("runner-setup", f"The step {step.name!r} did not succeed.", details=[str(error)]) from error


def _folder(act: Folder, place: Place) -> None:
    path = place.path(act.path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = _owner(act.owner, place)
    # By the open folder: nobody puts a link in its place meanwhile.
    handle = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchown(handle, owner, owner)
        os.fchmod(handle, act.mode)
    finally:
        os.close(handle)


def _file(act: File, place: Place) -> None:
    path = place.path(act.path)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    # One name, so that what a killed run left is what the next one replaces.
    temporary = path.parent / f".{path.name}.new"
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(act.text.encode())
        owner = _owner(act.owner, place)
        os.fchown(stream.fileno(), owner, owner)
        os.fchmod(stream.fileno(), act.mode)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _owner(name: str, place: Place) -> int:
    number = place.number(name)
    if number is None:
        raise FileNotFoundError(f"there is no user {name}")
    return number


def _gone(path: Path) -> None:
    """Remove a file, or a folder that is empty."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            with contextlib.suppress(OSError):
                path.rmdir()
        else:
            path.unlink()
