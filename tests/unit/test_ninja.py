"""Compiling with real ninja, gcc and ccache: order, failures, and what a kill leaves; the schedule for ninja."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import processes

from sparkwright.builder import ninja
from sparkwright.builder.ninja import HEAVY, LIGHT, BuildFolder, Cost
from sparkwright.builder.sandbox import Sandbox
from sparkwright.builder.toolchain import Toolchain
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Of the test environment, else of the machine.
NINJA = Path(
    shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja") or "ninja"
)
#: Is followed by what a unit does the first time.
FIRST = "test -e $2.flag ||"
#: A compiler for sources that are shell scripts: it runs the source and makes a copy of it.
COMPILER = '. "$2"\necho begun > "$4"\ncp "$2" "$4"\n'

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")


class Work:
    """A work folder as CMake leaves it; every unit is a shell script."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.build = folder, folder / "src", folder / "build"
        self.trace = folder / "trace"
        for path in (self.source, self.build):
            path.mkdir(parents=True)
        (folder / "compiler").write_text(COMPILER)
        self.costs: dict[str, Cost] = {}

    def add(self, name: str, text: str, seconds: float = 1) -> None:
        """Add a unit with its expected cost, which reports its start and its end, and write build.ninja."""
        text = f"echo + {name} >> {self.trace}\n{text}\necho - {name} >> {self.trace}\n"
        (self.source / name).write_text(text)
        self.costs[name] = Cost(seconds, 100)
        launcher = ninja.install_launcher(self.folder)
        self.build.joinpath("build.ninja").write_text(
            f"launcher = {sys.executable} -IS {launcher}\n"
            f"rule script\n  command = $launcher sh {self.folder}/compiler -c $in -o $out\n"
            + "".join(f"build {unit}.o: script {self.source}/{unit}\n" for unit in self.costs)
        )

    def compile(self, cores: int = 2) -> list[str]:
        """Compile everything, and return the units."""
        store, project = Store(self.folder / "store"), Project(Path(__file__).parents[2], "2026.11")
        context = RunContext(project, store, ("vllm",), self.folder, jobs=cores, memory=10**10)
        tools = Toolchain("key", NINJA.parents[1])
        folder = BuildFolder(context, tools, "vllm", self.folder, Sandbox("none"), os.environ)
        return sorted(call.unit for call in folder.compile((), self.costs))

    def events(self) -> list[str]:
        """Return the starts and ends of scripts, in their order."""
        return self.trace.read_text().splitlines() if self.trace.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Return the processes that work in this folder."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.folder) in " ".join(process.info["cmdline"] or ()) and process.pid != os.getpid()
        ]


@pytest.fixture(name="work")
def _work(tmp_path: Path) -> Work:
    return Work(tmp_path / "work")


def test_a_unit_that_was_killed_for_memory_is_compiled_again_alone(work: Work) -> None:
    """The first kill leaves the other units; the second try has the machine to itself."""
    work.add("killed.cu", f"{FIRST} {{ touch $2.flag; sleep 0.1; kill -KILL $$; }}", 9)
    work.add("other.cu", "sleep 0.4", 8)
    work.add("later.cu", "", 1)

    assert work.compile() == ["killed.cu", "later.cu", "other.cu"]
    events = work.events()
    assert events.index("- other.cu") < len(events) - 1 - events[::-1].index("+ killed.cu")
    assert events.count("+ killed.cu") == 2


