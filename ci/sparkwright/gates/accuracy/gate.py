"""
G6: does the candidate answer questions as well as the baseline wheel, question by question?

Two accuracies side by side differ by chance alone; paired by question, only those tell that one side gets right and the other wrong. The
verdict is about the true difference: it passes when that is above minus the margin, fails when it is below, and is inconclusive when
the questions do not decide.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from sparkwright.bench.server import answers
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.core.errors import FileError
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.gates.accuracy import mcnemar, result, runner
from sparkwright.gates.accuracy.result import ResultInvalid, TaskResult
from sparkwright.gates.accuracy.runner import (
    AccuracyPolicy,
    HarnessFailed,
    TaskPolicy,
    answer,
    settings_digest,
)
from sparkwright.gates.core.server_under_test import ServerIdentity, same_model
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    inconclusive,
    invalid,
    not_run,
    passed,
)

__all__ = ["CHECKS", "REASONS", "TITLE", "AccuracyPolicy", "TaskPolicy", "answer", "run", "settings_digest"]

TITLE = "tasks, paired with the baseline"

#: The checks of each task, in order: ``gsm8k-baseline``.
PARTS = ("baseline", "answers", "paired", "floor")
CHECKS = (
    *(one for part in PARTS for one in declare(f"*-{part}", measured=part != "answers")),
    *declare("baseline", role="reports"),
)

REASONS: Mapping[str, str] = {
    **answers.REASONS,
    "harness-missing": "lm-evaluation-harness is not installed and cannot be fetched: run the gate once with a connection.",
    "task-data-missing": "The task's data set is not in this machine's hub cache, and the gate fetches none: download it once.",
    "harness-failed": "lm-evaluation-harness ended with an error, as it does at the first request that fails; see its last lines.",
    "harness-slow": "The questions were not answered within the policy's time: the server hangs, or `seconds` is too short for it.",
    "answers-unreadable": "What lm-evaluation-harness wrote is not what it writes: another version, or its disk is full.",
    "answers-missing": "Questions are without an answer, or answered twice, or are not as many as the policy says.",
    "baseline-damaged": "The saved baseline cannot be read, was cut short or changed: make it again.",
    "baseline-other": "The baseline was asked other questions, in another way, or is of another model: make it again with this policy.",
    "task-uninformative": "The baseline answers too few questions for a loss to show: take a model that knows the task, or another task.",
    "worse-than-baseline": "The candidate loses more questions than the margin allows: a kernel or a scale is wrong.",
    "questions-do-not-decide": "The interval holds the limit: ask more questions.",
    "below-floor": "The candidate is below the model's absolute floor, whatever the baseline does.",
    "floor-unknown": "The policy has no floor for this model: measure a trusted wheel and add one.",
    "not-measured": "An earlier check of this gate ended before this could be measured.",
}  # fmt: skip


def run(
    policy: AccuracyPolicy, task: str, context: RunContext, candidate: str, baseline: str | TaskResult | Path, *,
    served: ServerIdentity, baseline_served: ServerIdentity | None = None, model: str = "",
) -> tuple[Check, ...]:  # fmt: skip
    """
    Return the checks of *task*.

    Args:
        candidate: The URL of the server of the wheel in question, about which *served* tells what is known.
        baseline: The URL of the baseline's server, or its outcome, or the file with that.
        baseline_served: About the baseline's server; what is known of the candidate's, less its wheel, where it is not given.
        model: The name that both servers have for the model; empty for the only one that each lists.

    Raises:
        file-invalid: The policy has no such task, or the lock of the harness is none.
        source-mismatch, command-failed: The harness cannot be installed.
    """
    if task not in policy.tasks:
        raise FileError("file-invalid", f"The policy of the tasks has no {task!r}.", details=[f"tasks: {', '.join(policy.tasks)}"])
    try:
        python = runner.obtain(context)
    except SourceError as error:
        if error.reference not in {"offline", "source-unreachable"}:
            raise
        return _ended(task, not_run(f"{task}-baseline", f"lm-evaluation-harness is not here: {error.what}", "harness-missing"))
    settings = policy.tasks[task]
    with tempfile.TemporaryDirectory(dir=context.store.folder("work"), prefix="tasks-") as folder:
        if settings.dataset and not runner.has_data(python, settings.dataset, settings.part, Path(folder)):
            says = f"The data set {settings.dataset} is not on this machine."
            return _ended(task, not_run(f"{task}-baseline", says, "task-data-missing"))
    about = baseline_served or msgspec.structs.replace(served, wheel="")
    before = _baseline(policy, task, context, python, baseline, about, model)
    if isinstance(before, Check):
        return _ended(task, before)
    fit = _fits(policy, task, context, before)
    if fit.state != "pass":
        return _ended(task, fit)
    try:
        now = answer(policy, task, context, python, candidate, served, model)
    except (ServerInvalid, HarnessFailed) as error:
        return _ended(task, fit, _broken(f"{task}-answers", "The candidate", error))
    if (now.questions, now.settings) != (before.questions, before.settings):
        says = "The candidate was asked other questions than the baseline."
        return _ended(task, fit, invalid(f"{task}-answers", says, "baseline-other"))
    if not same_model(served, now.name, before.served, before.name):
        says = f"The candidate serves {now.name!r}, the baseline is of {before.name!r}."
        return _ended(task, fit, invalid(f"{task}-answers", says, "baseline-other"))
    answered = passed(f"{task}-answers", f"The candidate answered all {len(now.right)} questions.")
    return (fit, answered, _paired(policy, task, before, now), _floor(policy, task, now))


def _broken(name: str, who: str, error: ServerInvalid | HarnessFailed) -> Check:
    tail = [Sample("last lines of the harness", actual=line) for line in error.tail] if isinstance(error, HarnessFailed) else []
    return invalid(name, f"{who}: {error.says}.", error.reference, samples=tail)


def _baseline(
    policy: AccuracyPolicy, task: str, context: RunContext, python: Path, baseline: str | TaskResult | Path, served: ServerIdentity, model: str
) -> TaskResult | Check:
    if isinstance(baseline, TaskResult):
        return baseline
    try:
        if isinstance(baseline, Path):
            return result.load(baseline)
        return answer(policy, task, context, python, baseline, served, model)
    except ResultInvalid as error:
        return invalid(f"{task}-baseline", f"The baseline: {error.says}.", "baseline-damaged")
    except (ServerInvalid, HarnessFailed) as error:
        return _broken(f"{task}-baseline", "The baseline", error)


def _fits(policy: AccuracyPolicy, task: str, context: RunContext, before: TaskResult) -> Check:
    """Return whether the baseline was asked what the policy asks, and knows enough for anything to follow."""
    name, settings = f"{task}-baseline", policy.tasks[task]
    if before.task != task or before.settings != settings_digest(context, settings, runner.version(context)):
        return invalid(name, "The baseline was asked another task, or in another way.", "baseline-other")
    if len(before.right) != settings.questions:
        return invalid(name, f"The baseline has {len(before.right)} answers instead of {settings.questions}.", "baseline-other")
    part = sum(before.answers) / settings.questions
    figure = Figure("right answers of the baseline", 100 * part, "%", settings.questions, bound=100 * policy.informative)
    if part < policy.informative:
        says = f"The baseline answers {part:.1%} right; below {policy.informative:.0%} a loss would not show."
        return invalid(name, says, "task-uninformative", figures=[figure])
    return passed(name, f"The baseline answers {part:.1%} of {settings.questions} questions right.", figures=[figure])


def _ended(task: str, *done: Check) -> tuple[Check, ...]:
    missing = [f"{task}-{part}" for part in PARTS][len(done) :]
    return (*done, *(not_run(name, f"{done[-1].name} ended the task.", "not-measured") for name in missing))


def _paired(policy: AccuracyPolicy, task: str, before: TaskResult, now: TaskResult) -> Check:
    name, pairs = f"{task}-paired", mcnemar.pairs(before.answers, now.answers)
    low, high = pairs.limits(policy.z)
    figures = [
        Figure("candidate less baseline", 100 * pairs.difference, "points", pairs.count, 100 * pairs.error, -100 * policy.margin),
        Figure("lower limit", 100 * low, "points", pairs.count),
        Figure("upper limit", 100 * high, "points", pairs.count),
        Figure("gained", pairs.gained, count=pairs.count),
        Figure("lost", pairs.lost, count=pairs.count),
        Figure("chance of so uneven changes", pairs.chance, count=pairs.count),
    ]
    lost = [number for number, (one, other) in enumerate(zip(before.answers, now.answers, strict=True)) if one and not other]
    samples = [Sample(f"question {number}", "right, by the baseline", "wrong") for number in lost[:5]]
    says = (
        f"The candidate gains {pairs.gained} and loses {pairs.lost} of {pairs.count} questions: {100 * pairs.difference:+.2f} points, "
        f"truly between {100 * low:+.2f} and {100 * high:+.2f}; the limit is {-100 * policy.margin:+.2f}."
    )
    if low > -policy.margin:
        return passed(name, says, figures=figures, samples=samples)
    if high < -policy.margin:
        return failed(name, says, "worse-than-baseline", figures=figures, samples=samples)
    return inconclusive(name, says, "questions-do-not-decide", figures=figures, samples=samples)


def floors(policy: AccuracyPolicy, task: str, name: str) -> list[float]:
    """Return the floors of *task* for the model served as *name*."""
    return [floor for pattern, floor in policy.tasks[task].floors.items() if fnmatchcase(name, pattern)]


def _floor(policy: AccuracyPolicy, task: str, now: TaskResult) -> Check:
    name, right, count = f"{task}-floor", sum(now.answers), len(now.right)
    known = floors(policy, task, now.name)
    if not known:
        return not_run(name, f"The policy has no floor for {now.name!r}; it answers {right / count:.1%} right.", "floor-unknown")
    floor = max(known)
    low, high = mcnemar.wilson(right, count, policy.z)
    figure = Figure("right answers", 100 * right / count, "%", count, bound=100 * floor)
    says = f"The candidate answers {right / count:.1%} right, truly between {low:.1%} and {high:.1%}; the floor is {floor:.1%}."
    if low >= floor:
        return passed(name, says, figures=[figure])
    if high < floor:
        return failed(name, says, "below-floor", figures=[figure])
    return inconclusive(name, says, "questions-do-not-decide", figures=[figure])
