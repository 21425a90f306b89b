"""
Verdicts about the wheels of `tests.support.wheels`: ladders whose gates all pass, or are worse in a way that a test names, and the measurement
behind G8.

    made = verdicts.ladder(path)                                  # everything that ci/release.yaml asks for
    verdicts.ladder(path, worse={"G4": "inconclusive"}, without=["G7"])
    verdicts.write(path, made); verdicts.write_result(path, verdicts.result(path, slower=0.05))

The checks are those that the gates declare, in the names that the repository's recipes, tasks and converters give them: the release policy
has no say in them.
"""

import functools
import hashlib
import itertools
import math
import random
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from msgspec.structs import replace
from tests.support import wheels

from sparkwright.audit import report, wheel
from sparkwright.bench.machine.monitor import Snapshot
from sparkwright.bench.recipes import recipe as recipes, workloads
from sparkwright.bench.results import CONTROL_BLOCK, Measurement, Result, Subject
from sparkwright.bench.statistics import DecisionRule, attempt_alpha, decide
from sparkwright.bench.vllm_bench import LoadResult, Request
from sparkwright.core import files, states, strict_yaml
from sparkwright.gates import (
    accuracy as tasks,
    core,
    numerics,
    text_checks,
    throughput,
    throughput_run,
)
from sparkwright.gates.core import ladder as ladders, policy as gate_policy
from sparkwright.gates.core.verdict import (
    Attempt,
    Check,
    Figure,
    Ladder,
    Sample,
    Verdict,
    passed,
)
from sparkwright.release import policy as release_policies, wheel_facts

#: What a machine tells of itself; the architecture is the wheel's.
HOST = {
    "gpu": "NVIDIA GB10 (SM 12.1)",
    "driver": "580.95.05",
    "processor": "Cortex-X925",
    "cores": "20",
    "memory": "128.0 GB",
    "kernel": "6.14",
}
#: 2026-11-22 00:00 UTC.
BEGAN = 1_795_305_600.0
#: Of the measurements of G8.
NOISE, BLOCKS, GENERATOR = 0.001, 4, "vllm-rs 0.33.0"
#: The recipe and the task by which the made-up ladders are climbed, and a library of their wheels.
RECIPE, TASK = "qwen3.6-35b-a3b-nvfp4-mtp3", core.server_under_test.GateOptions().task
#: One of each group that the repository's policy asks for.
RECIPES = ("qwen3-30b-a3b-nvfp4", RECIPE)


@functools.cache
def release_policy() -> release_policies.ReleasePolicy:
    """Return the repository's own release policy, with one recipe in place of its groups, which `ladder` climbs."""
    loaded = release_policies.load(wheels.ROOT)
    return replace(loaded, file=replace(loaded.file, recipes=dict.fromkeys(("fp4-moe", "speculative"), (RECIPE,))))


def ladder(
    path: Path, *, companions: Sequence[Path] = (), worse: Mapping[str, states.State] | None = None, without: Collection[str] = (),
    sha256: str = "", recipes: Sequence[str] = (RECIPE,),
) -> Ladder:  # fmt: skip
    """
    Return verdicts about the wheel at *path*, with every gate that its fork needs.

    Args:
        companions: Wheels of ours that are installed beside it.
        worse: Gate → the state of its first check. *without*: gates that nobody climbed.
        sha256: Of another wheel, which they are about instead.
        recipes: Those that were served.
    """
    about = wheel.read_subject(path)
    machine = next((one for one in ("aarch64", "x86_64") if about.platforms[0].endswith(one)), "aarch64")
    beside = {f"content {one.wheel.project}": one.wheel.content for one in wheel_facts.read_all(companions)}
    facts = {**HOST, "architecture": machine, **beside}
    subject = replace(about, sha256=sha256 or about.sha256)
    gates = ladders.GATES if about.name == "vllm" else ("G0",)
    made = []
    for name in (one for one in gates if one not in without):
        checks = list(_checks(path, name))
        if state := (worse or {}).get(name):
            checks[0] = Check(checks[0].name, state, "made up for a test", "made-up")
        served = (RECIPE,) if name == "G8" else recipes
        for recipe in served if name in ladders.SERVED else ("",):
            judged = release_policy().expected_digest(name, wheels.STACK, recipe) or wheels.hexed("policy", name)
            measured = evidence(path) if name == "G8" else ""
            made.append(Verdict(name, ladders.GATES[name], subject.sha256, judged, tuple(checks), recipe, 1, measured, dict(facts), BEGAN, 60.0))
    return Ladder(wheels.STACK, subject, tuple(made))


