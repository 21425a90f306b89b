"""
The cases of a wheel's operators: inputs, calls, and results as NumPy computes them in float64 from
the same quantised inputs.

- An element y of a result r may differ by |y - r| ≤ n·u·s: u is the unit roundoff of the output's
  type (2^-8 for bfloat16, 2^-11 for float16), n the number of roundings, and s the sum of the
  magnitudes that are rounded.
- A product of K terms may be rounded at each matrix instruction of 32 terms, too: ε = n·u +
  K/32 · 2^-b, with b fractional bits in the accumulator. The 2-norm of the error of every row and
  column is at most ε times that of the result, or of s if that is larger, where s = ‖a‖·‖b‖/√K is
  the standard deviation of a sum of K independent terms. An element differs by at most
  m·ε·s + n·u·|r|. This is the first-order bound of Higham, "Accuracy and Stability of Numerical
  Algorithms", section 3.1; b is 23 where FP32 or integers accumulate, and 13 for FP8 on Hopper
  (DeepSeek-V3 Technical Report, section 3.3.2: about 14 bits are kept).
- Codes (FP4, FP8, indices) are equal, or beside a tie one of both neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates.numerics import nvfp4

Array = NDArray[Any]
Results = Mapping[str, Array]

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
FP8, FP32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)
INT32 = np.dtype(np.int32)
_ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}

#: Identifiers of vLLM's scalar types float4_e2m1f and uint4b8 (vllm/scalar_type.py).
_SCALAR_TYPES = {True: 2 | 1 << 8 | 1 << 16 | 1 << 49, False: 4 << 8 | 8 << 17 | 1 << 50}

#: The order of 64 scales in Marlin's layout (marlin_utils.py of vLLM).
_MARLIN_ORDER = [i + 8 * j for i in range(8) for j in range(8)]


class ErrorBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The constants n, m and b of the bounds.

    Attributes:
        roundings: n.
        outliers: m.
        accumulator_bits: b of an FP8 or FP4 matrix instruction.
    """

    roundings: float
    outliers: float
    accumulator_bits: int


class Expected(NamedTuple):
    """The values of a result, the errors allowed in them, and those of rows' and columns' norms."""

    values: Array
    allowed: Array | float = 0.0
    norms: tuple[Array, ...] = ()


class Case(msgspec.Struct, frozen=True, eq=False):
    """
    Calls of operators, and their results.

    Attributes:
        outputs: Name → initial content.
        steps: Calls as of ``target_env_scripts/operators.py``, with arrays for tensors.
        expected: By the names of outputs, returned values, or of what *derived* makes of them.
        returned: Name → an array of the type and shape of a value that a step returns.
        derived: Makes comparable values of results that are right in several forms.
        repeatable: Whether all runs give the same bits.
    """

    outputs: Results
    steps: Sequence[Mapping[str, Any]]
    expected: Mapping[str, Expected]
    returned: Results = {}
    derived: Callable[[Results], Results] = dict
    repeatable: bool = True


def cases(name: str, bounds: ErrorBounds) -> dict[str, Case]:
    """Return the cases of the check *name* by their shapes, the same each time."""
    random, (make, shapes) = np.random.default_rng(0), OPERATORS[name]
    return {" × ".join(map(str, shape)): make(random, bounds, *shape) for shape in shapes}


