"""How the rest of a quantiser is judged: block scales, their cast and their layout, whole blocks, and the tensor scale."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates.core.verdict import Check, Sample
from sparkwright.gates.numerics import differences, e2m1, nvfp4
from sparkwright.gates.numerics.coding import SHOWN, Judge, judged, shown
from sparkwright.gates.numerics.converter import Call
from sparkwright.gates.numerics.e2m1 import Bytes
from sparkwright.gates.numerics.units import Converter, dtypes
from sparkwright.gates.numerics.values import Inputs, around, every, fp32, narrowed


def swizzle(one: Converter, call: Call) -> Check:
    """Judge where the scale of every row and column lies, for widths that fill their tiles and widths that do not."""
    parts = [np.array([(row, column, columns) for row in range(300) for column in range(columns)], np.int32) for columns in (1, 4, 7, 12)]
    rows = np.concatenate(parts)
    asked = np.empty(len(rows), dtypes(one)[0])
    for index, field in enumerate(("row", "column", "columns")):
        asked[field] = rows[:, index]
    found = call(asked)
    wide = rows.astype(np.int64)
    expected = nvfp4.swizzled_offset(wide[:, 0], wide[:, 1], wide[:, 2])
    wrong = np.flatnonzero(found != expected)
    samples = (Sample(f"row {rows[i][0]}, column {rows[i][1]} of {rows[i][2]}", f"byte {expected[i]}", f"byte {found[i]}")
               for i in wrong[:SHOWN])  # fmt: skip
    return judged(f"{one.name}-swizzle", len(rows), wrong, samples, "where each scale lies in tiles of 128 × 4")


def scale_cast(one: Converter, call: Call) -> Check:
    """Judge the cast of a block scale to UE4M3: all bf16 and fp16 that are not negative, and every tie ± 1 ulp."""
    halves = [every(form).values for form in ("bf16", "fp16")]
    ties = around((nvfp4.SCALES[:-1] + nvfp4.SCALES[1:]) / np.float32(2))
    values = np.concatenate([*halves, ties, around(np.array([448, 464, 480, 512], np.float32))])
    inputs = fp32(values[~np.signbit(values) & ~np.isnan(values)])
    asked = np.empty(len(inputs.values), dtypes(one)[0])
    asked["x"] = inputs.values
    return _scales(f"{one.name}-scale-cast", inputs, call(asked), nvfp4.scale_encode(inputs.values), "UE4M3, saturating at 448")


def _scales(name: str, inputs: Inputs, found: Bytes, expected: Bytes, says: str) -> Check:
    wrong = np.flatnonzero(found != expected)
    values = nvfp4.scale_decode(np.stack([expected, found]))
    samples = (Sample(inputs.case(i), f"0x{expected[i]:02x} = {values[0, i]:g}", f"0x{found[i]:02x} = {values[1, i]:g}")
               for i in wrong[:SHOWN])  # fmt: skip
    return judged(name, len(inputs.values), wrong, samples, says)


class Made(msgspec.Struct, frozen=True, eq=False):
    """What a quantiser made of blocks: sixteen codes each, and a scale."""

    codes: Bytes
    scales: Bytes


def quantised(one: Converter, call: Call, blocks: NDArray[np.float32], tensor_scale: float = 1.0) -> Made:
    """Return what *one* makes of *blocks* (n × 16), whose values its format holds exactly."""
    asked = np.empty(len(blocks), dtypes(one)[0])
    asked["tensor_scale"] = tensor_scale
    flat = fp32(blocks.reshape(-1))
    asked["bits"] = (flat if one.format == "fp32" else narrowed(flat, one.format)).bits.reshape(-1, 16)
    made = call(asked)
    codes = (made["codes"][:, None] >> (np.arange(16, dtype=np.uint64) * np.uint64(4)) & np.uint64(0xF)).astype(np.uint8)
    return Made(codes, made["scale"])


def block_grid(one: Converter, call: Call) -> Check:
    """Judge blocks that NVFP4 holds exactly: for every scale, all codes; nothing may be lost, and each code is where it belongs."""
    scales = nvfp4.SCALES[8:]
    order = np.concatenate([np.roll(np.delete(np.arange(16), 8), 1), [7]]).astype(np.uint8)
    blocks = e2m1.decode(order)[None, :] * scales[:, None]
    made = quantised(one, call, blocks)
    expected = np.broadcast_to(order, made.codes.shape)
    differs = (made.codes != expected) & ((made.codes | expected) & 7 != 0)
    wrong = np.flatnonzero((made.scales != np.arange(8, 127)) | differs.any(axis=1))
    samples = (Sample(f"block of every code × {scales[i]:g}", _block(order, 8 + i), _block(made.codes[i], int(made.scales[i])))
               for i in wrong[:SHOWN])  # fmt: skip
    return judged(f"{one.name}-block-grid", len(blocks), wrong, samples, "blocks that NVFP4 holds exactly, with every normal scale")


def _block(codes: Bytes, scale: int) -> str:
    return f"scale 0x{scale:02x}, codes {''.join(f'{code:x}' for code in codes)}"


def block_sweep(one: Converter, call: Call) -> Check:
    """Judge every value of the format up to 6, fifteen at a time beside a 6, which makes the scale 1."""
    inputs = every("bf16" if one.format == "fp32" else one.format)
    inputs = inputs.only(np.abs(inputs.values) <= e2m1.LARGEST)
    values = np.concatenate([inputs.values, np.zeros(-len(inputs.values) % 15, np.float32)]).reshape(-1, 15)
    blocks = np.concatenate([values, np.full((len(values), 1), 6, np.float32)], axis=1)
    made = quantised(one, call, blocks)
    found = made.codes[:, :15].reshape(-1)[: len(inputs.values)].astype(np.int64)
    expected = e2m1.encode(inputs.values).astype(np.int64)
    wrong = np.flatnonzero((found != expected) & ((found | expected) & 7 != 0))
    samples = (Sample(inputs.case(i), shown(int(expected[i])), shown(int(found[i]))) for i in wrong[:SHOWN])
    return judged(f"{one.name}-block-sweep", len(found), wrong, samples, f"every {inputs.format} up to 6 in blocks of scale 1")


def block_scale(one: Converter, call: Call) -> Check:
    """
    Judge the scale of blocks with every positive finite maximum.

    The kernels multiply by an approximate 1/6, so a code is right that the exact quotient or one within 2⁻²² of it rounds to.
    """
    inputs = every("bf16" if one.format == "fp32" else one.format)
    inputs = inputs.only((inputs.values > 0) & np.isfinite(inputs.values))
    blocks = np.zeros((len(inputs.values), 16), np.float32)
    # In every place of the block, and of either sign.
    index = np.arange(len(inputs.values))
    blocks[index, index % 16] = np.where(index // 16 % 2, -inputs.values, inputs.values)
    found = quantised(one, call, blocks).scales
    sixth = inputs.values.astype(np.float64) / 6
    allowed = np.stack([nvfp4.scale_encode(sixth * (1 + by)) for by in (0, -(2.0**-22), 2.0**-22)])
    expected = np.where((allowed == found).any(axis=0), found, allowed[0])
    # Whether a scale that would round to zero is clamped is a row of its own.
    expected = np.where((allowed[0] == 0) & np.isin(found, (1, 8)), found, expected)
    return _scales(f"{one.name}-scale-cast", inputs, found, expected, "amax ÷ 6 in UE4M3, for every positive maximum of a block")


_SCALE_ANSWERS = {0x00: "zero", 0x38: "one", 0x01: "smallest", 0x08: "smallest-normal", 0x7E: "largest", 0x7F: "nan"}


def tensor_scale_row(one: Converter, call: Call) -> Check:
    """Say which way the tensor scale goes: twice the scale makes the block's scale twice or half as large, and changes no code."""
    block = np.array([[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]], np.float32)
    made = {by: quantised(one, call, block, by) for by in (1.0, 2.0)}
    values = {by: float(nvfp4.scale_decode(one_made.scales)[0]) for by, one_made in made.items()}
    found = {2.0: "multiplies", 0.5: "divides"}.get(values[2.0] / values[1.0] if values[1.0] else 0.0, "something else")
    if not np.array_equal(made[1.0].codes, made[2.0].codes):
        found = "another code for the same value"
    samples = [Sample(f"a block up to 6, tensor scale {by:g}", "", _block(m.codes[0], int(m.scales[0]))) for by, m in made.items()]
    return differences.row(f"{one.name}-tensor-scale", "tensor-scale", found, one.tensor_scale, samples)


def block_row(difference: str, amax: float, claimed: str) -> Judge:
    def judge(one: Converter, call: Call) -> Check:
        block = np.zeros((1, 16), np.float32)
        block[0, 5] = amax
        made = quantised(one, call, block)
        found = _SCALE_ANSWERS.get(int(made.scales[0]), f"scale 0x{made.scales[0]:02x}")
        if amax == 0 and float(np.nansum(np.abs(e2m1.decode(made.codes[0]) * nvfp4.scale_decode(made.scales)[0]))) != 0:
            found = "values that are not zero"
        samples = [Sample(f"a block with the maximum {amax:g}", "", _block(made.codes[0], int(made.scales[0])))]
        return differences.row(f"{one.name}-{difference}", difference, found, claimed, samples)

    return judge
