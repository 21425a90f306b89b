"""The commands of ``lab``: ``runner``, ``image``, ``record``, ``status`` and ``report``."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sparkwright.bench import results
from sparkwright.bench.report import page, terminal
from sparkwright.cli import options
from sparkwright.client.environment import Prefix, default_prefix
from sparkwright.client.index import open_index
from sparkwright.client.main import add_index, nonempty
from sparkwright.client.records import CHANNELS
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.github import GitHub, run_url
from sparkwright.core.http import redact_credentials
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner import (
    admit,
    condition,
    egress,
    exposure,
    fitness,
    holding,
    labels,
    once,
    perform,
    plan,
    registration,
)
from sparkwright.operate.runner import policy as policies
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.place import Place
from sparkwright.operate.runner.policy import POLICY, SETTINGS, Policy, Settings
from sparkwright.operate.runner.steps import Stand, Step, printed
from sparkwright.operate.site import outcome, pages, records
from sparkwright.operate.site.records import Measured, RunRecord
from sparkwright.operate.site.speeds import Source

_usage = partial(UsageError, "usage")

#: Seconds that `drain` and `remove` wait for a job.
PATIENCE = 120


def _host(arguments: argparse.Namespace) -> Place:
    return Place(arguments.sysroot.absolute())


def _ground(arguments: argparse.Namespace) -> Ground:
    """Return the machine as setup configured it."""
    return Ground.of(arguments.config, _host(arguments))


def _policy(arguments: argparse.Namespace) -> tuple[Policy, Settings]:
    """Return the policy and the settings of a machine that was set up, whose state may be lost."""
    folder = _host(arguments).path(arguments.config)
    return policies.load(folder / POLICY), policies.settings(folder / SETTINGS)


def runner(arguments: argparse.Namespace) -> object:
    """
    Run an action on this machine.

    Raises:
        runner-setup: The action needs root.
        UsageError: The action changes this machine, and ``--yes`` is not given.
    """
    action = ACTIONS[arguments.action]
    if action.root and os.geteuid() != 0:
        todo = "Run it with sudo; `plan` needs no rights."
        raise LabError("runner-setup", "Only root can do this.", todo=todo)
    if arguments.action in ("setup", "remove") and not arguments.yes:
        raise _usage(
            f"{arguments.action} changes this machine. Read what `sparkwright lab runner plan` "
            "prints, and give --yes."
        )
    return action.run(arguments)


def _setup(arguments: argparse.Namespace) -> dict[str, Any]:
    """Set this machine up, or print how."""
    root = options.checkout(arguments).project.root
    policy = policies.load(root / "ci" / POLICY)
    settings = _settings(policy, arguments)
    if exposures := exposure.exposed(root / ".github" / "workflows", policy.all_labels()):
        raise LabError(
            "runner-exposed",
            "A workflow of this checkout lets strangers onto this machine.",
            details=[
                f"{item.workflow} {item.job}: {item.trigger or 'unreadable'}: {item.reason}"
                for item in exposures
            ],
        )
    steps, host = plan.steps(policy, settings), _host(arguments)
    if arguments.action == "plan":
        stands = tuple(perform.stand(step, host) for step in steps)
        for number, (step, now) in enumerate(zip(steps, stands, strict=True), 1):
            console.result(f"{number}. {_description(step, now)}")
    else:
        with console.step("set up"):
            stands = perform.set_up(steps, host)
        _table("Set-up", stands)
    return {"steps": steps, "stands": stands, "settings": settings}


def _settings(policy: Policy, arguments: argparse.Namespace) -> Settings:
    """
    Return the settings of this machine.

    Raises:
        UsageError: A setting is missing or invalid.
    """
    if not arguments.repository:
        raise _usage("setup needs --repository OWNER/NAME.")
    wanted = tuple(dict.fromkeys(re.findall(r"[^,\s]+", arguments.labels)))
    machine = labels.Machine.here()
    record = {
        "repository": arguments.repository,
        "name": arguments.name or platform.node().partition(".")[0].lower(),
        "labels": wanted or labels.true_of(policy, machine),
        "index": egress.index() if policy.egress.index else None,
    }
    try:
        settings = msgspec.convert(record, Settings)
    except msgspec.ValidationError as error:
        raise _usage("This machine cannot be set up like this.", details=[str(error)]) from error
    if wrong := [*labels.wrong(policy, settings, machine)] if wanted else []:
        raise _usage("A label is not true of this machine.", details=wrong)
    return settings


def _description(step: Step, now: Stand) -> str:
    """Return what *step* does, why, how it stands now, and how it is undone."""
    state = f"{now.state} ({now.says})" if now.says else now.state
    lines = [f"{step.name}: {step.what}", f"   why: {step.why}", f"   now: {state}"]
    for title, acts in (("do", step.apply), ("undo", step.undo)):
        lines += [f"   {title}: " + "\n      ".join(printed(act)) for act in acts]
    return "\n".join(lines)


def _table(title: str, rows: Sequence[Stand | fitness.Finding]) -> None:
    cells = [(row.name, row.state, row.says) for row in rows]
    console.table(title, ("", "state", ""), cells, result=True)


def _check(arguments: argparse.Namespace) -> None:
    """Check the set-up."""
    host, ground = _host(arguments), _ground(arguments)
    steps = plan.steps(ground.policy, ground.settings)
    with console.step("check"):
        findings = (*fitness.of_steps(steps, host), *fitness.of_ground(ground, host))
    _table("This runner", findings)
    console.document({"findings": findings})
    if unfit := [finding for finding in findings if finding.state == "unfit"]:
        raise LabError(
            "runner-unfit",
            f"{len(unfit)} of {len(findings)} checks failed.",
            details=[f"{finding.name}: {finding.says}" for finding in unfit],
        )


def _once(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job."""
    # SIGTERM ends a job as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ground = _ground(arguments)
    token = registration.token(dict(os.environ), ground.config)
    return {"run": once.once(ground, GitHub(ground.settings.api, token, seconds=30))}