def unwritten(kind: np.dtype[Any], *shape: int) -> Array:
    """Return an array whose bytes are all 0xFF, which is NaN in every float type."""
    return np.full(math.prod(shape) * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(shape)


def rounded(
    bounds: ErrorBounds, kind: np.dtype[Any], values: Array, magnitudes: Array | None = None
) -> Expected:
    """Return *values* with the errors of their rounding; s is *magnitudes*, or |values|."""
    scale = np.abs(values if magnitudes is None else magnitudes)
    return Expected(values, bounds.roundings * _ROUNDOFF[kind] * scale)


def product(
    bounds: ErrorBounds, kind: np.dtype[Any], a: Array, b: Array, factor: Any = 1.0, bits: int = 23
) -> Expected:
    """Return ``a × bᵀ × factor`` with its allowed errors, for an accumulator of *bits*."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    values, depth = (a @ b.T) * factor, a.shape[1]
    lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
    scale = lengths * np.abs(factor) / math.sqrt(depth)
    rounding = bounds.roundings * _ROUNDOFF[kind]
    epsilon = rounding + depth / 32 * 2.0**-bits
    allowed = bounds.outliers * epsilon * scale + rounding * np.abs(values)
    sizes = [[np.linalg.norm(matrix, axis=axis) for matrix in (values, scale)] for axis in (0, 1)]
    return Expected(values, allowed, tuple(epsilon * np.maximum(*pair) for pair in sizes))


def error_ratio(expected: Expected, actual: Array) -> float:
    """
    Return the largest error of *actual* over the allowed one: at most 1 if it is right, and 10^9
    for NaN or an error where none is allowed.
    """
    errors = np.abs(actual.astype(np.float64) - expected.values)
    parts = [(errors, expected.allowed)]
    parts += [(np.linalg.norm(errors, axis=n), norms) for n, norms in enumerate(expected.norms)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [np.where(error == 0, 0.0, error / allowed) for error, allowed in parts]
    return max(float(np.nan_to_num(ratio, nan=1e9, posinf=1e9).max()) for ratio in ratios)


def _normal(random: np.random.Generator, *shape: int, kind: np.dtype[Any] = BF16) -> Array:
    return random.standard_normal(shape, np.float32).astype(kind)


def _call(operator: str, /, *returns: str, **arguments: Any) -> Mapping[str, Any]:
    """Return a step; a text that begins with ``@`` names an output or a returned value."""
    return {"operator": operator, "arguments": arguments, "returns": returns}


def _near_tie(kind: np.dtype[Any], values: Array) -> Expected:
    """Return *values* cast to *kind*, and beside a tie either neighbour."""
    low, high = ((values * (1 + by)).astype(kind).astype(np.float64) for by in (-2e-6, 2e-6))
    return Expected(low, np.abs(high - low))


def _case(
    steps: Sequence[Mapping[str, Any]],
    expected: Mapping[str, Expected],
    kind: np.dtype[Any] = BF16,
    **others: np.dtype[Any],
) -> Case:
    """Return a case whose outputs are of *kind* but for *others*, and are not written before."""
    outputs = {
        name: unwritten(others.get(name, kind), *result.values.shape)
        for name, result in expected.items()
    }
    return Case(outputs, steps, expected)


def _fp8_quantise(random: np.random.Generator, _: ErrorBounds, rows: int, columns: int) -> Case:
    x = _normal(random, rows, columns)
    values = x.astype(np.float64)
    scale = np.abs(values).max(axis=1, keepdims=True) / 448
    sixtyfourth = np.full(1, 1 / 64, np.float32)
    steps = [
        _call("_C.dynamic_per_token_scaled_fp8_quant", result="@result", scale="@scale", input=x),
        _call("_C.static_scaled_fp8_quant", result="@static", scale=sixtyfourth, input=x),
    ]
    expected = {
        "result": _near_tie(FP8, values / scale),
        "scale": Expected(scale, scale * 1e-6),
        "static": _near_tie(FP8, values * 64),
    }
    return _case(steps, expected, FP8, scale=FP32)


def _scaled_mm(
    kind: np.dtype[Any],
    random: np.random.Generator,
    bounds: ErrorBounds,
    rows: int,
    columns: int,
    depth: int,
) -> Case:
    a, b = (
        np.rint(_normal(random, size, depth).astype(np.float32) * 30).astype(kind)
        for size in (rows, columns)
    )
    a_scales = random.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
    b_scales = random.uniform(0.001, 0.01, (1, columns)).astype(np.float32)
    scales = {"a_scales": a_scales, "b_scales": b_scales}
    step = _call("_C.cutlass_scaled_mm", out="@out", a=a, b=b.T, **scales)
    bits = bounds.accumulator_bits if kind == FP8 else 23
    factor = a_scales.astype(np.float64) * b_scales
    return _case([step], {"out": product(bounds, BF16, a, b, factor, bits)})


def _fp4(random: np.random.Generator, *shape: int) -> tuple[Array, Array, Array]:
    """Return codes, three quarters of them 0, block scales between 0.5 and 4, and the values."""
    codes = np.where(random.random(shape) < 0.75, 0, random.integers(0, 16, shape)).astype(np.uint8)
    values = random.choice(np.array([0.5, 1, 1.5, 2, 3, 4]), (*shape[:-1], shape[-1] // 16))
    scales = nvfp4.scale_encode(values)
    return codes, scales, nvfp4.dequantise(codes, scales)


def _fp4_quantise(random: np.random.Generator, _: ErrorBounds, rows: int, columns: int) -> Case:
    x = _normal(random, rows, columns)
    factor = np.float32(2688 / np.abs(x.astype(np.float32)).max())

    def derived(results: Results) -> Results:
        scales = nvfp4.unswizzle(results["scales"], rows, columns // 16)
        codes = nvfp4.unpack(results["codes"])
        errors = nvfp4.quantisation_errors(x.astype(np.float64), float(factor), codes, scales)
        return {"wrong codes": errors[0], "wrong scales": errors[1]}

    step = _call("_C.scaled_fp4_quant", "codes", "scales", input=x,
                 input_scale=factor.reshape(1), is_sf_swizzled_layout=True)  # fmt: skip
    shapes = {"codes": (rows, columns // 2), "scales": nvfp4.padded(rows, columns // 16)}
    returned = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    expected = {name: Expected(np.zeros(1)) for name in ("wrong codes", "wrong scales")}
    return Case({}, [step], expected, returned, derived)


def _fp4_gemm(
    random: np.random.Generator, bounds: ErrorBounds, rows: int, columns: int, depth: int
) -> Case:
    (a, a_scales, left), (b, b_scales, right) = (
        _fp4(random, size, depth) for size in (rows, columns)
    )
    step = _call(
        "_C.cutlass_scaled_fp4_mm", out="@out", a=nvfp4.pack(a), b=nvfp4.pack(b),
        block_scale_a=nvfp4.swizzle(a_scales).view(FP8),
        block_scale_b=nvfp4.swizzle(b_scales).view(FP8), alpha=np.full(1, 1 / 32, np.float32),
    )  # fmt: skip
    bits = bounds.accumulator_bits
    return _case([step], {"out": product(bounds, BF16, left, right, 1 / 32, bits)})


def _by_expert(
    bounds: ErrorBounds,
    steps: Sequence[Mapping[str, Any]],
    rows: Array,
    experts: Array,
    weights: Array,
    alphas: Array,
    bits: int,
) -> Case:
    """Return the case of products of *rows* with the weights of their experts."""
    chosen = {f"expert {n}": np.flatnonzero(experts == n) for n in np.unique(experts)}
    expected = {
        name: product(bounds, BF16, rows[at], weights[experts[at[0]]], alphas[experts[at[0]]], bits)
        for name, at in chosen.items()
    }

    def derived(results: Results) -> Results:
        return {name: results["out"][at] for name, at in chosen.items()}

    return Case(
        {"out": unwritten(BF16, len(rows), weights.shape[1])}, steps, expected, derived=derived
    )


def _fp4_moe(
    random: np.random.Generator,
    bounds: ErrorBounds,
    counts: Sequence[int],
    columns: int,
    depth: int,
) -> Case:
    experts = np.repeat(np.arange(len(counts)), counts)
    a, a_scales, rows = _fp4(random, len(experts), depth)
    b, b_scales, weights = _fp4(random, len(counts), columns, depth)
    alphas = (2.0 ** random.integers(-6, -1, len(counts))).astype(np.float32)
    tiles = [nvfp4.swizzle(a_scales[experts == n]) for n in range(len(counts))]
    starts = _expert_offsets(counts)
    step = _call(
        "_C.cutlass_fp4_group_mm", out="@out", a=nvfp4.pack(a), b=nvfp4.pack(b),
        a_blockscale=np.concatenate(tiles).view(FP8), alphas=alphas,
        b_blockscales=np.stack([nvfp4.swizzle(scales) for scales in b_scales]).view(FP8),
        problem_sizes=np.array([(count, columns, depth) for count in counts], np.int32),
        expert_offsets=starts[0][:-1], sf_offsets=starts[1][:-1],
    )  # fmt: skip
    return _by_expert(bounds, [step], rows, experts, weights, alphas, bounds.accumulator_bits)


def _expert_offsets(counts: Sequence[int]) -> tuple[Array, Array]:
    """Return the first row of each expert with *counts* rows, of its tiles of scales, and ends."""
    padded = [nvfp4.padded(count, 4)[0] for count in counts]
    return tuple(np.cumsum([0, *sizes], dtype=np.int32) for sizes in (counts, padded))  # type: ignore[return-value]


def _fp4_experts_quantise(
    random: np.random.Generator, _: ErrorBounds, counts: Sequence[int], depth: int
) -> Case:
    x = _normal(random, sum(counts), depth)
    factors = (2688 / 2.0 ** random.integers(1, 6, len(counts))).astype(np.float32)
    rows, tiles = _expert_offsets(counts)

    def derived(results: Results) -> Results:
        codes, scales = nvfp4.unpack(results["codes"]), list[Array]()
        for count, tile in zip(counts, tiles[:-1], strict=True):
            scales.append(
                nvfp4.unswizzle(results["scales"].view(np.uint8)[tile:], count, depth // 16)
            )
        of_rows = np.repeat(factors.astype(np.float64), counts)[:, None]
        errors = nvfp4.quantisation_errors(
            x.astype(np.float64), of_rows, codes, np.concatenate(scales)
        )
        return {"wrong codes": errors[0], "wrong scales": errors[1]}

    step = _call(
        "_C.scaled_fp4_experts_quant", output="@codes", output_scale="@scales", input=x,
        input_global_scale=factors, input_offset_by_experts=rows,
        output_scale_offset_by_experts=tiles,
    )  # fmt: skip
    outputs = {
        "codes": unwritten(np.dtype(np.uint8), len(x), depth // 2),
        "scales": unwritten(INT32, int(tiles[-1]), nvfp4.padded(1, depth // 16)[1] // 4),
    }
    expected = {name: Expected(np.zeros(1)) for name in ("wrong codes", "wrong scales")}
    return Case(outputs, [step], expected, derived=derived)


def _fp8_moe(
    random: np.random.Generator,
    bounds: ErrorBounds,
    counts: Sequence[int],
    columns: int,
    depth: int,
) -> Case:
    experts, count = np.repeat(np.arange(len(counts)), counts), len(counts)
    a, b = (
        np.rint(_normal(random, *shape).astype(np.float32) * 30).astype(FP8)
        for shape in ((len(experts), depth), (count, columns, depth))
    )
    a_scales = random.uniform(0.001, 0.01, (len(experts), 1)).astype(np.float32)
    b_scales = random.uniform(0.001, 0.01, (count, columns)).astype(np.float32)
    strides = {name: np.full(count, depth) for name in ("a_strides", "b_strides")}
    steps = [
        _call("aten.permute", "weights", self=b, dims=[0, 2, 1]),
        _call(
            "_C.cutlass_moe_mm", out_tensors="@out", a_tensors=a, b_tensors="@weights",
            a_scales=a_scales, b_scales=b_scales, expert_offsets=np.cumsum([0, *counts[:-1]]),
            problem_sizes=np.array([(rows, columns, depth) for rows in counts], np.int32),
            **strides, c_strides=np.full(count, columns), per_act_token=True, per_out_ch=True,
        ),
    ]  # fmt: skip
    rows, weights = a * a_scales.astype(np.float64), b * b_scales[..., None].astype(np.float64)
    bits = bounds.accumulator_bits
    return _by_expert(bounds, steps, rows, experts, weights, np.ones(count), bits)


def _marlin_weights(
    random: np.random.Generator, columns: int, depth: int, fp4: bool
) -> tuple[Array, Array, Array, float]:
    """
    Return weights for Marlin: packed codes, scales in its layout, the values, and their factor.

    The scales of NVFP4 become five bits of exponent and three of mantissa without a sign, scaled up
    by a power of two (marlin_utils_fp4.py of vLLM); integers have a float16 scale per 128 values.
    """
    codes, scales, values = _fp4(random, columns, depth)
    plain: Array = nvfp4.scale_decode(scales)
    if not fp4:
        plain = random.uniform(0.005, 0.015, (columns, depth // 128)).astype(np.float16)
        values = (codes - 8.0) * np.repeat(plain.astype(np.float64), 128, axis=1)
    ordered = plain.T.reshape(-1, 64)[:, _MARLIN_ORDER].reshape(-1, columns)
    by = 2.0 ** math.floor(math.log2(448 / ordered.max()))
    if fp4:
        ordered = ordered.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, columns)
        shifted = (ordered * by * 128).astype(np.float16).view(np.int16) << 1
        ordered = shifted.view(np.uint8)[:, 1::2].copy().view(FP8)
    packed = np.ascontiguousarray(nvfp4.pack(codes).view(np.int32).T)
    return packed, ordered, values, 2.0**119 / by


def _repack(packed: Array, name: str) -> Mapping[str, Any]:
    depth, columns = packed.shape
    return _call("_C.gptq_marlin_repack", name, b_q_weight=packed, perm=np.empty(0, np.int32),
                 size_k=8 * depth, size_n=columns, num_bits=4, is_a_8bit=False)  # fmt: skip


def _marlin_call(
    operator: str, fp4: bool, shape: Sequence[int], **arguments: Any
) -> Mapping[str, Any]:
    sizes = dict(zip(("size_m", "size_n", "size_k"), shape, strict=True))
    return _call(
        operator, "out", workspace=np.zeros(4096, np.int32), is_k_full=True, is_full_k=True,
        b_type_id=_SCALAR_TYPES[fp4], use_atomic_add=False, use_fp32_reduce=True,
        is_zp_float=False, c_or_none="@out", **sizes, **arguments,
    )  # fmt: skip


def _marlin(
    fp4: bool, random: np.random.Generator, bounds: ErrorBounds, rows: int, columns: int, depth: int
) -> Case:
    kind = BF16 if fp4 else FP16
    packed, scales, values, factor = _marlin_weights(random, columns, depth, fp4)
    a = _normal(random, rows, depth, kind=kind)
    call = _marlin_call(
        "_C.marlin_gemm", fp4, (rows, columns, depth), a=a, b_q_weight="@weight", b_scales=scales,
        global_scale=np.full(1, factor, np.float32) if fp4 else None,
    )  # fmt: skip
    return _case([_repack(packed, "weight"), call], {"out": product(bounds, kind, a, values)}, kind)


def _marlin_moe(
    random: np.random.Generator,
    bounds: ErrorBounds,
    tokens: int,
    count: int,
    columns: int,
    depth: int,
) -> Case:
    top, block = 4, 16
    experts = _routing(random, tokens, top, count)
    every = [_marlin_weights(random, columns, depth, True) for _ in range(count)]
    packed, scales, values, factors = zip(*every, strict=True)
    ids, blocks, used = aligned(experts, count, block)
    a = _normal(random, tokens, depth)
    steps = [_repack(weight, f"weight {n}") for n, weight in enumerate(packed)]
    steps.append(_call("aten.stack", "weights", tensors=[f"@weight {n}" for n in range(count)]))
    steps.append(_marlin_call(
        "_moe_C.moe_wna16_marlin_gemm", True, (tokens, columns, depth), a=a, b_q_weight="@weights",
        b_scales=np.stack(scales), global_scale=np.array(factors, np.float32), expert_ids=blocks,
        sorted_token_ids=ids, num_tokens_past_padded=np.array([used], np.int32), top_k=top,
        topk_weights=np.ones((tokens, top), np.float32), mul_topk_weights=False,
        moe_block_size=block, thread_k=-1, thread_n=-1, blocks_per_sm=-1,
    ))  # fmt: skip
    rows, ones = np.repeat(a, top, axis=0), np.ones(count)
    return _by_expert(bounds, steps, rows, experts.reshape(-1), np.stack(values), ones, 23)


def _routing(random: np.random.Generator, tokens: int, top: int, count: int) -> Array:
    """Return *top* different experts for each token; the last two experts get none."""
    return np.argsort(random.random((tokens, count - 2)), axis=1)[:, :top].astype(np.int32)


def aligned(experts: Array, count: int, block: int) -> tuple[Array, Array, int]:
    """
    Return the tokens by expert, filled up to whole blocks with their number; the expert of each
    block; and how many entries are used.
    """
    size = -(-(experts.size + count * (block - 1)) // block) * block
    ids, blocks = list[Array](), list[int]()
    for expert in range(count):
        tokens = np.flatnonzero(experts.reshape(-1) == expert)
        ids += [tokens, np.full(-len(tokens) % block, experts.size)]
        blocks += [expert] * -(-len(tokens) // block)
    used = block * len(blocks)
    ids.append(np.full(size - used, experts.size))
    return np.concatenate(ids).astype(np.int32), np.array(blocks, np.int32), used


def _moe_align(
    random: np.random.Generator, _: ErrorBounds, tokens: int, top: int, count: int, block: int
) -> Case:
    experts = _routing(random, tokens, top, count)
    ids, blocks, used = aligned(experts, count, block)

    def derived(results: Results) -> Results:
        # The order of an expert's tokens is the operator's own.
        owner = np.repeat(blocks, block)
        order = np.lexsort((results["sorted_token_ids"][: len(owner)], owner))
        tokens, experts = results["sorted_token_ids"][order], results["experts_ids"][: len(blocks)]
        return {"tokens": tokens, "experts": experts, "used": results["num_tokens_post_pad"]}

    sizes = {
        "sorted_token_ids": len(ids),
        "experts_ids": len(ids) // block,
        "num_tokens_post_pad": 1,
    }
    outputs = {name: unwritten(INT32, size) for name, size in sizes.items()}
    step = _call("_moe_C.moe_align_block_size", topk_ids=experts, num_experts=count,
                 block_size=block, **{name: f"@{name}" for name in outputs})  # fmt: skip
    parts = {"tokens": ids[:used], "experts": blocks, "used": np.array([used])}
    expected = {name: Expected(values) for name, values in parts.items()}
    return Case(outputs, [step], expected, derived=derived, repeatable=False)


def _moe_sum(random: np.random.Generator, bounds: ErrorBounds, *shape: int) -> Case:
    x = _normal(random, *shape)
    values = x.astype(np.float64)
    total = rounded(bounds, BF16, values.sum(axis=1), np.abs(values).sum(axis=1))
    return _case([_call("_moe_C.moe_sum", input=x, output="@out")], {"out": total})


def _topk_softmax(
    random: np.random.Generator, _: ErrorBounds, tokens: int, experts: int, top: int
) -> Case:
    gates = _normal(random, tokens, experts, kind=FP32)
    powers = np.exp(gates.astype(np.float64))
    shares = powers / powers.sum(axis=1, keepdims=True)
    chosen = np.argsort(-shares, axis=1)[:, :top]
    weights = np.take_along_axis(shares, chosen, axis=1)
    kinds = {"topk_weights": FP32, "topk_indices": INT32, "token_expert_indices": INT32}
    outputs = {name: unwritten(kind, *chosen.shape) for name, kind in kinds.items()}
    step = _call("_moe_C.topk_softmax", gating_output=gates, renormalize=False,
                 **{name: f"@{name}" for name in outputs})  # fmt: skip
    expected = {"topk_weights": Expected(weights, 1e-5 * weights), "topk_indices": Expected(chosen)}
    return Case(outputs, [step], expected)


def _activation(random: np.random.Generator, bounds: ErrorBounds, rows: int, columns: int) -> Case:
    x = _normal(random, rows, 2 * columns)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    step = _call("_C.silu_and_mul", result="@out", out="@out", input=x)
    return _case([step], {"out": rounded(bounds, BF16, gate / (1 + np.exp(-gate)) * up)})


def _rms_norm(random: np.random.Generator, bounds: ErrorBounds, rows: int, columns: int) -> Case:
    x, residual = _normal(random, rows, columns), _normal(random, rows, columns)
    weight = _normal(random, columns)

    def normed(x: Array) -> Expected:
        values = x.astype(np.float64)
        root = np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-6)
        return rounded(bounds, BF16, values / root * weight.astype(np.float64))

    common, total = {"weight": weight, "epsilon": 1e-6}, x + residual
    steps = [
        _call("_C.rms_norm", result="@out", out="@out", input=x, **common),
        _call("_C.fused_add_rms_norm", input="@x", residual="@residual", **common),
    ]
    outputs = {"out": unwritten(BF16, rows, columns), "x": x, "residual": residual}
    sums = {"x": normed(total), "residual": Expected(total.astype(np.float64))}
    return Case(outputs, steps, {"out": normed(x), **sums})


def _rotary(random: np.random.Generator, bounds: ErrorBounds, tokens: int, heads: int) -> Case:
    size, longest = 128, 4096
    angles = np.outer(np.arange(longest), 10000.0 ** (-np.arange(64) / 64))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(BF16)
    positions = random.integers(0, longest, tokens)
    query = _normal(random, tokens, heads * size)
    cos, sin = np.split(table[positions].astype(np.float64)[:, None], 2, axis=2)
    first, second = np.split(query.astype(np.float64).reshape(tokens, heads, size), 2, axis=2)
    terms = ((first * cos, -second * sin), (second * cos, first * sin))
    values = np.concatenate([a + b for a, b in terms], axis=2).reshape(query.shape)
    sizes = np.concatenate([np.abs(a) + np.abs(b) for a, b in terms], axis=2).reshape(query.shape)
    step = _call("_C.rotary_embedding", positions=positions, query="@query", head_size=size,
                 cos_sin_cache=table, is_neox=True)  # fmt: skip
    return Case({"query": query}, [step], {"query": rounded(bounds, BF16, values, sizes)})


def _cache(random: np.random.Generator, _: ErrorBounds, tokens: int) -> Case:
    slots = random.permutation(256)[:tokens]
    slots[3] = -1
    inputs = {name: _normal(random, tokens, 8, 128) for name in ("key", "value")}
    outputs = {f"{name}_cache": _normal(random, 16, 16, 8, 128) for name in inputs}
    expected = {name: Expected(cache.astype(np.float64)) for name, cache in outputs.items()}
    for name, x in inputs.items():
        flat = expected[f"{name}_cache"].values.reshape(256, 8, 128)
        flat[slots[slots >= 0]] = x[slots >= 0].astype(np.float64)
    unit = np.ones(1, np.float32)
    step = _call(
        "_C_cache_ops.reshape_and_cache_flash", **inputs, **{name: f"@{name}" for name in outputs},
        slot_mapping=slots, kv_cache_dtype="auto", k_scale=unit, v_scale=unit,
    )  # fmt: skip
    return Case(outputs, [step], expected)


_SHAPES = ((1, 4096, 4096), (17, 6144, 4096), (512, 14336, 4096), (2048, 4096, 14336))
_FP4_SHAPES = ((1, 4096, 4096), (17, 7168, 4096), (129, 256, 384))
_MARLIN_SHAPES = ((1, 4096, 4096), (33, 6144, 4096), (129, 256, 14336))
_QUANTISED_EXPERTS = (((3, 0, 17, 129), 512), ((1, 64, 0, 7), 2880))
_EXPERTS = (((3, 0, 17, 129), 256, 512), ((1, 64, 0, 33, 2, 5, 0, 7), 1536, 2048))

#: Check → what makes a case, from a random generator, the bounds and a shape; and the shapes: those
#: of layers of models, and odd numbers of rows. Those named ``fp4-…`` need FP4 instructions.
OPERATORS: dict[str, tuple[Callable[..., Case], tuple[tuple[Any, ...], ...]]] = {
    "fp4-quantise": (_fp4_quantise, ((1, 4096), (17, 7168), (150, 64))),
    "fp4-gemm": (_fp4_gemm, _FP4_SHAPES),
    "fp4-experts-quantise": (
        _fp4_experts_quantise,
        (((3, 0, 17, 129), 512), ((1, 64, 0, 7), 2880)),
    ),
    "fp4-moe": (_fp4_moe, _EXPERTS),
    "marlin-fp4": (partial(_marlin, True), _MARLIN_SHAPES),
    "marlin-fp4-moe": (_marlin_moe, ((37, 16, 1024, 2048),)),
    "marlin-int4": (partial(_marlin, False), _MARLIN_SHAPES),
    "fp8-quantise": (_fp8_quantise, ((1, 4096), (129, 5120))),
    "fp8-gemm": (partial(_scaled_mm, FP8), _SHAPES),
    "fp8-moe": (_fp8_moe, _EXPERTS),
    "int8-gemm": (partial(_scaled_mm, np.dtype(np.int8)), _SHAPES[:2]),
    "moe-align": (_moe_align, ((1, 8, 64, 16), (257, 8, 128, 64))),
    "moe-sum": (_moe_sum, ((129, 4, 4096),)),
    "topk-softmax": (_topk_softmax, ((257, 128, 8),)),
    "activation": (_activation, ((1, 14336), (333, 11008))),
    "rms-norm": (_rms_norm, ((7, 4096), (1025, 5120))),
    "rotary": (_rotary, ((33, 8),)),
    "cache": (_cache, ((37,),)),
}

#: Check → an operator of the wheel that no case calls.
UNTESTED: Mapping[str, str] = {"moe-permute": "moe_permute"}
