"""
What a run was given: the wheel, the environment, and the server that serves it.

A server that we start runs from the first question to the end of the run, so that all gates speak of one launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import GATED, LaunchPlan, Server
from sparkwright.core.errors import UsageError
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.gates.core.options import GateOptions
from sparkwright.gates.core.verdict import Check, Sample, failed, not_run, passed


class ServerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One server as the caller knows it; a server cannot tell these of itself.

    Attributes:
        wheel: The sha256 of the wheel that it was installed from; empty where that is not known.
        model: A digest over the files of the model; empty where that is not known, and then the model's name has to do.
        host: Facts of the machine that bear on the numbers (GPU, driver), by name.
    """

    wheel: str = ""
    model: str = ""
    host: dict[str, str] = {}


class ServerUnderTest:
    """
    The server of a run, ours or somebody's.

    Args:
        host: Facts of the machine, for references that are bound to it.
        folder: An empty one, for the server's log and profiles.
        stack: Ends the server that was started, when it is left.
        recipe: How it is started, beside the flags and variables that are named.
        flags: Further arguments of ``vllm serve``, of the gates themselves.
    """

    def __init__(
        self, inputs: GateOptions, host: Mapping[str, str], folder: Path, stack: contextlib.ExitStack, recipe: Recipe | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        if inputs.serve and not inputs.python:
            raise UsageError(
                "usage", "--serve wants the environment that vLLM is installed in.", todo="Name its interpreter with --python."
            )
        if inputs.serve and inputs.server:
            raise UsageError("usage", "--serve starts a server and --server names one that runs; give one of them.")
        self._inputs, self._host, self._folder, self._stack, self._recipe = inputs, dict(host), folder, stack, recipe
        self._flags = flags

    @cached_property
    def started(self) -> Server:
        """The server that we start, once, for all gates."""
        return self._stack.enter_context(Server(self.launch(), self._folder / "server.log"))

    def launch(self) -> LaunchPlan:
        """
        Return how the server is started that we start.

        Raises:
            recipe-unfit: The recipe says nothing of the release in the environment.
        """
        one = self._inputs
        assert one.serve is not None
        assert one.python is not None
        plain = LaunchPlan(one.python, one.serve)
        if self._recipe:
            plain = recipes.launch(self._recipe, wheel_identity.version(one.python), one.python, one.serve)
        return replace(
            plain, flags=(*plain.flags, *one.flags, *self._flags),
            variables={**GATED, **plain.variables, **one.variables}, name=self.name, reserve=max(one.reserve, plain.reserve),
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Where the server answers."""
        return self.started.url if self._inputs.serve else self._inputs.server

    def client(self) -> Client:
        """Return a client of the server."""
        return self.started.client() if self._inputs.serve else Client(self.url, self.name)

    @property
    def name(self) -> str:
        """The name under which the model is served: ours by the model's own; empty for the only one of a server that runs."""
        one = self._inputs
        return one.model or (recipes.served_name(self._recipe, one.serve) if one.serve else "")

    @property
    def served(self) -> ServerIdentity:
        """What is known of the server from outside."""
        folder = self._inputs.serve or self._inputs.model_folder
        wheel = sha256_file(self._inputs.wheel) if self._inputs.wheel else ""
        return ServerIdentity(wheel, model_digest(folder) if folder else "", self._host)

    def same_wheel(self) -> Check:
        """Return whether the environment that serves holds the wheel's files and no others."""
        return same_wheel(self._inputs.wheel, self._inputs.python, "wheel-served")

    def end(self) -> None:
        """End the server that we started, if we did; what comes then starts its own."""
        if "started" in self.__dict__:
            self.started.stop()

    def pid(self) -> int | None:
        """Return the server's process; None where it is not on this machine or cannot be found."""
        if self._inputs.serve:
            return next((process.pid for process in self.started.processes()), None)
        port = self._inputs.server.rpartition(":")[2].partition("/")[0]
        with contextlib.suppress(psutil.Error):
            listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            return next((one.pid for one in listening if one.laddr and str(one.laddr.port) == port), None)
        return None


def same_wheel(wheel: Path | None, python: Path | None, name: str) -> Check:
    """Return the check *name*: whether the environment of *python* holds the files of *wheel* and no others."""
    if not wheel or not python:
        return not_run(name, "name the wheel and the Python of its environment, to know that it is this wheel", "not-asked")
    if found := wheel_identity.mismatches(python, wheel):
        samples = [Sample(mismatch.name, "the wheel's bytes", mismatch.how) for mismatch in found]
        return failed(name, f"{len(found)} file(s) of the environment are not the wheel's", "wheel-not-served", samples=samples)
    return passed(name, f"the environment holds every file of {wheel.name}, byte by byte")


def patient(url: str) -> Client:
    """Return a client of the server at *url* that waits as long as its first question may take."""
    return Client(url)


def model_digest(folder: Path) -> str:
    """
    Return a digest over the files of the model in *folder*: its weights by name and size and their headers, everything small by its bytes.

    Hundreds of gigabytes are not read again for each run; a shard of the same size with other numbers and the same header is not noticed.
    """
    parts = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as stream:
            parts.append((path.name, path.stat().st_size, sha256_bytes(stream.read(16 * 1024**2))))
    return sha256_bytes(canonical(parts))


def same_model(one: ServerIdentity, one_name: str, other: ServerIdentity, other_name: str) -> bool:
    """Return whether two servers serve the same model: by digest where both are known, else by the last part of the served name."""
    if one.model and other.model:
        return one.model == other.model
    return one_name.rstrip("/").rpartition("/")[2] == other_name.rstrip("/").rpartition("/")[2]
