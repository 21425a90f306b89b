"""
Mirrors: a bare copy of each upstream repository, in the store, shared by all stacks.

A mirror holds commits and trees; file contents come only where something reads them, where the
server allows that ("blobless"). The object database of the store borrows from every mirror, so that
a tree is addressed in the same way wherever it came from, and nothing but the methods here ever
asks a host: a missing object is an error there, not a download.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkwright.core import git
from sparkwright.core.config import comparable
from sparkwright.core.console import console
from sparkwright.core.errors import GitError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.git import Objects
from sparkwright.core.http import redact_credentials
from sparkwright.core.store import Store
from sparkwright.forks.stack import SourceError, SourceUnreachable

#: Seconds that a host has to say which commit a ref is.
PATIENCE = 30

#: The settings of a fetch into a partial clone, in which missing files are no error (git-clone(1),
#: --filter). They are given on the command line and not in the mirror's own configuration, with
#: which every command that meets a missing object would try to fetch it, again and again if the
#: mirror is damaged.
_BLOBLESS = (
    "-c",
    "remote.upstream.promisor=true",
    "-c",
    "remote.upstream.partialCloneFilter=blob:none",
    "-c",
    "fetch.unpackLimit=1",
)

#: Where the history of a branch or pull request is kept, by its name at the host.
_FETCHED = "refs/fetched/"


class Mirror:
    """
    The copy of one upstream repository.

    Args:
        objects: Borrows from the mirrors of *store*.
        url: The repository's address in the lock or the ledger.
        address: Where the mirror map says that it is reached.
    """

    def __init__(
        self, store: Store, objects: Objects, url: str, address: str, *, offline: bool = False
    ) -> None:
        self._store, self._objects, self._offline = store, objects, offline
        self.url, self.address = url, address
        self.path = store.root / "mirrors" / _folder(url)

    def ref(self, name: str) -> str | None:
        """
        Return the commit that the tag, the branch, or the full ref *name* is at the host now, or
        None when there is none.

        Raises:
            offline, source-unreachable: The host may not be asked, or does not answer.
        """
        self._online(name)
        wanted = (
            (name,)
            if name.startswith("refs/") or name == "HEAD"
            else (f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}")
        )
        # A login page counts as a repository without refs.
        if not (out := self._offered("HEAD", *wanted)) and not self._offered():
            raise self._unreachable(
                "does not answer", ["no branch and no tag is offered: is this a git repository?"]
            )
        commits = dict(line.split("\t")[::-1] for line in out.splitlines())
        return next(filter(None, map(commits.get, wanted)), None)

    def _offered(self, *refs: str) -> str:
        """Return what the host offers of *refs* (of all if there are none), a line for each."""
        try:
            return self._objects.text(
                "ls-remote", "--quiet", "--", self.address, *refs, timeout=PATIENCE
            )
        except GitError as error:
            raise self._unreachable("does not answer", error.details) from error

    def commit(self, commit: str) -> str:
        """
        Fetch *commit* with its trees, but without its history and its files, and return its tree.

        Raises:
            offline, source-unreachable: As `ref`; the latter, too, where the host does not have the
            commit.
        """
        if not self._objects.has(f"{commit}^{{commit}}"):
            with self._held() as has_histories:
                # In a mirror that has histories, a shallow fetch would cut them off.
                depth = () if has_histories else ("--depth=1",)
                self._fetch([f"+{commit}:refs/pinned/{commit}"], f"offer commit {commit}", *depth)
        return self._objects.resolve(f"{commit}^{{tree}}")

    def history(self, name: str, *, newest: bool = False) -> str | None:
        """
        Fetch the whole history of the branch, tag or full ref *name*, and return its commit as the
        host had it then.

        Args:
            newest: Ask the host even when the store has some state of it.

        Returns:
            None when the host has no such ref.
        """
        fetched = self.fetched(name)
        if fetched and not newest:
            return fetched
        named = self.ref(name)
        if named is None or named == fetched:
            return named
        with self._held():
            depth = ("--unshallow",) if (self.path / "shallow").exists() else ()
            self._fetch([f"+{named}:{_FETCHED}{name}"], f"offer {name}", *depth)
        return named

    def fetched(self, name: str) -> str | None:
        """
        Return the commit of *name* as of the last `history`, without asking the host; None when
        there was none.
        """
        if not (self.path / "HEAD").exists():
            return None
        words = ["rev-parse", "--verify", "--quiet", f"{_FETCHED}{name}^{{commit}}"]
        return self._git(words, check=False)[1].decode().strip() or None

    def files(self, ids: Collection[str]) -> None:
        """
        Fetch the file contents (blobs) *ids* that the store lacks, in one request.

        Raises:
            offline, source-unreachable: As `commit`; the latter, too, where the host lacks a file.
        """
        if missing := self._objects.missing(ids):
            wanted = "\n".join([*missing, ""]).encode()
            what = f"offer {len(missing)} files of its own commits"
            with self._held():
                self._fetch([], what, "--stdin", stdin=wanted)

    def tree(self, tree: str, without: Sequence[str] = ()) -> str:
        """
        Fetch every file of *tree*, and return the tree less the folders and files *without*.

        Raises:
            offline, source-unreachable: As `commit`; the folders left out need not exist at the
                host.
            git-failed: A folder of the tree cannot be read.
        """
        reduced = self._objects.without_paths(tree, without) if without else tree
        paths = self._objects.paths(reduced).values()
        self.files({blob for mode, blob in paths if mode != git.SUBMODULE})
        return reduced

    def _git(self, words: Sequence[str], **options: Any) -> tuple[int, bytes, str]:
        return git.run(words, cwd=self.path, env=git.HERE, **options)

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """
        Hold the mirror's lock, make the mirror when it is not there, clear up after a killed git;
        yield whether it has histories.
        """
        self._online("a part")
        with self._store.lock(f"mirror-{self.path.name}"):
            if not (self.path / "HEAD").exists():
                with self._store.building(self.path) as folder:
                    git.run(["init", "-q", "--bare", "."], cwd=folder)
                self._objects.borrow(self.path.parent)
            for pattern in ("*.lock", "refs/**/*.lock", "objects/pack/*tmp*"):
                for left in self.path.glob(pattern):
                    left.unlink(missing_ok=True)
            yield bool(self._git(["for-each-ref", "--count=1", _FETCHED])[1])

    def _fetch(
        self, refs: Sequence[str], what: str, *options: str, stdin: bytes | None = None
    ) -> None:
        # The address is given each time: it follows the mirror map of the run, and no other git
        # command may find it. Blobs that are wanted by id are not negotiated.
        settings = [*_BLOBLESS, "-c", f"remote.upstream.url={self.address}"]
        settings += ["-c", "fetch.negotiationAlgorithm=noop"] if stdin else []
        fetch = ["fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--filter=blob:none"]
        # git bounds no time in which a connection comes about.
        if not self.address.startswith("file://"):
            self._offered("HEAD")
        try:
            with console.progress(f"mirror {_readable(self.url)}", 0) as progress:

                def on_progress(phase: str, done: int, total: int) -> None:
                    progress.update(done, phase.lower(), total=total)

                self._git(
                    [*settings, *fetch, *options, "upstream", *refs],
                    stdin=stdin,
                    on_progress=on_progress,
                )
        except GitError as error:
            raise self._unreachable(f"does not {what}", error.details) from error

    def _online(self, what: str) -> None:
        if self._offline:
            raise SourceUnreachable(
                "offline", f"{what} of {redact_credentials(self.url)} is not in the store."
            )

    def _unreachable(self, what: str, details: Sequence[str]) -> SourceError:
        return SourceUnreachable(
            "source-unreachable",
            f"{redact_credentials(self.address)} {what}.",
            details=list(map(redact_credentials, details)),
        )


def _folder(url: str) -> str:
    """
    Return the name of the mirror's folder: readable, and different for different repositories.
    """
    readable = re.sub(r"[^A-Za-z0-9.-]+", "+", _readable(url))[-80:].strip("+.")
    return f"{readable}-{sha256_bytes(url.encode())[:8]}.git"


def _readable(url: str) -> str:
    """Return *url* without its scheme, credentials and suffix."""
    return url.removesuffix(".git").rsplit("://", maxsplit=1)[-1].rsplit("@", maxsplit=1)[-1]


def mirrored(mirrors: Mapping[str, str], url: str) -> str:
    """
    Return the address at which the repository *url* is reached.

    The longest beginning of *url* that is in *mirrors* is replaced. GitHub's addresses are compared
    without regard to case, as GitHub does. A local folder becomes a ``file://`` URL.
    """
    fitting = [prefix for prefix in mirrors if comparable(url).startswith(comparable(prefix))]
    if fitting:
        longest = max(fitting, key=len)
        url = mirrors[longest] + url[len(longest) :]
    return Path(url).absolute().as_uri() if "://" not in url and Path(url).is_dir() else url
