"""Workloads: the reviewed file, names of cells, requests of a leg, and refusals."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.bench.recipes import workloads
from sparkwright.bench.recipes.workloads import (
    PromptDataset,
    RequestRule,
    Workload,
    WorkloadCell,
    Workloads,
)

FILE = workloads.load(Path(__file__).parents[2])
RULE = RequestRule(least=5, rounds=3, seconds=20, most=512)

cells = st.builds(
    WorkloadCell,
    prompt=st.integers(1, 1 << 20),
    answer=st.integers(1, 1 << 20),
    concurrency=st.integers(1, 1024),
    texts=st.sampled_from(["", "sharegpt", "speed-bench"]),
)


@given(cells)
def test_name_gives_the_cell_back(cell: WorkloadCell) -> None:
    assert WorkloadCell.parse(cell.name) == cell


@pytest.mark.parametrize(
    "name",
    ["", "1024/1024", "1/1 c0", "0/1 c1", "1/0 c1", "1/1 c1025", "9999999/1 c1", "1/1 c1 ", "A 1/1 c1", "1/1 c1\n", "fastest"],
)
def test_name_of_no_workload_is_refused(name: str) -> None:
    with refusal("usage", match="no workload"):
        FILE.cells(name)


def test_workloads_join_without_repeating_a_cell() -> None:
    found = FILE.cells("primary", "ladder", "64/64 c2")
    names = [cell.name for cell in found]
    assert len(set(names)) == len(names) < len(FILE.cells("primary")) + len(FILE.cells("ladder")) + 1
    assert found[: len(FILE.cells("primary"))] == FILE.cells("primary")
    assert found[-1] == WorkloadCell(64, 64, 2)


@given(cells, st.one_of(st.none(), st.floats(1e-4, 1e4)), st.floats(1.0, 10.0))
def test_leg_has_enough_requests_in_whole_rounds(cell: WorkloadCell, seconds: float | None, slower: float) -> None:
    count = RULE.requests(cell, seconds)
    fewest = max(RULE.least, RULE.rounds * cell.concurrency)
    assert fewest <= count <= max(fewest, RULE.most) + cell.concurrency - 1
    assert count % cell.concurrency == 0
    assert seconds is None or RULE.requests(cell, seconds * slower) <= count


CELL = {"prompt": 1, "answer": 1}

BROKEN: dict[str, list[dict[str, Any]]] = {
    "no cells": [],
    "no prompt": [{**CELL, "prompt": 0}],
    "an unknown metric": [{**CELL, "primary": ["speed"]}],
    "fewer requests than at a time": [{**CELL, "concurrency": 8, "requests": 4}],
    "an unknown field": [{**CELL, "seed": 4}],
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_workload_is_refused(case: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"why": "w", "source": "s", "cells": BROKEN[case]}, Workload)


def test_cell_of_an_undescribed_dataset_is_refused() -> None:
    workload = {"why": "w", "source": "s", "cells": [{**CELL, "texts": "novels"}]}
    with pytest.raises(msgspec.ValidationError, match="novels is not among the texts"):
        msgspec.convert({"rule": msgspec.to_builtins(RULE), "texts": {}, "workloads": {"a": workload}}, Workloads)


def test_dataset_other_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Why?"}\n')
    PromptDataset("w", "unresolved").verify(path)
    PromptDataset("w", hashlib.sha256(path.read_bytes()).hexdigest()).verify(path)
    with refusal("file-invalid", match="not the pinned file"):
        PromptDataset("w", "0" * 64).verify(path)
