"""What a server answered to the questions of a task, right or wrong, kept so that another one can be paired with it later."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.core.files import content_key
from sparkwright.gates.core.server_under_test import ServerIdentity

#: Bytes; 1319 questions take 30 kB.
LARGEST = 8 * 1024 * 1024


class ResultInvalid(Exception):
    """A saved outcome that does not count; *says* tells why."""

    def __init__(self, says: str) -> None:
        super().__init__(says)
        self.says = says


class TaskResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One server's answers.

    Attributes:
        served: Which wheel, model and machine.
        name: The model's name, as the server has it.
        vllm: The server's version.
        harness: The version of lm-eval.
        task: The task's name.
        settings: A digest of what decides the questions and how answers are judged, as the policy states it.
        questions: The beginning of a hash per question, of the question and of the whole prompt.
        right: ``1`` or ``0`` per question, in the same order.
    """

    served: ServerIdentity
    name: str
    vllm: str
    harness: str
    task: str
    settings: str
    questions: tuple[Annotated[str, Meta(pattern="^[0-9a-f]{16}$")], ...]
    right: Annotated[str, Meta(pattern="^[01]*$")]
    format: Literal[1] = 1

    @property
    def answers(self) -> tuple[bool, ...]:
        """Which questions were answered right."""
        return tuple(mark == "1" for mark in self.right)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    outcome: TaskResult
    digest: str


def save(outcome: TaskResult, path: Path) -> None:
    """Write *outcome* to *path*, whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(msgspec.json.encode(_File(outcome, content_key("task-outcome", outcome))))
    temporary.replace(path)


def load(path: Path) -> TaskResult:
    """
    Return the outcome in the file at *path*.

    Raises:
        ResultInvalid: It is too large, no such file, cut short or changed.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ResultInvalid(f"{path.name} is larger than {LARGEST} bytes")
        file = msgspec.json.decode(data, type=_File)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ResultInvalid(f"{path.name} is no saved outcome: {error!s:.200}") from error
    if file.digest != content_key("task-outcome", file.outcome):
        raise ResultInvalid(f"{path.name} was changed after it was written")
    if len(file.outcome.questions) != len(file.outcome.right) or len(set(file.outcome.questions)) != len(file.outcome.questions):
        raise ResultInvalid(f"{path.name} does not have one answer for each question")
    return file.outcome
