"""
A converter of a patched tree, compiled for the host and called with arrays.

The driver of a unit (`units.source`) includes its header; it is preprocessed, its inline PTX becomes calls of an evaluator (`inlineasm`),
and what comes out is compiled and run, each step within `Limits`. Nothing is written into the tree.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.builder import toolchain
from sparkwright.core import process
from sparkwright.core.process import Ended, Limits
from sparkwright.gates.numerics import inlineasm
from sparkwright.gates.numerics.units import Converter, Unit, dtypes, native, source

#: What `native/ptx.hpp` ends with at an instruction that it does not know.
UNREADABLE = 42

#: What it says once it has executed any.
EVALUATED = "inline PTX was evaluated"

#: How GCC and Clang say that a call in the driver names what nobody declares.
_UNKNOWN = re.compile(
    r"driver\.cpp:\d+:\d+: error: (?:[‘'](?:\w+::)*(\w+)[’'] (?:is not a member of|was not declared|has not been declared)"
    r"|no (?:member|template) named '(\w+)' in|use of undeclared identifier '(\w+)')"
)


class ConverterInvalid(Exception):
    """
    A converter cannot be judged.

    Args:
        reference: Why, as in `numerics.REASONS`.
        says: The same in a sentence, with the compiler's last lines where it has any.
    """

    def __init__(self, reference: str, says: str) -> None:
        super().__init__(says)
        self.reference, self.says = reference, says


class Program:
    """
    The compiled driver of a unit.

    Args:
        tree: The fork's source tree; not read for a unit of the toolkit.
        includes: Folders of headers that are not the tree's: CUDA's, torch's.
        folder: An empty folder for everything that is made.

    Raises:
        ConverterInvalid: ``converter-missing``, ``converter-outside``, ``converter-uncompilable``, ``converter-unreadable`` or
            ``converter-slow``.
        tool-missing: There is no C++ compiler.
    """

    def __init__(self, unit: Unit, tree: Path, includes: Sequence[Path], folder: Path, limits: Limits) -> None:
        self._folder, self._limits, self._tree = folder, limits, tree.resolve()
        self._failed: dict[str, ConverterInvalid] = {}
        self._evaluated: set[str] = set()
        header = self._header(unit)
        for name in unit.empty:
            (folder / "empty" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "empty" / name).touch()
        folders = [f"-I{folder / 'empty'}", *(f"-I{self._tree / name}" for name in unit.folders), *(f"-isystem{path}" for path in includes)]
        while unit.converters and (gone := self._compiled(unit, header, folders)):
            where = Path(header.strip('"<>')).name
            self._failed |= {one: ConverterInvalid("converter-missing", f"{where} has no {name}") for one, name in gone.items()}
            # The others are judged all the same.
            unit = msgspec.structs.replace(unit, converters=tuple(one for one in unit.converters if one.name not in gone))

    def evaluated(self, one: Converter) -> bool:
        """Did *one*, when it was called, execute inline PTX?"""
        return one.name in self._evaluated

    def _compiled(self, unit: Unit, header: str, folders: Sequence[str]) -> dict[str, str]:
        """Compile the driver; where that fails for names that the header lacks, return them by the converters that call them."""
        compiler = [*toolchain.host_compiler(), "-std=c++20", "-w"]
        (self._folder / "driver.cpp").write_text(source(unit, header), "utf-8")
        self._tool([*compiler, "-E", *folders, str(self._folder / "driver.cpp"), "-o", str(self._folder / "driver.ii")])
        self._rewrite((self._folder / "driver.ii").read_text("utf-8", "replace"))
        # Without contraction, since a fused multiply-add rounds once where the text rounds twice.
        options = ["-O1", "-ffp-contract=off", "-x", "c++-cpp-output"]
        try:
            self._tool([*compiler, *options, str(self._folder / "host.ii"), "-o", str(self._folder / "driver")])
        except ConverterInvalid:
            with (self._folder / "compiler.log").open(encoding="utf-8", errors="replace") as said:
                if gone := _gone(unit, said.read(1 << 20)):
                    return gone
            raise
        return {}

    def _header(self, unit: Unit) -> str:
        if not unit.fork:
            return f"<{unit.files[0]}>"
        for name in unit.files:
            if (path := self._tree / name).exists():
                if not path.resolve().is_relative_to(self._tree):
                    raise ConverterInvalid("converter-outside", f"{name} is a link that leaves the tree")
                return f'"{path}"'
        raise ConverterInvalid("converter-missing", f"the tree of {unit.fork} has no {' and no '.join(unit.files)}")

    def _tool(self, command: list[str]) -> None:
        ended = process.run_limited(command, self._limits, self._folder / "compiler.log")
        if ended.late:
            raise ConverterInvalid("converter-slow", f"the compiler did not end within {self._limits.seconds:g} s")
        if ended.status:
            raise ConverterInvalid("converter-uncompilable", f"the compiler says: {_excerpt(ended, self._tree, self._folder)}")

    def _rewrite(self, text: str) -> None:
        try:
            made = inlineasm.rewrite(text, functools.cache(self._mine))
        except inlineasm.Unparsed as error:
            raise ConverterInvalid("converter-unreadable", f"an asm statement is not understood: {error}") from error
        (self._folder / "host.ii").write_text(made, "utf-8")

    def _mine(self, name: str) -> bool:
        path = Path(name)
        if not path.is_relative_to(self._tree):
            return False
        if not path.resolve().is_relative_to(self._tree):
            raise ConverterInvalid("converter-outside", f"{path.relative_to(self._tree)} is a link that leaves the tree")
        return True

    def call(self, one: Converter, inputs: NDArray[Any]) -> NDArray[Any]:
        """
        Return what *one* makes of *inputs* (an array of the first of `dtypes`), as an array of the second.

        Raises:
            ConverterInvalid: ``converter-slow``, ``converter-unreadable``, ``converter-crashed`` or ``converter-output``.
        """
        if one.name in self._failed:
            # Whoever loops or crashes once is not waited for again.
            raise self._failed[one.name]
        try:
            return self._called(one, inputs)
        except ConverterInvalid as error:
            self._failed[one.name] = error
            raise

    def _called(self, one: Converter, inputs: NDArray[Any]) -> NDArray[Any]:
        given, out = dtypes(one)
        source_file, made = self._folder / f"{one.name}.in", self._folder / f"{one.name}.out"
        source_file.write_bytes(np.ascontiguousarray(inputs, given).tobytes())
        made.unlink(missing_ok=True)
        command = [str(self._folder / "driver"), one.name, str(source_file), str(made)]
        ended = process.run_limited(command, self._limits, self._folder / f"{one.name}.log")
        self._judge(ended)
        if EVALUATED in ended.tail:
            self._evaluated.add(one.name)
        expected = inputs.size * out.itemsize
        size = made.stat().st_size if made.is_file() and not made.is_symlink() else 0
        if size != expected:
            raise ConverterInvalid("converter-output", f"{one.name} wrote {size} bytes for {inputs.size} inputs, not {expected}")
        return np.fromfile(made, out)

    def _judge(self, ended: Ended) -> None:
        if ended.late:
            raise ConverterInvalid("converter-slow", f"the converter did not end within {self._limits.seconds:g} s")
        if ended.status == UNREADABLE:
            raise ConverterInvalid("converter-unreadable", f"its inline PTX is not evaluated here: {ended.tail.splitlines()[-1]:.200}")
        if ended.status:
            how = f"signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
            raise ConverterInvalid("converter-crashed", f"the converter ended with {how}: {ended.tail[-300:]}")


class Broken:
    """In place of a `Program` that could not be made: every call tells why."""

    def __init__(self, error: ConverterInvalid) -> None:
        self._error = error

    def evaluated(self, one: Converter) -> bool:  # noqa: ARG002  the signature of what it stands for
        return False

    def call(self, one: Converter, inputs: NDArray[Any]) -> NDArray[Any]:  # noqa: ARG002
        raise ConverterInvalid(self._error.reference, self._error.says)


Callee = Program | Broken
Call = Callable[[NDArray[Any]], NDArray[Any]]


def _gone(unit: Unit, said: str) -> dict[str, str]:
    """Return, for each converter whose call has a name that the compiler, in what it *said* of the driver, does not know, that name."""
    unknown = {next(filter(None, names)) for names in _UNKNOWN.findall(said)}
    words = {one.name: set(re.findall(r"\w+", one.call)) for one in unit.converters}
    return {one: min(unknown & used) for one, used in words.items() if unknown & used}


def _excerpt(ended: Ended, tree: Path, folder: Path) -> str:
    """Return the lines of the compiler that say what is wrong, without paths of this machine."""
    text = ended.tail.replace(f"{tree}/", "").replace(f"{folder}/", "").replace(f"{native()}/", "")
    wrong = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return " | ".join(line.strip() for line in wrong[:5])[:600]
