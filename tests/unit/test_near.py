"""Which units lie nearest to a change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkwright.builder.compile import affected_units

FILES = {
    "csrc/a.cu": b'#include "shared/first.cuh"\n',
    "csrc/b.cu": b"  #  include <shared/second.cuh>\n",
    "csrc/deep/c.cpp": b'#include "../shared/first.cuh"\n',
    "csrc/deep/local.h": b"",
    "csrc/deep/d.cu": b'#include "local.h"\n',
    "csrc/local.h": b"",
    "csrc/e.cu": b'// #include "shared/first.cuh" is not needed here\n#include "local.h"\n',
    "csrc/shared/first.cuh": b'#include "second.cuh"\n',
    "csrc/shared/second.cuh": b'#include "first.cuh"\n',
}


def test_a_unit_is_near_when_it_or_a_header_that_it_reaches_changes() -> None:
    """Includes are followed through headers, around circles, beside the including file first, and by the end of the path else."""
    assert affected_units.reached(FILES, {"csrc/shared/second.cuh"}) == {
        "csrc/shared/second.cuh", "csrc/shared/first.cuh", "csrc/a.cu", "csrc/b.cu", "csrc/deep/c.cpp",
    }  # fmt: skip
    assert affected_units.reached(FILES, {"csrc/deep/local.h"}) == {"csrc/deep/local.h", "csrc/deep/d.cu"}
    assert affected_units.reached(FILES, {"csrc/local.h"}) == {"csrc/local.h", "csrc/e.cu"}
    assert affected_units.reached(FILES, {"csrc/e.cu"}) == {"csrc/e.cu"}


@given(st.data())
def test_what_is_near_grows_with_what_changes(data: st.DataObject) -> None:
    """The files near two changes together are those near the one and those near the other."""
    one = data.draw(st.sets(st.sampled_from(sorted(FILES))))
    other = data.draw(st.sets(st.sampled_from(sorted(FILES))))

    assert affected_units.reached(FILES, one | other) == affected_units.reached(FILES, one) | affected_units.reached(FILES, other)
