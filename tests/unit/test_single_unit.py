"""Which unit of a build a name means."""

from __future__ import annotations

import pytest
from tests.refusals import refusal

from sparkwright.builder import pipeline
from sparkwright.builder.compile.ninja_file import CompileEdge

EDGES = [
    CompileEdge(path, f"{target}/{path}.o")
    for target, path in (
        ("_C", "csrc/topk.cu"),
        ("_C", "csrc/moe/topk.cu"),
        ("_moe", "csrc/moe/topk.cu"),
        ("_C", "csrc/bindings.cpp"),
    )
]


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("csrc/topk.cu", ["_C/csrc/topk.cu.o"]),
        ("moe/topk.cu", ["_C/csrc/moe/topk.cu.o", "_moe/csrc/moe/topk.cu.o"]),
        ("./bindings.cpp", ["_C/csrc/bindings.cpp.o"]),
        ("/usr/local/src/vllm/src/csrc/topk.cu", ["_C/csrc/topk.cu.o"]),
    ],
)
def test_a_unit_is_named_by_the_end_of_its_path(name: str, outputs: list[str]) -> None:
    """The whole path always means that source; a source of two targets has two objects."""
    assert [edge.output for edge in pipeline.matching_edges(EDGES, name)] == outputs


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("topk.cu", "csrc/moe/topk.cu"),
        ("tpk.cu", "csrc/topk.cu"),
    ],
)
def test_a_name_that_means_no_unit_or_several_is_refused_with_help(name: str, detail: str) -> None:
    """The error lists the candidates."""
    with refusal("usage") as raised:
        pipeline.matching_edges(EDGES, name)

    assert any(detail in line for line in raised.value.details)
    with refusal("usage"):
        pipeline.matching_edges([], name)
