"""
Files of real prompts: one JSON object with ``prompt`` in each line.

They come from strangers and are large, so every line is bounded and read alone. The prompts themselves are never printed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from sparkwright.bench.recipes.workloads import Texts
from sparkwright.core.errors import FileError

#: Bytes of a file and of a line: a few thousand prompts of any length that a Spark can take.
LARGEST, LINE = 256 << 20, 4 << 20
#: Prompts that a file must have, so that a leg does not ask the same thing twice.
FEWEST = 16


class _Line(msgspec.Struct):
    prompt: str


class Found(msgspec.Struct, frozen=True):
    """
    A file of prompts.

    Attributes:
        prompts: How many it has. *sha256*: of the file.
        pinned: Whether it is the file that ``workloads.yaml`` names by its digest.
    """

    prompts: int
    sha256: str
    pinned: bool


def check(path: Path, wanted: Texts) -> Found:
    """
    Return what the file at *path* holds.

    Raises:
        file-invalid: It is no such file, is too large, has too few prompts, or is not the one that is *wanted*.
    """
    digest, count = hashlib.sha256(), 0
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise FileError("file-invalid", f"{path.name} is no file, or has more than {LARGEST:,} bytes.")
        with path.open("rb") as stream:
            while line := stream.readline(LINE):
                digest.update(line)
                count += _is_prompt(line, f"{path.name}, line {count + 1}")
    except OSError as error:
        raise FileError("file-invalid", f"{path.name} cannot be read.", details=[str(error)]) from error
    if count < FEWEST:
        raise FileError("file-invalid", f"{path.name} has {count} prompts; at least {FEWEST} are needed.")
    found = digest.hexdigest()
    if wanted.sha256 not in (found, "unresolved"):
        raise FileError(
            "file-invalid", f"{path.name} is not the file of prompts that is meant.", details=[f"wanted {wanted.sha256}", f"found  {found}"]
        )
    return Found(count, found, wanted.sha256 == found)


def _is_prompt(line: bytes, where: str) -> bool:
    """Return True for a prompt; anything else is refused, an empty line too."""
    if not line.strip():
        raise FileError("file-invalid", f"{where} is empty.")
    try:
        if not msgspec.json.decode(line, type=_Line).prompt.strip():
            raise FileError("file-invalid", f"{where} has an empty prompt.")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        says = f"{where} is no JSON object with a prompt, or has more than {LINE:,} bytes."
        raise FileError("file-invalid", says, details=[str(error)[:200]]) from error
    return True
