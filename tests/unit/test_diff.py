"""Diffs: rendered in one way whoever asks, taken apart without loss, and refused when they are cut, garbled or leave the tree."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.cherry_picks import patch
from sparkwright.cherry_picks.patch import Section
from sparkwright.core import git
from sparkwright.core.git import Objects

#: Each example asks git several times.
FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

# Real trees.

NAMES = (
    "a.txt",
    "b c.txt",
    'quo"te',
    "back\\slash",
    "tab\there",
    "ümläut/日本.txt",
    "d",
    "d/e",
    "d/e/f.py",
    "-dash",
    "a b/b a/x",
    "b/a/x",
    "é ",
)
TEXTS = st.lists(st.sampled_from(["x", "y", "z", "def f():", "  pass", "", "-- ", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "é\t"]), max_size=14)


def _text(lines: list[str], end: str, last: bool) -> bytes:
    text = "".join(line + end for line in lines)
    return (text if last else text.removesuffix(end)).encode()


CONTENTS = st.one_of(
    st.builds(_text, TEXTS, st.sampled_from(["\n", "\r\n"]), st.booleans()),
    st.builds(lambda data: b"\0" + data, st.binary(max_size=60)),
)
FILES = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.sampled_from([git.REGULAR, git.EXECUTABLE]), CONTENTS), max_size=6).map(
    lambda files: {path: one for path, one in files.items() if not any(other.startswith(f"{path}/") for other in files)}
)
Files = dict[str, tuple[str, bytes]]


@pytest.fixture(scope="module", name="objects")
def _objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return Objects(tmp_path_factory.mktemp("diff") / "objects.git")


def stored(objects: Objects, files: Files) -> str:
    return objects.store_files((path, mode, data) for path, (mode, data) in files.items())


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Files, Files]:
    """Return the files of two trees that have some in common: changed, moved, of another mode, gone or new."""
    before = draw(FILES)
    after = dict(draw(FILES))
    for path, (mode, data) in before.items():
        what = draw(st.sampled_from(["same", "mode", "edit", "gone"]))
        if what == "gone" or any(other.startswith(f"{path}/") or path.startswith(f"{other}/") for other in after):
            continue
        after[path] = (
            git.EXECUTABLE if what == "mode" else mode,
            b"".join(draw(st.permutations(data.splitlines(keepends=True)))) if what == "edit" else data,
        )
    return before, after


def replayed(before: bytes, section: Section) -> bytes:
    """Return what the hunks of *section* make of *before*, by their line numbers alone."""
    have, made, at = patch.lines_of(before), list[bytes](), 0
    for hunk in section.hunks:
        start = hunk.start - 1 if hunk.before else hunk.start
        assert tuple(have[start : start + len(hunk.before)]) == hunk.before
        made += have[at:start]
        assert len(made) == (hunk.new_start - 1 if hunk.after else hunk.new_start)
        made += hunk.after
        at = start + len(hunk.before)
    return b"".join([*made, *have[at:]])


@FEW
@given(pairs(), st.sampled_from([0, 1, 3]))
def test_a_diff_is_taken_apart_without_loss(objects: Objects, pair: tuple[Files, Files], context: int) -> None:
    """The sections are the diff, byte for byte; their paths are git's own; their hunks turn the old files into the new ones."""
    trees = [stored(objects, files) for files in pair]
    rendered = patch.render(objects, *trees, context=context)
    found = patch.sections(rendered)
    named = objects.run(["diff-tree", "-r", "-z", "--no-renames", "--name-only", *trees])[1].decode().split("\0")[:-1]
    before, after = pair

    assert b"".join(section.data for section in found) == rendered
    assert [section.path for section in found] == named
    for section in found:
        assert (section.old == "") == (section.path not in before)
        assert (section.new == "") == (section.path not in after)
        if not section.binary:
            old, new = before.get(section.path, ("", b""))[1], after.get(section.path, ("", b""))[1]
            assert replayed(old, section) == new


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
