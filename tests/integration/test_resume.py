"""Kill it anywhere: the next run finishes the work, and the wheel is the one of a run that nobody disturbed."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import Demo

pytestmark = pytest.mark.toolchain

#: What the build says when it enters a stage, in order; the last one is said when all is compiled and the wheel gets packed.
STAGES = ("fetch vllm", "apply 2 patches", "rewrite vllm", "plan vllm (with ", "plan vllm (without", "compile vllm", "units compiled")
INTERRUPTED = "interrupted; what is finished is kept, and the next run continues from here"


def finished(demo: Demo) -> list[str]:
    """Return the objects that ninja knows as made, from the log that it continues."""
    log = demo.work / "build" / ".ninja_log"
    rows = [line.split("\t") for line in log.read_text().splitlines()[1:]] if log.exists() else []
    return sorted({row[3] for row in rows if len(row) == 5 and row[3].endswith(".o")})


def stopped_at(demo: Demo, stage: str, by: signal.Signals) -> tuple[int, str]:
    """Start a build, send the signal *by* when it says *stage*, and return its status and what it said from then on."""
    with demo.building() as child:
        assert child.stderr is not None
        said = ""
        for line in child.stderr:
            said += line
            if stage in line:
                break
        else:
            pytest.fail(f"the build never came to {stage!r}:\n{said}")
        # Ctrl-C reaches the whole group, as a terminal sends it; a kill meets the build alone.
        (os.killpg if by == signal.SIGINT else os.kill)(child.pid, by)
        rest = child.stderr.read()
        status = child.wait()
    demo.wait_for(lambda: not demo.processes(), 20)
    return status, rest


def half_made(demo: Demo) -> list[str]:
    """Return the temporary files and folders of the store and of ``dist``; the store and git's indices name theirs so."""
    paths = (path for name in ("store", "dist") for path in (demo.folder / name).rglob("*"))
    return [str(path.relative_to(demo.folder)) for path in paths if re.fullmatch(r"\..+\.\w{8}|index-\w{8}", path.name)]


def test_units_compiled_before_a_kill_are_not_compiled_again(demo: Demo, undisturbed: Demo) -> None:
    """Compilers die with a killed build, the next run compiles the other units alone, and the wheel has the usual bytes."""
    with demo.building("--jobs", "2") as child:
        before = demo.wait_for(lambda: finished(demo))
        child.kill()
        child.wait()
    demo.wait_for(lambda: not demo.processes(), 20)
    before = finished(demo)
    units = demo.units()

    demo.build()

    assert 0 < len(before) < len(units)
    made_before = [unit for unit in units if any(made.endswith(f"{unit}.o") for made in before)]
    # A unit that ended at the moment of the kill may be in the compiler cache although ninja had no time to note it.
    assert sorted(demo.compiled() + demo.taken()) == [unit for unit in units if unit not in made_before]
    assert len(demo.taken()) <= 2
    assert demo.sha256() == undisturbed.sha256()


def test_a_build_that_is_killed_in_every_stage_ends_with_the_same_wheel(demo: Demo, undisturbed: Demo) -> None:
    """A kill on entry to each stage, one after the other, leaves nothing that a later run would take for whole."""
    for stage in STAGES:
        assert stopped_at(demo, stage, signal.SIGKILL)[0] == -signal.SIGKILL

    demo.build()

    assert demo.sha256() == undisturbed.sha256()
    assert not demo.compiled(), "everything was compiled before the last kill"


def test_a_build_that_is_interrupted_in_every_stage_ends_with_the_same_wheel(demo: Demo, undisturbed: Demo) -> None:
    """Ctrl-C on entry to each stage ends with 130 and one sentence, leaves nothing half-made, and the run after the last finishes."""
    for stage in STAGES:
        status, said = stopped_at(demo, stage, signal.SIGINT)
        assert (status, said.splitlines()[-1]) == (130, INTERRUPTED), f"{stage}: {said}"
        assert "Traceback" not in said
        assert half_made(demo) == [], stage
        assert not list((demo.folder / "dist").glob("*")), stage

    demo.build()

    assert demo.sha256() == undisturbed.sha256()
    assert not demo.compiled(), "everything was compiled before the last interruption"


def test_two_builds_at_once_compile_each_unit_once(demo: Demo) -> None:
    """The second of two builds on one store waits for the first, takes its wheel, and both succeed."""
    with demo.building() as one, demo.building() as other:
        said = [child.communicate(timeout=240)[1] for child in (one, other)]

    assert (one.returncode, other.returncode) == (0, 0), said
    assert demo.compiled() == demo.units()
    assert sorted("reused: nothing changed" in text for text in said) == [False, True]
    assert sorted("another sparkwright works on" in text for text in said) == [False, True]
