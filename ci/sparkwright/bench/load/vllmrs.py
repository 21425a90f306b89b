"""
The generator that measures: ``vllm-rs bench serve``, from the official wheel that a lock names, and never from the wheel under test.

What it does, as its source of 0.33.0 and runs of it show, and what follows here:

- Its warm-ups all repeat the first prompt, which a prefix cache then knows. So warm-ups are a run of their own, with prompts of their own.
- From the length of a random prompt it takes off the tokens that the tokenizer puts around a text, though it sends numbers. What it takes
  off is found by a dry run, and added. Where there is no tokenizer it asks the server for a token and takes 131,072 for the vocabulary.
- A connection that cannot be made, or breaks before the answer, is tried again up to three times, without a word; only time is lost.
- A stream that ends with an error counts as a success, with the tokens up to there. Without ``usage`` it counts events. So whoever judges a
  leg holds the tokens against the order and against the server's counters.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.load import detailed
from sparkwright.bench.load.metrology import policy
from sparkwright.bench.load.order import LoadInvalid, Order, Request, Run
from sparkwright.core import process
from sparkwright.core.errors import CommandError, WheelError
from sparkwright.core.files import sha256_file
from sparkwright.forks import lock, package_index
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project, SourceError

#: Where the program lies in the wheel, and the most bytes that it may have (it has 61 million on x86-64).
MEMBER, LARGEST = "vllm/vllm-rs", 256 << 20

#: Megabytes of address space of the program, most of it never touched, and of what it writes.
MEMORY, WRITTEN = 16384, 1024

_TOTAL = re.compile(r"Total input tokens: (\d+)")


class VllmRs(msgspec.Struct, frozen=True):
    """
    The generator.

    Attributes:
        program: Where it lies. *version*: of the release that it came from. *sha256*: of the program.
    """

    program: Path
    version: str
    sha256: str

    @property
    def name(self) -> str:
        """Its name and version."""
        return f"vllm-rs {self.version}"

    def measure(self, order: Order) -> Run:
        """Make the load and return what was measured; see `sparkwright.bench.load.order.Generator`."""
        until = time.monotonic() + order.patience
        with tempfile.TemporaryDirectory(prefix="sparkwright-load-") as name:
            folder = Path(name)
            if order.prompts == "random" and order.tokenizer is not None:
                order = replace(order, prompt=order.prompt + _around(self.program, order.tokenizer))
            if order.warmups:
                # Another seed, and so other prompts than those that count.
                warming = replace(order, requests=order.warmups, seed=order.seed ^ 0x5EED, warmups=0)
                self._run(folder / "warm", warming, until)
            requests = self._run(folder / "run", order, until)
        ends = [one.began + one.seconds for one in requests]
        zero = min((one.began for one in requests), default=0.0)
        return Run(self.name, self.sha256, max(ends, default=zero) - zero, requests)

    def _run(self, folder: Path, order: Order, until: float) -> tuple[Request, ...]:
        folder.mkdir()
        (folder / "empty").mkdir()
        left = until - time.monotonic()
        if left <= 0:
            raise LoadInvalid("generator-late", f"{self.name} was not through after {order.patience:g} s")
        ended = _limited([str(self.program), *arguments(order, folder)], left, folder)
        if ended.late:
            raise LoadInvalid("generator-late", f"{self.name} was not through after {order.patience:g} s")
        if ended.status:
            raise LoadInvalid("generator-failed", f"{self.name} ended with status {ended.status}: {last(ended.tail)}")
        return detailed.read(folder / "result.json", order)


def arguments(order: Order, folder: Path) -> list[str]:
    """Return the command line for *order*, which writes ``result.json`` into *folder*; Python's ``vllm bench serve`` takes the same."""
    # A folder that holds no tokenizer: given nothing, it would look for one of the model's name on the network.
    tokenizer = order.tokenizer or folder / "empty"
    return [
        "bench", "serve", "--backend", "vllm", "--base-url", order.url, "--model", order.model, "--tokenizer", str(tokenizer),
        "--num-prompts", str(order.requests), "--max-concurrency", str(order.concurrency), "--seed", str(order.seed % 2**63),
        "--temperature", "0", "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(folder), "--result-filename", "result.json", *_prompts(order),
    ]  # fmt: skip


