"""
Compare the kernels and settings that serve with the recipe's contract (G3).

A profile of one request, and of several at once, shows which kernels ran in prefill and decode. In
each, a kind of layer must be served by the class that the recipe states, for nearly all of its
time, and as with the stock wheel unless the recipe or a patch says why. Without the facts of the
stock wheel the gate is no pass.

What the server states of itself (log, ``/v1/models``, ``/metrics``) is part of the verdict, and has
to agree.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.recipe import KernelContract, Recipe
from sparkwright.bench.records import Count
from sparkwright.bench.server import launch
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.server_log import LogInvalid, LogPattern, scan
from sparkwright.cherry_picks.patch import DeclaredChange
from sparkwright.gates import kernel_trace
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.server_under_test import (
    ENDED,
    ObservedServer,
    Pace,
    PrefixCache,
    ServerIdentity,
    read_recorded,
)
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    decided,
    declare,
    failed,
    invalid,
    judged,
    passed,
)
from sparkwright.gates.kernel_trace import (
    PHASES,
    ClassifiedKernel,
    KernelPattern,
    KernelTrace,
    Phase,
)

#: Why lines of the log fail a launch.
Unwanted = Annotated[str, Meta(pattern="^(emulation|backend-refused|graph-memory-negative)$")]

CHECKS = (
    *declare("log", "no-fallback-kernel"),
    *declare("observed", "kernels-*", "backends", measured=True),
    *declare("profile-graphs", "profile-compile", measured=True),
)

#: Kernels that Inductor writes: their kind, and the operations that are in one.
COMPILED = re.compile(r"triton_(?:poi|red|per|tem)_fused")

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **ENDED,
    "backend-refused": (
        "The server refused the backend that it was told to use, and used another without an error."
    ),
    "backend-changed": "Layers are served by another class of kernels than with the stock wheel, "
    "and nothing explains it. Find out why, or explain it under `changes` of the recipe's contract "
    "or by the trailer `Changes: kernels / RECIPE / WHY` of a patch.",
    "baseline-damaged": "The baseline has no facts of a server with its kernels. Record it again, "
    "with its recipe.",
    "baseline-is-candidate": "The baseline was recorded with the candidate's own wheel, or names "
    "none. Record it with the stock wheel or the last release.",
    "baseline-other-model": "The baseline was recorded with another recipe or other weights. "
    "Record it with these.",
    "compile-unseen": "The recipe is served by torch.compile, and the profile has no kernel that "
    "it made: each operation runs by itself.",
    "emulation": "The server computes by emulation: right numbers, far too slowly, and not by the "
    "kernels of the wheel.",
    "facts-disagree": "The server's log, its replies and its counters contradict each other, so "
    "none of them is evidence. Another server answers, or this release words them otherwise.",
    "graphs-unseen": "The recipe is served by CUDA graphs, and none launched a kernel of a decode "
    "step: each launch costs the processor's time.",
    "kernel-unseen": "No kernel of the profile serves such layers: they did not run, whatever "
    "the log says, or no pattern of ci/gates/contract.yaml knows the kernels (`kernels-unknown`).",
    "kernel-class": "Kernels of the class that the recipe states take less of the layers' time "
    "than they must: other kernels serve, whatever the log says.",
    "kernel-forbidden": "The profile has a kernel that the recipe excludes, such as Marlin in "
    "place of FP4 kernels.",
    "kernels-unknown": "Too much of the time is by kernels that nothing judges. Give them a "
    "pattern in ci/gates/contract.yaml, or state the kind of layer in the recipe.",
    "kernels-helpers": "Nearly all of the time is by kernels that only move, quantise or unpack: "
    "what the layers are promised to compute with hardly runs.",
    "stock-not-named": "Without the facts of the stock wheel's server, what is served otherwise "
    "than by it is not seen.",
    "launches-differ": "Two launches of one wheel were served by other classes of kernels, so what "
    "one of them shows is not true of the other. Look for a choice that is made at each start.",
    "profile-missing": (
        "There is no profile, so only the log tells what ran. Start the server with sparkwright."
    ),
    "profile-unreadable": "The profile is not a trace of torch's profiler in which vLLM annotates "
    "its steps.",
}


class ContractPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What vLLM prints, and what no server of a recipe may show.

    Attributes:
        lines: Lines that state a choice; each pattern has a group *value*.
        unwanted: Lines that should not be there.
        batch: Requests at once in the profile, or the recipe's if they are fewer.
        share: The least share of a kind's time that kernels of the recipe's class must have.
        least_part: The least share of the first class, if the recipe states a sum of classes.
        unknown: Share of a phase's time by kernels that nothing judges, at most.
        helpers: The most of the time that kernels which only move, quantise or route may take.
        change: By how much the share of a class may differ from the stock wheel's; and the time of
            helpers, as a share of the phase's.
        helpers_us: Microseconds by which the time of helpers may differ in any phase.
        fallbacks: Classes that may only serve where the recipe states them.
        kernels: How kernels are recognised; the first pattern that matches counts.
    """

    lines: dict[str, LogPattern]
    unwanted: dict[Unwanted, LogPattern]
    batch: Annotated[int, Meta(ge=2, le=64)]
    share: Annotated[float, Meta(gt=0.5, lt=1)]
    least_part: Annotated[float, Meta(gt=0, lt=0.5)]
    unknown: Annotated[float, Meta(gt=0, lt=1)]
    helpers: Annotated[float, Meta(gt=0, lt=1)]
    change: Annotated[float, Meta(gt=0, lt=1)]
    helpers_us: Count
    fallbacks: tuple[str, ...]
    kernels: tuple[KernelPattern, ...]


