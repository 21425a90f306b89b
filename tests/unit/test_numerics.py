"""G1 on a small tree: which checks it makes, what they show, and policies that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import converters
from tests.support.converters import POLICY

from sparkwright.builder.toolchain import Toolchain
from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.numerics.gate import REASONS, NumericsPolicy

ROOT = Path(__file__).parents[2]
REVIEWED = ROOT / "ci" / "gates" / "numerics.yaml"


def run(tree: Path, policy: NumericsPolicy, scratch: Path) -> dict[str, Check]:
    """Return the checks by name."""
    return {check.name: check for check in numerics.run({"mini": tree}, policy, (), scratch)}


def test_a_sound_tree_passes_with_figures(tmp_path: Path) -> None:
    """Every converter of every kind passes, and states how many inputs it had."""
    checks = run(converters.tree(tmp_path / "tree"), POLICY, tmp_path / "scratch")
    assert {check.state for check in checks.values()} == {"pass"}
    assert len(checks) == 8
    assert all(check.figures[0].value == 0 < check.figures[1].value for check in checks.values())


def test_disagreements_are_shown_with_their_values(tmp_path: Path) -> None:
    """A failed sweep shows the inputs, the expected code and the tree's."""
    text = converters.CPP.replace(
        "size < middle || (size == middle && code % 2 == 0)", "size < middle"
    )
    tree = converters.tree(tmp_path / "tree", {converters.HEADER: text})
    check = run(tree, converters.only("mini"), tmp_path / "scratch")["mini-sweep"]
    assert (check.state, check.reason) == ("fail", "converter-wrong")
    assert (check.samples[0].expected, check.samples[0].actual) == ("0x0", "0x1")
    assert "0.25" in check.samples[0].case


@pytest.mark.parametrize(
    "stated", [{"nan": "keeps-sign"}, {"zero": "dropped"}, {"tensor_scale": "divides"}]
)
def test_a_convention_that_the_tree_does_not_keep_fails(
    tmp_path: Path, stated: dict[str, str]
) -> None:
    """Where public references differ, the tree has to do what the policy states."""
    index = 4 if "tensor_scale" in stated else 0
    one = msgspec.structs.replace(converters.UNIT.converters[index], **stated)
    unit = msgspec.structs.replace(converters.UNIT, converters=(one,))
    policy = NumericsPolicy(POLICY.limits, (unit,))
    (check,) = run(converters.tree(tmp_path / "tree"), policy, tmp_path / "scratch").values()
    assert (check.state, check.reason) == ("fail", "policy-differs")


def test_a_missing_tree_keeps_the_names_of_its_checks(tmp_path: Path) -> None:
    """Without a fork's tree, or the toolkit's headers, its checks are there as not run."""
    sound = run(converters.tree(tmp_path / "tree"), POLICY, tmp_path / "one")
    without = {check.name: check for check in numerics.run({}, POLICY, (), tmp_path / "two")}
    assert without.keys() == sound.keys()
    assert {(check.state, check.reason) for check in without.values()} == {
        ("not-run", "tree-missing")
    }
    unit = msgspec.structs.replace(converters.UNIT, headers=("nowhere.h",))
    policy = NumericsPolicy(POLICY.limits, (unit,))
    checks = numerics.run({"mini": tmp_path / "tree"}, policy, (), tmp_path / "three")
    assert {(check.state, check.reason) for check in checks} == {("not-run", "headers-missing")}


UNIT = {"fork": "a", "files": ["x.h"], "converters": [{"name": "a", "kind": "encode", "call": ""}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": {"seconds": 0, "memory": 1, "written": 1}}, "larger than zero"),
        ({"units": [{**UNIT, "files": ["../x.h"]}]}, "inside the tree"),
        ({"units": [{**UNIT, "converters": []}]}, "no file or converter"),
        (
            {"units": [{**UNIT, "converters": [{"name": "A b", "kind": "scale", "call": ""}]}]},
            "kebab-case",
        ),
        (
            {
                "units": [
                    {
                        **UNIT,
                        "converters": [{"name": "a", "kind": "encode", "call": "", "lanes": 3}],
                    }
                ]
            },
            "3 lanes",
        ),
        ({"units": [UNIT, UNIT]}, "named twice"),
        ({"thresholds": {}}, "unknown field"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    """The file is refused, with the place."""
    text = strict_yaml.dump({"limits": {"seconds": 1, "memory": 1, "written": 1}, **change})
    with refusal("file-invalid") as caught:
        strict_yaml.parse(text, NumericsPolicy, "numerics.yaml")
    assert message in " ".join(caught.value.details)


def test_the_reviewed_policy_names_every_fork() -> None:
    """It has converters of all three forks and of the toolkit."""
    policy = strict_yaml.load(REVIEWED, NumericsPolicy)
    assert policy.forks == ("cutlass", "flashinfer", "vllm")
    assert "" in {unit.fork for unit in policy.units}


def test_every_reason_is_explained() -> None:
    """Each reason in the source of G1 has its line in REASONS, and REASONS has no other."""
    package = ROOT / "ci" / "sparkwright" / "gates" / "numerics"
    text = "".join(path.read_text("utf-8") for path in package.glob("*.py"))
    pattern = r'"((?:converter|policy|headers|tree)-[a-z-]+)"(?!:)'
    assert set(re.findall(pattern, text)) == set(REASONS)


@pytest.mark.toolchain
def test_cudas_own_header_is_right(tools: Toolchain, tmp_path: Path) -> None:
    """The software path of the locked toolkit's cuda_fp4.h is right for every input."""
    policy = strict_yaml.load(REVIEWED, NumericsPolicy)
    own = msgspec.structs.replace(policy, units=tuple(one for one in policy.units if not one.fork))
    checks = numerics.run({}, own, numerics.include_folders(tools), tmp_path)
    assert {check.state for check in checks} == {"pass"}
