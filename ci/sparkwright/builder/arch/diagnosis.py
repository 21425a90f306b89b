"""
Why a unit has the arch that it has: the CMake variable that decided it, and what would change that.

The walk goes back from the call that gave the unit its archs, through the calls that set each
variable, to the first one that was given the wanted arch and did not return it. Values come from
CMake's trace, so only the branches that it took are looked at; the names of variables come from the
parsed text at the same lines, because the trace no longer has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

import msgspec

from sparkwright.builder.arch import cmake_file
from sparkwright.builder.arch.cmake_file import Command
from sparkwright.builder.arch.rules import Rule
from sparkwright.builder.configure import Call, Unit
from sparkwright.core.errors import FileError

#: An arch in any of the spellings of CMake, of torch and of nvcc: 12.1f, 121f-real, 8.0+PTX,
#: code=sm_121f.
_ARCH = re.compile(r"(?:arch=|code=)?(?:sm_|compute_)?(\d+)\.?(\d[af]?)(?:\+PTX|-real|-virtual)?")
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_KEYWORD = re.compile(r"[A-Z_]*ARCH[A-Z_]*")

#: An argument as it is written, and the value that it had.
Pair = tuple[str, str]


class Cause(msgspec.Struct, frozen=True, order=True):
    """
    What decided a unit's arch.

    Attributes:
        variable: The CMake variable whose value would have to be another.
        place: Where it is set, as ``file:line``; empty where CMake was given it from outside.
        value: The list in question; empty where it lies inside of a function.
        why: How the wanted arch was lost, as a sentence.
        rule: The rule of archs.yaml that would mend it and was not applied; empty where there is
            none. remedy: What to do, as the rest of a sentence.
    """

    variable: str
    place: str
    value: str
    why: str
    rule: str
    remedy: str


def spell(arch: str) -> str:
    """Return *arch* without its dot, as compilers write it: ``121f``."""
    return arch.replace(".", "")


def elements(value: str) -> set[str]:
    """Return the archs that occur in *value*, each as `spell` writes it."""
    return {
        "".join(found.groups())
        for part in re.split(r"[;,\s\[\]<>]+", value)
        if (found := _ARCH.fullmatch(part))
    }


def generation(text: str) -> str:
    """
    Return 12 for ``12.1f``, for ``121f``, for ``compute_120:sm_120``; an empty string for
    ``native``.
    """
    found = re.search(r"(\d+)\.?\d[af]?$", text)
    return found.group(1) if found else ""


class Causes:
    """
    The calls of one configure, searchable.

    Args:
        calls: In the order in which CMake ran them.
        read: Returns the bytes of a file of the source tree that was configured.
        arch: The wanted one, such as ``12.1f``.
        rules: Those that were not applied.
    """

    def __init__(
        self, calls: Sequence[Call], read: Callable[[str], bytes], arch: str, rules: Sequence[Rule]
    ) -> None:
        self.calls, self.arch, self.rules = calls, arch, rules
        self._read = read
        self._texts: dict[str, dict[tuple[str, int], Command]] = {}
        self._paired: dict[int, list[Pair]] = {}

    def of(self, unit: Unit) -> Cause:
        """Return what decided the arch of *unit*."""
        wanted = spell(self.arch)
        # A unit of another generation lost the arch where the whole family went, even if the family
        # had been folded before.
        if not any(generation(entry) == generation(self.arch) for entry in unit.gencode):
            wanted = generation(self.arch)
        for index, (raw, value) in self._uses(unit):
            references = _REFERENCE.findall(raw)
            if references:
                return self._walk(index, references[0], value, wanted)
            call = self.calls[index]
            return self._cause("", call, value, f"{call.command} is given {value} as it stands")
        return self._walk(len(self.calls), "CMAKE_CUDA_ARCHITECTURES", "", wanted)

    def _uses(self, unit: Unit) -> Iterator[tuple[int, Pair]]:
        """
        Yield the arguments that gave archs to *unit*: calls that name its source before those that
        name its target, the latest first.
        """
        latest_first = range(len(self.calls) - 1, -1, -1)
        by_source = [index for index in latest_first if _mentions(self.calls[index], unit.source)]
        by_target = [index for index in latest_first if unit.target in self.calls[index].arguments]
        for index in (*by_source, *by_target):
            if pair := _given(self._pairs(index)):
                yield index, pair

    def _walk(self, index: int, variable: str, value: str, wanted: str) -> Cause:
        """
        Go back from call *index*, which used *variable*, to the call that got *wanted* (an arch, or
        a whole family) and lost it.
        """
        while True:
            at, inputs = self._assignment(index, variable)
            if at is None:
                return self._cause(
                    variable,
                    None,
                    value,
                    f"{self.arch} is not in what CMake was given from outside",
                )
            call = self.calls[at]
            # What was asked for comes in a variable; a list of what a kernel supports may name the
            # arch and yet not be asked for it.
            asked = next(
                (given for raw, given in inputs if _REFERENCE.search(raw) and _has(given, wanted)),
                None,
            )
            if asked is not None:
                why = (
                    f"{call.command} ({_place(call)}) was given {asked} and returned "
                    f"{value or 'nothing'}"
                )
                for raw, given in inputs:
                    if elements(given) and not _has(given, wanted):
                        return self._list(at, variable, raw, given, why)
                return self._cause(variable, call, "", why)
            onward = {
                found[0]: given
                for raw, given in inputs
                if elements(given) and (found := _REFERENCE.findall(raw))
            }
            if not onward:
                literal = next((given for _, given in inputs if elements(given)), value)
                return self._cause(variable, call, literal, f"{self.arch} never enters it")
            # The convention of such functions: result, list, request; the request often has the
            # name of the result.
            source = variable if variable in onward else list(onward)[-1]
            index, variable, value = at, source, onward[source]

    def _list(self, at: int, variable: str, raw: str, value: str, why: str) -> Cause:
        """
        The list that lacks the arch is an argument of the call *at*: a variable's value, or written
        out there.
        """
        if found := _REFERENCE.findall(raw):
            origin, _ = self._assignment(at, found[0])
            return self._cause(found[0], None if origin is None else self.calls[origin], value, why)
        return self._cause(variable, self.calls[at], value, why)

    def _assignment(self, before: int, variable: str) -> tuple[int | None, list[Pair]]:
        """Return the last call before *before* that set *variable*, with its other arguments."""
        for index in range(before - 1, -1, -1):
            pairs = self._pairs(index)
            skip = 1
            if self.calls[index].command == "list":
                if not pairs or pairs[0][0].upper() not in ("APPEND", "PREPEND"):
                    continue
                skip = 2
            if len(pairs) >= skip and pairs[skip - 1][0] == variable:
                return index, pairs[skip:]
        return None, []

    def _pairs(self, index: int) -> list[Pair]:
        """Return the arguments of a call as they are written, each beside its value."""
        if index not in self._paired:
            call = self.calls[index]
            command = self._commands(call.file).get((call.command, call.line))
            self._paired[index] = (
                _align(command, call) if command else [(value, value) for value in call.arguments]
            )
        return self._paired[index]

    def _commands(self, file: str) -> dict[tuple[str, int], Command]:
        if file not in self._texts:
            try:
                commands = cmake_file.parse(self._read(file), file)
            except (FileNotFoundError, KeyError, FileError) as error:
                # Naming a cause is a help; that a file cannot be read must not hide the mismatch
                # itself.
                if isinstance(error, FileError) and error.reference != "rule-mismatch":
                    raise
                commands = ()
            self._texts[file] = {(command.name, command.line): command for command in commands}
        return self._texts[file]

    def _cause(self, variable: str, call: Call | None, value: str, why: str) -> Cause:
        place = _place(call) if call else ""
        rule = next(
            (
                r
                for r in self.rules
                if call and r.file == call.file and r.where[0] == variable and r.expect == value
            ),
            None,
        )
        if rule:
            remedy = (
                f"apply rule {rule.name} of archs.yaml, which appends {';'.join(rule.append)} to it"
            )
            return Cause(variable, place, value, why, rule.name, remedy)
        if (
            not call
            or not value
            or not any(digit.isdigit() for digit in value)
            or value.startswith("-")
        ):
            remedy = (
                f"ask the configure for {self.arch} (TORCH_CUDA_ARCH_LIST or "
                f"CMAKE_CUDA_ARCHITECTURES)"
            )
        else:
            remedy = (
                f"write a rule that appends {self._entry(value)} to it, or list the unit "
                f"under kept with a reason"
            )
        return Cause(variable, place, value, why, "", remedy)

    def _entry(self, value: str) -> str:
        """
        Return the arch as *value* would spell it; a list with suffixes names a family by its first
        member (12.0f).
        """
        major = self.arch.split(".")[0]
        family = (
            f"{major}.0f"
            if self.arch.endswith("f") and re.search(r"\d[af]|\+PTX", value)
            else self.arch.rstrip("af")
        )
        return family if "." in value else spell(self.arch)


def _align(command: Command, call: Call) -> list[Pair]:
    result, values = [], list(call.arguments)
    for position, argument in enumerate(command.arguments):
        # An unquoted reference becomes as many arguments as its list has elements, or none.
        width = 1
        if argument.quoting == "unquoted" and "${" in argument.text:
            width = max(len(values) - (len(command.arguments) - position - 1), 0)
        result.append((argument.text, ";".join(values[:width])))
        del values[:width]
    return result


def _has(value: str, wanted: str) -> bool:
    """
    Say whether *value* names the arch *wanted*, or any of the generation where *wanted* is one.
    """
    return any(wanted in (element, generation(element)) for element in elements(value))


def _place(call: Call) -> str:
    return f"{call.file}:{call.line}"


def _mentions(call: Call, source: str) -> bool:
    folder = PurePosixPath(call.file).parent
    return any(
        source in (part, str(folder / part))
        for argument in call.arguments
        for part in argument.split(";")
        if part
    )


def _given(pairs: list[Pair]) -> Pair | None:
    """
    Return the argument that holds archs: the one behind a keyword such as CUDA_ARCHS, or one with
    nvcc's flags.
    """
    for (raw, _), following in zip(pairs, [*pairs[1:], None], strict=True):
        if following and _KEYWORD.fullmatch(raw) and elements(following[1]):
            return following
    return next((pair for pair in pairs if "arch=" in pair[1]), None)
