"""
Runs operators of a wheel with torch, in an environment that torch is installed in.

    operators.py JOBS.json

JOBS.json holds the ``libraries`` to load and ``jobs``. A job has ``outputs``, each with its initial
content, and ``steps``: calls of operators, whose arguments are bound by the names in the operator's
schema, so that a job fits all releases with these names. Outputs lie between guard zones of bytes
0xFF. After each of its ``repeats`` the bytes of its outputs, with the guard zones, and of its
``returned`` values are added to the job's file ``results``.

Each job prints ``{"done": NAME}``; or ``{"absent": …}`` if there is no such operator or it has
other arguments; or ``{"error": …}``, which ends the process, because a CUDA error stays with it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

#: Bytes on either side of an output.
GUARD = 4096


class OperatorAbsent(Exception):
    """The wheel has no such operator, or it has other arguments."""


def show(**record: object) -> None:
    """Print a record at once, since the next operator may end the process."""
    print(json.dumps(record), flush=True)  # noqa: T201  the program's output


def tensor(torch: Any, spec: dict[str, Any], guard: int = 0) -> Any:
    """Return the file of *spec* on the GPU, in a buffer with *guard* bytes on either side."""
    content = bytearray(Path(spec["file"]).read_bytes())
    padded = bytearray(b"\xff" * guard) + (content or bytearray(16)) + bytearray(b"\xff" * guard)
    buffer = torch.frombuffer(padded, dtype=torch.uint8).to("cuda")
    inner = buffer[guard : guard + len(content)].view(getattr(torch, spec["dtype"]))
    value = inner.reshape(spec["shape"])
    return buffer, value.t() if spec["transposed"] else value


def value(torch: Any, argument: Any, values: dict[str, Any]) -> Any:
    """Return an argument: a list, a tensor of a file, one of *values* by its name, or itself."""
    if isinstance(argument, list):
        return [value(torch, item, values) for item in argument]
    if not isinstance(argument, dict):
        return argument
    return values[argument["name"]] if "name" in argument else tensor(torch, argument)[1]


def call(torch: Any, step: dict[str, Any], values: dict[str, Any]) -> None:
    """Call one operator, and add its results to *values*."""
    namespace, _, name = step["operator"].partition(".")
    operator = getattr(getattr(torch.ops, namespace), name, None)
    if operator is None:
        raise OperatorAbsent(f"there is no operator {step['operator']}")
    arguments: dict[str, Any] = {}
    for parameter in operator.default._schema.arguments:
        if parameter.name in step["arguments"]:
            arguments[parameter.name] = value(torch, step["arguments"][parameter.name], values)
        elif "Optional" in str(parameter.type):
            arguments[parameter.name] = None
        elif not parameter.has_default_value():
            raise OperatorAbsent(f"{step['operator']} has an argument {parameter.name}")
    returned = operator(**arguments)
    results = returned if isinstance(returned, (tuple, list)) else [returned]
    values.update(zip(step["returns"], results, strict=False))


def run(torch: Any, job: dict[str, Any]) -> None:
    """Run a job as often as it states."""
    with Path(job["results"]).open("wb") as sink:
        for _ in range(job["repeats"]):
            outputs = {name: tensor(torch, spec, GUARD) for name, spec in job["outputs"].items()}
            values = {name: view for name, (_, view) in outputs.items()}
            for step in job["steps"]:
                call(torch, step, values)
            torch.cuda.synchronize()
            buffers = [buffer for buffer, _ in outputs.values()]
            for result in (*buffers, *(values[name] for name in job["returned"])):
                sink.write(result.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def main() -> None:
    """Run the jobs of the file that the command line names."""
    jobs = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    try:
        torch = importlib.import_module("torch")
        for path in jobs["libraries"]:
            torch.ops.load_library(path)
    except (ImportError, OSError) as error:
        show(unloadable=f"{type(error).__name__}: {error}"[:400])
        return
    for job in jobs["jobs"]:
        try:
            run(torch, job)
            show(done=job["name"])
        except OperatorAbsent as error:
            show(absent=str(error))
        except Exception as error:
            show(error=f"{type(error).__name__}: {error}".splitlines()[0][:400])
            return


if __name__ == "__main__":
    main()
