"""
The opcodes of kernels, as NVIDIA's disassembler prints them: the only part of the audit that needs one of NVIDIA's programs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from sparkwright.core import process
from sparkwright.core.errors import CommandError

TRAP = "BPT.TRAP"

#: Seconds for one cubin; the largest of the official wheels that a policy names takes one.
PATIENCE = 300.0
#: A section's heading, or an instruction after its address and predicate: ``/*0050*/  @!P0 F2FP.SATFINITE.E2M1… R0, …``.
_LINE = re.compile(
    r"^(?:\.text\.(?P<kernel>\S+):|[ \t]+/\*[0-9a-f]{4,}\*/[ \t]+(?:\{[ \t]*)?(?:@!?U?P\w+[ \t]+)?(?P<opcode>[A-Z][A-Z0-9_.]*))",
    re.MULTILINE,
)
_BLOCK = 1 << 20
#: Nothing that nvdisasm prints is longer; a mangled name is some thousand letters.
_LONGEST_LINE = 1 << 22


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


def count_opcodes(text: str) -> dict[str, Counter[str]]:
    """Return how often each opcode with its modifiers occurs in nvdisasm's *text*, by kernel."""
    counts: dict[str, Counter[str]] = {}
    _count(text, counts, Counter())
    return counts


def _count(text: str, counts: dict[str, Counter[str]], current: Counter[str]) -> Counter[str]:
    for found in _LINE.finditer(text):
        if found["kernel"]:
            current = counts.setdefault(found["kernel"], Counter())
        else:
            current[found["opcode"]] += 1
    return current


def opcodes(cubin: Path, tools: CudaTools, patience: float = PATIENCE) -> dict[str, Counter[str]]:
    """
    Disassemble *cubin* and return its opcode counts by kernel; the text is counted as it comes, and never held whole.

    Raises:
        command-failed: nvdisasm could not read it, or took longer than *patience* seconds.
    """
    command = [str(tools.program("nvdisasm")), "--print-code", str(cubin)]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            process.leashed(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=process.clean_environment(),
            text=True, errors="replace",
        )  # fmt: skip
        assert child.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(patience, end)
        timer.start()
        try:
            counts = _counted(child.stdout)
            status = child.wait()
        finally:
            timer.cancel()
            child.kill()
            child.wait()
            child.stdout.close()
        if late.is_set():
            raise CommandError("command-failed", f"nvdisasm did not end within {patience:g} s.")
        if status:
            errors.seek(0)
            said = errors.read(1 << 14).decode("utf-8", "replace").splitlines()
            raise CommandError("command-failed", f"nvdisasm ended with status {status}.", details=said[-20:])
    return counts


def _counted(stream: IO[str]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    rest = ""
    while block := stream.read(_BLOCK):
        text, _, after = (rest + block).rpartition("\n")
        current = _count(text + "\n", counts, current)
        rest = after[-_LONGEST_LINE:]
    _count(rest, counts, current)
    return counts


def matching(counts: Mapping[str, int], pattern: str) -> int:
    """Return how many of the counted opcodes match the regular expression *pattern*."""
    found = partial(re.compile(pattern).search)
    return sum(count for opcode, count in counts.items() if found(opcode))
