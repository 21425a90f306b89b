"""
The object database: trees addressed by their ids, and patches applied to a temporary index, so that
nothing is ever half applied.

Everything happens in one bare repository, which borrows from others. Each method is one question to
git.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.core.errors import GitError
from sparkwright.core.git import EXECUTABLE, HERE, REGULAR, SUBMODULE, run
from sparkwright.core.store import room_guard


class Change(msgspec.Struct, frozen=True):
    """
    One path that differs between two trees: ``A``dded, ``D``eleted, ``M``odified or ``T``ype
    changed.
    """

    status: str
    path: str


class Objects:
    """
    The object database at *path*, a bare repository; made when missing.

    Attributes:
        path: The repository.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "HEAD").exists() or not (path / "info" / "attributes").exists():
            self._make()

    def _make(self) -> None:
        from filelock import FileLock

        with room_guard(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        # Two processes with a fresh store begin with this, and git refuses the second init while
        # the first is under way.
        with FileLock(self.path / "init.lock"):
            run(["init", "-q", "--bare", "."], cwd=self.path)
            # A tree's own .gitattributes must not change bytes on checkout; this file outranks it
            # (gitattributes(5)).
            (self.path / "info").mkdir(exist_ok=True)
            fresh = self.path / "info" / "attributes.new"
            fresh.write_text("* -text -eol -filter -ident -working-tree-encoding -export-subst\n")
            # Renamed, since the file's presence says that all of this was done.
            os.replace(fresh, self.path / "info" / "attributes")

    def run(self, arguments: Sequence[str], **options: Any) -> tuple[int, bytes, str]:
        """Run git in the repository; see `sparkwright.core.git.run`."""
        return run(
            arguments, cwd=self.path, **options | {"env": {**HERE, **(options.get("env") or {})}}
        )

    def borrow(self, others: Iterable[Path]) -> None:
        """
        Let the objects of the repositories *others*, and of none that is gone, count as being here,
        too (gitrepository-layout(5)).
        """
        objects = self.path / "objects"
        wanted = {os.path.relpath(other / "objects", objects) for other in others}
        alternates = objects / "info" / "alternates"
        if wanted == set(_lines(alternates)):
            return
        from filelock import FileLock

        alternates.parent.mkdir(exist_ok=True)
        with FileLock(alternates.with_name("alternates.lock")):
            # Another process may have made a repository since *others* were listed.
            wanted |= {line for line in _lines(alternates) if (objects / line).is_dir()}
            fresh = alternates.with_name("alternates.new")
            fresh.write_text("".join(f"{line}\n" for line in sorted(wanted)))
            os.replace(fresh, alternates)

    def missing(self, ids: Collection[str]) -> list[str]:
        """Return those of the objects *ids* that are not there, sorted."""
        asked = "".join(f"{one}\n" for one in sorted(ids)).encode()
        out = self.run(["cat-file", "--batch-check"], stdin=asked)[1].decode() if ids else ""
        return [line.split()[0] for line in out.splitlines() if line.endswith(" missing")]

    def has(self, name: str) -> bool:
        """Return True if the object *name* (``<id>^{tree}`` and such) exists with that type."""
        return self.run(["cat-file", "-e", name], check=False)[0] == 0

    def whole(self, tree: str) -> bool:
        """Return True if *tree* exists with everything below it, down to the last file."""
        return self.run(["rev-list", "--objects", "--quiet", tree], check=False)[0] == 0

    def resolve(self, name: str) -> str:
        """Return the id of the object that *name* means."""
        return (
            self.run(["rev-parse", "--verify", "--quiet", "--end-of-options", name])[1]
            .decode()
            .strip()
        )

    def blob(self, tree: str, path: str) -> bytes | None:
        """Return the file at *path* of *tree*, or None when there is none."""
        status, data, _ = self.run(["cat-file", "blob", f"{tree}:{path}"], check=False)
        return data if status == 0 else None

    def paths(self, tree: str, folder: str = "") -> dict[str, tuple[str, str]]:
        """Return every file below *folder* of *tree*: path → (mode, blob id)."""
        out = self.run(
            ["ls-tree", "-r", "-z", "--full-tree", tree, *([f"{folder}/"] if folder else [])]
        )[1]
        rows = (
            row.split("\t", 1) for row in out.decode("utf-8", "surrogateescape").split("\0") if row
        )
        return {path: (head.split()[0], head.split()[2]) for head, path in rows}

    def files(self, tree: str, folder: str = "") -> Iterator[tuple[str, bytes]]:
        """
        Yield every regular file below *folder* of *tree* with its bytes, by one call of git for all
        of them.
        """
        yield from self.contents(
            {
                path: blob
                for path, (mode, blob) in self.paths(tree, folder).items()
                if mode in (REGULAR, EXECUTABLE)
            }
        )

    def contents(
        self, blobs: Mapping[str, str], env: Mapping[str, str] | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """
        Yield the bytes of *blobs* (path → id) by their paths, by one call of git for all of them.
        """
        ids = "".join(f"{blob}\n" for blob in blobs.values()).encode()
        out = self.run(["cat-file", "--batch"], stdin=ids, env=env)[1]
        start = 0
        for path, blob in blobs.items():
            head = out.index(b"\n", start)
            words = out[start:head].decode().split()
            if words[:2] != [blob, "blob"]:
                raise GitError(
                    "git-failed", f"git does not have {path}.", details=[" ".join(words)]
                )
            start = head + 1 + int(words[2]) + 1
            yield path, out[head + 1 : start - 1]

    def changes(self, before: str, after: str) -> tuple[Change, ...]:
        """Return the paths that differ between two trees, in order, renames shown as both."""
        out = self.run(["diff-tree", "-r", "-z", "--no-renames", "--name-status", before, after])[1]
        parts = out.decode("utf-8", "surrogateescape").split("\0")[:-1]
        return tuple(
            Change(status, path) for status, path in zip(parts[::2], parts[1::2], strict=True)
        )

    def with_files(self, tree: str, files: Mapping[str, bytes]) -> str:
        """
        Return *tree* with the bytes of *files* in place of what stood at their paths; modes stay.
        """
        modes = self.paths(tree)
        with self._index(tree) as env:
            rows = []
            for path, data in files.items():
                blob = self.run(["hash-object", "-w", "--stdin"], stdin=data)[1].decode().strip()
                rows.append(f"{modes.get(path, (REGULAR, ''))[0]} {blob}\t{path}\0")
            self.run(
                ["update-index", "-z", "--index-info"],
                env=env,
                stdin="".join(rows).encode("utf-8", "surrogateescape"),
            )
            return self._write_tree(env)

    def without_paths(self, tree: str, paths: Iterable[str]) -> str:
        """Return *tree* less the files and folders *paths*."""
        gone = tuple(f"{path}/" for path in paths)
        rows = "".join(
            f"0 {'0' * 40}\t{path}\0" for path in self.paths(tree) if f"{path}/".startswith(gone)
        )
        with self._index(tree) as env:
            self.run(
                ["update-index", "-z", "--index-info"],
                env=env,
                stdin=rows.encode("utf-8", "surrogateescape"),
            )
            return self._write_tree(env)

    def with_folders(self, tree: str, folders: Mapping[str, str]) -> str:
        """Return *tree* with the trees of *folders* in place of the submodules at their paths."""
        with self._index(tree) as env:
            rows = "".join(f"0 {'0' * 40}\t{path}\0" for path in folders)
            self.run(["update-index", "-z", "--index-info"], env=env, stdin=rows.encode())
            for path, folder in folders.items():
                self.run(["read-tree", "-i", f"--prefix={path}/", folder], env=env)
            return self._write_tree(env)

    def checkout(self, tree: str, folder: Path, index: Path) -> None:
        """
        Make *folder* hold exactly the tracked files of *tree*, touching only those that differ.

        Files that git does not track (a build's generated sources) stay. An interrupted checkout is
        finished by the next.

        Args:
            index: The index that goes with the folder; it remembers what is there.
        """
        with room_guard(self.path):
            folder.mkdir(parents=True, exist_ok=True)
        # Left behind by a killed git. Callers hold the store's lock of the folder, so no living git
        # can own it.
        Path(f"{index}.lock").unlink(missing_ok=True)
        env = {
            "GIT_INDEX_FILE": str(index),
            "GIT_WORK_TREE": str(folder),
            "GIT_DIR": str(self.path),
        }
        if (
            index.exists()
            and self.run(["update-index", "-q", "--refresh"], env=env, check=False)[0] > 1
        ):
            index.unlink()
        pending = Path(f"{index}.pending")
        left = pending.read_text() if pending.exists() else ""
        pending.write_text(tree)
        self.run(["read-tree", "--reset", "-u", tree], env=env)
        if left and left != tree and self.has(f"{left}^{{tree}}"):
            # A killed checkout of another tree wrote files that its index never came to know.
            for path in self.paths(left).keys() - self.paths(tree).keys():
                (folder / path).unlink(missing_ok=True)
        pending.unlink()

    def archive(self, tree: str, folder: Path) -> None:
        """Write the files of *tree* to the empty *folder*, remembering nothing."""
        with tempfile.TemporaryDirectory(dir=self.path) as scratch:
            self.checkout(tree, folder, Path(scratch) / "index")

    def submodules(self, tree: str) -> dict[str, str]:
        """Return the submodules of *tree*: path → commit."""
        return {path: pin for path, (mode, pin) in self.paths(tree).items() if mode == SUBMODULE}

    def remote_ref(self, url: str, ref: str, patience: int) -> str | None:
        """
        Return the commit that the tag, branch or full ref *ref* of *url* names, or None when there
        is none.

        Args:
            patience: Seconds after which a host that says nothing counts as not answering.

        Raises:
            git-failed: The host does not answer, or not as a host of repositories does.
        """
        wanted = (
            (ref,)
            if ref.startswith("refs/") or ref == "HEAD"
            else (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}")
        )
        ask = ["ls-remote", "--quiet", "--", url]
        out = self.run([*ask, "HEAD", *wanted], timeout=patience)[1].decode()
        # A login page without a line end counts as a repository without refs.
        if not out and not self.run(ask, timeout=patience)[1]:
            raise GitError(
                "git-failed",
                "git found no ref at all.",
                details=["no branch and no tag is offered: is this a git repository?"],
            )
        found = {name: commit for commit, name in (line.split("\t") for line in out.splitlines())}
        return next((found[name] for name in wanted if name in found), None)

    def store_files(self, files: Iterable[tuple[str, str, bytes]]) -> str:
        """Store *files* (path, mode, bytes) as a tree, byte for byte, and return its id."""
        ref = f"refs/import/{os.getpid()}"
        with room_guard(self.path), tempfile.TemporaryFile(dir=self.path) as stream:
            stream.write(f"commit {ref}\ncommitter sparkwright <> 0 +0000\ndata 0\n".encode())
            for path, mode, data in files:
                stream.write(
                    b"M %s inline %s\ndata %d\n" % (mode.encode(), quoted(path), len(data))
                )
                stream.write(data)
                stream.write(b"\n")
            stream.write(b"done\n")
            stream.seek(0)
            self.run(
                [
                    "-c",
                    "core.compression=1",
                    "fast-import",
                    "--quiet",
                    "--done",
                    "--force",
                    "--depth=0",
                ],
                stdin=stream,
            )
        tree = self.resolve(f"{ref}^{{tree}}")
        self.run(["update-ref", "-d", ref])
        return tree

    def _write_tree(self, env: Mapping[str, str]) -> str:
        # A tree of which only a few files were brought is still a tree; what a build reads was
        # brought whole (Mirror.tree).
        return self.run(["write-tree", "--missing-ok"], env=env)[1].decode().strip()

    def _index(self, tree: str) -> _TemporaryIndex:
        return _TemporaryIndex(self, tree)


class _TemporaryIndex:
    """An index filled from a tree; the block gets the environment that selects it."""

    def __init__(self, objects: Objects, tree: str) -> None:
        self._objects, self._tree = objects, tree
        with room_guard(objects.path):
            self._folder = tempfile.TemporaryDirectory(dir=objects.path, prefix="index-")

    def __enter__(self) -> Mapping[str, str]:
        env = {"GIT_INDEX_FILE": str(Path(self._folder.name) / "index")}
        self._objects.run(["read-tree", self._tree], env=env)
        return env

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def quoted(path: str) -> bytes:
    """Return *path* as fast-import reads it (git-fast-import(1): C-style quoting)."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return b'"' + escaped.encode("utf-8", "surrogateescape") + b'"'


def blob_id(data: bytes) -> str:
    """Return the id that git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
