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

#: Action → help text.
ACTIONS = {
    "plan": "print the commands and files of setup",
    "setup": "set this machine up; finished steps are skipped",
    "check": "check the set-up, as the jobs' user",
    "drain": "take no new job, and wait for the running one; --end takes jobs again",
    "remove": "drain, and undo setup; models stay",
    "once": "run one job (called by the systemd unit)",
    "clean": "end leftover processes of a job, and empty its folders (called by the systemd unit)",
    "admit": "decide whether a job may run here (called by GitHub's runner before its first step)",
    "egress": "update the addresses that jobs may connect to (called by a timer)",
    "lease": "hold this machine for the leader of its pair (called by its ssh connection)",
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
    add(
        "--config",
        default="/etc/sparkwright",
        metavar="DIR",
        help="directory of the settings",
    )
    add("--workflows", type=Path, metavar="DIR", help="check: also check these workflows")
    add(
        "--patience",
        type=float,
        default=2,
        metavar="MINUTES",
        help="drain, remove: longest wait for a job (default: 2)",
    )
    add("--end", action="store_true", help="drain: take jobs again")
    add(
        "--dry-run",
        action="store_true",
        help="setup, remove: print the changes, and make none",
    )
    add(
        "--yes", action="store_true", help="setup, remove: confirm that this machine may be changed"
    )


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


def _host(arguments: argparse.Namespace) -> Place:
    return Place(arguments.sysroot.absolute())


def _ground(arguments: argparse.Namespace) -> Ground:
    """Return the machine as setup configured it."""
    return Ground.of(arguments.config, _host(arguments))


def _setup(arguments: argparse.Namespace) -> int:
    host, root = _host(arguments), context.checkout(arguments).project.root
    policy = policies.load(root / "ci" / POLICY)
    settings = _settings(policy, arguments)
    if exposures := exposed(root / ".github" / "workflows", policy.all_labels()):
        raise LabError(
            "runner-exposed",
            "A workflow of this checkout lets strangers onto this machine.",
            details=[
                f"{item.workflow} {item.job}: {item.trigger or 'unreadable'}: {item.reason}"
                for item in exposures
            ],
        )
    steps = plan.steps(policy, settings)
    if arguments.action == "plan" or arguments.dry_run:
        stands = tuple(perform.stand(step, host) for step in steps)
        _print(steps, stands)
    else:
        _require_root()
        _require_yes(arguments, "lab runner plan")
        with console.step("set up"):
            stands = perform.set_up(steps, host)
        _table(stands)
    console.document({"steps": steps, "stands": stands, "settings": settings})
    return 0


def _settings(policy: Policy, arguments: argparse.Namespace) -> Settings:
    """
    Return the settings of this machine.

    Raises:
        UsageError: A setting is missing or invalid.
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
            "usage", "This machine cannot be set up like this.", details=[str(error)]
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
        raise UsageError(
            "usage", f"{path} is not a public ssh key.", details=[str(error)]
        ) from error


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
        [(stand.name, stand.state, stand.says) for stand in stands],
        result=True,
    )


def _check(arguments: argparse.Namespace) -> int:
    host, ground = _host(arguments), _ground(arguments)
    steps = plan.steps(ground.policy, ground.settings)
    with console.step("check"):
        findings = (
            *fitness.of_steps(steps, host),
            *fitness.of_ground(ground, host, arguments.workflows),
        )
    console.table(
        "This runner",
        ("", "state", ""),
        [(finding.name, finding.state, finding.says) for finding in findings],
        result=True,
    )
    console.document({"findings": findings})
    if unfit := [finding for finding in findings if finding.state == "unfit"]:
        raise LabError(
            "runner-unfit",
            f"{len(unfit)} of {len(findings)} checks failed.",
            details=[f"{finding.name}: {finding.says}" for finding in unfit],
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
        raise UsageError("usage", f"The token is not sent unencrypted to {address}.")
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
    job_facts = {name: os.environ.get(name, "") for name in admit.TOLD}
    admit.admit(job_facts, policy, settings, Path(policy.folders.state) / "partner.json")
    console.note("this job may run here")
    return 0


def _egress(arguments: argparse.Namespace) -> int:
    host, folder = _host(arguments), _host(arguments).path(arguments.config)
    policy, settings = policies.load(folder / POLICY), policies.settings(folder / SETTINGS)
    resolution = egress.resolved(egress.names(policy, settings))
    for name in resolution.unknown:
        console.warn(f"{name} has no address")
    if not resolution.addresses:
        raise LabError(
            "runner-unready",
            "No name of the list has an address; the earlier addresses expire.",
            details=resolution.unknown,
        )
    status, output = host.ask(["nft", "-f", "-"], egress.refreshed(policy, resolution.addresses))
    if status:
        raise LabError(
            "runner-setup",
            "nft refused the addresses.",
            details=output.splitlines()[-10:],
        )
    console.note(f"{len(resolution.addresses)} addresses may be connected to")
    console.document({"addresses": resolution.addresses, "unknown": resolution.unknown})
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
    host, ground = _host(arguments), _ground(arguments)
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
    stands = perform.take_back(steps, host)
    ground.draining.unlink(missing_ok=True)
    _table(stands)
    console.document({"stands": stands})
    console.note(f"the journal stays in {ground.state}, and models in {ground.models}")
    return 0
