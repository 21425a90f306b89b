"""
Mixed load on a server: several requests at once, short and long prompts, some that share a prefix, some whose client goes away.

What is asked follows from a seed and a count, so two soaks ask the same in the same order per worker. A cancelled request is a client whose
time is over: it closes the connection in the middle of the answer, as users do, and the server has to take its blocks back.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import msgspec

from sparkwright.bench.server.client import Client
from sparkwright.bench.server.openai_schema import ServerInvalid
from sparkwright.gates.generation.detectors import longest_run

#: What a client of ours says when its own time is over.
LATE = ("server-slow", "server-silent")
#: The most faults kept of one stretch; their number is counted on.
MOST_KEPT = 5


class LoadPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What is asked.

    Attributes:
        concurrencies: How many requests at once, in turn; each for *phase* seconds.
        prompts: Lengths of prompts in tokens; those that the model cannot hold are left out.
        answers: Lengths of answers in tokens.
        shared: The share of requests that begin with the same *prefix* tokens.
        cancelled: The share of requests whose client goes away, after *patience* seconds at most.
        line: The text that prompts are cut from, as `prompts.Long` has it.
        seed: Of what is asked.
    """

    concurrencies: tuple[int, ...]
    phase: float
    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    shared: float
    prefix: int
    cancelled: float
    patience: float
    line: str
    seed: int = 1

    def __post_init__(self) -> None:
        if not (self.concurrencies and self.prompts and self.answers) or min(*self.concurrencies, *self.prompts, *self.answers, 1) < 1:
            raise ValueError("concurrencies, prompts and answers are numbers from 1 on")
        if not (0 <= self.shared <= 1 and 0 <= self.cancelled < 1 and self.phase > 0 and self.patience > 0 and self.prefix >= 0):
            raise ValueError("shares are parts of 1, times are above 0")
        if "{number}" not in self.line:
            raise ValueError("the line that prompts are cut from has no place for the {number}")


class Fault(msgspec.Struct, frozen=True):
    """A request that went wrong: the reference of the reason, what was seen, and which request of which worker it was, where it matters."""

    reference: str
    says: str
    worker: int = 0
    number: int = 0


class Stretch(msgspec.Struct, frozen=True):
    """
    What was asked in a stretch of time.

    Attributes:
        asked: Requests sent.
        whole: Those answered as they should be.
        cancelled: Those that we gave up on.
        tokens: That whole answers have.
        failed: Those that went wrong, the first of them in *faults*.
        odd: Whole answers that say one token again and again, the first of them in *oddities*.
        by_concurrency: Whole answers by the number of requests at once, as text.
    """

    asked: int = 0
    whole: int = 0
    cancelled: int = 0
    tokens: int = 0
    failed: int = 0
    faults: tuple[Fault, ...] = ()
    odd: int = 0
    oddities: tuple[Fault, ...] = ()
    by_concurrency: dict[str, int] = {}

    def with_(self, other: Stretch) -> Stretch:
        """Return this stretch and the *other* as one."""
        names = {*self.by_concurrency, *other.by_concurrency}
        return Stretch(
            self.asked + other.asked, self.whole + other.whole, self.cancelled + other.cancelled, self.tokens + other.tokens,
            self.failed + other.failed, (*self.faults, *other.faults)[:MOST_KEPT],
            self.odd + other.odd, (*self.oddities, *other.oddities)[:MOST_KEPT],
            {name: self.by_concurrency.get(name, 0) + other.by_concurrency.get(name, 0) for name in sorted(names, key=int)},
        )  # fmt: skip


class Request(msgspec.Struct, frozen=True):
    """One request: *patience* in seconds where it will be cancelled, else None."""

    prompt: tuple[int, ...]
    tokens: int
    patience: float | None


