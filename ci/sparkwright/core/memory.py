"""
The memory that a server takes, and whether this machine and vLLM admit it.

vLLM 0.33 starts a server if the share of the memory that its flags ask for is free, also when the
size of its cache is given (``v1/worker/utils.py``), and if the cache holds one whole request
(``v1/core/kv_cache_planning.py``). A GB10 has one memory for processors and GPU, and nothing
polices it: what does not fit takes the whole machine down (vllm #46307, #56824). So everything that
lies in it is counted, and a part stays free. Sizes are GiB, as in vLLM's flags and log.
"""

import math
import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.core.process import Limits

GIB = 2**30
#: Share of a unified memory that stays free: 12 GiB of a Spark.
FLOOR = 0.1
#: Largest share of the memory for a model without a plan: where it is shared (seed report 001
#: leaves a quarter), and of a GPU's own (vLLM's default).
SHARE, OWN_SHARE = 0.75, 0.92
#: For a model without a plan: the server's processes (6 GiB were seen, glm-5.3-one-spark#3), and
#: activations and CUDA graphs (1.7 GiB, vllm-ultimate-dgx-spark#9), which alone lie in a GPU's own
#: memory.
RESERVE, GRAPHS = 8.0, 2.0
#: For kernels that are tuned after the cache was allocated; such a host went 2 GiB beyond its
#: memory (eugr#388). Proposed.
AUTOTUNE = 4.0
#: Largest cache of a model whose size is not known before its download. Proposed.
UNKNOWN_CACHE = 8.0
#: Tokens of the shortest request that is proposed, and of a block of the cache.
SHORTEST, BLOCK = 1024, 16
#: The smallest cache that is proposed.
LEAST_CACHE = 0.25
#: Bytes of a number of the cache, by the beginning of its type.
ELEMENTS = {"fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625, "float32": 4.0}
#: Fields of a config that list the kinds of its layers, and those whose product is a state.
KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
#: The numbers of nvidia-smi, or its words for those that it does not know.
_SIZES = re.compile(r"(\d+|\[.+\]|N/A) (\d+|\[.+\]|N/A)")
#: Seconds that nvidia-smi may take; a busy one took more than three.
PATIENCE = 15.0
#: The driver's own folder of GPUs, which is there when nvidia-smi fails.
DRIVER = Path("/proc/driver/nvidia/gpus")
#: Gibibytes from which a process is named as holding memory, and how many are.
LARGE, SHOWN = 0.2, 6


class Tenant(msgspec.Struct, frozen=True):
    """A process that holds *gib* of memory, resident or of the GPU."""

    pid: int
    name: str
    gib: float


class MachineMemory(msgspec.Struct, frozen=True):
    """
    The memory that a server on this machine takes its own from.

    Attributes:
        total: The host's if there is no GPU or it shares that; else the GPU's.
        free: What is available of it now.
        gpus: The number of NVIDIA GPUs.
        unified: Whether the GPU shares the host's memory.
        tenants: The processes that hold most of it; a GB10's GPU memory is in no resident size.
        failure: What nvidia-smi says if it fails, and the GPU is there; empty if it answers.
    """

    total: float
    free: float
    gpus: int = 0
    unified: bool = False
    tenants: tuple[Tenant, ...] = ()
    failure: str = ""

    @classmethod
    def here(cls, *, empty: bool = False) -> Self:
        """
        Return this machine, or it as if no other program ran (*empty*). The rules of unified memory
        hold also if nvidia-smi fails.
        """
        if empty:
            machine = cls.here()
            return msgspec.structs.replace(machine, free=machine.total, tenants=())
        host = psutil.virtual_memory()
        total, free = host.total / GIB, process.available_megabytes() * 1e6 / GIB
        rows, failure = query("gpu=name,memory.total,memory.free")
        files = sorted(DRIVER.glob("*/information"))
        rows = [row for row in rows if _SIZES.fullmatch(" ".join(row[1:]))]
        names = [row[0] for row in rows] or [file.read_text("utf-8", "replace") for file in files]
        if not names and not failure:
            return cls(total, free, tenants=_tenants())
        index = re.match(r"\d+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        row = rows[min(int(index[0]) if index else 0, len(rows) - 1)] if rows else []
        sizes = [int(size) / 1024 for size in row[1:] if size.isdecimal()]
        unified = any("GB10" in name for name in names)
        if len(sizes) < 2 and (rows or platform.machine() == "aarch64"):
            unified = True
        own_memory = bool(sizes) and not unified
        if own_memory:
            total, free = sizes
        tenants = _tenants(gpus=bool(rows), resident=not own_memory)
        return cls(total, free, max(1, len(names)), unified, tenants, failure)

    @property
    def shared(self) -> bool:
        """Whether a server's memory is the host's."""
        return self.unified or not self.gpus

    def floor(self, stated: float | None = None) -> float:
        """Return what stays free: *stated*, or else a share; a GPU's own memory needs no floor."""
        if not self.shared:
            return 0.0
        return FLOOR * self.total if stated is None else stated

    def reserve(self, stated: float = RESERVE) -> float:
        """Return what a server takes here of *stated*, which counts its processes, too."""
        return stated if self.shared else min(stated, GRAPHS)

    @property
    def autotune(self) -> float:
        """What the tuning of kernels takes beyond what is free; a GPU's own memory may run out."""
        return AUTOTUNE if self.unified else 0.0


def guard_limit(floor: float) -> float:
    """
    Return the GiB below which the guard ends a server that was admitted with *floor*: half of that
    and 2 GiB for its reaction, and always less than the floor, which the server may reach.
    """
    return min(floor / 2 + 2, 0.75 * floor)


def _tenants(*, gpus: bool = False, resident: bool = True) -> tuple[Tenant, ...]:
    """Return the processes that hold much memory, *resident* or of *gpus*; the largest first."""
    sizes, names = defaultdict[int, float](float), dict[int, str]()
    for pid, size, name in query("compute-apps=pid,used_memory,process_name")[0] if gpus else ():
        if pid.isdecimal() and size.isdecimal():
            sizes[int(pid)], names[int(pid)] = int(size) / 1024, Path(name).name
    for running in psutil.process_iter(["name", "memory_info"]) if resident else ():
        if memory := running.info["memory_info"]:
            sizes[running.pid] += memory.rss / GIB
            names.setdefault(running.pid, running.info["name"])
    tenants = [Tenant(pid, names[pid], size) for pid, size in sizes.items() if size >= LARGE]
    return tuple(sorted(tenants, key=lambda tenant: tenant.gib, reverse=True)[:SHOWN])


def query(what: str) -> tuple[list[list[str]], str]:
    """
    Return the rows that nvidia-smi prints of *what*, or why it does not; neither without it. Other
    lines, such as warnings, are left out; the last column may hold commas.
    """
    command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"]
    try:
        ended = process.run_limited(command, Limits(PATIENCE, 1 << 20, 1))
    except CommandError:
        return [], ""
    if ended.late or ended.status:
        how = f"did not end within {PATIENCE:g} s" if ended.late else f"ended by {ended.status}"
        return [], (ended.tail.splitlines() or [f"nvidia-smi {how}"])[0][:200]
    commas, rows = what.count(","), list[list[str]]()
    for line in ended.tail.splitlines():
        words = re.split(r"\s*,\s*", line.strip(), maxsplit=commas)
        if len(words) > commas:
            rows.append(words)
    return rows, ""


#: A sound Spark has 110.4 GiB free of its 121.7 (NVIDIA/xr-ai#462); of the smaller one, half of the
#: memory and as much for the system are assumed.
SPARKS = {
    "128 GB": MachineMemory(121.7, 110.4, 1, unified=True),
    "64 GB": MachineMemory(60.8, 49.5, 1, unified=True),
}

# A server.


class CacheKind(msgspec.Struct, frozen=True):
    """
    The cache of the layers of a kind.

    Attributes:
        name: ``full``, ``latent`` (MLA), ``sliding``, ``state`` (recurrent layers) or ``drafts``.
        layers: How many they are.
        token: Bytes of a token in all of them.
        window: Tokens that sliding layers look back at.
        state: Bytes whatever the length of the request.
    """

    name: str
    layers: int
    token: float = 0.0
    window: int = 0
    state: float = 0.0


class CacheShape(msgspec.Struct, frozen=True):
    """
    What a request takes of the cache.

    Attributes:
        token: Bytes of each of its tokens; 0 if unknown.
        fixed: Bytes whatever its length: windows of tokens, and states of recurrent layers.
        kinds: Those of its layers.
    """

    token: float = 0.0
    fixed: float = 0.0
    kinds: tuple[CacheKind, ...] = ()

    def request(self, tokens: int) -> float:
        """Return the GiB of a request of *tokens*, and of the block that vLLM keeps empty."""
        return (self.token * (math.ceil(tokens / BLOCK) + 1) * BLOCK + self.fixed) / GIB

    def tokens(self, gib: float) -> int:
        """Return the tokens of the longest request that a cache of *gib* holds."""
        blocks = (gib * GIB - self.fixed) / (self.token * BLOCK) - 1 if self.token else 0
        return max(0, math.floor(blocks)) * BLOCK

    def read(self, context: int, *, drafts: bool = False) -> float:
        """
        Return the bytes of a request with *context* tokens that a step reads, or that a pass of the
        layers that draft does (*drafts*). A state is read and written, four bytes a number.
        """
        count = 0.0
        for kind in self.kinds:
            if (kind.name == "drafts") == drafts:
                tokens = min(context, kind.window) if kind.name == "sliding" else context
                count += kind.token * tokens + kind.state
        return count

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], dtype: str = "auto", parts: int = 1, drafts: int = 0
    ) -> Self:
        """
        Return the shape by the *config* of the part of a model that writes; unknown if that lacks a
        field. Layers of an unknown kind count as those that attend to everything.

        Args:
            dtype: Of the cache, as in ``--kv-cache-dtype``.
            parts: GPUs that share the work of each layer.
            drafts: Layers that draft.
        """
        try:
            kinds = tuple(_kinds(config, dtype, parts, drafts))
        except (TypeError, ValueError, ArithmeticError):
            return cls()
        token = fixed = 0.0
        for kind in kinds:
            fixed += kind.state
            if kind.name == "sliding":
                # A window holds what is read at a time, too.
                fixed += kind.token * (kind.window + 8192)
            else:
                token += kind.token
        return cls(token, fixed, kinds)


