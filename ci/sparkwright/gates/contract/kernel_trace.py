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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.server.client import Client, ServerInvalid

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


def flags(folder: Path) -> tuple[str, ...]:
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


def record(client: Client, folder: Path, batch: int) -> list[Path]:
    """
    Return the traces of one request and of a *batch* at once, one of each rank, written to *folder*
    by a server that was started with `flags`.

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


def read(path: Path, phases: Sequence[Phase] = PHASES) -> KernelTrace:
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
