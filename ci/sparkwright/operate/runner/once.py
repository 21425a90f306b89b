"""
One job: guards, a registration, GitHub's runner, the watch over it, and the clean-up, in this order and whatever happens in between.

Kill it anywhere: what a run that did not end left is cleaned before the next one begins, and the journal says that it died.
"""

from __future__ import annotations

import shutil
import time

import msgspec

from sparkwright.core import process
from sparkwright.core.console import console, size
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.github import GitHub
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner import holding, processes, registration
from sparkwright.operate.runner import job as jobs
from sparkwright.operate.runner.condition import clean, print_of, recover, unready
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.job import Running
from sparkwright.operate.runner.journal import Entry, now
from sparkwright.operate.runner.labels import carried
from sparkwright.operate.runner.registration import Registered

#: Seconds between two questions whether GitHub takes a registration back.
ASK_AGAIN = 30.0


def once(ground: Ground, github: GitHub) -> Entry | None:
    """
    Do one job, and return what the journal says of its end; None where the machine takes none now.

    Raises:
        runner-busy: Another run has the machine.
        runner-unready: No job should begin now.
        runner-exposed: The repository lets strangers in.
        runner-unregistered: GitHub could not be reached.
        runner-died: GitHub's runner ended without an end of its job.
        runner-disk: The job filled the disk; runner-memory, runner-overtime: as their names say. The machine is clean.
        runner-unclean: It is not.
    """
    with holding.machine(ground):
        if ground.draining.exists() or holding.wanted(ground):
            recover(ground)
            console.note("this machine takes no job now: it is drained")
            return None
        recover(ground)
        if reasons := list(unready(ground)):
            raise LabError("runner-unready", "No job begins now.", details=reasons)
        registration.guarded(github, ground.policy, ground.settings)
        labels = carried(ground.policy, ground.settings)
        registered = registration.register(github, ground.settings, labels, 60 * ground.policy.registration)
        return _One(ground, github, registered).run()


class _One:
    """A registration and what comes of it."""

    def __init__(self, ground: Ground, github: GitHub, registered: Registered) -> None:
        self._ground, self._github, self._registered = ground, github, registered
        self._asked = float("-inf")
        self._entry = Entry(now(), registered.name, "began", registered.name)
        self._gave_way = False

    def run(self) -> Entry:
        ground = self._ground
        ground.journal().write(self._entry)
        before = print_of(ground.models)
        running: Running | None = None
        reference = says = ""
        try:
            jobs.prepare(ground)
            running = Running(ground, self._registered, ground.state / "logs" / f"{self._registered.name}.log")
            console.note(f"{self._registered.name} waits for a job of {ground.settings.repository}")
            self._watch(running)
            _ended(running)
        except BaseException as error:
            reference = error.reference if isinstance(error, SparkwrightError) else "interrupted"
            says = " ".join((error.what, *error.details)) if isinstance(error, SparkwrightError) else type(error).__name__
            raise
        finally:
            self._over(running, reference, says, before)
        return self._entry

    def _watch(self, running: Running) -> None:
        limits, began = self._ground.policy.limits, time.monotonic()
        told = False
        while running.look(limits.look):
            if running.job and not told:
                told = True
                console.note(f"job {running.job!r} begins")
                self._ground.journal().write(msgspec.structs.replace(self._entry, at=now(), event="job", job=running.job))
            if trouble := self._trouble(running):
                raise trouble
            if not running.job and self._make_room(began):
                self._gave_way = True
                return

    def _trouble(self, running: Running) -> SparkwrightError | None:
        ground, room = self._ground, self._ground.policy.room
        for folder, least in ((ground.work, room.work_floor), (ground.state, room.disk_floor)):
            if (free := shutil.disk_usage(folder).free // 1_000_000) < least:
                return LabError("runner-disk", f"{free} MB are free in {folder}, and {least} must stay.")
        if (free := process.available_megabytes()) < room.memory_floor:
            return LabError("runner-memory", f"{free} MB of memory are available, and {room.memory_floor} must stay.")
        if running.job and time.monotonic() - running.began > 60 * ground.policy.limits.job:
            return LabError("runner-overtime", f"The job ran longer than {ground.policy.limits.job:g} min.")
        return None

    def _make_room(self, began: float) -> bool:
        """Is there a reason to take no job any more, and does GitHub agree that it has given none?"""
        ground, waited = self._ground, (time.monotonic() - began) / 60
        if not (waited > ground.policy.limits.idle or ground.draining.exists() or holding.wanted(ground)):
            return False
        if time.monotonic() - self._asked < ASK_AGAIN:
            return False
        self._asked = time.monotonic()
        return registration.unregister(self._github, ground.settings, self._registered)

    def _over(self, running: Running | None, reference: str, says: str, before: str) -> None:
        """End what runs, clean, and write the end down; whatever went wrong before stays what is raised."""
        ground = self._ground
        if running:
            if running.status is None:
                processes.ask_to_end(lambda: ground.whose() if running.status is None else [], ground.policy.limits.stop)
            processes.end(ground.whose, user=ground.uid)
        if not (running and running.job) and not self._gave_way:
            registration.unregister(self._github, ground.settings, self._registered)
        job, result = (running.job, running.result or "none") if running else ("", "none")
        entry = msgspec.structs.replace(self._entry, event="ended", job=job, result=result, reference=reference, says=says)
        try:
            if running:
                running.finish()
            done = clean(ground)
            entry = msgspec.structs.replace(entry, cleaned=done.files.bytes, ended=done.ended)
            if print_of(ground.models) != before:
                raise LabError("runner-unfit", f"The models in {ground.models} are not what they were before the job.")
        except SparkwrightError as error:
            entry = msgspec.structs.replace(entry, reference=error.reference, says=" ".join((error.what, *error.details)))
            raise
        finally:
            self._entry = entry = msgspec.structs.replace(entry, at=now())
            ground.journal().write(entry)
        console.note(f"{entry.name}: {entry.job or 'no job'}, {entry.result}; cleaned {size(entry.cleaned)}")


def _ended(running: Running) -> None:
    """
    Judge how the runner ended.

    Raises:
        runner-died: Not after one job, nor because nothing was to be done.
    """
    running.drain()
    status = running.status
    if status is None or (running.job and running.result):
        return
    if running.job or status:
        begun = f"in the middle of {running.job!r}" if running.job else "before it had taken a job"
        raise LabError("runner-died", f"GitHub's runner ended with status {status}, {begun}.", details=[f"log: {running.log}"])
