"""
The audit: every library of a wheel against the policy and the unit manifest, from the bytes that
would be installed.

The wheel is read as hostile: the names in it are compared and never written to, and RECORD is held
against the bytes; `sparkwright.core.zips.zip_members` checks the limits of the archive before
anything is unpacked.

Operators are read from the strings in a library's read-only data. torch learns of an operator
twice: ``def`` gives its schema (``name(Tensor a, …) -> Tensor``), ``impl`` its name with the
function. Both are strings that end in NUL. A build that leaves a unit out for its arch keeps the
schema, which a common source file declares, and loses the ``impl``, which the unit itself
registers: so the official vLLM 0.33.0 and a build for 12.1f declare `machete_mm` alike, and only
the former implements it. The bytes do not state the device of an implementation.

Promises of compatibility are compared with the symbols that a library takes from others, by tables
of others: the platform tag by auditwheel's, Python's limited API by abi3info's, and torch's stable
ABI by torch-abi-audit's.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace
from packaging.metadata import RawMetadata, parse_email
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sparkwright.audit import device_code
from sparkwright.audit.device_code import DeviceCode, DeviceImage
from sparkwright.audit.policy import (
    AuditPolicy,
    DistributionPolicy,
    LibraryPolicy,
    load,
)
from sparkwright.audit.report import (
    AuditedLibrary,
    AuditedWheel,
    AuditFinding,
    AuditReport,
    counted,
)
from sparkwright.builder import toolchain
from sparkwright.builder.wheel import elf, symbols
from sparkwright.builder.wheel.archive import BUILD_RECORD, CompiledUnit
from sparkwright.builder.wheel.gpu_target import MACHINE_CODE, parsed
from sparkwright.core import zips
from sparkwright.core.console import console
from sparkwright.core.errors import WheelError
from sparkwright.core.files import canonical, content_key, sha256_bytes, sha256_file
from sparkwright.core.store import translate_disk_full
from sparkwright.forks.context import RunContext

#: Version of the audit; a new one makes stored audits invalid.
FORM = 21
_ENTRY = b"PK\x01\x02"
#: The files that RECORD cannot hold a hash of (PEP 376, PEP 427).
_UNSIGNED = re.compile(r"[^/]+\.dist-info/RECORD(\.jws|\.p7s)?")
#: Bytes that the device code of all libraries may unpack to: minutes of work.
MOST_UNPACKED = 64 * 1024**3
#: Seconds from the beginning of an audit to the end of its last disassembly; that of the official
#: vLLM wheel takes half a minute.
MOST_SECONDS = 900.0
#: Provides the driver's functions; torch loads it for itself alone.
_DRIVER = "libcuda.so.1"
_NOT_CHECKED = (
    "Undefined symbols are not looked for: the locked wheels of torch and CUDA for the machine of "
    "the wheel are not installed here."
)
#: The driver's libraries; a copy made by ``auditwheel repair`` has a hash in its name.
_DRIVER_FILES = re.compile(r"lib(cuda|nvidia-[\w-]+|nvcuvid|nvoptix)(-[0-9a-f]{8})?\.so(\.\d+)*")
#: The longest schema of vLLM has some 1,500 letters.
_LONGEST_SCHEMA = 8192

_AT_LEAST_PYTHON, _ABI3_TAG = re.compile(r">=\s*(\d{1,9}\.\d{1,9})"), re.compile(r"-cp3(\d+)-abi3-")
#: A library of CUDA that is named by CUDA's release.
_CUDA_LIBRARY = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink)\.so\.(\d+)")
#: A requirement of torch without a marker, and its lower bounds.
_TORCH_REQUIRED = re.compile(r"torch\s*[(=<>~!][^;]*$")
_AT_LEAST = re.compile(r"[=~>]=\s*(\d{1,9}(?:\.\d{1,9})*)")
#: In a mangled name: a namespace of torch, but not ``torch::stable`` or ``torch::headeronly``.
_TORCH_INTERNAL = re.compile(r"(?<!\d)(?:2at|3c10|5torch(?!6stable|10headeronly))(?=\d)")
#: Functions of torch's stable ABI.
_TORCH_STABLE = ("torch_", "aoti_torch_")


# Reading.


class Member(NamedTuple):
    """
    A file of a wheel.

    Attributes:
        name: In the wheel.
        path: A copy of it, until the next member is read.
        is_elf: Whether it begins like an ELF file.
        is_cubin: Whether it begins like one for a GPU.
    """

    name: str
    path: Path
    sha256: str
    size: int
    is_elf: bool
    is_cubin: bool


class AuditedGraft(msgspec.Struct, frozen=True):
    """The part of a `GraftManifest` that the audit reads."""

    libraries: dict[str, str] = {}
    left_out: dict[str, str] = {}
    trimmed: dict[str, str] = {}


class AuditedRecord(msgspec.Struct, frozen=True):
    """
    The part of a build record that the audit reads.

    Attributes:
        units: The unit manifest.
        deviations: Sources of other releases than upstream pins.
        unlocked: External projects that were not compiled, each with the reason.
        transplant: The changes of a graft.
    """

    units: tuple[CompiledUnit, ...] = ()
    deviations: tuple[str, ...] = ()
    unlocked: dict[str, str] = {}
    transplant: AuditedGraft = AuditedGraft()


class Contents(NamedTuple):
    """
    What a wheel states of itself.

    Attributes:
        metadata: METADATA.
        rows: Those of RECORD by member.
        record: The build record of sparkwright; None without one.
    """

    metadata: RawMetadata
    rows: Mapping[str, zips.RecordRow]
    record: AuditedRecord | None


def read_subject(wheel: Path) -> AuditedWheel:
    """
    Return what the file name and the bytes of *wheel* state.

    Raises:
        wheel-invalid: The file is missing or not a regular file, its name is not a wheel's, or its
            directory is longer than any wheel's.
    """
    sha, entries = hashlib.sha256(), 0
    try:
        if not wheel.is_file():
            raise OSError("There is no such regular file.")
        name, version, _, tags = parse_wheel_filename(wheel.name)
        with wheel.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
                entries += block.count(_ENTRY)
    except (InvalidWheelFilename, OSError) as error:
        raise WheelError(
            "wheel-invalid", f"{wheel.name} is not a wheel.", details=[str(error)]
        ) from error
    # zipfile reads the whole directory into memory, so its length is bounded first; archives that
    # are members count a little too.
    if entries > 2 * zips.MOST_MEMBERS:
        raise WheelError(
            "wheel-invalid", f"{wheel.name} has more than {zips.MOST_MEMBERS} members."
        )
    return AuditedWheel(
        wheel.name,
        sha.hexdigest(),
        wheel.stat().st_size,
        name,
        str(version),
        tuple(sorted({tag.platform for tag in tags})),
    )


def read_contents(wheel: Path, about: AuditedWheel) -> Contents:
    """
    Return METADATA, RECORD and build record of *wheel*.

    Raises:
        wheel-invalid: The archive is damaged, holds more than any wheel, is another distribution
            than its name states, or has a build record that is not one.
        archive-unsafe: A member's name leaves its folder, or it is a link.
    """
    record = None
    with zips.zip_file(wheel) as archive:
        listed = zips.zip_members(archive, about.file)
        info = zips.info_folder(listed, about.file)
        metadata, _ = parse_email(zips.member_text(archive, listed, f"{info}/METADATA"))
        folder = info.removesuffix(".dist-info").rpartition("-")
        for name, version in (
            (folder[0], folder[2]),
            (metadata.get("name", ""), metadata.get("version", "")),
        ):
            if not zips.is_release(name, version, about.name, about.version):
                raise WheelError(
                    "wheel-invalid",
                    f"{about.file} holds another distribution.",
                    details=[f"{name!r:.100} {version!r:.100}"],
                )
        rows = zips.records(archive, listed)
        name = f"{info}/{BUILD_RECORD}"
        if name in listed:
            text = zips.member_text(archive, listed, name)
            with archive.guard():
                record = msgspec.json.decode(text, type=AuditedRecord)
    return Contents(metadata, rows, record)


def members(wheel: Path, scratch: Path | None) -> Iterator[Member]:
    """
    Yield each file of *wheel*, one at a time.

    Args:
        scratch: An existing folder for the copies, up to half a gigabyte for vLLM; the system's
            temporary folder by default.

    Raises:
        wheel-invalid: The archive is damaged, or holds more than any wheel.
        archive-unsafe: A member's name leaves its folder, or it is a link.
        disk-full: There is no room for a member.
    """
    unpacked = 0
    with (
        zips.zip_file(wheel) as archive,
        translate_disk_full(scratch or Path(tempfile.gettempdir())),
        tempfile.TemporaryDirectory(prefix="wheel-", dir=scratch) as folder,
    ):
        copy = Path(folder, "member")
        for name, info in sorted(zips.zip_members(archive, wheel.name).items()):
            # ext4 writes a file that was cut to nothing to the disk when it is closed, a new one
            # does not wait.
            copy.unlink(missing_ok=True)
            with archive.guard(), archive.open(info) as stream, copy.open("w+b") as output:
                shutil.copyfileobj(stream, output, 1 << 20)
                output.seek(0)
                head = output.read(20)
            is_elf = head.startswith(elf.MAGIC)
            is_cubin = is_elf and int.from_bytes(head[18:], "little") == elf.CUDA
            if is_elf and not is_cubin:
                with contextlib.suppress(elf.ElfUnreadable), elf.mapped(copy) as data:
                    for entry in elf.fatbin_entries(data, elf.shared_object(data).fatbins):
                        unpacked += entry.size
            if unpacked > MOST_UNPACKED:
                raise WheelError(
                    "wheel-invalid",
                    f"{wheel.name} holds more device code than any wheel.",
                    details=[f"library: {name}"],
                )
            yield Member(name, copy, sha256_file(copy), info.file_size, is_elf, is_cubin)


# The audit.


def cached_audit(
    context: RunContext,
    path: Path,
    judged: Literal["stack", "any"] | None = None,
    *,
    fetch: bool = False,
) -> AuditReport:
    """
    Return the audit of the wheel at *path*, from the store if its inputs are unchanged.

    Args:
        judged: As of `audit`.
        fetch: Install the locked wheels of torch and CUDA if the wheel holds libraries and they are
            not here; else undefined symbols are not looked for.
    """
    policy = load(context.project.audit_file, context.project.spec.arch)
    machine = next(filter(path.stem.endswith, elf.MACHINES.values()), "")
    target = dataclasses.replace(context, target=machine)
    key = content_key(
        "audit",
        {
            "wheel": sha256_file(path),
            "name": path.name,
            "policy": policy,
            "judged": judged,
            "symbols": symbols.set_key(target) if machine else "",
            "bases": [fork.bases for fork in target.lock.forks.values()],
            "form": FORM,
        },
    )
    if stored := context.store.get("audit", key, AuditReport):
        return stored
    programs, scratch = partial(toolchain.disassembler, context), context.store.folder("work")
    with console.step(f"audit {path.name}"):
        result = audit(
            path,
            policy,
            programs,
            scratch=scratch,
            judged=judged,
            linked=partial(symbols.linked_libraries, target, fetch=fetch and not target.cross),
            official=partial(symbols.official_libraries, target, fetch=fetch),
        )
    # The official wheel, which can excuse an undefined symbol, may come later.
    if not result.not_checked and "undefined-symbol" not in {
        finding.rule for finding in result.findings
    }:
        context.store.put("audit", key, result)
    return result


def audit(
    wheel: Path,
    policy: AuditPolicy,
    programs: Callable[[], Path],
    *,
    scratch: Path | None = None,
    judged: Literal["stack", "any"] | None = "stack",
    linked: Callable[[], symbols.Libraries | None] = lambda: None,
    official: Callable[[], symbols.Libraries] = dict,
) -> AuditReport:
    """
    Return the contents of *wheel*, and the differences from *policy*.

    `sparkwright.audit.device_code` describes the device-code digest.

    Args:
        programs: Returns the folder of nvdisasm; called only if the policy wants instructions read.
        scratch: As of `members`.
        judged: See `AuditReport.judged`; None for ``stack`` if the wheel holds our build record,
            else ``any``.
        linked: Returns the libraries of torch and CUDA that the wheel is installed with; if it
            returns None, undefined symbols are not looked for.
        official: Returns the libraries of the official wheels; called only for undefined symbols of
            a wheel that was built here.

    Raises:
        wheel-invalid, archive-unsafe: As `read_subject`, `read_contents` and `members`.
        tool-missing: *programs* lacks nvdisasm, and a kernel is to be read.
        command-failed: nvdisasm cannot read a cubin, or takes longer than `MOST_SECONDS`.
        disk-full: There is no room for the largest library and its cubins.
    """
    about = read_subject(wheel)
    contents = read_contents(wheel, about)
    judged = judged or ("stack" if contents.record else "any")
    listed = policy.distributions.get(about.name) or DistributionPolicy("not listed")
    disassembles = judged == "stack" and any(library.kernels for library in listed.libraries)
    folder, deadline = programs() if disassembles else Path(), time.monotonic() + MOST_SECONDS
    libraries, findings, names = list[AuditedLibrary](), list[AuditFinding](), set[str]()
    cubins: dict[str, list[tuple[Member, DeviceImage]]] = {}
    objects, length = dict[str, elf.SharedObject](), 0
    for member in members(wheel, scratch):
        names.add(member.name)
        findings += _member_findings(member, contents.rows.get(member.name))
        if member.is_cubin:
            group = cubins.setdefault(f"{member.name.partition('/')[0]}/**", [])
            try:
                group.append((member, device_code.read_file(member.path, len(group))))
            except elf.ElfUnreadable as error:
                findings.append(AuditFinding(member.name, "elf-unreadable", str(error)))
        elif member.is_elf:
            audited = LibraryAudit(policy, about, contents, member.name, ours=judged == "stack")
            libraries.append(audited.inspect(member, folder, deadline))
            findings += audited.findings
            if shared := audited.shared:
                objects[member.name] = shared
                length += sum(map(len, (*shared.symbols, *shared.imports)))
                if length > elf.MOST_NAME_BYTES:
                    raise WheelError(
                        "wheel-invalid", f"{wheel.name} has longer symbols than any wheel."
                    )
    for name, files in cubins.items():
        audited = LibraryAudit(policy, about, contents, name, ours=judged == "stack")
        libraries.append(audited.inspect_cubins(files))
        findings += audited.findings
    for name in contents.rows.keys() - names:
        if not _UNSIGNED.fullmatch(name):
            message = "RECORD lists it, the wheel does not hold it"
            findings.append(AuditFinding(name, "record-surplus", message))
    if listed.size_max is not None and about.size > listed.size_max:
        findings.append(
            AuditFinding("", "size-over", f"{about.size} bytes, allowed: {listed.size_max}")
        )
    if judged == "any":
        findings += _unusable(policy, contents, libraries, objects)
    record = contents.record or AuditedRecord()
    for glob in record.transplant.left_out:
        message = f"the build record says that {glob} is left out"
        for name in fnmatch.filter(names, glob):
            findings.append(AuditFinding(name, "omission-present", message))
    others = linked() if objects else {}
    undefined = symbols.undefined(objects, others) if objects and others is not None else {}
    bases = official() if undefined and contents.record else {}
    for name, lacking in undefined.items():
        faults = [symbol for symbol in lacking if not symbols.inherited(symbol, bases.get(name))]
        if faults:
            findings.append(AuditFinding(name, "undefined-symbol", symbols.listed(faults)))
    if judged == "stack":
        findings += _missing_libraries(policy, about, libraries, record.unlocked)
    digests = sorted({library.device_code for library in libraries} - {""})
    return AuditReport(
        subject=about,
        target=policy.target,
        policy=sha256_bytes(canonical(policy)),
        libraries=tuple(libraries),
        findings=tuple(sorted(findings)),
        device_code=sha256_bytes(canonical(digests)) if digests else "",
        judged=judged,
        deviations=record.deviations,
        unlocked=record.unlocked,
        left_out=record.transplant.left_out,
        trimmed=tuple(record.transplant.trimmed),
        not_checked=_NOT_CHECKED if others is None else "",
    )


def _missing_libraries(
    policy: AuditPolicy,
    about: AuditedWheel,
    libraries: Iterable[AuditedLibrary],
    unlocked: Collection[str],
) -> Iterator[AuditFinding]:
    """
    Yield the target libraries that the policy asks for and the wheel does not hold.

    Args:
        unlocked: External projects that were not compiled.
    """
    present = [policy.library(about.name, library.name) for library in libraries]
    listed = policy.distributions.get(about.name)
    for wants in listed.libraries if listed else ():
        wanted = wants.role == "target" and wants.external not in unlocked
        if wanted and wants not in present:
            yield AuditFinding(wants.glob, "library-missing", "the policy asks for it")


def _unusable(
    policy: AuditPolicy,
    contents: Contents,
    libraries: Sequence[AuditedLibrary],
    objects: Mapping[str, elf.SharedObject],
) -> Iterator[AuditFinding]:
    """
    Yield why the stack's GPU, or its CUDA, can use none of a wheel's libraries.

    A wheel may hold a library for each GPU or CUDA, of which a program takes the one that fits.

    Args:
        objects: The libraries that can be read, by member.
    """
    levels, judged_alone = Counter[str](), False
    for audited in libraries:
        # Of libraries that the policy names as targets, each is judged by itself.
        judged_alone |= audited.role == "target"
        if audited.role != "base":
            levels.update(audited.spark)
    if levels and not judged_alone and not levels.keys() & MACHINE_CODE:
        units = counted(levels, "{count} {name}", ", ")
        yield AuditFinding(
            "",
            "code-missing",
            f"no machine code in the wheel is for a GPU of SM {elf.version_text(policy.device)} "
            f"(compiled units: {units})",
        )
    stack, foreign = {*_cuda_releases(policy.needed).values()}, list[AuditFinding]()
    required = " ".join(contents.metadata.get("requires_dist", []))
    files = {member.rpartition("/")[2] for member in contents.rows}
    for library, shared in objects.items():
        releases = _cuda_releases(shared.needed)
        if not stack or not stack.isdisjoint(releases.values()):
            return
        wanted = list[str]()
        for name, release in releases.items():
            if f"-cu{release}" not in required and name not in files:
                wanted.append(name)
        if wanted:
            message = (
                f"it wants {', '.join(wanted)}; the stack has CUDA {', '.join(sorted(stack))}, and "
                "the wheel requires no other"
            )
            foreign.append(AuditFinding(library, "needed-foreign", message))
    yield from foreign


def _cuda_releases(names: Iterable[str]) -> dict[str, str]:
    """Return the shared libraries of CUDA among *names*, sorted, each with its release."""
    releases = dict[str, str]()
    for name in sorted(names):
        if match := _CUDA_LIBRARY.fullmatch(name):
            releases[name] = match[1]
    return releases


def _member_findings(member: Member, row: zips.RecordRow | None) -> Iterator[AuditFinding]:
    """Yield the differences from the *row* of RECORD, and that it is a copy of the driver."""
    name = member.name
    if _UNSIGNED.fullmatch(name):
        pass
    elif row is None:
        yield AuditFinding(name, "record-missing", "RECORD does not list it")
    elif row.sha256 != member.sha256 or row.size not in ("", str(member.size)):
        yield AuditFinding(
            name,
            "record-mismatch",
            f"RECORD has sha256 {row.sha256 or 'missing'} and {row.size} bytes; it is "
            f"{member.sha256}, {member.size} bytes",
        )
    if _DRIVER_FILES.fullmatch(name.rpartition("/")[2]):
        yield AuditFinding(
            name,
            "vendored-driver",
            "the driver is the machine's own, and a copy of another version breaks it",
        )


class LibraryAudit:
    """
    The audit of one library of a wheel.

    Args:
        policy: Of the stack.
        name: The member's name.
        ours: Whether the library must be as the policy says; of a wheel that was not built here,
            only its own promises are checked, and whether a Spark can run it.
    """

    def __init__(
        self,
        policy: AuditPolicy,
        about: AuditedWheel,
        contents: Contents,
        name: str,
        *,
        ours: bool = True,
    ) -> None:
        self._about, self._metadata, self._name, self._ours = about, contents.metadata, name, ours
        wants, record = policy.library(about.name, name), contents.record or AuditedRecord()
        if wants and (ours or wants.external):
            reasons = record.unlocked if ours else {wants.external: "It was not built here."}
            wants = wants.without(reasons, compiled=name in record.transplant.libraries)
        self._role = wants.role if wants else "unknown"
        self._wants = wants or LibraryPolicy("", "base", "No policy names it.")
        self._policy = policy
        #: Units of this library and those that are linked into several, and the former alone.
        self._units, self._linked = list[CompiledUnit](), list[CompiledUnit]()
        for unit in record.units:
            if unit.library == name:
                self._linked.append(unit)
            if unit.library in (name, ""):
                self._units.append(unit)
        self.findings: list[AuditFinding] = []
        #: What the library asks of its machine; None if it cannot be read.
        self.shared: elf.SharedObject | None = None
        if self._role == "unknown" and ours:
            self._find("library-unknown", f"no policy for {about.name} names it")

    def _find(
        self,
        rule: str,
        message: str,
        images: Iterable[DeviceImage] = (),
        units: Collection[CompiledUnit] = (),
    ) -> None:
        """Add a finding about the library, these *units* and those that *images* come from."""
        hashes, names = {image.sha256 for image in images}, list[str]()
        for unit in self._units:
            if unit in units or not hashes.isdisjoint(unit.hashes):
                names.append(unit.name)
        self.findings.append(AuditFinding(self._name, rule, message, tuple(names)))

    def inspect(self, member: Member, programs: Path, deadline: float) -> AuditedLibrary:
        """
        Return what the library holds, and report the differences from the policy.

        Args:
            programs: The folder of nvdisasm, which runs until *deadline* by `time.monotonic`.

        Raises:
            tool-missing, command-failed: See `audit`.
            disk-full: There is no room for a cubin beside the library.
        """
        library = AuditedLibrary(member.name, member.sha256, member.size, self._role)
        try:
            with elf.mapped(member.path) as data:
                self.shared = shared = elf.shared_object(data)
                self.check_host(data, shared)
                disassemble = partial(
                    device_code.opcodes,
                    scratch=member.path.parent,
                    programs=programs,
                    deadline=deadline,
                )
                return self.check_device(library, data, shared, disassemble)
        except elf.ElfUnreadable as error:
            self._find("elf-unreadable", str(error))
            return library

    def inspect_cubins(self, cubins: Sequence[tuple[Member, DeviceImage]]) -> AuditedLibrary:
        """Return what the *cubins* hold, which are files of a folder of the wheel."""
        images, hashes, size = list[DeviceImage](), list[str](), 0
        for member, image in cubins:
            images.append(image)
            hashes.append(member.sha256)
            size += member.size
        code, digest = DeviceCode(tuple(images)), sha256_bytes(canonical(sorted(hashes)))
        return AuditedLibrary(
            self._name,
            digest,
            size,
            self._role,
            cubins=code.counts("cubin"),
            device_code=digest,
            spark=device_code.gains(code.images, self._policy.device),
        )

    # Host code.

    def check_host(self, data: elf.Buffer, shared: elf.SharedObject) -> None:
        """Report what the library needs beside the promises of the wheel and the policy."""
        machine, platforms = shared.machine, self._about.platforms
        if machine in ("x86_64", "aarch64"):
            if not all(platform.endswith(machine) for platform in platforms):
                self._find(
                    "machine-foreign", f"it is for {machine}, the wheel for {', '.join(platforms)}"
                )
            promised, required = elf.promised_glibc(platforms), elf.required_glibc(shared)
            if promised and (not required or required > promised):
                symbols = ", ".join(
                    f"{name}_{elf.version_text(shared.versions[name])}"
                    for name in sorted(elf.newer_symbols(shared, promised))
                )
                needs = f"glibc {elf.version_text(required)}" if required else "none that is known"
                self._find(
                    "tag-newer",
                    f"it needs {symbols}, so a system of {needs}; the tag promises glibc "
                    f"{elf.version_text(promised)}",
                )
        if self._name.endswith(".abi3.so"):
            self._check_python(shared)
        self._check_torch(shared)
        if self._ours:
            self._check_policy(data, shared)

    def _check_policy(self, data: elf.Buffer, shared: elf.SharedObject) -> None:
        """Report needs, search paths, symbols and operators that differ from the policy."""
        for entry in shared.rpath:
            self._find("rpath-present", f"it looks for shared libraries in {entry}")
        for name in self._wants.symbols:
            if name not in shared.symbols:
                self._find("symbol-missing", f"it does not define {name}")
        for name in self._wants.operators:
            if missing := _missing_operator(data, name):
                self._find("operator-missing", f"{name}: {missing}")
        allowed = (*self._policy.needed, *self._wants.needed)
        for name in shared.needed:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
                self._find("needed-foreign", f"it wants {name}")
        driver = sorted(filter(symbols.DRIVER[_DRIVER].fullmatch, shared.imports))
        if driver and _DRIVER not in shared.needed:
            self._find(
                "driver-unnamed",
                f"it calls {', '.join(driver[:3])} ({len(driver)} functions), and does not want "
                f"{_DRIVER}",
            )

    def _check_python(self, shared: elf.SharedObject) -> None:
        """Report symbols beside the limited API of the oldest Python that may install the wheel."""
        from abi3info import DATAS, FUNCTIONS
        from abi3info.models import Symbol

        floors = [
            "3.2",
            self._wants.python,
            *(f"3.{minor}" for minor in _ABI3_TAG.findall(self._about.file)),
            *_AT_LEAST_PYTHON.findall(self._metadata.get("requires_python", "")),
        ]
        floor = max(map(elf.version_key, floors))
        private, newer = list[str](), list[str]()
        for name in sorted(shared.symbols.union(shared.imports)):
            if not name.startswith(("Py", "_Py")) or name.startswith("PyInit_"):
                continue
            entry = FUNCTIONS.get(Symbol(name)) or DATAS.get(Symbol(name))
            if entry is None:
                private.append(name)
            elif (entry.added.major, entry.added.minor) > floor:
                newer.append(name)
        if private:
            self._find("abi3-violated", f"it uses {', '.join(private[:5])}")
        if newer:
            promised = f"the wheel promises Python {elf.version_text(floor)}"
            self._find("abi3-newer", f"{promised}, and it uses {', '.join(newer[:5])}")

    def _check_torch(self, shared: elf.SharedObject) -> None:
        """Report symbols beside torch's stable ABI, and those of a newer torch than required."""
        from torch_abi_audit.torch_versions import minimum_version

        internal = list(filter(_TORCH_INTERNAL.search, shared.imports))
        if internal and self._wants.torch == "stable":
            self._find(
                "torch-unstable", f"it uses {len(internal)} symbols beside torch's stable ABI"
            )
        oldest, _, _ = minimum_version(
            [name for name in shared.imports if name.startswith(_TORCH_STABLE)]
        )
        required = filter(_TORCH_REQUIRED.match, self._metadata.get("requires_dist", []))
        versions = list(map(elf.version_key, _AT_LEAST.findall(" ".join(required))))
        if oldest and versions and oldest > (*max(versions), 0, 0)[:3]:
            self._find(
                "torch-newer",
                f"it needs torch {elf.version_text(oldest)}, the wheel requires "
                f"{elf.version_text(max(versions))}",
            )

    # Device code.

    def check_device(
        self,
        library: AuditedLibrary,
        data: elf.Buffer,
        shared: elf.SharedObject,
        disassemble: Callable[[bytes], Mapping[str, Counter[str]]] = lambda _: {},
    ) -> AuditedLibrary:
        """
        Return *library* with its device code, and report the differences from the policy.

        Args:
            disassemble: From a cubin to the opcodes of its kernels.
        """
        compiled = self._role == "target"
        if compiled and not shared.fatbins:
            self._find("arch-missing", "it holds no device code at all", units=self._linked)
        patterns = self._wants.kernels if self._ours else ()
        kernels = list[tuple[str, Counter[str], DeviceImage]]()

        def visit(image: DeviceImage, content: bytes) -> None:
            stated = image.kind == "cubin" and not image.target.endswith("?")
            if stated and image.listed != image.target:
                message = f"the table says {image.listed}, the code {image.target}"
                self._find("arch-contradicted", f"fatbin {image.container}: {message}", [image])
            if any(re.search(text, name) for text in patterns for name in image.kernels):
                for kernel, opcodes in disassemble(content).items():
                    kernels.append((kernel, opcodes, image))

        code = device_code.read(
            data, shared, self._policy.device[0], compiled=compiled, visit=visit
        )
        if code.fault:
            self._find("device-unreadable", code.fault)
        levels = device_code.gains(code.images, self._policy.device)
        if compiled and code.images:
            if self._ours:
                self._check_archs(code.images)
                self._check_units(code.images)
                library = self._check_kernels(library, kernels)
            elif not levels.keys() & MACHINE_CODE:
                gpu = elf.version_text(self._policy.device)
                self._find("code-missing", f"no machine code in it is for a GPU of SM {gpu}")
        return replace(
            library,
            device_code=code.digest,
            cubins=code.counts("cubin"),
            ptx=code.counts("ptx"),
            spark=levels,
        )

    def _check_archs(self, images: Sequence[DeviceImage]) -> None:
        """Report code of other targets than the policy's, and a library without code for it."""
        target, generation = self._policy.target, self._policy.device[0]
        by_target: dict[tuple[str, str], list[DeviceImage]] = {("cubin", target): []}
        for image in images:
            by_target.setdefault((image.kind, image.target), []).append(image)
        if not by_target.pop(("cubin", target)):
            self._find("arch-missing", f"cubins for {target}: 0")
        for (kind, arch), group in by_target.items():
            rule, what = "arch-foreign", "cubins"
            if kind == "ptx":
                rule, what = "ptx-foreign", "PTX files"
            elif parsed(arch)[0] == generation:
                rule = "arch-folded"
            allowed = self._wants.ptx if kind == "ptx" else self._wants.also
            most = next((entry.most for entry in allowed if entry.arch == arch), 0)
            if len(group) > most:
                self._find(rule, f"{what} for {arch}: {len(group)}, allowed: {most}", group)

    def _check_units(self, images: Sequence[DeviceImage]) -> None:
        """Report units without code in the library or for the target, and code of no unit."""
        target, generation = self._policy.target, self._policy.device[0]
        by_hash = {image.sha256: image for image in images if image.sha256}
        for unit in self._linked:
            stated, lost, targets = 0, 0, set[str]()
            for arch, sha256 in unit.code:
                # Cubins of other generations are not unpacked.
                if arch.startswith("compute_") or parsed(arch)[0] == generation:
                    stated += 1
                    if image := by_hash.get(sha256):
                        targets.add(f"{image.kind}:{image.target}")
                    else:
                        lost += 1
            planned = any(entry.endswith(f":{target}") for entry in unit.gencode)
            if lost:
                self._find(
                    "arch-missing",
                    f"{lost} of the {stated} pieces of code in its object are not in it",
                    units=[unit],
                )
            elif planned and unit.code and f"cubin:{target}" not in targets:
                self._find("arch-missing", f"its object holds no cubin for {target}", units=[unit])
        foreign, relocatable = {*by_hash}, False
        for unit in self._units:
            foreign.difference_update(unit.hashes)
            # The device linker makes new code of relocatable code.
            relocatable |= not unit.code
        if foreign and self._linked and not relocatable:
            archs = sorted({by_hash[sha256].target for sha256 in foreign})
            self._find("code-foreign", f"{len(foreign)} of {len(by_hash)}, for {', '.join(archs)}")

    def _check_kernels(
        self,
        library: AuditedLibrary,
        kernels: Sequence[tuple[str, Counter[str], DeviceImage]],
    ) -> AuditedLibrary:
        """Return *library* with its opcodes, and report instructions missing and traps present."""
        totals = dict[str, int]()
        for rule in self._wants.opcodes:
            total, searched = 0, list[DeviceImage]()
            for kernel, opcodes, image in kernels:
                if re.search(rule.kernels, kernel):
                    searched.append(image)
                    for opcode, count in opcodes.items():
                        if re.search(rule.pattern, opcode):
                            total += count
            totals[rule.pattern] = total
            if total < rule.least:
                message = f"{rule.pattern}: {total}, required: {rule.least}"
                self._find("opcode-missing", message, searched)
        for free in self._wants.trap_free:
            matched = False
            for kernel, opcodes, image in kernels:
                if re.search(free.kernels, kernel):
                    matched = True
                    if count := opcodes[device_code.TRAP]:
                        message = f"{count} {device_code.TRAP} in {kernel[:160]}: {free.reason}"
                        self._find("trap-present", message, [image])
            if not matched:
                self._find("kernel-missing", f"no kernel matches {free.kernels}")
        return replace(library, opcodes=totals)


def _missing_operator(data: elf.Buffer, operator: str) -> str:
    """Return what the library lacks of *operator*; empty if it declares and implements it."""
    name = operator.encode()
    # A string begins after the NUL of the one before it, or with the section. A linker may share
    # the name with the end of a longer string.
    schema = re.compile(rb"(?:\A|\0)%s\([^\0]{0,%d}?\) -> " % (re.escape(name), _LONGEST_SCHEMA))
    declared, implemented, size = False, False, 0
    for section in elf.sections(data):
        if section.name.startswith(".rodata") and section.kind not in elf.NO_BYTES:
            size += section.size
            if size > len(data):
                raise elf.ElfUnreadable("its sections of read-only data overlap")
            text = data[section.offset : section.offset + section.size]
            declared |= schema.search(text) is not None
            implemented |= name + b"\0" in text
    if not declared:
        return "not declared"
    return "" if implemented else "declared, not implemented"
