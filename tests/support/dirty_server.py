"""Servers whose answers are dirty in a share of sequences, under one switch alone, and what the rate gate says of them."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace
from tests.support.byte_model_server import ByteModelServer, Message, called, sound_talk

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.gates import core, dirty_text, text_checks

ROOT = Path(__file__).parents[2]
_TOY = recipes.load(ROOT, "toy-cpu")
RECIPE = replace(_TOY, abilities=("chat", "tools"), tool_parser="hermes", plan=replace(_TOY.plan, max_num_seqs=8))

#: The thing itself, in the words of reports: a foreign word, half a character, markup, a call that is cut, loops, nothing at all, and another language.
DIRT: Sequence[Message] = (
    {"content": "One sees a heron 的 and two boats."}, {"content": "One sees a her\ufffdn and two boats."},
    {"content": "One sees a heron.<tool_call>{"}, called('{"town": "Lis'), {"content": "One sees" + " a heron and" * 12},
    {"content": ""}, {"content": "One sees a heron near the water. " * 3}, {"content": "Man sieht einen Reiher und zwei Boote, und das Wasser ist nicht tief."},
)  # fmt: skip
#: What comes in the place of a call.
DROPPED: Message = {"content": "All right."}
BATCH, DRAFTS = "dirty-text-batch", "dirty-text-drafts"
Condition = Callable[[ByteModelServer, int, int], bool]
#: The check of a switch → when a server is dirty: by itself, the tokens of the prefix cache, and the requests that it answers at the time.
SWITCHES: Mapping[str, Condition] = {
    DRAFTS: lambda server, _, __: server.drafts,
    BATCH: lambda _, __, running: running > 1,
    "dirty-text-cache": lambda _, cached, __: cached > 0,
    "dirty-text-stock": lambda *_: True,
}


class Talker:
    """
    Answers as a sound model does, but for one of *every* so many answers under a condition, each drawn by itself.

    Args:
        pause_s: Seconds of an answer, so that requests of a batch meet, also where processors are few.
    """

    def __init__(self, server: ByteModelServer, every: int, condition: Condition, seed: int = 0, pause_s: float = 0.0) -> None:
        self._server, self._every, self._condition, self._pause_s = server, every, condition, pause_s
        self._lock, self._random = threading.Lock(), random.Random(seed)

    def __call__(self, request: Message, cached: int, running: int) -> tuple[Message, str]:
        time.sleep(self._pause_s)
        if self._condition(self._server, cached, self._server.counts["running"]):
            with self._lock:
                if self._random.random() * self._every < 1:
                    return self._random.choice((*DIRT, DROPPED) if request.get("tools") else DIRT), "stop"
        return sound_talk(request, cached, running)


def record(policy: text_checks.GenerationPolicy, every: int = 0) -> dirty_text.StockText:
    """Return the answers of a stock wheel that is dirty in one of *every* so many; in none without."""
    with ByteModelServer() as stock:
        if every:
            stock.talk = Talker(stock, every, lambda *_: True, 11)
        return dirty_text.record(policy, stock.client, "{prompt}", RECIPE, core.server_under_test.ServerIdentity(wheel="b" * 64))


def rates(
    policy: text_checks.GenerationPolicy, every: int, condition: Condition, stock: dirty_text.StockText, *, pause_s: float = 0.0, drafts: bool = True
) -> dict[str, core.verdict.Check]:
    """
    Return the checks of a server that drafts tokens and is dirty in one of *every* so many answers under *condition*.

    Args:
        stock: Of `record`.
        drafts: Whether it is asked without drafts, too.
    """
    with ByteModelServer() as ours, ByteModelServer() as plain:
        ours.drafts = True
        for seed, server in enumerate((ours, plain), start=9):
            server.talk = Talker(server, every, condition, seed, pause_s)
        text = dirty_text.DirtyText(policy, ours.client, "{prompt}", RECIPE)
        found = [*text.judge(ours.client, stock)]
        if drafts:
            found.append(text.drafts_check(plain.client))
    return {check.name: check for check in found}
