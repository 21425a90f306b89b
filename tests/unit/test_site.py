"""The record of a workflow run, and the site of releases, speeds, patches and runs."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.client.world import World, wheel
from tests.refusals import refusal
from tests.support import browser
from tests.support.browser import Tab
from tests.support.results import HOSTILE, bench, gate

from sparkwright.bench.report import page
from sparkwright.cherry_picks.drift import Drift, Line, Trial
from sparkwright.cli import main
from sparkwright.client.records import GateResult, Missing, Release, ReleaseFile, ReleaseState
from sparkwright.core.console import console
from sparkwright.core.files import sha256_bytes
from sparkwright.core.states import State
from sparkwright.operate.errors import LabError
from sparkwright.operate.site import records
from sparkwright.operate.site.records import RunRecord, Stage

ROOT = Path(__file__).parents[2]
RUN = ("--workflow", "pipeline", "--run", "42", "--stack", "2026.11")
TIMES = ("--began", "2026-11-22T02:00:00Z", "--ended", "2026-11-22T05:00:00Z")
PAGES = ("index.html", "speeds.html", "patches.html", "runs.html")


@pytest.fixture(autouse=True)
def _no_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GITHUB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(console, "json", False)


def _record(folder: Path, *words: str) -> RunRecord:
    assert main.run(["lab", "record", "--at", str(folder), *RUN, *TIMES, *words]) == 0
    (path,) = folder.glob("*.json")
    return msgspec.json.decode(path.read_bytes(), type=RunRecord)


def test_a_record_holds_every_stage_under_a_name_of_the_run(tmp_path: Path) -> None:
    words = ("build=success", "gate=fail:gate-failed", "publish=skipped", "sign=cancelled")
    record = _record(tmp_path, *(word for stage in words for word in ("--stage", stage)))

    assert [path.name for path in tmp_path.glob("*.json")] == ["2026-11-22-2026.11-42.json"]
    assert record.state == "fail"
    assert record.stages == (
        Stage("build", "pass"), Stage("gate", "fail", "gate-failed"), Stage("publish", "not-run"),
        Stage("sign", "invalid", "cancelled"),
    )  # fmt: skip


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    first = _record(folder, "--stage", "gate=failure")

    assert _record(folder, "--stage", "gate=failure") == first
    with refusal("night-taken"):
        records.write(folder, replace(first, stages=(Stage("gate", "pass"),)))
    assert records.read(folder) == ([first], [])
    assert len(list(folder.iterdir())) == 1


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    def write(number: int) -> str:
        stages = (Stage(f"stage-{number}", "pass"),)
        record = RunRecord("pipeline", "1", "2026.11", "2026-11-22T05:00:00Z", stages)
        try:
            records.write(tmp_path, record)
        except LabError as error:
            return error.reference
        return "written"

    with ThreadPoolExecutor(16) as pool:
        outcomes = sorted(pool.map(write, range(16)))
    assert outcomes == ["night-taken"] * 15 + ["written"]
    assert len(records.read(tmp_path)[0]) == 1


@pytest.mark.parametrize(
    ("outcome", "document", "stage"),
    [
        ("success", {"schema": 1}, Stage("gate", "pass")),
        ("success", {"error": {"reference": "gate-inconclusive", "what": "open"}}, Stage("gate", "inconclusive", "gate-inconclusive", "open")),
        ("failure", {"schema": 1}, Stage("gate", "fail")),
        ("failure", None, Stage("gate", "fail", "no-document", "")),
        ("skipped", None, Stage("gate", "not-run")),
        ("", {"error": {"reference": "gate-failed", "what": "bad"}}, Stage("gate", "fail", "gate-failed", "bad")),
    ],
)  # fmt: skip
def test_the_worse_of_workflow_and_document_counts(
    tmp_path: Path, outcome: str, document: dict[str, Any] | None, stage: Stage
) -> None:
    path = tmp_path / "gate.json"
    if document is not None:
        path.write_text(json.dumps(document))
    (stored,) = _record(
        tmp_path / "runs", "--stage", f"gate={outcome}", "--document", f"gate={path}"
    ).stages

    assert replace(stored, message=stage.message) == stage


@pytest.mark.parametrize(
    "words",
    [
        ("--stage", "gate=great"),
        ("--stage", "gate"),
        ("--stage", "=pass"),
        ("--stage", "gate=pass", "--stage", "gate=fail"),
        ("--document", "gate"),
        ("--stage", "gate=pass", "--run", "../x"),
        ("--stage", "gate=pass", "--ended", "2026-11-21T00:00:00Z"),
        (),
    ],
)
def test_what_is_no_record_is_a_usage_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    with refusal("usage"):
        main.run(["lab", "record", "--at", str(tmp_path / "runs"), *RUN, *TIMES, *words])
    assert not (tmp_path / "runs").exists()


def test_files_are_recorded_by_hash_with_what_they_hold(tmp_path: Path) -> None:
    result = gate("1024/1024 c1")
    data = msgspec.json.encode(result)
    (tmp_path / "a.throughput.json").write_bytes(data)
    (tmp_path / "cut.throughput.json").write_bytes(data[: data.index(b'"legs"') + 20] + b"]}")
    (tmp_path / "log.txt").write_text("text")
    names = ("a.throughput.json", "cut.throughput.json", "log.txt", "none.json")
    words = [word for name in names for word in ("--file", str(tmp_path / name))]
    record = _record(tmp_path / "runs", "--stage", "gate=success", *words)

    assert [file.kind for file in record.files] == ["throughput", "other", "other", "other"]
    assert record.files[0].sha256 == sha256_bytes(data)
    assert record.files[0].state == result.state
    assert (record.files[3].sha256, bool(record.files[3].message)) == ("", True)
    assert [figure.metric for figure in record.measured] == ["tpot", "ttft", "rate"]
    assert record.measured[0].value == pytest.approx(result.cells[0].series[0].candidate)
    assert record.measured[0].wheel == result.candidate.sha256


def test_a_damaged_record_is_named_and_costs_no_other(tmp_path: Path) -> None:
    good = _record(tmp_path, "--stage", "gate=success")
    (tmp_path / "2026-11-23-2026.11-1.json").write_text('{"workflow": ')
    (tmp_path / "2026-11-24-2026.11-1.json").write_bytes((tmp_path / good.filename).read_bytes())
    (tmp_path / "link.json").symlink_to(tmp_path / good.filename)
    os.mkfifo(tmp_path / "pipe.json")
    found, problems = records.read(tmp_path)

    assert found == [good]
    assert [problem.reference for problem in problems] == ["record-damaged"] * 4


class _Links(HTMLParser):
    """The links and the identifiers of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(source)

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name == "href"]
        self.ids |= {value or "" for name, value in attrs if name == "id"}


