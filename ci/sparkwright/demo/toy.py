"""
The model-shaped toy that the demo serves through the installed wheel, and what it must answer.

Two layers of NVFP4 weights have learnt one text by heart: which word follows a word, and which
follows the word before it. The expected answer is computed here from the file alone, with tables of
E2M1 and E4M3 of its own, and without a line of the package under test. Only if scales, codes and
the choice of the largest scale are right do the words come out right; a wrong one repeats itself.
"""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.forks.errors import SourceError

TEXT = (
    "a wheel is only as good as its proof . so every patch says why it exists , each kernel "
    "shows what it does and the reader decides ."
)
PROMPT, ANSWER = "A wheel", TEXT.removeprefix("a wheel ")
END, UNKNOWN = "<end>", "<unknown>"

#: Magnitudes by the low three bits of a code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Scale of each layer; powers of two, so that any order of adding in float32 gives the same score.
_GLOBAL = (0.5, 0.25)
#: What a learnt pair counts in each layer, and any other.
_LEARNT, _OTHER = (4.0, 6.0), (-0.5, -1.0)
#: Head start of the first word; all that decides where the weights are scaled away.
_HEAD_START = 0.0625
_BLOCK = 16
_SECONDS = 60


def write(folder: Path) -> Path:
    """Write the model to *folder*, and return it; the same bytes each time."""
    words = [*dict.fromkeys(re.findall(r"\S+", TEXT)), END, UNKNOWN]
    learnt = [words.index(word) for word in [*TEXT.split(), END]]
    tensors = {
        "bias": (
            "F32",
            [len(words)],
            struct.pack(f"<{len(words)}f", _HEAD_START, *[0.0] * (len(words) - 1)),
        )
    }
    for layer, scale in enumerate(_GLOBAL):
        pairs = set(zip(learnt, learnt[layer + 1 :], strict=False))
        rows = [
            _row([(_LEARNT if (row, to) in pairs else _OTHER)[layer] for to in range(len(words))])
            for row in range(len(words))
        ]
        blocks = len(rows[0][1])
        tensors |= {
            f"layers.{layer}.weight": (
                "U8",
                [len(words), blocks * _BLOCK // 2],
                b"".join(codes for codes, _ in rows),
            ),
            f"layers.{layer}.weight_scale": (
                "F8_E4M3",
                [len(words), blocks],
                b"".join(scales for _, scales in rows),
            ),
            f"layers.{layer}.weight_scale_2": ("F32", [1], struct.pack("<f", scale)),
        }
    config = {
        "model_type": "mini",
        "layers": len(_GLOBAL),
        "words": words,
        "end": END,
        "unknown": UNKNOWN,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    (folder / "model.safetensors").write_bytes(_file(tensors))
    return folder


def _row(values: Sequence[float]) -> tuple[bytes, bytes]:
    """
    Return *values* as packed codes and scales, a block of sixteen at a time; each value must be one
    that they can hold.
    """
    padded = [*values, *[0.0] * (-len(values) % _BLOCK)]
    codes, scales = bytearray(), bytearray()
    for start in range(0, len(padded), _BLOCK):
        block = padded[start : start + _BLOCK]
        # The lowest power of two with which the largest is not above 6; E4M3 has it without
        # mantissa.
        power = next(
            power for power in range(-6, 9) if max(map(abs, block)) <= _E2M1[-1] * 2.0**power
        )
        numbers = [
            _E2M1.index(abs(value) / 2.0**power) | (8 if value < 0 else 0) for value in block
        ]
        codes += bytes(
            low | high << 4 for low, high in zip(numbers[::2], numbers[1::2], strict=True)
        )
        scales.append(power + 7 << 3)
    return bytes(codes), bytes(scales)


def _file(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """Return *tensors* (type, shape, bytes) as a safetensors file."""
    header, body = {}, b""
    for name, (kind, shape, data) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def expected(folder: Path, prompt: str, most: int = 64) -> str:
    """
    Return what the model in *folder* writes after *prompt*: at most so many words, the one with the
    highest score each time.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    words: list[str] = config["words"]
    raw = {name: body[slice(*one["data_offsets"])] for name, one in header.items()}
    bias = struct.unpack(f"<{len(words)}f", raw["bias"])
    scales = [
        struct.unpack("<f", raw[f"layers.{layer}.weight_scale_2"])[0]
        for layer in range(config["layers"])
    ]
    tables = [
        _table(raw[f"layers.{layer}.weight"], raw[f"layers.{layer}.weight_scale"], len(words))
        for layer in range(len(scales))
    ]
    written = [
        words.index(word) if word in words else words.index(config["unknown"])
        for word in re.findall(r"\w+|[^\w\s]", prompt.lower())
    ]
    answer: list[str] = []
    while len(answer) < most:
        near = written[::-1]
        scores = [
            bias[to]
            + sum(
                table[one][to] * scale / max(scales)
                for table, one, scale in zip(tables, near, scales, strict=False)
            )
            for to in range(len(words))
        ]
        best = scores.index(max(scores))
        if words[best] == config["end"]:
            break
        written.append(best)
        answer.append(words[best])
    return " ".join(answer)


def _table(codes: bytes, scales: bytes, count: int) -> list[list[float]]:
    """Return the numbers that NVFP4 blocks stand for: a row for each of *count* words."""
    nibbles = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)]
    values = [
        (-1 if nibble & 8 else 1) * _E2M1[nibble & 7] * _e4m3(scales[place // _BLOCK])
        for place, nibble in enumerate(nibbles)
    ]
    width = len(values) // count
    return [values[start : start + width] for start in range(0, len(values), width)]


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
    return -value if code & 128 else value


def ask(url: str, prompt: str, most: int = 64, *, stream: bool = False) -> str:
    """
    Return what the server at *url* writes after *prompt*, whole or put together from a stream.

    Raises:
        source-unreachable: It does not answer, or not with a completion.
    """
    import requests

    question = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": stream}
    try:
        reply = requests.post(f"{url}/v1/completions", json=question, timeout=(5, _SECONDS))
        reply.raise_for_status()
        lines = reply.text.splitlines() if stream else [f"data: {reply.text}"]
        pieces = [
            json.loads(line[6:])
            for line in lines
            if line.startswith("data: ") and line != "data: [DONE]"
        ]
        return "".join(choice["text"] for piece in pieces for choice in piece["choices"]).strip()
    except (requests.RequestException, ValueError, LookupError, TypeError) as error:
        raise SourceError(
            "source-unreachable", f"The toy's server gave no completion: {error}"
        ) from error


@contextlib.contextmanager
def serving(program: Sequence[str | Path], folder: Path, log: Path) -> Iterator[str]:
    """
    Serve the model in *folder* with the installed *program* (``bin/mini-vllm``) while the block
    runs, and yield the address.

    Args:
        log: Where it writes its complaints.

    Raises:
        command-failed: It ended, or did not come up, or did not end when it was asked to.
    """
    command = process.leashed([*program, "serve", folder, "--port", "0"])
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=process.clean_environment(),
        )
        try:
            yield _address(child, log)
            child.send_signal(signal.SIGTERM)
            status = child.wait(_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                "command-failed", f"The toy's server did not end within {_SECONDS} s of SIGTERM."
            ) from error
        finally:
            child.kill()
            child.wait()
            if child.stdout:
                child.stdout.close()
    if status:
        raise CommandError(
            "command-failed", f"The toy's server ended with status {status}.", details=_tail(log)
        )


def _address(child: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address that the server prints once it listens."""
    assert child.stdout is not None
    line = _line(child.stdout, time.monotonic() + _SECONDS)
    found = re.search(r"http://[0-9.]+:[0-9]+", line)
    if found is None:
        raise CommandError(
            "command-failed", "The toy's server did not come up.", details=[line, *_tail(log)]
        )
    return found[0]


def _line(stream: IO[Any], deadline: float) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return (
            stream.readline().decode("utf-8", "replace")
            if selector.select(max(0.0, deadline - time.monotonic()))
            else ""
        )


def _tail(log: Path) -> list[str]:
    return log.read_text("utf-8", errors="replace").splitlines()[-20:]
