"""
An index of releases: a TUF repository on a web server or in a folder.

Nothing that comes from it is believed before TUF has verified it, and everything is bounded in
bytes and in time. `tuf.ngclient` has no deadline of its own, so requests are sent by
`sparkwright.core.http`.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

import msgspec
from securesystemslib.signer import KEY_FOR_TYPE_AND_SCHEME, SigstoreKey
from tuf.api import exceptions
from tuf.api.metadata import Metadata, Root, Targets
from tuf.ngclient import Updater, UpdaterConfig
from tuf.ngclient.fetcher import FetcherInterface

from sparkwright.client import ClientError
from sparkwright.client.folders import locked_folder, own_folder, remove_unfinished
from sparkwright.client.records import (
    LARGEST_RELEASE,
    Release,
    ReleaseFile,
    ReleaseState,
    number,
    target_path,
)
from sparkwright.core import files, http
from sparkwright.core.console import console
from sparkwright.core.errors import StoreError
from sparkwright.core.store import write_file

#: Seconds for all metadata of an index together, and for one other small file.
REFRESH_SECONDS, FILE_SECONDS = 120.0, 120.0
#: Bytes of the metadata of each role, whatever length other metadata states: 1,000 releases take
#: 0.5 MB, and a Sigstore bundle 10 kB.
LARGEST = {"root": 1 << 19, "timestamp": 1 << 15, "snapshot": 1 << 17, "targets": 1 << 24}

#: What the wheel of the client carries: the address of its index with the fingerprint of its first
#: root on the second line, and the root to trust, which may be a later one.
CARRIED_ADDRESS, CARRIED_ROOT = map(Path(__file__).with_name, ("index.txt", "root.json"))

# The library reads keys of identities only on request.
KEY_FOR_TYPE_AND_SCHEME["sigstore-oidc", "Fulcio"] = SigstoreKey

_NAME = re.compile(r"releases/([A-Za-z0-9][A-Za-z0-9._-]*\.[1-9][0-9]{0,8})\.json")


def parse_address(text: str) -> str:
    """
    Return the URL of the index *text*, a URL or a folder, with a slash at its end.

    Raises:
        index-missing: It is neither.
    """
    folder = text
    with contextlib.suppress(ValueError):  # the address is not valid, such as http://[
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.netloc:
            return text.rstrip("/") + "/"
        folder = unquote(parts.path) if parts.scheme == "file" else text
    if not text or not os.path.isdir(folder):  # noqa: PTH112  it raises nothing for any text
        raise ClientError(
            "index-missing",
            f"{http.redact_credentials(text)} is neither a URL nor a folder."
            if text
            else "No index is named.",
        )
    return Path(folder).absolute().as_uri() + "/"


def fetch(url: str, limit: int, seconds: float) -> bytes | None:
    """
    Return the file at *url*, which has at most *limit* bytes; None if there is none.

    Raises:
        index-invalid: It is larger, no regular file, or behind a redirect out of https.
        index-unreachable: No answer in time.
    """
    name = http.redact_credentials(url)
    if urlsplit(url).scheme == "file":
        path, failure = unquote(urlsplit(url).path), functools.partial(ClientError, "index-invalid")
        if not os.path.exists(path):  # noqa: PTH110  it raises nothing for a folder without access
            return None
        return files.read_bytes(Path(path), limit=limit, failure=failure)
    try:
        reply = http.request("GET", url, limit=limit, seconds=max(seconds, 0.1), redirects=True)
    except http.HttpFailure as error:
        raise ClientError(
            "index-invalid" if error.kind in ("size", "redirect") else "index-unreachable",
            f"{name} cannot be fetched.",
            details=[str(error)],
        ) from None
    if reply.status in (403, 404, 410):
        return None
    if reply.status != 200:
        raise ClientError(
            "index-unreachable" if reply.status in (429, *range(500, 600)) else "index-invalid",
            f"{name} answers {reply.status}.",
        )
    return reply.body


class _Fetcher(FetcherInterface):
    """Fetches metadata for `tuf.ngclient`, all of it in `REFRESH_SECONDS`."""

    def __init__(self) -> None:
        self._until = time.monotonic() + REFRESH_SECONDS

    def _fetch(self, url: str) -> Iterator[bytes]:
        raise NotImplementedError(url)

    def download_bytes(self, url: str, max_length: int) -> bytes:
        # The library takes a length that signed metadata states for its own limit.
        role = url.removesuffix(".json").rpartition("/")[2].rpartition(".")[2]
        limit = min(max_length, LARGEST.get(role, LARGEST["targets"]))
        data = fetch(url, limit, self._until - time.monotonic())
        if data is None:
            absent = f"{http.redact_credentials(url)} does not exist"
            if role == "timestamp":
                raise ClientError("index-missing", f"{absent}.")
            raise exceptions.DownloadHTTPError(absent, 404)
        return data


class Index:
    """
    An index whose metadata is verified and current.

    Args:
        url: Where it lies, as `parse_address` returns it.
        root: Trusted root metadata, the first or a later one.
        fingerprint: The sha256 of the first.
        folder: Keeps the metadata that this machine has seen, whichever root it began with.

    Raises:
        index-expired, index-invalid, index-missing, index-rollback, index-unreachable,
            index-unsigned, index-damaged: The metadata cannot be verified; see there.
        state-unusable: *folder* cannot be used.

    Attributes:
        address: Its URL without credentials, as it is stored.
        states: The states of its releases, by name, of those that this program can read.
    """

    def __init__(self, url: str, root: bytes, fingerprint: str, folder: Path) -> None:
        self.url, self.address = url, http.redact_credentials(url)
        self.fingerprint = fingerprint
        with _translated(str(self), folder):
            self._updater = Updater(
                str(folder),
                self.join("metadata/"),
                fetcher=_Fetcher(),
                config=UpdaterConfig(root_max_length=LARGEST["root"]),
                bootstrap=root,
            )
            self._updater.refresh()
            for path in folder.glob("root_history/*.root.json"):
                trusted: Metadata[Root] = Metadata.from_bytes(path.read_bytes())
                require_distinct_keys(trusted.signed)
            self.states, unreadable = _read_states(folder)
        if unreadable:
            console.warn(f"{len(unreadable)} releases need a newer client, such as {unreadable[0]}")

    def __str__(self) -> str:
        return self.address.removeprefix("file://")

    def join(self, name: str) -> str:
        """Return the address of *name*, a path below the root or an absolute URL."""
        return urljoin(self.url, name if "://" in name else quote(name, safe="/+!%"))

    def release(self, name: str) -> Release:
        """
        Return the release *name*.

        Raises:
            release-unknown: There is none. index-damaged: It is missing, or not what is signed.
            index-invalid: It is not a release of this format.
        """
        if (target := self._updater.get_targetinfo(target_path(name))) is None:
            raise ClientError("release-unknown", f"{self} has no release {name!r:.120}.")
        sha256 = target.hashes.get("sha256", "")
        data = self._bytes(
            f"targets/releases/{sha256}.{name}.json", target.length, sha256, LARGEST_RELEASE
        )
        try:
            release = msgspec.json.decode(data, type=Release)
        except ValueError as error:
            raise ClientError(
                "index-invalid",
                f"{name} is not a release that this program can read.",
                details=[str(error)[:300]],
            ) from error
        if release.name != name:
            raise ClientError("set-mixed", f"{name} calls itself {release.name} inside.")
        return release

    def read(self, file: ReleaseFile, limit: int) -> bytes:
        """
        Return the small file *file* of a release.

        Raises:
            index-damaged: It is missing, larger than *limit*, or not the file that is named.
        """
        return self._bytes(file.url or file.path, file.size, file.sha256, limit)

    def _bytes(self, name: str, size: int, sha256: str, limit: int) -> bytes:
        url = self.join(name)
        data = fetch(url, min(size, limit), FILE_SECONDS)
        if data is None or files.sha256_bytes(data) != sha256:
            raise ClientError(
                "index-damaged",
                f"{http.redact_credentials(url)} is not the file that the index names.",
                details=[
                    f"expected: {sha256}",
                    f"arrived:  {'nothing' if data is None else files.sha256_bytes(data)}",
                ],
            )
        return data


def _read_states(folder: Path) -> tuple[dict[str, ReleaseState], list[str]]:
    """
    Return the states of the releases by the metadata in *folder*, and the names of those that this
    program cannot read.
    """
    # The library lists targets nowhere; what it wrote, it has verified.
    metadata: Metadata[Targets] = Metadata.from_bytes(files.read_bytes(folder / "targets.json"))
    states, unreadable = dict[str, ReleaseState](), list[str]()
    for path, target in metadata.signed.targets.items():
        if match := _NAME.fullmatch(path):
            try:
                states[match[1]] = msgspec.convert(target.custom, ReleaseState)
            except msgspec.ValidationError:
                unreadable.append(match[1])
    return states, unreadable


def seen_states(folder: Path, address: str) -> dict[str, ReleaseState]:
    """
    Return the states of the releases of the index at *address* as this machine last saw them.

    Neither a network nor a lock is waited for.

    Raises:
        file-invalid, index-invalid: They were never seen, or the record of them is damaged.
    """
    fingerprint = files.read_json(folder / "indexes.json", dict[str, str]).get(address, "")
    with _translated(address, folder):
        return _read_states(folder / fingerprint[:32])[0]


def require_distinct_keys(root: Root) -> None:
    """Raise `UnsignedMetadataError` if a key has two ids, by which its signature counts twice."""
    # Blanks in PEM, and the case of hex, make another id of the same key.
    values = {
        "".join(str(sorted(key.keyval.items())).lower().split()) for key in root.keys.values()
    }
    if len(values) < len(root.keys):
        raise exceptions.UnsignedMetadataError(f"root {root.version} has a key under two ids")


def _order(stack: str) -> list[str]:
    """Return *stack* in a form in which ``2026.9`` comes before ``2026.11``."""
    return [part.zfill(8) for part in stack.split(".")]


def newest_first(states: Mapping[str, ReleaseState]) -> list[str]:
    """Return the names of releases, those of the latest stack and the latest of each first."""
    return sorted(
        states,
        key=lambda name: (_order(states[name].stack), number(name)),
        reverse=True,
    )


@contextlib.contextmanager
def _translated(index: str, folder: Path) -> Iterator[None]:
    """Raise the failures of TUF in the block as references."""
    references = {
        exceptions.ExpiredMetadataError: "index-expired",
        exceptions.BadVersionNumberError: "index-rollback",
        exceptions.UnsignedMetadataError: "index-unsigned",
        exceptions.LengthOrHashMismatchError: "index-damaged",
        exceptions.RepositoryError: "index-invalid",
    }
    try:
        yield
    except exceptions.DownloadHTTPError as error:
        raise ClientError("index-damaged", f"{index}: {error}.") from error
    except exceptions.RepositoryError as error:
        reference = next(name for kind, name in references.items() if isinstance(error, kind))
        raise ClientError(
            reference, f"The metadata of {index} is refused.", details=[str(error)[:300]]
        ) from error
    except OSError as error:
        raise StoreError(
            "state-unusable", f"{folder} cannot be used.", details=[str(error)]
        ) from error


def open_index(folder: Path, address: str, fingerprint: str = "") -> Index:
    """
    Return the index at *address*, else the one that the program carries, by a root that is trusted.

    Args:
        folder: Keeps what is trusted and seen.
        fingerprint: The sha256 of the first root metadata, as its publisher states it elsewhere.

    Raises:
        trust-missing: The root of an unknown index is not confirmed.
        index-missing: No address is given, or there is no index; and as `Index`.
    """
    text = CARRIED_ADDRESS.read_text("utf-8") if CARRIED_ADDRESS.exists() else "\n\n"
    own, first = text.splitlines()
    url, wanted = parse_address(address or own), re.sub(r"[\s:]", "", fingerprint).lower()
    shown = http.redact_credentials(url)
    with locked_folder(folder):
        remove_unfinished(folder)
        path = folder / "indexes.json"
        trusted = files.read_json(path, dict[str, str]) if path.exists() else {}
        at_home = own and shown == http.redact_credentials(parse_address(own))
        wanted = wanted or (first if at_home else trusted.get(shown, ""))
        if not wanted or wanted != first:
            root = _first_root(url, wanted, {first, *trusted.values()})
            wanted = files.sha256_bytes(root)
        if wanted == first:  # keys of the first root may be replaced since
            root = CARRIED_ROOT.read_bytes()
        index = Index(url, root, wanted, own_folder(folder, wanted[:32]))
        if trusted.get(shown) != wanted:
            write_file(path, msgspec.json.encode({**trusted, shown: wanted}))
    return index


def _first_root(url: str, wanted: str, trusted: Collection[str]) -> bytes:
    """Return the first root metadata of the index at *url*, whose trust is confirmed."""
    shown = http.redact_credentials(url)
    root = fetch(urljoin(url, "metadata/1.root.json"), LARGEST["root"], FILE_SECONDS)
    if root is None:
        raise ClientError("index-missing", f"There is no index at {shown}.")
    actual = files.sha256_bytes(root)
    # Another address of an index that is trusted already is a mirror.
    if wanted != actual if wanted else actual not in trusted:
        raise ClientError(
            "trust-missing",
            f"The root of {shown} is not trusted on this machine.",
            details=[f"fingerprint: {actual}", *([f"named:       {wanted}"] if wanted else [])],
            data={"fingerprint": actual},
        )
    return root
