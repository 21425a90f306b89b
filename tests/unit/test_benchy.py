"""llama-benchy as a generator: requests out of its progress, and its end in every bad case."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.load import benchy, metrology
from sparkwright.gates.load.benchy import Benchy
from sparkwright.gates.load.order import LoadInvalid, Order
from sparkwright.gates.load.reference.behaviour import Behaviour
from sparkwright.gates.load.reference.running import started

ROOT = Path(__file__).parents[2]


def order(url: str = "http://127.0.0.1:9", **more: object) -> Order:
    """Return a small order."""
    wanted: dict[str, object] = {"prompt": 8, "answer": 3, "concurrency": 1, "requests": 2, "warmups": 0, "patience": 120.0, **more}
    return msgspec.convert({"url": url, "model": "reference", **wanted}, Order)


def program(folder: Path, body: str) -> Benchy:
    """Return a program that is called like the real one's Python, and does *body* with its arguments as ``words``."""
    path = folder / "python"
    preamble = "import json, os, sys, time\nwords = dict(zip(sys.argv, sys.argv[1:]))\nout = words['--emit-progress']"
    path.write_text(f"#!{sys.executable}\n{preamble}\n{body}\n")
    path.chmod(0o755)
    return Benchy(path, "0.4.0", "0" * 64)


def events(*more: dict[str, Any], status: str = "ok") -> str:
    """Return a program's line that writes a progress with *more* in it."""
    lines: list[dict[str, Any]] = [{"type": "header"}, *more, {"type": "bench_complete", "status": status}]
    text = "".join(msgspec.json.encode({"schema": 1, "ts": 0.0, **line}).decode() + "\n" for line in lines)
    return f"open(out, 'w').write({text!r})"


def one(number: int, began: float) -> list[dict[str, Any]]:
    """Return the events of a request with three tokens in two chunks."""
    return [
        {"type": "request_start", "request_id": number, "ts": began, "model": "m"},
        {"type": "request_first_token", "request_id": number, "ts": began + 0.5, "ttft_s": 0.5},
        {"type": "tokens", "request_id": number, "ts": began + 0.5, "count": 1, "snippet": "a"},
        {"type": "tokens", "request_id": number, "ts": began + 0.75, "count": 2, "snippet": "bc"},
        {"type": "request_end", "request_id": number, "ts": began + 1, "total_tokens": 3, "prompt_tokens": 8, "error": ""},
    ]


def test_its_progress_becomes_requests(tmp_path: Path) -> None:
    """Tokens and the prompt's are those of the end, chunks are counted, times are those of first and last token."""
    made = program(tmp_path, events(*one(0, 100.0), *one(1, 101.0))).measure(order())
    assert made.generator == "llama-benchy 0.4.0"
    first, second = made.requests
    assert (first.began, first.ttft, first.seconds, first.prompt, first.tokens, first.chunks, first.error) == (0, 0.5, 0.75, 8, 3, 2, "")
    assert (second.began, second.tpot, made.seconds) == (1.0, 0.125, 1.75)


def test_a_request_that_never_ended_has_an_error(tmp_path: Path) -> None:
    """Without its end a request is an error, not a short answer."""
    made = program(tmp_path, events(*one(0, 100.0)[:-1], *one(1, 101.0))).measure(order())
    assert [bool(request.error) for request in made.requests] == [True, False]


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ("sys.exit('no tokenizer')", "generator-failed"), ("pass", "generator-unreadable"),
        ("open(out, 'w').write('nonsense')", "generator-unreadable"), ("open(out, 'w').write('[' * 3000000)", "generator-unreadable"),
        (events(status="error"), "generator-failed"), (events(), "generator-failed"), ("time.sleep(999)", "generator-late"),
    ],
)  # fmt: skip
def test_what_gives_no_result_is_no_measurement(tmp_path: Path, body: str, reference: str) -> None:
    """A program that fails, hangs, or writes something else ends as no measurement."""
    with pytest.raises(LoadInvalid) as caught:
        program(tmp_path, body).measure(order(patience=2.0 if reference == "generator-late" else 120.0))
    assert caught.value.reference == reference
    assert reference in metrology.REASONS


def test_it_has_a_home_of_its_own_and_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text lies where it would keep the one that it fetches, and nobody's token is passed on."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen = tmp_path / "seen"
    look = "[p for _, _, files in os.walk(os.environ['HOME'] + '/.cache/llama-benchy') for p in files]"
    body = f"open({str(seen)!r}, 'w').write(json.dumps([{look}, os.environ.get('HF_TOKEN'), os.environ['HF_HUB_OFFLINE']]))"
    program(tmp_path, body + "\n" + events(*one(0, 1.0))).measure(order())
    files, token, offline = msgspec.json.decode(seen.read_bytes())
    assert len(files) == 1
    assert (token, offline) == (None, "1")


@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", [1, 3])
def test_the_real_program_counts_as_the_server_does(user_store: Store, tmp_path: Path, chunk: int) -> None:
    """Installed from its lock, it orders exact prompts and answers, and counts the tokens that were sent."""
    context = RunContext(Project(ROOT, "2026.11"), user_store, ("vllm",), tmp_path)
    real = benchy.obtain(context)
    assert real.version == "0.4.0"
    with started(Behaviour(ttft=0.02, tpot=0.002, chunk=chunk)) as server:
        run = real.measure(order(server.url, prompt=33, answer=10, concurrency=2, requests=4, warmups=2))
    assert [(one.prompt, one.tokens, one.chunks, one.error) for one in run.requests] == [(33, 10, 1 + 9 // chunk, "")] * 4
