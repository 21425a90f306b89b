"""
Apply patches in git's object database: exact context, no fuzz, no 3-way merge, and a tree id after
every step.

Ours must apply at the lines that they name. A pick was made for another commit, so its hunks may
have moved, but each must then fit at one place only. git decides whether a patch fits. The checks
here are for what git lets pass: lines that occur at several places, a last line without its end
that is joined to the next (apply.c treats both as equal), a change that is there already, a patch
without effect.
"""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.cherry_picks.patch import Patch, PatchError, sections
from sparkwright.core.git import EXECUTABLE, REGULAR, Objects
from sparkwright.core.words import HUNK_MOVED

#: Runs git as `Objects.run` does, with an index of its own.
Git = Callable[..., tuple[int, bytes, str]]
#: The mark of a last line without a line end.
_OPEN_END = b"\n\\ "


class AppliedPatch(msgspec.Struct, frozen=True):
    """
    An applied patch, and the tree after it.

    Attributes:
        pick: Number of the pull request; 0 for a patch of ours.
    """

    name: str
    sha256: str
    subject: str
    reason: str
    tree: str
    pick: int = 0


class PatchedTree(msgspec.Struct, frozen=True):
    """
    A source with its series applied.

    Attributes:
        tree: Tree id after the last patch; that of the source if the series is empty.
    """

    tree: str
    steps: tuple[AppliedPatch, ...]


class Outcome(msgspec.Struct, frozen=True):
    """
    The result of trying one patch.

    Attributes:
        tree: The tree after it; the tree before it unless it was applied.
        moved: Number of hunks that were applied at other lines than they name.
        says: git's messages, or the reason for the status.
        reverts: It does not apply, and can be reverted in the tree; see `try_patches`.
    """

    status: Literal["applied", "already-upstream", "empty", "conflict"]
    tree: str
    moved: int = 0
    says: tuple[str, ...] = ()
    reverts: bool = False


@contextlib.contextmanager
def _index_of(objects: Objects, tree: str) -> Iterator[Git]:
    """
    Yield a function that runs git with a temporary index of *tree*. Objects that git writes lie in
    a temporary folder, and not in the store; they are not synced to the disk.
    """
    with tempfile.TemporaryDirectory(dir=objects.path, prefix="index-") as name:
        folder = Path(name).resolve()
        env = {
            "GIT_OBJECT_DIRECTORY": str(folder),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.path.resolve() / "objects"),
            "GIT_INDEX_FILE": str(folder / "index"),
        }
        git = partial(objects.run, env=env, durable=False)
        git(["read-tree", tree])
        yield git


def _tree(git: Git) -> str:
    return git(["write-tree", "--missing-ok"])[1].decode().strip()


def _apply(git: Git, patch: bytes, *options: str) -> tuple[bool, str]:
    """
    Apply or check *patch* exactly, by the *options* of git apply, and return whether it fits, and
    git's messages; the index stays as it is if it does not fit.
    """
    words = ["apply", "--cached", "--numstat", "-z", "--verbose", "--whitespace=nowarn"]
    status, names, output = git([*words, *options, "-"], stdin=patch, check=False)
    # git leaves out a binary hunk that is cut off and may still end with 0, so the files are
    # counted.
    return not status and names.count(b"\0") >= len(re.findall(rb"(?m)^diff --git ", patch)), output


def apply_patches(objects: Objects, fork: str, base: str, patches: Sequence[Patch]) -> PatchedTree:
    """
    Apply *patches* to the tree *base*, in order; takes and raises as `patched_tree`.
    """
    return patched_tree(objects, fork, base, patches, evaluate(objects, base, patches, strict=True))


