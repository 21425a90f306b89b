"""
Checks, verdicts, how their states combine, and the verdicts about one wheel together.

A verdict is bound to the bytes of a wheel, to the policy that it was judged by and to the recipe
that was served. Its state is never better than its worst required check, and a check that did not
run is never a pass.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import msgspec
from msgspec.structs import replace

from sparkwright.audit.report import AuditedWheel
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.states import State

#: What a check does for its gate: it decides, or it only reports why nothing was measured (such a
#: check never passes).
Role = Literal["decides", "reports"]

#: From worst to best. A failure that was seen outweighs a measurement that does not count, and
#: that one outweighs what was not measured at all.
ORDER: tuple[State, ...] = ("fail", "invalid", "inconclusive", "not-run", "pass")

#: Samples kept of one check; a sweep may disagree in millions of places, and a few show how.
MOST_SAMPLES = 20


#: The version of the record `Ladder`.
FORMAT = 2


class Figure(msgspec.Struct, frozen=True):
    """
    A number that was measured or counted.

    Attributes:
        name: What was measured (``mismatches``, ``mean KL``).
        value: In *unit*.
        unit: As it is written after a number (``nat``, ``GB/s``, ``%``); empty for a count.
        count: How many measurements it summarises.
        spread: Their standard deviation in *unit*; None for a single measurement or a count.
        bound: The limit that it was compared with; None if it is only reported.
    """

    name: str
    value: float
    unit: str = ""
    count: int = 1
    spread: float | None = None
    bound: float | None = None


class Sample(msgspec.Struct, frozen=True):
    """
    One case of a check: a failing one, or an example of what was compared.

    Attributes:
        case: The input or its place (``bf16 0x3e80 = 0.25``, ``prompt 7, token 31``).
        expected: The reference's result; empty without a reference.
        actual: The result, at most some hundred characters.
    """

    case: str
    expected: str = ""
    actual: str = ""


class Check(msgspec.Struct, frozen=True):
    """
    One property that a gate examines.

    Attributes:
        name: Kebab-case and stable, unique in its gate (``bf16-sweep``).
        state: See `ORDER`.
        message: One sentence with the figures that matter, or why the check did not run.
        reason: The stable name of why it is not a pass (``prompt-too-long``); see each gate's
            ``REASONS``.
        required: Whether the gate's state depends on it.
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
        if (self.state == "pass") == bool(self.reason):
            raise ValueError(f"{self.name} is {self.state} with the reason {self.reason!r}")


class Declared(msgspec.Struct, frozen=True):
    """
    A check that a gate can emit.

    Nothing holds a gate to its declarations while it runs. Publication refuses a pass with a
    required check that is not declared, or with a measured one that has neither figure nor sample
    (`release.decision`), and a policy can require only checks that decide. No code looks whether a
    check with another role behaves so: that is for its gate.

    Attributes:
        name: Its name; ``*`` stands for a part that a policy, a recipe or a wheel gives.
        measured: Whether every pass of it has a figure or a sample.
        role: See `Role`.
    """

    name: str
    measured: bool = False
    role: Role = "decides"


def declare(*names: str, measured: bool = False, role: Role = "decides") -> tuple[Declared, ...]:
    """Return a declaration of each of *names*; see `Declared`."""
    return tuple(Declared(name, measured, role) for name in names)


def declarations(table: Iterable[Declared], name: str) -> list[Declared]:
    """Return the entries of *table* for the check *name*; an exact one hides the patterns."""
    matching = [entry for entry in table if fnmatchcase(name, entry.name)]
    return [entry for entry in matching if entry.name == name] or matching


class Verdict(msgspec.Struct, frozen=True):
    """
    The result of one gate.

    Attributes:
        gate: ``G0`` to ``G8``.
        title: What the gate examines.
        wheel: The sha256 of the wheel; empty if none was named, and then it publishes nothing.
        policy: The sha256 of the gate's policy, including its recipe.
        checks: In the order in which they ran.
        recipe: The recipe that was served; empty for gates without a server or without a recipe.
        attempt: The number of the run of the gates for this wheel on this machine, from 1.
        evidence: The sha256 of the file that holds its measurements; empty without one.
        host: Facts of the machine by name (GPU, driver, versions); no host name, user or path.
        began: Seconds since 1970 at the beginning.
        seconds: How long it took.
        model: The digest of the files of the model that was served; empty if they are unknown.
    """

    gate: str
    title: str
    wheel: str
    policy: str
    checks: tuple[Check, ...]
    recipe: str = ""
    attempt: int = 1
    evidence: str = ""
    host: dict[str, str] = {}
    began: float = 0.0
    seconds: float = 0.0
    model: str = ""

    @property
    def state(self) -> State:
        """The worst state of the required checks; ``not-run`` without any."""
        return worst(check.state for check in self.checks if check.required)

    @property
    def worst_check(self) -> Check | None:
        """The first required check in the worst state; None if all that are pass."""
        return worst_check(self.checks)

    @property
    def label(self) -> str:
        """The gate and the recipe, for people."""
        return f"{self.gate} {self.recipe}".strip()

    @property
    def measured(self) -> bool:
        """Whether any check ran."""
        return any(check.state != "not-run" for check in self.checks)


