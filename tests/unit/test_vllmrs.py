"""vllm-rs as a generator: its command line, its result, its end in every bad case, and where it comes from."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.bench.load import detailed, metrology, vllmrs
from sparkwright.bench.load.order import LoadInvalid, Order
from sparkwright.bench.load.reference.behaviour import Behaviour, Fault
from sparkwright.bench.load.reference.running import started
from sparkwright.bench.load.vllmrs import VllmRs
from sparkwright.core.store import Store
from sparkwright.forks import lock
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[2]
RESULT = {
    "input_lens": [8, 8], "output_lens": [3, 0], "ttfts": [0.5, 0.0], "itls": [[0.1, 0.1], []], "errors": ["", "HTTP 429"],
    "latencies": [0.7, 0.0], "start_times": [10.0, 10.25], "unknown": None,
}  # fmt: skip


def order(url: str = "http://127.0.0.1:9", **more: object) -> Order:
    """Return a small order."""
    wanted: dict[str, object] = {"prompt": 8, "answer": 3, "concurrency": 2, "requests": 2, "warmups": 0, "patience": 60.0, **more}
    return msgspec.convert({"url": url, "model": "reference", **wanted}, Order)


def program(folder: Path, body: str) -> VllmRs:
    """Return a program that is called like the real one, and does *body* with the folder of its result as ``out``."""
    path = folder / "vllm-rs"
    preamble = "import os, subprocess, sys, time\nout = sys.argv[sys.argv.index('--result-dir') + 1] + '/result.json'\n"
    path.write_text(f"#!{sys.executable}\n{preamble}{body}\n")
    path.chmod(0o755)
    return VllmRs(path, "0.33.0", "0" * 64)


def test_its_result_becomes_requests(tmp_path: Path) -> None:
    """Times count from the first request; tokens, chunks and errors are those of the file."""
    made = program(tmp_path, f"open(out, 'w').write({msgspec.json.encode(RESULT).decode()!r})").measure(order())
    assert made.generator == "vllm-rs 0.33.0"
    first, second = made.requests
    assert (first.began, first.ttft, first.seconds, first.prompt, first.tokens, first.chunks, first.error) == (0.0, 0.5, 0.7, 8, 3, 3, "")
    assert (second.began, second.tokens, second.chunks, second.error) == (0.25, 0, 0, "HTTP 429")
    assert (made.seconds, round(made.requests[0].tpot, 9)) == (0.7, 0.1)


@pytest.mark.parametrize(
    ("body", "reference", "says"),
    [
        ("sys.exit('\\x1b[31mERROR\\x1b[0m process failed with error: no such host')", "generator-failed", "no such host"),
        ("os.kill(os.getpid(), 9)", "generator-failed", "status -9"),
        ("pass", "generator-unreadable", "cannot be read"),
        ("open(out, 'w').write('[1]')", "generator-unreadable", "cannot be read"),
        ("open(out, 'w').write('[' * 100000)", "generator-unreadable", "cannot be read"),
        ("open(out, 'wb').truncate(20_000_000)", "generator-unreadable", "bytes"),
        ("open(out, 'w').write('" + msgspec.json.encode({**RESULT, "ttfts": [1.0]}).decode() + "')", "generator-unreadable", "columns"),
    ],
)
def test_what_gives_no_result_is_no_measurement(tmp_path: Path, body: str, reference: str, says: str) -> None:
    """A program that fails, is killed, or writes something else ends as no measurement, with its own last words."""
    with pytest.raises(LoadInvalid) as caught:
        program(tmp_path, body).measure(order())
    assert caught.value.reference == reference
    assert caught.value.reference in metrology.REASONS
    assert says in caught.value.says
    assert caught.value.says.isprintable()


def test_fewer_requests_than_ordered_are_no_measurement(tmp_path: Path) -> None:
    """Where texts are too long and were left out, that is said."""
    made = program(tmp_path, f"open(out, 'w').write({msgspec.json.encode(RESULT).decode()!r})")
    with pytest.raises(LoadInvalid, match="2 of 3 requests"):
        made.measure(order(requests=3))


def test_when_its_time_is_over_it_and_its_children_are_gone(tmp_path: Path) -> None:
    """A program that goes on for ever is killed with all that it started."""
    pid = tmp_path / "pid"
    made = program(tmp_path, f"child = subprocess.Popen(['sleep', '999'])\nopen({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(999)")
    with pytest.raises(LoadInvalid, match="generator-late"):
        made.measure(order(patience=3.0))
    until = time.monotonic() + 30
    while pid.exists() and Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_warm_ups_are_a_run_of_their_own(tmp_path: Path) -> None:
    """Warm-ups have other prompts than what is measured: the program itself would repeat the first measured one."""
    log = tmp_path / "log"
    body = f"open({str(log)!r}, 'a').write(' '.join(sys.argv) + '\\n')\nopen(out, 'w').write({msgspec.json.encode(RESULT).decode()!r})"
    program(tmp_path, body).measure(order(warmups=2, seed=7))
    warm, run = (line.split() for line in log.read_text().splitlines())
    assert warm[warm.index("--seed") + 1] != run[run.index("--seed") + 1] == "7"
    assert "--num-warmups" not in warm + run


def test_no_token_of_the_user_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in the caller's environment are not passed on, as it would send them to the server."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with pytest.raises(LoadInvalid, match=r"generator-failed.*error: None"):
        program(tmp_path, "sys.exit('error: ' + str(os.environ.get('OPENAI_API_KEY')))").measure(order())


def test_prompts_come_as_ordered(tmp_path: Path) -> None:
    """Random prompts go as tokens of exact number; texts go as JSON lines, or in ShareGPT's form."""
    words = vllmrs.arguments(order(), tmp_path)
    assert words[words.index("--dataset-name") :][:5] == ["--dataset-name", "random", "--prompt-token-ids", "--random-input-len", "8"]
    assert {"--ignore-eos", "--save-detailed"} <= set(words)
    for name, kind in (("a.jsonl", "custom"), ("a.json", "sharegpt")):
        words = vllmrs.arguments(order(prompts="texts", texts=tmp_path / name), tmp_path)
        assert words[words.index("--dataset-name") + 1] == kind
        assert words[words.index("--max-model-len") + 1] == "11"
    with pytest.raises(LoadInvalid, match="texts-unreadable"):
        vllmrs.arguments(order(prompts="texts"), tmp_path)


