"""How a load went over time: tokens per second, and requests in flight."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from sparkwright.bench.load.vllm_bench import LoadResult

#: Parts of the time of a load, an even number.
PARTS = 40


class LoadCurve(msgspec.Struct, frozen=True):
    """
    A load in equal parts of its time.

    Attributes:
        seconds: Of the whole load.
        tokens: Output tokens per second of all requests together, in each part. Those between the
            first and the last of a request are spread evenly.
        requests: Requests in flight, on average over each part.
    """

    seconds: float
    tokens: tuple[float, ...]
    requests: tuple[float, ...]


def load_curve(run: LoadResult, parts: int = PARTS) -> LoadCurve | None:
    """Return how *run* went in that many parts; None if its times are implausible."""
    whole = [request for request in run.requests if not request.error]
    if not whole or not 1e-6 < run.seconds < 1e9:
        return None
    columns = [
        (request.start, request.ttft, request.latency, request.output_tokens) for request in whole
    ]
    start, ttft, latency, count = np.array(columns, float).T
    with np.errstate(all="ignore"):
        after_first = np.maximum(latency - ttft, 1e-9)
        tokens, busy = [], []
        for edge in np.linspace(0.0, run.seconds, parts + 1):
            since = edge - start
            more = (count - 1) * np.clip((since - ttft) / after_first, 0.0, 1.0)
            tokens.append(float(np.sum(np.where((since >= ttft) & (count > 0), 1 + more, 0.0))))
            busy.append(float(np.sum(np.clip(since, 0.0, latency))))
        rates, requests = (
            tuple((np.diff(total) * (parts / run.seconds)).tolist()) for total in (tokens, busy)
        )
    if not all(math.isfinite(value) and value >= 0 for value in (*rates, *requests)):
        return None
    return LoadCurve(run.seconds, rates, requests)
