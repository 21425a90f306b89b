"""The locked FlashInfer with modules that were compiled ahead of time: its own loader takes them, and compiles nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from uv import find_uv_bin

from sparkwright.audit import policy, wheel
from sparkwright.builder import pipeline as building
from sparkwright.builder import toolchain
from sparkwright.builder.toolchain import Toolchain
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
from flashinfer.jit import env
from flashinfer.jit.activation import gen_act_and_mul_module
found = {"workspace": str(env.FLASHINFER_WORKSPACE_DIR), "modules": {}}
for name in ("silu", "gelu", "gelu_tanh"):
    spec = gen_act_and_mul_module(name)
    try:
        loaded = hasattr(spec.build_and_load(), spec.name)
    except Exception as error:
        loaded = type(error).__name__
    found["modules"][spec.name] = [spec.is_aot, loaded]
print(json.dumps(found))
"""


class Built(NamedTuple):
    """A run on the reviewed data with the small list, and the two wheels that it made."""

    context: RunContext
    tools: Toolchain
    sources: Path
    modules: Path


@pytest.fixture(scope="module", name="built")
def _built(user_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("aot")
    for name in ("forks", "cherry_picks", "build", "ci/audit"):
        shutil.copytree(ROOT / name, folder / "project" / name)
    shutil.copy(ROOT / "ci" / "audit.yaml", folder / "project" / "ci")
    project = Project(folder / "project", STACK)
    (project.build_folder / "aot.yaml").write_text(strict_yaml.dump(SMALL), "utf-8")
    (folder / "store").mkdir()
    for name in demo.SHARED:
        (folder / "store" / name).symlink_to(user_store.folder(name), target_is_directory=True)
    context = RunContext(project, Store(folder / "store"), ("flashinfer",), folder / "dist", source="sdist")
    sources = building.build(context, "flashinfer")
    modules = flashinfer_aot.build(context, SMALL, sources)
    return Built(context, toolchain.obtain(context), building.wheel_path(context, sources), building.wheel_path(context, modules))


class Installed:
    """An environment with some wheels, the tools' torch and TVM FFI, and a nvcc and a ninja that write down that they were called."""

    def __init__(self, folder: Path, tools: Toolchain) -> None:
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"
        self._env = process.clean_environment(UV_NO_CONFIG="1", UV_OFFLINE="1", UV_NO_CACHE="1")
        process.output([find_uv_bin(), "venv", "--quiet", "--python", sys.executable, folder / "venv"], env=self._env)
        (self.site,) = (folder / "venv").glob("lib/python3*/site-packages")
        (tools_site,) = tools.root.glob("lib/python3*/site-packages")
        (self.site / "tools.pth").write_text(f"{tools_site}\n")
        self.called = folder / "called"
        (folder / "bin").mkdir()
        for name in ("nvcc", "ninja", "c++"):
            (folder / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {self.called}\nexit 1\n')
            (folder / "bin" / name).chmod(0o755)

    def install(self, *wheels: Path) -> None:
        """Install *wheels*, in place of other versions that are there."""
        command: list[str | Path] = [
            find_uv_bin(),
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--reinstall",
            "--python",
            self.python,
            *wheels,
        ]
        process.output(command, env=self._env)

    def load(self, arch: str, *, compiling: bool = False) -> dict[str, Any]:
        """Load modules as on a GPU of *arch*; FlashInfer may try to compile what it misses where *compiling*."""
        environment = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}/usr/bin:/bin", "HOME": str(self.folder / "home"), "LC_ALL": "C.UTF-8",
            # What a capability of 12.1 becomes there; a GPU would be asked in the same place.
            "FLASHINFER_CUDA_ARCH_LIST": arch, "CUDA_HOME": str(self.folder), **({} if compiling else {"FLASHINFER_DISABLE_JIT": "1"}),
        }  # fmt: skip
        done = subprocess.run(
            [self.python, "-c", LOAD, str(self.site)], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module", name="installed")
def _installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    made = Installed(tmp_path_factory.mktemp("installed"), built.tools)
    made.install(built.sources, built.modules)
    return made


def test_first_use_on_a_spark_compiles_nothing(built: Built, installed: Installed) -> None:
    """FlashInfer's loader takes the packed libraries and calls no compiler; a module that was not packed is what it would compile."""
    installed.install(built.sources, built.modules)
    found = installed.load("12.1")["modules"]

    assert found == {"silu_and_mul": [True, True], "gelu_and_mul": [True, True], "gelu_tanh_and_mul": [False, "MissingJITCacheError"]}
    # FlashInfer asks nvcc for its release; nothing else is called.
    calls = installed.called.read_text().splitlines() if installed.called.exists() else []
    assert not [call for call in calls if call != "nvcc --version"]


def test_the_libraries_hold_the_stack_s_code_and_nothing_else(built: Built) -> None:
    """Read from the bytes: every cubin was made for sm_121f, there is no PTX, and the loader needs nothing that torch does not bring."""
    project = built.context.project
    rules = policy.load(project.audit_file, project.spec.arch)
    report = wheel.audit(built.modules, rules, built.tools.cuda / "bin")

    assert {library.name.rpartition("/")[2]: library.cubins for library in report.libraries} == {
        "silu_and_mul.so": {"sm_121f": 1},
        "gelu_and_mul.so": {"sm_121f": 1},
    }
    assert not any(library.ptx for library in report.libraries)
    # The policy of the stack also asks for the module that this list leaves out.
    assert {finding.rule for finding in report.findings} == {"library-missing"}


def test_a_build_with_nothing_changed_makes_nothing(built: Built) -> None:
    """The wheel comes from the store; a reason that is worded otherwise is no change."""
    reworded = msgspec.structs.replace(SMALL, modules=tuple(msgspec.structs.replace(one, reason="other words") for one in SMALL.modules))
    sources = building.current(built.context, "flashinfer")

    assert sources is not None
    assert building.wheel_path(built.context, flashinfer_aot.build(built.context, reworded, sources)).samefile(built.modules)


def workshop(built: Built, spec: AotSpec, folder: Path) -> AotBuilder:
    context = dataclasses.replace(built.context, store=Store(folder / "store"))
    return AotBuilder(context, built.tools, spec, built.sources)


def test_every_module_of_the_reviewed_list_is_one_of_the_locked_release(built: Built, tmp_path: Path) -> None:
    """FlashInfer makes each of them, for the arch that the list says; among them is the quantiser that it loads on a Spark."""
    spec = flashinfer_aot.load(Project(ROOT, STACK), "flashinfer")
    assert spec is not None
    modules = workshop(built, spec, tmp_path).generate()

    assert {module.call for module in modules} == {one.call for one in spec.modules}
    assert {"fp4_quantization_120f", "fused_moe_120", "sampling"} <= {module.name for module in modules}
