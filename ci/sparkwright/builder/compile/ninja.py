"""
Compiling: ninja over CMake's build folder, every compiler behind the gate, continued where the last run stopped.

Units that were compiled are never compiled again while their inputs stay; ninja knows them by its log and their header
lists, and the build folder outlives the run. What another build folder compiled comes from the compiler cache.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.builder.compile import procfs
from sparkwright.builder.compile import report as compilereport
from sparkwright.builder.compile.calls import Limits, Outcome
from sparkwright.builder.compile.costs import Traces
from sparkwright.builder.compile.gate import Gate
from sparkwright.builder.environment import ccache
from sparkwright.builder.environment.sandbox import Room
from sparkwright.builder.environment.toolchain import ForkEnvironment, Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.core import schedule
from sparkwright.core.console import Progress, console, duration
from sparkwright.core.schedule import Unit
from sparkwright.forks import context as sessions
from sparkwright.forks.context import Session

#: Of the memory that is available when the build starts; the rest is left to the system, which shares it with the GPU on a GB10.
SHARE = 0.85
#: What stays available to other programs: this share of the budget, but no more than so many megabytes.
RESERVE, MOST_RESERVED = 0.1, 2000
#: How many launchers may wait at once, so that the longest of so many units goes first. A waiting one takes 3.5 MB for itself (200 of
#: them, Python 3.11), so all of them 0.9 GB beside the budget.
WINDOW = 256

_COMPILES = re.compile(r"^\[\d+/\d+\] .* -c (\S+)", re.DOTALL)


class Event(msgspec.Struct, frozen=True):
    """
    A line of the gate's ``events.jsonl``, written when it happens.

    Attributes:
        event: ``start``, ``end``, ``hit`` (the cache had it) or ``stop`` (ended to make room; it starts again).
        seconds, megabytes: What it cost until then; the peak of its processes together.
    """

    event: str
    unit: str
    status: int = 0
    seconds: float = 0
    megabytes: int = 0


class Compiled(msgspec.Struct, frozen=True):
    """
    The outcome of a run.

    Attributes:
        units: Compiled by this run.
        hits: Taken from the compiler cache by this run.
        fresh: How many were up to date.
        seconds: The CPU time of the compiled units together.
    """

    units: tuple[str, ...]
    seconds: float
    hits: tuple[str, ...] = ()
    fresh: int = 0


def launcher(folder: Path) -> Path:
    """Return the launcher's copy in *folder*, made when missing or out of date."""
    copy = folder / "launch.py"
    text = (Path(__file__).parent / "launch.py").read_bytes()
    if not copy.exists() or copy.read_bytes() != text:
        copy.write_bytes(text)
    return copy


def budget(session: Session) -> int:
    """Return the megabytes that compilers may hold together."""
    return session.memory // 1_000_000 or int(procfs.available_megabytes() * SHARE)


def limits(session: Session) -> Limits:
    """Return what the compilers of *session* may take."""
    megabytes = budget(session)
    cores = session.jobs or len(os.sched_getaffinity(0))
    made = Limits(cores, megabytes, reserve=min(int(megabytes * RESERVE), MOST_RESERVED))
    return msgspec.structs.replace(made, patience=session.unit_timeout) if session.unit_timeout else made


def compile_targets(
    session: Session, tools: Toolchain, settings: ForkEnvironment, fork: str, work: Path, env: Mapping[str, str], room: Room,
    near: frozenset[str] = frozenset(), goals: Sequence[str] = (),
) -> Compiled:  # fmt: skip
    """
    Compile the fork's targets in ``work/build``, whose sources lie in ``work/src``.

    Args:
        env: Variables of the configure step, which ninja may repeat.
        room: Where ninja runs; the folders of *work* may have other names in there.
        near: Units that our changes reach; they come first, since they are what fails.
        goals: What ninja is to make; the fork's targets when empty.

    Raises:
        compile-failed, compiler-crashed, compiler-hung, memory-too-small, memory-exceeded, disk-full: See there; what was compiled stays.
    """
    run = Run(session, tools, fork, work, room, goals or tuple(settings.targets), env)
    gate = run.compile(near)
    compiled = _summary(gate.outcomes, run.units(settings))
    said = f"{len(compiled.units)} units compiled ({duration(compiled.seconds)} of work)"
    hits = f", {len(compiled.hits)} taken from the compiler cache" if run.cache else ""
    console.note(f"{said}{hits}, {compiled.fresh} were up to date")
    return compiled


def report(session: Session, fork: str, allowed: Limits, gate: Gate) -> None:
    """Keep and show what a run cost, one that failed too; a run that had nothing to do leaves the last report as it is."""
    made = compilereport.of(fork, session.project.stack, allowed, gate.outcomes, gate.samples)
    if not any(not unit.hit for unit in made.units):
        return
    name = session.named(f"{session.project.stack}-{fork}")
    session.store.put("reports", name, made)
    path = session.store.write(f"logs/{name}-compile.svg", compilereport.plot(made).encode())
    compilereport.show(made)
    console.note(f"memory and units over time: {path}")


def _summary(outcomes: Sequence[Outcome], total: int) -> Compiled:
    done = [outcome for outcome in outcomes if outcome.status == 0]
    units = tuple(sorted(outcome.unit for outcome in done if not outcome.hit))
    hits = tuple(sorted(outcome.unit for outcome in done if outcome.hit))
    seconds = round(sum(outcome.cpu for outcome in done if not outcome.hit), 1)
    return Compiled(units, seconds, hits, max(0, total - len(done)))