def _publish(
    world: World, name: str, seed: int, *, foreign: bool = False, text: str = ""
) -> Release:
    """Publish the release *name* with verdicts and a throughput result."""
    ours = wheel("vllm", f"0.33.0.{seed}")
    result = gate("1024/1024 c1", seed=seed, began=1_795_305_600.0 + 86_400 * seed)
    about = "f" * 64 if foreign else ours.sha256
    data = msgspec.json.encode(replace(result, candidate=replace(result.candidate, sha256=about)))
    file = ReleaseFile(name=f"{seed}.throughput.json", size=len(data), sha256=sha256_bytes(data))
    gates = (
        GateResult("G0", "bytes", "pass"),
        GateResult("G8", "throughput", "inconclusive", text),
    )
    missing = (Missing("G8", "inconclusive", "undecided", text),)

    def change(release: Release) -> Release:
        (own,) = release.wheels
        proof = replace(own.proof, throughput=file, gates=gates, missing=missing)
        return replace(release, wheels=(replace(own, proof=proof),))

    def state(published: ReleaseState) -> ReleaseState:
        return replace(published, missing=("G8",))

    with world.changing() as transaction:
        transaction.put(file, data)
    return world.publish(name, [ours], channel="candidate", change=change, state=state)


@pytest.fixture(name="story", scope="module")
def _story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an index, runs and documents, in which some strings are hostile."""
    folder = tmp_path_factory.mktemp("story")
    world = World(folder)
    for seed in (1, 2, 3):
        _publish(
            world,
            f"2026.11.{seed}",
            seed,
            foreign=seed == 3,
            text="not \N{RIGHT-TO-LEFT OVERRIDE}decided <b>",
        )
    world.publish("2026.11.4", [wheel("vllm", "0.33.1")])
    world.yank("2026.11.2", "wrong answers <script>")
    states: tuple[State, ...] = ("pass", "fail", "invalid", "not-run", "inconclusive")
    for day, state in enumerate(states, 1):
        stages = (
            Stage("build", "pass"),
            Stage("gate", state, "", HOSTILE[:200].replace("\x1b", "").replace("\x00", "")),
        )
        ended, url = f"2026-11-{day:02}T05:00:00Z", "https://ci.example/runs/1"
        records.write(
            folder / "runs", RunRecord("pipeline", f"{day}", "2026.11", ended, stages, url)
        )
    (folder / "runs" / "broken.json").write_text("{")
    trials = (
        Trial("fits.patch", "1" * 64, "0.34.0", "applies", (0, 4), ()),
        Trial("clamp.patch", "2" * 64, "0.34.0", "conflict", (1, 9), (), ("hunk 1 of 2",)),
    )
    drift = Drift("vllm", "2026.11", "2026-11-20", ("0.34.0",), trials)
    (folder / "drift.json").write_bytes(msgspec.json.encode({"drift": [{"of": drift}]}))
    line = Line(
        "vllm", "clamp.patch", HOSTILE, 30, 42, "applied", "yes, fits 0.34.0", "", HOSTILE, HOSTILE
    )
    (folder / "patches.json").write_bytes(msgspec.json.encode({"stacks": {"2026.11": [line]}}))
    return folder


def _status(story: Path, output: Path, *more: str) -> int:
    given = (
        "--nights",
        str(story / "runs"),
        "--drift",
        str(story / "drift.json"),
        "--patches",
        str(story / "patches.json"),
    )
    options = ("--root", str(ROOT), "--cache-dir", str(output.parent / "cache"), "--offline")
    return main.run(["lab", "status", *options, *given, "--output", str(output), *more])


def _trusted(story: Path) -> tuple[str, ...]:
    root = (story / "index" / "metadata" / "1.root.json").read_bytes()
    return ("--index", str(story / "index"), "--trust", sha256_bytes(root))


def test_the_site_shows_releases_speeds_patches_and_runs(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status(story, tmp_path / "site", *_trusted(story)) == 0
    texts = {name: (tmp_path / "site" / name).read_text("utf-8") for name in PAGES}
    shown = {name: re.sub(r"\s+", " ", re.sub("<[^>]*>", "", text)) for name, text in texts.items()}
    said = capsys.readouterr().err

    assert "2026.11.4 of 2026-11-22" in shown["index.html"]
    assert "yanked: wrong answers &lt;script&gt;" in shown["index.html"]
    assert "? G8" in shown["index.html"]
    assert "broken.json" in shown["index.html"]
    assert "2026.11.3: record-damaged" in said
    assert "broken.json: record-damaged" in said
    assert "qwen3-next-80b-nvfp4" in shown["speeds.html"]
    assert "2 sessions, oldest first" in shown["speeds.html"]
    assert "clamp.patch" in shown["patches.html"]
    assert "✗ conflicts" in shown["patches.html"]
    assert [f"2026-11-0{day} pipeline" in shown["runs.html"] for day in range(1, 6)] == [True] * 5
    for name, text in texts.items():
        parsed = _Links(text)
        assert "<script" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        for link in parsed.links:
            target, _, anchor = link.partition("#")
            if target in ("", *PAGES):
                assert not anchor or anchor in _Links(texts[target or name]).ids
            else:
                assert link.startswith(("../releases/", "../index.html", "https://ci.example/"))


def test_a_site_without_an_index_says_so(story: Path, tmp_path: Path) -> None:
    assert _status(story, tmp_path / "site") == 0
    assert "No index was named" in (tmp_path / "site" / "index.html").read_text("utf-8")


def test_a_site_of_an_index_that_is_not_trusted_is_refused(story: Path, tmp_path: Path) -> None:
    with refusal("trust-missing"):
        _status(story, tmp_path / "site", "--index", str(story / "index"))
    assert not (tmp_path / "site").exists()


#: Elements that reach beyond the window, though no box around them scrolls.
OVERFLOW = """
(() => [...document.body.querySelectorAll('*')].filter(node => {
  for (let at = node; at; at = at.parentElement)
    if (['auto', 'hidden', 'scroll'].includes(getComputedStyle(at).overflowX)) return false;
  return node.getBoundingClientRect().right > innerWidth + 1; }).map(node => node.tagName))()
"""


@pytest.mark.skipif(browser.PROGRAM is None, reason=browser.WHY)
def test_pages_fit_a_desk_and_a_telephone_and_load_nothing(story: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    assert _status(story, folder, *_trusted(story)) == 0
    results = (
        bench("1024/1024 c1"),
        bench("1024/1024 c1", quantization="AWQ"),
        gate("1024/1024 c1"),
    )
    (folder / "report.html").write_text(page.render(results))

    def checked(tab: Tab, url: str) -> None:
        for name in (*PAGES, "report.html"):
            loaded = tab.load(url + name, width=1400)
            assert [text for text in loaded.complaints if "favicon" not in text] == [], name
            assert {address.rpartition("/")[2] for address in loaded.asked} <= {name, "favicon.ico"}
            tab.run("document.querySelectorAll('details').forEach(node => node.open = true)")
            for width, dark in ((1400, False), (390, True)):
                tab.look(width=width, dark=dark)
                assert tab.run(OVERFLOW) == [], (name, width)

    with browser.served(folder) as url, browser.chromium() as tab:
        checked(tab, url)
