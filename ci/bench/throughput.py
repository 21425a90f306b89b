"""
The throughput gate's error rates, by simulation of whole gates, beside a design of fixed size and the rule of the seed reports.

Each simulated machine is calibrated on A/A blocks of its own, so its spread is estimated, not known. Bounds are Clopper-Pearson's at 95 %.
A slowdown adds to a block's difference as it is; so all slowdowns, error rates and ways to judge of a row see the same noise.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from scipy.stats import chi2, nct, t

import measure
from sparkwright.bench.machine.state_checks import MachinePolicy
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.statistics import calibration, decision, intervals, many, simulated
from sparkwright.bench.statistics.calibration import ENOUGH
from sparkwright.bench.statistics.decision import Rule, Track
from sparkwright.bench.statistics.noise import PRESETS, Machine, Noise
from sparkwright.bench.statistics.simulated import Design
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.gates.throughput import runner
from sparkwright.gates.throughput.calibration import Calibration, known
from sparkwright.gates.throughput.journal import Begun, Journal
from sparkwright.gates.throughput.paired_differences import NoiseModel
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.runner import RunOutcome, RunSpec
from sparkwright.gates.throughput.simulated import Simulated

MARGIN, LEAST, MOST = 0.02, 3, 12
#: True slowdowns, in margins (of the logarithm). At half a margin either verdict is right, and the test has most to do.
SLOWDOWNS = (0.0, 0.5, 1.0, 1.5, 2.5)
#: Ways to judge: what the spread is multiplied with (None: not calibrated, signs alone), and whether the machine is in its band.
WAYS: dict[str, tuple[float | None, bool]] = {
    "calibrated": (1.0, True),
    "out of band": (1.0, False),
    "signs alone": (None, True),
    "σ halved": (0.5, True),
    "halved + signs": (0.5, False),
}
DESIGNS = {"1": Design(), "6": Design(cells=6), "6 shared": Design(cells=6, shared=True)}
#: Seconds of a short leg, of which the statistic may take next to nothing.
LEG = 10.0


class Rate(msgspec.Struct, frozen=True):
    """A share of gates, and its intervals."""

    value: float
    low: float
    high: float

    @property
    def error(self) -> str:
        """It in per cent, with the bound above it, rounded up."""
        return f"{100 * self.value:.2f} ≤{math.ceil(10_000 * self.high) / 100:.2f}"

    @property
    def power(self) -> str:
        """It in per cent, with the bound below it, rounded down."""
        return f"{math.floor(1000 * self.value) / 10:.1f} ≥{math.floor(1000 * self.low) / 10:.1f}"


class At(msgspec.Struct, frozen=True):
    """
    What gates say of one true slowdown, that of one cell while the others are equal.

    Attributes:
        slowdown: In margins. *blocks*: until the verdict, on average. *measured*: those of all cells together.
    """

    slowdown: float
    passed: Rate
    failed: Rate
    blocks: float
    measured: float


class Row(msgspec.Struct, frozen=True):
    """
    A machine, a number of cells, a margin, an error rate and a way to judge.

    Attributes:
        way: One of `WAYS`. *margin*: as a part of 1.
        spread: Of a block's difference, in truth.
        fixed: Blocks of a t-test of fixed size with both error rates at α. *fixed_power*: of one that passes equal builds as often as ours.
        errors, power: Whether the promise is kept, by the bounds: errors of at most α; 95 % of 1.5 margins found.
    """

    machine: str
    cells: str
    margin: float
    alpha: float
    way: str
    spread: float
    at: tuple[At, ...]
    fixed: int
    fixed_power: int
    errors: str
    power: str


class Single(msgspec.Struct, frozen=True):
    """How often the seed reports' rule blocks a build: the median of 3 runs against a stored one, with the margin as threshold."""

    machine: str
    slowdown: float
    blocked: Rate


def rate(hits: int, count: int) -> Rate:
    """Return a share with its intervals."""
    return Rate(hits / count, *intervals.clopper_pearson(hits, count))


