"""Evidence: what is signed of a wheel is what its files show, in the words of the standards, and whatever contradicts it is refused."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.predicates.vsa.v1 import vsa_pb2
from in_toto_attestation.v1 import statement as in_toto
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from msgspec.structs import replace
from tests.release import world
from tests.support import verdicts, wheels
from tests.support.sigstoreworld import World

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel import source_wheel as program
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.cli import main
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.gates.core import ladder as ladders
from sparkwright.gates.core import verdict_file
from sparkwright.gates.core.verdict import Check, Ladder, passed
from sparkwright.gates.throughput.records import Result
from sparkwright.release.decide import decision, facts
from sparkwright.release.evidence import agreement, check, inside, make
from sparkwright.release.evidence.check import Checked
from sparkwright.release.evidence.predicates import SELF_HOSTED, TYPES
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Evidence, Fork, Proved, Wheel
from sparkwright.release.signing import keys
from sparkwright.release.signing.keys import KeySigner
from sparkwright.release.signing.statement import Statement
from sparkwright.release.signing.trust import Trust


class Case(msgspec.Struct, frozen=True):
    """A wheel with everything that is said of it, before it is signed."""

    path: Path
    inspected: facts.Inspected
    ladder: Ladder
    result: Result
    proved: Proved

    @property
    def wheel(self) -> Wheel:
        return self.inspected.wheel

    @property
    def fork(self) -> Fork:
        return self.inspected.fork

    @property
    def raw(self) -> dict[str, bytes]:
        """The files as the gates write them."""
        written = {"verdicts": msgspec.json.encode(verdict_file.document(self.ladder)), "throughput": msgspec.json.encode(self.result)}
        return {"sbom": self.inspected.sbom, **written}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return vLLM with every gate passed."""
    folder = tmp_path_factory.mktemp("case")
    path = wheels.vllm(folder)
    inspected = facts.inspect(path)
    ladder, result = verdicts.ladder(path), verdicts.result(path)
    proved = decision.decide(inspected, ladder, result, verdicts.policy())
    assert proved.missing == ()
    return Case(path, inspected, ladder, result, proved)


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> KeySigner:
    """Return a signer with a new key."""
    path = tmp_path_factory.mktemp("key") / "key"
    keys.make(path)
    return KeySigner.load(path)


Signed = tuple[Proved, dict[str, bytes]]


def signed(
    case: Case, signer: KeySigner, payloads: Mapping[str, Statement] | None = None, raw: Mapping[str, bytes] | None = None
) -> Signed:
    """Return what is proved with its evidence, and the files by their sha256."""
    raw = case.raw if raw is None else raw
    payloads = payloads or make.statements(case.wheel, case.fork, case.proved, raw, record=case.inspected.record, lock_digest="ab" * 32)
    files = make.signed(payloads, raw, case.wheel, signer)
    return replace(case.proved, evidence=tuple(files)), {one.sha256: data for one, data in files.items()}


def checked(case: Case, signer: KeySigner, made: Signed, fork: Fork | None = None) -> Checked:
    """Check the files of *made* as a client does."""
    proved, files = made
    return check.checked(case.wheel, fork or case.fork, proved, lambda one: files[one.sha256], Trust((signer.public,)))


def ends_with(call: Callable[[], object]) -> str:
    """Return the kind of failure that *call* ends with."""
    with pytest.raises(SparkwrightError) as caught:
        call()
    return caught.value.reference


# What is said.


def test_everything_that_was_shown_is_said_and_holds(case: Case, signer: KeySigner) -> None:
    """Three statements by the same signer, every gate's state computed from its checks."""
    found = checked(case, signer, signed(case, signer))

    assert found.signers == dict.fromkeys(("provenance", "test-result", "summary"), signer.by)
    assert found.gates == dict.fromkeys(ladders.GATES, "pass")
    assert set(found.raw) == {"sbom", "verdicts", "throughput"}


