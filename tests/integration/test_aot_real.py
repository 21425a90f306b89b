"""The locked FlashInfer with modules that were compiled ahead of time: its own loader takes them, and compiles nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from uv import find_uv_bin

from sparkwright.audit import policy, wheel
from sparkwright.builder import pipeline, toolchain
from sparkwright.builder.wheel import flashinfer_aot
from sparkwright.builder.wheel.flashinfer_aot import AotBuilder, AotSpec, ModuleSpec
from sparkwright.cli import demo
from sparkwright.core import process, strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

pytestmark = [pytest.mark.long, pytest.mark.network, pytest.mark.toolchain]

ROOT = Path(__file__).parents[2]
STACK = "2026.11"

#: Two small modules; a build of the reviewed list takes an hour and more on two cores.
SMALL = AotSpec(
    "flashinfer",
    "flashinfer-jit-cache",
    (ModuleSpec("flashinfer.jit.activation.gen_act_and_mul_module", ("test",), "small", {"act_func_name": ["silu", "gelu"]}),),
)

#: What a user's program does, less FlashInfer's ``__init__``, which wants packages that no build needs.
LOAD = """\
import json, sys, types
sys.modules |= {name: types.ModuleType(name) for name in ("requests", "pynvml")}
bare = types.ModuleType("flashinfer")
bare.__path__ = [sys.argv[1] + "/flashinfer"]
sys.modules["flashinfer"] = bare
from flashinfer.jit.activation import gen_act_and_mul_module
found = {}
for name in ("silu", "gelu", "gelu_tanh"):
    spec = gen_act_and_mul_module(name)
    try:
        loaded = hasattr(spec.build_and_load(), spec.name)
    except Exception as error:
        loaded = type(error).__name__
    found[spec.name] = [spec.is_aot, loaded]
print(json.dumps(found))
"""


@pytest.fixture(scope="module", name="context")
def _context(user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """Return a run on the reviewed data with the small list."""
    folder = tmp_path_factory.mktemp("aot")
    for name in ("forks", "cherry_picks", "build", "ci/audit"):
        shutil.copytree(ROOT / name, folder / "project" / name)
    shutil.copy(ROOT / "ci" / "audit.yaml", folder / "project" / "ci")
    project = Project(folder / "project", STACK)
    (project.build_folder / "aot.yaml").write_text(strict_yaml.dump(SMALL), "utf-8")
    (folder / "store").mkdir()
    for name in demo.SHARED:
        (folder / "store" / name).symlink_to(user_store.folder(name), target_is_directory=True)
    return RunContext(project, Store(folder / "store"), ("flashinfer",), folder / "dist", source="sdist")


def test_first_use_on_a_spark_compiles_nothing(context: RunContext, tmp_path: Path) -> None:
    """
    FlashInfer's loader takes the packed libraries and calls no compiler; a module that was not packed is what it would compile. Their
    cubins are all for sm_121f, there is no PTX, and a second build makes nothing.
    """
    tools, sources = toolchain.obtain(context), pipeline.build(context, "flashinfer")
    modules = flashinfer_aot.build(context, SMALL, sources)
    wheels = [pipeline.wheel_path(context, built) for built in (sources, modules)]
    assert pipeline.current(context, "flashinfer") == sources
    assert flashinfer_aot.build(context, SMALL, sources) == modules
    audited = wheel.audit(wheels[1], policy.load(context.project.audit_file, context.project.spec.arch), tools.cuda / "bin")
    assert {Path(library.name).name: (library.cubins, library.ptx) for library in audited.libraries} == {
        f"{name}_and_mul.so": ({"sm_121f": 1}, {}) for name in ("silu", "gelu")
    }
    # The policy of the stack also asks for the module that this list leaves out.
    assert {finding.rule for finding in audited.findings} == {"library-missing"}

    # An environment with the wheels, the tools' torch and TVM FFI, and compilers that write down that they were called.
    env = process.clean_environment(UV_NO_CONFIG="1", UV_OFFLINE="1", UV_NO_CACHE="1")
    python = tmp_path / "venv" / "bin" / "python"
    process.output([find_uv_bin(), "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], env=env)
    process.output([find_uv_bin(), "pip", "install", "--no-index", "--no-deps", "--python", python, *wheels], env=env)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site / "tools.pth").write_text("".join(f"{path}\n" for path in tools.root.glob("lib/python3*/site-packages")))
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "ninja", "c++"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\nexit 1\n')
        (tmp_path / "bin" / name).chmod(0o755)
    # What a capability of 12.1 becomes there; a GPU would be asked in the same place.
    spark = {"FLASHINFER_CUDA_ARCH_LIST": "12.1", "CUDA_HOME": str(tmp_path), "FLASHINFER_DISABLE_JIT": "1"}
    paths = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}/usr/bin:/bin", "HOME": str(tmp_path / "home"), "LC_ALL": "C.UTF-8"}
    said = process.output([python, "-c", LOAD, str(site)], env={**paths, **spark})

    assert json.loads(said.splitlines()[-1]) == {
        "silu_and_mul": [True, True], "gelu_and_mul": [True, True], "gelu_tanh_and_mul": [False, "MissingJITCacheError"],
    }  # fmt: skip
    # FlashInfer asks nvcc for its release; nothing else is called.
    calls = (tmp_path / "called").read_text().splitlines() if (tmp_path / "called").exists() else []
    assert set(calls) <= {"nvcc --version"}


def test_every_module_of_the_reviewed_list_is_one_of_the_locked_release(context: RunContext) -> None:
    """FlashInfer makes each of them, for the arch that the list says; among them is the quantiser that it loads on a Spark."""
    spec = flashinfer_aot.load(Project(ROOT, STACK), "flashinfer")
    assert spec is not None
    sources = pipeline.wheel_path(context, pipeline.build(context, "flashinfer"))
    modules = AotBuilder(context, toolchain.obtain(context), spec, sources).generate()

    assert {module.call for module in modules} == {entry.call for entry in spec.modules}
    assert {"fp4_quantization_120f", "fused_moe_120", "sampling"} <= {module.name for module in modules}
