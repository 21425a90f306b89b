"""
``sparkwright gate``: verdicts about a wheel and the server that runs it, bound to the wheel's
bytes.
"""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkwright.audit import wheel
from sparkwright.bench.load.prompts import prompt_file
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import wheel_identity
from sparkwright.cli import options
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import ladder, verdict_file
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.ladder import GATES, machine_facts
from sparkwright.gates.core.server_under_test import GateOptions
from sparkwright.gates.core.verdict import Ladder
from sparkwright.gates.core.verdict_file import VerdictFile
from sparkwright.release import wheel_content


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``gate``."""
    parser = parsers["gate"]
    parser.set_defaults(run=gate)
    options.add_measuring_arguments(parser)
    add = parser.add_argument
    add(
        "wheel",
        nargs="?",
        type=Path,
        metavar="WHEEL",
        help="the wheel (default: the newest in --output; none with --server)",
    )
    add(
        "--only",
        action="append",
        default=[],
        choices=tuple(GATES),
        help="only this gate; may be repeated (default: all)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="only check that --recipe serves the vLLM of the stack; start nothing",
    )
    add(
        "--server-user",
        default="",
        metavar="USER",
        help="user that servers run as, by root or by sudo without a password; it can write no "
        "verdict",
    )
    add("--keep-going", action="store_true", help="continue after a failure")
    add("--model-folder", type=Path, metavar="DIR", help="folder of the model that --server serves")
    add(
        "--profile",
        default="default",
        metavar="NAME",
        help="kind of model for G4 (ci/gates/generation.yaml)",
    )
    add(
        "--against",
        type=Path,
        metavar="DIR",
        help="reference of G3, G5 and G6: a folder written by --record",
    )
    add("--task", default="gsm8k", metavar="NAME", help="task of G6 (default: gsm8k)")
    add("--baseline", type=Path, metavar="WHEEL", help="the wheel that G8 compares with")
    add(
        "--baseline-python",
        type=Path,
        metavar="FILE",
        help="Python of the environment that the baseline is installed in",
    )
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="only write this server's answers, as a reference for --against",
    )


def gate(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run the gates, show and store their verdicts; raise unless all pass."""
    own = pwd.getpwuid(os.geteuid()).pw_name
    options.refuse(
        (arguments.dry_run and not arguments.recipe, "--dry-run needs --recipe NAME."),
        (arguments.server_user == own, f"--server-user {own} is the gate's own user."),
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
    context, facts = options.checkout(arguments), machine_facts()
    if arguments.dry_run:
        return _check_recipe(context, arguments.recipe)
    named = {name: getattr(arguments, name) for name in GateOptions.__struct_fields__}
    named = {name: tuple(v) if isinstance(v, list) else v for name, v in named.items()}
    if not arguments.wheel and not arguments.server:
        named["wheel"] = _newest_wheel(context)
    named["texts"] = prompt_file(arguments.texts, context.store, arguments.sha256)
    gate_options = GateOptions(**named)
    names = [name for name in GATES if not gate_options.only or name in gate_options.only]
    with GateBuilder(context, gate_options, facts) as builder:
        if arguments.record:
            return {"recorded": [str(path) for path in builder.record(arguments.record)]}
        result = climb(context, gate_options, builder, names, facts, arguments.keep_going)
    ladder.show(result)
    console.document({"ladder": verdict_file.document(result)})
    ladder.raise_for_state(result)
    return None


def _check_recipe(context: RunContext, name: str) -> dict[str, Any]:
    """
    Return the releases of the stack's grafted forks, all of which the recipe *name* serves.

    Raises:
        UsageError: There is no such recipe. recipe-unfit: It does not know a release.
    """
    recipe = recipes.load(context.project.root, name)
    locked = {fork: context.lock.forks[fork].bases.values() for fork in context.forks}
    versions = sorted({base.version for bases in locked.values() for base in bases})
    for version in versions:
        # Of our wheel, which has what the official one may lack.
        recipe.variant(f"{version}+{context.project.spec.label}")
    console.result(f"{name} serves {context.project.stack} ({', '.join(versions)})")
    return {"recipe": name, "stack": context.project.stack, "versions": versions}


def climb(
    context: RunContext,
    gate_options: GateOptions,
    builder: GateBuilder,
    names: Sequence[str],
    facts: Mapping[str, str],
    keep_going: bool = False,
) -> Ladder:
    """
    Run the gates *names* on the machine of *facts*, and store the verdicts after each.

    Raises:
        file-invalid: The wheel's file of verdicts has other contents, or is of another stack.
    """
    path, python = gate_options.wheel, gate_options.python
    subject = wheel.read_subject(path) if path else None
    file = None
    if subject:
        file = VerdictFile(context.store, context.output, subject, context.project.stack)
        console.note(f"attempt {file.attempt} of this wheel; verdicts: {file.path}")
    return ladder.climb(
        [builder.gate(name) for name in names],
        stack=context.project.stack,
        wheel=subject,
        device_code=lambda: builder.device_code,
        # The verdicts are about the wheel together with the packages that it is served with.
        host={
            **facts,
            **(
                wheel_content.of_environment(wheel_identity.site_packages(python)) if python else {}
            ),
        },
        keep_going=keep_going,
        file=file,
    )


def _newest_wheel(context: RunContext) -> Path | None:
    """Return the newest wheel of a grafted fork in the output folder."""
    grafts = [fork for fork in context.forks if context.project.fork(fork).build == "graft"]
    wheels = [path for fork in grafts for path in context.output.glob(f"*{fork}-*.whl")]
    return max(wheels, key=lambda path: path.stat().st_mtime, default=None)
