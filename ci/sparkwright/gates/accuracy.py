"""
G6: a candidate answers questions as well as the baseline wheel, question by question.

Two accuracies side by side differ by chance alone. In pairs, only the questions count that one
side answers correctly and the other one wrongly. The check passes if the true difference is above
minus the margin, fails if it is below, and is inconclusive if the questions do not decide.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from sparkwright.bench.records import Count, Share
from sparkwright.bench.server.client import REASONS as SERVER_REASONS, Client, ServerInvalid
from sparkwright.builder import pylock, toolchain
from sparkwright.core import process
from sparkwright.core.console import console, one_line
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.server_under_test import (
    REFERENCE,
    Pace,
    Recorded,
    ServerIdentity,
    read_stock,
)
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

#: Megabytes of memory that lm-eval may map, and of one of its files.
MEMORY, WRITTEN = 4096, 256

#: The text that lm-eval writes for an answer without text; by default it writes an empty one.
NO_ANSWER = "<sparkwright: no answer>"

#: With fewer questions, a candidate that loses the margin may pass in more than 3 % of runs.
FEWEST_QUESTIONS = 400

#: The name of lm-eval's environment.
TITLE = "lm-eval"

#: Folders of the repository: the lock of lm-eval, and this project's own tasks.
LOCK = Path("ci", "gates", "harness", "pylock.toml")
TASKS = Path("ci", "gates", "tasks")

_VARIABLES = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1",
    "HF_DATASETS_TRUST_REMOTE_CODE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*",
    "no_proxy": "*", "LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER": NO_ANSWER, "OMP_NUM_THREADS": "1",
    "HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "", "OPENAI_API_KEY": "",
}  # fmt: skip

#: Bytes that are read of a saved result; 1319 questions take 30 kB.
LARGEST = 8 << 20


class TaskPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One task.

    Attributes:
        questions: Number of questions that there are; `AccuracyPolicy.task` has those asked.
        tokens: Maximum length of an answer.
        filter: The filter of the task by which lm-eval reads an answer.
        seconds: Time limit of all questions.
        concurrency: Requests at once.
        fewshot: Examples in the prompt, for a task of lm-eval.
        file: A task of this project in ``ci/gates/tasks``; empty for one of lm-eval.
        dataset: The data set of the hub that a task of lm-eval reads, and *subset*, a part of it.
    """

    questions: Annotated[int, msgspec.Meta(ge=FEWEST_QUESTIONS)]
    tokens: Count
    filter: str
    seconds: Count
    concurrency: Count = 1
    fewshot: Annotated[int, msgspec.Meta(ge=0)] = 0
    file: Annotated[str, msgspec.Meta(pattern=r"^([\w-]+\.yaml)?$")] = ""
    dataset: str = ""
    subset: str = ""


class TaskResult(Recorded, frozen=True, forbid_unknown_fields=True):
    """
    One server's answers to a task, whose `shape` is `settings_digest`.

    Attributes:
        task: The task's name.
        questions: The beginning of a digest of each question and its prompt.
        correct: ``1`` or ``0`` for each question, in the same order.
    """

    task: str
    questions: tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")], ...]
    correct: Annotated[str, msgspec.Meta(pattern="^[01]+$")]
    format: Literal[4] = 4

    def __post_init__(self) -> None:
        if not len(self.correct) == len(set(self.questions)) == len(self.questions):
            raise ValueError("it does not have one answer for each question")

    @property
    def share(self) -> float:
        """The share of correct answers, from 0 to 1."""
        return self.correct.count("1") / len(self.correct)


class Answer(msgspec.Struct, frozen=True):
    """
    One answer as lm-eval logs it.

    Attributes:
        doc_id: Number of the question.
        doc_hash: Digest of the question, and *prompt_hash* of everything that was sent.
        filter: The filter that read the answer.
        resps: The server's texts for each try.
        exact_match: 1 for a correct answer.
    """

    doc_id: Annotated[int, msgspec.Meta(ge=0)]
    doc_hash: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
    prompt_hash: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
    filter: str
    resps: tuple[tuple[str, ...], ...]
    exact_match: Annotated[float, msgspec.Meta(ge=0, le=1)]


