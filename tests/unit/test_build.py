"""A build: its tools, preflight, its tree, label and wheels; arch rules, and the plan of every unit; what CMake asks for; pins."""

import contextlib
import dataclasses
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import fatbins, guides, processes, wheels
from tests.unit.conftest import ROOT, Index, Mini, Repository, append_patch

from sparkwright.builder import (
    BuildError,
    configure,
    pins,
    pipeline,
    plan,
    sandbox,
    toolchain,
    workspace as archs,
)
from sparkwright.builder.configure import Call, Declaration, TranslationUnit
from sparkwright.builder.wheel import archive, elf
from sparkwright.builder.workspace import (
    ArchException,
    ArchRule,
    ArchRules,
    DroppedUnit,
    Site,
    SourceTree,
    source_tree,
)
from sparkwright.cli import main, patch, stages
from sparkwright.core import process, strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.core.git import REGULAR, Objects
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks import fetch, package_index, resolve, stack
from sparkwright.forks.context import RunContext

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
        library = fatbins.compiled(tmp_path, code, "-Wl,--as-needed,--no-undefined", "-Iinclude", "-Llib/stubs", "-lcuda", "-lc")
        needs.append("libcuda.so.1" in elf.shared_object(library).needed)

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
    assert toolchain.Toolchain("key", tmp_path).environment()["CUDAHOSTCXX"] == "g++-99"
    assert "CUDAHOSTCXX" not in toolchain.Toolchain("key", tmp_path, tmp_path).environment()
    monkeypatch.setenv("CXX", "g++-99 -O0")
    assert toolchain.compiler(Mock(cross=False)) == "g++ 99.1.0 -O0"
    monkeypatch.setenv("CXX", 'g++ "x')
    with refusal("tool-missing", match="CXX is no command"):
        toolchain.host_compiler()


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
    pipeline.check_source(context, SourceTree("vllm", fetch.FetchedSource("vllm", "git", "upstream @ v1", "1" * 40, old, True), new, new, (), ()), base)


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
    name = archive.WheelName("mini_vllm", "0.33.0", f"cp38-abi3-linux_{platform.machine()}")
    files = {path: text.encode() for path, text in FILES.items() if path.endswith(".py")}
    base = archive.write(mini.root, name, files, "Metadata-Version: 2.4\nName: mini-vllm\nVersion: 0.33.0\n", pure=False)
    check(mini.context(), {}, base)
    with refusal("base-mismatch", match=base.name, says="\nmini_vllm/a.py\n"):
        check(mini.context(), {}, base, FILES | {"mini_vllm/a.py": "A = 2\n"})


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
    vendored = "    vendored:\n      part:\n        url: u\n        ref: v1\n        commit: unresolved\n        tree: unresolved\n        kind: fetchcontent\n"
    for path, old, new in (
        ("build/demo/environment.yaml", "CMAKE_BUILD_TYPE: Release", "CMAKE_BUILD_TYPE: Debug"),
        ("build/demo/archs.yaml", "shuffles only", "only shuffles"),
        ("forks/demo/vllm/take-the-largest-scale-from-loaded-experts-only.patch", "Subject: [PATCH] ", "Subject: [PATCH] Really "),
        ("forks/demo/lock.yaml", "  vllm:\n", f"  vllm:\n{vendored}"),
    ):
        mini.edit(path, old, new)
        labels.append(label())
    assert {fork: label(fork) for fork in others} == others

    repository.git("fetch", "--quiet", str(mini.upstreams / "cutlass.git"), "v4.7.1")
    repository.git("checkout", "--quiet", "FETCH_HEAD")
    (folder := mini.root / "forks/demo/cutlass").mkdir()
    append_patch(folder, "new.patch", repository.patch({"new.h": b"// new\n"}))
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
    assert archive.WheelName("mini", old, "py3-none-any").labelled("spark.1").version == expected


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


# Arch rules and the plan: exactly the places they were written for; what CMake is asked, and asks for.


