"""The report of experiments: page, terminal, and the files that it reads."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support.results import EXAMPLES, HOSTILE, LADDER, POINTS, ROOT, bench, gate

from sparkwright.bench import results
from sparkwright.bench.load.vllm_bench import MOST_TOKENS, LoadResult, Request
from sparkwright.bench.records import FIGURES, METRICS, Metric
from sparkwright.bench.report import output, view
from sparkwright.bench.results import Series
from sparkwright.cli import main
from sparkwright.core.pages import clean
from sparkwright.core.states import SIGNS, State

#: Attributes through which a page could load, send or run something.
LOADING = r"\s(on\w+|src|srcset|action|formaction|data|xmlns)\s*="
UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]"


def shown(source: str) -> str:
    """Return the text of a page."""
    return html.unescape(re.sub("<[^>]*>", "", source))


@pytest.fixture(name="pages", scope="module")
def _pages() -> dict[str, str]:
    return {
        "one": output.render([gate(*POINTS[:2])]),
        "several": output.render(
            [bench(*LADDER[:2]), bench(*LADDER[:2], seed=2, quantization="AWQ")]
        ),
        "hostile": output.render([EXAMPLES["hostile"]()]),
    }


@pytest.mark.parametrize("name", ["one", "several", "hostile"])
def test_a_page_is_self_contained_and_runs_nothing(pages: dict[str, str], name: str) -> None:
    tags = " ".join(re.findall("<[^>]*>", pages[name]))
    names = re.findall(r'\sid="([^"]*)"', tags)

    assert "default-src 'none'" in pages[name]
    assert not {"script", "iframe", "object", "embed", "form", "base"} & set(
        re.findall(r"<(\w+)", tags)
    )
    assert not re.search(LOADING, re.sub('"[^"]*"', '""', tags))
    assert not re.search(r"url\([^#]", tags)
    assert "url(" not in pages[name].split("<style>")[1].split("</style>")[0]
    assert len(names) == len({*names})
    assert set(re.findall(r'href="#([^"]*)"', tags)) <= {*names}


def test_foreign_strings_are_text_and_nothing_else(pages: dict[str, str]) -> None:
    assert clean(HOSTILE) in shown(pages["hostile"])
    assert not re.search(f"<script|{UNSAFE}", pages["hostile"])


def test_every_series_is_on_the_page_and_ratios_come_before_figures(pages: dict[str, str]) -> None:
    """A ratio with its interval for each cell and metric; then the median of each side with its own."""
    result, text = gate(*POINTS[:2]), shown(pages["one"])
    ratios, figures = view.ratios(result), view.figures({"": result})
    series = [one for cell in result.cells for one in cell.series]
    assert [row[2] for row in ratios.rows] == [view.number((one.candidate or 0) / (one.baseline or 1)) for one in series]
    assert [row[3] for row in ratios.rows] == [view.interval(one.low, one.high) for one in series]
    assert all(cell in text for table in (ratios, figures) for row in table.rows for cell in row if "<" not in cell)
    assert [row[2] for row in figures.rows] == ["candidate", "baseline"] * len(series)
    for name in ("time per token", "throughput"):
        ours = next(one.candidate for one in series if METRICS[one.metric][0] == name)
        row = next(row for row in figures.rows if row[1].startswith(name))
        assert row[3] == view.number((ours or 0) * (1000 if name == "time per token" else 1))
    assert text.index(ratios.title) < text.index(figures.title)
    assert pages["one"].count("<svg") == len(series)


@pytest.mark.parametrize("state", SIGNS)
def test_the_verdict_comes_first_as_word_sign_and_colour(state: State) -> None:
    source = output.render([gate(*POINTS[:1], state=state, cells=(), legs=())])

    assert (
        f'<div class="card verdict {state}" data-state="{state}"><span class="pill">{SIGNS[state]} {state}</span>'
        in source
    )
    assert source.index("data-state") < source.index("Nothing was measured.")


@pytest.mark.parametrize("name", ["empty", "invalid"])
def test_a_page_of_nothing_measured_shows_no_pass(name: str, pages: dict[str, str]) -> None:
    source = output.render([EXAMPLES[name]()])

    assert "Nothing was measured." in source
    assert "✓" not in source
    assert '<span class="pill">• measured</span>' in pages["several"]


@pytest.mark.parametrize("number", [0.0, 1e-300, 1e308, -1e308])
def test_numbers_that_no_machine_gives_still_make_a_page(number: float) -> None:
    data = msgspec.json.encode(gate(*POINTS[:1], blocks=1))
    absurd = json.loads(
        data, parse_int=lambda _: min(abs(int(number)), MOST_TOKENS), parse_float=lambda _: number
    )
    result = msgspec.json.decode(json.dumps({**absurd, "format": 3}), type=results.Result)

    assert "Throughput gate" in output.render([result])


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
    output.show([EXAMPLES[name]()])
    out = capsys.readouterr().out
    tables = [line.rstrip() for line in out.splitlines() if re.match(" [^ ]", line)]

    # A terminal folds what is longer.
    assert all(len(line) <= 80 for line in tables) or name in ("hostile", "invalid")
    assert not re.search("[\x1b\u202e]", out)


@pytest.mark.parametrize(
    ("metric", "low", "high", "places"),
    [
        ("tpot", 1.01, 1.03, (1.01, 1.02, 1.03)),
        ("ttft", 1.01, None, (1.01, 1.02, 1.02)),
        ("rate", 0.99, 1.25, (1 / 1.25, 1 / 1.02, 1 / 0.99)),
        ("tpot", 1.0, 1e300, ()),
    ],
)
def test_right_of_the_middle_is_worse_in_every_metric(
    metric: Metric, low: float, high: float | None, places: tuple[float, ...]
) -> None:
    series = Series(metric, True, low=low, high=high, baseline=1.0, candidate=1.02)
    assert [math.exp(place) for place in view.costs(series)] == pytest.approx(places)


def test_any_number_of_results_stands_side_by_side() -> None:
    many = [bench(*LADDER[:2], seed=seed, model=f"owner-{seed}/model", recipe="") for seed in range(7)]
    source = shown(output.render(many))
    rows = view.figures(view.labelled(many)).rows
    assert [row[2][:2] for row in rows[:7]] == [f"#{number}" for number in range(1, 8)]
    assert {row[1] for row in rows[:7]} == {"time per token, ms"}
    assert all(f"#{number} owner-{number - 1}/model" in source for number in range(1, 8))


def test_percentiles_are_shown_and_an_answer_of_one_token_has_no_time_per_token(pages: dict[str, str]) -> None:
    run = LoadResult(
        "g", 10.0, tuple(Request(0.0, 0.1 * n, 0.1 * n + 0.2, 8, 21) for n in range(1, 101)),
        0.01, 0.03,
    )  # fmt: skip
    result = bench(LADDER[0], blocks=1)
    several = replace(result, legs=tuple(replace(leg, run=run) for leg in result.legs))
    rows = view.figures({"": several}, FIGURES).rows
    assert [row[3] for row in rows] == [
        "10.00", "5,050", "210.0", "1.600", "10.00", "9,010", "10.00", "30.00", "10.00",
    ]  # fmt: skip
    assert "time to first token, p90, ms" in shown(pages["one"])
    run = LoadResult("g", 1.0, (Request(0.0, 0.1, 0.1, 8, 1),))
    single = replace(result, legs=tuple(replace(leg, run=run) for leg in result.legs))
    assert view.figures({"": single}).rows[0][1:4] == ("time per token, ms", "candidate", "not measured")


def test_a_figure_that_an_old_record_lacks_is_not_measured() -> None:
    [path] = (ROOT / "docs" / "rehearsal").glob("vllm-*.throughput.json")
    assert b"itl_p90" not in path.read_bytes()
    source = output.render([results.read(path)])

    assert set(re.findall("gap between events, p90, ms</td>.*?</td><td>(.*?)</td>", source)) == {"not measured"}


@given(st.floats(-1e300, 1e300))
def test_numbers_keep_four_digits_and_absurd_ones_are_not_shown(value: float) -> None:
    text = view.number(value)
    if 1e-9 < value < 1e12:
        assert abs(float(text.replace(",", "")) - value) <= value * 0.51e-3
    else:
        assert text == view.NOT_MEASURED


@given(st.text(max_size=2000))
def test_clean_text_is_one_short_line(value: str) -> None:
    cleaned = clean(value)

    assert (len(cleaned) <= 1000, len(cleaned.splitlines()) <= 1) == (True, True)
    assert not re.search(UNSAFE, cleaned)


def test_lab_report_writes_a_page_and_never_over_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "bench.json", tmp_path / "out" / "page.html"
    result = bench(LADDER[0])
    path.write_bytes(msgspec.json.encode(result))
    words = ["lab", "report", "--root", str(ROOT), "--cache-dir", str(tmp_path), str(path)]
    assert main.main([*words, str(path), str(path)]) == 0
    printed = capsys.readouterr().out
    assert main.main([*words, "--html", str(target), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert main.main([*words, "--html", str(path)]) == 2

    assert target.read_text("utf-8") == output.render([result])
    assert written["results"][0]["kind"] == "bench"
    assert results.read(path) == result
    assert len(re.findall(r"c1 +time per token, ms +#[123]", printed)) == 3
