"""The options that several commands share, and the context that they make."""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkwright.core.arguments import is_flag
from sparkwright.core.errors import UsageError

if TYPE_CHECKING:
    from sparkwright.core.store import Store
    from sparkwright.forks.context import RunContext

#: The stack of a command that names none.
DEFAULT_STACK = "2026.11"
#: Name of an option → arguments of `argparse.ArgumentParser.add_argument`.
Options = Mapping[str, Mapping[str, Any]]
#: The arguments of an option that may be repeated, and of one without a value.
REPEATED: Mapping[str, Any] = {"action": "append", "default": []}
FLAG: Mapping[str, Any] = {"action": "store_true"}


def number(
    kind: Callable[[str], float], least: float, most: float = 1 << 40, unit: str = ""
) -> Callable[[str], float]:
    """Return the type of numbers of *kind*, int or float, from *least* to *most*."""
    noun = f"number of {unit}" if unit else "whole number"

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} is not a {noun} from {least:g} to {most:g}"
            )
        return value

    return convert


def assignment(text: str) -> tuple[str, str]:
    """Return name and value of ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"{name!r:.80} is not the name of NAME=VALUE")
    return name, value


def refuse(*cases: tuple[object, str]) -> None:
    """
    Raise if the command line combines options that do not go together.

    Args:
        cases: Whether the combination was given, and the message.

    Raises:
        UsageError: A combination was given.
    """
    for combined, what in cases:
        if combined:
            raise UsageError("usage", what)


#: Options of every command, for its output.
_OUTPUT: Options = {
    "--json": {"action": "store_true", "help": "print one JSON document on standard output"},
}
#: Options of the commands that work on a checkout.
_CHECKOUT: Options = {
    "--stack": {"default": None, "help": f"which stack (default: {DEFAULT_STACK})"},
    "--arch": {"default": "", "help": "CUDA architecture to build for (default: the stack's)"},
    "--fork": {**REPEATED, "metavar": "FORK", "help": "only this fork; may be repeated"},
    "--source": {
        "choices": ("auto", "git", "sdist", "wheel"),
        "default": "auto",
        "help": "which kind of source (default: auto)",
    },
    "--mirror": {
        **REPEATED,
        "metavar": "URL=REPLACEMENT",
        "help": "replace this beginning of URLs; may be repeated",
    },
    "--offline": {"action": "store_true", "help": "use only the store, never the network"},
    "--cache-dir": {
        "type": Path,
        "metavar": "DIR",
        "help": "directory of the store (default: SPARKWRIGHT_CACHE_DIR, else the user's cache)",
    },
    "--root": {
        "type": Path,
        "metavar": "DIR",
        "help": "the checkout (default: the nearest one above the current directory)",
    },
}
#: The option of the commands that compare the pins of a stack.
FORCE_PIN: Options = {
    "--force-pin": {"action": "store_true", "help": "go on where releases do not fit together"},
}
#: Options of the commands that start a server.
SERVER: Options = {
    "--flag": {
        **REPEATED,
        "metavar": "TEXT",
        "help": "argument of `vllm serve` (--flag=--x); may be repeated; `serve` takes --x, too",
    },
    "--variable": {
        **REPEATED,
        "type": assignment,
        "metavar": "NAME=VALUE",
        "help": "environment variable of the server; may be repeated",
    },
}
#: Options of ``bench`` and ``gate``: recipe, model, workloads and output folder.
MEASURING: Options = {
    "--recipe": {"default": "", "metavar": "NAME", "help": "recipe of the model (ci/recipes)"},
    "--serve": {
        "type": Path,
        "metavar": "DIR",
        "help": "serve the model in this folder from that environment",
    },
    "--python": {
        "type": Path,
        "metavar": "FILE",
        "help": "Python of the environment that the wheel is installed in",
    },
    "--model": {
        "default": "",
        "metavar": "NAME",
        "help": "name under which the model is served (default: its own)",
    },
    **SERVER,
    "--output": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder for the results (default: dist)",
    },
    "--workload": {
        **REPEATED,
        "metavar": "NAME",
        "help": "workload or cell of workloads.yaml; may be repeated",
    },
    "--texts": {
        "type": Path,
        "metavar": "FILE",
        "help": "real prompts, for the workloads that need them: JSON lines with a prompt each",
    },
}


def add(parser: argparse._ActionsContainer, table: Options) -> None:
    """Add the options of *table*."""
    for name, settings in table.items():
        parser.add_argument(name, **settings)


def define(
    parsers: Mapping[str, argparse.ArgumentParser],
    functions: Mapping[str, Callable[[argparse.Namespace], Any]],
    tables: Mapping[str, Options],
) -> None:
    """
    Define commands: what each runs, and its options.

    Args:
        parsers: Command → its parser, to which both are added.
        functions: Command → the function that runs it.
        tables: Command → its options; a command that is not in it has none of its own.
    """
    for name, function in functions.items():
        parsers[name].set_defaults(run=function)
        add(parsers[name], tables.get(name, {}))


def add_common(parser: argparse.ArgumentParser, *, checkout: bool) -> None:
    """Add the options of every command, those of a *checkout* below a heading of their own."""
    add(parser, _OUTPUT)
    if checkout:
        add(parser.add_argument_group("checkout, sources and store"), _CHECKOUT)


def split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the *words* for *parser*, and the flags that it does not have, with their values."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    own = True
    for word in words:
        if is_flag(word):
            own = word.partition("=")[0] in parser._option_string_actions
        parts[own].append(word)
    return parts[True], parts[False]


def default_cache() -> Path:
    """Return the cache directory: ``SPARKWRIGHT_CACHE_DIR``, else the platform's."""
    if folder := os.environ.get("SPARKWRIGHT_CACHE_DIR"):
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_cache_dir("sparkwright", appauthor=False))


