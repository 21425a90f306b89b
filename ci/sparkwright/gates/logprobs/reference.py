"""
A reference for the distributions gate: what one server said of every position of the corpus, and how well it repeats itself.

It can be saved, so that a candidate is compared without the reference's server: on a machine with one GPU the two do not fit together.
The file is bound to the model, the wheel, the server's version and the tokens, and is read as hostile.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.files import canonical, content_key, sha256_bytes
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.logprobs.divergence import Floats, Scores

#: Bytes; 64 texts of 512 tokens with 20 logarithms each take 5 to 7 MB.
LARGEST = 64 * 1024 * 1024

#: Entries of one array; four times the texts above.
MOST_ENTRIES = 64 * 512 * 21 * 4

#: Texts below which a bootstrap over texts means nothing.
FEWEST_TEXTS = 8


class LogprobsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/logprobs.yaml``, which says where each number comes from.

    Attributes:
        texts, tokens, top: Texts scored, tokens of each, and logarithms per position.
        corpus: The sha256 of the texts that the corpus gives.
        kl_most, kl_floors: The mean lower bound of KL is at most the larger of *kl_most* nat and *kl_floors* times the A/A floor.
        text_most: The largest mean of one text, likewise.
        floor_most: The floor above which a reference counts as unstable, in nat.
        agreement_least, agreement_drop: The part of positions with the same best token is at least the larger of *agreement_least* and the
            reference's own less *agreement_drop*.
        perplexity_most: The difference of ln perplexity, either way.
        confidence: Of each one-sided limit.
    """

    texts: int
    tokens: int
    top: int
    corpus: str
    kl_most: float
    kl_floors: float
    text_most: float
    floor_most: float
    agreement_least: float
    agreement_drop: float
    perplexity_most: float
    confidence: float

    def __post_init__(self) -> None:
        if self.texts < FEWEST_TEXTS:
            raise ValueError(f"{self.texts} texts: a bootstrap over fewer than {FEWEST_TEXTS} means nothing")
        if self.tokens < 2 or not 1 <= self.top <= 1000:
            raise ValueError("tokens must be at least 2 and top from 1 to 1000")
        if self.texts * self.tokens * (self.top + 1) > MOST_ENTRIES:
            raise ValueError(f"more than {MOST_ENTRIES} logarithms would be kept")
        if not (min(self.kl_most, self.text_most, self.floor_most, self.perplexity_most) > 0 and self.kl_floors >= 1):
            raise ValueError("kl_most, text_most, floor_most and perplexity_most must be above 0, kl_floors at least 1")
        if not (0 < self.agreement_least <= 1 and 0 <= self.agreement_drop < 1 and 0.5 < self.confidence < 1):
            raise ValueError("agreement_least, agreement_drop and confidence are parts of 1, confidence above 0.5")


#: Characters of a text: enough for 512 tokens of any tokenizer whose tokens have less than 12 characters on average.
LENGTH = 6000

NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana", "Ivo", "Jun", "Katya", "Luis", "Mira", "Noor", "Oskar")
THINGS = ("apples", "books", "candles", "drums", "envelopes", "forks", "gloves", "hammers", "jars", "keys", "lamps", "maps", "nails")


class _Draw:
    """Numbers in an order that only *seed* decides."""

    def __init__(self, seed: str) -> None:
        self._seed, self._count = seed, 0

    def below(self, limit: int) -> int:
        self._count += 1
        return int.from_bytes(hashlib.sha256(f"{self._seed}/{self._count}".encode()).digest()[:8], "big") % limit


def _sums(draw: _Draw) -> str:
    lines = []
    for _ in range(12):
        a, b = draw.below(900) + 100, draw.below(90) + 10
        lines.append((f"{a} + {b} = {a + b}", f"{a} - {b} = {a - b}", f"{a} * {b} = {a * b}")[draw.below(3)])
    return "\n".join(lines)


def _stories(draw: _Draw) -> str:
    lines = []
    for _ in range(4):
        who, other = NAMES[draw.below(len(NAMES))], NAMES[draw.below(len(NAMES))]
        what, many, some = THINGS[draw.below(len(THINGS))], draw.below(60) + 20, draw.below(19) + 1
        lines.append(f"{who} has {many} {what} and gives {some} of them to {other}. Now {who} has {many - some} {what} left.")
    return "\n".join(lines)


def _records(draw: _Draw) -> str:
    lines = ["id,name,item,count,price"]
    for row in range(10):
        name, thing = NAMES[draw.below(len(NAMES))], THINGS[draw.below(len(THINGS))]
        lines.append(f"{1000 + row * 7},{name},{thing},{draw.below(40) + 1},{draw.below(90) + 1}.{draw.below(100):02d}")
    return "\n".join(lines)


def _functions(draw: _Draw) -> str:
    lines = []
    for _ in range(3):
        thing, factor, offset = THINGS[draw.below(len(THINGS))], draw.below(12) + 2, draw.below(50)
        lines += [f"def price_of_{thing}(count: int) -> int:", f"    return {factor} * count + {offset}", ""]
    return "\n".join(lines)


MADE: tuple[Callable[[_Draw], str], ...] = (_sums, _stories, _records, _functions)


def load_corpus(path: Path) -> Mapping[str, tuple[str, ...]]:
    """
    Return the paragraphs in the file at *path*, by genre.

    Raises:
        file-invalid: It is not such a file, or has a genre without a paragraph.
    """
    read = strict_yaml.load(path, dict[str, tuple[str, ...]])
    if not read or any(not paragraphs or not all(map(str.strip, paragraphs)) for paragraphs in read.values()):
        raise FileError("file-invalid", f"{path} has a genre without a paragraph.")
    return read


def corpus_texts(paragraphs: Mapping[str, tuple[str, ...]], count: int) -> tuple[str, ...]:
    """Return *count* texts of at least `LENGTH` characters, each with another beginning and another order of genres."""
    return tuple(_text(paragraphs, number) for number in range(count))


def _text(paragraphs: Mapping[str, tuple[str, ...]], number: int) -> str:
    genres, draw = sorted(paragraphs), _Draw(f"text {number}")
    parts: list[str] = []
    # The first paragraphs are scored whole, so the genres take turns in coming first.
    genre = genres[number % len(genres)]
    while sum(map(len, parts)) < LENGTH:
        parts.append(paragraphs[genre][draw.below(len(paragraphs[genre]))].strip())
        if draw.below(3) == 0:
            parts.append(MADE[draw.below(len(MADE))](draw))
        genre = genres[draw.below(len(genres))]
    return "\n\n".join(parts)


def digest_of(made: tuple[str, ...]) -> str:
    """Return the sha256 of texts."""
    return sha256_bytes(canonical(made))


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

    served: ServerIdentity
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
    served: ServerIdentity
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
