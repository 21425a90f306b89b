"""
A client of vLLM's OpenAI-compatible server that trusts no reply.

Each reply is complete, in time, of the requested model, and its token counts are right, or the
method raises `ServerInvalid` with a stable reason of `REASONS` and nothing else. Replies come
whole: vLLM gives log probabilities of a prompt only so, and vllm-rs measures the times of streams.
Fields are those of OpenAI's protocols and vLLM's additions to them; unknown ones are ignored, so
later releases may add to them. Calls share no state, so threads may use one client at once.

    client = Client("http://127.0.0.1:8000")
    completion = client.complete("One, two,", max_tokens=16, logprobs=5)
    answer = client.chat([{"role": "user", "content": "Hello"}], max_tokens=64)
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec

from sparkwright.core.console import one_line
from sparkwright.core.errors import UsageError
from sparkwright.core.http import LARGEST, HttpFailure, exchange
from sparkwright.core.words import JSON_CUT_OFF, NOT_A_NUMBER

#: Why a reply does not count: stable reference → what it means and what to do.
REASONS: Mapping[str, str] = {
    "server-unreachable": "No server of HTTP listens at the address, or it closed the connection "
    "without a reply. Check that the server still runs.",
    "server-slow": "No complete reply came in time. The server hangs, or still loads its model. "
    "Look at its log, and at what else uses the machine.",
    "server-refused": "The server answered with an error or a redirect. Its message is quoted.",
    "answer-unreadable": "The reply does not have the form of vLLM's replies. A proxy, another "
    "program or an unknown release of vLLM answers.",
    "answer-too-large": "The reply has more bytes or more tokens than were asked for. The server "
    "does not end its replies.",
    "stream-truncated": "The reply ended before it was complete. The server or a proxy broke down; "
    "look at the server's log.",
    "stream-error": "The server gave up in the middle of its reply. Look at the server's log.",
    "model-mismatch": "Another model answers than the one asked for. The wrong server runs at the "
    "address.",
    "prompt-too-long": "The prompt and the tokens asked for do not fit into the server's "
    "--max-model-len. Raise it, or shorten them.",
    "usage-mismatch": "The server counts other tokens than it sent, or read another prompt than it "
    "was sent. Its figures are no measurement.",
    "not-a-number": "The server computed logarithms that are NaN or minus infinity, or whose "
    "probabilities add up to more than 1: a kernel is wrong.",
}

#: A line of Prometheus' text format: name, labels, value, and perhaps a time. What matches digits
#: alone never follows its like, or a line of a megabyte of digits would take hours.
METRIC = re.compile(
    r"([^\s{]+)(\{.*\})?\s+(NaN|[+-]?(?:Inf|[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?))"
    r"(?:\s+[0-9]+)?\s*",
    re.IGNORECASE,
)
#: Sampling from the distribution itself. vLLM takes what a request leaves out from the model's
#: generation_config.json, and logprobs are those before it.
RAW_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
#: The most bytes of one log probability and of one token as JSON.
PER_LOGPROB, PER_TOKEN = 400, 1000

T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ServerInvalid(Exception):
    """
    The behaviour of a server does not count as a measurement.

    Attributes:
        reason: Stable, in kebab-case; `REASONS` explains each.
        message: What was seen, in one printable line.
        status: The HTTP status of an error, else 0.
    """

    def __init__(self, reason: str, message: str, status: int = 0) -> None:
        self.reason, self.message, self.status = reason, one_line(message, 400), status
        super().__init__(f"{reason}: {self.message}")


class Usage(msgspec.Struct, frozen=True):
    """The tokens that the server counted."""

    prompt_tokens: int
    completion_tokens: int = 0


class Completion(msgspec.Struct, frozen=True):
    """
    A completion.

    Attributes:
        tokens: Token ids of the completion.
        text: The same, as the server decoded it.
        finish_reason: ``length`` or ``stop``.
        logprobs: For each token of the completion: token → natural logarithm of its probability, of
            the chosen token and the most probable ones; NaN if the server says null. Empty unless
            asked for.
        prompt_logprobs: The same for each token of the prompt but the first.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[dict[int, float], ...] = ()
    prompt_logprobs: tuple[dict[int, float], ...] = ()


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool; *arguments* is the text that the model wrote, which may not be JSON."""

    name: str
    arguments: str


class ChatAnswer(msgspec.Struct, frozen=True):
    """
    The answer of a chat.

    Attributes:
        content: The text for the user, without reasoning and tool calls.
        reasoning: The text that the reasoning parser separated.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    usage: Usage


