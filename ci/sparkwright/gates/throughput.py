"""
Decide whether the candidate is as fast as the baseline, with known error rates (G8).

The verdict is that of the deciding series together; each series, the measurements, the kernel
contract and the flags are rows of their own.
"""

import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from sparkwright.bench import vllm_bench
from sparkwright.bench.machine import monitor
from sparkwright.bench.model import checkpoint, modules
from sparkwright.bench.recipes import preflight, recipe as recipes, workloads
from sparkwright.bench.records import METRICS, Reason, Side
from sparkwright.bench.results import CellResult, Measurement, Result, Series, Subject
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.bench.statistics import evidence_path
from sparkwright.cherry_picks import effects
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import is_ours
from sparkwright.gates import contract, throughput_run
from sparkwright.gates.core import ladder
from sparkwright.gates.core.policy import GatePolicies
from sparkwright.gates.core.server_under_test import (
    GateOptions,
    Pace,
    launch_plan,
)
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    decided,
    declare,
    invalid,
    not_run,
    passed,
)

#: A cache that has seen a prompt makes its time to first token vanish (vllm #54227).
MEASURED_FLAGS = ("--no-enable-prefix-caching",)


def subject_of(python: Path, wheel: Path | None, stack: str) -> Subject:
    """
    Return the wheel, or the version of vLLM, that the environment of *python* serves.

    Args:
        wheel: The wheel that vLLM was installed from, if that is known.
        stack: Of the wheel, if it is ours.

    Raises:
        environment-unusable: There is no vLLM.
    """
    version = wheel_identity.version(python)
    ours = is_ours(version)
    name, sha256 = (wheel.name, sha256_file(wheel)) if wheel else ("", "")
    return Subject(
        f"{'' if ours else 'stock '}vLLM {version}", name, sha256, version, stack if ours else ""
    )


