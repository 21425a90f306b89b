"""
``sparkwright model``: a model's quantised modules and the speed that memory allows, and the tuning
of the kernels for its experts.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from sparkwright.bench.model import checkpoint, modules, tuning
from sparkwright.bench.model.checkpoint import ModelError
from sparkwright.bench.server import wheel_identity
from sparkwright.builder import host_info, moe_configs
from sparkwright.builder.moe_configs import BatchLatency, TuningError, TuningRecord
from sparkwright.cli import options
from sparkwright.core import strict_yaml
from sparkwright.core.console import console, size
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.gates.core.ladder import host_facts

#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "model inspect": {
        "model": {
            "type": Path,
            "metavar": "MODEL_DIR",
            "help": "folder of the model; only the headers of its weights are read",
        },
    },
    "model tune": {
        "model": {
            "type": Path,
            "metavar": "MODEL_DIR",
            "help": "folder of the model; the weights are drawn at random",
        },
        "--python": {
            "type": Path,
            "required": True,
            "metavar": "FILE",
            "help": "Python of the environment with the wheel of the stack",
        },
        "--wheel": {"type": Path, "required": True, "metavar": "WHEEL", "help": "that wheel"},
        "--tuner": {
            "type": Path,
            "metavar": "FILE",
            "help": "vLLM's benchmarks/kernels/benchmark_moe.py (default: from the locked source)",
        },
        "--tensor-parallel-size": {
            "type": options.number(int, 1, 64),
            "default": 1,
            "metavar": "N",
            "help": "GPUs that share each expert (default: 1)",
        },
        "--tokens": {
            **options.REPEATED,
            "type": options.number(int, 1, 1 << 20),
            "metavar": "N",
            "help": "tokens of a batch; may be repeated (default: the tuner's 18 sizes)",
        },
        "--configurations": {
            "type": options.number(int, 0, 1 << 20),
            "default": 0,
            "metavar": "N",
            "help": "configurations to try for each batch, drawn with a fixed seed (default: all, "
            "which takes hours)",
        },
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands of ``model``."""
    functions = {
        "model inspect": inspect,
        "model tune": tune,
    }
    options.define(parsers, functions, _OPTIONS)


def inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Audit the model in a folder, and show the speed that memory allows.

    Raises:
        modules-unexpected: The checkpoint contradicts itself or its config.
    """
    context = options.checkout(arguments)
    audit = modules.audit(checkpoint.read(arguments.model))
    measured = context.store.get(*modules.BANDWIDTH, modules.Bandwidth)
    _show(audit)
    ceilings = []
    for bandwidth in filter(None, (measured, modules.GB10)):
        rate = bandwidth.gigabytes * 1e9 / audit.weights
        ceilings.append({"bandwidth": bandwidth, "request": rate})
        console.result(
            f"ceiling at {bandwidth.gigabytes:g} GB/s ({bandwidth.device}, {bandwidth.origin}): "
            f"{rate:.2f} tokens/s of a request"
        )
    if not measured:
        console.result("this machine's bandwidth: not measured (`bench` and `gate` do)")
    document = {
        "audit": audit,
        "step": audit.weights,
        "ceilings": ceilings,
        "bandwidth": measured or "not measured",
    }
    wrong = [f"{finding.reference}: {finding.message}" for finding in audit.findings]
    if wrong:
        console.document(document)
        what = f"{arguments.model.resolve().name} contradicts itself or its config."
        raise ModelError("modules-unexpected", what, details=wrong[:20])
    return document


def tune(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Tune the kernels for the experts of a model on this GPU, and write the file and its record to
    the reviewed data of the stack; to the output folder if a batch is slower with it.

    Raises:
        tuning-foreign: The GPU or the environment is not the stack's.
        tuning-unavailable, tuning-failed: See `modules.tuned_file` and `tuning.tune`.
    """
    context, folder = options.checkout(arguments), arguments.model
    shards = arguments.tensor_parallel_size
    python, wheel = arguments.python, arguments.wheel
    version, gpus = wheel_identity.version(python), host_info.gpus()
    faults = moe_configs.faults(context, version, gpus[0].capability if gpus else "none")
    details = [fault for fault, present in faults.items() if present] or [
        f"{file} of {wheel.name}: {how}"
        for file, how in wheel_identity.mismatches(python, wheel).items()
    ]
    if details:
        what = (
            f"What is tuned by {python} on this machine is not for stack {context.project.stack}."
        )
        raise TuningError("tuning-foreign", what, details=details)
    source = arguments.tuner.read_bytes() if arguments.tuner else tuning.locked_tuner(context)
    device = modules.device_name(gpus[0].name)
    name, dtype = modules.tuned_file(checkpoint.read(folder), device, shards)
    log = context.store.folder("logs") / "tune.log"
    content, latencies = tuning.tune(
        python, source, folder, name, dtype, log,
        shards=shards, batches=arguments.tokens, most=arguments.configurations,
    )  # fmt: skip
    record = TuningRecord(
        sha256_bytes(content), version, sha256_file(wheel), sha256_bytes(source),
        device, gpus[0].capability, host_facts(),
        datetime.datetime.now(datetime.UTC).date().isoformat(), arguments.configurations, latencies,
    )  # fmt: skip
    slower = [row.tokens for row in latencies if not row.faster]
    path = (context.output if slower else context.tuned_folder) / name
    # A kill between both leaves a record without a file, which a build does not read.
    context.store.write(path.with_suffix(".yaml"), strict_yaml.dump(record).encode())
    context.store.write(path, content)
    _show_latencies(name, latencies)
    console.result(f"written: {path}")
    if slower:
        batches = ", ".join(map(str, slower))
        console.warn(
            f"batches of {batches} tokens are slower, and a build would refuse the file "
            f"(tuning-slower), so it is not in {context.tuned_folder}. Tune with more "
            "configurations: without --configurations all are tried."
        )
    return {"path": str(path), "record": record}


def _show_latencies(name: str, latencies: tuple[BatchLatency, ...]) -> None:
    """Print the medians, and the largest spread of the rounds of either."""
    rows = []
    for row in latencies:
        before, tuned = median(row.before), median(row.tuned)
        spread = max(max(each) / min(each) - 1 for each in (row.before, row.tuned))
        figures = f"{before:.2f}", f"{tuned:.2f}", f"{before / tuned - 1:+.1%}", f"{spread:.1%}"
        rows.append([str(row.tokens), *figures])
    columns = [">tokens", ">before, µs", ">tuned, µs", ">faster by", ">spread"]
    console.table(name, columns, rows, result=True)


def _show(audit: modules.ModuleAudit) -> None:
    """Print the modules, and the bytes that a decoding step of one request reads of them."""
    title = (
        f"{audit.model}, {audit.layers} layers, {audit.scheme or 'not quantised'}: "
        f"{size(audit.bytes)}"
    )
    rows = [
        [
            row.group,
            row.modules,
            row.scheme,
            f"{row.count:,}",
            size(row.bytes),
            size(row.read),
            f"{row.read / audit.weights:.1%}",
        ]
        for row in audit.rows
    ]
    columns = ["group", "modules", "stored as", ">count", ">stored", ">read for a token", ">share"]
    console.table(title, columns, rows, result=True)
    console.result(f"a token reads {size(audit.weights)} of weights")
