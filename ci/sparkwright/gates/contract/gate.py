"""
G3: the kernels and settings that serve, compared with the recipe's contract.

A log states an intention. So a profile of one request decides which kernels served prefill and
decode, and the lines of the log are a second witness.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from packaging.specifiers import SpecifierSet

from sparkwright.bench.recipes import preflight
from sparkwright.bench.recipes.recipe import UNRESOLVED, KernelContract, LayerContract, Recipe
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.server_log import LogInvalid, LogLines, scan
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.kernel_trace import PHASES, KernelTrace, TraceInvalid
from sparkwright.gates.contract.policy import ContractPolicy
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    not_run,
    passed,
)

if TYPE_CHECKING:
    from sparkwright.bench.server.client import Client
    from sparkwright.bench.server.launch import Server

TITLE = "what the server says it runs"

CHECKS = (
    *declare("server", "stream", "version", "no-unknown-variable", "no-emulation", "no-refusal"),
    *declare("no-fallback", "no-fallback-kernel", "graph-memory", "variables", "flags"),
    *declare("kv-counters"),
    *declare("line-*", "kernels-*", "kv-cache", "backends", measured=True),
    *declare("log", role="reports"),
)

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    "server-died": "The server ended by itself before it answered. Read the last lines of its log.",
    "server-late": "The server did not answer in time. Read its log, and give it more time where "
    "it only loads.",
    "memory-low": "The machine's free memory fell below the reserve, and the server was ended. "
    "Lower --gpu-memory-utilization.",
    "graph-memory-negative": "vLLM believes that CUDA graphs give memory back, and plans more KV "
    "cache than there is memory; the server gets no traffic. Pin --kv-cache-memory-bytes and "
    "watch MemAvailable (vllm #44740).",
    "log-unreadable": "The log is missing, is no text, or is too large. Save what the server "
    "prints, from its first line.",
    "log-foreign": "No line of the log tells the release of vLLM. It is another program's, or its "
    "beginning is lost.",
    "version-unknown": "Nobody has read what this release of vLLM prints. Read its sources, then "
    "add it to ci/gates/contract.yaml.",
    "version-differs": "The log is of another release than the one that answers. It is another "
    "server's.",
    "backend-wrong": "The server chose something else than the recipe says. What it measures is "
    "not what the recipe promises.",
    "backend-refused": "The server refused the backend that it was told to use, and took another "
    "without more words.",
    "backend-changed": "A layer is served by another kernel than in the baseline, and the recipe "
    "does not explain it. Find out why, or explain it under `changes` of the recipe's contract.",
    "baseline-damaged": "The baseline has no backend table that can be read. Record it again, "
    "with its recipe.",
    "baseline-is-candidate": "The baseline was recorded with the candidate's own wheel. Record it "
    "with the stock wheel or the last release.",
    "baseline-unnamed": "The baseline does not name its wheel. Record it again, with the WHEEL.",
    "baseline-other-model": "The baseline was recorded with another recipe or other weights. "
    "Record it with these.",
    "contract-incomplete": "The recipe's contract does not say what must serve this, as nobody "
    "has measured it. Read the kernels that the check shows, and write their pattern into the "
    "recipe.",
    "line-missing": "The log never says what the recipe expects it to. The part was not used, or "
    "the release words it otherwise.",
    "emulation": "The server computes by emulation: right numbers, far too slowly, and not by the "
    "kernels of the wheel.",
    "fallback-unlisted": "The server fell back to something, and the recipe does not list that as "
    "harmless. Look what it means.",
    "kv-differs": "Log and counters disagree about the size of the KV cache: the log is another "
    "server's, or of an earlier start.",
    "kv-uncounted": "The counters of this release do not tell the size of the KV cache.",
    "kv-outside-plan": "The KV cache has not the size that the recipe plans. Other programs hold "
    "memory, or the flags differ.",
    "flag-missing": "The server was started without a flag or variable of the recipe, or with "
    "another value.",
    "flags-unseen": "The command line of a server that was not started here cannot be seen. Start "
    "it with sparkwright.",
    "variable-unknown": "A variable is set that this release of vLLM does not read. Remove it, or "
    "use what replaced it.",
    "variables-unseen": "The environment of a server that was not started here cannot be seen. "
    "Start it with sparkwright.",
    "envs-unreadable": "vllm/envs.py is missing or is not what vLLM has there. The environment is "
    "damaged; install the wheel again.",
    "kernel-unseen": "No kernel of the profile is the one that the recipe names: whatever the log "
    "says, it did not run.",
    "kernel-forbidden": "The profile has a kernel that the recipe excludes, such as Marlin in "
    "place of FP4 kernels.",
    "profile-missing": "There is no profile, so nothing but the log's words tells what ran. Start "
    "the server with sparkwright.",
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
        flags: Its command line behind ``vllm serve MODEL``; None if not known.
        variables: Its environment; None if not known.
        package: The folder ``vllm`` that it runs; None if not known.
        failure: Why it was ended before it served; empty if it serves.
        reason: The reason of *failure*.
    """

    log: Path
    client: Client | None = None
    trace: Path | None = None
    flags: tuple[str, ...] | None = None
    variables: Mapping[str, str] | None = None
    package: Path | None = None
    failure: str = ""
    reason: str = ""


