"""
G4: does the server say sensible words, the same ones twice?

Twelve greedy prompts (facts, arithmetic, translation, code, CJK, a long context) of 200 tokens, each answered twice at concurrency 1 with
the end token ignored. A model whose kernels are wrong says `!!!!`, repeats itself, answers fluently about something else, or says
something else the second time; each has its check. How close an answer comes to a bound is a figure of the check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from sparkwright.bench.server.client import Client, Completion
from sparkwright.bench.server.openai_schema import REASONS as SERVER_REASONS
from sparkwright.bench.server.openai_schema import ServerInvalid
from sparkwright.core.console import Progress, console
from sparkwright.gates.core.verdict import Check, Sample, declare, invalid, not_run, passed
from sparkwright.gates.generation import checks, detectors
from sparkwright.gates.generation.checks import Said
from sparkwright.gates.generation.policy import Fitted, GenerationPolicy, Profile, fit, holds

TITLE = "the words a model says"

CHECKS = (
    *declare("prompts", "streams", "token-count"),
    *declare("identical-reruns", *(one.name for one in detectors.DETECTORS), "entropy", "answers", "corrupted-requests", measured=True),
    *declare("cold-and-cached", "batch-identity", measured=True, role="informs"),
)

REASONS: Mapping[str, str] = {**SERVER_REASONS, **checks.MEANINGS}

#: vLLM's counter of requests with NaN logits, and that of tokens found in the prefix cache (Prometheus adds `_total`).
CORRUPTED, CACHED = "vllm:corrupted_requests_total", "vllm:prefix_cache_hits_total"
#: A server that gives no answer so many times in a row is not asked again: each time may take the client's whole deadline.
MOST_SILENT = 3
def run(policy: GenerationPolicy, client: Client, profile: str = "default") -> tuple[Check, ...]:
    """
    Return the checks of the gate.

    Args:
        profile: The kind of model, a name of *policy*'s profiles.

    Raises:
        ValueError: The policy has no such profile.
    """
    if profile not in policy.profiles:
        raise ValueError(f"the policy of the words has no profile {profile!r}; it has {', '.join(policy.profiles)}")
    kind = policy.profiles[profile]
    try:
        before = client.metrics()
        ends = _ends(client, kind.ends)
        fit, fitted = _fit(policy, kind, client)
    except ServerInvalid as error:
        return (invalid("streams", error.says, error.reference),)
    with console.progress("words", _steps(policy, len(fitted))) as progress:
        asking = _Asking(client, progress)
        said = _said(policy, asking, fitted, ends)
        reruns = _reruns(policy, asking, said, before)
        surprise = _entropy(policy, kind, asking, fitted)
        together = _batch(policy, asking, said)
    return (
        fit,
        checks.streams(asking.asked, asking.broken),
        checks.count(said, policy.tokens),
        *reruns,
        *(_detected(policy, kind, said, detector) for detector in detectors.DETECTORS),
        surprise,
        _skipped(kind, "answers") or checks.answers(said, kind.answers),
        _corrupted(client, before),
        together,
    )


def _steps(policy: GenerationPolicy, asked: int) -> float:
    return asked * (2 + bool(policy.logprobs.tokens) + bool(policy.batch))


class _Asking:
    """Asks, remembers what did not arrive, and gives up on a server that has gone."""

    def __init__(self, client: Client, progress: Progress) -> None:
        self.client, self._progress = client, progress
        self.asked, self.silent = 0, 0
        self.broken: list[tuple[str, str, str]] = []

    def ask(self, fitted: Fitted, tokens: int, top: int = 0) -> Completion | None:
        """Return the answer, or None where none that counts arrived."""
        if self.silent >= MOST_SILENT:
            return None
        self.asked += 1
        try:
            answer = self.client.complete(fitted.text, max_tokens=tokens, ignore_eos=True, logprobs=top or None)
        except ServerInvalid as error:
            self.broken.append((fitted.prompt.name, error.reference, error.says))
            self.silent += 1
            return None
        self.silent = 0
        self._progress.update(self._progress.done + 1)
        return answer

    def together(self, fitted: Sequence[Fitted], tokens: int, size: int) -> list[Completion | str]:
        """Return the answers of prompts that are asked *size* at a time; where none arrived, why."""

        def one(asked: Fitted) -> Completion | str:
            try:
                return self.client.complete(asked.text, max_tokens=tokens, ignore_eos=True)
            except ServerInvalid as error:
                return str(error)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, fitted))


def _ends(client: Client, texts: Sequence[str]) -> frozenset[int]:
    """Return the tokens that end an answer: those of *texts* that are one token, besides what the tokenizer puts before every text."""
    if not texts:
        return frozenset()
    prefix = client.tokenize("")
    found = (client.tokenize(text) for text in texts)
    return frozenset(tokens[-1] for tokens in found if len(tokens) == len(prefix) + 1)


def _fit(policy: GenerationPolicy, kind: Profile, client: Client) -> tuple[Check, list[Fitted]]:
    """Return whether the model can hold the prompts, and those that it can."""
    limit = client.max_model_len() - policy.tokens
    fitted: list[Fitted] = []
    unfit: list[tuple[str, Sample]] = []
    for prompt in policy.prompts:
        made = fit(prompt, kind.wrap, kind.long, lambda text: len(client.tokenize(text)))
        if made.tokens > limit:
            found = f"{made.tokens} tokens, and {policy.tokens} to be said"
            unfit.append(("prompt-too-long", Sample(prompt.name, f"at most {limit + policy.tokens} together", found)))
        elif not holds(made.text, again := client.detokenize(client.tokenize(made.text))):
            unfit.append(("prompt-unencodable", Sample(prompt.name, checks.excerpt(made.text), checks.excerpt(again))))
        else:
            fitted.append(made)
    if unfit:
        says = f"the model cannot hold {len(unfit)} of {len(policy.prompts)} prompts"
        return invalid("prompts", says, unfit[0][0], samples=[sample for _, sample in unfit]), fitted
    longest = max(made.tokens for made in fitted)
    return passed("prompts", f"{len(fitted)} prompts of up to {longest} tokens fit, and come back from the tokenizer as they were"), fitted


def _said(policy: GenerationPolicy, asking: _Asking, fitted: Sequence[Fitted], ends: frozenset[int]) -> list[Said]:
    """Return what was said to each prompt in two passes; other prompts come between the two runs of one."""
    first = [asking.ask(one, policy.tokens) for one in fitted]
    second = [asking.ask(one, policy.tokens) for one in fitted]
    return [_parted(asking.client, Said(*parts), ends) for parts in zip(fitted, first, second, strict=True)]


def _parted(client: Client, said: Said, ends: frozenset[int]) -> Said:
    """Return *said* with its words: what stands before the answer's end."""
    if not said.first:
        return said
    body = detectors.body(said.first.tokens, ends)
    try:
        words = said.first.text if len(body) == len(said.first.tokens) else client.detokenize(body) if body else ""
    except ServerInvalid:
        words = said.first.text
    return replace(said, body=body, words=words)


