"""Serving images: built from an index on a real engine, started as people start them, and pushed to a real registry."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker import DockerClient
from docker.models.containers import Container
from docker.types import Mount
from tests.containers.conftest import (
    OTHER,
    OWN,
    PATIENCE,
    debian,
    emulated,
    imported,
)
from tests.containers.serveimages import PACKAGES, PASSWORD, USER, Maker, registry
from tests.support import publisher, standin, wheels

from sparkwright.core.store import Store

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


def test_from_built_wheels(own: Maker, current: str, tmp_path: Path) -> None:
    """Before anything is published: the wheels of a folder are a candidate, whatever index there is."""
    with publisher.index_owner(tmp_path) as owner:
        wheels.release(tmp_path / "dist", judged=False)
        made = own.run(
            "--built",
            tmp_path / "dist",
            "--stack",
            "2026.11",
            variables={**owner.environment, "SPARKWRIGHT_INDEX": ""},
        )
    status, out, said = own.said(made["image"]["id"], "bash", "-c", "sparkwright doctor --json")

    assert (made["channel"], made["labels"]["sparkwright.channel"]) == ("candidate", "candidate")
    assert status == 0, said
    assert json.loads(out)["releases"][made["release"]]["faults"] == []


# How it runs.


@pytest.mark.parametrize(
    ("words", "variables", "wanted"),
    [
        ([], {"MAX_MODEL_LENGTH": "4096"}, "variable-refused"),
        (["serve"], {"MODEL": "/nothing"}, "model-missing"),
        (["ray-worker"], {}, "usage"),
        (["health"], {}, "server-dead"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals_end_the_container(
    own: Maker, current: str, words: list[str], variables: dict[str, str], wanted: str
) -> None:
    status, _, said = own.said(current, *words, variables=variables)

    assert status in (1, 2), said
    assert wanted in said


def test_server_is_healthy_until_it_is_ended(
    own: Maker, current: str, until: Callable[..., Any], tmp_path: Path
) -> None:
    """The entrypoint becomes vLLM (here its stand-in), the engine finds it healthy, and SIGTERM ends it."""
    mounts = [Mount("/model", str(standin.model(tmp_path / "toy")), "bind", read_only=True)]
    with own.started(
        current,
        variables={"MODEL": "/model"},
        mounts=mounts,
        healthcheck={"interval": 2_000_000_000},
    ) as made:
        until(
            lambda: (
                state(own, made)["Status"] != "running"
                or state(own, made)["Health"]["Status"] == "healthy"
            )
        )
        assert state(own, made)["Status"] == "running", made.logs().decode()
        users = {row[0] for row in made.top(ps_args="-eo uid,pid,args")["Processes"]}
        made.stop(timeout=PATIENCE)
        assert (users, state(own, made)["ExitCode"]) == ({"10001"}, 128 + signal.SIGTERM)


def state(own: Maker, made: Container) -> dict[str, Any]:
    """Return how the engine says that the container is."""
    return dict(own.client.api.inspect_container(str(made.id))["State"])


# What cannot be built.


def test_refusal_of_the_client_inside(own: Maker, current: str) -> None:
    """A release that the image's Python cannot have is refused there, under the client's reference."""
    own.publish("2026.11.3", pythons=("3.99",))

    assert own.run("2026.11.3", status=1)["error"]["reference"] == "release-unknown"


# A registry.


def test_push(own: Maker, current: str, tmp_path: Path) -> None:
    """Only docker's credentials let it in, and are shown nowhere; the registry's digest is shown; the image can be pulled by it."""
    with registry(tmp_path / "registry") as (host, variables):
        words = ["2026.11.1", "--push", f"{host}/spark/vllm", "-v"]
        assert own.run(*words, status=1)["error"]["reference"] == "registry-refused"
        done, again = (own.run(*words, variables=variables) for _ in range(2))
        name, _, digest = done["pushed"].partition("@")
        own.client.images.remove(name)
        pulled = own.client.images.pull(f"{host}/spark/vllm@{digest}", auth_config=WHO)
        put(own, f"{host}/spark/vllm")
        taken = own.run(*words, status=1, variables=variables)

    assert (name, done["pushed"], str(pulled.id)) == (
        f"{host}/spark/vllm:2026.11.1-{OWN}",
        again["pushed"],
        current,
    )
    assert PASSWORD not in json.dumps(done)
    assert taken["error"]["reference"] == "image-tag-taken"
    own.client.images.remove(f"{host}/spark/vllm@{digest}")


WHO = {"username": USER, "password": PASSWORD}


def put(own: Maker, repository: str) -> None:
    """Push another image under the tag of the release."""
    tag = f"2026.11.1-{OWN}"
    own.client.images.get(own.base).tag(repository, tag)
    own.client.api.push(repository, tag=tag, auth_config=WHO)
    own.client.images.remove(f"{repository}:{tag}")


def test_registry_that_is_not_there(own: Maker, current: str) -> None:
    failed = own.run("2026.11.1", "--push", "127.0.0.1:9/spark/vllm", status=5)

    assert failed["error"]["reference"] == "registry-unreachable"


# The Spark's own kind of processor.


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
    assert "model-missing" in made.said(image, variables={"MODEL": "/no/such model"})[2]
    assert made.run("--base", own.base, status=1)["error"]["reference"] == "image-mismatch"
