"""From what a person names — a wheel, an environment, a server — to gates that can run; what nobody named is a row that did not run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sparkwright.audit.report import AuditReport
from sparkwright.audit.wheel import cached_audit
from sparkwright.bench.errors import RecipeError
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.builder import toolchain
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.gates import wheel_audit as audited
from sparkwright.gates.accuracy import gate as tasks
from sparkwright.gates.accuracy import result as results
from sparkwright.gates.accuracy import runner
from sparkwright.gates.accuracy.gate import AccuracyPolicy
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.gate import ContractPolicy, Running
from sparkwright.gates.contract.kernel_trace import ProfileInvalid
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.errors import GateError
from sparkwright.gates.core.ladder import Gate
from sparkwright.gates.core.options import GateOptions
from sparkwright.gates.core.server_under_test import ServerUnderTest, patient
from sparkwright.gates.core.verdict import Check, not_run
from sparkwright.gates.device import gate as device
from sparkwright.gates.device.gate import DevicePolicy
from sparkwright.gates.generation import gate as words
from sparkwright.gates.generation.policy import GenerationPolicy
from sparkwright.gates.logprobs import gate as distributions
from sparkwright.gates.logprobs import reference
from sparkwright.gates.logprobs.reference import LogprobsPolicy, ReferenceInvalid
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.numerics import trees
from sparkwright.gates.numerics.gate import NumericsPolicy
from sparkwright.gates.soak import gate as soak
from sparkwright.gates.soak.gate import SoakPolicy
from sparkwright.gates.throughput import gate as throughput
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec
from sparkwright.gates.throughput.records import Result

TITLE = "what a gate was given"

REASONS: Mapping[str, str] = {
    "not-asked": "Nobody named what the check needs: a wheel, a server, its log, a reference. The row says which option names it.",
    "wheel-not-served": "The environment that serves holds other files than the wheel, so no answer says anything of it. Install the "
    "wheel into a fresh environment.",
    "source-not-here": "The source tree cannot be made here, as its source is not reachable or not locked.",
}

Policy = TypeVar("Policy")


class GateBuilder:
    """
    The gates of one run; leave its ``with`` block to end what it started.

    Args:
        host: Facts of the machine, for references that are bound to it.

    Attributes:
        throughput: What G8 measured, once it has run.
    """

    def __init__(self, context: RunContext, inputs: GateOptions, host: Mapping[str, str]) -> None:
        self._context, self._inputs, self._host = context, inputs, dict(host)
        self._stack = contextlib.ExitStack()
        self.throughput: Result | None = None
        self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gate-", dir=context.store.folder("work"))))
        root = context.project.root
        self._recipe = recipes.load(root, inputs.recipe) if inputs.recipe in recipes.names(root) else None
        folder = self._folder("server")
        self._profiles = folder / "profiles"
        self.server = ServerUnderTest(inputs, host, folder, self._stack, self._recipe, kernel_trace.flags(self._profiles))

    def __enter__(self) -> GateBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gate(self, name: str) -> Gate:
        """
        Return the gate *name*, ready to run.

        Raises:
            file-invalid: Its policy is not valid.
            UsageError: The policy has no such recipe, profile or task.
        recipe-unfit: The policy has no floor for the model.
        """
        return {
            "G0": self._bytes, "G1": self._numerics, "G2": self._device, "G3": self._contract,
            "G4": self._words, "G5": self._distributions, "G6": self._tasks, "G7": self._soak, "G8": self._throughput,
        }[name]()  # fmt: skip

    def _policy(self, name: str, record: type[Policy]) -> tuple[Policy, str]:
        policy = strict_yaml.load(self._context.project.root / "ci" / "gates" / f"{name}.yaml", record)
        return policy, sha256_bytes(canonical(policy))

    def _folder(self, name: str) -> Path:
        folder = self._scratch / name
        folder.mkdir()
        return folder

    def _bytes(self) -> Gate:
        wheel = self._inputs.wheel
        if wheel is None:
            return _unasked("G0", "audit", "name a WHEEL")
        return Gate("G0", self._report.policy, lambda: audited.run(self._report))

    @cached_property
    def _report(self) -> AuditReport:
        assert self._inputs.wheel is not None
        return cached_audit(self._context, self._inputs.wheel)

    def device_code(self) -> str:
        """Return the wheel's device-code digest; empty without a wheel."""
        return self._report.device_code if self._inputs.wheel else ""

    def _numerics(self) -> Gate:
        policy, sha256 = self._policy("numerics", NumericsPolicy)

        def run() -> tuple[Check, ...]:
            made, missing = self._trees(policy)
            headers = trees.includes(toolchain.obtain(self._context))
            return (*numerics.run(made, policy, headers, self._folder("numerics")), *missing)

        return Gate("G1", sha256, run)

    def _trees(self, policy: NumericsPolicy) -> tuple[dict[str, Path], list[Check]]:
        """Return the folders of the source trees, patched and rewritten, and a row for each that cannot be made here."""
        made: dict[str, Path] = {}
        missing = []
        for fork in policy.forks:
            try:
                made |= trees.made(self._context, (fork,))
            except SourceError as error:
                if error.reference not in {"source-unlocked", "source-unreachable", "source-unresolved"}:
                    raise
                missing.append(not_run(f"{fork}-tree", error.what, "source-not-here"))
        return made, missing

    def _device(self) -> Gate:
        policy, sha256 = self._policy("device", DevicePolicy)

        def run() -> tuple[Check, ...]:
            cuda = toolchain.obtain(self._context).cuda if self._host.get("gpu", "none") != "none" else None
            return device.run(policy, self._folder("device"), cuda=cuda, wheel=self._inputs.wheel, python=self._inputs.python)

        return Gate("G2", sha256, run)

    def _contract(self) -> Gate:
        policy, sha256 = self._policy("contract", ContractPolicy)
        one = self._inputs
        if not one.serve and not (one.server and one.log):
            return _unasked("G3", "log", "--serve a model, or name a --server and its --log")
        expected = self._expected()
        if expected not in policy.recipes:
            names = (*recipes.names(self._context.project.root), *policy.recipes)
            raise UsageError(
                "usage", f"contract.yaml expects nothing of {expected!r}.", todo=f"Choose one with --recipe: {', '.join(names)}."
            )

        def run() -> tuple[Check, ...]:
            running = self._running()
            client = None if running.ended else self.server.client()
            return (*contract.run(policy, policy.recipes[expected], running, client), self.server.same_wheel())

        return Gate("G3", sha256, run)

    def _running(self) -> Running:
        """Return the server as G3 judges it: its log, and what is known of it."""
        one = self._inputs
        package = wheel_identity.site_packages(one.python) / "vllm" if one.python else None
        if one.serve:
            server = self.server.started
            trace = one.trace or self._profile()
            ended = "" if server.ready else server.failure
            return Running(server.log, server.plan.flags, server.plan.environment(), package, trace, ended, server.reason)
        assert one.log is not None
        return Running(one.log, package=package, profile=one.trace)

    def _profile(self) -> Path | None:
        """Return a profile of one answer; None if the server makes none, which the gate then reports."""
        if self.server.started.ready:
            with contextlib.suppress(ServerInvalid, ProfileInvalid):
                return kernel_trace.take(self.server.client(), self._profiles)
        return None

    def _expected(self) -> str:
        """Return the name under which ``contract.yaml`` says what is expected: the recipe's, or what was named in its place."""
        one = self._inputs
        if self._recipe is None:
            return one.recipe
        way = self._recipe.variant(wheel_identity.version(one.python)) if one.python else None
        return (way.contract if way else "") or self._recipe.contract

    def _words(self) -> Gate:
        policy, sha256 = self._policy("generation", GenerationPolicy)
        if not self._inputs.serves:
            return _unasked("G4", "streams", "--serve a model, or name a --server")
        if self._inputs.profile not in policy.profiles:
            raise UsageError("usage", f"generation.yaml has no profile {self._inputs.profile!r}.", todo=f"Choose: {', '.join(policy.profiles)}.")
        return Gate("G4", sha256, lambda: words.run(policy, self.server.client(), self._inputs.profile))

    def _distributions(self) -> Gate:
        policy, sha256 = self._policy("logprobs", LogprobsPolicy)
        if not self._inputs.serves or not self._inputs.against:
            return _unasked("G5", "reference", "name a server, and --against what it is compared")

        def run() -> tuple[Check, ...]:
            against = self._against("logprobs.json", patient)
            return distributions.run(policy, self.server.client(), against, paragraphs=self.paragraphs(), served=self.server.served)

        return Gate("G5", sha256, run)

    def paragraphs(self) -> Mapping[str, tuple[str, ...]]:
        """Return the corpus of G5."""
        return reference.load_corpus(self._context.project.root / "ci" / "gates" / "corpus.yaml")

    def _against(self, name: str, client: Callable[[str], Any]) -> Any:
        """Return the reference: *client* of its URL, or the file *name* of the folder."""
        against = self._inputs.against
        return client(against) if against.startswith(("http://", "https://")) else Path(against, name)

    def _tasks(self) -> Gate:
        policy, sha256 = self._policy("accuracy", AccuracyPolicy)
        one = self._inputs
        if not one.serves or not one.against:
            return _unasked("G6", "baseline", "name a server, and --against what it is compared")
        if one.task not in policy.tasks:
            raise UsageError("usage", f"accuracy.yaml has no task {one.task!r}.", todo=f"Choose one with --task: {', '.join(policy.tasks)}.")
        floor = self._recipe.floors.get(one.task) if self._recipe else None
        if floor is None:
            raise RecipeError(
                "recipe-unfit", f"G6 has no floor of {one.task} for {one.recipe or 'a server without --recipe'}.",
                todo="Measure a trusted wheel and add the floor to `floors` in the recipe; or choose another --task or --recipe, "
                "or --only without G6.",
            )  # fmt: skip

        def run() -> tuple[Check, ...]:
            baseline = self._against(f"{one.task}.json", str)
            return tasks.run(
                policy, one.task, self._context, self.server.url, baseline,
                identity=self.server.served, floor=floor, model=self.server.name,
            )  # fmt: skip

        return Gate("G6", sha256, run)

    def _soak(self) -> Gate:
        policy, sha256 = self._policy("soak", SoakPolicy)
        if not self._inputs.serves:
            return _unasked("G7", "requests", "--serve a model, or name a --server")
        gates = zip(soak.REPEATED, (self._words(), self._distributions()), strict=True)
        again = {name: gate.run for name, gate in gates if gate.policy}
        journal = self._context.store.folder("logs") / "soak.jsonl"

        def run() -> tuple[Check, ...]:
            return soak.run(policy, self.server.url, journal, model=self.server.name, pid=self.server.pid(), again=again)

        return Gate("G7", sha256, run)

    def _throughput(self) -> Gate:
        one = self._inputs
        if not (one.serve and one.python and one.baseline_python):
            return _unasked("G8", "baseline", "--serve a model from --python, and name the --baseline-python to compare with")
        asked = ExperimentSpec(
            "gate", Environment(one.python, one.wheel), Environment(one.baseline_python, one.baseline),
            model=one.serve, name=one.model, recipe=self._recipe, flags=one.flags, variables=one.variables,
            workloads=one.workloads, texts=one.texts, resident="both" if one.at_once else "turns", fresh=one.fresh, preheat=one.preheat,
        )  # fmt: skip
        answer = Experiment(self._context, asked)

        def run() -> tuple[Check, ...]:
            # Two servers and their load need the machine alone.
            self.server.end()
            self.throughput = answer.result()
            return (*throughput.checks(self.throughput), *self._both_wheels())

        return Gate("G8", answer.digest, run)

    def record(self, folder: Path) -> tuple[Path, ...]:
        """
        Write the distributions and the answers of the server into *folder*, and return the files.

        Raises:
            measurement-invalid: The server does not answer as it should, or does not agree with itself.
            offline, source-unreachable, command-failed: The harness of the tasks cannot be installed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        scored, answers = folder / "logprobs.json", folder / f"{self._inputs.task}.json"
        try:
            with console.step("record the distributions"):
                policy, _ = self._policy("logprobs", LogprobsPolicy)
                made = distributions.record(policy, self.paragraphs(), self.server.client(), self.server.served)
                reference.save(made, scored)
            with console.step(f"record the answers to {self._inputs.task}"):
                wanted, _ = self._policy("accuracy", AccuracyPolicy)
                name, here = self._inputs.task, self.server
                results.save(runner.ask(self._context, name, wanted.tasks[name], here.url, here.served, here.name), answers)
        except (ServerInvalid, ReferenceInvalid) as error:
            raise GateError(
                "measurement-invalid", f"The reference cannot be recorded: {error.says}.", details=[error.reference]
            ) from None
        return scored, answers

    def _both_wheels(self) -> list[Check]:
        """Return whether each environment holds its wheel's files and no others."""
        one = self._inputs
        sides = (("candidate", one.wheel, one.python), ("baseline", one.baseline, one.baseline_python))
        return [server_under_test.same_wheel(wheel, python, f"{side}-wheel") for side, wheel, python in sides]


def _unasked(name: str, check: str, wants: str) -> Gate:
    """Return a gate that did not run, as nobody named what it *wants*."""
    return Gate(name, "", lambda: (not_run(check, f"to run it, {wants}", "not-asked"),))
