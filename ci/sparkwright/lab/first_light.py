"""
The first run on a machine: steps that are not repeated, one page, and a bundle to send.

A step that passed or was measured is not repeated for the same inputs. Every other one is tried
again, and a step that fails stops only those that need it. The bundle holds nothing of this machine
but what its page, verdicts and logs show; `redacted` takes secrets out of the logs.
"""

from __future__ import annotations

import os
import platform
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from sparkwright import __version__
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.records import METRICS
from sparkwright.bench.report import text
from sparkwright.core.console import console, duration
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import content_key, read_json, sha256_file
from sparkwright.core.http import redact_credentials
from sparkwright.core.pages import environment
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.gates.core.verdict import Verdict, worst
from sparkwright.release.bundle import anonymous_member

#: Of a step: ``measured`` gives figures and decides nothing.
StepState = State | Literal["measured"]

#: Files of the output folder: the steps that ran, the results of the last run, its page, the
#: sha256 of each file of the bundle, and the bundle.
STEPS, RESULTS, PAGE = "steps.json", "results.json", "first-light.html"
MANIFEST, BUNDLE = "MANIFEST.sha256", "first-light.tar.gz"
NOT_MEASURED = "not measured"
#: Bytes of a log that are kept, the last ones.
LOG_BYTES = 1 << 20

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY", re.IGNORECASE)
#: What introduces a secret in a log, and the secret.
_SECRET = re.compile(
    r"""((?i:\b\w*(?:token|secret|password|passwd|api[_-]?key)\b["']?\s*[:=]\s*["']?|\bbearer\s+))"""
    r"""[^\s"',;]+|\b(?:hf_|gh[opsu]_|github_pat_)\w{10,}"""
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
        baseline_arch: The architecture that the baseline was built for; empty for a wheel that was
            not built by sparkwright.
        files: Evidence, as paths in the output folder.
        seconds: How long it took.
    """

    state: StepState
    message: str
    verdicts: tuple[Verdict, ...] = ()
    looks: dict[str, QuickLook] = {}
    baseline_arch: str = ""
    files: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it need not be repeated."""
        return self.state in ("pass", "measured")


class Step(NamedTuple):
    """
    A step.

    Attributes:
        estimate: How long it takes, with the source of that, or `NOT_MEASURED`.
        needs: Return why it cannot run; empty if it can.
        inputs: Return what determines its result; None for a step that always runs.
    """

    name: str
    title: str
    estimate: str
    run: Callable[[], StepRecord]
    needs: Callable[[], str] = str
    inputs: Callable[[], Any] | None = None


class Answer(msgspec.Struct, frozen=True):
    """The answer to an open question."""

    question: str
    state: StepState
    text: str


class FirstLight:
    """
    The steps of a first run, and their files in *folder*.

    Attributes:
        records: Of the steps of this run, by their names.

    Raises:
        file-invalid: The file of the earlier steps cannot be read.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self.folder = store, folder
        self.records: dict[str, StepRecord] = {}
        path = folder / STEPS
        self._earlier = read_json(path, dict[str, StepRecord]) if path.exists() else {}

    def run(self, steps: Sequence[Step]) -> None:
        """Say how long the *steps* take, and run them in order."""
        rows = [(step.name, step.title, self._estimate(step)) for step in steps]
        console.table("first-light", ("step", "what it does", "how long"), rows)
        for step in steps:
            with console.step(f"{step.name}: {step.title}"):
                self.records[step.name] = record = self._record(step)
                console.note(f"{record.state}: {record.message}")

    def _estimate(self, step: Step) -> str:
        for key, record in reversed(self._earlier.items()):
            if key.startswith(f"{step.name} ") and record.finished:
                return f"{duration(record.seconds)}, as its last run here"
        return step.estimate

    def _key(self, step: Step) -> str:
        inputs = step.inputs() if step.inputs else None
        return f"{step.name} {content_key('first-light', inputs)}"

    def _reusable(self, step: Step) -> StepRecord | None:
        """Return the finished record of *step* for the same inputs, if its files are there."""
        record = self._earlier.get(self._key(step))
        files = record.files if record and record.finished else ("missing",)
        return record if all((self.folder / name).is_file() for name in files) else None

    def _record(self, step: Step) -> StepRecord:
        """Return the earlier record of *step* for the same inputs, else run and store it."""
        began, clock = time.time(), time.monotonic()
        try:
            if reason := step.needs():
                return StepRecord("not-run", reason)
            if step.inputs and (earlier := self._reusable(step)):
                console.note("not repeated: nothing changed since it was done")
                return earlier
            record = step.run()
            key = self._key(step)
        except SparkwrightError as error:
            message = " ".join((f"{error.reference}: {error.what}", *error.details[:3], error.todo))
            record, key = StepRecord("fail", message), f"{step.name} failed"
        record = replace(
            record,
            message=redacted(record.message),
            files=(*record.files, *self._logs(step.name, began)),
            seconds=time.monotonic() - clock,
        )
        # At the end, where the newest of a step is looked for.
        self._earlier.pop(key, None)
        self._earlier[key] = record
        self._write(STEPS, self._earlier)
        return record

    def _write(self, name: str, record: Any) -> None:
        data = msgspec.json.format(msgspec.json.encode(record), indent=1)
        self._store.write(self.folder / name, data + b"\n")

    def _logs(self, step: str, began: float) -> Iterator[str]:
        """Copy the end of each log of the store that was written since *began*, without secrets."""
        logs = self._store.folder("logs")
        for path in sorted(logs.rglob("*.log")):
            # The clock of a file system is coarser.
            if path.stat().st_mtime > began - 0.1:
                end = path.read_bytes()[-LOG_BYTES:].decode("utf-8", "replace")
                name = f"logs/{step}-{path.relative_to(logs).as_posix().replace('/', '-')}"
                self._store.write(self.folder / name, redacted(end).encode())
                yield name

    @property
    def state(self) -> State:
        """The worst state of the steps; one that measured takes nothing from it."""
        states = (record.state for record in self.records.values())
        return worst("pass" if state == "measured" else state for state in states)

    def write(self, about: Mapping[str, str], wheels: Mapping[str, str]) -> Path:
        """
        Write the page, the results and the bundle of this run, and return the bundle.

        Args:
            about: Facts of the machine and the stack, by name.
            wheels: The sha256 of each wheel → its file name.
        """
        answers = open_questions(self.records)
        results = {"about": about, "wheels": wheels, "steps": self.records, "answers": answers}
        self._write(RESULTS, {"schema": 1, "sparkwright": __version__, **results})
        template = environment("sparkwright.lab").get_template("first_light.html")
        page = template.render(
            **results, state=self.state, version=__version__, duration=duration, number=text.number
        )
        self._store.write(self.folder / PAGE, page.encode())
        files = {name for record in self.records.values() for name in record.files}
        names = [PAGE, RESULTS, *sorted(files)]
        lines = [f"{sha256_file(self.folder / name)}  {name}\n" for name in names]
        self._store.write(self.folder / MANIFEST, "".join(lines).encode())
        bundle = self.folder / BUNDLE
        with self._store.replacing(bundle) as temporary, tarfile.open(temporary, "w:gz") as archive:
            for name in (MANIFEST, *names):
                archive.add(self.folder / name, f"first-light/{name}", filter=anonymous_member)
        return bundle

    def show(self) -> None:
        """Print the result of each step, and what was found for each open question."""
        rows = [
            (
                name,
                record.state,
                duration(record.seconds) if record.seconds else "–",
                record.message,
            )
            for name, record in self.records.items()
        ]
        console.table("Steps", ("step", "state", ">took", "result"), rows, result=True)
        found = [(one.question, one.state, one.text) for one in open_questions(self.records)]
        console.table("Open questions", ("question", "state", "found"), found, result=True)

    def raise_for_state(self, data: Mapping[str, object]) -> None:
        """
        Raise unless every step passed or measured.

        Raises:
            first-light-failed, first-light-incomplete: The details are the other steps.
        """
        # A missing GPU is one fact, however many steps it stops.
        causes: dict[str, list[str]] = {}
        for name, record in self.records.items():
            if not record.finished:
                causes.setdefault(f"{record.state}: {record.message}", []).append(name)
        if not causes:
            return
        failed = self.state in ("fail", "invalid")
        reference = "first-light-failed" if failed else "first-light-incomplete"
        count = sum(map(len, causes.values()))
        what = f"{count} of {len(self.records)} steps did not pass."
        details = [f"{', '.join(names)}: {cause}" for cause, names in causes.items()]
        raise FirstLightError(reference, what, details=details, data=data)


def open_questions(records: Mapping[str, StepRecord]) -> list[Answer]:
    """Return what the steps found for each question that only a Spark can answer."""
    checks = {
        f"{verdict.gate} {check.name}": check
        for record in records.values()
        for verdict in record.verdicts
        for check in verdict.checks
    }
    answers = []
    absent = records.get("device", StepRecord("not-run", "G2 did not run"))
    probe = checks.get("G2 fp4-conversion")
    state, message = (probe.state, probe.message) if probe else (absent.state, absent.message)
    answers.append(Answer("Does the GPU run the native E2M1 conversion?", state, message))
    absent = records.get("quick", StepRecord("not-run", "no quick look was taken"))
    state, message, looks = absent.state, absent.message, absent.looks
    noise = compared = archs = message
    if looks:
        first, again = looks["candidate"], looks["candidate again"]
        noise = f"{_changes(first, again)}: two launches of one wheel"
        compared = f"{_changes(looks['baseline'], first)}: one launch each; G8 decides"
        archs = f"{compared}; the baseline is for {absent.baseline_arch}"
    answers.append(Answer("How noisy is the machine (A/A)?", state, noise))
    answers.append(Answer("Is our wheel faster than the baseline?", state, compared))
    if looks and not absent.baseline_arch:
        state = "not-run"
        archs = "the stock wheel differs in more than its architecture: name another --baseline"
    answers.append(Answer("Is code for 12.1f faster than for 12.0f?", state, archs))
    absent = records.get("serve", StepRecord("not-run", "no model was served"))
    kernels = [
        one for name, one in checks.items() if re.match(r"G3 (kernels|line)-|G3 backends", name)
    ]
    served = "; ".join(f"{one.name}: {one.message}" for one in kernels)
    state = worst(one.state for one in kernels) if kernels else absent.state
    answers.append(Answer("Which backend serves?", state, served or absent.message))
    return answers


def _changes(before: QuickLook, after: QuickLook) -> str:
    """Return the changes of the metrics that may decide, in words."""
    titles = {title for title, *_ in METRICS.values()}
    pairs = zip(before.figures, after.figures, strict=True)
    return ", ".join(
        f"{old.name} {text.signed(new.mean / old.mean - 1)}"
        for old, new in pairs
        if old.name in titles and old.mean
    )


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
