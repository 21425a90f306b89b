"""
A job on a machine that was set up as docs/howto/set-up-a-runner.md says: a Debian in a folder, with a stand-in for GitHub's runner and for its API.

The script runs as root in that Debian; in the last test systemd starts the unit there.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from tests.containers.conftest import OWN, ROOT, debian, missing
from tests.support import lab_github, processes

from sparkwright.core.store import Store

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
