"""
Measures what the changes of the default stack bring on a GPU: ours with a change against ours without it, or against the official wheel.

    effects.py drafts    time per token with drafts: stock, ours, and ours with a draft vocabulary; at concurrency 1 and 4, and equal greedy text
    effects.py graphs    time per token at concurrency 5 and 10, with and without CUDA graphs of all sizes to 32
    effects.py waiting   cores that an idle and a decoding server holds, whose worker is a process of its own; and time per token
    effects.py reserve   memory of the GPU that stays free beside a server whose KV cache is ordered too large, with and without a reserve of 16 GiB

The unit is a launch: in a round all sides start afresh, stay, and take turns, forth and back. A figure of a round is a ratio of two sides;
the interval is that of the mean of its logarithm over the rounds, as in `bench`. No round begins that would end after the budget, and a
further run with the same wheels continues. Beside a table it prints the lines for `measured` in cherry_picks/effects.yaml. It compares
nothing with a limit: the throughput gate does (G8).

Its model is ci/rehearsal/lookup.py: no language model, but four layers of Qwen3-Next with the head of Qwen3.6-35B-A3B. Where the
head is most of what a draft reads, the gain is larger than where layers are; of a Spark it says that the mechanism works, not how much it brings.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.load.vllm_bench import LoadSpec, VllmBench
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.bench.statistics import MIN_INTERVAL, mean_interval
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.core.store import Store, append_line, read_lines
from sparkwright.gates.throughput_run import counter_change, invalid_reasons

ROOT = Path(__file__).parents[2]
#: Tokens of an answer; prompts whose answers have to be equal, and their tokens.
ANSWER, EQUAL, EQUAL_TOKENS = 256, 24, 96
#: Seconds after the last request before an idle server is watched, and for how long.
CALM_S, WATCHED_S = 3.0, 8.0
#: Requests of a load for each of those at a time: loads of three seconds spread by a fifth on a host that lends its cores.
REQUESTS = {1: 24, 4: 12, 5: 10, 10: 6}
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


class Side(msgspec.Struct, frozen=True):
    """A server: of our wheel or the official one, with its flags."""

    ours: bool
    flags: list[str]
    variables: dict[str, str] = {}


class Round(msgspec.Struct, frozen=True):
    """
    What a round gave: side → figure → values, one for each turn.

    Attributes:
        key: Of wheels, all files of the model, flags, GPU, and what a load is.
    """

    key: str
    values: dict[str, dict[str, list[float]]]


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
        self.options, self.model = options, Path(options.model)
        store = Store(options.cache_dir)
        self.generator: VllmBench = vllm_bench.obtain(options.root, "2026.11", store, offline=True)
        self.prompts = self.model / "prompts.jsonl"
        if not (self.prompts.is_file() and self.prompts.read_text("utf-8").strip()):
            sys.exit(f"{self.prompts} has no prompts")
        self.logs = options.output / "logs"
        #: Seconds of the last start.
        self.start_s = 0.0

    @contextlib.contextmanager
    def servers(self, sides: Mapping[str, Side]) -> Iterator[dict[str, Server]]:
        """Start all servers at the same time, and end them with the block."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            servers = {}
            for name, side in sides.items():
                python = self.options.ours if side.ours else self.options.stock
                plan = LaunchPlan(
                    python,
                    self.model,
                    tuple(side.flags),
                    VARIABLES | side.variables,
                    timeout=self.options.patience,
                )
                servers[name] = Server(plan, self.logs / f"{self.options.what}-{name}.log")
                stack.callback(servers[name].stop)
            for name, server in servers.items():
                stack.enter_context(server)
                if not server.guard():
                    tail = server.log.read_text("utf-8", "replace")[-3000:]
                    sys.exit(f"{tail}\nthe server of {name} {server.failure} ({server.reason})")
            for server in servers.values():
                # Some kernels are compiled for the first answer.
                Client(server.url, server.plan.name).complete(
                    [1, 2, 3], max_tokens=32, ignore_eos=True
                )
            self.start_s = time.monotonic() - began
            console.note(f"{', '.join(servers)}: started in {self.start_s:.0f} s")
            yield servers

    def load(self, server: Server, concurrency: int, seed: int) -> dict[str, float]:
        """Return time per token (ms), tokens a step and cores of a load, which is made until it counts, three times at most."""
        client = Client(server.url, server.plan.name, deadline=30)
        spec = LoadSpec(
            server.url, server.plan.name, 64, ANSWER, concurrency, REQUESTS[concurrency] * concurrency, warmups=1, seed=seed,
            tokenizer=self.model, prompt_file=self.prompts, timeout_s=120,
        )  # fmt: skip
        for _ in range(3):
            counters, busy, began = client.metrics(), cpu_seconds(server), time.monotonic()
            run = self.generator.measure(spec)
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


