"""``sparkwright model``: a model by its files, before it is served."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sparkwright.bench.model import checkpoint, modules
from sparkwright.cli import options
from sparkwright.core.console import console, size
from sparkwright.core.memory import (
    AUTOTUNE,
    GIB,
    SPARKS,
    CacheShape,
    ServerMemory,
    refusals,
)
from sparkwright.serving import models

#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "model inspect": {
        "model": {
            "type": Path,
            "metavar": "MODEL_DIR",
            "help": "folder of the model; only the headers of its weights are read",
        },
    },
    "model slim": {
        "model": {
            "metavar": "MODEL",
            "help": "folder of the model, or its name in this machine's model cache",
        },
        "--to": {
            "type": Path,
            "required": True,
            "metavar": "DIR",
            "help": "folder of the copy, empty or begun by the same command",
        },
        "--layers": {
            "nargs": "+",
            "default": [],
            "metavar": "NAME",
            "help": "layers, kinds or groups of layers as `model inspect` shows them, with * for "
            "anything (default: all matrices in BF16 of the layers and the head)",
        },
        "--format": {
            "choices": ("fp8", "nvfp4-w4a16"),
            "default": "fp8",
            "help": "format of the layers: a byte a number, or half of one (default: %(default)s)",
        },
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands of ``model``."""
    functions = {
        "model inspect": inspect,
        "model slim": slim,
    }
    options.define(parsers, functions, _OPTIONS)


def inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show how the model in a folder is stored, and the speed that memory allows."""
    context = options.checkout(arguments)
    model = checkpoint.read(arguments.model)
    audit = modules.audit(model)
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
    plain = ServerMemory(audit.bytes / GIB, autotune=AUTOTUNE)
    shape = CacheShape.of(modules.text_config(model.config))
    for name, machine in SPARKS.items():
        server = replace(plain, shape=shape, floor=machine.floor())
        reasons = [message for _, message in refusals(server, machine)]
        console.result(f"a Spark of {name}: {'; '.join(reasons) or server.text(machine)}")
    return {
        "audit": audit,
        "step": audit.weights,
        "ceilings": ceilings,
        "bandwidth": measured or "not measured",
    }


def slim(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write a copy of a model whose chosen layers have fewer bytes."""
    # This loads NumPy.
    from sparkwright.bench.model.slim import Slimming

    model = models.find(arguments.model, "", os.environ)
    slimming = Slimming(model.path, arguments.format, arguments.layers, model.commit)
    plan = slimming.record
    console.result(
        f"{len(plan.layers):,} layers in {plan.format}: a token reads {size(plan.read_after)} of "
        f"weights instead of {size(plan.read_before)}"
    )
    record = slimming.write(arguments.to.absolute())
    console.result(f"written and recorded: {arguments.to}")
    return {"record": record}


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