def fixed(delta: float, spread: float, alpha: float, power: float, cells: int) -> int:
    """
    Return the blocks at which t-tests of "worse by *delta*" at level *alpha* pass an equal build in all *cells*, with probability *power*.

    They are planned with the true *spread*, in their favour: nobody knows it beforehand.
    """
    for blocks in range(2, 1000):
        limit = t.ppf(1 - alpha, blocks - 1)
        if nct.sf(limit, blocks - 1, delta / spread * math.sqrt(blocks)) ** cells >= power:
            return blocks
    return 1000


def kept(found: Rate, limit: float, *, above: bool = False) -> str:
    """Say whether the bounds show that a rate is at most (or at least) *limit*."""
    good, bad = (found.low >= limit, found.high < limit) if above else (found.high <= limit, found.low > limit)
    return "yes" if good else "NO" if bad else "not shown"


def at(rule: Rule, noise: many.Numbers, sigma: many.Numbers | None, slowdown: float, *, in_band: bool) -> At:
    """Judge every gate with the first cell slowed."""
    differences = noise.copy()
    differences[:, 0] += slowdown * rule.delta
    found = many.decide(rule, differences, sigma, in_band=in_band)
    counts = {state: int((found.states == place).sum()) for place, state in enumerate(many.STATES)}
    gates = len(found.states)
    return At(
        slowdown,
        rate(counts["pass"], gates),
        rate(counts["fail"], gates),
        float(found.blocks.mean()),
        float(found.measured.mean()),
    )


def row(name: str, label: str, rule: Rule, way: str, noise: many.Numbers, sigma: many.Numbers) -> Row:
    """Judge machines in one way, and hold what comes out against what is promised."""
    factor, in_band = WAYS[way]
    used = None if factor is None else factor * sigma
    found = tuple(at(rule, noise, used, slowdown, in_band=in_band) for slowdown in SLOWDOWNS)
    equal, _, margin, worse, _ = found
    states = [kept(equal.failed, rule.alpha), kept(margin.passed, rule.alpha)]
    errors = next((state for state in ("NO", "not shown") if state in states), "yes")
    gates, cells, _ = noise.shape
    spread = float(noise.std())
    promised = fixed(rule.delta, spread, rule.alpha, 1 - rule.alpha, cells)
    same = fixed(rule.delta, spread, rule.alpha, min(equal.passed.value, 1 - 1 / gates), cells)
    power = kept(worse.failed, 0.95, above=True)
    return Row(name, label, rule.margin, rule.alpha, way, spread, found, promised, same, errors, power)


def rows(name: str, noise: Noise, label: str, gates: int, seed: int) -> Iterator[Row]:
    """Simulate machines, calibrate each, and judge them in each way; and at the margin that such machines support."""
    design = DESIGNS[label]
    blocks, _ = simulated.differences(noise, design, gates, ENOUGH + MOST, seed)
    upper = math.sqrt((ENOUGH - 1) / chi2.ppf(0.05, ENOUGH - 1))
    sigma, measured = blocks[..., :ENOUGH].std(axis=-1, ddof=1) * upper, blocks[..., ENOUGH:]
    for alpha in (0.05, 0.01):
        for way in WAYS:
            yield row(name, label, Rule(MARGIN, alpha, LEAST, MOST), way, measured, sigma)
        margin = calibration.smallest_margin(float(np.median(sigma)), alpha, MOST, least=LEAST, series=design.cells)
        yield row(name, label, Rule(margin, alpha, LEAST, MOST), "calibrated", measured, sigma)


def singles(name: str, noise: Noise, gates: int, seed: int) -> Iterator[Single]:
    """Judge machines as the seed reports do."""
    found = simulated.single(noise, gates, seed)
    for percent in (0, 2, 3, 5):
        yield Single(name, percent, rate(int((found + math.log1p(percent / 100) > math.log1p(MARGIN)).sum()), gates))


