"""
The lock: ``forks/<stack>/lock.yaml``, machine-written, reviewed in git.

It names every source by hash. What could not be resolved when it was written says so (`UNRESOLVED`)
instead of guessing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.forks.stack import Project

UNRESOLVED: Final = "unresolved"

Commit = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{7,40}|unresolved)\Z")]
Tree = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{40}|unresolved)\Z")]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
#: A name without a path.
FileName = Annotated[str, msgspec.Meta(pattern=r"\A[^./][^/]*\Z")]


class GitLock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    A git source.

    Attributes:
        ref: The tag or branch that people call it by; never used to choose the bytes.
        commit: 40 hex digits, or a prefix of at least 7 (shown as unresolved), or ``unresolved``.
        tree: The git tree id of the commit, or ``unresolved``.
        without: Folders and files of it that are not fetched and not part of the source.
    """

    url: str
    ref: str
    commit: Commit
    tree: Tree
    without: tuple[str, ...] = ()

    @property
    def resolved(self) -> bool:
        """Return True if the lock names one commit and its tree."""
        return len(self.commit) == 40 and self.tree != UNRESOLVED


class FileLock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    A file of the package index.

    Attributes:
        name: The project's name on the index.
        tree: Git tree id of its content (of *folder* inside it where that is set); empty for the
            base of a graft.
    """

    name: str
    version: str
    filename: FileName
    sha256: Sha256
    size: int
    folder: str = ""
    tree: Tree | Literal[""] = ""


class VendoredLock(GitLock, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """
    A source that the fork's tree names and its build would download.

    Attributes:
        kind: ``submodule``, whose path is its name in the lock, or ``fetchcontent``, read from the
            trace of a configure.
    """

    kind: Literal["submodule", "fetchcontent"]


class SdistProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    A source distribution compared with a commit.

    Attributes:
        equal: The number of its files that are the commit's.
        generated: The files that the release process wrote.
        absent: The number of files of the commit that it lacks.
    """

    equal: int
    generated: tuple[str, ...] = ()
    absent: int = 0


class ForkLock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    The locked sources of a fork, by kind, the bases of its graft, by machine, the sources that it
    vendors, by name, and the proof that the source distribution is the commit.
    """

    git: GitLock | None = None
    sdist: FileLock | None = None
    wheel: FileLock | None = None
    bases: dict[str, FileLock] = {}
    vendored: dict[str, VendoredLock] = {}
    proof: SdistProof | None = None

    @property
    def whole(self) -> bool:
        """Return True if the lock names the git source and all its submodules."""
        submodules = self.submodules.values()
        return bool(self.git and self.git.resolved and all(entry.resolved for entry in submodules))

    @property
    def submodules(self) -> dict[str, VendoredLock]:
        """The submodules of the git source, and theirs, by path."""
        below = tuple(f"{name}/" for name in self.fetched)
        return {
            path: entry
            for path, entry in self.vendored.items()
            if entry.kind == "submodule" and not path.startswith(below)
        }

    @property
    def fetched(self) -> dict[str, VendoredLock]:
        """The sources that FetchContent would download, by the name that CMake gives them."""
        return {
            name: entry for name, entry in self.vendored.items() if entry.kind == "fetchcontent"
        }


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a build of the stack may read, by hash."""

    format: Literal[1]
    stack: str
    forks: dict[str, ForkLock]


def read(project: Project) -> Lock:
    """
    Return the lock of *project*.

    Raises:
        file-invalid: It is missing, damaged, or belongs to another stack or to another list of
            forks.
    """
    lock = strict_yaml.load(project.lock_file, Lock)
    if lock.stack != project.stack or set(lock.forks) != set(project.spec.forks):
        raise FileError(
            "file-invalid",
            f"{project.lock_file} does not belong to {project.stack_file}.",
            details=[
                f"lock:  {lock.stack}: {', '.join(sorted(lock.forks))}",
                f"stack: {project.stack}: {', '.join(sorted(project.spec.forks))}",
            ],
            todo="Run `sparkwright lock`.",
        )
    return lock


def render(lock: Lock) -> str:
    """
    Return the text of lock.yaml; unset fields are left out, so that a diff shows decisions only.
    """
    return "# Written by `sparkwright lock`; review it, do not edit it.\n" + strict_yaml.dump(lock)
