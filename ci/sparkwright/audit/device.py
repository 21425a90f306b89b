"""
The device code of one library against its policy and its unit manifest, and what a GPU of the stack
gets from it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from sparkwright.audit import device_code, gpu_compat, sass
from sparkwright.audit.device_code import DeviceImage
from sparkwright.audit.gpu_compat import FP4_KERNELS, FP4_OPCODES
from sparkwright.audit.policy import Allowed, AuditPolicy, LibraryPolicy, is_generation
from sparkwright.audit.report import Library, OpcodeCount
from sparkwright.audit.sass import CudaTools
from sparkwright.builder.compile.unit_manifest import CompiledUnit
from sparkwright.builder.wheel.elf import Buffer, ElfUnreadable, SharedObject
from sparkwright.builder.wheel.fatbin import FatbinUnreadable
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError


class Find(Protocol):
    """Reports a finding: its rule, its message, and the translation units that it concerns."""

    def __call__(self, rule: str, message: str, units: Sequence[str] = ()) -> None: ...


class Case(msgspec.Struct, frozen=True):
    """
    What one library is judged by.

    Attributes:
        policy: Of the stack, with the library's own arch where it has one.
        wants: The library's own policy; None when nothing names it.
        find: Called for each disagreement.
        device: The compute capability of the stack's GPU.
        ours: Whether the library must be made for the stack's target; a wheel that was not built
            here is
            only read.
        units: The translation units of the library and of those linked into several, where the
            wheel has
            a unit manifest.
    """

    policy: AuditPolicy
    wants: LibraryPolicy | None
    tools: CudaTools
    find: Find
    device: tuple[int, int]
    ours: bool = True
    units: tuple[CompiledUnit, ...] = ()

    @property
    def target(self) -> LibraryPolicy | None:
        """The policy of a library whose kernels a Spark needs; None for another."""
        return self.wants if self.wants and self.wants.role == "target" else None

    def names(self, images: Iterable[DeviceImage]) -> list[str]:
        """Return the names of the translation units that *images* were compiled from."""
        hashes = {image.sha256 for image in images}
        return [
            unit.name for unit in self.units if any(sha256 in hashes for _, sha256 in unit.code)
        ]


def inspect(
    library: Library, data: Buffer, host: SharedObject, case: Case, folder: Path
) -> Library:
    """
    Return *library* with what its device code holds, and report where that is not what the policy
    asks for.

    Args:
        folder: Takes the cubins that are disassembled.

    Raises:
        tool-missing: nvdisasm is not there, and a kernel is to be read.
    """
    whole = replace(library, device_code=device_code.sections_digest(data, host) or library.sha256)
    try:
        return _inspect(whole, data, host, case, folder)
    except (CommandError, ElfUnreadable, FatbinUnreadable) as error:
        if isinstance(error, CommandError) and error.reference != "command-failed":
            raise
        details = error.details if isinstance(error, CommandError) else ()
        case.find("device-unreadable", " ".join([str(error), *details[:2]]))
        return whole


def _inspect(
    library: Library, data: Buffer, host: SharedObject, case: Case, folder: Path
) -> Library:
    images, cubins = _read(data, host, case, folder)
    containers = device_code.by_container(images)
    archs = [
        [device_code.targets(group, kind) for kind in ("cubin", "ptx")]
        for group in containers.values()
    ]
    library = replace(
        library,
        cubins=_sorted(Counter(device_code.targets(images, "cubin"))),
        ptx=_sorted(Counter(device_code.targets(images, "ptx"))),
        spark=gpu_compat.of_units(archs, case.device),
    )
    if case.target:
        digest = device_code.library_digest(image.sha256 for image in images if image.sha256)
        library = replace(library, device_code=digest)
        if case.ours:
            _check_arch(images, case, case.target)
            _check_units(images, case)
        elif not library.spark.targets:
            message = (
                f"no machine code in it is for SM {library.spark.device}: {library.spark.says}"
            )
            case.find("code-missing", message)
    # Only the code that the stack's GPU would load is disassembled.
    taken = {
        number: gpu_compat.chosen(device_code.targets(group, "cubin"), (), case.device)[1]
        for number, group in containers.items()
    }
    loaded = {
        path: image for path, image in cubins.items() if taken[image.container] == image.target
    }
    return _check_kernels(
        library, _disassemble(loaded, case.tools), set(taken.values()) - {""}, case
    )


def _read(
    data: Buffer, host: SharedObject, case: Case, folder: Path
) -> tuple[list[DeviceImage], dict[Path, DeviceImage]]:
    """
    Return all images, and those cubins that hold a kernel of interest by their path in *folder*.
    """
    opcodes, trap_free = (case.wants.opcodes, case.wants.trap_free) if case.wants else ((), ())
    named = [*(rule.kernels for rule in opcodes), *(rule.kernels for rule in trap_free)]
    patterns = [FP4_KERNELS, *map(re.compile, named)]
    images: list[DeviceImage] = []
    cubins: dict[Path, DeviceImage] = {}
    for image, content in device_code.images(
        data, host, case.policy.generation, whole_ptx=case.target is not None
    ):
        images.append(image)
        if image.contradicted:
            message = (
                f"fatbin {image.container}: the table says {image.listed}, the code {image.target}"
            )
            case.find("arch-contradicted", message, case.names([image]))
        wanted = any(pattern.search(kernel) for pattern in patterns for kernel in image.kernels)
        if image.kind == "cubin" and content and wanted:
            path = folder / f"{len(cubins)}.cubin"
            path.write_bytes(content)
            cubins[path] = image
    return images, cubins


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (len(item[0].rstrip("af?")), item[0])))


def _check_arch(images: Sequence[DeviceImage], case: Case, wants: LibraryPolicy) -> None:
    """Report code of other targets than the policy's, and a library without code for it."""
    target = case.policy.target
    by_target: dict[tuple[str, str], list[DeviceImage]] = {}
    for image in images:
        by_target.setdefault((image.kind, image.target), []).append(image)
    if ("cubin", target) not in by_target:
        case.find("arch-missing", f"cubins for {target}: 0")
    for (kind, arch), group in by_target.items():
        rule = (
            "ptx-foreign"
            if kind == "ptx"
            else "arch-unknown"
            if arch.endswith("?")
            else "arch-foreign"
        )
        if rule == "arch-foreign" and is_generation(arch, case.policy.generation):
            rule = "arch-folded"
        allowed: Iterable[Allowed] = wants.ptx if kind == "ptx" else wants.also
        most = next((entry.most for entry in allowed if entry.arch == arch), 0)
        if len(group) > most and (kind, arch) != ("cubin", target):
            what = "PTX files for" if kind == "ptx" else "cubins for"
            case.find(rule, f"{what} {arch}: {len(group)}, allowed: {most}", case.names(group))