TEXT = """\
if(TOOLKIT VERSION_GREATER_EQUAL 13.4)
  set(SUPPORTED "7.5;10.7;12.0")
elseif(TOOLKIT VERSION_GREATER_EQUAL 13.0)
  set(SUPPORTED "7.5;12.0")
else()
  set(SUPPORTED "7.5;12.0;12.1")
endif()
pick(REPACK_ARCHS "8.0+PTX" "${ARCHS}")
"""

RULE = ArchRule(
    name="supported", fork="mini", file="CMakeLists.txt", before='SUPPORTED "7.5;12.0"', after='SUPPORTED "7.5;12.0;12.1"',
    reason="folds", drop_when="listed",
)  # fmt: skip


def test_one_place_is_changed_and_no_other_byte() -> None:
    files, sites = archs.rewrite({"CMakeLists.txt": TEXT.encode()}.get, [RULE])
    assert files["CMakeLists.txt"].decode() == TEXT.replace('"7.5;12.0")\nelse()', '"7.5;12.0;12.1")\nelse()')
    assert sites == (Site("supported", "CMakeLists.txt", 4, RULE.before, RULE.after),)


TWICE = TEXT.replace('  set(SUPPORTED "7.5;12.0")\n', '  set(SUPPORTED "7.5;12.0")\n' * 2)


@pytest.mark.parametrize(
    ("text", "rules", "line"),
    [
        (TEXT.replace('"7.5;12.0")\nelse', '"7.5;9.0;12.0")\nelse'), [RULE], 'CMakeLists.txt:4: set(SUPPORTED "7.5;9.0;12.0")'),
        (TWICE, [RULE], 'CMakeLists.txt:5: set(SUPPORTED "7.5;12.0")'),
        (TEXT, [RULE, RULE], 'CMakeLists.txt:4: set(SUPPORTED "7.5;12.0;12.1")'),
        (TEXT, [msgspec.structs.replace(RULE, file="gone.cmake")], "gone.cmake does not hold SUPPORTED"),
    ],
    ids=["other", "twice", "again", "gone"],
)
def test_a_rule_that_does_not_match_one_place_lists_the_near_misses(text: str, rules: list[ArchRule], line: str) -> None:
    with refusal("rule-mismatch", says=line):
        archs.rewrite({"CMakeLists.txt": text.encode()}.get, rules)


NATIVE = ("compute_121f:sm_121f",)
PTX80 = ("compute_80:compute_80", "compute_80:sm_80")


def plans(*units: tuple[str, ...], rules: ArchRules | None = None, calls: tuple[Call, ...] = ()) -> plan.ArchPlan:
    """Examine units of the target ``t`` whose gencodes are *units*; their sources are a.cu, b.cu, …"""
    listed = tuple(TranslationUnit("t", f"{letter}.cu", gencode) for letter, gencode in zip("abcdefgh", units, strict=False))
    return plan.examine(listed, calls, arch="12.1f", rules=rules or ArchRules(), fork="mini")


def kept(unit: str, gencode: str = "compute_80") -> ArchRules:
    return ArchRules(kept=(ArchException("mini", unit, "why not", gencode),))


DROPPED = ArchRules(dropped=(DroppedUnit("mini", "b.cu", "a trap on this device"),))


@pytest.mark.parametrize(
    ("gencode", "rules", "verdict"),
    [
        (NATIVE, ArchRules(), "native"),
        (("compute_120f:sm_120f",), ArchRules(), "folded"),
        (("compute_121:sm_121",), ArchRules(), "folded"),
        (("compute_121a:sm_121a",), ArchRules(), "folded"),
        (("compute_121:compute_121", "compute_121f:compute_121f", "compute_121f:sm_121f"), ArchRules(), "folded"),
        (PTX80, ArchRules(), "foreign"),
        (("compute_80:compute_80",), ArchRules(), "foreign"),
        (("compute_90a:sm_90a",), ArchRules(), "foreign"),
        (("native:native",), ArchRules(), "foreign"),
        ((), ArchRules(), "none"),
        (PTX80, kept("a.cu"), "kept"),
        ((), kept("a.cu", "default"), "kept"),
        (("compute_120f:sm_120f",), kept("a.cu", "compute_120f"), "kept"),
        # Of the generation, and yet nothing that the device loads.
        (("compute_120a:sm_120a",), kept("a.cu", "compute_120a"), "folded"),
        (("compute_123:sm_123",), kept("a.cu", "compute_123"), "folded"),
        (("compute_130:compute_130",), kept("a.cu", "compute_130"), "foreign"),
    ],
)
def test_verdicts(gencode: tuple[str, ...], rules: ArchRules, verdict: str) -> None:
    plans_made = plans(gencode, NATIVE, rules=rules)
    assert (plans_made.units[0].verdict, plans_made.units[0].reason) == (verdict, "why not" if verdict == "kept" else "")


