"""From a question to its result: the generator is qualified, the machine heated and looked at, the course run, and what came of it kept."""

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
from sparkwright.bench.load.load_spec import LoadError, LoadGenerator
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
from sparkwright.bench.statistics.decision import Rule
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.ladder import machine_facts
from sparkwright.gates.throughput import calibration, paired_differences, runner, summary
from sparkwright.gates.throughput.abba_schedule import Resident
from sparkwright.gates.throughput.decode_traffic import DecodeTraffic
from sparkwright.gates.throughput.journal import Begun, Ended, Journal, Qualified
from sparkwright.gates.throughput.measurement import MeasurementContext
from sparkwright.gates.throughput.paired_differences import NoiseModel
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.records import Kind, Result, Subject
from sparkwright.gates.throughput.runner import RunOutcome, RunSpec
from sparkwright.gates.throughput.server_pair import ServerPair

Subjects = tuple[Subject, Subject | None]

#: What every measurement needs: a cache that has seen a prompt makes its time to first token vanish (vllm #54227).
MEASURED = ("--no-enable-prefix-caching",)
#: Seconds after which an interrupted session's heat and proof of the generator no longer count.
STALE = 600.0


class Environment(msgspec.Struct, frozen=True):
    """An environment with vLLM: its *python*, and the *wheel* that it was installed from, where that is known."""

    python: Path
    wheel: Path | None = None

    def subject(self, stack: str) -> Subject:
        """
        Return what is measured there.

        Raises:
            environment-unusable: There is no vLLM.
        """
        version = wheel_identity.version(self.python)
        try:
            local = Version(version).local or ""
        except InvalidVersion:
            local = ""
        ours = local.startswith("spark.")
        label = f"{'' if ours else 'stock '}vLLM {version}"
        if self.wheel is None:
            return Subject(label, version=version, stack=stack if ours else "")
        return Subject(label, self.wheel.name, sha256_file(self.wheel), version, stack if ours else "")


