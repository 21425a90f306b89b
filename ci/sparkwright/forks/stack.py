"""
The two files of a stack: ``forks/<stack>/stack.yaml``, which people write, and ``lock.yaml``, which
`sparkwright lock` writes; and the errors of sources.

The lock names every source by hash. What could not be resolved when it was written says so
(`UNRESOLVED`) instead of guessing.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.errors import Advice, FileError, SparkwrightError
from sparkwright.core.files import Sha256
from sparkwright.core.store import locked_in_place

#: The three kinds of source (forks/README.md), in the order in which ``auto`` tries them.
SourceKind = Literal["git", "sdist", "wheel"]
KINDS: tuple[SourceKind, ...] = ("git", "sdist", "wheel")
#: The machines that wheels are made for, as Python and platform tags name them.
MACHINES = ("x86_64", "aarch64")

UNRESOLVED: Final = "unresolved"

Commit = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{7,40}|unresolved)\Z")]
#: The whole id of a commit or a tree.
ObjectId = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{40}|unresolved)\Z")]
#: A name without a path.
FileName = Annotated[str, msgspec.Meta(pattern=r"\A[^./][^/]*\Z")]


def capability(arch: str) -> str:
    """Return the compute capability of the architecture *arch*: ``12.1f`` → ``12.1``."""
    return arch.rstrip("af")


class SourceError(SparkwrightError):
    """A source is unreachable, differs from the lock, or is not locked."""

    references: ClassVar[Mapping[str, Advice]] = {
        "declaration-unsafe": Advice(
            "A file of the tree names a source in a way that no project needs: its address "
            "is an option or a command, or leaves its host.",
            "Do not fetch it by other means. Look at the file, and at who changed it, with the "
            "upstream project.",
        ),
        "not-provided": Advice(
            "Something that the command names or needs does not exist: a stack, a fork, a source "
            "or base for this machine, a record, a wheel, a worktree or a release.",
            "Compare the name with what the message lists, or with forks/<stack>/stack.yaml.",
        ),
        "offline": Advice(
            "The step needs something that is not in the store, and --offline forbids fetching it.",
            "Run `sparkwright fetch` once with a connection.",
            exit_code=5,
        ),
        "sdist-differs": Advice(
            "A file of the locked archive, a source distribution or a folder of a wheel, differs "
            "from the commit: a moved tag, a replaced file, or a release from another commit.",
            "Build from the archive, which the lock names by hash: --source sdist or wheel. "
            "Compare the files with the upstream project; a file that the release process writes "
            "goes under `generated` in stack.yaml.",
        ),
        "source-mismatch": Advice(
            "The bytes that arrived are not the bytes that the lock names: a replaced release, a "
            "broken mirror, or tampering.",
            "Do not build from it. Compare both values with the upstream project; change the "
            "lock only by `sparkwright lock`.",
        ),
        "source-unlocked": Advice(
            "The build would download something whose bytes the lock does not pin, or another "
            "state of it than the lock names.",
            "Run `sparkwright lock`; what the build does not reach goes under `ignored` in "
            "stack.yaml, with the reason.",
        ),
        "source-unreachable": Advice(
            "The network, the index or the mirror does not offer what the lock names.",
            "Check the connection with `sparkwright doctor`, or give a mirror with --mirror "
            "URL=REPLACEMENT. The bytes that arrived are kept. If git's words above speak of "
            "damage, remove `mirrors` from the cache directory. `build` can leave out what needs a "
            "source that a fork vendors: --targets.",
            exit_code=5,
        ),
        "source-unresolved": Advice(
            "The lock holds no full commit for this source, because the host could not be "
            "reached when it was written.",
            "Run `sparkwright lock` where the upstream host is reachable, or build from another "
            "kind of source with --source.",
        ),
    }


class SourceUnreachable(SourceError):
    """A source cannot be had now: its host does not answer, or may not be asked."""


class GitSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source in a git repository: its url, and the tag or branch that people call it by."""

    url: str
    ref: str
    #: The commit where it is known without asking the host: 40 hex digits, or the prefix that a
    #: release carries.
    commit: str = ""
    #: Folders and files that no build reads (pictures, say); they are neither fetched nor part of
    #: the source.
    without: tuple[str, ...] = ()


class SdistSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A source distribution of the package index.

    Attributes:
        generated: Patterns of the files that the release process writes. All other files must be
            those of the git source, whose commit they prove.
    """

    name: str
    version: str
    generated: tuple[str, ...] = ()


class WheelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A wheel of the package index; *folder* is set where the source is a folder inside it.
    """

    name: str
    version: str
    tag: str
    folder: str = ""


