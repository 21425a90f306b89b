"""
A language model of 0.8 million random numbers, made on the spot: ``python toymodel.py FOLDER [SEED]``.

It runs in the environment of the server that will load it (NumPy, tokenizers, torch). The same seed gives the same bytes. Its
tokenizer is trained on syllables that the seed draws; it works on bytes, so every text can be encoded, and code 0 is ``!`` as in GPT-2's: what a server with NaN logits says is ``!!!!``.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

#: Beside this file, which is run as a program in another environment.
learnt: Any = importlib.import_module("learnt")

#: Shape of the model. The head size is one that vLLM's CPU attention has.
HIDDEN, INNER, LAYERS, HEADS, KEYS, HEAD, LONGEST, VOCABULARY = 128, 256, 2, 4, 2, 32, 2048, 2048

CONSONANTS = ["b", "ch", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w"]
VOWELS = ["a", "e", "i", "o", "u", "ea", "ou"]
CJK = "今日は世界中国語学生東京大阪北海道天気良い我們你好謝謝한국어사람안녕하세요"
PLAIN = ["The capital of France is Paris.", "What is 12 + 30? It is 42.", "def add(first, second):\n    return first + second\n"]


def corpus(seed: int) -> list[str]:
    """Return lines of invented words, beside a few of real languages, the same for the same *seed*."""
    draw = random.Random(seed)
    words = ["".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(draw.randint(1, 4))) for _ in range(3000)]
    lines = [" ".join(draw.choices(words, k=12)) + draw.choice([".", "?", "!", ","]) for _ in range(1500)]
    return lines + PLAIN * 20 + ["".join(draw.choices(CJK, k=12)) for _ in range(200)]


def tokenizer(folder: Path, seed: int) -> list[int]:
    """Write the tokenizer to *folder*, and return the tokens that are no text: special ones, pieces of letters, control codes."""
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    made = learnt.tokenizer(folder, corpus(seed), VOCABULARY, LONGEST, chat_template=template)
    assert made.get_vocab_size() == VOCABULARY
    said = [made.decode([token]) for token in range(VOCABULARY)]
    return [token for token, text in enumerate(said) if not text or "\ufffd" in text or not text.replace("\n", "").isprintable()]


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama of this shape, by name."""
    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KEYS * HEAD, HIDDEN),
        "self_attn.v_proj": (KEYS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    named = {f"model.layers.{number}.{name}.weight": shape for number in range(LAYERS) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return {**ends, **named}


def weights(folder: Path, seed: int, never: list[int]) -> None:
    """Write the weights to *folder* as safetensors in bfloat16; the model hardly ever says a token of *never*."""
    import numpy
    import torch
    from safetensors.torch import save_file

    draw, tensors = numpy.random.default_rng(seed), {}
    for name, shape in shapes().items():
        # Wide enough that attention and layers change the answer much: a narrow draw gives a model that repeats one word.
        drawn = draw.standard_normal(shape, dtype=numpy.float32) * SCALE / shape[-1] ** 0.5
        values = numpy.ones(shape, numpy.float32) if "norm" in name else drawn
        if name == "lm_head.weight":
            values[never] = 0
        tensors[name] = torch.from_numpy((values.view(numpy.uint32) >> 16).astype(numpy.uint16)).view(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


#: Standard deviation of a layer's answer, where its input has 1.
SCALE = 2.0


def make(folder: Path, seed: int = 1) -> None:
    """Write the model that *seed* gives to *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    never = tokenizer(folder, seed)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "head_dim": HEAD, "hidden_act": "silu",
        "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": VOCABULARY,
        "tie_word_embeddings": False, "bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1}))
    weights(folder, seed, never)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:]))
