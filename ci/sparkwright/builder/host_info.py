"""
Facts about this machine: what it has, and what it can reach.

A missing thing is a fact and never an error. How each fact is asked for stands in `sparkwright.builder.probes`.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.builder import probes
from sparkwright.builder.environment import toolchain
from sparkwright.builder.probes import Gpu, Place


class Machine(msgspec.Struct, frozen=True):
    """
    One machine.

    Attributes:
        memory: In bytes, as all sizes here; the limit of the container where there is a smaller one.
        python_headers: Whether extension modules can be compiled against this Python.
        tools: Version by program; a program that is not installed is not in it.
        docker: Version of the Docker daemon that answered, empty when none did.
        container: What kind of container this is, empty outside of one.
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
    index: Place
    upstream: Place


def facts(cache: Path, index: str, upstream: str, *, offline: bool = False) -> Machine:
    """
    Ask this machine what it has; takes no longer than `probes.PATIENCE` and a little.

    Args:
        cache: The cache directory, whose file system must hold what is built.
        index: Address of the package index.
        upstream: Url of an upstream git repository.
        offline: Leave both hosts alone.
    """
    import psutil

    from sparkwright.forks.package_index import shown

    questions: dict[str, Callable[[], Any]] = {f"tool {name}": partial(probes.tool_version, name) for name in probes.TOOLS}
    questions |= {"gpus": probes.gpus, "processor": probes.processor, "docker": probes.docker_daemon}
    if not offline:
        questions |= {"index": partial(probes.reach_index, index), "upstream": partial(probes.reach_git, upstream)}
    found = probes.answers(questions, probes.PATIENCE)
    silent = "not asked, because of --offline" if offline else f"no answer within {probes.PATIENCE:g} s"
    memory = psutil.virtual_memory()
    limit = min(probes.memory_limit() or memory.total, memory.total)
    libc, libc_version = platform.libc_ver()
    return Machine(
        processor=found.get("processor") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        memory=limit,
        memory_available=min(memory.available, limit),
        disk_free=shutil.disk_usage(next(place for place in (cache, *cache.absolute().parents) if place.exists())).free,
        libc=libc or "unknown",
        libc_version=libc_version,
        python=platform.python_version(),
        python_headers=toolchain.python_header().exists(),
        gpus=found.get("gpus", ()),
        tools={name: version for name in probes.TOOLS if (version := found.get(f"tool {name}"))},
        docker=found.get("docker", ""),
        container=probes.container(),
        index=found.get("index", Place(shown(index), reachable=False, note=silent)),
        upstream=found.get("upstream", Place(shown(upstream), reachable=False, note=silent)),
    )
