"""
Tuned configurations of experts: which file a checkpoint needs, whether it is there, and the tuner.

vLLM's Triton kernels for experts read tile sizes from a file that is named after the shape of a
layer and the device (`get_config_file_name`, the same in 0.20.1, 0.23.0 and 0.33.0).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.bench.model.checkpoint import Checkpoint
from sparkwright.bench.model.modules import expert_shape
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.builder.moe_configs import BatchLatency, TuningError
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.files import read_json
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext

#: The tuner in vLLM's source tree; the wheel lacks it.
TUNER = "benchmarks/kernels/benchmark_moe.py"
DRIVER = Path(__file__).with_name("tuner_driver.py")
#: How often each latency is measured.
ROUNDS = 3
#: Format of the experts → its name in the files, and in the tuner's ``--dtype`` (else ``auto``).
DTYPES = {"BF16": "", "F16": "", "FP8": "fp8_w8a8", "INT4": "int4_w4a16"}


class ExpertLayer(msgspec.Struct, frozen=True):
    """
    A layer of experts, as one GPU computes it.

    Attributes:
        experts: Their number.
        size: Of the intermediate vector, on this GPU.
        dtype: A value of `DTYPES`.
        block: Rows and columns of a weight with one scale; empty without blocks.
    """

    experts: int
    size: int
    dtype: str
    block: tuple[int, ...]

    def filename(self, device: str) -> str:
        """Return the name of the file for the *device* (`device_name`)."""
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = f",block_shape=[{','.join(map(str, self.block))}]" if self.block else ""
        return f"E={self.experts},N={self.size},device_name={device}{dtype}{block}.json"


def device_name(gpu: str) -> str:
    """Return the name by which files name the *gpu*, of which the driver has another."""
    name = gpu.replace(" ", "_")
    return "NVIDIA_H200" if "H200" in name.split("_") else name


def layer(checkpoint: Checkpoint, shards: int = 1, *, whole: bool = False) -> ExpertLayer:
    """
    Return the layer of experts of *checkpoint*.

    Args:
        shards: GPUs that share each expert, or, if *whole*, the experts.

    Raises:
        tuning-unavailable: It has no experts, or no tuner knows their format.
        checkpoint-invalid: Its config is impossible.
    """
    shape = expert_shape(checkpoint)
    formats = {scheme.partition(" ")[0] for scheme in shape.schemes}
    name = next(iter(formats), "")
    if not shape.experts or not shape.size or len(formats) != 1 or name not in DTYPES:
        what = f"Nothing is to be tuned for {checkpoint.config.get('model_type')!s:.60}."
        details = [f"{shape.experts} experts, stored as {', '.join(shape.schemes) or 'nothing'}"]
        raise TuningError("tuning-unavailable", what, details=details)
    experts, size = (shape.experts // shards, shape.size) if whole else (
        shape.experts, shape.size // shards
    )  # fmt: skip
    return ExpertLayer(experts, size, DTYPES[name], shape.block if name == "FP8" else ())


def tune(
    python: Path,
    tuner: bytes,
    model: Path,
    layer: ExpertLayer,
    device: str,
    log: Path,
    *,
    shards: int = 1,
    batches: Sequence[int] = (),
    most: int = 0,
) -> tuple[str, bytes, tuple[BatchLatency, ...]]:
    """
    Run vLLM's *tuner* in the environment of *python* for the config of *model*.

    Args:
        layer: The model's, for one of *shards* GPUs; *device*: the name of the GPU in files.
        batches: Numbers of tokens; empty for the tuner's own.
        most: Configurations to try for each; 0 for all, which takes hours.

    Returns:
        The name and the content of the file, and the latencies without and with it.

    Raises:
        command-failed: The tuner ended with an error.
        tuning-failed: It did not write the file that vLLM would read.
    """
    with tempfile.TemporaryDirectory(prefix="sparkwright-") as temporary:
        folder = Path(temporary)
        script = folder / Path(TUNER).name
        script.write_bytes(tuner)
        arguments = [
            f"--model={model.resolve()}", f"--tp-size={shards}", f"--dtype={layer.dtype or 'auto'}",
            *(["--batch-size", *map(str, batches)] if batches else []),
        ]  # fmt: skip
        command = [python.absolute(), "-P", DRIVER, script, folder, str(ROUNDS), str(most)]
        with console.progress("tune", len(batches)) as progress:

            def advance(line: str) -> None:
                console.detail(line)
                if "Completed tuning" in line:
                    progress.update(progress.done + 1)

            variables = LaunchPlan(python, model).environment()
            process.run([*command, *arguments], log=log, env=variables, on_line=advance)
        expected, written = layer.filename(device), sorted(folder.glob("E=*.json"))
        if [path.name for path in written] != [expected]:
            what = "The tuner wrote another file than this release would read here."
            details = [f"expected: {expected}", *(f"written: {path.name}" for path in written)]
            raise TuningError("tuning-failed", what, details=[*details, f"full log: {log}"])
        kind = dict[int, tuple[tuple[float, ...], tuple[float, ...]]]
        latencies = read_json(folder / "latencies.json", kind)
        rows = tuple(BatchLatency(tokens, *both) for tokens, both in sorted(latencies.items()))
        return expected, written[0].read_bytes(), rows


def locked_tuner(context: RunContext) -> bytes:
    """
    Return the tuner of the stack's vLLM, whose source is fetched if the store lacks it.

    Raises:
        tuning-unavailable: The source has none.
        offline, source-unreachable: As `fetch.fetch`.
    """
    content = context.objects.blob(fetch.fetch(context, "vllm").tree, TUNER)
    if content is None:
        raise TuningError("tuning-unavailable", f"The source of vLLM has no {TUNER}.")
    return content
