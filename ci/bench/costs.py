"""Print this machine's cost record of a fork as the text of ``build/<stack>/costs.yaml``."""

from __future__ import annotations

import argparse
import datetime
import os
import sys

import measure
from sparkwright.builder import host_info, pylock, toolchain
from sparkwright.builder.ninja import Costs, ShippedCosts, ShippedFile
from sparkwright.core import strict_yaml
from sparkwright.core.console import console


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fork", default="vllm")


options = measure.arguments(__doc__ or "", more)
context = measure.context(options)
costs = Costs.of(context, options.fork).recorded
if not costs:
    sys.exit(f"{context.store.root} has no record of {options.fork}; build it first.")
nvcc = next(
    filename.split("-")[1]
    for name, filename, _ in pylock.wheels(context.project)
    if name == "nvidia-cuda-nvcc"
)
shipped = ShippedCosts(
    host=f"{os.cpu_count()} cores, {host_info.processor()}",
    toolchain=f"CUDA {nvcc}, {toolchain.compiler(context)}",
    arch=context.project.spec.arch,
    date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    units={},
)
console.result(
    "# What a unit cost: [seconds of CPU, peak resident megabytes]. Read by sparkwright.builder.ninja."
)
console.result(strict_yaml.dump(ShippedFile({options.fork: shipped})).rstrip().removesuffix(" {}"))
for unit, cost in sorted(costs.items()):
    console.result(f"      {unit}: [{cost.seconds:.1f}, {cost.megabytes}]")
