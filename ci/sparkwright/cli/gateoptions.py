"""
The options of ``gate``, ``bench`` and ``verify``; apart from them, so that the parser of all verbs
loads nothing heavy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

#: As in `sparkwright.gates.ladder.RUNGS`; a test holds the two together.
RUNGS = tuple(f"G{number}" for number in range(9))


def options(verb: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    verb.add_argument(
        "wheel", nargs="?", type=Path, metavar="WHEEL", help="the wheel (default: the last build's)"
    )
    verb.add_argument(
        "--rung",
        action="append",
        default=[],
        choices=RUNGS,
        help="only this rung; may be repeated (default: all)",
    )
    verb.add_argument("--keep-going", action="store_true", help="go on after a failure")
    verb.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="interpreter of the environment that the wheel is installed in",
    )
    verb.add_argument(
        "--serve", type=Path, metavar="DIR", help="serve the model in this folder from there"
    )
    verb.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="TEXT",
        help="its argument (--flag=--enforce-eager); may be repeated",
    )
    verb.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="its environment variable; may be repeated",
    )
    verb.add_argument(
        "--server",
        default="",
        metavar="URL",
        help="a server that runs already, in place of --serve",
    )
    verb.add_argument("--server-log", type=Path, metavar="FILE", help="what that server printed")
    verb.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="the name under which the model is served (default: its own)",
    )
    verb.add_argument(
        "--model-folder", type=Path, metavar="DIR", help="files of the model that --server serves"
    )
    verb.add_argument(
        "--recipe",
        default="",
        metavar="NAME",
        help="of ci/recipes, or what G3 expects of the log (contract.yaml)",
    )
    verb.add_argument(
        "--profile",
        default="default",
        metavar="NAME",
        help="kind of model for G4 (ci/gates/words.yaml)",
    )
    verb.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a profile of the server (of torch's profiler, or nsys)",
    )
    verb.add_argument(
        "--against",
        default="",
        metavar="URL|DIR",
        help="reference of G5 and G6: its server, or a folder of --record",
    )
    verb.add_argument("--task", default="gsm8k", metavar="NAME", help="task of G6 (default: gsm8k)")
    verb.add_argument(
        "--minutes",
        type=float,
        default=0,
        metavar="N",
        help="length of G7 (default: see ci/gates/soak.yaml)",
    )
    verb.add_argument(
        "--baseline", type=Path, metavar="WHEEL", help="the wheel that G8 compares with"
    )
    verb.add_argument(
        "--baseline-python",
        type=Path,
        metavar="FILE",
        help="interpreter of the environment that it is installed in",
    )
    measuring(verb)
    verb.add_argument(
        "--reserve",
        type=int,
        default=0,
        metavar="MB",
        help="end our server where less memory than this is left",
    )
    verb.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="judge nothing; write what this server says as a reference for --against",
    )


def bench(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``bench``."""
    verb.add_argument(
        "--recipe",
        default="",
        metavar="NAME",
        help="how the model is served, and what with (ci/recipes)",
    )
    serving(verb)
    verb.add_argument(
        "--server",
        default="",
        metavar="URL",
        help="a server that runs already, in place of --serve",
    )
    verb.add_argument(
        "--launches",
        type=int,
        default=0,
        metavar="N",
        help="of the server; each is one sample (default: 5)",
    )
    verb.add_argument(
        "--generator",
        choices=("vllm-rs", "llama-benchy", "own"),
        default="vllm-rs",
        help="what makes the load",
    )
    verb.add_argument(
        "--calibrate",
        type=int,
        default=0,
        metavar="N",
        help="measure it N times against itself, for the gate here",
    )
    measuring(verb)


def verify(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    verb.add_argument(
        "recipe", metavar="RECIPE", help="whose published figures are measured again (ci/recipes)"
    )
    serving(verb)
    verb.add_argument(
        "--launches",
        type=int,
        default=0,
        metavar="N",
        help="of the server; each is one sample (default: 5)",
    )
    measuring(verb)


def serving(verb: argparse.ArgumentParser) -> None:
    """Add the options of whatever starts one server."""
    verb.add_argument("--serve", type=Path, metavar="DIR", help="serve the model in this folder")
    verb.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="interpreter of the environment that vLLM is installed in",
    )
    verb.add_argument(
        "--wheel", type=Path, metavar="WHEEL", help="the wheel that it was installed from"
    )
    verb.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="TEXT",
        help="argument of the server (--flag=--x); may be repeated",
    )
    verb.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="its environment variable; may be repeated",
    )
    verb.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="the name under which the model is served (default: its own)",
    )
    verb.add_argument(
        "--output", type=Path, metavar="DIR", help="where the result is kept (default: dist)"
    )


def measuring(verb: argparse.ArgumentParser) -> None:
    """Add the options of everything that measures throughput."""
    verb.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME",
        help="of workloads.yaml, or a cell; may be repeated",
    )
    verb.add_argument(
        "--texts", type=Path, metavar="FILE", help="real prompts, for the workloads that want them"
    )
    verb.add_argument(
        "--at-once", action="store_true", help="both servers are up at the same time (small models)"
    )
    verb.add_argument(
        "--fresh",
        action="store_true",
        help="begin anew, even where an interrupted measurement could be continued",
    )
    verb.add_argument(
        "--preheat",
        type=float,
        metavar="SECONDS",
        help="of the machine, before (default: see ci/gates/machine.yaml)",
    )