def test_units_that_are_dropped_pass_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = plan.PlanComparison("", plans(NATIVE, rules=DROPPED), plans(NATIVE, PTX80, rules=DROPPED))
    plan.check(comparison)
    plan.show(comparison)
    assert "a trap on this device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("units", "rules", "detail"),
    [
        *(
            ([gencode], kept("a.cu"), "kept: a.cu is listed at compute_80")
            for gencode in (("compute_80:sm_80",), ("compute_90:compute_90",), (*PTX80, "compute_90:sm_90"), ())
        ),
        ([PTX80], ArchRules(), "a.cu"),
        ([PTX80], kept("a.cu", "default"), "kept: a.cu is listed at default"),
        ([NATIVE], kept("gone/a.cu"), "kept: gone/a.cu matches no CUDA unit"),
        ([NATIVE], kept("a.cu"), "but CMake gives it compute_121f:sm_121f"),
        ([NATIVE, NATIVE], DROPPED, "dropped: b.cu is compiled"),
        ([], ArchRules(), "a.cu (compute_121f:sm_121f)"),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_the_rules_is_refused(units: list[tuple[str, ...]], rules: ArchRules, detail: str) -> None:
    with refusal("arch-mismatch", match=r"of mini would|wrong for mini", says=detail):
        plan.check(plan.PlanComparison("", plans(*units, rules=rules), plans(NATIVE)))


ALL = (1, "set", "CMAKE_CUDA_ARCHITECTURES", "120f")
TARGET = (2, "set_target_properties", "t", "PROPERTIES", "CUDA_ARCHITECTURES", "120f")


@pytest.mark.parametrize(
    ("calls", "deciding"),
    [
        ([ALL, TARGET, (3, "give", "b.cu;a.cu", "-arch=sm_120f;12.0"), (4, "give", "b.cu", "12.1f")], "3: give(-arch=sm_120f;12.0)"),
        ([ALL, TARGET, (3, "give", "a.cu")], "2: set_target_properties(120f)"),
        ([ALL, (2, "set", "OTHER", "12.0")], "1: set(120f)"),
        ([], ""),
    ],
    ids=["source", "target", "all", "none"],
)  # fmt: skip
def test_the_call_that_decided_an_arch_is_named(calls: list[tuple[int | str, ...]], deciding: str) -> None:
    traced = tuple(Call("CMakeLists.txt", int(line), str(name), tuple(map(str, values))) for line, name, *values in calls)
    (unit,) = plans(("compute_120f:sm_120f",), calls=traced).units
    assert unit.call == (deciding and f"CMakeLists.txt:{deciding}")


# What nvcc will be given.

@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("nvcc -gencode arch=compute_121f,code=sm_121f -c a.cu", ("compute_121f:sm_121f",)),
        ("nvcc -gencode=arch=compute_121f,code=sm_121f -gencode arch=compute_121f,code=sm_121f a.cu", ("compute_121f:sm_121f",)),
        ("nvcc '--generate-code=arch=compute_80,code=[compute_80,sm_80]' a.cu", PTX80),
        ('nvcc --generate-code arch=compute_80,code=\\"sm_80,compute_80\\" a.cu', PTX80),
        ("nvcc --gpu-architecture sm_121f a.cu", ("sm_121f:sm_121f",)),
        ("nvcc -arch=native a.cu", ("native:native",)),
        ("nvcc -Xcompiler -arch=sm_90 -Xcompiler=-march=native -DX=-arch=sm_80 a.cu", ()),
        ("nvcc -c a.cu -arch", ()),
    ],
)
def test_every_spelling(command: str, expected: tuple[str, ...]) -> None:
    assert configure.gencode(shlex.split(command)) == expected


