"""
Preflight of a server: the same rules for a recipe, a plain model and a container.

They judge the final arguments of ``vllm serve``, whatever gave them. The memory rules assume that
the GPU has the host's memory, as on a GB10, or that there is no GPU.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import msgspec
import psutil

from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes import preflight as recipe_preflight
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.records import Reason
from sparkwright.builder import host_info
from sparkwright.core import process
from sparkwright.serving import flags
from sparkwright.serving.errors import ServeError

GIB = 2**30
#: The flag that sets the bytes of the KV cache.
CACHE = "--kv-cache-memory-bytes"
#: GiB for activations, CUDA graphs and the processes of a model without a recipe. Proposed.
RESERVE = 8.0
#: Model type → what prompt lookup cost it (seed report 003: essays do not repeat themselves).
NGRAM_LOSES = {"nemotron_h": "74.75 → 55.70 tok/s for one chat on a Spark"}
#: Findings that keep no server from its start.
ADVICE = ("ngram-slower",)
#: Megabytes from which a process is named as holding memory, and how many are.
LARGE, SHOWN = 200, 6


class Machine(msgspec.Struct, frozen=True):
    """
    The memory of this machine.

    Attributes:
        total: In GiB.
        gpus: The number of NVIDIA GPUs.
        unified: Whether the GPU shares the host's memory.
    """

    total: float
    gpus: int = 0
    unified: bool = False

    @classmethod
    def here(cls) -> Machine:
        """Return this machine, as the kernel and the driver describe it."""
        names = [gpu.name for gpu in host_info.gpus()]
        total = psutil.virtual_memory().total / GIB
        return cls(total, len(names), any("GB10" in name for name in names))

    @property
    def shared(self) -> bool:
        """Whether a server's memory is the host's."""
        return self.unified or not self.gpus


def check(
    words: Sequence[str],
    machine: Machine,
    *,
    recipe: Recipe | None,
    checkpoint: ModuleAudit | None,
    weights: float,
    floor: float,
    vllm: str = "",
) -> list[str]:
    """
    Return advice about a server with the arguments *words*.

    Args:
        recipe: With the plan that *words* follow; None for a plain model.
        checkpoint: None if its files were not read.
        weights: GiB of the model on one node; 0 if unknown.
        floor: GiB that stay free.
        vllm: The version that serves; empty if unknown.

    Raises:
        serve-unfit: A rule is broken.
    """
    backend = flags.value(words, "--moe-backend")
    faults = recipe_preflight.kernel_faults(backend, vllm, checkpoint)
    results = [*_speculation(words, checkpoint), *faults]
    pin, cache = flags.value(words, CACHE), flags.number(words, CACHE)
    if pin and cache is None:
        message = f"{CACHE}={pin} is no number of bytes; write 20G"
        results.append(Reason("cache-unpinned", message))
    elif machine.unified and not cache:
        message = (
            "vLLM would size its KV cache by a profile that counts other programs and may come out "
            "negative (vllm #44740, #46307). Pin it: --flag=--kv-cache-memory-bytes=20G"
        )
        results.append(Reason("cache-unpinned", message))
    if recipe:
        total = round(machine.total * GIB / 1e6)
        results += recipe_preflight.findings(recipe, None, total=total, checkpoint=checkpoint)
    elif machine.shared:
        results += _memory(words, machine, weights, floor)
    texts = {
        finding: f"{finding.reference}: {finding.message}. "
        + recipe_preflight.REASONS.get(finding.reference, "")
        for finding in results
    }
    errors = [text.strip() for finding, text in texts.items() if finding.reference not in ADVICE]
    if errors:
        name = recipe.name if recipe else "The model"
        what = f"{name} cannot be served here with these flags."
        raise ServeError("serve-unfit", what, details=list(dict.fromkeys(errors)))
    return [text.strip() for text in texts.values()]


def pinned_cache(words: Sequence[str], machine: Machine, weights: float) -> int:
    """
    Return the bytes of KV cache for a plain model with *weights* GiB, by its share of the memory
    (``--gpu-memory-utilization``); 0 if there is no room, or nothing to compute it from.
    """
    share = flags.number(words, "--gpu-memory-utilization") or 0.0
    return max(0, int((share * machine.total - weights - RESERVE) * GIB)) if weights else 0


def _memory(
    words: Sequence[str], machine: Machine, weights: float, floor: float
) -> Iterator[Reason]:
    """Yield what a plain model takes of the memory that must stay free."""
    share = flags.number(words, "--gpu-memory-utilization") or 0.0
    if share * machine.total + floor > machine.total:
        left = (1 - share) * machine.total
        message = f"{share:g} of {machine.total:.1f} GiB leaves {left:.1f}; {floor:g} must stay"
        yield Reason("memory-utilization", f"{message} free")
    cache = (flags.number(words, CACHE) or 0.0) / GIB
    if (needed := weights + cache + floor) > machine.total:
        message = (
            f"{weights:.1f} GiB of weights, {cache:.1f} of cache and {floor:g} that stay free are "
            f"{needed:.1f} GiB; the machine has {machine.total:.1f}"
        )
        yield Reason("memory-short", message)


def _speculation(words: Sequence[str], checkpoint: ModuleAudit | None) -> Iterator[Reason]:
    """Yield what is wrong with speculative decoding."""
    settings = flags.speculation(words)
    method = str(settings.get("method", ""))
    if "mtp" in method and checkpoint and not checkpoint.drafts:
        message = "the checkpoint has no layers that draft, or its config names none"
        yield Reason("speculation-headless", message)
    drafting = "mtp" in method or settings.get("model")
    moe = str(settings.get("moe_backend") or flags.value(words, "--moe-backend"))
    if drafting and "b12x" in moe:
        message = (
            "the draft model follows --moe-backend, its experts are not quantized, and b12x takes "
            "none that are not (seed report 003). Set moe_backend (triton) in --speculative-config"
        )
        yield Reason("draft-b12x", message)
    if method == "ngram" and checkpoint and checkpoint.model in NGRAM_LOSES:
        loss = NGRAM_LOSES[checkpoint.model]
        message = f"prompt lookup made this model slower: {loss} (seed report 003)"
        yield Reason("ngram-slower", message)


def check_memory(needed: float, floor: float) -> None:
    """
    Check that *needed* and *floor* GiB are free now.

    Raises:
        memory-held: Running programs hold too much; the largest are named.
    """
    free = process.available_megabytes() * 1e6 / GIB
    if needed + floor <= free:
        return
    sizes = {
        f"process {running.pid}, {running.info['name']}": running.info["memory_info"].rss
        for running in psutil.process_iter(["name", "memory_info"])
        if running.info["memory_info"] and running.info["memory_info"].rss >= LARGE * 1e6
    }
    largest = sorted(sizes, key=lambda name: -sizes[name])
    details = [
        f"{needed:.1f} GiB for the server, {floor:.1f} must stay free; {free:.1f} are free",
        *(f"{name}: {sizes[name] / GIB:.1f} GiB" for name in largest[:SHOWN]),
    ]
    what = "There is not enough free memory for the server."
    raise ServeError("memory-held", what, details=details)


def check_port(host: str, port: int) -> None:
    """
    Check that a server can listen at *host* and *port* now, in the way that vLLM does.

    Raises:
        port-taken: Another program does, or this user may not.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except (OSError, UnicodeError) as error:  # the latter for a host such as a..b
        reason = getattr(error, "strerror", "") or error
        what = f"{host} port {port} cannot be listened on: {reason}."
        raise ServeError("port-taken", what) from None
