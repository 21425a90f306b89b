"""``sparkwright bench --quick``: a figure with its interval within two minutes, and no gate."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from typing import Any

import msgspec

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.load.load_generator_check import GeneratorPolicy, check_generator
from sparkwright.bench.load.vllm_bench import LoadError, LoadSpec
from sparkwright.bench.machine.monitor import Telemetry
from sparkwright.bench.machine.state_checks import MachinePolicy, start_reasons
from sparkwright.bench.machine.watchdog import watch_memory
from sparkwright.bench.quick_look import quick_look
from sparkwright.bench.recipes import workloads
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.server.launch import Server
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.errors import GateError
from sparkwright.gates.throughput.experiment import ExperimentSpec


def run(context: RunContext, query: ExperimentSpec) -> None:
    """
    Show and store a quick look at the first cell of the query's workloads.

    Raises:
        measurement-invalid: The server does not start, or the load generator gives no result.
        UsageError: There is no such workload, or its file of prompts is not named.
    """
    gates, cell = context.project.root / "ci" / "gates", _first_cell(context, query)
    machine_policy = strict_yaml.load(gates / "machine.yaml", MachinePolicy)
    generator_policy = strict_yaml.load(gates / "load_generator.yaml", GeneratorPolicy)
    generator = vllm_bench.obtain(
        context.project.root, generator_policy.stack, context.store, offline=context.offline
    )
    telemetry = Telemetry()
    machine_policy = telemetry.adapt(machine_policy)
    reasons = start_reasons(telemetry.snapshot(), machine_policy)
    warnings = [f"{reason.reference}: {reason.says}" for reason in reasons]
    with ExitStack() as stack:
        try:
            check_generator(generator, generator_policy)
        except LoadError as error:
            warnings.append(str(error))
        url = query.url
        wheel_facts: dict[str, Any] = {}
        if query.candidate:
            wheel_facts = msgspec.to_builtins(query.candidate.subject(context.project.stack))
            launch = query.launches({"candidate": wheel_facts["version"]})["candidate"]
            server = stack.enter_context(Server(launch, context.store.folder("logs") / "quick.log"))
            if server.failure:
                what = f"The server does not run: {server.failure}."
                raise GateError("measurement-invalid", what)
            stack.enter_context(watch_memory(machine_policy.memory, server.kill))
            url = server.url
        try:
            look = quick_look(
                generator,
                LoadSpec(
                    url,
                    query.served_name,
                    cell.prompt,
                    cell.answer,
                    cell.concurrency,
                    cell.concurrency,
                    seed=time.time_ns() % 2**31,
                    tokenizer=query.model,
                    prompt_file=query.texts if cell.texts else None,
                ),
                warnings,
            )
        except LoadError as error:
            what = f"{query.served_name} was not measured."
            raise GateError("measurement-invalid", what, details=[str(error)]) from error
    for warning in look.warnings:
        console.warn(warning)
    rows = [
        [figure.name, f"{figure.mean:.4g}", f"{figure.low:.4g} – {figure.high:.4g}", figure.unit]
        for figure in look.figures
    ]
    title = f"{query.served_name}, {cell.name}: {look.runs} runs of {look.requests} requests"
    if look.output_tokens < cell.answer:
        title += f", answers cut to {look.output_tokens} tokens"
    console.table(title, ["", ">mean", ">95 % interval", ""], rows, result=True)
    console.result(look.disclaimer)
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", query.served_name).strip("-.") or "result"
    path = context.output / f"{name}.quick.json"
    facts = {"quick": look, "host": telemetry.fingerprint(), "candidate": wheel_facts}
    context.store.write(path, msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
    console.note(f"result: {path}")
    console.document({**msgspec.to_builtins(facts), "file": str(path)})


def _first_cell(context: RunContext, query: ExperimentSpec) -> WorkloadCell:
    recipe_workloads = query.recipe.workloads if query.recipe else ("primary",)
    cell = workloads.load(context.project.root).cells(*(query.workloads or recipe_workloads))[0]
    if cell.texts and not query.texts:
        raise UsageError(
            "usage", f"{cell.name} needs a file of prompts.", todo="Name it: --texts FILE."
        )
    return cell
