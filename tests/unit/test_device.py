"""G2 where there is no GPU, the probe's arithmetic on the host, and programs and environments that answer wrongly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.refusals import refusal
from tests.support import devicehost
from tests.support.devicehost import POLICY

from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.device import gate as device
from sparkwright.gates.device import gpu, ops
from sparkwright.gates.device.gate import Backend, DevicePolicy, FuzzPolicy
from sparkwright.gates.device.gpu import Absent
from sparkwright.gates.numerics import e2m1, nvfp4

ROOT = Path(__file__).parents[2]
REVIEWED = ROOT / "ci" / "gates" / "device.yaml"


@pytest.fixture(scope="module", name="host")
def _host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the probe's arithmetic as a program of this machine."""
    return devicehost.compiled(devicehost.sources(tmp_path_factory.mktemp("host") / "sources"))


def converted(host: Path, values: NDArray[np.float32], scratch: Path) -> NDArray[np.uint8]:
    """Return the codes that our converter gives *values*."""
    padded = np.concatenate([values, np.zeros(-len(values) % 8, np.float32)])
    (scratch / "in").write_bytes(padded.tobytes())
    subprocess.run([str(host), "convert", str(scratch / "in"), str(scratch / "out")], check=True, timeout=300)
    return np.frombuffer((scratch / "out").read_bytes(), np.uint8)[: len(values)]


