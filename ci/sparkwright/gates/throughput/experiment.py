"""
From the specification of an experiment to its result: the load generator is checked, the machine
heated and looked at, the servers measured, and the result and the A/A blocks stored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.load.load_generator_check import GeneratorPolicy, check_generator
from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator
from sparkwright.bench.machine import state_checks
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.machine.state_checks import MachinePolicy
from sparkwright.bench.recipes import preflight, workloads
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import GATED, LaunchPlan
from sparkwright.bench.statistics.eprocess import DecisionRule, attempt_alpha
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import canonical, content_key, sha256_bytes, sha256_file
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract.gate import ObservedServer
from sparkwright.gates.contract.policy import ContractPolicy
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.ladder import machine_facts
from sparkwright.gates.core.verdict import State
from sparkwright.gates.throughput import journal as journals
from sparkwright.gates.throughput import paired_differences, runner
from sparkwright.gates.throughput.journal import Begun, Ended, Journal
from sparkwright.gates.throughput.measurement import (
    BROKEN,
    CRASHED,
    MeasurementContext,
    decode_traffic,
)
from sparkwright.gates.throughput.records import (
    CONTROL_BLOCK,
    CellResult,
    Kind,
    Result,
    Subject,
    ThroughputPolicy,
)
from sparkwright.gates.throughput.runner import Runner, RunOutcome, RunSpec, ServerMode
from sparkwright.gates.throughput.server_pair import ServerPair

#: A cache that has seen a prompt makes its time to first token vanish (vllm #54227).
MEASURED_FLAGS = ("--no-enable-prefix-caching",)
#: Seconds within which a server answers with its counters.
COUNTERS_TIMEOUT_S = 30.0


class Environment(msgspec.Struct, frozen=True):
    """A *python* with vLLM, and the *wheel* that it was installed from, if that is known."""

    python: Path
    wheel: Path | None = None

    def subject(self, stack: str) -> Subject:
        """
        Return what is measured there.

        Raises:
            environment-unusable: There is no vLLM.
        """
        version = wheel_identity.version(self.python)
        local = ""
        with contextlib.suppress(InvalidVersion):
            local = Version(version).local or ""
        ours = local.startswith("spark.")
        label, stack = f"{'' if ours else 'stock '}vLLM {version}", stack if ours else ""
        if self.wheel is None:
            return Subject(label, version=version, stack=stack)
        return Subject(label, self.wheel.name, sha256_file(self.wheel), version, stack)


class ExperimentSpec(msgspec.Struct, frozen=True):
    """
    What is to be measured, and against what.

    Attributes:
        candidate, baseline: Environments; no candidate for a server that runs at *url*, and no
            baseline if nothing is compared.
        model: Folder of the model. *name*: under which it is served; empty for the model's own.
        recipe: How it is served; None for *flags* and *variables* alone, which are added to it.
        workloads: Names of `workloads.yaml`, or of cells; empty for the recipe's or the policy's.
        texts: A file of real prompts.
        mode: See `runner.ServerMode`.
        blocks: Of a bench (launches) or a calibration; 0 for the policy's.
        fresh: Begin anew, whatever an interrupted journal holds.
        preheat: Seconds; None for the policy's.
    """

    kind: Kind
    candidate: Environment | None = None
    baseline: Environment | None = None
    url: str = ""
    model: Path | None = None
    name: str = ""
    recipe: Recipe | None = None
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    workloads: tuple[str, ...] = ()
    texts: Path | None = None
    mode: ServerMode = "sequential"
    blocks: int = 0
    fresh: bool = False
    preheat: float | None = None

    def __post_init__(self) -> None:
        comparing = self.kind in ("gate", "calibration")
        for wrong, what, todo in (
            (
                bool(self.candidate) == bool(self.url),
                "Name an environment to serve from, or a server.",
                "--python FILE --serve DIR, or --server URL.",
            ),
            (
                self.candidate and not self.model,
                "An environment serves a model.",
                "Name the folder of the model with --serve DIR.",
            ),
            (
                comparing and not (self.candidate and self.baseline),
                "A comparison starts both servers by itself.",
                "Name the environments of candidate and baseline.",
            ),
        ):
            if wrong:
                raise UsageError("usage", what, todo=todo)

    def launches(self, versions: Mapping[Side, str]) -> dict[Side, LaunchPlan]:
        """
        Return how each side is started; *versions* are those of vLLM.

        Raises:
            recipe-unfit: The recipe does not support that release.
        """
        environments: dict[Side, Environment | None] = {
            "baseline": self.baseline, "candidate": self.candidate, "control": self.baseline,
        }  # fmt: skip
        return {
            side: self._launch(one, versions["baseline" if side == "control" else side])
            for side, one in environments.items()
            if one
        }

    def _launch(self, environment: Environment, version: str) -> LaunchPlan:
        assert self.model is not None
        launch = LaunchPlan(environment.python, self.model)
        if self.recipe:
            launch = recipes.launch(self.recipe, version, environment.python, self.model)
        flags = (*launch.flags, *self.flags)
        flags += tuple(flag for flag in MEASURED_FLAGS if flag not in flags)
        gated = GATED if self.kind in ("gate", "calibration") else {}
        variables = {**gated, **launch.variables, **self.variables}
        return replace(launch, flags=flags, variables=variables, name=self.served_name)

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        own = recipes.served_name(self.recipe, self.model) if self.model else "model"
        return self.name or own


class _Attempts(msgspec.Struct, frozen=True):
    """How many gates of a wheel have begun."""

    count: int = 0


def next_attempt(store: Store, subject: Mapping[str, str]) -> int:
    """Count another gate of *subject* (wheel, model, recipe), and return its number, from 1."""
    key = content_key("throughput-attempts", [dict(subject)])
    before = store.get("throughput-attempts", key, _Attempts) or _Attempts()
    store.put("throughput-attempts", key, _Attempts(before.count + 1))
    return before.count + 1


class Experiment:
    """
    An experiment, measured once by `result`.

    Args:
        generator: The load generator; the pinned vllm-rs if none is given.

    Raises:
        file-invalid: A policy is not valid. UsageError: There is no such workload.
    """

    def __init__(
        self, context: RunContext, spec: ExperimentSpec, generator: LoadGenerator | None = None
    ) -> None:
        self._context, self._spec = context, spec
        gates = self._gates = context.project.root / "ci" / "gates"
        self.policy = strict_yaml.load(gates / "throughput.yaml", ThroughputPolicy)
        self._machine_policy = strict_yaml.load(gates / "machine.yaml", MachinePolicy)
        self._generator_policy = strict_yaml.load(gates / "load_generator.yaml", GeneratorPolicy)
        self._workloads = workloads.load(context.project.root)
        own = spec.recipe.workloads if spec.recipe else (self.policy.workloads,)
        cells = self._workloads.cells(*(spec.workloads or own))
        if spec.kind != "bench" and not any(cell.primary for cell in cells):
            cells = tuple(map(_deciding, cells))
        self.cells = cells
        self._generator = generator or vllm_bench.obtain(
            context.project.root,
            self._generator_policy.stack,
            context.store,
            offline=context.offline,
        )
        self._traffic: dict[str, float] = {}
        policies = (self.policy, self._machine_policy, self._generator_policy, self.cells)
        self.digest = sha256_bytes(canonical(policies))

    def result(self) -> Result:
        """
        Measure, and return the result; an interrupted journal of the same experiment is continued.

        Raises:
            SparkwrightError: Something cannot be set up: no such environment, a full disk, a recipe
                for another vLLM, another measurement at the same time.
        """
        spec, store = self._spec, self._context.store
        if spec.recipe and spec.model:
            servers = 2 if spec.mode == "concurrent" and spec.baseline else 1
            found = preflight.check(spec.recipe, self._workloads, spec.model, servers=servers)
            for advice in found:
                console.note(f"{spec.recipe.name}: {advice.message}")
        for name in {cell.texts for cell in self.cells if cell.texts}:
            if not spec.texts:
                todo = "Name it with --texts FILE."
                raise UsageError(
                    "usage", f"The cells of {name} need its file of prompts.", todo=todo
                )
            self._workloads.texts[name].verify(spec.texts)
        candidate, baseline = self._subjects
        python = spec.candidate.python if spec.candidate else None
        machine = MachineMonitor(self._machine_policy, store, python=python)
        with self._journal(machine) as journal:
            stopped = self._prepare(machine)
            past = journal.past
            outcome = RunOutcome(past.measurements, past.closed, None, stopped)
            runner_spec = self._run_spec(machine, journal)
            if not stopped:
                versions: dict[Side, str] = {"candidate": candidate.version}
                versions["baseline"] = baseline.version if baseline else ""
                launches = spec.launches(versions)
                pair = ServerPair(
                    self._measuring(machine), launches, self._logs, spec.url, self._contract_fault
                )
                outcome = Runner(runner_spec, pair, journal).run()
            result = self._result(machine, journal, runner_spec, outcome)
            # A run that the machine spoiled continues where it was, once the machine is better.
            passing = (*state_checks.REASONS, runner.UNSTEADY)
            if not (outcome.stopped and outcome.stopped.reference in passing):
                journal.add(Ended(result.state))
        return result

    @property
    def _logs(self) -> Path:
        return self._context.store.folder("logs", "throughput")

    @cached_property
    def _subjects(self) -> tuple[Subject, Subject | None]:
        spec, stack = self._spec, self._context.project.stack
        if spec.candidate is None:
            return Subject(spec.url, version=Client(spec.url, spec.served_name).version()), None
        baseline = spec.baseline.subject(stack) if spec.baseline else None
        return spec.candidate.subject(stack), baseline

    @contextlib.contextmanager
    def _journal(self, machine: MachineMonitor) -> Iterator[Journal]:
        spec, store = self._spec, self._context.store
        candidate, baseline = self._subjects
        serving = (spec.flags, spec.variables, spec.mode, spec.blocks, spec.url)
        wheel = {
            "candidate": candidate.sha256 or candidate.label, "model": self._model,
            "recipe": spec.recipe.name if spec.recipe else "",
        }  # fmt: skip
        subject = {
            **wheel,
            "baseline": (baseline.sha256 or baseline.label) if baseline else "",
            "serving": sha256_bytes(canonical(serving)),
        }
        machines = {f"host: {name}": text for name, text in machine.fingerprint().items()}
        generator = self._generator.name
        about = {**subject, "policy": self.digest, "generator": generator, **machines}
        identity = sha256_bytes(canonical(about))
        path = self._logs / f"{spec.kind}-{sha256_bytes(canonical(subject))[:16]}.jsonl"
        # Two measurements at a time would measure each other.
        with store.lock("measuring", wait=False):
            if spec.fresh:
                path.unlink(missing_ok=True)
            attempt = 1
            if spec.kind == "gate" and not _continued(path, identity):
                attempt = next_attempt(store, wheel)
            seed = time.time_ns() % 2**31
            begun = Begun(identity, about, seed, time.time(), attempt)
            journal = Journal(path, begun)
            past = journal.past
            if journal.refused:
                names = ", ".join(journal.refused)
                console.warn(f"An unfinished measurement is not continued: {names} differ.")
            elif past.measurements:
                count = len(past.measurements)
                console.note(f"continuing after {count} measurements")
            if past.begun.attempt > 1:
                console.note(_attempt_note(past.begun.attempt))
            yield journal

    @cached_property
    def _model(self) -> str:
        """A digest of the model's files, or its name at a server that runs."""
        spec = self._spec
        return server_under_test.model_digest(spec.model) if spec.model else spec.served_name

    def _prepare(self, machine: MachineMonitor) -> Reason | None:
        """Heat the machine and check the generator; return the reason if nothing may be measured."""
        preheat = self._spec.preheat
        machine.preheat(self._machine_policy.preheat if preheat is None else preheat)
        if reasons := machine.settle():
            return reasons[0]
        try:
            self._proof = (check_generator(self._generator, self._generator_policy),)
        except LoadError as error:
            return Reason(error.reason, error.message)
        return None

    _proof: tuple[str, ...] = ()

    def _run_spec(self, machine: MachineMonitor, journal: Journal) -> RunSpec:
        spec, policy, begun = self._spec, self.policy, journal.past.begun
        default = {"gate": policy.max_blocks, "calibration": policy.calibration_blocks}
        alpha = attempt_alpha(policy.alpha, begun.attempt)
        rule = DecisionRule(alpha, policy.min_blocks, policy.max_blocks)
        stored = paired_differences.stored_calibration(self._context.store, self._key(machine))
        return RunSpec(
            self.cells, rule if spec.baseline else None, policy, spec.mode,
            policy.quads if spec.mode == "concurrent" or not spec.baseline else 1,
            spec.blocks or default.get(spec.kind, policy.launches), begun.seed,
            self._machine_policy.discards + 1, stored.history(spec.mode),
            paired_differences.day(begun.at), spec.kind == "gate", spec.kind == "calibration",
        )  # fmt: skip

    def _key(self, machine: MachineMonitor) -> str:
        return paired_differences.calibration_key(machine.fingerprint(), self._model)

    def _measuring(self, machine: MachineMonitor) -> MeasurementContext:
        spec = self._spec
        self._traffic = decode_traffic(spec.model, self.cells)
        name = spec.served_name
        return MeasurementContext(
            self._generator, machine, self.policy,
            lambda url: Client(url, name, deadline=COUNTERS_TIMEOUT_S).metrics(),
            name, spec.model, spec.texts, self._traffic, machine.bandwidth,
            self._workloads.rule, self._machine_policy.cooldown,
        )  # fmt: skip

    def _contract_fault(self, log: Path) -> Reason | None:
        """
        Return the first check of the recipe's kernel contract that *log* fails, in a gate.

        A log that cannot be read shows nothing, and the launch does not count.
        """
        recipe = self._spec.recipe
        if recipe is None or self._spec.kind != "gate":
            return None
        expected = contract.contract_of(recipe, self._subjects[0].version)
        policy = strict_yaml.load(self._gates / "contract.yaml", ContractPolicy)
        checks = contract.check_contract(policy, expected, ObservedServer(log))
        faults = (
            Reason(BROKEN if one.state == "fail" else one.reason, f"{one.name}: {one.message}")
            for one in checks
            if one.state in ("fail", "invalid")
        )
        return next(faults, None)

    def _result(
        self, machine: MachineMonitor, journal: Journal, run: RunSpec, outcome: RunOutcome
    ) -> Result:
        spec, policy, past = self._spec, self.policy, journal.past
        candidate, baseline = self._subjects
        measured, mode = outcome.measurements, spec.mode
        history = run.history
        if spec.kind == "gate":
            history = paired_differences.control_history(history, measured, self.cells, mode)
        self._store_blocks(machine, run, outcome)
        if spec.kind == "calibration":
            stored = paired_differences.stored_calibration(self._context.store, self._key(machine))
            history = stored.history(mode)
        series = paired_differences.metric_series(
            self.cells, measured, outcome.blocks, history, policy, run.today
        )
        state, message = _state(spec.kind, outcome)
        attempt = past.begun.attempt
        notes = (outcome.outlook, _attempt_note(attempt) if attempt > 1 else "")
        cells = paired_differences.cell_results(
            self.cells, measured, outcome.blocks, series, outcome.decision,
            compared=baseline is not None,
        )  # fmt: skip
        return Result(
            kind=spec.kind, state=state, says=message, candidate=candidate, baseline=baseline,
            cells=tuple(self._with_ceiling(cell, machine) for cell in cells), legs=measured,
            culprits=outcome.decision.culprits if outcome.decision else (),
            recipe=spec.recipe.name if spec.recipe else "",
            model=spec.model.name if spec.model else spec.served_name,
            quantization=spec.recipe.model.quantization if spec.recipe else "",
            stack=self._context.project.stack, host={**machine_facts(), **machine.fingerprint()},
            margin=max((one.bounds.margin for one in series), default=0.0) if baseline else 0.0,
            alpha=run.rule.alpha if run.rule else 0.0, attempt=attempt, blocks=run.blocks,
            quads=run.quads, generator=self._generator.name,
            qualified=(*self._proof, *machine.notes, *filter(None, notes)),
            bandwidth=machine.bandwidth, policy=self.digest, began=past.begun.at,
            calibration=paired_differences.calibrated(self.cells, history, policy, run.today),
            seconds=time.time() - past.begun.at, resumed=past.resumed,
        )  # fmt: skip

    def _store_blocks(self, machine: MachineMonitor, run: RunSpec, outcome: RunOutcome) -> None:
        """Store the A/A blocks of this run: those of a calibration, or the one of a gate."""
        side: Side = "control" if run.control else "candidate"
        numbers = [CONTROL_BLOCK] if run.control else sorted(outcome.blocks) if run.whole else []
        blocks = [
            paired_differences.aa_block(outcome.measurements, self.cells, number, run.mode, side)
            for number in numbers
        ]
        paired_differences.add_blocks(self._context.store, self._key(machine), blocks)

    def _with_ceiling(self, cell: CellResult, machine: MachineMonitor) -> CellResult:
        """Return *cell* with the bytes of a step, and the rate of one request that memory allows."""
        step, speed = self._traffic.get(cell.name), machine.bandwidth
        large = step and speed and step >= self.policy.ceiling_min_bytes
        ceiling = speed.gigabytes * 1e9 / step if large and step and speed else None
        return replace(cell, step_bytes=step, ceiling=ceiling)


