"""What holds for the server of any recipe: the file ``ci/gates/contract.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from packaging.specifiers import SpecifierSet

from sparkwright.bench.server.server_log import LogPattern, compile_patterns

#: Lines that the gate reads by name.
LINES = frozenset(
    {"version", "attention", "linear", "moe", "moe-tuned", "moe-untuned", "kv-gib", "kv-tokens"}
)
#: Check → the line that should not be in the log, the reason of its failure, and what a pass says.
UNWANTED: Mapping[str, tuple[str, str, str]] = {
    "no-emulation": ("emulation", "emulation", "it computes nothing by emulation"),
    "no-refusal": ("refused", "backend-refused", "it refused no backend that it was told to use"),
    "no-fallback": ("fallback", "fallback-unlisted", "it fell back to nothing unlisted"),
    "no-unknown-variable": ("unknown", "variable-unknown", "it reads every variable that is set"),
    "graph-memory": ("graph-memory", "graph-memory-negative", "no memory of graphs is negative"),
}


class ContractPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What vLLM prints, and what no server of a recipe may show.

    Attributes:
        releases: Version specifier of the releases whose lines were read in their sources.
        kv_tolerance: Share by which the KV cache may differ from the recipe's plan.
        lines: Lines that state a choice; each pattern has a group *value*.
        unwanted: Lines that should not be there.
        layer_kinds: Regular expressions by which a kernel belongs to a kind of layer, where the
            recipe's contract names none; the first that matches counts.
        fallback_kernels: Regular expressions of kernels that may only serve a recipe that allows
            them.
    """

    releases: str
    kv_tolerance: Annotated[float, Meta(gt=0, lt=1)]
    lines: dict[str, LogPattern]
    unwanted: dict[str, LogPattern]
    layer_kinds: dict[str, str]
    fallback_kernels: dict[str, str]

    def __post_init__(self) -> None:
        SpecifierSet(self.releases)
        compile_patterns(*self.layer_kinds.values(), *self.fallback_kernels.values())
        if missing := (LINES - set(self.lines)) | (
            {line for line, _, _ in UNWANTED.values()} ^ set(self.unwanted)
        ):
            raise ValueError(f"lines: {', '.join(sorted(missing))} is missing or unknown")

    def patterns(self) -> dict[str, LogPattern]:
        """Return every kind of line to look for, by name."""
        return self.lines | self.unwanted
