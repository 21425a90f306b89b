"""From a question to its result: the generator is qualified, the machine heated and looked at, the course run, and what came of it kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from sparkwright.bench.load import metrology, vllmrs
from sparkwright.bench.load.metrology import MetrologyPolicy
from sparkwright.bench.load.order import Generator
from sparkwright.bench.machine import conditions
from sparkwright.bench.machine.policy import MachinePolicy
from sparkwright.bench.machine.state import Machine
from sparkwright.bench.recipes import fitting, workloads
from sparkwright.bench.recipes.cells import Cell
from sparkwright.bench.server.client import Client
from sparkwright.bench.statistics.decision import Rule
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.ladder import machine_facts
from sparkwright.gates.throughput import calibration, course, summary, tracks
from sparkwright.gates.throughput.course import Course, Outcome
from sparkwright.gates.throughput.journal import Begun, Ended, Journal, Qualified
from sparkwright.gates.throughput.legs import Means
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.question import Question
from sparkwright.gates.throughput.records import Reason, Result, Subject
from sparkwright.gates.throughput.steps import Steps
from sparkwright.gates.throughput.tracks import Known
from sparkwright.gates.throughput.world import Real

Subjects = tuple[Subject, Subject | None]

#: Seconds after which an interrupted session's heat and proof of the generator no longer count.
STALE = 600.0


class Answer:
    """
    One question, answered once by `result`.

    Args:
        generator: What makes the load; the pinned vllm-rs where none is given.

    Raises:
        file-invalid: A policy is not valid. UsageError: There is no such workload.
    """

    def __init__(self, context: RunContext, question: Question, generator: Generator | None = None) -> None:
        self._context, self._question = context, question
        gates = context.project.root / "ci" / "gates"
        self.policy = strict_yaml.load(gates / "throughput.yaml", ThroughputPolicy)
        self._machine_policy = strict_yaml.load(gates / "machine.yaml", MachinePolicy)
        self._metrology = strict_yaml.load(gates / "metrology.yaml", MetrologyPolicy)
        self._workloads = workloads.load(context.project.root)
        named = question.workloads or (question.recipe.workloads if question.recipe else (self.policy.workloads,))
        cells = self._workloads.cells(*named)
        self.cells = cells if question.kind == "bench" or any(cell.primary for cell in cells) else tuple(map(_deciding, cells))
        self._generator = generator or vllmrs.obtain(context)
        self._proof: tuple[str, ...] = ()
        self._steps = Steps(question.model, self.policy.roofline_least)
        self._rule = Rule(self.policy.margin, self.policy.alpha, self.policy.least, self.policy.most)
        self.digest = sha256_bytes(canonical((self.policy, self._machine_policy, self._metrology, self.cells)))

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
            for advice in fitting.check(self._context.project.root, question.recipe, question.model, servers=servers):
                console.note(f"{question.recipe.name}: {advice.says}")
        python = question.candidate.python if question.candidate else None
        subjects = self._subjects()
        store = self._context.store
        with Machine(self._machine_policy, store, python=python) as machine, self._journal(machine, *subjects) as journal:
            aa = calibration.stored(store, machine.fingerprint(), self._about(subjects[0]))
            known = calibration.known(aa, self.policy.calibration) if question.kind == "gate" else {}
            outcome = self._ready(machine, journal) or self._run(machine, journal, subjects, known)
            found = self._found(machine, journal, subjects, known, outcome)
            # What the machine spoiled goes on where it was, once the machine is better.
            if not (outcome.stopped and outcome.stopped.reference in (*conditions.REASONS, course.UNSTEADY)):
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
    def _journal(self, machine: Machine, candidate: Subject, baseline: Subject | None) -> Iterator[Journal]:
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

    def _ready(self, machine: Machine, journal: Journal) -> Outcome | None:
        """Look at the machine, heat it, and qualify the generator; return an outcome only where nothing may be measured."""
        past, question = journal.past, self._question
        proof = past.qualified
        fresh = proof is not None and proof.boot == _boot() and 0 <= time.time() - max(proof.at, *(leg.began for leg in past.legs)) < STALE
        if not fresh:
            machine.preheat(self._machine_policy.preheat if question.preheat is None else question.preheat)
        if reasons := machine.settle(proof.normal if proof and fresh else None):
            return Outcome(past.legs, past.closed, None, reasons[0])
        if fresh and proof:
            self._proof = proof.says
            return None
        with console.step(f"qualify {self._generator.name}"):
            checks = metrology.qualify(self._generator, self._metrology)
        self._proof = tuple(f"{check.name}: {check.message}" for check in checks)
        journal.add(Qualified(_boot(), time.time(), self._proof, machine.normal))
        wrong = next((check for check in checks if check.state != "pass"), None)
        return Outcome(past.legs, past.closed, None, Reason(wrong.reason, wrong.message)) if wrong else None

    def _run(self, machine: Machine, journal: Journal, subjects: Subjects, known: Mapping[str, Known]) -> Outcome:
        question, policy = self._question, self.policy
        candidate, baseline = subjects
        asked = Course(
            self.cells, self._rule if baseline else None, question.resident, policy.quads, self._most,
            journal.past.begun.seed, self._machine_policy.discards + 1, known, policy.waits, whole=question.kind == "calibration",
        )  # fmt: skip
        launches = question.launches({"candidate": candidate.version, "baseline": baseline.version if baseline else ""})
        means = Means(
            self._generator, machine, policy, question.served_name, question.model, question.texts, self._steps.of, machine.bandwidth(),
            self._workloads.rule, self._machine_policy.cooldown,
        )  # fmt: skip
        return course.run(asked, Real(means, launches, self._logs, question.url), journal)

    def _about(self, candidate: Subject) -> dict[str, str]:
        return calibration.about(self._model, candidate.version, self._question.resident, self.policy.quads, self._generator.name)

    def _found(self, machine: Machine, journal: Journal, subjects: Subjects, known: Mapping[str, Known], outcome: Outcome) -> Result:
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
            cells=self._steps.ceilings(summary.cells(self.cells, outcome, known, baseline is not None), machine.bandwidth()),
            legs=outcome.legs, culprits=outcome.decision.culprits if outcome.decision else (),
            recipe=question.recipe.name if question.recipe else "", model=question.model.name if question.model else question.served_name,
            quantization=question.quantization, stack=self._context.project.stack, host={**machine_facts(), **machine.fingerprint()},
            margin=policy.margin if baseline else 0.0, alpha=policy.alpha if baseline else 0.0, blocks=self._most,
            quads=policy.quads, generator=self._generator.name, qualified=notes, bandwidth=machine.bandwidth(),
            calibration=calibration.shown(aa, self.cells, known), policy=self.digest, began=journal.past.begun.at,
            seconds=time.time() - journal.past.begun.at, resumed=journal.past.resumed,
        )  # fmt: skip

    def _known_here(self, known: Mapping[str, Known]) -> dict[str, Known]:
        """Return what is known of the series that decide here."""
        return {name: known[name] for cell in self.cells for name in tracks.names(cell) if name in known}


def _deciding(cell: Cell) -> Cell:
    """Return *cell* with the metrics that decide where nobody said which: times of one request alone, and the rate of many."""
    return msgspec.structs.replace(cell, primary=("tpot", "ttft") if cell.concurrency == 1 else ("rate",))


def _boot() -> str:
    """Return what names this run of the machine; another one after a reset."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "unknown"
