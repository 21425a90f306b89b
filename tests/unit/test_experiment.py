"""Experiments on real launches of servers with known times, and each reason for which a measurement does not count."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import refserved
from tests.support.fake_openai_server import Behaviour, Fault
from tests.support.thread_load import ThreadLoad

from sparkwright.bench import results
from sparkwright.bench.load.vllm_bench import LoadResult, LoadSpec, Request
from sparkwright.bench.recipes import preflight
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.results import Result
from sparkwright.cli import main, options
from sparkwright.forks.context import RunContext
from sparkwright.gates import throughput
from sparkwright.gates.core import policy
from sparkwright.gates.core.server_under_test import GateOptions
from sparkwright.gates.throughput import Experiment
from sparkwright.gates.throughput_run import (
    CounterChange,
    MeasurementJournal,
    counter_change,
    invalid_reasons,
)

CELLS = ("8/16 c1",)


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose gates do not mind a busy machine, nor what memory and checkpoint are."""
    monkeypatch.setattr(preflight, "check", lambda *_, **__: ())
    monkeypatch.setattr(preflight, "both_fit", lambda *_: True)
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return refserved.project(tmp_path / "project", min_blocks=1, max_blocks=1)


def context(place: Path) -> RunContext:
    words = ["--root", str(place), "--cache-dir", str(place.parent / "cache"), "--output", str(place.parent / "out")]
    return options.checkout(main.parse(["bench", *words]))


def environment(place: Path, name: str, faults: dict[Fault, int] | None = None) -> Path:
    return refserved.environment(place.parent / name, Behaviour(faults=faults or {}))


def question(place: Path, python: Path | None = None, **changes: object) -> GateOptions:
    python, base = python or environment(place, "candidate"), environment(place, "base")
    return replace(GateOptions(python=python, baseline_python=base, serve=place.parent / "toy", recipe="toy-cpu", workload=CELLS), **changes)


def answered(place: Path, asked: GateOptions) -> Result:
    return Experiment(context(place), asked, policy.load(place), recipes.load(place, asked.recipe), ThreadLoad()).result()


