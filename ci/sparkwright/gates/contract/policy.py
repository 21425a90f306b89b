"""
What a way of serving must show of itself, and the lines of vLLM's log in which it shows it: the records of ``ci/gates/contract.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.bench.server.server_log import Line


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A kind of line of vLLM's log.

    Attributes:
        holds, pattern: See `sparkwright.bench.server.server_log.Line`.
    """

    holds: str | tuple[str, ...]
    pattern: str


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What one way of serving must show.

    Attributes:
        why: For whom it is, and whether anybody ran it.
        lines: Name of a line → regular expression that each of its values must match whole, and at least one is there.
        harmless: Regular expressions of fallbacks that mean nothing here.
        flags: Arguments that the server must have been started with, each as it stands on the command line (``--a``, or ``--a b``).
        variables: Environment variables that it must have.
        kernels: Regular expressions; each must be found in the name of a kernel that a profiler saw.
        forbidden: Regular expressions that must not be found in any.
        events: Category of the profile's events that count.
        kv_gib: Least and most GiB of KV cache; nothing to leave it open.
        kv_tokens: The least number of tokens that the cache must hold.
        graphs: Whether CUDA graphs are captured, so that the log must estimate their memory.
    """

    why: str
    lines: dict[str, str] = {}
    harmless: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    kernels: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    events: str = "kernel"
    kv_gib: tuple[float, float] | None = None
    kv_tokens: int = 0
    graphs: bool = False

    def __post_init__(self) -> None:
        for pattern in (*self.lines.values(), *self.harmless, *self.kernels, *self.forbidden):
            _compiled(pattern)
        if self.kv_gib and not 0 < self.kv_gib[0] <= self.kv_gib[1]:
            raise ValueError("kv_gib: the least must be above 0 and not above the most")


class ContractPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What vLLM prints, and what recipes expect of it.

    Attributes:
        releases: The first release whose lines were read in its sources, and the first that was not.
        lines: Lines that say what was chosen. ``version``, ``kv-gib``, ``kv-tokens`` and ``graph-gib`` must be among them.
        emulation, unknown, refused, fallback, error: Lines that should not be there.
    """

    releases: tuple[str, str]
    lines: dict[str, Named]
    emulation: Named
    unknown: Named
    refused: Named
    fallback: Named
    error: Named
    recipes: dict[str, Recipe]

    def __post_init__(self) -> None:
        from packaging.version import Version

        for release in self.releases:
            Version(release)
        for name in {"version", "kv-gib", "kv-tokens", "graph-gib"} - set(self.lines):
            raise ValueError(f"lines: {name} is missing")
        for name, line in self.lines.items():
            if "value" not in _compiled(line.pattern).groupindex:
                raise ValueError(f"lines: {name} has no group named value")
        for recipe, wants in self.recipes.items():
            for name in set(wants.lines) - set(self.lines):
                raise ValueError(f"recipes: {recipe} expects the line {name}, which is not among the lines")

    def all_lines(self) -> list[Line]:
        """Return every line to look for."""
        bad = {name: getattr(self, name) for name in ("emulation", "unknown", "refused", "fallback", "error")}
        return [Line(name, line.holds, line.pattern) for name, line in {**self.lines, **bad}.items()]


class Running(msgspec.Struct, frozen=True):
    """
    What is known of a server from outside.

    Attributes:
        log: What it printed.
        flags: Its command line behind ``vllm serve MODEL``; None where nobody knows it.
        variables: Its environment; None where nobody knows it.
        package: The folder ``vllm`` that it runs; None where nobody knows it.
        profile: What a profiler saw; None without one.
        ended: Why it was ended before it served; empty where it serves.
        reference: Of *ended* (`sparkwright.bench.server.plan.Server.reason`).
    """

    log: Path
    flags: tuple[str, ...] | None = None
    variables: Mapping[str, str] | None = None
    package: Path | None = None
    profile: Path | None = None
    ended: str = ""
    reference: str = ""
