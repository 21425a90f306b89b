"""
A client of vLLM's OpenAI-compatible server that trusts no reply.

Each reply is complete, in time, of the requested model, and its token counts are right, or the
method raises `ServerInvalid` with a stable reason (`REASONS` of `openai_schema`) and nothing else.
Calls share no state, so threads may use one client at the same time.

    client = Client("http://127.0.0.1:8000")
    completion = client.complete("One, two,", max_tokens=16, logprobs=5)
    answer = client.chat([{"role": "user", "content": "Hello"}], max_tokens=64)
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from sparkwright.bench.server import openai_schema as schema
from sparkwright.bench.server.openai_schema import (
    ChatAnswer,
    Completion,
    Model,
    Position,
    ServerInvalid,
    ToolCall,
    Usage,
)
from sparkwright.core import http as bounded_http
from sparkwright.core.console import one_line
from sparkwright.core.errors import UsageError
from sparkwright.core.http import LARGEST, HttpFailure, Reply

__all__ = [
    "ChatAnswer",
    "Client",
    "Completion",
    "Model",
    "Position",
    "ServerInvalid",
    "ToolCall",
    "Usage",
]

T = TypeVar("T")

#: The most bytes of one logprob and of one token as JSON.
PER_LOGPROB, PER_TOKEN = 400, 1000


class Client:
    """
    A server, and the model that it is asked for.

    Args:
        url: ``http://127.0.0.1:8000``. No proxy of the environment is used.
        model: Its name at the server; empty for the only one that the server lists.
        deadline: Seconds for a complete reply, each request anew.
        key: The server's ``VLLM_API_KEY``; empty for none.

    Raises:
        UsageError: *url* is not the address of a server.
    """

    def __init__(
        self, url: str, model: str = "", *, deadline: float = 600.0, key: str = ""
    ) -> None:
        self.url, self.deadline = _checked(url), deadline
        self._requested, self._key = model, key

    def models(self) -> tuple[Model, ...]:
        """Return the models that the server lists."""
        return _present(self._ask("/v1/models").data)

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
        return _present(self._ask("/version").version)

    def health(self) -> None:
        """Raise `ServerInvalid` unless ``/health`` says 200."""
        self._command("GET", "/health")

    def metrics(self) -> dict[str, float]:
        """Return the server's metrics; see `openai_schema.metrics`."""
        with self._exchange("GET", "/metrics") as reply:
            body = _body(reply, "text/plain")
        return schema.metrics(body.decode("utf-8", "replace"))

    def reset_prefix_cache(self) -> bool:
        """
        Empty the prefix cache, and return False if the server has no such endpoint.

        vLLM has it only with ``VLLM_SERVER_DEV_MODE=1``.
        """
        try:
            self._command("POST", "/reset_prefix_cache")
        except ServerInvalid as error:
            if error.status in (404, 405):
                return False
            raise
        return True

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """
        Profile the requests of the block; the trace is complete when the block has ended.

        The server must have been started with ``--profiler-config``.
        """
        self._command("POST", "/start_profile")
        try:
            yield
        finally:
            self._command("POST", "/stop_profile")

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of *text*, with those that the tokenizer adds to a prompt."""
        request = {"model": self.model(), "prompt": text}
        return _present(self._ask("/tokenize", request).tokens)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of *tokens*."""
        request = {"model": self.model(), "tokens": _token_ids(tokens)}
        return _present(self._ask("/detokenize", request).prompt)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> Completion:
        """
        Return a continuation of *prompt*.

        Args:
            prompt: A text, or token ids, which must be exactly those that the server read.
            logprobs: How many of the most probable tokens to return beside each chosen one.
            prompt_logprobs: The same for each token of the prompt, which must be token ids; vLLM
                returns them only without *stream*, which is ignored then.
            stop: Texts that end the completion.
            ignore_eos: Continue after the token that ends a text, up to *max_tokens*.
            cache_salt: Use only blocks of the prefix cache that were stored under the same salt.

        Raises:
            ServerInvalid: Among others ``prompt-too-long`` if *prompt* leaves no room for
                *max_tokens*, which vLLM would cut silently.
        """
        codes = None if isinstance(prompt, str) else _token_ids(prompt)
        if codes is not None:
            self._require_room(len(codes), max_tokens)
        request = {
            "prompt": prompt if codes is None else codes,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "stop": list(stop),
            "ignore_eos": ignore_eos,
            "cache_salt": cache_salt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        scored = 0 if prompt_logprobs is None else len(prompt) * (prompt_logprobs + 2)
        limit = (
            LARGEST
            + 16 * len(prompt)
            + max_tokens * (PER_TOKEN + PER_LOGPROB * ((logprobs or 0) + 1))
            + scored * PER_LOGPROB
        )
        stream = stream and prompt_logprobs is None
        try:
            reply = self._generate("/v1/completions", request, limit, stream=stream)
        except ServerInvalid as error:
            if error.status == 400 and isinstance(prompt, str):
                self._require_room(len(self.tokenize(prompt)), max_tokens)
            raise
        completion = reply.completion(codes, with_logprobs=logprobs is not None)
        if (
            prompt_logprobs is not None
            and codes
            and len(completion.prompt_logprobs) < len(codes) - 1
        ):
            raise ServerInvalid("answer-unreadable", "the reply has no prompt_logprobs")
        if completion.finish_reason == "length" and len(completion.tokens) < max_tokens:
            self._require_room(completion.usage.prompt_tokens, max_tokens)
            message = f"ended for its length after {len(completion.tokens)} of {max_tokens} tokens"
            raise ServerInvalid("usage-mismatch", f"the completion {message}")
        return completion

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        max_tokens: int,
        tools: Sequence[Mapping[str, object]] = (),
        tool_choice: str | Mapping[str, object] | None = None,
        response_format: Mapping[str, object] | None = None,
        temperature: float = 0.0,
        seed: int | None = 0,
        chat_template_kwargs: Mapping[str, object] | None = None,
        stream: bool = True,
    ) -> ChatAnswer:
        """
        Return the model's answer to *messages*.

        Args:
            messages: In OpenAI's form; an image is a part of a content, see `image_part`.
            tools: Definitions of functions.
            tool_choice: ``auto``, ``required``, ``none``, or a function by name.
            response_format: Such as ``{"type": "json_schema", "json_schema": {…}}``.
            chat_template_kwargs: Such as ``{"enable_thinking": False}``.
        """
        request = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "tools": list(tools) or None,
            "tool_choice": tool_choice,
            "response_format": response_format,
            "temperature": temperature,
            "seed": seed,
            "chat_template_kwargs": chat_template_kwargs,
        }
        limit = LARGEST + max_tokens * PER_TOKEN
        path = "/v1/chat/completions"
        return self._generate(path, request, limit, stream=stream).chat_answer()

    def _generate(
        self, path: str, request: Mapping[str, Any], limit: int, *, stream: bool
    ) -> schema.GeneratedReply:
        """Send a *request*, whose None fields the server decides, and return its reply."""
        body = {key: value for key, value in request.items() if value is not None}
        body |= {"model": self.model()}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        begin = time.monotonic()
        with self._exchange("POST", path, body) as reply:
            if stream:
                _require(reply, "text/event-stream")
                events = schema.events(reply.pieces(limit))
            else:
                body_bytes = _body(reply, "application/json", limit)
                events = iter([schema.decode(body_bytes, schema.Event)])
            return schema.GeneratedReply(events, self.model(), request["max_tokens"], begin=begin)

    def _require_room(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > (limit := self.max_model_len()):
            message = f"a prompt of {prompt_tokens} tokens and {max_tokens} more exceed {limit}"
            raise ServerInvalid("prompt-too-long", message)

    @cached_property
    def _model(self) -> Model:
        listed = self.models()
        matching = [model for model in listed if model.id == self._requested or not self._requested]
        if len(matching) != 1:
            names = ", ".join(model.id for model in listed) or "no model"
            message = f"the server lists {names}; asked for: {self._requested or 'the only one'}"
            raise ServerInvalid("model-mismatch", message)
        return matching[0]

    def _command(self, method: str, path: str) -> None:
        """Send a request whose reply has no body of interest."""
        with self._exchange(method, path) as reply:
            _refuse_error(reply)

    def _ask(self, path: str, request: Mapping[str, object] | None = None) -> schema.Event:
        with self._exchange("POST" if request else "GET", path, request) as reply:
            return schema.decode(_body(reply, "application/json"), schema.Event)

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, request: Mapping[str, object] | None = None
    ) -> Iterator[Reply]:
        """Yield the reply to a request, with its body unread."""
        try:
            body = b"" if request is None else msgspec.json.encode(request)
        except UnicodeEncodeError as error:
            raise ServerInvalid("prompt-unreadable", f"the prompt is no text: {error}") from None
        options: dict[str, Any] = {"token": self._key, "seconds": self.deadline}
        # The deadline alone decides: vLLM may compile for minutes before the first byte.
        options |= {"stall": self.deadline + 60, "direct": True}
        options |= {"headers": {"Content-Type": "application/json"}, "data": body}
        began = False
        try:
            with bounded_http.exchange(method, self.url + path, **options) as reply:
                began = True
                yield reply
        except HttpFailure as failure:
            raise ServerInvalid(_reason(failure, began=began), str(failure)) from None


