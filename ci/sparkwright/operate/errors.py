"""Failures of operate, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class ServeError(SparkwrightError):
    """A server cannot start, or failed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "flag-unknown": Advice(
            "The installed release of vLLM does not know the flag, or it is one that `serve` sets itself.",
            "Correct it, or take it away; `vllm serve --help=all` of that environment lists its flags.",
        ),
        "graph-memory-negative": Advice(
            "vLLM estimated less than nothing for its CUDA graphs, so it would plan more cache than there is memory (vllm #44740).",
            "Pin the cache with --flag=--kv-cache-memory-bytes=BYTES, or use a recipe, whose plan does.",
        ),
        "memory-held": Advice(
            "The machine is large enough, but programs that run now hold so much that the server would not fit beside them.",
            "End what is listed above, or plan less (--kv-cache-memory-bytes, --max-num-seqs).",
        ),
        "memory-low": Advice(
            "The machine's free memory fell below its floor; a Spark that runs out of memory stops answering, and was spared that.",
            "End other programs or plan less cache; `--floor` lowers the floor for those who know what they risk.",
        ),
        "node-lost": Advice(
            "Ray knows fewer living machines than the server was started on; vLLM's own /health still says 200 for minutes.",
            "Look at the other machine; then start its `serve --ray-worker` and the server again.",
        ),
        "port-taken": Advice(
            "Another program listens on that address and port, or this user may not.",
            "End that program, or choose another port with --port (in a container: PORT).",
        ),
        "ray-failed": Advice(
            "Ray did not start, or ended by itself: a wrong address, a port that is taken, another version on the other machine.",
            "Read the lines above; ADDRESS is HOST:PORT of the head, as it prints it.",
        ),
        "ray-missing": Advice(
            "vLLM serves over several machines through Ray, which the environment does not have.",
            "Install it there (`uv pip install --python VENV/bin/python ray`), the same version on every machine.",
        ),
        "serve-running": Advice(
            "`sparkwright serve` runs here already, and two servers would take each other's memory: a Spark has one for everything.",
            "Ask the server that runs, or stop it first (`kill PID`, or Ctrl-C where it was started).",
        ),
        "server-dead": Advice(
            "Nothing serves there: no process, no listener, or an engine that says itself that it is dead.",
            "Start it again with `sparkwright serve`; the log of the one that died says why.",
        ),
        "server-died": Advice(
            "vLLM ended by itself. Its last lines are above; the first error is further up in its log.",
            "Read the log from the first line with ERROR on.",
        ),
        "server-late": Advice(
            "The server was not ready within its patience: a slow disk, a first compilation, or it hangs.",
            "Read its log; give it longer with --patience SECONDS.",
        ),
        "server-stuck": Advice(
            "The server takes connections, gives no token, and none of its counters moves: it hangs, although /health may say 200.",
            "Ask again; if it stays so, stop it and start it again, and keep its log.",
        ),
        "variable-refused": Advice(
            "A variable has a value that it cannot have, or a name that nobody reads, so the server would run otherwise than was asked.",
            "Correct it as the lines above say, or take it away; docs/verbs.md lists the variables.",
        ),
        "workers-missing": Advice(
            "Fewer machines than the recipe needs joined within the patience.",
            "Start `sparkwright serve --ray-worker ADDRESS` on each of the others; see that both networks let them through.",
        ),
    }


class ImageError(SparkwrightError):
    """A serving image cannot be built or pushed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "image-digest-differs": Advice(
            "The registry names another image than was pushed: somebody pushed at the same time, or something between changed it.",
            "Do not use that tag; find out who writes to the repository, and push again.",
        ),
        "image-tag-taken": Advice(
            "The repository has another image under the tag of this release, perhaps on another base; nothing is overwritten.",
            "Push to another repository, or remove the tag there if nobody uses it.",
        ),
        "registry-refused": Advice(
            "The registry does not take the image from this user: no or other credentials, no right to write there, or no room.",
            "Log in with `docker login` as somebody who may push there; sparkwright keeps no credentials of its own.",
        ),
        "registry-unreachable": Advice(
            "The container engine does not reach the registry: a wrong name, no network, or a registry without TLS that it does not trust.",
            "Try `docker push` yourself; for a registry without TLS see `insecure-registries` in the engine's configuration.",
            exit_code=5,
        ),
    }


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
