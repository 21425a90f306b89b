"""The provenance of a wheel, read by in-toto's own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from tests.support import wheels

from sparkwright.release import provenance, wheel_facts
from sparkwright.release.wheel_facts import WheelFacts


def parsed(facts: WheelFacts) -> tuple[Any, Any]:
    """Return statement and predicate as in-toto's library reads them."""
    data = provenance.statement(facts, "ab" * 32)
    assert provenance.statement(facts, "ab" * 32) == data
    statement: Any = Statement.copy_from_pb(json_format.Parse(data, statement_pb2.Statement()))
    statement.validate()
    predicate = json_format.ParseDict(
        json_format.MessageToDict(statement.pb.predicate), provenance_pb2.Provenance()
    )
    return statement, predicate


def test_every_kind_of_wheel_has_a_statement(tmp_path: Path) -> None:
    for facts in wheel_facts.read_all(wheels.release(tmp_path, judged=False)):
        statement, predicate = parsed(facts)
        assert dict(statement.pb.subject[0].digest) == {"sha256": facts.sha256}
        assert predicate.build_definition.resolved_dependencies[0].name == facts.source.name


def test_statement_is_one_of_in_toto_and_slsa(tmp_path: Path) -> None:
    [facts] = wheel_facts.read_all([wheels.vllm(tmp_path)])
    statement, predicate = parsed(facts)
    materials = predicate.build_definition.resolved_dependencies
    assert [material.name for material in materials] == [
        "vllm",
        "clamp-the-samples.patch",
        "35568.patch",
        "the official wheel",
        "lock.yaml",
        "toolchain",
    ]
    assert dict(materials[0].digest) == {
        "gitCommit": facts.source.pin,
        "gitTree": facts.source.tree,
    }
    assert predicate.run_details.byproducts[0].name == "sbom"
    assert dict(statement.pb.subject[0].digest) == {"sha256": facts.sha256}
