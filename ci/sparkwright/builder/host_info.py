"""Facts about this machine that its programs state. A missing program is an empty fact."""

import re

import msgspec

from sparkwright.core import memory, process
from sparkwright.core.errors import CommandError

#: Seconds until a program, or a host, counts as unanswered.
PATIENCE = 3.0


class GpuInfo(msgspec.Struct, frozen=True):
    """
    A GPU as its driver names it; *capability* is CUDA's compute capability, ``12.1`` on a GB10.
    """

    name: str
    capability: str
    driver: str


def command_output(*command: str, **variables: str) -> str:
    """Return the output of *command*, empty when it is missing, fails or takes too long."""
    try:
        return process.output(command, env=process.clean_environment(**variables), timeout=PATIENCE)
    except CommandError:
        return ""


def gpus() -> tuple[GpuInfo, ...]:
    """Return the GPUs that the NVIDIA driver shows."""
    rows, _ = memory.query("gpu=name,compute_cap,driver_version")
    return tuple(GpuInfo(*row) for row in rows if len(row) == 3)


def driver_fault() -> str:
    """Return how nvidia-smi fails; empty if it does not, or is not installed."""
    _, failure = memory.query("gpu=name")
    return f"the driver is failing: {failure}" if failure else ""


def processor() -> str:
    """Return the names of the CPU's kinds of core (a GB10 has two)."""
    names = re.findall(r"^\s*Model name:\s*(.+?)\s*$", command_output("lscpu"), re.MULTILINE)
    return " + ".join(dict.fromkeys(names))
