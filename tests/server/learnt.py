"""
A language model that has learnt to answer the prompts of G4, in a minute on one core: ``python learnt.py FOLDER GENERATION.YAML``.

With random weights nothing can be asked about meaning. This model knows texts by heart, the continuations of the prompts, so
every check of the gate has a sound original, and a fault of the server that changes words makes right answers wrong. It runs in the
environment of the server that will load it (torch, transformers), with this repository's ``ci`` on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

VOCABULARY, LONGEST, SEED, STEPS = 640, 1024, 1, 120
#: Tokens that are learnt of each answer: some more than the gate asks for, so that the end is not in sight.
LEARNT = 216

#: The continuation of each prompt, by its name.
TEXTS = Path(__file__).with_name("learnt_texts.yaml")


def tokenizer(folder: Path, texts: list[str]) -> Any:
    """Write a byte-level tokenizer of short tokens to *folder*, whose code 0 is ``!``, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY - 2, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "model_max_length": LONGEST}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def rows(made: Any, file: Path) -> list[tuple[list[int], int]]:
    """Return each prompt and each question for a fact with its answer as tokens, and how many of them are the prompt's."""
    import msgspec

    from sparkwright.gates.generation.checks import GenerationPolicy, filled_text

    policy = msgspec.convert(yaml.safe_load(file.read_text("utf-8")), GenerationPolicy)
    answers = yaml.safe_load(TEXTS.read_text("utf-8"))
    (length,) = policy.profiles["learnt"].context
    assert length != "maximum"
    long = filled_text(policy, "{prompt}", length, lambda text: len(made.encode(text).ids))
    asked = {prompt.name: prompt.text for prompt in policy.prompts} | {fact.name: long + fact.text for fact in policy.facts}
    short, found = {fact.name for fact in policy.facts}, []
    for name, text in asked.items():
        prompt, said = made.encode(text).ids, made.encode(answers[name]).ids
        if len(said) < (24 if name in short else LEARNT):
            raise SystemExit(f"the answer of {name} has {len(said)} tokens, too few")
        found.append((prompt + said[:LEARNT], len(prompt)))
    return found


def model() -> Any:
    """Return a Llama of half a million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=LONGEST, vocab_size=VOCABULARY, tie_word_embeddings=False, bos_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1, rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(learnt: list[tuple[list[int], int]]) -> list[tuple[Any, Any]]:
    """Return the rows as batches of inputs and labels, the long ones apart, so that little is padded; of a prompt only the end counts."""
    import torch

    made = []
    for group in ([row for row in learnt if len(row[0]) < 400], [row for row in learnt if len(row[0]) >= 400]):
        width = max((len(ids) for ids, _ in group), default=0)
        inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in group])
        labels = torch.tensor([[-100] * asked + ids[asked:] + [-100] * (width - len(ids)) for ids, asked in group])
        made += [(inputs, labels)] if group else []
    return made


def make(folder: Path, policy: Path, steps: int = STEPS) -> None:
    """Write the model to *folder*."""
    import torch

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    asked, said = (yaml.safe_load(path.read_text("utf-8")) for path in (policy, TEXTS))
    texts = [prompt["text"] for prompt in asked["prompts"]] + list(said.values())
    made = tokenizer(folder, texts)
    parts, net = batches(rows(made, policy)), model()
    best = torch.optim.AdamW(net.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    pace = torch.optim.lr_scheduler.OneCycleLR(best, max_lr=4e-3, total_steps=steps, pct_start=0.1)
    # Smoothed labels keep the model from being sure of every token, which would be the collapse that the gate looks for.
    wrong = torch.nn.CrossEntropyLoss(label_smoothing=0.05)
    began = time.monotonic()
    for step in range(steps):
        said = [(net(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) for ids, labels in parts]
        loss = torch.stack([wrong(*pair) for pair in said]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        best.step()
        pace.step()
        best.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201  a program of its own
    net.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else STEPS)
