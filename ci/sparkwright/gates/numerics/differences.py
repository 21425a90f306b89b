"""
Where public references of NVFP4 differ, and which of them a tree agrees with: each a named row, so that a difference is no surprise.

A row is required where the wrong choice gives wrong numbers for the checkpoints and kernels at hand; otherwise it informs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sparkwright.gates.core.verdict import Check, Sample, failed, passed


class Difference(msgspec.Struct, frozen=True):
    """
    A question that public references answer differently.

    Attributes:
        asks: The question.
        answers: Stable name of an answer → who gives it.
        required: Whether an answer other than the claimed one is an error.
    """

    asks: str
    answers: Mapping[str, str]
    required: bool


#: Read in ml_dtypes, CUDA 13.0's cuda_fp4.hpp, CUTLASS 4.8.0, vLLM's tests, ModelOpt and torchao; the sources are in gates.md §3.2.
DIFFERENCES: Mapping[str, Difference] = {
    "nan": Difference(
        "what NaN becomes",
        {
            "plus-six": "PTX's cvt.rn.satfinite and CUDA's cuda_fp4.h",
            "keeps-sign": "a comparison chain on the bits (CUTLASS's software path, a seed report): −NaN becomes −6",
            "zero": "ml_dtypes",
            "four": "a seed report's header",
        },
        required=True,
    ),
    "negative-zero": Difference(
        "whether a negative zero keeps its sign",
        {"kept": "PTX, CUTLASS and ml_dtypes", "dropped": "ModelOpt, vLLM's test reference, a seed report's header"},
        required=True,
    ),
    "tensor-scale": Difference(
        "which way the FP32 tensor scale goes",
        {"multiplies": "vLLM: 448 × 6 ÷ amax", "divides": "ModelOpt and torchao: amax ÷ (448 × 6)"},
        required=True,
    ),
    "scale-overflow": Difference(
        "what a block scale beyond 448 becomes",
        {"largest": "a cast that saturates, or a clamp before it (ModelOpt)", "nan": "ml_dtypes' cast without a clamp"},
        required=True,
    ),
    "zero-block": Difference(
        "the scale of a block of zeros",
        {
            "zero": "vLLM",
            "one": "ModelOpt: 1.0",
            "smallest": "a clamp to the smallest scale, 2⁻⁹",
            "smallest-normal": "torchao: a clamp to finfo.tiny, 2⁻⁶",
        },
        required=False,
    ),
    "smallest-scale": Difference(
        "the scale of a block whose scale would round to zero",
        {
            "zero": "vLLM: the block is lost",
            "smallest": "ModelOpt: a clamp to 2⁻⁹",
            "smallest-normal": "torchao: a clamp to finfo.tiny, 2⁻⁶",
        },
        required=False,
    ),
}


def row(name: str, difference: str, found: str, claimed: str, samples: Sequence[Sample]) -> Check:
    """
    Return the row of *difference* for one converter.

    Args:
        name: Of the check.
        found: The tree's answer, by its stable name; something else where no public reference answers so.
        claimed: The answer that the policy says it gives; empty where the policy makes no claim.
    """
    asked = DIFFERENCES[difference]
    who = asked.answers.get(found)
    if who is None:
        says = f"{asked.asks}: {found}, which is what no public reference does"
        return failed(name, says, "policy-unknown", samples=samples, required=True)
    if claimed and found != claimed:
        says = f"{asked.asks}: {found}, as {who}; the policy says {claimed}, as {asked.answers[claimed]}"
        return failed(name, says, "policy-differs", samples=samples, required=asked.required)
    return passed(name, f"{asked.asks}: {found}, as {who}", samples=samples, required=asked.required)
