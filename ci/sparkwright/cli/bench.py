"""``sparkwright bench``: how fast a server answers, cell by cell, and no gate."""

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from sparkwright.bench import quick_look, vllm_bench
from sparkwright.bench.machine import monitor
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.recipes import preflight, recipe as recipes, workloads
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.server_process import Server
from sparkwright.bench.vllm_bench import LoadError, LoadGenerator, LoadSpec
from sparkwright.builder import host_info
from sparkwright.cli import options
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates import throughput
from sparkwright.gates.core.ladder import host_facts
from sparkwright.gates.core.server_under_test import DRAFTS, GateOptions, launch_plan
from sparkwright.gates.core.verdict import GateError
from sparkwright.gates.throughput import MEASURED_FLAGS, subject_of
from sparkwright.gates.throughput_run import ThroughputPolicy, counter_change
from sparkwright.serving.health import counters

#: Seconds of a quick look once the server is ready, and the most tokens of its answers: a slow
#: server (4 tok/s) has three runs in the time.
QUICK_S, QUICK_TOKENS = 110.0, 128

_OPTIONS: options.Options = {
    "--quick": {
        **options.FLAG,
        "help": "only the first cell: two minutes from the ready server",
    },
    **options.MEASURING,
    "--server": {
        # OpenAI's clients are given the address with the version of the protocol.
        "type": lambda url: url.rstrip("/").removesuffix("/v1"),
        "default": "",
        "metavar": "URL",
        "help": "a running server, instead of --serve",
    },
    "--wheel": {"type": Path, "metavar": "WHEEL", "help": "the wheel that is installed there"},
    "--rate": {
        "type": options.number(float, 0.001, 10_000, "requests"),
        "metavar": "N",
        "help": "requests per second (Poisson), any number of them at a time",
    },
    "--natural": {
        **options.FLAG,
        "help": "answers end by themselves, and not at the cell's length",
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``bench``."""
    options.define(parsers, {"bench": bench}, {"bench": _OPTIONS})


def bench(arguments: argparse.Namespace) -> None:
    """
    Look at each cell of the workloads, show the figures and store them.

    Raises:
        measurement-invalid: The server does not start, or the load generator gives no result.
        UsageError: There is no such workload, or a file of prompts is missing or not used.
        file-invalid: It is no file of prompts.
        recipe-unfit, model-missing, checkpoint-invalid: As `preflight.check`.
    """
    options.refuse(
        (
            bool(arguments.serve) == bool(arguments.server),
            "Name a model to serve with --serve DIR, or a server with --server URL.",
        ),
        (
            bool(arguments.serve) != bool(arguments.python),
            "--serve DIR and --python FILE belong together.",
        ),
    )
    context = options.checkout(arguments)
    chosen = msgspec.convert(vars(arguments), GateOptions)
    root, python = context.project.root, chosen.python
    if chosen.texts:
        vllm_bench.check_prompts(chosen.texts)
    gates = root / "ci" / "gates"
    recipe = recipes.load(root, chosen.recipe) if chosen.recipe else None
    names = chosen.workload or (recipe.workloads if recipe else ("primary",))
    cells = workloads.load(root).cells(*names)[: 1 if arguments.quick else None]
    texts = {cell.name: _texts(context, recipe, cell, chosen.texts) for cell in cells}
    if recipe and chosen.serve:
        preflight.check(recipe, cells, chosen.serve, now=True)
    # A wrong environment is refused before anything is fetched or measured.
    subject = subject_of(python, chosen.wheel, context.project.stack) if python else None
    launch = launch_plan(chosen, recipe, python, MEASURED_FLAGS, gated=False) if python else None
    policy = strict_yaml.load(gates / "throughput.yaml", ThroughputPolicy)
    generator = vllm_bench.obtain(root, policy.generator, context.store, offline=context.offline)
    machine_policy = strict_yaml.load(gates / "machine.yaml", monitor.MachinePolicy)
    machine = monitor.MachineMonitor(machine_policy, context.store, python=python)
    # A server that runs already may do so on another machine.
    hindrances = machine.settle(0) if launch else ()
    warnings = [f"{reason.reference}: {reason.message}" for reason in hindrances]
    warnings += _slow_clocks(python) if python and host_info.gpus() else []
    with ExitStack() as stack:
        if launch:
            launch = msgspec.structs.replace(
                launch, kept_free=max(launch.kept_free, machine.policy.floor)
            )
            ours = stack.enter_context(Server(launch, context.store.folder("logs") / "bench.log"))
            if ours.failure:
                raise GateError("measurement-invalid", f"The server does not run: {ours.failure}.")
            client = ours.client()
        else:
            client = Client(chosen.server, chosen.model)
        looks = []
        seconds = QUICK_S if arguments.quick else policy.timeout_s
        try:
            for cell in cells:
                answer = min(cell.answer, QUICK_TOKENS) if arguments.quick else cell.answer
                load = LoadSpec(
                    client.url, client.model(), cell.prompt, answer,
                    cell.concurrency, cell.concurrency, seed=time.time_ns() % 2**31,
                    tokenizer=chosen.serve, prompt_file=texts[cell.name],
                    request_rate=arguments.rate, natural_length=arguments.natural,
                )  # fmt: skip
                looks.append(_look(context, generator, client, cell, load, seconds))
        except (ServerInvalid, LoadError) as error:
            raise GateError(
                "measurement-invalid", f"{client.url} was not measured.", details=[str(error)]
            ) from error
    console.result(
        "No gate: one launch, nothing compared. The intervals cover the runs, and not what differs "
        "between launches."
    )
    for warning in warnings:
        console.warn(warning)
    facts = {
        "looks": looks,
        "warnings": warnings,
        "load": {"request_rate": arguments.rate, "natural_length": arguments.natural},
        "host": {**host_facts(), **machine.firmware()},
        "candidate": subject or {},
    }
    path = throughput.write_record(context.store, context.output, f"{client.model()}.bench", facts)
    console.document({**facts, "file": str(path)})


def _texts(
    context: RunContext, recipe: Recipe | None, cell: WorkloadCell, texts: Path | None
) -> Path | None:
    """Return the file of prompts for *cell*: *texts*, or real ones if tokens are drafted."""
    if recipe and recipe.speculation:
        return texts or vllm_bench.own_prompts(context.store, cell.prompt)
    workloads.check_texts([cell], texts)
    return texts


def _slow_clocks(python: Path) -> list[str]:
    """Show the GPU under load, and return what is wrong with it: a warning, or none."""
    with console.step("the GPU under load, for ten seconds"):
        state, fault = monitor.under_load(python)
        console.note(state)
    return [f"slow-clock: {fault}"] if state and fault else []


def _look(
    context: RunContext,
    generator: LoadGenerator,
    client: Client,
    cell: WorkloadCell,
    load: LoadSpec,
    seconds: float,
) -> QuickLook:
    """Return a look of *seconds* at *cell*, and show it."""
    before = counters(client)
    if DRAFTS in before and not load.prompt_file:
        load = msgspec.structs.replace(
            load, prompt_file=vllm_bench.own_prompts(context.store, cell.prompt)
        )
    look = quick_look.quick_look(generator, cell.name, load, seconds)
    if (change := counter_change(before, counters(client))) and change.drafts:
        look = msgspec.structs.replace(look, accepted_drafts=change.drafts - 1)
    conditions = [load.model, f"{cell.name}: {look.runs} runs of {look.requests} requests"]
    if look.output_tokens < cell.answer:
        conditions.append(f"answers cut to {look.output_tokens} tokens")
    if load.request_rate:
        conditions.append(f"{load.request_rate:g} requests per second, any number at a time")
    if load.natural_length:
        conditions.append("answers of natural length")
    quick_look.show(look, ", ".join(conditions))
    return look
