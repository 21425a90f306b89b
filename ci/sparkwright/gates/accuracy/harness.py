"""
The answers of one server to the questions of a task, by lm-evaluation-harness (lm-eval) in an
environment of its own.

The environment holds the wheels of ``ci/gates/harness/pylock.toml``. The answers are read as
hostile, because they hold what the server sent. Time, memory and files of lm-eval are limited; it
has neither the network's hub nor a token of the user.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.records import Count
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.builder import pylock, toolchain
from sparkwright.builder.pylock import LockedWheel
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.core.process import Limits
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.server_under_test import ServerIdentity

#: Megabytes of memory that lm-eval may map, and of one of its files.
MEMORY, WRITTEN = 4096, 256

#: The text that lm-eval writes for an answer without text; by default it writes an empty one.
NO_ANSWER = "<sparkwright: no answer>"

#: With fewer questions, a candidate that loses the margin may pass in more than 3 % of runs.
FEWEST_QUESTIONS = 400

#: The name of its environment.
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

    questions: Annotated[int, Meta(ge=FEWEST_QUESTIONS)]
    tokens: Count
    filter: str
    seconds: Count
    concurrency: Count = 1
    fewshot: Annotated[int, Meta(ge=0)] = 0
    file: Annotated[str, Meta(pattern=r"^([\w-]+\.yaml)?$")] = ""
    dataset: str = ""
    subset: str = ""


class TaskResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One server's answers to a task.

    Attributes:
        identity: The wheel, the model and the machine.
        task: The task's name.
        settings: Digest of the settings that decide the questions and how answers are judged.
        questions: The beginning of a digest of each question and its prompt.
        correct: ``1`` or ``0`` for each question, in the same order.
    """

    identity: ServerIdentity
    task: str
    settings: str
    questions: tuple[Annotated[str, Meta(pattern="^[0-9a-f]{16}$")], ...]
    correct: Annotated[str, Meta(pattern="^[01]+$")]
    format: Literal[3] = 3

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

    doc_id: Annotated[int, Meta(ge=0)]
    doc_hash: Annotated[str, Meta(min_length=64, max_length=64)]
    prompt_hash: Annotated[str, Meta(min_length=64, max_length=64)]
    filter: str
    resps: tuple[tuple[str, ...], ...]
    exact_match: Annotated[float, Meta(ge=0, le=1)]


def ask(
    context: RunContext, name: str, task: TaskPolicy, server: Client, identity: ServerIdentity
) -> TaskResult:
    """
    Return the answers of *server*, whose identity is *identity*, to the questions of *task*.

    Raises:
        ServerInvalid: There is no server, it does not serve the model, or a question has no
            answer.
        source-unreachable, offline, command-failed: As `obtain`.
    """
    model_name = server.model()
    python, work_folder = obtain(context), context.store.folder("work")
    with (
        console.step(f"{name}: {task.questions} questions to {model_name}"),
        tempfile.TemporaryDirectory(dir=work_folder, prefix="accuracy-") as folder,
    ):
        source = str(context.project.root / TASKS / task.file) if task.file else name
        answers = read_answers(
            task, _run(python, task, source, server.url, model_name, Path(folder))
        )
    correct = "".join("1" if answer.exact_match == 1 else "0" for answer in answers)
    keys = tuple(
        sha256_bytes(f"{answer.doc_id} {answer.doc_hash} {answer.prompt_hash}".encode())[:16]
        for answer in answers
    )
    return TaskResult(identity, name, settings_digest(context, task), keys, correct)


def settings_digest(context: RunContext, task: TaskPolicy) -> str:
    """Return the digest of the settings that decide the questions and how answers are judged."""
    parts = {
        "settings": msgspec.structs.replace(task, seconds=1),
        "file": sha256_file(context.project.root / TASKS / task.file) if task.file else "",
        "harness": [wheel for wheel in _wheels(context) if wheel[0] == "lm-eval"],
    }
    return content_key("task-settings", parts)


def _wheels(context: RunContext) -> tuple[LockedWheel, ...]:
    return pylock.select(context.project.root / LOCK)


def obtain(context: RunContext) -> Path:
    """
    Return the Python of the environment of lm-eval, which is installed on first use.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full, command-failed: As
            `toolchain.install`.
    """
    root = toolchain.locked_environment(context, TITLE, _wheels(context))
    return root / "bin" / "python"


def has_data(context: RunContext, task: TaskPolicy) -> bool:
    """Return whether the data set of *task* is in this machine's hub cache; nothing is fetched."""
    code = f"import datasets; datasets.load_dataset({task.dataset!r}, {task.subset!r})"
    with tempfile.TemporaryDirectory(dir=context.store.folder("work")) as folder:
        ended = process.run_limited(
            _command(obtain(context), "-c", code), Limits(600, MEMORY, WRITTEN), Path(folder, "log")
        )
    return ended.status == 0


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
        command, Limits(task.seconds, MEMORY, WRITTEN), work / "harness.log"
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
