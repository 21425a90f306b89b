"""
Compare the kernels and settings that serve with the recipe's contract (G3).

The log shows which kernels vLLM selected; a profile of one request shows which ran in prefill and
decode. The profile decides; the log is checked, too.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.specifiers import SpecifierSet

from sparkwright.bench.recipes.recipe import UNRESOLVED, KernelContract, LayerContract, Recipe
from sparkwright.bench.server import launch
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.server_log import (
    LogInvalid,
    LogLines,
    LogPattern,
    compile_patterns,
    scan,
)
from sparkwright.core.errors import FileError
from sparkwright.core.files import read_json
from sparkwright.core.store import write_file
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.kernel_trace import KernelTrace, family
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
    {"version", "attention", "linear", "moe", "moe-tuned", "moe-untuned", "kv-gib", "kv-tokens"}
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
    "version-unknown": (
        "What this release of vLLM prints is not known, or the log is not of one server alone. "
        "Read the release's sources, then add it to ci/gates/contract.yaml."
    ),
    "backend-wrong": "The server chose something else than the recipe says. If the log lacks the "
    "line, the part was not used, or this release words the line differently.",
    "backend-refused": (
        "The server refused the backend that it was told to use, and used another without an error."
    ),
    "backend-changed": "A layer is served by another kernel than in the baseline, and the recipe "
    "does not explain it. Find out why, or explain it under `changes` of the recipe's contract.",
    "baseline-damaged": "The baseline has no backend table that can be read. Record it again, "
    "with its recipe.",
    "baseline-is-candidate": "The baseline was recorded with the candidate's own wheel, or names "
    "none. Record it with the stock wheel or the last release.",
    "baseline-other-model": "The baseline was recorded with another recipe or other weights. "
    "Record it with these.",
    "compile-unseen": "The recipe is served by torch.compile, and the profile has no kernel that "
    "it made: each operation runs by itself.",
    "contract-incomplete": (
        "The recipe's contract does not say what must serve this, because "
        "it was not measured. Read the kernels that the check shows, and "
        "write their pattern into the recipe."
    ),
    "emulation": "The server computes by emulation: right numbers, far too slowly, and not by the "
    "kernels of the wheel.",
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


class ContractPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What vLLM prints, and what no server of a recipe may show.

    Attributes:
        releases: Version specifier of the releases whose lines were read in their sources.
        kv_tolerance: Share by which the KV cache may differ from the recipe's plan.
        lines: Lines that state a choice; each pattern has a group *value*.
        unwanted: Lines that should not be there.
        layer_kinds: Regular expressions by which a kernel belongs to a kind of layer, where the
            recipe's contract names none; the first that matches counts.
        fallback_kernels: Regular expressions of kernels that may only serve a recipe that allows
            them.
    """

    releases: str
    kv_tolerance: Annotated[float, Meta(gt=0, lt=1)]
    lines: dict[str, LogPattern]
    unwanted: dict[str, LogPattern]
    layer_kinds: dict[str, str]
    fallback_kernels: dict[str, str]

    def __post_init__(self) -> None:
        SpecifierSet(self.releases)
        compile_patterns(*self.layer_kinds.values(), *self.fallback_kernels.values())
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


def contract_fault(checks: Sequence[Check]) -> Check | None:
    """
    Return the check that speaks most against a launch; None if its kernels are the promised ones.

    A contract that names no kernels yet (`contract-incomplete`) is for G3 to report.
    """
    return min(
        (
            check
            for check in checks
            if check.required and check.state != "pass" and check.reason != "contract-incomplete"
        ),
        key=lambda check: ORDER.index(check.state),
        default=None,
    )