class Attempt(msgspec.Struct, frozen=True):
    """
    A line of the attempt log: a gate begins, or ends.

    Attributes:
        number: Of the run of the gates, from 1, counted for the bytes of the wheel.
        wheel: The sha256 of the wheel.
        gate: The gate.
        recipe: The recipe that is served; empty without one.
        began: As `Verdict.began`.
        state: None on the line of the beginning.
        reason: The check that made it no pass, and why; empty for a pass and at the beginning.
        verdict: The sha256 of the verdict; empty at the beginning.
        after: The sha256 of the line before it; empty for the first.
    """

    number: int
    wheel: str
    gate: str
    recipe: str = ""
    began: float = 0.0
    state: State | None = None
    reason: str = ""
    verdict: str = ""
    after: str = ""

    @property
    def run(self) -> tuple[int, str, str, float]:
        """What the lines of one beginning and its end have in common."""
        return self.number, self.gate, self.recipe, self.began

    @property
    def order(self) -> tuple[float, int, bool]:
        """The sort key of lines: oldest first, and an end after its beginning."""
        return self.began, self.number, self.state is not None


class Ladder(msgspec.Struct, frozen=True):
    """
    All verdicts about one wheel, one for each gate and recipe.

    Attributes:
        stack: The stack whose policies judged.
        wheel: The wheel; None if only the source tree or a server was judged.
        verdicts: In the order of `GATES`, then by recipe.
        device_code: The wheel's device-code digest; empty if the audit did not run.
        format: Of this record.
        attempts: Every attempt with the wheel that is known, on any machine, oldest first.
    """

    stack: str
    wheel: AuditedWheel | None
    verdicts: tuple[Verdict, ...]
    device_code: str = ""
    format: int = FORMAT
    attempts: tuple[Attempt, ...] = ()

    @property
    def state(self) -> State:
        """The worst state of the verdicts."""
        return worst(verdict.state for verdict in self.verdicts)

    @property
    def subject(self) -> str:
        """The file name of the wheel, or the stack, for people."""
        return self.wheel.file if self.wheel else f"stack {self.stack}"

    @property
    def states(self) -> dict[str, State]:
        """The state of each gate: the failure of any recipe, else the best of all recipes."""
        by_gate, combined = dict[str, list[State]](), dict[str, State]()
        for verdict in self.verdicts:
            by_gate.setdefault(verdict.gate, []).append(verdict.state)
        for gate, states in by_gate.items():
            lowest, best = worst(states), max(states, key=ORDER.index)
            combined[gate] = lowest if lowest in ("fail", "invalid") else best
        return combined

    def outcomes(self, gate: str) -> dict[str, list[str]]:
        """
        Return how the attempts at *gate* ended, oldest first, by recipe: a state, or
        ``interrupted``.
        """
        ends = {line.run: line.state for line in self.attempts if line.state}
        outcomes: dict[str, list[str]] = {}
        for line in self.attempts:
            if line.gate == gate and line.state is None:
                outcomes.setdefault(line.recipe, []).append(ends.get(line.run, "interrupted"))
        return outcomes

    @property
    def host(self) -> dict[str, str]:
        """The facts on which all verdicts agree that were measured with the wheel installed."""
        measured = [verdict for verdict in self.verdicts if verdict.measured]
        serving = [verdict for verdict in measured if verdict.gate not in ("G0", "G1")]
        verdicts = serving or measured
        facts = dict(verdicts[0].host) if verdicts else {}
        for verdict in verdicts:
            for name in tuple(facts):
                if verdict.host.get(name) != facts[name]:
                    del facts[name]
        return facts


