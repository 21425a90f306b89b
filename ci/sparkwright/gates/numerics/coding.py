"""How converters between values and E2M1 codes are judged: every pattern, every tie, the order of lanes, NaN and −0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates.core.verdict import Check, Figure, Sample, failed, passed
from sparkwright.gates.numerics import differences, e2m1
from sparkwright.gates.numerics.converter import Call
from sparkwright.gates.numerics.e2m1 import Bytes
from sparkwright.gates.numerics.units import Converter, Format, dtypes
from sparkwright.gates.numerics.values import Inputs, every, fp32, fp32_ties, nans, narrowed

Judge = Callable[[Converter, Call], Check]

#: Samples of one check; the first disagreements show the rest.
SHOWN = 8


def as_asked(inputs: Inputs, one: Converter) -> NDArray[Any]:
    """Return *inputs* as bits of the converter's own format, which holds their values."""
    return inputs.bits if inputs.format == one.format else inputs.values.view(np.uint32)


def codes_of(one: Converter, call: Call, inputs: Inputs) -> NDArray[np.int64]:
    """Return the code that *one* gives each of *inputs*; −1 where it sets bits beside its codes."""
    bits = as_asked(inputs, one)
    filled = np.concatenate([bits, np.zeros(-len(bits) % one.lanes, bits.dtype)]).reshape(-1, one.lanes)
    asked = np.empty(len(filled), dtypes(one)[0])
    asked["bits"] = filled
    packed = call(asked)
    codes = (packed[:, None] >> (np.arange(one.lanes, dtype=np.uint64) * np.uint64(4)) & np.uint64(0xF)).astype(np.int64)
    if one.lanes < 16:
        codes[packed >> np.uint64(4 * one.lanes) != 0] = -1
    return np.asarray(codes.reshape(-1)[: len(bits)])


def shown(code: int) -> str:
    """Return a code with its value."""
    return f"code 0x{code:x} = {e2m1.VALUES[code]:g}" if 0 <= code <= 0xF else "bits beside the code"


def judged(name: str, inputs: int, wrong: NDArray[np.intp], samples: Iterator[Sample], says: str) -> Check:
    """Return the check of a sweep: passed without mismatches, else failed with the first of them."""
    figures = (Figure("mismatches", float(len(wrong)), bound=0), Figure("inputs", float(inputs)))
    if not len(wrong):
        return passed(name, f"{says}: {inputs:,} inputs, no mismatch", figures=figures)
    return failed(name, f"{says}: {len(wrong):,} of {inputs:,} inputs differ", "converter-wrong", figures=figures, samples=samples)


def _compared(name: str, one: Converter, call: Call, inputs: Inputs, says: str) -> Check:
    found, expected = codes_of(one, call, inputs), e2m1.encode(inputs.values).astype(np.int64)
    # Whether a zero keeps its sign is a row of its own.
    wrong = np.flatnonzero((found != expected) & ((found & ~np.int64(8) | expected & ~np.int64(8)) != 0))
    samples = (Sample(inputs.case(i), shown(int(expected[i])), shown(int(found[i]))) for i in wrong[:SHOWN])
    return judged(name, len(inputs.values), wrong, samples, says)


def half_sweep(form: Format) -> Judge:
    def judge(one: Converter, call: Call) -> Check:
        inputs = every(form)
        return _compared(f"{one.name}-{form}-sweep", one, call, inputs.only(~np.isnan(inputs.values)), f"every {form} that is no NaN")

    return judge


def ties_sweep(one: Converter, call: Call) -> Check:
    """Judge fp32 ties in every lane."""
    inputs = fp32_ties()
    turned = np.concatenate([np.roll(inputs.values, by) for by in range(one.lanes)])
    return _compared(f"{one.name}-fp32-ties", one, call, fp32(turned), "every fp32 tie ± 1 ulp, extremes, and each 65,537th pattern")


