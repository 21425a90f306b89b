"""What an identity signs is verified offline by Sigstore's own library, against a Sigstore instance of the test's own."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pypi_attestations
import pytest
from msgspec.structs import replace
from sigstore.models import ClientTrustConfig
from sigstore.verify import Verifier, policy
from tests.refusals import refusal
from tests.support.badserver import Listener, silent
from tests.support.sigstoreworld import GITHUB, WORKFLOW, World

from sparkwright.release.manifest import change, signed
from sparkwright.release.signing import Signer, Statement, Subject, bundle, identity, pep740
from sparkwright.release.signing.envelope import opened
from sparkwright.release.signing.identity import TOKEN, IdentitySigner
from sparkwright.release.signing.keys import KeySigner, make
from sparkwright.release.signing.trust import Identity, Trust

WHEEL = "toy-1.0-py3-none-any.whl"
PROVENANCE = Statement((Subject(WHEEL, "ab" * 32),), pep740.PREDICATE, {"buildDefinition": {"buildType": "urn:toy:build"}})


@pytest.fixture(name="world", scope="module")
def _world() -> Iterator[World]:
    with World() as world:
        yield world


@pytest.fixture(name="made", scope="module")
def _made(world: World, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A bundle that the real library made in the world."""
    return world.signer(tmp_path_factory.mktemp("signer")).sign(PROVENANCE)


