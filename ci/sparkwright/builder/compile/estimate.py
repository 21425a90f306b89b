"""How long a build should take, before it is begun."""

from __future__ import annotations

from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import ForkEnvironment
from sparkwright.forks.stack import Project

#: Seconds beside the compiling of a graft onto a wheel of hundreds of megabytes: two configures of 20 s, comparing and packing,
#: the audit; measured for vLLM 0.33.0 on two x86-64 cores, and not shared among more.
BESIDE = 120.0


def seconds(project: Project, fork: str, jobs: int) -> float:
    """Return what building *fork* should take with *jobs* units at once, from the work that was measured (``environment.yaml``)."""
    settings = toolchain.spec(project).forks[fork]
    if not settings.targets:
        return settings.seconds
    return (BESIDE if settings.longest else 0) + max(settings.longest, settings.seconds / jobs)


def jobs(settings: ForkEnvironment, cores: int, memory: int) -> int:
    """Return how many units can compile at once on *cores* with *memory* bytes, were each as large as the fork's largest."""
    largest = max(settings.memory.values(), default=1) * 1_000_000
    return max(1, min(cores, memory // largest))
