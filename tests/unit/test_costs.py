"""The expected cost of a unit: which of four sources counts, and a record that was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.builder.compile.costs import Costs, Expected, Shipped, ShippedFile
from sparkwright.core import strict_yaml

UNITS = {"csrc/shipped.cu": (20.0, 2000), "csrc/both.cu": (21.0, 2100)}
SHIPPED = Shipped(host="h", toolchain="t", arch="12.1f", date="2026-11-21", units=UNITS)


@pytest.fixture(name="costs")
def _costs(tmp_path: Path) -> Costs:
    return again(tmp_path)


def again(folder: Path) -> Costs:
    """Return the costs as the next run reads them."""
    return Costs(
        folder / "records" / "vllm.jsonl", SHIPPED, {"moe/*.cu": 5000, "*.cu": 3000}, "2026.11"
    )


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("csrc/shipped.cu", Expected(20.0, 2000, "shipped")),
        ("csrc/moe/topk.cu", Expected(20, 5000, "pattern")),
        ("csrc/other.cu", Expected(20, 3000, "pattern")),
        ("csrc/a.c", Expected(3, 300, "kind")),
        ("csrc/a.cpp", Expected(30, 1200, "kind")),
        ("", Expected(30, 1200, "kind")),
    ],
)
def test_a_unit_that_this_machine_never_compiled(
    costs: Costs, unit: str, expected: Expected
) -> None:
    """Shipped costs count first, then the first pattern, then the suffix; two are guesses."""
    assert costs.expected(unit) == expected
    assert expected.measured == (expected.origin == "shipped")


def test_what_this_machine_recorded_counts_most(tmp_path: Path, costs: Costs) -> None:
    """The next run expects it, whatever else is said of the unit."""
    costs.add([("csrc/both.cu", 12.345, 999)])

    assert again(tmp_path).expected("csrc/both.cu") == Expected(12.35, 999, "record")
    assert again(tmp_path).expected("csrc/shipped.cu").origin == "shipped"


def test_the_largest_of_the_newest_peaks_counts(tmp_path: Path, costs: Costs) -> None:
    """A peak varies from run to run; older ones, of another source, are forgotten."""
    for seconds, megabytes in ((1, 9000), (2, 500), (3, 700), (4, 600)):
        costs.add([("a.cu", seconds, megabytes)])

    assert again(tmp_path).expected("a.cu") == Expected(4, 700, "record")


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_a_record_that_was_cut_off_is_read_as_far_as_it_goes(
    tmp_path: Path, costs: Costs, kept: int
) -> None:
    """The lines before the cut count, and the next line is one of its own."""
    costs.add([("a.cu", 1, 100)])
    file = tmp_path / "records" / "vllm.jsonl"
    whole = file.read_bytes()
    costs.add([("b.cu", 2, 200)])
    file.write_bytes(file.read_bytes()[: len(whole) + kept])
    costs.add([("c.cu", 3, 300)])
    found = again(tmp_path)

    assert found.expected("a.cu") == Expected(1, 100, "record")
    assert found.expected("c.cu") == Expected(3, 300, "record")
    assert found.expected("b.cu").origin in ("pattern", "record")


def test_a_shipped_file_says_where_it_was_measured(tmp_path: Path) -> None:
    """Host, toolchain, arch and date are part of it; a figure without them is refused."""
    text = strict_yaml.dump(ShippedFile({"vllm": SHIPPED}))
    assert strict_yaml.parse(text, ShippedFile, "costs.yaml").forks["vllm"] == SHIPPED
    with refusal("file-invalid"):
        strict_yaml.parse(text.replace("    date: '2026-11-21'\n", ""), ShippedFile, "costs.yaml")
