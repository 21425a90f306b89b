"""
Runs operators of a wheel with torch, in an environment that torch is installed in.

    operators.py JOBS.json

JOBS.json holds the ``libraries`` to load and ``jobs``. The ``tensors`` of a job lie in its file
``memory``, which is copied to the GPU for each of its ``repeats``: each has a begin and an end
there, a type and a shape. The outputs come first, each with its initial content between guard
zones; the bytes up to ``written`` are added to the job's file ``results`` after each run. The
``steps`` are calls of operators, whose arguments are bound by the names in the operator's schema,
so that a job fits all releases with these names.

Each job prints ``{"done": NAME}``. The last line is ``{"unloadable": …}`` if torch or a library
cannot be loaded; ``{"absent": …}`` if there is no such operator, or it has other arguments; and
``{"error": …}`` after an error, because a CUDA error stays with the process.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


class OperatorAbsent(Exception):
    """The wheel has no such operator, or it has other arguments."""


def call(torch: Any, step: dict[str, Any], values: dict[str, Any]) -> None:
    """Call one operator with *values* by their names, and add its results to them."""
    namespace, _, name = step["operator"].partition(".")
    operator = getattr(getattr(torch.ops, namespace), name, None)
    if operator is None:
        raise OperatorAbsent(f"there is no operator {step['operator']}")
    arguments: dict[str, Any] = {}
    for parameter in operator.default._schema.arguments:
        if parameter.name in step["arguments"]:
            value = step["arguments"][parameter.name]
            arguments[parameter.name] = values[value] if str(value).startswith("@") else value
        elif "Optional" in str(parameter.type):
            arguments[parameter.name] = None
        elif not parameter.has_default_value():
            raise OperatorAbsent(f"{step['operator']} has an argument {parameter.name}")
    returned = operator(**arguments)
    results = returned if isinstance(returned, (tuple, list)) else [returned]
    values.update(zip(step["returns"], results, strict=False))


def run(torch: Any, job: dict[str, Any]) -> None:
    """Run a job as often as it states."""
    content = bytearray(Path(job["memory"]).read_bytes())
    with Path(job["results"]).open("wb") as sink:
        for _ in range(job["repeats"]):
            memory = torch.frombuffer(content, dtype=torch.uint8).to("cuda")
            values = {}
            for name, (begin, end, kind, shape) in job["tensors"].items():
                values[name] = memory[begin:end].view(getattr(torch, kind)).reshape(shape)
            for step in job["steps"]:
                call(torch, step, values)
            torch.cuda.synchronize()
            sink.write(memory[: job["written"]].cpu().numpy().tobytes())


def main() -> None:
    """Run the jobs of the file that the command line names, and print a line for each."""
    document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    try:
        torch = importlib.import_module("torch")
        for path in document["libraries"]:
            torch.ops.load_library(path)
    except (ImportError, OSError) as error:
        print(json.dumps({"unloadable": f"{type(error).__name__}: {error}"[:400]}))  # noqa: T201
        return
    try:
        for job in document["jobs"]:
            run(torch, job)
            # At once, since the next operator may end the process.
            print(json.dumps({"done": job["name"]}), flush=True)  # noqa: T201
    except OperatorAbsent as error:
        print(json.dumps({"absent": str(error)}))  # noqa: T201
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps({"error": line[:400]}))  # noqa: T201


if __name__ == "__main__":
    main()
