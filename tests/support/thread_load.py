"""A load generator for tests that need no true times, of servers whose answers end: a thread for each request of a closed loop."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.vllm_bench import LoadResult, LoadSpec, Request


class ThreadLoad:
    """Makes load as `LoadSpec` orders it, with random tokens below 256; the first token comes after half of the time."""

    name = "thread load of the tests"

    def measure(self, spec: LoadSpec) -> LoadResult:
        """Return the result."""
        draw, client = random.Random(spec.seed), Client(spec.url, spec.model, deadline=spec.timeout_s)
        prompts = [draw.choices(range(3, 256), k=spec.prompt_tokens) for _ in range(spec.warmups + spec.requests)]
        zero = time.monotonic()

        def answer(prompt: list[int]) -> Request:
            start, tokens, error = time.monotonic(), 0, ""
            try:
                tokens = len(client.complete(prompt, max_tokens=spec.output_tokens, ignore_eos=True).tokens)
            except ServerInvalid as failure:
                error = str(failure)
            latency = time.monotonic() - start
            return Request(start - zero, latency / 2, latency, len(prompt), tokens, error)

        with ThreadPoolExecutor(spec.concurrency) as pool:
            requests = tuple(pool.map(answer, prompts))[spec.warmups :]
        return LoadResult(self.name, max(time.monotonic() - zero, 1e-9), requests)
