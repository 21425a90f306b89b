"""The record of a night: whole, once, and of failures as well as of what went well."""

from __future__ import annotations

import datetime
import json
import os
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import verdicts, wheels
from tests.unit.reportdata import Maker, bench

from sparkwright.cli import main
from sparkwright.core.console import console
from sparkwright.core.files import sha256_file
from sparkwright.core.states import State
from sparkwright.gates.core.verdict import ORDER
from sparkwright.operate.errors import LabError
from sparkwright.operate.site import measured, night, nights
from sparkwright.operate.site.records import Night, Stage, schema

RUN = ("--workflow", "pipeline", "--run", "42", "--stack", "2026.11", "--began", "2026-11-22T02:00:00Z", "--ended", "2026-11-22T05:00:00Z")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what GitHub says of the run of these tests out of them."""
    for name in [name for name in os.environ if name.startswith("GITHUB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(console, "json", False)


def _record(folder: Path, *words: str) -> Night:
    assert main.run(["lab", "record", "--at", str(folder), *RUN, *words]) == 0
    (path,) = folder.glob("*.json")
    return msgspec.json.decode(path.read_bytes(), type=Night)


def test_a_night_is_recorded_with_its_stages_under_a_name_that_says_which(tmp_path: Path) -> None:
    """A run becomes one file, named after day, stack and run, that holds every stage with state and reference."""
    made = _record(tmp_path / "nights", "--stage", "build=success", "--stage", "gate=fail:gate-failed", "--stage", "publish=skipped")
    assert [path.name for path in (tmp_path / "nights").iterdir()] == ["2026-11-22-2026.11-42.json"]
    assert made.stages == (Stage("build", "pass"), Stage("gate", "fail", "gate-failed"), Stage("publish", "not-run"))
    assert made.state == "fail"


def test_a_record_is_never_written_over(tmp_path: Path) -> None:
    """The same record again changes nothing; another one under its name is refused, and the first stays as it was."""
    folder = tmp_path / "nights"
    first = _record(folder, "--stage", "gate=failure")
    assert _record(folder, "--stage", "gate=failure") == first
    with refusal("night-taken") as refused:
        main.run(["lab", "record", "--at", str(folder), *RUN, "--stage", "gate=success"])
    assert refused.value.reference == "night-taken"
    assert _record(folder, "--stage", "gate=failure") == first
    assert [path.name for path in folder.iterdir()] == [first.filename], "nothing half-written stays"


def test_of_many_who_write_at_once_one_wins_whole(tmp_path: Path) -> None:
    """Of sixteen different records with one name exactly one is written, and the others are refused."""

    def one(number: int) -> bool:
        try:
            made = Night("pipeline", "1", "2026.11", "2026-11-22T05:00:00Z", (Stage(f"stage-{number}", "pass"),))
            night.write(tmp_path / "nights", made)
        except LabError as error:
            if error.reference != "night-taken":
                raise
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(one, range(16))) == 1
    (path,) = (tmp_path / "nights").iterdir()
    assert msgspec.json.decode(path.read_bytes(), type=Night).stages[0].state == "pass"


def test_what_github_says_of_a_run_is_taken_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under GitHub Actions a step has to name the folder, the stack and the stages, and nothing else."""
    told = {
        "WORKFLOW": "pipeline", "RUN_ID": "777", "RUN_ATTEMPT": "2", "SHA": "a" * 40, "SERVER_URL": "https://github.example",
        "REPOSITORY": "owner/spark-wright",
    }  # fmt: skip
    for name, text in told.items():
        monkeypatch.setenv(f"GITHUB_{name}", text)
    assert main.run(["lab", "record", "--at", str(tmp_path), "--stack", "2026.05", "--stage", "drift=cancelled"]) == 0
    (path,) = tmp_path.glob("*-2026.05-777.2.json")
    made = msgspec.json.decode(path.read_bytes(), type=Night)
    assert made.url == "https://github.example/owner/spark-wright/actions/runs/777"
    assert (made.workflow, made.commit, made.began, made.state) == ("pipeline", "a" * 40, "", "invalid")


