"""
A client of vLLM's server that believes nothing: every answer is whole, in time, of the model that was asked, and counted right.

All that is wrong with an answer is a `ServerInvalid` with a stable reference (`sparkwright.bench.server.answers.REASONS`); a
gate turns it into a check that is invalid. Calls share nothing, so threads may use one client at the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from sparkwright.bench.server import answers
from sparkwright.bench.server.answers import (
    Answer,
    Detokenized,
    Event,
    Models,
    Position,
    Refusal,
    Tokenized,
    Version,
)
from sparkwright.bench.server.completion import Asked, Gathering, positions
from sparkwright.bench.server.wire import LARGEST, Address, Reply, ServerInvalid

__all__ = ["Answer", "Client", "Position", "ServerInvalid"]

T = TypeVar("T")

#: The most bytes of one logprob as JSON; its decoded token is the longest part.
PER_LOGPROB = 400


class Client:
    """
    A server, and the model that it is asked for.

    Args:
        url: ``http://127.0.0.1:8000``.
        model: Its name at the server; empty for the only one that the server lists.
        timeout: Seconds between two bytes of an answer.
        deadline: Seconds of a whole answer.
        key: What the server asks of whoever asks it; empty for none.

    Raises:
        UsageError: *url* is not the address of a server. Every method raises `ServerInvalid` and nothing else.
    """

    def __init__(self, url: str, model: str = "", *, timeout: float = 60.0, deadline: float = 600.0, key: str = "") -> None:
        self._address, self._asked, self._timeout, self._deadline = Address(url, key), model, timeout, deadline
        self._known: answers.Model | None = None

    def model(self) -> str:
        """Return the model's name, which the server lists."""
        return self._model().id

    def limit(self) -> int:
        """Return how many tokens a prompt and its completion may have together."""
        limit = self._model().max_model_len
        if not limit:
            raise ServerInvalid("answer-unreadable", "the server does not say max_model_len")
        return limit

    def version(self) -> str:
        """Return the server's version of vLLM."""
        return self._get("/version", Version).version

    def metrics(self) -> dict[str, float]:
        """Return the server's counters; see `answers.metrics`."""
        with self._exchange("/metrics", None) as reply:
            self._accept(reply, "text/plain")
            body = reply.body()
        return answers.metrics(body.decode("utf-8", "replace"))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of *text*, with those that the tokenizer puts around a prompt."""
        return tuple(self._post("/tokenize", {"model": self.model(), "prompt": text}, Tokenized).tokens)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of *tokens*."""
        return self._post("/detokenize", {"model": self.model(), "tokens": _codes(tokens)}, Detokenized).prompt

    def score(self, prompt: Sequence[int], *, top: int) -> tuple[Position, ...]:
        """Return the distribution before each token of *prompt* but the first, with the *top* likeliest tokens of each."""
        model, codes = self.model(), _codes(prompt)
        self._fits(len(codes), 1)
        question = {"model": model, "prompt": codes, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top, "return_token_ids": True}
        largest = LARGEST + len(codes) * PER_LOGPROB * (top + 2)
        return positions(self._post("/v1/completions", question, Event, largest), codes, model)

    def complete(
        self, prompt: str | Sequence[int], *, tokens: int, seed: int = 0, ignore_eos: bool = False, top: int = 0, stop: Sequence[str] = ()
    ) -> Answer:
        """
        Return the likeliest continuation of *prompt* (temperature 0), streamed.

        Args:
            tokens: The most that are wanted; where *prompt* leaves no room for as many, the prompt is too long.
            ignore_eos: Whether to go on behind the token that ends a text.
            top: How many of the likeliest tokens to tell with their logarithms, at each token.
            stop: Texts at which to stop.
        """
        model, codes = self.model(), None if isinstance(prompt, str) else _codes(prompt)
        if codes is not None:
            self._fits(len(codes), tokens)
        question = {
            "model": model, "prompt": prompt if codes is None else codes, "max_tokens": tokens, "temperature": 0, "seed": seed,
            "ignore_eos": ignore_eos, "stop": list(stop), "logprobs": top or None, "return_token_ids": True,
            "return_tokens_as_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began = time.monotonic()
        gathering = Gathering(Asked(model, None if codes is None else tuple(codes), tokens, top))
        largest = LARGEST + 16 * len(prompt) + tokens * (1000 + PER_LOGPROB * (top + 1))
        with self._exchange("/v1/completions", question, largest) as reply:
            if reply.status == 400 and isinstance(prompt, str):
                self._fits(len(self.tokenize(prompt)), tokens)
            self._accept(reply, "text/event-stream")
            for event in answers.events(reply.lines()):
                gathering.add(event)
        answer = gathering.answer(time.monotonic() - began)
        if answer.finish_reason == "length" and len(answer.tokens) < tokens:
            # vLLM cuts such an answer without a word.
            self._fits(answer.prompt_tokens, tokens)
            raise ServerInvalid("usage-mismatch", f"the completion ended for its length after {len(answer.tokens)} of {tokens} tokens")
        return answer

    def profile(self, *, on: bool) -> None:
        """Tell a server that was started with `profiled.flags` to watch what runs, or to write down what it saw."""
        # Nothing is heard while the profile is written, and that takes a while.
        path = f"/{'start' if on else 'stop'}_profile"
        with self._address.exchange(path, b"", timeout=self._deadline, deadline=self._deadline) as reply:
            # The answer has no body, and so no kind.
            if reply.status != 200:
                self._accept(reply, "application/json")

    def _fits(self, prompt: int, tokens: int) -> None:
        if prompt + tokens > (limit := self.limit()):
            raise ServerInvalid("prompt-too-long", f"{prompt} tokens of the prompt and {tokens} more do not fit into {limit}")

    def _model(self) -> answers.Model:
        """Return the model's entry, asked for once."""
        if self._known is None:
            listed = self._get("/v1/models", Models).data
            fitting = [one for one in listed if one.id == self._asked or not self._asked]
            if len(fitting) != 1:
                names = ", ".join(one.id for one in listed) or "none"
                raise ServerInvalid("model-mismatch", f"the server lists {names}; asked for: {self._asked or 'the only one'}")
            self._known = fitting[0]
        return self._known

    def _get(self, path: str, kind: type[T]) -> T:
        with self._exchange(path, None) as reply:
            self._accept(reply, "application/json")
            return answers.decode(reply.body(), kind)

    def _post(self, path: str, question: Mapping[str, object], kind: type[T], largest: int = LARGEST) -> T:
        with self._exchange(path, question, largest) as reply:
            self._accept(reply, "application/json")
            return answers.decode(reply.body(), kind)

    def _exchange(
        self, path: str, question: Mapping[str, object] | None, largest: int = LARGEST
    ) -> contextlib.AbstractContextManager[Reply]:
        try:
            body = None if question is None else msgspec.json.encode(question)
        except UnicodeEncodeError as error:
            raise ServerInvalid("prompt-unreadable", f"the prompt is no text: {error}") from None
        return self._address.exchange(path, body, timeout=self._timeout, deadline=self._deadline, largest=largest)

    def _accept(self, reply: Reply, kind: str) -> None:
        """Raise `ServerInvalid` where *reply* is not what a server of ours answers in the form *kind*."""
        if 300 <= reply.status < 400:
            raise ServerInvalid("server-refused", f"status {reply.status}: sent on to {reply.location}, where nothing is asked")
        if reply.kind == "text/html":
            raise ServerInvalid("server-html", f"a web page came, with status {reply.status}")
        if reply.status != 200:
            raise ServerInvalid("server-refused", f"status {reply.status}: {_words(reply.body())}")
        if reply.packed or reply.kind != kind:
            found = (reply.kind or "of no kind") + (" and packed" if reply.packed else "")
            raise ServerInvalid("answer-unreadable", f"the answer is {found}, not {kind}")


def _words(body: bytes) -> str:
    """Return the server's own explanation in the *body* of an error."""
    try:
        return answers.decode(body, Refusal).error.message
    except ServerInvalid:
        return body[:200].decode("utf-8", "replace")


def _codes(tokens: Sequence[int]) -> list[int]:
    codes = [int(token) for token in tokens]
    if not codes or min(codes) < 0 or max(codes) >= 2**31:
        raise ServerInvalid("prompt-unreadable", f"a prompt of {len(codes)} tokens holds none, or numbers that are no tokens")
    return codes
