"""
From the specification of an experiment to its result: the load generator is checked, the machine
heated and looked at, the servers measured, and the result and the A/A blocks stored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.load.load_generator_check import GeneratorPolicy, check_generator
from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator
from sparkwright.bench.machine import state_checks
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.machine.state_checks import MachinePolicy
from sparkwright.bench.model import checkpoint, modules
from sparkwright.bench.model.checkpoint import ModelError
from sparkwright.bench.model.modules import Bandwidth
from sparkwright.bench.recipes import preflight, workloads
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.records import Metric, Reason, Side
from sparkwright.bench.results import Kind, Result, Subject
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import GATED, LaunchPlan, Server
from sparkwright.bench.statistics import DecisionRule, attempt_alpha
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.policy import ContractPolicy
from sparkwright.gates.core import server_under_test, verdict_file
from sparkwright.gates.core.ladder import machine_facts
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput import paired_differences, runner
from sparkwright.gates.throughput.measurement import (
    ExternalServer,
    MeasurementContext,
    RunningServer,
)
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.runner import (
    ExperimentStart,
    MeasurementJournal,
    Runner,
    RunOutcome,
    RunSpec,
)

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
        ours = "+spark." in version
        label = f"{'' if ours else 'stock '}vLLM {version}"
        name, sha256 = (self.wheel.name, sha256_file(self.wheel)) if self.wheel else ("", "")
        return Subject(label, name, sha256, version, stack if ours else "")


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
        at_once: Keep both servers running at the same time; otherwise a launch of one server
            measures each cell once.
        blocks: Of a bench (launches) or a calibration; 0 for the policy's.
        fresh: Begin anew, whatever an interrupted journal holds.
        preheat: Seconds; None for the policy's.
        user: The user that servers run as; empty for that of this process.
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
    at_once: bool = False
    blocks: int = 0
    fresh: bool = False
    preheat: float | None = None
    user: str = ""

    def launch(self, environment: Environment, version: str) -> LaunchPlan:
        """
        Return how the vLLM *version* of *environment* is started; both sides alike.

        Raises:
            recipe-unfit: The recipe does not support that release.
        """
        assert self.model is not None
        launch = LaunchPlan(environment.python, self.model)
        if self.recipe:
            launch = recipes.launch(self.recipe, version, environment.python, self.model)
        flags = (*launch.flags, *self.flags)
        flags += tuple(flag for flag in MEASURED_FLAGS if flag not in flags)
        gated = GATED if self.kind in ("gate", "calibration") else {}
        variables = {**gated, **launch.variables, **self.variables}
        name, user = self.served_name, self.user
        return replace(launch, flags=flags, variables=variables, name=name, user=user)

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        own = recipes.served_name(self.recipe, self.model) if self.model else "model"
        return self.name or own


class Experiment:
    """
    An experiment, measured once by `result`.

    Args:
        generator: The load generator; the pinned vllm-rs if none is given.

    Raises:
        file-invalid: A policy is not valid.
        UsageError: There is no such workload, or a file of prompts is missing or not used.
    """

    def __init__(
        self, context: RunContext, spec: ExperimentSpec, generator: LoadGenerator | None = None
    ) -> None:
        self._store, self._output, self._spec = context.store, context.output, spec
        self._stack = context.project.stack
        gates = context.project.root / "ci" / "gates"
        self.policy = strict_yaml.load(gates / "throughput.yaml", ThroughputPolicy)
        self._contract_policy = strict_yaml.load(gates / "contract.yaml", ContractPolicy)
        self._machine_policy = strict_yaml.load(gates / "machine.yaml", MachinePolicy)
        self._generator_policy = strict_yaml.load(gates / "load_generator.yaml", GeneratorPolicy)
        self._workloads = workloads.load(context.project.root)
        own = spec.recipe.workloads if spec.recipe else (self.policy.workloads,)
        cells = self._workloads.cells(*(spec.workloads or own))
        if spec.kind != "bench" and not any(cell.primary for cell in cells):
            # Times of one request, and the rate of many.
            alone: tuple[Metric, ...] = ("tpot", "ttft")
            cells = tuple(
                replace(cell, primary=alone if cell.concurrency == 1 else ("rate",))
                for cell in cells
            )
        workloads.check_texts(cells, spec.texts)
        self.cells = cells
        self._context, self._given_generator = context, generator
        policies = (self.policy, self._machine_policy, self._generator_policy, self.cells)
        self.digest = sha256_bytes(canonical((*policies, self._contract_policy, spec.recipe)))

    @cached_property
    def _generator(self) -> LoadGenerator:
        stack, root = self._generator_policy.stack, self._context.project.root
        return self._given_generator or vllm_bench.obtain(
            root, stack, self._store, offline=self._context.offline
        )

    def result(self) -> Result:
        """
        Measure, and return the result; an interrupted journal of the same experiment is continued.

        Raises:
            offline, source-unreachable: The load generator is not in the store.
            SparkwrightError: Something cannot be set up: no such environment, a full disk, a recipe
                for another vLLM, another measurement at the same time.
        """
        spec = self._spec
        generator = self._generator
        if spec.recipe and spec.model:
            servers = 2 if spec.at_once and spec.baseline else 1
            for advice in preflight.check(
                spec.recipe, self._workloads, spec.model, servers=servers
            ):
                console.note(f"{spec.recipe.name}: {advice.message}")
        plans, subjects = self._sides()
        python = spec.candidate.python if spec.candidate else None
        machine_policy = self._machine_policy
        # Two measurements at a time would measure each other.
        with self._store.lock("measuring", wait=False):
            machine = MachineMonitor(
                machine_policy, self._store, python=python, elsewhere=bool(spec.url)
            )
            # A digest of the model's files, or its name at a server that runs.
            name = spec.served_name
            model = server_under_test.model_digest(spec.model) if spec.model else name
            journal = self._journal(machine, subjects, model)
            preheat = machine_policy.preheat if spec.preheat is None else spec.preheat
            hindrance, accuracy = next(iter(machine.settle(preheat)), None), ""
            if not hindrance:
                try:
                    accuracy = check_generator(generator, self._generator_policy)
                except LoadError as error:
                    hindrance = Reason(error.reason, error.message)
            key = paired_differences.calibration_key(
                machine.fingerprint(), model, at_once=spec.at_once
            )
            kind = dict[str, list[tuple[str, float]]]
            stored = self._store.get(paired_differences.STORED, key, kind) or {}
            policy = self.policy
            alpha = attempt_alpha(policy.alpha, journal.begun.attempt)
            rule = DecisionRule(alpha, policy.min_blocks, policy.max_blocks)
            blocks = {"gate": policy.max_blocks, "calibration": policy.calibration_blocks}
            run = RunSpec(
                self.cells, rule if spec.baseline else None,
                spec.blocks or blocks.get(spec.kind, policy.launches), machine_policy.discards + 1,
                spec.at_once, stored, spec.kind == "gate", spec.kind == "calibration",
                self._contract(subjects),
            )  # fmt: skip
            measuring = MeasurementContext(
                generator, machine, policy,
                lambda url: Client(url, name, deadline=COUNTERS_TIMEOUT_S).metrics(),
                name, spec.model, spec.texts, self._workloads.rule, machine_policy.cooldown,
            )  # fmt: skip
            outcome = Runner(run, measuring, self._launcher(machine, plans), journal).run(hindrance)
            notes = filter(None, [accuracy, outcome.outlook])
            result = self._result(machine, journal, run, outcome, subjects, tuple(notes))
            # A run that the machine spoiled continues where it was, once the machine is better.
            spoiled = (*state_checks.REASONS, runner.UNSTEADY)
            if not hindrance and not (outcome.stopped and outcome.stopped[1].reference in spoiled):
                self._store.put(paired_differences.STORED, key, outcome.history)
                journal.end()
        return result

    @property
    def _logs(self) -> Path:
        return self._store.folder("logs", "throughput")

    def _sides(self) -> tuple[dict[Side, LaunchPlan], dict[Side, Subject]]:
        """Return the launch plan and the identity of each side."""
        spec = self._spec
        if spec.candidate is None:
            version = Client(spec.url, spec.served_name).version()
            return {}, {"candidate": Subject(spec.url, version=version)}
        environments: tuple[tuple[Side, Environment | None], ...] = (
            ("candidate", spec.candidate), ("baseline", spec.baseline), ("control", spec.baseline),
        )  # fmt: skip
        plans: dict[Side, LaunchPlan] = {}
        subjects: dict[Side, Subject] = {}
        # The profiler is there on both sides, and idle while anything is measured.
        profiler = kernel_trace.flags(self._logs / "profiles") if spec.baseline else ()
        for side, environment in environments:
            if environment:
                subject = environment.subject(self._stack)
                plan = spec.launch(environment, subject.version)
                subjects[side] = replace(subject, flags=plan.flags, variables=plan.variables)
                plans[side] = replace(plan, flags=(*plan.flags, *profiler))
        return plans, subjects

    def _journal(
        self, machine: MachineMonitor, subjects: Mapping[Side, Subject], model: str
    ) -> MeasurementJournal:
        """Open the journal of this experiment, which is continued if it was interrupted."""
        spec, candidate = self._spec, subjects["candidate"]
        recipe = spec.recipe.name if spec.recipe else ""
        served = (spec.at_once, spec.blocks, {side: subjects[side] for side in sorted(subjects)})
        about = {
            "model": model, "recipe": recipe,
            "wheels and how they are served": sha256_bytes(canonical(served)),
        }  # fmt: skip
        path = self._logs / f"{spec.kind}-{sha256_bytes(canonical(about))[:16]}.jsonl"
        about |= {f"host: {name}": text for name, text in machine.fingerprint().items()}
        about |= {"policy": self.digest, "generator": self._generator.name}
        if spec.fresh:
            path.unlink(missing_ok=True)

        def begin() -> ExperimentStart:
            log = verdict_file.attempt_log(self._output, candidate.wheel)
            number = verdict_file.attempts(log, candidate.sha256, "G8", recipe)
            return ExperimentStart(about, time.time_ns() % 2**31, time.time(), max(1, number))

        journal = MeasurementJournal(path, about, begin)
        if journal.refused:
            names = ", ".join(journal.refused)
            console.warn(f"An unfinished measurement is not continued: {names} differ.")
        elif journal.resumed:
            console.note(f"continuing after {len(journal.measurements)} measurements")
        return journal

    def _launcher(
        self, machine: MachineMonitor, plans: Mapping[Side, LaunchPlan]
    ) -> runner.Launcher:
        @contextlib.contextmanager
        def start(sides: Sequence[Side]) -> Iterator[dict[Side, RunningServer]]:
            if self._spec.url:
                yield {side: ExternalServer(self._spec.url) for side in sides}
                return
            with contextlib.ExitStack() as stack:
                # All processes are started before the first is waited for.
                servers = {}
                for side in sides:
                    reserve = max(plans[side].reserve, machine.policy.memory.floor)
                    plan = replace(plans[side], reserve=reserve)
                    servers[side] = Server(plan, self._logs / f"{side}.log")
                for server in servers.values():
                    stack.callback(server.stop)
                for server in servers.values():
                    stack.enter_context(server)
                yield {**servers}

        return start

    def _contract(
        self, subjects: Mapping[Side, Subject]
    ) -> Callable[[Side, RunningServer], Check | None] | None:
        """Return the function that judges a launch of a gate by the recipe's kernel contract."""
        recipe, profiles = self._spec.recipe, self._logs / "profiles"
        if recipe is None or self._spec.kind != "gate":
            return None

        def fault(side: Side, server: RunningServer) -> Check | None:
            assert isinstance(server, Server)
            version = subjects[side].version
            policy = self._contract_policy
            checks = contract.check_launch(policy, recipe, version, server, profiles)
            for path in profiles.rglob("*.json*"):  # some tens of megabytes for each launch
                path.unlink()
            if side != "candidate":
                # A baseline may have other kernels, and a profile has to show them.
                unseen = [one for one in checks if one.reason.startswith("profile-")]
                checks = tuple(unseen) or checks
            return contract.contract_fault(checks)

        return fault

    def _result(
        self, machine: MachineMonitor, journal: MeasurementJournal, run: RunSpec,
        outcome: RunOutcome, subjects: Mapping[Side, Subject], notes: tuple[str, ...],
    ) -> Result:  # fmt: skip
        spec, begun, decision = self._spec, journal.begun, outcome.decision
        cells = paired_differences.cell_results(
            self.cells, journal.measurements, outcome.blocks, outcome.series, decision,
            compared=bool(spec.baseline),
        )  # fmt: skip
        ceilings = self._ceilings(machine.bandwidth)
        stopped: Reason | None = None
        state: State = "not-run"
        says = f"{len(journal.launches)} launches were measured; nothing is judged"
        if outcome.stopped:
            state, stopped = outcome.stopped
            says = f"{stopped.message} ({stopped.reference})"
        elif spec.kind == "gate":
            state = (decision and decision.state) or "inconclusive"
            says = decision.message if decision else "no block is complete"
        added = (*spec.flags, *(f"{name}={value}" for name, value in spec.variables.items()))
        return Result(
            spec.kind, state, says, subjects["candidate"],
            tuple(replace(cell, ceiling=ceilings.get(cell.name)) for cell in cells),
            tuple(journal.measurements), tuple(journal.launches), subjects.get("baseline"),
            stopped, decision.culprits if decision else (),
            recipe=spec.recipe.name if spec.recipe else "",
            model=spec.model.name if spec.model else spec.served_name,
            quantization=spec.recipe.model.quantization if spec.recipe and spec.model else "",
            added=added if spec.recipe else (), stack=self._stack,
            host={**machine_facts(), **machine.fingerprint()},
            margin=max((one.bounds.margin for one in outcome.series), default=0.0)
            if run.rule else 0.0,
            alpha=run.rule.alpha if run.rule else 0.0, attempt=begun.attempt, blocks=run.blocks,
            generator=self._generator.name, qualified=notes, bandwidth=machine.bandwidth,
            calibration={one.name: outcome.history.get(one.name, ()) for one in outcome.series},
            policy=self.digest, began=begun.at, seconds=time.time() - begun.at,
            resumed=journal.resumed,
        )  # fmt: skip

    def _ceilings(self, bandwidth: Bandwidth | None) -> dict[str, float]:
        """
        Return the tokens per second of one request that memory allows, by cell.

        They follow from the bytes that a decode step reads in the middle of an answer. A cell is
        left out if the checkpoint does not say them, or if the model is small enough for caches.
        """
        ceilings: dict[str, float] = {}
        if not (self._spec.model and bandwidth):
            return ceilings
        try:
            weights = checkpoint.read(self._spec.model)
            for cell in self.cells:
                middle = cell.prompt + cell.answer // 2
                step = modules.audit(weights, context=middle, batch=cell.concurrency).step
                if step >= self.policy.ceiling_min_bytes:
                    ceilings[cell.name] = bandwidth.gigabytes * 1e9 / step
        except (ModelError, SourceError) as error:
            if error.reference not in ("checkpoint-invalid", "not-provided"):
                raise
            console.detail(f"no roofline: {error.what}")
        return ceilings
