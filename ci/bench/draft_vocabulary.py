"""
Make a draft vocabulary: the tokens of which a text has most, for `draft_vocabulary` of a recipe.

    draft_vocabulary.py MODEL SIZE TEXT ... > FILE    needs transformers: the Python that serves

MODEL is a folder with the model's tokenizer. Tokens that no TEXT has follow in the order of their
ids, in which most tokenizers learnt them, so that there are SIZE in any case; special tokens are
always among them, as an answer ends by one.
"""

from __future__ import annotations

import collections
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def identity(words: Mapping[str, int]) -> dict[str, Any]:
    """Return by what vLLM's patch knows the tokenizer with the tokens *words*: their number and digest."""
    tokens = sorted(words.items(), key=lambda pair: (pair[1], pair[0]))
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return {"vocab_size": len(tokens), "vocab_sha256": digest}


def draft_vocabulary(tokenizer: Any, texts: Sequence[str], size: int) -> dict[str, Any]:
    """Return *size* tokens of *tokenizer* with the digest of all, as vLLM's patch reads them."""
    words = tokenizer.get_vocab()
    counts = collections.Counter(token for text in texts for token in tokenizer.encode(text))
    special = set(tokenizer.all_special_ids)
    ids = sorted(
        set(words.values()),
        key=lambda number: (number not in special, -counts[number], number),
    )
    if not len(special) < size < len(ids):
        raise SystemExit(
            f"SIZE has to be above {len(special)}, the special tokens, and below {len(ids)}, all tokens"
        )
    share = sum(counts[number] for number in ids[:size]) / max(1, sum(counts.values()))
    sys.stderr.write(f"{size} of {len(ids)} tokens are {share:.2%} of those in the texts\n")
    return {**identity(words), "token_ids": sorted(ids[:size])}


def main(model: str, size: str, *texts: str) -> None:
    """Print the draft vocabulary as JSON."""
    from transformers import AutoTokenizer

    read = [Path(text).read_text("utf-8") for text in texts]
    made = draft_vocabulary(AutoTokenizer.from_pretrained(model), read, int(size))
    sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
