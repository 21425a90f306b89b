"""The load generator: the adapter to vllm-rs, its origin, files of real prompts, and the quick look."""

import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import processes, refserved, thread_load
from tests.support.fake_openai_server import Behaviour, FakeServer, Fault, started

from sparkwright.bench import model, quick_look, records, vllm_bench
from sparkwright.bench.machine import monitor
from sparkwright.builder import host_info
from sparkwright.cli import main
from sparkwright.core import memory, strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.stack import Project, read_lock
from sparkwright.gates.throughput_run import ThroughputPolicy

ROOT = Path(__file__).parents[2]
STACK = strict_yaml.load(ROOT / "ci" / "gates" / "throughput.yaml", ThroughputPolicy).generator
SPEC = vllm_bench.LoadSpec("http://127.0.0.1:9", "reference", 8, 3, 2, 2, warmups=0, timeout_s=60.0)
RESULT = {
    "input_lens": [8, 8], "output_lens": [3, 0], "ttfts": [0.5, 0.0], "itls": [[0.1, 0.3], []], "errors": ["", "HTTP 429"],
    "latencies": [0.9, 0.0], "start_times": [10.25, 10.0], "unknown": None,
}  # fmt: skip


def program(folder: Path, body: str) -> vllm_bench.VllmBench:
    """Return a program that is called like the real one, and runs *body* with the path of its result as ``out``."""
    preamble = "import os, subprocess, sys, time\nout = sys.argv[sys.argv.index('--result-dir') + 1] + '/result.json'\n"
    return vllm_bench.VllmBench(processes.script(folder / "vllm-rs", preamble + body, sys.executable), "vllm-rs 0.33.0")


def writes(**changes: object) -> str:
    """Return a body that writes `RESULT` with *changes*."""
    return f"open(out, 'w').write({msgspec.json.encode({**RESULT, **changes}).decode()!r})"


def test_result_has_requests_in_order_of_prompts_with_percentiles_of_gaps(tmp_path: Path) -> None:
    result = program(tmp_path, writes()).measure(SPEC)
    assert result.generator == "vllm-rs 0.33.0"
    assert result.seconds == pytest.approx(1.15)
    assert result.requests == (vllm_bench.Request(0.25, 0.5, 0.9, 8, 3), vllm_bench.Request(0.0, 0.0, 0.0, 8, 0, "HTTP 429"))
    figures = [result.itl_p50, result.itl_p90, result.tpot, result.ttft, result.ttft_p90, result.rate]
    assert figures == pytest.approx([0.2, 0.28, 0.2, 0.25, 0.45, 3 / 1.15])
    assert program(tmp_path, writes(itls=[[], []])).measure(SPEC).itl_p90 is None


@pytest.mark.parametrize(
    ("body", "reason", "message"),
    [
        ("sys.exit('\\x1b[31mERROR\\x1b[0m process failed with error: no such host')", "generator-failed", "no such host"),
        ("os.kill(os.getpid(), 9)", "generator-failed", "status -9"),
        (writes(**{name: value[:1] for name, value in RESULT.items() if isinstance(value, list)}), "generator-failed", "1 of 2 requests are whole"),
        ("open(out, 'wb').truncate(2**29)", "generator-failed", "status"),
        ("pass", "generator-unreadable", "cannot be read"),
        ("open(out, 'w').write('[' * 100000)", "generator-unreadable", "cannot be read"),
        (writes(ttfts=[1.0]), "generator-failed", "1 of 2 requests are whole"),
        ("time.sleep(999)", "generator-late", "did not finish"),
        ("sys.exit('error: ' + str(os.environ.get('OPENAI_API_KEY')))", "generator-failed", "error: None"),
    ],
)
def test_program_that_gives_no_result_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str, message: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with pytest.raises(vllm_bench.LoadError) as caught:
        program(tmp_path, body).measure(replace(SPEC, timeout_s=3.0 if "sleep" in body else 60.0))
    assert caught.value.reason == reason
    assert message in caught.value.message


