"""
Measure a matrix-vector product, a copy, and a reduction, all of which stream from memory.

The program runs in an environment that has torch for the GPU (a server's), or NumPy. Requests and
responses are lines of JSON on standard input and output. It ends with its input, and holds no array
between two requests. It needs only the standard library, and torch or NumPy.
"""

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

#: Columns of the matrix; its size gives the rows.
COLUMNS = 8192
#: Seconds of a timed stretch, over which launch overhead and clock resolution are negligible.
STRETCH = 0.01


class Device:
    """The first GPU that torch shows, in BF16, or the processor by NumPy, in FP32."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            import torch

            if torch.cuda.is_available():
                gpu = torch.cuda.get_device_properties(0)
                self.about = {
                    "kind": "cuda",
                    "name": f"{gpu.name} by torch {torch.__version__}",
                    "uuid": str(getattr(gpu, "uuid", "")),
                }
                self.library: Any = torch
                self.array = {"dtype": torch.bfloat16, "device": "cuda"}
                self.item_bytes, self.finish = 2, torch.cuda.synchronize
                return
        import numpy

        self.about = {"kind": "cpu", "name": f"CPU by NumPy {numpy.__version__}", "uuid": ""}
        self.library, self.array = numpy, {"dtype": numpy.float32}
        self.item_bytes, self.finish = 4, lambda: None

    def works(self, megabytes: int) -> tuple[dict[str, Callable[[], object]], int]:
        """Return the works by name, and the bytes of the matrix."""
        rows = max(1, megabytes * 10**6 // (self.item_bytes * COLUMNS))
        shapes = ((rows, COLUMNS), (rows, COLUMNS), (COLUMNS,), (rows,))
        matrix, target, vector, out = (self.library.ones(one, **self.array) for one in shapes)
        return {
            "gemv": lambda: self.library.matmul(matrix, vector, out=out),
            "copy": lambda: target.__setitem__(..., matrix),
            "reduce": matrix.max,
        }, rows * COLUMNS * self.item_bytes

    def timed(self, work: Callable[[], object], count: int) -> float:
        """Return the seconds of one of *count* repetitions."""
        start = time.perf_counter()
        for _ in range(count):
            work()
        self.finish()
        return (time.perf_counter() - start) / count


def measure(device: Device, request: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of each work, and the bytes of the matrix."""
    works, size = device.works(request["megabytes"])
    response: dict[str, float] = {"bytes": size}
    for name, work in works.items():
        stretches: list[float] = []
        count, measure_from = 1, time.perf_counter() + request["warmup"]
        while len(stretches) < 5 or time.perf_counter() < measure_from + request["seconds"]:
            seconds = device.timed(work, count)
            if time.perf_counter() < measure_from or count == 1:
                count = max(2, int(STRETCH / seconds))
            else:
                stretches.append(seconds)
        response[name] = statistics.median(stretches)
    return response


def main() -> None:
    """Print the device, then a response for each request; an error ends the program."""
    # What libraries print goes to standard error: standard output is for responses.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as responses:
        os.dup2(2, 1)
        device = Device()
        responses.write(json.dumps(device.about) + "\n")
        responses.flush()
        for line in sys.stdin:
            responses.write(json.dumps(measure(device, json.loads(line))) + "\n")
            responses.flush()
            if device.item_bytes == 2:
                device.library.cuda.empty_cache()


if __name__ == "__main__":
    main()
