"""
Other projects' tools, each as a process of its own with limits of time and memory: abi3audit
(Python's limited API), torch-abi-audit (torch's stable ABI) and auditwheel (the platform tag).

The first two are given the libraries without their device code (`strip_fatbins`), as they read only
what the host loads. A tool that is not installed, does not end, or answers in another form than
expected is reported as not run, with the reason; that is never a pass.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from sparkwright.audit.wheel_reader import Contents, Subject
from sparkwright.builder.wheel.elf import Buffer, version_key, version_text
from sparkwright.core import process

#: Seconds for one tool; on two cores each takes some seconds for a vLLM wheel.
TIMEOUT = 300.0
#: Bytes of address space for one tool; those of the tests need 0.2 GB.
MOST_MEMORY = 2 * 1024**3
#: An answer names each library and some symbols.
_LONGEST_ANSWER = 64 * 1024**2

Name = Literal["abi3audit", "torch-abi-audit", "auditwheel"]
ALL: tuple[Name, ...] = ("abi3audit", "torch-abi-audit", "auditwheel")

_TORCH = re.compile(r"lib(torch|c10)[\w]*\.so")
_ABI3_TAG = re.compile(r"cp3(\d+)-abi3-")
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_\w+")

T = TypeVar("T")
#: Member (empty for the wheel), rule, message.
Disagreement = tuple[str, str, str]


class Checker(msgspec.Struct, frozen=True):
    """
    One tool's part in an audit.

    Attributes:
        state: ``ran``; ``not-run`` where it should have; ``not-needed`` where the wheel promises
            nothing
            that it could check.
        says: Its result in a few words, or why it did not run.
    """

    name: str
    state: Literal["ran", "not-run", "not-needed"]
    says: str
    version: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """A tool's part, and its findings."""

    checker: Checker
    findings: tuple[Disagreement, ...] = ()


class HostLibrary(msgspec.Struct, frozen=True):
    """A library without its device code: its name in the wheel, its copy, and its DT_NEEDED."""

    name: str
    path: Path
    needed: tuple[str, ...]


class _NotRun(Exception):
    """The tool gave no answer; the text says why."""


def strip_fatbins(data: Buffer, fatbins: Sequence[tuple[int, int]], target: Path) -> Path:
    """
    Write the library in *data* to *target* with holes in place of its *fatbins* (offset, size), and
    return *target*.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out, memoryview(data) as view:
        out.truncate(len(data))
        position = 0
        for offset, size in [*sorted(fatbins), (len(data), 0)]:
            if offset > position:
                out.seek(position)
                out.write(view[position:offset])
            position = max(position, offset + size)
    return target


def _answer(
    name: str, words: Sequence[str | Path], scratch: Path, kind: type[T], timeout: float
) -> T:
    """
    Return the answer of the console script of the distribution *name* as JSON; its status may be 0
    or 1.
    """
    entry = next(
        (
            one
            for one in importlib.metadata.entry_points(group="console_scripts")
            if one.name == name
        ),
        None,
    )
    if entry is None:
        raise _NotRun(f"{name} is not installed")
    module, _, function = entry.value.partition(":")
    call = (
        f"import sys; from {module} import {function}; sys.argv[0] = {name!r}; "
        f"sys.exit({function}())"
    )
    command = process.leashed(
        [sys.executable, "-P", "-c", call, *map(str, words)], memory=MOST_MEMORY
    )
    environment = process.clean_environment(
        XDG_CACHE_HOME=str(scratch), TMPDIR=str(scratch), NO_COLOR="1"
    )
    path = scratch / f"{name}.json"
    with path.open("wb") as out:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=scratch,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _NotRun(f"{name} did not end within {timeout:g} s") from error
    if path.stat().st_size > _LONGEST_ANSWER:
        raise _NotRun(f"{name} answered with {path.stat().st_size} bytes")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        last = "".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])[:200]
        raise _NotRun(
            f"{name} ended with status {done.returncode} and no answer: {last or error}"
        ) from error


def _outcome(
    name: Name, not_needed: str, work: Callable[[], tuple[str, list[Disagreement]]]
) -> Outcome:
    """
    Return the outcome of *work*, which returns a summary and findings, unless the tool is
    *not_needed* (why).
    """
    if not_needed:
        return Outcome(Checker(name, "not-needed", not_needed))
    try:
        says, findings = work()
    except _NotRun as error:
        return Outcome(Checker(name, "not-run", str(error)))
    return Outcome(Checker(name, "ran", says, importlib.metadata.version(name)), tuple(findings))


class _Abi3Result(msgspec.Struct):
    computed: str
    non_abi3_symbols: list[str]
    future_abi3_objects: dict[str, str] = {}


class _Abi3Object(msgspec.Struct):
    result: _Abi3Result


class _Abi3Spec(msgspec.Struct):
    object: _Abi3Object


class _Abi3Answer(msgspec.Struct):
    specs: dict[str, _Abi3Spec]


def python_floor(about: Subject, contents: Contents) -> tuple[int, ...]:
    """
    Return the oldest Python that may install the wheel, by its abi3 tag and its
    ``Requires-Python``; else (3, 2).
    """
    floors = [version_key(text) for text in re.findall(r">=\s*(\d+\.\d+)", contents.python)]
    floors += [(3, int(minor)) for minor in _ABI3_TAG.findall(about.file)]
    return max(floors, default=(3, 2))


def abi3(
    about: Subject,
    contents: Contents,
    libraries: Sequence[HostLibrary],
    scratch: Path,
    timeout: float = TIMEOUT,
) -> Outcome:
    """Return abi3audit's result for the libraries whose name promises the limited API of Python."""
    promised = {
        str(library.path): library.name
        for library in libraries
        if library.name.endswith(".abi3.so")
    }
    floor = python_floor(about, contents)

    def work() -> tuple[str, list[Disagreement]]:
        answer = _answer("abi3audit", ["-R", *promised], scratch, _Abi3Answer, timeout)
        if answer.specs.keys() != promised.keys():
            raise _NotRun(
                f"abi3audit answered for {len(answer.specs)} of {len(promised)} libraries"
            )
        findings: list[Disagreement] = []
        highest: tuple[int, ...] = ()
        for path, spec in answer.specs.items():
            result, name = spec.object.result, promised[path]
            if result.non_abi3_symbols:
                message = f"it uses {', '.join(sorted(result.non_abi3_symbols)[:5])}"
                findings.append((name, "abi3-violated", message))
            if version_key(result.computed) > floor:
                future = sorted(result.future_abi3_objects.items())[:5]
                newer = ", ".join(f"{symbol} ({version})" for symbol, version in future)
                message = (
                    f"it needs Python {result.computed}, the wheel promises "
                    f"{version_text(floor)}: {newer}"
                )
                findings.append((name, "abi3-newer", message))
            highest = max(highest, version_key(result.computed))
        needs = f"Python {version_text(highest)} or later needed"
        return f"{len(promised)} libraries, {needs}, {version_text(floor)} promised", findings

    return _outcome("abi3audit", "" if promised else "no library is named .abi3.so", work)