def profile(
    policy: ContractPolicy, recipe: Recipe | None, server: launch.Server, folder: Path
) -> KernelTrace | Check:
    """
    Return the kernels of a request and of a batch, or the check that says why there are none.

    Those of all ranks on this machine count together, and the graphs of the rank with the fewest.
    The *server* writes the profile to *folder*: it was started with `kernel_trace.profiler_flags`
    of that folder, which only write while a profile is taken.
    """
    batch = min(policy.batch, recipe.plan.max_num_seqs) if recipe else policy.batch
    try:
        paths = kernel_trace.record_traces(server.client(), folder, batch)
        phases = PHASES if batch > 1 else PHASES[:2]
        trace, *others = (kernel_trace.read_trace(path, phases) for path in paths)
    except ServerInvalid as error:
        reason = error.reason if error.reason == "profile-unreadable" else "profile-missing"
        return invalid("no-fallback-kernel", error.message, reason)
    for other in others:
        for phase in phases:
            trace[phase].update(other[phase])
        trace.graphs = min(trace.graphs, other.graphs)
    return trace


def check_contract(
    policy: ContractPolicy, contract: KernelContract, log: Path, trace: KernelTrace | Check
) -> tuple[Check, ...]:
    """
    Return the checks of a launch against the *contract* of its recipe.

    They hold for every launch whose measurements count, in G3 and in the throughput gate.

    Args:
        log: What the server printed.
        trace: As `profile` returns it.
    """
    checks = [_log(policy, log)]
    if isinstance(trace, Check):
        return (*checks, trace)
    kernels = kernel_trace.classify(trace, policy.kernels)
    excluded = kernel_trace.fallbacks(kernels, contract, policy.fallbacks)
    excluded += [
        kernel
        for kernel in kernels
        if any(re.search(pattern, kernel.name) for pattern in contract.forbidden)
    ]
    samples = _samples(excluded)
    message = "kernels of the profile that the recipe excludes: "
    message += samples[0].actual if samples else "none"
    checks.append(
        judged("no-fallback-kernel", message, "kernel-forbidden", not samples, samples=samples)
    )
    phases = tuple(trace)
    checks += [_layer(policy, contract, kind, kernels, phases) for kind in contract.serves]
    unjudged = kernel_trace.unjudged(kernels, contract)
    checks += [
        _bounded(
            "kernels-unknown", "that nothing judges", unjudged, kernels, policy.unknown, phases
        ),
        _bounded(
            "kernels-helpers",
            "that only help",
            kernel_trace.helpers(kernels),
            kernels,
            policy.helpers,
            phases,
        ),
    ]
    if contract.graphs:
        checks.append(
            _profiled(
                "profile-graphs",
                "graphs-unseen",
                "kernels of decode steps in CUDA graphs",
                trace.graphs,
            )
        )
    if contract.compiled:
        checks.append(
            _profiled(
                "profile-compile",
                "compile-unseen",
                "kernels of torch.compile in decode",
                sum(bool(COMPILED.match(kernel)) for kernel in trace["decode"]),
            )
        )
    return tuple(checks)


