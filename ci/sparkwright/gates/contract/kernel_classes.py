"""
Kernels by kind of layer and class: what serves each kind, by its share of the kind's time.

No name of a kernel has to be known in advance. A recipe states the class for each kind of layer,
and the time of kernels that no pattern knows is bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.recipe import KERNEL_CLASS, KernelContract
from sparkwright.bench.server.server_log import compile_patterns
from sparkwright.gates.contract.kernel_trace import KernelTrace, Phase

#: The class of kernels of which none is asked.
HELPER = "helper"


class KernelPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How a kernel is recognised.

    Attributes:
        kind: Of the layers that it serves.
        label: Its class; several with a ``|`` between them if the name does not tell which.
        pattern: A regular expression that is searched in the kernel's name.
    """

    kind: Annotated[str, Meta(pattern="^(attention|linear|moe|gdn|mamba|sampling|other)$")]
    label: Annotated[
        str, Meta(pattern=rf"^({HELPER}|unclassified|{KERNEL_CLASS}(\|{KERNEL_CLASS})*)$")
    ] = msgspec.field(name="class")
    pattern: str

    def __post_init__(self) -> None:
        compile_patterns(self.pattern)


class ClassifiedKernel(NamedTuple):
    """
    A kernel of a profile.

    Attributes:
        kind, label: As of `KernelPattern`; empty if no pattern knows it.
        microseconds: That it took in the phase.
    """

    phase: Phase
    kind: str
    label: str
    name: str
    microseconds: int

    @property
    def layer(self) -> str:
        """The phase and the kind: ``decode moe``."""
        return f"{self.phase} {self.kind}"

    def may_be(self, label: str) -> bool:
        """Return whether the class may be *label*."""
        return label in self.label.split("|")


def classify(trace: KernelTrace, patterns: Sequence[KernelPattern]) -> list[ClassifiedKernel]:
    """Return the kernels of *trace* with their kind and class, the longest first."""
    kernels = []
    for phase, counted in trace.items():
        for name, microseconds in counted.most_common():
            matching = (entry for entry in patterns if re.search(entry.pattern, name))
            entry = next(matching, None)
            kind, label = (entry.kind, entry.label) if entry else ("", "")
            kernels.append(ClassifiedKernel(phase, kind, label, name, microseconds))
    return kernels


def serving(kernels: Iterable[ClassifiedKernel], kind: str = "") -> list[ClassifiedKernel]:
    """Return those of *kernels* that compute layers of *kind* (empty: of any), without helpers."""
    return [
        kernel
        for kernel in kernels
        if kernel.label not in ("", HELPER) and kind in ("", kernel.kind)
    ]


def shares(kernels: Iterable[ClassifiedKernel], part: str) -> dict[str, dict[str, float]]:
    """
    Return ``decode moe`` and the like → *part* of a kernel → its share of that time.

    Args:
        part: ``label`` or ``name``.
    """
    times: dict[str, Counter[str]] = {}
    for kernel in serving(kernels):
        times.setdefault(kernel.layer, Counter())[getattr(kernel, part)] += kernel.microseconds
    return {
        layer: {key: time / max(counted.total(), 1) for key, time in counted.most_common()}
        for layer, counted in sorted(times.items())
    }


def served_share(kernels: Sequence[ClassifiedKernel], wanted: str, name: str, part: float) -> float:
    """
    Return the share of the time of *kernels*, of one kind and phase, by the *wanted* classes.

    Args:
        wanted: As of `KernelContract.serves`; of several alternatives the best counts.
        name: Searched in the name of each kernel that counts.
        part: The least share of each class of a sum; without it the sum has none.
    """
    total, best = max(time(kernels), 1), 0.0
    named = [kernel for kernel in kernels if re.search(name, kernel.name)]
    for alternative in wanted.split("|"):
        classes = alternative.split("+")
        own = [time(kernel for kernel in named if kernel.may_be(each)) for each in classes]
        serving = time(kernel for kernel in named if any(map(kernel.may_be, classes)))
        if len(classes) == 1 or min(own) >= part * total:
            best = max(best, serving / total)
    return best


def fallbacks(
    kernels: Iterable[ClassifiedKernel], contract: KernelContract, classes: Sequence[str]
) -> list[ClassifiedKernel]:
    """Return the kernels of one of *classes*, in kinds for which *contract* does not state it."""
    return [
        kernel
        for kernel in serving(kernels)
        if kernel.label in classes
        and kernel.label not in re.split(r"[+|]", contract.serves.get(kernel.kind, ""))
    ]


def unjudged(
    kernels: Iterable[ClassifiedKernel], contract: KernelContract
) -> list[ClassifiedKernel]:
    """
    Return the *kernels* that no pattern knows, or that compute layers of a kind that *contract*
    does not state.
    """
    return [
        kernel
        for kernel in kernels
        if not kernel.kind or (serving([kernel]) and kernel.kind not in contract.serves)
    ]


def time(kernels: Iterable[ClassifiedKernel]) -> int:
    """Return the microseconds that *kernels* took."""
    return sum(kernel.microseconds for kernel in kernels)


def changes(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]], most: float
) -> dict[str, str]:
    """Return ``decode moe`` and the like → the class whose share changed by more than *most*."""
    changed = {}
    for layer in sorted({*before, *now}):
        old, new = before.get(layer, {}), now.get(layer, {})
        for key in sorted({*old, *new}):
            was = old.get(key, 0.0)
            share = new.get(key, 0.0)
            if abs(share - was) > most:
                changed[layer] = f"{key}: {was:.0%} before, {share:.0%} now"
    return changed
