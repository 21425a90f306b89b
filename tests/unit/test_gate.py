"""The gate with real launchers and real processes behind it: whom it lets start, whom it ends, and that nobody is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkwright.builder.compile import gate, launch, procfs
from sparkwright.builder.compile.calls import Limits, Outcome
from sparkwright.builder.compile.costs import Expected
from sparkwright.builder.compile.gate import Gate
from sparkwright.core.errors import SparkwrightError

PATIENCE = 90
#: A compiler that holds so many megabytes for so many seconds; it ends sooner when the file named last is there.
EAT = """
import pathlib, sys, time
held = bytearray(int(sys.argv[3]) * 1000000)
held[::4096] = b"x" * len(held[::4096])
end = time.monotonic() + float(sys.argv[4])
while time.monotonic() < end and not (len(sys.argv) > 5 and pathlib.Path(sys.argv[5]).exists()):
    time.sleep(0.02)
"""


class Build:
    """Calls the launchers as ninja does, all at once, and keeps what the gate says of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "eat.py"
        self.script.write_text(EAT)
        self.expected: dict[str, Expected] = {}
        self.costs: list[Outcome] = []
        self.gate: Gate | None = None

    def eats(self, unit: str, megabytes: int, seconds: float, expected: Expected | None = None) -> list[str]:
        """Return the command of a unit that holds *megabytes*, and expect that of it if nothing else is said."""
        self.expected[unit] = expected or Expected(seconds, megabytes + 30, "record")
        return [sys.executable, str(self.script), "-c", unit, str(megabytes), str(seconds)]

    def runs(self, unit: str, *command: str, expected: Expected | None = None) -> list[str]:
        """Return the command of a unit that is any program; its arguments begin with the unit's name."""
        self.expected[unit] = expected or Expected(1, 50, "record")
        return ["sh", "-c", unit, *command]

    def run(
        self, *commands: list[str], limits: Limits | None = None, available: Callable[[], int] = lambda: 100_000,
        meanwhile: Callable[[Build, list[subprocess.Popen[str]]], None] | None = None,
    ) -> list[int]:  # fmt: skip
        """Run all *commands* behind a gate and return their statuses; *meanwhile* is called once they run."""
        allowed = limits or Limits(8, 1000, reserve=100)
        made = Gate(
            self.folder / "launch", allowed, self.expected.__getitem__, coming=len(commands), ended=self.costs.append, available=available
        )
        self.gate = made
        with made:
            started = [self.start(command, made.environment) for command in commands]
            try:
                if meanwhile:
                    meanwhile(self, started)
                return [one.wait(PATIENCE) for one in started]
            finally:
                for one in started:
                    one.kill()
                    one.communicate()

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-IS", launch.__file__, *command], text=True, process_group=0, stderr=subprocess.PIPE,
            env={**os.environ, **environment, "SPARKWRIGHT_LAUNCH": str(self.folder / "launch")},
        )  # fmt: skip

    def events(self, event: str) -> list[str]:
        """Return the units of every *event*, in order."""
        rows = [json.loads(line) for line in (self.folder / "launch" / "events.jsonl").read_text().splitlines()]
        return [row["unit"] for row in rows if row["event"] == event]

    def wait_for(self, event: str, unit: str) -> None:
        """Wait until the gate has written *event* of *unit*."""
        wait_for(lambda: unit in self.events(event))

    @property
    def failure(self) -> SparkwrightError:
        assert self.gate
        assert self.gate.failure
        return self.gate.failure

    def outcome(self, unit: str) -> Outcome:
        (found,) = [outcome for outcome in self.costs if outcome.unit == unit]
        return found

    def overlap(self, one: str, other: str) -> bool:
        """Did the two units run at the same time?"""
        first, second = self.outcome(one), self.outcome(other)
        return first.began < second.ended and second.began < first.ended


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until *condition* is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(name="build")
def _build(tmp_path: Path) -> Iterator[Build]:
    made = Build(tmp_path)
    yield made
    assert not procfs.marked(made.gate._mark if made.gate else "none"), "nothing is left running"


