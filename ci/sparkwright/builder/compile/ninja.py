"""
Compile with ninja over CMake's build folder, and continue where the last run stopped.

A unit that was compiled is not compiled again while its inputs stay: ninja knows by its log and the
header lists, and the build folder outlives the run. What ninja did not log is made again, so that
an object of a killed run is never taken for whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.builder.compile import failures, launcher, ninja_file
from sparkwright.builder.compile.costs import Costs, Expected
from sparkwright.builder.compile.failures import FailedEdge
from sparkwright.builder.compile.ninja_file import CompileEdge
from sparkwright.builder.environment import ccache
from sparkwright.builder.environment.ccache import Cache
from sparkwright.builder.environment.sandbox import Sandbox
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.core import config, procfs
from sparkwright.core.console import Progress, console, duration
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.store import room_guard
from sparkwright.forks.context import RunContext

#: Of the memory that is available at the start; the rest is left to the system, which shares it
#: with the GPU on a GB10.
SHARE = 0.85
#: Seconds without any use of the CPU after which a compiler hangs.
PATIENCE = 1800.0
#: Units in the table of a run.
SHOWN = 12
#: The compiler calls of the last run that ended, in the folder ``launch``.
FINISHED = "finished.jsonl"

_OUTPUT = re.compile(r"\[\d+/\d+\] .* -o (\S+)")


class Limits(msgspec.Struct, frozen=True):
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
        seconds: Of CPU; *elapsed* is the time from start to end.
        megabytes: Peak resident memory of the largest process.
        hit: Was the object taken from the compiler cache?
        hung: Was the compiler ended because it used no CPU?
    """

    unit: str
    output: str
    status: int
    seconds: float
    elapsed: float
    megabytes: int
    hit: bool = False
    hung: bool = False


class Compiled(msgspec.Struct, frozen=True):
    """
    The outcome of a run.

    Attributes:
        calls: Compiler calls that succeeded, cache hits among them.
        fresh: Units that were up to date.
    """

    calls: tuple[CompilerCall, ...]
    fresh: int = 0

    @property
    def units(self) -> list[CompilerCall]:
        """The calls that compiled a unit."""
        return [call for call in self.calls if not call.hit]


def memory_budget(memory: int) -> int:
    """Return the megabytes for all compilers: *memory* bytes, or most of what is free."""
    return memory // 1_000_000 or int(procfs.available_megabytes() * SHARE)


