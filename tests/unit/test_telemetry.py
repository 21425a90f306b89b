"""What the machine tells of itself, with and without a GPU; what it does not tell is unknown, never guessed."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from sparkwright.bench.machine import nvml, telemetry
from sparkwright.bench.machine.nvml import THROTTLES, Nvml
from sparkwright.bench.machine.telemetry import Meter, Telemetry

BURN = "while True: pass"
#: Starts a program and ends, so that nobody here is its parent.
ORPHAN = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.DEVNULL).pid, flush=True)"

here = pytest.mark.skipif(not Nvml().absent, reason="there is a GPU")


@pytest.fixture
def stranger() -> Iterator[psutil.Process]:
    """Return a process that computes, and that is none of ours."""
    out = subprocess.run([sys.executable, "-c", ORPHAN, BURN], check=True, stdout=subprocess.PIPE, text=True).stdout
    process = psutil.Process(int(out))
    yield process
    with suppress(psutil.NoSuchProcess):
        process.kill()


def burnt(process: psutil.Process, seconds: float) -> None:
    """Wait until *process* has used some *seconds* more."""
    used, until = process.cpu_times().user, time.monotonic() + 120
    while process.cpu_times().user < used + seconds:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_fingerprint_names_versions_and_nobody() -> None:
    """Kernel, processor, cores and memory are there; the host's name, the user's and the folder's are not."""
    with closing(Telemetry()) as told:
        facts = told.fingerprint()

    assert {"kernel", "processor", "cores", "memory", "architecture"} <= facts.keys()
    assert all(facts.values())
    said = " ".join(facts.values()).split()
    assert not {socket.gethostname(), getpass.getuser(), str(Path.cwd())} & set(said)
    with closing(Telemetry()) as again:
        assert again.fingerprint() == facts


@here
def test_a_machine_without_a_gpu_says_so_and_tells_the_rest() -> None:
    """Clock, temperature and power are unknown; what is free is a number all the same."""
    with closing(Telemetry()) as one:
        told = one.told({os.getpid()})

        assert (told.gpu.clock, told.gpu.temperature, told.gpu.power, told.gpu.throttled, told.others) == (None, None, None, (), ())
        assert any(text.startswith("GPU: ") for text in told.unknown)
        assert told.free > 0
        assert one.unified() is None
        assert "gpu" not in one.fingerprint()


def test_a_library_that_was_closed_answers_nothing_and_does_not_fail() -> None:
    """Closing twice is harmless, and afterwards the GPU is unknown."""
    library = Nvml()
    library.close()
    library.close()

    assert library.absent
    assert library.state().unknown
    assert library.identity() == {}


@here
def test_a_gpu_that_nobody_has_is_absent() -> None:
    """The uuid of a GPU that is not there gives no other GPU's figures."""
    assert Nvml("00000000-0000-0000-0000-000000000000").absent


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, ()),
        (0x1 | 0x2, ()),
        (0x80, ("hardware power brake",)),
        (0x44, ("software power cap", "hardware thermal slowdown")),
        (0x1000, ("reason 0x1000",)),
        (0x21, ("software thermal slowdown",)),
    ],
)
def test_throttling_is_said_in_words(bits: int, words: tuple[str, ...]) -> None:
    """An idle GPU and clocks that somebody set are no throttling; a bit of a later driver is said as a number."""
    assert nvml.in_words(bits) == words


def test_the_words_are_the_librarys() -> None:
    """Every bit has the meaning that NVIDIA's own bindings give it."""
    import pynvml

    names = {
        "SwPowerCap": "software power cap", "HwSlowdown": "hardware slowdown", "SyncBoost": "sync boost",
        "SwThermalSlowdown": "software thermal slowdown", "HwThermalSlowdown": "hardware thermal slowdown",
        "HwPowerBrakeSlowdown": "hardware power brake", "DisplayClockSetting": "display clock setting",
    }  # fmt: skip
    assert {getattr(pynvml, f"nvmlClocksEventReason{name}"): text for name, text in names.items()} == THROTTLES


def test_a_process_on_the_gpu_is_named_and_one_that_cannot_be_seen_is_unknown() -> None:
    """This one by its name and number; one of another container might be the server, so it is not called another."""
    others, hidden = telemetry._named({os.getpid(), 2**30})

    assert others == (f"{psutil.Process().name()} ({os.getpid()})",)
    assert hidden == (f"whose process {2**30} on the GPU is",)


def test_the_battery_is_what_the_system_says() -> None:
    """None without one; where there is one, whether it is the source of power."""
    battery, doubt = telemetry.on_battery()
    try:
        found = psutil.sensors_battery()
    except OSError:
        pytest.skip("/sys is not mounted here; the next test is about that")

    assert battery == (None if found is None or found.power_plugged is None else not found.power_plugged)
    assert bool(doubt) == (found is not None and found.power_plugged is None)


def test_without_sys_the_battery_and_the_firmware_are_not_known(without_sys: list[str]) -> None:
    """In a container where /sys is not mounted, what stands there is missing, and nothing else is."""
    code = (
        "import json\nfrom sparkwright.core import process\nfrom sparkwright.gates.machine import telemetry\n"
        "print(json.dumps([telemetry.on_battery(), sorted(telemetry._host()), process.available_megabytes() > 0]))\n"
    )
    run = subprocess.run([*without_sys, sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert json.loads(run.stdout) == [[None, ["battery"]], ["architecture", "cores", "kernel", "memory", "processor"], True]


def test_the_load_of_others_counts_strangers_and_not_those_that_are_named(stranger: psutil.Process) -> None:
    """A stranger's work counts, unless it is named as ours: both shares are taken over the same time."""
    every, but_one = Meter(), Meter([stranger])
    burnt(stranger, 0.5)
    without, whole = but_one.share(), every.share()

    assert whole is not None
    assert without is not None
    assert 0 <= without < whole <= 1


def test_what_this_program_started_is_no_load_of_others() -> None:
    """With a child that computes on every core, others get at most what those children leave."""
    children = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(os.cpu_count() or 1)]
    try:
        processes = [psutil.Process(one.pid) for one in children]
        for one in processes:
            burnt(one, 0.05)
        before = [one.cpu_times().user for one in processes]
        whole = sum(psutil.cpu_times()[:8])
        meter = Meter()
        burnt(processes[0], 0.5)
        share = meter.share()
        used = sum(one.cpu_times().user - earlier for one, earlier in zip(processes, before, strict=True))
        part = used / (sum(psutil.cpu_times()[:8]) - whole)
        assert share is not None
        assert share <= 1 - part + 0.1
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_process_that_ended_meanwhile_is_no_error(stranger: psutil.Process) -> None:
    """The share stays a share."""
    meter = Meter([stranger])
    stranger.kill()
    share = meter.share()

    assert share is not None
    assert 0 <= share <= 1
