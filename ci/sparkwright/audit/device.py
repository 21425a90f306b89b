"""
The device code of one library against its policy, and what a GPU of the stack gets from it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.audit import device_code as code_of
from sparkwright.audit import device_images, elf, gpu_compat, sass
from sparkwright.audit.device_images import Form
from sparkwright.audit.elf_sections import Buffer, ElfUnreadable
from sparkwright.audit.fatbin import FatbinUnreadable
from sparkwright.audit.policy import Allowed, AuditPolicy, LibraryPolicy, is_generation
from sparkwright.audit.report import KernelCount, Library, OpcodeCount
from sparkwright.audit.sass import CudaTools
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError

#: What names a kernel that computes with FP4 or makes it, in CUTLASS, vLLM and FlashInfer. One of CUTLASS for SM 9.0 or 10.0 is compiled
#: for SM 12.x too, where it is never launched and is full of traps.
FP4_KERNELS = re.compile(r"^(?!.*MainloopSm(?:90|10\d))(?=.*(?:fp4|e2m1))", re.IGNORECASE)
#: The instructions of SM 12.x that do: the block-scaled matrix instruction, and the conversion.
FP4_OPCODES = (r"OMMA\..*E2M1", r"F2FP\..*E2M1")


class Case(msgspec.Struct, frozen=True):
    """
    What one library is judged by.

    Attributes:
        policy: Of the stack, with the library's own arch where it has one.
        wants: The library's own policy; None when nothing names it.
        find: Called with a rule and a message for each disagreement.
        device: The compute capability of the stack's GPU.
        ours: Whether the library must be made for the stack's target; a wheel that was not built here is only read.
    """

    policy: AuditPolicy
    wants: LibraryPolicy | None
    tools: CudaTools
    find: Callable[[str, str], None]
    device: tuple[int, int]
    ours: bool = True

    @property
    def target(self) -> bool:
        """True for a library whose kernels a Spark needs."""
        return self.wants is not None and self.wants.role == "target"


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (len(item[0].rstrip("af?")), item[0])))


def _check_allowed(counts: Mapping[str, int], allowed: Iterable[Allowed], rule: str, what: str, case: Case) -> None:
    most = {entry.arch: entry.most for entry in allowed}
    for arch, count in counts.items():
        if count > most.get(arch, 0):
            case.find(rule, f"{what} {arch}: {count}, allowed: {most.get(arch, 0)}")


def _check_arch(library: Library, case: Case, wants: LibraryPolicy) -> None:
    want, cubins = case.policy.target, library.cubins
    if cubins.get(want, 0) < wants.cubins_min:
        case.find("arch-missing", f"cubins for {want}: {cubins.get(want, 0)}, asked for: {wants.cubins_min}")
    rules: dict[str, dict[str, int]] = {"arch-folded": {}, "arch-unknown": {}, "arch-foreign": {}}
    for arch, count in cubins.items():
        if arch.endswith("?"):
            rules["arch-unknown"][arch] = count
        elif arch != want:
            rules["arch-folded" if is_generation(arch, case.policy.generation) else "arch-foreign"][arch] = count
    for rule, counts in rules.items():
        _check_allowed(counts, wants.also, rule, "cubins for", case)
    _check_allowed(library.ptx, wants.ptx, "ptx-foreign", "PTX files for", case)


def _disassemble(paths: Sequence[Path], tools: CudaTools) -> dict[str, Counter[str]]:
    """Return the opcode counts of all kernels of the cubins; kernels of one name in several cubins are added up."""
    counts: dict[str, Counter[str]] = {}
    sizes = [path.stat().st_size for path in paths]
    with console.progress("disassembling", sum(sizes), "bytes") as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for size, kernels in zip(sizes, pool.map(lambda path: sass.opcodes(path, tools), paths), strict=True):
                for kernel, found in kernels.items():
                    counts.setdefault(kernel, Counter()).update(found)
                progress.update(progress.done + size)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return counts


def _check_opcodes(
    counts: Mapping[str, Counter[str]], arch: str, case: Case, wants: LibraryPolicy
) -> tuple[list[OpcodeCount], dict[str, dict[str, int]]]:
    """Return the policy's opcode counts for the whole library, and per kernel by pattern."""
    totals, by_kernel = [], {kernel: dict[str, int]() for kernel in counts}
    for rule in wants.opcodes:
        named = [kernel for kernel in counts if re.search(rule.kernels, kernel)]
        hits = {kernel: found for kernel in named if (found := sass.matching(counts[kernel], rule.pattern))}
        for kernel, found in hits.items():
            by_kernel[kernel][rule.pattern] = found
        total = sum(hits.values())
        totals.append(OpcodeCount(rule.pattern, arch, len(hits), total, rule.least))
        if total < rule.least:
            case.find("opcode-missing", f"{rule.pattern} in the code for {arch}: {total}, asked for: {rule.least}")
    return totals, by_kernel


