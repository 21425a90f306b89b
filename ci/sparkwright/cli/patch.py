"""The commands of ``patch``: the picks and patches that a stack carries, and their upkeep."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.builder import bisect as bisection
from sparkwright.builder.bisect import BisectCause, Predicate
from sparkwright.cherry_picks import apply, conflict, ideas, ledger, pull_requests, series
from sparkwright.cherry_picks import bump as bumps
from sparkwright.cherry_picks import drift as drifts
from sparkwright.cherry_picks import rebase as rebases
from sparkwright.cherry_picks.bump import Bump
from sparkwright.cherry_picks.drift import MEANING, Drift, Line, Trial, measure
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.patch import Patch, PatchError
from sparkwright.cherry_picks.rebase import Rebased
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.cli import context
from sparkwright.core import github_summary
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.github import ADDRESS, GitHub, Repository
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.stack import Project
from sparkwright.operate.upkeep import bumped, driftreport, foreseen, issue, proposal
from sparkwright.operate.upkeep.foreseen import Foreseen
from sparkwright.operate.upkeep.issue import Kept
from sparkwright.operate.upkeep.proposal import Proposed


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands of ``patch``."""
    parsers["patch status"].set_defaults(run=status)
    _add_pick(parsers["patch pick"])
    _add_drift(parsers["patch drift"])
    _add_bump(parsers["patch bump"])
    _add_bisect(parsers["patch bisect"])
    parser = parsers["patch rebase"]
    parser.set_defaults(run=rebase)
    parser.add_argument(
        "--onto",
        default="",
        metavar="NAME",
        help="release, branch, tag or commit (default: the locked source)",
    )
    parser.add_argument(
        "--abort", action="store_true", help="remove the worktree and all changes in it"
    )
    parser = parsers["patch export"]
    parser.set_defaults(run=export)
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="PATCH",
        help="allow this patch to be missing; may be repeated",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if a file is not in the exported form",
    )


def _add_pick(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=pick)
    add = parser.add_argument
    add("pulls", nargs="+", metavar="FORK#NUMBER", help="the pull request")
    add(
        "--reason",
        default="",
        metavar="TEXT",
        help="reason for carrying or watching it (required for a new record)",
    )
    add(
        "--drop-when",
        default="",
        metavar="TEXT",
        help="condition for dropping it (required for a new record)",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--carry", action="store_true", help="carry it in the stack")
    either.add_argument("--drop", action="store_true", help="stop carrying it in the stack")
    add(
        "--exclude",
        action="append",
        default=[],
        metavar="PATH=REASON",
        help="leave this file of the diff out; may be repeated",
    )
    add("--accept", action="store_true", help="pin the new state of a pull request that changed")


def _add_drift(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=drift)
    add = parser.add_argument
    add(
        "--ideas",
        action="store_true",
        help="show which release adopted each idea of cherry_picks/ideas.yaml",
    )
    add(
        "--releases",
        action="store_true",
        help="try every release after the locked one (default: the newest)",
    )
    add(
        "--to",
        action="append",
        default=[],
        metavar="NAME",
        help="try this release, branch, tag or commit; may be repeated",
    )
    add(
        "--issue",
        default="",
        metavar="OWNER/REPO",
        help="report conflicts in one issue of this repository",
    )
    add(
        "--author",
        default="github-actions[bot]",
        metavar="LOGIN",
        help="with --issue: login that the token belongs to (default: a workflow's)",
    )
    add(
        "--given",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="show this output of `patch drift --json`; may be repeated",
    )


def _add_bump(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=bump)
    add = parser.add_argument
    add("--to", required=True, metavar="VERSION", help="the release, or `newest`")
    add(
        "--drop",
        action="append",
        default=[],
        metavar="PATCH",
        help="drop this patch or pick (#NUMBER); may be repeated",
    )
    add(
        "--pull",
        default="",
        metavar="OWNER/REPO",
        help="open a pull request with the result in this repository",
    )
    add(
        "--base",
        default="main",
        metavar="BRANCH",
        help="with --pull: target branch (default: main)",
    )


def _add_bisect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=bisect)
    add = parser.add_argument
    add(
        "patch",
        nargs="?",
        default="",
        metavar="PATCH",
        help="name of a patch file, or number of a pull request",
    )
    add(
        "--from",
        dest="start",
        default="",
        metavar="NAME",
        help="start of the search (default: the pick's own base)",
    )
    add(
        "--to",
        dest="end",
        default="",
        metavar="NAME",
        help="end of the search (default: upstream's newest commit)",
    )
    add(
        "--alone",
        action="store_true",
        help="without the patches before it; with --run, upstream without patches",
    )
    add(
        "--over",
        choices=("commits", "patches"),
        default="commits",
        help="with --run: search among commits or patches",
    )
    add("--build", action="store_true", help="with --run: also build the wheel of each state")
    add(
        "--run",
        dest="program",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="COMMAND",
        help="search by the exit status of this command: 0 is good, 125 skips, others are bad; "
        "must be the last option",
    )


