"""
The effects of what a stack carries: ``cherry_picks/effects.yaml``, which people write.

Reason, upstream's state and drop condition of a change stand in its patch or in its pick's record,
and are not repeated there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.files import Sha256

Above = Annotated[float, msgspec.Meta(gt=0)]
Many = Annotated[int, msgspec.Meta(ge=1)]


class MeasuredEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A figure with the change, beside the same without it.

    Attributes:
        figure: What was measured, where, and its unit.
        ratio: Its value with the change, by that without it; 0.9 of a time is an improvement.
        low, high: 95 % interval of *ratio*.
        count: Pairs of launches, or of measurements where *figure* says so.
        machine: The GPU. *date*: the day (UTC).
        wheel: The sha256 of the wheel with the change. *baseline*: of the one without it; the same
            where an option switches the change.
    """

    figure: strict_yaml.Prose
    ratio: Above
    low: Above
    high: Above
    count: Many
    machine: strict_yaml.Prose
    wheel: Sha256
    baseline: Sha256
    date: Annotated[str, msgspec.Meta(pattern=r"\A20[0-9]{2}-[01][0-9]-[0-3][0-9]\Z")]

    def __post_init__(self) -> None:
        if not self.low <= self.ratio <= self.high:
            raise ValueError(f"the ratio {self.ratio} is not in its interval")


class PromisedEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What the throughput gate requires of a wheel with the change, against the stock wheel.

    Attributes:
        recipes: The recipes that use the change.
        metric: Of the gate. *concurrency*: of the cells in which it is promised.
        gain: Factor by which the figure is better at least; 1.05 is 5 %.
    """

    recipes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    metric: Literal["tpot", "ttft", "rate", "drafts"]
    concurrency: Many
    gain: Annotated[float, msgspec.Meta(gt=1)]


class Effect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A change of a stack.

    Attributes:
        problem: What a user meets without it. *change*: what it does, in some words.
        use: Whether every server has it, or those whose recipe or user asks for it.
        spark: What a Spark should see, and why.
        test: Path of the test of its mechanism; empty without one.
        measured: Empty if nothing was measured.
        promise: None if no gate looks at its effect.
        upstream, drop_when: Of an option of a recipe, which has neither patch nor record; empty for
            others.
    """

    problem: strict_yaml.Prose
    change: strict_yaml.Prose
    use: Literal["default", "optional"]
    spark: strict_yaml.Prose
    test: str = ""
    measured: tuple[MeasuredEffect, ...] = ()
    promise: PromisedEffect | None = None
    upstream: str = ""
    drop_when: str = ""


#: Stack → fork, or ``recipes`` → name of a patch, ``#NUMBER`` of a pick, or an option → effect.
Effects = Mapping[str, Mapping[str, Mapping[str, Effect]]]


def load_effects(root: Path) -> Effects:
    """
    Return the effects in the checkout *root*; none if there is no such file.

    Raises:
        file-invalid: The file is damaged.
    """
    path = root / "cherry_picks" / "effects.yaml"
    return strict_yaml.load(path, dict[str, dict[str, dict[str, Effect]]]) if path.exists() else {}


def promises(root: Path, stack: str, recipe: str) -> dict[str, PromisedEffect]:
    """Return what the changes of *stack* promise for *recipe*, by the name of the change."""
    effects = [pair for fork in load_effects(root).get(stack, {}).values() for pair in fork.items()]
    return {
        name.removesuffix(".patch"): effect.promise
        for name, effect in effects
        if effect.promise and recipe in effect.promise.recipes
    }