def test_a_result_of_the_python_program_is_read(tmp_path: Path) -> None:
    """Older ones write no latencies; they are the first token's time and the gaps."""
    path = tmp_path / "result.json"
    path.write_bytes(msgspec.json.encode({name: value for name, value in RESULT.items() if name != "latencies"}))
    assert round(detailed.read(path, order())[0].seconds, 9) == 0.7


def _context(tmp_path: Path) -> RunContext:
    project = Project(ROOT, "2026.05")
    return RunContext(project, Store(tmp_path / "store"), ("vllm",), tmp_path, offline=True)


def _put(context: RunContext, members: dict[str, bytes]) -> Path:
    """Lay a wheel with *members* where the official one would lie in the store, and return it."""
    base = lock.read(Project(ROOT, metrology.policy(context).stack)).forks["vllm"].bases[os.uname().machine]
    path = context.store.folder("downloads", base.sha256) / base.filename
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_it_comes_out_of_the_official_wheel(tmp_path: Path) -> None:
    """For every stack the program is the one member of the wheel that the policy's stack names; it is taken out once, to be run."""
    context = _context(tmp_path)
    wheel = _put(context, {"vllm/vllm-rs": b"#!/bin/sh\necho it is me\n", "vllm/other.py": b""})
    made = vllmrs.obtain(context)
    assert (made.version, made.sha256) == ("0.33.0", hashlib.sha256(b"#!/bin/sh\necho it is me\n").hexdigest())
    assert made.program.stat().st_mode & stat.S_IXUSR
    assert sorted(path.name for path in made.program.parent.iterdir()) == ["vllm-rs"]
    wheel.unlink()
    assert vllmrs.obtain(context) == made


def test_without_the_wheel_it_says_what_is_missing(tmp_path: Path) -> None:
    """Offline, with nothing in the store, the wheel is named and what brings it."""
    with refusal("offline") as caught:
        vllmrs.obtain(_context(tmp_path))
    assert "vllm-0.33.0" in str(caught.value)
    assert any("sparkwright fetch" in line for line in caught.value.details)


