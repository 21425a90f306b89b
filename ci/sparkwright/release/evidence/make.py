"""
Statements about a wheel: how it came about, what the gates found, and what was decided.

What is said here is what `agreement` and `judged` ask of it; `statements` asks them, so that nothing is signed that clients would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sparkwright import __version__
from sparkwright.core.files import sha256_bytes
from sparkwright.gates.core.verdict import Ladder
from sparkwright.release.evidence import agreement, judged
from sparkwright.release.evidence.predicates import (
    BUILD_TYPE,
    LEVEL,
    SELF_HOSTED,
    TYPES,
    VERIFIER,
    Builder,
    Definition,
    Details,
    Kind,
    Policy,
    Provenance,
    Resource,
    Summary,
    TestResult,
    Verifier,
)
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Evidence, Fork, Proved, Wheel
from sparkwright.release.signing.statement import Signer, Statement, Subject

if TYPE_CHECKING:
    from sparkwright.builder.pipeline import BuildRecord

_HERE = "The wheel was built on a machine that its publisher runs; nobody else vouches for what that machine did."
_HOSTED = "The build ran under this workflow; the statement was made by its own steps, which the platform does not vouch for."


def statements(
    wheel: Wheel, fork: Fork, proved: Proved, raw: Mapping[str, bytes], *, record: BuildRecord | None = None, lock_digest: str = "",
    stack: str = "", required: Sequence[str] | None = None, builder: str = SELF_HOSTED,
) -> dict[str, Statement]:  # fmt: skip
    """
    Return what there is to sign about *wheel*; no ``test-result`` where *raw* has no verdicts.

    Args:
        proved: What was decided; its evidence is not looked at, as it does not exist yet.
        raw: The files that the statements name by hash, as they will be published: ``sbom``, ``verdicts`` and ``throughput``.
        record: The wheel's build record, where it has one.
        lock_digest: sha256 of ``forks/<stack>/lock.yaml``; empty where it is not known.
        stack: Where there is no *record* that says it.
        required: Gates that the policy asks of the wheel; by default what *proved* lets conclude: those that pass, and those missing.
        builder: See `builder_of`.

    Raises:
        evidence-invalid, verdict-foreign, verdict-hollow: The files contradict *proved* or each other; see `judged` and `agreement`.
    """
    about = (Subject(wheel.filename, wheel.sha256),)
    made: dict[Kind, msgspec.Struct] = {"provenance": provenance(wheel, fork, raw, record, lock_digest, stack, builder)}
    found = judged.verdicts(raw["verdicts"], wheel) if "verdicts" in raw else None
    if found:
        made["test-result"] = test_result(found, proved, raw)
    payloads: dict[str, Statement] = {kind: Statement(about, TYPES[kind], _plain(one)) for kind, one in made.items()}
    final = summary(wheel, proved, payloads, raw, _asked(proved) if required is None else required)
    payloads["summary"] = Statement(about, TYPES["summary"], _plain(final))
    agreement.check(wheel, fork, proved, payloads, raw)
    return payloads


def _asked(proved: Proved) -> list[str]:
    missing = {one.gate for one in proved.missing}
    return [one.name for one in proved.gates if one.state == "pass" or one.name in missing]


def _plain(record: msgspec.Struct) -> dict[str, Any]:
    # As whoever reads it will have it: lists, and no tuples.
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return made


def signed(payloads: Mapping[str, Statement], raw: Mapping[str, bytes], wheel: Wheel, signer: Signer) -> dict[Evidence, bytes]:
    """Return the files of evidence about *wheel*, signed and raw, each with what the proof says of it."""
    from sparkwright.release.signing import pep740

    files: dict[str, bytes] = {**{kind: signer.sign(one) for kind, one in payloads.items()}, **raw}
    if signer.has_identity and (index := pep740.pep740(files["provenance"], wheel.filename)):
        files["pep740"] = index
    told = {kind: {"kind": kind, "sha256": sha256_bytes(data), "size": len(data)} for kind, data in files.items()}
    return {msgspec.convert(told[kind], Evidence): data for kind, data in files.items()}


def builder_of(env: Mapping[str, str]) -> str:
    """
    Return who builds in this environment: the workflow of GitHub Actions that runs, or whoever owns this machine.

    It is true of a wheel only where the wheel is built in this very run; of any other, nothing is claimed but that somebody built it.
    """
    if env.get("GITHUB_ACTIONS") == "true" and env.get("GITHUB_WORKFLOW_REF"):
        return f"{env.get('GITHUB_SERVER_URL', 'https://github.com')}/{env['GITHUB_WORKFLOW_REF']}"
    return SELF_HOSTED


def provenance(
    wheel: Wheel, fork: Fork, raw: Mapping[str, bytes], record: BuildRecord | None, lock_digest: str, stack: str, builder: str
) -> Provenance:  # fmt: skip
    """Return how *wheel* came about."""
    asked = {**agreement.parameters(wheel, fork), "stack": record.stack if record else stack, "arch": record.arch if record else ""}
    inner: dict[str, Any] = {"cuda": fork.cuda, "sites": fork.sites, "sourceTree": fork.source_tree}
    inner["isolation"] = fork.isolation or "none recorded"
    more: list[Resource] = []
    if lock_digest:
        more.append(Resource("lock.yaml", f"forks/{asked['stack']}/lock.yaml", {"sha256": lock_digest}))
    if record:
        inner |= {"compiler": record.compiler, "plan": record.plan, "inputs": record.inputs}
        more += [Resource("toolchain", digest={"sha256": record.tools})] if record.tools else []
    return Provenance(
        Definition(
            BUILD_TYPE, {name: value for name, value in asked.items() if value}, {name: value for name, value in inner.items() if value},
            (*agreement.dependencies(fork), *more),
        ),
        Details(
            Builder(builder, {"sparkwright": record.sparkwright if record else __version__}), {},
            tuple(agreement.file(kind, sha256_bytes(raw[kind])) for kind in ("sbom",) if kind in raw),
        ),
        LEVEL, _HERE if builder == SELF_HOSTED else _HOSTED,
    )  # fmt: skip


def test_result(found: Ladder, proved: Proved, raw: Mapping[str, bytes]) -> TestResult:
    """Return what the gates found, PASSED only where every required check passed and nothing is missing for ``verified``."""
    tests = judged.tests(found)
    files = [agreement.file(kind, sha256_bytes(raw[kind])) for kind in ("verdicts", "throughput") if kind in raw]
    judging = [Resource("ci/release.yaml", digest={"sha256": proved.policy}), *_policies(found)]
    return TestResult(
        judged.result(tests, proved.missing), (*files, *judging), tests.passed, tests.warned, tests.failed, tests.informing,
        found.states,
    )  # fmt: skip


def _policies(found: Ladder) -> Iterator[Resource]:
    for one in found.verdicts:
        if one.policy:
            yield Resource(f"policy of {one.label}", digest={"sha256": one.policy})


def summary(
    wheel: Wheel, proved: Proved, payloads: Mapping[str, Statement], raw: Mapping[str, bytes], required: Sequence[str]
) -> Summary:  # fmt: skip
    """Return what was decided of *wheel*, from which statements and files."""
    inputs = [agreement.statement(kind, one) for kind, one in payloads.items()]
    inputs += [agreement.input_file(sha256_bytes(data)) for _, data in sorted(raw.items())]
    passed = not proved.missing
    return Summary(
        Verifier(VERIFIER), places.wheel(wheel.sha256, wheel.filename),
        Policy("ci/release.yaml", {"sha256": proved.policy}), tuple(inputs), "PASSED" if passed else "FAILED",
        (LEVEL,) if passed else ("FAILED",), "1.0", tuple(required), {one.name: one.state for one in proved.gates}, proved.missing,
        proved.speeds, proved.baseline, proved.margin, dict(proved.host), __version__,
    )  # fmt: skip
