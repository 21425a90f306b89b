"""
Run vLLM's own tuner of experts on one GPU, in the environment of vLLM and without Ray.

    tuner_driver.py TUNER FOLDER ROUNDS MOST [ARGUMENT ...]

*TUNER* is ``benchmarks/kernels/benchmark_moe.py`` of the release. It spreads batches over GPUs as
calls of Ray's actors; for one GPU the stand-in below makes these calls here and now. Of the tuner
only its command line and that use of Ray are relied on: its functions differ from release to
release. *FOLDER* receives the tuner's file, and ``latencies.json``: for each batch the latencies in
microseconds without and with that file, *ROUNDS* times in turn. Of the tuner's configurations
*MOST* are tried, drawn with a fixed seed; 0 tries all.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

#: Module of vLLM that reads the files, and keeps what it read.
READER = "vllm.model_executor.layers.fused_moe.fused_moe"
FOLDER = "VLLM_TUNED_CONFIG_FOLDER"


class Actor:
    """A worker whose methods are called as Ray's are; *results* receives them by batch size."""

    def __init__(self, worker: object, results: dict[int, Any]) -> None:
        self._worker, self._results = worker, results

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(tokens: int, *arguments: Any) -> Any:
            self._results[tokens] = getattr(self._worker, name)(tokens, *arguments)
            return self._results[tokens]

        return SimpleNamespace(remote=remote)


def install_ray(results: dict[int, Any], most: int) -> None:
    """Make ``import ray`` give the stand-in."""

    def decorate(**_: Any) -> Callable[[Any], Any]:
        return lambda worker: SimpleNamespace(
            remote=lambda *arguments: Actor(worker(*arguments), results)
        )

    def draw(space: Sequence[Any], **_: Any) -> Sequence[Any]:
        few = 0 < most < len(space)
        return random.Random(0).sample(space, most) if few else space  # noqa: S311

    # What vLLM asks of a library before it imports it.
    specs = {"__spec__": ModuleSpec("ray", None)}
    ray = SimpleNamespace(
        **specs,
        remote=decorate,
        init=lambda **_: None,
        available_resources=lambda: {"GPU": 1},
        get_gpu_ids=lambda: [0],
        get=lambda outputs: outputs,
    )
    stand_ins = {
        "ray": ray,
        "ray.experimental": SimpleNamespace(**specs),
        "ray.experimental.tqdm_ray": SimpleNamespace(**specs, tqdm=draw),
    }
    sys.modules.update(cast("dict[str, ModuleType]", stand_ins))


def main() -> None:
    """Tune, and measure without and with the file."""
    tuner, folder, rounds, most = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    arguments = sys.argv[5:]
    # First what looks for the real Ray.
    reader = importlib.import_module(READER)
    results: dict[int, Any] = {}
    install_ray(results, most)
    latencies: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def run(*further: str) -> None:
        results.clear()
        reader.get_moe_configs.cache_clear()
        sys.argv = [tuner, *arguments, *further]
        runpy.run_path(tuner, run_name="__main__")

    run("--tune", "--save-dir", str(folder))
    for _ in range(rounds):
        for index in (0, 1):
            os.environ.pop(FOLDER, None)
            if index:
                os.environ[FOLDER] = str(folder)
            run()
            for tokens, (_, microseconds) in results.items():
                latencies[tokens][index].append(microseconds)
    (folder / "latencies.json").write_text(json.dumps(latencies))


if __name__ == "__main__":
    main()
