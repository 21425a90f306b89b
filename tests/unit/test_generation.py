"""G4: its policy, its pure checks, and whole runs on servers of a small model that are sound or wrong in one way."""

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from scipy.stats import binom
from tests.support import byte_model_server, dirty_server

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server.client import Client, ServerInvalid, ToolCall
from sparkwright.core import strict_yaml
from sparkwright.gates import dirty_text, generation, text_checks
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check

ROOT = Path(__file__).parents[2]
REAL = strict_yaml.load(ROOT / "ci" / "gates" / "generation.yaml", text_checks.GenerationPolicy)
TEXTS = strict_yaml.load(ROOT / "tests" / "server" / "learnt_texts.yaml", dict[str, str])
#: A byte is a token, so texts are longer in tokens, and the lengths of contexts smaller.
POLICY = replace(
    REAL, deep=text_checks.Deep(prompt=64, temperature=0.8, every=16, top=20, kl_max=0.2),
    profiles={"default": replace(REAL.profiles["default"], context=(1500, 2500, "maximum"), deep=160)},
    dirty_text=replace(REAL.dirty_text, answers=8, rounds=2),
)  # fmt: skip
C = "vllm:corrupted_requests_total"


CALL = {"town": "Lisbon", "crates": 12, "urgent": True}
QUIET = {"town": "Oslo", "crates": 7, "urgent": False}


#: What a sound model answers to each chat of the policy.
ANSWERS: Mapping[str, tuple[byte_model_server.Message, str]] = {
    "chat-capital": ({"content": "Canberra"}, "stop"), "chat-cut": ({"content": "Once upon"}, "length"),
    "tool-auto": (byte_model_server.called(CALL), "tool_calls"), "tool-required": (byte_model_server.called(QUIET), "stop"),
    "reasoning-trains": ({"reasoning": "95 minutes later", "content": "At 11:15."}, "stop"),
    "structured-delivery": ({"content": json.dumps(CALL)}, "stop"),
    "image-red": ({"content": "Red."}, "stop"), "image-blue": ({"content": "It is blue."}, "stop"),
}  # fmt: skip


def recipe(**fields: Any) -> recipes.Recipe:
    """Return a recipe of a model with every ability."""
    return replace(recipes.load(ROOT, "toy-cpu"), **{"abilities": tuple(generation.ABILITIES), "tool_parser": "hermes", **fields})


#: The continuations of all prompts, and the facts.
FACTS = {"fact-door": " marigold, says the note.", "fact-bell": " Henrik Solberg, it says.", "fact-boat": " nineteenth of each month."}
MEMORY = {prompt.text: TEXTS[name] for name, prompt in POLICY.prompts.items()} | {fact.text: FACTS[name] for name, fact in POLICY.facts.items()}


class Fleet:
    """A sound server that drafts tokens, and the launches without drafts that the gate asks for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack, self.launches = stack, 0
        self.server = self.start()

    def start(self) -> byte_model_server.ByteModelServer:
        chats = {chat.image or chat.text: ANSWERS[name] for name, chat in POLICY.chats.items()}
        server = self._stack.enter_context(byte_model_server.ByteModelServer(MEMORY, chats))
        server.drafts = True
        return server

    @contextlib.contextmanager
    def relaunch(self) -> Iterator[Client]:
        self.launches += 1
        yield self.start().client


@pytest.fixture(name="fleet")
def _fleet() -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(stack)


@functools.cache
def stock() -> dirty_text.StockText:
    """Return what a stock wheel answers that is sound."""
    with byte_model_server.ByteModelServer() as server:
        return dirty_text.record(POLICY, server.client, "{prompt}", recipe(), ServerIdentity(wheel="b" * 64))


def judged(fleet: Fleet, **options: Any) -> dict[str, Check]:
    """Return the checks of the fleet's server; each reason is declared."""
    options = {"recipe": recipe(), "relaunch": fleet.relaunch, "stock": stock(), **options}
    found = generation.run(options.pop("policy", POLICY), fleet.server.client, **options)
    assert {check.reason for check in found} - {""} <= set(generation.REASONS)
    return {check.name: check for check in found}