def compiled(*sizes: int) -> str:
    """Return the flag for CUDA graphs of decode steps of these sizes in tokens, or of vLLM's, without torch.compile."""
    config: dict[str, object] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if sizes:
        config["cudagraph_capture_sizes"] = sizes
    return f"--compilation-config={json.dumps(config, separators=(',', ':'))}"


def drafting(**more: str) -> str:
    """Return the flag for drafts of the model's own layer (MTP)."""
    return f"--speculative-config={json.dumps({'method': 'mtp', 'num_speculative_tokens': DRAFTS, **more})}"


def sides_of(what: str, model: Path) -> dict[str, Side]:
    """Return the servers of a measurement."""
    hybrid = [*FLAGS, '--additional-config={"gdn_prefill_backend":"triton"}']
    if what == "waiting":
        # Engine and worker exchange messages as with several GPUs.
        hybrid += [compiled(1, 2, 4, 8, 16), "--distributed-executor-backend=mp"]
        return {"stock": Side(False, hybrid), "ours": Side(True, hybrid)}
    if what == "reserve":
        # Whole GiB, so that a later run continues; four stay for what is computed.
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        size = ((gpu_free() - weights) // GIB - 4) * GIB
        ordered = [flag for flag in hybrid if "kv-cache" not in flag] + [
            f"--kv-cache-memory-bytes={size}",
            compiled(1, 2, 4, 8, 16),
        ]
        return {
            "without a reserve": Side(True, ordered),
            "reserve": Side(True, ordered, {"VLLM_MEMORY_RESERVE_GIB": "16"}),
        }
    if what == "graphs":
        return {
            "by default": Side(True, [*hybrid, compiled()]),
            "interactivity": Side(True, [*hybrid, compiled(), "--performance-mode=interactivity"]),
        }
    hybrid.append(compiled(4, 8, 16, 32, 64))
    words = str(model.absolute() / "draft_vocabulary.json")
    return {
        "stock": Side(False, [*hybrid, drafting()]),
        "ours": Side(True, [*hybrid, drafting()]),
        "draft vocabulary": Side(True, [*hybrid, drafting(draft_vocabulary=words)]),
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
        pairs: Pairs of sides whose ratio is of interest: with the change, and without it.
        equal: Whether all sides have to give the same text.
        alone: Whether a side is served when the others are gone, one turn each.
    """

    turn: Callable[[Bench, Server, int], dict[str, float]]
    pairs: tuple[tuple[str, str], ...]
    equal: bool = False
    alone: bool = False


MEASUREMENTS = {
    "drafts": Measurement(
        loads(1, 4),
        (("draft vocabulary", "stock"), ("draft vocabulary", "ours"), ("ours", "stock")),
        equal=True,
    ),
    "graphs": Measurement(loads(5, 10), (("interactivity", "by default"),), equal=True),
    "waiting": Measurement(waiting_turn, (("ours", "stock"),)),
    "reserve": Measurement(reserve_turn, (("reserve", "without a reserve"),), alone=True),
}


def one_round(
    bench: Bench, measurement: Measurement, sides: Mapping[str, Side], number: int
) -> dict[str, dict[str, list[float]]]:
    """Start all sides, measure them forth and back, and return the values of each."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    order = list(sides) if number % 2 else list(sides)[::-1]
    if measurement.alone:
        for name in order:
            with bench.servers({name: sides[name]}) as servers:
                figures = measurement.turn(bench, servers[name], 1000 * number)
                values[name] = {figure: [value] for figure, value in figures.items()}
        return values
    with bench.servers(sides) as servers:
        if measurement.equal and number == 0:
            texts = {name: bench.texts(server) for name, server in servers.items()}
            first = next(iter(texts))
            different = [name for name in texts if texts[name] != texts[first]]
            if different:
                sys.exit(f"greedy text differs from that of {first}: {', '.join(different)}")
            console.result(
                f"greedy text: {len(texts[first])} answers of {EQUAL_TOKENS} tokens are equal on {', '.join(texts)}"
            )
        for turn, name in enumerate([*order, *order[::-1]]):
            # Both turns of a side have other prompts; those of the sides are the same.
            seed = 1000 * number + (turn >= len(order))
            for figure, value in measurement.turn(bench, servers[name], seed).items():
                values[name].setdefault(figure, []).append(value)
    return values


def effects_of(rounds: list[Round], pairs: tuple[tuple[str, str], ...]) -> Iterator[Effect]:
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


def show(effects: list[Effect], options: argparse.Namespace, rounds: int) -> None:
    """Print the table, and the lines for effects.yaml."""
    machine, today = gpu("name"), datetime.datetime.now(datetime.UTC).date().isoformat()
    rows, lines = [], []
    for effect in effects:
        interval = (
            f"{effect.low:.3f} to {effect.high:.3f}"
            if effect.low and effect.high
            else "too few rounds"
        )
        values = [f"{value:.3f}" for value in effect.values]
        rows.append(
            [effect.figure, " / ".join(effect.sides), *values, f"{effect.ratio:.3f}", interval]
        )
        if effect.low and effect.high:
            by_option = effect.sides[1] != "stock"
            wheels = [
                sha256_file(options.wheel),
                sha256_file(options.wheel if by_option else options.baseline),
            ]
            lines.append(
                f"- {{figure: '{effect.figure} ({' / '.join(effect.sides)})', ratio: {effect.ratio:.4g}, low: {effect.low:.4g}, high: {effect.high:.4g}, "
                f"count: {rounds}, machine: {machine}, wheel: {wheels[0]}, baseline: {wheels[1]}, date: '{today}'}}"
            )
    title = f"{options.what}: {rounds} rounds on {machine}; {Path(options.model).name}"
    console.table(
        title, ["figure", "sides", ">first", ">second", ">ratio", ">95 %"], rows, result=True
    )
    console.result(
        "\n".join(lines) or f"not measured: {rounds} rounds, and an interval takes {MIN_INTERVAL}"
    )
    console.document(
        {"what": options.what, "rounds": rounds, "machine": machine, "effects": effects}
    )
    console.finish()


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n\n")[0])
    parser.add_argument("what", choices=[*MEASUREMENTS])
    for name, about in (
        ("ours", "Python of the environment with our wheel"),
        ("stock", "that of the official wheel"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="PYTHON", help=about)
    parser.add_argument("--wheel", type=Path, required=True, help="our wheel, for its digest")
    parser.add_argument("--baseline", type=Path, required=True, help="the official wheel")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--rounds", type=int, default=6, help="rounds at most (default: 6)")
    parser.add_argument(
        "--budget",
        type=float,
        default=300,
        help="seconds, in which whole rounds are measured (default: 300)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=280,
        help="seconds until a server must be ready (default: 280)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("effects"), help="folder of records and logs"
    )
    parser.add_argument(
        "--cache-dir", type=Path, required=True, help="store with the load generator"
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console.json = options.json
    deadline, expected = time.monotonic() + options.budget, 0.0
    bench, measurement = Bench(options), MEASUREMENTS[options.what]
    sides = sides_of(options.what, options.model)
    pinned = (
        options.what,
        sides,
        sha256_file(options.wheel),
        sha256_file(options.baseline),
        {
            str(file.relative_to(options.model)): sha256_file(file)
            for file in sorted(options.model.rglob("*"))
            if file.is_file()
        },
        gpu("name"),
        (ANSWER, EQUAL, EQUAL_TOKENS, CALM_S, WATCHED_S, [*REQUESTS.items()], VARIABLES),
    )
    key, record = sha256_bytes(canonical(pinned)), options.output / f"{options.what}.jsonl"
    lines = read_lines(record, Round, "rounds of effects.py") if record.exists() else []
    rounds = [line for line in lines if line.key == key]
    while len(rounds) < options.rounds and time.monotonic() + expected < deadline:
        began = time.monotonic()
        rounds.append(Round(key, one_round(bench, measurement, sides, len(rounds))))
        append_line(record, rounds[-1])
        seconds = time.monotonic() - began
        expected = seconds - max(0.0, bench.start_s - WARM_START_S)
        console.note(f"round {len(rounds)}: {seconds:.0f} s")
    if not rounds:
        sys.exit("not measured: the budget is over before the first round")
    show([*effects_of(rounds, measurement.pairs)], options, len(rounds))


if __name__ == "__main__":
    main()
