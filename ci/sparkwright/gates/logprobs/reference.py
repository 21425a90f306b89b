"""
A reference for the distributions gate: what one server said of every position of the corpus, and how well it repeats itself.

It can be saved, so that a candidate is compared without the reference's server: on a machine with one GPU the two do not fit together.
The file is bound to the model, the wheel, the server's version and the tokens, and is read as hostile.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sparkwright.core.files import canonical, content_key, sha256_bytes
from sparkwright.gates.core.served import Served
from sparkwright.gates.logprobs.divergence import Floats, Scores

#: Bytes; 64 texts of 512 tokens with 20 logarithms each take 5 to 7 MB.
LARGEST = 64 * 1024 * 1024

#: Entries of one array; four times the texts above.
MOST_ENTRIES = 64 * 512 * 21 * 4


class ReferenceInvalid(Exception):
    """A saved reference that does not count; *reference* is a stable reference, *says* a sentence."""

    def __init__(self, reference: str, says: str) -> None:
        super().__init__(says)
        self.reference, self.says = reference, says


class Reference(msgspec.Struct, frozen=True):
    """
    What a server said.

    Attributes:
        served: Which wheel, model and machine.
        name: The model's name, as the server has it.
        vllm: The server's version.
        corpus: The sha256 of the texts.
        top: How many logarithms per position are those of the most likely tokens.
        texts: Token ids of each text, all of one length.
        scores: Of every token but each text's first, text after text.
        floor: Per text, from a second pass of the same reference: the mean lower bound of KL in nat, the part of positions with the same
            best token, and the difference of the mean logarithm.
    """

    served: Served
    name: str
    vllm: str
    corpus: str
    top: int
    texts: tuple[tuple[int, ...], ...]
    scores: Scores
    floor: Floats

    @property
    def tokens_digest(self) -> str:
        """The sha256 of the token ids."""
        return tokens_digest(self.texts)


def tokens_digest(texts: Sequence[Sequence[int]]) -> str:
    """Return the sha256 of the token ids of *texts*."""
    return sha256_bytes(canonical(texts))


Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Share = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[float, Meta(ge=0, le=1e6)]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The saved form: arrays are base64 of deflated little-endian numbers, a row per position."""

    format: Literal[1]
    served: Served
    name: str
    vllm: str
    corpus: str
    tokens: str
    top: Annotated[int, Meta(ge=1, le=1000)]
    count: Count
    length: Annotated[int, Meta(ge=2, le=1 << 20)]
    texts: str
    logprobs: str
    ids: str
    tops: str
    floor: tuple[tuple[Natural, Share, Annotated[float, Meta(ge=-1e6, le=1e6)]], ...]
    digest: str = ""

    def own_digest(self) -> str:
        return content_key("distribution-reference", msgspec.structs.replace(self, digest=""))


def save(reference: Reference, path: Path) -> None:
    """Write *reference* to *path*, whole or not at all."""
    scores = reference.scores
    file = _File(
        1, reference.served, reference.name, reference.vllm, reference.corpus, reference.tokens_digest, reference.top,
        len(reference.texts), len(reference.texts[0]), _pack(np.array(reference.texts), "<i4"), _pack(scores.logprobs, "<f4"),
        _pack(scores.ids, "<i4"), _pack(scores.tops, "<f4"), tuple((float(a), float(b), float(c)) for a, b, c in reference.floor),
    )  # fmt: skip
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, digest=file.own_digest())))
    temporary.replace(path)


def load(path: Path) -> Reference:
    """
    Return the reference in the file at *path*.

    Raises:
        ReferenceInvalid: It is too large, no such file, cut short or changed; whatever it holds, time and memory are bounded.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ReferenceInvalid("reference-damaged", f"{path.name} is larger than {LARGEST} bytes")
        file = msgspec.json.decode(data, type=_File)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ReferenceInvalid("reference-damaged", f"{path.name} is no saved reference: {error!s:.200}") from error
    if file.own_digest() != file.digest:
        raise ReferenceInvalid("reference-damaged", f"{path.name} was changed after it was written, or is not whole")
    return _unpacked(file, path.name)


def _unpacked(file: _File, name: str) -> Reference:
    positions, width = file.count * (file.length - 1), file.top + 1
    if file.count * file.length * width > MOST_ENTRIES or len(file.floor) != file.count:
        raise ReferenceInvalid("reference-damaged", f"{name} states sizes that do not fit together")
    texts = _unpack(file.texts, "<i4", (file.count, file.length), name)
    scores = Scores(
        texts[:, 1:].reshape(-1).astype(np.int64),
        _unpack(file.logprobs, "<f4", (positions,), name).astype(np.float64),
        _unpack(file.ids, "<i4", (positions, width), name).astype(np.int64),
        _unpack(file.tops, "<f4", (positions, width), name).astype(np.float64),
    )
    read = Reference(
        file.served, file.name, file.vllm, file.corpus, file.top, tuple(map(tuple, texts.tolist())), scores, np.array(file.floor)
    )
    if read.tokens_digest != file.tokens:
        raise ReferenceInvalid("reference-damaged", f"{name} holds other tokens than it says")
    if (texts < 0).any() or (scores.tops[:, 1:] > scores.tops[:, :-1]).any():
        raise ReferenceInvalid("reference-damaged", f"{name} holds a negative token or a list out of order")
    return read


def _pack(array: NDArray[Any], kind: str) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array, dtype=kind).tobytes(), 9)).decode()


def _unpack(text: str, kind: str, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(text, validate=True), size + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ReferenceInvalid("reference-damaged", f"{name} holds an array that cannot be read: {error}") from error
    if len(data) != size:
        raise ReferenceInvalid("reference-damaged", f"{name} holds an array of another size than it says")
    return np.frombuffer(data, kind).reshape(shape)
