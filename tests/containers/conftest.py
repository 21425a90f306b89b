"""
A container engine that the test session starts and stops, base images from Debian's own archive.

Needs root, ``dockerd`` and ``debootstrap``. Where one is missing the tests are skipped with the reason, and fail instead where
``SPARKWRIGHT_CONTAINERS=required`` says that they were to run.
"""

import contextlib
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tests import newcomer
from tests.support import processes

from sparkwright.core.store import Store, replacing

ROOT = Path(__file__).parents[2]
#: Seconds after which something that should have happened never will; machines that run tests are busy.
PATIENCE = 1500
until = functools.partial(processes.until, seconds=PATIENCE)
#: This machine's kind of processor, in Debian's words.
OWN = "arm64" if platform.machine() == "aarch64" else "amd64"


def missing(what: str) -> NoReturn:
    """Skip the test for want of *what*, or fail it where it was to run."""
    if os.environ.get("SPARKWRIGHT_CONTAINERS") == "required":
        pytest.fail(f"the container tests were to run, but: {what}")
    pytest.skip(what)


@contextlib.contextmanager
def started(folder: Path) -> Iterator["Engine"]:
    """Start and yield an engine that keeps everything in *folder* and touches no network of the machine."""
    if os.getuid() != 0:
        missing("only root may start a container engine")
    if not shutil.which("dockerd"):
        missing("dockerd is not installed: apt-get install docker.io")
    address = f"unix://{folder}/engine.sock"
    engine = Engine(address)
    command = ["dockerd", "-H", address, "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--pidfile",
               str(folder / "pid"), "--iptables=false", "--ip6tables=false", "--bridge=none"]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as daemon:
        try:
            processes.until(lambda: daemon.poll() is not None or not engine.run("version").returncode, 120)
            if daemon.poll() is not None:
                missing(f"dockerd does not start here: {(folder / 'log').read_text()[-600:]}")
            yield engine
        finally:
            daemon.terminate()
            try:
                daemon.wait(120)
            except subprocess.TimeoutExpired:
                daemon.kill()
            # It leaves the name of the host's network namespace mounted, and after being killed more.
            left = 'cut -d" " -f2 /proc/self/mounts | grep "^$0/" | sort --reverse | xargs --no-run-if-empty umount --lazy'
            subprocess.run(["sh", "-c", left, folder], check=False)


class Engine:
    """The engine of the session, by its command line."""

    def __init__(self, address: str) -> None:
        self.environment = {**os.environ, "DOCKER_HOST": address}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", *words], env=self.environment, capture_output=True, text=True, check=False, timeout=PATIENCE)

    def output(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    def load(self, layer: Path, tag: str) -> str:
        """Return the id of the image *tag*, whose one layer is the tar *layer*."""
        return self.output("import", str(layer), tag)


@pytest.fixture(scope="session")
def engine() -> Iterator["Engine"]:
    """Return the session's engine; its folder has a short name, because a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="spark-"))
    try:
        with started(folder) as engine:
            yield engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
