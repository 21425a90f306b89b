"""
The table "needed up to", derived from the real releases: every final release between the bounds that the package index offers.

What is expected here was found by reading the releases, and differs from what had been written down by hand in four rows (marked).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkwright.cherry_picks import ideas
from sparkwright.cherry_picks.ideas import Absorption
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

#: The last release of each package that the expectation is about; later ones are for `drift`.
LAST = (("vllm", "0.33.0"), ("flashinfer-python", "0.7.2.post1"))

NEVER = ("", "", "", ())
AGAIN = ("0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1",
         "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")  # fmt: skip

#: First and last release that needs the idea, the release that took it, and those that lost it again.
EXPECTED: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "fix_capability_121_v112": NEVER,
    "fix_cmake_sm120_archs": ("0.16.0", "0.33.0", "0.19.0", AGAIN),
    "fix_dispatcher_flag_v115": NEVER,
    "patch_nvfp4_utils_sw_e2m1": NEVER,
    # By hand: up to 0.6.5. That is #2650, which moved SM 12.1 from 121a to 120f; 121a has the instruction, too.
    "fix_flashinfer_e2m1_sm121": NEVER,
    "flashinfer #2650": ("0.6.3", "0.6.5", "0.6.6", ()),
    "flashinfer_plain_arch_list": ("0.6.3", "0.6.6", "0.6.7", ()),
    "fix_flashinfer_nvfp4_moe_backend": ("0.16.0", "0.16.0", "0.17.0", ()),
    "fix_mtp_nvfp4_exclusion (Qwen3.5)": ("0.17.0", "0.19.1", "0.20.0", ()),
    "fix_mtp_nvfp4_exclusion (Qwen3-Next)": ("0.16.0", "0.24.0", "0.25.0", ()),
    "fix_qwen3_next_prefix": NEVER,
    "fix_nvfp4_emulation_backend": ("0.16.0", "0.19.1", "0.20.0", ()),
    "nv_fp4_dummy": NEVER,
    # By hand: taken by CUTLASS 4.5. It is vLLM's own requirement that names the libraries since 0.22.0 (#42438).
    "DSL stack L1": ("0.17.0", "0.21.0", "0.22.0", ()),
    "DSL stack L2": ("4.4.2", "4.4.2", "4.5.0", ()),
    "DSL stack L3": NEVER,
    "DSL stack L4": ("0.16.0", "0.23.0", "0.24.0", ()),
    "#40082": ("0.16.0", "0.21.0", "0.22.0", ()),
    "#35568": ("0.16.0", "0.21.0", "0.22.0", ()),
    # By hand: never, for its merge is empty. As an idea it was as much needed as #35568, whose half it is.
    "#41215": ("0.16.0", "0.21.0", "0.22.0", ()),
    "#40923": ("0.16.0", "0.22.1", "0.23.0", ()),
    "#35693": ("0.16.0", "0.33.0", "", ()),
    # By hand: 0.17.0, by its date; the release was cut before.
    "#34571": ("0.16.0", "0.17.1", "0.18.0", ()),
}

#: Releases that say neither, because what the idea is about had not come yet.
UNDECIDED = {
    "fix_mtp_nvfp4_exclusion (Qwen3.5)": ("0.16.0",),
    "nv_fp4_dummy": ("12.6.77",),
    "DSL stack L1": ("0.16.0",),
    "DSL stack L3": ("0.6.3", "0.6.4", "0.6.5", "0.6.6", "0.6.7", "0.6.7.post1", "0.6.7.post2", "0.6.7.post3", "0.6.8", "0.6.8.post1"),
}


@pytest.fixture(scope="module", name="rows")
def _rows(user_store: Store) -> list[Absorption]:
    return ideas.derive(RunContext(Project(ROOT, "2026.11"), user_store, (), ROOT / "dist"), LAST)


@pytest.fixture(scope="module", name="table")
def _table(rows: list[Absorption]) -> dict[str, Absorption]:
    return {row.idea: row for row in rows}


def test_the_releases_say_which_one_took_each_idea(table: dict[str, Absorption]) -> None:
    """For each idea: from which release to which it is needed, which one took it, and where it was lost again."""
    derived = {name: (row.first_needed, row.last_needed, row.first_absorbed, row.regressed) for name, row in table.items()}

    assert derived == EXPECTED


def test_nothing_is_left_open_after_an_idea_was_judged(table: dict[str, Absorption]) -> None:
    """No release escapes the probes by a file that moved; those that say neither are older than what the idea is about."""
    assert {name: row.undecided for name, row in table.items() if row.undecided} == UNDECIDED


def test_an_idea_without_effect_is_needed_by_no_release(rows: list[Absorption]) -> None:
    """What the data calls without effect, every release confirms; ideas that name who absorbed them were needed once, or lived on main."""
    found = {row.idea: row.findings for row in rows}
    for idea in ideas.load(ROOT).ideas:
        states = {finding.state for finding in found[idea.name]}
        assert not idea.never or "needed" not in states, idea.name
        assert "needed" in states or idea.never or idea.name == "fix_qwen3_next_prefix", idea.name
