"""Completions and scores, put together from what a server sends and held against what it was asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from sparkwright.bench.server.answers import Answer, Choice, Event, Position, Usage
from sparkwright.bench.server.wire import ServerInvalid


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _token(name: str) -> int:
    """Return the token that *name* stands for under ``return_tokens_as_token_ids``."""
    digits = name.removeprefix("token_id:")
    if digits == name or not digits.isascii() or not digits.isdigit() or len(digits) > 10:
        raise ServerInvalid("answer-unreadable", f"logprobs name a token {name[:40]!r} instead of token_id:N")
    return int(digits)


class Asked(msgspec.Struct, frozen=True):
    """What a completion was asked for: *prompt* is None where it was given as text."""

    model: str
    prompt: tuple[int, ...] | None
    tokens: int
    top: int


class Gathering:
    """A completion whose events are still coming."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[dict[int, float]] = []
        self._finish = ""
        self._prompt: list[int] | None = None
        self._usage: Usage | None = None
        self._chunks = 0

    def add(self, event: Event) -> None:
        """Take one *event*; raise `ServerInvalid` where it does not belong to what was asked."""
        self._refuse(event)
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._choice(choice)

    def _refuse(self, event: Event) -> None:
        if event.error:
            # vLLM sends some refusals as the first event of a stream that began with 200.
            refused = not self._tokens and isinstance(event.error.code, int) and 400 <= event.error.code < 500
            raise ServerInvalid("server-refused" if refused else "stream-error", f"the server says: {event.error.message}")
        if event.model != self._asked.model:
            raise ServerInvalid("model-mismatch", f"{event.model!r} answers, asked was {self._asked.model!r}")

    def _choice(self, choice: Choice) -> None:
        if self._finish and (choice.text or choice.token_ids):
            raise ServerInvalid("answer-unreadable", "tokens came after the end of the completion")
        if choice.text and not choice.token_ids:
            raise ServerInvalid("answer-unreadable", "the server sends text without token_ids; it is no vLLM from 0.10.2 on")
        self._prompt = choice.prompt_token_ids or self._prompt
        self._text.append(choice.text)
        self._finish = choice.finish_reason or self._finish
        if choice.token_ids:
            self._tokens += choice.token_ids
            self._chunks += 1
            if self._asked.top:
                self._logprobs += self._distributions(choice, len(choice.token_ids))
        if len(self._tokens) > self._asked.tokens:
            raise ServerInvalid("answer-too-large", f"more than the {self._asked.tokens} tokens that were asked for came")

    def _distributions(self, choice: Choice, count: int) -> Iterator[dict[int, float]]:
        found = choice.logprobs
        if found is None or not len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs or ()) == count:
            raise ServerInvalid("answer-unreadable", f"{count} tokens came without as many logprobs")
        for name, own, others in zip(found.tokens, found.token_logprobs, found.top_logprobs or (), strict=True):
            yield {_token(other): _number(value) for other, value in (others or {}).items()} | {_token(name): _number(own)}

    def answer(self, seconds: float) -> Answer:
        """Return the completion; raise `ServerInvalid` where it is not whole or the server's counts are not those of what came."""
        if not self._finish:
            raise ServerInvalid("stream-truncated", f"the stream ended after {len(self._tokens)} tokens without a finish reason")
        if self._finish not in ("length", "stop"):
            raise ServerInvalid("stream-error", f"the server ended the completion after {len(self._tokens)} tokens: {self._finish}")
        usage, asked = self._usage, self._asked.prompt
        if usage is None:
            raise ServerInvalid("usage-mismatch", "the server does not say how many tokens it counted")
        if usage.completion_tokens != len(self._tokens):
            raise ServerInvalid("usage-mismatch", f"the server counts {usage.completion_tokens} tokens and sent {len(self._tokens)}")
        prompt = self._prompt if asked is None else list(asked)
        if prompt is not None and (usage.prompt_tokens != len(prompt) or (self._prompt or prompt) != prompt):
            raise ServerInvalid("usage-mismatch", f"of a prompt of {len(prompt)} tokens, {usage.prompt_tokens} or others were read")
        text, logprobs = "".join(self._text), tuple(self._logprobs)
        return Answer(usage.prompt_tokens, tuple(self._tokens), text, self._finish, logprobs, self._chunks, seconds)


def positions(event: Event, prompt: Sequence[int], model: str) -> tuple[Position, ...]:
    """Return the distributions before every token of *prompt* but the first; raise `ServerInvalid` where they are not of it."""
    if event.model != model:
        raise ServerInvalid("model-mismatch", f"{event.model!r} answers, asked was {model!r}")
    choice = event.choices[0] if event.choices else Choice()
    found = choice.prompt_logprobs
    if found is None:
        raise ServerInvalid("answer-unreadable", "the answer has no prompt_logprobs")
    counted = event.usage.prompt_tokens if event.usage else None
    if len(found) != len(prompt) or counted != len(prompt) or (choice.prompt_token_ids or list(prompt)) != list(prompt):
        raise ServerInvalid("usage-mismatch", f"{len(prompt)} tokens were sent, {len(found)} scored, {counted} counted")
    made: list[Position] = []
    for token, scores in zip(prompt[1:], found[1:], strict=True):
        if scores is None or token not in scores:
            raise ServerInvalid("answer-unreadable", f"no score of the prompt's own token {token} at position {len(made) + 1}")
        made.append(Position(token, _number(scores[token].logprob), {other: _number(score.logprob) for other, score in scores.items()}))
    return tuple(made)
