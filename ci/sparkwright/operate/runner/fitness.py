"""
Is a machine as set-up leaves it, and does what set-up promises hold? Tried as the job's user where that can be tried.

Nothing is changed, and nothing outside of the machine is asked.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.operate.errors import LabError
from sparkwright.operate.runner import condition, egress, holding, labels, perform, processes, unit
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.place import Place
from sparkwright.operate.runner.steps import Step

#: Files and folders of the models that are tried; a cache has some thousand.
TRIED = 200_000

State = Literal["ok", "look", "unfit", "not-run"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at; *says* is empty where there is nothing to say."""

    name: str
    state: State
    says: str = ""


def of_steps(steps: Sequence[Step], place: Place) -> Iterator[Finding]:
    """Yield how each step of set-up stands."""
    for step in steps:
        now = perform.stand(step, place)
        state: State = "ok" if now.state == "there" else "not-run" if now.state == "not-run" else "unfit"
        yield Finding(f"set-up: {step.name}", state, now.says or ("" if state == "ok" else f"{now.state}: {step.what}"))


def of_ground(ground: Ground, place: Place) -> Iterator[Finding]:
    """Yield what else has to be true of a machine that was set up."""
    yield from _user(ground, place)
    yield _rules(place)
    yield from _idle(ground)
    yield from _labels(ground)
    yield from _machine(place)


def as_user(uid: int, gid: int, place: Place, trial: Callable[[], str]) -> str:
    """
    Return what *trial* says when a process of the user *uid* without any right runs it, inside the root of *place*.

    Raises:
        PermissionError: This process may not become that user.
    """
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "the trial did not end"
        with contextlib.suppress(BaseException):
            os.close(source)
            if place.root != Path("/"):
                os.chroot(place.root)
            os.chdir("/")
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            said = trial()
        os.write(sink, said.encode("utf-8", "replace")[:4000])
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as stream:
        said = stream.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return said


def _user(ground: Ground, place: Place) -> Iterator[Finding]:
    if not ground.root:
        yield Finding("user", "not-run", "only root can try what the job's user may do")
        return

    def tried(name: str, trial: Callable[[], str]) -> Finding:
        says = as_user(ground.uid, ground.gid, place, trial)
        return Finding(name, "unfit" if says else "ok", says)

    folders = ground.policy.folders
    yield tried("models are read-only", lambda: writable(Path(folders.models)))
    yield tried("token is closed", lambda: readable(f"{folders.config}/{unit.CREDENTIAL}"))
    yield tried("no service to rule by", lambda: reachable(unit.CLOSED))
    yield tried("program is closed", lambda: writable(Path(folders.program)) or writable(Path(folders.runner)))
    yield _sudo(ground, place)


