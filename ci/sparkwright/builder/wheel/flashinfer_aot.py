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

import platform
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping
from email.parser import BytesParser
from functools import partial
from pathlib import Path

import msgspec

from sparkwright import __version__
from sparkwright.builder import pipeline
from sparkwright.builder.compile import ninja
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja import BuildFolder
from sparkwright.builder.environment import cross, toolchain
from sparkwright.builder.environment.sandbox import Sandbox
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.pipeline import BuiltWheel
from sparkwright.builder.wheel import archive, graft, sbom, version
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.sbom import DistInfoFiles, LockedFile, SbomInput
from sparkwright.core import digest, strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.forks.archive import zip_file, zip_members
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Raise it when equal inputs give another wheel.
LAYOUT = 3
#: The oldest platform that the tag promises, as the official wheels have it; raised if a library
#: needs more.
PLATFORM = "manylinux_2_28"

_CALL = re.compile(r"flashinfer(?:\.\w+)+\._?gen_\w+")
#: A module's name becomes that of a folder, here and in the wheel.
_NAME = re.compile(r"\w[\w.+-]*")
#: Variables of the user that would change the output.
_UNWANTED = re.compile(r"FLASHINFER_.*|CC|CXX|MAX_JOBS|CUDA_PATH")
_SCRIPT = Path(__file__).parents[1] / "_scripts" / "flashinfer_modules.py"