def _clean(arguments: argparse.Namespace) -> None:
    """End what a job left."""
    ground = _ground(arguments)
    with holding.machine(ground, 10):
        condition.recover(ground)


def _admit(arguments: argparse.Namespace) -> None:
    """Decide whether a job may run here."""
    policy, settings = _policy(arguments)
    admit.admit({name: os.environ.get(name, "") for name in admit.TOLD}, policy, settings)
    console.note("this job may run here")


def _egress(arguments: argparse.Namespace) -> dict[str, Any]:
    """Update the addresses that jobs may connect to."""
    policy, settings = _policy(arguments)
    resolution = egress.resolved(egress.names(policy, settings))
    if not resolution.addresses:
        what = "No name of the list has an address; the earlier addresses expire."
        raise LabError("runner-unready", what, details=resolution.unknown)
    status, output = _host(arguments).ask(
        ["nft", "-f", "-"], egress.refreshed(policy, resolution.addresses)
    )
    if status:
        what = "nft refused the addresses."
        raise LabError("runner-setup", what, details=output.splitlines()[-10:])
    unknown = ", ".join(resolution.unknown) or "none"
    console.note(
        f"{len(resolution.addresses)} addresses may be connected to; names without one: {unknown}"
    )
    return {"addresses": resolution.addresses, "unknown": resolution.unknown}


def _drain(arguments: argparse.Namespace) -> None:
    """Take no new job, or take jobs again."""
    ground = _ground(arguments)
    if arguments.end:
        ground.draining.unlink(missing_ok=True)
        console.note("this machine takes jobs again")
    else:
        condition.stop_taking(ground, PATIENCE)
        console.note("no job runs here, and none is taken")


def _remove(arguments: argparse.Namespace) -> dict[str, Any]:
    """Undo the set-up."""
    host, ground = _host(arguments), _ground(arguments)
    condition.stop_taking(ground, PATIENCE)
    condition.clean(ground)
    stands = perform.take_back(plan.steps(ground.policy, ground.settings), host)
    ground.draining.unlink(missing_ok=True)
    _table("Set-up", stands)
    console.note(f"the journal stays in {ground.state}, and models in {ground.models}")
    return {"stands": stands}


class Action(NamedTuple):
    """An action of ``lab runner``: its function, its help text, and whether it needs root."""

    run: Callable[[argparse.Namespace], object]
    text: str
    root: bool = False


