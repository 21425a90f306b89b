"""
The second generator, so that figures can be compared with the community's: llama-benchy, locked, in an environment of its own.

It tells each request in its stream of progress, from which the requests here are made; its report has only means. Other than
`sparkwright.gates.load.vllmrs` it

- asks for chats, so the template's tokens belong to the prompt: it asks for fewer by as many as the first answer shows, and what the server
  counted is what stands here. Texts that are cut between two tokens may have a token more or less;
- makes batches: as many requests as run at a time, and the next batch when all of them have ended;
- takes prompts from anywhere in one text. That is ours here, new for each seed, as its own (a novel) would have to be fetched.

Its coherence test is left out: it asks for the capital of France, and the rung of the words asks for more.
"""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
from pathlib import Path

import msgspec

from sparkwright.builder import pylock
from sparkwright.core.console import one_line
from sparkwright.core.errors import CommandError
from sparkwright.core.files import sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.gates import limited, locked
from sparkwright.gates.load import progress, prompts
from sparkwright.gates.load.order import LoadInvalid, Order, Run

#: What it asks for and does not need: an old copy of a module of Python, and what reads tokenizers that have no ``tokenizer.json``.
WITHOUT = ("asyncio", "transformers", "safetensors")

#: Where it would fetch its text; it looks first for a file named after the address.
BOOK = "sparkwright:text"

#: Megabytes of address space, and of what it writes.
MEMORY, WRITTEN = 16384, 1024

#: Words of the text, and of the tokenizer where a server's own is not known.
WORDS, KINDS = 50_000, 250


class Benchy(msgspec.Struct, frozen=True):
    """
    The generator.

    Attributes:
        python: Of its environment. *version*: its. *sha256*: of the lock that it was installed from.
    """

    python: Path
    version: str
    sha256: str

    @property
    def name(self) -> str:
        """Its name and version."""
        return f"llama-benchy {self.version}"

    def measure(self, order: Order) -> Run:
        """Make the load and return what was measured, in whole batches; see `sparkwright.gates.load.order.Generator`."""
        with tempfile.TemporaryDirectory(prefix="sparkwright-load-") as name:
            folder = Path(name)
            command = [*_environment(folder), str(self.python), "-I", "-m", "llama_benchy", *_arguments(order, folder)]
            try:
                ended = limited.run(command, limited.Limits(order.patience, MEMORY, WRITTEN), folder / "said.log")
            except CommandError as error:
                if error.reference != "tool-missing":
                    raise
                raise LoadInvalid("generator-failed", str(error)) from None
            if ended.late:
                raise LoadInvalid("generator-late", f"{self.name} was not through after {order.patience:g} s")
            if ended.status:
                last = (ended.tail.splitlines() or ["it said nothing"])[-1]
                raise LoadInvalid("generator-failed", f"{self.name} ended with status {ended.status}: {one_line(last, 300)}")
            requests = progress.requests(folder / "progress.jsonl")
        ends = [one.began + one.seconds for one in requests]
        return Run(self.name, self.sha256, max(ends, default=0.0), requests)


def _environment(folder: Path) -> list[str]:
    """Return a command that runs what follows with a home of its own, without the hub and without anybody's token."""
    return [
        "env", "-u", "HF_TOKEN", "-u", "HUGGING_FACE_HUB_TOKEN", "-u", "OPENAI_API_KEY", f"HOME={folder}", "HF_HUB_OFFLINE=1",
        "NO_PROXY=*", "no_proxy=*",
    ]  # fmt: skip


def _arguments(order: Order, folder: Path) -> list[str]:
    """Return the command line for *order*, and lay down in *folder* what it reads."""
    cache = folder / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    (cache / f"{hashlib.md5(BOOK.encode(), usedforsecurity=False).hexdigest()}.txt").write_text(_text(order), "utf-8")
    tokenizer = order.tokenizer or _words_tokenizer(folder)
    return [
        "--base-url", order.url.rstrip("/") + "/v1", "--model", order.model, "--tokenizer", str(tokenizer), "--book-url", BOOK,
        "--pp", str(order.prompt), "--tg", str(order.answer), "--exact-tg", "--concurrency", str(order.concurrency),
        "--runs", str(math.ceil(order.requests / order.concurrency)), "--latency-mode", "none", "--skip-coherence",
        *([] if order.warmups else ["--no-warmup"]), "--extra-body", "temperature=0", "--format", "json",
        "--save-result", str(folder / "result.json"), "--emit-progress", str(folder / "progress.jsonl"),
    ]  # fmt: skip


def _text(order: Order) -> str:
    """Return the text that prompts are cut from, long enough for each to begin elsewhere."""
    drawn = random.Random(order.seed)  # noqa: S311 - prompts, no secrets
    if order.prompts == "random":
        return " ".join(f"t{number}" for number in drawn.choices(range(KINDS), k=max(WORDS, 4 * order.prompt)))
    if order.texts is None:
        raise LoadInvalid("texts-unreadable", "prompts are to be texts, and no file of them is named")
    return "\n\n".join(prompts.texts(order.texts))


def _words_tokenizer(folder: Path) -> Path:
    """Write a tokenizer for which each word is a token, as it is for the reference server, and return its folder."""
    model = {"type": "WordLevel", "vocab": {f"t{number}": number for number in range(KINDS)}, "unk_token": "t0"}
    made: dict[str, object] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    made |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(msgspec.json.encode(made))
    return folder / "tokenizer"


def folder(context: RunContext) -> Path:
    """Return where its lock lies."""
    return context.project.root / "ci" / "gates" / "llama-benchy"


def lock(context: RunContext) -> str:
    """Resolve its ``requirements.in`` and return the text of its ``pylock.toml``; raise `source-unreachable` where that cannot be."""
    options = [option for name in WITHOUT for option in ("--no-emit-package", name)]
    return pylock.resolve(context.store, folder(context) / "requirements.in", *options)


def obtain(context: RunContext) -> Benchy:
    """
    Return the generator, installed.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full, command-failed: See `sparkwright.gates.locked.obtain`.
    """
    lock_file = folder(context) / "pylock.toml"
    version = next(filename.split("-")[1] for name, filename, _ in pylock.select(lock_file) if name == "llama-benchy")
    return Benchy(locked.obtain(context, "llama-benchy", "llama-benchy", lock_file), version, sha256_file(lock_file))
