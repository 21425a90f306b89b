"""
Compile with ninja over CMake's build folder, and continue where the last run stopped.

A unit that was compiled is not compiled again while its inputs stay: ninja knows by its log and the
header lists, and the build folder outlives the run. An object that ninja did not log is made again,
so that one of a killed run is never taken for whole.

ccache spares what another checkout, stack or build folder compiled. It comes from the machine's own
packages and works in its depend mode, in which the compiler's list of headers tells the inputs.
Without ccache a build works all the same.

The cost of a unit is its seconds of CPU and the peak resident megabytes of one process of its
compiler (``ru_maxrss`` of wait4(2); nvcc runs cicc and ptxas one after the other), as the stack
ships it in ``costs.yaml``, else guessed.

Of the edges that are ready, ninja starts the one on the longest path first, and among equals the
one that stands first in the file (1.12 and later). So compile edges are written longest first, and
large ones in a pool of their own: on 20 cores the units of 2026.11 take a third less time than in
CMake's order (`ci/bench/schedule.py`). CMake's ``build.ninja`` is left as it is: its edges are
written to a second file in another order, every command unchanged, so that both share one log.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from sparkwright.builder import BuildError, launcher, pylock, toolchain
from sparkwright.builder.sandbox import Sandbox
from sparkwright.core import process, strict_yaml
from sparkwright.core.console import console, duration
from sparkwright.core.files import content_key
from sparkwright.core.store import translate_disk_full
from sparkwright.forks.context import RunContext

#: The share of the available memory that compilers may take; the system, and the GPU of a GB10,
#: need the rest.
SHARE = 0.85
#: The compiler calls of this run, and of the last one that ended, in the folder ``launch``.
CALLS, FINISHED = "calls.jsonl", "finished.jsonl"

#: Lines of the compiler that an error repeats; the log has all.
_LINES = 25
_PROGRESS = re.compile(r"\[(\d+)/(\d+)\] ")
#: A failed edge names its outputs, since ninja 1.13 after its exit status; then come its command
#: and what that printed.
_FAILED = re.compile(
    r"^FAILED: (?:\[code=\d+\] )?(\S+).*\n(.*)\n((?:(?!FAILED: |ninja: |\[\d+/\d+\] ).*\n)*)",
    re.MULTILINE,
)
_SOURCE = re.compile(r" -c (\S+)")
#: The file beside ``build.ninja`` that ninja is given.
SCHEDULE = "sparkwright.ninja"
#: Suffixes of translation units.
SUFFIXES = frozenset((".c", ".cc", ".cpp", ".cu", ".cxx"))
#: Units above so many megabytes get the pool ``heavy``.
HEAVY = 2000
#: Megabytes that are reserved for every unit outside of the pool.
LIGHT = 1000

#: A line with its continuations; a dollar escapes what follows it.
_LINE = r"(?:[^$\n]++|\$[\s\S])*+\n"
_STATEMENT = re.compile(rf"#.*\n|{_LINE}(?:[ \t]{_LINE})*")
_PATH = r"((?:\$.|[^$ :|\n]++)++)"
_BUILD = re.compile(rf"build +{_PATH}(?:\$.|[^$:\n]++)*+: *\S+ +{_PATH}")


# Costs.


class Cost(NamedTuple):
    """
    The cost of a unit.

    Attributes:
        seconds: Of CPU: the time that it takes on an idle core.
        megabytes: Peak resident memory of the largest process of its compiler.
    """

    seconds: float
    megabytes: int


#: The cost of a unit that was never measured. Typical CUDA units of vLLM 0.33.0 take 6-16 s and
#: 450-760 MB on one x86-64 core; a guess should rather be too large.
GUESS = Cost(20, 1000)


class ShippedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``build/<stack>/costs.yaml``.

    Attributes:
        forks: Fork → the source of each of its units → seconds of CPU, and peak resident megabytes
            of its compiler. Comments say on which machine, with what and when they were measured.
    """

    forks: dict[str, dict[str, Cost]] = {}


