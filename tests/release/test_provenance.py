"""The provenance of a wheel, read by in-toto's own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from tests.support import wheels

from sparkwright.release import release_draft, wheel_facts


def test_every_kind_of_wheel_has_a_statement_of_in_toto_and_slsa(tmp_path: Path) -> None:
    for facts in wheel_facts.read_all(wheels.release(tmp_path, judged=False)):
        data = release_draft.provenance(facts, "ab" * 32)
        assert release_draft.provenance(facts, "ab" * 32) == data
        statement: Any = Statement.copy_from_pb(json_format.Parse(data, statement_pb2.Statement()))
        statement.validate()
        assert dict(statement.pb.subject[0].digest) == {"sha256": facts.sha256}
        document = json_format.MessageToDict(statement.pb.predicate)
        predicate = json_format.ParseDict(document, provenance_pb2.Provenance())
        materials = predicate.build_definition.resolved_dependencies
        assert materials[0].name == facts.source.name
    # The last one is a graft with patches.
    assert [material.name for material in materials[1:]] == [
        "clamp-the-samples.patch",
        "35568.patch",
        "the official wheel",
        "lock.yaml",
        "toolchain",
    ]
    pins = {"gitCommit": facts.source.pin, "gitTree": facts.source.tree}
    assert dict(materials[0].digest) == pins
    assert predicate.run_details.byproducts[0].name == "sbom"
