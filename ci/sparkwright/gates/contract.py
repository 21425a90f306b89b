"""
Compare the kernels and settings that serve with the recipe's contract (G3).

A profile of one request, and of several at once, shows which kernels ran in prefill and decode. In
each, a kind of layer must be served by the class that the recipe states, for nearly all of its
time, and as with the stock wheel unless the recipe or a patch says why. Without the facts of the
stock wheel the gate is no pass.

What the server states of itself (log, ``/v1/models``, ``/metrics``) is part of the verdict, and has
to agree.
"""

import bisect
import gzip
import json
import re
import secrets
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from sparkwright.bench.recipes.recipe import KERNEL_CLASS, KernelContract, Recipe
from sparkwright.bench.records import Count
from sparkwright.bench.server.client import REASONS as SERVER_REASONS, Client, ServerInvalid
from sparkwright.bench.server.server_log import LogPattern, scan
from sparkwright.bench.server.server_process import Server
from sparkwright.cherry_picks.patch import DeclaredChange
from sparkwright.core.strict_yaml import compile_patterns
from sparkwright.gates.core.server_under_test import (
    DRAFTS,
    ENDED,
    REFERENCE,
    ObservedServer,
    Pace,
    PrefixCache,
    ServerIdentity,
    cache_block,
    find_stock,
    prompt_length,
    repeat_prompt,
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

Phase = Literal["prefill", "decode", "batch prefill", "batch decode"]
#: A step with a prefill and decodes is a prefill; the last two are of more than one request.
PHASES: tuple[Phase, ...] = ("prefill", "decode", "batch prefill", "batch decode")

#: Requests that are profiled alone. Another process on the GPU was seen to add milliseconds to one,
#: so that only the quickest step of each kernel is compared with the stock wheel's.
ALONE = 3

#: Bytes of a trace, unpacked; a second of serving gives some tens of megabytes.
LARGEST = 256 * 1024 * 1024
#: Letters of a kernel's name that are looked at; those of CUTLASS have some thousands.
LONGEST_NAME = 8192

#: Objects of its JSON; an event has two, and takes some hundred bytes of memory.
MOST_OBJECTS = 6_000_000
#: Microseconds of an event, at most: a day.
LONGEST_EVENT = 86_400e6

_STEP = re.compile(r"execute_(?:\d+_)?context_(\d{1,9})\(.*\)_generation_(\d{1,9})\(")


class KernelTrace(dict[Phase, Counter[str]]):
    """
    Name of each kernel of a phase → microseconds that it took.

    Attributes:
        quickest: The same of steps of one request, each kernel in the step in which it took least.
        graphs: How many kernels of decode steps of one request CUDA graphs launched.
    """

    def __init__(self) -> None:
        """Begin with no kernel in any phase."""
        super().__init__({phase: Counter() for phase in PHASES})
        self.quickest: dict[Phase, Counter[str]] = {phase: Counter() for phase in PHASES[:2]}
        self.graphs = 0


def profiler_flags(folder: Path) -> tuple[str, ...]:
    """Return the arguments with which a server of vLLM 0.20 or later writes traces to *folder*."""
    # Without the calls of Python, a hundred for each kernel, and without the frontend's process.
    return (
        "--profiler-config",
        json.dumps(
            {
                "profiler": "torch",
                "torch_profiler_dir": str(folder),
                "torch_profiler_with_stack": False,
                "ignore_frontend": True,
            }
        ),
    )


def record_traces(client: Client, folder: Path, batch: int) -> list[Path]:
    """
    Return the traces of some requests alone and of a *batch* at once, one of each rank, written to
    *folder* by a server that was started with `profiler_flags`.

    Raises:
        ServerInvalid: The server does not profile, does not answer, or wrote nothing.
    """
    before = set(folder.rglob("*.json*"))

    def answer(tokens: int) -> None:
        # A prompt that no prefix cache knows, or the prefill would be one of a few tokens.
        prompt = f"{secrets.token_hex(8)} " + " ".join(map(str, range(100)))
        client.complete(prompt, max_tokens=tokens, ignore_eos=True)

    with client.profile(), ThreadPoolExecutor(batch) as pool:
        for _ in range(ALONE):
            answer(8)
        # The last ones arrive while the first ones are answered.
        list(pool.map(answer, [16] * batch))
    written = sorted(
        path
        for path in set(folder.rglob("*.json*")) - before
        if "async_llm" not in path.name and path.is_file()  # a pipe of that name would hang
    )
    if not written:
        raise ServerInvalid("profile-missing", "the server wrote no trace")
    return written


class _Arguments(msgspec.Struct, frozen=True):
    correlation: int | None = None


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments = _Arguments()


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def read_trace(path: Path) -> KernelTrace:
    """
    Return the kernels of the trace in *path*, by phase.

    Raises:
        ServerInvalid: It cannot be read, is too large, or its steps are not annotated
            (``profile-unreadable``).
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST or data.count(b"{") > MOST_OBJECTS:
            raise ValueError(f"it has more than {LARGEST} bytes or {MOST_OBJECTS} objects")
        return _phases(msgspec.json.decode(data, type=_Trace).events)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ServerInvalid(
            "profile-unreadable",
            f"the profile is not an annotated trace of torch's profiler: {error}",
        ) from None


def _phases(events: list[_Event]) -> KernelTrace:
    """
    Return the kernels by phase; raise ValueError if no step is annotated.

    vLLM annotates each step of its model as ``execute_context_1(512)_generation_0(0)``, with the
    requests and tokens of both phases (``annotate_profile`` of ``v1/worker/gpu_worker.py``, 0.20.1
    to 0.33.0). A kernel belongs to the step in which it was launched, by the correlation number of
    the launch; one launch of a CUDA graph has the number of all kernels in the graph. On a CPU
    there are no kernels but operators.
    """
    steps, launches = list[tuple[float, float, int, int]](), dict[int | None, float]()
    kernels, operators, graphs = list[_Event](), list[_Event](), set[int | None]()
    for event in events:
        number = event.args.correlation
        if event.cat == "user_annotation" and (match := _STEP.match(event.name)):
            steps.append((event.ts, event.ts + event.dur, int(match[1]), int(match[2])))
        elif event.cat == "kernel":
            kernels.append(event)
        elif event.cat == "cpu_op":
            operators.append(event)
        elif event.cat in ("cuda_runtime", "cuda_driver") and number is not None:
            launches[number] = event.ts
            if "GraphLaunch" in event.name:
                graphs.add(number)
    steps.sort()
    kernels = kernels or operators
    if kernels and not steps:
        raise ValueError("no step is annotated as prefill or decode")
    trace, alone = KernelTrace(), dict[tuple[Phase, int], Counter[str]]()
    for kernel in kernels:
        launched = launches.get(kernel.args.correlation, kernel.ts)
        index = bisect.bisect_right(steps, launched, key=lambda step: step[0]) - 1
        _, end, prefills, decodes = steps[index] if index >= 0 else (0.0, launched, 0, 0)
        phase = PHASES[2 * (prefills + decodes > 1) + (not prefills)]
        if launched < end and prefills + decodes:
            name = kernel.name[:LONGEST_NAME]
            microseconds = round(min(max(kernel.dur, 0.0), LONGEST_EVENT))
            trace[phase][name] += microseconds
            if phase in trace.quickest:
                alone.setdefault((phase, index), Counter())[name] += microseconds
            trace.graphs += phase == "decode" and kernel.args.correlation in graphs
    for (phase, _), step in alone.items():
        quickest = trace.quickest[phase]
        for name, microseconds in step.items():
            quickest[name] = min(microseconds, quickest.get(name, microseconds))
    return trace


#: Classes of helpers: kernels that move, quantise or route data for others, and a CPU's operators
#: that contain others, whose time would count twice.
HELPER, WRAPPER = "helper", "wrapper"


class KernelPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How a kernel is recognised.

    Attributes:
        kind: Of the layers that it serves.
        label: Its class.
        pattern: A regular expression that is searched in the kernel's name.
        beside: One that is searched in the names of all kernels of the phase; for names that do not
            tell the class.
    """

    kind: Annotated[str, msgspec.Meta(pattern="^(attention|linear|moe|gdn|mamba|sampling|other)$")]
    label: Annotated[
        str, msgspec.Meta(pattern=f"^({HELPER}|{WRAPPER}|unclassified|{KERNEL_CLASS})$")
    ] = msgspec.field(name="class")
    pattern: str
    beside: str = ""

    def __post_init__(self) -> None:
        compile_patterns(self.pattern, self.beside)


class ClassifiedKernel(NamedTuple):
    """
    A kernel of a profile.

    Attributes:
        kind, label: As of `KernelPattern`; empty if no pattern knows it.
        microseconds: That it took in the phase.
    """

    phase: Phase
    kind: str
    label: str
    name: str
    microseconds: int

    @property
    def layer(self) -> str:
        """The phase and the kind: ``decode moe``."""
        return f"{self.phase} {self.kind}"

    @property
    def computes(self) -> bool:
        """Whether it computes a layer, and does not only help."""
        return self.label not in ("", HELPER, WRAPPER)


def classify(
    trace: Mapping[Phase, Counter[str]], patterns: Sequence[KernelPattern]
) -> list[ClassifiedKernel]:
    """Return the kernels of *trace* with their kind and class, the longest first."""
    kernels = []
    for phase, counted in trace.items():
        names = "\n".join(counted)
        for name, microseconds in counted.most_common():
            entry = _find_pattern(patterns, name, names)
            kind, label = (entry.kind, entry.label) if entry else ("", "")
            kernels.append(ClassifiedKernel(phase, kind, label, name, microseconds))
    return kernels


def _find_pattern(patterns: Sequence[KernelPattern], name: str, names: str) -> KernelPattern | None:
    """Return the first of *patterns* that knows the kernel *name* of a phase with *names*."""
    for entry in patterns:
        if re.search(entry.pattern, name) and re.search(entry.beside, names):
            return entry
    return None


def time_shares(kernels: Iterable[ClassifiedKernel], group_by: str) -> dict[str, dict[str, float]]:
    """
    Return phase and kind of layer (``decode moe``) → label or name of kernels → share of time.

    Args:
        group_by: ``label`` or ``name``.
    """
    times: dict[str, Counter[str]] = {}
    for kernel in kernels:
        if kernel.computes:
            counted = times.setdefault(kernel.layer, Counter())
            counted[getattr(kernel, group_by)] += kernel.microseconds
    shares = {}
    for layer, counted in sorted(times.items()):
        total = max(counted.total(), 1)
        shares[layer] = {key: time / total for key, time in counted.most_common()}
    return shares


def served_share(
    kernels: Sequence[ClassifiedKernel], wanted: str, name: str, least_part: float
) -> float:
    """
    Return the share of the time of *kernels*, of one kind and phase, by the *wanted* classes.

    Args:
        wanted: As of `KernelContract.serves`; of several alternatives the best counts.
        name: Searched in the name of each kernel that counts.
        least_part: The least share of the first class of a sum; below it, the sum has none.
    """
    total, best, times = max(total_time(kernels), 1), 0.0, Counter[str]()
    for kernel in kernels:
        if re.search(name, kernel.name):
            times[kernel.label] += kernel.microseconds
    for alternative in wanted.split("|"):
        promised, *others = alternative.split("+")
        if not others or times[promised] >= least_part * total:
            served = times[promised] + sum(times[label] for label in others)
            best = max(best, served / total)
    return best


def phase_times(kernels: Sequence[ClassifiedKernel]) -> dict[str, tuple[int, int]]:
    """Return phase → the microseconds of its *kernels*, and of the helpers among them."""
    times, helpers = Counter[Phase](), Counter[Phase]()
    for kernel in kernels:
        times[kernel.phase] += kernel.microseconds
        if kernel.label == HELPER:
            helpers[kernel.phase] += kernel.microseconds
    return {str(phase): (time, helpers[phase]) for phase, time in times.items()}


def total_time(kernels: Iterable[ClassifiedKernel]) -> int:
    """Return the microseconds that *kernels* took."""
    return sum(kernel.microseconds for kernel in kernels)


def class_changes(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]], most: float
) -> dict[str, str]:
    """Return ``decode moe`` and the like → the class whose share changed by more than *most*."""
    changed = {}
    for layer in sorted({*before, *now}):
        old, new = before.get(layer, {}), now.get(layer, {})
        # Tokens may be drawn between two steps.
        unseen = layer.endswith("sampling") and not (old and new)
        for key in () if unseen else sorted({*old, *new}):
            was, share = old.get(key, 0.0), new.get(key, 0.0)
            if abs(share - was) > most:
                changed[layer] = f"{key}: {was:.0%} before, {share:.0%} now"
    return changed


