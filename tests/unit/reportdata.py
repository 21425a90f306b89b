"""
Results of every kind and state, for the tests of the report and for looking at it. Every figure in them is made up.

``python tests/unit/reportdata.py FOLDER`` writes them as files that ``sparkwright lab report`` reads.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from sparkwright.bench.load.vllm_bench import LoadResult, Request
from sparkwright.bench.machine.state_checks import Snapshot
from sparkwright.bench.model.decode_bytes import Bandwidth
from sparkwright.bench.records import Metric, Reason, Side
from sparkwright.bench.results import CellResult, Measurement, Result, Series, Speculation, Subject
from sparkwright.bench.statistics import eprocess
from sparkwright.core.states import State

#: 2026-11-22 00:00 UTC.
BEGAN = 1_795_305_600.0
MADE_UP = "made-up figures"
FORK = Subject(
    "vllm 0.33.0+spark.202611", "vllm-0.33.0+spark.202611-cp38-abi3-linux_aarch64.whl", "ab" * 32, "0.33.0+spark.202611", "2026.11"
)
STOCK = Subject("stock vllm 0.33.0", "vllm-0.33.0-cp38-abi3-linux_aarch64.whl", "cd" * 32, "0.33.0")
HOST = {"gpu": f"GB10 (SM 12.1), {MADE_UP}", "driver": "580.00", "kernel": "6.14.0-made-up", "memory": "128.0 GB", "cores": "20"}
POINTS = ((128, 128, 1), (1024, 1024, 1), (8192, 1024, 1), (32768, 256, 1), (1024, 1024, 8), (1024, 1024, 32))
LADDER = tuple((1024, 1024, c) for c in (1, 2, 4, 8, 16, 32, 64))
#: Everything that markup, terminals and Markdown might take for their own.
HOSTILE = (
    '<script>alert("x")</script><img src=x onerror=alert(1)>{{ 7*7 }} '
    "$\\frac{1}{0}$ | `a` [b](http://example.invalid) \x1b[31m\u202eevil\x00 @all"
)


def evidence(differences: Sequence[float], sigma: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the evidence for a pass and for a fail, with ten A/A blocks of spread *sigma*."""
    gains = [math.log(1.02) - one for one in differences], [one - math.log(1.005) for one in differences]
    paths = (eprocess.evidence_path(one, 10 * sigma**2, 10.0) for one in gains)
    passing, failing = (tuple(math.exp(min(float(one), 700.0)) for one in path) for path in paths)
    return passing, failing