@pytest.mark.parametrize(
    ("document", "state", "reference"),
    [
        ('{"wheels": []}', "pass", ""),
        ('{"error": {"reference": "arch-mismatch", "what": "12.0f instead of 12.1f"}}', "fail", "arch-mismatch"),
        ('{"error": {"reference": "gate-inconclusive", "what": "open"}}', "inconclusive", "gate-inconclusive"),
        ('{"error": {"reference": "measurement-invalid", "what": "slow state"}}', "invalid", "measurement-invalid"),
        ('{"error": {"reference": "gate-not-run", "what": "no GPU"}}', "not-run", "gate-not-run"),
        ('{"error": {"reference": "<b>;rm -rf", "what": "x"}}', "fail", "not-known"),
        ('{"wheels": [', "invalid", "no-document"),
        ("[" * 100_000, "invalid", "no-document"),
    ],
)
def test_a_verb_tells_what_came_of_it_by_its_document(tmp_path: Path, document: str, state: str, reference: str) -> None:
    """The JSON document of a verb gives state, reference and sentence; a damaged one is a stage that does not count."""
    (tmp_path / "verb.json").write_text(document)
    made = _record(tmp_path / "nights", "--document", f"gate={tmp_path / 'verb.json'}")
    assert (made.stages[0].state, made.stages[0].reference) == (state, reference)


@pytest.mark.parametrize(
    ("word", "document", "state", "reference"),
    [
        ("failure", '{"error": {"reference": "disk-full", "what": "no room"}}', "fail", "disk-full"),
        ("failure", '{"wheels": []}', "fail", ""),
        ("success", '{"wheels": []}', "pass", ""),
        ("failure", None, "fail", "no-document"),
        ("cancelled", None, "invalid", "cancelled"),
        ("skipped", None, "not-run", ""),
        ("success", None, "not-run", "no-document"),
    ],
)
def test_a_word_and_a_document_together_are_never_better_than_either(
    tmp_path: Path, word: str, document: str | None, state: str, reference: str
) -> None:
    """What the workflow says and what the verb printed go together: the document explains, and neither hides the other's failure."""
    if document is not None:
        (tmp_path / "verb.json").write_text(document)
    made = _record(tmp_path / "nights", "--stage", f"gate={word}", "--document", f"gate={tmp_path / 'verb.json'}")
    assert (made.stages[0].state, made.stages[0].reference) == (state, reference)


@given(st.sampled_from(["success", "failure", "cancelled", "skipped", *ORDER]), st.sampled_from(ORDER))
def test_no_stage_passes_unless_word_and_document_say_so(word: str, said: State) -> None:
    """Together they pass only where both pass."""
    told = night.stage(f"gate={word}")
    document = Stage("gate", said, "" if said == "pass" else "gate-failed")
    together = night.together(told, document)
    assert (together.state == "pass") == (told.state == "pass" and said == "pass")


def test_files_are_named_by_digest_and_the_measured_figures_kept(tmp_path: Path) -> None:
    """Verdicts and measurements are recorded by sha256 with what they come to; the figures are the candidate's own, from its legs."""
    (path,) = [one for one in wheels.release(tmp_path / "dist") if one.name.startswith("vllm-")]
    stem = str(path).removesuffix(".whl")
    result = Maker(1).gate()
    (tmp_path / "slow.throughput.json").write_bytes(msgspec.json.encode(result))
    given_ = [f"{stem}.verdicts.json", str(tmp_path / "slow.throughput.json"), str(tmp_path / "gone.json")]
    made = _record(tmp_path / "nights", "--stage", "gate=success", *[word for one in given_ for word in ("--file", one)])
    assert [one.kind for one in made.files] == ["verdicts", "throughput", "other"]
    assert made.files[0].sha256 == sha256_file(Path(given_[0]))
    assert made.files[0].wheel == sha256_file(path)
    assert made.files[0].state == verdicts.ladder(path).state
    assert not made.files[2].sha256
    assert made.files[2].says
    one = made.measured[0]
    own = [leg for leg in result.legs if (leg.cell, leg.side) == (one.cell, "candidate") and leg.run]
    values = [getattr(leg.run, one.metric) for leg in own]
    assert one.value == pytest.approx(statistics.median(values), rel=0.05)
    blocks = {leg.block for leg in own}
    assert one.blocks == len(blocks)
    assert one.low
    assert one.high
    assert one.low < one.value < one.high
    assert {figure.source for figure in made.measured} == {made.files[1].sha256}


def test_a_bench_has_the_interval_that_the_bench_itself_tells() -> None:
    """The interval over launches is the one of the record where there is no baseline, within a rounding of its quantile."""
    made = bench(21, 0.024, "NVFP4")
    found = {(one.cell, one.metric): one for one in measured.of(made, "0" * 64)}
    for cell in made.cells:
        for series in cell.series:
            one = found[cell.name, series.metric]
            assert one.value == pytest.approx(series.candidate, rel=1e-6)
            assert one.low == pytest.approx(series.low, rel=0.02)


