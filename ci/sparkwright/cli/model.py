"""``sparkwright model inspect``: a model's quantised modules, and the speed that memory allows."""

from __future__ import annotations

import argparse
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


def inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Audit the model in a folder, and show the speed that memory allows.

    Raises:
        modules-unexpected: The checkpoint contradicts itself or its config.
    """
    context, batch = options.checkout(arguments), arguments.batch
    model = checkpoint.read(arguments.model)
    audit = modules.audit(model, context=arguments.context, batch=batch)
    measured = (
        decode_bytes.Bandwidth(arguments.bandwidth, "given")
        if arguments.bandwidth
        else decode_bytes.stored_bandwidth(context.store)
    )
    _show(audit, batch, arguments.context)
    ceilings = []
    for bandwidth in filter(None, (measured, decode_bytes.GB10)):
        rate = bandwidth.gigabytes * 1e9 / audit.step
        ceilings.append({"bandwidth": bandwidth, "request": rate, "together": rate * batch})
        device = f"{bandwidth.device}, " if bandwidth.device else ""
        together = f", {rate * batch:.2f} of {batch} together" if batch > 1 else ""
        console.result(
            f"ceiling at {bandwidth.gigabytes:g} GB/s ({device}{bandwidth.origin}): "
            f"{rate:.2f} tokens/s of a request{together}"
        )
    if not measured:
        console.result("this machine's bandwidth: not measured; use --bandwidth")
    document = {
        "audit": audit,
        "batch": batch,
        "context": arguments.context,
        "step": audit.step,
        "ceilings": ceilings,
        "bandwidth": measured or "not measured",
    }
    wrong = [f"{finding.reference}: {finding.message}" for finding in audit.findings]
    if wrong:
        console.document(document)
        what = f"{arguments.model.resolve().name} contradicts itself or its config."
        raise ModelError("modules-unexpected", what, details=wrong[:20])
    return document


def _show(audit: modules.ModuleAudit, batch: int, context: int) -> None:
    """Print the modules, and the bytes that a step for *batch* tokens reads of them."""
    title = (
        f"{audit.model}, {audit.layers} layers, {audit.scheme or 'not quantised'}: "
        f"{size(audit.bytes)}"
    )
    reads = f">read for {batch} tokens" if batch > 1 else ">read for a token"
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
    columns = ["group", "modules", "stored as", ">count", ">stored", reads, ">share"]
    console.table(title, columns, rows, result=True)
    if audit.experts[0]:
        every, taken, read = audit.experts
        console.result(
            f"experts: a token takes {taken} of {every}; {batch} are expected to read "
            f"{read:.1f} of each layer"
        )
    console.result(
        f"a step for {batch} reads {size(audit.step)}: {size(audit.weights)} of weights, "
        f"{size(audit.cache)} of the context ({context:,} tokens each, "
        f"{size(audit.token_numbers * audit.number_bytes)} for a token)"
    )
    plain = sum(row.read for row in audit.rows if not row.quantised)
    notes = [f"not quantised: {size(plain)} of the weights"] if audit.scheme else []
    for note in (*audit.notes, *notes):
        console.note(note)
