"""
Does two fixed things when it is told to, and says how long they took: a matrix times a vector, and a copy. Both stream from memory.

    python sentinel.py

It runs in whatever Python has torch for the GPU at hand (a server's environment); without a GPU, or such a torch, in one that has NumPy.
Orders come as lines of JSON on standard input, answers go as lines of JSON to standard output; it ends with its standard input. Between
two orders it holds no array. This file needs the standard library, and torch or NumPy.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

#: Columns of the matrix; its rows are what the ordered size leaves.
COLUMNS = 8192
#: Seconds of one timed stretch on a GPU, over which the starts of kernels and the clock's steps weigh nothing.
STRETCH = 0.01

Work = Callable[[], object]


class Device(Protocol):
    """Where the work is done."""

    about: dict[str, object]

    def gemv(self, megabytes: int) -> tuple[Work, Work, int]:
        """Return the matrix times vector, the copy, and the bytes of the matrix."""

    def streams(self, megabytes: int) -> tuple[list[Work], int]:
        """Return works that read all of an array and write next to nothing, and its bytes."""

    def timed(self, work: Work, times: int) -> float:
        """Return the seconds that *times* of the work take."""

    def free(self) -> None:
        """Give back what is not held any more."""


class Cuda:
    """The first GPU that CUDA shows, through torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        properties = torch.cuda.get_device_properties(0)
        self.about = {
            "kind": "cuda", "device": torch.cuda.get_device_name(0), "by": f"torch {torch.__version__}",
            "unified": bool(getattr(properties, "is_integrated", False)), "uuid": str(getattr(properties, "uuid", "")),
        }  # fmt: skip

    def gemv(self, megabytes: int) -> tuple[Work, Work, int]:
        torch = self._torch
        rows = max(1, megabytes * 1_000_000 // (2 * COLUMNS))
        matrix = torch.ones((rows, COLUMNS), dtype=torch.bfloat16, device="cuda")
        vector = torch.ones(COLUMNS, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(rows, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(matrix)
        return lambda: torch.mv(matrix, vector, out=out), lambda: target.copy_(matrix), 2 * rows * COLUMNS

    def streams(self, megabytes: int) -> tuple[list[Work], int]:
        torch = self._torch
        rows = max(1, megabytes * 1_000_000 // (2 * COLUMNS))
        matrix = torch.ones((rows, COLUMNS), dtype=torch.bfloat16, device="cuda")
        vector = torch.ones(COLUMNS, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(rows, dtype=torch.bfloat16, device="cuda")
        floats, whole = matrix.view(torch.float32), matrix.view(torch.int32)
        return [lambda: torch.mv(matrix, vector, out=out), lambda: torch.sum(floats), lambda: torch.amax(whole)], 2 * rows * COLUMNS

    def timed(self, work: Work, times: int) -> float:
        torch = self._torch
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        for _ in range(times):
            work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    def free(self) -> None:
        self._torch.cuda.empty_cache()


class Processor:
    """The processor, through NumPy."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        threads = os.environ.get("OMP_NUM_THREADS", "?")
        about = f"NumPy {numpy.__version__}, {threads} thread{'' if threads == '1' else 's'}"
        self.about: dict[str, object] = {"kind": "processor", "device": "processor", "by": about, "unified": False, "uuid": ""}

    def gemv(self, megabytes: int) -> tuple[Work, Work, int]:
        numpy = self._numpy
        rows = max(1, megabytes * 1_000_000 // (4 * COLUMNS))
        matrix, vector = numpy.ones((rows, COLUMNS), dtype=numpy.float32), numpy.ones(COLUMNS, dtype=numpy.float32)
        out, target = numpy.empty(rows, dtype=numpy.float32), numpy.empty_like(matrix)
        return lambda: numpy.dot(matrix, vector, out=out), lambda: numpy.copyto(target, matrix), 4 * rows * COLUMNS

    def streams(self, megabytes: int) -> tuple[list[Work], int]:
        numpy = self._numpy
        rows = max(1, megabytes * 1_000_000 // (4 * COLUMNS))
        matrix, vector = numpy.ones((rows, COLUMNS), dtype=numpy.float32), numpy.ones(COLUMNS, dtype=numpy.float32)
        out, flat = numpy.empty(rows, dtype=numpy.float32), matrix.reshape(-1)
        return [lambda: numpy.dot(matrix, vector, out=out), lambda: numpy.dot(flat, flat), flat.max], 4 * rows * COLUMNS

    def timed(self, work: Work, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - began

    def free(self) -> None:
        """Nothing: large arrays go back to the system as soon as they are dropped."""


def gpu_absent() -> str:
    """Return why there is no GPU, without the seconds that torch takes to load; empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver shows no GPU"
    return ""


def chosen() -> Device:
    """Return the GPU; where there is none, or no torch for it, the processor, with the reason as *note*."""
    note = gpu_absent()
    if not note:
        try:
            torch = importlib.import_module("torch")
            if torch.cuda.is_available():
                return Cuda(torch)
            note = f"torch {torch.__version__} cannot use the GPU"
        except ImportError as error:
            note = f"there is a GPU, and no torch here to use it ({error})"
    device = Processor(importlib.import_module("numpy"))
    device.about["note"] = note
    return device


def stretch(device: Device, work: Work, warm: float) -> int:
    """Repeat *work* for *warm* seconds, and return how many of it make one timed stretch."""
    device.timed(work, 1)  # loads the kernel
    until, times = time.perf_counter() + warm, 1
    while True:
        one = device.timed(work, times) / times
        times = max(1, min(10_000, int(STRETCH / max(one, 1e-6))))
        if time.perf_counter() >= until:
            return times


def repeated(device: Device, works: list[Work], warm: float, seconds: float, least: int) -> list[list[float]]:
    """Return the seconds of each work, stretch by stretch, in turns: *seconds* for each, and *least* stretches at least."""
    counts = [stretch(device, work, warm / len(works)) for work in works]
    taken: list[list[float]] = [[] for _ in works]
    until = time.perf_counter() + seconds * len(works)
    while len(taken[0]) < least or time.perf_counter() < until:
        for work, count, into in zip(works, counts, taken, strict=True):
            into.append(device.timed(work, count) / count)
    return taken


def measure(device: Device, order: dict[str, Any]) -> dict[str, object]:
    """Return the median seconds of the GEMV and of the copy, and what they moved."""
    gemv, copy, size = device.gemv(order["megabytes"])
    first, second = repeated(device, [gemv, copy], order["warm"], order["seconds"], order["least"])
    return {"gemv": statistics.median(first), "copy": statistics.median(second), "bytes": size, "times": len(first)}


def bandwidth(device: Device, order: dict[str, Any]) -> dict[str, object]:
    """Return the bytes per second of the fastest of some readings: what memory gives is no less."""
    works, size = device.streams(order["megabytes"])
    taken = repeated(device, works, order["warm"], order["seconds"], order["least"])
    return {"read": size / min(statistics.median(one) for one in taken), "times": len(taken[0])}


def answer(device: Device, order: dict[str, Any]) -> dict[str, object]:
    """Return what *order* asks for, or the error; no error ends the program, as memory may be short only now."""
    try:
        return {"measure": measure, "bandwidth": bandwidth}[order["ask"]](device, order)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        device.free()


def main(orders: TextIO, answers: TextIO) -> int:
    """Say what the device is, and then answer each order."""
    try:
        device = chosen()
        said: dict[str, object] = dict(device.about)
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(said), file=answers, flush=True)
    if "error" in said:
        return 1
    for line in orders:
        print(json.dumps(answer(device, json.loads(line))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    # What libraries print goes to standard error: standard output is for answers.
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, private))
