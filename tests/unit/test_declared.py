"""The checks that gates declare: nothing else can be emitted, everything declared is emitted, and patterns meet where they should."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import verdicts

from sparkwright.bench.records import METRICS
from sparkwright.gates.core import policy as gate_policy
from sparkwright.gates.core.ladder import GATES, Gate, climb, verdict
from sparkwright.gates.core.verdict import Check, Figure, failed, not_run, overlap, passed
from sparkwright.gates.device import gate as device

FOLDER = Path(gate_policy.__file__).parents[1]


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_declares_each_name_once(gate: str) -> None:
    """A declaration that stood there twice could say two things."""
    names = [one.name for one in gate_policy.declared(gate)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (passed("kernel", "it holds"), "does not declare"),
        (not_run("kernels-c", "it hangs", "probe-slow"), ""),
        (passed("kernels", "all load"), "never passes"),
        (not_run("kernels", "no wheel", "wheel-unnamed"), ""),
        (passed("kernels-c", "all load"), "without the figure or sample"),
        (passed("kernels-c", "all load", figures=[Figure("kernels", 1)]), ""),
        (failed("gpu", "broken", "no-gpu"), ""),
    ],
)
def test_a_check_that_is_not_as_declared_is_a_fault(check: Check, says: str) -> None:
    """A verdict of such a check is not made, whether a ladder builds it or a test."""
    gate = Gate("G2", "", lambda: (check,))
    if not says:
        assert climb([gate], stack="2026.11").verdicts[0].checks == (check,)
        return
    with pytest.raises(ValueError, match=says):
        climb([gate], stack="2026.11")
    with pytest.raises(ValueError, match=says):
        verdict(gate, [check], None)


def test_a_check_that_only_informs_is_not_required() -> None:
    """The tails of G5 are shown, and decide nothing."""
    shown = passed("tails", "as they are", figures=[Figure("KL", 0.1)], required=False)
    assert verdict(Gate("G5", "", tuple), [shown], None).state == "not-run"
    with pytest.raises(ValueError, match="only informs"):
        verdict(Gate("G5", "", tuple), [passed("tails", "as they are", figures=[Figure("KL", 0.1)])], None)


def _texts(path: Path) -> Iterator[str]:
    """Yield every text in the code of *path*, outside docstrings and declarations, with ``*`` for what is filled in."""
    tree = ast.parse(path.read_text("utf-8"))
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "declare":
            # What is computed from another table (`*GROUPS`) stays.
            skipped |= {id(one) for one in node.args if isinstance(one, ast.Constant)}
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(one) for one in node.values}
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "*" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value.replace("{}", "*")


def _emitting(gate: str) -> list[Path]:
    """Return the modules that make checks of *gate*: its own package, and those that serve all gates."""
    own = FOLDER.joinpath(*gate_policy.MODULES[gate].split("."))
    package = sorted(own.parent.glob("*.py")) if own.parent != FOLDER else [own.with_suffix(".py")]
    return [*package, FOLDER / "core" / "builder.py", FOLDER / "core" / "server_under_test.py", FOLDER / "core" / "ladder.py"]


@pytest.mark.parametrize("gate", GATES)
def test_every_declared_check_is_emitted(gate: str) -> None:
    """No declaration outlives the code that emits its check: each name, or a pattern that gives it, stands in that code."""
    texts = {text for path in _emitting(gate) for text in _texts(path)}
    patterns = {text for text in texts if "*" in text and text.strip("*- ")}
    stale = [
        one.name for one in gate_policy.declared(gate)
        if not {one.name, one.name.removeprefix("*-")} & texts and not any(fnmatch.fnmatchcase(one.name, pattern) for pattern in patterns)
    ]  # fmt: skip
    # Declared from the tables that the emitting code itself runs through.
    computed = {"G2": device.FUZZED, "G8": tuple(f"{metric}-*" for metric in METRICS)}
    assert [name for name in stale if name not in computed.get(gate, ())] == []


@pytest.mark.parametrize("gate", GATES)
def test_every_pattern_is_given_a_name(gate: str) -> None:
    """The repository's recipes, tasks, converters and workloads give each declared pattern at least one name."""
    assert [one.name for one in gate_policy.declared(gate) if one.role != "reports" and not verdicts.names(gate, one.name)] == []


@given(st.text("ab*", max_size=6), st.text("ab*", max_size=6), st.text("ab", max_size=8))
def test_patterns_overlap_where_a_name_matches_both(one: str, other: str, name: str) -> None:
    """A name that both match is proof; it does not matter which is first; a name alone is matched as fnmatch does."""
    assert overlap(one, other) == overlap(other, one)
    if fnmatch.fnmatchcase(name, one) and fnmatch.fnmatchcase(name, other):
        assert overlap(one, other)
    assert overlap(name, one) == fnmatch.fnmatchcase(name, one)