class Run:
    """
    ninja, in its room, over one build folder.

    Args:
        goals: What it is to make; everything when empty.
        env: Variables of the configure step.
        extra: Variables for this run alone.
    """

    def __init__(
        self, session: Session, tools: Toolchain, fork: str, work: Path, room: Room, goals: Sequence[str], env: Mapping[str, str],
        extra: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._session, self._fork, self._room, self._goals = session, fork, room, goals
        self._log = session.store.folder("logs") / f"{session.project.stack}-{session.named(fork)}-compile.log"
        self._command: list[str | Path] = [tools.tool("ninja"), "-C", room.inside(work / "build")]
        self.build, self.launch, self.root = work / "build", work / "launch", f"{room.inside(work / 'src')}/"
        self.cache = ccache.of(session, sessions.config().compiler_cache, None if room.places else session.store.root)
        inside = room.inside(self.launch)
        # Temporary files of compilers go where the next run finds and removes them, and not into a /tmp that may be memory.
        ours = {"SPARKWRIGHT_LAUNCH": str(inside), "NINJA_STATUS": "[%f/%t] ", "TMPDIR": str(inside / "tmp")}
        self._env = {**ccache.without_settings(env), **(self.cache.environment if self.cache else {}), **ours, **(extra or {})}

    def compile(self, near: frozenset[str] = frozenset()) -> Gate:
        """
        Make the goals behind a gate, and return it, closed.

        Raises:
            compile-failed, compiler-crashed, compiler-hung, memory-too-small, memory-exceeded, disk-full: See there; what was compiled
            stays.
        """
        allowed, traces, todo = limits(self._session), Traces.of(self._session, self._fork), self.outstanding()
        units = [Unit(unit, expected.seconds, expected.megabytes) for unit in todo for expected in [traces.expected(unit)]]
        order = {unit.name: place for place, unit in enumerate(schedule.arrange(units, allowed.cores, allowed.megabytes, near))}
        title = f"compile {self._fork}: {len(todo)} units, {allowed.cores} at once, {allowed.megabytes / 1000:.0f} GB"
        with console.step(title), console.progress("units", len(todo)) as line:
            watch = _Watch(line, units, allowed, traces)
            gate = Gate(
                self.launch, allowed, traces.expected, cache=self.cache.program if self.cache else "", root=self.root, urgency=order,
                coming=min(len(todo), WINDOW), ended=watch.ended, tick=watch.tick,
            )  # fmt: skip
            try:
                with gate, self._door() as door:
                    self._ninja({**gate.environment, **door})
            except BuildError as error:
                if error.reference != "compile-failed":
                    raise
                raise gate.failure or error from error
            finally:
                report(self._session, self._fork, allowed, gate)
        return gate

    def _door(self) -> contextlib.AbstractContextManager[dict[str, str]]:
        return self.cache.door(self.launch, self._room.inside(self.launch)) if self.cache else contextlib.nullcontext({})

    def units(self, settings: ForkEnvironment) -> int:
        """Return how many units the targets have, as CMake wrote them down."""
        folders = [f"CMakeFiles/{target}.dir/" for target in settings.targets]
        # Without targets ninja makes all that there is (`sparkwright.builder.wheel.flashinfer_aot`).
        return sum(not folders or any(folder in command.output for folder in folders) for command in commands(self.build))

    def outstanding(self) -> list[str]:
        """Return the units that ninja would make now, in its order."""
        found: list[str] = []

        def line(text: str) -> None:
            if match := _COMPILES.match(text):
                found.append(match[1].removeprefix(self.root))

        log = self._log.with_suffix(".plan.log")
        command = [*self._command, "-n", "-v", *self._goals]
        self._room.run(
            command,
            log=log,
            env=self._env,
            on_line=line,
            failure=partial(BuildError, "compile-failed"),
            what=f"ninja cannot plan {self._fork}.",
        )
        return list(dict.fromkeys(found))

    def tool(self, name: str) -> list[str]:
        """Return what ``ninja -t NAME`` prints."""
        said: list[str] = []
        log = self._log.with_suffix(f".{name}.log")
        self._room.run(
            [*self._command, "-t", name], log=log, env=self._env, on_line=said.append, failure=partial(BuildError, "compile-failed")
        )
        return said

    def _ninja(self, extra: Mapping[str, str]) -> None:
        """
        Make the goals.

        Raises:
            compile-failed: Something could not be made.
        """
        command, env = [*self._command, "-j", str(WINDOW), *self._goals], {**self._env, **extra}
        self._room.run(
            command, log=self._log, env=env, failure=partial(BuildError, "compile-failed"), what=f"{self._fork} does not compile."
        )


class Command(msgspec.Struct, frozen=True):
    """A compiler call as CMake wrote it down; *file* is the source, *output* the object in the build folder."""

    directory: str
    command: str
    file: str
    output: str = ""


def commands(build: Path) -> list[Command]:
    """Return the compiler calls of the build folder; none where its generator writes none down."""
    path = build / "compile_commands.json"
    return msgspec.json.decode(path.read_bytes(), type=list[Command]) if path.exists() else []


class _Watch:
    """Turns what the gate says into records, and into the live line."""

    def __init__(self, line: Progress, units: Sequence[Unit], allowed: Limits, traces: Traces) -> None:
        self._line, self._left, self._allowed, self._traces = line, {unit.name: unit for unit in units}, allowed, traces
        self._done = 0

    def ended(self, outcome: Outcome) -> None:
        """Keep what a unit cost, at once: a run that is killed later has learnt it."""
        self._left.pop(outcome.unit, None)
        self._done += outcome.status == 0
        if outcome.instructive:
            self._traces.add(outcome.unit, outcome.cpu, outcome.megabytes)

    def tick(self, gate: Gate) -> None:
        """Show what runs."""
        running = gate.running
        left = schedule.lower_bound(list(self._left.values()), self._allowed.cores, self._allowed.megabytes)
        self._line.update(self._done, ", ".join(Path(unit).name for unit in running[:3]), left)
