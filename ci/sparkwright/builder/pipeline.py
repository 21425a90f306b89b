"""
From the reviewed data to a wheel, once: the same inputs give the wheel that is in the store.

The key of a build is made of reviewed files and of what this machine is, so that "nothing changed"
is known without git, a network or a compiler; when something changed, the build says what.

A label is ``STACK.pINPUTS.cuCUDA``, such as ``spark.2026.11.p1a2b3c4d.cu130``. Equal inputs have
equal labels on every machine, and changed inputs have another, so that no installer and no cache
that is named after a version takes one build for another. Digests have no order, and installers
take the highest version: raise the label in stack.yaml (``spark.2026.11.1``) before a build that is
to follow a release of the same stack, or publishing refuses it.
"""

import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.builder import BuildError, configure, ninja, pins, plan, pylock, toolchain
from sparkwright.builder.sandbox import Sandbox
from sparkwright.builder.wheel import archive, graft, sbom
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.builder.workspace import (
    SourceTree,
    Workspace,
    rules_of,
    source_tree,
    vendored_trees,
)
from sparkwright.cherry_picks import series
from sparkwright.core.console import console, size
from sparkwright.core.errors import WheelError
from sparkwright.core.files import content_key, list_folder, sha256_file
from sparkwright.core.git import blob_id
from sparkwright.core.store import replacing, translate_disk_full
from sparkwright.core.zips import record_sha256, zip_file, zip_members
from sparkwright.forks import fetch, package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import FileLock, SourceError

#: Part of a wheel's key: raise it when equal inputs give another wheel.
LAYOUT = 10

#: The hook is called as PEP 517 says; its working directory is the source tree, which is first on
#: its path where it asks for that.
_HOOK = """\
import importlib, os, sys, tomllib
os.chdir(sys.argv[2])
with open("pyproject.toml", "rb") as stream:
    system = tomllib.load(stream)["build-system"]
for entry in reversed(system.get("backend-path", [])):
    sys.path.insert(0, os.path.join(os.getcwd(), entry))
name = system.get("build-backend", "setuptools.build_meta:__legacy__")
module, _, attribute = name.partition(":")
backend = importlib.import_module(module)
for part in filter(None, attribute.split(".")):
    backend = getattr(backend, part)
print("wheel:", backend.build_wheel(sys.argv[1]))
"""

_VERSION_HEADER, _LICENCE = "include/cutlass/version.h", "LICENSE.txt"
#: Folder of the tree → its folder in the wheel.
_FOLDERS = {
    "include": "{package}/include",
    "tools/util/include": "{package}/tools/util/include",
    "python/cutlass_library": "cutlass_library",
}

_MACRO = re.compile(rb"#define CUTLASS_(MAJOR|MINOR|PATCH) +(\d+)")

_MODULE = '''"""CUTLASS {version}: the folders of its headers."""

from pathlib import Path

__version__ = "{version}"

#: Give both to the compiler with -I.
INCLUDE = Path(__file__).parent / "include"
TOOLS_INCLUDE = Path(__file__).parent / "tools" / "util" / "include"
'''

_METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: CUTLASS headers as sparkwright builds with them, patched and pinned
License-Expression: BSD-3-Clause
Requires-Python: >=3.8
"""


class BuiltWheel(msgspec.Struct, frozen=True):
    """
    A finished wheel.

    Attributes:
        key: The digest of its inputs.
        counts: For a graft, CUDA units by verdict of the plan.
    """

    fork: str
    key: str
    filename: str
    sha256: str
    size: int
    counts: dict[str, int] = {}


class LastBuild(msgspec.Struct, frozen=True):
    """
    The last build of a fork into an output folder: the digests of its inputs by name, and its
    wheel.
    """

    inputs: dict[str, str]
    wheel: BuiltWheel


class BuildRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    ``sparkwright.json`` in the wheel: its sources, and the origin of every library. It holds no
    path, date or job count.

    The key of the build is not in it: ``--source auto`` and ``git`` have different keys and may
    give the same wheel.

    Attributes:
        inputs: The reviewed files and choices, as `inputs` digests them, without those of the
            machine.
        targets: The CMake targets that were compiled; this and the rest are of a graft alone.
        unlocked: External projects that were not compiled, each with the reason.
        plan: The key of the plan.
        base: The sha256 of the official wheel.
        tools: The address of the tools.
        compiler: Version of the host compiler, as it states it.
        isolation: `Sandbox.kind`.
        counts: CUDA units by verdict of the plan.
        units: The unit manifest.
        transplant: The changes in the base.
        deviations: Sources of other releases than upstream pins, each with the reason.
        needs: The sources of the forks whose trees the build reads.
    """

    sparkwright: str
    stack: str
    arch: str
    source: SourceTree
    inputs: dict[str, str]
    targets: tuple[str, ...] = ()
    unlocked: dict[str, str] = {}
    plan: str = ""
    base: str = ""
    tools: str = ""
    compiler: str = ""
    isolation: str = ""
    counts: dict[str, int] = {}
    units: tuple[archive.CompiledUnit, ...] = ()
    transplant: graft.GraftManifest | None = None
    deviations: tuple[str, ...] = ()
    needs: tuple[fetch.FetchedSource, ...] = ()


