"""What is about to run, for people and for programs."""

from __future__ import annotations

from typing import Any

from sparkwright.core.console import console, size
from sparkwright.serving.resolve import GIB, Ready


def rows(ready: Ready, log: str) -> list[tuple[str, str]]:
    """Return what will run, as lines of a table."""
    environment, recipe = ready.environment, ready.recipe
    marker = environment.marker
    release = f"{marker.name} ({marker.channel})" if marker else "not installed by sparkwright: unproved"
    weights = f", {size(ready.model.weights)} of weights" if ready.model.weights else ""
    lines = [
        ("recipe", f"{recipe.name}: {recipe.title}" if recipe else "none"),
        ("vLLM", f"{environment.vllm}, {environment.python}"),
        ("release", release),
        ("wheel", environment.wheel or "unknown"),
        ("model", f"{ready.model.says}{weights}"),
        ("served as", f"{ready.name}, on {ready.wish.host} port {ready.wish.port}"),
        ("flags", "\n".join(ready.launch.flags) or "none"),
        ("variables", "\n".join(f"{name}={_shown(name, value)}" for name, value in sorted(ready.launch.variables.items())) or "none"),
        ("memory", plan(ready)),
        ("log", log),
    ]
    if ready.nodes > 1:
        lines.insert(5, ("machines", f"{ready.nodes}, through Ray {environment.ray}"))
    return lines


def _shown(name: str, value: str) -> str:
    """Return *value* for people; of what gives access to anything, only that it is there."""
    secret = any(part in name for part in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
    return "(set)" if secret else value


def plan(ready: Ready) -> str:
    """Return the memory plan in words."""
    floor = f"{ready.floor / GIB:.1f} GiB stay free"
    if ready.recipe is None:
        return f"{ready.needs / GIB:.1f} GiB of weights, cache as vLLM's flags say; {floor}"
    one = ready.recipe.plan
    cache = f"{one.cache:g} GiB of cache{'' if one.pinned else ' (by a variable)'}"
    weights = ready.needs / GIB - one.cache - one.reserve
    return f"{weights:.1f} GiB of weights, {cache}, {one.reserve:g} GiB in reserve; {floor}"


def show(ready: Ready, log: str) -> None:
    """Print what will run, and what a person should know about it."""
    console.table("What will run", ("", ""), rows(ready, log), result=True)
    for text in ready.warnings:
        console.warn(text)


def document(ready: Ready, log: str) -> dict[str, Any]:
    """Return the same for programs, secrets left out."""
    environment, launch = ready.environment, ready.launch
    return {
        "recipe": ready.recipe.name if ready.recipe else "", "vllm": environment.vllm, "python": str(environment.python),
        "release": environment.release, "wheel": environment.wheel, "model": str(ready.model.path), "commit": ready.model.commit,
        "name": ready.name, "host": ready.wish.host, "port": ready.wish.port, "nodes": ready.nodes,
        "command": launch.command(ready.wish.port, ready.wish.host),
        "variables": {name: _shown(name, value) for name, value in launch.variables.items()},
        "needs_mb": ready.needs, "floor_mb": ready.floor, "warnings": ready.warnings, "log": log,
    }  # fmt: skip
