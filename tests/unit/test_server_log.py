"""Logs of any size and shape: what is looked for is found, and nothing else grows."""

from __future__ import annotations

import itertools
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.bench.server import server_log
from sparkwright.bench.server.server_log import (
    BLOCK,
    KEPT,
    LONGEST,
    LogInvalid,
    LogPattern,
    LogScanner,
    read_from,
    scan,
)

CHOSEN = LogPattern("for NVFP4 GEMM", r"Using (?P<value>\w+) for NVFP4 GEMM")
SIZE = LogPattern("KV cache size", r"KV cache size: (?P<value>[\d,]+) tokens")
BOTH = {"chosen": CHOSEN, "size": SIZE}
LINE = "(Worker pid=7) INFO 11-21 22:31:50 [__init__.py:1303] Using MarlinNvFp4LinearKernel for NVFP4 GEMM\n"


def test_the_values_of_a_line_are_counted(tmp_path: Path) -> None:
    """Each value is kept once, with how often it came; the line's colour is not part of it."""
    log = tmp_path / "log"
    log.write_text(LINE * 2 + "\x1b[32mUsing \x1b[0mOther for NVFP4 GEMM\n")
    found = scan(log, BOTH)
    assert found["chosen"].values == {"MarlinNvFp4LinearKernel": 2, "Other": 1}
    assert found["chosen"].count == 3
    assert found["size"].count == 0


@given(st.lists(st.integers(0, 400), max_size=8), st.sampled_from(["\n", "\r", "\r\n"]))
def test_it_does_not_matter_where_the_log_is_cut_into_pieces(cuts: list[int], end: str) -> None:
    """A line is found whole, however the log arrived."""
    data = ("x" * 50 + end + LINE.replace("\n", end) + "KV cache size: 1,024 tokens" + end + LINE.rstrip()).encode()
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    scanner = LogScanner(BOTH)
    for begin, stop in itertools.pairwise(places):
        scanner.feed(data[begin:stop])
    scanner.close()
    assert scanner.lines["chosen"].count == 2
    assert scanner.lines["size"].values == {"1,024": 1}


def test_a_gigabyte_is_read_in_little_memory(tmp_path: Path) -> None:
    """200 MB of lines that matter and lines that do not take no more memory than a few blocks, and only the first lines are kept."""
    log = tmp_path / "log"
    block = ((LINE + "INFO nothing of interest, but a hundred letters of it, as most lines of a log are like this one\n") * 5000).encode()
    with log.open("wb") as sink:
        for _ in range(200_000_000 // len(block)):
            sink.write(block)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = scan(log, BOTH)["chosen"]
    assert found.count == 5000 * (200_000_000 // len(block))
    assert len(found.texts) == KEPT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000, "kilobytes"


def test_different_values_without_end_are_not_kept() -> None:
    """A log that names a new kernel in each line fills no table."""
    scanner = LogScanner({"chosen": CHOSEN})
    scanner.feed(b"".join(b"Using K%d for NVFP4 GEMM\n" % number for number in range(100_000)))
    assert scanner.lines["chosen"].count == 100_000
    assert len(scanner.lines["chosen"].values) == KEPT


def test_a_log_without_line_ends_is_one_cut_line(tmp_path: Path) -> None:
    """Only the beginning of an endless line is looked at, and the line after it is found again."""
    log = tmp_path / "log"
    with log.open("wb") as sink:
        sink.write(LINE.rstrip().encode() + b" ")
        for _ in range(40):
            sink.write(b"x" * BLOCK)
        sink.write(LINE.rstrip().encode())
        sink.write(b"\n" + LINE.encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert scan(log, {"chosen": CHOSEN})["chosen"].count == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000, "kilobytes"


def test_the_longest_line_that_counts_is_looked_at_whole() -> None:
    """A line of the most bytes is whole; behind them nothing is seen."""
    for before, count in ((LONGEST - len(LINE), 1), (LONGEST, 0)):
        scanner = LogScanner({"chosen": CHOSEN})
        scanner.feed(b" " * before + LINE.encode())
        assert scanner.lines["chosen"].count == count


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    """Binary files, holes, folders, pipes and missing files are no logs, and reading them ends."""
    hole, core, pipe = tmp_path / "hole", tmp_path / "core", tmp_path / "pipe"
    with hole.open("wb") as sink:
        sink.truncate(300_000_000)
    core.write_bytes(LINE.encode() + os.urandom(100_000))
    os.mkfifo(pipe)
    for bad in (hole, core, pipe, tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(LogInvalid):
            scan(bad, {"chosen": CHOSEN})


def test_a_log_may_be_too_large(tmp_path: Path) -> None:
    """A file of more bytes than a log has is refused without being read."""
    log = tmp_path / "log"
    with log.open("wb") as sink:
        sink.truncate(server_log.LARGEST + 1)
    with pytest.raises(LogInvalid, match="more than"):
        scan(log, {"chosen": CHOSEN})


def test_a_growing_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    """Each look sees only what is new, and a line that was half there is seen once, whole."""
    log = tmp_path / "log"
    scanner = LogScanner({"chosen": CHOSEN})
    log.write_text(LINE + LINE[:40])
    place = read_from(log, 0, scanner)
    assert scanner.lines["chosen"].count == 1
    with log.open("a") as sink:
        sink.write(LINE[40:])
    assert read_from(log, place, scanner) == 2 * len(LINE)
    assert scanner.lines["chosen"].count == 2
