"""Programs that are run: the last lines in the error, the words that decide, nothing left running; builds, which reach no network; and compiling with real ninja."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st
from tests.refusals import refusal
from tests.support import processes

from sparkwright.builder import BuildError, ninja, sandbox, toolchain
from sparkwright.builder.ninja import HEAVY, LIGHT, BuildFolder, Cost
from sparkwright.builder.sandbox import INSIDE, Sandbox
from sparkwright.core import process, store, words
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_a_failure_shows_the_last_lines_and_the_log(tmp_path: Path) -> None:
    """
    The error is of the kind that was asked for, with the last lines and the status. The log begins with the command and holds both streams;
    each line is also passed on.
    """
    script, lines = "import sys; [print('line', number, flush=True) for number in range(100)]; sys.exit('failed')", list[str]()
    last = ["line 99", "failed", "status: 1", f"full log: {tmp_path / 'x.log'}"]
    with refusal("compile-failed", match="It failed.", says="\n".join(last)):
        process.run(python(script), log=tmp_path / "x.log", on_line=lines.append, failure=partial(BuildError, "compile-failed"), what="It failed.")

    assert (tmp_path / "x.log").read_text().splitlines() == [f"$ {' '.join(python(script))}", *lines]


@pytest.mark.parametrize(
    ("command", "reference", "what"),
    [
        (["no-such-program"], "tool-missing", "no-such-program is not installed"),
        (python("import time; time.sleep(60)"), "command-failed", r"did not end within 0\.2 s"),
    ],
    ids=["missing", "hanging"],
)
def test_a_program_that_is_missing_or_hangs_is_refused(command: list[str], reference: str, what: str) -> None:
    with refusal(reference, match=what):
        process.output(command, timeout=0.2)


def test_variables_that_change_builds_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of the user's shell do not reach a compiler, the rest does; an empty value removes a variable."""
    for name in ("CFLAGS", "PYTHONPATH", "KEPT", "GONE"):
        monkeypatch.setenv(name, "x")
    made = process.clean_environment(GONE="", ADDED="1")

    assert {"CFLAGS", "PYTHONPATH", "GONE"}.isdisjoint(made)
    assert (made["KEPT"], made["ADDED"], made["LC_ALL"]) == ("x", "1", "C.UTF-8")


def test_an_interruption_ends_the_program(tmp_path: Path) -> None:
    """Whatever interrupts the reading of its lines also ends the program, before the interruption goes on."""
    seen: list[int] = []

    def interrupt(line: str) -> None:
        seen.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run(python("import os, time; print(os.getpid(), flush=True); time.sleep(60)"), log=tmp_path / "x.log", on_line=interrupt)

    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_a_limit_of_memory_holds() -> None:
    """A program that asks for more memory than it may have does not get it, and one of that size that asks for less ends well."""
    for wanted, status in ((400, 1), (10, 0)):
        command = process.wrap_with_limits(python(f"bytearray({wanted} << 20)"), memory=300 << 20)
        assert subprocess.run(command, check=False, capture_output=True).returncode == status


# Programs of a build: without a network, in folders of fixed names, in namespaces.


missing = sandbox._refusal()
namespaces = pytest.mark.skipif(missing is not None, reason=f"no namespaces here: {missing}")


class Lab:
    """A sandbox around the folder ``work``, and programs that are run in it."""

    def __init__(self, folder: Path, kind: str = "") -> None:
        self.work, self.log = folder / "work", folder / "log"
        self.work.mkdir(parents=True)
        self.sandbox = Sandbox("none") if kind == "none" else Sandbox.create({self.work: "mini"})

    def run(self, *command: str) -> str:
        """Run *command* and return what it printed."""
        self.sandbox.run(command, log=self.log, env=dict(os.environ), cwd=self.work)
        return "".join(self.log.read_text().splitlines(keepends=True)[1:])


