"""
Generate FlashInfer's modules: call its generators, which need no GPU, and write their ninja files.

`sparkwright.builder.wheel.flashinfer_aot` runs it with the locked Python. It runs alone, with the
standard library, torch and FlashInfer's package. Its argument is a JSON file, and it writes the
answer to another:

- ``package``: the folder that holds ``flashinfer``.
- ``build``: gets a folder per module, with its ninja file, and ``build.ninja`` over all of them.
- ``calls``: generators by their dotted names, each with keyword arguments; ``torch.NAME`` stands
  for a data type, and a list for one module per element.
- ``answer``: gets ``modules``, or ``failed``, the call that gives none, with ``reason`` and
  ``similar`` names.
"""

import difflib
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import sys
import types
from typing import Any

#: FlashInfer imports them to download kernels and to ask a GPU; neither is there while it is built,
#: and the lock does not name them.
ABSENT = ("requests", "pynvml")


def open_package(package: pathlib.Path, build: pathlib.Path) -> None:
    """
    Make the generators importable without FlashInfer's ``__init__``, which needs its runtime
    requirements; they write to *build*.
    """
    sys.modules |= {
        name: types.ModuleType(name) for name in ABSENT if importlib.util.find_spec(name) is None
    }
    bare = types.ModuleType("flashinfer")
    bare.__path__ = [str(package / "flashinfer")]
    sys.modules["flashinfer"] = bare
    env: Any = importlib.import_module("flashinfer.jit.env")
    # As FlashInfer's own script for this does. Its default has the version in it, so that a new
    # label would compile everything anew.
    env.FLASHINFER_WORKSPACE_DIR = env.FLASHINFER_JIT_DIR = build
    env.FLASHINFER_GEN_SRC_DIR = build / "generated"
    env.FLASHINFER_GEN_SRC_DIR.mkdir(parents=True, exist_ok=True)


def values(argument: Any) -> list[Any]:
    """Return the values of *argument*, one per module."""
    if isinstance(argument, list):
        return [value for element in argument for value in values(element)]
    if isinstance(argument, str) and argument.startswith("torch."):
        return [getattr(importlib.import_module("torch"), argument.removeprefix("torch."))]
    return [argument]


def generate(call: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the ninja files of the modules of one generator, and return their descriptions."""
    module, _, name = call.rpartition(".")
    generator = getattr(importlib.import_module(module), name)
    described = []
    for chosen in itertools.product(*map(values, arguments.values())):
        specs = generator(**dict(zip(arguments, chosen, strict=True)))
        for spec in specs if isinstance(specs, (list, tuple, types.GeneratorType)) else [specs]:
            if not hasattr(spec, "write_ninja"):
                raise TypeError(f"{type(spec).__name__} is not compiled by nvcc")
            spec.write_ninja()
            text = spec.ninja_path.read_text("utf-8")
            described.append(
                {
                    "name": spec.name,
                    "call": call,
                    "ninja": str(spec.ninja_path),
                    "codes": sorted(set(re.findall(r"-gencode=\S*code=(\S+)", text))),
                }
            )
    return described


def similar(call: str) -> list[str]:
    """Return the generators in the module of *call* whose names are like its own."""
    module, _, name = call.rpartition(".")
    names = vars(sys.modules[module]) if module in sys.modules else ()
    return [f"{module}.{name}" for name in difflib.get_close_matches(name, names, cutoff=0.5)]


def main() -> None:
    question = json.loads(pathlib.Path(sys.argv[1]).read_text("utf-8"))
    build = pathlib.Path(question["build"])
    open_package(pathlib.Path(question["package"]), build)
    answer: dict[str, Any] = {"modules": []}
    for entry in question["calls"]:
        try:
            answer["modules"] += generate(entry["call"], entry["arguments"])
        except Exception as error:  # whatever FlashInfer raises is its reason
            reason = f"{type(error).__name__}: {error}"
            answer = {"failed": entry["call"], "reason": reason, "similar": similar(entry["call"])}
            break
    files = dict.fromkeys(module["ninja"] for module in answer.get("modules", ()))
    lines = ["ninja_required_version = 1.3", *(f"subninja {file}" for file in files), ""]
    (build / "build.ninja").write_text("\n".join(lines), "utf-8")
    pathlib.Path(question["answer"]).write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    main()
