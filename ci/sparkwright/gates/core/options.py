"""The options of one run of the gates, from the command line."""

from __future__ import annotations

from pathlib import Path

import msgspec


class GateOptions(msgspec.Struct, frozen=True):
    """
    What the command line names.

    Attributes:
        wheel: The wheel in question.
        python: The Python of an environment that the wheel is installed in.
        serve: Folder of the model that is to be served from there.
        flags, variables: Of the server that is started.
        server: URL of a server that runs already, and *log* what it prints.
        model: The name under which it serves; empty for the model's own, or the only one of a server that runs.
        model_folder: Its files, where they are not *serve*; their digest names the model.
        recipe: How the model is served (``ci/recipes``), or only what G3 expects of the log.
        profile: Of G4: what kind of model it is.
        trace: A profiler's file, for G3.
        against: The reference: the URL of its server, or a folder that ``--record`` wrote.
        task: Of G6.
        reserve: Megabytes that must stay free on the machine while we serve.
        baseline, baseline_python: The wheel of G8's other side, and the Python of the environment that it is installed in.
        workloads, texts, at_once, fresh, preheat: Of G8; see `sparkwright.gates.throughput.experiment.ExperimentSpec`.
    """

    wheel: Path | None = None
    python: Path | None = None
    serve: Path | None = None
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    server: str = ""
    log: Path | None = None
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
    workloads: tuple[str, ...] = ()
    texts: Path | None = None
    at_once: bool = False
    fresh: bool = False
    preheat: float | None = None

    @property
    def serves(self) -> bool:
        """Is there a server, or will there be one?"""
        return bool(self.server or self.serve)
