"""The policy of SM 9.0 and that of the Spark: neither takes the other's wheels, indexes or verdicts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import allowed, refusal
from tests.support import wheels
from tests.support.publisher import IndexOwner

from sparkwright.client.records import Release
from sparkwright.release import decision, policy, release_draft, wheel_facts
from sparkwright.release.decision import GateResults
from sparkwright.release.policy import UpstreamFault
from sparkwright.release.wheel_facts import WheelFacts

#: Evidence of the rehearsal: what `gate` wrote on an H100, and the signed record of the release.
REHEARSAL = wheels.ROOT / "docs" / "rehearsal"
#: Checks of the Spark's policy that a GPU without FP4, the small model, or a server without torch.compile cannot pass.
FEWER = {
    "G2": {"fp4-conversion", "fp4-quantise", "fp4-gemm", "fp4-moe"},
    "G3": {"profile-graphs", "profile-compile"},
    "G4": {"context-maximum"},
}
#: Recipes of the rehearsal that no release is verified for: the official wheel fails their soak, too.
FAULTY = {"rehearsal-nvfp4-marlin", "rehearsal-moe-nvfp4-marlin"}


def test_policy_of_another_gpu_asks_for_every_gate_and_every_recipe() -> None:
    """It has the gates of the Spark's, less the checks of FP4 hardware and of the longest context; the task is another."""
    spark, other = policy.load(wheels.ROOT, "12.1f"), policy.load(wheels.ROOT, "9.0a")
    assert (spark.file.gpu, other.file.gpu) == ("12.1", "9.0")
    assert other.file.forks == spark.file.forks
    lacking = {
        name: set(rule.checks) - set(other.file.gates[name].checks)
        for name, rule in spark.file.gates.items()
    }
    assert {name: checks for name, checks in lacking.items() if checks} == FEWER
    recipes = {path.stem for path in (wheels.ROOT / "ci" / "recipes").glob("rehearsal-*.yaml")}
    assert {name for names in other.file.recipes.values() for name in names} == recipes - FAULTY
    assert not recipes & {name for names in spark.file.recipes.values() for name in names}


def test_wheels_and_indexes_of_another_gpu_are_refused(
    owner: IndexOwner, new: list[Path], tmp_path: Path
) -> None:
    """A Spark's wheel does not pass the policy of SM 9.0, not even as a candidate; an index stays with its GPU."""
    rules = owner.publisher().policy
    other = dataclasses.replace(
        owner.publisher(), policy=replace(rules, file=replace(rules.file, gpu="9.0"))
    )
    with refusal("release-gpu-foreign", match=r"SM 9\.0"):
        other.promote("2026.11.1", tmp_path)
    other = dataclasses.replace(other, folder=tmp_path / "new")
    with refusal("release-gpu-foreign"):
        other.publish(new, "candidate", url=owner.url)
    assert not other.folder.exists()


@pytest.fixture(scope="module", name="rehearsed")
def _rehearsed() -> tuple[WheelFacts, GateResults]:
    """Return the wheel of the rehearsal and its verdicts, as an H100 gave them."""
    release = msgspec.json.decode((REHEARSAL / "release.json").read_bytes(), type=Release)
    wheel = next(wheel for wheel in release.wheels if wheel.fork == "vllm")
    [source] = [fork for fork in release.forks if fork.name == "vllm"]
    # The SBOM lies in the index, and is no evidence of the gates.
    facts = wheel_facts.from_record(replace(wheel, sbom=None), source, release.stack, REHEARSAL)
    return replace(facts, sbom=b"{}"), decision.read_results(facts.path, REHEARSAL)


def test_real_verdicts_make_a_wheel_verified(rehearsed: tuple[WheelFacts, GateResults]) -> None:
    """With all of them nothing is missing; without any one it is refused."""
    rules, (wheel, results) = policy.load(wheels.ROOT, "9.0a"), rehearsed
    assert decision.decide(wheel, results, rules).missing == ()
    assert results.ladder
    for entry in results.ladder.verdicts:
        with allowed("verdict-hollow"):
            missing = decision.decide(wheel, without(results, entry.label), rules).missing
            assert entry.gate in {lack.gate for lack in missing}


def test_real_verdicts_of_another_gpu_show_nothing_of_a_spark(
    rehearsed: tuple[WheelFacts, GateResults],
) -> None:
    """The wheel, the checks and the machine of the verdicts are refused, each by itself."""
    rules, (wheel, results) = policy.load(wheels.ROOT), rehearsed
    with refusal("release-gpu-foreign"):
        release_draft.require_gpu(rules, {"vllm": "9.0a"})
    with refusal("verdict-hollow"):
        decision.decide(wheel, results, rules)
    relaxed = replace(rules, file=replace(rules.file, gates=policy.load(wheels.ROOT, "9.0a").file.gates))
    missing = decision.decide(wheel, results, relaxed).missing
    assert ("G2", "machine-other") in {(lack.gate, lack.reference) for lack in missing}


def without(results: GateResults, label: str) -> GateResults:
    """Return *results* without one verdict."""
    assert results.ladder
    rest = tuple(entry for entry in results.ladder.verdicts if entry.label != label)
    return replace(results, ladder=replace(results.ladder, verdicts=rest))


def test_fail_of_the_official_wheel_counts_only_where_the_policy_names_it(
    rehearsed: tuple[WheelFacts, GateResults],
) -> None:
    """The record still shows it, with the reason; a recipe that must be shown has no such excuse."""
    rules, (wheel, results) = policy.load(wheels.ROOT, "9.0a"), rehearsed
    label, faults = "G7 rehearsal-moe-nvfp4-marlin", rules.file.upstream_faults
    [soak] = [gate for gate in decision.decide(wheel, results, rules).gates if gate.name == "G7"]
    assert (soak.state, "official wheel" in soak.says) == ("fail", True)

    def lacking(results: GateResults, named: dict[str, UpstreamFault]) -> list[str]:
        changed = replace(rules, file=replace(rules.file, upstream_faults=named))
        missing = decision.decide(wheel, results, changed).missing
        return sorted({f"{lack.gate} {lack.reference}" for lack in missing})

    assert lacking(results, {}) == ["G7 token-run", "G7 worse-after-soak"]
    narrow = {**faults, label: replace(faults[label], checks=("words-after",))}
    assert lacking(results, narrow) == ["G7 token-run"]
    assert lacking(without(results, label), faults) == ["G7 not-climbed"]
    for wrong in ("G7 rehearsal-bf16", "G7", "G9 rehearsal-nvfp4-marlin"):
        with pytest.raises(ValueError, match="upstream_faults"):
            replace(rules.file, upstream_faults={wrong: faults[label]})
