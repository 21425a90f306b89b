"""
One library against its policy: machine, shared libraries, symbols and operators, and its device
code with the unit manifest.

Operators are read from the strings in a library's read-only data. torch learns of an operator
twice: ``def`` gives its schema (``name(Tensor a, …) -> Tensor``), ``impl`` its name with the
function. Both are strings that end in NUL. A build that leaves a unit out for its arch keeps the
schema, which a common source file declares, and loses the ``impl``, which the unit itself
registers: so the official vLLM 0.33.0 and a build for 12.1f declare `machete_mm` alike, and only
the former implements it. The bytes do not state the device of an implementation.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec.structs import replace

from sparkwright.audit import device_code, tools
from sparkwright.audit.device_code import GAINS, DeviceImage
from sparkwright.audit.policy import AuditPolicy, LibraryPolicy, is_generation
from sparkwright.audit.report import AuditedLibrary, AuditFinding, OpcodeCount
from sparkwright.audit.wheel_reader import Contents
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import NO_BITS, Buffer, ElfUnreadable, SharedObject
from sparkwright.builder.wheel.fatbin import FatbinUnreadable
from sparkwright.core.errors import CommandError

#: Provides the driver's functions; torch loads it for itself alone.
DRIVER = "libcuda.so.1"
#: The driver's libraries; a copy made by ``auditwheel repair`` has a hash in its name.
DRIVER_FILES = re.compile(r"lib(cuda|nvidia-[\w-]+|nvcuvid|nvoptix)(-[0-9a-f]{8})?\.so(\.\d+)*")
#: The longest schema of vLLM has some 1,500 letters.
_LONGEST_SCHEMA = 8192


class LibraryAudit:
    """
    The audit of one library of a wheel.

    Args:
        policy: Of the stack.
        distribution: Whose wheel it is.
        name: The member's name.
        programs: The folder of nvdisasm.
        ours: Whether the library must be made for the stack's target; a wheel that was not built
            here is only read.
    """

    def __init__(
        self,
        policy: AuditPolicy,
        distribution: str,
        name: str,
        contents: Contents,
        programs: Path,
        *,
        ours: bool = True,
    ) -> None:
        self.name, self.ours, self._programs = name, ours, programs
        self.wants = wants = policy.library(distribution, name)
        self.device = policy.device
        self._policy = replace(policy, arch=wants.arch) if wants and wants.arch else policy
        #: Units of this library, and those that are linked into several.
        self._units = [unit for unit in contents.units if unit.library in (name, "")]
        self.findings: list[AuditFinding] = []

    def find(self, rule: str, message: str, units: Iterable[str] = ()) -> None:
        """Add a finding about the library and these translation units."""
        self.findings.append(AuditFinding(self.name, rule, message, tuple(units)))

    @property
    def target(self) -> LibraryPolicy | None:
        """The policy of a library whose kernels a Spark needs; None for another."""
        return self.wants if self.wants and self.wants.role == "target" else None

    def check_host(self, data: Buffer, shared: SharedObject, platforms: Sequence[str]) -> None:
        """Report what the library needs beside the promises of its tag and the policy."""
        wants, machine = self.wants, shared.machine
        foreign = not all(platform.endswith(machine) for platform in platforms)
        if machine in ("x86_64", "aarch64") and foreign:
            message = f"it is for {machine}, the wheel for {', '.join(platforms)}"
            self.find("machine-foreign", message)
        # A driver may have been given another file name.
        if DRIVER_FILES.fullmatch(shared.soname):
            self.find("vendored-driver", f"it is known to the loader as {shared.soname}")
        for entry in shared.rpath:
            inside = not self.ours and (entry == "$ORIGIN" or entry.startswith("$ORIGIN/"))
            if not inside:
                self.find("rpath-present", f"it looks for shared libraries in {entry}")
        for name in wants.symbols if wants else ():
            if name not in shared.symbols:
                self.find("symbol-missing", f"it does not define {name}")
        for name in wants.operators if wants else ():
            if missing := _missing_operator(data, name):
                self.find("operator-missing", f"{name}: {missing}")
        # The needs of a wheel that no policy describes are shown, and not judged.
        if not (self.ours or wants):
            return
        allowed = (*self._policy.needed, *(wants.needed if wants else ()))
        for name in shared.needed:
            if not any(fnmatchcase(name, pattern) for pattern in allowed):
                self.find("needed-foreign", f"it wants {name}")
        if shared.driver and DRIVER not in shared.needed:
            calls = f"{', '.join(shared.driver[:3])} ({len(shared.driver)} functions)"
            self.find("driver-unnamed", f"it calls {calls}, and does not want {DRIVER}")

    def check_device(
        self, library: AuditedLibrary, data: Buffer, shared: SharedObject, scratch: Path
    ) -> AuditedLibrary:
        """
        Return *library* with the contents of its device code, and report differences from the
        policy.

        Args:
            scratch: Takes the cubins that are disassembled.

        Raises:
            tool-missing: nvdisasm is not there, and a kernel is to be read.
        """
        if not shared.has_device_code:
            if self.target:
                units = [unit.name for unit in self._units if unit.library]
                self.find("arch-missing", "it holds no device code at all", units)
            return library
        library = replace(library, device_code=device_code.sections_digest(data, shared))
        try:
            return self._check_device(library, data, shared, scratch)
        except (CommandError, ElfUnreadable, FatbinUnreadable) as error:
            details: Sequence[str] = ()
            if isinstance(error, CommandError):
                if error.reference != "command-failed":
                    raise
                details = error.details[:2]
            self.find("device-unreadable", " ".join([str(error), *details]))
            return library

    def _check_device(
        self, library: AuditedLibrary, data: Buffer, shared: SharedObject, scratch: Path
    ) -> AuditedLibrary:
        images, cubins = self._read(data, shared, scratch)
        # A fatbin is a translation unit, of which the driver takes one image.
        units: dict[int, list[DeviceImage]] = {}
        for image in images:
            units.setdefault(image.container, []).append(image)
        gains = {
            number: device_code.gain(
                device_code.counts(unit, "cubin"), device_code.counts(unit, "ptx"), self.device
            )
            for number, unit in units.items()
        }
        numbers = Counter(gain for gain, _ in gains.values())
        library = replace(
            library,
            cubins=device_code.counts(images, "cubin"),
            ptx=device_code.counts(images, "ptx"),
            spark={gain: numbers[gain] for gain in GAINS if numbers[gain]},
        )
        if self.target is None:
            return library
        library = replace(
            library, device_code=device_code.library_digest(image.sha256 for image in images)
        )
        if self.ours:
            self._check_archs(images, self.target)
            self._check_units(images)
        elif not numbers.keys() & {"native", "family", "plain"}:
            device = elf.version_text(self.device)
            self.find("code-missing", f"no machine code in it is for a GPU of SM {device}")
        targets = {number: target for number, (gain, target) in gains.items() if gain != "jit"}
        loaded = {
            path: image
            for path, image in cubins.items()
            if targets.get(image.container) == image.target
        }
        archs = sorted(set(targets.values()) - {""})
        return self._check_kernels(library, self._disassemble(loaded), archs, self.target)

    def _read(
        self, data: Buffer, shared: SharedObject, scratch: Path
    ) -> tuple[list[DeviceImage], dict[Path, DeviceImage]]:
        """Return all images, and the cubins with a kernel that the policy names by their path."""
        target, images, cubins = self.target, list[DeviceImage](), dict[Path, DeviceImage]()
        names = (
            [rule.kernels for rule in target.opcodes] + [rule.kernels for rule in target.trap_free]
            if target
            else []
        )
        patterns = [re.compile(name) for name in names]
        generation = self._policy.generation
        for image, content in device_code.images(
            data, shared, generation, whole_ptx=target is not None
        ):
            images.append(image)
            if image.contradicted:
                message = (
                    f"fatbin {image.container}: the table says {image.listed}, "
                    f"the code {image.target}"
                )
                self.find("arch-contradicted", message, self._unit_names([image]))
            named = any(pattern.search(name) for pattern in patterns for name in image.kernels)
            if image.kind == "cubin" and content and named:
                path = scratch / f"{len(cubins)}.cubin"
                path.write_bytes(content)
                cubins[path] = image
        return images, cubins

    def _unit_names(self, images: Iterable[DeviceImage]) -> list[str]:
        """Return the names of the translation units that *images* were compiled from."""
        hashes = {image.sha256 for image in images}
        return [unit.name for unit in self._units if hashes & {sha256 for _, sha256 in unit.code}]

    def _check_archs(self, images: Sequence[DeviceImage], wants: LibraryPolicy) -> None:
        """Report code of other targets than the policy's, and a library without code for it."""
        target, generation = self._policy.target, self._policy.generation
        by_target: dict[tuple[str, str], list[DeviceImage]] = {}
        for image in images:
            by_target.setdefault((image.kind, image.target), []).append(image)
        if ("cubin", target) not in by_target:
            self.find("arch-missing", f"cubins for {target}: 0")
        for (kind, arch), group in by_target.items():
            if kind == "ptx":
                rule, what = "ptx-foreign", "PTX files"
            elif arch.endswith("?"):
                rule, what = "arch-unknown", "cubins"
            else:
                folded = is_generation(arch, generation)
                rule, what = "arch-folded" if folded else "arch-foreign", "cubins"
            allowed = wants.ptx if kind == "ptx" else wants.also
            most = next((entry.most for entry in allowed if entry.arch == arch), 0)
            if len(group) > most and (kind, arch) != ("cubin", target):
                message = f"{what} for {arch}: {len(group)}, allowed: {most}"
                self.find(rule, message, self._unit_names(group))

    def _check_units(self, images: Sequence[DeviceImage]) -> None:
        """Report units without code in the library or for the target, and code of no unit."""
        by_hash = {image.sha256: image for image in images if image.sha256}
        target, generation = self._policy.target, self._policy.generation
        linked = [unit for unit in self._units if unit.library]
        for unit in linked:
            # Cubins of other generations are not unpacked.
            code = [
                sha256
                for arch, sha256 in unit.code
                if arch.startswith("compute_") or is_generation(arch, generation)
            ]
            present = [by_hash[sha256] for sha256 in code if sha256 in by_hash]
            if len(present) < len(code):
                lost = f"{len(code) - len(present)} of the {len(code)} pieces of code"
                self.find("arch-missing", f"{lost} in its object are not in it", [unit.name])
            elif (
                code
                and any(entry.endswith(f":{target}") for entry in unit.gencode)
                and not any(image.target == target for image in present)
            ):
                message = f"its object holds no cubin for {target}"
                self.find("arch-missing", message, [unit.name])
        compiled = {sha256 for unit in self._units for _, sha256 in unit.code}
        foreign = {image.target for sha256, image in by_hash.items() if sha256 not in compiled}
        # The device linker makes new code of relocatable code.
        if foreign and linked and all(unit.code for unit in self._units):
            number = len(by_hash.keys() - compiled)
            message = f"{number} of {len(by_hash)}, for {', '.join(sorted(foreign))}"
            self.find("code-foreign", message)

    def _disassemble(
        self, cubins: Mapping[Path, DeviceImage]
    ) -> dict[str, tuple[Counter[str], list[DeviceImage]]]:
        """Return the opcodes of all kernels of the cubins by kernel name, and their cubins."""
        kernels: dict[str, tuple[Counter[str], list[DeviceImage]]] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = pool.map(lambda path: tools.opcodes(path, self._programs), cubins)
            for image, opcodes in zip(cubins.values(), results, strict=True):
                for kernel, count in opcodes.items():
                    total, images = kernels.setdefault(kernel, (Counter(), []))
                    total.update(count)
                    images.append(image)
        return kernels

    def _check_kernels(
        self,
        library: AuditedLibrary,
        kernels: Mapping[str, tuple[Counter[str], list[DeviceImage]]],
        archs: Sequence[str],
        wants: LibraryPolicy,
    ) -> AuditedLibrary:
        """Return *library* with its opcodes, and report instructions missing and traps present."""
        arch = "+".join(archs) or self._policy.target
        totals, traps = list[OpcodeCount](), 0
        for rule in wants.opcodes:
            named = [kernel for kernel in kernels if re.search(rule.kernels, kernel)]
            matches = re.compile(rule.pattern).search
            total = sum(
                count
                for kernel in named
                for opcode, count in kernels[kernel][0].items()
                if matches(opcode)
            )
            totals.append(OpcodeCount(rule.pattern, total, rule.least))
            if total < rule.least:
                images = [image for kernel in named for image in kernels[kernel][1]]
                number = f"{total}, required: {rule.least}"
                message = f"{rule.pattern} in the code for {arch}: {number}"
                self.find("opcode-missing", message, self._unit_names(images))
        for free in wants.trap_free:
            named = [kernel for kernel in kernels if re.search(free.kernels, kernel)]
            if not named:
                message = f"no kernel in the code for {arch} matches {free.kernels}"
                self.find("kernel-missing", message)
            for kernel in named:
                opcodes, images = kernels[kernel]
                if count := opcodes[tools.TRAP]:
                    traps += count
                    message = f"{count} {tools.TRAP} in {kernel[:160]}: {free.reason}"
                    self.find("trap-present", message, self._unit_names(images))
        return replace(library, opcodes=tuple(totals), traps=traps)


def _missing_operator(data: Buffer, operator: str) -> str:
    """Return what the library lacks of *operator*; empty if it declares and implements it."""
    name = operator.encode()
    constants = [
        (section.offset, section.offset + section.size)
        for section in elf.sections(data)
        if section.name.startswith(".rodata") and section.kind != NO_BITS
    ]
    # A linker may share a string with the end of a longer one.
    named = any(data.find(name + b"\0", begin, end) >= 0 for begin, end in constants)
    if any(_declares(data, begin, end, name) for begin, end in constants):
        return "" if named else "declared, not implemented"
    if named:
        return "no schema declares it, although its name is there"
    return "neither declared nor implemented"


def _declares(data: Buffer, begin: int, end: int, name: bytes) -> bool:
    """Return whether a string between *begin* and *end* is a schema of the operator *name*."""
    at = data.find(name + b"(", begin, end)
    while at >= 0:
        # A string begins after the NUL of the one before it, or with the section.
        stop = data.find(b"\0", at, min(end, at + _LONGEST_SCHEMA))
        if (at == begin or data[at - 1] == 0) and data.find(b") -> ", at, max(stop, at)) > 0:
            return True
        at = data.find(name + b"(", at + 1, end)
    return False
