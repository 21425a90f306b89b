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

from sparkwright import digest
from sparkwright.console import console
from sparkwright.errors import FileInvalid, Offline, SourceUnreachable
from sparkwright.forks.session import Session
from sparkwright.gates import answers, harness, outcome, paired
from sparkwright.gates.client import Client, ServerInvalid
from sparkwright.gates.harness import HarnessFailed, Question
from sparkwright.gates.outcome import Outcome, OutcomeInvalid
from sparkwright.gates.served import Served, same_model
from sparkwright.gates.verdict import Check, Figure, Sample, failed, inconclusive, invalid, not_run, passed

TITLE = "tasks, paired with the baseline"

REASONS: Mapping[str, str] = {
    **answers.REASONS,
    "harness-missing": "lm-evaluation-harness is not installed and cannot be fetched: run the rung once with a connection.",
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
    "not-measured": "An earlier check of this rung ended before this could be measured.",
}  # fmt: skip


#: Questions below which a candidate that loses the margin may pass more often than 2 times in 100 (2.7 with 200: test_paired.py).
FEWEST = 400


class TaskPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One task.

    Attributes:
        questions: How many there are, at least `FEWEST`.
        tokens: The most that an answer may have.
        filter: Which of the task's ways of reading an answer counts.
        seconds: After which the harness is ended.
        concurrency: Questions that are asked at once.
        fewshot: Examples in the prompt, where the task takes them from its data.
        file: A task of ours below ``ci/gates/tasks``; empty for one of the harness.
        dataset, part: The data set of the hub that a task of the harness needs.
        floors: Pattern of a model's name → the least part of right answers.
    """

    questions: int
    tokens: int
    filter: str
    seconds: int
    concurrency: int = 1
    fewshot: int = 0
    file: str = ""
    dataset: str = ""
    part: str = ""
    floors: dict[str, float] = {}

    def __post_init__(self) -> None:
        if self.questions < FEWEST:
            raise ValueError(f"{self.questions} questions: the interval holds from {FEWEST} on")
        if min(self.tokens, self.seconds, self.concurrency) < 1 or self.fewshot < 0:
            raise ValueError("tokens, seconds and concurrency must be at least 1")
        if bool(self.file) == bool(self.dataset):
            raise ValueError("a task has either a file of ours or a data set")
        if Path(self.file).name != self.file:
            raise ValueError(f"{self.file!r} is no file of the folder of tasks")
        if any(not 0 < floor <= 1 for floor in self.floors.values()):
            raise ValueError("a floor is a part of 1")


class TasksPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/tasks.yaml``, which says where each number comes from.

    Attributes:
        margin: How much worse than the baseline the candidate may be, as a part of 1.
        z: Standard errors of each one-sided limit.
        informative: The least part of right answers of a baseline from which anything follows.
    """

    margin: float
    z: float
    informative: float
    tasks: dict[str, TaskPolicy]

    def __post_init__(self) -> None:
        if not (0 < self.margin < 1 and 0 < self.z < 10 and 0 < self.informative < 1):
            raise ValueError("margin and informative are parts of 1, z is from 0 to 10")
        if not self.tasks:
            raise ValueError("no task is named")


