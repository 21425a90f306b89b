"""A second `sparkwright build` with nothing changed, against a second `cmake --build` of vLLM alone. Needs a finished build."""

from __future__ import annotations

import subprocess
import sys

import measure
from sparkwright.builder import pipeline
from sparkwright.builder.environment import toolchain
from sparkwright.builder.workspace import Workspace

options = measure.arguments(__doc__ or "")
session = measure.session(options)
# A build that is not finished would be made by the first run: an hour of compiling, timed as a build with nothing to do.
if missing := [fork for fork in session.forks if pipeline.current(session, fork) is None]:
    sys.exit(f"Nothing to measure: {', '.join(missing)} of stack {session.project.stack} is not built in {session.store.root}.")
tools = toolchain.obtain(session)
settings = toolchain.settings(session, "vllm")
folder = Workspace(session, tools, "vllm").build
places = ["--root", str(session.project.root), "--cache-dir", str(session.store.root)]
ours = [sys.executable, "-m", "sparkwright", "build", *places, "--offline"]
theirs = [str(tools.tool("cmake")), "--build", str(folder), "--target", *settings.targets]


def run(command: list[str]) -> None:
    """Run *command*; a benchmark of something that fails is none."""
    subprocess.run(command, check=True, capture_output=True, env=tools.environment())


measure.compare(
    "nothing changed",
    {"sparkwright build (three wheels and their audit)": lambda: run(ours), "cmake --build (two libraries)": lambda: run(theirs)},
    options,
    budget=1.0,
)
