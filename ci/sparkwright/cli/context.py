"""The context of a command, from its options: a checkout and a store, or a store alone."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sparkwright.cli.argtypes import DEFAULT_STACK
from sparkwright.core import project_data
from sparkwright.core.config import mirror_map
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext, StandaloneContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.stack import Project, stack_names


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
    if root := project_data.checkout():
        return root
    raise SourceError(
        "not-provided",
        f"There is no forks/*/stack.yaml in {Path.cwd()} or above.",
        todo="Change to a checkout of sparkwright, or name it with --root.",
    )


def default_stack(root: Path) -> str:
    """Return `DEFAULT_STACK`, or the last stack of a checkout that lacks it."""
    names = stack_names(root)
    return DEFAULT_STACK if DEFAULT_STACK in names or not names else names[-1]


def standalone(arguments: argparse.Namespace) -> StandaloneContext:
    """Return the context of a command that needs no checkout."""
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
