"""What the reference server counts, under vLLM's names."""

from __future__ import annotations

import statistics
from collections import deque

from sparkwright.bench.load.reference.behaviour import Behaviour, Lateness

#: The most chunks and requests that are remembered for their lateness.
REMEMBERED = 200_000


class Counters:
    """The counters of a server with *behaviour*."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self.prompts = self.tokens = self.hits = self.steps = self.accepted = self.running = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._late: deque[float] = deque(maxlen=REMEMBERED)
        self._sent: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def asked(self, prompt: int, *, hit: bool) -> None:
        """Count a question of *prompt* tokens."""
        self.running += 1
        self.prompts += prompt
        self.hits += prompt if hit else 0

    def chunk(self, tokens: int, late: float, *, first: bool) -> None:
        """Count a chunk that was sent *late* seconds after its time."""
        self.tokens += tokens
        self._late.append(late)
        if not first and self._behaviour.drafts:
            self.steps += 1
            self.accepted += tokens - 1

    def ended(self, reason: str, ttft: float, tpot: float) -> None:
        """Count the end of an answer, and what was sent of it."""
        self.running -= 1
        self.finished[reason] += 1
        if reason == "length":
            self._sent.append((ttft, tpot))

    def lateness(self) -> Lateness:
        """Return how late the server was since this was last asked."""
        late, sent = sorted(self._late), list(self._sent)
        self._late.clear()
        self._sent.clear()
        return Lateness(
            len(late), len(sent), statistics.median(late or [0.0]), max(late, default=0.0),
            statistics.median([ttft for ttft, _ in sent] or [0.0]), statistics.median([tpot for _, tpot in sent] or [0.0]),
        )  # fmt: skip

    def text(self) -> str:
        """Return Prometheus' text form, of the series that a gate reads."""
        values = {
            "vllm:num_requests_running": self.running, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0.0,
            "vllm:prompt_tokens_total": self.prompts, "vllm:generation_tokens_total": self.tokens,
            "vllm:prefix_cache_queries_total": self.prompts, "vllm:prefix_cache_hits_total": self.hits,
        }  # fmt: skip
        if self._behaviour.drafts:
            values |= {
                "vllm:spec_decode_num_drafts_total": self.steps,
                "vllm:spec_decode_num_draft_tokens_total": self.steps * self._behaviour.drafts,
                "vllm:spec_decode_num_accepted_tokens_total": self.accepted,
            }
        labels = f'engine="0",model_name="{self._behaviour.name}"'
        lines = [f"{name}{{{labels}}} {float(value)}" for name, value in values.items()]
        lines += [
            f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{self._behaviour.name}"}} {float(count)}'
            for reason, count in self.finished.items()
        ]
        return "# The reference server of sparkwright.\n" + "\n".join(lines) + "\n"
