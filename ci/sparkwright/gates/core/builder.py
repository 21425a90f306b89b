"""The gates of one run, built from the command line; a gate that lacks an option does not run."""

import contextlib
import math
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.audit.report import AuditReport
from sparkwright.audit.wheel import cached_audit, read_subject
from sparkwright.bench.model import slim
from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes import preflight, recipe as recipes
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.builder import toolchain
from sparkwright.cherry_picks.effects import PromisedEffect
from sparkwright.cherry_picks.patch import DeclaredChange, load_folder
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import sha256_file
from sparkwright.core.store import locked
from sparkwright.forks.context import RunContext
from sparkwright.gates import (
    accuracy,
    contract,
    device,
    dirty_text,
    generation,
    logprobs,
    numerics,
    soak,
    throughput,
    wheel_audit,
)
from sparkwright.gates.core import ladder, policy
from sparkwright.gates.core.server_under_test import (
    GateOptions,
    Pace,
    ServerUnderTest,
    launch_plan,
    measure_pace,
)
from sparkwright.gates.core.verdict import (
    Check,
    GateError,
    Ladder,
    Sample,
    failed,
    invalid,
    passed,
    worst_check,
)

#: Files in the folder of a reference, beside the sampled text and the answers to the task.
PACE = "pace.json"
OBSERVED = "observed.json"
LOGPROBS = "logprobs.json"

#: Stands for the task of G6 in the name of a file.
TASK = "{task}"


class GateNeeds(msgspec.Struct, frozen=True):
    """
    What a gate needs.

    Attributes:
        options: Of the command line, by the attributes of `GateOptions`.
        recorded: The file that the stock wheel gives it; empty if there is none.
        required: The file of the reference that it cannot do without; empty if there is none.
        rehearsed_s: Seconds of what no pace tells, from docs/rehearsal: an H100 with models of a
            few megabytes.
    """

    options: tuple[str, ...] = ()
    recorded: str = ""
    required: str = ""
    rehearsed_s: float = 0.0


#: Gate → what it needs.
GATE_NEEDS: Mapping[str, GateNeeds] = {
    "G0": GateNeeds(("wheel",), rehearsed_s=10),
    "G1": GateNeeds(rehearsed_s=7),
    "G2": GateNeeds(("wheel",), rehearsed_s=99),
    "G3": GateNeeds(("recipe", "serve"), OBSERVED),
    "G4": GateNeeds(("recipe", "serve"), dirty_text.TEXT),
    "G5": GateNeeds(("recipe", "serve", "against"), LOGPROBS, LOGPROBS),
    "G6": GateNeeds(("recipe", "serve", "against"), f"{TASK}.json", f"{TASK}.json"),
    "G7": GateNeeds(("recipe", "serve"), LOGPROBS, rehearsed_s=136),
    "G8": GateNeeds(("wheel", "recipe", "serve", "baseline"), PACE, PACE),
}


def questions_s(
    gate: str, policies: policy.GatePolicies, pace: Pace, options: GateOptions, seats: int
) -> float:
    """
    Return the seconds of the questions of *gate* to a server of that *pace*.

    G8 has none: its length follows from its workloads (`night.gate_seconds`).

    Args:
        options: With the profile and the task.
        seats: Requests that the server takes at a time.
    """
    match gate:
        case "G3":
            return contract.estimate(policies.contract, pace)
        case "G4":
            return generation.estimate(policies.generation, pace, options.profile)
        case "G5" | "G7":  # G7 asks for the distributions once more behind its load
            return logprobs.estimate(policies.logprobs, pace)
        case "G6":
            return accuracy.estimate(policies.accuracy, pace, seats, options.task)
    return 0.0


