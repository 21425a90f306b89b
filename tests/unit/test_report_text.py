"""Reports in words: the verb, Markdown, the terminal, and sentences that say what intervals support and no more."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.reportdata import HOSTILE, MAKERS, POINTS, STOCK, Maker, bench

from sparkwright.bench.records import METRICS, Metric
from sparkwright.bench.report import compare, markdown, page, pairs, read, terminal, words
from sparkwright.bench.report.view import Shift, Value, View, change, shift
from sparkwright.bench.results import Result, Series
from sparkwright.core.console import console

if TYPE_CHECKING:
    from tests.unit.conftest import Cli

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    """Return the file of a small bench."""
    path = tmp_path / "bench.json"
    path.write_bytes(msgspec.json.encode(bench(1, 0.024, "NVFP4", points=POINTS[:2])))
    return path


def test_the_verb_writes_what_was_asked_for(cli: Cli, file: Path, tmp_path: Path) -> None:
    """The page is written, the same in every process, and the document names it with the states."""
    html = tmp_path / "out" / "page.html"
    done = cli("lab", "report", str(file), "--html", str(html), "--json", "--root", str(ROOT), "--cache-dir", str(tmp_path))
    document = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert html.read_text("utf-8") == page.render([read.read(file)])
    assert document["html"] == str(html)
    assert [(one["kind"], one["state"]) for one in document["results"]] == [("bench", "not-run")]


def test_the_verb_never_writes_over_a_result(cli: Cli, file: Path, tmp_path: Path) -> None:
    """A result named as output is a usage error, and stays as it was."""
    before = file.read_bytes()
    done = cli("lab", "report", str(file), "--html", str(file), "--root", str(ROOT), "--cache-dir", str(tmp_path))

    assert done.returncode == 2
    assert "would be overwritten" in done.stderr
    assert file.read_bytes() == before


def test_the_verb_refuses_what_is_no_result(cli: Cli, tmp_path: Path) -> None:
    """A file that is not there is an expected failure with a reference."""
    done = cli("lab", "report", str(tmp_path / "none.json"), "--json", "--root", str(ROOT), "--cache-dir", str(tmp_path))

    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["reference"] == "file-invalid"


@given(st.text(max_size=80))
def test_any_text_stays_one_line_of_plain_markdown(given_: str) -> None:
    """Whatever the string, it is one line, its pipes are escaped, and without the escapes it is what it was."""
    made = markdown.text(given_)

    assert len(made.splitlines()) <= 1
    assert not re.search(r"(?<!\\)(\\\\)*\|", made)
    assert re.sub(r"\\(.)", r"\1", made).replace("\u200b", "") == words.clean(given_)


@pytest.mark.parametrize("which", sorted(set(MAKERS) - {"large"}))
def test_a_terminal_of_80_columns_is_enough(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables and bars of every kind of Result fit, and no character of a string reaches the terminal as a command."""
    terminal.show(MAKERS[which]())
    out = capsys.readouterr().out
    rest = [line for line in out.splitlines() if not line.startswith(("  - ", "✓", "✗", "?", "!", "–", "•"))]

    assert out
    assert max((len(line.rstrip()) for line in rest), default=0) <= 80
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_under_json_a_terminal_report_leaves_standard_output_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one document has standard output for itself."""
    monkeypatch.setattr(console, "json", True)
    terminal.show(MAKERS["bench-awq"]())
    shown = capsys.readouterr()

    assert shown.out == ""
    assert "1024/1024 c64" in shown.err


@given(st.floats(0, 1), st.integers(1, 60))
def test_a_bar_is_as_long_as_its_share(share: float, width: int) -> None:
    """To an eighth of a column, and never longer than the whole."""
    made = terminal.bar(share, width)
    eighths = 8 * made.count("█") + sum(" ▏▎▍▌▋▊▉".index(one) for one in made if one != "█")

    assert len(made) <= width
    assert abs(eighths - share * width * 8) <= 0.5


@given(st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=9))
def test_a_plot_shows_every_value_once_above_its_bar(values: list[float]) -> None:
    """The largest reaches the top, each has its figure, and lines stay as wide as the plot."""
    lines = list(terminal.plot(list(enumerate(values, 1))))

    assert max(map(len, lines)) <= 11 * len(values)
    assert figures_of(lines[:-1]) == sorted(words.number(value, 3) for value in values)


def figures_of(lines: list[str]) -> list[str]:
    """Return the figures in *lines*, sorted."""
    return sorted(re.findall(r"[\d.,e-]+", " ".join(re.sub("[█▁▂▃▄▅▆▇]", " ", line) for line in lines)))


def series(metric: Metric, mean: float, half: float) -> Series:
    """Return a series whose blocks say that the candidate is worse by *mean* (in logarithms), and its interval as the records have it."""
    sign = -1 if METRICS[metric][3] else 1
    low, high = sorted((math.exp(sign * (mean - half)), math.exp(sign * (mean + half))))
    return Series(metric, True, (mean, mean, mean), low=low, high=high)


@given(st.sampled_from(sorted(METRICS)), st.floats(-0.5, 0.5), st.floats(1e-3, 0.2))
def test_worse_is_worse_in_every_metric(metric: Metric, mean: float, half: float) -> None:
    """A shift above zero is a candidate that is worse, whichever way the metric runs; the change itself has the metric's own sign."""
    one = series(metric, mean, half)
    found, moved = shift(one), change(one)

    assert found
    assert moved is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.middle < found.high
    assert math.isclose(found.middle, math.expm1(mean), abs_tol=1e-12)
    assert math.isclose(moved, math.expm1(-mean if METRICS[metric][3] else mean), abs_tol=1e-12)


