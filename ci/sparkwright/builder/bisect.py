"""
Bisect: the state at which an answer changes, found by ``git bisect``.

The states are upstream commits, releases, the patches of a series one by one, or one stack with
more and more pieces of another. They become a line of commits in a scratch repository, and git
chooses which to ask about. The answer is that of a patch (does it apply?), or of a command: 0 is
good, 125 no answer, all else bad (as in ``git bisect run``). Answers of commands are kept, so that
a killed search continues.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from sparkwright.builder import pipeline
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import EnvironmentSpec
from sparkwright.cherry_picks import apply, drift, history, patch, series, upstream_revisions
from sparkwright.cherry_picks.already_upstream import CONTEXT
from sparkwright.cherry_picks.drift import Trial
from sparkwright.cherry_picks.patch import Patch, PatchError
from sparkwright.cherry_picks.upstream_revisions import Base, Release, Upstream
from sparkwright.core import digest, git, process, strict_yaml
from sparkwright.core.console import console, duration
from sparkwright.core.errors import CommandError, FileError, SparkwrightError
from sparkwright.core.http import redact_credentials
from sparkwright.forks import archive, fetch, lock
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import ForkLock, Lock
from sparkwright.forks.stack import ForkSpec, Project, StackSpec

Answer = Literal["good", "bad", "skip"]
#: Everything that determines the build of a fork and of those that it needs, by name.
Pieces = Mapping[str, Any]
#: A state: its name for people, and how to make it.
State = tuple[str, Callable[[], Pieces]]

#: Both ends, and both sides of the result, are asked twice: a single answer would not show an
#: unstable command.
SURE = 2
SKIP = 125
#: Failures of a state that has no answer; all others end the search.
NO_STATE = frozenset(
    {
        "arch-mismatch",
        "arch-trap",
        "base-mismatch",
        "build-failed",
        "build-downloads",
        "compile-failed",
        "compiler-crashed",
        "compiler-hung",
        "early-check-failed",
        "extension-missing",
        "file-invalid",
        "patch-conflict",
        "patch-invalid",
        "requirement-mismatch",
        "rule-mismatch",
        "source-unlocked",
        "source-unresolved",
    }
)

#: The one patch of a series in the checkout of a state: the change that its patches make there.
PATCH = "series.patch"
_HEAD = b"""\
From: sparkwright <sparkwright@localhost>
Date: Thu, 1 Jan 1970 00:00:00 +0000
Subject: [PATCH] The change of the series

Upstream-Status: Inappropriate [made for one step of a search]
Reason: the step needs the change of the patches in its tree
Drop-When: the step ends
---
"""


class Turn(msgspec.Struct, frozen=True):
    """
    The base at which the state of a patch changes.

    Attributes:
        last, first: The trials before and after the change.
        commit: The commit's day and subject, or the release.
        page: The page of the pull request that the subject names.
        tried: The number of bases that were tried, of how many.
    """

    patch: str
    last: Trial
    first: Trial
    commit: str
    page: str
    tried: tuple[int, int]


class Cause(msgspec.Struct, frozen=True):
    """
    The change that changed the answer of a command.

    Attributes:
        last, first: The names of the states before and after the change, and their answers.
        what: The commit, the patch, or the piece.
        page: The page of the pull request that the commit's subject names.
    """

    over: str
    last: str
    first: str
    answers: tuple[Answer, Answer]
    what: str
    page: str = ""


class Step(msgspec.Struct, frozen=True):
    """
    A state that a command was asked about.

    Attributes:
        tree: Tree id of the fork's patched source.
        wheel: File name, if one was built.
        status: Exit status of each run of the command.
        why: Why there is no answer, if the state could not be made.
        known: Runs that an earlier search made.
        log: The file with the command's output.
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


