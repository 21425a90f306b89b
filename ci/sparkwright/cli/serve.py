"""``sparkwright serve``: preflight, and then vLLM in the place of this program."""

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from sparkwright.bench.server import peers, server_log
from sparkwright.cli import options
from sparkwright.client import ClientError
from sparkwright.client.environment import default_prefix
from sparkwright.core import config
from sparkwright.core.arguments import redact, shell_lines
from sparkwright.core.console import console, duration, size
from sparkwright.core.errors import UsageError
from sparkwright.core.memory import GIB, MachineMemory, guard_limit
from sparkwright.serving import ServeError, guard, launch, models
from sparkwright.serving.launch import ServeRequest, ServingPlan

#: Bytes a second of a download, for estimates of its time.
RATES = (100e6, 10e6)
#: Failure of each state of health.
FAILURES = {"garbage": "server-garbage", "stuck": "server-stuck", "dead": "server-dead"}


def plain_text(text: str) -> str:
    """Return *text* if it is one line that does not begin with a hyphen."""
    if not re.fullmatch(r"(?!-)[^\x00-\x1f\x7f]{1,4096}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no line of text without - in front")
    return text


#: Share of its floor below which a server ends that started beside another; more than
#: `guard_limit` gives one that is alone.
LATER = 0.9
#: A unit of systemd. vLLM ends with status 0 when its engine died, and a guard by a signal; the
#: limits of systemd do not count the memory of a GB10's GPU, which the guard watches.
UNIT = """\
[Unit]
StartLimitIntervalSec=3600
StartLimitBurst=5

[Service]
WorkingDirectory={folder}
ExecStart={command}
Restart=always
RestartSec=30
TimeoutStopSec=60
OOMPolicy=continue

[Install]
WantedBy=default.target"""
#: Variables of the shell that reach the server. None replaces code of the wheel.
PASSED = (
    "VLLM_API_KEY", "MAX_JOBS", "SAFETENSORS_", "TIKTOKEN_", "NCCL_", "GLOO_", "UCX_", "RAY_",
    "TORCH", "PYTORCH_", "CUDA_", "OMP_", "FLASHINFER_",
    "TRITON_", "CUTE_DSL_", "B12X_", "HF_", "TRANSFORMERS_", "NVIDIA_", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
#: Those that change how vLLM computes, or which code runs: named, and passed with --variable.
WITHHELD = ("VLLM_", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME")


_OPTIONS: options.Options = {
    "recipe": {
        "nargs": "?",
        "default": "",
        "metavar": "RECIPE",
        "help": "name of a recipe or a part of it, or the id of its model; optional with --model",
    },
    "--model": {
        "type": plain_text,
        "metavar": "DIR|NAME",
        "help": "folder of the model, or its name in the model cache (default: the recipe's)",
    },
    "--download": {**options.FLAG, "help": "let vLLM download a model that is missing"},
    "--dry-run": {**options.FLAG, "help": "check everything, show the command, and start nothing"},
    "--host": {
        "type": plain_text,
        "metavar": "ADDRESS",
        "help": "address to listen on (default: 127.0.0.1, this machine alone)",
    },
    "--port": {
        "type": options.number(int, 1, 65535),
        "metavar": "N",
        "help": "port to listen on (default: 8000)",
    },
    "--name": {
        "type": plain_text,
        "metavar": "NAME",
        "help": "name of the model for clients (default: the recipe's, or the folder's)",
    },
    **options.SERVER,
    "--health": {
        "nargs": "?",
        "const": "",
        "metavar": "URL",
        "help": "only check whether the server at URL serves (default: at --host and --port)",
    },
    "--patience": {
        "type": options.number(int, 1, 86400),
        "default": 10,
        "metavar": "SECONDS",
        "help": "time limit of each answer for --health (default: %(default)s)",
    },
    "--deep": {
        **options.FLAG,
        "help": "with --health: also compare answers with those that the gate recorded for the "
        "release, recipe and model",
    },
    "--list": {**options.FLAG, "help": "only show which servers run here, and their memory"},
    "--copy-model": {
        "default": "",
        "metavar": "HOST",
        "help": "only copy the model to the same folder on HOST by rsync, and compare all bytes; "
        "HOST may be its address on the fast link",
    },
    "--unit": {**options.FLAG, "help": "check everything, and print a systemd unit that serves so"},
    "--explain-start": {
        "nargs": "?",
        "const": "",
        "metavar": "LOG",
        "help": "once the server answers, show how long each part of its start took, and what was "
        "cached; with LOG only show that of a log",
    },
    "--floor": {
        "type": options.number(float, 0, 4096, "GiB"),
        "metavar": "GIB",
        "help": "memory to leave free (default: the recipe's, or a tenth)",
    },
    "--revision": {
        "type": plain_text,
        "metavar": "COMMIT",
        "help": "commit or branch of a model named with --model",
    },
    "--python": {
        "type": Path,
        "metavar": "FILE",
        "help": "Python of the environment (default: the current release's, else the active one's)",
    },
    "--join": {
        "type": plain_text,
        "metavar": "ADDRESS",
        "help": "serve with other machines, of which the first has ADDRESS as its --node-address",
    },
    "--nodes": {
        "type": options.number(int, 1, 64),
        "metavar": "N",
        "help": "machines that serve together (default: the recipe's)",
    },
    "--node-address": {
        "type": plain_text,
        "metavar": "ADDRESS",
        "help": "address of this machine on the network of those that serve together",
    },
    "--node-rank": {
        "type": options.number(int, 0, 63),
        "metavar": "N",
        "help": "place of this machine; 0 is the first (default: with --join 1)",
    },
    "--node-port": {
        "type": options.number(int, 1, 65534),
        "metavar": "N",
        "help": "port where the machines meet; vLLM takes the next one, too (default: 29501)",
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``serve``."""
    options.define(parsers, {"serve": serve}, {"serve": _OPTIONS})


def serve(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """
    Check the request, and become the server; return only with ``--health``, ``--list``,
    ``--copy-model``, ``--unit`` or ``--dry-run``.

    Raises:
        answers-differ, canary-not-run: With ``--deep``, as `health.compare_with_canary`.
        server-dead, server-garbage, server-stuck: With ``--health``, the server does not serve.
        port-taken, memory-held: It cannot start.
        peer-missing, peers-differ, link-failed, link-slow: Nor with the other machines.
        model-differs: With ``--copy-model``, the copy is not the same.
        UsageError and others: As `launch.plan`.
    """
    options.refuse(
        (
            arguments.node_rank is not None and bool(arguments.node_rank) != bool(arguments.join),
            "--node-rank is 0 on the first machine, and more on those that --join it.",
        ),
        (arguments.deep and arguments.health is None, "--deep belongs to --health."),
    )
    if arguments.list:
        return _list()
    if arguments.health is not None:
        return _check_health(arguments)
    if arguments.explain_start:
        parts = server_log.read_start(Path(arguments.explain_start)).parts()
        _show_parts(parts)
        return {"parts": parts}
    request = _request(arguments)
    if arguments.copy_model:
        model = launch.model_of(request, config.root(arguments.root))
        folder = models.copy(model.path, arguments.copy_model)
        console.result(f"{arguments.copy_model} has the same {folder}")
        return None
    python = arguments.python or default_prefix() / "current" / "bin" / "python"
    if not arguments.python and not python.exists():
        python = Path(os.environ.get("VIRTUAL_ENV") or default_prefix(), "bin", "python")
        if not python.exists():
            raise ClientError(
                "nothing-installed",
                f"There is no release in {default_prefix()}, so there is nothing to serve with.",
                todo="Run `sparkwright install`, or name the Python of another vLLM with --python.",
            )
    plan = launch.plan(request, python, config.root(arguments.root), options=_OPTIONS.keys())
    if arguments.unit:
        if request.shell:
            text = f"{', '.join(request.shell)}; --variable NAME=VALUE gives one"
            console.warn(f"variables of this shell that the unit lacks: {text}")
        console.result(_unit(arguments.words))
        return None
    return _start(plan, arguments.dry_run, explained=arguments.explain_start is not None)


def _request(arguments: argparse.Namespace) -> ServeRequest:
    """Return what *arguments*, and the variables of the shell, ask for."""
    variables = dict(arguments.variable)
    # A shell may have the caches.env of another release.
    releases = f"{default_prefix()}/releases/"
    shell, withheld = dict[str, str](), list[str]()
    for name, value in sorted(os.environ.items()):
        if not value or name in variables:
            continue
        if name.startswith(WITHHELD) and name not in PASSED:
            withheld.append(name)
        elif name.startswith(PASSED) and not value.startswith(releases):
            shell[name] = value
    if withheld:
        text = f"{', '.join(withheld)}; --variable NAME=VALUE passes one"
        console.warn(f"not passed to the server: {text}")
    stated = {name: value for name, value in vars(arguments).items() if value not in (None, "")}
    return msgspec.structs.replace(
        msgspec.convert(stated, ServeRequest),
        flags=tuple(arguments.flag),
        variables=variables,
        shell=shell,
        address=arguments.node_address or "",
        rank=1 if arguments.node_rank is None else arguments.node_rank,
    )


def _unit(words: Sequence[str]) -> str:
    """
    Return a unit of systemd that serves what the command line *words* asks for.

    Raises:
        UsageError: It would hold a secret.
    """
    serve_words = [word for word in words if word not in ("--unit", "--dry-run")]
    if redact(serve_words) != serve_words:
        todo = "Give it with Environment= or EnvironmentFile= of systemd: HF_TOKEN, VLLM_API_KEY."
        raise UsageError("usage", "The unit would show a secret to whoever reads it.", todo=todo)
    command = [sys.executable, "-m", "sparkwright", "serve", *serve_words]
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        command = [word.replace(plain, escaped) for word in command]
    folder = str(Path.cwd()).replace("%", "%%")
    return UNIT.format(folder=folder, command=" ".join(f'"{word}"' for word in command))


def _check_health(arguments: argparse.Namespace) -> dict[str, Any]:
    from sparkwright.serving import health

    host, port = arguments.host or "127.0.0.1", arguments.port or 8000
    url = arguments.health or launch.local_url(host, port)
    key = os.environ.get("VLLM_API_KEY", "")
    state = health.check(url, arguments.patience, key)
    if failure := FAILURES.get(state.state):
        console.document({"health": state})
        what = f"The server at {url} does not serve: {state.state}."
        raise ServeError(failure, what, details=[state.message], data=msgspec.to_builtins(state))
    console.result(f"{state.state}: {state.message} at {url}")
    if arguments.deep:
        console.result(health.compare_with_canary(url, config.root(arguments.root), key))
    return {"health": state}


def _list() -> dict[str, Any]:
    """Show the servers that run here, and the memory that they and their children hold."""
    servers, machine = launch.running(), MachineMemory.here()
    rows = list[tuple[str, ...]]()
    for server in servers:
        own = (server.pid, *guard.descendants(server.pid))
        held = sum(tenant.gib for tenant in machine.tenants if tenant.pid in own)
        names = (str(server.pid), server.release, server.recipe or server.model, server.url)
        rows.append((*names, f"{held:.1f}", f"{server.needed_gib:.1f}"))
    console.table(
        "Servers",
        ("pid", "release", "recipe", "address", ">GiB now", ">planned"),
        rows,
        result=True,
    )
    console.result(f"{machine.free:.1f} of {machine.total:.1f} GiB are free")
    return {"servers": servers, "free_gib": machine.free}


def _start(plan: ServingPlan, dry_run: bool, *, explained: bool) -> dict[str, Any]:
    """
    Show *plan*, check what may change between two starts, and become the server, whose start is
    *explained*.
    """
    request = plan.request
    document = plan.document()
    _show(plan)
    for text in plan.warnings:
        console.warn(text)
    if not request.join:
        launch.check_port(request.host, request.port)
    machines, server = plan.launch.machines, plan.launch
    if machines and not request.join:
        launch.check_port(machines.address, machines.port)
    if dry_run:
        settings = map("=".join, document["variables"].items())
        console.result(shell_lines(["env", *settings, *document["command"]]))
        return document
    variables, descriptors = server.environment(), list[int]()
    if machines:
        links, flags = peers.gather(machines, server.python, server.model, server.flags, variables)
        server, descriptors = (
            msgspec.structs.replace(server, flags=flags),
            [link.detach() for link in links],
        )
    floor = plan.memory.floor
    # Of two servers the later one ends first, so that the other has its memory.
    limit = LATER * floor if launch.running() else guard_limit(floor)
    guard.start(floor, limit, plan.model.path, descriptors)
    record = {
        **document,
        "pid": os.getpid(),
        "prefix": str(plan.environment.prefix),
        "url": launch.local_url(request.host, request.port),
        "flags": redact(request.flags),
    }
    text = msgspec.json.encode(msgspec.convert(record, launch.RunningServer)).decode()
    if explained:
        _explain_start(plan.warm)
    return _become(server.command(request.port, request.host), {**variables, launch.RECORD: text})


def _show(plan: ServingPlan) -> None:
    """Show what is served, the memory that it takes, and what decided each argument."""
    recipe, memory, machine = plan.recipe, plan.memory, plan.machine
    marker = plan.environment.marker
    local = plan.model.path.exists()
    weights = "of the model on this machine" if local else "as the hub or the recipe states"
    variables = "\n".join(map("=".join, plan.document()["variables"].items()))
    count = memory.weights * GIB
    times = ", ".join(f"{duration(count / rate)} at {size(rate)}/s" for rate in RATES)
    download = f"{size(count)}: {times}" if count else "of unknown size"
    rows = [
        ("recipe", f"{recipe.name}: {recipe.title}" if recipe else ""),
        ("release", f"{marker.name + ', ' if marker else ''}vLLM {plan.environment.vllm}"),
        ("model", f"{plan.model.path} {plan.model.commit}"),
        ("download", "" if local else download),
        ("address", f"http://{plan.request.host}:{plan.request.port}/v1, as {plan.launch.name}"),
        ("machines", str(plan.nodes) if plan.nodes > 1 else ""),
        ("variables", variables),
    ]
    console.table("The server", ("", "plan"), [row for row in rows if row[1]])
    fitting = f"{memory.shape.tokens(memory.cache or 0.0):,} tokens fit"
    fitting = fitting if memory.shape.token else "what fits is known after the download"
    sizes = [
        ("weights", memory.weights, weights if memory.weights else "unknown"),
        ("cache", memory.cache or 0.0, f"{fitting}; a request has {memory.length:,} tokens"),
        ("reserve", memory.reserve, "activations, CUDA graphs, processes"),
        ("tuning", memory.autotune, "of kernels, at the start"),
        ("sum", memory.needed, "vLLM gets the size of its cache, and this as a share"),
        (
            "stays free",
            memory.floor,
            "of the memory that processors and GPU share" * machine.shared,
        ),
        ("free now", machine.free, f"of {machine.total:.1f}"),
    ]
    console.table("Memory", ("", ">GiB", "why"), [(n, f"{s:.1f}", why) for n, s, why in sizes if s])
    console.table("Arguments of vLLM", ("from", "argument"), [*plan.decisions()])


def _explain_start(warm: Path | None) -> None:
    """
    Start a child that passes on the server's output, and shows the parts of the start when the
    server answers. It ends with the server, which this process becomes.

    Args:
        warm: The folder of a warm pack that it starts from, if it does.
    """
    from sparkwright.bench.server import warm_pack

    reader, writer = os.pipe()
    if os.fork():
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        os.close(reader)
        return
    # Ctrl-C is for the server, whose last lines are still to come.
    os.setsid()
    os.close(writer)
    start, rest = server_log.StartLog(time.monotonic()), b""
    while data := os.read(reader, 1 << 16):
        os.write(1, data)
        if start.ready:
            continue
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            start.add(line.decode("utf-8", "replace"))
        rest = rest[-server_log.LONGEST :]
        if start.ready:
            _show_parts(start.parts())
        if start.ready and warm:
            compiled, tuned = warm_pack.additions(warm)
            count = f"with the warm pack: {len(compiled)} compiled, {len(tuned)} tuned"
            files = [*compiled, *tuned][: launch.SHOWN]
            console.result("\n  ".join((count, *files)))
    os._exit(0)


def _show_parts(parts: Sequence[server_log.StartPart]) -> None:
    rows = list[tuple[str, str, str]]()
    for part in parts:
        seconds = "" if part.seconds is None else f"{part.seconds:.1f}"
        counts = (f"{count} {event}" for event, count in part.counts.items())
        rows.append((part.name, seconds, ", ".join(counts)))
    console.table("The start", ("part of the start", ">seconds", "by the log"), rows, result=True)


def _become(command: list[str], variables: Mapping[str, str]) -> NoReturn:
    """Replace this program by *command*, so that signals and the exit status are the server's."""
    os.execve(command[0], command, variables)  # noqa: S606  no shell is wanted
