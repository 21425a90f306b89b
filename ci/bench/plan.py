"""The plan of vLLM, before and after the rules, against one bare CMake configure. Needs installed tools and fetched sources."""

from __future__ import annotations

import shutil

import measure
from sparkwright.builder import plan, toolchain
from sparkwright.builder.workspace import Workspace, source_tree

options = measure.arguments(__doc__ or "")
context = measure.context(options)
tools = toolchain.obtain(context)
source = source_tree(context, "vllm")


def ours() -> None:
    """Configure twice and judge every unit, past the store's record."""
    plan.examine_both(context, tools, source)


def theirs() -> None:
    """Configure once, into an empty folder, as a user would."""
    bare = Workspace(context, tools, "vllm", "bench")
    bare.fill(source.tree)
    bare.configure()
    shutil.rmtree(bare.folder)


with context.store.lock(Workspace.name(context, "vllm")):
    measure.compare(
        "plan vLLM",
        {"plan, before and after": ours, "one configure, no judgement": theirs},
        options,
        budget=180.0,
    )
