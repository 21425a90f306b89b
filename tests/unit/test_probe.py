"""The probe as it is compiled for several GPUs, what its answers become, and the loading of a library's kernels."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import devicehost
from tests.support.devicehost import POLICY

from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.wheel.elf import ElfUnreadable
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.device import gpu as gpus
from sparkwright.gates.device import kernels, probe
from sparkwright.gates.device.gpu import Gpu
from sparkwright.gates.device.kernels import Cubin, Line
from sparkwright.gates.device.probe import SOURCES, Probe, Toolkit, Uncompilable


def card(major: int, minor: int) -> Gpu:
    """Return a GPU of that compute capability."""
    return Gpu("a GPU", major, minor, 13000, 48, 1_000_000, 1_000_000, 10**11)


@pytest.mark.parametrize(
    ("capability", "target"), [((12, 1), "121f"), ((12, 0), "120f"), ((10, 0), "100f"), ((9, 0), "90"), ((8, 9), "89")]
)
def test_a_gpu_gets_the_target_with_its_instructions(capability: tuple[int, int], target: str) -> None:
    """Where a family target exists the probe is compiled for it, as plain targets lack the FP4 instructions."""
    assert card(*capability).target == target


def program(folder: Path, script: str) -> Probe:
    """Return a probe whose program is *script*, compiled for a GPU that knows everything."""
    path = folder / "probe"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Probe(path, "121f", {}, {"F2FP…E2M1": 4, "QMMA": 1, "OMMA": 1, "HMMA": 0})


def rows(found: Probe, folder: Path, at: Gpu | None = None, seconds: float = 30) -> dict[str, Check]:
    """Return the checks of the probe's rows by name."""
    return {check.name: check for check in probe.row_checks(found, at or card(12, 1), seconds, folder)}


def line(row: str, wrong: int = 0, wrong_nan: int = 0, samples: str = "[]") -> str:
    """Return a shell command that prints an answer of the probe."""
    document = f'{{"row": "{row}", "inputs": 4294967296, "wrong": {wrong}, "wrong_nan": {wrong_nan}, "ms": 5.5, "samples": {samples}}}'
    return f"echo '{document}'"


def test_answers_become_checks(tmp_path: Path) -> None:
    """A row without a difference passes, one with a wrong number or only wrong NaNs fails, each by its reference, with the values."""
    answers = [line(name) for name in probe.ROWS if name not in ("e2m1-native", "e4m3-native")]
    answers += [line("e2m1-native", 1, 0, "[[1048576001, 1, 0]]"), line("e4m3-native", 0, 3, "[[4286578689, 127, 255]]")]
    found = rows(program(tmp_path, "\n".join(answers)), tmp_path)
    assert list(found) == ["e2m1-opcodes", *probe.ROWS]
    assert found["e2m1-opcodes"].state == found["e2m1-software"].state == found["nvfp4-quantiser"].state == "pass"
    assert found["e2m1-native"].reason == "conversion-wrong"
    assert found["e2m1-native"].samples[0].case == "fp32 0x3e800001 = 0.25000003"
    assert found["e4m3-native"].reason == "nan-differs"


@pytest.mark.parametrize(
    ("script", "reference"),
    [
        ("exit 4", "probe-crashed"), ("sleep 60", "probe-slow"), ("echo nonsense; echo '{\"row\": 1}'", "probe-output"),
        ("true", "probe-output"),
    ],
)  # fmt: skip
def test_a_probe_that_does_not_answer_is_invalid(script: str, reference: str, tmp_path: Path) -> None:
    """A probe that crashes, hangs or says something else leaves every one of its rows invalid."""
    found = rows(program(tmp_path, script), tmp_path, seconds=1 if reference == "probe-slow" else 30)
    assert {(check.state, check.reason) for name, check in found.items() if name in probe.ROWS} == {("invalid", reference)}


