"""
The cause of a unit's arch: the CMake variable that decided it, and the change that would mend it.

The search goes back from the call that gave the unit its archs, through the calls that set each
variable, to the first call that was given the wanted arch and did not return it. Values come from
CMake's trace, so that only the branches that CMake took are examined; the names of variables come
from the parsed text at the same lines, because the trace no longer has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import PurePosixPath

import msgspec

from sparkwright.builder.arch.rules import ArchRule, CMakeCommand, parse_cmake
from sparkwright.builder.configure import Call, TranslationUnit

#: An arch as CMake, torch or nvcc writes it: 12.1f, 121f-real, 8.0+PTX, code=sm_121f.
_ARCH = re.compile(r"(?:arch=|code=)?(?:sm_|compute_)?(\d+)\.?(\d[af]?)(?:\+PTX|-real|-virtual)?")
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_KEYWORD = re.compile(r"[A-Z_]*ARCH[A-Z_]*")

#: The text of an argument, and its value.
Pair = tuple[str, str]


class ArchCause(msgspec.Struct, frozen=True, order=True):
    """
    The reason for a unit's arch.

    Attributes:
        variable: The CMake variable that would need another value; empty if a list has no name.
        origin: The ``file:line`` that sets it; empty if CMake was given it from outside.
        value: The list in question; empty if it lies inside a function.
        why: The step at which the wanted arch was lost, as a sentence.
        remedy: What to do, as the rest of a sentence.
    """

    variable: str
    origin: str
    value: str
    why: str
    remedy: str


def spell(arch: str) -> str:
    """Return *arch* without its dot, as compilers write it: ``121f``."""
    return arch.replace(".", "")


def elements(value: str) -> set[str]:
    """Return the archs that occur in *value*, each as `spell` writes it."""
    parts = re.split(r"[;,\s\[\]<>]+", value)
    return {"".join(match.groups()) for part in parts if (match := _ARCH.fullmatch(part))}


def generation(text: str) -> str:
    """Return 12 for ``12.1f``, ``121f``, ``compute_120:sm_120``; empty for ``native``."""
    match = re.search(r"(\d+)\.?\d[af]?$", text)
    return match[1] if match else ""


class Trace:
    """
    The calls of one configure, searchable.

    Args:
        calls: In the order in which CMake ran them.
        read: Returns the bytes of a file of the configured source tree, None if there is none.
        arch: The wanted one, such as ``12.1f``.
        rules: The rules that were not applied.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        read: Callable[[str], bytes | None],
        arch: str,
        rules: Sequence[ArchRule],
    ) -> None:
        self.calls, self.arch, self.rules = calls, arch, rules
        self._read = read
        self._commands = cache(self._parse)
        self._pairs = cache(self._align)

    def cause(self, unit: TranslationUnit) -> ArchCause:
        """Return the cause of the arch of *unit*."""
        wanted = spell(self.arch)
        # A unit of another generation lost the arch where the whole family was lost, even if the
        # family was folded before.
        if not any(generation(entry) == generation(self.arch) for entry in unit.gencode):
            wanted = generation(self.arch)
        latest_first = range(len(self.calls) - 1, -1, -1)
        by_source = [index for index in latest_first if _names_source(self.calls[index], unit)]
        by_target = [index for index in latest_first if unit.target in self.calls[index].arguments]
        for index in (*by_source, *by_target):
            text, value = _arch_argument(self._pairs(index))
            if variables := _REFERENCE.findall(text):
                return self._search(index, variables[0], value, wanted)
            if value:
                call = self.calls[index]
                return self._cause("", call, value, f"{call.command} is given {value} as it stands")
        return self._search(len(self.calls), "CMAKE_CUDA_ARCHITECTURES", "", wanted)

    def _search(self, before: int, variable: str, value: str, wanted: str) -> ArchCause:
        """
        Go back from call *before*, which used *variable*, to the call that was given *wanted* (an
        arch, or a whole family) and lost it.
        """
        while (index := self._assignment(before, variable)) is not None:
            call, inputs = self.calls[index], self._inputs(index)
            # A request comes in a variable; a literal list of what a kernel supports may name the
            # arch without asking for it.
            request = next((v for t, v in inputs if "${" in t and _has(v, wanted)), None)
            if request is not None:
                why = f"{call.command} ({_origin(call)}) was given {request} and returned "
                return self._blame(index, variable, wanted, why + (value or "nothing"))
            lists = [(text, listed) for text, listed in inputs if elements(listed)]
            sources = {names[0]: v for t, v in lists if (names := _REFERENCE.findall(t))}
            if not sources:
                literal = lists[0][1] if lists else value
                return self._cause(variable, call, literal, f"{self.arch} never enters it")
            # The convention of such functions: result, list, request; the request often has the
            # name of the result.
            variable = variable if variable in sources else list(sources)[-1]
            before, value = index, sources[variable]
        why = f"{self.arch} is not in what CMake was given from outside"
        return self._cause(variable, None, value, why)

    def _blame(self, index: int, variable: str, wanted: str, why: str) -> ArchCause:
        """Return the argument of call *index* that lacks the arch: a variable, or a literal."""
        pairs = [(t, v) for t, v in self._inputs(index) if elements(v) and not _has(v, wanted)]
        text, value = pairs[0] if pairs else ("", "")
        if names := _REFERENCE.findall(text):
            variable = names[0]
            setter = self._assignment(index, variable)
            return self._cause(variable, None if setter is None else self.calls[setter], value, why)
        return self._cause(variable, self.calls[index], value, why)

    def _assignment(self, before: int, variable: str) -> int | None:
        """Return the last call before *before* that set *variable*."""
        indices = range(before - 1, -1, -1)
        return next((i for i in indices if self._assigned(i) == variable), None)

    def _assigned(self, index: int) -> str:
        """Return the variable that call *index* may set: its first argument, after an operation."""
        texts = [text for text, _ in self._pairs(index)]
        if self.calls[index].command == "list":
            texts = texts[1:] if texts and texts[0].upper() in ("APPEND", "PREPEND") else []
        return texts[0] if texts else ""

    def _inputs(self, index: int) -> list[Pair]:
        """Return the arguments of a call that sets a variable, after the variable."""
        return self._pairs(index)[2 if self.calls[index].command == "list" else 1 :]

    def _align(self, index: int) -> list[Pair]:
        """Return the arguments of a call as they are written, each beside its value."""
        call = self.calls[index]
        command = self._commands(call.file).get((call.command, call.line))
        if command is None:
            return [(value, value) for value in call.arguments]
        pairs, values = [], list(call.arguments)
        for position, argument in enumerate(command.arguments):
            # An unquoted reference becomes as many arguments as its list has elements, or none.
            width = 1
            if not argument.quoted and "${" in argument.text:
                width = max(len(values) - (len(command.arguments) - position - 1), 0)
            pairs.append((argument.text, ";".join(values[:width])))
            del values[:width]
        return pairs

    def _parse(self, file: str) -> dict[tuple[str, int], CMakeCommand]:
        commands = parse_cmake(self._read(file) or b"", file)
        return {(command.name, command.line): command for command in commands}

    def _cause(self, variable: str, call: Call | None, value: str, why: str) -> ArchCause:
        remedy = f"write a rule that appends {self.arch} to it, or list the unit under kept"
        if not call or not elements(value) or value.startswith("-"):
            remedy = (
                f"ask the configure for {self.arch} (TORCH_CUDA_ARCH_LIST or "
                f"CMAKE_CUDA_ARCHITECTURES)"
            )
        for rule in self.rules:
            if call and (rule.file, rule.where[0], rule.expect) == (call.file, variable, value):
                appended = ";".join(rule.append)
                remedy = f"apply rule {rule.name} of archs.yaml, which appends {appended} to it"
        return ArchCause(variable, _origin(call) if call else "", value, why, remedy)


def _has(value: str, wanted: str) -> bool:
    """Return whether *value* has the arch *wanted*, or one of the generation *wanted*."""
    return any(wanted in (element, generation(element)) for element in elements(value))


def _origin(call: Call) -> str:
    return f"{call.file}:{call.line}"


def _names_source(call: Call, unit: TranslationUnit) -> bool:
    folder = PurePosixPath(call.file).parent
    parts = (part for argument in call.arguments for part in argument.split(";") if part)
    return any(unit.source in (part, str(folder / part)) for part in parts)


def _arch_argument(pairs: Sequence[Pair]) -> Pair:
    """
    Return the argument that holds archs: one after a keyword such as CUDA_ARCHS, or one with
    nvcc's flags; a pair of empty texts if there is none.
    """
    after = (second for (text, _), second in pairwise(pairs) if _KEYWORD.fullmatch(text))
    keyed = [pair for pair in after if elements(pair[1])]
    flags = [pair for pair in pairs if "arch=" in pair[1]]
    return [*keyed, *flags, ("", "")][0]
