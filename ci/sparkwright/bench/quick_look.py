"""A quick look at the speed of a server: several short runs within two minutes, and no gate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.bench.records import COUNTED, FIGURES
from sparkwright.bench.results import LoadFigure, load_figure
from sparkwright.core.console import console

#: Seconds from the ready server to the result, and of one run.
BUDGET_S, RUN_S = 110.0, 10.0
#: Fewest runs of a result, and runs after which more would narrow the interval little.
MIN_RUNS, MAX_RUNS = 2, 8
#: Output tokens of the trial, and the minimum of a run.
TRIAL_TOKENS = 16
#: Requests of a run in multiples of the concurrency, at most, and of a run at a rate.
MAX_ROUNDS, MAX_REQUESTS = 8, 512
#: Share of the ordered rate below which the server does not keep up, and requests of all runs
#: together from which on that can be told.
SUSTAINED, MIN_REQUESTS = 0.9, 10


class QuickLook(msgspec.Struct, frozen=True):
    """
    The result of a quick look.

    Attributes:
        output_tokens: Of each answer, which may be shorter than those of the workload.
        requests: Of a run. *runs*: their count. *seconds*: that all took.
        generator: Name and version.
        warnings: Why the figures may be worse than the server's; a busy machine, for example.
    """

    output_tokens: int
    requests: int
    runs: int
    seconds: float
    generator: str
    figures: tuple[LoadFigure, ...]
    warnings: tuple[str, ...]
    disclaimer: str = (
        "A quick look, not a gate: one launch, nothing compared. The interval covers the runs, and "
        "not what differs between launches."
    )


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
            raise LoadError(
                "generator-failed",
                f"{len(errors)} of {len(result.requests)} requests failed: {errors[0]}",
            )
        return result

    with console.progress("quick look", MAX_RUNS) as line:
        tokens = min(TRIAL_TOKENS, spec.output_tokens)
        order = replace(spec, request_rate=None, requests=spec.concurrency, warmups=1)
        trial = run(replace(order, output_tokens=tokens))
        affordable = int((RUN_S - trial.ttft) / max(trial.tpot, 1e-9))
        tokens = max(tokens, min(spec.output_tokens, affordable))
        request_s = trial.ttft + (tokens - 1) * trial.tpot
        rounds = max(1, min(MAX_ROUNDS, round(RUN_S / max(request_s, 0.001))))
        requests = rounds * spec.concurrency
        if spec.request_rate:
            requests = max(1, min(MAX_REQUESTS, round(RUN_S * spec.request_rate)))
        spec = replace(spec, output_tokens=tokens, requests=requests, warmups=0)
        results: list[LoadResult] = []
        while len(results) < MAX_RUNS:
            line.update(len(results), f"{spec.requests} requests a run")
            try:
                results.append(run(replace(spec, seed=spec.seed + 1 + len(results))))
            except LoadError as error:
                if error.reason != "generator-late" or len(results) < MIN_RUNS:
                    raise
                break
    answered = answered_rate(results)
    if spec.request_rate and answered and answered < SUSTAINED * spec.request_rate:
        rates = f"it answers {answered:.3g} of {spec.request_rate:g} requests per second"
        warnings = [*warnings, f"The server does not keep up: {rates}."]
    figures = []
    for name in FIGURES:
        if name not in COUNTED:
            figures.append(load_figure(name, [getattr(result, name) for result in results]))
    return QuickLook(
        spec.output_tokens, spec.requests, len(results), time.monotonic() - start,
        generator.name, tuple(figures), tuple(warnings),
    )  # fmt: skip


def answered_rate(results: Sequence[LoadResult]) -> float | None:
    """
    Return the requests per second that are answered while requests arrive, over all *results*.

    That is the rate at which they are sent, over the seconds by which the end of an answer is later
    for a request that is sent a second later. The time of the last answers does not count, so a
    server that keeps up has its rate in a short run, too. None for too few requests.
    """
    requests = [request for result in results for request in result.requests]
    seconds = sum(max(request.start for request in result.requests) for result in results)
    starts = [request.start for request in requests]
    if len(requests) < MIN_REQUESTS or not seconds:
        return None
    ends = [request.start + request.latency for request in requests]
    slope = statistics.linear_regression(starts, ends).slope
    return (len(requests) - len(results)) / seconds / max(1.0, slope)