class Experiment:
    """
    An experiment, measured once by `result`.

    Args:
        options: The environments, how the model is served in them, and what is measured.
        recipe: How both sides are served.
        generator: The load generator; the pinned vllm-rs if none is given.

    Attributes:
        digest: The sha256 of all policies that it is judged by.

    Raises:
        file-invalid: A policy is not valid.
        UsageError: There is no such workload or user, or a file of prompts is missing or not used.
        environment-unusable, recipe-unfit, variable-refused: An environment cannot serve.
    """

    def __init__(
        self,
        context: RunContext,
        options: GateOptions,
        policies: GatePolicies,
        recipe: recipes.Recipe,
        generator: vllm_bench.LoadGenerator | None = None,
    ) -> None:
        self._context, self._options, self._generator = context, options, generator
        self._policies, self._recipe = policies, recipe
        #: Of the first launch of each side, as `contract.time_shares`.
        self._classes = dict[Side, dict[str, dict[str, float]]]()
        self._logs = context.store.folder("logs", "throughput")
        self._profiles = self._logs / "profiles"
        names = options.workload or (policies.throughput.workloads,)
        named = workloads.load(context.project.root).cells(*names)
        self.cells = workloads.deciding(named, recipe.decides, recipe.plan.max_num_seqs)
        # No draft of random tokens is accepted.
        if not (recipe.speculation and options.texts):
            workloads.check_texts(self.cells, options.texts)
        self.digest = policies.throughput_digest(self.cells, recipe)
        self._plans, self._subjects = dict[Side, LaunchPlan](), dict[Side, Subject]()
        self._plan_side("candidate", options.python, options.wheel)
        self._plan_side("baseline", options.baseline_python, options.baseline)
        self._plans["control"] = self._plans["baseline"]
        self._subjects["control"] = self._subjects["baseline"]

    def _plan_side(self, side: Side, python: Path | None, wheel: Path | None) -> None:
        """Plan the launches of *side*, and set its identity."""
        options, served = self._options, self._options
        assert python
        if options.original and side == "baseline":
            # Under one name, as both are asked alike.
            name = self._plans["candidate"].name
            served = replace(options, serve=options.original, model=name)
        plan = launch_plan(served, self._recipe, python, MEASURED_FLAGS, gated=True)
        subject = subject_of(python, wheel, self._context.project.stack)
        self._subjects[side] = replace(subject, flags=plan.flags, variables=plan.variables)
        # The profiler is there on both sides, and idle while anything is measured.
        flags = (*plan.flags, *contract.profiler_flags(self._profiles))
        self._plans[side] = replace(plan, flags=flags)

    def result(self, seconds: float = math.inf) -> Result:
        """
        Measure, and return the result; an interrupted journal of the same experiment is continued.

        Args:
            seconds: The limit; no block begins that would end later.

        Raises:
            offline, source-unreachable: The load generator is not in the store.
            SparkwrightError: Something cannot be set up: a full disk, a checkpoint of another
                recipe, another measurement at the same time.
        """
        options, store, recipe = self._options, self._context.store, self._recipe
        policy = self._policies.throughput
        deadline, model = time.monotonic() + seconds, options.serve
        assert model
        generator = self._generator or vllm_bench.obtain(
            self._context.project.root, policy.generator, store, offline=self._context.offline
        )
        preflight.check(recipe, self.cells, model)
        resident, texts = preflight.both_fit(recipe, options.original or model), dict[str, Path]()
        for cell in self.cells:
            if (cell.texts or recipe.speculation) and options.texts:
                texts[cell.name] = options.texts
            elif recipe.speculation:
                config = modules.text_config(checkpoint.read(model).config)
                vocabulary = modules.number(config, "vocab_size") or vllm_bench.LARGE_VOCABULARY
                texts[cell.name] = vllm_bench.own_prompts(store, cell.prompt, vocabulary)
        # Two measurements at a time would measure each other.
        with store.lock("measuring", wait=False):
            machine = monitor.MachineMonitor(self._policies.machine, store, python=options.python)
            for side, plan in self._plans.items():
                megabytes = max(plan.kept_free, machine.policy.floor)
                self._plans[side] = replace(plan, kept_free=megabytes)
            spec = throughput_run.RunSpec(
                self.cells,
                generator,
                machine,
                policy,
                self._contract,
                tokenizer=model,
                texts=texts,
                resident=resident,
                deadline=deadline,
            )
            host = {**ladder.host_facts(), **machine.firmware()}
            journal = self._journal(
                resident,
                checkpoint.model_digest(model),
                options.original and checkpoint.model_digest(options.original),
                host,
                generator.name,
                sorted(set(map(sha256_file, texts.values()))),
            )
            runner = throughput_run.Runner(spec, self._servers, journal)
            preheat = self._policies.machine.preheat if options.preheat is None else options.preheat
            if hindrances := machine.settle(preheat):
                runner.stopped = "invalid", hindrances[0]
            else:
                runner.run()
            result = self._result(journal, runner, host, generator.name)
            # A run that the machine spoiled, or that had too little time, continues where it was.
            passing = (*monitor.REASONS, monitor.UNSTEADY, ladder.BUDGET_SPENT)
            if not (result.stopped and result.stopped.reference in passing):
                journal.end()
        return result

    def _journal(self, *conditions: object) -> throughput_run.MeasurementJournal:
        """
        Open the journal of this experiment, which is continued if it was interrupted.

        With other wheels, flags, workloads, policies or *conditions* it is another experiment.
        """
        options, about = self._options, (self.digest, self._subjects, conditions)
        path = self._logs / f"gate-{sha256_bytes(canonical(about))[:16]}.jsonl"
        wheel = self._subjects["candidate"].sha256
        number = ladder.attempts(self._context.output, wheel, "G8", options.recipe)
        journal = throughput_run.MeasurementJournal(
            path,
            throughput_run.ExperimentStart(time.time_ns() % 2**31, time.time(), max(1, number)),
        )
        if journal.launches:
            console.note(f"continuing after {len(journal.launches)} launches; without {path}, anew")
        return journal

    @contextlib.contextmanager
    def _servers(self, sides: Sequence[Side]) -> Iterator[dict[Side, Server]]:
        """Start a server for each of *sides* and end it with the block."""
        with contextlib.ExitStack() as stack:
            servers = dict[Side, Server]()
            # All processes are started before the first is waited for.
            for side in sides:
                servers[side] = Server(self._plans[side], self._logs / f"{side}.log")
                stack.callback(servers[side].stop)
            for server in servers.values():
                stack.enter_context(server)
            yield servers

    def _contract(self, side: Side, server: Server) -> tuple[Check, ...]:
        """Profile *server*, and return the checks of the kernel contract of its recipe."""
        policy, recipe = self._policies.contract, self._recipe
        version = self._subjects[side].version
        trace = contract.profile(policy, recipe, server, self._profiles)
        checks = contract.check_contract(policy, recipe.contract_for(version), server.log, trace)
        if not isinstance(trace, Check):
            kernels = contract.classify(trace, policy.kernels)
            classes = contract.time_shares(kernels, "label")
            earlier = self._classes.setdefault(side, classes)
            checks = (*checks, contract.same_launches(policy, earlier, classes))
        for path in self._profiles.rglob("*.json*"):  # some tens of megabytes for each launch
            path.unlink()
        return checks

    def _result(
        self,
        journal: throughput_run.MeasurementJournal,
        runner: throughput_run.Runner,
        host: dict[str, str],
        generator: str,
    ) -> Result:
        options, begun, decision = self._options, journal.begun, runner.decision
        assert options.serve
        cells = throughput_run.cell_results(
            self.cells, journal.measurements, runner.blocks, runner.series, decision
        )
        stopped: Reason | None = None
        state: State = (decision and decision.state) or "inconclusive"
        says = decision.message if decision else "no block is complete"
        if runner.stopped:
            state, stopped = runner.stopped
            says = f"{stopped.message} ({stopped.reference})"
        return Result(
            state,
            says,
            self._subjects["candidate"],
            cells,
            tuple(runner.measurements),
            baseline=self._subjects["baseline"],
            stopped=stopped,
            recipe=options.recipe,
            model=options.serve.name,
            added=(*options.flag, *(f"{name}={value}" for name, value in options.variable)),
            host=host,
            margin=max((each.bounds.margin for each in runner.series), default=0.0),
            alpha=runner.rule.alpha,
            attempt=begun.attempt,
            generator=generator,
            began=begun.at,
        )


