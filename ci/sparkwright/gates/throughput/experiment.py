"""
From the specification of an experiment to its result: the load generator is checked, the machine
heated and looked at, the servers measured, and the result and the A/A blocks stored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.policy import ContractPolicy
from sparkwright.gates.core import ladder, server_under_test
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput import paired_differences
from sparkwright.gates.throughput.measurement import (
    ExternalServer,
    MeasurementContext,
    RunningServer,
)
from sparkwright.gates.throughput.paired_differences import ThroughputPolicy
from sparkwright.gates.throughput.runner import (
    UNSTEADY,
    ExperimentStart,
    MeasurementJournal,
    Runner,
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
        flags = (*self.flags, *(flag for flag in MEASURED_FLAGS if flag not in self.flags))
        plan = recipes.launch(
            self.recipe, version, environment.python, self.model, flags=flags,
            variables=self.variables, name=self.name, user=self.user,
        )  # fmt: skip
        gated = GATED if self.kind in ("gate", "calibration") else {}
        return replace(plan, variables={**gated, **plan.variables})

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
        self._context, self._spec, self._generator = context, spec, generator
        self._stack, self._recipe = context.project.stack, spec.recipe.name if spec.recipe else ""
        self._logs = context.store.folder("logs", "throughput")
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
        policies = (self.policy, self._machine_policy, self._generator_policy, self.cells)
        self.digest = sha256_bytes(canonical((*policies, self._contract_policy, spec.recipe)))

    def result(self) -> Result:
        """
        Measure, and return the result; an interrupted journal of the same experiment is continued.

        Raises:
            offline, source-unreachable: The load generator is not in the store.
            SparkwrightError: Something cannot be set up: no such environment, a full disk, a recipe
                for another vLLM, another measurement at the same time.
        """
        spec, store, policy = self._spec, self._context.store, self.policy
        generator = self._generator or vllm_bench.obtain(
            self._context.project.root, self._generator_policy.stack, store,
            offline=self._context.offline,
        )  # fmt: skip
        if spec.recipe and spec.model:
            servers = 2 if spec.at_once and spec.baseline else 1
            for advice in preflight.check(
                spec.recipe, self._workloads, spec.model, servers=servers
            ):
                console.note(f"{spec.recipe.name}: {advice.message}")
        python = spec.candidate.python if spec.candidate else None
        # Two measurements at a time would measure each other.
        with store.lock("measuring", wait=False):
            machine = MachineMonitor(self._machine_policy, store, python=python, elsewhere=bool(spec.url))
            plans, subjects = self._sides(machine)
            # A digest of the model's files, or its name at a server that runs.
            name = spec.served_name
            model = server_under_test.model_digest(spec.model) if spec.model else name
            journal = self._journal(machine, generator.name, subjects, model)
            preheat = self._machine_policy.preheat if spec.preheat is None else spec.preheat
            hindrance, accuracy = next(iter(machine.settle(preheat)), None), ""
            if not hindrance:
                try:
                    accuracy = check_generator(generator, self._generator_policy)
                except LoadError as error:
                    hindrance = Reason(error.reason, error.message)
            fingerprint = machine.fingerprint()
            key = paired_differences.calibration_key(fingerprint, model, at_once=spec.at_once)
            kind = dict[str, list[tuple[str, float]]]
            stored = store.get(paired_differences.STORED, key, kind) or {}
            blocks = {"gate": policy.max_blocks, "calibration": policy.calibration_blocks}
            run = RunSpec(
                spec.kind, self.cells, spec.blocks or blocks.get(spec.kind, policy.launches),
                spec.at_once, stored,
                partial(self._contract_fault, subjects)
                if spec.recipe and spec.kind == "gate"
                else None,
            )  # fmt: skip
            measuring = MeasurementContext(
                generator, machine, policy,
                lambda url: Client(url, name, deadline=COUNTERS_TIMEOUT_S).metrics(),
                name, spec.model, spec.texts, self._workloads.rule,
            )  # fmt: skip
            runner = Runner(run, measuring, partial(self._servers, plans), journal)
            if hindrance:
                runner.stopped = "invalid", hindrance
            else:
                runner.run()
            result = replace(
                self._result(machine, journal, runner, subjects), blocks=run.blocks,
                generator=generator.name, qualified=tuple(filter(None, [accuracy, runner.outlook])),
            )  # fmt: skip
            # A run that the machine spoiled continues where it was, once the machine is better.
            spoiled = (*state_checks.REASONS, UNSTEADY)
            if not hindrance and not (result.stopped and result.stopped.reference in spoiled):
                store.put(paired_differences.STORED, key, runner.history)
                journal.end()
        return result

    def _sides(self, machine: MachineMonitor) -> tuple[dict[Side, LaunchPlan], dict[Side, Subject]]:
        """Return the launch plan and the identity of each side."""
        spec = self._spec
        if spec.candidate is None:
            version = Client(spec.url, spec.served_name).version()
            return {}, {"candidate": Subject(spec.url, version=version)}
        environments: dict[Side, Environment] = {"candidate": spec.candidate}
        profiler: tuple[str, ...] = ()
        if spec.baseline:
            environments |= {"baseline": spec.baseline, "control": spec.baseline}
            # The profiler is there on both sides, and idle while anything is measured.
            profiler = kernel_trace.flags(self._logs / "profiles")
        plans: dict[Side, LaunchPlan] = {}
        subjects: dict[Side, Subject] = {}
        for side, environment in environments.items():
            subject = environment.subject(self._stack)
            plan = spec.launch(environment, subject.version)
            subjects[side] = replace(subject, flags=plan.flags, variables=plan.variables)
            reserve = max(plan.reserve, machine.policy.memory.floor)
            plans[side] = replace(plan, flags=(*plan.flags, *profiler), reserve=reserve)
        return plans, subjects

    def _journal(
        self, machine: MachineMonitor, generator: str, subjects: Mapping[Side, Subject], model: str
    ) -> MeasurementJournal:
        """Open the journal of this experiment, which is continued if it was interrupted."""
        spec, candidate = self._spec, subjects["candidate"]
        served = (spec.at_once, spec.blocks, {side: subjects[side] for side in sorted(subjects)})
        about = {
            "model": model, "recipe": self._recipe,
            "wheels and how they are served": sha256_bytes(canonical(served)),
        }  # fmt: skip
        path = self._logs / f"{spec.kind}-{sha256_bytes(canonical(about))[:16]}.jsonl"
        about |= {f"host: {name}": text for name, text in machine.fingerprint().items()}
        about |= {"policy": self.digest, "generator": generator}
        if spec.fresh:
            path.unlink(missing_ok=True)
        log = ladder.attempt_log(self._context.output, candidate.wheel)
        number = ladder.attempts(log, candidate.sha256, "G8", self._recipe)
        start = ExperimentStart(about, time.time_ns() % 2**31, time.time(), max(1, number))
        journal = MeasurementJournal(path, start)
        if journal.refused:
            names = ", ".join(journal.refused)
            console.warn(f"An unfinished measurement is not continued: {names} differ.")
        elif journal.resumed:
            console.note(f"continuing after {len(journal.measurements)} measurements")
        return journal

    @contextlib.contextmanager
    def _servers(
        self, plans: Mapping[Side, LaunchPlan], sides: Sequence[Side]
    ) -> Iterator[dict[Side, RunningServer]]:
        """Start a server for each of *sides* and end it with the block, unless one runs already."""
        if not plans:
            yield {side: ExternalServer(self._spec.url) for side in sides}
            return
        with contextlib.ExitStack() as stack:
            # All processes are started before the first is waited for.
            servers = {side: Server(plans[side], self._logs / f"{side}.log") for side in sides}
            for server in servers.values():
                stack.callback(server.stop)
            for server in servers.values():
                stack.enter_context(server)
            yield {**servers}

    def _contract_fault(
        self, subjects: Mapping[Side, Subject], side: Side, server: RunningServer
    ) -> Check | None:
        """Profile *server*, and return the check of the recipe's kernel contract that it breaks."""
        recipe, profiles = self._spec.recipe, self._logs / "profiles"
        assert recipe
        assert isinstance(server, Server)
        checks = contract.check_launch(
            self._contract_policy, recipe, subjects[side].version, server, profiles
        )
        for path in profiles.rglob("*.json*"):  # some tens of megabytes for each launch
            path.unlink()
        if side != "candidate":
            # A baseline may have other kernels, and a profile has to show them.
            unseen = [one for one in checks if one.reason.startswith("profile-")]
            checks = tuple(unseen) or checks
        return contract.contract_fault(checks)

    def _result(
        self, machine: MachineMonitor, journal: MeasurementJournal, runner: Runner,
        subjects: Mapping[Side, Subject],
    ) -> Result:  # fmt: skip
        spec, begun, decision = self._spec, journal.begun, runner.decision
        series, history = runner.series, runner.history
        cells = paired_differences.cell_results(
            self.cells, journal.measurements, runner.blocks, series, decision
        )
        ceilings = self._ceilings(machine.bandwidth)
        stopped: Reason | None = None
        state: State = "not-run"
        says = f"{len(journal.launches)} launches were measured; nothing is judged"
        if runner.stopped:
            state, stopped = runner.stopped
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
            recipe=self._recipe, model=spec.model.name if spec.model else spec.served_name,
            quantization=spec.recipe.model.quantization if spec.recipe and spec.model else "",
            added=added if spec.recipe else (), stack=self._stack,
            host={**ladder.machine_facts(), **machine.fingerprint()},
            margin=max((one.bounds.margin for one in series), default=0.0) if runner.rule else 0.0,
            alpha=runner.rule.alpha if runner.rule else 0.0, attempt=begun.attempt,
            bandwidth=machine.bandwidth,
            calibration={one.name: history.get(one.name, ()) for one in series},
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
            console.detail(f"no roofline: {error.what}")
        return ceilings
