"""
A language model of half a million random numbers, made on the spot: ``python toymodel.py FOLDER``.

It runs in the environment of the server that will load it (tokenizers, torch, transformers). Every text can be encoded, and code 0 is ``!``
as in GPT-2's: what a server with NaN logits says is ``!!!!``.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

#: Beside this file, which is run as a program in another environment.
learnt: Any = importlib.import_module("learnt")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def make(folder: Path) -> None:
    """Write the model to *folder*; it hardly ever says a token that is no text: special ones, pieces of letters, control codes."""
    folder.mkdir(parents=True, exist_ok=True)
    made = learnt.tokenizer(folder, learnt.TEXTS.read_text("utf-8").splitlines(), chat_template=TEMPLATE)
    said = [made.decode([token]) for token in range(learnt.VOCABULARY)]
    never = [token for token, text in enumerate(said) if not text or "\ufffd" in text or not text.replace("\n", "").isprintable()]
    net = learnt.model("llama")
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                # Wide enough that attention and layers change the answer much: a narrow draw gives a model that repeats one word.
                weight.normal_(std=2 / weight.shape[-1] ** 0.5)
        net.lm_head.weight[never] = 0
    net.bfloat16().save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
