"""
What is measured: named sets of cells (``ci/gates/workloads.yaml``), and the files of prompts that some of them need.

How many requests a leg makes is decided before it runs and is the same on both sides, so that a fast wheel is not measured by more
requests than a slow one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.cells import Cell, Rule, is_cell, parse, seconds
from sparkwright.core import strict_yaml
from sparkwright.core.errors import UsageError

__all__ = ["Cell", "Rule", "Texts", "Workload", "Workloads", "load", "parse", "seconds"]

Name = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9.-]{0,59}$")]


class Texts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A file of real prompts, which is not part of this repository; the user names it with ``--texts``.

    Attributes:
        what: Where it comes from and how the file is made of it.
        sha256: Of the file; ``unresolved`` where nobody of us has seen it, and then two results need not be about the same prompts.
    """

    what: str
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64}|unresolved)$")]


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named set of cells, what it is for, and who measures the same."""

    why: str
    source: str
    cells: tuple[Cell, ...]

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        if not names or len(set(names)) != len(names):
            raise ValueError("a workload has at least one cell, and none twice")


class Workloads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file ``ci/gates/workloads.yaml``."""

    rule: Rule
    texts: dict[Name, Texts]
    workloads: dict[Name, Workload]

    def __post_init__(self) -> None:
        for name, workload in self.workloads.items():
            if lost := {cell.texts for cell in workload.cells if cell.texts} - set(self.texts):
                raise ValueError(f"{name}: {', '.join(sorted(lost))} is not among the texts")

    def cells(self, *names: str) -> tuple[Cell, ...]:
        """
        Return the cells of the workloads *names*, or of the names of cells among them, each once.

        Raises:
            UsageError: There is no such workload.
        """
        found: dict[str, Cell] = {}
        for name in names:
            if name not in self.workloads and not is_cell(name):
                todo = f"Choose from: {', '.join(self.workloads)}; or name a cell: 1024/1024 c8."
                raise UsageError("usage", f"There is no workload {name!r:.80}.", todo=todo)
            for cell in self.workloads[name].cells if name in self.workloads else (parse(name),):
                found.setdefault(cell.name, cell)
        return tuple(found.values())


def load(root: Path) -> Workloads:
    """
    Return the workloads of the repository at *root*.

    Raises:
        file-invalid: As `sparkwright.core.strict_yaml.load`.
    """
    return strict_yaml.load(root / "ci" / "gates" / "workloads.yaml", Workloads)
