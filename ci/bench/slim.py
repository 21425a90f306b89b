"""
Compare `model slim` with a plain copy of the same files: seconds, and the memory that it takes.

    slim.py FOLDER [GIGABYTES [SHARDS [FORMAT]]]

Writes a model of random weights in BF16 to FOLDER, copies it and makes it slimmer in turns, each
with its data through to the disk and the model read before, and removes all of them. Beside the
ratio of the medians stands the error of the rounding by a power of two, against the scale that puts
the largest number of a row at 448.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import statistics
import struct
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from sparkwright.bench.model import quantise
from sparkwright.bench.model.slim import Format, Slimming
from sparkwright.core.store import flush

COLUMNS, ROUNDS = 4096, 3


def write_model(folder: Path, gigabytes: float, shards: int) -> None:
    """Write the model: each shard a matrix, of which each megabyte is the same."""
    folder.mkdir(parents=True)
    rows = max(16, int(gigabytes * 1e9 / shards / 2 / COLUMNS) // 128 * 128)
    part = np.random.default_rng(1).standard_normal((128, COLUMNS), np.float32) * 0.02
    data = part.astype(ml_dtypes.bfloat16).tobytes()
    index = {}
    for number in range(shards):
        name, shard = f"model.layers.{number}.o_proj.weight", f"model-{number}.safetensors"
        index[name] = shard
        entry = {"dtype": "BF16", "shape": [rows, COLUMNS], "data_offsets": [0, 2 * rows * COLUMNS]}
        header = json.dumps({name: entry}).encode()
        with (folder / shard).open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            for _ in range(rows // 128):
                stream.write(data)
        flush(folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"model_type": "bench", "num_hidden_layers": shards}
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


def main(folder: str, gigabytes: str = "4", shards: str = "4", form: Format = "fp8") -> None:
    root = Path(folder)
    source, target = root / "model", root / "copy"
    seconds: dict[str, list[float]] = {"copy": [], "slim": []}
    peak = 0
    try:
        write_model(source, float(gigabytes), int(shards))
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
        "bytes": size, "format": form, "seconds": seconds, "processors": os.cpu_count(),
        "speed by that of a copy": medians["copy"] / medians["slim"], "peak memory, bytes": peak,
        "rounding error by that of a scale of the largest": error(form),
    }  # fmt: skip
    sys.stdout.write(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # words of a command line
