"""
Facts about this machine: hardware, tools, and the hosts that it reaches.

A missing thing is a fact and never an error. Probes run side by side; one that does not answer
within `PATIENCE` counts as unanswered and does not hold up the others.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.core import process
from sparkwright.core.errors import CommandError

#: Seconds until a probe counts as unanswered; name resolution has no timeout of its own that could
#: be set.
PATIENCE = 4.0
#: Programs whose version is a fact → the arguments that print it; of docker, the daemon's.
TOOLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("git", "g++", "aarch64-linux-gnu-g++", "ccache"), ("--version",)),
    "docker": ("version", "--format", "{{.Server.Version}}"),
}


class GpuInfo(msgspec.Struct, frozen=True):
    """
    A GPU as its driver names it; *capability* is CUDA's compute capability, ``12.1`` on a GB10.
    """

    name: str
    capability: str
    driver: str


def facts(cache: Path, index: str, upstream: str) -> dict[str, Any]:
    """
    Return the facts of this machine by name, after at most `PATIENCE` seconds and a little.

    Sizes are in bytes; the version of a program that is not installed is empty.

    Args:
        cache: The cache directory.
        index: Address of the package index; empty to ask none.
        upstream: Address of an upstream git repository; empty to ask none.
    """
    probes: dict[str, Callable[[], Any]] = {
        **{name: partial(tool_version, name) for name in TOOLS},
        "gpus": gpus,
        "package index": lambda: bool(index) and index_answers(index),
        "upstream host": lambda: bool(upstream) and repository_answers(upstream),
    }
    libc, version = platform.libc_ver()
    header = Path(sysconfig.get_path("include"), "Python.h")
    return {
        **dict.fromkeys(probes),
        **run_probes(probes, PATIENCE),
        "machine": platform.machine(),
        "glibc": version if libc == "glibc" else "",
        "cores": len(os.sched_getaffinity(0)),
        "memory": process.memory_limit(),
        "disk": shutil.disk_usage(cache).free,
        # One package stands for all of them.
        "part full": importlib.util.find_spec("pypi_simple") is not None,
        "Python headers": platform.python_version() if header.exists() else "",
    }


def run_probes(probes: Mapping[str, Callable[[], Any]], patience: float) -> dict[str, Any]:
    """
    Run *probes* side by side and return the results that arrive within *patience* seconds, by name.
    """
    results: dict[str, Any] = {}

    def run(name: str, probe: Callable[[], Any]) -> None:
        results[name] = probe()

    # Daemon threads, because one that hangs in name resolution must not keep the program alive.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in probes.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return dict(results)


def command_output(*command: str, **variables: str) -> str:
    """Return the output of *command*, empty when it is missing, fails or takes too long."""
    try:
        return process.output(
            command, env=process.clean_environment(**variables), timeout=PATIENCE - 1
        )
    except CommandError:
        return ""


def tool_version(name: str) -> str:
    """Return the version of the program *name*, empty if it is not installed or does not run."""
    match = re.search(r"\d+(?:\.\d+)+", command_output(name, *TOOLS[name]))
    return match[0] if match else ""


def gpus() -> tuple[GpuInfo, ...]:
    """Return the GPUs that the NVIDIA driver shows."""
    query = ("--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    rows = command_output("nvidia-smi", *query).splitlines()
    fields = ([field.strip() for field in row.split(",")] for row in rows)
    return tuple(GpuInfo(*row) for row in fields if len(row) == 3)


def processor() -> str:
    """Return the names of the CPU's kinds of core (a GB10 has two)."""
    names = re.findall(r"^\s*Model name:\s*(.+?)\s*$", command_output("lscpu"), re.MULTILINE)
    return " + ".join(dict.fromkeys(names))


def index_answers(url: str) -> bool:
    """
    Return whether the package index at *url* has the page of a small project that every index has.
    """
    import requests

    try:
        return requests.head(
            f"{url.rstrip('/')}/packaging/", timeout=PATIENCE - 1, allow_redirects=True
        ).ok
    except requests.RequestException:
        return False


def repository_answers(url: str) -> bool:
    """Return whether the git repository at *url* has a HEAD, without the user's configuration."""
    head = command_output(
        *("git", "ls-remote", "--", url, "HEAD"),
        GIT_TERMINAL_PROMPT="0",
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_SSH_COMMAND="ssh -oBatchMode=yes",
    )
    return bool(head)
