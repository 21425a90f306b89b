"""The converters that a policy names, and the C++ driver that hands arrays to each of them."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

Kind = Literal["encode", "decode", "quantise", "scale", "offset"]
Format = Literal["fp32", "bf16", "fp16"]

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_BITS: dict[Format, tuple[str, type[np.unsignedinteger[Any]]]] = {
    "fp32": ("std::uint32_t", np.uint32),
    "bf16": ("std::uint16_t", np.uint16),
    "fp16": ("std::uint16_t", np.uint16),
}


class Converter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One function of a tree, and what it claims.

    Attributes:
        name: Kebab-case, unique in the policy; the checks' names begin with it.
        kind: What it does, and so the C++ signature of *call*:
            ``encode``: ``integer (T (&x)[lanes])``, the codes, four bits each, the first lowest;
            ``decode``: ``float (unsigned code)``;
            ``quantise``: ``integer (T (&x)[16], float tensor_scale, std::uint8_t& scale)``, the codes likewise and the block's scale;
            ``scale``: ``integer (float x)``, the UE4M3 code;
            ``offset``: ``integer (int row, int column, int columns)``, where the scale lies, *columns* being how many a row has.
        call: The body of that function, in C++.
        type, format: T, and what its bits mean.
        lanes: Values that one call converts.
        nan: What NaN becomes: ``plus-six`` whatever its sign, ``keeps-sign`` ±6, or ``unchecked``.
        zero: Whether a negative zero, and what rounds to it, is ``kept`` or ``dropped``.
        tensor_scale: Whether a quantiser's tensor scale ``multiplies`` the values (vLLM) or ``divides`` them (ModelOpt, torchao).
        about: What a reader should know of it.
    """

    name: str
    kind: Kind
    call: str
    type: str = "float"
    format: Format = "fp32"
    lanes: int = 1
    nan: Literal["plus-six", "keeps-sign", "unchecked"] = "plus-six"
    zero: Literal["kept", "dropped"] = "kept"
    tensor_scale: Literal["multiplies", "divides"] = "multiplies"
    about: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not kebab-case")
        if self.lanes not in (1, 2, 4, 8, 16):
            raise ValueError(f"{self.name} converts {self.lanes} values at once; 1, 2, 4, 8 or 16 fit 64 bits")


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A header and its converters.

    Attributes:
        fork: Whose tree it is in; empty for a header of the CUDA toolkit itself.
        files: Where it lies, by its path in the tree; stacks differ, and the first that is there is taken.
        folders: Folders of the tree that are searched for what it includes.
        headers: Headers of the toolkit that it takes for granted, included before it, by their names in *includes*.
        empty: Headers that it names and the converters do not need; taken as empty, because they would take minutes or are not here.
        defines: Macros of its build.
        arch: What its own conditions see as ``__CUDA_ARCH__``; 0 leaves it undefined, as for host code.
    """

    fork: str
    files: tuple[str, ...]
    converters: tuple[Converter, ...]
    folders: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    defines: dict[str, str] = {}
    arch: int = 0

    def __post_init__(self) -> None:
        if not self.files or not self.converters:
            raise ValueError(f"a unit of {self.fork or 'the toolkit'} names no file or no converter")
        for path in (*self.files, *self.folders, *self.headers, *self.empty):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ValueError(f"{path} does not stay inside the tree")


def source(unit: Unit, header: str) -> str:
    """Return the C++ text of the driver of *unit*, whose file is included as *header*."""
    shims = f'#include "{native() / "device.hpp"}"\n#include "{native() / "driver.hpp"}"\n'
    before = "".join(f"#include <{name}>\n" for name in unit.headers) + shims
    before += "".join(f"#define {name} {value}\n" for name, value in unit.defines.items())
    arch = f"#define __CUDA_ARCH__ {unit.arch}\n" if unit.arch else ""
    parts = [_entry(index, one) for index, one in enumerate(unit.converters)]
    cases = "".join(f"  if (!std::strcmp(arguments[1], \"{one.name}\")) return entry_{i}::run(arguments[2], arguments[3]);\n"
                    for i, one in enumerate(unit.converters))  # fmt: skip
    return f'{before}{arch}#include {header}\n{"".join(parts)}\nint main(int, char** arguments) {{\n{cases}  return 2;\n}}\n'


def _entry(index: int, one: Converter) -> str:
    bits = _BITS[one.format][0]
    values, as_values = f"{one.type} x[{_lanes(one)}];", f"::sparkwright::as_values(in.bits, x, {_lanes(one)});"
    shapes: dict[Kind, tuple[str, str, str, str]] = {
        "encode": (f"{bits} bits[{one.lanes}];", "std::uint64_t", f"{one.type} (&x)[{one.lanes}]", f"{values} {as_values} out = call(x);"),
        "decode": ("std::uint32_t code;", "float", "unsigned code", "out = call(in.code);"),
        "scale": ("float x;", "std::uint8_t", "float x", "out = static_cast<std::uint8_t>(call(in.x));"),
        "offset": ("std::int32_t row, column, columns;", "std::int64_t", "int row, int column, int columns",
                   "out = call(in.row, in.column, in.columns);"),
        "quantise": (f"float tensor_scale; {bits} bits[16];", "Block", f"{one.type} (&x)[16], float tensor_scale, std::uint8_t& scale",
                     f"{values} {as_values} out.codes = call(x, in.tensor_scale, out.scale);"),
    }  # fmt: skip
    given, out, parameters, body = shapes[one.kind]
    return f"""
namespace entry_{index} {{
struct In {{ {given} }};
struct Block {{ std::uint64_t codes = 0; std::uint8_t scale = 0xFF; std::uint8_t filled[7] = {{}}; }};
static auto call({parameters}) {{
{one.call}
}}
static int run(char const* from, char const* to) {{
  return ::sparkwright::sweep<In, {out}>(from, to, [](In const& in, {out}& out) {{ {body} }});
}}
}}
"""


def _lanes(one: Converter) -> int:
    return 16 if one.kind == "quantise" else one.lanes


def dtypes(one: Converter) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the types of an input and of an output of *one*, as its driver reads and writes them."""
    bits = _BITS[one.format][1]
    shapes: dict[Kind, tuple[Any, Any]] = {
        "encode": ([("bits", bits, (one.lanes,))], np.uint64),
        "decode": ([("code", np.uint32)], np.float32),
        "scale": ([("x", np.float32)], np.uint8),
        "offset": ([("row", np.int32), ("column", np.int32), ("columns", np.int32)], np.int64),
        "quantise": (
            [("tensor_scale", np.float32), ("bits", bits, (16,))],
            [("codes", np.uint64), ("scale", np.uint8), ("filled", np.uint8, (7,))],
        ),
    }
    given, out = shapes[one.kind]
    return np.dtype(given), np.dtype(out)


def native() -> Path:
    """Return the folder of our C++ headers, which lie in the package."""
    return Path(str(importlib.resources.files("sparkwright.gates.numerics"))) / "native"
