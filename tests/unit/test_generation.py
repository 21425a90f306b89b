"""The words gate: its policy file, prompts made to length, and what it makes of answers."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal

from sparkwright.bench.server.openai_schema import Completion, Usage
from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.generation import checks as saidwords
from sparkwright.gates.generation import detectors
from sparkwright.gates.generation import gate as words
from sparkwright.gates.generation import policy as prompts
from sparkwright.gates.generation.checks import Said
from sparkwright.gates.generation.policy import Fitted, Long, Prompt

ROOT = Path(__file__).parents[2]
POLICY_FILE = ROOT / "ci" / "gates" / "generation.yaml"
POLICY = strict_yaml.load(POLICY_FILE, prompts.GenerationPolicy)
LONG = next(prompt for prompt in POLICY.prompts if prompt.kind == "long")
FACT = Prompt("fact", "fact", "Two and two are", r"\bfour\b")


def count(text: str) -> int:
    """Return a number of tokens as a tokenizer of words would count them."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def said(name: str = "fact", tokens: tuple[int, ...] = tuple(range(1, 201)), text: str = "four, of course", finish: str = "length") -> Said:
    """Return what was said to a prompt of that *name*."""
    prompt = replace(FACT, name=name)
    return Said(Fitted(prompt, prompt.text, 4), Completion(tokens, text, finish, Usage(4, len(tokens))), None, text, tokens)


def test_the_policy_asks_what_the_issue_asks() -> None:
    """Twelve prompts of every kind, 200 tokens, eleven right answers; every reference has its explanation."""
    assert len(POLICY.prompts) == 12
    assert {prompt.kind for prompt in POLICY.prompts} == {"fact", "arithmetic", "translation", "code", "cjk", "long"}
    assert (POLICY.tokens, POLICY.profiles["default"].answers, POLICY.profiles["default"].not_run) == (200, 11, {})
    assert {detector.reference for detector in detectors.DETECTORS} <= set(words.REASONS)


def test_no_prompt_gives_its_answer_away() -> None:
    """A model that repeats what it was asked has not answered; only the needle stands in its own prompt, far from its end."""
    for prompt in POLICY.prompts:
        assert not prompts.answered(prompt, prompt.text), prompt.name


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("tokens: 200", "tokens: 0", "tokens to be said"),
        ("name: fact-water", "name: fact-capital", "unique names"),
        ("answer: Canberra", 'answer: "("', "no regular expression"),
        ("answer: Canberra", 'answer: ".*"', "in every text"),
        ("kind: long", "kind: fact", "just the long prompts"),
        ("answers: 11", "answers: 13", "More right answers"),
        ("      answers: random", "      answer: random", "no check that may be left out"),
        ("      depth: 0.35", "      depth: 3.5", "depth from 0 to 1"),
        ('line: "Entry {number}', 'line: "Entry {count}', "no place for the {number}"),
        ("  run: 16 ", "  run: 0 ", "bounds out of range"),
        ("batch: 8 ", "bach: 8 ", "bach"),
    ],
)
def test_a_mistake_in_the_policy_is_named(before: str, after: str, message: str) -> None:
    """Every number of the file is held against its range when it is read."""
    text = POLICY_FILE.read_text("utf-8")
    assert before in text

    with refusal("file-invalid") as refused:
        strict_yaml.parse(text.replace(before, after, 1), prompts.GenerationPolicy, "generation.yaml")

    assert message.lower() in "\n".join(refused.value.details).lower()


@given(st.integers(60, 3000))
def test_a_long_prompt_is_as_long_as_asked(target: int) -> None:
    """It has at most the tokens that were asked for and nearly as many, and its needle stands in it once."""
    text, tokens = prompts.grown(LONG, "{prompt}", target, count)

    assert tokens == count(text) <= target
    assert tokens >= min(0.9 * target, target - 20)
    assert LONG.long
    assert text.count(LONG.long.needle) == 1
    assert text.endswith(LONG.text)


def test_a_long_prompt_that_is_longer_without_filling_is_as_short_as_it_can_be() -> None:
    """The question itself is never cut; that it does not fit is found by the one who knows the model's length."""
    text, tokens = prompts.grown(LONG, "{prompt}", 10, count)

    assert tokens > 10
    assert text.endswith(LONG.text)


def test_the_needle_lies_where_it_should() -> None:
    """The depth is a share of the filling, and the lines around it are all different."""
    made = prompts.filling(Long("Line {number} of {other}.", "Here.", 0.25), 100).splitlines()

    assert made.index("Here.") == 25
    assert len(set(made)) == 101


def test_long_prompts_ask_the_tokenizer_a_dozen_times() -> None:
    """Each question is a request to the server, over a text as long as the prompt."""
    asked: list[int] = []
    prompts.grown(LONG, "{prompt}", 8000, lambda text: asked.append(1) or count(text))  # type: ignore[func-returns-value]  # counts on the way

    assert len(asked) <= 14


@pytest.mark.parametrize(
    ("text", "again", "held"),
    [
        ("The sea is calm.", "<s> The sea is calm.", True),
        ("café", "cafe\u0301", True),
        ("two  blanks\nand lines", "two blanks and lines", True),
        ("日本の山", "日本の山", True),
        ("日本の山", "<unk><unk>の山", False),
        ("日本の山", "\ufffd\ufffd\ufffd", False),
        ("def f():", "def f", False),
    ],
)
def test_a_prompt_that_a_tokenizer_cannot_hold_is_seen(text: str, again: str, held: bool) -> None:
    """Unknown characters make another prompt of it; blanks and normal forms do not."""
    assert prompts.holds(text, again) is held