#: Why lines of the log fail a launch.
Unwanted = Annotated[
    str, msgspec.Meta(pattern="^(emulation|backend-refused|graph-memory-negative)$")
]

CHECKS = (
    *declare("log", "no-fallback-kernel"),
    *declare("observed", "kernels-*", "backends", measured=True),
    *declare("profile-graphs", "profile-compile", measured=True),
)

#: Kernels that Inductor writes: their kind, and the operations that are in one.
COMPILED = re.compile(r"triton_(?:poi|red|per|tem)_fused")

#: Why a server was ended that is no fault of the wheel.
OF_MACHINE = ("memory-low", "kernel-no-memory", "log-unreadable")

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **ENDED,
    **REFERENCE,
    "backend-refused": (
        "The server refused the backend that it was told to use, and used another without an error."
    ),
    "backend-changed": "Layers are served by another class of kernels than with the stock wheel, "
    "and nothing explains it. Find out why, or explain it under `changes` of the recipe's contract "
    "or by the trailer `Changes: kernels / RECIPE / WHY` of a patch.",
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
            helpers in their quickest steps, as a share of the phase's.
        helpers_us: Microseconds by which that time may differ in any phase.
        fallbacks: Classes that may only serve where the recipe states them.
        kernels: How kernels are recognised; the first pattern that matches counts.
    """

    lines: dict[str, LogPattern]
    unwanted: dict[Unwanted, LogPattern]
    batch: Annotated[int, msgspec.Meta(ge=2, le=64)]
    share: Annotated[float, msgspec.Meta(gt=0.5, lt=1)]
    least_part: Annotated[float, msgspec.Meta(gt=0, lt=0.5)]
    unknown: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    helpers: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    change: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    helpers_us: Count
    fallbacks: tuple[str, ...]
    kernels: tuple[KernelPattern, ...]


def profile(
    policy: ContractPolicy, recipe: Recipe, server: Server, folder: Path
) -> KernelTrace | Check:
    """
    Return the kernels of a request and of a batch, or the check that says why there are none.

    Those of all ranks on this machine count together, and the graphs of the rank with the fewest.
    The *server* writes the profile to *folder*: it was started with `profiler_flags`
    of that folder, which only write while a profile is taken.
    """
    batch = min(policy.batch, recipe.plan.max_num_seqs)
    try:
        trace, *others = map(read_trace, record_traces(server.client(), folder, batch))
    except ServerInvalid as error:
        reason = error.reason if error.reason == "profile-unreadable" else "profile-missing"
        return invalid("no-fallback-kernel", error.message, reason)
    for other in others:
        for phase, times in other.items():
            trace[phase].update(times)
        for phase, times in other.quickest.items():
            trace.quickest[phase].update(times)
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
    kernels = classify(trace, policy.kernels)
    excluded, unjudged = list[ClassifiedKernel](), list[ClassifiedKernel]()
    helpers = list[ClassifiedKernel]()
    for kernel in kernels:
        stated = re.split(r"[+|]", contract.serves.get(kernel.kind, ""))
        fallback = kernel.label in policy.fallbacks and kernel.label not in stated
        if fallback or any(re.search(pattern, kernel.name) for pattern in contract.forbidden):
            excluded.append(kernel)
        if kernel.label == HELPER:
            helpers.append(kernel)
        # That of sampling need not be stated.
        judged_kinds = {*contract.serves, "sampling"}
        if not kernel.kind or (kernel.computes and kernel.kind not in judged_kinds):
            unjudged.append(kernel)
    samples = _samples(excluded)
    message = "kernels of the profile that the recipe excludes: "
    message += samples[0].actual if samples else "none"
    checks.append(
        judged("no-fallback-kernel", message, "kernel-forbidden", not samples, samples=samples)
    )
    checks += [_layer(policy, contract, kind, kernels) for kind in contract.serves]
    checks += [
        _bounded("kernels-unknown", "that nothing judges", unjudged, kernels, policy.unknown),
        _bounded("kernels-helpers", "that only help", helpers, kernels, policy.helpers),
    ]
    if contract.graphs:
        what = "kernels of decode steps in CUDA graphs"
        checks.append(_profiled("profile-graphs", "graphs-unseen", what, trace.graphs))
    if contract.compiled:
        what, count = "kernels of torch.compile in decode", 0
        for name in trace["decode"]:
            count += bool(COMPILED.match(name))
        checks.append(_profiled("profile-compile", "compile-unseen", what, count))
    return tuple(checks)


def run(
    policy: ContractPolicy,
    recipe: Recipe,
    server: Server,
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
        message = f"the server was ended before traffic: {server.failure}"
        judge = invalid if server.reason in OF_MACHINE else failed
        return (judge("observed", message, server.reason or "server-died"),)
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
    server: Server,
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
    lines, client = scan(server.log, policy.lines), server.client()
    kernels, quickest = list[ClassifiedKernel](), list[ClassifiedKernel]()
    if not isinstance(trace, Check):
        kernels = classify(trace, policy.kernels)
        quickest = classify(trace.quickest, policy.kernels)
    metrics, limit = client.metrics(), client.max_model_len()
    cache = PrefixCache()
    if block := cache_block(metrics):
        length = prompt_length(block, 3, limit - 1)
        text = " ".join(map(str, range(length)))
        cache = repeat_prompt(client, [*client.tokenize(text)[:length]], uuid.uuid4().hex)
    return ObservedServer(
        identity,
        recipe,
        client.model(),
        client.version(),
        limit,
        cache,
        DRAFTS in metrics,
        {name: tuple(match.values) for name, match in lines.items() if match.values},
        time_shares(kernels, "name"),
        time_shares(kernels, "label"),
        phase_times(quickest),
    )


def same_launches(
    policy: ContractPolicy,
    first: Mapping[str, Mapping[str, float]],
    now: Mapping[str, Mapping[str, float]],
) -> Check:
    """Return whether a launch has the classes of kernels of the *first* one of the same wheel."""
    changed = class_changes(first, now, policy.change)
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
    except ServerInvalid as error:
        return invalid("log", error.message, error.reason)
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
) -> Check:
    """Return whether the class of the contract serves this kind of layer in each phase."""
    wanted, pattern = contract.serves.get(kind, ""), contract.names.get(kind, "")
    figures, samples, texts = list[Figure](), list[Sample](), list[str]()
    reason, good, least = "kernel-class", True, 100 * policy.share
    for phase in PHASES:
        own = [k for k in kernels if k.computes and (k.phase, k.kind) == (phase, kind)]
        share = 100 * served_share(own, wanted, pattern, policy.least_part)
        if not own:
            reason = "kernel-unseen"
        good = good and share >= least
        figures.append(Figure(f"{phase} by {wanted}", share, "%", len(own), bound=least))
        texts.append(f"{share:.0f} % of {phase} by {wanted}")
        samples += _samples(own[:5], f"{wanted} {pattern}".strip())
    message = f"time of {kind}: {', '.join(texts)}"
    return judged(f"kernels-{kind}", message, reason, good, figures, samples)


def _bounded(
    name: str,
    which: str,
    chosen: Sequence[ClassifiedKernel],
    kernels: Sequence[ClassifiedKernel],
    most: float,
) -> Check:
    """Return whether those *chosen* of *kernels* take at most a share of *most* in each phase."""
    figures, samples, texts = list[Figure](), list[Sample](), list[str]()
    good, times = True, phase_times(kernels)
    for phase in PHASES:
        own = [kernel for kernel in chosen if kernel.phase == phase]
        share = 100 * total_time(own) / max(times.get(phase, (0, 0))[0], 1)
        good = good and share <= 100 * most
        figures.append(Figure(f"{phase} by kernels {which}", share, "%", bound=100 * most))
        texts.append(f"{share:.1f} % of {phase} by kernels {which}")
        samples += _samples(own[:10])
    return judged(name, ", ".join(texts), name, good, figures, samples)


def _backends(
    policy: ContractPolicy, facts: ObservedServer, baseline: Path | None, reasons: Mapping[str, str]
) -> Check:
    """
    Return the check ``backends``: whether layers have the classes of kernels of the *baseline*.

    Args:
        reasons: ``decode moe`` and the like, or empty for all → why it may differ.
    """
    name, figures = "backends", list[Figure]()
    for layer, shares in facts.classes.items():
        for label, share in shares.items():
            figures.append(Figure(f"{layer}: {label}", 100 * share, "%"))
    if baseline is None:
        message = "name --against a folder that --record wrote, to compare its server's kernels"
        return Check(name, "not-run", message, "stock-not-named", figures=tuple(figures))
    stock = find_stock(baseline, ObservedServer, facts.served, name, facts.shape)
    if isinstance(stock, Check):
        return stock
    if not stock.classes:
        return invalid(name, f"{baseline.name} has no kernels", "reference-damaged")
    # A reason that explains a change for one request explains the same change for a batch.
    explained = dict(reasons)
    for layer, why in reasons.items():
        explained[f"batch {layer}"] = why
    changed = class_changes(stock.classes, facts.classes, policy.change)
    # Only phases of one request are compared: the steps of a batch depend on when its requests
    # arrive.
    for phase in PHASES[:2]:
        _, helpers = facts.times.get(phase, (0, 0))
        whole, before = stock.times.get(phase, (0, 0))
        if helpers - before > max(policy.change * whole, policy.helpers_us):
            changed[f"{phase} helper"] = f"{before} µs before, {helpers} µs now"
    samples = [
        Sample(layer, explained.get(layer, explained.get("", "as with the stock wheel")), text)
        for layer, text in changed.items()
    ]
    message = (
        f"of {len(facts.classes)} kinds and phases, in other classes than with the stock wheel: "
        f"{', '.join(changed) or 'none'}"
    )
    return judged(
        name, message, "backend-changed", "" in explained or changed.keys() <= explained.keys(),
        figures, samples,
    )  # fmt: skip
