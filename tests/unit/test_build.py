"""A build: its locked tools, preflight, the tree of a fork as git confirms it, its label, the wheels that it leaves, and wheels that are built again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import processes, wheels
from tests.unit.conftest import Mini, Repository

from sparkwright.builder import pipeline, toolchain, workspace
from sparkwright.builder.sandbox import INSIDE
from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.wheel import archive, elf
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.workspace import SourceTree, source_tree
from sparkwright.cli import main
from sparkwright.core.files import sha256_file
from sparkwright.core.git import REGULAR
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource

HEADER = """
#define CUDAAPI
#define cuMemAlloc cuMemAlloc_v2
typedef int CUresult;
/* CUresult CUDAAPI cuCommented(int flags); */
CUresult CUDAAPI cuInit(unsigned flags);
CUresult CUDAAPI
    cuMemAlloc(void **place, unsigned long size);
typedef CUresult (*cuCallback)(int);
"""


def test_the_stub_of_the_driver_is_kept_by_the_linker(tmp_path: Path) -> None:
    """What calls the driver wants its library in the end, also where the linker leaves out what nobody calls; what does not, does not."""
    for name, data in {"include/cuda.h": HEADER, "lib/libcudart.so.13": ""}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(data)
    toolchain.complete_cuda(tmp_path, tmp_path / "log")
    needs = []
    for code in ('#include "cuda.h"\nint f(void) { return cuMemAlloc(0, 1); }\n', "int g(void) { return 1; }\n"):
        (tmp_path / "a.c").write_text(code)
        words = ["-Wl,--as-needed,--no-undefined", "-Iinclude", "-Llib/stubs", "a.c", "-lcuda", "-lc", "-o", "a.so"]
        subprocess.run(["cc", "-shared", "-fPIC", *words], cwd=tmp_path, check=True)
        needs.append("libcuda.so.1" in elf.shared_object((tmp_path / "a.so").read_bytes()).needed)

    assert needs == [True, False]
    assert (tmp_path / "lib" / "libcudart.so").resolve() == tmp_path / "lib" / "libcudart.so.13"


def test_tools_run_where_the_link_to_them_is_gone(mini: Mini, tmp_path: Path) -> None:
    """As those that the demo installs, whose store has a link to the user's."""
    wheel = wheels.plain(tmp_path, "tiny", "1", files={"tiny-1.data/scripts/tiny": b"#!python\nprint('runs')\n"})
    context = dataclasses.replace(mini.context(), offline=True)
    kept = package_index.path_of(context.store, sha256_file(wheel), wheel.name)
    kept.parent.mkdir(parents=True)
    wheel.rename(kept)
    (tmp_path / "environments").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "environments")
    toolchain.install(context, tmp_path / "link" / "tools", [("tiny", wheel.name, sha256_file(kept))], "tools")
    (tmp_path / "link").unlink()

    assert subprocess.run([tmp_path / "environments" / "tools" / "bin" / "tiny"], capture_output=True, text=True, check=True).stdout == "runs\n"


