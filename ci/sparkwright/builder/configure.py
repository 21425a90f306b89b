"""
The real CMake configure: every unit with the gencode that its compiler will be given.

Nothing is read from the text of a CMakeLists: CMake's file API names the targets,
``compile_commands.json`` holds the command of each source, and CMake's trace holds the calls that
led there with their values, also those by which FetchContent would download a vendored source.
These sources come from the lock, verified, and are handed to FetchContent as folders; a source that
CMake asks for and the lock does not pin is refused.
"""

import contextlib
import itertools
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.builder import BuildError
from sparkwright.builder.sandbox import Sandbox
from sparkwright.core.http import redact_credentials
from sparkwright.forks.resolve import require_safe
from sparkwright.forks.stack import ForkLock, SourceError, VendoredLock

#: Folder of the file API's requests and replies, in the build folder.
API = ".cmake/api/v1"
#: Where the trace is written, in the build folder.
TRACE = "sparkwright-trace.json"
#: Folder of the sources that FetchContent brings, in the build folder.
DEPS = "_deps"
#: Commands that may download a source.
DOWNLOADS = frozenset(
    ("fetchcontent_declare", "fetchcontent_populate", "externalproject_add", "file")
)
#: Calls that decide nothing; they are most of a trace.
_IDLE = frozenset(
    (
        "if",
        "elseif",
        "else",
        "endif",
        "message",
        "endforeach",
        "endwhile",
        "endfunction",
        "endmacro",
        "return",
    )
)

_GENCODE = re.compile(r"(?<!\S)(?:-gencode|--generate-code)[ =]arch=(\w+),code=(\S+)")
_ARCH = re.compile(r"(?<!\S)(?:-arch|--gpu-architecture)[ =](\w+)")


class TranslationUnit(msgspec.Struct, frozen=True, order=True):
    """
    A CUDA source that a target compiles.

    Attributes:
        source: Relative to the source tree; a generated one in the build folder begins with
            ``<build>/``.
        gencode: Sorted entries ``virtual:real``, such as ``compute_121f:sm_121f``; PTX is
            ``compute_80:compute_80``.
        object: Path of its object in the build folder.
    """

    target: str
    source: str
    gencode: tuple[str, ...] = ()
    object: str = ""


class Call(msgspec.Struct, frozen=True):
    """
    A command that CMake ran, with the values of its arguments; *file* is named as
    `TranslationUnit.source` is.
    """

    file: str
    line: int
    command: str
    arguments: tuple[str, ...]


def configure(
    source: Path,
    build: Path,
    *,
    defines: Mapping[str, str],
    env: Mapping[str, str],
    log: Path,
    targets: Sequence[str] = (),
    cmake: str | Path = "cmake",
    what: str = "",
    sandbox: Sandbox,
    fresh: bool = False,
) -> list[TranslationUnit]:
    """
    Configure *source* in the folder *build* with the Ninja generator, and return the units, sorted.

    Args:
        defines: Cache entries (``-D``); name ``CMAKE_MAKE_PROGRAM`` if ninja is not on the PATH of
            *env*.
        targets: Read the units of these alone; all targets if empty.
        what: The message of a failure.
        sandbox: Where CMake runs.
        fresh: Forget the cache entries of an earlier configure.

    Raises:
        configure-failed: CMake ended with an error.
        target-unknown: CMake made no target of one of the names.
        build-downloads: CMake tried to download something.
    """
    source, build = source.resolve(), build.resolve()
    query = build / API / "query" / "codemodel-v2"
    query.parent.mkdir(parents=True, exist_ok=True)
    query.touch()
    scripts = {path.name for folder in (source, build / DEPS) for path in folder.rglob("*.cmake")}
    (build / TRACE).unlink(missing_ok=True)
    command = [
        *(cmake, "-S", source, "-B", build, "-G", "Ninja"),
        *(["--fresh"] if fresh else []),
        *(f"-D{name}={value}" for name, value in defines.items()),
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        *("--trace-expand", "--trace-format=json-v1", f"--trace-redirect={build / TRACE}"),
        *(f"--trace-source={name}" for name in ("CMakeLists.txt", *sorted(scripts))),
    ]
    sandbox.run(
        command, env=env, log=log, failure=partial(BuildError, "configure-failed"), what=what
    )
    available = _targets(build)
    if missing := sorted({*targets}.difference(available)):
        # CTest's dashboards are targets, too.
        compiled = sorted(name for name, target in available.items() if target["type"] != "UTILITY")
        raise BuildError(
            "target-unknown",
            f"CMake made no target {', '.join(missing)}.",
            details=[f"targets: {', '.join(compiled) or 'none'}"],
        )
    return sorted(_units(source, build, sandbox, targets or available))


