"""What the statements about a wheel have to say, given where it comes from, what is proved of it, and each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sparkwright.core.files import sha256_bytes
from sparkwright.gates.core.verdict import Ladder
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import judged, predicates
from sparkwright.release.evidence.predicates import (
    BUILD_TYPE,
    LEVEL,
    VERIFIER,
    Input,
    Provenance,
    Resource,
    Summary,
    TestResult,
)
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Fork, Proved, Wheel
from sparkwright.release.signing.statement import Statement

#: Bytes of a file. Verdicts with all their samples are a few megabytes, a measurement of many hours some dozens.
LARGEST = 64 << 20

#: How the wheel under a graft is called among what a build depends on. It is another one on each machine, and a release names one.
BASE = "the official wheel"



def file(name: str, sha256: str) -> Resource:
    """Return how statements name a file of evidence."""
    return Resource(name, places.evidence(sha256), {"sha256": sha256})


def input_file(sha256: str) -> Input:
    """Return how a summary names a file of evidence."""
    return Input(places.evidence(sha256), {"sha256": sha256})


def statement(kind: str, one: Statement) -> Input:
    """Return how a summary names a statement: by what is signed, so that its hash is known before it is."""
    return Input(f"{VERIFIER}:{kind}", {"sha256": sha256_bytes(one.encode())})


def parameters(wheel: Wheel, fork: Fork) -> dict[str, str]:
    """Return what was asked to be built."""
    return {"fork": fork.name, "project": wheel.project, "version": wheel.version, "machine": wheel.machine, "built": fork.built}


def dependencies(fork: Fork) -> tuple[Resource, ...]:
    """Return what a wheel of *fork* was made of: upstream's source, every patch in its order, and the wheel under it."""
    pin = {"git": "gitCommit", "sdist": "sha256", "wheel": "sha256"}.get(fork.kind)
    hashes = {**({pin: fork.pin} if pin else {}), **({"gitTree": fork.tree} if fork.tree else {})}
    told = {"resolved": "yes" if fork.resolved else "no", "version": fork.version}
    uri = f"git+{fork.origin.replace(' @ ', '@')}" if fork.kind == "git" else ""
    source = Resource(fork.name, uri, hashes, {"origin": fork.origin, **told})
    patches = (
        Resource(one.name, "", {"sha256": one.sha256}, {"patch": one.subject, **({"pick": str(one.pick)} if one.pick else {})})
        for one in fork.patches
    )
    base = (Resource(BASE, "", {"sha256": fork.base}),) if fork.base else ()
    return (source, *patches, *base)


def check(wheel: Wheel, fork: Fork | None, proved: Proved, payloads: Mapping[str, Statement], raw: Mapping[str, bytes]) -> Ladder | None:
    """
    Require that the statements *payloads* and the files *raw*, by kind, agree with *fork*, with *proved* and with each other.

    Returns:
        The verdicts; None without any.

    Raises:
        evidence-invalid: Something is missing, about other bytes, or contradicts something else.
        verdict-foreign, verdict-hollow: See `judged`.
    """
    if large := [f"{kind}: {len(data)} bytes" for kind, data in raw.items() if len(data) > LARGEST]:
        raise TrustError("evidence-invalid", f"A file about {wheel.filename} is larger than {LARGEST} bytes.", details=large)
    if proved.wheel != wheel.sha256:
        details = [f"wheel: {wheel.sha256}", f"about: {proved.wheel}"]
        raise TrustError("evidence-invalid", f"What is proved is not about {wheel.filename}.", details=details)
    for kind, one in payloads.items():
        _subject(wheel, kind, one)
    made = _read(payloads, "provenance", Provenance, wheel)
    final = _read(payloads, "summary", Summary, wheel)
    _provenance(wheel, fork, made, raw)
    found = _tests(wheel, proved, payloads, raw)
    _summary(wheel, proved, final, payloads, raw)
    if not proved.missing:
        _complete(wheel, final, found, raw)
    return found


def _subject(wheel: Wheel, kind: str, one: Statement) -> None:
    if [(subject.name, subject.sha256) for subject in one.subjects] != [(wheel.filename, wheel.sha256)]:
        named = [f"about: {subject.sha256} {subject.name:.200}" for subject in one.subjects[:3]]
        details = [f"wheel: {wheel.sha256} {wheel.filename}", *named]
        raise TrustError("evidence-invalid", f"The {kind} is not about {wheel.filename} alone.", details=details)


def _read(payloads: Mapping[str, Statement], kind: str, record: type[predicates.T], wheel: Wheel) -> predicates.T:
    if kind not in payloads:
        raise TrustError("evidence-invalid", f"Nobody signed the {kind} of {wheel.filename}.")
    return predicates.read(payloads[kind].predicate, record, f"The {kind} of {wheel.filename}")