def test_a_row_that_the_gpu_lacks_is_not_run(tmp_path: Path) -> None:
    """An instruction that the assembler refuses is not run, with the assembler's words, and what runs is judged all the same."""
    made = program(tmp_path, line("e2m1-software"))
    made = msgspec.structs.replace(made, refused={"native": "not supported on .target 'sm_80'"}, opcodes={**made.opcodes, "F2FP…E2M1": 0})
    found = rows(made, tmp_path, card(8, 0))
    assert found["e2m1-native"].state == found["e4m3-native"].state == found["e2m1-opcodes"].state == "not-run"
    assert "not supported on" in found["e2m1-native"].message
    assert found["e2m1-software"].state == "pass"


def test_an_instruction_that_is_taken_and_not_there_fails(tmp_path: Path) -> None:
    """Where the assembler takes the conversion and no such opcode comes out, something stands in for it."""
    made = program(tmp_path, "true")
    assert probe.opcodes_check(msgspec.structs.replace(made, opcodes={**made.opcodes, "F2FP…E2M1": 0})).reason == "opcode-missing"


def test_a_toolkit_without_a_compiler_is_missing(tmp_path: Path) -> None:
    """A folder that is no toolkit ends the set-up, naming what is not there."""
    with refusal("tool-missing", match="nvcc"):
        probe.compile_probe(Toolkit(tmp_path), "121f", POLICY.compile, tmp_path)


@pytest.mark.toolchain
@pytest.mark.parametrize(("target", "native", "fp4"), [("121f", True, True), ("100f", True, False), ("90", False, False)])
def test_the_probe_compiles_for_each_generation(target: str, native: bool, fp4: bool, tools: Toolchain, tmp_path: Path) -> None:
    """Conversion to E2M1 is native to the families of SM 10 and 12, the FP4 instruction to SM 12; the machine code shows both."""
    made = probe.compile_probe(Toolkit(tools.cuda), target, POLICY.compile, tmp_path)
    assert ("native" not in made.refused, "fp4_mma" not in made.refused) == (native, fp4)
    assert (made.opcodes["F2FP…E2M1"] > 0, made.opcodes["OMMA"] > 0) == (native, fp4)
    assert probe.opcodes_check(made).state == ("pass" if native else "not-run")


@pytest.mark.toolchain
def test_a_plain_target_has_no_conversion(tools: Toolchain, tmp_path: Path) -> None:
    """For sm_121 without its suffix the assembler refuses the conversion: the build without it is what traps on a Spark."""
    made = probe.compile_probe(Toolkit(tools.cuda), "121", POLICY.compile, tmp_path)
    assert set(made.refused) == {"native", "fp4_mma"}
    assert "sm_121" in made.refused["native"]


@pytest.mark.toolchain
def test_a_probe_that_does_not_compile_says_so(tools: Toolchain, tmp_path: Path) -> None:
    """A compiler that refuses the probe is quoted."""
    broken = devicehost.sources(tmp_path / "sources", {"probe.cu": ("static int rows() {", "static int rows() { mistake;")})
    with pytest.raises(Uncompilable, match="mistake"):
        probe.compile_probe(Toolkit(tools.cuda), "90", POLICY.compile, tmp_path, broken)


#: Compute capability → the archs of the cubins below that it loads.
FITTING: dict[tuple[int, int], list[str]] = {(9, 0): ["sm_90a"], (12, 1): ["sm_120f", "sm_121a"], (12, 0): ["sm_120f"], (8, 0): []}


@pytest.mark.toolchain
def test_the_kernels_of_a_library_are_found_by_generation(tools: Toolchain, tmp_path: Path) -> None:
    """Of a library for several GPUs, those cubins are taken that a GPU loads, with the kernels that a host can launch and no others."""
    source = tmp_path / "two.cu"
    source.write_text(
        "__device__ __noinline__ float inner(float x) { return x * x; }\n"
        'extern "C" __global__ void first(float *x) { *x = inner(*x); }\nextern "C" __global__ void second(float *x) { *x += 1; }\n'
    )
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("90a", "120f", "121a")]
    library = tmp_path / "_two_C.abi3.so"
    libraries = f"-L{tools.cuda / 'lib64'}"
    command = [str(tools.cuda / "bin" / "nvcc"), "-shared", "-Xcompiler=-fPIC", *codes, libraries, "-o", str(library), str(source)]
    subprocess.run(command, check=True, env=tools.environment())
    for number, (capability, archs) in enumerate(FITTING.items()):
        (tmp_path / str(number)).mkdir()
        found = kernels.fitting(library, card(*capability), tmp_path / str(number))
        assert found is not None
        # nvcc adds cubins without a kernel, from linking.
        assert sorted(one.arch for one in found if one.kernels) == archs
        assert {one.kernels for one in found if one.kernels} <= {("first", "second")}
    check = kernels.library(library, "pkg/_two_C.abi3.so", card(8, 0), 30, tmp_path)
    assert check is not None
    assert (check.name, check.state, check.reason, check.required) == ("kernels-two-c", "not-run", "code-foreign", False)


