"""A second `sparkwright build` with nothing changed, against a second `cmake --build` of vLLM alone. Needs a finished build."""

from __future__ import annotations

import subprocess
import sys

import measure
from sparkwright.builder import pipeline, toolchain
from sparkwright.builder.workspace import Workspace

options = measure.arguments(__doc__ or "")
context = measure.context(options)
# A build that is not finished would be made by the first run: an hour of compiling, timed as a build with nothing to do.
if missing := [fork for fork in context.forks if pipeline.current(context, fork) is None]:
    sys.exit(
        f"Nothing to measure: {', '.join(missing)} of stack {context.project.stack} is not built in {context.store.root}."
    )
tools = toolchain.obtain(context)
settings = toolchain.settings(context, "vllm")
folder = Workspace(context, tools, "vllm").build
places = ["--root", str(context.project.root), "--cache-dir", str(context.store.root)]
ours = [sys.executable, "-m", "sparkwright", "build", *places, "--offline"]
theirs = [str(tools.tool("cmake")), "--build", str(folder), "--target", *settings.targets]


def run(command: list[str]) -> None:
    """Run *command*; a benchmark of something that fails is none."""
    subprocess.run(command, check=True, capture_output=True, env=tools.environment())


measure.compare(
    "nothing changed",
    {
        "sparkwright build (three wheels and their audit)": lambda: run(ours),
        "cmake --build (two libraries)": lambda: run(theirs),
    },
    options,
    budget=1.0,
)
