"""
One night: the reference from the stock wheel and the gates, in order, until there is a verdict or
the time is spent.

Each finished gate is stored in the night's folder, which is named by the wheel, the recipe, the
policies, the model, the stock wheel and the packages of both environments. After a kill the same
command continues behind it, as long as its verdict is the one beside the wheel. The reference is of
the stock wheel alone, so the next wheel of ours takes it, too.
"""

import math
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sparkwright import __version__
from sparkwright.audit import wheel as wheels
from sparkwright.bench import results
from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes import preflight, recipe as recipes, workloads
from sparkwright.bench.records import Metric
from sparkwright.bench.server import warm_pack, wheel_identity
from sparkwright.client.environment import Marker, installed_at
from sparkwright.client.records import WarmPack
from sparkwright.core import pages
from sparkwright.core.console import console, duration
from sparkwright.core.files import content_key, read_json, sha256_file
from sparkwright.core.process import CACHES
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.gates import soak, throughput
from sparkwright.gates.core import ladder, policy
from sparkwright.gates.core.builder import (
    GATE_NEEDS,
    PACE,
    TASK,
    GateBuilder,
    GateNeeds,
    questions_s,
)
from sparkwright.gates.core.server_under_test import (
    GateOptions,
    Pace,
    launch_plan,
    machine_facts,
)
from sparkwright.gates.core.verdict import ORDER, Check, Ladder, Verdict, worst

#: The steps that are no gates, and what they do.
ENVIRONMENTS, REFERENCE = "environments", "reference"
TITLES: Mapping[str, str] = {
    ENVIRONMENTS: "install our wheel, and the stock wheel with the same other packages",
    REFERENCE: "start the stock wheel, and record what the gates compare with",
    **ladder.GATES,
}
#: The steps and the gates, in their order.
STEPS = (ENVIRONMENTS, *ladder.UNSERVED, REFERENCE, *ladder.SERVED)
#: Seconds of both environments, and of a start beside the reading of the weights, as
#: `GateNeeds.rehearsed_s`.
ENVIRONMENTS_S, START_S = 180.0, 75.0
#: What the command line leaves out.
DEFAULTS = GateOptions()
#: How much longer the gates behind a soak may take than their estimates.
SLACK = 1.05
#: The file of the finished gates in a night's folder, and that of the warm pack's record.
FINISHED, PACK = "finished.json", "pack.json"


def gate_seconds(
    root: Path,
    policies: policy.GatePolicies,
    pace: Pace,
    decides: Mapping[str, tuple[Metric, ...]],
    seats: int,
    gate: str,
    options: GateOptions = DEFAULTS,
    *,
    resident: bool = True,
) -> float:
    """
    Return the seconds of *gate* with a server of that *pace*; of G7 those after its load.

    Args:
        decides: As of the recipe.
        seats: Requests that the server takes at a time.
        options: With the profile, the task and the workload.
        resident: Whether there is room for two servers.
    """
    if gate == "G8":
        rules = policies.throughput
        cells = workloads.load(root).cells(*(options.workload or [rules.workloads]))
        deciding = workloads.deciding(cells, decides, seats)
        return throughput.estimate(rules, pace, deciding, resident=resident)
    return GATE_NEEDS[gate].rehearsed_s + questions_s(gate, policies, pace, options, seats)


def reference_seconds(
    policies: policy.GatePolicies,
    pace: Pace,
    seats: int,
    gates: Collection[str],
    options: GateOptions = DEFAULTS,
) -> float:
    """Return the seconds of the reference for *gates*; arguments as of `gate_seconds`."""
    seconds = pace.start_s
    if "G7" in gates:
        seconds += soak.stock_seconds(policies.soak)
    # Gates that compare with the same file ask the same questions.
    for gate in {GATE_NEEDS[name].recorded: name for name in gates}.values():
        seconds += questions_s(gate, policies, pace, options, seats)
    return seconds