ACTIONS = {
    "plan": Action(_setup, "print the commands and files of setup"),
    "setup": Action(_setup, "set this machine up; finished steps are skipped", root=True),
    "check": Action(_check, "check the set-up, as the jobs' user"),
    "drain": Action(
        _drain, "take no new job, and wait for the running one; --end takes jobs again", root=True
    ),
    "remove": Action(_remove, "drain, and undo setup; models stay", root=True),
    "once": Action(_once, "run one job (called by the systemd unit)", root=True),
    "clean": Action(
        _clean,
        "end leftover processes of a job, and empty its folders (called by the systemd unit)",
        root=True,
    ),
    "admit": Action(
        _admit,
        "decide whether a job may run here (called by GitHub's runner before its first step)",
    ),
    "egress": Action(_egress, "update the addresses that jobs may connect to (called by a timer)"),
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands of ``lab``."""
    _add_runner(parsers["lab runner"])
    _add_image(parsers["lab image"])
    _add_record(parsers["lab record"])
    _add_status(parsers["lab status"])
    parser = parsers["lab report"]
    parser.set_defaults(run=report)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a self-contained page instead"
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="result of a measurement; the first is compared with the others",
    )


def _add_image(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=image)
    add_index(parser)
    add = parser.add_argument
    add(
        "release",
        nargs="?",
        type=nonempty,
        metavar="RELEASE",
        help="full name of a release (default: the newest of the channel, which is shown)",
    )
    add(
        "--channel",
        choices=CHANNELS,
        default="verified",
        help="channel of the release (default: %(default)s)",
    )
    add(
        "--platform",
        choices=("linux/arm64", "linux/amd64"),
        default="linux/arm64",
        help="platform of the image (default: %(default)s)",
    )
    add(
        "--base",
        default="",
        metavar="IMAGE",
        help="base image, as NAME@sha256:… or an id (default: `image` in environment.yaml)",
    )
    add(
        "--push",
        default="",
        metavar="REPOSITORY",
        help="push the image there as RELEASE-ARCHITECTURE, and show its digest",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the release and show what would be built, without an engine",
    )


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=record)
    number, attempt = (os.environ.get(f"GITHUB_RUN_{name}", "") for name in ("ID", "ATTEMPT"))
    add = parser.add_argument
    add("--at", type=Path, required=True, metavar="FOLDER", help="folder of the records")
    add(
        "--stage",
        action="append",
        default=[],
        metavar="NAME=OUTCOME[:REFERENCE]",
        help="outcome of a stage: a verdict, or success, failure, cancelled, skipped; may be "
        "repeated",
    )
    add(
        "--document",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="outcome of a stage, from the document of its --json; takes precedence over a "
        "--stage of that name",
    )
    add(
        "--file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="verdicts or a measurement; may be repeated",
    )
    add(
        "--workflow",
        default=os.environ.get("GITHUB_WORKFLOW", ""),
        metavar="NAME",
        help="name of the workflow (default: GITHUB_WORKFLOW)",
    )
    add(
        "--run",
        dest="number",
        default=f"{number}.{attempt}" if attempt not in ("", "1") else number,
        metavar="ID",
        help="number of the run (default: GITHUB_RUN_ID and its attempt)",
    )
    add(
        "--began",
        default="",
        metavar="TIME",
        help="start of the run, as printed by `date -u +%%FT%%TZ`",
    )
    add("--ended", default="", metavar="TIME", help="end of the run (default: now)")


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=status)
    add_index(parser)
    add = parser.add_argument
    add("--nights", type=Path, metavar="FOLDER", help="folder of the records of `lab record`")
    add(
        "--drift",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="output of `patch drift --json`; may be repeated",
    )
    add(
        "--patches",
        type=Path,
        metavar="FILE",
        help="output of `patch status --json` (default: computed here)",
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the pages",
    )


def _add_runner(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=runner)
    add = parser.add_argument
    actions = "; ".join(f"{name}: {action.text}" for name, action in ACTIONS.items())
    add("action", choices=tuple(ACTIONS), help=actions)
    add(
        "--repository",
        default="",
        metavar="OWNER/NAME",
        help="plan, setup: repository whose jobs run here",
    )
    add(
        "--name",
        default="",
        metavar="NAME",
        help="plan, setup: name of this machine (default: its host name)",
    )
    add(
        "--labels",
        default="",
        metavar="LABEL,…",
        help="plan, setup: labels of ci/runner.yaml (default: all that fit this machine)",
    )
    add(
        "--sysroot",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="root directory of the machine (default: /)",
    )
    add("--config", default="/etc/sparkwright", metavar="DIR", help="directory of the settings")
    add("--end", action="store_true", help="drain: take jobs again")
    add(
        "--yes", action="store_true", help="setup, remove: confirm that this machine may be changed"
    )


def image(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check a release, and build and push its image."""
    # These load docker.
    from sparkwright.builder import container_build
    from sparkwright.operate import image as images
    from sparkwright.release import policy

    context = options.checkout(arguments)
    repository = images.check_repository(arguments.push) if arguments.push else ""
    base = container_build.pinned_base(context, arguments.base)
    address = arguments.index or ""
    options.refuse(
        (context.offline and address.startswith("http"), "--offline needs an index in a folder."),
        (redact_credentials(address) != address, "The image would show the password of --index."),
    )
    fingerprint = (
        arguments.trust or policy.load(context.project.root, context.project.spec.arch).file.root
    )
    index = open_index(Prefix(default_prefix()).root / "trust", address, fingerprint)
    name = images.select(
        index,
        arguments.release or "",
        channel=arguments.channel,
        stack=arguments.stack or "",
        platform=arguments.platform,
    )
    release, state = index.release(name), index.states[name]
    labels = images.labels(index, release, arguments.platform, base)
    for gate in state.missing:
        console.warn(f"not shown: {gate}")
    condition, built, pushed = "would be built", None, ""
    if not arguments.dry_run:
        built = images.build(context, index, release, platform=arguments.platform, base=base)
        condition = "was there already" if built.present else "built"
    if built and repository:
        pushed = images.push(built, repository)
    rows = [["base", base], ["platform", arguments.platform], *map(list, labels.items())]
    rows += [["image", f"{built.name}, {built.id}"]] if built else []
    rows += [["pushed", pushed]] if pushed else []
    console.table(f"serving image of {name}: {condition}", ["", ""], rows, result=True)
    return {
        "image": built,
        "state": condition,
        "release": name,
        "channel": state.channel,
        "labels": labels,
        "base": base,
        "pushed": pushed,
    }


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the record of a run, and show it."""
    files, measured = outcome.files(arguments.file)
    fields = {
        "workflow": arguments.workflow or None,
        "run": arguments.number,
        "stack": arguments.stack or "",
        "ended": arguments.ended or f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "stages": outcome.stages(arguments.stage, arguments.document),
        "url": run_url(),
        "commit": os.environ.get("GITHUB_SHA", ""),
        "began": arguments.began,
        "files": files,
        "measured": measured,
    }
    try:
        run_record = msgspec.convert(msgspec.to_builtins(fields), RunRecord)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError("usage", "This is not a record of a run.", details=[str(error)]) from error
    path = records.write(arguments.at, run_record)
    title = f"{run_record.workflow} of {run_record.day}: {run_record.state}"
    rows = [
        [stage.name, stage.state, stage.reference, stage.message[:80]]
        for stage in run_record.stages
    ]
    rows += [[file.name, "missing", "", file.message] for file in files if not file.sha256]
    console.table(f"{title}\n{path}", ["stage", "state", "reference", ""], rows, result=True)
    return {"file": str(path), "state": run_record.state, "night": run_record}


def status(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make static pages from all records, and show the unreadable ones."""
    context, day = options.checkout(arguments), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    runs, problems = records.read(arguments.nights) if arguments.nights else ([], [])
    releases, link = None, ""
    figures: list[tuple[Source, Measured]] = []
    if arguments.index:
        trusted = Prefix(default_prefix()).root / "trust"
        index = open_index(trusted, arguments.index, arguments.trust or "")
        releases, figures = pages.read_releases(index, context.store, problems)
        # A folder is published with the site below it.
        link = index.location.url if index.location.url.startswith("http") else "../"
    else:
        console.note("no index was named, so the pages show no releases")
    drifts = pages.read_drifts(arguments.drift, problems)
    patches = pages.read_patches(context, arguments.patches, day, problems)
    site = pages.SiteContent(
        day, link, releases, runs[::-1], patches, drifts, figures, problems
    )  # fmt: skip
    for name, data in pages.render(site).items():
        context.store.write(arguments.output.absolute() / name, data)
    for problem in problems:
        console.warn(f"{problem.name}: {problem.reference}: {problem.message}")
    counts = {"releases": len(releases or ()), "runs": len(runs), "figures": len(figures)}
    console.note(", ".join(f"{count} {name}" for name, count in counts.items()))
    console.result(str(arguments.output / "index.html"))
    return {"output": str(arguments.output), "day": day, "problems": problems, **counts}


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show results of measurements, or write a page of them."""
    context, target = options.checkout(arguments), arguments.html
    measured = [results.read(path) for path in arguments.files]
    if target and target.resolve() in map(Path.resolve, arguments.files):
        raise UsageError("usage", f"{target} is one of the results and would be overwritten.")
    if target:
        context.store.write(target.absolute(), page.render(measured).encode())
        console.result(str(target.absolute()))
    else:
        for result in measured:
            terminal.show(result)
    names = ("kind", "state", "says", "culprits")
    shown = [
        {"file": str(path), **{name: getattr(result, name) for name in names}}
        for path, result in zip(arguments.files, measured, strict=True)
    ]
    return {"results": shown, "html": target and str(target)}
