"""Statements are signed with keys of files, and opened only where a trusted key signed exactly those bytes."""

from __future__ import annotations

import base64
import importlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope as ReferenceEnvelope
from securesystemslib.signer import CryptoSigner, SSlibKey
from tests.refusals import refusal

from sparkwright.cli import main
from sparkwright.release.errors import TrustError
from sparkwright.release.signing import Signer, Statement, Subject, dsse, keys, trust, urls
from sparkwright.release.signing.envelope import opened
from sparkwright.release.signing.keys import KeySigner, PublicKey
from sparkwright.release.signing.trust import Identity, Trust

PREDICATE = "urn:toy:v1"
STATEMENT = Statement((Subject("toy-1.0-py3-none-any.whl", "ab" * 32),), PREDICATE, {"says": "yes", "n": 1})

NAMES = st.text(max_size=40)
HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
STATEMENTS = st.builds(
    Statement,
    st.lists(st.builds(Subject, NAMES, HASHES), min_size=1, max_size=4).map(tuple),
    st.text(max_size=40),
    st.dictionaries(st.text(max_size=8), VALUES, max_size=4),
)


@pytest.fixture(name="signer")
def _signer(tmp_path: Path) -> KeySigner:
    keys.make(tmp_path / "key")
    return KeySigner.load(tmp_path / "key")


def new_signer() -> KeySigner:
    return KeySigner(Ed25519PrivateKey.generate())


def trusting(*signers: KeySigner) -> Trust:
    return Trust(tuple(signer.public for signer in signers))


