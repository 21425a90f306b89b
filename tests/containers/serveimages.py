"""Serving images for tests: an index of small wheels, a real registry, and containers of what was made."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container
from msgspec.structs import replace
from tests.client.world import World, wheel
from tests.containers.conftest import PATIENCE, ROOT, missing
from tests.support import standin
from tests.support.processes import until

from sparkwright.client.records import Release
from sparkwright.core.store import Store

#: What build/serve.Dockerfile would install.
PACKAGES = "ca-certificates,g++,python3,python3-dev,python3-venv,tini"
MACHINES: dict[str, Any] = {"arm64": "aarch64", "amd64": "x86_64"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Who may push, as bcrypt has it; the token that GitHub gives to a job stands for the same user's password.
USER, PASSWORD = "spark", "a password"
HASHED = "$2b$05$abcdefghijklmnopqrstuu2sM.EEHj4jPcCa5rwqJGg1PNBllkZXy"


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
        (self.store / "downloads").symlink_to(user_store.folder("downloads"), target_is_directory=True)
        self.first = self.publish("2026.11.1")

    def publish(self, name: str, pythons: tuple[str, ...] = PYTHONS) -> Release:
        """Publish a release whose vLLM says its name, and is a stand-in."""

        texts = {
            "release.txt": name, "envs.py": standin.ENVS.replace("{", '{"VLLM_CACHE_ROOT": None, '), "engine/arg_utils.py": standin.ENGINE,
            "entrypoints/common/cli_args.py": standin.FRONTEND, "entrypoints/cli/main.py": standin.MAIN,
        }  # fmt: skip
        made = wheel("vllm", files={f"vllm/{path}": text.encode() for path, text in texts.items()})
        return self.world.publish(
            name, [made], state=lambda state: replace(state, machines=(self.machine,), pythons=pythons),
            change=lambda release: replace(release, locks=tuple(replace(lock, machine=self.machine, pythons=pythons) for lock in release.locks)),
        )  # fmt: skip

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


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a registry on loopback until the block ends; yield its host and port, and the variable by which `docker login` lets USER in."""
    program = shutil.which("docker-registry") or shutil.which("registry")
    if program is None:
        missing("there is no registry: apt-get install docker-registry")
    host = f"127.0.0.1:{standin.free_port()}"
    settings: dict[str, Any] = {
        "version": 0.1, "log": {"level": "error"}, "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": host, "secret": "a secret"}, "auth": {"htpasswd": {"realm": "test", "path": str(folder / "users")}},
    }  # fmt: skip
    folder.mkdir(parents=True)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (folder / "users").write_text(f"{USER}:{HASHED}\n")
    (folder / "config.yml").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    running = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: running.poll() is not None or subprocess.run(["bash", "-c", f"<>/dev/tcp/{host.replace(':', '/')}"], check=False).returncode == 0)
        yield host, {"DOCKER_CONFIG": str(folder)}
    finally:
        running.kill()
        running.wait()
