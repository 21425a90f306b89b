"""
One measurement: a load on a server, the machine's state and the server's counters around it, and
whether it counts.

It counts if every answer is as long as ordered, nothing came from a cache, the server's counters
agree with the answers, and the rate is not above what the memory's bandwidth allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.model import checkpoint, decode_bytes, modules
from sparkwright.bench.model.checkpoint import ModelError
from sparkwright.bench.model.decode_bytes import Bandwidth
from sparkwright.bench.recipes.workloads import RequestRule, WorkloadCell
from sparkwright.bench.records import Reason
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.launch import Server
from sparkwright.core.console import console
from sparkwright.forks.stack import SourceError
from sparkwright.gates.throughput.records import Measurement, Speculation, ThroughputPolicy

#: The reference of a candidate whose server ended after it had started.
CRASHED = "candidate-crashed"
#: The reference of a candidate whose launch breaks the kernel contract of its recipe.
BROKEN = "candidate-contract"
#: Why a measurement does not count → what it means and what to do.
REASONS: Mapping[str, str] = {
    "answer-other": "Answers are shorter or longer than ordered: the server ended them early, or it "
    "does not know ignore_eos.",
    "prompt-other": "Prompts have another number of tokens than ordered, so another workload than "
    "the named one was measured.",
    "request-failed": "A request failed, or its stream broke; a rate over the others flatters the "
    "wheel. Look at the server's log.",
    "requests-missing": "The generator reports another number of requests than it was told to make.",
    "finish-other": "The server ended requests for another reason than their length: it aborted "
    "them, or saw a stop token.",
    "usage-mismatch": "The server's metrics do not agree with the token counts of its answers, so "
    "the tok/s is not known.",
    "prefix-cached": "A prefix cache answered prompts; elsewhere that made the first token come up "
    "to 49 times sooner (vllm #54227). Serve with --no-enable-prefix-caching.",
    "stream-merged": "Tokens came at once, as where a machine is too busy to send or to read them "
    "one by one; their times say nothing of the wheel. The measurement is repeated.",
    "times-impossible": "A time is not above zero, or a first token came after the last: a clock "
    "was set, or the generator errs.",
    "above-roofline": "More bytes per second than memory gives: look at the bytes per token, at "
    "caches, and at uncounted speculation.",
    "speculation-uneven": "The server counts drafts and steps that do not add up to the tokens that "
    "it gave, so steps/s cannot be told.",
    "counters-missing": "The server does not give the metrics that the check needs, or they go "
    "backwards, as after a restart.",
    BROKEN: "A launch of the candidate broke the kernel contract of its recipe: another backend, an "
    "emulation or a fallback. G3 tells which; its figures would be those of other kernels.",
    CRASHED: "The candidate's server ended during the gate. Look at its log: the wheel fails.",
}
#: Reasons that are repeated: a single failed request says little, a repeated one ends the gate.
REPEATED = frozenset({"request-failed", "stream-merged"})
#: States of the machine that the load of the measurement itself may cause; those are its result.
OWN_LOAD = frozenset({"throttled", "too-hot"})
#: Seconds within which the end of a server's process is noticed.
NOTICED_S = 3.0
#: Seconds after which a server has counted the requests that it answered.
SETTLE_S = 0.5

#: Seconds that every decode step exceeds: a kernel launch takes microseconds, a step has dozens.
SHORTEST_STEP_S = 50e-6

_FINISHED = "vllm:request_success_total"
_GIVEN = "vllm:generation_tokens_total"
#: Steps and tokens that speculation counts may miss its first token and the last draft of each answer.
_SLACK = 2


class CounterChange(msgspec.Struct, frozen=True):
    """What the server's counters say of a measurement, warm-ups included."""

    finished: int
    by_length: int
    tokens: int
    hits: float | None
    drafts: int
    drafted: int
    accepted: int


class ExternalServer:
    """A server at *url* that somebody else started; nothing is known of its processes."""

    failure = reason = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def guard(self) -> bool:
        return True

    def processes(self) -> list[psutil.Process]:
        return []


RunningServer = Server | ExternalServer


class MeasurementContext(msgspec.Struct, frozen=True):
    """
    What measurements are made with.

    Attributes:
        counters: Returns the metrics of the server at a URL; raises `ServerInvalid` without them.
        model: The name under which the model is served. *tokenizer*: its folder.
        texts: File of real prompts, for the cells that want them.
        traffic: Bytes that a decode step reads, by cell; without those that are not known.
        bandwidth: Measured in this session; None if it was not.
        rule: How many requests a measurement makes.
        cooldown: Seconds to wait before a disturbed measurement is repeated.
    """

    generator: LoadGenerator
    machine: MachineMonitor
    policy: ThroughputPolicy
    counters: Callable[[str], Mapping[str, float]]
    model: str
    tokenizer: Path | None = None
    texts: Path | None = None
    traffic: Mapping[str, float] = {}
    bandwidth: Bandwidth | None = None
    rule: RequestRule = RequestRule(5, 3, 0.0, 512)
    cooldown: float = 0.0