def altered(data: bytes, change_it: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(data)
    change_it(document)
    return json.dumps(document).encode()


def refused(data: bytes, trust: Trust, reference: str) -> str:
    with refusal(reference) as raised:
        opened(data, trust, predicate_type=pep740.PREDICATE, what="it")
    return " ".join([raised.value.what, *raised.value.details])


def test_a_bundle_opens_offline_for_who_trusts_the_identity(world: World, made: bytes, tmp_path: Path) -> None:
    """The statement comes back with the identity that signed it, and nothing is asked of anybody."""
    before = len(world.entries)
    found = opened(made, world.trust(tmp_path), predicate_type=pep740.PREDICATE, what="it")
    assert (found.statement, found.by, found.identity) == (PROVENANCE, WORKFLOW, True)
    assert len(world.entries) == before


def test_a_bundle_opens_after_the_world_that_made_it_has_gone(tmp_path: Path) -> None:
    """Verifying needs the trusted root and the bundle alone."""
    with World() as world:
        data, trust = world.signer(tmp_path).sign(PROVENANCE), world.trust(tmp_path)
    assert opened(data, trust, predicate_type=pep740.PREDICATE, what="it").by == WORKFLOW


def test_an_identity_signs_a_manifest_as_a_key_does(world: World, tmp_path: Path) -> None:
    """One call signs and one call reads, whoever signs; many signatures are made with one certificate."""
    signer: Signer = world.signer(tmp_path)
    assert (signer.by, signer.has_identity) == (WORKFLOW, True)
    manifest = change.refresh(change.first("http://x/", at="2026-11-01T00:00:00Z"), at="2026-11-01T00:00:00Z", by=signer.by)
    data = [signed.seal(manifest, signer) for _ in range(3)]
    assert all(signed.read(one, world.trust(tmp_path), what="it") == manifest for one in data)
    certificates = {json.loads(one)["verificationMaterial"]["certificate"]["rawBytes"] for one in data}
    assert len(certificates) == 1


def test_a_certificate_is_renewed_before_it_runs_out(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication that takes longer than a certificate holds goes on with another one."""
    monkeypatch.setattr(identity, "CERTIFICATE_SECONDS", -1.0)
    signer = world.signer(tmp_path)
    made = [json.loads(signer.sign(PROVENANCE)) for _ in range(2)]
    assert len({one["verificationMaterial"]["certificate"]["rawBytes"] for one in made}) == 2


def test_another_identity_is_unknown(world: World, made: bytes, tmp_path: Path) -> None:
    """The same repository's other workflow, and the same name from another issuer, are not who is trusted; the message says who it was."""
    root = world.config(tmp_path)
    for one in (Identity(WORKFLOW.replace("publish", "test"), GITHUB), Identity(WORKFLOW, "https://issuer.example")):
        assert WORKFLOW in refused(made, Trust(identities=(one,), root=root), "signer-unknown")
    assert "no identity is trusted" in refused(made, Trust(root=root), "signer-unknown")


def test_a_changed_payload_is_not_what_was_signed(world: World, made: bytes, tmp_path: Path) -> None:
    """Another statement under the same signature fails."""
    other = base64.b64encode(PROVENANCE.encode().replace(b"ab" * 32, b"cd" * 32)).decode()
    data = altered(made, lambda one: one["dsseEnvelope"].update(payload=other))
    assert "invalid signature" in refused(data, world.trust(tmp_path), "signature-invalid")


def test_another_log_does_not_count(world: World, made: bytes, tmp_path: Path) -> None:
    """A root that knows another log of signatures, or another log of certificates, does not believe this one's word."""
    with World() as other:
        for field, says in (("tlogs", "invalid log entry"), ("ctlogs", "SCT")):
            config = json.loads(Path(world.config(tmp_path)).read_text())
            config["trustedRoot"][field] = other.root()[field]
            path = tmp_path / f"{field}.json"
            path.write_text(json.dumps(config))
            trust = Trust(identities=(Identity(WORKFLOW, GITHUB),), root=str(path))
            assert says in refused(made, trust, "signature-invalid")


def test_another_authority_is_unknown(made: bytes, tmp_path: Path) -> None:
    """A certificate in the same name from an authority of somebody else is worth nothing."""
    with World() as other:
        refused(made, other.trust(tmp_path), "signer-unknown")


@pytest.mark.parametrize("late", [3600, -3600])
def test_a_certificate_that_did_not_hold_at_the_time_of_signing_is_refused(late: int, tmp_path: Path) -> None:
    """The log saw the signature an hour after the certificate ran out, or before there was one."""
    with World() as world:
        world.late = late
        data = world.signer(tmp_path).sign(PROVENANCE)
        assert "time of signing" in refused(data, world.trust(tmp_path), "signer-unknown")


def test_the_log_entry_of_other_bytes_does_not_vouch(world: World, made: bytes, tmp_path: Path) -> None:
    """Certificate and log entry of one bundle with the statement of another: each is genuine, and together they are not."""
    second = world.signer(tmp_path).sign(Statement((Subject("other", "ef" * 32),), pep740.PREDICATE, {}))
    entries = json.loads(second)["verificationMaterial"]["tlogEntries"]
    mixed = altered(made, lambda one: one["verificationMaterial"].update(tlogEntries=entries))
    refused(mixed, world.trust(tmp_path), "signature-invalid")
    swapped = altered(made, lambda one: one.update(dsseEnvelope=json.loads(second)["dsseEnvelope"]))
    refused(swapped, world.trust(tmp_path), "signature-invalid")


@pytest.mark.parametrize("path", ["hashes", "rootHash", "checkpoint", "signedEntryTimestamp", "integratedTime"])
def test_every_part_of_the_logs_word_is_checked(world: World, made: bytes, tmp_path: Path, path: str) -> None:
    """Inclusion proof, root, checkpoint, promise and time: one of them wrong, and the bundle is refused."""

    def spoil(document: dict[str, Any]) -> None:
        entry = document["verificationMaterial"]["tlogEntries"][0]
        wrong = base64.b64encode(b"\1" * 32).decode()
        if path == "hashes":
            entry["inclusionProof"]["hashes"][0] = wrong
        elif path == "rootHash":
            entry["inclusionProof"]["rootHash"] = wrong
        elif path == "checkpoint":
            checkpoint = entry["inclusionProof"]["checkpoint"]
            origin, size, rest = checkpoint["envelope"].split("\n", 2)
            checkpoint["envelope"] = f"{origin}\n{int(size) + 1}\n{rest}"
        elif path == "signedEntryTimestamp":
            entry["inclusionPromise"]["signedEntryTimestamp"] = wrong
        else:
            entry["integratedTime"] = str(int(entry["integratedTime"]) - 1)

    refused(altered(made, spoil), world.trust(tmp_path), "signature-invalid")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: one.pop("verificationMaterial"),
        lambda one: one["verificationMaterial"].update(tlogEntries=[]),
        lambda one: one["verificationMaterial"]["certificate"].update(rawBytes="AAAA"),
        lambda one: one.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=9"),
        lambda one: one.update(extra=1),
    ],
)
def test_what_is_no_bundle_is_refused(world: World, made: bytes, tmp_path: Path, spoil: Callable[[dict[str, Any]], object]) -> None:
    """Bundles without certificate or log entry, of unknown versions or with unknown fields are not opened; as manifests neither."""
    data = altered(made, spoil)
    refused(data, world.trust(tmp_path), "evidence-invalid")
    with refusal("manifest-invalid"):
        signed.read(data, world.trust(tmp_path), what="it")


