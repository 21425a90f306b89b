"""The client against servers that are wrong in every way a server can be: each is refused with its reason, in time, in little memory."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support.badserver import (
    MODELS,
    SOUND,
    USAGE,
    Listener,
    Say,
    completing,
    endless,
    event,
    head,
    silent,
    stream,
    trickling,
    whole,
)

from sparkwright.bench.server import openai_schema
from sparkwright.bench.server.client import Client, ServerInvalid, ToolCall, image_part

Listen = Callable[[Say], Listener]


@pytest.fixture(name="listen")
def _listen() -> Iterator[Listen]:
    with contextlib.ExitStack() as stack:

        def start(say: Say) -> Listener:
            listener = Listener(say)
            stack.callback(listener.close)
            return listener

        yield start


@contextlib.contextmanager
def invalid(reason: str) -> Iterator[None]:
    assert reason in openai_schema.REASONS
    with pytest.raises(ServerInvalid) as caught:
        yield
    assert caught.value.reason == reason, caught.value
    assert caught.value.message.isprintable()


def test_completion_holds_tokens_text_counts_and_times(listen: Listen) -> None:
    answer = Client(listen(completing(stream(*SOUND))).url).complete((7, 8), max_tokens=2)
    assert (answer.tokens, answer.text, answer.finish_reason) == ((5, 6), "<5><6>", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2)
    assert len(answer.chunk_seconds) == 2
    assert 0 < answer.chunk_seconds[0] <= answer.chunk_seconds[1] <= answer.seconds


def counted(prompt: int, completion: int) -> dict[str, Any]:
    return {**USAGE, "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


CHUNKED = head("text/event-stream", None, "200 OK", "transfer-encoding: chunked")

WRONG: dict[str, tuple[bytes, str]] = {
    "HTML": (head("text/html") + b"<html>hello</html>", "server-html"),
    "HTML that calls itself a stream": (head("text/event-stream") + b"<!DOCTYPE html><p>login", "server-html"),
    "HTML in the middle": (stream(SOUND[0], "<html>502</html>", done=False), "server-html"),
    "half an event": (stream(*SOUND)[:-180], "stream-truncated"),
    "a stream without a finish_reason": (stream(SOUND[0], USAGE), "stream-truncated"),
    "no end of the stream": (stream(*SOUND, done=False), "stream-truncated"),
    "less than Content-Length": (head("text/event-stream", 5000) + b"data: ", "stream-truncated"),
    "a chunk that breaks off": (CHUNKED + b"40\r\ndata: {", "stream-truncated"),
    "a chunk of no length": (CHUNKED + b"zz\r\ndata: {", "stream-truncated"),
    "an error in the middle": (stream(SOUND[0], {"error": {"message": "EngineCore died", "code": 500}}), "stream-error"),
    "an abort": (stream(SOUND[0], event(6, "abort"), USAGE), "stream-error"),
    "an error at once": (stream({"error": {"message": "Token id 99 is out of vocabulary", "code": 400}}), "server-refused"),
    "a status": (whole({"error": {"message": "no such route", "code": 404}}, "404 Not Found"), "server-refused"),
    "a status without words": (head(length=0, status="503 Service Unavailable"), "server-refused"),
    "another model's name": (stream({**SOUND[0], "model": "other"}, *SOUND[1:]), "model-mismatch"),
    "invalid UTF-8": (stream(*SOUND).replace(b"<5>", b"\xff\xfe"), "answer-unreadable"),
    "deep JSON": (stream('data: {"extra": ' + "[" * 200_000), "answer-unreadable"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "answer-unreadable"),
    "a length that is no number": (head("text/event-stream", None, "200 OK", "content-length: 1e9"), "answer-unreadable"),
    "a packed reply": (head("text/event-stream", None, "200 OK", "content-encoding: gzip") + b"\x1f\x8b", "answer-unreadable"),
    "JSON instead of a stream": (whole({"choices": []}), "answer-unreadable"),
    "prose in the stream": (stream(SOUND[0], "hello"), "answer-unreadable"),
    "text without tokens": (stream(event(choice={"token_ids": None}), *SOUND[1:]), "answer-unreadable"),
    "a negative token": (stream(event(-5), *SOUND[1:]), "answer-unreadable"),
    "a token of 400 digits": (stream(*SOUND).replace(b"[5]", b"[" + b"9" * 400 + b"]"), "answer-unreadable"),
    "tokens after the end": (stream(event(5, "stop"), event(6), USAGE), "answer-unreadable"),
    "more tokens than asked for": (stream(SOUND[0], event(6), event(7, "length"), USAGE), "answer-too-large"),
    "fewer tokens than asked for": (stream(event(5, "length"), counted(2, 1)), "usage-mismatch"),
    "no count": (stream(*SOUND[:2]), "usage-mismatch"),
    "a wrong count": (stream(*SOUND[:2], counted(2, 3)), "usage-mismatch"),
    "a wrong count of the prompt": (stream(*SOUND[:2], counted(3, 2)), "usage-mismatch"),
    "another prompt": (stream(event(5, choice={"prompt_token_ids": [7, 9]}), *SOUND[1:]), "usage-mismatch"),
    "no reply": (b"", "server-unreachable"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_reply_is_refused_with_its_reason(name: str, listen: Listen) -> None:
    reply, reason = WRONG[name]
    with invalid(reason):
        Client(listen(completing(reply)).url).complete((7, 8), max_tokens=2)


def test_port_without_listener_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with invalid("server-unreachable"):
        Client(f"http://127.0.0.1:{port}").complete((7, 8), max_tokens=2)


ENDLESS = {
    "tokens": (stream(*[SOUND[0]] * 100, done=False).partition(b"\r\n\r\n")[2], head("text/event-stream"), "answer-too-large"),
    "comments": (b": still here\n\n" * 1000, head("text/event-stream"), "answer-too-large"),
    "a line": (b"x" * 10_000, head("text/event-stream") + b"data: ", "answer-too-large"),
    "headers": (b"x-more: " + b"y" * 1000 + b"\r\n", b"HTTP/1.1 200 OK\r\n", "answer-unreadable"),
    "one header": (b"y" * 10_000, b"HTTP/1.1 200 OK\r\nx-more: ", "answer-unreadable"),
    "interim replies": (b"HTTP/1.1 100 Continue\r\n\r\n" * 100, b"", "server-silent"),
    "trailers": (b"x-more: y\r\n" * 100, CHUNKED + b"0\r\n", "server-slow"),
    "an error page": (b"sorry " * 1000, head("text/plain", None, "500 Internal Server Error"), "answer-too-large"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_reply_is_cut_off(name: str, listen: Listen) -> None:
    piece, begin, reason = ENDLESS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with invalid(reason):
        deadline = 1 if reason.startswith("server") else 120
        Client(listen(completing(endless(piece, begin))).url, deadline=deadline).complete((7, 8), max_tokens=2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def stopping(connection: socket.socket, path: str) -> None:
    connection.sendall(stream(SOUND[0], done=False))
    silent(connection, path)


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (silent, "server-silent"),
        (trickling(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000), "server-silent"),
        (trickling(stream(*SOUND), whole=200), "server-slow"),
        (stopping, "server-slow"),
    ],
)
def test_slow_server_is_left_at_the_deadline(say: Say, reason: str, listen: Listen) -> None:
    with invalid(reason):
        Client(listen(completing(say)).url, deadline=1).complete((7, 8), max_tokens=2)


def test_redirect_is_not_followed_and_proxy_not_used(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = listen(completing(stream(*SOUND)))
    monkeypatch.setenv("http_proxy", elsewhere.url)
    moved = head("text/html", 0, "307 Temporary Redirect", f"location: {elsewhere.url}/v1/completions")
    with invalid("server-refused"):
        Client(listen(completing(moved)).url).complete((7, 8), max_tokens=2)
    assert elsewhere.asked == []


@pytest.mark.parametrize(
    ("models", "requested", "reason"),
    [
        ({"data": []}, "", "model-mismatch"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "", "model-mismatch"),
        (MODELS, "other", "model-mismatch"),
        ({"data": [{"id": "toy"}]}, "", "answer-unreadable"),
        ({"data": {"id": "toy"}}, "", "answer-unreadable"),
        (b'{"data": [{"id": "toy", "max_', "", "stream-truncated"),
    ],
)
def test_server_without_the_requested_model_gets_no_prompt(models: object, requested: str, reason: str, listen: Listen) -> None:
    server = listen(lambda connection, _: connection.sendall(whole(models)))
    with invalid(reason):
        Client(server.url, requested).complete((7, 8), max_tokens=2)
    assert set(server.asked) == {"/v1/models"}


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [(tuple(range(60)), "prompt-too-long"), ("half of \ud83d", "prompt-unreadable"), ((), "prompt-unreadable"), ((1, -1), "prompt-unreadable")],
)
def test_prompt_without_room_or_text_is_not_sent(prompt: Any, reason: str, listen: Listen) -> None:
    server = listen(completing(stream(*SOUND)))
    with invalid(reason):
        Client(server.url).complete(prompt, max_tokens=5)
    assert set(server.asked) <= {"/v1/models"}


def test_completion_that_vllm_cut_for_room_is_refused(listen: Listen) -> None:
    reply = stream(event(5, "length", choice={"prompt_token_ids": list(range(63))}), counted(63, 1))
    with invalid("prompt-too-long"):
        Client(listen(completing(reply)).url).complete("long", max_tokens=9)


LOGPROBS = {"tokens": ["token_id:5"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:5": -0.5, "token_id:9": None}]}


@pytest.mark.parametrize("wrong", [{}, {"tokens": []}, {"token_logprobs": []}, {"top_logprobs": []}, {"tokens": ["hello"]}])
def test_logprobs_belong_to_their_tokens(wrong: dict[str, object], listen: Listen) -> None:
    reply = stream(event(5, "length", choice={"logprobs": {**LOGPROBS, **wrong}}), counted(2, 1))
    client = Client(listen(completing(reply)).url)
    if wrong in ({}, {"top_logprobs": []}):
        (found,) = client.complete((7, 8), max_tokens=1, logprobs=2).logprobs
        assert found[5] == -0.5
        assert wrong or found[9] != found[9], "null is not a number"
    else:
        with invalid("answer-unreadable"):
            client.complete((7, 8), max_tokens=1, logprobs=2)


SCORES = [None, {"8": {"logprob": -3.0}, "5": {"logprob": -0.1}}]


@pytest.mark.parametrize(
    ("prompt", "scores", "reason"),
    [
        ((7, 8), SCORES, ""),
        ((7, 9), SCORES, "usage-mismatch"),
        ((7, 8), [*SCORES, {}], "usage-mismatch"),
        ((7, 8), [None, {"5": {"logprob": -0.1}}], "answer-unreadable"),
        ((7, 8), None, "answer-unreadable"),
    ],
)
def test_prompt_logprobs_belong_to_the_prompt(prompt: tuple[int, ...], scores: object, reason: str, listen: Listen) -> None:
    choice = {"prompt_token_ids": [7, 8], "prompt_logprobs": scores}
    client = Client(listen(completing(whole({**event(5, "length", choice=choice), "usage": counted(2, 1)["usage"]}))).url)
    with invalid(reason) if reason else contextlib.nullcontext():
        (position,) = client.complete(prompt, max_tokens=1, prompt_logprobs=1).prompt_logprobs
        assert (position.token, position.logprob, position.top) == (8, -3.0, {8: -3.0, 5: -0.1})


def delta(finish: str | None = None, key: str = "delta", **message: Any) -> dict[str, Any]:
    return {"model": "toy", "choices": [{"index": 0, key: {"role": "assistant", **message}, "finish_reason": finish}]}


def call(index: int | None, arguments: str, name: str | None = None) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": "c1" if name else None, "function": {"name": name, "arguments": arguments}}]}


CHAT = (
    delta(content=""), delta(reasoning="Think"), delta(reasoning_content="ing"), delta(content="Hello"),
    delta(**call(0, "", "weather")), delta(**call(0, '{"city":')), delta(**call(0, ' "Ulm"}')),
    delta(content="", finish="tool_calls"), counted(2, 20),
)  # fmt: skip


@pytest.mark.parametrize("streamed", [True, False])
def test_chat_answer_holds_content_reasoning_and_tool_calls(streamed: bool, listen: Listen) -> None:
    complete = delta("tool_calls", "message", content="Hello", reasoning="Thinking", **call(None, '{"city": "Ulm"}', "weather"))
    reply = stream(*CHAT) if streamed else whole({**complete, "usage": counted(2, 20)["usage"]})
    server = listen(completing(reply))
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look"}, image_part(b"\x89PNG")]}]
    answer = Client(server.url).chat(messages, max_tokens=20, stream=streamed)
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Hello", "Thinking", "tool_calls")
    assert answer.tool_calls == (ToolCall("weather", '{"city": "Ulm"}'),)
    assert (answer.usage.completion_tokens, len(answer.chunk_seconds)) == (20, 6 if streamed else 1)
    assert server.asked == ["/v1/models", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (CHAT[:-2], "stream-truncated"),
        (CHAT[:-1], "usage-mismatch"),
        ((*CHAT[:-1], counted(2, 21)), "answer-too-large"),
        ((delta(**call(3, "", "weather")), *CHAT[-2:]), "answer-unreadable"),
        ((delta(**call(-1, "", "weather")), *CHAT[-2:]), "answer-unreadable"),
        ((*CHAT[:-1], delta(content="more"), CHAT[-1]), "answer-unreadable"),
        ((delta("content_filter", content="no"), CHAT[-1]), "stream-error"),
    ],
)
def test_wrong_chat_answer_is_refused(events: tuple[object, ...], reason: str, listen: Listen) -> None:
    with invalid(reason):
        Client(listen(completing(stream(*events))).url).chat([{"role": "user", "content": "Hello"}], max_tokens=20)


def test_profile_ends_with_its_block_and_a_missing_endpoint_is_a_fact(listen: Listen) -> None:
    absent = whole({"error": {"message": "Not Found"}}, "404 Not Found")
    replies = {"/reset_prefix_cache": absent, "/health": head(length=0), "/start_profile": head(length=0), "/stop_profile": head(length=0)}
    server = listen(lambda connection, path: connection.sendall(replies[path]))
    client = Client(server.url)
    client.health()
    with pytest.raises(KeyError), client.profile():
        raise KeyError
    assert server.asked == ["/health", "/start_profile", "/stop_profile"]
    assert client.reset_prefix_cache() is False
    replies["/reset_prefix_cache"] = head(length=0)
    assert client.reset_prefix_cache() is True
    replies["/health"] = replies["/reset_prefix_cache"] = whole(b"", "503 Service Unavailable")
    for ask in (client.health, client.reset_prefix_cache):
        with invalid("server-refused"):
            ask()


@pytest.mark.parametrize(
    "url", ["ftp://host", "127.0.0.1:8000", "http://", "http://u:p@host", "http://host/?q", "http://ho st", "http://host:99999", "file:///etc"]
)
def test_url_of_no_server_is_refused(url: str) -> None:
    with refusal("usage"):
        Client(url)


def test_metrics_stand_with_their_labels_and_as_sums() -> None:
    read = openai_schema.metrics('# HELP a b\na{x="1"} 2.0\na{x="{y} z"} 3\nb 4e0\nc{q="0.5"} NaN 1700000000\n')
    assert (read['a{x="1"}'], read['a{x="{y} z"}'], read["a"], read["b"]) == (2, 3, 5, 4)
    assert read["c"] != read["c"]
    with invalid("answer-unreadable"):
        openai_schema.metrics("not a metric\n")


@given(st.binary(max_size=300))
def test_random_bytes_are_no_stream(data: bytes) -> None:
    with pytest.raises(ServerInvalid) as caught:
        list(openai_schema.events([data]))
    assert caught.value.reason in openai_schema.REASONS
