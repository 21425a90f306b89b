"""
``sparkwright pick``: an upstream pull request as a verified record of the ledger, carried by a
stack or watched.
"""

from __future__ import annotations

import argparse
import re

import msgspec

from sparkwright.cherry_picks import apply, conflict, ledger, pull_requests
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Look at each pull request, pin it, and write the ledger."""
    excluded = _excluded(arguments.exclude)
    _agree(arguments)
    made = []
    for word in arguments.pulls:
        fork, number = _named(session, word)
        # Two runs that both read the ledger before either writes it would lose a record.
        with console.step(f"pick {fork}#{number}"), session.store.lock(f"ledger-{fork}"):
            made.append((fork, _pick(session, arguments, fork, number, excluded)))
    rows = [
        [
            f"{fork}{one.name}",
            one.state,
            one.seen,
            (one.merge or one.head)[:12],
            one.patch_id[:12] or "empty diff",
            ", ".join(one.stacks) or "watched",
        ]
        for fork, one in made
    ]
    console.table(
        "ledger",
        ["pull request", "state", "seen", "commit", "patch-id", "stacks"],
        rows,
        result=True,
    )
    console.document({"records": [{"fork": fork, "record": one} for fork, one in made]})
    return 0


def _excluded(words: list[str]) -> dict[str, str]:
    """
    Return the paths and reasons of the ``--exclude PATH=REASON`` options.

    Raises:
        UsageError: One has no reason.
    """
    pairs = [word.partition("=") for word in words]
    if wrong := [path for path, _, reason in pairs if not path or not reason.strip()]:
        raise UsageError("usage", f"--exclude {wrong[0]!r} is not of the form PATH=REASON.")
    return {path: reason.strip() for path, _, reason in pairs}


def _agree(arguments: argparse.Namespace) -> None:
    if arguments.exclude and len(arguments.pulls) > 1:
        raise UsageError("usage", "--exclude goes with one pull request.")
    if arguments.drop and (arguments.carry or arguments.exclude):
        raise UsageError("usage", "A stack cannot both drop and carry a pull request.")


def _named(session: RunContext, word: str) -> tuple[str, int]:
    """Return fork and number of ``vllm#35568``, or of ``35568`` where --fork says the rest."""
    fork, _, number = word.rpartition("#")
    if not fork and len(session.forks) == 1:
        fork = session.forks[0]
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", number) or not fork:
        raise UsageError(
            "usage",
            f"{word!r} names no pull request.",
            todo="Say FORK#NUMBER, or NUMBER with --fork FORK.",
        )
    session.project.fork(fork)
    return fork, int(number)


def _pick(
    session: RunContext,
    arguments: argparse.Namespace,
    fork: str,
    number: int,
    excluded: dict[str, str],
) -> Record:
    book = ledger.require(session.project.root, fork)
    known = book.known(number)
    reason, drop_when = (
        getattr(arguments, field) or (getattr(known, field) if known else "")
        for field in ("reason", "drop_when")
    )
    if not reason.strip() or not drop_when.strip():
        raise UsageError(
            "usage",
            f"{fork}#{number} needs a reason and a condition for dropping it.",
            todo="Give both: --reason TEXT --drop-when TEXT.",
        )
    seen = pull_requests.snapshot(session, book, number)
    if known and not arguments.accept:
        pull_requests.check_head(session, book, known, seen)
    made = _carried(
        pull_requests.record(session, book, seen, number, reason, drop_when),
        session.project.stack,
        arguments,
        excluded,
    )
    if session.project.stack in made.stacks:
        _try(session, book.with_record(made), fork, made)
    ledger.write(session.project.root, fork, book.with_record(made))
    console.note(f"{made.title} ({made.state}); {len(made.files)} files")
    return made


def _carried(
    record: Record, stack: str, arguments: argparse.Namespace, excluded: dict[str, str]
) -> Record:
    stacks = dict(record.stacks)
    if arguments.carry or excluded:
        stacks[stack] = {**stacks.get(stack, {}), **excluded}
    if arguments.drop:
        stacks.pop(stack, None)
    return msgspec.structs.replace(record, stacks=stacks)


def _try(session: RunContext, book: Ledger, fork: str, record: Record) -> None:
    """
    See that the stack can carry the record before the ledger says so; the picks before it count.
    """
    source = fetch.fetch(session, fork)
    carried = book.carried(session.project.stack)
    patches = [
        pull_requests.patch_of(session, book, one, session.project.stack)
        for one in carried[: carried.index(record) + 1]
    ]
    *_, outcome = apply.evaluate(session.objects, source.tree, patches)
    if outcome.status == "conflict":
        base = Base(source.origin, source.tree, source.pin if source.kind == "git" else "")
        explain = conflict.explainer(Upstream(session, fork, book), base)
        raise explain(outcome.tree, patches[-1], patches[:-1], outcome.says)
    if outcome.status != "applied":
        raise apply.refusal(session.project.stack, patches[-1], outcome)