def packing(one: Converter, call: Call) -> Check:
    """Judge which value of several goes where: no two neighbours have the same code."""
    name, lanes = f"{one.name}-packing", one.lanes
    codes = np.concatenate([(np.arange(lanes) + turn) % 16 for turn in range(16)]).astype(np.uint8)
    exact = fp32(e2m1.decode(codes))
    inputs = exact if one.format == "fp32" else narrowed(exact, one.format)
    found = codes_of(one, call, inputs)
    wrong = np.flatnonzero(found != codes)
    if one.zero == "dropped" or (len(wrong) and bool(np.all((codes[wrong] == 8) & (found[wrong] == 0)))):
        wrong = wrong[codes[wrong] != 8]
    samples = (Sample(f"lane {i % lanes} of {_listed(inputs.values, i, lanes)}", shown(int(codes[i])), shown(int(found[i])))
               for i in wrong[:SHOWN])  # fmt: skip
    made = judged(name, len(codes), wrong, samples, "the first value in the lowest four bits, the others above it in order")
    return msgspec.structs.replace(made, message=f"{made.message}{_order(codes, found, lanes)}") if len(wrong) else made


def _listed(values: NDArray[np.float32], index: int, lanes: int) -> str:
    start = index - index % lanes
    return "[" + ", ".join(f"{value:g}" for value in values[start : start + lanes]) + "]"


def _order(codes: Bytes, found: NDArray[np.int64], lanes: int) -> str:
    """Return the order in which the codes do lie, where it is one that people make."""
    rows = codes.reshape(-1, lanes).astype(np.int64)
    orders = {"the two codes of every byte are swapped": rows.reshape(-1, lanes // 2, 2)[:, :, ::-1], "all are in reverse": rows[:, ::-1]}
    return next((f"; {says}" for says, order in orders.items() if np.array_equal(order.reshape(-1), found)), "")


def nan_row(one: Converter, call: Call) -> Check:
    """Say what NaN becomes."""
    inputs = nans(one.format)
    codes = codes_of(one, call, inputs)
    negative = np.signbit(inputs.values)
    answers = {"plus-six": np.full(len(codes), 7), "keeps-sign": np.where(negative, 15, 7), "zero": np.where(codes & 7, -1, codes),
               "four": np.full(len(codes), 6)}  # fmt: skip
    found = next((name for name, answer in answers.items() if np.array_equal(codes, answer)), "something else")
    samples = [Sample(inputs.case(i), "", shown(int(codes[i]))) for i in (0, len(codes) - 1)]
    claimed = "" if one.nan == "unchecked" else one.nan
    return differences.row(f"{one.name}-nan", "nan", found, claimed, samples)


def zero_row(one: Converter, call: Call) -> Check:
    """Say whether −0, and what rounds to it, keeps its sign."""
    inputs = fp32([-0.0, -(2.0**-24), -0.125])
    asked = inputs if one.format == "fp32" else narrowed(inputs, one.format)
    codes = codes_of(one, call, asked)
    found = {(8,): "kept", (0,): "dropped"}.get(tuple(sorted(set(codes.tolist()))), "now and then")
    samples = [Sample(asked.case(i), "", shown(int(codes[i]))) for i in range(len(codes))]
    return differences.row(f"{one.name}-negative-zero", "negative-zero", found, one.zero, samples)


def table(one: Converter, call: Call) -> Check:
    """Judge the value of all sixteen codes."""
    asked = np.zeros(16, dtypes(one)[0])
    asked["code"] = np.arange(16)
    return compare_table(one.name, call(asked))


def compare_table(name: str, found: NDArray[np.floating[Any]]) -> Check:
    """Return the check of a table of code values, whose zeros may have either sign."""
    wrong = np.flatnonzero(~(found == e2m1.VALUES[: len(found)]))
    samples = (Sample(f"code 0x{i:x}", f"{e2m1.VALUES[i]:g}", f"{found[i]:g}") for i in wrong)
    return judged(f"{name}-table", len(found), wrong, samples, "the value of every code")
