"""
Compare the kernels and settings that serve with the recipe's contract (G3).

A profile of one request shows which kernels ran in prefill and decode: each kind of layer must be
served by the class that the recipe states, for nearly all of its time, and as with the stock wheel
unless the recipe or a patch says why. What the server states of itself (log, ``/v1/models``,
``/metrics``) is part of the verdict, and has to agree.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from packaging.specifiers import SpecifierSet

from sparkwright.bench.recipes.recipe import KernelContract, Recipe
from sparkwright.bench.server import launch
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.server_log import LogInvalid, LogLines, LogPattern, scan
from sparkwright.cherry_picks.patch import DeclaredChange
from sparkwright.gates.contract import kernel_classes, kernel_trace
from sparkwright.gates.contract.kernel_classes import ClassifiedKernel, KernelPattern
from sparkwright.gates.contract.kernel_trace import PHASES, KernelTrace, family
from sparkwright.gates.core import observed
from sparkwright.gates.core.observed import ObservedServer, Pace, PrefixCache
from sparkwright.gates.core.server_under_test import ENDED, ServerIdentity
from sparkwright.gates.core.verdict import (
    ORDER,
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    judged,
    not_run,
    passed,
)

#: Lines that the gate reads by name.
LINES = frozenset(
    {
        "version",
        "attention",
        "linear",
        "moe",
        "moe-tuned",
        "moe-untuned",
        "kv-gib",
        "kv-tokens",
        "context",
        "prefix-cache",
        "cache-block",
    }
)
#: Check → the line that should not be in the log, the reason of its failure, and what a pass says.
UNWANTED: Mapping[str, tuple[str, str, str]] = {
    "no-emulation": ("emulation", "emulation", "it computes nothing by emulation"),
    "no-refusal": ("refused", "backend-refused", "it refused no backend that it was told to use"),
    "no-fallback": ("fallback", "fallback-unlisted", "it fell back to nothing unlisted"),
    "no-unknown-variable": ("unknown", "variable-unknown", "it reads every variable that is set"),
    "graph-memory": ("graph-memory", "graph-memory-negative", "no memory of graphs is negative"),
}

CHECKS = (
    *declare("server", "version", *UNWANTED, "no-fallback-kernel"),
    *declare("observed", "line-*", "kernels-*", "kv-cache", "backends", measured=True),
    *declare("profile-graphs", "profile-compile", measured=True),
    *declare("log", role="reports"),
    *declare("moe-configuration", role="informs"),
)

#: Kernels that Inductor writes: their kind, and the operations that are in one.
COMPILED = re.compile(r"triton_(?:poi|red|per|tem)_fused")

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **ENDED,
    "version-unknown": (
        "What this release of vLLM prints is not known, or the log is not of one server alone. "
        "Read the release's sources, then add it to ci/gates/contract.yaml."
    ),
    "backend-wrong": "The server chose something else than the recipe says. If the log lacks the "
    "line, the part was not used, or this release words the line differently.",
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
    "fallback-unlisted": (
        "The server fell back to something, and the recipe does not list "
        "that as harmless. Find out what it means."
    ),
    "kv-outside-plan": (
        "The KV cache does not have the size that the recipe plans. Other "
        "programs hold memory, or the flags differ."
    ),
    "variable-unknown": "A variable is set that this release of vLLM does not read. Remove it, or "
    "use what replaced it.",
    "graphs-unseen": "The recipe is served by CUDA graphs, and none launched a kernel of a decode "
    "step: each launch costs the processor's time.",
    "kernel-unseen": "No kernel of the profile serves such layers: they did not run, whatever "
    "the log says, or no pattern of ci/gates/contract.yaml knows the kernels (`kernels-unknown`).",
    "kernel-class": "Kernels of the class that the recipe states take less of the layers' time "
    "than they must: other kernels serve, whatever the log says.",
    "kernel-forbidden": "The profile has a kernel that the recipe excludes, such as Marlin in "
    "place of FP4 kernels.",
    "kernel-unknown": "Too much of the time is by kernels that nothing judges. Give them a pattern "
    "in ci/gates/contract.yaml, or state the kind of layer in the recipe.",
    "not-observed": "The server could not be asked for its facts; the check `server` says why.",
    "launches-differ": "Two launches of one wheel were served by other classes of kernels, so what "
    "one of them shows is not true of the other. Look for a choice that is made at each start.",
    "moe-untuned": "vLLM has no file with tile sizes for these experts on this device, so their "
    "Triton kernels run with general ones. Tune them (docs/howto/measure.md).",
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
        releases: Version specifier of the releases whose lines were read in their sources.
        kv_tolerance: Share by which the KV cache may differ from the recipe's plan.
        lines: Lines that state a choice; each pattern has a group *value*.
        unwanted: Lines that should not be there.
        share: Of the time of a kind of layer, by the class that the recipe states, at least.
        part: The same of each class of a sum.
        unknown: Share of a phase's time by kernels that nothing judges, at most.
        change: By how much the share of a class may differ from the stock wheel's.
        fallbacks: Classes that may only serve where the recipe states them.
        kernels: How kernels are recognised; the first pattern that matches counts.
    """

    releases: str
    kv_tolerance: Annotated[float, Meta(gt=0, lt=1)]
    lines: dict[str, LogPattern]
    unwanted: dict[str, LogPattern]
    share: Annotated[float, Meta(gt=0.5, lt=1)]
    part: Annotated[float, Meta(gt=0, lt=0.5)]
    unknown: Annotated[float, Meta(gt=0, lt=1)]
    change: Annotated[float, Meta(gt=0, lt=1)]
    fallbacks: tuple[str, ...]
    kernels: tuple[KernelPattern, ...]

    def __post_init__(self) -> None:
        SpecifierSet(self.releases)
        if missing := (LINES - set(self.lines)) | (
            {line for line, _, _ in UNWANTED.values()} ^ set(self.unwanted)
        ):
            raise ValueError(f"lines: {', '.join(sorted(missing))} is missing or unknown")