def _agree(what: str, said: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    wrong = [f"{name}: says {_short(said.get(name))}, not {_short(value)}" for name, value in expected.items() if said.get(name) != value]
    if wrong:
        raise TrustError("evidence-invalid", f"{what} does not agree with the rest.", details=wrong)


def _short(value: Any) -> str:
    return f"{msgspec.to_builtins(value)!r:.160}"


def _provenance(wheel: Wheel, fork: Fork | None, made: Provenance, raw: Mapping[str, bytes]) -> None:
    what, build = f"The provenance of {wheel.filename}", made.build_definition
    _agree(what, {"buildType": build.build_type, "level": made.level}, {"buildType": BUILD_TYPE, "level": LEVEL})
    bills = {one.digest.get("sha256") for one in made.run_details.byproducts if one.name == "sbom"}
    _agree(what, {"sbom": bills}, {"sbom": {sha256_bytes(raw["sbom"])} if "sbom" in raw else set()})
    if fork is None:
        own = {"fork": wheel.fork, "project": wheel.project, "version": wheel.version, "machine": wheel.machine}
        return _agree(what, build.external_parameters, own)
    _agree(what, build.external_parameters, parameters(wheel, fork))
    wanted = dependencies(fork)
    said = build.resolved_dependencies[: len(wanted)]
    # A release states one wheel under all its grafts, those for another machine included; the build record in each wheel states its own.
    _agree(what, *({one.name or str(at): one for at, one in enumerate(every) if one.name != BASE} for every in (said, wanted)))
    _agree(what, *({"order": [one.name for one in every]} for every in (said, wanted)))
    return None


def _tests(wheel: Wheel, proved: Proved, payloads: Mapping[str, Statement], raw: Mapping[str, bytes]) -> Ladder | None:
    if ("verdicts" in raw) != ("test-result" in payloads) or ("throughput" in raw and "verdicts" not in raw):
        raise TrustError(
            "evidence-invalid", f"The verdicts about {wheel.filename} lack the statement that names them, or the other way round."
        )
    found = judged.verdicts(raw["verdicts"], wheel) if "verdicts" in raw else None
    judged.gates(proved, found, wheel)
    if found is None:
        return None
    said, tests = _read(payloads, "test-result", TestResult, wheel), judged.tests(found)
    files = {kind: sha256_bytes(raw[kind]) for kind in ("verdicts", "throughput") if kind in raw}
    policies = {f"policy of {one.label}": one.policy for one in found.verdicts if one.policy}
    _agree(
        f"The test result of {wheel.filename}",
        {**msgspec.structs.asdict(said), "configuration": {one.name: one.digest.get("sha256") for one in said.configuration}},
        {
            "result": judged.result(tests, proved.missing), "passed_tests": tests.passed, "warned_tests": tests.warned,
            "failed_tests": tests.failed, "informing": tests.informing, "gates": found.states,
            "configuration": {**files, "ci/release.yaml": proved.policy, **policies},
        },
    )  # fmt: skip
    if "throughput" in raw:
        judged.throughput(raw["throughput"], wheel, found, proved)
    elif proved.speeds or found.states.get(judged.THROUGHPUT) == "pass":
        raise TrustError("evidence-invalid", f"The speeds of {wheel.filename} are claimed without the measurement.")
    return found


def _summary(wheel: Wheel, proved: Proved, said: Summary, payloads: Mapping[str, Statement], raw: Mapping[str, bytes]) -> None:
    inputs = [statement(kind, one) for kind, one in payloads.items() if kind != "summary"]
    inputs += [input_file(sha256_bytes(data)) for data in raw.values()]
    _agree(
        f"The summary of {wheel.filename}",
        {
            **msgspec.structs.asdict(said), "verifier": said.verifier.id, "policy": said.policy.digest.get("sha256"),
            "input_attestations": {(one.uri, one.digest.get("sha256")) for one in said.input_attestations},
        },
        {
            "verifier": VERIFIER, "policy": proved.policy, "input_attestations": {(one.uri, one.digest["sha256"]) for one in inputs},
            "verification_result": "FAILED" if proved.missing else "PASSED", "verified_levels": ("FAILED",) if proved.missing else (LEVEL,),
            "resource_uri": places.wheel(wheel.sha256, wheel.filename), "gates": {one.name: one.state for one in proved.gates},
            "missing": proved.missing, "speeds": proved.speeds, "baseline": proved.baseline, "margin": proved.margin, "host": proved.host,
        },
    )  # fmt: skip


def _complete(wheel: Wheel, final: Summary, found: Ladder | None, raw: Mapping[str, bytes]) -> None:
    """Require what stands behind a wheel of which nothing is missing."""
    states = found.states if found else {}
    short = [f"{name}: {states.get(name, 'not-run')}" for name in final.required if states.get(name) != "pass"]
    failed = [f"{name}: {state}" for name, state in states.items() if state in ("fail", "invalid")]
    if short or failed:
        raise TrustError(
            "evidence-invalid", f"{wheel.filename} is said to lack nothing, and its verdicts say otherwise.", details=[*short, *failed]
        )
    if judged.THROUGHPUT in final.required and "throughput" not in raw:
        raise TrustError("evidence-invalid", f"The measurement behind {judged.THROUGHPUT} of {wheel.filename} is missing.")