def test_a_sound_server_passes_every_check(fleet: Fleet) -> None:
    """Answers, contexts, abilities, a long generation and rates; a clean server is not started again."""
    found = judged(fleet)

    assert {name: check.message for name, check in found.items() if check.state != "pass"} == {}
    assert {*generation.QUICK, *generation.FURTHER, "context-1500", "context-maximum"} < set(found)
    assert found["answers"].figures[0].value == len(POLICY.prompts)
    assert fleet.launches == 0


DEEP = byte_model_server.only(lambda step: step.decoded > 100 and len(step.tokens) < 64 + 200)
FAR = byte_model_server.only(lambda step: len(step.tokens) > 2200)


#: What is wrong → the damage, the check that must fail and why, and the tokens of a block of the prefix cache.
MUTANTS: Mapping[str, tuple[byte_model_server.Damage, str, str, int]] = {
    "long-context damage": (FAR, "context-2500", "facts-missing", 16),
    "long-context damage at the maximum": (FAR, "context-maximum", "facts-missing", 16),
    "deep-decode garbage": (DEEP, "deep-decode", "deep-damage", 16),
    # Hybrid models have blocks of 544 tokens, and a prompt of 512 found none of them.
    "deep-decode garbage after a hit of a large block": (byte_model_server.only(lambda step: step.cached >= 96 and step.decoded > 100), "deep-decode", "deep-damage", 96),
    "NaN logits": (lambda logits, _: logits * np.nan, "replies", "not-a-number", 16),
    "everything wrong": (byte_model_server.only(lambda _: True), "answers", "answers-wrong", 16),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "name", "reason", "block"), MUTANTS.values(), ids=MUTANTS)
def test_a_server_that_is_wrong_in_one_way_fails(fleet: Fleet, damage: byte_model_server.Damage, name: str, reason: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_model_server, "BLOCK", block)
    fleet.server.damage = damage
    found = judged(fleet)[name]

    assert (found.state, found.reason) == ("fail", reason)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_a_long_generation_that_ends_early_is_damaged_from_its_end(fleet: Fleet, length: int) -> None:
    """It must not end, whatever token it meets; the gate gives a verdict instead of an error."""
    fleet.server.answer = byte_model_server.ended(length, POLICY.profiles["default"].deep)
    found = judged(fleet)["deep-decode"]

    assert (found.state, found.reason) == ("fail", "deep-damage")
    assert f"the first {length} of 160 tokens" in found.message


def test_drafts_are_there_if_the_recipe_has_them(fleet: Fleet) -> None:
    fleet.server.drafts = False
    drafting = recipes.load(ROOT, "qwen3.6-35b-a3b-nvfp4-mtp3").speculation
    found = judged(fleet)["dirty-text-drafts"]

    assert (found.state, found.reason, found.required) == ("not-run", "no-speculation", False)
    assert judged(fleet, recipe=recipe(speculation=drafting))["dirty-text-drafts"].reason == "speculation-absent"


#: A fault of the template, a parser or the model → the chat, what comes in place of its answer, and the check.
CHATS: Mapping[str, tuple[str, byte_model_server.Message, str, str]] = {
    "endless answer": ("chat-capital", {"content": "Canberra Canberra"}, "length", "chat"),
    "answer that does not stop at the limit": ("chat-cut", {"content": "Once"}, "stop", "chat"),
    "wrong template": ("chat-capital", {"content": "Sydney, of course"}, "stop", "chat"),
    "marks of the template in the answer": ("chat-capital", {"content": "<|im_start|>Canberra"}, "stop", "chat"),
    "tool call left in the text": ("tool-auto", {"content": '<tool_call>{"town": "Lisbon"}'}, "stop", "tool-calls"),
    "tool not called": ("tool-required", {"content": "All right."}, "stop", "tool-calls"),
    "arguments of another schema": ("tool-required", byte_model_server.called({**QUIET, "crates": "seven"}), "tool_calls", "tool-calls"),
    "arguments cut": ("tool-auto", byte_model_server.called('{"town": "Lis'), "tool_calls", "tool-calls"),
    "wrong arguments": ("tool-auto", byte_model_server.called({**CALL, "crates": 21}), "tool_calls", "tool-calls"),
    "reasoning left in the answer": ("reasoning-trains", {"content": "<think>hm</think>11:15"}, "stop", "reasoning"),
    "reasoning not separated": ("reasoning-trains", {"content": "Well, 11:15"}, "stop", "reasoning"),
    "no JSON": ("structured-delivery", {"content": "Lisbon, 12, urgent"}, "stop", "structured-output"),
    "image not seen": ("image-blue", {"content": "Red."}, "stop", "images"),
}


