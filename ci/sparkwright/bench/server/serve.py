"""
A vLLM server that a gate starts: from a given environment, with a known log and known variables, and gone when the gate is gone.

The caller's variables reach it through a list of what may pass; a recipe adds its own. While the server starts, its log is watched
(`sparkwright.bench.server.kept`).
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.keeper import Order
from sparkwright.bench.server.kept import Kept
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError

#: Variables that pass from the caller to a server. What changes how vLLM computes is the recipe's alone; LD_LIBRARY_PATH and PYTHONPATH
#: would put other code in the place of the wheel's.
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE", "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip

#: What every server of a gate has: nothing is fetched or reported, and the log comes line by line.
ALWAYS = {
    "LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
}  # fmt: skip

#: What a gate's servers have besides: vLLM counts the requests whose logits are not numbers only then, and G4 asks for the count.
GATED = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}


class Launch(msgspec.Struct, frozen=True):
    """
    How a server is started.

    Attributes:
        python: The Python of the environment that vLLM is installed in.
        model: Folder of the model.
        flags: Further arguments of ``vllm serve``.
        variables: Environment variables beside `PASSED` and `ALWAYS`; an empty value takes one away.
        name: The name under which the model is served.
        patience: Seconds until it must answer.
        reserve: Megabytes that must stay free on the machine; below that the server is ended. 0 for no such floor.
        grace: Seconds that it has to end by itself: it gives memory back, and removes what its processes share.
    """

    python: Path
    model: Path
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    name: str = "model"
    patience: float = 1800.0
    reserve: int = 0
    grace: float = 20.0

    def environment(self) -> dict[str, str]:
        """Return all variables that the server has."""
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        return {name: value for name, value in {**passed, **ALWAYS, **self.variables}.items() if value}

    def command(self, port: int, host: str = "127.0.0.1") -> list[str]:
        """Return the command line, as people would type it."""
        return [
            str(self.python), "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(self.model), "--served-model-name", self.name,
            "--host", host, "--port", str(port), *self.flags,
        ]  # fmt: skip


class Server(Kept):
    """
    A server that runs inside its ``with`` block, or why it does not.

    Attributes:
        launch: How it was started.
        url: Where it answers.
        reference: As `Kept.reference`, or ``server-late``.
    """

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch = launch
        if not launch.python.exists():
            raise CommandError("tool-missing", f"There is no Python at {launch.python}.")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(launch.command(port), Order(launch.environment(), launch.grace), log, reserve=launch.reserve)

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return not self.ended

    def client(self, *, deadline: float = 900.0) -> Client:
        """Return a client of it; patient, since a server compiles when it is first asked for logprobs and the like."""
        return Client(self.url, self.launch.name, deadline=deadline)

    def _wait(self) -> None:
        """Wait until the server answers as it should, or record why it does not."""
        began = time.monotonic()
        with console.progress("start the server", 0) as line:
            while self.guard() and not answers(self.url, self.launch.name):
                passed = time.monotonic() - began
                if passed > self.launch.patience:
                    self.end("server-late", f"it does not answer after {passed:.0f} s")
                line.update(round(passed), f"s  {last_line(self.log)}")
                time.sleep(0.5)
        if self.ready:
            self.guard()


def answers(url: str, name: str, key: str = "") -> bool:
    """
    Return whether the server at *url* serves the model *name*: ``/health`` says 200 and ``/v1/models`` lists it.

    The first alone is said before the second is true.

    Args:
        key: What the server asks of whoever asks it; empty for none.
    """
    try:
        client = Client(url, name, deadline=10, key=key)
        client.health()
        return bool(client.model())
    except ServerInvalid:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def last_line(log: Path) -> str:
    """Return the end of the last line of *log*, for people."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - 2000))
            lines = source.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
    except OSError:
        return ""
    text = next((line for line in reversed(lines) if line.strip()), "")
    return "".join(letter for letter in text if letter.isprintable())[-100:]
