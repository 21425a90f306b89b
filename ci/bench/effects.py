"""
Measures what the changes of the default stack bring on a GPU: ours with a change against ours without it, or against the official wheel.

    effects.py drafts      time per token with drafts: stock, ours, and ours with a draft vocabulary; at concurrency 1 and 4, and equal greedy text
    effects.py draft-head  the same of ours, with the head in BF16 and in FP8 for drafts alone
    effects.py head        time per token of ours and two models: with the head in BF16 and, in MODEL-fp8, in FP8 by blocks
    effects.py graphs      time per token at concurrency 5 and 10, with and without CUDA graphs of all sizes to 32
    effects.py waiting     cores that an idle and a decoding server holds, whose worker is a process of its own; and time per token
    effects.py reserve     memory of the GPU that stays free beside a server whose KV cache is ordered too large, with and without a reserve of 16 GiB
    effects.py folder      seconds of a start with torch.compile, of a model that was compiled in another folder
    effects.py show        what is recorded in the folder of --output, from this machine or another
    effects.py fill        the same, and write it into cherry_picks/effects.yaml; ci/write_pages.py makes the pages of that

The unit is a launch: in a round all sides start afresh, stay, and take turns, forth and back. A figure of a round is a ratio of two sides;
the interval is that of the mean of its logarithm over the rounds, as in `bench`. No round begins that would end after the budget, and a
further run with the same wheels continues. It compares nothing with a limit: the throughput gate does (G8).

Its models are those of ci/rehearsal: lookup.py, no language model, but four layers of Qwen3-Next with the head of Qwen3.6-35B-A3B, and
`wide` and `head` of models.py, a trained hybrid and a random Llama with a head that a fast GPU reads long enough. Where the head is most
of what is read, the gain is larger than where layers are; of a Spark they say that the mechanism works, not how much it brings.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from sparkwright.bench import vllm_bench
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.launch import RESERVE, SLEEP, LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.bench.statistics import MIN_INTERVAL, mean_interval
from sparkwright.bench.vllm_bench import LoadError, LoadSpec, VllmBench
from sparkwright.cherry_picks.effects import load_effects
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.core.store import Store, append_line, read_lines
from sparkwright.gates.throughput_run import counter_change, invalid_reasons

ROOT = Path(__file__).parents[2]
#: Tokens of an answer; prompts whose answers have to be equal, and their tokens.
ANSWER, EQUAL, EQUAL_TOKENS = 256, 24, 96
#: Seconds after the last request before an idle server is watched, and for how long.
CALM_S, WATCHED_S = 2.0, 5.0
#: Requests of a load for each of those at a time. Where the GPU decides, six loads of a round take a minute.
REQUESTS = {1: 8, 4: 4, 5: 6, 10: 4}
#: Flags of all servers. A KV cache of stated size lets several start at once: no server measures the memory that another one takes meanwhile.
FLAGS = (
    "--max-model-len=2048", "--max-num-seqs=16", "--gpu-memory-utilization=0.2", "--kv-cache-memory-bytes=2147483648", "--no-enable-prefix-caching",
)  # fmt: skip
VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
DRAFTS = 3
#: Cores below it are not told apart, as CPU time is counted in hundredths of a second.
LEAST = 0.001
GIB = 1 << 30
#: Seconds of a start after the first, which compiles [measured: docs/rehearsal/2026.11.md].
WARM_START_S = 45.0
#: Options without which nothing can be measured.
NEEDED = ("ours", "stock", "wheel", "baseline", "model", "cache_dir")


class Side(msgspec.Struct, frozen=True):
    """A server: of our wheel or the official one, with its flags; *model* ends the name of its model's folder."""

    ours: bool
    flags: list[str]
    variables: dict[str, str] = {}
    model: str = ""


class Round(msgspec.Struct, frozen=True):
    """
    What a round gave: side → figure → values, one for each turn.

    Attributes:
        key: Of wheels, all files of the models, flags, GPU, and what a load is.
        wheel, baseline: The sha256 of our wheel and the official one. *date*: the day (UTC).
        equal: Side → how many of `EQUAL` greedy answers are those of the first side; of one round.
    """

    key: str
    what: str
    model: str
    machine: str
    wheel: str
    baseline: str
    date: str
    values: dict[str, dict[str, list[float]]]
    equal: dict[str, int] = {}


