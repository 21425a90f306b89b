"""The client against servers that are wrong in every way a server can be: each is refused with its reason, in time, in little memory."""

import math
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support.badserver import (
    MODELS,
    Listener,
    Say,
    completing,
    completion,
    endless,
    head,
    silent,
    trickling,
    whole,
)

from sparkwright.bench.server.client import REASONS, Client, ServerInvalid, ToolCall

Listen = Callable[[Say], Listener]


def invalid(reason: str) -> pytest.RaisesExc[ServerInvalid]:
    """Return a context that expects a printable failure for *reason*, which is declared."""
    assert reason in REASONS
    return pytest.raises(ServerInvalid, check=lambda error: error.reason == reason and error.message.isprintable())


LOGPROBS = {
    "tokens": ["token_id:5", "token_id:6"],
    "token_logprobs": [-0.5, None],
    "top_logprobs": [{"token_id:9": -2.0}, None],
}


def test_completion_holds_tokens_text_counts_and_distributions(listen: Listen) -> None:
    scores = [None, {"8": {"logprob": -3.0}, "5": {"logprob": -0.1}}]
    server = listen(completing(whole(completion(logprobs=LOGPROBS, prompt_logprobs=scores))))
    answer = Client(server.url).complete((7, 8), max_tokens=2, logprobs=1, prompt_logprobs=1)
    assert (answer.tokens, answer.text, answer.finish_reason) == ((5, 6), "<5><6>", "length")
    assert answer.logprobs[0] == {5: -0.5, 9: -2.0}
    assert math.isnan(answer.logprobs[1][6])
    assert answer.prompt_logprobs == ({8: -3.0, 5: -0.1},)


