"""What is compiled ahead of time: the reviewed list, the questions to FlashInfer, and the wheel that its loader reads."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.audit import policy, wheel_reader
from sparkwright.audit import wheel as auditing
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel import flashinfer_aot, jit_cache, jit_specs
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.flashinfer_aot import AotSpec, Module, ModuleSpec
from sparkwright.builder.wheel.sbom import Bill, Papers
from sparkwright.core import strict_yaml
from sparkwright.forks.stack import Project

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

ROOT = Path(__file__).parents[2]
STACKS = sorted(path.parent.name for path in ROOT.glob("build/*/aot.yaml"))

#: FlashInfer in small: generators that name their modules by their arguments, and a spec that writes a ninja file as the real one does.
ENV = """\
import pathlib
FLASHINFER_WORKSPACE_DIR = FLASHINFER_JIT_DIR = FLASHINFER_GEN_SRC_DIR = pathlib.Path("/nonexistent")
"""
TOY = """\
import requests, pynvml
from . import env as jit_env

class Spec:
    def __init__(self, name, code):
        self.name, self.code = name, code
        self.ninja_path = jit_env.FLASHINFER_JIT_DIR / name / "build.ninja"
    def write_ninja(self):
        self.ninja_path.parent.mkdir(parents=True, exist_ok=True)
        flags, unit = f"cuda_cflags = -gencode=arch=x,code={self.code}", f"build {self.name}.o: cuda_compile /src/{self.name}.cu"
        self.ninja_path.write_text(f"{flags}\\n{unit}\\n")

def gen_toy_module(kind, width=8):
    return Spec(f"toy_{kind}_{width}", "sm_121f")

def gen_toy_family_modules():
    return [Spec("toy_family", "sm_120f"), Spec("toy_exact", "sm_121a")]

def gen_picky_module(kind):
    raise ValueError(f"{kind} is not supported")

def gen_dsl_module():
    return object()
"""


@pytest.fixture(name="package")
def _package(tmp_path: Path) -> Path:
    """Return a folder with the small FlashInfer, whose own ``__init__`` cannot be imported here, as the real one's cannot."""
    files = {"__init__.py": "import a_library_that_is_not_locked\n", "jit/__init__.py": "", "jit/env.py": ENV, "jit/toy.py": TOY}
    for name, text in files.items():
        path = tmp_path / "package" / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path / "package"