class SourceSpecs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The kinds in which a fork's source can be had.

    Attributes:
        upstream: The release that the forks pin upstream, if it is another.
        accepted: Why this one may be taken in its place.
    """

    git: GitSpec | None = None
    sdist: SdistSpec | None = None
    wheel: WheelSpec | None = None
    upstream: str = ""
    accepted: str = ""

    def __post_init__(self) -> None:
        if bool(self.upstream) != bool(self.accepted.strip()):
            raise ValueError("`upstream` and `accepted` are stated together")

    @property
    def proof(self) -> Literal["sdist", "wheel", ""]:
        """
        The kind of the release archive whose files have to be those of the git source; empty if no
        archive is meant to be compared.
        """
        if self.git and self.sdist and self.sdist.generated:
            return "sdist"
        return "wheel" if self.git and self.wheel and self.wheel.folder else ""

    @property
    def pinned_by_archive(self) -> bool:
        """
        Return True if stack.yaml names no full commit, so that the archive alone determines which
        files the git source has.
        """
        return bool(self.proof and self.git and len(self.git.commit) != 40)


class VendoredSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A remark on a source that the fork's own tree names.

    Attributes:
        ignored: Why no build of ours needs it; it is not locked then.
        without: As in `GitSpec`.
    """

    ignored: str = ""
    without: tuple[str, ...] = ()


class ForkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One fork.

    Attributes:
        build: How its tree becomes a wheel: ``headers`` packs include folders, ``backend`` runs the
            project's own build backend, ``graft`` compiles libraries into the official wheel.
        bases: For a graft: the official wheel by machine (``x86_64``, ``aarch64``).
        needs: Forks whose source trees the build reads.
        targets: For a graft: the CMake targets to compile, or ``all``; empty for those of
            environment.yaml (``core_targets``, ``external``).
        vendored: Remarks on sources that its tree names, by the name that CMake or ``.gitmodules``
            gives them.
    """

    build: Literal["headers", "backend", "graft"]
    sources: SourceSpecs
    bases: dict[str, WheelSpec] = {}
    needs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    vendored: dict[str, VendoredSpec] = {}

    @property
    def ignored(self) -> dict[str, str]:
        """The vendored sources that no build of ours needs, each with the reason."""
        return {name: spec.ignored for name, spec in self.vendored.items() if spec.ignored.strip()}


class StackSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A matched, pinned set.

    Attributes:
        arch: The one architecture that the wheels are for, in CUDA's own words (``12.1f``).
        label: PEP 440 local version label of its wheels, which tells them from official ones, in
            normal form: a part of digits alone loses its zeros (``2026.06``).
        forks: In the order in which they are built.
    """

    stack: str
    arch: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9][af]?$")]
    label: Annotated[str, msgspec.Meta(pattern=r"\Aspark\.")]
    forks: dict[str, ForkSpec]

    def __post_init__(self) -> None:
        from packaging.version import Version

        normal = Version(f"0+{self.label}").local
        if self.label != normal:
            raise ValueError(f"label {self.label!r} would be {normal!r} in a version")


def is_ours(version: str) -> bool:
    """Return True if a wheel of *version* is one that sparkwright built."""
    return "+spark." in version


def stack_names(root: Path) -> list[str]:
    """Return the names of the stacks of the checkout *root*, sorted."""
    return sorted(path.parent.name for path in root.glob("forks/*/stack.yaml"))