def measure(
    context: MeasurementContext,
    server: RunningServer,
    cell: WorkloadCell,
    blank: Measurement,
    seed: int,
) -> Measurement:
    """Return *blank* with the result of a load on *server*, and the reasons if it does not count."""
    if not server.guard():
        return _ended(server, replace(blank, began=time.time()))
    order = load_order(context, server.url, cell, seed)
    before = context.machine.snapshot(server.processes())
    started = replace(blank, began=before.time, before=before)
    try:
        counters = context.counters(server.url)
        with console.progress(f"{cell.name}, {blank.side}", 0) as line:
            line.update(0, f"{order.requests} requests")
            run = context.generator.measure(order)
        change = counter_change(counters, context.counters(server.url))
        if change and change.tokens != change.finished * order.output_tokens:
            # The client may have the last token before the server has counted the request.
            time.sleep(SETTLE_S)
            change = counter_change(counters, context.counters(server.url))
    except (LoadError, ServerInvalid) as error:
        if _has_ended(server):
            return _ended(server, started)
        return replace(started, reasons=(Reason(error.reason, error.message),))
    after = context.machine.snapshot(server.processes())
    speculation = speculative_decoding(run, change) if change else None
    share = _bandwidth_share(context, cell, run, speculation)
    # The bytes of a batch with experts are an upper bound, so only a single request is judged.
    alone = share if cell.concurrency == 1 else None
    hits = context.policy.prefix_hits
    wrong = invalid_reasons(order, run, change, prefix_hits=hits, roofline=alone)
    merged = merged_stream(order, run, change, wrong)
    wrong = () if merged else wrong
    earlier = {one.reference for one in context.machine.disturbances(before, before)}
    disturbed = tuple(
        one
        for one in context.machine.disturbances(before, after)
        if one.reference not in OWN_LOAD or one.reference in earlier
    )
    result = replace(
        started, run=run, after=after, speculation=speculation, roofline=share,
        prefix_hits=change.hits if change else None, reasons=(*wrong, *disturbed, *merged),
    )  # fmt: skip
    failed = any(one.error for one in run.requests)
    if _has_ended(server) if failed else not server.guard():
        return _ended(server, result)
    passing = bool(result.reasons) and all(one.reference in REPEATED for one in wrong)
    return replace(result, discarded=passing)


def _ended(server: RunningServer, blank: Measurement) -> Measurement:
    """Return *blank* for a server that ended: a result of the candidate, a disturbance else."""
    candidate = blank.side == "candidate"
    # A server that ended before its first answer may have been started wrongly, like the other.
    reference = CRASHED if candidate and blank.before else server.reason
    why = Reason(reference, server.failure)
    return replace(blank, reasons=(why, *blank.reasons), discarded=not candidate)


def _has_ended(server: RunningServer) -> bool:
    """Return whether *server* has ended; that is noticed a moment after its last answer."""
    until = time.monotonic() + NOTICED_S
    while server.guard():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def load_order(context: MeasurementContext, url: str, cell: WorkloadCell, seed: int) -> LoadSpec:
    """Return the load of a measurement of *cell*."""
    return LoadSpec(
        url, context.model, cell.prompt, cell.answer, cell.concurrency, cell.requests,
        context.policy.warmups, seed, context.tokenizer, context.texts if cell.texts else None,
        timeout_s=context.policy.timeout_s,
    )  # fmt: skip


def decode_traffic(model: Path | None, cells: Iterable[WorkloadCell]) -> dict[str, float]:
    """
    Return the bytes that a decode step of each cell reads in the middle of an answer.

    Cells are left out if the checkpoint does not say it.
    """
    if model is None:
        return {}
    try:
        weights = checkpoint.read(model)
        traffic = {}
        for cell in cells:
            middle = cell.prompt + cell.answer // 2
            audit = modules.audit(weights, context=middle, batch=cell.concurrency)
            traffic[cell.name] = audit.step
        return traffic
    except (ModelError, SourceError) as error:
        if error.reference not in ("checkpoint-invalid", "not-provided"):
            raise
        console.detail(f"no roofline: {error.what}")
        return {}


def _bandwidth_share(
    context: MeasurementContext,
    cell: WorkloadCell,
    run: LoadResult,
    speculation: Speculation | None,
) -> float | None:
    """Return the share of the memory's bandwidth that the steps need; None if not known."""
    step = context.traffic.get(cell.name, 0.0)
    too_small = step < context.policy.ceiling_min_bytes or not step
    if too_small or context.bandwidth is None or run.tpot <= 0:
        return None
    length = speculation.length if speculation else 1.0
    return decode_bytes.bandwidth_use(
        step, 1 / run.tpot, context.bandwidth.gigabytes, accepted=length
    )


