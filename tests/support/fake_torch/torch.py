"""
As much of torch as the operators' script needs, on NumPy, with vLLM's operators in plain loops, and NVFP4 as tests/unit/test_kernels.py defines it; those that were right on an H100 and are judged by the same bounds as others are left out.

``SPARKWRIGHT_FAULT`` names one fault of `FAULTS`; without it every operator is right.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates import nvfp4

FAULT = os.environ.get("SPARKWRIGHT_FAULT", "")
Array = NDArray[Any]

__version__ = "fake"
uint8, int8, int32, int64 = np.uint8, np.int8, np.int32, np.int64
float16, float32 = np.float16, np.float32
bfloat16, float8_e4m3fn = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


class Tensor(np.ndarray):
    """An array with the methods of a tensor."""

    def to(self, _: str) -> Tensor:
        return self.copy()

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Tensor:
        return self


def frombuffer(data: bytearray, dtype: Any) -> Tensor:
    """Return *data* as an array."""
    return np.frombuffer(data, dtype).view(Tensor)


cuda = SimpleNamespace(synchronize=lambda: None)

_RUNS = itertools.count()


def load_library(path: str) -> None:
    """Load the library at *path*."""
    if faulty("a library needs another one"):
        raise OSError(f"{path}: undefined symbol: _ZN3c10")


def faulty(name: str) -> bool:
    """Return whether *name* is the fault of this process."""
    return name == FAULT


def _wide(values: Any) -> Array:
    return np.asarray(values).astype(np.float64)


def _write(out: Any, values: Array) -> None:
    """Write a product as a kernel does, in tiles of 16 × 16, with the faults of kernels."""
    values = values.copy()
    if faulty("NaN in an output"):
        values[0, 0] = np.nan
    if faulty("order of sums left to chance"):
        values *= 1 + next(_RUNS) % 2 / 64
    kept = slice(None)
    if faulty("odd M: last row skipped"):
        kept = slice(0, len(values) // 2 * 2)
    if faulty("output tile unwritten"):
        out[16:, :], out[:, 16:] = values[16:], values[:, 16:]
        return
    out[kept] = values[kept]
    if faulty("writes beyond its output"):
        memory = out
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        begin, end = (np.lib.array_utils.byte_bounds(array)[at] for at, array in enumerate((memory, out)))
        memory[end - begin + 100] = 0


def _fp4(packed: Any, swizzled: Any) -> Array:
    codes = nvfp4.unpack(np.asarray(packed))
    rows, columns = len(codes), codes.shape[1] // 16
    flat = np.asarray(swizzled).view(np.uint8).reshape(-1)
    scales = nvfp4.unswizzle(flat, rows, columns)
    if faulty("scales in plain rows"):
        scales = flat[: rows * columns].reshape(rows, columns)
    if faulty("last block of K dropped"):
        scales[:, -1] = 0
    values = nvfp4.dequantise(codes, scales)
    if faulty("code 1 decodes as 0.25"):
        values[codes & 7 == 1] /= 2
    return values


def _scaled(values: Array, alpha: Any) -> Array:
    return np.asarray(values / alpha if faulty("inverted global scale") else values * alpha)


def scaled_fp4_quant(input_: Any, input_scale: Any, is_sf_swizzled_layout: bool) -> tuple[Any, Any]:
    """Quantise as the kernel does, in float32."""
    rows, columns = input_.shape
    blocks, factor = np.float32(input_).reshape(rows, -1, 16), np.float32(input_scale[0])
    amax = np.abs(blocks).max(axis=2)
    if faulty("quantiser inverts the tensor scale"):
        factor = 1 / factor
    scales = np.minimum(factor * (amax * np.float32(1 / 6)), 448).astype(float8_e4m3fn)
    inverse = 1 / (scales.astype(np.float32) * (1 / factor))
    codes = nvfp4.encode(blocks * inverse[..., None])
    if faulty("quantiser rounds ties away"):
        ties = np.abs(blocks * inverse[..., None])
        codes = np.where(ties % 0.5 == 0.25, codes + 1, codes).astype(np.uint8)
    packed = nvfp4.pack(codes.reshape(rows, columns))
    return packed.view(Tensor), nvfp4.swizzle(scales.view(np.uint8)).view(Tensor)


def cutlass_scaled_fp4_mm(
    out: Any, a: Any, b: Any, block_scale_a: Any, block_scale_b: Any, alpha: Any
) -> None:
    """Multiply."""
    if faulty("swapped nibbles in one operand"):
        b = b >> 4 | b << 4
    _write(out, _scaled(_fp4(a, block_scale_a) @ _fp4(b, block_scale_b).T, alpha))


def cutlass_fp4_group_mm(
    out: Any, a: Any, b: Any, a_blockscale: Any, b_blockscales: Any, alphas: Any,
    problem_sizes: Any, expert_offsets: Any, sf_offsets: Any,
) -> None:  # fmt: skip
    """Multiply the rows of each expert."""
    for expert, (rows, _, _) in enumerate(problem_sizes):
        first = expert_offsets[expert]
        skipped = bool(faulty("first row of an expert taken for the one before") and expert)
        place = slice(first + skipped, first + max(rows, skipped))
        alpha = alphas[0 if faulty("global scale of the first expert for all") else expert]
        left = _fp4(a[place], a_blockscale[sf_offsets[expert] :])
        _write(out[place], _scaled(left @ _fp4(b[expert], b_blockscales[expert]).T, alpha))


def scaled_fp4_experts_quant(
    output: Any, output_scale: Any, input_: Any, input_global_scale: Any,
    input_offset_by_experts: Any, output_scale_offset_by_experts: Any,
) -> None:  # fmt: skip
    """Quantise the rows of each expert with its tensor scale."""
    ends, tiles = input_offset_by_experts[1:], output_scale_offset_by_experts
    for expert, (first, end) in enumerate(zip(input_offset_by_experts[:-1], ends, strict=True)):
        factor = input_global_scale[0 if faulty("tensor scale of the first expert for all") else expert :]
        if end > first:
            codes, scales = scaled_fp4_quant(input_[first:end], factor, True)
            output[first:end] = codes
            start = tiles[expert] - (expert and int(faulty("scales of an expert a row too early")))
            output_scale[start : start + len(scales)] = scales.view(np.int32)


def permute(self: Any, dims: Any) -> Any:
    """Return a view with other axes."""
    return np.transpose(self, dims)


def copy_(self: Any, src: Any) -> None:
    """Copy."""
    self[...] = np.asarray(src).view(self.dtype)


def cutlass_scaled_mm(out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
    """Multiply."""
    values = _wide(a) @ _wide(b)
    scales = _wide(b_scales)
    if faulty("scale of the first channel for all"):
        scales = scales[:, :1]
    _write(out, values * _wide(a_scales) * scales)


def dynamic_per_token_scaled_fp8_quant(result: Any, input_: Any, scale: Any, scale_ub: Any) -> None:
    """Quantise each row."""
    scale[:] = np.abs(np.float32(input_)).max(axis=1, keepdims=True) / 448
    static_scaled_fp8_quant(result, input_, scale)


def static_scaled_fp8_quant(result: Any, input_: Any, scale: Any) -> None:
    """Quantise with a scale."""
    result[:] = (np.float32(input_) / np.asarray(scale)).astype(float8_e4m3fn)
    if faulty("FP8 truncated"):
        towards = np.abs(_wide(result)) > np.abs(_wide(input_) / _wide(scale))
        result.view(np.uint8)[towards] -= 1


def moe_sum(input_: Any, output: Any) -> None:
    """Add up the experts of each token."""
    output[:] = _wide(input_)[:, int(faulty("first expert not summed")) :].sum(axis=1)


_OPTIONAL = ("bias", "scale_ub")


class _Operator:
    """A function with the schema that torch would have of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        arguments = [
            SimpleNamespace(
                name=name.rstrip("_"), type="Optional" if name in _OPTIONAL else "",
                has_default_value=lambda default=parameter.default: default is not inspect._empty,
            )
            for name, parameter in inspect.signature(function).parameters.items()
        ]  # fmt: skip
        self.default = SimpleNamespace(_schema=SimpleNamespace(arguments=arguments))

    def __call__(self, /, **arguments: Any) -> Any:
        if faulty("the operator raises"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if faulty("the operator was not compiled"):
            raise RuntimeError("No compiled cutlass_scaled_mm for CUDA device capability: 90")
        if faulty("the operator ends the process"):
            os.abort()
        if "input" in arguments:
            arguments["input_"] = arguments.pop("input")
        return self._function(**arguments)


_DENSE = (
    scaled_fp4_quant, cutlass_scaled_fp4_mm, cutlass_fp4_group_mm,
    scaled_fp4_experts_quant, cutlass_scaled_mm, dynamic_per_token_scaled_fp8_quant, static_scaled_fp8_quant,
)  # fmt: skip


def _namespace(*functions: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{one.__name__: _Operator(one) for one in functions if not faulty(f"no {one.__name__}")}
    )


ops = SimpleNamespace(
    _C=_namespace(*_DENSE), _moe_C=_namespace(moe_sum), aten=_namespace(permute, copy_),
    load_library=load_library,
)  # fmt: skip
