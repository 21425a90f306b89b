"""Files from outside: reading ends, with the content or a refusal; YAML that would change a meaning in silence is an error that names the place."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.core import files, strict_yaml
from sparkwright.forks import lock
from sparkwright.forks.lock import Lock
from sparkwright.forks.stack import Project

COMMIT, TREE, SHA256 = "a1" * 20, "b2" * 20, "c3" * 32

STACK = """\
stack: "2026.11"
arch: "12.1f"
label: "spark.1"
forks:
  mini:
    build: backend
    sources:
      git: {url: "https://upstream.example/mini.git", ref: "v1"}
"""

LOCK = f"""\
format: 1
stack: "2026.11"
forks:
  mini:
    git: {{url: "https://upstream.example/mini.git", ref: "v1", commit: "{COMMIT}", tree: "{TREE}"}}
    sdist: {{name: mini, version: "1.0", filename: mini-1.0.tar.gz, sha256: "{SHA256}", size: 3, tree: "{TREE}"}}
"""


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record with what the reviewed files hold: text that may look like a number."""

    commit: str
    arch: str = ""
    names: tuple[str, ...] = ()


@pytest.fixture(name="project")
def _project(tmp_path: Path) -> Project:
    folder = tmp_path / "forks" / "2026.11"
    folder.mkdir(parents=True)
    (folder / "stack.yaml").write_text(STACK)
    return Project(tmp_path, "2026.11")


def refused(text: str, kind: Any = Pin) -> str:
    """Return everything that is said when *text* is refused."""
    with refusal("file-invalid") as caught:
        strict_yaml.parse(text, kind, "pins.yaml")
    assert "pins.yaml" in caught.value.what
    return "\n".join([caught.value.what, *caught.value.details])


#: Doubles with each line; no alias is expanded, so that a file of some lines cannot fill the memory.
BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('commit: "1234567"\nxcommit: x\n', "`xcommit`"),
        ("arch: '12.1f'\n", "`commit`"),
        ("", "null"),
        ("commit: a\narch: b\ncommit: c\n", "'commit' appears twice"),
        ("commit: a\narch: b\ncommit: c\n", "line 3"),
        (f"commit: {'1234567890' * 4}\n", "$.commit"),
        ("commit: 0123456\n", "$.commit"),
        ("commit: 1_234_567\n", "$.commit"),
        (BOMB, "alias *a is not allowed"),
        ("a: {<<: {commit: x}}\n", "merge keys are not allowed"),
    ],
    ids=["unknown", "missing", "emptied", "duplicate", "line of the duplicate", "digits", "octal", "underscores", "alias", "merge"],
)
def test_a_change_of_meaning_is_refused_where_it_stands(text: str, words: str) -> None:
    """
    Typos in field names, missing and repeated fields, commits that YAML reads as numbers, and aliases and merge keys, which bring in what a
    review does not see in its place, are errors that name them.
    """
    assert words in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "- " * 100_000,
        "{a: " * 100_000,
        "commit: [a\n",
        "commit: 2026-13-45\n",
        "? [a]\n: b\n",
        "commit: 0x_\n",
        "commit: " + "9" * 6000,
        "commit: !!bool maybe\n",
        "commit: !!timestamp soon\n",
        "commit: !!python/object/apply:os.getcwd []\n",
        "\tcommit: a\n",
        "commit: a\n---\ncommit: b\n",
        "commit: \x00\n",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_plain_yaml_is_refused(text: str) -> None:
    """Broken text, endless nesting, impossible values and foreign tags end in the same kind of error, never in a crash."""
    assert refused(text, Any if text.startswith(("[", "-", "{")) else Pin)


PLAIN = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=40)


@given(PLAIN, st.one_of(PLAIN, st.text(string.digits + "._:+-eExXoO~ ", max_size=45)), st.lists(PLAIN, max_size=3))
def test_what_is_written_is_read_back(commit: str, arch: str, names: list[str]) -> None:
    """Reading what was written gives the same record, for every text."""
    record = Pin(commit, arch, tuple(names))

    assert strict_yaml.parse(strict_yaml.dump(record), Pin, "x") == record


# Files.


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
        b'{"commit": "1", "commit": "2"}', b'{"commit": 1}', b'{"commit": "1", "y": 2}', b"", b"\xff", b'{"commit": NaN}',
        b"[" * 100_000, b'{"commit":' * 100_000, b'{"commit": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_json_is_read_strictly(tmp_path: Path, data: bytes) -> None:
    """Repeated keys, other types, deep nesting and numbers of thousands of digits are refused."""
    (tmp_path / "a.json").write_bytes(data)
    with refusal("file-invalid", match=r"a\.json is not the expected JSON"):
        files.read_json(tmp_path / "a.json", Pin)


# The lock.


def locked(project: Project, text: str) -> Lock:
    project.lock_file.write_text(text)
    return lock.read(project)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format: 1", "format: 2"),
        (COMMIT, COMMIT[:6]),
        (COMMIT, COMMIT.upper()),
        (COMMIT, "v0.33.0"),
        (COMMIT, COMMIT + "0"),
        (COMMIT, ""),
        (TREE, TREE[:12]),
        (TREE, "HEAD^{tree}"),
        (SHA256, SHA256[:-1]),
        (SHA256, SHA256.upper()),
        ("mini-1.0.tar.gz", "../mini-1.0.tar.gz"),
        ("mini-1.0.tar.gz", "/mini-1.0.tar.gz"),
        ("mini-1.0.tar.gz", ".part"),
    ],
)
def test_a_lock_with_a_malformed_value_is_refused(project: Project, field: str, value: str) -> None:
    """Short, uppercase or invented ids and file names that are paths are errors that name the place."""
    with refusal("file-invalid") as caught:
        locked(project, LOCK.replace(field, value, 1))

    assert re.search("matching regex|enum", caught.value.details[0])
    assert "lock.yaml" in caught.value.what


@pytest.mark.parametrize("change", [('"2026.11"', '"2026.05"'), ("  mini:", "  other:")])
def test_the_lock_of_another_stack_is_refused(project: Project, change: tuple[str, str]) -> None:
    """A lock that was copied from another stack, or has other forks, is an error that shows both."""
    with refusal("file-invalid", match="does not belong to") as caught:
        locked(project, LOCK.replace(*change))

    assert [line.split(":")[0] for line in caught.value.details] == ["lock", "stack"]
