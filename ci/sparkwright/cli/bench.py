"""``sparkwright bench``: measurements of a served model, with their intervals."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench import quick_look, report
from sparkwright.bench.load import prompts, vllm_bench
from sparkwright.bench.load.vllm_bench import LoadError, LoadSpec
from sparkwright.bench.machine import probe
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.machine.state_checks import MachinePolicy
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes import workloads
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.launch import Server
from sparkwright.builder import host_info
from sparkwright.cli import options
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates import throughput
from sparkwright.gates.core.ladder import host_facts
from sparkwright.gates.core.server_under_test import DRAFTS, GateOptions, launch_plan
from sparkwright.gates.core.verdict import GateError
from sparkwright.gates.throughput import MEASURED_FLAGS, Experiment, subject_of
from sparkwright.gates.throughput_run import ThroughputPolicy, counter_change

_OPTIONS: options.Options = {
    "--quick": {
        **options.FLAG,
        "help": "only a quick look: one launch, the first cell, two minutes from the ready "
        "server; not a gate",
    },
    **options.MEASURING,
    "--server": {
        # OpenAI's clients are given the address with the version of the protocol.
        "type": lambda url: url.rstrip("/").removesuffix("/v1"),
        "default": "",
        "metavar": "URL",
        "help": "with --quick, a running server, instead of --serve",
    },
    "--wheel": {"type": Path, "metavar": "WHEEL", "help": "the wheel that is installed there"},
    "--launches": {
        "type": options.number(int, 1, 1000),
        "default": 0,
        "metavar": "N",
        "help": "launches of the server; each is one sample (default: 5)",
    },
    "--rate": {
        "type": options.number(float, 0.001, 10_000, "requests"),
        "metavar": "N",
        "help": "with --quick, requests per second (Poisson), any number of them at a time",
    },
    "--natural": {
        **options.FLAG,
        "help": "with --quick, answers end by themselves, and not at the cell's length",
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``bench``."""
    options.define(parsers, {"bench": bench}, {"bench": _OPTIONS})


def bench(arguments: argparse.Namespace) -> None:
    """Measure, show tables, and keep the result."""
    options.refuse(
        (
            bool(arguments.serve) == bool(arguments.server),
            "Name a model to serve with --serve DIR, or a server with --server URL.",
        ),
        (
            bool(arguments.serve) != bool(arguments.python),
            "--serve DIR and --python FILE belong together.",
        ),
        (
            arguments.server and not arguments.quick,
            "--server needs --quick: a bench starts servers of its own.",
        ),
        (arguments.quick and arguments.launches, "--quick is one launch, without --launches."),
        (arguments.sha256 and not arguments.texts, "--sha256 is that of the file of --texts."),
        (
            (arguments.rate or arguments.natural) and not arguments.quick,
            "--rate and --natural are of --quick: a comparison needs the same load on both sides.",
        ),
    )
    context = options.checkout(arguments)
    bench_options = replace(
        msgspec.convert(vars(arguments), GateOptions), texts=options.prompts(context, arguments)
    )
    if arguments.quick:
        quick(context, bench_options, arguments.rate, natural=arguments.natural)
        return
    result = Experiment(context, "bench", bench_options, arguments.launches).result()
    report.show(result)
    path = throughput.write_result(context.store, context.output, result)
    console.document({"result": result, "file": str(path)})
    if result.state == "invalid":
        raise GateError(
            "measurement-invalid",
            f"{result.model} was not measured to the end.",
            details=[result.says],
        )


def _texts(
    context: RunContext, recipe: Recipe | None, cell: WorkloadCell, texts: Path | None
) -> Path | None:
    """Return the file of prompts for *cell*: *texts*, or real ones if tokens are drafted."""
    if recipe and recipe.speculation:
        return texts or prompts.programs(context.store, cell.prompt)
    workloads.check_texts([cell], texts)
    return texts


def _slow_clocks(python: Path) -> list[str]:
    """Show the GPU under load, and return what is wrong with it: a warning, or none."""
    with console.step("the GPU under load, for ten seconds"):
        state, fault = probe.under_load(python)
        console.note(state)
    return [f"slow-clock: {fault}"] if state and fault else []


