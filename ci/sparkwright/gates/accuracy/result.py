"""The answers of one server to the questions of a task, and the statistics of two such results."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.core.errors import FileError
from sparkwright.core.files import content_key
from sparkwright.gates.core.server_under_test import ServerIdentity

#: Bytes that are read of a saved result; 1319 questions take 30 kB.
LARGEST = 8 << 20

QuestionKey = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class TaskResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One server's answers to a task.

    Attributes:
        identity: The wheel, the model and the machine.
        model_name: The model's name at the server.
        task: The task's name.
        settings: Digest of the settings that decide the questions and how answers are judged.
        questions: The beginning of a digest of each question and its prompt.
        correct: ``1`` or ``0`` for each question, in the same order.
    """

    identity: ServerIdentity
    model_name: str
    task: str
    settings: str
    questions: tuple[QuestionKey, ...]
    correct: Annotated[str, Meta(pattern="^[01]*$")]
    format: Literal[2] = 2

    def __post_init__(self) -> None:
        if not len(self.correct) == len(set(self.questions)) == len(self.questions):
            raise ValueError("it does not have one answer for each question")

    @property
    def share(self) -> float:
        """The share of correct answers, from 0 to 1."""
        return self.correct.count("1") / len(self.correct)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    result: TaskResult
    digest: str


def save(result: TaskResult, path: Path) -> None:
    """Write *result* to *path*, whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(msgspec.json.encode(_File(result, content_key("task-result", result))))
    temporary.replace(path)


def load(path: Path) -> TaskResult:
    """
    Return the result in the file at *path*.

    Raises:
        file-invalid: The file does not exist, is too large, cut short or changed.
    """
    try:
        with path.open("rb") as stream:
            file = msgspec.json.decode(stream.read(LARGEST + 1), type=_File)
        if file.digest != content_key("task-result", file.result):
            raise ValueError("it was changed after it was written")
    except (OSError, ValueError, RecursionError) as error:
        raise FileError("file-invalid", f"{path.name} is no result: {error!s:.200}.") from error
    return file.result


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
    error = math.sqrt(discordant - difference**2 / size) / size
    reach = NormalDist().inv_cdf(confidence) * error
    return difference / size - reach, difference / size + reach