def inputs(context: RunContext, fork: str) -> dict[str, str]:
    """
    Return everything that determines a build of *fork*: name for people → digest. Which sources
    are in place of git is known once they are fetched.
    """
    project, stack = context.project, context.project.stack
    concerned = (fork, *project.fork(fork).needs)
    settings = toolchain.settings(context, fork)
    parts, substitutes = dict[str, object](), dict[str, str]()
    # The build record lists the inputs in this order.
    for name in concerned:
        parts[f"forks/{stack}/lock.yaml ({name})"] = context.lock.forks[name]
        fetched = fetch.recorded(context, name)
        if fetched and fetched.git_error:
            substitutes[name] = fetched.git_error
    for name in concerned:
        paths = filter(Path.is_file, list_folder(project.series_folder(name)))
        parts[f"forks/{stack}/{name}/series"] = {path.name: sha256_file(path) for path in paths}
        parts[f"cherry_picks/{name}.yaml"] = series.pick_pins(context, name)
    parts |= {
        # The targets are an input whether stack.yaml or an option names them.
        f"forks/{stack}/stack.yaml": (
            project.spec.arch,
            project.spec.label,
            msgspec.structs.replace(project.fork(fork), targets=()),
        ),
        f"build/{stack}/archs.yaml": [rules_of(context, name) for name in concerned],
        f"build/{stack}/environment.yaml": msgspec.structs.replace(settings, targets=()),
        f"build/{stack}/pylock.toml": sha256_file(project.build_folder / "pylock.toml"),
        "--source": context.source,
        "sources in place of git": substitutes,
        "this machine": (
            platform.machine(),
            platform.python_version(),
            toolchain.compiler(context),
        ),
        "--target": context.machine,
        "--targets": settings.targets,
        "sparkwright": (__version__, LAYOUT, toolchain.ADDITIONS),
    }
    return {name: content_key("input", part) for name, part in parts.items()}


def reviewed(parts: dict[str, str]) -> dict[str, str]:
    """Return those of the inputs *parts* that are the same on every machine."""
    shared = ("sparkwright", "--targets")
    return {name: part for name, part in parts.items() if "/" in name or name in shared}


def _needed(context: RunContext, source: SourceTree) -> list[SourceTree]:
    """Return the sources of the forks whose trees a build of *source* reads."""
    return [source_tree(context, need) for need in context.project.fork(source.fork).needs]


def version_label(context: RunContext, source: SourceTree) -> str:
    """
    Return the local version label of builds of *source*: stack, digest of the inputs that are the
    same on every machine, and CUDA release.

    Raises:
        file-invalid: pylock.toml does not lock one CUDA release.
    """
    trees = [source, *_needed(context, source)]
    digest = content_key("wheel-version", (reviewed(inputs(context, source.fork)), trees))
    # A letter first: PEP 440 would take a segment of digits alone for a number, and drop its zeros.
    parts = (context.project.spec.label, f"p{digest[:8]}", pylock.cuda(context.project))
    return ".".join(filter(None, parts))


def deviations(context: RunContext, source: SourceTree) -> Iterator[str]:
    """Yield a sentence for each source of a build that is another release than upstream pins."""
    for tree in (source, *_needed(context, source)):
        if text := fetch.deviation(context.project, tree.source):
            yield f"{source.fork} {'packs' if tree is source else 'compiles against'} {text}."