def test_units_that_fit_run_together(build: Build) -> None:
    """Two units whose memory fits do not wait for each other, and each has its peak written down."""
    assert build.run(build.eats("a.cu", 200, 1.5), build.eats("b.cu", 200, 1.5)) == [0, 0]

    assert build.overlap("a.cu", "b.cu")
    assert all(200 <= build.outcome(unit).megabytes < 260 for unit in ("a.cu", "b.cu"))


@pytest.mark.parametrize("limits", [Limits(8, 400, reserve=0), Limits(1, 1000, reserve=0)])
def test_units_that_do_not_fit_take_turns(build: Build, limits: Limits) -> None:
    """Whether memory or cores are short, the longest goes first."""
    build.run(build.eats("short.cu", 190, 0.2), build.eats("long.cu", 190, 0.5), limits=limits)

    assert build.events("start") == ["long.cu", "short.cu"]
    assert not build.overlap("short.cu", "long.cu")


def test_the_memory_of_the_machine_counts_as_the_budget_does(build: Build) -> None:
    """What other programs hold is not there, and what was granted but is not used yet is not free."""

    def available() -> int:
        return 450 - sum(call.held for call in list(build.gate._calls.values())) if build.gate else 450

    build.run(build.eats("a.cu", 190, 1.5), build.eats("b.cu", 190, 1.5), limits=Limits(8, 10_000, reserve=50), available=available)

    assert not build.overlap("a.cu", "b.cu")


def test_nothing_starts_while_the_machine_is_short_of_memory(build: Build) -> None:
    """A second unit waits as long as less than the reserve is available, although the budget has room for it."""
    free = [120]

    def meanwhile(build: Build, _: object) -> None:
        build.wait_for("start", "first.cu")
        free[0] = 80
        wait_for(lambda: build.gate and build.gate.paused)
        assert build.events("start") == ["first.cu"]
        free[0] = 100_000
        build.wait_for("start", "second.cu")
        (build.folder / "go").touch()

    first = [*build.eats("first.cu", 10, 1000), str(build.folder / "go")]
    assert build.run(first, build.eats("second.cu", 50, 0.1), available=lambda: free[0], meanwhile=meanwhile) == [0, 0]


def test_a_failed_unit_stops_the_build_with_its_own_words(build: Build) -> None:
    """The error is the unit's; what ran beside it is ended, and what waited never starts."""
    bad = build.runs("echo 'a.cu(3): error: no such thing' >&2; exit 2", expected=Expected(2000, 50, "record"))
    statuses = build.run(bad, build.eats("b.cu", 10, 1000), build.eats("c.cu", 10, 1000), limits=Limits(2, 1000, reserve=0))

    assert statuses[0] == 2
    assert -signal.SIGTERM in statuses[1:]
    assert build.failure.reference == "compile-failed"
    assert build.failure.details == ("a.cu(3): error: no such thing", "status: 2")
    assert len(build.events("start")) == 2


def test_a_unit_that_is_known_to_need_more_than_the_budget_fails_before_anything_starts(build: Build) -> None:
    """The error names unit, needed and present; no minute was spent."""
    build.run(build.eats("a.cu", 10, 1), build.eats("huge.cu", 5000, 1))

    assert build.failure.reference == "memory-too-small"
    assert build.failure.data == {
        "unit": "huge.cu", "needed_megabytes": 5030, "budget_megabytes": 1000, "available_megabytes": 100_000,
    }  # fmt: skip
    assert "--memory" in build.failure.todo
    assert build.events("start") == []


