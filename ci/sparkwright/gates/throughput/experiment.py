"""
From the options of an experiment to its result: the machine is heated and looked at, and the
servers are measured.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from sparkwright.bench.load import prompts, vllm_bench
from sparkwright.bench.machine import state_checks
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.recipes import preflight, workloads
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.results import Kind, Result, Subject
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import LaunchPlan, Server
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_classes, kernel_trace
from sparkwright.gates.contract.gate import ContractPolicy
from sparkwright.gates.core import ladder
from sparkwright.gates.core.server_under_test import (
    GateOptions,
    launch_plan,
    model_digest,
)
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput import paired_differences
from sparkwright.gates.throughput.measurement import RunSpec
from sparkwright.gates.throughput.runner import ExperimentStart, MeasurementJournal, Runner

#: A cache that has seen a prompt makes its time to first token vanish (vllm #54227).
MEASURED_FLAGS = ("--no-enable-prefix-caching",)
#: Seconds within which a server answers with its counters.
COUNTERS_TIMEOUT_S = 30.0


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
    ours = "+spark." in version
    name, sha256 = (wheel.name, sha256_file(wheel)) if wheel else ("", "")
    return Subject(
        f"{'' if ours else 'stock '}vLLM {version}", name, sha256, version, stack if ours else ""
    )


class Experiment:
    """
    An experiment, measured once by `result`.

    Args:
        options: The environments, how the model is served in them, and what is measured; without a
            *baseline_python* nothing is compared.
        blocks: Launches of a bench; 0 for the policy's.
        generator: The load generator; the pinned vllm-rs if none is given.

    Attributes:
        policy: Of the throughput gate.
        digest: The sha256 of all policies that it is judged by.

    Raises:
        file-invalid: A policy is not valid.
        UsageError: There is no such workload, recipe or user, or a file of prompts is missing or
            not used.
        environment-unusable, recipe-unfit, variable-refused: An environment cannot serve.
    """

    def __init__(
        self,
        context: RunContext,
        kind: Kind,
        options: GateOptions,
        blocks: int = 0,
        generator: vllm_bench.LoadGenerator | None = None,
    ) -> None:
        self._context, self._kind, self._options = context, kind, options
        self._blocks, self._generator = blocks, generator
        root = context.project.root
        self._recipe = recipes.load(root, options.recipe) if options.recipe else None
        #: Of the first launch of each side, as `kernel_classes.shares`.
        self._classes = dict[Side, dict[str, dict[str, float]]]()
        self._logs = context.store.folder("logs", "throughput")
        self._profiles = self._logs / "profiles"
        gates = root / "ci" / "gates"
        self.policy = strict_yaml.load(
            gates / "throughput.yaml", paired_differences.ThroughputPolicy
        )
        self._contract_policy = strict_yaml.load(gates / "contract.yaml", ContractPolicy)
        self._machine_policy = strict_yaml.load(gates / "machine.yaml", state_checks.MachinePolicy)
        self._workloads = workloads.load(root)
        names = options.workload or (self.policy.workloads,)
        if kind == "bench" and self._recipe and not options.workload:
            names = self._recipe.workloads
        self.cells = self._workloads.cells(*names)
        if kind == "gate":
            decides = self._recipe.decides if self._recipe else {}
            self.cells = workloads.deciding(self.cells, decides)
        # No draft of random tokens is accepted.
        self._drafted = bool(self._recipe and self._recipe.speculation)
        if not (self._drafted and options.texts):
            workloads.check_texts(self.cells, options.texts)
        self.digest = sha256_bytes(
            canonical((
                self.policy, self._machine_policy, self.cells, self._contract_policy, self._recipe,
            ))
        )  # fmt: skip
        self._plans, self._subjects = self._sides()

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
        options, store, policy = self._options, self._context.store, self.policy
        deadline, model = time.monotonic() + seconds, options.serve
        assert model
        gated = self._kind == "gate"
        generator = self._generator or vllm_bench.obtain(
            self._context.project.root, policy.generator, store, offline=self._context.offline
        )
        resident = False
        if self._recipe:
            preflight.check(self._recipe, self._workloads, model, now=not gated)
            resident = bool(options.baseline_python) and preflight.both_fit(self._recipe, model)
        texts = dict[str, Path]()
        for cell in self.cells:
            if (cell.texts or self._drafted) and options.texts:
                texts[cell.name] = options.texts
            elif self._drafted:
                texts[cell.name] = prompts.programs(store, cell.prompt)
        # Two measurements at a time would measure each other.
        with store.lock("measuring", wait=False):
            machine = MachineMonitor(self._machine_policy, store, python=options.python)
            name = self._plans["candidate"].name
            spec = RunSpec(
                self._kind,
                self.cells,
                self._blocks or (policy.max_blocks if gated else policy.launches),
                generator,
                machine,
                policy,
                counters=lambda url: Client(url, name, deadline=COUNTERS_TIMEOUT_S).metrics(),
                model=name,
                tokenizer=model,
                texts=texts,
                rule=self._workloads.rule,
                resident=resident,
                deadline=deadline,
                contract=partial(self._contract, self._recipe) if gated and self._recipe else None,
            )
            host = {**ladder.host_facts(), **machine.firmware()}
            journal = self._journal(
                resident,
                model_digest(model),
                host,
                generator.name,
                # The store names a file of prompts by its content.
                sorted(path.name for path in texts.values()),
            )
            runner = Runner(spec, self._servers, journal)
            preheat = self._machine_policy.preheat if options.preheat is None else options.preheat
            if hindrances := machine.settle(preheat):
                runner.stopped = "invalid", hindrances[0]
            else:
                runner.run()
            result = self._result(spec, journal, runner)
            # A run that the machine spoiled continues where it was, once the machine is better.
            spoiled = (*state_checks.REASONS, state_checks.UNSTEADY)
            if not (result.stopped and result.stopped.reference in spoiled):
                journal.end()
        return result

    def _conditions(self, spec: RunSpec) -> Iterator[str]:
        """Yield how the servers ran and what they were asked, in words."""
        if self._options.baseline_python:
            yield "both servers stayed and took turns" if spec.resident else "one server at a time"
        if self._drafted:
            yield "real prompts, as tokens are drafted, of about 3/4 of the tokens of a cell's name"

    def _sides(self) -> tuple[dict[Side, LaunchPlan], dict[Side, Subject]]:
        """Return the launch plan and the identity of each side."""
        options, plans, subjects = self._options, dict[Side, LaunchPlan](), dict[Side, Subject]()
        assert options.python
        environments: dict[Side, tuple[Path, Path | None]]
        environments = {"candidate": (options.python, options.wheel)}
        profiler: tuple[str, ...] = ()
        if options.baseline_python:
            environments["baseline"] = (options.baseline_python, options.baseline)
            environments["control"] = environments["baseline"]
            # The profiler is there on both sides, and idle while anything is measured.
            profiler = kernel_trace.flags(self._profiles)
        gated = self._kind == "gate"
        for side, (python, wheel) in environments.items():
            plan = launch_plan(options, self._recipe, python, MEASURED_FLAGS, gated=gated)
            subject = subject_of(python, wheel, self._context.project.stack)
            subjects[side] = replace(subject, flags=plan.flags, variables=plan.variables)
            plans[side] = replace(plan, flags=(*plan.flags, *profiler))
        return plans, subjects

    def _journal(self, *conditions: object) -> MeasurementJournal:
        """
        Open the journal of this experiment, which is continued if it was interrupted.

        With other wheels, flags, workloads, policies or *conditions* it is another experiment.
        """
        options, subjects = self._options, dict(sorted(self._subjects.items()))
        about = (self.digest, subjects, self._blocks, conditions)
        path = self._logs / f"{self._kind}-{sha256_bytes(canonical(about))[:16]}.jsonl"
        if options.fresh:
            path.unlink(missing_ok=True)
        number = ladder.attempts(
            self._context.output, subjects["candidate"].sha256, "G8", options.recipe
        )
        journal = MeasurementJournal(
            path, ExperimentStart(time.time_ns() % 2**31, time.time(), max(1, number))
        )
        if journal.launches:
            console.note(f"continuing after {len(journal.launches)} launches")
        return journal

    @contextlib.contextmanager
    def _servers(self, sides: Sequence[Side]) -> Iterator[dict[Side, Server]]:
        """Start a server for each of *sides* and end it with the block."""
        with contextlib.ExitStack() as stack:
            servers = dict[Side, Server]()
            # All processes are started before the first is waited for.
            for side in sides:
                plan = self._plans[side]
                plan = replace(plan, reserve=max(plan.reserve, self._machine_policy.floor))
                servers[side] = Server(plan, self._logs / f"{side}.log")
                stack.callback(servers[side].stop)
            for server in servers.values():
                stack.enter_context(server)
            yield servers

    def _contract(self, recipe: recipes.Recipe, side: Side, server: Server) -> tuple[Check, ...]:
        """Profile *server*, and return the checks of the contract of *recipe*."""
        policy, subject = self._contract_policy, self._subjects[side]
        trace = contract.profile(policy, recipe, server, self._profiles)
        checks = contract.check_contract(
            policy, recipe.contract_for(subject.version), server.log, trace
        )
        if not isinstance(trace, Check):
            kernels = kernel_classes.classify(trace, policy.kernels)
            classes = kernel_classes.shares(kernels, "label")
            earlier = self._classes.setdefault(side, classes)
            checks = (*checks, contract.same_launches(policy, earlier, classes))
        for path in self._profiles.rglob("*.json*"):  # some tens of megabytes for each launch
            path.unlink()
        return checks

    def _result(self, spec: RunSpec, journal: MeasurementJournal, runner: Runner) -> Result:
        options, begun, decision = self._options, journal.begun, runner.decision
        series, machine = runner.series, spec.machine
        cells = paired_differences.cell_results(
            self.cells, journal.measurements, runner.blocks, series, decision
        )
        stopped: Reason | None = None
        state: State = "not-run"
        says = f"{len(journal.launches)} launches were measured; nothing is judged"
        if runner.stopped:
            state, stopped = runner.stopped
            says = f"{stopped.message} ({stopped.reference})"
        elif self._kind == "gate":
            state = (decision and decision.state) or "inconclusive"
            says = decision.message if decision else "no block is complete"
        added = (*options.flag, *(f"{name}={value}" for name, value in options.variable))
        return Result(
            self._kind,
            state,
            says,
            self._subjects["candidate"],
            cells,
            tuple(runner.measurements),
            baseline=self._subjects.get("baseline"),
            stopped=stopped,
            culprits=decision.culprits if decision else (),
            recipe=options.recipe,
            model=options.serve.name if options.serve else "",
            quantization=self._recipe.model.quantization if self._recipe else "",
            added=added if self._recipe else (),
            stack=self._context.project.stack,
            host={**ladder.host_facts(), **machine.firmware()},
            margin=max((each.bounds.margin for each in series if runner.rule), default=0.0),
            alpha=runner.rule.alpha if runner.rule else 0.0,
            attempt=begun.attempt,
            blocks=spec.blocks,
            generator=spec.generator.name,
            conditions=tuple(self._conditions(spec)),
            bandwidth=machine.bandwidth,
            policy=self.digest,
            began=begun.at,
            seconds=time.time() - begun.at,
        )
