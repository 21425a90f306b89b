"""
Stands in front of every compiler call of a build: lets it start when its memory is free, and writes down what it cost.

CMake calls it as the compiler launcher; it runs alone, with the standard library only, so that it starts in milliseconds
and its place in the command lines does not depend on where sparkwright is installed.
"""

import fcntl
import itertools
import json
import os
import pathlib
import resource
import signal
import sys
import time
from typing import Any, TextIO


def unit_of(command: list[str], root: str) -> str:
    """Return the source file of a compiler call, relative to the source tree; empty when it compiles none."""
    for flag, value in itertools.pairwise(command):
        if flag == "-c":
            return value.removeprefix(root)
    return ""


def expected(unit: str, plan: dict[str, Any]) -> int:
    """Return the megabytes that the unit is expected to hold: its own record, else the first pattern that it matches."""
    if unit in plan["units"]:
        return int(plan["units"][unit])
    return next((int(size) for pattern, size in plan["patterns"] if pathlib.PurePath(unit).match(pattern)), int(plan["default"]))


def held(running: pathlib.Path) -> tuple[int, int]:
    """Return how many other units run and the megabytes they hold; what a dead launcher left behind is removed."""
    count = total = 0
    for slot in running.iterdir():
        try:
            stream = slot.open()
        except FileNotFoundError:  # a launcher that ends removes its slot without the gate
            continue
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                count, total = count + 1, total + int(stream.read() or 0)
            else:
                slot.unlink(missing_ok=True)
    return count, total


def admit(folder: pathlib.Path, size: int, budget: int) -> TextIO:
    """Wait until *size* megabytes are free of *budget*, or until nothing else runs; return the open slot that holds them."""
    running = folder / "running"
    running.mkdir(exist_ok=True)
    while True:
        with (folder / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            others, taken = held(running)
            if others == 0 or taken + size <= budget:
                slot = (running / str(os.getpid())).open("w")
                fcntl.flock(slot, fcntl.LOCK_EX)
                slot.write(str(size))
                slot.flush()
                return slot
        time.sleep(0.2)


def say(folder: pathlib.Path, event: dict[str, Any]) -> None:
    """Append *event* as one line; a line of this length is written whole."""
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps(event) + "\n")


def main() -> int:
    folder, command = pathlib.Path(os.environ["SPARKWRIGHT_LAUNCH"]), sys.argv[1:]
    plan = json.loads((folder / "plan.json").read_text())
    unit = unit_of(command, plan["root"])
    if not unit:
        os.execvp(command[0], command)
    slot = admit(folder, expected(unit, plan), plan["budget"])
    began = time.monotonic()
    say(folder, {"event": "start", "unit": unit})
    child = os.posix_spawnp(command[0], command, os.environ)
    # ninja stops its jobs by a signal to their group; waiting here would otherwise end before the compiler does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(
        folder,
        {
            "event": "end",
            "unit": unit,
            "status": status,
            "seconds": round(time.monotonic() - began, 2),
            "megabytes": used.ru_maxrss // 1024,
        },
    )
    pathlib.Path(slot.name).unlink()
    slot.close()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