def test_statements_are_in_toto_of_the_standards(case: Case, signer: KeySigner) -> None:
    """The libraries' own models take all of it, but for what begins with our name; subject is the file and its sha256 alone."""
    models: dict[str, Callable[[], Any]] = {
        "provenance": provenance_pb2.Provenance, "test-result": test_result_pb2.TestResult, "summary": vsa_pb2.VerificationSummary,
    }  # fmt: skip
    for kind, one in make.statements(case.wheel, case.fork, case.proved, case.raw, record=case.inspected.record).items():
        read = in_toto.Statement.copy_from_pb(json_format.Parse(one.encode(), statement_pb2.Statement()))
        read.validate()
        assert (read.pb.predicate_type, [dict(subject.digest) for subject in read.pb.subject]) == (
            TYPES[kind], [{"sha256": case.wheel.sha256}],  # type: ignore[index]  # a kind of statement
        )  # fmt: skip
        plain = json.loads(one.encode())["predicate"]
        standard = {name: value for name, value in plain.items() if not name.startswith("sparkwright_")}
        if kind == "summary":
            # The standard has a list here; the library's model (0.9.3) has one string.
            (standard["verifiedLevels"],) = standard["verifiedLevels"]
        made = json_format.ParseDict(standard, models[kind]())
        for resource in getattr(made, "configuration", ()) or getattr(getattr(made, "build_definition", None), "resolved_dependencies", ()):
            ResourceDescriptor.copy_from_pb(resource).validate()


def test_provenance_says_where_it_ran_and_of_what(case: Case) -> None:
    """The source by commit and tree, each patch by its hash and in order, the official wheel, lock and tools; and no higher level."""
    one = make.statements(case.wheel, case.fork, case.proved, case.raw, record=case.inspected.record, lock_digest="ab" * 32)["provenance"]
    build = one.predicate["buildDefinition"]
    things = {thing["name"]: thing.get("digest", {}) for thing in build["resolvedDependencies"]}

    assert things["vllm"] == {"gitCommit": case.fork.pin, "gitTree": case.fork.tree}
    assert [things[patch.name]["sha256"] for patch in case.fork.patches] == [patch.sha256 for patch in case.fork.patches]
    assert things["the official wheel"] == {"sha256": case.fork.base}
    record = case.inspected.record
    assert record is not None
    assert (things["lock.yaml"], things["toolchain"]) == ({"sha256": "ab" * 32}, {"sha256": record.tools})
    assert build["externalParameters"] == {
        "fork": "vllm", "project": "vllm", "version": case.wheel.version, "machine": case.wheel.machine, "built": "graft",
        "stack": wheels.STACK, "arch": wheels.ARCH,
    }  # fmt: skip
    assert build["internalParameters"]["isolation"] == "namespace"
    assert one.predicate["runDetails"]["builder"]["id"] == SELF_HOSTED
    assert one.predicate["sparkwright_level"] == "SLSA_BUILD_LEVEL_1"
    assert "metadata" not in one.predicate["runDetails"], "nobody measured a time"


@pytest.mark.parametrize(
    ("env", "builder"),
    [
        ({}, SELF_HOSTED),
        ({"GITHUB_ACTIONS": "true"}, SELF_HOSTED),
        ({"GITHUB_WORKFLOW_REF": "a/b/.github/workflows/x.yml@refs/heads/main"}, SELF_HOSTED),
        (
            {"GITHUB_ACTIONS": "true", "GITHUB_WORKFLOW_REF": "a/b/.github/workflows/x.yml@refs/heads/main"},
            "https://github.com/a/b/.github/workflows/x.yml@refs/heads/main",
        ),
    ],
)
def test_the_builder_is_who_it_is(case: Case, env: dict[str, str], builder: str) -> None:
    """A workflow is named where one runs; a machine of one's own has the name of its kind."""
    assert make.builder_of(env) == builder
    one = make.statements(case.wheel, case.fork, case.proved, case.raw, builder=builder)["provenance"]
    assert one.predicate["runDetails"]["builder"]["id"] == builder


@pytest.mark.parametrize(
    ("state", "result"), [("not-run", "WARNED"), ("inconclusive", "WARNED"), ("fail", "FAILED"), ("invalid", "FAILED")]
)
def test_only_a_whole_pass_is_passed(case: Case, signer: KeySigner, state: Any, result: str) -> None:
    """One gate that is not a pass: the test is warned of or failed, the summary fails and names it, and all of it holds as said."""
    ladder = verdicts.ladder(case.path, worse={"G4": state})
    proved = decision.decide(case.inspected, ladder, case.result, verdicts.policy())
    other = replace(case, ladder=ladder, proved=proved)
    made = make.statements(case.wheel, case.fork, proved, other.raw)
    tests, summary = made["test-result"].predicate, made["summary"].predicate

    assert tests["result"] == result
    worse = next(one for one in ladder.verdicts if one.gate == "G4")
    assert f"{worse.label}/{worse.checks[0].name}" in tests["warnedTests" if result == "WARNED" else "failedTests"]
    assert (summary["verificationResult"], summary["verifiedLevels"]) == ("FAILED", ["FAILED"])
    assert [one["gate"] for one in summary["sparkwright_missing"]] == ["G4"]
    assert checked(other, signer, signed(other, signer)).gates["G4"] == state


