"""
A container engine that the test session starts and stops, base images from Debian's own archive, and a demo that is built in it.

Needs root, ``dockerd`` and ``debootstrap``; for the images of the other architecture also qemu's user emulation. Where one is missing the
tests are skipped with the reason, and fail instead where ``SPARKWRIGHT_CONTAINERS=required`` says that they were to run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import docker
import pytest
from docker import DockerClient
from tests.conftest import running

from sparkwright.builder.container import connected
from sparkwright.builder.container_build import builder_image
from sparkwright.builder.pylock import Interpreter
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext

ROOT = Path(__file__).parents[2]
#: Seconds after which something that should have happened never will; machines that run tests are busy.
PATIENCE = 1500
#: This machine's kind of processor, and the other one that wheels are built for, in the engine's words.
OWN, OTHER = ("arm64", "amd64") if platform.machine() == "aarch64" else ("amd64", "arm64")
#: What the builder image would install. A base that has it all is made once and kept, so that most tests need no network.
PACKAGES = "ca-certificates,ccache,g++,git,python3,python3-dev,python3-venv"


def missing(what: str) -> NoReturn:
    """Skip the test for want of *what*, or fail it where it was to run."""
    if os.environ.get("SPARKWRIGHT_CONTAINERS") == "required":
        pytest.fail(f"the container tests were to run, but: {what}")
    pytest.skip(what)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[str]:
    """Start an engine that keeps everything in *folder* and touches no network of the machine; yield its address."""
    if os.getuid() != 0:
        missing("only root may start a container engine")
    if not shutil.which("dockerd"):
        missing("dockerd is not installed: apt-get install docker.io")
    address = f"unix://{folder}/engine.sock"
    command = ["dockerd", "-H", address, "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--pidfile",
               str(folder / "pid"), "--iptables=false", "--ip6tables=false", "--bridge=none"]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as daemon:
        try:
            wait_for(lambda: daemon.poll() is not None or answers(address), 120)
            if daemon.poll() is not None:
                missing(f"dockerd does not start here: {(folder / 'log').read_text()[-600:]}")
            yield address
        finally:
            daemon.terminate()
            try:
                daemon.wait(120)
            except subprocess.TimeoutExpired:
                daemon.kill()
            # It leaves the name of the host's network namespace mounted, and after being killed more.
            mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
            for place in sorted((one for one in mounted if one.startswith(f"{folder}/")), reverse=True):
                subprocess.run(["umount", "--lazy", place], check=False)


def answers(address: str) -> bool:
    """Does an engine answer at *address*?"""
    with contextlib.suppress(Exception):
        return bool(docker.DockerClient(base_url=address, timeout=5).ping())
    return False


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Return the first true value of *condition*."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"it does not happen within {seconds:g} s"
        time.sleep(0.05)
    return value


@pytest.fixture
def until() -> Callable[..., Any]:
    """Return what waits for a condition."""
    return wait_for


@pytest.fixture(scope="session")
def engine_address() -> Iterator[str]:
    """Return the address of the session's engine; its folder has a short name, because a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="spark-"))
    try:
        with started(folder) as address:
            yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(engine_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerClient]:
    """Return the engine as sparkwright reaches it; no test may leave a container behind."""
    monkeypatch.setenv("DOCKER_HOST", engine_address)
    with connected() as reached:
        yield reached
        assert not reached.containers.list(all=True)


def debian(architecture: str, store: Store, packages: str = "", kept: str = "") -> Path:
    """Return a tar of Debian for *architecture* with *packages*, made by debootstrap once and kept in the user's cache under *kept*."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite, kept = release.get("VERSION_CODENAME", "").strip('"'), kept or ("full" if packages else "plain")
    if release.get("ID") != "debian" or not shutil.which("debootstrap"):
        missing("needs Debian and its debootstrap: apt-get install debootstrap")
    path = store.folder("bases") / f"debian-{suite}-{architecture}-{kept}.tar"
    with store.lock(path.name):
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                _debootstrap(Path(folder, "root"), suite, architecture, packages)
                with store.replacing(path) as temporary:
                    subprocess.run(["tar", "-C", f"{folder}/root", "-cf", temporary, "."], check=True)
    return path


def _debootstrap(root: Path, suite: str, architecture: str, packages: str) -> None:
    indexed = subprocess.run(["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)"], capture_output=True, text=True, check=True)
    sites = [line.split()[0] for line in indexed.stdout.splitlines() if line.split()[1:] == [suite]]
    if not sites:
        missing("apt knows no archive of this Debian; run apt-get update")
    include = [f"--include={packages}"] if packages else []
    command = ["debootstrap", "--variant=minbase", f"--arch={architecture}", *include, suite, str(root), sites[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for archive in (root / "var" / "cache" / "apt" / "archives").glob("*.deb"):
        archive.unlink()
    # How this machine's apt reaches its archive: proxies, what a snapshot's dates may be.
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    settings = [line for line in dump.splitlines() if line.startswith("Acquire::")]
    (root / "etc" / "apt" / "apt.conf.d" / "99here").write_text("\n".join(settings) + "\n")


def emulated(architecture: str) -> None:
    """Make sure that programs for *architecture* run here, by the kernel's table of interpreters."""
    name = {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}[architecture]
    table = Path("/proc/sys/fs/binfmt_misc")
    if (table / name).exists():
        return
    if not shutil.which("update-binfmts") or not Path("/usr/share/binfmts", name).exists():
        missing(f"programs for {architecture} do not run here: apt-get install qemu-user-static binfmt-support")
    if not (table / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(table)], check=False)
    subprocess.run(["update-binfmts", "--enable", name], check=False)
    if not (table / name).exists():
        missing(f"the kernel takes no interpreter for {architecture}")


