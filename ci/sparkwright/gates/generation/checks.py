"""
What the words gate makes of answers: checks that are pure functions of them.

An answer may be missing (the server gave none that counts); the check of the streams says so, and the others judge what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sparkwright.bench.server.openai_schema import Completion
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    failed,
    inconclusive,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.generation import detectors
from sparkwright.gates.generation.detectors import Bounds, Detector
from sparkwright.gates.generation.policy import Fitted, answered

#: Stable reference → what it means and what to do; what a server does wrong is in `sparkwright.bench.server.openai_schema.REASONS`.
MEANINGS: Mapping[str, str] = {
    "prompt-unencodable": "The model's tokenizer has no tokens for characters of the prompt; these prompts are not for it.",
    "token-count-wrong": "A completion has another number of tokens than was asked for with ignore_eos. The server ends answers early.",
    "rerun-differs": "The same request gave other tokens at concurrency 1. A kernel races, or reads what it should not.",
    "token-zero-run": "Token 0 again and again is the argmax of NaN logits. Look for them with VLLM_COMPUTE_NANS_IN_LOGITS=1.",
    "token-run": "One token again and again: the model does not hear its own words. Attention, KV cache or sampling are broken.",
    "token-share": "One token is more than half of an answer.",
    "repetition": "The same few tokens in turn. Attention, KV cache or positions are broken.",
    "compressible": "The answer says nearly the same again and again, a little varied.",
    "unreadable": "Bytes that are no characters: the model draws tokens without sense.",
    "answer-short": "The model ends its answer at once, although it was asked for a long one.",
    "entropy-collapsed": "The model is sure of every token. Logits are scaled wrongly, or the model repeats itself.",
    "logprob-nan": "A log probability is not a number.",
    "answers-wrong": "Too many answers lack what a sound model knows. Fluent words about other things mean wrong numbers.",
    "requests-corrupted": "vLLM counted requests whose logits were not a number.",
    "counter-absent": "The server does not count requests with NaN logits. Start it with VLLM_COMPUTE_NANS_IN_LOGITS=1.",
    "batch-differs": "Some answers differ in a batch from those given alone, as kernels do that are not batch-invariant; it only informs.",
    "policy-skips": "The profile of this kind of model says that it cannot be judged so; it says why.",
    "no-answers": "No answer arrived that could be judged; see the check `streams`.",
    "not-asked": "The policy does not ask for it.",
}


class Said(msgspec.Struct, frozen=True):
    """
    One prompt and what was answered.

    Attributes:
        first: The answer of the first pass; None where none that counts arrived.
        second: That of the second pass.
        words: The text before the answer's end.
        body: Its tokens.
    """

    fitted: Fitted
    first: Completion | None = None
    second: Completion | None = None
    words: str = ""
    body: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.fitted.prompt.name


def excerpt(text: str, most: int = 160) -> str:
    """Return the beginning of *text* on one line, nothing in it that a terminal obeys."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def count(said: Sequence[Said], tokens: int) -> Check:
    """Are there as many tokens as were asked for?"""
    judged = [one for one in said if one.first]
    wrong = [one for one in judged if one.first and (len(one.first.tokens) != tokens or one.first.finish_reason != "length")]
    if not judged:
        return not_run("token-count", "no answer arrived", "no-answers")
    if wrong:
        found = [(one.name, f"{len(one.first.tokens)}, {one.first.finish_reason}") for one in wrong if one.first]
        samples = [Sample(name, f"{tokens}, length", what) for name, what in found]
        return failed("token-count", f"{len(wrong)} of {len(judged)} answers lack tokens", "token-count-wrong", samples=samples)
    return passed("token-count", f"{len(judged)} answers of {tokens} tokens each")


def difference(name: str, one: Sequence[int], other: Sequence[int]) -> Sample | None:
    """Return where two answers begin to differ, with some tokens of both; None where they do not."""
    if tuple(one) == tuple(other):
        return None
    shared = zip(one, other, strict=False)
    at = next((at for at, (first, second) in enumerate(shared) if first != second), min(len(one), len(other)))
    return Sample(f"{name}, token {at}", " ".join(map(str, one[at : at + 8])), " ".join(map(str, other[at : at + 8])))


def identity(pairs: Sequence[tuple[str, Completion, Completion]], what: str = "two runs") -> Check:
    """Are the token ids of each pair of answers the same?"""
    if not pairs:
        return not_run("identical-reruns", "no prompt was answered twice", "no-answers")
    samples = [found for name, one, other in pairs if (found := difference(name, one.tokens, other.tokens))]
    figure = Figure("prompts that differ", len(samples), count=len(pairs), bound=0)
    if samples:
        says = f"{len(samples)} of {len(pairs)} prompts got other tokens in {what} at concurrency 1"
        return failed("identical-reruns", says, "rerun-differs", figures=[figure], samples=samples)
    return passed("identical-reruns", f"{len(pairs)} prompts, {what} at concurrency 1, the same tokens", figures=[figure])


