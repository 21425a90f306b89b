"""The report of experiments: its tables, a terminal, and the files that it reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support.results import EXAMPLES, POINTS, gate

from sparkwright.bench import report, results
from sparkwright.bench.records import METRICS
from sparkwright.core.pages import clean

UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]"


def test_every_series_has_a_ratio_and_the_figures_of_both_sides() -> None:
    """A ratio with its interval for each cell and metric; the median of each side."""
    result = gate(*POINTS[:2])
    ratios, figures = report.ratios(result), report.figures(result)
    series = [one for cell in result.cells for one in cell.series]
    assert [row[2] for row in ratios.rows] == [report.number((one.candidate or 0) / (one.baseline or 1)) for one in series]
    assert [row[3] for row in ratios.rows] == [report.interval(one.low, one.high) for one in series]
    assert [row[2] for row in figures.rows] == ["candidate", "baseline"] * len(series)
    for name, factor in (("time per token", 1000), ("throughput", 1)):
        ours = next(one.candidate for one in series if METRICS[one.metric][0] == name)
        row = next(row for row in figures.rows if row[1].startswith(name))
        assert row[3] == report.number((ours or 0) * factor)


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"", "Expecting value"),
        (b'{"format": 1}', "Invalid enum value 1 - at `$.format`"),
        (b'{"format": 3, "kind": "gate"}', "missing required field"),
    ],
)
def test_a_file_that_is_not_a_result_is_refused(tmp_path: Path, data: bytes, detail: str) -> None:
    (tmp_path / "result.json").write_bytes(data)

    with refusal("file-invalid") as caught:
        results.read(tmp_path / "result.json")
    assert detail in str(caught.value.details)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_terminal_of_80_columns_is_enough(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report.show(EXAMPLES[name]())
    out = capsys.readouterr().out
    tables = [line.rstrip() for line in out.splitlines() if re.match(" [^ ]", line)]

    # A terminal folds what is longer.
    assert all(len(line) <= 80 for line in tables) or name in ("hostile", "invalid")
    assert not re.search("[\x1b\u202e]", out)


@given(st.floats(-1e12, 1e12))
def test_numbers_keep_four_digits_and_absurd_ones_are_not_shown(value: float) -> None:
    text = report.number(value)
    if value > 0:
        assert abs(float(text.replace(",", "")) - value) <= value * 0.51e-3
    else:
        assert text == report.NOT_MEASURED


@given(st.text(max_size=2000))
def test_clean_text_is_one_short_line(value: str) -> None:
    cleaned = clean(value)

    assert (len(cleaned) <= 1000, len(cleaned.splitlines()) <= 1) == (True, True)
    assert not re.search(UNSAFE, cleaned)