def imported(address: str, layer: Path, kind: str, tag: str) -> str:
    """
    Return the id of an image for the platform *kind* whose one layer is the tar *layer*.

    It is loaded with a description of its own: `docker import` of older engines takes every image for this machine's.
    """
    system, _, architecture = kind.partition("/")
    description = {
        "architecture": architecture, "os": system, "config": {"Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256_file(layer)}"]},
    }  # fmt: skip
    texts = {
        "config.json": json.dumps(description).encode(),
        "manifest.json": json.dumps([{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]).encode(),
    }
    with tempfile.TemporaryFile() as sink:
        with tarfile.open(fileobj=sink, mode="w") as archive:
            for name, data in texts.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            archive.add(layer, "layer.tar")
        sink.seek(0)
        return str(docker.DockerClient(base_url=address, timeout=PATIENCE).images.load(sink)[0].id)


@pytest.fixture(scope="session")
def base(engine_address: str, user_store: Store) -> str:
    """Return the id of a base for this machine's kind of processor, on which nothing is left to be installed."""
    return imported(engine_address, debian(OWN, user_store, PACKAGES), f"linux/{OWN}", "test/full:own")


@pytest.fixture(scope="session")
def plain_base(engine_address: str, user_store: Store) -> str:
    """Return the id of a base that has nothing but Debian's essentials."""
    return imported(engine_address, debian(OWN, user_store), f"linux/{OWN}", "test/plain:own")


@pytest.fixture(scope="session")
def other() -> str:
    """Return the platform that is not this machine's."""
    return f"linux/{OTHER}"


@pytest.fixture
def contained_demo(demo_session: RunContext, engine: DockerClient, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Return the locked demo with the recipe of the builder image; what sparkwright itself requires comes from the user's index."""
    monkeypatch.delenv("SPARKWRIGHT_INDEX_URL")
    shutil.copy(ROOT / "build" / "builder.Dockerfile", demo_session.project.root / "build")
    return demo_session


@pytest.fixture
def builder(contained_demo: RunContext, engine: DockerClient, base: str) -> tuple[str, str, Interpreter]:
    """Return the builder image, made by the first test that asks for it."""
    return builder_image(contained_demo, engine, base)


class Run:
    """
    A build in a container, as people start it.

    Attributes:
        folder: Holds project, upstreams and store.
    """

    def __init__(self, context: RunContext, address: str, base: str) -> None:
        self.folder, self._address, self._base = context.project.root.parent, address, base
        self.store = context.store.root

    def command(self, *words: str) -> list[str]:
        """Return the command line of a build of vllm."""
        mirror = f"{upstreams.HOST}={self.folder / 'upstreams'}{os.sep}"
        return [
            sys.executable, "-m", "sparkwright", "build", "--container", "--base", self._base, "--root", str(self.folder / "project"),
            "--stack", "demo", "--cache-dir", str(self.store), "--source", "git", "--mirror", mirror, "--fork", "vllm",
            "--output", str(self.folder / "dist"), "--memory", "4", *words,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return variables with which nothing but what is in the store and the engine can be had."""
        return {**os.environ, "DOCKER_HOST": self._address, "HOME": str(self.folder)}

    def run(self, *words: str, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Build to the end; it must be of the given *status*."""
        done = subprocess.run(
            self.command(*words), env=self.environment(), cwd="/", capture_output=True, text=True, timeout=PATIENCE, check=False, **options
        )
        assert done.returncode == status, done.stderr[-4000:]
        return done

    def running(self, *words: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """Return a build in a process group of its own (`running`)."""
        return running(self.command(*words), self.environment(), Path("/"))


@pytest.fixture
def contained_run(contained_demo: RunContext, engine_address: str, base: str) -> Run:
    """Return builds of the demo in a container of the complete base."""
    return Run(contained_demo, engine_address, base)