def _targets(build: Path) -> dict[str, Any]:
    """Return the targets of the last configure by name, as CMake's file API describes them."""
    reply = build / API / "reply"
    # Names of replies grow with time; the last one in order is the newest (cmake-file-api(7)).
    index = msgspec.json.decode(max(reply.glob("index-*.json")).read_bytes())
    model = msgspec.json.decode((reply / index["reply"]["codemodel-v2"]["jsonFile"]).read_bytes())
    return {
        target["name"]: msgspec.json.decode((reply / target["jsonFile"]).read_bytes())
        for target in model["configurations"][0]["targets"]
    }


def _units(
    source: Path, build: Path, sandbox: Sandbox, targets: Container[str]
) -> Iterator[TranslationUnit]:
    """Yield the CUDA units of *targets* in the folder *build*, with their commands' gencode."""
    inside = sandbox.sandbox_path(source), sandbox.sandbox_path(build)
    for entry in msgspec.json.decode((build / "compile_commands.json").read_bytes()):
        tokens = shlex.split(entry["command"])
        if ("-x", "cu") in itertools.pairwise(tokens):
            # CMake names an object CMakeFiles/<target>.dir/…; no other field names the target.
            output = tokens[tokens.index("-o") + 1]
            parts = Path(output).parts
            target = parts[parts.index("CMakeFiles") + 1].removesuffix(".dir")
            path = Path(entry["directory"], entry["file"])
            if target in targets:
                yield TranslationUnit(target, _relative(path, *inside), gencode(tokens), output)


def _relative(path: Path, source: Path, build: Path) -> str:
    # The build folder first: it may lie inside of the source tree.
    if path.is_relative_to(build):
        return f"<build>/{path.relative_to(build)}"
    return str(path.relative_to(source) if path.is_relative_to(source) else path)


def calls(source: Path, build: Path, *, sandbox: Sandbox) -> list[Call]:
    """
    Return the calls of the last configure, also of one that failed, in the order in which they ran:
    all of the project's CMakeLists.txt, and `DOWNLOADS` of every other file. Their values may hold
    paths of this machine.
    """
    trace = build.resolve() / TRACE
    lines = trace.read_bytes().splitlines() if trace.exists() else []
    source, build = sandbox.sandbox_path(source.resolve()), sandbox.sandbox_path(build.resolve())
    recorded = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):  # the last line of a CMake that was killed
            entry = msgspec.json.decode(line)
            path, command = Path(entry.get("file", "")), entry.get("cmd", "").lower()
            # CMake's own probes have a CMakeLists.txt too, below the build folder.
            own = path.is_relative_to(source) and not path.is_relative_to(build)
            names = command in DOWNLOADS or (
                command == "set" and _COMMIT.fullmatch(entry["args"][-1] if entry["args"] else "")
            )
            declares = names and (own or path.is_relative_to(build / DEPS))
            if declares or (own and path.name == "CMakeLists.txt" and command not in _IDLE):
                arguments = (
                    text.replace(f"{build}/", "<build>/").replace(f"{source}/", "")
                    for text in entry["args"]
                )
                recorded.append(
                    Call(_relative(path, source, build), entry["line"], command, tuple(arguments))
                )
    return recorded


class CMakeLibrary(msgspec.Struct, frozen=True):
    """
    A shared library that a target makes: its path in the build folder, and whether CMake's install
    rules name it.
    """

    target: str
    path: str
    installed: bool


def libraries(build: Path) -> tuple[CMakeLibrary, ...]:
    """Return the shared libraries of the configured folder *build*, by target."""
    shared = list[CMakeLibrary]()
    for name, target in _targets(build).items():
        if target["type"] in ("MODULE_LIBRARY", "SHARED_LIBRARY"):
            path = target["artifacts"][0]["path"]
            shared.append(CMakeLibrary(name, path, "install" in target))
    return tuple(shared)


def gencode(tokens: Sequence[str]) -> tuple[str, ...]:
    """
    Return the code that nvcc makes with the arguments *tokens*, as sorted entries ``virtual:real``;
    empty if it is left to nvcc.

    CMake and the projects write gencodes; ``-arch`` alone is returned as it is (``native:native``).
    """
    # The argument after -Xcompiler and the like belongs to another program.
    text = re.sub(r"(?<!\S)-X\w+ \S+", "", " ".join(tokens))
    entries = set()
    for virtual, codes in _GENCODE.findall(text):
        for code in re.findall(r"\w+", codes):
            entries.add(f"{virtual}:{code}")
    for arch in _ARCH.findall(text):
        entries.add(f"{arch}:{arch}")
    return tuple(sorted(entries))


# Vendored sources.

#: The options of a declaration that name a download (ExternalProject(3)).
_METHODS = (
    "GIT_REPOSITORY",
    "URL",
    "HG_REPOSITORY",
    "SVN_REPOSITORY",
    "CVS_REPOSITORY",
    "DOWNLOAD_COMMAND",
)
_KEYWORD = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Declaration(msgspec.Struct, frozen=True):
    """
    A source that CMake asked for.

    Attributes:
        name: Its name for FetchContent; of another download its address.
        url: The git repository, or the address of another download.
        ref: The tag, branch or commit; empty for another download.
        origin: ``file:line`` of the call.
        modules: The submodules that the build takes; None for all.
        pinnable: Whether the lock can name it, and the build take it from a folder.
    """

    name: str
    url: str
    ref: str
    origin: str
    modules: tuple[str, ...] | None = None
    pinnable: bool = True