def test_a_unit_that_the_machine_never_has_room_for_fails(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the budget, but more than is available: after waiting for other programs, the same error."""
    monkeypatch.setattr(gate, "WAIT_FOR_ROOM", 0.5)
    build.run(build.eats("a.cu", 500, 1), available=lambda: 300)

    assert build.failure.reference == "memory-too-small"
    assert build.failure.data["available_megabytes"] == 300


def test_a_guess_above_the_budget_is_tried_alone(build: Build) -> None:
    """Nobody measured the unit, and it turns out to be small."""
    guess = Expected(100, 5000, "kind")
    assert build.run(build.eats("a.cu", 50, 0.3, guess), build.eats("b.cu", 50, 0.3)) == [0, 0]

    assert not build.overlap("a.cu", "b.cu")


def test_a_unit_that_comes_to_the_budget_alone_is_ended_and_named(build: Build) -> None:
    """Its peak is handed on, so that the next run knows it beforehand."""
    build.run(build.eats("huge.cu", 600, 1000, Expected(1, 50, "kind")), limits=Limits(8, 400, reserve=0))

    assert build.failure.reference == "memory-exceeded"
    assert build.failure.data["unit"] == "huge.cu"
    assert build.outcome("huge.cu").megabytes > 400


def test_a_unit_that_lies_about_its_size_costs_the_youngest_one_its_place(build: Build) -> None:
    """The oldest runs on, the youngest is ended and runs again when it has the machine for itself; both succeed."""

    def meanwhile(build: Build, _: object) -> None:
        build.wait_for("stop", "liar.cu")
        (build.folder / "go").touch()

    honest = [*build.eats("honest.cu", 300, 1000), str(build.folder / "go")]
    liar = build.eats("liar.cu", 600, 1.5, Expected(1, 50, "record"))
    assert build.run(honest, liar, limits=Limits(8, 800, reserve=0), meanwhile=meanwhile) == [0, 0]

    assert build.outcome("liar.cu").stops >= 1
    assert not build.overlap("honest.cu", "liar.cu")
    assert build.outcome("liar.cu").megabytes >= 600


def test_a_compiler_that_crashes_is_named_with_its_signal(build: Build) -> None:
    """Unit, signal and last lines are in the error."""
    build.run(build.runs("echo last words >&2; kill -SEGV $$"))

    assert build.failure.reference == "compiler-crashed"
    assert "signal 11 (SIGSEGV)" in build.failure.what
    assert build.failure.details == ("last words",)
    assert build.failure.data["signal"] == 11


def test_a_crash_of_a_program_below_the_driver_is_a_crash(build: Build) -> None:
    """nvcc ends with an ordinary status when ptxas was ended by a signal, and says so."""
    build.run(build.runs("echo \"nvcc error   : 'ptxas' died due to signal 6\" >&2; exit 1"))

    assert build.failure.reference == "compiler-crashed"
    assert build.failure.data["signal"] == 6


@pytest.mark.parametrize("end", ["kill -KILL $$", "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 1"])
def test_a_compiler_that_the_kernel_killed_is_tried_once_more_alone(build: Build, end: str) -> None:
    """The second time it has the machine for itself, and succeeds."""
    flag = build.folder / "flag"
    unit = f"test -e {flag} && exit 0; touch {flag}; {end}"
    assert build.run(build.runs(unit), build.eats("b.cu", 10, 1.5)) == [0, 0]

    assert build.events("start").count(unit) == 2
    assert not build.overlap(unit, "b.cu")


def test_a_compiler_that_is_killed_twice_fails(build: Build) -> None:
    """There is no third time."""
    build.run(build.runs("kill -KILL $$"))

    assert build.failure.reference == "compiler-crashed"
    assert "twice" in build.failure.what
    assert len(build.events("start")) == 2


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_a_full_disk_is_called_one(build: Build) -> None:
    """The assembler cannot write the object, and the error is that of a full disk, not of the source."""
    (build.folder / "a.c").write_text("int a(void) { return 1; }\n")
    build.expected[str(build.folder / "a.c")] = Expected(1, 50, "kind")
    build.run(["cc", "-c", str(build.folder / "a.c"), "-o", "/dev/full"])

    assert build.failure.reference == "disk-full"
    assert "a.c" in build.failure.what


def test_a_compiler_that_hangs_is_ended_and_named(build: Build) -> None:
    """Far beyond its expected time, and without using the CPU."""
    hangs = build.runs("sleep 1000", expected=Expected(0.01, 50, "record"))
    build.run(hangs, limits=Limits(8, 1000, reserve=0, patience=1.0, idle=0.8))

    assert build.failure.reference == "compiler-hung"
    assert build.failure.data["unit"] == "sleep 1000"


@pytest.mark.parametrize(
    ("seconds", "idle", "expected", "hangs"),
    [(1900, 200, 10, True), (1900, 170, 10, False), (1700, 1700, 10, False), (1900, 200, 191, False), (5000, 0, 1, False)],
)
def test_a_slow_compiler_is_left_to_work(seconds: float, idle: float, expected: float, hangs: bool) -> None:
    """One that uses the CPU is slow, however long it takes; one that waits gets half an hour, and ten times what was expected."""
    assert Limits(8, 1000).hangs(seconds, idle, expected) is hangs


def test_a_killed_launcher_does_not_leave_its_compiler(build: Build) -> None:
    """Its compiler is ended at once, its memory is free, and the other units go on."""

    def meanwhile(build: Build, started: list[subprocess.Popen[str]]) -> None:
        build.wait_for("start", "a.cu")
        assert build.gate
        mark = build.gate._mark
        wait_for(lambda: len(procfs.marked(f"{mark}-1")) or len(procfs.marked(f"{mark}-2")))
        started[0].kill()
        build.wait_for("start", "b.cu")

    statuses = build.run(build.eats("a.cu", 300, 1000), build.eats("b.cu", 300, 0.1), limits=Limits(8, 500, reserve=0), meanwhile=meanwhile)

    assert statuses == [-signal.SIGKILL, 0]


def test_the_end_of_the_gate_ends_everything(build: Build) -> None:
    """An interrupted build leaves neither launchers nor compilers, running or waiting."""
    started: list[subprocess.Popen[str]] = []

    def interrupt(build: Build, running: list[subprocess.Popen[str]]) -> None:
        started.extend(running)
        build.wait_for("start", "a.cu")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.run(build.eats("a.cu", 300, 1000), build.eats("b.cu", 300, 900), limits=Limits(8, 500, reserve=0), meanwhile=interrupt)

    assert all(one.poll() for one in started)


#: A build of its own, to be killed: a gate, and ninja's part.
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from sparkwright.builder.compile import launch
from sparkwright.builder.compile.calls import Limits
from sparkwright.builder.compile.costs import Expected
from sparkwright.builder.compile.gate import Gate

folder = Path(sys.argv[1])
with Gate(folder, Limits(8, 500, reserve=0), lambda unit: Expected(1000, 300, "record"), coming=2) as gate:
    env = {**os.environ, **gate.environment, "SPARKWRIGHT_LAUNCH": str(folder)}
    command = [sys.executable, "-IS", launch.__file__, sys.executable, sys.argv[2], "-c"]
    started = [subprocess.Popen([*command, unit, "50", "1000"], env=env, process_group=0) for unit in ("a.cu", "b.cu")]
    print(gate.environment["SPARKWRIGHT_UNIT"], *(one.pid for one in started), flush=True)
    for one in started:
        one.wait()
"""


class Victim:
    """A build in a process of its own, of which one unit compiles and one waits."""

    def __init__(self, build: Build) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(build.folder / "launch"), str(build.script)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        mark, *self.launchers = self.process.stdout.readline().split()
        self.mark = mark.rpartition("-")[0]
        wait_for((build.folder / "launch" / "events.jsonl").exists)
        wait_for(lambda: build.events("start"))
        # Two launchers, and the compiler.
        wait_for(lambda: len(procfs.marked(self.mark)) == 3)

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


@pytest.fixture(name="victim")
def _victim(build: Build) -> Iterator[Victim]:
    made = Victim(build)
    yield made
    made.process.kill()
    made.process.communicate()
    procfs.end_marked(made.mark)


def test_a_killed_build_leaves_nothing(victim: Victim) -> None:
    """Without its gate no launcher lives on, and no compiler without its launcher."""
    victim.kill(victim.process.pid)

    wait_for(lambda: not procfs.marked(victim.mark))


def test_compilers_that_lost_everything_are_ended_by_the_next_build(build: Build, victim: Victim) -> None:
    """All but the compiler is killed at one stroke; before the next build starts anything, it ends what is left."""
    victim.kill(*(int(pid) for pid in victim.launchers), victim.process.pid)
    wait_for(lambda: len(procfs.marked(victim.mark)) <= 1)

    assert build.run(build.eats("a.cu", 10, 0.1)) == [0]
    assert not procfs.marked(victim.mark)


def test_many_units_at_once_all_end_well(build: Build) -> None:
    """Units that come and go while others wait lose none, and what each cost is told once."""
    commands = [build.eats(f"{number}.cu", 1, 0, Expected(1, 90, "record")) for number in range(24)]

    assert build.run(*commands, limits=Limits(3, 300, reserve=0)) == [0] * 24
    assert sorted(outcome.unit for outcome in build.costs) == sorted(build.expected)
    assert not (build.folder / "launch" / "gate").exists()


def test_what_is_used_and_granted_is_sampled(build: Build) -> None:
    """The record of a build shows the memory over time: what units held, what they were granted, what was available."""
    build.run(build.eats("a.cu", 300, 2))
    assert build.gate
    most = max(build.gate.samples, key=lambda sample: sample.used)

    assert 300 <= most.used < 340
    assert (most.granted, most.available) == (330, 100_000)


#: A build by ninja, whose number is printed: a gate, and two units of which one waits.
NINJA = """
import os, subprocess, sys
from pathlib import Path
from sparkwright.builder.compile import launch
from sparkwright.builder.compile.calls import Limits
from sparkwright.builder.compile.costs import Expected
from sparkwright.builder.compile.gate import Gate

folder = Path(sys.argv[1])
command = f"{sys.executable} -IS {launch.__file__} {sys.executable} {sys.argv[2]} -c $out 50 1000"
rules = f"rule eat\\n command = {command}\\nbuild a.cu: eat\\nbuild b.cu: eat\\n"
(folder.parent / "build.ninja").write_text(rules)
with Gate(folder, Limits(8, 500, reserve=0), lambda unit: Expected(1000, 300, "record"), coming=2) as gate:
    env = {**os.environ, **gate.environment, "SPARKWRIGHT_LAUNCH": str(folder)}
    ninja = subprocess.Popen(["ninja", "-C", str(folder.parent), "-j", "100"], env=env, stdout=subprocess.DEVNULL)
    print(gate.environment["SPARKWRIGHT_UNIT"], ninja.pid, flush=True)
    ninja.wait()
"""


@pytest.mark.skipif(not shutil.which("ninja"), reason="no ninja (apt-get install ninja-build)")
@pytest.mark.parametrize("killed", [(True, False), (False, True), (True, True)], ids=["ninja", "sparkwright", "both"])
def test_a_killed_ninja_leaves_nothing(build: Build, killed: tuple[bool, bool]) -> None:
    """Whoever is killed, launchers and compilers end by themselves."""
    command = [sys.executable, "-c", NINJA, str(build.folder / "launch"), str(build.script)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert program.stdout
    mark, ninja = program.stdout.readline().split()
    mark = mark.rpartition("-")[0]
    try:
        wait_for((build.folder / "launch" / "events.jsonl").exists)
        wait_for(lambda: build.events("start"))
        for kill, pid in zip(killed, (int(ninja), program.pid), strict=True):
            if kill:
                os.kill(pid, signal.SIGKILL)
        left = set() if killed[0] else {int(ninja)}
        wait_for(lambda: set(procfs.marked(mark)) <= left)
    finally:
        program.kill()
        program.communicate()
        procfs.end_marked(mark)
