"""What a CMake file would download: FetchContent, ExternalProject, ``file(DOWNLOAD)``, and programs that fetch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from sparkwright.core import cmake_file
from sparkwright.core.cmake_file import Command
from sparkwright.core.errors import FileError
from sparkwright.forks.vendored.cmakevalues import UNKNOWN, Reading
from sparkwright.forks.vendored.declared import Kind, Vendored, plain

#: A file without any of these words downloads nothing, and need not be parsed.
WORDS = re.compile(
    rb"fetchcontent_|externalproject_|\bdownload\b|\bcpm|\bgit\b|git_executable|\bcurl\b|\bwget\b|\bpip3?\b|cmake_language", re.IGNORECASE
)

_KINDS: dict[str, Kind] = {
    "fetchcontent_declare": "fetchcontent", "fetchcontent_populate": "fetchcontent", "externalproject_add": "externalproject",
}  # fmt: skip
#: What names the source, each with what pins it (ExternalProject(3)).
_METHODS = {"GIT_REPOSITORY": "GIT_TAG", "HG_REPOSITORY": "HG_TAG", "SVN_REPOSITORY": "SVN_REVISION", "CVS_REPOSITORY": "CVS_TAG"}
_SINGLE = frozenset((*_METHODS, *_METHODS.values(), "URL_HASH", "URL_MD5", "SOURCE_DIR"))
_KEYWORD = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
#: CMake's own (ExternalProject(3), GIT_TAG).
_DEFAULT = {"GIT_TAG": "master"}

_PROGRAMS = frozenset(("execute_process", "add_custom_command", "add_custom_target", "exec_program", "install", "externalproject_add_step"))
#: Programs that fetch, each with the words that make it do so; none where it does nothing else.
_FETCHING: dict[str, frozenset[str]] = {
    **dict.fromkeys(("git", "${git_executable}"), frozenset(("clone", "fetch", "pull", "submodule", "lfs", "archive"))),
    **dict.fromkeys(("pip", "pip3"), frozenset(("install", "download", "wheel"))),
    **dict.fromkeys(("curl", "wget", "aria2c"), frozenset()),
}  # fmt: skip
#: Options may stand between a program and the word.
_NEAR = 8
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|(ENV\{\w+\}))")


def read(file: str, text: bytes, foreign: Callable[[str], bool]) -> tuple[Vendored, ...]:
    """
    Return what the file *file* declares; what cannot be read is returned, too, without an address.

    Args:
        foreign: Says whether another file of the tree sets a variable.

    Raises:
        declaration-unsafe: An address or a ref is none.
    """
    try:
        commands = cmake_file.parse(text, file)
    except FileError as error:
        if error.reference != "rule-mismatch":
            raise
        return (Vendored(file, "download", "", "", file, condition=error.what),)
    reading, folders = Reading(commands, foreign), _folders(commands)
    return tuple(found for place, command in enumerate(commands) for found in _declared(reading, folders, place, command, file))


def _declared(reading: Reading, folders: Mapping[str, str], place: int, command: Command, file: str) -> Iterator[Vendored]:
    if command.name in _KINDS:
        yield from _sources(reading, folders, place, command, file)
    elif command.name == "file" and command.texts[:1] == ("DOWNLOAD",):
        yield from _downloads(reading, place, command, file)
    elif (what := _fetches(command)) and not (command.name == "install" and "CODE" not in command.texts):
        yield Vendored(f"{file} {what}", "download", "", "", file, command.line, condition=reading.condition(place))


def _fetches(command: Command) -> str:
    """Return what *command* would fetch with: a program, or a command of CMake's that this module does not follow."""
    text = " ".join(command.texts)
    if command.name in _PROGRAMS:
        return _program(re.split(r"[\s;|&]+", text))
    if command.name.startswith("cpm") and command.name.endswith("package"):
        return f"{command.name} {command.texts[0] if command.texts else ''}"
    if command.name == "cmake_language" and WORDS.search(text.encode("utf-8", "surrogateescape")):
        return "cmake_language"
    return ""


def _program(words: Sequence[str]) -> str:
    for place, word in enumerate(words):
        program = word.strip("\\\"'()").rpartition("/")[2].lower()
        does = _FETCHING.get(program)
        if does is not None:
            verb = next((word for word in words[place + 1 :][:_NEAR] if word in does), "")
            if verb or not does:
                return f"{program} {verb}".rstrip()
    return ""


