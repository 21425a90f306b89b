"""The context of a run: the reviewed data, the store, and the choices made on the command line."""

import dataclasses
import platform
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from sparkwright.core.files import content_key, list_folder, sha256_file
from sparkwright.core.git import Objects
from sparkwright.core.store import Store
from sparkwright.forks.mirror import Mirror, mirrored
from sparkwright.forks.stack import Lock, Project, SourceKind, read_lock


@dataclasses.dataclass(frozen=True)
class RunContext:
    """
    A run.

    Attributes:
        source: Which kind of source to take; ``auto`` decides by what is locked and reachable.
        offline: Never ask the network.
        mirrors: Beginning of a URL → its replacement; the longest that fits is taken.
        forks: The forks to work on, in the order of the stack.
        jobs: Units compiled at once; 0 means one per core.
        memory: Bytes that compilers may hold together; 0 means most of what is available.
        targets: CMake targets to compile in place of those of the stack; ``all`` for every target.
        output: Where finished wheels go.
        target: The machine that wheels are made for; empty for this one.
    """

    project: Project
    store: Store
    forks: tuple[str, ...]
    output: Path
    source: Literal["auto"] | SourceKind = "auto"
    offline: bool = False
    mirrors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    jobs: int = 0
    memory: int = 0
    targets: tuple[str, ...] = ()
    target: str = ""

    @cached_property
    def objects(self) -> Objects:
        """The object database of the store, which borrows from its mirrors."""
        objects = Objects(self.store.root / "objects.git")
        objects.borrow(self.store.root / "mirrors")
        return objects

    def mirror(self, url: str) -> Mirror:
        """Return the mirror of the upstream repository *url*."""
        return Mirror(
            self.store, self.objects, url, mirrored(self.mirrors, url), offline=self.offline
        )

    @cached_property
    def lock(self) -> Lock:
        """The lock of the stack."""
        return read_lock(self.project)

    @property
    def grafts(self) -> list[str]:
        """The forks to work on that compile libraries into an official wheel."""
        return [fork for fork in self.forks if self.project.fork(fork).build == "graft"]

    @property
    def machine(self) -> str:
        """The machine that wheels are built for: ``x86_64`` or ``aarch64``, as Python names it."""
        return self.target or platform.machine()

    @property
    def cross(self) -> bool:
        """Return True if wheels are made for another machine than this one."""
        return self.machine != platform.machine()

    def qualified(self, name: str) -> str:
        """
        Return *name*, of a record or folder, with the machine and the architecture appended if they
        are others than this machine's and the stack's.
        """
        machine = f"-{self.machine}" if self.cross else ""
        return f"{name}{machine}{self.project.suffix}"

    def source_inputs(self, fork: str) -> str:
        """Return the digest of everything that the source tree of *fork* follows from."""
        project = self.project
        files = (
            project.stack_file,
            project.root / "cherry_picks" / f"{fork}.yaml",
            project.build_folder / f"archs{project.suffix}.yaml",
            *list_folder(project.series_folder(fork)),
        )
        digests = [(path.name, sha256_file(path)) for path in files if path.is_file()]
        return content_key("source-tree", (fork, self.source, self.lock.forks[fork], digests))
