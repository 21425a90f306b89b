"""Whatever is wrong with an index, a mirror, a network or a machine, the installer says so by name and changes nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from tests.release import attacks
from tests.release.attacks import Case, Scene

from sparkwright.core.errors import by_reference


def exit_code(reference: str) -> int:
    """Return the exit code that belongs to *reference*."""
    made = by_reference(reference)
    assert made
    return made("").exit_code


@pytest.mark.parametrize("case", attacks.CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_it_is_refused_by_name_and_nothing_changes(scenes: Callable[[], Scene], case: Case) -> None:
    """The run ends with the reference of the case and its exit code, and every file of the environment is as it was."""
    if case.expected == "disk-full" and subprocess.run(attacks.unshared("true"), capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    found = attacks.run(case, scenes)

    assert (found.reference, found.code, found.untouched) == (case.expected, exit_code(case.expected), True), found.said


def test_without_a_fault_it_installs(scene: Scene) -> None:
    """What all cases begin with is good: not everything is refused."""
    scene.good()

    assert "vllm" in {path.name for path in scene.user.site.iterdir()}
