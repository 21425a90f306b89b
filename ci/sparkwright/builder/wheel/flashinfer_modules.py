"""
Generate FlashInfer's modules: call its generators, which need no GPU, and write their ninja files.

`sparkwright.builder.wheel.flashinfer_aot` runs it with the locked Python. It runs alone, with the
standard library, torch and FlashInfer's package, and ends with an error if a generator gives no
module. Its arguments:

- The folder that holds ``flashinfer``.
- The folder that gets a folder per module, with its ninja file, ``build.ninja`` over all of them,
  and ``modules.json``, their names and architectures.
- Generators by their dotted names, each with keyword arguments, as JSON; ``torch.NAME`` stands for
  a data type, and a list for one module per element.
"""

import importlib
import importlib.util
import itertools
import json
import pathlib
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

#: FlashInfer imports them to download kernels and to ask a GPU; neither is there while it is built,
#: and the lock does not name them.
ABSENT = ("requests", "pynvml")


def open_package(package: pathlib.Path, build: pathlib.Path) -> None:
    """
    Make the generators importable without FlashInfer's ``__init__``, which needs its runtime
    requirements; they write to *build*.
    """
    for name in ABSENT:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    bare = types.ModuleType("flashinfer")
    bare.__path__ = [str(package / "flashinfer")]
    sys.modules["flashinfer"] = bare
    env: Any = importlib.import_module("flashinfer.jit.env")
    # As FlashInfer's own script for this does. Its default has the version in it, so that a new
    # label would compile everything anew.
    env.FLASHINFER_WORKSPACE_DIR = env.FLASHINFER_JIT_DIR = build
    env.FLASHINFER_GEN_SRC_DIR = build / "generated"
    env.FLASHINFER_GEN_SRC_DIR.mkdir(parents=True, exist_ok=True)


def generate(call: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Write the ninja files of the modules of one generator, and yield their descriptions."""
    lists = [value if isinstance(value, list) else [value] for value in arguments.values()]
    for chosen in itertools.product(*lists):
        values = [
            pkgutil.resolve_name(value)
            if isinstance(value, str) and value.startswith("torch.")
            else value
            for value in chosen
        ]
        specs = pkgutil.resolve_name(call)(**dict(zip(arguments, values, strict=True)))
        for spec in specs if isinstance(specs, (list, tuple, types.GeneratorType)) else [specs]:
            spec.write_ninja()
            text = spec.ninja_path.read_text("utf-8")
            codes = sorted(set(re.findall(r"-gencode=\S*code=(\S+)", text)))
            yield {"name": spec.name, "call": call, "ninja": str(spec.ninja_path), "codes": codes}


def main() -> None:
    """Generate the modules that the arguments name."""
    package, build = map(pathlib.Path, sys.argv[1:3])
    open_package(package, build)
    modules: list[dict[str, Any]] = []
    for entry in json.loads(sys.argv[3]):
        try:
            modules += generate(entry["call"], entry["arguments"])
        except Exception as error:  # whatever FlashInfer raises is its reason
            sys.exit(f"{entry['call']}: {type(error).__name__}: {error}")
    files = dict.fromkeys(f"subninja {module['ninja']}\n" for module in modules)
    (build / "build.ninja").write_text("".join(["ninja_required_version = 1.3\n", *files]), "utf-8")
    (build / "modules.json").write_text(json.dumps(modules), "utf-8")


if __name__ == "__main__":
    main()
