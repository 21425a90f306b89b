"""The verdicts that lie beside a wheel, read as untrusted files: bounded, typed, and with the states that follow from their checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from sparkwright.bench.results import FORMAT, Result
from sparkwright.gates.core import verdict_file
from sparkwright.gates.core.verdict import Ladder
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.manifest.records import Wheel

Read = TypeVar("Read")

#: Bytes of a file; the largest throughput results (12 blocks of 12 cells with 64 requests a leg) have some 20 MB.
LARGEST = 128 * 1024**2


class Judged(msgspec.Struct, frozen=True):
    """What the gates wrote of a wheel; None and empty bytes where they did not."""

    ladder: Ladder | None = None
    result: Result | None = None
    verdicts: bytes = b""
    throughput: bytes = b""


def beside(wheel: Path, folder: Path | None = None) -> Judged:
    """
    Return what lies beside *wheel*, or in *folder*, under its name.

    Raises:
        evidence-invalid: A file is not what the gates write.
        verdict-hollow: It states what does not follow from its own checks, or no verdict of G8 was measured by this file.
    """
    stem = (folder or wheel.parent) / wheel.name.removesuffix(".whl")
    verdicts, throughput = (_bytes(stem.with_name(f"{stem.name}.{kind}.json")) for kind in ("verdicts", "throughput"))
    ladder = _decoded(verdicts, verdict_file.read, f"{stem.name}.verdicts.json") if verdicts else None
    result = _decoded(throughput, _result, f"{stem.name}.throughput.json") if throughput else None
    if ladder and result and ladder.states.get("G8", "not-run") != "not-run":
        _decoded(throughput, partial(verdict_file.require_evidence, ladder), f"{stem.name}.throughput.json")
    return Judged(ladder, result, verdicts, throughput)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise TrustError("evidence-invalid", f"{path.name} cannot be read.", details=[str(error)]) from error
    if not data or len(data) > LARGEST:
        raise TrustError("evidence-invalid", f"{path.name} is empty, or larger than {LARGEST} bytes.")
    return data


def _result(data: bytes) -> Result:
    read = msgspec.json.decode(data, type=Result)
    if read.format != FORMAT:
        raise ValueError(f"the result is of format {read.format}; this program reads {FORMAT}")
    return read


def _decoded(data: bytes, read: Callable[[bytes], Read], name: str) -> Read:
    try:
        return read(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError("evidence-invalid", f"{name} is not what `sparkwright gate` writes.", details=[str(error)]) from error
    except ValueError as error:
        raise ReleaseError("verdict-hollow", f"{name} does not agree with itself.", details=[str(error)]) from error


def check_subject(wheel: Wheel, stack: str, found: Ladder | None, result: Result | None) -> None:
    """
    Do nothing where *found* and *result* are about *wheel*.

    Raises:
        verdict-foreign: They are about other bytes, other device code, or were judged as another stack's.
    """
    faults = []
    if found is not None:
        about = found.wheel.sha256 if found.wheel else "no wheel"
        faults += [f"the verdicts: {about}"] if about != wheel.sha256 else []
        faults += [f"{one.gate}: {one.wheel or 'no wheel'}" for one in found.verdicts if one.wheel != wheel.sha256]
        # Only G0 reads device code; a ladder without it does not know any.
        told = found.device_code or any(one.gate == "G0" for one in found.verdicts)
        if told and found.device_code != wheel.device_code:
            faults.append(f"device code: {found.device_code or 'none'}, of the wheel: {wheel.device_code or 'none'}")
        faults += [f"judged as of stack {found.stack}, built from {stack}"] if stack and found.stack != stack else []
    if result is not None and result.candidate.sha256 != wheel.sha256:
        faults.append(f"the throughput: {result.candidate.sha256 or 'no wheel'}")
    if faults:
        raise ReleaseError("verdict-foreign", f"What was judged is not {wheel.filename} ({wheel.sha256}).", details=faults[:20])
