"""Kill it anywhere: the next run finishes the work, and the wheel is the one of a run that nobody disturbed."""

from __future__ import annotations

import pytest
from tests.integration.conftest import Demo

pytestmark = pytest.mark.toolchain

#: What the build says when it enters a stage, in order; the last one is said when all is compiled and the wheel gets packed.
STAGES = ("fetch vllm", "apply 2 patches", "rewrite vllm", "plan vllm (with ", "plan vllm (without", "compile vllm", "units compiled")


def finished(demo: Demo) -> list[str]:
    """Return the objects that ninja knows as made, from the log that it continues."""
    log = demo.work / "build" / ".ninja_log"
    rows = [line.split("\t") for line in log.read_text().splitlines()[1:]] if log.exists() else []
    return sorted({row[3] for row in rows if len(row) == 5 and row[3].endswith(".o")})


def kill_at(demo: Demo, stage: str) -> None:
    """Start a build, and kill it when it says *stage*; its compilers end with it."""
    with demo.building() as child:
        assert child.stderr is not None
        lines = iter(child.stderr)
        assert any(stage in line for line in lines), f"the build never came to {stage!r}"
        child.kill()
        child.wait()
    demo.wait_for(lambda: not demo.processes(), 20)


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
        kill_at(demo, stage)

    demo.build()

    assert demo.sha256() == undisturbed.sha256()
    assert not demo.compiled(), "everything was compiled before the last kill"


def test_two_builds_at_once_compile_each_unit_once(demo: Demo) -> None:
    """The second of two builds on one store waits for the first, takes its wheel, and both succeed."""
    with demo.building() as one, demo.building() as other:
        said = [child.communicate(timeout=240)[1] for child in (one, other)]

    assert (one.returncode, other.returncode) == (0, 0), said
    assert demo.compiled() == demo.units()
    assert sorted("reused: nothing changed" in text for text in said) == [False, True]
    assert sorted("another sparkwright works on" in text for text in said) == [False, True]
