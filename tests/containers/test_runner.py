"""
A runner set up for real, in the root of another Debian: its user, its cage, its rules, and clean-ups with all that root may need.

GitHub's own runner and a running systemd are not here: a stand-in takes the job, and units are judged by systemd-analyze.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.containers.conftest import OWN, _debootstrap, missing
from tests.refusals import refusal
from tests.support import runnerhub

from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.operate.runner import (
    condition,
    egress,
    fitness,
    holding,
    once,
    perform,
    plan,
    policy,
    processes,
    unit,
)
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.place import Place

pytestmark = pytest.mark.containers

ROOT = Path(__file__).parents[2]
PACKAGES = "systemd,nftables,sudo,e2fsprogs,util-linux,passwd,dbus"
#: Numbers that no user of this machine has: processes of the job's user are killed.
FIRST, LAST = 61000, 61099


def debian(store: Store) -> Path:
    """Return a tar of a Debian with what set-up needs, made once and kept in the user's cache."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    if os.getuid() != 0 or release.get("ID") != "debian" or not shutil.which("debootstrap"):
        missing("needs root, Debian and its debootstrap: apt-get install debootstrap")
    suite = release["VERSION_CODENAME"].strip('"')
    path = store.folder("bases") / f"debian-{suite}-{OWN}-runner.tar"
    with store.lock(path.name):
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                _debootstrap(Path(folder, "root"), suite, OWN, PACKAGES)
                with store.replacing(path) as temporary:
                    subprocess.run(["tar", "-C", f"{folder}/root", "-cf", temporary, "."], check=True)
    return path


@pytest.fixture(scope="module")
def lower(user_store: Store) -> Iterator[Path]:
    """Return the unpacked Debian, which tests only read."""
    folder = Path(tempfile.mkdtemp(prefix="spark-"))
    subprocess.run(["tar", "-C", folder, "-xf", debian(user_store)], check=True)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def base(lower: Path) -> Iterator[Path]:
    """Return a fresh root: a layer above the unpacked Debian, in memory, whose system users have numbers of their own."""
    folder = Path(tempfile.mkdtemp(prefix="spark-"))
    folder.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=755", "layer", folder], check=True)
    try:
        for name in ("upper", "work", "root"):
            (folder / name).mkdir()
        options = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "root", folder / "root"], check=True)
        root = folder / "root"
        numbers = "".join(f"SYS_{kind}_MIN {FIRST}\nSYS_{kind}_MAX {LAST}\n" for kind in ("UID", "GID"))
        with (root / "etc" / "login.defs").open("a") as stream:
            stream.write(numbers)
        yield root
    finally:
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in sorted((one for one in mounted if one.startswith(str(folder))), reverse=True):
            subprocess.run(["umount", "--lazy", place], check=False)
        folder.rmdir()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout whose policy asks for a disk of 64 MB and no more memory than any machine has."""
    record = msgspec.to_builtins(policy.load(ROOT / "ci" / "runner.yaml"))
    record["room"] = {"work": 64, "work_floor": 20, "disk_floor": 5, "memory_floor": 1, "work_start": 30, "memory_start": 2}
    record["limits"] |= {"look": 0.05, "stop": 1.0}
    folder = tmp_path / "checkout"
    (folder / "ci").mkdir(parents=True)
    (folder / "ci" / "runner.yaml").write_text(strict_yaml.dump(record))
    (folder / "forks").symlink_to(ROOT / "forks")
    return folder


def command(action: str, base: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "sparkwright", "lab", "runner", action, "--sysroot", str(base), *words]


def setup_words(checkout: Path) -> list[str]:
    return ["--root", str(checkout), "--repository", runnerhub.REPOSITORY, "--name", "spark-a", "--yes", "--json"]


def run(words: list[str], status: int = 0) -> dict[str, Any]:
    """Run a command, and return its document."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def bring(base: Path) -> None:
    """Do what set-up leaves to a person: the program, GitHub's runner and the token."""
    for path, text in (("opt/sparkwright/bin/sparkwright", "#!/bin/sh\n"), ("opt/actions-runner/run.sh", runnerhub.STAND_IN)):
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(text)
        (base / path).chmod(0o755)
    (base / "etc/sparkwright/github-token").write_text(runnerhub.TOKEN)
    (base / "etc/sparkwright/github-token").chmod(0o600)


@pytest.fixture
def made(base: Path, checkout: Path) -> Path:
    """Return a root that was set up, by the command, and has what a person brings."""
    run(command("setup", base, *setup_words(checkout)))
    bring(base)
    return base


