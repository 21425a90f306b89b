"""
G4: judge the text that the server generates.

Short prompts are answered, facts are retrieved from long contexts, chats use the abilities that the
recipe declares, a long generation is compared with its own recomputation, and dirty answers are
counted with and without each switch; for drafts, a second launch may be needed.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import numpy as np

from sparkwright.bench.recipes.recipe import Ability, Recipe
from sparkwright.bench.server.client import (
    REASONS as SERVER_REASONS,
    Client,
    Completion,
    ServerInvalid,
)
from sparkwright.core.console import one_line
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.gates import dirty_text, logprobs, text_checks
from sparkwright.gates.core.server_under_test import (
    DRAFTS,
    LARGE_BLOCK,
    REFERENCE,
    Pace,
    ServerIdentity,
    cache_block,
)
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    judged,
    not_run,
    passed,
)
from sparkwright.gates.long_text import filled_text, long_text

#: The check of each ability that a recipe may declare.
ABILITIES: Mapping[Ability, str] = {
    "chat": "chat",
    "tools": "tool-calls",
    "reasoning": "reasoning",
    "structured": "structured-output",
    "images": "images",
}

#: The file of the reference folder, and the check of one that cannot be used.
ANSWERS, ANSWERS_STOCK = "answers.json", "answers-stock"
#: The checks that are repeated for a server that was examined before, as after a soak.
QUICK = ("answers", "corrupted-requests")
#: The checks of the rate of dirty answers.
DIRTY = ("dirty-text", *dirty_text.COMPARISONS)
FURTHER = (*ABILITIES.values(), *DIRTY, "deep-decode")

CHECKS = (
    *declare("replies"),
    *declare(ANSWERS_STOCK, role="reports"),
    *declare(*QUICK, *FURTHER, "context-*", measured=True),
)

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    "answers-wrong": "Too many answers lack what a sound model knows: attention, KV cache, "
    "positions, scales or sampling are broken. The samples show it.",
    "stock-wrong-too": "The stock wheel answers more than half of these questions wrongly, too: "
    "the model does not know them, or recipe and profile do not fit it.",
    "requests-corrupted": "vLLM counted requests whose logits were not a number.",
    "counter-absent": "The server does not count requests with NaN logits. Start it with "
    "VLLM_COMPUTE_NANS_IN_LOGITS=1.",
    "facts-missing": "Facts in a long context were not retrieved: positions, the KV cache or "
    "attention over many blocks are wrong.",
    "context-too-short": "The server's --max-model-len is below this length. Raise it, unless the "
    "recipe keeps it low by design.",
    "chat-wrong": "A chat was answered wrongly, or did not end as it should: look at the chat "
    "template and at the model's end tokens.",
    "tool-calls-wrong": (
        "A tool was not called, or its arguments do not fit its schema. "
        "Check --enable-auto-tool-choice, --tool-call-parser and the chat "
        "template."
    ),
    "reasoning-wrong": "The reasoning was not separated from the answer. Check --reasoning-parser.",
    "structured-output-wrong": (
        "The answer does not fit the JSON schema, or has wrong "
        "values. Check the structured-output backend."
    ),
    "images-wrong": "The model did not see the image. Check its processor and vision kernels.",
    "ability-not-declared": "The recipe does not declare this ability of the model.",
    "deep-damage": "Far into a long generation the tokens no longer follow from the text: a decode "
    "kernel, the KV cache, a CUDA graph or speculation is wrong. Serve with --enforce-eager, then "
    "without speculation, to see which.",
    "speculation-absent": "The recipe drafts tokens and the server does not.",
    "text-dirty": "Too many answers are empty, or hold a foreign script or language, U+FFFD, "
    "markup of the template or of tools, calls that cannot be read or are missing, or the same "
    "text again and again.",
    "dirtier-than-stock": "Answers are dirty more often than those of the stock wheel: a patch or "
    "a kernel of this wheel is wrong.",
    "dirtier-in-batches": "Answers are dirty more often when others are computed beside them: look "
    "at CUDA graphs, batched kernels and the scheduler.",
    "dirtier-with-cache": "Answers are dirty more often after a hit of the prefix cache: it gives "
    "blocks of another text, or too early.",
    "dirtier-with-drafts": "Answers are dirty more often with drafts (vllm #41834): serve without "
    "speculation, or mend it.",
    "prefix-cache-unused": "No question hit the prefix cache, so its absence is no switch.",
    "stock-not-named": "Without the answers of the stock wheel none could be compared with them.",
    **REFERENCE,
    "no-speculation": "The server drafts no tokens.",
    "policy-skips": "The profile says why this kind of model cannot be judged by the check.",
    "no-answers": "The gate ended before this check; see the check `replies`.",
    "not-asked": "No recipe states the abilities of the model. Name one with --recipe.",
}

#: How many times as fast a batch is assumed to be, in estimates of time.
BATCH = 3

#: Tokens of the answer to a question for a fact.
FACT_TOKENS = 24

#: Starts the server again without speculation, for a block.
Relaunch = Callable[[], AbstractContextManager[Client]]


class QuestionedServer(NamedTuple):
    """
    The server that is questioned.

    Attributes:
        kind: The kind of its model.
        recipe: The recipe of the server; it declares abilities, speculation and context.
        relaunch: None for questions of which none is about drafts.
        limit: The most tokens of a prompt and its completion.
        stock_wrong: As `StockText.wrong`.
        deadline: The time until which doubt of dirty answers may be settled, by `time.monotonic`.
    """

    client: Client
    kind: text_checks.Profile
    recipe: Recipe | None
    relaunch: Relaunch | None
    limit: int
    stock_wrong: Mapping[str, Sequence[str]] = {}
    deadline: float = float("inf")


def run(
    policy: text_checks.GenerationPolicy,
    client: Client,
    profile: str = "default",
    *,
    recipe: Recipe | None = None,
    relaunch: Relaunch | None = None,
    stock: dirty_text.StockText | Check = dirty_text.NOT_NAMED,
    stock_answers: dirty_text.StockText | Check = dirty_text.NOT_NAMED,
    quick: bool = False,
    deadline: float = float("inf"),
) -> tuple[Check, ...]:
    """
    Return the checks of the gate, which ends at the first reply that does not count.

    Args:
        profile: The kind of model, a name of *policy*'s profiles.
        recipe, relaunch, deadline: As of `QuestionedServer`.
        stock: The sampled answers of the stock wheel, or why there are none.
        stock_answers: Whether the stock wheel's are right; without them each wrong answer counts.
        quick: Make the checks of `QUICK` alone.
    """
    policy, kind, results = policy.sized(profile), policy.profiles[profile], dict[str, Check]()
    results["replies"] = passed("replies", "each reply arrived complete")
    wrong = stock_answers.wrong if isinstance(stock_answers, dirty_text.StockText) else {}
    if isinstance(stock_answers, Check) and stock_answers.state == "invalid":
        results[ANSWERS_STOCK] = stock_answers
    try:
        server = QuestionedServer(
            client, kind, recipe, relaunch, client.max_model_len(), wrong, deadline
        )
        for check in _judged(policy, server, stock, quick):
            results[check.name] = check
    except ServerInvalid as error:
        make = failed if error.reason == "not-a-number" else invalid
        results["replies"] = make("replies", error.message, error.reason)
    for name in QUICK if quick else (*QUICK, *FURTHER):
        results.setdefault(name, not_run(name, "the gate ended before", "no-answers"))
    return tuple(results.values())


def _judged(
    policy: text_checks.GenerationPolicy,
    server: QuestionedServer,
    stock: dirty_text.StockText | Check,
    quick: bool,
) -> Iterator[Check]:
    """Yield the checks in the order of the questions."""
    client, kind, prompts = server.client, server.kind, policy.prompts
    texts = {name: kind.wrap.replace("{prompt}", prompt.text) for name, prompt in prompts.items()}
    answers = _complete(client, texts, policy.tokens)
    yield text_checks.right(
        "answers",
        "answers-wrong",
        text_checks.wrong(prompts, answers),
        len(prompts),
        kind.answers,
        server.stock_wrong.get("answers", ()),
    )
    if quick:
        yield text_checks.corrupted(client.metrics())
        return
    yield from _contexts(policy, server)
    yield from _chats(policy, server)
    if skipped := kind.no_dirty_text:
        # These checks do not decide here; a release policy that asks for them does not accept that.
        for name in DIRTY:
            yield not_run(name, skipped, "policy-skips", required=False)
    else:
        rates = dirty_text.DirtyText(policy, client, kind.wrap, server.recipe)
        yield from rates.judge(client, stock, server.deadline)
    yield _deep_decode(policy, server)
    yield text_checks.corrupted(client.metrics())
    if not skipped:
        yield _drafts(server, rates)


def record(
    policy: text_checks.GenerationPolicy,
    client: Client,
    profile: str,
    recipe: Recipe | None,
    served: ServerIdentity,
) -> dirty_text.StockText:
    """
    Return which questions *client* answers wrongly, whose identity is *served*.

    Raises:
        ServerInvalid: The server does not answer as it should.
    """
    server = QuestionedServer(
        client, policy.profiles[profile], recipe, None, client.max_model_len()
    )
    answered = itertools.chain(
        _judged(policy, server, dirty_text.NOT_NAMED, quick=True),
        _contexts(policy, server),
        _chats(policy, server),
    )
    wrong = dict[str, tuple[str, ...]]()
    for check in answered:
        wrong[check.name] = tuple(sample.case for sample in check.samples)
    return dirty_text.StockText(served, shape(policy, profile), wrong=wrong)


def shape(policy: text_checks.GenerationPolicy, profile: str) -> str:
    """Return a digest of the questions whose answers are right or wrong."""
    wrap = policy.profiles[profile].wrap
    return sha256_bytes(
        canonical([policy.tokens, policy.prompts, policy.line, policy.facts, policy.chats, wrap])
    )


def _complete(client: Client, texts: Mapping[str, str], tokens: int) -> dict[str, Completion]:
    """Return the greedy answers to *texts*, each computed without the prefix cache."""
    return {
        name: client.complete(text, max_tokens=tokens, cache_salt=uuid.uuid4().hex)
        for name, text in texts.items()
    }


def _contexts(policy: text_checks.GenerationPolicy, server: QuestionedServer) -> Iterator[Check]:
    """Yield, for each length of the kind, whether all facts in a text so long are retrieved."""
    wrap, room = server.kind.wrap, server.limit - FACT_TOKENS
    for length in server.kind.context:
        name, tokens = f"context-{length}", room if length == "maximum" else length
        if tokens > room:
            yield _too_short(name, tokens + FACT_TOKENS, server)
        else:
            text = filled_text(policy, wrap, tokens, lambda text: len(server.client.tokenize(text)))
            questions = {
                name: wrap.replace("{prompt}", f"{text}{fact.text}")
                for name, fact in policy.facts.items()
            }
            answers, count = _complete(server.client, questions, FACT_TOKENS), len(policy.facts)
            yield text_checks.right(
                name,
                "facts-missing",
                text_checks.wrong(policy.facts, answers),
                count,
                count,
                server.stock_wrong.get(name, ()),
            )


def _too_short(name: str, tokens: int, server: QuestionedServer) -> Check:
    """Return the check that did not run, as the server's limit is below, perhaps by design."""
    return not_run(
        name,
        f"{tokens} tokens are needed, and --max-model-len is {server.limit}",
        "context-too-short",
        required=not server.recipe or server.recipe.plan.max_model_len > server.limit,
    )


