"""The steps that make a machine a runner, in order, from the reviewed policy and what is true of this one machine."""

from __future__ import annotations

import shlex

from sparkwright.core import strict_yaml
from sparkwright.operate.runner import admit, egress, unit
from sparkwright.operate.runner.policy import POLICY, SETTINGS, Policy, Settings
from sparkwright.operate.runner.steps import (
    Answers,
    AsApplied,
    ByHand,
    Exists,
    File,
    Folder,
    Gone,
    Run,
    Step,
)

UNITS = "/etc/systemd/system"
HOOK = "admit.sh"


def steps(policy: Policy, settings: Settings) -> tuple[Step, ...]:
    """Return everything that set-up does."""
    return (
        _user(policy.user),
        *_folders(policy),
        _image(policy),
        *_brought(policy),
        _settings(policy, settings),
        _token(policy),
        _hook(policy),
        _rules(policy),
        *_units(policy),
        _enabled(policy),
        _started(policy),
    )


def _user(name: str) -> Step:
    # A run that was killed between the two has made the group.
    group = ("groupadd", "--system", "--force", name)
    options = (
        "--system",
        "--gid",
        name,
        "--no-create-home",
        "--home-dir",
        "/nonexistent",
        "--shell",
        "/usr/sbin/nologin",
    )
    return Step(
        name="user",
        what=f"a system user {name} in no group but its own",
        why="jobs run as a user that can do nothing else: no sudo, no docker, no shell",
        check=Answers(("id", "-nG", name), rf"^{name}\n?\Z"),
        apply=(Run(group), Run(("useradd", *options, name))),
        undo=(Run(("userdel", name)),),
    )


def _folders(policy: Policy) -> tuple[Step, ...]:
    folders = policy.folders
    kept = Folder(folders.models)
    state = Step(
        name="folders",
        what="folders of root's for settings and state, and the place where the work folder is mounted",
        why="a job can write nowhere but into its work folder",
        check=AsApplied(),
        apply=(
            Folder(folders.config, 0o755),
            Folder(folders.state, 0o711),
            Folder(f"{folders.state}/logs", 0o700),
        ),
        undo=(),
    )
    work = Step(
        name="work folder",
        what=f"{folders.work}, where the work folder's own file system is mounted",
        why="what a job leaves lies in one place, which is emptied after it",
        check=Exists(folders.work),
        apply=(Folder(folders.work, 0o755),),
        undo=(Gone(folders.work),),
    )
    models = Step(
        name="models",
        what=f"{kept.path}, root's; set-up puts no model there, and nothing ever removes one",
        why="a job reads models and cannot change what the next job measures",
        check=Exists(kept.path),
        apply=(kept,),
    )
    return (state, work, models)


def _image(policy: Policy) -> Step:
    path = unit.image(policy)
    return Step(
        name="work image",
        what=f"a file system of {policy.room.work} MB in {path}",
        why="a job that fills its disk fills this one; the space is taken now, so that nobody else can take it later",
        check=Exists(path),
        apply=(
            Run(("rm", "-f", f"{path}.new")),
            Run(("fallocate", "-l", f"{policy.room.work}MB", f"{path}.new")),
            Run(("mkfs.ext4", "-q", "-F", "-m", "0", f"{path}.new")),
            Run(("chmod", "0600", f"{path}.new")),
            # Only a whole file system gets the name.
            Run(("mv", f"{path}.new", path)),
        ),
        undo=(Gone(f"{path}.new"), Gone(path)),
    )


def _brought(policy: Policy) -> tuple[Step, ...]:
    folders, software = policy.folders, policy.software
    program = Step(
        name="program",
        what=f"this program in {folders.program}, root's",
        why="the supervisor is root's; a job must not be able to change it",
        check=Exists(f"{folders.program}/bin/sparkwright"),
        apply=(ByHand(_install_program(folders.program)),),
    )
    version = f"version {software.version}, sha256 {software.sha256}"
    runner = Step(
        name="runner",
        what=f"GitHub's runner in {folders.runner}, root's ({version})",
        why="each job gets a fresh copy of it; a hash that is unresolved is looked up and reviewed first",
        check=Exists(f"{folders.runner}/run.sh"),
        apply=(
            ByHand(
                f"download actions-runner for linux of the version in {POLICY}, compare its sha256, and unpack it: "
                f"mkdir -p {folders.runner} && tar -xzf ARCHIVE --no-same-owner -C {folders.runner}"
            ),
        ),
    )
    return (program, runner)


def _install_program(folder: str) -> str:
    """Return how root installs this program: from a reviewed checkout, and by hash what it needs."""
    pip = f"{folder}/bin/python -m pip install"
    return (
        f"in a checkout of a commit that you have reviewed: python3 -m venv {folder} && "
        f"{pip} --require-hashes --only-binary :all: -r .github/requirements.txt && "
        f"{pip} --no-deps --no-build-isolation ."
    )


