"""Patch ideas: what a release's tree says to one, and what a row of releases comes to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.cherry_picks import ideas, ledger
from sparkwright.cherry_picks.ideas import Finding, Idea, Probe, State
from sparkwright.core.git_store import Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Repository

ROOT = Path(__file__).parents[2]

RECORD = """\
ideas:
- name: one
  package: mini
  says: Mends it.
  needed_when:
  - paths: [a.py]
    has: [broken]
"""


@pytest.fixture(name="objects")
def _objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects.git")


def tree(objects: Objects, repository: Repository, files: dict[str, bytes | None]) -> str:
    """Commit *files* as the next release, and return its tree in *objects*."""
    commit = repository.commit(files)
    objects.run(["fetch", "-q", "--depth=1", "--no-write-fetch-head", repository.url, commit])
    return objects.resolve(f"{commit}^{{tree}}")


def idea(*probes: Probe) -> Idea:
    return Idea("mend", "mini", "Mends it.", probes)


def answer(objects: Objects, where: str, *probes: Probe) -> tuple[State, str]:
    found = ideas.examine(objects, where, idea(*probes), "1.0")
    assert (found.idea, found.release) == ("mend", "1.0")
    return found.state, found.evidence


def written(folder: Path, text: str) -> Path:
    """Return a checkout whose ideas are *text*."""
    (folder / "cherry_picks").mkdir()
    (folder / "cherry_picks" / "ideas.yaml").write_text(text, "utf-8")
    return folder


def test_a_release_that_has_the_text_needs_the_idea(objects: Objects, repository: Repository) -> None:
    """The evidence names file, line and text; without the text the release does without the idea, and the evidence says what is missing."""
    before = tree(objects, repository, {"src/a.py": b"x = 1\nguard = only_120(x)\n"})
    after = tree(objects, repository, {"src/a.py": b"x = 1\nguard = family(x)\n"})
    probe = Probe(("src/a.py",), has=("only_120(",))

    assert answer(objects, before, probe) == ("needed", "src/a.py:2: only_120(")
    assert answer(objects, after, probe) == ("absorbed", "src/a.py:1: no only_120(")


def test_a_missing_file_is_never_taken_for_not_needed(objects: Objects, repository: Repository) -> None:
    """Where its folder is, the thing is not there yet; where not even that is, or the place is gone, nobody knows."""
    where = tree(objects, repository, {"models/other.py": b"x = 1\n"})

    assert answer(objects, where, Probe(("models/mtp.py",), lacks=("x",))) == ("not-there", "no file models/mtp.py")
    assert answer(objects, where, Probe(("kernels/b12x.py", "gemm/b12x.py"), lacks=("x",)))[0] == "unknown"
    assert answer(objects, where, Probe(("models",), lacks=("x",)))[0] != "absorbed"
    assert answer(objects, where, Probe(("models/other.py",), has=("x",), within=("class Gone",))) == (
        "unknown", "models/other.py: no class Gone",
    )  # fmt: skip


def test_one_missing_piece_is_enough(objects: Objects, repository: Repository) -> None:
    """An idea of several pieces is needed while one is missing, and absorbed when all could be judged and none is."""
    where = tree(objects, repository, {"a.py": b"good\n", "b.py": b"bad\n"})
    fine, broken = Probe(("a.py",), lacks=("good",)), Probe(("b.py",), has=("bad",))
    unclear, absent = Probe(("a.py",), has=("x",), within=("def f",)), Probe(("c.py",), has=("x",))

    assert answer(objects, where, fine, unclear, broken) == ("needed", "b.py:1: bad")
    assert answer(objects, where, fine, absent, unclear)[0] == "unknown"
    assert answer(objects, where, fine, absent)[0] == "not-there"
    assert answer(objects, where, fine, Probe(("b.py",), has=("good",))) == ("absorbed", "a.py:1: good; b.py:1: no good")


def test_the_reviewed_ideas_can_be_read() -> None:
    """Every idea says what it is for; what it points to is a fork, and a number of pull requests where the ledger of that fork is."""
    known = ideas.load(ROOT).ideas

    assert {"fix_cmake_sm120_archs", "DSL stack L2", "#35568", "nv_fp4_dummy"} <= {one.name for one in known}
    assert all(ledger.path_of(ROOT, one.fork).is_file() for one in known if one.absorbed_by or one.lost_by)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("has: [broken]", "haz: [broken]"),
        ("    has: [broken]\n", ""),
        ("[a.py]", "[]"),
        ("[a.py]", "[../a.py]"),
        ("[a.py]", "[/etc/a.py]"),
        ("[a.py]", "[-a.py]"),
        ("[broken]", '["two\\nlines"]'),
        ("[broken]", f'["{"long " * 20}"]'),
        ("says: Mends it.", "says: ' '"),
        (RECORD.removeprefix("ideas:\n"), RECORD.removeprefix("ideas:\n") * 2),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """A typo, a probe that asks for nothing, a path that leaves the tree, more than a fragment of a line, two ideas of one name."""
    assert [one.name for one in ideas.load(written(tmp_path, RECORD)).ideas] == ["one"]
    (tmp_path / "cherry_picks" / "ideas.yaml").write_text(RECORD.replace(old, new), "utf-8")

    with refusal("file-invalid"):
        ideas.load(tmp_path)


def row(*states: State) -> list[Finding]:
    """Return findings of releases 0.1, 0.2 …"""
    return [Finding("mend", f"0.{number}", state, f"a.py:{number}: x") for number, state in enumerate(states, 1)]


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        (("absorbed", "absorbed"), "never needed"),
        (("not-there", "absorbed"), "never needed"),
        (("unknown", "not-there"), "not known"),
        (("needed", "needed"), "still needed in 0.2"),
        (("needed", "unknown"), "still needed in 0.1"),
        (("not-there", "needed", "absorbed"), "needed from 0.2, taken by 0.3"),
        (("absorbed", "needed", "unknown", "absorbed"), "needed from 0.2, taken by 0.4"),
        (("needed", "absorbed", "needed", "needed"), "needed from 0.1, taken by 0.2, needed again in 0.3 to 0.4"),
    ],
)
def test_a_row_of_releases_in_words(states: tuple[State, ...], verdict: str) -> None:
    """Never needed, needed everywhere, taken, and taken and lost again."""
    assert ideas.absorption("vllm", row(*states)).verdict == verdict


def test_the_evidence_is_that_of_the_turning_point() -> None:
    """Shown are the last release that needs the idea and the one that took it, in the order of the releases."""
    taken = ideas.absorption("vllm", row("needed", "needed", "absorbed", "absorbed"))
    lost = ideas.absorption("vllm", row("needed", "absorbed", "needed"))

    assert taken.evidence == ("0.2: a.py:2: x", "0.3: a.py:3: x")
    assert lost.evidence == ("0.2: a.py:2: x", "0.3: a.py:3: x")
    assert (lost.last_needed, lost.first_absorbed, lost.regressed) == ("0.3", "0.2", ("0.3",))
