"""
One measurement: a load on a server, the machine's state and the server's counters around it, and
whether it counts.

It counts if every answer is as long as ordered, nothing came from a cache, and the server's
counters agree with the answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.recipes.workloads import RequestRule, WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.results import Kind, Measurement
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.launch import Server
from sparkwright.core.console import console
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput.paired_differences import ThroughputPolicy

#: Reasons for which a measurement does not count → what each means, and what to do.
REASONS: Mapping[str, str] = {
    "answer-other": (
        "Answers are shorter or longer than ordered, or ended before their "
        "length: the server ended them early, or it does not know ignore_eos."
    ),
    "prompt-other": "Prompts have another number of tokens than ordered, so another workload than "
    "the named one was measured.",
    "request-failed": (
        "A request failed, or its stream broke; a rate over the others would "
        "be too good. Look at the server's log."
    ),
    "usage-mismatch": "The server's metrics do not agree with the token counts of its answers, so "
    "the tok/s is not known.",
    "prefix-cached": "A prefix cache answered prompts; elsewhere that made the first token come up "
    "to 49 times sooner (vllm #54227). Serve with --no-enable-prefix-caching.",
    "stream-merged": (
        "Tokens arrived together, as on a machine that is too busy to send or "
        "read them one by one, so their times are not the wheel's. The "
        "measurement is repeated."
    ),
    "times-impossible": (
        "A time is not above zero, or the first token came after the last: a "
        "clock was set, or the generator has a fault."
    ),
    "counters-missing": "The server does not give the metrics that the check needs, or they go "
    "backwards, as after a restart.",
}
#: Reasons that are repeated: a single failed request says little, a repeated one ends the gate.
REPEATED = frozenset({"request-failed", "stream-merged"})
#: States of the machine that the load of the measurement itself may cause; those are its result.
OWN_LOAD = frozenset({"throttled", "too-hot"})
#: Seconds after its last answer within which the end of a server's process is noticed.
NOTICED_S = 3.0
#: Seconds after which a server has counted the requests that it answered.
SETTLE_S = 0.5
#: Seconds that every decode step exceeds: a kernel launch takes microseconds, a step has dozens.
SHORTEST_STEP_S = 50e-6

_FINISHED = "vllm:request_success_total"
_GIVEN = "vllm:generation_tokens_total"


class RunSpec(msgspec.Struct, frozen=True):
    """
    What is measured, and with what.

    Attributes:
        kind: A gate measures an A/A block first, and then until there is a decision; any other kind
            measures launches of the candidate alone.
        blocks: The maximum.
        counters: Returns the metrics of the server at a URL; raises `ServerInvalid` without them.
        model: The name under which the model is served. *tokenizer*: its folder.
        texts: File of real prompts of each cell that has them, by its name.
        rule: How many requests a measurement makes.
        resident: Whether both servers stay, and take turns in one launch.
        deadline: As of `time.monotonic`; no block begins that would end later.
        contract: Profiles a server at the end of its launch, and returns the checks of the recipe's
            kernel contract; None without a recipe.
    """

    kind: Kind
    cells: tuple[WorkloadCell, ...]
    blocks: int
    generator: LoadGenerator
    machine: MachineMonitor
    policy: ThroughputPolicy
    counters: Callable[[str], Mapping[str, float]]
    model: str
    tokenizer: Path | None = None
    texts: Mapping[str, Path] = {}
    rule: RequestRule = RequestRule(5, 3, 512)
    resident: bool = False
    deadline: float = math.inf
    contract: Callable[[Side, Server], tuple[Check, ...]] | None = None

    def load(self, url: str, cell: WorkloadCell, seed: int) -> LoadSpec:
        """Return the load of a measurement of *cell*."""
        return LoadSpec(
            url, self.model, cell.prompt, cell.answer, cell.concurrency, cell.requests,
            self.policy.warmups, seed, self.tokenizer,
            self.texts.get(cell.name),
            timeout_s=self.policy.timeout_s,
        )  # fmt: skip


class CounterChange(msgspec.Struct, frozen=True):
    """How the server's counters changed in a measurement; *drafts* as in `Measurement`."""

    finished: int
    tokens: int
    hits: float = 0.0
    drafts: float | None = None


