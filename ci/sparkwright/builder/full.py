"""
A full build: the fork's wheel from source and nothing else, by the project's own build backend.

The plan is made first, in the very build folder that the backend then uses, with every vendored source in place. The backend calls CMake
again, with options of its own; ours come last, as a script of cache entries, and what its compilers are told is compared with the plan.
"""

from __future__ import annotations

import configparser
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from sparkwright.builder import handover
from sparkwright.builder.arch import effects, plan, planning
from sparkwright.builder.arch.planning import Planned
from sparkwright.builder.compile import failures, ninja
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja import BuildFolder
from sparkwright.builder.environment.toolchain import FullEnvironment, Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.handover import FullWorkspace
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel import graft, pep517
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.graft import Transplant
from sparkwright.builder.wheel.sbom import Papers
from sparkwright.builder.wheel.version import labelled
from sparkwright.core.console import console
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError

#: Said to CMake after all that the backend says (cmake(1): options count in their order).
SCRIPT = "sparkwright-cache.cmake"
_LAUNCHERS = ("CMAKE_C_COMPILER_LAUNCHER", "CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER")
_ENTRY = re.compile(r"^([A-Za-z_][^:=]*):([A-Z]+)=(.*)$", re.MULTILINE)


def build(
    session: Session, tools: Toolchain, source: SourceTree, label: str, folder: Path, papers: Callable[[Planned, Transplant], Papers]
) -> tuple[Path, dict[str, int], Transplant]:
    """
    Write the wheel of *source* to *folder*; return it, the CUDA units by verdict of the plan, and the account of its libraries.

    Args:
        papers: Returns the wheel's build record and what its bill of materials says.

    Raises:
        not-provided: The wheel is for another machine.
        source-unresolved, arch-mismatch, configure-failed, compiler-too-old: Nothing was compiled.
        build-failed, build-downloads, extension-missing, and what compiling raises: See there.
    """
    if session.cross:
        raise SourceError(
            "not-provided", f"A full build of {source.fork} runs on the machine that it is for; a graft can be made for another one."
        )
    whole = handover.fetch(session, source.fork)
    with console.step(f"build {source.fork} whole, with its own backend"):
        made = planning.planned(session, tools, source, configured=True, whole=whole)
        plan.show(made.after, made.before)
        plan.check(made.after, made.before)
        workspace = FullWorkspace(session, tools, whole, source.fork)
        planned = effects.commands(workspace.build)
        with session.store.building(workspace.folder / "wheel") as place:
            log = session.store.folder("logs") / f"{session.project.stack}-{source.fork}-full.log"
            wheel = _backend(session, tools, source, workspace, place, log)
            effects.check_commands(source.fork, planned, effects.commands(workspace.build))
            settings = whole.settings.full or FullEnvironment()
            effects.check_extensions(wheel, settings, log)
            done = effects.account(wheel, whole.settings.requires)
            path = _remake(session, source.fork, wheel, folder, label, whole.settings.version_files, done, papers(made, done))
    console.note(f"{len(done.libraries)} libraries compiled here, none from elsewhere")
    return path, made.after.counts, done


def _backend(
    session: Session, tools: Toolchain, source: SourceTree, workspace: FullWorkspace, place: Path, log: Path
) -> Path:  # fmt: skip
    """Run the backend, record what units cost, and return the wheel."""
    room, whole = workspace.room, workspace.whole.settings.full or FullEnvironment()
    outputs = workspace.folder / "setuptools"
    # What an earlier run built or copied there would be packed again, wanted or not; compiled units are elsewhere.
    shutil.rmtree(outputs, ignore_errors=True)
    tidy(session, workspace, (whole_package(workspace), "*.egg-info", "build"))
    script, config = workspace.build / SCRIPT, workspace.folder / "setuptools.cfg"
    script.write_text(cache_script(workspace), "utf-8")
    _write_config(config, workspace, whole, outputs)
    cmake = {"CMAKE_ARGS": f"-C {room.inside(script)}", "DIST_EXTRA_CONFIG": str(room.inside(config))}
    env = {**workspace.environment(), **pep517.EPOCH, "PIP_NO_INDEX": "1", **cmake}
    build_folder = BuildFolder.of(session, tools, source.fork, workspace.folder, room, env)
    lines: list[str] = []
    recorded = build_folder.recording(Costs.of(session, source.fork), ninja.limits(session))
    with console.progress("steps", 0) as line, recorded as (_, variables):

        def on_line(text: str) -> None:
            lines.append(text)
            if step := failures.progress(text):
                line.total = float(step[1])
                line.update(float(step[0]), text[-60:])

        try:
            return pep517.run(room, tools, workspace.source, place, variables, log=log, what=source.fork, on_line=on_line)
        except BuildError as error:
            failed = next(failures.failed_edges(lines), None)
            if error.reference != "build-failed" or failed is None:
                raise
            raise failures.compile_error(failed.output, failed) from error


