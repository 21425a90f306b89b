"""
What is measured: named sets of workload cells, from ``ci/gates/workloads.yaml``.

The number of requests of a leg is fixed before it runs and is the same on both sides, so that a
fast wheel is not measured with more requests than a slow one.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec.structs import replace

from sparkwright.bench.records import Metric
from sparkwright.core import strict_yaml
from sparkwright.core.errors import UsageError

Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,59}$")]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]

_CELL = re.compile(
    r"(?:(?P<texts>[a-z0-9-]{1,40}) )?(?P<prompt>\d{1,7})/(?P<answer>\d{1,7})"
    r" c(?P<concurrency>\d{1,4})"
)


class WorkloadCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One shape of load.

    Attributes:
        prompt: Tokens of each prompt; the maximum where a dataset gives the prompts.
        answer: Tokens of each answer, exactly.
        concurrency: Requests at a time, each followed by the next.
        requests: Requests in a leg; 0 leaves it to the policy of G8.
        texts: Name of the real prompts that ``--texts`` has to give; empty for random tokens.
        primary: Metrics that decide a gate; the others are only reported.
    """

    prompt: Tokens
    answer: Tokens
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    requests: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    texts: str = ""
    primary: tuple[Metric, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the cell called *name*, without primary metrics; raise ValueError if none is."""
        match = _CELL.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r:.80} is not a cell; write it as 1024/1024 c8")
        return msgspec.convert(match.groupdict(default=""), cls, strict=False)

    @property
    def name(self) -> str:
        """``1024/1024 c8``: prompt, answer and concurrency, behind the name of a dataset."""
        return f"{self.texts} {self.prompt}/{self.answer} c{self.concurrency}".strip()


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named set of cells, its purpose, and who measures the same."""

    why: str
    source: str
    cells: Annotated[tuple[WorkloadCell, ...], msgspec.Meta(min_length=1)]


class Workloads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file ``ci/gates/workloads.yaml``."""

    workloads: dict[Name, Workload]

    def cells(self, *names: str) -> tuple[WorkloadCell, ...]:
        """
        Return the cells of the workloads called *names*, or of names of cells, each cell once.

        Raises:
            UsageError: A name is neither a workload nor a cell.
        """
        cells: dict[str, WorkloadCell] = {}
        for name in names:
            try:
                workload = self.workloads.get(name)
                for cell in workload.cells if workload else (WorkloadCell.parse(name),):
                    cells.setdefault(cell.name, cell)
            except ValueError:
                raise UsageError(
                    "usage",
                    f"There is no workload {name!r:.80}.",
                    todo=f"Choose from: {', '.join(self.workloads)}; or name a cell: 1024/1024 c8.",
                ) from None
        return tuple(cells.values())


def deciding(
    cells: Sequence[WorkloadCell], decides: Mapping[str, Sequence[Metric]], seats: int
) -> tuple[WorkloadCell, ...]:
    """
    Return the cells that decide a gate: those of *cells* with primary metrics, and those that
    *decides* names with their metrics.

    If none of *cells* has any, times of one request decide, and the rate of many. No cell has more
    requests at a time than the server has *seats*, since their rate would be that of a queue.
    """
    wanted = [cell for cell in cells if cell.primary]
    for cell in () if wanted else cells:
        metrics: tuple[Metric, ...] = ("tpot", "ttft") if cell.concurrency == 1 else ("rate",)
        wanted.append(replace(cell, primary=metrics))
    for name, more in decides.items():
        wanted.append(replace(WorkloadCell.parse(name), primary=tuple(more)))
    chosen = dict[str, WorkloadCell]()
    for cell in wanted:
        seated = replace(cell, concurrency=min(cell.concurrency, seats))
        first = chosen.setdefault(seated.name, seated)
        metrics = tuple(dict.fromkeys((*first.primary, *seated.primary)))
        chosen[seated.name] = replace(first, primary=metrics)
    return tuple(chosen.values())


def check_texts(cells: Sequence[WorkloadCell], texts: Path | None) -> None:
    """
    Check that *texts* names a file of prompts if, and only if, one of *cells* needs one.

    Raises:
        UsageError: The file is missing, or no cell uses it.
    """
    users = [cell.name for cell in cells if cell.texts]
    if users and not texts:
        raise UsageError(
            "usage", f"{users[0]} needs a file of prompts.", todo="Name it with --texts FILE."
        )
    if texts and not users:
        raise UsageError(
            "usage",
            f"{cells[0].name} is measured with random tokens, and not with the file of --texts.",
            todo='Name a cell that has texts: --workload "sharegpt 1024/256 c10".',
        )


def load(root: Path) -> Workloads:
    """Return the workloads of the repository at *root*; raise as `strict_yaml.load`."""
    return strict_yaml.load(root / "ci" / "gates" / "workloads.yaml", Workloads)
