"""
The records of an experiment: its measurements, the series made of them, and the result, with its
tables for pages and terminals.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.machine.monitor import Snapshot
from sparkwright.bench.records import COUNTED, FIGURES, METRICS, Metric, Reason, Side
from sparkwright.bench.statistics import MIN_INTERVAL, mean_interval
from sparkwright.bench.vllm_bench import LoadResult
from sparkwright.core.files import read_json
from sparkwright.core.pages import Table
from sparkwright.core.states import SIGNS, State

#: Bytes of the largest result; twelve workloads of 144 measurements of 64 requests are 17 MB.
LARGEST = 256 << 20


class LoadFigure(msgspec.Struct, frozen=True):
    """
    A figure of `FIGURES`, in its unit.

    Attributes:
        name: Its title.
        samples: Number of the samples that have it: blocks, or runs of a quick look.
        median: Over the samples; None without any.
        low, high: 95 % interval of the mean of the logarithms; None with too few samples.
    """

    name: str
    unit: str
    samples: int = 0
    median: float | None = None
    low: float | None = None
    high: float | None = None


def load_figure(name: str, values: Iterable[float | None]) -> LoadFigure:
    """Return the figure *name* of `FIGURES` over *values*, one of each sample."""
    title, unit, factor, _ = FIGURES[name]
    samples = [factor * value for value in values if value is not None and value > 0]
    if not samples:
        return LoadFigure(title, unit)
    median = statistics.median(samples)
    if len(samples) < MIN_INTERVAL:
        return LoadFigure(title, unit, len(samples), median)
    low, high = mean_interval([math.log(sample) for sample in samples])
    return LoadFigure(title, unit, len(samples), median, math.exp(low), math.exp(high))


#: Number of the A/A block of a gate, which is measured first: baseline against control.
CONTROL_BLOCK = -1


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    One run of the load generator against one launch of one wheel.

    Attributes:
        cell: `CellResult.name`.
        block: From 0; `CONTROL_BLOCK` of the A/A block.
        launch: From 0, over all sides.
        position: In A B B A, from 0.
        attempt: From 0; more if an earlier measurement at this position was discarded.
        began: Seconds since 1970.
        run: The result; None if the generator gave none.
        before, after: The machine's state around it.
        drafts: Tokens that a step gives on average: one, and the drafts that were accepted; None
            without drafts.
        reasons: Why it does not count; empty if it does.
        discarded: Whether it is measured again, and says nothing of a wheel.
    """

    cell: str
    block: int
    launch: int
    side: Side
    position: int
    attempt: int = 0
    began: float = 0.0
    run: LoadResult | None = None
    before: Snapshot | None = None
    after: Snapshot | None = None
    drafts: float | None = None
    reasons: tuple[Reason, ...] = ()
    discarded: bool = False

    @property
    def counts(self) -> bool:
        """Whether it counts as a measurement."""
        return self.run is not None and not self.reasons and not self.discarded

    def value(self, metric: str) -> float | None:
        """Return the value of *metric*, of `FIGURES`; None if it was not measured."""
        if metric == "drafts":
            return self.drafts
        return getattr(self.run, metric) if self.run else None


def block_medians(
    measurements: Iterable[Measurement], cell: str, metric: str, side: Side
) -> list[float]:
    """Return the median of *metric* in each block in which *side* was measured in *cell*."""
    blocks: dict[int, list[float]] = {}
    for leg in measurements:
        own = leg.counts and leg.block >= 0 and (leg.cell, leg.side) == (cell, side)
        if own and (value := leg.value(metric)) is not None:
            blocks.setdefault(leg.block, []).append(value)
    return list(map(statistics.median, blocks.values()))


class Series(msgspec.Struct, frozen=True):
    """
    One metric of one cell, block by block.

    Attributes:
        metric: See `sparkwright.bench.records.METRICS`. *primary*: whether it decides.
        differences: ln(candidate / baseline) of each block, positive where the candidate is worse;
            empty before one is complete.
        pass_evidence, fail_evidence: e-values after each block, of a deciding series.
        state: ``pass``, ``fail``, ``inconclusive`` or ``not-run``.
        baseline, candidate: Median over the blocks, in s or tokens/s; None if not measured.
        low, high: 95 % interval of the ratio candidate / baseline; None with too few blocks.
        margin: Its bound, as a share; 0 if it does not decide.
        conclusion: What was excluded, in words.
    """

    metric: Metric
    primary: bool
    differences: tuple[float, ...] = ()
    pass_evidence: tuple[float, ...] = ()
    fail_evidence: tuple[float, ...] = ()
    state: State = "not-run"
    baseline: float | None = None
    candidate: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float = 0.0
    conclusion: str = ""