def test_a_wheel_that_is_not_what_it_should_be_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel without the program, with one that is too large, or a damaged one ends with its reason, and leaves no program."""
    context = _context(tmp_path)
    _put(context, {"vllm/other.py": b""})
    with refusal("not-provided"):
        vllmrs.obtain(context)
    wheel = _put(context, {"vllm/vllm-rs": bytes(5000)})
    with monkeypatch.context() as limited:
        limited.setattr(vllmrs, "LARGEST", 4999)
        with refusal("wheel-invalid", match="4,999 are the most"):
            vllmrs.obtain(context)
    data = bytearray(wheel.read_bytes())
    data[60] ^= 0xFF
    wheel.write_bytes(data)
    with refusal("wheel-invalid"):
        vllmrs.obtain(context)
    assert not list(context.store.root.glob("environments/vllm-rs-*/*"))


@pytest.fixture(scope="module", name="real")
def _real(user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> VllmRs:
    """The real program, out of the real wheel (336 MB, in the user's store afterwards)."""
    return vllmrs.obtain(RunContext(Project(ROOT, "2026.11"), user_store, ("vllm",), tmp_path_factory.mktemp("out")))


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 words that puts a token before each text, as Llama's does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    begin = {"id": "<s>", "ids": [300], "tokens": ["<s>"]}
    pair = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    added = {"id": 300, "content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None, "added_tokens": [added],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {"type": "TemplateProcessing", "single": pair, "pair": pair, "special_tokens": {"<s>": begin}},
        "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(300)}, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(made))
    return folder


@pytest.mark.network
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("chunk", [1, 3])
def test_the_real_program_counts_as_the_server_does(real: VllmRs, tokenizer: Path, own: bool, chunk: int) -> None:
    """Prompts have the tokens that were ordered, also with a tokenizer that adds one; tokens and chunks are those that were sent."""
    with started(Behaviour(ttft=0.02, tpot=0.002, chunk=chunk)) as server:
        wanted = order(server.url, prompt=33, answer=10, requests=4, warmups=2, tokenizer=tokenizer if own else None)
        run = real.measure(wanted)
    assert [(one.prompt, one.tokens, one.chunks, one.error) for one in run.requests] == [(33, 10, 1 + 9 // chunk, "")] * 4
    assert all(one.ttft >= 0.0195 and one.tpot > 0 for one in run.requests)


@pytest.mark.network
def test_the_real_program_sends_texts(real: VllmRs, tokenizer: Path, tmp_path: Path) -> None:
    """Texts of a file are sent; where too many are longer than ordered, there is no measurement."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"prompt": "{" w1" * number}"}}\n' for number in (2, 3, 4)))
    with started(Behaviour(ttft=0.0, tpot=0.0)) as server:
        run = real.measure(order(server.url, prompts="texts", texts=path, tokenizer=tokenizer, requests=3, prompt=5))
        with pytest.raises(LoadInvalid, match="2 of 3"):
            real.measure(order(server.url, prompts="texts", texts=path, tokenizer=tokenizer, requests=3, prompt=4))
    assert sorted(one.prompt for one in run.requests) == [3, 4, 5]
    assert {one.tokens for one in run.requests} == {3}


#: Fault → what of the second request shows it: its tokens, and what its error holds. That a stream ended with an error event the program
#: does not say; only its tokens, and the server's counters, do.
SHOWN: dict[Fault, tuple[int, str]] = {
    "closes": (0, "Stream error"), "refuses": (0, "429"), "dies": (0, "error"), "error-event": (5, ""), "short": (9, ""),
    "usage-more": (11, ""),
}  # fmt: skip


@pytest.mark.network
@pytest.mark.parametrize("fault", SHOWN)
def test_what_the_real_program_shows_of_a_fault(real: VllmRs, fault: Fault) -> None:
    """A faulty request has an error, or another number of tokens than ordered."""
    with started(Behaviour(ttft=0.0, tpot=0.001, faults={fault: 2})) as server:
        sound, faulty = real.measure(order(server.url, answer=10, concurrency=1)).requests
    assert (sound.tokens, sound.error) == (10, "")
    tokens, error = SHOWN[fault]
    assert faulty.tokens == tokens
    assert error in faulty.error
    assert bool(error) == bool(faulty.error)


@pytest.mark.network
@pytest.mark.parametrize("fault", ["endless", "silent"])
def test_the_real_program_is_ended_when_the_server_does_not(real: VllmRs, fault: Fault) -> None:
    """A server that streams for ever, or says nothing, ends with the order's patience."""
    with started(Behaviour(ttft=0.0, tpot=0.001, faults={fault: 1})) as server, pytest.raises(LoadInvalid, match="generator-late"):
        real.measure(order(server.url, patience=2.0))