def chats(fleet: Fleet, recipe: recipes.Recipe | None) -> dict[str, Check]:
    """Return the checks of the abilities alone."""
    server = generation.QuestionedServer(fleet.server.client, POLICY.profiles["default"], recipe, None, 4096)
    return {check.name: check for check in generation._chats(POLICY, server)}


@pytest.mark.parametrize(("name", "message", "finish", "check"), CHATS.values(), ids=CHATS)
def test_a_chat_that_goes_wrong_fails_its_ability_alone(fleet: Fleet, name: str, message: byte_model_server.Message, finish: str, check: str) -> None:
    chat = POLICY.chats[name]
    fleet.server.chats[chat.image or chat.text] = (message, finish)
    found = chats(fleet, recipe())

    assert [one.name for one in found.values() if one.state != "pass"] == [check]
    assert (found[check].state, found[check].reason) == ("fail", f"{check}-wrong")
    assert found[check].samples[0].case == name


#: Without what takes long and is no matter of the stock wheel's answers.
SHORT = replace(POLICY, profiles={"default": replace(POLICY.profiles["default"], context=(1500,), deep=64, no_dirty_text="it takes long")})


def weak(fleet: Fleet, *names: str, ours: Sequence[str] | None = None) -> dict[str, Check]:
    """Return the checks of a server that answers *ours* of the questions wrongly, or *names* as the stock wheel does."""
    texts = {**{name: prompt.text for name, prompt in (*POLICY.prompts.items(), *POLICY.facts.items())}, **{name: chat.text for name, chat in POLICY.chats.items()}}

    def forget(names: Sequence[str]) -> None:
        fleet.server.memory = {key.encode(): value.encode() + bytes([4]) for key, value in MEMORY.items() if key not in {texts[name] for name in names}}
        fleet.server.chats = {chat.image or chat.text: ({"content": "What?"}, "stop") if name in names else ANSWERS[name] for name, chat in POLICY.chats.items()}

    forget(names)
    known = generation.record(SHORT, fleet.server.client, "default", recipe(), ServerIdentity(wheel="b" * 64))
    forget(names if ours is None else ours)
    return judged(fleet, stock_answers=known, policy=SHORT)


@pytest.mark.parametrize(("names", "passing", "undecided"), [
    # Eleven prompts, of which ten are to be right.
    (("fact-capital", "fact-water", "arithmetic-sum"), ["answers"], []),
    (("tool-required",), ["tool-calls"], []),
    (("fact-bell",), ["context-1500"], []),
    # Nothing shows that the ability is there.
    (("tool-auto", "tool-required"), [], ["tool-calls"]), (("fact-door", "fact-boat"), [], ["context-1500"]),
])  # fmt: skip
def test_question_that_the_stock_wheel_answers_wrongly_too_fails_nothing(fleet: Fleet, names: Sequence[str], passing: Sequence[str], undecided: Sequence[str]) -> None:
    """The model's own weakness is no fault of the wheel; the samples still show it."""
    found = weak(fleet, *names)

    assert {name: (check.state, check.reason) for name, check in found.items() if check.required and check.state != "pass"} == dict.fromkeys(undecided, ("inconclusive", "stock-wrong-too"))
    assert {sample.case for name in (*passing, *undecided) for sample in found[name].samples} == set(names)


