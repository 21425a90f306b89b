"""
One night: the environments, the reference from the stock wheel, and the gates, in order, until
there is a verdict or the time is spent.

Each finished step is a line of the night's journal, whose folder is named by the wheel, the recipe,
the policies, the model and the stock wheel. After a kill the same command continues behind it. The
reference is of the stock wheel alone, so the next wheel of ours takes it, too.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from sparkwright.audit import wheel as wheels
from sparkwright.bench import results
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes import workloads
from sparkwright.bench.results import Result
from sparkwright.core import strict_yaml
from sparkwright.core.console import console, duration, one_line
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import content_key, list_folder, read_json, sha256_file
from sparkwright.core.states import State
from sparkwright.core.store import append_line, read_lines
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import ladder, page, policy
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.ladder import GATES, SERVED, STOPPED, VerdictFile
from sparkwright.gates.core.observed import OBSERVED, Pace, measure_pace
from sparkwright.gates.core.page import NightReport, NightStep
from sparkwright.gates.core.server_under_test import GateOptions, model_digest
from sparkwright.gates.core.verdict import Check, Ladder, Verdict, not_run
from sparkwright.gates.throughput import gate as throughput
from sparkwright.gates.throughput.paired_differences import ThroughputPolicy

#: Steps that are no gates, and what each does.
STEPS: Mapping[str, str] = {
    "ours": "the environment of our wheel",
    "stock": "the environment of the stock wheel",
    "reference": "start the stock wheel, and record what the gates compare with",
}
#: Gates that compare with the reference.
COMPARING = ("G3", "G4", "G5", "G6", "G7")
#: Seconds of a step that neither its gate nor a run on this machine knows, from docs/rehearsal: an
#: H100 with models of a few megabytes. G7 adds its load to this.
REHEARSED: Mapping[str, float] = {
    "ours": 90, "stock": 90, "start": 75, "G0": 10, "G1": 7, "G2": 99, "G3": 41, "G4": 93,
    "G5": 112, "G6": 20, "G7": 136, "G8": 326,
}  # fmt: skip
#: The files of a night's folder, and of a reference's.
JOURNAL, PACE, COMPLETE = "journal.jsonl", "pace.json", "complete"

#: Characters of the message of a step.
LONGEST = 500

#: Where an estimate comes from.
Source = Literal["done", "this machine", "estimate of the gate", "docs/rehearsal"]


class GateEnvironment(msgspec.Struct, frozen=True):
    """The Python of an environment, and the wheel of vLLM that it was installed from."""

    python: Path
    wheel: Path


class NightLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the journal: a finished step, or the end of a night."""

    step: NightStep | None = None
    ended: bool = False


