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

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import re
import shutil
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from email.message import Message
from email.parser import BytesParser
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sparkwright.audit import device_code
from sparkwright.audit.policy import (
    AuditPolicy,
    DistributionPolicy,
    LibraryPolicy,
    is_generation,
    load,
)
from sparkwright.audit.report import (
    AuditedLibrary,
    AuditedWheel,
    AuditFinding,
    AuditReport,
    OpcodeCount,
)
from sparkwright.builder import toolchain
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.archive import BUILD_RECORD, CompiledUnit, member_text, records
from sparkwright.core import zips
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, WheelError
from sparkwright.core.files import canonical, content_key, sha256_bytes, sha256_file
from sparkwright.core.store import translate_disk_full
from sparkwright.forks.context import RunContext

#: Version of the audit; a new one makes stored audits invalid.
FORM = 12
_ENTRY = b"PK\x01\x02"
#: The files that RECORD cannot hold a hash of (PEP 376, PEP 427).
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")
#: Bytes that the device code of all libraries may unpack to: minutes of work.
MOST_UNPACKED = 64 * 1024**3
#: Seconds from the beginning of an audit to the end of its last disassembly; that of the official
#: vLLM wheel takes half a minute.
MOST_SECONDS = 900.0
#: Provides the driver's functions; torch loads it for itself alone.
_DRIVER = "libcuda.so.1"
#: cuFile, whose functions begin alike, is another library.
_DRIVER_FUNCTION = re.compile(r"cu(?!File)[A-Z]\w*")
#: The driver's libraries; a copy made by ``auditwheel repair`` has a hash in its name.
_DRIVER_FILES = re.compile(r"lib(cuda|nvidia-[\w-]+|nvcuvid|nvoptix)(-[0-9a-f]{8})?\.so(\.\d+)*")
#: Libraries of torch, the CUDA wheels and the system.
_OTHERS = re.compile(
    r"lib(torch\w*|c10\w*|cudart|cublas\w*|cudnn\w*|cufft\w*|curand|cusolver\w*|cusparse\w*|cupti"
    r"|nvrtc[\w-]*|nvJitLink|nvshmem\w*|nccl|stdc\+\+|gcc_s|gomp|c|m|pthread|dl|rt)"
    r"(-[0-9a-f]{8})?\.so(\.\d+)*"
)
#: The longest schema of vLLM has some 1,500 letters.
_LONGEST_SCHEMA = 8192

_AT_LEAST_PYTHON, _ABI3_TAG = re.compile(r">=\s*(\d{1,9}\.\d{1,9})"), re.compile(r"-cp3(\d+)-abi3-")
#: A requirement of torch without a marker, and its lower bounds.
_TORCH_REQUIRED = re.compile(r"torch\s*[(=<>~!][^;]*$")
_AT_LEAST = re.compile(r"[=~>]=\s*(\d{1,9}(?:\.\d{1,9})*)")
#: In a mangled name: a namespace of torch, but not ``torch::stable`` or ``torch::headeronly``.
_TORCH_INTERNAL = re.compile(r"(?<!\d)(?:2at|3c10|5torch(?!6stable|10headeronly))(?=\d)")
#: Functions of torch's stable ABI.
_TORCH_STABLE = ("torch_", "aoti_torch_")


# Reading.


class Binary(msgspec.Struct, frozen=True):
    """An ELF member: its name in the wheel, the path of its copy, its sha256 and its size."""

    name: str
    path: Path
    sha256: str
    size: int


class Record(msgspec.Struct):
    """
    The part of a build record that the audit reads.

    Attributes:
        units: The unit manifest.
        deviations: Sources of other releases than upstream pins.
    """

    units: tuple[CompiledUnit, ...] = ()
    deviations: tuple[str, ...] = ()


class Contents(NamedTuple):
    """
    The statements of a wheel's directory and metadata.

    Attributes:
        names: Of all members.
        metadata: METADATA.
        ours: Whether it holds a build record of sparkwright.
        record: That record.
    """

    names: tuple[str, ...]
    metadata: Message
    ours: bool = False
    record: Record = Record()