def test_prompts_are_shorter_by_the_tokens_that_the_tokenizer_adds(tmp_path: Path) -> None:
    body = writes(input_lens="LENGTHS").replace('"LENGTHS"', "' + str([1 + int(sys.argv[sys.argv.index('--random-input-len') + 1])] * 2) + '")
    result = program(tmp_path, body).measure(replace(SPEC, tokenizer=tmp_path, warmups=2))
    assert [request.prompt_tokens for request in result.requests] == [8, 8]


def test_program_is_extracted_once_from_the_official_wheel(tmp_path: Path) -> None:
    store, data = Store(tmp_path), b"#!/bin/sh\n"
    base = read_lock(Project(ROOT, STACK)).forks["vllm"].bases[os.uname().machine]
    wheel = tmp_path / base.filename
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/vllm-rs", data)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheel = wheel.rename(store.folder("downloads", sha256) / wheel.name)
    shutil.copytree(ROOT / "forks" / STACK, tmp_path / "forks" / STACK)
    lock = Project(tmp_path, STACK).lock_file
    lock.write_text(lock.read_text().replace(base.sha256, sha256))
    generator = vllm_bench.obtain(tmp_path, STACK, store, offline=True)
    assert (generator.name, generator.program.read_bytes()) == ("vllm-rs 0.33.0", data)
    assert os.access(generator.program, os.X_OK)
    wheel.unlink()
    assert vllm_bench.obtain(tmp_path, STACK, store, offline=True) == generator


class Timetable:
    """A generator with known figures, one factor for each run; the run after the last factor is late."""

    name = "timetable"

    def __init__(self, *factors: float) -> None:
        self.specs: list[vllm_bench.LoadSpec] = []
        self._factors = factors

    def measure(self, spec: vllm_bench.LoadSpec) -> vllm_bench.LoadResult:
        if len(self.specs) == len(self._factors):
            raise vllm_bench.LoadError("generator-late", "it did not finish")
        factor = self._factors[len(self.specs)]
        self.specs.append(spec)
        latency = factor * (1.0 + 0.1 * (spec.output_tokens - 1))
        request = vllm_bench.Request(0.0, factor, latency, spec.prompt_tokens, spec.output_tokens)
        return vllm_bench.LoadResult(self.name, latency, (request,) * spec.requests, 0.1, 0.2)


def test_quick_look_has_the_interval_over_its_runs_and_ends_in_time() -> None:
    """A run that is late ends it, and the runs before count."""
    generator = Timetable(0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1)
    look = quick_look.quick_look(generator, "cell", replace(SPEC, output_tokens=64, concurrency=2), 60)
    tpot = look.figures[0]
    # In logarithms: t(0.975, 7) · s / √8 with s = 0.1073.
    assert [tpot.low, tpot.median, tpot.high] == pytest.approx([90.96, 100, 108.84], abs=0.01)
    assert (look.runs, look.output_tokens, look.requests) == (8, 64, 2)
    assert len({spec.seed for spec in generator.specs}) == 8
    assert [spec.warmups for spec in generator.specs] == [1, *[0] * 7]
    late = Timetable(1.0, 1.0)
    assert quick_look.quick_look(late, "cell", SPEC, 0.7).runs == 2
    assert late.specs[-1].timeout_s < 1.01


def test_quick_look_shows_no_number_for_what_no_run_has(capsys: pytest.CaptureFixture[str]) -> None:
    look = quick_look.quick_look(Timetable(0.9, 1.1), "cell", replace(SPEC, output_tokens=1, concurrency=1), 60)
    quick_look.show(look, "toy")
    shown = {line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines() if "not measured" in line}
    assert shown == {"time per token, ms", "time per token, p90, ms"}


def test_quick_look_at_a_rate_has_no_limit() -> None:
    """Requests arrive at the rate for ten seconds, whatever the cell's concurrency."""
    generator = Timetable(1.0, 1.0)
    look = quick_look.quick_look(generator, "cell", replace(SPEC, concurrency=1, output_tokens=64, request_rate=2.0), 60)
    assert look.requests == 20
    assert "--max-concurrency" not in vllm_bench.arguments(generator.specs[-1], Path())