class CellResult(msgspec.Struct, frozen=True):
    """
    A workload and its result.

    Attributes:
        name: ``1024/1024 c8``: tokens of prompt and answer, and concurrency.
        concurrency: As ordered.
        series: By metric.
    """

    name: str
    concurrency: int
    series: tuple[Series, ...]


class Subject(msgspec.Struct, frozen=True):
    """
    A wheel that was measured, or a server of which no wheel is known.

    Attributes:
        label: For people: ``vllm 0.33.0+spark.202611``, ``stock vllm 0.33.0``, or a URL.
        wheel: The file's name. *sha256*: of the wheel; both empty if no wheel is known.
        version: Of vLLM, as the server says.
        stack: The stack that it was built from; empty for a stock wheel.
        flags, variables: With which it was served; empty for a server that ran already.
    """

    label: str
    wheel: str = ""
    sha256: str = ""
    version: str = ""
    stack: str = ""
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True):
    """
    The result of a throughput gate.

    Attributes:
        state: The verdict. *says*: it in a sentence. *format*: of this record.
        stopped: Why it was given up; None if it was not.
        recipe: Its name, or empty. *model*: its name.
        added: Flags and variables of both sides that the recipe does not have.
        host: Facts of the machine (`sparkwright.gates.core.ladder.host_facts`).
        margin: The widest margin of a deciding series. *alpha*: the error rate that this gate
            spends. *attempt*: the number of this gate of the wheel and recipe, from 1.
        generator: Name and version.
        began: Seconds since 1970.
        legs: Every measurement, those that do not count included.
    """

    state: State
    says: str
    candidate: Subject
    cells: tuple[CellResult, ...]
    legs: tuple[Measurement, ...]
    baseline: Subject | None = None
    stopped: Reason | None = None
    recipe: str = ""
    model: str = ""
    added: tuple[str, ...] = ()
    host: dict[str, str] = {}
    margin: float = 0.0
    alpha: float = 0.0
    attempt: int = 1
    generator: str = ""
    began: float = 0.0
    format: Literal[3] = 3

    def figure(self, cell: CellResult, name: str, side: Side) -> LoadFigure:
        """Return the figure *name* of *side* in *cell* over the blocks."""
        return load_figure(name, block_medians(self.legs, cell.name, name, side))


def read(path: Path) -> Result:
    """
    Return the result in the file *path*.

    Raises:
        file-invalid: There is none, or of another format.
    """
    return read_json(path, Result, limit=LARGEST)


#: Headings of a figure, as `figure_texts` gives it.
FIGURE_HEADS = ("Figure", ">Median", ">95 % interval", ">Samples")


def number(value: float | None) -> str:
    """Return *value* with four significant digits, and thousands apart."""
    if value is None or not 0 < value < math.inf:
        return "not measured"
    decimals = max(0, 3 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f}"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval as text; a dash if it is unknown."""
    return "–" if low is None or high is None else f"{number(low)} … {number(high)}"


def ratios(result: Result) -> Table:
    """Return the candidate against the baseline: a ratio and its interval for each series."""
    rows = []
    for cell in result.cells if result.baseline else ():
        for series in cell.series:
            says, sign = "does not decide", ""
            if series.primary:
                says, sign = f"{series.state}: {series.conclusion}", f"{SIGNS[series.state]} "
            ratio = (series.candidate or 0.0) / (series.baseline or math.inf)
            rows.append(
                (
                    cell.name, sign + METRICS[series.metric][0], number(ratio),
                    interval(series.low, series.high), f"{len(series.differences)}",
                    says.removesuffix(": "),
                )
            )  # fmt: skip
    return Table(
        "Candidate against baseline",
        ("Workload", "Metric", ">Ratio", ">95 % interval", ">Blocks", "Says"),
        rows,
        "Candidate by baseline, of the medians over the blocks of launches. Times below 1 and "
        "rates above 1 are better. Rows with a sign decide.",
    )


def figure_texts(figure: LoadFigure) -> tuple[str, str, str, str]:
    """Return *figure* as `FIGURE_HEADS` name its texts."""
    title, ends = f"{figure.name}, {figure.unit}", interval(figure.low, figure.high)
    return title, number(figure.median), ends, f"{figure.samples}"


def figures(result: Result) -> Table:
    """Return the deciding figures of each workload and side of *result*."""
    rows = []
    sides: tuple[Side, ...] = ("candidate", "baseline") if result.baseline else ("candidate",)
    for cell, name, side in itertools.product(result.cells, METRICS, sides):
        figure = result.figure(cell, name, side)
        text, *numbers = figure_texts(figure)
        if figure.samples or name not in COUNTED:
            rows.append((cell.name, text, side, *numbers))
    return Table(
        "Absolute figures",
        ("Workload", "Figure", "Of", *FIGURE_HEADS[1:]),
        rows,
        "Medians over the blocks of launches. Drift between sessions is not in the intervals.",
    )