def declarations(
    calls: Iterable[Call], present: Mapping[str, VendoredLock] | None = None
) -> tuple[Declaration, ...]:
    """
    Return the sources that the traced *calls* would download.

    Args:
        present: The sources that are in their folders. CMake may look for the folder itself, and
            declare the source only if it is missing; then a variable holds the commit.

    Raises:
        declaration-unsafe: An address or a ref could be an option or a program.
    """
    declared: dict[str, Declaration] = {}
    variables: dict[str, str] = {}
    for call in calls:
        if call.command in DOWNLOADS and (declaration := _declaration(call)):
            # FetchContent takes the first declaration of a name (FetchContent(3)).
            declared.setdefault(declaration.name.lower(), declaration)
        if call.command == "set" and len(call.arguments) == 2:
            variables.setdefault(call.arguments[1], f"{call.file}:{call.line}")
    for name, entry in (present or {}).items():
        if entry.ref in variables:
            named = Declaration(name, entry.url, entry.ref, variables[entry.ref])
            declared.setdefault(name.lower(), named)
    return tuple(declared.values())


def _declaration(call: Call) -> Declaration | None:
    origin = f"{call.file}:{call.line}"
    # CMake expands a list in place only when it runs the command, after it was traced.
    name, *values = ";".join(call.arguments).split(";")
    following: dict[str, str] = {}
    for key, value in itertools.pairwise([*values, ""]):
        following.setdefault(key, value)
    if call.command == "file":
        url = require_safe("".join(values[:1]), origin)
        return Declaration(url, url, "", origin, pinnable=False) if name == "DOWNLOAD" else None
    methods = {key: require_safe(following[key], origin) for key in _METHODS if following.get(key)}
    if not methods:
        return None
    tag = require_safe(following.get("GIT_TAG", "master"), origin)
    ref = tag if list(methods) == ["GIT_REPOSITORY"] else ""
    modules: tuple[str, ...] | None = None
    if "GIT_SUBMODULES" in values:
        listed = itertools.takewhile(
            lambda value: not _KEYWORD.fullmatch(value),
            values[values.index("GIT_SUBMODULES") + 1 :],
        )
        modules = tuple(filter(None, listed))
    return Declaration(
        require_safe(name, origin),
        next(iter(methods.values())),
        ref,
        origin,
        modules,
        # FetchContent_Populate takes a folder in place of a download only of a declared source; a
        # project that names the folder looks for it before.
        pinnable=bool(ref)
        and (
            call.command == "fetchcontent_declare"
            or (
                call.command == "fetchcontent_populate"
                and following.get("SOURCE_DIR") == f"<build>/{vendored_folder(name)}"
            )
        ),
    )


def check_vendored(
    fork: str,
    declared: Iterable[Declaration],
    locked: ForkLock,
    ignored: Mapping[str, str],
    present: Iterable[str] = (),
) -> None:
    """
    Require that the lock pins every source that CMake asked for.

    Args:
        ignored: Sources that no build needs, with the reason.
        present: The sources that are in their folders.

    Raises:
        source-unlocked: A source is neither locked nor ignored, or is locked otherwise, or CMake
            did not ask for one that is present.
    """
    faults, unused = list[str](), dict.fromkeys(present)
    for source in declared:
        unused.pop(source.name, None)
        fault = mismatch(source, locked.fetched.get(source.name))
        if fault and source.name not in ignored:
            faults.append(f"{source.origin}: {source.name}: {fault}")
    for name in unused:
        ref = locked.fetched[name].ref
        faults.append(f"{name}: CMake does not ask for {ref}, which the lock names")
    if faults:
        raise SourceError(
            "source-unlocked",
            f"The lock does not pin the sources that CMake asks for in {fork}.",
            details=faults,
        )


def mismatch(declaration: Declaration, entry: VendoredLock | None) -> str:
    """Return how *declaration* differs from the lock's *entry*; empty if it is pinned."""
    url, ref = redact_credentials(declaration.url), declaration.ref
    if not declaration.pinnable:
        return f"{url} is a download that the lock cannot pin"
    if entry is None:
        return f"{url} at {ref} is not in the lock"
    pinned_commit = entry.commit if _COMMIT.fullmatch(ref) else ref
    if (entry.url, entry.ref, pinned_commit) == (declaration.url, ref, ref):
        return ""
    locked = f"{redact_credentials(entry.url)} at {entry.ref} ({entry.commit})"
    return f"CMake asks for {url} at {ref}; the lock names {locked}"


def vendored_folder(name: str) -> str:
    """Return the folder of a source in the build folder, as FetchContent itself would choose it."""
    return f"{DEPS}/{name.lower()}-src"
