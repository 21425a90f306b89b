"""
Say which kernels vLLM chooses for a model on a Spark; runs in vLLM's environment, by path.

    python -I selection_probe.py ANSWER WORDS…

WORDS are arguments of ``vllm serve``; the folder of ``--model`` needs no weights. vLLM's own code
makes the configuration and the model, on a platform that reports a GB10, with tensors that have no
memory. No kernel and no compiled library is loaded: what the wheel lists is taken to be there, and
what vLLM asks it gets ANSWER (yes or no), and is listed. Prints JSON.
"""

import contextlib
import enum
import json
import os
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

#: What a GB10 reports; the memory is that of SPARKS in core/memory.py.
DEVICE = SimpleNamespace(
    name="NVIDIA GB10", major=12, minor=1, multi_processor_count=48, is_integrated=1,
    total_memory=int(121.7 * 2**30), warp_size=32, shared_memory_per_block_optin=101376,
    shared_memory_per_multiprocessor=102400, max_threads_per_multi_processor=1536,
)  # fmt: skip
#: What vLLM raises where it refuses; other errors say that this machine cannot decide.
REFUSALS = (ValueError, NotImplementedError, RuntimeError, AssertionError)
#: Characters of a message that are printed.
LONGEST = 600
#: What classes of models raised as they were imported.
inspections: list[BaseException] = []
#: Why attention backends that were tried could not be imported.
unimported: list[ImportError] = []


class Operator:
    """An operator, or a namespace of some, of a library that is not loaded."""

    questions: ClassVar[set[str]] = set()

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> "Operator":
        if name.startswith("__"):
            raise AttributeError(name)
        return Operator(f"{self.name}::{name}")

    def __call__(self, *_: object, **__: object) -> bool:
        if "supports" not in self.name:
            raise LookupError(f"{self.name} is compiled")
        self.questions.add(self.name)
        return sys.argv[1] == "yes"


def pretend(torch: Any) -> None:
    """Make vLLM see a GB10, and the libraries of its wheel."""
    for file in metadata.files("vllm") or ():
        if file.suffix == ".so":
            name = str(file).partition(".")[0].replace("/", ".")
            sys.modules[name] = ModuleType(name)
    for name in ("_C", "_moe_C", "_C_cache_ops", "_C_cuda_utils", "_C_custom_ar"):
        setattr(torch.ops, name, Operator(name))
    torch.library.register_fake = lambda *_, **__: lambda function: function
    torch.cuda.get_device_properties = lambda *_: DEVICE
    torch.cuda.get_device_capability = lambda *_: (DEVICE.major, DEVICE.minor)
    torch.cuda.get_device_name = lambda *_: DEVICE.name
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = torch.cuda.Event = SimpleNamespace
    import vllm.platforms
    from vllm.model_executor.models import registry
    from vllm.platforms.cuda import NonNvmlCudaPlatform as Platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.get_class = importing(AttentionBackendEnum.get_class)
    Platform.get_attn_backend_cls = staticmethod(choosing(Platform.get_attn_backend_cls))
    Platform.dist_backend = "gloo"
    Platform.device_count = lambda *_: 1
    Platform.current_device = lambda *_: torch.device("cuda:0")
    vllm.platforms._current_platform = Platform()
    registry._run_in_subprocess = inspect


def inspect(function: Any) -> Any:
    """Call *function* in this process, as another one would not see a GB10; keep its error."""
    try:
        return function()
    except Exception as error:
        inspections.append(error)  # vLLM raises another error in its place
        raise


def importing(get_class: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a wrapper of a backend's *get_class* that lists why an import fails; vLLM goes on."""

    def listing(backend: Any) -> Any:
        try:
            return get_class(backend)
        except ImportError as error:
            unimported.append(error)
            raise

    return listing


def choosing(choose: Callable[..., str]) -> Callable[..., str]:
    """Return *choose*, whose error has the backend that could not be imported as its cause."""

    def explaining(*words: Any, **options: Any) -> str:
        unimported.clear()
        try:
            return choose(*words, **options)
        except ValueError as error:
            if unimported:
                raise error from unimported[0]
            raise

    return explaining


def build(torch: Any) -> Any:
    """Return the model that vLLM makes for the arguments."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def error(message: str) -> None:
        # Flags of the server itself, which were checked before.
        if not message.startswith("unrecognized"):
            raise ValueError(message)

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.error = error
    options = AsyncEngineArgs.from_cli_args(parser.parse_args(sys.argv[2:]))
    config = options.create_engine_config()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel()
    torch.set_default_dtype(config.model_config.dtype)
    # Of a tensor without memory there is nothing to write to; without a GPU, trying ends the probe.
    torch.Tensor.__setitem__ = lambda *_: None
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        return initialize_model(config)


def choice(module: Any) -> tuple[str, str] | None:
    """Return the kind of the layer *module* and what serves it; None if nothing was chosen."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.linear import LinearBase

    if isinstance(module, AttentionLayerBase):
        backend = str(module.get_attn_backend().get_name())
        state = str(getattr(module, "mamba_type", ""))
        if not state:
            return "attention", backend
        kind = "mamba" if "mamba" in backend.lower() else "gdn"
        return kind, getattr(module, "gdn_prefill_backend", backend)
    method = getattr(module, "quant_method", None)
    experts = isinstance(method, FusedMoEMethodBase)
    if not experts and not isinstance(module, LinearBase):
        return None
    kind, scheme = "moe" if experts else "linear", getattr(module, "scheme", None)
    chosen = scheme or method
    for value in (*vars(chosen).values(), *vars(method).values()):
        if isinstance(value, enum.Enum) and type(value).__name__.lower().endswith("moebackend"):
            return kind, value.name
        if type(value).__module__.startswith("vllm.model_executor.kernels."):
            return kind, type(value).__name__
    return kind, type(chosen).__name__


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield *error* and what led to it."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def refusal(error: BaseException) -> dict[str, str]:
    """Return how vLLM refuses with *error*, or what this machine could not decide; and where."""
    listed = getattr(error, "errors", None)  # pydantic wraps what vLLM raised
    if callable(listed):
        error = listed()[0].get("ctx", {}).get("error", error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/vllm/" in frame.filename]
    line = f"{own[-1].filename.rpartition('/vllm/')[2]}:{own[-1].lineno}" if own else ""
    refused = isinstance(error, REFUSALS) and (listed or frames[-1:] == own[-1:])
    # A package that is not here, or not in this version, and no rule of vLLM's.
    refused = refused and not any(isinstance(each, ImportError) for each in chain(error))
    message = f"{type(error).__name__}: {error}"[:LONGEST]
    return {"refused" if refused else "unresolved": message, "line": line}


def main() -> None:
    """Print the choices."""
    answer: dict[str, Any] = {"versions": {}}
    for name in ("vllm", "torch", "triton", "flashinfer-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            answer["versions"][name] = metadata.version(name)
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    try:
        import torch

        pretend(torch)
        for module in build(torch).modules():
            if chosen := choice(module):
                rows[chosen[0]][chosen[1]] += 1
    except (Exception, SystemExit) as error:  # every error of vLLM is an answer
        answer |= refusal(*inspections[:1] or [error])
    answer |= {"rows": rows, "questions": sorted(Operator.questions)}
    print(f"\n{json.dumps(answer)}", flush=True)  # noqa: T201  the program's output
    os._exit(0)


if __name__ == "__main__":
    main()
