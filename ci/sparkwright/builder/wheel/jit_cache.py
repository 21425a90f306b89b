"""
The wheel of FlashInfer's precompiled modules: ``flashinfer_jit_cache``, the package that
FlashInfer's loader looks for.

FlashInfer takes a module from it when the package states FlashInfer's own version and has a
provider whose architecture the device runs; then it compiles nothing. The package is ours: a list
of the modules, and the libraries.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from email.parser import BytesParser
from pathlib import Path

import msgspec

from sparkwright import __version__
from sparkwright.builder import pipeline
from sparkwright.builder.environment import cross, host_compiler, toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.pipeline import BuiltWheel
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel import graft, materials, version_label
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.builder.wheel.flashinfer_aot import AotSpec, Module, Workshop
from sparkwright.builder.wheel.sbom import Archive, Bill, Papers
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import RunContext

#: Raise it when equal inputs give another wheel.
LAYOUT = 2
#: The oldest platform that the tag promises, as the official wheels have it; raised where a library
#: wants more.
PLATFORM = "manylinux_2_28"

_PACKAGE = '''\
"""FlashInfer's modules for {arch}, compiled ahead of time by sparkwright; FlashInfer's loader reads this."""

from pathlib import Path
from typing import NamedTuple

__version__ = "{version}"

#: Architecture → the modules that are compiled for it.
MODULES: dict[str, tuple[str, ...]] = {{
{modules}}}


class Provider(NamedTuple):
    provider_id: str
    distribution: str
    version: str
    jit_cache_dir: str
    cuda_architectures: tuple[str, ...]
    modules: tuple[str, ...]


def get_jit_cache_dir() -> str:
    """Return the folder with a folder per module."""
    return str(Path(__file__).parent / "jit_cache")


def get_jit_cache_providers() -> tuple[Provider, ...]:
    """Return one provider per architecture, so that no device is given code that it cannot run."""
    return tuple(
        Provider(f"{distribution}-{{arch}}", "{distribution}", __version__, get_jit_cache_dir(), (arch,), modules)
        for arch, modules in MODULES.items()
    )
'''

_METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: FlashInfer's modules for {arch}, compiled ahead of time
{licenses}Requires-Python: >=3.10
Requires-Dist: {fork}=={version}
"""


class PackedModule(msgspec.Struct, frozen=True):
    """
    A module in the wheel: the generator that made it, what it was compiled for, and the sha256 of
    its library.
    """

    call: str
    codes: tuple[str, ...]
    sha256: str


class JitCacheRecord(msgspec.Struct, frozen=True):
    """What travels in the wheel as ``sparkwright.json``. No path, date or job count."""

    sparkwright: str
    stack: str
    arch: str
    key: str
    sources: str
    tools: str
    compiler: str
    modules: dict[str, PackedModule]


def inputs(session: RunContext, spec: AotSpec, sources: BuiltWheel) -> dict[str, str]:
    """Return what the wheel is determined by: name that people know → digest."""
    stack = session.project.stack
    parts: dict[str, object] = {
        sources.filename: sources.sha256,
        f"build/{stack}/aot.yaml": (
            spec.distribution,
            [(one.call, one.arguments, one.arch) for one in spec.modules],
        ),
        f"build/{stack}/pylock.toml": digest.sha256_file(
            session.project.build_folder / "pylock.toml"
        ),
        f"forks/{stack}/stack.yaml": session.project.spec.arch,
        "this machine": (
            platform.machine(),
            platform.python_version(),
            cross.compiler(session),
            host_compiler.identity(),
        ),
        "--target": session.machine,
        "sparkwright": (__version__, LAYOUT, toolchain.ADDITIONS),
    }
    return {name: digest.key("input", part) for name, part in parts.items()}


def build(session: RunContext, spec: AotSpec, sources: BuiltWheel) -> BuiltWheel:
    """
    Return the wheel of *spec*'s modules, compiled from those of the wheel *sources*; made when the
    store has none of the same inputs.

    Raises:
        module-unknown, module-arch, compile-failed: See `Workshop.make`.
    """
    with session.store.lock(Workshop.name(session, spec)):
        return pipeline.reused(
            session,
            spec.distribution,
            inputs(session, spec, sources),
            lambda key: _build(session, spec, sources, key),
        )


def known(session: RunContext, spec: AotSpec) -> BuiltWheel | None:
    """
    Return the wheel that a build would take from the store now; None where it, or the wheel of its
    sources, has to be made.
    """
    sources = pipeline.known(session, spec.fork)
    return (
        pipeline.kept(session, digest.key("wheel", inputs(session, spec, sources)))
        if sources
        else None
    )