def ask(package: Path, *calls: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Ask as a build does: by a process of its own, with files for question and answer."""
    build = package.parent / "build"
    build.mkdir(exist_ok=True)
    question, answer = package.parent / "question.json", package.parent / "answer.json"
    listed = [{"call": call, "arguments": arguments} for call, arguments in calls]
    question.write_text(json.dumps({"package": str(package), "build": str(build), "answer": str(answer), "calls": listed}), "utf-8")
    subprocess.run([sys.executable, "-I", str(jit_specs.__file__), str(question)], check=True, timeout=120)
    return dict(json.loads(answer.read_bytes()))


def test_a_generator_is_asked_without_the_rest_of_flashinfer(package: Path) -> None:
    """The package's ``__init__`` is not run, and what only a running FlashInfer needs may be absent; ninja's files are written."""
    found = ask(package, ("flashinfer.jit.toy.gen_toy_module", {"kind": "a"}))

    (module,) = found["modules"]
    assert (module["name"], module["units"], module["codes"]) == ("toy_a_8", ["/src/toy_a_8.cu"], ["sm_121f"])
    build = package.parent / "build"
    assert (build / "build.ninja").read_text() == f"ninja_required_version = 1.3\nsubninja {build / 'toy_a_8' / 'build.ninja'}\n"


def test_a_list_stands_for_one_module_per_element(package: Path) -> None:
    """Two lists give every combination; a generator that gives several modules gives them all."""
    calls = [
        ("flashinfer.jit.toy.gen_toy_module", {"kind": ["a", "b"], "width": [8, 16]}),
        ("flashinfer.jit.toy.gen_toy_family_modules", {}),
    ]
    names = [module["name"] for module in ask(package, *calls)["modules"]]

    assert names == ["toy_a_8", "toy_a_16", "toy_b_8", "toy_b_16", "toy_family", "toy_exact"]


@pytest.mark.parametrize(
    ("call", "near"),
    [
        ("flashinfer.jit.toy.gen_toi_module", ["flashinfer.jit.toy.gen_toy_module"]),
        ("flashinfer.jit.norm.gen_toy_module", ["flashinfer.jit.toy.gen_toy_module"]),
        ("flashinfer.jit.toy.gen_zzzzzzzzzzzzzzzzzzzzzzzz", []),
    ],
)
def test_an_unknown_generator_is_named_with_those_of_like_names(package: Path, call: str, near: list[str]) -> None:
    """A typo, another module's generator, and a name like no other: the answer names what there is instead."""
    found = ask(package, (call, {}))

    assert found["unknown"] == call
    assert found["near"][:1] == near
    with refusal("module-unknown") as caught:
        flashinfer_aot.checked(msgspec.convert(found, type=flashinfer_aot.Answer), Path("aot.yaml"))
    assert call in caught.value.what
    assert all(f"near: {name}" in caught.value.details for name in near)


@pytest.mark.parametrize(
    ("call", "arguments", "why"),
    [
        ("gen_toy_module", {"kind": "a", "height": 1}, "height"),
        ("gen_toy_module", {}, "kind"),
        ("gen_picky_module", {"kind": "b"}, "b is not supported"),
        ("gen_dsl_module", {}, "not compiled by nvcc"),
    ],
)
def test_a_generator_that_makes_no_module_says_why(package: Path, call: str, arguments: dict[str, Any], why: str) -> None:
    """Wrong and missing arguments, a refusal of FlashInfer's own, and a module of another compiler end with their reason."""
    found = ask(package, (f"flashinfer.jit.toy.{call}", arguments))

    with refusal("module-unknown") as caught:
        flashinfer_aot.checked(msgspec.convert(found, type=flashinfer_aot.Answer), Path("aot.yaml"))
    assert why in "\n".join(caught.value.details)


def module(name: str, *codes: str, call: str = "flashinfer.jit.toy.gen_toy_module") -> Module:
    return Module(name, call, (f"/src/{name}.cu",), codes, f"{name}/build.ninja")


def test_a_module_that_is_asked_for_twice_is_an_error() -> None:
    """Two entries that give the same module: one of them has no effect, so somebody is mistaken about it."""
    with refusal("file-invalid") as caught:
        flashinfer_aot.checked(
            flashinfer_aot.Answer((module("a", "sm_121f"), module("b", "sm_121f"), module("a", "sm_121f"))), Path("aot.yaml")
        )

    assert caught.value.details == ("a",)


@pytest.mark.parametrize("name", ["", "..", "../up", "/root", "a/b", "a b", "a\n"])
def test_a_module_that_would_leave_its_folder_is_refused(name: str) -> None:
    """The name comes from a program of others; it is compared before any path is made of it."""
    with refusal("module-unknown"):
        flashinfer_aot.checked(flashinfer_aot.Answer((module(name, "sm_121f"),)), Path("aot.yaml"))


def spec(**changes: Any) -> ModuleSpec:
    fields = {"call": "flashinfer.jit.toy.gen_toy_module", "models": ["m"], "reason": "r", **changes}
    return msgspec.convert(fields, type=ModuleSpec)


@pytest.mark.parametrize("codes", [(), ("sm_120f",), ("sm_121a",), ("sm_121f", "sm_90a")])
def test_a_module_for_another_arch_is_an_error(codes: tuple[str, ...]) -> None:
    """Nothing, another arch, the right arch in another feature set, and one arch too many are each named; the right one is not."""
    listed = AotSpec("flashinfer", "flashinfer-jit-cache", (spec(),))

    with refusal("module-arch") as caught:
        flashinfer_aot.check_archs((module("a", *codes), module("b", "sm_121f")), listed, "12.1f")

    assert len(caught.value.details) == 1
    assert "expected sm_121f" in caught.value.details[0]


def test_an_entry_may_say_which_arch_flashinfer_gives_it() -> None:
    """With ``arch`` that one is asked for, and the stack's is the error."""
    listed = AotSpec("flashinfer", "flashinfer-jit-cache", (spec(arch="12.0f"),))

    flashinfer_aot.check_archs((module("a", "sm_120f"),), listed, "12.1f")
    with refusal("module-arch"):
        flashinfer_aot.check_archs((module("a", "sm_121f"),), listed, "12.1f")


@pytest.mark.parametrize(
    "changes",
    [
        {"call": "os.system"},
        {"call": "flashinfer.jit.norm"},
        {"call": "flashinfer.gen_x; import os"},
        {"reason": " "},
        {"models": []},
        {"arguments": {"kind": [["nested"]]}},
        {"arguments": {"kind": 1.5}},
        {"argument": {}},
    ],
)
def test_an_entry_that_does_not_say_what_it_is_for_is_refused(changes: dict[str, Any]) -> None:
    """What is no generator's name, has no reason or model, or has arguments that no generator takes, cannot be written down."""
    fields = {"call": "flashinfer.jit.toy.gen_toy_module", "models": ["m"], "reason": "r", **changes}
    text = json.dumps({"fork": "flashinfer", "distribution": "flashinfer-jit-cache", "modules": [fields]})

    with refusal("file-invalid"):
        strict_yaml.parse(text, AotSpec, "aot.yaml")


def test_the_file_is_for_one_fork_and_may_be_absent(mini: Mini) -> None:
    """Without the file nothing is compiled ahead of time; with it, for its fork alone; a file that names no module is a mistake."""
    project = mini.session().project
    assert flashinfer_aot.load(project, "flashinfer") is None

    path = flashinfer_aot.path_of(project)
    path.write_text(strict_yaml.dump(AotSpec("flashinfer", "mini-jit-cache", (spec(),))), "utf-8")
    assert flashinfer_aot.load(project, "flashinfer") is not None
    assert flashinfer_aot.load(project, "vllm") is None

    path.write_text("{fork: flashinfer, distribution: mini-jit-cache, modules: []}\n", "utf-8")
    with refusal("file-invalid"):
        flashinfer_aot.load(project, "flashinfer")


@pytest.mark.parametrize("stack", STACKS)
def test_the_reviewed_lists_can_be_read_and_audited(stack: str) -> None:
    """Each stack's list is valid, and the audit knows the wheel; an entry with an arch of its own has a policy with the same."""
    project = Project(ROOT, stack)
    listed = flashinfer_aot.load(project, "flashinfer")
    rules = policy.load(project.audit_file, project.spec.arch)

    assert listed is not None
    assert listed.distribution in rules.distributions
    archs = {one.arch for one in listed.modules if one.arch}
    assert archs == {one.arch for one in rules.distributions[listed.distribution].libraries if one.arch}


@pytest.fixture(name="sources")
def _sources(tmp_path: Path) -> Path:
    """Return a wheel of sources with a version label, a licence, and two files to compile."""
    name = WheelName("flashinfer_python", "0.7.2.post1+spark.2026.11.p0.cu130", "py3-none-any")
    metadata = (
        f"Metadata-Version: 2.4\nName: flashinfer-python\nVersion: {name.version}\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n"
    )
    path = tmp_path / "wheels" / name.filename
    path.parent.mkdir()
    files = {f"{name.info}/licenses/LICENSE": b"Apache\n", "flashinfer/a.cu": b"a\n", "flashinfer/b.cu": b"b\n"}
    wheelfile.write(path, name, files, metadata, pure=True)
    return path


def test_unpacking_again_touches_only_what_changed(sources: Path, tmp_path: Path) -> None:
    """A file that is the same keeps its time, so that ninja leaves it; what the wheel no longer has is gone, what changed is there."""
    folder = tmp_path / "src"
    flashinfer_aot.unpack(sources, folder)
    for path in folder.rglob("*.cu"):
        os.utime(path, ns=(1, 1))
    (folder / "flashinfer" / "b.cu").write_text("?\n")
    (folder / "flashinfer" / "old.cu").write_text("old\n")

    flashinfer_aot.unpack(sources, folder)

    assert (folder / "flashinfer" / "a.cu").stat().st_mtime_ns == 1
    assert (folder / "flashinfer" / "b.cu").read_text() == "b\n"
    assert (folder / "flashinfer" / "b.cu").stat().st_mtime_ns != 1
    assert not (folder / "flashinfer" / "old.cu").exists()


def test_a_damaged_wheel_is_not_compiled(sources: Path, tmp_path: Path) -> None:
    """A wheel that was cut off is found out before its sources are taken for whole."""
    sources.write_bytes(sources.read_bytes()[:-40])

    with refusal("wheel-invalid"):
        flashinfer_aot.unpack(sources, tmp_path / "src")


@pytest.fixture(scope="module", name="library")
def _library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a real shared library."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "a.c").write_text("int answer(void) { return 42; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "a.so", folder / "a.c"], check=True)
    return (folder / "a.so").read_bytes()