def run(
    policy: TasksPolicy, task: str, session: Session, candidate: str, baseline: str | Outcome | Path, *,
    served: Served, baseline_served: Served | None = None, model: str = "",
) -> tuple[Check, ...]:  # fmt: skip
    """
    Return the checks of *task*.

    Args:
        candidate: The URL of the server of the wheel in question, about which *served* tells what is known.
        baseline: The URL of the baseline's server, or its outcome, or the file with that.
        baseline_served: About the baseline's server; what is known of the candidate's, less its wheel, where it is not given.
        model: The name that both servers have for the model; empty for the only one that each lists.

    Raises:
        FileInvalid: The policy has no such task, or the lock of the harness is none.
        SourceMismatch, CommandFailed: The harness cannot be installed.
    """
    if task not in policy.tasks:
        raise FileInvalid(f"The policy of the tasks has no {task!r}.", details=[f"tasks: {', '.join(policy.tasks)}"])
    try:
        python = harness.obtain(session)
    except (Offline, SourceUnreachable) as error:
        return _ended(task, not_run(f"{task}-baseline", f"lm-evaluation-harness is not here: {error.what}", "harness-missing"))
    settings = policy.tasks[task]
    with tempfile.TemporaryDirectory(dir=session.store.folder("work"), prefix="tasks-") as folder:
        if settings.dataset and not harness.has_data(python, settings.dataset, settings.part, Path(folder)):
            says = f"The data set {settings.dataset} is not on this machine."
            return _ended(task, not_run(f"{task}-baseline", says, "task-data-missing"))
    about = baseline_served or msgspec.structs.replace(served, wheel="")
    before = _baseline(policy, task, session, python, baseline, about, model)
    if isinstance(before, Check):
        return _ended(task, before)
    fit = _fits(policy, task, session, before)
    if fit.state != "pass":
        return _ended(task, fit)
    try:
        now = answer(policy, task, session, python, candidate, served, model)
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


def answer(policy: TasksPolicy, task: str, session: Session, python: Path, url: str, served: Served, model: str = "") -> Outcome:
    """
    Ask the server at *url* the questions of *task* and return what came of it.

    Raises:
        ServerInvalid: The server is not there, or does not serve *model*.
        HarnessFailed: The harness did not give an answer to every question.
    """
    settings, client = policy.tasks[task], Client(url, model)
    name, vllm = client.model(), client.version()
    with console.step(f"{task}: {settings.questions} questions to {name}"), tempfile.TemporaryDirectory(
        dir=session.store.folder("work"), prefix="tasks-"
    ) as folder:
        work = Path(folder)
        known = _own(session, settings, work) if settings.file else task
        options = ["--gen_kwargs", f"max_gen_toks={settings.tokens},temperature=0"]
        if settings.dataset:
            options += ["--num_fewshot", str(settings.fewshot)]
        path = harness.ask(
            python, work, known, url, name, settings=options, concurrency=settings.concurrency, seconds=settings.seconds
        )
        found = _judged(settings, path)
    marks = "".join("1" if question.exact_match == 1 else "0" for question in found)
    version = harness.version(session)
    return Outcome(served, name, vllm, version, task, settings_digest(session, settings, version), tuple(map(_name, found)), marks)


def settings_digest(session: Session, settings: TaskPolicy, version: str) -> str:
    """Return the digest of what decides the questions and how an answer is judged."""
    deciding = msgspec.structs.replace(settings, floors={}, seconds=1)
    own = digest.sha256_file(_folder(session) / settings.file) if settings.file else ""
    return digest.key("task-settings", {"settings": deciding, "file": own, "harness": version})


def largest() -> tuple[dict[str, str], ...]:
    """Return the questions of the task ``largest``: every three digits, and the largest of them."""
    return tuple({"digits": f"{number:03d}", "answer": max(f"{number:03d}")} for number in range(1000))


def _folder(session: Session) -> Path:
    return session.project.root / "ci" / "gates" / "tasks"


def _own(session: Session, settings: TaskPolicy, work: Path) -> str:
    """Write a task of ours and its questions to *work* and return the path of the task."""
    text = (_folder(session) / settings.file).read_text("utf-8")
    if "!function" in text:
        # The harness would import the Python that it names.
        raise FileInvalid(f"{settings.file} names code of its own.")
    data = work / "questions.jsonl"
    data.write_bytes(b"".join(msgspec.json.encode(question) + b"\n" for question in largest()))
    task = work / settings.file
    task.write_text(text.replace("DATA", str(data)), "utf-8")
    return str(task)


def _name(question: Question) -> str:
    return digest.sha256_bytes(f"{question.doc_id} {question.doc_hash} {question.prompt_hash}".encode())[:16]