def patterns(bits: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """Return FP32 values by their bits, NaNs with their payloads."""
    return bits.astype(np.uint32).view(np.float32)


def test_the_converter_is_right_for_all_16_bit_formats(host: Path, tmp_path: Path) -> None:
    """Every bf16 and every fp16 pattern gives the reference's code, infinities, zeros of both signs and NaNs among them."""
    bf16 = patterns(np.arange(1 << 16, dtype=np.uint32) << 16)
    with np.errstate(invalid="ignore"):
        fp16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    for values in (bf16, fp16):
        assert (converted(host, values, tmp_path) == e2m1.encode(values)).all()


def test_the_converter_is_right_beside_every_tie(host: Path, tmp_path: Path) -> None:
    """Within 70,000 units of the last place of each tie and each code no input differs: where converters round twice."""
    places = np.concatenate([e2m1.TIES, e2m1.MAGNITUDES[1:]]).view(np.uint32)[:, None] + np.arange(-70_000, 70_001)
    bits = np.concatenate([places.reshape(-1), places.reshape(-1) | 0x80000000]).astype(np.uint32)
    assert (converted(host, patterns(bits), tmp_path) == e2m1.encode(patterns(bits))).all()


def test_the_converter_is_right_in_every_binade(host: Path, tmp_path: Path) -> None:
    """A million patterns spread over all of FP32, subnormal values and NaNs among them, give the reference's codes."""
    bits = np.arange(1 << 20, dtype=np.uint64) * 4099 % (1 << 32)
    assert (converted(host, patterns(bits.astype(np.uint32)), tmp_path) == e2m1.encode(patterns(bits.astype(np.uint32)))).all()


def quantised(host: Path, matrix: NDArray[np.float32], scale: float, scratch: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes and plain scales that our quantiser gives *matrix*."""
    (scratch / "in").write_bytes(matrix.astype(ml_dtypes.bfloat16).tobytes())
    command = [str(host), "quantise", str(scratch / "in"), str(scratch / "out"), float(scale).hex()]
    subprocess.run(command, check=True, timeout=300)
    found, half = np.frombuffer((scratch / "out").read_bytes(), np.uint8), matrix.size // 2
    return found[:half].reshape(matrix.shape[0], -1), found[half:].reshape(matrix.shape[0], -1)


@pytest.mark.parametrize("scale", [1.0, 37.25, 2688 / 0.0173, 0.0003, 2.0**-100, 1e30])
def test_the_quantiser_gives_the_bits_of_the_reference(host: Path, tmp_path: Path, scale: float) -> None:
    """Scales and codes are those of gates/numerics/nvfp4.py for blocks of every size, with zeros, infinities and NaNs in them."""
    random = np.random.default_rng(int(scale * 8) % 1000)
    matrix = random.normal(0, 1, (256, 64)) * 10.0 ** random.integers(-30, 30, (256, 4)).repeat(16, axis=1)
    matrix[3:6] = [[0.0], [np.inf], [np.nan]]
    matrix[7, ::16], matrix[8, 5], matrix[9, ::7] = np.inf, -np.nan, 0.0
    values = matrix.astype(ml_dtypes.bfloat16).astype(np.float32)
    wanted = nvfp4.quantise(values, np.float32(scale))
    codes, scales = quantised(host, values, float(np.float32(scale)), tmp_path)
    assert (scales == wanted.scales).all()
    assert (codes == wanted.codes).all()


def test_products_on_the_host_are_right(host: Path, tmp_path: Path) -> None:
    """The source that the GPU runs gives, on the host, what the reference says, in every kind of case."""
    checks = devicehost.checks(host, tmp_path / "scratch")
    assert [(check.name, check.state) for check in checks] == [("gemm-host", "pass"), ("moe-host", "pass"), ("rounded-host", "pass")]


@pytest.mark.parametrize(
    ("script", "reference"),
    [
        ("exit 3", "probe-crashed"), ("kill -SEGV $$", "probe-crashed"), ("sleep 60", "probe-slow"), ("true", "probe-output"),
        ('echo x > "$2"', "probe-output"), ('head -c 30000000 /dev/zero > "$2"', "probe-output"), ('ln -s /dev/zero "$2"', "probe-output"),
    ],
)  # fmt: skip
def test_a_program_that_misbehaves_is_invalid(script: str, reference: str, tmp_path: Path) -> None:
    """A program that crashes, hangs, writes nothing, too little or without end gives invalid checks, in bounded time and room."""
    backend = Backend("bad", "a bad program", lambda cases, out, _: ["sh", "-c", script, "sh", str(cases), str(out)])
    seconds = 1 if reference == "probe-slow" else 60
    checks = list(device.fuzzed(backend, FuzzPolicy(gemm=1, moe=1, rounded=1, repeats=2, tolerance=0.1), seconds, tmp_path))
    assert {(check.state, check.reason) for check in checks} == {("invalid", reference)}
    assert reference in device.REASONS


def test_without_a_gpu_every_row_says_why(tmp_path: Path) -> None:
    """Where no GPU answers, every check is not run for that reason, none is missing, and none is a pass."""
    if not isinstance(gpu.ask(tmp_path), Absent):
        pytest.skip("there is a GPU here")
    checks = device.run(POLICY, tmp_path, cuda=tmp_path, wheel=tmp_path / "none.whl", python=Path(sys.executable))
    assert {(check.state, check.reason) for check in checks} == {("not-run", "no-gpu")}
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    assert {"gpu", "e2m1-native", "moe-e2m1", "kernels", "op-gemm-marlin"} <= set(names)
    assert "libcuda" in checks[0].message or "driver" in checks[0].message


def test_the_reviewed_policy_is_one(tmp_path: Path) -> None:
    """The policy in the repository reads, and one with a threshold that cannot be meant does not."""
    text = REVIEWED.read_text("utf-8")
    assert strict_yaml.load(REVIEWED, DevicePolicy) == POLICY
    for right, wrong in (
        ("repeats: 3", "repeats: 1"), ("tolerance: 0.05", "tolerance: 5"), ("gemm: 24", "gemm: 0"), ("loading: 300", "loading: 0"),
        ("[quantise, cutlass, marlin]", "[quantise, cutlas]"), ("seconds: 120", "seconds: -1"), ("moe: 24", "mo: 24"),
    ):  # fmt: skip
        assert right in text
        (tmp_path / "device.yaml").write_text(text.replace(right, wrong), "utf-8")
        with refusal("file-invalid"):
            strict_yaml.load(tmp_path / "device.yaml", DevicePolicy)


def by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    """Return *checks* by name."""
    return {check.name: check for check in checks}


def test_an_environment_without_torch_is_not_run(tmp_path: Path) -> None:
    """An interpreter that has no torch answers so for every op; nothing of it is a pass."""
    checks = ops.checks(POLICY.ops, without_torch(tmp_path), tmp_path)
    assert [check.name for check in checks] == list(ops.NAMES)
    assert {(check.state, check.reason) for check in checks} == {("not-run", "op-absent")}
    assert {check.required for check in checks if check.name in ("op-gemm-b12x", "op-gemm-emulation")} == {False}


def without_torch(folder: Path) -> Path:
    """Return an interpreter that finds only the standard library."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(("script", "state"), [("exit 1", "invalid"), ("kill -SEGV $$", "invalid"), ("echo '{\"x\": [}'", "invalid")])
def test_an_environment_that_crashes_is_invalid(script: str, state: str, tmp_path: Path) -> None:
    """An interpreter that ends abnormally, or answers nonsense, gives invalid checks."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    checks = ops.checks(POLICY.ops, program, tmp_path)
    assert {(check.state, check.reason) for check in checks} == {(state, "op-crashed")}


@pytest.mark.parametrize(
    ("words", "state", "reference"),
    [
        ("refused", "not-run", "op-refused"), ("broken", "fail", "op-broken"), ("absent", "not-run", "op-absent"),
    ],
)  # fmt: skip
def test_what_an_op_says_decides_its_check(words: str, state: str, reference: str, tmp_path: Path) -> None:
    """An op that was not compiled for the GPU is not run, one that throws another error fails."""
    program = tmp_path / "python"
    name = "quantise-0"
    program.write_text(f"""#!/bin/sh\necho '{{"begins": "{name}"}}'\necho '{{"name": "{name}", "{words}": "its words"}}'\n""")
    program.chmod(0o755)
    check = by_name(ops.checks(POLICY.ops, program, tmp_path))["op-quantise"]
    assert (check.state, check.reason) == (state, reference)
    assert "its words" in check.message


def written(matrix: NDArray[np.float32], scale: np.float32) -> bytes:
    """Return what a quantiser without fault writes: packed codes, swizzled scales."""
    made = nvfp4.quantise(matrix, scale)
    return made.codes.tobytes() + nvfp4.swizzle(made.scales).tobytes()


@settings(max_examples=15)
@given(seed=st.integers(0, 500))
def test_a_quantiser_is_held_to_the_reference(seed: int) -> None:
    """The reference's own bytes have no difference; a code, a nibble order or a scale that is wrong is counted."""
    matrix, scale = ops._matrix(seed)
    sound = written(matrix, scale)
    half = matrix.size // 2
    assert ops.quantise_differences(matrix, scale, sound)[:3] == (0, 0, 0)
    swapped = np.frombuffer(sound[:half], np.uint8)
    swapped = (swapped >> 4 | swapped << 4).astype(np.uint8)
    assert ops.quantise_differences(matrix, scale, swapped.tobytes() + sound[half:])[1] > 0
    stale = bytes([sound[half] ^ 1]) + sound[half + 1 :]
    assert ops.quantise_differences(matrix, scale, sound[:half] + stale)[0] == 1
    for short in (sound[:-1], sound[:half], b""):
        with pytest.raises(ValueError, match=r"bytes|scales"):
            ops.quantise_differences(matrix, scale, short)


def test_a_code_beside_a_tie_is_counted_and_not_failed() -> None:
    """1.25 may become 1 or 1.5 where a reciprocal is approximate; 1.3 may not become 1."""
    matrix = np.zeros((1, 16), np.float32)
    matrix[0, :3] = 6.0, 1.25, 1.3125
    sound = bytearray(written(matrix, np.float32(1)))
    assert sound[:2] == bytes([0x27, 0x03])
    sound[0] = 0x37
    assert ops.quantise_differences(matrix, np.float32(1), bytes(sound))[:3] == (0, 0, 1)
    sound[:2] = bytes([0x27, 0x02])
    assert ops.quantise_differences(matrix, np.float32(1), bytes(sound))[:3] == (0, 1, 0)


def test_every_reference_is_explained() -> None:
    """Whatever reference stands in these modules is in REASONS, and none there is without a use."""
    folder = ROOT / "ci" / "sparkwright" / "gates" / "device"
    text = "".join((folder / f"{name}.py").read_text("utf-8") for name in ("gate", "probe", "kernels", "ops", "fuzz"))
    for reference in device.REASONS:
        assert text.count(f'"{reference}"') >= 2, reference


def test_checks_survive_json() -> None:
    """Figures and samples of a check are the same after JSON, as verdicts are stored so."""
    check = device.judged("x", "about", [], POLICY.fuzz)
    assert msgspec.json.decode(msgspec.json.encode(check), type=Check) == check