class Night:
    """
    The night of a wheel and a recipe.

    Args:
        options: The wheel, the model in *serve*, the recipe; and, if the user names them, the
            environments and the reference that are used instead of those that are made.
        stock: The sha256 of the stock wheel.
        make: Return the environment ``ours`` or ``stock``, which is made unless it is there.
        hours: The budget of this run; None for none.
        keep_going: Also run the gates after a failure.

    Raises:
        file-invalid: The journal, a policy or the wheel's file of verdicts cannot be read.
        UsageError: There is no such recipe.
    """

    def __init__(
        self,
        context: RunContext,
        options: GateOptions,
        stock: str,
        make: Callable[[str], GateEnvironment],
        *,
        hours: float | None = None,
        keep_going: bool = False,
    ) -> None:
        assert options.wheel
        assert options.serve
        self._context, self._options, self._make = context, options, make
        self._keep_going, self._host = keep_going, ladder.host_facts()
        self._began = time.monotonic()
        self._hours, self._deadline = hours, self._began + 3600 * hours if hours else None
        self._policies = policy.load(context.project.root)
        self._throughput = strict_yaml.load(
            context.project.root / "ci" / "gates" / "throughput.yaml", ThroughputPolicy
        )
        self._recipe = recipes.load(context.project.root, options.recipe)
        self._subject, self._stock = wheels.read_subject(options.wheel), stock
        model, settings = model_digest(options.serve), (options.flag, options.variable)
        machine = {name: self._host[name] for name in ("gpu", "driver", "processor")}
        shared = (self._recipe, self._policies, model, stock, settings, options.task, machine)
        self._reference = context.store.root / "references" / content_key("reference", shared)[:16]
        inputs = (self._subject.sha256, options.profile, *shared)
        self._folder = context.store.folder("night", content_key("night", inputs)[:16])
        self._names = [name for name in GATES if name in (options.only or GATES)]
        compared = [name for name in self._names if name in COMPARING]
        self._complete = self._reference / f"{COMPLETE}-{'-'.join(compared)}"
        self._steps = {} if options.fresh else self._finished()
        self._pace = self._recorded_pace()
        #: Step → why it is not done, for the gates that need it.
        self._blocked: dict[str, Check] = {}

    def _finished(self) -> dict[str, NightStep]:
        """Return the gates that are not repeated; of a night that ended, only the passes."""
        path = self._folder / JOURNAL
        lines = read_lines(path, NightLine, "journal of a night") if path.exists() else []
        steps: dict[str, NightStep] = {}
        for line in lines:
            if line.step and line.step.verdict and line.step.verdict.measured:
                steps[line.step.name] = line.step
            if line.ended:
                steps = {name: step for name, step in steps.items() if step.state == "pass"}
        return steps

    def _recorded_pace(self) -> Pace | None:
        path = self._reference / PACE
        return read_json(path, Pace) if path.exists() else None

    # The plan.

    @property
    def _needs_reference(self) -> bool:
        return not self._options.against and bool(set(self._names) & set(COMPARING))

    @property
    def _order(self) -> Iterator[str]:
        """The steps in their order."""
        served = [name for name in self._names if name in SERVED]
        yield "ours"
        yield from (name for name in self._names if name not in SERVED)
        if self._needs_reference or "G8" in self._names:
            yield "stock"
        if self._needs_reference:
            yield "reference"
        yield from served

    def estimate(self, name: str) -> tuple[float, Source]:
        """Return the seconds that the step *name* takes, and where that comes from."""
        if name in self._steps:
            return 0.0, "done"
        if name in STEPS:
            return self._estimate_step(name)
        package = "wheel_audit" if name == "G0" else f"{policy.PACKAGES[name]}.gate"
        module = importlib.import_module(f"sparkwright.gates.{package}")
        rules = getattr(self._policies, policy.PACKAGES.get(name, ""), None)
        if self._pace and name == "G8":
            loads, rules = workloads.load(self._context.project.root), self._throughput
            names = self._options.workload or (rules.workloads,)
            cells = workloads.deciding(loads.cells(*names), self._recipe.decides)
            seconds = throughput.estimate(rules, self._pace, cells, loads.rule)
            return seconds * self._correction, "estimate of the gate"
        if self._pace and hasattr(module, "estimate"):
            seconds = float(module.estimate(rules, self._pace))
            return seconds * self._correction, "estimate of the gate"
        seconds = REHEARSED[name]
        if name == "G7":
            load = self._recipe.soak_seconds or self._policies.soak.seconds
            seconds += min(load, self._policies.soak.shortest) if self._deadline else load
        return seconds, "docs/rehearsal"

    def _estimate_step(self, name: str) -> tuple[float, Source]:
        options = self._options
        if {"ours": options.python, "stock": options.baseline_python}.get(name):
            return 0.0, "done"
        if name != "reference":
            return REHEARSED[name], "docs/rehearsal"
        if self._complete.exists():
            return 0.0, "done"
        parts = sum(self.estimate(gate)[0] for gate in ("G5", "G6") if gate not in self._steps)
        if self._pace:
            return self._pace.start_s + parts, "this machine"
        return REHEARSED["start"] + parts, "docs/rehearsal"

    @property
    def _correction(self) -> float:
        """How much longer the finished gates took than their estimates."""
        steps = [step for step in self._steps.values() if step.name in SERVED and step.expected_s]
        expected = sum(step.expected_s for step in steps)
        return sum(step.seconds for step in steps) / expected if expected else 1.0

    def plan(self) -> list[tuple[str, str, float, Source]]:
        """Return each step, what it does, its seconds, and where they come from."""
        return [
            (name, STEPS.get(name) or GATES[name], *self.estimate(name)) for name in self._order
        ]

    def show_plan(self) -> None:
        """Print the plan in minutes, and when it ends."""
        steps = self.plan()
        rows = [
            (name, title, f"{seconds / 60:.1f}", source) for name, title, seconds, source in steps
        ]
        total = sum(seconds for _, _, seconds, _ in steps)
        heads = ("step", "what it does", ">minutes", "by")
        console.table(f"{self._recipe.name}: what the night does", heads, rows, result=True)
        limit = f"; --hours {self._hours:g}" if self._hours else ""
        end = time.strftime("%H:%M", time.localtime(time.time() + total))
        console.result(f"about {total / 60:.0f} minutes, until {end}{limit}")

    # The run.

    def run(self) -> NightReport:
        """Do what is not finished, write the page after each step, and return the last report."""
        self.show_plan()
        options, facts = self._options, self._host
        assert options.wheel
        stack, beside = self._context.project.stack, options.wheel.parent
        file = VerdictFile(self._context.store, self._context.output, self._subject, stack, beside)
        ours = self._environment("ours")
        own = replace(options, python=ours and ours.python)
        if early := [name for name in self._names if name not in SERVED]:
            # These look at the wheel and its sources; G2 runs in the environment.
            alone = replace(own, serve=None, recipe="", only=tuple(early))
            with GateBuilder(self._context, alone, facts) as builder:
                for name in early:
                    self._gate(builder, name, file, ["ours"] if name == "G2" else [])
        if served := [name for name in self._names if name in SERVED]:
            stock = self._environment("stock") if "stock" in self._order else None
            own = replace(
                own,
                against=options.against or self._record(stock),
                baseline=stock and stock.wheel,
                baseline_python=stock and stock.python,
            )
            with GateBuilder(self._context, own, facts) as builder:
                for name in served:
                    compares = name in ("G5", "G6") and not own.against
                    needs = ["ours", *(["reference"] if compares else [])]
                    self._gate(builder, name, file, [*needs, *(["stock"] if name == "G8" else [])])
        append_line(self._folder / JOURNAL, NightLine(ended=True))
        return self.report()

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic() if self._deadline else float("inf")

    def _environment(self, name: str) -> GateEnvironment | None:
        """Return the environment *name*; None if it cannot be made, or is not for lack of time."""
        options = self._options
        named = {
            "ours": (options.python, options.wheel),
            "stock": (options.baseline_python, options.baseline),
        }
        python, wheel = named[name]
        if python and wheel:
            return GateEnvironment(python, wheel)
        began, environment = time.monotonic(), None
        blocked = self._stopped() or self._spent(name)
        if not blocked:
            try:
                with console.step(STEPS[name]):
                    environment = self._make(name)
            except SparkwrightError as error:
                blocked = _failed(error)
        message = f"holds {environment.wheel.name}" if environment else ""
        self._add(name, message, began, blocked)
        return environment

    def _record(self, stock: GateEnvironment | None) -> Path | None:
        """Return the folder of the reference, completed; None if none is needed or can be made."""
        if not self._needs_reference:
            return None
        began, complete = time.monotonic(), self._complete
        blocked, message = None, "was recorded on this machine before"
        if not complete.exists():
            blocked = self._blocked.get("stock") or self._stopped() or self._spent("reference")
            message = "recorded"
        if stock and not blocked and not complete.exists():
            asked = tuple(self._names)
            options = replace(self._options, wheel=stock.wheel, python=stock.python, only=asked)
            try:
                with GateBuilder(self._context, options, self._host) as builder:
                    if not self._pace:
                        self._measure_pace(builder)
                    builder.record(self._reference)
                self._context.store.write(complete, b"")
            except SparkwrightError as error:
                blocked = _failed(error)
        self._add("reference", message, began, blocked)
        return None if blocked else self._reference

    def _measure_pace(self, builder: GateBuilder) -> None:
        """Start the server, measure it, and print the plan again by what was measured."""
        began = time.monotonic()
        if builder.server.started.guard():
            seconds = time.monotonic() - began
            self._pace = measure_pace(builder.server.client(), seconds)
            self._context.store.write(self._reference / PACE, msgspec.json.encode(self._pace))
            self.show_plan()

    def _stopped(self) -> Check | None:
        """Return that an earlier gate stops the ladder; None if none does."""
        for step in self._steps.values():
            if step.name in GATES and step.state in ("fail", "invalid") and not self._keep_going:
                message = f"{step.name} is {step.state}, and the ladder stops there"
                return not_run(STOPPED[0].name, message, "earlier-failed")
        return None

    def _spent(self, name: str) -> Check | None:
        """Return that too little time is left for the step *name*; None if there is enough."""
        seconds, left = self.estimate(name)[0], max(0.0, self._left_s)
        if seconds <= left:
            return None
        message = f"{name} takes about {duration(seconds)}, and {duration(left)} are left"
        return not_run(STOPPED[0].name, message, "budget-spent")

    def _gate(
        self, builder: GateBuilder, name: str, file: VerdictFile, needs: Sequence[str]
    ) -> None:
        """Run the gate *name* unless it is finished, stopped, out of time or lacks something."""
        if name in self._steps:
            console.note(f"{name}: {self._steps[name].state}, not repeated")
            return
        began, expected = time.monotonic(), self.estimate(name)[0]
        lacking = [self._blocked[need] for need in needs if need in self._blocked]
        blocked = self._stopped() or (lacking[0] if lacking else self._spent(name))
        if self._deadline:
            later = [other for other in self._names if other > name]
            builder.left_s = self._left_s - sum(self.estimate(other)[0] for other in later)
        try:
            verdict = self._climb(builder, name, file, blocked)
        except SparkwrightError as error:
            verdict = self._climb(builder, name, file, _failed(error))
        seconds = time.monotonic() - began
        message = "; ".join(page.unmet(verdict)) or "every check that decides passed"
        step = NightStep(name, verdict.state, message, seconds, expected, verdict)
        self._steps[name] = step
        append_line(self._folder / JOURNAL, NightLine(step))
        self.report()
        remaining = sum(self.estimate(other)[0] for other in self._names if other > name)
        console.note(f"about {remaining / 60:.0f} minutes remain")

    def _climb(
        self, builder: GateBuilder, name: str, file: VerdictFile, blocked: Check | None
    ) -> Verdict:
        gate = builder.gate(name, blocked)
        stored = None if blocked or self._options.fresh else file.load()
        earlier = stored and ladder.unchanged(stored.verdicts, gate, self._host)
        if earlier and earlier.state == "pass":
            console.note(f"{name}: it passed before, and nothing changed since")
            return earlier
        return ladder.climb(
            [gate],
            stack=self._context.project.stack,
            wheel=self._subject,
            device_code=lambda: builder.device_code,
            host={**self._host, **builder.contents},
            file=file,
        ).verdicts[-1]

    def _add(self, name: str, message: str, began: float, blocked: Check | None) -> None:
        """Add a step that is no gate; after a kill its result is found, and not its line."""
        state: State = "pass"
        if blocked:
            self._blocked[name] = blocked
            state = "fail" if blocked.reason == "step-failed" else "not-run"
            message = blocked.message
        console.note(f"{name}: {state}: {message}")
        self._steps[name] = NightStep(name, state, message, time.monotonic() - began)
        append_line(self._folder / JOURNAL, NightLine(self._steps[name]))
        self.report()

    # The page.

    def report(self) -> NightReport:
        """Return the report so far, and write its page beside the verdicts."""
        observed = self._reference / OBSERVED
        report = NightReport(
            recipe=self._recipe.name,
            title=self._recipe.title,
            stack=self._context.project.stack,
            wheel=self._subject.file,
            sha256=self._subject.sha256,
            stock=self._stock,
            steps=tuple(self._steps[name] for name in self._order if name in self._steps),
            asked=tuple(self._names),
            result=self._result(),
            observed=msgspec.json.decode(observed.read_bytes()) if observed.exists() else {},
            pace=self._pace,
            host=self._host,
            hours=self._hours,
            seconds=time.monotonic() - self._began,
        )
        self._context.store.write(self.page, page.render(report).encode())
        return report

    @property
    def page(self) -> Path:
        """The file of the page."""
        name = self._subject.file.removesuffix(".whl")
        return self._context.output / f"{name}.{self._recipe.name}.html"

    def _result(self) -> Result | None:
        """Return the measurements of G8, if they are those of its verdict."""
        step = self._steps.get("G8")
        evidence = step.verdict.evidence if step and step.verdict else ""
        for path in list_folder(self._context.output, "*.throughput.json") if evidence else ():
            if sha256_file(path) == evidence:
                return results.read(path)
        return None

    @property
    def ladder(self) -> Ladder:
        """The verdicts of the night."""
        steps = [self._steps[name] for name in self._names if name in self._steps]
        verdicts = tuple(step.verdict for step in steps if step.verdict)
        return Ladder(self._context.project.stack, self._subject, verdicts)


def _failed(error: SparkwrightError) -> Check:
    """Return that a step could not be done."""
    message = one_line(" ".join((f"{error.reference}: {error.what}", *error.details[:3])), LONGEST)
    return not_run(STOPPED[0].name, message, "step-failed")
