"""G1 as a whole: its policy, its rows where references differ, and that the sound tree passes every one of its checks."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import converters
from tests.support.converters import POLICY, PYTHON

from sparkwright.builder.toolchain import Toolchain
from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.numerics import differences, trees
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.numerics.gate import REASONS, NumericsPolicy

ROOT = Path(__file__).parents[2]
REVIEWED = ROOT / "ci" / "gates" / "numerics.yaml"


def by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    """Return *checks* by their names, of which none is there twice."""
    names = [check.name for check in checks]
    assert sorted(set(names)) == sorted(names)
    return {check.name: check for check in checks}


def test_a_sound_tree_passes_every_check(tmp_path: Path) -> None:
    """Each converter of the small tree passes; a sweep says how many inputs it had, and the rows say with whom the tree agrees."""
    checks = by_name(numerics.run({"mini": converters.tree(tmp_path / "tree")}, POLICY, (), tmp_path / "scratch"))

    assert {check.state for check in checks.values()} == {"pass"}
    assert {figure.name: figure.value for figure in checks["mini-bf16-sweep"].figures} == {"mismatches": 0, "inputs": 65_282}
    assert checks["mini-nan"].message == "what NaN becomes: plus-six, as PTX's cvt.rn.satfinite and CUDA's cuda_fp4.h"
    assert "multiplies, as vLLM: 448 × 6 ÷ amax" in checks["mini-block-tensor-scale"].message
    assert "settled by G2" in checks["mini-vec8-packing"].message
    assert "settled by G2" not in checks["mini-bf16-sweep"].message
    assert not checks["mini-block-zero-block"].required
    assert checks["mini-python-table"].figures[1].value == 8


def test_disagreements_are_shown_with_their_bits(tmp_path: Path) -> None:
    """A failed sweep counts its mismatches and shows the first with pattern, value and both codes."""
    text = converters.CPP.replace("size < middle || (size == middle && code % 2 == 0)", "size < middle")
    tree = converters.tree(tmp_path / "tree", {converters.HEADER: text})

    check = by_name(numerics.run({"mini": tree}, converters.only("mini"), (), tmp_path / "scratch"))["mini-bf16-sweep"]

    assert (check.state, check.reason) == ("fail", "converter-wrong")
    assert check.figures[0].value == 8
    assert [(one.case, one.expected, one.actual) for one in check.samples[:2]] == [
        ("bf16 0x3e80 = 0.25", "code 0x0 = 0", "code 0x1 = 0.5"),
        ("bf16 0x3fa0 = 1.25", "code 0x2 = 1", "code 0x3 = 1.5"),
    ]


def test_a_claim_that_the_tree_does_not_keep_fails(tmp_path: Path) -> None:
    """Where references differ, what the tree does must be what the policy says, whichever it is."""
    one = msgspec.structs.replace(converters.UNIT.converters[0], nan="keeps-sign", zero="dropped")
    unit = msgspec.structs.replace(converters.UNIT, converters=(one,))
    tree = converters.tree(tmp_path / "tree")

    checks = by_name(numerics.run({"mini": tree}, NumericsPolicy(POLICY.limits, (unit,)), (), tmp_path / "scratch"))

    assert checks["mini-nan"].reason == checks["mini-negative-zero"].reason == "policy-differs"
    assert "the policy says keeps-sign" in checks["mini-nan"].message


@pytest.mark.parametrize("name", differences.DIFFERENCES)
def test_every_difference_is_a_row_with_its_references(name: str) -> None:
    """Each answer names who gives it; an answer that nobody gives fails, whatever the row."""
    difference = differences.DIFFERENCES[name]
    for answer, who in difference.answers.items():
        check = differences.row("a-row", name, answer, answer, ())
        assert (check.state, check.required) == ("pass", difference.required)
        assert who in check.message
    assert differences.row("a-row", name, "never seen", "", ()).reason == "policy-unknown"


def test_a_tree_that_was_not_made_is_said(tmp_path: Path) -> None:
    """Without a fork's tree its checks are there, under the same names, as not run."""
    sound = by_name(numerics.run({"mini": converters.tree(tmp_path / "tree")}, POLICY, (), tmp_path / "one"))
    without = by_name(numerics.run({}, POLICY, (), tmp_path / "two"))

    assert without.keys() == sound.keys()
    assert {check.reason for name, check in without.items() if name.startswith("mini")} == {"tree-missing"}


