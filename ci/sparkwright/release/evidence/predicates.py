"""
The three things that are said of a wheel, in the words of their standards.

``provenance`` is SLSA's (slsa.dev/spec/v1.0/provenance), ``test-result`` in-toto's (attestation repository, predicates/test-result.md),
``summary`` SLSA's verification summary (slsa.dev/spec/v1.0/verification_summary). What they have no field for begins with
``sparkwright_``, as SLSA asks of extensions.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from sparkwright.core.states import State
from sparkwright.release.errors import TrustError
from sparkwright.release.manifest.records import Missing, Speed

T = TypeVar("T", bound=msgspec.Struct)

Kind = Literal["provenance", "test-result", "summary"]
TYPES: dict[Kind, str] = {
    "provenance": "https://slsa.dev/provenance/v1",
    "test-result": "https://in-toto.io/attestation/test-result/v0.1",
    "summary": "https://slsa.dev/verification_summary/v1",
}

BUILD_TYPE = "urn:sparkwright:build:v1"
VERIFIER = "urn:sparkwright"
SELF_HOSTED = "urn:sparkwright:builder:self-hosted"
#: What a build of ours reaches wherever it runs: provenance exists. A platform that nobody else runs vouches for nothing beyond (level 2).
LEVEL = "SLSA_BUILD_LEVEL_1"


class Resource(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """
    A thing by its hash (in-toto's ResourceDescriptor).

    Attributes:
        digest: Algorithm → hex; ``gitCommit`` and ``gitTree`` are ids of git.
    """

    name: str = ""
    uri: str = ""
    digest: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Definition(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What was built, how, and of what."""

    build_type: str
    external_parameters: dict[str, str]
    internal_parameters: dict[str, Any] = {}
    resolved_dependencies: tuple[Resource, ...] = ()


class Builder(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Who built it; *id* names the platform that has to be trusted for it."""

    id: str
    version: dict[str, str] = {}


class Details(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """
    The run. Its metadata hold no time, as nothing vouches for one.

    Attributes:
        byproducts: What came of it beside the wheel: its bill of materials.
    """

    builder: Builder
    metadata: dict[str, str] = {}
    byproducts: tuple[Resource, ...] = ()


class Provenance(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """
    How a wheel came about.

    Attributes:
        level: The level of SLSA's build track that this is honest to claim, and *says* why it is no higher.
    """

    build_definition: Definition
    run_details: Details
    level: str = msgspec.field(name="sparkwright_level")
    says: str = msgspec.field(default="", name="sparkwright_says")


class TestResult(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """
    What the gates found.

    Attributes:
        configuration: The files of verdicts and of throughput, and the policies that judged.
        passed_tests, warned_tests, failed_tests: Required checks as ``G0/archive``; warned are those that did not run or decide nothing.
        informing: The others that did not pass. *gates*: the state of each gate.
    """

    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: tuple[Resource, ...]
    passed_tests: tuple[str, ...] = ()
    warned_tests: tuple[str, ...] = ()
    failed_tests: tuple[str, ...] = ()
    informing: tuple[str, ...] = msgspec.field(default=(), name="sparkwright_informing")
    gates: dict[str, State] = msgspec.field(default_factory=dict, name="sparkwright_gates")


class Verifier(msgspec.Struct, frozen=True):
    """What decided."""

    id: str


class Policy(msgspec.Struct, frozen=True):
    """The policy that it decided by."""

    uri: str
    digest: dict[str, str]


class Input(msgspec.Struct, frozen=True):
    """What it decided from: a statement by the sha256 of its payload (whoever signs it), a raw file by its own."""

    uri: str
    digest: dict[str, str]


class Summary(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """
    What was decided of a wheel.

    Attributes:
        verification_result: ``PASSED`` where nothing is missing for ``verified``.
        verified_levels: ``FAILED`` alone where something is.
        required: Gates that the policy asks of it. *gates*: the state of each that was shown.
        missing, speeds, baseline, margin, host: As in `Proved`. *program*: the version of sparkwright that decided.
    """

    verifier: Verifier
    resource_uri: str
    policy: Policy
    input_attestations: tuple[Input, ...]
    verification_result: Literal["PASSED", "FAILED"]
    verified_levels: tuple[str, ...]
    slsa_version: str = msgspec.field(default="", name="slsaVersion")
    required: tuple[str, ...] = msgspec.field(default=(), name="sparkwright_required")
    gates: dict[str, State] = msgspec.field(default_factory=dict, name="sparkwright_gates")
    missing: tuple[Missing, ...] = msgspec.field(default=(), name="sparkwright_missing")
    speeds: tuple[Speed, ...] = msgspec.field(default=(), name="sparkwright_speeds")
    baseline: str = msgspec.field(default="", name="sparkwright_baseline")
    margin: float | None = msgspec.field(default=None, name="sparkwright_margin")
    host: dict[str, str] = msgspec.field(default_factory=dict, name="sparkwright_host")
    program: str = msgspec.field(default="", name="sparkwright_program")


def read(predicate: dict[str, Any], kind: type[T], what: str) -> T:
    """Return *predicate* as a record; raise `evidence-invalid` where it is none of that kind."""
    try:
        return msgspec.convert(predicate, kind)
    except msgspec.ValidationError as error:
        raise TrustError("evidence-invalid", f"{what} does not have the fields of its kind.", details=[str(error)]) from error
