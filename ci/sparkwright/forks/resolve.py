"""Turn refs into hashes: ``sparkwright lock``, which needs the network."""

import posixpath
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

import msgspec

from sparkwright.core.console import console
from sparkwright.core.git import EXECUTABLE, REGULAR, SUBMODULE, Objects
from sparkwright.core.http import redact_credentials
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    UNRESOLVED,
    FileLock,
    ForkLock,
    ForkSpec,
    GitLock,
    GitSpec,
    Lock,
    Project,
    SdistSpec,
    SourceError,
    SourceProof,
    SourceSpecs,
    SourceUnreachable,
    VendoredLock,
    WheelSpec,
)

MODULES = ".gitmodules"

#: git runs a program named before two colons (gitremote-helpers(7)); a leading dash is an option of
#: git's.
_HELPER = re.compile(r"-|[A-Za-z0-9][A-Za-z0-9+.-]*::")
_LONGEST = 2048
#: Files that the error of a proof names at most.
SHOWN = 20


def resolve(context: RunContext, earlier: Lock | None = None) -> Lock:
    """
    Return the lock of the stack, in which the forks of the run are as the upstreams stand now.

    An entry that cannot be seen now stays as *earlier* has it, if it belongs to the same release.
    Otherwise a git source stays as stack.yaml names it, or ``unresolved``, and a base wheel is left
    out (`unresolved` lists both).

    Args:
        earlier: Also names the sources that FetchContent downloads, which only a configure can tell
            (`sparkwright.cli.stages`); they are pinned again.

    Raises:
        source-unreachable: The index does not offer a source that the stack names.
        sdist-differs: See `prove`.
    """
    locked, spec = dict[str, ForkLock](), context.project.spec
    with context.store.lock("objects"):
        for name, fork in spec.forks.items():
            entry = earlier.forks.get(name) if earlier else None
            if entry is None or name in context.forks:
                entry = resolve_fork(context, name, fork, entry)
            locked[name] = entry
    return Lock(1, spec.stack, locked)


def resolve_fork(
    context: RunContext, name: str, fork: ForkSpec, earlier: ForkLock | None = None
) -> ForkLock:
    """Return the lock of one fork, as `resolve` makes it."""
    with console.step(f"lock {name}"):
        return _Resolver(context, fork, earlier or ForkLock()).resolve(name)


def pin_commit(
    context: RunContext, fork: ForkSpec, locked: ForkLock, git: GitLock, commit: str
) -> ForkLock:
    """
    Return *locked* with the tree of *commit* of its source *git*, and the submodules that the tree
    names; those that are locked stay.

    Raises:
        offline, source-unreachable: The commit, or that of a submodule, cannot be had.
    """
    tree = context.mirror(git.url).commit(commit)
    git = msgspec.structs.replace(git, commit=commit, tree=tree)
    git, submodules = _Resolver(context, fork, ForkLock(), strict=True).submodules(git)
    return msgspec.structs.replace(locked, git=git, vendored={**submodules, **locked.vendored})


def pin(
    context: RunContext, fork: ForkSpec, name: str, source: VendoredLock
) -> dict[str, VendoredLock]:
    """
    Return the lock of the vendored source *name*, and of the submodules below it, unresolved where
    a host does not answer.

    Args:
        source: Its kind, address, ref and submodules; commit and tree are asked for.
    """
    return _Resolver(context, fork, ForkLock()).vendored(name, source)