def read_subject(wheel: Path) -> AuditedWheel:
    """
    Return what the file name and the bytes of *wheel* state.

    Raises:
        wheel-invalid: The file is missing or not a regular file, its name is not a wheel's, or its
            directory is longer than any wheel's.
    """
    sha, entries = hashlib.sha256(), 0
    try:
        if wheel.exists() and not wheel.is_file():
            raise OSError("It is not a regular file.")
        name, version, _, tags = parse_wheel_filename(wheel.name)
        with wheel.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
                entries += block.count(_ENTRY)
    except (InvalidWheelFilename, OSError) as error:
        what = f"{wheel.name} is not a wheel."
        raise WheelError("wheel-invalid", what, details=[str(error)]) from error
    # zipfile reads the whole directory into memory, so its length is bounded first; archives that
    # are members count a little too.
    if entries > 2 * zips.MOST_MEMBERS:
        what = f"{wheel.name} has more than {zips.MOST_MEMBERS} members."
        raise WheelError("wheel-invalid", what)
    platforms = tuple(sorted({tag.platform for tag in tags}))
    return AuditedWheel(
        wheel.name, sha.hexdigest(), wheel.stat().st_size, name, str(version), platforms
    )


def _metadata(
    archive: zipfile.ZipFile, listed: dict[str, zipfile.ZipInfo], about: AuditedWheel
) -> tuple[str, Message]:
    """Return the name of the ``.dist-info`` folder, and the METADATA in it."""
    folders = sorted({name.partition("/")[0] for name in listed if ".dist-info/" in name})
    if len(folders) != 1:
        what = f"{about.file} has {len(folders)} .dist-info folders instead of one."
        raise WheelError("wheel-invalid", what, details=folders)
    text = member_text(archive, listed, f"{folders[0]}/METADATA", about.file)
    metadata = BytesParser().parsebytes(text, headersonly=True)
    name, version = canonicalize_name(str(metadata["Name"])), str(metadata["Version"])
    if (name, version) != (about.name, about.version):
        what = f"{about.file} holds another distribution."
        raise WheelError("wheel-invalid", what, details=[f"METADATA: {name} {version}"])
    return folders[0], metadata


def read_contents(wheel: Path, about: AuditedWheel) -> Contents:
    """
    Return what the directory and the metadata of *wheel* state.

    Raises:
        wheel-invalid, archive-unsafe: As `walk`; also for a build record that is not one.
    """
    with zips.zip_file(wheel) as archive:
        listed = zips.zip_members(archive, about.file)
        folder, metadata = _metadata(archive, listed, about)
        name = f"{folder}/{BUILD_RECORD}"
        text = member_text(archive, listed, name, about.file) if name in listed else b"{}"
        record = msgspec.json.decode(text, type=Record)
    return Contents(tuple(sorted(listed)), metadata, name in listed, record)


