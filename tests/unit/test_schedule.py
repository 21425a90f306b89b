"""The schedule for ninja: measured costs, and the same commands in another order, within the memory."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.builder import schedule
from sparkwright.builder.schedule import HEAVY, CompileOrder, Cost, Costs
from sparkwright.core.store import Store

#: Of the test environment, else of the machine.
NINJA = Path(
    shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja") or "ninja"
)
#: As CMake writes it, with every kind of escape, and a pool, an order-only input and a link.
TEXT = """\
# A comment that ends in a dollar $
flags = -c
pool own
  depth = 1
rule CUDA_COMPILER__a
  command = nvcc $FLAGS $flags $in -o $out
build all: phony a.so

build dir/short.cu.o: CUDA_COMPILER__a /s$ rc/short.cu || order
  FLAGS = -O3
build dir/lo$:ng.cu.o | side: CUDA_COMPILER__a /s$ rc/long$$.cu $
    | implicit.h
  FLAGS = -O2 $
    -O1
build dir/large.cu.o: CUDA_COMPILER__a /s$ rc/large.cu
build dir/pooled.cu.o: CUDA_COMPILER__a /s$ rc/pooled.cu
  pool = own
build order: phony
build a.so: CUDA_COMPILER__a dir/short.cu.o dir/large.cu.o dir/lo$:ng.cu.o dir/pooled.cu.o
default all
"""
COSTS = {
    "/s rc/short.cu": Cost(1, 100),
    "/s rc/long$.cu": Cost(50, 100),
    "/s rc/large.cu": Cost(9, HEAVY + 1),
    "/s rc/pooled.cu": Cost(8, HEAVY + 1),
}


def commands(build: Path, file: str) -> list[str]:
    """Return the commands that ninja would run, sorted."""
    words = [str(NINJA), "-C", str(build), "-f", file, "-t", "commands", "all"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return sorted(done.stdout.splitlines()[1:])


def test_the_schedule_has_the_same_commands_longest_first(tmp_path: Path) -> None:
    """Large units get the pool; build.ninja stays as it is."""
    (tmp_path / "build.ninja").write_text(TEXT)
    schedule.write_schedule(tmp_path, tmp_path, COSTS.__getitem__, 2, 10 * HEAVY)
    text = (tmp_path / schedule.SCHEDULE).read_text()

    assert commands(tmp_path, "build.ninja") == commands(tmp_path, schedule.SCHEDULE)
    places = [text.index(f"build dir/{name}") for name in ("lo$:ng", "large", "pooled", "short")]
    assert places == sorted(places)
    assert text.count("pool = heavy") == 2
    assert (tmp_path / "build.ninja").read_text() == TEXT


def test_files_that_build_ninja_names_are_ordered_by_their_longest_unit(tmp_path: Path) -> None:
    """FlashInfer writes a file for each module, with absolute names as ninja sees them."""
    rule = "rule cc\n  command = cc -c $in -o $out\n"
    for name in ("a", "b"):
        text = f"{rule}build /in/{name}.o: cc /src/{name}.cu\n"
        (tmp_path / f"{name}.ninja").write_text(text)
    (tmp_path / "build.ninja").write_text("subninja /in/a.ninja\nsubninja /in/b.ninja\n")
    costs = {"/src/a.cu": Cost(1, HEAVY * 2), "/src/b.cu": Cost(9, HEAVY * 2)}

    order = schedule.write_schedule(tmp_path, Path("/in"), costs.__getitem__, 4, HEAVY * 2)

    assert order == CompileOrder(4, 1)
    names = (tmp_path / schedule.SCHEDULE).read_text().split()[-4:]
    assert names[1::2] == [f"/in/{name}.{schedule.SCHEDULE}" for name in ("b", "a")]
    assert "pool = heavy" in (tmp_path / f"a.{schedule.SCHEDULE}").read_text()


units = st.lists(
    st.builds(
        Cost,
        seconds=st.integers(1, 100).map(float),
        megabytes=st.integers(100, 9000),
    ),
    max_size=20,
)


@given(units, st.integers(1, 12), st.integers(9000, 60000))
def test_no_units_that_can_meet_exceed_the_memory(
    units: Sequence[Cost], cores: int, megabytes: int
) -> None:
    """The largest units that the order lets run together fit, whatever their times are."""
    order = schedule.order(units, cores, megabytes)
    sizes = sorted((unit.megabytes for unit in units), reverse=True)
    heavy = [size for size in sizes if size > HEAVY][: min(order.heavy, order.jobs)]
    light = [size for size in sizes if size <= HEAVY][: order.jobs - len(heavy)]

    assert 1 <= order.jobs <= cores
    assert order.heavy >= 1
    assert sum(heavy) + sum(light) <= megabytes


@pytest.mark.parametrize(
    ("unit", "expected"), [("both.cu", Cost(12.35, 999)), ("shipped.cu", Cost(20, 2000)), ("other.cu", Cost(20, 1200))]
)
def test_measured_costs_count_before_guesses(tmp_path: Path, unit: str, expected: Cost) -> None:
    """This machine's last record first, then the stack's."""

    def costs() -> Costs:
        return Costs(Store(tmp_path), "vllm", {"shipped.cu": Cost(20, 2000), "both.cu": Cost(21, 2100)})

    costs().add({"both.cu": Cost(1, 100), "more.cu": Cost(2, 200)})
    costs().add({"both.cu": Cost(12.35, 999)})

    assert costs().expected(unit) == expected
    assert costs().recorded.keys() == {"both.cu", "more.cu"}
