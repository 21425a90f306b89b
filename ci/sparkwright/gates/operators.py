"""
The cases of a wheel's operators: inputs, calls, and results as NumPy computes them in float64 from
the same quantised inputs.

- An element y of a result r may differ by |y - r| ≤ n·u·s: u is the unit roundoff of bfloat16,
  2^-8, n the number of roundings, and s the sum of the magnitudes that are rounded.
- Products have inputs that are small integers times powers of two, whose sums are exact in every
  order and in the narrowest accumulator known: FP8 on Hopper keeps about 14 bits (DeepSeek-V3
  Technical Report, section 3.3.2), and no sum of FP8 or FP4 cases needs more than 13, nor one of
  the other cases more than the 24 of FP32. Only the result is rounded.
- Codes (FP4, FP8, indices) are equal, or beside a tie one of both neighbours.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from sparkwright.gates import nvfp4

Array = NDArray[Any]
Results = Mapping[str, Array]

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
FP32, INT32 = np.dtype(np.float32), np.dtype(np.int32)

#: The identifier of vLLM's scalar type float4_e2m1f (vllm/scalar_type.py).
_FLOAT4_E2M1F = 2 | 1 << 8 | 1 << 16 | 1 << 49

#: The order of 64 scales in Marlin's layout (marlin_utils.py of vLLM), and what its products of
#: scaled-up scales are multiplied with.
_MARLIN_ORDER = np.arange(64).reshape(8, 8).T.reshape(-1)
_MARLIN_FACTOR = 2.0**112

#: The arguments of Marlin's operators that are the same in all cases.
_MARLIN: Mapping[str, Any] = {
    "workspace": np.zeros(4096, np.int32),
    "is_k_full": True,
    "is_full_k": True,
    "b_type_id": _FLOAT4_E2M1F,
    "use_atomic_add": False,
    "use_fp32_reduce": True,
    "is_zp_float": False,
    "c_or_none": "@out",
}


class Expected(NamedTuple):
    """The values of a result, and the errors allowed in them."""

    values: Array
    allowed: Array | float = 0.0


class Case(msgspec.Struct, frozen=True, eq=False):
    """
    Calls of operators, and their results.

    Attributes:
        outputs: Name → initial content.
        steps: Calls as of ``target_env_scripts/operators.py``, with arrays for tensors.
        expected: By the names of outputs, or of what *derived* makes of them.
        derived: Makes comparable values of results that are right in several forms.
        unordered: Outputs in an order that may differ between two runs.
    """

    outputs: Results
    steps: Sequence[Mapping[str, Any]]
    expected: Mapping[str, Expected]
    derived: Callable[[Results], Results] = dict
    unordered: Sequence[str] = ()


def cases(name: str, roundings: float) -> dict[str, Case]:
    """Return the cases of the check *name* by their shapes, the same each time."""
    random, (make, shapes) = np.random.default_rng(0), OPERATORS[name]
    return {" × ".join(map(str, shape)): make(random, roundings, *shape) for shape in shapes}


def unwritten(kind: np.dtype[Any], *shape: int) -> Array:
    """Return an array whose bytes are all 0xFF, which is NaN in every float type."""
    return np.full(math.prod(shape) * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(shape)


def rounded(roundings: float, values: Array, magnitudes: Array | None = None) -> Expected:
    """Return *values* with the errors of their rounding; s is *magnitudes*, or |values|."""
    sizes = values if magnitudes is None else magnitudes
    return Expected(values, roundings * 2.0**-8 * np.abs(sizes))


def error_ratio(expected: Expected, actual: Array) -> float:
    """
    Return the largest error of *actual* over the allowed one: at most 1 if it is right, and 10^9
    for NaN or an error where none is allowed.
    """
    errors = np.abs(actual.astype(np.float64) - expected.values)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / expected.allowed)
    return float(np.nan_to_num(ratios, nan=1e9, posinf=1e9).max())


def _normal(random: np.random.Generator, *shape: int, kind: np.dtype[Any] = BF16) -> Array:
    return random.standard_normal(shape, np.float32).astype(kind)


def _integers(random: np.random.Generator, largest: int, kind: np.dtype[Any], *shape: int) -> Array:
    return random.integers(-largest, largest, shape, np.int8, endpoint=True).astype(kind)


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
    **kinds: np.dtype[Any],
) -> Case:
    """Return a case whose outputs are of *kinds*, or bfloat16, and are not written before."""
    outputs = {
        name: unwritten(kinds.get(name, BF16), *result.values.shape)
        for name, result in expected.items()
    }
    return Case(outputs, steps, expected)


def _fp8_quantise(random: np.random.Generator, _: float, rows: int, columns: int) -> Case:
    x = _normal(random, rows, columns)
    values = x.astype(np.float64)
    scale = np.abs(values).max(axis=1, keepdims=True) / 448
    steps = [
        _call("_C.dynamic_per_token_scaled_fp8_quant", result="@result", scale="@scale", input=x),
        _call("_C.static_scaled_fp8_quant", result="@static", input=x,
              scale=np.full(1, 1 / 64, np.float32)),
    ]  # fmt: skip
    expected = {
        "result": _near_tie(FP8, values / scale),
        "scale": Expected(scale, scale * 1e-6),
        "static": _near_tie(FP8, values * 64),
    }
    return _case(steps, expected, result=FP8, scale=FP32, static=FP8)


def _fp8_gemm(
    random: np.random.Generator, roundings: float, rows: int, columns: int, depth: int
) -> Case:
    a, b = _integers(random, 3, FP8, rows, depth), _integers(random, 3, FP8, columns, depth)
    a_scales = random.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
    b_scales = random.uniform(0.001, 0.01, (1, columns)).astype(np.float32)
    steps = [
        _call("aten.permute", "@columns", self=b, dims=[1, 0]),
        _call("_C.cutlass_scaled_mm", out="@out", a=a, b="@columns", a_scales=a_scales,
              b_scales=b_scales),
    ]  # fmt: skip
    values = (a.astype(np.float64) @ b.T.astype(np.float64)) * a_scales * b_scales
    return _case(steps, {"out": rounded(roundings, values)})


def _fp4(random: np.random.Generator, *shape: int) -> tuple[Array, Array, Array]:
    """Return codes, 94 % of them 0, block scales between 0.5 and 2, and the values."""
    codes = np.where(random.random(shape) < 0.94, 0, random.integers(0, 16, shape)).astype(np.uint8)
    values = random.choice(np.array([0.5, 1, 1.5, 2]), (*shape[:-1], shape[-1] // 16))
    scales = nvfp4.scale_encode(values)
    return codes, scales, nvfp4.dequantise(codes, scales)


def _fp4_gemm(
    random: np.random.Generator, roundings: float, rows: int, columns: int, depth: int
) -> Case:
    a, a_scales, left = _fp4(random, rows, depth)
    b, b_scales, right = _fp4(random, columns, depth)
    step = _call(
        "_C.cutlass_scaled_fp4_mm", out="@out", a=nvfp4.pack(a), b=nvfp4.pack(b),
        block_scale_a=nvfp4.swizzle(a_scales).view(FP8),
        block_scale_b=nvfp4.swizzle(b_scales).view(FP8), alpha=np.full(1, 1 / 32, np.float32),
    )  # fmt: skip
    return _case([step], {"out": rounded(roundings, left @ right.T / 32)})


def _by_expert(rows: Array, experts: Array, weights: Array) -> Array:
    """Return the products of *rows* with the weights of their *experts*."""
    values = np.empty((len(rows), weights.shape[1]))
    for expert in np.unique(experts):
        chosen = experts == expert
        values[chosen] = rows[chosen].astype(np.float64) @ weights[expert].T.astype(np.float64)
    return values


def _expert_offsets(counts: Sequence[int]) -> tuple[Array, Array]:
    """Return the first row of each expert with *counts* rows, of its tiles of scales, and ends."""
    tiles = [nvfp4.padded(count, 4)[0] for count in counts]
    return np.cumsum([0, *counts], dtype=np.int32), np.cumsum([0, *tiles], dtype=np.int32)


def _fp4_moe(
    random: np.random.Generator,
    roundings: float,
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
        b_blockscales=np.stack(list(map(nvfp4.swizzle, b_scales))).view(FP8),
        problem_sizes=np.array([(count, columns, depth) for count in counts], np.int32),
        expert_offsets=starts[0][:-1], sf_offsets=starts[1][:-1],
    )  # fmt: skip
    values = _by_expert(rows, experts, weights) * alphas[experts][:, None]
    return _case([step], {"out": rounded(roundings, values)})


def _fp4_quantised(
    x: Array, counts: Sequence[int], factors: Array, steps: Sequence[Mapping[str, Any]]
) -> Case:
    """Return the case of *steps*, which quantise *x* with the tensor scales of *counts* rows."""
    of_rows = np.repeat(factors.astype(np.float64), counts)[:, None]
    tiles = _expert_offsets(counts)[1]
    blocks = x.shape[1] // 16

    def derived(results: Results) -> Results:
        scales = [
            nvfp4.unswizzle(results["scales"].view(np.uint8)[tile:], count, blocks)
            for count, tile in zip(counts, tiles[:-1], strict=True)
        ]
        wrong = nvfp4.quantisation_errors(
            x.astype(np.float64), of_rows, nvfp4.unpack(results["codes"]), np.concatenate(scales)
        )
        return dict(zip(expected, wrong, strict=True))

    outputs = {
        "codes": unwritten(np.dtype(np.uint8), len(x), 8 * blocks),
        "scales": unwritten(INT32, int(tiles[-1]), nvfp4.padded(1, blocks)[1] // 4),
    }
    expected = {name: Expected(np.zeros(1)) for name in ("wrong codes", "wrong scales")}
    return Case(outputs, steps, expected, derived=derived)


def _fp4_quantise(random: np.random.Generator, _: float, rows: int, columns: int) -> Case:
    x = _normal(random, rows, columns)
    factor = 2688 / np.abs(x.astype(np.float32)).max(keepdims=True).reshape(1)
    steps = [
        _call("_C.scaled_fp4_quant", "@new codes", "@new scales", input=x, input_scale=factor,
              is_sf_swizzled_layout=True),
        _call("aten.copy_", self="@codes", src="@new codes"),
        _call("aten.copy_", self="@scales", src="@new scales"),
    ]  # fmt: skip
    return _fp4_quantised(x, [rows], factor, steps)


def _fp4_experts_quantise(
    random: np.random.Generator, _: float, counts: Sequence[int], depth: int
) -> Case:
    x = _normal(random, sum(counts), depth)
    factors = (2688 / 2.0 ** random.integers(1, 6, len(counts))).astype(np.float32)
    rows, tiles = _expert_offsets(counts)
    step = _call(
        "_C.scaled_fp4_experts_quant", output="@codes", output_scale="@scales", input=x,
        input_global_scale=factors, input_offset_by_experts=rows,
        output_scale_offset_by_experts=tiles,
    )  # fmt: skip
    return _fp4_quantised(x, counts, factors, [step])


def _marlin_weights(
    random: np.random.Generator, *shape: int
) -> tuple[Mapping[str, Any], Array, Array]:
    """
    Return the step that packs NVFP4 weights of … × columns × depth for Marlin, scales, and values.

    The scales become five bits of exponent and three of mantissa without a sign, scaled up by the
    power of two that brings the largest, 2, next to 448 (marlin_utils_fp4.py of vLLM).
    """
    codes, scales, values = _fp4(random, *shape)
    columns, depth = shape[-2:]
    packed = nvfp4.pack(codes).view(np.int32).swapaxes(-1, -2).reshape(-1, columns)
    # The rows of all experts are packed as those of one matrix.
    step = _call("_C.gptq_marlin_repack", "@packed", b_q_weight=packed, perm=np.empty(0, np.int32),
                 size_k=8 * len(packed), size_n=columns, num_bits=4, is_a_8bit=False)  # fmt: skip
    plain = nvfp4.scale_decode(scales).swapaxes(-1, -2).reshape(-1, 64)
    ordered = plain[:, _MARLIN_ORDER].reshape(-1, 4)[:, [0, 2, 1, 3]]
    shifted = (ordered * 2.0**14).astype(np.float16, order="C").view(np.int16) << 1
    codes = shifted.view(np.uint8)[:, 1::2].reshape(*shape[:-2], depth // 16, columns)
    return step, codes.view(FP8), values


def _marlin(
    random: np.random.Generator, roundings: float, rows: int, columns: int, depth: int
) -> Case:
    repack, scales, values = _marlin_weights(random, columns, depth)
    a = _integers(random, 100, BF16, rows, depth)
    call = _call(
        "_C.marlin_gemm", **_MARLIN, size_m=rows, size_n=columns, size_k=depth, a=a,
        b_q_weight="@packed", b_scales=scales, global_scale=np.full(1, _MARLIN_FACTOR, np.float32),
    )  # fmt: skip
    return _case([repack, call], {"out": rounded(roundings, a.astype(np.float64) @ values.T)})


def _marlin_moe(
    random: np.random.Generator,
    roundings: float,
    tokens: int,
    count: int,
    columns: int,
    depth: int,
    block: int,
) -> Case:
    top = 4
    # Different experts for each token; the last two experts get none.
    experts = np.argsort(random.random((tokens, count - 2)), axis=1)[:, :top].astype(np.int32)
    repack, scales, values = _marlin_weights(random, count, columns, depth)
    a = _integers(random, 100, BF16, tokens, depth)
    blocks = -(-(experts.size + count * (block - 1)) // block)
    products = _by_expert(np.repeat(a, top, axis=0), experts.reshape(-1), values)
    outputs = {
        "ids": unwritten(INT32, blocks * block),
        "experts": unwritten(INT32, blocks),
        "used": unwritten(INT32, 1),
        "out": unwritten(BF16, *products.shape),
    }
    steps = [
        _call(
            "_moe_C.moe_align_block_size", topk_ids=experts, num_experts=count, block_size=block,
            sorted_token_ids="@ids", experts_ids="@experts",  # noqa: S106
            num_tokens_post_pad="@used",
        ),
        repack,
        _call("aten.view", "@weights", self="@packed", size=[count, depth // 16, 2 * columns]),
        _call(
            "_moe_C.moe_wna16_marlin_gemm", **_MARLIN, size_m=tokens, size_n=columns,
            size_k=depth, a=a,
            b_q_weight="@weights", b_scales=scales,
            global_scale=np.full(count, _MARLIN_FACTOR, np.float32),
            sorted_token_ids="@ids", expert_ids="@experts",  # noqa: S106
            num_tokens_past_padded="@used", topk_weights=np.ones((tokens, top), np.float32),
            top_k=top, mul_topk_weights=False, moe_block_size=block, thread_k=-1, thread_n=-1,
            blocks_per_sm=-1,
        ),
    ]  # fmt: skip
    return Case(outputs, steps, {"out": rounded(roundings, products)}, unordered=("ids",))


def _moe_sum(random: np.random.Generator, roundings: float, *shape: int) -> Case:
    x = _normal(random, *shape)
    values = x.astype(np.float64)
    total = rounded(roundings, values.sum(axis=1), np.abs(values).sum(axis=1))
    return _case([_call("_moe_C.moe_sum", input=x, output="@out")], {"out": total})


def _topk_softmax(
    random: np.random.Generator, _: float, tokens: int, experts: int, top: int
) -> Case:
    gates = _normal(random, tokens, experts, kind=FP32)
    shares = softmax(gates.astype(np.float64), axis=1)
    chosen = np.argsort(-shares, axis=1)[:, :top]
    weights = np.take_along_axis(shares, chosen, axis=1)
    outputs = {
        "topk_weights": unwritten(FP32, *chosen.shape),
        "topk_indices": unwritten(INT32, *chosen.shape),
        "token_expert_indices": unwritten(INT32, *chosen.shape),
    }
    step = _call("_moe_C.topk_softmax", gating_output=gates, renormalize=False,
                 **{name: f"@{name}" for name in outputs})  # fmt: skip
    expected = {"topk_weights": Expected(weights, 1e-5 * weights), "topk_indices": Expected(chosen)}
    return Case(outputs, [step], expected)


def _activation(random: np.random.Generator, roundings: float, rows: int, columns: int) -> Case:
    x = _normal(random, rows, 2 * columns)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    step = _call("_C.silu_and_mul", result="@out", out="@out", input=x)
    return _case([step], {"out": rounded(roundings, gate * expit(gate) * up)})


def _rms_norm(random: np.random.Generator, roundings: float, rows: int, columns: int) -> Case:
    x, residual = _normal(random, rows, columns), _normal(random, rows, columns)
    weight, total = _normal(random, columns), x + residual
    steps = [
        _call("_C.rms_norm", result="@out", out="@out", input=x, weight=weight, epsilon=1e-6),
        _call("_C.fused_add_rms_norm", input="@x", residual="@residual", weight=weight,
              epsilon=1e-6),
    ]  # fmt: skip
    expected = {"residual": Expected(total.astype(np.float64))}
    for name, inputs in (("out", x), ("x", total)):
        values = inputs.astype(np.float64)
        root = np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-6)
        expected[name] = rounded(roundings, values / root * weight.astype(np.float64))
    outputs = {"out": unwritten(BF16, rows, columns), "x": x, "residual": residual}
    return Case(outputs, steps, expected)


def _rotary(random: np.random.Generator, roundings: float, tokens: int, heads: int) -> Case:
    table, query = _normal(random, 4096, 128), _normal(random, tokens, heads * 128)
    positions = random.integers(0, len(table), tokens)
    cos, sin = np.split(table[positions].astype(np.float64)[:, None], 2, axis=2)
    first, second = np.split(query.astype(np.float64).reshape(tokens, heads, 128), 2, axis=2)
    terms = np.array([[first * cos, -second * sin], [second * cos, first * sin]])
    values, sizes = (
        np.concatenate(part.sum(axis=1), axis=2).reshape(query.shape)
        for part in (terms, np.abs(terms))
    )
    step = _call("_C.rotary_embedding", positions=positions, query="@query", head_size=128,
                 cos_sin_cache=table, is_neox=True)  # fmt: skip
    return Case({"query": query}, [step], {"query": rounded(roundings, values, sizes)})


def _cache(random: np.random.Generator, _: float, tokens: int) -> Case:
    slots = random.permutation(256)[:tokens]
    slots[3] = -1
    x, caches = _normal(random, 2, tokens, 8, 128), _normal(random, 2, 16, 16, 8, 128)
    values = caches.astype(np.float64)
    values.reshape(2, 256, 8, 128)[:, slots[slots >= 0]] = x[:, slots >= 0]
    step = _call(
        "_C_cache_ops.reshape_and_cache_flash", key=x[0], value=x[1], key_cache="@key",
        value_cache="@value", slot_mapping=slots, kv_cache_dtype="auto",
        k_scale=np.ones(1, np.float32), v_scale=np.ones(1, np.float32),
    )  # fmt: skip
    expected = {"key": Expected(values[0]), "value": Expected(values[1])}
    return Case({"key": caches[0], "value": caches[1]}, [step], expected)


#: Check → what makes a case, from a random generator, the number of roundings and a shape; and the
#: shapes: those of layers of models, and odd numbers of rows. Those named ``fp4-…`` need FP4
#: instructions.
OPERATORS: dict[str, tuple[Callable[..., Case], tuple[tuple[Any, ...], ...]]] = {
    "fp4-quantise": (_fp4_quantise, ((1, 4096), (17, 7168), (150, 64))),
    "fp4-gemm": (_fp4_gemm, ((1, 4096, 4096), (17, 7168, 4096), (129, 256, 384))),
    "fp4-experts-quantise": (
        _fp4_experts_quantise,
        (((3, 0, 17, 129), 512), ((1, 64, 0, 7), 2880)),
    ),
    "fp4-moe": (
        _fp4_moe,
        (((3, 0, 17, 129), 256, 512), ((1, 64, 0, 33, 2, 5, 0, 7), 1536, 2048)),
    ),
    "marlin-fp4": (_marlin, ((1, 4096, 4096), (33, 6144, 4096), (129, 256, 14336))),
    "marlin-fp4-moe": (_marlin_moe, ((37, 16, 1024, 2048, 16), (257, 128, 256, 512, 64))),
    "fp8-quantise": (_fp8_quantise, ((1, 4096), (129, 5120))),
    "fp8-gemm": (
        _fp8_gemm,
        ((1, 4096, 4096), (17, 6144, 4096), (512, 14336, 4096), (2048, 4096, 14336)),
    ),
    "moe-sum": (_moe_sum, ((129, 4, 4096),)),
    "topk-softmax": (_topk_softmax, ((257, 128, 8),)),
    "activation": (_activation, ((1, 14336), (333, 11008))),
    "rms-norm": (_rms_norm, ((7, 4096), (1025, 5120))),
    "rotary": (_rotary, ((33, 8),)),
    "cache": (_cache, ((37,),)),
}