def _settings(policy: Policy, settings: Settings) -> Step:
    files = (
        File(f"{policy.folders.config}/{POLICY}", strict_yaml.dump(policy)),
        File(f"{policy.folders.config}/{SETTINGS}", strict_yaml.dump(settings)),
    )
    return Step(
        name="settings",
        what="the reviewed policy, and what this machine is",
        why="the units read no checkout, which somebody might edit",
        check=AsApplied(),
        apply=files,
        undo=tuple(Gone(one.path) for one in reversed(files)),
    )


def _token(policy: Policy) -> Step:
    path = f"{policy.folders.config}/{unit.CREDENTIAL}"
    says = (
        f"install -m 0600 /dev/stdin {path}, and paste a fine-grained token of the one repository with Administration: write "
        "(runners) and nothing else"
    )
    return Step(
        name="token",
        what=f"the token that registers runners, in {path}",
        why="systemd hands it to the supervisor as a credential; no job, command line or log sees it",
        check=Exists(path, secret=True),
        apply=(ByHand(says),),
        undo=(Gone(path),),
    )


def _hook(policy: Policy) -> Step:
    file = File(f"{policy.folders.config}/{HOOK}", _asking(policy), 0o755)
    return Step(
        name="hook",
        what="a script that GitHub's runner runs before each job",
        why="a pull request can bring a workflow that names this machine; here it ends, before its first step",
        check=AsApplied(),
        apply=(file,),
        undo=(Gone(file.path),),
    )


def _asking(policy: Policy) -> str:
    """Return the hook's text: it takes from its environment what GitHub says of the job, and nothing that a workflow may have put there."""
    python = f"{policy.folders.program}/bin/python"
    told = " ".join(f'{name}="${name}"' for name in admit.TOLD)
    command = shlex.join(
        ("-I", "-m", "sparkwright", "lab", "runner", "admit", "--config", policy.folders.config)
    )
    return f"#!/bin/sh\n# GitHub's runner asks this before the first step of a job.\nexec /usr/bin/env -i {told} {python} {command}\n"


def _rules(policy: Policy) -> Step:
    path = f"{policy.folders.config}/egress.nft"
    return Step(
        name="egress",
        what="rules that let the job's user connect to a list of hosts",
        why="what a job reads here cannot be sent anywhere",
        check=AsApplied(),
        apply=(File(path, egress.ruleset(policy)),),
        undo=(Gone(path),),
    )


def _units(policy: Policy) -> tuple[Step, ...]:
    mount, text = unit.mount(policy)
    written = {
        "mount": (File(f"{UNITS}/{mount}", text),),
        "service": (File(f"{UNITS}/{unit.SERVICE}", unit.service(policy)),),
        "egress units": (
            File(f"{UNITS}/{unit.EGRESS}.service", unit.egress_service(policy)),
            File(f"{UNITS}/{unit.EGRESS}-refresh.service", unit.refresh_service(policy)),
            File(f"{UNITS}/{unit.EGRESS}-refresh.timer", unit.refresh_timer(policy)),
        ),
    }
    whys = {
        "mount": "without devices and set-user-id",
        "service": "the cage that a job runs in: what it may see, take and reach",
        "egress units": "the rules are loaded before the first job, and addresses are renewed",
    }
    return tuple(
        Step(
            name=name,
            what=", ".join(file.path.rpartition("/")[2] for file in files),
            why=whys[name],
            check=AsApplied(),
            apply=files,
            undo=tuple(Gone(file.path) for file in files),
        )
        for name, files in written.items()
    )


def _enabled(policy: Policy) -> Step:
    names = (
        unit.mount(policy)[0],
        f"{unit.EGRESS}.service",
        f"{unit.EGRESS}-refresh.timer",
        unit.INSTANCE,
    )
    return Step(
        name="enabled",
        what=f"{', '.join(names)} start at boot",
        why="a machine that restarted takes jobs again, in the same cage",
        check=Answers(("systemctl", "is-enabled", *names), r"\A(enabled\n){4}\Z"),
        apply=(Run(("systemctl", "enable", "--quiet", *names)),),
        undo=tuple(
            Gone(
                f"{UNITS}/{'timers' if name.endswith('.timer') else 'multi-user'}.target.wants/{name}"
            )
            for name in names
        ),
    )


def _started(policy: Policy) -> Step:
    rules, refresh, timer = (
        f"{unit.EGRESS}.service",
        f"{unit.EGRESS}-refresh.service",
        f"{unit.EGRESS}-refresh.timer",
    )
    gone = f"add table inet {egress.TABLE}; delete table inet {egress.TABLE}"
    return Step(
        name="started",
        what="systemd has read the units, and the runner waits for jobs",
        why="set-up ends with a runner that runs",
        check=Answers(
            ("systemctl", "is-active", rules, timer, unit.INSTANCE), r"\A(active\n){3}\Z"
        ),
        apply=(
            Run(("systemctl", "daemon-reload")),
            Run(("systemctl", "reload-or-restart", rules)),
            Run(("systemctl", "start", "--no-block", refresh)),
            Run(("systemctl", "start", timer, unit.INSTANCE)),
        ),
        undo=(
            Run(("systemctl", "stop", unit.INSTANCE, timer, refresh, rules, unit.mount(policy)[0])),
            Run(("nft", gone)),
        ),
        live=True,
    )
