"""The metrology of load generators: who is right qualifies, and each way of being wrong is refused and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.load.client import Own

from sparkwright.bench.load import metrology
from sparkwright.bench.load.metrology import MetrologyPolicy, Profile
from sparkwright.bench.load.order import Generator, LoadInvalid, Order, Request, Run
from sparkwright.bench.load.reference.behaviour import Lateness
from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check

POLICY = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "metrology.yaml", MetrologyPolicy)
#: A quick one, whose bounds stand on a machine that does much else.
QUICK = replace(
    POLICY, concurrencies=(4,), rounds=1, least=1, tpot=0.2, ttft=0.2, rate=0.6, late=0.9, attempts=3,
    profiles=(Profile("plain", 0.06, 0.02, 1, 12), Profile("speculative", 0.02, 0.007, 3, 31)),
)  # fmt: skip


class Wrapped:
    """A generator that tells what *change* makes of each request of a real one."""

    def __init__(self, inner: Generator, change: Callable[[Request], Request], seconds: float = 1.0) -> None:
        self._inner, self._change, self._seconds = inner, change, seconds

    @property
    def name(self) -> str:
        return "mutant"

    def measure(self, order: Order) -> Run:
        run = self._inner.measure(order)
        return replace(run, generator="mutant", seconds=run.seconds * self._seconds, requests=tuple(map(self._change, run.requests)))


class Exact:
    """A generator that tells the truth of *profile*, without any load; for bounds that a busy machine would not keep."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    @property
    def name(self) -> str:
        return "exact"

    def measure(self, order: Order) -> Run:
        profile, seconds = self._profile, self._profile.behaviour().seconds(order.answer)
        chunks = 1 + math.ceil((order.answer - 1) / profile.chunk)
        one = Request(0.0, profile.ttft, seconds, order.prompt, order.answer, chunks)
        return Run("exact", "", seconds * math.ceil(order.requests / order.concurrency), (one,) * order.requests)


#: What a wrong generator makes of a request.
MUTANTS: dict[str, Callable[[Request], Request]] = {
    "times everything by 1.01": lambda one: replace(one, ttft=one.ttft * 1.01, seconds=one.seconds * 1.01),
    "has a clock that is slow by 1 %": lambda one: replace(one, ttft=one.ttft / 1.01, seconds=one.seconds / 1.01),
    "counts the first token's time as decoding": lambda one: replace(one, ttft=0.0),
    "drops the last token": lambda one: replace(one, tokens=one.tokens - 1),
    "takes the usage event for the last token": lambda one: replace(one, tokens=one.tokens + 1),
    "tells the first token 6 ms late": lambda one: replace(one, ttft=one.ttft + 0.006),
    "tells the first token before it came": lambda one: replace(one, ttft=one.ttft - 0.002, seconds=one.seconds - 0.002),
    "loses an error": lambda one: replace(one, error="", tokens=0),
    "has an error": lambda one: replace(one, error="stream-truncated: the stream ended"),
    "sends a token less": lambda one: replace(one, prompt=one.prompt - 1),
}
#: Those that only one of the two profiles can show.
ONE_PROFILE = {"counts chunks as tokens": lambda one: replace(one, tokens=one.chunks)}
NEVER_LATE = Lateness(1, 1, 0.0, 0.0, 0.0, 0.0)


def judged(profile: Profile, concurrency: int, change: Callable[[Request], Request], late: Lateness | None = None) -> Check:
    """Return the check of a generator that is exact but for *change*, under the real bounds."""
    count = max(POLICY.least, POLICY.rounds * concurrency)
    order = Order("", "reference", POLICY.prompt, profile.answer, concurrency, count, warmups=0)
    run = Wrapped(Exact(profile), change).measure(order)
    return metrology.judge(POLICY, profile, concurrency, run, late or replace(NEVER_LATE, ttft=profile.ttft, tpot=profile.tpot))


@pytest.mark.parametrize("profile", POLICY.profiles, ids=lambda one: one.name)
@pytest.mark.parametrize("concurrency", POLICY.concurrencies)
def test_the_truth_passes_the_real_bounds(profile: Profile, concurrency: int) -> None:
    """A generator that tells what the server does passes."""
    check = judged(profile, concurrency, lambda one: one)
    assert check.state == "pass"
    assert all(abs(figure.value) < 1e-6 for figure in check.figures)


@pytest.mark.parametrize("profile", POLICY.profiles, ids=lambda one: one.name)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_generator_is_refused_under_the_real_bounds(profile: Profile, mutant: str) -> None:
    """Each mutant is invalid as biased, at the bounds that are in force."""
    check = judged(profile, 16, MUTANTS[mutant])
    assert (check.state, check.reason) == ("invalid", "generator-biased")
    assert check.message.startswith("mutant")


