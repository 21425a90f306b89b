"""Files from outside: whatever lies at a path, reading it ends, with its content or with a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.core import files, strict_yaml


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small record."""

    x: int


def test_read_json_returns_the_record(tmp_path: Path) -> None:
    """A regular file, also behind a link, is read as the record."""
    (tmp_path / "a.json").write_text('{"x": 1}')
    (tmp_path / "b.json").symlink_to("a.json")

    assert files.read_json(tmp_path / "b.json", Point) == Point(1)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path), lambda _: None,
        lambda path: path.write_bytes(b"x" * (strict_yaml.LARGEST + 1)), lambda path: path.write_bytes(b"gr\xf6\xdfe"),
    ],
    ids=["pipe", "folder", "device", "loop", "missing", "large", "latin"],
)  # fmt: skip
def test_read_refuses_what_is_no_bounded_text_file(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A pipe without a writer, an endless device, a loop of links and the like are refused at once."""
    make(tmp_path / "file")
    with refusal("file-invalid"):
        strict_yaml.load(tmp_path / "file", Any)


@pytest.mark.parametrize(
    "data",
    [
        b'{"x": 1, "x": 2}', b'{"x": "1"}', b'{"x": 1, "y": 2}', b"", b"\xff", b'{"x": NaN}',
        b"[" * 100_000, b'{"x":' * 100_000, b'{"x": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_json_is_read_strictly(tmp_path: Path, data: bytes) -> None:
    """Repeated keys, other types, deep nesting and numbers of thousands of digits are refused."""
    (tmp_path / "a.json").write_bytes(data)
    with refusal("file-invalid", match=r"a\.json is not the expected JSON"):
        files.read_json(tmp_path / "a.json", Point)