def dist_info(
    context: RunContext,
    name: WheelName,
    source: SourceTree,
    base: FileLock | None = None,
    sources: Sequence[str] = (),
    **compiled: Any,
) -> dict[str, bytes]:
    """
    Return the files that sparkwright adds to the ``.dist-info`` of the wheel *name*, made of
    *source*: the build record and the bill of materials, by their path in it.

    Args:
        base: The official wheel under a graft.
        sources: The vendored sources that were compiled, as the lock names them; those below them
            count, too.
        compiled: Fields of the record that describe the compiling.

    Raises:
        file-invalid: pylock.toml cannot be read.
    """
    project, needs = context.project, _needed(context, source)
    record = BuildRecord(
        __version__,
        project.stack,
        project.spec.arch,
        source,
        reviewed(inputs(context, source.fork)),
        base=base.sha256 if base else "",
        deviations=tuple(deviations(context, source)),
        needs=tuple(need.source for need in needs),
        **compiled,
    )
    manifest = record.transplant or graft.GraftManifest({}, (), (), {})
    # Submodules are part of a git source; in an archive of the package index they are covered by
    # its hash.
    vendored = dict(source.source.submodules)
    for part, entry in context.lock.forks[source.fork].vendored.items():
        if part.split("/")[0] in sources:
            vendored[part] = entry
    bill = sbom.document(
        name,
        source=source,
        needs=needs,
        bases=[(base.name, base.filename, base.sha256)] if base else [],
        vendored=vendored,
        # A wheel in which nothing was compiled is the same from every machine.
        tools=pylock.named(project, pylock.NVCC) if record.transplant else [],
        compiled=manifest.libraries,
        inherited={member: record_sha256(digest) for member, digest in manifest.base.items()},
        trimmed=manifest.trimmed,
        properties={
            "stack": project.stack,
            "fork": source.fork,
            "built": project.fork(source.fork).build,
            "arch": project.spec.arch,
            "cuda": pylock.cuda(project) if record.transplant else "",
            "left_out": ", ".join(manifest.left_out),
            "compiler": record.compiler,
        },
    )
    return {BUILD_RECORD: msgspec.json.format(msgspec.json.encode(record)), SBOM: bill}


# Wheels in the store.


def _stored(context: RunContext, parts: dict[str, str]) -> BuiltWheel | None:
    """Return the wheel that was made from the inputs *parts*, if the store holds its bytes."""
    built = context.store.get("wheel", content_key("wheel", parts), BuiltWheel)
    if built and (path := _stored_path(context, built)).exists():
        if sha256_file(path) == built.sha256:
            return built
        console.warn(f"{path} is damaged, and not used")
    return None


def current(context: RunContext, fork: str) -> BuiltWheel | None:
    """Return the wheel that a build of *fork* would take from the store; None if it would build."""
    return _stored(context, inputs(context, fork))


def last_wheel(context: RunContext, fork: str) -> Path | None:
    """Return the last wheel of *fork* if its inputs are current and the file still exists."""
    built = current(context, fork)
    path = wheel_path(context, built) if built else None
    return path if path and path.exists() else None


def wheel_path(context: RunContext, built: BuiltWheel) -> Path:
    """Return the path of the wheel in the output folder."""
    return context.output / built.filename


def _stored_path(context: RunContext, built: BuiltWheel) -> Path:
    return context.store.root / "wheels" / built.sha256 / built.filename


def _last_key(context: RunContext, fork: str) -> str:
    output = content_key("output", str(context.output))[:8]
    return f"{context.qualified(f'{context.project.stack}-{fork}')}-{output}"


def _publish(context: RunContext, built: BuiltWheel, parts: dict[str, str]) -> None:
    """Put the wheel *built* into the output folder, in place of the last one of its fork."""
    key = _last_key(context, built.fork)
    last = context.store.get("last", key, LastBuild)
    source, path = _stored_path(context, built), wheel_path(context, built)
    if last is None or last.wheel != built:
        # `pip install dist/*.whl` must not meet two builds of one release, whenever this run ends.
        if last and last.wheel.filename != built.filename:
            wheel_path(context, last.wheel).unlink(missing_ok=True)
        context.store.put("last", key, LastBuild(parts, built))
    if not (path.exists() and path.samefile(source)):
        with translate_disk_full(context.output), replacing(path) as temporary:
            try:
                os.link(source, temporary)
            except OSError:  # another file system
                shutil.copyfile(source, temporary)