def writable(folder: Path) -> str:
    """Return what this user can write in *folder*; nothing where it can write nothing."""
    trial = folder / ".sparkwright-trial"
    try:
        os.close(os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        pass
    else:
        trial.unlink(missing_ok=True)
        return f"it can make files in {folder}"
    count = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if not path.is_symlink() and os.access(path, os.W_OK):
                return f"it can write {path}"
            if (count := count + 1) > TRIED:
                return f"only {TRIED} files of {folder} were tried"
    return ""


def readable(path: str) -> str:
    """Return that this user can read *path*; nothing where it cannot, or where there is nothing."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return ""
    return f"it can read {path}"


def reachable(paths: Sequence[str]) -> str:
    """
    Return which socket of *paths* answers this user; nothing where none does.

    The cage of the unit closes all of them; here it is tried without that cage.
    """
    for path in paths:
        # The bus answers everybody, and asks for rights with each question.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(Path(path).stat().st_mode) and "dbus" not in path:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(5)
                    client.connect(path)
                return f"{path} answers it"
    return ""


def _sudo(ground: Ground, place: Place) -> Finding:
    if not any((place.root / folder / "sudo").exists() for folder in ("usr/bin", "bin", "usr/local/bin")):
        return Finding("no sudo", "ok", "sudo is not installed")
    user = ["setpriv", f"--reuid={ground.uid}", f"--regid={ground.gid}", "--clear-groups"]
    status, said = place.ask([*user, "sudo", "-n", "true"])
    listed, told = place.ask(["sudo", "-n", "-l", "-U", ground.policy.user])
    if status == 0 or (listed == 0 and "not allowed" not in told):
        return Finding("no sudo", "unfit", " ".join((said if status == 0 else told).split())[:300] or "it may use sudo")
    return Finding("no sudo", "ok")


def _rules(place: Place) -> Finding:
    status, said = place.ask(["nft", "list", "table", "inet", egress.TABLE])
    if status == 0:
        loaded = "skuid" in said and "reject" in said
        return Finding("egress rules loaded", "ok" if loaded else "unfit", "" if loaded else "the table is not the one that was written")
    if status == 127 or not place.live:
        why = "nft is not installed" if status == 127 else "systemd, which loads them, does not run here"
        return Finding("egress rules loaded", "not-run", why)
    return Finding("egress rules loaded", "unfit", " ".join(said.split())[:200])


def _idle(ground: Ground) -> Iterator[Finding]:
    try:
        with holding.machine(ground):
            left = processes.shown(ground.whose())
            died = ground.journal().unfinished()
            yield Finding("nothing is left of a job", "unfit" if left else "ok", "; ".join(left))
            yield Finding("last run ended", "look" if died else "ok", "it was killed; the next run cleans first" if died else "")
            reasons = list(condition.unready(ground))
            yield Finding("room", "unfit" if reasons else "ok", "; ".join(reasons))
    except LabError as error:
        if error.reference != "runner-busy":
            raise
        yield Finding("nothing is left of a job", "not-run", "a job runs, or one is waited for")
    except OSError as error:
        yield Finding("room", "unfit", str(error))
    if ground.draining.exists():
        yield Finding("takes jobs", "look", "it is drained: `sparkwright lab runner drain --end` lets it take jobs again")


def _labels(ground: Ground) -> Iterator[Finding]:
    wrong = list(labels.wrong(ground.policy, ground.settings, labels.Machine.here()))
    yield Finding("labels", "unfit" if wrong else "ok", "; ".join(wrong) or ", ".join(ground.settings.labels))
    if "unresolved" in (ground.policy.software.version, ground.policy.software.sha256):
        yield Finding("version of GitHub's runner", "look", "unresolved in ci/runner.yaml: nobody compared what is installed with a hash")


def _machine(place: Place) -> Iterator[Finding]:
    from sparkwright.builder import host_info

    gpus = host_info.gpus()
    said = ", ".join(f"{gpu.name}, SM {gpu.capability}, driver {gpu.driver}" for gpu in gpus)
    yield Finding("GPU", "ok" if gpus else "not-run", said or "no driver answers")
    status, told = place.ask(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    known = status == 0 and told.strip() in ("yes", "no")
    clock: State = ("ok" if told.strip() == "yes" else "unfit") if known else "not-run"
    why = "it is not kept by NTP" if known else "nothing here tells whether it is kept by NTP"
    yield Finding("clock", clock, "" if clock == "ok" else why)
    yield _swap(place)


def _swap(place: Place) -> Finding:
    """With unified memory, swapping stalls the GPU's memory too; something has to end a process before that."""
    with contextlib.suppress(OSError):
        swaps = [line.split()[0] for line in Path("/proc/swaps").read_text("utf-8", "replace").splitlines()[1:]]
        guard = next((name for name in ("earlyoom", "systemd-oomd") if place.ask(["systemctl", "is-active", name])[0] == 0), "")
        if swaps and not guard:
            return Finding("swap", "look", f"{', '.join(swaps)} without earlyoom or systemd-oomd: a full memory stalls the machine first")
        return Finding("swap", "ok", guard or "none")
    return Finding("swap", "not-run", "/proc/swaps cannot be read")
