"""
The sources of a build: the tree of a fork after patches and arch rules, its vendored sources, and
the folder in which they are checked out, configured and compiled.

Every step of the tree has an id. The files of the folder change only if the tree does, so that
ninja compiles no more than that.
"""

import re
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from sparkwright.builder import BuildError, configure, ninja, toolchain
from sparkwright.builder.configure import Call, Declaration, TranslationUnit
from sparkwright.builder.sandbox import Sandbox
from sparkwright.cherry_picks import series
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext

#: Bytes of a line that a message shows.
_LONGEST_LINE = 100
#: nvcc's options that keep process ids out of objects. With nvcc 13.0.88 and GCC 12 (measured):
#: without ``--objdir-as-tempdir``, two objects of one unit differ in the process id that nvcc gives
#: its intermediate files; with it these lie beside the object, named after it. A unit that defines
#: nothing for others (it registers its operators by itself; three units of vLLM 0.33.0) also has
#: the process id in the names of its kernels, unless there is a seed; one seed does for all, as
#: these names hold a hash of the source's path besides. No option changes the names of device
#: functions and variables with internal linkage, which hold a hash of their source's real path, so
#: cubins of such units are equal only in folders of equal name, as `Sandbox.create` gives them.
NVCC_NAMES = " --objdir-as-tempdir --frandom-seed=sparkwright"


# Arch rules.


class ArchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One rewrite.

    Attributes:
        source: The vendored source that holds the file; empty for the fork's own tree.
        file: Path inside the source tree.
        before: The text as upstream wrote it, from the name of the list on.
        after: The same text with more elements.
        drop_when: The change upstream after which the rule is no longer needed.
    """

    name: str
    fork: str
    file: str
    before: strict_yaml.Prose
    after: strict_yaml.Prose
    reason: strict_yaml.Prose
    drop_when: strict_yaml.Prose
    source: str = ""

    def __post_init__(self) -> None:
        if self.before == self.after:
            raise ValueError(f"{self.name}: `before` and `after` are the same text")


class DroppedUnit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A unit that is not compiled, because a rule empties its list.

    Attributes:
        unit: Path inside the source tree.
    """

    fork: str
    unit: str
    reason: strict_yaml.Prose


class ArchException(DroppedUnit, frozen=True, forbid_unknown_fields=True):
    """
    A unit that stays at another arch, as a reviewed decision.

    Attributes:
        gencode: The virtual arch of every gencode of the unit, such as ``compute_89``; ``default``
            for host code that CMake gives none.
    """

    gencode: Annotated[str, msgspec.Meta(pattern=r"^(compute_[0-9]+[af]?|default)$")]


class ArchRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``build/<stack>/archs.yaml``."""

    rules: tuple[ArchRule, ...] = ()
    kept: tuple[ArchException, ...] = ()
    dropped: tuple[DroppedUnit, ...] = ()


class Site(msgspec.Struct, frozen=True):
    """A place that a rule changed: its line, and its text *before* and *after*."""

    rule: str
    file: str
    line: int
    before: str
    after: str


def rewrite(
    read: Callable[[str], bytes | None], rules: Sequence[ArchRule], source: str = ""
) -> tuple[dict[str, bytes], tuple[Site, ...]]:
    """
    Return the changed files, and the sites in the order of *rules*.

    Args:
        read: Returns the bytes of a file of the source tree, None if there is none.
        source: The vendored source whose *rules* apply; empty for the fork's own tree.

    Raises:
        rule-mismatch: A rule's text does not occur exactly once.
    """
    changed: dict[str, bytes] = {}
    sites: list[Site] = []
    for rule in rules:
        if rule.source != source:
            continue
        data = changed.get(rule.file) or read(rule.file) or b""
        before, after = rule.before.encode(), rule.after.encode()
        count = data.count(before)
        if count != 1:
            raise BuildError(
                "rule-mismatch",
                f"The text of rule {rule.name} occurs {count} times in {rule.file}, not once.",
                details=[f"expected: {rule.before}", *_near_misses(rule, data)],
                todo="See where upstream moved the list, or whether upstream has done what the "
                f"rule does. It may go when: {rule.drop_when}",
            )
        line = data[: data.index(before)].count(b"\n") + 1
        changed[rule.file] = data.replace(before, after)
        old, new = " ".join(rule.before.split()), " ".join(rule.after.split())
        file = f"{rule.source}/{rule.file}" if rule.source else rule.file
        sites.append(Site(rule.name, file, line, old, new))
    return changed, tuple(sites)


def _near_misses(rule: ArchRule, data: bytes) -> list[str]:
    """Return the lines of *data* that hold the name of the list that *rule* changes."""
    name, lines = rule.before.split()[0], data.decode("utf-8", "replace").splitlines()
    near = [
        f"{rule.file}:{number}: {line.strip()[:_LONGEST_LINE]}"
        for number, line in enumerate(lines, 1)
        if name in line
    ]
    return near or [f"{rule.file} does not hold {name}"]


# Folders.


class Workspace:
    """
    The folder of one fork; callers hold its lock (`Store.lock` of `name`).

    Args:
        variant: Distinguishes the folders of a fork. A plan without the rules has one of its own,
            since CMake writes sources that depend on the arch, and the real build would have to
            compile those again. So has a build with all vendored sources.
    """

    def __init__(
        self,
        context: RunContext,
        tools: toolchain.Toolchain,
        fork: str,
        variant: str = "build",
    ) -> None:
        self._context, self._tools, self._fork = context, tools, fork
        #: The settings of the fork for this run.
        self.settings = toolchain.settings(context, fork)
        self.variant = f"vendored-{variant}" if self.settings.needs_upstream_cmake else variant
        self.folder = self._folder(fork, context.qualified(self.variant))
        self.source, self.build = self.folder / "src", self.folder / "build"
        #: The tools of this machine, with the libraries of the machine that wheels are made for.
        self.target = toolchain.target(context, tools)
        # A build sees its folders by names that are the same on every machine.
        names = {self.folder: fork, **self.target.mounts}
        for need in context.project.fork(fork).needs:
            names[self._folder(need, "needed")] = f"needed/{need}"
        self.sandbox = Sandbox.create(names, needed=self.settings.needs_upstream_cmake)

    @staticmethod
    def name(context: RunContext, fork: str) -> str:
        """Return the name of the lock of the folders of *fork*."""
        return f"work-{context.project.stack}-{fork}"

    def _folder(self, fork: str, variant: str) -> Path:
        return self._context.store.folder("work", self._context.project.stack, fork, variant)

    def fill(self, tree: str, rules: Sequence[ArchRule] = ()) -> tuple[Site, ...]:
        """
        Make the source folder hold *tree*, and the folder of each vendored source its own; return
        the places that *rules* change in the latter.

        Raises:
            rule-mismatch, source-mismatch, source-unresolved, source-unreachable, offline: As
                `vendored_trees`.
        """
        objects, changed, folders = self._context.objects, list[Site](), set[Path]()
        trees = vendored_trees(self._context, self._fork, self.settings.sources, rules)
        for name, (vendored, sites) in trees.items():
            folder = self.build / configure.vendored_folder(name)
            folders.add(folder)
            objects.checkout(vendored, folder, self.folder / f"vendored-{folder.name}.index")
            for site in sites:
                console.note(f"{site.file}:{site.line}  {site.rule}: {site.before} → {site.after}")
            changed += sites
        # CMake would take the folder of a source that this run does not want.
        for folder in {*self.build.glob(configure.vendored_folder("*"))} - folders:
            (self.folder / f"vendored-{folder.name}.index").unlink(missing_ok=True)
            shutil.rmtree(folder)
        objects.checkout(tree, self.source, self.folder / "index")
        return tuple(changed)

    def configure(self) -> list[TranslationUnit]:
        """
        Run the fork's real CMake, and return the units that it would compile.

        Raises:
            configure-failed: CMake ended with an error.
            source-unlocked: CMake asked for a source that the lock does not pin.
        """
        context = self._context
        # CMake cannot go on with a folder of another path or another compiler.
        record = self.folder / "configured-for"
        identity = f"{self.sandbox.sandbox_path(self.source)}\n{toolchain.compiler(context)}\n"
        fresh = not record.exists() or record.read_text("utf-8") != identity
        record.unlink(missing_ok=True)
        try:
            with console.step(f"configure {self._fork}"):
                units = configure.configure(
                    self.source,
                    self.build,
                    defines=self.defines(),
                    env=self.environment(),
                    log=context.store.folder("logs").joinpath(
                        f"{context.project.stack}-{self._fork}-configure-{self.variant}.log"
                    ),
                    targets=self.settings.named_targets,
                    cmake=self._tools.tool("cmake"),
                    what=f"{self._fork} does not configure.",
                    sandbox=self.sandbox,
                    fresh=fresh,
                )
        except BuildError:
            # The name of a source that CMake could not reach says more than its message.
            self._check_downloads()
            raise
        record.write_text(identity, "utf-8")
        self._check_downloads()
        return units

    def calls(self) -> list[Call]:
        """Return the calls of the last configure."""
        return configure.calls(self.source, self.build, sandbox=self.sandbox)

    def _check_downloads(self) -> None:
        configure.check_vendored(
            self._fork,
            self.declarations(),
            self._context.lock.forks[self._fork],
            self._context.project.fork(self._fork).ignored,
            self.settings.sources,
        )

    def declarations(self) -> tuple[Declaration, ...]:
        """Return the sources that the last configure asked for, as `configure.declarations`."""
        fetched = self._context.lock.forks[self._fork].fetched
        return configure.declarations(
            self.calls(), {name: fetched[name] for name in self.settings.sources}
        )

    def environment(self) -> dict[str, str]:
        """Return the variables of configure and compile."""
        return self.target.environment(**self.settings.variables)

    def defines(self) -> dict[str, str]:
        """
        Return the CMake cache entries, every ``{…}`` replaced by its folder.

        Raises:
            file-invalid: A ``{…}`` is unknown.
        """
        context, tools = self._context, self._tools
        folders = {"python": tools.tool("python"), "cuda": self.target.cuda, "build": self.build}
        for need in context.project.fork(self._fork).needs:
            # One folder for all variants, updated like a workspace.
            folder = self._folder(need, "needed")
            with context.store.lock(f"needed-{context.project.stack}-{need}"):
                context.objects.checkout(
                    source_tree(context, need).tree, folder / "src", folder / "index"
                )
            folders[f"source:{need}"] = folder / "src"
        launcher = f"{tools.tool('python')};-IS;{ninja.install_launcher(self.folder)}"
        entries = {
            "CMAKE_CUDA_COMPILER_LAUNCHER": launcher,
            "CMAKE_CXX_COMPILER_LAUNCHER": launcher,
            "CMAKE_MAKE_PROGRAM": str(tools.tool("ninja")),
            **self.target.defines(),
            # FetchContent asks no host, and takes the vendored sources from their folders.
            "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
            "FETCHCONTENT_BASE_DIR": f"{{build}}/{configure.DEPS}",
        }
        for name in self.settings.sources:
            source_folder = f"{{build}}/{configure.vendored_folder(name)}"
            entries[f"FETCHCONTENT_SOURCE_DIR_{name.upper()}"] = source_folder
        entries |= self.settings.defines
        entries["CMAKE_CUDA_FLAGS"] = (entries.get("CMAKE_CUDA_FLAGS", "") + NVCC_NAMES).strip()
        try:
            return {
                name: re.sub(r"\{([^{}]*)\}", lambda match: str(folders[match[1]]), value)
                for name, value in entries.items()
            }
        except KeyError as error:
            raise FileError(
                "file-invalid",
                f"environment.yaml has an unknown placeholder {{{error.args[0]}}}.",
                details=[f"known: {', '.join(folders)}"],
            ) from None


def vendored_trees(
    context: RunContext, fork: str, names: Collection[str], rules: Sequence[ArchRule]
) -> dict[str, tuple[str, tuple[Site, ...]]]:
    """
    Fetch the sources *names* that FetchContent would download for *fork*; return the tree of each
    after its *rules*, and the places that they change.

    Raises:
        rule-mismatch: As `rewrite`.
        source-mismatch, source-unresolved, source-unreachable, offline: As `fetch.vendored_tree`.
    """
    trees = dict[str, tuple[str, tuple[Site, ...]]]()
    objects, locked = context.objects, context.lock.forks[fork].vendored
    ignored = context.project.fork(fork).ignored
    for name in names:
        with console.step(f"bring {name}, which {fork} vendors"), context.store.lock("objects"):
            tree = fetch.vendored_tree(context, fork, name, locked, ignored)
        files, sites = rewrite(partial(objects.blob, tree), rules, name)
        trees[name] = (objects.with_files(tree, files) if files else tree), sites
    return trees


class SourceTree(msgspec.Struct, frozen=True):
    """
    The source of a build.

    Attributes:
        patched: Tree id after the series.
        tree: Tree id after the arch rules, too.
        steps: The patches, each with the tree after it.
        sites: The places that the rules changed.
    """

    fork: str
    source: fetch.FetchedSource
    patched: str
    tree: str
    steps: tuple[AppliedPatch, ...]
    sites: tuple[Site, ...]


def rules_of(context: RunContext, fork: str) -> ArchRules:
    """Return the arch rules of *fork*; raise `file-invalid` if their file is malformed."""
    path = context.project.build_folder / f"archs{context.project.suffix}.yaml"
    rules = strict_yaml.load(path, ArchRules)
    return ArchRules(
        rules=tuple(rule for rule in rules.rules if rule.fork == fork),
        kept=tuple(entry for entry in rules.kept if entry.fork == fork),
        dropped=tuple(entry for entry in rules.dropped if entry.fork == fork),
    )


def source_tree(context: RunContext, fork: str) -> SourceTree:
    """
    Return the source tree of *fork*, and record its id for the gates (`RunContext.source_inputs`).

    Raises:
        patch-conflict, patch-no-effect, rule-mismatch, and what fetching raises.
    """
    source = fetch.recorded_source(context, fetch.fetch(context, fork))
    patched = series.apply_series(context, source)
    rules = rules_of(context, fork)
    tree, sites = patched.tree, tuple[Site, ...]()
    own = [rule for rule in rules.rules if not rule.source]
    _check_rule_sources(context, fork, rules)
    if own:
        with console.step(f"rewrite {fork}: {len(own)} rules"):
            files, sites = rewrite(partial(context.objects.blob, tree), own)
            tree = context.objects.with_files(tree, files)
            for site in sites:
                console.note(f"{site.file}:{site.line}  {site.rule}: {site.before} → {site.after}")
    context.store.put("source-tree", context.source_inputs(fork), tree)
    return SourceTree(fork, source, patched.tree, tree, patched.steps, sites)


def _check_rule_sources(context: RunContext, fork: str, rules: ArchRules) -> None:
    """Raise `rule-mismatch` if a rule is for a vendored source that *fork* does not have."""
    vendored = {*context.lock.forks[fork].fetched}
    for external in toolchain.spec(context.project).forks[fork].external.values():
        vendored.update(external.sources)
    for rule in rules.rules:
        if rule.source and rule.source not in vendored:
            raise BuildError(
                "rule-mismatch",
                f"Rule {rule.name} is for a vendored source that {fork} does not have.",
                details=[f"source: {rule.source}", f"vendored: {', '.join(sorted(vendored))}"],
            )
