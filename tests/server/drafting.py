"""
Draft from a reduced vocabulary with a patched vLLM on the CPU: ``drafting.py FOLDER``, or ``drafting.py`` for a head that two processes share.

It prints what it found as JSON in its last line. The model that it makes in FOLDER is a hybrid of random numbers with a layer that drafts (MTP). Model Runner
V2, which has the option, wants Triton to serve; so the drafter is loaded as it loads it, and its head is given states of the model's width.
"""

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Number of tokens that the drafter may propose.
SIZE = 40
#: Text of the tokenizer, and of what is proposed.
LINES = [f"the quick brown fox number {number} jumps over {number * 7} dogs" for number in range(200)]
#: A head that two processes share, and its kept tokens; of the second list one process has none.
VOCABULARY, WIDTH, SHARED = 601, 64, {"both": [3, 5, 411, 7, 300, 11, 600], "first": [5, 3]}


def vocabulary(folder: Path) -> dict[str, Any]:
    """Return a draft vocabulary for the tokenizer in *folder*, as the tool makes it of `LINES`."""
    from transformers import AutoTokenizer

    sys.path.append(str(Path(__file__).parents[2] / "ci" / "bench"))
    made: dict[str, Any] = importlib.import_module("draft_vocabulary").draft_vocabulary(AutoTokenizer.from_pretrained(folder), LINES, SIZE)
    return made


def make(folder: Path) -> None:
    """Write the model to *folder*."""
    from safetensors.torch import load_file, save_file

    learnt: Any = importlib.import_module("learnt")
    learnt.tokenizer(folder, LINES)
    net = learnt.model("qwen3_next")
    net.to(torch.bfloat16).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), "num_nextn_predict_layers": 1}), "utf-8")
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), **learnt.Drafts(net).tensors()}, weights, {"format": "pt"})


def configured(folder: Path, document: object, **options: Any) -> Any:
    """Return vLLM's configuration for the model in *folder* and the draft vocabulary *document*."""
    from vllm.engine.arg_utils import EngineArgs

    file = folder / "draft_vocabulary.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    speculative = {"method": "mtp", "num_speculative_tokens": 2, "draft_vocabulary": str(file), **options}
    return EngineArgs(model=str(folder), max_model_len=512, enforce_eager=True, speculative_config=speculative).create_engine_config()


def reason(call: Callable[..., Any], *words: Any, **options: Any) -> str:
    """Return why *call* refuses; empty if it does not."""
    try:
        call(*words, **options)
    except ValueError as error:
        return str(error)
    return ""


def finite(logits: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the tokens whose logits are no infinity, once for each set of them."""
    return sorted({tuple(row.isfinite().nonzero().flatten().tolist()) for row in logits})


def distributed(ranks: int, rank: int, address: str) -> None:
    """Make this process number *rank* of *ranks*, which meet at *address*."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(ranks, rank, address, rank, "gloo")
    initialize_model_parallel(ranks)


def one(folder: Path) -> dict[str, Any]:
    """Return what the drafter of the model in *folder* does, and which files are refused."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.quantization.online.lm_head import (
        quantized_lm_head_copy,
        refresh_quantized_lm_heads,
    )
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker import cpu_model_runner
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

    cpu_model_runner._set_torch_accelerator_to_noop()
    make(folder)
    sound = vocabulary(folder)
    kept_ids = sound["token_ids"]
    config, found = configured(folder, sound), {"tokens": kept_ids}
    with set_current_vllm_config(config):
        distributed(1, 0, f"file://{folder / 'meeting'}")
        target = get_model(vllm_config=config)
        draft = load_eagle_model(target, config)
        states = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        full, kept = target.compute_logits(states), draft.compute_logits(states)
        found |= {
            "rows": draft.lm_head.weight.shape[0],
            "finite": finite(kept),
            "same": bool((kept[:, kept_ids] == full[:, kept_ids]).all()),
            "best": kept.argmax(-1).tolist(),
            "best kept": [kept_ids[index] for index in full[:, kept_ids].argmax(-1).tolist()],
            "best of all": full.argmax(-1).tolist(),
            "local": draft.logits_processor.get_top_tokens(draft.lm_head, states).tolist(),
        }
        # As a drafter of Gemma has it; each layer is known by its name once.
        plain, LogitsProcessor.__init__ = LogitsProcessor.__init__, functools.partialmethod(LogitsProcessor.__init__, soft_cap=30.0)
        config.compilation_config.static_forward_context.clear()
        found["capped"] = reason(load_eagle_model, target, config)
        LogitsProcessor.__init__ = plain
        # As after an update of weights.
        target.lm_head.weight.data.mul_(-1)
        refresh_quantized_lm_heads(draft)
        found["refreshed"] = bool((draft.lm_head.weight[: len(kept_ids)] == target.lm_head.weight[kept_ids]).all())
        target.lm_head.weight.data = target.lm_head.weight.data.float()
        found["head of another type"] = reason(quantized_lm_head_copy, target.lm_head, None, kept_ids)
    refusal = functools.partial(reason, configured)
    found["refusals"] = {
        "none": refusal(folder, sound),
        "tokenizer": refusal(folder, {**sound, "vocab_sha256": "0" * 64}),
        "size": refusal(folder, {**sound, "vocab_size": 641}),
        "empty": refusal(folder, {**sound, "token_ids": []}),
        "range": refusal(folder, {**sound, "token_ids": [1, 640]}),
        "negative": refusal(folder, {**sound, "token_ids": [-1, 2]}),
        "twice": refusal(folder, {**sound, "token_ids": [5, 6, 5]}),
        "no file": refusal(folder, "token_ids: [1]"),
        "method": refusal(folder, sound, method="ngram", prompt_lookup_max=3),
        "given": refusal(folder, sound, draft_token_ids=[1]),
    }
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    found["refusals"]["runner"] = refusal(folder, sound)
    return found


def part(rank: int, folder: str) -> None:
    """Write the logits of the kept rows, as process *rank* of two has them, to *folder*, if it has them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.quantization.online.lm_head import quantized_lm_head_copy
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    draw = torch.Generator().manual_seed(2)
    weight, states = (torch.randn(rows, WIDTH, generator=draw).to(torch.bfloat16) for rows in (VOCABULARY, 5))
    found: dict[str, Any] = {"tokens": SHARED}
    # Of different names they take no shared memory, whose library is of another release.
    os.environ["VLLM_DIST_IDENT"] = str(rank)
    with set_current_vllm_config(VllmConfig()):
        distributed(2, rank, f"file://{folder}/meeting")
        head = ParallelLMHead(VOCABULARY, WIDTH, params_dtype=torch.bfloat16)
        head.weight_loader(head.weight, weight)
        head.quant_method.process_weights_after_loading(head)
        processor = LogitsProcessor(VOCABULARY)
        for name, tokens in SHARED.items():
            copy = quantized_lm_head_copy(head, None, tokens)
            full, some, top = processor(head, states), processor(copy, states), processor.get_top_tokens(copy, states)
            if some is not None:
                same = bool((some[:, tokens] == full[:, tokens]).all())
                found[name] = {"finite": finite(some), "same": same, "best": some.argmax(-1).tolist(), "top": top.tolist()}
    if len(found) > 1:
        Path(folder, "found.json").write_text(json.dumps(found), "utf-8")


def two() -> Any:
    """Return what two processes have of a head that they share."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(part, (folder,), nprocs=2)
        return json.loads(Path(folder, "found.json").read_text("utf-8"))


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    sys.stdout.write(json.dumps(one(Path(sys.argv[1])) if sys.argv[1:] else two()) + "\n")
