"""
G4: judge the text that the server generates.

Each prompt is answered twice without the prefix cache, and the answers must be the same, sensible
and right. Then facts are retrieved from long contexts, chats use the abilities that the recipe
declares, a long generation is compared with its own recomputation, and a second launch shows that
the text does not depend on speculation.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import numpy as np

from sparkwright.bench.recipes.recipe import Ability, Recipe
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, Completion, ServerInvalid
from sparkwright.core.console import console, one_line
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.generation import checks
from sparkwright.gates.generation.checks import (
    Chat,
    GenerationPolicy,
    Profile,
    filled_text,
    long_text,
)
from sparkwright.gates.logprobs import distributions

TITLE = "generated text"

#: The check of each ability that a recipe may declare.
ABILITIES: Mapping[Ability, str] = {
    "chat": "chat",
    "tools": "tool-calls",
    "reasoning": "reasoning",
    "structured": "structured-output",
    "images": "images",
}

CHECKS = (
    *declare("prompts", "streams", "token-count"),
    *declare(*(detector.name for detector in checks.DETECTORS), measured=True),
    *declare("identical-reruns", "entropy", "answers", "corrupted-requests", measured=True),
    *declare("context-*", *ABILITIES.values(), "deep-decode", "speculation", measured=True),
)

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    "prompt-unencodable": "The model's tokenizer has no tokens for characters of the prompt; these "
    "prompts are not for it.",
    "token-count-wrong": "A completion has another number of tokens than was asked for with "
    "ignore_eos. The server ends answers early.",
    "rerun-differs": "The same request gave other tokens at concurrency 1, without the prefix "
    "cache. A kernel races, or reads memory that it should not.",
    "token-zero-run": "Token 0 again and again is the argmax of NaN logits. Look for them with "
    "VLLM_COMPUTE_NANS_IN_LOGITS=1.",
    "token-run": "One token again and again: attention, KV cache or sampling are broken.",
    "token-share": "One token is more than half of an answer.",
    "repetition": "The same few tokens in turn: attention, KV cache or positions are broken.",
    "compressible": "The answer says nearly the same again and again, a little varied.",
    "unreadable": "Bytes that are no characters: the model draws tokens without sense.",
    "answer-short": "The model ends its answer at once, although the prompt asks for a long one.",
    "entropy-collapsed": "The model is sure of every token. Logits are scaled wrongly, or the model "
    "repeats itself.",
    "logprob-nan": "A log probability is not a number.",
    "answers-wrong": "Too many answers lack what a sound model knows. Fluent text about something "
    "else means wrong numbers.",
    "requests-corrupted": "vLLM counted requests whose logits were not a number.",
    "counter-absent": "The server does not count requests with NaN logits. Start it with "
    "VLLM_COMPUTE_NANS_IN_LOGITS=1.",
    "facts-missing": "Facts in a long context were not retrieved: positions, the KV cache or "
    "attention over many blocks are wrong.",
    "context-too-short": "The server's --max-model-len is below this length. Raise it, unless the "
    "recipe keeps it low by design.",
    "chat-wrong": "A chat was answered wrongly, or did not end as it should: look at the chat "
    "template and at the model's end tokens.",
    "tool-calls-wrong": "A tool was not called, or with arguments that are not of its schema. Check "
    "--enable-auto-tool-choice, --tool-call-parser and the chat template.",
    "reasoning-wrong": "The reasoning was not separated from the answer. Check --reasoning-parser.",
    "structured-output-wrong": "The answer is not of the JSON schema, or has wrong values. Check "
    "the structured-output backend.",
    "images-wrong": "The model did not see the image. Check its processor and vision kernels.",
    "ability-not-declared": "The recipe does not declare this ability of the model.",
    "deep-damage": "Far into a long generation the tokens no longer follow from the text: a decode "
    "kernel, the KV cache, a CUDA graph or speculation is wrong. The message names the switch.",
    "speculation-absent": "The recipe drafts tokens and the server does not.",
    "speculation-differs": "Greedy text is another one without speculation: drafts are accepted "
    "wrongly, or the kernels for several tokens are wrong.",
    "no-speculation": "The server drafts no tokens.",
    "not-relaunched": "The check needs a second launch with other flags. Let the gate start the "
    "server, with --serve.",
    "policy-skips": "The profile says why this kind of model cannot be judged by the check.",
    "no-answers": "No answer arrived that could be judged; see the check `streams`.",
    "not-asked": "No recipe states the abilities of the model. Name one with --recipe.",
}

#: vLLM's counters of requests with NaN logits and of drafts.
CORRUPTED, DRAFTS = "vllm:corrupted_requests_total", "vllm:spec_decode_num_drafts_total"

#: After so many failures in a row nothing more is asked; each may take the client's deadline.
MAX_FAILURES = 3

#: Tokens of the answer to a question for a fact.
FACT_TOKENS = 24

#: Starts the server again, without ``graphs`` or ``speculation``, for a block.
Relaunch = Callable[[Sequence[str]], AbstractContextManager[Client]]

P = ParamSpec("P")
T = TypeVar("T")


class Session:
    """
    Sends requests, and gives up on a server that has failed `MAX_FAILURES` times in a row.

    Attributes:
        requests: How many were sent.
        failures: The case of each that failed, with the error.
    """

    def __init__(self) -> None:
        self.requests, self._in_a_row = 0, 0
        self.failures: list[tuple[str, ServerInvalid]] = []

    def ask(
        self, case: str, request: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Return the reply to *request*; None if none that counts arrived."""
        if self._in_a_row >= MAX_FAILURES:
            return None
        self.requests += 1
        try:
            reply = request(*args, **kwargs)
        except ServerInvalid as error:
            self.failures.append((case, error))
            # A server that refuses to write NaN still serves.
            self._in_a_row += error.reason != "not-a-number"
            return None
        self._in_a_row = 0
        return reply

    def complete(
        self, client: Client, texts: Mapping[str, str], tokens: int, top: int | None = None
    ) -> dict[str, Completion]:
        """Return the greedy answers that arrived, each computed without the prefix cache."""
        answers = {}
        with console.progress("answers", len(texts)) as line:
            for number, (name, text) in enumerate(texts.items(), 1):
                salt = uuid.uuid4().hex
                answer = self.ask(
                    name, client.complete, text, max_tokens=tokens, logprobs=top, cache_salt=salt
                )
                if answer:
                    answers[name] = answer
                line.update(number)
        return answers

    def check(self) -> Check:
        """Return whether every reply arrived complete."""
        if not self.failures:
            return passed("streams", f"{self.requests} replies arrived complete")
        message = f"{len(self.failures)} of {self.requests} replies do not count"
        samples = [Sample(case, "", str(error)) for case, error in self.failures]
        reasons = [error.reason for _, error in self.failures]
        if "not-a-number" in reasons:
            return failed("streams", message, "not-a-number", samples=samples)
        return invalid("streams", message, reasons[0], samples=samples)


