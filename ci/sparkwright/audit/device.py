"""
The device code of one library against its policy.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.audit import code as code_of
from sparkwright.audit import elf, sass
from sparkwright.audit.policy import Allowed, AuditPolicy, LibraryPolicy, is_generation
from sparkwright.audit.report import KernelCount, Library, OpcodeCount
from sparkwright.audit.sass import CudaTools
from sparkwright.console import console
from sparkwright.errors import CommandFailed


class Case(msgspec.Struct, frozen=True):
    """
    What one library is judged by.

    Attributes:
        wants: The library's own policy; None when nothing names it.
        find: Called with a rule and a message for each disagreement.
    """

    policy: AuditPolicy
    wants: LibraryPolicy | None
    tools: CudaTools
    find: Callable[[str, str], None]


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (len(item[0].rstrip("af?")), item[0])))


def _check_allowed(counts: Mapping[str, int], allowed: Iterable[Allowed], rule: str, what: str, case: Case) -> None:
    most = {entry.arch: entry.most for entry in allowed}
    for arch, count in counts.items():
        if count > most.get(arch, 0):
            case.find(rule, f"{what} {arch}: {count}, allowed: {most.get(arch, 0)}")


def _check_arch(cubins: Mapping[str, int], case: Case, wants: LibraryPolicy) -> None:
    want = case.policy.target
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


def _check_code(library: Library, code: Sequence[tuple[Path, elf.Cubin]], case: Case, wants: LibraryPolicy) -> Library:
    patterns = [re.compile(rule.kernels) for rule in wants.opcodes] + [re.compile(rule.kernels) for rule in wants.trap_free]
    # Without code for the target the count is of what such a GPU would load instead; the missing arch is a finding of its own.
    chosen = [(path, cubin) for path, cubin in code if cubin.target == case.policy.target] or code
    arch = "+".join(sorted({cubin.target for _, cubin in chosen})) or case.policy.target
    paths = [path for path, cubin in chosen if any(pattern.search(kernel) for pattern in patterns for kernel in cubin.kernels)]
    counts = _disassemble(paths, case.tools)
    totals, by_kernel = _check_opcodes(counts, arch, case, wants)
    _check_traps(counts, arch, case, wants)
    kernels = [KernelCount(kernel, counts[kernel][sass.TRAP], found) for kernel, found in sorted(by_kernel.items())]
    return replace(library, opcodes=tuple(totals), kernels=tuple(kernel for kernel in kernels if kernel.traps or kernel.opcodes))


def _check_target(library: Library, path: Path, listed: Counter[str], case: Case, wants: LibraryPolicy) -> Library:
    generation = case.policy.generation
    cubins = Counter({arch: count for arch, count in listed.items() if not is_generation(arch, generation)})
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        units = sass.extract_cubins(path, generation, case.tools, Path(folder, "cubins"))
        ptx = sass.extract_ptx(path, case.tools, Path(folder, "ptx"))
        code = [(unit.path, elf.cubin(unit.path)) for unit in units]
        cubins.update(cubin.target or f"{unit.arch}?" for unit, (_, cubin) in zip(units, code, strict=True))
        digest = code_of.of_pieces(unit.sha256 for unit in (*units, *ptx))
        library = replace(library, cubins=_sorted(cubins), ptx=_sorted(Counter(unit.arch for unit in ptx)), device_code=digest)
        _check_arch(library.cubins, case, wants)
        _check_allowed(library.ptx, wants.ptx, "ptx-foreign", "PTX files for", case)
        return _check_code(library, code, case, wants) if wants.opcodes or wants.trap_free else library


def inspect(library: Library, path: Path, host: elf.Host, case: Case) -> Library:
    """
    Return *library* with what its device code holds, and report where that is not what the policy asks for.

    Args:
        path: Where its bytes lie; the folder takes the extracted cubins for the time of the call.

    Raises:
        ToolMissing: cuobjdump or nvdisasm is not there.
    """
    try:
        listed, listed_ptx = sass.listed(path, case.tools)
        if case.wants and case.wants.role == "target":
            return _check_target(library, path, listed, case, case.wants)
    except (CommandFailed, elf.ElfUnreadable) as error:
        case.find("device-unreadable", str(error))
        return library
    return replace(library, cubins=_sorted(listed), ptx=_sorted(listed_ptx), device_code=host.fatbin or library.sha256)