@pytest.mark.parametrize(("stock", "ours", "failing"), [
    ((), ("tool-required",), "tool-calls"), (("tool-auto",), ("tool-required",), "tool-calls"), (("tool-auto",), ("tool-auto", "tool-required"), "tool-calls"),
    (("fact-capital", "fact-water"), ("fact-planet", "code-c"), "answers"), (("fact-door",), ("fact-bell",), "context-1500"),
])  # fmt: skip
def test_question_that_the_stock_wheel_answers_rightly_fails_ours(fleet: Fleet, stock: Sequence[str], ours: Sequence[str], failing: str) -> None:
    """As many wrong answers, of other questions, are no excuse; a prompt or two may go another way."""
    found = weak(fleet, *stock, ours=ours)[failing]

    assert (found.state, found.reason in ("tool-calls-wrong", "answers-wrong", "facts-missing")) == ("fail", True)


def test_answers_of_a_stock_wheel_that_was_asked_otherwise_excuse_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """Text around the prompts makes other questions; the gate is invalid, and wrong answers count."""
    known = generation.record(SHORT, fleet.server.client, "default", recipe(), ServerIdentity(wheel="b" * 64))
    (tmp_path / generation.ANSWERS).write_bytes(msgspec.json.encode(known))
    shapes = {wrap: generation.shape(replace(SHORT, profiles={"default": replace(SHORT.profiles["default"], wrap=wrap)}), "default") for wrap in ("{prompt}", "<s>{prompt}")}
    read = {wrap: dirty_text.reference(tmp_path / generation.ANSWERS, ServerIdentity(wheel="c" * 64), generation.ANSWERS_STOCK, shape) for wrap, shape in shapes.items()}

    assert read["{prompt}"] == known
    found = judged(fleet, stock_answers=read["<s>{prompt}"], policy=SHORT)[generation.ANSWERS_STOCK]
    assert (found.state, found.reason, found.required) == ("invalid", "reference-other-policy", True)