@pytest.fixture
def here(made: Path) -> Iterator[Ground]:
    """Return the machine that was set up; its work folder is the mounted image, and its user has no process here."""
    place = Place(made)
    ground = Ground.of("/etc/sparkwright", place)
    assert FIRST <= ground.uid <= LAST
    assert ground.whose() == []
    image = made / unit.image(ground.policy).lstrip("/")
    done = subprocess.run(["mount", "-o", "loop,nodev,nosuid", image, ground.work], capture_output=True, text=True, check=False)
    if done.returncode:
        missing(f"no loop device here: {done.stderr}")
    yield ground
    processes.end(ground.whose)


def in_root(base: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["chroot", base, *words], capture_output=True, text=True, check=False)


def test_set_up_is_whole_and_done_once(made: Path, checkout: Path) -> None:
    """The user can do nothing, the units are what systemd takes, the rules are what nft takes, and a second set-up does nothing."""
    again = run(command("setup", made, *setup_words(checkout)))
    assert {stand["state"] for stand in again["stands"]} == {"there", "not-run"}
    assert in_root(made, "id", "-nG", "sparkwright-runner").stdout == "sparkwright-runner\n"
    assert in_root(made, "setpriv", f"--reuid={FIRST}", "--clear-groups", "sudo", "-n", "true").returncode != 0

    verified = in_root(made, "systemd-analyze", "verify", unit.INSTANCE, f"{unit.EGRESS}.service", f"{unit.EGRESS}-refresh.timer")
    ours = [line for line in verified.stderr.splitlines() if "sparkwright" in line]
    assert (verified.returncode, ours) == (0, []), verified.stderr
    judged = in_root(made, "systemd-analyze", "security", "--offline=true", "--threshold=50", unit.INSTANCE)
    assert judged.returncode == 0, judged.stdout[-500:]

    rules = ["unshare", "--net", "chroot", str(made), "nft", "-c", "-f", "/etc/sparkwright/egress.nft"]
    assert subprocess.run(rules, capture_output=True, check=False).returncode == 0
    enabled = in_root(made, "systemctl", "is-enabled", unit.INSTANCE).stdout
    assert enabled == "enabled\n"


def test_check_says_what_differs(made: Path) -> None:
    """What somebody changed by hand is found: groups, modes, sudo, units, models, tokens; each by trying it as that user."""
    words = command("check", made, "--json")

    def states(status: int = 1) -> dict[str, str]:
        return {one["name"]: one["state"] for one in run(words, status)["findings"]}

    first = states()
    # There is no label that is true of a machine without a GPU.
    assert {name for name, state in first.items() if state == "unfit"} <= {"labels", "room", "clock"}
    assert first["egress rules loaded"] == "not-run"
    assert first["models are read-only"] == first["no sudo"] == first["token is closed"] == "ok"

    (made / "srv/models/x").write_text("")
    (made / "srv/models/x").chmod(0o666)
    (made / "etc/sudoers.d/x").write_text("sparkwright-runner ALL=(ALL) NOPASSWD: ALL\n")
    (made / "etc/sudoers.d/x").chmod(0o440)
    (made / "etc/sparkwright/github-token").chmod(0o644)
    (made / "opt/actions-runner/run.sh").chmod(0o777)
    service = made / "etc/systemd/system" / unit.SERVICE
    service.write_text(service.read_text().replace("NoNewPrivileges=yes", "NoNewPrivileges=no"))
    subprocess.run(["chroot", made, "usermod", "-aG", "disk", "sparkwright-runner"], check=True)
    with socket.socket(socket.AF_UNIX) as docker:
        # The path of a socket has at most 107 bytes, seen from where it is made.
        short = Path(tempfile.mkdtemp(prefix="s-")) / "r"
        short.symlink_to(made / "run")
        docker.bind(f"{short}/docker.sock")
        docker.listen()
        (made / "run/docker.sock").chmod(0o666)
        second = states()
    short.unlink()
    short.parent.rmdir()

    for name in (
        "models are read-only", "no sudo", "token is closed", "program is closed", "no service to rule by",
        "set-up: service", "set-up: user", "set-up: token",
    ):  # fmt: skip
        assert second[name] == "unfit", name


def test_set_up_is_finished_after_a_kill(base: Path, checkout: Path) -> None:
    """Killed before each step in turn, and at any time in between, set-up is finished by the next run, with the same result."""
    words = command("setup", base, *setup_words(checkout))
    for pause in (0.4, 0.7, 1.0, 1.3, 1.6):
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(pause)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    place = Place(base)
    rules = policy.load(checkout / "ci" / "runner.yaml")
    steps = plan.steps(rules, policy.Settings(runnerhub.REPOSITORY, "spark-a"))

    class Killed(BaseException):
        pass

    def stop(_: object) -> None:
        raise Killed

    for step in steps:
        if perform.stand(step, place).state == "missing":
            with pytest.raises(Killed):
                perform.set_up(steps, place, stop)
            perform.set_up([one for one in steps if one is step], place)
    run(words)

    steps = plan.steps(rules, policy.settings(base / "etc/sparkwright/machine.yaml"))
    assert {perform.stand(step, place).state for step in steps} <= {"there", "by-hand", "not-run"}
    assert not list(base.glob("**/*.new"))


