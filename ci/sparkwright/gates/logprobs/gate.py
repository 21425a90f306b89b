"""
G5: is the candidate's distribution over the next token that of the reference, at every place of the same texts?

Both servers score the same tokens (teacher forcing), so one odd token does not carry the comparison away, and a kernel that is a
little wrong everywhere shows although greedy answers still read well. The reference scores twice, and how far it is from itself (A/A)
is the floor below which nobody can be asked to be. Every limit is held against an interval, not a point: what the texts do not decide
is inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.bench.server import answers
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.gates.core.served import Served
from sparkwright.gates.core.verdict import Check, Figure, declare, invalid, not_run, passed
from sparkwright.gates.logprobs import divergence, reference
from sparkwright.gates.logprobs.distances import DistributionsPolicy, compare, spread
from sparkwright.gates.logprobs.reference import Reference, ReferenceInvalid
from sparkwright.gates.logprobs.scoring import candidate_scores, made_texts, record

__all__ = ["CHECKS", "COMPARED", "REASONS", "TITLE", "DistributionsPolicy", "record", "run"]

TITLE = "distributions against a reference"

REASONS: Mapping[str, str] = {
    **answers.REASONS,
    "reference-unstable": "The reference differs from itself by more than the policy allows, so nothing can be held against it: "
    "score it at concurrency 1, without other load, or take another backend as the reference.",
    "reference-unsound": "The reference gives logarithms that no softmax gives (not a number, a sum above 1): take another reference.",
    "reference-damaged": "The saved reference cannot be read, was cut short or changed: make it again.",
    "reference-other-model": "The reference is of another model, tokenizer or corpus than the candidate's run: make it with the same ones.",
    "reference-other-policy": "The reference has other numbers of texts, tokens or logarithms than the policy asks: make it again.",
    "corpus-too-short": "With this tokenizer a text has fewer tokens than the policy asks: lower `tokens` or lengthen the corpus.",
    "too-few-logprobs": "The server gives fewer logarithms per position than asked: raise its --max-logprobs.",
    "not-a-number": "The candidate gives a logarithm that is not a number or minus infinity: a kernel writes NaN or does not write at all.",
    "not-a-distribution": "The candidate's probabilities add up to more than 1: its logits or its softmax are damaged.",
    "distribution-differs": "The candidate's distributions are further from the reference's than the policy allows: a kernel, "
    "a scale or a weight is wrong, however well the text reads.",
    "text-differs": "Some texts come out far from the reference's although the average may be good: garbage that depends on the prompt.",
    "best-token-differs": "The candidate's most likely token is another one too often.",
    "perplexity-differs": "The texts are more, or less, likely to the candidate than to the reference.",
    "texts-do-not-decide": "The interval holds the limit: score more texts (`texts` in the policy), or make the reference steadier.",
    "not-measured": "An earlier check of this gate ended before this could be measured.",
}  # fmt: skip

#: What follows the two checks of the measurement itself, in order.
COMPARED = ("divergence", "worst-text", "best-token", "perplexity", "tails")

CHECKS = (
    *declare("reference", *COMPARED[:-1], measured=True),
    *declare("candidate"),
    *declare(COMPARED[-1], measured=True, role="informs"),
)


def run(
    policy: DistributionsPolicy, candidate: Client, against: Client | Reference | Path, *,
    paragraphs: Mapping[str, tuple[str, ...]], served: Served, reference_served: Served | None = None, again: Client | None = None,
) -> tuple[Check, ...]:  # fmt: skip
    """
    Return the checks of the gate.

    Args:
        candidate: The server of the wheel in question, about which *served* tells what is known.
        against: The server of the reference, or what it said earlier, or the file with that.
        paragraphs: The corpus, as `corpus.load` reads it.
        reference_served: About the reference's server; what is known of the candidate's, less its wheel, where it is not given.
        again: A second launch of the reference, for the floor.

    Raises:
        file-invalid: The corpus is not the one that the policy names.
    """
    try:
        if isinstance(against, Client):
            about = reference_served or msgspec.structs.replace(served, wheel="")
            against = record(policy, paragraphs, against, about, again)
        known = against if isinstance(against, Reference) else reference.load(against)
    except ServerInvalid as error:
        return _ended(invalid("reference", f"The reference's server: {error.says}.", error.reference))
    except ReferenceInvalid as error:
        return _ended(invalid("reference", f"{error.says[:1].upper()}{error.says[1:]}.", error.reference))
    stable = _reference_check(policy, known)
    if stable.state != "pass":
        return _ended(stable)
    measured = candidate_scores(policy, candidate, known, served, made_texts(policy, paragraphs))
    if isinstance(measured, Check):
        return _ended(stable, measured)
    sound = passed("candidate", f"The candidate scored {len(measured)} positions of {policy.texts} texts; each is a distribution.")
    return (stable, sound, *compare(policy, known, measured, same_host=known.served.host == served.host))


def _ended(*done: Check) -> tuple[Check, ...]:
    missing = ("candidate", *COMPARED) if len(done) == 1 else COMPARED
    return (
        *done,
        *(not_run(name, f"{done[-1].name} ended the gate.", "not-measured", required=name != "tails") for name in missing),
    )


def _reference_check(policy: DistributionsPolicy, known: Reference) -> Check:
    """Return whether the reference fits the policy, is sound and agrees with itself."""
    if known.corpus != policy.corpus:
        return invalid("reference", "The reference is of another corpus than the policy names.", "reference-other-model")
    if (len(known.texts), len(known.texts[0]), known.top) != (policy.texts, policy.tokens, policy.top):
        return invalid("reference", "The reference has other texts, tokens or logarithms than the policy asks.", "reference-other-policy")
    wrong, above, few = divergence.unsound(known.scores, policy.top)
    if (wrong | above | few).any():
        return invalid("reference", "The reference's logarithms are those of no distribution.", "reference-unsound")
    floor, same, _ = known.floor.mean(axis=0)
    apart = [spread(known.floor[:, column]) for column in (0, 1)]
    figures = [
        Figure("A/A floor of the mean KL", float(floor), "nat", policy.texts, apart[0], policy.floor_most),
        Figure("A/A best tokens the same", 100 * float(same), "%", policy.texts, 100 * apart[1], 100 * policy.agreement_least),
    ]
    if floor > policy.floor_most or same < policy.agreement_least:
        says = f"The reference differs from itself by {floor:.4f} nat and agrees with itself on {same:.1%} of the best tokens."
        return invalid("reference", says, "reference-unstable", figures=figures)
    says = f"The reference differs from itself by {floor:.2g} nat and agrees with itself on {same:.2%} of the best tokens."
    return passed("reference", says, figures=figures)