def test_a_failed_configure_shows_the_words_of_cmake(tmp_path: Path) -> None:
    """A compiler that upstream refuses, for example, with the advice to name another."""
    processes.script(tmp_path / "cmake", "echo 'GCC >= 13 is required (found 12.2.0)'\nexit 1")
    with refusal("configure-failed", says=["GCC >= 13 is required (found 12.2.0)", "CXX and CC"]):
        configure.configure(
            tmp_path, tmp_path / "build", defines={}, env=process.clean_environment(), log=tmp_path / "log",
            cmake=tmp_path / "cmake", sandbox=sandbox.Sandbox("none"),
        )  # fmt: skip


COMMIT = "1" * 40
URL = "https://host.example/part.git"
BASE = "https://host.example/group/fork.git"


def submodules(repository: Repository, modules: str | None, *paths: str) -> dict[str, tuple[str, str]]:
    """Return the submodules of a tree with *modules* as .gitmodules and a link to `COMMIT` at each path."""
    repository.commit({".gitmodules": modules.encode()} if modules is not None else {"file": b""})
    for path in paths:
        repository.link(path, COMMIT)
    return resolve.submodules(Objects(repository.path / ".git"), repository.git("write-tree"), BASE)


def section(path: str, url: str, name: str = "") -> str:
    return f'[submodule "{name or path}"]\n\tpath = {path}\n\turl = {url}\n'


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (section("a", URL, "x") + section("b/c", "../part.git"), [("a", URL), ("b/c", "https://host.example/group/part.git")]),
        (section("gone", "ext::x"), [("a", ""), ("b/c", "")]),
        (None, [("a", ""), ("b/c", "")]),
        ("[include]\n\tpath = /etc/passwd\n", [("a", ""), ("b/c", "")]),
    ],
)
def test_submodules_are_links_with_the_address_of_gitmodules(
    repository: Repository, modules: str | None, expected: list[tuple[str, str]]
) -> None:
    """A section without a link counts for nothing, and an include reads no file of this machine."""
    assert submodules(repository, modules, "a", "b/c") == {path: (url, COMMIT) for path, url in expected}


@pytest.mark.parametrize(
    "modules",
    [
        *(
            section("a", url)
            for url in ("ext::sh -c x", "fd::17", "-u./run", "https://a.example/\a", "../../../../b.example/x", "x" * 3000)
        ),
        "[submodule",
    ],
)
def test_unsafe_gitmodules_are_refused(repository: Repository, modules: str) -> None:
    with refusal("declaration-unsafe"):
        submodules(repository, modules, "a")


@pytest.mark.parametrize("base", [BASE, "https://host.example/g/f/", "ssh://git@host.example/g/f", "file:///srv/g/f"])
@pytest.mark.parametrize("address", ["../x.git", "./x", "../../x", "https://other.example/x", "./../x"])
def test_relative_addresses_are_those_of_git(repository: Repository, base: str, address: str) -> None:
    submodules(repository, section("a", "../x"), "a")
    (repository.path / ".gitmodules").write_text(section("a", address))
    repository.git("remote", "add", "origin", base)
    repository.git("submodule", "init")
    assert resolve.absolute(address, base) == repository.git("config", "submodule.a.url")


def call(command: str, *arguments: str) -> Call:
    return Call("CMakeLists.txt", 7, command, arguments)


