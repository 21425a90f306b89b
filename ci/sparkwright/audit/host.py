"""
What a wheel brings and needs on the host: machine, shared libraries, symbols, operators, and copies
of others' libraries.

Operators are read from the strings in a library's read-only data. torch is told of an operator
twice: ``def`` gives its schema (``name(Tensor a, …) -> Tensor``), ``impl`` its name with the
function. Both are strings that end in NUL. A build that leaves a unit out for its arch keeps the
schema, which a common source file declares, and loses the ``impl``, which the unit itself
registers: so the official vLLM 0.33.0 and a build for 12.1f declare `machete_mm` alike, and only
the former implements it. Which device an implementation is for, the bytes do not say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from sparkwright.audit import checkers
from sparkwright.audit.device import Case
from sparkwright.builder.wheel.elf import NO_BITS, Buffer, Section, SharedObject

#: What provides the driver's functions; torch loads it for itself alone.
DRIVER = "libcuda.so.1"
#: The driver's libraries; a copy made by ``auditwheel repair`` has a hash in its name.
_DRIVER = re.compile(r"lib(cuda|nvidia-[\w-]+|nvcuvid|nvoptix)(-[0-9a-f]{8})?\.so(\.\d+)*")
#: What torch, the CUDA wheels and the system provide.
_OTHERS = re.compile(
    r"lib(torch\w*|c10\w*|cudart|cublas\w*|cudnn\w*|cufft\w*|curand|cusolver\w*|cusparse\w*|cupti|nvrtc[\w-]*"
    r"|nvJitLink|nvshmem\w*|nccl|stdc\+\+|gcc_s|gomp|c|m|pthread|dl|rt)(-[0-9a-f]{8})?\.so(\.\d+)*"
)
#: Distributions whose libraries these are.
_OWNERS = re.compile(r"torch|triton|nvidia-.+|cuda-.+")

_ARROW = b") -> "
_NAME = re.compile(rb"(?:\w+::)?[A-Za-z_]\w*(?:\.\w+)?")
#: The longest schema of vLLM has some 1,500 letters.
_BEFORE, _AFTER = 8192, 512
#: vLLM has 161 operators.
_MOST_OPERATORS = 20_000


def copies(distribution: str, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """
    Yield member, rule and message for each of the members *names* that is a copy of the driver or
    of another's library.
    """
    if _OWNERS.fullmatch(distribution):
        return
    for name in names:
        folder, _, file = name.rpartition("/")
        if _DRIVER.fullmatch(file):
            message = "the driver is the machine's own, and a copy of another version breaks it"
            yield name, "vendored-driver", message
        elif _OTHERS.fullmatch(file) or folder.partition("/")[0].endswith(".libs"):
            yield (
                name,
                "vendored-library",
                "two copies of a library in one process do not share their state",
            )


def check(library: SharedObject, case: Case, platforms: tuple[str, ...]) -> None:
    """Report where the library's needs are not what the tag promises and the policy allows."""
    machine = library.machine
    if machine in ("x86_64", "aarch64") and not all(
        platform.endswith(machine) for platform in platforms
    ):
        case.find("machine-foreign", f"it is for {machine}, the wheel for {', '.join(platforms)}")
    promised = checkers.promised_glibc(platforms)
    if promised and library.versions.get("GLIBC", ()) > promised:
        message = (
            f"it wants GLIBC {library.version('GLIBC')}, the tag promises "
            f"{promised[0]}.{promised[1]}"
        )
        case.find("glibc-newer", message)
    # A driver may have been given another file name.
    if _DRIVER.fullmatch(library.soname):
        case.find("vendored-driver", f"it is known to the loader as {library.soname}")
    for entry in library.rpath:
        inside = not case.ours and (entry == "$ORIGIN" or entry.startswith("$ORIGIN/"))
        if entry not in (case.wants.rpath if case.wants else ()) and not inside:
            case.find("rpath-present", f"it looks for shared libraries in {entry}")
    # The needs of a wheel that no policy describes are shown, and not judged.
    if not (case.ours or case.wants):
        return
    allowed = (*case.policy.needed, *(case.wants.needed if case.wants else ()))
    for name in library.needed:
        if not any(fnmatchcase(name, pattern) for pattern in allowed):
            case.find("needed-foreign", f"it wants {name}")
    if library.driver and DRIVER not in library.needed:
        more = f" and {len(library.driver) - 3} more" if len(library.driver) > 3 else ""
        case.find(
            "driver-unnamed",
            f"it calls {', '.join(library.driver[:3])}{more}, and does not want {DRIVER}",
        )


def operators(
    data: Buffer, sections: Sequence[Section], library: SharedObject, case: Case
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Return the operators that the library implements, and those that it only declares; report those
    that the policy misses.
    """
    declared = sorted(_declared(data, sections))
    implemented = tuple(name for name in declared if _names(data, sections, name))
    wants = case.wants
    for name in wants.symbols if wants else ():
        if name not in library.symbols:
            case.find("symbol-missing", f"it does not define {name}")
    for name in wants.operators if wants else ():
        if name in declared and name not in implemented:
            case.find("operator-missing", f"{name}: declared, not implemented")
        elif name not in declared:
            named = "no schema declares it, although its name is there"
            missing = named if _names(data, sections, name) else "neither declared nor implemented"
            case.find("operator-missing", f"{name}: {missing}")
    return implemented, tuple(name for name in declared if name not in implemented)


def _constants(sections: Iterable[Section]) -> list[tuple[int, int]]:
    constant = (one for one in sections if one.name.startswith(".rodata") and one.kind != NO_BITS)
    return [(one.offset, one.offset + one.size) for one in constant]


def _names(data: Buffer, sections: Iterable[Section], operator: str) -> bool:
    """
    Return whether *operator* stands in the read-only data as a string, or as the end of one, which
    linkers share.
    """
    name = operator.partition("::")[2].encode() or operator.encode()
    return any(data.find(name + b"\0", begin, end) >= 0 for begin, end in _constants(sections))


def _declared(data: Buffer, sections: Iterable[Section]) -> set[str]:
    declared: set[str] = set()
    for begin, end in _constants(sections):
        at, count = begin, 0
        while (at := data.find(_ARROW, at, end)) >= 0 and count < _MOST_OPERATORS:
            count += 1
            # A string begins after the NUL of the one before it, or with the section.
            start = data.rfind(b"\0", max(begin, at - _BEFORE), at) + 1 or max(begin, at - _BEFORE)
            stop = data.find(b"\0", at, min(end, at + _AFTER))
            name = _NAME.match(data[start:at]) if stop > 0 else None
            if name and data[start + name.end() : start + name.end() + 1] == b"(":
                declared.add(name[0].decode())
            at += len(_ARROW)
    return declared
