"""
The rate of dirty answers: ours against the stock wheel's, and each switch against its absence.

What users meet under drafts, concurrency and a prefix cache is rare: a word in a foreign script,
half a character, markup that leaks, a tool call that is cut. A sound mixture of experts words an
answer in another way now and then, so no single text decides. Answers are sampled, each with a seed
of its own, and the shares of dirty ones are compared by an exact test, one-sided, with Bonferroni's
correction. Each question is compared with itself, as a model may answer one of them badly always.
"""

import re
import time
import unicodedata
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server.client import Client, ServerInvalid, ToolCall
from sparkwright.core.console import console, one_line
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.gates import text_checks
from sparkwright.gates.core.ladder import BUDGET_SPENT
from sparkwright.gates.core.server_under_test import (
    CACHE_HITS,
    DRAFTS,
    Recorded,
    ServerIdentity,
    cache_block,
    find_stock,
)
from sparkwright.gates.core.verdict import Check, Figure, Sample, invalid, judged, not_run
from sparkwright.gates.long_text import long_text

#: The file of the reference folder.
TEXT = "text.json"

#: Check → its reason, and the answers of both sides, for people.
COMPARISONS: Mapping[str, tuple[str, str, str]] = {
    "dirty-text-stock": ("dirtier-than-stock", "of this wheel", "of the stock wheel"),
    "dirty-text-batch": ("dirtier-in-batches", "in batches", "alone"),
    "dirty-text-cache": ("dirtier-with-cache", "with a cached prefix", "with a cold cache"),
    "dirty-text-drafts": ("dirtier-with-drafts", "with drafts", "without drafts"),
}

#: The fault of an answer that should have called the tool and did not.
NO_CALL = "no call"

#: Whether requests come in batches, and whether their common beginning is cached.
Cell = tuple[bool, bool]
BATCHED, CACHED = range(2)
#: A question, and what is dirty in an answer to it; empty if nothing.
JudgedAnswer = tuple[int, str]

#: Rules and blanks, whose runs are no repetition, as tables and code have them.
_DRAWN = r"\s=_.*#~+|-"
#: The most characters in which a repetition is looked for.
LONGEST = 4000


class SampledAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    An answer to the question *number*.

    Attributes:
        text: The reasoning and the content.
    """

    number: int
    text: str
    calls: tuple[ToolCall, ...]
    finish_reason: str


class StockText(Recorded, frozen=True, forbid_unknown_fields=True):
    """
    The answers of the stock wheel.

    Attributes:
        answers: The sampled ones.
        wrong: Check → its questions that are answered wrongly; all others of it are answered
            rightly.
    """

    answers: tuple[SampledAnswer, ...] = ()
    wrong: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


def features(rules: text_checks.DirtyTextPolicy, text: str, words: int) -> set[str]:
    """
    Return the scripts of the letters in *text*, and the languages of which it has *words*.

    Latin letters with marks count as a script, but for those of Western Europe, which stand in
    names and loans of all languages (café, Núñez).
    """
    scripts = set[str]()
    for letter in filter(str.isalpha, set(unicodedata.normalize("NFKC", text))):
        name = unicodedata.name(letter, "UNNAMED")
        marked = letter > "ÿ" and re.match("LATIN .* WITH ", name)
        scripts.add("LATIN WITH" if marked else re.split("[ -]", name)[0])
    own = {*re.findall(r"\w+", text.lower())}
    return scripts | {
        name for name, its in rules.languages.items() if len(own.intersection(its)) >= words
    }


class DirtyText:
    """
    The questions, as a server accepts them, and what is dirty in its answers.

    Args:
        wrap: The text around a prompt, if the server has no chat template.

    Attributes:
        refused: Why the server takes no chats; empty if it does.
        cells: The combinations of the switches that the server has.
        rounds: The rounds of questions that were asked.
        judged: The answers, each with its cell.

    Raises:
        ServerInvalid: The server does not answer as it should.
    """

    def __init__(
        self, policy: text_checks.GenerationPolicy, client: Client, wrap: str, recipe: Recipe | None
    ) -> None:
        self.rules, self._wrap, self.refused, self._prefix = policy.dirty_text, wrap, "", ""
        self.concurrency = recipe.plan.max_num_seqs if recipe else self.rules.concurrency
        self._items = [(text, False) for text in self.rules.chats]
        self._allowed: list[set[str]] = []
        self.rounds, self.judged = range(1), list[tuple[Cell, JudgedAnswer]]()
        try:
            self.ask(client, "", 0)
        except ServerInvalid as error:
            if error.reason != "server-refused" or error.status >= 500:
                raise
            # Without a chat template vLLM refuses every chat.
            self.refused = error.message
        if recipe and "tools" in recipe.abilities and not self.refused:
            self._items += [(text, True) for text in self.rules.calls]
        markup, rules = wrap if self.refused else "", self.rules
        questions = [self._items, bool(self.refused), markup, rules.tokens, rules.temperature]
        self.shape = sha256_bytes(canonical(questions))
        self.cells: list[Cell] = [(False, False), (True, False)]
        tokens = self.rules.blocks * cache_block(client.metrics())
        if 0 < tokens <= 0.75 * client.max_model_len():
            per_line = len(client.tokenize(long_text(policy.line, 50))) // 50
            self._prefix = long_text(policy.line, tokens // max(1, per_line) + 2)
            self.cells += [(False, True), (True, True)]

    def ask(self, client: Client, salt: str, number: int) -> SampledAnswer:
        """Return the answer to the question *number*; without *salt* no cached prefix is found."""
        text, call = self._items[number % len(self._items)]
        prompt = self._prefix + text.replace("{number}", str(number + 2))
        rules, salt = self.rules, salt or uuid.uuid4().hex
        if self.refused:
            done = client.complete(
                self._wrap.replace("{prompt}", prompt), max_tokens=rules.tokens,
                temperature=rules.temperature, seed=number, cache_salt=salt,
            )  # fmt: skip
            return SampledAnswer(number, done.text, (), done.finish_reason)
        answer = client.chat(
            [{"role": "user", "content": prompt}], max_tokens=rules.tokens,
            tools=[text_checks.tool(strict=False)] if call else (),
            tool_choice="auto" if call else None,
            temperature=rules.temperature, seed=number, cache_salt=salt, template=rules.template,
        )  # fmt: skip
        text = f"{answer.reasoning} {answer.content}".strip()
        return SampledAnswer(number, text, answer.tool_calls, answer.finish_reason)

    def answers(self, client: Client, rounds: range) -> Iterator[tuple[Cell, SampledAnswer]]:
        """Yield the answers of *rounds* in each of the cells."""
        count, salt = 2 * self.rules.answers // len(self.cells), uuid.uuid4().hex
        numbers = range(rounds.start * count, rounds.stop * count)
        with console.progress("answers", len(numbers) * len(self.cells)) as line:
            for batched, cached in self.cells:
                if cached:
                    self.ask(client, salt, 0)
                ask = partial(self.ask, client, salt if cached else "")
                with ThreadPoolExecutor(self.concurrency if batched else 1) as pool:
                    for answer in pool.map(ask, numbers):
                        line.update(line.done + 1)
                        yield (batched, cached), answer

    def judge(
        self, client: Client, stock: StockText | Check, deadline: float = float("inf")
    ) -> Iterator[Check]:
        """
        Yield the checks of one launch; more than a round is asked if an answer of it is dirty.

        Args:
            stock: The answers of the stock wheel, or the check that says why there are none.
            deadline: The time by which all rounds have to end, by `time.monotonic`.
        """
        began = time.monotonic()
        hits = client.metrics().get(CACHE_HITS, 0.0)
        answers = () if isinstance(stock, Check) else stock.answers
        self._allow(answers)
        theirs = [*map(self._judge_answer, answers)]
        self.judged = self._ask(client, self.rounds)
        if self.dirty:
            # A server with drafts is asked for as many rounds again without them.
            rounds = self.rules.rounds * (2 if client.metrics().get(DRAFTS) else 1)
            if began + rounds * (time.monotonic() - began) > deadline:
                yield not_settled("dirty-text")
                return
            self.rounds = range(self.rules.rounds)
            self.judged += self._ask(client, self.rounds[1:])
        answered, besides = self._answered, ""
        bounded, most = answered, self.rules.most * len(answered)
        alone = f"{NO_CALL}:"
        if sum(fault.startswith(alone) for _, fault in theirs) > self.rules.most * len(theirs):
            # If the stock wheel leaves out as many calls, the model is the cause; the comparison
            # judges whether ours makes fewer.
            bounded = [(each, "" if fault.startswith(alone) else fault) for each, fault in answered]
            besides = " beside calls that are not made, too many of the stock wheel's, too"
        dirty = count_dirty(bounded)
        message = f"{dirty} of {len(answered)} answers are dirty{besides}"
        if self.refused:
            message += f"; completions were asked, as the server refuses chats: {self.refused}"
        figure = Figure("dirty answers", dirty, count=len(answered), bound=most)
        yield judged(
            "dirty-text", message, "text-dirty", dirty <= most, [figure], _samples(bounded)
        )
        yield self._compare_switch("dirty-text-batch", BATCHED)
        if self._prefix and client.metrics().get(CACHE_HITS, 0.0) > hits:
            yield self._compare_switch("dirty-text-cache", CACHED)
        else:
            # A prefix cache that is never hit is judged by G5.
            yield not_run(
                "dirty-text-cache",
                "no prefix was found in a cache",
                "prefix-cache-unused",
                required=False,
            )
        if isinstance(stock, Check):
            yield stock
        elif stock.shape != self.shape:
            yield invalid(
                "dirty-text-stock", "the stock wheel was asked otherwise", "reference-other-policy"
            )
        else:
            yield compare_shares(self.rules, "dirty-text-stock", answered, theirs)

    @property
    def _answered(self) -> list[JudgedAnswer]:
        """The answers of all cells."""
        return [answer for _, answer in self.judged]

    @property
    def dirty(self) -> bool:
        """Whether any answer is dirty."""
        return count_dirty(self._answered) > 0

    def drafts_check(self, plain: Client | None = None) -> Check:
        """
        Return the comparison with *plain*, the same model without drafts.

        Clean answers need none.
        """
        control = [answer for _, answer in self._ask(plain, self.rounds)] if plain else []
        return compare_shares(self.rules, "dirty-text-drafts", self._answered, control)

    def _ask(self, client: Client, rounds: range) -> list[tuple[Cell, JudgedAnswer]]:
        """Return the answers of *client* in *rounds*, each with its cell."""
        return [(cell, self._judge_answer(each)) for cell, each in self.answers(client, rounds)]

    def _allow(self, stock: Sequence[SampledAnswer]) -> None:
        """
        Set what an answer to each question may have: scripts and languages.

        They are those of the policy, of the question, and of more than half of its *stock* answers:
        what is rare in these is dirt, or chance. A call that is not made is dirt on both sides.
        """
        for index, (text, _) in enumerate(self._items):
            own = [
                self._features(answer)
                for answer in stock
                if answer.number % len(self._items) == index
            ]
            counts = Counter(feature for each in own for feature in each)
            usual = {name for name, count in counts.items() if 2 * count > len(own)} - {NO_CALL}
            # A question is short, and in one language.
            self._allowed.append({*self.rules.letters, *features(self.rules, text, 1), *usual})

    def _features(self, answer: SampledAnswer) -> set[str]:
        """Return the scripts and languages of *answer*, and whether a call was asked in vain."""
        _, call = self._items[answer.number % len(self._items)]
        dropped = call and not answer.calls and answer.finish_reason != "length"
        own = features(self.rules, answer.text, self.rules.words)
        return own | {NO_CALL} if dropped else own

    def _judge_answer(self, answer: SampledAnswer) -> JudgedAnswer:
        """Return the question of *answer*, and what is dirty in it."""
        question = answer.number % len(self._items)
        foreign = self._features(answer) - self._allowed[question]
        return question, find_dirt(self.rules, answer, foreign)

    def _compare_switch(self, name: str, switch: int) -> Check:
        """Return the check *name*: the cells with *switch*, of `Cell`, are not the dirtier ones."""
        sides: dict[bool, list[JudgedAnswer]] = {True: [], False: []}
        for cell, answer in self.judged:
            sides[cell[switch]].append(answer)
        return compare_shares(self.rules, name, sides[True], sides[False])


def not_settled(name: str) -> Check:
    """Return the check *name*, which did not run as further rounds would last too long."""
    return not_run(
        name,
        "answers of the first round are dirty, and too little time is left to ask again",
        BUDGET_SPENT,
    )


def compare_shares(
    rules: text_checks.DirtyTextPolicy,
    name: str,
    treated: Sequence[JudgedAnswer],
    control: Sequence[JudgedAnswer],
) -> Check:
    """Return the check *name*: answers of *treated* are not more often dirty than of *control*."""
    reason, *labels = COMPARISONS[name]
    p, bound = chance(treated, control), rules.chance / len(COMPARISONS)
    figures, texts = [Figure("chance of so many or more", p, bound=bound)], list[str]()
    for label, side in zip(labels, (treated, control), strict=True):
        dirty = count_dirty(side)
        figures.append(Figure(f"dirty answers {label}", dirty, count=len(side)))
        texts.append(f"dirty answers {label}: {dirty} of {len(side)}")
    message = ", ".join(texts)
    return judged(name, message, reason, p >= bound, figures, _samples(treated))


def chance(treated: Sequence[JudgedAnswer], control: Sequence[JudgedAnswer]) -> float:
    """
    Return the chance of as many dirty answers in *treated*, or more, if there is no difference.

    All dirty answers to a question could as well be any other answers to it, of either side; with
    one question, this is Fisher's exact test. Source: Agresti, Categorical Data Analysis, 2nd ed.,
    exact tests of conditional independence in 2 × 2 × K tables.
    """
    import numpy as np
    from scipy.stats import hypergeom

    both = [*treated, *control]
    ours, answers = Counter(question for question, _ in treated), Counter(q for q, _ in both)
    dirty = Counter(question for question, fault in both if fault)
    chances = np.ones(1)
    for question, count in dirty.items():
        of_ours = hypergeom(answers[question], count, ours[question])
        chances = np.convolve(chances, of_ours.pmf(range(count + 1)))
    return float(chances[count_dirty(treated) :].sum())


def count_dirty(answers: Sequence[JudgedAnswer]) -> int:
    """Return how many of *answers* are dirty."""
    return sum(bool(fault) for _, fault in answers)


def find_dirt(rules: text_checks.DirtyTextPolicy, answer: SampledAnswer, foreign: set[str]) -> str:
    """Return what is dirty in *answer*, which has *foreign* features; empty if nothing."""
    cut = answer.finish_reason == "length"
    if not answer.text.strip() and not answer.calls:
        return "an empty answer"
    if fault := text_checks.text_fault(answer.text, cut=cut):
        return fault
    shown = one_line(answer.text, 160)
    if foreign:
        return f"{', '.join(sorted(foreign))}: {shown}"
    for least, most, times in ((2, 40, rules.repeats), (rules.passage, 400, rules.passages)):
        loop = rf"(?s)([^{_DRAWN}].{{{least - 1},{most - 1}}}?)(?:\s*\1){{{times - 1}}}"
        if again := re.search(loop, answer.text[:LONGEST]):
            return f"{one_line(again[1], 40)} again and again: {shown}"
    for call in () if cut else answer.calls:
        if fault := text_checks.call_fault(call):
            return fault
    return ""


def _samples(answers: Sequence[JudgedAnswer]) -> list[Sample]:
    """Return the dirty ones of *answers*."""
    samples = list[Sample]()
    for number, (_, fault) in enumerate(answers):
        if fault:
            samples.append(Sample(f"answer {number}", "clean", fault))
    return samples


def record(
    policy: text_checks.GenerationPolicy,
    client: Client,
    wrap: str,
    recipe: Recipe | None,
    served: ServerIdentity,
) -> StockText:
    """
    Return the answers of a first round of *client*, whose identity is *served*.

    Raises:
        ServerInvalid: The server does not answer as it should.
    """
    text = DirtyText(policy, client, wrap, recipe)
    answers = [answer for _, answer in text.answers(client, range(1))]
    return StockText(served, text.shape, tuple(answers))


#: Stands for answers of a stock wheel that was not named.
NOT_NAMED = not_run(
    "dirty-text-stock", "to run it, name the reference with --against", "stock-not-named"
)


def reference(
    path: Path | None, served: ServerIdentity, name: str = NOT_NAMED.name, shape: str = ""
) -> StockText | Check:
    """
    Return the answers of another wheel in the file at *path*, or why there are none.

    Args:
        served: The identity of the candidate.
        name: Of the check that says why.
        shape: That it must have, if it is known.
    """
    return find_stock(path, StockText, served, name, shape) if path else NOT_NAMED
