"""
What a wheel brings and wants on the host: machine, shared libraries, symbols, operators, and copies of what is not its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from sparkwright.audit import elf, operators, platform_tag
from sparkwright.audit.device import Case
from sparkwright.audit.elf_sections import Buffer, Section
from sparkwright.audit.operators import Operators

#: What brings the driver's functions; torch loads it for itself alone.
DRIVER = "libcuda.so.1"
#: The driver's libraries; a copy made by ``auditwheel repair`` has a hash in its name.
_DRIVER = re.compile(r"lib(cuda|nvidia-[\w-]+|nvcuvid|nvoptix)(-[0-9a-f]{8})?\.so(\.\d+)*")
#: What torch, the CUDA wheels and the system bring.
_OTHERS = re.compile(
    r"lib(torch\w*|c10\w*|cudart|cublas\w*|cudnn\w*|cufft\w*|curand|cusolver\w*|cusparse\w*|cupti|nvrtc[\w-]*|nvJitLink|nvshmem\w*|nccl"
    r"|stdc\+\+|gcc_s|gomp|c|m|pthread|dl|rt)(-[0-9a-f]{8})?\.so(\.\d+)*"
)
#: Distributions whose libraries these are.
_OWNERS = re.compile(r"torch|triton|nvidia-.+|cuda-.+")


def copies(distribution: str, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield member, rule and message for each of the members *names* that is a copy of the driver or of another's library."""
    if _OWNERS.fullmatch(distribution):
        return
    for name in names:
        folder, _, file = name.rpartition("/")
        if _DRIVER.fullmatch(file):
            yield name, "vendored-driver", "the driver is the machine's own, and a copy of another version breaks it"
        elif _OTHERS.fullmatch(file) or folder.partition("/")[0].endswith(".libs"):
            yield name, "vendored-library", "two copies of a library in one process do not share their state"


def _check_copy(host: elf.Host, case: Case) -> None:
    """Find a driver that has been given another file name."""
    if _DRIVER.fullmatch(host.soname):
        case.find("vendored-driver", f"it is known to the loader as {host.soname}")


def check(host: elf.Host, case: Case, platforms: tuple[str, ...]) -> None:
    """Find where the library's needs are not what the tag promises and the policy allows."""
    if host.machine in ("x86_64", "aarch64") and not all(platform.endswith(host.machine) for platform in platforms):
        case.find("machine-foreign", f"it is for {host.machine}, the wheel for {', '.join(platforms)}")
    promised = platform_tag.promise(platforms)
    if promised and elf.version_key(host.glibc) > promised:
        case.find("glibc-newer", f"it wants GLIBC {host.glibc}, the tag promises {promised[0]}.{promised[1]}")
    _check_copy(host, case)
    allowed = (*case.policy.needed, *(case.wants.needed if case.wants else ()))
    # Of a wheel that no policy describes nobody has said what it may want; that is shown, and not judged.
    for name in host.needed if case.ours or case.wants else ():
        if not any(fnmatchcase(name, pattern) for pattern in allowed):
            case.find("needed-foreign", f"it wants {name}")
    if host.driver and DRIVER not in host.needed and (case.ours or case.wants):
        more = f" and {len(host.driver) - 3} more" if len(host.driver) > 3 else ""
        case.find("driver-unnamed", f"it calls {', '.join(host.driver[:3])}{more}, and does not want {DRIVER}")
    for entry in host.rpath:
        inside = not case.ours and (entry == "$ORIGIN" or entry.startswith("$ORIGIN/"))
        if entry not in (case.wants.rpath if case.wants else ()) and not inside:
            case.find("rpath-present", f"it looks for shared libraries in {entry}")


def registered(data: Buffer, listed: tuple[Section, ...], host: elf.Host, case: Case) -> Operators:
    """Return the operators that the library registers, and find what the policy misses among them and among its symbols."""
    found = operators.registered(data, listed)
    wants = case.wants
    for name in wants.symbols if wants else ():
        if name not in host.symbols:
            case.find("symbol-missing", f"it does not define {name}")
    for name in wants.operators if wants else ():
        if name not in found.implemented:
            case.find("operator-missing", f"{name}: {_short(name, found, operators.implements(data, listed, name))}")
    return found


def _short(name: str, found: Operators, named: bool) -> str:
    if name in found.declared:
        return "declared, not implemented"
    return "no schema declares it, although its name is there" if named else "neither declared nor implemented"
