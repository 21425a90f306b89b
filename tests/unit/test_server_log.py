"""Logs of any size and shape: the lines that are looked for are found, and nothing else grows."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.bench.server import server_log
from sparkwright.bench.server.server_log import (
    KEPT,
    LogInvalid,
    LogLines,
    LogPattern,
    LogScanner,
    scan,
)

CHOSEN = LogPattern("for NVFP4 GEMM", r"Using (?P<value>\w+) for NVFP4 GEMM")
BOTH = {"chosen": CHOSEN, "size": LogPattern("KV cache size", r"KV cache size: (?P<value>[\d,]+) tokens")}
LINE = "(Worker pid=7) INFO 11-21 22:31:50 [__init__.py:1303] Using MarlinNvFp4LinearKernel for NVFP4 GEMM\n"


def values(data: bytes, log: Path) -> LogLines:
    """Return the lines of `CHOSEN` in a log with *data*."""
    log.write_bytes(data)
    return scan(log, BOTH)["chosen"]


def test_values_of_a_line_are_counted_without_its_colour(tmp_path: Path) -> None:
    lines = values((LINE * 2 + "\x1b[32mUsing \x1b[0mOther for NVFP4 GEMM\n").encode(), tmp_path / "log")
    assert (lines.count, lines.values) == (3, {"MarlinNvFp4LinearKernel": 2, "Other": 1})


@given(st.lists(st.integers(0, 400), max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_growing_log_gives_the_same_lines_wherever_it_is_cut(cuts: list[int], end: str) -> None:
    data = ("x" * 50 + "\r" + LINE.replace("\n", end) + "KV cache size: 1,024 tokens" + end + LINE.rstrip()).encode()
    scanner = LogScanner(BOTH)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        for cut in sorted({*(min(cut, len(data)) for cut in cuts), len(data)}):
            log.write_bytes(data[:cut])
            scanner.read(log)
        scanner.read(log, final=True)
    assert scanner.lines["chosen"].count == 2
    assert scanner.lines["size"].values == {"1,024": 1}


def test_values_without_end_are_not_kept(tmp_path: Path) -> None:
    lines = values(b"".join(b"Using K%d for NVFP4 GEMM\n" % number for number in range(10_000)), tmp_path / "log")
    assert (lines.count, len(lines.values)) == (10_000, KEPT)


def test_line_without_end_takes_little_memory_and_hides_no_other(tmp_path: Path) -> None:
    data = LINE.rstrip().encode() + b" " + b"x" * 40_000_000 + b"\n" + LINE.encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert values(data, tmp_path / "log").count == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000, "kilobytes"


@pytest.mark.parametrize(
    "make",
    [
        lambda log: log.write_bytes(LINE.encode() + b"\0" * 100), lambda log: log.write_bytes(b" " * 1001), os.mkfifo, Path.mkdir, Path.exists,
        lambda log: log.symlink_to("/dev/zero"),
    ],
    ids=["hole", "large", "pipe", "folder", "missing", "device"],
)  # fmt: skip
def test_file_that_is_no_log_is_refused(make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "LARGEST", 1000)
    make(tmp_path / "log")
    with pytest.raises(LogInvalid):
        scan(tmp_path / "log", BOTH)