def ask(
    context: RunContext, name: str, task: TaskPolicy, server: Client, identity: ServerIdentity
) -> TaskResult:
    """
    Return the answers of *server*, whose identity is *identity*, to the questions of *task*.

    Raises:
        ServerInvalid: There is no server, it does not serve the model, or a question has no
            answer.
        source-unreachable, offline, command-failed: As `obtain_harness`.
    """
    model_name = server.model()
    python, work_folder = obtain_harness(context), context.store.folder("work")
    with (
        console.step(f"{name}: {task.questions} questions to {model_name}"),
        tempfile.TemporaryDirectory(dir=work_folder, prefix="accuracy-") as folder,
    ):
        source = str(context.project.root / TASKS / task.file) if task.file else name
        answers = read_answers(
            task, _run(python, task, source, server.url, model_name, Path(folder))
        )
    correct, keys = "", list[str]()
    for answer in answers:
        correct += "1" if answer.exact_match == 1 else "0"
        key = f"{answer.doc_id} {answer.doc_hash} {answer.prompt_hash}"
        keys.append(sha256_bytes(key.encode())[:16])
    return TaskResult(identity, settings_digest(context, name, task), name, tuple(keys), correct)


def settings_digest(context: RunContext, name: str, task: TaskPolicy) -> str:
    """Return the digest of what decides the questions of a task and how answers are judged."""
    parts = {
        "task": name,
        "settings": msgspec.structs.replace(task, seconds=1),
        "file": sha256_file(context.project.root / TASKS / task.file) if task.file else "",
        "harness": [wheel for wheel in _wheels(context) if wheel[0] == "lm-eval"],
    }
    return content_key("task-settings", parts)


def _wheels(context: RunContext) -> tuple[pylock.LockedWheel, ...]:
    return pylock.select(context.project.root / LOCK)


def obtain_harness(context: RunContext) -> Path:
    """
    Return the Python of the environment of lm-eval, which is installed on first use.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full, command-failed: As
            `toolchain.install`.
    """
    return toolchain.locked_environment(context, TITLE, _wheels(context)) / "bin" / "python"


def missing_data(context: RunContext, task: TaskPolicy) -> str:
    """
    Return why the data set of *task* cannot be loaded from this machine's hub cache; empty if it
    can, or if the task has none. Nothing is fetched.
    """
    if not task.dataset:
        return ""
    code = f"import datasets; datasets.load_dataset({task.dataset!r}, {task.subset!r})"
    with tempfile.TemporaryDirectory(dir=context.store.folder("work")) as folder:
        log = Path(folder, "log")
        command = _command(obtain_harness(context), "-c", code)
        ended = process.run_limited(command, process.Limits(600, MEMORY, WRITTEN), log)
        lines = log.read_text("utf-8", "replace").split("\n") if log.exists() else []
    if ended.status == 0:
        return ""
    cause = next((line for line in reversed(lines) if line.strip()), f"status {ended.status}")
    cause = one_line(cause, 200)
    return f"{task.dataset} ({task.subset}) cannot be loaded from this machine: {cause}"