@pytest.mark.parametrize(
    ("traced", "expected"),
    [
        (call("fetchcontent_declare", "Part", "GIT_REPOSITORY", URL, "GIT_TAG", "v1", "GIT_SHALLOW", "TRUE"), [("Part", URL, "v1", True)]),
        (call("fetchcontent_declare", "part", f"GIT_REPOSITORY;{URL};GIT_TAG;V1"), [("part", URL, "V1", True)]),
        (call("fetchcontent_declare", "part", "GIT_REPOSITORY", URL), [("part", URL, "master", True)]),
        (call("fetchcontent_declare", "part", "SOURCE_DIR", "/here"), []),
        (call("fetchcontent_declare", "part", "DOWNLOAD_COMMAND", ""), []),
        (call("fetchcontent_populate", "part"), []),
        (call("fetchcontent_populate", "part", "GIT_REPOSITORY", URL, "GIT_TAG", "v1"), [("part", URL, "v1", False)]),
        (call("externalproject_add", "part", "URL", URL, "URL_HASH", "SHA256=0"), [("part", URL, "", False)]),
        (call("file", "DOWNLOAD", URL, "here"), [(URL, URL, "", False)]),
        (call("file", "WRITE", "here", "text"), []),
        (call("warn_if_ptx", "-gencode arch=compute_121f,code=sm_121f"), []),
    ],
)  # fmt: skip
def test_traced_calls_declare_sources(traced: Call, expected: list[tuple[str, str, str, bool]]) -> None:
    assert [(found.name, found.url, found.ref, found.pinnable) for found in configure.declarations([traced])] == expected


@pytest.mark.parametrize("option", ["GIT_REPOSITORY", "GIT_TAG", "URL"])
@pytest.mark.parametrize("value", ["ext::sh -c x", "--upload-pack=x", "https://a.example/\x1b"])
def test_unsafe_declaration_is_refused(option: str, value: str) -> None:
    repository = ("GIT_REPOSITORY", URL) if option == "GIT_TAG" else ()
    with refusal("declaration-unsafe"):
        list(configure.declarations([call("fetchcontent_declare", "part", *repository, option, value)]))


PART = stack.VendoredLock(URL, COMMIT, COMMIT, "2" * 40, kind="fetchcontent")
DECLARED = Declaration("part", URL, COMMIT, "CMakeLists.txt:7")


@pytest.mark.parametrize(
    ("sources", "fault"),
    [
        ([Declaration("part", "https://user:secret@host.example/other.git", COMMIT, "x:1")], "; the lock names "),
        ([Declaration("part", URL, "3" * 40, "x:1")], "; the lock names "),
        ([DECLARED, Declaration("more", URL, "v1", "x:1")], f"x:1: more: {URL} at v1 is not in the lock"),
        ([DECLARED, Declaration("more", URL, "", "x:1", pinnable=False)], "cannot pin"),
    ],
)
def test_source_that_the_lock_pins_otherwise_is_refused(sources: list[Declaration], fault: str) -> None:
    """Another address, another ref, a source of no entry, a kind that cannot be pinned; a password is not shown."""
    locked = stack.ForkLock(vendored={"part": PART, "third/party": msgspec.structs.replace(PART, kind="submodule")})
    with refusal("source-unlocked") as caught:
        configure.check_vendored("mini", sources, locked, {})
    (line,) = caught.value.details
    assert (fault in line, "secret" in line) == (True, False)


# Pins: releases that exclude each other are named before anything is written or compiled.


TAG = upstreams.tag()
RELEASES: dict[str, dict[str, list[str]]] = {
    "flashinfer": {"0.7.2": [], "0.7.4": []},
    "vllm": {
        "0.33.0": ["mini-flashinfer==0.7.2", "apache-tvm-ffi==0.1.9", "torch==2.14.0", "requests==1; extra == 'x'"],
        "0.34.0": ["mini-flashinfer==0.7.4", "mini-tool==2"],
    },
}


