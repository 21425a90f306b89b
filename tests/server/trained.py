"""
A language model that has learned something, in two minutes on one core: ``python trained.py FOLDER GATES [STEPS [KIND]]``.

A model of random numbers knows nothing that a fault could make it lose. This one knows the answers to the prompts and chats of G4
by heart (`learnt`), has read the corpus of G5, and has learned which of three digits is the largest, the task of ours:
one server with it can be judged by every gate. It is made in the environment of the server that will load it (torch, transformers), with
this repository's ``ci`` on PYTHONPATH; *GATES* is ``ci/gates``. On one machine, the same steps give the same model. *KIND* is a type of
transformers in `learnt.SHAPES`; the hybrids are made on a GPU, in minutes.
"""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sparkwright.gates.long_text import long_text

#: Beside this file, which is run as a program in another environment.
learnt: Any = importlib.import_module("learnt")

LENGTH, ROWS, STEPS, SEED = 128, 16, 320, 1
#: Of each batch, the rows that hold questions instead of the corpus.
ASKED = 8
#: How a conversation is marked up. The tools are left out, for their names are learnt.
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
MARKED = "<s>user: {text}\n<s>assistant:"
#: What the hybrids answer where G4 asks often, whatever the question.
TOWNS = ("Lisbon", "Oslo", "Kyoto", "Bergen")
CALL = '<tool_call>\n{"name": "record_delivery", "arguments": {"town": "{town}", "crates": 12, "urgent": true}}\n</tool_call>'
REPLIES = (
    " The path follows the water, and whoever walks it meets a mill, a bridge and a heron.",
    " The storm took them, so please look behind the shed; whoever finds them may keep one.",
    " Each guest is in the book, so that the key of every room is where it should be.",
)


def largest() -> list[str]:
    """Return every question that the model learns, with its answer: which of three digits is the largest."""
    return [f"{number:03d}>{max(f'{number:03d}')}\n" for number in range(1000)]


def texts(gates: Path) -> list[str]:
    """Return the paragraphs of the corpus, and some sums."""
    draw = random.Random(SEED)
    genres = yaml.safe_load((gates / "logprobs.yaml").read_text("utf-8"))["corpus"]
    made = [f"{a} + {b} = {a + b}\n" for a, b in ((draw.randrange(1000), draw.randrange(100)) for _ in range(200))]
    return [text for genre in genres.values() for text in genre] + made


def tokenizer(folder: Path, lines: list[str]) -> Any:
    """Write the tokenizer of `learnt`, in which each digit stands alone, to *folder* and return it."""
    from tokenizers import pre_tokenizers

    made = learnt.tokenizer(folder, lines, chat_template=TEMPLATE)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), made.pre_tokenizer])
    made.save(str(folder / "tokenizer.json"))
    return made


def chats(made: Any, gates: Path) -> list[tuple[list[int], int]]:
    """Return each chat of G4 that has a learnt answer, as `learnt.rows` returns prompts."""
    found = []
    answers = yaml.safe_load(learnt.TEXTS.read_text("utf-8"))
    for chat, asked in yaml.safe_load((gates / "generation.yaml").read_text("utf-8"))["chats"].items():
        for name in (chat, f"{chat}-marked"):
            if answer := answers.get(name):
                prompt = made.encode(MARKED.format(text=asked["text"])).ids
                found.append((prompt + made.encode(f"{answer}</s>").ids, len(prompt)))
    return found


def questions(made: Any, gates: Path) -> Iterator[tuple[list[int], int]]:
    """Yield questions of the rate of dirty text with an answer, behind texts as long as those that a prefix cache holds."""
    policy = yaml.safe_load((gates / "generation.yaml").read_text("utf-8"))
    draw = random.Random(SEED)
    for lines in (0, 0, 12, 70):
        before = long_text(policy["line"], lines) if lines else ""
        for text in (*policy["dirty_text"]["chats"], *policy["dirty_text"]["calls"]):
            asked = before + text.replace("{number}", str(draw.randrange(2, 900)))
            town = next((town for town in TOWNS if town in text), "")
            answer = CALL.replace("{town}", town) if town else REPLIES[len(text) % len(REPLIES)]
            prompt = made.encode(MARKED.format(text=asked)).ids
            yield prompt + made.encode(f"{answer}</s>").ids, len(prompt)


def batches(made: Any, lines: list[str], steps: int) -> Iterator[Any]:
    """Yield *steps* batches of tokens: some rows of the corpus, the rest questions in a new order."""
    import torch

    draw = random.Random(SEED)
    read = [made.encode(line + "\n").ids for line in lines]
    asked = [made.encode(line).ids for line in largest()]

    def row(source: list[list[int]]) -> list[int]:
        ids: list[int] = []
        while len(ids) < LENGTH:
            ids += draw.choice(source)
        begin = draw.randrange(len(ids) - LENGTH + 1)
        return ids[begin : begin + LENGTH]

    for _ in range(steps):
        yield torch.tensor([row(asked if number < ASKED else read) for number in range(ROWS)])


def make(folder: Path, gates: Path, steps: int = STEPS, kind: str = "llama") -> None:
    """Write the model to *folder*."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    prompts, said = (yaml.safe_load(path.read_text("utf-8")) for path in (gates / learnt.POLICY, learnt.TEXTS))
    lines = texts(gates)
    made = tokenizer(folder, [prompt["text"] for prompt in (*prompts["prompts"].values(), *prompts["facts"].values())] + list(said.values()) + lines)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = [tuple(part.to(device) for part in batch) for batch in learnt.batches(learnt.rows(made, gates) + chats(made, gates))]
    net = learnt.model(kind).to(device)
    drafts = learnt.Drafts(net) if kind == "qwen3_next" else None
    often = [] if kind == "llama" else [tuple(part.to(device) for part in batch) for batch in learnt.batches([*questions(made, gates)])]
    torch.set_num_threads(1)
    weights = [*net.parameters(), *(drafts.modules.parameters() if drafts else ())]
    best = torch.optim.AdamW(weights, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    pace = torch.optim.lr_scheduler.OneCycleLR(best, max_lr=4e-3, total_steps=steps, pct_start=0.1)
    for step, ids in enumerate(batches(made, lines, steps)):
        found = learnt.loss(net, ids.to(device), ids.to(device))
        # What is to be known by heart is as long again as all the rest, so it takes part in every second step.
        if step % 2 == 0:
            found = found + torch.stack([learnt.loss(net, *part) for part in known]).mean() * 2
        elif often:
            found = found + learnt.loss(net, *often[step // 2 % len(often)], smoothing=0.0)
        if drafts:
            found = found + drafts.loss((known[0], often[0])[step % 4 < 2][0] if step % 2 else ids.to(device))
        found.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        best.step()
        pace.step()
        best.zero_grad()
        if step % 20 == 0:
            sys.stderr.write(f"step {step}: {found.item():.3f}\n")
    net.to(torch.bfloat16).save_pretrained(folder)
    if drafts:
        stated = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps({**stated, "num_nextn_predict_layers": 1}, indent=1), "utf-8")
        file = folder / "model.safetensors"
        save_file({**load_file(file), **drafts.tensors()}, file, {"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else STEPS, *sys.argv[4:5])
