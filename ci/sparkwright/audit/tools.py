"""
Programs of other projects, each as a process with limits of time and memory: abi3audit (Python's
limited API), torch-abi-audit (torch's stable ABI), auditwheel (the platform tag), and NVIDIA's
disassembler.

The first two read the libraries without their device code (`strip_fatbins`). A checker that is not
installed, does not end, or answers in another form is reported as not run, with the reason; that is
never a pass. Without the disassembler an audit that needs it fails.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from sparkwright.audit.report import AuditedWheel, AuditFinding, Checker
from sparkwright.audit.wheel_reader import Contents
from sparkwright.builder.wheel.elf import Buffer, version_key, version_text
from sparkwright.core import process
from sparkwright.core.errors import CommandError

#: Seconds for a program; on two cores each takes some seconds for a vLLM wheel, and the largest
#: cubin of the official wheels that a policy names takes one.
TIMEOUT = 300.0
#: Bytes of address space for a checker; those of the tests need 0.2 GB.
MOST_MEMORY = 2 * 1024**3
#: A checker's answer names each library and some symbols.
_LONGEST_ANSWER = 64 * 1024**2
#: Bytes that nvdisasm may write; the largest cubin of the official wheels takes some hundred
#: megabytes.
_MOST_TEXT = 8 * 1024**3

Name = Literal["abi3audit", "torch-abi-audit", "auditwheel"]
ALL: tuple[Name, ...] = ("abi3audit", "torch-abi-audit", "auditwheel")
TRAP = "BPT.TRAP"

_TORCH = re.compile(r"lib(torch|c10)[\w]*\.so")
#: A requirement without a marker, and its lower bounds.
_TORCH_REQUIRED = re.compile(r"torch\s*[(=<>~!][^;]*$")
_AT_LEAST = re.compile(r"[=~>]=\s*(\d+(?:\.\d+)*)")
_ABI3_TAG = re.compile(r"cp3(\d+)-abi3-")
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_\w+")
#: A section's heading, or an instruction after its address and predicate:
#: ``/*0050*/  @!P0 F2FP.SATFINITE.E2M1… R0, …``.
_LINE = re.compile(
    rb"^(?:\.text\.(?P<kernel>\S+):|[ \t]+/\*[0-9a-f]{4,}\*/[ \t]+(?:\{[ \t]*)?(?:@!?U?P\w+[ \t]+)?"
    rb"(?P<opcode>[A-Z][A-Z0-9_.]*))",
    re.MULTILINE,
)

T = TypeVar("T")
#: The result in a few words, and the findings.
Result = tuple[str, list[AuditFinding]]


class CheckerResult(msgspec.Struct, frozen=True):
    """The part of a checker in an audit, and its findings."""

    checker: Checker
    findings: tuple[AuditFinding, ...] = ()


class HostLibrary(msgspec.Struct, frozen=True):
    """A library without its device code: its name in the wheel, its copy, and its DT_NEEDED."""

    name: str
    path: Path
    needed: tuple[str, ...]


class _NotRun(Exception):
    """The checker gave no answer; the text says why."""


def strip_fatbins(data: Buffer, fatbins: Sequence[tuple[int, int]], target: Path) -> None:
    """Write the library in *data* to *target* with holes in place of *fatbins* (offset, size)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out, memoryview(data) as view:
        out.truncate(len(data))
        position = 0
        for offset, size in [*sorted(fatbins), (len(data), 0)]:
            if offset > position:
                out.seek(position)
                out.write(view[position:offset])
            position = max(position, offset + size)


def _run(
    command: Sequence[str | Path],
    output: Path,
    timeout: float,
    *,
    memory: int = 0,
    written: int = 0,
) -> tuple[int, list[str]]:
    """Run *command* with its output in the file *output*; return its status and its last words."""
    log, folder = output.with_suffix(".log"), output.parent
    environment = process.clean_environment(
        XDG_CACHE_HOME=str(folder), TMPDIR=str(folder), NO_COLOR="1"
    )
    with output.open("wb") as out, log.open("wb") as errors:
        done = subprocess.run(
            process.wrap_with_limits(command, memory=memory, written=written),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=environment,
            cwd=folder,
            timeout=timeout,
            check=False,
        )
    with log.open("rb") as errors:
        return done.returncode, errors.read(1 << 14).decode("utf-8", "replace").splitlines()[-20:]