class Project:
    """
    The reviewed data of one stack in one checkout.

    Args:
        root: The folder that holds ``forks``, ``cherry_picks``, ``build`` and ``ci``.
        stack: Name of the stack, such as ``2026.11``.
        arch: Another architecture to build for than that of stack.yaml. It has rules and an audit
            policy of its own (``archs-9.0a.yaml``), and its wheels a label of their own.

    Attributes:
        suffix: Follows the names of files and folders that belong to another architecture.
        build_folder: ``build/<stack>``: environment.yaml, pylock.toml, archs.yaml.
        audit_file: ``ci/audit/<stack>.yaml``: what the stack adds to ``ci/audit.yaml``.

    Raises:
        not-provided: There is no such stack, or it has no rules for *arch*.
        file-invalid: stack.yaml cannot be read.
    """

    def __init__(self, root: Path, stack: str, arch: str = "") -> None:
        self.root, self.stack = root, stack
        # A wheel may name any text as its stack: make no path of it before it is checked.
        if stack not in (stacks := stack_names(root)):
            raise SourceError(
                "not-provided",
                f"There is no stack {stack!r} under {root / 'forks'}.",
                details=[f"stacks: {', '.join(stacks) or 'none'}"],
            )
        self.stack_file = root / "forks" / stack / "stack.yaml"
        self.lock_file = self.stack_file.with_name("lock.yaml")
        self.build_folder = root / "build" / stack
        self.spec = strict_yaml.load(self.stack_file, StackSpec)
        if self.spec.stack != stack:
            raise FileError(
                "file-invalid",
                f"{self.stack_file} is of stack {self.spec.stack!r}, and its folder of {stack!r}.",
                todo="Let its field `stack` have the name of the folder.",
            )
        self.suffix = f"-{arch}" if arch not in ("", self.spec.arch) else ""
        if self.suffix:
            files = self.build_folder.glob("archs-*.yaml")
            others = sorted(path.stem.removeprefix("archs-") for path in files)
            # The same holds for the name of an architecture.
            if arch not in others:
                raise SourceError(
                    "not-provided",
                    f"Stack {stack} has no arch rules for {arch}.",
                    details=[f"architectures: {', '.join([self.spec.arch, *others])}"],
                    todo=f"Write build/{stack}/archs{self.suffix}.yaml.",
                )
            self.spec = msgspec.structs.replace(
                self.spec, arch=arch, label=f"{self.spec.label}.sm{arch.replace('.', '')}"
            )
        self.audit_file = root / "ci" / "audit" / f"{stack}{self.suffix}.yaml"

    def editing(self) -> AbstractContextManager[None]:
        """Hold the reviewed data for the block: runs that write it take turns."""
        return locked_in_place(self.root / "forks", f"the checkout {self.root}")

    def series_folder(self, fork: str) -> Path:
        return self.root / "forks" / self.stack / fork

    def fork(self, name: str) -> ForkSpec:
        """Return the fork *name*; raise `not-provided` where the stack has none."""
        if name not in self.spec.forks:
            raise SourceError(
                "not-provided",
                f"Stack {self.stack} has no fork {name!r}.",
                details=[f"forks: {', '.join(self.spec.forks)}"],
            )
        return self.spec.forks[name]


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
    tree: ObjectId
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
    tree: ObjectId | Literal[""] = ""


class VendoredLock(GitLock, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """
    A source that the fork's tree names and its build would download.

    Attributes:
        kind: ``submodule``, whose path is its name in the lock, or ``fetchcontent``, read from the
            trace of a configure.
        modules: The submodules that the build takes; None for all.
    """

    kind: Literal["submodule", "fetchcontent"]
    modules: tuple[str, ...] | None = None


class SourceProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    A source distribution, or a folder of a wheel, compared with a commit.

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
    vendors, by name, and the proof that the archive is the commit.
    """

    git: GitLock | None = None
    sdist: FileLock | None = None
    wheel: FileLock | None = None
    bases: dict[str, FileLock] = {}
    vendored: dict[str, VendoredLock] = {}
    proof: SourceProof | None = None

    @property
    def kinds(self) -> list[SourceKind]:
        """The kinds of its sources, in the order in which ``auto`` tries them."""
        return [kind for kind in KINDS if getattr(self, kind)]

    @property
    def is_resolved(self) -> bool:
        """Return True if the lock names the git source and all its submodules."""
        return all(entry and entry.resolved for entry in (self.git, *self.submodules.values()))

    @property
    def submodules(self) -> dict[str, VendoredLock]:
        """The submodules of the git source, and theirs, by path."""
        below = tuple(map("{}/".format, self.fetched))
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

    def unresolved(self, names: Iterable[str]) -> list[str]:
        """Return which of the vendored sources *names*, and those below them, are not resolved."""
        wanted = tuple(names)
        below = tuple(map("{}/".format, wanted))
        return [
            name
            for name in sorted({*wanted, *self.vendored})
            if (name in wanted or name.startswith(below))
            and not (name in self.vendored and self.vendored[name].resolved)
        ]


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a build of the stack may read, by hash."""

    format: Literal[1]
    stack: str
    forks: dict[str, ForkLock]


def read_lock(project: Project) -> Lock:
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


def earlier_lock(project: Project) -> Lock | None:
    """
    Return the lock that the next one follows, if there is one; stack.yaml may have other forks
    since then.

    Raises:
        file-invalid: It is damaged.
    """
    return strict_yaml.load(project.lock_file, Lock) if project.lock_file.exists() else None


def render_lock(lock: Lock) -> str:
    """
    Return the text of lock.yaml; unset fields are left out, so that a diff shows decisions only.
    """
    return "# Written by `sparkwright lock`; review it, do not edit it.\n" + strict_yaml.dump(lock)
