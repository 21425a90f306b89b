"""
The operators that a library registers with torch, from the strings in its read-only data.

torch is told of an operator twice: ``def`` gives its schema (``name(Tensor a, …) -> Tensor``), ``impl`` its name with the function. Both
are strings that end in NUL. A build that leaves a unit out for its arch keeps the schema, which a common source file declares, and loses
the ``impl``, which the unit itself registers: so the official vLLM 0.33.0 and a build for 12.1f declare `machete_mm` alike, and only the
former implements it. Which device an implementation is for, the bytes do not say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from sparkwright.audit.elf_sections import NO_BITS, Buffer, Section

_ARROW = b") -> "
_NAME = re.compile(rb"(?:\w+::)?[A-Za-z_]\w*(?:\.\w+)?")
#: The longest schema of vLLM has some 1,500 letters.
_BEFORE, _AFTER = 8192, 512
#: vLLM has 161; what has more is no list of operators.
_MOST = 20_000


class Operators(msgspec.Struct, frozen=True):
    """The operators whose schema a library declares, and those of them that it also implements; by name, with the overload."""

    declared: tuple[str, ...]
    implemented: tuple[str, ...]


def _constants(sections: Iterable[Section]) -> list[tuple[int, int]]:
    return [(one.offset, one.offset + one.size) for one in sections if one.name.startswith(".rodata") and one.kind != NO_BITS]


def implements(data: Buffer, sections: Iterable[Section], name: str) -> bool:
    """Return whether *name* stands in the read-only data as a string, or as the end of one, which linkers share."""
    wanted = name.partition("::")[2].encode() or name.encode()
    return any(data.find(wanted + b"\0", begin, end) >= 0 for begin, end in _constants(sections))


def registered(data: Buffer, sections: tuple[Section, ...]) -> Operators:
    """Return the operators of the library in *data*."""
    declared: set[str] = set()
    for begin, end in _constants(sections):
        at, seen = begin, 0
        while (at := data.find(_ARROW, at, end)) >= 0 and seen < _MOST:
            seen += 1
            # A string begins after the NUL of the one before it, or with the section.
            start = data.rfind(b"\0", max(begin, at - _BEFORE), at) + 1 or max(begin, at - _BEFORE)
            stop = data.find(b"\0", at, min(end, at + _AFTER))
            name = _NAME.match(data[start:at]) if stop > 0 else None
            if name and data[start + name.end() : start + name.end() + 1] == b"(":
                declared.add(name[0].decode())
            at += len(_ARROW)
    return Operators(tuple(sorted(declared)), tuple(name for name in sorted(declared) if implements(data, sections, name)))
