"""From a locked source to the tree that is built: fetch, apply, rewrite; every step a tree id."""

from __future__ import annotations

from functools import partial

import msgspec

from sparkwright.builder.arch import rules as archs
from sparkwright.builder.arch.rules import ArchRules, Site
from sparkwright.cherry_picks import series
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource


class SourceTree(msgspec.Struct, frozen=True):
    """
    The source of a build.

    Attributes:
        patched: Tree id after the series.
        tree: Tree id after the arch rules, too.
        steps: The patches, each with the tree after it.
        sites: The places that the rules changed.
    """

    fork: str
    source: FetchedSource
    patched: str
    tree: str
    steps: tuple[AppliedPatch, ...]
    sites: tuple[Site, ...]


def rules_of(context: RunContext) -> ArchRules:
    """Return the stack's arch rules."""
    return archs.load(context.project.rules_file)


def make(context: RunContext, fork: str) -> SourceTree:
    """
    Return the source tree of *fork*, made if the store has none.

    Raises:
        patch-conflict, patch-no-effect, rule-mismatch, arch-trap, and what fetching raises.
    """
    source = fetch.fetch(context, fork)
    patched = series.apply_series(context, source)
    rules = rules_of(context).of(fork)
    inputs = {"tree": patched.tree, "rules": rules.rules, "guards": rules.guards}
    key = digest.key("rewrite", inputs)
    stored = context.store.get("rewrite", key, SourceTree)
    if (
        stored
        and (stored.source, stored.steps) == (source, patched.steps)
        and context.objects.has(f"{stored.tree}^{{tree}}")
    ):
        return stored
    with console.step(f"rewrite {fork}: {len(rules.rules)} rules"):
        files, sites = archs.rewrite(partial(context.objects.blob, patched.tree), rules.rules)
        tree = context.objects.with_files(patched.tree, files) if files else patched.tree
        for site in sites:
            console.note(f"{site.file}:{site.line}  {site.rule}: {site.before} → {site.after}")
        archs.check_guards(context.objects, source.tree, tree, rules.guards)
    result = SourceTree(fork, source, patched.tree, tree, patched.steps, sites)
    context.store.put("rewrite", key, result)
    return result