def patched_tree(
    objects: Objects,
    fork: str,
    base: str,
    patches: Sequence[Patch],
    outcomes: Sequence[Outcome],
) -> PatchedTree:
    """
    Return the tree of *base* with all *patches*, of which `evaluate` returned the *outcomes*.

    Raises:
        patch-conflict: A patch does not apply.
        patch-already-upstream: The base or an earlier patch has the change already.
        patch-no-effect: A patch leaves the tree as it was.
        patch-invalid: A patch changes a file that it does not name, a link or a submodule.
    """
    if outcomes and outcomes[-1].status != "applied":
        outcome, patch = outcomes[-1], patches[len(outcomes) - 1]
        details = [*outcome.says, f"tree before it: {outcome.tree}"]
        if outcome.status == "already-upstream":
            details = [patch.subject, f"drop it when: {patch.drop_when}", *details]
        reference, what = {
            "already-upstream": ("patch-already-upstream", f"is in {fork} already"),
            "empty": ("patch-no-effect", f"changes nothing in {fork}"),
            "conflict": ("patch-conflict", f"does not apply to {fork}"),
        }[outcome.status]
        raise PatchError(reference, f"{patch.name} {what}.", details=details)
    modes = objects.paths(outcomes[-1].tree) if outcomes else {}
    steps, wrong, tree = list[AppliedPatch](), list[str](), base
    # git finds diffs behind text where `sections` sees none, so both lists of paths are compared.
    for patch, outcome in zip(patches, outcomes, strict=True):
        for path in objects.changes(tree, outcome.tree):
            mode = modes.get(path, (REGULAR,))[0]
            if path not in patch.files or mode not in (REGULAR, EXECUTABLE):
                wrong.append(f"{patch.name}: {path}: {mode if path in modes else 'removed'}")
        tree = outcome.tree
        steps.append(
            AppliedPatch(patch.name, patch.sha256, patch.subject, patch.reason, tree, patch.pick)
        )
    if wrong:
        raise PatchError(
            "patch-invalid",
            f"A patch of {fork} changes a link, a submodule, or a file that it does not name.",
            details=wrong,
        )
    return PatchedTree(tree, tuple(steps))


def evaluate(
    objects: Objects, base: str, patches: Sequence[Patch], *, strict: bool = False
) -> list[Outcome]:
    """
    Try every patch, without those before it that do not apply.

    Args:
        strict: Apply as a build does: patches of ours only at the lines that they name, and none
            after the first that does not apply. Otherwise all may move; that is for upkeep.
    """
    outcomes, trees = list[Outcome](), [base]
    with _index_of(objects, base) as git:
        for patch in patches:
            movable = not strict or bool(patch.pick)
            outcomes.append(_attempt(git, trees[-1], patch, movable=movable))
            trees.append(outcomes[-1].tree)
            if strict and outcomes[-1].status != "applied":
                break
        # Trees in between are packed, too, as the last patch may bring back the base.
        if set(trees) != {base}:
            wanted = "\n".join([*trees, "--not", base, ""]).encode()
            words = ["pack-objects", "--revs", "--stdout", "--quiet"]
            objects.run(["index-pack", "--stdin"], stdin=git(words, stdin=wanted)[1])
    return outcomes


def _attempt(git: Git, before: str, patch: Patch, *, movable: bool) -> Outcome:
    """Try *patch* on the index, which holds the tree *before* and then that of the outcome."""
    hunks = [(hunk.before, hunk.after) for part in sections(patch.data) for hunk in part.hunks]
    same_lines = hunks and all(old == new for old, new in hunks)
    if not patch.data.strip() or (same_lines and b"\nnew mode " not in patch.data):
        return Outcome("empty", before, says=("it changes nothing",))
    fits, output = _apply(git, patch.data, "--apply")
    # git leaves out a binary hunk that is cut off, and applies the rest.
    unchanged = not fits and b"\nGIT binary patch" not in patch.data
    moved, after = HUNK_MOVED.findall(output), before if unchanged else _tree(git)
    if fits and after == before:
        return Outcome(
            "already-upstream", before, says=("the tree is the same with it as without",)
        )
    # A patch that the tree has already can fit a second time, unless one of its hunks has lines
    # that tell the old text from the new one.
    clear = any(not (old and new and old[: len(new)] == new[: len(old)]) for old, new in hunks)
    if fits and not moved and (clear or not hunks) and _OPEN_END not in patch.data:
        return Outcome("applied", after)
    if after != before:
        git(["read-tree", before])
    reverts, messages = _apply(git, patch.data, "--reverse", "--check")
    # That its result is found at other lines proves nothing if the patch fits at its own.
    elsewhere = HUNK_MOVED.search(messages) and not (movable and (moved or not fits))
    if reverts and not elsewhere and not any(_joined_lines(git, patch, done=True)):
        return Outcome(
            "already-upstream", before, says=("the whole change can be reverted in this tree",)
        )
    if reasons := _obstacles(git, patch, fits, output, movable=movable):
        return Outcome("conflict", before, says=tuple(reasons))
    if after != before:
        git(["read-tree", after])
    return Outcome("applied", after, len(moved))


