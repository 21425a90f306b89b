"""Print the compiler calls of the last build of a fork as the text of ``build/<stack>/costs.yaml``; build it without a compiler cache first."""

from __future__ import annotations

import argparse
import datetime
import os
import sys

import measure
from sparkwright.builder import host_info, ninja, pylock, toolchain
from sparkwright.builder.workspace import Workspace
from sparkwright.core.console import console
from sparkwright.core.store import read_lines


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fork", default="vllm")


options = measure.arguments(__doc__ or "", more)
context = measure.context(options)
workspace = Workspace(context, toolchain.obtain(context), options.fork)
record = workspace.folder / "launch" / ninja.FINISHED
calls = (
    read_lines(record, ninja.CompilerCall, "record of compiler calls") if record.exists() else []
)
compiled = [call for call in calls if call.good and not call.hit]
if not compiled:
    sys.exit(f"{context.store.root} has no compiled units of {options.fork}; build it first.")
nvcc = next(
    filename.split("-")[1]
    for name, filename, _ in pylock.wheels(context.project)
    if name == "nvidia-cuda-nvcc"
)
date = datetime.datetime.now(datetime.UTC).date().isoformat()
host = f"{os.cpu_count()} cores, {host_info.processor()}; CUDA {nvcc}, {toolchain.compiler(context)}"
console.result(
    "# What a unit cost: [seconds of CPU, peak resident megabytes]. Read by sparkwright.builder.ninja."
)
console.result(f"# Measured on {date} for {context.project.spec.arch}: {host}.")
console.result(f"forks:\n  {options.fork}:")
source = f"{workspace.sandbox.sandbox_path(workspace.source)}/"
for call in sorted(compiled, key=lambda call: call.unit):
    unit = call.unit.removeprefix(source)
    console.result(f"    {unit}: [{call.seconds:.1f}, {call.megabytes}]")
