"""
Asks FlashInfer for modules: calls its own generators, which need no GPU, and writes what ninja
compiles them with.

`sparkwright.builder.wheel.flashinfer_aot` runs it with the locked Python. It runs alone, with the
standard library, torch and FlashInfer's package. Its argument is a JSON file, and it writes the
answer to another:

- ``package``: the folder that holds ``flashinfer``.
- ``build``: gets a folder per module, with its ninja file, and ``build.ninja`` over all of them.
- ``calls``: generators by their dotted names, each with keyword arguments; ``torch.NAME`` stands
for a data type, and a list for
  one module per element.
- ``answer``: gets ``modules``, or ``unknown`` with ``near``, or ``refused`` with ``why``.
"""

import ast
import difflib
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

#: FlashInfer imports them to download kernels and to ask a GPU; neither is there while it is built,
#: and the lock does not name them.
ABSENT = ("requests", "pynvml")


class Unknown(Exception):
    """No generator has this name."""


class Refused(Exception):
    """
    The generator does not take these arguments, or makes something that nvcc does not compile.
    """


def open_package(package: pathlib.Path, build: pathlib.Path) -> None:
    """
    Make the generators importable, without FlashInfer's ``__init__``, which needs all that it runs
    with; they write to *build*.
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
    env.FLASHINFER_WORKSPACE_DIR, env.FLASHINFER_JIT_DIR, env.FLASHINFER_GEN_SRC_DIR = (
        build,
        build,
        build / "generated",
    )
    env.FLASHINFER_GEN_SRC_DIR.mkdir(parents=True, exist_ok=True)


def generators(package: pathlib.Path) -> dict[str, str]:
    """Return the generators that FlashInfer defines, read and not imported: name → dotted name."""
    found: dict[str, str] = {}
    for path in sorted((package / "flashinfer").rglob("*.py")):
        text = path.read_text("utf-8")
        if re.search(r"^def _?gen_", text, re.MULTILINE):
            module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(
                ".__init__"
            )
            names = (
                node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
            )
            found |= {
                f"{module}.{name}": name for name in names if name.lstrip("_").startswith("gen_")
            }
    return found


def near(call: str, package: pathlib.Path) -> list[str]:
    """Return the generators whose names are like *call*, the nearest first."""
    known = generators(package)
    name = call.rpartition(".")[2]
    alike = difflib.get_close_matches(name, sorted(set(known.values())), n=5, cutoff=0.5)
    return [dotted for one in alike for dotted, short in known.items() if short == one][:8]


def values(value: Any) -> list[Any]:
    """Return what *value* stands for, one element per module."""
    if isinstance(value, list):
        return [one for element in value for one in values(element)]
    if isinstance(value, str) and value.startswith("torch."):
        return [getattr(importlib.import_module("torch"), value.removeprefix("torch."))]
    return [value]


def specs(call: str, arguments: dict[str, Any]) -> Iterator[Any]:
    """Yield the modules of one entry."""
    module, _, name = call.rpartition(".")
    try:
        generator = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unknown(call) from error
    try:
        for chosen in itertools.product(*(values(value) for value in arguments.values())):
            made = generator(**dict(zip(arguments, chosen, strict=True)))
            yield from made if isinstance(made, (list, tuple, types.GeneratorType)) else [made]
    except (
        Exception
    ) as error:  # whatever FlashInfer raises, it says why it will not make this module
        raise Refused(f"{type(error).__name__}: {error}") from error


def described(spec: Any, call: str) -> dict[str, Any]:
    """Write the ninja file of *spec* and return what it says."""
    if not hasattr(spec, "write_ninja"):
        raise Refused(f"{type(spec).__name__} is not compiled by nvcc")
    spec.write_ninja()
    text = spec.ninja_path.read_text("utf-8")
    return {
        "name": spec.name,
        "call": call,
        "ninja": str(spec.ninja_path),
        "units": re.findall(r"^build \S+: \w*compile (\S+)", text, re.MULTILINE),
        "codes": sorted(set(re.findall(r"-gencode=\S*code=(\S+)", text))),
    }


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to *question*."""
    package, build = pathlib.Path(question["package"]), pathlib.Path(question["build"])
    open_package(package, build)
    modules: list[dict[str, Any]] = []
    for entry in question["calls"]:
        try:
            modules += [
                described(spec, entry["call"]) for spec in specs(entry["call"], entry["arguments"])
            ]
        except Unknown:
            return {"unknown": entry["call"], "near": near(entry["call"], package)}
        except Refused as error:
            return {"refused": entry["call"], "why": str(error)}
    files = dict.fromkeys(one["ninja"] for one in modules)
    lines = ["ninja_required_version = 1.3", *(f"subninja {file}" for file in files), ""]
    (build / "build.ninja").write_text("\n".join(lines), "utf-8")
    return {"modules": modules}


def main() -> int:
    question = json.loads(pathlib.Path(sys.argv[1]).read_text("utf-8"))
    pathlib.Path(question["answer"]).write_text(json.dumps(answer(question)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
