"""The commands of ``patch``: the picks and patches that a stack carries, and their upkeep."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkwright.builder import pins
from sparkwright.cherry_picks import conflict, drift, pick, rebase, series
from sparkwright.cherry_picks.apply import Outcome
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.cli import options
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.git import Objects
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project, SourceError, stack_names

#: What a command prints with ``--json``.
Document = dict[str, Any]

#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "patch pick": {
        "pulls": {"nargs": "+", "metavar": "FORK#NUMBER", "help": "the pull request"},
        "--reason": {
            "default": "",
            "metavar": "TEXT",
            "help": "reason for carrying or watching it (required for a new record)",
        },
        "--drop-when": {
            "default": "",
            "metavar": "TEXT",
            "help": "condition for dropping it (required for a new record)",
        },
        "--carry": {**options.FLAG, "help": "carry it in the stack"},
        "--drop": {**options.FLAG, "help": "stop carrying it in the stack"},
        "--exclude": {
            **options.REPEATED,
            "metavar": "PATH=REASON",
            "help": "leave this file, or hunk (PATH#NUMBER), of the diff out; may be repeated",
        },
        "--accept": {**options.FLAG, "help": "pin the new state of a pull request that changed"},
    },
    "patch rebase": {
        "--onto": {
            "default": "",
            "metavar": "NAME",
            "help": "release, branch, tag or commit (default: the locked source)",
        },
        "--abort": {**options.FLAG, "help": "remove the worktree and all changes in it"},
    },
    "patch export": {
        "--drop": {
            **options.REPEATED,
            "metavar": "PATCH",
            "help": "allow this patch to be missing; may be repeated",
        },
    },
    "patch drift": {
        "--releases": {
            **options.FLAG,
            "help": "try every release after the locked one (default: the newest)",
        },
        "--to": {
            **options.REPEATED,
            "metavar": "NAME",
            "help": "try this release, branch, tag or commit; may be repeated",
        },
    },
    "patch bump": {
        **options.FORCE_PIN,
        "--to": {
            "default": "",
            "required": True,
            "metavar": "VERSION",
            "help": "the release, or `newest`",
        },
        "--drop": {
            **options.REPEATED,
            "metavar": "PATCH",
            "help": "drop this patch or pick (#NUMBER); may be repeated",
        },
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands of ``patch``."""
    functions = {
        "patch status": run_status,
        "patch pick": _exclusive(run_pick),
        "patch rebase": _exclusive(run_rebase),
        "patch export": _exclusive(run_export),
        "patch drift": run_drift,
        "patch bump": _exclusive(run_bump),
    }
    options.define(parsers, functions, _OPTIONS)


def _exclusive(
    command: Callable[[argparse.Namespace], Document],
) -> Callable[[argparse.Namespace], Document]:
    """Return *command*, which writes into the checkout, so that such runs take turns."""

    @functools.wraps(command)
    def run(arguments: argparse.Namespace) -> Document:
        with options.checkout(arguments).project.editing():
            return command(arguments)

    return run


def only_fork(context: RunContext) -> str:
    """
    Return the selected fork.

    Raises:
        UsageError: Not exactly one fork is selected.
    """
    if len(context.forks) != 1:
        raise UsageError("usage", "This command works on one fork.", todo="Name it with --fork.")
    return context.forks[0]


def run_status(arguments: argparse.Namespace) -> Document:
    """Show what every stack of the checkout, or the named one, carries."""
    context = options.checkout(arguments)
    root, stacks = context.project.root, dict[str, list[dict[str, str]]]()
    for name in [arguments.stack] if arguments.stack else stack_names(root)[::-1]:
        own = dataclasses.replace(context, project=Project(root, name))
        stacks[name], rows = [], []
        for fork in own.project.spec.forks:
            if fork in (arguments.fork or [fork]):
                stacks[name] += drift.status(own, fork)
        for line in stacks[name]:
            patch = line["name"].removesuffix(".patch")
            rows.append([patch, line["fork"], line["needed"], line["reason"]])
        console.table(f"stack {name}", ["patch", "fork", "still needed?", "why"], rows, result=True)
    return {"stacks": stacks}