class ExperimentSpec(msgspec.Struct, frozen=True):
    """
    What is to be measured, and against what.

    Attributes:
        candidate, baseline: Environments; no candidate where a server runs at *url*, and no baseline where nothing is compared.
        model: Folder of the model. *name*: under which it is served; empty for the model's own.
        recipe: How it is served; None for *flags* and *variables* alone, which are added to a recipe's.
        workloads: Names of `workloads.yaml`, or of cells; empty for the recipe's, or the policy's.
        texts: A file of real prompts.
        resident: See `places`.
        blocks: Of a bench (launches) or a calibration; 0 for what the policy says.
        fresh: Begin anew, whatever an interrupted journal holds.
        preheat: Seconds; None for what the policy says.
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
    resident: Resident = "turns"
    blocks: int = 0
    fresh: bool = False
    preheat: float | None = None

    def __post_init__(self) -> None:
        if bool(self.candidate) == bool(self.url):
            raise UsageError("usage", "Name an environment to serve from, or a server.", todo="--python FILE --serve DIR, or --server URL.")
        if self.candidate and not self.model:
            raise UsageError("usage", "An environment serves a model.", todo="Name the folder of the model with --serve DIR.")
        if self.kind in ("gate", "calibration") and not (self.candidate and self.baseline):
            raise UsageError(
                "usage", "A comparison starts both servers by itself.", todo="Name the environments of candidate and baseline."
            )

    def launches(self, versions: Mapping[Side, str]) -> dict[Side, LaunchPlan]:
        """
        Return how each side is started; *versions* are those of vLLM.

        Raises:
            recipe-unfit: The recipe says nothing of that release.
        """
        sides: dict[Side, Environment | None] = {"baseline": self.baseline, "candidate": self.candidate}
        return {side: self._launch(one, versions[side]) for side, one in sides.items() if one}

    def _launch(self, environment: Environment, version: str) -> LaunchPlan:
        assert self.model is not None
        if self.recipe:
            plain = recipes.launch(self.recipe, version, environment.python, self.model)
        else:
            plain = LaunchPlan(environment.python, self.model)
        flags = (*plain.flags, *self.flags)
        added = tuple(flag for flag in MEASURED if flag not in flags)
        variables = {**(GATED if self.kind in ("gate", "calibration") else {}), **plain.variables, **self.variables}
        return replace(plain, flags=(*flags, *added), variables=variables, name=self.served_name)

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        return self.name or (recipes.served_name(self.recipe, self.model) if self.model else "model")

    @property
    def quantization(self) -> str:
        """As the recipe says it."""
        return self.recipe.model.quantization if self.recipe else ""


class Experiment:
    """
    One question, answered once by `result`.

    Args:
        generator: What makes the load; the pinned vllm-rs where none is given.

    Raises:
        file-invalid: A policy is not valid. UsageError: There is no such workload.
    """

    def __init__(self, context: RunContext, question: ExperimentSpec, generator: LoadGenerator | None = None) -> None:
        self._context, self._question = context, question
        gates = context.project.root / "ci" / "gates"
        self.policy = strict_yaml.load(gates / "throughput.yaml", ThroughputPolicy)
        self._machine_policy = strict_yaml.load(gates / "machine.yaml", MachinePolicy)
        self._generator_policy = strict_yaml.load(gates / "load_generator.yaml", GeneratorPolicy)
        self._workloads = workloads.load(context.project.root)
        named = question.workloads or (question.recipe.workloads if question.recipe else (self.policy.workloads,))
        cells = self._workloads.cells(*named)
        self.cells = cells if question.kind == "bench" or any(cell.primary for cell in cells) else tuple(map(_deciding, cells))
        self._generator = generator or vllm_bench.obtain(
            context.project.root, self._generator_policy.stack, context.store, offline=context.offline
        )
        self._proof: tuple[str, ...] = ()
        self._steps = DecodeTraffic(question.model, self.policy.roofline_least)
        self._rule = Rule(self.policy.margin, self.policy.alpha, self.policy.least, self.policy.most)
        self.digest = sha256_bytes(canonical((self.policy, self._machine_policy, self._generator_policy, self.cells)))

    def result(self) -> Result:
        """
        Measure, and return what came of it; the journal of the same question is continued where it was interrupted.

        Raises:
            SparkwrightError: Something cannot be set up: no such environment, no room on the disk, a recipe for another vLLM, another
                measurement at the same time.
        """
        question = self._question
        if question.recipe and question.model:
            servers = 2 if question.resident == "both" and question.baseline else 1
            for advice in preflight.check(question.recipe, self._workloads, question.model, servers=servers):
                console.note(f"{question.recipe.name}: {advice.message}")
        if question.texts:
            for name in {cell.texts for cell in self.cells if cell.texts}:
                self._workloads.texts[name].verify(question.texts)
        python = question.candidate.python if question.candidate else None
        subjects = self._subjects()
        store = self._context.store
        with MachineMonitor(self._machine_policy, store, python=python) as machine, self._journal(machine, *subjects) as journal:
            aa = calibration.stored(store, machine.fingerprint(), self._about(subjects[0]))
            known = calibration.known(aa, self.policy.calibration) if question.kind == "gate" else {}
            outcome = self._ready(machine, journal) or self._run(machine, journal, subjects, known)
            found = self._found(machine, journal, subjects, known, outcome)
            # What the machine spoiled goes on where it was, once the machine is better.
            if not (outcome.stopped and outcome.stopped.reference in (*state_checks.REASONS, runner.UNSTEADY)):
                journal.add(Ended(found.state))
        return found

    @property
    def _logs(self) -> Path:
        return self._context.store.folder("logs", "throughput")

    def _subjects(self) -> tuple[Subject, Subject | None]:
        question, stack = self._question, self._context.project.stack
        if question.candidate is None:
            return Subject(question.url, version=Client(question.url, question.served_name).version()), None
        return question.candidate.subject(stack), question.baseline.subject(stack) if question.baseline else None

    @contextlib.contextmanager
    def _journal(self, machine: MachineMonitor, candidate: Subject, baseline: Subject | None) -> Iterator[Journal]:
        """Yield the journal of this question."""
        question = self._question
        serving = (question.flags, question.variables, question.resident, question.blocks, question.url)
        asked = {
            "candidate": candidate.sha256 or candidate.label, "baseline": (baseline.sha256 or baseline.label) if baseline else "",
            "model": self._model, "recipe": question.recipe.name if question.recipe else "", "serving": sha256_bytes(canonical(serving)),
        }  # fmt: skip
        key = f"{question.kind}-{sha256_bytes(canonical(asked))[:16]}"
        machines = {f"host: {name}": value for name, value in machine.fingerprint().items()}
        about = {**asked, "policy": self.digest, "generator": self._generator.name, **machines}
        begun = Begun(sha256_bytes(canonical(about)), about, seed=time.time_ns() % 2**31, at=time.time())
        # Two measurements at a time would measure each other.
        with self._context.store.lock("measuring", wait=False):
            path = self._logs / f"{key}.jsonl"
            if question.fresh:
                path.unlink(missing_ok=True)
            with Journal(path, begun) as journal:
                if journal.refused:
                    console.warn(f"An unfinished measurement is not continued, as other than then: {', '.join(journal.refused)}.")
                elif journal.past.legs:
                    console.note(f"going on behind {len(journal.past.legs)} legs and {len(journal.past.closed)} whole blocks")
                yield journal

    @property
    def _most(self) -> int:
        """Blocks that are measured at most."""
        plain = {"gate": self.policy.most, "calibration": self.policy.calibration}
        return self._question.blocks or plain.get(self._question.kind, self.policy.launches)

    @cached_property
    def _model(self) -> str:
        """What names the model: a digest of its files, or its name at a server that runs."""
        question = self._question
        return server_under_test.model_digest(question.model) if question.model else question.served_name

    def _ready(self, machine: MachineMonitor, journal: Journal) -> RunOutcome | None:
        """Look at the machine, heat it, and qualify the generator; return an outcome only where nothing may be measured."""
        past, question = journal.past, self._question
        proof = past.qualified
        fresh = proof is not None and proof.boot == _boot() and 0 <= time.time() - max(proof.at, *(leg.began for leg in past.legs)) < STALE
        if not fresh:
            machine.preheat(self._machine_policy.preheat if question.preheat is None else question.preheat)
        if reasons := machine.settle():
            return RunOutcome(past.legs, past.closed, None, reasons[0])
        if fresh and proof:
            self._proof = proof.says
            return None
        try:
            self._proof = (check_generator(self._generator, self._generator_policy),)
        except LoadError as error:
            return RunOutcome(past.legs, past.closed, None, Reason(error.reason, error.message))
        journal.add(Qualified(_boot(), time.time(), self._proof, machine.normal))
        return None

    def _run(self, machine: MachineMonitor, journal: Journal, subjects: Subjects, known: Mapping[str, NoiseModel]) -> RunOutcome:
        question, policy = self._question, self.policy
        candidate, baseline = subjects
        asked = RunSpec(
            self.cells, self._rule if baseline else None, question.resident, policy.quads, self._most,
            journal.past.begun.seed, self._machine_policy.discards + 1, known, policy.waits, whole=question.kind == "calibration",
        )  # fmt: skip
        launches = question.launches({"candidate": candidate.version, "baseline": baseline.version if baseline else ""})
        means = MeasurementContext(
            self._generator, machine, policy, question.served_name, question.model, question.texts, self._steps.of, machine.bandwidth,
            self._workloads.rule, self._machine_policy.cooldown,
        )  # fmt: skip
        return runner.run(asked, ServerPair(means, launches, self._logs, question.url), journal)

    def _about(self, candidate: Subject) -> dict[str, str]:
        return calibration.about(self._model, candidate.version, self._question.resident, self.policy.quads, self._generator.name)

    def _found(self, machine: MachineMonitor, journal: Journal, subjects: Subjects, known: Mapping[str, NoiseModel], outcome: RunOutcome) -> Result:
        question, policy, (candidate, baseline) = self._question, self.policy, subjects
        aa = calibration.stored(self._context.store, machine.fingerprint(), self._about(candidate))
        if question.kind == "calibration" and not outcome.stopped:
            today = time.strftime("%Y-%m-%d", time.gmtime())
            aa = aa.with_(self.cells, outcome.legs, sorted(outcome.blocks), today)
            calibration.keep(self._context.store, aa)
            known = calibration.known(aa, policy.calibration)
        state, says = summary.state(question.kind, outcome)
        notes = (*self._proof, *machine.notes)
        if baseline:
            notes = (*notes, calibration.supports(self._known_here(known), self._rule))
            console.note(notes[-1])
        return Result(
            kind=question.kind, state=state, says=says, candidate=candidate, baseline=baseline,
            cells=self._steps.ceilings(summary.cells(self.cells, outcome, known, baseline is not None), machine.bandwidth),
            legs=outcome.legs, culprits=outcome.decision.culprits if outcome.decision else (),
            recipe=question.recipe.name if question.recipe else "", model=question.model.name if question.model else question.served_name,
            quantization=question.quantization, stack=self._context.project.stack, host={**machine_facts(), **machine.fingerprint()},
            margin=policy.margin if baseline else 0.0, alpha=policy.alpha if baseline else 0.0, blocks=self._most,
            quads=policy.quads, generator=self._generator.name, qualified=notes, bandwidth=machine.bandwidth,
            calibration=calibration.shown(aa, self.cells, known), policy=self.digest, began=journal.past.begun.at,
            seconds=time.time() - journal.past.begun.at, resumed=journal.past.resumed,
        )  # fmt: skip

    def _known_here(self, known: Mapping[str, NoiseModel]) -> dict[str, NoiseModel]:
        """Return what is known of the series that decide here."""
        return {name: known[name] for cell in self.cells for name in paired_differences.names(cell) if name in known}


def _deciding(cell: WorkloadCell) -> WorkloadCell:
    """Return *cell* with the metrics that decide where nobody said which: times of one request alone, and the rate of many."""
    return msgspec.structs.replace(cell, primary=("tpot", "ttft") if cell.concurrency == 1 else ("rate",))


def _boot() -> str:
    """Return what names this run of the machine; another one after a reset."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "unknown"