def cost(runs: int) -> tuple[float, float]:
    """Return seconds that a decision over 12 cells with 12 blocks takes, median and slowest of *runs*."""
    random = np.random.default_rng(1)
    rule = Rule(MARGIN, 0.01, LEAST, MOST)
    tracks = [Track(f"cell {cell}", tuple(map(float, random.normal(rule.delta / 2, 0.015, MOST))), 0.019) for cell in range(12)]
    taken = []
    for _ in range(runs):
        began = time.perf_counter()
        decision.decide(rule, tracks)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken), max(taken)


class Whole(msgspec.Struct, frozen=True):
    """Gates through the real course at one true slowdown, in margins: shares of verdicts, and blocks on average."""

    machine: str
    slowdown: float
    passed: Rate
    failed: Rate
    inconclusive: Rate
    invalid: Rate
    blocks: float


def whole(name: str, noise: Noise, slowdown: float, gates: int, seed: int, folder: Path) -> Whole:
    """
    Run *gates* whole gates as a maintainer does, each on a machine of its own: 30 A/A blocks, then the gate with what they taught.

    Launches, legs, their validity, the sentinel's judgement, discards, the journal on disk and the decision are the product's code.
    """
    root = Path(__file__).parents[1] / "gates"
    policy = strict_yaml.load(root / "throughput.yaml", ThroughputPolicy)
    states = strict_yaml.load(root / "machine.yaml", MachinePolicy)
    rule = Rule(policy.margin, policy.alpha, policy.least, policy.most)
    cell = WorkloadCell(1024, 1024, 1, primary=("tpot",))
    found, blocks = Counter[str](), 0
    with console.progress(f"{name}, slower by {slowdown:g} margins", gates) as progress:
        for gate in range(gates):
            progress.update(gate)
            world = Simulated(Machine(noise, seed + gate), policy, states)
            plain = RunSpec((cell,), rule, "both", policy.quads, policy.calibration, gate, 1000, whole=True)
            path = folder / "gate.jsonl"
            made = calibration_of(run_course(plain, world, path), cell, policy.calibration)
            world.slow_down(slowdown * rule.delta)
            asked = replace(plain, blocks=policy.most, attempts=states.discards + 1, waits=policy.waits, known=made, whole=False)
            outcome = run_course(asked, world, path)
            found["invalid" if outcome.stopped else str(outcome.decision and outcome.decision.state)] += 1
            blocks += len(outcome.blocks)
    passed, failed, undecided, spoiled = (rate(found[state], gates) for state in ("pass", "fail", "inconclusive", "invalid"))
    return Whole(name, slowdown, passed, failed, undecided, spoiled, blocks / gates)


def run_course(plan: RunSpec, world: Simulated, path: Path) -> RunOutcome:
    """Run *plan* with a new journal at *path*."""
    path.unlink(missing_ok=True)
    with Journal(path, Begun("bench", {}, plan.seed, 0.0)) as journal:
        return runner.run(plan, world, journal)


def calibration_of(outcome: RunOutcome, cell: WorkloadCell, enough: int) -> dict[str, NoiseModel]:
    """Return what the A/A blocks of *outcome* teach, as `bench --calibrate` keeps it."""
    made = Calibration({}, {}).with_((cell,), outcome.legs, sorted(outcome.blocks), "2026-01-01")
    return known(made, enough)


def line(row: Row) -> list[str]:
    """Return a row of the table."""
    equal, half, margin, worse, worst = row.at
    rates = [equal.failed.error, margin.passed.error, equal.passed.power, worse.failed.power, worst.failed.power]
    blocks = [f"{one:.1f}" for one in (equal.blocks, equal.measured / DESIGNS[row.cells].cells, half.blocks, margin.blocks, worse.blocks)]
    what = [row.machine, row.cells, f"{100 * row.margin:.2g} %", f"{100 * row.alpha:g} %", row.way]
    return [*what, *rates, *blocks, str(row.fixed), str(row.fixed_power), row.errors, row.power]