def run_pick(arguments: argparse.Namespace) -> Document:
    """Pin each pull request, and write the ledger."""
    excluded = _excluded(arguments)
    context, records = options.checkout(arguments), []
    for word in arguments.pulls:
        fork, number = _pull(context, word)
        record = pick.pin(
            context,
            fork,
            number,
            reason=arguments.reason,
            drop_when=arguments.drop_when,
            carry=arguments.carry,
            drop=arguments.drop,
            accept=arguments.accept,
            excluded=excluded,
        )
        commit, stacks = (record.merge or record.head)[:12], ", ".join(record.stacks) or "watched"
        console.result(f"{fork}{record.name} ({record.state}, {commit}): {stacks}; {record.title}")
        records.append({"fork": fork, "record": record})
    return {"records": records}


def _excluded(arguments: argparse.Namespace) -> dict[str, str]:
    """
    Return the excluded paths and their reasons.

    Raises:
        UsageError: One has no reason, or the options contradict each other.
    """
    pairs = [word.partition("=") for word in arguments.exclude]
    wrong = not all(path and reason.strip() for path, _, reason in pairs)
    if wrong or (arguments.drop and (arguments.carry or pairs)) or (pairs and arguments.pulls[1:]):
        raise UsageError(
            "usage",
            "--exclude is PATH=REASON and goes with one pull request; --drop goes alone.",
        )
    return {path: reason.strip() for path, _, reason in pairs}


def _pull(context: RunContext, word: str) -> tuple[str, int]:
    """Return fork and number of ``vllm#35568``, or of ``35568`` with one fork."""
    fork, _, number = word.rpartition("#")
    if not fork and len(context.forks) == 1:
        fork = context.forks[0]
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", number) or not fork:
        raise UsageError(
            "usage",
            f"{word!r} names no pull request.",
            todo="Use FORK#NUMBER, or NUMBER with --fork FORK.",
        )
    context.project.fork(fork)
    return fork, int(number)


def run_rebase(arguments: argparse.Namespace) -> Document:
    """Make the worktree of one fork, or remove it with ``--abort``."""
    context = options.checkout(arguments)
    upstream = Upstream(context, only_fork(context))
    if arguments.abort:
        rebase.abort(context, upstream.fork)
        console.note(f"the worktree of {upstream.fork} is removed; the series is unchanged")
        return {"aborted": upstream.fork}
    base = upstream.locked()
    if arguments.onto:
        base = upstream.find_base(arguments.onto, series.load_series(context, upstream.fork))
        if upstream.mirror and base.commit:
            upstream.mirror.tree(base.tree)
    document = _start_rebase(upstream, base)
    console.result(
        f"Everything is committed in {rebase.folder_of(context, upstream.fork)}; edit it there, "
        f"then run: sparkwright patch export --stack {context.project.stack} --fork {upstream.fork}"
    )
    return document


def _start_rebase(
    upstream: Upstream, base: Base, files: Mapping[str, str] = {}, gone: Mapping[str, str] = {}
) -> Document:
    """
    Make the worktree, print the outcome of every patch, and return the document of the worktree.

    Args:
        files, gone: See `rebase.WorktreeState`.

    Raises:
        patch-conflict: A patch stopped in the worktree; the error has the report.
    """
    context, fork = upstream.context, upstream.fork
    outcomes, stopped = rebase.start(upstream, base, files, gone)
    folder = str(rebase.folder_of(context, fork))
    document = {"rebase": {"folder": folder, "outcomes": outcomes, "stopped": stopped}}
    rows = [[name, outcome] for name, outcome in outcomes.items()]
    if rows:
        console.table(f"{fork} on {base.name}", ["patch", "outcome"], rows, result=True)
    if stopped:
        console.document(document)
        export = f"sparkwright patch export --stack {context.project.stack} --fork {fork}"
        resolve = f"resolve it in {folder}: git add FILE…, git am --continue"
        *earlier, patch = drift.up_to(series.load_series(context, fork), stopped)
        context.objects.run(["fetch", "-q", "--no-write-fetch-head", folder, "HEAD"])
        raise conflict.explain(
            upstream,
            base,
            Outcome("conflict", Objects(Path(folder) / ".git").resolve("HEAD^{tree}")),
            patch,
            earlier,
            commands=(resolve, export),
            todo=f"{resolve.capitalize()}; then {export}. Until then the checkout is unchanged.",
        )
    return document