def counter_change(before: Mapping[str, float], after: Mapping[str, float]) -> CounterChange | None:
    """Return how the server's counters changed; None if they are missing or went backwards."""

    def change(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    by_length = sum(
        value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith(f"{_FINISHED}{{") and '"length"' in name
    )
    finished, tokens = change(_FINISHED), change(_GIVEN)
    if finished is None or tokens is None or min(finished, tokens, by_length) < 0:
        return None
    queries, hits = (change(f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits"))
    drafts, drafted, accepted = (
        round(change(f"vllm:spec_decode_num_{what}_total") or 0.0)
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    share = None if queries is None or hits is None else hits / queries if queries > 0 else 0.0
    return CounterChange(
        round(finished), round(by_length), round(tokens), share, drafts, drafted, accepted
    )


def speculative_decoding(run: LoadResult, change: CounterChange) -> Speculation | None:
    """
    Return steps per second, tokens per step and acceptance; None without speculation.

    Every step gives one token and the accepted drafts, so length = 1 + accepted / drafts; the first
    token of an answer comes of its prompt. The counters hold the warm-ups, too, so the rate is
    computed from the counted requests alone.
    """
    if not change.drafts:
        return None
    length = 1 + change.accepted / change.drafts
    decoded = sum(max(0, one.output_tokens - 1) for one in run.requests)
    acceptance = change.accepted / change.drafted if change.drafted else 0.0
    return Speculation(decoded / length / run.seconds, length, acceptance)


def merged_stream(
    order: LoadSpec, run: LoadResult, change: CounterChange | None, wrong: Iterable[Reason]
) -> tuple[Reason, ...]:
    """
    Return a reason if a busy machine merged the stream; nothing if it is *wrong* otherwise.

    The server's own counters then have every token, but the generator received them in one piece
    at the end, or counted fewer pieces than tokens (seen with a vLLM on two busy cores).
    """
    others = [one for one in wrong if one.reference != "answer-other"]
    if others or change is None or change.tokens != change.finished * order.output_tokens:
        return ()
    # Merging leaves fewer pieces than tokens, never none and never more.
    if not all(0 < one.output_tokens <= order.output_tokens for one in run.requests):
        return ()
    texts = [f"{one.says}; the server counts all of them" for one in wrong]
    steps = 1 + change.accepted / change.drafts if change.drafts else 1.0
    limit = SHORTEST_STEP_S / steps
    merged = sum(one.output_tokens > 1 and one.tpot < limit for one in run.requests)
    if merged:
        texts.append(f"the tokens of {merged} of {len(run.requests)} answers came at once")
    return tuple(Reason("stream-merged", text) for text in texts)


def invalid_reasons(
    order: LoadSpec,
    run: LoadResult,
    change: CounterChange | None,
    *,
    prefix_hits: float,
    roofline: float | None,
) -> tuple[Reason, ...]:
    """
    Return why a measurement does not count; nothing for one that does.

    Args:
        prefix_hits: The share of cached prompt tokens that makes it invalid.
        roofline: Share of the bandwidth that the rate needs; None if not known.
    """
    count = len(run.requests)
    errors = [one.error for one in run.requests if one.error]
    whole = [one for one in run.requests if not one.error]
    answers = [one.output_tokens for one in whole if one.output_tokens != order.output_tokens]
    prompts = [one.prompt_tokens for one in whole if one.prompt_tokens != order.prompt_tokens]
    prompts = prompts if order.prompt_file is None else []
    impossible = run.seconds <= 0 or any(not 0 < one.ttft <= one.latency for one in whole)
    above = roofline is not None and roofline > 1
    faults = [
        (errors, "request-failed", f"{len(errors)} of {count} requests failed: {errors[:1]}"[:300]),
        (count != order.requests, "requests-missing", f"{count} of {order.requests} requests"),
        (answers, "answer-other", f"answers of {answers[:3]} tokens, not {order.output_tokens}"),
        (prompts, "prompt-other", f"prompts of {prompts[:3]} tokens, not {order.prompt_tokens}"),
        (impossible, "times-impossible", "a request or its first token has no possible time"),
        (above, "above-roofline", f"the rate needs {100 * (roofline or 0):.0f} % of the bandwidth"),
        (change is None, "counters-missing", f"{_FINISHED} or {_GIVEN} is missing or went back"),
    ]
    if change:
        other = change.finished - change.by_length
        tokens = f"{change.tokens} tokens in {change.finished} answers of {order.output_tokens}"
        # Warm-ups and the generator's own trial have the same length.
        equal = change.tokens == change.finished * order.output_tokens and change.finished >= count
        hits = change.hits or 0.0
        steps = f"{change.drafts} steps and {change.accepted} accepted drafts"
        faults += [
            (other, "finish-other", f"{other} of {change.finished} requests ended otherwise"),
            (not equal, "usage-mismatch", f"the server counts {tokens}"),
            (hits >= prefix_hits, "prefix-cached", f"{100 * hits:.1f} % of the prompt tokens"),
            (not _adds_up(change), "speculation-uneven", f"{steps} for {change.tokens} tokens"),
        ]
    return tuple(Reason(reference, text) for fault, reference, text in faults if fault)


def _adds_up(change: CounterChange) -> bool:
    """Return whether steps and accepted drafts give the tokens; an answer's end may cut a draft."""
    if not change.drafts:
        return True
    decoded, given = change.tokens - change.finished, change.drafts + change.accepted
    slack, longest = _SLACK * change.finished, 1 + change.drafted / change.drafts
    return decoded - slack <= given <= decoded + slack * longest
