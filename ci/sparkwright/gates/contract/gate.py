"""
Compare the kernels and settings that serve with the recipe's contract (G3).

The log shows which kernels vLLM selected; a profile of one request shows which ran in prefill and
decode. The profile decides; the log is checked, too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from packaging.specifiers import SpecifierSet

from sparkwright.bench.recipes.recipe import UNRESOLVED, KernelContract, LayerContract, Recipe
from sparkwright.bench.server import launch
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.server_log import LogInvalid, LogLines, scan
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.kernel_trace import PHASES, KernelTrace
from sparkwright.gates.contract.policy import UNWANTED, ContractPolicy
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

if TYPE_CHECKING:
    from sparkwright.bench.server.client import Client
    from sparkwright.bench.server.launch import Server

CHECKS = (
    *declare("server", "version", *UNWANTED, "no-fallback-kernel"),
    *declare("line-*", "kernels-*", "kv-cache", "backends", measured=True),
    *declare("profile-graphs", "profile-compile", measured=True),
    *declare("log", role="reports"),
    *declare("moe-configuration", role="informs"),
)

#: Kernels that Inductor writes: their kind, and the operations that are in one.
COMPILED = re.compile(r"triton_(?:poi|red|per|tem)_fused")

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **ENDED,
    "log-foreign": (
        "No line of the log tells the release of vLLM. It belongs to another "
        "program, or its beginning is lost."
    ),
    "version-unknown": (
        "What this release of vLLM prints is not known. Read its sources, "
        "then add it to ci/gates/contract.yaml."
    ),
    "version-differs": (
        "The log names another release than the one that answers, so it belongs to another server."
    ),
    "backend-wrong": "The server chose something else than the recipe says. What it measures is "
    "not what the recipe promises.",
    "backend-refused": (
        "The server refused the backend that it was told to use, and used another without an error."
    ),
    "backend-changed": "A layer is served by another kernel than in the baseline, and the recipe "
    "does not explain it. Find out why, or explain it under `changes` of the recipe's contract.",
    "baseline-damaged": "The baseline has no backend table that can be read. Record it again, "
    "with its recipe.",
    "baseline-is-candidate": "The baseline was recorded with the candidate's own wheel. Record it "
    "with the stock wheel or the last release.",
    "baseline-unnamed": "The baseline does not name its wheel. Record it again, with the WHEEL.",
    "baseline-other-model": "The baseline was recorded with another recipe or other weights. "
    "Record it with these.",
    "compile-unseen": "The recipe is served by torch.compile, and the profile has no kernel that "
    "it made: each operation runs by itself.",
    "contract-incomplete": (
        "The recipe's contract does not say what must serve this, because "
        "it was not measured. Read the kernels that the check shows, and "
        "write their pattern into the recipe."
    ),
    "line-missing": (
        "The log lacks a line that the recipe expects. The part was not used, or "
        "this release words the line differently."
    ),
    "emulation": "The server computes by emulation: right numbers, far too slowly, and not by the "
    "kernels of the wheel.",
    "fallback-unlisted": (
        "The server fell back to something, and the recipe does not list "
        "that as harmless. Find out what it means."
    ),
    "kv-differs": "Log and counters disagree about the size of the KV cache: the log is another "
    "server's, or of an earlier start.",
    "kv-outside-plan": (
        "The KV cache does not have the size that the recipe plans. Other "
        "programs hold memory, or the flags differ."
    ),
    "variable-unknown": "A variable is set that this release of vLLM does not read. Remove it, or "
    "use what replaced it.",
    "graphs-unseen": "The recipe is served by CUDA graphs, and none launched a kernel of a decode "
    "step: each launch costs the processor's time.",
    "kernel-unseen": (
        "No kernel of the profile is the one that the recipe names: it did not "
        "run, whatever the log says."
    ),
    "kernel-forbidden": "The profile has a kernel that the recipe excludes, such as Marlin in "
    "place of FP4 kernels.",
    "moe-untuned": "vLLM has no file with tile sizes for these experts on this device, so their "
    "Triton kernels run with general ones. Tune them (`sparkwright model tune`).",
    "profile-missing": (
        "There is no profile, so only the log tells what ran. Start the server with sparkwright."
    ),
    "profile-unreadable": "The profile is not a trace of torch's profiler in which vLLM annotates "
    "its steps.",
}


class ObservedServer(msgspec.Struct, frozen=True):
    """
    What is known of a server from outside.

    Attributes:
        log: What it printed.
        client: Asks it; None if it does not serve.
        trace: A profile of one request (`kernel_trace.record`); None without one.
        failure: Why it was ended before it served; empty if it serves.
        reason: The reason of *failure*.
    """

    log: Path
    client: Client | None = None
    trace: Path | None = None
    failure: str = ""
    reason: str = ""


def observe(server: Server, profiles: Path) -> ObservedServer:
    """Return *server* with a profile of one request, which it writes to *profiles* if it can."""
    client = server.client() if server.ready else None
    trace = None
    with contextlib.suppress(ServerInvalid):
        trace = kernel_trace.record(client, profiles) if client else None
    return ObservedServer(server.log, client, trace, server.failure, server.reason)


def check_launch(
    policy: ContractPolicy, recipe: Recipe, version: str, server: Server, profiles: Path
) -> tuple[Check, ...]:
    """
    Profile one request of the running *server*, and return the checks of its contract.

    The server was started with `kernel_trace.flags` of the folder *profiles*, which only write
    while a profile is taken.
    """
    return check_contract(policy, recipe.contract_for(version), observe(server, profiles))


def contract_fault(checks: Sequence[Check]) -> Check | None:
    """
    Return the check that speaks most against a launch; None if its kernels are the promised ones.

    A contract that names no kernels yet (`contract-incomplete`) is for G3 to report.
    """
    faults = [
        check
        for check in checks
        if check.required and check.state != "pass" and check.reason != "contract-incomplete"
    ]
    return min(faults, key=lambda check: ORDER.index(check.state), default=None)


def check_contract(
    policy: ContractPolicy,
    contract: KernelContract,
    server: ObservedServer,
    compare: Callable[[KernelTrace], Check] | None = None,
) -> tuple[Check, ...]:
    """
    Return the checks of a launch against the *contract* of its recipe.

    They hold for every launch whose measurements count, in G3 and in the throughput gate.

    Args:
        compare: A further check of the profile, if there is one.
    """
    kernels = _kernels(policy, contract, server, compare)
    try:
        lines = scan(server.log, policy.patterns())
    except LogInvalid as error:
        return (
            invalid("log", f"the log cannot be used: {error}", "log-unreadable"),
            *kernels,
        )
    backends = {kind: layer.backend for kind, layer in contract.layers.items()}
    wanted = backends | contract.lines
    return (
        *(_line(name, pattern, lines.get(name, LogLines())) for name, pattern in wanted.items()),
        *(_unwanted(name, lines, contract.harmless) for name in UNWANTED),
        *kernels,
    )


def run(
    policy: ContractPolicy,
    recipe: Recipe,
    server: ObservedServer,
    identity: ServerIdentity | None = None,
    baseline: Path | None = None,
) -> tuple[Check, ...]:
    """
    Return the checks of a server of *recipe*.

    Args:
        identity: The wheel and the model that it serves.
        baseline: A recorded backend table; None if no baseline was named.
    """
    try:
        lines = scan(server.log, policy.patterns())
    except LogInvalid:  # `check_contract` reports it
        return (_serves(server), *check_contract(policy, recipe.contract, server))
    version = next(iter(lines["version"].values), "")
    contract = recipe.contract_for(version)
    own = identity or ServerIdentity()

    def compare(trace: KernelTrace) -> Check:
        return kernel_trace.check_backends(trace, policy, contract, own, recipe.name, baseline)

    return (
        _serves(server),
        _version(policy, lines["version"], server.client),
        *check_contract(policy, contract, server, compare),
        _kv(policy, recipe, lines, server.client),
        *([_configuration(lines)] if contract.moe else []),
    )


def _configuration(lines: Mapping[str, LogLines]) -> Check:
    """Return whether the experts are served with a configuration that was tuned for this device."""
    name, missing, tuned = "moe-configuration", lines["moe-untuned"], lines["moe-tuned"]
    samples = [Sample("log", actual=text) for text in (*missing.texts, *tuned.texts)[:5]]
    if missing.count:
        message = f"vLLM has no {', '.join(missing.values) or 'file'} for these experts"
        return failed(name, message, "moe-untuned", samples=samples, required=False)
    message = ", ".join(tuned.values) or "no kernel that serves reads a tuned configuration"
    return passed(name, message, samples=samples, required=False)


def _serves(server: ObservedServer) -> Check:
    """Return whether it serves its model, and a short completion comes whole and counted right."""
    name, client = "server", server.client
    if server.failure:
        message = f"the server was ended before traffic: {server.failure}"
        return failed(name, message, server.reason or "server-died")
    if client is None:
        message = "no server was given, only a log"
        return not_run(name, message, "server-unreachable", required=False)
    try:
        model, longest = client.model(), client.max_model_len()
        answer = client.complete("One, two, three,", max_tokens=16, ignore_eos=True)
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)
    message = f"it serves {model}, {longest} tokens at most"
    return passed(name, f"{message}; a completion of {len(answer.tokens)} came whole")


def _version(policy: ContractPolicy, lines: LogLines, client: Client | None) -> Check:
    """Return whether the log and the server are of one release, whose lines somebody has read."""
    name, logged = "version", ", ".join(lines.values)
    try:
        answered = client.version() if client else logged
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)
    release = re.match(r"\d{1,9}(?:\.\d{1,9})+", answered, re.ASCII)
    if not logged or not release:
        return invalid(name, "no line of the log tells the release of vLLM", "log-foreign")
    if logged != answered or len(lines.values) > 1:
        message = f"the log is of vLLM {logged}, and vLLM {answered} answers"
        return invalid(name, message, "version-differs")
    if not SpecifierSet(policy.releases).contains(release[0]):
        return invalid(name, f"{answered} is outside {policy.releases}", "version-unknown")
    return passed(name, f"vLLM {answered} wrote the log" + (" and answers" if client else ""))


def _line(kind: str, pattern: str, lines: LogLines) -> Check:
    """Return whether every value of a line is the one that the contract wants."""
    name = f"line-{kind}"
    logged = ", ".join(lines.values) or "nothing"
    samples = [Sample("log", pattern, text) for text in lines.texts[:5]]
    if pattern == UNRESOLVED:
        message = f"the contract does not say what serves {kind}; the log says {logged}"
        return not_run(name, message, "contract-incomplete")
    if not lines.values:
        if pattern:
            message = f"the log never says {kind}; the recipe wants {pattern}"
            return failed(name, message, "line-missing")
        message = f"vLLM says nothing of {kind}, as expected"
        return passed(name, message, figures=[Figure("lines", 0)])
    if not all(re.fullmatch(pattern, value) for value in lines.values):
        message = f"{kind} is {logged}; the recipe wants {pattern}"
        return failed(name, message, "backend-wrong", samples=samples)
    return passed(name, f"{kind} is {logged}", samples=samples[:1])


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
    message = f"{lines.count} lines of the log, such as: {samples[0].actual[-200:]}"
    return failed(name, message, reason, samples=samples)


def _kernels(
    policy: ContractPolicy,
    contract: KernelContract,
    server: ObservedServer,
    compare: Callable[[KernelTrace], Check] | None,
) -> list[Check]:
    """Return the checks that the profile decides."""
    name = "no-fallback-kernel"
    if server.trace is None:
        return [not_run(name, "there is no profile", "profile-missing")]
    try:
        trace = kernel_trace.read(server.trace)
    except ServerInvalid as error:
        return [invalid(name, error.message, error.reason)]
    table = kernel_trace.kernels(trace, policy, contract)
    layers = [_layer(kind, layer, trace, table) for kind, layer in contract.layers.items()]
    layers += [compare(trace)] if compare else []
    if "captured" in contract.lines:
        graphs = Figure("kernels of decode steps in CUDA graphs", trace.graphs)
        layers.append(_profiled("profile-graphs", "graphs-unseen", graphs))
    if contract.lines.get("compile") == "VLLM_COMPILE":
        count = sum(bool(COMPILED.match(kernel)) for kernel in trace["decode"])
        figure = Figure("kernels of torch.compile in decode", count)
        layers.append(_profiled("profile-compile", "compile-unseen", figure))
    allowed = contract.allows
    fallbacks = [pattern for key, pattern in policy.fallback_kernels.items() if key not in allowed]
    samples = [
        Sample(phase, actual=f"{kernel[:200]} ({microseconds:.0f} µs)")
        for phase, kernels in trace.items()
        for kernel, microseconds in kernels.most_common()
        if any(re.search(pattern, kernel) for pattern in (*fallbacks, *contract.forbidden))
    ]
    if samples:
        message = f"the profile has {samples[0].actual}"
        return [failed(name, message, "kernel-forbidden", samples=samples), *layers]
    message = "no kernel of the profile is one that the recipe excludes"
    return [passed(name, message), *layers]


def _profiled(name: str, reason: str, figure: Figure) -> Check:
    """Return whether the profile shows the kernels of *figure*, which the log states."""
    message = f"the profile has {figure.value or 'no'} {figure.name}"
    return judged(name, message, reason, bool(figure.value), [figure])


def _layer(kind: str, layer: LayerContract, trace: KernelTrace, table: Mapping[str, str]) -> Check:
    """Return whether a kernel of the contract serves this kind of layer in both phases."""
    name, samples, unresolved = f"kernels-{kind}", [], []
    for phase in PHASES:
        pattern, kernels = getattr(layer, phase), trace[phase]
        matching = [kernel for kernel in kernels if re.search(pattern, kernel)]
        if pattern == UNRESOLVED:
            unresolved.append(f"{phase} by {table.get(f'{phase} {kind}', 'an unknown kernel')}")
        elif matching:
            samples.append(Sample(phase, pattern, matching[0][:200]))
        else:
            shown = [Sample(phase, pattern, kernel[:200]) for kernel, _ in kernels.most_common(10)]
            message = f"none of {len(kernels)} kernels of {phase} is {pattern}"
            return failed(name, message, "kernel-unseen", samples=shown)
    if unresolved:
        message = f"the contract names no kernel of {kind}; served in {', in '.join(unresolved)}"
        return not_run(name, message[:600], "contract-incomplete")
    return passed(name, f"{kind} is served by the kernels of the contract", samples=samples)


def _numbers(lines: LogLines) -> list[float]:
    # A pattern gives digits, commas and dots; anything else is not its number.
    return [
        float(value.replace(",", ""))
        for value in lines.values
        if re.fullmatch(r"-?[\d,]{1,20}(\.\d{1,9})?", value)
    ]


def _kv(
    policy: ContractPolicy, recipe: Recipe, lines: Mapping[str, LogLines], client: Client | None
) -> Check:
    """
    Return whether the KV cache is as large as planned and holds one longest request.

    The counters of a server, where they tell its size, show whether the log is its own.
    """
    name, plan = "kv-cache", recipe.plan
    sizes, counts = _numbers(lines["kv-gib"]), _numbers(lines["kv-tokens"])
    figures = [Figure("KV cache", size, "GiB", bound=plan.cache) for size in sizes]
    figures += [Figure("tokens in the cache", count, bound=plan.max_model_len) for count in counts]
    if not counts:
        message = "the log does not say how large the KV cache is"
        return failed(name, message, "line-missing", figures=figures)
    try:
        counters = " ".join(client.metrics()) if client else ""
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)
    counted = re.findall(r'kv_cache_size_tokens="(\d{1,15})"', counters, re.ASCII)
    if counted and {float(count) for count in counted} != set(counts):
        message = f"the log says {counts} tokens of KV cache, the counters say {counted}"
        return invalid(name, message, "kv-differs")
    far = any(abs(size - plan.cache) > policy.kv_tolerance * plan.cache for size in sizes)
    if far or min([*sizes, 1]) <= 0 or min(counts) < plan.max_model_len:
        message = (
            f"KV cache of {', '.join(f'{size:g} GiB' for size in sizes)}, {min(counts):,.0f} "
            f"tokens; planned {plan.cache:g} GiB, at least {plan.max_model_len:,} tokens"
        )
        return failed(name, message, "kv-outside-plan", figures=figures)
    return passed(name, f"the KV cache holds {min(counts):,.0f} tokens", figures=figures)