def _obstacles(git: Git, patch: Patch, fits: bool, output: str, *, movable: bool) -> list[str]:
    """Return why the patch is a conflict; nothing if it is none."""
    if not fits:
        # Behind "while searching for" git repeats lines of the patch, which the report shows.
        errors = re.findall(r"^error:(?!.*while searching for).*", output, re.MULTILINE)
        return errors or output.splitlines()[-5:] or ["git apply was killed"]
    if joined := list(_joined_lines(git, patch)):
        return ["it ends a file that continues in this tree", *joined]
    moved = HUNK_MOVED.findall(output)
    if moved and not movable:
        return ["it applies only at other lines than it states", *moved]
    if moved and (unclear := list(_ambiguous_hunks(git, patch))):
        return ["hunks that moved fit in more than one place", *unclear]
    return []


def try_patches(objects: Objects, base: str, patches: Sequence[Patch]) -> dict[str, Outcome]:
    """
    Return by its name the outcome of each of *patches* on the tree *base*: without those before it
    that do not apply, and at other lines if need be. Those that do not apply are then reverted, the
    newest first. The trees of the outcomes are not stored.
    """
    tree, outcomes = base, dict[str, Outcome]()
    with _index_of(objects, base) as git:
        for patch in patches:
            outcomes[patch.name] = _attempt(git, tree, patch, movable=True)
            tree = outcomes[patch.name].tree
        git(["read-tree", base])
        for patch in reversed(patches):
            outcome = outcomes[patch.name]
            # A joined line is another line; and git reverts a change of modes alone in any tree.
            if outcome.status == "applied" or any(_joined_lines(git, patch, done=True)):
                continue
            if _apply(git, patch.data, "--reverse", "--apply")[0]:
                before, base = base, _tree(git)
                outcomes[patch.name] = msgspec.structs.replace(outcome, reverts=before != base)
    return outcomes


def _text(git: Git, path: str) -> bytes:
    """Return the file at *path* of the index; nothing if there is none."""
    return git(["cat-file", "blob", f":{path}"], check=False)[1]


def _ambiguous_hunks(git: Git, patch: Patch) -> Iterator[str]:
    """Yield the hunks of files with a moved hunk that fit at several places or name no line."""
    for part in sections(patch.data):
        hunks = part.hunks if part.old else ()
        text, moved, unclear = _text(git, part.old) if hunks else b"", False, list[str]()
        for hunk in hunks:
            lines = hunk.fitting_lines(text)
            moved = moved or hunk.start not in lines
            if len(lines) > 1 or not hunk.before:
                unclear.append(f"{part.path}: {hunk.label}")
        if moved:
            yield from unclear


def _joined_lines(git: Git, patch: Patch, *, done: bool = False) -> Iterator[str]:
    """
    Yield the hunks that end with a line without a line end, where the file has one.

    Args:
        done: Look for the replacement instead of the replaced lines.
    """
    for part in sections(patch.data) if _OPEN_END in patch.data else ():
        for hunk in part.hunks[-1:]:
            lines, path = (hunk.after, part.new) if done else (hunk.before, part.old)
            ends_open = path and lines and not lines[-1].endswith(b"\n")
            if ends_open and not hunk.fitting_lines(_text(git, path), done=done):
                yield f"{path}: {hunk.label}"
