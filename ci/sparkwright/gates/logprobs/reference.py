"""
The texts and limits of G5, and the file of a recorded reference.

A reference is what one server reported for every position of the texts, and how well it agrees with
itself. It is recorded once, as two servers rarely fit on one GPU. The file names the wheel, its
flags and backends and the model, and is read as untrusted.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from sparkwright.bench.server.client import ServerInvalid
from sparkwright.core.files import sha256_bytes
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.logprobs.divergence import Floats, Ids, Scores

#: Bytes; 64 texts of 512 tokens with 20 logarithms each take 16 MB.
LARGEST = 64 * 1024 * 1024

#: Characters of a text: 512 tokens of any tokenizer with less than 12 characters a token.
LENGTH = 6000

Share = Annotated[float, Meta(gt=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
Paragraph = Annotated[str, Meta(pattern=r"\S")]


class LogprobsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/logprobs.yaml``, which states the source of each number.

    Attributes:
        texts, tokens, top: Texts, tokens of each, and logarithms per position. A bootstrap over
            fewer than eight texts means nothing.
        decode_texts: How many texts are continued.
        decode_prompt, decode_tokens: Tokens of each prompt and of each continuation.
        decode_batch: The concurrency of the batched modes.
        kl_max, kl_floors: The mean lower bound of KL is at most the larger of *kl_max* nat and
            *kl_floors* times the A/A floor.
        text_max: The largest mean of one text, likewise.
        decode_kl_max, decode_text_max: The same for generated tokens.
        floor_max: The floor above which a reference counts as unstable, in nat.
        other_best_max, other_best_rise: The share of positions with another most probable token is
            at most *other_best_max*, and at most *other_best_rise* above the reference's own.
        perplexity_max: The difference of ln perplexity, either way.
        sampling_max: Standard errors by which the share of most probable tokens among the sampled
            ones may differ from its expectation.
        acceptance_band: By how much the share of accepted drafts may differ from the reference's.
        confidence: Of each one-sided limit.
        corpus: Paragraphs of the texts, by genre.
    """

    texts: Annotated[int, Meta(ge=8, le=256)]
    tokens: Annotated[int, Meta(ge=2, le=2048)]
    top: Annotated[int, Meta(ge=1, le=100)]
    decode_texts: Annotated[int, Meta(ge=8, le=256)]
    decode_prompt: Annotated[int, Meta(ge=2)]
    decode_tokens: Annotated[int, Meta(ge=2)]
    decode_batch: Annotated[int, Meta(ge=2)]
    kl_max: Positive
    kl_floors: Annotated[float, Meta(ge=1)]
    text_max: Positive
    decode_kl_max: Positive
    decode_text_max: Positive
    floor_max: Positive
    other_best_max: Share
    other_best_rise: Share
    perplexity_max: Positive
    sampling_max: Positive
    acceptance_band: Share
    confidence: Annotated[float, Meta(gt=0.5, lt=1)]
    corpus: Annotated[
        dict[str, Annotated[tuple[Paragraph, ...], Meta(min_length=1)]], Meta(min_length=1)
    ]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes that a reference shares with its policy."""
        return self.texts, self.tokens, self.top, self.decode_texts

    def corpus_texts(self) -> list[str]:
        """Return the texts: all paragraphs, in another order for each, alike on every machine."""
        paragraphs = [text.strip() for genre in sorted(self.corpus) for text in self.corpus[genre]]

        def text(number: int) -> str:
            # Sorted by a hash, as the order of a random generator may change between releases.
            ordered = sorted(paragraphs, key=lambda one: sha256_bytes(f"{number} {one}".encode()))
            joined = "\n\n".join([*ordered, ""])
            return (joined * (1 + LENGTH // len(joined)))[:LENGTH]

        return [text(number) for number in range(self.texts)]


class ReferenceInvalid(ServerInvalid):
    """A reference, or a server compared with it, does not count."""


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a server reported.

    Attributes:
        served: Its wheel, flags, backends, model and machine.
        name: The model's name, as the server has it. *vllm*: the server's version.
        shape: `LogprobsPolicy.shape`.
        texts: Token ids, a row per text.
        scores: Of every token but each text's first, text after text.
        floor: Per text, from a second pass of the same server: mean KL in nat, and the share of
            positions with another most probable token.
        decode: By mode, per text: mean KL of the generated tokens and their recomputation, in nat.
        acceptance: Share of the drafted tokens that were accepted; None without speculation.
    """

    served: ServerIdentity
    name: str
    vllm: str
    shape: tuple[int, int, int, int]
    texts: Ids
    scores: Scores
    floor: Floats
    decode: dict[str, Floats]
    acceptance: float | None


def save(reference: Reference, path: Path) -> None:
    """Write *reference* to *path*, completely or not at all: its digest, and its JSON."""
    # Arrays become base64 of their little-endian numbers.
    body = msgspec.json.encode(reference, enc_hook=lambda array: array.tobytes())
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(sha256_bytes(body).encode() + b"\n" + body)
    temporary.replace(path)


def load(path: Path) -> Reference:
    """
    Return the reference in the file at *path*, in bounded time and memory.

    Raises:
        ReferenceInvalid: It is too large, no such file, cut short or changed.
    """

    def array(kind: Any, text: str) -> Any:
        return np.frombuffer(base64.b64decode(text, validate=True), kind.__args__[1].__args__[0])

    try:
        with path.open("rb") as stream:
            digest, _, body = stream.read(LARGEST).partition(b"\n")
        if sha256_bytes(body).encode() != digest:
            raise ValueError("it was changed after it was written, or is incomplete")
        known = msgspec.json.decode(body, type=Reference, dec_hook=array)
        count, length, top, decoded = known.shape
        rows = {name: getattr(known.scores, name).reshape(-1, top + 1) for name in ("ids", "tops")}
        texts, floor = known.texts.reshape(count, length), known.floor.reshape(count, 2)
        sizes = [len(column) for column in (*rows.values(), known.scores.logprobs)]
        if sizes != [count * (length - 1)] * 3 or {*map(len, known.decode.values())} != {decoded}:
            raise ValueError("its sizes do not agree")
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path.name} is no recorded reference: {error!s:.200}"
        raise ReferenceInvalid("reference-damaged", message) from error
    return replace(known, texts=texts, floor=floor, scores=replace(known.scores, **rows))