class Effect(msgspec.Struct, frozen=True):
    """A figure of two sides: the ratio of the first to the second over the rounds, with its interval if there are enough."""

    figure: str
    sides: tuple[str, str]
    values: tuple[float, float]
    ratios: tuple[float, ...]
    ratio: float
    low: float | None = None
    high: float | None = None


class Bench:
    """What every measurement uses: the options, the load generator and the model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.model = options, options.model.absolute()
        store = Store(options.cache_dir)
        self.generator: VllmBench = vllm_bench.obtain(options.root, "2026.11", store, offline=True)
        self.prompts = self.model / "prompts.jsonl"
        if not (self.prompts.is_file() and self.prompts.read_text("utf-8").strip()):
            sys.exit(f"{self.prompts} has no prompts")
        self.logs = options.output / "logs"
        #: Seconds of the last start of all sides, and of each.
        self.start_s = 0.0
        self.starts = dict[str, float]()

    @contextlib.contextmanager
    def servers(
        self, sides: Mapping[str, Side], model: Path | None = None
    ) -> Iterator[dict[str, Server]]:
        """Start all servers at the same time, of *model* or their own, and end them with the block."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            servers = {}
            for name, side in sides.items():
                python = self.options.ours if side.ours else self.options.stock
                plan = LaunchPlan(
                    python,
                    model or self.model.with_name(self.model.name + side.model),
                    tuple(side.flags),
                    VARIABLES | side.variables,
                )
                servers[name] = Server(plan, self.logs / f"{self.options.what}-{name}.log")
                stack.callback(servers[name].stop)
            self.starts = self.wait(servers)
            for server in servers.values():
                # Some kernels are compiled for the first answer.
                Client(server.url, server.plan.name).complete(
                    [1, 2, 3], max_tokens=32, ignore_eos=True
                )
            self.start_s = time.monotonic() - began
            console.note(f"{', '.join(servers)}: started in {self.start_s:.0f} s")
            yield servers

    def wait(self, servers: Mapping[str, Server]) -> dict[str, float]:
        """Return after how many seconds each server answered."""
        began, seconds = time.monotonic(), dict[str, float]()
        while len(seconds) < len(servers):
            time.sleep(0.2)
            for name, server in servers.items():
                if time.monotonic() - began > self.options.patience:
                    server.end("server-late", f"does not answer after {self.options.patience:g} s")
                if not server.guard():
                    tail = server.log.read_text("utf-8", "replace")[-3000:]
                    sys.exit(f"{tail}\nthe server of {name}: {server.failure} ({server.reason})")
                with contextlib.suppress(ServerInvalid):
                    if name not in seconds and server.client(deadline=10).model():
                        seconds[name] = time.monotonic() - began
        return seconds

    def load(self, server: Server, concurrency: int, seed: int) -> dict[str, float]:
        """Return time per token (ms), tokens a step and cores of a load, which is made until it counts, three times at most."""
        client = Client(server.url, server.plan.name, deadline=30)
        spec = LoadSpec(
            server.url, server.plan.name, 64, ANSWER, concurrency, REQUESTS[concurrency] * concurrency, warmups=1, seed=seed,
            tokenizer=self.model, prompt_file=self.prompts, timeout_s=120,
        )  # fmt: skip
        for _ in range(3):
            counters, busy, began = client.metrics(), cpu_seconds(server), time.monotonic()
            try:
                run = self.generator.measure(spec)
            except LoadError as error:
                console.warn(str(error))
                continue
            cores = (cpu_seconds(server) - busy) / (time.monotonic() - began)
            time.sleep(0.5)
            change = counter_change(counters, client.metrics())
            reasons = invalid_reasons(spec, run, change, 0.01)
            if not reasons:
                assert change
                steps = {f"tokens per step, c{concurrency}": change.drafts} if change.drafts else {}
                return {
                    f"time per token, c{concurrency}, ms": 1000 * run.tpot,
                    f"cores while decoding, c{concurrency}": cores,
                    **steps,
                }
            console.warn("; ".join(f"{reason.reference}: {reason.message}" for reason in reasons))
        sys.exit(f"no load of {server.log.stem} counts")

    def texts(self, server: Server) -> list[tuple[int, ...]]:
        """Return greedy answers as tokens."""
        client = Client(server.url, server.plan.name, deadline=60)
        lines = self.prompts.read_text("utf-8").splitlines()[:EQUAL]
        prompts = [json.loads(line)["prompt"] for line in lines]
        return [
            client.complete(prompt, max_tokens=EQUAL_TOKENS, ignore_eos=True).tokens
            for prompt in prompts
        ]


