"""
A container engine that the test session starts and stops, base images from Debian's own archive.

Needs root, ``dockerd`` and ``debootstrap``; for the images of the other architecture also qemu's user emulation. Where one is missing the
tests are skipped with the reason, and fail instead where ``SPARKWRIGHT_CONTAINERS=required`` says that they were to run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import docker
import pytest
from docker import DockerClient
from tests import newcomer
from tests.support import processes

from sparkwright.builder.container import connected
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store, replacing

ROOT = Path(__file__).parents[2]
#: Seconds after which something that should have happened never will; machines that run tests are busy.
PATIENCE = 1500
until = functools.partial(processes.until, seconds=PATIENCE)
#: This machine's kind of processor, and the other one that wheels are built for, in the engine's words.
OWN, OTHER = ("arm64", "amd64") if platform.machine() == "aarch64" else ("amd64", "arm64")
#: A base with a Python, made once and kept.
PACKAGES = "ca-certificates,python3"


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
            processes.until(lambda: daemon.poll() is not None or answers(address), 120)
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
            left = 'cut -d" " -f2 /proc/self/mounts | grep "^$0/" | sort --reverse | xargs --no-run-if-empty umount --lazy'
            subprocess.run(["sh", "-c", left, folder], check=False)


def answers(address: str) -> bool:
    """Does an engine answer at *address*?"""
    with contextlib.suppress(Exception):
        return bool(docker.DockerClient(base_url=address, timeout=5).ping())
    return False


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
    try:
        suite = newcomer.sources()[0][1]
    except newcomer.CannotRun as error:
        missing(str(error))
    path = store.folder("bases") / f"debian-{suite}-{architecture}-{kept or ('full' if packages else 'plain')}.tar"
    with store.lock(path.name):
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder, replacing(path) as temporary:
                newcomer.debootstrap(Path(folder, "root"), suite, f"--arch={architecture}", *[f"--include={packages}"] * bool(packages))
                subprocess.run(["tar", "-C", f"{folder}/root", "--exclude=*.deb", "-cf", temporary, "."], check=True)
    return path


def emulated(architecture: str) -> None:
    """Make sure that programs for *architecture* run here, by the kernel's table of interpreters."""
    name = {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}[architecture]
    table = Path("/proc/sys/fs/binfmt_misc")
    enable = '[ -e "$0/register" ] || mount -t binfmt_misc binfmt_misc "$0"; update-binfmts --enable "$1"'
    if not (table / name).exists():
        subprocess.run(["sh", "-c", enable, table, name], check=False)
    if not (table / name).exists():
        missing(f"programs for {architecture} do not run here: apt-get install qemu-user-static binfmt-support")


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
    texts = {"config.json": description, "manifest.json": [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]}
    with tempfile.TemporaryDirectory() as folder:
        for name, record in texts.items():
            Path(folder, name).write_text(json.dumps(record))
        Path(folder, "layer.tar").symlink_to(layer.absolute())
        archive = ["tar", "-C", folder, "--dereference", "-c", *texts, "layer.tar"]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as packing:
            assert packing.stdout
            return str(docker.DockerClient(base_url=address, timeout=PATIENCE).images.load(packing.stdout)[0].id)


@pytest.fixture(scope="session")
def base(engine_address: str, user_store: Store) -> str:
    """Return the id of a base for this machine's kind of processor, with a Python."""
    return imported(engine_address, debian(OWN, user_store, PACKAGES, "python"), f"linux/{OWN}", "test/full:own")


@pytest.fixture(scope="session")
def plain_base(engine_address: str, user_store: Store) -> str:
    """Return the id of a base that has nothing but Debian's essentials."""
    return imported(engine_address, debian(OWN, user_store), f"linux/{OWN}", "test/plain:own")