def altered(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the JSON *data* after *change*."""
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()


@given(STATEMENTS)
def test_a_statement_survives_writing_and_reading(statement: Statement) -> None:
    """Whatever a statement says, it says after encoding and decoding."""
    assert Statement.of(statement.encode(), "it") == statement


def test_a_statement_is_what_the_in_toto_library_reads() -> None:
    """The reference library reads our encoding, and finds the fields where the specification has them."""
    json_format = importlib.import_module("google.protobuf.json_format")  # three modules without types
    statement_pb2 = importlib.import_module("in_toto_attestation.v1.statement_pb2")
    reference = importlib.import_module("in_toto_attestation.v1.statement").Statement

    read = reference.copy_from_pb(json_format.Parse(STATEMENT.encode(), statement_pb2.Statement()))
    read.validate()
    assert (read.pb.predicate_type, read.pb.subject[0].name, read.pb.subject[0].digest["sha256"]) == (
        PREDICATE,
        "toy-1.0-py3-none-any.whl",
        "ab" * 32,
    )


@pytest.mark.parametrize(
    "data",
    [
        b"<html>log in</html>",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        STATEMENT.encode().replace(b"Statement/v1", b"Statement/v0.1"),
        STATEMENT.encode().replace(b"sha256", b"sha512"),
        STATEMENT.encode().replace(b"ab" * 32, b"AB" * 32),
        altered(STATEMENT.encode(), lambda one: one.update(subject=[])),
        altered(STATEMENT.encode(), lambda one: one.pop("predicate")),
        STATEMENT.encode()[:-7],
    ],
    ids=["page", "empty", "list", "binary", "deep", "older", "no-sha256", "upper-case", "no-subject", "no-predicate", "cut-off"],
)
def test_what_is_no_statement_is_refused(data: bytes) -> None:
    """Pages, other versions, other hashes and cut-off files are no statements."""
    with refusal("evidence-invalid"):
        Statement.of(data, "it")


def test_a_signed_statement_opens_for_who_trusts_the_key(signer: KeySigner) -> None:
    """The statement comes back, with the name of who signed it; the same statement gives the same bytes."""
    protocol: Signer = signer
    found = opened(protocol.sign(STATEMENT), trusting(new_signer(), signer), predicate_type=PREDICATE, what="it")
    assert (found.statement, found.by, found.identity) == (STATEMENT, signer.by, False)
    assert signer.by == f"ed25519:{signer.public.fingerprint[:16]}"
    assert signer.sign(STATEMENT) == signer.sign(STATEMENT)


def test_the_reference_library_verifies_what_we_sign_and_we_what_it_signs(tmp_path: Path) -> None:
    """Our envelopes and those of securesystemslib are the same thing."""
    private = Ed25519PrivateKey.generate()
    ours = KeySigner(private)
    key = SSlibKey(ours.public.fingerprint, "ed25519", "ed25519", {"public": ours.public.raw.hex()})
    theirs = ReferenceEnvelope.from_dict(json.loads(ours.sign(STATEMENT)))
    assert list(theirs.verify([key], 1)) == [ours.public.fingerprint]

    made = ReferenceEnvelope(STATEMENT.encode(), dsse.PAYLOAD_TYPE, {})
    made.sign(CryptoSigner(private))
    data = json.dumps(made.to_dict()).encode()
    assert opened(data, trusting(ours), predicate_type=PREDICATE, what="it").statement == STATEMENT
    assert made.pae() == dsse.pae(dsse.PAYLOAD_TYPE, STATEMENT.encode())


@given(st.integers(min_value=0), st.integers(0, 7))
def test_a_changed_bit_never_passes(where: int, bit: int) -> None:
    """Of a signed file any one bit may be flipped, and it is refused, or means exactly what was signed."""
    signer = new_signer()
    data = bytearray(signer.sign(STATEMENT))
    data[where % len(data)] ^= 1 << bit
    try:
        found = opened(bytes(data), trusting(signer), predicate_type=PREDICATE, what="it")
    except TrustError as error:
        if error.reference not in {"evidence-invalid", "signature-invalid", "signer-unknown"}:
            raise
        return
    assert found.statement == STATEMENT


def test_each_way_of_being_wrong_has_its_own_reference(signer: KeySigner) -> None:
    """A changed payload, another signer, another kind of statement and another kind of file are told apart."""
    data = signer.sign(STATEMENT)
    other = msgspec.structs.replace(STATEMENT, predicate={"says": "no"})
    payload = base64.b64encode(other.encode()).decode()
    with refusal("signature-invalid"):
        opened(altered(data, lambda one: one.update(payload=payload)), trusting(signer), predicate_type=PREDICATE, what="it")
    with refusal("signer-unknown") as unknown:
        opened(data, trusting(new_signer()), predicate_type=PREDICATE, what="it")
    assert signer.by in unknown.value.what
    with refusal("signer-unknown"):
        opened(data, Trust(), predicate_type=PREDICATE, what="it")
    with refusal("evidence-invalid", match="something else"):
        opened(data, trusting(signer), predicate_type="urn:toy:v2", what="it")
    with refusal("evidence-invalid", match="not a signed file"):
        opened(b"<!doctype html>", trusting(signer), predicate_type=PREDICATE, what="it")
    with refusal("evidence-invalid", match="not a signed file"):
        opened(STATEMENT.encode(), trusting(signer), predicate_type=PREDICATE, what="it")


def test_a_signature_over_another_type_of_payload_does_not_count(signer: KeySigner) -> None:
    """The signature binds the type, so relabelling breaks it; a payload that was signed as something else is refused."""
    data = signer.sign(STATEMENT)
    with refusal("signature-invalid"):
        opened(altered(data, lambda one: one.update(payloadType="text/plain")), trusting(signer), predicate_type=PREDICATE, what="it")
    private = Ed25519PrivateKey.generate()
    plain = ReferenceEnvelope(STATEMENT.encode(), "text/plain", {})
    plain.sign(CryptoSigner(private))
    with refusal("evidence-invalid", match="text/plain"):
        opened(json.dumps(plain.to_dict()).encode(), trusting(KeySigner(private)), predicate_type=PREDICATE, what="it")


def test_the_name_of_a_key_decides_nothing(signer: KeySigner) -> None:
    """A stranger who signs under a trusted key's name is refused, and a right signature under a wrong name or none is taken."""
    data, stranger = signer.sign(STATEMENT), new_signer().sign(STATEMENT)
    named = altered(stranger, lambda one: one["signatures"][0].update(keyid=signer.public.fingerprint))
    with refusal("signature-invalid"):
        opened(named, trusting(signer), predicate_type=PREDICATE, what="it")
    for name in ("", "somebody else"):
        renamed = altered(data, lambda one, name=name: one["signatures"][0].update(keyid=name))  # type: ignore[misc]
        assert opened(renamed, trusting(signer), predicate_type=PREDICATE, what="it").by == signer.by


def test_one_of_several_signatures_is_enough(signer: KeySigner) -> None:
    """A publisher who changes keys signs with both for a while, and clients of either go on."""
    both = json.loads(new_signer().sign(STATEMENT))
    both["signatures"] += json.loads(signer.sign(STATEMENT))["signatures"]
    assert opened(json.dumps(both).encode(), trusting(signer), predicate_type=PREDICATE, what="it").by == signer.by


def test_what_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch, signer: KeySigner) -> None:
    """More bytes than the bound, or more signatures than anybody makes, are refused before anything is verified."""
    data = signer.sign(STATEMENT)
    many = altered(data, lambda one: one.update(signatures=one["signatures"] * 17))
    with refusal("evidence-invalid"):
        opened(many, trusting(signer), predicate_type=PREDICATE, what="it")
    monkeypatch.setattr(dsse, "LARGEST", len(data) - 1)
    with refusal("evidence-invalid", match="bytes"):
        opened(data, trusting(signer), predicate_type=PREDICATE, what="it")


