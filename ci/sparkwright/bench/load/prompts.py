"""
A file of real prompts for the load generator: JSON lines, or ShareGPT's JSON.

The generator reads its file whole before each run. ShareGPT has hundreds of megabytes, most of it
answers, so prompts are extracted once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.core.store import Store

#: Characters of the shortest first turn and the longest prompt that are used.
SHORTEST, LONGEST = 16, 1 << 16
#: Characters by which prompts differ at their beginning.
BEGINNING = 64
#: Prompts of this program's own text, at least; but for the last that are too short.
DIFFERENT = 96
#: Tokens of a vocabulary that has words, and not only pieces of them.
LARGE_VOCABULARY = 16_384
#: Bytes of the largest file that is read; ShareGPT has 672,837,942.
LARGEST = 1 << 30


def prompt_file(path: Path, store: Store, sha256: str | None, datasets: Mapping[str, str]) -> Path:
    """
    Return a file of JSON lines with the prompts in *path*, which may be ShareGPT's JSON.

    Args:
        sha256: That *path* must have; None for any.
        datasets: Names by the sha256 of their files; a message says which of them *path* is.

    Raises:
        file-invalid: There is no such file, it has another sha256, or it is not ShareGPT's.
    """
    if not path.is_file():
        raise FileError(
            "file-invalid",
            f"{path} is no regular file.",
            todo="Name a file of prompts with --texts.",
        )
    if (digest := sha256_file(path)) != (sha256 or digest).lower():
        raise FileError(
            "file-invalid",
            f"{path} is not the expected file of prompts.",
            details=[f"sha256 {digest}", f"not {sha256}"],
            todo="Fetch it again, or leave out --sha256 to use the file as it is.",
        )
    key = content_key("prompts", (digest, SHORTEST, LONGEST))
    lines = store.folder("prompts") / f"{key}.jsonl"
    try:
        if not lines.exists():
            store.write(lines, _extracted(path).encode())
    except (ValueError, RecursionError) as error:
        raise FileError(
            "file-invalid",
            f"{path} is neither ShareGPT's JSON nor JSON lines of prompts.",
            details=[str(error)[:300]],
            todo='Name an array of {"conversations": [{"from", "value"}, …]}, or lines of '
            '{"prompt"}.',
        ) from error
    with lines.open("rb") as stream:
        count = sum(1 for _ in stream)
    origin = datasets.get(digest, "not a file that workloads.yaml names")
    console.note(f"{path.name}: {count:,} usable prompts, sha256 {digest}, {origin}")
    return lines


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


def _extracted(path: Path) -> str:
    """Return the prompts in *path* as JSON lines; raise ValueError or RecursionError for others."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"it is larger than {LARGEST} bytes")
    text = path.read_text(encoding="utf-8-sig").strip()
    if text.startswith("["):
        entries = json.loads(text)
    else:
        entries = [json.loads(line) for line in text.split("\n") if line.strip()]
    prompts = [prompt for entry in entries if (prompt := _prompt(entry))]
    if not prompts:
        raise ValueError(
            f"no prompt or first turn of a person has {SHORTEST} to {LONGEST} characters"
        )
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


def _prompt(entry: Any) -> str:
    """Return a prompt, or the first turn of an answered conversation; empty if it is unusable."""
    match entry:
        case {"conversations": [{"from": "human" | "user", "value": str(text)}, _, *_]}:
            usable = SHORTEST <= len(text.strip()) <= LONGEST
        case {"prompt": str(text)}:
            usable = 1 <= len(text.strip()) <= LONGEST
        case _:
            return ""
    # Half of a surrogate pair has no UTF-8.
    return text.encode("utf-8", "replace").decode() if usable else ""
