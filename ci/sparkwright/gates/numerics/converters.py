"""Converters that a policy names, compiled for the host."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.builder import toolchain
from sparkwright.core import process
from sparkwright.core.process import Limits

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


#: More of a Python file is not read.
LARGEST_SOURCE = 4 * 1024 * 1024

#: The exit status of `native/device.hpp` at an instruction that it does not define.
UNREADABLE = 42

#: The PTX instructions that `native/device.hpp` defines, as functions of the same name.
INSTRUCTIONS = {"cvt.rn.satfinite.e2m1x2.f32", "rcp.approx.ftz.f32", "mov.b32", "mov.b64"}
_TYPES = {"b8": "std::uint8_t", "b16": "std::uint16_t", "b32": "std::uint32_t"}

#: A line marker of the preprocessor, or an asm statement.
_TOKEN = re.compile(
    r'^# \d+ "(?P<file>[^"\n]*)"[^\n]*$'
    r"|\b(?:asm|__asm__)\b\s*(?:volatile|__volatile__)?\s*\((?P<body>.*?)\)\s*;",
    re.MULTILINE | re.DOTALL,
)
_STRING = re.compile(r'\s*"((?:[^"\\\n]|\\.)*)"')

#: A name in the program that the compiler does not know, in the words of GCC and of Clang.
_UNKNOWN = re.compile(
    r"driver\.cpp:\d+:\d+: error: (?:[‘'](?:\w+::)*\w+[’'] (?:is not a member of|was not declared|"
    r"has not been declared)|no (?:member|template) named '\w+' in|use of undeclared identifier)"
)


class ConverterInvalid(Exception):
    """
    A converter cannot be judged.

    Args:
        reason: One of the gate's ``REASONS``.
        message: The reason in a sentence, with the compiler's last lines if there are any.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class Program:
    """
    The compiled program of a unit.

    Args:
        tree: The fork's source tree; not used for a unit of the toolkit.
        includes: Folders of the toolkit's and torch's headers.
        folder: An empty folder for all files that are written.

    Raises:
        ConverterInvalid: It cannot be compiled.
        tool-missing: There is no C++ compiler.
    """

    def __init__(
        self, unit: Unit, tree: Path, includes: Sequence[Path], folder: Path, limits: Limits
    ) -> None:
        self._folder, self._limits, self._tree = folder, limits, tree.resolve()
        for name in unit.empty:
            (folder / "empty" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "empty" / name).touch()
        source, program = folder / "driver.cpp", folder / "driver"
        source.write_text(driver(unit, self._header(unit)), "utf-8")
        folders = [f"-I{folder / 'empty'}", *(f"-I{self._tree / name}" for name in unit.folders)]
        folders += [f"-isystem{path}" for path in includes]
        compiler = [*toolchain.host_compiler(), "-std=c++20", "-w"]
        self._compile([*compiler, "-E", *folders, str(source), "-o", f"{program}.ii"])
        text = Path(f"{program}.ii").read_text("utf-8", "replace")
        Path(f"{program}.host.ii").write_text(inline_ptx(text, self._owns), "utf-8")
        # Without contraction, since a fused multiply-add rounds once where the text rounds twice.
        options = ["-O1", "-ffp-contract=off", "-x", "c++-cpp-output", f"{program}.host.ii"]
        self._compile([*compiler, *options, "-o", str(program)])

    def _header(self, unit: Unit) -> str:
        if not unit.fork:
            return f"<{unit.files[0]}>"
        path = next(
            (self._tree / name for name in unit.files if (self._tree / name).exists()), None
        )
        if path is None:
            missing = " and no ".join(unit.files)
            raise ConverterInvalid("converter-missing", f"the tree of {unit.fork} has no {missing}")
        self._owns(str(path))
        if unit.table or unit.template:
            path, source = self._folder / "python.hpp", path
            path.write_text(python_header(unit, source), "utf-8")
        return f'"{path}"'

    def _owns(self, name: str) -> bool:
        """Return whether the file *name* is the tree's; raise if it is a link that leaves it."""
        path = Path(name)
        if path.is_relative_to(self._tree) and not path.resolve().is_relative_to(self._tree):
            where = path.relative_to(self._tree)
            raise ConverterInvalid("converter-outside", f"{where} is a link that leaves the tree")
        return path.is_relative_to(self._tree) or path.is_relative_to(self._folder)

    def _run(self, command: list[str], name: str, failure: str) -> None:
        """Run *command*; raise with the reason *failure* if it does not succeed."""
        ended = process.run_limited(command, self._limits, self._folder / f"{name}.log")
        if ended.late:
            message = f"the {name} did not end within {self._limits.seconds:g} s"
            raise ConverterInvalid("converter-slow", message)
        if ended.status:
            text = ended.tail
            for path in (self._tree, self._folder, NATIVE):
                text = text.replace(f"{path}/", "")
            lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
            excerpt = " | ".join(line.strip() for line in lines[:5])[:600]
            reason = "converter-unreadable" if ended.status == UNREADABLE else failure
            reason = "converter-missing" if _UNKNOWN.search(text) else reason
            raise ConverterInvalid(reason, f"the {name} ended with {ended.status}: {excerpt}")

    def _compile(self, command: list[str]) -> None:
        self._run(command, "compiler", "converter-uncompilable")

    def call(self, converter: Converter, inputs: NDArray[Any]) -> NDArray[Any]:
        """
        Return the results of *converter*, in the type of `RESULTS`, for the rows of *inputs*.

        Raises:
            ConverterInvalid: It crashes, does not end, meets an instruction that is not defined, or
                writes another number of results.
        """
        source, result = self._folder / "inputs", self._folder / "results"
        source.write_bytes(inputs.tobytes())
        result.unlink(missing_ok=True)
        command = [str(self._folder / "driver"), converter.name, str(source), str(result)]
        self._run(command, "converter", "converter-crashed")
        size = result.stat().st_size if result.is_file() and not result.is_symlink() else 0
        if size != len(inputs) * RESULTS[converter.kind].itemsize:
            message = f"{converter.name} wrote {size} bytes for {len(inputs)} inputs"
            raise ConverterInvalid("converter-output", message)
        return np.fromfile(result, RESULTS[converter.kind])


