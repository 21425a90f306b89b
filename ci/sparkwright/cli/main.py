"""
The command line: select a command and run it.

``main`` wraps ``run``, so that tests can call the inner one and see the exceptions.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import NamedTuple

from sparkwright import __version__
from sparkwright.cli import options
from sparkwright.client import COMMANDS as CLIENT_COMMANDS
from sparkwright.core.arguments import redact
from sparkwright.core.errors import CommandError, UsageError
from sparkwright.core.program import execute, run_parsed


class CommandInfo(NamedTuple):
    """
    The module of this package that implements a command, and its summary.

    Attributes:
        checkout: Whether it has the options of a checkout, beside those of its output.
    """

    module: str
    summary: str
    checkout: bool = True


COMMANDS = {
    "build": CommandInfo("stages", "make the wheels of the stack, and audit them"),
    **{
        name: CommandInfo("install", summary, checkout=False)
        for name, summary in CLIENT_COMMANDS.items()
        if name != "doctor"
    },
    "serve": CommandInfo("serve", "serve a model by its recipe; --health checks a server"),
    "bench": CommandInfo("bench", "measure how fast a model is served"),
    "gate": CommandInfo("gate", "test a wheel and the server that runs it, gate by gate"),
    "doctor": CommandInfo("doctor", "show what this machine has, lacks, and can do"),
    "demo": CommandInfo("demo", "run every stage on three miniature upstreams"),
    "lock": CommandInfo("stages", "resolve the stack to hashes, for review in git"),
    "fetch": CommandInfo("stages", "download and verify every locked source and tool"),
    "apply": CommandInfo("stages", "apply picks, patches and arch rules, exactly"),
    "plan": CommandInfo("stages", "show the architectures of every CUDA unit"),
    "audit": CommandInfo("stages", "show what a wheel contains, and judge it by the policy"),
    "publish": CommandInfo("release", "publish wheels that passed as a signed release"),
    "patch pick": CommandInfo(
        "patch", "pin an upstream pull request in the ledger, carried or watched"
    ),
    "patch rebase": CommandInfo("patch", "make a worktree with the series as commits"),
    "patch export": CommandInfo("patch", "write the commits of the worktree back to patch files"),
    "patch drift": CommandInfo(
        "patch", "try the series on later releases and upstream's newest commit"
    ),
    "patch bump": CommandInfo("patch", "move a fork to another upstream release"),
    "release promote": CommandInfo("release", "move a candidate to verified, by new verdicts"),
    "release yank": CommandInfo("release", "stop offering a release; its files stay"),
    "release prune": CommandInfo(
        "release", "remove old candidates and the files that only they use"
    ),
    "release refresh": CommandInfo("release", "sign an index again before it expires"),
    "release key": CommandInfo("release", "make, show or rotate the keys of an index"),
    "release verify": CommandInfo("release", "check every file of an index by its hash"),
    "model inspect": CommandInfo(
        "model", "predict the speed of a model by its headers, and what would change it"
    ),
    "model check": CommandInfo(
        "model", "show which kernels vLLM chooses for a model, and what it refuses"
    ),
    "model slim": CommandInfo("model", "write a copy of a model that reads fewer bytes a token"),
}
#: Commands that give arguments to vLLM; `serve` takes them also without ``--flag``.
VLLM_COMMANDS = ("serve", "bench", "gate")
GROUPS = ("patch", "release", "model")


def _overview() -> argparse.ArgumentParser:
    """Return a parser that has every command without its arguments, for help and mistakes."""
    parser = argparse.ArgumentParser(
        prog="sparkwright", description="Patched, audited wheels for NVIDIA DGX Spark."
    )
    parser.add_argument("--version", action="version", version=f"sparkwright {__version__}")
    # The commands at the top have no group.
    groups = {"": parser.add_subparsers(metavar="COMMAND", required=True)}
    for name, command in COMMANDS.items():
        group, _, verb = name.rpartition(" ")
        if group not in groups:
            verbs = [other.split()[1] for other in COMMANDS if other.startswith(f"{group} ")]
            own = groups[""].add_parser(group, help=" ".join(verbs))
            groups[group] = own.add_subparsers(metavar="COMMAND", required=True)
        groups[group].add_parser(verb, help=command.summary)
    return parser


def parsers(module: str) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands that *module* holds, by the names of the commands."""
    command_parsers = {
        name: argparse.ArgumentParser(
            prog=f"sparkwright {name}",
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            allow_abbrev=False,
        )
        for name, command in COMMANDS.items()
        if command.module == module
    }
    importlib.import_module(f"sparkwright.cli.{module}").add_arguments(command_parsers)
    for name, parser in command_parsers.items():
        options.add_common(parser, checkout=COMMANDS[name].checkout)
    return command_parsers


def parse(words: Sequence[str]) -> argparse.Namespace:
    """
    Return the arguments in *words*; ``run`` among them is the function of the command.

    Raises:
        SystemExit: A help text or the version was printed, or an argument is wrong.
        UsageError: An argument of vLLM is given without ``--flag`` to another command than `serve`.
    """
    count = 2 if words and words[0] in GROUPS else 1
    name = " ".join(words[:count])
    if name not in COMMANDS:
        overview = _overview()
        overview.parse_args(words)
        overview.error("the command comes first")
    parser, words = parsers(COMMANDS[name].module)[name], words[count:]
    namespace = argparse.Namespace(command=name, words=words)
    own, others = options.split(parser, words) if name in VLLM_COMMANDS else (words, ())
    if others and name != "serve":
        flags = " ".join(redact(list(map("--flag={}".format, others))))
        raise UsageError(
            "usage",
            f"{name} has no option {others[0].partition('=')[0]:.80}.",
            todo=f"An argument of vLLM is given as: {flags}",
        )
    arguments = parser.parse_args(own, namespace)
    if others:
        arguments.flag = [*arguments.flag, *others]
    return arguments


def run(words: Sequence[str]) -> int:
    """
    Run the command line *words*; expected failures are raised as exceptions.

    Raises:
        part-missing: A package that the command needs is not installed.
    """
    try:
        return run_parsed(parse(words))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "sparkwright"):
            raise
        from sparkwright.core import config

        install = config.install_full()
        raise CommandError(
            "part-missing",
            f"`sparkwright {words[0]}` needs the Python package {package}, which is not installed.",
            todo=f"Install the part `full`: {install}",
            data={"package": package, "install": install},
        ) from error


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, print the document of ``--json``, and return the exit code."""
    return execute(run, words)
