"""The steps of set-up that make users: the one that jobs run as, and the one by which a leader leases this machine."""

from __future__ import annotations

import msgspec

from sparkwright.operate.runner.policy import Policy, Settings
from sparkwright.operate.runner.steps import Act, Answers, AsApplied, File, Folder, Gone, Run, Step

LEASE_USER = "sparkwright-lease"


def user(name: str, why: str) -> Step:
    # A run that was killed between the two has made the group.
    group = ("groupadd", "--system", "--force", name)
    options = ("--system", "--gid", name, "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin")
    return Step(
        name="user" if name != LEASE_USER else "lease user",
        what=f"a system user {name} in no group but its own",
        why=why,
        check=Answers(("id", "-nG", name), rf"^{name}\n?\Z"),
        apply=(Run(group), Run(("useradd", *options, name))),
        undo=(Run(("userdel", name)),),
    )


def leased(policy: Policy, settings: Settings) -> tuple[Step, ...]:
    """Return what lets a leader lease this machine: a user whose key runs one command."""
    folder, keys = f"{policy.folders.config}/lease", f"{policy.folders.config}/lease/authorized_keys"
    command = f"sudo {policy.folders.program}/bin/sparkwright lab runner lease --leader {settings.leader} --config {policy.folders.config}"
    line = f'restrict,command="{command}" {settings.leader_key}\n'
    sshd = f"Match User {LEASE_USER}\n    AuthorizedKeysFile {keys}\n    AuthenticationMethods publickey\n    DisableForwarding yes\n"
    sudo = f"{LEASE_USER} ALL=(root) NOPASSWD: {command.removeprefix('sudo ')}\n"
    files = (
        File(keys, line), File(f"/etc/ssh/sshd_config.d/{LEASE_USER}.conf", sshd), File(f"/etc/sudoers.d/{LEASE_USER}", sudo, 0o440),
    )  # fmt: skip
    asking = user(LEASE_USER, "the leader of a pair reaches this machine for one thing")
    # sshd starts a forced command by the user's shell.
    acts = tuple(Run(tuple("/bin/sh" if word == "/usr/sbin/nologin" else word for word in _words(act))) for act in asking.apply)
    lease = Step(
        name="lease",
        what=f"{settings.leader} may lease this machine",
        why="a gate on two nodes has both or none; its key can do nothing but ask, hold and let go",
        check=AsApplied(),
        apply=(Folder(folder, 0o755), *files),
        undo=(*(Gone(file.path) for file in files), Gone(folder)),
    )
    return (msgspec.structs.replace(asking, apply=acts), lease)


def _words(act: Act) -> tuple[str, ...]:
    return act.words if isinstance(act, Run) else ()
