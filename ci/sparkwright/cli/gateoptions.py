"""The options of ``sparkwright gate``; apart from it, so that the parser of all verbs loads nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

#: As in `sparkwright.gates.ladder.RUNGS`; a test holds the two together.
RUNGS = tuple(f"G{number}" for number in range(8))


def options(verb: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    verb.add_argument("wheel", nargs="?", type=Path, metavar="WHEEL", help="the wheel (default: the last build's)")
    verb.add_argument("--rung", action="append", default=[], choices=RUNGS, help="only this rung; may be repeated (default: all)")
    verb.add_argument("--keep-going", action="store_true", help="go on after a failure")
    verb.add_argument("--python", type=Path, metavar="FILE", help="interpreter of the environment that the wheel is installed in")
    verb.add_argument("--serve", type=Path, metavar="DIR", help="serve the model in this folder from there")
    verb.add_argument("--flag", action="append", default=[], metavar="TEXT", help="its argument (--flag=--enforce-eager); may be repeated")
    verb.add_argument("--variable", action="append", default=[], metavar="NAME=VALUE", help="its environment variable; may be repeated")
    verb.add_argument("--server", default="", metavar="URL", help="a server that runs already, in place of --serve")
    verb.add_argument("--server-log", type=Path, metavar="FILE", help="what that server printed")
    verb.add_argument("--model", default="", metavar="NAME", help="the name under which the model is served (default: the only one)")
    verb.add_argument("--model-folder", type=Path, metavar="DIR", help="files of the model that --server serves")
    verb.add_argument("--recipe", default="", metavar="NAME", help="what G3 expects of the server's log (ci/gates/contract.yaml)")
    verb.add_argument("--profile", default="default", metavar="NAME", help="kind of model for G4 (ci/gates/words.yaml)")
    verb.add_argument("--trace", type=Path, metavar="FILE", help="a profile of the server (of torch's profiler, or nsys)")
    verb.add_argument("--against", default="", metavar="URL|DIR", help="reference of G5 and G6: its server, or a folder of --record")
    verb.add_argument("--task", default="gsm8k", metavar="NAME", help="task of G6 (default: gsm8k)")
    verb.add_argument("--minutes", type=float, default=0, metavar="N", help="length of G7 (default: see ci/gates/soak.yaml)")
    verb.add_argument("--reserve", type=int, default=0, metavar="MB", help="end our server where less memory than this is left")
    verb.add_argument("--record", type=Path, metavar="DIR", help="judge nothing; write what this server says as a reference for --against")