@pytest.fixture(name="locked", scope="module")
def _locked(locked_mini: Mini, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mini, str]]:
    """Return the demo's project, locked at an index with two releases of two of its forks, and the address of that index."""
    made, index = Mini(tmp_path_factory.mktemp("pinned")), tmp_path_factory.mktemp("index")
    shutil.copytree(locked_mini.root.parent, made.root.parent, dirs_exist_ok=True)
    for fork, releases in RELEASES.items():
        project = f"mini-{fork}"
        offered = Index(index, project)
        for version, requires in releases.items():
            offered.add(wheels.plain(index, project, version, requires=requires, tag=TAG if fork == "vllm" else "py3-none-any").name)
            later = {"docs/taken.txt": b"taken\n", "docs/other.txt": b"theirs\n"} if version == "0.34.0" else {}
            offered.release(version, upstreams.files(fork) | later)
        git = f'{fork}.git", ref: "{upstreams.TAGS[fork]}"}}\n'
        made.edit("forks/demo/stack.yaml", git, f'{git}      sdist: {{name: "{project}", version: "{upstreams.TAGS[fork][1:]}"}}\n')
    Index(index, "mini-tool").add(wheels.plain(index, "mini-tool", "2").name)
    base = f'{{name: "mini-vllm", version: "0.33.0", tag: "{TAG}"}}'
    made.edit("forks/demo/stack.yaml", "    needs: [cutlass]\n", f"    needs: [cutlass]\n    bases:\n      {platform.machine()}: {base}\n")
    tools = made.root / "build/demo/requirements.in"
    tools.write_text(tools.read_text() + "torch==2.14.0\napache-tvm-ffi>=0.1.9,<0.2\n")
    with pytest.MonkeyPatch.context() as patch, upstreams.serve(index) as address:
        patch.setenv("SPARKWRIGHT_INDEX_URL", f"{address}/simple/")
        (made.root / "forks/demo/lock.yaml").write_text(stack.render_lock(resolve.resolve(made.context())))
        yield made, f"{address}/simple/"


