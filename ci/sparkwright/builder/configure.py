"""
The real CMake configure: every unit with the gencode that its compiler will be given.

Nothing is read from the text of a CMakeLists: CMake's file API names the sources and the language
of each target, ``compile_commands.json`` holds the command of each source, and CMake's trace holds
the calls that led there with their values.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sparkwright.builder.environment import toolchain
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
#: The words in which projects refuse a compiler: vLLM, PyTorch, CUTLASS, oneDNN, CMake itself.
_REFUSED_COMPILER = re.compile(
    r"(?P<compiler>GCC|gcc|G\+\+|g\+\+|GNU|Clang|clang|compiler)\b[^.;\n]{0,60}?"
    r"(?:>=|at least|requires?|(?:newer|later|higher) than|minimum(?: version)?(?: "
    r"is)?)\s*(?:version\s*)?(?P<version>\d+(?:\.\d+)*).{0,400}"
)
_VERSION_HERE = re.compile(r"\b(?:found|got|have|is|version)\b\D{0,20}(\d+(?:\.\d+)+)")
_GENCODE = ("-gencode", "--generate-code")
_ARCH = ("-arch", "--gpu-architecture")
_CODE = ("-code", "--gpu-code")


class TranslationUnit(msgspec.Struct, frozen=True, order=True):
    """
    A source that a target compiles.

    Attributes:
        source: Relative to the source tree; a generated one in the build folder begins with
            ``<build>/``.
        language: CMake's name of it: ``CUDA``, ``CXX``.
        gencode: Sorted entries ``virtual:real``, such as ``compute_121f:sm_121f``; PTX is
            ``compute_80:compute_80``.
        object: Path of its object in the build folder.
    """

    target: str
    source: str
    language: str
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


class Configured(msgspec.Struct, frozen=True):
    """
    The result of a configure.

    Attributes:
        units: Sorted, of the requested targets.
        calls: In the order in which they ran: all of the traced files, and `DOWNLOADS` of every
            other file. Their values may hold paths of this machine: they may be stored, not
            hashed.
    """

    units: tuple[TranslationUnit, ...]
    calls: tuple[Call, ...]


class _Folders(NamedTuple):
    """The folders as CMake and its files name them, in the sandbox."""

    source: Path
    build: Path

    @classmethod
    def of(cls, source: Path, build: Path, sandbox: Sandbox) -> _Folders:
        return cls(sandbox.sandbox_path(source.resolve()), sandbox.sandbox_path(build.resolve()))

    def relative(self, path: Path) -> str:
        # The build folder first: it may lie inside of the source tree.
        if path.is_relative_to(self.build):
            return f"<build>/{path.relative_to(self.build)}"
        return str(path.relative_to(self.source) if path.is_relative_to(self.source) else path)


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
    fresh: bool = False,
) -> Configured:
    """
    Configure *source* in the folder *build* with the Ninja generator, and read the units.

    Args:
        defines: Cache entries (``-D``); name ``CMAKE_MAKE_PROGRAM`` if ninja is not on the PATH of
            *env*.
        targets: Read the units of these alone; all targets if empty.
        traced: Files whose calls are recorded; CMake tells them apart by their last component.
        what: The message of a failure.
        sandbox: Where CMake runs; by default without a network, but in this view of the file
            system.
        fresh: Forget the cache entries of an earlier configure.

    Raises:
        configure-failed: CMake ended with an error, or made no target of one of the names.
        compiler-too-old: A source refuses this machine's compiler.
        build-downloads: CMake tried to download something.
    """
    sandbox = sandbox or Sandbox.create({})
    source, build = source.resolve(), build.resolve()
    query = build / API / "query" / "codemodel-v2"
    query.parent.mkdir(parents=True, exist_ok=True)
    query.touch()
    names = {"CMakeLists.txt", *(Path(file).name for file in traced)}
    scripts = {path.name for folder in (source, build / DEPS) for path in folder.rglob("*.cmake")}
    (build / TRACE).unlink(missing_ok=True)
    settings = {**defines, "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}
    folders = _Folders.of(source, build, sandbox)
    command = [cmake, "-S", folders.source, "-B", folders.build, "-G", "Ninja"]
    command += ["--fresh"] if fresh else []
    command += [f"-D{name}={value}" for name, value in settings.items()]
    command += ["--trace-expand", "--trace-format=json-v1"]
    command += [f"--trace-redirect={folders.build / TRACE}"]
    command += [f"--trace-source={name}" for name in sorted(names | scripts)]
    try:
        sandbox.run(
            command,
            env=env,
            log=log,
            failure=partial(BuildError, "configure-failed"),
            what=what,
        )
    except BuildError as error:
        _raise_for_compiler(error)
        raise
    return Configured(
        units=tuple(sorted(_units(folders, build, targets))),
        calls=calls(source, build, sandbox=sandbox, traced=names),
    )


def _raise_for_compiler(error: BuildError) -> None:
    """Raise `compiler-too-old` if CMake's message says that this is the reason of *error*."""
    from packaging.version import Version

    # CMake breaks its messages into lines.
    text = " ".join(" ".join(error.details).split())
    match = _REFUSED_COMPILER.search(text)
    if match is None:
        return
    command = toolchain.host_compiler()
    stated = _VERSION_HERE.search(text, match.end("version"))
    here = stated[1] if stated else toolchain.compiler_version(*command).partition(" ")[0]
    if here and Version(here) < Version(match["version"]):
        what = (
            f"The sources need {match['compiler']} {match['version']} or newer; "
            f"{' '.join(command)} is {here}."
        )
        major = match["version"].partition(".")[0]
        names = " ".join(f"{name}-{major}" for name in ("CC=gcc", "CXX=g++", "CUDAHOSTCXX=g++"))
        raise BuildError(
            "compiler-too-old",
            what,
            details=[match[0], *error.details],
            todo=f"Install a newer one beside it (sudo apt-get install g++-{major}, or a later "
            f"one) and name it: {names} sparkwright build …. The default targets need none of the "
            f"vendored sources: leave --targets out.",
        ) from error


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