def test_server_that_ends_while_it_is_asked_shows_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the silence of the stock wheel would excuse every wrong answer of ours, and ours would be a failure of the wheel."""
    def gone(*_: object, **__: object) -> None:
        raise ServerInvalid("server-unreachable", "it is gone")

    monkeypatch.setattr(Client, "chat", gone)
    with pytest.raises(ServerInvalid, match="gone"):
        generation.record(SHORT, fleet.server.client, "default", recipe(), ServerIdentity(wheel="b" * 64))
    assert {check.state for check in generation.run(SHORT, fleet.server.client, recipe=recipe())} == {"pass", "invalid", "not-run"}


def test_abilities_that_no_recipe_declares_are_not_asked(fleet: Fleet) -> None:
    """A recipe without an ability is not judged by it; without a recipe the gate is no pass."""
    some = chats(fleet, recipe(abilities=("chat",))).values()
    none = chats(fleet, None).values()

    assert {check.name: check.required for check in some if check.state == "not-run"} == dict.fromkeys(list(generation.ABILITIES.values())[1:], False)
    assert {(check.reason, check.required) for check in none} == {("not-asked", True)}


@pytest.mark.parametrize(("designed", "required"), [(4096, True), (1024, False)])
def test_a_context_beyond_the_server_is_not_run(fleet: Fleet, designed: int, required: bool) -> None:
    """It counts, unless the recipe keeps the context short by design."""
    fleet.server.limit = 1024
    plan = replace(recipe().plan, max_model_len=designed)
    found = judged(fleet, recipe=recipe(plan=plan), policy=replace(POLICY, profiles={"default": replace(POLICY.profiles["default"], deep=1000)}))

    assert {found[name].reason for name in ("context-1500", "context-2500", "deep-decode")} == {"context-too-short"}
    assert {found[name].required for name in ("context-1500", "context-2500", "deep-decode")} == {required}
    assert found["context-maximum"].state == "pass"


def test_a_profile_leaves_the_rate_out_with_its_reason(fleet: Fleet) -> None:
    """Such checks decide nothing, so a release that asks for them does not take the pass; after a soak only the answers are judged."""
    kind = replace(POLICY.profiles["default"], no_dirty_text="it answers nothing")
    policy = replace(POLICY, profiles={"default": kind})
    whole, quick = judged(fleet, policy=policy), judged(fleet, policy=policy, quick=True)

    assert {(check.name, check.reason, check.message, check.required) for check in whole.values() if check.state != "pass"} == {
        (name, "policy-skips", "it answers nothing", False) for name in generation.DIRTY
    }
    assert set(quick) == {"replies", *generation.QUICK}


@pytest.mark.parametrize(("change", "name", "reason"), [
    ({"name": "another"}, "replies", "model-mismatch"), ({}, "replies", "server-unreachable"),
])  # fmt: skip
def test_a_reply_that_does_not_count_ends_the_gate(fleet: Fleet, change: dict[str, Any], name: str, reason: str) -> None:
    """What was not asked is listed as not run."""
    client = fleet.server.client if change else Client("http://127.0.0.1:9", deadline=5)
    for field, value in change.items():
        client.model()
        setattr(fleet.server, field, value)
    found = {check.name: check for check in generation.run(POLICY, client, quick=True)}

    assert (found[name].state, found[name].reason) == ("invalid", reason)
    assert {found[check].state for check in generation.QUICK} == {"not-run"}


@pytest.mark.parametrize(("metrics", "state"), [({}, "not-run"), ({C: 0.0}, "pass"), ({C: 1.0}, "fail"), ({C: -1.0}, "fail"), ({C: float("nan")}, "fail")])
def test_the_counter_of_nan_exists_and_is_zero(metrics: dict[str, float], state: str) -> None:
    assert text_checks.corrupted(metrics).state == state


#: Texts by name.
NATURAL = json.loads(Path(__file__).with_name("natural_texts.json").read_text("utf-8"))


@pytest.mark.parametrize("name", NATURAL)
def test_natural_texts_are_clean(name: str) -> None:
    """Prose in ten languages, code, tables and lists of numbers are no dirt, and in no language but their own."""
    rules, text = REAL.dirty_text, NATURAL[name]["text"][: NATURAL[name]["cl100k"][0]]
    own = name if name in rules.languages else "english"

    assert not dirty_text.find_dirt(rules, dirty_text.SampledAnswer(0, text, (), "length"), set())
    assert dirty_text.features(rules, text, rules.words) & {*rules.languages} <= {own}


def test_half_of_dirty_answers_fail_without_a_stock_wheel(fleet: Fleet) -> None:
    """Garbage under every switch is behind none, and no reference is needed to see it; without one the gate is no pass."""
    fleet.server.talk = dirty_server.Talker(fleet.server, 2, lambda *_: True)
    found = judged(fleet, stock=dirty_text.NOT_NAMED)

    assert (found["dirty-text"].state, found["dirty-text"].reason) == ("fail", "text-dirty")
    assert (found["dirty-text-stock"].state, found["dirty-text-stock"].required) == ("not-run", True)


def test_doubt_is_not_settled_without_time(fleet: Fleet) -> None:
    """Neither further rounds nor a server without drafts begin; what was not settled is no finding, and the other checks are made."""
    fleet.server.drafts, fleet.server.talk = True, dirty_server.Talker(fleet.server, 2, lambda *_: True)
    found = {check.name: check for check in generation.run(POLICY, fleet.server.client, recipe=recipe(), relaunch=fleet.relaunch, stock=stock(), deadline=0.0)}

    assert [(found[name].state, found[name].reason) for name in ("dirty-text", "dirty-text-drafts")] == [("not-run", "budget-spent")] * 2
    assert fleet.launches == 0
    assert found["deep-decode"].state == "pass"
    assert {check.state for check in found.values()} == {"pass", "not-run"}


def test_a_server_without_a_chat_template_completes_texts(fleet: Fleet) -> None:
    """The message says so, quoting the server, and answers are counted all the same."""
    fleet.server.template = False
    memory = fleet.server.memory
    for number in range(2, 8):
        for text in REAL.dirty_text.chats:
            memory[text.replace("{number}", str(number)).encode()] = b"One sees a heron and two boats." + bytes([4])
    found = judged(fleet)

    assert found["dirty-text"].state == "pass"
    assert "refuses chats" in found["dirty-text"].message
    assert "chat_template is not set" in found["dirty-text"].message
    assert found["dirty-text-stock"].reason == "reference-other-policy"


def test_a_server_without_a_prefix_cache_is_judged_without_that_switch(fleet: Fleet) -> None:
    """As many answers are asked with each position of the others."""
    fleet.server.caches = False
    found = judged(fleet)

    assert (found["dirty-text-cache"].reason, found["dirty-text-cache"].required) == ("prefix-cache-unused", False)
    assert found["dirty-text"].figures[0].count == 2 * POLICY.dirty_text.answers


#: What stands in an answer to a question in English, or to one that asks for a call → what is dirty in it; empty for nothing.
DIRT: Sequence[tuple[byte_model_server.Message, str]] = (
    ({"content": "One sees 三 herons."}, "CJK"), ({"content": "One sees żurawie."}, "LATIN WITH"), ({"content": "A \ufffd heron."}, "U+FFFD"),
    ({"content": "<|im_end|>"}, "is left"), ({"content": "[TOOL_CALLS] []"}, "is left"), ({"content": "<｜tool▁calls▁begin｜>"}, "is left"),
    ({"content": "Am Fluss sieht man einen Reiher und zwei Boote, und das Wasser ist nicht tief."}, "german"),
    ({"content": "again and " * 8}, "again and again"), ({"content": "One meets a heron near the mill. " * 3}, "again and again"),
    ({"content": " \n"}, "an empty answer"), (byte_model_server.called({"town": "Oslo"}), "missing required field"), (byte_model_server.called("{"), "truncated"),
    ({"content": "About 5 µm, or π/2, in the café of Núñez: 144 144 144."}, ""), ({"content": "The heron waits, the heron waits; it waits."}, ""),
    (byte_model_server.called({**CALL, "town": "Li\ufffdbon"}), "U+FFFD"), (byte_model_server.called(CALL), ""), ({"content": "…cut in a character\ufffd\ufffd"}, ""),
)  # fmt: skip


@pytest.mark.parametrize(("message", "fault"), DIRT)
def test_dirt_is_named(fleet: Fleet, message: byte_model_server.Message, fault: str) -> None:
    """Units, formulas, loans, names, a few repetitions and an answer that is cut are none."""
    fleet.server.talk = lambda *_: (message, "stop")
    text = dirty_text.DirtyText(replace(POLICY, dirty_text=replace(POLICY.dirty_text, calls=(), chats=REAL.dirty_text.chats[:1])), fleet.server.client, "{prompt}", None)
    dirt = {sample.actual for sample in next(text.judge(fleet.server.client, dirty_text.NOT_NAMED)).samples}

    assert all(fault in found for found in dirt) if fault else not dirt, dirt
    assert bool(dirt) == bool(fault)


def test_questions_to_a_server_without_chats_are_others_in_another_markup(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ServerInvalid("server-refused", "there is no chat template", 400)

    def shapes() -> set[str]:
        return {dirty_text.DirtyText(POLICY, fleet.server.client, wrap, None).shape for wrap in ("{prompt}", "<s>{prompt}")}

    assert len(shapes()) == 1
    monkeypatch.setattr(Client, "chat", refuse)
    assert len(shapes()) == 2


ENGLISH, SPANISH = "All right.", "La casa y el río es muy bonita, pero las flores."


@pytest.mark.parametrize(("theirs", "ours", "words", "failing", "fault"), [
    (0, 0, ENGLISH, [], ""), (2, 100, ENGLISH, ["dirty-text", "dirty-text-stock"], "no call"), (20, 100, ENGLISH, ["dirty-text-stock"], "no call"),
    (20, 20, ENGLISH, [], ""), (100, 100, ENGLISH, [], ""), (100, 100, SPANISH, ["dirty-text"], "spanish"),
])  # fmt: skip
def test_call_that_is_not_made_is_dirt_on_both_sides(theirs: int, ours: int, words: str, failing: Sequence[str], fault: str, fleet: Fleet) -> None:
    """
    A model that answers some questions without the tool is as it is, but ours may not do so more often than the stock wheel; both are in %.
    Other dirt in such an answer is not excused.
    """
    def message(number: int, share: int, text: str) -> byte_model_server.Message:
        return {"content": text} if number // 2 * 37 % 100 < share else byte_model_server.called(CALL)

    calls = (ToolCall(text_checks.TOOL, json.dumps(CALL)),)
    answers = (dirty_text.SampledAnswer(number, ENGLISH, () if "content" in message(number, theirs, "") else calls, "stop") for number in range(1000))
    policy = replace(POLICY, dirty_text=replace(POLICY.dirty_text, chats=REAL.dirty_text.chats[:1], calls=REAL.dirty_text.calls[:1]))
    text = dirty_text.DirtyText(policy, fleet.server.client, "{prompt}", recipe())
    fleet.server.talk = lambda request, *_: (message(request["seed"], ours, words) if request.get("tools") else {"content": ENGLISH}, "stop")
    found = {check.name: check for check in text.judge(fleet.server.client, dirty_text.StockText(ServerIdentity(wheel="b"), text.shape, tuple(answers)))}

    assert [name for name, check in found.items() if check.state == "fail"] == failing
    assert all(fault in found[name].samples[0].actual for name in failing)


@pytest.mark.parametrize("tables", [[(3, 40, 1, 38)], [(9, 9, 8, 8), (2, 12, 0, 9), (5, 7, 1, 8), (0, 6, 0, 6)]])
def test_chance_of_dirty_answers_is_exact(tables: list[tuple[int, int, int, int]]) -> None:
    """It is counted over all ways to deal the dirty answers to both sides, question by question: dirty ones and all of this side, then of the other."""
    treated, control = list[tuple[int, str]](), list[tuple[int, str]]()
    dealt = []
    for question, (dirty, count, other, answers) in enumerate(tables):
        for side, wrong, size in ((treated, dirty, count), (control, other, answers)):
            side += [(question, "dirt" if number < wrong else "") for number in range(size)]
        dealt.append([(more, math.comb(count, more) * math.comb(answers, dirty + other - more)) for more in range(dirty + other + 1)])
    every = [(sum(more for more, _ in way), math.prod(times for _, times in way)) for way in itertools.product(*dealt)]
    observed = sum(dirty for dirty, *_ in tables)

    assert dirty_text.chance(treated, control) == pytest.approx(sum(times for more, times in every if more >= observed) / sum(times for _, times in every), rel=1e-9)


def test_question_that_is_always_answered_badly_hides_no_dirt() -> None:
    """Seen on a GPU: one of ten questions was dirty for the stock wheel, too, and nine more dirty answers of 1,800 passed."""
    always = [(number % 10, "dirt" if number % 10 == 7 else "") for number in range(1800)]
    dirtier = [(question, fault or "dirt" if number % 200 == 0 else fault) for number, (question, fault) in enumerate(always)]
    found = dirty_text.compare_shares(REAL.dirty_text, "dirty-text-drafts", dirtier, always)

    assert (found.state, found.reason) == ("fail", "dirtier-with-drafts")


@pytest.mark.parametrize(("text", "finish", "fault"), [
    ('<tool_call>\n{"name": "record', "length", ""), ("<tool_call>\n<function=record>\n<parameter=town", "length", ""), ("Well. [TOOL_CALLS] [{", "length", ""),
    ('<tool_call>\n{"name": "record', "stop", "markup"), ("<tool_call>{}</tool_call> and", "length", "markup"), ("<|im_end|> <tool_call>\n{", "length", "markup"),
    ('<tool_call>\n{"name": "re\ufffdcord"', "length", "U+FFFD"),
])  # fmt: skip
def test_markup_of_a_call_that_is_cut_is_no_dirt(text: str, finish: str, fault: str) -> None:
    """An answer has a number of tokens; a call that ends there is no call to the server's parser, which leaves it in the text."""
    assert dirty_text.find_dirt(REAL.dirty_text, dirty_text.SampledAnswer(0, text, (), finish), set()).startswith(fault)
    assert fault or not dirty_text.find_dirt(REAL.dirty_text, dirty_text.SampledAnswer(0, text, (), finish), set())


