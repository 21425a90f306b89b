"""The options of one run of the gates."""

from __future__ import annotations

from pathlib import Path

import msgspec


class GateOptions(msgspec.Struct, frozen=True):
    """
    What the command line names.

    Attributes:
        wheel: The wheel to judge.
        python: The Python of an environment that the wheel is installed in.
        serve: Folder of the model to serve from that environment.
        flag, variable: Further arguments and environment variables of that server.
        server: URL of a running server, and *server_log* its log.
        model: The name under which the model is served; empty for its own.
        model_folder: The model's files, if they are not *serve*; their digest names the model.
        recipe: How the model is served (``ci/recipes``).
        profile: Of G4: the kind of model.
        trace: A profiler's file, for G3.
        against: The reference: the URL of its server, or a folder that ``--record`` wrote.
        task: Of G6.
        reserve: Megabytes that must stay free on the machine while our server runs.
        baseline, baseline_python: The wheel that G8 compares with, and the Python of the
            environment that it is installed in.
        workload, texts, at_once, fresh, preheat: Of G8.
    """

    wheel: Path | None = None
    python: Path | None = None
    serve: Path | None = None
    flag: tuple[str, ...] = ()
    variable: tuple[tuple[str, str], ...] = ()
    server: str = ""
    server_log: Path | None = None
    model: str = ""
    model_folder: Path | None = None
    recipe: str = ""
    profile: str = "default"
    trace: Path | None = None
    against: str = ""
    task: str = "gsm8k"
    reserve: int = 0
    baseline: Path | None = None
    baseline_python: Path | None = None
    workload: tuple[str, ...] = ()
    texts: Path | None = None
    at_once: bool = False
    fresh: bool = False
    preheat: float | None = None

    @property
    def serves(self) -> bool:
        """Whether there is a server, or will be one."""
        return bool(self.server or self.serve)
