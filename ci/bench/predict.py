"""
Compare the speeds that `model inspect` predicts with those that others published, and that a GPU has.

    predict.py published [--hub]                       figures of published.yaml, by dimensions that are public; --hub reads true headers
    predict.py measured NAME ... --models FOLDER --python PYTHON         needs a GPU; names of MEASURED, and of folders in FOLDER

`measured` starts vLLM of the environment of PYTHON for each model and takes the seconds of a decode step from two lengths of answer, which cancels prefill and start.
The bandwidth is that of a copy on the same GPU, so what is compared is the model of bytes and no figure of a maker. A model of MEASURED has public dimensions, with
fewer layers where a GPU would not hold all, and weights that vLLM makes up; the bytes that vLLM then holds are compared with those that the prediction is made of.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench.model import checkpoint, hub, prediction
from sparkwright.bench.model.checkpoint import BITS, Checkpoint, Tensor
from sparkwright.bench.model.prediction import Serving
from sparkwright.cli.options import default_cache
from sparkwright.core import strict_yaml
from sparkwright.core.console import console, size
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.store import Store

#: Tokens of context in the middle of the steps that decode_steps.py times.
CONTEXT = 608
#: What vLLM needs besides for a type of model on an SM 9.0 GPU without a compiler.
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"moe_backend": "marlin"},
    "qwen3_5_text": {"additional_config": {"gdn_prefill_backend": "triton"}},
    "qwen3_next": {"additional_config": {"gdn_prefill_backend": "triton"}},
}
#: How vLLM loads the layers of MEASURED in a format.
_FLOAT = {"type": "float", "symmetric": True}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {
        "weights": {**_FLOAT, "num_bits": 8, "strategy": "channel", "dynamic": False},
        "input_activations": {**_FLOAT, "num_bits": 8, "strategy": "token", "dynamic": True},
    },
    "nvfp4": {
        "format": "nvfp4-pack-quantized",
        "weights": {**_FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": False},
        "input_activations": None,
    },
}


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published speed: tokens per second of one request."""

    model: str
    speed: float
    checkpoint: str
    tokens: int
    source: str
    date: str
    drafts: int = 0
    cache: str = "auto"
    dimensions: str = ""
    formats: str = ""
    changed: bool = False


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file published.yaml."""

    figures: tuple[Figure, ...]


# Headers by public dimensions.


def matrix(name: str, rows: int, columns: int, form: str = "nvfp4") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a matrix in *form*."""
    parts: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
        "bf16": [("weight", "BF16", (rows, columns))],
        "fp8": [("weight", "F8_E4M3", (rows, columns)), ("weight_scale", "F32", ())],
        "nvfp4": [
            ("weight", "U8", (rows, columns // 2)),
            ("weight_scale", "F8_E4M3", (rows, columns // 16)),
            ("weight_scale_2", "F32", ()),
        ],
        "mxfp4": [("weight_packed", "U8", (rows, columns // 2)), ("weight_scale", "U8", (rows, columns // 32))],
    }
    for parameter, dtype, shape in parts[form]:
        yield f"{name}.{parameter}", Tensor(dtype, shape, math.prod(shape, start=BITS[dtype]) // 8)


def mlp(name: str, hidden: int, inner: int, form: str = "nvfp4") -> Iterator[tuple[str, Tensor]]:
    """Yield a gated MLP."""
    for part in ("gate_proj", "up_proj"):
        yield from matrix(f"{name}.{part}", inner, hidden, form)
    yield from matrix(f"{name}.down_proj", hidden, inner, form)


def attention(name: str, hidden: int, heads: int, keys: int, head: int, form: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the projections of attention; *heads* counts a gate of the output, too."""
    for part, rows in (("q_proj", heads * head), ("k_proj", keys * head), ("v_proj", keys * head)):
        yield from matrix(f"{name}.{part}", rows, hidden, form)


def llama(hidden: int, inner: int, layers: int, form: str, vocabulary: int = 128256) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return a Llama 3 with *layers* in *form*, its tables in BF16."""
    heads = hidden // 128
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": min(8, heads), "head_dim": 128, "vocab_size": vocabulary,
    }  # fmt: skip
    if form in QUANTIZATION:
        group = {"targets": ["Linear"], **QUANTIZATION[form]}
        stored = group.get("format", "float-quantized")
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for table in ("model.embed_tokens", "lm_head"):
            yield from matrix(table, vocabulary, hidden, "bf16")
        for layer in range(layers):
            name = f"model.layers.{layer}"
            yield from attention(f"{name}.self_attn", hidden, heads, min(8, heads), 128, form)
            yield from matrix(f"{name}.self_attn.o_proj", hidden, hidden, form)
            yield from mlp(f"{name}.mlp", hidden, inner, form)

    return config, tensors()


def mixtral() -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return Mixtral 8x7B in BF16."""
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for table in ("model.embed_tokens", "lm_head"):
            yield from matrix(table, 32000, 4096, "bf16")
        for layer in range(32):
            name = f"model.layers.{layer}"
            yield from attention(f"{name}.self_attn", 4096, 32, 8, 128, "bf16")
            yield from matrix(f"{name}.self_attn.o_proj", 4096, 4096, "bf16")
            yield from matrix(f"{name}.block_sparse_moe.gate", 8, 4096, "bf16")
            for expert in range(8):
                yield from mlp(f"{name}.block_sparse_moe.experts.{expert}", 4096, 14336, "bf16")

    return config, tensors()


def qwen_dense(layers: int) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return Qwen3.5-27B in BF16 with fewer *layers*: three of gated delta nets for one of attention, and a layer that drafts."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (layers // 4)
    config = {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": layers, "layer_types": kinds, "hidden_size": 5120,
        "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320, "mtp_num_hidden_layers": 1,
    }  # fmt: skip

    def layer(name: str, kind: str) -> Iterator[tuple[str, Tensor]]:
        if kind == "full_attention":
            yield from attention(f"{name}.self_attn", 5120, 48, 4, 256, "bf16")
            yield from matrix(f"{name}.self_attn.o_proj", 5120, 6144, "bf16")
        else:
            for part, rows in (("qkv", 10240), ("z", 6144), ("b", 48), ("a", 48)):
                yield from matrix(f"{name}.linear_attn.in_proj_{part}", rows, 5120, "bf16")
            yield from matrix(f"{name}.linear_attn.out_proj", 5120, 6144, "bf16")
        yield from mlp(f"{name}.mlp", 5120, 17408, "bf16")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for table in ("model.embed_tokens", "lm_head"):
            yield from matrix(table, 248320, 5120, "bf16")
        for number, kind in enumerate(kinds):
            yield from layer(f"model.layers.{number}", kind)
        yield from matrix("mtp.fc", 5120, 10240, "bf16")
        yield from layer("mtp.layers.0", "full_attention")

    return config, tensors()


def qwen(
    layers: int, experts: int, taken: int, vocabulary: int, form: str, linear: str, routed: str = "nvfp4"
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return a hybrid of Qwen3-Next's architecture, hidden size 2048; *form* of attention, *linear* of linear attention, *routed* of experts."""
    config = {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": vocabulary,
        "num_experts_per_tok": taken, "num_experts": experts, "num_nextn_predict_layers": 1,
    }  # fmt: skip

    def layer(name: str, full: bool, experts_form: str, form: str) -> Iterator[tuple[str, Tensor]]:
        if full:
            yield from attention(f"{name}.self_attn", 2048, 32, 2, 256, form)
            yield from matrix(f"{name}.self_attn.o_proj", 2048, 4096, form)
        else:
            yield from matrix(f"{name}.linear_attn.in_proj_qkvz", 12288, 2048, linear)
            yield from matrix(f"{name}.linear_attn.out_proj", 2048, 4096, linear)
            yield from matrix(f"{name}.linear_attn.in_proj_ba", 64, 2048, "bf16")
        yield from matrix(f"{name}.mlp.gate", experts, 2048, "bf16")
        for part in ("shared_expert", *(f"experts.{number}" for number in range(experts))):
            yield from mlp(f"{name}.mlp.{part}", 2048, 512, experts_form)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for table in ("model.embed_tokens", "lm_head"):
            yield from matrix(table, vocabulary, 2048, "bf16")
        for number in range(layers):
            yield from layer(f"model.layers.{number}", number % 4 == 3, routed, form)
        yield from matrix("mtp.fc", 2048, 4096, "bf16")
        yield from layer("mtp.layers.0", True, "bf16", "bf16")

    return config, tensors()


def gpt_oss(layers: int, experts: int, form: str = "bf16") -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return gpt-oss: experts in MXFP4, attention and head in *form*, every other layer with a window."""
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": layers, "num_local_experts": experts, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "sliding_window": 128, "vocab_size": 201088, "num_experts_per_tok": 4, "intermediate_size": 2880,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ]},
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from matrix("model.embed_tokens", 201088, 2880, "bf16")
        yield from matrix("lm_head", 201088, 2880, form)
        for number in range(layers):
            name = f"model.layers.{number}"
            yield from attention(f"{name}.self_attn", 2880, 64, 8, 64, form)
            yield from matrix(f"{name}.self_attn.o_proj", 2880, 4096, form)
            yield from matrix(f"{name}.mlp.router", experts, 2880, "bf16")
            for part, rows in (("gate_up_proj", 5760), ("down_proj", 2880)):
                blocks, scales = (experts, rows, 90, 16), (experts, rows, 90)
                yield f"{name}.mlp.experts.{part}_blocks", Tensor("U8", blocks, math.prod(blocks))
                yield f"{name}.mlp.experts.{part}_scales", Tensor("U8", scales, math.prod(scales))

    return config, tensors()


def nemotron() -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return Nemotron 3 Nano: 23 layers of Mamba-2, 23 of experts, six of attention."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    config = {
        "model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 2688,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "vocab_size": 131072, "num_experts_per_tok": 6,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for table in ("backbone.embeddings", "lm_head"):
            yield from matrix(table, 131072, 2688, "bf16")
        for number, kind in enumerate(pattern):
            name = f"backbone.layers.{number}.mixer"
            if kind == "M":
                yield from matrix(f"{name}.in_proj", 2 * 4096 + 2 * 8 * 128 + 64, 2688)
                yield from matrix(f"{name}.out_proj", 2688, 4096)
            elif kind == "*":
                yield from attention(name, 2688, 32, 2, 128, "nvfp4")
                yield from matrix(f"{name}.o_proj", 2688, 4096)
            else:
                yield from matrix(f"{name}.gate", 128, 2688, "bf16")
                for part, inner in [("shared_experts", 3712), *((f"experts.{expert}", 1856) for expert in range(128))]:
                    yield from matrix(f"{name}.{part}.up_proj", inner, 2688)
                    yield from matrix(f"{name}.{part}.down_proj", 2688, inner)

    return config, tensors()


DIMENSIONS: dict[str, Callable[[], tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]]] = {
    "llama-3.3-70b": lambda: llama(8192, 28672, 80, "nvfp4"),
    "qwen3.6": lambda: qwen(40, 256, 8, 248320, "nvfp4", "bf16"),
    "qwen3.6-fp8": lambda: qwen(40, 256, 8, 248320, "fp8", "fp8"),
    "qwen3-next": lambda: qwen(48, 512, 10, 151936, "nvfp4", "bf16"),
    "gpt-oss-120b": lambda: gpt_oss(36, 128),
    "gpt-oss-120b-mxfp4": lambda: gpt_oss(36, 128, "mxfp4"),
    "gpt-oss-20b": lambda: gpt_oss(24, 32),
    "nemotron-3-nano": nemotron,
}
#: Models that a GPU of 139 GiB holds, and drafts of a step. The first shows the seconds for which a step waits for the processor. Layers are those of Llama 3.1 405B.
MEASURED: dict[str, tuple[Callable[[], tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]], int]] = {
    "small": (lambda: llama(1024, 4096, 12, "bf16", 32000), 0),
    "llama-bf16": (lambda: llama(16384, 53248, 12, "bf16"), 0),
    "llama-fp8": (lambda: llama(16384, 53248, 24, "fp8"), 0),
    "llama-nvfp4": (lambda: llama(16384, 53248, 36, "nvfp4"), 0),
    "mixtral": (mixtral, 0),
    "qwen3.5": (lambda: qwen_dense(40), 0),
    "qwen3.5-mtp2": (lambda: qwen_dense(40), 2),
    "qwen3-next-mtp2": (lambda: qwen(24, 512, 10, 151936, "bf16", "bf16", "bf16"), 2),
    "gpt-oss-120b": (lambda: gpt_oss(36, 128), 0),
}


def headers(figure: Figure, store: Store | None) -> tuple[Checkpoint | None, str]:
    """Return the model of *figure* and where its headers are from: the hub, with a *store*, or public dimensions."""
    why = "no headers here"
    # What a server changes when it loads is not in the checkpoint's headers.
    if store and figure.checkpoint and not figure.changed:
        try:
            found = hub.Hub(os.environ).headers(store, figure.checkpoint, "main")
            return checkpoint.join(figure.model, found.config, found.index, found.shards.items()), "hub"
        except SparkwrightError as error:
            why = error.reference
    if not figure.dimensions:
        return None, why
    config, tensors = DIMENSIONS[figure.dimensions]()
    return Checkpoint(config, dict(tensors)), "dimensions"


def published(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print published figures beside predictions."""
    store = Store(arguments.cache_dir or default_cache()) if arguments.hub else None
    rows, results = [], []
    for figure in strict_yaml.load(Path(__file__).with_name("published.yaml"), Figures).figures:
        source, origin = headers(figure, store)
        result: dict[str, Any] = {"figure": figure, "origin": origin}
        cells = ["unresolved", "", "", ""]
        if source:
            model = prediction.read(source)
            serving = Serving(drafts=figure.drafts, context=figure.tokens, cache=figure.cache)
            rate = model.rate(serving, prediction.GB10, prediction.ACCEPTANCE)
            inside = "inside" if rate.low <= figure.speed <= rate.high else "below" if figure.speed < rate.low else "above"
            cells = [size(rate.step.total), f"{rate.low:.1f} to {rate.high:.1f}", f"{figure.speed / rate.high:.2f}", inside]
            result |= {"rate": rate, "ratio": figure.speed / rate.high, "place": inside}
        drafts = str(figure.drafts or "")
        rows.append([figure.model, drafts, f"{figure.speed:g}", *cells, origin])
        results.append(result)
    columns = ["model", ">drafts", ">published", ">step", ">predicted", ">of the most", "it is", "headers"]
    console.table("published and predicted tok/s of one request on a GB10", columns, rows, result=True)
    return results


# On a GPU.


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the measured speed of each model beside the predicted one."""
    rows, results = [], list[dict[str, Any]]()
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as temporary:
            folder, drafts, out = arguments.models / name, 0, Path(temporary) / "steps.json"
            if name in MEASURED:
                make, drafts = MEASURED[name]
                config, tensors = make()
                source, folder = Checkpoint(config, dict(tensors)), Path(temporary)
                (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}), "utf-8")
                options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
            else:
                source, options = checkpoint.read(folder), {}
            model = prediction.read(source)
            options |= OPTIONS.get(str(source.config["model_type"]), {})
            sizes = [count * (drafts + 1) for count in prediction.REQUESTS]
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
            if drafts:
                options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
            command = [str(arguments.python), str(Path(__file__).with_name("decode_steps.py")), str(out), str(folder), json.dumps(options)]
            began = time.monotonic()
            ended = subprocess.run([*command, *map(str, prediction.REQUESTS)], check=False)
            seconds = time.monotonic() - began
            if ended.returncode or not out.exists():
                rows.append([name, "", "", "", "", "", "failed", ""])
                results.append({"model": name, "status": ended.returncode})
                continue
            found = json.loads(out.read_text("utf-8"))
        own = sum(row.bytes for row in model.audit.rows if row.group != "mtp")
        found |= {"model": name, "bytes": own, "seconds": seconds, "drafts": drafts}
        for count in prediction.REQUESTS:
            step = model.step(Serving(requests=count, context=CONTEXT, drafts=drafts))
            speed, predicted = 1 / found["steps"][str(count)], found["bandwidth"] * 1e9 / step.total
            held = f"{found['loaded'] / own - 1:+.1%}"
            rows.append([name, held, str(count), str(drafts), size(step.total), f"{predicted:.1f}", f"{speed:.1f}", f"{predicted / speed - 1:+.1%}"])
            results.append({**found, "requests": count, "step": step, "predicted": predicted, "measured": speed})
            print(*rows[-1], flush=True)  # noqa: T201  a run that is cut off has said what it measured
        if arguments.output:
            arguments.output.write_bytes(msgspec.json.encode(results))
    columns = ["model", ">vLLM holds", ">requests", ">drafts", ">step", ">predicted", ">measured", ">error"]
    console.table("steps per second, by the copy bandwidth of this GPU", columns, rows, result=True)
    return results


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(required=True)
    way = ways.add_parser("published")
    way.add_argument("--hub", action="store_true")
    way.add_argument("--cache-dir", type=Path)
    way.set_defaults(run=published)
    way = ways.add_parser("measured")
    way.add_argument("names", nargs="+")
    way.add_argument("--models", type=Path, required=True)
    way.add_argument("--python", type=Path, required=True)
    way.set_defaults(run=measured)
    for each in ways.choices.values():
        each.add_argument("--output", type=Path, help="write the results to this file, as JSON")
    arguments = parser.parse_args()
    results = arguments.run(arguments)
    if arguments.output:
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    if any("status" in each for each in results):
        raise SystemExit("some models were not measured")


if __name__ == "__main__":
    main()