def request(policy: LoadPolicy, text: Sequence[int], limit: int, worker: int, number: int) -> Request:
    """
    Return the *number*-th request of a *worker*.

    Args:
        text: Tokens to cut prompts from, at least as many as the longest has.
        limit: The most tokens that a prompt and its answer may have together.
    """
    draw = random.Random(f"{policy.seed}/{worker}/{number}")  # noqa: S311  it decides what is asked, and hides nothing
    tokens = draw.choice([one for one in policy.answers if one < limit] or [1])
    length = draw.choice([one for one in policy.prompts if one + tokens <= limit] or [max(1, limit - tokens)])
    begin = draw.randrange(max(1, len(text) - length + 1))
    prompt = tuple(text[begin : begin + length])
    if draw.random() < policy.shared:
        prompt = (*text[: min(policy.prefix, length - 1)], *prompt)[:length]
    patience = draw.uniform(0.02, 1.0) * policy.patience if draw.random() < policy.cancelled else None
    return Request(prompt, tokens, patience)


class Load:
    """
    Workers that ask until `stop`; as many of them as `concurrency` says work, the others wait.

    Args:
        url: The server's address; *model*, its name there.
        run: From how many tokens in a row on an answer is odd.
    """

    def __init__(self, policy: LoadPolicy, url: str, model: str, text: Sequence[int], limit: int, run: int) -> None:
        self._policy, self._url, self._model, self._text, self._limit, self._run = policy, url, model, text, limit, run
        self._lock, self._change = threading.Lock(), threading.Condition()
        self._stretch, self._stopped, self._concurrency = Stretch(), False, 0
        self._workers = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(max(policy.concurrencies))]
        for worker in self._workers:
            worker.start()

    def set_concurrency(self, concurrency: int) -> None:
        with self._change:
            self._concurrency = concurrency
            self._change.notify_all()

    def taken(self) -> Stretch:
        """Return what was done since the last call."""
        with self._lock:
            stretch, self._stretch = self._stretch, Stretch()
        return stretch

    def stop(self, wait: float) -> int:
        """End the workers, each after its request; return how many had not ended after *wait* seconds."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        end = time.monotonic() + wait
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        return sum(worker.is_alive() for worker in self._workers)

    def _work(self, worker: int) -> None:
        client = Client(self._url, self._model)
        number = 0
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stopped or worker < self._concurrency)
                if self._stopped:
                    return
                concurrency = self._concurrency
            made = self._ask(client, worker, number, concurrency)
            number += 1
            with self._lock:
                self._stretch = self._stretch.with_(made)
            if made.failed:
                # A server that refuses at once must not be asked a thousand times a second.
                with self._change:
                    self._change.wait_for(lambda: self._stopped, timeout=1.0)

    def repeats_alone(self, fault: Fault) -> bool:
        """Return whether the request behind *fault* is answered by one token again and again also when nothing else is asked."""
        made = request(self._policy, self._text, self._limit, fault.worker, fault.number)
        try:
            answer = Client(self._url, self._model).complete(made.prompt, max_tokens=made.tokens, ignore_eos=True)
        except ServerInvalid:
            return False
        return longest_run(answer.tokens) >= self._run

    def _ask(self, client: Client, worker: int, number: int, concurrency: int) -> Stretch:
        made = request(self._policy, self._text, self._limit, worker, number)
        if made.patience is not None:
            client = Client(self._url, client.model() if self._model == "" else self._model, deadline=made.patience)
        try:
            answer = client.complete(made.prompt, max_tokens=made.tokens, ignore_eos=True)
        except ServerInvalid as error:
            if made.patience is not None and error.reference in LATE:
                return Stretch(asked=1, cancelled=1)
            return Stretch(asked=1, failed=1, faults=(Fault(error.reference, error.says),))
        found, count = longest_run(answer.tokens), len(answer.tokens)
        says = f"{found} times the same token in {count}, after a prompt of {len(made.prompt)}"
        odd = (Fault("token-run", says, worker, number),) if found >= self._run else ()
        return Stretch(asked=1, whole=1, tokens=count, odd=len(odd), oddities=odd, by_concurrency={str(concurrency): 1})
