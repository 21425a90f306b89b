"""The options of ``serve`` and ``health``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from sparkwright.cli import clientoptions


def options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add to each of these verbs its own."""
    serve(made["serve"])
    health(made["health"])


def serve(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``serve``."""
    verb.add_argument(
        "recipe",
        nargs="?",
        default="",
        metavar="RECIPE",
        help="a recipe of ci/recipes; a model needs none",
    )
    verb.add_argument(
        "--model",
        default="",
        metavar="DIR|NAME",
        help="folder of the model, or its name in the cache of models (default: the recipe's)",
    )
    verb.add_argument(
        "--revision", default="", metavar="COMMIT", help="commit or branch of a model that is named"
    )
    clientoptions.environment(verb)
    verb.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="the Python of the environment, where it is no virtual one",
    )
    verb.add_argument(
        "--host",
        default=None,
        metavar="ADDRESS",
        help="the address to listen on (default: 127.0.0.1, this machine alone)",
    )
    verb.add_argument(
        "--port", type=_number(1, 65535), default=None, metavar="N", help="the port (default: 8000)"
    )
    verb.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="the name that clients ask for (default: the recipe's, or the folder's)",
    )
    verb.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="another argument of `vllm serve`; may be repeated",
    )
    verb.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable of the server; may be repeated",
    )
    verb.add_argument(
        "--environment",
        action="store_true",
        help="take what is not said here from the variables of the environment",
    )
    verb.add_argument(
        "--table",
        action="store_true",
        help="show these variables, in Markdown, and do nothing else",
    )
    verb.add_argument(
        "--floor",
        type=_gib,
        default=None,
        metavar="GIB",
        help="memory that stays free (default: the recipe's, or a tenth)",
    )
    verb.add_argument(
        "--download", action="store_true", help="let vLLM fetch a model that is not here"
    )
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, say what would run, and start nothing",
    )
    verb.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="where vLLM's own lines go (default: a file in the cache directory)",
    )
    verb.add_argument(
        "--patience",
        type=_number(1, 86400),
        default=None,
        metavar="SECONDS",
        help="until it must be ready (default: the recipe's, or 1800)",
    )
    role = verb.add_mutually_exclusive_group()
    role.add_argument(
        "--ray-head",
        action="store_true",
        help="serve with other machines: start Ray here and wait for them",
    )
    role.add_argument(
        "--ray-worker",
        nargs="?",
        const="",
        default=None,
        metavar="ADDRESS",
        help="be one of them: HOST:PORT of the head",
    )
    verb.add_argument(
        "--nodes",
        type=_number(1, 64),
        default=None,
        metavar="N",
        help="machines that serve together (default: the recipe's)",
    )
    verb.add_argument(
        "--node-address",
        default="",
        metavar="ADDRESS",
        help="this machine's address on the network that they share",
    )
    verb.add_argument(
        "--ray-port",
        type=_number(1, 65535),
        default=None,
        metavar="N",
        help="port of Ray on the head (default: 6379)",
    )


def health(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``health``."""
    verb.add_argument(
        "--server",
        default="",
        metavar="URL",
        help="the server (default: the one that `serve` runs here)",
    )
    verb.add_argument(
        "--patience",
        type=_number(1, 3600),
        default=10,
        metavar="SECONDS",
        help="how long an answer may take (default: 10)",
    )


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (
            not text.isascii()
            or not text.isdigit()
            or len(text) > 9
            or not least <= int(text) <= most
        ):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number from {least} to {most}")
        return int(text)

    return number


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number of GiB")
    return value
