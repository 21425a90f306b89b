"""
Facts about this machine: hardware, tools, and the hosts that it reaches.

A missing thing is a fact and never an error. Probes run side by side; one that does not answer
within `PATIENCE` counts as unanswered and does not hold up the others.
"""

from __future__ import annotations

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
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.http import redact_credentials
from sparkwright.core.process import clean_environment, output

#: Seconds until a probe counts as unanswered; name resolution has no timeout of its own that could
#: be set.
PATIENCE = 4.0

#: Program → argument that prints its version.
TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("gcc", "g++", "aarch64-linux-gnu-g++"), "-dumpfullversion"),
    **dict.fromkeys(("git", "nvcc", "cmake", "ninja", "ccache", "docker"), "--version"),
}


class GpuInfo(msgspec.Struct, frozen=True):
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
    gpus: tuple[GpuInfo, ...]
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

    probes: dict[str, Callable[[], Any]] = {
        **{f"tool {name}": partial(tool_version, name) for name in TOOLS},
        "gpus": gpus,
        "processor": processor,
        "docker": partial(command_output, "docker", "version", "--format", "{{.Server.Version}}"),
    }
    if not offline:
        probes |= {"index": partial(reach_index, index), "upstream": partial(reach_git, upstream)}
    answers = run_probes(probes, PATIENCE)
    note = "not asked, because of --offline" if offline else f"no answer within {PATIENCE:g} s"
    memory, libc = process.memory_limit(), platform.libc_ver()
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    return HostInfo(
        processor=answers.get("processor") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        memory=memory,
        memory_available=min(psutil.virtual_memory().available, memory),
        disk_free=shutil.disk_usage(existing).free,
        libc=libc[0] or "unknown",
        libc_version=libc[1],
        python=platform.python_version(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        gpus=answers.get("gpus", ()),
        tools={name: version for name in TOOLS if (version := answers.get(f"tool {name}"))},
        docker=answers.get("docker", "").strip(),
        container=_container(),
        index=answers.get("index") or Endpoint(redact_credentials(index), False, note),
        upstream=answers.get("upstream") or Endpoint(redact_credentials(upstream), False, note),
    )


def run_probes(probes: Mapping[str, Callable[[], Any]], patience: float) -> dict[str, Any]:
    """
    Run *probes* side by side and return the results that arrive within *patience* seconds, by name.
    """
    answers: dict[str, Any] = {}

    def run(name: str, probe: Callable[[], Any]) -> None:
        answers[name] = probe()

    # Daemon threads, because one that hangs in name resolution must not keep the program alive.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in probes.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return dict(answers)


def command_output(*command: str) -> str:
    """Return the output of *command*, empty when it is missing, fails or takes too long."""
    try:
        return output(command, env=clean_environment(), timeout=PATIENCE - 1)
    except (SparkwrightError, OSError):
        return ""


def tool_version(name: str) -> str:
    """Return the version of the program *name*, empty if it is not installed or does not run."""
    match = re.search(r"\d+(?:\.\d+)+", command_output(name, TOOLS[name]))
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

    page, shown = f"{url.rstrip('/')}/packaging/", redact_credentials(url)
    try:
        status = requests.head(page, timeout=PATIENCE - 1, allow_redirects=True).status_code
    except requests.RequestException as error:
        return Endpoint(shown, reachable=False, note=type(error).__name__)
    return Endpoint(shown, status < 400, "" if status < 400 else f"HTTP status {status}")


def reach_git(url: str) -> Endpoint:
    """Return whether the repository at *url* has a HEAD, without the user's git configuration."""
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
