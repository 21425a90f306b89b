"""
The folder in which a fork is compiled; its files change only if the tree does, so that ninja
compiles no more than that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sparkwright.builder import configure, source_tree, vendored
from sparkwright.builder.compile import ninja
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.sandbox import INSIDE, Sandbox
from sparkwright.builder.errors import BuildError
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.forks.context import RunContext

#: nvcc's options for names that are the same in every run.
NVCC_NAMES = ("--objdir-as-tempdir", "--frandom-seed=sparkwright")


class Workspace:
    """
    The folder of one fork; callers hold its lock (`Store.lock` of `name`).

    Args:
        variant: Distinguishes the folders of a fork. A plan without the rules has one of its own,
            since CMake writes sources that depend on the arch, and the real build would have to
            compile those again. So has a build with the vendored sources.
    """

    def __init__(
        self,
        context: RunContext,
        tools: toolchain.Toolchain,
        fork: str,
        variant: str = "build",
    ) -> None:
        self._context, self._tools, self._fork = context, tools, fork
        #: Those of the fork for this run.
        self.settings = toolchain.settings(context, fork)
        self.variant = f"vendored-{variant}" if self.settings.needs_vendored else variant
        self.folder = self._folder(fork, context.named(self.variant))
        self.source, self.build = self.folder / "src", self.folder / "build"
        #: The tools, with the libraries of the machine that wheels are made for.
        self.target = toolchain.target(context, tools)
        #: The folder, its needs and the tools, under the same names on every machine.
        self.sandbox = Sandbox.create(self._mounts(), needed=self.settings.needs_vendored)

    @staticmethod
    def name(context: RunContext, fork: str) -> str:
        """Return the name of the lock."""
        return f"work-{context.project.stack}-{fork}"

    def _folder(self, fork: str, variant: str) -> Path:
        return self._context.store.folder("work", self._context.project.stack, fork, variant)

    def _mounts(self) -> dict[Path, str]:
        mounts = {self.folder: self._fork, self._tools.root: "tools"}
        if self.target.libraries:
            mounts[self.target.libraries] = "target"
        for need in self._context.project.fork(self._fork).needs:
            mounts[self._folder(need, "needed")] = f"needed/{need}"
        return mounts

    def fill(self, tree: str) -> None:
        """
        Make the source folder hold *tree*, and the folder of each vendored source its own.

        Raises:
            source-unresolved, source-mismatch: As `vendored.fetch`.
        """
        checkout = self._context.objects.checkout
        if self.settings.needs_vendored:
            for name, source in vendored.fetch(self._context, self._fork).items():
                folder = self.build / (vendored.FOLDER % name.lower())
                checkout(source, folder, self.folder / f"vendored-{folder.name}.index")
        checkout(tree, self.source, self.folder / "index")

    def configure(self) -> configure.Configured:
        """
        Run the fork's real CMake.

        Raises:
            configure-failed: CMake ended with an error.
            source-unlocked: CMake asked for a source that the lock does not pin.
            tool-missing: The headers of this Python, which extension modules are compiled against,
                are not installed.
        """
        context = self._context
        renamed = {} if self.sandbox.mounts else self._mounts()
        prefixes = {folder.absolute(): INSIDE / name for folder, name in renamed.items()}
        defines = reproducible_flags(self.defines(), prefixes)
        header = toolchain.python_header()
        if "VLLM_PYTHON_EXECUTABLE" in defines and not header.exists():
            todo = "Install the headers of this Python: sudo apt-get install python3-dev"
            raise CommandError("tool-missing", f"{header} is not installed.", todo=todo)
        log = f"{context.project.stack}-{self._fork}-configure-{self.variant}.log"
        # CMake cannot go on with a folder of another path or another compiler.
        record = self.folder / "configured-for"
        identity = f"{self.sandbox.sandbox_path(self.source)}\n{toolchain.compiler(context)}\n"
        fresh = not record.exists() or record.read_text("utf-8") != identity
        record.unlink(missing_ok=True)
        try:
            with console.step(f"configure {self._fork}"):
                configured = configure.configure(
                    self.source,
                    self.build,
                    defines=self._translated(defines),
                    env=self.environment(),
                    log=context.store.folder("logs") / log,
                    targets=self.settings.named_targets,
                    cmake=self._tools.tool("cmake"),
                    what=f"{self._fork} does not configure.",
                    traced=[
                        rule.file for rule in source_tree.rules_of(context).of(self._fork).rules
                    ],
                    sandbox=self.sandbox,
                    fresh=fresh,
                )
        except BuildError:
            # The name of a source that CMake could not reach says more than its message.
            self._check_downloads(complete=False)
            raise
        record.write_text(identity, "utf-8")
        self._check_downloads(complete="all" in self.settings.targets)
        return configured

    def declarations(self) -> tuple[vendored.Declaration, ...]:
        """Return the sources that the last configure would have downloaded."""
        return vendored.declarations(configure.calls(self.source, self.build, sandbox=self.sandbox))

    def _check_downloads(self, *, complete: bool) -> None:
        locked = self._context.lock.forks[self._fork]
        ignored = self._context.project.fork(self._fork).ignored
        vendored.check(self._fork, self.declarations(), locked, ignored, complete=complete)

    def environment(self) -> dict[str, str]:
        """Return the variables of configure and compile, with the paths of the sandbox."""
        return self._translated(self.target.environment(**self.settings.variables))

    def _translated(self, values: Mapping[str, str]) -> dict[str, str]:
        return {name: self.sandbox.translate(value) for name, value in values.items()}

    def defines(self) -> dict[str, str]:
        """
        Return the CMake cache entries, every ``{…}`` replaced by its folder.

        Raises:
            file-invalid: A ``{…}`` is unknown.
        """
        context, tools = self._context, self._tools
        folders = {"python": tools.python, "cuda": self.target.cuda, "build": self.build}
        for need in context.project.fork(self._fork).needs:
            # One folder for all variants, updated like a workspace.
            folder = self._folder(need, "needed")
            with context.store.lock(f"needed-{context.project.stack}-{need}"):
                tree = source_tree.make(context, need).tree
                context.objects.checkout(tree, folder / "src", folder / "index")
            folders[f"source:{need}"] = folder / "src"
        locked = context.lock.forks[self._fork]
        launcher = f"{tools.python};-IS;{ninja.install_launcher(self.folder)}"
        entries = {
            "CMAKE_CUDA_COMPILER_LAUNCHER": launcher,
            "CMAKE_CXX_COMPILER_LAUNCHER": launcher,
            "CMAKE_MAKE_PROGRAM": str(tools.tool("ninja")),
            **self.target.defines(),
            **vendored.defines(locked.fetched if self.settings.needs_vendored else ()),
            **self.settings.defines,
        }
        try:
            return {
                name: re.sub(r"\{([^{}]*)\}", lambda match: str(folders[match[1]]), value)
                for name, value in entries.items()
            }
        except KeyError as error:
            what = f"environment.yaml has an unknown placeholder {{{error.args[0]}}}."
            details = [f"known: {', '.join(folders)}"]
            raise FileError("file-invalid", what, details=details) from None


def reproducible_flags(defines: Mapping[str, str], paths: Mapping[Path, Path]) -> dict[str, str]:
    """
    Return the CMake entries *defines* with the compiler flags that keep folders and process ids out
    of objects.

    With nvcc 13.0.88 and GCC 12 (measured): without a flag, two objects of one unit differ in the
    process id that nvcc gives its intermediate files; with ``--objdir-as-tempdir`` these lie beside
    the object, named after it. A unit that defines nothing for others (it registers its operators
    by itself; three units of vLLM 0.33.0) also has the process id in the names of its kernels,
    unless there is a seed; one seed does for all, as these names hold a hash of the source's path
    besides. ``__FILE__`` follows ``-ffile-prefix-map``, in device code, too. No flag changes the
    names of device functions and variables with internal linkage, which hold a hash of their
    source's real path, so cubins of such units are equal only in folders of equal name, as
    `Sandbox.create` gives them.

    Args:
        paths: Folder → its name in objects, if programs see it by another one; empty in a sandbox
            with fixed names.
    """
    # GCC takes the last mapping that fits, so inner folders come after outer ones. A blank, a comma
    # or such would end the option.
    host = [
        f"-ffile-prefix-map={source}={name}"
        for source, name in sorted(paths.items())
        if not re.search(r"[\s,;=$\"'\\]", str(source))
    ]
    added = {
        "CMAKE_C_FLAGS": host,
        "CMAKE_CXX_FLAGS": host,
        "CMAKE_CUDA_FLAGS": [*NVCC_NAMES, *(f"-Xcompiler={flag}" for flag in host)],
    }
    joined = {
        name: " ".join([defines.get(name, ""), *more]) for name, more in added.items() if more
    }
    return {**defines, **{name: text.strip() for name, text in joined.items()}}