def profile(server: launch.Server, folder: Path) -> Path | None:
    """
    Return a profile of one request, which *server* writes to *folder*; None if it cannot.

    It was started with `kernel_trace.flags` of that folder, which only write while a profile is
    taken.
    """
    with contextlib.suppress(ServerInvalid):
        return None if server.failure else kernel_trace.record(server.client(), folder)
    return None


def read_profile(path: Path | None) -> KernelTrace | Check:
    """Return the kernels of the profile at *path*, or the check that says why there are none."""
    name = "no-fallback-kernel"
    if path is None:
        return not_run(name, "there is no profile", "profile-missing")
    try:
        return kernel_trace.read(path)
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)


def contract_fault(checks: Sequence[Check]) -> Check | None:
    """Return the check that speaks most against a launch; None if it is as promised."""
    return min(
        (check for check in checks if check.required and check.state != "pass"),
        key=lambda check: ORDER.index(check.state),
        default=None,
    )


def check_contract(
    policy: ContractPolicy, contract: KernelContract, log: Path, trace: KernelTrace | Check
) -> tuple[Check, ...]:
    """
    Return the checks of a launch against the *contract* of its recipe.

    They hold for every launch whose measurements count, in G3 and in the throughput gate.

    Args:
        log: What the server printed.
        trace: As `read_profile` returns it.
    """
    kernel_checks = _kernel_checks(policy, contract, trace)
    try:
        lines = scan(log, policy.lines | policy.unwanted)
    except LogInvalid as error:
        return (
            invalid("log", f"the log cannot be used: {error}", "log-unreadable"),
            *kernel_checks,
        )
    return (
        *(
            _line(name, pattern, lines.get(name, LogLines()))
            for name, pattern in contract.lines.items()
        ),
        *(_unwanted(name, lines, contract.harmless) for name in UNWANTED),
        *kernel_checks,
    )