def cpu_seconds(server: Server) -> float:
    """Return the CPU time of the server's processes so far."""
    total = 0.0
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def graphs(*sizes: int) -> dict[str, object]:
    """Return the setting for CUDA graphs of decode steps of these sizes in tokens, or of vLLM's."""
    return {"cudagraph_mode": "FULL_DECODE_ONLY"} | (
        {"cudagraph_capture_sizes": sizes} if sizes else {}
    )


def compilation(**config: object) -> str:
    """Return the flag of these settings; ``mode=0`` is without torch.compile."""
    return f"--compilation-config={json.dumps(config, separators=(',', ':'))}"


def drafting(**more: str) -> str:
    """Return the flag for drafts of the model's own layer (MTP)."""
    return f"--speculative-config={json.dumps({'method': 'mtp', 'num_speculative_tokens': DRAFTS, **more})}"


def sides_of(what: str, model: Path) -> dict[str, Side]:
    """Return the servers of a measurement."""
    hybrid = [*FLAGS, '--additional-config={"gdn_prefill_backend":"triton"}']
    few = [*hybrid, compilation(mode=0, **graphs(1, 2, 4, 8, 16))]
    if what == "waiting":
        # Engine and worker exchange messages as with several GPUs.
        few.append("--distributed-executor-backend=mp")
        return {"stock": Side(False, few), "ours": Side(True, few, {SLEEP: "1"})}
    if what == "reserve":
        # Whole GiB, so that a later run continues; four stay for what is computed.
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        size = ((gpu_free() - weights) // GIB - 4) * GIB
        ordered = [flag for flag in few if "kv-cache" not in flag]
        ordered.append(f"--kv-cache-memory-bytes={size}")
        return {
            "without a reserve": Side(True, ordered),
            "reserve": Side(True, ordered, {RESERVE: "16"}),
        }
    if what == "graphs":
        default = [*hybrid, compilation(mode=0, **graphs())]
        return {
            "by default": Side(True, default),
            "interactivity": Side(True, [*default, "--performance-mode=interactivity"]),
        }
    if what == "folder":
        compiled = [*hybrid, compilation(**graphs(1, 2, 4, 8, 16))]
        return {"stock": Side(False, compiled), "ours": Side(True, compiled)}
    if what == "head":
        # DeepGEMM would compile its kernels with nvcc while it serves.
        variables = {"VLLM_USE_DEEP_GEMM": "0"}
        return {
            "in BF16": Side(True, few, variables),
            "in FP8": Side(True, few, variables, "-fp8"),
        }
    hybrid.append(compilation(mode=0, **graphs(4, 8, 16, 32, 64)))
    plain = [*hybrid, drafting()]
    if what == "draft-head":
        quantised = drafting(draft_lm_head_quantization="fp8")
        return {"ours": Side(True, plain), "drafts in FP8": Side(True, [*hybrid, quantised])}
    words = drafting(draft_vocabulary=str(model.absolute() / "draft_vocabulary.json"))
    return {
        "stock": Side(False, plain),
        "ours": Side(True, plain),
        "draft vocabulary": Side(True, [*hybrid, words]),
    }


def loads(*concurrencies: int) -> Callable[[Bench, Server, int], dict[str, float]]:
    """Return a turn of loads at these concurrencies."""

    def turn(bench: Bench, server: Server, seed: int) -> dict[str, float]:
        figures: dict[str, float] = {}
        for concurrency in concurrencies:
            figures |= bench.load(server, concurrency, seed)
        return figures

    return turn


def waiting_turn(bench: Bench, server: Server, seed: int) -> dict[str, float]:
    """Return the figures of a load, and the cores that the server holds afterwards."""
    figures = bench.load(server, 1, seed)
    time.sleep(CALM_S)
    busy, began = cpu_seconds(server), time.monotonic()
    time.sleep(WATCHED_S)
    figures["cores while idle"] = (cpu_seconds(server) - busy) / (time.monotonic() - began)
    return figures


def reserve_turn(bench: Bench, server: Server, seed: int) -> dict[str, float]:
    """Return the memory that is free after a load."""
    bench.load(server, 10, seed)
    return {"GiB free on the GPU": gpu_free() / GIB}


class Measurement(msgspec.Struct, frozen=True):
    """
    A measurement.

    Attributes:
        turn: Returns the figures of a server; None where the start itself is measured.
        change: The patch or option that it measures, of effects.yaml; empty for none.
        pairs: Pairs of sides whose ratio is recorded: with the change, and without it.
        control: Pairs that are shown beside them.
        figures: Beginnings of the names of figures that are recorded.
        equal: Whether all sides have to give the same text.
        alone: Whether a side is served when the others are gone, one turn each.
    """

    turn: Callable[[Bench, Server, int], dict[str, float]] | None
    change: str
    pairs: tuple[tuple[str, str], ...]
    control: tuple[tuple[str, str], ...] = ()
    figures: tuple[str, ...] = ("",)
    equal: bool = False
    alone: bool = False


MEASUREMENTS = {
    "drafts": Measurement(
        loads(1, 4),
        "let-a-drafter-propose-from-a-reduced-vocabulary.patch",
        (("draft vocabulary", "stock"), ("draft vocabulary", "ours")),
        control=(("ours", "stock"),),
        figures=("time", "tokens"),
        equal=True,
    ),
    "draft-head": Measurement(loads(1), "", (("drafts in FP8", "ours"),), equal=True),
    "head": Measurement(
        loads(1),
        "load-an-output-layer-in-fp8-with-a-scale-for-a-block.patch",
        (("in FP8", "in BF16"),),
        figures=("time",),
    ),
    "graphs": Measurement(
        loads(5, 10),
        "--performance-mode=interactivity",
        (("interactivity", "by default"),),
        figures=("time",),
        equal=True,
    ),
    "waiting": Measurement(
        waiting_turn, "wait-for-messages-without-spinning.patch", (("ours", "stock"),)
    ),
    "reserve": Measurement(
        reserve_turn,
        "leave-a-reserve-of-memory-beside-the-kv-cache.patch",
        (("reserve", "without a reserve"),),
        alone=True,
    ),
    "folder": Measurement(
        None, "do-not-key-compiled-graphs-by-the-model-s-folder.patch", (("ours", "stock"),)
    ),
}


def one_round(
    bench: Bench, measurement: Measurement, sides: Mapping[str, Side], number: int, *, texts: bool
) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
    """
    Start all sides, measure them forth and back, and return the values of each.

    Args:
        texts: Whether greedy answers are compared, too; how many are equal is returned.
    """
    values: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    order = list(sides) if number % 2 else list(sides)[::-1]
    if measurement.turn is None:
        if not number:
            with linked(bench.model, "before") as folder, bench.servers(sides, folder):
                pass
        with linked(bench.model, str(number)) as folder, bench.servers(sides, folder):
            seconds = {
                name: {"seconds of a start": [start]} for name, start in bench.starts.items()
            }
            return seconds, {}
    if measurement.alone:
        for name in order:
            with bench.servers({name: sides[name]}) as servers:
                figures = measurement.turn(bench, servers[name], 1000 * number)
                values[name] = {figure: [value] for figure, value in figures.items()}
        return values, {}
    equal = dict[str, int]()
    with bench.servers(sides) as servers:
        if texts:
            answers = {name: bench.texts(server) for name, server in servers.items()}
            for name, own in answers.items():
                pairs = zip(own, next(iter(answers.values())), strict=True)
                equal[name] = sum(answer == first for answer, first in pairs)
        for turn, name in enumerate([*order, *order[::-1]]):
            # Both turns of a side have other prompts; those of the sides are the same.
            seed = 1000 * number + (turn >= len(order))
            for figure, value in measurement.turn(bench, servers[name], seed).items():
                values[name].setdefault(figure, []).append(value)
    return values, equal


@contextlib.contextmanager
def linked(model: Path, name: str) -> Iterator[Path]:
    """Yield another folder with the files of *model*, for the block."""
    folder = model.with_name(f"{model.name}-{name}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, copy_function=os.link)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def effects_of(rounds: Sequence[Round], pairs: Sequence[tuple[str, str]]) -> Iterator[Effect]:
    """Yield the ratio of each figure that both sides of a pair have."""
    for pair in pairs:
        shared = [name for name in rounds[0].values[pair[0]] if name in rounds[0].values[pair[1]]]
        for figure in shared:
            sides = [
                [max(LEAST, statistics.fmean(each.values[name][figure])) for each in rounds]
                for name in pair
            ]
            ratios = [own / other for own, other in zip(*sides, strict=True)]
            logarithms = [math.log(ratio) for ratio in ratios]
            low, high = (
                (math.exp(end) for end in mean_interval(logarithms))
                if len(ratios) >= MIN_INTERVAL
                else (None, None)
            )
            means = statistics.median(sides[0]), statistics.median(sides[1])
            yield Effect(
                figure,
                pair,
                means,
                tuple(ratios),
                math.exp(statistics.fmean(logarithms)),
                low,
                high,
            )


def gpu_free() -> int:
    """Return the bytes that are free on the first GPU that servers may use."""
    return int(gpu("memory.free").partition(" ")[0]) << 20


def gpu(field: str) -> str:
    """Return what nvidia-smi says of the first GPU that servers may use."""
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", f"--id={number}"]
    with contextlib.suppress(OSError):
        return (
            subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
            or "no GPU"
        )
    return "no GPU"


def show(rounds: Sequence[Round]) -> list[str]:
    """Print the table of rounds with one key, and return the lines for effects.yaml."""
    first = rounds[0]
    measurement = MEASUREMENTS[first.what]
    rows, lines = [], []
    for effect in effects_of(rounds, (*measurement.pairs, *measurement.control)):
        values = [f"{value:.3f}" for value in effect.values]
        row = [effect.figure, " / ".join(effect.sides), *values, f"{effect.ratio:.3f}"]
        if effect.low is None or effect.high is None:
            rows.append([*row, "too few rounds"])
            continue
        rows.append([*row, f"{effect.low:.3f} to {effect.high:.3f}"])
        if effect.sides in measurement.pairs and effect.figure.startswith(measurement.figures):
            baseline = first.baseline if effect.sides[1] == "stock" else first.wheel
            lines.append(
                f"- {{figure: '{effect.figure} ({row[1]}; {first.model})', ratio: {effect.ratio:.4g}, low: {effect.low:.4g}, high: {effect.high:.4g}, "
                f"count: {len(rounds)}, machine: {first.machine}, wheel: '{first.wheel}', baseline: '{baseline}', date: '{first.date}'}}"
            )
    title = f"{first.what}: {len(rounds)} rounds on {first.machine}; {first.model}"
    console.table(
        title, ["figure", "sides", ">first", ">second", ">ratio", ">95 %"], rows, result=True
    )
    equal = next((each.equal for each in rounds if each.equal), {})
    for name, count in equal.items():
        console.result(f"greedy text: {count} of {EQUAL} answers of {EQUAL_TOKENS} tokens: {name}")
    if measurement.equal and (not equal or min(equal.values()) < EQUAL):
        console.result("not recorded: the text is not shown to be equal")
        return []
    console.result(
        "\n".join(lines)
        or f"not measured: {len(rounds)} rounds, and an interval takes {MIN_INTERVAL}"
    )
    return lines


def recorded(folder: Path) -> list[list[Round]]:
    """Return the rounds in *folder* by key, those with the same figures in the order of their files."""
    groups = dict[str, list[Round]]()
    for path in sorted(folder.glob("*.jsonl")):
        for each in read_lines(path, Round, "rounds of effects.py"):
            groups.setdefault(each.key, []).append(each)
    return list(groups.values())


def filled(text: str, change: str, lines: Sequence[str]) -> str:
    """Return the *text* of effects.yaml with *lines* as the last field of *change*."""
    head, name, rest = text.partition(f"    {change}:\n")
    if not name:
        sys.exit(f"effects.yaml has no {change}")
    entry = re.match(r"(?:      .*\n)*", rest)
    assert entry
    own, _, _ = entry[0].partition("      measured:\n")
    measured = "".join(f"        {line}\n" for line in lines)
    return f"{head}{name}{own}      measured:\n{measured}{rest[entry.end() :]}"


def read(options: argparse.Namespace) -> None:
    """Show all that is recorded, and write it into effects.yaml if that is asked for."""
    by_change = dict[str, list[str]]()
    for rounds in recorded(options.output):
        lines = show(rounds)
        by_change.setdefault(MEASUREMENTS[rounds[0].what].change, []).extend(lines)
    path = options.root / "cherry_picks" / "effects.yaml"
    for change, lines in by_change.items():
        if options.what == "fill" and change and lines:
            path.write_text(filled(path.read_text("utf-8"), change, lines), "utf-8")
    load_effects(options.root)


def measure(options: argparse.Namespace) -> None:
    """Measure whole rounds while there is time, and show them with earlier ones."""
    if missing := [name for name in NEEDED if getattr(options, name) is None]:
        sys.exit(f"missing: {' '.join(missing)}")
    deadline, expected = time.monotonic() + options.budget, 0.0
    bench, measurement = Bench(options), MEASUREMENTS[options.what]
    sides = sides_of(options.what, options.model)
    wheel, baseline = sha256_file(options.wheel), sha256_file(options.baseline)
    models = sorted(
        {bench.model.with_name(bench.model.name + side.model) for side in sides.values()}
    )
    pinned = (
        options.what,
        sides,
        wheel,
        baseline,
        [
            {
                str(file.relative_to(model)): sha256_file(file)
                for file in sorted(model.rglob("*"))
                if file.is_file()
            }
            for model in models
        ],
        gpu("name"),
        (ANSWER, EQUAL, EQUAL_TOKENS, CALM_S, WATCHED_S, [*REQUESTS.items()], VARIABLES),
    )
    key, record = sha256_bytes(canonical(pinned)), options.output / f"{options.what}.jsonl"
    lines = read_lines(record, Round, "rounds of effects.py") if record.exists() else []
    rounds = [line for line in lines if line.key == key]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        while len(rounds) < options.rounds and time.monotonic() + expected < deadline:
            began, number = time.monotonic(), len(rounds)
            texts = measurement.equal and not any(each.equal for each in rounds)
            values, equal = one_round(bench, measurement, sides, number, texts=texts)
            rounds.append(
                Round(
                    key,
                    options.what,
                    bench.model.name,
                    gpu("name"),
                    wheel,
                    baseline,
                    today,
                    values,
                    equal,
                )
            )
            append_line(record, rounds[-1])
            seconds = time.monotonic() - began
            expected = seconds - max(0.0, bench.start_s - WARM_START_S)
            console.note(f"round {len(rounds)}: {seconds:.0f} s")
    finally:
        # A round that failed takes nothing from those before it.
        if rounds:
            show(rounds)
    if not rounds:
        sys.exit("not measured: the budget is over before the first round")


def main() -> None:
    """Measure or show what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n\n")[0])
    parser.add_argument("what", choices=[*MEASUREMENTS, "show", "fill"])
    for name, about in (
        ("ours", "Python of the environment with our wheel"),
        ("stock", "that of the official wheel"),
        ("wheel", "our wheel, for its digest"),
        ("baseline", "the official wheel"),
        ("model", "folder of the model"),
        ("cache-dir", "store with the load generator"),
    ):
        parser.add_argument(f"--{name}", type=Path, help=about)
    parser.add_argument("--rounds", type=int, default=3, help="rounds at most (default: 3)")
    parser.add_argument(
        "--budget",
        type=float,
        default=300,
        help="seconds, in which whole rounds are measured (default: 300)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=400,
        help="seconds until a server must be ready (default: 400)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("effects"), help="folder of records and logs"
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    (read if options.what in ("show", "fill") else measure)(options)


if __name__ == "__main__":
    main()
