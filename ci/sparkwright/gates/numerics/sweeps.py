"""Which checks a converter of each kind gets, and their making: each check is there, whatever the converter does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from sparkwright.gates.core.verdict import Check, declare, failed, invalid
from sparkwright.gates.numerics import blocks, coding
from sparkwright.gates.numerics.coding import Judge
from sparkwright.gates.numerics.converter import Callee, ConverterInvalid
from sparkwright.gates.numerics.units import Converter, Format, Kind

#: Said of every check whose converter executes inline PTX.
PTX = "inline PTX as the PTX ISA describes it; the instruction itself is settled by G2"

_ENCODE: dict[Format, tuple[tuple[str, Judge], ...]] = {
    "fp32": (("bf16-sweep", coding.half_sweep("bf16")), ("fp16-sweep", coding.half_sweep("fp16")), ("fp32-ties", coding.ties_sweep)),
    "bf16": (("bf16-sweep", coding.half_sweep("bf16")),),
    "fp16": (("fp16-sweep", coding.half_sweep("fp16")),),
}
_OTHERS: Mapping[Kind, tuple[tuple[str, Judge], ...]] = {
    "decode": (("table", coding.table),),
    "scale": (("scale-cast", blocks.scale_cast),),
    "offset": (("swizzle", blocks.swizzle),),
    "quantise": (
        ("block-grid", blocks.block_grid),
        ("block-sweep", blocks.block_sweep),
        ("scale-cast", blocks.block_scale),
        ("tensor-scale", blocks.tensor_scale_row),
        ("scale-overflow", blocks.block_row("scale-overflow", 32768.0, "largest")),
        ("zero-block", blocks.block_row("zero-block", 0.0, "")),
        ("smallest-scale", blocks.block_row("smallest-scale", 6 * 2.0**-11, "")),
    ),
}


_LANES: tuple[tuple[str, Judge], ...] = (("packing", coding.packing),)
_SPECIAL: tuple[tuple[str, Judge], ...] = (("nan", coding.nan_row), ("negative-zero", coding.zero_row))

#: The checks of converters, whose names begin with the converter's.
_ALL = [name for judges in (*_ENCODE.values(), *_OTHERS.values(), _LANES, _SPECIAL) for name, _ in judges]
CHECKS = declare(*(f"*-{suffix}" for suffix in dict.fromkeys(_ALL)), measured=True)


def judges(one: Converter) -> tuple[tuple[str, Judge], ...]:
    """Return the checks of *one*: the end of each one's name, and what makes it."""
    if one.kind != "encode":
        return _OTHERS[one.kind]
    return (*(_LANES if one.lanes > 1 else ()), *_ENCODE[one.format], *_SPECIAL)


def checks(one: Converter, program: Callee) -> Iterator[Check]:
    """Yield every check of *one*; each is there whatever happens, as invalid or failed where the converter cannot be asked."""
    for suffix, judge in judges(one):
        try:
            check = judge(one, lambda inputs: program.call(one, inputs))
            yield msgspec.structs.replace(check, message=f"{check.message} ({PTX})") if program.evaluated(one) else check
        except ConverterInvalid as error:
            make = failed if error.reference == "converter-missing" else invalid
            yield make(f"{one.name}-{suffix}", error.says, error.reference)
