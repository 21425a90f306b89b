"""A look at the speed of a server in one launch: several runs of a cell, and no gate."""

import time

import msgspec
from msgspec.structs import replace

from sparkwright.bench.records import COUNTED, FIGURES
from sparkwright.bench.results import FIGURE_HEADS, LoadFigure, figure_texts, load_figure
from sparkwright.bench.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.core.console import console

#: Seconds for which `--rate` sends requests.
RUN_S = 10.0
#: The fewest and the most runs of a result; more would narrow its interval little.
MIN_RUNS, MAX_RUNS = 2, 8
#: The most requests of a run at a rate.
MAX_REQUESTS = 512


class QuickLook(msgspec.Struct, frozen=True):
    """
    The result of a look at a *cell*.

    Attributes:
        output_tokens: The tokens of each answer, which may be shorter than those of the workload.
        requests: The requests of one run. *runs*: how many runs there are.
        generator: Name and version.
        accepted_drafts: Tokens a step; None if the server does not draft.
    """

    cell: str
    output_tokens: int
    requests: int
    runs: int
    generator: str
    figures: tuple[LoadFigure, ...]
    accepted_drafts: float | None = None


def quick_look(generator: LoadGenerator, cell: str, spec: LoadSpec, budget_s: float) -> QuickLook:
    """
    Measure the server at ``spec.url``, which is ready, for at most *budget_s* seconds.

    Args:
        spec: The load of *cell*. A run has as many requests as are made at a time, or
            those of ten seconds at a rate.

    Raises:
        LoadError: A request fails, or fewer than two runs are possible in the time.
    """
    end, requests = time.monotonic() + budget_s, spec.concurrency
    if spec.request_rate:
        requests = max(1, min(MAX_REQUESTS, round(RUN_S * spec.request_rate)))
    spec = replace(spec, requests=requests, warmups=1)
    results: list[LoadResult] = []
    with console.progress(cell, MAX_RUNS) as line:
        for run in range(MAX_RUNS):
            line.update(run, f"{requests} requests a run")
            spec = replace(spec, seed=spec.seed + 1, timeout_s=max(end - time.monotonic(), 1.0))
            try:
                result = generator.measure(spec)
            except LoadError as error:
                if error.reason != "generator-late" or run < MIN_RUNS:
                    raise
                break
            if errors := [request.error for request in result.requests if request.error]:
                raise LoadError(
                    "generator-failed", f"{len(errors)} of {requests} requests failed: {errors[0]}"
                )
            results.append(result)
            spec = replace(spec, warmups=0)
    figures = []
    for name in FIGURES:
        if name not in COUNTED:
            figures.append(load_figure(name, [getattr(result, name) for result in results]))
    return QuickLook(
        cell, spec.output_tokens, requests, len(results), generator.name, tuple(figures)
    )


def show(look: QuickLook, title: str) -> None:
    """Print a *look* under the *title*."""
    console.table(title, FIGURE_HEADS, list(map(figure_texts, look.figures)), result=True)
    if look.accepted_drafts is not None:
        console.result(f"accepted drafts: {look.accepted_drafts:.2f} tokens a step, on real text")