class Maker:
    """Makes Results from a seed: the same seed, the same Result."""

    def __init__(self, seed: int, *, slower: float = 0.0, noise: float = 0.006, points: Sequence[tuple[int, int, int]] = POINTS) -> None:
        self.random, self.slower, self.noise, self.points = random.Random(seed), slower, noise, tuple(points)
        self.speed, self.drafts, self.requests, self.judged = 0.024, 0, 8, 6

    def tpot(self, prompt: int, concurrency: int, side: Side) -> float:
        """Return made-up seconds per token."""
        base: float = self.speed * (1 + prompt / 400_000) * (1 + 0.07 * float(concurrency - 1) ** 0.85)
        return base * (1 + self.slower if side == "candidate" else 1) * math.exp(self.random.gauss(0, self.noise))

    def run(self, prompt: int, answer: int, concurrency: int, side: Side) -> LoadResult:
        """Return a made-up run."""
        tpot, made, at = self.tpot(prompt, concurrency, side), [], 0.0
        for index in range(max(self.requests, concurrency)):
            ttft = (0.18 + prompt / 4200) * (1 + 0.05 * concurrency) * math.exp(self.random.gauss(0, 0.02))
            each = tpot * math.exp(self.random.gauss(0, 0.003))
            made.append(Request(at, ttft, ttft + each * (answer - 1), prompt, answer, answer // (1 + self.drafts)))
            at += (ttft + each * answer) if (index + 1) % concurrency == 0 else 0.002
        seconds = max(one.start + one.latency for one in made)
        return LoadResult("vllm-rs 0.33.0", "ef" * 32, seconds, tuple(made))

    def snapshot(self, at: float) -> Snapshot:
        """Return a made-up state of the machine."""
        degrees = 58 + 9 * (1 - math.exp(-(at - BEGAN) / 1500)) + self.random.gauss(0, 0.6)
        gemv, clock = 0.00431 * math.exp(self.random.gauss(0, 0.004)), 2405 + 5 * self.random.randint(-2, 2)
        return Snapshot(at, at - BEGAN, gemv, 0.00217, clock, None, round(degrees, 1), 41.5, (), 71_000, 0.02, ())

    def legs(self, blocks: int, *, baseline: bool = True) -> Iterator[Measurement]:
        """Yield the legs of a whole gate or bench, one of them discarded and one invalid."""
        at, order = BEGAN, "ABBA" if baseline else "B"
        for block in range(blocks):
            for prompt, answer, concurrency in self.points:
                for position, letter in enumerate(order):
                    side: Side = "baseline" if letter == "A" else "candidate"
                    name = f"{prompt}/{answer} c{concurrency}"
                    odd = self.random.random()
                    for attempt in (0, 1) if odd < 0.02 else (0,):
                        at += 31.5
                        yield self.leg(name, (prompt, answer, concurrency), at, (block, side, position, attempt), odd)

    def leg(self, name: str, point: tuple[int, int, int], at: float, place: tuple[int, Side, int, int], odd: float) -> Measurement:
        """Return one leg; *odd* decides whether something is wrong with it."""
        block, side, position, attempt = place
        run, discarded = self.run(*point, side), odd < 0.02 and attempt == 0
        reasons: tuple[Reason, ...] = ()
        if discarded:
            slow = tuple(msgspec.structs.replace(one, latency=one.ttft + 1.5 * (one.latency - one.ttft)) for one in run.requests)
            run = msgspec.structs.replace(run, requests=slow)
            reasons = (Reason("slow-state", "the matrix times vector took 1.49 times as long, the copy no longer"),)
        elif 0.02 <= odd < 0.06 and position == 0:
            reasons = (Reason("tokens-missing", f"request 3 ended after 17 of {point[1]} tokens"),)
        told = Speculation(1 + 0.6 * self.drafts, 0.6) if self.drafts else None
        return Measurement(
            name,
            block,
            block,
            side,
            position,
            attempt,
            at,
            run,
            self.snapshot(at - 2),
            self.snapshot(at + 25),
            told,
            reasons,
            discarded,
        )

    def series(self, legs: Sequence[Measurement], metric: Metric, *, primary: bool, baseline: bool) -> Series:
        """Return what the legs of a cell come to."""
        take: Callable[[LoadResult], float] = lambda run: float(getattr(run, metric))  # noqa: E731
        values = {
            (side, block): [take(leg.run) for leg in legs if leg.counts and leg.run and leg.side == side and leg.block == block]
            for side in ("baseline", "candidate")
            for block in sorted({leg.block for leg in legs})
        }
        sides = {
            side: [statistics.median(found) for (whose, _), found in values.items() if whose == side and found]
            for side in ("baseline", "candidate")
        }
        blocks = len(sides["candidate"])
        if not baseline:
            logs = [math.log(one) for one in sides["candidate"]]
            low, high = self.interval(logs)
            return Series(metric, primary, candidate=statistics.median(sides["candidate"]), low=low, high=high, launches=blocks)
        sign = -1 if metric == "rate" else 1
        differences = tuple(sign * math.log(b / a) for a, b in zip(sides["baseline"], sides["candidate"], strict=True))
        sigma = max(0.003, self.noise * 1.1)
        passing, failing = evidence(differences, sigma)
        state: State = "fail" if failing[-1] >= 100 else "pass" if passing[-1] >= 100 else "inconclusive"
        low, high = self.interval([sign * one for one in differences])
        return Series(
            metric,
            primary,
            differences,
            passing,
            failing,
            state if primary else "not-run",
            sigma,
            statistics.median(sides["baseline"]),
            statistics.median(sides["candidate"]),
            low,
            high,
            blocks,
        )

    @staticmethod
    def interval(logs: Sequence[float]) -> tuple[float | None, float | None]:
        """Return a 95 % interval of the mean of *logs*, as ratios; None below three."""
        if len(logs) < 3:
            return None, None
        mean, half = statistics.fmean(logs), 2.8 * statistics.stdev(logs) / math.sqrt(len(logs))
        return math.exp(mean - half), math.exp(mean + half)

    def cells(self, legs: Sequence[Measurement], *, baseline: bool) -> Iterator[CellResult]:
        """Yield a cell for each point."""
        for index, (prompt, answer, concurrency) in enumerate(self.points):
            name = f"{prompt}/{answer} c{concurrency}"
            own = [leg for leg in legs if leg.cell == name]
            metrics: tuple[Metric, ...] = ("tpot", "ttft", "rate")
            primary = {metric: baseline and index < self.judged and metric == "tpot" for metric in metrics}
            series = tuple(self.series(own, metric, primary=primary[metric], baseline=baseline) for metric in metrics)
            yield CellResult(name, prompt, answer, concurrency, series, 232.5e9 / (3.4e9 + 9e4 * prompt))

    def calibration(self) -> dict[str, list[tuple[str, float]]]:
        """Return made-up A/A blocks of thirty days."""
        days = tuple(f"2026-{10 + day // 31:02d}-{day % 31 + 1:02d}" for day in range(20, 50))
        names = [f"{p}/{a} c{c}: time per token" for p, a, c in self.points[:2]]
        return {name: [(day, self.random.gauss(0, self.noise)) for day in days] for name in names}

    def gate(self, blocks: int = 6) -> Result:
        """Return a gate's Result."""
        legs = tuple(self.legs(blocks))
        cells = tuple(self.cells(legs, baseline=True))
        states = [one.state for cell in cells for one in cell.series if one.primary]
        state: State = "fail" if "fail" in states else "inconclusive" if "inconclusive" in states else "pass"
        culprits = tuple(f"{cell.name}: time per token" for cell in cells for one in cell.series if one.state == "fail")
        says = {
            "pass": f"All {len(states)} primary cells are at most 2 % slower than the baseline ({MADE_UP}).",
            "fail": f"{len(culprits)} of {len(states)} primary cells are slower than the baseline ({MADE_UP}).",
        }.get(state, f"After {blocks} blocks {states.count('inconclusive')} primary cells are open ({MADE_UP}).")
        return Result(
            kind="gate", state=state, says=says, candidate=FORK, cells=cells, legs=legs, baseline=STOCK, culprits=culprits,
            recipe="qwen3-next-80b-nvfp4", model="Qwen3-Next-80B-A3B-Instruct-NVFP4", quantization="NVFP4", stack="2026.11", host=HOST,
            margin=0.02, alpha=0.01, blocks=12, generator="vllm-rs 0.33.0",
            qualified=("TPOT within 0.02 % of the truth", "TTFT 1.3 ms late"), bandwidth=Bandwidth(232.5, "measured", "GB10"),
            calibration=self.calibration(), policy="12" * 32, began=BEGAN, seconds=5321.0, resumed=1,
        )  # fmt: skip

    def bench(self, *, blocks: int = 4, quantization: str = "NVFP4", subject: Subject = FORK) -> Result:
        """Return a bench's Result."""
        legs = tuple(self.legs(blocks, baseline=False))
        return Result(
            "bench",
            "not-run",
            f"{len(self.points)} cells over {blocks} launches ({MADE_UP}).",
            subject,
            tuple(self.cells(legs, baseline=False)),
            legs,
            recipe=f"qwen3-next-80b-{quantization.lower()}",
            model=f"Qwen3-Next-80B-A3B-Instruct-{quantization}",
            quantization=quantization,
            stack="2026.11",
            host=HOST,
            blocks=blocks,
            generator="vllm-rs 0.33.0",
            qualified=("TPOT within 0.02 % of the truth",),
            bandwidth=Bandwidth(232.5, "measured", "GB10"),
            began=BEGAN,
            seconds=912.0,
        )


def bench(seed: int, speed: float, quantization: str, *, drafts: int = 0, points: Sequence[tuple[int, int, int]] = LADDER) -> Result:
    """Return a bench of *speed* seconds per token."""
    maker = Maker(seed, points=points)
    maker.speed, maker.drafts = speed, drafts
    return maker.bench(quantization=quantization)


def large() -> Result:
    """Return 36 blocks of 4 legs in each of 12 cells, of 64 requests each."""
    points = [*POINTS, (256, 256, 1), (4096, 4096, 1), *((1024, 1024, c) for c in (2, 4, 16, 64))]
    maker = Maker(8, points=points)
    maker.requests = 64
    return maker.gate(blocks=36)


def hostile() -> Result:
    """Return a Result each of whose strings tries to be something else."""
    made = Maker(6, points=POINTS[:2]).gate(blocks=3)
    bad = Subject(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    legs = tuple(
        msgspec.structs.replace(leg, cell=HOSTILE if index % 2 else leg.cell, reasons=(Reason(HOSTILE, HOSTILE),) if index % 5 == 0 else ())
        for index, leg in enumerate(made.legs)
    )
    cells = tuple(msgspec.structs.replace(cell, name=HOSTILE if index else cell.name) for index, cell in enumerate(made.cells))
    calibration = {name: [(HOSTILE, value) for _, value in values] for name, values in made.calibration.items()}
    return msgspec.structs.replace(
        made,
        says=HOSTILE,
        candidate=bad,
        baseline=bad,
        legs=legs,
        cells=cells,
        calibration=calibration,
        culprits=(HOSTILE,),
        recipe=HOSTILE,
        model=HOSTILE,
        quantization=HOSTILE,
        stack=HOSTILE,
        host={HOSTILE: HOSTILE},
        generator=HOSTILE,
        qualified=(HOSTILE,),
        policy=HOSTILE,
        bandwidth=Bandwidth(232.5, "measured", HOSTILE),
    )


def invalid() -> Result:
    """Return a gate whose legs were nearly all discarded."""
    made = Maker(5).gate(blocks=3)
    legs = tuple(
        msgspec.structs.replace(leg, run=None, reasons=(Reason("server-died", "the server ended with signal 9 in the leg"),))
        for leg in made.legs
    )
    cells = tuple(
        msgspec.structs.replace(cell, series=tuple(Series(one.metric, one.primary) for one in cell.series)) for cell in made.cells
    )
    return msgspec.structs.replace(
        made, state="invalid", says=f"The server died in every leg ({MADE_UP}).", legs=legs, cells=cells, culprits=(), bandwidth=None
    )


def empty() -> Result:
    """Return the Result of a gate that never began."""
    return Result(
        kind="gate", state="not-run", says="There is no GPU here, so nothing was measured.", candidate=FORK, cells=(), legs=(), baseline=STOCK,
        host={"gpu": "none"}, margin=0.02, alpha=0.01, blocks=12,
    )  # fmt: skip


def verify(seed: int, state: State, says: str) -> Result:
    """Return a verification of a recipe."""
    made = bench(seed, 0.0239, "NVFP4", points=POINTS[:3])
    return msgspec.structs.replace(made, kind="verify", state=state, says=f"{says} ({MADE_UP}).")


def spoiled() -> Result:
    """Return a gate in which one cell alone became slower."""
    made = Maker(2).gate()
    slow = Maker(12, slower=0.06, points=POINTS[4:5]).gate()
    cells = (*made.cells[:4], *slow.cells, *made.cells[5:])
    legs = tuple(leg for leg in (*made.legs, *slow.legs) if leg.cell != slow.cells[0].name or leg in slow.legs)
    culprit = f"{slow.cells[0].name}: time per token"
    says = f"{culprit} is slower than the baseline; the other cells are not ({MADE_UP})."
    return msgspec.structs.replace(made, cells=cells, legs=legs, state="fail", culprits=(culprit,), says=says)


MAKERS: dict[str, Callable[[], Result]] = {
    "pass": lambda: Maker(1, slower=-0.012).gate(),
    "fail": spoiled,
    "inconclusive": lambda: Maker(3, slower=0.010, noise=0.016).gate(),
    "invalid": invalid,
    "bench-nvfp4": lambda: bench(21, 0.0240, "NVFP4"),
    "bench-awq": lambda: bench(22, 0.0282, "AWQ"),
    "bench-mtp": lambda: bench(23, 0.0150, "NVFP4 + MTP", drafts=2),
    "bench-points": lambda: bench(24, 0.0240, "NVFP4", points=[*POINTS[:4], (256, 256, 1), (4096, 4096, 1), *LADDER[1:]]),
    "verify-pass": lambda: verify(31, "pass", "The recipe's 41.0 to 42.5 tok/s hold here"),
    "verify-fail": lambda: verify(32, "fail", "Here it is slower than the recipe's 74.0 to 75.5 tok/s"),
    "calibration": lambda: msgspec.structs.replace(
        Maker(4, points=POINTS[:2]).gate(), kind="calibration", state="not-run", says=f"Six A/A blocks ({MADE_UP})."
    ),
    "hostile": hostile,
    "empty": empty,
    "large": large,
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for which, maker in MAKERS.items():
        (folder / f"{which}.json").write_bytes(msgspec.json.encode(maker()))