_PACKAGE = '''\
"""FlashInfer's modules for {arch}, compiled ahead of time by sparkwright; FlashInfer's loader reads this."""

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

    call: str
    models: tuple[str, ...]
    reason: str
    arguments: dict[str, Plain | list[Plain]] = {}
    arch: str = ""

    def __post_init__(self) -> None:
        if not _CALL.fullmatch(self.call):
            raise ValueError(f"call: {self.call!r} is not the name of a generator of FlashInfer")
        if not self.reason.strip() or not self.models:
            raise ValueError(f"{self.call}: models and reason say what the module is for")


class AotSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``aot.yaml``.

    Attributes:
        fork: Whose modules they are.
        distribution: The wheel's project; FlashInfer looks for a package of that name.
        seconds, longest: As in `ForkEnvironment`, which holds the memory of a unit, too.
    """

    fork: str
    distribution: str
    modules: tuple[ModuleSpec, ...]
    seconds: float = 0
    longest: float = 0

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


class GeneratedModules(msgspec.Struct, frozen=True):
    """The answer of ``_scripts/flashinfer_modules.py``."""

    modules: tuple[AotModule, ...] = ()
    failed: str = ""
    reason: str = ""
    similar: tuple[str, ...] = ()


class PackedModule(msgspec.Struct, frozen=True):
    """A module in the wheel: its generator, nvcc's targets, and the sha256 of its library."""

    call: str
    codes: tuple[str, ...]
    sha256: str


class JitCacheRecord(msgspec.Struct, frozen=True):
    """``sparkwright.json`` of the wheel. No path, date or job count."""

    sparkwright: str
    stack: str
    arch: str
    key: str
    sources: str
    tools: str
    compiler: str
    modules: dict[str, PackedModule]


def path_of(project: Project) -> Path:
    """Return the path of the stack's ``aot.yaml``."""
    return project.build_folder / "aot.yaml"


def load(project: Project, fork: str) -> AotSpec | None:
    """
    Return the modules of *fork* to compile ahead of time, or None.

    Raises:
        file-invalid: The file cannot be read, or names no module.
    """
    path = path_of(project)
    spec = strict_yaml.load(path, AotSpec) if path.is_file() else None
    if spec and not spec.modules:
        todo = "Name one, or remove the file."
        raise FileError("file-invalid", f"{path} names no module.", todo=todo)
    return spec if spec and spec.fork == fork else None


def inputs(context: RunContext, spec: AotSpec, sources: BuiltWheel) -> dict[str, str]:
    """Return the inputs of the wheel: name for people → digest."""
    stack = context.project.stack
    pylock = context.project.build_folder / "pylock.toml"
    calls = [(module.call, module.arguments, module.arch) for module in spec.modules]
    compilers = toolchain.compiler(context)
    parts: dict[str, object] = {
        sources.filename: sources.sha256,
        f"build/{stack}/aot.yaml": (spec.distribution, calls),
        f"build/{stack}/pylock.toml": digest.sha256_file(pylock),
        f"forks/{stack}/stack.yaml": context.project.spec.arch,
        "this machine": (platform.machine(), platform.python_version(), compilers),
        "--target": context.machine,
        "sparkwright": (__version__, LAYOUT, toolchain.ADDITIONS),
    }
    return {name: digest.key("input", part) for name, part in parts.items()}


def stored(context: RunContext, spec: AotSpec) -> BuiltWheel | None:
    """Return the wheel in the store that `build` would reuse; None if it would build one."""
    sources = pipeline.current(context, spec.fork)
    if sources is None:
        return None
    return pipeline.stored(context, digest.key("wheel", inputs(context, spec, sources)))


def build(context: RunContext, spec: AotSpec, sources: BuiltWheel) -> BuiltWheel:
    """
    Return the wheel of *spec*'s modules, compiled from the wheel *sources* unless the store has one
    of the same inputs.

    Raises:
        module-unknown, module-arch: aot.yaml and FlashInfer disagree.
        compile-failed: A unit was refused.
    """
    with context.store.lock(f"work-{context.project.stack}-{context.named(spec.distribution)}"):
        return pipeline.reuse(
            context,
            spec.distribution,
            inputs(context, spec, sources),
            lambda key: _build(context, spec, sources, key),
        )


def _build(context: RunContext, spec: AotSpec, sources: BuiltWheel, key: str) -> BuiltWheel:
    tools = toolchain.obtain(context)
    wheel = pipeline.wheel_path(context, sources)
    builder = AotBuilder(context, tools, spec, wheel)
    with context.store.building(builder.folder / "out") as scratch:
        libraries = builder.compile(builder.generate())
        record = JitCacheRecord(
            sparkwright=__version__,
            stack=context.project.stack,
            arch=context.project.spec.arch,
            key=key,
            sources=sources.sha256,
            tools=cross.key(context, tools),
            compiler=toolchain.compiler(context),
            modules={
                module.name: PackedModule(module.call, module.codes, digest.sha256_bytes(data))
                for module, data in libraries.items()
            },
        )
        project = WheelName.of(sources.filename).distribution.replace("_", "-")
        parts = SbomInput(
            bases=(LockedFile(project, sources.filename, sources.sha256),),
            tools=sbom.compilers(context),
            compiled={
                f"{spec.package}/jit_cache/{name}/{name}.so": packed.sha256
                for name, packed in record.modules.items()
            },
            properties={
                "stack": record.stack,
                "fork": spec.fork,
                "built": "modules",
                "arch": record.arch,
                "toolchain": record.tools,
                "compiler": record.compiler,
                "cuda": version.cuda(context.project),
            },
        )
        dist_info = DistInfoFiles(msgspec.json.format(msgspec.json.encode(record)), parts)
        with console.step(f"pack {len(libraries)} modules"):
            path = pack(scratch, spec, wheel, context, libraries, dist_info)
        return pipeline.put(context, spec.distribution, key, path, sources.tree)


class AotBuilder:
    """
    The folder in which a stack's modules are generated and compiled.

    Args:
        wheel: The fork's wheel with the sources.
    """

    def __init__(self, context: RunContext, tools: Toolchain, spec: AotSpec, wheel: Path) -> None:
        self._context, self._tools, self._spec, self._wheel = context, tools, spec, wheel
        self._target = cross.of(context, tools)
        name = context.named(spec.distribution)
        self.folder = context.store.folder("work", context.project.stack, name)
        mounts = {self.folder: spec.distribution, tools.root: "tools"}
        mounts |= {self._target.root: "target"} if self._target.cross else {}
        self._sandbox = Sandbox.create(mounts)

    def generate(self) -> tuple[AotModule, ...]:
        """
        Write the modules' ninja files to the build folder, and return the modules.

        Raises:
            module-unknown: FlashInfer does not generate one.
            module-arch: One is for another architecture.
        """
        unpack(self._wheel, self.folder / "src")
        question, answer = self.folder / "question.json", self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        paths = {"package": self.folder / "src", "build": self.folder / "build", "answer": answer}
        inside = self._sandbox.sandbox_path
        calls = [{"call": spec.call, "arguments": spec.arguments} for spec in self._spec.modules]
        content = {name: str(inside(path)) for name, path in paths.items()} | {"calls": calls}
        question.write_bytes(msgspec.json.encode(content))
        script = shutil.copyfile(_SCRIPT, self.folder / _SCRIPT.name)
        stack, arch = self._context.project.stack, self._context.project.spec.arch
        with console.step(f"generate FlashInfer's modules for {arch}"):
            self._sandbox.run(
                [inside(self._tools.python), "-I", inside(script), inside(question)],
                log=self._context.store.folder("logs")
                / f"{stack}-{self._spec.distribution}-generate.log",
                env=self._environment(),
                failure=partial(BuildError, "build-failed"),
                what="FlashInfer's generators do not run.",
            )
        decoded = msgspec.json.decode(answer.read_bytes(), type=GeneratedModules)
        return check(decoded, self._spec, arch, path_of(self._context.project))

    def compile(self, modules: tuple[AotModule, ...]) -> dict[AotModule, bytes]:
        """
        Return the modules' libraries, compiled unless up to date; raise `compile-failed` if a unit
        is refused.
        """
        context, fork = self._context, self._spec.fork
        folder = BuildFolder.of(
            context, self._tools, fork, self.folder, self._sandbox, self._environment()
        )
        folder.compile((), Costs.of(context, fork), ninja.limits(context))
        build = self.folder / "build"
        try:
            return {
                module: (build / module.name / f"{module.name}.so").read_bytes()
                for module in modules
            }
        except FileNotFoundError as error:
            what = "FlashInfer's ninja file did not link a module."
            details = [f"expected: {error.filename}"]
            raise BuildError("compile-failed", what, details=details) from error

    def _environment(self) -> dict[str, str]:
        launcher = f"{self._tools.python} -IS {ninja.install_launcher(self.folder)}"
        native = shlex.join(toolchain.host_compiler())
        compiler = f"{self._target.triple}-g++" if self._target.cross else native
        own = {
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
        base = self._tools.environment(**self._target.environment(self._tools))
        variables = {name: text for name, text in base.items() if not _UNWANTED.fullmatch(name)}
        return {name: self._sandbox.translate(text) for name, text in {**variables, **own}.items()}


def check(answer: GeneratedModules, spec: AotSpec, arch: str, path: Path) -> tuple[AotModule, ...]:
    """
    Return the modules of FlashInfer's *answer* to the file at *path*.

    Raises:
        module-unknown: FlashInfer has no such generator, or it gives no module for the arguments,
            or one whose name cannot be that of a folder.
        file-invalid: Two entries give the same module.
        module-arch: A module is neither for *arch* nor for the architecture of its entry.
    """
    if answer.failed:
        what = f"FlashInfer generates no module for {answer.failed}."
        similar = [f"similar: {name}" for name in answer.similar]
        details = [answer.reason, *similar, f"file: {path}"]
        raise BuildError("module-unknown", what, details=details)
    names = [module.name for module in answer.modules]
    if odd := [repr(name) for name in names if not _NAME.fullmatch(name)]:
        what = f"FlashInfer names {len(odd)} modules in a way that no folder can have."
        raise BuildError("module-unknown", what, details=odd)
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        what = f"{path} asks for the same module more than once."
        raise FileError("file-invalid", what, details=repeated)
    codes = {entry.call: f"sm_{(entry.arch or arch).replace('.', '')}" for entry in spec.modules}
    if wrong := [
        f"{module.name}: {', '.join(module.codes) or 'nothing'}, expected {codes[module.call]}"
        for module in answer.modules
        if module.codes != (codes[module.call],)
    ]:
        what = f"{len(wrong)} modules of FlashInfer are not compiled for {arch}."
        raise BuildError("module-arch", what, details=wrong)
    return answer.modules


def unpack(wheel: Path, folder: Path) -> None:
    """
    Make *folder* hold the files of *wheel*; equal files keep their times, which ninja compares.

    Raises:
        wheel-invalid: The wheel is damaged.
    """
    with zip_file(wheel) as source:
        members = zip_members(source, wheel.name)
        for path in folder.rglob("*"):
            if path.is_file() and path.relative_to(folder).as_posix() not in members:
                path.unlink()
        for name, info in members.items():
            path, data = folder / name, source.read(info)
            if path.is_file() and path.read_bytes() == data:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            # A killed run must not leave a part of a file that has the time of a whole one.
            temporary = path.with_name(f".{path.name}.new")
            temporary.write_bytes(data)
            temporary.replace(path)


def pack(
    folder: Path,
    spec: AotSpec,
    sources: Path,
    context: RunContext,
    libraries: Mapping[AotModule, bytes],
    dist_info: DistInfoFiles,
) -> Path:
    """
    Write the wheel of *libraries* to *folder*, with the version and the licences of the wheel
    *sources*; return its path.
    """
    origin = WheelName.of(sources.name)
    licenses = f"{origin.info}/licenses/"
    with zip_file(sources) as opened:
        head = BytesParser().parsebytes(opened.read(f"{origin.info}/METADATA"))
        texts = {name: opened.read(name) for name in opened.namelist() if name.startswith(licenses)}
    base = WheelName(spec.package, origin.version, f"py3-none-{PLATFORM}_{context.machine}")
    tag = graft.platform_tag(base.filename, libraries.values())
    name = WheelName(spec.package, origin.version, f"py3-none-{tag}")
    by_arch: dict[str, tuple[str, ...]] = {}
    for module in sorted(libraries, key=lambda module: (module.codes, module.name)):
        # nvcc's sm_121f is FlashInfer's sm121f; `check` ensures that each module has one.
        arch = module.codes[0].replace("_", "")
        by_arch[arch] = (*by_arch.get(arch, ()), module.name)
    fields = {"arch": context.project.spec.arch, "version": origin.version}
    package = _PACKAGE.format(modules=by_arch, distribution=spec.distribution, **fields)
    files = {
        f"{spec.package}/jit_cache/{module.name}/{module.name}.so": data
        for module, data in libraries.items()
    }
    files[f"{spec.package}/__init__.py"] = package.encode()
    added = {file.removeprefix(f"{origin.info}/"): text for file, text in texts.items()}
    added |= dist_info.contents(name)
    lines = "".join(
        f"{key}: {value}\n"
        for key in ("License-Expression", "License-File")
        for value in head.get_all(key, [])
    )
    metadata = _METADATA.format(name=spec.distribution, licenses=lines, fork=head["Name"], **fields)
    return archive.write(folder, name, files, metadata, pure=False, dist_info=added)