def _check_units(images: Sequence[DeviceImage], case: Case) -> None:
    """Report units whose code is not in the library, or not for the target, and code of no unit."""
    by_hash = {image.sha256: image for image in images if image.sha256}
    target, generation = case.policy.target, case.policy.generation
    for unit in (unit for unit in case.units if unit.library):
        # Cubins of other generations are not unpacked.
        code = [
            sha
            for arch, sha in unit.code
            if arch.startswith("compute_") or is_generation(arch, generation)
        ]
        present = [by_hash[sha256] for sha256 in code if sha256 in by_hash]
        native = any(entry.endswith(f":{target}") for entry in unit.gencode)
        if len(present) < len(code):
            message = (
                f"{len(code) - len(present)} of the {len(code)} pieces of code in its "
                f"object are not in the library"
            )
            case.find("arch-missing", message, [unit.name])
        elif native and code and not any(image.target == target for image in present):
            case.find("arch-missing", f"its object holds no cubin for {target}", [unit.name])
    known = {sha256 for unit in case.units for _, sha256 in unit.code}
    foreign = [image.target for sha256, image in by_hash.items() if sha256 not in known]
    # The device linker makes new code of relocatable code.
    if (
        foreign
        and any(unit.library for unit in case.units)
        and all(unit.code for unit in case.units)
    ):
        case.find(
            "code-foreign",
            f"{len(foreign)} of {len(by_hash)}, for {', '.join(sorted(set(foreign)))}",
        )


Kernels = dict[str, tuple[Counter[str], list[DeviceImage]]]


def _disassemble(cubins: Mapping[Path, DeviceImage], tools: CudaTools) -> Kernels:
    """
    Return the opcode counts of all kernels of the cubins, added up for kernels of one name, and
    their cubins.
    """
    kernels: Kernels = {}
    sizes = {path: path.stat().st_size for path in cubins}
    with (
        console.progress("disassembling", sum(sizes.values()), "bytes") as progress,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        try:
            for path, counts in zip(
                sizes, pool.map(lambda path: sass.opcodes(path, tools), sizes), strict=True
            ):
                for kernel, count in counts.items():
                    total, images = kernels.setdefault(kernel, (Counter(), []))
                    total.update(count)
                    images.append(cubins[path])
                progress.update(progress.done + sizes[path])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return kernels


def _check_kernels(library: Library, kernels: Kernels, archs: set[str], case: Case) -> Library:
    """
    Return *library* with the opcodes of *kernels*, and report what the policy misses among them.
    """
    fp4 = [counts for kernel, (counts, _) in kernels.items() if FP4_KERNELS.search(kernel)]
    instructions = {
        pattern: sum(sass.matching(counts, pattern) for counts in fp4) for pattern in FP4_OPCODES
    }
    trapping = sum(1 for counts in fp4 if counts[sass.TRAP])
    grade = gpu_compat.fp4(len(fp4), instructions, trapping)
    library = replace(
        library, spark=replace(library.spark, fp4=grade, instructions=instructions, traps=trapping)
    )
    wants = case.target
    if not (wants and (wants.opcodes or wants.trap_free)):
        return library
    arch = "+".join(sorted(archs)) or case.policy.target
    totals: list[OpcodeCount] = []
    for rule in wants.opcodes:
        named = [kernel for kernel in kernels if re.search(rule.kernels, kernel)]
        hits = [
            count for kernel in named if (count := sass.matching(kernels[kernel][0], rule.pattern))
        ]
        total = sum(hits)
        totals.append(OpcodeCount(rule.pattern, arch, len(hits), total, rule.least))
        if total < rule.least:
            units = case.names(image for kernel in named for image in kernels[kernel][1])
            message = f"{rule.pattern} in the code for {arch}: {total}, asked for: {rule.least}"
            case.find("opcode-missing", message, units)
    traps = 0
    for free in wants.trap_free:
        named = [kernel for kernel in kernels if re.search(free.kernels, kernel)]
        if not named:
            case.find("kernel-missing", f"no kernel in the code for {arch} matches {free.kernels}")
        for kernel in named:
            counts, images = kernels[kernel]
            traps += counts[sass.TRAP]
            if counts[sass.TRAP]:
                message = f"{counts[sass.TRAP]} {sass.TRAP} in {kernel[:160]}: {free.reason}"
                case.find("trap-present", message, case.names(images))
    return replace(library, opcodes=tuple(totals), traps=traps)
