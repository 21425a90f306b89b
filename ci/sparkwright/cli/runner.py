"""``sparkwright lab runner``: set up a Spark that runs jobs of a repository, and run one job."""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from sparkwright.cli import context
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.github import GitHub
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner import (
    admit,
    condition,
    egress,
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
from sparkwright.operate.runner.exposure import exposed
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.place import Place
from sparkwright.operate.runner.policy import POLICY, SETTINGS, Policy, Settings
from sparkwright.operate.runner.steps import Stand, Step, printed

#: Action → what it does.
ACTIONS = {
    "plan": "print everything that setup would do here, as commands and files",
    "setup": "do it; what is done already is not done again",
    "check": "say what is not as set-up leaves it, tried as the jobs' user",
    "drain": "take no job any more, and wait for the one that runs; --end takes jobs again",
    "remove": "drain, and undo set-up; models stay",
    "once": "do one job (the unit runs this)",
    "clean": "end what a job left, and empty what it wrote to (the unit runs this)",
    "admit": "say whether a job may run here (GitHub's runner runs this, before its first step)",
    "egress": "renew the addresses that jobs may connect to (a timer runs this)",
    "lease": "be leased by the leader of a pair until it lets go (its ssh runs this)",
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``runner``."""
    parser = parsers["lab runner"]
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "action",
        choices=tuple(ACTIONS),
        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()),
    )
    add("--repository", default="", metavar="OWNER/NAME", help="plan, setup: whose jobs run here")
    add(
        "--name",
        default="",
        metavar="NAME",
        help="plan, setup: of this machine (default: its host name)",
    )
    add(
        "--labels",
        default="",
        metavar="LABEL,…",
        help="plan, setup: of ci/runner.yaml (default: all that are true of this machine)",
    )
    add(
        "--partner",
        default="",
        metavar="NAME=ADDRESS",
        help="plan, setup: the Spark that this one leases for two nodes",
    )
    add(
        "--leader",
        default="",
        metavar="NAME",
        help="plan, setup, lease: the Spark that may lease this one",
    )
    add("--leader-key", type=Path, metavar="FILE", help="plan, setup: its public ssh key")
    add(
        "--sysroot",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="the root of the machine (default: of this one)",
    )
    add(
        "--config",
        default="/etc/sparkwright",
        metavar="DIR",
        help="where set-up wrote its settings",
    )
    add("--workflows", type=Path, metavar="DIR", help="check: look at these workflows, too")
    add(
        "--patience",
        type=float,
        default=2,
        metavar="MINUTES",
        help="drain, remove: wait for a job (default: 2)",
    )
    add("--end", action="store_true", help="drain: take jobs again")
    add(
        "--dry-run",
        action="store_true",
        help="setup, remove: print what would be done, and change nothing",
    )
    add("--yes", action="store_true", help="setup, remove: change this machine")


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "plan": _setup,
        "setup": _setup,
        "check": _check,
        "drain": _drain,
        "remove": _remove,
        "once": _once,
        "clean": _clean,
        "admit": _admit,
        "egress": _egress,
        "lease": _lease,
    }
    return actions[arguments.action](arguments)


def _place(arguments: argparse.Namespace) -> Place:
    return Place(arguments.sysroot.absolute())


def _ground(arguments: argparse.Namespace) -> Ground:
    """Return the machine that set-up has prepared."""
    return Ground.of(arguments.config, _place(arguments))


def _setup(arguments: argparse.Namespace) -> int:
    place, root = _place(arguments), context.checkout(arguments).project.root
    policy = policies.load(root / "ci" / POLICY)
    settings = _settings(policy, arguments)
    if ways := exposed(root / ".github" / "workflows", policy.all_labels()):
        raise LabError(
            "runner-exposed",
            "A workflow of this checkout lets strangers onto this machine.",
            details=[
                f"{one.workflow} {one.job}: {one.trigger or 'unreadable'}: {one.reason}"
                for one in ways
            ],
        )
    steps = plan.steps(policy, settings)
    if arguments.action == "plan" or arguments.dry_run:
        stands = tuple(perform.stand(step, place) for step in steps)
        _print(steps, stands)
    else:
        _require_root()
        _require_yes(arguments, "lab runner plan")
        with console.step("set up"):
            stands = perform.set_up(steps, place)
        _table(stands)
    console.document({"steps": steps, "stands": stands, "settings": settings})
    return 0


def _settings(policy: Policy, arguments: argparse.Namespace) -> Settings:
    """
    Return what this machine is to be.

    Raises:
        UsageError: Something of it is missing, or cannot be.
    """
    if not arguments.repository:
        raise UsageError("usage", "setup needs --repository OWNER/NAME.")
    wanted = tuple(dict.fromkeys(re.findall(r"[^,\s]+", arguments.labels)))
    machine = labels.Machine.here()
    partner, _, address = arguments.partner.partition("=")
    record = {
        "repository": arguments.repository,
        "name": arguments.name or platform.node().partition(".")[0].lower(),
        "labels": wanted or labels.true_of(policy, machine),
        "partner": partner or None,
        "partner_address": address or None,
        "leader": arguments.leader or None,
        "leader_key": _key(arguments.leader_key),
        "index": egress.index() if policy.egress.index else None,
    }
    try:
        settings = msgspec.convert(record, Settings)
    except msgspec.ValidationError as error:
        raise UsageError(
            "usage", "This machine cannot be set up so.", details=[str(error)]
        ) from error
    if wrong := [*labels.wrong(policy, settings, machine)] if wanted else []:
        raise UsageError("usage", "A label is not true of this machine.", details=wrong)
    if says := policies.mispaired(settings):
        raise UsageError("usage", f"This machine cannot be in such a pair: {says}.")
    return settings


def _key(path: Path | None) -> str | None:
    try:
        return path.read_text("ascii").strip() if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("usage", f"{path} is no public ssh key.", details=[str(error)]) from error


def _require_root() -> None:
    if os.geteuid() != 0:
        raise LabError(
            "runner-setup",
            "Only root can do this.",
            todo="Run it with sudo; `plan` needs no rights.",
        )


def _require_yes(arguments: argparse.Namespace, preview: str) -> None:
    if not arguments.yes:
        raise UsageError(
            "usage",
            f"{arguments.action} changes this machine. Read what `sparkwright {preview}` prints, "
            f"and give --yes.",
        )


def _print(steps: Sequence[Step], stands: Sequence[Stand]) -> None:
    for number, (step, now) in enumerate(zip(steps, stands, strict=True), 1):
        console.result(
            f"{number}. {step.name}: {step.what}\n   why: {step.why}\n   now: "
            f"{now.state}{f' ({now.says})' if now.says else ''}"
        )
        for title, acts in (("do", step.apply), ("undo", step.undo)):
            for act in acts:
                first, *rest = printed(act)
                console.result(
                    "\n".join(
                        (f"   {title}: {first}", *(f"      {line}".rstrip() for line in rest))
                    )
                )


def _table(stands: Sequence[Stand]) -> None:
    console.table(
        "Set-up",
        ("step", "state", ""),
        [(one.name, one.state, one.says) for one in stands],
        result=True,
    )


def _check(arguments: argparse.Namespace) -> int:
    place, ground = _place(arguments), _ground(arguments)
    steps = plan.steps(ground.policy, ground.settings)
    with console.step("check"):
        found = (
            *fitness.of_steps(steps, place),
            *fitness.of_ground(ground, place, arguments.workflows),
        )
    console.table(
        "This runner",
        ("", "state", ""),
        [(one.name, one.state, one.says) for one in found],
        result=True,
    )
    console.document({"findings": found})
    if unfit := [one for one in found if one.state == "unfit"]:
        raise LabError(
            "runner-unfit",
            f"{len(unfit)} of {len(found)} things are not as they should be.",
            details=[f"{one.name}: {one.says}" for one in unfit],
        )
    return 0


def _once(arguments: argparse.Namespace) -> int:
    _require_root()
    signal.signal(signal.SIGTERM, _interrupted)
    ground = _ground(arguments)
    address = ground.settings.api
    if not address.startswith("https://") and not re.match(
        r"http://(localhost|127\.0\.0\.1|\[::1\])[:/]", f"{address}/"
    ):
        raise UsageError("usage", f"The token does not go in the clear to {address}.")
    github = GitHub(address, registration.token(dict(os.environ), ground.config), patience=30)
    entry = once.once(ground, github)
    console.document({"run": entry})
    return 0


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _clean(arguments: argparse.Namespace) -> int:
    _require_root()
    ground = _ground(arguments)
    with holding.machine(ground, 10):
        condition.recover(ground)
    return 0


def _admit(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.config)
    policy, settings = policies.load(folder / POLICY), policies.settings(folder / SETTINGS)
    told = {name: os.environ.get(name, "") for name in admit.TOLD}
    admit.admit(told, policy, settings, Path(policy.folders.state) / "partner.json")
    console.note("this job may run here")
    return 0


def _egress(arguments: argparse.Namespace) -> int:
    place, folder = _place(arguments), _place(arguments).path(arguments.config)
    policy, settings = policies.load(folder / POLICY), policies.settings(folder / SETTINGS)
    found = egress.resolved(egress.names(policy, settings))
    for name in found.unknown:
        console.warn(f"{name} leads nowhere")
    if not found.addresses:
        raise LabError(
            "runner-unready",
            "No name of the list leads anywhere; the addresses that were known run out.",
            details=found.unknown,
        )
    status, said = place.ask(["nft", "-f", "-"], egress.refreshed(policy, found.addresses))
    if status:
        raise LabError(
            "runner-setup", "The rules do not take the addresses.", details=said.splitlines()[-10:]
        )
    console.note(f"{len(found.addresses)} addresses may be connected to")
    console.document({"addresses": found.addresses, "unknown": found.unknown})
    return 0


def _lease(arguments: argparse.Namespace) -> int:
    _require_root()
    ground = _ground(arguments)
    if not arguments.leader:
        raise UsageError("usage", "lease needs --leader NAME.")
    console.note(lease.hold(ground, arguments.leader, lambda: condition.recover(ground)))
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    _require_root()
    ground = _ground(arguments)
    if arguments.end:
        ground.draining.unlink(missing_ok=True)
        console.note("this machine takes jobs again")
        return 0
    condition.stop_taking(ground, 60 * arguments.patience)
    console.note("no job runs here, and none is taken")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    place, ground = _place(arguments), _ground(arguments)
    steps = plan.steps(ground.policy, ground.settings)
    if arguments.dry_run:
        for step in reversed(steps):
            for act in step.undo:
                console.result("\n".join(printed(act)))
        return 0
    _require_root()
    _require_yes(arguments, "lab runner remove --dry-run")
    condition.stop_taking(ground, 60 * arguments.patience)
    condition.clean(ground)
    stands = perform.take_back(steps, place)
    ground.draining.unlink(missing_ok=True)
    _table(stands)
    console.document({"stands": stands})
    console.note(f"the journal stays in {ground.state}, and models in {ground.models}")
    return 0