def observe(server: Server, profiles: Path) -> ObservedServer:
    """Return *server* with a profile of one request, which it writes to *profiles* if it can."""
    client = server.client() if server.ready else None
    trace = None
    with contextlib.suppress(ServerInvalid, TraceInvalid):
        trace = kernel_trace.record(client, profiles) if client else None
    plan = server.plan
    package = wheel_identity.site_packages(plan.python) / "vllm"
    failure = "" if server.ready else server.failure
    return ObservedServer(
        server.log, client, trace, plan.flags, plan.environment(), package, failure, server.reason
    )


def check_contract(
    policy: ContractPolicy, contract: KernelContract, server: ObservedServer
) -> tuple[Check, ...]:
    """
    Return the checks of a launch against the *contract* of its recipe.

    They hold for every launch whose measurements count, in G3 and in the throughput gate.
    """
    try:
        lines = scan(server.log, policy.patterns())
    except LogInvalid as error:
        return (
            invalid("log", f"the log cannot be used: {error.message}", "log-unreadable"),
            *_kernels(policy, contract, server),
        )
    backends = {kind: layer.backend for kind, layer in contract.layers.items()}
    return (
        *(_line(name, wanted, lines) for name, wanted in (backends | contract.lines).items()),
        _none("no-emulation", "emulation", "it computes nothing by emulation", lines["emulation"]),
        _none(
            "no-refusal",
            "backend-refused",
            "it refused no backend that it was told to use",
            lines["refused"],
        ),
        _none(
            "no-fallback",
            "fallback-unlisted",
            "it fell back to nothing unlisted",
            lines["fallback"],
            contract.harmless,
        ),
        *_kernels(policy, contract, server),
    )


def check_launch(
    policy: ContractPolicy, recipe: Recipe, version: str, server: Server, profiles: Path
) -> tuple[Check, ...]:
    """
    Profile one request of the running *server*, and return the checks of its contract.

    The server was started with `kernel_trace.flags` of the folder *profiles*, which only write
    while a profile is taken.
    """
    return check_contract(policy, contract_of(recipe, version), observe(server, profiles))


