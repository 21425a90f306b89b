"""
``sparkwright gate``: verdicts about a wheel and the server that runs it, bound to the wheel's
bytes.
"""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sparkwright.audit import wheel
from sparkwright.bench.server import wheel_identity
from sparkwright.builder import host_info
from sparkwright.cli import options
from sparkwright.core.console import console
from sparkwright.core.files import list_folder, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import ladder
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.server_under_test import GateOptions
from sparkwright.gates.core.verdict import Ladder
from sparkwright.release import policy, request

_OPTIONS: options.Options = {
    **options.MEASURING,
    "wheel": {
        "nargs": "?",
        "type": Path,
        "metavar": "WHEEL",
        "help": "the wheel (default: the newest in --output; none with --server)",
    },
    "--only": {
        **options.REPEATED,
        "choices": tuple(ladder.GATES),
        "help": "only this gate; may be repeated (default: all)",
    },
    "--dry-run": {
        **options.FLAG,
        "help": "only check that the recipes of --recipe 'NAME …' can reach --channel; start "
        "nothing (default: the first of each group of the release policy that can be gated)",
    },
    "--gpu": {
        "metavar": "CAPABILITY",
        "help": "with --dry-run: of the machine that will gate, or `none` (default: this machine)",
    },
    "--channel": {
        "choices": ("candidate", "verified"),
        "default": "candidate",
        "help": "with --dry-run: the channel that is to be reached (default: %(default)s)",
    },
    "--server-user": {
        "metavar": "USER",
        "help": "user that servers run as, by root or by sudo without a password; it can write no "
        "verdict",
    },
    "--keep-going": {**options.FLAG, "help": "continue after a failure"},
    "--model-folder": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder of the model that --server serves",
    },
    "--profile": {
        "default": "default",
        "metavar": "NAME",
        "help": "kind of model for G4 (ci/gates/generation.yaml)",
    },
    "--against": {
        "type": Path,
        "metavar": "DIR",
        "help": "reference of G3, G5 and G6: a folder written by --record",
    },
    "--task": {"default": "gsm8k", "metavar": "NAME", "help": "task of G6 (default: gsm8k)"},
    "--baseline": {"type": Path, "metavar": "WHEEL", "help": "the wheel that G8 compares with"},
    "--baseline-python": {
        "type": Path,
        "metavar": "FILE",
        "help": "Python of the environment that the baseline is installed in",
    },
    "--record": {
        "type": Path,
        "metavar": "DIR",
        "help": "only write this server's answers, as a reference for --against",
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``gate``."""
    options.define(parsers, {"gate": gate}, {"gate": _OPTIONS})


def gate(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run the gates, show and store their verdicts; raise unless all pass."""
    options.refuse(
        (
            arguments.server_user == pwd.getpwuid(os.geteuid()).pw_name,
            "--server-user is the gate's own user.",
        ),
        (arguments.server_user and not arguments.serve, "--server-user belongs to --serve."),
        (arguments.serve and not arguments.python, "--serve DIR needs --python FILE."),
        (arguments.sha256 and not arguments.texts, "--sha256 is that of the file of --texts."),
        (arguments.serve and arguments.server, "Give either --serve or --server."),
        (
            arguments.record and not (arguments.wheel and arguments.serve),
            "--record DIR needs the WHEEL, and --serve DIR with --python FILE.",
        ),
        *(
            (path and not path.exists(), f"There is no {path}.")
            for path in (arguments.wheel, arguments.serve, arguments.model_folder)
        ),
    )
    context = options.checkout(arguments)
    if arguments.dry_run:
        return _check_request(context, arguments)
    gate_options = replace(
        msgspec.convert(vars(arguments), GateOptions),
        texts=options.prompts(context, arguments),
    )
    if not arguments.wheel and not arguments.server:
        gate_options = replace(gate_options, wheel=_newest_wheel(context))
    if arguments.record:
        with GateBuilder(context, gate_options, ladder.host_facts()) as builder:
            return {"recorded": [str(path) for path in builder.record(arguments.record)]}
    result = climb(context, gate_options, keep_going=arguments.keep_going)
    ladder.show(result)
    console.document({"ladder": ladder.document(result)})
    ladder.raise_for_state(result)
    return None


def _check_request(context: RunContext, arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Return the request of *arguments*, and whether its verdicts are there and nothing has changed.

    Raises:
        UsageError, request-unfit: As `request.require`.
    """
    models, path = arguments.model_folder, arguments.wheel
    gpus = [arguments.gpu] if arguments.gpu else [gpu.capability for gpu in host_info.gpus()]
    names = arguments.recipe.split()
    asked = request.require(context, names, arguments.channel, gpus=gpus, models=models)
    versions = ", ".join(asked.versions)
    console.result(f"{asked.stack} ({versions}) is served by {' '.join(asked.recipes)}")
    settled = False
    if models and path:
        stored = ladder.read_documents(context.output, sha256_file(path))
        verdicts = [verdict for each in stored for verdict in each.verdicts]
        rules = policy.load(context.project.root, context.project.spec.arch)
        settled = request.settled(verdicts, asked, rules, ladder.host_facts(), models)
    return {**msgspec.structs.asdict(asked), "settled": settled}


def climb(context: RunContext, gate_options: GateOptions, *, keep_going: bool = False) -> Ladder:
    """
    Run the gates of *gate_options* on this machine, and store the verdicts after each.

    Raises:
        file-invalid: The wheel's file of verdicts has other contents, or is of another stack.
    """
    path, python, facts = gate_options.wheel, gate_options.python, ladder.host_facts()
    subject, file = None, None
    if path:
        subject = wheel.read_subject(path)
        stack, beside = context.project.stack, path.parent
        file = ladder.VerdictFile(context.store, context.output, subject, stack, beside)
        console.note(f"attempt {file.attempt} of this wheel; verdicts: {file.path}")
    with GateBuilder(context, gate_options, facts) as builder:
        # The verdicts are about the wheel together with the packages that it is served with.
        site = wheel_identity.site_packages(python) if python else None
        return ladder.climb(
            [
                builder.gate(name)
                for name in ladder.GATES
                if name in (gate_options.only or ladder.GATES)
            ],
            stack=context.project.stack,
            wheel=subject,
            device_code=lambda: builder.device_code,
            host={**facts, **(wheel_identity.environment_contents(site) if site else {})},
            keep_going=keep_going,
            file=file,
        )


def _newest_wheel(context: RunContext) -> Path | None:
    """Return the newest wheel of a grafted fork in the output folder."""
    grafts = [fork for fork in context.forks if context.project.fork(fork).build == "graft"]
    wheels = [path for fork in grafts for path in list_folder(context.output, f"*{fork}-*.whl")]
    return max(wheels, key=lambda path: path.stat().st_mtime, default=None)
