"""The detectors of broken words: what each alone finds, that natural texts alarm none, and their algebra."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkwright.bench.server.client import Completion, Usage
from sparkwright.core import strict_yaml
from sparkwright.gates.generation import checks
from sparkwright.gates.generation.checks import DETECTORS, GenerationPolicy

BOUNDS = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "generation.yaml", GenerationPolicy).bounds
#: Texts by name: the text, and by tokenizer how many of its characters 200 tokens cover, and those tokens, numbered as they appear from 1.
NATURAL = json.loads(Path(__file__).with_name("natural_texts.json").read_text("utf-8"))
CASES: dict[str, tuple[str, list[int]]] = {
    f"{name}-{tokenizer}": (found["text"][: found[tokenizer][0]], found[tokenizer][1])
    for name, found in NATURAL.items()
    for tokenizer in ("cl100k", "deepseek")
    if name != "matrix"
}

#: A walk through 1,000 tokens that repeats nothing, and words to go with it.
PLAIN = [1 + (37 * at) % 1000 for at in range(200)]
WORDS = " ".join(f"{zlib.crc32(str(at).encode()):x}" for at in range(90))


def alarms(ids: Sequence[int], text: str) -> tuple[str, ...]:
    """Return the detectors that an answer sets off."""
    answers = {"one": Completion(tuple(ids), text, "length", Usage(1, len(ids)))}
    return tuple(one.name for one in DETECTORS if checks.detected(answers, one, BOUNDS).state == "fail")


def scattered(share: float) -> list[int]:
    """Return the plain walk in which a token stands at random places, never twice in a row."""
    draw, made = random.Random(1), list(PLAIN)
    places = draw.sample(range(0, 200, 2), round(share * 200)) if share <= 0.5 else list(range(0, 200, 2))
    extra = list(range(1, 200, 8))[: max(0, round(share * 200) - 100)]
    for at in (*places, *extra):
        made[at] = 5000
    return made


#: For each detector an answer that it alone finds.
ALONE = {
    "nan-tokens": ([*PLAIN[:50], 0, 0, 0, 0, 0, *PLAIN[55:]], WORDS),
    "same-token-run": ([*PLAIN[:50], *[7] * 20, *PLAIN[70:]], WORDS),
    "top-token-share": (scattered(0.6), WORDS),
    "distinct-4-grams": ((PLAIN[:40] * 5)[:200], WORDS),
    "zlib-ratio": (PLAIN, "".join(f"Item {at}: the value is good and nothing else is to be said. " for at in range(20))),
    "replacement-characters": (PLAIN, WORDS[:200] + "\ufffd" * 12 + WORDS[200:]),
    "answer-length": (PLAIN[:5], WORDS[:20]),
}


@pytest.mark.parametrize("name", [detector.name for detector in DETECTORS])
def test_each_detector_finds_what_no_other_finds(name: str) -> None:
    """Were a detector left out, an answer of its kind would pass."""
    assert alarms(*ALONE[name]) == (name,)


@pytest.mark.parametrize("name", CASES)
def test_natural_texts_alarm_nothing(name: str) -> None:
    """Prose in ten languages, code, tables and lists of numbers are not taken for garbage."""
    text, ids = CASES[name]

    assert alarms(ids, text) == ()


def test_a_matrix_of_zeros_is_the_known_false_alarm() -> None:
    """What a rule gets wrong is written down: a table of zeros repeats itself as a loop does."""
    found = NATURAL["matrix"]

    assert alarms(found["cl100k"][1], found["text"]) == ("distinct-4-grams",)


def test_the_last_character_may_be_cut() -> None:
    """An answer of a fixed number of tokens ends in the middle of a character now and then; one in its midst is broken."""
    chinese = "这座城市有三千多年的历史" * 4

    assert checks.replacement_share(chinese + "\ufffd\ufffd") == 0
    assert checks.replacement_share(chinese + "\ufffd" * 4) > 0.05
    assert checks.replacement_share("\ufffd" + chinese) > 0.01


def collapse(*steps: dict[int, float]) -> str:
    answer = Completion((1,) * len(steps), "", "length", Usage(1, len(steps)), logprobs=steps)
    return checks.collapse({"fact": answer}, 0.005).reason


def test_a_probability_that_is_no_number_is_no_entropy() -> None:
    """NaN is not averaged away, and a distribution on one token has none."""
    assert collapse({1: -0.1}, {1: math.nan}) == "not-a-number"
    assert collapse({1: 0.0, 2: -math.inf}) == "entropy-collapsed"
    assert collapse({1: -0.7, 2: -0.7}) == ""