@given(st.floats(-0.5, 0.5), st.floats(1e-3, 0.5), st.floats(1e-3, 0.5))
def test_a_sentence_claims_the_near_end_of_its_interval(middle: float, below: float, above: float) -> None:
    """Faster or slower is said only where the whole interval is, and only by its end nearest to no difference."""
    low, high = max(-0.9, middle - below), middle + above
    says = Shift(middle, low, high).says()

    if high < 0:
        assert says == f"at least {words.percent(1 / (1 + high) - 1)} faster"
    elif low > 0:
        assert says == f"at least {words.percent(low)} slower"
    else:
        assert says.startswith("no difference shown")


def test_without_an_interval_nothing_is_claimed() -> None:
    """Single medians give no statement and no bold figure, however far apart they are."""
    fast, slow = bench(1, 0.010, "NVFP4", points=POINTS[:1]), bench(2, 0.030, "AWQ", points=POINTS[:1])
    once = [
        msgspec.structs.replace(
            one, cells=tuple(msgspec.structs.replace(cell, series=tuple(_alone(each) for each in cell.series)) for cell in one.cells)
        )
        for one in (fast, slow)
    ]
    views = [View(one) for one in once]
    (pair,) = pairs.pairs(views)

    assert "too few launches for a statement" in pair.says
    assert "faster" not in pair.says
    assert not any(entry.best for table in compare.tables(compare.columns(views)) for _, entries in table.rows for entry in entries)


def _alone(one: Series) -> Series:
    return msgspec.structs.replace(one, low=None, high=None, launches=1)


def test_formats_are_compared_with_what_the_sessions_support() -> None:
    """NVFP4 against AWQ names both, says by how much at least, and that drift between sessions is not in it."""
    one, two = MAKERS["bench-nvfp4"](), MAKERS["bench-awq"]()
    (pair,) = pairs.pairs([View(one), View(two)])
    (back,) = pairs.pairs([View(two), View(one)])

    assert pair.title == "NVFP4 against AWQ"
    assert re.match(r"Per token, faster in 7 of 7 workloads by at least \d", pair.says)
    assert re.match(r"Per token, slower in 7 of 7 workloads by at least \d", back.says)
    assert "drift" in pair.how
    assert "Other checkpoints" in pair.how


def test_a_fork_is_held_against_its_own_baseline() -> None:
    """Candidate and baseline of one session are compared by their paired blocks."""
    result = MAKERS["pass"]()
    (pair,) = pairs.pairs([View(result)])

    assert pair.title == f"{result.candidate.label} against {STOCK.label}"
    assert "block by block" in pair.how


def test_bold_is_the_best_and_what_is_not_told_from_it() -> None:
    """Where intervals reach into the best one's, both are bold; a value without an interval never is."""
    values = [Value(40.0, 39.0, 41.0, 4), Value(40.5, 39.5, 41.5, 4), Value(30.0, 29.0, 31.0, 4), Value(99.0, launches=1), None]

    assert compare._best(values, more=True) == {0, 1}
    assert compare._best(values, more=False) == {2}


@given(st.floats(-1e300, 1e300), st.integers(1, 9))
def test_numbers_keep_their_digits(value: float, digits: int) -> None:
    """What is written is the value, to as many significant digits as were asked for."""
    written = float(words.number(value, digits).replace(",", ""))

    assert written == value or abs(written - value) <= abs(value) * 0.51 * 10 ** (1 - digits)


@given(st.text(max_size=2000))
def test_clean_text_is_short_and_moves_no_cursor(given_: str) -> None:
    """Control characters, changes of direction and surrogates are spelled out, and the length is bounded."""
    made = words.clean(given_)

    assert len(made) <= words.LONGEST
    assert made.encode().decode() == made
    assert not re.search("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]", made)


def test_the_hostile_string_is_hostile() -> None:
    """The string that the other tests rely on has what they look for."""
    assert {"\x1b", "\u202e", "\x00", "<", "|", "@"} <= set(HOSTILE)


def test_made_up_results_are_the_same_each_time() -> None:
    """A seed gives one Result, so that a page can be compared with itself."""
    made: list[Result] = [Maker(7, points=POINTS[:1]).gate(blocks=1) for _ in range(2)]

    assert made[0] == made[1]