@pytest.fixture(name="lab")
def _lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@namespaces
def test_a_program_sees_its_folder_under_a_fixed_name(lab: Lab) -> None:
    script = f"echo inside > {INSIDE}/mini/output; ls {INSIDE}"

    assert lab.run("sh", "-c", script) == "mini\n"
    assert (lab.work / "output").read_text() == "inside\n"
    paths = {lab.work / "a": INSIDE / "mini" / "a", Path("/elsewhere/a"): Path("/elsewhere/a")}
    assert {path: lab.sandbox.sandbox_path(path) for path in paths} == paths
    words = f"-I{lab.work} file://{lab.work}/a:{lab.work} /mnt{lab.work} -I/mnt{lab.work}/a {lab.work}-b -DX='{lab.work}'"
    here = f"{INSIDE}/mini"
    assert lab.sandbox.translate(words) == f"-I{here} file://{here}/a:{here} /mnt{lab.work} -I/mnt{lab.work}/a {lab.work}-b -DX='{here}'"


@namespaces
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize("link", ["store", "store/work"])
def test_a_link_above_a_folder_changes_no_byte(tmp_path: Path, link: str) -> None:
    """Where the cache directory, or a folder in it, is a link, an object has the bytes that it has elsewhere, by whichever path it is compiled."""
    folders = [tmp_path / "plain" / "store" / "work", tmp_path / "linked" / "store" / "work"]
    objects = list[bytes]()
    (tmp_path / "disk" / "work").mkdir(parents=True)
    (tmp_path / "linked" / link).parent.mkdir(parents=True)
    (tmp_path / "linked" / link).symlink_to(tmp_path / "disk" / ("work" if link == "store/work" else ""))
    for folder in folders:
        work = store.Store(folder.parent).folder("work")
        (work / "a.c").write_text("const char *file = __FILE__;\n")
        sandbox = Sandbox.create({work: "mini"})
        for path in (work, work.resolve()):
            sandbox.run(["gcc", "-c", f"{path}/a.c", f"-o{path}/a.o"], log=tmp_path / "log", env=dict(os.environ))
            objects.append((work / "a.o").read_bytes())
    assert len(set(objects)) == 1


@namespaces
def test_a_store_below_the_hidden_folder_keeps_its_names(lab: Lab) -> None:
    """Its files would vanish; they are in a folder in which people keep sources."""
    lab.sandbox = Sandbox.create({INSIDE / "store": "mini"})

    assert lab.run("ls", "-d", str(lab.sandbox.sandbox_path(INSIDE))) == f"{INSIDE}\n"
    assert lab.sandbox.sandbox_path(INSIDE / "store") == INSIDE / "store"


@namespaces
def test_a_program_reaches_no_server_of_this_machine(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = [sys.executable, "-c", f"import socket; socket.create_connection({server.getsockname()!r}, 2)"]
        subprocess.run(connect, check=True)
        with refusal("build-downloads"):
            lab.run(*connect)


CLONE = ("sh", "-c", "git clone -q https://sources.invalid/a/project.git p")
#: The program continues without the source.
CLONE_OR_NOT = ("sh", "-c", f"{CLONE[2]} || true")


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("none", CLONE),
        ("none", CLONE_OR_NOT),
        pytest.param("", CLONE, marks=namespaces),
        pytest.param("", CLONE_OR_NOT, marks=namespaces),
        pytest.param("", ("curl", "-sSf", "http://sources.invalid/a.tar"), marks=[namespaces, pytest.mark.skipif(not shutil.which("curl"), reason="stock Debian has no curl")]),
        *(
            pytest.param("", (sys.executable, "-c", f"import {module}; {module}.{call}('http://sources.invalid')"), marks=namespaces)
            for module, call in (("requests", "get"), ("urllib.request", "urlopen"))
        ),
    ],
)
def test_an_attempt_to_download_is_refused(tmp_path: Path, kind: str, program: tuple[str, ...]) -> None:
    """With and without a network; if the program said the address, it is in the error."""
    said = ["https://sources.invalid/a/project.git"] if CLONE[2] in program[2] else []
    with refusal("build-downloads", match=r"sources\.invalid|another host", says=said):
        Lab(tmp_path, kind).run(*program)


#: Connects to the proxy that stands in its environment.
CONNECT = "import os, socket, struct; a = socket.create_connection(('127.0.0.1', int(os.environ['http_proxy'].rpartition(':')[2])));"
#: Ends a connection without a request, so that the other side sees a reset one.
RESET = f"{CONNECT} a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); a.close();"