def run(
    policy: ContractPolicy,
    recipe: Recipe,
    server: launch.Server,
    trace: Path | None,
    identity: ServerIdentity,
    baseline: Path | None = None,
    declared: Sequence[DeclaredChange] = (),
) -> tuple[Check, ...]:
    """
    Return the checks of a server of *recipe*.

    Args:
        trace: See `profile`.
        identity: The wheel and the model that it serves.
        baseline: The facts recorded of the stock wheel; None if no baseline was named.
        declared: The changes that patches of the stack declare.
    """
    serves, kernels = _serves(server), read_profile(trace)
    try:
        lines = scan(server.log, policy.lines | policy.unwanted)
    except LogInvalid:  # `check_contract` reports it
        return (serves, *check_contract(policy, recipe.contract, server.log, kernels))
    contract = recipe.contract_for(next(iter(lines["version"].values), ""))
    reasons = {
        change.layer: change.why for change in declared if change.concerns("kernels", recipe.name)
    }
    facts: ObservedServer | Check = not_run("observed", "it could not be asked", "not-observed")
    try:
        if serves.state == "pass":
            facts = observe(policy, server.client(), lines, kernels, identity, recipe.name)
    except ServerInvalid as error:
        facts = invalid("observed", error.message, error.reason)
    return (
        serves,
        _version(policy, lines["version"]),
        facts if isinstance(facts, Check) else _observed(facts, lines),
        *check_contract(policy, contract, server.log, kernels),
        *(
            [
                _backends(
                    policy, kernels, identity, recipe.name, baseline, contract.changes | reasons
                )
            ]
            if isinstance(kernels, KernelTrace)
            else []
        ),
        _kv(policy, recipe, lines),
        *([_configuration(lines)] if "moe" in contract.serves else []),
    )


def observe(
    policy: ContractPolicy,
    client: Client,
    lines: Mapping[str, LogLines],
    trace: KernelTrace | Check,
    identity: ServerIdentity,
    recipe: str,
) -> ObservedServer:
    """
    Return the facts of the server that *client* asks, for the recipe named *recipe*.

    Args:
        lines: Of its log; empty without one.
        trace: As `read_profile` returns it.

    Raises:
        ServerInvalid: The server does not answer as it should.
    """
    kernels = [] if isinstance(trace, Check) else kernel_classes.classify(trace, policy.kernels)
    block, limit = observed.cache_block(client.metrics()), client.max_model_len()
    cache = PrefixCache(0, 0, 0, 0)
    if block:
        length = observed.prompt_length(block, 3, limit - 1)
        text = " ".join(str(number) for number in range(length))
        cache = observed.repeat(client, [*client.tokenize(text)[:length]], uuid.uuid4().hex)
    families = kernel_classes.shares(
        [kernel._replace(name=family(kernel.name)) for kernel in kernels], "name"
    )
    unknown: dict[str, float] = {
        phase: kernel_classes.time_share(kernels, phase, [k for k in kernels if not k.kind])
        for phase in PHASES
    }
    return ObservedServer(
        identity,
        recipe,
        client.model(),
        client.version(),
        limit,
        cache,
        any(name.startswith(observed.DRAFTS) for name in client.metrics()),
        {name: tuple(found.values) for name, found in lines.items() if found.values},
        families,
        kernel_classes.shares(kernels, "label"),
        unknown,
    )


def record(
    policy: ContractPolicy,
    client: Client,
    log: Path | None,
    trace: Path | None,
    identity: ServerIdentity,
    recipe: str,
) -> ObservedServer:
    """
    Return the facts of the stock wheel's server, for ``observed.json``.

    Raises:
        ServerInvalid: The server does not answer as it should, or its log cannot be read.
    """
    try:
        lines = scan(log, policy.lines) if log else {}
    except LogInvalid as error:
        raise ServerInvalid("log-unreadable", f"the log cannot be used: {error}") from None
    return observe(policy, client, lines, read_profile(trace), identity, recipe)


def same_launches(
    policy: ContractPolicy,
    first: Mapping[str, Mapping[str, float]],
    now: Mapping[str, Mapping[str, float]],
) -> Check:
    """Return whether a launch has the classes of kernels of the *first* one of the same wheel."""
    changed = kernel_classes.changes(first, now, policy.change)
    if changed:
        samples = [Sample(layer, actual=text) for layer, text in changed.items()]
        message = f"another launch had other kernels: {', '.join(changed)}"
        return invalid("kernels-launches", message, "launches-differ", samples=samples)
    message = "this launch has the kernels of the first one"
    return passed("kernels-launches", message, figures=[Figure("kinds and phases", len(now))])


