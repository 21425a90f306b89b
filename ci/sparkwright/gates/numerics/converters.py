"""
A converter of a patched source tree, compiled for the host and called with arrays.

The unit's program (`driver`) includes the source file. It is preprocessed, its inline PTX is
rewritten to C++ (`inline_ptx`), and the result is compiled and run, each step within `Limits`.
Python sources are read as text and never run. Nothing is written into the tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sparkwright.builder import toolchain
from sparkwright.core import process
from sparkwright.core.process import Limits
from sparkwright.core.words import NAME_UNKNOWN

Kind = Literal["encode", "decode", "quantise", "scale", "offset"]
Format = Literal["fp32", "bf16", "fp16"]

#: A path inside a tree.
Inside = Annotated[str, Meta(pattern=r"^(?!/)(?!(.*/)?\.\.(/|$))")]

NATIVE = Path(__file__).parent / "native"

#: The type of a result, as the program writes it.
RESULTS: Mapping[Kind, np.dtype[Any]] = {
    "encode": np.dtype(np.uint64),
    "decode": np.dtype(np.float32),
    "scale": np.dtype(np.uint8),
    "offset": np.dtype(np.int64),
    "quantise": np.dtype([("codes", np.uint64), ("scale", np.uint8), ("padding", np.uint8, 7)]),
}
#: The parameters of a converter in C++, by which `native/driver.hpp` knows its kind.
_PARAMETERS: Mapping[Kind, str] = {
    "encode": "{0.type} (&x)[{0.lanes}]",
    "decode": "unsigned code",
    "scale": "float x",
    "offset": "int row, int column, int columns",
    "quantise": "{0.type} (&x)[16], float tensor_scale, std::uint8_t& scale",
}

#: The exit status of `native/device.hpp` at an instruction that it does not define.
UNREADABLE = 42

#: The PTX that `native/device.hpp` defines, as types and functions of the same names.
_REGISTERS = re.compile(r"\.reg\s+\.(b8|b16|b32)(\s[\w\s,]+)")
_INSTRUCTION = re.compile(
    r"(cvt\.rn\.satfinite\.e2m1x2\.f32|rcp\.approx\.ftz\.f32|mov\.b32|mov\.b64)(\s[\w\s%,{}]+)"
)

_LITERAL = r'"((?:[^"\\\n]|\\.)*)"'
#: An asm statement with operands; those without are labels and barriers of the host's headers.
#: A line marker of the preprocessor may stand in it.
_ASM = re.compile(
    r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*"
    rf"\((?P<text>(?:\s|{_LITERAL}|^# \d[^\n]*)+):(?P<operands>.*?)\)\s*;",
    re.DOTALL | re.MULTILINE,
)
_MARKER = re.compile(r"^# \d.*$", re.MULTILINE)


class Converter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A function of a source tree, and its convention where public references differ.

    Attributes:
        name: Unique in the policy; the names of its checks begin with it.
        kind: Its purpose, and with it the C++ signature of *call*:
            ``encode``: ``integer (T (&x)[lanes])``, four bits per value, the first lowest;
            ``decode``: ``float (unsigned code)``;
            ``quantise``: ``integer (T (&x)[16], float tensor_scale, std::uint8_t& scale)``, where
            the tensor scale multiplies the values;
            ``scale``: ``integer (float x)``, the UE4M3 code;
            ``offset``: ``integer (int row, int column, int columns)``, the byte of a block scale.
        call: The body of that function, in C++.
        type, format: T, and the meaning of its bits.
        lanes: Values per call.
        nan: Result for NaN: ``plus-six`` for either sign, or ``keeps-sign`` for ±6.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    kind: Kind
    call: str
    type: str = "float"
    format: Format = "fp32"
    lanes: Literal[1, 2, 4, 8, 16] = 1
    nan: Literal["plus-six", "keeps-sign"] = "plus-six"


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A source file and its converters.

    Attributes:
        fork: The fork of the file; empty for a header of the CUDA toolkit.
        files: Its paths in the trees of different stacks; the first that exists is used.
        python: For a Python file, a regular expression whose group is a list of numbers or a PTX
            text with the operands ``$0``, ``$1`` …
        header: The C++ header for it, where ``@`` stands for that group with ``%`` for ``$``.
        folders: Folders of the tree that are searched for included files.
        headers: Headers of the toolkit that are included before the file.
        empty: Included headers that are replaced by empty files.
        defines: Macros in the file; without ``__CUDA_ARCH__`` it is host code.
    """

    fork: str
    files: Annotated[tuple[Inside, ...], Meta(min_length=1)]
    converters: Annotated[tuple[Converter, ...], Meta(min_length=1)]
    python: str = ""
    header: str = ""
    folders: tuple[Inside, ...] = ()
    headers: tuple[Inside, ...] = ()
    empty: tuple[Inside, ...] = ()
    defines: dict[str, str] = {}


