"""Failures of operate, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class LabError(SparkwrightError):
    """A runner of a lab cannot take or finish a job."""

    references: ClassVar[Mapping[str, Advice]] = {
        "night-taken": Advice(
            "A record of that day, stack and run is there already, and says something else: two jobs of one run record the same stack.",
            "Record each stack of a run once; the record that is there stays as it is.",
        ),
        "record-damaged": Advice(
            "A record of a run, of drift or of a status is no such record, is cut off, or "
            "has another name than it gives itself.",
            "Take it from the artifacts of the run that made it, or remove it; the site "
            "shows it as damaged until then.",
        ),
        "runner-busy": Advice(
            "Another run of `lab runner once` has this machine now.",
            "Wait for it to end; a machine has one GPU and does one job at a time.",
        ),
        "runner-died": Advice(
            "GitHub's runner ended in the middle of a job, or before it had taken one: it was killed, or lost GitHub for too long.",
            "Look at its log, named above. GitHub gives the job up after some minutes; start it again there. The machine was cleaned.",
        ),
        "runner-disk": Advice(
            "The job filled its work folder, or something filled the machine's disk; it was ended before anything else failed.",
            "Look at what the job writes, or raise room.work in ci/runner.yaml and set up anew. The machine was cleaned.",
        ),
        "runner-exposed": Advice(
            "Somebody without write access to the repository could run a program on this machine.",
            "Keep the machine's labels to workflows started by schedule, push or workflow_dispatch, best in a private repository.",
        ),
        "runner-memory": Advice(
            "Unified memory was nearly gone, which takes the whole machine with it; the job was ended first.",
            "Give the job's server less memory. The machine was cleaned.",
        ),
        "runner-overtime": Advice(
            "The job ran longer than ci/runner.yaml lets one.",
            "Give the job a timeout-minutes of its own below limits.job, or raise that. The machine was cleaned.",
        ),
        "runner-refused": Advice(
            "The job is of another repository, event or branch than those that may use this machine.",
            "Nothing of it ran. If it should have run, look at events and refs in ci/runner.yaml.",
        ),
        "runner-setup": Advice(
            "A step of making this machine a runner did not succeed: no root, no room, or something of that name is there already.",
            "Read the lines above, and run the same command again; steps that are done are not done twice.",
        ),
        "runner-unclean": Advice(
            "Something that a job left does not go away: a process that waits for a device, a file system mounted in the work folder.",
            "No job is taken before it is gone; restarting the machine ends every such process.",
        ),
        "runner-unfit": Advice(
            "The machine is not, or no longer, as set-up leaves it; what a job could do there was not reviewed.",
            "Run `sparkwright lab runner setup` again; what only a person can mend is said above.",
        ),
        "runner-unready": Advice(
            "The machine is not in the state that a job begins in: too little disk or memory, or something else uses the GPU.",
            "Free what is named above; the unit tries again by itself. No job was taken, so none is lost.",
        ),
        "runner-unregistered": Advice(
            "GitHub gave this machine no configuration: no network, a token that expired or may not, or labels that GitHub refuses.",
            "Read what GitHub said above. The unit asks again by itself; no job was taken.",
            exit_code=5,
        ),
    }
