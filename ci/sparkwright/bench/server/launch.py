"""
A vLLM server that a gate starts: from a given environment, with a bounded log and known variables.

vLLM ignores a ``VLLM_`` variable that its release does not read, so a server with one would run
otherwise than intended and is refused. A server is watched while it runs, and ends with the process
that started it (`subreaper`). It may run as another user, who can change neither the caller's files
nor its memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import psutil

from sparkwright.bench.machine.watchdog import watch_memory
from sparkwright.bench.server import peers, server_log, wheel_identity
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.peers import Machines
from sparkwright.bench.server.subreaper import KILL_SECONDS
from sparkwright.core import config, strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import Advice, SparkwrightError, UsageError
from sparkwright.core.files import read_text, sha256_bytes
from sparkwright.core.memory import MachineMemory
from sparkwright.core.process import cache_variables, wrap_with_limits

#: Variables that pass from the caller to a server. Only a recipe changes how vLLM computes;
#: LD_LIBRARY_PATH and PYTHONPATH would replace code of the wheel.
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    "HF_HOME", "HF_HUB_CACHE", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    # A rehearsal finds a server that outlived its gate by these variables.
    "SPARKWRIGHT_COMMAND", "SPT_NOENV",
)  # fmt: skip

#: Variables of every server: nothing is fetched or reported, and the log comes line by line.
ALWAYS = {
    "LC_ALL": "C.UTF-8",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
}

#: Variables of a gate's servers: with it vLLM counts the requests with logits that are not numbers.
GATED = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}


#: Variables of patches: GiB that vLLM leaves free when it sizes the KV cache, and whether a process
#: that waits for another one sleeps.
RESERVE, SLEEP = "VLLM_MEMORY_RESERVE_GIB", "VLLM_SHM_READER_SLEEP"

#: The script that supervises a command; neither variables of the command nor its folder change
#: what it imports.
SUPERVISOR = (sys.executable, "-E", "-P", str(Path(__file__).with_name("subreaper.py")))


class VariableError(SparkwrightError):
    """A server is started with a variable that it does not read as intended."""

    references: ClassVar[Mapping[str, Advice]] = {
        "variable-refused": Advice(
            "A variable has a wrong value, or a name that nothing reads, so the server would run "
            "otherwise than intended.",
            "Correct or remove it as the lines above say; docs/reference/commands.md lists "
            "the variables.",
        ),
    }


#: A draft vocabulary of a recipe in ``--speculative-config``.
_VOCABULARY = re.compile(r'(?<="draft_vocabulary":")([a-z0-9][a-z0-9._-]*\.json)@[0-9a-f]{64}(?=")')


def vocabulary_file(name: str) -> Path:
    """Return the file of the draft vocabulary *name* of a recipe."""
    return config.root() / "ci" / "recipes" / name


def _vocabulary_path(match: re.Match[str]) -> str:
    return json.dumps(str(vocabulary_file(match[1])))[1:-1]


def read_variables(package: Path) -> list[str]:
    """Return the ``VLLM_`` variables that the installed *package* reads, by its ``envs.py``."""
    table = package / "envs.py"
    return re.findall(r"""["'](VLLM_\w+)["']\s*:""", read_text(table) if table.exists() else "")


def shared_variables(machine: MachineMemory, floor: float, package: Path) -> dict[str, str]:
    """
    Return the variables by which the vLLM in *package* leaves to the CPU what it shares with the
    GPU of *machine*: *floor* GiB of memory, and power. Those that it does not read are left out.
    """
    if not machine.unified:
        return {}
    derived = {RESERVE: f"{floor:g}", SLEEP: "1"}
    return {name: derived[name] for name in read_variables(package) if name in derived}


def check_variables(variables: Mapping[str, str], package: Path) -> None:
    """
    Check the ``VLLM_`` *variables* against the table in ``envs.py`` of the installed *package*.

    Raises:
        variable-refused: vLLM does not read one, so it would change nothing.
    """
    read = read_variables(package)
    unread = sorted(name for name in variables if name.startswith("VLLM_") and name not in read)
    if not read or not unread:
        return
    removed = strict_yaml.load(config.root() / "ci" / "variables.yaml", dict[str, str])
    details = [f"{name}: {removed.get(name, 'unknown')}" for name in unread]
    raise VariableError(
        "variable-refused",
        f"The installed vLLM does not read {', '.join(unread)}.",
        details=details,
    )


class LaunchPlan(msgspec.Struct, frozen=True):
    """
    How a server is started.

    Attributes:
        python: The Python of the environment that vLLM is installed in.
        model: Folder of the model.
        flags: Further arguments of ``vllm serve``.
        variables: Variables beside `PASSED`, `ALWAYS` and those of the caches of a virtual
            environment; an empty value removes one.
        name: The name under which the model is served.
        timeout: Seconds until it must be ready.
        reserve: Megabytes that must stay available on the machine, else the server is killed,
            whatever the caller does meanwhile; 0 for no floor.
        grace: Seconds between the request to end and the kill.
        user: The user that it runs as; empty for that of the caller.
        machines: The machines of one server; None for this one alone, or if others join them.
    """

    python: Path
    model: Path
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    name: str = "model"
    timeout: float = 1800.0
    reserve: int = 0
    grace: float = 20.0
    user: str = ""
    machines: Machines | None = None

    def check(self) -> None:
        """
        Check that the environment reads the variables, and that there is the user.

        Raises:
            environment-unusable: There is no such Python.
            variable-refused: The installed vLLM does not read a variable.
            UsageError: There is no such user.
        """
        check_variables(self.variables, wheel_identity.site_packages(self.python) / "vllm")
        self.environment()

    def environment(self) -> dict[str, str]:
        """
        Return all variables of the server.

        Raises:
            UsageError: There is no such user.
        """
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment, caches = self.python.absolute().parent.parent, dict[str, str]()
        if self.user:
            home = _home(self.user)
            own = {"HOME": str(home), "USER": self.user, "LOGNAME": self.user, "TMPDIR": ""}
            passed |= {**own, "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "", "HF_HOME": ""}
            caches = cache_variables(home / ".cache" / sha256_bytes(bytes(environment))[:16])
        elif (environment / "pyvenv.cfg").is_file() and os.access(environment, os.W_OK):
            caches = cache_variables(environment)
        variables = {**passed, **ALWAYS, **caches, **self.variables}
        return {name: value for name, value in variables.items() if value}

    def command(self, port: int, host: str = "127.0.0.1") -> list[str]:
        """Return the command line, in which a draft vocabulary of a recipe is a file."""
        program = [str(self.python), "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
        address = ["--served-model-name", self.name, "--host", host, "--port", str(port)]
        flags = [_VOCABULARY.sub(_vocabulary_path, flag) for flag in self.flags]
        return [*program, str(self.model), *address, *flags]


class Server:
    """
    A server and all its descendants, which end when this process does. Its ``with`` block is
    entered when the server is ready or has failed.

    Raises:
        environment-unusable: There is no such Python.
        variable-refused: The installed vLLM does not read a variable of *plan*.
        peer-missing, peers-differ, link-failed, link-slow: As `peers.gather`.

    Attributes:
        plan: How it was started.
        log: The file with its output.
        url: Its address.
        failure: Why it does not run as it should, in a sentence; empty while it does.
        reason: ``server-late``, ``server-died``, ``memory-low``, ``kernel-no-memory``,
            ``log-unreadable``, or the reason given to `end`.
    """

    def __init__(self, plan: LaunchPlan, log: Path) -> None:
        plan.check()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self.plan, self.log, self.url = plan, log, f"http://127.0.0.1:{port}"
        self.failure, self.reason = "", ""
        self._stopped = threading.Event()
        environment = plan.environment()
        self._links = list[socket.socket]()
        if plan.machines:
            words = plan.machines, plan.python, plan.model, plan.flags, environment
            self._links, _ = peers.gather(*words)
        command = wrap_with_limits(plan.command(port), path=environment.get("PATH"))
        command = [*SUPERVISOR, str(plan.grace), *command]
        if plan.user:
            command = _as_user(plan.user, command, environment)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        if plan.reserve:
            watched = plan.reserve, functools.partial(self.end, order=b"k"), self._stopped
            threading.Thread(target=watch_memory, args=watched, daemon=True).start()

    def __enter__(self) -> Self:
        begin = time.monotonic()
        try:
            with console.progress("start the server", 0) as progress:
                while self.guard() and not self._answers():
                    seconds = time.monotonic() - begin
                    if seconds > self.plan.timeout:
                        self.end("server-late", f"it does not answer after {seconds:.0f} s")
                    progress.update(round(seconds), "s")
                    time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def client(self, *, deadline: float = 900.0) -> Client:
        """Return a client; the first request for logprobs may compile for minutes."""
        return Client(self.url, self.plan.name, deadline=deadline)

    def _answers(self) -> bool:
        with contextlib.suppress(ServerInvalid):
            return bool(self.client(deadline=10).model())
        return False

    def processes(self) -> list[psutil.Process]:
        """Return its processes, whatever session they are in."""
        try:
            supervisor = psutil.Process(self._process.pid)
            while supervisor.name() == "sudo":
                supervisor = supervisor.children()[0]
            return supervisor.children(recursive=True)
        except (psutil.NoSuchProcess, IndexError):
            return []

    def guard(self) -> bool:
        """
        Return whether it runs as it should; call this repeatedly.

        It is ended if its log becomes too large.
        """
        if not self.failure and self.log.stat().st_size > server_log.LARGEST:
            self.end("log-unreadable", f"its log has more than {server_log.LARGEST} bytes")
        if not self.failure and self._links and select.select(self._links, [], [], 0)[0]:
            self.end("server-died", "another machine that serves with it has ended or is lost")
        if not self.failure and not self.running:
            self.end("server-died", f"it ended by itself, with status {self._process.returncode}")
        return not self.failure

    def end(self, reason: str, failure: str, order: bytes = b"t") -> None:
        """
        End it for *reason*, as `stop` does, from any thread; may be repeated, the first reason
        counts.
        """
        # The cause is stored first, so that it is there when another thread sees the server end.
        self.failure, self.reason = self.failure or failure, self.reason or reason
        self.stop(order)

    def stop(self, order: bytes = b"t") -> None:
        """Send *order* to the supervisor, and wait until the server is gone; may be repeated."""
        supervisor = self._process
        assert supervisor.stdin
        with contextlib.suppress(OSError, ValueError):
            supervisor.stdin.write(order)
        try:
            supervisor.wait(timeout=self.plan.grace + KILL_SECONDS + 20)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            with contextlib.suppress(OSError, ValueError):
                supervisor.stdin.write(b"k")
            supervisor.stdin.close()
            supervisor.wait()
        # The other machines' guards see the connection close, and end their servers.
        for link in self._links:
            link.close()
        self._links = []
        self._stopped.set()
        self.failure = self.failure or "it was stopped"


def _as_user(user: str, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """
    Return the command line that runs *command* as *user* with exactly *environment*.

    Root changes the user by util-linux's setpriv, without any capability; others by sudo, which
    must not ask for a password.
    """
    words = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), *command]
    if os.geteuid():
        return ["sudo", "-n", "-u", user, "--", *words]
    account = pwd.getpwnam(user)
    ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"]
    return ["setpriv", *ids, "--bounding-set=-all", "--no-new-privs", "--", *words]


def _home(user: str) -> Path:
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        raise UsageError(
            "usage", f"There is no user {user!r:.80} on this machine.", todo="Make it: useradd."
        ) from None
