"""Serving images: built from a published index on a real engine, started as people start them, and pushed to a real registry."""

from __future__ import annotations

import http.client
import http.server
import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from docker import DockerClient
from tests.conftest import running
from tests.containers.conftest import (
    OTHER,
    OWN,
    PATIENCE,
    ROOT,
    debian,
    emulated,
    imported,
    missing,
)
from tests.containers.serveimages import PACKAGES, PASSWORD, SHOW, Maker, login, reference, registry
from tests.support import githubwork, workflows

from sparkwright.core.store import Store
from sparkwright.demo.upstreams import serve
from sparkwright.operate.image import installed, recorded
from sparkwright.operate.image.labels import SERIAL
from sparkwright.release.signing import keys

pytestmark = pytest.mark.containers

PROGRAM = "/opt/sparkwright/program/bin/python"
VENV = "/opt/sparkwright/set"
#: What nobody could say in a shell without quotes.
AWKWARD = "a  b\t'c' \"d\"\n$(id) `id` \\ é;"


def maker(architecture: str, address: str, user_store: Store, folder: Path) -> Maker:
    """Return who makes images for *architecture*, on a base that lacks nothing."""
    base = imported(address, debian(architecture, user_store, PACKAGES, "serve"), f"linux/{architecture}", f"test/serve:{architecture}")
    return Maker(folder, address, architecture, base, user_store)


