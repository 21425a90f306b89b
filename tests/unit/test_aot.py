"""FlashInfer's modules compiled ahead of time: the reviewed list, the generated modules, and the wheel that FlashInfer's loader reads."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.audit import policy
from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.wheel import archive, flashinfer_aot
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.flashinfer_aot import (
    AotModule,
    AotSpec,
    ModuleSpec,
)
from sparkwright.builder.wheel.sbom import DistInfoFiles, SbomInput
from sparkwright.core import process, strict_yaml
from sparkwright.forks.stack import Project

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

ROOT = Path(__file__).parents[2]
STACKS = sorted(path.parent.name for path in ROOT.glob("build/*/aot.yaml"))
TOY_CALL = "flashinfer.jit.toy.gen_toy_module"

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


def spec(**changes: Any) -> AotSpec:
    fields = {"call": TOY_CALL, "models": ["m"], "reason": "r", **changes}
    return AotSpec("flashinfer", "flashinfer-jit-cache", (msgspec.convert(fields, type=ModuleSpec),))


def generate(package: Path, *calls: tuple[str, Mapping[str, Any]]) -> tuple[AotModule, ...]:
    """Run the script as a build does: in a process of its own, with files for question and answer."""
    build = package.parent / "build"
    build.mkdir(exist_ok=True)
    listed = [{"call": f"flashinfer.jit.{call}", "arguments": arguments} for call, arguments in calls]
    process.output([sys.executable, "-IS", flashinfer_aot._SCRIPT, package, build, json.dumps(listed)])
    return msgspec.json.decode((build / "modules.json").read_bytes(), type=tuple[AotModule, ...])


def test_modules_are_generated_without_the_rest_of_flashinfer(package: Path) -> None:
    """The package's ``__init__`` is not run; a list stands for one module per element."""
    calls = [("toy.gen_toy_module", {"kind": ["a", "b"], "width": [8, 16]}), ("toy.gen_toy_family_modules", {})]
    modules = generate(package, *calls)
    build = package.parent / "build"

    assert [module.name for module in modules] == ["toy_a_8", "toy_a_16", "toy_b_8", "toy_b_16", "toy_family", "toy_exact"]
    assert modules[0] == module("toy_a_8", "sm_121f")
    included = [f"subninja {build / module.name / 'build.ninja'}" for module in modules]
    assert (build / "build.ninja").read_text().splitlines() == ["ninja_required_version = 1.3", *included]