def used(prompt: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": tokens}


SOUND = whole(completion())
CHUNKED = head("application/json", None, "200 OK", "transfer-encoding: chunked")

WRONG: dict[str, tuple[bytes | Say, str]] = {
    "HTML": (head("text/html") + b"<html>hello</html>", "answer-unreadable"),
    "HTML that calls itself JSON": (head() + b"<!DOCTYPE html><p>login", "answer-unreadable"),
    "half a reply": (head() + SOUND.partition(b"\r\n\r\n")[2][:-80], "stream-truncated"),
    "less than Content-Length": (head(length=5000) + b"{", "stream-truncated"),
    "a chunk that breaks off": (CHUNKED + b"40\r\n{", "stream-truncated"),
    "a chunk of no length": (CHUNKED + b"zz\r\n{", "stream-truncated"),
    "an abort": (whole(completion(finish_reason="abort")), "stream-error"),
    "no end": (whole(completion(finish_reason=None)), "answer-unreadable"),
    "an error": (whole({"error": {"message": "no such route", "code": 404}}, "404 Not Found"), "server-refused"),
    "logarithms that JSON cannot hold": (
        whole({"error": {"message": "Out of range float values are not JSON compliant: nan", "code": 400}}, "400 Bad Request"), "not-a-number",
    ),
    "a status without words": (head(length=0, status="503 Service Unavailable"), "server-refused"),
    "another model's name": (whole({**completion(), "model": "other"}), "model-mismatch"),
    "invalid UTF-8": (SOUND.replace(b"<5><6>", b"\xff\xfe><6>"), "answer-unreadable"),
    "NaN": (whole(completion(logprobs={**LOGPROBS, "token_logprobs": [math.nan, 0]})), "answer-unreadable"),
    "deep JSON": (whole(b'{"extra": ' + b"[" * 200_000), "answer-unreadable"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "server-unreachable"),
    "a length that is no number": (head("application/json", None, "200 OK", "content-length: 1e9"), "stream-truncated"),
    "a packed reply": (head("application/json", None, "200 OK", "content-encoding: gzip") + b"\x1f\x8b", "answer-unreadable"),
    "a stream": (head("text/event-stream") + b"data: {}\n\n", "answer-unreadable"),
    "no choice": (whole({**completion(), "choices": []}), "answer-unreadable"),
    "a negative token": (whole(completion(token_ids=[5, -6])), "answer-unreadable"),
    "a token of 400 digits": (whole(completion(token_ids=[5, 10**400])), "answer-unreadable"),
    "more tokens than asked for": (whole({**completion(token_ids=[5, 6, 7]), "usage": used(2, 3)}), "answer-too-large"),
    "fewer tokens than asked for": (whole({**completion(token_ids=[5]), "usage": used(2, 1)}), "usage-mismatch"),
    "no count": (whole({**completion(), "usage": None}), "answer-unreadable"),
    "text without tokens": (whole(completion(token_ids=[])), "usage-mismatch"),
    "a wrong count of the prompt": (whole({**completion(), "usage": used(3, 2)}), "usage-mismatch"),
    "another prompt": (whole(completion(prompt_token_ids=[7, 9])), "usage-mismatch"),
    "logprobs of fewer tokens": (whole(completion(logprobs={**LOGPROBS, "tokens": ["token_id:5"]})), "answer-unreadable"),
    "logprobs of words": (whole(completion(logprobs={**LOGPROBS, "tokens": ["a", "b"]})), "answer-unreadable"),
    "no logprobs": (SOUND, "answer-unreadable"),
    "scores of more tokens": (whole(completion(logprobs=LOGPROBS, prompt_logprobs=[None, {}, {}])), "answer-unreadable"),
    "scores without the prompt's": (
        whole(completion(logprobs=LOGPROBS, prompt_logprobs=[None, {"5": {"logprob": -0.1}}])), "answer-unreadable",
    ),
    "no reply": (b"", "server-unreachable"),
    "an endless text": (endless(b"x" * 10_000, head() + b'{"text": "'), "answer-too-large"),
    "headers without end": (endless(b"x-more: " + b"y" * 1000 + b"\r\n", b"HTTP/1.1 200 OK\r\n"), "server-unreachable"),
    "a header without end": (endless(b"y" * 10_000, b"HTTP/1.1 200 OK\r\nx-more: "), "server-unreachable"),
    "interim replies without end": (endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 100), "server-slow"),
    "trailers without end": (endless(b"x-more: y\r\n" * 100, CHUNKED + b"0\r\n"), "server-slow"),
    "an endless error page": (
        endless(b"sorry " * 1000, head("text/plain", None, "500 Internal Server Error")), "answer-too-large",
    ),
    "silence": (silent, "server-slow"),
    "headers one by one": (trickling(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000), "server-slow"),
    "a body byte by byte": (trickling(SOUND, whole=150), "server-slow"),
}  # fmt: skip


@pytest.mark.parametrize(("reply", "reason"), WRONG.values(), ids=WRONG)
def test_wrong_endless_or_slow_reply_is_refused_with_its_reason(reply: bytes | Say, reason: str, listen: Listen) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with invalid(reason):
        client = Client(listen(completing(reply)).url, deadline=1 if reason in ("server-slow", "server-unreachable") else 120)
        client.complete((7, 8), max_tokens=2, logprobs=1, prompt_logprobs=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


@pytest.mark.parametrize(
    ("models", "requested", "reason"),
    [
        ({"data": []}, "", "model-mismatch"),
        (
            {"data": [{"id": "a", "max_model_len": 9}, {"id": "b", "max_model_len": 9}]},
            "",
            "model-mismatch",
        ),
        (MODELS, "other", "model-mismatch"),
        ({"data": [{"id": "toy"}]}, "", "answer-unreadable"),
        (b'{"data": [{"id": "toy", "max_', "", "stream-truncated"),
    ],
)
def test_server_without_the_requested_model_gets_no_prompt(
    models: object, requested: str, reason: str, listen: Listen
) -> None:
    server = listen(lambda connection, _: connection.sendall(whole(models)))
    with invalid(reason):
        Client(server.url, requested).complete((7, 8), max_tokens=2)
    assert set(server.asked) == {"/v1/models"}


def test_adapters_beside_a_model_are_not_asked(listen: Listen) -> None:
    """vLLM lists them with the model that they change."""
    adapter = {"id": "toy-lora", "parent": "toy", "max_model_len": None}
    server = listen(lambda connection, _: connection.sendall(whole({"data": [*MODELS["data"], adapter]})))
    assert Client(server.url).model() == "toy"
    assert Client(server.url, "toy-lora").model() == "toy-lora"


def test_prompt_without_room_is_not_sent_and_a_completion_that_vllm_cut_for_room_is_refused(listen: Listen) -> None:
    server = listen(completing(SOUND))
    with invalid("prompt-too-long"):
        Client(server.url).complete(tuple(range(60)), max_tokens=5)
    assert set(server.asked) <= {"/v1/models"}
    reply = {**completion(token_ids=[5], prompt_token_ids=list(range(63))), "usage": used(63, 1)}
    with invalid("prompt-too-long"):
        Client(listen(completing(whole(reply))).url).complete("long", max_tokens=9)


def chat(**fields: Any) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "Thinking",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}],
    } | fields
    # vLLM 0.32.0 sends null for what was not asked for.
    none = {"token_ids": None, "logprobs": None, "prompt_logprobs": None}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"} | none
    return {"model": "toy", "choices": [choice], "usage": used(2, 20)}


