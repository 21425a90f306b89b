"""
Compile with ninja over CMake's build folder, and continue where the last run stopped.

A unit that was compiled is not compiled again while its inputs stay: ninja knows by its log and the
header lists, and the build folder outlives the run. An object that ninja did not log is made again,
so that one of a killed run is never taken for whole.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.builder.compile import launcher, ninja_file
from sparkwright.builder.compile.costs import Cost, Costs
from sparkwright.builder.compile.ninja_file import CompileEdge
from sparkwright.builder.environment import ccache
from sparkwright.builder.environment.ccache import Ccache
from sparkwright.builder.environment.sandbox import Sandbox
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.core import config, process
from sparkwright.core.console import console, duration
from sparkwright.core.errors import SparkwrightError, StoreError
from sparkwright.core.store import translate_disk_full
from sparkwright.forks.context import RunContext

#: Of the memory that is available at the start; the rest is left to the system, which shares it
#: with the GPU on a GB10.
SHARE = 0.85
#: Seconds without any use of the CPU after which a compiler hangs.
PATIENCE = 1800.0
#: The compiler calls of the last run that ended, in the folder ``launch``.
FINISHED = "finished.jsonl"

#: Lines of the compiler that an error repeats; the log has all.
_LINES = 25
#: A failed edge names its outputs after its status (since ninja 1.13 with the exit status).
_PROGRESS = re.compile(r"\[(\d+)/(\d+)\] ")
_FAILED = re.compile(r"FAILED: (?:\[code=(\d+)\] )?(\S+)")
#: How the drivers of GCC and nvcc report a killed program, and how compilers ask in vain for
#: memory.
_KILLED = re.compile(
    r"died due to signal 9\b|Killed signal terminated program|terminated by signal 9\b|^Killed$"
    r"|out of memory allocating|virtual memory exhausted|std::bad_alloc|Memory allocation failure",
    re.MULTILINE,
)
_CRASHED = re.compile(
    r"died due to signal (\d+)|terminated by signal (\d+)|internal compiler error"
    r"|signal terminated program"
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class CompileLimits(msgspec.Struct, frozen=True):
    """
    What compilers may take.

    Attributes:
        cores: Units that compile at once, at most.
        megabytes: For all compilers together.
        patience: Seconds without any use of the CPU after which a compiler hangs.
    """

    cores: int
    megabytes: int
    patience: float = PATIENCE


class CompilerCall(msgspec.Struct, frozen=True):
    """
    A compiler call, as `sparkwright.builder.compile.launcher` records it.

    Attributes:
        status: Exit status; negative if a signal ended the compiler.
        seconds: Of CPU.
        megabytes: Peak resident memory of the largest process.
        hit: Was the object taken from the compiler cache?
        hung: Was the compiler ended because it used no CPU?
    """

    unit: str
    output: str
    status: int
    seconds: float
    megabytes: int
    hit: bool = False
    hung: bool = False


class FailedEdge(msgspec.Struct, frozen=True):
    """
    A build edge that failed.

    Attributes:
        status: Exit status of the command; 128 and the signal's number if a signal ended it.
        text: What the command printed.
    """

    output: str
    status: int
    text: str


def memory_budget(memory: int) -> int:
    """Return the megabytes for all compilers: *memory* bytes, or most of what is free."""
    return memory // 1_000_000 or int(process.available_megabytes() * SHARE)


def limits(session: RunContext) -> CompileLimits:
    """Return what the compilers of *session* may take."""
    cores = session.jobs or len(os.sched_getaffinity(0))
    return CompileLimits(cores, memory_budget(session.memory), session.unit_timeout or PATIENCE)


def install_launcher(folder: Path) -> Path:
    """Return the compiler launcher's copy in *folder*, written if it is missing or out of date."""
    # The commands name it: under another name ninja would compile everything again.
    copy, text = folder / "launch.py", Path(launcher.__file__).read_bytes()
    if not copy.exists() or copy.read_bytes() != text:
        copy.write_bytes(text)
    return copy