def test_who_counts_chunks_is_seen_by_one_profile() -> None:
    """Chunks instead of tokens are right where each token has a chunk, and refused where three share one."""
    states = {one.name: judged(one, 16, ONE_PROFILE["counts chunks as tokens"]).state for one in POLICY.profiles}
    assert states == {"plain": "pass", "speculative": "invalid"}


@given(factor=st.floats(0.5, 2.0), offset=st.floats(-0.05, 0.05))
def test_no_wrong_clock_fits_both_profiles(factor: float, offset: float) -> None:
    """A generator that is wrong by a factor and an offset together is refused by a profile, if it is off by more than a bound."""
    off = [abs(profile.tpot * factor + offset - profile.tpot) / profile.tpot for profile in POLICY.profiles]

    def changed(one: Request) -> Request:
        return replace(one, seconds=max(one.ttft, one.ttft + (one.tpot * factor + offset) * (one.tokens - 1)))

    states = [judged(profile, 1, changed).state for profile in POLICY.profiles]
    assert "invalid" in states or max(off) <= POLICY.tpot * 1.0001


@pytest.mark.parametrize("late", [{"ttft": 0.0013}, {"tpot": 0.0013}])
def test_a_late_server_is_the_machines_fault(late: dict[str, float]) -> None:
    """Where the server itself was late by more than its part of a bound, the generator is not blamed; nor does it qualify."""
    profile = POLICY.profiles[0]
    told = replace(NEVER_LATE, ttft=profile.ttft + late.get("ttft", 0.0), tpot=profile.tpot * (1 + late.get("tpot", 0.0)))
    check = judged(profile, 16, MUTANTS["tells the first token 6 ms late"], told)
    assert (check.state, check.reason) == ("invalid", "machine-late")
    # What was miscounted has nothing to do with time.
    assert judged(profile, 16, MUTANTS["drops the last token"], told).reason == "generator-biased"


def test_a_real_generator_qualifies() -> None:
    """Our own client, against real servers, passes each profile; the figures stand in the checks."""
    checks = metrology.qualify(Own(), QUICK, tokenizer=None)
    assert [(check.name, check.state) for check in checks] == [("plain-c4", "pass"), ("speculative-c4", "pass")], checks
    assert {"time per token", "time to first token", "throughput"} <= {figure.name for figure in checks[0].figures}


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, seconds=one.ttft + 1.5 * (one.seconds - one.ttft)),
        lambda one: replace(one, ttft=0.0),
        MUTANTS["drops the last token"],
        ONE_PROFILE["counts chunks as tokens"],
    ],
    ids=["a wrong factor", "first token in the time per token", "last token dropped", "chunks as tokens"],
)
def test_a_real_generator_that_is_wrong_is_refused(change: Callable[[Request], Request]) -> None:
    """A real generator that is wrapped in a mistake does not qualify, whatever the machine does meanwhile."""
    checks = metrology.qualify(Wrapped(Own(), change), replace(QUICK, attempts=1, profiles=QUICK.profiles[::-1]), tokenizer=None)
    assert "invalid" in {check.state for check in checks}
    assert {check.reason for check in checks} <= {"", *metrology.REASONS}


class Broken:
    """A generator that never measures anything."""

    name = "broken"

    def measure(self, order: Order) -> Run:
        raise LoadInvalid("generator-late", f"seed {order.seed}")


def test_a_generator_that_measures_nothing_does_not_qualify() -> None:
    """Why it measured nothing is the reason of each check, and each was tried as often as the policy says."""
    checks = metrology.qualify(Broken(), QUICK, tokenizer=None)
    assert [(check.state, check.reason) for check in checks] == [("invalid", "generator-late")] * 2
    assert checks[0].message == "broken: seed 0"


@pytest.mark.parametrize(
    "wrong",
    [
        {"profiles": POLICY.profiles[:1]}, {"profiles": (POLICY.profiles[0], replace(POLICY.profiles[1], chunk=1))},
        {"profiles": (POLICY.profiles[0], replace(POLICY.profiles[0], tpot=0.01, ttft=0.1, chunk=3))},
        {"tpot": 0.0}, {"attempts": 0}, {"concurrencies": ()},
    ],
)  # fmt: skip
def test_a_policy_that_would_show_nothing_is_refused(wrong: dict[str, object]) -> None:
    """Profiles that one wrong factor fits, or that have the same chunks, and bounds of nothing are no policy."""
    whole = {name: getattr(POLICY, name) for name in POLICY.__struct_fields__}
    with pytest.raises((ValueError, msgspec.ValidationError)):
        MetrologyPolicy(**{**whole, **wrong})
