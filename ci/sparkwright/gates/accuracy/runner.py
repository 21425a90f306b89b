"""
lm-evaluation-harness, in an environment of its own, made of exactly the wheels that ``ci/gates/harness/pylock.toml`` names by hash.

It asks the server the questions of one task and writes each answer down; what it writes is read as hostile, as it holds what the server
said. It runs with its time, its memory and its files limited, without the network's hub, and without a token of the user.
"""

from __future__ import annotations

import contextlib
import platform
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.server.client import Client
from sparkwright.builder import pylock, toolchain
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.gates.accuracy.result import TaskResult
from sparkwright.gates.core.server_under_test import ServerIdentity

#: Bytes of memory that the harness may map, and that one of its files may have.
MEMORY, FILE = 4 << 30, 256 << 20

#: Bytes of one line of its answers; a line holds a question, its prompt and what the server said.
LINE = 4 << 20

#: What the harness is told to write in place of an answer without text; by itself it writes nothing, which is an answer too.
NO_ANSWER = "<sparkwright: no answer>"

_DONE = re.compile(rb"Requesting API:[^\r\n]*?(\d+)/(\d+)")


class HarnessFailed(Exception):
    """The harness did not give answers that count; *reference* is a stable reference, *tail* its last lines."""

    def __init__(self, reference: str, says: str, tail: Sequence[str] = ()) -> None:
        super().__init__(says)
        self.reference, self.says, self.tail = reference, says, tuple(tail)


class Question(msgspec.Struct, frozen=True):
    """
    One question and its answer, as the harness logs it.

    Attributes:
        doc_id: Its number in the task.
        doc_hash, prompt_hash: Of the question and of all that was sent.
        filter: The way in which the answer was taken from the words.
        resps: What the server said, per try.
        exact_match: 1 where the answer is right.
    """

    doc_id: Annotated[int, Meta(ge=0, le=10_000_000)]
    doc_hash: Annotated[str, Meta(min_length=64, max_length=64)]
    prompt_hash: Annotated[str, Meta(min_length=64, max_length=64)]
    target: str
    filter: str
    resps: tuple[tuple[str, ...], ...]
    filtered_resps: tuple[str | None, ...]
    exact_match: Annotated[float, Meta(ge=0, le=1)]


def folder(context: RunContext) -> Path:
    """Return where the lock of the harness lies."""
    return context.project.root / "ci" / "gates" / "harness"


def version(context: RunContext) -> str:
    """Return the version of lm-eval that the lock names."""
    return next(filename.split("-")[1] for name, filename, _ in pylock.select(folder(context) / "pylock.toml") if name == "lm-eval")


def obtain(context: RunContext) -> Path:
    """
    Return the Python of the harness, installed.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: See `sparkwright.builder.pylock.download`.
        command-failed: The installer failed.
    """
    wheels = pylock.select(folder(context) / "pylock.toml")
    key = content_key("harness", {"wheels": wheels, "python": platform.python_version(), "machine": platform.machine()})
    root = context.store.root / "environments" / f"harness-{key[:16]}"
    with toolchain.completing(context.store, root) as lacking:
        if lacking:
            toolchain.install(context, root, wheels, "lm-evaluation-harness")
    return root / "bin" / "python"


def has_data(python: Path, dataset: str, part: str, work: Path) -> bool:
    """Return whether the data set *dataset* of the hub lies on this machine; nothing is fetched."""
    code = f"import datasets; datasets.load_dataset({dataset!r}, {part!r})"
    try:
        process.run([*_limited(600), python, "-I", "-c", code], log=work / "data.log", env=_environment())
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        return False
    return True