def test_remove_leaves_models_and_the_journal(made: Path, checkout: Path) -> None:
    """Removed, the machine has no user, unit, rule or work folder of ours; models and the journal stay, and set-up works again."""
    (made / "srv/models/weights").write_text("kept")
    run(command("remove", made, "--json"), 2)
    run(command("remove", made, "--yes", "--json"))

    assert (made / "srv/models/weights").read_text() == "kept"
    assert (made / "var/lib/sparkwright-runner").is_dir()
    assert in_root(made, "id", "sparkwright-runner").returncode != 0
    assert list((made / "etc/systemd/system").rglob("*sparkwright*")) == []
    assert list((made / "etc/sparkwright").iterdir()) == []
    assert not (made / "var/lib/sparkwright-runner/work.img").exists()
    run(command("setup", made, *setup_words(checkout)))


def test_what_root_may_need_for_a_clean_up(here: Ground) -> None:
    """Immutable and append-only files, set-user-id ones, those of others, and processes of the user that ignore every signal: all go."""
    work, outside = here.work, here.base / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    deep = work / "a" / "b"
    deep.mkdir(parents=True)
    for name in ("immutable", "append"):
        (deep / name).write_text("x")
    (deep / "su").write_text("x")
    (deep / "su").chmod(0o6755)
    (deep / "out").symlink_to(outside)
    (deep / "up").symlink_to("../../../..")
    os.mkfifo(deep / "pipe")
    os.chown(deep / "su", 12345, 12345)
    os.chown(deep, here.uid, here.gid)
    subprocess.run(["chattr", "+a", deep / "append"], check=True)
    subprocess.run(["chattr", "+i", deep / "immutable", deep, work / "a"], check=True)
    script = "trap '' TERM INT HUP QUIT; while :; do sleep 1; done"
    words = ["setpriv", f"--reuid={here.uid}", f"--regid={here.gid}", "--clear-groups", "setsid", "sh", "-c", script]
    # One that starts itself anew faster than a list of processes can be read; not for ever, should the test be cut off.
    endless = "import os, time\nend = time.monotonic() + 90\nwhile time.monotonic() < end:\n    os.fork() and os._exit(0)\n    os.setsid()"
    hop = [*words[:5], "/usr/bin/python3", "-c", endless]
    children = [subprocess.Popen(one, stdin=subprocess.DEVNULL) for one in (words, words, words, hop)]
    deadline = time.monotonic() + 30
    while len(here.whose()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)

    done = condition.clean(here)

    for child in children:
        child.wait(10)
    assert done.ended >= 3
    assert list(work.iterdir()) == []
    assert (outside / "kept").read_text() == "kept"
    assert here.whose() == []


def test_files_in_shared_folders_go_by_owner(here: Ground) -> None:
    """In /tmp and /dev/shm what belongs to the job's user goes, with what others put into its folders; what is others' stays."""
    tmp = here.base / "tmp"
    (tmp / "mine" / "inner").mkdir(parents=True)
    (tmp / "mine" / "inner" / "x").write_text("x")
    os.chown(tmp / "mine", here.uid, here.gid)
    (tmp / "others").write_text("kept")
    (tmp / "link").symlink_to(tmp / "others")
    os.chown(tmp / "link", here.uid, here.gid, follow_symlinks=False)

    condition.clean(here)

    assert [path.name for path in tmp.iterdir()] == ["others"]


def test_a_mount_in_the_work_folder_is_said(here: Ground) -> None:
    """What is mounted inside is not entered: the machine is unclean, says where, and takes no job."""
    inner = here.work / "a" / "m"
    inner.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "x", inner], check=True)
    (inner / "kept").write_text("kept")
    try:
        with refusal("runner-unclean") as caught:
            condition.clean(here)
        assert "work" in " ".join(caught.value.details)
        assert (inner / "kept").exists() or any(here.work.rglob("kept"))
    finally:
        subprocess.run(["umount", inner], check=False)
    condition.clean(here)
    assert list(here.work.iterdir()) == []


