"""What is to be done to an environment: decided from records and the disk, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from sparkwright.release import content
from sparkwright.release.client import catalogue, health, packages, state
from sparkwright.release.client.placing import Looked
from sparkwright.release.client.state import Chosen, Installed, Installing, Pinned
from sparkwright.release.environment import Environment
from sparkwright.release.errors import InstallError
from sparkwright.release.spec import OnsiteSpec

#: What venv and virtualenv put into every new environment; nobody chose the version that is there.
SEEDS = frozenset({"pip", "setuptools", "wheel"})


class Before(msgspec.Struct, frozen=True):
    """What a run finds: the set that is installed, or was when a run began that was killed (*half*), and what became of it since."""

    installed: Installed | None
    half: Installing | None = None
    faults: tuple[health.Fault, ...] = ()

    @property
    def projects(self) -> frozenset[str]:
        """The projects that we installed, or began to."""
        sets = [self.installed and self.installed.chosen, self.half and self.half.chosen]
        return frozenset(one.project for chosen in sets if chosen for one in chosen.packages)

    @property
    def found(self) -> frozenset[str]:
        """Those among them that were there before us, with the same bytes."""
        placed = self.installed.placed if self.installed else {}
        return frozenset(project for project, one in placed.items() if one.found) | frozenset(self.half.found if self.half else ())

    @property
    def pinned(self) -> Mapping[str, Pinned]:
        return {one.project: one for one in self.installed.chosen.packages} if self.installed else {}

    @property
    def edited(self) -> frozenset[str]:
        """The projects that were edited on the machine."""
        return frozenset(_onsite_names(self.installed.chosen)) if self.installed else frozenset()


class Plan(msgspec.Struct, frozen=True):
    """What is to be done: *go* names ``.dist-info`` folders, *come* and *edit* what is installed by uv and by `release.onsite`."""

    keep: tuple[Pinned, ...]
    go: tuple[str, ...]
    come: tuple[Pinned, ...]
    edit: tuple[Pinned, ...]
    found: frozenset[str]


def before(place: Environment) -> Before:
    """Return what is there; a killed run that got as far as its last step has nothing left to finish."""
    installed, half = state.installed(place), state.installing(place)
    if half is not None:
        return Before(half.before, half)
    return Before(installed, None, health.look(place, installed) if installed else ())


def spec_of(chosen: Chosen) -> OnsiteSpec | None:
    """Return the edits of a set."""
    return catalogue.onsite_of(chosen.onsite.encode(), f"the edits of {chosen.name}") if chosen.onsite else None


def _onsite_names(chosen: Chosen) -> Iterator[str]:
    spec = spec_of(chosen)
    yield from (packages.canonical(package.name) for package in spec.packages) if spec else ()


def refuse_foreign(place: Environment, was: Before, chosen: Chosen, *, replace: bool) -> None:
    """Raise `environment-foreign` where other versions of packages of the set are there that we did not install."""
    there, wrong = packages.found(place), []
    for one in chosen.packages if not replace else ():
        for info in there.get(one.project, []) if not _replaceable(was, one) else ():
            if packages.of_info(info)[1] != one.version:
                wrong.append(_foreign(place, one, info, packages.of_info(info)[1]))
    _refuse(place, wrong)


def _replaceable(was: Before, one: Pinned) -> bool:
    """Is what may be there of this project ours, or nobody's choice?"""
    return one.project in was.projects or one.project in SEEDS


def _foreign(place: Environment, one: Pinned, info: str, says: str) -> str:
    return f"{one.project}: {says} is there (by {packages.origin(place.site / info)}), the set has {one.version}"


def _refuse(place: Environment, wrong: Sequence[str]) -> None:
    if wrong:
        raise InstallError(
            "environment-foreign", f"{place.prefix} holds packages of the set that sparkwright did not install.", details=wrong
        )


def plan(place: Environment, was: Before, chosen: Chosen, looked: Mapping[str, Looked], *, replace: bool) -> Plan:
    """
    Return how *place* becomes *chosen*; nothing is changed.

    Raises:
        environment-foreign: Packages with other bytes are there that we did not install, and *replace* is not set.
    """
    there, broken = packages.found(place), {fault.project for fault in was.faults}
    edited, keep, go, come, found, wrong = set(_onsite_names(chosen)), [], [], [], set[str](), []
    for one in chosen.packages:
        infos, ours = there.get(one.project, []), one.project in was.projects
        if one.project in edited:
            go += [info for info in infos if packages.of_info(info)[1] != one.version or one.project in broken or not ours]
        elif len(infos) == 1 and _whole(place, was, one, infos[0], looked, broken):
            keep.append(one)
            if not ours or one.project in was.found:
                found.add(one.project)
        else:
            wrong += [_foreign(place, one, info, "another build of that version") for info in infos if not _replaceable(was, one)]
            go += infos
            come.append(one)
    if not replace:
        _refuse(place, wrong)
    wanted = {one.project for one in chosen.packages}
    for project in sorted(was.projects - wanted):
        if project not in was.found:
            go += there.get(project, [])
    return Plan(tuple(keep), tuple(go), tuple(come), tuple(one for one in chosen.packages if one.project in edited), frozenset(found))


def _whole(place: Environment, was: Before, one: Pinned, info: str, looked: Mapping[str, Looked], broken: set[str]) -> bool:
    """Is that very wheel there? Its record says so, or, where none can be trusted, every byte."""
    if one.project in broken or one.project in was.edited or packages.of_info(info)[1] != one.version:
        return False
    if was.half is None and (known := was.pinned.get(one.project)):
        return known.sha256 == one.sha256
    wanted = looked[one.project].content
    return bool(wanted) and content.of_installed(place.site / info, deep=True) == wanted


def needed(was: Before, chosen: Chosen) -> tuple[Pinned, ...]:
    """Return what has to be at hand: all that is not known to lie there untouched."""
    if was.half is not None:
        return chosen.packages
    broken, edited = {fault.project for fault in was.faults}, {*_onsite_names(chosen), *was.edited}
    known = was.pinned
    return tuple(
        one
        for one in chosen.packages
        if one.project in broken | edited or (old := known.get(one.project)) is None or old.sha256 != one.sha256
    )


def names(*groups: Sequence[Pinned]) -> tuple[str, ...]:
    """Return the projects of all *groups*."""
    return tuple(one.project for group in groups for one in group)


def went(todo: Plan) -> tuple[str, ...]:
    """Return project and version of each package that goes."""
    return tuple(" ".join(packages.of_info(info)) for info in todo.go)
