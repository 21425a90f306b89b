"""What a wheel is called: the same for equal inputs wherever they are, another when a patch or a rule does something else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from packaging.version import Version
from tests.refusals import refusal

from sparkwright.builder import source_tree
from sparkwright.builder.wheel import cutlass as headers
from sparkwright.builder.wheel import version_label
from sparkwright.builder.wheel.sbom import Bill, Papers
from sparkwright.builder.wheel.version import labelled
from sparkwright.forks.stack import Project

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

    from sparkwright.builder.environment.toolchain import Toolchain

ROOT = Path(__file__).parents[2]
SERIES = "forks/demo/vllm"
RULES = "build/demo/archs.yaml"


def label(mini: Mini, fork: str = "vllm") -> str:
    session = mini.session()
    return version_label.label(session, source_tree.make(session, fork))


def patch_of(mini: Mini) -> Path:
    """Return a patch of the demo's vllm that changes Python alone."""
    return mini.root / SERIES / "take-the-largest-scale-from-loaded-experts-only.patch"


# Labels.


def test_a_label_names_stack_patch_set_and_cuda(mini: Mini) -> None:
    """Its parts can be told apart by eye, and a version with it is what packaging calls normal."""
    made = label(mini)

    assert re.fullmatch(r"spark\.demo\.p[0-9a-f]{8}\.cu130", made)
    assert labelled("0.33.0", made) == f"0.33.0+{made}" == str(Version(f"0.33.0+{made}"))


def test_equal_inputs_have_equal_labels_everywhere(mini: Mini, locked_mini: Mini) -> None:
    """Another checkout with a store of its own gives the same label: no path, date or machine is part of it."""
    assert label(mini) == label(locked_mini)


def test_a_fork_without_changes_says_so(mini: Mini) -> None:
    """Without patches and rules the patch set is p0."""
    assert label(mini, "cutlass") == "spark.demo.p0.cu130"


def test_a_changed_patch_changes_the_label_of_its_fork_alone(mini: Mini) -> None:
    """What the patch does decides, and only for the fork that it belongs to."""
    before = {fork: label(mini, fork) for fork in ("cutlass", "flashinfer", "vllm")}
    patch = patch_of(mini)
    added = next(line for line in patch.read_text().splitlines() if line.startswith("+    ") and line.strip("+ "))
    patch.write_text(patch.read_text().replace(added, f"{added}  # changed"))

    after = {fork: label(mini, fork) for fork in before}
    assert [fork for fork in before if before[fork] != after[fork]] == ["vllm"]


def test_a_reworded_patch_keeps_the_label(mini: Mini) -> None:
    """Two patches with the same effect make the same wheel, so they are the same patch set."""
    before = label(mini)
    patch = patch_of(mini)
    patch.write_text(patch.read_text().replace("Subject: [PATCH] ", "Subject: [PATCH] Really ", 1))

    assert label(mini) == before


def test_a_rule_is_part_of_the_patch_set(mini: Mini) -> None:
    """Leaving a rule out makes other code, so it makes another label."""
    session = mini.session()
    rule = source_tree.all_rules(session).rules[0].name
    before = label(mini)
    object.__setattr__(session, "without", (rule,))

    assert version_label.label(session, source_tree.make(session, "vllm")) != before


def test_a_patched_dependency_changes_the_label_of_what_is_built_with_it(mini: Mini) -> None:
    """vLLM is compiled with our CUTLASS: the same vLLM with another CUTLASS is another wheel."""
    session = mini.session()
    vllm, cutlass = (source_tree.make(session, fork) for fork in ("vllm", "cutlass"))
    readme = next(iter(session.objects.paths(cutlass.tree)))
    other = msgspec.structs.replace(cutlass, tree=session.objects.with_files(cutlass.tree, {readme: b"another\n"}))

    assert version_label.patch_set(session.objects, (vllm, cutlass)) == version_label.patch_set(session.objects, (vllm,))
    assert version_label.patch_set(session.objects, (vllm, cutlass)) != version_label.patch_set(session.objects, (vllm, other))


