"""What a machine may call itself: labels stand for capabilities, and one that is not true would bring jobs that cannot run here."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import msgspec

from sparkwright.operate.runner.policy import MACHINE_LABELS, Capability, Policy, Settings


class Machine(msgspec.Struct, frozen=True):
    """What labels are judged by: compute capabilities of the GPUs, and memory in megabytes."""

    gpus: tuple[str, ...]
    memory: int

    @classmethod
    def here(cls) -> Machine:
        import psutil

        from sparkwright.builder import host_info

        return cls(tuple(gpu.capability for gpu in host_info.gpus()), psutil.virtual_memory().total // 1_000_000)


def untrue(capability: Capability, machine: Machine) -> str:
    """Return why *machine* has no such capability; nothing where it has."""
    if capability.gpu and capability.gpu not in machine.gpus:
        return f"it stands for a GPU of {capability.gpu}, and here is {', '.join(machine.gpus) or 'none'}"
    if capability.memory > machine.memory:
        return f"it stands for {capability.memory} MB of memory, and here are {machine.memory}"
    return ""


def true_of(policy: Policy, machine: Machine) -> tuple[str, ...]:
    """Return the labels that are true of *machine*."""
    return tuple(one.name for one in policy.labels if not untrue(one, machine))


def carried(policy: Policy, settings: Settings) -> tuple[str, ...]:
    """Return the labels of a registration; a configuration for one job has no others than these."""
    own = tuple(one.name for one in policy.labels if one.name in settings.labels)
    return (*policy.always, MACHINE_LABELS.get(platform.machine(), platform.machine()), *own)


def wrong(policy: Policy, settings: Settings, machine: Machine) -> Iterator[str]:
    """Yield what is wrong with the labels that a machine was set up with."""
    known = {one.name: one for one in policy.labels}
    for label in settings.labels:
        if label not in known:
            yield f"{label}: ci/runner.yaml does not know it"
        elif reason := untrue(known[label], machine):
            yield f"{label}: {reason}"
    if not known.keys() & set(settings.labels):
        yield "no label of the policy, so no job comes here"
