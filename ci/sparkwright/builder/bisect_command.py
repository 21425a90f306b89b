"""
A command that answers a question about one state of a fork, as ``git bisect run`` asks it: 0 is good, 125 no answer, all else bad.

Every answer is kept as it comes, under what it is an answer about, so that a search that was killed goes on where it was. An answer
that is not the same twice is none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sparkwright.builder import bisect_inputs
from sparkwright.builder import pipeline as wheel
from sparkwright.builder.bisect_inputs import Recipe
from sparkwright.builder.bisect_search import Answer
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.core import digest, process
from sparkwright.core.console import console, duration
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.forks.context import Session

#: A state that cannot be made has no answer; anything else that goes wrong ends the search.
NO_STATE = frozenset({
    "arch-mismatch", "arch-trap", "base-mismatch", "build-failed", "build-downloads", "compile-failed", "compiler-crashed",
    "compiler-hung", "early-check-failed", "extension-missing", "file-invalid", "patch-conflict", "patch-invalid",
    "requirement-mismatch", "rule-mismatch", "source-unlocked", "source-unresolved",
})  # fmt: skip
SKIP = 125


class Step(msgspec.Struct, frozen=True):
    """
    One state that was asked about.

    Attributes:
        tree: Git tree id of the fork's patched source.
        wheel: File name, where one was built.
        status: Exit status of each run of the command.
        why: Why there is no answer, where the state could not be made.
        known: How many of the runs an earlier search made.
        log: Where the command's output is.
    """

    name: str
    answer: Answer
    tree: str = ""
    wheel: str = ""
    status: tuple[int, ...] = ()
    why: str = ""
    known: int = 0
    seconds: float = 0
    log: str = ""


class Predicate:
    """
    The question of one search; its `steps` are what was asked so far.

    Args:
        command: Run in this program's own folder and environment, and told by ``SPARKWRIGHT_…`` variables what to look at.
        build: Build the wheel of each state, too.
        repeat: How often each state is asked; all answers must agree.
        fresh: Ask again what an earlier search asked.
    """

    def __init__(
        self, session: Session, fork: str, command: Sequence[str], *, build: bool = False, repeat: int = 1, fresh: bool = False
    ) -> None:
        self._session, self._fork, self._command = session, fork, tuple(command)
        self._build, self._repeat, self._fresh = build, repeat, fresh
        self._asked: set[str] = set()
        self.steps: list[Step] = []

    @property
    def folder(self) -> Path:
        """Where each state is laid out, one after another."""
        return self._session.store.folder("work", self._session.project.stack, self._fork, "bisect")

    def ask(self, name: str, make: Callable[[], Recipe], *, times: int = 1) -> Answer:
        """
        Return the answer about the state that *make* gives.

        Args:
            name: What people call it.
            times: How often it is asked at least.

        Raises:
            bisect-undecided: The command does not answer the same every time.
            predicate-failed: The command was killed, or ended with a status of 128 or more.
        """
        began = time.monotonic()
        try:
            with console.step(name):
                session, trees = bisect_inputs.write(self._session, make(), self.folder / "project")
                built = wheel.build(session, self._fork) if self._build else None
        except SparkwrightError as error:
            if error.reference not in NO_STATE:
                raise
            return self._note(Step(name, "skip", why=f"{error.reference}: {error.what}", seconds=time.monotonic() - began))
        path = wheel.path_of(session, built) if built else None
        key = self._key(session, trees[self._fork], built.sha256 if built else "")
        tree = trees[self._fork]
        runs = [self._run(name, session, tree, f"{key}-{number}", path) for number in range(max(times, self._repeat))]
        status = tuple(one for one, _ in runs)
        log = self._log(name)
        if len({_answer(one) for one in status}) > 1:
            raise PatchError(
                "bisect-undecided",
                f"The command does not answer the same about {name} every time.",
                details=[f"exit statuses: {', '.join(map(str, status))}", f"last output: {log}"],
                todo="Make the command repeatable; to see how often it wavers, run it with a larger --repeat.",
            )
        file, known, took = built.filename if built else "", sum(before for _, before in runs), time.monotonic() - began
        return self._note(Step(name, _answer(status[0]), tree, file, status, "", known, took, str(log)))

    def _note(self, step: Step) -> Answer:
        self.steps.append(step)
        console.note(f"{step.name}: {step.answer}{f', {step.why}' if step.why else ''}, {duration(step.seconds)}")
        return step.answer

    def _check_out(self, session: Session, tree: str) -> None:
        """Lay out the tree; what an earlier run of the command left in the folder goes, so that no answer rests on another."""
        folder, index = self.folder / "tree", self.folder / "index"
        session.objects.checkout(tree, folder, index)
        env = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(folder), "GIT_DIR": str(session.objects.path)}
        session.objects.run(["clean", "-ffdxq"], env=env)

    def _key(self, session: Session, tree: str, sha256: str) -> str:
        # A script that was edited asks another question.
        files = {word: digest.sha256_file(Path(word)) for word in self._command if Path(word).is_file()}
        about = {"command": self._command, "files": files, "tree": tree, "wheel": sha256, "fork": self._fork}
        return digest.key("predicate", {**about, "inputs": wheel.reviewed(wheel.inputs(session, self._fork))})

    def _log(self, name: str) -> Path:
        plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)[:80]
        return self._session.store.folder("logs", "bisect") / f"{self._session.project.stack}-{self._fork}-{plain}.log"

    def _run(self, name: str, session: Session, tree: str, key: str, path: Path | None) -> tuple[int, bool]:
        """Return the command's exit status, and whether it was known."""
        known = self._session.store.get("predicate", key, int)
        if known is not None and (not self._fresh or key in self._asked):
            return known, True
        self._check_out(session, tree)
        says = {
            "SPARKWRIGHT_TREE": str(self.folder / "tree"), "SPARKWRIGHT_PROJECT": str(session.project.root), "SPARKWRIGHT_NAME": name,
            "SPARKWRIGHT_FORK": self._fork, "SPARKWRIGHT_STACK": session.project.stack, "SPARKWRIGHT_WHEEL": str(path or ""),
        }  # fmt: skip
        try:
            process.run(self._command, log=self._log(name), env={**os.environ, **says})
            status = 0
        except CommandError as error:
            if error.reference != "command-failed":
                raise
            status = int(str(error.data["status"]))
            if not 0 < status < 128:
                raise PatchError(
                    "predicate-failed", f"The command was ended about {name}, with status {status}.", details=error.details
                ) from error
        self._session.store.put("predicate", key, status)
        self._asked.add(key)
        return status, False


def _answer(status: int) -> Answer:
    return "good" if status == 0 else "skip" if status == SKIP else "bad"
