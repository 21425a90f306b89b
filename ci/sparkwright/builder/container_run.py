"""
A build in a container: fetch outside, then run the same command inside without a network.

The container has a store of its own for what depends on its Python and compilers, at the same path
inside and outside, so that every path it prints can be opened. Downloads and mirrors are shared
read-only; objects, locks, cost records and the compiler cache are shared for writing.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.builder import container, container_engine, vendored
from sparkwright.builder.compile import ninja
from sparkwright.builder.container import PROGRAM, BindMount, BuilderImage, ExitStatus
from sparkwright.builder.container_engine import Engine
from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.builder.errors import ContainerError
from sparkwright.builder.wheel.sbom import LockedFile
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError, by_reference
from sparkwright.core.store import Store
from sparkwright.forks import download, fetch
from sparkwright.forks.context import RunContext

#: Bytes of the container's limit above the compilers' budget: for sparkwright, ninja, the linker
#: and file pages.
OVERHEAD = 10**9
READ = ("downloads", "mirrors")
WRITTEN = ("objects.git", "locks", "records/source", "records/costs", "ccache")


def needed(session: RunContext) -> tuple[LockedFile, ...]:
    """
    Return the files of the package index that a build by this Python on this machine reads, sorted.
    """
    kinds = {session.project.fork(fork).build for fork in session.forks}
    wheels = pylock.wheels(session.project) if kinds - {"headers"} else ()
    if session.cross and wheels:
        wheels += tuple(
            wheel
            for wheel in pylock.wheels(session.project, session.machine)
            if wheel[0].startswith(cross.LINKED)
        )
    bases = [
        session.lock.forks[fork].bases.get(session.machine)
        for fork in session.forks
        if session.project.fork(fork).build == "graft"
    ]
    found = {LockedFile(*wheel) for wheel in wheels} | {
        LockedFile(base.name, base.filename, base.sha256) for base in bases if base
    }
    return tuple(sorted(found))


def build(
    session: RunContext, words: Sequence[str], *, base: str = "", platform: str = ""
) -> tuple[int, dict[str, Any]]:
    """
    Run the command line *words* in the builder image; return its exit status and the document that
    it printed.

    Args:
        base: Base image instead of the one of ``environment.yaml``.
        platform: Platform of the image; empty for the engine's own.

    Raises:
        engine-missing, engine-forbidden, engine-unreachable: As `container_engine.connect`.
        base-unresolved: As `container.pinned_base`.
        container-killed: The container ended without a result.
    """
    with container_engine.termination_interrupts():
        engine = container_engine.connect()
        container.remove_stale(engine)
        base = container.pinned_base(session, base)
        _fetch(session)
        builder = container.builder_image(session, engine, base, platform)
        build_run = ContainerRun(session, engine, builder)
        download_needed(session, build_run, words)
        image = f"{builder.base}, {builder.platform}, Python {builder.python.version}"
        with console.step(f"build in a container of {image}"):
            command = [
                "-m",
                "sparkwright",
                *inner_arguments(words),
                *build_run.paths(),
                *build_run.limits(),
            ]
            return build_run.run(command)


def _fetch(session: RunContext) -> None:
    """Fetch every source that the build reads."""
    needs = {need for fork in session.forks for need in session.project.fork(fork).needs}
    for fork in dict.fromkeys([*session.forks, *sorted(needs)]):
        fetch.fetch(session, fork)
    for fork in session.forks:
        if toolchain.settings(session, fork).needs_vendored:
            vendored.fetch(session, fork)


def download_needed(session: RunContext, build_run: ContainerRun, words: Sequence[str]) -> None:
    """
    Download the tools and bases that the program inside names, which depend on its Python and
    machine.
    """
    command = ["-m", "sparkwright.cli.needed", *inner_arguments(words), *build_run.paths()]
    _, answer = build_run.run(command, quiet=True)
    files = msgspec.convert(answer["files"], tuple[LockedFile, ...])
    missing = [
        file
        for file in files
        if not download.path_of(session.store, file.sha256, file.filename).exists()
    ]
    if missing:
        with console.step(f"download {len(missing)} files for the container"):
            for file in missing:
                download.obtain(
                    session.store, file.project, file.filename, file.sha256, offline=session.offline
                )


def inner_arguments(words: Sequence[str]) -> list[str]:
    """Return *words* without the options that `ContainerRun` replaces by those of the container."""
    outer = argparse.ArgumentParser(add_help=False)
    for option in ("--container", "--offline"):
        outer.add_argument(option, action="store_true")
    for option in (
        "--platform",
        "--base",
        "--root",
        "--cache-dir",
        "--output",
        "--memory",
        "--mirror",
    ):
        outer.add_argument(option, action="append")
    return outer.parse_known_args(list(words))[1]


class ContainerRun:
    """
    Folders, limits and command line options of the containers of one build.

    Attributes:
        store: The store of the programs inside.
    """

    def __init__(self, session: RunContext, engine: Engine, builder: BuilderImage) -> None:
        self._session, self._engine, self._builder = session, engine, builder
        # Environments and build folders depend on the compilers and the Python of this image.
        self.store = Store(
            session.store.root / "containers" / builder.system.removeprefix("sha256:")[:16]
        )
        self._memory = ninja.memory_budget(session.memory) * 10**6

    def run(self, command: Sequence[str], *, quiet: bool = False) -> tuple[int, dict[str, Any]]:
        """
        Run the image's Python with *command*; return its status and the JSON document that it
        printed, if any.

        Args:
            quiet: Show nothing, and raise if it fails.
        """
        out: list[str] = []
        err: list[str] = []
        json = quiet or console.json
        github = {"GITHUB_ACTIONS": "true"} if console.github else {}
        with self._scratch() as scratch:
            result = container.run(
                self._engine,
                self._builder.image,
                [PROGRAM, *command],
                folders=self._folders(),
                variables={"TMPDIR": str(scratch), **github},
                memory=self._memory + OVERHEAD,
                on_out=out.append if json else console.result,
                on_err=err.append if quiet else console.note,
            )
            if result.status != 3:
                # The log of an internal error stays, because its path has been printed.
                shutil.rmtree(scratch, ignore_errors=True)
        document = _document(out) if json else {}
        if result.status > 130 or document is None:
            raise _killed(result, [*err, *out])
        if quiet and result.status:
            raise _inner_error(document, [*err, *out])
        return result.status, document

    def paths(self) -> list[str]:
        """Return the options of any verb for the paths inside, offline."""
        mirrors = [
            word
            for url, path in self._session.mirrors.items()
            for word in ("--mirror", f"{url}={path}")
        ]
        return [
            "--root",
            str(self._session.project.root),
            "--cache-dir",
            str(self.store.root),
            "--offline",
            *mirrors,
        ]

    def limits(self) -> list[str]:
        """Return the options of a verb that compiles: output folder and memory."""
        return ["--output", str(self._session.output), "--memory", f"{self._memory / 1e9:.3f}"]

    def _folders(self) -> list[BindMount]:
        self._session.output.mkdir(parents=True, exist_ok=True)
        shared = [(name, name in WRITTEN) for name in (*READ, *WRITTEN)]
        for name, _ in shared:
            # The engine would create a missing mount point as root.
            self.store.folder(name)
        return [
            BindMount(self._session.project.root, self._session.project.root),
            BindMount(self._session.output, self._session.output, writable=True),
            BindMount(self.store.root, self.store.root, writable=True),
            *(
                BindMount(self._session.store.folder(name), self.store.root / name, writable)
                for name, writable in shared
            ),
        ]

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """
        Yield a folder for temporary files on the disk (/tmp inside is memory); remove those of
        killed runs.
        """
        for left in self.store.folder("tmp").iterdir():
            if container.has_exited(left.name.replace("+", "/")):
                shutil.rmtree(left, ignore_errors=True)
        yield self.store.folder("tmp", container.owner_id().replace("/", "+"))


def _document(lines: Sequence[str]) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode("\n".join(lines), type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def _inner_error(document: Mapping[str, Any], lines: Sequence[str]) -> SparkwrightError:
    """
    Return the error in the *document* of the program inside, else a general one with its output
    *lines*.
    """
    error = document.get("error", {})
    kind = by_reference(str(error.get("reference")))
    if kind is None:
        return CommandError(
            "command-failed",
            "The program in the container failed before the build.",
            details=lines[-20:],
        )
    return kind(error["what"], details=error["details"], todo=error["todo"])


def _killed(result: ExitStatus, lines: Sequence[str]) -> ContainerError:
    reason = (
        "the kernel killed a process for want of memory"
        if result.out_of_memory
        else f"status {result.status}"
    )
    what = "The program in the container was killed."
    return ContainerError("container-killed", what, details=[*lines[-10:], reason])
