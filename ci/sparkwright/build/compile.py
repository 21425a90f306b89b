"""
Compiling: ninja over CMake's build folder, under a memory budget, continued where the last run stopped.

Units that were compiled are never compiled again while their inputs stay; ninja knows them by its log and their header
lists, and the build folder outlives the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sparkwright.build.isolation import Room
from sparkwright.build.toolchain import ForkEnvironment, Toolchain
from sparkwright.console import Progress, console, duration
from sparkwright.errors import CompileFailed
from sparkwright.forks.session import Session

#: Of the memory that is available when the build starts; the rest is left to the system, which shares it with the GPU on a GB10.
SHARE = 0.85
#: What a unit without a record and without a pattern may hold, in megabytes; typical units of vLLM 0.33.0 peak at 450-760.
DEFAULT_MB = 1200


class Event(msgspec.Struct, frozen=True):
    """A line of the launcher: a unit started, or ended with its cost in seconds and peak megabytes of one process."""

    event: str
    unit: str
    status: int = 0
    seconds: float = 0
    megabytes: int = 0


class Compiled(msgspec.Struct, frozen=True):
    """
    The outcome of a run.

    Attributes:
        units: Units compiled by this run; those that were up to date are not among them.
        seconds: Their work together, on one core.
    """

    units: tuple[str, ...]
    seconds: float


def launcher(folder: Path) -> Path:
    """Return the launcher's copy in *folder*, made when missing or out of date."""
    copy = folder / "launch.py"
    text = (Path(__file__).parent / "launch.py").read_bytes()
    if not copy.exists() or copy.read_bytes() != text:
        copy.write_bytes(text)
    return copy


def budget(session: Session) -> int:
    """Return the megabytes that compilers may hold together."""
    import psutil

    return int((session.memory or psutil.virtual_memory().available * SHARE) / 1e6)


def compile_targets(
    session: Session, tools: Toolchain, settings: ForkEnvironment, fork: str, work: Path, env: Mapping[str, str], room: Room
) -> Compiled:
    """
    Compile the fork's targets in ``work/build``, whose sources lie in ``work/src``.

    Args:
        env: Variables of the configure step, which ninja may repeat.
        room: Where ninja runs; the folders of *work* may have other names in there.

    Raises:
        CompileFailed: A unit was refused or killed; what was compiled stays.
    """
    import psutil

    traces, units = _traces(session, fork), _count(work / "build", settings)
    launch = work / "launch"
    shutil.rmtree(launch / "running", ignore_errors=True)
    launch.mkdir(exist_ok=True)
    (launch / "events.jsonl").write_text("")
    plan = {
        "root": f"{room.inside(work / 'src')}/", "budget": budget(session), "default": DEFAULT_MB, "patterns": list(settings.memory.items()),
        "units": {unit: cost[1] for unit, cost in traces.items()},
    }  # fmt: skip
    (launch / "plan.json").write_bytes(msgspec.json.encode(plan))
    jobs = session.jobs or psutil.cpu_count() or 1
    log = session.store.folder("logs") / f"{session.project.stack}-{fork}-compile.log"
    command: list[str | Path] = [tools.tool("ninja"), "-C", room.inside(work / "build"), "-j", str(jobs), *settings.targets]
    environment = {**env, "SPARKWRIGHT_LAUNCH": str(room.inside(launch)), "NINJA_STATUS": "[%f/%t] "}
    with console.step(f"compile {fork}: {jobs} jobs, {budget(session) / 1000:.0f} GB"), console.progress("units", 0) as line:
        watch = _Watch(launch, line, traces, settings.seconds / max(units, 1), jobs)
        try:
            room.run(command, log=log, env=environment, on_line=watch.line, failure=CompileFailed, what=f"{fork} does not compile.")
        finally:
            _keep(session, fork, traces, watch.ended())
        done = [event for event in watch.ended() if event.status == 0]
        compiled = Compiled(tuple(sorted(event.unit for event in done)), round(sum(event.seconds for event in done), 1))
        fresh = units - len(compiled.units)
        console.note(f"{len(compiled.units)} units compiled ({duration(compiled.seconds)} of work), {fresh} were up to date")
    return compiled


def _count(build: Path, settings: ForkEnvironment) -> int:
    """Return how many units the targets have, as CMake wrote them down."""
    commands = msgspec.json.decode((build / "compile_commands.json").read_bytes(), type=list[dict[str, str]])
    folders = [f"CMakeFiles/{target}.dir/" for target in settings.targets]
    return sum(any(folder in command["output"] for folder in folders) for command in commands)


class _Watch:
    """Turns ninja's lines and the launcher's events into the live line."""

    def __init__(self, launch: Path, line: Progress, traces: Mapping[str, tuple[float, int]], typical: float, jobs: int) -> None:
        self._events, self._line, self._traces, self._typical, self._jobs = launch / "events.jsonl", line, traces, typical, jobs

    def events(self) -> Iterator[Event]:
        for row in self._events.read_bytes().splitlines():
            yield msgspec.json.decode(row, type=Event)

    def ended(self) -> list[Event]:
        return [event for event in self.events() if event.event == "end"]

    def line(self, text: str) -> None:
        """Read a line of ninja, of the form ``[done/total] what``."""
        counts, _, what = text.removeprefix("[").partition("] ")
        done, slash, total = counts.partition("/")
        if not (text.startswith("[") and slash and done.isdigit() and total.isdigit()):
            return
        self._line.total = float(total)
        ended = {event.unit for event in self.ended()}
        running = [event.unit for event in self.events() if event.event == "start" and event.unit not in ended]
        expected = [self._traces[unit][0] for unit in self._traces if unit not in ended] if self._traces else []
        known = sum(expected[: int(total) - int(done)]) if expected else (int(total) - int(done)) * self._typical
        self._line.update(float(done), ", ".join(Path(unit).name for unit in running[:3]) or what[-60:], known / self._jobs)


def _traces(session: Session, fork: str) -> dict[str, tuple[float, int]]:
    """Return what units cost the last time: unit → (seconds, peak megabytes)."""
    return session.store.get("traces", f"{session.project.stack}-{fork}", dict[str, tuple[float, int]]) or {}


def _keep(session: Session, fork: str, traces: dict[str, tuple[float, int]], events: list[Event]) -> None:
    fresh = {event.unit: (event.seconds, event.megabytes) for event in events if event.status == 0}
    if fresh:
        session.store.put("traces", f"{session.project.stack}-{fork}", {**traces, **fresh})
