"""
Questions to this machine, each answered within a fixed time.

No probe may hold up the others: they run side by side, and one that has not answered in time is taken for a no.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.process import clean_environment, output

#: Seconds after which a probe counts as unanswered; name resolution has no timeout of its own that could be set.
PATIENCE = 4.0

_VERSION = r"(\d+(?:\.\d+)+)"
#: How each program says its version, and where in the answer it stands.
TOOLS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "git": (("--version",), _VERSION),
    "gcc": (("-dumpfullversion",), _VERSION),
    "g++": (("-dumpfullversion",), _VERSION),
    "aarch64-linux-gnu-g++": (("-dumpfullversion",), _VERSION),
    "nvcc": (("--version",), rf"V{_VERSION}"),
    "cmake": (("--version",), _VERSION),
    "ninja": (("--version",), _VERSION),
    "ccache": (("--version",), _VERSION),
    "docker": (("--version",), _VERSION),
}


class Gpu(msgspec.Struct, frozen=True):
    """A GPU as its driver names it; *capability* is CUDA's compute capability, ``12.1`` on a GB10."""

    name: str
    capability: str
    driver: str


class Place(msgspec.Struct, frozen=True):
    """A host that sources come from; *note* says why it was not reached, or that nobody asked."""

    url: str
    reachable: bool
    note: str = ""


def answers(probes: Mapping[str, Callable[[], Any]], patience: float) -> dict[str, Any]:
    """Run *probes* side by side and return what those have answered that did so within *patience* seconds."""
    arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    for name, probe in probes.items():
        # A daemon thread: one that hangs in name resolution must not keep the program from ending.
        threading.Thread(target=_answer, args=(arrived, name, probe), daemon=True).start()
    found: dict[str, Any] = {}
    end = time.monotonic() + patience
    while len(found) < len(probes) and (left := end - time.monotonic()) > 0:
        try:
            name, answer = arrived.get(timeout=left)
        except queue.Empty:
            break
        found[name] = answer
    return found


def _answer(arrived: queue.SimpleQueue[tuple[str, Any]], name: str, probe: Callable[[], Any]) -> None:
    arrived.put((name, probe()))


def ask(*command: str, **environment: str) -> str:
    """Return what *command* prints, or nothing when it is missing, fails or takes too long."""
    try:
        return output(command, env=clean_environment(**environment), timeout=PATIENCE - 1)
    except (SparkwrightError, OSError):
        return ""


def tool_version(name: str) -> str:
    """Return the version of the program *name*, empty when it is not installed or does not run."""
    arguments, pattern = TOOLS[name]
    found = re.search(pattern, ask(name, *arguments))
    return found.group(1) if found else ""


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that the NVIDIA driver shows."""
    rows = ask("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader").splitlines()
    fields = ([field.strip() for field in row.split(",")] for row in rows)
    return tuple(Gpu(*row) for row in fields if len(row) == 3)


def processor() -> str:
    """Return the names of the CPU's kinds of core (a GB10 has two)."""
    names = re.findall(r"^\s*Model name:\s*(.+?)\s*$", ask("lscpu"), re.MULTILINE)
    return " + ".join(dict.fromkeys(names))


def docker_daemon() -> str:
    """Return the version of the Docker daemon, empty when none answers."""
    return ask("docker", "version", "--format", "{{.Server.Version}}").strip()


def memory_limit() -> int:
    """Return the control group's limit in bytes, 0 without one."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text("ascii"))
    except (OSError, ValueError):
        return 0


def container() -> str:
    """Return the kind of container that this process is in, as its runtime marks it."""
    for name, mark in (("docker", Path("/.dockerenv")), ("podman", Path("/run/.containerenv"))):
        if mark.exists():
            return name
    return os.environ.get("container", "")  # noqa: SIM112  systemd's own spelling (systemd.io/CONTAINER_INTERFACE)


def reach_index(url: str) -> Place:
    """Ask the package index at *url* for the page of a small project that every index has."""
    import requests

    from sparkwright.forks.package_index import shown

    try:
        status = requests.head(f"{url.rstrip('/')}/packaging/", timeout=PATIENCE - 1, allow_redirects=True).status_code
    except requests.RequestException as error:
        return Place(shown(url), reachable=False, note=type(error).__name__)
    return Place(shown(url), reachable=status < 400, note="" if status < 400 else f"HTTP status {status}")


def reach_git(url: str) -> Place:
    """Ask the repository at *url* for its HEAD, with the user's git configuration left out as everywhere here."""
    from sparkwright.forks.package_index import shown

    environment = clean_environment(
        GIT_TERMINAL_PROMPT="0", GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1", GIT_SSH_COMMAND="ssh -oBatchMode=yes"
    )
    try:
        output(["git", "ls-remote", "--quiet", "--", url, "HEAD"], env=environment, timeout=PATIENCE - 1)
    except SparkwrightError as error:
        said = (error.details or (error.what,))[-1]
        return Place(shown(url), reachable=False, note=said.removeprefix("fatal: ").rpartition("': ")[2])
    return Place(shown(url), reachable=True)
