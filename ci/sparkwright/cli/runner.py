"""``sparkwright lab runner``: set up a Spark that runs jobs of a repository, and run one job."""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.cli import options
from sparkwright.core import files
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.github import GitHub
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner import (
    admit,
    condition,
    egress,
    exposure,
    fitness,
    holding,
    labels,
    lease,
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

_usage = partial(UsageError, "usage")

#: Seconds that `drain` and `remove` wait for a job.
PATIENCE = 120


def _host(arguments: argparse.Namespace) -> Place:
    return Place(arguments.sysroot.absolute())


def _ground(arguments: argparse.Namespace) -> Ground:
    """Return the machine as setup configured it."""
    return Ground.of(arguments.config, _host(arguments))


def _policy(folder: Path) -> tuple[Policy, Settings]:
    """Return the policy and the settings of a machine that was set up, whose state may be lost."""
    return policies.load(folder / POLICY), policies.settings(folder / SETTINGS)


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
        _require_root()
        _require_yes(arguments)
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
    partner, _, address = arguments.partner.partition("=")
    key = arguments.leader_key
    record = {
        "repository": arguments.repository,
        "name": arguments.name or platform.node().partition(".")[0].lower(),
        "labels": wanted or labels.true_of(policy, machine),
        "partner": partner or None,
        "partner_address": address or None,
        "leader": arguments.leader or None,
        "leader_key": files.read_text(key, failure=_usage).strip() if key else None,
        "index": egress.index() if policy.egress.index else None,
    }
    try:
        settings = msgspec.convert(record, Settings)
    except msgspec.ValidationError as error:
        raise _usage("This machine cannot be set up like this.", details=[str(error)]) from error
    if wrong := [*labels.wrong(policy, settings, machine)] if wanted else []:
        raise _usage("A label is not true of this machine.", details=wrong)
    if says := policies.mispaired(settings):
        raise _usage(f"This machine cannot be in such a pair: {says}.")
    return settings


def _require_root() -> None:
    if os.geteuid() != 0:
        raise LabError(
            "runner-setup",
            "Only root can do this.",
            todo="Run it with sudo; `plan` needs no rights.",
        )


def _require_yes(arguments: argparse.Namespace) -> None:
    if not arguments.yes:
        raise _usage(
            f"{arguments.action} changes this machine. Read what `sparkwright lab runner plan` "
            "prints, and give --yes."
        )


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
    _require_root()
    # SIGTERM ends a job as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ground = _ground(arguments)
    address = ground.settings.api
    if not address.startswith("https://") and not re.match(
        r"http://(localhost|127\.0\.0\.1|\[::1\])[:/]", f"{address}/"
    ):
        raise _usage(f"The token is not sent unencrypted to {address}.")
    github = GitHub(address, registration.token(dict(os.environ), ground.config), seconds=30)
    return {"run": once.once(ground, github)}


def _clean(arguments: argparse.Namespace) -> None:
    """End what a job left."""
    _require_root()
    ground = _ground(arguments)
    with holding.machine(ground, 10):
        condition.recover(ground)


def _admit(arguments: argparse.Namespace) -> None:
    """Decide whether a job may run here."""
    policy, settings = _policy(Path(arguments.config))
    job_facts = {name: os.environ.get(name, "") for name in admit.TOLD}
    admit.admit(job_facts, policy, settings, Path(policy.folders.state) / "partner.json")
    console.note("this job may run here")


def _egress(arguments: argparse.Namespace) -> dict[str, Any]:
    """Update the addresses that jobs may connect to."""
    host = _host(arguments)
    policy, settings = _policy(host.path(arguments.config))
    resolution = egress.resolved(egress.names(policy, settings))
    for name in resolution.unknown:
        console.warn(f"{name} has no address")
    if not resolution.addresses:
        what = "No name of the list has an address; the earlier addresses expire."
        raise LabError("runner-unready", what, details=resolution.unknown)
    status, output = host.ask(["nft", "-f", "-"], egress.refreshed(policy, resolution.addresses))
    if status:
        what = "nft refused the addresses."
        raise LabError("runner-setup", what, details=output.splitlines()[-10:])
    console.note(f"{len(resolution.addresses)} addresses may be connected to")
    return {"addresses": resolution.addresses, "unknown": resolution.unknown}


def _lease(arguments: argparse.Namespace) -> None:
    """Hold this machine for its leader."""
    _require_root()
    ground = _ground(arguments)
    if not arguments.leader:
        raise _usage("lease needs --leader NAME.")
    console.note(lease.hold(ground, arguments.leader, lambda: condition.recover(ground)))


def _drain(arguments: argparse.Namespace) -> None:
    """Take no new job, or take jobs again."""
    _require_root()
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
    _require_root()
    _require_yes(arguments)
    condition.stop_taking(ground, PATIENCE)
    condition.clean(ground)
    stands = perform.take_back(plan.steps(ground.policy, ground.settings), host)
    ground.draining.unlink(missing_ok=True)
    _table("Set-up", stands)
    console.note(f"the journal stays in {ground.state}, and models in {ground.models}")
    return {"stands": stands}


#: Action → its function, and its help text.
ACTIONS: dict[str, tuple[Callable[[argparse.Namespace], object], str]] = {
    "plan": (_setup, "print the commands and files of setup"),
    "setup": (_setup, "set this machine up; finished steps are skipped"),
    "check": (_check, "check the set-up, as the jobs' user"),
    "drain": (_drain, "take no new job, and wait for the running one; --end takes jobs again"),
    "remove": (_remove, "drain, and undo setup; models stay"),
    "once": (_once, "run one job (called by the systemd unit)"),
    "clean": (
        _clean,
        "end leftover processes of a job, and empty its folders (called by the systemd unit)",
    ),
    "admit": (
        _admit,
        "decide whether a job may run here (called by GitHub's runner before its first step)",
    ),
    "egress": (_egress, "update the addresses that jobs may connect to (called by a timer)"),
    "lease": (_lease, "hold this machine for the leader of its pair (called by ssh)"),
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``runner``."""
    parser = parsers["lab runner"]
    parser.set_defaults(run=lambda arguments: ACTIONS[arguments.action][0](arguments))
    add = parser.add_argument
    actions = "; ".join(f"{name}: {text}" for name, (_, text) in ACTIONS.items())
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
        "--partner",
        default="",
        metavar="NAME=ADDRESS",
        help="plan, setup: the Spark that this one leases for jobs on two nodes",
    )
    add(
        "--leader",
        default="",
        metavar="NAME",
        help="plan, setup, lease: the Spark that may lease this one",
    )
    add("--leader-key", type=Path, metavar="FILE", help="plan, setup: public ssh key of the leader")
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