def test_chat_answer_holds_content_reasoning_and_tool_calls(listen: Listen) -> None:
    server = listen(completing(whole(chat())))
    answer = Client(server.url).chat([{"role": "user", "content": "Look"}], max_tokens=20)
    assert (answer.content, answer.reasoning, answer.finish_reason) == (
        "",
        "Thinking",
        "tool_calls",
    )
    assert answer.tool_calls == (ToolCall("weather", '{"city": "Ulm"}'),)
    assert server.asked == ["/v1/models", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (chat(tool_calls=[{"function": {"name": "weather"}}]), "answer-unreadable"),
        (chat(content=["Hello"]), "answer-unreadable"),
        ({**chat(), "usage": used(2, 21)}, "answer-too-large"),
    ],
)
def test_wrong_chat_answer_is_refused(reply: object, reason: str, listen: Listen) -> None:
    with invalid(reason):
        Client(listen(completing(whole(reply))).url).chat(
            [{"role": "user", "content": "Hello"}], max_tokens=20
        )


def test_profile_ends_with_its_block(listen: Listen) -> None:
    server = listen(lambda connection, _: connection.sendall(head(length=0)))
    with pytest.raises(KeyError), Client(server.url).profile():
        raise KeyError
    assert server.asked == ["/start_profile", "/stop_profile"]


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "127.0.0.1:8000", "http://u:p@host", "http://host/?q", "http://host:99999"],
)
def test_url_of_no_server_is_refused(url: str) -> None:
    with refusal("usage"):
        Client(url)


def test_metrics_stand_with_their_labels_and_as_sums(listen: Listen) -> None:
    text = b'# HELP a b\na{x="1"} 2.0\na{x="{y} z"} 3\nb 4e0\nc{q="0.5"} NaN 1700000000\n'
    replies = [head("text/plain") + text, head("text/plain") + b"not a metric\n"]
    client = Client(listen(lambda connection, _: connection.sendall(replies.pop(0))).url)
    read = client.metrics()
    assert (read['a{x="1"}'], read['a{x="{y} z"}'], read["a"], read["b"]) == (2, 3, 5, 4)
    assert math.isnan(read["c"])
    with invalid("answer-unreadable"):
        client.metrics()


@pytest.mark.parametrize("line", [b"a " + b"1" * 400_000 + b"x", b"a 1" + b" " * 400_000 + b"x", b"a" + b"{} " * 200_000])
def test_hostile_metrics_are_refused_at_once(listen: Listen, line: bytes) -> None:
    client = Client(listen(lambda connection, _: connection.sendall(head("text/plain") + line)).url)
    began = time.monotonic()
    with invalid("answer-unreadable"):
        client.metrics()
    assert time.monotonic() - began < 5
