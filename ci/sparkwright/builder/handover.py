"""
What a full build compiles beside the fork itself: every vendored source, brought by commit, verified, and handed to the build as a folder.

CMake's FetchContent would download each while it configures. Here it is told that all of them are there already, each by the variable that
the lock names (``X_SRC_DIR``, ``FETCHCONTENT_SOURCE_DIR_X``), and that there is nothing to ask a host for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from sparkwright.builder.arch.rules import ArchRules
from sparkwright.builder.compile import ninja
from sparkwright.builder.configure import Configured
from sparkwright.builder.environment import host_compiler, toolchain
from sparkwright.builder.environment.toolchain import ForkEnvironment, Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.workspace import Workspace
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.forks import fetch as sources
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import VendoredLock
from sparkwright.forks.package_index import shown

#: Where FetchContent itself would put a source, in the build folder; a unit below it is named after that.
PLACE = "{build}/_deps/%s-src"
UNITS = "<build>/_deps/"

DISCONNECTED = {"FETCHCONTENT_FULLY_DISCONNECTED": "ON", "FETCHCONTENT_BASE_DIR": "{build}/_deps"}


class Whole(msgspec.Struct, frozen=True):
    """
    A full build's settings; no path of this machine is in them.

    Attributes:
        settings: Those of the fork, with what a full build has otherwise, and with the folder of each vendored source.
        trees: Vendored source → git tree id of what is handed over.
    """

    settings: ForkEnvironment
    trees: dict[str, str]


def wanted(session: Session, fork: str) -> dict[str, VendoredLock]:
    """Return the vendored sources that have to be brought: not those that a fork of the stack stands in for, nor any below another."""
    settings = toolchain.spec(session.project).forks[fork]
    ours = {name for name, value in settings.defines.items() if "{source:" in value}
    found = session.lock.forks[fork].vendored
    return {
        name: one for name, one in found.items() if one.kind == "fetchcontent" and _below(name, found) is None and one.variable not in ours
    }


def _below(name: str, found: Mapping[str, VendoredLock]) -> str | None:
    return next((other for other in found if name.startswith(f"{other}/")), None)


def fetch(session: Session, fork: str) -> Whole:
    """
    Return the settings of a full build of *fork*, every vendored source in the object database.

    Raises:
        source-unresolved: Some cannot be had: all of them are named, each with what stands in its way.
        source-mismatch: One is not what the lock names.
    """
    locked, found = wanted(session, fork), session.lock.forks[fork].vendored
    trees: dict[str, str] = {}
    missing: list[str] = []
    with console.step(f"bring {len(locked)} vendored sources of {fork}"), session.store.lock("objects"):
        for name, one in locked.items():
            try:
                trees[name] = _tree(session, fork, name, found)
            except SourceError as error:
                if error.reference not in {"offline", "source-unreachable", "source-unresolved"}:
                    raise
                missing.append(f"{name}: {shown(one.url)} at {one.ref}: {' · '.join([error.what, *error.details[:4]])}")
            else:
                if not one.variable:
                    missing.append(
                        f"{name}: {shown(one.url)} at {one.ref}: upstream's build takes it from the network alone, by no variable"
                    )
    if missing:
        raise SourceError(
            "source-unresolved",
            f"{len(missing)} of {len(locked)} sources that a full build of {fork} compiles cannot be had.",
            details=missing,
            todo="Run `sparkwright lock` where their hosts are reachable, or give mirrors (--mirror URL=REPLACEMENT), and lock again. "
            "A graft needs none of them: leave --full out.",
            data={"missing": [line.partition(":")[0] for line in missing], "present": sorted(trees)},
        )
    _check_folders(session, fork, trees)
    return Whole(_settings(session, fork, locked), trees)


def _check_folders(session: Session, fork: str, trees: Mapping[str, str]) -> None:
    """Require that ``folders`` names folders that are there: CMake would take a missing one for an empty source."""
    whole = toolchain.spec(session.project).forks[fork].full or toolchain.FullEnvironment()
    for name, folder in whole.folders.items():
        if name not in trees or not session.objects.paths(trees[name], folder):
            raise FileError("file-invalid", f"environment.yaml hands {folder} of {name} to {fork}, and there is no such folder or source.")


def _tree(session: Session, fork: str, name: str, found: Mapping[str, VendoredLock]) -> str:
    """Return the tree of a vendored source; a host that did not answer once is not waited for again."""
    host, commit = urlsplit(session.mirrored(found[name].url)).netloc, found[name].commit
    if host in session.silent and not (len(commit) == 40 and session.objects.has(f"{commit}^{{commit}}")):
        raise SourceError("source-unreachable", f"{host} did not answer before.")
    try:
        return sources.vendored_tree(session, fork, name, found)
    except SourceError as error:
        if error.reference != "source-unreachable":
            raise
        session.silent.update({host} - {""})
        raise


def _settings(session: Session, fork: str, locked: Mapping[str, VendoredLock]) -> ForkEnvironment:
    own = toolchain.spec(session.project).forks[fork]
    whole = own.full or toolchain.FullEnvironment()
    places = {one.variable: "/".join(filter(None, (PLACE % name.lower(), whole.folders.get(name)))) for name, one in locked.items()}
    by_name = {name: place for name, place in places.items() if not name.startswith("ENV{")}
    by_environment = {name.removeprefix("ENV{").removesuffix("}"): place for name, place in places.items() if name not in by_name}
    defines = {**own.defines, **DISCONNECTED, **whole.defines, **by_name}
    variables = {**own.variables, **whole.variables, **by_environment}
    return msgspec.structs.replace(
        own, targets={}, defines={name: value for name, value in defines.items() if value},
        variables={name: value for name, value in variables.items() if value},
    )  # fmt: skip


def judging(rules: ArchRules, whole: Whole | None) -> ArchRules:
    """Return *rules* less what is said of units that the build does not have: those of vendored sources, where it is not a full one."""
    if whole:
        return rules
    kept = tuple(entry for entry in rules.kept if not entry.unit.startswith(UNITS))
    return msgspec.structs.replace(rules, kept=kept, dropped=tuple(one for one in rules.dropped if not one.unit.startswith(UNITS)))


class FullWorkspace(Workspace):
    """The folder of a full build, with the vendored sources in it; what such a build stands for is that it took nothing else."""

    apart = True

    def __init__(self, session: Session, tools: Toolchain, whole: Whole, fork: str, variant: str = "") -> None:
        super().__init__(
            session, tools, whole.settings, fork, "-".join(filter(None, ("full", variant, "trial" if session.without else "")))
        )
        self.whole = whole

    def fill(self, tree: str) -> None:
        """Make the source folder hold *tree*, and each vendored source its own."""
        super().fill(tree)
        for name, vendored in self.whole.trees.items():
            folder = Path(self.filled(PLACE % name.lower()))
            self._session.objects.checkout(vendored, folder, self.folder / f"vendored-{folder.name}.index")

    def configure(self, launcher: Path | None) -> Configured:
        """
        Run the fork's real CMake, with a folder that another host compiler configured made anew.

        Raises:
            configure-failed, tool-missing: See `Workspace.configure`.
            compiler-too-old: A source refuses this machine's compiler.
        """
        known, now = self.folder / "compiler", host_compiler.identity()
        if known.exists() and known.read_text() != now:
            # CMake keeps the compiler that it found first.
            (self.build / "CMakeCache.txt").unlink(missing_ok=True)
            shutil.rmtree(self.build / "CMakeFiles", ignore_errors=True)
        known.write_text(now)
        try:
            return super().configure(launcher)
        except BuildError as error:
            if error.reference != "configure-failed":
                raise
            raise host_compiler.explained(error) from error

    def environment(self) -> dict[str, str]:
        """Return the variables of configure and compile, as the room has them, with every place filled in."""
        return {name: self.room.translated(self.filled(value)) for name, value in super().environment().items()}

    def filled(self, text: str) -> str:
        """Return *text* with the places of a full build in it."""
        places = {
            "{build}": str(self.build), "{python}": str(self._tools.python), "{cuda}": str(self._tools.cuda),
            "{version}": version(self._session, self._fork), "{jobs}": str(ninja.limits(self._session).cores),
        }  # fmt: skip
        for name, value in places.items():
            text = text.replace(name, value)
        return text


def version(session: Session, fork: str) -> str:
    """Return upstream's version of *fork*, which a tree without its history does not know: as the lock says it."""
    locked = session.lock.forks[fork]
    return locked.sdist.version if locked.sdist else locked.git.ref.removeprefix("v") if locked.git else ""
