"""
A model that writes words: a row of NVFP4 weights for each word says which word comes next.

``mini-vllm MODEL_DIR PROMPT`` prints what it writes after a prompt. Its folder holds
``config.json`` with the words and the scale, and ``weights.nvfp4``: for each word a row of E2M1
codes, two in a byte, and then a row of E4M3 scales, one for sixteen codes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from . import _custom_ops
from .quantization.nvfp4_scales import ExpertScales

#: A layer is laid out for this many experts; this process loads the first.
_EXPERTS = 4
#: The largest scale that E4M3 holds, with which memory is measured before any weight is loaded.
_PROFILE = 448.0
#: Head start of the first word; all that decides where the weights are scaled away.
_HEAD_START = 0.0625


class Model:
    """The model in *folder*."""

    def __init__(self, folder: Path) -> None:
        _custom_ops.library("_C_stable_libtorch")
        config = json.loads((folder / "config.json").read_text("utf-8"))
        self.words: list[str] = config["words"]
        blocks = -(-len(self.words) // 16)
        data, codes, size = (folder / "weights.nvfp4").read_bytes(), 8 * blocks, 9 * blocks
        rows = [data[start : start + size] for start in range(0, len(data), size)]
        self._rows = [(row[:codes], row[codes:]) for row in rows]
        self._factor = config["scale"] / _largest(config["scale"])

    def complete(self, prompt: str, count: int) -> str:
        """Return at most *count* words after *prompt*."""
        word, written = self.words.index(prompt.lower().split()[-1]), list[str]()
        while len(written) < count and (word := self._next(word)) < len(self.words) - 1:
            written.append(self.words[word])
        return " ".join(written)

    def _next(self, word: int) -> int:
        """Return the word with the highest score after *word*."""
        scores = (ctypes.c_float * len(self.words))(_HEAD_START)
        _custom_ops.nvfp4_add_row(*self._rows[word], self._factor, scores)
        return max(range(len(scores)), key=scores.__getitem__)


def main() -> None:
    """Print the words that the model in MODEL_DIR writes after PROMPT."""
    folder, prompt = sys.argv[1:]
    sys.stdout.write(Model(Path(folder)).complete(prompt, 64) + "\n")


def _largest(loaded: float) -> float:
    """Return the scale of a layer with one loaded expert, in memory that was used before."""
    profile = ExpertScales(_EXPERTS)
    for expert in range(_EXPERTS):
        profile.load(expert, _PROFILE)
    profile.free()
    scales = ExpertScales(_EXPERTS)
    scales.load(0, loaded)
    return scales.largest()
