"""Dead is told from slow: servers that misbehave in one way each, over real connections."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.badserver import MODELS, Listener, completion, head, whole
from tests.support.standin import Machine, _machine, _standin, free_port

from sparkwright.serving import health, held
from sparkwright.serving.held import Running

__all__ = ["_machine", "_standin"]

TOKEN = whole({**completion(token_ids=[5]), "usage": {"prompt_tokens": 2, "completion_tokens": 1}})
Answers = dict[str, bytes | None]


@pytest.fixture(name="listen")
def _listen() -> Iterator[Callable[[Answers], Listener]]:
    """Return what runs a server that answers each path with the given bytes, and with silence where they are None."""
    with contextlib.ExitStack() as open_:

        def listen(answers: Answers) -> Listener:
            steps = itertools.count(5)

            def say(connection: socket.socket, path: str) -> None:
                answer = {"/health": whole(b""), "/v1/models": whole(MODELS), "/v1/completions": TOKEN, **answers}.get(path)
                if path == "/metrics" and answers.get(path) == b"moving":
                    answer = metrics(next(steps))
                if answer is None:
                    one.over.wait(60)
                else:
                    connection.sendall(answer)

            one = Listener(say)
            open_.callback(one.close)
            return one

        yield listen


def metrics(tokens: float) -> bytes:
    data = f'vllm:generation_tokens_total{{model="toy"}} {tokens}\nvllm:num_requests_running 1\n'.encode()
    return head("text/plain", len(data)) + data


ERROR = whole({"error": {"message": "EngineDeadError"}}, "500 Internal Server Error")


@pytest.mark.parametrize(
    ("answers", "state", "says"),
    [
        ({}, "serving", "a token came"),
        ({"/metrics": ERROR}, "serving", "a token came"),
        ({"/health": None}, "serving", "a token came"),
        ({"/health": whole(b"", "503 Service Unavailable")}, "dead", "/health says 503"),
        ({"/v1/completions": ERROR, "/metrics": metrics(5)}, "dead", "with 500"),
        ({"/v1/completions": None, "/metrics": b"moving"}, "busy", "generation_tokens_total +1"),
        ({"/v1/completions": None, "/metrics": metrics(5)}, "stuck", "none of its counters moves"),
        ({"/v1/completions": None, "/metrics": None}, "stuck", "it does not say its counters"),
        ({"/v1/models": None, "/metrics": metrics(5)}, "stuck", "none of its counters moves"),
        ({"/v1/completions": whole({"choices": []}), "/metrics": metrics(5)}, "stuck", "none of its counters moves"),
        ({"/v1/completions": whole(b"<html>"), "/metrics": metrics(5)}, "stuck", "none of its counters"),
        ({"/v1/models": whole({"data": []}), "/metrics": metrics(5)}, "stuck", "lists no model"),
        ({"/v1/models": whole({}, "401 Unauthorized")}, "stuck", "VLLM_API_KEY"),
        ({"/health": None, "/v1/models": None, "/v1/completions": None, "/metrics": None}, "stuck", "no whole reply"),
    ],
)
def test_a_server_fares_as_it_does(answers: Answers, state: str, says: str, listen: Callable[[Answers], Listener]) -> None:
    """A token counts, then the counters; what /health says of a living process counts only when it is bad."""
    found = health.of_server(listen(answers).url, 1.5 if state in ("serving", "dead") else 0.3)
    assert (found.state, says in found.says) == (state, True), found


#: Asks once all imports are done and a program beside it, of which the kernel thinks more, has its only processor.
DEAF = """
import os, subprocess, sys
from sparkwright.serving import health
health.of_server(sys.argv[1], 0.1)
core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})
loud = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    found = health.of_server(sys.argv[1], 0.3)
finally:
    loud.kill()
    loud.wait()
print(found.state, found.says)
"""


def test_what_gets_no_processor_calls_nobody_stuck(listen: Callable[[Answers], Listener]) -> None:
    """Silence that this process could not have heard is no sign of the server."""
    url = listen({"/v1/completions": None, "/metrics": metrics(5)}).url
    done = subprocess.run([sys.executable, "-c", DEAF, url], capture_output=True, text=True, check=True, timeout=280)
    assert re.match(r"busy not known: this process waited \d+\.\d s for a processor while it asked \(", done.stdout), done.stdout


def test_where_nobody_listens_it_is_dead() -> None:
    """At once."""
    assert health.of_server(f"http://127.0.0.1:{free_port()}", 30).state == "dead"


def record(**changes: object) -> Running:
    """Return what a `serve` of this very process would have recorded."""
    plain = {
        "pid": os.getpid(), "born": held.born(os.getpid()), "since": time.time(), "phase": "serving", "recipe": "", "name": "toy",
        "model": "", "python": "/nowhere/python", "version": "", "wheel": "", "release": "", "log": "", "url": f"http://127.0.0.1:{free_port()}",
    }  # fmt: skip
    return Running(**{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "dead"),  # nothing listens at its address
        ({"phase": "loading"}, "loading"),
        ({"phase": "waiting"}, "loading"),
        ({"phase": "loading", "born": 5}, "dead"),  # another process has its number now
        ({"phase": "stopping"}, "dead"),
        ({"role": "", "nodes": 1, "head": "127.0.0.1:9"}, "dead"),  # an address that nobody asked it to join
        ({"role": "head", "nodes": 2, "head": "127.0.0.1:9"}, "node-lost"),
        ({"role": "worker", "head": "127.0.0.1:9", "phase": "joined"}, "node-lost"),
    ],
)
def test_what_serve_recorded_is_believed_as_far_as_its_process_lives(changes: dict[str, object], state: str) -> None:
    """A record alone says nothing; Ray that does not answer is a lost machine."""
    assert health.of_machine(record(**changes), 1).state == state


def test_without_a_record_nothing_serves_here() -> None:
    """That is no fault of ours, and no success."""
    assert health.of_machine(None, 1).state == "dead"


def test_the_verb_says_it_by_its_exit_code(machine: Machine, listen: Callable[[Answers], Listener]) -> None:
    """0 for what serves or will, 1 with a reference for the rest; one document for programs."""
    done = machine.verb("serve", "--health", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["reference"]) == (1, "server-dead")
    stuck = listen({"/v1/completions": None, "/metrics": metrics(5)}).url
    done = machine.verb("serve", "--health", stuck, "--json", "--patience", "1")
    found = json.loads(done.stdout)
    assert (done.returncode, found["error"]["reference"], found["health"]["state"]) == (1, "server-stuck", "stuck")
    one = machine.start(load=600)
    machine.until("loading")
    done = machine.verb("serve", "--health", "--json")
    assert (done.returncode, json.loads(done.stdout)["health"]["state"]) == (0, "loading")
    one.kill()
    one.wait()
    done = machine.verb("serve", "--health", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["reference"]) == (1, "server-dead")
