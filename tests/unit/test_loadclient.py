"""Our own load client: it counts and times what came, and whatever is wrong with a server is said of the request, soon."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.badserver import Listener, endless, head
from tests.support.load import client, prompts, recorded
from tests.support.load.client import Own

from sparkwright.gates.load.order import LoadInvalid, Order
from sparkwright.gates.load.reference.behaviour import Behaviour, Fault
from sparkwright.gates.load.reference.running import started
from sparkwright.gates.server.completion import Asked


def order(url: str, **more: object) -> Order:
    """Return a small order."""
    wanted: dict[str, object] = {"prompt": 16, "answer": 10, "concurrency": 2, "requests": 4, "warmups": 1, "patience": 30.0, **more}
    return msgspec.convert({"url": url, "model": "reference", **wanted}, Order)


@pytest.mark.parametrize("chunk", [1, 3])
def test_it_counts_tokens_chunks_and_prompts(chunk: int) -> None:
    """Tokens are as ordered whatever a chunk holds, chunks are events with tokens, and warm-ups are not among the requests."""
    with started(Behaviour(ttft=0.02, tpot=0.004, chunk=chunk)) as server:
        run = Own().measure(order(server.url))
    assert [(one.tokens, one.chunks, one.prompt, one.error) for one in run.requests] == [(10, 1 + math.ceil(9 / chunk), 16, "")] * 4
    assert all(one.ttft >= 0.0195 and one.seconds >= 0.0195 + 9 * 0.004 and one.tpot > 0 for one in run.requests)
    assert run.seconds >= 2 * 0.056
    assert len(run.sha256) == 64


#: Fault → what the request's error begins with; "late" where the order's patience ends it.
SEEN: dict[Fault, str] = {
    "dies": "stream-truncated", "refuses": "server-refused: status 429", "endless": "answer-too-large", "closes": "stream-truncated",
    "error-event": "stream-error", "short": "usage-mismatch", "usage-more": "usage-mismatch", "usage-none": "usage-mismatch",
    "finish-reason": "usage-mismatch", "silent": "late", "trickles": "late",
}  # fmt: skip


@pytest.mark.parametrize("fault", SEEN)
def test_every_fault_is_said_of_the_request(fault: Fault) -> None:
    """A sound request has no error; one with the fault has its reference, or the whole order is late."""
    with started(Behaviour(ttft=0.0, tpot=0.001, faults={fault: 2})) as server:
        wanted = order(server.url, concurrency=1, requests=2, warmups=0, patience=2.0 if SEEN[fault] == "late" else 30.0)
        if SEEN[fault] == "late":
            with pytest.raises(LoadInvalid) as caught:
                Own().measure(wanted)
            assert caught.value.reference == "generator-late"
            assert "of 2 requests were through" in caught.value.says
            return
        sound, faulty = Own().measure(wanted).requests
    assert not sound.error
    assert faulty.error.startswith(SEEN[fault])


def test_a_server_that_is_gone_is_an_error_of_each_request() -> None:
    """Where nothing listens, each request says so, and none has a time."""
    with started(Behaviour()) as server:
        url = server.url
    run = Own().measure(order(url))
    assert len(run.requests) == 4
    assert all(one.error.startswith("server-unreachable") and not one.seconds for one in run.requests)


def test_a_flood_ends_with_its_bound() -> None:
    """Bytes without end and without events are cut off at the bound of an answer, long before the order's patience."""
    listener = Listener(endless(b": nothing at all\n" * 4000, head("text/event-stream")))
    try:
        began = time.monotonic()
        run = Own().measure(order(listener.url, requests=1, concurrency=1, warmups=0, patience=60.0))
    finally:
        listener.close()
    assert run.requests[0].error.startswith("answer-too-large")
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "ftp://x", "nothing"])
def test_an_address_that_it_does_not_speak_to_is_no_measurement(url: str) -> None:
    """Other schemes than plain HTTP are refused before anything is sent."""
    with pytest.raises(LoadInvalid, match="generator-failed"):
        Own().measure(order(url))