def check_contract(
    policy: ContractPolicy,
    contract: KernelContract,
    log: Path,
    trace: Path | None,
    compare: Callable[[KernelTrace], Check] | None = None,
) -> tuple[Check, ...]:
    """
    Return the checks of a launch against the *contract* of its recipe.

    They hold for every launch whose measurements count, in G3 and in the throughput gate.

    Args:
        log: What the server printed.
        trace: A profile of one request; None without one.
        compare: A further check of the profile, if there is one.
    """
    kernel_checks = _kernel_checks(policy, contract, trace, compare)
    try:
        lines = scan(log, policy.lines | policy.unwanted)
    except LogInvalid as error:
        return (
            invalid("log", f"the log cannot be used: {error}", "log-unreadable"),
            *kernel_checks,
        )
    wanted = {kind: layer.backend for kind, layer in contract.layers.items()} | contract.lines
    return (
        *(_line(name, pattern, lines.get(name, LogLines())) for name, pattern in wanted.items()),
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
) -> tuple[Check, ...]:
    """
    Return the checks of a server of *recipe*.

    Args:
        trace: See `profile`.
        identity: The wheel and the model that it serves.
        baseline: A recorded backend table; None if no baseline was named.
    """
    try:
        lines = scan(server.log, policy.lines | policy.unwanted)
    except LogInvalid:  # `check_contract` reports it
        return (_serves(server), *check_contract(policy, recipe.contract, server.log, trace))
    contract = recipe.contract_for(next(iter(lines["version"].values), ""))

    compare = partial(
        check_backends,
        policy=policy,
        contract=contract,
        identity=identity,
        recipe=recipe.name,
        baseline=baseline,
    )
    return (
        _serves(server),
        _version(policy, lines["version"]),
        *check_contract(policy, contract, server.log, trace, compare),
        _kv(policy, recipe, lines),
        *([_configuration(lines)] if contract.moe else []),
    )


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
    if pattern == UNRESOLVED:
        message = f"the contract does not say what serves {kind}, which is {logged}"
        return not_run(name, message, "contract-incomplete")
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
    policy: ContractPolicy,
    contract: KernelContract,
    path: Path | None,
    compare: Callable[[KernelTrace], Check] | None,
) -> list[Check]:
    """Return the checks that the profile at *path* decides."""
    name = "no-fallback-kernel"
    if path is None:
        return [not_run(name, "there is no profile", "profile-missing")]
    try:
        trace = kernel_trace.read(path)
    except ServerInvalid as error:
        return [invalid(name, error.message, error.reason)]
    excluded = [
        *(text for key, text in policy.fallback_kernels.items() if key not in contract.allows),
        *contract.forbidden,
    ]
    samples = [
        Sample(phase, actual=f"{kernel[:200]} ({microseconds:.0f} µs)")
        for phase, counted in trace.items()
        for kernel, microseconds in counted.most_common()
        if any(re.search(pattern, kernel) for pattern in excluded)
    ]
    shown = samples[0].actual if samples else "none"
    message = f"kernels of the profile that the recipe excludes: {shown}"
    checks = [judged(name, message, "kernel-forbidden", not samples, samples=samples)]
    table = kernels(trace, policy, contract)
    checks += [_layer(kind, layer, trace, table) for kind, layer in contract.layers.items()]
    if compare:
        checks.append(compare(trace))
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


def _layer(kind: str, layer: LayerContract, trace: KernelTrace, table: Mapping[str, str]) -> Check:
    """Return whether a kernel of the contract serves this kind of layer in both phases."""
    name, samples = f"kernels-{kind}", list[Sample]()
    for phase, kernels in trace.items():
        pattern = getattr(layer, phase)
        if pattern == UNRESOLVED:
            served = table.get(f"{phase} {kind}", "an unknown kernel")
            message = f"the contract names no kernel of {kind}; served in {phase} by {served}"
            return not_run(name, message[:600], "contract-incomplete")
        matching = [kernel for kernel in kernels if re.search(pattern, kernel)]
        if not matching:
            message = f"none of {len(kernels)} kernels of {phase} is {pattern}"
            shown = [Sample(phase, pattern, kernel[:200]) for kernel, _ in kernels.most_common(10)]
            return failed(name, message, "kernel-unseen", samples=shown)
        samples.append(Sample(phase, pattern, matching[0][:200]))
    return passed(name, f"{kind} is served by the kernels of the contract", samples=samples)


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


class BackendTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The kernels of one server, stored as the baseline of a recipe.

    Attributes:
        identity: The wheel, the model and the machine.
        recipe: Name of the recipe.
        kernels: ``decode moe`` and the like → `family` of the kernel that took most of the time.
    """

    identity: ServerIdentity
    recipe: str
    kernels: Annotated[dict[str, str], Meta(min_length=1)]
    format: Literal[1] = 1


def save(table: BackendTable, path: Path) -> None:
    """Write *table* to *path*, whole or not at all."""
    write_file(path, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def shares(
    trace: KernelTrace, policy: ContractPolicy, contract: KernelContract
) -> dict[str, Counter[str]]:
    """Return ``decode moe`` and the like → the kernels of that kind with their microseconds."""
    layers: dict[str, Counter[str]] = {}
    for phase, kernels in trace.items():
        own = {kind: getattr(layer, phase) for kind, layer in contract.layers.items()}
        patterns = [entry for entry in own.items() if entry[1] != UNRESOLVED]
        patterns += policy.layer_kinds.items()
        for name, microseconds in kernels.items():
            kind = next((kind for kind, pattern in patterns if re.search(pattern, name)), None)
            if kind in contract.layers:
                layers.setdefault(f"{phase} {kind}", Counter())[family(name)] += microseconds
    return dict(sorted(layers.items()))


def kernels(trace: KernelTrace, policy: ContractPolicy, contract: KernelContract) -> dict[str, str]:
    """Return ``decode moe`` and the like → the kernel that took most of the time."""
    layers = shares(trace, policy, contract)
    return {layer: counted.most_common(1)[0][0] for layer, counted in layers.items()}


def check_backends(
    trace: KernelTrace,
    policy: ContractPolicy,
    contract: KernelContract,
    identity: ServerIdentity,
    recipe: str,
    baseline: Path | None,
) -> Check:
    """
    Return the check ``backends``: whether each layer has the kernel of the *baseline*.

    A change that `KernelContract.changes` explains passes, and is shown.
    """
    name, table = "backends", kernels(trace, policy, contract)
    microseconds = shares(trace, policy, contract)
    figures = [
        Figure(f"{layer}: {kernel}"[:200], 100 * times[kernel] / max(times.total(), 1), "%")
        for (layer, kernel), times in zip(table.items(), microseconds.values(), strict=True)
    ]
    if baseline is None:
        message = "name --against a folder that --record wrote, to compare its server's kernels"
        return Check(name, "not-run", message, "not-asked", False, tuple(figures))
    try:
        recorded = read_json(baseline, BackendTable)
    except FileError:
        return invalid(name, f"{baseline.name} is no backend table", "baseline-damaged")
    if recorded.identity.wheel in ("", identity.wheel):
        message = "the baseline is the candidate itself, or does not name its wheel"
        return invalid(name, message, "baseline-is-candidate")
    if recorded.recipe != recipe or identity.model not in ("", recorded.identity.model):
        message = f"the baseline is of {recorded.recipe}, or of other weights"
        return invalid(name, message, "baseline-other-model")
    samples = [
        Sample(layer, recorded.kernels.get(layer, "none"), table.get(layer, "none"))
        for layer in sorted({*table, *recorded.kernels})
        if recorded.kernels.get(layer) != table.get(layer)
    ]
    changed = [sample.case for sample in samples]
    message = (
        f"of {len(table)} kernels, others than in the baseline: {', '.join(changed) or 'none'}"
    )
    explained = set(changed) <= set(contract.changes)
    return judged(name, message, "backend-changed", explained, figures, samples)
