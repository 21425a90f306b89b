"""What a Result does not say: what was not measured stands beside the verdict, so that no silence is taken for a pass."""

from __future__ import annotations

from collections.abc import Iterator

from sparkwright.bench.records import METRICS
from sparkwright.bench.report import words
from sparkwright.bench.report.view import View


def absent(view: View) -> tuple[str, ...]:
    """Return in a sentence each what was not measured, or was not measured well enough."""
    if not view.result.legs:
        return ("Nothing was measured.",)
    return (*_machine(view), *_decided(view), *_counted(view))


def _machine(view: View) -> Iterator[str]:
    result = view.result
    gpu = result.host.get("gpu", "")
    if "GB10" not in gpu:
        whose = words.clean(gpu, 120) if gpu not in ("", "none") else "a machine without a GPU"
        yield f"No GB10: these are figures of {whose}, and say nothing of a Spark."
    if result.bandwidth is None:
        yield "Read bandwidth: not measured in this session, so per cent of the ceiling are not told."
    elif result.bandwidth.origin != "measured":
        yield f"Read bandwidth: {result.bandwidth.origin}, not measured."
    if not result.qualified:
        yield "The load generator: not qualified against a server of known times."
    if not any(leg.before for leg in result.legs):
        yield "State of the machine (clocks, temperature, probe): not read."


def _decided(view: View) -> Iterator[str]:
    result = view.result
    if result.kind == "gate" and result.baseline is None:
        yield "Baseline: none, so nothing was compared."
    open_ = [
        f"{words.clean(cell.name, 60)} ({METRICS[one.metric][0]})"
        for cell in result.cells
        for one in cell.series
        if one.primary and one.state == "not-run"
    ]
    if open_:
        yield f"Not run, although they decide: {', '.join(open_[:8])}{f' and {len(open_) - 8} more' if len(open_) > 8 else ''}."
    blind = sum(
        one.sigma is None
        for cell in result.cells
        for one in cell.series
        if one.primary and one.differences
    )
    if blind:
        yield f"The spread of this machine: no A/A block of {blind} series, so that they decide by their own spread alone."
    strayed = [
        words.clean(cell.name, 60)
        for cell in result.cells
        for one in cell.series
        if not one.in_band
    ]
    if strayed:
        yield f"The A/A block of this run does not agree with the earlier ones: {', '.join(strayed[:6])}. There it alone counts."


def _counted(view: View) -> Iterator[str]:
    result, (counted, discarded, invalid) = view.result, view.tally
    if not result.candidate.sha256:
        yield "The candidate's wheel: not known, so these figures are of no certain bytes."
    if discarded or invalid:
        why = ", ".join(f"{words.clean(name, 60)} {count}×" for name, count in view.reasons)
        yield f"Of {len(result.legs)} legs {counted} count; {discarded} were discarded and {invalid} are invalid ({why})."
    if not any(leg.speculation for leg in result.legs):
        yield "Speculative decoding: none, or the server does not count it."