def _counters(client: Client) -> dict[str, float]:
    """Return the server's metrics; none if it does not have them."""
    with suppress(ServerInvalid):
        return client.metrics()
    return {}


def quick(
    context: RunContext,
    bench_options: GateOptions,
    rate: float | None = None,
    *,
    natural: bool = False,
) -> None:
    """
    Show and store a quick look at the first cell of the workloads of *bench_options*.

    Args:
        rate: Requests per second; None for a closed loop.
        natural: Let answers end by themselves.

    Raises:
        measurement-invalid: The server does not start, or the load generator gives no result.
        UsageError: There is no such workload, or a file of prompts is missing or not used.
    """
    root, python = context.project.root, bench_options.python
    gates = root / "ci" / "gates"
    recipe = recipes.load(root, bench_options.recipe) if bench_options.recipe else None
    names = bench_options.workload or (recipe.workloads if recipe else ("primary",))
    cell = workloads.load(root).cells(*names)[0]
    texts = _texts(context, recipe, cell, bench_options.texts)
    # A wrong environment is refused before anything is fetched or measured.
    subject = subject_of(python, bench_options.wheel, context.project.stack) if python else None
    launch = (
        launch_plan(bench_options, recipe, python, MEASURED_FLAGS, gated=False) if python else None
    )
    policy = strict_yaml.load(gates / "throughput.yaml", ThroughputPolicy)
    generator = vllm_bench.obtain(root, policy.generator, context.store, offline=context.offline)
    machine_policy = strict_yaml.load(gates / "machine.yaml", MachinePolicy)
    machine = MachineMonitor(machine_policy, context.store, python=None)
    # A server that runs already may do so on another machine.
    hindrances = machine.settle(0) if launch else ()
    warnings = [f"{reason.reference}: {reason.message}" for reason in hindrances]
    warnings += _slow_clocks(python) if python and host_info.gpus() else []
    client = None if launch else Client(bench_options.server, bench_options.model)
    with ExitStack() as stack:
        if launch:
            launch = replace(launch, reserve=max(launch.reserve, machine.policy.floor))
            ours = stack.enter_context(Server(launch, context.store.folder("logs") / "quick.log"))
            if ours.failure:
                raise GateError("measurement-invalid", f"The server does not run: {ours.failure}.")
            client = ours.client()
        assert client
        try:
            name, counters = client.model(), _counters(client)
            if DRAFTS in counters:
                texts = texts or prompts.programs(context.store, cell.prompt)
            load = LoadSpec(
                client.url, name, cell.prompt, cell.answer, cell.concurrency, cell.concurrency,
                seed=time.time_ns() % 2**31, tokenizer=bench_options.serve,
                prompt_file=texts, request_rate=rate, natural_length=natural,
            )  # fmt: skip
            look = quick_look.quick_look(generator, load)
        except (ServerInvalid, LoadError) as error:
            raise GateError(
                "measurement-invalid", f"{client.url} was not measured.", details=[str(error)]
            ) from error
        change = counter_change(counters, _counters(client))
    for warning in warnings:
        console.warn(warning)
    conditions = (
        f"{cell.name}: {look.runs} runs of {look.requests} requests",
        f"answers cut to {look.output_tokens} tokens" if look.output_tokens < cell.answer else "",
        f"{rate:g} requests per second, any number at a time" if rate else "",
        "answers of natural length" if natural else "",
    )
    report.show_quick(look, f"{name}, {', '.join(filter(None, conditions))}")
    accepted = change.drafts - 1 if change and change.drafts else None
    if accepted is not None:
        console.result(f"accepted drafts: {accepted:.2f} tokens a step, on real text")
    facts = {
        "accepted_drafts": accepted,
        "quick": look,
        "warnings": warnings,
        "load": {"cell": cell.name, "request_rate": rate, "natural_length": natural},
        "host": {**host_facts(), **machine.firmware()},
        "candidate": subject or {},
    }
    path = throughput.write_record(context.store, context.output, f"{name}.quick", facts)
    console.document({**facts, "file": str(path)})