def _kinds(config: Mapping[str, Any], dtype: str, parts: int, drafts: int) -> Iterator[CacheKind]:
    """Yield the kinds of layers that have a cache."""

    def number(name: str, default: int = 0) -> int:
        return int(config.get(name) or default)

    plain = 4.0 if config.get("torch_dtype") == "float32" else 2.0
    element = ELEMENTS.get(re.split("_|$", dtype)[0], plain)
    listed = next(filter(None, map(config.get, KINDS)), ())
    kinds = [str(kind) for kind in listed if kind not in ("-", "E", "moe", "mlp")]
    if not kinds:
        every, layers = number("full_attention_interval", 1), min(number("num_hidden_layers"), 4096)
        kinds = ["linear" if (layer + 1) % every else "attention" for layer in range(layers)]
    recurrent = sum(kind.startswith(("linear", "mamba", "M")) for kind in kinds)
    windowed = sum(kind.startswith("sliding") for kind in kinds)
    heads, size = number("num_attention_heads"), number("head_dim")
    size = size or number("hidden_size") // heads
    near = 2 * max(1, number("num_key_value_heads", heads) // parts) * size * element
    keys = number("num_global_key_value_heads", number("num_key_value_heads", heads))
    far = 2 * max(1, keys // parts) * number("global_head_dim", size) * element
    rank = number("kv_lora_rank")
    if rank:
        far = (rank + number("qk_rope_head_dim")) * element
    full = len(kinds) - recurrent - windowed
    if full:
        yield CacheKind("latent" if rank else "full", full, full * far)
    if windowed:
        yield CacheKind("sliding", windowed, windowed * near, number("sliding_window"))
    if recurrent:
        state = max(math.prod(map(number, names)) for names in STATES)
        # Four bytes a number, and a copy.
        yield CacheKind("state", recurrent, state=recurrent * state * 8 / parts)
    if drafts:
        yield CacheKind("drafts", drafts, drafts * far)


class ServerMemory(msgspec.Struct, frozen=True):
    """
    The memory of a server on one node, or on each GPU of a node.

    Attributes:
        weights: Of the target and what drafts; 0 if they are not known.
        cache: For keys and values, if its size is given.
        share: Of the memory that must be free at the start, if it is given.
        reserve: For activations, CUDA graphs, and the server's own processes.
        autotune: For kernels that are tuned at the start.
        length: Tokens of the longest request. *shape*: of the cache.
        floor: What stays free.
        pinned: Whether vLLM is given the size of the cache; it sizes the cache by a profile else.
    """

    weights: float
    cache: float | None = None
    share: float | None = None
    reserve: float = RESERVE
    autotune: float = 0.0
    length: int = 0
    shape: CacheShape = CacheShape()
    floor: float = 0.0
    pinned: bool = True

    @property
    def fixed(self) -> float:
        """What it takes beside its cache."""
        return self.weights + self.reserve + self.autotune

    @property
    def needed(self) -> float:
        return self.fixed + (self.cache or 0.0)

    def settled(self, machine: MachineMemory) -> Self:
        """Return this server with the cache and the share that *machine* has for it now."""
        server = self
        if server.cache is None:
            request = max(LEAST_CACHE, self.shape.request(self.length))
            most = (SHARE if machine.shared else OWN_SHARE) * machine.total
            room = min(max(most, self.fixed + request), machine.free - self.floor)
            room = room if self.share is None else self.share * machine.total
            cache = math.floor((room - self.fixed) * 1024) / 1024
            cache = cache if self.weights else min(cache, UNKNOWN_CACHE)
            server = msgspec.structs.replace(self, cache=max(0.0, cache))
        if server.share is None:
            # Rounded down: what is needed is free, so the share is.
            share = math.floor(1000 * min(server.needed / machine.total, 0.999)) / 1000
            server = msgspec.structs.replace(server, share=max(0.001, share))
        return server

    def flags(self, machine: MachineMemory) -> tuple[str, ...]:
        """Return the arguments of ``vllm serve`` that state its memory on *machine*."""
        server = self.settled(machine)
        cache = f"--kv-cache-memory-bytes={round((server.cache or 0.0) * GIB)}"
        return (*([cache] if self.pinned else []), f"--gpu-memory-utilization={server.share:g}")

    def text(self, machine: MachineMemory) -> str:
        """Return the parts of its memory, and what *machine* has."""
        server = self.settled(machine)
        tokens = server.shape.tokens(server.cache or 0.0)
        return (
            f"{server.weights:.1f} weights + {server.cache:.1f} cache"
            + (f" ({tokens:,} tokens)" if tokens else "")
            + f" + {server.reserve + server.autotune:.1f} reserve = {server.needed:.1f} GiB; "
            f"{machine.free:.1f} of {machine.total:.1f} are free, {server.floor:.1f} stay free"
        )


class Remedy(msgspec.Struct, frozen=True):
    """A change, as *text*, to a *server* or a *machine*, after which it is admitted."""

    text: str
    server: ServerMemory
    machine: MachineMemory


def refusals(server: ServerMemory, machine: MachineMemory) -> Iterator[tuple[str, str]]:
    """Yield references and messages: why *machine*, or vLLM on it, does not admit *server*."""
    server = server.settled(machine)
    total, cache, share = machine.total, server.cache or 0.0, server.share or 0.0
    needed = server.needed + server.floor
    parts = (
        f"{server.weights:.1f} GiB of weights, {cache:.1f} of cache, "
        f"{server.reserve + server.autotune:.1f} in reserve"
    )
    parts += f" and {server.floor:.1f} that stay free are {needed:.1f}"
    if needed > total:
        yield ("memory-short", f"{parts}; the machine has {total:.1f}")
        return
    if share * total + server.floor > total:
        message = f"{share:g} of {total:.1f} GiB leaves {(1 - share) * total:.1f}; "
        yield ("memory-utilization", f"{message}{server.floor:.1f} must stay free")
    elif share * total > machine.free - 1e-6:  # vLLM rounds it up to a whole byte
        message = f"vLLM asks for {share:g} of {total:.1f} GiB, {share * total:.1f}, at its start; "
        yield ("memory-utilization", f"{message}{machine.free:.1f} are free")
    if needed > machine.free:
        yield ("memory-held", f"{parts}; {machine.free:.1f} are free")
    if server.shape.token and server.shape.request(server.length) > cache:
        message = f"the cache holds {server.shape.tokens(cache):,} tokens, and a request may have "
        yield ("cache-short", f"{message}{server.length:,}")


def remedies(server: ServerMemory, machine: MachineMemory, *, flags: bool = True) -> list[Remedy]:
    """
    Return what makes *machine* and vLLM admit *server*, each checked: other *flags*, or the end of
    other programs. There are none for one that is admitted, or that needs a larger machine.
    """
    if not any(refusals(server, machine)):
        return []
    changes = [*_flags(server, machine)] if flags else []
    ends = [*_ends(server, machine)]
    results = [*_first_admitted(changes), *_first_admitted(ends)]
    if flags and not results:
        # No single remedy is enough, so two are combined.
        both = list[Remedy]()
        for end in ends:
            for change in _flags(server, end.machine):
                both.append(msgspec.structs.replace(change, text=f"{end.text}, and {change.text}"))
        results = _first_admitted(both)
    return results


def _first_admitted(remedies: Iterable[Remedy]) -> list[Remedy]:
    """Return the first of *remedies* after which the server is admitted, if there is one."""
    for remedy in remedies:
        if not any(refusals(remedy.server, remedy.machine)):
            return [remedy]
    return []


def _flags(server: ServerMemory, machine: MachineMemory) -> Iterator[Remedy]:
    """Yield other flags; those that change least first."""
    cache, request = server.settled(machine).cache or 0.0, server.shape.request(server.length)
    room = min(machine.free, machine.total) - server.floor - server.fixed
    room = math.floor(room * 1024) / 1024
    for size, length in (
        (cache, server.length),
        (min(cache, room), server.length),
        (math.ceil(request * 1024) / 1024, server.length),
        (room, server.length),
        (cache, server.shape.tokens(cache)),
        (room, server.shape.tokens(room)),
    ):
        if size < LEAST_CACHE or length < min(SHORTEST, server.length):
            continue
        changed = msgspec.structs.replace(server, cache=size, length=length, share=None)
        changes = {
            "--kv-cache-memory-bytes": f"{size * 1024:.0f}M" * (size != server.cache),
            "--gpu-memory-utilization": f"{changed.settled(machine).share:g}" * bool(server.share),
            "--max-model-len": str(length) * (length != server.length),
        }
        words = (f"--flag={name}={value}" for name, value in changes.items() if value)
        yield Remedy(f"give {' '.join(words)}", changed, machine)


def _ends(server: ServerMemory, machine: MachineMemory) -> Iterator[Remedy]:
    """Yield the processes to end, the largest first."""
    free, names = machine.free, list[str]()
    for tenant in machine.tenants:
        free += tenant.gib
        names.append(f"{tenant.pid} ({tenant.name}, {tenant.gib:.1f} GiB)")
        changed = msgspec.structs.replace(machine, free=min(free, machine.total))
        yield Remedy(f"end process {', '.join(names)}", server, changed)
