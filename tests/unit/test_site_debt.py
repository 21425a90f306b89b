"""Patch debt over the history of a repository: counted from git's objects, and honest about what is not there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparkwright.cherry_picks import series
from sparkwright.operate.site import debt

LEDGER = """\
url: https://upstream.example/vllm.git
records:
- number: 1
  date: '2026-01-01'
  stacks: {'2026.11': {}}
- number: 2
  date: unresolved
  stacks: {'2026.05': {}}
"""
PATCH = "From: A <a@a.example>\nDate: Thu, 1 Jan 2026 10:00:00 +0000\nSubject: x\n\n---\n a | 2 +-\ndiff --git a/a b/a\n+x\n"


class Repository:
    """A repository in the making; each commit is a day after the one before."""

    def __init__(self, root: Path) -> None:
        self.root, self.day = root, 0
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str, date: str = "2026-02-01T00:00:00Z") -> str:
        env = {
            "PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "GIT_CONFIG_GLOBAL": "/dev/null",
            "HOME": str(self.root), "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@a.example", "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@a.example",
        }  # fmt: skip
        return subprocess.run(["git", *words], cwd=self.root, env=env, check=True, capture_output=True, text=True).stdout

    def commit(self, files: dict[str, str | None]) -> None:
        """Write *files*, remove those that are None, and commit."""
        self.day += 1
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if text is None else path.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", f"{self.day}", date=f"2026-02-{self.day:02d}T23:30:00Z")


@pytest.fixture(name="repository")
def _repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "r")
    made.commit({"README.md": "x"})
    made.commit({"forks/2026.11/stack.yaml": "x", "forks/2026.11/vllm/series": "a.patch\n", "forks/2026.11/vllm/a.patch": PATCH})
    made.commit({"cherry_picks/vllm.yaml": LEDGER})
    made.commit({"README.md": "y"})
    made.commit({"forks/2026.11/vllm/series": "# why\na.patch\nb.patch # so\n", "forks/2026.11/vllm/b.patch": PATCH + "+1\n"})
    made.commit({"forks/2026.11/vllm/series": "b.patch\n", "forks/2026.11/vllm/a.patch": None, "forks/2026.05/stack.yaml": "x"})
    return made


def _told(found: debt.Debt, stack: str) -> list[tuple[str, int, int, int]]:
    return [(one.day, one.picks, one.patches, one.lines) for one in found.stacks[stack]]


def test_each_commit_that_changed_it_is_counted(repository: Repository) -> None:
    """Picks, patches and lines of each stack follow from series, patches and ledger as they were after each commit."""
    found = debt.history(repository.root)
    assert _told(found, "2026.11") == [
        ("2026-02-02", 0, 1, 2), ("2026-02-03", 1, 1, 2), ("2026-02-05", 1, 2, 5), ("2026-02-06", 1, 1, 3),
    ]  # fmt: skip
    assert _told(found, "2026.05") == [("2026-02-06", 1, 0, 0)]
    assert not found.problems
    assert not found.partial


def test_age_is_that_of_what_is_carried(repository: Repository) -> None:
    """The median age grows by a day each day; what has no date has no age."""
    found = debt.history(repository.root)
    last = found.stacks["2026.11"][-1]
    assert [last.age(day) for day in ("2026-01-02", "2026-02-01")] == [1, 31]
    assert found.stacks["2026.05"][-1].age("2026-02-10") is None


def test_a_history_that_was_cut_says_so(repository: Repository, tmp_path: Path) -> None:
    """A shallow clone shows what it has, with the same last state, and says that it is not all."""
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(tmp_path / "shallow"))
    found, whole = debt.history(tmp_path / "shallow"), debt.history(repository.root)
    assert "no older history" in found.partial
    assert _told(found, "2026.11")[-1][1:] == _told(whole, "2026.11")[-1][1:]


def test_a_folder_without_a_repository_has_no_history(tmp_path: Path) -> None:
    """Where git knows nothing, nothing is made up, and the reason is told."""
    found = debt.history(tmp_path)
    assert not found.stacks
    assert found.partial
    assert [one.reference for one in found.problems] == ["git-failed"]


def test_a_damaged_ledger_costs_its_own_commits(repository: Repository) -> None:
    """A ledger that once could not be read is named with its commit; before and after it the history goes on."""
    repository.commit({"cherry_picks/vllm.yaml": "records: [*x]\n"})
    repository.commit({"cherry_picks/vllm.yaml": LEDGER, "forks/2026.11/vllm/series": "# nothing\n", "forks/2026.11/vllm/b.patch": None})
    found = debt.history(repository.root)
    assert {one.reference for one in found.problems} == {"file-invalid"}
    assert len(found.problems) == 2, "one for each stack"
    assert _told(found, "2026.11")[-1] == ("2026-02-08", 1, 0, 0)


def test_a_listed_patch_that_is_not_there_is_not_counted(repository: Repository) -> None:
    """A series that lists a file which the commit lacks counts what is there."""
    repository.commit({"forks/2026.11/vllm/series": "b.patch\ngone.patch\n../../../etc/passwd\n"})
    assert _told(debt.history(repository.root), "2026.11")[-1][2] == 1


def test_this_repository_has_the_debt_that_its_files_show() -> None:
    """The newest state of this repository's own history is what its series list, unless a change is not yet committed."""
    root = Path(__file__).parents[2]
    if subprocess.run(["git", "status", "--porcelain", "--", "forks", "cherry_picks"], cwd=root, capture_output=True, check=False).stdout:
        pytest.skip("forks/ or cherry_picks/ hold what is not committed")
    found = debt.history(root)
    if not found.stacks:
        pytest.skip("there is no history here")
    for stack, amounts in found.stacks.items():
        patches = [one for path in root.glob(f"forks/{stack}/*/series") for one in series.load(path.parent)]
        assert amounts[-1].patches == len(patches)
        assert amounts[-1].lines == sum(one.data.count(b"\n") for one in patches), "as `status` counts them"
