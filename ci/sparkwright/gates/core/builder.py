"""The gates of one run, built from the command line; a gate that lacks an option does not run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sparkwright.audit.report import AuditReport
from sparkwright.audit.wheel import cached_audit
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import RecipeError
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.builder import toolchain
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.forks.context import RunContext
from sparkwright.gates import wheel_audit
from sparkwright.gates.accuracy import gate as accuracy
from sparkwright.gates.accuracy import result as results
from sparkwright.gates.accuracy import runner
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.gate import ObservedServer
from sparkwright.gates.contract.kernel_trace import BackendTable
from sparkwright.gates.core import policy
from sparkwright.gates.core.ladder import SERVED, Gate
from sparkwright.gates.core.server_under_test import GateOptions, ServerUnderTest, same_wheel
from sparkwright.gates.core.verdict import Check, GateError, not_run
from sparkwright.gates.device import gate as device
from sparkwright.gates.generation import gate as generation
from sparkwright.gates.logprobs import distributions
from sparkwright.gates.logprobs import gate as logprobs
from sparkwright.gates.logprobs.distributions import ReferenceInvalid
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.soak import gate as soak
from sparkwright.gates.throughput import gate as throughput
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec

#: The backend table of a recipe, in the folder that ``--record`` writes.
BACKENDS = "backends.json"

_SERVER = "--serve a model, or name a --server"
#: Gate → the check that reports that an option is missing, and the option.
_MISSING: Mapping[str, tuple[str, str]] = {
    "G0": ("audit", "name a WHEEL"),
    "G3": (
        "log",
        "name a --recipe, and --serve a model or name a --server and its --server-log",
    ),
    "G4": ("streams", _SERVER),
    "G5": ("reference", "name a server, and the reference with --against"),
    "G6": ("baseline", "name a server, and the reference with --against"),
    "G7": ("requests", _SERVER),
    "G8": ("baseline", "--serve a model from --python, and name a --baseline-python"),
}

Run = Callable[[], tuple[Check, ...]]


class GateBuilder:
    """
    The gates of one run; leaving its ``with`` block ends the server that it started.

    Args:
        host: Facts of the machine, for references that are bound to it.

    Attributes:
        server: The server that the gates question.

    Raises:
        file-invalid, policy-unknown-check: A policy is not valid.
    """

    def __init__(self, context: RunContext, options: GateOptions, host: Mapping[str, str]) -> None:
        root = context.project.root
        self._context, self._options, self._host = context, options, dict(host)
        self._policies = policy.load(root)
        self._recipe = recipes.load(root, options.recipe) if options.recipe else None
        self._stack = contextlib.ExitStack()
        scratch = tempfile.TemporaryDirectory(prefix="gate-", dir=context.store.folder("work"))
        self._scratch = Path(self._stack.enter_context(scratch))
        folder = self._folder("server")
        self._profiles = folder / "profiles"
        flags = kernel_trace.flags(self._profiles)
        self.server = ServerUnderTest(options, host, folder, self._recipe, flags)
        self._stack.callback(self.server.end)

    def __enter__(self) -> GateBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gate(self, name: str) -> Gate:
        """
        Return the gate *name*, ready to run.

        Raises:
            UsageError: The policy has no such recipe, profile or task.
            recipe-unfit: The policy has no floor for the model.
        """
        table = policy.declared(name)
        recipe = self._recipe.name if self._recipe and name in SERVED else ""
        if not self._possible(name):
            check, option = _MISSING[name]
            row = not_run(check, f"to run it, {option}", "not-asked")
            return Gate(name, "", table, tuple, recipe, row)
        build: Mapping[str, Callable[[], Run]] = {
            "G0": lambda: lambda: wheel_audit.run(self._audit),
            "G1": lambda: self._numerics,
            "G2": lambda: self._device,
            "G3": lambda: self._contract,
            "G4": self._generation,
            "G5": lambda: self._logprobs,
            "G6": self._accuracy,
            "G7": self._soak,
            "G8": lambda: self._throughput,
        }
        run = build[name]()
        if name in SERVED and name != "G8" and self._options.wheel:
            return Gate(name, self._digest(name), table, lambda: (*run(), self._served), recipe)
        return Gate(name, self._digest(name), table, run, recipe)

    def _possible(self, name: str) -> bool:
        """Return whether the command line names everything that the gate *name* needs."""
        options = self._options
        return bool(
            {
                "G0": options.wheel,
                "G3": self._recipe and (options.serve or (options.server and options.server_log)),
                "G4": options.serves,
                "G5": options.serves and options.against,
                "G6": options.serves and options.against,
                "G7": options.serves,
                "G8": options.serve and options.python and options.baseline_python,
            }.get(name, True)
        )

    def _digest(self, name: str) -> str:
        if name == "G0":
            return self._audit.policy
        if name == "G8":
            return self._experiment.digest
        options = self._options
        if name not in SERVED:
            return self._policies.digest(name)
        digest = self._policies.digest(name, self._recipe, options.profile)
        further = (options.flag, options.variable)
        # A server with other settings than the recipe's is judged by something else than the recipe.
        return sha256_bytes(canonical((digest, further))) if any(further) else digest

    def _folder(self, name: str) -> Path:
        folder = self._scratch / name
        folder.mkdir()
        return folder

    @cached_property
    def _audit(self) -> AuditReport:
        assert self._options.wheel
        return cached_audit(self._context, self._options.wheel)

    @cached_property
    def _served(self) -> Check:
        """Whether the server of the run serves the wheel that its verdicts are about."""
        options, name = self._options, "wheel-served"
        if options.serve:
            return same_wheel(options.wheel, options.python, name)
        message = "what a server that was not started here is installed from cannot be seen"
        return not_run(name, message, "wheel-unseen")

    def device_code(self) -> str:
        """Return the wheel's device-code digest; empty until the audit has run."""
        return self._audit.device_code if "_audit" in self.__dict__ else ""

    def _numerics(self) -> tuple[Check, ...]:
        policy = self._policies.numerics
        trees = numerics.source_trees(self._context, policy)
        headers = numerics.include_folders(toolchain.obtain(self._context))
        return numerics.run(trees, policy, headers, self._folder("numerics"))

    def _device(self) -> tuple[Check, ...]:
        wheel = self._options.wheel
        return device.run(
            self._policies.device,
            self._folder("device"),
            wheel=wheel,
            target=self._audit.target if wheel else "",
            python=self._options.python,
        )

    def _contract(self) -> tuple[Check, ...]:
        options, recipe = self._options, self._recipe
        assert recipe
        remote = options.against.startswith(("http://", "https://"))
        baseline = Path(options.against, BACKENDS) if options.against and not remote else None
        rules, identity = self._policies.contract, self.server.identity
        return contract.run(rules, recipe, self._observed(), identity, baseline)

    def _observed(self) -> ObservedServer:
        """Return the server as G3 judges it: its log, environment and profile."""
        options = self._options
        if options.serve:
            server = contract.observe(self.server.started, self._profiles)
            return replace(server, trace=options.trace or server.trace)
        assert options.server_log
        return ObservedServer(options.server_log, self.server.client(), options.trace)

    @property
    def _profile(self) -> str:
        """The kind of model for G4, which G7 runs again."""
        profile, rules = self._options.profile, self._policies.generation
        if profile not in rules.profiles:
            what = f"generation.yaml has no profile {profile!r}."
            raise UsageError("usage", what, todo=f"Choose: {', '.join(rules.profiles)}.")
        return profile

    def _generation(self) -> Run:
        rules, profile = self._policies.generation, self._profile
        relaunch = self.server.relaunched if self._options.serve else None
        return lambda: generation.run(
            rules, self.server.client(), profile, recipe=self._recipe, relaunch=relaunch
        )

    def _logprobs(self) -> tuple[Check, ...]:
        return logprobs.run(
            self._policies.logprobs,
            self.server.client(),
            self._against("logprobs.json", Client),
            served=self.server.identity,
        )

    def _against(self, name: str, client: Callable[[str], Any]) -> Any:
        """Return the reference: *client* of its URL, or the file *name* of its folder."""
        against = self._options.against
        remote = against.startswith(("http://", "https://"))
        return client(against) if remote else Path(against, name)

    def _accuracy(self) -> Run:
        rules, task = self._policies.accuracy, self._options.task
        if task not in rules.tasks:
            what = f"accuracy.yaml has no task {task!r}."
            raise UsageError("usage", what, todo=f"Choose a --task: {', '.join(rules.tasks)}.")
        floor = self._recipe.floors.get(task) if self._recipe else None
        if floor is None:
            recipe = self._options.recipe or "a server without --recipe"
            raise RecipeError(
                "recipe-unfit",
                f"G6 has no floor of {task} for {recipe}.",
                todo="Measure a trusted wheel and add the floor to `floors` in the recipe; or "
                "choose another --task or --recipe, or --only without G6.",
            )
        return lambda: accuracy.run(
            rules,
            task,
            self._context,
            self.server.url,
            self._against(f"{task}.json", str),
            identity=self.server.identity,
            floor=floor,
            model=self.server.name,
        )

    def _soak(self) -> Run:
        words, distributions = soak.REPEATED
        rules, profile = self._policies.generation, self._profile

        def answers() -> tuple[Check, ...]:
            return generation.run(rules, self.server.client(), profile, quick=True)

        again: dict[str, Run] = {words: answers}
        if self._possible("G5"):
            again[distributions] = self._logprobs
        return lambda: soak.run(
            self._policies.soak,
            self.server.url,
            self._context.store.folder("logs") / "soak.jsonl",
            model=self.server.name,
            pid=self.server.pid(),
            again=again,
        )

    @cached_property
    def _experiment(self) -> Experiment:
        options = self._options
        assert options.python
        assert options.baseline_python
        return Experiment(
            self._context,
            ExperimentSpec(
                "gate",
                Environment(options.python, options.wheel),
                Environment(options.baseline_python, options.baseline),
                model=options.serve,
                name=options.model,
                recipe=self._recipe,
                flags=options.flag,
                variables=dict(options.variable),
                workloads=options.workload,
                texts=options.texts,
                mode="concurrent" if options.at_once else "sequential",
                fresh=options.fresh,
                preheat=options.preheat,
            ),
        )

    def _throughput(self) -> tuple[Check, ...]:
        options = self._options
        # Two servers and their load need the machine alone.
        self.server.end()
        result = self._experiment.result()
        # Kept even if the verdicts cannot be stored: hours were measured.
        throughput.write_result(self._context.store, self._context.output, result)
        return (
            *throughput.checks(result),
            same_wheel(options.wheel, options.python, "candidate-wheel"),
            same_wheel(options.baseline, options.baseline_python, "baseline-wheel"),
        )

    def record(self, folder: Path) -> tuple[Path, ...]:
        """
        Write the server's distributions and answers into *folder*, and return the files.

        Raises:
            measurement-invalid: The server does not answer as it should, or not twice the same, or
                its environment is not the wheel's.
            offline, source-unreachable, command-failed: The harness cannot be installed.
        """
        server, task, rules = self.server, self._options.task, self._policies
        if self._options.serve and self._served.state != "pass":
            what = "The reference would name a wheel that did not answer."
            raise GateError("measurement-invalid", what, details=[self._served.message])
        folder.mkdir(parents=True, exist_ok=True)
        scored, answers = folder / "logprobs.json", folder / f"{task}.json"
        try:
            with console.step("record the distributions"):
                known = logprobs.record(rules.logprobs, server.client(), server.identity)
                distributions.save(known, scored)
            with console.step(f"record the answers to {task}"):
                harness_task = rules.accuracy.tasks[task]
                made = runner.ask(
                    self._context, task, harness_task, server.url, server.identity, server.name
                )
                results.save(made, answers)
        except (ServerInvalid, ReferenceInvalid) as error:
            what = f"The reference cannot be recorded: {error.message}."
            raise GateError("measurement-invalid", what, details=[error.reason]) from None
        return *self._record_backends(folder / BACKENDS), scored, answers

    def _record_backends(self, path: Path) -> tuple[Path, ...]:
        """Write the backend table of the recipe's server to *path*, if the server is ours."""
        recipe, python = self._recipe, self._options.python
        if not recipe or not self._options.serve or not python:
            return ()
        try:
            trace = kernel_trace.read(kernel_trace.record(self.server.client(), self._profiles))
        except ServerInvalid as error:
            what = f"The backend table cannot be recorded: {error.message}."
            raise GateError("measurement-invalid", what) from None
        own = contract.contract_of(recipe, wheel_identity.version(python))
        kernels = kernel_trace.kernels(trace, self._policies.contract, own)
        kernel_trace.save(BackendTable(self.server.identity, recipe.name, kernels), path)
        return (path,)
