"""
``install``: from an address and a wish to an environment that holds exactly what was proved.

Nothing in the environment is touched before signature, serial, expiry, evidence, lock and every byte of every file are checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.core.console import console
from sparkwright.forks.context import StandaloneContext
from sparkwright.release import environment
from sparkwright.release.client import address, catalogue, change, choice, plan, state, target
from sparkwright.release.client.catalogue import Catalogue
from sparkwright.release.client.plan import Before
from sparkwright.release.client.state import Chosen, Installed
from sparkwright.release.environment import Environment
from sparkwright.release.errors import InstallError
from sparkwright.release.manifest.records import Channel, Entry, Missing, Release
from sparkwright.release.onsite import Edited
from sparkwright.release.signing import trust


class Wish(msgspec.Struct, frozen=True):
    """
    What the user asks for.

    Attributes:
        index: URL or folder; empty for the default. *keys*: files of public keys. *signed_for*: see `catalogue.read`.
        stack: Empty for the installed one, else the latest. *release*: full name of one release; empty for the newest.
        replace: Replace packages of the set that others installed. *repair*: put back what others changed in it.
        dry: Change nothing.
    """

    index: str = ""
    keys: tuple[Path, ...] = ()
    signed_for: str = ""
    channel: Channel = "verified"
    stack: str = ""
    release: str = ""
    replace: bool = False
    repair: bool = False
    dry: bool = False


class Done(msgspec.Struct, frozen=True):
    """
    What came of it.

    Attributes:
        state: ``there already``: nothing was to do. ``would install``: with a dry run.
        came, went, stayed: Projects; with their versions for those that went.
        missing: What is not proved of a candidate. *yanked*: why the release is no longer offered.
    """

    state: Literal["installed", "there already", "would install", "back"]
    name: str
    release: str
    channel: str
    into: str
    serial: int
    came: tuple[str, ...] = ()
    went: tuple[str, ...] = ()
    stayed: tuple[str, ...] = ()
    edits: tuple[Edited, ...] = ()
    missing: tuple[Missing, ...] = ()
    yanked: str = ""


def opened(context: StandaloneContext, wish: Wish) -> Catalogue:
    """Return the checked index that *wish* means; raises as `address.find`, `trust.find` and `catalogue.read`."""
    where = address.find(wish.index, context)
    believed = trust.find(wish.signed_for or where.url or where.of(""), wish.keys)
    return catalogue.read(context, where, believed, signed_for=wish.signed_for)


def install(context: StandaloneContext, folder: Path, wish: Wish) -> Done:
    """
    Bring the environment in *folder* to the release that *wish* means.

    Raises:
        SparkwrightError: Whatever the modules of this package say; before `change.bring`, the environment is as it was.
    """
    place = environment.probe(folder)
    index = opened(context, wish)
    with state.held(place):
        was = plan.before(place)
        entry, release = _meant(index, wish, was)
        if entry.yanked:
            console.warn(f"{entry.name} was yanked: {entry.yanked}")
        if (known := was.installed) and was.half is None and known.chosen.release == entry.release:
            _refuse_broken(place, was, wish)
            if known.chosen.proof == entry.proof and not was.faults:
                return _done("there already", place, known.chosen, stayed=tuple(known.placed), yanked=entry.yanked)
        return _install(context, place, index, entry, release, was, wish)


def _meant(index: Catalogue, wish: Wish, was: Before) -> tuple[Entry, Release | None]:
    """Return the release; its record is not read where it is the installed one, which costs nobody a request."""
    if wish.release:
        return choice.named(index.manifest, wish.release, wish.channel), None
    installed = was.installed.chosen if was.installed else None
    entries = choice.newest(index.manifest, wish.channel, wish.stack or (installed.stack if installed else ""))
    if installed and entries[0].release == installed.release:
        return entries[0], None
    return target.first_fitting(index, entries)


def _refuse_broken(place: Environment, was: Before, wish: Wish) -> None:
    if was.faults and not wish.repair:
        raise InstallError(
            "environment-broken",
            f"{place.prefix} no longer holds what was installed.",
            details=[str(fault) for fault in was.faults],
            data={"faults": msgspec.to_builtins(was.faults)},
        )


def _install(context: StandaloneContext, place: Environment, index: Catalogue, entry: Entry, known: Release | None, was: Before, wish: Wish) -> Done:
    release = known or target.first_fitting(index, [entry])[1]
    with console.step(f"{entry.name}: evidence and lock"):
        missing = target.proved(index, entry, release, wish.channel)
        chosen, _ = target.chosen(index, entry, release, place)
    for one in missing:
        console.warn(f"not proved: {one.gate}: {one.state}: {one.says}")
    if was.faults and not (wish.repair or wish.replace):
        _refuse_broken(place, was, wish)
    plan.refuse_foreign(place, was, chosen, replace=wish.replace)
    looked = change.at_hand(context, place, plan.needed(was, chosen))
    todo = plan.plan(place, was, chosen, looked, replace=wish.replace)
    kept = plan.names(todo.keep)
    if wish.dry:
        came = plan.names(todo.come, todo.edit)
        return _done("would install", place, chosen, came, plan.went(todo), kept, missing=missing, yanked=entry.yanked)
    done = change.bring(context, place, was, chosen, looked, todo, _history(was, chosen))
    return _done("installed", place, chosen, done.came, done.went, kept, done.edits, missing, entry.yanked)


def _history(was: Before, chosen: Chosen) -> tuple[Chosen, ...]:
    """Return the earlier sets, once *chosen* is the present one: the present one of now, if it is another, is the latest of them."""
    if was.half is not None and was.half.chosen == chosen:
        return was.half.history
    installed: Installed | None = was.installed
    if installed is None:
        return ()
    earlier = installed.history if installed.chosen.release == chosen.release else (*installed.history, installed.chosen)
    return earlier[-state.KEPT :]


def _done(
    what: Literal["installed", "there already", "would install", "back"],
    place: Environment,
    chosen: Chosen,
    came: tuple[str, ...] = (),
    went: tuple[str, ...] = (),
    stayed: tuple[str, ...] = (),
    edits: tuple[Edited, ...] = (),
    missing: tuple[Missing, ...] = (),
    yanked: str = "",
) -> Done:
    into = str(place.prefix)
    return Done(what, chosen.name, chosen.release, chosen.channel, into, chosen.serial, came, went, stayed, edits, missing, yanked)