@pytest.mark.parametrize(
    ("text", "reference", "says"),
    [
        ("def convert(", "converter-unreadable", "is no Python"),
        ("x = 1", "converter-missing", "no function convert"),
        ("def convert(): pass", "converter-unreadable", "holds 0 texts"),
        ("VALUES = make()", "converter-unreadable", "assigned 0 lists"),
        ("VALUES = [1, 2, 3, 4, 5, 6, 7, x]", "converter-unreadable", "more than numbers"),
        ("(" * 100_000, "converter-unreadable", "is no Python"),
    ],
)
def test_python_that_cannot_be_read_is_said(tmp_path: Path, text: str, reference: str, says: str) -> None:
    """A table or a template that is gone fails; one that is not understood is invalid, and none of it is run."""
    tree = converters.tree(tmp_path / "tree", {PYTHON: text})
    policy = msgspec.structs.replace(POLICY, units=())

    checks = [check for check in numerics.run({"mini": tree}, policy, (), tmp_path / "scratch") if check.name.startswith("mini")]

    found = [check for check in checks if check.reason == reference and says in check.message]
    assert found
    assert {check.state for check in found} == {"fail" if reference == "converter-missing" else "invalid"}


def test_the_reviewed_policy_is_read_and_names_every_fork() -> None:
    """ci/gates/numerics.yaml has converters of all three forks and of the toolkit, and every file of it stays inside its tree."""
    policy = strict_yaml.load(REVIEWED, NumericsPolicy)

    assert policy.forks == ("cutlass", "flashinfer", "vllm")
    assert "" in {unit.fork for unit in policy.units}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"limits": {"seconds": 0, "memory": 1, "written": 1}}, "larger than zero"),
        ({"units": [{"fork": "a", "files": ["../x.h"], "converters": [{"name": "a", "kind": "encode", "call": ""}]}]}, "inside the tree"),
        ({"units": [{"fork": "a", "files": ["x.h"], "converters": []}]}, "no file or no converter"),
        ({"units": [{"fork": "a", "files": ["x.h"], "converters": [{"name": "A b", "kind": "encode", "call": ""}]}]}, "kebab-case"),
        ({"units": [{"fork": "a", "files": ["x.h"], "converters": [{"name": "a", "kind": "encode", "call": "", "lanes": 3}]}]}, "3 values"),
        ({"units": [{"fork": "a", "files": ["x.h"], "converters": [{"name": "a", "kind": "encode", "call": ""}] * 2}]}, "named twice"),
        ({"thresholds": {}}, "unknown field"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(change: dict[str, object], says: str) -> None:
    """Limits of nothing, files outside the tree, names that are no names or stand twice: the file is refused, with the place."""
    text = strict_yaml.dump({"limits": {"seconds": 1, "memory": 1, "written": 1}, **change})

    with refusal("file-invalid") as caught:
        strict_yaml.parse(text, NumericsPolicy, "numerics.yaml")

    assert says in " ".join(caught.value.details)


def test_every_reference_is_explained() -> None:
    """Each reference that the source of G1 gives a check has its line in REASONS, and REASONS has no other."""
    gates = ROOT / "ci" / "sparkwright" / "gates" / "numerics"
    names = ("gate", "converter", "coding", "blocks", "differences", "pythonsource", "sweeps")
    text = "".join((gates / f"{name}.py").read_text("utf-8") for name in names)
    # REASONS itself spells each once, with a colon behind it; two names of checks look like references.
    given = set(re.findall(r'"((?:converter|policy|reference|headers|tree)-[a-z]+)"(?!:)', text)) - {"reference-scale", "reference-swizzle"}

    assert given == set(REASONS)


@pytest.mark.toolchain
def test_cudas_own_header_is_right(tools: Toolchain, tmp_path: Path) -> None:
    """The software path of the locked toolkit's cuda_fp4.h agrees on every bf16, fp16 and tie, and makes +6 of every NaN."""
    policy = strict_yaml.load(REVIEWED, NumericsPolicy)
    own = msgspec.structs.replace(policy, units=tuple(unit for unit in policy.units if not unit.fork), tables=(), templates=())

    checks = numerics.run({}, own, trees.includes(tools), tmp_path)

    assert {check.state for check in checks} == {"pass"}
    assert len([check for check in checks if check.name.startswith("cuda-")]) > 10