def _prompts(order: Order) -> list[str]:
    """Return the arguments about prompts: a file of texts is JSON lines, or ShareGPT's format where its name ends in ``.json``."""
    if order.prompts == "random":
        lengths = ["--random-input-len", str(order.prompt), "--random-output-len", str(order.answer)]
        return ["--dataset-name", "random", "--prompt-token-ids", *lengths]
    if order.texts is None:
        raise LoadInvalid("texts-unreadable", "prompts are to be texts, and no file of them is named")
    most = ["--dataset-path", str(order.texts), "--max-model-len", str(order.prompt + order.answer)]
    if order.texts.suffix == ".json":
        return ["--dataset-name", "sharegpt", "--sharegpt-output-len", str(order.answer), *most]
    return ["--dataset-name", "custom", "--custom-output-len", str(order.answer), "--skip-chat-template", *most]


def _limited(command: list[str], seconds: float, folder: Path) -> process.Ended:
    """Run *command* for at most *seconds*, without anybody's token, and end all that it started."""
    without = ["env", *(word for name in ("OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") for word in ("-u", name))]
    try:
        return process.run_limited([*without, "NO_COLOR=1", *command], process.Limits(seconds, MEMORY, WRITTEN), folder / "said.log")
    except CommandError as error:
        if error.reference != "tool-missing":
            raise
        raise LoadInvalid("generator-failed", str(error)) from None


@functools.cache
def _around(program: Path, tokenizer: Path) -> int:
    """Return how many tokens *program* takes off the length of a random prompt, because *tokenizer* puts as many around a text."""
    asked = 1000
    with tempfile.TemporaryDirectory(prefix="sparkwright-load-") as folder:
        words = ["--model", "model", "--tokenizer", str(tokenizer), "--random-input-len", str(asked), "--num-prompts", "1"]
        command = [str(program), "bench", "serve", "--dry-run", "--prompt-token-ids", "--base-url", "http://127.0.0.1:9", *words]
        ended = _limited(command, 120.0, Path(folder))
        found = _TOTAL.search((Path(folder) / "said.log").read_text("utf-8", "replace"))
    if ended.status or ended.late or not found:
        raise LoadInvalid("generator-failed", f"the tokenizer in {tokenizer.name} is none that the generator reads: {last(ended.tail)}")
    return asked - int(found[1])


def last(tail: str) -> str:
    """Return the last line of what a program said, without colours, for people."""
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", tail).splitlines() if line.strip()]
    causes = [line for line in lines if "error" in line.lower()] or lines
    return "".join(letter for letter in (causes or ["it said nothing"])[-1].strip() if letter.isprintable())[:300]


def obtain(context: RunContext) -> VllmRs:
    """
    Return the generator, out of the official wheel of the stack that ``ci/gates/metrology.yaml`` names.

    Raises:
        offline: The wheel is not in the store, and may not be fetched.
        source-unreachable, source-mismatch, disk-full: See `sparkwright.forks.package_index.obtain`.
        not-provided: That stack has no official wheel for this machine, or the wheel has no generator.
        wheel-invalid: The wheel is damaged.
    """
    stack = policy(context).stack
    base = lock.read(Project(context.project.root, stack)).forks["vllm"].bases.get(platform.machine())
    if base is None:
        raise SourceError(
            "not-provided", f"Stack {stack} names no official wheel of vLLM for {platform.machine()}, and so no load generator."
        )
    folder = context.store.root / "environments" / f"vllm-rs-{base.sha256[:16]}"
    program = folder / "vllm-rs"
    if not program.exists():
        try:
            wheel = package_index.obtain(context.store, base.name, base.filename, base.sha256, offline=context.offline)
        except SourceError as error:
            if error.reference != "offline":
                raise
            says = f"The load generator, vllm-rs, comes out of {base.filename}, which is not in the store."
            raise SourceError("offline", says, details=["`sparkwright fetch` brings it.", *error.details]) from error
        with context.store.lock(f"environment-vllm-rs-{base.sha256[:16]}"):
            if not program.exists():
                with context.store.building(folder) as made:
                    _extract(wheel, made / "vllm-rs")
    return VllmRs(program, base.version, sha256_file(program))


def _extract(wheel: Path, program: Path) -> None:
    """Write the program in *wheel* to *program*, to be run."""
    with zip_file(wheel) as archive:
        member = next((one for one in archive.infolist() if one.filename == MEMBER), None)
        if member is None:
            raise SourceError("not-provided", f"{wheel.name} holds no {MEMBER}; a release from 0.33.0 on does.")
        if member.file_size > LARGEST:
            raise WheelError("wheel-invalid", f"{MEMBER} in {wheel.name} has {member.file_size:,} bytes; {LARGEST:,} are the most.")
        # Reading checks the sum that the archive names, and ends at the size that it names.
        with archive.open(member) as source, program.open("wb") as sink:
            while piece := source.read(1 << 20):
                sink.write(piece)
            os.fsync(sink.fileno())
    program.chmod(0o755)