class BuildFolder:
    """
    The build folder ``work/build`` of the sources in ``work/src``, and ninja in its sandbox.

    Args:
        ninja: The program.
        sandbox: The sandbox, in which the folders of *work* may have other names.
        env: Variables of the configure step and of the compiler cache.
        log: Gets the output of ninja.
    """

    def __init__(
        self,
        name: str,
        ninja: Path,
        work: Path,
        sandbox: Sandbox,
        env: Mapping[str, str],
        log: Path,
        cache: Ccache | None = None,
    ) -> None:
        self._name, self.path, self._program = name, work / "build", ninja
        self._sandbox, self._log, self._cache = sandbox, log, cache
        self._inside = sandbox.sandbox_path(self.path)
        self._source = f"{sandbox.sandbox_path(work / 'src')}/"
        self._launch = work / "launch"
        self._calls = self._launch / "calls.jsonl"
        self._env = {
            **env,
            "NINJA_STATUS": "[%f/%t] ",
            "SPARKWRIGHT_CALLS": str(sandbox.sandbox_path(self._calls)),
            "SPARKWRIGHT_CCACHE": cache.program if cache else "",
            # Not into a /tmp that may be memory; and the next run finds and removes them here.
            "TMPDIR": str(sandbox.sandbox_path(self._launch / "tmp")),
        }

    @classmethod
    def of(
        cls,
        session: RunContext,
        tools: Toolchain,
        fork: str,
        work: Path,
        sandbox: Sandbox,
        env: Mapping[str, str],
    ) -> BuildFolder:
        """Return the build folder of *fork*, with the compiler cache of the session."""
        log = f"{session.project.stack}-{session.named(fork)}-compile.log"
        base = None if sandbox.mounts else session.store.root
        cache = ccache.of(session, config.config().compiler_cache, base)
        variables = {**ccache.without_settings(env), **(cache.environment if cache else {})}
        log_path = session.store.folder("logs") / log
        return cls(fork, tools.tool("ninja"), work, sandbox, variables, log_path, cache)

    def edges(self) -> list[CompileEdge]:
        """Return the compile edges of all targets; units below the sources are relative to them."""
        return [
            CompileEdge(edge.unit.removeprefix(self._source), edge.output)
            for edge in ninja_file.compile_edges(self.path, self._inside)
        ]

    def compile(
        self,
        goals: Sequence[str],
        costs: Costs,
        limits: CompileLimits,
        env: Mapping[str, str] | None = None,
    ) -> list[CompilerCall]:
        """
        Make *goals*, or everything if there are none, and return the compiler calls.

        Args:
            goals: CMake targets, or objects.
            env: More variables for this run.

        Raises:
            compile-failed, compiler-crashed, compiler-hung, disk-full: A unit failed; what was
                compiled stays.
            memory-too-small: A unit needs more memory than there is, as measured.
            memory-exceeded: A unit was killed for memory twice, the second time alone.
            build-downloads: A build step asked for a host.
        """
        variables = {**self._env, "SPARKWRIGHT_PATIENCE": str(limits.patience), **(env or {})}
        with translate_disk_full(self.path):
            # The calls and temporary files of a run that was killed.
            self._launch.mkdir(exist_ok=True)
            self._collect(costs)
            shutil.rmtree(self._launch / "tmp", ignore_errors=True)
            (self._launch / "tmp").mkdir()
            edges = [edge for edge in self.edges() if not goals or _belongs(edge.output, goals)]
            expected = {edge: costs.expected(edge.unit) for edge in edges}
            for edge, cost in expected.items():
                too_large = cost.measured and cost.megabytes > limits.megabytes
                # An absolute path is a path in the sandbox.
                name = os.path.relpath(self._inside / edge.output, self._inside)
                if too_large and not (self.path / name).exists():
                    taken = f"Compiling {edge.unit} takes {cost.megabytes / 1000:.1f} GB"
                    raise _memory_error(
                        "memory-too-small", taken, edge.unit, cost.megabytes, limits
                    )
            order = ninja_file.order(list(expected.values()), limits.cores, limits.megabytes)
            ninja_file.write_schedule(
                self.path,
                self._inside,
                lambda unit: costs.expected(unit.removeprefix(self._source)),
                order.heavy,
            )
            title = f"compile {self._name}: {order.jobs} at once, {limits.megabytes / 1000:.0f} GB"
            try:
                with console.step(title):
                    self._make(goals, order.jobs, variables, costs, limits)
            finally:
                calls = self._collect(costs)
        compiled = [call for call in calls if not call.hit]
        work = duration(sum(call.seconds for call in compiled))
        summary = [f"{len(compiled)} units compiled ({work} of work)"]
        if self._cache:
            summary.append(f"{len(calls) - len(compiled)} taken from the compiler cache")
        console.note(", ".join([*summary, f"{len(edges) - len(calls)} were up to date"]))
        return calls

    def _make(
        self,
        goals: Sequence[str],
        jobs: int,
        env: Mapping[str, str],
        costs: Costs,
        limits: CompileLimits,
    ) -> None:
        """Run ninja until *goals* are made; what was killed for memory is made alone, once."""
        while failed := self._ninja(["-j", str(jobs), *goals], env):
            for edge in failed:
                if not self._lacked_memory(edge):
                    raise self._error(edge, limits)
            killed = [edge.output for edge in failed]
            names = ", ".join(map(self._unit, killed))
            console.warn(f"killed for memory, and compiled again with nothing beside it: {names}")
            for edge in self._ninja(["-j", "1", *killed], env):
                call = self._call(edge.output)
                if call is None or not self._lacked_memory(edge):
                    raise self._error(edge, limits)
                # The next build knows that the unit is too large, and does not start it.
                seconds = max(call.seconds, costs.expected(call.unit).seconds)
                costs.add([Cost(call.unit, seconds, call.megabytes)])
                what = f"The compiler of {call.unit} was killed for memory twice"
                raise _memory_error("memory-exceeded", what, call.unit, call.megabytes, limits)

    def _ninja(self, options: Sequence[str], env: Mapping[str, str]) -> list[FailedEdge]:
        """Run ninja, and return the failed edges; raise `compile-failed` if it failed itself."""
        lines: list[str] = []
        command: list[str | Path] = [self._program, "-C", self._inside, *options]
        command += ["-f", ninja_file.SCHEDULE]
        with console.progress("steps", 0) as progress:

            def on_line(line: str) -> None:
                lines.append(line)
                if match := _PROGRESS.match(line):
                    progress.total = int(match[2])
                    progress.update(int(match[1]), Path(line.rpartition(" ")[2]).name)

            try:
                self._sandbox.run(
                    command,
                    log=self._log,
                    env=env,
                    on_line=on_line,
                    network=self._cache is not None and self._cache.remote,
                    failure=partial(BuildError, "compile-failed"),
                    what=f"{self._name} does not compile.",
                )
            except SparkwrightError as error:
                failed = list(failed_edges(lines))
                if error.reference not in ("compile-failed", "disk-full") or not failed:
                    raise
                return failed
        return []

    def _collect(self, costs: Costs) -> list[CompilerCall]:
        """Add the successful calls to *costs*, set their file aside, and return them."""
        calls = [call for call in self._recorded_calls() if call.status == 0]
        costs.add(Cost(call.unit, call.seconds, call.megabytes) for call in calls if not call.hit)
        self._calls.touch()
        self._calls.replace(self._launch / FINISHED)
        return calls

    def _recorded_calls(self) -> Iterator[CompilerCall]:
        for line in self._calls.read_bytes().splitlines() if self._calls.exists() else []:
            try:
                call = msgspec.json.decode(line, type=CompilerCall)
            except msgspec.DecodeError:  # cut off, by a full disk for example
                continue
            yield msgspec.structs.replace(call, unit=call.unit.removeprefix(self._source))

    def _call(self, output: str) -> CompilerCall | None:
        calls = [call for call in self._recorded_calls() if call.output == output]
        return calls[-1] if calls else None

    def _unit(self, output: str) -> str:
        call = self._call(output)
        return call.unit if call else output

    def _lacked_memory(self, edge: FailedEdge) -> bool:
        killed = edge.status == 128 + signal.SIGKILL or _KILLED.search(edge.text)
        call = self._call(edge.output)
        return bool(killed) and not (call and call.hung)

    def _error(self, edge: FailedEdge, limits: CompileLimits) -> SparkwrightError:
        call = self._call(edge.output)
        if call is None or not call.hung:
            return _compile_error(self._unit(edge.output), edge)
        idle = f"it used no CPU for {limits.patience / 60:g} min"
        what = f"The compiler of {call.unit} was ended, since {idle}."
        data = {"unit": call.unit, "idle_seconds": round(limits.patience)}
        return BuildError("compiler-hung", what, data=data)


