"""
Run one compiler call and record what it cost: the compiler launcher of CMake.

A copy of this file stands before every compiler (``CMAKE_<LANG>_COMPILER_LAUNCHER``). It runs
alone, once for each unit, on the standard library. These environment variables are set while ninja
runs:

- ``SPARKWRIGHT_CALLS``: the file that gets one JSON line for each call. Without it, as in CMake's
  own trials, the compiler takes the place of the launcher.
- ``SPARKWRIGHT_CCACHE``: the path of ccache, if the call goes through it.
- ``SPARKWRIGHT_PATIENCE``: the seconds without any use of the CPU after which a compiler hangs.

Launcher and compiler stay in the process group that ninja made for them, so that the signals by
which ninja ends its jobs reach both.
"""

from __future__ import annotations

# `json`, `signal` and `pathlib` would take longer to import than all that happens here.
# ruff: noqa: PTH108, PTH110, PTH115, PTH123, PTH208
import _json
import _signal  # type: ignore[import-not-found]  # typeshed does not describe it
import os
import select
import sys
import time

#: Most seconds between two looks at ninja and the compiler.
INTERVAL = 5.0
#: Clock ticks of CPU below which a compiler counts as idle.
IDLE_TICKS = 10


def argument(command: list[str], option: str) -> str:
    """Return the argument that follows *option* in *command*, or an empty string."""
    return command[command.index(option) + 1] if option in command[:-1] else ""


def stat(process: str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name (proc(5)), or nothing if it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stream:
            # The name may hold blanks.
            return stream.read().rpartition(") ")[2].split()
    except OSError:
        return []


def cpu_ticks(group: str) -> int:
    """Return the clock ticks of CPU that the other processes of this process group have used."""
    own, ticks = os.readlink("/proc/self"), 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != own and (fields := stat(name))[2:3] == [group]:
            # utime, stime, and those of children that were waited for.
            ticks += sum(map(int, fields[11:15]))
    return ticks


def wait(child: int, parent: list[str], patience: float) -> bool:
    """
    Wait until *child* ends, and return True, or False if it hangs.

    An orphaned launcher ends its process group: no program waits for the object any more. The
    *parent* of the group's leader is ninja, which starts a shell for each command.
    """
    leader, ticks, since = str(os.getpgrp()), 0, time.monotonic()
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    while not poll.poll(1000 * min(INTERVAL, patience / 10)):
        if stat(leader)[1:2] != parent:
            os.killpg(0, _signal.SIGKILL)
        used = cpu_ticks(leader)
        if used > ticks + IDLE_TICKS:
            ticks, since = used, time.monotonic()
        elif time.monotonic() - since >= patience:
            return False
    return True


def main() -> int:
    """Run the compiler call and return its exit status."""
    command, calls = sys.argv[1:], os.environ.get("SPARKWRIGHT_CALLS", "")
    source, output = argument(command, "-c"), argument(command, "-o")
    if not calls or not source:
        os.execvp(command[0], command)  # noqa: S606  the compiler call itself
    ccache, statistics = os.environ.get("SPARKWRIGHT_CCACHE", ""), f"{calls}.{os.getpid()}"
    try:
        # If memory runs out, the kernel ends a compiler and no other program of this machine.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
            stream.write("500")
    except OSError:
        pass
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    parent = stat(str(os.getpgrp()))[1:2]
    try:
        child = os.posix_spawnp(
            ccache or command[0],
            [ccache, *command] if ccache else command,
            {**os.environ, "CCACHE_STATSLOG": statistics},
            setsigdef=(_signal.SIGPIPE, _signal.SIGXFSZ),  # ignored by Python itself
        )
    except OSError as error:
        os.write(2, os.fsencode(f"{command[0]}: {os.strerror(error.errno or 0)}\n"))
        return 127
    status, seconds, megabytes, hit = 1, 0.0, 0, False
    hung = not wait(child, parent, float(os.environ.get("SPARKWRIGHT_PATIENCE", "inf")))
    if not hung:
        _, ended, used = os.wait4(child, 0)
        status, seconds = os.waitstatus_to_exitcode(ended), used.ru_utime + used.ru_stime
        megabytes = used.ru_maxrss * 1024 // 1_000_000
    if ccache and os.path.exists(statistics):
        with open(statistics, encoding="utf-8", errors="replace") as stream:
            hit = "_cache_hit\n" in stream.read()
        os.unlink(statistics)
    quoted = _json.encode_basestring_ascii
    line = (
        f'{{"unit":{quoted(source)},"output":{quoted(output)},"status":{status},'
        f'"seconds":{seconds:.2f},"megabytes":{megabytes},'
        f'"hit":{str(hit).lower()},"hung":{str(hung).lower()}}}\n'
    )
    try:
        # One write to the end of the file: lines of launchers that end together stay whole.
        record = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(record, line.encode())
    except OSError:
        pass  # a full disk, say; the compiler has more to say about it
    if hung:
        os.killpg(0, _signal.SIGKILL)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
