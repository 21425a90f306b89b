"""
FlashInfer's modules, compiled when the wheels are built and not on the machine that serves.

FlashInfer is a package of sources: nvcc compiles a module at its first use, for minutes, and on a
Spark with the memory of the model. ``build/<stack>/aot.yaml`` names the modules that a model needs
by FlashInfer's own generators; here they are generated and compiled as FlashInfer does it, from the
bytes of the wheel that they belong to, and packed as ``flashinfer_jit_cache``, the package that
FlashInfer's loader looks for. The loader takes a module if the package states FlashInfer's own
version and has a provider whose architecture the device runs.
"""

from __future__ import annotations

import collections
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from email.parser import BytesParser
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright import __version__
from sparkwright.builder import BuildError, ninja, pipeline, preflight, toolchain
from sparkwright.builder.sandbox import Sandbox
from sparkwright.builder.wheel import archive, graft, sbom, symbols
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.core.git import REGULAR
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Raise it when equal inputs give another wheel.
LAYOUT = 5
#: The oldest platform that the tag promises, as the official wheels have it; raised if a library
#: needs more.
PLATFORM = "manylinux_2_28"

#: Variables of the user that would change the output.
_UNWANTED = re.compile(r"FLASHINFER_.*|CC|CXX|MAX_JOBS|CUDA_PATH")
#: A module's name becomes that of a folder, here and in the wheel.
_NAME = re.compile(r"\w[\w.+-]*")
_SCRIPT = Path(__file__).with_name("flashinfer_modules.py")