def _units(folders: _Folders, build: Path, names: Sequence[str]) -> Iterator[TranslationUnit]:
    """Yield each unit that the file API names, with the gencode of its command."""
    commands, targets = _commands(build), _targets(build)
    if missing := [name for name in names if name not in targets]:
        what = f"CMake made no target {', '.join(missing)}."
        details = [f"targets: {', '.join(sorted(targets)) or 'none'}"]
        raise BuildError("configure-failed", what, details=details)
    for name in names or targets:
        for group in targets[name].get("compileGroups", ()):
            for position in group["sourceIndexes"]:
                path = folders.source / targets[name]["sources"][position]["path"]
                tokens = commands[name, path]
                code = gencode(tokens) if group["language"] == "CUDA" else ()
                object_path = tokens[tokens.index("-o") + 1]
                yield TranslationUnit(
                    name, folders.relative(path), group["language"], code, object_path
                )


def _commands(build: Path) -> dict[tuple[str, Path], list[str]]:
    """Return the arguments of every compile command, by target and source."""
    commands = {}
    path = build / "compile_commands.json"
    for entry in msgspec.json.decode(path.read_bytes()) if path.exists() else ():
        tokens = shlex.split(entry["command"])
        # CMake names an object CMakeFiles/<target>.dir/…; the database does not name the target.
        parts = Path(tokens[tokens.index("-o") + 1]).parts
        target = parts[parts.index("CMakeFiles") + 1].removesuffix(".dir")
        commands[target, Path(entry["directory"], entry["file"])] = tokens
    return commands


def calls(
    source: Path, build: Path, *, sandbox: Sandbox, traced: Collection[str] = ()
) -> tuple[Call, ...]:
    """Return the calls of the last configure, also of one that failed; see `Configured`."""
    trace = build.resolve() / TRACE
    lines = trace.read_bytes().splitlines() if trace.exists() else []
    return tuple(_calls(_Folders.of(source, build, sandbox), lines, traced))


def _calls(folders: _Folders, lines: Iterable[bytes], traced: Collection[str]) -> Iterator[Call]:
    for line in lines:
        try:
            entry = msgspec.json.decode(line)
        except msgspec.DecodeError:
            # The last line of a CMake that was killed.
            continue
        path, command = Path(entry.get("file", "")), entry.get("cmd", "").lower()
        # CMake's own probes have a CMakeLists.txt too, below the build folder.
        in_build = path.is_relative_to(folders.build)
        own = path.is_relative_to(folders.source) and not in_build
        declares = command in DOWNLOADS and (own or path.is_relative_to(folders.build / DEPS))
        if declares or (own and path.name in traced and command not in _IDLE):
            arguments = (
                text.replace(f"{folders.build}/", "<build>/").replace(f"{folders.source}/", "")
                for text in entry["args"]
            )
            yield Call(folders.relative(path), entry["line"], command, tuple(arguments))


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
    return tuple(
        CMakeLibrary(name, target["artifacts"][0]["path"], "install" in target)
        for name, target in _targets(build).items()
        if target["type"] in ("MODULE_LIBRARY", "SHARED_LIBRARY")
    )


def gencode(tokens: Sequence[str]) -> tuple[str, ...]:
    """
    Return the code that nvcc makes with the arguments *tokens*, as sorted entries ``virtual:real``;
    empty if it is left to nvcc.

    ``all``, ``all-major`` and ``native`` are returned as they are (``native:native``): their
    meaning is not in the command.
    """
    entries: set[str] = set()
    arch, codes = "", []
    for option, value in _arch_options(tokens):
        if option in _GENCODE:
            fields = dict(field.split("=", 1) for field in _split(value) if "=" in field)
            real = _split(fields.get("code", "").strip('[]"'))
            entries |= {f"{fields.get('arch', '')}:{code}" for code in real}
        elif option in _ARCH:
            arch = value
        else:
            codes += _split(value.strip('[]"'))
    virtual = arch.replace("sm_", "compute_")
    if codes:
        entries |= {f"{virtual}:{code}" for code in codes}
    elif arch.startswith("sm_"):
        # Shorthand (nvcc --dryrun, 13.0): the real arch and its PTX; with a suffix, PTX of the
        # plain arch as well.
        plain = virtual.rstrip("af")
        entries |= {f"{virtual}:{arch}", f"{virtual}:{virtual}", f"{plain}:{plain}"}
    elif arch:
        entries.add(f"{arch}:{arch}")
    return tuple(sorted(entries))


def _arch_options(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield nvcc's arch options with their values, however the two are joined."""
    rest = iter(tokens)
    for token in rest:
        name, joined, value = token.partition("=")
        if token in _PASSED_ON:
            next(rest, None)
        elif name in (*_GENCODE, *_ARCH, *_CODE):
            yield name, value if joined else next(rest, "")


def _split(text: str) -> list[str]:
    """Split *text* at the commas outside of brackets and quotes, both of which group codes."""
    parts = re.findall(r'(?:\[[^\]]*\]|"[^"]*"|[^,])+', text)
    return [part.strip() for part in parts if part.strip()]
