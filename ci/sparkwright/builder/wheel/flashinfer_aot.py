"""
FlashInfer's modules, compiled where the wheels are built and not on the machine that serves.

FlashInfer is a package of sources: a module is compiled when it is first used, by nvcc, for
minutes, and on a Spark with the memory that the model has. ``build/<stack>/aot.yaml`` names the
modules that a model needs, by FlashInfer's own generators; here they are generated and compiled as
FlashInfer would do it, from the bytes of the wheel that they will lie beside.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.builder.compile import ninja
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja import BuildFolder
from sparkwright.builder.environment import cross, host_compiler
from sparkwright.builder.environment.sandbox import Sandbox
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

_CALL = re.compile(r"flashinfer(?:\.\w+)+\._?gen_\w+")
#: A module's name becomes that of a folder, here and in the wheel.
_NAME = re.compile(r"\w[\w.+-]*")
#: Variables of the user that would change what is compiled.
_UNWANTED = ("CC", "CXX", "MAX_JOBS", "CUDA_PATH")

Plain = str | int | bool


class ModuleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A module, or several of one kind.

    Attributes:
        call: FlashInfer's generator, by its dotted name.
        arguments: Its keyword arguments. ``torch.bfloat16`` stands for the data type; a list stands
            for one module per element. models: What asks for it, as people call the models. reason:
            When it asks for it. arch: What FlashInfer compiles it for, where that is not the
            stack's arch whatever one asks for.
    """

    call: str
    models: tuple[str, ...]
    reason: str
    arguments: dict[str, Plain | list[Plain]] = {}
    arch: str = ""

    def __post_init__(self) -> None:
        if not _CALL.fullmatch(self.call):
            raise ValueError(
                f"call: {self.call!r} is not the dotted name of a generator of FlashInfer"
            )
        if not self.reason.strip() or not self.models:
            raise ValueError(f"{self.call}: models and reason say what the module is for")


class AotSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``aot.yaml``.

    Attributes:
        fork: Whose modules they are.
        distribution: The wheel's project; FlashInfer looks for a package of that name.
        seconds, longest: As in `ForkEnvironment`; what a unit holds stands there, with the fork.
    """

    fork: str
    distribution: str
    modules: tuple[ModuleSpec, ...]
    seconds: float = 0
    longest: float = 0


class Module(msgspec.Struct, frozen=True):
    """
    A generated module.

    Attributes:
        name: FlashInfer's, which is also the name of its folder and library.
        call: The generator that made it.
        units: Its sources, as the compiler sees them.
        codes: What nvcc is told to make, such as ``sm_121f``.
    """

    name: str
    call: str
    units: tuple[str, ...]
    codes: tuple[str, ...]
    ninja: str


class Answer(msgspec.Struct, frozen=True):
    """
    What `sparkwright.builder.wheel.jit_specs` answers: modules, the generator that does not exist,
    or the one that refused and why.
    """

    modules: tuple[Module, ...] = ()
    unknown: str = ""
    near: tuple[str, ...] = ()
    refused: str = ""
    why: str = ""


def path_of(project: Project) -> Path:
    """Return where the stack's ``aot.yaml`` is, or would be."""
    return project.build_folder / "aot.yaml"


def load(project: Project, fork: str) -> AotSpec | None:
    """
    Return what is compiled ahead of time for *fork*, or None; raise `file-invalid` where the file
    is none.
    """
    path = path_of(project)
    spec = strict_yaml.load(path, AotSpec) if path.is_file() else None
    if spec and not spec.modules:
        raise FileError(
            "file-invalid", f"{path} names no module.", todo="Name one, or remove the file."
        )
    return spec if spec and spec.fork == fork else None


