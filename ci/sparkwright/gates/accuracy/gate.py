"""
G6: a candidate answers questions as well as the baseline wheel, question by question.

Two accuracies side by side differ by chance alone. In pairs, only the questions count that one
side answers correctly and the other one wrongly. The check passes if the true difference is above
minus the margin, fails if it is below, and is inconclusive if the questions do not decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from sparkwright.bench.records import Share
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.gates.accuracy import harness
from sparkwright.gates.accuracy.harness import TaskPolicy, TaskResult
from sparkwright.gates.core.server_facts import Pace
from sparkwright.gates.core.server_under_test import ServerIdentity, read_recorded
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    decided,
    declare,
    invalid,
    not_run,
    passed,
)

#: Tokens of a question of gsm8k with its answer, about.
EXAMPLE_TOKENS = 150

#: The checks of each task, in order: ``gsm8k-baseline``.
PARTS = ("baseline", "answers", "paired", "floor")
CHECKS = tuple(
    entry for part in PARTS for entry in declare(f"*-{part}", measured=part != "answers")
)

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    "task-data-missing": "The task's data set is not in this machine's hub cache, and the gate "
    "fetches none: download it once.",
    "harness-failed": "lm-evaluation-harness ended with an error, as it does at the first request "
    "that fails; the message ends with its output.",
    "harness-slow": "The questions were not answered within the policy's time: the server hangs, "
    "or `seconds` is too short for it.",
    "answers-unreadable": (
        "lm-evaluation-harness did not write its log of answers: it is "
        "another version, or the disk is full."
    ),
    "answers-missing": ("Questions have no answer, or two, or their number is not the policy's."),
    "baseline-damaged": "The saved baseline cannot be read, was cut short or changed: record it "
    "again.",
    "baseline-other": "The baseline was asked other questions, or in another way: record it again "
    "with this policy.",
    "baseline-other-model": "The baseline is of another model than the candidate's: record it with "
    "the same weights, and name those of a server that runs already with --model-folder.",
    "baseline-is-candidate": "The baseline is the candidate itself, which cannot lose against "
    "itself: record the last good wheel.",
    "baseline-unnamed": "The saved baseline does not name its wheel: record it again with the "
    "wheel named.",
    "task-uninformative": "The baseline answers too few questions for a loss to show: take a model "
    "that can do the task, or another task.",
    "worse-than-baseline": "The candidate loses more questions than the margin allows: a kernel or "
    "a scale is wrong.",
    "questions-do-not-decide": "The confidence interval contains the limit: ask more questions.",
    "below-floor": "The candidate is below the recipe's absolute floor, whatever the baseline is.",
    "not-measured": "An earlier check of this gate ended before this could be measured.",
}


class AccuracyPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/accuracy.yaml``, which states the source of each number.

    Attributes:
        margin: The loss against the baseline that is accepted, as a share.
        confidence: Of each one-sided limit.
        power: The probability that an equal wheel passes, if the share *differing* of its answers
            differs by chance.
        informative: The least share of correct answers of a baseline that can judge a candidate.
        tasks: The tasks by name; `task` says how many of the questions are asked.
    """

    margin: Share
    confidence: Annotated[float, Meta(ge=0.5, lt=1)]
    power: Annotated[float, Meta(ge=0.5, lt=1)]
    differing: Share
    informative: Share
    tasks: Annotated[dict[str, TaskPolicy], Meta(min_length=1)]

    def task(self, name: str) -> TaskPolicy:
        """
        Return the task *name* with the number of questions that the error rates need.

        n = (z_confidence + z_power)² · differing / margin² (Lu and Bean, On the sample size for
        one-sided equivalence of sensitivities based upon McNemar's test, 1995); all questions if
        there are fewer.
        """
        task, normal = self.tasks[name], NormalDist()
        reach = normal.inv_cdf(self.confidence) + normal.inv_cdf(self.power)
        needed = max(harness.FEWEST_QUESTIONS, ceil(reach**2 * self.differing / self.margin**2))
        return replace(task, questions=min(task.questions, needed))


