"""The errors of patches, picks and series, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class PatchError(SparkwrightError):
    """A patch, a pick or a series cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "backport-stale": Advice(
            "A patch that stands in for a part of a pull request was made from another state of "
            "it than the ledger pins, or the stack does not carry that pull request.",
            "Compare the patch with the pull request, mend it with `sparkwright patch rebase`, and "
            "write the pinned sha256 into its line `Backport-Of: #NUMBER SHA256`.",
        ),
        "bisect-undecided": Advice(
            "Both ends of the search give the same answer, or the states at the change give none, "
            "so no commit can be named for certain.",
            "Choose other ends with --from and --to, or let the command judge the states that it "
            "skips.",
            exit_code=4,
        ),
        "export-mismatch": Advice(
            "The files of the series are not what its commits give: edited by hand, or made by "
            "another tool.",
            "Run `sparkwright patch rebase` and `sparkwright patch export`, read the difference "
            "that they make, and commit it.",
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
            "Read the report above; then make the patch anew: `sparkwright patch rebase`, and "
            "`sparkwright patch export` when it applies.",
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
            "Do not build from it. Compare with the pull request, then run "
            "`sparkwright patch pick` for it.",
        ),
        "pick-moved": Advice(
            "The author pushed to the pull request, perhaps with force. What stacks carry is "
            "still the pinned state.",
            "Read the difference at the address above. Take the new state with `sparkwright "
            "patch pick NUMBER --accept`, or leave everything as it is.",
        ),
        "rebase-unfinished": Advice(
            "A rebase is under way in the worktree: a patch conflicts and waits for you, or "
            "changes are not committed.",
            "Finish it with git in the worktree (git am --continue), then `sparkwright patch "
            "export`; or give it up: `sparkwright patch rebase --abort`.",
        ),
    }
