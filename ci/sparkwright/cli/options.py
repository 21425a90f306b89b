"""The options that several commands share, and the context that they make."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sparkwright.core.errors import UsageError

if TYPE_CHECKING:
    from sparkwright.forks.context import RunContext, StandaloneContext

#: The stack of a command that names none.
DEFAULT_STACK = "2026.11"
#: The two channels of a release index.
CHANNELS = ("verified", "candidate")


def whole(least: int, most: int = 1 << 40) -> Callable[[str], int]:
    """Return the type of whole numbers from *least* to *most*."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,13}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} is not a whole number from {least} to {most}"
            )
        return int(text)

    return convert


def amount(least: float, most: float, unit: str) -> Callable[[str], float]:
    """Return the type of numbers of *unit* from *least* to *most*."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} is not a number of {unit} from {least:g} to {most:g}"
            )
        return value

    return convert


def assignment(text: str) -> tuple[str, str]:
    """Return name and value of ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def common() -> argparse.ArgumentParser:
    """Return the parent parser with the options of every command."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--stack", help=f"which stack (default: {DEFAULT_STACK})")
    add("--arch", default="", help="CUDA architecture to build for (default: the stack's)")
    add(
        "--fork",
        action="append",
        default=[],
        metavar="FORK",
        help="only this fork; may be repeated",
    )
    add(
        "--source",
        choices=("auto", "git", "sdist", "wheel"),
        default="auto",
        help="which kind of source (default: auto)",
    )
    add(
        "--mirror",
        action="append",
        default=[],
        metavar="URL=REPLACEMENT",
        help="replace this beginning of URLs; may be repeated",
    )
    add("--offline", action="store_true", help="use only the store, never the network")
    add(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="directory of the store (default: SPARKWRIGHT_CACHE_DIR, else the user's cache)",
    )
    add(
        "--root",
        type=Path,
        metavar="DIR",
        help="the checkout (default: the nearest one above the current directory)",
    )
    add("--json", action="store_true", help="print one JSON document on standard output")
    add("-v", "--verbose", action="store_true", help="print more detail")
    return parser


def add_environment(parser: argparse.ArgumentParser) -> None:
    """Add ``--into``, which names a Python environment."""
    parser.add_argument(
        "--into",
        type=Path,
        metavar="VENV",
        help="the Python environment (default: the active one, or the one this program runs in)",
    )


def add_index(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a release index and its publisher."""
    parser.add_argument(
        "--index",
        default="",
        metavar="URL|FOLDER",
        help="the index (default: SPARKWRIGHT_RELEASES, `releases` in the user's configuration, "
        "or the one this program came from)",
    )
    parser.add_argument(
        "--key",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="public key of its publisher; may be repeated",
    )
    parser.add_argument(
        "--signed-for",
        default="",
        metavar="URL",
        help="address that the manifest is signed for, if --index is a copy",
    )


def add_channel(parser: argparse.ArgumentParser) -> None:
    """Add ``--channel``; the default is ``verified``."""
    parser.add_argument(
        "--channel",
        choices=CHANNELS,
        default="verified",
        help="channel of the releases (default: verified, whose gates all passed)",
    )


def add_pages(parser: argparse.ArgumentParser) -> None:
    """Add ``--html`` and ``--markdown``, the output files of a report."""
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a self-contained HTML page"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write Markdown")


def page_files(arguments: argparse.Namespace) -> dict[str, Path]:
    """
    Return the files of `add_pages` that the command line names, by their kind.

    Raises:
        UsageError: Both are the same file.
    """
    pages = {"html": arguments.html, "markdown": arguments.markdown}
    files = {kind: path for kind, path in pages.items() if path}
    if len({path.resolve() for path in files.values()}) < len(files):
        raise UsageError("usage", "--html and --markdown name the same file.")
    return files


