"""
Write the seconds of a decode step of vLLM, and the copy bandwidth of the GPU (without one, of the processors), as JSON into a file.

    decode_steps.py OUT FOLDER OPTIONS COUNT ...    the file, the model, vLLM's options as JSON, and numbers of requests; run by predict.py in the environment of a wheel
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
PROMPT, SHORT, LONG = 512, 32, 288
REPEATS = 3
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


def main() -> None:
    """Measure the model that the command line names."""
    folder, options, counts = sys.argv[2], json.loads(sys.argv[3]), [int(word) for word in sys.argv[4:]]
    bandwidth, device = copy_bandwidth(), torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor()
    model = LLM(model=folder, max_model_len=PROMPT + LONG + 16, max_num_seqs=max(counts), gpu_memory_utilization=0.6, enable_prefix_caching=False, **options)
    steps = {}
    for count in counts:
        prompts: list[Any] = [{"prompt_token_ids": [TOKENS[(index * 37 + place * 11) % len(TOKENS)] for place in range(PROMPT)]} for index in range(count)]
        seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
        for _ in range(REPEATS + 1):  # the first compiles
            for length, values in seconds.items():
                began = time.perf_counter()
                model.generate(prompts, SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True, temperature=0.0), use_tqdm=False)
                values.append(time.perf_counter() - began)
        steps[count] = (min(seconds[LONG][1:]) - min(seconds[SHORT][1:])) / (LONG - SHORT)
    Path(sys.argv[1]).write_text(json.dumps({"bandwidth": bandwidth, "steps": steps, "device": device}), "utf-8")


if __name__ == "__main__":
    main()
