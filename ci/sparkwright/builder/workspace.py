"""
The folder in which a fork is compiled; its files change only where the tree does, so that ninja
compiles no more.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from sparkwright.builder import configure, source_tree, vendored
from sparkwright.builder.configure import Call, Configured
from sparkwright.builder.environment import cross as target
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.cross import Target
from sparkwright.builder.environment.sandbox import INSIDE, Sandbox
from sparkwright.builder.environment.toolchain import ForkEnvironment, Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import version
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.forks import lock
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError


class Workspace:
    """
    The folder of one fork; callers hold its lock (`Store.lock` of `name`).

    Args:
        settings: Those of the fork for this run (`toolchain.settings`).
        variant: Tells apart the folders of a fork; empty for the one that is built. A run that
            leaves rules out has one of its own,
            since CMake writes sources that depend on the arch, and the real build would have to
            compile those again. So has a build with the vendored sources.
    """

    def __init__(
        self,
        session: RunContext,
        tools: Toolchain,
        settings: ForkEnvironment,
        fork: str,
        variant: str = "",
    ) -> None:
        self._session, self._tools, self._settings, self._fork = session, tools, settings, fork
        variant = variant or ("trial" if session.without else "build")
        self.variant = f"vendored-{variant}" if settings.needs_vendored else variant
        self.folder = session.store.folder(
            "work", session.project.stack, fork, session.named(self.variant)
        )
        self.source, self.build = self.folder / "src", self.folder / "build"

    @staticmethod
    def name(session: RunContext, fork: str) -> str:
        """Return the name of the lock."""
        return f"work-{session.project.stack}-{fork}"

    @cached_property
    def target(self) -> Target:
        """What the fork is compiled for and linked against."""
        return target.of(self._session, self._tools)

    @cached_property
    def sandbox(self) -> Sandbox:
        """
        Where the fork is configured and compiled: its folder, what it needs and the tools, under
        the same names everywhere.
        """
        return Sandbox.create(self._places, needed=self._settings.needs_vendored)

    @cached_property
    def vendored(self) -> dict[str, str]:
        """
        The trees of the vendored sources by name, in the object database; none where the targets
        need none.

        Raises:
            source-unresolved, source-mismatch: See `vendored.fetch`.
        """
        return vendored.fetch(self._session, self._fork) if self._settings.needs_vendored else {}

    @cached_property
    def _places(self) -> dict[Path, str]:
        needed = {
            self._needed_folder(need): f"needed/{need}"
            for need in self._session.project.fork(self._fork).needs
        }
        against = {self.target.root: "target"} if self.target.cross else {}
        return {self.folder: self._fork, self._tools.root: "tools", **against, **needed}

    def fill(self, tree: str) -> None:
        """Make the source folder hold *tree*, and the folder of each vendored source its own."""
        self._fill_vendored()
        self._session.objects.checkout(tree, self.source, self.folder / "index")

    def _fill_vendored(self) -> None:
        for name, source in self.vendored.items():
            folder = self.build / (vendored.FOLDER % name.lower())
            self._session.objects.checkout(
                source, folder, self.folder / f"vendored-{folder.name}.index"
            )

    def configure(self, launcher: Path | None) -> Configured:
        """
        Run the fork's real CMake.

        Args:
            launcher: What stands in front of each compiler call.

        Raises:
            configure-failed: CMake ended with an error.
            compiler-too-old: A source refuses this machine's compiler.
            source-unlocked: CMake asked for a source that the lock does not pin.
            tool-missing: The headers of this Python, which extension modules are compiled against,
                are not installed.
        """
        renamed = (
            {}
            if self.sandbox.mounts
            else {folder.absolute(): INSIDE / name for folder, name in self._places.items()}
        )
        defines = version.flags(self.defines(), renamed)
        if launcher:
            command = f"{self._tools.python};-IS;{launcher}"
            defines |= {
                "CMAKE_CUDA_COMPILER_LAUNCHER": command,
                "CMAKE_CXX_COMPILER_LAUNCHER": command,
            }
        if "VLLM_PYTHON_EXECUTABLE" in defines:
            _require_python_headers()
        rules = source_tree.rules_of(self._session)
        log = (
            self._session.store.folder("logs")
            / f"{self._session.project.stack}-{self._fork}-configure-{self.variant}.log"
        )
        traced = {
            "CMakeLists.txt",
            *(Path(rule.file).name for rule in rules.rules if rule.fork == self._fork),
        }
        self._renew()
        try:
            with console.step(f"configure {self._fork}"):
                configured = configure.configure(
                    self.source,
                    self.build,
                    defines=self._translated(defines),
                    env=self.environment(),
                    log=log,
                    targets=self._settings.named_targets,
                    cmake=self._tools.tool("cmake"),
                    what=f"{self._fork} does not configure.",
                    traced=traced,
                    sandbox=self.sandbox,
                )
        except BuildError:
            # CMake's own words on a source that it could not reach say less than the name of that
            # source.
            self._check_downloads(
                configure.calls(self.source, self.build, sandbox=self.sandbox), complete=False
            )
            raise
        self._check_downloads(configured.calls, complete="all" in self._settings.targets)
        return configured

    def _check_downloads(self, calls: Iterable[Call], *, complete: bool) -> None:
        declared = vendored.declarations(calls)
        locked, ignored = (
            self._session.lock.forks[self._fork],
            self._session.project.fork(self._fork).ignored,
        )
        vendored.check(self._fork, declared, locked, ignored, complete=complete)

    def environment(self) -> dict[str, str]:
        """Return the variables of configure and compile, with the paths of the sandbox."""
        return self._translated(
            self._tools.environment(
                **{**self.target.environment(self._tools), **self._settings.variables}
            )
        )

    def _translated(self, values: Mapping[str, str]) -> dict[str, str]:
        return {name: self.sandbox.translate(value) for name, value in values.items()}

    def _renew(self) -> None:
        """
        Empty a build folder that CMake cannot go on with: its sources had another path, or another
        compiler made it.
        """
        cache, known = self.build / "CMakeCache.txt", self.folder / "compiler"
        moved = f"CMAKE_HOME_DIRECTORY:INTERNAL={self.sandbox.sandbox_path(self.source)}\n"
        compiler = toolchain.compiler(self._session)
        if cache.exists() and moved not in cache.read_text("utf-8"):
            console.note(
                f"{self._fork}: its build folder was made under another path; it is made anew"
            )
            shutil.rmtree(self.build)
            self.build.mkdir()
            for index in self.folder.glob("vendored-*.index"):
                index.unlink()
            self._fill_vendored()
        elif known.exists() and known.read_text("utf-8") != compiler:
            console.note(
                f"{self._fork}: its build folder was configured with another compiler; it is "
                f"configured anew"
            )
            cache.unlink(missing_ok=True)
            shutil.rmtree(self.build / "CMakeFiles", ignore_errors=True)
        known.write_text(compiler, "utf-8")

    def defines(self) -> dict[str, str]:
        """Return the CMake cache entries, every ``{…}`` replaced by its folder."""
        places = {
            "{python}": str(self._tools.python),
            "{cuda}": str(self.target.cuda),
            "{build}": str(self.build),
        }
        for need in self._session.project.fork(self._fork).needs:
            places[f"{{source:{need}}}"] = str(self._needed(source_tree.make(self._session, need)))
        entries = {
            "CMAKE_MAKE_PROGRAM": str(self._tools.tool("ninja")),
            **self.target.defines(),
            **vendored.defines(self.vendored),
            **self._settings.defines,
        }
        return {name: _filled(value, places) for name, value in entries.items()}

    def _needed(self, source: SourceTree) -> Path:
        """
        Return a folder that holds the tree of a fork that this one reads; one place for all
        variants, updated like a workspace.
        """
        folder = self._needed_folder(source.fork)
        with self._session.store.lock(f"needed-{self._session.project.stack}-{source.fork}"):
            self._session.objects.checkout(source.tree, folder / "src", folder / "index")
        return folder / "src"

    def _needed_folder(self, need: str) -> Path:
        return self._session.store.folder("work", self._session.project.stack, need, "needed")


def _filled(value: str, places: Mapping[str, str]) -> str:
    for name, folder in places.items():
        value = value.replace(name, folder)
    if "{" in value:
        raise FileError(
            "file-invalid",
            f"environment.yaml has an unknown place in {value!r}.",
            details=[f"known: {', '.join(places)}"],
        )
    return value


def _require_python_headers() -> None:
    if not toolchain.python_header().exists():
        todo = "Install the headers of this Python: sudo apt-get install python3-dev"
        raise CommandError("tool-missing", f"{toolchain.python_header()} is not there.", todo=todo)


def lock_vendored(session: RunContext, fork: str) -> None:
    """
    Write the sources that CMake asks for in *fork* to the lock file.

    CMake is configured for all targets with what the lock pins, again for as long as it asks for
    more: a source that was brought may ask for others.

    Raises:
        source-unlocked: CMake asks for a download that cannot be pinned.
        source-unresolved: The host of one does not answer; the lock names it unresolved.
        And what applying and configuring raise.
    """
    tools, settled = toolchain.obtain(session), False
    while not settled:
        session = dataclasses.replace(session, targets=("all",))
        with session.store.lock(Workspace.name(session, fork)):
            workspace = Workspace(session, tools, toolchain.settings(session, fork), fork, "lock")
            workspace.fill(source_tree.make(session, fork).tree)
            try:
                workspace.configure(None)
                settled = True
            except SourceError as error:
                if error.reference != "source-unlocked":
                    raise
                declared = msgspec.convert(
                    error.data["declarations"], tuple[vendored.Declaration, ...]
                )
                with session.store.lock("objects"):
                    locked = vendored.pinned(session, fork, declared)
                if locked == session.lock.forks[fork]:
                    raise
                forks = {**session.lock.forks, fork: locked}
                session.project.lock_file.write_text(
                    lock.render(msgspec.structs.replace(session.lock, forks=forks)), "utf-8"
                )
