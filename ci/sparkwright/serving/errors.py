"""Failures of serving and of images, with their references."""

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