def run(
    policy: ContractPolicy,
    recipe: Recipe,
    server: launch.Server,
    trace: KernelTrace | Check,
    identity: ServerIdentity,
    baseline: Path | None = None,
    declared: Sequence[DeclaredChange] = (),
) -> tuple[Check, ...]:
    """
    Return the checks of a server of *recipe*.

    Args:
        trace: As `profile` returns it.
        identity: The wheel and the model that it serves.
        baseline: The facts recorded of the stock wheel; None if no baseline was named.
        declared: The changes that patches of the stack declare.
    """
    if server.failure:
        return (
            failed(
                "observed",
                f"the server was ended before traffic: {server.failure}",
                server.reason or "server-died",
            ),
        )
    try:
        facts = observe(policy, server, trace, identity, recipe.name)
    except ServerInvalid as error:
        # Without the server's release it is not known which contract of the recipe holds.
        return (invalid("observed", error.message, error.reason),)
    contract = recipe.contract_for(facts.version)
    reasons = {
        change.layer: change.why for change in declared if change.concerns("kernels", recipe.name)
    }
    checks = [
        _observed(facts),
        *check_contract(policy, contract, server.log, trace),
    ]
    if facts.classes:
        checks.append(_backends(policy, facts, baseline, contract.changes | reasons))
    return tuple(checks)


def observe(
    policy: ContractPolicy,
    server: launch.Server,
    trace: KernelTrace | Check,
    identity: ServerIdentity,
    recipe: str,
) -> ObservedServer:
    """
    Return the facts about *server*, for the recipe named *recipe*.

    Args:
        trace: As `profile` returns it.

    Raises:
        ServerInvalid: The server does not answer as it should, or its log cannot be read.
    """
    try:
        lines = scan(server.log, policy.lines)
    except LogInvalid as error:
        raise ServerInvalid("log-unreadable", f"the log cannot be used: {error}") from None
    client = server.client()
    kernels = [] if isinstance(trace, Check) else kernel_trace.classify(trace, policy.kernels)
    metrics, limit = client.metrics(), client.max_model_len()
    cache = PrefixCache()
    if block := server_under_test.cache_block(metrics):
        length = server_under_test.prompt_length(block, 3, limit - 1)
        text = " ".join(str(number) for number in range(length))
        cache = server_under_test.repeat(
            client, [*client.tokenize(text)[:length]], uuid.uuid4().hex
        )
    return ObservedServer(
        identity,
        recipe,
        client.model(),
        client.version(),
        limit,
        cache,
        any(name.startswith(server_under_test.DRAFTS) for name in metrics),
        {name: tuple(match.values) for name, match in lines.items() if match.values},
        kernel_trace.shares(kernels, "name"),
        kernel_trace.shares(kernels, "label"),
        kernel_trace.times(kernels),
    )


def same_launches(
    policy: ContractPolicy,
    first: Mapping[str, Mapping[str, float]],
    now: Mapping[str, Mapping[str, float]],
) -> Check:
    """Return whether a launch has the classes of kernels of the *first* one of the same wheel."""
    changed = kernel_trace.changes(first, now, policy.change)
    samples = [Sample(layer, actual=text) for layer, text in changed.items()]
    message = f"kernels of other classes than in the first launch: {', '.join(changed) or 'none'}"
    return decided(
        "kernels-launches",
        message,
        "invalid" if changed else "pass",
        {"invalid": "launches-differ"},
        samples=samples,
    )