# Building.


def build(context: RunContext, fork: str) -> BuiltWheel:
    """
    Return the wheel of *fork*, built if the store has none of the same inputs, and placed in the
    output folder.

    Raises:
        early-check-failed: As `check_output`.
        target-empty, arch-mismatch, compile-failed, base-mismatch, and the errors of the earlier
            stages.
    """
    check_output(context)
    with context.store.lock(Workspace.name(context, fork)):
        if current(context, fork) is None:
            check_vendored(context, fork)
            for name in (fork, *context.project.fork(fork).needs):
                fetch.fetch(context, name)
        parts = inputs(context, fork)
        if built := _stored(context, parts):
            console.note(f"{fork}: {built.filename}, reused: nothing changed")
        else:
            last = context.store.get("last", _last_key(context, fork), LastBuild)
            if changed := [part for part in parts if last and last.inputs.get(part) != parts[part]]:
                console.note(f"{fork}: rebuilding: {', '.join(changed)} changed")
            built = _build(context, fork, content_key("wheel", parts))
            console.note(f"{fork}: {built.filename}, {size(built.size)}")
        _publish(context, built, parts)
    return built


def _build(context: RunContext, fork: str, key: str) -> BuiltWheel:
    """Build the wheel of *fork*, and put it into the store under *key*."""
    work = context.store.folder("work", context.project.stack, fork)
    with context.store.building(work / "out") as folder:
        source, counts = source_tree(context, fork), dict[str, int]()
        for sentence in deviations(context, source):
            console.note(sentence)
        label = version_label(context, source)
        kind = context.project.fork(fork).build
        if kind == "graft":
            path, counts = _graft(context, source, label, folder)
        else:
            check_source(context, source)
            build_wheel = build_headers if kind == "headers" else build_by_backend
            path = build_wheel(context, source, label, folder)
        built = BuiltWheel(fork, key, path.name, sha256_file(path), path.stat().st_size, counts)
        with context.store.building(_stored_path(context, built).parent) as stored:
            wheel = path.rename(stored / path.name)
            # The output folder holds a hard link to this file: prevent a change by accident.
            wheel.chmod(wheel.stat().st_mode & ~0o222)
    context.store.put("wheel", key, built)
    return built


def _graft(
    context: RunContext, source: SourceTree, label: str, folder: Path
) -> tuple[Path, dict[str, int]]:
    """Write the graft of *source* to *folder*; return its path, and its units by verdict."""
    fork, settings = source.fork, toolchain.settings(context, source.fork)
    locked = context.lock.forks[fork].bases.get(context.machine)
    if locked is None:
        raise SourceError(
            "not-provided",
            f"Stack {context.project.stack} locks no base wheel of {fork} for {context.machine}.",
        )
    base = package_index.obtain_locked(context, locked)
    check_source(context, source, base)
    tools = toolchain.obtain(context)
    with console.step(f"graft {fork} onto {locked.filename}"):
        plans = plan.obtain(context, tools, source, configured=True)
        plan.show(plans)
        plan.check(plans)
        workspace = Workspace(context, tools, fork)
        libraries = configure.libraries(workspace.build)
        settings = _without_empty(context, fork, settings, libraries)
        members = graft.replaced_members(base, libraries, settings)
        omitted = graft.omissions(base, context.project.spec.arch, members, settings)
        ninja.BuildFolder(
            context, tools, fork, workspace.folder, workspace.sandbox, workspace.environment()
        ).compile(settings.targets, ninja.shipped_costs(context, fork))
        changes, manifest = graft.changes(
            context, source, base, workspace.build, members, omitted, settings
        )
        compiled = {name: changes[name] for name in manifest.libraries}
        official = WheelName.parse(base.name)
        # Raised if the libraries compiled here need a newer system.
        platform = graft.platform_tag(official.tag.rpartition("-")[2], compiled.values())
        name = official.labelled(label, platform)
        files = dist_info(
            context,
            name,
            source,
            locked,
            settings.sources,
            targets=settings.targets,
            unlocked=settings.unlocked,
            plan=plans.key,
            tools=tools.key,
            compiler=toolchain.compiler(context),
            counts=plans.after.counts,
            transplant=manifest,
            isolation=workspace.sandbox.kind,
            units=graft.unit_manifest(workspace.build, plans.after.units, libraries, members),
        )
        path = archive.rewrite(
            base,
            folder,
            name,
            replace=changes,
            remove={*manifest.removed, *omitted.files} - changes.keys(),
            version_files=settings.version_files,
            requires=manifest.requires,
            dist_info=files,
        )
    console.note(
        f"{len(manifest.libraries)} libraries compiled here, {len(manifest.base)} from the base, "
        f"{len(manifest.replaced)} files replaced"
    )
    return path, plans.after.counts