def shipped_costs(context: RunContext, fork: str) -> dict[str, Cost]:
    """
    Return the costs of the units of *fork* that come with the stack, by source; those of another
    architecture are a better estimate than a guess.

    Raises:
        file-invalid: The file cannot be read.
    """
    path = context.project.build_folder / "costs.yaml"
    return strict_yaml.load(path, ShippedFile).forks.get(fork, {}) if path.is_file() else {}


# The order in build.ninja.


def order(units: Sequence[Cost], cores: int, megabytes: int) -> tuple[int, int]:
    """
    Return how many compilers may run at once (``-j``), and how many of those with large *units*:
    one large unit always fits into *megabytes* beside others of `LIGHT` each, more of them if there
    is room.
    """
    largest = max((unit.megabytes for unit in units), default=0)
    if largest <= HEAVY:
        return max(1, min(cores, megabytes // LIGHT)), 1
    jobs = max(1, min(cores, 1 + (megabytes - largest) // LIGHT))
    return jobs, max(1, (megabytes - jobs * LIGHT) // largest)


def write_schedule(
    build: Path, costs: Mapping[str, Cost], cores: int, megabytes: int, folder: str = ""
) -> int:
    """
    Write the schedule of the build folder, and return how many of its units may run at once.

    Args:
        costs: The costs of units, by their paths in *folder*, which is named as the compiler sees
            it.
    """
    text = (build / "build.ninja").read_text("utf-8")
    others, edges = list[str](), dict[str, Cost]()
    for statement in _STATEMENT.findall(f"{text}\n"):
        if source := _compiled_source(statement):
            cost = costs.get(source.removeprefix(folder), GUESS)
            # Of two values for a variable, ninja takes the last.
            pool = "  pool = heavy\n" if cost.megabytes > HEAVY else ""
            edges[statement + pool] = cost
        else:
            others.append(statement)
    jobs, heavy = order([*edges.values()], cores, megabytes)
    longest_first = sorted(edges, key=edges.__getitem__, reverse=True)
    parts = [f"pool heavy\n  depth = {heavy}\n", *others, *longest_first]
    (build / SCHEDULE).write_text("".join(parts), "utf-8")
    return jobs


def _compiled_source(statement: str) -> str:
    """Return the source of the compile edge *statement*; empty if it is none."""
    match = _BUILD.match(re.sub(r"\$\n[ \t]*", "", statement))
    if match is None:
        return ""
    output, source = map(_unescaped, match.groups())
    is_unit = PurePath(output).suffix == ".o" and PurePath(source).suffix in SUFFIXES
    return source if is_unit else ""


def _unescaped(text: str) -> str:
    return re.sub(r"\$(.)", r"\1", text)


# Compiling.


class CompilerCall(msgspec.Struct, frozen=True):
    """
    A call of the compiler, as `sparkwright.builder.launcher` records it.

    Attributes:
        seconds: Of CPU.
        megabytes: Peak resident memory of the largest process.
        hit: Was the object taken from the compiler cache?
        good: Did it end with status 0?
        killed: Was it killed, or did it fail while the kernel killed a process for memory?
    """

    unit: str
    seconds: float
    megabytes: int
    hit: bool
    good: bool = True
    killed: bool = False


class FailedEdge(msgspec.Struct, frozen=True):
    """
    A build edge that failed.

    Attributes:
        output: As ninja names it.
        name: The unit, or the output of another build step.
        text: What the command printed.
    """

    output: str
    name: str
    text: str


def install_launcher(folder: Path) -> Path:
    """Copy the compiler launcher to *folder* and return its path there."""
    # The compile commands hold this path; with another one ninja would compile everything again.
    return Path(shutil.copyfile(launcher.__file__, folder / "launch.py"))


class BuildFolder:
    """
    The build folder ``work/build`` of the sources in ``work/src``, and ninja in its sandbox.

    Args:
        context: Gives the compiler cache, cores and memory.
        sandbox: The sandbox, in which the folders of *work* may have other names.
        env: Variables of the configure step.
    """

    def __init__(
        self,
        context: RunContext,
        tools: toolchain.Toolchain,
        fork: str,
        work: Path,
        sandbox: Sandbox,
        env: Mapping[str, str],
    ) -> None:
        self._name, self._path, self._program = fork, work / "build", tools.tool("ninja")
        self._cores = context.jobs or len(os.sched_getaffinity(0))
        self._sandbox, self._megabytes = sandbox, context.memory // 1_000_000
        self._megabytes = self._megabytes or int(process.available_megabytes() * SHARE)
        log = f"{context.project.stack}-{context.qualified(fork)}-compile.log"
        self._log = context.store.folder("logs") / log
        self._source = f"{sandbox.sandbox_path(work / 'src')}/"
        self._launch = work / "launch"
        self._env = {
            **cache_variables(context, env),
            "NINJA_STATUS": "[%f/%t] ",
            "SPARKWRIGHT_CALLS": str(self._launch / CALLS),
            # /tmp may be memory, and the next run removes here what a killed one left.
            "TMPDIR": str(self._launch / "tmp"),
        }

    def compile(
        self, targets: Sequence[str], costs: Mapping[str, Cost] = MappingProxyType({})
    ) -> list[CompilerCall]:
        """
        Make the CMake *targets*, or everything if there are none, and return the compiler calls.

        Args:
            costs: Source → its cost.

        Raises:
            compile-failed, disk-full: A unit failed; finished objects are kept.
            memory-exceeded: A unit was killed for memory twice, the second time alone.
            build-downloads: A build step asked for a host.
        """
        with translate_disk_full(self._path):
            # Remove the calls and temporary files of a run that was killed.
            self._launch.mkdir(exist_ok=True)
            (self._launch / CALLS).unlink(missing_ok=True)
            shutil.rmtree(self._launch / "tmp", ignore_errors=True)
            (self._launch / "tmp").mkdir()
            jobs = write_schedule(self._path, costs, self._cores, self._megabytes, self._source)
            title = f"compile {self._name}: {jobs} at once, {self._megabytes / 1000:.0f} GB"
            try:
                with console.step(title):
                    self._make(targets, jobs)
            finally:
                calls = [call for call in self._calls() if call.good]
                (self._launch / CALLS).replace(self._launch / FINISHED)
        work = [call.seconds for call in calls if not call.hit]
        console.note(
            f"{len(work)} units compiled ({duration(sum(work))} of work), "
            f"{len(calls) - len(work)} taken from the compiler cache"
        )
        return calls

    def _make(self, targets: Sequence[str], jobs: int) -> None:
        """Build *targets* with ninja; retry units that were killed for memory once, each alone."""
        while killed := self._ninja(["-j", str(jobs), *targets]):
            console.warn(
                "killed for memory, and compiled again alone: "
                + ", ".join(edge.name for edge in killed)
            )
            for edge in self._ninja(["-j", "1", *(edge.output for edge in killed)]):
                raise self._error(
                    "memory-exceeded",
                    f"The compiler of {edge.name} was killed for memory twice.",
                    edge,
                    f"budget: {self._megabytes / 1000:.1f} GB (--memory)",
                )

    def _ninja(self, options: Sequence[str]) -> list[FailedEdge]:
        """
        Run ninja, and return the failed edges if they were killed, or the kernel killed a process
        for memory meanwhile; raise `compile-failed` if another one failed, or ninja itself.
        """
        lines: list[str] = []
        # If this process is killed, the signal for ninja comes a moment after the end of the pipe;
        # a ninja that is ended by the latter leaves its compilers behind.
        command = [
            *("sh", "-c", 'trap "" PIPE; exec "$@"', "sh", str(self._program)),
            *("-C", str(self._path), *options, "-f", SCHEDULE),
        ]
        kills = launcher.memory_kills()
        with console.progress("work", 0, "steps") as progress:

            def on_line(line: str) -> None:
                lines.append(line)
                if match := _PROGRESS.match(line):
                    step = Path(line.rpartition(" ")[2]).name
                    progress.update(int(match[1]), step, total=int(match[2]))

            try:
                self._sandbox.run(
                    command,
                    log=self._log,
                    env=self._env,
                    failure=partial(BuildError, "compile-failed"),
                    what=f"{self._name} does not compile.",
                    on_line=on_line,
                )
            except BuildError as error:
                failed = self._failed_edges("\n".join([*lines, ""]))
                if error.reference != "compile-failed" or not failed:
                    raise
                # A unit that failed for another reason fails again when it is compiled alone.
                out_of_memory = launcher.memory_kills() != kills
                killed = {call.unit: call.killed for call in self._calls()}
                for edge in failed:
                    if not killed.get(edge.name, out_of_memory):
                        raise self._error(
                            "compile-failed", f"{edge.name} does not compile.", edge
                        ) from error
                return failed
        return []

    def _failed_edges(self, text: str) -> list[FailedEdge]:
        """Return the failed edges in the *text* that ninja printed, in their order."""
        failed = []
        for output, command, printed in _FAILED.findall(text):
            unit = _SOURCE.search(command)
            name = unit[1].removeprefix(self._source) if unit else output
            failed.append(FailedEdge(output, name, printed))
        return failed

    def _calls(self) -> list[CompilerCall]:
        """Return the recorded calls, in the order in which they ended."""
        record, calls = self._launch / CALLS, []
        record.touch()
        for line in record.read_bytes().splitlines():
            with contextlib.suppress(
                msgspec.DecodeError
            ):  # the line was cut off, for example by a full disk
                call = msgspec.json.decode(line, type=CompilerCall)
                unit = call.unit.removeprefix(self._source)
                calls.append(msgspec.structs.replace(call, unit=unit))
        return calls

    @staticmethod
    def _error(reference: str, what: str, edge: FailedEdge, *details: str) -> BuildError:
        """Return the error for a failed edge, with the last lines of its command."""
        lines = [line for line in edge.text.splitlines() if line.strip()][-_LINES:]
        return BuildError(reference, what, details=[*lines, *details], data={"unit": edge.name})


# The compiler cache.


def cache_variables(context: RunContext, env: Mapping[str, str]) -> dict[str, str]:
    """
    Return the variables *env* with those of the compiler cache, without the user's own settings.
    """
    clean = {name: text for name, text in env.items() if not name.startswith("CCACHE_")}
    program = shutil.which("ccache")
    if not program:
        console.note(
            "ccache is not installed: units that are compiled here are compiled again in the next "
            "checkout (sudo apt-get install ccache)"
        )
        return clean
    generators = [wheel[2] for wheel in pylock.named(context.project, *toolchain.GENERATORS)]
    compilers = content_key("compilers", [toolchain.compiler(context), *generators])
    return clean | {
        "SPARKWRIGHT_CCACHE": program,
        "CCACHE_DIR": str(context.store.folder("ccache")),
        "CCACHE_CONFIGPATH": os.devnull,
        "CCACHE_MAXSIZE": os.environ.get("CCACHE_MAXSIZE", "10G"),
        "CCACHE_DEPEND": "true",
        # ccache would examine nvcc and the host compiler's driver alone; the code is made by the
        # programs that these call.
        "CCACHE_COMPILERCHECK": f"string:{compilers[:32]}",
        # Objects hold no name of their folder: there is no debug information in them.
        "CCACHE_NOHASHDIR": "true",
        "CCACHE_TEMPDIR": str(context.store.folder("ccache", "tmp")),
    }
