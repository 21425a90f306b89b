"""
Measures what a warm pack saves: starts of one server, how much each still compiled and tuned, and whether answers and speed are the same.

    warm_pack.py --python ENV/bin/python --model DIR --output DIR [--flag=FLAG…] [--variable NAME=VALUE…] [--user NAME] [--packages DIR] [--throughput S --store DIR]
    warm_pack.py … --pack DIR

Three starts: cold; second, with the same caches; packed, from a pack of the first, with everything in another folder: the caches, the home, the
environment with the --packages that its .pth files name, and the model (hard links), and as the user NAME; if that compiles, once more with the last two in their places. Each start answers greedily, with the probabilities of all tokens, which are compared with those of the cold
one. For at most S seconds the rule of G8 then compares servers with the pack and with the caches of the cold start. With the folder of an earlier
run, of any machine, --pack makes the last start alone. What was measured is on the disk after each start (``warm_pack.json``). A start is
one measurement. On a CPU, for which vLLM compiles C++ and no Triton kernels, it shows that a pack moves, and not what it saves on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sparkwright.bench import vllm_bench
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.recipes import workloads
from sparkwright.bench.records import Side
from sparkwright.bench.server import server_log, warm_pack
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.core.console import console
from sparkwright.core.process import CACHES, cache_variables
from sparkwright.core.store import Store
from sparkwright.gates import throughput_run
from sparkwright.gates.core import policy
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput_run import ExperimentStart, MeasurementJournal, Runner, RunSpec

ROOT = Path(__file__).parents[2]
#: Parts of a start that are columns.
PARTS = ("engine's imports", "weights", "torch.compile", "first run", "CPU's warm-up", "tuning", "JIT warm-up", "graph capture", "engine")
#: How often the text of the prompt stands in each one, and how many tokens each position names.
LENGTHS, LOGPROBS = (1, 8, 24), 5
PROMPT, TOKENS = "The capital of France is", 32
#: Requests at a time, which end together, and seconds of load before the first measurement.
WORKLOAD, PREHEAT_S = "rehearsal", 10
PACK, RESULT, ANSWERS = "pack.tar.zst", "warm_pack.json", "answers.json"


class Answer(msgspec.Struct, frozen=True):
    """A greedy answer: its tokens, and of each token of the prompt and of it the most probable ones, as token and logarithm."""

    tokens: tuple[int, ...]
    logprobs: list[list[tuple[int, float]]]


def ask(server: Server) -> list[Answer]:
    """Return the answers of *server*."""
    client, answers = server.client(), list[Answer]()
    for length in LENGTHS:
        prompt = client.tokenize(PROMPT * length)
        completion = client.complete(
            prompt, max_tokens=TOKENS, logprobs=LOGPROBS, prompt_logprobs=LOGPROBS, ignore_eos=True
        )
        positions = (*completion.prompt_logprobs, *completion.logprobs)
        answers.append(Answer(completion.tokens, [sorted(position.items()) for position in positions]))
    return answers


def difference(own: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Return the largest difference of two logarithms of probabilities; infinite where a position names other tokens."""
    largest = 0.0
    for answer, other in zip(own, expected, strict=True):
        for position, there in zip(answer.logprobs, other.logprobs, strict=True):
            if [token for token, _ in position] != [token for token, _ in there]:
                return math.inf
            largest = max(largest, *(abs(a - b) for (_, a), (_, b) in zip(position, there, strict=True)))
    return largest


def unprofiled(_side: Side, _server: Server) -> tuple[Check, ...]:
    """Return no check of a kernel contract: both sides are one wheel."""
    return ()