CHECKS = (
    *declare(*(f"{metric}-*" for metric in METRICS), "effect-*", "legs", "contract", measured=True),
    *declare("flags", "candidate-wheel", "baseline-wheel"),
    *declare("measured", role="reports"),
)

#: Of those of G3: why a server of ours ended, and how a launch breaks the kernel contract.
_OF_LAUNCH = (
    "server-died", "server-late", "graph-memory-negative", "log-unreadable",
    "backend-refused", "emulation",
    "kernel-unseen", "kernel-forbidden", "profile-missing", "profile-unreadable",
)  # fmt: skip

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **{name: contract.REASONS[name] for name in _OF_LAUNCH},
    **vllm_bench.REASONS,
    **monitor.REASONS,
    **throughput_run.REASONS,
    throughput_run.CRASHED: "The candidate's server ended during the gate. Look at its log: the "
    "wheel fails.",
    monitor.UNSTEADY: (
        "The machine's state spoiled a measurement repeatedly. Look at "
        "temperature, power and other load, and run again; it continues where "
        "it was."
    ),
    "slower": (
        "The candidate is slower than tolerated. A wheel that is not slower fails with "
        "a probability of at most alpha."
    ),
    "undecided": (
        "Neither bound is shown: the machine's noise is too large for these blocks, or the "
        "true difference lies between the bounds."
    ),
    "no-effect": "A change promises a gain in cherry_picks/effects.yaml that this wheel does not "
    "have over the stock wheel. Look whether it is still in use; drop it, or correct the promise.",
    "effect-unmeasured": "No cell that was measured has the concurrency and the figure of a "
    "promise in cherry_picks/effects.yaml. Name a --workload that has, or correct the promise.",
    "flags-added": (
        "Both servers had flags or variables beside the recipe's. Leave out "
        "--flag and --variable, or write them into the recipe."
    ),
}

