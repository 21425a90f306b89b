"""
``sparkwright doctor``: facts about this machine, and advice about each command.

The advice is a pure function of a machine, a cache and a stack, so that tests can use any
machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright import demo
from sparkwright.builder.compile import costs
from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.builder.host_info import HostInfo, facts
from sparkwright.cli import context, install
from sparkwright.core.console import console, duration, size
from sparkwright.core.errors import FileError
from sparkwright.core.git_store import Objects
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import ForkLock
from sparkwright.forks.stack import Project

#: ``ready``: works. ``look``: works, with a consequence to know about. ``missing``: ends with an
#: error. ``not-run``: cannot run on this machine.
State = Literal["ready", "look", "missing", "not-run"]

LEAST_MEMORY, LEAST_DISK = 16 * 1024**3, 25_000_000_000
#: The glibc of the platform tag manylinux_2_28, which the official wheels carry.
BASE_GLIBC = (2, 28)
#: The first driver branch for CUDA 13.
CUDA13_DRIVER = 580
#: The architecture of a Spark, for which other machines cross-compile.
SPARK = "aarch64"

TOOLS_SHOWN = ("git", "gcc", "g++", "nvcc", "cmake", "ninja", "ccache")


class VerbAdvice(msgspec.Struct, frozen=True):
    """What *verb* would do on a machine, and the command that installs a missing part."""

    verb: str
    state: State
    says: str
    install: str = ""


class CacheContents(msgspec.Struct, frozen=True):
    """
    The downloads in the cache directory, which can be used without a network.

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


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``doctor``."""
    parser = parsers["doctor"]
    parser.set_defaults(run=doctor)
    parser.add_argument(
        "--into",
        type=Path,
        metavar="VENV",
        help="check whether the installed set in this environment was changed",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="with --into: compare every byte, not only sizes and times",
    )


def doctor(arguments: argparse.Namespace) -> int:
    """Print facts and advice, or with ``--into`` the state of an environment."""
    if arguments.into is not None:
        return install.check(arguments.into, deep=arguments.deep)
    session = context.checkout(arguments)
    project = session.project
    repositories = [
        fork.sources.git.url for fork in project.spec.forks.values() if fork.sources.git
    ]
    machine = facts(
        session.store.root,
        package_index.index_url(),
        # One repository stands for all upstream hosts.
        session.mirrored(repositories[-1] if repositories else ""),
        offline=session.offline,
    )
    items = advice(machine, project, cache_contents(session))
    console.table("This machine", ("fact", "value"), _facts(machine), result=True)
    rows = [
        (item.verb, item.state, item.says + (f"\n→ {item.install}" if item.install else ""))
        for item in items
    ]
    console.table(
        f"What the commands would do here with stack {project.stack}",
        ("command", "state", ""),
        rows,
        result=True,
    )
    console.document({"machine": machine, "stack": project.stack, "advice": items})
    return 0


def cache_contents(session: RunContext) -> CacheContents:
    """Return the downloads of the stack and of the demo that the store holds."""
    store, forks = session.store, session.project.spec.forks
    try:
        locks = session.lock.forks
    except FileError:
        locks = {}
    bases = [
        locks[name].bases.get(session.machine) if name in locks else None
        for name, fork in forks.items()
        if fork.build == "graft"
    ]
    demo_project = Project(Path(demo.__file__).parent / "project", "demo")
    return CacheContents(
        sources=all(name in locks and _holds_source(store, locks[name]) for name in forks),
        tools=_holds_tools(store, session.project),
        bases=all(base and _holds(store, base.sha256, base.filename) for base in bases),
        demo_tools=_holds_tools(store, demo_project),
    )


def _holds(store: Store, sha256: str, filename: str) -> bool:
    return package_index.path_of(store, sha256, filename).exists()


def _holds_source(store: Store, lock: ForkLock) -> bool:
    files = [file for file in (lock.sdist, lock.wheel) if file]
    if any(_holds(store, file.sha256, file.filename) for file in files):
        return True
    if lock.git is None or not lock.whole or not (store.root / "objects.git").is_dir():
        return False
    return Objects(store.root / "objects.git").has(lock.git.tree)


def _holds_tools(store: Store, project: Project) -> bool:
    try:
        wheels = pylock.wheels(project)
    except FileError:
        return False
    return all(_holds(store, sha256, filename) for _, filename, sha256 in wheels)


def _facts(machine: HostInfo) -> list[tuple[str, str]]:
    """Return the facts as lines of a table."""
    gpus = [f"{gpu.name}, SM {gpu.capability}, driver {gpu.driver}" for gpu in machine.gpus]
    lines = [
        ("processor", f"{machine.processor}, {machine.architecture}, {machine.cores} cores usable"),
        ("memory", f"{size(machine.memory)}, {size(machine.memory_available)} of it available"),
        ("disk", f"{size(machine.disk_free)} free at the cache directory"),
        ("GPU", "\n".join(gpus) or "none"),
        ("C library", f"{machine.libc} {machine.libc_version}".strip()),
        ("Python", f"{machine.python}, {'with' if machine.python_headers else 'without'} headers"),
        ("container", machine.container or "no"),
        ("Docker daemon", machine.docker or "none answers"),
    ]
    lines += [(name, machine.tools.get(name, "not installed")) for name in TOOLS_SHOWN]
    for title, host in (("package index", machine.index), ("upstream host", machine.upstream)):
        state = "answers" if host.reachable else f"not reached: {host.note}"
        lines.append((title, f"{host.url} {state}"))
    return lines


def advice(machine: HostInfo, project: Project, cache: CacheContents) -> tuple[VerbAdvice, ...]:
    """Return what each command would do on *machine* with the stack of *project*."""
    items = [
        *_sources(machine),
        *_compiling(machine, project),
        VerbAdvice(
            "audit",
            "ready",
            "reads wheels with cuobjdump and nvdisasm, which come from the package index",
        ),
        _missing_compiler(machine, "demo")
        or VerbAdvice(
            "demo",
            "ready",
            "would run every stage on three miniature upstreams, in about two minutes",
        ),
        *_gate(machine, project),
    ]
    if machine.index.reachable:
        return tuple(items)
    sources = cache.sources or machine.upstream.reachable
    lacking = {
        "apply": {"sources": sources},
        "plan": {"sources": sources, "tools": cache.tools},
        "build": {"sources": sources, "tools": cache.tools, "official wheels": cache.bases},
        "audit": {"tools": cache.tools},
        "demo": {"tools": cache.demo_tools},
    }
    items_of: dict[str, list[VerbAdvice]] = {}
    for item in items:
        items_of.setdefault(item.verb, []).append(item)
    for verb, held in lacking.items():
        names = [name for name, present in held.items() if not present]
        if names and items_of[verb][0].state != "missing":
            says = f"{_unreached(machine)}, and the cache directory lacks {' and '.join(names)}"
            items_of[verb] = [VerbAdvice(verb, "missing", says)]
    return tuple(item for own in items_of.values() for item in own)


def _unreached(machine: HostInfo) -> str:
    return f"the package index was not reached ({machine.index.note})"


def _sources(machine: HostInfo) -> Iterator[VerbAdvice]:
    """Yield the advice about ``lock``, ``fetch`` and ``apply``."""
    if not machine.index.reachable:
        note = _unreached(machine)
        yield VerbAdvice("lock", "missing", note)
        yield VerbAdvice("fetch", "look", f"{note}: only the cache directory can be used")
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
            "would take git sources whose commit is locked, else releases from the index",
        )
    yield _missing_git(machine, "apply") or VerbAdvice(
        "apply", "ready", "would patch and rewrite in the object database, in seconds"
    )


def _compiling(machine: HostInfo, project: Project) -> Iterator[VerbAdvice]:
    """Yield the advice about ``plan`` and ``build``."""
    blockers = [_blocker(machine, project, verb) for verb in ("plan", "build")]
    if any(blockers):
        yield from filter(None, blockers)
        return
    yield VerbAdvice(
        "plan",
        "ready",
        "would configure vLLM with torch and CUDA from the package index (5.5 GB on first use), "
        "in minutes",
    )
    forks, count = toolchain.spec(project).forks, jobs(machine, project)
    largest = max(forks, key=lambda name: forks[name].seconds)
    yield VerbAdvice(
        "build",
        "ready",
        f"would make {', '.join(project.spec.forks)} for {machine.architecture} with {count} "
        f"job{'s' if count > 1 else ''}; about "
        f"{duration(costs.build_seconds(project, largest, count))} for {largest}, estimated from "
        f"times of two x86-64 cores",
    )
    bases = [machine for fork in project.spec.forks.values() for machine in fork.bases]
    if machine.architecture != SPARK and SPARK in bases:
        yield _crossing(machine)
    if machine.memory < LEAST_MEMORY:
        yield VerbAdvice(
            "build",
            "look",
            f"{size(machine.memory)} of memory is less than {size(LEAST_MEMORY)}, and the largest "
            f"units alone take more than half of that",
        )
    if machine.disk_free < LEAST_DISK:
        yield VerbAdvice(
            "build",
            "look",
            f"{size(machine.disk_free)} of free disk is less than {size(LEAST_DISK)}; --cache-dir "
            f"chooses another disk",
        )
    glibc = tuple(int(part) for part in machine.libc_version.split(".") if part.isdigit())
    if glibc > BASE_GLIBC:
        yield VerbAdvice(
            "build",
            "look",
            f"the vLLM wheel's tag may be raised as far as manylinux_{'_'.join(map(str, glibc))}, "
            f"if its libraries need a newer system",
        )


def _crossing(machine: HostInfo) -> VerbAdvice:
    """Return whether this machine can build wheels for a Spark."""
    if version := machine.tools.get(f"{cross.triple(SPARK)}-g++"):
        return VerbAdvice(
            "build",
            "ready",
            f"with --target {SPARK}: the wheels of a Spark, by g++ {version} for {SPARK} (4.5 GB "
            f"more on first use)",
        )
    return VerbAdvice(
        "build",
        "look",
        f"--target {SPARK} needs a cross compiler",
        _apt(machine, cross.package(SPARK)),
    )


def jobs(machine: HostInfo, project: Project) -> int:
    """Return how many units compile in parallel if each may be the largest."""
    largest = max(toolchain.spec(project).forks.values(), key=lambda fork: fork.seconds)
    return costs.parallel_units(largest, machine.cores, machine.memory)


def _blocker(machine: HostInfo, project: Project, verb: str) -> VerbAdvice | None:
    """Return the reason why compiling is impossible here, or None."""
    if machine.libc != "glibc":
        return VerbAdvice(
            verb,
            "missing",
            f"the official wheels are for glibc, and the C library here is {machine.libc}",
        )
    for name, fork in project.spec.forks.items():
        if fork.build == "graft" and machine.architecture not in fork.bases:
            return VerbAdvice(
                verb,
                "missing",
                f"the stack has no base wheel of {name} for {machine.architecture}, only for "
                f"{', '.join(fork.bases)}",
            )
    if not machine.python_headers:
        return VerbAdvice(
            verb,
            "missing",
            "needs the headers of this Python, for the extension modules",
            _apt(machine, "python3-dev"),
        )
    return _missing_compiler(machine, verb) or _missing_git(machine, verb)


def _missing_compiler(machine: HostInfo, verb: str) -> VerbAdvice | None:
    if {"gcc", "g++"} <= machine.tools.keys():
        return None
    return VerbAdvice(
        verb,
        "missing",
        "needs a C++ compiler; nvcc, cmake and ninja come from the package index",
        _apt(machine, "g++"),
    )


def _missing_git(machine: HostInfo, verb: str) -> VerbAdvice | None:
    if "git" in machine.tools:
        return None
    return VerbAdvice(verb, "missing", "needs git", _apt(machine, "git"))


def _apt(machine: HostInfo, package: str) -> str:
    """Return how Debian and Ubuntu install *package*; containers run as root and have no sudo."""
    return f"{'' if machine.container else 'sudo '}apt-get install -y {package}"


def _gate(machine: HostInfo, project: Project) -> Iterator[VerbAdvice]:
    target = project.spec.arch.rstrip("af")
    wheels = f"the wheels are for SM {target}"
    if not machine.gpus:
        yield VerbAdvice("gate", "not-run", f"no GPU here: only G0 and G1 can run, and {wheels}")
    for gpu in machine.gpus:
        if gpu.capability != target:
            yield VerbAdvice(
                "gate",
                "not-run",
                f"{gpu.name} is SM {gpu.capability}; {wheels}, so G2 is incomplete here",
            )
        elif int(gpu.driver.partition(".")[0] or 0) < CUDA13_DRIVER:
            yield VerbAdvice(
                "gate",
                "look",
                f"CUDA 13 needs driver {CUDA13_DRIVER} or newer, not {gpu.driver}",
                "sudo ubuntu-drivers install",
            )
        else:
            yield VerbAdvice(
                "gate",
                "look",
                f"{gpu.name} is the GPU that the wheels are for; read the note of each check",
            )