def walk(
    wheel: Path, about: AuditedWheel, scratch: Path, visit: Callable[[Binary], None]
) -> tuple[AuditFinding, ...]:
    """
    Read every member of *wheel* once, and return the differences between RECORD and the members.

    Args:
        scratch: An existing folder that holds an ELF member while *visit* is called with it, up to
            half a gigabyte for vLLM.

    Raises:
        wheel-invalid: The archive is damaged, holds more than any wheel, or is another distribution
            than its name states.
        archive-unsafe: A member's name leaves its folder, or it is a link.
        disk-full: There is no room for a member.
    """
    damage_guard = partial(zips.damage_guard, wheel.name, partial(WheelError, "wheel-invalid"))
    findings, unpacked = list[AuditFinding](), 0
    with (
        zips.opened(wheel) as archive,
        translate_disk_full(scratch),
        tempfile.TemporaryDirectory(prefix="wheel-", dir=scratch) as folder,
    ):
        # Errors of *visit* are no damage of the archive.
        with damage_guard():
            listed = zips.zip_members(archive, about.file)
            info_folder, _ = _metadata(archive, listed, about)
            rows = records(archive, listed, info_folder, about.file)
        unsigned = {f"{info_folder}/{name}" for name in _UNSIGNED}
        copy = Path(folder, "member")
        for name, info in sorted(listed.items()):
            with damage_guard(), archive.open(info) as stream, copy.open("w+b") as output:
                shutil.copyfileobj(stream, output, 1 << 20)
                output.seek(0)
                is_binary = output.read(4) == elf.MAGIC
                output.seek(0)
                sha256 = hashlib.file_digest(output, "sha256").hexdigest()
            if name not in unsigned:
                findings += _differences(name, rows.get(name), sha256, info.file_size)
            if is_binary:
                with contextlib.suppress(elf.ElfUnreadable), elf.mapped(copy) as data:
                    for entry in elf.fatbin_entries(data, elf.shared_object(data).fatbins):
                        unpacked += entry.size
                if unpacked > MOST_UNPACKED:
                    what = f"{about.file} holds more device code than any wheel."
                    raise WheelError("wheel-invalid", what, details=[f"library: {name}"])
                visit(Binary(name, copy, sha256, info.file_size))
    message = "RECORD lists it, the wheel does not hold it"
    lost = rows.keys() - listed.keys() - unsigned
    findings += [AuditFinding(name, "record-surplus", message) for name in lost]
    return tuple(sorted(findings))


def _differences(
    name: str, row: tuple[str, str] | None, sha256: str, size: int
) -> Iterator[AuditFinding]:
    digest = "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
    if row is None:
        yield AuditFinding(name, "record-missing", "RECORD does not list it")
    elif row[0].rstrip("=") != digest or row[1] not in ("", str(size)):
        stated = f"{row[0] or 'no hash'} and {row[1]} bytes"
        message = f"RECORD has {stated}; it is {digest}, {size} bytes"
        yield AuditFinding(name, "record-mismatch", message)


# The audit.


def cached_audit(
    context: RunContext, path: Path, judged: Literal["stack", "any"] | None = None
) -> AuditReport:
    """
    Return the audit of the wheel at *path*, from the store if its inputs are unchanged.

    Args:
        judged: As of `audit`.
    """
    policy = load(context.project.audit_file, context.project.spec.arch)
    inputs = {
        "wheel": sha256_file(path),
        "name": path.name,
        "policy": policy,
        "judged": judged,
        "form": FORM,
    }
    key = content_key("audit", inputs)
    if stored := context.store.get("audit", key, AuditReport):
        return stored
    programs, scratch = toolchain.obtain(context).cuda / "bin", context.store.folder("work")
    with console.step(f"audit {path.name}"):
        result = audit(path, policy, programs, scratch=scratch, judged=judged)
    context.store.put("audit", key, result)
    return result


