"""Serving images for tests: an index of small wheels, a real registry, and containers of what was made."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container
from msgspec.structs import replace
from tests.client.world import World, wheel
from tests.containers.conftest import PATIENCE, ROOT, missing, wait_for
from tests.support import workflows

from sparkwright.client.records import Release, ReleaseState
from sparkwright.core.store import Store

#: What build/serve.Dockerfile would install.
PACKAGES = "ca-certificates,g++,python3,python3-dev,python3-venv,tini"
MACHINES: dict[str, Any] = {"arm64": "aarch64", "amd64": "x86_64"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Who may push where a registry asks, and bcrypt of it; then the one who starts workflows, with the token that GitHub gives to a job.
USER, PASSWORD = "spark", "a password"
HASHED = {
    USER: "$2b$05$abcdefghijklmnopqrstuu2sM.EEHj4jPcCa5rwqJGg1PNBllkZXy",
    workflows.ACTOR: "$2b$05$abcdefghijklmnopqrstuue3uNiQ.e6S.k1NDszyZB8otDe5B6u7.",
}


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
        self.world, self.store = World(folder / "world"), folder / "store"
        self.store.mkdir(parents=True)
        (self.store / "downloads").symlink_to(
            user_store.folder("downloads"), target_is_directory=True
        )
        self.first = self.publish("2026.11.1")

    def publish(self, name: str, pythons: tuple[str, ...] = PYTHONS) -> Release:
        """Publish a release whose vLLM says its name."""

        def change(release: Release) -> Release:
            locks = (replace(lock, machine=self.machine, pythons=pythons) for lock in release.locks)
            return replace(release, locks=tuple(locks))

        def state(state: ReleaseState) -> ReleaseState:
            return replace(state, machines=(self.machine,), pythons=pythons)

        made = wheel("vllm", files={"vllm/release.txt": name.encode()})
        return self.world.publish(name, [made], change=change, state=state)

    def command(self, *words: str | Path) -> list[str]:
        """Return the command line of ``lab image``."""
        given = ["--trust", self.world.fingerprint, "--root", ROOT, "--cache-dir", self.store, "--platform", self.platform, "--json"]  # fmt: skip
        given += [] if "--base" in words else ["--base", self.base]
        return [sys.executable, "-m", "sparkwright", "lab", "image", *map(str, (*given, *words))]

    def environment(self, **more: str) -> dict[str, str]:
        """Return variables of somebody else's machine, whose package index is the user's."""
        kept = {
            name: value for name, value in os.environ.items() if name != "SPARKWRIGHT_INDEX_URL"
        }
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
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


@contextlib.contextmanager
def registry(folder: Path, *, asks: bool = False) -> Iterator[str]:
    """Run a registry on loopback until the block ends, and yield its host and port; with *asks*, only those of `HASHED` may use it."""
    program = shutil.which("docker-registry") or shutil.which("registry")
    if program is None:
        missing("there is no registry: apt-get install docker-registry")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    settings: dict[str, Any] = {
        "version": 0.1, "log": {"level": "error"}, "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "a secret"},
    }  # fmt: skip
    folder.mkdir(parents=True)
    if asks:
        (folder / "users").write_text(
            "".join(f"{name}:{hashed}\n" for name, hashed in HASHED.items())
        )
        settings["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "users")}}
    (folder / "config.yml").write_text(json.dumps(settings))
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            [program, "serve", str(folder / "config.yml")], stdout=log, stderr=log
        )
    try:
        wait_for(lambda: running.poll() is not None or _listens(port), 60)
        assert running.poll() is None, (folder / "log").read_text()
        yield f"127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def login(folder: Path, host: str) -> dict[str, str]:
    """Write the configuration that `docker login` leaves, and return the variable that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return {"DOCKER_CONFIG": str(folder)}


_SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
#: Prints its variables and arguments, in the image.
SHOW: Sequence[str] = (
    "bash", "-c", f"exec /opt/sparkwright/program/bin/python -c '{_SHOW}' \"$@\"", "bash",
)  # fmt: skip
