"""
A Sigstore of its own on loopback: an authority that certifies identities, the log of its certificates, and the log of signatures.

The real library signs with it and verifies against its trusted root. Its keys are made for each world, so two worlds distrust each other.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from tests.support import loopback

GITHUB = "https://token.actions.githubusercontent.com"
REPOSITORY = "https://github.com/toy/wheels"
REF = "refs/tags/v1"
WORKFLOW = f"{REPOSITORY}/.github/workflows/publish.yml@{REF}"

_SCTS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_CLAIM = "1.3.6.1.4.1.57264.1."
_SINCE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _signed(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def _utf8(text: str) -> bytes:
    """Return *text* as DER's UTF8String, as Fulcio writes its claims."""
    data = text.encode()
    return (b"\x0c" + bytes([len(data)]) if len(data) < 128 else b"\x0c\x81" + bytes([len(data)])) + data


class World(loopback.Server):
    """
    One Sigstore instance.

    Attributes:
        claims: Of the next certificates: GitHub's by default; the identity is *identity*, the issuer *issuer*.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.authority, self.ct, self.rekor = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.identity, self.issuer = WORKFLOW, GITHUB
        self.claims: dict[int, str] = {12: REPOSITORY, 13: "0" * 40, 14: REF, 18: WORKFLOW}
        self.leaves = [b"an older entry", b"another", b"a third"]
        self.certificate = self._root()
    # what a publisher and a client hold of it

    def config(self, folder: Path) -> str:
        """Write the client trust configuration, and return its path."""
        path = folder / "sigstore.json"
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            **{name: [self._service()] for name in ("caUrls", "oidcUrls", "rekorTlogUrls")},
            "rekorTlogConfig": {"selector": "ANY"},
        }
        kind = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
        path.write_text(json.dumps({"mediaType": kind, "trustedRoot": self.root(), "signingConfig": signing}))
        return str(path)

    def root(self) -> dict[str, Any]:
        """Return the trusted root."""
        chain = {"certificates": [{"rawBytes": _b64(self.certificate.public_bytes(Encoding.DER))}]}
        subject = {"organization": "toy", "commonName": "toy authority"}
        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [self._log(self.rekor)],
            "certificateAuthorities": [{"subject": subject, "uri": self.url, "certChain": chain, "validFor": self._valid()}],
            "ctlogs": [self._log(self.ct)],
            "timestampAuthorities": [],
        }

    def token(self) -> str:
        """Return an identity token, as a forge gives it to a workflow."""
        now = int(datetime.datetime.now(datetime.UTC).timestamp())
        claims = {"iss": self.issuer, "sub": self.identity, "aud": "sigstore", "iat": now - 5, "exp": now + 600}
        if self.issuer == GITHUB:
            claims["job_workflow_ref"] = self.identity.removeprefix("https://github.com/")
        parts = ({"alg": "none", "typ": "JWT"}, claims)
        return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), "eA"])

    # what the services do

    def certify(self, request: bytes) -> list[str]:
        """Return a certificate for the key in the PEM *request*, with its chain; it was seen by the log of certificates."""
        key = x509.load_pem_x509_csr(request).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        begin = datetime.datetime.now(datetime.UTC).replace(microsecond=0) - datetime.timedelta(seconds=30)
        name = (x509.UniformResourceIdentifier if "://" in self.identity else x509.RFC822Name)(self.identity)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(minutes=10))
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.UnrecognizedExtension(ObjectIdentifier(_CLAIM + "1"), self.issuer.encode()), critical=False)
        )
        for number, text in {8: self.issuer, **self.claims}.items():
            builder = builder.add_extension(x509.UnrecognizedExtension(ObjectIdentifier(f"{_CLAIM}{number}"), _utf8(text)), critical=False)
        # The log signs the certificate as it is without the log's own word; the rest of it stays the same.
        before = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        seen = x509.UnrecognizedExtension(_SCTS, self._timestamp(before))
        leaf = builder.add_extension(seen, critical=False).sign(self.authority, hashes.SHA256())
        return [one.public_bytes(Encoding.PEM).decode() for one in (leaf, self.certificate)]

    def enter(self, proposed: Mapping[str, Any]) -> dict[str, Any]:
        """Enter a proposed ``hashedrekord`` entry into the log, and return the log's answer."""
        body = rfc8785.dumps(dict(proposed))
        self.leaves.append(body)
        index, log = len(self.leaves) - 1, hashlib.sha256(_spki(self.rekor)).digest()
        when = int(datetime.datetime.now(datetime.UTC).timestamp())
        promise: dict[str, Any] = {"body": _b64(body), "integratedTime": when, "logID": log.hex(), "logIndex": index}
        root, path = _tree(self.leaves, index)
        proof = {"logIndex": index, "treeSize": index + 1, "rootHash": root.hex(), "hashes": [one.hex() for one in path]}
        verification = {
            "signedEntryTimestamp": _b64(_signed(self.rekor, rfc8785.dumps(promise))),
            "inclusionProof": proof | {"checkpoint": self._checkpoint(index + 1, root, log)},
        }
        return {f"{index:064x}": promise | {"verification": verification}}

    def _checkpoint(self, size: int, root: bytes, log: bytes) -> str:
        note = f"toy log - 1\n{size}\n{_b64(root)}\n"
        return f"{note}\n— toy {_b64(log[:4] + _signed(self.rekor, note.encode()))}\n"

    def _timestamp(self, before: bytes) -> bytes:
        """Return the list of one signed certificate timestamp (RFC 6962, 3.2 and 3.3), as the extension holds it."""
        now = int(datetime.datetime.now(datetime.UTC).timestamp() * 1000)
        issuer = hashlib.sha256(_spki(self.authority)).digest()
        entry = struct.pack("!BBQH", 0, 0, now, 1) + issuer + len(before).to_bytes(3, "big") + before + b"\0\0"
        signature = _signed(self.ct, entry)
        log = hashlib.sha256(_spki(self.ct)).digest()
        one = struct.pack("!B32sQH", 0, log, now, 0) + struct.pack("!BBH", 4, 3, len(signature)) + signature
        listed = struct.pack("!HH", len(one) + 2, len(one)) + one
        return b"\x04" + (bytes([len(listed)]) if len(listed) < 128 else b"\x81" + bytes([len(listed)])) + listed

    def _root(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "toy"), x509.NameAttribute(NameOID.COMMON_NAME, "toy authority")])
        public = self.authority.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_SINCE)
            .not_valid_after(_SINCE + datetime.timedelta(days=36500))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def _log(self, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
        public = {"rawBytes": _b64(_spki(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": self._valid()}
        name = {"keyId": _b64(hashlib.sha256(_spki(key)).digest())}
        return {"baseUrl": self.url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": name}

    def _service(self) -> dict[str, Any]:
        return {"url": self.url, "majorApiVersion": 1, "validFor": self._valid(), "operator": "toy"}

    def _valid(self) -> dict[str, str]:
        return {"start": "2026-01-01T00:00:00Z"}


def _usage(**given: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign",
             "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: given.get(name, False) for name in names})


def _tree(leaves: list[bytes], index: int) -> tuple[bytes, list[bytes]]:
    """Return the root of the Merkle tree of *leaves* and the path of one leaf, lowest first (RFC 6962, 2.1)."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest(), []
    half = 1 << (len(leaves) - 1).bit_length() - 1
    left, right = leaves[:half], leaves[half:]
    if index < half:
        (mine, path), other = _tree(left, index), _tree(right, 0)[0]
        return hashlib.sha256(b"\1" + mine + other).digest(), [*path, other]
    (mine, path), other = _tree(right, index - half), _tree(left, 0)[0]
    return hashlib.sha256(b"\1" + other + mine).digest(), [*path, other]


class _Handler(loopback.Handler):
    server: World

    def do_POST(self) -> None:  # noqa: N802  http.server calls it so
        sent = json.loads(self.body())
        if self.path == "/api/v2/signingCert":
            chain = self.server.certify(base64.b64decode(sent["certificateSigningRequest"]))
            self.answer(201, {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}})
        else:
            self.answer(201, self.server.enter(sent))
