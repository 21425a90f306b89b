"""The reference server: what it says is what its behaviour orders, and each of its faults is the one that it is named after."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.load.client import Own

from sparkwright.bench.load.order import Order
from sparkwright.bench.load.reference import asked, question
from sparkwright.bench.load.reference.behaviour import Behaviour, Fault
from sparkwright.bench.load.reference.pace import Pace
from sparkwright.bench.load.reference.running import Running, started
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.statistics.noise import Noise
from sparkwright.core import http

PLAIN = Noise(run=0.0, launch=0.0, drift=0.0, tail=0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A quick server with three tokens in a chunk."""
    with started(Behaviour(ttft=0.01, tpot=0.001, chunk=3, drafted=4)) as running:
        yield running


def post(url: str, path: str, **body: object) -> tuple[int, bytes]:
    """Return the status and the body of a POST."""
    reply = http.request("POST", url + path, data=msgspec.json.encode(body), direct=True)
    return reply.status, reply.body


def test_our_client_takes_it_for_a_server_of_vllm(server: Running) -> None:
    """The client that believes nothing finds model, limit, version, tokens, usage and finish reason as they should be."""
    client = Client(server.url)
    assert (client.model(), client.max_model_len(), client.version()) == ("reference", 131072, "0.33.0")
    answer = client.complete((5, 6, 7), max_tokens=8, ignore_eos=True)
    assert (answer.usage.prompt_tokens, len(answer.tokens), answer.finish_reason, len(answer.chunk_seconds)) == (3, 8, "length", 4)
    assert answer.text == client.detokenize(answer.tokens).join((" ", ""))
    assert client.tokenize(answer.text) == answer.tokens


def test_the_answer_is_a_function_of_the_prompt(server: Running) -> None:
    """The same prompt has the same tokens each time, another prompt has others."""
    client = Client(server.url)
    first, again, other = (client.complete(prompt, max_tokens=20).tokens for prompt in ((1, 2), (1, 2), (1, 3)))
    assert first == again != other


