"""Addresses of indexes, brought to one spelling, so that two of them can be compared."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from sparkwright.core.errors import UsageError

_PORTS = {"http": 80, "https": 443}


def normalised(url: str) -> str:
    """
    Return *url* in the one spelling that manifests are signed for: scheme and host in lower case, no default port, a final slash.

    Raises:
        UsageError: It is no http, https or file URL, or has a user, a query or a fragment.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError("usage", f"{url!r:.200} is not a URL.", details=[str(error)]) from error
    scheme = parts.scheme.lower()
    if scheme not in ("http", "https", "file") or (scheme != "file" and not parts.hostname):
        raise UsageError("usage", f"{url!r:.200} is not the URL of an index (https://host/folder/).")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise UsageError("usage", f"The URL of an index has no user, query or fragment: {parts.hostname}{parts.path}")
    host = (parts.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    netloc = host if port in (None, _PORTS.get(scheme)) else f"{host}:{port}"
    return SplitResult(scheme, netloc, parts.path.rstrip("/") + "/", "", "").geturl()
