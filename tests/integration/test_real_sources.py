"""Stack 2026.11 as it is reviewed: the real releases, fetched from the package index, patched, rewritten and compiled in part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from uv import find_uv_bin

from sparkwright.audit import policy, wheel
from sparkwright.builder import pipeline, toolchain
from sparkwright.builder.wheel import flashinfer_aot
from sparkwright.builder.wheel.flashinfer_aot import AotBuilder, AotSpec, ModuleSpec
from sparkwright.builder.workspace import rules_of, source_tree
from sparkwright.cherry_picks import series
from sparkwright.cli import demo
from sparkwright.core import process, strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates import numerics

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
PROJECT = Project(ROOT, "2026.11")


@pytest.fixture(name="context")
def _context(user_store: Store) -> RunContext:
    return RunContext(PROJECT, user_store, tuple(PROJECT.spec.forks), ROOT / "dist")


@pytest.mark.parametrize("fork", PROJECT.spec.forks)
def test_what_the_lock_names_is_patched_and_rewritten(context: RunContext, fork: str) -> None:
    """The index delivers it; each patch of the series and each rule is applied once, and changes only the files that they name."""
    locked = context.lock.forks[fork]
    made, file = source_tree(context, fork), locked.sdist or locked.wheel
    patches = series.load(PROJECT.series_folder(fork))
    rules = rules_of(context, fork).rules
    trees = [made.source.tree, *(step.tree for step in made.steps)]
    named = {path for patch in patches for path in patch.files} | {site.file for site in made.sites}

    assert file
    assert made.source.tree == file.tree
    # The commit, once `lock` has recorded that the archive proves it.
    assert made.source.pin == (locked.git.commit if locked.proof and locked.git else file.sha256)
    assert [step.name for step in made.steps] == [patch.name for patch in patches]
    # Rules for vendored sources are applied where CMake is configured.
    assert [site.rule for site in made.sites] == [rule.name for rule in rules if not rule.source]
    assert len(set(trees)) == len(trees)
    assert context.objects.changes(made.source.tree, made.tree).keys() == named


def test_a_session_that_was_installed_needs_no_network(tmp_path: Path) -> None:
    """Nox runs a command of a checkout again where no index is reached and no cache holds its build requirements."""
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "checkout"], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "nox"], check=True)
    subprocess.run([f"{tmp_path}/nox/bin/pip", "install", "--quiet", "nox", "uv"], check=True)
    nowhere = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    session = [f"{tmp_path}/nox/bin/nox", "-s", "audit", "--", "--help"]
    subprocess.run(session, cwd=tmp_path / "checkout", check=True)
    again = subprocess.run(session, cwd=tmp_path / "checkout", env={**os.environ, **nowhere}, check=False)

    assert again.returncode == 0


@pytest.mark.long
@pytest.mark.toolchain
def test_the_converters_of_the_default_stack_are_right(context: RunContext, tmp_path: Path) -> None:
    """G1: every converter that the reviewed policy names is found, compiled and right: vLLM's, FlashInfer's, CUTLASS's and CUDA's own."""
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "numerics.yaml", numerics.NumericsPolicy)
    trees, includes = numerics.source_trees(context, policy), numerics.include_folders(toolchain.obtain(context))
    checks = numerics.run(trees, policy, includes, tmp_path)

    assert checks
    assert [check for check in checks if check.state != "pass"] == []



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


@pytest.fixture(scope="module", name="small")
def _small(user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """Return a run on the reviewed data with the small list."""
    folder = tmp_path_factory.mktemp("aot")
    for name in ("forks", "cherry_picks", "build", "ci/audit"):
        shutil.copytree(ROOT / name, folder / "project" / name)
    shutil.copy(ROOT / "ci" / "audit.yaml", folder / "project" / "ci")
    project = Project(folder / "project", "2026.11")
    (project.build_folder / "aot.yaml").write_text(strict_yaml.dump(SMALL), "utf-8")
    (folder / "store").mkdir()
    for name in demo.SHARED:
        (folder / "store" / name).symlink_to(user_store.folder(name), target_is_directory=True)
    return RunContext(project, Store(folder / "store"), ("flashinfer",), folder / "dist", source="sdist")


@pytest.mark.long
@pytest.mark.toolchain
def test_first_use_on_a_spark_compiles_nothing(small: RunContext, tmp_path: Path) -> None:
    """
    FlashInfer's loader takes the packed libraries and calls no compiler; a module that was not packed is what it would compile. Their
    cubins are all for sm_121f, there is no PTX, and a second build makes nothing.
    """
    tools, sources = toolchain.obtain(small), pipeline.build(small, "flashinfer")
    modules = flashinfer_aot.build(small, SMALL, sources)
    wheels = [pipeline.wheel_path(small, built) for built in (sources, modules)]
    assert pipeline.current(small, "flashinfer") == sources
    assert flashinfer_aot.build(small, SMALL, sources) == modules
    audited = wheel.audit(wheels[1], policy.load(small.project.audit_file, small.project.spec.arch), lambda: tools.cuda / "bin")
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


@pytest.mark.long
@pytest.mark.toolchain
def test_every_module_of_the_reviewed_list_is_one_of_the_locked_release(small: RunContext) -> None:
    """FlashInfer makes each of them, for the arch that the list says; among them is the quantiser that it loads on a Spark."""
    spec = flashinfer_aot.load(PROJECT, "flashinfer")
    assert spec is not None
    sources = pipeline.wheel_path(small, pipeline.build(small, "flashinfer"))
    modules = AotBuilder(small, toolchain.obtain(small), spec, sources).generate()

    assert {module.call for module in modules} == {entry.call for entry in spec.modules}
    assert {"fp4_quantization_120f", "fused_moe_120", "sampling"} <= {module.name for module in modules}
