"""
Writing the record of a night: from what a workflow knows to a file that is there whole, once, and never changes.

A run that failed is recorded as well as one that did not. So a file that a stage should have made and did not is part of the record, and
never a reason not to write one.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.bench.report import read
from sparkwright.core.errors import SparkwrightError, UsageError
from sparkwright.core.files import reading, sha256_bytes
from sparkwright.core.states import State
from sparkwright.core.store import flush, translate_disk_full
from sparkwright.gates.core import verdict_file
from sparkwright.operate.errors import LabError
from sparkwright.operate.site.records import File, Measured, Night, Stage
from sparkwright.release.manifest.records import line

#: Bytes of a file that is looked into; the largest measurements have some 20 MB.
LARGEST = 128 << 20
#: Bytes of a verb's ``--json``.
LARGEST_DOCUMENT = 64 << 20

#: How GitHub calls what came of a job or a step, and how we do.
_WORDS: Mapping[str, State] = {
    "success": "pass", "failure": "fail", "cancelled": "invalid", "skipped": "not-run", "": "not-run",
    "pass": "pass", "fail": "fail", "inconclusive": "inconclusive", "invalid": "invalid", "not-run": "not-run",
}  # fmt: skip
#: References of failures that do not mean that something is wrong with what was looked at.
_STATES: Mapping[str, State] = {
    "gate-inconclusive": "inconclusive", "measurement-invalid": "invalid", "gate-not-run": "not-run", "interrupted": "invalid",
}  # fmt: skip
_REFERENCE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_KEPT = re.compile(r"[^A-Za-z0-9._+!-]+")


class _Failure(msgspec.Struct, frozen=True):
    reference: str = ""
    what: str = ""


class _Document(msgspec.Struct, frozen=True):
    """Of what a verb prints with ``--json``: whether it failed, and of which wheel and state it tells."""

    error: _Failure | None = None


def stage(text: str) -> Stage:
    """
    Return the stage in ``NAME=OUTCOME[:REFERENCE]``; the outcome is a state, or GitHub's word for one.

    Raises:
        UsageError: It has another form.
    """
    name, found, rest = text.partition("=")
    outcome, _, reference = rest.partition(":")
    if not found or outcome not in _WORDS or not _named(name) or (reference and not _REFERENCE.fullmatch(reference)):
        known = ", ".join(word for word in _WORDS if word)
        raise UsageError("usage", f"{text!r} is not of the form NAME=OUTCOME[:REFERENCE].", details=[f"outcomes: {known}"])
    state = _WORDS[outcome]
    given = reference or ("cancelled" if outcome == "cancelled" else "")
    return Stage(name, state, "" if state == "pass" else given)


def documented(text: str) -> Stage:
    """
    Return the stage in ``NAME=FILE``, as the document that the verb printed with ``--json`` tells of it.

    A document that is missing or cut off belongs to a stage that did not end: it did not run, or was killed.

    Raises:
        UsageError: It has another form.
    """
    name, found, path = text.partition("=")
    if not found or not path or not _named(name):
        raise UsageError("usage", f"{text!r} is not of the form NAME=FILE.")
    data, why = _read(Path(path), LARGEST_DOCUMENT)
    if data is None:
        return Stage(name, "not-run", "no-document", why)
    try:
        error = msgspec.json.decode(data, type=_Document).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return Stage(name, "invalid", "no-document", line(f"the document cannot be read: {problem}"))
    if error is None:
        return Stage(name, "pass")
    reference = error.reference if _REFERENCE.fullmatch(error.reference) else "not-known"
    return Stage(name, _STATES.get(reference, "fail"), reference, line(error.what))


def together(told: Stage, document: Stage | None) -> Stage:
    """
    Return what *document* says of the stage that the workflow *told* of; the worse of the two where it says that all is well.

    A verb can have printed that it is done, and the job have failed behind it. One that never began has no document, and none is missed.
    """
    if document is None or (told.state == "not-run" and document.reference == "no-document"):
        return told
    if document.reference == "no-document" and told.state in ("fail", "invalid"):
        return msgspec.structs.replace(told, reference=told.reference or document.reference, says=document.says)
    return told if document.state == "pass" and told.state != "pass" else document


def _named(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,99}", name))


def files(paths: Sequence[Path]) -> tuple[tuple[File, ...], tuple[Measured, ...]]:
    """Return what the files at *paths* are, and what the measurements among them say; one that is not there is said to be missing."""
    found, measurements = list[File](), list[Measured]()
    for path in paths:
        name = _KEPT.sub("-", path.name).lstrip("._+!-")[:255] or "file"
        data, why = _read(path, LARGEST)
        if data is None:
            found.append(File(name, "other", "", 0, says=why))
            continue
        one, figures = _looked(name, data)
        found.append(one)
        measurements += figures
    return tuple(found), tuple(measurements)


class _Sniffed(msgspec.Struct, frozen=True):
    """Fields by which verdicts and measurements are known."""

    verdicts: msgspec.Raw = msgspec.Raw()
    legs: msgspec.Raw = msgspec.Raw()


def _looked(name: str, data: bytes) -> tuple[File, tuple[Measured, ...]]:
    sha256, size = sha256_bytes(data), len(data)
    try:
        sniffed = msgspec.json.decode(data, type=_Sniffed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return File(name, "other", sha256, size), ()
    try:
        if bytes(sniffed.verdicts):
            told = verdict_file.read(data)
            return File(name, "verdicts", sha256, size, told.state, line(told.wheel.sha256 if told.wheel else "")), ()
        if bytes(sniffed.legs):
            from sparkwright.operate.site import measured

            result = read.decode(data, name)
            figures = measured.of(result, sha256)
            return File(name, "throughput", sha256, size, result.state, line(result.candidate.sha256)), figures
    except (ValueError, msgspec.DecodeError, RecursionError, SparkwrightError) as error:
        return File(name, "verdicts" if bytes(sniffed.verdicts) else "throughput", sha256, size, "invalid", says=line(str(error))), ()
    return File(name, "document", sha256, size), ()


def _read(path: Path, most: int) -> tuple[bytes | None, str]:
    """Return the file at *path*, or why it is not taken."""
    try:
        with reading(path) as stream:
            data = stream.read(most + 1)
    except OSError as error:
        return None, line(error.strerror or "it cannot be read")
    return (data, "") if len(data) <= most else (None, f"it has more than {most >> 20} MiB")


def write(folder: Path, night: Night) -> Path:
    """
    Keep *night* in *folder*, whole or not at all, and return its file. The very same record again changes nothing.

    Raises:
        night-taken: Another record has that name; none is ever written over. disk-full: There is no room.
    """
    data = msgspec.json.format(msgspec.json.encode(night)) + b"\n"
    path = folder / night.filename
    with translate_disk_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".night.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(0o644)
            # Two runs may want the name at the same time; a link, unlike a rename, never replaces what the other one wrote.
            os.link(temporary, path)
            flush(folder)
        except FileExistsError as error:
            if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
                details = [f"file: {path}", f"run:  {night.workflow} {night.run}"]
                raise LabError(
                    "night-taken", f"There is another record of {night.filename.removesuffix('.json')}.", details=details
                ) from error
        finally:
            temporary.unlink(missing_ok=True)
    return path
