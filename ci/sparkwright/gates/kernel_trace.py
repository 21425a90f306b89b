"""
Kernels that a profiler saw in prefill and in decode steps, of one request and of several at once: a
trace of torch's profiler.

vLLM annotates each step of its model as ``execute_context_1(512)_generation_0(0)``, with the
requests and tokens of both phases (``annotate_profile`` of ``v1/worker/gpu_worker.py``, 0.20.1 to
0.33.0). A kernel belongs to the step in which it was launched, by the correlation number of the
launch; one launch of a CUDA graph has the number of all kernels in the graph. On a CPU there are no
kernels but operators.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import secrets
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.recipe import KERNEL_CLASS, KernelContract
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.server_log import compile_patterns

Phase = Literal["prefill", "decode", "batch prefill", "batch decode"]
#: A step with a prefill and decodes is a prefill; the last two are of more than one request.
PHASES: tuple[Phase, ...] = ("prefill", "decode", "batch prefill", "batch decode")

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
        graphs: How many kernels of decode steps of one request CUDA graphs launched.
    """

    graphs: int = 0


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
    Return the traces of one request and of a *batch* at once, one of each rank, written to *folder*
    by a server that was started with `profiler_flags`.

    Raises:
        ServerInvalid: The server does not profile, does not answer, or wrote nothing.
    """
    before = set(folder.rglob("*.json*"))

    def answer(tokens: int) -> None:
        # A prompt that no prefix cache knows, or the prefill would be one of a few tokens.
        prompt = f"{secrets.token_hex(8)} " + " ".join(str(number) for number in range(100))
        client.complete(prompt, max_tokens=tokens, ignore_eos=True)

    with client.profile(), ThreadPoolExecutor(batch) as pool:
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


def read_trace(path: Path, phases: Sequence[Phase] = PHASES) -> KernelTrace:
    """
    Return the kernels of the trace in *path*, by those of *phases*.

    Raises:
        ServerInvalid: It cannot be read, is too large, or its steps are not annotated
            (``profile-unreadable``).
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST or data.count(b"{") > MOST_OBJECTS:
            raise ValueError(f"it has more than {LARGEST} bytes or {MOST_OBJECTS} objects")
        return _phases(msgspec.json.decode(data, type=_Trace).events, phases)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ServerInvalid(
            "profile-unreadable",
            f"the profile is not an annotated trace of torch's profiler: {error}",
        ) from None


def _phases(events: list[_Event], phases: Sequence[Phase]) -> KernelTrace:
    """Return the kernels by phase; raise ValueError if no step is annotated."""
    steps = sorted(
        (event.ts, event.ts + event.dur, int(match[1]), int(match[2]))
        for event in events
        if event.cat == "user_annotation" and (match := _STEP.match(event.name))
    )
    launches: dict[int | None, float] = {
        event.args.correlation: event.ts
        for event in events
        if event.cat in ("cuda_runtime", "cuda_driver") and event.args.correlation is not None
    }
    graphs = {event.args.correlation for event in events if "GraphLaunch" in event.name} - {None}
    kernels = [event for event in events if event.cat == "kernel"]
    kernels = kernels or [event for event in events if event.cat == "cpu_op"]
    if kernels and not steps:
        raise ValueError("no step is annotated as prefill or decode")
    trace = KernelTrace({phase: Counter() for phase in phases})
    for kernel in kernels:
        launched = launches.get(kernel.args.correlation, kernel.ts)
        index = bisect.bisect_right(steps, launched, key=lambda step: step[0]) - 1
        _, end, prefills, decodes = steps[index] if index >= 0 else (0.0, launched, 0, 0)
        phase = PHASES[2 * (prefills + decodes > 1) + (not prefills)]
        if launched < end and prefills + decodes and phase in trace:
            microseconds = round(min(max(kernel.dur, 0.0), LONGEST_EVENT))
            trace[phase][kernel.name[:LONGEST_NAME]] += microseconds
            trace.graphs += phase == "decode" and kernel.args.correlation in graphs
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

    kind: Annotated[str, Meta(pattern="^(attention|linear|moe|gdn|mamba|sampling|other)$")]
    label: Annotated[str, Meta(pattern=f"^({HELPER}|{WRAPPER}|unclassified|{KERNEL_CLASS})$")] = (
        msgspec.field(name="class")
    )
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


