"""
The tuner of vLLM's Triton kernels for experts, which writes the file with their tile sizes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.builder.moe_configs import BatchLatency, TuningError
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.files import read_json
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError

#: The tuner in vLLM's source tree; the wheel lacks it.
TUNER = "benchmarks/kernels/benchmark_moe.py"
DRIVER = Path(__file__).with_name("tuner_driver.py")
#: How often each latency is measured.
ROUNDS = 3


def tune(
    python: Path,
    tuner: bytes,
    model: Path,
    expected: str,
    dtype: str,
    log: Path,
    *,
    shards: int = 1,
    batches: Sequence[int] = (),
    most: int = 0,
) -> tuple[bytes, tuple[BatchLatency, ...]]:
    """
    Run vLLM's *tuner* in the environment of *python* for the config of *model*.

    Args:
        expected, dtype: As of `modules.tuned_file`, for one of *shards* GPUs.
        batches: Numbers of tokens; empty for the tuner's own.
        most: Configurations to try for each; 0 for all, which takes hours.

    Returns:
        The content of the file, and the latencies without and with it.

    Raises:
        command-failed: The tuner ended with an error.
        tuning-failed: It did not write the file that vLLM would read.
    """
    with tempfile.TemporaryDirectory(prefix="sparkwright-") as temporary:
        folder = Path(temporary)
        script = folder / Path(TUNER).name
        script.write_bytes(tuner)
        arguments = [
            f"--model={model.resolve()}", f"--tp-size={shards}", f"--dtype={dtype or 'auto'}",
            *(["--batch-size", *map(str, batches)] if batches else []),
        ]  # fmt: skip
        numbers = (str(ROUNDS), str(most))
        command = [str(python.absolute()), "-P", str(DRIVER), str(script), temporary, *numbers]
        variables = LaunchPlan(python, model).environment()
        with console.step("tune"):
            process.run([*command, *arguments], log=log, env=variables)
        written = sorted(folder.glob("E=*.json"))
        if [path.name for path in written] != [expected]:
            what = "The tuner wrote another file than this release would read here."
            details = [f"expected: {expected}", *(f"written: {path.name}" for path in written)]
            raise TuningError("tuning-failed", what, details=[*details, f"full log: {log}"])
        kind = dict[int, tuple[tuple[float, ...], tuple[float, ...]]]
        latencies = read_json(folder / "latencies.json", kind)
        rows = tuple(BatchLatency(tokens, *both) for tokens, both in sorted(latencies.items()))
        return written[0].read_bytes(), rows


def locked_tuner(context: RunContext) -> bytes:
    """
    Return the tuner of the stack's vLLM, whose source is fetched if the store lacks it.

    Raises:
        not-provided: The source has none.
        offline, source-unreachable: As `fetch.fetch`.
    """
    content = context.objects.blob(fetch.fetch(context, "vllm").tree, TUNER)
    if content is None:
        raise SourceError("not-provided", f"The source of vLLM has no {TUNER}.")
    return content
