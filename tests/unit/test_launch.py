"""The compiler launcher, run for real: what it writes down, and whom it lets start."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkwright.build import launch

SCRIPT = Path(launch.__file__)

#: Stands where a compiler would: takes its time, and writes when it ran.
SLOW = (
    "import pathlib, sys, time; began = time.time(); time.sleep(float(sys.argv[3]));"
    " pathlib.Path(sys.argv[2] + '.times').write_text(f'{began} {time.time()}')"
)


class Build:
    """A folder with a plan, and the launchers that work in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder / "launch", folder / "src"
        self.folder.mkdir()
        self.source.mkdir()
        self.running: list[subprocess.Popen[str]] = []
        self.plan(budget=1000)

    def plan(self, **fields: object) -> None:
        plan = {"root": f"{self.source}/", "budget": 1000, "default": 100, "units": {}, "patterns": [], **fields}
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def start(self, *command: str | Path) -> subprocess.Popen[str]:
        """Start a launcher in front of *command*."""
        started = subprocess.Popen(
            [sys.executable, "-IS", str(SCRIPT), *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={"PATH": "/usr/bin:/bin", "SPARKWRIGHT_LAUNCH": str(self.folder)},
        )  # fmt: skip
        self.running.append(started)
        return started

    def slow(self, name: str, seconds: float) -> subprocess.Popen[str]:
        """Start a launcher in front of a unit that takes *seconds*."""
        script = self.source / "compiler.py"
        script.write_text(SLOW)
        return self.start(sys.executable, script, "-c", self.source / name, str(seconds))

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, event: str, unit: str) -> None:
        deadline = time.monotonic() + 60
        while not any((one["event"], one["unit"]) == (event, unit) for one in self.events()):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def slots(self) -> list[Path]:
        return list((self.folder / "running").iterdir())

    def overlap(self, one: str, other: str) -> bool:
        """Did the two units run at the same time?"""
        times = [[float(word) for word in (self.source / f"{name}.times").read_text().split()] for name in (one, other)]
        return times[0][0] < times[1][1] and times[1][0] < times[0][1]


@pytest.fixture(name="build")
def _build(tmp_path: Path) -> Iterator[Build]:
    made = Build(tmp_path)
    yield made
    for one in made.running:
        if one.poll() is None:
            one.kill()
        one.communicate()


needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@needs_cc
def test_a_unit_is_compiled_and_written_down(build: Build) -> None:
    """A real compile makes its object; start and end are events with status, seconds and megabytes."""
    (build.source / "sub").mkdir()
    (build.source / "sub" / "a.c").write_text("int a(void) { return 1; }\n")
    made = build.start("cc", "-O1", "-c", build.source / "sub" / "a.c", "-o", build.source / "a.o")
    assert made.wait() == 0
    start, end = build.events()

    assert (build.source / "a.o").read_bytes().startswith(b"\x7fELF")
    assert start == {"event": "start", "unit": "sub/a.c"}
    assert (end["event"], end["unit"], end["status"]) == ("end", "sub/a.c", 0)
    assert end["megabytes"] > 0
    assert build.slots() == []


@needs_cc
def test_a_refused_unit_keeps_the_compilers_status_and_words(build: Build) -> None:
    """What the compiler says and how it ends pass through unchanged."""
    (build.source / "a.c").write_text("int a(void) { return }\n")
    made = build.start("cc", "-c", build.source / "a.c", "-o", build.source / "a.o")
    _, said = made.communicate()

    assert made.returncode == 1
    assert "a.c:1" in said
    assert build.events()[1]["status"] == 1


@needs_cc
def test_calls_that_compile_nothing_pass_through(build: Build) -> None:
    """Links and questions for the version are no units: no event, no slot, the program's own output."""
    made = build.start("cc", "--version")
    out, _ = made.communicate()

    assert (made.returncode, build.events()) == (0, [])
    assert out


