"""
``sparkwright doctor``: what this machine has, what each verb would do with it, and what to install.

The advice is a pure function of a machine, a cache and a stack, so that tests can ask for machines
that are not here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.builder.compile import costs
from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.builder.host_info import HostInfo, facts
from sparkwright.core.console import console, duration, size
from sparkwright.core.errors import FileError
from sparkwright.core.git_store import Objects
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import ForkLock
from sparkwright.forks.stack import Project

#: ``ready``: works. ``look``: works, with a consequence that a person should know. ``missing``:
#: ends with an error here. ``not-run``: cannot be shown on this machine (DESIGN §7.5).
State = Literal["ready", "look", "missing", "not-run"]

LEAST_MEMORY, LEAST_DISK = 16 * 1024**3, 25_000_000_000
#: The glibc of the platform tag manylinux_2_28, which the official wheels carry.
BASE_GLIBC = (2, 28)
#: The first driver branch for CUDA 13.
CUDA13_DRIVER = 580

TOOLS_SHOWN = ("git", "gcc", "g++", "nvcc", "cmake", "ninja", "ccache")


class VerbAdvice(msgspec.Struct, frozen=True):
    """
    What *verb* would do on a machine; *install* is the command that would change that, where there
    is one.
    """

    verb: str
    state: State
    says: str
    install: str = ""


class CacheContents(msgspec.Struct, frozen=True):
    """
    What the cache directory holds, so that it can be used without a network.

    Attributes:
        sources: A locked source of every fork of the stack.
        tools: Every wheel of the stack's ``pylock.toml``.
        bases: The official wheel of every fork that is grafted.
        demo_tools: Every wheel of the demo's ``pylock.toml``.
    """

    sources: bool
    tools: bool
    bases: bool
    demo_tools: bool


def cache_contents(session: RunContext) -> CacheContents:
    """Return what the store of *session* holds of the stack's and the demo's downloads."""
    from sparkwright import demo

    store, forks = session.store, session.project.spec.forks
    try:
        locks = session.lock.forks
    except FileError:
        locks = {}
    grafted = [name for name, fork in forks.items() if fork.build == "graft"]
    bases = [locks[name].bases.get(session.machine) if name in locks else None for name in grafted]
    demo_project = Project(Path(demo.__file__).parent / "project", "demo")
    return CacheContents(
        sources=all(name in locks and _holds_source(store, locks[name]) for name in forks),
        tools=_holds_tools(store, session.project),
        bases=all(
            base and package_index.path_of(store, base.sha256, base.filename).exists()
            for base in bases
        ),
        demo_tools=_holds_tools(store, demo_project),
    )


def _holds_source(store: Store, lock: ForkLock) -> bool:
    files = [file for file in (lock.sdist, lock.wheel) if file]
    if any(package_index.path_of(store, file.sha256, file.filename).exists() for file in files):
        return True
    if lock.git is None or not lock.whole or not (store.root / "objects.git").is_dir():
        return False
    return Objects(store.root / "objects.git").has(lock.git.tree)


def _holds_tools(store: Store, project: Project) -> bool:
    try:
        wheels = pylock.wheels(project)
    except FileError:
        return False
    return all(
        package_index.path_of(store, sha256, filename).exists() for _, filename, sha256 in wheels
    )


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Print the facts and the advice; missing things are not an error of this verb. With ``--into``,
    see `environments.doctor`.
    """
    if arguments.into is not None:
        from sparkwright.cli import environments

        return environments.doctor(arguments.into, deep=arguments.deep)
    from sparkwright.forks.package_index import index_url

    machine = facts(
        session.store.root,
        index_url(),
        session.mirrored(upstream_url(session.project)),
        offline=session.offline,
    )
    items = advice(machine, session.project, cache_contents(session))
    console.table("This machine", ("fact", "value"), rows(machine), result=True)
    table = [
        (item.verb, item.state, item.says + (f"\n→ {item.install}" if item.install else ""))
        for item in items
    ]
    console.table(
        f"What the verbs would do here with stack {session.project.stack}",
        ("verb", "state", ""),
        table,
        result=True,
    )
    console.document({"machine": machine, "stack": session.project.stack, "advice": items})
    return 0


def upstream_url(project: Project) -> str:
    """Return the repository of the fork that is built last, which stands for all upstream hosts."""
    return next(
        (
            fork.sources.git.url
            for fork in reversed(project.spec.forks.values())
            if fork.sources.git
        ),
        "",
    )