def search(names: Sequence[str], ask: Callable[[int], Answer]) -> tuple[int, int]:
    """
    Return the last state that answers as the first one does, and the first that answers as the last
    one does.

    Args:
        names: The states, in order. Between those that are returned there are only states without
            an answer.

    Raises:
        bisect-undecided: The ends give the same answer, or none.
    """
    end = len(names) - 1
    answers = {0: ask(0), end: ask(end)}
    if answers[0] == answers[end] or "skip" in answers.values():
        details, todo = (
            [f"{names[number]}: {answers[number]}" for number in answers],
            "Choose other ends with --from and --to.",
        )
        raise PatchError(
            "bisect-undecided",
            "The answer is not good at one end and bad at the other.",
            details=details,
            todo=todo,
        )
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        git.run(["init", "-q", "--bare", "."], cwd=repository)
        form = (
            "commit refs/heads/main\nmark :{0}\ncommitter sparkwright <> {0} +0000\ndata {1}\n{0}\n"
        )
        stream = "".join(form.format(number, len(str(number))) for number in range(1, end + 2))
        git.run(["fast-import", "--quiet"], cwd=repository, stdin=stream.encode())
        words = ["start", "--no-checkout", "main", f"main~{end}"]
        while not git.run(["bisect", *words], cwd=repository, check=False)[0]:
            out = git.run(["log", "-1", "--format=%s", "BISECT_HEAD"], cwd=repository)[1]
            number = int(out) - 1
            if answers.get(number) not in (None, "skip"):
                break
            answers[number] = ask(number)
            words = [
                "skip"
                if answers[number] == "skip"
                else "good"
                if answers[number] == answers[0]
                else "bad"
            ]
    last = max(number for number, answer in answers.items() if answer == answers[0])
    return last, min(number for number, answer in answers.items() if answer == answers[end])


def ends(upstream: Upstream, patch: Patch | None, start: str, end: str) -> tuple[str, str]:
    """
    Return the commits to search between: by their names, else a pick's own base, and the tip of the
    branch.

    Raises:
        not-provided: There is no start for a patch of ours, or a name means nothing.
        offline, source-unreachable: The repository may not be asked, or does not answer.
    """
    book, objects = upstream.book, upstream.session.objects
    assert book
    if not start and not (patch and patch.pick):
        todo = "Name one with --from, or search releases with --releases."
        raise SourceError(
            "not-provided",
            f"{patch.name if patch else 'The search'} needs a commit to start from.",
            todo=todo,
        )
    tip = upstream.commit(book.branch)
    begin = upstream.commit(start) if start else book.record(patch.pick).base if patch else ""
    last = upstream.commit(end) if end else tip
    for name, commit in ((start, begin), (end or book.branch, last)):
        if not commit or not objects.has(f"{commit}^{{commit}}"):
            what, todo = (
                f"{redact_credentials(book.url)} has no branch, tag or commit {name}.",
                "Choose ends with --from and --to.",
            )
            raise SourceError("not-provided", what, todo=todo)
    return begin, last


def line_of_commits(upstream: Upstream, start: str, end: str) -> list[str]:
    """
    Return the commits of the branch from *start* to *end*.

    Raises:
        not-provided: *end* does not follow *start*.
    """
    line = [start, *history.revisions(upstream.session.objects, "--first-parent", end, f"^{start}")]
    if len(line) < 2:
        raise SourceError("not-provided", f"{end[:12]} does not follow {start[:12]}.")
    return line


def patch_over_commits(upstream: Upstream, patches: Sequence[Patch], start: str, end: str) -> Turn:
    """
    Return the commit after *start*, up to *end*, at which the state of the last of *patches*
    changes.

    Raises:
        bisect-undecided: See `search`.
        not-provided, source-unreachable, offline: See `line_of_commits` and `Upstream.at_commit`.
    """
    line = line_of_commits(upstream, start, end)
    bases = [partial(upstream.at_commit, commit[:12], commit, patches) for commit in line]
    turn, number = _patch_turn(upstream, patches, [commit[:12] for commit in line], bases)
    commit = history.commit(upstream.session.objects, line[number])
    page = upstream.book.page(commit.number) if upstream.book and commit.number else ""
    return msgspec.structs.replace(turn, commit=commit.line(), page=page)


def patch_over_releases(
    upstream: Upstream, patches: Sequence[Patch], releases: Sequence[Release]
) -> Turn:
    """
    Return the release at which the state of the last of *patches* changes; see
    `patch_over_commits`.
    """
    bases = [
        partial(upstream_revisions.of_release, upstream.session, release) for release in releases
    ]
    turn, number = _patch_turn(upstream, patches, [release.version for release in releases], bases)
    return msgspec.structs.replace(
        turn, commit=f"{releases[number].project} {releases[number].version}"
    )