class _Logprobs(msgspec.Struct):
    tokens: list[Annotated[str, msgspec.Meta(pattern="^token_id:[0-9]{1,10}$")]]
    token_logprobs: list[float | None]
    top_logprobs: list[
        dict[Annotated[str, msgspec.Meta(pattern="^token_id:[0-9]{1,10}$")], float | None] | None
    ]


class _Score(msgspec.Struct):
    logprob: float | None


class _Call(msgspec.Struct):
    function: ToolCall


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str
    text: str = ""
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    token_ids: tuple[TokenId, ...] | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[TokenId, _Score] | None] | None = None


class _Generated(msgspec.Struct):
    model: str
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    usage: Usage


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None  # None for an adapter
    parent: str | None = None  # of an adapter


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: tuple[TokenId, ...]


class Client:
    """
    A server, and the model that it is asked for.

    Args:
        url: ``http://127.0.0.1:8000``. No proxy of the environment is used.
        model: Its name at the server; empty for the only one that the server lists, adapters aside.
        deadline: Seconds for a complete reply, each request anew.
        key: The server's ``VLLM_API_KEY``; empty for none.

    Raises:
        UsageError: *url* is not the address of a server.
    """

    def __init__(
        self, url: str, model: str = "", *, deadline: float = 600.0, key: str = ""
    ) -> None:
        host = r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])"
        match = re.fullmatch(rf"https?://{host}(?::([0-9]{{1,5}}))?(?:/[\w./~-]*)?", url, re.ASCII)
        if not match or not 0 < int(match[1] or 80) < 1 << 16:
            raise UsageError(
                "usage",
                f"{one_line(url, 200)} is not the address of a server, such as "
                "http://127.0.0.1:8000.",
            )
        self.url, self.deadline = url.rstrip("/"), deadline
        self._requested, self._key = model, key

    def model(self) -> str:
        """Return the name of the model, which the server lists."""
        return self._model.id

    def max_model_len(self) -> int:
        """Return how many tokens a prompt and its completion may have together."""
        if not self._model.max_model_len:
            raise ServerInvalid("answer-unreadable", "the server does not state max_model_len")
        return self._model.max_model_len

    def version(self) -> str:
        """Return the server's version of vLLM."""
        return self._ask("/version", _Version).version

    def metrics(self) -> dict[str, float]:
        """
        Return the server's metrics, which are in Prometheus' text format.

        Each name stands with its labels as written, and the sum over all labels under the bare
        name.
        """
        values: dict[str, float] = defaultdict(float)
        body = self._exchange("GET", "/metrics")
        for line in body.decode("utf-8", "replace").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            match = METRIC.fullmatch(line)
            if match is None:
                raise ServerInvalid("answer-unreadable", f"a line is no metric: {line[:80]!r}")
            name, labels, value = match.groups()
            values[name] += float(value)
            if labels:
                values[name + labels] = float(value)
        return dict(values)

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """
        Profile the requests of the block; the trace is complete when the block has ended.

        The server must have been started with ``--profiler-config``.
        """
        self._exchange("POST", "/start_profile")
        try:
            yield
        finally:
            self._exchange("POST", "/stop_profile")

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of *text*, with those that the tokenizer adds to a prompt."""
        return self._ask("/tokenize", _Tokens, {"model": self.model(), "prompt": text}).tokens

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        ignore_eos: bool = False,
        cache_salt: str | None = None,
    ) -> Completion:
        """
        Return a continuation of *prompt*, whose tokens follow their distributions as *logprobs*
        states them, whatever generation_config.json says.

        Args:
            prompt: A text, or token ids, which must be exactly those that the server read.
            logprobs: How many of the most probable tokens to return beside each chosen one.
            prompt_logprobs: The same for each token of the prompt, which must be token ids.
            ignore_eos: Continue after the token that ends a text, up to *max_tokens*.
            cache_salt: Use only blocks of the prefix cache that were stored under the same salt.

        Raises:
            ServerInvalid: Among others ``prompt-too-long`` if *prompt* leaves no room for
                *max_tokens*.
        """
        codes = None if isinstance(prompt, str) else [int(token) for token in prompt]
        self._require_room(len(codes or ()), max_tokens)
        request = {
            "prompt": prompt if codes is None else codes,
            "temperature": temperature,
            **RAW_SAMPLING,
            "seed": seed,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "ignore_eos": ignore_eos,
            "cache_salt": cache_salt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        size = 16 * len(prompt) + max_tokens * PER_LOGPROB * ((logprobs or 0) + 1)
        if prompt_logprobs is not None:
            size += len(prompt) * PER_LOGPROB * (prompt_logprobs + 2)
        choice, usage = self._generate("/v1/completions", request, max_tokens, size)
        tokens, read = choice.token_ids or (), choice.prompt_token_ids or codes or []
        if usage.completion_tokens != len(tokens):
            raise ServerInvalid(
                "usage-mismatch",
                f"the server counts {usage.completion_tokens} tokens, {len(tokens)} came",
            )
        if read and (usage.prompt_tokens != len(read) or read != (codes or read)):
            raise ServerInvalid(
                "usage-mismatch", f"{usage.prompt_tokens} tokens of the prompt were read, or others"
            )
        if choice.finish_reason == "length" and len(tokens) < max_tokens:
            self._require_room(usage.prompt_tokens, max_tokens)
            raise ServerInvalid(
                "usage-mismatch",
                f"the completion ended for its length after {len(tokens)} of {max_tokens} tokens",
            )
        return Completion(
            tokens,
            choice.text,
            choice.finish_reason,
            () if logprobs is None else _distributions(choice.logprobs, len(tokens)),
            () if prompt_logprobs is None else _scores(choice.prompt_logprobs or [], read),
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        max_tokens: int,
        tools: Sequence[Mapping[str, object]] = (),
        tool_choice: str | None = None,
        response_format: Mapping[str, object] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        cache_salt: str | None = None,
        template: Mapping[str, object] | None = None,
    ) -> ChatAnswer:
        """
        Return the model's answer to *messages*, sampled as its owners get it: with top_p, top_k,
        min_p and penalties of its generation_config.json, as no log probability is judged here.

        Args:
            messages: In OpenAI's form.
            tools: Definitions of functions.
            tool_choice: ``auto``, ``required``, ``none``.
            response_format: Such as ``{"type": "json_schema", "json_schema": {…}}``.
            cache_salt: As of `complete`.
            template: Variables of the chat template.
        """
        request = {
            "messages": list(messages),
            "tools": list(tools) or None,
            "tool_choice": tool_choice,
            "response_format": response_format,
            "temperature": temperature,
            "seed": seed,
            "cache_salt": cache_salt,
            "chat_template_kwargs": template,
        }
        choice, usage = self._generate("/v1/chat/completions", request, max_tokens)
        message = choice.message or _Message()
        return ChatAnswer(
            message.content or "",
            message.reasoning or "",
            tuple(call.function for call in message.tool_calls or ()),
            choice.finish_reason,
            usage,
        )

    def _generate(
        self, path: str, request: Mapping[str, Any], max_tokens: int, size: int = 0
    ) -> tuple[_Choice, Usage]:
        """
        Send a *request*, whose None fields the server decides, and return its reply.

        Args:
            size: Bytes that the reply may have beside its tokens.
        """
        body = {key: value for key, value in request.items() if value is not None}
        body |= {"model": self.model(), "max_tokens": max_tokens}
        reply = self._ask(path, _Generated, body, LARGEST + max_tokens * PER_TOKEN + size)
        (choice,), usage = reply.choices, reply.usage
        if reply.model != self.model():
            raise ServerInvalid(
                "model-mismatch", f"{reply.model!r} answers, {self.model()!r} was asked for"
            )
        if choice.finish_reason not in ("length", "stop", "tool_calls"):
            raise ServerInvalid("stream-error", f"the server ended it: {choice.finish_reason}")
        if max(len(choice.token_ids or ()), usage.completion_tokens) > max_tokens:
            raise ServerInvalid("answer-too-large", f"more than {max_tokens} tokens came")
        return choice, usage

    def _require_room(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > (limit := self.max_model_len()):
            raise ServerInvalid(
                "prompt-too-long",
                f"a prompt of {prompt_tokens} tokens and {max_tokens} more exceed {limit}",
            )

    @cached_property
    def _model(self) -> _Model:
        listed = self._ask("/v1/models", _Models).data
        matching = [
            model
            for model in listed
            if (model.id == self._requested if self._requested else not model.parent)
        ]
        if len(matching) != 1:
            names = ", ".join(model.id for model in listed) or "no model"
            raise ServerInvalid(
                "model-mismatch",
                f"the server lists {names}; asked for: {self._requested or 'the only one'}",
            )
        return matching[0]

    def _ask(
        self,
        path: str,
        kind: type[T],
        request: Mapping[str, object] | None = None,
        limit: int = LARGEST,
    ) -> T:
        """Return the reply of *path* as a *kind*; with a *request* it is a POST."""
        body = self._exchange("POST" if request else "GET", path, request, limit)
        try:
            return msgspec.json.decode(body, type=kind)
        # The errors of msgspec and of UTF-8 are ValueErrors; deep nesting is not.
        except (ValueError, RecursionError) as error:
            reason = "stream-truncated" if JSON_CUT_OFF.search(str(error)) else "answer-unreadable"
            raise ServerInvalid(
                reason, f"{error}; it begins {body[:80].decode('utf-8', 'replace')!r}"
            ) from None

    def _exchange(
        self,
        method: str,
        path: str,
        request: Mapping[str, object] | None = None,
        limit: int = LARGEST,
    ) -> bytes:
        """Return the body of a reply with status 200."""
        body = b"" if request is None else msgspec.json.encode(request)
        try:
            with exchange(
                method,
                self.url + path,
                headers={"Content-Type": "application/json"},
                data=body,
                token=self._key,
                direct=True,
                seconds=self.deadline,
                # The deadline alone decides: vLLM may compute for minutes before the first byte.
                stall=self.deadline + 60,
            ) as reply:
                reply.read(limit)
                if reply.status == 200:
                    return reply.body
                text = reply.headers.get("location") or reply.body.decode("utf-8", "replace")
                reason = "not-a-number" if NOT_A_NUMBER.search(text) else "server-refused"
                raise ServerInvalid(
                    reason, f"status {reply.status} of {path}: {text[:300]}", reply.status
                )
        except HttpFailure as failure:
            reasons = {
                "slow": "server-slow",
                "size": "answer-too-large",
                "broken": "stream-truncated",
            }
            reason = reasons.get(failure.kind, "server-unreachable")
            raise ServerInvalid(reason, str(failure)) from None


def _number(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob


def _distributions(logprobs: _Logprobs | None, count: int) -> tuple[dict[int, float], ...]:
    """Return the distribution of each of *count* tokens, in the form of `Completion`."""
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs) if logprobs else ()
    if [len(values) for values in lists] != [count] * 3:
        raise ServerInvalid("answer-unreadable", f"{count} tokens came without as many logprobs")
    distributions = list[dict[int, float]]()
    for name, own, others in zip(*lists, strict=True):
        values = {**(others or {}), name: own}
        distributions.append(
            {
                int(token.removeprefix("token_id:")): _number(value)
                for token, value in values.items()
            }
        )
    return tuple(distributions)


def _scores(
    scores: Sequence[Mapping[int, _Score] | None], prompt: Sequence[int]
) -> tuple[dict[int, float], ...]:
    """Return the distribution before each token of *prompt* but the first."""
    if len(scores) != len(prompt):
        raise ServerInvalid(
            "answer-unreadable", f"{len(scores)} tokens of a prompt of {len(prompt)} have logprobs"
        )
    distributions = list[dict[int, float]]()
    for position, token in enumerate(prompt[1:], 1):
        top = scores[position] or {}
        if token not in top:
            raise ServerInvalid(
                "answer-unreadable", f"token {token} of the prompt, at {position}, has no logprob"
            )
        distributions.append({other: _number(score.logprob) for other, score in top.items()})
    return tuple(distributions)
