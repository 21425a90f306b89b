"""
A model's headers from the hub, by byte ranges: a few megabytes in the place of the weights.

Of each shard the first bytes are asked for, and then the rest of its header. A hub or cache between
that ignores ranges sends the whole file, of which no more is read. Each header is stored when it
has arrived, so an interrupted run goes on, and a later one without a network has the model.
"""

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, ClassVar
from urllib.parse import quote, urlsplit

import msgspec

from sparkwright.bench.model import checkpoint
from sparkwright.core.console import console
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.http import HttpFailure, Reply, request
from sparkwright.core.store import Store

#: Bytes of a shard that are asked for first; the headers of a third of the shards are shorter.
FIRST = 128 << 10
#: Seconds for everything, and shards that are asked for at a time.
SECONDS, PARALLEL = 300.0, 4
_CONFIG, _PARAMETERS, _INDEX = "config.json", "params.json", "model.safetensors.index.json"


class HubError(SparkwrightError):
    """The hub lacks a model or a file, or does not send it."""

    references: ClassVar[Mapping[str, Advice]] = {
        "hub-missing": Advice(
            "The hub has no model of this name and revision, or the model lacks a file.",
            "Compare the name and --revision with the model's page.",
        ),
        "hub-refused": Advice(
            "The model is gated or private, or there is none of this name: the hub tells strangers "
            "no difference.",
            "Accept the model's terms on its page, and set HF_TOKEN to a token that may read it.",
        ),
        "hub-unreachable": Advice(
            "The hub of models cannot be asked now, or something else answers in its place.",
            "Check the network and HF_ENDPOINT, and repeat the command; headers that arrived are "
            "kept.",
            exit_code=5,
        ),
    }


class _Sibling(msgspec.Struct, frozen=True):
    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0)] = 0


class Listing(msgspec.Struct, frozen=True):
    """
    What the hub states about a model.

    Attributes:
        sha: The commit of the revision.
        siblings: Its files; their sizes only if they were asked for.
    """

    sha: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
    siblings: tuple[_Sibling, ...] = ()


class _Snapshot(msgspec.Struct, frozen=True):
    """What is stored of a revision beside the headers of its shards."""

    commit: str
    config: dict[str, Any]
    index: checkpoint.WeightIndex
    shards: tuple[str, ...]


