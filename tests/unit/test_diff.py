"""Diffs: rendered in one way whoever asks, taken apart without loss, and refused when they are cut, garbled or leave the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.cherry_picks import patch
from sparkwright.core import git
from sparkwright.core.git import Objects

#: Path → mode and bytes, before and after: edited in two places, without a last line end, of another mode, gone, new, and binary; names that git quotes.
EDITED = "".join(f"{number}\r\n" for number in range(40)).encode()
BEFORE = {
    'quo"ted ü/a b.txt': (git.REGULAR, EDITED), "d/e": (git.REGULAR, b"x\ny"), "-dash": (git.REGULAR, b"m\n"), "gone": (git.REGULAR, b"--- a/x\n"),
    "binary": (git.REGULAR, b"\0\n"), "same": (git.REGULAR, b"s\n"),
}  # fmt: skip
AFTER = {
    'quo"ted ü/a b.txt': (git.REGULAR, EDITED.replace(b"3\r", b"@@ -1 +1 @@\r")), "d/e": (git.REGULAR, b"x\nz"), "-dash": (git.EXECUTABLE, b"m\n"),
    "binary": (git.REGULAR, b"\0\0\n"), "same": (git.REGULAR, b"s\n"), "new\ttab": (git.REGULAR, b"+++ b/x\n"),
}  # fmt: skip


@pytest.mark.parametrize("context", [0, 1, 3])
def test_a_diff_is_taken_apart_without_loss(tmp_path: Path, context: int) -> None:
    """The sections are the diff, byte for byte; their paths are git's own; their hunks stand where they say."""
    objects = Objects(tmp_path / "objects.git")
    trees = [objects.store_files((path, *entry) for path, entry in files.items()) for files in (BEFORE, AFTER)]
    rendered = patch.render(objects, *trees, context=context)
    sections = patch.sections(rendered)
    named = objects.run(["diff-tree", "-r", "-z", "--no-renames", "--name-only", *trees])[1].decode().split("\0")[:-1]

    assert b"".join(section.data for section in sections) == rendered
    assert [section.path for section in sections] == named
    for section in sections:
        assert (section.old == "", section.new == "") == (section.path not in BEFORE, section.path not in AFTER)
        for hunk in section.hunks:
            for files, start, lines in ((BEFORE, hunk.start, hunk.before), (AFTER, hunk.new_start, hunk.after)):
                text = patch.lines_of(files.get(section.path, ("", b""))[1])
                assert not lines or tuple(text[start - 1 : start - 1 + len(lines)]) == lines


# What is refused.

HEADER = b"index 1111111..2222222 100644\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
EDIT = b"diff --git a/x b/x\n" + HEADER


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b" c\n", b"", "cut off"),
        (b" c\n", b" c", "cut off"),
        (b"+b\n c\n", b"+b", "cut off"),
        (b" c\n", b" c\n+more\n", "more lines"),
        (b" c\n", b" c\n@@ -x +y @@\n", "does not say where"),
        (b"@@ -1,2 +1,2 @@", b"@@ -1,3 +1,3 @@", "cut off"),
        (b"@@ -1,2 +1,2 @@", b"@@ -1,1 +1,1 @@", "more lines"),
        (b"@@ -1,2 +1,2 @@", b"@@ -" + b"9" * 5000 + b",2 +1,2 @@", "does not say where"),
        (b"@@ -1,2 +1,2 @@", b"@@ -1," + b"9" * 9 + b" +1,2 @@", "cut off"),
        (b"-a\n", b"-a\n?\n", "cut off"),
        (b"+b\n c\n", b"+b\n\\ No newline at end of file\n c\n", "cut off"),
        (b"a/x b/x", b"", "without a path"),
        (b"@@ -1,2 +1,2 @@\n-a\n+b\n c\n", b"", "cut off"),
        (HEADER, b"", "cut off"),
        (HEADER, b"new file mode 100644\n", "cut off"),
        (HEADER, b"new file mode 100644\nindex 0000000..2222222\n--- /dev/null\n+++ b/x\n", "cut off"),
        (HEADER, b"old mode 100644\nnew mode 100755\nindex 1111111..2222222\n", "cut off"),
        (HEADER, b"rename from x\nrename to x\nindex 1111111..2222222 100644\n", "cut off"),
    ],
)
def test_a_damaged_diff_is_refused(old: bytes, new: bytes, words: str) -> None:
    """Hunks and headers that are cut off, or that hold more or less than they announce, are no diff; git would apply some of them."""
    assert EDIT.count(old) == 1
    with refusal("patch-invalid", match=words):
        patch.sections(EDIT.replace(old, new))


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", ".git/config", "a/.GIT/hooks/x", ".", "./x", "a/./x"])
def test_a_path_outside_of_the_tree_is_refused(name: str) -> None:
    """Plain or quoted, a path that leaves the tree or enters a repository's own folder is refused."""
    for form in ("%s", '"%s"'):
        diff = EDIT
        for side in (b"a/", b"b/"):
            path = side.decode() + (name if form == "%s" else name.replace(".", "\\056"))
            diff = diff.replace(side + b"x", (form % path).encode())
        with refusal("patch-invalid", match="outside the tree"):
            patch.sections(diff)