class _Resolver:
    """
    Looks at the sources of one fork, and keeps those of an earlier lock that cannot be seen now.

    Args:
        strict: Whether a git source that cannot be seen is an error.
    """

    def __init__(
        self, context: RunContext, fork: ForkSpec, earlier: ForkLock, *, strict: bool = False
    ) -> None:
        self._context, self._fork, self._earlier = context, fork, earlier
        self._strict = strict

    def resolve(self, name: str) -> ForkLock:
        """Return the lock of the fork, which is called *name*."""
        specs, earlier, bases = self._fork.sources, self._earlier, dict[str, FileLock]()
        git = self._git("git", specs.git, earlier.git) if specs.git else None
        sdist = self._file("sdist", specs.sdist, earlier.sdist) if specs.sdist else None
        wheel = self._file("wheel", specs.wheel, earlier.wheel) if specs.wheel else None
        for machine, spec in self._fork.bases.items():
            try:
                bases[machine] = self._file(f"bases/{machine}", spec, earlier.bases.get(machine))
            except SourceUnreachable as error:
                console.warn(f"{error.what} Left unresolved.")
        git, sources = self.submodules(git) if git else (None, {})
        for declared, entry in earlier.fetched.items():
            sources |= self.vendored(declared, entry)
        locked = ForkLock(git, sdist, wheel, bases, dict(sorted(sources.items())))
        if specs.proof and locked.is_resolved:
            trees = [entry.tree for entry in (git, *locked.submodules.values()) if entry]
            same = msgspec.structs.replace(locked, proof=earlier.proof) == earlier
            proof = earlier.proof if same else None
            if not self._context.objects.missing(trees):
                proof = prove(self._context, name, locked, specs)
            locked = msgspec.structs.replace(locked, proof=proof)
        return locked

    def vendored(self, name: str, source: VendoredLock) -> dict[str, VendoredLock]:
        """Return the locks of the vendored source *name* and of the submodules below it."""
        without = self._fork.vendored[name].without if name in self._fork.vendored else ()
        commit = source.ref if len(source.ref) == 40 else ""
        git = self._git(
            f"vendored/{name}",
            GitSpec(source.url, source.ref, commit, without),
            self._earlier.vendored.get(name),
        )
        git, submodules = self.submodules(git, f"{name}/", source.modules)
        entry = msgspec.structs.replace(source, commit=git.commit, tree=git.tree, without=without)
        return {name: entry, **submodules}

    def submodules(
        self, git: GitLock, parent: str = "", modules: Collection[str] | None = None
    ) -> tuple[GitLock, dict[str, VendoredLock]]:
        """
        Return *git*, and the locks of its submodules by *parent* and their paths; without its tree,
        so that it is unresolved, if they are neither seen now nor known from an earlier lock.
        """
        context, locked = self._context, dict[str, VendoredLock]()
        if not git.resolved:
            return git, locked
        try:
            if context.objects.missing([git.tree]):
                raise SourceUnreachable("source-unreachable", f"{git.url} was not seen.")
            if not context.objects.submodules(git.tree):
                return git, locked
            paths = context.objects.paths(git.tree)
            context.mirror(git.url).files({paths[MODULES][1]} if MODULES in paths else set())
        except SourceUnreachable:
            if self._strict:
                raise
            return self._earlier_submodules(git, parent)
        for module, (url, commit) in submodules(context.objects, git.tree, git.url).items():
            path = parent + module
            wanted = path not in self._fork.ignored and (modules is None or module in modules)
            # A submodule without an address is not locked, so that fetching its parent fails.
            if url and wanted:
                entry = VendoredLock(url, commit, UNRESOLVED, UNRESOLVED, kind="submodule")
                locked |= self.vendored(path, entry)
        return git, locked

    def _earlier_submodules(
        self, git: GitLock, parent: str
    ) -> tuple[GitLock, dict[str, VendoredLock]]:
        """Return *git* and its submodules below *parent* as the earlier lock has them."""
        earlier = self._earlier
        owner = earlier.vendored.get(parent.removesuffix("/")) if parent else earlier.git
        if owner is None or owner.tree != git.tree:
            console.warn(f"{git.url}: left unresolved: its submodules were not seen")
            return msgspec.structs.replace(git, tree=UNRESOLVED), {}
        locked = earlier.vendored if parent else earlier.submodules
        below = {path: entry for path, entry in locked.items() if path.startswith(parent)}
        for path in below:
            console.warn(f"{path}: kept as locked: the tree that names it was not seen")
        return git, below

    def _git(self, entry: str, spec: GitSpec, earlier: GitLock | None) -> GitLock:
        """Return the lock of a git source, called *entry* for people."""
        try:
            commit, tree = self._look_up(spec)
            console.note(f"{spec.ref}: commit {commit}, tree {tree}")
        except SourceUnreachable as error:
            if self._strict:
                raise
            why = redact_credentials(" · ".join([error.what, *error.details[-1:]]))
            commit, tree = spec.commit or UNRESOLVED, UNRESOLVED
            if (
                earlier
                and earlier.commit != UNRESOLVED
                and (earlier.url, earlier.ref) == (spec.url, spec.ref)
                and earlier.commit.startswith(spec.commit)
            ):
                commit, tree = earlier.commit, earlier.tree
                console.warn(f"{entry}: kept as locked: {why}")
            else:
                console.warn(f"left unresolved: {why}")
        return GitLock(spec.url, spec.ref, commit, tree, spec.without)

    def _look_up(self, spec: GitSpec) -> tuple[str, str]:
        """
        Return the commit and the tree of *spec* at its host.

        Raises:
            source-unreachable: The host does not answer, or does not have it.
            source-mismatch: The ref names another commit than stack.yaml.
        """
        mirror, commit = self._context.mirror(spec.url), spec.commit
        # The mirror of a few commits need not have the tags; a full commit needs none.
        if spec.ref != commit:
            commit = mirror.ref(spec.ref) or (commit if len(commit) == 40 else "")
        if not commit:
            raise SourceUnreachable(
                "source-unreachable",
                f"{spec.ref} of {redact_credentials(mirror.address)} is not there.",
            )
        if not commit.startswith(spec.commit):
            raise SourceError(
                "source-mismatch",
                f"{spec.ref} of {redact_credentials(mirror.address)} names another commit.",
                details=[f"stack.yaml: {spec.commit}", f"host: {commit}"],
            )
        return commit, mirror.commit(commit)

    def _file(self, entry: str, spec: SdistSpec | WheelSpec, earlier: FileLock | None) -> FileLock:
        """
        Return the lock of a file of the package index, called *entry* for people.

        Raises:
            source-unreachable: The index does not answer or offer it, and *earlier* is another.
        """
        suffix = f"-{spec.tag}.whl" if isinstance(spec, WheelSpec) else ".tar.gz"
        folder = spec.folder if isinstance(spec, WheelSpec) else ""
        wanted = package_index.comparable(f"{spec.name}-{spec.version}{suffix}")
        if earlier and (
            (package_index.comparable(earlier.filename), earlier.folder) != (wanted, folder)
        ):
            earlier = None
        try:
            offer = package_index.offers(spec.name, spec.version, suffix)[0]
            if not offer.sha256:
                raise SourceUnreachable(
                    "source-unreachable", f"The index states no sha256 of {offer.name}."
                )
            file = self._download(spec, offer, folder, earlier)
        except SourceUnreachable as error:
            if not earlier:
                raise
            console.warn(f"{entry}: kept as locked: {error.what}")
            return earlier
        tree = f", tree {file.tree}" if file.tree else ""
        console.note(f"{file.filename}: sha256 {file.sha256[:16]}…{tree}")
        return file

    def _download(
        self,
        spec: SdistSpec | WheelSpec,
        offer: package_index.IndexFile,
        folder: str,
        earlier: FileLock | None,
    ) -> FileLock:
        """Return the lock of the file *offer*; a base that is *earlier* is not downloaded."""
        name, sha256, store = offer.name, offer.sha256, self._context.store
        if earlier and earlier.sha256 == sha256 and not earlier.tree:
            return earlier
        size = package_index.obtain(store, spec.name, name, sha256).stat().st_size
        file = FileLock(spec.name, spec.version, name, sha256, size, folder)
        if folder or isinstance(spec, SdistSpec):
            file = msgspec.structs.replace(
                file, tree=package_index.import_file(self._context, file)
            )
        return file


