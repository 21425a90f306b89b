"""
The opcodes of kernels, as NVIDIA's disassembler prints them: the only part of the audit that needs
one of NVIDIA's programs.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.errors import CommandError

TRAP = "BPT.TRAP"

#: Seconds for one cubin; the largest of the official wheels that a policy names takes one.
TIMEOUT = 300.0
#: A section's heading, or an instruction after its address and predicate:
#: ``/*0050*/  @!P0 F2FP.SATFINITE.E2M1… R0, …``.
_LINE = re.compile(
    rb"^(?:\.text\.(?P<kernel>\S+):|[ \t]+/\*[0-9a-f]{4,}\*/[ \t]+(?:\{[ \t]*)?(?:@!?U?P\w+[ \t]+)?"
    rb"(?P<opcode>[A-Z][A-Z0-9_.]*))",
    re.MULTILINE,
)
#: Bytes that nvdisasm may write; the largest cubin of the official wheels takes some hundred
#: megabytes.
_MOST_TEXT = 8 * 1024**3


class CudaTools(msgspec.Struct, frozen=True):
    """
    Where NVIDIA's readers of device code lie.

    Attributes:
        folder: Holds ``nvdisasm`` (``nvidia/cu13/bin`` of an environment with its wheel).
    """

    folder: Path

    def program(self, name: str) -> Path:
        """
        Return the program of that name.

        Raises:
            tool-missing: The folder does not hold it.
        """
        path = self.folder / name
        if not path.is_file():
            raise CommandError("tool-missing", f"{name} is not in {self.folder}.")
        return path


def count_opcodes(text: bytes | mmap.mmap) -> dict[str, Counter[str]]:
    """Return how often each opcode with its modifiers occurs in nvdisasm's *text*, by kernel."""
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for match in _LINE.finditer(text):
        if match["kernel"]:
            current = counts.setdefault(match["kernel"].decode("utf-8", "replace"), Counter())
        else:
            current[match["opcode"].decode()] += 1
    return counts


def opcodes(cubin: Path, tools: CudaTools, timeout: float = TIMEOUT) -> dict[str, Counter[str]]:
    """
    Disassemble *cubin* and return its opcode counts by kernel; the text is written beside it, and
    never held whole.

    Raises:
        command-failed: nvdisasm could not read it, or took longer than *timeout* seconds.
    """
    command = [str(tools.program("nvdisasm")), "--print-code", str(cubin)]
    with (
        tempfile.TemporaryFile(dir=cubin.parent) as text,
        tempfile.TemporaryFile(dir=cubin.parent) as log,
    ):
        try:
            status = subprocess.run(
                process.leashed(command, written=_MOST_TEXT),
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=log,
                env=process.clean_environment(),
                timeout=timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                "command-failed", f"nvdisasm did not end within {timeout:g} s."
            ) from error
        if status:
            log.seek(0)
            details = log.read(1 << 14).decode("utf-8", "replace").splitlines()[-20:]
            raise CommandError(
                "command-failed", f"nvdisasm ended with status {status}.", details=details
            )
        if not os.fstat(text.fileno()).st_size:
            return {}
        with mmap.mmap(text.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return count_opcodes(content)


def matching(counts: Mapping[str, int], pattern: str) -> int:
    """Return how many of the counted opcodes match the regular expression *pattern*."""
    search = re.compile(pattern).search
    return sum(count for opcode, count in counts.items() if search(opcode))
