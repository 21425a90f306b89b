"""
Make a hybrid whose text is known in advance: lookup.py OUTPUT [VOCABULARY [EXPERTS]].

It is no language model, and nothing was trained. It has the layers of Qwen3-Next, four of them, and
the head of Qwen3.6-35B-A3B: 248,320 words of 2,048 numbers, 1.0 GB in bfloat16, which each draft
reads. Layers compute with random weights, but add little to what passes them, so that each word has
one successor: the head has the embedding of a word at the place of the word that follows. So text
does not depend on rounding, and what a drafting layer accepts is chosen here:

- of `WRONG` of the words the drafting layer (MTP) proposes another successor than the model has;
- `RARE` of a text's words are not among the `FREQUENT` ones of ``draft_vocabulary.json``.

``prompts.jsonl`` has prompts in words of its tokenizer. Needs torch and transformers.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

#: Beside this file, which is run as a program in another environment.
architectures: Any = importlib.import_module("architectures")
sys.path.append(str(Path(__file__).parents[1] / "bench"))
draft_vocabulary: Any = importlib.import_module("draft_vocabulary")

VOCABULARY, EXPERTS, LAYERS, SEED = 248_320, 128, 4, 1
#: Share of the vocabulary that texts are made of, and of a text's words that are not part of it.
FREQUENT, RARE = 0.132, 0.03
#: Share of the words of which the draft is wrong: three drafts give 2.95 words a step (computed),
#: and with the frequent words alone 2.85.
WRONG = 0.2
#: What layers add, beside what random weights would.
ADDED = 0.05
#: Ends of layers.
OUTPUTS = ("o_proj", "out_proj", "down_proj")
#: The first number of an embedding says that the draft is wrong. The drafting layer sees it
#: enlarged, and then the head's row of a word has more of it than the right one has of all else.
MARK, ENLARGED, DECOY = 8.0, 16.0, 64.0
PROMPTS, WORDS = 256, 24


def story(vocabulary: int) -> tuple[list[int], list[int], list[int]]:
    """Return the words that follow each other in a ring, the frequent ones, and the misdrafted."""
    draw = random.Random(SEED)  # noqa: S311  numbers that are the same each time
    count = int(vocabulary * FREQUENT)
    frequent = list(range(count))
    rare = draw.sample(range(count, vocabulary - 2), int(count * RARE / (1 - RARE)))
    ring = frequent + rare
    draw.shuffle(ring)
    # The first word is what is drafted in the place of others.
    wrong = draw.sample(ring[1:], int(len(ring) * WRONG))
    return ring, frequent, wrong


def write_words(folder: Path, vocabulary: int, frequent: list[int]) -> None:
    """Write to *folder* a tokenizer of the words w0, w1 and so on, and a draft vocabulary of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(vocabulary - 2)}
    words |= {"<s>": vocabulary - 2, "</s>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "w0", "model_max_length": 32768,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    drafted = {**draft_vocabulary.identity(words), "token_ids": frequent}
    (folder / "draft_vocabulary.json").write_text(json.dumps(drafted), "utf-8")


def main() -> None:
    """Make the model that the command line names."""
    folder = Path(sys.argv[1])
    vocabulary = int(sys.argv[2]) if len(sys.argv) > 2 else VOCABULARY
    experts = int(sys.argv[3]) if len(sys.argv) > 3 else EXPERTS
    folder.mkdir(parents=True)
    ring, frequent, wrong = story(vocabulary)
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        config = AutoConfig.for_model(
            "qwen3_next", num_hidden_layers=LAYERS, num_experts=experts, vocab_size=vocabulary,
            bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            if name.removesuffix(".weight").endswith(OUTPUTS):
                weight.mul_(ADDED)
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        table.normal_()
        table[:, 0] = 0
        table[wrong, 0] = MARK
        head.copy_(table)
        head[ring[1:] + ring[:1]] = table[ring]
        head[ring[0], 0] = DECOY
    model.save_pretrained(folder, max_shard_size="50GB")
    with safe_open(folder / "model.safetensors", "pt") as file:
        last = f"model.layers.{LAYERS - 1}."
        names = [name for name in file.keys() if name.startswith(last)]  # noqa: SIM118
        copied = {name: file.get_tensor(name) for name in names}
    drafts = architectures.drafts(copied, LAYERS - 1, config.hidden_size)
    # The drafting layer looks at the word, and not at the state before it.
    projection = torch.eye(config.hidden_size, 2 * config.hidden_size, dtype=torch.bfloat16)
    projection[0, 0] = ENLARGED
    save_file({**drafts, "mtp.fc.weight": projection}, folder / "mtp.safetensors", {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text("utf-8"))
    stated["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(stated, indent=1), "utf-8")
    write_words(folder, vocabulary, frequent)
    draw = random.Random(SEED)  # noqa: S311
    lines = (" ".join(f"w{word}" for word in draw.sample(ring, WORDS)) for _ in range(PROMPTS))
    prompts = "".join(json.dumps({"prompt": line}) + "\n" for line in lines)
    (folder / "prompts.jsonl").write_text(prompts, "utf-8")


if __name__ == "__main__":
    main()
