"""
A Sigstore of its own on loopback: an authority that certifies identities, the log of its certificates, and the log of signatures.

The real library signs with it and verifies against its trusted root. Its keys are made for each world, so two worlds distrust each other.
"""

import base64
import datetime
import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from tests.support import loopback

GITHUB = "https://token.actions.githubusercontent.com"
WORKFLOW = "https://github.com/toy/wheels/.github/workflows/publish.yml@refs/tags/v1"

_SCTS, _ISSUER = (ObjectIdentifier(f"1.3.6.1.4.1.{end}") for end in ("11129.2.4.2", "57264.1.1"))
_SINCE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_VALID = {"start": "2026-01-01T00:00:00Z"}


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _signed(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


class World(loopback.Server):
    """
    One Sigstore instance.

    Attributes:
        identity: Of the next certificates; the issuer is GitHub.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.authority, self.ct, self.rekor = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.identity = WORKFLOW
        names = ((NameOID.ORGANIZATION_NAME, "toy"), (NameOID.COMMON_NAME, "toy authority"))
        self.name = x509.Name([x509.NameAttribute(*pair) for pair in names])
        public = self.authority.public_key()
        self.certificate = (
            x509.CertificateBuilder(self.name, self.name, public, x509.random_serial_number())
            .not_valid_before(_SINCE)
            .not_valid_after(_SINCE + datetime.timedelta(days=36500))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def config(self) -> str:
        """Return the client trust configuration, with the trusted root."""
        service = {"url": self.url, "majorApiVersion": 1, "validFor": _VALID, "operator": "toy"}
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            **{name: [service] for name in ("caUrls", "oidcUrls", "rekorTlogUrls")},
            "rekorTlogConfig": {"selector": "ANY"},
        }
        chain = {"certificates": [{"rawBytes": _b64(self.certificate.public_bytes(Encoding.DER))}]}
        subject = {"organization": "toy", "commonName": "toy authority"}
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [self._log(self.rekor)],
            "certificateAuthorities": [{"subject": subject, "uri": self.url, "certChain": chain, "validFor": _VALID}],
            "ctlogs": [self._log(self.ct)],
            "timestampAuthorities": [],
        }
        kind = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
        return json.dumps({"mediaType": kind, "trustedRoot": root, "signingConfig": signing})

    def token(self) -> str:
        """Return an identity token, as a forge gives it to a workflow."""
        now = int(datetime.datetime.now(datetime.UTC).timestamp())
        workflow = self.identity.removeprefix("https://github.com/")
        claims = {"iss": GITHUB, "sub": self.identity, "aud": "sigstore", "iat": now - 5, "exp": now + 600, "job_workflow_ref": workflow}
        parts = ({"alg": "none", "typ": "JWT"}, claims)
        return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), "eA"])

    def certify(self, request: bytes) -> list[str]:
        """Return a certificate for the key in the PEM *request*, with its chain; it was seen by the log of certificates."""
        key: Any = x509.load_pem_x509_csr(request).public_key()
        begin = datetime.datetime.now(datetime.UTC).replace(microsecond=0) - datetime.timedelta(seconds=30)
        builder = (
            x509.CertificateBuilder(self.name, x509.Name([]), key, x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(minutes=10))
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(self.identity)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER, GITHUB.encode()), critical=False)
        )
        # The log signs the certificate as it is without the log's own word; the rest of it stays the same.
        before = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        seen = x509.UnrecognizedExtension(_SCTS, self._timestamp(before))
        leaf = builder.add_extension(seen, critical=False).sign(self.authority, hashes.SHA256())
        return [one.public_bytes(Encoding.PEM).decode() for one in (leaf, self.certificate)]

    def enter(self, proposed: Mapping[str, Any]) -> dict[str, Any]:
        """Enter a proposed ``hashedrekord`` entry into a new log, whose only one it is, and return the log's answer."""
        body, log = rfc8785.dumps(dict(proposed)), hashlib.sha256(_spki(self.rekor)).digest()
        when = int(datetime.datetime.now(datetime.UTC).timestamp())
        promise: dict[str, Any] = {"body": _b64(body), "integratedTime": when, "logID": log.hex(), "logIndex": 0}
        # The root of a Merkle tree of one leaf (RFC 6962, 2.1).
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"toy log - 1\n1\n{_b64(root)}\n"
        checkpoint = f"{note}\n— toy {_b64(log[:4] + _signed(self.rekor, note.encode()))}\n"
        proof = {"logIndex": 0, "treeSize": 1, "rootHash": root.hex(), "hashes": [], "checkpoint": checkpoint}
        word = _b64(_signed(self.rekor, rfc8785.dumps(promise)))
        return {"0" * 64: promise | {"verification": {"signedEntryTimestamp": word, "inclusionProof": proof}}}

    def _timestamp(self, before: bytes) -> bytes:
        """Return the list of one signed certificate timestamp (RFC 6962, 3.2 and 3.3), as the extension holds it."""
        now = int(datetime.datetime.now(datetime.UTC).timestamp() * 1000)
        issuer, log = (hashlib.sha256(_spki(key)).digest() for key in (self.authority, self.ct))
        entry = struct.pack("!BBQH", 0, 0, now, 1) + issuer + len(before).to_bytes(3, "big") + before + b"\0\0"
        signature = _signed(self.ct, entry)
        one = struct.pack("!B32sQH", 0, log, now, 0) + struct.pack("!BBH", 4, 3, len(signature)) + signature
        listed = struct.pack("!HH", len(one) + 2, len(one)) + one
        return b"\x04" + (bytes([len(listed)]) if len(listed) < 128 else b"\x81" + bytes([len(listed)])) + listed

    def _log(self, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
        public = {"rawBytes": _b64(_spki(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": _VALID}
        name = {"keyId": _b64(hashlib.sha256(_spki(key)).digest())}
        return {"baseUrl": self.url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": name}


def _usage(**given: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign",
             "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: given.get(name, False) for name in names})


class _Handler(loopback.Handler):
    server: World

    def do_POST(self) -> None:  # noqa: N802  http.server calls it so
        sent = json.loads(self.body())
        if self.path == "/api/v2/signingCert":
            chain = self.server.certify(base64.b64decode(sent["certificateSigningRequest"]))
            self.answer(201, {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}})
        else:
            self.answer(201, self.server.enter(sent))
