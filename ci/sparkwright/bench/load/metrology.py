"""
Is the load generator right? It runs against the reference server, whose times are known, before anything else is measured.

Two profiles differ in the ratio of their times, so that no wrong factor fits both, and in the tokens of a chunk, so that who counts chunks
is seen. (The pattern, strict below and with slack above, is that of inference-perf's end-to-end test of its metrics.) The server says
how late it was itself: where that explains what is seen, the machine is blamed and not the generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sparkwright.bench.load.order import Generator, LoadInvalid, Order, Run
from sparkwright.bench.load.reference.behaviour import Behaviour, Lateness
from sparkwright.bench.load.reference.running import Running, started
from sparkwright.bench.server.openai_schema import ServerInvalid
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.verdict import Check, Figure, invalid, passed

TITLE = "the load generator"

REASONS: Mapping[str, str] = {
    "generator-biased": "It does not say what the reference server did. End what else runs here, or take another release of the generator.",
    "machine-late": "The reference server itself was late, each time: the machine is too busy to measure on. End what else runs here.",
    "generator-failed": "The load generator ended with an error, or did not make the requests that were ordered. Its words are quoted.",
    "generator-late": "The load generator was not through in its time. The server hangs, streams without end, or is far too slow.",
    "generator-unreadable": "What the load generator wrote is not in its form. Another release of it may have been put in its place.",
    "texts-unreadable": "The file of prompts is missing, is too large, or is not a JSON object with a prompt in each line.",
}

#: Seconds by which a first token may seem to come before it was sent: the clocks of two processes are read one after the other.
EARLY = 0.0005


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reference server's true times, in seconds, the tokens of a chunk, and those of an answer."""

    name: str
    ttft: float
    tpot: float
    chunk: int
    answer: int

    def behaviour(self) -> Behaviour:
        """Return the server of this profile."""
        return Behaviour(ttft=self.ttft, tpot=self.tpot, chunk=self.chunk)


class MetrologyPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/metrology.yaml``, which says where each threshold comes from.

    Attributes:
        stack: Whose official wheel of vLLM holds the generator.
        profiles: What the server does. *concurrencies*: at how many requests at a time, each.
        rounds: Requests of each slot. *least*: of all slots together.
        prompt: Tokens of a prompt.
        tpot: The part of the true time per token by which the median may differ.
        ttft: Seconds by which the median time to the first token may be above the true one.
        rate: The part of the true throughput by which it may differ.
        late: The part of a bound that the server itself may use up before the machine counts as late.
        attempts: How often a check that fails is made in all.
        patience: Seconds for each.
    """

    stack: str
    profiles: tuple[Profile, ...]
    concurrencies: tuple[int, ...]
    rounds: int
    least: int
    prompt: int
    tpot: float
    ttft: float
    rate: float
    late: float
    attempts: int
    patience: float

    def __post_init__(self) -> None:
        ratios = {round(one.ttft / one.tpot, 6) for one in self.profiles if one.tpot > 0}
        if len(ratios) < 2 or len({one.chunk for one in self.profiles}) < 2:
            raise ValueError("two profiles at least differ in the ratio of their times, and in their chunks")
        counts = (*self.concurrencies, self.rounds, self.least, self.prompt, self.attempts)
        bounds = (self.tpot, self.ttft, self.rate, self.late, self.patience)
        if not self.concurrencies or min(counts) < 1 or not all(one > 0 for one in bounds):
            raise ValueError("counts are 1 or more, bounds are above 0")


def policy(context: RunContext) -> MetrologyPolicy:
    """Return ``ci/gates/metrology.yaml``; raise `file-invalid` where it is none."""
    return strict_yaml.load(context.project.root / "ci" / "gates" / "metrology.yaml", MetrologyPolicy)


def qualify(generator: Generator, wanted: MetrologyPolicy, *, tokenizer: Path | None = None) -> tuple[Check, ...]:
    """Return a check of *generator* for each profile and concurrency of the policy *wanted*; all of them pass, or nothing is measured."""
    made: list[Check] = []
    with console.progress("qualify the load generator", len(wanted.profiles) * len(wanted.concurrencies)) as line:
        for profile in wanted.profiles:
            with started(profile.behaviour()) as server:
                for concurrency in wanted.concurrencies:
                    line.update(len(made), f"{profile.name}, {concurrency} at a time")
                    made.append(_check(generator, wanted, profile, concurrency, server, tokenizer))
        line.update(len(made))
    return tuple(made)


def _check(
    generator: Generator, wanted: MetrologyPolicy, profile: Profile, concurrency: int, server: Running, tokenizer: Path | None
) -> Check:  # fmt: skip
    """Return the first attempt that passes; otherwise the one that says most: a bias while the server was in time."""
    found: list[Check] = []
    for attempt in range(wanted.attempts):
        order = Order(
            server.url, server.behaviour.name, wanted.prompt, profile.answer, concurrency, _requests(wanted, concurrency),
            warmups=0, seed=attempt, tokenizer=tokenizer, patience=wanted.patience,
        )  # fmt: skip
        try:
            server.lateness()
            run = generator.measure(order)
            found.append(judge(wanted, profile, concurrency, run, server.lateness()))
        except (LoadInvalid, ServerInvalid) as error:
            reference = error.reference if isinstance(error, LoadInvalid) else "generator-failed"
            found.append(invalid(_name(profile, concurrency), f"{generator.name}: {error.says}", reference))
        if found[-1].state == "pass":
            return found[-1]
    return min(found, key=lambda check: check.reason == "machine-late")


def _requests(wanted: MetrologyPolicy, concurrency: int) -> int:
    return max(wanted.least, wanted.rounds * concurrency)


def _name(profile: Profile, concurrency: int) -> str:
    return f"{profile.name}-c{concurrency}"


def judge(wanted: MetrologyPolicy, profile: Profile, concurrency: int, run: Run, late: Lateness) -> Check:
    """Return the check of *run*, made against a server of *profile* that was *late* itself."""
    name, figures = _name(profile, concurrency), tuple(_figures(wanted, profile, concurrency, run, late))
    if wrong := _miscounted(wanted, profile, concurrency, run):
        return invalid(name, f"{run.generator}: {wrong}", "generator-biased", figures=figures)
    outside = [one for one in figures if one.bound is not None and not -_below(one) <= one.value <= one.bound]
    if not outside:
        return passed(name, f"{run.generator} is right: " + ", ".join(map(_said, figures[:3])), figures=figures)
    own = _server_late(wanted, profile, late)
    if own:
        return invalid(name, f"the reference server was late itself: {own}", "machine-late", figures=figures)
    return invalid(name, f"{run.generator} is wrong: " + ", ".join(map(_said, outside)), "generator-biased", figures=figures)


def _figures(wanted: MetrologyPolicy, profile: Profile, concurrency: int, run: Run, late: Lateness) -> Iterator[Figure]:
    """Yield how far off the medians are; the bounded ones decide."""
    count = len(run.requests)
    yield Figure("time per token", 100 * (run.tpot / profile.tpot - 1), "%", count, bound=100 * wanted.tpot)
    yield Figure("time to first token", 1000 * (run.ttft - profile.ttft), "ms", count, bound=1000 * wanted.ttft)
    turns = math.ceil(_requests(wanted, concurrency) / concurrency)
    true = _requests(wanted, concurrency) * profile.answer / (turns * profile.behaviour().seconds(profile.answer))
    yield Figure("throughput", 100 * (run.rate / true - 1), "%", count, bound=100 * wanted.rate)
    yield Figure("the server's time per token", 100 * (late.tpot / profile.tpot - 1), "%", late.requests)
    yield Figure("the server's time to first token", 1000 * (late.ttft - profile.ttft), "ms", late.requests)


def _below(figure: Figure) -> float:
    """Return by how much *figure* may be below: a first token cannot be seen before it is sent."""
    return 1000 * EARLY if figure.unit == "ms" else figure.bound or 0.0


def _said(figure: Figure) -> str:
    return f"{figure.name} {figure.value:+.2f} {figure.unit}"


def _miscounted(wanted: MetrologyPolicy, profile: Profile, concurrency: int, run: Run) -> str:
    """Return what is wrong with the counts of *run*; empty where nothing is."""
    count = _requests(wanted, concurrency)
    if len(run.requests) != count:
        return f"{len(run.requests)} requests were counted, {count} ordered"
    chunks = 1 + math.ceil((profile.answer - 1) / profile.chunk)
    for one in run.requests:
        if one.error:
            return f"a request failed: {one.error}"
        if (one.tokens, one.prompt) != (profile.answer, wanted.prompt) or one.chunks not in (0, chunks):
            told = f"{one.tokens} tokens, {one.chunks or 'untold'} chunks and {one.prompt} of the prompt were counted"
            return f"{told}; {profile.answer}, {chunks} and {wanted.prompt} are right"
    return ""


def _server_late(wanted: MetrologyPolicy, profile: Profile, late: Lateness) -> str:
    """Return how the server was late; empty where it was not, to the part of each bound that it may use up."""
    ttft, tpot = late.ttft - profile.ttft, late.tpot / profile.tpot - 1
    if ttft > wanted.late * wanted.ttft:
        return f"its first tokens by {1000 * ttft:.2f} ms"
    return f"its tokens by {100 * tpot:+.2f} %" if abs(tpot) > wanted.late * wanted.tpot else ""
