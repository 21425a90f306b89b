"""
Time a matrix-vector product and a copy, which stream from memory, on the first GPU or else the CPU.

The program runs in an environment with torch, a server's, and needs nothing else. Its arguments are
the megabytes of the matrix, the seconds of work before the first measurement and of each
measurement, and the number of readings. It prints their JSON alone.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

#: Columns of the matrix; its size gives the rows.
COLUMNS = 8192
#: Seconds of a timed stretch, over which launch overhead and clock resolution are negligible.
STRETCH = 0.01


def median_seconds(
    work: Callable[[], object], finish: Callable[[], object], warmup: float, seconds: float
) -> float:
    """Return the median seconds of *work* over at least five stretches."""
    stretches: list[float] = []
    count, measure_from = 1, time.perf_counter() + warmup
    while len(stretches) < 5 or time.perf_counter() < measure_from + seconds:
        start = time.perf_counter()
        for _ in range(count):
            work()
        finish()
        end = time.perf_counter()
        if count > 1 and start >= measure_from:
            stretches.append((end - start) / count)
        else:
            count = max(2, int(STRETCH * count / (end - start)))
    return statistics.median(stretches)


def main() -> None:
    """Measure as the arguments say, and print the result."""
    # What libraries print goes to standard error.
    output = os.dup(1)
    os.dup2(2, 1)
    import torch

    megabytes, warmup, seconds, readings = map(float, sys.argv[1:])
    name, uuid, item_bytes, finish = "CPU", "", 4, time.perf_counter
    settings = {"dtype": torch.float32, "device": "cpu"}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        name, uuid, item_bytes = gpu.name, str(getattr(gpu, "uuid", "")), 2
        settings, finish = {"dtype": torch.bfloat16, "device": "cuda"}, torch.cuda.synchronize
    rows = max(1, int(megabytes * 1e6 / (item_bytes * COLUMNS)))
    matrix, target = (torch.ones((rows, COLUMNS), **settings) for _ in range(2))
    vector, product = torch.ones((COLUMNS,), **settings), torch.ones((rows,), **settings)
    works = {
        "gemv": lambda: torch.matmul(matrix, vector, out=product),
        "copy": lambda: target.__setitem__(..., matrix),
    }
    taken = [
        {key: median_seconds(work, finish, warmup, seconds) for key, work in works.items()}
        for _ in range(int(readings))
    ]
    result = {
        "gpu": item_bytes == 2,
        "name": f"{name} by torch {torch.__version__}",
        "uuid": uuid,
        "bytes": rows * COLUMNS * item_bytes,
        "readings": taken,
    }
    os.write(output, json.dumps(result).encode())


if __name__ == "__main__":
    main()