def submodules(objects: Objects, tree: str, base: str) -> dict[str, tuple[str, str]]:
    """
    Return the submodules of *tree*, whose ``.gitmodules`` is in the object database: path →
    (address, commit). The address is empty where the file does not state an absolute one.

    Args:
        base: Address of the tree's own repository, from which relative addresses start; may be
            empty.

    Raises:
        declaration-unsafe: git cannot read the file, or an address in it is unsafe.
    """
    status, out, _ = objects.run(
        ["config", "--blob", f"{tree}:{MODULES}", "--no-includes", "--null", "--list"], check=False
    )
    if status and objects.blob(tree, MODULES) is not None:
        raise SourceError("declaration-unsafe", f"git cannot read {MODULES} of tree {tree}.")
    text, urls = out.decode("utf-8", "replace"), dict[str, str]()
    fields = dict(re.findall(r"([^\n\0]*)\n([^\0]*)\0", text))
    for key, value in fields.items():
        if key.startswith("submodule.") and key.endswith(".path"):
            urls[value.rstrip("/")] = fields.get(f"{key.removesuffix('path')}url", "")
    return {
        require_safe(path, MODULES): (absolute(urls.get(path, ""), base), commit)
        for path, commit in sorted(objects.submodules(tree).items())
    }


def absolute(address: str, base: str) -> str:
    """
    Return the absolute form of a submodule's *address* (git-submodule(1), add); empty where *base*
    does not allow one.

    Raises:
        declaration-unsafe: It leaves the host of *base*, or is unsafe.
    """
    parts = urlsplit(base)
    if not require_safe(address, MODULES).startswith(("./", "../")):
        return address
    if parts.scheme and address.split("/").count("..") > parts.path.strip("/").count("/") + 1:
        raise SourceError(
            "declaration-unsafe",
            f"{MODULES} has an address that leaves its host.",
            details=[f"{address!r}"],
        )
    path = posixpath.normpath(posixpath.join(parts.path, address))
    return parts._replace(path=path).geturl() if parts.scheme else ""