def _patch_turn(
    upstream: Upstream,
    patches: Sequence[Patch],
    names: Sequence[str],
    bases: Sequence[Callable[[], Base]],
) -> tuple[Turn, int]:
    tried: dict[int, Trial] = {}

    def ask(number: int) -> Answer:
        tried[number] = drift.trials(upstream, patches, bases[number]())[-1]
        console.note(f"{tried[number].base}: {tried[number].state} (of {len(names)})")
        return "good" if tried[number].applies else "bad"

    try:
        last, first = search(names, ask)
    except PatchError as error:
        if error.reference != "bisect-undecided":
            raise
        details = [f"{trial.base}: {trial.state}" for trial in (tried[0], tried[len(names) - 1])]
        what = f"{patches[-1].name} is the same at both ends."
        raise PatchError("bisect-undecided", what, details=details, todo=error.todo) from None
    return Turn(
        patches[-1].name, tried[last], tried[first], "", "", (len(tried), len(names))
    ), first


def pieces_of(session: RunContext, fork: str) -> Pieces:
    """Return the pieces of *fork* and of those that it needs in the checkout of *session*."""
    project = session.project
    forks, settings = (*project.fork(fork).needs, fork), toolchain.spec(project).forks
    pieces: dict[str, Any] = {
        "arch": project.spec.arch,
        "rules": (project.build_folder / "archs.yaml").read_text("utf-8"),
    }
    for name in forks:
        pieces |= {
            f"source of {name}": (project.fork(name), session.lock.forks[name]),
            f"series of {name}": series.of(session, name),
        }
        pieces |= {f"settings of {name}": settings[name]} if name in settings else {}
    head, *blocks = re.split(
        r"(?m)^(?=\[\[packages\]\]$)", (project.build_folder / "pylock.toml").read_text("utf-8")
    )
    pieces["head of pylock.toml"] = head
    for block in blocks:
        try:
            name = f"tool {tomllib.loads(block)['packages'][0]['name']}"
        except (tomllib.TOMLDecodeError, LookupError, TypeError) as error:
            raise FileError(
                "file-invalid",
                "pylock.toml has a package without a name.",
                details=block.splitlines()[:5],
            ) from error
        pieces[name] = pieces.get(name, "") + block
    return pieces


def checkout(session: RunContext, pieces: Pieces, folder: Path) -> tuple[RunContext, str]:
    """
    Make *folder* a checkout of *pieces*, with the change of each series as one patch, and return a
    run on it and the patched tree.

    Raises:
        patch-conflict, and what fetching raises: It cannot be made.
    """
    shutil.rmtree(folder, ignore_errors=True)
    stack = session.project.stack
    stacks, build = folder / "forks" / stack, folder / "build" / stack
    for path in (stacks, build):
        path.mkdir(parents=True)
    sources: dict[str, tuple[ForkSpec, ForkLock]] = _named(pieces, "source of ")
    spec = StackSpec(
        stack,
        pieces["arch"],
        session.project.spec.label,
        {name: wanted for name, (wanted, _) in sources.items()},
    )
    locks = {name: locked for name, (_, locked) in sources.items()}
    (stacks / "stack.yaml").write_text(strict_yaml.dump(spec), "utf-8")
    (stacks / "lock.yaml").write_text(lock.render(Lock(1, stack, locks)), "utf-8")
    (build / "archs.yaml").write_text(pieces["rules"], "utf-8")
    (build / "environment.yaml").write_text(
        strict_yaml.dump(EnvironmentSpec(_named(pieces, "settings of "))), "utf-8"
    )
    tools = "".join(_named(pieces, "tool ").values())
    (build / "pylock.toml").write_text(pieces.get("head of pylock.toml", "") + tools, "utf-8")
    other = dataclasses.replace(
        session, project=Project(folder, stack), output=folder.parent / "dist"
    )
    tree = ""
    for name in sources:
        base = pieces.get(f"tree of {name}") or fetch.fetch(other, name).tree
        patches = pieces.get(f"series of {name}", ())
        outcomes = apply.evaluate(session.objects, base, patches)
        if wrong := [
            tried.name
            for tried, outcome in zip(patches, outcomes, strict=True)
            if outcome.status == "conflict"
        ]:
            raise PatchError("patch-conflict", f"{', '.join(wrong)} cannot be applied here.")
        tree = outcomes[-1].tree if outcomes else base
        change = patch.render(session.objects, base, tree, context=CONTEXT)
        (stacks / name).mkdir()
        (stacks / name / "series").write_text(f"{PATCH}\n" if change else "", "utf-8")
        if change:
            (stacks / name / PATCH).write_bytes(_HEAD + change)
    # The fork itself is the last of those that it needs.
    return other, tree