class Bench:
    """The starts of one server; *folder* is for what they leave, and *earlier* has the pack and the answers of another run."""

    def __init__(self, plan: LaunchPlan, folder: Path, earlier: Path | None) -> None:
        self.plan, self.folder = plan, folder
        self.result: dict[str, Any] = {"starts": []}
        self.answers = list[Answer]()
        if earlier:
            self.answers = msgspec.json.decode((earlier / ANSWERS).read_bytes(), type=list[Answer])
            self.result["pack"] = msgspec.json.decode((earlier / RESULT).read_bytes())["pack"]

    def save(self) -> None:
        """Write what was measured so far."""
        text = msgspec.json.format(msgspec.json.encode(self.result))
        (self.folder / RESULT).write_bytes(text)

    def start(self, name: str, root: Path, plan: LaunchPlan) -> None:
        """Start the server of *plan* with the caches below *root*, and add a row."""
        plan = with_caches(plan, root)
        warm_pack.give(root, plan.user)
        log, began = self.folder / f"{name}.log", time.monotonic()
        with Server(plan, log) as server:
            seconds = time.monotonic() - began
            if server.failure:
                sys.exit(f"{name}: {server.failure}; see {log}")
            answers = ask(server)
        if not self.answers:
            self.answers = answers
            (self.folder / ANSWERS).write_bytes(msgspec.json.encode(answers))
        compiled, tuned = warm_pack.additions(root)
        row = {
            "start": name,
            "user": plan.user,
            "seconds": round(seconds, 1),
            "compiled": len(compiled),
            "tuned": len(tuned),
            # Of a cold start all are, and what a later one adds has to be explained.
            "first of them": [*compiled, *tuned][:20],
            "text equal": [answer.tokens for answer in answers] == [answer.tokens for answer in self.answers],
            "largest difference, nat": difference(answers, self.answers),
            "parts": server_log.read_start(log).parts(),
        }
        self.result["starts"].append(row)
        self.save()
        console.result(
            f"{name}: {seconds:.1f} s, {len(compiled)} compiled, {len(tuned)} tuned, text {'equal' if row['text equal'] else 'DIFFERS'}, "
            f"distributions {row['largest difference, nat']:.3g} nat apart"
        )

    def cold_and_second(self) -> None:
        """Start without caches, pack what that left, and start again."""
        cold, archive = self.folder / "cold", self.folder / PACK
        self.start("cold", cold, self.plan)
        began = time.monotonic()
        size, tables = warm_pack.collect(cold, archive)
        packing = round(time.monotonic() - began, 1)
        self.result["pack"] = {"bytes": archive.stat().st_size, "unpacked": size, "tables": tables, "packing_s": packing}
        for path in warm_pack.pack_files(cold):
            os.utime(path, (warm_pack.EPOCH, warm_pack.EPOCH))
        self.start("second", cold, self.plan)

    def packed(self, archive: Path, user: str, packages: Path | None) -> None:
        """
        Start from *archive*, as *user*, with everything in another folder. If that compiles, start with model and
        environment in their own folders, too, which tells whether the folders or the user matter.
        """
        elsewhere = self.folder / "elsewhere"
        environment = self.plan.python.absolute().parent.parent
        shutil.copytree(self.plan.model, elsewhere / "model", copy_function=os.link)
        shutil.copytree(environment, elsewhere / "environment", symlinks=True, copy_function=os.link)
        if packages:
            shutil.copytree(packages, elsewhere / "packages", symlinks=True, copy_function=os.link)
            for path in (elsewhere / "environment").glob("lib/*/site-packages/*.pth"):
                text = path.read_text("utf-8").replace(str(packages), str(elsewhere / "packages"))
                path.unlink()  # the other name of the file stays as it is
                path.write_text(text, "utf-8")
        moved = replace(self.plan, model=elsewhere / "model", python=elsewhere / "environment" / "bin" / "python")
        for name, plan in (("packed", moved), ("user", self.plan)):
            root = self.folder / name
            warm_pack.unpack(archive, self.result["pack"]["unpacked"], root / CACHES)
            self.start(name, root, replace(plan, user=user))
            if not self.result["starts"][-1]["compiled"]:
                break

    def throughput(self, seconds: float, store: Store) -> None:
        """Compare servers with the pack and servers with the caches of the cold start by the rule of G8."""
        policies = policy.load(ROOT)
        generator = vllm_bench.obtain(ROOT, policies.throughput.generator, store, offline=True)
        machine = MachineMonitor(policies.machine, store, python=self.plan.python)
        spec = RunSpec(
            workloads.load(ROOT).cells(WORKLOAD), generator, machine, policies.throughput, unprofiled,
            tokenizer=self.plan.model, resident=True, deadline=time.monotonic() + seconds,
        )  # fmt: skip
        begun = ExperimentStart(time.time_ns() % 2**31, time.time())
        journal = MeasurementJournal(self.folder / "throughput.jsonl", begun)
        runner = Runner(spec, self.servers, journal)
        if hindrances := machine.settle(PREHEAT_S):
            runner.stopped = "invalid", hindrances[0]
        else:
            runner.run()
        series, decision = runner.series, runner.decision
        cells = throughput_run.cell_results(spec.cells, journal.measurements, runner.blocks, series, decision)
        self.result["throughput"] = {"cells": cells, "decision": decision, "stopped": runner.stopped}
        self.save()
        shown = decision.message if decision else "no block is complete"
        console.result(f"throughput, pack against none: {decision and decision.state}, {shown}; {runner.stopped or ''}")

    @contextlib.contextmanager
    def servers(self, sides: Sequence[Side]) -> Iterator[dict[Side, Server]]:
        """Start a server for each of *sides*, the candidate's with the pack, and end it with the block."""
        with contextlib.ExitStack() as stack:
            servers = dict[Side, Server]()
            for side in sides:
                plan = with_caches(self.plan, self.folder / ("packed" if side == "candidate" else "cold"))
                servers[side] = Server(plan, self.folder / f"throughput-{side}.log")
                stack.callback(servers[side].stop)
            for server in servers.values():
                stack.enter_context(server)
            yield servers


