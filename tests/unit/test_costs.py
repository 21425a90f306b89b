"""The expected cost of a unit: which source counts, and a record that was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.builder.compile.costs import Cost, Costs, ExpectedCost, Shipped, ShippedFile
from sparkwright.core import strict_yaml

UNITS = {"csrc/shipped.cu": (20.0, 2000), "csrc/both.cu": (21.0, 2100)}


def costs(folder: Path) -> Costs:
    """Return the costs as the next run reads them."""
    return Costs(folder / "records" / "vllm.jsonl", UNITS, {"moe/*.cu": 5000, "*.cu": 3000})


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("csrc/both.cu", ExpectedCost(12.35, 999)),
        ("csrc/shipped.cu", ExpectedCost(20.0, 2000)),
        ("csrc/moe/topk.cu", ExpectedCost(20, 5000, measured=False)),
        ("csrc/other.cu", ExpectedCost(20, 3000, measured=False)),
        ("csrc/a.cpp", ExpectedCost(20, 1200, measured=False)),
    ],
)
def test_measured_costs_count_before_guesses(
    tmp_path: Path, unit: str, expected: ExpectedCost
) -> None:
    """This machine's record first, then the stack's, then the first pattern."""
    costs(tmp_path).add([Cost("csrc/both.cu", 12.35, 999)])

    assert costs(tmp_path).expected(unit) == expected


def test_the_largest_of_the_newest_peaks_counts(tmp_path: Path) -> None:
    """A peak varies from run to run; older ones, of another source, are forgotten."""
    for seconds, megabytes in ((1, 9000), (2, 500), (3, 700), (4, 600)):
        costs(tmp_path).add([Cost("a.cu", seconds, megabytes)])

    assert costs(tmp_path).expected("a.cu") == ExpectedCost(4, 700)


@pytest.mark.parametrize("length", range(1, 60, 7))
def test_a_record_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, length: int) -> None:
    """The lines before the cut count, and the next line is one of its own."""
    costs(tmp_path).add([Cost("a.cu", 1, 100)])
    file = tmp_path / "records" / "vllm.jsonl"
    whole = file.read_bytes()
    costs(tmp_path).add([Cost("b.cu", 2, 200)])
    file.write_bytes(file.read_bytes()[: len(whole) + length])
    costs(tmp_path).add([Cost("c.cu", 3, 300)])

    assert {"a.cu", "c.cu"} <= costs(tmp_path).recorded.keys() <= {"a.cu", "b.cu", "c.cu"}


def test_shipped_costs_without_their_origin_are_refused() -> None:
    """Host, toolchain, arch and date are part of the file."""
    shipped = Shipped(host="h", toolchain="t", arch="12.1f", date="2026-11-21", units=UNITS)
    text = strict_yaml.dump(ShippedFile({"vllm": shipped}))
    assert strict_yaml.parse(text, ShippedFile, "costs.yaml").forks["vllm"] == shipped
    with refusal("file-invalid"):
        strict_yaml.parse(text.replace("    date: '2026-11-21'\n", ""), ShippedFile, "costs.yaml")
