"""Going back: to the set before the present one, from the store where it is still there, or to an environment without any."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from sparkwright.core.console import console
from sparkwright.forks.context import StandaloneContext
from sparkwright.release import environment
from sparkwright.release.client import caches, change, packages, plan, state
from sparkwright.release.client.install import Done
from sparkwright.release.client.plan import Before
from sparkwright.release.client.state import Chosen
from sparkwright.release.environment import Environment
from sparkwright.release.errors import InstallError


class Gone(msgspec.Struct, frozen=True):
    """What `uninstall` did: *kept* was there before us, or something that we did not install needs it."""

    name: str
    into: str
    removed: tuple[str, ...]
    kept: tuple[str, ...]


def rollback(context: StandaloneContext, folder: Path) -> Done:
    """
    Bring back the set before the present one; after a killed run, the one that was there when it began.

    Raises:
        nothing-installed: There is none. offline, source-unreachable, download-invalid: The store lacks a file of it, and it cannot be had.
        environment-foreign, environment-unusable, disk-full, command-failed: See there.
    """
    place = environment.probe(folder)
    with state.held(place):
        was = plan.before(place)
        chosen, history = _earlier(place, was)
        looked = change.at_hand(context, place, plan.needed(was, chosen))
        # What was broken since is put back by going back, whoever broke it.
        todo = plan.plan(place, was, chosen, looked, replace=True)
        done = change.bring(context, place, was, chosen, looked, todo, history)
    kept = plan.names(todo.keep)
    return Done(
        "back", chosen.name, chosen.release, chosen.channel, str(place.prefix), chosen.serial, done.came, done.went, kept, done.edits
    )


def _earlier(place: Environment, was: Before) -> tuple[Chosen, tuple[Chosen, ...]]:
    if was.half is not None and was.installed is not None:
        return was.installed.chosen, was.installed.history
    if was.installed is None or not was.installed.history:
        todo = "Remove what was installed with `sparkwright uninstall`." if was.half or was.installed else ""
        raise InstallError("nothing-installed", f"{place.prefix} holds no set before the present one.", todo=todo)
    return was.installed.history[-1], was.installed.history[:-1]


def uninstall(context: StandaloneContext, folder: Path) -> Gone:
    """
    Remove what we installed, and what a killed run began to.

    Raises:
        nothing-installed: There is nothing. environment-unusable: The operating system refused.
    """
    place = environment.probe(folder)
    with state.held(place):
        was = plan.before(place)
        name = next((chosen.name for chosen in (was.installed and was.installed.chosen, was.half and was.half.chosen) if chosen), "")
        if was.installed is None and was.half is None:
            raise InstallError("nothing-installed", f"{place.prefix} holds no set that sparkwright installed.")
        there = packages.found(place)
        ours = {project for project in was.projects - was.found if project in there}
        kept = _needed_by_others(place, there.keys() - ours - was.found, ours)
        for project, by in sorted(kept.items()):
            console.note(f"{project} stays: {by} needs it")
        change.clear(context, place, was)
        state.begin(place, None, was.installed)
        gone = sorted(ours - kept.keys())
        with console.step(f"{len(gone)} packages go"):
            packages.remove(place, [info for project in gone for info in packages.found(place).get(project, [])])
        caches.remove(place)
        state.end(place, None)
        state.forget(place)
    return Gone(name, str(place.prefix), tuple(gone), tuple(sorted({*kept, *(was.found & there.keys())})))


def _needed_by_others(place: Environment, others: Iterable[str], ours: set[str]) -> dict[str, str]:
    """Return which of *ours* the packages *others* need, directly or not, and which of them does."""
    import importlib.metadata

    wanted = {packages.canonical(one.name): one for one in importlib.metadata.distributions(path=[str(place.site)])}
    kept: dict[str, str] = {}
    todo = [(other, other) for other in others]
    while todo:
        project, by = todo.pop()
        for needed in _requirements(wanted.get(project), place):
            if needed in ours and needed not in kept:
                kept[needed] = by
                todo.append((needed, by))
    return kept


def _requirements(one: object, place: Environment) -> list[str]:
    from importlib.metadata import Distribution

    from packaging.requirements import InvalidRequirement, Requirement

    names = []
    for line in (one.requires or ()) if isinstance(one, Distribution) else ():
        try:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({**place.markers, "extra": ""}):
                names.append(packages.canonical(wanted.name))
        except InvalidRequirement:
            continue
    return names
