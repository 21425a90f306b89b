"""The arguments of ``sparkwright gate``; `sparkwright.cli.climb` does the work."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkwright.cli import options
from sparkwright.gates.core import ladder

_OPTIONS: options.Options = {
    **options.MEASURING,
    "--preheat": {
        "type": float,
        "metavar": "SECONDS",
        "help": "load before the measurement (default: see ci/gates/machine.yaml)",
    },
    "wheel": {
        "nargs": "?",
        "type": Path,
        "metavar": "WHEEL",
        "help": "the wheel (default: the newest in --output)",
    },
    "--only": {
        **options.REPEATED,
        "choices": tuple(ladder.GATES),
        "help": "only this gate; may be repeated (default: all)",
    },
    "--dry-run": {
        **options.FLAG,
        "help": "start nothing: check that the recipes of --recipe 'NAME …' can reach --channel "
        "(default: the first of each group of the release policy that can be gated), and print "
        "what the night does in minutes if one recipe is named, and a wheel is there",
    },
    "--gpu": {
        "default": "",
        "metavar": "CAPABILITY",
        "help": "with --dry-run: of the machine that will gate, or `none` (default: this machine)",
    },
    "--channel": {
        "choices": ("candidate", "verified"),
        "default": "candidate",
        "help": "with --dry-run: the channel that is to be reached (default: %(default)s)",
    },
    "--server-user": {
        "default": "",
        "metavar": "USER",
        "help": "user that servers run as, by root or by sudo without a password; it can write no "
        "verdict",
    },
    "--keep-going": {**options.FLAG, "help": "continue after a failure"},
    "--hours": {
        "type": options.number(float, 0.01, 1000, "hours"),
        "metavar": "H",
        "help": "hours that a night with --recipe may take; what is not reached is not-run",
    },
    "--model-folder": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder of the recipe's model, or with a folder of the recipe's name (default: "
        "this machine's model cache)",
    },
    "--profile": {
        "default": "default",
        "metavar": "NAME",
        "help": "kind of model for G4 (ci/gates/generation.yaml)",
    },
    "--against": {
        "type": Path,
        "metavar": "DIR",
        "help": "a folder written by --record, instead of a reference that the night records; or "
        "the model of which the night's is a slimmer copy",
    },
    "--task": {
        "default": "",
        "metavar": "NAME",
        "help": "task of G6 (default: gsm8k, unless the recipe has floors for others alone)",
    },
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
    """Climb the ladder."""
    # A hundred modules do that, of which a help text or a wrong option needs none.
    from sparkwright.cli import climb

    return climb.gate(arguments)