COLUMNS = ["machine", "cells", ">δ", ">α", "judged", ">FAIL at 0", ">PASS at δ", ">PASS at 0", ">FAIL 1.5δ", ">FAIL 2.5δ"]
COLUMNS += [">n at 0", ">a cell", ">.5δ", ">δ", ">1.5δ", ">fixed", ">same", "errors", "power"]
#: What the columns mean.
ABOUT = """\
cells: in one launch, each with an effect of its own or a shared one; one of them is slowed. Rates in % with 95 % intervals.
n: blocks until the verdict, on average, at each true slowdown; "a cell": of one cell, as one that has passed is not measured again.
fixed: blocks of t-tests with both error rates at α, planned with the true spread; same: of those that pass equal builds as often as ours.
errors: FAIL at 0 and PASS at δ are both at most α, by their bounds; power: FAIL at 1.5 δ is at least 95 %."""


def more(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--gates", type=int, default=20_000, help="simulated for each row")
    parser.add_argument("--whole", type=int, default=500, help="gates through the real course, for each slowdown")
    parser.add_argument("--seed", type=int, default=6)


def main() -> None:
    """Simulate, print, and say what is promised and not shown."""
    options = measure.arguments(__doc__ or "", more)
    console.json = options.json
    found: list[Row] = []
    naive: list[Single] = []
    with console.progress("machines and numbers of cells", len(PRESETS) * len(DESIGNS)) as progress:
        for number, (name, noise) in enumerate(PRESETS.items()):
            naive += singles(name, noise, options.gates, options.seed + number)
            for label in DESIGNS:
                found += rows(name, noise, label, options.gates, options.seed + 1000 * number + len(found))
                progress.update(progress.done + 1, f"{name}, {label}")
    console.result(ABOUT)
    title = f"{options.gates} gates a row; {LEAST} to {MOST} blocks"
    console.table(title, COLUMNS, [line(one) for one in found if one.margin == MARGIN], result=True)
    supported = [line(one) for one in found if one.margin != MARGIN]
    console.table("The same, at the smallest margin that 30 A/A blocks of such a machine support", COLUMNS, supported, result=True)
    shown = [[one.machine, f"{one.slowdown:g} %", f"{100 * one.blocked.low:.2f}", one.blocked.error] for one in naive]
    title = f"Median of 3 runs against a stored number, {100 * MARGIN:g} % threshold"
    console.table(title, ["machine", ">slower by", ">at least", ">blocked %"], shown, result=True)
    real = []
    with tempfile.TemporaryDirectory(prefix="throughput-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for machine in ("typical", "rough") if options.whole else ():
            for slowdown in (0.0, 1.0, 1.5):
                real.append(whole(machine, PRESETS[machine], slowdown, options.whole, options.seed, Path(name)))
    rows_ = [
        [
            one.machine, f"{one.slowdown:g}", one.passed.error, one.failed.error,
            f"{100 * one.inconclusive.value:.1f}", f"{100 * one.invalid.value:.1f}", f"{one.blocks:.1f}",
        ]
        for one in real
    ]  # fmt: skip
    title = f"{options.whole} whole gates each through the real course, calibrated by 30 A/A blocks of the same machine"
    console.table(title, ["machine", ">slower by", ">PASS %", ">FAIL %", ">inconclusive %", ">invalid %", ">blocks"], rows_, result=True)
    median, slowest = cost(max(options.runs, 100))
    takes = f"{1e6 * median:.0f} µs (slowest {1e6 * slowest:.0f}), {median / LEG:.1e} of a {LEG:g} s leg"
    console.result(f"a decision over 12 cells with 12 blocks: {takes}")
    console.document({"gates": options.gates, "rows": found, "single": naive, "whole": real, "decision_seconds": median})
    console.finish()


if __name__ == "__main__":
    main()