#: Blocks in which a cell of an equal wheel is measured on a typical machine, without the A/A block
#: [measured by ci/bench/gate_simulation.py]; seconds around a load [measured
#: with a probe before and after each: docs/rehearsal].
USUAL_BLOCKS, AROUND_S = 5, 8.0

_UNSAFE = re.compile(r"[^a-z0-9]+")
_UNSAFE_IN_FILE = re.compile(r"[^A-Za-z0-9._+-]+")


def estimate(
    policy: throughput_run.ThroughputPolicy,
    pace: Pace,
    cells: Sequence[workloads.WorkloadCell],
    *,
    resident: bool = True,
) -> float:
    """
    Return the seconds that the gate takes for an equal wheel, whose loads need the fewest requests.

    Args:
        cells: Those that decide.
        resident: Whether both servers stay; else each turn has a start of its own.
    """
    turn_s = 0.0
    for cell in cells:
        rounds = policy.requests(cell) / cell.concurrency
        loaded = rounds * pace.round(cell.prompt, cell.answer, cell.concurrency)
        turn_s += policy.warmups * pace.round(cell.prompt, cell.answer) + loaded + AROUND_S
    blocks, starts = 1 + USUAL_BLOCKS, (1 if resident else 4) * pace.start_s
    return blocks * (starts + 4 * turn_s * (1 + policy.lag / 2))


def write_result(store: Store, output: Path, result: Result) -> Path:
    """Write *result* to a file of its wheel and recipe in the folder *output*."""
    wheel = result.candidate.wheel.removesuffix(".whl")
    return write_record(store, output, f"{wheel}.{result.recipe}.throughput", result)


def write_record(store: Store, output: Path, name: str, record: Any) -> Path:
    """Write *record* as JSON to a file of that *name* in the folder *output*."""
    safe = _UNSAFE_IN_FILE.sub("-", name).strip("-.")
    data = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path = store.write(output / f"{safe}.json", data + b"\n")
    console.note(f"result: {path}")
    return path


def checks(result: Result) -> tuple[Check, ...]:
    """Return the checks of a gate's *result*."""
    counted, rows = [leg for leg in result.legs if leg.counts], list[Check]()
    # Why the run was given up, if it was.
    if result.stopped:
        state: State = result.state if result.state in ("fail", "not-run") else "invalid"
        stopped: dict[State, str] = {state: result.stopped.reference}
        rows.append(decided("measured", result.stopped.message, state, stopped))
    for cell in result.cells:
        for series in cell.series:
            if series.primary:
                rows.append(_row(cell, series, result))
    return (*rows, _measurements(result, counted), *_served(result, counted))


def _row(cell: CellResult, series: Series, result: Result) -> Check:
    """Return the check of a deciding series."""
    title, unit, factor, _ = METRICS[series.metric]
    name = f"{series.metric}-{_UNSAFE.sub('-', cell.name.lower()).strip('-')}"
    blocks = len(series.differences)
    if series.baseline is None or series.candidate is None or not blocks:
        return not_run(name, f"{cell.name}: no complete block", "undecided")
    change = 100 * (series.candidate / series.baseline - 1)
    count = sum(series.primary for other in result.cells for series in other.series)
    figures = [
        Figure("baseline", series.baseline * factor, unit, blocks),
        Figure("candidate", series.candidate * factor, unit, blocks),
        Figure("change", change, "%", blocks, bound=100 * series.margin),
        Figure("evidence for pass", (1.0, *series.pass_evidence)[-1], bound=1 / result.alpha),
        Figure("evidence for fail", (1.0, *series.fail_evidence)[-1], bound=count / result.alpha),
    ]
    message = f"{title} {change:+.1f} % in {blocks} blocks: {series.conclusion}"
    samples = [
        Sample(f"block {block}", "", f"{100 * math.expm1(value):+.2f} %")
        for block, value in enumerate(series.differences)
    ]
    open_state: State = "not-run" if result.state == "not-run" else "inconclusive"
    state = series.state if series.state in ("pass", "fail") else open_state
    reasons: dict[State, str] = {
        "fail": "slower", "inconclusive": "undecided", "not-run": ladder.BUDGET_SPENT,
    }  # fmt: skip
    return decided(name, message, state, reasons, figures, samples)


