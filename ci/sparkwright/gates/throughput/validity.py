"""Does a leg count? Every answer as long as ordered, nothing from a cache, every token accounted for, no more than memory gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from sparkwright.bench.load.load_spec import LoadResult, LoadSpec
from sparkwright.bench.records import Reason
from sparkwright.gates.throughput.records import Speculation

#: Why a leg does not count → what it means and what to do.
REASONS: Mapping[str, str] = {
    "answer-other": "Answers are shorter or longer than ordered: the server ended them early, or it does not know ignore_eos.",
    "prompt-other": "Prompts have another number of tokens than ordered, so the leg measures another workload than its name says.",
    "request-failed": "A request failed, or its stream broke; a rate over the others flatters the wheel. Look at the server's log.",
    "requests-missing": "The generator reports another number of requests than it was told to make.",
    "finish-other": "The server ended requests for another reason than their length: it aborted them, or saw a stop token.",
    "usage-mismatch": "What the server counts in its metrics is not what its answers claim. One of them lies, and with it the tok/s.",
    "prefix-cached": "A prefix cache answered prompts; elsewhere that made the first token come up to 49 times sooner (vllm #54227). "
    "Serve with --no-enable-prefix-caching.",
    "stream-merged": "Tokens came at once, as where a machine is too busy to send or to hear them one by one; their times say nothing of "
    "the wheel. The leg is measured again.",
    "times-impossible": "A time is not above zero, or a first token came after the last: a clock was set, or the generator errs.",
    "above-roofline": "More bytes per second than memory gives: look at the bytes per token, at caches, and at uncounted speculation.",
    "speculation-uneven": "The server counts drafts and steps that do not add up to the tokens that it gave, so steps/s cannot be told.",
    "counters-missing": "The server does not give the metrics that the check needs, or they go backwards, as after a restart.",
}

#: Seconds that no decode step is shorter than: a launch of one kernel alone takes some microseconds, and a step has dozens.
STEP = 50e-6

_FINISHED = "vllm:request_success_total"
_GIVEN = "vllm:generation_tokens_total"
#: Steps and tokens that speculation counts may miss its first token and the last draft of each answer.
_SLACK = 2


class Counted(msgspec.Struct, frozen=True):
    """What the server's counters say of a leg, warm-ups included."""

    finished: int
    by_length: int
    tokens: int
    hits: float | None
    drafts: int
    drafted: int
    accepted: int


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> Counted | None:
    """Return what happened between two readings of the server's counters; None where they are missing or went backwards."""

    def grown(*names: str) -> float | None:
        for name in names:
            if name in after:
                return after[name] - before.get(name, 0.0)
        return None

    finished, tokens = grown(_FINISHED), grown(_GIVEN)
    lengths = sum(value - before.get(name, 0.0) for name, value in after.items() if name.startswith(_FINISHED + "{") and '"length"' in name)
    if finished is None or tokens is None or min(finished, tokens, lengths) < 0:
        return None
    asked, hits = grown("vllm:prefix_cache_queries_total"), grown("vllm:prefix_cache_hits_total")
    drafts, drafted, accepted = (
        grown(f"vllm:spec_decode_num_{what}_total") or 0.0 for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    share = None if asked is None or hits is None else hits / asked if asked > 0 else 0.0
    return Counted(round(finished), round(lengths), round(tokens), share, round(drafts), round(drafted), round(accepted))


def speculation(run: LoadResult, found: Counted) -> Speculation | None:
    """
    Return steps per second, tokens per step and acceptance; None where the server does not speculate.

    Every step gives one token and the drafts that were accepted (gates.md §2.3b), so length = 1 + accepted / drafts; the first token of an
    answer comes of its prompt. Counters hold the warm-ups too, which are alike, so the rate is told from the counted requests alone.
    """
    if not found.drafts:
        return None
    length = 1 + found.accepted / found.drafts
    decoded = sum(max(0, one.output_tokens - 1) for one in run.requests)
    return Speculation(decoded / length / run.seconds, length, found.accepted / found.drafted if found.drafted else 0.0)


def reasons(order: LoadSpec, run: LoadResult, found: Counted | None, *, prefix_hits: float, roofline: float | None) -> tuple[Reason, ...]:
    """
    Return why the leg does not count; nothing for one that does.

    Args:
        found: What the server counted; None where it does not.
        prefix_hits: The share of cached prompt tokens from which on it is invalid.
        roofline: Share of the bandwidth that the rate needs; None where not known.
    """
    return (*_of_requests(order, run), *_of_counters(order, run, found, prefix_hits), *_of_memory(roofline))


def passing(order: LoadSpec, run: LoadResult, found: Counted | None, wrong: Iterable[Reason]) -> tuple[Reason, ...]:
    """
    Return what a busy machine does to a leg, which is then measured again; nothing where the leg is *wrong* otherwise.

    Where the server's own counters have every token, but the generator heard them in one lump at the end, or counted fewer pieces than
    tokens, the times per token are nobody's. Both were seen with a vLLM on two busy cores.
    """
    others = [one for one in wrong if one.reference != "answer-other"]
    if others or found is None or found.tokens != found.finished * order.output_tokens:
        return ()
    made = [Reason("stream-merged", f"{one.says}; the server counts all of them") for one in wrong]
    steps = 1 + found.accepted / found.drafts if found.drafts else 1.0
    if lumps := [one for one in run.requests if one.output_tokens > 1 and one.tpot * steps < STEP]:
        says = f"the tokens of {len(lumps)} of {len(run.requests)} answers came at once, {1e6 * lumps[0].tpot:.1f} µs apart"
        made.append(Reason("stream-merged", says))
    return tuple(made)


def _of_requests(order: LoadSpec, run: LoadResult) -> Iterator[Reason]:
    failed = [one for one in run.requests if one.error]
    whole = [one for one in run.requests if not one.error]
    if failed:
        yield Reason("request-failed", f"{len(failed)} of {len(run.requests)} requests failed, the first one: {failed[0].error[:200]}")
    if len(run.requests) != order.requests:
        yield Reason("requests-missing", f"{len(run.requests)} requests are reported, {order.requests} were ordered")
    if others := [one for one in whole if one.output_tokens != order.output_tokens]:
        yield Reason("answer-other", f"{len(others)} answers do not have {order.output_tokens} tokens, the first one has {others[0].output_tokens}")
    if order.prompt_file is None and (others := [one for one in whole if one.prompt_tokens != order.prompt_tokens]):
        yield Reason("prompt-other", f"{len(others)} prompts do not have {order.prompt_tokens} tokens, the first one has {others[0].prompt_tokens}")
    if [one for one in whole if not 0 < one.ttft <= one.latency] or run.seconds <= 0:
        yield Reason("times-impossible", "a request ends before it begins, or its first token comes after its last")


def _of_counters(order: LoadSpec, run: LoadResult, found: Counted | None, prefix_hits: float) -> Iterator[Reason]:
    if found is None:
        yield Reason("counters-missing", f"{_FINISHED} or {_GIVEN} is not there, or went backwards")
        return
    if found.by_length != found.finished:
        yield Reason("finish-other", f"{found.finished - found.by_length} of {found.finished} requests ended otherwise than by length")
    # Warm-ups and the generator's own trial have the same length.
    if found.finished < len(run.requests) or found.tokens != found.finished * order.output_tokens:
        yield Reason("usage-mismatch", f"the server counts {found.tokens} tokens in {found.finished} answers of {order.output_tokens}")
    if found.hits is not None and found.hits >= prefix_hits:
        yield Reason("prefix-cached", f"{100 * found.hits:.1f} % of the prompt tokens came from a cache")
    if found.drafts and not _adds_up(found):
        given = found.drafts + found.accepted
        says = f"{found.drafts} steps and {found.accepted} accepted drafts give {given} of {found.tokens} tokens"
        yield Reason("speculation-uneven", says)


def _adds_up(found: Counted) -> bool:
    """Whether steps and accepted drafts give the tokens behind the first ones; a draft at an answer's end may be cut off."""
    decoded, given = found.tokens - found.finished, found.drafts + found.accepted
    longest = 1 + found.drafted / found.drafts
    return decoded - _SLACK * found.finished <= given <= decoded + _SLACK * found.finished * longest


def _of_memory(roofline: float | None) -> Iterator[Reason]:
    if roofline is not None and roofline > 1:
        yield Reason("above-roofline", f"the rate needs {100 * roofline:.0f} % of the memory's bandwidth")