@pytest.fixture(name="group")
def _group(tmp_path: Path) -> Iterator[Path]:
    """Return a control group of 50 MB."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    path = (first if first.is_dir() else second) / f"sparkwright-{os.getpid()}"
    try:
        path.mkdir()
        (path / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")).write_text("50000000")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield path
    path.rmdir()


def test_a_driver_whose_compiler_is_killed_for_memory_lacks_memory(work: Work, group: Path) -> None:
    """It ends with the status of any error, and the kernel counts the kill."""
    compiler = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'bytearray(300 << 20)'"
    work.add("a.cu", f'{{ sh -c "{compiler.replace("$", chr(92) + "$")}"; }} 2> /dev/null || exit 1')
    with refusal("memory-exceeded", match=r"a\.cu"):
        work.compile()


def test_a_unit_that_lacks_memory_even_alone_is_refused(work: Work) -> None:
    """The error names the budget and the largest process."""
    work.add("a.cu", "kill -KILL $$")
    with refusal("memory-exceeded", match=r"a\.cu") as raised:
        work.compile()
    assert "budget: 10.0 GB (--memory)" in raised.value.details
    assert any("largest process" in line for line in raised.value.details)


@pytest.mark.parametrize(
    ("text", "reference", "words"),
    [
        ("echo a.cu:7: error: no >&2; exit 1", "compile-failed", "a.cu:7: error: no"),
        ("kill -SEGV $$", "compile-failed", "status 139"),
        # Words of the sources, which compilers quote.
        ("echo a.cu:7: error: no std::bad_alloc, compiler status 137 >&2; exit 1", "compile-failed", "std::bad_alloc"),
        ('cp "$2" /dev/full; exit 1', "compile-failed", "No space left"),
        # It fails otherwise when it is compiled alone.
        (f"{FIRST} {{ touch $2.flag; kill -KILL $$; }}; exit 1", "compile-failed", "status 1"),
    ],
)
def test_a_failed_unit_is_named_with_the_words_of_its_compiler(
    work: Work, text: str, reference: str, words: str
) -> None:
    """Its words decide nothing; finished units are kept."""
    work.add("good.cu", "", 9)
    work.add("a.cu", text, 1)

    with refusal(reference) as raised:
        work.compile(cores=1)

    assert words in "\n".join(raised.value.details)
    work.add("a.cu", "")
    assert work.compile() == ["a.cu"]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL, None])
def test_a_build_that_is_ended_leaves_no_compiler_and_nothing_half_made(
    work: Work, by: signal.Signals | None
) -> None:
    """
    However it is ended, None for every process at once, when one unit is done, and another one has written half of its object: a newer object
    that is not in ninja's log is made again.
    """
    work.add("done.cu", "", 9)
    work.add("half.cu", f'{FIRST} {{ echo half > "$4"; touch $2.flag; exec sleep 1000; }}', 1)

    def compile_units() -> None:
        processes.heard()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work.compile()

    # In another process, which is ended by signals as at a terminal.
    run = multiprocessing.get_context("fork").Process(target=compile_units)
    run.start()
    log = work.build / ".ninja_log"
    processes.until(lambda: (work.source / "half.cu.flag").exists() and log.exists() and "done.cu.o" in log.read_text())
    build = psutil.Process(run.pid)
    # ninja first: one that outlives the build by a moment removes the object.
    for process in [build] if by else [*build.children(recursive=True), build]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(by or signal.SIGKILL)
    run.join(90)
    processes.until(lambda: not work.processes())
    assert by or (work.build / "half.cu.o").read_text() == "half\n"

    assert work.compile() == ["half.cu"]
    assert (work.build / "half.cu.o").read_text() == (work.source / "half.cu").read_text()


# The ninja.

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
    words: list[str | Path] = [NINJA, "-C", build, "-f", file, "-t", "commands", "all"]
    return sorted(subprocess.check_output(words, text=True).splitlines()[1:])


def test_the_schedule_has_the_same_commands_longest_first(tmp_path: Path) -> None:
    """Large units get the pool; build.ninja stays as it is."""
    (tmp_path / "build.ninja").write_text(TEXT)
    ninja.write_schedule(tmp_path, COSTS, 2, 10 * HEAVY)
    text = (tmp_path / ninja.SCHEDULE).read_text()

    assert commands(tmp_path, "build.ninja") == commands(tmp_path, ninja.SCHEDULE)
    places = [text.index(f"build dir/{name}") for name in ("lo$:ng", "large", "pooled", "short")]
    assert places == sorted(places)
    assert text.count("pool = heavy") == 2
    assert (tmp_path / "build.ninja").read_text() == TEXT


SIZES = st.one_of(st.integers(100, LIGHT), st.integers(HEAVY + 1, 9000))


@given(st.lists(st.builds(Cost, st.just(1.0), SIZES), max_size=20), st.integers(1, 12), st.integers(9000, 60000))
def test_no_units_that_can_meet_exceed_the_memory(
    units: Sequence[Cost], cores: int, megabytes: int
) -> None:
    """The largest units that the order lets run together fit, whatever their times are."""
    jobs, pool = ninja.order(units, cores, megabytes)
    sizes = sorted((unit.megabytes for unit in units), reverse=True)
    heavy = [size for size in sizes if size > HEAVY][: min(pool, jobs)]
    light = [size for size in sizes if size <= HEAVY][: jobs - len(heavy)]

    assert (1 <= jobs <= cores, pool >= 1) == (True, True)
    assert sum(heavy) + sum(light) <= megabytes


def test_a_build_for_another_architecture_has_the_costs_of_the_stack(tmp_path: Path) -> None:
    root, store = Path(__file__).parents[2], Store(tmp_path / "store")
    costs = [
        ninja.shipped_costs(RunContext(Project(root, "2026.06", arch), store, ("vllm",), tmp_path), "vllm")
        for arch in ("12.1f", "9.0a")
    ]

    assert costs[0] == costs[1] != {}


def test_a_step_whose_inputs_another_step_writes_is_built(work: Work) -> None:
    """CMake's scan for modules of C++ makes such files (dyndep), without which ninja cannot list the steps before they run."""
    work.add("a.cu", "")
    path, edge = work.build / "build.ninja", f"script {work.source}/a.cu"
    scan = "rule scan\n  command = printf 'ninja_dyndep_version = 1\\nbuild a.cu.o: dyndep\\n' > $out\nbuild a.dd: scan\n"
    path.write_text(path.read_text().replace(edge, f"{edge} || a.dd\n  dyndep = a.dd") + scan)
    assert work.compile() == ["a.cu"]