@pytest.fixture(scope="session", name="own")
def _own(engine_address: str, user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    """Return who makes images for this machine's kind of processor."""
    folder = tmp_path_factory.mktemp("own")
    yield maker(OWN, engine_address, user_store, folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", name="built")
def _built(own: Maker) -> dict[str, Any]:
    """Return the document of a run that made the image of the only release."""
    return own.run()


@pytest.fixture(name="image")
def _image(built: dict[str, Any], engine: DockerClient) -> str:
    """Return the id of that image."""
    found: str = built["image"]["id"]
    return found


# What is in it.


def test_the_image_holds_the_release_and_says_so(own: Maker, built: dict[str, Any], image: str) -> None:
    """Its labels are the release's hashes; inside, the set is recognised, every byte of it, and nothing it was made with is left."""
    found = own.client.images.get(image)
    status, out, said = own.said(image, "bash", "-c", f"{PROGRAM} -I -m sparkwright doctor --json --deep --into {VENV}")
    _, left, _ = own.said(image, "bash", "-c", "find / -xdev -name '*.whl' -o -xdev -name pip -type d -path '*site-packages*'; ls -A /tmp")

    assert status == 0, said
    assert json.loads(out)["state"] == "intact"
    assert json.loads(out)["release"] == found.labels["sparkwright.release.sha256"] == built["release"]["release"]
    assert {f"sparkwright.wheel.{name}" for name in ("vllm", "flashinfer-python", "sparkwright")} <= set(found.labels)
    assert found.labels["org.opencontainers.image.base.digest"] == own.base
    assert not [name for name in found.labels if "owner" in name]
    # Debian keeps the wheels that `python3 -m venv` needs.
    assert [line for line in left.split() if not line.startswith("/usr/share/python-wheels/")] == []


def test_nobody_inside_can_change_it(own: Maker, image: str) -> None:
    """It runs as a user without rights, on a root that it cannot write even where the engine would let it; its state is in volumes."""
    script = f"id -u; touch {VENV}/x /opt/x /usr/x 2>&1 | grep -c denied; touch ~/x {VENV}/sparkwright/caches/x $HF_HOME/x && echo kept"
    status, out, _ = own.said(image, "bash", "-c", script, read_only=False)

    assert (status, out.split()) == (0, ["10001", "3", "kept"])


def test_compiled_kernels_are_kept_in_a_volume(own: Maker, image: str) -> None:
    """The set's Python points the caches of JIT compilers to the one folder of the set that can be written."""
    _, out, _ = own.said(image, "bash", "-c", f"{VENV}/bin/python -c 'import os; print(os.environ[\"TRITON_CACHE_DIR\"])'")

    assert out.startswith(f"{VENV}/sparkwright/caches/")


def test_a_second_run_builds_nothing(own: Maker, image: str) -> None:
    """What has the same inputs is there already, also offline, and also when the index has moved on."""
    again = own.run("--offline")
    own.publish()
    named = own.run("2026.11.1")

    assert (again["state"], again["image"]["id"]) == ("was there already", image)
    assert (named["state"], named["image"]["id"], named["image"]["labels"][SERIAL]) == ("was there already", image, "1")
    assert "install" not in named["said"]


def test_equal_inputs_make_equal_layers(own: Maker, built: dict[str, Any], engine: DockerClient) -> None:
    """Made again from nothing but the system stage, the layer of the set has the same bytes, whatever the clock says."""
    named, found = own.publish(), list[list[str]]()
    for _ in range(2):
        made = own.run(named)
        (held,) = [one for one in own.client.images.list(name=installed.REPOSITORY) if one.id in ancestors(own, made["image"]["id"])]
        found.append(own.layers(str(held.id)))
        own.client.images.remove(made["image"]["id"], force=True)
        own.client.images.remove(str(held.id), force=True)

    assert made["state"] == "built"
    assert found[0] == found[1]


def ancestors(own: Maker, image: str) -> list[str]:
    """Return the ids of the images that *image* was made from."""
    return [str(one["Id"]) for one in own.client.images.get(image).history()]


# How it runs.


@pytest.fixture(name="current")
def _current(own: Maker, built: dict[str, Any], engine: DockerClient) -> str:
    """Return the id of the image of 2026.11.1, whoever removed and made it again."""
    found: str = own.run("2026.11.1")["image"]["id"]
    return found


def test_arguments_and_variables_arrive_unchanged(own: Maker, current: str) -> None:
    """From the engine through init and entrypoint to the program, nothing is split, expanded or lost."""
    status, out, said = own.said(current, *SHOW, AWKWARD, "", "x y", variables={"GIVEN": AWKWARD})
    seen, words = json.loads(out)

    assert status == 0, said
    assert (seen["GIVEN"], words) == (AWKWARD, [AWKWARD, "", "x y"])
    assert (seen["PORT"], seen["VIRTUAL_ENV"]) == ("8888", VENV)


@pytest.mark.parametrize(
    ("words", "variables", "wanted"),
    [
        (["nonsense"], {}, "no such command"),
        ([], {"MAX_MODEL_LENGTH": "4096"}, "variable-refused"),
        (["serve"], {"MODEL": "/nothing", "PORT": "eighty"}, "variable-refused"),
        (["serve"], {"MODEL": "/nothing", "VLLM_EXTRA_ARGS": "--a 'b"}, "variable-refused"),
        (["serve"], {"MODEL": "/nothing\n--port 1"}, "variable-refused"),
        (["serve", "--no-such-option"], {}, "unrecognized arguments"),
        (["ray-worker"], {}, "usage"),
        (["health"], {}, "server-dead"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_refused(own: Maker, current: str, words: list[str], variables: dict[str, str], wanted: str) -> None:
    """Each refusal ends the container at once, with its reference."""
    status, _, said = own.said(current, *words, variables=variables)

    assert status in (1, 2), said
    assert wanted in said


def test_it_ends_at_once_when_it_is_asked_to(own: Maker, current: str) -> None:
    """SIGTERM reaches what runs in it; the engine never has to kill."""
    with own.started(current, "bash", "-c", "echo here; exec sleep 600") as made:
        assert next(iter(made.logs(stream=True))) == b"here\n"
        made.stop(timeout=PATIENCE)
        made.reload()

        assert made.attrs["State"]["ExitCode"] == 128 + signal.SIGTERM


def test_the_health_check_is_a_program_of_the_image(own: Maker, current: str) -> None:
    """What the engine would run every minute says that nothing serves, and ends with 1."""
    with own.started(current, "bash", "-c", "exec sleep 600") as made:
        kind, *command = made.attrs["Config"]["Healthcheck"]["Test"]
        status, said = made.exec_run(command)

        assert (kind, status) == ("CMD", 1), said
        assert b"server-dead" in said


# What cannot be built.


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--base", "debian:12"], "base-unresolved"),
        (["--base", "sha256:" + "0123456789abcdef" * 4], "base-unresolved"),
        (["--base", "127.0.0.1:9/debian@sha256:" + "0123456789abcdef" * 4], "source-unreachable"),
        (["--platform", f"linux/{OTHER}"], "release-unknown"),
        (["2026.11.7"], "release-unknown"),
    ],
    ids=["tag", "unknown id", "no registry", "platform", "release"],
)  # fmt: skip
def test_what_there_is_no_image_of(own: Maker, built: dict[str, Any], engine: DockerClient, words: list[str], wanted: str) -> None:
    """The base, the platform and the release are each told apart."""
    assert reference(own.run(*words, status=5 if wanted == "source-unreachable" else 1)) == wanted


def test_a_candidate_says_what_it_lacks(own: Maker, built: dict[str, Any], engine: DockerClient) -> None:
    """What is not proved has to be asked for, and its image is labelled for everybody who looks."""
    named = own.publish(judged=False)

    assert reference(own.run(named, status=1)) == "release-unproved"
    made = own.run(named, "--channel", "candidate")
    assert made["image"]["labels"]["sparkwright.proved"] == "no"
    assert "G8: not-run" in made["image"]["labels"]["sparkwright.missing"]
    assert "not proved" in made["said"]


def containers_of(own: Maker) -> list[str]:
    """Return the names of containers that install."""
    # Those of build steps come and go between the engine's two answers.
    found = own.client.containers.list(all=True, ignore_removed=True)
    return [str(one.name) for one in found if str(one.name).startswith("sparkwright-run-")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["SIGINT", "SIGTERM", "SIGKILL"])
def test_whenever_it_ends_the_next_run_finishes(
    own: Maker, built: dict[str, Any], engine: DockerClient, until: Callable[..., Any], number: signal.Signals
) -> None:
    """A run that is stopped while it installs leaves no image; what only kill -9 leaves behind, the next run removes first."""
    own.publish()
    with running(own.command(), own.environment(), Path("/")) as child:
        until(lambda: child.poll() is not None or containers_of(own))
        child.send_signal(number)
        child.communicate(timeout=PATIENCE)
    left = containers_of(own)
    done = own.run()

    assert child.returncode == (-number if number == signal.SIGKILL else 130)
    assert len(left) == (1 if number == signal.SIGKILL else 0)
    assert ("removed the container of a run that was killed" in done["said"]) == bool(left)
    assert done["state"] == "built"
    assert containers_of(own) == []


# Where it goes.


def test_what_is_pushed_is_recorded(own: Maker, current: str, tmp_path: Path) -> None:
    """The registry's own digest is written down; a second time it is the same; it can be pulled."""
    shutil.rmtree(own.out, ignore_errors=True)
    with registry(tmp_path / "registry") as host:
        words: list[str | Path] = ["2026.11.1", "--push", f"{host}/spark/vllm"]
        pushed, again = own.run(*words)["pushed"], own.run(*words)["pushed"]
        (path,) = own.out.glob("*.json")
        kept = msgspec.json.decode(path.read_bytes(), type=recorded.ImageRecord)
        own.client.images.remove(f"{host}/spark/vllm:2026.11.1-{OWN}")
        pulled = own.client.images.pull(f"{host}/spark/vllm@sha256:{kept.digest}")

    assert pushed == again
    assert (pushed["digest"], pushed["tag"]) == (kept.digest, f"2026.11.1-{OWN}")
    assert (kept.proved, kept.labels["sparkwright.release.sha256"], kept.release) == (True, kept.release, kept.release)
    assert str(pulled.id) == current == kept.id
    own.client.images.remove(f"{host}/spark/vllm@sha256:{kept.digest}")


def test_a_registry_that_asks_who_it_is(own: Maker, current: str, tmp_path: Path) -> None:
    """Without credentials nothing is pushed or recorded; with docker's own it is, and they are said nowhere."""
    shutil.rmtree(own.out, ignore_errors=True)
    with registry(tmp_path / "registry", asks=True) as host:
        refused = own.run("2026.11.1", "--push", f"{host}/vllm", status=1)
        assert reference(refused) == "registry-refused"
        assert not [*own.out.glob("*")]
        done = own.run("2026.11.1", "--push", f"{host}/vllm", "-v", variables=login(tmp_path / "docker", host))

    auth = json.loads((tmp_path / "docker" / "config.json").read_text())["auths"][host]["auth"]
    assert done["pushed"]["repository"] == f"{host}/vllm"
    assert not any(secret in json.dumps(done) for secret in (PASSWORD, auth))
    assert not any(secret in path.read_text() for path in own.out.glob("*") for secret in (PASSWORD, auth))


def test_a_registry_that_is_not_there(own: Maker, current: str) -> None:
    """The registry is named, and no record is left."""
    shutil.rmtree(own.out, ignore_errors=True)
    failed = own.run("2026.11.1", "--push", "127.0.0.1:9/spark/vllm", status=5)

    assert reference(failed) == "registry-unreachable"
    assert not [*own.out.glob("*")]


def test_a_tag_that_is_taken_is_not_overwritten(own: Maker, current: str, tmp_path: Path) -> None:
    """Another image under the release's tag stays what it was."""
    with registry(tmp_path / "registry") as host:
        name = f"{host}/spark/vllm"
        own.client.images.get(own.base).tag(name, f"2026.11.1-{OWN}")
        own.client.api.push(name, tag=f"2026.11.1-{OWN}")
        own.client.images.remove(f"{name}:2026.11.1-{OWN}")
        failed = own.run("2026.11.1", "--push", name, status=1)

        assert reference(failed) == "image-tag-taken"


class _Swapping(http.server.BaseHTTPRequestHandler):
    """Passes everything on to a registry, and gives the manifest of another tag for one that is asked for after it was pushed."""

    protocol_version = "HTTP/1.1"
    host, other = "", ""
    pushed = False

    def do_any(self) -> None:
        data = self._body()
        path = self.path
        if self.command in ("GET", "HEAD") and type(self).pushed and "/manifests/2026" in path:
            path = f"{path.rpartition('/')[0]}/{self.other}"
        onward = http.client.HTTPConnection(self.host, timeout=120)
        kept = [name for name in dict.fromkeys(self.headers) if name.lower() not in ("transfer-encoding", "content-length")]
        # An engine names each kind of manifest that it takes in a header of its own.
        headers = {name: ", ".join(self.headers.get_all(name, ())) for name in kept}
        onward.request(self.command, path, data, headers)
        reply = onward.getresponse()
        answer = reply.read()
        if self.command == "PUT" and "/manifests/2026" in path:
            type(self).pushed = True
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length") or (
                name == "Content-Length" and self.command == "HEAD"
            ):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        onward.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while count := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(count))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = do_any  # noqa: N815  the library's names

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def swapping(host: str, other: str) -> Iterator[str]:
    """Yield the address of what stands before the registry *host* and gives the tag *other* for what was just pushed."""
    handler = type("Handler", (_Swapping,), {"host": host, "other": other})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def test_a_registry_that_has_other_bytes_than_were_pushed(own: Maker, current: str, tmp_path: Path) -> None:
    """Its digest is asked for afterwards: where the tag is another image by then, the push has failed, and nothing is recorded."""
    shutil.rmtree(own.out, ignore_errors=True)
    with registry(tmp_path / "registry") as host:
        own.client.images.get(own.base).tag(f"{host}/vllm", "other")
        own.client.api.push(f"{host}/vllm", tag="other")
        own.client.images.remove(f"{host}/vllm:other")
        with swapping(host, "other") as between:
            failed = own.run("2026.11.1", "--push", f"{between}/vllm", status=1)

    assert reference(failed) == "image-digest-differs", failed["said"]
    assert not [*own.out.glob("*")]


# The Spark's own kind of processor.


@pytest.fixture(scope="session", name="spark")
def _spark(engine_address: str, user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Maker, str]]:
    """Return who makes images for the other kind of processor, and the id of one."""
    emulated(OTHER)
    folder = tmp_path_factory.mktemp("other")
    made = maker(OTHER, engine_address, user_store, folder)
    yield made, made.run()["image"]["id"]
    shutil.rmtree(folder, ignore_errors=True)


