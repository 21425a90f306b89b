"""The files that the gates wrote of a wheel, read as untrusted: bounded, typed, and consistent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from sparkwright.bench.results import Result, decode_result
from sparkwright.client.records import LARGEST_EVIDENCE
from sparkwright.core.files import read_bytes
from sparkwright.gates.core import verdict_file
from sparkwright.gates.core.verdict import Ladder
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.wheel_facts import WheelFacts

Read = TypeVar("Read")


class GateResults(msgspec.Struct, frozen=True):
    """The verdicts and the throughput measurement of a wheel, and the bytes of their files."""

    ladder: Ladder | None = None
    throughput: Result | None = None
    verdicts_file: bytes = b""
    throughput_file: bytes = b""


def read_beside(wheel: Path, folder: Path | None = None) -> GateResults:
    """
    Return the results in *folder*, or beside *wheel*, under the name of the wheel.

    Raises:
        evidence-invalid: A file is not what the gates write.
        verdict-hollow: A file states what does not follow from its own checks, or G8 was measured
            by another file than the one that lies there.
    """
    stem = wheel.name.removesuffix(".whl")
    paths = [
        (folder or wheel.parent) / f"{stem}.{kind}.json" for kind in ("verdicts", "throughput")
    ]
    verdicts, throughput = (_bytes(path) for path in paths)
    ladder = _decoded(verdicts, verdict_file.read, paths[0]) if verdicts else None
    result = _decoded(throughput, decode_result, paths[1]) if throughput else None
    if ladder and result and ladder.states.get("G8", "not-run") != "not-run":
        _decoded(throughput, partial(verdict_file.require_evidence, ladder), paths[1])
    return GateResults(ladder, result, verdicts, throughput)


def require_subject(wheel: WheelFacts, results: GateResults) -> None:
    """
    Require that *results* are about *wheel*.

    Raises:
        verdict-foreign: They are about other bytes, other device code, or of another stack.
    """
    faults = []
    if ladder := results.ladder:
        about = {"the verdicts": ladder.wheel.sha256 if ladder.wheel else ""}
        about |= {verdict.gate: verdict.wheel for verdict in ladder.verdicts}
        faults += [
            f"{what}: {sha256 or 'no wheel'}"
            for what, sha256 in about.items()
            if sha256 != wheel.sha256
        ]
        # Only G0 reads device code.
        audited = ladder.device_code or any(verdict.gate == "G0" for verdict in ladder.verdicts)
        if audited and ladder.device_code != wheel.device_code:
            codes = f"{ladder.device_code or 'none'}, of the wheel: {wheel.device_code or 'none'}"
            faults.append(f"device code: {codes}")
        if wheel.stack and ladder.stack != wheel.stack:
            faults.append(f"judged as of stack {ladder.stack}, built from {wheel.stack}")
    if results.throughput and results.throughput.candidate.sha256 != wheel.sha256:
        faults.append(f"the throughput: {results.throughput.candidate.sha256 or 'no wheel'}")
    if faults:
        raise ReleaseError(
            "verdict-foreign",
            f"The verdicts are not about {wheel.name} ({wheel.sha256}).",
            details=faults[:20],
        )


def _bytes(path: Path) -> bytes:
    if not path.exists():
        return b""
    data = read_bytes(
        path,
        limit=LARGEST_EVIDENCE,
        failure=lambda what, **rest: TrustError("evidence-invalid", what, **rest),
    )
    if not data:
        raise TrustError("evidence-invalid", f"{path.name} is empty.")
    return data


def _decoded(data: bytes, read: Callable[[bytes], Read], path: Path) -> Read:
    try:
        return read(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(
            "evidence-invalid",
            f"{path.name} is not what `sparkwright gate` writes.",
            details=[str(error)],
        ) from error
    except ValueError as error:
        raise ReleaseError(
            "verdict-hollow",
            f"{path.name} does not agree with itself.",
            details=[str(error)],
        ) from error
