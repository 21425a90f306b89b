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
from sparkwright.gates.contract.kernel_trace import PHASES, KernelTrace, Phase

#: The classes of kernels that move, quantise or route for others, and of a CPU's operators around
#: others, whose time counts twice.
HELPER, WRAPPER = "helper", "wrapper"


class KernelPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How a kernel is recognised.

    Attributes:
        kind: Of the layers that it serves.
        label: Its class.
        pattern: A regular expression that is searched in the kernel's name.
        beside: One that is searched in the names of all kernels of the phase; for names that do not
            tell the class.
    """

    kind: Annotated[str, Meta(pattern="^(attention|linear|moe|gdn|mamba|sampling|other)$")]
    label: Annotated[str, Meta(pattern=f"^({HELPER}|{WRAPPER}|unclassified|{KERNEL_CLASS})$")] = (
        msgspec.field(name="class")
    )
    pattern: str
    beside: str = ""

    def __post_init__(self) -> None:
        compile_patterns(self.pattern, self.beside)


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


def classify(trace: KernelTrace, patterns: Sequence[KernelPattern]) -> list[ClassifiedKernel]:
    """Return the kernels of *trace* with their kind and class, the longest first."""
    kernels = []
    for phase, counted in trace.items():
        names = "\n".join(counted)
        for name, microseconds in counted.most_common():
            matching = (
                entry
                for entry in patterns
                if re.search(entry.pattern, name) and re.search(entry.beside, names)
            )
            entry = next(matching, None)
            kind, label = (entry.kind, entry.label) if entry else ("", "")
            kernels.append(ClassifiedKernel(phase, kind, label, name, microseconds))
    return kernels


def serving(kernels: Iterable[ClassifiedKernel], kind: str = "") -> list[ClassifiedKernel]:
    """Return those of *kernels* that compute layers of *kind* (empty: of any), without helpers."""
    return [
        kernel
        for kernel in kernels
        if kernel.label not in ("", HELPER, WRAPPER) and kind in ("", kernel.kind)
    ]


def shares(kernels: Iterable[ClassifiedKernel], group_by: str) -> dict[str, dict[str, float]]:
    """
    Return ``decode moe`` and the like → what *group_by* names of its kernels → its share of time.

    Args:
        group_by: ``label`` or ``name``.
    """
    times: dict[str, Counter[str]] = {}
    for kernel in serving(kernels):
        times.setdefault(kernel.layer, Counter())[getattr(kernel, group_by)] += kernel.microseconds
    return {
        layer: {key: time / max(counted.total(), 1) for key, time in counted.most_common()}
        for layer, counted in sorted(times.items())
    }


def served_share(
    kernels: Sequence[ClassifiedKernel], wanted: str, name: str, least_part: float
) -> float:
    """
    Return the share of the time of *kernels*, of one kind and phase, by the *wanted* classes.

    Args:
        wanted: As of `KernelContract.serves`; of several alternatives the best counts.
        name: Searched in the name of each kernel that counts.
        least_part: The least share of the first class of a sum; below it, the sum has none.
    """
    total, best = max(time(kernels), 1), 0.0
    named = [kernel for kernel in kernels if re.search(name, kernel.name)]
    for alternative in wanted.split("|"):
        promised, *others = alternative.split("+")
        own = time(kernel for kernel in named if kernel.label == promised)
        beside = time(kernel for kernel in named if kernel.label in others)
        if not others or own >= least_part * total:
            best = max(best, (own + beside) / total)
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
    does not state; of sampling, it need not.
    """
    stated = {*contract.serves, "sampling"}
    return [
        kernel
        for kernel in kernels
        if not kernel.kind or (serving([kernel]) and kernel.kind not in stated)
    ]


def helpers(kernels: Iterable[ClassifiedKernel]) -> list[ClassifiedKernel]:
    """Return those of *kernels* that only move, quantise or route."""
    return [kernel for kernel in kernels if kernel.label == HELPER]


def times(kernels: Sequence[ClassifiedKernel]) -> dict[str, tuple[int, int]]:
    """Return phase → the microseconds of its *kernels*, and of the helpers among them."""
    return {
        phase: (
            time(kernel for kernel in kernels if kernel.phase == phase),
            time(kernel for kernel in helpers(kernels) if kernel.phase == phase),
        )
        for phase in PHASES
    }


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
        if layer.endswith("sampling") and not (old and new):
            continue  # tokens may be drawn between two steps
        for key in sorted({*old, *new}):
            was = old.get(key, 0.0)
            share = new.get(key, 0.0)
            if abs(share - was) > most:
                changed[layer] = f"{key}: {was:.0%} before, {share:.0%} now"
    return changed