def _state(kind: Kind, outcome: RunOutcome) -> tuple[State, str]:
    """Return the verdict of a run, and it in a sentence."""
    if stopped := outcome.stopped:
        fails = kind == "gate" and stopped.reference in (CRASHED, BROKEN)
        return "fail" if fails else "invalid", f"{stopped.says} ({stopped.reference})"
    if kind != "gate":
        launches = {one.launch for one in outcome.measurements if one.counts}
        return "not-run", f"{len(launches)} launches were measured; nothing is judged"
    if outcome.decision is None or outcome.decision.state is None:
        return "inconclusive", "no block is complete"
    return outcome.decision.state, outcome.decision.message


def _attempt_note(attempt: int) -> str:
    share = 100 * attempt_alpha(1.0, attempt)
    return (
        f"This is gate number {attempt} of this wheel; it spends {share:.2g} % of the error budget."
    )


def _continued(path: Path, identity: str) -> bool:
    """Return whether the journal at *path* is of the same experiment and unfinished."""
    past = journals.read(path)
    return past is not None and past.begun.identity == identity


def _deciding(cell: WorkloadCell) -> WorkloadCell:
    """Return *cell* with default deciding metrics: times of one request, and the rate of many."""
    return replace(cell, primary=("tpot", "ttft") if cell.concurrency == 1 else ("rate",))
