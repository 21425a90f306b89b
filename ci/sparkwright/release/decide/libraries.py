"""The libraries in a wheel: what they are, what machine code they hold, and whether the build record tells the truth of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sparkwright.audit import device_code
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import AuditedWheel
from sparkwright.audit.wheel import Binary
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import ElfUnreadable
from sparkwright.core.errors import WheelError
from sparkwright.release import content
from sparkwright.release.decide.origin import Origin
from sparkwright.release.manifest.records import Library


class Found:
    """
    The ELF members of a wheel, as its walk meets them.

    Args:
        audit: The stack's policy, by which device code is digested; None to leave it unread.
    """

    def __init__(self, about: AuditedWheel, audit: AuditPolicy | None) -> None:
        self._about, self._audit = about, audit
        self.binaries: list[Binary] = []
        self.counts: dict[str, dict[str, int]] = {}
        self._digests: list[str] = []

    @property
    def digest(self) -> str:
        """The digest of all device code, as the audit's report has it."""
        return device_code.wheel_digest(self._digests)

    def visit(self, binary: Binary) -> None:
        """Read one member."""
        self.binaries.append(binary)
        if self._audit is None:
            return
        try:
            with elf.mapped(binary.path) as data:
                wants = self._audit.library(self._about.name, binary.name)
                compiled = wants is not None and wants.role == "target"
                code = device_code.read(data, elf.shared_object(data), self._audit.generation, compiled=compiled)
        except ElfUnreadable:
            return
        self._digests.append(code.digest)
        if code.images:
            ptx = {f"{arch} PTX": count for arch, count in code.counts("ptx").items()}
            self.counts[binary.name] = dict(sorted({**code.counts("cubin"), **ptx}.items()))


def listed(filename: str, found: Found, came: Origin, rows: Mapping[str, tuple[str, int]]) -> tuple[Library, ...]:
    """
    Return the libraries of the wheel *filename*: its ELF members, and what the build record names as one.

    A graft keeps programs of the official wheel that no record names; that they are allowed there is the audit's business.

    Args:
        rows: Member → its sha256 in hex and its bytes, of a RECORD that was compared with them.

    Raises:
        wheel-mismatch: A library is not the one that the build record names.
    """
    base = {name: content.hexed(text) for name, text in came.base.items()}
    said = {**came.compiled, **base}
    if wrong := [name for name, sha256 in said.items() if rows.get(name, ("", 0))[0] != sha256]:
        raise WheelError("wheel-mismatch", f"Libraries of {filename} are not those that its build record names.", details=wrong[:20])
    kept: Literal["base", "compiled"] = "base" if came.fork.base else "compiled"
    return tuple(
        Library(name, rows[name][1], "compiled" if name in came.compiled else kept, found.counts.get(name, {}))
        for name in sorted({*(one.name for one in found.binaries), *said})
    )
