"""
Compare the speeds that `model inspect` predicts with those that others published, and that a GPU has.

    predict.py published [--hub]                       figures of published.yaml, by dimensions that are public; --hub reads true headers
    predict.py measured NAME ... --models FOLDER --python PYTHON    needs a GPU; the models of ci/rehearsal (random weights, real dimensions)

`measured` starts vLLM of the environment of PYTHON for each model, without drafts, and takes the seconds of a decode step from two lengths of answer, which cancels
prefill and start. The bandwidth is that of a copy on the same GPU, so what is compared is the model of bytes and no figure of a maker.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
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
CONTEXT = 672
#: What vLLM needs besides for a model on an SM 9.0 GPU without a compiler.
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"moe_backend": "marlin"},
    "qwen3-next": {"additional_config": {"gdn_prefill_backend": "triton"}},
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


def llama() -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return Llama 3.3 70B."""
    config = {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for table in ("model.embed_tokens", "lm_head"):
            yield from matrix(table, 128256, 8192, "bf16")
        for layer in range(80):
            name = f"model.layers.{layer}"
            yield from attention(f"{name}.self_attn", 8192, 64, 8, 128, "nvfp4")
            yield from matrix(f"{name}.self_attn.o_proj", 8192, 8192)
            yield from mlp(f"{name}.mlp", 8192, 28672)

    return config, tensors()


def qwen(layers: int, experts: int, taken: int, vocabulary: int, form: str, linear: str) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return a hybrid of Qwen3-Next's architecture, hidden size 2048; *form* of attention, *linear* of linear attention."""
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": vocabulary,
        "num_experts_per_tok": taken,
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
            yield from layer(f"model.layers.{number}", number % 4 == 3, "nvfp4", form)
        yield from matrix("mtp.fc", 2048, 4096, "bf16")
        yield from layer("mtp.layers.0", True, "bf16", "bf16")

    return config, tensors()


def gpt_oss(layers: int, experts: int, form: str = "bf16") -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return gpt-oss: experts in MXFP4, attention and head in *form*, every other layer with a window."""
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "sliding_window": 128, "vocab_size": 201088, "num_experts_per_tok": 4,
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
    "llama-3.3-70b": llama,
    "qwen3.6": lambda: qwen(40, 256, 8, 248320, "nvfp4", "bf16"),
    "qwen3.6-fp8": lambda: qwen(40, 256, 8, 248320, "fp8", "fp8"),
    "qwen3-next": lambda: qwen(48, 512, 10, 151936, "nvfp4", "bf16"),
    "gpt-oss-120b": lambda: gpt_oss(36, 128),
    "gpt-oss-120b-mxfp4": lambda: gpt_oss(36, 128, "mxfp4"),
    "gpt-oss-20b": lambda: gpt_oss(24, 32),
    "nemotron-3-nano": nemotron,
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
    rows, results = [], []
    counts = list(prediction.REQUESTS)
    for name in arguments.names:
        folder = arguments.models / name
        model = prediction.read(checkpoint.read(folder))
        script = Path(__file__).with_name("decode_steps.py")
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "steps.json"
            command = [str(arguments.python), str(script), str(out), str(folder), json.dumps(OPTIONS.get(name, {})), *map(str, counts)]
            ended = subprocess.run(command, check=False)
            if ended.returncode or not out.exists():
                rows.append([folder.name, "", "", "", "failed", ""])
                results.append({"model": folder.name, "status": ended.returncode})
                continue
            found = json.loads(out.read_text("utf-8"))
        for count in counts:
            step = model.step(Serving(requests=count, context=CONTEXT))
            speed, predicted = 1 / found["steps"][str(count)], found["bandwidth"] * 1e9 / step.total
            rows.append([folder.name, str(count), size(step.total), f"{predicted:.1f}", f"{speed:.1f}", f"{predicted / speed - 1:+.1%}"])
            results.append({"model": folder.name, "requests": count, "step": step, "predicted": predicted, "measured": speed, **found})
    columns = ["model", ">requests", ">step", ">predicted", ">measured", ">error"]
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
