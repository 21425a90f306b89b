"""The installer's wheel: this program, told whom to trust for this very index. A new one is made only when something in it changed."""

from __future__ import annotations

from pathlib import Path

from sparkwright.builder.wheel import source_wheel
from sparkwright.core.files import sha256_file
from sparkwright.release.manifest.records import Wheel

#: Where it finds whom to trust (`release.signing.trust.PACKAGED`).
TRUST = "sparkwright/release/trust.json"


def wheel(folder: Path, trust: bytes, serial: int, last: Wheel | None) -> Path:
    """
    Write the installer to *folder*, and return it.

    Args:
        trust: What it will believe (`trust.document`). *serial*: of the manifest that will offer it, the label of its version.
        last: The newest one of the index, which is made again where nothing else would change.
    """
    if last is not None:
        made = _made(folder, trust, last.version.partition("+")[2])
        if sha256_file(made) == last.sha256:
            return made
        made.unlink()
    return _made(folder, trust, str(serial))


def _made(folder: Path, trust: bytes, label: str) -> Path:
    """Equal code, trust and label give equal bytes, so a label that is used again shows whether the rest changed."""
    return source_wheel.write_program(folder, extra="", label=label, further={TRUST: trust})