def _without_empty(
    context: RunContext,
    fork: str,
    settings: toolchain.ForkEnvironment,
    libraries: Iterable[configure.CMakeLibrary],
) -> toolchain.ForkEnvironment:
    """
    Return *settings* without the targets of external projects that CMake makes no library of, and
    without the sources of projects that are not compiled at all then.

    Raises:
        target-empty: It makes none of a target that is asked for by name, or of the core.
    """
    empty = {*settings.named_targets} - {library.target for library in libraries}
    required = toolchain.named_targets(context, fork) or settings.core_targets
    unlocked, arch, idle = dict(settings.unlocked), context.project.spec.arch, set[str]()
    if refused := sorted(empty.intersection(required)):
        raise BuildError(
            "target-empty", f"CMake makes no library of {', '.join(refused)} for {arch}."
        )
    for name, external in settings.external.items():
        if targets := sorted(empty.intersection(external.targets)):
            unlocked[name] = f"CMake makes no library of {', '.join(targets)} for {arch}"
            console.note(f"{fork}: {name} is not compiled: {unlocked[name]}")
            idle |= {*external.sources} if empty.issuperset(external.targets) else set()
    return msgspec.structs.replace(
        settings,
        targets=tuple(sorted({*settings.targets} - empty)),
        sources=tuple(sorted({*settings.sources} - idle)),
        unlocked=unlocked,
    )


# Wheels that are made of a source tree alone.


def build_by_backend(context: RunContext, source: SourceTree, label: str, output: Path) -> Path:
    """
    Build the wheel of *source* into *output*, its version with the local *label*.

    Raises:
        build-failed: The backend failed, or made no wheel.
        build-downloads: It tried to download something, even if it went on without it.
    """
    fork, settings = source.fork, toolchain.settings(context, source.fork)
    tools = toolchain.obtain(context)
    work = context.store.folder("work", context.project.stack, fork)
    log = context.store.folder("logs") / f"{context.project.stack}-{fork}-build.log"
    with (
        context.store.building(work / "tree") as tree,
        context.store.building(work / "wheel") as scratch,
        console.step(f"build {fork} with its own backend"),
    ):
        context.objects.archive(source.tree, tree)
        Sandbox.create({tree: f"{fork}/src", scratch: f"{fork}/wheel", tools.root: "tools"}).run(
            [tools.tool("python"), "-c", _HOOK, scratch, tree],
            cwd=tree,
            env=tools.environment(PIP_NO_INDEX="1", **settings.variables),
            log=log,
            failure=partial(BuildError, "build-failed"),
            what=f"{fork}'s build backend failed.",
        )
        wheels = list(scratch.glob("*.whl"))
        if len(wheels) != 1:
            raise BuildError(
                "build-failed",
                f"{fork}'s build backend made {len(wheels)} wheels instead of one.",
                details=[f"full log: {log}"],
            )
        name = WheelName.parse(wheels[0].name).labelled(label)
        return archive.rewrite(
            wheels[0],
            output,
            name,
            version_files=settings.version_files,
            dist_info=dist_info(context, name, source),
        )


