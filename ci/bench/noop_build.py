"""A second `sparkwright build` with nothing changed, against a second `cmake --build` of vLLM alone. Needs a finished build."""

from __future__ import annotations

import subprocess
import sys

import measure
from sparkwright.build import toolchain
from sparkwright.build.workspace import Workspace

options = measure.arguments(__doc__ or "")
session = measure.session(options)
tools = toolchain.obtain(session)
settings = toolchain.spec(session.project).forks["vllm"]
folder = Workspace(session, tools, settings, "vllm").build
ours = [sys.executable, "-m", "sparkwright", "build", "--root", str(session.project.root), "--cache-dir", str(session.store.root)]
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