def only_fork(session: RunContext, *, worktree: bool = False) -> str:
    """
    Return the selected fork; of several, the one that has a worktree or patches.

    Raises:
        UsageError: Not exactly one fork is left.
    """
    forks = list(session.forks)
    if len(forks) > 1 and worktree:
        forks = [fork for fork in forks if rebases.folder_of(session, fork).exists()] or forks
    if len(forks) > 1:
        forks = [fork for fork in forks if series.pins(session, fork)]
    if len(forks) != 1:
        raise UsageError("usage", "This command works on one fork.", todo="Name it with --fork.")
    return forks[0]


def command(session: RunContext, fork: str, name: str) -> str:
    """Return the command line of ``patch`` *name* for this stack and fork."""
    return f"sparkwright patch {name} --stack {session.project.stack} --fork {fork}"


def status(arguments: argparse.Namespace) -> int:
    """Show what every stack of the checkout, or the named one, carries."""
    session = context.checkout(arguments)
    root, today = session.project.root, datetime.datetime.now(datetime.UTC).date()
    paths = root.glob("forks/*/stack.yaml")
    names = sorted((path.parent.name for path in paths), reverse=True)
    stacks = {}
    for name in [arguments.stack] if arguments.stack else names:
        project = Project(root, name)
        forks = [
            name for name in project.spec.forks if not arguments.fork or name in arguments.fork
        ]
        own = dataclasses.replace(session, project=project, forks=tuple(forks))
        stacks[name] = [line for fork in forks for line in drifts.status(own, fork, today)]
        _show_status(name, stacks[name])
    console.document({"stacks": stacks})
    return 0


def _show_status(stack: str, lines: Sequence[Line]) -> None:
    rows = []
    for line in lines:
        is_pick = line.name.startswith("#")
        name = line.name if is_pick else f"/{line.name.removesuffix('.patch')}"
        age = f"{line.age} d" if line.age >= 0 else "?"
        state = [line.here, line.needed, line.superseded, line.reason]
        rows.append([f"{line.fork}{name}", age, *state])
    console.table(
        f"stack {stack}",
        ["patch", ">age", "here", "still needed?", "superseded by", "why"],
        rows,
        result=True,
    )
    picks = sum(line.name.startswith("#") for line in lines)
    console.result(
        f"{picks} picks and {len(lines) - picks} patches of ours, "
        f"{sum(line.lines for line in lines):,} lines of diff\n"
    )


def pick(arguments: argparse.Namespace) -> int:
    """Pin each pull request, and write the ledger."""
    excluded = _checked(arguments)
    session = context.checkout(arguments)
    records = []
    for word in arguments.pulls:
        fork, number = _pull(session, word)
        # Without the lock, two runs could overwrite each other's record.
        with console.step(f"pick {fork}#{number}"), session.store.lock(f"ledger-{fork}"):
            records.append((fork, _pick(session, arguments, fork, number, excluded)))
    rows = [
        [
            f"{fork}{record.name}",
            record.state,
            record.seen,
            (record.merge or record.head)[:12],
            record.patch_id[:12] or "empty diff",
            ", ".join(record.stacks) or "watched",
        ]
        for fork, record in records
    ]
    console.table(
        "ledger",
        ["pull request", "state", "seen", "commit", "patch-id", "stacks"],
        rows,
        result=True,
    )
    console.document({"records": [{"fork": fork, "record": record} for fork, record in records]})
    return 0