def effect_checks(
    result: Result, root: Path, own: Mapping[str, effects.PromisedEffect] | None = None
) -> Iterator[Check]:
    """
    Yield whether the gate of *result* shows the gains that changes of its stack promise for its
    recipe, in the checkout *root*, and those that its *own* subject promises.

    It fails where less than the promise is shown, at the error rate of the gate, which all promises
    share. A gain that is neither shown nor excluded, or was not measured, decides nothing.
    """
    promises = {**effects.promises(root, result.candidate.stack, result.recipe), **(own or {})}
    promised = list[tuple[str, effects.PromisedEffect, CellResult, Series]]()
    for name, promise in promises.items():
        before = len(promised)
        for cell in result.cells:
            for series in cell.series:
                measured = cell.concurrency, series.metric
                if measured == (promise.concurrency, promise.metric) and series.differences:
                    promised.append((name, promise, cell, series))
        if len(promised) == before:
            message = "the concurrency or the figure of its promise was not measured"
            yield not_run(f"effect-{name}", message, "effect-unmeasured", required=False)
    for name, promise, cell, series in promised:
        gains, least = -np.array(series.differences), -math.log(result.alpha / len(promised))
        excluded = evidence_path(math.log(promise.gain) - gains)[-1] >= least
        shown = evidence_path(gains)[-1] >= least
        state: State = "fail" if excluded else "pass" if shown else "inconclusive"
        factor = math.exp(gains.mean())
        yield decided(
            f"effect-{name}-{_UNSAFE.sub('-', cell.name.lower()).strip('-')}",
            f"{cell.name}: {METRICS[series.metric][0]} is {factor:.3f} times as good as the "
            f"stock wheel's in {len(gains)} blocks; {name} promises {promise.gain:g}",
            state,
            {"fail": "no-effect", "inconclusive": "undecided"},
            [Figure("gain", factor, "", len(gains), bound=promise.gain)],
            required=bool(excluded),
        )


def _measurements(result: Result, counted: Sequence[Measurement]) -> Check:
    again, samples = [leg for leg in result.legs if leg.discarded], list[Sample]()
    for leg in again:
        for reason in leg.reasons:
            case = f"{leg.cell}, {leg.side}, block {leg.block}"
            samples.append(Sample(case, "", reason.message))
    figures = [
        Figure("measurements", len(counted)),
        Figure("measured again", len(again)),
        Figure("launches", len({leg.launch for leg in result.legs})),
        Figure("gates of this wheel and recipe", result.attempt),
        Figure("error rate", 100 * result.alpha, "%"),
    ]
    if not counted:
        return not_run("legs", "no measurement counts", "undecided")
    message = (
        f"{len(counted)} measurements count, {len(again)} were repeated; {result.generator}; gate "
        f"number {result.attempt} of this wheel and recipe, which spends an error rate of "
        f"{100 * result.alpha:.2g} %"
    )
    return passed("legs", message, figures=figures, samples=samples)


def _settings(subject: Subject) -> set[str]:
    """Return the flags and the variables with which *subject* was served."""
    return {*subject.flags, *map("=".join, subject.variables.items())}


def _served(result: Result, counted: Sequence[Measurement]) -> Iterator[Check]:
    """Yield whether both sides were served by the recipe: its flags, and its kernel contract."""
    if result.added:
        yield invalid("flags", f"both sides had {' '.join(result.added)} besides", "flags-added")
    else:
        ours = _settings(result.candidate)
        theirs = _settings(result.baseline or result.candidate)
        own = f"; ours alone {sorted(ours - theirs)}, the stock wheel alone {sorted(theirs - ours)}"
        message = f"both sides had the flags and variables of {result.recipe}"
        yield passed("flags", message + own * (ours != theirs))
    launches = {leg.launch for leg in counted if leg.side == "candidate"}
    if result.stopped or not launches:
        yield not_run("contract", "not every launch was profiled", "profile-missing")
        return
    yield passed(
        "contract",
        f"the candidate's kernels keep the contract of {result.recipe} in each launch",
        figures=[Figure("launches", len(launches))],
    )