def limits(session: RunContext) -> Limits:
    """Return what the compilers of *session* may take."""
    cores = session.jobs or len(os.sched_getaffinity(0))
    return Limits(cores, memory_budget(session.memory), session.unit_timeout or PATIENCE)


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
        cache: Cache | None = None,
    ) -> None:
        self._name, self.path, self._program = name, work / "build", ninja
        self._sandbox, self._log, self.cached = sandbox, log, cache is not None
        self._inside, self._source = (
            sandbox.sandbox_path(self.path),
            f"{sandbox.sandbox_path(work / 'src')}/",
        )
        self._launch = work / "launch"
        self._calls = self._launch / "calls.jsonl"
        self._env = {
            **env,
            "NINJA_STATUS": failures.STATUS,
            "SPARKWRIGHT_CALLS": str(sandbox.sandbox_path(self._calls)),
            "SPARKWRIGHT_CCACHE": cache.program if cache else "",
            # Not into a /tmp that may be memory; and the next run finds and removes them here.
            "TMPDIR": str(sandbox.sandbox_path(self._launch / "tmp")),
        }
        self._network = cache is not None and cache.remote

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
            CompileEdge(self._unit(edge.unit), edge.output)
            for edge in ninja_file.compile_edges(self.path, self._inside)
        ]

    def compile(
        self,
        goals: Sequence[str],
        costs: Costs,
        limits: Limits,
        env: Mapping[str, str] | None = None,
    ) -> Compiled:
        """
        Make *goals*, or everything if there are none.

        Args:
            goals: CMake targets, or objects.
            env: More variables for this run.

        Raises:
            compile-failed, compiler-crashed, compiler-hung, disk-full: A unit failed; what was
            compiled stays. memory-too-small: A unit needs more memory than there is, as measured.
            memory-exceeded: A unit was killed for memory twice, the second time alone.
            build-downloads: A build step asked for a host.
        """
        edges = {edge.output: edge.unit for edge in self.edges()}
        with room_guard(self.path):
            todo = self._outstanding(goals, edges, costs)
            _require_memory(edges, todo, limits)
            order = ninja_file.order(list(todo.values()), limits.cores, limits.megabytes)
            self._write_schedule(costs, order.heavy)
        title = (
            f"compile {self._name}: {len(todo)} units, {order.jobs} at once, "
            f"{limits.megabytes / 1000:.0f} GB"
        )
        with (
            room_guard(self.path),
            self.recording(costs, limits) as (calls, variables),
            console.step(title),
            console.progress("units", len(todo)) as line,
        ):
            show = partial(self._show_progress, line, todo, order.jobs)
            variables.update(env or {})
            self._make(goals, order.jobs, variables, show, edges, costs, limits)
        wanted = [output for output in edges if not goals or _belongs(output, goals)]
        return Compiled(tuple(calls), len(set(wanted) - set(todo)))

    @contextlib.contextmanager
    def recording(
        self, costs: Costs, limits: Limits
    ) -> Iterator[tuple[list[CompilerCall], dict[str, str]]]:
        """
        Record the compiler calls of the block.

        Yields:
            A list that holds the successful calls after the block, and the variables for ninja.
        """
        self._launch.mkdir(exist_ok=True)
        # The calls of a run that was killed.
        self._collect(costs)
        shutil.rmtree(self._launch / "tmp", ignore_errors=True)
        (self._launch / "tmp").mkdir()
        calls: list[CompilerCall] = []
        try:
            yield calls, {**self._env, "SPARKWRIGHT_PATIENCE": str(limits.patience)}
        finally:
            calls += self._collect(costs)
            self._show(calls)

    def _make(
        self,
        goals: Sequence[str],
        jobs: int,
        env: Mapping[str, str],
        show: Callable[[str], None],
        edges: Mapping[str, str],
        costs: Costs,
        limits: Limits,
    ) -> None:
        """Run ninja until *goals* are made; what was killed for memory is made alone, once."""
        alone: set[str] = set()
        while failed := self._ninja(["-j", str(jobs), *goals], env, show):
            killed = [edge.output for edge in failed if self._lacked_memory(edge)]
            others = [edge for edge in failed if edge.output not in killed]
            if others or alone & set(killed):
                raise self._error((others or failed)[0], edges, limits)
            alone.update(killed)
            units = ", ".join(edges.get(output, output) for output in killed)
            console.warn(f"killed for memory, and compiled again with nothing beside it: {units}")
            if failed := self._ninja(["-j", "1", *killed], env, show):
                raise self._alone_error(failed[0], edges, costs, limits)

    def _ninja(
        self, options: Sequence[str], env: Mapping[str, str], show: Callable[[str], None]
    ) -> list[FailedEdge]:
        """Run ninja, and return the failed edges; raise `compile-failed` if it failed itself."""
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            show(line)

        command: list[str | Path] = [
            self._program,
            "-C",
            self._inside,
            "-f",
            ninja_file.SCHEDULE,
            *options,
        ]
        try:
            self._sandbox.run(
                command,
                log=self._log,
                env=env,
                on_line=on_line,
                network=self._network,
                failure=partial(BuildError, "compile-failed"),
                what=f"{self._name} does not compile.",
            )
        except SparkwrightError as error:
            if error.reference not in ("compile-failed", "disk-full"):
                raise
            if failed := list(failures.failed_edges(lines)):
                return failed
            raise
        return []

    def _outstanding(
        self,
        goals: Sequence[str],
        edges: Mapping[str, str],
        costs: Costs,
    ) -> dict[str, Expected]:
        """Return the objects that ninja would make now, with what their units should cost."""
        self._write_schedule(costs, 1)
        outputs: list[str] = []

        def on_line(line: str) -> None:
            if match := _OUTPUT.match(line):
                outputs.append(match[1])

        self._ninja(["-n", "-v", *goals], self._env, on_line)
        return {output: costs.expected(edges[output]) for output in outputs if output in edges}

    def _write_schedule(self, costs: Costs, depth: int) -> None:
        def cost(unit: str) -> Expected:
            return costs.expected(self._unit(unit))

        ninja_file.write_schedule(self.path, self._inside, cost, depth)

    def _collect(self, costs: Costs) -> list[CompilerCall]:
        """Add the successful calls to *costs*, set their file aside, and return them."""
        calls = [call for call in self._recorded_calls() if call.status == 0]
        costs.add((call.unit, call.seconds, call.megabytes) for call in calls if not call.hit)
        self._calls.touch()
        self._calls.replace(self._launch / FINISHED)
        return calls

    def _recorded_calls(self) -> list[CompilerCall]:
        lines = self._calls.read_bytes().splitlines() if self._calls.exists() else []
        calls = []
        for line in lines:
            try:
                call = msgspec.json.decode(line, type=CompilerCall)
            except msgspec.DecodeError:  # cut off, by a full disk for example
                continue
            calls.append(msgspec.structs.replace(call, unit=self._unit(call.unit)))
        return calls

    def _call(self, output: str) -> CompilerCall | None:
        calls = [call for call in self._recorded_calls() if call.output == output]
        return calls[-1] if calls else None

    def _lacked_memory(self, failed: FailedEdge) -> bool:
        call = self._call(failed.output)
        return failed.out_of_memory and not (call and call.hung)

    def _unit(self, source: str) -> str:
        return source.removeprefix(self._source)

    def _error(
        self, failed: FailedEdge, edges: Mapping[str, str], limits: Limits
    ) -> SparkwrightError:
        unit, call = edges.get(failed.output, failed.output), self._call(failed.output)
        if call and call.hung:
            return failures.hung(unit, call.elapsed, limits.patience)
        return failures.compile_error(unit, failed)

    def _alone_error(
        self, failed: FailedEdge, edges: Mapping[str, str], costs: Costs, limits: Limits
    ) -> SparkwrightError:
        call = self._call(failed.output)
        if not self._lacked_memory(failed) or call is None:
            return self._error(failed, edges, limits)
        # The next build knows that the unit is too large, and does not start it.
        seconds = max(call.seconds, costs.expected(call.unit).seconds)
        costs.add([(call.unit, seconds, call.megabytes)])
        available = procfs.available_megabytes()
        return failures.memory_exceeded(call.unit, call.megabytes, limits.megabytes, available)

    def _show_progress(
        self, line: Progress, todo: Mapping[str, Expected], jobs: int, text: str
    ) -> None:
        if not failures.progress(text):
            return
        calls = [call for call in self._recorded_calls() if call.status == 0]
        line.update(len(calls), Path(text.rpartition(" ")[2]).name, remaining(todo, calls, jobs))

    def _show(self, calls: Sequence[CompilerCall]) -> None:
        """Print the units of a run that took longest."""
        compiled = [call for call in calls if not call.hit]
        rows = [
            [call.unit, f"{call.seconds:.0f}", f"{call.elapsed:.0f}", f"{call.megabytes:,}"]
            for call in sorted(compiled, key=lambda call: -call.seconds)[:SHOWN]
        ]
        if rows:
            columns = ["unit", ">CPU s", ">s", ">peak MB of a process"]
            title = f"{self._name}: the longest of {len(compiled)} compiled units"
            console.table(title, columns, rows)


