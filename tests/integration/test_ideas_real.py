"""
The table "needed up to", derived from the real releases: every final release between the bounds that the package index offers.

What is expected here was found by reading the releases, and differs from what had been written down by hand in four rows (marked).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from sparkwright.cherry_picks import ideas, upstream
from sparkwright.cherry_picks.ideas import Absorption
from sparkwright.cherry_picks.upstream import Release
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

#: The last release of each package that the expectation is about; later ones are for `drift`.
LAST = {"vllm": "0.33.0", "flashinfer-python": "0.7.2.post1"}

#: The verdict on each idea.
EXPECTED = {
#: First and last release that needs the idea, the release that took it, and those that lost it again.
    "fix_capability_121_v112": "never needed",
    "fix_cmake_sm120_archs": "needed from 0.16.0, taken by 0.19.0, needed again in 0.20.0 to 0.33.0",
    "fix_dispatcher_flag_v115": "never needed",
    "patch_nvfp4_utils_sw_e2m1": "never needed",
    # By hand: up to 0.6.5. That is #2650, which moved SM 12.1 from 121a to 120f; 121a has the instruction, too.
    "fix_flashinfer_e2m1_sm121": "never needed",
    "flashinfer #2650": "needed from 0.6.3, taken by 0.6.6",
    "flashinfer_plain_arch_list": "needed from 0.6.3, taken by 0.6.7",
    "fix_flashinfer_nvfp4_moe_backend": "needed from 0.16.0, taken by 0.17.0",
    "fix_mtp_nvfp4_exclusion (Qwen3.5)": "needed from 0.17.0, taken by 0.20.0",
    "fix_mtp_nvfp4_exclusion (Qwen3-Next)": "needed from 0.16.0, taken by 0.25.0",
    "fix_qwen3_next_prefix": "never needed",
    "fix_nvfp4_emulation_backend": "needed from 0.16.0, taken by 0.20.0",
    "nv_fp4_dummy": "never needed",
    # By hand: taken by CUTLASS 4.5. It is vLLM's own requirement that names the libraries since 0.22.0 (#42438).
    "DSL stack L1": "needed from 0.17.0, taken by 0.22.0",
    "DSL stack L2": "needed from 4.4.2, taken by 4.5.0",
    "DSL stack L3": "never needed",
    "DSL stack L4": "needed from 0.16.0, taken by 0.24.0",
    "#40082": "needed from 0.16.0, taken by 0.22.0",
    "#35568": "needed from 0.16.0, taken by 0.22.0",
    # By hand: never, for its merge is empty. As an idea it was as much needed as #35568, whose half it is.
    "#41215": "needed from 0.16.0, taken by 0.22.0",
    "#40923": "needed from 0.16.0, taken by 0.23.0",
    "#35693": "still needed in 0.33.0",
    # By hand: 0.17.0, by its date; the release was cut before.
    "#34571": "needed from 0.16.0, taken by 0.18.0",
}

#: Releases that say neither, because what the idea is about had not come yet.
UNDECIDED = {
    "fix_mtp_nvfp4_exclusion (Qwen3.5)": ("0.16.0",),
    "nv_fp4_dummy": ("12.6.77",),
    "DSL stack L1": ("0.16.0",),
    "DSL stack L3": ("0.6.3", "0.6.4", "0.6.5", "0.6.6", "0.6.7", "0.6.7.post1", "0.6.7.post2", "0.6.7.post3", "0.6.8", "0.6.8.post1"),
}


@pytest.fixture(scope="module", name="rows")
def _rows(user_store: Store) -> Iterator[list[Absorption]]:
    listed = upstream.releases

    def bounded(context: RunContext, project: str, *, optional: bool = False) -> list[Release]:
        releases = listed(context, project, optional=optional)
        return [release for release in releases if Version(release.version) <= Version(LAST.get(project, release.version))]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(upstream, "releases", bounded)
        yield ideas.derive(RunContext(Project(ROOT, "2026.11"), user_store, (), ROOT / "dist"))


def test_the_releases_decide_which_one_took_each_idea(rows: list[Absorption]) -> None:
    """For each idea: from which release on it is needed, which one took it, and where it was lost again."""
    assert {row.idea: row.verdict for row in rows} == EXPECTED


def test_nothing_is_undecided_once_an_idea_was_judged(rows: list[Absorption]) -> None:
    """No release escapes the probes by a file that moved; undecided ones are older than what the idea is about."""
    assert {row.idea: row.undecided for row in rows if row.undecided} == UNDECIDED