class Hub:
    """
    The hub of models, or what HF_ENDPOINT names in its place.

    Args:
        variables: The environment.
        offline: Ask for nothing.
        seconds: Until everything must have arrived.

    Attributes:
        received: Bytes that arrived.
    """

    def __init__(
        self, variables: Mapping[str, str], *, offline: bool = False, seconds: float = SECONDS
    ) -> None:
        self.address = (variables.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.received = 0
        self._token, self._offline = variables.get("HF_TOKEN", ""), offline
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def listing(self, name: str, revision: str, *, sizes: bool = False) -> Listing:
        """
        Return what the hub states about the model *name*.

        Raises:
            hub-missing, hub-refused, hub-unreachable: There is no such statement.
        """
        path = f"api/models/{name}/revision/{quote(revision, safe='')}"
        reply = self._get(path + "?blobs=true" * sizes)
        try:
            return msgspec.json.decode(reply.body, type=Listing)
        except (ValueError, RecursionError) as error:
            raise self._unusable("states a model in an unknown form", error) from error

    def headers(self, store: Store, name: str, revision: str) -> checkpoint.HeaderFile:
        """
        Return the model *name* without its weights, and keep it in *store*; if the hub does not
        answer, the one that the store has.

        Raises:
            hub-missing, hub-refused, hub-unreachable: The hub does not send it.
            model-missing: It has no safetensors.
            checkpoint-invalid: A file of it is damaged or hostile.
        """
        folder, key = f"hub/{name.replace('/', '--')}", quote(revision, safe="")
        snapshot = store.get(folder, key, _Snapshot)
        try:
            listing = self.listing(name, revision)
        except HubError as error:
            if error.reference != "hub-unreachable" or not snapshot:
                raise
            console.warn(f"{error} Taken from the store: {name} at {snapshot.commit[:12]}.")
        else:
            if not snapshot or snapshot.commit != listing.sha:
                snapshot = self._snapshot(name, listing)
                store.put(folder, key, snapshot)
        folder = f"{folder}/{snapshot.commit}"
        headers, size = dict[str, checkpoint.ShardHeader](), 0
        fetch = partial(self._shard, store, folder, f"{name}/resolve/{snapshot.commit}")
        with ThreadPoolExecutor(PARALLEL) as pool:
            try:
                for shard, header in zip(
                    snapshot.shards, pool.map(fetch, snapshot.shards), strict=True
                ):
                    headers[shard], size = header, size + len(header.header)
                    if size > checkpoint.HEADERS:
                        raise checkpoint.invalid(f"The headers of {name} have no end.")
            finally:
                pool.shutdown(cancel_futures=True)
        return checkpoint.HeaderFile(snapshot.config, snapshot.index, headers)

    def _snapshot(self, name: str, listing: Listing) -> _Snapshot:
        names = [sibling.rfilename for sibling in listing.siblings]
        files = [name for name in names if re.fullmatch(r"[\w.+-]{1,200}\.safetensors", name)]
        folder, index = f"{name}/resolve/{listing.sha}", checkpoint.WeightIndex()
        if _INDEX in names:
            reply = self._get(f"{folder}/{_INDEX}", limit=checkpoint.INDEX)
            index = checkpoint.decode(_INDEX, reply.body, checkpoint.WeightIndex)
        shards = checkpoint.shards(name, index, sorted(files))
        if _CONFIG not in names and _PARAMETERS not in names:
            raise checkpoint.ModelError("model-missing", f"{name} has no {_CONFIG}.")
        file = _CONFIG if _CONFIG in names else _PARAMETERS
        reply = self._get(f"{folder}/{file}", limit=checkpoint.CONFIG)
        config = checkpoint.decode(file, reply.body, dict[str, Any])
        config = config if file == _CONFIG else checkpoint.translated(config)
        return _Snapshot(listing.sha, config, index, tuple(shards))

    def _shard(self, store: Store, folder: str, address: str, shard: str) -> checkpoint.ShardHeader:
        """Return the header of *shard* that *store* has, or else fetch it and store it."""
        if stored := store.get(folder, shard, checkpoint.ShardHeader):
            return stored
        path = f"{address}/{quote(shard)}"
        data, size = self._range(path, 0, FIRST)
        end = 8 + checkpoint.header_length(shard, size, data)
        if end > len(data):
            rest, again = self._range(path, len(data), end)
            data += rest
            if again != size or len(data) < end:
                raise self._unusable(f"sends another {shard} than a moment ago", path)
        header = checkpoint.ShardHeader(size, data[8:end])
        store.put(folder, shard, header)
        return header

    def _range(self, path: str, first: int, end: int) -> tuple[bytes, int]:
        """Return the bytes from *first* to before *end* of a file, or to its end, and its size."""
        reply = self._get(
            path, headers={"Range": f"bytes={first}-{end - 1}"}, limit=end, beginning=True
        )
        if reply.status == 200 and reply.length is not None:
            return reply.body[first:], reply.length
        stated = re.fullmatch(
            rf"bytes {first}-\d+/(\d{{1,15}})", reply.headers.get("content-range", "")
        )
        if reply.status != 206 or not stated:
            raise self._unusable("does not state which part of a file it sends", path)
        return reply.body[: end - first], int(stated[1])

    def _get(self, path: str, **options: Any) -> Reply:
        if self._offline:
            raise self._unusable("is not asked (--offline)", f"the store lacks {path}")
        left = self._until - time.monotonic()
        if left <= 0:
            raise self._unusable(f"did not send everything in {self._seconds:g} s", path)
        try:
            reply = request(
                "GET",
                f"{self.address}/{path}",
                token=self._token,
                redirects=True,
                seconds=left,
                **options,
            )
        except HttpFailure as failure:
            raise self._unusable("gives no usable reply", failure) from failure
        self.received += len(reply.body)
        what = path.removeprefix("api/models/").split("?")[0]
        if reply.status in (401, 403):
            how = "with this HF_TOKEN" if self._token else "without HF_TOKEN"
            raise HubError("hub-refused", f"The hub does not give {what} {how}.")
        if reply.status == 404:
            raise HubError("hub-missing", f"The hub has no {what}.")
        if reply.status not in (200, 206):
            raise self._unusable(f"answers {reply.status}", what)
        return reply

    def _unusable(self, what: str, detail: object) -> HubError:
        host = urlsplit(self.address).hostname or "no host"
        return HubError("hub-unreachable", f"{host} {what}.", details=[str(detail)[:300]])