def _named(pieces: Pieces, prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): piece
        for name, piece in pieces.items()
        if name.startswith(prefix)
    }


class Predicate:
    """
    The command of a search; its `steps` are the states that it was asked about.

    Args:
        command: Run in the current folder and environment, with ``SPARKWRIGHT_…`` variables that
            describe the state.
        build: Build the wheel of each state, too.
        repeat: How often each state is asked; all answers must agree.
        fresh: Ask again what an earlier search asked.
    """

    def __init__(
        self,
        session: RunContext,
        fork: str,
        command: Sequence[str],
        *,
        build: bool = False,
        repeat: int = 1,
        fresh: bool = False,
    ) -> None:
        self._session, self._fork, self._command = session, fork, tuple(command)
        self._build, self._repeat, self._fresh = build, repeat, fresh
        self._asked: set[str] = set()
        self.steps: list[Step] = []
        self.folder = session.store.folder("work", session.project.stack, fork, "bisect")

    def ask(self, name: str, make: Callable[[], Pieces], *, times: int = 1) -> Answer:
        """
        Return the answer about a state.

        Args:
            times: How often it is asked at least.

        Raises:
            bisect-undecided: The answers do not agree.
            predicate-failed: The command was killed, or ended with a status of 128 or more.
        """
        began = time.monotonic()
        try:
            with console.step(name):
                session, tree = checkout(self._session, make(), self.folder / "project")
                built = pipeline.build(session, self._fork) if self._build else None
        except SparkwrightError as error:
            if error.reference not in NO_STATE:
                raise
            return self._record(
                Step(
                    name,
                    "skip",
                    why=f"{error.reference}: {error.what}",
                    seconds=time.monotonic() - began,
                )
            )
        wheel = pipeline.wheel_path(session, built) if built else None
        # An edited script asks another question.
        files = {
            word: digest.sha256_file(Path(word)) for word in self._command if Path(word).is_file()
        }
        key = digest.key(
            "predicate",
            {
                "command": self._command,
                "files": files,
                "tree": tree,
                "wheel": built.sha256 if built else "",
                "fork": self._fork,
                "inputs": pipeline.reviewed(pipeline.inputs(session, self._fork)),
            },
        )
        log = self._log(name)
        runs = [
            self._run(name, session, tree, f"{key}-{number}", wheel)
            for number in range(max(times, self._repeat))
        ]
        status = tuple(status for status, _ in runs)
        answers = {_answer(code) for code in status}
        if len(answers) > 1:
            details = [f"exit statuses: {', '.join(map(str, status))}", f"last output: {log}"]
            todo = (
                "Make the command repeatable; a larger --repeat shows how often its answer changes."
            )
            raise PatchError(
                "bisect-undecided",
                f"The command gives several answers about {name}.",
                details=details,
                todo=todo,
            )
        known, seconds = sum(known for _, known in runs), time.monotonic() - began
        return self._record(
            Step(
                name,
                answers.pop(),
                tree,
                built.filename if built else "",
                status,
                "",
                known,
                seconds,
                str(log),
            )
        )

    def _record(self, step: Step) -> Answer:
        self.steps.append(step)
        console.note(
            f"{step.name}: {step.answer}{f', {step.why}' if step.why else ''}, "
            f"{duration(step.seconds)}"
        )
        return step.answer

    def _log(self, name: str) -> Path:
        plain = re.sub(r"[^\w.-]", "-", name)[:80]
        return (
            self._session.store.folder("logs", "bisect")
            / f"{self._session.project.stack}-{self._fork}-{plain}.log"
        )

    def _run(
        self, name: str, session: RunContext, tree: str, key: str, wheel: Path | None
    ) -> tuple[int, bool]:
        """Return the command's exit status, and whether an earlier search knew it."""
        known = self._session.store.get("predicate", key, int)
        if known is not None and (not self._fresh or key in self._asked):
            return known, True
        folder, index = self.folder / "tree", self.folder / "index"
        session.objects.checkout(tree, folder, index)
        # Files of an earlier run must not decide.
        env = {
            "GIT_INDEX_FILE": str(index),
            "GIT_WORK_TREE": str(folder),
            "GIT_DIR": str(session.objects.path),
        }
        session.objects.run(["clean", "-ffdxq"], env=env)
        variables = {
            "SPARKWRIGHT_TREE": str(folder),
            "SPARKWRIGHT_PROJECT": str(session.project.root),
            "SPARKWRIGHT_NAME": name,
            "SPARKWRIGHT_FORK": self._fork,
            "SPARKWRIGHT_STACK": session.project.stack,
            "SPARKWRIGHT_WHEEL": str(wheel or ""),
        }
        try:
            process.run(self._command, log=self._log(name), env={**os.environ, **variables})
            status = 0
        except CommandError as error:
            if error.reference != "command-failed":
                raise
            status = int(str(error.data["status"]))
            if not 0 < status < 128:
                what = f"The command was ended about {name}, with status {status}."
                raise PatchError("predicate-failed", what, details=error.details) from error
        self._session.store.put("predicate", key, status)
        self._asked.add(key)
        return status, False