def test_the_other_processor(spark: tuple[Maker, str], engine: DockerClient) -> None:
    """Under emulation the image starts through its entrypoint, is that processor's, and holds the release for it, whole."""
    made, image = spark
    script = f"uname -m; {PROGRAM} -I -m sparkwright doctor --json --deep --into {VENV}"
    status, out, said = made.said(image, "bash", "-c", script)
    machine, _, document = out.partition("\n")

    assert status == 0, said
    assert (machine, json.loads(document)["state"]) == (made.machine, "intact")
    assert made.client.images.get(image).attrs["Architecture"] == OTHER
    assert json.loads(document)["release"] == made.client.images.get(image).labels["sparkwright.release.sha256"]


@pytest.mark.parametrize(
    ("words", "variables", "wanted"),
    [
        (["nonsense"], {}, "no such command"),
        ([], {"MAX_MODEL_LENGTH": "4096"}, "variable-refused"),
        (["serve"], {"MODEL": "/no/such model"}, "error: "),
        (["ray-head"], {"MODEL": "/no/such model"}, "error: "),
        (["ray-worker", "127.0.0.1:1"], {"PATIENCE": "3"}, "error: "),
        (["health"], {}, "server-dead"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_command_of_the_other_processor(
    spark: tuple[Maker, str], engine: DockerClient, words: list[str], variables: dict[str, str], wanted: str
) -> None:
    """Each gets as far as a machine without a GPU, a model or another machine lets it, and says why no further."""
    status, _, said = spark[0].said(spark[1], *words, variables=variables)

    assert status in (1, 2), said
    assert wanted in said
    assert "error: fault" not in said


def test_the_other_processor_takes_everything_as_it_comes(spark: tuple[Maker, str], engine: DockerClient) -> None:
    """Variables and arguments arrive unchanged, and SIGTERM ends it."""
    made, image = spark
    status, out, said = made.said(image, *SHOW, AWKWARD, variables={"GIVEN": AWKWARD})
    seen, words = json.loads(out)
    assert (status, seen["GIVEN"], words) == (0, AWKWARD, [AWKWARD]), said
    with made.started(image, "bash", "-c", "echo here; exec sleep 600") as child:
        assert next(iter(child.logs(stream=True))) == b"here\n"
        child.stop(timeout=PATIENCE)
        child.reload()

        assert child.attrs["State"]["ExitCode"] == 128 + signal.SIGTERM


def test_the_base_has_to_be_of_that_platform(own: Maker, spark: tuple[Maker, str], engine: DockerClient) -> None:
    """An id names one image, whose programs are for one processor."""
    assert reference(spark[0].run("--base", own.base, status=1)) == "image-mismatch"


def test_the_workflow_makes_it(spark: tuple[Maker, str], engine_address: str, engine: DockerClient, tmp_path: Path) -> None:
    """Job `image` of the releases logs in as GitHub has it, makes the image of what is published, pushes it, and keeps its digest."""
    if not shutil.which("docker"):
        missing("the command line docker is not installed: apt-get install docker-cli")
    made = spark[0]
    inputs = {"action": "image", "release": made.publish(judged=False)}
    settings = {"DOCKER_HOST": engine_address, "DOCKER_CONFIG": str(tmp_path / "docker"), "SPARKWRIGHT_CACHE_DIR": str(made.store)}
    with registry(tmp_path / "registry", asks=True) as host, serve(made.place.root) as address:
        variables = {
            "RELEASES_URL": made.place.url, "IMAGE_REPOSITORY": f"{host}/spark/vllm", "IMAGE_BASE": made.base,
            "RELEASE_KEY": str(keys.public_path(made.place.key)), "SPARKWRIGHT_CONFIG": f"mirrors: {{{made.place.url}: {address}/}}",
        }  # fmt: skip
        world = workflows.World(tmp_path / "world", workflows.checkout(tmp_path), made.environment(**settings), variables)
        results = world.run(ROOT / ".github" / "workflows" / "release.yml", inputs=inputs)
        assert results == {"release": "skipped", "image": "success"}, workflows.told(world.steps)
        (path,) = world.artifacts["image"].iterdir()
        kept = msgspec.json.decode(path.read_bytes(), type=recorded.ImageRecord)
        who = {"username": workflows.ACTOR, "password": githubwork.TOKEN}
        pulled = made.client.images.pull(f"{host}/spark/vllm@sha256:{kept.digest}", platform=made.platform, auth_config=who)

    assert (pulled.id, kept.proved) == (kept.id, False)
    assert pulled.labels["sparkwright.release.sha256"] == kept.release
    assert not any(githubwork.TOKEN in one.said for one in world.steps)
    assert githubwork.TOKEN not in path.read_text()
    made.client.images.remove(f"{host}/spark/vllm@sha256:{kept.digest}", force=True)


def test_the_client_of_a_shell_sees_the_same(own: Maker, current: str, tmp_path: Path) -> None:
    """`docker run`, where it is installed, starts it by the same words."""
    if not shutil.which("docker"):
        pytest.skip("the command line docker is not installed")
    done = subprocess.run(
        ["docker", "run", "--rm", "--network", "none", "--env", f"GIVEN={AWKWARD}", current, *SHOW, "a b"],
        env=own.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    seen, words = json.loads(done.stdout)

    assert (seen["GIVEN"], words) == (AWKWARD, ["a b"])