def _reruns(policy: GenerationPolicy, asking: _Asking, said: Sequence[Said], before: Mapping[str, float]) -> tuple[Check, ...]:
    """
    Return whether both runs said the same.

    The second run may find its prompt in the prefix cache and then computes it in pieces of other shapes, which need not round alike. Where
    the answers differ and the cache was used, a third run, which finds the same in the cache as the second, decides.
    """
    pairs = [(one.name, one.first, one.second) for one in said if one.first and one.second]
    found = checks.identity(pairs)
    if found.state != "fail" or not _cached(asking.client, before):
        return (found,)
    thirds = [asking.ask(one.fitted, policy.tokens) for one in said]
    warm = [(one.name, one.second, third) for one, third in zip(said, thirds, strict=True) if one.second and third]
    cold = replace(found, name="cold-and-cached", required=False)
    return checks.identity(warm, "two runs with the same prefix cache"), cold


def _cached(client: Client, before: Mapping[str, float]) -> bool:
    try:
        return client.metrics().get(CACHED, 0.0) > before.get(CACHED, 0.0)
    except ServerInvalid:
        return False


def _skipped(kind: Profile, name: str) -> Check | None:
    reason = kind.not_run.get(name)
    return not_run(name, reason, "policy-skips") if reason else None


def _detected(policy: GenerationPolicy, kind: Profile, said: Sequence[Said], detector: detectors.Detector) -> Check:
    return _skipped(kind, detector.name) or checks.detected(said, detector, policy.bounds)


def _entropy(policy: GenerationPolicy, kind: Profile, asking: _Asking, fitted: Sequence[Fitted]) -> Check:
    if skipped := _skipped(kind, "entropy"):
        return skipped
    if not policy.logprobs.tokens:
        return not_run("entropy", "the policy asks for no log probabilities", "not-asked")
    found = {one.prompt.name: asking.ask(one, policy.logprobs.tokens, policy.logprobs.top) for one in fitted}
    return checks.entropy({name: answer.logprobs for name, answer in found.items() if answer}, policy.bounds.entropy)


def _batch(policy: GenerationPolicy, asking: _Asking, said: Sequence[Said]) -> Check:
    alone = {one.name: one.first for one in said if one.first}
    if policy.batch < 2 or asking.silent >= MOST_SILENT:
        return not_run("batch-identity", "nothing is asked in a batch", "not-asked", required=False)
    asked = [one.fitted for one in said if one.first]
    return checks.batch(alone, dict(zip(alone, asking.together(asked, policy.tokens, policy.batch), strict=True)), policy.batch)


def _corrupted(client: Client, before: Mapping[str, float]) -> Check:
    try:
        return checks.corrupted(before, client.metrics(), CORRUPTED)
    except ServerInvalid as error:
        return invalid("corrupted-requests", error.says, error.reference)


