"""
Compare `model slim` with a plain copy of the same files: seconds, and the memory that it takes.

    slim.py FOLDER [LAYERS [FORMAT]]

Writes a model of random weights in BF16 to FOLDER, which has layers of Qwen3-Next in their true
dimensions, with 32 of 512 experts; copies it and makes it slimmer in turns, each with its data
through to the disk and the model read before, and removes all of them. Beside the ratio of the
medians stand what a token reads before and after, and the error of the rounding by a power of two,
against the scale that puts the largest number of a row at 448.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import struct
import sys
import time
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np

import predict
from sparkwright.bench.model import quantise
from sparkwright.bench.model.checkpoint import Tensor
from sparkwright.bench.model.slim import Format, Slimming
from sparkwright.core.store import flush

COLUMNS, ROUNDS = 4096, 3


def write_model(folder: Path, layers: int) -> None:
    """Write the model, a shard for each layer; each two megabytes of a tensor are the same."""
    folder.mkdir(parents=True)
    config, tensors = predict.qwen(layers, 32, 10, 151936, "bf16", "bf16", "bf16")
    part = np.random.default_rng(1).standard_normal(1 << 20, np.float32) * 0.02
    data = part.astype(ml_dtypes.bfloat16).tobytes()
    shards: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors:
        shards["-".join(re.findall(r"^mtp|layers.\d+", name)) or name].append((name, tensor))
    index = {}
    for shard, members in shards.items():
        entries, end = {}, 0
        for name, tensor in members:
            offsets = [end, end + tensor.bytes]
            entries[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets}
            index[name], end = f"{shard}.safetensors", offsets[1]
        header = json.dumps(entries).encode()
        with (folder / f"{shard}.safetensors").open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            for left in range(end, 0, -len(data)):
                stream.write(data[:left])
        flush(folder / f"{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


def copy(source: Path, target: Path, _: Format) -> None:
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        flush(target / path.name)


def slim(source: Path, target: Path, form: Format) -> None:
    Slimming(source, form).write(target)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (target / "peak").write_text(str(peak * 1024))


def error(form: str) -> float:
    """Return the error of a row of random numbers by our scale, as a share of what another gives."""
    rows = (np.random.default_rng(2).standard_normal((256, COLUMNS), np.float32) * 0.02).astype(
        ml_dtypes.bfloat16
    )
    exact = rows.astype(np.float32)
    if form != "fp8":
        return float("nan")
    codes, scales = quantise.fp8(rows.view(np.uint16))
    ours = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[:, None]
    other = np.abs(exact).max(axis=1, keepdims=True) / 448
    theirs = (exact / other).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * other
    return float(np.sqrt(((ours - exact) ** 2).mean() / ((theirs - exact) ** 2).mean()))


def main(folder: str, layers: str = "4", form: Format = "fp8") -> None:
    root = Path(folder)
    source, target = root / "model", root / "copy"
    seconds: dict[str, list[float]] = {"copy": [], "slim": []}
    peak = 0
    try:
        write_model(source, int(layers))
        record = Slimming(source, form).record
        size = sum(path.stat().st_size for path in source.iterdir())
        for work in (copy, slim) * ROUNDS:
            began = time.monotonic()
            # A process of its own, whose memory is that of one run.
            child = multiprocessing.get_context("spawn").Process(
                target=work, args=(source, target, form)
            )
            child.start()
            child.join()
            seconds[work.__name__].append(time.monotonic() - began)
            if child.exitcode:
                raise SystemExit(f"{work.__name__} ended with {child.exitcode}")
            if work is slim:
                peak = max(peak, int((target / "peak").read_text()))
            shutil.rmtree(target)
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    answer = {
        "bytes": size, "a token reads": [record.read_before, record.read_after], "format": form, "seconds": seconds, "processors": os.cpu_count(),
        "speed by that of a copy": medians["copy"] / medians["slim"], "peak memory, bytes": peak,
        "rounding error by that of a scale of the largest": error(form),
    }  # fmt: skip
    sys.stdout.write(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # words of a command line
