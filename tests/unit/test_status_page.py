"""The status page: releases of a real index, speeds, patches, and the runs that GitHub lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.client.world import World, wheel
from tests.support import chromium, githubwork
from tests.support.results import HOSTILE, bench, gate
from tests.unit.conftest import ROOT

from sparkwright.bench.report import output
from sparkwright.cherry_picks.drift import Drift, Trial
from sparkwright.cli import main
from sparkwright.client.records import GateResult, Missing, Release, ReleaseFile
from sparkwright.core.files import sha256_bytes
from sparkwright.core.github import ADDRESS


def _publish(world: World, name: str, seed: int, *, foreign: bool = False, text: str = "") -> None:
    """Publish the release *name* with verdicts and a throughput result."""
    ours = wheel("vllm", f"0.33.0.{seed}")
    result = gate("1024/1024 c1", "1024/1024 c8", seed=seed)
    about = "f" * 64 if foreign else ours.sha256
    data = msgspec.json.encode(replace(result, candidate=replace(result.candidate, sha256=about)))
    file = ReleaseFile(name=f"{seed}.throughput.json", size=len(data), sha256=sha256_bytes(data))
    gates = (GateResult("G0", "bytes", "pass"), GateResult("G8", "throughput", "inconclusive", text))

    def change(release: Release) -> Release:
        (own,) = release.wheels
        proof = replace(own.proof, throughput=file, gates=gates, missing=(Missing("G8", "inconclusive", "undecided", text),))
        return replace(release, wheels=(replace(own, proof=proof),))

    with world.changing() as transaction:
        transaction.put(file, data)
    world.publish(name, [ours], channel="candidate", change=change, state=lambda state: replace(state, missing=("G8",)))


def _run(number: int, conclusion: str | None, **jobs: str | None) -> dict[str, Any]:
    """Return a run as GitHub lists it."""
    return {
        "id": number, "run_number": number, "display_title": HOSTILE, "html_url": "https://ci.example/runs/1", "conclusion": conclusion,
        "created_at": f"2026-11-{number:02}T05:00:00Z", "head_sha": "a" * 40,
        "jobs": [{"name": name, "conclusion": state} for name, state in jobs.items()],
    }  # fmt: skip


@pytest.fixture(name="story", scope="module")
def _story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an index and reports of drift, in which some strings are hostile."""
    folder = tmp_path_factory.mktemp("story")
    world = World(folder)
    text = "not \N{RIGHT-TO-LEFT OVERRIDE}decided <b>"
    for seed in (1, 2, 3):
        _publish(world, f"2026.11.{seed}", seed, foreign=seed == 3, text=text)
    world.publish("2026.11.4", [wheel("vllm", "0.33.1")])
    world.yank("2026.11.2", "wrong answers <script>")
    patch = next((ROOT / "forks" / "2026.11" / "vllm").glob("*.patch"))
    sha256 = sha256_bytes(patch.read_bytes())
    drift = Drift("vllm", "2026.11", "2026-11-20", ("0.34.0",), (Trial(patch.name, sha256, "0.34.0", "conflict", (1, 9), (), ("hunk 1 of 2",)),))
    (folder / "drift.json").write_bytes(msgspec.json.encode({"drift": [{"of": drift}]}))
    (folder / "broken.json").write_text("{")
    return folder


@pytest.fixture(autouse=True)
def _runs(github: githubwork.World) -> None:
    """Let GitHub have runs of the pipeline that ended in every way, and one that goes on."""
    github.runs += [
        _run(6, "neutral", build="success"),
        _run(5, "startup_failure"),
        _run(4, None, build="success", gate="failure", page=None),
        _run(3, "success", build="success", gate="skipped"),
        _run(2, "cancelled"),
        _run(1, "failure", build="success", gate="timed_out", publish="skipped"),
    ]


def _status(output: Path, *words: str) -> str:
    """Write the page to *output*, and return it."""
    options = ("--root", str(ROOT), "--cache-dir", str(output.parent / "cache"))
    assert main.run(["lab", "status", *options, "--output", str(output), *words]) == 0
    return (output / "index.html").read_text("utf-8")


def _everything(story: Path, github: githubwork.World) -> tuple[str, ...]:
    root = (story / "index" / "metadata" / "1.root.json").read_bytes()
    return (
        "--index", str(story / "index"), "--trust", sha256_bytes(root), "--runs", githubwork.REPOSITORY,
        "--mirror", f"{ADDRESS}={github.url}", "--drift", str(story / "drift.json"), "--drift", str(story / "broken.json"),
    )  # fmt: skip


def test_the_page_shows_releases_speeds_patches_and_runs(
    story: Path, github: githubwork.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever text is hostile stays text; a run is as good as its worst job, also if that is its 101st."""
    github.runs.insert(0, _run(7, "success", **dict.fromkeys(map("part-{}".format, range(100)), "success"), late="failure"))
    source = _status(tmp_path / "site", *_everything(story, github))
    shown = re.sub(r"\s+", " ", re.sub("<[^>]*>", "", source))
    assert re.findall(r"(\S+): file-invalid", capsys.readouterr().err) == ["2026.11.3", "broken.json"]
    for text in (
        "yanked: wrong answers &lt;script&gt;", "✗ late failure", "? G8", "qwen3-next-80b-nvfp4", "2026.11.2 ", "conflicts on 0.34.0",
        "✓ build ✗ gate failure? page not over", "✓ build – gate skipped", "! invalidnone began", "? inconclusive✓ build", "✗ failnone began", "– not-run✓ build", "✗ gate timed_out– publish skipped",
    ):  # fmt: skip
        assert text in shown
    # Watched by the ledger, and carried by no stack.
    assert re.search(r"flashinfer #2520Support NVFP4 KV cache decode on SM120 ?merged ?2026-11-21 ?watched", shown)
    assert "/broken.json" not in shown
    assert not re.search(r"<(script|img)|<[^>]* on\w+=", source)
    own = ("#", "../releases/", "../index.html", "https://ci.example/", "https://github.com/")
    assert all(link.startswith(own) for link in re.findall(r'href="([^"]*)', source))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", source)


def test_a_page_without_github_or_index_says_so(
    github: githubwork.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "ghs_expired")
    source = _status(tmp_path / "site", "--runs", githubwork.REPOSITORY, "--mirror", f"{ADDRESS}={github.url}")
    assert "No index was named" in source
    assert "<strong>pipeline.yml</strong>: <code>github-refused</code>" in source


@pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed")
def test_pages_fit_a_desk_and_a_telephone_and_load_nothing(
    story: Path, github: githubwork.World, tmp_path: Path
) -> None:
    folder = tmp_path / "site"
    _status(folder, *_everything(story, github))
    cell = "1024/1024 c1"
    report = output.render((bench(cell), bench(cell, quantization="AWQ"), gate(cell)))
    (folder / "report.html").write_text(report)

    assert chromium.faults_of_pages(folder, ("index.html", "report.html"), (1400, 390)) == []
