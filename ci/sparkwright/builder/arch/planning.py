"""
The plan verb's work: configure for real, before and after the rules, and keep the judgement under
its key.

Configuring takes seconds, compiling the better part of an hour; a folded arch is found out here.
"""

from __future__ import annotations

import msgspec

from sparkwright.builder import source_tree
from sparkwright.builder.arch import plan
from sparkwright.builder.arch.plan import Plan
from sparkwright.builder.compile import ninja
from sparkwright.builder.configure import DEPS
from sparkwright.builder.environment import cross, host_compiler, toolchain
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.workspace import Workspace
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext

#: Raise it when the record of a plan changes.
FORM = 2


class Planned(msgspec.Struct, frozen=True):
    """The plan of a fork, and what the same tree would give without the rules."""

    key: str
    after: Plan
    before: Plan


def planned(
    session: RunContext, tools: Toolchain, source: SourceTree, *, configured: bool = False
) -> Planned:
    """
    Return the plan of *source*, made when the store has none; it is not checked yet (`plan.check`).

    Args:
        configured: The build folder must stand ready to compile, even if the plan is known.

    Raises:
        configure-failed, tool-missing: See there.
    """
    key = digest.key("plan", _inputs(session, tools, source))
    known = session.store.get("plan", key, Planned)
    if known and not configured:
        return known
    if known:
        _examine(session, tools, source)
        return known
    after, before = examine_both(session, tools, source)
    made = Planned(key, after, before)
    session.store.put("plan", key, made)
    return made


def examine_both(session: RunContext, tools: Toolchain, source: SourceTree) -> tuple[Plan, Plan]:
    """
    Configure *source* and return its plan, and that of the same tree without the rules; callers
    hold the workspace's lock.
    """
    after = _examine(session, tools, source)
    bare = msgspec.structs.replace(source, tree=source.patched, sites=())
    return after, _examine(session, tools, bare, "before") if source.sites else after


def _inputs(session: RunContext, tools: Toolchain, source: SourceTree) -> dict[str, object]:
    needs = {
        need: source_tree.make(session, need).tree
        for need in session.project.fork(source.fork).needs
    }
    settings, fork = toolchain.settings(session, source.fork), session.project.fork(source.fork)
    return {
        "form": FORM,
        "tree": source.tree,
        "patched": source.patched,
        "needs": needs,
        "tools": tools.key,
        "rules": source_tree.rules_of(session).of(source.fork),
        "settings": msgspec.structs.replace(settings.deciding(), requires={}),
        "vendored": (session.lock.forks[source.fork].vendored, fork.ignored),
        "arch": session.project.spec.arch,
        "target": cross.key(session, tools),
        "compiler": (cross.compiler(session), host_compiler.identity()),
    }


def _examine(session: RunContext, tools: Toolchain, source: SourceTree, variant: str = "") -> Plan:
    settings, rules = toolchain.settings(session, source.fork), source_tree.all_rules(session)
    workspace = Workspace(session, tools, settings, source.fork, variant)
    if not settings.needs_vendored:
        # A build without the vendored sources has none of their units, and no use for what is said
        # of them.
        rules = rules.without_units(f"<build>/{DEPS}/")
    with console.step(f"plan {source.fork} ({'without' if variant else 'with'} the rules)"):
        workspace.fill(source.tree)
        configured = workspace.configure(ninja.install_launcher(workspace.folder))
    return plan.examine(
        configured,
        arch=session.project.spec.arch,
        rules=rules,
        fork=source.fork,
        read=lambda path: (workspace.source / path).read_bytes(),
        sites=source.sites,
    )