def _chats(policy: text_checks.GenerationPolicy, server: QuestionedServer) -> Iterator[Check]:
    """Yield a check for each ability."""
    recipe = server.recipe
    for ability, name in ABILITIES.items():
        if recipe is None or ability not in recipe.abilities:
            reason = "not-asked" if recipe is None else "ability-not-declared"
            yield not_run(
                name,
                f"no recipe declares that the model has the ability {ability}",
                reason,
                required=recipe is None,
            )
            continue
        count, samples = 0, list[Sample]()
        for case, chat in policy.chats.items():
            if chat.ability == ability:
                count += 1
                if fault := _chat_fault(server.client, chat):
                    samples.append(Sample(case, "", fault))
        stock_wrong = server.stock_wrong.get(name, ())
        yield text_checks.right(name, f"{name}-wrong", samples, count, count, stock_wrong)


def _chat_fault(client: Client, chat: text_checks.Chat) -> str:
    """Return what is wrong with the answer to *chat*; empty if nothing is."""
    content: object = chat.text
    if chat.image:
        image = {"type": "image_url", "image_url": {"url": chat.image}}
        content = [image, {"type": "text", "text": chat.text}]
    schema = {"name": "delivery", "schema": text_checks.DELIVERY_SCHEMA, "strict": True}
    structured = {"type": "json_schema", "json_schema": schema}
    try:
        answer = client.chat(
            [{"role": "user", "content": content}],
            max_tokens=chat.max_tokens,
            tools=[text_checks.tool(strict=chat.tool_choice == "required")]
            if chat.tool_choice
            else (),
            tool_choice=chat.tool_choice or None,
            response_format=structured if chat.ability == "structured" else None,
        )
    except ServerInvalid as error:
        if error.reason != "server-refused":
            raise
        return one_line(str(error), 200)
    return text_checks.chat_fault(chat, answer)


