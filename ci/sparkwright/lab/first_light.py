"""
The page and the bundle of a first run on a machine: its steps, and the open questions.

A bundle holds the page, the verdicts, the facts of `doctor` and the logs of the steps. `redacted`
takes secrets out of texts that other programs wrote.
"""

from __future__ import annotations

import os
import platform
import re
import tarfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from sparkwright import __version__
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.records import METRICS
from sparkwright.bench.report import text
from sparkwright.core.console import duration
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.core.http import redact_credentials
from sparkwright.core.pages import environment
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.gates.core.verdict import Verdict, worst
from sparkwright.release.bundle import anonymous_member

#: Of a step: ``measured`` gives figures and decides nothing.
StepState = State | Literal["measured"]

#: Files of a run: its page, its results, the sha256 of each file of the bundle, and the bundle.
PAGE, RESULTS = "first-light.html", "results.json"
MANIFEST, BUNDLE = "MANIFEST.sha256", "first-light.tar.gz"

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
            f"{old.name} {text.signed(new.mean / old.mean - 1)} %"
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
    page = environment("sparkwright.lab").get_template("first_light.html")
    shown = {"version": __version__, "duration": duration, "number": text.number}
    store.write(folder / PAGE, page.render(**results, **shown, state=state(records)).encode())
    evidence = {name for record in records.values() for name in record.files}
    names = [PAGE, RESULTS, *sorted(evidence)]
    lines = [f"{sha256_file(folder / name)}  {name}\n" for name in names]
    store.write(folder / MANIFEST, "".join(lines).encode())
    with store.replacing(folder / BUNDLE) as temporary, tarfile.open(temporary, "w:gz") as archive:
        for name in (MANIFEST, *names):
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