def read_answers(task: TaskPolicy, path: Path) -> list[Answer]:
    """
    Return the answers in the file at *path*, in the order of the questions.

    Raises:
        ServerInvalid: A line cannot be read (``answers-unreadable``), or a question has no answer,
            two or one without text (``answers-missing``).
    """
    try:
        logged = msgspec.json.Decoder(Answer).decode_lines(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ServerInvalid(
            "answers-unreadable", f"its answers cannot be read: {error!s:.200}"
        ) from error
    answers = [answer for answer in logged if answer.filter == task.filter]
    empty = sum(NO_ANSWER in text for answer in answers for texts in answer.resps for text in texts)
    answers.sort(key=lambda answer: answer.doc_id)
    if empty or [answer.doc_id for answer in answers] != list(range(task.questions)):
        raise ServerInvalid(
            "answers-missing",
            f"{len(answers)} answers to {task.questions} questions, {empty} without a text",
        )
    return answers


def _run(python: Path, task: TaskPolicy, source: str, url: str, model: str, work: Path) -> Path:
    """Run lm-eval in the folder *work* and return the file with its answers."""
    questions = [{"digits": f"{n:03d}", "answer": max(f"{n:03d}")} for n in range(1000)]
    (work / "largest.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(questions))
    arguments = {
        "base_url": f"{url.rstrip('/')}/v1/completions",
        "model": model,
        "num_concurrent": task.concurrency,
        "tokenizer_backend": "none",
        # A failed request is not repeated: a server that fails now and then must not pass.
        "max_retries": 1,
        "timeout": 300,
    }
    command = _command(
        python, "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", msgspec.json.encode(arguments).decode(), "--tasks", source,
        "--log_samples", "--output_path", str(work / "answers"), "--seed", "0",
        "--limit", str(task.questions), "--gen_kwargs", f"max_gen_toks={task.tokens},temperature=0",
        *(["--num_fewshot", str(task.fewshot)] if task.dataset else []),
        cache=None if task.dataset else work / "cache",
    )  # fmt: skip
    ended = process.run_limited(
        command, process.Limits(task.seconds, MEMORY, WRITTEN), work / "log"
    )
    files = sorted((work / "answers").rglob("samples_*.jsonl"))
    if ended.late or ended.status or len(files) != 1:
        reason = "harness-slow" if ended.late else "harness-failed"
        message = f"{len(files)} files of answers came within {task.seconds} s"
        raise ServerInvalid(reason, f"{message}; status {ended.status}: {ended.tail[-300:]}")
    return files[0]


def _command(python: Path, *words: str, cache: Path | None = None) -> list[str]:
    """Return a command in the environment of *python*; *cache* is for data of this project."""
    own = {"HF_DATASETS_CACHE": str(cache), "HF_HOME": str(cache)} if cache else {}
    variables = [f"{name}={value}" for name, value in (_VARIABLES | own).items()]
    return ["env", *variables, str(python), "-I", *words]


#: Tokens of a question of gsm8k with its answer, about.
EXAMPLE_TOKENS = 150

#: The checks of each task, in order: ``gsm8k-baseline``.
PARTS = ("baseline", "answers", "paired", "floor")
CHECKS = (
    *declare("*-baseline", measured=True),
    *declare("*-answers"),
    *declare("*-paired", "*-floor", measured=True),
)

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **REFERENCE,
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
    confidence: Annotated[float, msgspec.Meta(ge=0.5, lt=1)]
    power: Annotated[float, msgspec.Meta(ge=0.5, lt=1)]
    differing: Share
    informative: Share
    tasks: Annotated[dict[str, TaskPolicy], msgspec.Meta(min_length=1)]

    def task(self, name: str) -> TaskPolicy:
        """
        Return the task *name* with the number of questions that the error rates need.

        n = (z_confidence + z_power)² · differing / margin² (Lu and Bean, On the sample size for
        one-sided equivalence of sensitivities based upon McNemar's test, 1995); all questions if
        there are fewer.
        """
        task, normal = self.tasks[name], NormalDist()
        reach = normal.inv_cdf(self.confidence) + normal.inv_cdf(self.power)
        needed = max(FEWEST_QUESTIONS, ceil(reach**2 * self.differing / self.margin**2))
        return replace(task, questions=min(task.questions, needed))


def estimate(policy: AccuracyPolicy, pace: Pace, seats: int, task: str = "gsm8k") -> float:
    """
    Return the seconds in which a server that takes *seats* requests at a time answers *task*; the
    answers are taken to be half as long as they may be.
    """
    rules = policy.task(task)
    at_once = min(rules.concurrency, seats)
    prompt, answer = EXAMPLE_TOKENS * (1 + rules.fewshot), max(1, rules.tokens // 2)
    return rules.questions / at_once * pace.round(prompt, answer, at_once)


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
    message = f"{checks[-1].name} ended the task."
    for part in PARTS[len(checks) :]:
        checks.append(not_run(f"{name}-{part}", message, "not-measured"))
    return tuple(checks)


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
    if lacking := missing_data(context, task):
        raise ServerInvalid("task-data-missing", f"the data set {lacking}")
    shape = settings_digest(context, name, task)
    before = read_stock(baseline, TaskResult, identity, shape, limit=LARGEST)
    count = len(before.correct)
    message = f"The baseline answers {before.share:.1%} of {count} questions correctly"
    if before.share < policy.informative:
        raise ServerInvalid("task-uninformative", message)
    figure = Figure(
        "right answers of the baseline", 100 * before.share, "%", count,
        bound=100 * policy.informative,
    )  # fmt: skip
    yield passed(f"{name}-baseline", f"{message}.", figures=[figure])
    now = ask(context, name, task, server, identity)
    if now.questions != before.questions:
        message = "the candidate was asked other questions than the baseline"
        raise ServerInvalid("reference-other-policy", message)
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