def evidence(path: Path) -> str:
    """Return the sha256 of the file that `write_result` writes of the default result."""
    return hashlib.sha256(msgspec.json.encode(result(path))).hexdigest()


def _checks(path: Path, gate: str) -> Iterator[Check]:
    if gate == "G8":
        yield from throughput.checks(result(path))
        yield passed("candidate-wheel", "the environment holds every file of the wheel")
        yield passed("baseline-wheel", "the environment holds every file of the baseline")
        return
    for one in gate_policy.declared(gate):
        figures = [Figure("mismatches", 0, bound=0)] if one.measured else ()
        samples = [Sample("bf16 0x3e80", "0.25", "0.25")] if one.measured else ()
        for name in names(gate, one.name) if one.role != "reports" else ():
            yield passed(name, "as it should be", figures=figures, samples=samples)


def names(gate: str, pattern: str) -> tuple[str, ...]:
    """Return the names that the repository's recipes, tasks, converters and a wheel of vLLM give to the declared *pattern* of *gate*."""
    if "*" not in pattern:
        return (pattern,)
    literal = {one.name for one in gate_policy.declared(gate)}
    return tuple(name for name in _given(gate) if fnmatchcase(name, pattern) and name not in literal)


@functools.cache
def _given(gate: str) -> tuple[str, ...]:
    if gate == "G1":
        # Without any tree the gate itself still names every check that it would make of them.
        rules = strict_yaml.load(wheels.ROOT / "ci" / "gates" / "numerics.yaml", numerics.NumericsPolicy)
        with tempfile.TemporaryDirectory() as scratch:
            return tuple(one.name for one in numerics.run({}, rules, (), Path(scratch)))
    if gate == "G3":
        contract = recipes.load(wheels.ROOT, RECIPE).contract
        kernels = (*contract.serves, "unknown", "helpers")
        return tuple(f"kernels-{kind}" for kind in kernels)
    if gate == "G4":
        rules_of_g4 = strict_yaml.load(wheels.ROOT / "ci" / "gates" / "generation.yaml", text_checks.GenerationPolicy)
        return tuple(f"context-{length}" for length in rules_of_g4.profiles["default"].context)
    if gate == "G6":
        return tuple(f"{TASK}-{part}" for part in tasks.PARTS)
    stock = report.AuditedWheel("vllm-0.33.0-cp38-abi3-linux_aarch64.whl", wheels.hexed("stock"), 1, "vllm", "0.33.0", ("linux_aarch64",))
    if gate != "G8":
        return ()
    rated = [one.name for one in throughput.checks(_result(stock, 0.0, ()))]
    loaded = [recipes.load(wheels.ROOT, name) for name in recipes.files(wheels.ROOT)]
    decided = [(cell, metric) for recipe in loaded for cell, metrics in recipe.decides.items() for metric in metrics]
    return (*rated, *sorted({metric + "-" + throughput._UNSAFE.sub("-", cell.lower()).strip("-") for cell, metric in decided}))


def result(path: Path, *, slower: float = 0.0, cells: tuple[workloads.WorkloadCell, ...] = ()) -> Result:
    """
    Return what a throughput gate measures of the wheel at *path* against the stock wheel.

    Args:
        slower: By how much, as a part of 1.
    """
    return _result(wheel.read_subject(path), slower, cells)