def estimate(policy: AccuracyPolicy, pace: Pace, task: str = "gsm8k") -> float:
    """Return the seconds of the answers to *task*, half as long as they may be."""
    rules = policy.task(task)
    prompt, answer = EXAMPLE_TOKENS * (1 + rules.fewshot), max(1, rules.tokens // 2)
    rounds = rules.questions / rules.concurrency
    return rounds * pace.round(prompt, answer, rules.concurrency)


def run(
    policy: AccuracyPolicy,
    name: str,
    context: RunContext,
    server: Client,
    baseline: Path,
    *,
    identity: ServerIdentity,
    floor: float,
) -> tuple[Check, ...]:
    """
    Return the checks of the task *name*.

    Args:
        server: The candidate's server, and *identity*: its wheel, model and machine.
        baseline: The file with the baseline's result.
        floor: The recipe's least share of correct answers.

    Raises:
        file-invalid: The lock of lm-eval is invalid.
        offline, source-unreachable, source-mismatch, command-failed: lm-eval cannot be installed.
    """
    checks = list[Check]()
    try:
        for check in _judged(policy, name, context, server, baseline, identity, floor):
            checks.append(check)
    except ServerInvalid as error:
        part = f"{name}-{PARTS[len(checks)]}"
        make = not_run if error.reason == "task-data-missing" else invalid
        checks.append(make(part, f"{error.message}.", error.reason))
    missing = [f"{name}-{part}" for part in PARTS[len(checks) :]]
    return (
        *checks,
        *(not_run(each, f"{checks[-1].name} ended the task.", "not-measured") for each in missing),
    )


def _judged(
    policy: AccuracyPolicy,
    name: str,
    context: RunContext,
    server: Client,
    baseline: Path,
    identity: ServerIdentity,
    floor: float,
) -> Iterator[Check]:
    """Yield the checks; raise `ServerInvalid` for the first that cannot be judged."""
    task = policy.task(name)
    if task.dataset and not harness.has_data(context, task):
        raise ServerInvalid(
            "task-data-missing", f"the data set {task.dataset} is not on this machine"
        )
    before = read_recorded(baseline, TaskResult, "baseline-damaged", limit=harness.LARGEST)
    count = len(before.correct)
    message = f"The baseline answers {before.share:.1%} of {count} questions correctly"
    for reason, applies in {
        "baseline-unnamed": not before.identity.wheel,
        "baseline-is-candidate": before.identity.wheel == identity.wheel,
        "baseline-other": (before.task, before.settings)
        != (name, harness.settings_digest(context, task)),
        "baseline-other-model": not identity.model or before.identity.model != identity.model,
        "task-uninformative": before.share < policy.informative,
    }.items():
        if applies:
            raise ServerInvalid(reason, f"{message}. {REASONS[reason].removesuffix('.')}")
    figure = Figure(
        "right answers of the baseline", 100 * before.share, "%", count,
        bound=100 * policy.informative,
    )  # fmt: skip
    yield passed(f"{name}-baseline", f"{message}.", figures=[figure])
    now = harness.ask(context, name, task, server, identity)
    if now.questions != before.questions:
        message = "the candidate was asked other questions than the baseline"
        raise ServerInvalid("baseline-other", message)
    yield passed(f"{name}-answers", f"The candidate answered all {len(now.correct)} questions.")
    yield _paired(policy, before, now)
    yield _floor(policy, now, floor)


def _paired(policy: AccuracyPolicy, before: TaskResult, now: TaskResult) -> Check:
    count, pairs = len(now.correct), list(zip(before.correct, now.correct, strict=True))
    lost = [number for number, pair in enumerate(pairs) if pair == ("1", "0")]
    gained = pairs.count(("0", "1"))
    low, high = paired_limits(gained, len(lost), count, policy.confidence)
    difference, margin = 100 * (gained - len(lost)) / count, -100 * policy.margin
    figures = [
        Figure("candidate less baseline", difference, "points", count, bound=margin),
        Figure("lower limit", 100 * low, "points", count),
        Figure("upper limit", 100 * high, "points", count),
        Figure("gained", gained, count=count),
        Figure("lost", len(lost), count=count),
    ]
    samples = [Sample(f"question {number}", "correct", "wrong") for number in lost[:5]]
    message = (
        f"The candidate gains {gained} and loses {len(lost)} of {count} questions: "
        f"{difference:+.2f} points, truly between {100 * low:+.2f} and {100 * high:+.2f}; "
        f"the limit is {margin:+.2f}."
    )
    name, reason = f"{now.task}-paired", "worse-than-baseline"
    return _decide(name, message, (low, high), -policy.margin, reason, figures, samples)


def paired_limits(gained: int, lost: int, count: int, confidence: float) -> tuple[float, float]:
    """
    Return the one-sided lower and upper confidence limits of candidate less baseline, as a share.

    Half a question is added to each of the four kinds of pairs: without it, a few questions that
    both sides answer alike would have no error at all (Agresti and Min, Simple improved confidence
    intervals for comparing matched proportions, 2005).

    Args:
        gained: Questions that only the candidate answers correctly.
        lost: Questions that only the baseline answers correctly.
        count: All questions.
    """
    size, difference, discordant = count + 2, gained - lost, gained + lost + 1
    error = sqrt(discordant - difference**2 / size) / size
    reach = NormalDist().inv_cdf(confidence) * error
    return difference / size - reach, difference / size + reach


def _floor(policy: AccuracyPolicy, now: TaskResult, floor: float) -> Check:
    from scipy.stats import binomtest

    count = len(now.correct)
    test = binomtest(now.correct.count("1"), count)
    # One-sided limits at the policy's confidence are a two-sided interval at less.
    interval = test.proportion_ci(2 * policy.confidence - 1, method="wilson")
    low, high = float(interval.low), float(interval.high)
    return _decide(
        f"{now.task}-floor",
        (
            f"The candidate answers {now.share:.1%} correctly, truly between {low:.1%} and "
            f"{high:.1%}; the floor is {floor:.1%}."
        ),
        (low, high),
        floor,
        "below-floor",
        [Figure("right answers", 100 * now.share, "%", count, bound=100 * floor)],
    )


def _decide(
    name: str,
    message: str,
    interval: tuple[float, float],
    bound: float,
    reason: str,
    figures: list[Figure],
    samples: Sequence[Sample] = (),
) -> Check:
    """Return whether *interval* lies above *bound*."""
    low, high = interval
    state: State = "pass" if low > bound else "fail" if high < bound else "inconclusive"
    reasons: dict[State, str] = {"fail": reason, "inconclusive": "questions-do-not-decide"}
    return decided(name, message, state, reasons, figures, samples)
