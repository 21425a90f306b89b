"""
Where a fork is compiled: a folder in the store whose files change only where the tree does, so that ninja compiles no more.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from sparkwright.builder import configure, source_tree
from sparkwright.builder.configure import Configured
from sparkwright.builder.environment import cross as target
from sparkwright.builder.environment import sandbox, toolchain
from sparkwright.builder.environment.cross import Target
from sparkwright.builder.environment.sandbox import Room
from sparkwright.builder.environment.toolchain import ForkEnvironment, Toolchain
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import version_label
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.forks.context import Session


class Workspace:
    """
    The folder of one fork; callers hold its lock (`Store.lock` of `name`).

    Args:
        variant: Tells apart the folders of a fork; empty for the one that is built. A run that leaves rules out has one of its own,
            since CMake writes sources that depend on the arch, and the real build would have to compile those again.

    Attributes:
        apart: Nothing may be configured or compiled here with a network.
    """

    apart = False

    def __init__(self, session: Session, tools: Toolchain, settings: ForkEnvironment, fork: str, variant: str = "") -> None:
        self._session, self._tools, self._settings, self._fork = session, tools, settings, fork
        self.variant = variant or ("trial" if session.without else "build")
        self.folder = session.store.folder("work", session.project.stack, fork, session.named(self.variant))
        self.source, self.build = self.folder / "src", self.folder / "build"

    @staticmethod
    def name(session: Session, fork: str) -> str:
        """Return the name of the lock."""
        return f"work-{session.project.stack}-{fork}"

    @cached_property
    def target(self) -> Target:
        """What the fork is compiled for and linked against."""
        return target.of(self._session, self._tools)

    @cached_property
    def room(self) -> Room:
        """Where the fork is configured and compiled: its folder, what it needs and the tools, under the same names everywhere."""
        return sandbox.room(self._places, needed=self.apart)

    @cached_property
    def _places(self) -> dict[Path, str]:
        needed = {self._needed_folder(need): f"needed/{need}" for need in self._session.project.fork(self._fork).needs}
        against = {self.target.root: "target"} if self.target.cross else {}
        return {self.folder: self._fork, self._tools.root: "tools", **against, **needed}

    def fill(self, tree: str) -> None:
        """Make the source folder hold *tree*."""
        self._session.objects.checkout(tree, self.source, self.folder / "index")

    def configure(self, launcher: Path | None) -> Configured:
        """
        Run the fork's real CMake.

        Args:
            launcher: What stands in front of each compiler call.

        Raises:
            configure-failed: CMake ended with an error.
            tool-missing: The headers of this Python, which extension modules are compiled against, are not installed.
        """
        renamed = {} if self.room.places else {folder.absolute(): sandbox.INSIDE / name for folder, name in self._places.items()}
        defines = version_label.flags(self.defines(), renamed)
        if launcher:
            command = f"{self._tools.python};-IS;{launcher}"
            defines |= {"CMAKE_CUDA_COMPILER_LAUNCHER": command, "CMAKE_CXX_COMPILER_LAUNCHER": command}
        if "VLLM_PYTHON_EXECUTABLE" in defines:
            _require_python_headers()
        rules = source_tree.rules_of(self._session)
        log = self._session.store.folder("logs") / f"{self._session.project.stack}-{self._fork}-configure-{self.variant}.log"
        self._leave_moved()
        with console.step(f"configure {self._fork}"):
            return configure.configure(
                self.source, self.build, defines=self._translated(defines), env=self.environment(), log=log,
                targets=tuple(self._settings.targets), cmake=self._tools.tool("cmake"), what=f"{self._fork} does not configure.",
                traced={"CMakeLists.txt", *(rule.file for rule in rules.rules if rule.fork == self._fork)}, room=self.room,
            )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the variables of configure and compile, as the room has them."""
        return self._translated(self._tools.environment(**{**self.target.environment(self._tools), **self._settings.variables}))

    def _translated(self, values: Mapping[str, str]) -> dict[str, str]:
        return {name: self.room.translated(value) for name, value in values.items()}

    def _leave_moved(self) -> None:
        """Empty a build folder whose files name its sources by another path: CMake refuses it, and its commands would miss."""
        cache = self.build / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={self.room.inside(self.source)}\n" not in cache.read_text("utf-8"):
            console.note(f"{self._fork}: its build folder was made under another path; it is made anew")
            shutil.rmtree(self.build)
            self.build.mkdir()

    def defines(self) -> dict[str, str]:
        """Return the CMake cache entries, every ``{…}`` replaced by its folder."""
        places = {"{python}": str(self._tools.python), "{cuda}": str(self.target.cuda), "{build}": str(self.build)}
        for need in self._session.project.fork(self._fork).needs:
            places[f"{{source:{need}}}"] = str(self._needed(source_tree.make(self._session, need)))
        entries = {"CMAKE_MAKE_PROGRAM": str(self._tools.tool("ninja")), **self.target.defines(), **self._settings.defines}
        return {name: _filled(value, places) for name, value in entries.items()}

    def _needed(self, source: SourceTree) -> Path:
        """Return a folder that holds the tree of a fork that this one reads; one place for all variants, updated like a workspace."""
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
        raise FileError("file-invalid", f"environment.yaml has an unknown place in {value!r}.", details=[f"known: {', '.join(places)}"])
    return value


def _require_python_headers() -> None:
    if not toolchain.python_header().exists():
        todo = "Install the headers of this Python: sudo apt-get install python3-dev"
        raise CommandError("tool-missing", f"{toolchain.python_header()} is not there.", todo=todo)