def _answer(
    name: Name, words: Sequence[str | Path], scratch: Path, kind: type[T], timeout: float
) -> T:
    """Return what the console script of the distribution *name* prints as JSON."""
    script = Path(sysconfig.get_path("scripts"), name)
    if not script.exists():
        raise _NotRun(f"{name} is not installed")
    output = scratch / f"{name}.json"
    try:
        command = [sys.executable, script, *words]
        status, last = _run(command, output, timeout, memory=MOST_MEMORY)
    except subprocess.TimeoutExpired as error:
        raise _NotRun(f"{name} did not end within {timeout:g} s") from error
    if (size := output.stat().st_size) > _LONGEST_ANSWER:
        raise _NotRun(f"{name} answered with {size} bytes")
    try:
        return msgspec.json.decode(output.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        reason = "".join(last[-1:])[:200] or error
        raise _NotRun(f"{name} ended with status {status} and no answer: {reason}") from error


def _outcome(name: Name, not_needed: str, run: Callable[[], Result]) -> CheckerResult:
    """Return the outcome of *run*, unless the checker is *not_needed* for the reason given."""
    if not_needed:
        return CheckerResult(Checker(name, "not-needed", not_needed))
    try:
        says, findings = run()
    except _NotRun as error:
        return CheckerResult(Checker(name, "not-run", str(error)))
    return CheckerResult(
        Checker(name, "ran", says, importlib.metadata.version(name)), tuple(findings)
    )


def _require_all(name: Name, answered: Sequence[str], paths: Mapping[str, str]) -> None:
    if set(answered) != set(paths):
        raise _NotRun(f"{name} answered for {len(answered)} of {len(paths)} libraries")


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


def python_floor(about: AuditedWheel, contents: Contents) -> tuple[int, ...]:
    """Return the oldest Python that may install the wheel, by its tag and ``Requires-Python``."""
    floors = [version_key(text) for text in re.findall(r">=\s*(\d+\.\d+)", contents.python)]
    floors += [(3, int(minor)) for minor in _ABI3_TAG.findall(about.file)]
    return max(floors, default=(3, 2))


def abi3(
    about: AuditedWheel,
    contents: Contents,
    libraries: Sequence[HostLibrary],
    scratch: Path,
    timeout: float = TIMEOUT,
) -> CheckerResult:
    """Return abi3audit's result for the libraries whose name promises the limited API of Python."""
    paths = {
        str(library.path): library.name
        for library in libraries
        if library.name.endswith(".abi3.so")
    }
    floor = python_floor(about, contents)

    def run() -> Result:
        answer = _answer("abi3audit", ["-R", *paths], scratch, _Abi3Answer, timeout)
        _require_all("abi3audit", list(answer.specs), paths)
        findings: list[AuditFinding] = []
        for path, spec in answer.specs.items():
            result = spec.object.result
            if result.non_abi3_symbols:
                message = f"it uses {', '.join(sorted(result.non_abi3_symbols)[:5])}"
                findings.append(AuditFinding(paths[path], "abi3-violated", message))
            if version_key(result.computed) > floor:
                newer = ", ".join(sorted(result.future_abi3_objects)[:5])
                message = (
                    f"it needs Python {result.computed}, the wheel promises "
                    f"{version_text(floor)}: {newer}"
                )
                findings.append(AuditFinding(paths[path], "abi3-newer", message))
        return f"{len(paths)} libraries, Python {version_text(floor)} promised", findings

    return _outcome("abi3audit", "" if paths else "no library is named .abi3.so", run)


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
    """Return the torch that the wheel requires exactly or at least; empty if it names none."""
    required = [text for text in contents.requires if _TORCH_REQUIRED.match(text)]
    versions = [version for text in required for version in _AT_LEAST.findall(text)]
    return max(map(version_key, versions), default=())


def torch(
    contents: Contents,
    libraries: Sequence[HostLibrary],
    stable: Callable[[str], bool],
    scratch: Path,
    timeout: float = TIMEOUT,
) -> CheckerResult:
    """
    Return torch-abi-audit's result for the libraries that need torch.

    Args:
        stable: Whether the policy wants the member of that name to use torch's stable ABI alone.
    """
    paths = {
        str(library.path): library.name
        for library in libraries
        if any(_TORCH.match(needed) for needed in library.needed)
    }
    required = torch_required(contents)

    def run() -> Result:
        answer = _answer("torch-abi-audit", ["--json", *paths], scratch, _TorchAnswer, timeout)
        packages = [answer, *answer.packages]
        extensions = [
            extension
            for package in packages
            for extension in [*package.extensions, *package.bundled_libs]
        ]
        _require_all("torch-abi-audit", [extension.path for extension in extensions], paths)
        findings: list[AuditFinding] = []
        for extension in extensions:
            name, use = paths[extension.path], extension.torch
            if extension.error or use is None:
                raise _NotRun(f"torch-abi-audit on {name}: {extension.error or 'no answer'}"[:300])
            if use.uses_torch and not use.stable and stable(name):
                message = f"it uses {len(use.unstable_symbols)} symbols beside torch's stable ABI"
                findings.append(AuditFinding(name, "torch-unstable", message))
            oldest = use.min_torch_version or ""
            if oldest and required and version_key(oldest) > (*required, 0, 0)[:3]:
                message = f"it needs torch {oldest}, the wheel requires {version_text(required)}"
                findings.append(AuditFinding(name, "torch-newer", message))
        uses = [extension.torch for extension in extensions if extension.torch]
        users = sum(use.uses_torch for use in uses)
        steady = sum(use.stable for use in uses)
        return f"{steady} of {users} libraries that use torch keep to its stable ABI", findings

    return _outcome("torch-abi-audit", "" if paths else "no library needs torch", run)


class _WheelAnswer(msgspec.Struct):
    sym_tag: str | None = None


def promised_glibc(platforms: Sequence[str]) -> tuple[int, int] | None:
    """Return the lowest glibc among manylinux tags; None without one."""
    matches = (_MANYLINUX.fullmatch(platform) for platform in platforms)
    return min(((int(match[1]), int(match[2])) for match in matches if match), default=None)


def platform_tag(
    wheel: Path, about: AuditedWheel, scratch: Path, timeout: float = TIMEOUT
) -> CheckerResult:
    """Return whether auditwheel's tag, by the needed symbols, is at most as new as the wheel's."""
    promised = promised_glibc(about.platforms)

    def run() -> Result:
        words: list[str | Path] = ["show", "--json", "--disable-isa-ext-check", wheel.absolute()]
        answer = _answer("auditwheel", words, scratch, _WheelAnswer, timeout)
        real = promised_glibc([answer.sym_tag or ""])
        says = f"{answer.sym_tag}, promised: {', '.join(about.platforms)}"
        newer = real is None or (promised is not None and real > promised)
        return says, [AuditFinding("", "tag-newer", f"auditwheel says {says}")] if newer else []

    return _outcome("auditwheel", "" if promised else "its tag promises no version of glibc", run)


def opcodes(cubin: Path, folder: Path, timeout: float = TIMEOUT) -> dict[str, Counter[str]]:
    """
    Disassemble *cubin* and count its opcodes with their modifiers, by kernel.

    Args:
        folder: Holds ``nvdisasm`` (``nvidia/cu13/bin`` of an environment with its wheel).

    Raises:
        tool-missing: It does not.
        command-failed: nvdisasm could not read the cubin, or took longer than *timeout* seconds.
    """
    if not (program := folder / "nvdisasm").is_file():
        raise CommandError("tool-missing", f"nvdisasm is not in {folder}.")
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(dir=cubin.parent) as scratch:
        text = Path(scratch, "text")
        try:
            command: list[str | Path] = [program, "--print-code", cubin.absolute()]
            status, last = _run(command, text, timeout, written=_MOST_TEXT)
        except subprocess.TimeoutExpired as error:
            what = f"nvdisasm did not end within {timeout:g} s."
            raise CommandError("command-failed", what) from error
        if status:
            what = f"nvdisasm ended with status {status}."
            raise CommandError("command-failed", what, details=last)
        if not text.stat().st_size:
            return counts
        # The text may be larger than the memory.
        with (
            text.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            current: Counter[str] = Counter()
            for match in _LINE.finditer(content):
                if match["kernel"]:
                    name = match["kernel"].decode("utf-8", "replace")
                    current = counts.setdefault(name, Counter())
                else:
                    current[match["opcode"].decode()] += 1
    return counts
