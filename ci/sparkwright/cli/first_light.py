"""
``sparkwright first-light``: run all that one machine can, in order, and make a page of it.

A bundle holds the page, the verdicts, the facts of `doctor` and the logs of the steps. `redacted`
takes secrets out of texts that other programs wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from sparkwright import __version__
from sparkwright.bench import quick_look
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.records import METRICS
from sparkwright.bench.report.view import NOT_MEASURED, number, signed
from sparkwright.bench.server import wheel_identity
from sparkwright.builder import host_info, pipeline
from sparkwright.builder.ninja import Costs
from sparkwright.cli import bench, doctor, gate, options
from sparkwright.core import process
from sparkwright.core.console import console, duration, one_line
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import content_key, read_json, sha256_file
from sparkwright.core.http import redact_credentials
from sparkwright.core.pages import environment
from sparkwright.core.states import State
from sparkwright.core.store import Store, replacing
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.ladder import host_facts
from sparkwright.gates.core.server_under_test import GateOptions, model_digest
from sparkwright.gates.core.verdict import UNAVAILABLE, Verdict, worst
from sparkwright.release.bundle import anonymous_member

#: Of a step: ``measured`` gives figures and decides nothing.
StepState = State | Literal["measured"]

#: Files of a run: its page, its results, and the bundle.
PAGE, RESULTS, BUNDLE = "first-light.html", "results.json", "first-light.tar.gz"
#: The file of the finished steps in an output folder, by step and inputs.
STEPS = "steps.json"
#: Bytes of a log that are kept, the last ones.
LOG_BYTES = 1 << 20
#: Characters of the message of a step.
LONGEST = 500

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY", re.IGNORECASE)
#: What introduces a secret in a log, and the secret.
_SECRET = re.compile(
    r"""((?i:\b\w*(?:token|secret|password|passwd|api[_-]?key)\b["']?\s*[:=]\s*["']?"""
    r"""|\bbearer\s+))[^\s"',;]+|\b(?:hf_|gh[opsu]_|github_pat_)\w{10,}"""
)


class FirstLightError(SparkwrightError):
    """Not every step of a first run passed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "first-light-failed": Advice(
            "A step of the first run failed, or its measurement does not count. The steps that do "
            "not need it ran, and the page shows all of them.",
            "Correct what the step names, and run the command again: steps that passed are not "
            "repeated.",
        ),
        "first-light-incomplete": Advice(
            "No step failed, but one could not run here or decides nothing, so this is not a pass.",
            "The page says what each step needs. Run the command again where that is there; steps "
            "that passed are not repeated.",
            exit_code=4,
        ),
    }


class StepRecord(msgspec.Struct, frozen=True):
    """
    What a step found.

    Attributes:
        message: One sentence.
        verdicts: Of the gates that it ran.
        looks: Quick looks by the launch: ``candidate``, ``baseline``, ``candidate again``.
        files: Evidence, as paths in the output folder.
        seconds: How long it took.
    """

    state: StepState
    message: str
    verdicts: tuple[Verdict, ...] = ()
    looks: dict[str, QuickLook] = {}
    files: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it need not be repeated."""
        return self.state in ("pass", "measured")


_OPTIONS: options.Options = {
    "wheels": {
        "nargs": "*",
        "type": Path,
        "metavar": "WHEEL",
        "help": "wheels that are built already, all those of one folder (default: build them)",
    },
    "--recipe": {"metavar": "NAME", "help": "recipe of the model (ci/recipes)"},
    "--serve": {
        "type": Path,
        "metavar": "DIR",
        "help": "serve the model in this folder, for G3 and G4",
    },
    "--python": {
        "type": Path,
        "metavar": "FILE",
        "help": "Python of the environment that the wheel is installed in (default: make one)",
    },
    "--baseline-python": {
        "type": Path,
        "metavar": "FILE",
        "help": "Python of an environment with the official wheel (default: make one)",
    },
    "--output": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder of page, evidence and bundle (default: dist/first-light)",
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``first-light``."""
    options.define(parsers, {"first-light": first_light}, {"first-light": _OPTIONS})


def first_light(arguments: argparse.Namespace) -> None:
    """
    Run the steps that are not done yet; write and show the page and the bundle.

    Raises:
        UsageError: A file does not exist, or the recipe has no model.
        first-light-failed, first-light-incomplete: A step did not pass.
    """
    paths = (*arguments.wheels, arguments.serve, arguments.python, arguments.baseline_python)
    options.refuse(
        (arguments.recipe and not arguments.serve, "--recipe NAME needs --serve DIR."),
        *((path and not path.exists(), f"There is no {path}.") for path in paths),
    )
    context = options.checkout(arguments)
    dist = context.project.root / "dist"
    folder = (arguments.output or dist / "first-light").absolute()
    # Two at a time would measure each other.
    with context.store.lock("first-light", wait=False):
        steps = FirstSteps(dataclasses.replace(context, output=dist), arguments, folder)
        records = steps.run()
        about = {"stack": context.project.stack, "arch": context.project.spec.arch, **steps.facts}
        wheels = {sha256_file(path): path.name for path in steps.wheels}
        bundle = write(context.store, folder, records, about, wheels)
    rows = [
        (name, record.state, duration(record.seconds), record.message)
        for name, record in records.items()
    ]
    console.table("Steps", ("step", "state", ">took", "result"), rows, result=True)
    answers = [(question, *answer) for question, answer in open_questions(records).items()]
    console.table("Open questions", ("question", "state", "found"), answers, result=True)
    console.result(f"page: {folder / PAGE}")
    console.result(f"bundle, which you may send: {bundle}, sha256 {sha256_file(bundle)}")
    console.document({"steps": records, "bundle": str(bundle)})
    unfinished = [f"{n}: {record.state}" for n, record in records.items() if not record.finished]
    if unfinished:
        failed = state(records) in ("fail", "invalid")
        reference = "first-light-failed" if failed else "first-light-incomplete"
        what = f"{len(unfinished)} of {len(records)} steps did not pass."
        raise FirstLightError(reference, what, details=unfinished)


class FirstSteps:
    """
    The steps, by the functions behind the other commands.

    A step that passed or measured is not repeated for the same inputs. Every other one is tried
    again, and one that fails stops only those that need its result.

    Args:
        folder: Where evidence is written.

    Attributes:
        facts: Of the machine.

    Raises:
        file-invalid: The file of the earlier steps cannot be read.
    """

    def __init__(self, context: RunContext, arguments: argparse.Namespace, folder: Path) -> None:
        self._context, self._arguments, self._folder = context, arguments, folder
        self.facts, self._no_gpu = host_facts(), "doctor did not run"
        path = folder / STEPS
        self._earlier = read_json(path, dict[str, StepRecord]) if path.exists() else {}

    @property
    def steps(self) -> dict[str, tuple[str, str, Callable[[], StepRecord]]]:
        """Step → its title, how long it takes with the source of that, and its function."""
        limit, looks = host_info.PATIENCE, quick_look.BUDGET_S
        steps: dict[str, tuple[str, str, Callable[[], StepRecord]]] = {
            "doctor": (
                "what this machine has and lacks",
                f"{limit:g} s at most for each program or host that does not answer",
                self._doctor,
            ),
            "build": ("build the wheels", self._compile_time(), self._build),
            "audit": (
                "G0: the machine code inside",
                NOT_MEASURED,
                lambda: self._gates("G0", wheels=self.wheels),
            ),
            "numerics": (
                "G1: NVFP4 in the patched sources",
                "7 s where the wheel of docs/rehearsal was built",
                lambda: self._gates("G1"),
            ),
            "install": ("environments of ours and the stock wheel", NOT_MEASURED, self._install),
            "device": (
                "G2: the wheel on the GPU",
                "99 s on an H100 (docs/explanation/gates.md)",
                self._device,
            ),
            "serve": ("G3 and G4: a served model", NOT_MEASURED, self._serve),
            "quick": (
                "quick A/B against the stock wheel",
                f"3 looks of {looks:g} s at most, their time limit; launches {NOT_MEASURED}",
                self._quick,
            ),
        }
        if self._arguments.wheels:
            del steps["build"]
        return steps

    def run(self) -> dict[str, StepRecord]:
        """Say how long the steps take, and run them in order; return their records."""
        rows = [(name, title, estimate) for name, (title, estimate, _) in self.steps.items()]
        console.table("first-light", ("step", "what it does", "how long"), rows)
        records = {}
        for name, (title, _, work) in self.steps.items():
            with console.step(f"{name}: {title}"):
                records[name] = self._record(name, work)
                console.note(f"{records[name].state}: {records[name].message}")
        return records

    def _record(self, name: str, work: Callable[[], StepRecord]) -> StepRecord:
        """Return the finished record of a step for the same inputs; else run and store it."""
        began = time.time()
        try:
            earlier = self._earlier.get(self._key(name))
            # An earlier version of this program stored failed steps, too.
            if (
                earlier
                and earlier.finished
                and all((self._folder / file).is_file() for file in earlier.files)
            ):
                console.note("not repeated: nothing changed since it was done")
                return earlier
            record = work()
            key = self._key(name)
        except SparkwrightError as error:
            # A file that cannot be had says nothing of the wheel.
            lacks = isinstance(error, FirstLightError) or error.reference in UNAVAILABLE
            says = " ".join((f"{error.reference}: {error.what}", error.todo, *error.details))
            failure = one_line(says, LONGEST)
            record = StepRecord("not-run", error.what) if lacks else StepRecord("fail", failure)
        record = replace(
            record,
            message=redacted(record.message),
            files=(*record.files, *self._logs(name, began)),
            seconds=time.time() - began,
        )
        if record.finished:
            self._earlier[key] = record
            self._context.store.write(self._folder / STEPS, msgspec.json.encode(self._earlier))
        return record

    def _key(self, name: str) -> str:
        """Return the step *name* with the digest of what determines its result."""
        project, model = self._context.project, self._arguments.serve
        served, policies = name in ("serve", "quick"), sorted((project.root / "ci").rglob("*.yaml"))
        inputs = (
            (__version__, project.stack, project.spec.arch, self.facts["gpu"]),
            [(path.name, sha256_file(path)) for path in policies],
            [self._context.source_inputs(fork) for fork in self._context.forks],
            [sha256_file(path) for path in self.wheels],
            # What a machine has may change at any time.
            time.time() if name == "doctor" else "",
            [path and wheel_identity.version(path) for path in self._pythons]
            if served or name in ("install", "device")
            else [],
            (self._arguments.recipe, model_digest(model)) if served and model else (),
        )
        return f"{name} {content_key('first-light', inputs)}"

    def _logs(self, step: str, began: float) -> Iterator[str]:
        """Copy the end of each log of the store that was written since *began*, without secrets."""
        logs = self._context.store.folder("logs")
        for path in sorted(logs.rglob("*.log")):
            # The clock of a file system is coarser.
            if path.stat().st_mtime > began - 0.1:
                end = path.read_bytes()[-LOG_BYTES:].decode("utf-8", "replace")
                name = f"logs/{step}-{path.relative_to(logs).as_posix().replace('/', '-')}"
                self._context.store.write(self._folder / name, redacted(end).encode())
                yield name

    # What the steps work on.

    @property
    def wheels(self) -> list[Path]:
        """The wheels that were named, else those of the last build."""
        built = (pipeline.last_wheel(self._context, fork) for fork in self._context.forks)
        return self._arguments.wheels or [path for path in built if path]

    @property
    def _graft(self) -> Path | None:
        """The wheel that serves: that of a grafted fork."""
        forks = self._context.project.spec.forks.items()
        globs = [f"*{fork}-*.whl" for fork, spec in forks if spec.build == "graft"]
        return next((path for path in self.wheels if any(map(path.match, globs))), None)

    @property
    def _pythons(self) -> tuple[Path | None, Path | None]:
        """The Pythons of our environment and of the stock one; None where there is none."""
        own = [self._folder / name / "bin" / "python" for name in ("ours/current", "stock")]
        ours, stock = (path if path.exists() else None for path in own)
        return self._arguments.python or ours, self._arguments.baseline_python or stock

    def _require(self, *, gpu: bool = True, model: bool = False) -> None:
        """
        Raise if something is lacking that a step needs, beside a wheel with device code.

        Raises:
            first-light-incomplete: It is.
        """
        for lacking, what in (
            (not self._graft, "no wheel with device code was built or named"),
            (gpu and self._no_gpu, self._no_gpu),
            (model and not self._arguments.serve, "no model: name --serve DIR, and its --recipe"),
            (model and not all(self._pythons), "there are no environments; see the step install"),
        ):
            if lacking:
                raise FirstLightError("first-light-incomplete", what)

    # The steps.

    def _doctor(self) -> StepRecord:
        document = doctor.machine(self._context)
        text = redacted(msgspec.json.format(msgspec.json.encode(document)).decode())
        path = self._context.store.write(self._folder / "doctor.json", text.encode())
        checks = document["checks"]
        gpus = {check.state: check for check in checks if check.subject == "GPU"}
        unfit = next(iter(gpus.values()))
        self._no_gpu = "" if "ready" in gpus else f"GPU: {unfit.observed}; {unfit.meaning}"
        others = [f"{check.subject}: {check.state}" for check in checks if check.state != "ready"]
        message = ", ".join((f"{len(checks) - len(others)} of {len(checks)} ready", *others))
        missing = any(check.state == "missing" for check in checks)
        return StepRecord("fail" if missing else "pass", message, files=(path.name,))

    def _compile_time(self) -> str:
        """Return how long the units take to compile, by their cost records."""
        seconds = sum(Costs.of(self._context, fork).total for fork in self._context.forks)
        cores, stack = int(self.facts["cores"]), self._context.project.stack
        source = f"to compile on {cores} cores, by build/{stack}/costs.yaml and builds here"
        return f"{duration(seconds / cores)} {source}" if seconds else NOT_MEASURED

    def _build(self) -> StepRecord:
        built = [pipeline.build(self._context, fork) for fork in self._context.forks]
        return StepRecord("pass", ", ".join(wheel.filename for wheel in built))

    def _device(self) -> StepRecord:
        self._require(gpu=False)
        return self._gates("G2", python=self._pythons[0])

    def _serve(self) -> StepRecord:
        self._require(model=True)
        model, recipe = self._arguments.serve, self._arguments.recipe
        return self._gates("G3", "G4", python=self._pythons[0], serve=model, recipe=recipe)

    def _gates(self, *names: str, wheels: list[Path] | None = None, **server: Any) -> StepRecord:
        """Run the gates *names* on *wheels*, by default on the one that serves."""
        if not self.wheels:
            raise FirstLightError("first-light-incomplete", "there is no wheel")
        verdicts: tuple[Verdict, ...] = ()
        files: list[str] = []
        for path in wheels or [self._graft or self.wheels[0]]:
            # Another wheel of the same name must not replace this one's verdicts.
            output = self._folder / sha256_file(path)[:12]
            context = dataclasses.replace(self._context, output=output)
            verdicts += gate.climb(context, GateOptions(wheel=path, only=names, **server)).verdicts
            files += [str(file.relative_to(self._folder)) for file in sorted(output.iterdir())]
        state = worst(verdict.state for verdict in verdicts)
        says = [f"{verdict.label} {verdict.state}" for verdict in verdicts]
        checks = [check for verdict in verdicts for check in verdict.checks if check.required]
        # A missing GPU is one fact, however many checks it stops.
        says += dict.fromkeys(check.message for check in checks if check.state == state != "pass")
        return StepRecord(state, one_line("; ".join(says), LONGEST), verdicts, files=tuple(files))

    def _install(self) -> StepRecord:
        from sparkwright.release import staging

        self._require()
        if not self._arguments.python:
            staging.install_built(self._context, self.wheels[0].parent, self._folder / "ours")
        if not self._arguments.baseline_python:
            stock = self._folder / "stock"
            log = self._context.store.folder("logs") / "venv.log"
            process.run([sys.executable, "-m", "venv", stock], log=log)
            staging.install_stock(self._context, stock)
        return StepRecord("pass", "both are installed")

    def _quick(self) -> StepRecord:
        self._require(model=True)
        model, recipe = self._arguments.serve, self._arguments.recipe
        ours, stock = self._pythons
        sides = {"candidate": ours, "baseline": stock, "candidate again": ours}
        looks = {}
        for launch, python in sides.items():
            assert python
            wheel = None if python == stock else self._graft
            inputs = GateOptions(wheel, python, model, recipe=recipe)
            output = self._folder / "quick" / launch.replace(" ", "-")
            with console.step(launch):
                own = dataclasses.replace(self._context, output=output)
                looks[launch] = bench.quick(own, inputs)
        message = f"{len(looks)} launches, one after the other; not a gate"
        return StepRecord("measured", message, looks=looks)


def open_questions(records: Mapping[str, StepRecord]) -> dict[str, tuple[StepState, str]]:
    """Return a state and what was found for each question that only a Spark can answer."""

    def checked(step: str, *names: str) -> tuple[StepState, str]:
        checks = [
            check
            for verdict in records[step].verdicts
            for check in verdict.checks
            if any(fnmatchcase(check.name, name) for name in names)
        ]
        says = "; ".join(f"{check.name}: {check.message}" for check in checks)
        deciding = [check for check in checks if check.required] or checks
        return worst(check.state for check in deciding), says or records[step].message

    quick = records["quick"]

    def compared(before: str, after: str, note: str) -> tuple[StepState, str]:
        if not quick.looks:
            return "not-run", quick.message
        # The metrics that may decide come first.
        pairs = zip(quick.looks[before].figures, quick.looks[after].figures, strict=True)
        changes = [
            f"{old.name} {signed(new.mean / old.mean - 1)} %"
            for old, new in list(pairs)[: len(METRICS)]
            if old.mean and new.mean
        ]
        return "measured", f"{', '.join(changes)}: {note}"

    return {
        "Does the GPU run the native E2M1 conversion?": checked("device", "fp4-conversion"),
        "How noisy is the machine (A/A)?": compared(
            "candidate", "candidate again", "two launches of one wheel"
        ),
        "Is our wheel faster than the stock one?": compared(
            "baseline", "candidate", "one launch each; G8 decides"
        ),
        "Is code for 12.1f faster than for 12.0f?": (
            "not-run",
            "no stack has arch rules for 12.0f, and the stock wheel differs in more than that",
        ),
        "Which backend serves?": checked("serve", "kernels-*", "backends", "line-*"),
    }


def write(
    store: Store,
    folder: Path,
    records: Mapping[str, StepRecord],
    about: Mapping[str, str],
    wheels: Mapping[str, str],
) -> Path:
    """
    Write the page, the results and the bundle of a run to *folder*, and return the bundle.

    Args:
        about: Facts of the machine and the stack, by name.
        wheels: The sha256 of each wheel → its file name.
    """
    results = {"about": about, "wheels": wheels, "steps": records}
    results["questions"] = open_questions(records)
    data = msgspec.json.encode({"schema": 1, "sparkwright": __version__, **results})
    store.write(folder / RESULTS, msgspec.json.format(data, indent=1) + b"\n")
    page = environment("sparkwright.cli").get_template("first_light.html")
    shown = {"version": __version__, "duration": duration, "number": number}
    store.write(folder / PAGE, page.render(**results, **shown, state=state(records)).encode())
    evidence = {name for record in records.values() for name in record.files}
    names = [PAGE, RESULTS, *sorted(evidence)]
    with replacing(folder / BUNDLE) as temporary, tarfile.open(temporary, "w:gz") as archive:
        for name in names:
            archive.add(folder / name, f"first-light/{name}", filter=anonymous_member)
    return folder / BUNDLE


def state(records: Mapping[str, StepRecord]) -> State:
    """Return the worst state of the steps; a step that measured counts as a pass."""
    states = (record.state for record in records.values())
    return worst("pass" if step == "measured" else step for step in states)


def redacted(log: str) -> str:
    """
    Return *log* without credentials: those of URLs, values of variables whose names say so, and
    what looks like a token; and without the home folder and the name of this machine.
    """
    secrets = {v for n, v in os.environ.items() if _SECRET_NAME.search(n) and len(v) > 5}
    for secret in sorted(secrets, key=len, reverse=True):
        log = log.replace(secret, "***")
    log = _SECRET.sub(lambda match: f"{match[1] or ''}***", redact_credentials(log))
    for name, label in ((str(Path.home()), "~"), (platform.node(), "HOST")):
        log = re.sub(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", label, log) if name else log
    return log
