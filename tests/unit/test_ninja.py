"""Compiling with real ninja, gcc and ccache: order, failures, costs, and what a kill leaves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import sysconfig
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import psutil
import pytest
from tests.refusals import refusal
from tests.support import endings
from tests.support.waiting import until
from tests.unit.conftest import Mini

from sparkwright.builder import ninja
from sparkwright.builder.ninja import BuildFolder
from sparkwright.builder.sandbox import Sandbox
from sparkwright.builder.schedule import Cost, Costs
from sparkwright.builder.toolchain import Toolchain
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Of the test environment, else of the machine.
NINJA = Path(
    shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja") or "ninja"
)
ROOT = Path(__file__).parents[2]
#: A compiler for sources that are shell scripts: it runs the source and makes a copy of it.
COMPILER = '#!/bin/sh\n. "$2"\necho begun > "$4"\ncp "$2" "$4"\n'

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")


class Work:
    """A work folder as CMake leaves it; every unit is a shell script or a C++ file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.build = folder, folder / "src", folder / "build"
        self.trace = folder / "trace"
        for path in (self.source, self.build):
            path.mkdir(parents=True)
        self.compiler = folder / "compiler"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)
        self.costs: dict[str, Cost] = {}

    def add(self, name: str, text: str, seconds: float = 1) -> None:
        """Add a unit with its expected cost; a shell script reports its start and its end."""
        if name.endswith(".cu"):
            text = f"echo + {name} >> {self.trace}\n{text}\necho - {name} >> {self.trace}\n"
        (self.source / name).write_text(text)
        self.costs[name] = Cost(seconds, 100)
        self.write_build()

    def write_build(self) -> None:
        """Write build.ninja, as CMake does each time that it configures."""
        launcher = ninja.install_launcher(self.folder)
        units = [
            f"build {name}.o: {'script' if name.endswith('.cu') else 'gcc'} {self.source}/{name}\n"
            for name in self.costs
        ]
        self.build.joinpath("build.ninja").write_text(
            f"launcher = {sys.executable} -IS {launcher}\n"
            f"rule script\n  command = $launcher {self.compiler} -c $in -o $out\n"
            "rule gcc\n  command = $launcher gcc -MD -MF $out.d -c $in -o $out\n"
            "  deps = gcc\n  depfile = $out.d\n" + "".join(units)
        )

    def ledger(self) -> Costs:
        """Return the costs, as the stack ships them and as this folder's record has them."""
        return Costs(Store(self.folder / "store"), "test", self.costs)

    def compile(self, cores: int = 2) -> list[str]:
        """Compile everything, and return the units."""
        store, project = Store(self.folder / "store"), Project(ROOT, "2026.11")
        context = RunContext(project, store, ("vllm",), self.folder, jobs=cores, memory=10**10, cached=False)
        tools = Toolchain("key", NINJA.parents[1])
        folder = BuildFolder(context, tools, "vllm", self.folder, Sandbox("none"), os.environ)
        return sorted(call.unit for call in folder.compile((), self.ledger()))

    def events(self) -> list[str]:
        """Return the starts and ends of scripts, in their order."""
        return self.trace.read_text().splitlines() if self.trace.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Return the processes that work in this folder."""
        processes = psutil.process_iter(["cmdline"])
        named = [p for p in processes if str(self.folder) in " ".join(p.info["cmdline"] or ())]
        return [process for process in named if process.pid != os.getpid()]


@pytest.fixture(name="work")
def _work(tmp_path: Path) -> Work:
    return Work(tmp_path / "work")


def test_a_second_run_compiles_what_changed(work: Work) -> None:
    """Neither new costs nor CMake's writing of build.ninja compile a unit again."""
    work.add("a.cu", "")
    work.add("b.cpp", "int b() { return 1; }\n")
    assert work.compile() == ["a.cu", "b.cpp"]
    work.costs = {"b.cpp": Cost(99, 10), "a.cu": Cost(1, 9000)}
    work.write_build()

    assert work.compile() == []
    work.add("b.cpp", "int b() { return 2; }\n")
    assert work.compile() == ["b.cpp"]
    assert sorted(work.ledger().recorded) == ["a.cu", "b.cpp"]


