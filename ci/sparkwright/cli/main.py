"""
The command line: select a command, run it, and turn failures into exit codes.

0: done. 1: failed. 2: wrong usage. 3: a fault of ours, with a log. 4: inconclusive or not-run. 5:
the network or an upstream is out of reach. 130: interrupted. ``main`` wraps ``run``, so that tests
can call the inner one and see the exceptions.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from sparkwright import __version__
from sparkwright.cli import argtypes
from sparkwright.core.console import OutputClosed, console, open_streams
from sparkwright.core.errors import CommandError, SparkwrightError, UsageError
from sparkwright.core.store import translate_disk_full


class CommandInfo(NamedTuple):
    """The module of this package that implements a command, and its summary."""

    module: str
    summary: str


EVERYDAY = {
    "build": CommandInfo("build", "make the wheels of the stack, and audit them"),
    "install": CommandInfo("install", "install a release into a Python environment"),
    "list": CommandInfo("install", "list the releases of an index"),
    "rollback": CommandInfo("install", "bring back the release that was installed before"),
    "uninstall": CommandInfo("install", "remove exactly what `install` installed"),
    "serve": CommandInfo("serve", "serve a model by its recipe; --health checks a server"),
    "bench": CommandInfo("bench", "measure how fast a model is served"),
    "gate": CommandInfo("gate", "test a wheel and the server that runs it, gate by gate"),
    "doctor": CommandInfo("doctor", "show what this machine has, lacks, and can do"),
    "demo": CommandInfo("demo", "run every stage on three miniature upstreams"),
}
STAGES = {
    "lock": CommandInfo("lock", "resolve the stack to hashes, for review in git"),
    "fetch": CommandInfo("stages", "download and verify every locked source and tool"),
    "apply": CommandInfo("stages", "apply picks, patches and arch rules, exactly"),
    "plan": CommandInfo("stages", "show the architectures of every CUDA unit"),
    "audit": CommandInfo("stages", "show what a wheel contains, and judge it by the policy"),
    "publish": CommandInfo("release", "publish wheels that passed as a signed release"),
}
GROUPS = {
    "patch": {
        "status": CommandInfo(
            "patch", "show what each stack carries, why, and if it is still needed"
        ),
        "pick": CommandInfo(
            "patch", "pin an upstream pull request in the ledger, carried or watched"
        ),
        "rebase": CommandInfo("patch", "make a worktree with the series as commits"),
        "export": CommandInfo("patch", "write the commits of the worktree back to patch files"),
        "drift": CommandInfo(
            "patch", "try the series on later releases and upstream's newest commit"
        ),
        "bump": CommandInfo("patch", "move a fork to another upstream release"),
        "bisect": CommandInfo("patch", "find the change that broke a patch, or a command"),
    },
    "release": {
        "promote": CommandInfo("release", "move a candidate to verified, by new verdicts"),
        "yank": CommandInfo("release", "stop offering a release; its files stay"),
        "rollback": CommandInfo("release", "yank the newest release of a channel"),
        "prune": CommandInfo("release", "remove old candidates and the files that only they use"),
        "refresh": CommandInfo("release", "sign an index again before its signature expires"),
        "key": CommandInfo("evidence", "make a signing key, or show its fingerprint"),
        "notes": CommandInfo("evidence", "write the notes of a release"),
        "verify": CommandInfo("evidence", "check the evidence of a wheel file"),
    },
    "lab": {
        "runner": CommandInfo("runner", "set up a Spark that runs jobs of a repository"),
        "image": CommandInfo("lab", "make an image that serves a release, and push it"),
        "record": CommandInfo("lab", "record the outcome of a workflow run"),
        "status": CommandInfo("lab", "make static pages of releases, speeds, patches and runs"),
        "report": CommandInfo("bench", "show measurements as a page, as Markdown or here"),
    },
    "model": {
        "inspect": CommandInfo("model", "show what is quantised, and the speed that memory allows"),
    },
}
COMMANDS = {
    **EVERYDAY,
    **STAGES,
    **{
        f"{group} {name}": command
        for group, commands in GROUPS.items()
        for name, command in commands.items()
    },
}


def help_text() -> str:
    """Return the help of the program, on one screen."""
    lines = ["usage: sparkwright COMMAND [OPTION ...]", "", "every day:", *_lines(EVERYDAY)]
    lines += ["", "stages of a build and a release:", *_lines(STAGES), "", "groups:"]
    lines += [f"  {name:10} {' '.join(commands)}" for name, commands in GROUPS.items()]
    lines += ["", f"sparkwright {__version__}: patched, audited wheels for NVIDIA DGX Spark"]
    return "\n".join(lines)


def _lines(commands: Mapping[str, CommandInfo]) -> list[str]:
    return [f"  {name:10} {command.summary}" for name, command in commands.items()]


def parsers(module: str) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands that *module* holds, by the names of the commands."""
    parent = argtypes.common()
    command_parsers = {
        name: argparse.ArgumentParser(
            prog=f"sparkwright {name}",
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            parents=[parent],
        )
        for name, command in COMMANDS.items()
        if command.module == module
    }
    importlib.import_module(f"sparkwright.cli.{module}").add_arguments(command_parsers)
    return command_parsers