def run_export(arguments: argparse.Namespace) -> Document:
    """Write the series of one fork from its worktree."""
    context = options.checkout(arguments)
    fork = only_fork(context)
    changed = rebase.export(context, fork, arguments.drop)
    console.result("\n".join(changed) or "nothing changed")
    return {"fork": fork, "changed": changed}


def run_drift(arguments: argparse.Namespace) -> Document:
    """Try every patch on later bases."""
    context = options.checkout(arguments)
    reports = []
    for fork in context.forks:
        upstream, patches = Upstream(context, fork), series.load_series(context, fork)
        with console.step(f"drift of {fork}: {len(patches)} patches"):
            reports.append(_measure(upstream, patches, arguments))
    for report in reports:
        _show_drift(report)
    return {"drift": [{"of": report} for report in reports]}


def _measure(
    upstream: Upstream, patches: Sequence[Patch], arguments: argparse.Namespace
) -> drift.Drift:
    """Return the drift of *patches*, and print a line for each base as soon as it is tried."""
    bases = upstream.later(patches, every=arguments.releases)
    if arguments.to:
        bases = (upstream.find_base(name, patches) for name in arguments.to)
    tried = list[drift.Trial]()
    for base in bases if patches else ():
        trials = drift.trials(upstream, patches, base)
        counts = Counter("applies" if trial.applies else trial.state for trial in trials)
        states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
        console.result(f"{upstream.fork} {base.name}: {states}")
        tried += trials
    return drift.store(upstream, tried)


def _show_drift(report: drift.Drift) -> None:
    """Print the state of each patch on each base, and a proof that the newest one has it."""
    rows = []
    for name in report.patches:
        trials, states = report.trials_of(name), []
        for state, group in itertools.groupby(trials, key=lambda trial: trial.state):
            bases = [trial.base for trial in group]
            last = f" to {bases[-1]}" if len(bases) > 1 else ""
            states.append(f"{drift.MEANING[state]}: {bases[0]}{last}")
        if trials[-1].state in ("already-upstream", "likely-upstream"):
            states.append(trials[-1].proof.partition("; ")[0])
        rows.append([f"{name.removesuffix('.patch')}: {'; '.join(states)}"])
    if not rows:
        console.note(f"{report.fork}: no patches, or nothing later than the locked source")
        return
    # Names of patches are too long for a column of their own.
    title = f"{report.fork} of {report.stack}, {report.day}: each patch on later bases, and why"
    console.table("", [title], rows, result=True)


def run_bump(arguments: argparse.Namespace) -> Document:
    """Move a fork to a release: write stack, lock, ledger and series, or leave a worktree."""
    context = options.checkout(arguments)
    upstream = Upstream(context, only_fork(context))
    fork, version = upstream.fork, arguments.to
    if context.offline:
        raise SourceError(
            "offline", "bump needs the index and the upstream host, which --offline forbids."
        )
    rebase.refuse_worktree(context, fork)
    if version == "newest":
        if not context.project.fork(fork).sources.sdist:
            raise SourceError(
                "not-provided",
                f"{fork} has no releases on the package index, of which one is the newest.",
                todo="Name a version that has a tag: --to VERSION.",
            )
        if not upstream.later_releases:
            console.result(f"{fork} is at its newest release already.")
            return {"bump": None}
        version = upstream.later_releases[-1].version
    forced = pins.check(context, {fork: version}, every=True, force=arguments.force_pin)
    plan = drift.plan_bump(upstream, version, arguments.drop)
    rows = [
        [trial.patch, drift.MEANING[trial.state], plan.gone.get(trial.patch, "")]
        for trial in plan.trials
    ]
    if rows:
        console.table(
            f"{fork} to {version}",
            ["patch", "on the new base it", "so it is dropped"],
            rows,
            result=True,
        )
    _start_rebase(upstream, plan.base, plan.files, plan.gone)
    changed = rebase.export(context, fork)
    console.result("\n".join(changed))
    return {"stack": context.project.stack, "bump": plan, "changed": changed, "pins": forced}