class _TorchUse(msgspec.Struct):
    uses_torch: bool
    stable: bool
    unstable_symbols: list[str]
    min_torch_version: str | None = None


class _TorchExtension(msgspec.Struct):
    path: str
    torch: _TorchUse | None = None
    error: str | None = None


class _TorchPackage(msgspec.Struct):
    """*bundled_libs* are those without an entry for Python, such as one that torch itself loads."""

    extensions: list[_TorchExtension] = []
    bundled_libs: list[_TorchExtension] = []


class _TorchAnswer(_TorchPackage):
    """For one library it stands in the answer itself, for several in packages."""

    packages: list[_TorchPackage] = []


def torch_required(contents: Contents) -> tuple[int, ...]:
    """Return the torch that the wheel requires exactly or at least; empty where it names none."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in contents.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name == "torch" and not requirement.marker:
            lower = [
                one.version.partition("+")[0]
                for one in requirement.specifier
                if one.operator in ("==", ">=", "~=")
            ]
            return max(map(version_key, lower), default=())
    return ()


def torch(
    contents: Contents,
    libraries: Sequence[HostLibrary],
    stable: Callable[[str], bool],
    scratch: Path,
    timeout: float = TIMEOUT,
) -> Outcome:
    """
    Return torch-abi-audit's result for the libraries that need torch.

    Args:
        stable: Whether the policy wants the member of that name to use torch's stable ABI alone.
    """
    using = {
        str(one.path): one.name
        for one in libraries
        if any(_TORCH.match(needed) for needed in one.needed)
    }
    required = torch_required(contents)

    def work() -> tuple[str, list[Disagreement]]:
        answer = _answer("torch-abi-audit", ["--json", *using], scratch, _TorchAnswer, timeout)
        packages = [answer, *answer.packages]
        extensions = {
            one.path: one
            for package in packages
            for one in [*package.extensions, *package.bundled_libs]
        }
        if extensions.keys() != using.keys():
            raise _NotRun(
                f"torch-abi-audit answered for {len(extensions)} of {len(using)} libraries"
            )
        findings: list[Disagreement] = []
        users = steady = 0
        newest = ""
        for path, extension in extensions.items():
            name, use = using[path], extension.torch
            if extension.error or use is None:
                raise _NotRun(f"torch-abi-audit on {name}: {extension.error or 'no answer'}"[:300])
            users, steady = users + use.uses_torch, steady + use.stable
            if use.uses_torch and not use.stable and stable(name):
                message = f"it uses {len(use.unstable_symbols)} symbols beside torch's stable ABI"
                findings.append((name, "torch-unstable", message))
            oldest = use.min_torch_version or ""
            newest = max(newest, oldest, key=version_key)
            if oldest and required and version_key(oldest) > (*required, 0, 0)[:3]:
                message = f"it needs torch {oldest}, the wheel requires {version_text(required)}"
                findings.append((name, "torch-newer", message))
        says = f"{steady} of {users} libraries that use torch keep to its stable ABI"
        return says + (f", from torch {newest} on" if newest else ""), findings

    return _outcome("torch-abi-audit", "" if using else "no library needs torch", work)


class _WheelAnswer(msgspec.Struct):
    sym_tag: str | None = None


def promised_glibc(platforms: Sequence[str]) -> tuple[int, int] | None:
    """Return the lowest glibc among manylinux tags; None without one."""
    matches = (_MANYLINUX.fullmatch(platform) for platform in platforms)
    return min(((int(match[1]), int(match[2])) for match in matches if match), default=None)


def platform_tag(wheel: Path, about: Subject, scratch: Path, timeout: float = TIMEOUT) -> Outcome:
    """
    Return whether auditwheel's tag, by the versions of the needed symbols, is at most as new as the
    wheel's tag.
    """
    promised = promised_glibc(about.platforms)

    def work() -> tuple[str, list[Disagreement]]:
        words: list[str | Path] = ["show", "--json", "--disable-isa-ext-check", wheel.absolute()]
        answer = _answer("auditwheel", words, scratch, _WheelAnswer, timeout)
        real = promised_glibc([answer.sym_tag or ""])
        says = f"{answer.sym_tag}, promised: {', '.join(about.platforms)}"
        newer = real is None or (promised is not None and real > promised)
        return says, [("", "tag-newer", f"auditwheel says {says}")] if newer else []

    return _outcome("auditwheel", "" if promised else "its tag promises no version of glibc", work)
