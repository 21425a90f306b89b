"""
Undefined symbols: imports of a library that nothing it is loaded with defines, so that loading it
fails.

A symbol is looked up where the loader looks: in the libraries that the library names, in those that
they name, and in those that are loaded for all. These are libraries of its own wheel, of the locked
wheels of torch and CUDA, and of the system. A symbol of the system has a version, such as
``GLIBC_2.28``, and whether the platform promises it is compared elsewhere (`elf.required_glibc`).
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkwright.builder import toolchain
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import SharedObject
from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.core.files import content_key
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceUnreachable

#: The folders of the locked wheels that hold libraries.
_FOLDERS = ("torch/lib", "nvidia/*/lib", "tvm_ffi/lib")
#: Loaded for every library: by ``import torch``, by FlashInfer, and with Python.
_LOADED_FOR_ALL = ("libtorch_global_deps.so", "libtvm_ffi.so")
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
#: The library of C++, and its symbols and those of libgcc_s, which it brings: of its namespaces,
#: types of the language, ``new`` and ``delete``, and functions that compilers call.
_CXX = {
    "libstdc++.so.6": re.compile(
        r"(_Z(T([VTIS]|[hv][n\d_]+))?(N[VKRO]*)?(S[tabsiod]|10__cxxabiv1|9__gnu_cxx)"
        r"|_Z(n[wa]|d[la]|T[IS]P?K?D?[a-z])|__(cxa|gxx)_|__dynamic_cast|_Unwind_)\w*"
    )
}
#: In a mangled name: a namespace of torch; else a function of its stable ABI.
_TORCH = re.compile(r"(?<!\d)(?:2at|3c10|5torch)(?=\d)|^(?:aoti_)?torch_")
#: Symbols of a library that a message names, and letters of each.
SHOWN, _LONGEST = 5, 300

Libraries = Mapping[str, SharedObject]


def set_key(context: RunContext) -> str:
    """
    Return the key of `linked_libraries`, from the names and versions of their wheels.

    The hashes differ by Python and the libraries do not, so a stored audit also serves a host with
    another Python.
    """
    wheels = toolchain.linked_wheels(context)
    releases = sorted("-".join(filename.split("-")[:2]) for _, filename, _ in wheels)
    return content_key("symbols", {"releases": releases, "machine": context.machine, "form": 4})


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
    for folder in _FOLDERS:
        for path in root.glob(f"{folder}/*.so*"):
            # The other names of a library are links.
            if not path.is_symlink():
                with elf.mapped(path) as data:
                    libraries[path.name] = elf.shared_object(data)
    context.store.put("symbols", key, libraries)
    return libraries


def official_libraries(context: RunContext, *, fetch: bool) -> Libraries:
    """
    Return the libraries of the locked official wheels for the machine of *context*, by member; a
    wheel that cannot be had gives none.

    Args:
        fetch: Download the wheels that are not in the store.

    Raises:
        source-mismatch, disk-full: As `package_index.obtain`.
    """
    libraries = dict[str, SharedObject]()
    for fork in context.lock.forks.values():
        with contextlib.suppress(SourceUnreachable):
            if locked := fork.bases.get(context.machine):
                offline = context.offline or not fetch
                file = locked.name, locked.filename, locked.sha256
                libraries |= _read(
                    package_index.obtain(context.store, *file, size=locked.size, offline=offline)
                )
    return libraries


def _read(wheel: Path) -> dict[str, SharedObject]:
    """Return the libraries of the official *wheel*, by member."""
    libraries = dict[str, SharedObject]()
    with zip_file(wheel) as archive:
        for name, info in zip_members(archive, wheel.name).items():
            if (data := archive.read(info)).startswith(elf.MAGIC):
                libraries[name] = elf.shared_object(data)
    return libraries


def undefined(wheel: Libraries, linked: Libraries) -> dict[str, list[str]]:
    """
    Return, for each library of *wheel* that has some, the imports that nothing defines, sorted.

    If a library needs one that is neither in the two sets nor of the system, only symbols of torch
    are judged: any other may be defined there.

    Args:
        wheel: The libraries of a wheel, by member. Of several with one file name, each may be the
            one that is loaded.
        linked: As `linked_libraries` returns them.
    """
    own, outside = dict[str, list[SharedObject]](), DRIVER | _CXX
    for member, library in wheel.items():
        own.setdefault(Path(member).name, []).append(library)
    # A library that was linked without naming libc has no versions for its symbols.
    system = set[str]()
    for library in linked.values():
        for symbol, versions in library.imports.items():
            if "GLIBC_" in " ".join(versions):
                system.add(symbol)
    faults = dict[str, list[str]]()
    for member, library in wheel.items():
        lacking = set[str]()
        for symbol in library.imports.keys() - system:
            versioned = all(map(_SYSTEM_VERSION.match, library.imports[symbol]))
            # Python's are compared with its limited API elsewhere.
            if not versioned and not symbol.startswith(("Py", "_Py")):
                lacking.add(symbol)
        reached, needed_names = set[str](), {*library.needed}
        waiting = [*library.needed, *_LOADED_FOR_ALL]
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            for provider in own.get(name) or ([linked[name]] if name in linked else []):
                lacking -= provider.symbols
                waiting += provider.needed
                if name in own:
                    needed_names.update(provider.needed)
        missing = needed_names - own.keys() - linked.keys() - outside.keys()
        brought = set[str]() if all(map(_SYSTEM.fullmatch, missing)) else lacking
        for name in outside.keys() & reached:
            brought = brought | {symbol for symbol in lacking if outside[name].fullmatch(symbol)}
        torch = {symbol for symbol in lacking if _TORCH.search(symbol)}
        if faulty := sorted(lacking - brought | torch):
            faults[member] = faulty
    return faults


def inherited(symbol: str, official: SharedObject | None) -> bool:
    """
    Return whether an undefined *symbol* may pass because the *official* library needs it as well.

    A symbol of torch never may: the official libraries may be made for another torch.
    """
    return official is not None and symbol in official.imports and not _TORCH.search(symbol)


def listed(symbols: Sequence[str]) -> str:
    """Return the first of *symbols* as C++ writes them, if binutils is here; and their number."""
    names = [symbol[:_LONGEST] for symbol in symbols[:SHOWN]]
    with contextlib.suppress(CommandError):
        names = [name[:_LONGEST] for name in process.output(["c++filt", "--", *names]).split("\n")]
    more = f"{len(symbols) - SHOWN} more" if symbols[SHOWN:] else ""
    return "; ".join(filter(None, [*names, more]))
