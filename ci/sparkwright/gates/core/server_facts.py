"""
Facts about a server that it states itself, or that a profile shows: nothing is typed in advance.

They are recorded of the stock wheel (``observed.json`` in the folder of the reference), observed of
the wheel under test, and part of its verdict.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.gates.core.server_under_test import ServerIdentity

#: vLLM's counters of tokens that were looked up in its prefix cache, and found there.
CACHE_QUERIES, CACHE_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
#: Its counter of drafts, which is there if tokens are drafted.
DRAFTS = "vllm:spec_decode_num_drafts_total"
#: Its configuration, in the labels of a metric (`CacheConfig.metrics_info`, 0.20.1 to 0.33.0).
_CACHE = "vllm:cache_config_info{"
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Count = Annotated[int, Meta(ge=0)]
#: Tokens of a large block of a prefix cache, as Qwen3-Next has them on 0.33.0, for estimates.
LARGE_BLOCK = 560
#: A share of time.
Fraction = Annotated[float, Meta(ge=0, le=1)]


#: Tokens of the prompt and of the answer by which the pace is measured.
PACE_PROMPT, PACE_ANSWER = 512, 33


class Pace(msgspec.Struct, frozen=True):
    """
    How fast a model is served here, one request at a time; gates estimate their length by it.

    Attributes:
        start_s: Seconds from the start of the server to its first answer.
        prefill_tokens_s: Tokens of prompts that are read in a second.
        decode_tokens_s: Tokens of answers in a second.
        requests_s: Requests in a second, each of a short prompt and one token of answer.
    """

    start_s: float
    prefill_tokens_s: float
    decode_tokens_s: float
    requests_s: float

    def round(self, prompt: int, answer: int, concurrency: int = 1) -> float:
        """
        Return the seconds of *concurrency* requests at once.

        A step of n answers takes n**0.4 times as long as a step of one: 32 of them had 8 times the
        throughput of one on a Spark (seed report 000, 60 and 487 tok/s).
        """
        return (
            concurrency * prompt / self.prefill_tokens_s
            + answer * math.pow(concurrency, 0.4) / self.decode_tokens_s
        )


def measure_pace(client: Client, start_s: float) -> Pace:
    """Measure the pace of the server that *client* asks, which started in *start_s* seconds."""

    def seconds(prompt: list[int], max_tokens: int, salt: str) -> float:
        began = time.monotonic()
        client.complete(prompt, max_tokens=max_tokens, ignore_eos=True, cache_salt=salt)
        return max(time.monotonic() - began, 1e-4)

    tokens = list(client.tokenize("One night on a Spark ends with a verdict. " * PACE_PROMPT))
    long = tokens[: min(PACE_PROMPT, client.max_model_len() // 2)]
    short, answer = long[:8], min(PACE_ANSWER, client.max_model_len() // 4)
    # The first request of a shape may compile.
    for prompt, count in ((long, 1), (short, answer)):
        seconds(prompt, count, "pace-first")
    first, prefill = seconds(short, 1, "pace-short"), seconds(long, 1, "pace-long")
    decode = seconds(short, answer, "pace-decode")
    return Pace(
        start_s,
        (len(long) - len(short)) / max(prefill - first, 1e-4),
        (answer - 1) / max(decode - first, 1e-4),
        1 / first,
    )


class PrefixCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The prefix cache of a server.

    Attributes:
        block: Tokens of a block, by ``/metrics``; 0 without a prefix cache.
        prompt: Tokens of the prompt that was sent twice; 0 if none was.
        queries, hits: Tokens of the second that were looked up, and found.
    """

    block: Count = 0
    prompt: Count = 0
    queries: Count = 0
    hits: Count = 0


class ObservedServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The facts about one launch of a server.

    Attributes:
        identity: The wheel, the model and the machine.
        recipe: Name of the recipe; empty without one.
        name: Under which the model is served, by ``/v1/models``.
        version: Of vLLM, by ``/version``.
        max_model_len: Tokens of the longest request, by ``/v1/models``.
        prefix_cache: As observed.
        drafts: Whether tokens are drafted.
        lines: Name of a line of ``ci/gates/contract.yaml`` → its values in the log.
        kernels: ``decode moe`` and the like → name of a kernel → its share of that time.
        classes: ``decode moe`` and the like → class of the kernels → its share of that time.
        times: Phase → microseconds of its kernels, and of those of them that only help.
    """

    identity: ServerIdentity
    recipe: str
    name: str
    version: str
    max_model_len: Annotated[int, Meta(ge=1)]
    prefix_cache: PrefixCache
    drafts: bool
    lines: dict[str, tuple[str, ...]]
    kernels: dict[str, dict[str, Fraction]]
    classes: dict[str, dict[str, Fraction]]
    times: dict[str, tuple[Count, Count]]
    format: Literal[1] = 1


def cache_block(metrics: Mapping[str, float]) -> int:
    """
    Return the tokens of a block of the prefix cache by a server's *metrics*; 0 without one.

    Raises:
        ServerInvalid: The server does not state it (``answer-unreadable``).
    """
    lines = [name for name in metrics if name.startswith(_CACHE)]
    labels = dict(_LABEL.findall(lines[0])) if lines else {}
    enabled, block = labels.get("enable_prefix_caching"), labels.get("block_size", "")
    if enabled == "False":
        return 0
    # Layers may have blocks of several sizes; 0.33.0 states that of full attention, too.
    sizes = [block, labels.get("effective_attention_block_size", "None").replace("None", block)]
    if enabled != "True" or not all(re.fullmatch(r"[1-9]\d{0,6}", size) for size in sizes):
        raise ServerInvalid("answer-unreadable", f"{_CACHE}…}} states no block: {labels}")
    return max(map(int, sizes))


def prompt_length(block: int, blocks: int, room: int) -> int:
    """
    Return the tokens of a prompt of *blocks* and a half, or of fewer that fit into *room*.

    Raises:
        ServerInvalid: Not even one block and a half fit (``prompt-too-long``).
    """
    count = min(blocks, (room - block // 2) // block)
    if count < 1:
        message = f"a block of the prefix cache has {block} tokens, and a request {room} at most"
        raise ServerInvalid("prompt-too-long", message)
    return count * block + block // 2


def repeat(client: Client, tokens: list[int], salt: str) -> PrefixCache:
    """Send the prompt *tokens* twice under *salt*, and return what the second one found."""
    block = cache_block(client.metrics())
    client.complete(tokens, max_tokens=1, cache_salt=salt)
    before = client.metrics()
    client.complete(tokens, max_tokens=1, cache_salt=salt)
    after = client.metrics()
    growth = [round(after.get(key, 0) - before.get(key, 0)) for key in (CACHE_QUERIES, CACHE_HITS)]
    return PrefixCache(block, len(tokens), *growth)