def assumed_pace(
    weights: float, disk: float = 1.0, decode: float = 40.0, prefill: float = 4000.0
) -> Pace:
    """
    Return the pace of a model on a Spark before it is measured, which is an assumption.

    Args:
        weights: Gigabytes. *disk*: gigabytes that are read in a second.
        decode, prefill: Tokens of an answer and of a prompt in a second (8,192 in 2.07 s: seed
            report 000).
    """
    return Pace(weights / disk + START_S, prefill, decode, 2.0)


def _packages(python: Path) -> list[str]:
    """
    Return the packages in the environment of *python*, of ours their contents, too; none if there
    is no such environment.
    """
    if not python.exists():
        return []
    site = wheel_identity.site_packages(python)
    versions = sorted(
        f"{each.name} {each.version}" for each in metadata.distributions(path=[str(site)])
    )
    return [*versions, *wheel_identity.environment_contents(site).values()]


#: Checks that the answer names of a gate; the others are further down.
NAMED = 3


class NightStep(msgspec.Struct, frozen=True):
    """
    A step of a night.

    Attributes:
        message: One sentence: what was made, or why it is no pass.
        seconds: How long it took. *expected_s*: the estimate before.
        verdict: Of a gate; None for other steps.
    """

    name: str
    state: State
    message: str
    seconds: float = 0.0
    expected_s: float = 0.0
    verdict: Verdict | None = None


def state_of(steps: Sequence[NightStep]) -> State:
    """Return the worst state of all gates; one that *steps* leave out is not-run."""
    states: dict[str, State] = dict.fromkeys(ladder.GATES, "not-run")
    for step in steps:
        if step.name in states:
            states[step.name] = step.state
    return worst(states.values())


def answer(
    recipe: str, steps: Sequence[NightStep], requested: Sequence[str], host: Mapping[str, str]
) -> str:
    """
    Return whether every gate passed for *recipe*, where and in which attempt, or what is missing.

    Whether that counts for a release is a matter of its policy, which gates do not know.

    Args:
        requested: The gates that the night has.
    """
    if state_of(steps) == "pass":
        last = max(step.verdict.attempt for step in steps if step.verdict)
        gpu = host.get("gpu", "none")
        return f"Verified on {gpu}, attempt {last}: every gate passed for {recipe}."
    return f"Not verified for {recipe}: {'; '.join(_missing(steps, requested))}."


def _missing(steps: Sequence[NightStep], requested: Sequence[str]) -> Iterator[str]:
    """Yield each cause that keeps the wheel from being verified, with its gates."""
    for step in steps:
        if step.name not in ladder.GATES and step.state == "fail":
            yield f"{step.name} could not be made ({step.message})"
    causes: dict[str, list[str]] = {}
    for state in ORDER[:-1]:
        for step in steps:
            if step.verdict and step.verdict.state == state:
                cause = f"{state} ({'; '.join(unmet(step.verdict)[:NAMED])})"
                causes.setdefault(cause, []).append(step.name)
    finished = {step.name for step in steps}
    for name in ladder.GATES:
        if name not in finished:
            cause = "not run yet" if name in requested else "not asked for"
            causes.setdefault(cause, []).append(name)
    for cause, names in causes.items():
        yield f"{', '.join(names)} {cause}"


def unmet(verdict: Verdict) -> list[str]:
    """Return the checks in the state of *verdict*, with their reasons; that it is a pass."""
    if verdict.state == "pass":
        return ["every check that decides passed"]
    texts = []
    for check in verdict.checks:
        if check.required and check.state == verdict.state:
            # The row of the step that failed has the message.
            short = check.name != ladder.STOPPED[0].name or check.reason in (
                ladder.STEP_FAILED,
                ladder.UNREACHABLE,
            )
            texts.append(f"{check.name if short else check.message}: {check.reason}")
    return texts


def render_page(**values: Any) -> str:
    """Return the page: one file, without scripts. The template names the *values*."""
    template = pages.environment("sparkwright.gates.core").get_template("night.html")
    return template.render(
        gates=ladder.GATES, version=__version__, duration=duration, view=results, **values
    )