def measure(
    run_spec: RunSpec,
    server: Server,
    cell: WorkloadCell,
    blank: Measurement,
    seed: int,
) -> Measurement:
    """
    Return *blank* with the result of a load on *server*, and the reasons if it does not count.

    If the server ended, its reason is the first; `before` is None if it ended before the load.
    """
    blank = replace(blank, began=time.time())
    if not server.guard():
        return _ended(server, blank)
    spec = run_spec.load(server.url, cell, seed)
    before = run_spec.machine.snapshot()
    started = replace(blank, before=before)
    try:
        counters = run_spec.counters(server.url)
        with console.progress(f"{cell.name}, {blank.side}", 0) as line:
            line.update(0, f"{spec.requests} requests")
            run = run_spec.generator.measure(spec)
        change = counter_change(counters, run_spec.counters(server.url))
        if change and change.tokens != change.finished * spec.output_tokens:
            # The client may have the last token before the server has counted the request.
            time.sleep(SETTLE_S)
            change = counter_change(counters, run_spec.counters(server.url))
    except (LoadError, ServerInvalid) as error:
        time.sleep(NOTICED_S)
        if not server.guard():
            return _ended(server, started)
        return replace(started, reasons=(Reason(error.reason, error.message),))
    after = run_spec.machine.snapshot()
    wrong = invalid_reasons(spec, run, change, run_spec.policy.prefix_hits)
    earlier = {reason.reference for reason in run_spec.machine.disturbances(before, before)}
    disturbed = [
        reason
        for reason in run_spec.machine.disturbances(before, after)
        if reason.reference not in OWN_LOAD or reason.reference in earlier
    ]
    result = replace(
        started, run=run, after=after,
        drafts=change.drafts if change else None,
        reasons=(*wrong, *disturbed),
        discarded=bool(wrong or disturbed) and {each.reference for each in wrong} <= REPEATED,
    )  # fmt: skip
    if any(request.error for request in run.requests):
        time.sleep(NOTICED_S)
    return result if server.guard() else _ended(server, result)


def _ended(server: Server, measurement: Measurement) -> Measurement:
    """Return *measurement* of a server that ended."""
    reasons = (Reason(server.reason, server.failure), *measurement.reasons)
    return replace(measurement, reasons=reasons, discarded=measurement.side != "candidate")


def counter_change(before: Mapping[str, float], after: Mapping[str, float]) -> CounterChange | None:
    """
    Return how the server's counters changed; None if they are missing or went backwards.

    Every step of speculative decoding gives one token and the accepted drafts, so a step has
    1 + accepted / drafts tokens.
    """
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    finished, tokens = change.get(_FINISHED, -1.0), change.get(_GIVEN, -1.0)
    if min(finished, tokens) < 0:
        return None
    queries, hits, drafts, accepted = (
        change.get(f"vllm:{name}_total", 0.0)
        for name in (
            "prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts",
            "spec_decode_num_accepted_tokens",
        )
    )  # fmt: skip
    return CounterChange(
        round(finished), round(tokens), hits / max(queries, 1),
        1 + accepted / drafts if drafts > 0 else None,
    )  # fmt: skip


def invalid_reasons(
    spec: LoadSpec, run: LoadResult, change: CounterChange | None, prefix_hits: float
) -> tuple[Reason, ...]:
    """
    Return why a measurement does not count; nothing for one that does.

    Args:
        prefix_hits: The share of cached prompt tokens that makes it invalid.
    """
    if change is None:
        return (Reason("counters-missing", f"{_FINISHED} or {_GIVEN} is missing or went back"),)
    errors = [request.error for request in run.requests if request.error]
    whole = [request for request in run.requests if not request.error]
    answers = [each.output_tokens for each in whole if each.output_tokens != spec.output_tokens]
    prompts = [each.prompt_tokens for each in whole if each.prompt_tokens != spec.prompt_tokens]
    # Warm-ups and the generator's own trial have the same length.
    counted = change.tokens == change.finished * spec.output_tokens
    # A busy machine merges parts of a stream of which the server counts every token.
    short = "stream-merged" if counted else "answer-other"
    shortest = SHORTEST_STEP_S / (change.drafts or 1.0)
    lumps = [each for each in whole if each.output_tokens > 1 and 0 <= each.tpot < shortest]
    impossible = any(not 0 < request.ttft <= request.latency for request in whole)
    mismatch = not counted or change.finished < spec.requests
    tokens = f"{change.tokens} tokens in {change.finished} answers of {spec.output_tokens}"
    faults = (
        (
            errors,
            "request-failed",
            f"{len(errors)} of {spec.requests} failed: {errors[:1]}"[:300],
        ),
        (
            answers,
            short,
            f"answers of {answers[:3]} tokens, not {spec.output_tokens}",
        ),
        (
            prompts and spec.prompt_file is None,
            "prompt-other",
            f"prompts of {prompts[:3]} tokens, not {spec.prompt_tokens}",
        ),
        (lumps, "stream-merged", f"the tokens of {len(lumps)} answers came at once"),
        (impossible, "times-impossible", "a request or its first token has no possible time"),
        (mismatch, "usage-mismatch", f"the server counts {tokens}"),
        (
            change.hits >= prefix_hits,
            "prefix-cached",
            f"{100 * change.hits:.1f} % of the prompt tokens",
        ),
    )
    return tuple(Reason(reference, text) for fault, reference, text in faults if fault)