def contract_fault(checks: Sequence[Check]) -> Check | None:
    """
    Return the check that speaks most against a launch: a failed one, an invalid one, a missing one.

    A contract that names no kernels yet (`contract-incomplete`) is for G3 to report.
    """
    order = ("fail", "invalid", "inconclusive", "not-run")
    faults = [
        check
        for check in checks
        if check.required and check.state in order and check.reason != "contract-incomplete"
    ]
    return min(faults, key=lambda check: order.index(check.state), default=None)


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
    except LogInvalid:
        lines = {name: LogLines() for name in policy.patterns()}
    version = next(iter(lines["version"].values), "")
    contract = contract_of(recipe, version)
    checks = [
        _serves(server),
        _answers(server.client),
        _version(policy, lines["version"], server.client),
        *check_contract(policy, contract, server),
        _none(
            "no-unknown-variable",
            "variable-unknown",
            "it complains of no unknown variable",
            lines["unknown"],
        ),
        _variables(server),
        _flags(recipe, version, server),
        _none(
            "graph-memory",
            "graph-memory-negative",
            "no estimate of CUDA graphs is negative",
            lines["graph-memory"],
        ),
        _kv(policy, recipe, lines["kv-gib"], lines["kv-tokens"]),
        _kv_counters(lines["kv-tokens"], server.client),
    ]
    with contextlib.suppress(OSError, TraceInvalid):  # `check_contract` reports it
        trace = kernel_trace.read(server.trace) if server.trace else None
        if trace:
            identity = identity or ServerIdentity()
            checks.append(
                kernel_trace.check_backends(
                    trace, policy, contract, identity, recipe.name, baseline
                )
            )
    return tuple(checks)


def contract_of(recipe: Recipe, version: str) -> KernelContract:
    """Return the contract of *recipe* for the release *version*."""
    variant = recipe.find_variant(version)
    return (variant.contract if variant else None) or recipe.contract


def _serves(server: ObservedServer) -> Check:
    if server.failure:
        return failed(
            "server",
            f"the server was ended before traffic: {server.failure}",
            server.reason or "server-died",
        )
    if server.client is None:
        return not_run(
            "server", "no server was given, only a log", "server-unreachable", required=False
        )
    try:
        return passed(
            "server",
            f"it serves {server.client.model()}, {server.client.max_model_len()} tokens at most",
        )
    except ServerInvalid as error:
        return invalid("server", error.message, error.reason)


def _answers(client: Client | None) -> Check:
    """Return whether a short completion comes whole and counted right."""
    if client is None:
        return not_run(
            "stream", "no server was given, only a log", "server-unreachable", required=False
        )
    try:
        answer = client.complete("One, two, three,", max_tokens=16, ignore_eos=True)
    except ServerInvalid as error:
        return invalid("stream", error.message, error.reason)
    return passed("stream", f"a completion of {len(answer.tokens)} tokens came whole")


def _version(policy: ContractPolicy, lines: LogLines, client: Client | None) -> Check:
    logged = ", ".join(lines.values)
    try:
        answered = client.version() if client else logged
    except ServerInvalid as error:
        return invalid("version", error.message, error.reason)
    release = re.match(r"\d+(?:\.\d+)+", answered)
    if not logged or not release:
        return invalid("version", "no line of the log tells the release of vLLM", "log-foreign")
    if logged != answered or len(lines.values) > 1:
        message = f"the log is of vLLM {logged}, and vLLM {answered} answers"
        return invalid("version", message, "version-differs")
    if not SpecifierSet(policy.releases).contains(release[0]):
        message = f"vLLM {answered} is outside {policy.releases}"
        return invalid("version", message, "version-unknown")
    return passed("version", f"vLLM {answered} wrote the log" + (" and answers" if client else ""))


def _line(name: str, wanted: str, log: Mapping[str, LogLines]) -> Check:
    """Return whether every value of a line is the one that the contract wants."""
    lines = log.get(name, LogLines())
    samples = [Sample("log", actual=text) for text in lines.texts[:5]]
    logged = ", ".join(lines.values) or "nothing"
    if wanted == UNRESOLVED:
        return not_run(
            f"line-{name}",
            f"the contract does not say what serves {name}; the log says {logged}",
            "contract-incomplete",
        )
    if not wanted and not lines.values:
        return passed(
            f"line-{name}",
            f"vLLM says nothing of {name}, as expected",
            figures=[Figure("lines", 0)],
        )
    if not lines.values:
        return failed(
            f"line-{name}", f"the log never says {name}; the recipe wants {wanted}", "line-missing"
        )
    if not all(re.fullmatch(wanted, value) for value in lines.values):
        return failed(
            f"line-{name}",
            f"{name} is {logged}; the recipe wants {wanted}",
            "backend-wrong",
            samples=samples,
        )
    return passed(f"line-{name}", f"{name} is {logged}", samples=samples[:1])


