"""
A build in a container: what needs the network happens out here, then the same command runs inside without one.

The container has a store of its own for what depends on its Python and compilers, at the same path inside and outside, so that every
path it prints can be opened. What was fetched is shared with it: files and mirrors to be read, objects, locks and costs to be added to.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.builder import container, container_engine, container_image, vendored
from sparkwright.builder.compile import ninja
from sparkwright.builder.container import Ended, Folder
from sparkwright.builder.container_engine import Engine
from sparkwright.builder.container_image import PROGRAM, Builder
from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.builder.errors import ContainerError
from sparkwright.builder.self_wheel import LockedFile
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError, by_reference
from sparkwright.core.store import Store
from sparkwright.forks import download, fetch
from sparkwright.forks.context import Session

#: What the container's limit has above the compilers' budget: sparkwright, ninja, the linker and the pages of files, in bytes.
ROOM = 10**9
READ = ("downloads", "mirrors")
WRITTEN = ("objects.git", "locks", "records/source", "records/costs", "ccache")


def needed(session: Session) -> tuple[LockedFile, ...]:
    """Return the files of the package index that a build by this Python on this machine reads, sorted."""
    kinds = {session.project.fork(fork).build for fork in session.forks}
    wheels = pylock.wheels(session.project) if kinds - {"headers"} else ()
    if session.cross and wheels:
        wheels += tuple(wheel for wheel in pylock.wheels(session.project, session.machine) if wheel[0].startswith(cross.LINKED))
    bases = [session.lock.forks[fork].bases.get(session.machine) for fork in session.forks if session.project.fork(fork).build == "graft"]
    found = {LockedFile(*wheel) for wheel in wheels} | {LockedFile(base.name, base.filename, base.sha256) for base in bases if base}
    return tuple(sorted(found))


def build(session: Session, words: Sequence[str], *, base: str = "", platform: str = "") -> tuple[int, dict[str, Any]]:
    """
    Run the command line *words* in the builder image, and return its exit status and the document that it printed.

    Args:
        base: The base image in place of the one of ``environment.yaml``.
        platform: What the image is for; empty for what the engine runs by itself.

    Raises:
        engine-missing, engine-forbidden, engine-unreachable, base-unresolved, container-killed, and what `image.obtain` and fetching raise.
    """
    with container_engine.termination_interrupts():
        reached = container_engine.connect()
        container.sweep(reached)
        named = container_image.pinned(session, base)
        _fetch(session)
        builder = container_image.obtain(session, reached, named, platform)
        inside = Inside(session, reached, builder)
        download_needed(session, inside, words)
        with console.step(f"build in a container of {builder.base}, {builder.platform}, Python {builder.python.version}"):
            return inside.run(["-m", "sparkwright", *repeated(words), *inside.places(), *inside.limits()])


def _fetch(session: Session) -> None:
    """Bring every source that the build reads; what the container asks for is then there."""
    needs = {need for fork in session.forks for need in session.project.fork(fork).needs}
    for fork in dict.fromkeys([*session.forks, *sorted(needs)]):
        fetch.fetch(session, fork)
    for fork in session.forks:
        if toolchain.settings(session, fork).needs_vendored:
            vendored.fetch(session, fork)


def download_needed(session: Session, inside: Inside, words: Sequence[str]) -> None:
    """Bring the tools and bases that the program inside names: which ones depends on its Python and machine."""
    _, answer = inside.run(["-m", "sparkwright.cli.needed", *repeated(words), *inside.places()], quiet=True)
    files = msgspec.convert(answer["files"], tuple[LockedFile, ...])
    missing = [file for file in files if not download.path_of(session.store, file.sha256, file.filename).exists()]
    if missing:
        with console.step(f"download {len(missing)} files for the container"):
            for file in missing:
                download.obtain(session.store, file.project, file.filename, file.sha256, offline=session.offline)


def repeated(words: Sequence[str]) -> list[str]:
    """Return *words* less the options that say how things are out here; `Inside` knows how they are in there."""
    outer = argparse.ArgumentParser(add_help=False)
    for option in ("--container", "--offline"):
        outer.add_argument(option, action="store_true")
    for option in ("--platform", "--base", "--root", "--cache-dir", "--output", "--memory", "--mirror"):
        outer.add_argument(option, action="append")
    return outer.parse_known_args(list(words))[1]


class Inside:
    """
    The folders and limits that the containers of one run have.

    Attributes:
        store: The store of the programs inside.
    """

    def __init__(self, session: Session, reached: Engine, builder: Builder) -> None:
        self._session, self._engine, self._builder = session, reached, builder
        # Environments and build folders belong to the compilers and the Python of this image, and to no other.
        self.store = Store(session.store.root / "containers" / builder.system.removeprefix("sha256:")[:16])
        self._memory = ninja.memory_budget(session.memory) * 10**6

    def run(self, command: Sequence[str], *, quiet: bool = False) -> tuple[int, dict[str, Any]]:
        """
        Run the image's Python with *command*, and return its status and the JSON document that it printed, if any.

        Args:
            quiet: Nothing of what it says is shown, and it must end well.
        """
        printed: list[str] = []
        heard: list[str] = []
        json = quiet or console.json
        with self._scratch() as scratch:
            ended = container.run(
                self._engine, self._builder.image, [PROGRAM, *command], folders=self._folders(),
                variables={"TMPDIR": str(scratch), **({"GITHUB_ACTIONS": "true"} if console.github else {})}, memory=self._memory + ROOM,
                on_out=printed.append if json else console.result, on_err=heard.append if quiet else console.note,
            )  # fmt: skip
            if ended.status != 3:
                # A fault's log is there, and its path has been printed.
                shutil.rmtree(scratch, ignore_errors=True)
        document = _document(printed) if json else {}
        if ended.status > 130 or document is None:
            raise _killed(ended, [*heard, *printed])
        if quiet and ended.status:
            raise _same(document, [*heard, *printed])
        return ended.status, document

    def places(self) -> list[str]:
        """Return the options of any verb that say where things are inside, and that nothing can be fetched there."""
        mirrors = [word for url, place in self._session.mirrors.items() for word in ("--mirror", f"{url}={place}")]
        return ["--root", str(self._session.project.root), "--cache-dir", str(self.store.root), "--offline", *mirrors]

    def limits(self) -> list[str]:
        """Return the options of a verb that compiles: where wheels go, and what compilers may hold."""
        return ["--output", str(self._session.output), "--memory", f"{self._memory / 1e9:.3f}"]

    def _folders(self) -> list[Folder]:
        self._session.output.mkdir(parents=True, exist_ok=True)
        shared = [(name, name in WRITTEN) for name in (*READ, *WRITTEN)]
        for name, _ in shared:
            # The engine would make a missing place inside as root.
            self.store.folder(name)
        return [
            Folder(self._session.project.root, self._session.project.root),
            Folder(self._session.output, self._session.output, writable=True),
            Folder(self.store.root, self.store.root, writable=True),
            *(Folder(self._session.store.folder(name), self.store.root / name, writable) for name, writable in shared),
        ]

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Yield a folder for temporary files, on the disk because /tmp inside is memory; those of killed runs are removed."""
        for left in self.store.folder("tmp").iterdir():
            if container.is_gone(left.name.replace("+", "/")):
                shutil.rmtree(left, ignore_errors=True)
        yield self.store.folder("tmp", container.owner().replace("/", "+"))


def _document(printed: Sequence[str]) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode("\n".join(printed), type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def _same(document: Mapping[str, Any], said: Sequence[str]) -> SparkwrightError:
    """Return the failure of the program inside as one of ours."""
    error = document.get("error", {})
    kind = by_reference(str(error.get("reference")))
    if kind is None:
        return CommandError("command-failed", "The program in the container failed before the build.", details=said[-20:])
    return kind(error["what"], details=error["details"], todo=error["todo"])


def _killed(ended: Ended, said: Sequence[str]) -> ContainerError:
    why = "the kernel ended a program for want of memory" if ended.out_of_memory else f"status {ended.status}"
    return ContainerError("container-killed", "The program in the container did not come to its end.", details=[*said[-10:], why])
