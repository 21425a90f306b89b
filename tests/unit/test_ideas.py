"""Patch ideas: the state of an idea in a release's tree, and the verdict over a row of releases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.cherry_picks import ideas
from sparkwright.cherry_picks.ideas import Finding, Idea, IdeaState, Probe
from sparkwright.core.git import Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Repository

ROOT = Path(__file__).parents[2]
RECORD = """\
mini:
  ideas:
    one:
      says: Mends it.
      needed_when:
      - paths: [a.py]
        has: [broken]
"""
IDEA = RECORD.partition("ideas:\n")[2]
FILES: dict[str, bytes | None] = {
    "src/a.py": b"x = 1\nguard = only_120(x)\n",
    "src/b.py": b"def f(\n    a,\n):\n\n#if X\n    inside\n\ndef g():\n    outside\n",
}


@pytest.mark.parametrize(
    ("probe", "state", "evidence"),
    [
        (Probe(("src/a.py",), has=("only_120(",)), "needed", "src/a.py:2: only_120("),
        (Probe(("src/a.py",), has=("family(",)), "absorbed", "src/a.py:1: no family("),
        (Probe(("src/a.py",), lacks=("only_120",)), "absorbed", "src/a.py:2: only_120"),
        (Probe(("src/a.py",), lacks=("z",)), "needed", "src/a.py:1: no z"),
        (Probe(("src/none.py", "src/a.py"), has=("x",)), "needed", "src/a.py:1: x"),
        (Probe(("src/none.py",), lacks=("x",)), "unknown", "no src/none.py"),
        (Probe(("src",), lacks=("x",)), "unknown", "no src"),
        (Probe(("src/b.py",), has=("inside",), within=("def f",)), "needed", "src/b.py:6: inside"),
        (Probe(("src/b.py",), has=("outside",), within=("def f",)), "absorbed", "src/b.py:1: no outside"),
        (Probe(("src/b.py",), has=("x",), within=("class Gone",)), "unknown", "no class Gone in src/b.py"),
    ],
)  # fmt: skip
def test_a_probe_is_decided_by_texts_of_the_tree(tmp_path: Path, repository: Repository, probe: Probe, state: IdeaState, evidence: str) -> None:
    """The evidence names file, line and text; a missing file or part is never taken for "not needed"."""
    repository.commit(FILES)
    found = ideas.examine(Objects(repository.path / ".git"), repository.tree(), Idea("Mends it.", (probe,)), "1.0")

    assert found == ("1.0", state, evidence)


def test_one_missing_piece_is_enough(repository: Repository) -> None:
    """An idea of several probes is needed while one of them holds, and absorbed when all could be judged and none holds."""
    repository.commit(FILES)
    needed, unknown = Probe(("src/a.py",), has=("x",)), Probe(("src/none.py",), has=("x",))
    absorbed = Probe(("src/a.py",), lacks=("x",))

    def state(*probes: Probe) -> IdeaState:
        return ideas.examine(Objects(repository.path / ".git"), repository.tree(), Idea("Mends it.", probes), "1.0")[1]

    assert [state(absorbed, unknown, needed), state(absorbed, unknown), state(absorbed)] == ["needed", "unknown", "absorbed"]


def test_the_reviewed_ideas_can_be_read() -> None:
    """The file of the checkout is valid."""
    assert {"fix_cmake_sm120_archs", "#35568"} <= ideas.load(ROOT)["vllm"].ideas.keys()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("has: [broken]", "haz: [broken]"),
        ("        has: [broken]\n", ""),
        ("[a.py]", "[]"),
        ("[a.py]", "[../a.py]"),
        ("[a.py]", "[/etc/a.py]"),
        ("[broken]", '["two\\nlines"]'),
        ("[broken]", f'["{"long " * 20}"]'),
        ("says: Mends it.", "says: ' '"),
        (IDEA, IDEA * 2),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """A typo, a probe that asks for nothing, a path that leaves the tree, more than a fragment of a line, two ideas of one name."""
    (tmp_path / "cherry_picks").mkdir()
    (tmp_path / "cherry_picks" / "ideas.yaml").write_text(RECORD, "utf-8")
    assert list(ideas.load(tmp_path)["mini"].ideas) == ["one"]
    (tmp_path / "cherry_picks" / "ideas.yaml").write_text(RECORD.replace(old, new), "utf-8")

    with refusal("file-invalid"):
        ideas.load(tmp_path)


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        (("absorbed", "absorbed"), "never needed"),
        (("unknown", "absorbed"), "never needed"),
        (("unknown", "unknown"), "not known"),
        (("needed", "needed"), "still needed in 0.2"),
        (("needed", "unknown"), "still needed in 0.1"),
        (("absorbed", "needed", "unknown", "absorbed"), "needed from 0.2, taken by 0.4"),
        (("needed", "absorbed", "needed", "needed"), "needed from 0.1, taken by 0.2, needed again in 0.3 to 0.4"),
    ],
)
def test_a_row_of_releases_has_a_verdict(states: tuple[IdeaState, ...], verdict: str) -> None:
    """Never needed, needed everywhere, taken, and taken and lost again; the evidence is that of the last need and of the taking."""
    findings: list[Finding] = [(f"0.{number}", state, f"a.py:{number}: x") for number, state in enumerate(states, 1)]
    row = ideas.absorption("mend", "vllm", findings)

    assert (row.verdict, row.undecided) == (verdict, tuple(release for release, state, _ in findings if state == "unknown"))
    if verdict.endswith("taken by 0.4"):
        assert row.evidence == ("0.2: a.py:2: x", "0.4: a.py:4: x")