def _build(session: RunContext, spec: AotSpec, sources: BuiltWheel, key: str) -> BuiltWheel:
    tools = toolchain.obtain(session)
    origin = pipeline.path_of(session, sources)
    work = session.store.root / "work" / session.project.stack / session.named(spec.distribution)
    with session.store.building(work / "out") as scratch:
        made = Workshop(session, tools, spec, origin).make()
        libraries = {module: _library(module, path) for module, path in made.items()}
        record = JitCacheRecord(
            sparkwright=__version__,
            stack=session.project.stack,
            arch=session.project.spec.arch,
            key=key,
            sources=sources.sha256,
            tools=cross.key(session, tools),
            compiler=cross.compiler(session) if session.cross else host_compiler.identity(),
            modules={
                one.name: PackedModule(one.call, one.codes, digest.sha256_bytes(data))
                for one, data in libraries.items()
            },
        )
        with console.step(f"pack {len(libraries)} modules"):
            path = pack(
                scratch, spec, origin, session, libraries, _papers(session, spec, sources, record)
            )
        built = BuiltWheel(
            spec.distribution,
            key,
            path.name,
            digest.sha256_file(path),
            path.stat().st_size,
            sources.tree,
        )
        pipeline.shelve(session, built, path)
    return built


def _papers(
    session: RunContext, spec: AotSpec, sources: BuiltWheel, record: JitCacheRecord
) -> Papers:
    package = spec.distribution.replace("-", "_")
    facts = {
        "stack": record.stack,
        "fork": spec.fork,
        "built": "modules",
        "arch": record.arch,
        "toolchain": record.tools,
    }
    bill = Bill(
        bases=(
            Archive(
                WheelName.of(sources.filename).distribution.replace("_", "-"),
                sources.filename,
                sources.sha256,
            ),
        ),
        tools=materials.compilers(session),
        compiled={
            f"{package}/jit_cache/{name}/{name}.so": one.sha256
            for name, one in record.modules.items()
        },
        facts={**facts, "compiler": record.compiler, "cuda": version_label.cuda(session.project)},
    )
    return Papers(msgspec.json.format(msgspec.json.encode(record)), bill)


def _library(module: Module, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BuildError(
            "compile-failed", f"{module.name} was not linked.", details=[f"expected: {path}"]
        ) from error


def pack(
    folder: Path,
    spec: AotSpec,
    origin: Path,
    session: RunContext,
    libraries: Mapping[Module, bytes],
    papers: Papers,
) -> Path:
    """
    Write the wheel of *libraries* to *folder*, with the version and the licences of the wheel
    *origin*; return its path.
    """
    package = spec.distribution.replace("-", "_")
    version, fork, licenses, texts = _described(origin)
    base = WheelName(package, version, f"py3-none-{PLATFORM}_{session.machine}")
    name = WheelName(
        package, version, f"py3-none-{graft.platform_tag(base.filename, list(libraries.values()))}"
    )
    arch, listed = session.project.spec.arch, _listed(libraries)
    files = {
        f"{package}/jit_cache/{module.name}/{module.name}.so": data
        for module, data in libraries.items()
    }
    files[f"{package}/__init__.py"] = _PACKAGE.format(
        arch=arch, version=version, modules=listed, distribution=spec.distribution
    ).encode()
    files |= {
        f"{name.info}/{BUILD_RECORD}": papers.record,
        f"{name.info}/{SBOM}": papers.sbom(name),
    }
    files |= {f"{name.info}/licenses/{file}": text for file, text in texts.items()}
    path = folder / name.filename
    metadata = _METADATA.format(
        name=spec.distribution, version=version, arch=arch, licenses=licenses, fork=fork
    )
    wheelfile.write(path, name, files, metadata, pure=False)
    return path


def _listed(modules: Iterable[Module]) -> str:
    """Return the modules by architecture, as lines of Python."""
    by_arch: dict[str, list[str]] = {}
    for module in sorted(modules, key=lambda module: module.name):
        # nvcc's sm_121f is FlashInfer's sm121f; `check_archs` has seen that each module has one.
        by_arch.setdefault(module.codes[0].replace("_", ""), []).append(
            f"        {module.name!r},\n"
        )
    return "".join(
        f"    {arch!r}: (\n{''.join(names)}    ),\n" for arch, names in sorted(by_arch.items())
    )


def _described(origin: Path) -> tuple[str, str, str, dict[str, bytes]]:
    """
    Return version and project of the wheel *origin*, its licence headers, and its licence files.
    """
    name = WheelName.of(origin.name)
    with zip_file(origin) as archive:
        head = BytesParser().parsebytes(archive.read(f"{name.info}/METADATA"))
        prefix = f"{name.info}/licenses/"
        texts = {
            file.removeprefix(prefix): archive.read(file)
            for file in archive.namelist()
            if file.startswith(prefix)
        }
    lines = [
        f"{key}: {value}\n"
        for key in ("License-Expression", "License-File")
        for value in head.get_all(key, [])
    ]
    return name.version, str(head["Name"]), "".join(lines), texts
