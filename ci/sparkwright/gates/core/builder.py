"""The gates of one run, built from the command line; a gate that lacks an option does not run."""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.audit.report import AuditReport
from sparkwright.audit.wheel import cached_audit
from sparkwright.bench.recipes import preflight
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.builder import toolchain
from sparkwright.cherry_picks import series
from sparkwright.cherry_picks.patch import DeclaredChange
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import sha256_file
from sparkwright.core.store import locked, write_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.gates import wheel_audit
from sparkwright.gates.accuracy import gate as accuracy
from sparkwright.gates.accuracy import harness
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.core import observed, policy
from sparkwright.gates.core.ladder import SERVED, STOPPED, Gate
from sparkwright.gates.core.observed import OBSERVED
from sparkwright.gates.core.server_under_test import (
    GateOptions,
    ServerUnderTest,
    launch_plan,
    model_digest,
    same_wheel,
)
from sparkwright.gates.core.verdict import UNAVAILABLE, Check, GateError, invalid, not_run
from sparkwright.gates.device import gate as device
from sparkwright.gates.generation import dirty_text
from sparkwright.gates.generation import gate as generation
from sparkwright.gates.logprobs import distributions
from sparkwright.gates.logprobs import gate as logprobs
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.soak import gate as soak
from sparkwright.gates.throughput import gate as throughput
from sparkwright.gates.throughput.experiment import Experiment

#: A file in the folder that ``--record`` writes, beside `OBSERVED` and the answers to the task.
LOGPROBS = "logprobs.json"

_SERVES = {"a model to --serve, or a --server": ("serve", "server")}
_STARTS = {"a model to --serve, and the --python of its environment": ("serve",)}
_COMPARES = {"the reference with --against": ("against",)}
#: Gate → what it needs, for people, and attributes of `GateOptions` of which any gives it.
NEEDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "G0": {"a WHEEL": ("wheel",)},
    "G2": {"a WHEEL": ("wheel",)},
    "G3": {"a --recipe": ("recipe",), **_STARTS},
    "G4": _SERVES,
    "G5": {**_SERVES, **_COMPARES},
    "G6": {**_SERVES, **_COMPARES},
    "G7": _SERVES,
    "G8": {**_STARTS, "a --baseline-python": ("baseline_python",)},
}