@pytest.fixture(name="quick")
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return what runs a bench with the words of a command line and returns its file, of short runs of *load*."""

    folders = ["--root", str(refserved.project(tmp_path / "project")), "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]

    def run(*words: str, load: thread_load.ThreadLoad | None = None) -> dict[str, Any]:
        monkeypatch.setattr(vllm_bench, "obtain", lambda *_, **__: load or thread_load.ThreadLoad())
        monkeypatch.setattr(quick_look, "RUN_S", 0.1)
        arguments = main.parse(["bench", *folders, *words])
        arguments.run(arguments)
        [written] = (tmp_path / "out").rglob("*.bench.json")
        return {**msgspec.json.decode(written.read_bytes()), "name": written.name}

    return run


@pytest.fixture(name="serves")
def _serves(tmp_path: Path) -> list[str]:
    """Return the options of a model and an environment that serves it."""
    (tmp_path / "toy").mkdir()
    python = refserved.environment(tmp_path / "environment", Behaviour())
    return ["--serve", str(tmp_path / "toy"), "--python", str(python), "--workload", "8/16 c1"]


def test_bench_warns_of_a_busy_machine_and_a_slow_gpu_and_measures_each_cell(
    quick: Callable[..., dict[str, Any]], serves: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--quick` the first one. The GPU is looked at as by `doctor`, before the server starts."""
    monkeypatch.setattr(monitor, "disturbances", lambda *_: (records.Reason("machine-busy", "others use 90%"),))
    monkeypatch.setattr(host_info, "gpus", lambda: (host_info.GpuInfo("NVIDIA GB10", "12.1", "580.95"),))
    monkeypatch.setattr(monitor, "under_load", lambda asked: ("702 of 3,003 MHz", "the GPU stays at 702 MHz") if str(asked) in serves else ("", ""))
    cells = [*serves, "--workload", "8/130 c2"]
    written, first = quick(*cells), quick(*cells, "--quick", "--rate", "200", "--natural")
    assert [(look["cell"], look["output_tokens"], look["runs"] >= 2) for look in written["looks"]] == [("8/16 c1", 16, True), ("8/130 c2", 130, True)]
    assert [look["cell"] for look in first["looks"]] == ["8/16 c1"]
    assert first["load"] == {"request_rate": 200.0, "natural_length": True}
    assert written["warnings"] == ["machine-busy: others use 90%", "slow-clock: the GPU stays at 702 MHz"]
    # What `model inspect` predicts by.
    kept = Store(tmp_path / "cache").get(*model.modules.BANDWIDTH, model.modules.Bandwidth)
    assert kept is not None
    assert kept.gigabytes > 0
    shown = capsys.readouterr()
    assert "No gate" in shown.out
    assert "200 requests per second, any number at a time, answers of natural length" in " ".join(shown.out.split())
    assert "702 of 3,003 MHz" in shown.err