def audit(
    wheel: Path,
    policy: AuditPolicy,
    programs: Path,
    *,
    scratch: Path | None = None,
    judged: Literal["stack", "any"] | None = "stack",
) -> AuditReport:
    """
    Return the contents of *wheel*, and the differences from *policy*.

    `sparkwright.audit.device_code` describes the device-code digest.

    Args:
        programs: The folder of nvdisasm.
        scratch: An existing folder for the libraries while they are read; the system's temporary
            folder by default.
        judged: See `AuditReport.judged`; None for ``stack`` if the wheel holds our build record,
            else ``any``.

    Raises:
        wheel-invalid: It is not a wheel, is damaged, is too large, or is another distribution than
            its name states.
        archive-unsafe: A member's name leaves its folder, or it is a link.
        tool-missing: *programs* lacks nvdisasm, and a kernel is to be read.
        disk-full: There is no room for the largest library and its cubins.
    """
    deadline = time.monotonic() + MOST_SECONDS
    about = read_subject(wheel)
    contents = read_contents(wheel, about)
    judged = judged or ("stack" if contents.ours else "any")
    libraries, findings = list[AuditedLibrary](), list[AuditFinding]()
    parent = scratch or Path(tempfile.gettempdir())

    def visit(binary: Binary) -> None:
        audited = LibraryAudit(policy, about, contents, binary.name, ours=judged == "stack")
        with tempfile.TemporaryDirectory(prefix="cubins-", dir=parent) as cubins:
            libraries.append(audited.inspect(binary, programs, Path(cubins), deadline))
        findings.extend(audited.findings)

    with translate_disk_full(parent):
        findings += walk(wheel, about, parent, visit)
    listed = policy.distributions.get(about.name) or DistributionPolicy("not listed")
    findings += _check_members(about, contents.names, listed)
    present = [policy.library(about.name, library.name) for library in libraries]
    findings += [
        AuditFinding(wants.glob, "library-missing", "the policy asks for it")
        for wants in listed.libraries
        if wants.role == "target" and wants not in present and judged == "stack"
    ]
    return AuditReport(
        subject=about,
        target=policy.target,
        policy=sha256_bytes(canonical(policy)),
        libraries=tuple(sorted(libraries, key=lambda library: library.name)),
        findings=tuple(sorted(findings)),
        device_code=device_code.wheel_digest(library.device_code for library in libraries),
        judged=judged,
        deviations=contents.record.deviations,
    )


