"""FlashInfer's modules compiled ahead of time: the reviewed list, the generated modules, and the wheel that FlashInfer's loader reads."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import fatbins
from tests.unit.conftest import Mini

from sparkwright.audit import policy
from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.wheel import archive, flashinfer_aot
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.flashinfer_aot import (
    AotBuilder,
    AotModule,
    AotSpec,
    ModuleSpec,
)
from sparkwright.builder.wheel.sbom import DistInfoFiles, SbomInput
from sparkwright.core import process, strict_yaml
from sparkwright.forks.stack import Project

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
    return [Spec("toy_family", "sm_120f")]
"""
#: Its own ``__init__`` cannot be imported here, as the real one's cannot.
PACKAGE = {"__init__": "import a_library_that_is_not_locked\n", "jit/__init__": "", "jit/env": ENV, "jit/toy": TOY}
METADATA = "Metadata-Version: 2.4\nName: flashinfer-python\nVersion: 1+a\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n"


def spec(*entries: dict[str, Any]) -> AotSpec:
    """Return the list of a module for each of *entries*, which are changes of one entry."""
    modules = ({"call": TOY_CALL, "models": ["m"], "reason": "r", **entry} for entry in entries)
    return AotSpec("flashinfer", "flashinfer-jit-cache", msgspec.convert(list(modules), type=tuple[ModuleSpec, ...]))


@pytest.fixture(name="sources")
def _sources(tmp_path: Path) -> Path:
    """Return the wheel of the small FlashInfer."""
    files = {f"flashinfer/{name}.py": text.encode() for name, text in PACKAGE.items()}
    files["flashinfer_python-1+a.dist-info/licenses/LICENSE"] = b"Apache\n"
    return archive.write(tmp_path, WheelName.of("flashinfer_python-1+a-py3-none-any.whl"), files, METADATA, pure=True)


@pytest.fixture(name="generate")
def _generate(sources: Path, mini: Mini, tmp_path: Path) -> Callable[..., tuple[AotModule, ...]]:
    """Return what generates the modules of a list, as a build does."""
    tools = Toolchain("key", tmp_path / "tools")
    (tools.root / "lib/python3.11/site-packages/nvidia/cu13").mkdir(parents=True)
    (tools.root / "bin").mkdir()
    tools.python.symlink_to(sys.executable)
    return lambda *entries: AotBuilder(mini.context(), tools, spec(*entries), sources).generate()


def test_modules_are_generated_without_the_rest_of_flashinfer(generate: Callable[..., tuple[AotModule, ...]], mini: Mini) -> None:
    """The package's ``__init__`` is not run; a list stands for one module per element."""
    family = {"call": "flashinfer.jit.toy.gen_toy_family_modules", "arch": "12.0f"}
    modules = generate({"arguments": {"kind": ["a", "b"], "width": [8, 16]}}, family)
    (build,) = mini.cache.rglob("build/build.ninja")

    assert [item.name for item in modules] == ["toy_a_8", "toy_a_16", "toy_b_8", "toy_b_16", "toy_family"]
    assert modules[0] == module("toy_a_8", "sm_121f")
    assert [line.split("/")[-2] for line in build.read_text().splitlines()[1:]] == [item.name for item in modules]


def test_a_module_that_flashinfer_does_not_make_is_refused(generate: Callable[..., tuple[AotModule, ...]]) -> None:
    """A typo in aot.yaml, or a generator that another release renamed, is named before anything is compiled."""
    with refusal("module-unknown", match=r"does not generate the modules of demo") as caught:
        generate({"call": "flashinfer.jit.toy.gen_toi_module"})
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
        flashinfer_aot.check([module(name, *codes) for name in names], spec({"arch": arch}), "12.1f")


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
    with refusal("file-invalid"):
        strict_yaml.parse(json.dumps({"fork": "f", "distribution": "f-jit-cache", "modules": [fields]}), AotSpec, "aot.yaml")


@pytest.mark.parametrize("stack", STACKS)
def test_the_reviewed_lists_are_valid_and_agree_with_the_audit_policy(stack: str) -> None:
    project = Project(ROOT, stack)
    listed = flashinfer_aot.load(project, "flashinfer")
    rules = policy.load(project.audit_file, project.spec.arch)

    assert listed is not None
    archs = {entry.arch for entry in listed.modules if entry.arch}
    assert archs == {library.arch for library in rules.distributions[listed.distribution].libraries if library.arch}


#: The questions of FlashInfer's loader.
LOADER = """\
import json, sys
sys.path.insert(0, "{site}")
import flashinfer_jit_cache as package
providers = [provider._asdict() for provider in package.get_jit_cache_providers()]
print(json.dumps(dict(version=package.__version__, folder=package.get_jit_cache_dir(), providers=providers)))
"""


def test_the_package_has_one_provider_per_architecture(mini: Mini, sources: Path, tmp_path: Path) -> None:
    """FlashInfer's loader finds its version, the modules and the libraries; the wheel requires the sources' exact version."""
    (site := tmp_path / "site").mkdir()
    library = fatbins.library(tmp_path)
    modules = {module("norm", "sm_121f"): library, module("act", "sm_121f"): library, module("fp4_120f", "sm_120f"): library}
    path = flashinfer_aot.pack(tmp_path, spec({}), sources, mini.context(), modules, DistInfoFiles(b"{}\n", SbomInput()))
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site)
    answer = json.loads(process.output([sys.executable, "-c", LOADER.format(site=site)]))
    info = site / WheelName.of(path.name).info

    assert [(provider["version"], provider["cuda_architectures"], provider["modules"]) for provider in answer["providers"]] == [
        ("1+a", ["sm120f"], ["fp4_120f"]),
        ("1+a", ["sm121f"], ["act", "norm"]),
    ]
    assert (Path(answer["folder"]) / "norm" / "norm.so").read_bytes() == library
    assert re.search(rf"-py3-none-manylinux_2_\d+_{mini.context().machine}\.whl$", path.name)
    assert "Requires-Dist: flashinfer-python==1+a\n" in (info / "METADATA").read_text()
    assert (info / "licenses/LICENSE").read_bytes() == b"Apache\n"