def require_safe(text: str, origin: str) -> str:
    """
    Return *text*, an address or a ref that *origin* names.

    Raises:
        declaration-unsafe: git could take it for an option or a program, or a terminal for a
            control sequence.
    """
    if _HELPER.match(text) or len(text) > _LONGEST or not text.isprintable():
        raise SourceError(
            "declaration-unsafe",
            f"{origin} names a source by an address that may run a command.",
            details=[f"{text[:_LONGEST]!r}"],
        )
    return text


def prove(
    context: RunContext, fork: str, locked: ForkLock, sources: SourceSpecs
) -> SourceProof | None:
    """
    Compare the locked archive that *sources* mean as a proof with the locked commit, whose trees
    and those of its submodules are in the store, and print the result; None if there is none.

    Raises:
        sdist-differs: A file of the archive is not the commit's or a submodule's, and not
            generated; or all are generated.
        source-mismatch, source-unreachable, offline, archive-unsafe: The file cannot be had.
    """
    objects, git = context.objects, locked.git
    file = locked.sdist if sources.proof == "sdist" else locked.wheel
    if not (sources.proof and git and file):
        return None
    generated = sources.sdist.generated if sources.sdist and sources.proof == "sdist" else ()
    trees = {
        path: objects.resolve(f"{entry.commit}^{{tree}}")
        for path, entry in locked.submodules.items()
        if objects.has(f"{entry.commit}^{{commit}}")
    }
    # A wheel does not say which of its files are executable.
    modes = {EXECUTABLE: REGULAR} if sources.proof == "wheel" else {}
    commit = {
        path: (modes.get(mode, mode), blob)
        for path, (mode, blob) in objects.paths(objects.with_folders(git.tree, trees)).items()
        if mode != SUBMODULE
    }
    released = objects.paths(package_index.import_file(context, file))
    differing = {
        path: "differs" if path in commit else "is not in the commit"
        for path, entry in released.items()
        if commit.get(path) != entry
    }
    wrong = [
        f"{path} {fault}"
        for path, fault in differing.items()
        if not any(fnmatchcase(path, pattern) for pattern in generated)
    ]
    if wrong:
        raise SourceError(
            "sdist-differs",
            f"{len(wrong)} files of {file.filename}, which proves {fork}, are not the commit's.",
            details=wrong[:SHOWN],
        )
    equal = len(released) - len(differing)
    if not equal:
        raise SourceError(
            "sdist-differs", f"No file of {file.filename} proves {fork}: all are generated."
        )
    proof = SourceProof(
        equal=equal,
        generated=tuple(sorted(differing)),
        absent=len(commit.keys() - released.keys()),
    )
    console.note(
        f"{proof.equal:,} of {len(released):,} files of {file.filename} are the commit's, "
        f"{len(differing)} are generated, {proof.absent:,} of the commit are not in it"
    )
    return proof


def unresolved(project: Project, lock: Lock) -> list[str]:
    """Return, a line each, what *lock* could not pin."""
    lines = list[str]()
    for name, fork in lock.forks.items():
        if fork.git and not fork.git.resolved:
            lines.append(f"{name}: {fork.git.ref} of {fork.git.url}")
        for inner, entry in fork.vendored.items():
            if not entry.resolved:
                lines.append(f"{name}: {inner}, {entry.ref} of {entry.url}")
        for machine in sorted(project.fork(name).bases.keys() - fork.bases.keys()):
            lines.append(f"{name}: base wheel for {machine}")
    return lines