def merge(before: Ladder, now: Ladder) -> Ladder:
    """
    Return the verdicts of *before*, replaced by those of *now* for the same gate and recipe.

    Both are about one wheel and stack, and *now* has all attempts. A verdict that is not-run
    replaces none but another such. Verdicts of a recipe that were reached with another model than
    its new ones do not stay.
    """
    models = {new.recipe: new.model for new in now.verdicts if new.measured}
    verdicts = {
        (old.gate, old.recipe): old
        for old in before.verdicts
        if models.get(old.recipe, old.model) == old.model
    }
    for new in now.verdicts:
        old = verdicts.setdefault((new.gate, new.recipe), new)
        if new.state != "not-run" or old.state == "not-run":
            verdicts[new.gate, new.recipe] = new
    ordered = tuple(verdicts[key] for key in sorted(verdicts))
    return replace(now, verdicts=ordered, device_code=now.device_code or before.device_code)


def worst_check(checks: Iterable[Check]) -> Check | None:
    """Return the first required one of *checks* in the worst state; None if all that are pass."""
    unmet = [check for check in checks if check.required and check.state != "pass"]
    return min(unmet, key=lambda check: ORDER.index(check.state), default=None)


def worst(states: Iterable[State]) -> State:
    """Return the worst of *states*; ``not-run`` for none."""
    return min(states, key=ORDER.index, default="not-run")


def passed(
    name: str,
    message: str,
    *,
    figures: Iterable[Figure] = (),
    samples: Iterable[Sample] = (),
    required: bool = True,
) -> Check:
    """Return a check that passed."""
    return decided(name, message, "pass", {}, figures, samples, required=required)


def failed(
    name: str,
    message: str,
    reason: str,
    *,
    figures: Iterable[Figure] = (),
    samples: Iterable[Sample] = (),
    required: bool = True,
) -> Check:
    """Return a check that failed for *reason*."""
    return decided(name, message, "fail", {"fail": reason}, figures, samples, required=required)


def judged(
    name: str,
    message: str,
    reason: str,
    good: bool,
    figures: Iterable[Figure] = (),
    samples: Iterable[Sample] = (),
) -> Check:
    """Return a check that passes if *good*, and else fails for *reason*."""
    return decided(name, message, "pass" if good else "fail", {"fail": reason}, figures, samples)


def decided(
    name: str,
    message: str,
    state: State,
    reasons: Mapping[State, str],
    figures: Iterable[Figure] = (),
    samples: Iterable[Sample] = (),
    *,
    required: bool = True,
) -> Check:
    """
    Return a check in *state*, for its reason in *reasons* unless it passed.

    Samples beyond `MOST_SAMPLES` are dropped.
    """
    few = tuple(samples)[:MOST_SAMPLES]
    return Check(name, state, message, reasons.get(state, ""), required, tuple(figures), few)


def invalid(
    name: str,
    message: str,
    reason: str,
    *,
    figures: Iterable[Figure] = (),
    samples: Iterable[Sample] = (),
) -> Check:
    """Return a check whose measurement does not count (a cut stream, another model)."""
    return decided(name, message, "invalid", {"invalid": reason}, figures, samples)


def not_run(name: str, message: str, reason: str, *, required: bool = True) -> Check:
    """Return a check that did not run; *message* is the cause as a sentence."""
    return Check(name, "not-run", message, reason, required)


class GateError(SparkwrightError):
    """A gate did not pass, or could not run."""

    references: ClassVar[Mapping[str, Advice]] = {
        "gate-failed": Advice(
            "A check found a fault in the wheel, the source tree or the server; the failed checks "
            "are above, with samples.",
            "Do not install or publish it. docs/reference/gates.md explains the reason of each "
            "failed check; `sparkwright gate --json` prints all samples.",
        ),
        "gate-inconclusive": Advice(
            "The measurements do not decide: there are too few samples, or the machine's own "
            "noise is as large as the margin.",
            "Measure more (see the check's figures) on an idle machine. Until then this wheel can "
            "only be published as a candidate.",
            exit_code=4,
        ),
        "gate-unprepared": Advice(
            "Something that a night of gates needs is missing: the wheel, the model, the official "
            "wheel, the patched sources and the compiler of G1, the accuracy harness or its data, "
            "or the load generator. Nothing was started.",
            "Provide what the lines above name, and run the command again.",
        ),
        "gate-not-run": Advice(
            "No check failed, but a gate or one of its checks could not run here, so this is not a "
            "pass.",
            "Run those gates where they can run, or run the others alone with --only; each row "
            "says what it needs.",
            exit_code=4,
        ),
        "measurement-invalid": Advice(
            "The measurement does not count: a truncated stream, another model, or a "
            "reference that does not agree with itself.",
            "Fix what the checks name, and run the gate again. An invalid measurement says nothing "
            "about the wheel.",
        ),
        "policy-unknown-check": Advice(
            "A policy names a check that no gate can emit, so it could never be met.",
            "Correct the name in the policy. docs/reference/gates.md lists the checks of every "
            "gate.",
        ),
    }