def _judged(settings: TaskPolicy, path: Path) -> list[Question]:
    """Return the questions in their order; raise `HarnessFailed` where one is missing, twice there, or without an answer."""
    found: dict[int, Question] = {}
    for question in harness.answers(path):
        if question.filter != settings.filter:
            continue
        if question.doc_id in found or len(found) >= settings.questions:
            raise HarnessFailed("answers-missing", f"question {question.doc_id} is answered twice, or one too many")
        if any(harness.NO_ANSWER in said for tries in question.resps for said in tries):
            raise HarnessFailed("answers-missing", f"the server gave no text for question {question.doc_id}")
        found[question.doc_id] = question
    if sorted(found) != list(range(settings.questions)):
        raise HarnessFailed("answers-missing", f"{len(found)} of {settings.questions} questions are answered")
    return [found[number] for number in sorted(found)]


def _broken(name: str, who: str, error: ServerInvalid | HarnessFailed) -> Check:
    tail = [Sample("last lines of the harness", found=line) for line in error.tail] if isinstance(error, HarnessFailed) else []
    return invalid(name, f"{who}: {error.says}.", error.reference, samples=tail)


def _baseline(
    policy: TasksPolicy, task: str, session: Session, python: Path, baseline: str | Outcome | Path, served: Served, model: str
) -> Outcome | Check:
    if isinstance(baseline, Outcome):
        return baseline
    try:
        if isinstance(baseline, Path):
            return outcome.load(baseline)
        return answer(policy, task, session, python, baseline, served, model)
    except OutcomeInvalid as error:
        return invalid(f"{task}-baseline", f"The baseline: {error.says}.", "baseline-damaged")
    except (ServerInvalid, HarnessFailed) as error:
        return _broken(f"{task}-baseline", "The baseline", error)


def _fits(policy: TasksPolicy, task: str, session: Session, before: Outcome) -> Check:
    """Return whether the baseline was asked what the policy asks, and knows enough for anything to follow."""
    name, settings = f"{task}-baseline", policy.tasks[task]
    if before.task != task or before.settings != settings_digest(session, settings, harness.version(session)):
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
    missing = [f"{task}-{part}" for part in ("baseline", "answers", "paired", "floor")][len(done) :]
    return (*done, *(not_run(name, f"{done[-1].name} ended the task.", "not-measured") for name in missing))


def _paired(policy: TasksPolicy, task: str, before: Outcome, now: Outcome) -> Check:
    name, pairs = f"{task}-paired", paired.pairs(before.answers, now.answers)
    low, high = pairs.limits(policy.z)
    figures = [
        Figure("candidate less baseline", 100 * pairs.difference, "points", pairs.count, 100 * pairs.error, -100 * policy.margin),
        Figure("lower limit", 100 * low, "points", pairs.count),
        Figure("upper limit", 100 * high, "points", pairs.count),
        Figure("gained", pairs.gained, times=pairs.count),
        Figure("lost", pairs.lost, times=pairs.count),
        Figure("chance of so uneven changes", pairs.chance, times=pairs.count),
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


def _floor(policy: TasksPolicy, task: str, now: Outcome) -> Check:
    name, right, count = f"{task}-floor", sum(now.answers), len(now.right)
    floors = [floor for pattern, floor in policy.tasks[task].floors.items() if fnmatchcase(now.name, pattern)]
    if not floors:
        return not_run(name, f"The policy has no floor for {now.name!r}; it answers {right / count:.1%} right.", "floor-unknown")
    floor = max(floors)
    low, high = paired.wilson(right, count, policy.z)
    figure = Figure("right answers", 100 * right / count, "%", count, bound=100 * floor)
    says = f"The candidate answers {right / count:.1%} right, truly between {low:.1%} and {high:.1%}; the floor is {floor:.1%}."
    if low >= floor:
        return passed(name, says, figures=[figure])
    if high < floor:
        return failed(name, says, "below-floor", figures=[figure])
    return inconclusive(name, says, "questions-do-not-decide", figures=[figure])