def test_a_key_is_its_owners_alone_and_never_overwritten(tmp_path: Path) -> None:
    """The private half has mode 0600, the public one beside it can be given away, and making it again is refused."""
    path = tmp_path / "key"
    fingerprint = keys.make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PublicKey.load(tmp_path / "key.pub").fingerprint == fingerprint == KeySigner.load(path).public.fingerprint
    before = path.read_bytes(), (tmp_path / "key.pub").read_bytes()
    with refusal("key-invalid", match="never overwritten"):
        keys.make(path)
    path.unlink()
    with refusal("key-invalid", match="never overwritten"):
        keys.make(path)
    assert not path.exists()
    assert (tmp_path / "key.pub").read_bytes() == before[1]
    assert [one.name for one in tmp_path.glob("*key*")] == ["key.pub"]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Whoever can read a private key can sign as its owner."""
    keys.make(tmp_path / "key")
    for mode in (0o640, 0o604, 0o660):
        (tmp_path / "key").chmod(mode)
        with refusal("key-invalid", match="open to others"):
            KeySigner.load(tmp_path / "key")


def test_a_passphrase_is_asked_for_and_has_to_be_right(tmp_path: Path) -> None:
    """With the passphrase the key signs; with none, another, or one too much, it is refused without quoting the file."""
    keys.make(tmp_path / "key", "correct horse")
    keys.make(tmp_path / "plain")
    assert KeySigner.load(tmp_path / "key", "correct horse").sign(STATEMENT)
    assert b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    for name, passphrase, says in (("key", "", "needs its passphrase"), ("key", "wrong", "is wrong"), ("plain", "x", "has no passphrase")):
        with refusal("key-invalid") as error:
            KeySigner.load(tmp_path / name, passphrase)
        assert says in error.value.details[0]


def test_only_ed25519_keys_are_taken(tmp_path: Path) -> None:
    """Other keys, other files and the wrong half of a key are refused, in either place."""
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    for key in (ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)):
        path = tmp_path / "other"
        path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
        path.chmod(0o600)
        with refusal("key-invalid"):
            KeySigner.load(path)
        public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        with refusal("key-invalid"):
            PublicKey.of(public.decode())
    keys.make(tmp_path / "key")
    with refusal("key-invalid", match="private key where the public one belongs"):
        PublicKey.load(tmp_path / "key")
    for text in ("", "key", "AAAA", "-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----", "é"):
        with refusal("key-invalid"):
            PublicKey.of(text)
    for name in ("nowhere", "."):
        with refusal("key-invalid"):
            PublicKey.load(tmp_path / name)
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    with refusal("key-invalid", match="too large"):
        PublicKey.load(tmp_path / "large")


def test_a_public_key_has_two_spellings(signer: KeySigner) -> None:
    """PEM and its one line in the middle are the same key, also with the ends of line of other systems."""
    public = signer.public
    assert PublicKey.of(public.pem) == PublicKey.of(public.text) == PublicKey.of(public.pem.replace("\n", "\r\n")) == public
    reference = serialization.load_pem_public_key(public.pem.encode())
    assert reference.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw) == public.raw


def test_trust_comes_from_the_command_line_then_the_user_then_the_installer(tmp_path: Path) -> None:
    """The first that says anything is all that counts, and says so."""
    named, users, carried = new_signer(), new_signer(), new_signer()
    url, packaged = "https://wheels.example/spark/", tmp_path / "trust.json"
    (tmp_path / "named.pub").write_text(named.public.pem)
    with refusal("trust-missing", match="who may sign"):
        trust.find(url, config=tmp_path, packaged=packaged)
    packaged.write_bytes(trust.document(url, [carried.public], [Identity("me@toy.example", "https://issuer.example")]))
    found = trust.find("HTTPS://Wheels.example:443/spark", config=tmp_path, packaged=packaged)
    assert (found.keys, found.identities) == ((carried.public,), (Identity("me@toy.example", "https://issuer.example"),))
    says = f"indexes:\n  {url}:\n    keys: ['{users.public.text}']\n    root: sigstore.json\n"
    (tmp_path / "trust.yaml").write_text(says)
    found = trust.find(url, config=tmp_path, packaged=packaged)
    assert (found.keys, found.root) == ((users.public,), str(tmp_path / "sigstore.json"))
    assert trust.find(url, [tmp_path / "named.pub"], tmp_path, packaged).keys == (named.public,)
    with refusal("trust-missing"):
        trust.find("https://wheels.example/other/", config=tmp_path, packaged=packaged)


def test_damaged_trust_is_not_taken_for_none(tmp_path: Path) -> None:
    """A typo in a file of trust is an error, not a reason to look further."""
    url, packaged = "https://wheels.example/", tmp_path / "trust.json"
    packaged.write_bytes(b"<html>")
    with refusal("file-invalid"):
        trust.find(url, config=tmp_path, packaged=packaged)
    for text, reference in (
        (f"indexes: {{'{url}': {{key: [x]}}}}", "file-invalid"),
        (f"indexes: {{'{url}': {{keys: [x]}}}}", "key-invalid"),
    ):
        (tmp_path / "trust.yaml").write_text(text)
        with refusal(reference):
            trust.find(url, config=tmp_path, packaged=packaged)


def test_the_installers_trust_is_the_same_bytes_for_the_same_trust() -> None:
    """The order in which keys are given does not change the file, so that a wheel that carries it can be made again."""
    one, two = new_signer().public, new_signer().public
    assert trust.document("http://x", [one, two]) == trust.document("http://X:80/", [two, one])


def test_a_checkout_carries_no_trust() -> None:
    """Only a published installer names keys by itself."""
    assert trust.carried() is None


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("HTTP://Example.ORG:80/a", "http://example.org/a/"),
        ("https://example.org", "https://example.org/"),
        ("https://example.org:8443/a//", "https://example.org:8443/a/"),
        ("file:///srv/index", "file:///srv/index/"),
        ("http://[::1]:8000/", "http://[::1]:8000/"),
    ],
)
def test_an_address_has_one_spelling(spelling: str, meant: str) -> None:
    """What differs only in spelling is the same index, and the spelling of a spelling is itself."""
    assert urls.normalised(spelling) == urls.normalised(meant) == meant


@pytest.mark.parametrize("text", ["", "index", "ftp://x/", "http:///a", "https://u:secret@x/", "https://x/?a", "http://x:99999/", "http://[x/"])
def test_what_is_no_address_of_an_index_is_refused(text: str) -> None:
    """Other schemes, users, queries and nonsense are refused, and a password in it is not repeated."""
    with refusal("usage") as error:
        urls.normalised(text)
    assert "secret" not in error.value.what


def test_the_verb_makes_a_key_and_says_its_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``key FILE`` makes it, ``key FILE --show`` finds the same of either half, and gives back a public half that was lost."""
    monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(keys.PASSPHRASE, "of the test")
    path = tmp_path / "key"
    assert main.main(["release", "key", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert KeySigner.load(path, "of the test").public.fingerprint == made["fingerprint"]
    (tmp_path / "key.pub").unlink()
    for half in (path, tmp_path / "key.pub"):
        assert main.main(["release", "key", str(half), "--show", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["fingerprint"] == made["fingerprint"]
    assert main.main(["release", "key", str(path), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["reference"] == "key-invalid"
    assert "of the test" not in said.out + said.err


def test_opening_needs_no_library_that_an_installer_lacks() -> None:
    """What verifies a key's signature loads neither Sigstore's library nor anything of the part ``full``."""
    code = (
        "import sys\nfrom sparkwright.release.manifest import change, seen, signed\nfrom sparkwright.release.signing import envelope\n"
        "print(sorted({'sigstore', 'git', 'numpy', 'pypi_simple', 'jinja2', 'in_toto_attestation', 'requests'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert said.stdout.strip() == "[]"
