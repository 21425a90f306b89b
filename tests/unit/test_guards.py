"""Guards: code that would fail at run time is found in the tree that is compiled, and so is a guard that guards nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.builder.arch import rules as archs
from sparkwright.builder.arch.rules import Guard
from sparkwright.builder.workspace import source_tree
from sparkwright.core import strict_yaml
from sparkwright.core.git import REGULAR, Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

GUARD = Guard(
    name="one-arch", fork="mini", files=("csrc/*.cu", "csrc/*.cuh"), patterns=("only_120<",),
    reason="It traps on 12.1.", todo="Pick the mend.", drop_when="nobody wraps a kernel",
)  # fmt: skip

TRAP = b"// gemm\nusing A = only_120<Gemm>;\nusing B = family<Gemm>;\nusing C = only_120<Other>;\n"
TREE = {"csrc/deep/er/gemm.cu": TRAP, "csrc/wrap.cuh": b"struct only_120 {};\n", "README.md": b"only_120<this> is prose\n"}
MENDED = TREE | {"csrc/deep/er/gemm.cu": TRAP.replace(b"only_120", b"family")}


def check(folder: Path, after: dict[str, bytes], **fields: object) -> None:
    """Check a tree that holds *after* by the guard with other *fields*."""
    objects = Objects(folder / "objects.git")
    before, tree = (objects.store_files((path, REGULAR, data) for path, data in files.items()) for files in (TREE, after))
    archs.check_guards(objects, before, tree, [msgspec.structs.replace(GUARD, **fields)])


def test_a_tree_without_the_text_passes(tmp_path: Path) -> None:
    """An exempt file may hold it, and so may a file that no pattern of paths covers."""
    check(tmp_path, MENDED)
    check(tmp_path, MENDED, patterns=("only_120",), exempt={"csrc/wrap.cuh": "defines it"})


def test_every_line_that_would_fail_is_listed_with_the_reason(tmp_path: Path) -> None:
    """The stage that makes the tree ends with the advice of the guard."""
    with refusal("arch-trap", match="2 lines of mini would fail at run time") as caught:
        check(tmp_path, TREE)
    assert caught.value.details == ("one-arch: It traps on 12.1.", "csrc/deep/er/gemm.cu:2", "csrc/deep/er/gemm.cu:4")
    assert caught.value.todo == "Pick the mend."


@pytest.mark.parametrize("fields", [{"files": ("gone/kernels.cu",)}, {"patterns": ("only_12O<",)}, {"exempt": {"csrc/deep/er/gemm.cu": "all of it"}}])
def test_a_guard_that_guards_nothing_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    """With paths or a text that upstream outgrew, or that somebody mistyped, it would pass for ever."""
    with refusal("rule-mismatch", match="guards nothing"):
        check(tmp_path, MENDED, **fields)


def test_the_stage_fails_and_keeps_no_tree(mini: Mini) -> None:
    """A guard that is added after the tree was made is checked all the same; and again, since a refused tree is not kept."""
    site = source_tree(mini.context(), "vllm").sites[0]
    path = mini.root / "build" / "demo" / "archs.yaml"
    guard = msgspec.structs.replace(GUARD, fork="vllm", files=("CMakeLists.txt",), patterns=(site.before,))
    rules = msgspec.structs.replace(archs.load(path), guards=(guard,))
    path.write_text(strict_yaml.dump(msgspec.to_builtins(rules)), "utf-8")
    for _ in range(2):
        with refusal("arch-trap"):
            source_tree(mini.context(), "vllm")
