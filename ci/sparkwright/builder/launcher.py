"""
Run one compiler call and record what it cost: the compiler launcher of CMake.

A copy of this file stands before every compiler (``CMAKE_<LANG>_COMPILER_LAUNCHER``). It runs
alone, once for each unit, on the standard library. These environment variables are set while ninja
runs:

- ``SPARKWRIGHT_CALLS``: the file that gets one JSON line for each call that ended. Without it, as
  in CMake's own trials, the compiler takes the place of the launcher.
- ``SPARKWRIGHT_CCACHE``: the path of ccache, if the call goes through it.

Launcher and compiler stay in the process group that ninja made for them, so that the signals by
which ninja ends its jobs reach both.
"""

# `pathlib` would take longer to import than all that happens here.
# ruff: noqa: PTH108, PTH110, PTH118, PTH123
import json
import os
import signal
import sys


def memory_kills() -> str:
    """Return the kernel's count of processes that it killed for memory."""
    try:
        with open("/proc/vmstat", encoding="ascii") as counters:
            return next((line for line in counters if line.startswith("oom_kill ")), "")
    except OSError:
        return ""


def main() -> int:
    """Run the compiler call and return its exit status."""
    command, calls = sys.argv[1:], os.environ.get("SPARKWRIGHT_CALLS")
    if not calls or "-c" not in command:
        os.execvp(command[0], command)  # noqa: S606  the compiler call itself
    ccache = os.environ.get("SPARKWRIGHT_CCACHE")
    statistics = os.path.join(os.environ["TMPDIR"], str(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        # If memory runs out, the kernel ends a compiler and no other program of this machine.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
            stream.write("500")
    except OSError:
        pass
    kills = memory_kills()
    child = os.posix_spawnp(
        ccache or command[0],
        [ccache, *command] if ccache else command,
        {**os.environ, "CCACHE_STATSLOG": statistics},
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # ignored by Python itself
    )
    _, ended, used = os.wait4(child, 0)
    status, megabytes = os.waitstatus_to_exitcode(ended), used.ru_maxrss * 1024 // 1_000_000
    status = status if status >= 0 else 128 - status
    if status:
        os.write(2, f"compiler status {status}, largest process {megabytes} MB\n".encode())
    hit = False
    if os.path.exists(statistics):
        with open(statistics, encoding="utf-8", errors="replace") as stream:
            hit = "_cache_hit\n" in stream.read()
        os.unlink(statistics)  # ccache would append to the file of a later process with the same id
    call = {
        "unit": command[command.index("-c") + 1],
        "seconds": round(used.ru_utime + used.ru_stime, 2),
        "megabytes": megabytes,
        "hit": hit,
        # g++ and nvcc end with the same status for an error and for a part that was killed.
        "killed": status == 128 + signal.SIGKILL or (status > 0 and memory_kills() != kills),
        "good": not status,
    }
    # One write to the end of the file: lines of launchers that end together stay whole.
    record = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(record, f"{json.dumps(call)}\n".encode())
    return status


if __name__ == "__main__":
    sys.exit(main())
