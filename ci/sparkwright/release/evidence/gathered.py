"""Evidence that lies in a folder, without an index: what belongs to a wheel is found by what the signed statements name by hash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_bytes
from sparkwright.gates.ladder import RUNGS
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import agreement
from sparkwright.release.evidence.agreement import LARGEST
from sparkwright.release.evidence.predicates import TYPES, Provenance, Summary, TestResult, read
from sparkwright.release.manifest.records import Evidence, Proved, Rung, Wheel
from sparkwright.release.signing import envelope
from sparkwright.release.signing.statement import Statement
from sparkwright.release.signing.trust import Trust

#: Files of a folder that are looked at; an index of a thousand releases of ten wheels has some fifty thousand.
MOST_FILES = 200_000


class Signed(msgspec.Struct, frozen=True):
    """A signed file: what it holds, and its sha256 and size."""

    kind: str
    statement: Statement
    sha256: str
    size: int


class Folder:
    """
    The files of a folder, by their sha256.

    Raises:
        evidence-invalid: There is no such folder, or far too much in it.
    """

    def __init__(self, folder: Path, trust: Trust) -> None:
        self._folder, self._trust = folder, trust
        self._places: dict[str, Path] = {}
        self._signed: list[Signed] = []
        self._refused: list[SparkwrightError] = []
        try:
            paths = sorted(path for path in folder.iterdir() if path.suffix == ".json" and path.is_file())
        except OSError as error:
            raise TrustError("evidence-invalid", f"{folder} cannot be read.", details=[str(error)]) from error
        if len(paths) > MOST_FILES:
            raise TrustError("evidence-invalid", f"{folder} holds {len(paths)} files; {MOST_FILES} are the most that are looked at.")
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            return
        sha256 = sha256_bytes(data)
        self._places[sha256] = path
        for kind, expected in TYPES.items():
            try:
                opened = envelope.opened(data, self._trust, predicate_type=expected, what=path.name)
            except TrustError as error:
                if error.reference == "evidence-invalid":
                    continue
                if error.reference not in {"signature-invalid", "signer-unknown"}:
                    raise
                self._refused.append(error)
                return
            self._signed.append(Signed(kind, opened.statement, sha256, len(data)))
            return

    def read(self, one: Evidence) -> bytes:
        """Return a file of the folder; whoever asks holds it against its hash."""
        return self._places[one.sha256].read_bytes()

    def proofs(self, wheel: Wheel) -> list[tuple[Wheel, Proved]]:
        """
        Return what the folder's summaries prove of *wheel*: one for each, as promoting makes another.

        Raises:
            evidence-invalid: None is about it, or one names files that are not there.
            signature-invalid, signer-unknown: Statements are there, signed by nobody who is trusted.
        """
        about = [one for one in self._signed if any(subject.sha256 == wheel.sha256 for subject in one.statement.subjects)]
        summaries = [one for one in about if one.kind == "summary"]
        if not summaries and self._refused:
            raise self._refused[0]
        if not summaries:
            details = [f"sha256 {wheel.sha256}"]
            raise TrustError("evidence-invalid", f"Nothing in {self._folder} sums up what is proved of {wheel.filename}.", details=details)
        return [self._proof(wheel, summary, about) for summary in summaries]

    def _proof(self, wheel: Wheel, summary: Signed, about: list[Signed]) -> tuple[Wheel, Proved]:
        said = read(summary.statement.predicate, Summary, f"The summary of {wheel.filename}")
        wanted = {one.digest.get("sha256", "") for one in said.input_attestations}
        chosen = [one for one in about if agreement.statement(one.kind, one.statement).digest["sha256"] in wanted]
        raw = {sha256: kind for one in chosen for kind, sha256 in _named(one)}
        files = [*((one.kind, one.sha256, one.size) for one in (summary, *chosen)), *self._raw(raw, wanted)]
        made = [read(one.statement.predicate, Provenance, "The provenance") for one in chosen if one.kind == "provenance"]
        fork = next((one.build_definition.external_parameters.get("fork", "") for one in made), "")
        proved = Proved(
            wheel.sha256, said.policy.digest.get("sha256", ""), said.missing,
            tuple(Rung(name, RUNGS.get(name, ""), state) for name, state in said.rungs.items()), said.speeds, said.baseline, said.margin,
            said.host, tuple(msgspec.convert({"kind": kind, "sha256": sha256, "size": size}, Evidence) for kind, sha256, size in files),
        )  # fmt: skip
        return msgspec.structs.replace(wheel, fork=fork), proved

    def _raw(self, named: dict[str, str], wanted: set[str]) -> Iterator[tuple[str, str, int]]:
        for sha256, kind in named.items():
            if sha256 in wanted:
                if sha256 not in self._places:
                    raise TrustError(
                        "evidence-invalid", f"{self._folder} lacks the {kind} that the statements name.", details=[f"sha256 {sha256}"]
                    )
                yield kind, sha256, self._places[sha256].stat().st_size


def _named(one: Signed) -> Iterator[tuple[str, str]]:
    """Yield kind and sha256 of the raw files that a statement names."""
    if one.kind == "provenance":
        made = read(one.statement.predicate, Provenance, "The provenance")
        resources = made.run_details.byproducts
    elif one.kind == "test-result":
        resources = read(one.statement.predicate, TestResult, "The test result").configuration
    else:
        return
    for resource in resources:
        if resource.name in ("sbom", "verdicts", "throughput"):
            yield resource.name, resource.digest.get("sha256", "")
