"""A quick look at the speed of a server: several short runs within two minutes, and no gate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.bench.statistics.intervals import mean_interval
from sparkwright.core.console import console

#: Seconds from the ready server to the result, and of one run.
BUDGET_S, RUN_S = 110.0, 10.0
#: Runs for an interval, and runs after which more would narrow it little.
MIN_RUNS, MAX_RUNS = 2, 8
#: Output tokens of the trial, and the minimum of a run.
TRIAL_TOKENS = 16
#: Requests of a run in multiples of the concurrency, at most.
MAX_ROUNDS = 8

DISCLAIMER = (
    "A quick look, not a gate: one launch, nothing compared. The interval covers the runs, and not "
    "what differs between launches."
)


class QuickFigure(msgspec.Struct, frozen=True):
    """A figure: mean over the runs, and its 95 % t-interval."""

    name: str
    unit: str
    mean: float
    low: float
    high: float


class QuickLook(msgspec.Struct, frozen=True):
    """
    The result of a quick look.

    Attributes:
        prompt_tokens, output_tokens, concurrency, requests: Load of a run, as in `LoadSpec`. The
            answers may be shorter than those of the workload.
        generator: Name and version. *runs*: their count.
        seconds: Seconds that it took.
        warnings: Why the figures may be worse than the server's; a busy machine, for example.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    generator: str
    runs: int
    seconds: float
    figures: tuple[QuickFigure, ...]
    warnings: tuple[str, ...]
    disclaimer: str = DISCLAIMER


def quick_look(
    generator: LoadGenerator,
    spec: LoadSpec,
    warnings: Sequence[str] = (),
    budget_s: float = BUDGET_S,
) -> QuickLook:
    """
    Measure the server at ``spec.url``, which is ready, for at most *budget_s* seconds.

    Args:
        spec: Load of the workload's cell. Requests and output tokens follow from the time.

    Raises:
        LoadError: A request fails, or fewer than two runs are possible in the time.
    """
    start = time.monotonic()

    def run(run_spec: LoadSpec) -> LoadResult:
        left = budget_s - (time.monotonic() - start)
        result = generator.measure(replace(run_spec, timeout_s=max(left, 1.0)))
        if errors := [request.error for request in result.requests if request.error]:
            message = f"{len(errors)} of {len(result.requests)} requests failed: {errors[0]}"
            raise LoadError("generator-failed", message)
        return result

    with console.progress("quick look", MAX_RUNS) as line:
        trial_tokens = min(TRIAL_TOKENS, spec.output_tokens)
        trial = run(replace(spec, output_tokens=trial_tokens, requests=spec.concurrency, warmups=1))
        tokens = spec.output_tokens
        if trial.tpot > 0:
            affordable = int((RUN_S - trial.ttft) / trial.tpot)
            tokens = max(trial_tokens, min(tokens, affordable))
        request_s = trial.ttft + (tokens - 1) * trial.tpot
        rounds = max(1, min(MAX_ROUNDS, round(RUN_S / max(request_s, 0.001))))
        spec = replace(spec, output_tokens=tokens, requests=rounds * spec.concurrency, warmups=0)
        results: list[LoadResult] = []
        longest = 0.0
        while len(results) < MAX_RUNS:
            began = time.monotonic()
            if len(results) >= MIN_RUNS and began - start + longest > budget_s:
                break
            line.update(len(results), f"{rounds * spec.concurrency} requests a run")
            results.append(run(replace(spec, seed=spec.seed + 1 + len(results))))
            longest = max(longest, time.monotonic() - began)
    series = {
        ("time per token", "ms"): [1000 * result.tpot for result in results],
        ("time to first token", "ms"): [1000 * result.ttft for result in results],
        ("gap between events, p99", "ms"): [1000 * result.itl_p99 for result in results],
        ("output throughput", "tok/s"): [result.rate for result in results],
        ("requests", "1/s"): [len(result.requests) / result.seconds for result in results],
    }
    figures = tuple(
        QuickFigure(name, unit, statistics.fmean(values), *mean_interval(values))
        for (name, unit), values in series.items()
    )
    seconds = time.monotonic() - start
    return QuickLook(
        spec.prompt_tokens,
        spec.output_tokens,
        spec.concurrency,
        spec.requests,
        generator.name,
        len(results),
        seconds,
        figures,
        tuple(warnings),
    )
