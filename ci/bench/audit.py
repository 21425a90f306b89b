"""
Auditing the official vLLM wheel: all but the disassembly against ``cuobjdump --list-elf``, and the whole within its budget. Needs the
fetched base wheel and the tools of stack 2026.11.

The first comparison reads the same unpacked libraries: hashes, needs, symbols, operators, and each unit's real targets on one side, a list
of file names on the other. The second is `sparkwright audit` from the wheel to the report, on an empty store.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import zipfile
from pathlib import Path

import msgspec
import psutil

import measure
from sparkwright.audit import policy, wheel
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import AuditedLibrary
from sparkwright.audit.wheel import Contents, LibraryAudit
from sparkwright.builder import toolchain
from sparkwright.builder.wheel import elf
from sparkwright.core.console import console, size as as_size
from sparkwright.forks import package_index

#: Seconds for the whole, bytes of all processes together, and how many times as long as the list of names the rest may take.
SECONDS, MEMORY, RATIO = 30.0, 1_000_000_000, 1.3


class Peak:
    """The most memory that this process and its children held at once, sampled ten times a second (unique set size)."""

    def __init__(self) -> None:
        self.bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._end.wait(0.1):
            held = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    held += process.memory_full_info().uss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, held)


options = measure.arguments(__doc__ or "")
options.runs = min(options.runs, 3)
context = measure.context(options)
locked = context.lock.forks["vllm"].bases[context.machine]
base = package_index.obtain(
    context.store, locked.name, locked.filename, locked.sha256, offline=True
)
programs = toolchain.obtain(context).cuda / "bin"
rules: AuditPolicy = policy.load(context.project.audit_file, context.project.spec.arch)
scratch = context.store.folder("work")


def unpacked(folder: Path) -> dict[str, Path]:
    """Return where each library of the wheel was put, by its name."""
    made: dict[str, Path] = {}
    with zipfile.ZipFile(base) as archive:
        for name in archive.namelist():
            with archive.open(name) as stream:
                if stream.read(4) == elf.MAGIC:
                    made[name] = folder / f"{len(made)}.so"
                    made[name].write_bytes(archive.read(name))
    return made


def ours(libraries: dict[str, Path]) -> None:
    """Read all that the audit reads of them but their instructions."""
    about = wheel.read_subject(base)
    plain = msgspec.structs.replace(rules, distributions={})
    for name, path in libraries.items():
        with elf.mapped(path) as data:
            shared = elf.shared_object(data)
            audited = LibraryAudit(plain, about, Contents({}, {}, None), name, ours=False)
            audited.check_host(data, shared)
            audited.check_device(AuditedLibrary(name, "", 0, "base"), data, shared)


def listed(libraries: dict[str, Path]) -> None:
    """List the names of their cubins."""
    for path in libraries.values():
        subprocess.run(
            [programs / "cuobjdump", "--list-elf", path], check=False, capture_output=True
        )


with tempfile.TemporaryDirectory(dir=scratch) as folder:
    libraries = unpacked(Path(folder))
    cases = {
        "sparkwright, without disassembly": lambda: ours(libraries),
        "cuobjdump --list-elf": lambda: listed(libraries),
    }
    measure.compare(f"{len(libraries)} libraries of {base.name}", cases, options)
console.result(f"budget: {RATIO:g} times the list, so at least {1 / RATIO:.2f} in the last column")

with Peak() as peak:
    whole = {
        "sparkwright audit": lambda: wheel.audit(
            base, rules, lambda: programs, scratch=scratch, judged="any"
        )
    }
    measure.compare(f"audit of {as_size(base.stat().st_size)}", whole, options, budget=SECONDS)
console.result(f"budget: {as_size(MEMORY)}; most of all processes at once: {as_size(peak.bytes)}")
