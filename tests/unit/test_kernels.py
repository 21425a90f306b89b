"""G1 on a small tree and G2 without a GPU: the arithmetic that they compare with, and converters, trees, operators and drivers that are wrong or gone."""

import argparse
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st
from tests.support import converters, fake_gpu, fatbins, processes, wheels

from sparkwright.builder import host_info
from sparkwright.cli import climb
from sparkwright.core.process import Limits
from sparkwright.gates import core, device, numerics, nvfp4, operators


def run(tree: Path, policy: numerics.NumericsPolicy, scratch: Path) -> dict[str, core.verdict.Check]:
    """Return the checks by name."""
    checks = numerics.run({"mini": tree}, policy, (), scratch)
    assert {check.reason for check in checks} - {""} <= set(numerics.REASONS)
    return {check.name: check for check in checks}


def judged(tmp_path: Path, header: str, seconds: float = 240) -> core.verdict.Check:
    """Return the check of a converter of two values in *header*."""
    (tmp_path / "a.hpp").write_text(header, "utf-8")
    unit = numerics.Unit("mini", ("a.hpp",), (numerics.Converter("bad", "encode", "return convert(x);", lanes=2),))
    return run(tmp_path, numerics.NumericsPolicy(Limits(seconds=seconds, memory=1024, written=16), (unit,)), tmp_path / "scratch")["bad-sweep"]


def test_a_sound_tree_passes_with_figures(tmp_path: Path) -> None:
    """Every converter of every kind passes, and states how many inputs it had."""
    checks = run(converters.tree(tmp_path / "tree"), converters.POLICY, tmp_path / "scratch")
    assert len(checks) == 8
    assert {check.state for check in checks.values()} == {"pass"}
    assert all(check.figures[0].value == 0 < check.figures[1].value for check in checks.values())
    without = numerics.run({}, converters.POLICY, (), tmp_path / "without")
    assert {(one.name, one.state, one.reason) for one in without} == {(name, "not-run", "tree-missing") for name in checks}


def asm(ptx: str) -> str:
    """Return the body of a converter that is the inline *ptx*."""
    return f'unsigned y = 0; asm volatile("{ptx}" : "=r"(y) : "f"(x[0]), "f"(x[1])); return y;'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (asm("cvt.rz.satfinite.e2m1x2.f32 %0, %2, %1;"), "converter-unreadable"),
        (asm("@p mov.b32 %0, 1;"), "converter-unreadable"),
        (asm(".reg .f64 d; mov.b32 %0, d;"), "converter-unreadable"),
        ('unsigned y = 0; asm volatile(text : "=r"(y)); return y;', "converter-uncompilable"),
        (asm("mov.b32 %0, c;"), "converter-uncompilable"),
        (asm("mov.b32 %0, %7;"), "converter-uncompilable"),
        (asm(".reg .b8 b; mov.b32 %0, {b, b};"), "converter-uncompilable"),
        ("return missing_name;", "converter-uncompilable"),
        ("for (volatile bool on = true; on;) {}", "converter-slow"),
        ("std::abort();", "converter-crashed"),
        ("std::exit(0);", "converter-output"),
        ('for (;;) std::fputs("more and more", stderr);', "converter-crashed"),
        ("for (size_t n = 1 << 20;; n *= 2) std::memset(new char[n], 1, n);", "converter-crashed"),
    ],
)
def test_a_converter_without_results_is_invalid(tmp_path: Path, body: str, reason: str) -> None:
    """PTX that is not defined, a program that does not compile, loops, crashes or takes all."""
    includes = "#include <cstdint>\n#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n"
    header = f"{includes}inline unsigned convert(float (&x)[2]) {{ {body} return 0; }}"
    check = judged(tmp_path, header, seconds=2 if reason == "converter-slow" else 240)
    assert (check.state, check.reason) == ("invalid", reason)
    assert str(tmp_path) not in check.message


def test_nothing_that_a_converter_starts_goes_on(tmp_path: Path) -> None:
    """A process that a converter starts in the background ends with the call."""
    command = ["sleep", f"{os.getpid() + 1000}"]
    header = (
        "#include <cstdlib>\n#include <unistd.h>\ninline unsigned convert(float (&)[2]) {\n"
        f'if (!fork()) {{ execl("/bin/sleep", "sleep", "{command[1]}", nullptr); }}\nstd::exit(7);\n}}\n'
    )
    assert judged(tmp_path, header).reason == "converter-crashed"
    processes.until(lambda: command not in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])], 10)


@pytest.mark.parametrize("values", ["x = 1", "VALUES = [1, 2, x]", "VALUES = [" + "(" * 100_000])
def test_values_that_are_gone_or_cannot_be_read_fail(tmp_path: Path, values: str) -> None:
    policy = numerics.NumericsPolicy(converters.POLICY.limits, converters.POLICY.units[1:])
    checks = run(converters.tree(tmp_path / "tree", {converters.PYTHON: values}), policy, tmp_path / "scratch").values()
    assert {(check.state, check.reason) for check in checks} == {("fail", "converter-missing")}


