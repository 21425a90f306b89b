"""What a GPU gets from device code: NVIDIA's rules of loading, over all combinations of targets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import fatbins

from sparkwright.audit import device_code

SPARK = (12, 1)
NUMBERS = (75, 80, 89, 90, 100, 103, 110, 120, 121, 122)
TARGETS = [f"sm_{number}{suffix}" for number in NUMBERS for suffix in ("", "a", "f")]

#: The table of gates.md §4.1, and what follows from the same rules for the rest.
LOADS = {"sm_120", "sm_120f", "sm_121", "sm_121a", "sm_121f"}
COMPILES = {"sm_120f", "sm_121f", "sm_121a"} | {f"sm_{number}" for number in NUMBERS[:-1]}


def test_a_spark_loads_and_compiles_by_nvidias_rules() -> None:
    """Code of its generation and not newer, ``a`` for 12.1 alone; PTX that is not newer."""
    targets = [*TARGETS, "garbage", "sm_", ""]

    assert {target for target in targets if device_code.loads(target, SPARK)} == LOADS
    assert {target for target in targets if device_code.compiles(target, SPARK)} == COMPILES


@pytest.mark.parametrize(
    ("cubins", "ptx", "expected"),
    [
        (["sm_121f"], [], "native"),
        (["sm_120f"], [], "family"),
        (["sm_121"], [], "plain"),
        (["sm_120", "sm_120f", "sm_121f"], ["sm_80"], "native"),
        (["sm_120f", "sm_121"], [], "plain"),
        (["sm_120a"], ["sm_120"], "jit"),
        (["sm_80", "sm_90a"], ["sm_80", "sm_90"], "jit"),
        (["sm_80"], ["sm_90a", "sm_120a", "sm_100f"], "nothing"),
        (["garbage", "sm_"], ["sm_x"], "nothing"),
    ],
)
def test_the_nearest_machine_code_comes_before_ptx(
    cubins: list[str], ptx: list[str], expected: str
) -> None:
    """The driver takes machine code if there is any that it can load."""
    assert device_code.gain(cubins, ptx, SPARK) == expected


@pytest.mark.parametrize(
    ("options", "version", "target"),
    [
        ("-arch sm_121f -m 64 ", 2, "sm_121f"),
        ("-O3 -arch=sm_121", 2, "sm_121"),
        ("--gpu-name sm_120a -v", 2, "sm_120a"),
        ("-arch sm_121fx", 2, ""),
        ("-arch sm_121f", 3, ""),
    ],
)
def test_the_note_in_a_cubin_states_its_target(options: str, version: int, target: str) -> None:
    """By any spelling of the option; a note of another version, or cut short, states none."""
    note = fatbins.note(options.encode(), version)

    assert device_code.note_target(note) == target
    assert device_code.note_target(note[:30]) == ""


# Disassembly.


def _program(folder: Path, text: str) -> Path:
    """Write the shell script *text* as ``nvdisasm`` to *folder* and return that."""
    path = folder / "nvdisasm"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return folder


LISTING = """
.text._Z6kernelv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 F2FP.SATFINITE.E2M1.F32.PACK_AB R0, R2, R3 ;
        /*0020*/                   F2FP.SATFINITE.E2M1.F32.PACK_AB R0, R2, R3 ;
.text.other:
        /*0000*/                   BPT.TRAP 0x1 ;
"""


def test_opcodes_are_counted_by_kernel_with_their_modifiers(tmp_path: Path) -> None:
    (tmp_path / "listing").write_text(LISTING)
    folder = _program(tmp_path, f"exec cat {tmp_path / 'listing'}")

    assert device_code.opcodes(tmp_path / "a.cubin", folder, time.monotonic() + 60) == {
        "_Z6kernelv": {"LDC": 1, "F2FP.SATFINITE.E2M1.F32.PACK_AB": 2},
        "other": {device_code.TRAP: 1},
    }


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        ("exec sleep 60", "command-failed", "takes longer than for any wheel"),
        ("echo no cubin >&2; exit 3", "command-failed", "cannot read a cubin"),
        ("", "tool-missing", "nvdisasm is not in"),
    ],
)
def test_a_disassembly_that_fails_or_does_not_end_is_refused(
    tmp_path: Path, text: str, reference: str, message: str
) -> None:
    folder = _program(tmp_path, text) if text else tmp_path
    with refusal(reference, match=message):
        device_code.opcodes(tmp_path / "a.cubin", folder, time.monotonic() + 0.5)


WAITING = """
import signal, sys, time
from pathlib import Path
from sparkwright.audit import device_code
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = Path(sys.argv[1])
device_code.opcodes(folder / "a.cubin", folder, time.monotonic() + 60)
"""


def test_an_interrupted_disassembly_ends_at_once_with_its_tool(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    _program(tmp_path, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60")
    child = subprocess.Popen([sys.executable, "-c", WAITING, tmp_path], stderr=subprocess.DEVNULL)
    while not pid.exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)

    assert child.wait(1) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