def estimate(policy: ContractPolicy, pace: Pace) -> float:
    """Return the seconds that the gate takes of a server that runs: a profile, and two prompts."""
    # A profile of some seconds is written and read in about half a minute (docs/rehearsal: G3).
    answers = pace.round(300, 8) + pace.round(300, 16, policy.batch)
    return 30 + 3 * 2048 / pace.prefill_tokens_s + answers


def _observed(facts: ObservedServer) -> Check:
    """Return whether what the server states of itself agrees, with the facts as evidence."""
    name, cache = "observed", facts.prefix_cache
    stated = {
        "version": facts.version,
        "context": str(facts.max_model_len),
        "prefix-cache": str(cache.block > 0),
    }
    if cache.block:
        stated["cache-block"] = str(cache.block)
    # A log without a release is of another program; no release prints all of the other lines.
    logged = {"version": ("no release",), **facts.lines}
    samples = [
        Sample(fact, value, ", ".join(logged[fact]))
        for fact, value in stated.items()
        if {*logged.get(fact, ())} - {value}
    ]
    if cache.block and (cache.hits % cache.block or cache.hits > cache.prompt):
        samples.append(Sample("hits", f"blocks of {cache.block} tokens", f"{cache.hits} tokens"))
    figures = [
        Figure("longest request", facts.max_model_len, "tokens"),
        Figure("block of the prefix cache", cache.block, "tokens"),
        Figure("prompt that was repeated", cache.prompt, "tokens"),
        Figure("tokens looked up of it", cache.queries, "tokens"),
        Figure("tokens found of it", cache.hits, "tokens"),
    ]
    if samples:
        return invalid(
            name,
            f"{', '.join(sample.case for sample in samples)}: log and replies disagree",
            "facts-disagree",
            figures=figures,
            samples=samples,
        )
    shown = {"served name": (facts.name,), "drafts": (str(facts.drafts),), **facts.lines}
    return passed(
        name,
        f"vLLM {facts.version} serves {facts.name}, {facts.max_model_len:,} tokens at most; of a "
        f"repeated prompt of {cache.prompt:,} tokens {cache.hits:,} were cached, in blocks of "
        f"{cache.block}",
        figures=figures,
        samples=[Sample(fact, "", ", ".join(values)[:200]) for fact, values in shown.items()],
    )


def _log(policy: ContractPolicy, log: Path) -> Check:
    """Return whether no line of the *log* says that the server does not do what it was told."""
    try:
        lines = scan(log, policy.unwanted)
    except LogInvalid as error:
        return invalid("log", f"the log cannot be used: {error}", "log-unreadable")
    for reason, match in lines.items():
        if match.count:
            return failed(
                "log",
                f"{match.count} lines of the log, such as: {match.texts[0][-200:]}",
                reason,
                samples=[Sample("log", actual=text) for text in match.texts],
            )
    return passed("log", "it refused no backend, and emulates nothing")


def _profiled(name: str, reason: str, what: str, count: int) -> Check:
    """Return whether the profile shows *count* kernels, which the log states."""
    return judged(
        name,
        f"the profile has {count or 'no'} {what}",
        reason,
        count > 0,
        [Figure(what, count)],
    )


def _samples(kernels: Iterable[ClassifiedKernel], expected: str = "") -> list[Sample]:
    """Return *kernels* as samples of a check."""
    return [
        Sample(
            kernel.layer,
            expected,
            f"{kernel.label or 'unknown'}: {kernel.name[:200]} ({kernel.microseconds} µs)",
        )
        for kernel in kernels
    ]