@pytest.mark.parametrize("begin", [RESET, CONNECT], ids=["reset", "silent"])
def test_a_broken_connection_hides_no_attempt(tmp_path: Path, begin: str) -> None:
    """After a connection that was reset, or is open and silent, the next request is refused at once, and its host is named."""
    code = f"{begin} import urllib.request; urllib.request.urlopen('http://sources.invalid', timeout=20)"
    before = time.monotonic()
    with refusal("build-downloads", match=r"sources\.invalid"):
        Lab(tmp_path, "none").run(sys.executable, "-c", code)
    assert time.monotonic() - before < 10


@pytest.mark.parametrize("kind", ["none", pytest.param("", marks=namespaces)])
@pytest.mark.parametrize("status", [0, 1])
def test_words_of_a_download_decide_nothing(tmp_path: Path, kind: str, status: int) -> None:
    """A compiler's warning quotes the sources; a step that reaches for no host ends as it ended."""
    text = "warning: 'Failed to connect to sources.invalid'"
    with contextlib.nullcontext() if status == 0 else refusal("command-failed"):
        assert text in Lab(tmp_path, kind).run("sh", "-c", f'echo "{text}"; exit {status}')


def _sleeping(marker: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [])[:2] == ["sleep", marker]]


@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("process.run(['sleep', marker], log=folder / 'log')", 1),
        # One has left the process group.
        pytest.param(
            "Sandbox.create({folder: 'mini'}).run(['sh', '-c', f'setsid sleep {marker} & sleep {marker}'], log=folder / 'log', env=dict(os.environ))",
            2, marks=namespaces,
        ),
    ],
    ids=["program", "build"],
)  # fmt: skip
def test_a_killed_parent_leaves_no_process(tmp_path: Path, call: str, count: int) -> None:
    """`kill -9` of sparkwright ends the programs that it runs."""
    marker = f"3141.{os.getpid()}"
    imports = "import os; from pathlib import Path; from sparkwright.builder.sandbox import Sandbox; from sparkwright.core import process"
    with subprocess.Popen(python(f"{imports}; folder, marker = Path({str(tmp_path)!r}), {marker!r}; {call}")) as parent:
        processes.until(lambda: len(_sleeping(marker)) == count)
        parent.kill()
    processes.until(lambda: not _sleeping(marker))


def test_without_namespaces_a_build_that_needs_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_refusal", lambda: "no unshare")
    assert Sandbox.create({tmp_path: "mini"}) == Sandbox("none")
    with refusal("isolation-missing", match="without a network"):
        Sandbox.create({tmp_path: "mini"}, needed=True)


# Words that decide.


#: Scripts for ``sh``. A line above moves a hunk; no repository has the file of digits.
SAID = {
    "HUNK_MOVED": "git init -q; seq 9 >a; git add a; seq 8 >a; git diff >p; (echo new; seq 9) >a; git apply -v p",
    "NAME_UNKNOWN": "echo 'namespace a {} int b = a::c(d);' >driver.cpp; g++ -c driver.cpp",
    "JSON_CUT_OFF": "\"$PYTHON\" -c 'import msgspec; msgspec.json.decode(b\"{\\\"a\\\": [1, \")'",
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_real_program_says_the_words(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("PYTHON", sys.executable)
    done = subprocess.run(["sh", "-c", SAID[name]], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert getattr(words, name).search(done.stdout + done.stderr), done


# Compiling with real ninja and ccache: order, failures, and what a kill leaves; the schedule for ninja.


#: Of the test environment, else of the machine.
NINJA = Path(
    shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja") or "ninja"
)
#: Is followed by what a unit does the first time.
FIRST = "test -e $2.flag ||"
#: A compiler for sources that are shell scripts: it runs the source and makes a copy of it.
COMPILER = '. "$2"\necho begun > "$4"\ncp "$2" "$4"\n'

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
        tools = toolchain.Toolchain("key", NINJA.parents[1])
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
    with refusal("memory-exceeded", match=r"a\.cu", says=["budget: 10.0 GB (--memory)", "largest process"]):
        work.compile()


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

    with refusal(reference, says=words):
        work.compile(cores=1)

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
    for each in [build] if by else [*build.children(recursive=True), build]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(by or signal.SIGKILL)
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
