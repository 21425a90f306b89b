"""
``sparkwright gate``: verdicts about a wheel and the server that runs it, bound to the wheel's
bytes.

With a recipe alone it does everything in one night (`sparkwright.gates.core.night`); with a model
to serve from an environment, it runs single gates.
"""

import argparse
import dataclasses
import os
import pwd
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.audit import wheel as wheels
from sparkwright.bench import vllm_bench
from sparkwright.bench.machine import watchdog
from sparkwright.bench.model import slim
from sparkwright.bench.model.checkpoint import ModelError
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import UNRESOLVED
from sparkwright.builder import host_info, toolchain
from sparkwright.cli import options
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import list_folder, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.gates import accuracy, numerics
from sparkwright.gates.core import ladder, policy as policies
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.night import Night, passed_sources
from sparkwright.gates.core.server_under_test import GateOptions
from sparkwright.gates.core.verdict import GateError, Ladder
from sparkwright.gates.throughput_run import ThroughputPolicy
from sparkwright.release import canary, policy, request, staging
from sparkwright.serving import models


def gate(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """
    Run the gates, show and store their verdicts; raise unless all pass.

    Raises:
        gate-unprepared: A night lacks something; the details name everything.
    """
    options.refuse(
        (
            # A container's user may have no name.
            arguments.server_user and arguments.server_user == pwd.getpwuid(os.geteuid()).pw_name,
            "--server-user is the gate's own user.",
        ),
        (
            arguments.server_user and not (arguments.serve or arguments.recipe),
            "--server-user belongs to --serve, or to a night of a --recipe.",
        ),
        (
            arguments.serve and not (arguments.python and arguments.recipe),
            "--serve DIR needs --python FILE and --recipe NAME.",
        ),
        (
            (arguments.gpu or arguments.channel == "verified") and not arguments.dry_run,
            "--gpu and --channel belong to --dry-run.",
        ),
        (
            bool(arguments.baseline) != bool(arguments.baseline_python),
            "--baseline WHEEL and --baseline-python FILE belong together.",
        ),
        (
            arguments.record and not (arguments.wheel and arguments.serve),
            "--record DIR needs the WHEEL, and --serve DIR with --python FILE.",
        ),
        *(
            (path and not path.exists(), f"There is no {path}.")
            for path in (arguments.wheel, arguments.serve, arguments.model_folder)
        ),
    )
    # SIGTERM and SIGHUP interrupt a gate as Ctrl-C does, so that it writes its verdict; nohup
    # ignores SIGHUP.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _end_session)
    context = options.checkout(arguments)
    arguments.task = arguments.task or _default_task(context, arguments.recipe)
    if arguments.texts:
        vllm_bench.check_prompts(arguments.texts)
    gate_options = msgspec.convert(vars(arguments), GateOptions)
    if arguments.against and (arguments.against / "config.json").exists():
        gate_options = msgspec.structs.replace(
            gate_options, against=None, original=arguments.against
        )
    if not arguments.wheel:
        gate_options = msgspec.structs.replace(gate_options, wheel=_newest_wheel(context))
    names = arguments.recipe.split()
    # Gates that look at the wheel alone need neither a model nor another wheel.
    serves = not set(ladder.SERVED).isdisjoint(arguments.only or ladder.SERVED)
    is_night = serves and not (arguments.serve or arguments.record)
    options.refuse(
        (
            gate_options.original and not (names and is_night),
            "A model as --against belongs to a night of a --recipe.",
        ),
        (
            arguments.hours and not (names and is_night),
            "--hours belongs to a night of a --recipe: without --serve or --record, and "
            "with a gate of a served model.",
        ),
    )
    if arguments.dry_run:
        document = _check_request(context, arguments)
        if len(names) == 1 and is_night and gate_options.wheel:
            context = dataclasses.replace(context, offline=True)
            night = _prepare(context, arguments, gate_options)
            night.show_plan()
            document["plan"] = night.plan()
        return document
    if names and is_night:
        _spend_night(context, arguments, gate_options)
        return None
    if arguments.record:
        with GateBuilder(context, gate_options, ladder.host_facts()) as builder:
            return {"recorded": list(map(str, builder.record(arguments.record)))}
    result = climb(context, gate_options, keep_going=arguments.keep_going)
    if against := gate_options.against:
        canary.write(context.store, context.output, result, against, gate_options.profile)
    ladder.show(result)
    console.document({"ladder": ladder.document(result)})
    ladder.raise_for_state(result)
    return None


def _end_session(*_: object) -> None:
    """End the gates as Ctrl-C does; the terminal is gone, and so are the readers of pipes."""
    for descriptor in (1, 2):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    raise KeyboardInterrupt


def _default_task(context: RunContext, names: str) -> str:
    """Return the task of G6 for the recipes *names*: gsm8k, unless they have floors of others."""
    floors: dict[str, float] = {}
    for name in names.split():
        floors |= recipes.load(context.project.root, name).floors
    return "gsm8k" if "gsm8k" in floors or not floors else next(iter(floors))


def _spend_night(
    context: RunContext, arguments: argparse.Namespace, gate_options: GateOptions
) -> None:
    with context.store.lock("night", wait=False):
        night, wheel = _prepare(context, arguments, gate_options), gate_options.wheel
        assert wheel
        night.show_plan()
        stock = arguments.baseline
        # Both environments are made before any gate, so that a failure shows while the user still
        # looks.
        if not arguments.python:
            with console.step("the environment of the built wheel"):
                staging.environment(context, "ours", wheel)
        if not stock:
            with console.step("the environment of the stock wheel"):
                stock = staging.environment(context, "stock", wheel).wheel
        night.run(stock)
        if pack := night.make_pack():
            console.result(f"warm pack: {pack.text}")
        # The reference of an original model says nothing about a slimmer copy.
        if not gate_options.original:
            canary.write(
                context.store, context.output, night.ladder, night.reference, gate_options.profile
            )
    ladder.show(night.ladder)
    console.result(night.answer)
    console.result(f"page: {night.page}")
    console.document(
        {"ladder": ladder.document(night.ladder), "answer": night.answer, "page": str(night.page)}
    )
    ladder.raise_for_state(night.ladder)


def _prepare(
    context: RunContext, arguments: argparse.Namespace, gate_options: GateOptions
) -> Night:
    """
    Return the night of *gate_options*.

    Raises:
        gate-unprepared: The wheel, the model, the stock wheel, the patched sources, a compiler, the
            accuracy harness, its data or the load generator is missing; the details name all that
            are.
    """
    root, lacking = context.project.root, list[str]()
    recipe = recipes.load(root, arguments.recipe)
    names = gate_options.only or tuple(ladder.GATES)

    def obtain(what: str, get: Callable[[], Any]) -> Any:
        try:
            return get()
        except SparkwrightError as error:
            # A dry run fetches nothing, so what it cannot find is not missing yet.
            if not (arguments.dry_run and error.reference == "offline"):
                texts = (f"{what}: {error.reference}: {error.what}", *error.details[:2], error.todo)
                lacking.append(" ".join(texts))
            return None

    if not gate_options.wheel:
        lacking.append(f"wheel: none in {context.output}. Build one: sparkwright build.")
    model = obtain("model", lambda: _model_folder(recipe, arguments.model_folder))
    if model and (original := gate_options.original):
        obtain("original", lambda: slim.read_record(model, original))
    # A dry run has asked this already, and the pipeline patches the sources behind it.
    if not arguments.dry_run:
        machine = _machine(arguments)
        obtain(
            "request",
            lambda: request.require(context, [recipe.name], "candidate", models=model, **machine),
        )
        gate_policies, wheel = policies.load(root), gate_options.wheel
        verdicts = ladder.wheel_verdicts(context.output, sha256_file(wheel)) if wheel else []
        if "G1" in names and not passed_sources(gate_policies, verdicts):
            if forks := numerics.missing_trees(context, gate_policies.numerics):
                lacking.append(f"patched sources: of {', '.join(forks)}. Run sparkwright apply.")
            obtain("C++ compiler", toolchain.host_compiler)
    if arguments.baseline:
        stock = sha256_file(arguments.baseline)
    else:
        base = obtain("stock wheel", lambda: staging.official_wheel(context))
        stock = base.sha256 if base else ""
    if "G6" in names and gate_options.task in recipe.floors:
        task = policies.load(root).accuracy.tasks[gate_options.task]
        harness_python = obtain("accuracy harness", lambda: accuracy.obtain_harness(context))
        if harness_python and (cause := accuracy.missing_data(context, task)):
            lacking.append(f"data set: {cause}")
    if "G8" in names:
        rules = strict_yaml.load(root / "ci/gates/throughput.yaml", ThroughputPolicy)
        store, offline = context.store, context.offline
        obtain(
            "load generator",
            lambda: vllm_bench.obtain(root, rules.generator, store, offline=offline),
        )
    if lacking:
        raise GateError(
            "gate-unprepared",
            f"The night of {recipe.name} lacks {len(lacking)} thing(s).",
            details=lacking,
        )
    wheel = gate_options.wheel
    assert wheel
    python, stock_python = arguments.python, arguments.baseline_python
    pythons = (
        python or staging.location(context, "ours", wheel)[1].python,
        stock_python or staging.location(context, "stock", wheel)[1].python,
    )
    return Night(
        context,
        msgspec.structs.replace(gate_options, serve=model),
        stock,
        pythons,
        hours=arguments.hours,
        keep_going=arguments.keep_going,
    )


def _model_folder(recipe: recipes.Recipe, folder: Path | None) -> Path:
    """
    Return the folder of the model of *recipe*: in *folder*, or in this machine's model cache.

    Raises:
        model-missing: It is not there, or not whole.
    """
    name, revision, variables = recipe.model.repository, recipe.model.revision, dict(os.environ)
    if folder:
        own = folder / recipe.name
        name, variables = str((own if own.is_dir() else folder).absolute()), {}
    try:
        return models.find(name, "" if revision == UNRESOLVED else revision, variables).path
    except ModelError as error:
        raise ModelError(
            error.reference,
            error.what,
            details=error.details,
            todo=f"Name its folder with --model-folder DIR, or fetch it: hf download {name}.",
        ) from error


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `request.require` asks of the machine that will gate: --gpu, or this one."""
    if arguments.gpu:
        return {"gpus": [arguments.gpu]}
    gpus = [gpu.capability for gpu in host_info.gpus()]
    if not gpus and (fault := host_info.driver_fault()):
        gpus = [fault]
    return {"gpus": gpus, "kernel_log": watchdog.is_readable()}


def _check_request(context: RunContext, arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Return the request of *arguments*, and whether its verdicts are there and nothing has changed.

    Raises:
        UsageError, request-unfit: As `request.require`.
    """
    models, path, names = arguments.model_folder, arguments.wheel, arguments.recipe.split()
    required = request.require(
        context, names, arguments.channel, models=models, **_machine(arguments)
    )
    versions = ", ".join(required.versions)
    console.result(f"{required.stack} ({versions}) is served by {' '.join(required.recipes)}")
    settled = False
    if models and path:
        verdicts = ladder.wheel_verdicts(context.output, sha256_file(path))
        rules = policy.load(context.project.root, context.project.spec.arch)
        settled = request.settled(verdicts, required, rules, ladder.host_facts(), models)
    return {**msgspec.structs.asdict(required), "settled": settled}


def climb(context: RunContext, gate_options: GateOptions, *, keep_going: bool = False) -> Ladder:
    """
    Run the gates of *gate_options* on this machine, and store the verdicts after each.

    Raises:
        file-invalid: The wheel's file of verdicts has other contents, or is of another stack.
    """
    path, file = gate_options.wheel, None
    if path:
        stack, beside = context.project.stack, path.parent
        subject = wheels.read_subject(path)
        file = ladder.VerdictFile(context.store, context.output, subject, stack, beside)
        console.note(f"attempt {file.attempt} of this wheel; verdicts: {file.path}")
    with GateBuilder(context, gate_options, ladder.host_facts()) as builder:
        names = [name for name in ladder.GATES if name in (gate_options.only or ladder.GATES)]
        return builder.climb(list(map(builder.gate, names)), file, keep_going=keep_going)


def _newest_wheel(context: RunContext) -> Path | None:
    """
    Return the newest wheel of a grafted fork in the output folder, of the stack, architecture and
    machine of *context*.
    """
    # The label of a build for another architecture begins with the same text.
    label, machine = re.escape(context.project.spec.label), re.escape(context.machine)
    own = re.compile(rf"[^-]+-[^-]+\+{label}\.p[0-9a-f]+\..*[-_](any|{machine})\.whl")
    wheels = list[Path]()
    for fork in context.grafts:
        for path in list_folder(context.output, f"*{fork}-*.whl"):
            if own.fullmatch(path.name):
                wheels.append(path)
    return max(wheels, key=lambda path: path.stat().st_mtime, default=None)