def with_caches(plan: LaunchPlan, root: Path) -> LaunchPlan:
    """Return *plan* with the caches and the home below *root*."""
    home = root / "home"
    home.mkdir(parents=True, exist_ok=True)
    return replace(plan, variables={**plan.variables, **cache_variables(root), "HOME": str(home)})


def main() -> None:
    """Run the bench, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--flag", action="append", default=[])
    parser.add_argument("--variable", action="append", default=[])
    parser.add_argument("--user", default="")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--throughput", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--store", type=Path, help="store with the load generator")
    arguments = parser.parse_args()
    variables = dict(each.split("=", 1) for each in arguments.variable)
    folder = arguments.output.absolute()
    folder.mkdir(parents=True)
    plan = LaunchPlan(arguments.python.absolute(), arguments.model.absolute(), tuple(arguments.flag), variables, "bench")
    bench = Bench(plan, folder, arguments.pack)
    if not arguments.pack:
        bench.cold_and_second()
    bench.packed((arguments.pack or folder) / PACK, arguments.user, arguments.packages)
    if arguments.throughput and not arguments.pack:
        bench.throughput(arguments.throughput, Store(arguments.store))
    rows = []
    for row in bench.result["starts"]:
        seconds = {part.name: part.seconds for part in row["parts"]}
        shown = (f"{seconds[name]:.1f}" if seconds.get(name) is not None else "" for name in PARTS)
        rows.append((row["start"], f"{row['seconds']:.1f}", *shown, str(row["compiled"]), str(row["tuned"])))
    columns = ("start", ">seconds", *(f">{name}" for name in PARTS), ">compiled", ">tuned")
    console.table("Starts", columns, rows, result=True)
    pack = bench.result["pack"]
    console.result(f"pack: {pack['bytes'] / 1e6:.1f} MB of {pack['unpacked'] / 1e6:.1f}, {pack['tables']} tables, {pack['packing_s']:.0f} s to pack")


if __name__ == "__main__":
    main()
