"""Files of real prompts for the load generator: JSON lines with a ``prompt`` each."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from sparkwright.core.errors import FileError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.store import Store, read_lines

#: Characters by which prompts differ at their beginning.
BEGINNING = 64
#: Prompts of this program's own text, at least; but for the last that are too short.
DIFFERENT = 96
#: Tokens of a vocabulary that has words, and not only pieces of them.
LARGE_VOCABULARY = 16_384


class Prompt(msgspec.Struct, frozen=True):
    """A line of a file of prompts."""

    prompt: str


def check_file(path: Path) -> Path:
    """
    Return *path*, a file of real prompts, so that no gate finds a fault of it after hours.

    Raises:
        file-invalid: It is no regular file, or not every line has a prompt.
    """
    lines = read_lines(path, Prompt, "file of prompts") if path.is_file() else []
    if not lines or not all(line.prompt.strip() for line in lines):
        what = f"{path} is no file of prompts."
        todo = 'Name a file of lines with a {"prompt": …} each.'
        raise FileError("file-invalid", what, todo=todo)
    return path


def programs(store: Store, tokens: int, vocabulary: int = LARGE_VOCABULARY) -> Path:
    """
    Return a file of JSON lines with prompts cut from this program's own text.

    It is there on every machine, and is prose and code as people write them. Long prompts overlap;
    no two begin alike, so no prefix is shared.

    Args:
        tokens: That no prompt exceeds, as the generator would leave it out; three quarters of them
            are usual.
        vocabulary: Tokens of the model's vocabulary; a small one needs more of them for a text.
    """
    modules = sorted(Path(__file__).parents[2].rglob("*.py"))
    text = "\n".join(module.read_text(encoding="utf-8") for module in modules)
    # Tokenizers of today have 3 to 4 characters a token of English or Python; all have one.
    step = max(16, 5 * tokens // 2 if vocabulary >= LARGE_VOCABULARY else 3 * tokens // 4)
    stride = min(step, len(text) // DIFFERENT)
    starts = range(0, len(text) - step, stride)
    pieces = {text[begin : begin + BEGINNING]: text[begin : begin + step] for begin in starts}
    lines = "".join(json.dumps({"prompt": piece}) + "\n" for piece in pieces.values())
    path = store.folder("prompts") / f"programs-{sha256_bytes(lines.encode())[:16]}.jsonl"
    return store.write(path, lines.encode())