def test_a_candidate_without_verdicts_says_so(case: Case, signer: KeySigner) -> None:
    """Where nobody climbed, there is no test result, and the summary lists what is missing."""
    proved = decision.decide(case.inspected, None, None, verdicts.policy())
    other = replace(case, proved=proved)
    raw = {"sbom": case.inspected.sbom}
    made = make.statements(case.wheel, case.fork, proved, raw)
    found = checked(other, signer, signed(other, signer, made, raw))

    assert (set(made), found.gates) == ({"provenance", "summary"}, {})
    assert len(made["summary"].predicate["sparkwright_missing"]) == len(ladders.GATES)


def test_summary_carries_speeds_and_evidence(case: Case) -> None:
    """Each series that was measured, with interval and e-values, the margin, the baseline and the host."""
    said = make.statements(case.wheel, case.fork, case.proved, case.raw)["summary"].predicate

    assert len(said["sparkwright_speeds"]) == len(case.proved.speeds) > 0
    assert {"cell", "metric", "ratio", "low", "high", "evidence_pass", "evidence_fail"} <= set(said["sparkwright_speeds"][0])
    assert (said["sparkwright_margin"], said["sparkwright_baseline"]) == (case.result.margin, case.proved.baseline)
    assert said["sparkwright_host"]["gpu"] == verdicts.HOST["gpu"]
    assert said["sparkwright_required"] == list(ladders.GATES)


@pytest.mark.parametrize("kind", ["cutlass", "flashinfer", "jitcache", "installer"])
def test_other_wheels_have_evidence_too(tmp_path: Path, signer: KeySigner, kind: str) -> None:
    """Headers, FlashInfer, its modules and the installer: what applies is said, and holds, also where the release names no fork."""
    paths = wheels.release(tmp_path)
    if kind == "installer":
        path = program.write_program(tmp_path, extra="", label="7")
    else:
        path = {"cutlass": paths[0], "flashinfer": paths[1], "jitcache": paths[2]}[kind]
    inspected = facts.inspect(path)
    ladder = None if kind == "installer" else verdicts.ladder(path)
    served = verdicts.ladder(paths[3], companions=paths[:3])
    proved = decision.decide(inspected, ladder, None, verdicts.policy(), served=served)
    raw = {"sbom": inspected.sbom, **({"verdicts": msgspec.json.encode(verdict_file.document(ladder))} if ladder else {})}
    made = make.statements(inspected.wheel, inspected.fork, proved, raw, record=inspected.record, stack=wheels.STACK)
    files = make.signed(made, raw, inspected.wheel, signer)
    whole = replace(proved, evidence=tuple(files))
    by_hash = {one.sha256: data for one, data in files.items()}
    fork = None if kind == "installer" else inspected.fork
    found = check.checked(inspected.wheel, fork, whole, lambda one: by_hash[one.sha256], Trust((signer.public,)))

    assert found.gates == ({} if kind == "installer" else {"G0": "pass"})
    assert proved.missing == ()


# What is refused. Whoever holds the key may sign what is false; what the files themselves show is still refused.


def resigned(case: Case, signer: KeySigner, kind: str, change: Callable[[dict[str, Any]], object]) -> Signed:
    """Return evidence in which the predicate of *kind* was changed and signed again; the summary names the changed statement."""
    payloads = dict(make.statements(case.wheel, case.fork, case.proved, case.raw, record=case.inspected.record))

    def edited(name: str, edit: Callable[[dict[str, Any]], object]) -> None:
        predicate = msgspec.json.decode(msgspec.json.encode(payloads[name].predicate))
        edit(predicate)
        payloads[name] = replace(payloads[name], predicate=predicate)

    before = sha256_bytes(payloads[kind].encode())
    edited(kind, change)
    after = sha256_bytes(payloads[kind].encode())

    def follow(said: dict[str, Any]) -> None:
        for one in said["inputAttestations"]:
            one["digest"]["sha256"] = after if one["digest"]["sha256"] == before else one["digest"]["sha256"]

    if kind != "summary":
        edited("summary", follow)
    return signed(case, signer, payloads)


