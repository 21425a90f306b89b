"""The guard of a server: it ends the server and all that came of it in time, and costs nothing else; a guard that is killed is missed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support import eater, processes, standin

from sparkwright.cli import doctor, serve
from sparkwright.core.memory import guard_limit
from sparkwright.serving import guard

GIB = 2**30
FLOOR = 6 * GIB


class Folder:
    """A folder that stands for ``/proc``, and a process that is guarded by it."""

    def __init__(self, path: Path, available: float = 40.0, free: float = 40.0) -> None:
        self.path, self.record = path / "proc", path / "record.json"
        self.path.mkdir()
        self.set(available, free)
        self.server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def set(self, available: float, free: float = 40.0) -> None:
        eater.write(self.path, available * GIB, free * GIB)

    def guard(self, floor: int = FLOOR, model: Path = Path("/nonexistent")) -> guard.Guard:
        return guard.Guard(self.server.pid, 2 * floor, floor + guard.SLACK, str(self.record), str(model), str(self.path))

    def close(self) -> None:
        self.server.kill()
        self.server.wait()


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.close()


@pytest.mark.parametrize("rate", [5e9, 20e9])
def test_server_that_takes_memory_is_ended_above_the_floor(rate: float, tmp_path: Path) -> None:
    """With the child that took it, and with what the guard saw. (ci/bench/guard.py does it twenty times, and with real memory.)"""
    proc, record = tmp_path / "proc", tmp_path / "record.json"
    proc.mkdir()
    eater.write(proc, eater.AVAILABLE)
    command = [sys.executable, "-m", "tests.support.eater", str(proc), str(rate), str(FLOOR)]
    root = Path(__file__).parents[2]
    path = f"{root}:{root / 'ci'}"
    server = subprocess.Popen(command, env={**os.environ, "RECORD": str(record), "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    _, said = server.communicate(timeout=120)
    assert server.returncode == -signal.SIGKILL
    assert float((proc / "least").read_text()) >= FLOOR / GIB
    processes.until(lambda: record.exists() and record.read_text())
    saw = json.loads(record.read_text())
    assert FLOOR <= saw["least"] < eater.AVAILABLE
    assert said.splitlines()[-1] == f"sparkwright guard: {saw['message']}"
    assert "GiB of memory were available" in said
    assert "so that 6.0 GiB stay free" in said


def test_looks_are_rare_while_there_is_much_and_as_close_as_needed(folder: Folder) -> None:
    """What takes 20 GB/s passes the floor in no two looks; a cache that is allocated at once, and leaves enough, ends nothing."""
    watch = folder.guard()
    for available in (8.01, 8.5, 10, 20, 60, 120):
        folder.set(available)
        assert watch.look(10.0) == ""
        assert watch.period <= guard.LONGEST
        assert 25e9 * (watch.period + guard.REACTION) <= (available - 6) * GIB + 1024  # of kB
    assert watch.period == guard.LONGEST
    folder.set(7.9)
    assert "7.9 GiB of memory were available" in watch.look(10.0)


def test_machine_that_stalls_ends_the_server_although_memory_seems_available(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither waiting alone, as while a model loads, nor swapping alone does; a kernel that counts neither is no reason."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    (folder.path / "pressure").mkdir()

    def seconds(stalled: float, swapped: float) -> str:
        watch, reason = folder.guard(), ""
        for second in range(12):
            now[0] += 1.0
            text = f"some avg10=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={round(stalled * second * 1e6)}\n"
            (folder.path / "pressure" / "memory").write_text(text)
            (folder.path / "vmstat").write_text(f"pgpgin 5\npswpin {round(swapped * second / os.sysconf('SC_PAGE_SIZE'))}\n")
            reason = reason or watch.look(1.0)
        return reason

    assert seconds(0.9, 200e6).startswith("all programs waited for memory for 90%")
    assert [seconds(0.9, 0), seconds(0.1, 200e6), seconds(0, 0)] == ["", "", ""]
    (folder.path / "vmstat").unlink()
    assert folder.guard().look(1.0) == ""


def test_user_is_warned_once(folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch = folder.guard(model=tmp_path)
    watch.warn()
    folder.set(11.0, free=2.0)
    assert watch.look(1.0) == ""
    for _ in range(3):
        watch.warn()
    assert capfd.readouterr().err == "sparkwright guard: 11.0 GiB of memory are available; at 8.0 the server ends\n"


@pytest.mark.parametrize("floor", [12.0, 3.0, 1.0, 0.0])
def test_server_that_keeps_its_floor_is_not_ended(floor: float, folder: Folder) -> None:
    """By the limit that `serve` gives the guard; and a look comes again, however little is left."""
    watch = guard.Guard(folder.server.pid, round(floor * GIB), round(guard_limit(floor) * GIB), "", "", str(folder.path))
    folder.set(floor)
    assert watch.look(1.0) == ""
    assert 0 < watch.period <= guard.LONGEST
    if floor:
        folder.set(floor * 0.6)
        assert "were available" in watch.look(1.0)
        assert watch.period > 0


def rows(machine: standin.Machine) -> list[doctor.MachineCheck]:
    """Return what doctor says of the servers that were started here, and of those that were ended."""
    pids = {str(child.pid) for child in machine.started}
    return [check for check in doctor.servers() if pids & {*check.subject.split()}]


def watcher(server: int) -> psutil.Process:
    """Return the guard of *server*."""
    children = psutil.Process(server).children()
    return next(child for child in children if any(word.endswith("guard.py") for word in child.cmdline()))


def test_guard_neither_outlives_its_server_nor_changes_its_end(machine: standin.Machine) -> None:
    """Signals and status are vLLM's own, and no record is left of a server that ended by itself."""
    machine.environment["XDG_STATE_HOME"] = str(machine.folder / "state")
    child = machine.start()
    machine.until_healthy()
    watch = watcher(child.pid)
    assert os.getsid(watch.pid) == watch.pid
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    psutil.wait_procs([watch], timeout=60)
    assert not watch.is_running()
    assert [*(machine.folder / "state").rglob("*.json")] == []