def test_reruns_that_differ_are_shown_at_the_place() -> None:
    """The sample says which prompt and which token."""
    one, other = Completion((1, 2, 3, 4), "", "length", Usage(4, 4)), Completion((1, 2, 9, 4), "", "length", Usage(4, 4))

    check = saidwords.identity([("fact", one, one), ("code", one, other)])

    assert (check.state, check.reason) == ("fail", "rerun-differs")
    assert [(sample.case, sample.expected, sample.actual) for sample in check.samples] == [("code, token 2", "3 4", "9 4")]
    assert saidwords.identity([("fact", one, one)]).state == "pass"


def test_nothing_that_was_not_seen_passes() -> None:
    """Without answers every check says that there were none."""
    empty = [replace(said(), first=None)]
    checks = [
        saidwords.count(empty, 200), saidwords.identity([]), saidwords.entropy({}, 0.01), saidwords.answers(empty, 1),
        saidwords.batch({}, {}, 8), *(saidwords.detected(empty, detector, POLICY.bounds) for detector in detectors.DETECTORS),
    ]  # fmt: skip

    assert {check.state for check in checks} == {"not-run"}


def test_a_wrong_number_of_tokens_fails() -> None:
    """With the end token ignored, every answer has the length that was asked for."""
    assert saidwords.count([said()], 200).state == "pass"
    assert saidwords.count([said(tokens=(1, 2))], 200).reason == "token-count-wrong"
    assert saidwords.count([said(finish="stop")], 200).reason == "token-count-wrong"


@pytest.mark.parametrize(("right", "wrong", "missing", "state"), [
    (12, 0, 0, "pass"), (11, 1, 0, "pass"), (10, 2, 0, "fail"), (10, 0, 2, "inconclusive"), (8, 2, 2, "fail"), (11, 0, 1, "pass"),
    (0, 0, 12, "not-run"),
])  # fmt: skip
def test_eleven_of_twelve_answers_must_be_right(right: int, wrong: int, missing: int, state: str) -> None:
    """Answers that did not arrive are neither right nor wrong."""
    made = [said(f"r{at}") for at in range(right)] + [said(f"w{at}", text="five") for at in range(wrong)]
    made += [replace(said(f"m{at}"), first=None) for at in range(missing)]

    assert saidwords.answers(made, 11).state == state


@pytest.mark.parametrize(("before", "after", "state", "reference"), [
    ({}, {}, "not-run", "counter-absent"),
    ({"c": 0.0}, {"c": 0.0}, "pass", ""),
    ({"c": 0.0}, {"c": 1.0}, "fail", "requests-corrupted"),
    ({"c": 2.0}, {"c": 2.0}, "fail", "requests-corrupted"),
    ({"c": 2.0}, {"c": 0.0}, "fail", "requests-corrupted"),
    ({"c": 0.0}, {"c": float("nan")}, "fail", "requests-corrupted"),
])  # fmt: skip
def test_the_counter_is_there_and_zero(before: dict[str, float], after: dict[str, float], state: str, reference: str) -> None:
    """A counter that is absent is no zero, and one that began anew hides nothing."""
    check = saidwords.corrupted(before, after, "c")

    assert (check.state, check.reason) == (state, reference)


def test_a_batch_only_informs() -> None:
    """Known differences of batched kernels decide nothing, but they are shown."""
    alone = {"fact": Completion((1, 2), "", "length", Usage(4, 2)), "code": Completion((1, 2), "", "length", Usage(4, 2))}
    check = saidwords.batch(alone, {"fact": alone["fact"], "code": "stream-truncated: half"}, 8)

    assert (check.state, check.required, len(check.samples)) == ("fail", False, 1)
    assert saidwords.batch(alone, dict(alone), 8).state == "pass"


def test_answers_cannot_write_to_the_terminal() -> None:
    """What a server says is shown without its control characters."""
    assert saidwords.excerpt("a\x1b[2Jb\nc\u202ed") == "a [2Jb c d"
    assert len(saidwords.excerpt("x" * 1000)) == 160


def test_an_unknown_profile_is_refused() -> None:
    """The kind of model decides what is judged, so a name mistyped must not fall back to another."""
    with pytest.raises(ValueError, match="no profile 'radnom'"):
        words.run(POLICY, None, "radnom")  # type: ignore[arg-type]  # refused before any server is asked


@given(st.lists(st.sampled_from(["pass", "fail", "none"]), min_size=1, max_size=12))
def test_a_detector_fails_with_every_answer_that_alarms(kinds: list[str]) -> None:
    """The check lists exactly the answers that alarm, and its figure is the worst of all."""
    bad = (*range(1, 150), *[7] * 51)
    made = [said(f"p{at}", tokens=bad) if kind == "fail" else said(f"p{at}") for at, kind in enumerate(kinds)]
    made = [replace(one, first=None) if kind == "none" else one for one, kind in zip(made, kinds, strict=True)]
    run = next(detector for detector in detectors.DETECTORS if detector.name == "same-token-run")

    check: Check = saidwords.detected(made, run, POLICY.bounds)

    assert check.state == ("fail" if "fail" in kinds else "pass" if "pass" in kinds else "not-run")
    assert [sample.case for sample in check.samples] == [f"p{at}" for at, kind in enumerate(kinds) if kind == "fail"]
    assert msgspec.json.decode(msgspec.json.encode(check), type=Check) == check