@pytest.mark.parametrize("stack", ["2026.05", "2026.11"])
def test_the_stacks_lock_the_cuda_that_the_official_wheels_are_made_with(stack: str) -> None:
    """Both real stacks compile with CUDA 13.0."""
    assert version_label.cuda(Project(ROOT, stack)) == "cu130"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ('[[packages]]\nname = "cmake"\nversion = "4.1"\n', ""),
        ('[[packages]]\nname = "nvidia-cuda-nvcc"\nversion = "12.9.86"\n', "cu129"),
        ('[[packages]]\nname = "nvidia-cuda-nvcc"\nversion = "13.0.88"\n' * 2, "cu130"),
    ],
)
def test_the_cuda_of_a_label_is_the_locked_compilers(mini: Mini, text: str, expected: str) -> None:
    """Release and minor release count; a stack that locks no compiler has none to name."""
    (mini.root / "build" / "demo" / "pylock.toml").write_text(text)

    assert version_label.cuda(Project(mini.root, "demo")) == expected


@pytest.mark.parametrize(
    "text",
    [
        'packages = [{name = "nvidia-cuda-nvcc", version = "13.0"}, {name = "nvidia-cuda-nvcc", version = "13.1"}]',
        "packages = [{}]",
        "packages = [3]",
        "packages = 3",
        "[[",
        None,
    ],
)
def test_a_lock_that_does_not_say_which_cuda_compiles_is_refused(mini: Mini, text: str | None) -> None:
    """Two releases, or no readable file, would make a label that lies."""
    path = mini.root / "build" / "demo" / "pylock.toml"
    path.write_text(text) if text is not None else path.unlink()

    with refusal("file-invalid", match=r"pylock\.toml"):
        version_label.cuda(Project(mini.root, "demo"))


def test_the_wheel_of_headers_has_the_label(mini: Mini, tmp_path: Path) -> None:
    """File name and module agree on it."""
    session = mini.session()
    tree = source_tree.make(session, "cutlass").tree
    made = headers.build(session, tree, "mini-cutlass", "spark.demo.p0.cu130", Papers(b"{}", Bill()), tmp_path)

    assert made.name.split("-")[1].endswith("+spark.demo.p0.cu130")


# Wheels that a new one takes the place of.

OURS = "mini_vllm-0.33.0+spark.demo.p1a2b3c4d.cu130-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mini_vllm-0.33.0+spark.demo.p0.cu130-cp38-abi3-manylinux_2_28_x86_64.whl", True),
        ("mini_vllm-0.33.0+spark.demo.pffffffff.cu131-cp38-abi3-manylinux_2_36_x86_64.whl", True),
        ("mini_vllm-0.33.0+spark.demo.pffffffff.cu130-cp38-abi3-manylinux_2_28_aarch64.whl", False),
        ("mini_vllm-0.33.0+spark.other.p1a2b3c4d.cu130-cp38-abi3-manylinux_2_28_x86_64.whl", False),
        ("mini_vllm-0.33.1+spark.demo.p1a2b3c4d.cu130-cp38-abi3-manylinux_2_28_x86_64.whl", False),
        ("mini_vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl", False),
        ("mini_cutlass-0.33.0+spark.demo.p1a2b3c4d.cu130-py3-none-any.whl", False),
        ("notes.whl", False),
        (OURS, False),
    ],
)
def test_a_wheel_takes_the_place_of_earlier_builds_of_itself_alone(name: str, expected: bool) -> None:
    """Another patch set or CUDA of the same release, stack and machine is earlier; everything else is something else."""
    assert version_label.superseded(OURS, [name]) == ([name] if expected else [])


# What keeps places and chance out of objects.


