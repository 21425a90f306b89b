"""
The tasks gate's policy, and asking one server the questions of a task.

The questions of our own task are made by code; the file that the harness loads is the reviewed one with their path in it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from sparkwright.bench.server.client import Client
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.gates.accuracy import harness
from sparkwright.gates.accuracy.harness import HarnessFailed, Question
from sparkwright.gates.accuracy.outcome import Outcome
from sparkwright.gates.core.served import Served

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


def answer(policy: TasksPolicy, task: str, context: RunContext, python: Path, url: str, served: Served, model: str = "") -> Outcome:
    """
    Ask the server at *url* the questions of *task* and return what came of it.

    Raises:
        ServerInvalid: The server is not there, or does not serve *model*.
        HarnessFailed: The harness did not give an answer to every question.
    """
    settings, client = policy.tasks[task], Client(url, model)
    name, vllm = client.model(), client.version()
    with console.step(f"{task}: {settings.questions} questions to {name}"), tempfile.TemporaryDirectory(
        dir=context.store.folder("work"), prefix="tasks-"
    ) as folder:
        work = Path(folder)
        known = own_task(context, settings, work) if settings.file else task
        options = ["--gen_kwargs", f"max_gen_toks={settings.tokens},temperature=0"]
        if settings.dataset:
            options += ["--num_fewshot", str(settings.fewshot)]
        path = harness.ask(
            python, work, known, url, name, settings=options, concurrency=settings.concurrency, seconds=settings.seconds
        )
        found = judged(settings, path)
    marks = "".join("1" if question.exact_match == 1 else "0" for question in found)
    version = harness.version(context)
    return Outcome(served, name, vllm, version, task, settings_digest(context, settings, version), tuple(map(_name, found)), marks)


def settings_digest(context: RunContext, settings: TaskPolicy, version: str) -> str:
    """Return the digest of what decides the questions and how an answer is judged."""
    deciding = msgspec.structs.replace(settings, floors={}, seconds=1)
    own = sha256_file(_folder(context) / settings.file) if settings.file else ""
    return content_key("task-settings", {"settings": deciding, "file": own, "harness": version})


def largest() -> tuple[dict[str, str], ...]:
    """Return the questions of the task ``largest``: every three digits, and the largest of them."""
    return tuple({"digits": f"{number:03d}", "answer": max(f"{number:03d}")} for number in range(1000))


def _folder(context: RunContext) -> Path:
    return context.project.root / "ci" / "gates" / "tasks"


def own_task(context: RunContext, settings: TaskPolicy, work: Path) -> str:
    """Write a task of ours and its questions to *work* and return the path of the task."""
    text = (_folder(context) / settings.file).read_text("utf-8")
    if "!function" in text:
        # The harness would import the Python that it names.
        raise FileError("file-invalid", f"{settings.file} names code of its own.")
    data = work / "questions.jsonl"
    data.write_bytes(b"".join(msgspec.json.encode(question) + b"\n" for question in largest()))
    task = work / settings.file
    task.write_text(text.replace("DATA", str(data)), "utf-8")
    return str(task)


def _name(question: Question) -> str:
    return sha256_bytes(f"{question.doc_id} {question.doc_hash} {question.prompt_hash}".encode())[:16]


def judged(settings: TaskPolicy, path: Path) -> list[Question]:
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
