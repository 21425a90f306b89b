"""``sparkwright model``: a model by its files, before it is served."""

import argparse
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from sparkwright.bench.model import checkpoint, hub, modules, prediction
from sparkwright.bench.model.checkpoint import Checkpoint, ModelError
from sparkwright.bench.model.prediction import Lever, Rate, Serving, StoredModel
from sparkwright.bench.recipes import preflight, recipe as recipes
from sparkwright.bench.server import flags
from sparkwright.cli import options
from sparkwright.client.environment import default_prefix
from sparkwright.core.console import console, duration, size
from sparkwright.core.errors import PythonError
from sparkwright.core.memory import (
    AUTOTUNE,
    GIB,
    SPARKS,
    CacheShape,
    ServerMemory,
    refusals,
)
from sparkwright.core.store import write_file
from sparkwright.forks.context import RunContext
from sparkwright.serving import ServeError, environment as environments, models
from sparkwright.serving.selection import Selection, select


def _shares(text: str) -> tuple[float, float]:
    """Return both ends of a range of shares, such as ``0.6:0.8``; a single number is both ends."""
    share = options.number(float, 0, 1, "share")
    low, _, high = text.partition(":")
    return share(low), share(high or low)


#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "model inspect": {
        "model": {
            "metavar": "MODEL",
            "help": "name of a model on the hub, folder, or file of --save; only the headers of "
            "its weights are read",
        },
        "--revision": {
            "default": "",
            "metavar": "NAME",
            "help": "commit or branch on the hub (default: main)",
        },
        "--save": {"type": Path, "metavar": "FILE", "help": "write the headers to this file"},
        "--drafts": {
            "type": options.number(int, 0, prediction.MOST_DRAFTS),
            "default": 0,
            "metavar": "COUNT",
            "help": "tokens that the model's own layers (MTP) draft for each step (default: 0)",
        },
        "--acceptance": {
            "type": _shares,
            "default": prediction.ACCEPTANCE,
            "metavar": "LOW:HIGH",
            "help": "share of the drafts that is accepted, or a range (default: 0.63:0.89)",
        },
        "--context": {
            "type": options.number(int, 0),
            "default": 4096,
            "metavar": "TOKENS",
            "help": "tokens of each request (default: %(default)s)",
        },
        "--kv-cache-dtype": {
            "choices": ("auto", "fp8", "nvfp4"),
            "default": "auto",
            "help": "format of the cache (default: %(default)s)",
        },
    },
    "model check": {
        "model": {
            "metavar": "MODEL",
            "help": "name of a recipe or of a model on the hub, folder, or file of `model inspect "
            "--save`; only headers are read",
        },
        "--revision": {"metavar": "NAME", "help": "commit or branch on the hub (default: main)"},
        "--python": {
            "type": Path,
            "metavar": "FILE",
            "help": "Python of an environment with the stack's vLLM (default: the current "
            "release's)",
        },
        **options.SERVER,
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
    options.define(
        parsers,
        {
            "model inspect": inspect,
            "model slim": slim,
            "model check": check,
        },
        _OPTIONS,
    )


def inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show what a token reads of a model, the speed that follows, and what would change it."""
    context = options.checkout(arguments)
    model = prediction.read(_checkpoint(arguments, context))
    options.refuse(
        (
            arguments.drafts and not model.draft_layers,
            "--drafts: the model has no layers that draft.",
        )
    )
    serving = prediction.Serving(
        drafts=arguments.drafts, context=arguments.context, cache=arguments.kv_cache_dtype
    )
    every = [msgspec.structs.replace(serving, requests=count) for count in prediction.REQUESTS]
    measured = context.store.get(*modules.BANDWIDTH, modules.Bandwidth)
    bandwidth = (measured.gigabytes,) * 2 if measured else prediction.GB10
    rates = [model.rate(each, bandwidth, arguments.acceptance) for each in every]
    listing = context.project.series_folder("vllm") / "series"
    patches = listing.read_text("utf-8").split() if listing.exists() else []
    source = context.project.fork("vllm").sources.git
    release = re.match(r"v?(\d+\.\d+)", source.ref if source else "")
    version = release[1] if release else "0"
    levers = prediction.levers(model, serving, arguments.acceptance, version, patches)
    caches = {
        form: model.shape(msgspec.structs.replace(serving, cache=form))
        for form in ("auto", "fp8", "nvfp4")
    }
    reads = _show_modules(model, every)
    _show_cache(caches)
    _show_rates(rates, serving, arguments.acceptance)
    if measured:
        where = f"measured on this machine ({measured.device})"
    else:
        where = "read on a GB10 by others; this machine's is not measured (`bench --serve` does)"
    console.result(f"by {bandwidth[0]:g} to {bandwidth[1]:g} GB/s, {where}")
    _show_levers(levers)
    return {
        "audit": model.audit,
        "step": model.audit.weights,
        "reads": reads,
        "cache": caches,
        "rates": rates,
        "levers": levers,
        "bandwidth": measured or "not measured",
        "gigabytes": bandwidth,
        "fits": _show_fits(model, serving),
    }


def _checkpoint(arguments: argparse.Namespace, context: RunContext) -> Checkpoint:
    """Return the model that the command line names, from this machine or from the hub."""
    path = Path(arguments.model).expanduser()
    named = not path.exists() and checkpoint.NAME.fullmatch(arguments.model)
    options.refuse((arguments.save and not named, "--save: the model is on this machine."))
    if not named:
        return checkpoint.read(path)
    if not arguments.save:
        try:
            local = models.find(arguments.model, arguments.revision, os.environ)
        except ModelError as error:
            if error.reference != "model-missing":
                raise
        else:
            if local.checkpoint:
                return local.checkpoint
    began, source = time.monotonic(), hub.Hub(os.environ, offline=context.offline)
    headers = source.headers(context.store, arguments.model, arguments.revision or "main")
    seconds = duration(time.monotonic() - began)
    console.note(f"{size(source.received)} of headers came from {source.address} in {seconds}")
    if arguments.save:
        write_file(arguments.save, msgspec.json.encode(headers))
    return checkpoint.join(arguments.model, headers.config, headers.index, headers.shards.items())


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show which kernels vLLM chooses for a model on a Spark, what it refuses, and known traps."""
    context = options.checkout(arguments)
    python = arguments.python or default_prefix() / "current" / "bin" / "python"
    environment = environments.examine(python)
    source = context.project.fork("vllm").sources.git
    release = source.ref.removeprefix("v") if source else ""
    if Version(environment.vllm).base_version != release:
        raise PythonError(
            "environment-unusable",
            f"{python} has vLLM {environment.vllm}, and stack {context.project.stack} {release}.",
            todo="Name the Python of an environment with that release with --python.",
        )
    words, variables = tuple(arguments.flag), dict(arguments.variable)
    if arguments.model in recipes.files(context.project.root):
        recipe = recipes.load(context.project.root, arguments.model)
        words = flags.merge(recipe.flags(environment.vllm), words)
        variables = {**recipe.variant(environment.vllm).variables, **variables}
        arguments.model = recipe.model.repository
        if recipe.model.revision != recipes.UNRESOLVED:
            arguments.revision = arguments.revision or recipe.model.revision
    arguments.save = None
    stored = _checkpoint(arguments, context)
    audit = modules.audit(stored)
    held_traps = preflight.lines(preflight.find_traps(words, environment.vllm, audit))
    selection = select(environment, stored.config, words, variables)
    _show_selection(selection, drafts=bool(flags.speculation(words)))
    if held_traps or selection.refused:
        refused = f"{selection.line} of vLLM refuses it: {selection.refused}"
        raise ServeError(
            "serve-unfit",
            f"vLLM {environment.vllm} does not serve {arguments.model} well on a Spark.",
            details=[*held_traps, *([refused] if selection.refused else [])],
        )
    return {"selection": selection, "audit": audit}


def _show_selection(selection: Selection, *, drafts: bool) -> None:
    """Print what vLLM chooses; *drafts*: whether a drafter, which is left out, is set."""
    rows = []
    for kind, kernels in selection.rows.items():
        open_kind = kind in selection.otherwise
        state = "unresolved: if a library says yes" if open_kind else "chosen"
        rows += [[kind, kernel, str(count), state] for kernel, count in kernels.items()]
    for kind, kernels in selection.otherwise.items():
        state = "unresolved: if it says no"
        rows += [[kind, kernel, str(count), state] for kernel, count in kernels.items()]
    if selection.unresolved:
        rows.append(["all", f"{selection.line} {selection.unresolved}", "", "unresolved"])
    if drafts:
        rows.append(["drafts", "vLLM chooses when it loads them", "", "unresolved"])
    versions = ", ".join(map(" ".join, selection.versions.items()))
    console.table(versions, ["layers", "kernels", ">count", "state"], rows, result=True)


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


def _show_modules(model: StoredModel, every: Sequence[Serving]) -> list[list[float]]:
    """Print the modules, and return the bytes of each that a step reads."""
    audit = model.audit
    title = (
        f"{audit.model}, {audit.layers} layers, {audit.scheme or 'not quantised'}: "
        f"{size(audit.bytes)}"
    )
    rows, reads = [], []
    for row in audit.rows:
        read = [model.row_read(row, each) for each in every]
        reads.append(read)
        megabytes = [f"{count / 1e6:,.0f}" for count in (row.bytes, *read)]
        rows.append([row.group, row.modules, row.scheme, f"{row.count:,}", *megabytes])
    console.table(
        title,
        [
            "group",
            "modules",
            "stored as",
            ">count",
            ">MB stored",
            *[f">at {each.requests}" for each in every],
        ],
        rows,
        result=True,
    )
    console.result(f"a token reads {size(audit.weights)} of weights")
    return reads


def _show_cache(caches: Mapping[str, CacheShape]) -> None:
    """Print the cache's bytes for a token, and the fixed ones for a request, by format."""
    rows = []
    for index, kind in enumerate(caches["auto"].kinds):
        tokens = [f"{shape.kinds[index].token:,.0f}" for shape in caches.values()]
        window = f"{kind.window:,}" if kind.name == "sliding" else ""
        rows.append(
            [
                kind.name,
                str(kind.layers),
                *tokens,
                window,
                f"{kind.state / 1e6:,.1f}" if kind.state else "",
            ]
        )
    columns = ["cache", ">layers", *(f">{form}" for form in caches), ">window", ">MB of state"]
    if rows:
        console.table("bytes of a token of context", columns, rows, result=True)
    else:
        console.result("cache: unknown, as config.json lacks a field; not counted below")


def _show_rates(rates: Sequence[Rate], serving: Serving, acceptance: tuple[float, float]) -> None:
    """Print what a step reads, and the tokens per second that follow."""
    rows = []
    for rate in rates:
        parts = (rate.step.weights, rate.step.cache, rate.step.drafts, rate.step.total)
        each = f"{rate.low:.1f} to {rate.high:.1f}"
        every = f"{rate.low * rate.requests:.1f} to {rate.high * rate.requests:.1f}"
        rows.append([str(rate.requests), *map(size, parts), each, every])
    title = f"a step at {serving.context:,} tokens of context, cache {serving.cache}"
    if serving.drafts:
        low, high = acceptance
        title += f", {serving.drafts} drafts of which {low:.0%} to {high:.0%} are accepted"
    console.table(
        title,
        [">requests", ">weights", ">cache", ">drafts", ">bytes", ">tok/s each", ">together"],
        rows,
        result=True,
    )


def _show_levers(levers: Sequence[Lever]) -> None:
    """Print what would make one request faster."""
    rows = []
    for lever in levers:
        saved = f"{'-' * (lever.saved < 0)}{size(abs(lever.saved))}"
        rows.append([lever.change, saved, f"+{lever.gain:.1%}", lever.loads])
    console.table(
        "what makes one request faster, if as many drafts are accepted",
        ["change", ">saved a step", ">tok/s", "can the stack load it"],
        rows,
        result=True,
    )


def _show_fits(model: StoredModel, serving: Serving) -> dict[str, Any]:
    """Print whether each Spark holds the model, and return the tokens that it has room for."""
    drafting = {"method": "mtp"} if serving.drafts else {}
    plain = ServerMemory(model.audit.loaded(drafting) / GIB, autotune=AUTOTUNE)
    fits, rows = {}, []
    for name, machine in SPARKS.items():
        server = msgspec.structs.replace(plain, shape=model.shape(serving), floor=machine.floor())
        reasons = [message for _, message in refusals(server, machine)]
        cache = server.settled(machine).cache or 0.0
        fits[name] = {"tokens": 0 if reasons else server.shape.tokens(cache), "reasons": reasons}
        rows.append([name, "; ".join(reasons) or server.text(machine)])
    console.table("", ["a Spark of", "memory"], rows, result=True)
    return fits
