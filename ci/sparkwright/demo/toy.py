"""
The model that the demo serves through the installed wheel.

Its NVFP4 weights have learnt one text by heart: which word follows a word. Only if scales, codes
and the choice of the largest scale are right do the words come out right; a wrong one repeats
itself.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.forks.errors import SourceError

#: No word occurs twice.
TEXT = (
    "a wheel is worth what its proof shows , so every patch says why it exists and each kernel "
    "names the unit behind them ."
)
PROMPT, ANSWER = "A wheel", TEXT.removeprefix("a wheel ")
#: The last one ends an answer.
WORDS = [*TEXT.split(), "<end>"]

#: E2M1 code of 6, its largest number, and of -0.5; E4M3 code of 1.
_LEARNT, _OTHER, _ONE = 0b0111, 0b1001, 7 << 3
_SECONDS = 60


def write(folder: Path) -> Path:
    """Write the model to *folder*, and return it; the same bytes each time."""
    blocks = -(-len(WORDS) // 16)
    rows = bytearray()
    for word in range(len(WORDS)):
        codes = [_LEARNT if to == word + 1 else _OTHER for to in range(16 * blocks)]
        rows += bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
        rows += bytes([_ONE] * blocks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"words": WORDS, "scale": 0.5}), "utf-8")
    (folder / "weights.nvfp4").write_bytes(rows)
    return folder


def ask(url: str, prompt: str, count: int = 64) -> str:
    """
    Return at most *count* words that the server at *url* writes after *prompt*.

    Raises:
        source-unreachable: It does not answer, or not with a completion.
    """
    import requests

    question = {"prompt": prompt, "max_tokens": count}
    try:
        reply = requests.post(f"{url}/v1/completions", json=question, timeout=_SECONDS)
        return str(reply.json()["choices"][0]["text"])
    except (requests.RequestException, LookupError) as error:
        what = f"The demo's server gave no completion: {error}"
        raise SourceError("source-unreachable", what) from error


@contextlib.contextmanager
def serving(program: Sequence[str | Path], folder: Path, log: Path) -> Iterator[str]:
    """
    Serve the model in *folder* with the installed *program* (``bin/mini-vllm``) while the block
    runs, and yield the address.

    Args:
        log: Where it writes its complaints.

    Raises:
        command-failed: It did not come up.
    """
    command = process.wrap_with_limits([*program, "serve", folder, "--port", "0"])
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=process.clean_environment(),
            text=True,
        ) as child,
    ):
        try:
            assert child.stdout is not None
            address = child.stdout.readline().partition(" serves on ")[2].strip()
            if not address:
                details = log.read_text("utf-8", "replace").splitlines()[-20:]
                raise CommandError(
                    "command-failed", "The demo's server did not come up.", details=details
                )
            yield address
        finally:
            child.kill()
