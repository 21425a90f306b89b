"""
From a locked source to the tree that is built: fetch, apply, rewrite; every step a tree id. And the
version label of its builds.

A label is ``STACK.pPATCHES.cuCUDA``, such as ``spark.2026.11.p1a2b3c4d.cu130``. Equal inputs have
equal labels on every machine, and a changed patch has another, so that no installer and no cache
that is named after a version takes one build for another. Digests have no order: to release twice
from one stack, raise the label in stack.yaml (``spark.2026.11.1``), because installers take the
highest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from sparkwright.builder.arch import rules as archs
from sparkwright.builder.arch.rules import ArchRules, Site
from sparkwright.builder.environment import pylock
from sparkwright.cherry_picks import series
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.core.console import console
from sparkwright.core.files import content_key, sha256_bytes
from sparkwright.core.git import Objects
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
    key = content_key("rewrite", inputs)
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


def label(context: RunContext, source: SourceTree) -> str:
    """
    Return the local version label of builds of *source*: stack, patch set and CUDA release.

    Raises:
        file-invalid: pylock.toml does not lock one CUDA release.
    """
    needs = (make(context, need) for need in context.project.fork(source.fork).needs)
    spec = context.project.spec
    parts = (spec.label, patch_set(context.objects, (source, *needs)), pylock.cuda(context.project))
    return ".".join(filter(None, parts))


def patch_set(objects: Objects, trees: Iterable[SourceTree]) -> str:
    """
    Return the name of the changes by patches and rules in *trees*: ``p`` and eight hex digits, or
    ``p0`` without changes.

    It follows from the effect, path by path with the blob before and after, not from the patch
    files: a git source and an sdist of the same release have the same name, and so has a series
    whose comments were reworded.
    """
    options = ["-r", "-z", "--no-renames", "--raw", "--no-abbrev"]
    changes = {}
    for tree in trees:
        if raw := objects.run(["diff-tree", *options, tree.source.tree, tree.tree])[1]:
            changes[tree.fork] = sha256_bytes(raw)
    # A letter first: PEP 440 would take a segment of digits alone for a number, and drop its zeros.
    return f"p{content_key('patch-set', changes)[:8]}" if changes else "p0"