def _check_traps(counts: Mapping[str, Counter[str]], arch: str, case: Case, wants: LibraryPolicy) -> None:
    for rule in wants.trap_free:
        named = [kernel for kernel in counts if re.search(rule.kernels, kernel)]
        if not named:
            case.find("kernel-missing", f"no kernel in the code for {arch} matches {rule.kernels}")
        for kernel in named:
            if traps := counts[kernel][sass.TRAP]:
                case.find("trap-present", f"{traps} {sass.TRAP} in {kernel[:160]}: {rule.reason}")


def _fp4(found: gpu_compat.Spark, counts: Mapping[str, Counter[str]]) -> gpu_compat.Spark:
    """Return *found* with what the FP4 kernels among the disassembled ones hold."""
    named = [kernel for kernel in counts if FP4_KERNELS.search(kernel)]
    instructions = {pattern: sum(sass.matching(counts[kernel], pattern) for kernel in named) for pattern in FP4_OPCODES}
    traps = sum(1 for kernel in named if counts[kernel][sass.TRAP])
    return replace(found, fp4=gpu_compat.fp4(len(named), instructions, traps), instructions=instructions, traps=traps)


class _Reading(msgspec.Struct):
    """What is kept of a library's forms while they are unpacked one after the other: the forms, and the cubins to disassemble."""

    forms: list[Form]
    written: dict[tuple[int, str], Path]


def _patterns(case: Case) -> list[re.Pattern[str]]:
    wants = case.wants
    named = [rule.kernels for rule in wants.opcodes] + [rule.kernels for rule in wants.trap_free] if wants else []
    return [FP4_KERNELS, *map(re.compile, named)]


def _read(data: Buffer, host: elf.Host, case: Case, folder: Path) -> _Reading:
    """Read all forms, and write each cubin that holds a kernel of interest into *folder*."""
    made, patterns = _Reading([], {}), _patterns(case)
    for form, own in device_images.forms(data, host, case.policy.generation, whole_ptx=case.target):
        made.forms.append(form)
        if form.contradicted:
            case.find("arch-contradicted", f"unit {form.unit}: the table says {form.listed}, the code {form.target}")
        if form.kind == "cubin" and own and any(pattern.search(kernel) for pattern in patterns for kernel in form.kernels):
            path = folder / f"{len(made.written)}.cubin"
            path.write_bytes(own)
            made.written[form.unit, form.target] = path
    return made


def _check_code(library: Library, read: _Reading, case: Case) -> Library:
    """Return *library* with the opcodes of the code that the stack's GPU would load."""
    taken = {
        unit: gpu_compat.chosen(device_images.targets(listed, "cubin"), (), case.device)[1]
        for unit, listed in device_images.by_unit(read.forms).items()
    }
    paths = [path for (unit, target), path in read.written.items() if taken[unit] == target]
    counts = _disassemble(paths, case.tools) if paths else {}
    library = replace(library, spark=_fp4(library.spark, counts))
    wants = case.wants
    if not (wants and case.target and (wants.opcodes or wants.trap_free)):
        return library
    arch = "+".join(sorted({target for target in taken.values() if target})) or case.policy.target
    totals, by_kernel = _check_opcodes(counts, arch, case, wants)
    _check_traps(counts, arch, case, wants)
    kernels = [KernelCount(kernel, counts[kernel][sass.TRAP], found) for kernel, found in sorted(by_kernel.items())]
    return replace(library, opcodes=tuple(totals), kernels=tuple(kernel for kernel in kernels if kernel.traps or kernel.opcodes))


def _inspect(library: Library, data: Buffer, host: elf.Host, case: Case, folder: Path) -> Library:
    read = _read(data, host, case, folder)
    by_unit = device_images.by_unit(read.forms)
    kinds = [(device_images.targets(listed, "cubin"), device_images.targets(listed, "ptx")) for listed in by_unit.values()]
    library = replace(
        library,
        cubins=_sorted(Counter(device_images.targets(read.forms, "cubin"))),
        ptx=_sorted(Counter(device_images.targets(read.forms, "ptx"))),
        spark=gpu_compat.of_units(kinds, case.device),
        device_code=code_of.of_pieces(form.sha256 for form in read.forms if form.sha256) if case.target else library.device_code,
    )  # fmt: skip
    if case.target and case.wants and case.ours:
        _check_arch(library, case, case.wants)
    elif case.target and not library.spark.targets:
        case.find("code-missing", f"no machine code in it is for SM {library.spark.device}: {library.spark.says}")
    return _check_code(library, read, case)


def inspect(library: Library, data: Buffer, host: elf.Host, case: Case, folder: Path) -> Library:
    """
    Return *library* with what its device code holds, and report where that is not what the policy asks for.

    Args:
        folder: Takes the cubins that are disassembled.

    Raises:
        tool-missing: nvdisasm is not there, and a kernel is to be read.
    """
    whole = replace(library, device_code=host.fatbin or library.sha256)
    try:
        return _inspect(whole, data, host, case, folder)
    except (CommandError, ElfUnreadable, FatbinUnreadable) as error:
        if isinstance(error, CommandError) and error.reference != "command-failed":
            raise
        details = error.details if isinstance(error, CommandError) else ()
        case.find("device-unreadable", " ".join([str(error), *details[:2]]))
        return whole
