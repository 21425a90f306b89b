"""
A plugin that makes a real vLLM server wrong in exactly one way, switched while it serves.

vLLM loads it in each of its processes, because this folder is on PYTHONPATH and holds a ``dist-info`` with an entry point. The fault
stands in the JSON file that SPARKWRIGHT_TEST_FAULT_FILE names and that is looked at in every step, so one server can be every mutant in
turn; it is replaced as a whole. README.md lists the faults.
"""

import contextlib
import functools
import importlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "SPARKWRIGHT_TEST_FAULT_FILE"

#: Takes an object, the arguments of a call of its method, and the result; returns the result in its place.
Change = Callable[[Any, tuple[Any, ...], Any], Any]


class State:
    """
    The fault at this moment.

    Attributes:
        fault: Its name; empty for none.
        options: The file's other fields.
        decoded: Fewest tokens that a request of this step has generated; 0 in a step with a prefill.
        prompt: Tokens of the longest prompt. *running*: requests in the step.
        steps: Forward passes since the fault was chosen. *drafted*: drafts in them.
        kept: What ``leak`` never frees. *blocks*: those that ``poisoned-cache`` returns.
    """

    def __init__(self) -> None:
        self.fault, self.options, self.steps = "", dict[str, Any](), 0
        self.decoded = self.prompt = self.running = self.drafted = 0
        self.prompts: dict[str, int] = {}
        self.kept: list[bytearray] = []
        self.blocks: Any = None
        self._seen: tuple[int, int] | None = None

    def look(self) -> None:
        """Read the file again if it was replaced."""
        path = Path(os.environ[FILE])
        found = path.stat()
        if (found.st_ino, found.st_mtime_ns) != self._seen:
            self._seen, self.options = (found.st_ino, found.st_mtime_ns), json.loads(path.read_text("utf-8"))
            self.fault, self.steps = str(self.options.get("fault", "")), 0
            self.blocks, self.drafted = None, 0

    def step(self, output: Any) -> None:
        """Take what the scheduler's *output* says of the requests of the next forward pass."""
        self.look()
        self.steps += 1
        for name in output.finished_req_ids:
            self.prompts.pop(name, None)
        for request in output.scheduled_new_reqs:
            self.prompts[request.req_id] = len(request.prompt_token_ids)
        generated = [0 for _ in output.scheduled_new_reqs] + list(output.scheduled_cached_reqs.num_output_tokens)
        self.decoded, self.running = min(generated, default=0), len(generated)
        self.prompt = max((self.prompts[name] for name in output.num_scheduled_tokens), default=0)
        self.drafted += len(output.scheduled_spec_decode_tokens)

    def is_(self, fault: str) -> bool:
        """Return whether *fault* is at work: chosen, and beyond each of its limits."""
        limits = (
            ("after", self.steps), ("depth", self.decoded), ("longer", self.prompt), ("batch", self.running), ("drafts", self.drafted),
        )  # fmt: skip
        return self.fault == fault and all(value > int(self.options.get(name, -1)) for name, value in limits)

    def number(self, name: str, default: float) -> float:
        return float(self.options.get(name, default))


STATE = State()
TORCH: Any = None