class GateBuilder(contextlib.AbstractContextManager["GateBuilder"]):
    """
    The gates of one run; leaving its ``with`` block ends the server that it started.

    Args:
        host: Facts of the machine, for references that are bound to it.

    Attributes:
        server: The server that the gates question.
        left_s: Seconds that the next gate may take, if it can be shorter.

    Raises:
        file-invalid: A policy is not valid.
        UsageError: The policy has no such profile or task.
        store-busy: Another run starts servers of the same recipe and gates in the same store.
    """

    def __init__(self, context: RunContext, options: GateOptions, host: Mapping[str, str]) -> None:
        root = context.project.root
        self._context, self._options = context, options
        self._policies = policy.load(root)
        self._recipe = recipes.load(root, options.recipe) if options.recipe else None
        _require("--profile", options.profile, self._policies.generation.profiles)
        _require("--task", options.task, self._policies.accuracy.tasks)
        self._fits = False
        self._stack = contextlib.ExitStack()
        # Gates run at the same time where the GPU has room for the servers of both; two runs of the
        # same gates with one recipe would read each other's server logs.
        name = "-".join([options.recipe or "server", *options.only])
        logs = context.store.folder("logs", "gate", name)
        if options.serve:
            self._stack.enter_context(locked(logs / "lock", f"the gates of {name}", wait=False))
        scratch = tempfile.TemporaryDirectory(
            prefix="gate-",
            dir=context.store.folder("work"),
            # Folders that the server's user made cannot be removed.
            ignore_cleanup_errors=bool(options.server_user),
        )
        self._scratch = Path(self._stack.enter_context(scratch))
        self._profiles = self._scratch / "profiles"
        if options.server_user:
            self._profiles.mkdir()
            # The server, as another user, may write its traces there and nowhere else.
            self._profiles.chmod(0o733 | stat.S_ISVTX)
            self._scratch.chmod(0o711)
        self.server = ServerUnderTest(
            options, host, logs, self._recipe, contract.profiler_flags(self._profiles)
        )
        self._stack.callback(self.server.end)
        self._host = host
        self.left_s = math.inf

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gate(self, name: str, blocked: Check | None = None) -> ladder.Gate:
        """
        Return the gate *name*, ready to run.

        Args:
            blocked: Why it cannot run, if that is known.

        Raises:
            environment-unusable, recipe-unfit, variable-refused: An environment cannot serve.
            model-missing, checkpoint-invalid: As `preflight.check`.
        """
        options = self._options
        blocked = blocked or self._lacking(name)
        if name in ladder.SERVED and not blocked:
            self._require_fit()
            self.server.plan()
        digest = ""
        if name not in ("G0", "G8"):
            digest = self._policies.digest(
                name, self._recipe, options.profile, (options.flag, options.variable)
            )
        elif not blocked:
            digest = self._audit.policy if name == "G0" else self._experiment.digest
        return ladder.Gate(
            name,
            digest,
            partial(self._result, name),
            options.recipe if name in ladder.SERVED else "",
            blocked,
            self._model if name in ladder.SERVED else "",
        )

    def _require_fit(self) -> None:
        """Require that the server has room now; once, as later it takes that room itself."""
        if self._recipe and self._options.serve and not self._fits:
            preflight.check(self._recipe, (), self._options.serve, now=True)
        self._fits = True

    def _lacking(self, name: str) -> Check | None:
        """Return which options, or floor, the gate *name* lacks; None if it has all."""
        options, needs = self._options, GATE_NEEDS[name]
        lacking = list[str]()
        for option in needs.options:
            if not getattr(options, option):
                lacking.append("a WHEEL" if option == "wheel" else f"--{option}")
        if lacking:
            return ladder.stopped(f"to run it, name {' and '.join(lacking)}", "not-asked")
        if name == "G6" and self._recipe and options.task not in self._recipe.floors:
            message = f"{options.recipe} has no floor of {options.task}"
            return ladder.stopped(message, "floor-missing")
        file = needs.required.replace(TASK, options.task)
        if file and options.against and not self._reference(file):
            return ladder.stopped(f"the reference has no {file}", "step-failed")
        return None

    def _reference(self, file: str) -> Path | None:
        """Return the path of *file* of the reference; None if it was not recorded."""
        against = self._options.against
        return against / file if against and (against / file).exists() else None

    def climb(
        self,
        gates: Sequence[ladder.Gate],
        file: ladder.VerdictFile | None,
        *,
        keep_going: bool = False,
    ) -> Ladder:
        """Run *gates*, which `gate` returned, as `ladder.climb` does."""
        options = self._options
        # The verdicts are about the wheel together with the packages that it is served with.
        site = wheel_identity.site_packages(options.python) if options.python else None
        contents = wheel_identity.environment_contents(site) if site else {}
        return ladder.climb(
            gates,
            stack=self._context.project.stack,
            wheel=read_subject(options.wheel) if options.wheel else None,
            host={**self._host, **contents},
            keep_going=keep_going,
            file=file,
        )

    @cached_property
    def _model(self) -> str:
        return model_digest(self._options.serve) if self._options.serve else ""

    def _result(self, name: str) -> ladder.GateFindings:
        """Run the gate *name*; a server that does not run, or runs another wheel, is a check."""
        if name == "G0":
            return ladder.GateFindings(wheel_audit.run(self._audit), self._audit.device_code)
        if name == "G8":
            return self._throughput()
        if name in ladder.UNSERVED:
            return ladder.GateFindings(self._run(name))
        ended = self._ended()
        # If the server does not run, G3 says why in a check of its own.
        checks = (ended,) if ended and name != "G3" else self._run(name)
        return ladder.GateFindings((*checks, self._served) if self._options.wheel else checks)

    def _run(self, name: str) -> tuple[Check, ...]:
        """Return the checks of a gate from G1 to G7."""
        options, policies, server, recipe = self._options, self._policies, self.server, self._recipe
        match name:
            case "G1":
                trees = numerics.source_trees(self._context, policies.numerics)
                headers = numerics.include_folders(toolchain.obtain(self._context))
                return numerics.run(trees, policies.numerics, headers, self._scratch / "numerics")
            case "G2" if options.wheel:
                scratch = Path(tempfile.mkdtemp(dir=self._scratch))
                return device.run(
                    policies.device, scratch, options.wheel, self._audit.target, options.python
                )
            case "G3" if recipe:
                return contract.run(
                    policies.contract,
                    recipe,
                    server.started,
                    contract.profile(policies.contract, recipe, server.started, self._profiles),
                    server.identity,
                    self._reference(OBSERVED),
                    self._declared,
                )
            case "G4":
                return self._words(quick=False)
            case "G5" if recipe and options.python and (reference := self._reference(LOGPROBS)):
                version = wheel_identity.version(options.python)
                return logprobs.run(
                    policies.logprobs,
                    server.client(),
                    reference,
                    served=server.identity,
                    announces_cache=recipe.announces_cache(version),
                    repairs=self._repairs,
                )
            case "G6" if recipe and (baseline := self._reference(f"{options.task}.json")):
                return accuracy.run(
                    policies.accuracy,
                    options.task,
                    self._context,
                    server.client(),
                    baseline,
                    identity=server.identity,
                    floor=recipe.floors[options.task],
                )
            case "G7":
                rules, client = self._soak_policy, server.client()
                least = max(rules.shortest, self.left_s)
                rules = replace(rules, seconds=min(rules.seconds, least))
                words = partial(self._words, quick=True)
                distributions = partial(self._run, "G5") if self._reference(LOGPROBS) else None
                return soak.run(
                    rules,
                    client,
                    stock=soak.reference(
                        self._reference(soak.LOAD), policies.soak, server.identity
                    ),
                    processes=server.started.processes,
                    words=words,
                    distributions=distributions,
                )
        raise AssertionError(f"{name} began without what `_lacking` requires")

    @property
    def _soak_policy(self) -> soak.SoakPolicy:
        """The policy of G7, with the duration that the recipe states."""
        rules, recipe = self._policies.soak, self._recipe
        return replace(rules, seconds=recipe.soak_seconds or rules.seconds) if recipe else rules

    def _words(self, *, quick: bool) -> tuple[Check, ...]:
        """Return the checks of G4; with *quick*, those that G7 repeats."""
        options, server, rules = self._options, self.server, self._policies.generation
        texts, answers = map(self._reference, (dirty_text.TEXT, generation.ANSWERS))
        return generation.run(
            rules,
            server.client(),
            options.profile,
            recipe=self._recipe,
            relaunch=server.without_drafts,
            stock=dirty_text.reference(texts, server.identity),
            stock_answers=dirty_text.reference(
                answers,
                server.identity,
                generation.ANSWERS_STOCK,
                generation.shape(rules, options.profile),
            ),
            quick=quick,
            # Without drafts it starts once more, and ours after that.
            deadline=time.monotonic() + self.left_s - 2 * server.start_s,
        )

    def _ended(self) -> Check | None:
        """Return why the server does not run; None if it does."""
        server = self.server.started
        if server.guard():
            return None
        # A verdict holds no path of this machine.
        console.warn(f"The server's log: {server.log}")
        return invalid(
            ladder.STOPPED[0].name, f"the server does not run: {server.failure}", server.reason
        )

    @cached_property
    def _served(self) -> Check:
        """Whether the server of the run serves the wheel that its verdicts are about."""
        return self._same_wheel("wheel-served", self._options.wheel, self._options.python)

    def _same_wheel(self, name: str, wheel: Path | None, python: Path | None) -> Check:
        """
        Return the check *name*: the environment of *python* holds exactly the files of *wheel*,
        and imports them.
        """
        assert wheel
        assert python
        plan = launch_plan(self._options, self._recipe, python, (), gated=True)
        if mismatches := wheel_identity.mismatches(python, wheel, plan.environment()):
            samples = [Sample(file, "the wheel's bytes", how) for file, how in mismatches.items()]
            message = f"{len(mismatches)} files of the environment are not the wheel's, or not used"
            # A changed environment of the stock wheel is no fault of ours.
            judge = failed if wheel == self._options.wheel else invalid
            return judge(name, message, "wheel-not-served", samples=samples)
        return passed(name, f"the environment holds every file of {wheel.name}, byte by byte")

    @cached_property
    def _declared(self) -> tuple[DeclaredChange, ...]:
        """What the patches of the stack change on purpose."""
        changes, project = list[DeclaredChange](), self._context.project
        if self._options.original:
            why = "layers of a slimmer copy have other formats than its original's"
            changes.append(DeclaredChange("kernels", "*", "", why))
        for fork in self._context.forks:
            for patch in load_folder(project.root / "forks" / project.stack / fork):
                changes += patch.changes
        return tuple(changes)

    @property
    def _promised(self) -> dict[str, PromisedEffect]:
        """The gain of a slimmer copy over its original: a share of what its bytes predict."""
        options, share = self._options, self._policies.throughput.slim_share
        if not (options.original and options.serve):
            return {}
        record = slim.read_record(options.serve, options.original)
        gain = 1 + share * (record.read_before / record.read_after - 1)
        return {"slim": PromisedEffect((options.recipe,), "tpot", 1, gain)}

    @property
    def _repairs(self) -> list[str]:
        """What patches repair of the distributions of the stock wheel."""
        return [
            change.why
            for change in self._declared
            if change.concerns("distributions", self._options.recipe)
        ]

    @cached_property
    def _audit(self) -> AuditReport:
        assert self._options.wheel
        # What the audit cannot fetch is a check that is not-run, with which nothing is published.
        return cached_audit(self._context, self._options.wheel, fetch=True)

    @cached_property
    def _experiment(self) -> throughput.Experiment:
        assert self._recipe
        return throughput.Experiment(self._context, self._options, self._policies, self._recipe)

    def _throughput(self) -> ladder.GateFindings:
        """Return the result of G8."""
        options, root = self._options, self._context.project.root
        served = (
            self._same_wheel("candidate-wheel", options.wheel, options.python),
            self._same_wheel("baseline-wheel", options.baseline, options.baseline_python),
        )
        if worst_check(served):
            return ladder.GateFindings(served)
        # Two servers and their load need the machine alone.
        self.server.end()
        result = self._experiment.result(self.left_s)
        checks = (
            *throughput.checks(result),
            *throughput.effect_checks(result, root, self._promised),
            *served,
        )
        if result.state == "not-run":
            # The file of an earlier verdict, which stays, is not replaced.
            return ladder.GateFindings(checks)
        # Kept even if the verdicts cannot be stored: hours were measured.
        path = throughput.write_result(self._context.store, self._context.output, result)
        return ladder.GateFindings(checks, evidence=sha256_file(path))

    def pace(self) -> Pace | None:
        """Return the pace of the server, with its first start; None if it did not answer."""
        with contextlib.suppress(ServerInvalid):
            if start_s := self.server.start_s:
                return measure_pace(self.server.client(), start_s)
        return None

    def record(self, folder: Path) -> Iterator[Path]:
        """
        Write what gates compare with into *folder*, and yield each file: the pace of the server,
        its distributions, sampled answers, the facts about it and its answers to the task, these
        unless the recipe has no floor for it. A file that is there is not written again; one that
        the server does not answer costs no other.

        Raises:
            measurement-invalid: The server does not answer as it should, or not twice the same, or
                its environment is not the wheel's.
            offline, source-unreachable, command-failed: The harness cannot be installed.
            recipe-unfit, model-missing, checkpoint-invalid: As `preflight.check`.
        """
        self._require_fit()
        files = [name for name in self._recorded() if not (folder / name).exists()]
        precise = folder.absolute() / "precise"
        if self._repairs and folder.name != precise.name and not precise.exists():
            console.warn(
                "A patch declares to repair distributions, and G5 needs a reference of high "
                "precision: the same model in BF16, or served by an independent path, with "
                f"gate WHEEL --serve MODEL --python PYTHON --only G5 --record {precise}"
            )
        if files:
            fault = self._ended() if self._served.state == "pass" else self._served
            if fault:
                raise GateError(
                    "measurement-invalid",
                    "The reference would name a wheel that did not answer.",
                    details=[fault.message],
                )
        faults: list[str] = []
        for name in files:
            if faults and (ended := self._ended()):
                faults.append(ended.message)
                break
            try:
                with console.step(f"record {name}"):
                    content = msgspec.json.encode(self._content(name))
            except ServerInvalid as error:
                faults.append(f"{name}: {error}")
                # Its engine may have ended; it starts again when it is used.
                log = self.server.started.log
                self.server.end()
                log = log.rename(log.with_name(f"{name}.server.log"))
                console.warn(f"The server's log: {log}")
                continue
            yield self._context.store.write(folder.absolute() / name, content)
        if faults:
            served = self._options.wheel.name if self._options.wheel else "vLLM"
            raise GateError(
                "measurement-invalid",
                f"The server of {served} did not answer as it should for the reference.",
                details=faults,
            )

    def _recorded(self) -> list[str]:
        """Return the names of the files that the gates compare with, the pace first."""
        options, recipe = self._options, self._recipe
        names = set(options.only or ladder.GATES)
        profile = self._policies.generation.profiles[options.profile]
        # Without a floor, G6 does not run.
        floor = not recipe or options.task in recipe.floors
        files = {
            PACE: True,
            LOGPROBS: names & {"G5", "G7"},
            OBSERVED: "G3" in names,
            dirty_text.TEXT: "G4" in names and not profile.no_dirty_text,
            f"{options.task}.json": "G6" in names and floor,
            generation.ANSWERS: names & {"G4", "G7"},
            soak.LOAD: "G7" in names,
        }
        return [file for file, needed in files.items() if needed]

    def _content(self, name: str) -> msgspec.Struct:
        """Return what the server under test gives for the file *name* of the reference."""
        options, policies, server = self._options, self._policies, self.server
        client, identity = server.client(), server.identity
        if name == PACE:
            return measure_pace(client, server.start_s)
        if name == LOGPROBS:
            return logprobs.record(policies.logprobs, client, identity)
        if name == OBSERVED and self._recipe:
            rules = policies.contract
            trace = contract.profile(rules, self._recipe, server.started, self._profiles)
            if isinstance(trace, Check):
                raise ServerInvalid(trace.reason, trace.message)
            return contract.observe(rules, server.started, trace, identity, options.recipe)
        if name == soak.LOAD:
            return soak.record(self._soak_policy, client, identity)
        if name == generation.ANSWERS:
            return generation.record(
                policies.generation, client, options.profile, self._recipe, identity
            )
        if name == dirty_text.TEXT:
            words = policies.generation.sized(options.profile)
            wrap = words.profiles[options.profile].wrap
            return dirty_text.record(words, client, wrap, self._recipe, identity)
        return accuracy.ask(
            self._context, options.task, policies.accuracy.task(options.task), client, identity
        )


def _require(option: str, value: str, choices: Mapping[str, object]) -> None:
    if value not in choices:
        raise UsageError(
            "usage",
            f"The policy has nothing for {option} {value}.",
            todo=f"Choose: {', '.join(choices)}.",
        )