def run(
    policy: GenerationPolicy,
    client: Client,
    profile: str = "default",
    *,
    recipe: Recipe | None = None,
    relaunch: Relaunch | None = None,
    quick: bool = False,
) -> tuple[Check, ...]:
    """
    Return the checks of the gate.

    Args:
        profile: The kind of model, a name of *policy*'s profiles.
        recipe: By which *client* is served; it declares abilities, speculation and context.
        relaunch: None if the server was not started by the gate.
        quick: Judge the answers to the prompts alone, as after a soak.

    Raises:
        ValueError: The policy has no such profile.
    """
    if profile not in policy.profiles:
        raise ValueError(
            f"the policy has no profile {profile!r}; it has {', '.join(policy.profiles)}"
        )
    kind, session = policy.profiles[profile], Session()
    texts = {prompt.name: kind.wrap.replace("{prompt}", prompt.text) for prompt in policy.prompts}
    try:
        before, limit = client.metrics(), client.max_model_len()
        bad = [
            name
            for name, text in texts.items()
            if not checks.encodable(text, client.detokenize(client.tokenize(text)))
        ]
    except ServerInvalid as error:
        return (invalid("streams", error.message, error.reason),)
    texts = {name: text for name, text in texts.items() if name not in bad}
    first = session.complete(client, texts, policy.tokens)
    second = session.complete(client, texts, policy.tokens, policy.top)
    pairs = {name: (first[name], second[name]) for name in first if name in second}
    result = [
        _prompts(bad, len(policy.prompts)),
        _token_count(policy, session, client, texts),
        checks.identity(pairs),
        *(checks.detected(first, detector, policy.bounds) for detector in checks.DETECTORS),
        checks.collapse(second, policy.bounds.entropy),
        checks.right("answers", "answers-wrong", policy.prompts, first, kind.answers),
    ]
    if not quick:
        result += _contexts(policy, kind, session, client, limit, recipe)
        result += _chats(policy, client, recipe)
    after = session.ask("metrics", client.metrics) or {}
    result.append(checks.corrupted(before, after, CORRUPTED))
    if not quick:
        result.append(_deep_decode(policy, kind, session, client, limit, recipe, relaunch))
        drafts = after.get(DRAFTS, 0.0) > before.get(DRAFTS, 0.0)
        result.append(_speculation(policy, session, texts, second, recipe, relaunch, drafts))
    why = kind.not_run
    judged = (
        not_run(check.name, why[check.name], "policy-skips") if check.name in why else check
        for check in result
    )
    return (session.check(), *judged)


