"""
Write the seconds of a decode step of vLLM, the bytes of its model, and the copy bandwidth of the GPU (without one, of the processors), as JSON into a file.

    decode_steps.py OUT FOLDER OPTIONS COUNT ...    the file, the model, vLLM's options as JSON, and numbers of requests; run by predict.py in the environment of a wheel

Tokens are drawn at random, so that requests go on with different ones, which a router gives to different experts. A step with drafts yields as many tokens as are
accepted and one more.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

#: Tokens of the prompts, and of the two lengths of answer whose difference is timed.
PROMPT, SHORT, LONG = 512, 32, 160
REPEATS = 2
#: Tokens that the smallest vocabulary has, too.
TOKENS = range(5, 500)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def finish() -> None:
    """Wait until the GPU has done what it was asked for."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """Return 10^9 bytes a second that a copy of 1 GiB reads and writes, the fastest of ten."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        finish()
        began = time.perf_counter()
        target.copy_(source)
        finish()
        seconds.append(time.perf_counter() - began)
    del source, target
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return 2 * (1 << 30) / min(seconds) / 1e9


class Sizes:
    """What vLLM's worker gets beside its own methods."""

    def stored(self: Any) -> int:
        """Return the bytes of the model's weights."""
        return sum(weight.nbytes for weight in self.get_model().parameters())


def accepted(model: LLM) -> int:
    """Return how many drafts were accepted until now."""
    return sum(int(getattr(each, "value", 0)) for each in model.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens")


def main() -> None:
    """Measure the model that the command line names."""
    folder, options, counts = sys.argv[2], json.loads(sys.argv[3]), [int(word) for word in sys.argv[4:]]
    bandwidth, device = copy_bandwidth(), torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor()
    limits = {"max_model_len": PROMPT + LONG + 16, "max_num_seqs": max(counts), "gpu_memory_utilization": 0.9}
    model = LLM(model=folder, enable_prefix_caching=False, disable_log_stats=False, worker_extension_cls="decode_steps.Sizes", **limits, **options)
    steps, loaded = {}, model.collective_rpc("stored")[0]
    for count in counts:
        prompts: list[Any] = [{"prompt_token_ids": [TOKENS[(index * 37 + place * 11) % len(TOKENS)] for place in range(PROMPT)]} for index in range(count)]
        seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
        taken = dict.fromkeys(seconds, 0.0)
        for _ in range(REPEATS + 1):  # the first compiles
            for length, values in seconds.items():
                before, began = accepted(model), time.perf_counter()
                sampling = SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True, temperature=1.0, detokenize=False)
                model.generate(prompts, sampling, use_tqdm=False)
                values.append(time.perf_counter() - began)
                taken[length] = length - (accepted(model) - before) / count
        steps[count] = (min(seconds[LONG][1:]) - min(seconds[SHORT][1:])) / (taken[LONG] - taken[SHORT])
    Path(sys.argv[1]).write_text(json.dumps({"bandwidth": bandwidth, "steps": steps, "device": device, "loaded": loaded}), "utf-8")


if __name__ == "__main__":
    main()