PROVENANCE: dict[str, Callable[[dict[str, Any]], object]] = {
    "another commit": lambda said: said["buildDefinition"]["resolvedDependencies"][0]["digest"].update(gitCommit="0" * 40),
    "another tree": lambda said: said["buildDefinition"]["resolvedDependencies"][0]["digest"].update(gitTree="0" * 40),
    "another patch": lambda said: said["buildDefinition"]["resolvedDependencies"][1]["digest"].update(sha256="0" * 64),
    "a patch less": lambda said: said["buildDefinition"]["resolvedDependencies"].pop(1),
    "patches in another order": lambda said: said["buildDefinition"]["resolvedDependencies"].insert(
        1, said["buildDefinition"]["resolvedDependencies"].pop(2)
    ),
    "another kind of build": lambda said: said["buildDefinition"].update(buildType="urn:other"),
    "another version": lambda said: said["buildDefinition"]["externalParameters"].update(version="1.0"),
    "full instead of graft": lambda said: said["buildDefinition"]["externalParameters"].update(built="full"),
    "a higher level": lambda said: said.update(sparkwright_level="SLSA_BUILD_LEVEL_3"),
    "another SBOM": lambda said: said["runDetails"]["byproducts"][0]["digest"].update(sha256="0" * 64),
    "no dependencies": lambda said: said["buildDefinition"].pop("resolvedDependencies"),
    "no definition": lambda said: said.pop("buildDefinition"),
}
TESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "other verdicts": lambda said: said["configuration"][0]["digest"].update(sha256="0" * 64),
    "another policy": lambda said: said["configuration"][2]["digest"].update(sha256="0" * 64),
    "the policy of a gate left out": lambda said: said["configuration"].pop(),
    "a test left out": lambda said: said["passedTests"].pop(),
    "a test more": lambda said: said["passedTests"].append("G0/made-up"),
    "a worse result": lambda said: said.update(result="WARNED"),
    "a gate that is none": lambda said: said["sparkwright_gates"].update(G4="fail"),
    "no result": lambda said: said.pop("result"),
}
SUMMARY: dict[str, Callable[[dict[str, Any]], object]] = {
    "failed": lambda said: said.update(verificationResult="FAILED"),
    "a higher level": lambda said: said.update(verifiedLevels=["SLSA_BUILD_LEVEL_3"]),
    "another policy": lambda said: said["policy"]["digest"].update(sha256="0" * 64),
    "another verifier": lambda said: said["verifier"].update(id="urn:other"),
    "an input less": lambda said: said["inputAttestations"].pop(),
    "another file": lambda said: said.update(resourceUri="files/other"),
    "faster": lambda said: said["sparkwright_speeds"][0].update(ratio=0.5),
    "another margin": lambda said: said.update(sparkwright_margin=0.5),
    "something missing": lambda said: said.update(sparkwright_missing=[{"gate": "G4", "state": "fail", "reference": "x", "says": "y"}]),
    "a gate that is asked for and was not run": lambda said: said.update(sparkwright_required=[*ladders.GATES, "G9"]),
}
EDITS = [(kind, name) for kind, edits in (("provenance", PROVENANCE), ("test-result", TESTS), ("summary", SUMMARY)) for name in edits]


@pytest.mark.parametrize(("kind", "name"), EDITS, ids=lambda part: part.replace(" ", "-"))
def test_a_statement_that_contradicts_the_rest_is_refused(case: Case, signer: KeySigner, kind: str, name: str) -> None:
    """Rightly signed, and yet not what the release, the proof, the files or the other statements say."""
    change = {"provenance": PROVENANCE, "test-result": TESTS, "summary": SUMMARY}[kind][name]
    made = resigned(case, signer, kind, change)

    assert ends_with(lambda: checked(case, signer, made)) == "evidence-invalid"


def with_raw(case: Case, signer: KeySigner, kind: str, data: bytes) -> Signed:
    """Return evidence whose statements name another raw file of *kind*; they are made of it without looking into it."""
    before = sha256_bytes(case.raw[kind])
    after = sha256_bytes(data)
    payloads = make.statements(case.wheel, case.fork, case.proved, case.raw, record=case.inspected.record)
    swaps, swapped = {before: after}, {}
    for name in ("provenance", "test-result", "summary"):
        text = msgspec.json.encode(payloads[name])
        for old, new in swaps.items():
            text = text.replace(old.encode(), new.encode())
        swapped[name] = msgspec.json.decode(text, type=Statement)
        swaps[sha256_bytes(payloads[name].encode())] = sha256_bytes(swapped[name].encode())
    return signed(case, signer, swapped, {**case.raw, kind: data})