def _belongs(output: str, goals: Sequence[str]) -> bool:
    # CMake names an object CMakeFiles/<target>.dir/….
    return any(goal in ("all", output) or f"CMakeFiles/{goal}.dir/" in output for goal in goals)


def failed_edges(lines: Iterable[str]) -> Iterator[FailedEdge]:
    """Yield the failed edges in the *lines* that ninja printed, in their order."""
    edge: re.Match[str] | None = None
    text: list[str] = []
    for line in [*lines, "ninja: "]:
        match = _FAILED.match(line)
        if edge and (match or _PROGRESS.match(line) or line.startswith("ninja: ")):
            # The first line is the command.
            yield FailedEdge(edge[2], int(edge[1] or 1), "\n".join(text[1:]))
            edge = None
        if match:
            edge, text = match, []
        elif edge:
            text.append(line)


def _compile_error(unit: str, failed: FailedEdge) -> SparkwrightError:
    """Return the error for *unit*, or for the output of another build step."""
    details = [line for line in failed.text.splitlines() if line.strip()][-_LINES:]
    details.append(f"status: {failed.status}")
    data: dict[str, object] = {"unit": unit}
    if _FULL.search(failed.text):
        what = f"There is no room for what compiling {unit} writes."
        return StoreError("disk-full", what, details=details, data=data)
    match = _CRASHED.search(failed.text)
    # nvcc ends with status 255 for reasons of its own.
    number = failed.status - 128 if 128 < failed.status <= 128 + signal.SIGRTMAX else 0
    if match and (match[1] or match[2]):
        number = int(match[1] or match[2])
    if not (match or number):
        return BuildError("compile-failed", f"{unit} does not compile.", details=details, data=data)
    what = f"The compiler of {unit} crashed."
    if number:
        data["signal"] = number
        what = f"The compiler of {unit} was ended by signal {number} ({signal.strsignal(number)})."
    return BuildError("compiler-crashed", what, details=details, data=data)


def _memory_error(
    reference: str, what: str, unit: str, megabytes: int, limits: CompileLimits
) -> BuildError:
    details = [
        f"largest process of its compiler, as measured: {megabytes / 1000:.1f} GB",
        f"budget: {limits.megabytes / 1000:.1f} GB (--memory)",
        f"available on this machine: {process.available_megabytes() / 1000:.1f} GB",
    ]
    data = {"unit": unit, "megabytes": megabytes, "budget_megabytes": limits.megabytes}
    return BuildError(reference, f"{what}.", details=details, data=data)