def test_a_library_without_device_code_has_no_check(tmp_path: Path) -> None:
    """Host code alone gives no check; a file that is none gives an invalid one."""
    (tmp_path / "plain.c").write_text("int one(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "plain.so"), str(tmp_path / "plain.c")], check=True)
    assert kernels.library(tmp_path / "plain.so", "plain.so", card(9, 0), 30, tmp_path) is None
    (tmp_path / "cut.so").write_bytes((tmp_path / "plain.so").read_bytes()[:200])
    check = kernels.library(tmp_path / "cut.so", "pkg/cut.so", card(9, 0), 30, tmp_path)
    assert check is not None
    assert (check.state, check.reason) == ("invalid", "code-unreadable")


@given(st.binary(max_size=400))
def test_bytes_that_are_no_cubin_are_refused(data: bytes) -> None:
    """Whatever the bytes are, they are refused or have no kernels."""
    with contextlib.suppress(ElfUnreadable):
        assert kernels.entries(b"\x7fELF\x02\x01" + data) == ()


CUBINS = tuple(Cubin(Path(f"{number}.cubin"), "sm_90", ("k1", "k2")) for number in range(3))


def test_every_kernel_has_to_load() -> None:
    """A cubin that the driver refuses counts with all its kernels, a kernel that it does not find with itself."""
    sound = {number: Line(number=number, held=2) for number in range(3)}
    assert kernels.judged("kernels-x", CUBINS, sound).message == "all 6 kernels of 3 cubins for sm_90 load"
    bad = {1: Line(number=1, error="CUDA_ERROR_NO_BINARY_FOR_GPU"), 2: Line(number=2, refused=(("k2", "CUDA_ERROR_NOT_FOUND"),))}
    check = kernels.judged("kernels-x", CUBINS, {**sound, **bad})
    assert (check.state, check.reason, check.figures[2].value) == ("fail", "kernel-unloadable", 3)
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in check.samples[0].actual
    assert kernels.judged("kernels-x", CUBINS, {0: sound[0]}).reason == "probe-slow"


def test_a_driver_that_crashes_costs_one_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process dies in a cubin, that one is to blame and the next is asked in a new process; one that hangs ends the asking."""
    script = tmp_path / "driver.py"
    script.write_text(
        "import json, os, sys\n"
        "for n in range(int(sys.argv[3]), 3):\n"
        "    print(json.dumps({'begins': n}), flush=True)\n"
        "    if n == 1: os.abort()\n"
        "    print(json.dumps({'number': n, 'held': 2}), flush=True)\n"
    )
    monkeypatch.setattr(gpus, "DRIVER", script)
    found = kernels.load(CUBINS, 30, tmp_path)
    assert found[1].error == "crashed (status -6)"
    assert [found[0].error, found[2].error] == ["", ""]
    assert kernels.judged("kernels-x", CUBINS, found).reason == "kernel-unloadable"
    script.write_text("import time\nprint('{\"begins\": 0}', flush=True)\ntime.sleep(60)\n")
    assert kernels.judged("kernels-x", CUBINS, kernels.load(CUBINS, 2, tmp_path)).reason == "probe-slow"


def test_sources_are_ours_and_whole() -> None:
    """What the probe includes lies beside it: a wheel of sparkwright holds everything that it compiles."""
    names = {path.name for path in SOURCES.iterdir()}
    for path in SOURCES.iterdir():
        for text in path.read_text("utf-8").splitlines():
            if text.startswith('#include "'):
                assert text.split('"')[1] in names
