"""What a stack edits on the user's machine: the reviewed file, and the wheels that the lock has to have for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import wheels

from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.forks.stack import Project, stack_names
from sparkwright.release import machine_edits
from sparkwright.release.machine_edits import MachineEdits

STACK = "2026.05"


@pytest.fixture(name="edits")
def _edits() -> MachineEdits:
    edits = machine_edits.load(Project(wheels.ROOT, STACK))
    assert edits
    return edits


def locked(edits: MachineEdits, sha256: str = "") -> list[LockedWheel]:
    """Return the pinned wheels as a lock has them; the last one with another *sha256*."""
    found = []
    for package in edits.packages:
        name, own = next(iter(package.wheels.items()))
        found.append(
            LockedWheel(package.name, package.version, name, f"https://example.org/{name}", own)
        )
    if sha256:
        found[-1] = LockedWheel(
            *(found[-1].project, found[-1].version, found[-1].name, found[-1].url, sha256)
        )
    return found


def test_stacks_load_and_state_their_overlays(edits: MachineEdits) -> None:
    assert [
        stack
        for stack in stack_names(wheels.ROOT)
        if machine_edits.load(Project(wheels.ROOT, stack))
    ] == [STACK]
    assert [(overlay.upper, overlay.lower, overlay.files) for overlay in edits.overlays] == [
        ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-base", 176)
    ]
    assert all(edit.before != edit.after and edit.changes for edit in edits.edits)


def test_lock_has_the_pinned_wheels(edits: MachineEdits) -> None:
    edits.require(locked(edits))
    for wrong in (locked(edits)[:-1], locked(edits, "0" * 64)):
        with refusal("set-mixed"):
            edits.require(wrong)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("over: {nvidia-cutlass-dsl-libs-base: 176}", "over: {nowhere: 176}"),
        ("package: nvidia-cutlass-dsl-libs-cu13", "package: nowhere"),
        ("file: nvidia_cutlass_dsl/", "file: ../nvidia_cutlass_dsl/"),
        ("file: nvidia_cutlass_dsl/", "file: /nvidia_cutlass_dsl/"),
        ("  - name: nvidia-cutlass-dsl-libs-base", "  - name: nvidia-cutlass-dsl"),
        ("replacement:", "replaced:"),
        ("anchor: ", "anchor: ''  # "),
    ],
)
def test_fault_in_the_file_is_refused(old: str, new: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(wheels.ROOT / "forks" / STACK, tmp_path / "forks" / STACK))
    text = (folder / "onsite.yaml").read_text()
    assert old in text
    (folder / "onsite.yaml").write_text(text.replace(old, new, 1))
    with refusal("file-invalid"):
        machine_edits.load(Project(tmp_path, STACK))