def _answer(status: int) -> Answer:
    return "good" if status == 0 else "skip" if status == SKIP else "bad"


def over_commits(
    upstream: Upstream, start: str, end: str, predicate: Predicate, *, bare: bool = False
) -> Cause:
    """
    Return the upstream commit after *start*, up to *end*, that changed the answer.

    Args:
        bare: Upstream as it is, without our patches.

    Raises:
        not-provided: *end* does not follow *start*, or the fork has no git source.
        bisect-undecided, predicate-failed: See `_cause` and `Predicate.ask`.
    """
    session, fork, objects, mirror = (
        upstream.session,
        upstream.fork,
        upstream.session.objects,
        upstream.mirror,
    )
    line = line_of_commits(upstream, start, end)
    source = session.lock.forks[fork].git
    if source is None or mirror is None:
        raise SourceError(
            "not-provided", f"Stack {session.project.stack} locks no git source of {fork}."
        )
    pieces, replace = (
        {**pieces_of(session, fork), **({f"series of {fork}": ()} if bare else {})},
        msgspec.structs.replace,
    )

    def at(commit: str) -> Pieces:
        mirror.commit(commit)
        tree = objects.resolve(f"{commit}^{{tree}}")
        spec, locked = pieces[f"source of {fork}"]
        locked = replace(
            locked,
            git=replace(source, ref=commit, commit=commit, tree=tree),
            sdist=None,
            wheel=None,
        )
        base = mirror.tree(tree, [path for path in source.without if objects.has(f"{tree}:{path}")])
        return {**pieces, f"source of {fork}": (spec, locked), f"tree of {fork}": base}

    number, cause = _cause(
        [(commit[:12], partial(at, commit)) for commit in line], predicate, "commits"
    )
    commit = history.commit(objects, line[number])
    page = upstream.book.page(commit.number) if upstream.book and commit.number else ""
    return replace(cause, what=commit.line(), page=page)


def over_patches(session: RunContext, fork: str, predicate: Predicate) -> Cause:
    """
    Return the patch that changed the answer, together with those before it.

    Raises:
        not-provided: The fork has no patches.
        bisect-undecided, predicate-failed: See `_cause` and `Predicate.ask`.
    """
    pieces, piece = pieces_of(session, fork), f"series of {fork}"
    patches = pieces[piece]
    if not patches:
        raise SourceError(
            "not-provided", f"{fork} has no patches in stack {session.project.stack}."
        )
    names = [
        "without patches",
        *(f"up to {number} of {len(patches)}, {one.name}" for number, one in enumerate(patches, 1)),
    ]
    states: list[State] = [
        (name, partial(dict[str, Any], pieces, **{piece: patches[:count]}))
        for count, name in enumerate(names)
    ]
    number, cause = _cause(states, predicate, "patches")
    return msgspec.structs.replace(cause, what=patches[number - 1].name)