def test_a_unit_that_was_killed_for_memory_is_compiled_again_alone(work: Work) -> None:
    """The first kill leaves the other units; the second try has the machine to itself."""
    flag = work.folder / "flag"
    work.add("killed.cu", f"test -e {flag} || {{ touch {flag}; sleep 0.1; kill -KILL $$; }}", 9)
    work.add("other.cu", "sleep 0.4", 8)
    work.add("later.cu", "", 1)

    assert work.compile() == ["killed.cu", "later.cu", "other.cu"]
    events = work.events()
    assert events.index("- other.cu") < len(events) - 1 - events[::-1].index("+ killed.cu")
    assert events.count("+ killed.cu") == 2


@pytest.mark.parametrize(
    "text", ["kill -KILL $$", "echo cc1plus: out of memory allocating 65536 bytes; exit 1"]
)
def test_a_unit_that_lacks_memory_even_alone_is_refused(work: Work, text: str) -> None:
    """The error names the budget and the largest process."""
    work.add("a.cu", text)
    with refusal("memory-exceeded", match=r"a\.cu") as raised:
        work.compile()
    assert "budget: 10.0 GB (--memory)" in raised.value.details
    assert any("largest process" in line for line in raised.value.details)


def test_a_unit_that_fails_otherwise_alone_is_no_question_of_memory(work: Work) -> None:
    flag = work.folder / "flag"
    work.add("a.cu", f"test -e {flag} || {{ touch {flag}; kill -KILL $$; }}; exit 1")
    with refusal("compile-failed", match=r"a\.cu does not compile"):
        work.compile()


@pytest.mark.parametrize(
    ("text", "reference", "words"),
    [
        ("echo a.cu:7: error: no >&2; exit 1", "compile-failed", "a.cu:7: error: no"),
        ("kill -SEGV $$", "compile-failed", "status 139"),
        ('cp "$2" /dev/full; exit 1', "disk-full", "No space left"),
    ],
)
def test_a_failed_unit_is_named_with_the_words_of_its_compiler(
    work: Work, text: str, reference: str, words: str
) -> None:
    """The reference says whether the disk is at fault; finished units are kept."""
    work.add("good.cu", "", 9)
    work.add("a.cu", text, 1)

    with refusal(reference) as raised:
        work.compile(cores=1)

    assert words in "\n".join(raised.value.details)
    assert list(work.ledger().recorded) == ["good.cu"]
    work.add("a.cu", "")
    assert work.compile() == ["a.cu"]


def started(work: Work) -> ForkProcess:
    """
    Start to compile *work* in another process, which is ended by signals as at a terminal; return
    when one unit is done, and another one has written half of its object.
    """
    flag = work.folder / "flag"
    text = f'test -e {flag} || {{ echo half > "$4"; touch {flag}; exec sleep 1000; }}'
    work.add("done.cu", "", 9)
    work.add("half.cu", text, 1)

    def compile_units() -> None:
        endings.heard()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work.compile()

    process = multiprocessing.get_context("fork").Process(target=compile_units)
    process.start()
    until(lambda: flag.exists() and "- done.cu" in work.events())
    return process


def test_a_half_written_object_is_made_again_after_everything_was_killed(work: Work) -> None:
    """An object that is newer than its source, but not in ninja's log, is not taken for whole."""
    run = started(work)
    time.sleep(0.5)
    build = psutil.Process(run.pid)
    # ninja first: one that outlives the build by a moment removes the object.
    for process in [*build.children(recursive=True), build]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.join()
    until(lambda: not work.processes())
    assert (work.build / "half.cu.o").read_text() == "half\n"

    assert work.compile() == ["half.cu"]
    assert (work.build / "half.cu.o").read_text() == (work.source / "half.cu").read_text()
    assert "done.cu" in work.ledger().recorded, "the next run records the calls of a killed one"


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_compilers_end_with_the_build(work: Work, by: signal.Signals) -> None:
    """However the build is ended, nothing goes on compiling."""
    run = started(work)
    psutil.Process(run.pid).send_signal(by)
    run.join(90)

    until(lambda: not work.processes())


OWN = {"CCACHE_DIR": "/mine", "CCACHE_DISABLE": "1", "PATH": "/bin"}


def test_only_the_remote_storage_of_the_user_reaches_a_build(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "ccache").touch(0o755)
    monkeypatch.setenv(ninja.REMOTE, "redis://hidden@cache.example")
    variables = ninja.cache_variables(mini.context(), OWN, None)

    assert variables.pop(ninja.REMOTE) == "redis://hidden@cache.example"
    assert "hidden" not in str(variables)
    assert variables["CCACHE_DIR"] == str(mini.context().store.root / "ccache")
    assert "CCACHE_DISABLE" not in variables
