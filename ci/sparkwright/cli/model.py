"""``sparkwright model inspect``: a model's quantised modules, and the speed that memory allows."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkwright.bench.model import checkpoint, decode_bytes, modules
from sparkwright.bench.model.checkpoint import ModelError
from sparkwright.cli import options
from sparkwright.core.console import console, size


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``inspect``."""
    parser = parsers["model inspect"]
    parser.set_defaults(run=inspect)
    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="MODEL_DIR",
        help="folder of the model; only the headers of its weights are read",
    )
    add(
        "--batch",
        type=options.number(int, 1),
        default=1,
        metavar="N",
        help="requests in one decoding step (default: 1)",
    )
    add(
        "--context",
        type=options.number(int, 0),
        default=0,
        metavar="N",
        help="context of each request, in tokens (default: 0)",
    )
    add(
        "--bandwidth",
        type=options.number(float, 0.1, 1e6, "GB/s"),
        default=0,
        metavar="GB/s",
        help="memory bandwidth (default: as measured here)",
    )
    add(
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "fp8"),
        default="auto",
        help="type of the KV cache (default: that of the model)",
    )


def inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Audit the model in a folder, and show the speed that memory allows.

    Raises:
        modules-unexpected: The weights disagree with the config.
    """
    context = options.checkout(arguments)
    audit = modules.audit(
        checkpoint.read(arguments.model),
        context=arguments.context,
        batch=arguments.batch,
        number=arguments.kv_cache_dtype,
    )
    measured = (
        decode_bytes.Bandwidth(arguments.bandwidth, "given")
        if arguments.bandwidth
        else decode_bytes.stored_bandwidth(context.store)
    )
    step, batch = audit.step, audit.batch
    bandwidths = [item for item in (measured, decode_bytes.GB10) if item]
    ceilings = [decode_bytes.ceiling(step, batch, bandwidth) for bandwidth in bandwidths]
    document = {
        "audit": audit,
        "ceilings": ceilings,
        "bandwidth": measured or "not measured",
    }
    _show(audit)
    for ceiling in ceilings:
        bandwidth = ceiling.bandwidth
        device = f"{bandwidth.device}, " if bandwidth.device else ""
        together = f", {ceiling.together:.2f} of {batch} together" if batch > 1 else ""
        console.result(
            f"ceiling at {bandwidth.gigabytes:g} GB/s ({device}{bandwidth.origin}): "
            f"{ceiling.request:.2f} tokens/s of a request{together}"
        )
    if not measured:
        console.result("this machine's bandwidth: not measured; use --bandwidth")
    wrong = [f"{finding.reference}: {finding.message}" for finding in audit.findings]
    if wrong:
        console.document(document)
        what = f"{arguments.model.resolve().name} disagrees with its config."
        raise ModelError("modules-unexpected", what, details=wrong[:20])
    return document


def _show(audit: modules.ModuleAudit) -> None:
    """Print the modules with the most bytes read, and the bytes that a step reads."""
    method = audit.method or "no quantisation config"
    title = (
        f"{audit.model}, {audit.layers} layers, {method}: {size(audit.bytes)} in "
        f"{audit.tensors:,} tensors"
    )
    reads = f">read for {audit.batch} tokens" if audit.batch > 1 else ">read for a token"
    rows = [
        [
            row.group,
            row.modules,
            row.scheme,
            row.intention or "–",
            f"{row.count:,}",
            size(row.bytes),
            size(row.read),
            f"{row.read / audit.weights:.1%}",
        ]
        for row in audit.rows
    ]
    columns = ["group", "modules", "stored as", "config says", ">count", ">stored", reads, ">share"]
    console.table(title, columns, rows, result=True)
    if audit.experts[0]:
        every, taken, read = audit.experts
        console.result(
            f"experts: a token takes {taken} of {every}; {audit.batch} are expected to read "
            f"{read:.1f} of each layer"
        )
    console.result(
        f"a step for {audit.batch} reads {size(audit.step)}: {size(audit.weights)} of weights, "
        f"{size(audit.cache)} of the context ({audit.context:,} tokens each, "
        f"{size(audit.token_bytes)} for a token, {size(audit.state_bytes)} of states)"
    )
    unquantised = Counter[str]()
    for row in audit.rows:
        if row.intention and not row.quantised:
            unquantised[row.group] += round(row.read)
    groups = [(group, count) for group, count in unquantised.most_common() if count >= 1e6]
    for note in (
        *audit.notes,
        *(f"not quantised: {group}, {size(count)} of each step" for group, count in groups),
    ):
        console.note(note)