def parse(words: Sequence[str]) -> argparse.Namespace:
    """
    Return the arguments in *words*; ``run`` among them is the function of the command.

    Raises:
        UsageError: The words do not begin with a command.
        SystemExit: A help text or the version was printed, or an argument is wrong.
    """
    name, *rest = words or [""]
    helps = ("-h", "--help")
    if name in (*helps, "--version"):
        _print_and_exit(help_text() if name in helps else f"sparkwright {__version__}")
    if name in GROUPS:
        if rest and rest[0] in helps:
            usage = f"usage: sparkwright {name} COMMAND [OPTION ...]"
            _print_and_exit("\n".join([usage, "", *_lines(GROUPS[name])]))
        if rest:
            name = f"{name} {rest.pop(0)}"
    if name not in COMMANDS:
        raise _unknown(name)
    # A build in a container repeats the words inside it.
    namespace = argparse.Namespace(command=name, words=tuple(words))
    return parsers(COMMANDS[name].module)[name].parse_args(rest, namespace)


def _print_and_exit(text: str) -> NoReturn:
    console.json = False  # a help text is no document
    console.result(text)
    raise SystemExit(0)


def _unknown(name: str) -> UsageError:
    """Return the error of a command that does not exist, with the nearest names."""
    if name in GROUPS:
        near = [f"{name} {command}" for command in GROUPS[name]]
    else:
        word = name.rpartition(" ")[2]
        near = [command for command in COMMANDS if command.rpartition(" ")[2] == word]
        near = near or difflib.get_close_matches(name, COMMANDS)
    return UsageError(
        "usage",
        f"There is no command {name!r}." if name else "No command is given.",
        details=[f"nearest: {', '.join(near)}"] if near else [],
    )


def run(words: Sequence[str]) -> int:
    """
    Run the command line *words*; expected failures are raised as exceptions.

    Raises:
        part-missing: A package that the command needs is not installed.
    """
    try:
        arguments = parse(words)
        console.json, console.verbose = arguments.json, arguments.verbose
        return int(arguments.run(arguments))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "sparkwright"):
            raise
        raise _part_missing(" ".join(words[: 1 + (words[0] in GROUPS)]), str(error.name)) from error


def _part_missing(command: str, name: str) -> CommandError:
    from sparkwright.core import project_data

    root = project_data.PACKAGE.parents[1]
    if (root / "pyproject.toml").exists():
        install = f"{sys.executable} -m pip install --editable '{root}[full]'"
    else:
        install = f"{sys.executable} -m pip install 'sparkwright[full]=={__version__}'"
    return CommandError(
        "part-missing",
        f"`sparkwright {command}` needs the Python package {name}, which is not installed.",
        todo=f"Install the part `full`: {install}",
        data={"package": name, "install": install},
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, print the document of ``--json``, and return the exit code."""
    words = sys.argv[1:] if words is None else words
    open_streams()
    # The parser may exit before it has read --json, and its error must be a document, too.
    console.json = "--json" in words
    try:
        try:
            return _run_and_report(words)
        except SparkwrightError as error:  # the output itself
            console.json = False
            console.failure(error)
            return error.exit_code
    except (OutputClosed, SparkwrightError):  # no stream is left for a message
        return 1


def _run_and_report(words: Sequence[str]) -> int:
    """
    Run the command line, report how it ended, and return the exit code.

    Raises:
        OutputClosed: See `console.finish`. SparkwrightError: The output cannot be written.
    """
    try:
        with translate_disk_full(Path(tempfile.gettempdir())):
            code = run(words)
        console.finish()
    except SparkwrightError as error:
        console.failure(error)
        console.finish(error.document())
        return error.exit_code
    except SystemExit as end:
        todo = UsageError.references["usage"].todo
        usage: dict[str, object] = {
            "reference": "usage",
            "what": "The command line cannot be read.",
            "todo": todo,
        }
        console.json = console.json and bool(end.code)  # a help text is no document
        console.finish(usage)
        return int(end.code or 0)
    except KeyboardInterrupt:
        console.note("interrupted; what is finished is kept, and the next run continues from here")
        console.finish({"reference": "interrupted"})
        return 130
    except Exception:  # a bug; the log must allow to find it
        return _fault(words)
    return code


def _fault(words: Sequence[str]) -> int:
    versions = (
        f"sparkwright {__version__}\nPython {platform.python_version()}\n{platform.platform()}\n"
    )
    text, log = f"{versions}command: {' '.join(words[:2])}\n\n{traceback.format_exc()}", ""
    with contextlib.suppress(OSError):
        # Not in the cache directory, which may be the cause.
        handle, log = tempfile.mkstemp(
            prefix=f"sparkwright-fault-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".log"
        )
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    attachment = log or f"this:\n{text}"
    console.note(
        f"error: fault: this is a fault of sparkwright, not yours. Nothing finished is lost.\n  "
        f"please report it with {attachment}"
    )
    console.finish({"reference": "fault", "log": log})
    return 3
