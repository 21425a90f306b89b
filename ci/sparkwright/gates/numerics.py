"""
G1, numerics without a GPU: the converters of the patched trees, compiled for the host and compared
with NVFP4's definition.

Inline PTX is evaluated as the PTX ISA describes it; what G1 shows is the code around it: the
operand order, the order of nibbles and bytes, and the scales.
"""

import ast
import concurrent.futures
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.builder import toolchain
from sparkwright.core import process
from sparkwright.core.words import NAME_UNKNOWN
from sparkwright.forks.context import RunContext
from sparkwright.gates import nvfp4
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    judged,
    not_run,
)

Kind = Literal["encode", "decode", "quantise", "scale", "offset"]
Format = Literal["fp32", "bf16", "fp16"]

#: A path inside a tree.
Inside = Annotated[str, msgspec.Meta(pattern=r"^(?!/)(?!(.*/)?\.\.(/|$))")]

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

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
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
    files: Annotated[tuple[Inside, ...], msgspec.Meta(min_length=1)]
    converters: Annotated[tuple[Converter, ...], msgspec.Meta(min_length=1)]
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
        self,
        unit: Unit,
        tree: Path | None,
        includes: Sequence[Path],
        folder: Path,
        limits: process.Limits,
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
            *(f"-isystem{include}" for include in includes),
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
            excerpt = " | ".join(map(str.strip, lines[:5]))[:600]
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
        *(f"#include <{header}>" for header in unit.headers),
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


#: The end of the name of a converter's check, which begins with the converter's name.
SUFFIXES: Mapping[Kind, str] = {
    "encode": "sweep",
    "decode": "table",
    "scale": "scale-cast",
    "offset": "swizzle",
    "quantise": "blocks",
}

CHECKS = declare(*(f"*-{suffix}" for suffix in SUFFIXES.values()), measured=True)

#: Reason → its meaning, and what to do.
REASONS: Mapping[str, str] = {
    "converter-wrong": (
        "The tree converts some values to another code, value or position than NVFP4 defines, or "
        "NaN to another than the policy states. The samples show them; correct the tree."
    ),
    "converter-missing": "The tree has no such file, name, list of numbers or PTX text. Find the "
    "conversion in the new tree, and change the policy.",
    "converter-uncompilable": "The source, or the call in the policy, does not compile for the "
    "host; the compiler's message follows.",
    "converter-unreadable": "An instruction of inline PTX is not defined. Define it in "
    "native/device.hpp, or leave the converter to G2.",
    "converter-crashed": "The compiled converter ended abnormally.",
    "converter-slow": "The compiler or the converter exceeded its time and was ended.",
    "converter-output": "The converter's program wrote another number of results than inputs.",
    "tree-missing": "The store has no source tree of that fork as the checkout is now: run "
    "`sparkwright apply`.",
}

_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
_TYPES: Mapping[Format, Any] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
#: The inputs of a converter, as its program reads them, and the outputs that it has to give.
Cases = tuple[NDArray[Any], NDArray[Any]]

#: Where the codes of a 64-bit result lie.
_SHIFTS = np.arange(16, dtype=np.uint64) * np.uint64(4)


class NumericsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/numerics.yaml``: the converters of the trees. No mismatch is allowed.

    Attributes:
        limits: Of each compiler and of each converter.
    """

    limits: process.Limits
    units: tuple[Unit, ...] = ()

    @property
    def forks(self) -> list[str]:
        """The forks of the units, without the toolkit, by name."""
        return sorted({unit.fork for unit in self.units} - {""})


def missing_trees(context: RunContext, policy: NumericsPolicy) -> list[str]:
    """Return the policy's forks whose patched source tree the store does not hold."""
    return [
        fork
        for fork in policy.forks
        if context.store.get("source-tree", context.source_inputs(fork), str) is None
    ]


def source_trees(context: RunContext, policy: NumericsPolicy) -> dict[str, Path]:
    """Return the patched source trees of the policy's forks that the store holds."""
    trees = dict[str, Path]()
    for fork in policy.forks:
        tree = context.store.get("source-tree", context.source_inputs(fork), str)
        if tree is not None:
            # A folder of its own, since a build may write to the one that it compiles.
            folder = context.store.folder("work", context.project.stack, fork, "gate")
            with context.store.lock(f"gate-{context.project.stack}-{fork}"):
                context.objects.checkout(tree, folder / "src", folder / "index")
            trees[fork] = folder / "src"
    return trees


def include_folders(tools: toolchain.Toolchain) -> tuple[Path, ...]:
    """Return the folders of the toolkit's and torch's headers, as the builds search them."""
    torch = sorted(tools.root.glob("lib/python3.*/site-packages/torch/include"))
    return (tools.cuda / "include", tools.cuda / "include" / "cccl", *torch)


def run(
    trees: Mapping[str, Path], policy: NumericsPolicy, includes: Sequence[Path], scratch: Path
) -> tuple[Check, ...]:
    """
    Return the checks of the converters of *policy*, in its order.

    Args:
        trees: As from `source_trees`; not written to.
        includes: Folders with the headers of the toolkit and of torch, as in the builds.
        scratch: A folder for all files that are written.
    """

    def unit_checks(unit: Unit) -> list[Check]:
        folder = scratch / unit.converters[0].name
        folder.mkdir(parents=True)
        try:
            program = Program(unit, trees.get(unit.fork), includes, folder, policy.limits)
        except ConverterInvalid as error:
            return [_unjudged(converter, error) for converter in unit.converters]
        return [_check(converter, program) for converter in unit.converters]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return tuple(itertools.chain.from_iterable(pool.map(unit_checks, policy.units)))


