"""What a run works on: policy, settings, the job's user, and where things lie."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sparkwright.operate.errors import LabError
from sparkwright.operate.runner import policy as policies
from sparkwright.operate.runner import processes
from sparkwright.operate.runner.journal import Journal
from sparkwright.operate.runner.place import Place
from sparkwright.operate.runner.policy import POLICY, SETTINGS, Policy, Settings
from sparkwright.operate.runner.processes import Whose


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """
    A machine that was set up.

    Attributes:
        config: Its folder of settings.
        uid: Of the user that jobs run as; *gid* is its group.
        whose: Tells the processes of jobs, now.
        base: The root that the folders of the policy are below.
    """

    policy: Policy
    settings: Settings
    config: Path
    uid: int
    gid: int
    whose: Whose
    base: Path = Path("/")

    @classmethod
    def of(cls, config: str, place: Place = Place()) -> Ground:  # noqa: B008  frozen
        """
        Return the machine that set-up described in the folder *config* at *place*.

        Raises:
            file-invalid: A file of it does not read.
            runner-setup: The user of jobs is not there, or is root.
        """
        folder = place.path(config)
        policy, settings = policies.load(folder / POLICY), policies.settings(folder / SETTINGS)
        uid = place.number(policy.user)
        if uid is None:
            raise LabError("runner-setup", f"There is no user {policy.user}.", todo="Run `sparkwright lab runner setup` first.")
        if uid == 0:
            raise LabError("runner-setup", f"The user {policy.user} is root.", todo="Name another user in ci/runner.yaml, and set up anew.")
        # Its only group is its own, made with it; nobody is in another by the number of a user that is none.
        gid = place.number(policy.user, group=True)
        return cls(
            policy=policy, settings=settings, config=folder, uid=uid, gid=uid if gid is None else gid,
            whose=lambda: processes.of_user(uid), base=place.root,
        )  # fmt: skip

    def at(self, folder: str) -> Path:
        """Return where a folder of the policy is."""
        return self.base / folder.lstrip("/")

    @property
    def state(self) -> Path:
        return self.at(self.policy.folders.state)

    @property
    def work(self) -> Path:
        return self.at(self.policy.folders.work)

    @property
    def models(self) -> Path:
        return self.at(self.policy.folders.models)

    @property
    def draining(self) -> Path:
        """While this file is there, no job is taken."""
        return self.state / "drain"

    def journal(self) -> Journal:
        return Journal(self.state / "journal.jsonl")

    @property
    def root(self) -> bool:
        return os.geteuid() == 0
