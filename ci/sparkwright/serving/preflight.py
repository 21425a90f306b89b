"""
Preflight of a server: the same rules for a recipe, a plain model and a container.

They judge the final arguments of ``vllm serve``, whatever gave them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes import preflight as recipe_preflight
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.records import Reason
from sparkwright.core import memory
from sparkwright.core.memory import MachineMemory, ServerMemory
from sparkwright.serving import flags
from sparkwright.serving.errors import ServeError

#: The flag that sets the bytes of the KV cache.
CACHE = "--kv-cache-memory-bytes"
#: Model type → what prompt lookup cost it (seed report 003: essays do not repeat themselves).
NGRAM_LOSES = {"nemotron_h": "74.75 → 55.70 tok/s for one chat on a Spark"}
#: Findings that keep no server from its start.
ADVICE = ("ngram-slower",)


def check(
    words: Sequence[str],
    machine: MachineMemory,
    server: ServerMemory,
    *,
    recipe: Recipe | None,
    checkpoint: ModuleAudit | None,
    vllm: str = "",
) -> list[str]:
    """
    Return advice about a server with the arguments *words*, which takes the memory of *server*.

    Args:
        recipe: None for a plain model.
        checkpoint: None if its files were not read.
        vllm: The version that serves; empty if unknown.

    Raises:
        serve-unfit: A rule is broken.
        memory-held: Nothing else is wrong, and running programs hold too much.
    """
    backend = flags.value(words, "--moe-backend")
    faults = recipe_preflight.kernel_faults(backend, vllm, checkpoint)
    results = [*_speculation(words, checkpoint), *faults]
    pin = flags.value(words, CACHE)
    if pin and not flags.number(words, CACHE):
        message = f"{CACHE}={pin} is no number of bytes; write 20G or 1536M"
        results.append(Reason("cache-unpinned", message))
    if recipe:
        results += recipe_preflight.other_model(recipe, checkpoint)
    results += [Reason(*refusal) for refusal in memory.refusals(server, machine)]
    texts = {
        finding: f"{finding.reference}: {finding.message}. "
        + recipe_preflight.REASONS.get(finding.reference, "")
        for finding in results
    }
    errors = [text.strip() for finding, text in texts.items() if finding.reference not in ADVICE]
    if not errors:
        return [text.strip() for text in texts.values()]
    errors += [remedy.text for remedy in memory.remedies(server, machine)]
    if {finding.reference for finding in results} <= {"memory-held", *ADVICE}:
        names = [f"process {t.pid}, {t.name}: {t.gib:.1f} GiB" for t in machine.tenants]
        what = "There is not enough free memory for the server."
        raise ServeError("memory-held", what, details=[*errors, *names])
    what = f"{recipe.name if recipe else 'The model'} cannot be served here with these flags."
    raise ServeError("serve-unfit", what, details=errors)


def _speculation(words: Sequence[str], checkpoint: ModuleAudit | None) -> Iterator[Reason]:
    """Yield what is wrong with speculative decoding."""
    settings = flags.speculation(words)
    method = str(settings.get("method", ""))
    own = "mtp" in method and not settings.get("model")
    if own and checkpoint and not checkpoint.drafts:
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