def test_a_name_that_is_gone_fails_and_so_does_a_header(tmp_path: Path) -> None:
    """What does not compile with the others of its file is stated for each of them."""
    code = converters.CPP.replace("encode(", "other_encode(")
    checks = run(converters.tree(tmp_path / "tree", {converters.HEADER: code}), converters.only("mini", "mini-value"), tmp_path / "scratch")
    assert {name: (check.state, check.reason) for name, check in checks.items()} == dict.fromkeys(("mini-sweep", "mini-value-table"), ("fail", "converter-missing"))
    (check,) = run(tmp_path, converters.only("mini"), tmp_path / "more").values()
    assert (check.state, check.reason) == ("fail", "converter-missing")


# NVFP4 as arithmetic: codes, scales, the layout of scales, and which roundings are right.


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_every_16_bit_number_and_tie_is_rounded_by_the_definition(kind: type) -> None:
    """NaN of either sign is +6; ties and their neighbours, -0 and infinity are among the numbers."""
    with np.errstate(invalid="ignore"):
        values = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    ties = (nvfp4.MAGNITUDES[:-1] + nvfp4.MAGNITUDES[1:]) / np.float32(2)
    values = np.concatenate([values, ties, -ties, *(np.nextafter(ties, np.float32(by)) for by in (-9, 9))])
    sizes, even = np.abs(values)[:, None], np.arange(7) % 2 == 0
    codes = np.where(even, sizes > ties, sizes >= ties).sum(axis=1)
    codes = np.where(np.isnan(values), 7, codes | np.signbit(values) << 3)
    assert (nvfp4.encode(values) == codes).all()


def test_codes_and_scales_have_the_defined_values() -> None:
    """Packing puts the first code into the low bits; above 448 a scale is 448, not NaN."""
    codes = np.arange(16, dtype=np.uint8)
    assert nvfp4.decode(codes)[1:10].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5]
    assert nvfp4.pack(codes)[0] == 0x10
    assert (nvfp4.unpack(nvfp4.pack(codes)) == codes).all()
    scales = nvfp4.scale_encode(np.array([0, 448, 464, 465, 1e30, np.inf], np.float32))
    assert scales.tolist() == [0, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E]
    assert nvfp4.scale_decode(np.array([1, 0x38, 0x7E], np.uint8)).tolist() == [2**-9, 1, 448]


@given(st.tuples(st.integers(1, 300), st.integers(1, 20)), st.integers(0, 2**32 - 1))
def test_scales_come_back_from_their_tiles(shape: tuple[int, int], seed: int) -> None:
    """Every scale has a byte of its own in whole tiles, and the others are zero."""
    scales = np.random.default_rng(seed).integers(1, 255, shape).astype(np.uint8)
    tiles = nvfp4.swizzle(scales)
    assert (nvfp4.unswizzle(tiles, *shape) == scales).all()
    assert np.count_nonzero(tiles) == scales.size


def test_the_layout_is_that_of_the_documentation() -> None:
    """Rows 0, 32, 64 and 96 of a tile share 16 bytes; the next tile is to the right."""
    offsets = nvfp4.swizzled_offsets(129, 8)[[0, 0, 32, 96, 1, 0, 128], [0, 3, 0, 3, 0, 4, 0]]
    assert offsets.tolist() == [0, 3, 4, 15, 16, 512, 1024]


def test_wrong_codes_and_scales_are_told_from_roundings() -> None:
    """A code beside a tie may go either way; another code, and another scale, are wrong."""
    matrix = np.full((1, 16), 0.1, np.float32)
    matrix[0, :3] = 6, 2.5 * (1 + 2**-22), -0.0
    codes, scales = nvfp4.encode(matrix), np.array([[0x38]], np.uint8)
    codes[0, 2] = 0
    for code, wrong in ((codes[0, 1], 0), (5, 0), (6, 1)):
        codes[0, 1] = code
        assert [part.sum() for part in nvfp4.quantisation_errors(matrix, np.array([[1.0]]), codes, scales)] == [
            wrong,
            0,
        ]
    assert nvfp4.quantisation_errors(matrix, np.array([[2.0]]), codes, scales)[1].all()


# G2 without a GPU: its judgements of drivers, operators and programs that answer wrongly.

GB10 = (12, 1)
WHEEL = Path("a.whl")