class ConverterInvalid(Exception):
    """A converter cannot be judged: one of the gate's ``REASONS``, and the reason in a sentence."""


class Program:
    """
    The compiled program of a unit.

    Args:
        tree: The fork's source tree; None if there is none, as for a unit of the toolkit.
        includes: Folders of the toolkit's and torch's headers.
        folder: An empty folder for all files that are written.

    Raises:
        ConverterInvalid: There is no tree or no such file in it, or it cannot be compiled.
        tool-missing: There is no C++ compiler.
    """

    def __init__(
        self, unit: Unit, tree: Path | None, includes: Sequence[Path], folder: Path, limits: Limits
    ) -> None:
        self._folder, self._limits = folder, limits
        for name in unit.empty:
            (folder / "empty" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "empty" / name).touch()
        source, program = folder / "driver.cpp", str(folder / "driver")
        source.write_text(driver(unit, _source(unit, tree)), "utf-8")
        folders = [
            f"-I{folder / 'empty'}",
            *(f"-I{tree}/{name}" for name in unit.folders),
            *(f"-isystem{path}" for path in includes),
        ]
        compiler = [*toolchain.host_compiler(), "-std=c++20", "-w"]
        self._run(
            [*compiler, "-E", *folders, str(source), "-o", f"{program}.ii"],
            "compiler",
            "converter-uncompilable",
        )
        text = Path(f"{program}.ii").read_text("utf-8", "replace")
        Path(f"{program}.host.ii").write_text(_ASM.sub(inline_ptx, text), "utf-8")
        # Without contraction, since a fused multiply-add rounds once where the text rounds twice.
        options = ["-O1", "-ffp-contract=off", "-x", "c++-cpp-output", f"{program}.host.ii"]
        self._run([*compiler, *options, "-o", program], "compiler", "converter-uncompilable")

    def _run(self, command: list[str], name: str, failure: str) -> None:
        """Run *command*; raise with the reason *failure* if it does not succeed."""
        ended = process.run_limited(command, self._limits, self._folder / f"{name}.log")
        if ended.late:
            raise ConverterInvalid(
                "converter-slow", f"the {name} did not end within {self._limits.seconds:g} s"
            )
        if ended.status:
            text = re.sub(r"\S+/", "", ended.tail)
            lines = re.findall(r".*\berror\b.*", text) or text.splitlines()
            excerpt = " | ".join(line.strip() for line in lines[:5])[:600]
            reason = "converter-unreadable" if ended.status == UNREADABLE else failure
            reason = "converter-missing" if NAME_UNKNOWN.search(text) else reason
            raise ConverterInvalid(reason, f"the {name} ended with {ended.status}: {excerpt}")

    def call(self, converter: Converter, inputs: NDArray[Any]) -> NDArray[Any]:
        """
        Return the results of *converter*, in the type of `RESULTS`, for the rows of *inputs*.

        Raises:
            ConverterInvalid: It crashes, does not end, meets an instruction that is not defined, or
                writes another number of results.
        """
        source, result = self._folder / "inputs", self._folder / "results"
        source.write_bytes(inputs.tobytes())
        result.write_bytes(b"")
        self._run(
            [str(self._folder / "driver"), converter.name, str(source), str(result)],
            "converter",
            "converter-crashed",
        )
        results = np.fromfile(result, RESULTS[converter.kind])
        if len(results) != len(inputs):
            raise ConverterInvalid(
                "converter-output",
                f"{converter.name} wrote {len(results)} results for {len(inputs)} inputs",
            )
        return results