class GateBuilder(contextlib.AbstractContextManager["GateBuilder"]):
    """
    The gates of one run; leaving its ``with`` block ends the server that it started.

    Args:
        host: Facts of the machine, for references that are bound to it.

    Attributes:
        server: The server that the gates question.
        device_code: The wheel's device-code digest; empty until the audit has run.
        evidence: The sha256 of the file of G8's measurements; empty until G8 has run.
        left_s: Seconds that the next gate may take, if it can be shorter; None for its policy's.

    Raises:
        file-invalid, policy-unknown-check: A policy is not valid.
        recipe-unfit, not-provided, checkpoint-invalid: The model is not the recipe's checkpoint.
        store-busy: Another run starts servers of the same recipe and gates in the same store.
    """

    def __init__(self, context: RunContext, options: GateOptions, host: Mapping[str, str]) -> None:
        root = context.project.root
        self._context, self._options = context, options
        self._policies = policy.load(root)
        self._recipe = recipes.load(root, options.recipe) if options.recipe else None
        model = options.serve or options.model_folder
        if self._recipe and model:
            preflight.require_checkpoint(self._recipe, model)
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
            # Folders of another user may be left.
            ignore_cleanup_errors=bool(options.server_user),
        )
        self._scratch = Path(self._stack.enter_context(scratch))
        self._profiles = self._scratch / "profiles"
        if options.server_user:
            self._profiles.mkdir()
            # The server writes its traces there, and nothing else of this user's.
            self._profiles.chmod(0o733 | stat.S_ISVTX)
            self._scratch.chmod(0o711)
        self.server = ServerUnderTest(
            options, host, logs, self._recipe, kernel_trace.flags(self._profiles)
        )
        self._stack.callback(self.server.end)
        self.device_code, self.evidence = "", ""
        self.left_s: float | None = None

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gate(self, name: str, blocked: Check | None = None) -> Gate:
        """
        Return the gate *name*, ready to run.

        Args:
            blocked: Why it cannot run, if that is known.

        Raises:
            UsageError: The policy has no such profile or task.
            environment-unusable, recipe-unfit, variable-refused: An environment cannot serve.
        """
        options, policies = self._options, self._policies
        recipe = self._recipe.name if self._recipe and name in SERVED else ""
        lacking = [
            text
            for text, names in NEEDS.get(name, {}).items()
            if not any(getattr(options, each) for each in names)
        ]
        if name in ("G4", "G7"):
            _require("--profile", options.profile, policies.generation.profiles)
        if name == "G6":
            _require("--task", options.task, policies.accuracy.tasks)
        digest = ""
        no_floor = name == "G6" and not (self._recipe and options.task in self._recipe.floors)
        if lacking and not blocked:
            message = f"to run it, name {'; and '.join(lacking)}"
            blocked = not_run(STOPPED[0].name, message, "not-asked")
        elif no_floor and not blocked:
            subject = options.recipe or "a server without --recipe"
            message = f"{subject} has no floor of {options.task}"
            blocked = not_run(STOPPED[0].name, message, "floor-missing")
        elif name in SERVED and options.serve and not blocked:
            self.server.launch()
        if name not in ("G0", "G8"):
            settings = (options.flag, options.variable)
            digest = policies.digest(name, self._recipe, options.profile, settings)
        elif not blocked:
            digest = self._audit.policy if name == "G0" else self._experiment.digest
        return Gate(
            name,
            digest,
            partial(self._checks, name),
            recipe,
            blocked,
            (lambda: self.evidence) if name == "G8" else str,
            self._model if name in SERVED else "",
        )

    @cached_property
    def _model(self) -> str:
        folder = self._options.serve or self._options.model_folder
        return model_digest(folder) if folder else ""

    def _checks(self, name: str) -> tuple[Check, ...]:
        if name not in SERVED or name == "G8":
            return self._run(name)
        ended = self._ended() if self._options.serve else None
        # G3 reports itself why the server that we started does not run.
        checks = (ended,) if ended and name != "G3" else self._run(name)
        return (*checks, self._served) if self._options.wheel else checks

    def _run(self, name: str) -> tuple[Check, ...]:
        options, policies, server, recipe = self._options, self._policies, self.server, self._recipe
        match name:
            case "G0":
                self.device_code = self._audit.device_code
                return wheel_audit.run(self._audit)
            case "G1":
                trees = numerics.source_trees(self._context, policies.numerics)
                headers = numerics.include_folders(toolchain.obtain(self._context))
                return numerics.run(trees, policies.numerics, headers, self._scratch / "numerics")
            case "G2" if options.wheel:
                scratch = Path(tempfile.mkdtemp(dir=self._scratch))
                target = self._audit.target
                return device.run(policies.device, scratch, options.wheel, target, options.python)
            case "G3" if recipe:
                return contract.run(
                    policies.contract,
                    recipe,
                    server.started,
                    contract.profile(server.started, self._profiles),
                    server.identity,
                    options.against / OBSERVED if options.against else None,
                    self._declared,
                )
            case "G4":
                stock: dirty_text.StockText | Check = dirty_text.NOT_NAMED
                if options.against:
                    path = options.against / dirty_text.TEXT
                    stock = dirty_text.reference(path, server.identity)
                return generation.run(
                    policies.generation,
                    server.client(),
                    options.profile,
                    recipe=recipe,
                    relaunch=server.relaunched if options.serve else None,
                    stock=stock,
                )
            case "G5" if options.against:
                reference = options.against / LOGPROBS
                return logprobs.run(
                    policies.logprobs,
                    server.client(),
                    reference,
                    served=server.identity,
                    cached=self._announces_cache(),
                    repairs=[
                        change.why
                        for change in self._declared
                        if change.concerns("distributions", options.recipe)
                    ],
                )
            case "G6" if options.against and recipe:
                return accuracy.run(
                    policies.accuracy,
                    options.task,
                    self._context,
                    server.client(),
                    options.against / f"{options.task}.json",
                    identity=server.identity,
                    floor=recipe.floors[options.task],
                )
            case "G7":
                rules, client = policies.soak, server.client()
                if recipe and recipe.soak_seconds:
                    rules = replace(rules, seconds=recipe.soak_seconds)
                if self.left_s is not None:
                    shortest = min(rules.seconds, rules.shortest)
                    rules = replace(rules, seconds=max(shortest, min(rules.seconds, self.left_s)))
                words = partial(
                    generation.run, policies.generation, client, options.profile, quick=True
                )
                distributions = partial(self._run, "G5") if options.against else None
                return soak.run(
                    rules, client, pid=server.pid(), words=words, distributions=distributions
                )
            case "G8":
                return self._throughput()
        raise AssertionError(name)

    def _ended(self) -> Check | None:
        """Return why the server that we started does not run; None if it does."""
        server = self.server.started
        if server.guard():
            return None
        # A verdict holds no path of this machine.
        console.warn(f"The server's log: {server.log}")
        return invalid(STOPPED[0].name, f"the server does not run: {server.failure}", server.reason)

    @cached_property
    def contents(self) -> dict[str, str]:
        """The digests of the wheels of ours in the environment that serves."""
        python = self._options.python
        site = wheel_identity.site_packages(python) if python else None
        return wheel_identity.environment_contents(site) if site else {}

    @cached_property
    def _served(self) -> Check:
        """Whether the server of the run serves the wheel that its verdicts are about."""
        options, name = self._options, "wheel-served"
        if options.serve:
            return self._same_wheel(options.wheel, options.python, name)
        message = "what a server that was not started here is installed from cannot be seen"
        return not_run(name, message, "wheel-unseen")

    def _same_wheel(self, wheel: Path | None, python: Path | None, name: str) -> Check:
        variables = None
        if wheel and python:
            plan = launch_plan(self._options, self._recipe, python, (), gated=True)
            variables = plan.environment()
        return same_wheel(wheel, python, name, variables)

    @cached_property
    def _declared(self) -> tuple[DeclaredChange, ...]:
        """What the patches of the stack change on purpose."""
        root, stack = self._context.project.root, self._context.project.stack
        folders = [root / "forks" / stack / fork for fork in self._context.forks]
        patches = [patch for folder in folders for patch in series.load(folder)]
        return tuple(change for patch in patches for change in patch.changes)

    def _announces_cache(self) -> bool | None:
        """Return whether the recipe states a prefix cache; None without a recipe and its Python."""
        if not self._recipe or not self._options.python:
            return None
        disabled = "--no-enable-prefix-caching" in self._options.flag
        version = wheel_identity.version(self._options.python)
        return not disabled and self._recipe.announces_cache(version)

    @cached_property
    def _audit(self) -> AuditReport:
        assert self._options.wheel
        # What the gate cannot see is not-run, which publishes nothing.
        return cached_audit(self._context, self._options.wheel, fetch=True)

    @cached_property
    def _experiment(self) -> Experiment:
        return Experiment(self._context, "gate", self._options)

    def _throughput(self) -> tuple[Check, ...]:
        options = self._options
        # Two servers and their load need the machine alone.
        self.server.end()
        try:
            result = self._experiment.result(self.left_s)
        except SourceError as error:
            if error.reference not in UNAVAILABLE:
                raise
            return (not_run("legs", error.what, "generator-missing"),)
        # Kept even if the verdicts cannot be stored: hours were measured.
        self.evidence = sha256_file(
            throughput.write_result(self._context.store, self._context.output, result)
        )
        return (
            *throughput.checks(result),
            self._same_wheel(options.wheel, options.python, "candidate-wheel"),
            self._same_wheel(options.baseline, options.baseline_python, "baseline-wheel"),
        )

    def record(self, folder: Path) -> tuple[Path, ...]:
        """
        Write what gates compare with into *folder*, and return the files: the server's
        distributions, sampled answers, the facts about it and its answers to the task, these unless
        the recipe has no floor for it. A file that is there is not written again.

        Raises:
            measurement-invalid: The server does not answer as it should, or not twice the same, or
                its environment is not the wheel's.
            offline, source-unreachable, command-failed: The harness cannot be installed.
        """
        parts = {folder.absolute() / name: write for name, write in self._parts().items()}
        lacking = {path: write for path, write in parts.items() if not path.exists()}
        fault = None
        if lacking:
            fault = self._served if self._served.state != "pass" else self._ended()
        if fault:
            raise GateError(
                "measurement-invalid",
                "The reference would name a wheel that did not answer.",
                details=[fault.message],
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for path, write in lacking.items():
                with console.step(f"record {path.name}"):
                    write(path)
        except ServerInvalid as error:
            raise GateError(
                "measurement-invalid",
                f"The reference cannot be recorded: {error.message}.",
                details=[str(error)],
            ) from None
        return tuple(parts)

    def _parts(self) -> dict[str, Callable[[Path], object]]:
        """Return the files that gates compare with, and what writes each whole or not at all."""
        task, recipe = self._options.task, self._recipe
        profiles = self._policies.generation.profiles
        _require("--profile", self._options.profile, profiles)
        parts: dict[str, Callable[[Path], object]] = {}
        if self._asked("G5", "G7"):
            parts[LOGPROBS] = self._record_distributions
        if self._asked("G3"):
            parts[OBSERVED] = self._record_facts
        if self._asked("G4") and "dirty-text" not in profiles[self._options.profile].not_run:
            parts[dirty_text.TEXT] = self._record_text
        # Without a floor, G6 does not run.
        if self._asked("G6") and (recipe is None or task in recipe.floors):
            parts[f"{task}.json"] = self._record_answers
        return parts

    def _asked(self, *names: str) -> bool:
        return not self._options.only or not set(names).isdisjoint(self._options.only)

    def _record_distributions(self, path: Path) -> None:
        client, identity = self.server.client(), self.server.identity
        distributions.save(logprobs.record(self._policies.logprobs, client, identity), path)

    def _record_facts(self, path: Path) -> None:
        server, options = self.server, self._options
        trace = contract.profile(server.started, self._profiles)
        if isinstance(trace, Check):
            raise ServerInvalid(trace.reason, trace.message)
        facts = contract.observe(
            self._policies.contract, server.started, trace, server.identity, options.recipe
        )
        observed.save(facts, path)

    def _record_text(self, path: Path) -> None:
        rules, server = self._policies.generation, self.server
        wrap = rules.profiles[self._options.profile].wrap
        text = dirty_text.record(rules, server.client(), wrap, self._recipe, server.identity)
        write_file(path, msgspec.json.encode(text))

    def _record_answers(self, path: Path) -> None:
        task, server = self._options.task, self.server
        rules = self._policies.accuracy.task(task)
        result = harness.ask(self._context, task, rules, server.client(), server.identity)
        self._context.store.write(path, msgspec.json.encode(result))


def _require(option: str, value: str, choices: Mapping[str, object]) -> None:
    if value not in choices:
        raise UsageError(
            "usage",
            f"The policy has nothing for {option} {value}.",
            todo=f"Choose: {', '.join(choices)}.",
        )