@pytest.mark.parametrize(("cell", "machine", "reason"), [("8/16 c64", 64.0, "cell-too-wide"), ("8/16 c1", 2.0, "memory-short")])
def test_bench_refuses_what_serve_does_for_its_memory_and_cells(
    quick: Callable[..., dict[str, Any]], serves: list[str], cell: str, machine: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bench started a server that `serve` refused."""
    monkeypatch.setattr(memory.MachineMemory, "here", lambda **_: memory.MachineMemory(machine, machine))
    with refusal("recipe-unfit", match="toy-cpu cannot be served here", says=reason):
        quick(*serves[:4], "--recipe", "toy-cpu", "--workload", cell)


def test_quick_bench_of_a_server_that_drafts_shows_accepted_drafts_on_real_text(
    quick: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of two drafts' tokens for each token of an answer: 1.5. Random tokens would be accepted by chance."""
    files, plain = list[Path | None](), FakeServer.metrics

    class Load(thread_load.ThreadLoad):
        def measure(self, spec: vllm_bench.LoadSpec) -> vllm_bench.LoadResult:
            files.append(spec.prompt_file)
            return super().measure(spec)

    def metrics(server: FakeServer) -> str:
        count = server.counts["tokens"]
        return f"{plain(server)}vllm:spec_decode_num_drafts_total {2 * count}\nvllm:spec_decode_num_accepted_tokens_total {3 * count}\n"

    monkeypatch.setattr(FakeServer, "metrics", metrics)
    with started(Behaviour()) as server:
        written = quick("--server", server.url, "--workload", "64/16 c1", load=Load())
    assert "accepted drafts: 1.50 tokens a step, on real text" in capsys.readouterr().out
    assert written["looks"][0]["accepted_drafts"] == 1.5
    [file] = set(files)
    assert file is not None
    assert file.name.startswith("programs-")


@pytest.mark.parametrize(("path", "words"), [("", []), ("/v1", []), ("/v1/", ["--model", "acme/odd-name"])])
def test_server_that_runs_is_asked_for_the_name_of_its_model(quick: Callable[..., dict[str, Any]], path: str, words: list[str]) -> None:
    """The name was `model` unless it was typed, and an address as OpenAI's clients have it failed."""
    with started(Behaviour(name="acme/odd-name")) as server:
        written = quick("--server", server.url + path, "--workload", "8/16 c1", *words)
    assert written["looks"][0]["runs"] >= 2
    assert written["name"].endswith("odd-name.bench.json")


@pytest.mark.parametrize(("tokens", "vocabulary", "longest"), [(1024, 100_000, 4096), (32768, 100_000, 131072), (32, 638, 32)])
def test_prompts_of_this_program_are_many_and_begin_differently(tokens: int, vocabulary: int, longest: int, tmp_path: Path) -> None:
    """
    Those of a long cell overlap, or a measurement would ask the same 23 again. A tokenizer of 638 entries gave 80 tokens for 80 characters, and the
    generator left all out (seen on a GPU, 2026-11-30).
    """
    lines = vllm_bench.own_prompts(Store(tmp_path), tokens, vocabulary).read_text("utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    assert len({text[:64] for text in texts}) > 64
    assert max(map(len, texts)) <= longest


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo, Path.mkdir, Path.exists, *(
            lambda path, text=text: path.write_bytes(text)
            for text in (b"", b'{"data": []}\n', b'{"prompt": " "}\n', b'{"prompt": "Why?"}\n{"x": 1}\n', b'{"prompt": "\xff"}\n', b"[" * 100_000 + b"\n")
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["bench", "gate"])
def test_file_of_no_prompts_is_refused_before_anything_starts(verb: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "prompts")
    arguments = main.parse([verb, "--python", "p", "--serve", str(tmp_path), "--recipe", "toy-cpu", "--texts", str(tmp_path / "prompts"), "--cache-dir", str(tmp_path / "cache")])
    with refusal("file-invalid", match="file of prompts"):
        arguments.run(arguments)


@pytest.fixture(scope="module", name="real")
def _real(user_store: Store) -> vllm_bench.VllmBench:
    """The real program from the real wheel (336 MB, in the user's store afterwards)."""
    return vllm_bench.obtain(ROOT, STACK, user_store, offline=False)


#: Fault → tokens of the second request, and a part of its error. The program does not report an error event; only the tokens, and the
#: server's counters, show it.
SHOWN: dict[Fault, tuple[int, str]] = {
    "closes": (0, "Stream error"), "refuses": (0, "429"), "dies": (0, "error"), "error-event": (5, ""), "short": (9, ""),
    "usage-more": (11, ""),
}  # fmt: skip


@pytest.mark.network
@pytest.mark.parametrize("fault", SHOWN)
def test_real_program_shows_each_fault_of_a_server(real: vllm_bench.VllmBench, fault: Fault) -> None:
    with started(Behaviour(faults={fault: 2})) as server:
        spec = replace(SPEC, url=server.url, output_tokens=10, concurrency=1)
        # Which of the two met the fault depends on whether the program asked the server before.
        sound, faulty = sorted(real.measure(spec).requests, key=lambda each: (each.output_tokens, each.error) != (10, ""))
    assert (sound.output_tokens, sound.error) == (10, "")
    tokens, error = SHOWN[fault]
    assert faulty.output_tokens == tokens
    assert error in faulty.error
    assert bool(error) == bool(faulty.error)