def _source(unit: Unit, tree: Path | None) -> str:
    """Return the C++ text that defines what the unit's converters call."""
    if not unit.fork:
        return f"#include <{unit.files[0]}>"
    if tree is None:
        raise ConverterInvalid("tree-missing", f"the store has no source tree of {unit.fork}")
    path = next((tree / name for name in unit.files if (tree / name).is_file()), None)
    text = path.read_text("utf-8", "replace") if path else ""
    match = re.search(unit.python, text, re.MULTILINE | re.DOTALL)
    if path is None or match is None:
        message = f"the tree of {unit.fork} has no {' and no '.join(unit.files)}"
        message += f" with a text that matches {unit.python}" if unit.python else ""
        raise ConverterInvalid("converter-missing", message)
    if not unit.python:
        return f'#include "{path}"'
    part = " ".join(match[1].replace("\\", "").replace("$", "%").split())
    return unit.header.replace("@", part)


def driver(unit: Unit, source: str) -> str:
    """Return the C++ text of a program with *source* that calls the unit's converters."""
    lines = [
        *(f"#include <{name}>" for name in unit.headers),
        f'#include "{NATIVE / "device.hpp"}"',
        f'#include "{NATIVE / "driver.hpp"}"',
        *(f"#define {name} {value}" for name, value in unit.defines.items()),
        source,
        "int main(int, char** arguments) {",
    ]
    for converter in unit.converters:
        parameters = _PARAMETERS[converter.kind].format(converter)
        lines.append(
            f'if (!std::strcmp(arguments[1], "{converter.name}")) return ::sparkwright::run('
            f"+[]({parameters}) {{\n{converter.call}\n}}, arguments[2], arguments[3]);"
        )
    return "\n".join([*lines, "return 2;", "}", ""])


def inline_ptx(statement: re.Match[str]) -> str:
    """
    Return the asm *statement* as C++.

    Everything else stays as it is: the expressions around a statement, the order of its operands,
    and the order of its instructions, each of which becomes a call of the function of
    `native/device.hpp` with its name; an instruction without one ends the program.
    """
    literals = re.findall(_LITERAL, _MARKER.sub("", statement["text"]))
    ptx = "".join(ast.literal_eval(f'"{text}"') for text in literals).strip()
    operands = _MARKER.sub("", statement["operands"])
    # Constraints stand between the operands' expressions, each in its parentheses.
    values = [value.strip(" \t\r\n,:") for value in re.split(_LITERAL, operands)[2::2]]
    named = (f"auto&& operand{number} = {value}; " for number, value in enumerate(values) if value)
    text = "".join(named)
    for line in ptx.removeprefix("{").removesuffix("}").split(";")[:-1]:
        if registers := _REGISTERS.fullmatch(line.strip()):
            text += f"::sparkwright::{registers[1]}{registers[2]}; "
        elif instruction := _INSTRUCTION.fullmatch(line.strip()):
            arguments = re.sub(r"[{}]", "", instruction[2]).replace("%", "operand")
            text += f"::sparkwright::{instruction[1].replace('.', '_')}({arguments}); "
        else:
            return f'{{ ::sparkwright::unreadable("{line.strip().partition(" ")[0]}"); }}'
    return f"{{ {text}}}"