@pytest.mark.parametrize(
    ("faults", "variables", "state", "reference"),
    [
        ({"dies": 2}, {}, "fail", "candidate-crashed"),
        ({"prefix-hits": 2}, {}, "invalid", "prefix-cached"),
        ({}, {"REFERENCE": "starts-never"}, "invalid", "server-died"),
    ],
    ids=["dies", "prefix-hits", "starts-never"],
)
def test_a_candidate_that_is_wrong_never_passes(
    place: Path, faults: dict[Fault, int], variables: dict[str, str], state: str, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash under load fails the gate; wrong answers, and a server that does not start, make it invalid."""
    monkeypatch.setattr(Experiment, "_contract", lambda *_: ())
    candidate = environment(place, "wrong", faults)
    result = answered(place, question(place, candidate, variable=tuple(variables.items())))
    stopped = throughput.checks(result)[0]
    assert (stopped.name, stopped.state, stopped.reason) == ("measured", state, reference)


def test_a_recipe_counts_only_as_it_is_served_and_profiled(place: Path) -> None:
    """
    A launch of which there is no profile does not count, as nothing shows its kernels, not even a
    baseline's, which may have others; flags that the recipe does not have are recorded, and then
    nothing is shown for the recipe.
    """
    result = answered(place, question(place, flag=("--seed=7",)))
    states = {check.name: (check.state, check.reason) for check in throughput.checks(result)}
    assert (states["measured"], states["flags"]) == (("invalid", "profile-missing"), ("invalid", "flags-added")), result.says
    assert result.baseline
    assert "--seed=7" in result.baseline.flags
    assert result.candidate.variables["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_only_the_same_experiment_is_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill the measurements of the same wheels, flags, workloads and policies count, and no others; a result can be read again."""
    monkeypatch.setattr(Experiment, "_contract", lambda *_: ())
    asked = question(place)
    with patch.object(MeasurementJournal, "end", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        answered(place, asked)
    journals = place.parent / "cache" / "logs" / "throughput"
    assert len(list(journals.glob("*.jsonl"))) == 1
    now = time.time()
    again, other = answered(place, asked), answered(place, replace(asked, flag=("--seed=7",)))
    assert again.began < now < other.began
    assert len(again.legs) == 2 * 4
    assert results.read(throughput.write_result(context(place).store, place, again)) == again
    refserved.edit(place / "ci" / "gates" / "throughput.yaml", warmups=3)
    assert answered(place, asked).began > now


@pytest.mark.parametrize(
    "words",
    [
        [], ["--serve", "m"], ["--serve", "m", "--python", "p", "--server", "http://127.0.0.1:1"],
        ["--server", "http://127.0.0.1:1", "--workload", "sharegpt"],
    ],
)  # fmt: skip
def test_bench_serves_a_model_or_asks_a_server(words: list[str]) -> None:
    """Neither, both, a model without an environment, and texts without their file are refused."""
    arguments = main.parse(["bench", *words])
    with refusal("usage"):
        arguments.run(arguments)


def test_cell_of_real_prompts_without_their_file_is_refused_and_a_file_that_no_cell_reads(place: Path) -> None:
    with refusal("usage", match="file of prompts"):
        answered(place, question(place, workload=("sharegpt",)))
    with refusal("usage", match="not with the file of --texts"):
        answered(place, question(place, texts=place / "prompts.jsonl"))


# One measurement.

ORDER = LoadSpec("u", "m", 16, 24, 2, 2)
SOUND = Request(0.0, 0.1, 0.5, 16, 24)
LUMP, FEWER = replace(SOUND, ttft=0.49999), replace(SOUND, output_tokens=13)
COUNTS = CounterChange(4, 96)


@pytest.mark.parametrize(
    ("requests", "found", "expected"),
    [
        ((SOUND, SOUND), COUNTS, []),
        ((SOUND, replace(SOUND, error="429")), COUNTS, ["request-failed"]),
        (
            (SOUND, replace(SOUND, output_tokens=23)),
            replace(COUNTS, tokens=95),
            ["answer-other", "usage-mismatch"],
        ),
        ((SOUND, replace(SOUND, prompt_tokens=17)), COUNTS, ["prompt-other"]),
        ((SOUND, replace(SOUND, ttft=0.6)), COUNTS, ["times-impossible"]),
        ((SOUND, replace(SOUND, ttft=0.0)), COUNTS, ["times-impossible"]),
        ((SOUND, SOUND), None, ["counters-missing"]),
        ((SOUND, SOUND), replace(COUNTS, tokens=97), ["usage-mismatch"]),
        (
            (SOUND, SOUND),
            replace(COUNTS, finished=1, tokens=24),
            ["usage-mismatch"],
        ),
        ((SOUND, SOUND), replace(COUNTS, hits=0.01), ["prefix-cached"]),
        ((SOUND, SOUND), replace(COUNTS, hits=0.0099), []),
        # The server counts every token, but they came at once or in fewer pieces: no time is believed, and no wheel is blamed.
        ((SOUND, LUMP), COUNTS, ["stream-merged"]),
        ((SOUND, replace(SOUND, ttft=0.5)), COUNTS, ["stream-merged"]),
        ((SOUND, FEWER), COUNTS, ["stream-merged"]),
        ((SOUND, FEWER), replace(COUNTS, tokens=85), ["answer-other", "usage-mismatch"]),
        ((SOUND, replace(LUMP, error="it broke")), COUNTS, ["request-failed"]),
    ],
)
def test_every_reason_has_its_cause(
    requests: tuple[Request, ...], found: CounterChange | None, expected: list[str]
) -> None:
    """Each thing that is wrong is named by itself, and a sound leg by none; real prompts may have any length."""
    for order, faults in ((ORDER, expected), (replace(ORDER, prompt_file=Path("x")), [each for each in expected if each != "prompt-other"])):
        reasons = invalid_reasons(order, LoadResult("g", 1.0, requests), found, 0.01)
        assert [reason.reference for reason in reasons] == faults


def test_counters_are_differences() -> None:
    """A server that began anew in the middle of a leg has no counters for it; speculation is metered apart, by the server's counters."""
    first = {"vllm:generation_tokens_total": 24.0, "vllm:request_success_total": 1.0}
    second = {name: 3 * value for name, value in first.items()}
    assert counter_change(first, second) == CounterChange(2, 48)
    assert counter_change(second, first) is counter_change({}, {}) is None
    drafts = {"vllm:spec_decode_num_drafts_total": 10.0, "vllm:spec_decode_num_accepted_tokens_total": 20.0}
    assert counter_change(first, {**second, **drafts}) == CounterChange(2, 48, drafts=3)