def _sources(reading: Reading, folders: Mapping[str, str], place: int, command: Command, file: str) -> Iterator[Vendored]:
    found: dict[Vendored, str] = {}
    for expansion in reading.expand(place):
        options, open_end = _options(expansion.values[1:])
        name = (expansion.values[0] if expansion.values else "") or (command.texts or ("",))[0]
        address = _address(options)
        if address is None and not open_end:
            continue
        url, ref = (plain(text, f"{file}:{command.line}") for text in address or ("", ""))
        variable = _variable(folders, command, name)
        one = Vendored(name, _KINDS[command.name], url, ref, file, command.line, variable, "", _submodules(options))
        found.setdefault(one, expansion.condition)
    # Ways that differ in something else than the source are no two sources.
    for one, way in found.items():
        conditions = (reading.condition(place), way if len(found) > 1 else "")
        yield msgspec.structs.replace(one, condition=" AND ".join(filter(None, conditions)))


def _options(values: Sequence[str | None]) -> tuple[dict[str, list[str | None]], bool]:
    """Return the options by keyword; and whether some may hide behind a value that is not known."""
    options: dict[str, list[str | None]] = {}
    key, open_end, rest = "", False, iter(values)
    for value in rest:
        if value in _SINGLE:
            key = value
            options.setdefault(key, []).append(next(rest, UNKNOWN))
        elif value is not UNKNOWN and _KEYWORD.fullmatch(value):
            key = value
            options.setdefault(key, [])
        else:
            options.setdefault(key, []).append(value)
            open_end |= value is UNKNOWN and key not in ("BINARY_DIR", "SUBBUILD_DIR", "PREFIX")
    return options, open_end and "SOURCE_DIR" not in options


def _address(options: dict[str, list[str | None]]) -> tuple[str, str] | None:
    """Return url and ref, each empty where it is not known; None where the options download nothing."""
    if "DOWNLOAD_COMMAND" in options:
        # It stands above all other methods (ExternalProject(3)); an empty one downloads nothing.
        return None if options["DOWNLOAD_COMMAND"] in ([], [""]) else ("", "")
    for method, pin in _METHODS.items():
        if method in options:
            return _only(options[method]), _only(options.get(pin, [_DEFAULT.get(pin, "")]))
    if "URL" in options:
        return (options["URL"] or [""])[0] or "", _only(options.get("URL_HASH", [])) or _only(options.get("URL_MD5", []))
    return None


def _only(values: Sequence[str | None]) -> str:
    return (values[0] or "") if len(values) == 1 else ""


def _submodules(options: dict[str, list[str | None]]) -> tuple[str, ...] | None:
    values = options.get("GIT_SUBMODULES")
    if values is None or UNKNOWN in values:
        return None
    return tuple(value for value in values if value)


def _folders(commands: Sequence[Command]) -> dict[str, str]:
    """Return the variables that the file itself takes local folders from, by the lower-case names of the sources."""
    found: dict[str, str] = {}
    for command in commands:
        texts, folder = command.texts, ""
        name = texts[0].lower() if texts else ""
        if command.name in _KINDS and "SOURCE_DIR" in texts and not _METHODS.keys() & set(texts):
            folder = "".join(texts[texts.index("SOURCE_DIR") + 1 :][:1])
        elif command.name == "set" and name.endswith("_source_dir") and len(texts) == 2 and command.scopes:
            name = name.removesuffix("_source_dir")
            folder = texts[1] if texts[1] == f"${{{command.scopes[-1].text}}}" else ""
        if variable := _REFERENCE.fullmatch(folder):
            found.setdefault(name, variable[1] or variable[2])
    return found


def _variable(folders: Mapping[str, str], command: Command, name: str) -> str:
    """Return what the file itself takes a local folder from; else what FetchContent does, where it was declared."""
    if command.name == "externalproject_add":
        return ""
    # Where all is said in the call itself, CMake asks no variable (FetchContent(3)).
    return folders.get(name.lower(), f"FETCHCONTENT_SOURCE_DIR_{name.upper()}" if command.name == "fetchcontent_declare" else "")


def _downloads(reading: Reading, place: int, command: Command, file: str) -> Iterator[Vendored]:
    for expansion in reading.expand(place):
        url = (expansion.values[1:2] or (UNKNOWN,))[0] or ""
        options = dict(zip(expansion.values, expansion.values[1:], strict=False))
        md5 = f"MD5={options['EXPECTED_MD5']}" if options.get("EXPECTED_MD5") else ""
        where = f"{file}:{command.line}"
        yield Vendored(
            (url or "".join(command.texts[1:2])).rstrip("/").rpartition("/")[2], "download", plain(url, where),
            plain(options.get("EXPECTED_HASH") or md5, where), file, command.line,
            condition=" AND ".join(filter(None, (reading.condition(place), expansion.condition))),
        )  # fmt: skip