def test_nvcc_takes_the_compiler_of_cmake_but_in_a_cross_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CMake would prefer the variable to its toolchain file, and compile host code for this machine; builds are keyed by its version."""
    processes.script(tmp_path / "g++-99", "echo g++ 99.1.0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CXX", "g++-99")
    monkeypatch.setenv("CUDAHOSTCXX", "g++-98")
    cuda = tmp_path / "lib/python3.12/site-packages/nvidia/cu13"
    cuda.mkdir(parents=True)

    assert toolchain.compiler_version(*toolchain.host_compiler()) == "g++ 99.1.0"
    assert Toolchain("key", tmp_path).environment()["CUDAHOSTCXX"] == "g++-99"
    assert "CUDAHOSTCXX" not in Toolchain("key", tmp_path, tmp_path).environment()


def test_an_environment_that_contradicts_the_stack_is_refused(mini: Mini) -> None:
    mini.edit("build/demo/environment.yaml", "  flashinfer:\n", "  flashlight:\n")
    with refusal("file-invalid", match="name different forks"):
        toolchain.spec(mini.context().project)


PROJECT = '[build-system]\nrequires = ["setuptools>=77", "ninja"]\n[project]\nname = "mini-vllm"\nrequires-python = ">=3.9"\n'
FILES = {
    "pyproject.toml": PROJECT,
    "mini_vllm/__init__.py": "",
    "mini_vllm/a.py": "A = 1\n",
}


def check(context: RunContext, changed: Mapping[str, str], base: Path | None = None, before: Mapping[str, str] = FILES) -> None:
    """Check vllm as if upstream had the files *before*, and our series *changed* some."""
    old, new = (
        context.objects.store_files((path, REGULAR, text.encode()) for path, text in files.items())
        for files in (before, {**before, **changed})
    )
    pipeline.check_source(context, SourceTree("vllm", FetchedSource("vllm", "git", "upstream @ v1", "1" * 40, old, True), new, new, (), ()), base)


def test_every_finding_is_listed_not_the_first_alone(mini: Mini) -> None:
    with refusal("early-check-failed") as caught:
        check(mini.context(), {"mini_vllm/a.py": "def f(:\n", "mini_vllm/deep.py": "x = 1\n\0\n"})
    assert [line.partition(":")[0] for line in caught.value.details] == ["mini_vllm/a.py", "mini_vllm/deep.py"]


@pytest.mark.parametrize(
    ("words", "path", "old", "new", "reference"),
    [
        (["plan", "--fork", "vllm"], "build/demo/archs.yaml", '"8.0;9.0;10.0;12.0"', '"8.0"', "rule-mismatch"),
        (["build", "--fork", "cutlass"], "ci/audit.yaml", "mini-flashinfer:", "other:\n    reason: 3\n  mini-flashinfer:", "file-invalid"),
        (["audit", "--offline", "WHEEL"], "ci/audit.yaml", "mini-flashinfer:", "mini-flashinfer:", ""),
        (["audit", "--offline", "WHEEL", "--judge", "stack"], "ci/audit.yaml", "mini-flashinfer:", "mini-flashinfer:", "offline"),
    ],
)  # fmt: skip
def test_no_tools_are_installed_for_what_can_be_known_without(
    mini: Mini, words: list[str], path: str, old: str, new: str, reference: str
) -> None:
    """A plan is checked first, and a policy before a build; an audit by the rules for any wheel reads no instructions."""
    mini.edit(path, old, new)
    wheel = wheels.plain(mini.root, "mini-vllm", "0.33.0")
    with refusal(reference) if reference else contextlib.nullcontext():
        main.run([str(wheel) if word == "WHEEL" else word for word in words] + mini.words)

    assert not [*mini.cache.glob("environments/*/*"), *mini.cache.glob("wheels/*")]


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_build(mini: Mini, tmp_path: Path) -> None:
    """Also before the wheel is taken from the store."""
    (tmp_path / "file").touch()
    context = dataclasses.replace(mini.context(), output=tmp_path / "file" / "dist")
    for _ in range(2):
        with refusal("early-check-failed", match="no folder for the wheels"):
            pipeline.build(context, "cutlass")
        built(mini)


def test_an_official_wheel_of_other_sources_is_refused(mini: Mini) -> None:
    name = WheelName("mini_vllm", "0.33.0", f"cp38-abi3-linux_{platform.machine()}")
    files = {path: text.encode() for path, text in FILES.items() if path.endswith(".py")}
    base = archive.write(mini.root, name, files, "Metadata-Version: 2.4\nName: mini-vllm\nVersion: 0.33.0\n", pure=False)
    check(mini.context(), {}, base)
    with refusal("base-mismatch", match=base.name) as caught:
        check(mini.context(), {}, base, FILES | {"mini_vllm/a.py": "A = 2\n"})
    assert caught.value.details[1:] == ("mini_vllm/a.py",)


def test_equal_inputs_have_equal_labels_and_every_other_input_has_another(mini: Mini, locked_mini: Mini, repository: Repository) -> None:
    """Not the fork's own tree alone: choices, settings, rules, the pins of vendored sources, and a fork that is compiled with it."""

    def label(fork: str = "vllm", project: Mini = mini, **choices: Any) -> str:
        context = dataclasses.replace(project.context(), **choices)
        return pipeline.version_label(context, source_tree(context, fork))

    first = label()
    assert re.fullmatch(r"spark\.demo\.p[0-9a-f]{8}\.cu130", first)
    assert (label(project=locked_mini), label(source="git", jobs=7)) == (first, first)
    others = {fork: label(fork) for fork in ("cutlass", "flashinfer")}
    labels = [first, label(targets=("_C_stable_libtorch",))]

    mini.edit("build/demo/environment.yaml", "CMAKE_BUILD_TYPE: Release", "CMAKE_BUILD_TYPE: Debug")
    labels.append(label())
    mini.edit("build/demo/archs.yaml", "shuffles only", "only shuffles")
    labels.append(label())
    patch = mini.root / "forks/demo/vllm/take-the-largest-scale-from-loaded-experts-only.patch"
    patch.write_text(patch.read_text().replace("Subject: [PATCH] ", "Subject: [PATCH] Really ", 1))
    labels.append(label())
    vendored = "    vendored:\n      part:\n        url: u\n        ref: v1\n        commit: unresolved\n        tree: unresolved\n        kind: fetchcontent\n"
    mini.edit("forks/demo/lock.yaml", "  vllm:\n", f"  vllm:\n{vendored}")
    labels.append(label())
    assert {fork: label(fork) for fork in others} == others

    repository.git("fetch", "--quiet", str(mini.upstreams / "cutlass.git"), "v4.7.1")
    repository.git("checkout", "--quiet", "FETCH_HEAD")
    (folder := mini.root / "forks/demo/cutlass").mkdir()
    (folder / "new.patch").write_bytes(repository.patch({"new.h": b"// new\n"}))
    (folder / "series").write_text("new.patch\n")
    labels.append(label())
    assert len({*labels}) == len(labels) == 7


