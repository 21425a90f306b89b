"""Failures of cherry_picks, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class PatchError(SparkwrightError):
    """A patch, a pick or a series cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "bisect-undecided": Advice(
            "Both ends of the search answer the same, or one state does not answer the same "
            "every time: no turn can be named for certain.",
            "Choose other ends with --from and --to.",
            exit_code=4,
        ),
        "export-mismatch": Advice(
            "The files of the series are not what its commits give: edited by hand, or made by "
            "another tool.",
            "Run `sparkwright export`, read the difference that it makes, and commit it.",
        ),
        "patch-already-upstream": Advice(
            "The base has this change already, so the patch has nothing left to do: upstream "
            "took it, or an earlier patch does the same.",
            "Drop it, naming the upstream commit or release: remove the stack from the ledger's "
            "record, or the file from the series.",
        ),
        "patch-conflict": Advice(
            "The pinned source differs from the one that the patch was made for; no fuzz and no "
            "3-way merge are used here.",
            "Read the report above; then make the patch anew: `sparkwright rebase`, and "
            "`sparkwright export` when it applies.",
        ),
        "patch-invalid": Advice(
            "A patch file cannot be read as one, or its header lacks a trailer that says why it "
            "exists and until when.",
            "Export it again, or add the missing trailer.",
        ),
        "patch-lost": Advice(
            "The worktree has no commit for a patch of the series: it was dropped while "
            "rebasing, perhaps by git itself and without a word.",
            "If it is to go, say so with --drop NAME; if not, put its commit back in the worktree.",
        ),
        "patch-no-effect": Advice(
            "The patch leaves the tree as it was: upstream has it already, or an earlier patch "
            "does the same.",
            "Drop the patch, and say in the changelog which upstream release took it.",
        ),
        "pick-mismatch": Advice(
            "The ledger's record and the pull request disagree: edited by hand, a replaced "
            "repository, or a record that was never pinned.",
            "Do not build from it. Compare with the pull request, then run `sparkwright pick` "
            "for it.",
        ),
        "pick-moved": Advice(
            "The author pushed to the pull request, perhaps with force. What stacks carry is "
            "still the pinned state.",
            "Read the difference above. Take the new state with `sparkwright pick NUMBER "
            "--accept`, or leave everything as it is.",
        ),
        "predicate-failed": Advice(
            "The command of a search was killed or broke down, so what it said about this state "
            "is no answer.",
            "Run it by hand, with the variables that the log names; exit with 125 where a state "
            "cannot be judged. Known answers are kept.",
        ),
        "rebase-unfinished": Advice(
            "A rebase is under way in the worktree: a patch conflicts and waits for you, or "
            "changes are not committed.",
            "Finish it with git in the worktree (git am --continue), then `sparkwright "
            "export`; or give it up: `sparkwright rebase --abort`.",
        ),
    }
