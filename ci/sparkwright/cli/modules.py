"""
``sparkwright modules``: what of a model is quantised, what a token reads of it, and the speed that
memory allows.
"""

from __future__ import annotations

import argparse

from sparkwright.core.console import console, size
from sparkwright.forks.context import RunContext
from sparkwright.gates.errors import ModelError
from sparkwright.gates.model import checkpoint, loaded, modules, roofline
from sparkwright.gates.model.modules import Audit, Row
from sparkwright.gates.model.roofline import GB10, Bandwidth

#: Rows beyond these are those that a token reads least of.
SHOWN = 24


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Audit the model in a folder; with ``--server`` or ``--python``, hold against it what a server
    made of it.
    """
    found = modules.audit(
        checkpoint.read(arguments.model),
        context=arguments.context,
        batch=arguments.batch,
        number=arguments.kv_cache_dtype,
    )
    given = (
        Bandwidth(arguments.bandwidth, "given")
        if arguments.bandwidth
        else roofline.stored(session.store)
    )
    ceilings = [
        roofline.ceiling(found.many.step, found.many.batch, one) for one in (given, GB10) if one
    ]
    served = loaded.served(arguments.server, arguments.model, found) if arguments.server else None
    inside = loaded.listed(session, arguments.python, arguments.model) if arguments.python else None
    document = {
        "audit": found,
        "ceilings": ceilings,
        "bandwidth": given or "not measured",
        "served": served,
        "loaded": inside,
    }
    console.document(document)
    _show(found)
    for ceiling in ceilings:
        told, batch = ceiling.bandwidth, found.many.batch
        whose = (
            f"{told.gigabytes:g} GB/s ({f'{told.device}, ' if told.device else ''}{told.origin})"
        )
        together = f", {ceiling.together:.2f} of {batch} together" if batch > 1 else ""
        console.result(f"ceiling at {whose}: {ceiling.one:.2f} tokens/s of a request{together}")
    if not given:
        console.result("this machine's bandwidth: not measured; give it with --bandwidth")
    if served:
        loaded.show_served(served)
    if inside:
        loaded.show_listed(inside, found)
    wrong = [
        *(f"{one.reference}: {one.says}" for one in found.findings),
        *(served.wrong if served else ()),
    ]
    if wrong:
        raise ModelError(
            "modules-unexpected",
            f"{arguments.model.resolve().name} is not what its config or its server says.",
            details=wrong[:20],
        )
    return 0


def _show(found: Audit) -> None:
    rows = sorted(found.rows, key=lambda row: -row.read_batch)
    shown = {id(row) for row in rows[:SHOWN]}
    method = found.method or "no quantisation config"
    head = (
        f"{found.model}, {found.layers} layers, {method}: {size(found.bytes)} in "
        f"{found.tensors:,} tensors"
    )
    reads = f">read for {found.many.batch} tokens" if found.many.batch > 1 else ">read for a token"
    columns = ["group", "modules", "stored as", "config says", ">count", ">stored", reads, ">share"]
    console.table(
        head, columns, [_cells(row, found) for row in found.rows if id(row) in shown], result=True
    )
    if rest := rows[SHOWN:]:
        console.note(
            f"{len(rest)} more kinds of modules, of which "
            f"{size(sum(row.read_batch for row in rest))} are read; --json has all"
        )
    if found.experts[0]:
        every, taken, read = found.experts
        console.result(
            f"experts: a token takes {taken} of {every}; {found.many.batch} are expected to read "
            f"{read:.1f} of each layer"
        )
    many = found.many
    kept = (
        f"{many.context:,} tokens each, {size(found.kept)} for a token, {size(found.state)} "
        f"of states"
    )
    cache = f"{size(many.cache)} of the context ({kept})"
    console.result(
        f"a step for {many.batch} reads {size(many.step)}: {size(many.weights)} of weights, {cache}"
    )
    for note in found.notes:
        console.note(note)
    for group, bytes_ in _unquantised(found.rows):
        console.note(f"not quantised: {group}, {size(bytes_)} of each step")


def _cells(row: Row, found: Audit) -> list[str]:
    share = row.read_batch / found.many.weights if found.many.weights else 0.0
    return [
        row.group,
        row.modules,
        row.scheme,
        row.told or "–",
        f"{row.count:,}",
        size(row.bytes),
        size(row.read_batch),
        f"{share:.1%}",
    ]


def _unquantised(rows: tuple[Row, ...]) -> list[tuple[str, float]]:
    """
    Return what is read of plain matrices where the model is quantised at all, by group, largest
    first.
    """
    groups: dict[str, float] = {}
    for row in rows:
        if row.told and not row.quantised:
            groups[row.group] = groups.get(row.group, 0.0) + row.read_batch
    return sorted(
        ((group, read) for group, read in groups.items() if read >= 1e6), key=lambda one: -one[1]
    )
