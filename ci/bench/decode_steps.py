"""
Print the seconds of a decode step of vLLM, and the copy bandwidth of the GPU, as JSON.

    decode_steps.py FOLDER OPTIONS COUNT ...    the model, vLLM's options as JSON, and numbers of requests; run by predict.py in the environment of a wheel
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams

#: Tokens of the prompts, and of the two lengths of answer whose difference is timed.
PROMPT, SHORT, LONG = 512, 32, 288
REPEATS = 3


def copy_bandwidth() -> float:
    """Return 10^9 bytes a second that a copy of 1 GiB reads and writes, the fastest of ten."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    del source, target
    torch.cuda.empty_cache()
    return 2 * (1 << 30) / min(seconds) / 1e9


def main() -> None:
    """Measure the model that the command line names."""
    folder, options, counts = sys.argv[1], json.loads(sys.argv[2]), [int(word) for word in sys.argv[3:]]
    bandwidth, device = copy_bandwidth(), torch.cuda.get_device_name()
    model = LLM(model=folder, max_model_len=PROMPT + LONG + 16, max_num_seqs=max(counts), gpu_memory_utilization=0.6, enable_prefix_caching=False, **options)
    steps = {}
    for count in counts:
        prompts: list[Any] = [{"prompt_token_ids": [(index * 37 + place * 11) % 1000 + 5 for place in range(PROMPT)]} for index in range(count)]
        seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
        for _ in range(REPEATS + 1):  # the first compiles
            for length, values in seconds.items():
                began = time.perf_counter()
                model.generate(prompts, SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True, temperature=0.0), use_tqdm=False)
                values.append(time.perf_counter() - began)
        steps[count] = (min(seconds[LONG][1:]) - min(seconds[SHORT][1:])) / (LONG - SHORT)
    sys.stdout.write("\n" + json.dumps({"bandwidth": bandwidth, "steps": steps, "device": device}) + "\n")


if __name__ == "__main__":
    main()