def over_locks(one: Pieces, other: Pieces, names: tuple[str, str], predicate: Predicate) -> Cause:
    """
    Return the piece of *other* that changed the answer, together with those before it, in place of
    the pieces of *one*.

    Raises:
        not-provided: They do not differ.
        bisect-undecided, predicate-failed: See `_cause` and `Predicate.ask`.
    """
    order = list(dict.fromkeys([*one, *other]))
    differing = [piece for piece in order if one.get(piece) != other.get(piece)]
    if not differing:
        raise SourceError(
            "not-provided", f"{names[0]} and {names[1]} do not differ in what the fork is made of."
        )
    console.note(f"{len(differing)} pieces differ: {', '.join(differing)}")

    def mixed(taken: Collection[str]) -> Pieces:
        sides = {piece: other if piece in taken else one for piece in order}
        return {piece: side[piece] for piece, side in sides.items() if piece in side}

    middle = [
        f"{names[0]} with {', '.join(differing[:count])} of {names[1]}"
        for count in range(1, len(differing))
    ]
    states = [
        (name, partial(mixed, differing[:count]))
        for count, name in enumerate([names[0], *middle, names[1]])
    ]
    number, cause = _cause(states, predicate, "locks")
    return msgspec.structs.replace(cause, what=differing[number - 1])


def _cause(states: Sequence[State], predicate: Predicate, over: str) -> tuple[int, Cause]:
    """
    Return the number of the state at which the answer changes, and the cause without its name.

    Raises:
        bisect-undecided: The ends agree, or states between the last and the first have no answer.
    """
    names = [name for name, _ in states]
    outer = {0, len(states) - 1}
    last, first = search(
        names, lambda number: predicate.ask(*states[number], times=SURE if number in outer else 1)
    )
    answers = (predicate.ask(*states[last], times=SURE), predicate.ask(*states[first], times=SURE))
    if first - last > 1:
        raise PatchError(
            "bisect-undecided",
            f"The answer changes after {names[last]} and not later than {names[first]}.",
            details=[f"no answer: {name}" for name in names[last + 1 : first]],
            todo="Let the command judge these, or make them buildable; every other answer is kept.",
            data={"last": names[last], "first": names[first]},
        )
    return first, Cause(over, names[last], names[first], answers, "")


def side(session: RunContext, fork: str, name: str) -> Pieces:
    """
    Return the pieces of *fork* in *name*: another stack, or a revision of this checkout.

    Raises:
        not-provided: It is neither.
    """
    root, stack = session.project.root, session.project.stack
    if name in {path.parent.name for path in root.glob("forks/*/stack.yaml")}:
        return pieces_of(
            dataclasses.replace(session, project=Project(root, name), forks=(fork,)), fork
        )
    folder = session.store.folder("work", stack, fork, "bisect") / "side"
    shutil.rmtree(folder, ignore_errors=True)
    write_revision(root, name, folder)
    return pieces_of(
        dataclasses.replace(session, project=Project(folder, stack), forks=(fork,)), fork
    )


def write_revision(root: Path, revision: str, folder: Path) -> None:
    """
    Write the reviewed folders of the checkout *root*, as they were in *revision*, to *folder*.

    Raises:
        not-provided: There is no such revision, or it has no stacks.
        archive-unsafe: A link leaves the checkout.
    """
    plain = re.fullmatch(r"[\w./~^@{}-]+", revision) and not revision.startswith("-")
    verify = ["rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    status, out, _ = git.run(verify, cwd=root, check=False) if plain else (1, b"", "")
    commit = out.decode().strip()
    names = (
        git.run(["ls-tree", "--name-only", commit], cwd=root)[1].decode().splitlines()
        if status == 0
        else []
    )
    if "forks" not in names:
        what = f"{revision} is neither a stack nor a revision of {root} that has any."
        raise SourceError("not-provided", what)
    wanted = [name for name in ("forks", "build", "cherry_picks") if name in names]
    words = ["archive", "--format=tar", "--prefix=checkout/", commit, "--", *wanted]
    data = git.run(words, cwd=root)[1]
    for member in archive.tar_members(io.BytesIO(data), f"{revision} of {root}"):
        path = folder / member.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.mode == git.LINK:
            path.symlink_to(os.fsdecode(member.data))
        else:
            path.write_bytes(member.data)
            path.chmod(0o755 if member.mode == git.EXECUTABLE else 0o644)