def _checked(arguments: argparse.Namespace) -> dict[str, str]:
    """
    Return the excluded paths and their reasons.

    Raises:
        UsageError: One has no reason, or the options contradict each other.
    """
    pairs = [word.partition("=") for word in arguments.exclude]
    if wrong := [path for path, _, reason in pairs if not path or not reason.strip()]:
        raise UsageError("usage", f"--exclude {wrong[0]!r} is not of the form PATH=REASON.")
    if arguments.exclude and (arguments.drop or len(arguments.pulls) > 1):
        raise UsageError("usage", "--exclude goes with one pull request that is carried.")
    return {path: reason.strip() for path, _, reason in pairs}


def _pull(session: RunContext, word: str) -> tuple[str, int]:
    """Return fork and number of ``vllm#35568``, or of ``35568`` with one fork."""
    fork, _, number = word.rpartition("#")
    if not fork and len(session.forks) == 1:
        fork = session.forks[0]
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", number) or not fork:
        raise UsageError(
            "usage",
            f"{word!r} names no pull request.",
            todo="Use FORK#NUMBER, or NUMBER with --fork FORK.",
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
    book, stack = ledger.require(session.project.root, fork), session.project.stack
    earlier = book.find(number)
    reason = arguments.reason or (earlier.reason if earlier else "")
    drop_when = arguments.drop_when or (earlier.drop_when if earlier else "")
    if not reason.strip() or not drop_when.strip():
        raise UsageError(
            "usage",
            f"{fork}#{number} needs a reason and a condition for dropping it.",
            todo="Give both: --reason TEXT --drop-when TEXT.",
        )
    seen = pull_requests.snapshot(session, book, number)
    if earlier and not arguments.accept:
        pull_requests.check_head(session, book, earlier, seen)
    record = pull_requests.record(session, book, seen, number, reason, drop_when)
    stacks = dict(record.stacks)
    if arguments.carry or excluded:
        stacks[stack] = {**stacks.get(stack, {}), **excluded}
    if arguments.drop:
        stacks.pop(stack, None)
    record = msgspec.structs.replace(record, stacks=stacks)
    if stack in stacks:
        _check_applies(session, book.with_record(record), fork, record)
    ledger.write(session.project.root, fork, book.with_record(record))
    console.note(f"{record.title} ({record.state}); {len(record.files)} files")
    return record


def _check_applies(session: RunContext, book: Ledger, fork: str, record: Record) -> None:
    """Raise PatchError if *record* does not apply to the stack after the picks before it."""
    source = fetch.fetch(session, fork)
    carried = book.carried(session.project.stack)
    patches = [
        pull_requests.patch_of(session, book, carried_record, session.project.stack)
        for carried_record in carried[: carried.index(record) + 1]
    ]
    base = Base(source.origin, source.tree, source.pin if source.kind == "git" else "")
    failure = partial(conflict.refusal, Upstream(session, fork, book), base)
    apply.apply_patches(session.objects, fork, source.tree, patches, failure)


def rebase(arguments: argparse.Namespace) -> int:
    """Make the worktree of one fork, or remove it with ``--abort``."""
    session = context.checkout(arguments)
    upstream = Upstream(session, only_fork(session, worktree=arguments.abort))
    if arguments.abort:
        rebases.abort(session, upstream.fork)
        console.note(f"the worktree of {upstream.fork} is removed; the series is unchanged")
        console.document({"aborted": upstream.fork})
        return 0
    base = upstream.locked()
    if arguments.onto:
        base = upstream.named(arguments.onto, series.of(session, upstream.fork))
        if upstream.mirror and base.commit:
            upstream.mirror.tree(base.tree)
    rebased = rebases.start(upstream, base)
    console.document({"rebase": rebased})
    _show_rebased(upstream, base, rebased)
    return 0


def _show_rebased(upstream: Upstream, base: Base, rebased: Rebased) -> None:
    """
    Print the outcome of every patch, and how to continue.

    Raises:
        patch-conflict: A patch stopped in the worktree; the error has the report.
    """
    session, fork, folder = upstream.session, upstream.fork, rebased.folder
    rows = [[name, outcome] for name, outcome in rebased.outcomes.items()]
    console.table(f"{fork} on {base.name}", ["patch", "outcome"], rows, result=True)
    write = command(session, fork, "export")
    if not rebased.stopped:
        console.result(f"Everything is committed in {folder}; edit it there, then run: {write}")
        return
    patches = series.of(session, fork)
    at = next(number for number, patch in enumerate(patches) if patch.name == rebased.stopped)
    steps = "git add FILE…, git am --continue"
    session.objects.run(["fetch", "-q", "--no-write-fetch-head", folder, "HEAD"])
    raise conflict.explain(
        upstream,
        base,
        session.objects.resolve(f"{rebased.tip}^{{tree}}"),
        patches[at],
        patches[:at],
        commands=(f"resolve it in {folder}: {steps}", write),
        todo=f"Resolve it in {folder} ({steps}), then {write}; until then the "
        f"checkout is unchanged.",
    )


def export(arguments: argparse.Namespace) -> int:
    """Write the series of one fork from its worktree; with ``--check``, only check the files."""
    session = context.checkout(arguments)
    if arguments.check:
        checked = {fork: rebases.check(Upstream(session, fork)) for fork in session.forks}
        console.document({"checked": checked})
        return 0
    fork = only_fork(session, worktree=True)
    if rebases.folder_of(session, fork).exists():
        changed = _export_worktree(session, fork, arguments.drop)
    else:
        series.names(session.project.series_folder(fork))
        changed = rebases.write(session, fork, rebases.rendered(Upstream(session, fork)))
    for line in changed or ["nothing changed"]:
        console.result(line)
    console.document({"fork": fork, "changed": changed})
    return 0


def _export_worktree(session: RunContext, fork: str, drop: list[str]) -> list[str]:
    """Write the series from the worktree, remove the worktree, and return a line per change."""
    state, files = rebases.collect(session, fork, drop)
    for name, reason in state.gone.items():
        console.note(f"dropped: {name}, {reason}")
    changed = rebases.write(session, fork, files, state.files)
    rebases.abort(session, fork)
    book = ledger.load(session.project.root, fork)
    carried = {record.name for record in book.carried(session.project.stack)} if book else set()
    for name in (*state.gone, *drop):
        if name in carried:
            line = f"{command(session, fork, 'pick')} {name[1:]} --drop"
            console.warn(f"the ledger still carries {name}: {line}")
    return changed


def drift(arguments: argparse.Namespace) -> int:
    """Try every patch on later bases, or show which release adopted each idea."""
    session = context.checkout(arguments)
    if arguments.ideas:
        return _show_ideas(session)
    if arguments.given:
        measured = [report for path in arguments.given for report in driftreport.read(path)]
    else:
        measured = [_measure(session, fork, arguments) for fork in session.forks]
    for report in measured:
        _show_drift(report)
    conflicts = any(trial.state == "conflict" for report in measured for trial in report.trials)
    if conflicts and not arguments.releases:
        console.note(
            "upstream may have adopted the patch and changed it since; --releases shows when"
        )
    issue_state = _keep_issue(measured, session, arguments) if arguments.issue else None
    shown = [
        {"of": report, "absorbed": [report.absorbed(name) for name in report.patches]}
        for report in measured
    ]
    console.document({"drift": shown, "issue": issue_state})
    return 0


def _measure(session: RunContext, fork: str, arguments: argparse.Namespace) -> Drift:
    upstream, patches = Upstream(session, fork), series.of(session, fork)
    with console.step(f"drift of {fork}: {len(patches)} patches"):
        if not patches:
            console.note("no patches to try")
            return measure(upstream, patches, ())
        if arguments.to:
            return measure(
                upstream, patches, [upstream.named(name, patches) for name in arguments.to]
            )
        return measure(upstream, patches, upstream.later(patches, every=arguments.releases))


def _show_drift(measured: Drift) -> None:
    """Print the state of each patch on each base, and the first base that has it."""
    if not measured.trials:
        console.result(f"{measured.fork}: no patches, or nothing later than the locked source")
        return
    ends = [(name, measured.absorbed(name)) for name in measured.patches]
    rows = [
        [name, "\n".join(runs(measured.of(name))), end.first or "-", end.proof]
        for name, end in ends
    ]
    console.table(
        f"{measured.fork} of {measured.stack}, {measured.day}",
        ["patch", "on later bases it", "upstream from", "because"],
        rows,
        result=True,
    )


def runs(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each run of bases with one state, such as ``applies: 0.20.2 to 0.21.0``."""
    lines, taken = [], False
    for state, group in itertools.groupby(trials, key=lambda trial: trial.state):
        names = [trial.base for trial in group]
        changed = taken and state == "conflict"
        taken = taken or state in ("already-upstream", "likely-upstream")
        last = f" to {names[-1]}" if len(names) > 1 else ""
        meaning = "was upstream, changed since" if changed else MEANING[state]
        lines.append(f"{meaning}: {names[0]}{last}")
    return lines


def _keep_issue(
    measured: Sequence[Drift], session: RunContext, arguments: argparse.Namespace
) -> Kept:
    """Open, update or close the issue about drift."""
    repository = Repository(GitHub.from_environment(session.mirrored(ADDRESS)), arguments.issue)
    asking = driftreport.asking(measured)
    stacks = ", ".join(dict.fromkeys(report.stack for report, _ in asking))
    count = (
        f"{len(asking)} patches of {stacks} ask"
        if len(asking) != 1
        else f"a patch of {stacks} asks"
    )
    issue_state = issue.keep(
        repository,
        "drift",
        f"Drift: {count} for a person" if asking else "Drift",
        driftreport.body(measured, run=github_summary.run_url()),
        author=arguments.author,
        wanted=bool(asking),
    )
    console.result(f"issue {issue_state.done}{f': {issue_state.url}' if issue_state.url else ''}")
    return issue_state


def _show_ideas(session: RunContext) -> int:
    derived = ideas.derive(session)
    columns = ["idea", "package", "verdict", *(["because"] if console.verbose else [])]
    rows = [
        [idea.idea, idea.package, idea.verdict, "\n".join(idea.evidence)][: len(columns)]
        for idea in derived
    ]
    console.table(
        "which release adopted which idea (-v shows the evidence)", columns, rows, result=True
    )
    console.document({"ideas": derived})
    return 0


def bump(arguments: argparse.Namespace) -> int:
    """Move a fork to a release: write stack, lock, ledger and series, or leave a worktree."""
    session = context.checkout(arguments)
    upstream = Upstream(session, only_fork(session))
    fork, version = upstream.fork, arguments.to
    if session.offline:
        raise SourceError(
            "offline", "bump needs the index and the upstream host, which --offline forbids."
        )
    if arguments.pull:
        bumped.clean(session.project.root)
    if version == "newest":
        later = upstream.later_releases()
        if not later:
            console.result(f"{fork} is at its newest release already.")
            console.document({"bump": None})
            return 0
        version = later[-1].version
    old = upstream.locked()
    plan = bumps.plan(upstream, version, arguments.drop)
    _show_plan(session, fork, version, plan, arguments.drop)
    done = rebases.start(upstream, plan.base, files=plan.files, gone=plan.gone)
    if done.stopped:
        console.document({"bump": plan, "rebase": done})
        _show_rebased(upstream, plan.base, done)
    between = rebases.compare(upstream, done)
    changed = _export_worktree(session, fork, [])
    units = None
    if session.project.fork(fork).build != "headers":
        units = foreseen.foresee(session.objects, old.tree, plan.base.tree)
    for line in (*changed, "", "range-diff of both series:", *between, ""):
        console.result(line)
    for line in foreseen.lines(units) if units else ():
        console.result(line)
    pull = _propose(session, arguments, plan, between, units) if arguments.pull else None
    document = {"bump": plan, "changed": changed, "range_diff": between}
    console.document({**document, "recompiles": units, "pull": pull})
    return 0


def _show_plan(
    session: RunContext, fork: str, version: str, plan: Bump, drop: Sequence[str]
) -> None:
    """
    Print the outcome of every patch on the new base.

    Raises:
        patch-conflict: A pick or patch does not apply, not even by a rebase.
    """
    rows = [
        [trial.patch, MEANING[trial.state], plan.gone.get(trial.patch, "")] for trial in plan.trials
    ]
    rows += [[name, "is not tried", plan.gone[name]] for name in drop]
    console.table(
        f"{fork} to {plan.base.name}",
        ["patch", "on the new base it", "so it is dropped"],
        rows,
        result=True,
    )
    for line in plan.difference:
        console.result(line)
    if plan.stuck:
        names = [trial.patch for trial in plan.stuck]
        options = " ".join(f"--drop '{name}'" for name in names)
        raise PatchError(
            "patch-conflict",
            f"{', '.join(names)} of {fork} do not apply to {version}.",
            details=[
                f"{trial.patch}: {MEANING[trial.state]}; {trial.proof}" for trial in plan.stuck
            ],
            todo=f"Drop them: {command(session, fork, 'bump')} --to {version} {options}; or leave "
            f"files out: {command(session, fork, 'pick')} NUMBER --exclude PATH=REASON.",
        )


def _propose(
    session: RunContext,
    arguments: argparse.Namespace,
    plan: Bump,
    between: Sequence[str],
    units: Foreseen | None,
) -> Proposed:
    """Open or update the pull request."""
    root, stack = session.project.root, session.project.stack
    proposed = proposal.propose(
        Repository(GitHub.from_environment(session.mirrored(ADDRESS)), arguments.pull),
        arguments.base,
        bumped.head(root),
        bumped.branch(stack, plan),
        bumped.changed(root),
        title=bumped.title(stack, plan),
        body=bumped.body(stack, plan, between, units),
    )
    console.result(f"pull request {proposed.done}: {proposed.url}")
    return proposed


def bisect(arguments: argparse.Namespace) -> int:
    """Find the change between two ends that broke a patch, or with ``--run`` a command."""
    session = context.checkout(arguments)
    fork = only_fork(session)
    if bool(arguments.program) == bool(arguments.patch):
        raise UsageError("usage", "bisect needs a patch, or --run and a command.")
    if arguments.program:
        return _bisect_command(session, fork, arguments)
    upstream = Upstream(session, fork)
    patches = _upto(series.of(session, fork), arguments.patch, alone=arguments.alone)
    ledger.require(session.project.root, fork)
    commits = bisection.line_of_commits(upstream, patches[-1], arguments.start, arguments.end)
    change = bisection.patch_over_commits(upstream, patches, commits)
    rows = [
        [label, trial.base, MEANING[trial.state]]
        for label, trial in (("last", change.last), ("first", change.first))
    ]
    console.table(
        f"{change.patch}: {change.tried[0]} of {change.tried[1]} bases tried",
        ["", "base", "there it"],
        rows,
        result=True,
    )
    evidence = [
        f"already upstream by {test.test}: {test.says}"
        for test in change.first.evidence
        if test.holds
    ]
    for line in (change.commit, change.page, *evidence):
        if line:
            console.result(line)
    console.document({"turn": change})
    return 0


def _upto(patches: Sequence[Patch], name: str, *, alone: bool) -> list[Patch]:
    """Return the patch *name*, after those before it."""
    for at, patch in enumerate(patches):
        if name in (patch.name, patch.name.removesuffix(".patch"), str(patch.pick or "")):
            return [patch] if alone else list(patches[: at + 1])
    details = [patch.name for patch in patches]
    raise SourceError("not-provided", f"The series has no patch {name!r}.", details=details)


def _bisect_command(session: RunContext, fork: str, arguments: argparse.Namespace) -> int:
    """Find the change that broke a command, and show every state that was tried."""
    session = dataclasses.replace(session, forks=(fork,))
    predicate = Predicate(session, fork, arguments.program, build=arguments.build)
    cause = None
    with session.store.lock(f"bisect-{session.project.stack}-{fork}"):
        try:
            cause = _cause(Upstream(session, fork), predicate, arguments)
        finally:
            rows = []
            for step in predicate.steps:
                exit_status = step.why or str(step.status)
                rows.append([step.name, step.answer, exit_status, f"{step.seconds:.1f}"])
            console.table(
                f"bisect {fork} over {arguments.over}",
                ["state", "answer", "exit status", ">seconds"],
                rows,
                result=True,
            )
            console.document({"cause": cause, "steps": predicate.steps})
    before, after = cause.answers
    for line in (f"{before}: {cause.last}", f"{after}: {cause.first}", cause.what, cause.page):
        if line:
            console.result(line)
    return 0


def _cause(upstream: Upstream, predicate: Predicate, arguments: argparse.Namespace) -> BisectCause:
    session, fork, names = upstream.session, upstream.fork, (arguments.start, arguments.end)
    if arguments.over == "patches":
        return bisection.over_patches(session, fork, predicate)
    ledger.require(session.project.root, fork)
    commits = bisection.line_of_commits(upstream, None, *names)
    return bisection.over_commits(upstream, commits, predicate, bare=arguments.alone)