def _none(
    name: str, reason: str, message: str, lines: LogLines, harmless: Sequence[str] = ()
) -> Check:
    """Return whether no line of a kind is there, but for harmless ones."""
    texts = [
        text for text in lines.texts if not any(re.search(pattern, text) for pattern in harmless)
    ]
    # Of lines beyond those that are kept, it is not known whether they are harmless.
    if texts or lines.count > len(lines.texts):
        shown = [Sample("log", actual=text) for text in texts or lines.texts]
        return failed(
            name,
            f"{lines.count} lines of the log, such as: {shown[0].actual[-200:]}",
            reason,
            samples=shown,
        )
    return passed(name, message)


def _kernels(
    policy: ContractPolicy, contract: KernelContract, server: ObservedServer
) -> list[Check]:
    """Return the checks that the profile decides."""
    if server.trace is None:
        return [not_run("no-fallback-kernel", "there is no profile", "profile-missing")]
    try:
        trace = kernel_trace.read(server.trace)
    except TraceInvalid as error:
        return [
            invalid(
                "no-fallback-kernel",
                f"the profile cannot be used: {error.message}",
                "profile-unreadable",
            )
        ]
    table = kernel_trace.kernels(trace, policy, contract)
    layers = [_layer(kind, layer, trace, table) for kind, layer in contract.layers.items()]
    return [_fallback_kernels(policy, contract, trace), *layers]


def _fallback_kernels(
    policy: ContractPolicy, contract: KernelContract, trace: KernelTrace
) -> Check:
    patterns = [
        pattern for name, pattern in policy.fallback_kernels.items() if name not in contract.allows
    ]
    bad = [
        Sample(phase, actual=f"{name[:200]} ({microseconds:.0f} µs)")
        for phase, kernels in trace.items()
        for name, microseconds in kernels.most_common()
        if any(re.search(pattern, name) for pattern in (*patterns, *contract.forbidden))
    ]
    if bad:
        return failed(
            "no-fallback-kernel",
            f"the profile has {bad[0].actual}",
            "kernel-forbidden",
            samples=bad,
        )
    return passed("no-fallback-kernel", "no kernel of the profile is one that the recipe excludes")


def _layer(kind: str, layer: LayerContract, trace: KernelTrace, table: Mapping[str, str]) -> Check:
    """Return whether a kernel of the contract serves this kind of layer in both phases."""
    name, samples, unresolved = f"kernels-{kind}", [], []
    for phase in PHASES:
        pattern, kernels = getattr(layer, phase), trace[phase]
        if pattern == UNRESOLVED:
            unresolved.append(f"{phase} by {table.get(f'{phase} {kind}', 'an unknown kernel')}")
        elif matching := [kernel for kernel in kernels if re.search(pattern, kernel)]:
            samples.append(Sample(phase, pattern, matching[0][:200]))
        else:
            shown = [
                Sample(phase, pattern, f"{kernel[:200]} ({us:.0f} µs)")
                for kernel, us in kernels.most_common(10)
            ]
            message = f"none of {len(kernels)} kernels of {phase} is {pattern}"
            return failed(name, message, "kernel-unseen", samples=shown)
    if unresolved:
        message = (
            f"the contract names no kernel of {kind}; it was served in {', in '.join(unresolved)}"
        )
        return not_run(name, message[:600], "contract-incomplete")
    return passed(name, f"{kind} is served by the kernels of the contract", samples=samples)


def _flags(recipe: Recipe, version: str, server: ObservedServer) -> Check:
    """Return whether the server has the flags and variables of the recipe, and none overridden."""
    if server.flags is None:
        return not_run("flags", "the server was not started here", "flags-unseen", required=False)
    variant = recipe.find_variant(version)
    if variant is None:
        return not_run("flags", f"{recipe.name} does not know vLLM {version}", "version-unknown")
    names = Counter(preflight.split_flag(flag)[0] for flag in server.flags)
    twice = {
        flag
        for flag in server.flags
        if "." not in flag and names[preflight.split_flag(flag)[0]] > 1
    }
    missing = [flag for flag in recipe.flags(variant) if flag not in server.flags or flag in twice]
    variables = server.variables or {}
    missing += [
        f"{name}={value}"
        for name, value in variant.variables.items()
        if variables.get(name) != value
    ]
    if missing:
        return failed(
            "flags", f"the server was started without {', '.join(missing)}", "flag-missing"
        )
    return passed("flags", "it has the recipe's flags and variables")