def _stream(chunks: list[int]) -> tuple[bytes, list[int]]:
    """Return a stream with chunks of so many tokens, and where each chunk's event ends in it."""
    data, ends, place = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n", [], 0
    usage = {"prompt_tokens": 2, "completion_tokens": sum(chunks)}
    for number, size in enumerate([*chunks, 0, 0]):
        finish = "length" if number == len(chunks) - 1 else None
        choice = {"text": " a" * size, "token_ids": list(range(place, place + size)), "finish_reason": finish}
        event = {"model": "m", "choices": [choice]} if size else {"model": "m", "choices": [], "usage": usage}
        body = b"data: " + (msgspec.json.encode(event) if number <= len(chunks) else b"[DONE]") + b"\n\n"
        data += b"%x\r\n%b\r\n" % (len(body), body)
        place += size
        if size:
            # The line is whole with its first line feed; the empty line and the chunk's end are three more bytes.
            ends.append(len(data) - 3)
    return data + b"0\r\n\r\n", ends


@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=12), cuts=st.sets(st.integers(1, 3000), max_size=30))
def test_however_the_bytes_are_cut_the_request_is_the_same(chunks: list[int], cuts: set[int]) -> None:
    """Counts do not depend on how the stream came in pieces, and a token's time is that of the piece that completes its event."""
    data, ends = _stream(chunks)
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [(10.0 + number, data[start:end]) for number, (start, end) in enumerate(itertools.pairwise(places))]

    def came(end: int) -> float:
        return next(at for at, last in zip((at for at, _ in pieces), places[1:], strict=True) if last >= end)

    seen = recorded.request(pieces, 9.0, Asked("m", (4, 5), sum(chunks), 0), 2)
    assert (seen.error, seen.tokens, seen.chunks, seen.prompt) == ("", sum(chunks), len(chunks), 2)
    assert (seen.ttft, seen.seconds) == (came(ends[0]) - 9.0, came(ends[-1]) - 9.0)
    assert seen.codes == tuple(range(sum(chunks)))


@given(cut=st.integers(0, 400))
def test_a_stream_that_breaks_off_is_an_error(cut: int) -> None:
    """Wherever a stream is cut before its last event, the request has an error and says how many tokens had come."""
    data, _ = _stream([1, 2, 2])
    whole = data.index(b"data: [DONE]")
    seen = recorded.request([(1.0, data[: min(cut, whole)])], 0.0, Asked("m", (4, 5), 5, 0), 2)
    assert seen.error
    assert seen.tokens <= 5


@given(junk=st.binary(max_size=300))
def test_junk_is_an_error_and_nothing_else(junk: bytes) -> None:
    """Whatever bytes come, a request with an error is made of them."""
    for before in (b"", b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"):
        assert recorded.request([(1.0, before + junk)], 0.0, Asked("m", None, 5, 0), 2).error


def test_a_seed_decides_the_prompts() -> None:
    """One seed gives the same prompts, each of exact length, another gives others, and no two of an order are the same."""
    made = [prompts.of(order("http://x", seed=seed)) for seed in (1, 1, 2)]
    first, again, other = ([next(one) for _ in range(20)] for one in made)
    assert first == again != other
    assert {len(one) for one in first} == {16}
    assert len({tuple(one) for one in first}) == 20


def test_texts_come_from_a_file(tmp_path: Path) -> None:
    """The prompts of a file are all used before one comes again; a file that holds none is no measurement."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "one two"}\n\n{"prompt": "three", "more": 1}\n')
    made = prompts.of(order("http://x", prompts="texts", texts=path))
    assert {next(made), next(made)} == {"one two", "three"}
    with started(Behaviour(ttft=0.0, tpot=0.0)) as server:
        run = Own().measure(order(server.url, prompts="texts", texts=path))
    assert {(one.prompt, one.error) for one in run.requests} == {(2, ""), (1, "")}
    for content in ("", "[1]", "{}", "\xff", '{"prompt": 5}'):
        path.write_text(content, "latin-1")
        with pytest.raises(LoadInvalid, match="texts-unreadable"):
            next(prompts.of(order("http://x", prompts="texts", texts=path)))


def test_the_probe_sees_the_same_tokens_each_time() -> None:
    """For the deterministic probe it gives the tokens themselves."""
    with started(Behaviour(ttft=0.0, tpot=0.0)) as server:
        first, again = (Own().answers(order(server.url, requests=1, answer=50))[0].codes for _ in range(2))
    assert len(first) == 50
    assert first == again


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the answers of an order have more bytes than are kept, there is no measurement."""
    monkeypatch.setattr(client, "MOST", 1000)
    with started(Behaviour(ttft=0.0, tpot=0.0)) as server, pytest.raises(LoadInvalid, match="more than 1000 bytes"):
        Own().measure(order(server.url, warmups=0))