def whole_package(workspace: FullWorkspace) -> str:
    """Return the folder of the tree whose files lie in the wheel."""
    return workspace.whole.settings.package


def tidy(session: Session, workspace: FullWorkspace, patterns: Sequence[str]) -> None:
    """Remove files that git does not track and that *patterns* cover: a wheel must not depend on what an earlier build left."""
    env = {"GIT_INDEX_FILE": str(workspace.folder / "index"), "GIT_WORK_TREE": str(workspace.source), "GIT_DIR": str(session.objects.path)}
    session.objects.run(["clean", "-ffdxq", "--", *filter(None, patterns)], env=env)


def cache_script(workspace: FullWorkspace) -> str:
    """Return a CMake script that sets what the plan was made with, over whatever the backend says."""
    text = (workspace.build / "CMakeCache.txt").read_text("utf-8")
    entries = {name: (kind, value) for name, kind, value in _ENTRY.findall(text)}
    entries["CMAKE_C_COMPILER_LAUNCHER"] = entries.get("CMAKE_CXX_COMPILER_LAUNCHER", ("STRING", ""))
    names = [*workspace.defines(), *_LAUNCHERS, "CMAKE_EXPORT_COMPILE_COMMANDS", "CMAKE_CXX_FLAGS", "CMAKE_CUDA_FLAGS"]
    lines = []
    for name in dict.fromkeys(name for name in names if name in entries):
        kind, value = entries[name]
        # A bracket argument takes any text as it is, but for its own end.
        lines.append(f'set({name} [==[{value}]==] CACHE {"STRING" if kind == "UNINITIALIZED" else kind} "" FORCE)\n')
    return "".join(lines)


def _write_config(path: Path, workspace: FullWorkspace, whole: FullEnvironment, outputs: Path) -> None:
    """Write what setuptools reads beside the project's own configuration (``DIST_EXTRA_CONFIG``)."""
    sections = {"build_ext": {"build_temp": "{build}"}, "build": {"build_base": str(outputs)}}
    for name, options in whole.config.items():
        sections[name] = {**sections.get(name, {}), **options}
    parser = configparser.RawConfigParser()
    parser.read_dict({
        name: {key: workspace.room.translated(workspace.filled(value)) for key, value in options.items()}
        for name, options in sections.items()
    })  # fmt: skip
    with path.open("w", encoding="utf-8") as stream:
        parser.write(stream)


def _remake(
    session: Session, fork: str, wheel: Path, folder: Path, label: str, version_files: tuple[str, ...], done: Transplant, papers: Papers
) -> Path:
    """Write *wheel* again with our version, requirements and record, and a platform tag that says what its libraries want."""
    base = session.lock.forks[fork].bases.get(session.machine)
    platform = ""
    if base:
        with zip_file(wheel) as archive:
            platform = graft.platform_tag(base.filename, [archive.read(name) for name in done.libraries])
    version = labelled(WheelName.of(wheel.name).version, label)
    return wheelfile.remake(
        wheel, folder, version=version, platform=platform, version_files=version_files, requires=done.requires,
        build_record=papers.record, sbom=papers.sbom(WheelName.of(wheel.name, version)),
    )  # fmt: skip
