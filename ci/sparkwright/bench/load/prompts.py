"""
A file of real prompts for the load generator: JSON lines, or ShareGPT's JSON.

The generator reads its file whole before each run. ShareGPT has hundreds of megabytes, most of it
answers, so prompts are extracted once, an entry at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.core.store import Store, replacing, translate_disk_full

#: Characters that are read at a time, and of the longest entry (ShareGPT splits its conversations).
CHUNK, LONGEST_ENTRY = 1 << 20, 4 << 20
#: Characters of the shortest first turn and the longest prompt that are used, and of all together.
SHORTEST, LONGEST, MOST = 16, 1 << 16, 256 << 20


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
    key = content_key("prompts", (digest, SHORTEST, LONGEST, MOST))
    lines = store.folder("prompts") / f"{key}.jsonl"
    try:
        if not lines.exists():
            with translate_disk_full(lines.parent), replacing(lines) as output:
                _extract(path, output)
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


def programs(store: Store, tokens: int) -> Path:
    """
    Return a file of JSON lines with prompts cut from this program's own text.

    It is there on every machine, and is prose and code as people write them.

    Args:
        tokens: That no prompt exceeds; three quarters of them are usual.
    """
    modules = sorted(Path(__file__).parents[2].rglob("*.py"))
    text = "\n".join(module.read_text(encoding="utf-8") for module in modules)
    # Tokenizers of today have 3 to 4 characters a token of English or Python.
    step = max(16, 5 * tokens // 2)
    pieces = [text[begin : begin + step] for begin in range(0, len(text) - step, step)]
    lines = "".join(json.dumps({"prompt": piece}) + "\n" for piece in pieces)
    path = store.folder("prompts") / f"programs-{sha256_bytes(lines.encode())[:16]}.jsonl"
    return store.write(path, lines.encode())


def _extract(path: Path, output: Path) -> None:
    size = 0
    with path.open(encoding="utf-8-sig") as text, output.open("w", encoding="utf-8") as lines:
        for entry in _entries(text):
            if size < MOST and (prompt := _prompt(entry)):
                size += lines.write(json.dumps({"prompt": prompt}) + "\n")
    if not size:
        raise ValueError(
            f"no prompt or first turn of a person has {SHORTEST} to {LONGEST} characters"
        )


def _entries(text: TextIO) -> Iterator[Any]:
    """Yield the elements of a JSON array, or the values of JSON lines; ValueError for others."""
    decoder, buffer = json.JSONDecoder(), text.read(CHUNK).lstrip()
    is_array = buffer.startswith("[")
    at = int(is_array)
    while True:
        while buffer[at : at + 1] in {" ", "\t", "\r", "\n", ","}:
            at += 1
        if is_array and buffer[at : at + 1] == "]":
            return
        try:
            entry, at = decoder.raw_decode(buffer, at)
        except json.JSONDecodeError:
            # It may be cut off. Reading as much again keeps the repeated parsing linear.
            more = text.read(max(CHUNK, len(buffer) - at))
            if not (more or is_array or buffer[at:]):
                return
            if not more or len(buffer) - at > LONGEST_ENTRY:
                raise
            buffer, at = buffer[at:] + more, 0
        else:
            yield entry


def _prompt(entry: Any) -> str:
    """Return a prompt, or the first turn of an answered conversation; empty if it is unusable."""
    entry = entry if isinstance(entry, dict) else {}
    turns = entry.get("conversations")
    answered = isinstance(turns, list) and len(turns) > 1 and isinstance(turns[0], dict)
    person = answered and turns[0].get("from") in ("human", "user")
    value = turns[0].get("value") if person else entry.get("prompt")
    shortest = SHORTEST if turns else 1
    if not isinstance(value, str) or not shortest <= len(value.strip()) <= LONGEST:
        return ""
    # Half of a surrogate pair has no UTF-8.
    return value.encode("utf-8", "replace").decode()
