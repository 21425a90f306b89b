"""A load generator for tests that need no true times, of servers whose answers end: a thread for each request of a closed loop."""

from __future__ import annotations

import itertools
import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from sparkwright.bench.load.vllm_bench import LoadResult, LoadSpec, Request, percentile


class ThreadLoad:
    """Makes load as `LoadSpec` orders it, with random tokens below 256."""

    name = "thread load of the tests"

    def measure(self, spec: LoadSpec) -> LoadResult:
        """Return the result."""
        drawn, deadline = random.Random(spec.seed), time.monotonic() + spec.timeout_s
        prompts = [drawn.choices(range(3, 256), k=spec.prompt_tokens) for _ in range(spec.warmups + spec.requests)]
        for prompt in prompts[: spec.warmups]:
            _request(spec, prompt, 0.0, deadline)
        zero = time.monotonic()
        with ThreadPoolExecutor(spec.concurrency) as pool:
            answers = list(pool.map(lambda prompt: _request(spec, prompt, zero, deadline), prompts[spec.warmups :]))
        requests = tuple(sorted((answer for answer, _ in answers), key=lambda one: one.start))
        gaps = [gap for _, some in answers for gap in some]
        seconds = max(one.start + one.latency for one in requests)
        return LoadResult(self.name, seconds, requests, percentile(gaps, 50), percentile(gaps, 90))


def _request(spec: LoadSpec, prompt: list[int], zero: float, deadline: float) -> tuple[Request, list[float]]:
    body = {
        "model": spec.model, "prompt": prompt, "max_tokens": spec.output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    post = urllib.request.Request(f"{spec.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    start, times, error, usage = time.monotonic(), list[float](), "", {"prompt_tokens": len(prompt), "completion_tokens": 0}
    try:
        with urllib.request.urlopen(post, timeout=max(0.1, deadline - start)) as reply:
            for line in reply:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                times += [time.monotonic()] if event.get("choices") else []
                usage = event.get("usage") or usage
    except Exception as failure:  # a body that is cut off, too
        error = f"{type(failure).__name__}: {failure}"
    first, last = (times[0], times[-1]) if times else (start, start)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return Request(start - zero, first - start, last - start, usage["prompt_tokens"], usage["completion_tokens"], error), gaps
