"""
From what a person names — a wheel, an environment, a server — to rungs that can run; what nobody named is a row that did not run.

A server that the ladder starts itself runs from the first rung that needs it to the end, so that all of them speak of one launch.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from sparkwright import yamlfile
from sparkwright.audit.report import AuditReport
from sparkwright.build import toolchain
from sparkwright.digest import canonical, sha256_bytes, sha256_file
from sparkwright.errors import SourceUnlocked, SourceUnreachable, SourceUnresolved, UsageError
from sparkwright.forks.session import Session
from sparkwright.gates import audited
from sparkwright.gates.device import rung as device
from sparkwright.gates.device.rung import DevicePolicy
from sparkwright.gates.distributions import corpus
from sparkwright.gates.distributions import rung as distributions
from sparkwright.gates.distributions.rung import DistributionsPolicy
from sparkwright.gates.ladder import Rung
from sparkwright.gates.numerics import rung as numerics
from sparkwright.gates.numerics import trees
from sparkwright.gates.numerics.rung import NumericsPolicy
from sparkwright.gates.served import Served
from sparkwright.gates.server import contract, installed, profiled
from sparkwright.gates.server.client import Client, ServerInvalid
from sparkwright.gates.server.contract import ContractPolicy, Running
from sparkwright.gates.server.profiled import ProfileInvalid
from sparkwright.gates.server.serve import Launch, Server
from sparkwright.gates.soak import rung as soak
from sparkwright.gates.soak.rung import SoakPolicy
from sparkwright.gates.tasks import rung as tasks
from sparkwright.gates.tasks.rung import TasksPolicy
from sparkwright.gates.verdict import Check, Sample, failed, not_run, passed
from sparkwright.gates.words import rung as words
from sparkwright.gates.words.rung import WordsPolicy

TITLE = "what a rung was given"

REASONS: Mapping[str, str] = {
    "not-asked": "Nobody named what the check needs: a wheel, a server, its log, a reference. The row says which option names it.",
    "wheel-not-served": "The environment that serves holds other files than the wheel, so no answer says anything of it. Install the "
    "wheel into a fresh environment.",
    "source-not-here": "The source tree cannot be made here, as its source is not reachable or not locked.",
}

#: Seconds between two bytes of a server that somebody else started; the first question for logarithms compiles for a minute on a CPU.
PATIENCE = 600.0

Policy = TypeVar("Policy")


class Inputs(msgspec.Struct, frozen=True):
    """
    What the command line names.

    Attributes:
        wheel: The wheel in question.
        python: The Python of an environment that the wheel is installed in.
        serve: Folder of the model that is to be served from there.
        flags, variables: Of the server that is started.
        server: URL of a server that runs already, and *log* what it prints.
        model: The name under which it serves; empty for the only one.
        model_folder: Its files, where they are not *serve*; their digest names the model.
        recipe: Of G3.
        profile: Of G4: what kind of model it is.
        trace: A profiler's file, for G3.
        against: The reference: the URL of its server, or a folder that ``--record`` wrote.
        task: Of G6.
        minutes: Of G7; 0 for what its policy says.
        reserve: Megabytes that must stay free on the machine while we serve.
    """

    wheel: Path | None = None
    python: Path | None = None
    serve: Path | None = None
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    server: str = ""
    log: Path | None = None
    model: str = ""
    model_folder: Path | None = None
    recipe: str = ""
    profile: str = "default"
    trace: Path | None = None
    against: str = ""
    task: str = "gsm8k"
    minutes: float = 0
    reserve: int = 0

    @property
    def serves(self) -> bool:
        """Is there a server, or will there be one?"""
        return bool(self.server or self.serve)


class Ready:
    """
    The rungs of one run; leave its ``with`` block to end what it started.

    Args:
        audited_by: Returns the audit of a wheel.
        host: Facts of the machine, for references that are bound to it.
    """

    def __init__(self, session: Session, inputs: Inputs, audited_by: Callable[[Path], AuditReport], host: Mapping[str, str]) -> None:
        if inputs.serve and not inputs.python:
            raise UsageError("--serve wants the environment that vLLM is installed in.", todo="Name its interpreter with --python.")
        if inputs.serve and inputs.server:
            raise UsageError("--serve starts a server and --server names one that runs; give one of them.")
        self._session, self._inputs, self._audited, self._host = session, inputs, audited_by, dict(host)
        self._stack = contextlib.ExitStack()
        self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gate-", dir=session.store.folder("work"))))

    def __enter__(self) -> Ready:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rung(self, name: str) -> Rung:
        """
        Return the rung *name*, ready to run.

        Raises:
            FileInvalid: Its policy is not valid.
            UsageError: The policy has no such recipe, profile or task.
        """
        return {
            "G0": self._bytes, "G1": self._numerics, "G2": self._device, "G3": self._contract,
            "G4": self._words, "G5": self._distributions, "G6": self._tasks, "G7": self._soak,
        }[name]()  # fmt: skip

    def _policy(self, name: str, record: type[Policy]) -> tuple[Policy, str]:
        policy = yamlfile.load(self._session.project.root / "ci" / "gates" / f"{name}.yaml", record)
        return policy, sha256_bytes(canonical(policy))

    def _folder(self, name: str) -> Path:
        folder = self._scratch / name
        folder.mkdir()
        return folder

    def _bytes(self) -> Rung:
        wheel = self._inputs.wheel
        if wheel is None:
            return _unasked("G0", "audit", "name a WHEEL")
        return Rung("G0", self._report.policy, lambda: audited.run(self._report))

    @cached_property
    def _report(self) -> AuditReport:
        assert self._inputs.wheel is not None
        return self._audited(self._inputs.wheel)

    def device_code(self) -> str:
        """Return the wheel's device-code digest; empty without a wheel."""
        return self._report.device_code if self._inputs.wheel else ""

    def _numerics(self) -> Rung:
        policy, sha256 = self._policy("numerics", NumericsPolicy)

        def run() -> tuple[Check, ...]:
            made, missing = self._trees(policy)
            headers = trees.includes(toolchain.obtain(self._session))
            return (*numerics.run(made, policy, headers, self._folder("numerics")), *missing)

        return Rung("G1", sha256, run)

    def _trees(self, policy: NumericsPolicy) -> tuple[dict[str, Path], list[Check]]:
        """Return the folders of the source trees, patched and rewritten, and a row for each that cannot be made here."""
        made: dict[str, Path] = {}
        missing = []
        for fork in policy.forks:
            try:
                made |= trees.made(self._session, (fork,))
            except (SourceUnreachable, SourceUnresolved, SourceUnlocked) as error:
                missing.append(not_run(f"{fork}-tree", error.what, "source-not-here"))
        return made, missing

    def _device(self) -> Rung:
        policy, sha256 = self._policy("device", DevicePolicy)

        def run() -> tuple[Check, ...]:
            cuda = toolchain.obtain(self._session).cuda if self._host.get("gpu", "none") != "none" else None
            return device.run(policy, self._folder("device"), cuda=cuda, wheel=self._inputs.wheel, python=self._inputs.python)

        return Rung("G2", sha256, run)

    @cached_property
    def _launched(self) -> Server:
        """The server that we start, once, for all rungs."""
        one = self._inputs
        assert one.serve is not None
        assert one.python is not None
        flags = (*one.flags, *profiled.flags(self._profiles))
        launch = Launch(one.python, one.serve, flags, dict(one.variables), one.model or "model", reserve=one.reserve)
        return self._stack.enter_context(Server(launch, self._scratch / "server.log"))

    @cached_property
    def _profiles(self) -> Path:
        return self._folder("profiles")

    @property
    def url(self) -> str:
        """Where the server answers."""
        return self._launched.url if self._inputs.serve else self._inputs.server

    def client(self) -> Client:
        """Return a client of the server."""
        return self._launched.client() if self._inputs.serve else Client(self.url, self.name, timeout=PATIENCE)

    @property
    def name(self) -> str:
        """The name under which the model is served; empty for the only one."""
        return self._launched.launch.name if self._inputs.serve else self._inputs.model

    @property
    def served(self) -> Served:
        """What is known of the server from outside."""
        folder = self._inputs.serve or self._inputs.model_folder
        wheel = sha256_file(self._inputs.wheel) if self._inputs.wheel else ""
        return Served(wheel, model_digest(folder) if folder else "", self._host)

    def _contract(self) -> Rung:
        policy, sha256 = self._policy("contract", ContractPolicy)
        one = self._inputs
        if not one.serve and not (one.server and one.log):
            return _unasked("G3", "log", "--serve a model, or name a --server and its --log")
        if one.recipe not in policy.recipes:
            raise UsageError(f"contract.yaml has no recipe {one.recipe!r}.", todo=f"Choose one with --recipe: {', '.join(policy.recipes)}.")

        def run() -> tuple[Check, ...]:
            running = self._running()
            client = None if running.ended else self.client()
            return (*contract.run(policy, policy.recipes[one.recipe], running, client), self._same_wheel())

        return Rung("G3", sha256, run)

    def _running(self) -> Running:
        one = self._inputs
        package = installed.package(one.python) if one.python else None
        if one.serve:
            server = self._launched
            trace = one.trace or self._profile(server)
            return Running(
                server.log, server.launch.flags, server.launch.environment(), package, trace,
                "" if server.ready else server.ended, server.reference,
            )  # fmt: skip
        assert one.log is not None
        return Running(one.log, package=package, profile=one.trace)

    def _profile(self, server: Server) -> Path | None:
        """Return a profile of one answer; none where the server makes none, which the rung then says."""
        if server.ready:
            with contextlib.suppress(ServerInvalid, ProfileInvalid):
                return profiled.take(server.client(), self._profiles)
        return None

    def _same_wheel(self) -> Check:
        """Return whether the environment that serves holds the wheel's files and no others."""
        one = self._inputs
        if not one.wheel or not one.python:
            return not_run("wheel-served", "name the WHEEL and the --python that serves, to know that it is this wheel", "not-asked")
        if found := installed.is_installed(one.python, one.wheel):
            samples = [Sample(mismatch.name, "the wheel's bytes", mismatch.how) for mismatch in found]
            says = f"{len(found)} file(s) of the environment are not the wheel's"
            return failed("wheel-served", says, "wheel-not-served", samples=samples)
        return passed("wheel-served", f"the environment holds every file of {one.wheel.name}, byte by byte")

    def _words(self) -> Rung:
        policy, sha256 = self._policy("words", WordsPolicy)
        if not self._inputs.serves:
            return _unasked("G4", "streams", "--serve a model, or name a --server")
        if self._inputs.profile not in policy.profiles:
            raise UsageError(f"words.yaml has no profile {self._inputs.profile!r}.", todo=f"Choose: {', '.join(policy.profiles)}.")
        return Rung("G4", sha256, lambda: words.run(policy, self.client(), self._inputs.profile))

    def _distributions(self) -> Rung:
        policy, sha256 = self._policy("distributions", DistributionsPolicy)
        if not self._inputs.serves or not self._inputs.against:
            return _unasked("G5", "reference", "name a server, and --against what it is compared")

        def run() -> tuple[Check, ...]:
            return distributions.run(
                policy, self.client(), self._against("distributions.json", _patient), paragraphs=self.paragraphs(), served=self.served
            )

        return Rung("G5", sha256, run)

    def paragraphs(self) -> Mapping[str, tuple[str, ...]]:
        """Return the corpus of G5."""
        return corpus.load(self._session.project.root / "ci" / "gates" / "corpus.yaml")

    def _against(self, name: str, client: Callable[[str], Any]) -> Any:
        """Return the reference: *client* of its URL, or the file *name* of the folder."""
        against = self._inputs.against
        return client(against) if against.startswith(("http://", "https://")) else Path(against, name)

    def _tasks(self) -> Rung:
        policy, sha256 = self._policy("tasks", TasksPolicy)
        one = self._inputs
        if not one.serves or not one.against:
            return _unasked("G6", "baseline", "name a server, and --against what it is compared")
        if one.task not in policy.tasks:
            raise UsageError(f"tasks.yaml has no task {one.task!r}.", todo=f"Choose one with --task: {', '.join(policy.tasks)}.")

        def run() -> tuple[Check, ...]:
            baseline = self._against(f"{one.task}.json", str)
            return tasks.run(policy, one.task, self._session, self.url, baseline, served=self.served, model=self.name)

        return Rung("G6", sha256, run)

    def _soak(self) -> Rung:
        policy, sha256 = self._policy("soak", SoakPolicy)
        if not self._inputs.serves:
            return _unasked("G7", "requests", "--serve a model, or name a --server")
        if self._inputs.minutes:
            policy = msgspec.structs.replace(policy, seconds=60 * self._inputs.minutes)
            sha256 = sha256_bytes(canonical(policy))
        again = {name: rung.run for name, rung in (("words", self._words()), ("distributions", self._distributions())) if rung.policy}
        journal = self._session.store.folder("logs") / "soak.jsonl"

        def run() -> tuple[Check, ...]:
            return soak.run(policy, self.url, journal, model=self.name, pid=self._pid(), again=again)

        return Rung("G7", sha256, run)

    def _pid(self) -> int | None:
        if self._inputs.serve:
            return next((process.pid for process in self._launched.processes()), None)
        port = self._inputs.server.rpartition(":")[2].partition("/")[0]
        with contextlib.suppress(psutil.Error):
            listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            return next((one.pid for one in listening if one.laddr and str(one.laddr.port) == port), None)
        return None


def _patient(url: str) -> Client:
    return Client(url, timeout=PATIENCE)


def _unasked(name: str, check: str, wants: str) -> Rung:
    """Return a rung that did not run, as nobody named what it *wants*."""
    return Rung(name, "", lambda: (not_run(check, f"to run it, {wants}", "not-asked"),))


def model_digest(folder: Path) -> str:
    """
    Return a digest over the files of the model in *folder*: its weights by name and size and their headers, everything small by its bytes.

    Hundreds of gigabytes are not read again for each run; a shard of the same size with other numbers and the same header is not noticed.
    """
    parts = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as stream:
            parts.append((path.name, path.stat().st_size, sha256_bytes(stream.read(16 * 1024**2))))
    return sha256_bytes(canonical(parts))

