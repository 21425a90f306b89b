"""The kernel's log: which records are faults, and how it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkwright.bench.machine import watchdog
from sparkwright.bench.machine.watchdog import KernelLog


@pytest.mark.parametrize(("text", "reason"), [
    ("NVRM: Xid (PCI:000f:01:00): 31, pid=1234, name=python3, Ch 00000008, MMU Fault", "kernel-xid"),
    ("NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)", "kernel-no-memory"),
    ("NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0xffff:2319)", "kernel-nvrm"),
    ("NVRM: GPU at PCI:000f:01:00 has fallen off the bus.", "kernel-nvrm"),
    ("Out of memory: Killed process 4711 (python3) total-vm:1kB", "kernel-oom-kill"),
    ("mce: [Hardware Error]: Machine check events logged", "kernel-hardware"),
    ("INFO: task python3:77 blocked for more than 120 seconds.", "kernel-hardware"),
    ("NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.95.05", ""),
    ("python3[99]: segfault at 0", ""),
])  # fmt: skip
def test_faults_in_the_kernel_log_are_sorted(text: str, reason: str) -> None:
    found = watchdog.finding(text)

    assert (found.reference if found else "") == reason


def test_the_kernel_log_is_read_from_now_on(tmp_path: Path) -> None:
    """Earlier records and further fields of a record do not count."""
    path = tmp_path / "kmsg"
    path.write_text("4,1,100,-;NVRM: Xid (PCI:0000:01:00): 13, before\n")
    log = KernelLog(path)
    assert list(log.findings()) == []
    with path.open("a") as stream:
        stream.write("6,2,200,-;all is well\n SUBSYSTEM=;NVRM: Xid (x): 1\n")
        stream.write("3,3,300,-;NVRM: Xid (PCI:0000:01:00): 79, gone\n")
    assert [fault.text for fault in log.findings()] == ["NVRM: Xid (PCI:0000:01:00): 79, gone"]
    log.close()
