"""
What broken kernels do to words, as numbers: repetition, one token everywhere, unreadable characters, a distribution that collapsed.

Pure functions of token ids, of text, or of log probabilities. Each measures one thing; `Bounds` says from where on it is an alarm. The
natural texts of tests/unit/natural_texts.json (prose in ten languages, code, tables, lists of numbers, under two tokenizers) hold the
other side: none of them alarms, and a test says how near each measure comes.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

#: What a decoder writes where bytes are no character.
REPLACEMENT = "\ufffd"

#: Runs of blanks, and rules drawn with punctuation: the indentation of code and the borders of tables compress like garbage does.
_DRAWN = re.compile(r"([ \t\n]|[-=_.*#~+|])\1{2,}")


def longest_run(tokens: Sequence[int], of: int | None = None) -> int:
    """Return the length of the longest run of one token; with *of*, of that token alone."""
    longest = length = 0
    for at, token in enumerate(tokens):
        length = length + 1 if at and token == tokens[at - 1] else 1
        if of is None or token == of:
            longest = max(longest, length)
    return longest


def top_share(tokens: Sequence[int]) -> float:
    """Return the share of the most frequent token, from 0 (no tokens) to 1."""
    return Counter(tokens).most_common(1)[0][1] / len(tokens) if tokens else 0.0


def distinct(tokens: Sequence[int], size: int = 4) -> float:
    """Return how many of the runs of *size* tokens are different ones, as a share; 1 where there are none."""
    runs = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def zlib_ratio(text: str) -> float:
    """Return how many times smaller *text* becomes under zlib, its drawn rules and runs of blanks cut to one character before."""
    data = _DRAWN.sub(r"\1", text).encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data, 9)) if data else 0.0


def replacement_share(text: str) -> float:
    """Return the share of U+FFFD among the characters; those at the very end do not count, as the last token may cut a character."""
    whole = text.rstrip(REPLACEMENT)
    # A stream that ends in more than a character's bytes of them was not cut, it is broken.
    whole = text if len(text) - len(whole) > 3 else whole
    return whole.count(REPLACEMENT) / len(whole) if whole else 0.0


def entropy(top: Collection[float]) -> float:
    """
    Return a lower bound, in nat, of the entropy of a distribution of which the log probabilities *top* are known.

    What is not listed counts as one outcome; merging outcomes only lowers the entropy (grouping property; Cover and Thomas, 2.2).

    Raises:
        ValueError: A log probability is not a number.
    """
    if any(math.isnan(one) for one in top):
        raise ValueError("a log probability is not a number")
    listed = [math.exp(one) for one in top if one > -math.inf]
    rest = max(0.0, 1.0 - sum(listed))
    return -sum(share * math.log(share) for share in (*listed, rest) if share > 0.0)


def mean_entropy(steps: Sequence[Mapping[int, float]]) -> float:
    """Return the mean of `entropy` over *steps*; infinity for none, as what was not seen did not collapse."""
    return math.fsum(entropy(step.values()) for step in steps) / len(steps) if steps else math.inf


def body(tokens: Sequence[int], ends: Collection[int]) -> tuple[int, ...]:
    """
    Return *tokens* up to the first that ends an answer.

    With ``ignore_eos`` a sound model that is done says its end token again and again, which is no repetition of its words.
    """
    stop = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[:stop])


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    From where on a measure is an alarm. Proposed in gates.md §3.3; not calibrated on a GB10.

    Attributes:
        run: Tokens of one kind in a row, at least.
        zeros: Tokens with the id 0 in a row, at least: the argmax of logits that are all NaN (``!!!!`` in vocabularies like GPT-2's).
        share: Share of the most frequent token, at least. Not 0.5: a list with a separator between its items has just that.
        distinct: Share of different runs of four tokens, below.
        ratio: Compression by zlib, at least.
        replacement: Share of U+FFFD among the characters, at least.
        entropy: Mean entropy in nat over all answers, below.
        short: Tokens before the answer's end, below; a model that is asked for much and says nothing is broken in another way.
    """

    run: int = 16
    zeros: int = 4
    share: float = 0.55
    distinct: float = 0.3
    ratio: float = 5.0
    replacement: float = 0.01
    entropy: float = 0.005
    short: int = 8

    def __post_init__(self) -> None:
        wrong = [name for name in ("share", "distinct", "replacement") if not 0 < getattr(self, name) <= 1]
        wrong += [name for name in ("run", "zeros", "ratio", "entropy", "short") if not getattr(self, name) > 0]
        if wrong:
            raise ValueError(f"bounds out of range: {', '.join(wrong)}")


class Detector(msgspec.Struct, frozen=True):
    """
    One measure of one answer.

    Attributes:
        name: The check's.
        reference: Why it fails.
        quantity: What is measured, with *unit*.
        measure: Of the tokens before the answer's end, and the answer's text.
        bound: Its field of `Bounds`.
        alarm: On which side of the bound it is an alarm.
    """

    name: str
    reference: str
    quantity: str
    measure: Callable[[Sequence[int], str], float]
    bound: str
    alarm: Literal["from", "below"] = "from"
    unit: str = ""

    def alarms(self, tokens: Sequence[int], text: str, bounds: Bounds) -> bool:
        found, bound = self.measure(tokens, text), getattr(bounds, self.bound)
        return bool(found >= bound if self.alarm == "from" else found < bound)


#: In the order in which they are reported.
DETECTORS: tuple[Detector, ...] = (
    Detector("nan-tokens", "token-zero-run", "longest run of token 0", lambda tokens, _: longest_run(tokens, 0), "zeros", unit="tokens"),
    Detector("same-token-run", "token-run", "longest run of a token", lambda tokens, _: longest_run(tokens), "run", unit="tokens"),
    Detector("top-token-share", "token-share", "share of the most frequent token", lambda tokens, _: top_share(tokens), "share"),
    Detector("distinct-4-grams", "repetition", "distinct 4-grams", lambda tokens, _: distinct(tokens), "distinct", "below"),
    Detector("zlib-ratio", "compressible", "zlib ratio", lambda _, text: zlib_ratio(text), "ratio"),
    Detector("replacement-characters", "unreadable", "share of U+FFFD", lambda _, text: replacement_share(text), "replacement"),
    Detector("answer-length", "answer-short", "tokens before the end", lambda tokens, _: len(tokens), "short", "below", unit="tokens"),
)


def alarms(tokens: Sequence[int], text: str, bounds: Bounds) -> tuple[str, ...]:
    """Return the names of the detectors that alarm on an answer."""
    return tuple(detector.name for detector in DETECTORS if detector.alarms(tokens, text, bounds))
