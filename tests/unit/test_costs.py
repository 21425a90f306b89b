"""The expected cost of a unit: which source counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.builder.schedule import Cost, Costs, Shipped, ShippedFile
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store

UNITS = {"csrc/shipped.cu": (20.0, 2000), "csrc/both.cu": (21.0, 2100)}


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("csrc/both.cu", Cost(12.35, 999)),
        ("csrc/shipped.cu", Cost(20.0, 2000)),
        ("csrc/moe/topk.cu", Cost(20, 5000, measured=False)),
        ("csrc/other.cu", Cost(20, 3000, measured=False)),
        ("csrc/a.cpp", Cost(20, 1200, measured=False)),
    ],
)
def test_measured_costs_count_before_guesses(tmp_path: Path, unit: str, expected: Cost) -> None:
    """This machine's last record first, then the stack's, then the first pattern."""

    def costs() -> Costs:
        return Costs(Store(tmp_path), "vllm", UNITS, {"moe/*.cu": 5000, "*.cu": 3000})

    costs().add({"csrc/both.cu": Cost(1, 100), "csrc/more.cu": Cost(2, 200)})
    costs().add({"csrc/both.cu": Cost(12.35, 999)})

    assert costs().expected(unit) == expected
    assert costs().recorded.keys() == {"csrc/both.cu", "csrc/more.cu"}


def test_shipped_costs_without_their_origin_are_refused() -> None:
    """Host, toolchain, arch and date are part of the file."""
    shipped = Shipped(host="h", toolchain="t", arch="12.1f", date="2026-11-21", units=UNITS)
    text = strict_yaml.dump(ShippedFile({"vllm": shipped}))
    assert strict_yaml.parse(text, ShippedFile, "costs.yaml").forks["vllm"] == shipped
    with refusal("file-invalid"):
        strict_yaml.parse(text.replace("    date: '2026-11-21'\n", ""), ShippedFile, "costs.yaml")
