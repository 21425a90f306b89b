"""The client against servers that are wrong in every way a server can be: each ends with its reference, soon, and in little memory."""

from __future__ import annotations

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

from sparkwright.bench.server import answers
from sparkwright.bench.server.client import Client, ServerInvalid


@pytest.fixture
def listen() -> Iterator[Callable[[Say], Listener]]:
    """Return what starts a server; all are gone at the end."""
    made: list[Listener] = []

    def start(say: Say) -> Listener:
        made.append(Listener(say))
        return made[-1]

    yield start
    for one in made:
        one.close()


def refused(client: Client, *, prompt: str | tuple[int, ...] = (7, 8), tokens: int = 2, top: int = 0) -> ServerInvalid:
    with pytest.raises(ServerInvalid) as caught:
        client.complete(prompt, tokens=tokens, top=top)
    assert caught.value.reference in answers.REASONS
    return caught.value


def test_a_sound_stream_is_an_answer(listen: Callable[[Say], Listener]) -> None:
    """Tokens, text, reason and counts are those that came."""
    answer = Client(listen(completing(stream(*SOUND))).url).complete((7, 8), tokens=2)
    assert (answer.tokens, answer.text, answer.finish_reason, answer.prompt_tokens, answer.chunks) == ((5, 6), "<5><6>", "length", 2, 2)


SHORT = stream(event(5, "length"), {**USAGE, "usage": {"prompt_tokens": 2, "completion_tokens": 1}})
CHUNKS = head("text/event-stream", None, "200 OK", "transfer-encoding: chunked")

