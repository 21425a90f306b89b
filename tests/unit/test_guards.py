"""Guards: code that would fail at run time is found in the tree that is compiled, and a guard that guards nothing is found as well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.builder import source_tree
from sparkwright.builder.arch import rules as archs
from sparkwright.builder.arch.rules import Guard
from sparkwright.core import strict_yaml
from sparkwright.core.git import REGULAR
from sparkwright.core.git_store import Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

REVIEWED = sorted((Path(__file__).parents[2] / "build").glob("*/archs.yaml"))

GUARD = Guard(
    name="one-arch", fork="mini", files=("csrc/*.cu", "csrc/*.cuh"), patterns=("only_120<",),
    reason="It traps on 12.1.", todo="Pick the mend.", drop_when="nobody wraps a kernel",
)  # fmt: skip

TRAP = b"// gemm\nusing A = only_120<Gemm>;\nusing B = family<Gemm>;\nusing C = only_120<Other>;\n"
TREE = {"csrc/deep/er/gemm.cu": TRAP, "csrc/wrap.cuh": b"struct only_120 {};\n", "README.md": b"only_120<this> is prose\n"}
MENDED = TREE | {"csrc/deep/er/gemm.cu": TRAP.replace(b"only_120", b"family")}


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects.git")


def store(objects: Objects, files: dict[str, bytes]) -> str:
    return objects.store_files((path, REGULAR, data) for path, data in files.items())


def check(objects: Objects, after: dict[str, bytes], *checked: Guard, before: dict[str, bytes] = TREE) -> None:
    archs.check_guards(objects, store(objects, before), store(objects, after), checked)


def change(**fields: object) -> Guard:
    return msgspec.structs.replace(GUARD, **fields)


def test_a_tree_that_was_mended_passes(objects: Objects) -> None:
    check(objects, MENDED, GUARD)
    check(objects, TREE)


def test_every_line_that_would_fail_is_listed_with_the_reason(objects: Objects) -> None:
    """Files that no glob covers may hold the text, as may lines that hold only a part of it."""
    with refusal("arch-trap", match="2 lines of mini would fail at run time") as caught:
        check(objects, TREE, GUARD)
    assert caught.value.reference == "arch-trap"
    assert caught.value.details == ("one-arch: It traps on 12.1.", "  csrc/deep/er/gemm.cu:2", "  csrc/deep/er/gemm.cu:4")
    assert caught.value.todo == "Pick the mend."


def test_an_exempt_file_may_hold_the_text(objects: Objects) -> None:
    wide = change(patterns=("only_120",), exempt={"csrc/wrap.cuh": "defines it"})
    check(objects, MENDED, wide)
    with refusal("arch-trap"):
        check(objects, MENDED, change(patterns=("only_120",)))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"files": ("csrc/*.cu", "src/*.cu")}, "one-arch: no file matches src/*.cu"),
        ({"files": ("gone/kernels.cu",)}, "one-arch: no file matches gone/kernels.cu"),
        ({"patterns": ("only_120<", "only_12O<")}, "one-arch: no line holds 'only_12O<'"),
        ({"exempt": {"csrc/wrap.cuh": "defines it"}}, "one-arch: csrc/wrap.cuh needs no exemption"),
        ({"exempt": {"README.md": "prose"}}, "one-arch: README.md needs no exemption"),
        ({"exempt": {"csrc/deep/er/gemm.cu": "the only one"}}, "one-arch: no line holds 'only_120<'"),
    ],
)
def test_a_guard_that_guards_nothing_is_an_error(objects: Objects, fields: dict[str, object], line: str) -> None:
    """It would be content for ever: with a glob or a pattern that upstream outgrew, or that somebody mistyped."""
    with refusal("rule-mismatch", match="guards nothing") as caught:
        check(objects, MENDED, change(**fields))
    assert line in caught.value.details
    assert "drop_when" in caught.value.todo


def reviewed(mini: Mini, **fields: object) -> None:
    """Add a guard to the demo's reviewed rules."""
    path = mini.root / "build" / "demo" / "archs.yaml"
    rules = archs.load(path)
    guard = change(**{"fork": "vllm", "files": ("CMakeLists.txt",), **fields})
    path.write_text(strict_yaml.dump(msgspec.to_builtins(msgspec.structs.replace(rules, guards=(guard,)))), "utf-8")


def test_the_stage_fails_and_keeps_no_tree(mini: Mini) -> None:
    """A guard that is added after the tree was made is asked all the same; and again, since a refused tree is not kept."""
    before = source_tree.make(mini.session(), "vllm")
    site = before.sites[0]
    reviewed(mini, patterns=(site.before,))
    for _ in range(2):
        with refusal("arch-trap") as caught:
            source_tree.make(mini.session(), "vllm")
        assert f"  {site.file}:{site.line}" in caught.value.details


def test_one_name_and_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "archs.yaml"
    entry = msgspec.to_builtins(GUARD)
    path.write_text(strict_yaml.dump({"guards": [entry, entry]}), "utf-8")
    with refusal("file-invalid", match="one name"):
        archs.load(path)
    for field, value in (("patterns", []), ("patterns", [" "]), ("patterns", ["a\nb"]), ("files", []), ("reason", "")):
        path.write_text(strict_yaml.dump({"guards": [entry | {field: value}]}), "utf-8")
        with refusal("file-invalid"):
            archs.load(path)


@pytest.mark.parametrize("path", REVIEWED, ids=lambda path: path.parent.name)
def test_the_reviewed_guards_are_for_forks_of_their_stack(path: Path) -> None:
    known = strict_yaml.load(path.parents[2] / "forks" / path.parent.name / "stack.yaml", dict)["forks"]
    assert {guard.fork for guard in archs.load(path).guards} <= set(known)
