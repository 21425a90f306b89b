"""What is measured: cells and their names, how many requests a leg makes, the reviewed sets, and files of prompts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.bench.recipes import texts, workloads
from sparkwright.bench.recipes.workloads import (
    Cell,
    Rule,
    Texts,
    Workload,
    Workloads,
    parse,
    seconds,
)

ROOT = Path(__file__).parents[2]
FILE = workloads.load(ROOT)
RULE = Rule(least=5, rounds=3, seconds=20, most=512)

cells = st.builds(
    Cell,
    prompt=st.integers(1, 1 << 20),
    answer=st.integers(1, 1 << 20),
    concurrency=st.integers(1, 1024),
    texts=st.sampled_from(["", "sharegpt", "speed-bench"]),
)


@given(cells)
def test_a_name_tells_the_cell(cell: Cell) -> None:
    """A cell's name gives the cell back, and its requests are random where no texts are named."""
    assert parse(cell.name) == cell
    assert (cell.prompts == "random") == (not cell.texts)


BAD_NAMES = [
    "", "1024", "1024/1024", "1024/1024 c0", "0/1 c1", "1/0 c1", "1/1 c1025", "9999999/1 c1", "1/1 c1 ", "A 1/1 c1", "1/1 c1\n", "-1/1 c1",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_is_no_cell_is_refused(name: str) -> None:
    """A name that lacks a part, or whose numbers no server takes, is a mistake of the user."""
    with refusal("usage", match="no cell"):
        parse(name)


@given(cells, st.one_of(st.none(), st.floats(1e-4, 1e4)), st.floats(1.0, 10.0))
def test_a_leg_has_enough_requests_in_whole_rounds(cell: Cell, each: float | None, slower: float) -> None:
    """Never fewer than the rule's least and its rounds, never beyond its most but for these, in whole rounds; slower ones are no more."""
    count = RULE.requests(cell, each)
    fewest = max(RULE.least, RULE.rounds * cell.concurrency)

    assert count >= fewest
    assert count % cell.concurrency == 0
    assert count <= max(fewest, RULE.most) + cell.concurrency - 1
    if each is not None:
        assert RULE.requests(cell, each * slower) <= count
        assert count == RULE.requests(cell, each), "the same before every leg, on both sides"


def test_a_leg_of_short_requests_lasts_as_long_as_the_rule_says() -> None:
    """Requests of half a second fill 20 seconds with 40 of them; requests of a minute are five."""
    assert RULE.requests(Cell(128, 128), 0.5) == 40
    assert RULE.requests(Cell(1024, 1024), 60.0) == 5
    assert RULE.requests(Cell(1024, 1024, 8), 60.0) == 24
    assert RULE.requests(Cell(32, 64, 4, requests=24), 0.001) == 24, "what the cell says outweighs the rule"
    assert seconds(Cell(128, 128, 4), 10, 0.5, 0.01) == pytest.approx(3 * (0.5 + 127 * 0.01))


def test_the_reviewed_sets_are_those_that_the_gate_and_the_reports_name() -> None:
    """Six cells decide, by their metric; the fourteen points and the ladder are those of the seed reports."""
    primary = {cell.name: cell.primary for cell in FILE.cells("primary")}
    assert primary == {
        "128/128 c1": ("tpot", "ttft"), "1024/1024 c1": ("tpot", "ttft"), "8192/1024 c1": ("tpot", "ttft"),
        "32768/256 c1": ("tpot", "ttft"), "1024/1024 c8": ("rate",), "1024/1024 c32": ("rate",),
    }  # fmt: skip
    pareto = {(cell.prompt, cell.answer) for cell in FILE.cells("pareto")}
    assert len(pareto) == 14
    # The six that the reports print, and the four cells of one request that decide.
    assert {(128, 128), (256, 256), (1024, 1024), (4096, 4096), (8192, 1024), (32768, 256)} <= pareto
    assert all(cell.concurrency == 1 and not cell.primary for cell in FILE.cells("pareto"))
    assert [cell.concurrency for cell in FILE.cells("ladder")] == [1, 2, 4, 8, 16, 32, 64]
    assert {cell.name for cell in FILE.cells("benchy")} >= {"2048/128 c1", "128/2048 c1"}
    assert all(cell.texts and FILE.texts[cell.texts].sha256 == "unresolved" for cell in FILE.cells("sharegpt", "speed-bench"))
    assert all(cell.length <= 128 for cell in FILE.cells("quick")), "for machines without a GPU"


def test_sets_are_put_together_without_repeating_a_cell() -> None:
    """A cell of two sets is measured once, as the first names it, and a cell may be named by itself."""
    found = FILE.cells("primary", "ladder", "64/64 c2")

    assert len({cell.name for cell in found}) == len(found) == 6 + 7 - 3 + 1
    assert found[1].primary == ("tpot", "ttft")
    assert found[-1] == Cell(64, 64, 2)
    with refusal("usage", match="no workload"):
        FILE.cells("fastest")


BROKEN = {
    "a cell twice": {"why": "w", "source": "s", "cells": [{"prompt": 1, "answer": 1}, {"prompt": 1, "answer": 1, "requests": 5}]},
    "no cells": {"why": "w", "source": "s", "cells": []},
    "no prompt": {"why": "w", "source": "s", "cells": [{"prompt": 0, "answer": 1}]},
    "a metric twice": {"why": "w", "source": "s", "cells": [{"prompt": 1, "answer": 1, "primary": ["tpot", "tpot"]}]},
    "an unknown metric": {"why": "w", "source": "s", "cells": [{"prompt": 1, "answer": 1, "primary": ["speed"]}]},
    "fewer requests than at a time": {"why": "w", "source": "s", "cells": [{"prompt": 1, "answer": 1, "concurrency": 8, "requests": 4}]},
    "an unknown field": {"why": "w", "source": "s", "cells": [{"prompt": 1, "answer": 1, "seed": 4}]},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_set_is_refused(case: str) -> None:
    """A set that cannot be measured, or would be misread, does not load."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(BROKEN[case], Workload)


def test_a_cell_of_texts_needs_the_texts() -> None:
    """A set cannot name a file of prompts that the file of workloads does not describe."""
    cell = {"prompt": 1, "answer": 1, "texts": "novels"}
    whole = {"rule": msgspec.to_builtins(RULE), "texts": {}, "workloads": {"a": {"why": "w", "source": "s", "cells": [cell]}}}
    with pytest.raises(msgspec.ValidationError, match="novels is not among the texts"):
        msgspec.convert(whole, Workloads)


def lines(path: Path, *found: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


def test_a_file_of_prompts_is_counted_and_held_against_its_digest(tmp_path: Path) -> None:
    """A file is taken where nobody has pinned it, and is said to be unpinned; where somebody has, it must be that very file."""
    path = lines(tmp_path / "prompts.jsonl", *({"prompt": f"Question {number}?", "other": 1} for number in range(20)))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()

    assert texts.check(path, Texts("w", "unresolved")) == texts.Found(20, sha256, False)
    assert texts.check(path, Texts("w", sha256)).pinned
    with refusal("file-invalid", match="not the file of prompts"):
        texts.check(path, Texts("w", "0" * 64))


BAD_TEXTS: dict[str, bytes] = {
    "no prompts": b"",
    "too few": b'{"prompt": "one"}\n' * 15,
    "an empty line": b'{"prompt": "one"}\n' * 20 + b"\n",
    "an empty prompt": b'{"prompt": " "}\n' * 20,
    "no JSON": b"prompt\n" * 20,
    "no prompt": b'{"text": "one"}\n' * 20,
    "a list": b'["one"]\n' * 20,
    "no text": b'{"prompt": 5}\n' * 20,
    "no UTF-8": b'{"prompt": "\xff"}\n' * 20,
    "deep": (b'{"prompt": "one", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n") * 20,
    "a line without an end": b'{"prompt": "' + b"a" * (texts.LINE + 10) + b'"}\n',
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_hostile_file_of_prompts_is_refused(case: str, tmp_path: Path) -> None:
    """Whatever is no prompt in each line is an error that names the line, and nothing is read without bound."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(BAD_TEXTS[case])
    with refusal("file-invalid", match=r"prompts\.jsonl"):
        texts.check(path, Texts("w", "unresolved"))


def test_a_folder_is_no_file_of_prompts(tmp_path: Path) -> None:
    """A folder, or nothing at all, is refused as well."""
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with refusal("file-invalid"):
            texts.check(path, Texts("w", "unresolved"))
