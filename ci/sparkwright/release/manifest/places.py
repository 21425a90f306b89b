"""Where everything lies below the root of an index; publisher, generator and client read it here."""

from __future__ import annotations

#: Signed: a DSSE envelope, or a Sigstore bundle, around a statement whose predicate is the manifest. One file, so that nobody can read
#: a manifest of one moment with the signature of another.
MANIFEST = "manifest.dsse.json"

#: The signed files of evidence and the raw ones, by their own sha256.
EVIDENCE = "evidence"


def wheel(sha256: str, filename: str) -> str:
    """Return where a wheel lies; its METADATA lies beside it with ``.metadata`` added."""
    return f"files/{sha256}/{filename}"


def evidence(sha256: str) -> str:
    """Return where a file of evidence lies."""
    return f"{EVIDENCE}/{sha256}.json"


def release(address: str) -> str:
    """Return where a release's record lies."""
    return f"b/{address}/release.json"


def proof(address: str, sha256: str) -> str:
    """Return where the proof *sha256* of the release *address* lies."""
    return f"b/{address}/proof-{sha256}.json"


def lock(address: str, machine: str) -> str:
    """Return where the lock of the matched set for *machine* lies (PEP 751 asks for the name ``pylock.<something>.toml``)."""
    return f"b/{address}/pylock.{machine}.toml"


def requirements(address: str, machine: str) -> str:
    """Return where the same set lies as requirements with hashes."""
    return f"b/{address}/requirements.{machine}.txt"


def onsite(address: str) -> str:
    """Return where the record of what is installed and edited on the user's machine lies."""
    return f"b/{address}/onsite.json"


def simple(root: str) -> str:
    """Return the folder of the simple API below *root*: a channel, or ``b/<address>``."""
    return f"{root}/simple"
