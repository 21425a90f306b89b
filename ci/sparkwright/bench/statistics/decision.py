"""
Pass, fail or go on: what the blocks so far say of all series together, with error rates that hold however often this is asked.

*A series that is worse by the margin passes with a probability of at most α.* Its evidence is an e-process against "worse by δ or more",
and by Ville's inequality that ever reaches 1/α with a probability of at most α; the first block at which it may count changes nothing.

*A candidate that is worse by the margin in any series passes as a whole with a probability of at most α.* Passing needs every series to
pass (an intersection-union test), so the whole passes no more often than the worst series; no correction for their number is due.

*A candidate that is nowhere worse fails with a probability of at most α.* e-BH keeps the share of wrong names at α under any dependence,
and where nothing is worse, that share is the probability of naming anybody. It needs values whose expectation is at most 1 at the moment
of looking. An e-process has that at any stopping time, with respect to what was known of all series until then; so has one that was
stopped earlier, when its series had passed, and so has anything smaller.

Hence a series that has passed counts in e-BH with 0: on a quiet machine a candidate can be proven both slower than the baseline and
within the margin, and the margin says that this passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sparkwright.bench.statistics import evidence
from sparkwright.gates.core.verdict import State

#: Series that a sentence names; the record has them all.
NAMED = 3


class Rule(msgspec.Struct, frozen=True):
    """
    What is promised, and how long it may take.

    Attributes:
        margin: By how much worse a candidate is that must not pass, as a part of 1: 0.02 is 2 %.
        alpha: The probability of each kind of wrong verdict, at most.
        least, most: Blocks before anything is decided, and after which it stays undecided.
    """

    margin: float
    alpha: float
    least: int
    most: int

    def __post_init__(self) -> None:
        if not (0 < self.margin < math.inf and 0 < self.alpha < 1 and 1 <= self.least <= self.most):
            raise ValueError(f"a margin is above 0, an error rate between 0 and 1, and 1 <= least <= most: {self}")

    @property
    def delta(self) -> float:
        """The margin as a difference of logarithms."""
        return math.log1p(self.margin)


class Track(msgspec.Struct, frozen=True):
    """
    A series as far as it was measured.

    Attributes:
        name: Of the series, unique among those that are decided together.
        differences: One for each block; ln(candidate / baseline), above 0 where the candidate is worse.
        sigma: The calibrated upper bound of their spread; None where it was not calibrated, and the signs alone decide.
        in_band: Whether this machine's newest A/A blocks agree with those of the calibration. If not, the signs have to agree.
    """

    name: str
    differences: tuple[float, ...]
    sigma: float | None
    in_band: bool = True


class Found(msgspec.Struct, frozen=True):
    """
    What is known of a series.

    Attributes:
        state: ``not-run`` without a block; ``inconclusive`` while nothing is known.
        pass_evidence, fail_evidence: After each block that was looked at, what 1/α is held against: the e-process, or the signs where
            nothing was calibrated, or the lesser of both out of band.
        sign_evidence: Of the signs alone, that it is not worse by the margin.
        settled: Blocks after which it had passed; None where it has not.
    """

    name: str
    state: State
    pass_evidence: tuple[float, ...]
    fail_evidence: tuple[float, ...]
    sign_evidence: tuple[float, ...]
    settled: int | None = None


class Decision(msgspec.Struct, frozen=True):
    """
    What is decided.

    Attributes:
        state: None: go on.
        found: In the order of the tracks.
        culprits: Series that are worse, strongest evidence first; only with ``fail``.
        open: Series that need another block, empty once it is decided.
        says: It in a sentence.
    """

    state: State | None
    found: tuple[Found, ...]
    culprits: tuple[str, ...]
    open: tuple[str, ...]
    says: str


def decide(rule: Rule, tracks: Sequence[Track]) -> Decision:
    """
    Return what *tracks* decide, as if it had been asked after each block: blocks beyond a decision, or the most, change nothing.

    Raises:
        ValueError: Two tracks have one name, a difference is no finite number, or a spread is not above 0.
    """
    if len({track.name for track in tracks}) < len(tracks):
        raise ValueError("two series have one name")
    found = tuple(_evidence(rule, track) for track in tracks)
    for blocks in range(rule.least, max((len(one.pass_evidence) for one in found), default=0) + 1):
        culprits = evidence.e_bh({one.name: _against(rule, one, blocks) for one in found}, rule.alpha)
        if culprits:
            seen = tuple(_until(one, blocks, culprits) for one in found)
            return Decision("fail", seen, culprits, (), _failed(rule, tracks, culprits, blocks))
    left = tuple(one.name for one in found if not one.settled)
    more = tuple(one.name for one in found if not one.settled and len(one.pass_evidence) < rule.most)
    if more:
        says = f"{len(found) - len(left)} of {len(found)} series have passed; {len(more)} need another block"
        return Decision(None, found, (), more, says)
    if left:
        return Decision("inconclusive", found, (), (), _undecided(rule, tracks, left))
    return Decision("pass" if found else "not-run", found, (), (), _passed(rule, found))


def _evidence(rule: Rule, track: Track) -> Found:
    """Return the paths of a series, up to the block at which it passed."""
    differences, sigma = track.differences[: rule.most], track.sigma
    sign, against = evidence.signs(differences, threshold=rule.delta), evidence.failing_signs(differences)
    good, bad = sign, against
    if sigma is not None:
        good = evidence.passing(differences, delta=rule.delta, sigma=sigma)
        bad = evidence.failing(differences, delta=rule.delta, sigma=sigma)
        if not track.in_band:
            # The lesser of two e-processes is no greater than either, so it is valid if either model holds: the spread as it was
            # calibrated, or the median alone.
            good, bad = tuple(map(min, good, sign)), tuple(map(min, bad, against))
    settled = next((blocks for blocks in range(rule.least, len(good) + 1) if good[blocks - 1] >= 1 / rule.alpha), None)
    state: State = "pass" if settled else "inconclusive" if differences else "not-run"
    return Found(track.name, state, good[:settled], bad[:settled], sign[:settled], settled)


def _against(rule: Rule, found: Found, blocks: int) -> float:
    """Return the evidence that counts against a series when *blocks* were measured: none once it has passed, or before the least."""
    seen = min(blocks, len(found.fail_evidence))
    passed = found.settled is not None and found.settled <= blocks
    return 0.0 if passed or seen < rule.least else found.fail_evidence[seen - 1]


def _until(found: Found, blocks: int, culprits: Sequence[str]) -> Found:
    """Return what was known of a series when *culprits* were named after *blocks*."""
    if found.settled is not None and found.settled <= blocks:
        return found
    state: State = "fail" if found.name in culprits else "inconclusive" if found.pass_evidence else "not-run"
    return Found(found.name, state, found.pass_evidence[:blocks], found.fail_evidence[:blocks], found.sign_evidence[:blocks])


def _failed(rule: Rule, tracks: Sequence[Track], culprits: Sequence[str], blocks: int) -> str:
    worse = [one for name in culprits for one in tracks if one.name == name]
    where = _listed([f"{one.name} by {_percent(one.differences[:blocks])}" for one in worse])
    return f"worse than the baseline in {len(culprits)} of {len(tracks)} series after {blocks} blocks (error rate {rule.alpha:g}): {where}"


def _undecided(rule: Rule, tracks: Sequence[Track], left: Sequence[str]) -> str:
    where = _listed([f"{one.name} ({_percent(one.differences[: rule.most])})" for one in tracks if one.name in left])
    return f"{rule.most} blocks decide neither way in {len(left)} of {len(tracks)} series (margin {100 * rule.margin:.3g} %): {where}"


def _passed(rule: Rule, found: Sequence[Found]) -> str:
    if not found:
        return "no series was measured"
    took = max(one.settled or 0 for one in found)
    all_of = f"all {len(found)} series passed" if len(found) > 1 else "the series passed"
    return f"not worse by {100 * rule.margin:.3g} %: {all_of} within {took} blocks (error rate {rule.alpha:g})"


def _percent(differences: Sequence[float]) -> str:
    return f"{100 * math.expm1(math.fsum(differences) / len(differences)):+.2f} %"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
