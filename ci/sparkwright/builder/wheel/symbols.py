"""
Undefined symbols: imports of a library that nothing it is loaded with defines, so that loading it
fails.

A symbol is looked up where the loader looks: in the libraries that the library names, in those that
they name, and in those that are loaded for all. These are libraries of its own wheel, of the locked
wheels of torch and CUDA, and of the system. A symbol of the system has a version, such as
``GLIBC_2.28``, and whether the platform promises it is compared elsewhere (`elf.required_glibc`).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkwright.builder import BuildError, toolchain
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import SharedObject
from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.core.files import content_key
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.forks.context import RunContext

#: The folders of the locked wheels that hold libraries.
_FOLDERS = ("torch/lib", "nvidia/*/lib", "tvm_ffi/lib")
#: Loaded for every library: by ``import torch``, by FlashInfer, and with Python.
_LOADED_FOR_ALL = ("libtorch_global_deps.so", "libtvm_ffi.so")
_INTERPRETER = ctypes.CDLL(None)
#: Libraries of the GPU driver, which are the machine's own, and their functions; cuFile, whose
#: functions begin alike, is another library.
DRIVER = {
    "libcuda.so.1": re.compile(r"cu(?!File)[A-Z]\w*"),
    "libnvidia-ml.so.1": re.compile(r"nvml[A-Z]\w*"),
}
#: Libraries of the system, and the versions of their symbols.
_SYSTEM = re.compile(
    r"lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|python3[\w.]*)\.so[.\d]*|ld-linux[\w-]*\.so\.\d"
)
_SYSTEM_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_")
#: In a mangled name: a namespace of torch; else a function of its stable ABI.
_TORCH = re.compile(r"(?<!\d)(?:2at|3c10|5torch)(?=\d)|^(?:aoti_)?torch_")
#: Symbols of a library that a message names, and letters of each; symbols that an error explains.
SHOWN, _LONGEST, _MOST_EXPLAINED = 5, 300, 20
_SOURCES = frozenset((".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx"))

Libraries = Mapping[str, SharedObject]


def set_key(context: RunContext) -> str:
    """Return the key of `linked_libraries`, from the hashes of their wheels."""
    return content_key("symbols", {"wheels": toolchain.linked_wheels(context), "form": 2})


def linked_libraries(context: RunContext, *, fetch: bool = True) -> Libraries | None:
    """
    Return the libraries of the locked wheels of torch and CUDA for the machine of *context*, by
    file name.

    Args:
        fetch: Install the tools if they are not, and the libraries were not read before; else
            return None.

    Raises:
        tool-missing, source-unreachable, source-mismatch, offline, disk-full: As
            `toolchain.target`.
    """
    key = set_key(context)
    if stored := context.store.get("symbols", key, dict[str, SharedObject]):
        return stored
    if not fetch and (context.cross or not toolchain.installed(context)):
        return None
    tools, libraries = toolchain.target(context, toolchain.obtain(context)), {}
    root = tools.libraries or next(tools.root.glob("lib/python3.*/site-packages"))
    for path in (path for folder in _FOLDERS for path in root.glob(f"{folder}/*.so*")):
        # The other names of a library are links.
        if not path.is_symlink():
            with elf.mapped(path) as data:
                libraries[path.name] = elf.shared_object(data)
    context.store.put("symbols", key, libraries)
    return libraries


def undefined(library: SharedObject, wheel: Libraries, linked: Libraries) -> list[str]:
    """
    Return the imports of *library* that nothing defines, sorted.

    If the library needs one that is neither in the two sets nor of the system, only symbols of
    torch are judged: any other may be defined there.

    Args:
        wheel: The libraries of its wheel, by file name.
        linked: As `linked_libraries` returns them.
    """
    reached, unknown = dict[str, SharedObject](), False
    pending = [(name, name in library.needed) for name in (*library.needed, *_LOADED_FOR_ALL)]
    for name, of_wheel in pending:
        if name in reached:
            continue
        if provider := wheel.get(name) or linked.get(name):
            reached[name] = provider
            pending += [(needed, name in wheel) for needed in provider.needed]
        elif of_wheel and name not in DRIVER and not _SYSTEM.fullmatch(name):
            unknown = True
    driver = [functions for name, functions in DRIVER.items() if (name, True) in pending]
    return sorted(
        symbol
        for symbol, version in library.imports.items()
        if not _SYSTEM_VERSION.match(version)
        # Python's are compared with its limited API elsewhere.
        and not symbol.startswith(("Py", "_Py"))
        and not any(functions.fullmatch(symbol) for functions in driver)
        and not any(symbol in provider.symbols for provider in reached.values())
        # A library that was linked without naming libc has no versions for its symbols.
        and not hasattr(_INTERPRETER, symbol)
        and (not unknown or _TORCH.search(symbol))
    )


def listed(symbols: Sequence[str]) -> str:
    """Return the first of *symbols* as C++ writes them, if binutils is here; and their number."""
    names = [symbol[:_LONGEST] for symbol in symbols[:SHOWN]]
    with contextlib.suppress(CommandError):
        names = [name[:_LONGEST] for name in process.output(["c++filt", "--", *names]).split("\n")]
    more = f"{len(symbols) - SHOWN} more" if symbols[SHOWN:] else ""
    return "; ".join(filter(None, [*names, more]))


# After linking.


def check(
    context: RunContext,
    compiled: Mapping[str, bytes],
    build: Path,
    source: Path,
    base: Path | None = None,
) -> tuple[tuple[str, str], ...]:
    """
    Check that every symbol that the libraries of a wheel need is defined; return those that are
    not, with their members, if the official libraries need them as well.

    A symbol of torch is never let pass so: the official libraries may be made for another torch.

    Args:
        compiled: The bytes of the libraries that were compiled here, by member.
        build: The folder with the objects that they were linked of.
        source: The folder of the sources.
        base: The official wheel, whose other libraries stay.

    Raises:
        undefined-symbol: One is not defined; the details name it, the units that need it, and what
            would define it.
    """
    official, linked = dict[str, SharedObject](), linked_libraries(context) or {}
    if base:
        with zip_file(base) as wheel:
            for name, info in zip_members(wheel, base.name).items():
                if (data := wheel.read(info)).startswith(elf.MAGIC):
                    official[name] = elf.shared_object(data)
    members = official | {name: elf.shared_object(data) for name, data in compiled.items()}
    by_file = {Path(name).name: library for name, library in members.items()}
    inherited, faults = list[tuple[str, str]](), list[tuple[str, str]]()
    for name, library in members.items():
        for symbol in undefined(library, by_file, linked):
            passes = name in official and symbol in official[name].imports
            (inherited if passes and not _TORCH.search(symbol) else faults).append((name, symbol))
    if faults:
        raise BuildError(
            "undefined-symbol",
            f"{len(faults)} symbols that the wheel's libraries need are defined nowhere.",
            details=_explanations(faults[:_MOST_EXPLAINED], build, source),
        )
    return tuple(inherited)


def _explanations(faults: Sequence[tuple[str, str]], build: Path, source: Path) -> list[str]:
    """Return each member and symbol of *faults* with the units that need it or have it."""
    units, details = dict[str, dict[str, bool]](), []
    for path in sorted(build.rglob("*.o")):
        folder, _, unit = str(path.relative_to(build)).partition(".dir/")
        target = folder.rpartition("CMakeFiles/")[2]
        with elf.mapped(path) as data:
            name = f"{unit.removesuffix('.o')} (target {target})" if unit else folder
            units[name] = elf.object_symbols(data)
    for member, symbol in faults:
        text = listed([symbol])
        needing, defining = (
            ", ".join([name for name, names in units.items() if names.get(symbol) is has][:SHOWN])
            for has in (False, True)
        )
        # A definition in a source: the last part of the name, arguments in parentheses, a block.
        function = re.escape(re.split(r"[\s:]", re.split(r"[(<]", text)[0])[-1])
        pattern = re.compile(rf"\b{function}\s*\([^;{{}}]*\)[^;{{}}()]*\{{".encode())
        files = [] if defining or _TORCH.search(symbol) else sorted(source.rglob("*"))
        sources = [
            str(path.relative_to(source))
            for path in files
            if path.suffix in _SOURCES and path.is_file() and pattern.search(path.read_bytes())
        ]
        parts = [
            f"needed by {needing}" if needing else "",
            f"{defining} defines it, and is not linked" if defining else "",
            f"{', '.join(sources[:SHOWN])} would define it, and no unit has it" if sources else "",
        ]
        details.append("; ".join(filter(None, [f"{member}: {text}", *parts])))
    return details
