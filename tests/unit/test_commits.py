"""A series as commits and back: not a byte is lost, whatever the text, the files, the machine or the user's git say."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal
from tests.support.texts import TEXT, edited

from sparkwright.cherry_picks import apply, patch, rebase
from sparkwright.core.git import REGULAR, Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Repository

TRAILERS = "Upstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends"


@pytest.fixture(name="objects", scope="module")
def _objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return Objects(tmp_path_factory.mktemp("commits") / "objects.git")


def mailed(change: bytes, subject: str, text: str, author: str, date: str) -> bytes:
    """Return a file of a series."""
    return f"From: {author}\nDate: {date}\nSubject: [PATCH] {subject}\n\n{text}\n---\n".encode() + change


# What a series may hold.


#: What git or a reader of mails could take for something else, as a subject or as a line of the text.
AWKWARD = [
    "[Bugfix][ROCm] Mend it", "[PATCH] twice", "x" * 300, "ü " * 200 + "end", "a: b", "diff --git a/x b/x", "--- a/x", "+++ b/x",
    "@@ -1 +1 @@", "-gone", "+there", "----", "-- ", "From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001",
    "From: Other <o@o.example>", "Subject: [PATCH] other", "Date: Mon, 1 Jan 2001 00:00:00 +0000", "Patch-File: other.patch", "# comment",
    "  indented", "trailing  ", "cr\r", "form\x0cfeed", "Reason: the body's", "Signed-off-by: T <t@t.example>", "Index: x", "-- >8 --", "",
]  # fmt: skip


@pytest.mark.parametrize("line", AWKWARD)
def test_export_after_import_is_the_identity(objects: Objects, line: str) -> None:
    """Whatever its patches say, a series that became commits and files again is the same, byte for byte."""
    texts = [b"a\r\n--- b\n", b"a\r\n--- b\n+++ c\n\xff", b"\0"]
    trees = [objects.store_files([("d/\u00fc x", REGULAR, text)]) for text in texts]
    changes = [patch.render(objects, before, after, context=1) for before, after in itertools.pairwise(trees)]
    heads = (
        (line.strip().replace("\f", "") or "Subject", f"As told.\n\n{TRAILERS}\nPatch-File: other.patch", "Ü 1 <1+x@users.noreply.example>", "Mon, 1 Jan 1990 00:00:00 -1100"),
        ("---", f"{line}\nAs told.\n{line}\n\n{TRAILERS}".strip("\n"), "T <x>", "Thu, 1 Jan 2037 00:00:00 +1200"),
    )
    files = {f"{number} ü.patch": mailed(change, *head) for number, (change, head) in enumerate(zip(changes, heads, strict=True))}

    patches = [patch.parse(*item) for item in files.items()]
    applied = apply.apply_patches(objects, "mini", trees[0], patches)
    steps = zip(patches, (step.tree for step in applied.steps), strict=True)
    root, tip = rebase.commit_series(objects, "mini 1.0", trees[0], steps)
    assert rebase.exported(objects, root, tip) == files


# What a maintainer's commits become.


@pytest.fixture(name="work")
def _work(repository: Repository, objects: Objects) -> Repository:
    """Return a repository with a first commit, whose objects are in *objects*, too."""
    repository.commit({"a.txt": TEXT, "b.txt": b"b\n"}, "Begin")
    alternates = objects.path / "objects" / "info" / "alternates"
    alternates.parent.mkdir(exist_ok=True)
    alternates.write_text(f"{repository.path / '.git' / 'objects'}\n")
    return repository


def told(objects: Objects, work: Repository, message: str, **options: str) -> dict[str, bytes]:
    """Return the export of a commit that says *message*."""
    (work.path / "a.txt").write_bytes(edited((7, "line seven\n")))
    config = [word for name, value in options.items() for word in ("-c", f"{name.replace('_', '.')}={value}")]
    work.git(*config, "commit", "--quiet", "--all", "--cleanup=verbatim", "-m", message)
    return rebase.exported(objects, work.git("rev-parse", "HEAD~1"), work.git("rev-parse", "HEAD"))


@pytest.mark.parametrize("end", ["", "\nSigned-off-by: T <t@t.example>"])
def test_our_trailer_names_the_file_and_is_never_exported(objects: Objects, work: Repository, end: str) -> None:
    """The last Patch-File of the last paragraph counts, also when git put another trailer behind it."""
    files = told(objects, work, f"Subject\n\nPatch-File: no.patch\n\n{TRAILERS}\nPatch-File: the name.patch{end}\n")

    assert [patch.parse(*item).text for item in files.items()] == [f"Patch-File: no.patch\n\n{TRAILERS}{end}"]
    assert list(files) == ["the name.patch"]


@pytest.mark.parametrize(
    "name",
    ["../x.patch", "/etc/x.patch", ".x.patch", "series", "-x.patch", "a#b.patch", "x\x07.patch", "ü" * 120 + ".patch"],
)  # fmt: skip
def test_an_evil_file_name_is_refused(objects: Objects, work: Repository, name: str) -> None:
    """A Patch-File that is a path, hidden, quilt's comment, unprintable, or too long for a file system is an error."""
    with refusal("patch-invalid", match="a name that is taken"):
        told(objects, work, f"Subject\n\n{TRAILERS}\nPatch-File: {name}\n")


@pytest.mark.parametrize(
    "message",
    ["Only a subject\n", "Subject\n\nNo trailers.\n", f"Subject\n{TRAILERS}\n", f"Subject\n\n{TRAILERS.replace('Pending', 'Perhaps')}\n",
     f"Subject\n\nText\n---\nmore\n\n{TRAILERS}\n"],
    ids=["subject alone", "no trailers", "no blank line", "unknown status", "a line that ends the text"],
)  # fmt: skip
def test_a_message_that_does_not_say_everything_is_refused(objects: Objects, work: Repository, message: str) -> None:
    """A commit without the trailers that a patch must have is an error before anything is written."""
    with refusal("patch-invalid"):
        told(objects, work, message)