def rewritten(ladder: Ladder, **changed: Any) -> bytes:
    """Return the document of *ladder* with other fields, its states as they then follow."""
    return msgspec.json.encode(verdict_file.document(replace(ladder, **changed)))


def hollow(ladder: Ladder, name: str) -> Ladder:
    """Return *ladder* with a gate whose checks pass without figure or sample."""

    def bare(checks: tuple[Check, ...]) -> tuple[Check, ...]:
        return tuple(passed(check.name, check.message) for check in checks)

    return replace(ladder, verdicts=tuple(replace(one, checks=bare(one.checks)) if one.gate == name else one for one in ladder.verdicts))


def first(ladder: Ladder, **changed: Any) -> bytes:
    """Return the document of *ladder* with another first verdict."""
    return rewritten(ladder, verdicts=(replace(ladder.verdicts[0], **changed), *ladder.verdicts[1:]))


def failed_unseen(case: Case) -> bytes:
    """Return a document that says pass of a gate whose checks fail."""
    return rewritten(verdicts.ladder(case.path, worse={"G5": "fail"})).replace(b'"state":"fail"', b'"state":"pass"')


VERDICTS: dict[str, tuple[str, Callable[[Case], bytes]]] = {
    "about another wheel": ("verdict-foreign", lambda case: rewritten(verdicts.ladder(case.path, sha256="0" * 64))),
    "one gate about another wheel": (
        "verdict-foreign",
        lambda case: first(case.ladder, wheel="0" * 64),
    ),
    "about no wheel": ("verdict-foreign", lambda case: rewritten(case.ladder, wheel=None)),
    "without figures and samples": ("verdict-hollow", lambda case: rewritten(hollow(case.ladder, "G1"))),
    "without checks": ("evidence-invalid", lambda case: first(case.ladder, checks=())),
    "a gate less": ("evidence-invalid", lambda case: rewritten(case.ladder, verdicts=case.ladder.verdicts[:-1])),
    "a gate twice": ("evidence-invalid", lambda case: rewritten(case.ladder, verdicts=(*case.ladder.verdicts, case.ladder.verdicts[0]))),
    "a worse gate": ("evidence-invalid", lambda case: rewritten(verdicts.ladder(case.path, worse={"G5": "fail"}))),
    "states that do not follow": ("evidence-invalid", failed_unseen),
    "a page": ("evidence-invalid", lambda case: b"<!doctype html><title>Sign in</title>"),
    "nothing": ("evidence-invalid", lambda case: b""),
    "deep nonsense": ("evidence-invalid", lambda case: b"[" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS, ids=lambda name: name.replace(" ", "-"))
def test_verdicts_that_do_not_carry_the_claim_are_refused(case: Case, signer: KeySigner, name: str) -> None:
    """Named rightly by hash and signed, and yet about something else, hollow, or saying less than the proof."""
    kind, made = VERDICTS[name]
    evidence = with_raw(case, signer, "verdicts", made(case))

    assert ends_with(lambda: checked(case, signer, evidence)) == kind


THROUGHPUT: dict[str, tuple[str, Callable[[Result], Result]]] = {
    "about another wheel": ("verdict-foreign", lambda made: replace(made, candidate=replace(made.candidate, sha256="0" * 64))),
    "without legs": ("verdict-hollow", lambda made: replace(made, legs=())),
    "without a leg that counts": (
        "verdict-hollow",
        lambda made: replace(made, legs=tuple(replace(leg, discarded=True) for leg in made.legs)),
    ),
    "without legs of the baseline": (
        "verdict-hollow",
        lambda made: replace(made, legs=tuple(leg for leg in made.legs if leg.side == "candidate")),
    ),
    "without blocks": (
        "verdict-hollow",
        lambda made: replace(
            made, cells=tuple(replace(cell, series=tuple(replace(one, differences=()) for one in cell.series)) for cell in made.cells)
        ),
    ),
    "a bench": ("verdict-hollow", lambda made: replace(made, kind="bench")),
    "by another policy": ("evidence-invalid", lambda made: replace(made, policy="0" * 64)),
    "undecided": ("evidence-invalid", lambda made: replace(made, state="inconclusive")),
    "other speeds": (
        "evidence-invalid",
        lambda made: replace(
            made, cells=tuple(replace(cell, series=tuple(replace(one, low=0.5) for one in cell.series)) for cell in made.cells)
        ),
    ),
    "another margin": ("evidence-invalid", lambda made: replace(made, margin=0.5)),
}


@pytest.mark.parametrize("name", THROUGHPUT, ids=lambda name: name.replace(" ", "-"))
def test_a_measurement_that_does_not_carry_the_claim_is_refused(case: Case, signer: KeySigner, name: str) -> None:
    """The file behind G8 has to be of this wheel, by the policy that judged, with legs, blocks and the speeds that are told."""
    kind, change = THROUGHPUT[name]
    evidence = with_raw(case, signer, "throughput", msgspec.json.encode(change(case.result)))

    assert ends_with(lambda: checked(case, signer, evidence)) == kind


BILLS = [b"", b"{}", b"<html>", b'{"bomFormat":"CycloneDX","metadata":{"component":{"name":"vllm","version":"1"}}}']


@pytest.mark.parametrize("data", BILLS)
def test_a_bill_of_another_wheel_is_refused(case: Case, signer: KeySigner, data: bytes) -> None:
    """The SBOM is CycloneDX, and about this version of this project."""
    assert ends_with(lambda: checked(case, signer, with_raw(case, signer, "sbom", data))) == "evidence-invalid"


@pytest.mark.parametrize("kind", ["provenance", "test-result", "summary", "verdicts", "throughput", "sbom"])
def test_evidence_that_is_missing_is_missed(case: Case, signer: KeySigner, kind: str) -> None:
    """A proof that leaves one file out, or a server that does, is refused; so are two files of one kind."""
    proved, files = signed(case, signer)
    less = replace(proved, evidence=tuple(one for one in proved.evidence if one.kind != kind))
    assert ends_with(lambda: checked(case, signer, (less, files))) == "evidence-invalid"

    named = next(one for one in proved.evidence if one.kind == kind)
    assert ends_with(lambda: checked(case, signer, (replace(proved, evidence=(*proved.evidence, named)), files))) == "evidence-invalid"
    assert ends_with(lambda: checked(case, signer, (proved, {**files, named.sha256: files[named.sha256] + b" "}))) == "evidence-invalid"


def test_a_statement_about_another_file_is_refused(case: Case, signer: KeySigner, tmp_path: Path) -> None:
    """Statements of another release, rightly signed, say nothing of this wheel; nor does a proof of another one."""
    made = signed(case, signer)
    for change in ({"sha256": "0" * 64}, {"filename": "vllm-1.0-py3-none-any.whl"}):
        other = replace(case, inspected=replace(case.inspected, wheel=replace(case.wheel, **change)))
        proved = replace(made[0], wheel=other.wheel.sha256)
        assert ends_with(functools.partial(checked, other, signer, (proved, made[1]))) == "evidence-invalid"
    assert ends_with(lambda: checked(case, signer, (replace(made[0], wheel="0" * 64), made[1]))) == "evidence-invalid"


def test_who_signed_counts(case: Case, signer: KeySigner, tmp_path: Path) -> None:
    """Another key is no publisher, and a changed payload is not what was signed."""
    keys.make(tmp_path / "other")
    other = KeySigner.load(tmp_path / "other")
    proved, files = signed(case, other)
    assert ends_with(lambda: checked(case, signer, (proved, files))) == "signer-unknown"

    proved, files = signed(case, signer)
    named = next(one for one in proved.evidence if one.kind == "summary")
    envelope = json.loads(files[named.sha256])
    envelope["payload"] = envelope["payload"][:-8] + "AAAA" + envelope["payload"][-4:]
    data = json.dumps(envelope).encode()
    changed = Evidence("summary", sha256_bytes(data), len(data))
    swapped = replace(proved, evidence=tuple(changed if one.kind == "summary" else one for one in proved.evidence))
    assert ends_with(lambda: checked(case, signer, (swapped, {**files, changed.sha256: data}))) == "signature-invalid"


def test_statements_of_one_kind_do_not_pass_for_another(case: Case, signer: KeySigner) -> None:
    """A provenance in the place of a summary is refused by its type."""
    proved, files = signed(case, signer)
    by_kind = {one.kind: one for one in proved.evidence}
    mixed = tuple(replace(by_kind["provenance"], kind="summary") if one.kind == "summary" else one for one in proved.evidence)

    assert ends_with(lambda: checked(case, signer, (replace(proved, evidence=mixed), files))) == "evidence-invalid"


@pytest.mark.parametrize(
    "change",
    [
        {"pin": "0" * 40},
        {"tree": "0" * 40},
        {"patches": ()},
        {"built": "full"},
        {"resolved": False},
        {"name": "other"},
        {"origin": "elsewhere"},
    ],
    ids=str,
)
def test_a_release_that_names_another_source_is_refused(case: Case, signer: KeySigner, change: dict[str, Any]) -> None:
    """The provenance is of what the release says that the wheel comes from."""
    assert ends_with(lambda: checked(case, signer, signed(case, signer), replace(case.fork, **change))) == "evidence-invalid"


def test_the_official_wheel_may_be_another_machines(case: Case, signer: KeySigner) -> None:
    """A release names one base although each machine has its own; the build record in the wheel says which."""
    assert checked(case, signer, signed(case, signer), replace(case.fork, base="0" * 64)).gates["G0"] == "pass"


def test_what_every_client_would_refuse_is_not_signed(case: Case) -> None:
    """A proof that claims more than its files show fails where the statements are made."""
    better = replace(case, ladder=verdicts.ladder(case.path, worse={"G5": "inconclusive"}))
    assert ends_with(lambda: make.statements(case.wheel, case.fork, case.proved, better.raw)) == "evidence-invalid"
    assert ends_with(lambda: make.statements(case.wheel, case.fork, case.proved, {"sbom": case.inspected.sbom})) == "evidence-invalid"


def test_checking_needs_nothing_heavy() -> None:
    """An installer on a Spark has only what wheels need: no NumPy, no library of CycloneDX or in-toto."""
    program = (
        "import sys; import sparkwright.release.evidence.check, sparkwright.cli.release; "
        "print([name for name in ('numpy', 'scipy', 'cyclonedx', 'in_toto_attestation', 'jinja2', 'elftools') "
        "if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_identity_signs_as_a_key_does(case: Case, signer: KeySigner, tmp_path: Path) -> None:
    """Sigstore bundles hold the same statements, and the index's provenance object with them; another one's object is refused."""
    with World() as sigstore:
        who, trust = sigstore.signer(tmp_path), sigstore.trust(tmp_path)
        payloads = make.statements(case.wheel, case.fork, case.proved, case.raw, record=case.inspected.record)
        files, others = (make.signed(payloads, case.raw, case.wheel, who) for _ in range(2))

    def found(files: Mapping[Evidence, bytes]) -> Checked:
        by_hash = {one.sha256: data for one, data in files.items()}
        proved = replace(case.proved, evidence=tuple(files))
        return check.checked(case.wheel, case.fork, proved, lambda one: by_hash[one.sha256], trust)

    assert set(found(files).signers.values()) == {who.by}
    assert "pep740" in {one.kind for one in files}
    swapped = {one: data for one, data in files.items() if one.kind != "pep740"}
    swapped |= {one: data for one, data in others.items() if one.kind == "pep740"}
    assert ends_with(lambda: found(swapped)) == "evidence-invalid"
    proved, by_hash = signed(case, signer)
    assert ends_with(lambda: check.checked(case.wheel, case.fork, proved, lambda one: by_hash[one.sha256], trust)) == "signer-unknown"


def test_a_file_that_clients_would_not_read_is_not_published(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the same on both sides, and so is found before anything is signed."""
    monkeypatch.setattr(agreement, "LARGEST", 1000)

    assert ends_with(lambda: make.statements(case.wheel, case.fork, case.proved, case.raw)) == "evidence-invalid"


# The verb.


def verb(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``evidence`` as people do, outside of any checkout."""
    command = [sys.executable, "-m", "sparkwright", "release", "verify", "--json", *map(str, words)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def refused(*words: str | Path) -> str:
    """Run the verb in this process, which it ends with a failure, and return that one's reference."""
    with pytest.raises(SparkwrightError) as caught:
        main.run(["release", "verify", *map(str, words)])
    return caught.value.reference


def broken(path: Path, folder: Path) -> Path:
    """Return a copy of a wheel with one bit changed."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (folder / path.name).write_bytes(data)
    return folder / path.name


@pytest.mark.parametrize("member", ["sboms/sparkwright.cdx.json", "sparkwright.json"])
def test_a_wheel_that_says_something_else_inside_is_refused(case: Case, signer: KeySigner, tmp_path: Path, member: str) -> None:
    """Another SBOM than the published one, or a build record with another patch, even when all statements are about those bytes."""
    info = WheelName.of(case.path.name).info
    record = {**json.loads(zipfile.ZipFile(case.path).read(f"{info}/sparkwright.json")), "base": "0" * 64}
    changed = {"sparkwright.json": json.dumps(record).encode(), "sboms/sparkwright.cdx.json": case.inspected.sbom + b"\n"}[member]
    path = archive.rewrite(case.path, tmp_path, version=case.wheel.version, replace={f"{info}/{member}": changed})
    wheel = replace(case.wheel, sha256=sha256_file(path), size=path.stat().st_size)
    other = replace(case, path=path, inspected=replace(case.inspected, wheel=wheel))
    proved = decision.decide(other.inspected, None, None, verdicts.policy())
    other, raw = replace(other, proved=proved), {"sbom": case.inspected.sbom}
    made = make.statements(wheel, case.fork, proved, raw, record=case.inspected.record)
    found = checked(other, signer, signed(other, signer, made, raw))

    assert ends_with(lambda: inside.check(path, found)) == "wheel-mismatch"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[world.Host]:
    """Serve indexes on loopback."""
    with world.hosted(tmp_path_factory.mktemp("host")) as made:
        yield made


def test_an_index_vouches_for_all_wheels_of_its_releases(host: world.Host) -> None:
    """By URL and as a folder, older releases included: each wheel with its release, channel and what was shown of it."""
    index = host.index()
    for at in (index.url, index.root):
        done = verb(host.made["1"][3], *host.made["2"], "--index", at, "--key", index.public)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["wheels"]
        assert [one["release"] for one in found] == ["2026.11.1", *["2026.11.2"] * 4]
        assert {one["channel"] for one in found} == {"verified"}
        assert [len(one["gates"]) for one in found] == [9, 1, 1, 1, 9]


def test_an_index_says_what_a_candidate_lacks(host: world.Host, tmp_path: Path) -> None:
    """What is claimed of a candidate holds, and it is not taken for more."""
    index, path = host.bare(), wheels.cutlass(tmp_path, label=f"{wheels.LABEL}.9")
    index.add([path], [], channel="candidate")
    (found,) = json.loads(verb(path, "--index", index.url, "--key", index.public).stdout)["wheels"]

    assert (found["channel"], found["gates"]) == ("candidate", {})
    assert "G0" in [one["gate"] for one in found["missing"]]


def test_an_index_that_holds_something_else_is_told_apart(host: world.Host, tmp_path: Path) -> None:
    """A wheel that it never had, evidence that is gone or a page, and a proof of another release: each is refused."""
    index = host.index()
    path = host.made["2"][0]
    other = wheels.cutlass(tmp_path, label="spark.2026.12")
    assert refused(other, "--index", index.url, "--key", index.public) == "evidence-invalid"
    proof = next(one for one in index.proof("2026.11.2").wheels if one.wheel == sha256_file(path))
    index.path(places.evidence(index.named(proof.evidence, "provenance").sha256)).unlink()
    assert refused(path, "--index", index.url, "--key", index.public) == "evidence-invalid"
    index.path(places.evidence(index.named(proof.evidence, "summary").sha256)).write_text("<html>Sign in</html>")
    assert refused(path, "--index", index.root, "--key", index.public) == "evidence-invalid"


def test_what_does_not_hold_ends_with_its_reference(host: world.Host, tmp_path: Path) -> None:
    """A changed wheel, another key, and an unreadable name: each by its own reference; the other wheel is shown."""
    index, path = host.index(), host.made["2"][1]
    keys.make(tmp_path / "other")
    changed = broken(path, tmp_path)
    assert refused(changed, "--index", index.root, "--key", index.public) == "evidence-invalid"
    assert refused(path, "--index", index.root, "--key", tmp_path / "other.pub") == "signer-unknown"
    assert refused(tmp_path / "no.whl", "--index", index.root, "--key", index.public) == "wheel-invalid"
    done = verb(path, changed, "--index", index.root, "--key", index.public)
    document = json.loads(done.stdout)
    assert (done.returncode, len(document["wheels"]), list(document["failed"].values())) == (1, 1, ["evidence-invalid"])