@pytest.fixture(name="pinned")
def _pinned(locked: tuple[Mini, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """Return a copy of the locked project, with the official wheel in its store."""
    made = Mini(tmp_path / "pinned")
    shutil.copytree(locked[0].root.parent, made.root.parent, ignore=shutil.ignore_patterns(made.cache.name))
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", locked[1])
    context = made.context()
    base = context.lock.forks["vllm"].bases[platform.machine()]
    package_index.obtain(context.store, base.name, base.filename, base.sha256)
    return made


TORCH = ("build/demo/requirements.in", "torch==2.14.0", "torch==2.15.0")
NEEDLESS = ("build/demo/environment.yaml", "    package: mini_vllm\n", '    package: mini_vllm\n    requires: {mini-flashinfer: "mini-flashinfer==0.7.1"}\n')
OFFICIAL = f"mini_vllm-0.33.0-{TAG}.whl names"


@pytest.mark.parametrize(
    ("words", "edit", "lines"),
    [
        ("plan", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("build", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("lock", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("plan", NEEDLESS, [f"forks/demo/stack.yaml names mini-flashinfer==0.7.2, {OFFICIAL.removesuffix(' names')} mini-flashinfer==0.7.1"]),
        ("patch bump --fork flashinfer --to 0.7.4", None, [
            f"forks/demo/stack.yaml names mini-flashinfer==0.7.4, {OFFICIAL.removesuffix(' names')} mini-flashinfer==0.7.2",
        ]),
    ],
    ids=["plan", "build", "lock", "requires", "bump"],
)  # fmt: skip
def test_releases_that_exclude_each_other_are_named(
    pinned: Mini, words: str, edit: tuple[str, str, str] | None, lines: list[str]
) -> None:
    """What the official wheel and the tools require counts, and nothing is written."""
    # A release that was accepted in place of the one that upstream pins fits.
    accepted = 'cutlass.git", ref: "v4.7.2"}\n      upstream: "v4.7.1"\n      accepted: "it compiles"\n'
    pinned.edit("forks/demo/stack.yaml", 'cutlass.git", ref: "v4.7.1"}\n', accepted)
    if edit:
        pinned.edit(*edit)
    before = {path: path.read_bytes() for path in pinned.root.rglob("*") if path.is_file()}
    with refusal("pins-disagree", details=lines):
        main.run([*words.split(), *pinned.words])

    assert {path: path.read_bytes() for path in pinned.root.rglob("*") if path.is_file()} == before


def test_a_wheel_that_is_not_in_the_store_is_not_compared_and_that_is_said(pinned: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.edit(*TORCH)
    context = pinned.context()
    assert len(pins.disagreements(context, context.lock)) == 1
    shutil.rmtree(context.store.root / "downloads")
    assert pins.disagreements(context, context.lock) == []
    assert "not all pins of vllm were compared" in capsys.readouterr().err


def test_a_requirement_of_the_official_wheel_that_is_none_is_named(pinned: Mini) -> None:
    context = pinned.context()
    base = context.lock.forks["vllm"].bases[platform.machine()]
    path = package_index.path_of(context.store, base.sha256, base.filename)
    info = "mini_vllm-0.33.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Name: mini-vllm\nRequires-Dist: torch ==\n")
    with refusal("wheel-invalid", match="states a requirement that is none"):
        pins.disagreements(context, context.lock)


def test_the_release_that_a_fork_of_the_stack_asks_for_is_compared(pinned: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    """By CMakeLists.txt of the locked tree, which is in the store; a commit is no release."""
    pinned.edit("forks/demo/stack.yaml", 'cutlass.git", ref: "v4.7.1"', 'cutlass.git", ref: "v4.7.2"')
    context, files = pinned.context(), upstreams.files("vllm")
    sdist = context.lock.forks["vllm"].sdist
    assert sdist
    tree = sdist.tree
    assert context.objects.store_files((path, REGULAR, data) for path, data in files.items()) == tree
    assert pins.disagreements(context, context.lock) == ["forks/demo/stack.yaml names mini-cutlass==4.7.2, CMakeLists.txt of vllm mini-cutlass==4.7.1"]
    commit = "57e3cfb47a2d9e0d46eb6335c3dc411498efa198"
    cmake = re.sub(rb'(CUTLASS_REVISION) "[^"]*"', rb'\1 "%s"' % commit.encode(), files["CMakeLists.txt"])
    other = context.objects.store_files((path, REGULAR, data) for path, data in {**files, "CMakeLists.txt": cmake}.items())
    lock = context.project.lock_file
    lock.write_text(lock.read_text().replace(f"tree: {tree}", f"tree: {other}"))
    later = pinned.context()
    assert pins.disagreements(later, later.lock) == []
    assert f"vllm names no release of cutlass: {commit}" in capsys.readouterr().err


def test_an_archive_that_the_lock_does_not_have_yet_is_named(pinned: Mini) -> None:
    """A wheel that proves the commit was added to stack.yaml after locking."""
    git = 'cutlass.git", ref: "v4.7.1"}\n'
    wheel = f'      wheel: {{name: "mini-vllm", version: "0.33.0", tag: "{TAG}", folder: "mini_vllm"}}\n'
    pinned.edit("forks/demo/stack.yaml", git, git + wheel)
    with refusal("source-unresolved", match="names no wheel of cutlass"):
        main.run(["fetch", "--fork", "cutlass", "--source", "git", *pinned.words])


def test_the_advice_names_the_verbs_that_have_the_option() -> None:
    *_, sentence = BuildError.references["pins-disagree"].todo.split(". ")
    own = {verb for table in (stages._OPTIONS, patch._OPTIONS) for verb, names in table.items() if "--force-pin" in names}
    assert own == set(re.findall("patch bump|lock|plan|build", sentence))


def test_the_guide_to_a_new_stack(pinned: Mini, tmp_path: Path) -> None:
    """Its commands run as they stand there, but for `plan`, whose compiler the index does not have."""
    (pinned.root / "build/demo/requirements.in").write_text("# Tools of the demo.\nmini-tool==2\n")
    (tmp_path / "config.yaml").write_text(strict_yaml.dump({"mirrors": {upstreams.HOST: f"{pinned.upstreams}/"}}))
    environment = {**os.environ, "SPARKWRIGHT_CONFIG": str(tmp_path / "config.yaml"), "SPARKWRIGHT_CACHE_DIR": str(pinned.cache)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    places = {"2026.11": "demo", "NEXT": "next", "0.33.1": "0.34.0", "0.7.4": "0.7.2", "0.7.5": "0.7.4", "sparkwright plan": "sparkwright apply"}
    guides.run(ROOT / "docs/howto/make-a-stack.md", pinned.root, environment, places)