_PACKAGE = '''\
"""FlashInfer's modules for {arch}, compiled ahead of time by sparkwright; \
FlashInfer's loader reads this."""

from pathlib import Path
from typing import NamedTuple

__version__ = "{version}"

#: Architecture → the modules that are compiled for it.
MODULES: dict[str, tuple[str, ...]] = {modules!r}


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
        Provider(f"{distribution}-{{arch}}", "{distribution}", __version__, \
get_jit_cache_dir(), (arch,), modules)
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

Plain = str | int | bool


class ModuleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A module, or several of one kind.

    Attributes:
        call: FlashInfer's generator, by its dotted name.
        arguments: Its keyword arguments. ``torch.bfloat16`` stands for the data type; a list stands
            for one module per element.
        models: The models that load it.
        reason: When they load it.
        arch: The architecture that FlashInfer compiles it for, if not the stack's.
    """

    call: Annotated[str, Meta(pattern=r"^flashinfer(\.\w+)+\._?gen_\w+$")]
    models: Annotated[tuple[str, ...], Meta(min_length=1)]
    reason: Annotated[str, Meta(pattern=r"\S")]
    arguments: dict[str, Plain | list[Plain]] = {}
    arch: str = ""


class AotSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``aot.yaml``.

    Attributes:
        fork: Whose modules they are.
        distribution: The wheel's project; FlashInfer looks for a package of that name.
    """

    fork: str
    distribution: str
    modules: Annotated[tuple[ModuleSpec, ...], Meta(min_length=1)]

    @property
    def package(self) -> str:
        return self.distribution.replace("-", "_")


class AotModule(msgspec.Struct, frozen=True):
    """
    A generated module.

    Attributes:
        name: FlashInfer's, which is also the name of its folder and library.
        call: Its generator.
        codes: nvcc's targets, such as ``sm_121f``.
    """

    name: str
    call: str
    codes: tuple[str, ...]

    @property
    def path(self) -> str:
        """The path of its library below the folder of all modules."""
        return f"{self.name}/{self.name}.so"


class JitCacheRecord(msgspec.Struct, frozen=True):
    """
    ``sparkwright.json`` of the wheel; no path, date or job count.

    Attributes:
        sources: The sha256 of the wheel that was compiled.
        tools: The address of the tools.
        compiler: Version and target of the host compiler.
        modules: The sha256 of each library.
    """

    sparkwright: str
    stack: str
    arch: str
    sources: str
    tools: str
    compiler: str
    modules: dict[str, str]


def load(project: Project, fork: str) -> AotSpec | None:
    """
    Return the modules of *fork* to compile ahead of time, or None.

    Raises:
        file-invalid: The file cannot be read, or names no module.
    """
    path = project.build_folder / "aot.yaml"
    spec = strict_yaml.load(path, AotSpec) if path.is_file() else None
    return spec if spec and spec.fork == fork else None


def inputs(context: RunContext, spec: AotSpec, sources: pipeline.BuiltWheel) -> dict[str, str]:
    """Return the inputs of the wheel: name for people → digest."""
    stack, folder = context.project.stack, context.project.build_folder
    parts: dict[str, object] = {
        sources.filename: sources.sha256,
        f"build/{stack}/aot.yaml": (
            spec.distribution,
            [(module.call, module.arguments, module.arch) for module in spec.modules],
        ),
        f"build/{stack}/pylock.toml": sha256_file(folder / "pylock.toml"),
        f"forks/{stack}/stack.yaml": context.project.spec.arch,
        **pipeline.machine_inputs(context),
        "sparkwright": (__version__, LAYOUT, toolchain.ADDITIONS),
    }
    return {name: content_key("input", part) for name, part in parts.items()}


def build(context: RunContext, spec: AotSpec, sources: pipeline.BuiltWheel) -> pipeline.BuiltWheel:
    """
    Return the wheel of *spec*'s modules, compiled from the wheel *sources* unless the store has one
    of the same inputs.

    Raises:
        module-unknown, module-arch, file-invalid: aot.yaml and FlashInfer disagree.
        compile-failed: A unit was refused.
    """

    def make(key: str) -> pipeline.BuiltWheel:
        tools, wheel = toolchain.obtain(context), pipeline.wheel_path(context, sources)
        builder = AotBuilder(context, tools, spec, wheel)
        with context.store.building(builder.folder / "out") as scratch:
            libraries = builder.compile(builder.generate())
            dist_info = _dist_info(context, tools, spec, sources, libraries)
            with console.step(f"pack {len(libraries)} modules"):
                path = pack(scratch, spec, wheel, context, libraries, dist_info)
            return pipeline.put(context, spec.distribution, key, path)

    preflight.check_output(context)
    with context.store.lock(f"work-{context.project.stack}-{context.qualified(spec.distribution)}"):
        return pipeline.reuse(context, spec.distribution, inputs(context, spec, sources), make)


def _dist_info(
    context: RunContext,
    tools: toolchain.Toolchain,
    spec: AotSpec,
    sources: pipeline.BuiltWheel,
    libraries: Mapping[AotModule, bytes],
) -> archive.DistInfo:
    """Return the build record and the bill of materials of the wheel."""
    hashes = {module: sha256_bytes(data) for module, data in libraries.items()}
    record = JitCacheRecord(
        sparkwright=__version__,
        stack=context.project.stack,
        arch=context.project.spec.arch,
        sources=sources.sha256,
        tools=toolchain.target_key(context, tools),
        compiler=toolchain.compiler(context),
        modules={module.name: sha256 for module, sha256 in hashes.items()},
    )
    return sbom.dist_info(
        record,
        bases=[
            (sources.filename.split("-")[0].replace("_", "-"), sources.filename, sources.sha256)
        ],
        tools=sbom.compilers(context),
        compiled={
            f"{spec.package}/jit_cache/{module.path}": sha256 for module, sha256 in hashes.items()
        },
        properties={
            "stack": record.stack,
            "fork": spec.fork,
            "built": "modules",
            "arch": record.arch,
        },
    )


class AotBuilder:
    """
    The folder in which a stack's modules are generated and compiled.

    Args:
        wheel: The fork's wheel with the sources.
    """

    def __init__(
        self, context: RunContext, tools: toolchain.Toolchain, spec: AotSpec, wheel: Path
    ) -> None:
        self._context, self._tools, self._spec, self._wheel = context, tools, spec, wheel
        self._target = toolchain.target(context, tools)
        self.folder = context.store.folder(
            "work", context.project.stack, context.qualified(spec.distribution)
        )
        self._sandbox = Sandbox.create({self.folder: spec.distribution, **self._target.mounts})

    def generate(self) -> tuple[AotModule, ...]:
        """
        Write the modules' ninja files to the build folder, and return the modules.

        Raises:
            module-unknown: FlashInfer does not generate one.
            module-unknown, module-arch, file-invalid: As `check`.
        """
        objects, project = self._context.objects, self._context.project
        source, build = self.folder / "src", self.folder / "build"
        with zip_file(self._wheel) as wheel:
            members = zip_members(wheel, self._wheel.name).items()
            tree = objects.store_files((name, REGULAR, wheel.read(info)) for name, info in members)
        # Equal files keep their times, which ninja compares.
        objects.checkout(tree, source, self.folder / "index")
        calls = [{"call": spec.call, "arguments": spec.arguments} for spec in self._spec.modules]
        script = shutil.copyfile(_SCRIPT, self.folder / _SCRIPT.name)
        log = f"{project.stack}-{self._spec.distribution}-generate.log"
        with console.step(f"generate FlashInfer's modules for {project.spec.arch}"):
            self._sandbox.run(
                [
                    self._tools.tool("python"),
                    "-I",
                    script,
                    source,
                    build,
                    msgspec.json.encode(calls).decode(),
                ],
                log=self._context.store.folder("logs") / log,
                env=self._environment(),
                failure=partial(BuildError, "module-unknown"),
                what=f"FlashInfer does not generate the modules of {project.stack}'s aot.yaml.",
            )
        modules = msgspec.json.decode(
            (build / "modules.json").read_bytes(), type=tuple[AotModule, ...]
        )
        check(modules, self._spec, project.spec.arch)
        return modules

    def compile(self, modules: Sequence[AotModule]) -> dict[AotModule, bytes]:
        """
        Return the modules' libraries, compiled unless up to date; raise `compile-failed` if a unit
        is refused, or no library is made of one, and `undefined-symbol` as `symbols.check` does.
        """
        context, fork = self._context, self._spec.fork
        ninja.BuildFolder(
            context, self._tools, fork, self.folder, self._sandbox, self._environment()
        ).compile((), ninja.shipped_costs(context, fork))
        build = self.folder / "build"
        libraries = graft.read_libraries(build, {module: module.path for module in modules})
        members = {module.path: data for module, data in libraries.items()}
        symbols.check(context, members, build, self.folder / "src")
        return libraries

    def _environment(self) -> dict[str, str]:
        launcher = f"{self._tools.tool('python')} -IS {ninja.install_launcher(self.folder)}"
        compiler = shlex.join(toolchain.compiler_command(self._context))
        return {
            **{
                name: text
                for name, text in self._target.environment().items()
                if not _UNWANTED.fullmatch(name)
            },
            "FLASHINFER_CUDA_ARCH_LIST": self._context.project.spec.arch,
            "FLASHINFER_WORKSPACE_BASE": str(self.folder / "workspace"),
            "FLASHINFER_NVCC_LAUNCHER": launcher,
            "FLASHINFER_CXX_LAUNCHER": launcher,
            # nvcc leaves its process id in the symbol table; without that table a link is
            # reproducible.
            "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-s",
            # FlashInfer compiles its C++ with CXX, and gives CC to nvcc as the host compiler.
            "CC": compiler,
            "CXX": compiler,
        }


def check(modules: Sequence[AotModule], spec: AotSpec, arch: str) -> None:
    """
    Check that every module has a folder of its own, and is for the right architecture.

    Raises:
        module-unknown: Its name is not one of a folder.
        file-invalid: Two entries give the same module, and one would replace the other.
        module-arch: It is neither for *arch* nor for the architecture of its entry.
    """
    names = [module.name for module in modules]
    if odd := [repr(name) for name in names if not _NAME.fullmatch(name)]:
        raise BuildError(
            "module-unknown",
            f"{len(odd)} modules of FlashInfer have names that no folder can have.",
            details=odd,
        )
    if repeated := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise FileError(
            "file-invalid", "aot.yaml asks for the same module more than once.", details=repeated
        )
    codes = {entry.call: f"sm_{(entry.arch or arch).replace('.', '')}" for entry in spec.modules}
    if wrong := [
        f"{module.name}: {', '.join(module.codes) or 'nothing'}, expected {codes[module.call]}"
        for module in modules
        if module.codes != (codes[module.call],)
    ]:
        raise BuildError(
            "module-arch",
            f"{len(wrong)} modules of FlashInfer are not compiled for {arch}.",
            details=wrong,
        )


def pack(
    folder: Path,
    spec: AotSpec,
    sources: Path,
    context: RunContext,
    libraries: Mapping[AotModule, bytes],
    dist_info: archive.DistInfo,
) -> Path:
    """
    Write the wheel of *libraries* to *folder*, with the version and the licences of the wheel
    *sources*; return its path.
    """
    origin = archive.WheelName.parse(sources.name)
    with zip_file(sources) as opened:
        head = BytesParser().parsebytes(opened.read(f"{origin.info}/METADATA"))
        added = {
            name.removeprefix(f"{origin.info}/"): opened.read(name)
            for name in opened.namelist()
            if name.startswith(f"{origin.info}/licenses/")
        }
    tag = graft.platform_tag(f"{PLATFORM}_{context.machine}", libraries.values())
    name = archive.WheelName(spec.package, origin.version, f"py3-none-{tag}")
    # nvcc's sm_121f is FlashInfer's sm121f; `check` ensures that each module has one.
    by_arch = {
        code.replace("_", ""): tuple(sorted(m.name for m in libraries if m.codes == (code,)))
        for (code,) in sorted({module.codes for module in libraries})
    }
    fields = {"arch": context.project.spec.arch, "version": origin.version}
    files = {f"{spec.package}/jit_cache/{module.path}": data for module, data in libraries.items()}
    files[f"{spec.package}/__init__.py"] = _PACKAGE.format(
        modules=by_arch, distribution=spec.distribution, **fields
    ).encode()
    lines = "".join(
        f"{key}: {value}\n"
        for key in ("License-Expression", "License-File")
        for value in head.get_all(key, [])
    )
    metadata = _METADATA.format(name=spec.distribution, licenses=lines, fork=head["Name"], **fields)
    return archive.write(
        folder, name, files, metadata, pure=False, dist_info={**added, **dist_info(name)}
    )