def built(mini: Mini, output: Path | None = None) -> Path:
    """Return the mini CUTLASS, which is built without a compiler."""
    context = dataclasses.replace(mini.context(), output=output or mini.root / "dist")
    return pipeline.wheel_path(context, pipeline.build(context, "cutlass"))


@pytest.mark.parametrize(
    ("old", "expected"), [("0.33.0", "0.33.0+spark.1"), ("0.7.2.post1", "0.7.2.post1+spark.1"), ("1.0+cu130", "1.0+spark.1")]
)
def test_a_label_replaces_an_earlier_one(old: str, expected: str) -> None:
    assert archive.labelled(old, "spark.1") == expected


def test_flags_name_folders_as_every_machine_does_from_the_outer_to_the_inner() -> None:
    names = {Path("/a/b"): "in/needed", Path("/a"): "in", Path("/a, b"): "in", Path("/c=d"): "in"}
    flags = workspace.reproducible_flags({"CMAKE_CXX_FLAGS": '-D"X=a b"'}, names)
    outer, inner = f"-ffile-prefix-map=/a={INSIDE}/in", f"-ffile-prefix-map=/a/b={INSIDE}/in/needed"

    assert flags["CMAKE_CXX_FLAGS"] == f'-D"X=a b" {outer} {inner}'
    assert flags["CMAKE_CUDA_FLAGS"].endswith(f" -Xcompiler={outer} -Xcompiler={inner}")


def test_every_output_folder_has_one_wheel_of_a_release_also_after_an_interruption(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build takes the place of the last one in its output folder, whenever that ended; other wheels there stay."""
    put = Store.put

    def interrupted(store: Store, kind: str, key: str, record: Any) -> None:
        if kind == "last":
            raise KeyboardInterrupt
        put(store, kind, key, record)

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.whl").touch()
    built(mini, tmp_path / "a")
    built(mini, tmp_path / "b")
    mini.edit("forks/demo/stack.yaml", '"spark.demo"', '"spark.demo.1"')
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            built(mini, tmp_path / "a")
    mini.edit("forks/demo/stack.yaml", '"spark.demo.1"', '"spark.demo.2"')
    path = built(mini, tmp_path / "a")

    assert {path.name for path in (tmp_path / "a").glob("*.whl")} == {"mine.whl", path.name}
    assert len([*(tmp_path / "b").glob("*.whl")]) == 1


# Builds again.