def _layer(
    policy: ContractPolicy,
    contract: KernelContract,
    kind: str,
    kernels: Sequence[ClassifiedKernel],
    phases: Sequence[Phase],
) -> Check:
    """Return whether the class of the contract serves this kind of layer in each of *phases*."""
    wanted, pattern = contract.serves.get(kind, ""), contract.names.get(kind, "")
    figures, samples = list[Figure](), list[Sample]()
    for phase in phases:
        own = [k for k in kernel_trace.serving(kernels, kind) if k.phase == phase]
        share = 100 * kernel_trace.served_share(own, wanted, pattern, policy.least_part)
        figures.append(
            Figure(f"{phase} by {wanted}", share, "%", len(own), bound=100 * policy.share)
        )
        samples += _samples(own[:5], f"{wanted} {pattern}".strip())
    shares = ", ".join(f"{figure.value:.0f} % of {figure.name}" for figure in figures)
    return judged(
        f"kernels-{kind}",
        f"time of {kind}: {shares}",
        "kernel-class" if all(figure.count for figure in figures) else "kernel-unseen",
        all(figure.value >= 100 * policy.share for figure in figures),
        figures,
        samples,
    )


def _bounded(
    name: str,
    which: str,
    chosen: Sequence[ClassifiedKernel],
    kernels: Sequence[ClassifiedKernel],
    most: float,
    phases: Sequence[Phase],
) -> Check:
    """Return whether those *chosen* of *kernels* take at most a share of *most* in each phase."""
    figures, samples = list[Figure](), list[Sample]()
    for phase in phases:
        own, whole = (
            [kernel for kernel in side if kernel.phase == phase] for side in (chosen, kernels)
        )
        share = 100 * kernel_trace.time(own) / max(kernel_trace.time(whole), 1)
        figures.append(Figure(f"{phase} by kernels {which}", share, "%", bound=100 * most))
        samples += _samples(own[:10])
    return judged(
        name,
        ", ".join(f"{figure.value:.1f} % of {figure.name}" for figure in figures),
        name,
        all(figure.value <= 100 * most for figure in figures),
        figures,
        samples,
    )


def _backends(
    policy: ContractPolicy, facts: ObservedServer, baseline: Path | None, reasons: Mapping[str, str]
) -> Check:
    """
    Return the check ``backends``: whether layers have the classes of kernels of the *baseline*.

    Args:
        reasons: ``decode moe`` and the like, or empty for all → why it may differ.
    """
    name, identity = "backends", facts.identity
    figures = [
        Figure(f"{layer}: {label}", 100 * share, "%")
        for layer, shares in facts.classes.items()
        for label, share in shares.items()
    ]
    if baseline is None:
        message = "name --against a folder that --record wrote, to compare its server's kernels"
        return Check(name, "not-run", message, "stock-not-named", figures=tuple(figures))
    try:
        stock = read_recorded(baseline, ObservedServer, "baseline-damaged")
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)
    if not stock.classes:
        return invalid(name, f"{baseline.name} has no kernels", "baseline-damaged")
    if stock.identity.wheel in ("", identity.wheel):
        return invalid(
            name,
            "the baseline is the candidate itself, or does not name its wheel",
            "baseline-is-candidate",
        )
    if stock.recipe != facts.recipe or identity.model not in ("", stock.identity.model):
        return invalid(
            name,
            f"the baseline is of {stock.recipe}, or of other weights",
            "baseline-other-model",
        )
    # A reason that explains a change for one request explains the same change for a batch.
    reasons = {
        f"{batch}{layer}" if layer else "": why
        for layer, why in reasons.items()
        for batch in ("", "batch ")
    }
    changed = kernel_trace.changes(stock.classes, facts.classes, policy.change)
    # Only phases of one request are compared: the steps of a batch depend on when its requests
    # arrive.
    for phase in PHASES[:2]:
        (_, helpers), (whole, before) = (each.times.get(phase, (0, 0)) for each in (facts, stock))
        if helpers - before > max(policy.change * whole, policy.helpers_us):
            changed[f"{phase} helper"] = f"{before} µs before, {helpers} µs now"
    samples = [
        Sample(layer, reasons.get(layer, reasons.get("", "as with the stock wheel")), text)
        for layer, text in changed.items()
    ]
    message = (
        f"of {len(facts.classes)} kinds and phases, in other classes than with the stock wheel: "
        f"{', '.join(changed) or 'none'}"
    )
    return judged(
        name, message, "backend-changed", "" in reasons or changed.keys() <= reasons.keys(),
        figures, samples,
    )  # fmt: skip