def test_a_module_that_flashinfer_does_not_make_is_refused(package: Path, mini: Mini, tmp_path: Path) -> None:
    """A typo in aot.yaml, or a generator that another release renamed, is named before anything is compiled."""
    tools = Toolchain("key", tmp_path / "tools")
    (tools.root / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13").mkdir(parents=True)
    (tools.root / "bin").mkdir()
    tools.python.symlink_to(sys.executable)
    files = {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*.py")}
    metadata = "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 1\n"
    wheel = archive.write(tmp_path, WheelName.of("flashinfer_python-1-py3-none-any.whl"), files, metadata, pure=True)
    asked = spec(call="flashinfer.jit.toy.gen_toi_module")

    with refusal("module-unknown", match=r"does not generate the modules of demo") as caught:
        flashinfer_aot.AotBuilder(mini.context(), tools, asked, wheel).generate()
    assert any("no attribute 'gen_toi_module'" in line for line in caught.value.details)


def module(name: str, *codes: str) -> AotModule:
    return AotModule(name, TOY_CALL, codes)


@pytest.mark.parametrize(
    ("arch", "names", "codes", "reference"),
    [
        ("", ["a"], ("sm_121f",), ""),
        ("12.0f", ["a"], ("sm_120f",), ""),
        ("", ["a"], (), "module-arch"),
        ("", ["a"], ("sm_121f", "sm_90a"), "module-arch"),
        ("12.0f", ["a"], ("sm_121f",), "module-arch"),
        # The ninja file of the second would replace that of the first.
        ("", ["a", "b", "a"], ("sm_121f",), "file-invalid"),
        *(("", [name], ("sm_121f",), "module-unknown") for name in ("", "..", "/etc/x", ".hidden", "a/b", "a\n")),
    ],
)
def test_a_module_has_the_architecture_of_its_entry_and_a_folder_of_its_own(
    arch: str, names: list[str], codes: tuple[str, ...], reference: str
) -> None:
    with refusal(reference) if reference else contextlib.nullcontext():
        flashinfer_aot.check([module(name, *codes) for name in names], spec(arch=arch), "12.1f")


@pytest.mark.parametrize(
    "changes",
    [
        {"call": "os.system"},
        {"call": "flashinfer.gen_x; import os"},
        {"reason": " "},
        {"models": []},
        {"arguments": {"kind": [["nested"]]}},
        {"argument": {}},
    ],
)
def test_an_entry_that_names_no_generator_reason_or_model_is_refused(changes: dict[str, Any]) -> None:
    fields = {"call": TOY_CALL, "models": ["m"], "reason": "r", **changes}
    text = json.dumps({"fork": "flashinfer", "distribution": "flashinfer-jit-cache", "modules": [fields]})

    with refusal("file-invalid"):
        strict_yaml.parse(text, AotSpec, "aot.yaml")


@pytest.mark.parametrize("stack", STACKS)
def test_the_reviewed_lists_are_valid_and_agree_with_the_audit_policy(stack: str) -> None:
    project = Project(ROOT, stack)
    listed = flashinfer_aot.load(project, "flashinfer")
    rules = policy.load(project.audit_file, project.spec.arch)

    assert listed is not None
    archs = {entry.arch for entry in listed.modules if entry.arch}
    assert archs == {library.arch for library in rules.distributions[listed.distribution].libraries if library.arch}


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
    archive.write(path.parent, name, files, metadata, pure=True)
    return path


@pytest.fixture(scope="module", name="library")
def _library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a real shared library."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "a.c").write_text("int answer(void) { return 42; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "a.so", folder / "a.c"], check=True)
    return (folder / "a.so").read_bytes()


def packed(mini: Mini, sources: Path, library: bytes, folder: Path) -> Path:
    folder.mkdir()
    modules = {module("norm", "sm_121f"): library, module("act", "sm_121f"): library, module("fp4_120f", "sm_120f"): library}
    return flashinfer_aot.pack(folder, spec(), sources, mini.context(), modules, DistInfoFiles(b"{}\n", SbomInput()))


#: The questions of FlashInfer's loader.
LOADER = """\
import json, sys
sys.path.insert(0, "{site}")
import flashinfer_jit_cache as package
providers = [provider._asdict() for provider in package.get_jit_cache_providers()]
print(json.dumps(dict(version=package.__version__, folder=package.get_jit_cache_dir(), providers=providers)))
"""


def test_the_package_has_one_provider_per_architecture(mini: Mini, sources: Path, library: bytes, tmp_path: Path) -> None:
    """FlashInfer's loader finds its version, the modules and the libraries; the wheel requires the sources' exact version."""
    path = packed(mini, sources, library, tmp_path / "out")
    name, site = WheelName.of(path.name), tmp_path / "site"
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site)
    answer = json.loads(process.output([sys.executable, "-c", LOADER.format(site=site)]))
    metadata = (site / name.info / "METADATA").read_text()

    assert {provider["version"] for provider in answer["providers"]} == {WheelName.of(sources.name).version}
    assert [(provider["cuda_architectures"], provider["modules"]) for provider in answer["providers"]] == [
        (["sm120f"], ["fp4_120f"]),
        (["sm121f"], ["act", "norm"]),
    ]
    assert (Path(answer["folder"]) / "norm" / "norm.so").read_bytes() == library
    assert re.fullmatch(rf"py3-none-manylinux_2_\d+_{mini.context().machine}", name.tag)
    assert f"Requires-Dist: flashinfer-python=={name.version}\n" in metadata
    assert (site / name.info / "licenses/LICENSE").read_bytes() == b"Apache\n"