def add_compiling(parser: argparse.ArgumentParser) -> None:
    """Add the limits of commands that compile, and the folder of their wheels."""
    parser.add_argument(
        "--jobs",
        type=whole(1, 4096),
        default=0,
        help="units compiled at once (default: one per core)",
    )
    parser.add_argument(
        "--memory",
        type=amount(0.5, 1e6, "gigabytes"),
        default=0,
        metavar="GB",
        help="memory of all compilers together (default: 85 %% of the available memory)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for the wheels (default: dist)"
    )


def add_signer(parser: argparse.ArgumentParser, key: str) -> None:
    """Add the signer of an index: *key*, an option for a private key, or ``--identity``."""
    signer = parser.add_mutually_exclusive_group()
    signer.add_argument(
        key,
        type=Path,
        metavar="FILE",
        help="the private key that signs (made by `sparkwright release key`)",
    )
    signer.add_argument(
        "--identity",
        action="store_true",
        help="sign with Sigstore, as the identity of the workflow that runs this",
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--flag`` and ``--variable``, the arguments and the environment of a server."""
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="TEXT",
        help="argument of `vllm serve` (--flag=--x); may be repeated",
    )
    parser.add_argument(
        "--variable",
        action="append",
        type=assignment,
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the server; may be repeated",
    )


def default_cache() -> Path:
    """Return the cache directory: ``SPARKWRIGHT_CACHE_DIR``, else the platform's."""
    if folder := os.environ.get("SPARKWRIGHT_CACHE_DIR"):
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_cache_dir("sparkwright", appauthor=False))


def find_root() -> Path:
    """
    Return the nearest parent folder that has stacks, else the checkout of this program.

    Raises:
        not-provided: There is no such folder.
    """
    from sparkwright.core import config
    from sparkwright.forks.stack import SourceError

    if root := config.checkout():
        return root
    raise SourceError(
        "not-provided",
        f"There is no forks/*/stack.yaml in {Path.cwd()} or above.",
        todo="Change to a checkout of sparkwright, or name it with --root.",
    )


def default_stack(root: Path) -> str:
    """Return `DEFAULT_STACK`, or the last stack of a checkout that lacks it."""
    from sparkwright.forks.stack import stack_names

    names = stack_names(root)
    return DEFAULT_STACK if DEFAULT_STACK in names or not names else names[-1]


def standalone(arguments: argparse.Namespace) -> StandaloneContext:
    """Return the context of a command that needs no checkout."""
    from sparkwright.core.config import mirror_map
    from sparkwright.core.store import Store
    from sparkwright.forks.context import StandaloneContext

    return StandaloneContext(
        Store(arguments.cache_dir or default_cache()),
        arguments.offline,
        mirror_map(arguments.mirror),
    )


def checkout(arguments: argparse.Namespace) -> RunContext:
    """
    Return the context of a command that works on a checkout.

    Raises:
        not-provided: No such checkout, stack or fork.
        UsageError: A mirror is not of the form URL=REPLACEMENT.
    """
    from sparkwright.core.config import mirror_map
    from sparkwright.core.store import Store
    from sparkwright.forks.context import RunContext
    from sparkwright.forks.stack import Project

    root = (arguments.root or find_root()).absolute()
    project = Project(root, arguments.stack or default_stack(root), arguments.arch)
    for name in arguments.fork:
        project.fork(name)
    targets = ",".join(getattr(arguments, "targets", ()))
    return RunContext(
        project=project,
        store=Store(arguments.cache_dir or default_cache()),
        forks=tuple(
            name for name in project.spec.forks if not arguments.fork or name in arguments.fork
        ),
        output=(getattr(arguments, "output", None) or root / "dist").absolute(),
        source=arguments.source,
        offline=arguments.offline,
        mirrors=mirror_map(arguments.mirror),
        jobs=getattr(arguments, "jobs", 0),
        memory=int(getattr(arguments, "memory", 0) * 1e9),
        targets=tuple(name for name in targets.split(",") if name),
        target=getattr(arguments, "target", ""),
    )