def _unjudged(converter: Converter, error: ConverterInvalid) -> Check:
    reason, message = error.args
    make = {"converter-missing": failed, "tree-missing": not_run}.get(reason, invalid)
    return make(f"{converter.name}-{SUFFIXES[converter.kind]}", message, reason)


def _check(converter: Converter, program: Program) -> Check:
    """Return the check of *converter*: all inputs at which it has to decide, against `nvfp4`."""
    inputs, expected = _CASES[converter.kind](converter)
    try:
        results = program.call(converter, inputs)
    except ConverterInvalid as error:
        return _unjudged(converter, error)
    if converter.kind == "quantise":
        codes = (results["codes"][:, None] >> _SHIFTS & np.uint64(0xF)).astype(np.uint8)
        factors, inputs, results = inputs["factor"], inputs["values"], results["scale"]
        errors = nvfp4.quantisation_errors(inputs, factors[:, None], codes, results[:, None])
        rows = np.flatnonzero(errors[0].any(axis=1) | errors[1].any(axis=1))
    else:
        rows = np.flatnonzero(~(results == expected))
    samples = []
    for row in rows[:8]:
        form = "{:g}" if expected.dtype.kind == "f" else "{:#x}"
        case, right = f"{converter.format} {inputs[row]}", form.format(expected[row])
        samples.append(Sample(case, right, form.format(results[row])))
    figures = (Figure("mismatches", len(rows), bound=0), Figure("inputs", len(results)))
    name = f"{converter.name}-{SUFFIXES[converter.kind]}"
    message = f"{len(rows):,} of {len(results):,} inputs differ from NVFP4's definition"
    return judged(name, message, "converter-wrong", not len(rows), figures, samples)


def _values(form: Format) -> NDArray[Any]:
    """
    Return values at which a converter has to decide: all of bf16 or fp16; for fp32 those of bf16,
    which ties and codes are among, with both neighbours, and each 65,537th pattern, which reach
    every exponent with mantissas that neither bf16 nor fp16 has.
    """
    if form != "fp32":
        return _HALVES.view(_TYPES[form])
    bits = _HALVES.astype(np.uint32)
    near = (bits << 16)[:, None] + np.array([-1, 0, 1]).astype(np.uint32)
    return np.concatenate([near.reshape(-1), bits * np.uint32(65537)]).view(np.float32)


def _encode(converter: Converter) -> Cases:
    """Return the inputs of *converter*: each value in every lane, beside different values."""
    values, lanes = _values(converter.format), converter.lanes
    rolled = np.concatenate([np.roll(values, lane) for lane in range(lanes)])
    rows = rolled[: len(rolled) // lanes * lanes].reshape(-1, lanes)
    codes = nvfp4.encode(rows)
    if converter.nan == "keeps-sign":
        codes |= (np.isnan(rows) & np.signbit(rows)).astype(np.uint8) << 3
    packed = (codes.astype(np.uint64) << _SHIFTS[:lanes]).sum(axis=1)
    return rows, packed


def _decode(_: Converter) -> Cases:
    codes = np.arange(16, dtype=np.uint32)
    return codes, nvfp4.decode(codes)


def _scale(_: Converter) -> Cases:
    values = _values("fp32")
    values = values[~np.signbit(values) & ~np.isnan(values)]
    return values, nvfp4.scale_encode(values)


def _offset(_: Converter) -> Cases:
    inputs, expected = list[tuple[int, int, int]](), list[NDArray[Any]]()
    for width in (1, 4, 7, 12):
        inputs += [(row, column, width) for row in range(300) for column in range(width)]
        expected.append(nvfp4.swizzled_offsets(300, width).reshape(-1))
    return np.array(inputs, np.int32), np.concatenate(expected)


def _quantise(converter: Converter) -> Cases:
    """
    Return blocks that decide, with the tensor scales 1 and 2: every code times every normal scale;
    every value up to 6 beside a 6, which makes the scale 1; and every positive finite maximum, in
    all places and of both signs.
    """
    values = _values("bf16" if converter.format == "fp32" else converter.format)
    with np.errstate(invalid="ignore"):
        values = values[np.isfinite(values)].astype(np.float32)
    grid = nvfp4.decode(np.roll(np.arange(16, dtype=np.uint8), 3)) * nvfp4.SCALES[8:, None]
    small = values[np.abs(values) <= nvfp4.LARGEST]
    swept = np.insert(small[: len(small) // 15 * 15].reshape(-1, 15), 15, 6, axis=1)
    maxima = values[values > 0]
    index = np.arange(len(maxima))
    signed = np.where(index // 16 % 2, -maxima, maxima)
    single = np.eye(nvfp4.BLOCK, dtype=np.float32)[index % nvfp4.BLOCK] * signed[:, None]
    blocks = np.tile(np.concatenate([grid, swept, single]), (2, 1))
    kind = [("factor", np.float32), ("values", _TYPES[converter.format], nvfp4.BLOCK)]
    inputs = np.zeros(len(blocks), kind)
    inputs["factor"], inputs["values"] = np.repeat([1, 2], len(blocks) // 2), blocks
    largest = inputs["factor"] * (np.abs(blocks).max(axis=1) / np.float32(nvfp4.LARGEST))
    return inputs, nvfp4.scale_encode(largest)


_CASES: Mapping[Kind, Callable[[Converter], Cases]] = {
    "encode": _encode,
    "decode": _decode,
    "scale": _scale,
    "offset": _offset,
    "quantise": _quantise,
}