def test_a_killed_compiler_is_seen_as_such(build: Build) -> None:
    """A compiler that the kernel killed for its memory gives the status that shells give."""
    script = build.source / "dies.py"
    script.write_text("import os; os.kill(os.getpid(), 9)")
    made = build.start(sys.executable, script, "-c", build.source / "a.cu")

    assert made.wait() == 128 + signal.SIGKILL
    assert build.events()[1]["status"] == -signal.SIGKILL


def test_units_that_fit_run_together(build: Build) -> None:
    """Two units whose memory fits into the budget do not wait for each other."""
    build.plan(budget=200)
    for one in [build.slow(name, 1.5) for name in ("a.cu", "b.cu")]:
        assert one.wait() == 0

    assert build.overlap("a.cu", "b.cu")


def test_units_that_do_not_fit_take_turns(build: Build) -> None:
    """A unit for which there is no room starts when the one before it has ended."""
    build.plan(budget=199)
    for one in [build.slow(name, 0.5) for name in ("a.cu", "b.cu")]:
        assert one.wait() == 0

    assert not build.overlap("a.cu", "b.cu")


def test_a_unit_larger_than_the_budget_runs_alone(build: Build) -> None:
    """What could never fit is not refused, since one unit at a time is all that can be done."""
    build.plan(budget=50)

    assert build.slow("a.cu", 0).wait() == 0


def test_a_small_unit_passes_a_large_one_that_waits(build: Build) -> None:
    """Memory that a waiting unit cannot use is there for a smaller one."""
    build.plan(budget=1000, units={"first.cu": 600, "large.cu": 900, "small.cu": 100})
    first = build.slow("first.cu", 2)
    build.wait_for("start", "first.cu")
    large, small = build.slow("large.cu", 0), build.slow("small.cu", 0)
    assert [one.wait() for one in (small, first, large)] == [0, 0, 0]

    assert build.overlap("first.cu", "small.cu")
    assert not build.overlap("first.cu", "large.cu")


def test_the_memory_of_a_dead_launcher_is_free(build: Build) -> None:
    """A launcher that was killed holds nothing: the next unit starts, and the slot is gone."""
    build.plan(budget=100)
    killed = build.slow("a.cu", 1)
    build.wait_for("start", "a.cu")
    killed.kill()
    killed.wait()
    assert len(build.slots()) == 1

    assert build.slow("b.cu", 0).wait() == 0
    assert build.slots() == []


def test_many_launchers_at_once_all_end_well(build: Build) -> None:
    """Launchers that come and go while others count lose no unit and leave no slot."""
    build.plan(budget=300)
    units = [f"{number}.cu" for number in range(12)]
    started = [build.slow(unit, 0) for unit in units]

    assert [(one.wait(), one.stderr.read() if one.stderr else "") for one in started] == [(0, "")] * len(units)
    assert sorted(event["unit"] for event in build.events() if event["event"] == "end") == sorted(units)
    assert build.slots() == []


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("csrc/known.cu", 5), ("csrc/moe/topk.cu", 20), ("csrc/other.cu", 30), ("csrc/a.cpp", 40)],
)
def test_the_memory_of_a_unit_is_its_own_record_or_the_first_pattern(unit: str, expected: int) -> None:
    """What the unit held last time counts first, then the patterns in their order, then the default."""
    plan = {"units": {"csrc/known.cu": 5}, "patterns": [["moe/*.cu", 20], ["*.cu", 30]], "default": 40}

    assert launch.expected(unit, plan) == expected


@pytest.mark.parametrize(
    ("command", "unit"),
    [
        (["nvcc", "-x", "cu", "-c", "/s/csrc/a.cu", "-o", "a.o"], "csrc/a.cu"),
        (["c++", "-c", "/elsewhere/a.cpp"], "/elsewhere/a.cpp"),
        (["nvcc", "-o", "a.so", "a.o"], ""),
        (["cc", "-c"], ""),
    ],
)
def test_a_unit_is_named_below_the_source_tree(command: list[str], unit: str) -> None:
    """Records of one machine fit another one, wherever its sources lie."""
    assert launch.unit_of(command, "/s/") == unit