def estimate(_: ContractPolicy, pace: Pace) -> float:
    """Return the seconds that the gate takes of a server that runs: a profile, and two prompts."""
    # A profile of some seconds is written and read in about half a minute (docs/rehearsal: G3).
    return 30 + 3 * 2048 / pace.prefill_tokens_s + 8 / pace.decode_tokens_s


def _observed(facts: ObservedServer, lines: Mapping[str, LogLines]) -> Check:
    """Return whether what the server states of itself agrees, with the facts as evidence."""
    cache = facts.prefix_cache
    stated = {
        "version": facts.version,
        "context": str(facts.max_model_len),
        "prefix-cache": str(cache.block > 0),
        "cache-block": str(cache.block) if cache.block else None,
    }
    samples = [
        Sample(name, value, ", ".join(lines[name].values))
        for name, value in stated.items()
        if value is not None and lines[name].values and {*lines[name].values} != {value}
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
        message = f"{', '.join(sample.case for sample in samples)}: log and replies disagree"
        return invalid("observed", message, "facts-disagree", figures=figures, samples=samples)
    facts_of_log = {name: ", ".join(values) for name, values in facts.backends.items()}
    shown = {"served name": facts.name, "drafts": str(facts.drafts), **facts_of_log}
    message = (
        f"vLLM {facts.version} serves {facts.name}, {facts.max_model_len:,} tokens at most; "
        + (
            f"of a repeated prompt of {cache.prompt:,} tokens {cache.hits:,} were cached, "
            f"in blocks of {cache.block}"
            if cache.block
            else "there is no prefix cache"
        )
    )
    texts = [Sample(name, "", value[:200]) for name, value in shown.items()]
    return passed("observed", message, figures=figures, samples=texts)


def _configuration(lines: Mapping[str, LogLines]) -> Check:
    """Return whether the experts are served with a configuration that was tuned for this device."""
    name, missing, tuned = "moe-configuration", lines["moe-untuned"], lines["moe-tuned"]
    samples = [Sample("log", actual=text) for text in (*missing.texts, *tuned.texts)[:5]]
    if missing.count:
        return failed(
            name,
            f"vLLM has no {', '.join(missing.values) or 'file'} for these experts",
            "moe-untuned",
            samples=samples,
            required=False,
        )
    return passed(
        name,
        ", ".join(tuned.values) or "no kernel that serves reads a tuned configuration",
        samples=samples,
        required=False,
    )


def _serves(server: launch.Server) -> Check:
    """Return whether it runs and names its model."""
    if server.failure:
        return failed(
            "server",
            f"the server was ended before traffic: {server.failure}",
            server.reason or "server-died",
        )
    try:
        message = f"it serves {server.client().model()}"
    except ServerInvalid as error:
        return invalid("server", error.message, error.reason)
    return passed("server", message)


def _version(policy: ContractPolicy, lines: LogLines) -> Check:
    """Return whether the log is of one release, which the policy covers."""
    logged = ", ".join(lines.values)
    release = re.match(r"\d{1,9}(?:\.\d{1,9})+", logged, re.ASCII)
    covered = release and SpecifierSet(policy.releases).contains(release[0])
    if len(lines.values) != 1 or not covered:
        message = f"the log is of {logged or 'no known release'}, not of one in {policy.releases}"
        return invalid("version", message, "version-unknown")
    return passed("version", f"vLLM {logged} wrote the log")


def _line(kind: str, pattern: str, lines: LogLines) -> Check:
    """Return whether every value of a line is the one that the contract wants."""
    name, logged = f"line-{kind}", ", ".join(lines.values) or "not in the log"
    samples = [Sample("log", pattern, text) for text in lines.texts[:5]]
    # Without a line only an empty pattern is right, and no pattern that matches anything.
    matches = all(re.fullmatch(pattern, value) for value in lines.values)
    good = matches if lines.values else not pattern
    message = f"{kind} is {logged}; the recipe wants {pattern or 'none'}"
    return judged(name, message, "backend-wrong", good, [Figure("lines", lines.count)], samples)


def _unwanted(name: str, log: Mapping[str, LogLines], harmless: Sequence[str]) -> Check:
    """Return whether no line of a kind of `UNWANTED` is there, but for *harmless* fallbacks."""
    kind, reason, message = UNWANTED[name]
    lines = log[kind]
    texts = [
        text
        for text in lines.texts
        if kind != "fallback" or not any(re.search(pattern, text) for pattern in harmless)
    ]
    # Of lines beyond those that are kept, it is not known whether they are harmless.
    if not texts and lines.count <= len(lines.texts):
        return passed(name, message)
    samples = [Sample("log", actual=text) for text in texts or lines.texts]
    samples += [Sample(value, launch.removed_variable(value)) for value in lines.values]
    return failed(
        name,
        f"{lines.count} lines of the log, such as: {samples[0].actual[-200:]}",
        reason,
        samples=samples,
    )


def _kernel_checks(
    policy: ContractPolicy, contract: KernelContract, trace: KernelTrace | Check
) -> list[Check]:
    """Return the checks that the profile decides."""
    if isinstance(trace, Check):
        return [trace]
    kernels = kernel_classes.classify(trace, policy.kernels)
    excluded = kernel_classes.fallbacks(kernels, contract, policy.fallbacks)
    excluded += [
        kernel
        for kernel in kernels
        if any(re.search(pattern, kernel.name) for pattern in contract.forbidden)
    ]
    samples = _samples(excluded)
    shown = samples[0].actual if samples else "none"
    message = f"kernels of the profile that the recipe excludes: {shown}"
    checks = [
        judged("no-fallback-kernel", message, "kernel-forbidden", not samples, samples=samples)
    ]
    checks += [_layer(policy, contract, kind, kernels) for kind in contract.serves]
    checks.append(_unknown(policy, contract, kernels))
    if "captured" in contract.lines:
        checks.append(
            _profiled(
                "profile-graphs",
                "graphs-unseen",
                "kernels of decode steps in CUDA graphs",
                trace.graphs,
            )
        )
    if contract.lines.get("compile") == "VLLM_COMPILE":
        count = sum(bool(COMPILED.match(kernel)) for kernel in trace["decode"])
        checks.append(
            _profiled(
                "profile-compile", "compile-unseen", "kernels of torch.compile in decode", count
            )
        )
    return checks


def _profiled(name: str, reason: str, what: str, count: int) -> Check:
    """Return whether the profile shows *count* kernels, which the log states."""
    return judged(
        name,
        f"the profile has {count or 'no'} {what}",
        reason,
        bool(count),
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
) -> Check:
    """Return whether the class of the contract serves this kind of layer in both phases."""
    name, (wanted, pattern) = f"kernels-{kind}", contract.wanted(kind)
    figures, samples = list[Figure](), list[Sample]()
    for phase in PHASES:
        own = [k for k in kernel_classes.serving(kernels, kind) if k.phase == phase]
        if not own:
            others = [kernel for kernel in kernels if kernel.phase == phase]
            message = f"none of {len(others)} kernels of {phase} serves {kind}"
            shown = _samples(others[:10], wanted)
            return failed(name, message, "kernel-unseen", figures=figures, samples=shown)
        share = kernel_classes.served_share(own, wanted, pattern, policy.part)
        figures.append(
            Figure(f"{phase} by {wanted}", 100 * share, "%", len(own), bound=100 * policy.share)
        )
        samples += _samples(own[:5], f"{wanted} {pattern}".strip())
    shares = ", ".join(f"{figure.value:.0f} % of {figure.name}" for figure in figures)
    good = all(figure.value >= 100 * policy.share for figure in figures)
    return judged(name, f"time of {kind}: {shares}", "kernel-class", good, figures, samples)


def _unknown(
    policy: ContractPolicy, contract: KernelContract, kernels: Sequence[ClassifiedKernel]
) -> Check:
    """Return whether the kernels that nothing judges take little of the time."""
    figures, samples = list[Figure](), list[Sample]()
    unjudged = kernel_classes.unjudged(kernels, contract)
    for phase in PHASES:
        share = kernel_classes.time_share(kernels, phase, unjudged)
        figures.append(
            Figure(
                f"{phase} by kernels that nothing judges",
                100 * share,
                "%",
                bound=100 * policy.unknown,
            )
        )
        samples += _samples([kernel for kernel in unjudged if kernel.phase == phase][:10])
    message = ", ".join(f"{figure.value:.1f} % of {figure.name}" for figure in figures)
    good = all(figure.value <= 100 * policy.unknown for figure in figures)
    return judged("kernels-unknown", message, "kernel-unknown", good, figures, samples)


def _numbers(lines: LogLines) -> list[float]:
    # A pattern gives digits, commas and dots; anything else is not its number.
    return [
        float(value.replace(",", ""))
        for value in lines.values
        if re.fullmatch(r"-?[\d,]{1,20}(\.\d{1,9})?", value)
    ]


def _kv(policy: ContractPolicy, recipe: Recipe, lines: Mapping[str, LogLines]) -> Check:
    """Return whether the KV cache is as large as planned and holds one longest request."""
    plan, sizes, counts = recipe.plan, _numbers(lines["kv-gib"]), _numbers(lines["kv-tokens"])
    figures = [Figure("KV cache", size, "GiB", bound=plan.cache) for size in sizes]
    figures += [Figure("tokens in the cache", count, bound=plan.max_model_len) for count in counts]
    tolerance = policy.kv_tolerance * plan.cache
    near = bool(sizes) and all(size > 0 and abs(size - plan.cache) <= tolerance for size in sizes)
    cache = ", ".join(f"{size:g} GiB" for size in sizes) or "size not in the log"
    tokens = f"{min(counts):,.0f} tokens" if counts else "tokens not in the log"
    message = (
        f"KV cache: {cache}, {tokens}; planned {plan.cache:g} GiB, "
        f"at least {plan.max_model_len:,} tokens"
    )
    good = near and min(counts, default=0) >= plan.max_model_len
    return judged("kv-cache", message, "kv-outside-plan", good, figures)


def _backends(
    policy: ContractPolicy,
    trace: KernelTrace,
    identity: ServerIdentity,
    recipe: str,
    baseline: Path | None,
    reasons: Mapping[str, str],
) -> Check:
    """
    Return the check ``backends``: whether layers have the classes of kernels of the *baseline*.

    Args:
        reasons: ``decode moe`` and the like, or empty for all → why it may differ.
    """
    name, kernels = "backends", kernel_classes.classify(trace, policy.kernels)
    classes = kernel_classes.shares(kernels, "label")
    figures = [
        Figure(f"{layer}: {label}", 100 * share, "%")
        for layer, shares in classes.items()
        for label, share in shares.items()
    ]
    if baseline is None:
        message = "name --against a folder that --record wrote, to compare its server's kernels"
        return Check(name, "not-run", message, "not-asked", False, tuple(figures))
    try:
        recorded = observed.load(baseline)
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)
    if not recorded.classes:
        return invalid(name, f"{baseline.name} has no kernels", "baseline-damaged")
    if recorded.identity.wheel in ("", identity.wheel):
        message = "the baseline is the candidate itself, or does not name its wheel"
        return invalid(name, message, "baseline-is-candidate")
    if recorded.recipe != recipe or identity.model not in ("", recorded.identity.model):
        message = f"the baseline is of {recorded.recipe}, or of other weights"
        return invalid(name, message, "baseline-other-model")
    changed = kernel_classes.changes(recorded.classes, classes, policy.change)
    samples = [
        Sample(layer, reasons.get(layer, reasons.get("", "as with the stock wheel")), text)
        for layer, text in changed.items()
    ]
    message = (
        f"of {len(classes)} kinds and phases, in other classes than with the stock wheel: "
        f"{', '.join(changed) or 'none'}"
    )
    explained = "" in reasons or changed.keys() <= reasons.keys()
    return judged(name, message, "backend-changed", explained, figures, samples)