def rows(machine: HostInfo) -> list[tuple[str, str]]:
    """Return the facts as lines of a table."""
    gpus = "\n".join(
        f"{gpu.name}, SM {gpu.capability}, driver {gpu.driver}" for gpu in machine.gpus
    )
    lines = [
        ("processor", f"{machine.processor}, {machine.architecture}, {machine.cores} cores usable"),
        ("memory", f"{size(machine.memory)}, {size(machine.memory_available)} of it available"),
        ("disk", f"{size(machine.disk_free)} free at the cache directory"),
        ("GPU", gpus or "none"),
        ("C library", f"{machine.libc} {machine.libc_version}".strip()),
        ("Python", f"{machine.python}, {'with' if machine.python_headers else 'without'} headers"),
        ("container", machine.container or "no"),
        ("Docker daemon", machine.docker or "none answers"),
    ]
    lines += [(name, machine.tools.get(name, "not installed")) for name in TOOLS_SHOWN]
    for title, host in (("package index", machine.index), ("upstream host", machine.upstream)):
        lines.append(
            (
                title,
                f"{host.url} answers" if host.reachable else f"{host.url} not reached: {host.note}",
            )
        )
    return lines


def compiled_fork(project: Project) -> str:
    """Return the fork that compiles the most."""
    forks = toolchain.spec(project).forks
    return max(forks, key=lambda name: forks[name].seconds)


def jobs(machine: HostInfo, project: Project) -> int:
    """Return how many units compile side by side when each may be the largest."""
    return costs.parallel_units(
        toolchain.spec(project).forks[compiled_fork(project)], machine.cores, machine.memory
    )


def advice(machine: HostInfo, project: Project, cache: CacheContents) -> tuple[VerbAdvice, ...]:
    """
    Return what each verb would do on *machine* with the stack of *project*, in the order of the
    verbs.
    """
    audit = "reads wheels with cuobjdump and nvdisasm, which come from the package index"
    items = (
        *_sources(machine),
        *_compiling(machine, project),
        VerbAdvice("audit", "ready", audit),
        _demo(machine),
        *_gates(machine, project),
    )
    if machine.index.reachable:
        return items
    sources = cache.sources or machine.upstream.reachable
    lacking = {
        "apply": _lacking(sources=sources),
        "plan": _lacking(sources=sources, tools=cache.tools),
        "build": _lacking(sources=sources, tools=cache.tools, bases=cache.bases),
        "audit": _lacking(tools=cache.tools),
        "demo": _lacking(tools=cache.demo_tools),
    }
    return tuple(_without_index(machine, items, lacking))


def _lacking(*, sources: bool = True, tools: bool = True, bases: bool = True) -> list[str]:
    held = {"sources": sources, "tools": tools, "official wheels": bases}
    return [name for name, present in held.items() if not present]


def _without_index(
    machine: HostInfo, items: tuple[VerbAdvice, ...], lacking: dict[str, list[str]]
) -> Iterator[VerbAdvice]:
    """Yield *items*, but one ``missing`` for each verb whose downloads are not in the cache."""
    reported = set()
    for item in items:
        names = lacking.get(item.verb)
        if not names or item.state == "missing":
            yield item
        elif item.verb not in reported:
            reported.add(item.verb)
            reason = f"the package index was not reached ({machine.index.note})"
            says = f"{reason}, and the cache directory lacks {' and '.join(names)}"
            yield VerbAdvice(item.verb, "missing", says)


def _sources(machine: HostInfo) -> Iterator[VerbAdvice]:
    if not machine.index.reachable:
        note = f"the package index was not reached ({machine.index.note})"
        yield VerbAdvice("lock", "missing", note)
        yield VerbAdvice(
            "fetch", "look", f"{note}: only what is in the cache directory can be used"
        )
    elif not machine.upstream.reachable:
        yield VerbAdvice(
            "lock",
            "look",
            f"would lock the package index; git commits stay unresolved ({machine.upstream.note})",
        )
        yield VerbAdvice(
            "fetch",
            "look",
            "would take releases from the package index; git sources only through --mirror",
        )
    else:
        yield VerbAdvice("lock", "ready", "would ask the upstream hosts and the package index")
        yield VerbAdvice(
            "fetch",
            "ready",
            "would take git sources where their commit is locked, else releases from the package "
            "index",
        )
    if "git" in machine.tools:
        yield VerbAdvice(
            "apply", "ready", "would patch and rewrite in the object database, in seconds"
        )
    else:
        yield VerbAdvice("apply", "missing", "needs git", _apt(machine, "git"))


