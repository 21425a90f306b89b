"""
The real CMake configure, and what can be read from it: every unit with the gencode that its
compiler will be given.

Three things are read, none of them from the text of a CMakeLists: CMake's file API says which
sources each target compiles and in which language, ``compile_commands.json`` holds the command of
each, and CMake's trace holds the calls that led there with their values.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sparkwright.builder.environment.sandbox import Sandbox
from sparkwright.builder.errors import BuildError

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
#: nvcc's options whose next argument belongs to another program.
_PASSED_ON = frozenset(
    ("-Xcompiler", "-Xcudafe", "-Xptxas", "-Xnvlink", "-Xlinker", "-Xarchive", "-Xfatbinary")
)
_GENCODE = ("-gencode", "--generate-code")
_ARCH = ("-arch", "--gpu-architecture")
_CODE = ("-code", "--gpu-code")


class Unit(msgspec.Struct, frozen=True, order=True):
    """
    One source that a target compiles.

    Attributes:
        source: Relative to the source tree; a generated one in the build folder begins with
            ``<build>/``. language: CMake's name of it: ``CUDA``, ``CXX``. gencode: Sorted entries
            ``virtual:real``, such as ``compute_121f:sm_121f``; PTX is ``compute_80:compute_80``.
            object: What it is compiled to, relative to the build folder.
    """

    target: str
    source: str
    language: str
    gencode: tuple[str, ...] = ()
    object: str = ""


class Call(msgspec.Struct, frozen=True):
    """
    A command that CMake ran, with the values of its arguments; *file* is named as `Unit.source` is.
    """

    file: str
    line: int
    command: str
    arguments: tuple[str, ...]


class Configured(msgspec.Struct, frozen=True):
    """
    What a configure said.

    Attributes:
        cmake: Its version.
        compilers: Name and version by language, such as ``NVIDIA 13.0.88``.
        units: Sorted, of the targets that were asked for.
        calls: In the order in which they ran: all of the traced files, and `DOWNLOADS` of every
            other file. Their values may hold
            paths of this machine: this record may be kept, not hashed.
    """

    cmake: str
    compilers: dict[str, str]
    units: tuple[Unit, ...]
    calls: tuple[Call, ...]


class _Seen(NamedTuple):
    """The folders as CMake sees them, which is how its files name them."""

    source: Path
    build: Path


def configure(
    source: Path,
    build: Path,
    *,
    defines: Mapping[str, str],
    env: Mapping[str, str],
    log: Path,
    targets: Sequence[str] = (),
    cmake: str | Path = "cmake",
    traced: Iterable[str] = ("CMakeLists.txt",),
    what: str = "",
    sandbox: Sandbox | None = None,
) -> Configured:
    """
    Configure *source* in the folder *build* with the Ninja generator, and read what will be
    compiled.

    Args:
        defines: Cache entries (``-D``); name ``CMAKE_MAKE_PROGRAM`` where ninja is not on the PATH
            of *env*. targets: Read the units of these alone; all targets when empty. traced: Files
            whose calls are recorded; CMake tells them apart by their last component. what: What
            failed, for the error. sandbox: Where CMake runs; without a network, but in this view of
            the file system, when it is left out.

    Raises:
        configure-failed: CMake ended with an error, or made no target of one of the names.
        build-downloads: It tried to download something.
    """
    sandbox = sandbox or Sandbox.create({})
    source, build = source.resolve(), build.resolve()
    query = build / API / "query"
    query.mkdir(parents=True, exist_ok=True)
    for name in ("codemodel-v2", "toolchains-v1"):
        (query / name).touch()
    names = {Path(file).name for file in traced}
    folders = (source, build / DEPS)
    files = {path.name for folder in folders for path in folder.rglob("*.cmake")} | {
        "CMakeLists.txt"
    }
    tracing = [f"--trace-source={name}" for name in sorted(names | files)]
    (build / TRACE).unlink(missing_ok=True)
    settings = {**defines, "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}
    seen = _Seen(sandbox.sandbox_path(source), sandbox.sandbox_path(build))
    sandbox.run(
        [
            cmake,
            "-S",
            seen.source,
            "-B",
            seen.build,
            "-G",
            "Ninja",
            *(f"-D{name}={value}" for name, value in settings.items()),
            "--trace-expand",
            "--trace-format=json-v1",
            f"--trace-redirect={seen.build / TRACE}",
            *tracing,
        ],
        env=env,
        log=log,
        failure=partial(BuildError, "configure-failed"),
        what=what,
    )
    index = _index(build)
    return Configured(
        cmake=index["cmake"]["version"]["string"],
        compilers=_compilers(build, index),
        units=tuple(sorted(_units(seen, build, index, targets))),
        calls=calls(source, build, sandbox=sandbox, traced=names),
    )


def _index(build: Path) -> Any:
    # Names of replies grow with time; the last one in order is the newest (cmake-file-api(7)).
    newest = max((build / API / "reply").glob("index-*.json"))
    return msgspec.json.decode(newest.read_bytes())


def _reply(build: Path, index: Any, kind: str) -> Any:
    return msgspec.json.decode(
        (build / API / "reply" / index["reply"][kind]["jsonFile"]).read_bytes()
    )


def _compilers(build: Path, index: Any) -> dict[str, str]:
    found = {
        tool["language"]: tool["compiler"]
        for tool in _reply(build, index, "toolchains-v1")["toolchains"]
    }
    return {
        language: f"{found[language].get('id', '')} {found[language].get('version', '')}".strip()
        for language in sorted(found)
    }


def _units(seen: _Seen, build: Path, index: Any, targets: Sequence[str]) -> Iterator[Unit]:
    """Yield each unit that the file API names, with the gencode of its command."""
    commands = _commands(build)
    known = {
        entry["name"]: entry["jsonFile"]
        for entry in _reply(build, index, "codemodel-v2")["configurations"][0]["targets"]
    }
    if missing := [name for name in targets if name not in known]:
        raise BuildError(
            "configure-failed",
            f"CMake made no target {', '.join(missing)}.",
            details=[f"targets: {', '.join(sorted(known)) or 'none'}"],
        )
    for name in targets or known:
        target = msgspec.json.decode((build / API / "reply" / known[name]).read_bytes())
        for group in target.get("compileGroups", ()):
            for position in group["sourceIndexes"]:
                path = seen.source / target["sources"][position]["path"]
                tokens = commands.get((name, path))
                if tokens is None:
                    raise BuildError(
                        "configure-failed",
                        f"CMake wrote no command for {path.name} of target {name}.",
                        details=[f"build folder: {build}"],
                    )
                code = gencode(tokens) if group["language"] == "CUDA" else ()
                object_path = tokens[tokens.index("-o") + 1]
                yield Unit(name, _relative(path, seen), group["language"], code, object_path)


def _commands(build: Path) -> dict[tuple[str, Path], list[str]]:
    """Return the arguments of every compile command, by target and source."""
    result = {}
    path = build / "compile_commands.json"
    for entry in msgspec.json.decode(path.read_bytes()) if path.exists() else ():
        tokens = shlex.split(entry["command"])
        # CMake names an object CMakeFiles/<target>.dir/…; the database itself does not name the
        # target.
        parts = Path(tokens[tokens.index("-o") + 1]).parts
        target = parts[parts.index("CMakeFiles") + 1].removesuffix(".dir")
        result[target, Path(entry["directory"], entry["file"])] = tokens
    return result


def _relative(path: Path, seen: _Seen) -> str:
    # The build folder first: it may lie inside of the source tree.
    if path.is_relative_to(seen.build):
        return f"<build>/{path.relative_to(seen.build)}"
    return str(path.relative_to(seen.source)) if path.is_relative_to(seen.source) else str(path)


def calls(
    source: Path, build: Path, *, sandbox: Sandbox, traced: Collection[str] = ()
) -> tuple[Call, ...]:
    """Return the calls of the last configure, also of one that failed; see `Configured`."""
    trace = build.resolve() / TRACE
    if not trace.exists():
        return ()
    seen = _Seen(sandbox.sandbox_path(source.resolve()), sandbox.sandbox_path(build.resolve()))
    return tuple(_calls(seen, trace.read_bytes().splitlines(), traced))


def _calls(seen: _Seen, lines: Iterable[bytes], traced: Collection[str]) -> Iterator[Call]:
    for line in lines:
        try:
            entry = msgspec.json.decode(line)
        except msgspec.DecodeError:
            # The last line of a CMake that was killed.
            continue
        path, command = Path(entry.get("file", "")), entry.get("cmd", "").lower()
        # CMake's own probes have a CMakeLists.txt too, below the build folder.
        own = path.is_relative_to(seen.source) and not path.is_relative_to(seen.build)
        if command in _IDLE or not (own or path.is_relative_to(seen.build / DEPS)):
            continue
        if command in DOWNLOADS or (own and path.name in traced):
            prefixes = ((f"{seen.build}/", "<build>/"), (f"{seen.source}/", ""))
            arguments = list(entry["args"])
            for prefix, name in prefixes:
                arguments = [argument.replace(prefix, name) for argument in arguments]
            yield Call(_relative(path, seen), entry["line"], command, tuple(arguments))


class Library(msgspec.Struct, frozen=True):
    """
    A shared library that a target makes: its path in the build folder, and whether CMake's install
    rules name it.
    """

    target: str
    path: str
    installed: bool


def libraries(build: Path) -> tuple[Library, ...]:
    """Return the shared libraries of the configured folder *build*, by target."""
    entries = _reply(build, _index(build), "codemodel-v2")["configurations"][0]["targets"]
    targets = [
        msgspec.json.decode((build / API / "reply" / entry["jsonFile"]).read_bytes())
        for entry in entries
    ]
    return tuple(
        Library(target["name"], target["artifacts"][0]["path"], "install" in target)
        for target in targets
        if target["type"] in ("MODULE_LIBRARY", "SHARED_LIBRARY")
    )


def gencode(tokens: Sequence[str]) -> tuple[str, ...]:
    """
    Return the code that nvcc makes when it is run with *tokens*, as sorted entries
    ``virtual:real``; empty where it is left to nvcc.

    ``all``, ``all-major`` and ``native`` are returned as they are (``native:native``): what they
    mean is not in the command.
    """
    found: set[str] = set()
    arch, codes = "", []
    for option, value in _options(tokens):
        if option in _GENCODE:
            fields = dict(field.split("=", 1) for field in _split(value) if "=" in field)
            found |= {
                f"{fields.get('arch', '')}:{code}"
                for code in _split(fields.get("code", "").strip('[]"'))
            }
        elif option in _ARCH:
            arch = value
        else:
            codes += _split(value.strip('[]"'))
    if codes:
        found |= {f"{arch.replace('sm_', 'compute_')}:{code}" for code in codes}
    elif arch.startswith("sm_"):
        # Shorthand (nvcc --dryrun, 13.0): the real arch and its PTX; with a suffix, PTX of the
        # plain arch as well.
        virtual = arch.replace("sm_", "compute_")
        plain = virtual.rstrip("af")
        found |= {f"{virtual}:{arch}", f"{virtual}:{virtual}", f"{plain}:{plain}"}
    elif arch:
        found.add(f"{arch}:{arch}")
    return tuple(sorted(found))


def _options(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield nvcc's arch options with their values, however the two are joined."""
    rest = iter(tokens)
    for token in rest:
        name, joined, value = token.partition("=")
        if token in _PASSED_ON:
            next(rest, None)
        elif name in (*_GENCODE, *_ARCH, *_CODE):
            yield name, value if joined else next(rest, "")


def _split(text: str) -> list[str]:
    """
    Split at commas that no brackets or quotes enclose; both group a list of codes, and nvcc takes
    either.
    """
    parts, inside = [""], False
    for letter in text:
        if letter in '[]"':
            inside = not inside
        if letter == "," and not inside:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