def test_its_counters_say_what_it_sent() -> None:
    """Prompts, tokens, successes, and the steps, drafts and accepted tokens of its speculation are counted under vLLM's names."""
    with started(Behaviour(ttft=0.0, tpot=0.0, chunk=3, drafted=4)) as running:
        client = Client(running.url)
        client.complete((5, 6, 7), max_tokens=9)
        found = client.metrics()
    assert found["vllm:prompt_tokens_total"] == 3
    assert found["vllm:generation_tokens_total"] == 9
    assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="reference"}'] == 1
    assert found["vllm:prefix_cache_queries_total"] == 3
    assert found["vllm:prefix_cache_hits_total"] == 0
    # One token alone, then 3 + 3 + 2.
    assert found["vllm:spec_decode_num_drafts_total"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 12
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 5
    assert found["vllm:num_requests_running"] == 0


@pytest.mark.parametrize("chat", [False, True])
def test_it_answers_whole_and_in_events(server: Running, chat: bool) -> None:
    """Both protocols are spoken, streamed and not, with the same number of tokens in their usage."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    put = {"messages": [{"role": "user", "content": "one two three"}]} if chat else {"prompt": "one two three"}
    status, body = post(server.url, path, model="reference", max_tokens=5, **put)
    assert status == 200
    assert msgspec.json.decode(body)["usage"] == {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}
    status, body = post(server.url, path, max_tokens=5, stream=True, stream_options={"include_usage": True}, **put)
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    assert msgspec.json.decode(events[-2])["usage"]["completion_tokens"] == 5
    choices = [msgspec.json.decode(one)["choices"][0] for one in events[:-2]]
    texts = [one["delta"]["content"] if chat else one["text"] for one in choices]
    assert sum(text.count(" t") for text in texts) == 5
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body", [{"prompt": []}, {"prompt": "x", "max_tokens": 200_000}, {"prompt": [-1]}, {"prompt": ["a", "b"]}, {"prompt": 5}]
)
def test_a_question_that_cannot_be_answered_is_refused(server: Running, body: dict[str, object]) -> None:
    """What no server could answer gets status 400 with a message."""
    status, said = post(server.url, "/v1/completions", **body)
    assert status == 400
    assert msgspec.json.decode(said)["error"]["message"]


def test_another_model_and_another_path_are_not_there(server: Running) -> None:
    """Asked for what it has not, it says 404."""
    assert post(server.url, "/v1/completions", model="gpt", prompt="x")[0] == 404
    assert post(server.url, "/v2/completions", prompt="x")[0] == 404


@given(tokens=st.integers(1, 400), chunk=st.integers(1, 9), ttft=st.floats(0, 2), tpot=st.floats(0, 0.2))
def test_each_chunk_is_due_when_its_last_token_is(tokens: int, chunk: int, ttft: float, tpot: float) -> None:
    """The chunks have all tokens, the first alone, and each is due at ttft + place of its last token x tpot."""
    place = 0
    for number, (due, size) in enumerate(Pace(Behaviour(ttft=ttft, tpot=tpot, chunk=chunk)).chunks(100.0, tokens)):
        assert size == 1 if number == 0 else 1 <= size <= chunk
        place += size
        assert math.isclose(due, 100.0 + ttft + (place - 1) * tpot, abs_tol=1e-6)
    assert place == tokens


@given(slowdown=st.floats(-0.2, 0.2))
def test_a_slowdown_stretches_every_time(slowdown: float) -> None:
    """A noise that is nothing but the candidate's slowdown multiplies the times of the candidate, and not those of the baseline."""
    noise = msgspec.structs.replace(PLAIN, slowdown=slowdown)
    now = time.monotonic()
    for side, factor in (("candidate", math.exp(slowdown)), ("baseline", 1.0)):
        behaviour = msgspec.convert({"ttft": 0.1, "tpot": 0.01, "noise": noise, "side": side}, Behaviour)
        *_, (due, _size) = Pace(behaviour).chunks(now, 11)
        assert math.isclose(due - now, 0.2 * factor, rel_tol=1e-4)


def test_two_servers_of_one_machine_see_its_noise_at_the_same_time() -> None:
    """With one seed and one origin the factor is the same in each, and with another launch it is not."""
    noise = Noise(launch=0.1, drift=0.1, flips=600.0)
    origin = time.time() - 1000.0
    first, second, other = (Pace(Behaviour(noise=noise, seed=3, origin=origin, launch=launch)) for launch in (0, 0, 1))
    at = time.monotonic() + 5.02
    assert first.factor(at) == second.factor(at) != other.factor(at)


#: Fault → the reference that the strict client gives it.
SEEN: dict[Fault, str] = {
    "dies": "stream-truncated", "refuses": "server-refused", "silent": "server-silent", "endless": "answer-too-large",
    "trickles": "server-silent", "closes": "stream-truncated", "error-event": "stream-error", "short": "usage-mismatch",
    "usage-more": "usage-mismatch", "usage-none": "usage-mismatch",
}  # fmt: skip


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_begins_with_its_request(fault: Fault) -> None:
    """The request before is answered as it should be; from its number on the fault is there, and is what it is named after."""
    with started(Behaviour(ttft=0.0, tpot=0.001, faults={fault: 2})) as running:
        assert len(Client(running.url).complete((1, 2), max_tokens=8).tokens) == 8
        hasty = Client(running.url, deadline=2.2 if fault in ("silent", "trickles") else 60)
        hasty.model()
        with pytest.raises(ServerInvalid) as caught:
            hasty.complete((1, 2), max_tokens=8)
    assert caught.value.reference == SEEN[fault]


def test_the_faults_that_only_a_careful_reader_sees() -> None:
    """A wrong finish reason and hits of a prefix cache come with answers that are otherwise whole."""
    with started(Behaviour(ttft=0.0, tpot=0.0, faults={"finish-reason": 1, "prefix-hits": 1})) as running:
        client = Client(running.url)
        answer = client.complete((1, 2, 3), max_tokens=8)
        found = client.metrics()
    assert answer.finish_reason == "stop"
    assert len(answer.tokens) == 8
    assert found["vllm:prefix_cache_hits_total"] == found["vllm:prefix_cache_queries_total"] == 3


def test_a_server_that_loads_is_not_healthy_yet() -> None:
    """While it loads, and for ever where it never gets ready, /health and the model's list say 503."""
    with started(Behaviour(faults={"not-ready": 1})) as never, started(Behaviour(loading=0.5)) as soon:
        for path in ("/health", "/v1/models"):
            assert http.request("GET", never.url + path, attempts=1, direct=True).status == 503
        until = time.monotonic() + 30
        status = 503
        while status != 200:
            assert time.monotonic() < until
            status = http.request("GET", f"{soon.url}/health", attempts=1, direct=True).status
            time.sleep(0.05)


def test_it_holds_64_streams_of_a_token_a_millisecond() -> None:
    """64 streams at once, each with a token due every millisecond, are all whole; how late they are it says itself."""
    with started(Behaviour(ttft=0.02, tpot=0.001)) as running:
        run = Own().measure(Order(running.url, "reference", 8, 60, 64, 64, warmups=0))
        late = running.lateness()
        assert not running.lateness().chunks
    assert [(one.tokens, one.error) for one in run.requests] == [(60, "")] * 64
    assert (late.chunks, late.requests) == (64 * 60, 64)
    assert late.worst >= late.median > 0
    assert late.ttft >= 0.02


def test_a_client_that_goes_away_is_counted_as_such() -> None:
    """A connection that closes in mid-stream ends its request as an abort, and nothing runs on."""
    with started(Behaviour(ttft=0.0, tpot=5.0)) as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port)) as one:
            body = msgspec.json.encode({"prompt": "x", "stream": True, "max_tokens": 9})
            one.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert one.recv(100)
        until, found = time.monotonic() + 30, {"vllm:num_requests_running": 1.0}
        while found["vllm:num_requests_running"]:
            assert time.monotonic() < until
            found = Client(running.url).metrics()
    assert found['vllm:request_success_total{engine="0",finished_reason="abort",model_name="reference"}'] == 1