def test_flags_are_added_to_those_of_the_fork() -> None:
    """The fork's own flags and other entries stay; folders are given from the outer to the inner, since the last that fits counts."""
    places = {Path("/a/b"): Path("/in/needed"), Path("/a"): Path("/in")}
    host = "-ffile-prefix-map=/a=/in -ffile-prefix-map=/a/b=/in/needed"

    assert version_label.flags({"CMAKE_CXX_FLAGS": '-D"X=a b"', "X": "1"}, places) == {
        "X": "1",
        "CMAKE_C_FLAGS": host,
        "CMAKE_CXX_FLAGS": f'-D"X=a b" {host}',
        "CMAKE_CUDA_FLAGS": f"{' '.join(version_label.NAMES)} -Xcompiler=-ffile-prefix-map=/a=/in "
        "-Xcompiler=-ffile-prefix-map=/a/b=/in/needed",
    }
    assert version_label.flags({}, {}) == {"CMAKE_CUDA_FLAGS": " ".join(version_label.NAMES)}


def test_a_folder_that_no_flag_can_name_is_left_out() -> None:
    """A comma or a blank would end the option halfway, and the compiler would refuse the rest."""
    assert version_label.flags({}, {Path("/a, b"): Path("/in"), Path("/c=d"): Path("/in")}) == {
        "CMAKE_CUDA_FLAGS": " ".join(version_label.NAMES)
    }


UNIT = """\
#include <cassert>
#include <cstdio>
namespace { __global__ void hidden(float* x, int n) { assert(n > 0); x[threadIdx.x] *= 2.f; } }
template <typename T> __global__ void seen(T* x) { printf("%s\\n", __FILE__); x[threadIdx.x] += T(1); }
void run(float* x, int n) { hidden<<<1, 32>>>(x, n); seen<<<1, 32>>>(x); std::printf("%s %s\\n", __FILE__, __DATE__); }
"""


#: A unit that no other could call: nvcc finds no name in it to make its own from.
ALONE = "namespace { __global__ void k(int *p) { *p = 1; } struct R { R() { k<<<1, 1>>>(nullptr); } } r; }\n"


@pytest.mark.toolchain
@pytest.mark.parametrize("seeded", [False, True])
def test_a_unit_that_defines_nothing_for_others_is_the_same_on_every_run(tools: Toolchain, tmp_path: Path, seeded: bool) -> None:
    """Without a seed nvcc puts its process id into the names of such a unit's kernels; our flags keep it out."""
    source, made = tmp_path / "unit.cu", tmp_path / "unit.cu.o"
    source.write_text(ALONE)
    flags = [flag for flag in version_label.flags({}, {})["CMAKE_CUDA_FLAGS"].split() if seeded or "seed" not in flag]
    found = set()
    for _ in range(2):
        command = [str(tools.tool("nvcc")), *flags, "-gencode", "arch=compute_121f,code=sm_121f", "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True, env=tools.environment())
        found.add(made.read_bytes())

    assert len(found) == (1 if seeded else 2)


@pytest.mark.toolchain
@pytest.mark.parametrize("internal", [False, True])
def test_an_object_is_the_same_on_every_run_and_in_every_folder(tools: Toolchain, tmp_path: Path, internal: bool) -> None:
    """With our flags nvcc's objects differ neither by process nor by folder; names with internal linkage keep their folder."""
    text = UNIT if internal else UNIT.replace("namespace {", "").replace("2.f; } }", "2.f; }")
    found = []
    for folder in ("one", "two/longer", "one"):
        source = tmp_path / folder / "unit.cu"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        flags = version_label.flags({}, {source.parent: Path("/in")})["CMAKE_CUDA_FLAGS"].split()
        made = source.with_name("unit.cu.o")
        command = [str(tools.tool("nvcc")), *flags, "-gencode", "arch=compute_121f,code=sm_121f", "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True, env=tools.environment())
        found.append(made.read_bytes())
        made.unlink()

    assert found[0] == found[2]
    assert (found[0] == found[1]) is not internal
    assert not any(str(tmp_path).encode() in data for data in found)
