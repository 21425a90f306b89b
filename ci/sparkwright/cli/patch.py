"""The commands of ``patch``: the picks and patches that a stack carries, and their upkeep."""

import argparse
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkwright.builder import pins
from sparkwright.cherry_picks import conflict, drift, pick, rebase, series
from sparkwright.cherry_picks.apply import Outcome
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.cli import options
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.git import Objects
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError

#: What a command prints with ``--json``.
Document = dict[str, Any]


def _exclusion(text: str) -> tuple[str, str]:
    """
    Return path and reason of ``PATH=REASON``.

    Raises:
        UsageError: One of them is empty.
    """
    path, _, reason = text.partition("=")
    if not (path and reason.strip()):
        raise UsageError("usage", f"--exclude {text!r:.80} is not of the form PATH=REASON.")
    return path, reason.strip()


#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "patch pick": {
        "pull": {"metavar": "FORK#NUMBER", "help": "the pull request"},
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
            "type": _exclusion,
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
            "help": "the release; `patch drift` names the newest",
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
    options.define(
        parsers,
        {
            "patch pick": _exclusive(run_pick),
            "patch rebase": _exclusive(run_rebase),
            "patch export": _exclusive(run_export),
            "patch drift": run_drift,
            "patch bump": _exclusive(run_bump),
        },
        _OPTIONS,
    )


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


def run_pick(arguments: argparse.Namespace) -> Document:
    """Pin a pull request, and write the ledger."""
    options.refuse(
        (arguments.drop and (arguments.carry or arguments.exclude), "--drop goes alone.")
    )
    context = options.checkout(arguments)
    fork, number = _pull(context, arguments.pull)
    record = pick.pin(
        context,
        fork,
        number,
        reason=arguments.reason,
        drop_when=arguments.drop_when,
        carry=arguments.carry,
        drop=arguments.drop,
        accept=arguments.accept,
        excluded=dict(arguments.exclude),
    )
    commit, stacks = (record.merge or record.head)[:12], ", ".join(record.stacks) or "watched"
    console.result(f"{fork}{record.name} ({record.state}, {commit}): {stacks}; {record.title}")
    return {"fork": fork, "record": record}


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
    if outcomes:
        rows = list(outcomes.items())
        console.table(f"{fork} on {base.name}", ["patch", "outcome"], rows, result=True)
    if stopped:
        console.document(document)
        export = f"sparkwright patch export --stack {context.project.stack} --fork {fork}"
        resolve = f"resolve it in {folder}: git add FILE…, git am --continue"
        patches = {patch.name: patch for patch in series.load_series(context, fork)}
        earlier = list(patches.values())[: list(patches).index(stopped)]
        context.objects.run(["fetch", "-q", "--no-write-fetch-head", folder, "HEAD"])
        raise conflict.explain(
            upstream,
            base,
            Outcome("conflict", Objects(Path(folder) / ".git").resolve("HEAD^{tree}")),
            patches[stopped],
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
    """Try every patch on later bases, and show the outcomes on each as soon as it is tried."""
    context, reports = options.checkout(arguments), list[Document]()
    for fork in context.forks:
        upstream, patches = Upstream(context, fork), series.load_series(context, fork)
        bases = upstream.later(patches)
        if arguments.to:
            bases = (upstream.find_base(name, patches) for name in arguments.to)
        report: Document = {"fork": fork, "bases": [], "trials": []}
        for base in bases if patches else ():
            with console.step(f"{len(patches)} patches of {fork} on {base.name}"):
                trials = drift.trials(upstream, patches, base)
            _show_trials(f"{fork} of {context.project.stack} on {base.name}", trials)
            report["bases"].append(base.name)
            report["trials"] += trials
        if not report["bases"]:
            console.note(f"{fork}: no patches, or nothing later than the locked source")
        reports.append(report)
    return {"drift": reports}


def _show_trials(title: str, trials: Sequence[drift.Trial], gone: Mapping[str, str] = {}) -> None:
    """Print the state of each patch, and why it is *gone* or upstream has it."""
    rows = []
    for trial in trials:
        rows.append([trial.patch, drift.MEANING[trial.state], gone.get(trial.patch, trial.proof)])
    if rows:
        console.table(title, ["patch", "on the base it", "why"], rows, result=True)


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
    forced = pins.check(context, context.lock, {fork: version}, force=arguments.force_pin)
    plan = drift.plan_bump(upstream, version, arguments.drop)
    _show_trials(f"{fork} to {version}", plan.trials, plan.gone)
    _start_rebase(upstream, plan.base, plan.files, plan.gone)
    changed = rebase.export(context, fork)
    console.result("\n".join(changed))
    return {"stack": context.project.stack, "bump": plan, "changed": changed, "pins": forced}