def test_a_job_runs_as_the_user_and_fills_its_own_disk(here: Ground) -> None:
    """The job is the unprivileged user without any right; one that fills its work folder is ended, and the next one has it all again."""
    with runnerhub.hub() as hub:
        settings = msgspec.structs.replace(here.settings, api=hub.url)
        ground = msgspec.structs.replace(here, settings=settings)
        rights = "grep -q '^CapBnd:.0*$' /proc/self/status && grep -q '^NoNewPrivs:.1' /proc/self/status && [ $(id -G) = $(id -u) ]"
        hub.job(f"{rights} && [ $(id -u) = {ground.uid} ]", name="rights")
        entry = once.once(ground, runnerhub.github(hub.url))
        assert entry is not None
        assert entry.result == "Succeeded"

        hub.job("head -c 60000000 /dev/zero > big; sleep 600", name="full")
        with refusal("runner-disk"):
            once.once(ground, runnerhub.github(hub.url))
        ended = ground.journal().entries()[-1]
        assert ended.reference == "runner-disk"
        assert ended.cleaned > 30_000_000
        assert shutil.disk_usage(ground.work).free > 40_000_000

        hub.job(f"! cat {ground.config}/github-token; ! touch {ground.models}/x; ! ls {ground.state}/logs", name="closed")
        entry = once.once(ground, runnerhub.github(hub.url))
        assert entry is not None
        assert entry.result == "Succeeded"
    assert not (here.models / "x").exists()


# What is imported late would be looked for in folders that the user may not read.
RULES = """
import encodings.idna, os, socket, sys
def reach(uid, port):
    pid = os.fork()
    if pid == 0:
        os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
        try:
            socket.create_connection(("10.9.0.2", port), 5).close()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
uid = int(sys.argv[1])
print(*(int(one) for one in (reach(uid, 443), reach(uid, 8443), reach(0, 443), reach(0, 8443))))
"""
SERVE = """
import socket, time
held = [socket.create_server(("10.9.0.2", port), backlog=64) for port in (443, 8443)]
print("ready", flush=True)
time.sleep(600)
"""


def test_rules_let_the_user_reach_the_list_and_nobody_else_is_touched(made: Path) -> None:
    """Between two real network stacks: the job's user reaches an address of the list, on its port, for its time; others reach all."""
    trial = ["unshare", "--net", "ip", "link", "add", "here0", "type", "veth", "peer", "name", "there0"]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        missing("no virtual network devices here")
    rules = policy.load(made / "etc/sparkwright/runner.yaml")
    text = (made / "etc/sparkwright/egress.nft").read_text().replace(f'"{rules.user}"', str(FIRST))
    ours = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    theirs = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    server = None

    def inside(pid: int, *words: str, given: str | None = None) -> str:
        done = subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *words], input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        own = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + 30
        while own in (Path(f"/proc/{one.pid}/ns/net").readlink() for one in (ours, theirs)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        inside(ours.pid, "ip", "link", "add", "here0", "type", "veth", "peer", "name", "there0", "netns", str(theirs.pid))
        for pid, name, address in ((ours.pid, "here0", "10.9.0.1/24"), (theirs.pid, "there0", "10.9.0.2/24")):
            inside(pid, "ip", "address", "add", address, "dev", name)
            inside(pid, "ip", "link", "set", name, "up")
        server = subprocess.Popen(["nsenter", f"--net=/proc/{theirs.pid}/ns/net", sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"

        def reached() -> str:
            return inside(ours.pid, sys.executable, "-c", RULES, str(FIRST)).strip()

        assert reached() == "1 1 1 1"
        inside(ours.pid, "nft", "-f", "-", given=text)
        assert reached() == "0 0 1 1"
        inside(ours.pid, "nft", "-f", "-", given=egress.refreshed(rules, ["10.9.0.2"]))
        assert reached() == "1 0 1 1"
        inside(ours.pid, "nft", "-f", "-", given=egress.refreshed(rules, ["10.9.0.2"]).replace("timeout 120m", "timeout 1s"))
        time.sleep(2)
        assert reached() == "0 0 1 1"
        # Loaded again, as at boot or by set-up, they are the same.
        inside(ours.pid, "nft", "-f", "-", given=text)
        assert reached() == "0 0 1 1"
    finally:
        for child in (server, ours, theirs):
            if child:
                child.kill()
                child.wait()


def test_units_name_only_what_they_may(made: Path) -> None:
    """Files of set-up belong to root, nobody else can write them, and the token is readable by nobody else."""
    for path in (made / "etc/sparkwright").iterdir():
        found = path.stat()
        assert found.st_uid == 0
        assert not found.st_mode & 0o022
    assert stat.S_IMODE((made / "etc/sparkwright/github-token").stat().st_mode) == 0o600
    assert fitness.as_user(FIRST, FIRST, Place(made), lambda: fitness.writable(Path("/srv/models"))) == ""
    with holding.machine(Ground.of("/etc/sparkwright", Place(made))):
        pass