def imported(path: Path) -> ModuleType:
    """Import the package in the folder *path* under a name of its own."""
    found = importlib.util.spec_from_file_location("packed_jit_cache", path / "__init__.py")
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    # A class of the package looks its module up while it is made.
    sys.modules["packed_jit_cache"] = made
    try:
        found.loader.exec_module(made)
    finally:
        del sys.modules["packed_jit_cache"]
    return made


def packed(mini: Mini, sources: Path, library: bytes, folder: Path) -> Path:
    folder.mkdir()
    modules = {module("norm", "sm_121f"): library, module("act", "sm_121f"): library, module("fp4_120f", "sm_120f"): library}
    listed = AotSpec("flashinfer", "flashinfer-jit-cache", (spec(),))
    return jit_cache.pack(folder, listed, sources, mini.session(), modules, Papers(b"{}\n", Bill()))


def test_the_package_says_what_the_loader_asks(mini: Mini, sources: Path, library: bytes, tmp_path: Path) -> None:
    """One provider per architecture, each with FlashInfer's own version and the modules that are compiled for it, where the files lie."""
    path = packed(mini, sources, library, tmp_path / "out")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    made = imported(tmp_path / "site" / "flashinfer_jit_cache")
    providers = {one.cuda_architectures: one for one in made.get_jit_cache_providers()}

    assert made.__version__ == "0.7.2.post1+spark.2026.11.p0.cu130"
    assert {archs: one.modules for archs, one in providers.items()} == {("sm120f",): ("fp4_120f",), ("sm121f",): ("act", "norm")}
    assert {one.version for one in providers.values()} == {made.__version__}
    assert len({one.provider_id for one in providers.values()}) == 2
    for one in providers.values():
        assert one.jit_cache_dir == made.get_jit_cache_dir()
        assert all((Path(one.jit_cache_dir) / name / f"{name}.so").read_bytes() == library for name in one.modules)