def test_guard_that_is_killed_is_missed_and_the_server_goes_on(machine: standin.Machine) -> None:
    child = machine.start()
    machine.until_healthy()
    assert [(check.state, check.observed) for check in rows(machine)] == [("ready", "serves")]
    watcher(child.pid).kill()
    processes.until(lambda: rows(machine)[0].state == "look")
    machine.until_healthy()
    (check,) = rows(machine)
    assert (check.state, check.remedy) == ("look", "restart it")
    assert "its guard was killed" in check.meaning


def test_of_two_servers_the_later_one_ends_first(machine: standin.Machine) -> None:
    """By its limit, which lies nearer to its floor than that of any server alone."""
    machine.start("--floor", "4")
    machine.until_healthy()
    machine.port = standin.free_port()
    child = machine.start("--floor", "4")
    machine.until_healthy()
    words = watcher(child.pid).cmdline()
    floor, limit = words[words.index(str(child.pid)) + 1 :][:2]
    assert int(limit) / int(floor) == pytest.approx(0.9)
    assert guard_limit(4.0) < 0.9 * 4


def test_end_of_a_server_is_shown_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its record; another file there says nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    guard.records().mkdir(parents=True)
    for number, text in ((11, '{"message": "it took all"}'), (22, '{"message": "long ago"}'), (33, "{")):
        (guard.records() / f"{number}.json").write_text(text)
    os.utime(guard.records() / "22.json", (0, 0))
    ended = {check.subject: check.observed for check in doctor.servers()}
    assert {name: text for name, text in ended.items() if name in ("server 11", "server 22", "server 33")} == {"server 11": "it took all"}


def test_unit_serves_with_the_guard_and_what_systemd_would_expand_is_escaped(machine: standin.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = machine.run("--unit", "--dry-run", "--floor", "0", "--flag=--seed=5", "--name", "50%_of \"$HOME\"")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ExecStart="))
    assert '"-m" "sparkwright" "serve" "--' in line
    assert f'"--python" "{machine.python}"' in line
    assert '"--name" "50%%_of \\"$$HOME\\""' in line
    assert '"--flag=--seed=5"' in line
    assert not [word for word in ("--unit", "--dry-run") if word in line]
    assert "Restart=always" in done.stdout
    (folder := tmp_path / "a%b").mkdir()
    monkeypatch.chdir(folder)
    assert f"WorkingDirectory={tmp_path}/a%%b\n" in serve._unit(["toy-cpu"])
    assert not machine.record.exists()
