"""The converters that a policy names, and the C++ program that passes arrays to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

Kind = Literal["encode", "decode", "quantise", "scale", "offset"]
Format = Literal["fp32", "bf16", "fp16"]

NATIVE = Path(__file__).parent / "native"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

#: The type of a result, as the program writes it.
RESULTS: Mapping[Kind, np.dtype[Any]] = {
    "encode": np.dtype(np.uint64),
    "decode": np.dtype(np.float32),
    "scale": np.dtype(np.uint8),
    "offset": np.dtype(np.int64),
    "quantise": np.dtype([("codes", np.uint64), ("scale", np.uint8), ("padding", np.uint8, 7)]),
}


class Converter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A function of a source tree, and its convention where public references differ.

    Attributes:
        name: Kebab-case, unique in the policy; the names of its checks begin with it.
        kind: Its purpose, and with it the C++ signature of *call*:
            ``encode``: ``integer (T (&x)[lanes])``, four bits per value, the first lowest;
            ``decode``: ``float (unsigned code)``;
            ``quantise``: ``integer (T (&x)[16], float tensor_scale, std::uint8_t& scale)``;
            ``scale``: ``integer (float x)``, the UE4M3 code;
            ``offset``: ``integer (int row, int column, int columns)``, the byte of a block scale.
        call: The body of that function, in C++.
        type, format: T, and the meaning of its bits.
        lanes: Values per call.
        nan: Result for NaN: ``plus-six`` for either sign, or ``keeps-sign`` for ±6.
        zero: Whether a negative zero, and a value that rounds to it, keeps its sign.
        tensor_scale: Whether the tensor scale ``multiplies`` values (vLLM) or ``divides`` them
            (ModelOpt, torchao).
    """

    name: str
    kind: Kind
    call: str
    type: str = "float"
    format: Format = "fp32"
    lanes: int = 1
    nan: Literal["plus-six", "keeps-sign"] = "plus-six"
    zero: Literal["kept", "dropped"] = "kept"
    tensor_scale: Literal["multiplies", "divides"] = "multiplies"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not kebab-case")
        if self.lanes not in (1, 2, 4, 8, 16):
            raise ValueError(f"{self.name} has {self.lanes} lanes; 1, 2, 4, 8 or 16 fit 64 bits")


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A source file and its converters.

    Attributes:
        fork: The fork of the file; empty for a header of the CUDA toolkit.
        files: Its paths in the trees of different stacks; the first that exists is used.
        table: For a Python file, the variable that is assigned one list of code values; in C++ it
            is ``table``.
        template: For a Python file, the function that holds one PTX text whose operands ``$1`` …
            are the values, in order; in C++ it is ``convert``.
        folders: Folders of the tree that are searched for included files.
        headers: Headers of the toolkit that are included before the file.
        empty: Included headers that are replaced by empty files.
        defines: Macros.
        arch: ``__CUDA_ARCH__`` in the file; 0 leaves it undefined, as in host code.
    """

    fork: str
    files: tuple[str, ...]
    converters: tuple[Converter, ...]
    table: str = ""
    template: str = ""
    folders: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    defines: dict[str, str] = {}
    arch: int = 0

    def __post_init__(self) -> None:
        if not self.files or not self.converters:
            raise ValueError(f"a unit of {self.fork or 'the toolkit'} names no file or converter")
        for path in (*self.files, *self.folders, *self.headers, *self.empty):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ValueError(f"{path} does not stay inside the tree")


def driver(unit: Unit, header: str) -> str:
    """Return the C++ text of a program that includes *header* and calls the unit's converters."""
    includes = "".join(f"#include <{name}>\n" for name in unit.headers)
    defines = "".join(f"#define {name} {value}\n" for name, value in unit.defines.items())
    arch = f"#define __CUDA_ARCH__ {unit.arch}\n" if unit.arch else ""
    entries = "".join(_entry(index, one) for index, one in enumerate(unit.converters))
    cases = "".join(
        f'  if (!std::strcmp(arguments[1], "{one.name}")) '
        f"return entry_{index}::run(arguments[2], arguments[3]);\n"
        for index, one in enumerate(unit.converters)
    )
    return (
        f'{includes}#include "{NATIVE / "device.hpp"}"\n#include "{NATIVE / "driver.hpp"}"\n'
        f"{defines}{arch}#include {header}\n{entries}\n"
        f"int main(int, char** arguments) {{\n{cases}  return 2;\n}}\n"
    )


def _entry(index: int, converter: Converter) -> str:
    bits = "std::uint32_t" if converter.format == "fp32" else "std::uint16_t"
    lanes = 16 if converter.kind == "quantise" else converter.lanes
    values = f"{converter.type} x[{lanes}]; ::sparkwright::as_values(in.bits, x, {lanes}); "
    parts: dict[Kind, tuple[str, str, str, str]] = {
        "encode": (
            f"{bits} bits[{lanes}];",
            "std::uint64_t",
            f"{converter.type} (&x)[{lanes}]",
            f"{values} out = call(x);",
        ),
        "decode": ("std::uint32_t code;", "float", "unsigned code", "out = call(in.code);"),
        "scale": ("float x;", "std::uint8_t", "float x", "out = call(in.x);"),
        "offset": (
            "std::int32_t row, column, columns;",
            "std::int64_t",
            "int row, int column, int columns",
            "out = call(in.row, in.column, in.columns);",
        ),
        "quantise": (
            f"float tensor_scale; {bits} bits[16];",
            "::sparkwright::Block",
            f"{converter.type} (&x)[16], float tensor_scale, std::uint8_t& scale",
            f"{values} out.codes = call(x, in.tensor_scale, out.scale);",
        ),
    }
    fields, result, parameters, body = parts[converter.kind]
    return f"""
namespace entry_{index} {{
struct In {{ {fields} }};
static auto call({parameters}) {{
{converter.call}
}}
static int run(char const* from, char const* to) {{
  auto const convert = [](In const& in, {result}& out) {{ {body} }};
  return ::sparkwright::sweep<In, {result}>(from, to, convert);
}}
}}
"""