def inline_ptx(text: str, owns: Callable[[str], bool]) -> str:
    """
    Return the preprocessed C++ *text* with the asm statements of files that *owns* accepts as C++.

    Everything else stays as it is: the expressions around a statement, the order of its operands,
    and the order of its instructions, each of which becomes a call of the function of
    `native/device.hpp` with its name; an instruction without one ends the program.

    Raises:
        ConverterInvalid: ``converter-unreadable`` if a statement does not begin with its text.
    """
    owned, cached = False, functools.cache(owns)

    def replaced(token: re.Match[str]) -> str:
        nonlocal owned
        if token["file"] is not None:
            owned = cached(token["file"])
        return _statement(token["body"]) if owned and token["body"] is not None else token[0]

    return _TOKEN.sub(replaced, text)


def _statement(body: str) -> str:
    body = re.sub(r"(?m)^# \d.*$", "", body)
    template, _, operands = body.partition(":")
    ptx = "".join(ast.literal_eval(f'"{text}"') for text in _STRING.findall(template)).strip()
    if not ptx or _STRING.sub("", template).strip():
        message = f"an asm statement is not understood: {' '.join(body.split())[:120]}"
        raise ConverterInvalid("converter-unreadable", message)
    # Constraints stand between the operands' expressions, each in its parentheses.
    values = [value.strip(" \t\r\n,:") for value in _STRING.split(operands)[2::2]]
    calls = []
    for line in (ptx[1:-1] if ptx.startswith("{") else ptx).split(";")[:-1]:
        name, _, arguments = line.strip().partition(" ")
        registers = re.fullmatch(r"\.(\w+)\s+([\w\s,]+)", arguments)
        if name == ".reg" and registers and registers[1] in _TYPES:
            calls.append(f"{_TYPES[registers[1]]} {registers[2]};")
            continue
        if name not in INSTRUCTIONS or re.search(r"[^\w\s%,{}]", arguments):
            return f'::sparkwright::unreadable("{name}");'
        arguments = re.sub(r"[{}]", "", arguments)
        for number in reversed(range(len(values))):
            arguments = arguments.replace(f"%{number}", values[number])
        calls.append(f"::sparkwright::{name.replace('.', '_')}({arguments});")
    return "{ " + " ".join(calls) + " }"


def python_header(unit: Unit, path: Path) -> str:
    """
    Return a C++ header with the table or the PTX template of the Python file at *path*.

    Raises:
        ConverterInvalid: ``converter-missing`` without the variable or function, and
            ``converter-unreadable`` if it does not hold a list of numbers or a PTX text.
    """
    with path.open("rb") as stream:
        text = stream.read(LARGEST_SOURCE).decode("utf-8", "replace")
    if unit.table:
        pattern = rf"^{unit.table}\b[^=\n]*=[^\[\n]*(?:\n[^\[\n]*)?(\[[^\]]*\])"
    else:
        pattern = rf'^def {unit.template}\((?:(?!^def ).)*?"""([^"]*\$0[^"]*)"""'
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    try:
        if found is None:
            raise ValueError("no list of numbers" if unit.table else "no PTX text")
        if unit.table:
            numbers = [float(number) for number in ast.literal_eval(found[1])]
            return f"constexpr float table[] = {{{', '.join(map(repr, numbers))}}};\n"
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        name = unit.table or unit.template
        stated = re.search(rf"^(def )?{name}\b", text, re.MULTILINE)
        reason = "converter-unreadable" if stated else "converter-missing"
        raise ConverterInvalid(reason, f"{path.name} has {error} in {name}") from error
    lanes = unit.converters[0].lanes
    inputs = ", ".join(f'"f"(x[{lane}])' for lane in range(lanes))
    lines = found[1].replace("$", "%").replace("\\", "").splitlines()
    literal = " ".join(f'"{line.strip()}\\n"' for line in lines)
    return (
        f"#include <cstdint>\ninline std::uint32_t convert(float (&x)[{lanes}]) {{\n"
        f'  std::uint32_t result;\n  asm volatile({literal} : "=r"(result) : {inputs});\n'
        "  return result;\n}\n"
    )