def _deep_decode(policy: text_checks.GenerationPolicy, server: QuestionedServer) -> Check:
    """Return whether a long generation after a prefix from the cache follows from its text."""
    name, wanted = "deep-decode", server.kind.deep
    # Blocks of a hybrid model are so large that a short prompt would have none in the cache.
    length = max(policy.deep.prompt, 2 * cache_block(server.client.metrics()) + 1)
    if length + wanted > server.limit:
        return _too_short(name, length + wanted, server)
    prompt = server.client.tokenize(long_text(policy.line, length))[:length]
    depth = _sound_depth(policy.deep, prompt, wanted, server.client)
    return judged(
        name,
        f"the first {depth} of {wanted} tokens follow from their text",
        "deep-damage",
        depth >= wanted,
        [Figure("sound tokens", depth, "tokens", bound=wanted)],
    )


def _sound_depth(deep: text_checks.Deep, prompt: Sequence[int], wanted: int, client: Client) -> int:
    """
    Return how many of the *wanted* tokens of a long generation after *prompt* are sound.

    The distribution behind a generated token is compared with the one that prefill gives for the
    same text, under a salt of its own: with blocks from the prefix cache, a wrong cache would
    agree with itself.
    """
    salt = uuid.uuid4().hex
    ask = partial(client.complete, logprobs=deep.top, ignore_eos=True)
    ask(prompt, max_tokens=1, cache_salt=salt)
    answer = ask(prompt, max_tokens=wanted, temperature=deep.temperature, cache_salt=salt)
    every = min(deep.every, wanted // 8)
    positions = range(every, len(answer.tokens), every)
    decoded, expected = list[logprobs.Row](), list[logprobs.Row]()
    for position in positions:
        text = [*prompt, *answer.tokens[:position]]
        probe = ask(text, max_tokens=1, cache_salt=uuid.uuid4().hex)
        if not probe.tokens:
            raise ServerInvalid("answer-unreadable", "a completion of one token has none")
        decoded.append((answer.tokens[position], answer.logprobs[position]))
        expected.append((probe.tokens[0], probe.logprobs[0]))
    p, q = logprobs.arrays(expected, deep.top + 1), logprobs.arrays(decoded, deep.top + 1)
    unsound = logprobs.unsound(p) | logprobs.unsound(q)
    kl = np.where(unsound, np.inf, logprobs.lower_bound(p, q, deep.top))
    # An answer that ends although it must not is damaged from its end on.
    distances = list(zip(positions, kl.tolist(), strict=True))
    return text_checks.sound_tokens(distances, deep.kl_max, len(answer.tokens))


def _drafts(server: QuestionedServer, rates: dirty_text.DirtyText) -> Check:
    """Return whether answers are dirty more often with drafts; a clean server is not relaunched."""
    name = "dirty-text-drafts"
    if not server.client.metrics().get(DRAFTS):
        message = "no token was drafted"
        if server.recipe and server.recipe.speculation:
            return failed(name, message, "speculation-absent")
        return not_run(name, message, "no-speculation", required=False)
    if not rates.dirty:
        return rates.drafts_check()
    if len(rates.rounds) < rates.rules.rounds:
        return dirty_text.not_settled(name)
    assert server.relaunch
    with server.relaunch() as plain:
        return rates.drafts_check(plain)


def estimate(policy: text_checks.GenerationPolicy, pace: Pace, profile: str = "default") -> float:
    """
    Return the seconds of the gate for a clean server.

    The server's own longest context is taken as twice the longest that the *profile* names. Dirty
    answers take up to seven times as long, and two starts.
    """
    kind, rules = policy.profiles[profile], policy.sized(profile).dirty_text
    sampled = 0 if kind.no_dirty_text else rules.answers
    lengths = [length for length in kind.context if isinstance(length, int)]
    read: float = len(policy.facts) * (
        sum(lengths) + 2 * max(lengths, default=0) * ("maximum" in kind.context)
    )
    read += (kind.deep // policy.deep.every) * (policy.deep.prompt + kind.deep // 2)
    read += sampled * rules.blocks * LARGE_BLOCK
    written: float = len(policy.prompts) * policy.tokens + kind.deep
    written += (1 + 1 / BATCH) * sampled * rules.tokens
    return read / pace.prefill_tokens_s + written / pace.decode_tokens_s