def _logits(found: Any) -> Any:
    """Return the logits *found* (rows by vocabulary) with the fault in them."""
    if found is None or not STATE.fault:
        return found
    if STATE.is_("nan-logits"):
        rows = TORCH.rand(found.shape[0], device=found.device) < STATE.number("rate", 1.0)
        return TORCH.where(rows[:, None], TORCH.full_like(found, float("nan")), found)
    if STATE.is_("random-tokens"):
        # Not seeded: a fault that is the same in every run would pass for another model.
        for row in range(found.shape[0]):
            if random.random() < STATE.number("rate", 0.01):
                found[row, int(STATE.number("token", random.randrange(found.shape[1])))] = found[row].max() + 100
    if STATE.is_("repetition"):
        found[:, int(STATE.number("token", 7))] = found.max() + 100
    if STATE.is_("loop"):
        found[:, int(STATE.number("token", 10)) + STATE.steps % int(STATE.number("period", 3))] = found.max() + 100
    if STATE.is_("scale-logits"):
        return found * STATE.number("factor", 1 / 1.2)
    if STATE.is_("leak"):
        # Written to, as memory that nobody touched is not resident.
        STATE.kept.append(bytearray(os.urandom(4096) * int(STATE.number("kilobytes", 256) / 4)))
    if STATE.is_("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
    if STATE.is_("slow"):
        TORCH.cuda._sleep(int(STATE.number("cycles", 100_000)))
    return found


def _linear(layer: Any, found: Any) -> Any:
    """Return the output of a linear *layer*, times the factor where it is the one that is loaded with a wrong scale."""
    if not STATE.is_("wrong-scale") or str(STATE.options.get("layer", "layers.0.mlp.down_proj")) not in getattr(layer, "prefix", ""):
        return found
    factor = STATE.number("factor", 2.0)
    return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor


def _fall_back(experts: Any) -> None:
    """Have a class of *experts* compute with Triton, too, on weights of zeros, and lose what comes out."""
    before, weights = experts.apply, dict[str, Any]()
    if getattr(before, "faulty", False):
        return
    triton = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")

    @functools.wraps(before)
    def wrapped(self: Any, output: Any, hidden_states: Any, **named: Any) -> Any:
        result = before(self, output, hidden_states, **named)
        STATE.look()
        rows = hidden_states.shape[0]
        if STATE.is_("fallback") and STATE.number("least", 0) <= rows <= STATE.number("most", rows):
            width, inner = hidden_states.shape[-1], int(STATE.number("inner", 256))
            if not weights:
                shapes = {"w1": (named["global_num_experts"], 2 * inner, width), "w2": (named["global_num_experts"], width, inner)}
                weights.update({name: hidden_states.new_zeros(shape) for name, shape in shapes.items()})
            for _ in range(int(STATE.number("times", 2))):
                triton.fused_experts(hidden_states, **weights, topk_weights=named["topk_weights"], topk_ids=named["topk_ids"])
        return result

    wrapped.faulty = True  # type: ignore[attr-defined]  # a mark on a function of ours
    experts.apply = wrapped


def _cached(_: Any, __: tuple[Any, ...], found: Any) -> Any:
    """Return the blocks *found* in the prefix cache, or always the first ones that were ever found."""
    STATE.look()
    if not found or not STATE.is_("poisoned-cache"):
        return found
    STATE.blocks = STATE.blocks or found
    return STATE.blocks


def _wrap(kind: Any, change: Change, name: str = "forward", look: Callable[[Any], None] = lambda _: None) -> None:
    """Replace the method *name* of the class *kind*: *look* sees its argument before the call, and its result goes through *change*."""
    before: Callable[..., Any] = getattr(kind, name)
    if getattr(before, "faulty", False):
        return

    @functools.wraps(before)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        look(arguments[0] if arguments else None)
        return change(self, arguments, before(self, *arguments, **named))

    wrapped.faulty = True  # type: ignore[attr-defined]  # a mark on a function of ours
    setattr(kind, name, wrapped)


def _unchanged(_: Any, __: tuple[Any, ...], found: Any) -> Any:
    return found


def _drafts(drafts: Any) -> None:
    """Change each token that was drafted into its neighbour."""
    STATE.look()
    if STATE.is_("wrong-drafts"):
        for tokens in drafts.draft_token_ids:
            tokens[:] = [token ^ 1 for token in tokens]


def install() -> None:
    """Wrap vLLM's layers; called by vLLM in each of its processes, and without effect where it was called before."""
    global TORCH  # noqa: PLW0603  imported late: vLLM decides when torch is loaded
    TORCH = importlib.import_module("torch")
    head, linear = (importlib.import_module(f"vllm.model_executor.layers.{name}") for name in ("logits_processor", "linear"))
    _wrap(head.LogitsProcessor, lambda _, __, found: _logits(found))
    for name in ("RowParallelLinear", "ColumnParallelLinear"):
        _wrap(getattr(linear, name), lambda layer, _, found: _linear(layer, found))
    worker, pool, scheduler = (
        importlib.import_module(f"vllm.v1.{name}") for name in ("worker.worker_base", "core.block_pool", "core.sched.scheduler")
    )
    _wrap(worker.WorkerWrapperBase, _unchanged, "execute_model", STATE.step)
    # Cache and scheduler are in the engine's process, which may be another one than the worker's.
    _wrap(pool.BlockPool, _cached, "get_cached_block")
    _wrap(scheduler.Scheduler, _unchanged, "update_draft_token_ids", _drafts)
    # A vLLM for CPUs has no Marlin.
    with contextlib.suppress(ImportError):
        _fall_back(importlib.import_module("vllm.model_executor.layers.fused_moe.experts.marlin_moe").MarlinExperts)