def test_a_bundle_and_an_envelope_do_not_pass_for_each_other(world: World, made: bytes, tmp_path: Path) -> None:
    """The envelope taken out of a bundle is a stranger's, and a key's envelope that calls itself a bundle is none."""
    make(tmp_path / "key")
    signer = KeySigner.load(tmp_path / "key")
    trust = replace(world.trust(tmp_path), keys=(signer.public,))
    inner = json.dumps(json.loads(made)["dsseEnvelope"]).encode()
    refused(inner, trust, "signer-unknown")
    kind = json.loads(made)["mediaType"]
    refused(altered(signer.sign(PROVENANCE), lambda one: one.update(mediaType=kind)), trust, "evidence-invalid")
    assert opened(signer.sign(PROVENANCE), trust, predicate_type=pep740.PREDICATE, what="it").by == signer.by


def test_without_a_trusted_root_nothing_passes(world: World, made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root that is missing, damaged or too large, and a library that cannot be loaded, are failures of their own."""
    identities = (Identity(WORKFLOW, GITHUB),)
    (tmp_path / "page").write_text("<html>")
    (tmp_path / "empty").write_text("{}")
    (tmp_path / "large").write_bytes(b" " * (bundle.LARGEST + 1))
    for name in ("nowhere", "page", "empty", "large"):
        refused(made, Trust(identities=identities, root=str(tmp_path / name)), "trust-missing")
    shutil.copy(world.config(tmp_path), tmp_path / "another.json")
    monkeypatch.setitem(sys.modules, "sigstore.verify", None)
    refused(made, Trust(identities=identities, root=str(tmp_path / "another.json")), "trust-missing")


def test_the_public_instance_is_known_offline(made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a root of one's own the library's is used, which does not know our authority; no network is needed to find that out."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    bundle._verifier.cache_clear()
    refused(made, Trust(identities=(Identity(WORKFLOW, GITHUB),)), "signer-unknown")


def test_signing_without_a_usable_identity_says_so(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is none, a service that is not there, and one that refuses are told, and the token is not repeated."""
    config = world.config(tmp_path)
    monkeypatch.setenv(TOKEN, "sekret.sekret.sekret")
    with refusal("identity-unusable") as error:
        IdentitySigner(config)
    assert "sekret" not in " ".join([error.value.what, *error.value.details])
    monkeypatch.setenv(TOKEN, world.token())
    assert IdentitySigner(config).by == WORKFLOW
    with refusal("identity-unusable"):
        IdentitySigner(str(tmp_path / "nowhere"))
    with World() as other:
        gone = other.signer(tmp_path)
    with refusal("identity-unusable", match="failed"):
        gone.sign(PROVENANCE)


def test_services_that_never_answer_end_the_signing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority that accepts the connection and says nothing is given up after the limit."""
    listener = Listener(silent)
    try:
        config = json.loads(Path(world.config(tmp_path)).read_text())
        config["signingConfig"]["caUrls"][0]["url"] = listener.url
        (tmp_path / "silent.json").write_text(json.dumps(config))
        signer = IdentitySigner(str(tmp_path / "silent.json"), world.token())
        monkeypatch.setattr(identity, "SECONDS", 0.5)
        with refusal("identity-unusable", match="failed"):
            signer.sign(PROVENANCE)
        assert listener.asked == ["/api/v2/signingCert"]
    finally:
        listener.close()


def test_pep740_holds_what_its_own_verifiers_read(world: World, made: bytes, tmp_path: Path) -> None:
    """The reference library reads the object, finds the publisher, and Sigstore verifies what it turns back into a bundle."""
    data = pep740.pep740(made, WHEEL)
    provenance = pypi_attestations.Provenance.model_validate_json(data)
    (group,) = provenance.attestation_bundles
    assert group.publisher == pypi_attestations.GitHubPublisher(repository="toy/wheels", workflow="publish.yml")
    (attestation,) = group.attestations
    assert attestation.statement == json.loads(PROVENANCE.encode())
    verifier = Verifier(trusted_root=ClientTrustConfig.from_json(Path(world.config(tmp_path)).read_text()).trusted_root)
    verifier.verify_dsse(attestation.to_bundle(), policy.Identity(identity=WORKFLOW, issuer=GITHUB))
    verifier.verify_dsse(attestation.to_bundle(), group.publisher._as_policy())
    assert pep740.pep740(made, WHEEL) == data


def test_pep740_is_made_of_a_provenance_of_that_wheel_alone(world: World, made: bytes, tmp_path: Path) -> None:
    """Another file name, several files, another predicate, or no bundle at all are refused."""
    signer = world.signer(tmp_path)
    several = Statement((*PROVENANCE.subjects, Subject("b.whl", "cd" * 32)), pep740.PREDICATE, {})
    other = Statement(PROVENANCE.subjects, "urn:toy:v1", {})
    for data, name in ((made, "b.whl"), (signer.sign(several), WHEEL), (signer.sign(other), WHEEL), (b"{}", WHEEL)):
        with refusal("evidence-invalid"):
            pep740.pep740(data, name)


@pytest.mark.parametrize(
    ("name", "issuer", "claims", "publisher"),
    [
        ("me@toy.example", "https://issuer.example", {}, None),
        ("bot@toy.example", "https://accounts.google.com", {}, pypi_attestations.GooglePublisher(email="bot@toy.example")),
        (
            "https://gitlab.com/toy/wheels//.gitlab-ci.yml@refs/heads/main",
            "https://gitlab.com",
            {12: "https://gitlab.com/toy/wheels", 18: "https://gitlab.com/toy/wheels//.gitlab-ci.yml@refs/heads/main"},
            pypi_attestations.GitLabPublisher(repository="toy/wheels", workflow_filepath=".gitlab-ci.yml"),
        ),
    ],
    ids=["person", "google", "gitlab"],
)
def test_pep740_names_the_publisher_only_where_there_is_one(
    tmp_path: Path, name: str, issuer: str, claims: dict[int, str], publisher: object
) -> None:
    """Each kind of publisher is named as verifiers know it; for a person's signature there is no object."""
    with World() as world:
        world.identity, world.issuer, world.claims = name, issuer, claims
        trust = Trust(identities=(Identity(name, issuer),), root=world.config(tmp_path))
        signer = IdentitySigner(trust.root, world.token() if issuer != "https://accounts.google.com" else google(world))
        data = signer.sign(PROVENANCE)
    assert opened(data, trust, predicate_type=pep740.PREDICATE, what="it").by == name == signer.by
    made = pep740.pep740(data, WHEEL)
    if publisher is None:
        assert made == b""
    else:
        assert pypi_attestations.Provenance.model_validate_json(made).attestation_bundles[0].publisher == publisher


def google(world: World) -> str:
    """Return a token as Google gives it, with the address in a claim of its own."""
    head, claims, tail = world.token().split(".")
    read = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4))) | {"email": world.identity, "sub": "1"}
    return ".".join((head, base64.urlsafe_b64encode(json.dumps(read).encode()).decode().rstrip("="), tail))
