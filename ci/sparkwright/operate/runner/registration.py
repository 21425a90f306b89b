"""
One registration of this machine with GitHub, for one job.

GitHub makes a configuration that works once ("just in time"). It is a secret as the token is: it is in no message, log or command line.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from sparkwright.core.console import console, duration
from sparkwright.core.errors import GitHubError
from sparkwright.core.github import GitHub, limit_ends, limited
from sparkwright.core.http import Reply
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner.policy import Policy, Settings
from sparkwright.operate.runner.unit import CREDENTIAL

T = TypeVar("T")

#: Seconds of the first pause, and of the longest.
FIRST, LONGEST = 2.0, 60.0
#: The folder, below the runner's own, that jobs work in.
WORK_FOLDER = "_work"
_APPROVAL = "all_external_contributors"


class _Runner(msgspec.Struct, frozen=True):
    id: Annotated[int, msgspec.Meta(ge=1)]


class _Answer(msgspec.Struct, frozen=True):
    runner: _Runner
    encoded_jit_config: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+/]{1,100000}={0,2}\Z")]


class _Repository(msgspec.Struct, frozen=True):
    private: bool


class _Approval(msgspec.Struct, frozen=True):
    approval_policy: str


class Registered(msgspec.Struct, frozen=True):
    """A registration: GitHub's *number* of it, its *name* there, and the configuration, which nothing shows."""

    number: int
    name: str
    config: str

    def __repr__(self) -> str:
        return f"Registered(number={self.number}, name={self.name!r})"


def token(environment: dict[str, str], config: Path) -> str:
    """
    Return the token, from the credential that systemd hands over, else from the file that only root can read.

    Raises:
        runner-unfit: There is none, or others can read it.
    """
    folder = environment.get("CREDENTIALS_DIRECTORY")
    path = Path(folder, CREDENTIAL) if folder else config / CREDENTIAL
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_mode & 0o077:
                raise LabError(
                    "runner-unfit", f"Others can read {path}.", todo=f"chmod 0600 {path}, and make a new token: this one may be known."
                )
            text = stream.read(4096).decode("ascii", "replace").strip()
    except OSError as error:
        raise LabError("runner-unfit", f"The token cannot be read: {path}.", details=[str(error)]) from error
    if not text:
        raise LabError("runner-unfit", f"There is no token in {path}.")
    return text


def pauses(patience: float, chance: Callable[[], float] = random.random) -> Iterator[float]:
    """Yield seconds to wait between attempts: doubling, each between half and whole, together no more than *patience*."""
    spent, wanted = 0.0, FIRST
    while True:
        pause = min(wanted, LONGEST) * (0.5 + chance() / 2)
        if spent + pause > patience:
            return
        spent, wanted = spent + pause, wanted * 2
        yield pause


def guarded(github: GitHub, policy: Policy, settings: Settings) -> None:
    """
    Refuse a repository whose settings let a stranger's workflow run.

    Raises:
        runner-exposed: It is public, and the policy refuses that, or it does not ask for approval of every outsider.
    """
    where = settings.repository
    if _decoded(github.send("GET", f"/repos/{where}", where), _Repository, github, where).private:
        return
    if policy.public == "refuse":
        raise LabError("runner-exposed", f"{where} is public: a pull request can bring a workflow that names this machine.")
    reply = github.send("GET", f"/repos/{where}/actions/permissions/fork-pr-contributor-approval", where)
    if _decoded(reply, _Approval, github, where).approval_policy != _APPROVAL:
        raise LabError(
            "runner-exposed",
            f"{where} is public, and runs workflows of some outsiders without asking.",
            todo="Set Actions → General → Approval for running fork pull request workflows to all external contributors.",
        )


def register(
    github: GitHub, settings: Settings, labels: tuple[str, ...], patience: float, sleep: Callable[[float], None] = time.sleep
) -> Registered:
    """
    Return a fresh registration.

    A question without an answer may have been heard; the next one asks for another name, and GitHub forgets the first within a day.

    Args:
        patience: Seconds of pauses between attempts, all together.

    Raises:
        runner-unregistered: GitHub could not be reached for so long.
        github-refused: The token may not, or GitHub refuses the labels.
    """
    broke = ""
    for pause in (*pauses(patience), None):
        name = f"{settings.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"
        try:
            return _asked(github, settings, name, labels)
        except GitHubError as error:
            if error.reference not in {"github-limited", "github-unreachable"}:
                raise
            broke = " ".join((error.what, *error.details))
        if pause is not None:
            console.note(f"GitHub gives no configuration: {broke}; asking again in {duration(pause)}")
            sleep(pause)
    raise LabError("runner-unregistered", f"GitHub gave {settings.name} no configuration for a runner.", details=[broke])


def _asked(github: GitHub, settings: Settings, name: str, labels: tuple[str, ...]) -> Registered:
    where = settings.repository
    # Group 1 is the default one, the only one that a repository has.
    record = {"name": name, "runner_group_id": 1, "labels": list(labels), "work_folder": WORK_FOLDER}
    answer = _decoded(github.send("POST", f"/repos/{where}/actions/runners/generate-jitconfig", where, record), _Answer, github, where)
    return Registered(answer.runner.id, name, answer.encoded_jit_config)


def unregister(github: GitHub, settings: Settings, registered: Registered) -> bool:
    """Take the registration back; False where GitHub keeps it, because a job was given to it a moment ago, or could not be asked."""
    try:
        reply = github.send("DELETE", f"/repos/{settings.repository}/actions/runners/{registered.number}", settings.repository)
    except GitHubError as error:
        if error.reference != "github-unreachable":
            raise
        return False
    return reply.status in (204, 404)


def _decoded(reply: Reply, kind: type[T], github: GitHub, where: str) -> T:
    """Return what *reply* tells, as a record; what was refused says why, and nothing shows the reply itself, which may be a secret."""
    says = [f"GitHub says: {said}"] if (said := github.explanation(reply)) else []
    if limited(reply):
        raise GitHubError(
            "github-limited", f"GitHub tells nothing of {where} for now.", details=[f"the limit ends: {limit_ends(reply)}", *says]
        )
    if reply.status == 409:
        raise GitHubError("github-unreachable", f"GitHub knows a runner of {where} by that name already.", details=says)
    if reply.status not in (200, 201):
        todo = "The token needs Administration: write on this repository; labels and name are those of `sparkwright lab runner check`."
        raise GitHubError("github-refused", f"GitHub refuses a runner of {where}.", details=[f"answered {reply.status}", *says], todo=todo)
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (ValueError, RecursionError):
        raise GitHubError("github-unreachable", f"What came for {where} is not GitHub's answer.") from None