def test_requests_of_one_connection_are_answered_in_turn(server: Running) -> None:
    """Thousands of requests that come in one piece on one connection get as many answers, in their order."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as one:
        one.sendall(b"GET /version HTTP/1.1\r\n\r\n" * 2000 + b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n")
        said = b"".join(iter(lambda: one.recv(1 << 16), b""))
    assert said.count(b"HTTP/1.1 200") == 2001
    assert said.index(b"0.33.0") < said.index(b"max_model_len")


@given(cut=st.integers(0, 200), stays=st.booleans(), body=st.binary(max_size=60))
def test_a_request_is_read_when_it_is_whole(cut: int, stays: bool, body: bytes) -> None:
    """However the bytes are cut, a request is read once, when it is whole, and what is behind it stays."""
    connection = b"" if stays else b"Connection: close\r\n"
    data = b"POST /x?y=1 HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (connection, len(body), body)
    buffer = bytearray(data[: min(cut, len(data) - 1)])
    assert question.read(buffer) is None
    buffer += data[len(buffer) :] + b"rest"
    assert question.read(buffer) == question.Question("POST", "/x", stays, body)
    assert buffer == b"rest"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400), (b"GET / SPDY/3\r\n\r\n", 400), (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 413), (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * question.HEAD, 413),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(server: Running, data: bytes, status: int) -> None:
    """Bytes that are no request, or too many of them, are refused, and the server goes on."""
    with pytest.raises(question.Refused) as caught:
        question.read(bytearray(data))
    assert caught.value.status == status
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as one:
        one.sendall(data)
        assert b"HTTP/1.1 %d" % status in one.recv(1 << 16)
    assert Client(server.url).version() == "0.33.0"


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
def test_tokens_come_back_from_their_text(tokens: list[int]) -> None:
    """The text of tokens has those tokens."""
    assert asked.tokenized("".join(map(asked.word, tokens)), 32000) == tokens


@pytest.mark.parametrize("wrong", [{"tpot": -1}, {"chunk": 0}, {"drafted": 1, "chunk": 3}, {"faults": {"explodes": 1}}, {"unknown": 1}])
def test_a_behaviour_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    """The program ends with status 2 and says why."""
    command = [sys.executable, "-P", "-m", "sparkwright.bench.load.reference", "--behaviour", msgspec.json.encode(wrong).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no behaviour" in done.stderr


def test_it_does_not_outlive_what_started_it() -> None:
    """After kill -9 of the process that started it, the server is gone."""
    code = "from sparkwright.gates.load.reference.running import *; print(Running(Behaviour()).pid, flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