def _present(value: T | None) -> T:
    if value is None:
        raise ServerInvalid("answer-unreadable", "the reply lacks the field that was asked for")
    return value


def image_part(data: bytes, media_type: str = "image/png") -> dict[str, object]:
    """Return the part of a message's content that holds an image."""
    url = f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _checked(url: str) -> str:
    """Return *url* without a last slash; raise `UsageError` if it is not a server's address."""
    host = r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])"
    match = re.fullmatch(rf"https?://{host}(?::([0-9]{{1,5}}))?(?:/[\w./~-]*)?", url, re.ASCII)
    if not match or not 0 < int(match[1] or 80) < 1 << 16:
        message = f"{one_line(url, 200)} is not the address of a server"
        raise UsageError("usage", f"{message}, such as http://127.0.0.1:8000.")
    return url.rstrip("/")


def _reason(failure: HttpFailure, *, began: bool) -> str:
    """Return why a server's reply does not count, in the words of `openai_schema.REASONS`."""
    reasons = {
        "slow": "server-slow" if began else "server-silent",
        "size": "answer-too-large",
        "broken": "stream-truncated" if began else "answer-unreadable",
    }
    cause: BaseException | None = failure
    while cause and not isinstance(cause, http.client.HTTPException):
        cause = cause.__context__
    unanswered = cause is None or isinstance(cause, http.client.RemoteDisconnected)
    default = "server-unreachable" if unanswered else "answer-unreadable"
    return reasons.get(failure.kind, default)