def _belongs(output: str, goals: Sequence[str]) -> bool:
    # CMake names an object CMakeFiles/<target>.dir/….
    return any(goal in ("all", output) or f"CMakeFiles/{goal}.dir/" in output for goal in goals)


def _require_memory(edges: Mapping[str, str], todo: Mapping[str, Expected], limits: Limits) -> None:
    for output, cost in todo.items():
        if cost.measured and cost.megabytes > limits.megabytes:
            available = procfs.available_megabytes()
            raise failures.memory_too_small(
                edges[output], cost.megabytes, limits.megabytes, available
            )


def remaining(todo: Mapping[str, Expected], calls: Sequence[CompilerCall], jobs: int) -> float:
    """
    Return the seconds that the rest of *todo* should take, by the pace of the finished *calls*.

    Costs may come from another host, or from a time when this one had more to do.
    """
    done = {call.output for call in calls}
    rest = [cost.seconds for output, cost in todo.items() if output not in done]
    compiled = [call for call in calls if not call.hit and call.output in todo]
    expected = sum(todo[call.output].seconds for call in compiled)
    pace = sum(call.elapsed for call in compiled) / expected if expected else 1.0
    return pace * max(sum(rest) / jobs, max(rest, default=0.0))


def compile_targets(
    folder: BuildFolder, goals: Sequence[str], costs: Costs, limits: Limits
) -> Compiled:
    """Compile *goals* as `BuildFolder.compile` does, and print a summary."""
    compiled = folder.compile(goals, costs, limits)
    work = duration(sum(call.seconds for call in compiled.units))
    hits = len(compiled.calls) - len(compiled.units)
    summary = [f"{len(compiled.units)} units compiled ({work} of work)"]
    if folder.cached:
        summary.append(f"{hits} taken from the compiler cache")
    console.note(", ".join([*summary, f"{compiled.fresh} were up to date"]))
    return compiled