def passed_sources(policies: policy.GatePolicies, verdicts: Iterable[Verdict]) -> Verdict | None:
    """
    Return the pass of the sources (G1) among the *verdicts* of a wheel; None without one. No night
    repeats it, as it depends on neither machine nor packages.
    """
    wanted = "G1", "pass", policies.digest("G1")
    for verdict in verdicts:
        if (verdict.gate, verdict.state, verdict.policy) == wanted:
            return verdict
    return None


class Night:
    """
    The night of a wheel and a recipe.

    Args:
        options: The wheel, the model in *serve*, the recipe; and, if the user names one, the
            reference that is used instead of the one that is recorded.
        stock: The sha256 of the stock wheel.
        pythons: Those of our environment and of the stock one, which may not be made yet.
        hours: The budget of this run; None for none.
        keep_going: Also run the gates after a failure.

    Raises:
        file-invalid: What is finished, a policy or the wheel's file of verdicts cannot be read.
        UsageError: There is no such recipe.
    """

    def __init__(
        self,
        context: RunContext,
        options: GateOptions,
        stock: str,
        pythons: tuple[Path, Path],
        *,
        hours: float | None = None,
        keep_going: bool = False,
    ) -> None:
        assert options.wheel
        assert options.serve
        self._context, self._options = context, options
        self._keep_going, self._host = keep_going, ladder.host_facts()
        self._began = time.monotonic()
        self._hours = hours
        self._deadline = self._began + 3600 * hours if hours else math.inf
        self._policies = policy.load(context.project.root)
        self._recipe = recipes.load(context.project.root, options.recipe)
        self._subject, self._stock = wheels.read_subject(options.wheel), stock
        self._model, self._pythons = options.serve, pythons
        self._resident = preflight.both_fit(self._recipe, options.original or self._model)
        self._names = [name for name in ladder.GATES if name in (options.only or ladder.GATES)]
        self._served = [name for name in self._names if name in ladder.SERVED]
        #: The gates for which the reference is recorded; none if the user names it.
        self._comparing = [
            name for name in self._names if GATE_NEEDS[name].recorded and not options.against
        ]
        #: The pace of our server; None until it has started.
        self._own_pace: Pace | None = None
        #: The pack that our servers start from; None until one has left it.
        self._pack: WarmPack | None = None
        #: The check that gates report whose file of the reference was not recorded.
        self._unrecorded: Check | None = None
        self._find_finished()

    def _find_finished(self) -> None:
        """Find the folders that belong to this night alone, and the gates that it has finished."""
        options, store = self._options, self._context.store
        ours, stock = map(_packages, self._pythons)
        model, settings = model_digest(self._model), (options.flag, options.variable)
        compared = model_digest(options.original) if options.original else model
        texts = sha256_file(options.texts) if options.texts and options.texts.exists() else ""
        shared = {
            "recipe": self._recipe,
            "policies": self._policies,
            "compared": compared,
            "stock wheel": self._stock,
            "stock packages": stock,
            "settings": settings,
            "task": options.task,
            "profile": options.profile,
            "machine": machine_facts(self._host),
        }
        recorded = store.root / "references" / content_key("reference", shared)[:16]
        self.reference = options.against or recorded
        inputs = {
            "wheel": self._subject.sha256,
            "packages": ours,
            "workload": options.workload,
            "texts": texts,
            "model": model,
            "server user": options.server_user,
            **shared,
        }
        self._folder = store.folder("night", content_key("night", inputs)[:16])
        #: The warm pack, from the first passing gate of our server on.
        self._archive = self._folder / self._beside(f"{self._recipe.name}.pack.tar.zst").name
        self._complete = self.reference / f"complete-{'-'.join(self._comparing)}"
        finished = self._folder / FINISHED
        steps = read_json(finished, dict[str, NightStep]) if finished.exists() else {}
        verdicts = ladder.wheel_verdicts(self._context.output, self._subject.sha256)
        # A step is not finished if its verdict was moved away, or replaced by a later attempt.
        self._steps = {name: step for name, step in steps.items() if step.verdict in verdicts}
        passed = passed_sources(self._policies, verdicts)
        if passed and "G1" in self._names:
            step = NightStep("G1", "pass", "it passed before", verdict=passed)
            self._steps.setdefault("G1", step)

    # The plan.

    @property
    def _order(self) -> list[str]:
        """The steps of this night in their order."""
        steps = {ENVIRONMENTS, *self._names}
        if self._comparing:
            steps.add(REFERENCE)
        return [name for name in STEPS if name in steps]

    @property
    def _measured_pace(self) -> Pace | None:
        """The pace of the stock wheel's server; None if it was not measured yet."""
        path = self.reference / PACE
        return read_json(path, Pace) if path.exists() else None

    @property
    def _pace(self) -> Pace:
        """The pace of our server, else of the stock wheel's, else assumed by the model's bytes."""
        weights = sum(path.stat().st_size for path in self._model.glob("*.safetensors")) / 1e9
        return self._own_pace or self._measured_pace or assumed_pace(weights)

    def estimate(self, name: str) -> tuple[float, str]:
        """Return the seconds that the step *name* takes, and where that comes from."""
        if name == ENVIRONMENTS:
            done = all(map(Path.exists, self._pythons))
        elif name == REFERENCE:
            done = self._complete.exists()
        else:
            done = name in self._steps
        if done:
            return 0.0, "done"
        if name == ENVIRONMENTS:
            return ENVIRONMENTS_S, "docs/rehearsal"
        source = "this machine" if self._measured_pace else "a Spark, assumed"
        seats = self._recipe.plan.max_num_seqs
        if name == REFERENCE:
            return reference_seconds(
                self._policies, self._pace, seats, self._comparing, self._options
            ), source
        seconds = self._gate_seconds(name)
        # G8 counts its own starts.
        if not self._own_pace and name == self._first_unfinished and name != "G8":
            seconds += self._pace.start_s
        if name == "G7":
            load = self._recipe.soak_seconds or self._policies.soak.seconds
            shortest = self._policies.soak.shortest if self._hours else load
            return min(load, shortest) + seconds, source
        return seconds, source if name in ladder.SERVED else "docs/rehearsal"

    def _gate_seconds(self, name: str) -> float:
        """Return the estimated seconds of the gate *name*; G8 counts both servers."""
        paces, seconds = [self._pace], 0.0
        if name == "G8" and self._measured_pace:
            paces.append(self._measured_pace)
        for pace in paces:
            seconds += gate_seconds(
                self._context.project.root,
                self._policies,
                pace,
                self._recipe.decides,
                self._recipe.plan.max_num_seqs,
                name,
                self._options,
                resident=self._resident,
            )
        return seconds / len(paces)

    @property
    def _first_unfinished(self) -> str:
        """The first gate of our server that is not finished; empty if all are."""
        return next((name for name in self._served if name not in self._steps), "")

    def plan(self) -> list[tuple[str, str, float, str]]:
        """Return each step, what it does, its seconds, and where they come from."""
        return [(name, TITLES[name], *self.estimate(name)) for name in self._order]

    def show_plan(self) -> None:
        """Print the plan in minutes, and when it ends."""
        rows, total = list[tuple[str, ...]](), 0.0
        for name, title, seconds, source in self.plan():
            rows.append((name, title, f"{seconds / 60:.1f}", source))
            total += seconds
        console.table(
            f"{self._recipe.name}: what the night does",
            ("step", "what it does", ">minutes", "by"),
            rows,
            result=True,
        )
        limit = f"; --hours {self._hours:g}" if self._hours else ""
        end = time.strftime("%H:%M", time.localtime(time.time() + total))
        dirty = (
            "; seven more rounds of answers in G4 if one is dirty" if "G4" in self._names else ""
        )
        console.result(f"about {total / 60:.0f} minutes, until {end}{limit}{dirty}")

    # The run.

    def run(self, stock: Path) -> None:
        """
        Run each step that is not finished, and write the page after it.

        Both environments are made by then.

        Args:
            stock: The stock wheel.
        """
        self._find_finished()
        python, stock_python = self._pythons
        options, store = replace(self._options, python=python), self._context.store
        assert options.wheel
        stack, beside = self._context.project.stack, options.wheel.parent
        file = ladder.VerdictFile(store, self._context.output, self._subject, stack, beside)
        # G0 to G2 need no server, only the wheel, its sources and (G2) its environment.
        self._climb(
            replace(options, serve=None, recipe=""),
            [name for name in self._names if name in ladder.UNSERVED],
            file,
        )
        if self._comparing:
            self._record(
                replace(
                    options,
                    wheel=stock,
                    python=stock_python,
                    serve=options.original or options.serve,
                    original=None,
                )
            )
            options = replace(options, against=self.reference)
        options = replace(options, baseline=stock, baseline_python=stock_python)
        self._climb_served(options, file)
        self._save(ended=True)
        self._write_page()

    def _reason_not_to_begin(self, name: str) -> Check | None:
        """Return why the step *name* is not done: an earlier failure, what it needs, or time."""
        for step in self._steps.values():
            if (
                step.name in ladder.GATES
                and step.state in ("fail", "invalid")
                and not self._keep_going
            ):
                message = f"{step.name} is {step.state}, and the ladder stops there"
                return ladder.stopped(message, "earlier-failed")
        # A soak can do without the stock wheel, but hours are not spent where that does not serve.
        file = soak.LOAD if name == "G7" else GATE_NEEDS.get(name, GateNeeds()).required
        file = file.replace(TASK, self._options.task)
        if self._unrecorded and file and not (self.reference / file).exists():
            return self._unrecorded
        seconds, left = self.estimate(name)[0], max(0.0, self._deadline - time.monotonic())
        if name == REFERENCE and not self._measured_pace:
            # As long as the pace is assumed, only the start of the stock wheel has to fit into the
            # time.
            seconds = self._pace.start_s
        if seconds <= left:
            return None
        message = f"{name} takes about {duration(seconds)}, and {duration(left)} are left"
        return ladder.stopped(message, "budget-spent")

    def _record(self, options: GateOptions) -> None:
        """Complete the reference from the stock wheel, and print the plan again by its pace."""
        began, expected = time.monotonic(), self.estimate(REFERENCE)[0]
        blocked = self._reason_not_to_begin(REFERENCE)
        try:
            if not blocked:
                options = replace(options, only=tuple(self._names))
                with GateBuilder(self._context, options, self._host) as builder:
                    for path in builder.record(self.reference):
                        if path.name == PACE:
                            self.show_plan()
                            if blocked := self._reason_not_to_begin(REFERENCE):
                                break
            state: State = "not-run" if blocked else "pass"
            if not blocked:
                self._context.store.write(self._complete, b"")
        except Exception as error:
            state = "fail"
            blocked = ladder.step_failed(error)
        self._unrecorded = blocked
        message = blocked.message if blocked else "every file is there"
        self._finish(NightStep(REFERENCE, state, message, time.monotonic() - began, expected))

    def _climb(self, options: GateOptions, names: Sequence[str], file: ladder.VerdictFile) -> None:
        """Run each of the gates *names* that is not finished, or write why it cannot begin."""
        if not names:
            return
        with GateBuilder(self._context, replace(options, only=tuple(names)), self._host) as builder:
            for name in names:
                if name in self._steps:
                    console.note(f"{name}: {self._steps[name].state}, not repeated")
                    continue
                began, expected = time.monotonic(), self.estimate(name)[0]
                blocked = self._reason_not_to_begin(name)
                builder.left_s = self.left_s(name)
                try:
                    gate = builder.gate(name, blocked)
                except Exception as error:
                    gate = builder.gate(name, ladder.step_failed(error))
                (verdict,) = builder.climb([gate], file).verdicts
                message = "; ".join(unmet(verdict))
                if self._pack and options.caches and verdict.measured:
                    message += self._count_made(self._pack, options.caches, builder.server.start_s)
                self._finish(
                    NightStep(
                        name, verdict.state, message, time.monotonic() - began, expected, verdict
                    )
                )
                # The pace of a server that does not answer would be waited for.
                if name in ladder.SERVED and name != "G8" and verdict.state != "invalid":
                    self._own_pace = self._own_pace or builder.pace()
                console.note(f"about {self._behind_s(name) / 60:.0f} minutes remain")

    def left_s(self, name: str) -> float:
        """Return the seconds that the gate *name* may take; later steps have the rest."""
        after_load = self._gate_seconds(name) if name == "G7" else 0.0
        return self._deadline - time.monotonic() - SLACK * self._behind_s(name) - after_load

    def _behind_s(self, name: str) -> float:
        """Return the estimated seconds of the gates behind the gate *name*."""
        behind = self._names[self._names.index(name) + 1 :]
        return sum(self.estimate(other)[0] for other in behind)

    def _finish(self, step: NightStep) -> None:
        """Add a step, and write the page."""
        console.note(f"{step.name}: {step.state}: {step.message}")
        self._steps[step.name] = step
        self._save()
        self._write_page()

    def _save(self, *, ended: bool = False) -> None:
        """Store the gates that are not repeated; of a night that *ended*, only the passes."""
        lasting_steps = dict[str, NightStep]()
        for name, step in self._steps.items():
            verdict = step.verdict
            lasts = verdict and verdict.measured and not ladder.is_transient(verdict)
            if lasts and (step.state == "pass" or not ended):
                lasting_steps[name] = step
        self._context.store.write(self._folder / FINISHED, msgspec.json.encode(lasting_steps))

    # The warm pack.

    def _climb_served(self, options: GateOptions, file: ladder.VerdictFile) -> None:
        """
        Run the gates of our server: the first one without caches, and the others with the warm pack
        of what that left. A night that makes none has the caches of the environment.

        Raises:
            disk-full: There is no room for the pack; the night continues when there is.
        """
        names, first, marker = list(self._served), self._first_unfinished, self._find_pack()
        # Compiled files hold the path of their cache, so it is in a temporary folder, which tells
        # nothing of this machine; the pack lies elsewhere than what it was made of.
        with tempfile.TemporaryDirectory(prefix="warm-", ignore_cleanup_errors=True) as folder:
            cold, warm = Path(folder, "cold"), Path(folder, "pack")
            if marker and not self._pack and first not in ("", "G8"):
                warm_pack.give(cold, options.server_user)
                self._climb(replace(options, caches=cold), [first], file)
                names.remove(first)
                if self._steps[first].state == "pass" and self._own_pace:
                    self._collect(cold, marker, self._own_pace.start_s)
                self._own_pace = None
            if self._pack:
                warm_pack.unpack(self._archive, self._pack.unpacked, warm / CACHES)
                warm_pack.give(warm, options.server_user)
                options = replace(options, caches=warm)
            self._climb(options, names, file)

    def _find_pack(self) -> Marker | None:
        """
        Find the pack that this night has already. Return our environment if one can be made of it:
        it is a release's, and its servers run as this user, or we are root.
        """
        gives, record = not (self._options.server_user and os.geteuid()), self._folder / PACK
        marker = installed_at(self._pythons[0].parent.parent) if gives else None
        if marker and record.exists() and self._archive.exists():
            pack = read_json(record, WarmPack)
            self._pack = pack if pack.sha256 == sha256_file(self._archive) else None
        return marker

    def _collect(self, root: Path, marker: Marker, cold_s: float) -> None:
        """
        Make the pack, for what `serve` starts, of what a server left in *root*, which took *cold_s*
        to start.
        """
        python, recipe = self._pythons[0], self._recipe
        plan = launch_plan(replace(self._options, python=python), recipe, python, (), gated=False)
        with console.step("the warm pack of what the start compiled"):
            size, tables = warm_pack.collect(root, self._archive)
        self._pack = WarmPack(
            name=self._archive.name,
            size=self._archive.stat().st_size,
            sha256=sha256_file(self._archive),
            key=warm_pack.pack_key(plan, recipe.name, model_digest(self._model), marker),
            unpacked=size,
            tables=tables,
            cold_s=round(cold_s, 1),
            warm_s=0.0,
            compiled=0,
            tuned=0,
        )
        self._context.store.write(self._folder / PACK, msgspec.json.encode(self._pack))

    def _count_made(self, pack: WarmPack, root: Path, start_s: float) -> str:
        """
        Return what servers that started from *pack* in *root* compiled and tuned nevertheless, and
        keep it with the seconds of the first start, if there was one.
        """
        compiled, tuned = map(len, warm_pack.additions(root))
        self._pack = replace(
            pack,
            warm_s=pack.warm_s or round(start_s, 1),
            compiled=max(pack.compiled, compiled),
            tuned=max(pack.tuned, tuned),
        )
        self._context.store.write(self._folder / PACK, msgspec.json.encode(self._pack))
        return f"; with the warm pack: {compiled} compiled, {tuned} tuned"

    def make_pack(self) -> WarmPack | None:
        """
        Put the warm pack beside the verdicts of a night that passed, and return it; None, and none
        is there, without a pass, or if no gate started from one.
        """
        record, pack = self._beside(f"{self._recipe.name}.{PACK}"), self._pack
        record.unlink(missing_ok=True)
        if not pack or not pack.warm_s or state_of(self._done) != "pass":
            return None
        self._context.store.write(record.with_name(pack.name), self._archive.read_bytes())
        self._context.store.write(record, msgspec.json.encode(pack))
        return pack

    # The page.

    @property
    def _done(self) -> list[NightStep]:
        """The finished steps in their order, those of other runs of the same night included."""
        return [self._steps[name] for name in STEPS if name in self._steps]

    @property
    def answer(self) -> str:
        """The first line of the page."""
        return answer(self._recipe.name, self._done, self._names, self._host)

    def _write_page(self) -> None:
        """Write the page of the steps so far beside the verdicts."""
        logged = ladder.read_attempts([self._context.output], self._subject.sha256)
        html = render_page(
            attempts=replace(self.ladder, attempts=tuple(logged)),
            state=state_of(self._done),
            answer=self.answer,
            recipe=self._recipe.name,
            model=self._recipe.title,
            stack=self._context.project.stack,
            wheel=self._subject.file,
            sha256=self._subject.sha256,
            stock=self._stock,
            steps=self._done,
            requested=self._names,
            result=self._result(),
            machine=self._host,
            hours=self._hours,
            seconds=time.monotonic() - self._began,
        )
        self._context.store.write(self.page, html.encode())

    @property
    def page(self) -> Path:
        """The file of the page."""
        return self._beside(f"{self._recipe.name}.html")

    def _beside(self, suffix: str) -> Path:
        """Return the file of the wheel's name with *suffix* in the output folder."""
        return self._context.output / f"{self._subject.file.removesuffix('.whl')}.{suffix}"

    def _result(self) -> results.Result | None:
        """Return the measurements of G8, if they are those of its verdict."""
        step = self._steps.get("G8")
        path = self._beside(f"{self._recipe.name}.throughput.json")
        if step and step.verdict and path.exists() and sha256_file(path) == step.verdict.evidence:
            return results.read(path)
        return None

    @property
    def ladder(self) -> Ladder:
        """The verdicts of the gates that this run has."""
        verdicts = tuple(
            step.verdict for step in self._done if step.verdict and step.name in self._names
        )
        return Ladder(self._context.project.stack, self._subject, verdicts)