def _prompts(unencodable: Sequence[str], count: int) -> Check:
    if unencodable:
        message = f"the tokenizer cannot hold {len(unencodable)} of {count} prompts"
        return invalid("prompts", message, "prompt-unencodable", samples=map(Sample, unencodable))
    return passed("prompts", f"{count} prompts come back from the tokenizer as they were")


def _token_count(
    policy: GenerationPolicy, session: Session, client: Client, texts: Mapping[str, str]
) -> Check:
    """Return whether an answer that may not stop has the length that was asked for."""
    name, text = next(iter(texts.items()), ("", ""))
    answer = session.ask(name, client.complete, text, max_tokens=policy.tokens, ignore_eos=True)
    if not answer:
        return not_run("token-count", "no answer arrived", "no-answers")
    message = f"with ignore_eos, {len(answer.tokens)} of {policy.tokens} tokens came, then {answer.finish_reason}"
    return checks.verdict(
        "token-count", message, "token-count-wrong", answer.finish_reason == "length"
    )


def _contexts(
    policy: GenerationPolicy,
    kind: Profile,
    session: Session,
    client: Client,
    limit: int,
    recipe: Recipe | None,
) -> Iterator[Check]:
    """Yield, for each length of *kind*, whether all facts in a text so long are retrieved."""
    room = limit - FACT_TOKENS

    def count(text: str) -> int:
        return len(client.tokenize(text))

    for length in kind.context:
        name, tokens = f"context-{length}", room if length == "maximum" else length
        if tokens > room:
            yield _too_short(name, tokens + FACT_TOKENS, limit, recipe)
            continue
        text = session.ask(name, filled_text, policy, kind.wrap, tokens, count)
        questions = {
            fact.name: kind.wrap.replace("{prompt}", f"{text}{fact.text}")
            for fact in policy.facts
            if text is not None
        }
        answers = session.complete(client, questions, FACT_TOKENS)
        yield checks.right(name, "facts-missing", policy.facts, answers, len(policy.facts))


def _too_short(name: str, tokens: int, limit: int, recipe: Recipe | None) -> Check:
    """Return the check that did not run, as *limit* is below *tokens*, perhaps by design."""
    designed = recipe is not None and recipe.plan.max_model_len <= limit
    message = f"{tokens} tokens are needed, and --max-model-len is {limit}"
    return not_run(name, message, "context-too-short", required=not designed)


def _chats(policy: GenerationPolicy, client: Client, recipe: Recipe | None) -> Iterator[Check]:
    """Yield a check for each ability."""
    for ability, name in ABILITIES.items():
        if recipe is None or ability not in recipe.abilities:
            reason = "not-asked" if recipe is None else "ability-not-declared"
            message = f"no recipe declares that the model has the ability {ability}"
            yield not_run(name, message, reason, required=recipe is None)
            continue
        faults = {
            chat.name: _chat(client, chat) for chat in policy.chats if chat.ability == ability
        }
        samples = [Sample(case, "", fault) for case, fault in faults.items() if fault]
        figure = Figure(
            "right chats", len(faults) - len(samples), count=len(faults), bound=len(faults)
        )
        message = f"{len(samples)} of {len(faults)} chats failed"
        yield checks.verdict(name, message, f"{name}-wrong", not samples, [figure], samples)


def _chat(client: Client, chat: Chat) -> str:
    """Return what is wrong with the answer to *chat*; empty if nothing is."""
    content: object = chat.text
    if chat.image:
        image = {"type": "image_url", "image_url": {"url": chat.image}}
        content = [image, {"type": "text", "text": chat.text}]
    schema = {"name": "delivery", "schema": checks.DELIVERY_SCHEMA, "strict": True}
    structured = {"type": "json_schema", "json_schema": schema}
    try:
        answer = client.chat(
            [{"role": "user", "content": content}],
            max_tokens=chat.max_tokens,
            tools=[checks.tool(strict=chat.tool_choice == "required")] if chat.tool_choice else (),
            tool_choice=chat.tool_choice or None,
            response_format=structured if chat.ability == "structured" else None,
        )
    except ServerInvalid as error:
        return one_line(str(error), 200)
    return checks.chat_fault(chat, answer)