def _check_members(
    about: AuditedWheel, names: Sequence[str], listed: DistributionPolicy
) -> Iterator[AuditFinding]:
    """Yield findings about the wheel's size, and copies of others' libraries among its members."""
    if listed.size_max is not None and about.size > listed.size_max:
        yield AuditFinding("", "size-over", f"{about.size} bytes, allowed: {listed.size_max}")
    for name in names:
        folder, _, file = name.rpartition("/")
        if _DRIVER_FILES.fullmatch(file):
            message = "the driver is the machine's own, and a copy of another version breaks it"
            yield AuditFinding(name, "vendored-driver", message)
        elif _OTHERS.fullmatch(file) or folder.partition("/")[0].endswith(".libs"):
            message = "two copies of a library in one process do not share their state"
            yield AuditFinding(name, "vendored-library", message)


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
        self._library_policy = wants = policy.library(about.name, name)
        self._device = policy.device
        self._policy = replace(policy, arch=wants.arch) if wants and wants.arch else policy
        #: The policy of a library whose kernels a Spark needs; None for another.
        self._target = wants if wants and wants.role == "target" else None
        #: Units of this library, and those that are linked into several.
        self._units = [unit for unit in contents.record.units if unit.library in (name, "")]
        self.findings: list[AuditFinding] = []

    def _find(
        self,
        rule: str,
        message: str,
        images: Iterable[device_code.DeviceImage] = (),
        units: Iterable[CompiledUnit] = (),
    ) -> None:
        """Add a finding about the library, these *units* and those that *images* come from."""
        hashes = {image.sha256 for image in images}
        sources = [unit for unit in self._units if any(code[1] in hashes for code in unit.code)]
        names = tuple(unit.name for unit in (*units, *sources))
        self.findings.append(AuditFinding(self._name, rule, message, names))

    def inspect(
        self, binary: Binary, programs: Path, scratch: Path, deadline: float
    ) -> AuditedLibrary:
        """
        Return what the library holds, and report the differences from the policy.

        Args:
            programs: The folder of nvdisasm.
            scratch: Takes the cubins that are disassembled, until *deadline* by `time.monotonic`.

        Raises:
            tool-missing: nvdisasm is not there, and a kernel is to be read.
        """
        wants = self._library_policy
        role = wants.role if wants else "unknown"
        library = AuditedLibrary(binary.name, binary.sha256, binary.size, role)
        if wants is None and self._ours:
            self._find("library-unknown", f"no policy for {self._about.name} names it")
        try:
            with elf.mapped(binary.path) as data:
                shared = elf.shared_object(data)
                library = replace(library, machine=shared.machine)
                self.check_host(data, shared)
                return self.check_device(library, data, shared, programs, scratch, deadline)
        except elf.ElfUnreadable as error:
            self._find("elf-unreadable", str(error))
            return library

    # Host code.

    def check_host(self, data: elf.Buffer, shared: elf.SharedObject) -> None:
        """Report what the library needs beside the promises of the wheel and the policy."""
        machine, platforms = shared.machine, self._about.platforms
        if machine in ("x86_64", "aarch64"):
            if not all(platform.endswith(machine) for platform in platforms):
                message = f"it is for {machine}, the wheel for {', '.join(platforms)}"
                self._find("machine-foreign", message)
            promised, required = elf.promised_glibc(platforms), elf.required_glibc(shared)
            if promised and (not required or required > promised):
                needs = f"glibc {elf.version_text(required)}" if required else "more than any has"
                message = f"it needs {needs}, the tag promises glibc {elf.version_text(promised)}"
                self._find("tag-newer", message)
        if self._name.endswith(".abi3.so"):
            self._check_python(shared)
        self._check_torch(shared)
        # A driver may have been given another file name.
        if _DRIVER_FILES.fullmatch(shared.soname):
            self._find("vendored-driver", f"it is known to the loader as {shared.soname}")
        if self._ours:
            self._check_policy(data, shared)

    def _check_policy(self, data: elf.Buffer, shared: elf.SharedObject) -> None:
        """Report needs, search paths, symbols and operators that the policy does not have so."""
        wants = self._library_policy or LibraryPolicy("", "target")
        for entry in shared.rpath:
            self._find("rpath-present", f"it looks for shared libraries in {entry}")
        for name in wants.symbols:
            if name not in shared.symbols:
                self._find("symbol-missing", f"it does not define {name}")
        for name in wants.operators:
            if missing := _missing_operator(data, name):
                self._find("operator-missing", f"{name}: {missing}")
        allowed = (*self._policy.needed, *wants.needed)
        for name in shared.needed:
            if not any(fnmatchcase(name, pattern) for pattern in allowed):
                self._find("needed-foreign", f"it wants {name}")
        driver = sorted(filter(_DRIVER_FUNCTION.fullmatch, shared.imports))
        if driver and _DRIVER not in shared.needed:
            calls = f"{', '.join(driver[:3])} ({len(driver)} functions)"
            self._find("driver-unnamed", f"it calls {calls}, and does not want {_DRIVER}")

    def _check_python(self, shared: elf.SharedObject) -> None:
        """Report symbols beside the limited API of the oldest Python that may install the wheel."""
        floors = ["3.2", self._library_policy.python if self._library_policy else ""]
        floors += [f"3.{minor}" for minor in _ABI3_TAG.findall(self._about.file)]
        floors += _AT_LEAST_PYTHON.findall(str(self._metadata["Requires-Python"]))
        added, floor = _limited_api(), max(map(elf.version_key, floors))
        names = [
            name
            for name in sorted(shared.imports | shared.symbols)
            if name.startswith(("Py", "_Py")) and not name.startswith("PyInit_")
        ]
        if private := [name for name in names if name not in added]:
            self._find("abi3-violated", f"it uses {', '.join(private[:5])}")
        if newer := [name for name in names if added.get(name, floor) > floor]:
            promised = f"the wheel promises Python {elf.version_text(floor)}"
            self._find("abi3-newer", f"{promised}, and it uses {', '.join(newer[:5])}")

    def _check_torch(self, shared: elf.SharedObject) -> None:
        """Report symbols beside torch's stable ABI, and those of a newer torch than required."""
        from torch_abi_audit.torch_versions import minimum_version

        internal = [name for name in shared.imports if _TORCH_INTERNAL.search(name)]
        if internal and self._library_policy and self._library_policy.torch == "stable":
            message = f"it uses {len(internal)} symbols beside torch's stable ABI"
            self._find("torch-unstable", message)
        stable = [name for name in shared.imports if name.startswith(_TORCH_STABLE)]
        oldest, _, _ = minimum_version(stable)
        # A line that is not ASCII is no string.
        stated = map(str, self._metadata.get_all("Requires-Dist", []))
        required = filter(_TORCH_REQUIRED.match, stated)
        versions = [elf.version_key(text) for text in _AT_LEAST.findall(" ".join(required))]
        if oldest and versions and oldest > (*max(versions), 0, 0)[:3]:
            wants = f"the wheel requires {elf.version_text(max(versions))}"
            self._find("torch-newer", f"it needs torch {elf.version_text(oldest)}, {wants}")

    # Device code.

    def check_device(
        self,
        library: AuditedLibrary,
        data: elf.Buffer,
        shared: elf.SharedObject,
        programs: Path,
        scratch: Path,
        deadline: float,
    ) -> AuditedLibrary:
        """Return *library* with its device code, and report the differences from the policy."""
        target = self._target
        if target and not shared.fatbins:
            linked = [unit for unit in self._units if unit.library]
            self._find("arch-missing", "it holds no device code at all", units=linked)
        patterns = [re.compile(text) for text in target.kernels] if target and self._ours else []
        cubins = dict[Path, device_code.DeviceImage]()

        def visit(image: device_code.DeviceImage, content: bytes) -> None:
            if image.contradicted:
                stated = f"the table says {image.listed}, the code {image.target}"
                self._find("arch-contradicted", f"fatbin {image.container}: {stated}", [image])
            if any(rule.search(name) for rule in patterns for name in image.kernels):
                path = scratch / f"{len(cubins)}.cubin"
                path.write_bytes(content)
                cubins[path] = image

        generation = self._policy.generation
        code = device_code.read(data, shared, generation, compiled=target is not None, visit=visit)
        if code.fault:
            self._find("device-unreadable", code.fault)
        library = replace(
            library,
            device_code=code.digest,
            cubins=code.counts("cubin"),
            ptx=code.counts("ptx"),
            spark=device_code.gains(code.images, self._device),
        )
        if target is None or not code.images:
            return library
        if not self._ours:
            if not library.spark.keys() & {"native", "family", "plain"}:
                device = elf.version_text(self._device)
                self._find("code-missing", f"no machine code in it is for a GPU of SM {device}")
            return library
        self._check_archs(code.images, target)
        self._check_units(code.images)
        try:
            kernels = [
                (kernel, counts, image)
                for path, image in cubins.items()
                for kernel, counts in device_code.opcodes(path, programs, deadline).items()
            ]
        except CommandError as error:
            # A report is stored: that this machine was too slow once is nothing about the wheel.
            if error.reference != "command-failed" or time.monotonic() >= deadline:
                raise
            self._find("device-unreadable", str(error))
            return library
        return self._check_kernels(library, kernels, target)

    def _check_archs(self, images: Sequence[device_code.DeviceImage], wants: LibraryPolicy) -> None:
        """Report code of other targets than the policy's, and a library without code for it."""
        target, generation = self._policy.target, self._policy.generation
        by_target: dict[tuple[str, str], list[device_code.DeviceImage]] = {("cubin", target): []}
        for image in images:
            by_target.setdefault((image.kind, image.target), []).append(image)
        if not by_target.pop(("cubin", target)):
            self._find("arch-missing", f"cubins for {target}: 0")
        for (kind, arch), group in by_target.items():
            rule, what = "arch-foreign", "cubins"
            if kind == "ptx":
                rule, what = "ptx-foreign", "PTX files"
            elif arch.endswith("?"):
                rule = "arch-unknown"
            elif is_generation(arch, generation):
                rule = "arch-folded"
            allowed = wants.ptx if kind == "ptx" else wants.also
            most = next((entry.most for entry in allowed if entry.arch == arch), 0)
            if len(group) > most:
                self._find(rule, f"{what} for {arch}: {len(group)}, allowed: {most}", group)

    def _check_units(self, images: Sequence[device_code.DeviceImage]) -> None:
        """Report units without code in the library or for the target, and code of no unit."""
        target = self._policy.target
        by_hash = {image.sha256: image for image in images if image.sha256}
        native = {
            image.sha256 for image in images if (image.kind, image.target) == ("cubin", target)
        }
        linked = [unit for unit in self._units if unit.library]
        for unit in linked:
            # Cubins of other generations are not unpacked.
            code = [
                sha256
                for arch, sha256 in unit.code
                if arch.startswith("compute_") or is_generation(arch, self._policy.generation)
            ]
            planned = any(entry.endswith(f":{target}") for entry in unit.gencode)
            if lost := len(set(code) - by_hash.keys()):
                message = f"{lost} of the {len(code)} pieces of code in its object are not in it"
                self._find("arch-missing", message, units=[unit])
            elif planned and unit.code and native.isdisjoint(sha256 for _, sha256 in unit.code):
                message = f"its object holds no cubin for {target}"
                self._find("arch-missing", message, units=[unit])
        compiled = {sha256 for unit in self._units for _, sha256 in unit.code}
        foreign = [image for sha256, image in by_hash.items() if sha256 not in compiled]
        # The device linker makes new code of relocatable code.
        if foreign and linked and all(unit.code for unit in self._units):
            archs = ", ".join(sorted({image.target for image in foreign}))
            self._find("code-foreign", f"{len(foreign)} of {len(by_hash)}, for {archs}")

    def _check_kernels(
        self,
        library: AuditedLibrary,
        kernels: Sequence[tuple[str, Counter[str], device_code.DeviceImage]],
        wants: LibraryPolicy,
    ) -> AuditedLibrary:
        """Return *library* with its opcodes, and report instructions missing and traps present."""
        totals, traps = list[OpcodeCount](), 0
        for rule in wants.opcodes:
            named = [entry for entry in kernels if re.search(rule.kernels, entry[0])]
            matches = re.compile(rule.pattern).search
            total = sum(
                count
                for _, opcodes, _ in named
                for opcode, count in opcodes.items()
                if matches(opcode)
            )
            totals.append(OpcodeCount(rule.pattern, total, rule.least))
            if total < rule.least:
                message = f"{rule.pattern}: {total}, required: {rule.least}"
                self._find("opcode-missing", message, [image for _, _, image in named])
        for free in wants.trap_free:
            named = [entry for entry in kernels if re.search(free.kernels, entry[0])]
            if not named:
                self._find("kernel-missing", f"no kernel matches {free.kernels}")
            for kernel, opcodes, image in named:
                if count := opcodes[device_code.TRAP]:
                    traps += count
                    what = f"{count} {device_code.TRAP} in {kernel[:160]}"
                    self._find("trap-present", f"{what}: {free.reason}", [image])
        return replace(library, opcodes=tuple(totals), traps=traps)


@functools.cache
def _limited_api() -> dict[str, tuple[int, ...]]:
    """Return the functions and data of Python's limited API, and the version that added each."""
    from abi3info import DATAS, FUNCTIONS

    entries = [*FUNCTIONS.items(), *DATAS.items()]
    return {symbol.name: (entry.added.major, entry.added.minor) for symbol, entry in entries}


def _missing_operator(data: elf.Buffer, operator: str) -> str:
    """Return what the library lacks of *operator*; empty if it declares and implements it."""
    name = operator.encode()
    # A string begins after the NUL of the one before it, or with the section. A linker may share
    # the name with the end of a longer string.
    schema = re.compile(rb"(?:\A|\0)%s\([^\0]{0,%d}?\) -> " % (re.escape(name), _LONGEST_SCHEMA))
    parts = [
        section
        for section in elf.sections(data)
        if section.name.startswith(".rodata") and section.kind != elf.NO_BITS
    ]
    if sum(part.size for part in parts) > len(data):
        raise elf.ElfUnreadable("its sections of read-only data overlap")
    texts = [data[part.offset : part.offset + part.size] for part in parts]
    if not any(map(schema.search, texts)):
        return "not declared"
    return "" if any(name + b"\0" in text for text in texts) else "declared, not implemented"