def ask(python: Path, work: Path, task: str, url: str, model: str, *, settings: Sequence[str], concurrency: int, seconds: int) -> Path:
    """
    Have the harness ask the server at *url* and return the file with its answers, a `Question` per line.

    Args:
        work: An empty folder.
        task: A task's name, or the path of its YAML file.
        settings: Further arguments of the command line.
        seconds: After which it is ended.

    Raises:
        HarnessFailed: It ended with an error, as it does at the first answer that is none (``harness-failed``), or not in time
            (``harness-slow``).
        tool-missing: ``timeout`` or ``prlimit`` is not on this machine.
    """
    arguments = {
        "base_url": f"{url.rstrip('/')}/v1/completions", "model": model, "num_concurrent": concurrency, "tokenizer_backend": "none",
        # A request that fails is not tried again: a server that fails now and then is what the gate looks for.
        "max_retries": 1, "timeout": 300,
    }  # fmt: skip
    command = [
        *_limited(seconds), python, "-I", "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", msgspec.json.encode(arguments).decode(), "--tasks", task,
        "--log_samples", "--output_path", work / "answers", "--seed", "0", *settings,
    ]  # fmt: skip
    log = work / "harness.log"
    own = task.endswith(".yaml")
    try:
        with _progress(log):
            # Through a shell, so that what it prints is limited in size as any of its files: it repeats a server's error in full.
            shell = ["sh", "-c", 'out="$1"; shift; exec "$@" >"$out" 2>&1', "sh", str(log)]
            process.run([*shell, *map(str, command)], log=work / "command.log", env=_environment(work if own else None))
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        status = error.data.get("status")
        if status in (124, 137):
            raise HarnessFailed("harness-slow", f"lm-eval did not end within {seconds} s", _tail(log)) from error
        raise HarnessFailed("harness-failed", f"lm-eval ended with status {status}", _tail(log)) from error
    files = sorted((work / "answers").rglob("samples_*.jsonl"))
    if len(files) != 1:
        raise HarnessFailed("harness-failed", f"lm-eval wrote {len(files)} files of answers instead of one", _tail(log))
    return files[0]


def answers(path: Path) -> Iterator[Question]:
    """
    Yield the answers in the file at *path*.

    Raises:
        HarnessFailed: A line is too long or none that the harness writes.
    """
    with path.open("rb") as stream:
        while line := stream.readline(LINE + 1):
            if len(line) > LINE:
                raise HarnessFailed("answers-unreadable", f"a line of its answers is longer than {LINE} bytes")
            try:
                yield msgspec.json.decode(line, type=Question)
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                raise HarnessFailed("answers-unreadable", f"a line of its answers cannot be read: {error!s:.200}") from error


def _limited(seconds: int) -> list[str]:
    return ["timeout", "--kill-after=10", str(seconds), "prlimit", f"--as={MEMORY}", f"--fsize={FILE}"]


def _environment(cache: Path | None = None) -> dict[str, str]:
    """Return the variables of the harness: no hub, no proxy, nobody's token; *cache* is where it prepares data of our own."""
    own = {"HF_DATASETS_CACHE": str(cache / "cache"), "HF_HOME": str(cache / "cache")} if cache else {}
    return process.clean_environment(
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_EVALUATE_OFFLINE="1", HF_DATASETS_TRUST_REMOTE_CODE="0",
        HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="*", no_proxy="*",
        LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER=NO_ANSWER, HF_TOKEN="", HUGGING_FACE_HUB_TOKEN="", OPENAI_API_KEY="",
        OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1",
        **own,
    )  # fmt: skip


def _tail(log: Path, lines: int = 12) -> list[str]:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 16384))
        return [line[:300] for line in stream.read().decode("utf-8", "replace").splitlines()[-lines:]]
    return []


@contextlib.contextmanager
def _progress(log: Path) -> Iterator[None]:
    """Show, for the block, how many questions the log says are answered."""
    ended = threading.Event()

    def watch() -> None:
        with console.progress("questions", 0) as line:
            while not ended.wait(1):
                if seen := _DONE.findall("\n".join(_tail(log)).encode()):
                    line.total = float(seen[-1][1])
                    line.update(float(seen[-1][0]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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


class AccuracyPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


def answer(policy: AccuracyPolicy, task: str, context: RunContext, python: Path, url: str, served: ServerIdentity, model: str = "") -> TaskResult:
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
        path = ask(
            python, work, known, url, name, settings=options, concurrency=settings.concurrency, seconds=settings.seconds
        )
        found = judged(settings, path)
    marks = "".join("1" if question.exact_match == 1 else "0" for question in found)
    release = version(context)
    return TaskResult(served, name, vllm, release, task, settings_digest(context, settings, release), tuple(map(_name, found)), marks)


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
    for question in answers(path):
        if question.filter != settings.filter:
            continue
        if question.doc_id in found or len(found) >= settings.questions:
            raise HarnessFailed("answers-missing", f"question {question.doc_id} is answered twice, or one too many")
        if any(NO_ANSWER in said for tries in question.resps for said in tries):
            raise HarnessFailed("answers-missing", f"the server gave no text for question {question.doc_id}")
        found[question.doc_id] = question
    if sorted(found) != list(range(settings.questions)):
        raise HarnessFailed("answers-missing", f"{len(found)} of {settings.questions} questions are answered")
    return [found[number] for number in sorted(found)]