class Workshop:
    """
    Where a stack's modules are generated and compiled; callers hold its lock (`name`).

    Args:
        wheel: The fork's wheel, whose sources are compiled.
    """

    def __init__(self, session: RunContext, tools: Toolchain, spec: AotSpec, wheel: Path) -> None:
        self._session, self._tools, self._spec, self._wheel = session, tools, spec, wheel
        self._target = cross.of(session, tools)
        self.folder = session.store.folder(
            "work", session.project.stack, session.named(spec.distribution)
        )
        self.package, self.build = self.folder / "src", self.folder / "build"

    @staticmethod
    def name(session: RunContext, spec: AotSpec) -> str:
        """Return the name of the lock."""
        return f"work-{session.project.stack}-{session.named(spec.distribution)}"

    @property
    def sandbox(self) -> Sandbox:
        """
        Where modules are compiled: without a network, in folders of the same names everywhere.
        """
        against = {self._target.root: "target"} if self._target.cross else {}
        return Sandbox.create(
            {self.folder: self._spec.distribution, self._tools.root: "tools", **against}
        )

    def make(self) -> dict[Module, Path]:
        """
        Return the libraries of all modules, compiled where they are not up to date.

        Raises:
            module-unknown, module-arch: aot.yaml and FlashInfer disagree. compile-failed: A unit
            was refused.
        """
        modules = self.generate()
        check_archs(modules, self._spec, self._session.project.spec.arch)
        self._compile(modules)
        return {module: self.build / module.name / f"{module.name}.so" for module in modules}

    def generate(self) -> tuple[Module, ...]:
        """
        Return the modules, their ninja files in the build folder; raise `module-unknown` where
        FlashInfer does not make one.
        """
        unpack(self._wheel, self.package)
        question, answer = self.folder / "question.json", self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        inside = self.sandbox.sandbox_path
        calls = [
            {"call": module.call, "arguments": module.arguments} for module in self._spec.modules
        ]
        places = {
            "package": str(inside(self.package)),
            "build": str(inside(self.build)),
            "answer": str(inside(answer)),
        }
        question.write_bytes(msgspec.json.encode({**places, "calls": calls}))
        script = shutil.copyfile(Path(__file__).parent / "jitspecs.py", self.folder / "jitspecs.py")
        log = (
            self._session.store.folder("logs")
            / f"{self._session.project.stack}-{self._spec.distribution}-generate.log"
        )
        with console.step(f"generate FlashInfer's modules for {self._session.project.spec.arch}"):
            self.sandbox.run(
                [inside(self._tools.python), "-I", inside(script), inside(question)],
                log=log,
                env=self._environment(),
                failure=partial(BuildError, "build-failed"),
                what="FlashInfer's generators cannot be asked.",
            )
        return checked(
            msgspec.json.decode(answer.read_bytes(), type=Answer), path_of(self._session.project)
        )

    def _compile(self, modules: tuple[Module, ...]) -> None:
        units = sum(len(module.units) for module in modules)
        console.note(f"{len(modules)} modules of {units} units")
        session, fork = self._session, self._spec.fork
        build_folder = BuildFolder.of(
            session, self._tools, fork, self.folder, self.sandbox, self._environment()
        )
        ninja.compile_targets(build_folder, (), Costs.of(session, fork), ninja.limits(session))

    def _environment(self) -> dict[str, str]:
        launcher = f"{self._tools.python} -IS {ninja.install_launcher(self.folder)}"
        ours = {
            "FLASHINFER_CUDA_ARCH_LIST": self._session.project.spec.arch,
            "FLASHINFER_WORKSPACE_BASE": str(self.folder / "workspace"),
            "FLASHINFER_NVCC_LAUNCHER": launcher,
            "FLASHINFER_CXX_LAUNCHER": launcher,
            # nvcc leaves its process id in the symbol table; without that table a link is
            # reproducible.
            "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-s",
        }
        # FlashInfer compiles its C++ with CXX, and gives CC to nvcc as the compiler for the host
        # part of CUDA.
        ours |= dict.fromkeys(
            ("CC", "CXX"),
            f"{self._target.triple}-g++"
            if self._target.cross
            else shlex.join(host_compiler.program()),
        )
        base = self._tools.environment(**self._target.environment(self._tools))
        kept = {
            name: value
            for name, value in base.items()
            if not name.startswith("FLASHINFER_") and name not in _UNWANTED
        }
        return {name: self.sandbox.translate(value) for name, value in {**kept, **ours}.items()}


def checked(answer: Answer, path: Path) -> tuple[Module, ...]:
    """
    Return the modules of FlashInfer's *answer* to the file at *path*.

    Raises:
        module-unknown: FlashInfer has no such generator, or it made no module of the arguments, or
            one without a proper name. file-invalid: Two entries give the same module.
    """
    if answer.unknown:
        near = [f"near: {name}" for name in answer.near] or ["nothing there has a name like it"]
        raise BuildError(
            "module-unknown",
            f"FlashInfer has no generator {answer.unknown}.",
            details=[*near, f"file: {path}"],
        )
    if answer.refused:
        raise BuildError(
            "module-unknown",
            f"{answer.refused} makes no module of what aot.yaml gives it.",
            details=[answer.why, f"file: {path}"],
        )
    if odd := [module.name for module in answer.modules if not _NAME.fullmatch(module.name)]:
        raise BuildError(
            "module-unknown",
            f"FlashInfer made {len(odd)} modules whose names cannot be folders of a wheel.",
            details=[repr(name) for name in odd],
        )
    if twice := [
        name
        for name, count in Counter(module.name for module in answer.modules).items()
        if count > 1
    ]:
        raise FileError(
            "file-invalid", f"{path} asks for the same module more than once.", details=twice
        )
    return answer.modules


def check_archs(modules: tuple[Module, ...], spec: AotSpec, arch: str) -> None:
    """
    Check what nvcc is told to compile each module for.

    Raises:
        module-arch: It is not the stack's *arch*, and not what the entry says instead.
    """
    expected = {entry.call: code(entry.arch or arch) for entry in spec.modules}
    wrong = [module for module in modules if module.codes != (expected[module.call],)]
    if wrong:
        details = [
            f"{module.name}: {', '.join(module.codes) or 'nothing'}, expected "
            f"{expected[module.call]}"
            for module in wrong
        ]
        raise BuildError(
            "module-arch",
            f"{len(wrong)} modules of FlashInfer are not compiled for {code(arch)}.",
            details=details,
        )


def code(arch: str) -> str:
    """Return ``12.1f`` as nvcc writes it: ``sm_121f``."""
    return f"sm_{arch.replace('.', '')}"


def unpack(wheel: Path, folder: Path) -> None:
    """
    Make *folder* hold the files of *wheel*; those that are the same already keep their times, which
    ninja compares.

    Raises:
        wheel-invalid: The wheel is damaged.
    """
    with zip_file(wheel) as archive:
        members = wheelfile.members(archive, wheel.name)
        for path in sorted(folder.rglob("*"), reverse=True) if folder.exists() else ():
            if not path.is_dir() and path.relative_to(folder).as_posix() not in members:
                path.unlink()
        for name, info in members.items():
            _write(folder / name, archive.read(info))


def _write(path: Path, data: bytes) -> None:
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A killed run must not leave a part of a file that has the time of a whole one.
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    temporary.replace(path)
