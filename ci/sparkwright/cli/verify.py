"""
``sparkwright verify RECIPE``: measure what others published on this machine, and say whether it
holds here.
"""

from __future__ import annotations

import argparse

import msgspec

from sparkwright.cli import measuring
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates.errors import GateError
from sparkwright.gates.recipes import recipe as recipes
from sparkwright.gates.throughput import claims
from sparkwright.gates.throughput.answer import Answer
from sparkwright.release.report import terminal


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Measure the recipe, and hold its published figures against what was measured."""
    recipe = recipes.load(session.project.root, arguments.recipe)
    asked = measuring.question("verify", arguments, recipe, blocks=arguments.launches)
    answer = Answer(session, claims.only(asked, recipe))
    result = answer.result()
    terminal.show(result)
    found = claims.held(recipe, result, answer.policy.claim)
    rows = [
        [one.cell, one.metric, one.published, one.measured, one.agreement, one.source]
        for one in found
    ]
    console.table(
        f"{recipe.name}: what others published",
        ["cell", "metric", "published", "here", "", "source"],
        rows,
        result=True,
    )
    path = measuring.keep(session, result)
    console.document(
        {
            "result": msgspec.to_builtins(result),
            "claims": msgspec.to_builtins(found),
            "file": str(path),
        }
    )
    if result.state == "invalid":
        raise GateError(
            "measurement-invalid",
            f"{recipe.name} was not measured to the end.",
            details=[result.says],
        )
    if not found:
        raise GateError(
            "gate-not-run",
            f"Nobody published a figure of {recipe.name} that could be held against this.",
            details=[f"result: {path}"],
        )
    for agreement, words, reference in (
        ("slower", "not reached here", "gate-failed"),
        ("open", "undecided here", "gate-inconclusive"),
    ):
        if worse := [f"{one.cell}: {one.says}" for one in found if one.agreement == agreement]:
            raise GateError(
                reference,
                f"{len(worse)} of {len(found)} published figures are {words}.",
                details=worse,
            )
    return 0