def classify(trace: KernelTrace, patterns: Sequence[KernelPattern]) -> list[ClassifiedKernel]:
    """Return the kernels of *trace* with their kind and class, the longest first."""
    kernels = []
    for phase, counted in trace.items():
        names = "\n".join(counted)
        for name, microseconds in counted.most_common():
            matching = (
                entry
                for entry in patterns
                if re.search(entry.pattern, name) and re.search(entry.beside, names)
            )
            entry = next(matching, None)
            kind, label = (entry.kind, entry.label) if entry else ("", "")
            kernels.append(ClassifiedKernel(phase, kind, label, name, microseconds))
    return kernels


def serving(kernels: Iterable[ClassifiedKernel], kind: str = "") -> list[ClassifiedKernel]:
    """Return those of *kernels* that compute layers of *kind* (empty: of any), without helpers."""
    return [
        kernel
        for kernel in kernels
        if kernel.label not in ("", HELPER, WRAPPER) and kind in ("", kernel.kind)
    ]


def shares(kernels: Iterable[ClassifiedKernel], group_by: str) -> dict[str, dict[str, float]]:
    """
    Return phase and kind of layer (``decode moe``) → label or name of kernels → share of time.

    Args:
        group_by: ``label`` or ``name``.
    """
    times: dict[str, Counter[str]] = {}
    for kernel in serving(kernels):
        times.setdefault(kernel.layer, Counter())[getattr(kernel, group_by)] += kernel.microseconds
    return {
        layer: {key: time / max(counted.total(), 1) for key, time in counted.most_common()}
        for layer, counted in sorted(times.items())
    }


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
    total, best = max(time(kernels), 1), 0.0
    named = [kernel for kernel in kernels if re.search(name, kernel.name)]
    for alternative in wanted.split("|"):
        promised, *others = alternative.split("+")
        own = time(kernel for kernel in named if kernel.label == promised)
        beside = time(kernel for kernel in named if kernel.label in others)
        if not others or own >= least_part * total:
            best = max(best, (own + beside) / total)
    return best


def fallbacks(
    kernels: Iterable[ClassifiedKernel], contract: KernelContract, classes: Sequence[str]
) -> list[ClassifiedKernel]:
    """Return the kernels of one of *classes*, in kinds for which *contract* does not state it."""
    return [
        kernel
        for kernel in serving(kernels)
        if kernel.label in classes
        and kernel.label not in re.split(r"[+|]", contract.serves.get(kernel.kind, ""))
    ]


def unjudged(
    kernels: Iterable[ClassifiedKernel], contract: KernelContract
) -> list[ClassifiedKernel]:
    """
    Return the *kernels* that no pattern knows, or that compute layers of a kind that *contract*
    does not state; of sampling, it need not.
    """
    stated = {*contract.serves, "sampling"}
    return [
        kernel
        for kernel in kernels
        if not kernel.kind or (serving([kernel]) and kernel.kind not in stated)
    ]


def helpers(kernels: Iterable[ClassifiedKernel]) -> list[ClassifiedKernel]:
    """Return those of *kernels* that only move, quantise or route."""
    return [kernel for kernel in kernels if kernel.label == HELPER]


def times(kernels: Sequence[ClassifiedKernel]) -> dict[str, tuple[int, int]]:
    """Return phase → the microseconds of its *kernels*, and of the helpers among them."""
    return {
        phase: (
            time(kernel for kernel in kernels if kernel.phase == phase),
            time(kernel for kernel in helpers(kernels) if kernel.phase == phase),
        )
        for phase in PHASES
    }


def time(kernels: Iterable[ClassifiedKernel]) -> int:
    """Return the microseconds that *kernels* took."""
    return sum(kernel.microseconds for kernel in kernels)


def changes(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]], most: float
) -> dict[str, str]:
    """Return ``decode moe`` and the like → the class whose share changed by more than *most*."""
    changed = {}
    for layer in sorted({*before, *now}):
        old, new = before.get(layer, {}), now.get(layer, {})
        if layer.endswith("sampling") and not (old and new):
            continue  # tokens may be drawn between two steps
        for key in sorted({*old, *new}):
            was = old.get(key, 0.0)
            share = new.get(key, 0.0)
            if abs(share - was) > most:
                changed[layer] = f"{key}: {was:.0%} before, {share:.0%} now"
    return changed