def test_letters_of_most_stock_answers_are_not_foreign() -> None:
    """A question may ask for another script; single words in it are dirt of the stock wheel as well."""
    def stock_answers(share: int) -> dirty_text.StockText:
        answers = (dirty_text.SampledAnswer(number, "仓库" if number // 10 < share else "a store", (), "stop") for number in range(100))
        return dirty_text.StockText(ServerIdentity(wheel="b"), stock().shape, tuple(answers))

    with byte_model_server.ByteModelServer() as server:
        server.talk = lambda request, *_: ({"content": "仓库"}, "stop")
        failing = {}
        for share in (4, 6):
            text = dirty_text.DirtyText(replace(POLICY, dirty_text=replace(POLICY.dirty_text, calls=())), server.client, "{prompt}", None)
            failing[share] = next(text.judge(server.client, stock_answers(share))).state
    assert failing == {4: "fail", 6: "pass"}


@pytest.mark.parametrize(("change", "reason"), [
    ({}, ""), ({"wheel": "c" * 64}, "reference-is-candidate"), ({"wheel": ""}, "reference-unnamed"), ({"model": "m"}, "reference-other-model"),
    ("cut", "reference-damaged"), ("absent", "reference-damaged"), ("field", "reference-damaged"),
])  # fmt: skip
def test_answers_of_the_stock_wheel_are_read_strictly(change: dict[str, str] | str, reason: str, tmp_path: Path) -> None:
    """What was recorded is read; what is cut, of the candidate itself or of another model is not compared with."""
    path, text = tmp_path / dirty_text.TEXT, stock()
    if isinstance(change, dict):
        text = replace(text, served=replace(text.served, **change))
    data = msgspec.json.encode(text)
    if change != "absent":
        path.write_bytes(data[:-20] if change == "cut" else data.replace(b'"shape"', b'"more":1,"shape"') if change == "field" else data)
    found = dirty_text.reference(path, ServerIdentity(wheel="c" * 64))

    assert found == text if not reason else isinstance(found, Check) and (found.state, found.reason) == ("invalid", reason)


@pytest.mark.parametrize(("profile", "percent", "switch", "at_least"), [
    ("default", 1, "batch", 0.95), ("default", 1, "drafts", 0.99), ("default", 1, "stock", 0.8), ("default", 5, "batch", 0.999), ("fluent", 1, "drafts", 0.99),
])  # fmt: skip
def test_the_policy_detects_what_the_guide_promises(profile: str, percent: float, switch: str, at_least: float) -> None:
    """As many dirty answers as the check needs to fail, and whether the first round shows any."""
    rules = REAL.sized(profile).dirty_text
    half, every = rules.answers * rules.rounds, 2 * rules.answers * rules.rounds
    treated, control = {"batch": (half, half), "drafts": (every, every), "stock": (every, 2 * rules.answers)}[switch]

    def state(dirty: int) -> str:
        ours = [(number % 10, "dirt" if number < dirty else "") for number in range(treated)]
        return dirty_text.compare_shares(rules, f"dirty-text-{switch}", ours, [(number % 10, "") for number in range(control)]).state

    needed = next(dirty for dirty in range(treated) if state(dirty) == "fail")
    share = percent / 100
    power = (1 - (1 - share) ** (treated // rules.rounds)) * binom.sf(needed - 1, treated, share)

    assert power >= at_least
