"""Whether what is claimed of a wheel holds: each file by its hash, each statement by its signature, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec

from sparkwright.core.files import sha256_bytes
from sparkwright.core.states import State
from sparkwright.release import bill
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import agreement
from sparkwright.release.evidence.agreement import LARGEST
from sparkwright.release.evidence.predicates import TYPES
from sparkwright.release.manifest.records import Evidence, Fork, Proved, Wheel
from sparkwright.release.signing import envelope
from sparkwright.release.signing.statement import Statement
from sparkwright.release.signing.trust import Trust

T = TypeVar("T")


class Checked(msgspec.Struct, frozen=True):
    """
    What holds of a wheel.

    Attributes:
        signers: Kind of statement → who signed it.
        gates: Gate → its state, as it follows from the checks in the verdicts.
        raw: The files that the statements name, by kind.
    """

    signers: dict[str, str]
    gates: dict[str, State]
    statements: dict[str, Statement]
    raw: dict[str, bytes]


def checked(wheel: Wheel, fork: Fork | None, proved: Proved, read: Callable[[Evidence], bytes], trust: Trust) -> Checked:
    """
    Return what holds of *wheel*, having checked everything that *proved* names; nothing is asked but *read*.

    Args:
        fork: Where the release says that it comes from; None where it says nothing.
        read: Returns a file of evidence; it need not check anything.

    Raises:
        evidence-invalid: A file is missing, has other bytes, or contradicts another; a statement is about another wheel, or none is there.
        signature-invalid, signer-unknown: A statement is not signed, or by nobody whom *trust* names.
        verdict-foreign: The verdicts are about other bytes. verdict-hollow: A pass has nothing behind it.
    """
    kinds = [one.kind for one in proved.evidence]
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise TrustError("evidence-invalid", f"There are several files of one kind about {wheel.filename}.", details=twice)
    files: dict[str, bytes] = {one.kind: _file(one, read, wheel) for one in proved.evidence}
    opened = {
        kind: envelope.opened(files[kind], trust, predicate_type=expected, what=f"the {kind} of {wheel.filename}")
        for kind, expected in TYPES.items()
        if kind in files
    }
    statements: dict[str, Statement] = {kind: one.statement for kind, one in opened.items()}
    raw: dict[str, bytes] = {kind: data for kind, data in files.items() if kind in ("sbom", "verdicts", "throughput")}
    found = agreement.check(wheel, fork, proved, statements, raw)
    if "sbom" in raw:
        bill.check(raw["sbom"], wheel.filename, wheel.project, wheel.version, partial(TrustError, "evidence-invalid"))
    if "pep740" in files:
        _index(wheel, files)
    return Checked(
        {kind: one.by for kind, one in opened.items()}, found.states if found else {}, statements, raw
    )


def _file(one: Evidence, read: Callable[[Evidence], bytes], wheel: Wheel) -> bytes:
    if one.size > LARGEST:
        raise TrustError(
            "evidence-invalid", f"The {one.kind} of {wheel.filename} is too large.", details=[f"{one.size} bytes; bound: {LARGEST}"]
        )
    data = read(one)
    if (len(data), sha256_bytes(data)) != (one.size, one.sha256):
        details = [f"wanted: {one.sha256}, {one.size} bytes", f"found:  {sha256_bytes(data)}, {len(data)} bytes"]
        raise TrustError("evidence-invalid", f"The {one.kind} of {wheel.filename} is not the file that the proof names.", details=details)
    return data


def _index(wheel: Wheel, files: Mapping[str, bytes]) -> None:
    """Require that what the simple API says of the provenance is that provenance, in its own arrangement."""
    from sparkwright.release.signing import pep740

    if pep740.pep740(files["provenance"], wheel.filename) != files["pep740"]:
        raise TrustError("evidence-invalid", f"The provenance in the simple API is not that of {wheel.filename}.")