def _variables(server: ObservedServer) -> Check:
    """Return whether vLLM reads every ``VLLM_`` variable that is set for the server."""
    if server.variables is None or server.package is None:
        return not_run("variables", "the server was not started here", "variables-unseen")
    try:
        unread = wheel_identity.unread_variables(server.variables, server.package)
    except wheel_identity.SourceInvalid as error:
        return invalid(
            "variables", f"the variables that vLLM reads are not known: {error}", "envs-unreadable"
        )
    if not unread:
        return passed("variables", "vLLM reads all VLLM_ variables that are set")
    samples = [
        Sample(name, _advice(name, similar), f"set to {server.variables[name]!r:.60}")
        for name, similar in unread.items()
    ]
    message = f"vLLM does not read {', '.join(unread)}; it changes nothing"
    return failed("variables", message, "variable-unknown", samples=samples)


def _advice(name: str, similar: str) -> str:
    if replaced := preflight.REPLACED.get(name):
        return f"gone since {replaced.since}" + (f"; now {replaced.use}" if replaced.use else "")
    return f"perhaps {similar}" if similar else ""


def _numbers(lines: LogLines) -> list[float]:
    # A pattern gives digits, commas and dots; anything else is not its number.
    return [
        float(value.replace(",", ""))
        for value in lines.values
        if re.fullmatch(r"-?[\d,]{1,20}(\.\d{1,9})?", value)
    ]


def _kv_counters(tokens: LogLines, client: Client | None) -> Check:
    """Return whether the log is of the server that answers, by the size of its KV cache."""
    name = "kv-counters"
    if client is None:
        message = "no server was given, only a log"
        return not_run(name, message, "server-unreachable", required=False)
    try:
        names = [one for one in client.metrics() if one.startswith("vllm:cache_config_info{")]
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)
    counted = {
        float(size)
        for one in names
        for size in re.findall(r'kv_cache_size_tokens="(\d{1,15})"', one, re.ASCII)
    }
    if not counted:
        message = "this release counts no tokens of the KV cache"
        return not_run(name, message, "kv-uncounted", required=False)
    if counted != set(_numbers(tokens)):
        logged = ", ".join(tokens.values) or "nothing"
        texts = ", ".join(f"{size:,.0f}" for size in sorted(counted))
        message = f"the log says {logged} tokens of KV cache, the counters say {texts}"
        return invalid(name, message, "kv-differs")
    return passed(name, "log and counters tell the same size of the KV cache")


def _kv(policy: ContractPolicy, recipe: Recipe, gib: LogLines, tokens: LogLines) -> Check:
    """Return whether the KV cache is as large as planned and holds one longest request."""
    plan, sizes, counts = recipe.plan, _numbers(gib), _numbers(tokens)
    figures = [Figure("KV cache", size, "GiB", bound=plan.cache) for size in sizes]
    figures += [
        Figure("tokens in the KV cache", count, bound=plan.max_model_len) for count in counts
    ]
    if not counts:
        return failed(
            "kv-cache",
            "the log does not say how large the KV cache is",
            "line-missing",
            figures=figures,
        )
    far = plan.cache and any(
        abs(size - plan.cache) > policy.kv_tolerance * plan.cache for size in sizes
    )
    if far or min([*sizes, 1]) <= 0 or min(counts) < plan.max_model_len:
        message = (
            f"KV cache of {', '.join(f'{size:g} GiB' for size in sizes)}, {min(counts):,.0f} tokens"
        )
        planned = f"planned {plan.cache or 0:g} GiB, at least {plan.max_model_len:,} tokens"
        return failed("kv-cache", f"{message}; {planned}", "kv-outside-plan", figures=figures)
    return passed("kv-cache", f"the KV cache holds {min(counts):,.0f} tokens", figures=figures)