def _refuse_error(reply: Reply) -> None:
    """Raise `ServerInvalid` unless the status is 200."""
    media_type = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if 300 <= reply.status < 400:
        message = f"status {reply.status}: redirected to {reply.headers.get('location', '')}"
        raise ServerInvalid("server-refused", message, reply.status)
    if media_type == "text/html":
        raise ServerInvalid("server-html", f"a web page came, status {reply.status}", reply.status)
    if reply.status != 200:
        reply.read()
        try:
            error = schema.decode(reply.body, schema.Event).error
        except ServerInvalid:
            error = None
        words = error.message if error else reply.body[:200].decode("utf-8", "replace")
        raise ServerInvalid("server-refused", f"status {reply.status}: {words}", reply.status)


def _require(reply: Reply, media_type: str) -> None:
    """Raise `ServerInvalid` unless *reply* succeeded with an unpacked body of *media_type*."""
    _refuse_error(reply)
    actual = reply.headers.get("content-type", "no type").partition(";")[0].strip().lower()
    packed = reply.headers.get("content-encoding", "identity").strip().lower()
    if actual != media_type or packed != "identity":
        message = f"the reply is {actual} ({packed}) instead of {media_type}"
        raise ServerInvalid("answer-unreadable", message)


def _body(reply: Reply, media_type: str, limit: int = LARGEST) -> bytes:
    _require(reply, media_type)
    reply.read(limit)
    return reply.body


def _token_ids(tokens: Sequence[int]) -> list[int]:
    codes = [int(token) for token in tokens]
    if not codes or min(codes) < 0 or max(codes) >= 2**31:
        message = f"a prompt of {len(codes)} tokens is empty or holds numbers that are no tokens"
        raise ServerInvalid("prompt-unreadable", message)
    return codes