def _deep_decode(
    policy: GenerationPolicy,
    kind: Profile,
    session: Session,
    client: Client,
    limit: int,
    recipe: Recipe | None,
    relaunch: Relaunch | None,
) -> Check:
    """Return whether a long generation follows from its text, and which switch decides if not."""
    name, tokens = "deep-decode", policy.deep.prompt + kind.deep
    if tokens > limit:
        return _too_short(name, tokens, limit, recipe)
    distances = session.ask(name, _distances, policy, kind, client)
    if distances is None:
        return not_run(name, "no answer arrived", "no-answers")
    depths = {
        variant: checks.damaged_from(found, policy.deep.kl_max)
        for variant, found in distances.items()
    }
    damaged = {variant: depth for variant, depth in depths.items() if depth is not None}
    figures = [
        Figure(
            f"sound tokens, {variant}",
            kind.deep if depth is None else depth,
            "tokens",
            bound=kind.deep,
        )
        for variant, depth in depths.items()
    ]
    if not damaged:
        message = f"{kind.deep} tokens follow from their text, with a cold and with a cached prompt"
        return passed(name, message, figures=figures)
    words = ", ".join(f"from token {depth} on ({variant})" for variant, depth in damaged.items())
    message = f"tokens do not follow from their text {words}; "
    message += _cause(policy, kind, session, relaunch)
    return failed(name, message, "deep-damage", figures=figures)


def _cause(
    policy: GenerationPolicy, kind: Profile, session: Session, relaunch: Relaunch | None
) -> str:
    """Repeat a damaged generation with fewer features, and return which of them decides."""
    if relaunch is None:
        return "not repeated, as the gate did not start the server"
    for switches in (["graphs"], ["graphs", "speculation"]):
        with relaunch(switches) as client:
            again = session.ask("deep-decode", _distances, policy, kind, client)
        if again is None:
            return f"without {' and '.join(switches)} no answer arrived"
        if not any(checks.damaged_from(found, policy.deep.kl_max) for found in again.values()):
            return f"{switches[-1]} decides: without it the tokens are sound"
    return "neither graphs nor speculation decides"


def _distances(
    policy: GenerationPolicy, kind: Profile, client: Client
) -> dict[str, list[tuple[int, float]]]:
    """
    Return, for a cold and a cached prompt, depths of a long generation and their distances in nat.

    The distance is that of the distribution behind a generated token from the one that prefill
    gives for the same text, under a salt of its own, so that no block of the generation is used.
    """
    deep, salt = policy.deep, uuid.uuid4().hex
    prompt = client.tokenize(long_text(policy.line, deep.prompt))[: deep.prompt]
    found = {}
    for variant in ("prefix miss", "prefix hit"):
        answer = client.complete(
            prompt,
            max_tokens=kind.deep,
            temperature=deep.temperature,
            logprobs=policy.top,
            ignore_eos=True,
            cache_salt=salt,
        )
        every, fresh = min(deep.every, kind.deep // 8), uuid.uuid4().hex
        depths = range(every, kind.deep, every)
        probes = [
            client.complete(
                [*prompt, *answer.tokens[:depth]],
                max_tokens=1,
                logprobs=policy.top,
                cache_salt=fresh,
            )
            for depth in depths
        ]
        decoded = [(answer.tokens[depth], answer.logprobs[depth]) for depth in depths]
        expected = [(probe.tokens[0], probe.logprobs[0]) for probe in probes]
        p, q = (distributions.scores(rows, policy.top + 1) for rows in (expected, decoded))
        unsound = distributions.unsound(p, policy.top)[0] | distributions.unsound(q, policy.top)[0]
        kl = np.where(unsound, np.inf, distributions.lower_bound(p, q, policy.top))
        found[variant] = list(zip(depths, kl.tolist(), strict=True))
    return found


def _speculation(
    policy: GenerationPolicy,
    session: Session,
    texts: Mapping[str, str],
    answers: Mapping[str, Completion],
    recipe: Recipe | None,
    relaunch: Relaunch | None,
    drafts: bool,
) -> Check:
    """Return whether the greedy answers are the same in a launch without speculation."""
    if not drafts and recipe and recipe.speculation:
        return failed("speculation", "no token was drafted", "speculation-absent")
    if not drafts:
        return not_run("speculation", "no token was drafted", "no-speculation", required=False)
    if relaunch is None:
        return not_run("speculation", "the gate did not start the server", "not-relaunched")
    with relaunch(["speculation"]) as plain:
        others = session.complete(plain, texts, policy.tokens, policy.top)
    pairs = {name: (answers[name], others[name]) for name in answers if name in others}
    return checks.without_speculation(pairs, policy.tie)
