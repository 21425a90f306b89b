"""The outcome of a workflow run, from what the workflow and the documents of its commands say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.results import decode_result
from sparkwright.client.records import line
from sparkwright.core.errors import FileError, SparkwrightError, UsageError
from sparkwright.core.files import read_bytes, sha256_bytes
from sparkwright.core.states import SIGNS, State
from sparkwright.gates.core import verdict_file
from sparkwright.operate.site import speeds
from sparkwright.operate.site.records import Measured, RunFile, Stage

#: Bytes of the largest file, and of the document of ``--json``.
LARGEST, LARGEST_DOCUMENT = 128 << 20, 64 << 20

#: GitHub's word for the outcome of a job, or a state → the state.
_STATES: Mapping[str, State] = {
    "success": "pass", "failure": "fail", "cancelled": "invalid", "skipped": "not-run", "": "not-run",
    **{state: state for state in SIGNS},
}  # fmt: skip
#: References of failures that say nothing bad about the subject.
_UNDECIDED: Mapping[str, State] = {
    "gate-inconclusive": "inconclusive", "measurement-invalid": "invalid",
    "gate-not-run": "not-run", "interrupted": "invalid",
}  # fmt: skip
_STAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._+!-]{0,99})=([a-z-]*)(?::([a-z0-9-]+))?")
_DOCUMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._+!-]{0,99})=(.+)")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+!-]+")
_DAMAGED = (ValueError, RecursionError, msgspec.MsgspecError, SparkwrightError)


class _Failure(msgspec.Struct, frozen=True):
    reference: str = ""
    what: str = ""


class _Document(msgspec.Struct, frozen=True):
    """The document of ``--json``, of which *error* alone matters here."""

    error: _Failure | None = None


class _Fields(msgspec.Struct, frozen=True):
    """Fields by which verdicts and results are recognised."""

    verdicts: msgspec.Raw = msgspec.Raw()
    legs: msgspec.Raw = msgspec.Raw()


def stages(named: Sequence[str], documents: Sequence[str]) -> list[Stage]:
    """
    Return the stages of a run.

    Args:
        named: ``NAME=OUTCOME[:REFERENCE]`` each, as the workflow says.
        documents: ``NAME=FILE`` each, the document of ``--json``. It takes precedence, unless it
            says that all is well and the workflow does not, or the stage never began.

    Raises:
        UsageError: One has another form, or a name is repeated.
    """
    parsed = [_named(text) for text in named]
    read = [_documented(text) for text in documents]
    outcomes = {stage.name: stage for stage in parsed}
    if len(outcomes) < len(parsed) or len({stage.name for stage in read}) < len(read):
        raise UsageError("usage", "A stage is named twice.")
    for stage in read:
        known = outcomes.get(stage.name)
        missing = stage.reference == "no-document"
        if known and known.state == "not-run" and missing:
            continue
        if known and known.state != "pass" and (missing or stage.state == "pass"):
            reference = known.reference or stage.reference
            stage = Stage(stage.name, known.state, reference, stage.message)  # noqa: PLW2901
        outcomes[stage.name] = stage
    return list(outcomes.values())


def _named(text: str) -> Stage:
    match = _STAGE.fullmatch(text)
    if match is None or match[2] not in _STATES:
        known = ", ".join(filter(None, _STATES))
        what = f"{text!r} is not of the form NAME=OUTCOME[:REFERENCE]."
        raise UsageError("usage", what, details=[f"outcomes: {known}"])
    state = _STATES[match[2]]
    reference = match[3] or ("cancelled" if match[2] == "cancelled" else "")
    return Stage(match[1], state, "" if state == "pass" else reference)


def _documented(text: str) -> Stage:
    """Return the stage ``NAME=FILE``; a document that is missing belongs to one that did not end."""
    match = _DOCUMENT.fullmatch(text)
    if match is None:
        raise UsageError("usage", f"{text!r} is not of the form NAME=FILE.")
    try:
        data = read_bytes(Path(match[2]), limit=LARGEST_DOCUMENT)
        error = msgspec.json.decode(data, type=_Document).error
    except FileError as failure:
        return Stage(match[1], "not-run", "no-document", line(failure.what))
    except _DAMAGED as failure:
        return Stage(
            match[1], "invalid", "no-document", line(f"the document is damaged: {failure}")
        )
    if error is None:
        return Stage(match[1], "pass")
    state = _UNDECIDED.get(error.reference, "fail")
    return Stage(match[1], state, line(error.reference), line(error.what))


def files(paths: Sequence[Path]) -> tuple[tuple[RunFile, ...], tuple[Measured, ...]]:
    """Return the files at *paths*, those that are missing included, and the figures in them."""
    records, figures = list[RunFile](), list[Measured]()
    for path in paths:
        name = _UNSAFE.sub("-", path.name).lstrip("._+!-")[:255] or "file"
        try:
            data = read_bytes(path, limit=LARGEST)
        except FileError as error:
            records.append(RunFile(name, "other", "", 0, message=line(error.what)))
            continue
        record, measured = _recognised(name, data)
        records.append(record)
        figures += measured
    return tuple(records), tuple(figures)


def _recognised(name: str, data: bytes) -> tuple[RunFile, tuple[Measured, ...]]:
    sha256, size = sha256_bytes(data), len(data)
    try:
        fields = msgspec.json.decode(data, type=_Fields)
    except _DAMAGED:
        return RunFile(name, "other", sha256, size), ()
    kind: Literal["verdicts", "throughput"] = "verdicts" if bytes(fields.verdicts) else "throughput"
    if not (bytes(fields.verdicts) or bytes(fields.legs)):
        return RunFile(name, "document", sha256, size), ()
    try:
        if kind == "verdicts":
            ladder = verdict_file.read(data)
            wheel = ladder.wheel.sha256 if ladder.wheel else ""
            return RunFile(name, kind, sha256, size, ladder.state, line(wheel)), ()
        result = decode_result(data)
        record = RunFile(name, kind, sha256, size, result.state, line(result.candidate.sha256))
        return record, speeds.figures(result, sha256)
    except _DAMAGED as error:
        return RunFile(name, kind, sha256, size, "invalid", message=line(str(error))), ()
