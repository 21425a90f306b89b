"""
Time a matrix-vector product and a copy, which stream from memory, on the first GPU or else the CPU.

The program runs in an environment with torch, a server's, and needs nothing else. Its arguments are
the megabytes of the matrix, the seconds of work before the first measurement and of each
measurement, and the number of readings. It prints their JSON alone.
"""

import json
import os
import sys

#: Columns of the matrix; its size gives the rows.
COLUMNS = 8192
#: What is timed.
WORKS = {"gemv": "torch.matmul(matrix, vector, out=product)", "copy": "target[:] = matrix"}


def main() -> None:
    """Measure as the arguments say, and print the result."""
    # What libraries print goes to standard error.
    output = os.dup(1)
    os.dup2(2, 1)
    import torch
    from torch.utils.benchmark import Timer

    megabytes, warmup, seconds, readings = map(float, sys.argv[1:])
    name, uuid, item_bytes = "CPU", "", 4
    settings = {"dtype": torch.float32, "device": "cpu"}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        name, uuid, item_bytes = gpu.name, str(getattr(gpu, "uuid", "")), 2
        settings = {"dtype": torch.bfloat16, "device": "cuda"}
    rows = max(1, int(megabytes * 1e6 / (item_bytes * COLUMNS)))
    matrix, target = (torch.ones((rows, COLUMNS), **settings) for _ in range(2))
    vector, product = torch.ones((COLUMNS,), **settings), torch.ones((rows,), **settings)
    names = {
        "torch": torch, "matrix": matrix, "target": target, "vector": vector, "product": product
    }  # fmt: skip
    taken: list[dict[str, float]] = []
    for _ in range(int(readings)):
        taken.append({})
        for key, work in WORKS.items():
            timer = Timer(work, globals=names, num_threads=torch.get_num_threads())
            if warmup:
                timer.blocked_autorange(min_run_time=warmup)
            taken[-1][key] = timer.blocked_autorange(min_run_time=seconds).median
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