def _legs(cells: Sequence[workloads.WorkloadCell], slower: float) -> Iterator[Measurement]:
    chance, at = random.Random(7), BEGAN
    for block, cell in itertools.product((CONTROL_BLOCK, *range(BLOCKS)), cells):
        for position, side in enumerate(throughput_run.sides(1, block)):
            at += 31.5
            factor = (1 + 0.07 * float(cell.concurrency - 1) ** 0.85) * math.exp(chance.gauss(0, NOISE))
            factor *= 1 + slower * (side == "candidate")
            tpot, ttft = 0.024 * factor, (0.2 + cell.prompt / 4200) * factor
            latency = ttft + tpot * (cell.answer - 1)
            # A closed loop of three rounds.
            requests = [
                Request(0.9 * latency * turn + 0.01 * user, ttft, latency, cell.prompt, cell.answer)
                for turn in range(3) for user in range(cell.concurrency)
            ]  # fmt: skip
            run = LoadResult(GENERATOR, 3 * latency, tuple(requests), tpot, 1.1 * tpot)
            shot = Snapshot(0.001, temperature=60 + 5 * chance.random())
            yield Measurement(cell.name, block, 4 * block + position, side, position, 0, at, run, shot, shot, 1.6)


@functools.lru_cache
def _result(about: report.AuditedWheel, slower: float, cells: tuple[workloads.WorkloadCell, ...]) -> Result:
    policy = gate_policy.load(wheels.ROOT).throughput
    cells = cells or tuple(cell for cell in workloads.load(wheels.ROOT).cells(policy.workloads) if cell.primary)
    upstream, legs = about.version.partition("+")[0], tuple(_legs(cells, slower))
    series = throughput_run.metric_series(cells, legs, range(BLOCKS), policy)
    rule = DecisionRule(attempt_alpha(policy.alpha, 1), policy.min_blocks, policy.max_blocks)
    decision = decide(rule, series)
    return Result(
        decision.state or "inconclusive", decision.message, Subject(f"vLLM {about.version}", about.file, about.sha256, about.version, wheels.STACK),
        throughput_run.cell_results(cells, legs, range(BLOCKS), series, decision), legs,
        baseline=Subject(f"stock vLLM {upstream}", f"vllm-{upstream}-cp38-abi3-linux_aarch64.whl", wheels.hexed("base", upstream), upstream),
        recipe=RECIPE, model="Qwen3-30B-A3B-NVFP4", host=HOST, alpha=rule.alpha, margin=max(entry.bounds.margin for entry in series),
        generator=GENERATOR, began=BEGAN,
    )  # fmt: skip


def logged(made: Ladder) -> Ladder:
    """Return *made* with the attempts of its verdicts, as `sparkwright gate` logs them one after the other."""
    lines: list[Attempt] = []
    for verdict in (one for one in made.verdicts if one.measured):
        # Each gate begins when the one before it has ended.
        began = Attempt(verdict.attempt, verdict.wheel, verdict.gate, verdict.recipe, verdict.began, after=digest(lines))
        lines.append(began)
        lines.append(replace(began, state=verdict.state, verdict=ladders.verdict_digest(verdict), after=digest(lines)))
    return replace(made, attempts=tuple(lines))


def digest(lines: Sequence[Attempt]) -> str:
    """Return the sha256 of the last of *lines*; empty without any."""
    return hashlib.sha256(files.canonical(lines[-1])).hexdigest() if lines else ""


def write(path: Path, made: Ladder) -> Path:
    """Write *made* and its attempts beside the wheel at *path*, as `sparkwright gate` does, and return the file."""
    place = path.parent / f"{path.name.removesuffix('.whl')}.verdicts.json"
    made = made if made.attempts else logged(made)
    place.with_name(place.name.replace(".verdicts.json", ".attempts.jsonl")).write_bytes(msgspec.json.Encoder().encode_lines(made.attempts))
    place.write_bytes(msgspec.json.format(msgspec.json.encode(ladders.document(made)), indent=1) + b"\n")
    return place


def write_result(path: Path, made: Result) -> Path:
    """Write *made* beside the wheel at *path*, as `sparkwright gate` does, and return the file."""
    place = path.parent / f"{path.name.removesuffix('.whl')}.throughput.json"
    place.write_bytes(msgspec.json.encode(made))
    return place