def build_headers(context: RunContext, source: SourceTree, label: str, output: Path) -> Path:
    """
    Write the CUTLASS wheel of *source*, its version with the local *label*, to *output* and return
    its path: the include folders, and ``cutlass_library`` if the tree has it.

    Header-only code needs no compiling; by the wheel, builds can name it by hash.

    Raises:
        wheel-invalid: The tree is no CUTLASS.
    """
    macros = dict(_MACRO.findall(context.objects.blob(source.tree, _VERSION_HEADER) or b""))
    if len(macros) != 3:
        raise WheelError(
            "wheel-invalid",
            f"{_VERSION_HEADER} does not state a version.",
            details=[f"tree: {source.tree}"],
        )
    numbers = int(macros[b"MAJOR"]), int(macros[b"MINOR"]), int(macros[b"PATCH"])
    version = "{}.{}.{}".format(*numbers)
    distribution = toolchain.settings(context, source.fork).distribution
    package = distribution.replace("-", "_")
    name = WheelName(package, version, "py3-none-any").labelled(label)
    files = {f"{package}/__init__.py": _MODULE.format(version=name.version).encode()}
    for folder, root in _FOLDERS.items():
        for path, data in context.objects.files(source.tree, folder):
            files[root.format(package=package) + path.removeprefix(folder)] = data
    metadata = _METADATA.format(name=distribution, version=name.version)
    information = dist_info(context, name, source)
    if licence := context.objects.blob(source.tree, _LICENCE):
        metadata += f"License-File: {_LICENCE}\n"
        information[f"licenses/{_LICENCE}"] = licence
    return archive.write(output, name, files, metadata, pure=True, dist_info=information)


# Checks that need no compiler: each of these failures would end a build late.


def check_output(context: RunContext) -> None:
    """
    Check that wheels can be written to the output folder.

    Raises:
        early-check-failed: They cannot.
    """
    try:
        context.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=context.output):
            pass
    except OSError as error:
        raise BuildError(
            "early-check-failed",
            "There is no folder for the wheels.",
            details=[f"output: {context.output} cannot be written: {error.strerror}"],
        ) from error


def check_vendored(context: RunContext, fork: str) -> None:
    """
    Fetch the vendored sources that the targets of this run need, before the tools, and print the
    external projects that it leaves out.

    Raises:
        source-unresolved: As `toolchain.settings`.
        rule-mismatch, source-mismatch, source-unreachable, offline: As `vendored_trees`.
    """
    settings = toolchain.settings(context, fork)
    vendored_trees(context, fork, settings.sources, rules_of(context, fork).rules)
    for project, why in settings.unlocked.items():
        console.note(f"{fork}: {project} is not compiled: {why}")


def check_source(context: RunContext, source: SourceTree, base: Path | None = None) -> None:
    """
    Check that *source* can be built on this machine; without an official wheel for a graft, only
    what does not depend on it.

    Raises:
        early-check-failed: It cannot; every finding is listed.
        base-mismatch: See `check_base`.
    """
    with console.step(f"check {source.fork} before it is built"):
        findings = [*python_syntax(context, source)]
        findings += pins.disagreements(context, context.lock) if base else []
        if findings:
            raise BuildError(
                "early-check-failed",
                f"{source.fork} cannot be built.",
                details=findings,
                data={"findings": findings},
            )
        if base:
            check_base(context, source, base)


def python_syntax(context: RunContext, source: SourceTree) -> Iterator[str]:
    """Yield the syntax errors of changed Python files."""
    for path in context.objects.changes(source.source.tree, source.tree):
        if not path.endswith((".py", ".pyi")):
            continue
        # A link, a submodule or a removed file has no content.
        text = context.objects.blob(source.tree, path) or b""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(text, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield f"{path}:{getattr(error, 'lineno', 0)}: {getattr(error, 'msg', error)}"


def check_base(context: RunContext, source: SourceTree, base: Path) -> None:
    """
    Check that *base* was built from the same source, before the series.

    Raises:
        base-mismatch: A Python file that both have differs.
    """
    settings = toolchain.settings(context, source.fork)
    tree = context.objects.paths(source.source.tree, settings.package)
    with zip_file(base) as wheel:
        count, differing = 0, list[str]()
        for name in zip_members(wheel, base.name):
            if name.endswith(".py") and name in tree:
                count += 1
                if (
                    name not in settings.version_files
                    and blob_id(wheel.read(name)) != tree[name][1]
                ):
                    differing.append(name)
    if differing or not count:
        raise BuildError(
            "base-mismatch",
            f"{base.name} was not built from {source.source.origin}.",
            details=[f"{len(differing)} of {count} Python files differ", *differing[:10]],
        )
    console.note(f"{base.name}: its {count} Python files are those of the source")
