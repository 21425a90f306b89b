"""
Facts about this machine: hardware, tools, and the hosts that it reaches.

A missing thing is a fact and never an error. Probes run side by side; one that does not answer
within `PATIENCE` counts as unanswered and does not hold up the others.
"""

from __future__ import annotations

import os
import platform
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.process import clean_environment, output

#: Seconds until a probe counts as unanswered; name resolution has no timeout of its own that could
#: be set.
PATIENCE = 4.0

_VERSION = r"(\d+(?:\.\d+)+)"
#: Program → arguments that print its version, and the pattern of the version in that output.
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
    """
    A GPU as its driver names it; *capability* is CUDA's compute capability, ``12.1`` on a GB10.
    """

    name: str
    capability: str
    driver: str


class Endpoint(msgspec.Struct, frozen=True):
    """A host that sources come from; *note* is the reason why it was not reached or not asked."""

    url: str
    reachable: bool
    note: str = ""


class HostInfo(msgspec.Struct, frozen=True):
    """
    One machine.

    Attributes:
        memory: In bytes, as all sizes here; the limit of the container where that is smaller.
        python_headers: Whether extension modules can be compiled against this Python.
        tools: Version by program; a program that is not installed is not in it.
        docker: Version of the Docker daemon that answered, empty when none did.
        container: Kind of the container that this process runs in, empty outside of one.
    """

    processor: str
    cores: int
    architecture: str
    memory: int
    memory_available: int
    disk_free: int
    libc: str
    libc_version: str
    python: str
    python_headers: bool
    gpus: tuple[Gpu, ...]
    tools: dict[str, str]
    docker: str
    container: str
    index: Endpoint
    upstream: Endpoint


def facts(cache: Path, index: str, upstream: str, *, offline: bool = False) -> HostInfo:
    """
    Return the facts of this machine, after at most `PATIENCE` seconds and a little.

    Args:
        cache: The cache directory, whose file system must hold what is built.
        index: Address of the package index.
        upstream: URL of an upstream git repository.
        offline: Ask neither host.
    """
    import psutil

    from sparkwright.builder.environment import toolchain
    from sparkwright.core.http import redact_credentials

    probes: dict[str, Callable[[], Any]] = {
        **{f"tool {name}": partial(tool_version, name) for name in TOOLS},
        "gpus": gpus,
        "processor": processor,
        "docker": lambda: command_output(
            "docker", "version", "--format", "{{.Server.Version}}"
        ).strip(),
    }
    if not offline:
        probes |= {"index": partial(reach_index, index), "upstream": partial(reach_git, upstream)}
    answers = run_probes(probes, PATIENCE)
    note = "not asked, because of --offline" if offline else f"no answer within {PATIENCE:g} s"
    memory = psutil.virtual_memory()
    limit = min(_memory_limit() or memory.total, memory.total)
    libc, libc_version = platform.libc_ver()
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    return HostInfo(
        processor=answers.get("processor") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        memory=limit,
        memory_available=min(memory.available, limit),
        disk_free=shutil.disk_usage(existing).free,
        libc=libc or "unknown",
        libc_version=libc_version,
        python=platform.python_version(),
        python_headers=toolchain.python_header().exists(),
        gpus=answers.get("gpus", ()),
        tools={name: version for name in TOOLS if (version := answers.get(f"tool {name}"))},
        docker=answers.get("docker", ""),
        container=_container(),
        index=answers.get("index", Endpoint(redact_credentials(index), reachable=False, note=note)),
        upstream=answers.get(
            "upstream", Endpoint(redact_credentials(upstream), reachable=False, note=note)
        ),
    )


def run_probes(probes: Mapping[str, Callable[[], Any]], patience: float) -> dict[str, Any]:
    """
    Run *probes* side by side and return the results that arrive within *patience* seconds, by name.
    """
    arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    for name, probe in probes.items():
        # A daemon thread, because one that hangs in name resolution must not keep the program from
        # ending.
        threading.Thread(
            target=lambda name=name, probe=probe: arrived.put((name, probe())), daemon=True
        ).start()
    answers: dict[str, Any] = {}
    end = time.monotonic() + patience
    while len(answers) < len(probes) and (left := end - time.monotonic()) > 0:
        try:
            name, answer = arrived.get(timeout=left)
        except queue.Empty:
            break
        answers[name] = answer
    return answers


def command_output(*command: str) -> str:
    """Return the output of *command*, empty when it is missing, fails or takes too long."""
    try:
        return output(command, env=clean_environment(), timeout=PATIENCE - 1)
    except (SparkwrightError, OSError):
        return ""


def tool_version(name: str) -> str:
    """Return the version of the program *name*, empty when it is not installed or does not run."""
    arguments, pattern = TOOLS[name]
    match = re.search(pattern, command_output(name, *arguments))
    return match[1] if match else ""


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that the NVIDIA driver shows."""
    query = ("--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    rows = command_output("nvidia-smi", *query).splitlines()
    fields = ([field.strip() for field in row.split(",")] for row in rows)
    return tuple(Gpu(*row) for row in fields if len(row) == 3)


def processor() -> str:
    """Return the names of the CPU's kinds of core (a GB10 has two)."""
    names = re.findall(r"^\s*Model name:\s*(.+?)\s*$", command_output("lscpu"), re.MULTILINE)
    return " + ".join(dict.fromkeys(names))


def _memory_limit() -> int:
    """Return the control group's limit in bytes, 0 without one."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text("ascii"))
    except (OSError, ValueError):
        return 0


def _container() -> str:
    """Return the kind of container that this process runs in, as its runtime marks it."""
    for name, mark in (("docker", Path("/.dockerenv")), ("podman", Path("/run/.containerenv"))):
        if mark.exists():
            return name
    return os.environ.get("container", "")  # noqa: SIM112  systemd's own spelling (systemd.io/CONTAINER_INTERFACE)


def reach_index(url: str) -> Endpoint:
    """
    Return whether the package index at *url* has the page of a small project that every index has.
    """
    import requests

    from sparkwright.core.http import redact_credentials

    page = f"{url.rstrip('/')}/packaging/"
    try:
        status = requests.head(page, timeout=PATIENCE - 1, allow_redirects=True).status_code
    except requests.RequestException as error:
        return Endpoint(redact_credentials(url), reachable=False, note=type(error).__name__)
    return Endpoint(
        redact_credentials(url), status < 400, "" if status < 400 else f"HTTP status {status}"
    )


def reach_git(url: str) -> Endpoint:
    """Return whether the repository at *url* has a HEAD, without the user's git configuration."""
    from sparkwright.core.http import redact_credentials

    environment = clean_environment(
        GIT_TERMINAL_PROMPT="0",
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_SSH_COMMAND="ssh -oBatchMode=yes",
    )
    command = ["git", "ls-remote", "--quiet", "--", url, "HEAD"]
    try:
        output(command, env=environment, timeout=PATIENCE - 1)
    except SparkwrightError as error:
        line = (error.details or (error.what,))[-1]
        note = line.removeprefix("fatal: ").rpartition("': ")[2]
        return Endpoint(redact_credentials(url), reachable=False, note=note)
    return Endpoint(redact_credentials(url), reachable=True)
