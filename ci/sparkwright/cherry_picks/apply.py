"""
Apply patches in git's object database: exact context, no fuzz, no 3-way merge, and a tree id after
every step.

Ours must apply at the lines that they name. A pick was made for another commit, so its hunks may
have moved, but each must then fit at one place only. git decides whether a patch fits. The checks
here are for what git lets pass: lines that occur at several places, a last line without its end
that is joined to the next (apply.c treats both as equal), a change that is there already, a patch
without effect.

git works on an index of the files that the series names, and on objects that are not flushed to the
disk. One fast-import then stores the trees of all steps, so the time does not grow with the source.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from sparkwright.cherry_picks.patch import Patch, PatchError
from sparkwright.core.console import console
from sparkwright.core.git_store import Objects, quoted

_OFFSET = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset -?\d+ lines?\)")

#: The files of an index: path → (mode, blob id).
Files = dict[str, tuple[str, str]]


class AppliedPatch(msgspec.Struct, frozen=True):
    """
    An applied patch, and the tree after it.

    Attributes:
        pick: Number of the pull request; 0 for a patch of ours.
        moved: Number of hunks that were applied at other lines than they name.
    """

    name: str
    sha256: str
    subject: str
    reason: str
    tree: str
    pick: int = 0
    moved: int = 0


class PatchedTree(msgspec.Struct, frozen=True):
    """
    A source with its series applied.

    Attributes:
        base: Tree id of the source.
        tree: Tree id after the last patch; equal to *base* if the series is empty.
    """

    fork: str
    base: str
    tree: str
    steps: tuple[AppliedPatch, ...]


class Outcome(msgspec.Struct, frozen=True):
    """
    The result of trying one patch.

    Attributes:
        tree: The tree after it; the tree before it unless it was applied.
        moved: See `AppliedPatch`.
        says: git's messages, or the reason for the status.
    """

    status: Literal["applied", "already-upstream", "empty", "conflict"]
    tree: str = ""
    moved: int = 0
    says: tuple[str, ...] = ()


#: Returns the failure for a patch that conflicts with a tree, from the patches before it and git's
#: messages.
Explain = Callable[[str, Patch, Sequence[Patch], Sequence[str]], PatchError]


class SeriesIndex:
    """A temporary index of the files of *base* that *patches* name; a context manager."""

    def __init__(self, objects: Objects, base: str, patches: Sequence[Patch]) -> None:
        self._objects, self._base = objects, base
        self._wanted = {path for patch in patches for path in _paths(patch)}
        self._folder = tempfile.TemporaryDirectory(dir=objects.path, prefix="index-")

    def __enter__(self) -> SeriesIndex:
        folder = Path(self._folder.name)
        (folder / "info").mkdir()
        (folder / "info" / "alternates").write_text(f"{self._objects.path.resolve() / 'objects'}\n")
        self.path = folder / "index"
        self._env = {"GIT_OBJECT_DIRECTORY": str(folder), "GIT_INDEX_FILE": str(self.path)}
        # A file may stand where a new path has a folder, and a folder where a new file is to be.
        folders = {str(parent) for path in self._wanted for parent in PurePosixPath(path).parents}
        paths = self._objects.paths(self._base)
        named = (self._wanted | folders) & paths.keys()
        parents = {path.rpartition("/")[0] for path in paths}
        for path in self._wanted - paths.keys():
            if any(f"{parent}/".startswith(f"{path}/") for parent in parents):
                named |= {name for name in paths if name.startswith(f"{path}/")}
        self.base = {path: paths[path] for path in named}
        rows = (f"{mode} {blob}\t{path}\0" for path, (mode, blob) in self.base.items())
        entries = "".join(rows).encode("utf-8", "surrogateescape")
        self._git("update-index", "--force-write-index", "-z", "--index-info", stdin=entries)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def _git(self, *words: str, **options: Any) -> tuple[int, bytes, str]:
        return self._objects.run(words, env=self._env, durable=False, **options)

    def apply(
        self, patch: bytes, *, reverse: bool = False, check: bool = False
    ) -> tuple[bool, str]:
        """
        Apply *patch* exactly, and return whether it fits, and git's messages with its offsets.

        Args:
            reverse: Revert the patch instead.
            check: Leave the index as it is; it is left so, too, if the patch does not fit.
        """
        how = [*(["--reverse"] if reverse else []), *(["--check"] if check else [])]
        words = ["apply", "--cached", "--verbose", "--whitespace=nowarn", *how, "-"]
        status, _, output = self._git(*words, stdin=patch, check=False)
        # A binary hunk that is cut off is an error to git, but its status is that of the rest.
        failed = status or any(line.startswith("error:") for line in output.splitlines())
        return not failed, output

    def files(self) -> Files:
        """Return the files that the index holds."""
        out = self._git("ls-files", "-s", "-z")[1].decode("utf-8", "surrogateescape")
        rows = (row.split("\t", 1) for row in out.split("\0") if row)
        return {path: (head.split()[0], head.split()[1]) for head, path in rows}

    def blob(self, path: str) -> bytes:
        """Return the file at *path*; nothing if there is none."""
        return self._git("cat-file", "blob", f":{path}", check=False)[1]

    def store(self, states: Sequence[Files]) -> list[str]:
        """Store a tree for each of *states*, in order, and return their ids."""
        before, stored = self.base, {blob for _, blob in self.base.values()}
        blobs = {blob: blob for files in states for _, blob in files.values() if blob not in stored}
        contents = dict(self._objects.contents(blobs, env=self._env))
        ref = f"refs/import/{Path(self._folder.name).name}"
        stream = b""
        for number, files in enumerate(states):
            stream += f"commit {ref}\ncommitter sparkwright <> 0 +0000\ndata 0\n".encode()
            stream += b"" if number else f'M 040000 {self._base} ""\n'.encode()
            for path in before.keys() - files.keys():
                stream += b"D %s\n" % quoted(path)
            for path, (mode, blob) in files.items():
                if before.get(path) != (mode, blob):
                    data = contents.get(blob)
                    source = blob if data is None else "inline"
                    stream += f"M {mode} {source} ".encode() + quoted(path) + b"\n"
                    stream += b"" if data is None else b"data %d\n%s\n" % (len(data), data)
            stream += b'ls ""\n'
            before = files
        stream += f"reset {ref}\nfrom {'0' * 40}\n\ndone\n".encode()
        words = ["-c", "fastimport.unpackLimit=1", "fast-import", "--quiet", "--done"]
        out = self._objects.run(words, stdin=stream)[1].decode()
        return [line.split()[2] for line in out.splitlines()]


def apply_patches(
    objects: Objects, fork: str, base: str, patches: Sequence[Patch], explain: Explain | None = None
) -> PatchedTree:
    """
    Apply *patches* to the tree *base*, in order.

    Raises:
        patch-conflict: A patch does not apply.
        patch-already-upstream: The base or an earlier patch has the change already.
        patch-no-effect: A patch leaves the tree as it was.
    """
    steps = list[AppliedPatch]()
    with console.step(f"apply {len(patches)} patches to {fork}"):
        for patch, outcome in zip(
            patches, evaluate(objects, base, patches, strict=True), strict=False
        ):
            if outcome.status != "applied":
                error = refusal(fork, patch, outcome)
                if explain and outcome.status == "conflict":
                    raise explain(outcome.tree, patch, patches[: len(steps)], error.details)
                raise error
            record = (patch.name, patch.sha256, patch.subject, patch.reason, outcome.tree)
            steps.append(AppliedPatch(*record, patch.pick, outcome.moved))
            console.note(f"{outcome.tree[:12]}  {patch.subject}")
    return PatchedTree(fork, base, steps[-1].tree if steps else base, tuple(steps))


def refusal(fork: str, patch: Patch, outcome: Outcome) -> PatchError:
    """Return the failure for a patch that was not applied."""
    details = [*outcome.says, f"tree before it: {outcome.tree}"]
    if outcome.status == "already-upstream":
        details = [patch.subject, f"drop it when: {patch.drop_when}", *details]
        return PatchError(
            "patch-already-upstream", f"{patch.name} is in {fork} already.", details=details
        )
    if outcome.status == "empty":
        return PatchError(
            "patch-no-effect", f"{patch.name} changes nothing in {fork}.", details=details
        )
    return PatchError("patch-conflict", f"{patch.name} does not apply to {fork}.", details=details)


def evaluate(
    objects: Objects, base: str, patches: Sequence[Patch], *, strict: bool = False
) -> list[Outcome]:
    """
    Try every patch, without those before it that do not apply.

    Args:
        strict: Apply as a build does: patches of ours only at the lines that they name, and none
            after the first that does not apply. Otherwise all may move; that is for upkeep.
    """
    outcomes, states = list[Outcome](), list[Files]()
    if not patches:
        return []
    with SeriesIndex(objects, base, patches) as index:
        for outcome, files in _try_all(index, index.base, patches, strict=strict):
            outcomes.append(outcome)
            states.append(files)
            if strict and outcome.status != "applied":
                break
        trees = index.store(states)
    replace = msgspec.structs.replace
    return [replace(done, tree=tree) for done, tree in zip(outcomes, trees, strict=True)]


def _try_all(
    index: SeriesIndex, files: Files, patches: Sequence[Patch], *, strict: bool
) -> Iterator[tuple[Outcome, Files]]:
    """Yield the outcome of each patch and the files after it."""
    for batch in _batches(patches):
        states = _apply_batch(index, files, batch) if len(batch) > 1 else []
        for state in states:
            yield Outcome("applied"), state
        files = states[-1] if states else files
        for patch in batch[len(states) :]:
            outcome = _attempt(index, files, patch, movable=not strict or bool(patch.pick))
            files = index.files() if outcome.status == "applied" else files
            yield outcome, files


def _batches(patches: Sequence[Patch]) -> Iterator[list[Patch]]:
    """Yield the patches in order, those together that change different files in a plain way."""
    batch, paths = list[Patch](), set[str]()
    for patch in patches:
        plain = patch.data.strip() and b"\n\\ " not in patch.data and not _repeatable(patch)
        if batch and (not plain or paths & _paths(patch)):
            yield batch
            batch, paths = [], set()
        batch.append(patch)
        paths |= _paths(patch)
        if not plain:
            yield batch
            batch, paths = [], set()
    if batch:
        yield batch


def _apply_batch(index: SeriesIndex, files: Files, batch: Sequence[Patch]) -> list[Files]:
    """
    Apply patches of different files by one call of git, and return the files after each; nothing
    if they have to be tried one by one.
    """
    saved, states = index.path.read_bytes(), [files]
    fits, output = index.apply(b"".join(patch.data for patch in batch))
    after = index.files() if fits and not _OFFSET.search(output) else files
    for patch in batch:
        state = {path: entry for path, entry in states[-1].items() if path not in _paths(patch)}
        states.append(state | {path: after[path] for path in _paths(patch) if path in after})
        if states[-1] == states[-2]:
            index.path.write_bytes(saved)
            return []
    return states[1:]


def _attempt(index: SeriesIndex, before: Files, patch: Patch, *, movable: bool) -> Outcome:
    """Try *patch* on *index*, which holds *before* and is changed only if the patch applies."""
    parts, same = patch.sections(), _keeps_lines(patch)
    if not patch.data.strip():
        return Outcome("empty", says=("its diff is empty",))
    if same and all(
        part.hunks and part.old == part.new and b"\nnew mode " not in part.data for part in parts
    ):
        return Outcome("empty", says=("it changes nothing",))
    fits, output = index.apply(patch.data, check=True)
    moved = len(_OFFSET.findall(output))
    if not fits or moved or b"\n\\ " in patch.data or _repeatable(patch):
        reverse_fits, reverse_output = index.apply(patch.data, reverse=True, check=True)
        reverse_fits = reverse_fits and not list(_joined_lines(index, patch, done=True))
        # A patch that fits at its own lines is not there already because similar lines are
        # elsewhere.
        elsewhere = bool(_OFFSET.search(reverse_output)) and not (movable and (moved or not fits))
        if reverse_fits and not elsewhere and not (fits and same):
            says = ("the whole change can be reverted in this tree",)
            return Outcome("already-upstream", says=says)
        if reasons := _obstacles(index, patch, fits, output, movable=movable):
            return Outcome("conflict", says=tuple(reasons))
    # git checks less than it does: a new file may stand where the index has a folder.
    applied, output = index.apply(patch.data)
    if not applied:
        return Outcome("conflict", says=tuple(output.strip().splitlines()[-5:]))
    if index.files() == before:
        return Outcome("already-upstream", says=("the tree is the same with it as without",))
    return Outcome("applied", moved=moved)


def _obstacles(
    index: SeriesIndex, patch: Patch, fits: bool, output: str, *, movable: bool
) -> list[str]:
    """Return why the patch is a conflict; nothing if it is none."""
    if not fits:
        # "while searching for" is followed by lines of the patch, which the report has.
        errors = [
            line
            for line in output.splitlines()
            if line.startswith("error:") and "while searching for" not in line
        ]
        return errors or output.strip().splitlines()[-5:]
    if joined := list(_joined_lines(index, patch)):
        return ["it ends a file where this tree goes on", *joined]
    moved = _OFFSET.findall(output)
    if moved and not movable:
        return ["it applies only at other lines than it names", *moved]
    if moved and (unclear := list(_ambiguous_hunks(index, patch))):
        return ["hunks that fit at other lines than they name fit there more than once", *unclear]
    return []


def taken_away(objects: Objects, tree: str, patches: Sequence[Patch]) -> frozenset[str]:
    """
    Return the names of the *patches* that can be reverted in *tree*, the newest first, so that
    *tree* has them.
    """
    present = set()
    with SeriesIndex(objects, tree, patches) as index:
        for patch in reversed(patches):
            # git reverts a change of modes alone in any tree, with a warning; and a joined line is
            # another line.
            modes = _keeps_lines(patch) and all(
                part.old == part.new and not part.binary for part in patch.sections()
            )
            ignored = not patch.data.strip() or modes or any(_joined_lines(index, patch, done=True))
            if not ignored and index.apply(patch.data, reverse=True)[0]:
                present.add(patch.name)
    return frozenset(present)


def _paths(patch: Patch) -> set[str]:
    return {path for part in patch.sections() for path in (part.old, part.new) if path}


def _keeps_lines(patch: Patch) -> bool:
    """Return whether every hunk, if any, replaces lines by the same lines."""
    return all(hunk.before == hunk.after for part in patch.sections() for hunk in part.hunks)


def _repeatable(patch: Patch) -> bool:
    """
    Return whether the patch may fit where it was applied already: no hunk shows which of both
    states a file has.
    """
    return all(
        old == new
        for part in patch.sections()
        for hunk in part.hunks
        for old, new in zip(hunk.before, hunk.after, strict=False)
    )


def _ambiguous_hunks(index: SeriesIndex, patch: Patch) -> Iterator[str]:
    """Yield the hunks of files with a moved hunk that fit at several places or name no line."""
    for part in patch.sections():
        text = index.blob(part.old) if part.hunks and part.old else b""
        hunks = [(hunk, hunk.places(text)) for hunk in part.hunks if part.old]
        for hunk, places in [] if all(hunk.start in places for hunk, places in hunks) else hunks:
            if len(places) > 1:
                yield f"{part.path}: {hunk.label} at lines {', '.join(map(str, places[:5]))}"
            if not hunk.before:
                yield f"{part.path}: {hunk.label} names no line that is there"


def _joined_lines(index: SeriesIndex, patch: Patch, *, done: bool = False) -> Iterator[str]:
    """
    Yield the hunks that end with a line without a line end, where the file has one.

    Args:
        done: Look for the replacement instead of the replaced lines.
    """
    for part in patch.sections() if b"\n\\ " in patch.data else ():
        for hunk in part.hunks[-1:]:
            lines, path = (hunk.after, part.new) if done else (hunk.before, part.old)
            ends_open = path and lines and not lines[-1].endswith(b"\n")
            if ends_open and not hunk.places(index.blob(path), done=done):
                yield f"{path}: {hunk.label}"
