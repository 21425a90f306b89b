"""The state that a job begins in, and that the machine is brought back to after it, whatever the job or a killed run left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.builder import host_info
from sparkwright.core import process
from sparkwright.core.console import console, size
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner import emptied, holding, processes
from sparkwright.operate.runner.emptied import Emptied
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.journal import Entry, now


class Cleaned(msgspec.Struct, frozen=True):
    """What a clean-up did: files, and processes that it had to *end*."""

    files: Emptied
    ended: int


def clean(ground: Ground) -> Cleaned:
    """
    End every process of jobs, and remove every file of theirs.

    Raises:
        runner-unclean: Something is left.
    """
    ended, left = processes.end(ground.whose, user=ground.uid)
    files = emptied.empty(ground.work)
    for folder in ground.policy.folders.scratch if ground.uid != os.getuid() else ():
        files += emptied.empty(ground.at(folder), ground.uid)
    if left or files.stubborn:
        raise LabError("runner-unclean", "A job left what does not go away.", details=[*processes.shown(left), *files.stubborn[:20]])
    return Cleaned(files, ended)


def unready(ground: Ground) -> Iterator[str]:
    """Yield why no job should begin now."""
    room = ground.policy.room
    for name, folder, least in (("the work folder", ground.work, room.work_start), ("the disk", ground.state, room.disk_floor)):
        if (free := shutil.disk_usage(folder).free // 1_000_000) < least:
            yield f"{name} has {free} MB free, and {least} are asked for ({folder})"
    models = ground.models.stat()
    if ground.root and (models.st_uid != 0 or models.st_mode & 0o022):
        yield f"others than root can write to {ground.models}"
    if (free := process.available_megabytes()) < room.memory_start:
        yield f"{free} MB of memory are available, and {room.memory_start} are asked for"
    query = ("--query-compute-apps=pid,process_name", "--format=csv,noheader")
    for line in host_info.command_output("nvidia-smi", *query).splitlines():
        yield f"the GPU is used by {line.strip()}"


def print_of(models: Path) -> str:
    """Return what the models are known by: names, sizes, times and owners of all files; their bytes are not read."""
    digest = hashlib.sha256()
    for place, folders, files in os.walk(models):
        folders.sort()
        for name in sorted((*files, *folders)):
            with contextlib.suppress(FileNotFoundError):
                found = Path(place, name).lstat()
                # Of folders nothing but that they are there: reading one changes nothing, and neither does mounting one.
                facts = (found.st_size, found.st_mtime_ns, found.st_ino) if not stat.S_ISDIR(found.st_mode) else ()
                digest.update(repr((place, name, found.st_mode, found.st_uid, *facts)).encode())
    return digest.hexdigest()


def recover(ground: Ground) -> None:
    """Clean after a run that was killed, and say so in the journal."""
    died = ground.journal().unfinished()
    if died is None:
        clean(ground)
        return
    done = clean(ground)
    says = f"it began at {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(died.at))} UTC and was killed"
    console.warn(f"run {died.run} has no end: {says}; cleaned {size(done.files.bytes)}, ended {done.ended} processes")
    entry = Entry(now(), died.run, "died", died.name, says=says, reference="runner-died")
    ground.journal().write(msgspec.structs.replace(entry, cleaned=done.files.bytes, ended=done.ended))


def stop_taking(ground: Ground, patience: float) -> None:
    """
    Let the machine take no job any more, and return when none runs; `draining` says so until it is removed.

    Raises:
        runner-busy: A job still runs after *patience* seconds.
    """
    ground.draining.touch(mode=0o600)
    with holding.wanting(ground), holding.machine(ground, patience):
        pass