WRONG: dict[str, tuple[bytes, str]] = {
    "HTML": (head("text/html") + b"<html>hello</html>", "server-html"),
    "HTML that calls itself JSON": (head("text/event-stream") + b"<!DOCTYPE html><p>login", "server-html"),
    "HTML in the middle": (stream(SOUND[0], "<html>502</html>", done=False), "server-html"),
    "half a stream": (stream(SOUND[0], done=False), "stream-truncated"),
    "half an event": (stream(*SOUND)[:-180], "stream-truncated"),
    "a stream without a reason to end": (stream(SOUND[0], USAGE), "stream-truncated"),
    "no end of the stream": (stream(*SOUND, done=False), "stream-truncated"),
    "less than it announced": (head("text/event-stream", 5000) + b"data: ", "stream-truncated"),
    "chunks that break off": (CHUNKS + b"40\r\ndata: {", "stream-truncated"),
    "an error in the middle": (stream(SOUND[0], {"error": {"message": "EngineCore died", "code": 500}}), "stream-error"),
    "an abort": (stream(SOUND[0], event(6, "abort"), USAGE), "stream-error"),
    "an error at once": (stream({"error": {"message": "Token id 99 is out of vocabulary", "code": 400}}), "server-refused"),
    "a status": (whole({"error": {"message": "no such route", "code": 404}}, "404 Not Found"), "server-refused"),
    "a status without words": (head(length=0, status="503 Service Unavailable"), "server-refused"),
    "another model's name": (stream({**SOUND[0], "model": "other"}, *SOUND[1:]), "model-mismatch"),
    "invalid UTF-8": (stream(*SOUND).replace(b"<5>", b"\xff\xfe"), "answer-unreadable"),
    "nesting without end": (stream('data: {"extra": ' + "[" * 200_000), "answer-unreadable"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "answer-unreadable"),
    "a packed answer": (head("text/event-stream", None, "200 OK", "content-encoding: gzip") + b"\x1f\x8b", "answer-unreadable"),
    "JSON instead of a stream": (whole({"choices": []}), "answer-unreadable"),
    "prose in the stream": (stream(SOUND[0], "hello"), "answer-unreadable"),
    "text without tokens": (stream(event(choice={"token_ids": None}), *SOUND[1:]), "answer-unreadable"),
    "a negative token": (stream(event(-5), *SOUND[1:]), "answer-unreadable"),
    "a token of 400 digits": (stream(*SOUND).replace(b"[5]", b"[" + b"9" * 400 + b"]"), "answer-unreadable"),
    "tokens after the end": (stream(event(5, "stop"), event(6), USAGE), "answer-unreadable"),
    "more tokens than asked for": (stream(SOUND[0], event(6), event(7, "length"), USAGE), "answer-too-large"),
    "fewer tokens than asked for": (SHORT, "usage-mismatch"),
    "no count": (stream(*SOUND[:2]), "usage-mismatch"),
    "a wrong count": (stream(*SOUND[:2], {**USAGE, "usage": {"prompt_tokens": 2, "completion_tokens": 3}}), "usage-mismatch"),
    "a wrong count of the prompt": (stream(*SOUND[:2], {**USAGE, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}), "usage-mismatch"),
    "another prompt": (stream(event(5, choice={"prompt_token_ids": [7, 9]}), *SOUND[1:]), "usage-mismatch"),
    "an endless line": (head("text/event-stream") + b"data: " + b"x" * 2_000_000, "answer-too-large"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_an_answer_has_its_reference(name: str, listen: Callable[[Say], Listener]) -> None:
    """Every wrong answer raises, and nothing but `ServerInvalid`."""
    reply, reference = WRONG[name]
    assert refused(Client(listen(completing(reply)).url)).reference == reference


@pytest.mark.parametrize("field", ["tokens", "token_logprobs", "top_logprobs"])
def test_logprobs_that_do_not_fit_their_tokens_are_refused(field: str, listen: Callable[[Say], Listener]) -> None:
    """A list that is shorter than the tokens is no list of theirs."""
    sound = {"tokens": ["token_id:5"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:5": -0.5, "token_id:9": None}]}
    for logprobs, works in ((sound, True), ({**sound, field: []}, False), ({**sound, "tokens": ["hello"]}, False)):
        reply = stream(event(5, "length", choice={"logprobs": logprobs}), {**USAGE, "usage": {"prompt_tokens": 2, "completion_tokens": 1}})
        client = Client(listen(completing(reply)).url)
        if works:
            (found,) = client.complete((7, 8), tokens=1, top=2).logprobs
            assert found[5] == -0.5
            assert found[9] != found[9], "null is not a number"
        else:
            assert refused(client, tokens=1, top=2).reference == "answer-unreadable"


ENDLESS = {
    "tokens": endless(stream(*[SOUND[0]] * 100, done=False).partition(b"\r\n\r\n")[2], head("text/event-stream")),
    "comments": endless(b": still here\n\n" * 1000, head("text/event-stream")),
    "empty events": endless(b'data: {"model": "toy", "choices": []}\n\n' * 1000, head("text/event-stream")),
    "headers": endless(b"x-more: " + b"y" * 1000 + b"\r\n", b"HTTP/1.1 200 OK\r\n"),
    "one header": endless(b"y" * 10_000, b"HTTP/1.1 200 OK\r\nx-more: "),
    "interim replies": endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "trailers": endless(b"x-more: y\r\n" * 100, CHUNKS + b"0\r\n"),
    "an error page": endless(b"sorry " * 1000, head("text/plain", None, "500 Internal Server Error")),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended(name: str, listen: Callable[[Say], Listener]) -> None:
    """Whatever comes without an end is cut off after some megabytes, and little of it is kept."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = refused(Client(listen(completing(ENDLESS[name])).url, deadline=120))
    assert found.reference in ("answer-too-large", "answer-unreadable", "stream-truncated")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def stopping(connection: socket.socket, path: str) -> None:
    connection.sendall(stream(SOUND[0], done=False))
    silent(connection, path)


SLOW = {
    "never": (silent, "server-silent"),
    "a byte a moment": (trickling(stream(*SOUND)), "server-slow"),
    "a byte of the header a moment": (trickling(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000), "server-slow"),
    "stops in the middle": (stopping, "server-slow"),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_server_ends_at_the_deadline(name: str, listen: Callable[[Say], Listener]) -> None:
    """Neither silence nor a byte now and then holds the client up for longer than it was told to wait."""
    say, reference = SLOW[name]
    assert refused(Client(listen(completing(say)).url, timeout=1, deadline=2)).reference == reference


def test_a_server_that_hangs_up_is_unreachable(listen: Callable[[Say], Listener]) -> None:
    """Without a byte of an answer there was no answer."""
    assert refused(Client(listen(completing(b"")).url)).reference == "server-unreachable"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert refused(Client(f"http://127.0.0.1:{port}")).reference == "server-unreachable"


def test_a_redirect_is_not_followed(listen: Callable[[Say], Listener]) -> None:
    """Nothing is asked at the place that a server sends the client to."""
    elsewhere = listen(completing(stream(*SOUND)))
    sent = head("text/html", 0, "307 Temporary Redirect", f"location: {elsewhere.url}/v1/completions")
    found = refused(Client(listen(completing(sent)).url))
    assert found.reference == "server-refused"
    assert "307" in found.says
    assert elsewhere.asked == []


@pytest.mark.parametrize(
    ("models", "asked", "reference"),
    [
        ({"data": []}, "", "model-mismatch"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "", "model-mismatch"),
        (MODELS, "other", "model-mismatch"),
        ({"data": [{"id": "toy"}]}, "", "answer-unreadable"),
        ({"data": {"id": "toy"}}, "", "answer-unreadable"),
        (b"null", "", "answer-unreadable"),
        (b'{"data": [{"id": "toy", "max_', "", "stream-truncated"),
    ],
)
def test_the_model_must_be_the_one_that_is_asked_for(models: object, asked: str, reference: str, listen: Callable[[Say], Listener]) -> None:
    """No question is sent to a server that lists another model, or none, or several where none was named."""
    server = listen(lambda connection, _: connection.sendall(whole(models)))
    assert refused(Client(server.url, asked)).reference == reference
    assert set(server.asked) == {"/v1/models"}


def test_a_prompt_without_room_is_not_sent(listen: Callable[[Say], Listener]) -> None:
    """A prompt that leaves no room for the answer is refused here, and one that is no text is, too."""
    server = listen(completing(stream(*SOUND)))
    client = Client(server.url)
    assert refused(client, prompt=tuple(range(60)), tokens=5).reference == "prompt-too-long"
    assert refused(client, prompt="half of \ud83d").reference == "prompt-unreadable"
    assert refused(client, prompt=()).reference == "prompt-unreadable"
    assert refused(client, prompt=(1, -1)).reference == "prompt-unreadable"
    assert set(server.asked) == {"/v1/models"}


def test_an_answer_that_was_cut_for_room_is_no_answer(listen: Callable[[Say], Listener]) -> None:
    """vLLM cuts an answer that meets the limit without a word; the client says so."""
    usage = {**USAGE, "usage": {"prompt_tokens": 63, "completion_tokens": 1}}
    reply = stream(event(5, "length", choice={"prompt_token_ids": list(range(63))}), usage)
    assert refused(Client(listen(completing(reply)).url), prompt="long", tokens=9).reference == "prompt-too-long"


SCORE: dict[str, Any] = {
    "model": "toy",
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    "choices": [{"prompt_token_ids": [7, 8], "prompt_logprobs": [None, {"8": {"logprob": -3.0}, "5": {"logprob": -0.1}}]}],
}


def test_scores_belong_to_the_prompt(listen: Callable[[Say], Listener]) -> None:
    """A position has its own token among its scores, and there are as many as tokens."""
    client = Client(listen(completing(whole(SCORE))).url)
    (position,) = client.score((7, 8), top=1)
    assert (position.token, position.logprob, position.top) == (8, -3.0, {8: -3.0, 5: -0.1})
    for prompt, reference in (((7, 9), "usage-mismatch"), ((7, 8, 9), "usage-mismatch")):
        with pytest.raises(ServerInvalid) as caught:
            client.score(prompt, top=1)
        assert caught.value.reference == reference
    lacking = {**SCORE, "choices": [{"prompt_logprobs": [None, {"5": {"logprob": -0.1}}]}]}
    with pytest.raises(ServerInvalid) as caught:
        Client(listen(completing(whole(lacking))).url).score((7, 8), top=1)
    assert caught.value.reference == "answer-unreadable"


@pytest.mark.parametrize(
    "url", ["ftp://host", "127.0.0.1:8000", "http://", "http://u:p@host", "http://host/?q", "http://ho st", "http://host:99999", "file:///etc"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """Only http and https to a host, without a password."""
    with refusal("usage"):
        Client(url)


def test_counters_are_read_with_their_labels() -> None:
    """A name stands with its labels, and once more as the sum of all of them."""
    text = '# HELP a b\na{x="1"} 2.0\na{x="{y} z"} 3\nb 4e0\nc{q="0.5"} NaN 1700000000\n'
    read = answers.metrics(text)
    assert (read['a{x="1"}'], read['a{x="{y} z"}'], read["a"], read["b"]) == (2, 3, 5, 4)
    assert read["c"] != read["c"]
    with pytest.raises(ServerInvalid):
        answers.metrics("not a metric\n")


@given(st.binary(max_size=300))
def test_no_bytes_are_an_event_by_accident(data: bytes) -> None:
    """Whatever comes is taken apart, or refused with a known reference."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    with pytest.raises(ServerInvalid) as caught:
        list(answers.events(lines))
    assert caught.value.reference in answers.REASONS
    assert caught.value.says.isprintable()