def test_nothing_measured_is_no_figure(tmp_path: Path) -> None:
    """A measurement none of whose legs counts gives no figure, and is still named by its digest."""
    made = Maker(1).gate(blocks=1)
    legs = tuple(msgspec.structs.replace(leg, discarded=True) for leg in made.legs)
    (tmp_path / "r.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(made, legs=legs, state="invalid")))
    record = _record(tmp_path / "nights", "--stage", "gate=failure", "--file", str(tmp_path / "r.json"))
    assert not record.measured
    assert record.files[0].sha256
    assert record.files[0].state == "invalid"


@pytest.mark.parametrize(
    "words",
    [
        ("--stage", "gate"), ("--stage", "gate=great"), ("--stage", "gate=fail:Not A Reference"), ("--stage", "=fail"),
        ("--stage", "../x=fail"), ("--stage", "a=pass", "--stage", "a=fail"), ("--document", "gate="), (),
        ("--stage", "a=pass", "--run", "../../etc/passwd"), ("--stage", "a=pass", "--ended", "2026-13-41T00:00:00Z"),
        ("--stage", "a=pass", "--ended", "2026-11-01T00:00:00Z"), ("--stage", "a=pass", "--workflow", "a\nb"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A stage of another form, an address that is none, a path for a number, or an end before the beginning write nothing."""
    with refusal("usage"):
        main.run(["lab", "record", "--at", str(tmp_path / "nights"), *RUN, *words])
    assert not (tmp_path / "nights").exists()


def test_the_program_says_what_it_wrote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With --json the record comes as one document, with its file."""
    assert main.main(["lab", "record", "--json", "--at", str(tmp_path), *RUN, "--stage", "plan=success"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert Path(told["file"]).is_file()
    assert told["state"] == "pass"
    assert told["night"]["stack"] == "2026.11"


def test_the_schema_says_what_a_record_holds() -> None:
    """The schema names every field of a night."""
    assert set(schema()["$defs"]["Night"]["properties"]) == {field.name for field in msgspec.structs.fields(Night)}


def _night(number: int, day: str, says: str = "") -> Night:
    return Night("pipeline", f"{number}", "2026.11", f"{day}T05:00:00Z", (Stage("gate", "fail", "gate-failed", says),))


def test_every_record_has_a_place_that_does_not_move() -> None:
    """However many runs a month has, each is on one page, no page has too many, and one more run moves none of the others."""
    made = [_night(number, f"2026-11-{1 + number // 40:02d}") for number in range(700)]
    where = nights.places(made)
    assert len(set(where.values())) == len(made)
    pages = Counter(place.partition("#")[0] for place in where.values())
    assert max(pages.values()) <= nights.PAGE
    assert nights.places([*made, _night(700, "2026-11-30")]).items() >= where.items()


def test_heavy_records_share_no_page_with_many() -> None:
    """Records that were made as large as they may be fill a page with few of them."""
    stages = tuple(Stage(f"s{at}", "fail", "", "x" * 1000) for at in range(100))
    made = [replace(_night(number, "2026-11-01"), stages=stages) for number in range(30)]
    pages = Counter(place.partition("#")[0] for place in nights.places(made).values())
    assert max(pages.values()) * 60_000 <= nights.WEIGHT + 60_000


@given(st.lists(st.dates(datetime.date(2026, 1, 1), datetime.date(2026, 3, 31)), min_size=1, max_size=20), st.integers(1, 120))
def test_a_calendar_has_each_day_once(days: list[datetime.date], most: int) -> None:
    """From the first record to today each day is there once, newest first, with its own runs, and no more than asked for."""
    made = [_night(number, day.isoformat()) for number, day in enumerate(days)]
    (row,) = nights.calendar(made, "2026-03-31", ["release"], most)
    shown = [day for day, _ in row.days]
    whole = (datetime.date(2026, 3, 31) - min(days)).days + 1
    assert len(shown) == min(most, whole)
    assert shown == [(datetime.date(2026, 3, 31) - datetime.timedelta(days=back)).isoformat() for back in range(len(shown))]
    assert sum(len(runs) for _, runs in row.days) == sum(day.isoformat() in shown for day in days)
    assert row.lacking == len(set(shown) - {day.isoformat() for day in days})


def test_what_runs_on_demand_misses_no_night() -> None:
    """A workflow that runs when somebody asks has no calendar, and no night of it is missed."""
    assert not list(nights.calendar([replace(_night(1, "2026-11-01"), workflow="release")], "2026-11-22", ["release"], 60))