def _compiling(machine: HostInfo, project: Project) -> Iterator[VerbAdvice]:
    if blocker := _blocker(machine, project):
        yield msgspec.structs.replace(blocker, verb="plan")
        yield msgspec.structs.replace(blocker, verb="build")
        return
    yield VerbAdvice(
        "plan",
        "ready",
        "would configure vLLM with torch and CUDA from the package index (5.5 GB on first use), "
        "in minutes",
    )
    names = ", ".join(project.spec.forks)
    count = jobs(machine, project)
    says = (
        f"would make {names} for {machine.architecture} with {count} job{'s' if count > 1 else ''}"
    )
    fork = compiled_fork(project)
    took = duration(costs.build_seconds(project, fork, count))
    yield VerbAdvice(
        "build",
        "ready",
        f"{says}; about {took} for {fork}, estimated from times of two x86-64 cores",
    )
    yield from _crossing(machine, project)
    if machine.memory < LEAST_MEMORY:
        says = f"{size(machine.memory)} of memory is less than {size(LEAST_MEMORY)}"
        yield VerbAdvice(
            "build", "look", f"{says}, and the largest units alone take more than half of that"
        )
    if machine.disk_free < LEAST_DISK:
        says = f"{size(machine.disk_free)} of free disk is less than {size(LEAST_DISK)}"
        yield VerbAdvice("build", "look", f"{says}; --cache-dir chooses another place")
    if glibc(machine) > BASE_GLIBC:
        tag = "_".join(map(str, glibc(machine)))
        says = (
            f"the vLLM wheel's tag may be raised as far as manylinux_{tag}, where its "
            f"libraries want what only a newer system has"
        )
        yield VerbAdvice("build", "look", says)


def _crossing(machine: HostInfo, project: Project) -> Iterator[VerbAdvice]:
    """Say whether the wheels of a Spark can be made on another machine."""
    other = "aarch64"
    if machine.architecture == other or not any(
        other in fork.bases for fork in project.spec.forks.values()
    ):
        return
    if version := machine.tools.get(f"{cross.triple(other)}-g++"):
        says = (
            f"with --target {other}: the wheels of a Spark, by g++ {version} for {other} (4.5 "
            f"GB more on first use)"
        )
        yield VerbAdvice("build", "ready", says)
    else:
        yield VerbAdvice(
            "build",
            "look",
            f"--target {other} needs a cross compiler",
            _apt(machine, cross.package(other)),
        )


def _blocker(machine: HostInfo, project: Project) -> VerbAdvice | None:
    """Return what makes compiling impossible here, if anything does."""
    if machine.libc != "glibc":
        return VerbAdvice(
            "",
            "missing",
            f"the official wheels are for glibc, and the C library here is {machine.libc}",
        )
    for name, fork in project.spec.forks.items():
        if fork.build == "graft" and machine.architecture not in fork.bases:
            known = ", ".join(fork.bases)
            return VerbAdvice(
                "",
                "missing",
                f"the stack has no base wheel of {name} for {machine.architecture}, only for "
                f"{known}",
            )
    if not machine.python_headers:
        return VerbAdvice(
            "",
            "missing",
            "needs the headers of this Python, for the extension modules",
            _apt(machine, "python3-dev"),
        )
    return _compiler(machine) or (
        None
        if "git" in machine.tools
        else VerbAdvice("", "missing", "needs git", _apt(machine, "git"))
    )


def _compiler(machine: HostInfo) -> VerbAdvice | None:
    if {"gcc", "g++"} <= machine.tools.keys():
        return None
    return VerbAdvice(
        "",
        "missing",
        "needs a C++ compiler; nvcc, cmake and ninja come from the package index",
        _apt(machine, "g++"),
    )


def _apt(machine: HostInfo, package: str) -> str:
    """Return how Debian and Ubuntu install *package*; containers run as root and have no sudo."""
    return f"{'' if machine.container else 'sudo '}apt-get install -y {package}"


def glibc(machine: HostInfo) -> tuple[int, ...]:
    """Return the version of glibc as numbers, nothing where the C library is another one."""
    return (
        tuple(int(part) for part in machine.libc_version.split(".") if part.isdigit())
        if machine.libc == "glibc"
        else ()
    )


def _demo(machine: HostInfo) -> VerbAdvice:
    if missing := _compiler(machine):
        return msgspec.structs.replace(missing, verb="demo")
    return VerbAdvice(
        "demo",
        "ready",
        "would take three miniature upstreams through every stage, in about two minutes",
    )


def _gates(machine: HostInfo, project: Project) -> Iterator[VerbAdvice]:
    target = project.spec.arch.rstrip("af")
    wheels = f"the wheels are for SM {target}"
    if not machine.gpus:
        says = f"no GPU here: only G0 and G1 can judge the wheels, and {wheels}"
        yield VerbAdvice("gate", "not-run", says)
    for gpu in machine.gpus:
        if gpu.capability != target:
            says = f"{gpu.name} is SM {gpu.capability}; {wheels}, so G2 is incomplete here"
            yield VerbAdvice("gate", "not-run", says)
        elif int(gpu.driver.partition(".")[0] or 0) < CUDA13_DRIVER:
            says = f"CUDA 13 needs driver {CUDA13_DRIVER} or newer, not {gpu.driver}"
            yield VerbAdvice("gate", "look", says, "sudo ubuntu-drivers install")
        else:
            says = f"{gpu.name} is the GPU that the wheels are for; read the note of each check"
            yield VerbAdvice("gate", "look", says)
