"""The source trees that G1 looks at, in folders, and the headers that go with them: those of the builds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.workspace import source_tree
from sparkwright.forks.context import RunContext


def made(context: RunContext, forks: Iterable[str]) -> dict[str, Path]:
    """
    Return, for each of *forks*, a folder that holds the tree that is built: patched and rewritten.

    Raises:
        SparkwrightError: What `sourcetree.make` raises.
    """
    return {fork: _made(context, fork) for fork in forks}


def _made(context: RunContext, fork: str) -> Path:
    tree = source_tree(context, fork).tree
    # A folder of its own: the one that is built belongs to the build, and may hold another tree when it has begun.
    folder = context.store.folder("work", context.project.stack, fork, "gate")
    with context.store.lock(f"gate-{context.project.stack}-{fork}"):
        context.objects.checkout(tree, folder / "src", folder / "index")
    return folder / "src"


def includes(tools: Toolchain) -> tuple[Path, ...]:
    """Return the folders of headers that the builds search beside their own: CUDA's, and torch's where the tools have it."""
    torch = sorted(tools.root.glob("lib/python3.*/site-packages/torch/include"))
    return (tools.cuda / "include", tools.cuda / "include" / "cccl", *torch)