def test_a_failing_driver_is_no_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is there and fails: the gate, the facts of the host and a request name the driver. Where no GPU is, every check is required as well."""
    program = processes.script(tmp_path / "bin" / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    checks = device.run(fake_gpu.POLICY, tmp_path, WHEEL, "sm_121f", Path(sys.executable))
    assert {(check.state, check.reason) for check in checks} == {("not-run", "driver-failing")}
    assert checks[0].message == "the driver is failing: NVIDIA-SMI has failed"
    assert core.ladder.host_facts()["driver"] == checks[0].message
    assert climb._machine(argparse.Namespace(gpu=None))["gpus"] == [checks[0].message]
    program.unlink()
    checks = device.run(fake_gpu.POLICY, tmp_path, WHEEL, "sm_121f", Path(sys.executable))
    assert [(one.name, one.state, one.reason, one.required) for one in checks] == [
        (entry.name, "not-run", "no-gpu", True) for entry in device.CHECKS
    ]


@pytest.mark.parametrize(("target", "reason"), [("sm_90a", "gpu-foreign"), ("sm_121f", "")])
def test_the_architecture_comes_from_the_wheel(
    target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that does not load the wheel's code is foreign."""
    body = 'for _ in cubins: print(json.dumps(dict(error="")))'
    monkeypatch.setattr(device, "DRIVER", fake_gpu.driver(tmp_path, body))
    monkeypatch.setattr(host_info, "gpus", lambda: (host_info.GpuInfo("a GB10", "12.1", "580.1"),))
    monkeypatch.setattr(device, "unpack", lambda *_: (cubins(tmp_path), []))
    checks = {one.name: one for one in device.run(fake_gpu.POLICY, tmp_path, WHEEL, target)}
    assert [*checks] == [entry.name for entry in device.CHECKS]
    if reason:
        assert {check.reason for check in checks.values()} == {reason}
        return
    assert {checks[name].state for name in ("gpu", "cubins")} == {"pass"}
    assert {checks[name].reason for name in operators.OPERATORS} == {"no-environment"}


def cubins(folder: Path, count: int = 3) -> list[str]:
    """Write *count* cubins of a wheel, and return their names."""
    for n in range(count):
        (folder / f"{n:06}.cubin").touch()
    return [f"_C.so, unit {n}" for n in range(count)]


@pytest.mark.parametrize(
    ("body", "state", "reason"),
    [
        ('for _ in cubins: print(\'{"error": ""}\')', "pass", ""),
        (
            'for _ in cubins: print(\'{"error": "NO_BINARY"}\')',
            "fail",
            "kernel-unloadable",
        ),
        (
            'print(\'{"error": ""}\', flush=True); os.abort()',
            "invalid",
            "probe-crashed",
        ),
        (
            'print(\'{"error": ""}\', flush=True); time.sleep(60)',
            "invalid",
            "probe-slow",
        ),
        ("print('nonsense')", "invalid", "probe-crashed"),
    ],
)
def test_every_cubin_has_to_load(
    body: str, state: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the driver refuses fails; one at which it crashes or hangs is invalid, and named."""
    monkeypatch.setattr(device, "DRIVER", fake_gpu.driver(tmp_path, body))
    check = device.load_check(cubins(tmp_path), 2 if reason == "probe-slow" else 60, tmp_path)
    assert (check.state, check.reason) == (state, reason)
    if "flush" in body:
        assert "unit 1" in check.message
    if state == "pass":
        assert [figure.value for figure in check.figures] == [3, 0]


def test_a_wheel_without_fitting_or_readable_code_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cubin for the GPU fails; a damaged library is invalid, whatever the others have."""
    files = {"mini/_C.so": fatbins.library(tmp_path, [fatbins.cubin(tmp_path, "sm_121f")])}
    wheel = wheels.plain(tmp_path / "dist", "mini", "1.0", files=files)
    whole, libraries = device.unpack(wheel, GB10, ["mini/_C.so"], tmp_path)
    assert (whole, libraries) == (["mini/_C.so, unit 0"], [tmp_path / "_C.so"])
    assert (tmp_path / "000000.cubin").stat().st_size
    assert device.load_check([], 1, tmp_path).reason == "code-foreign"
    wheel = wheels.plain(tmp_path / "dist", "mini", "1.0", files={**files, "mini/_D.so": b"\x7fELF, cut off"})
    monkeypatch.setattr(host_info, "gpus", lambda: (host_info.GpuInfo("a GB10", "12.1", "580.1"),))
    assert [one.reason for one in device.run(fake_gpu.POLICY, tmp_path, wheel, "sm_121f")] == ["", "code-unreadable"]


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("no moe_sum", "not-run", "op-absent"),
        ("a library needs another one", "not-run", "library-unloadable"),
        ("the operator was not compiled", "not-run", "op-refused"),
        ("the operator raises", "fail", "op-broken"),
        ("the operator ends the process", "invalid", "op-crashed"),
    ],
)
def test_an_operator_without_a_result_is_named(
    fault: str, state: str, reason: str, tmp_path: Path
) -> None:
    """Absent, not loaded, refused, broken and crashed are told apart, and none of them passes."""
    check = fake_gpu.check("moe-sum", tmp_path / "scratch", fault)
    assert (check.state, check.reason) == (state, reason)


@pytest.mark.parametrize(
    ("script", "reason"), [("exit 1", "op-crashed"), ('echo \'{"done": "x"}\'', "op-crashed")]
)
def test_an_environment_that_answers_wrongly_is_invalid(
    script: str, reason: str, tmp_path: Path
) -> None:
    """An interpreter that ends, or states results that it did not write, gives no pass."""
    python = processes.script(tmp_path / "python", script)
    check = device.operator_check("moe-sum", fake_gpu.POLICY, python, (), tmp_path / "scratch")
    assert (check.state, check.reason) == ("invalid", reason)
