"""What a decode step of a model reads for each cell, from the checkpoint's own headers, and the rate that memory allows it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from sparkwright.bench.errors import ModelError
from sparkwright.bench.model import checkpoint, decode_bytes, modules
from sparkwright.bench.model.decode_bytes import Bandwidth
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.core.console import console
from sparkwright.forks.stack import SourceError
from sparkwright.gates.throughput.records import CellResult


class DecodeTraffic:
    """
    The steps of the model in the folder *model*; None where it is not at hand.

    Args:
        least: Bytes below which caches may answer for memory, so that there is no ceiling.
    """

    def __init__(self, model: Path | None, least: float) -> None:
        self._model, self._least = model, least
        self._known: dict[str, float | None] = {}

    def of(self, cell: WorkloadCell) -> float | None:
        """Return the bytes that a step of *cell* reads at the middle of an answer; None where the checkpoint does not say."""
        if cell.name not in self._known:
            self._known[cell.name] = self._read(cell)
        return self._known[cell.name]

    def _read(self, cell: WorkloadCell) -> float | None:
        if self._model is None:
            return None
        try:
            found = checkpoint.read(self._model)
            return modules.audit(found, context=cell.prompt + cell.answer // 2, batch=cell.concurrency).step
        except (ModelError, SourceError) as error:
            if isinstance(error, ModelError) and error.reference != "checkpoint-invalid":
                raise
            if isinstance(error, SourceError) and error.reference != "not-provided":
                raise
            console.detail(f"no roofline: {error.what}")
            return None

    def ceilings(self, cells: Iterable[CellResult], speed: Bandwidth | None) -> tuple[CellResult, ...]:
        """Return *cells* with the bytes of a step, and the tokens per second of one request that memory allows at that *speed*."""
        made = []
        for cell in cells:
            step = self._known.get(cell.name)
            ceiling = decode_bytes.ceiling(step, 1, speed).request if step and speed and step >= self._least else None
            made.append(msgspec.structs.replace(cell, step_bytes=step, ceiling=ceiling))
        return tuple(made)