def test_the_wheel_is_whole_and_bound_to_the_wheel_of_the_sources(mini: Mini, sources: Path, library: bytes, tmp_path: Path) -> None:
    """Its RECORD agrees with its members, its tag names this machine, it carries the licence, and it wants the sources' exact version."""
    path = packed(mini, sources, library, tmp_path / "out")
    about = wheel_reader.subject(path)
    seen: list[str] = []
    mismatches = wheel_reader.walk(path, about, tmp_path, lambda binary: seen.append(binary.name))
    name = WheelName.of(path.name)
    with zipfile.ZipFile(path) as archive:
        metadata = archive.read(f"{name.info}/METADATA").decode()
        licence = archive.read(f"{name.info}/licenses/LICENSE")

    assert not mismatches
    assert len(seen) == 3
    assert name.tag.startswith("py3-none-manylinux_2_")
    assert name.tag.endswith(mini.session().machine)
    assert "Requires-Dist: flashinfer-python==0.7.2.post1+spark.2026.11.p0.cu130\n" in metadata
    assert "License-File: LICENSE\n" in metadata
    assert licence == b"Apache\n"


def test_equal_libraries_give_equal_wheels(mini: Mini, sources: Path, library: bytes, tmp_path: Path) -> None:
    """Packing twice gives the same bytes: nothing of the time or the place gets in."""
    first, second = (packed(mini, sources, library, tmp_path / name) for name in ("one", "two"))

    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "fields", [{"arch": "12.0f"}, {"arch": "sm_120f", "reason": "r"}, {"arch": "12.0f", "reason": "r", "role": "base"}]
)
def test_an_arch_of_a_library_s_own_wants_a_reason(fields: dict[str, Any]) -> None:
    """The audit takes another arch for one library only with a reason, in CMake's spelling, and only for what is compiled here."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"glob": "*.so", "role": "target", **fields}, type=policy.LibraryPolicy)


@pytest.mark.toolchain
def test_the_audit_judges_each_library_by_the_arch_that_it_is_for(mini: Mini, sources: Path, cuda_bin: Path, tmp_path: Path) -> None:
    """Code for 12.0f passes where the policy says 12.0f for that library, and is a finding where the stack's 12.1f is asked for."""
    (tmp_path / "a.cu").write_text("__global__ void a(int *x) { *x = 1; }\n")
    command: list[str | Path] = [
        cuda_bin / "nvcc",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "-cudart",
        "shared",
        "-gencode",
        "arch=compute_120f,code=sm_120f",
    ]
    environment = {**os.environ, "CUDA_HOME": str(cuda_bin.parent)}
    subprocess.run([*command, f"-L{cuda_bin.parent / 'lib'}", "-o", tmp_path / "a.so", tmp_path / "a.cu"], check=True, env=environment)
    listed = AotSpec("flashinfer", "flashinfer-jit-cache", (spec(arch="12.0f"),))
    modules = {module("a", "sm_120f"): (tmp_path / "a.so").read_bytes()}
    wheel = jit_cache.pack(tmp_path, listed, sources, mini.session(), modules, Papers(b"{}\n", Bill()))
    findings = {}
    for arch in ("12.0f", ""):
        library = policy.LibraryPolicy("*.so", "target", "FlashInfer gives it", arch)
        rules = policy.AuditPolicy("12.1f", ("lib*", "ld-*"), {"flashinfer-jit-cache": policy.DistributionPolicy("test", (library,))})
        findings[arch] = {finding.rule for finding in auditing.audit(wheel, rules, cuda_bin).findings}

    assert findings == {"12.0f": set(), "": {"arch-missing", "arch-folded"}}


def test_the_script_needs_only_the_standard_library() -> None:
    """It runs with the Python of the tools, where sparkwright is not installed; torch it takes only when an argument names it."""
    tree = ast.parse(Path(jit_specs.__file__).read_text("utf-8"))
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {name.partition(".")[0] for name in imports} <= sys.stdlib_module_names