def detected(said: Sequence[Said], detector: Detector, bounds: Bounds) -> Check:
    """Does *detector* stay silent on every answer? The figure is the answer that comes nearest to its bound."""
    judged = [one for one in said if one.first]
    if not judged:
        return not_run(detector.name, "no answer arrived", "no-answers")
    measures = {one.name: detector.measure(one.body, one.words) for one in judged}
    worst = (max if detector.alarm == "from" else min)(measures.values())
    figure = Figure(detector.quantity, worst, detector.unit, len(judged), bound=float(getattr(bounds, detector.bound)))
    bad = [one for one in judged if detector.alarms(one.body, one.words, bounds)]
    if not bad:
        return passed(detector.name, f"{detector.quantity}: {worst:.4g} at the worst of {len(judged)} answers", figures=[figure])
    limit = f"{'below' if detector.alarm == 'from' else 'at least'} {figure.bound:g}"
    samples = [Sample(one.name, limit, f"{measures[one.name]:.4g}: {excerpt(one.words)}") for one in bad]
    says = f"{detector.quantity}: {worst:.4g} ({limit} is asked), in {len(bad)} of {len(judged)} answers"
    return failed(detector.name, says, detector.reference, figures=[figure], samples=samples)


def entropy(steps: Mapping[str, Sequence[Mapping[int, float]]], least: float) -> Check:
    """Is the mean entropy over all *steps* (by prompt) at least *least* nat?"""
    everything = [step for answer in steps.values() for step in answer]
    if not everything:
        return not_run("entropy", "no log probabilities arrived", "no-answers")
    try:
        mean = detectors.mean_entropy(everything)
    except ValueError as error:
        return failed("entropy", f"{error}", "logprob-nan")
    figure = Figure("mean entropy, lower bound", mean, "nat", len(everything), bound=least)
    if mean < least:
        samples = [Sample(name, f"at least {least:g} nat", f"{detectors.mean_entropy(answer):.4g} nat") for name, answer in steps.items()]
        return failed("entropy", f"mean entropy {mean:.4g} nat, below {least:g}", "entropy-collapsed", figures=[figure], samples=samples)
    return passed("entropy", f"mean entropy at least {mean:.4g} nat over {len(everything)} tokens", figures=[figure])


def answers(said: Sequence[Said], least: int) -> Check:
    """Do at least *least* answers contain what was asked for?"""
    judged = [one for one in said if one.first]
    if not judged:
        return not_run("answers", "no answer arrived", "no-answers")
    wrong = [one for one in judged if not answered(one.fitted.prompt, one.words)]
    right = len(judged) - len(wrong)
    figure = Figure("right answers", right, count=len(judged), bound=least)
    samples = [Sample(one.name, f"/{one.fitted.prompt.answer}/", excerpt(one.words)) for one in wrong]
    says = f"{right} of {len(judged)} answers hold what was asked for; {least} are needed"
    if right >= least:
        return passed("answers", says, figures=[figure], samples=samples)
    # What did not arrive might have been right, and `streams` is not a pass then.
    if right + len(said) - len(judged) >= least:
        return inconclusive("answers", says, "no-answers", figures=[figure], samples=samples)
    return failed("answers", says, "answers-wrong", figures=[figure], samples=samples)


def corrupted(before: Mapping[str, float], after: Mapping[str, float], name: str) -> Check:
    """Is the counter of requests with NaN logits there, and zero since the server's start?"""
    if name not in after:
        says = "the server has no counter of requests with NaN logits: VLLM_COMPUTE_NANS_IN_LOGITS=1 is not set"
        return not_run("corrupted-requests", says, "counter-absent")
    total, earlier = after[name], before.get(name, 0.0)
    figures = [Figure("corrupted requests", total, bound=0), Figure("of them before this gate", earlier)]
    if total != 0 or earlier != 0:
        says = f"{total:g} requests had NaN logits, {earlier:g} of them before this gate"
        return failed("corrupted-requests", says, "requests-corrupted", figures=figures)
    return passed("corrupted-requests", "no request had NaN logits since the server's start", figures=figures)


def batch(alone: Mapping[str, Completion], together: Mapping[str, Completion | str], size: int) -> Check:
    """How many answers are the same in a batch of *size*? It only informs."""
    got = {name: found for name, found in together.items() if isinstance(found, Completion)}
    samples = [found for name, one in got.items() if (found := difference(name, alone[name].tokens, one.tokens))]
    samples += [Sample(name, "an answer", found) for name, found in together.items() if isinstance(found, str)]
    figures = [Figure("answers that differ", len(samples), count=len(together))]
    says = f"{len(together) - len(samples)} of {len(together)} answers at concurrency {size} are those given alone"
    if not together:
        return not_run("batch-identity", "no answer arrived", "no-answers", required=False)
    if samples:
        return failed("batch-identity", says, "batch-differs", figures=figures, samples=samples, required=False)
    return passed("batch-identity", says, figures=figures, required=False)


def streams(asked: int, broken: Sequence[tuple[str, str, str]]) -> Check:
    """Did every answer arrive whole? *broken* holds a name, a reference and the client's words for each that did not."""
    if broken:
        says = f"{len(broken)} of {asked} answers do not count; the first: {broken[0][2]}"
        samples = [Sample(name, "", f"{reference}: {words}") for name, reference, words in broken]
        return invalid("streams", says, broken[0][1], samples=samples)
    return passed("streams", f"{asked} answers arrived whole")
