"""The server itself: started with exactly what was resolved, watched while it loads and serves, and gone at the end, whatever ended it."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.server.launch import SupervisedProcess, is_ready
from sparkwright.bench.server.server_log import LogInvalid, LogPattern, scan
from sparkwright.core import errors
from sparkwright.core.console import console, duration
from sparkwright.core.store import Store
from sparkwright.serving import held, loading, ports, room
from sparkwright.serving.asked import Asked
from sparkwright.serving.environment import ServingEnvironment, changes
from sparkwright.serving.errors import ServeError
from sparkwright.serving.held import Held, Running
from sparkwright.serving.resolve import Ready

#: Seconds between two looks at the log and the memory; a Spark's memory is gone within seconds (vllm #56824).
LOOK = 0.25
#: Seconds between two questions whether it is ready.
ASK = 0.5
#: Lines of a server that died which are shown; logs that are kept.
SHOWN, LOGS = 15, 10

_ERROR = LogPattern(("Error: ", "Exception: "), r"(?:^|\] )(?P<value>[\w.]*(?:Error|Exception): .*)")

_FAILURES = frozenset({"memory-low", "graph-memory-negative", "server-late"})


def log_path(store: Store, name: str) -> Path:
    """Return a new file for what a server prints; of earlier ones only the newest stay."""
    folder = store.folder("logs")
    for old in sorted(folder.glob("serve-*.log"))[: -LOGS + 1]:
        old.unlink(missing_ok=True)
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)[:60]
    return folder / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{plain}.log"


def record(ready: Ready, log: Path, phase: held.Phase) -> Running:
    """Return what others are told of the server."""
    environment, wish = ready.environment, ready.wish
    return Running(
        os.getpid(), held.born(os.getpid()), time.time(), phase, wish.recipe, ready.name, ready.model.says, str(environment.python), environment.vllm,
        environment.wheel, environment.release, str(log), ports.asked_at(wish.host, wish.port), wish.role, ready.nodes, wish.head,
    )  # fmt: skip


def serve(ready: Ready, lock: Held, asked: Asked, store: Store, log: Path) -> int:
    """
    Serve until somebody asks to stop, and return the exit code: 0 after it was ready, 130 before.

    Raises:
        port-taken, memory-held: It cannot start. server-died, server-late, memory-low, graph-memory-negative: It ended, or was ended, by
        itself.
    """
    now = record(ready, log, "loading")
    lock.write(now)
    ports.check(ready.wish.host, ready.wish.port)
    room.check(ready.needs, ready.floor)
    launch = ready.launch
    console.note(f"log: {log}")
    asked.gently = True
    kept = SupervisedProcess(
        launch.command(ready.wish.port, ready.wish.host), launch.environment(), log,
        grace=launch.grace, reserve=ready.floor, pass_fds=(lock.descriptor,),
    )  # fmt: skip
    try:
        look_after(ready.environment)
        if not _load(kept, ready, now, asked, store):
            console.note("stopped while it loaded")
            return 130
        lock.write(replace(now, phase="serving"))
        _announce(ready, now)
        while not asked.times:
            guarded(kept, log)
            time.sleep(LOOK)
        lock.write(replace(now, phase="stopping"))
        return 0
    finally:
        stop(kept, asked)


def look_after(environment: ServingEnvironment) -> None:
    """Say, a little later, whether something changed the installed set; the server need not wait for it."""

    def look() -> None:
        try:
            found = changes(environment)
        except errors.SparkwrightError as error:
            found = [error.what]
        if found:
            console.warn(f"the installed set was changed ({'; '.join(found)[:500]}); `sparkwright install --renew --version {environment.release}` makes it anew")

    threading.Thread(target=look, daemon=True).start()


def _load(kept: SupervisedProcess, ready: Ready, now: Running, asked: Asked, store: Store) -> bool:
    """Wait until the server serves, and return whether it does: False where somebody asked to stop first."""
    address = loading.key(now.recipe, ready.model.commit or ready.model.path.name, now.wheel or now.version, *ready.launch.flags)
    passed: Callable[[str], None] | None = (lambda text: console.note(f"| {text}")) if console.verbose else None
    watch = loading.Watch(kept.log, loading.recall(store, address), passed)
    with _answering(now.url, ready) as serves, console.progress(f"load {ready.name}", 0) as line:
        while not asked.times:
            watch.look()
            guarded(kept, kept.log)
            if serves.is_set():
                break
            line.update(round(watch.seconds), f"s  {watch.says()}", watch.remaining())
            if watch.seconds > ready.launch.timeout:
                kept.end("server-late", f"it does not answer after {watch.seconds:.0f} s")
            time.sleep(LOOK)
    if asked.times:
        return False
    loading.keep(store, address, times := watch.close())
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items() if seconds >= 0.1)
    console.note(f"ready after {duration(watch.seconds)}: {phases}")
    return True


@contextlib.contextmanager
def _answering(url: str, ready: Ready) -> Iterator[threading.Event]:
    """Yield what is set once the server serves; a server that takes connections and says nothing must not keep us from its memory."""
    key = ready.launch.variables.get("VLLM_API_KEY", "")
    serves, over = threading.Event(), threading.Event()

    def ask() -> None:
        while not over.is_set():
            if is_ready(url, ready.name, key):
                serves.set()
                return
            over.wait(ASK)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield serves
    finally:
        over.set()


def guarded(kept: SupervisedProcess, log: Path) -> None:
    """Raise what ended the server, if anything did."""
    if kept.guard():
        return
    details = [*tail(log), *cause(log), f"full log: {log}"]
    if kept.reason in _FAILURES:
        raise ServeError(kept.reason, f"The server was ended: {kept.failure}.", details=details)
    raise ServeError("server-died", f"vLLM is gone: {kept.failure}.", details=details)


def cause(log: Path) -> list[str]:
    """Return the first error in *log*, which is what the others come of, in a sentence."""
    try:
        found = scan(log, {"error": _ERROR})["error"].values
    except LogInvalid:
        return []
    return [f"first error: {next(iter(found))[:300]}"] if found else []


def tail(log: Path) -> list[str]:
    """Return the last lines of *log*, printable and not too long."""
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - 20_000))
        lines = source.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
    plain = ("".join(letter for letter in line if letter.isprintable())[:300] for line in lines)
    return [line for line in plain if line.strip()][-SHOWN:]


def _announce(ready: Ready, now: Running) -> None:
    secret = "VLLM_API_KEY" in ready.launch.variables
    asked = {"model": ready.name, "prompt": "A Spark is", "max_tokens": 16}
    question = shlex.quote(msgspec.json.encode(asked).decode())
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if secret else ""
    console.note(f"serving {ready.name} at {now.url} (listening on {ready.wish.host} port {ready.wish.port})")
    console.note(f"  ask:  curl {now.url}/v1/completions -H 'Content-Type: application/json'{key} -d {question}")
    console.note(f"  look: sparkwright serve --health        stop: Ctrl-C, or kill {now.pid}")


def stop(kept: SupervisedProcess, asked: Asked) -> None:
    """End *kept* in order; whoever asks a second time does not want to wait for that."""
    kept.ask_to_end()
    until = time.monotonic() + held.ENDING + 20
    while kept.running and time.monotonic() < until:
        if asked.times > 1:
            kept.kill("stopped", "it was stopped at once")
        time.sleep(0.05)
    kept.stop()
