"""
What a gate found: checks with their figures and samples, a verdict per gate, and how states combine.

A verdict is bound to the bytes that it is about and to the policy that it was judged by, so that `publish` can ask whether it holds
for a file at hand. A state is never better than its worst required check, and what did not run is never a pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

import msgspec

State = Literal["pass", "fail", "inconclusive", "invalid", "not-run"]

#: What a check can do for its gate: decide it, only inform, or only report why nothing was measured (such a check never passes).
Role = Literal["decides", "informs", "reports"]

#: From worst to best: a failure that was seen outweighs a measurement that does not count, and that one what was not done at all.
ORDER: tuple[State, ...] = ("fail", "invalid", "inconclusive", "not-run", "pass")

#: Samples kept of one check; a sweep may disagree in millions of places, and a few show how.
MOST_SAMPLES = 20


class Figure(msgspec.Struct, frozen=True):
    """
    A number that was measured, or counted.

    Attributes:
        name: What was measured, as people say it (``mismatches``, ``mean KL``).
        value: In *unit*.
        unit: As it is written after a number (``nat``, ``GB/s``, ``%``); empty for a count.
        count: How many measurements are behind it.
        spread: Their standard deviation in *unit*; None where it was measured once or is a count.
        bound: The limit that it was held against; None where it is only reported.
    """

    name: str
    value: float
    unit: str = ""
    count: int = 1
    spread: float | None = None
    bound: float | None = None


class Sample(msgspec.Struct, frozen=True):
    """
    One case behind a check: a failing one, or one that shows what was done.

    Attributes:
        case: The input, or where it was (``bf16 0x3e80 = 0.25``, ``prompt 7, token 31``).
        expected: What the reference says; empty where there is none.
        actual: What was seen, at most some hundred characters.
    """

    case: str
    expected: str = ""
    actual: str = ""


class Check(msgspec.Struct, frozen=True):
    """
    One thing that a gate looks at.

    Attributes:
        name: Kebab-case and stable, unique in its gate (``bf16-sweep``).
        state: See `ORDER`.
        message: One sentence for people, with the figures that matter, or why it did not run.
        reason: Where it is not a pass, the stable name of the reason (``prompt-too-long``); see each gate's REASONS.
        required: Whether the gate's state depends on it; a row that only informs is not required.
        figures: Numbers by `Figure.name`.
        samples: At most `MOST_SAMPLES`.
    """

    name: str
    state: State
    message: str
    reason: str = ""
    required: bool = True
    figures: tuple[Figure, ...] = ()
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        if len(self.samples) > MOST_SAMPLES:
            raise ValueError(f"{self.name} keeps {len(self.samples)} samples; {MOST_SAMPLES} are enough")
        if (self.state == "pass") == bool(self.reason):
            raise ValueError(f"{self.name} is {self.state} with the reason {self.reason!r}; every state but pass names its reason")


class Declared(msgspec.Struct, frozen=True):
    """
    A check that a gate can emit.

    Attributes:
        name: Its name; ``*`` stands for a part that a policy, a recipe or a wheel gives (``kernels-*``).
        measured: Whether every pass of it shows a figure or a sample.
        role: See `Role`.
    """

    name: str
    measured: bool = False
    role: Role = "decides"

    def fault(self, check: Check) -> str:
        """Return why *check* is not as declared; empty if it is."""
        if self.role == "informs" and check.required:
            return "it is declared as one that only informs, and is required"
        if check.state == "pass" and self.role == "reports":
            return "it is declared as one that never passes, and passes"
        if check.state == "pass" and self.measured and not (check.figures or check.samples):
            return "it passes without the figure or sample that it is declared with"
        return ""


def declare(*names: str, measured: bool = False, role: Role = "decides") -> tuple[Declared, ...]:
    """Return a declaration of each of *names*; see `Declared`."""
    return tuple(Declared(name, measured, role) for name in names)


class Verdict(msgspec.Struct, frozen=True):
    """
    One gate's result.

    Attributes:
        gate: ``G0`` to ``G7``.
        title: What the gate looks at, in a few words.
        wheel: The sha256 of the wheel that it is about; empty where none was named, and such a verdict publishes nothing.
        device_code: The wheel's device-code digest, as the audit computes it; empty where it is not known.
        policy: The sha256 of the gate's policy.
        host: Facts of the machine that bear on the result (GPU, driver, versions), by name; no host name, user or path.
        began: Seconds since 1970 at its beginning.
        seconds: How long it took.
        checks: In the order in which they were made.
    """

    gate: str
    title: str
    wheel: str
    policy: str
    checks: tuple[Check, ...]
    device_code: str = ""
    host: dict[str, str] = {}
    began: float = 0.0
    seconds: float = 0.0

    @property
    def state(self) -> State:
        """The worst state of the required checks; ``not-run`` without any."""
        return worst(check.state for check in self.checks if check.required)


def worst(states: Iterable[State]) -> State:
    """Return the worst of *states*; ``not-run`` for none, as nothing that was not looked at is a pass."""
    return min(states, key=ORDER.index, default="not-run")


def passed(name: str, message: str, *, figures: Iterable[Figure] = (), samples: Iterable[Sample] = (), required: bool = True) -> Check:
    """Return a check that passed."""
    return Check(name, "pass", message, "", required, tuple(figures), tuple(samples)[:MOST_SAMPLES])


def failed(
    name: str, message: str, reason: str, *, figures: Iterable[Figure] = (), samples: Iterable[Sample] = (), required: bool = True
) -> Check:
    """Return a check that failed for *reason*; samples beyond `MOST_SAMPLES` are dropped."""
    return Check(name, "fail", message, reason, required, tuple(figures), tuple(samples)[:MOST_SAMPLES])


def invalid(name: str, message: str, reason: str, *, figures: Iterable[Figure] = (), samples: Iterable[Sample] = ()) -> Check:
    """Return a check that could not be judged, because what was measured does not count (a half stream, another model)."""
    return Check(name, "invalid", message, reason, True, tuple(figures), tuple(samples)[:MOST_SAMPLES])


def inconclusive(name: str, message: str, reason: str, *, figures: Iterable[Figure] = (), samples: Iterable[Sample] = ()) -> Check:
    """Return a check whose measurements decide neither way."""
    return Check(name, "inconclusive", message, reason, True, tuple(figures), tuple(samples)[:MOST_SAMPLES])


def not_run(name: str, message: str, reason: str, *, required: bool = True) -> Check:
    """Return a check that did not run; *message* tells why, in a sentence (``no CUDA GPU is here``)."""
    return Check(name, "not-run", message, reason, required)


@functools.cache
def overlap(one: str, other: str) -> bool:
    """Return whether some name matches both patterns; ``*`` stands for any text."""
    if not one or not other:
        return set(one + other) <= {"*"}
    if one[0] == "*":
        return overlap(one[1:], other) or overlap(one, other[1:])
    return overlap(other, one) if other[0] == "*" else one[0] == other[0] and overlap(one[1:], other[1:])