def store(arguments: argparse.Namespace) -> "Store":
    """Return the store in the cache directory."""
    from sparkwright.core.store import Store

    return Store(arguments.cache_dir or default_cache())


def checkout(arguments: argparse.Namespace) -> "RunContext":
    """
    Return the context of a command that works on a checkout.

    Raises:
        not-provided: There is no such checkout, stack or fork.
        UsageError: A mirror is not of the form URL=REPLACEMENT.
    """
    from sparkwright.core import config
    from sparkwright.core.files import is_utf8
    from sparkwright.forks.context import RunContext
    from sparkwright.forks.stack import Project, SourceError, stack_names

    root = arguments.root or config.checkout()
    if root is None:
        raise SourceError(
            "not-provided",
            f"There is no forks/*/stack.yaml in {Path.cwd()} or above.",
            todo="Change to a checkout of sparkwright, or name it with --root.",
        )
    root, names = root.absolute(), stack_names(root)
    output = (getattr(arguments, "output", None) or root / "dist").absolute()
    if not is_utf8(output):
        raise UsageError(
            "usage", f"{output} is not UTF-8.", todo="Name another --output or --root."
        )
    # A checkout of other stacks: the last one is the default.
    default = DEFAULT_STACK if DEFAULT_STACK in names or not names else names[-1]
    project = Project(root, arguments.stack or default, arguments.arch)
    for name in arguments.fork:
        project.fork(name)
    targets = ",".join(getattr(arguments, "targets", ()))
    return RunContext(
        project=project,
        store=store(arguments),
        forks=tuple(
            name for name in project.spec.forks if not arguments.fork or name in arguments.fork
        ),
        output=output,
        source=arguments.source,
        offline=arguments.offline,
        mirrors=config.mirror_map(arguments.mirror),
        jobs=getattr(arguments, "jobs", 0),
        memory=int(getattr(arguments, "memory", 0) * 1e9),
        targets=tuple(filter(None, targets.split(","))),
        target=getattr(arguments, "target", ""),
    )
