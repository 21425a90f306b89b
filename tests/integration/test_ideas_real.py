"""
The table "needed up to", derived from the real releases: every final release between the bounds that the package index offers.

What is expected here was found by reading the releases, and differs from what had been written down by hand in four rows (marked).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from packaging.utils import parse_sdist_filename
from packaging.version import Version

from sparkwright.cherry_picks import ideas
from sparkwright.cherry_picks.ideas import Finding, NeededUpTo
from sparkwright.forks import archive, download, packageindex
from sparkwright.git import Objects
from sparkwright.store import Store

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

#: Package of sdists: the first and the last release; later ones are for `drift`, not for an expectation.
SDISTS = {"vllm": ("0.16.0", "0.33.0"), "flashinfer-python": ("0.6.3", "0.7.2.post1")}

X86 = "cp312-cp312-manylinux_2_28_x86_64"
ANY = "py3-none-any"
OLD, NEW = "py3-none-manylinux2014_x86_64", "py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64"

#: Package that comes in wheels: the folder inside them, and of each release the project and the tag. Those before 4.6.0 have 75 MB each.
WHEELS: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "nvidia-cutlass-dsl": (
        "nvidia_cutlass_dsl",
        {
            **dict.fromkeys(("4.4.2", "4.5.0"), ("nvidia-cutlass-dsl-libs-base", X86)),
            **dict.fromkeys(("4.6.0", "4.7.1", "4.8.0", "4.8.1"), ("nvidia-cutlass-dsl-libs-core", ANY)),
        },
    ),
    "nvidia-cuda-runtime": (
        "nvidia",
        {
            "12.6.77": ("nvidia-cuda-runtime-cu12", OLD),
            **dict.fromkeys(("12.8.57", "12.9.79"), ("nvidia-cuda-runtime-cu12", NEW)),
            **dict.fromkeys(("13.0.48", "13.5.37"), ("nvidia-cuda-runtime", NEW)),
        },
    ),
}

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


class Imported(msgspec.Struct, frozen=True):
    """The tree of an archive."""

    tree: str


def imported(store: Store, objects: Objects, project: str, file: packageindex.IndexFile, folder: str = "") -> str:
    """Return the tree of *file*, brought into the store's object database once."""
    key = f"{file.sha256[:40]}-{folder or 'all'}"
    known = store.get("idea-trees", key, Imported)
    if known and objects.has(f"{known.tree}^{{tree}}"):
        return known.tree
    path = download.obtain(store, project, file.name, file.sha256)
    members = archive.wheel_members(path, folder) if folder else archive.sdist_members(path)
    with store.lock("objects"):
        tree = objects.store_files((member.path, member.mode, member.data) for member in members)
    store.put("idea-trees", key, Imported(tree))
    return tree


def final_sdists(package: str, first: str, last: str) -> dict[Version, packageindex.IndexFile]:
    """Return the sdists of *package* from *first* to *last* in the order of their versions, without pre-releases."""
    files = [file for file in packageindex.files(package) if file.name.endswith(".tar.gz")]
    versions = {parse_sdist_filename(file.name)[1]: file for file in files}
    chosen = (version for version in versions if not version.is_prerelease and Version(first) <= version <= Version(last))
    return {version: versions[version] for version in sorted(chosen)}


@pytest.fixture(scope="module", name="trees")
def _trees(user_store: Store, objects: Objects) -> Mapping[str, Mapping[str, str]]:
    """Return, by package, the trees of its releases in their order."""
    trees = {
        package: {str(version): imported(user_store, objects, package, file) for version, file in final_sdists(package, *bounds).items()}
        for package, bounds in SDISTS.items()
    }
    for package, (folder, releases) in WHEELS.items():
        names = {release: f"{project.replace('-', '_')}-{release}-{tag}.whl" for release, (project, tag) in releases.items()}
        trees[package] = {
            release: imported(user_store, objects, project, packageindex.find(project, names[release]), folder)
            for release, (project, _) in releases.items()
        }
    return trees


@pytest.fixture(scope="module", name="objects")
def _objects(user_store: Store) -> Objects:
    return Objects(user_store.root / "objects.git")


@pytest.fixture(scope="module", name="findings")
def _findings(objects: Objects, trees: Mapping[str, Mapping[str, str]]) -> dict[str, list[Finding]]:
    """Return what the releases say, by idea."""
    return {
        idea.name: [ideas.examine(objects, tree, idea, release) for release, tree in trees[idea.package].items()]
        for idea in ideas.load(ROOT)
    }


@pytest.fixture(scope="module", name="table")
def _table(findings: dict[str, list[Finding]]) -> dict[str, NeededUpTo]:
    return {name: ideas.needed_up_to(found) for name, found in findings.items()}


def test_the_releases_say_which_one_took_each_idea(table: dict[str, NeededUpTo]) -> None:
    """For each idea: from which release to which it is needed, which one took it, and where it was lost again."""
    derived = {name: (row.first_needed, row.last_needed, row.first_absorbed, row.regressed) for name, row in table.items()}

    assert derived == EXPECTED


def test_nothing_is_left_open_after_an_idea_was_judged(table: dict[str, NeededUpTo]) -> None:
    """No release escapes the probes by a file that moved; those that say neither are older than what the idea is about."""
    assert {name: row.undecided for name, row in table.items() if row.undecided} == UNDECIDED


def test_an_idea_without_effect_is_needed_by_no_release(findings: dict[str, list[Finding]]) -> None:
    """What the data calls without effect, every release confirms; ideas that name who absorbed them were needed once, or lived on main."""
    for idea in ideas.load(ROOT):
        states = {finding.state for finding in findings[idea.name]}
        assert not idea.never or "needed" not in states, idea.name
        assert "needed" in states or idea.never or idea.name == "fix_qwen3_next_prefix", idea.name
