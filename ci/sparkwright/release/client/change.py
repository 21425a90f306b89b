"""
One environment, from what is there to a set, in an order that may be cut anywhere.

``installing.json`` → packages that go → packages that come (uv) → edits on the machine → folders for what is compiled → ``installed.json``.
After a kill, the next run reads every byte of what it finds (`plan`), and takes nothing for whole that is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sparkwright.core.console import console, size
from sparkwright.core.errors import StoreError
from sparkwright.forks.context import StandaloneContext
from sparkwright.forks.package_index import path_of
from sparkwright.release import onsite
from sparkwright.release.client import caches, files, packages, placing, state
from sparkwright.release.client.placing import Looked
from sparkwright.release.client.plan import Before, Plan, names, spec_of, went
from sparkwright.release.client.state import Chosen, Installed, Pinned
from sparkwright.release.environment import Environment
from sparkwright.release.errors import InstallError

#: Unpacked, wheels of CUDA libraries take about twice their size, and those of Python text four times; this is before they are at hand.
UNPACKED = 3


class Changed(msgspec.Struct, frozen=True):
    """What was done."""

    installed: Installed
    came: tuple[str, ...]
    went: tuple[str, ...]
    edits: tuple[onsite.Edited, ...]


def check_room(context: StandaloneContext, place: Environment, fetched: Sequence[Pinned], unpacked: int) -> None:
    """Raise `disk-full` where the store cannot take what is missing, or the environment what it unpacks to."""
    wanted = [(context.store.root, files.missing(context, fetched)), (place.prefix, unpacked)]
    if placing.same_disk(context.store.root, place.prefix):
        wanted = [(place.prefix, sum(count for _, count in wanted))]
    for folder, count in wanted:
        if count > (free := placing.free(folder)):
            raise StoreError(
                "disk-full", f"There is not enough room under {folder}.", details=[f"needed: {size(count)}", f"free:   {size(free)}"]
            )


def at_hand(context: StandaloneContext, place: Environment, wanted: Sequence[Pinned]) -> dict[str, Looked]:
    """Bring *wanted* into the store, and return what each holds, by project. Raises as `files.obtain`, `placing.look`, `check_room`."""
    check_room(context, place, wanted, UNPACKED * sum(one.size for one in wanted))
    paths = files.obtain(context, wanted)
    looked = {one.project: placing.look(one, paths[one.filename]) for one in wanted}
    check_room(context, place, (), sum(one.unpacked for one in looked.values()))
    return looked


def bring(
    context: StandaloneContext, place: Environment, was: Before, chosen: Chosen, looked: Mapping[str, Looked], todo: Plan, history: tuple[Chosen, ...]
) -> Changed:
    """
    Do what the plan says.

    Raises:
        command-failed, environment-broken, environment-unusable, disk-full, onsite-mismatch: See there; the next run finishes.
    """
    state.begin(place, chosen, was.installed, history, todo.found)
    clear(context, place, was)
    with console.step(f"{len(todo.go)} packages go, {len(todo.come) + len(todo.edit)} come, {len(todo.keep)} stay"):
        if todo.go:
            packages.remove(place, todo.go)
        if todo.come:
            placing.lay(context.store, place, [(one, looked[one.project].path) for one in todo.come])
            placing.confirm(place, todo.come, looked)
    edits: tuple[onsite.Edited, ...] = ()
    if (spec := spec_of(chosen)) is not None:
        given = {one.filename: looked[one.project].path for one in todo.edit}
        edits = onsite.install(context.store, spec, place.prefix, offline=True, given=given).edits
    done = record(place, chosen, todo, history, was)
    state.end(place, done)
    caches.clean(place, set(done.caches.values()))
    return Changed(done, names(todo.come, todo.edit), went(todo), edits)


def record(place: Environment, chosen: Chosen, todo: Plan, history: tuple[Chosen, ...], was: Before) -> Installed:
    """Return what is there now, with the folder for what it compiles."""
    there = packages.found(place)
    if absent := [one.project for one in chosen.packages if len(there.get(one.project, [])) != 1]:
        raise InstallError("environment-broken", f"{place.prefix} does not hold what was just installed.", details=absent)
    kept = {one.project for one in todo.keep}
    lay = was.installed.placed if was.installed and was.half is None else {}
    placed = {
        one.project: packages.placed(
            place, there[one.project][0], found=one.project in todo.found, before=lay.get(one.project) if one.project in kept else None
        )
        for one in chosen.packages
    }
    known = was.installed.caches if was.installed else {}
    older = {old.release: known[old.release] for old in history if old.release in known}
    return Installed(chosen, placed, history[-state.KEPT :], {**older, chosen.release: caches.place(place)})


def clear(context: StandaloneContext, place: Environment, was: Before) -> None:
    """Remove what a killed installation laid down of packages that no RECORD names yet; the wheel says what that can be."""
    if was.half is None or was.half.chosen is None:
        return
    there = packages.found(place)
    owned = {name for infos in there.values() for info in infos for name, _, _ in packages.rows(place.site / info)}
    for one in was.half.chosen.packages:
        path = path_of(context.store, one.sha256, one.filename)
        bare = [info for info in there.get(one.project, []) if not packages.rows(place.site / info)]
        if (bare or one.project not in there) and path.is_file():
            packages.erase(place, placing.look(one, path).names - owned)
            packages.remove(place, bare)
