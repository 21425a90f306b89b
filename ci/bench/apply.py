"""Twenty patches onto vLLM in the object database, against `git am` in a checkout of it. Needs fetched sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import measure
from sparkwright.cherry_picks import apply, patch
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.git import Objects
from sparkwright.forks import fetch

HEAD = "From: Bench <bench@bench.invalid>\nDate: Fri, 20 Nov 2026 12:00:00 +0000\nSubject: [PATCH] Change file {number}\n\nAs told.\n\n"
TRAILERS = "Upstream-Status: Inappropriate\nReason: something to apply\nDrop-When: the benchmark ends\n---\n"


def made(objects: Objects, tree: str, count: int) -> tuple[list[tuple[bytes, Patch]], str]:
    """Return *count* patches of one line each, in files all over vLLM's Python, and the tree that they give."""
    paths = [
        path
        for path in sorted(objects.paths(tree))
        if path.startswith("vllm/") and path.endswith(".py") and "__init__" not in path
    ]
    found = []
    for number, path in enumerate(paths[:: len(paths) // count][:count]):
        lines = (objects.blob(tree, path) or b"").split(b"\n")
        lines.insert(len(lines) // 2, b"# changed by patch %d" % number)
        after = objects.with_files(tree, {path: b"\n".join(lines)})
        mail = (HEAD.format(number=number) + TRAILERS).encode() + patch.render(
            objects, tree, after, context=1
        )
        found.append((mail, patch.parse(f"{number:03}.patch", mail)))
        tree = after
    return found, tree


options = measure.arguments(__doc__ or "")
context = measure.context(options)
objects = context.objects
base = fetch.fetch(context, "vllm").tree
patches, expected = made(objects, base, 20)
folder = Path(tempfile.mkdtemp())
env = {
    **os.environ,
    **{
        f"GIT_{role}_{field}": "bench"
        for role in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    },
}
env["GIT_CONFIG_GLOBAL"] = os.devnull
for mail, one in patches:
    (folder / one.name).write_bytes(mail)


def git(place: Path, *words: str) -> str:
    """Run git as a user does, and return what it prints."""
    return subprocess.run(
        ["git", *words], cwd=place, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def ours() -> None:
    """Do the work itself, past the store's records of it."""
    assert apply.apply_patches(objects, "vllm", base, [one for _, one in patches]).tree == expected


def am(place: Path) -> None:
    """Let git am work in the checkout *place*, and take it back by moving the branch alone."""
    git(place, "am", "--quiet", *sorted(str(path) for path in folder.glob("*.patch")))
    assert git(place, "rev-parse", "HEAD^{tree}") == expected
    git(place, "reset", "--quiet", "--hard", "base")


def checkout() -> Path:
    """Write out the tree and commit it."""
    place = Path(tempfile.mkdtemp(dir=folder)) / "vllm"
    objects.archive(base, place)
    for words in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-qm", "base"], ["tag", "base"]):
        git(place, *words)
    return place


def both() -> None:
    """Make a checkout for the series, as a build without an object database does."""
    place = checkout()
    am(place)
    shutil.rmtree(place.parent)


there = checkout()
cases = {
    "object database": ours,
    "git am in a checkout that is there": lambda: am(there),
    "checkout and git am": both,
}
measure.compare("20 patches onto vLLM", cases, options)
shutil.rmtree(folder)
