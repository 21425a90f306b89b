"""
The options of a run, and the server that its gates question.

One launch serves one gate after the other. G4 starts it again behind its
answers without drafts, and G8 starts servers of its own.
"""

import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from sparkwright.bench.machine.monitor import REASONS as MEMORY_REASONS
from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes import preflight, recipe as recipes
from sparkwright.bench.server import flags, wheel_identity
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.launch import GATED, LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.core.errors import FileError
from sparkwright.core.files import LARGEST, read_json, sha256_file
from sparkwright.gates.core.verdict import Check, invalid

#: Why a server that we started does not run.
ENDED: Mapping[str, str] = {
    "server-died": "The server ended by itself before it answered. Read the last lines of its log.",
    "server-late": "The server did not answer in time. Read its log, and give it more time where "
    "it only loads.",
    "memory-low": "The machine's free memory fell below the reserve, and the server was ended. "
    "Plan less cache.",
    "kernel-no-memory": MEMORY_REASONS["kernel-no-memory"],
    "graph-memory-negative": "vLLM believes that CUDA graphs give memory back, and plans more KV "
    "cache than there is memory. Pin --kv-cache-memory-bytes and "
    "watch MemAvailable (vllm #44740).",
    "log-unreadable": "The log is missing, is no text, or is too large. Save what the server "
    "prints, from its first line.",
}

#: Reasons why a gate has no use for a record of the stock wheel or of the last release.
REFERENCE: Mapping[str, str] = {
    "reference-damaged": "What was recorded cannot be read, was cut short or changed, or is of an "
    "earlier version. Record it again.",
    "reference-unnamed": "What was recorded does not name the wheel that answered, so it may be "
    "the candidate's. Record it with WHEEL, --serve and --recipe.",
    "reference-is-candidate": "What was recorded is of the candidate's own wheel and shares its "
    "faults. Record it from the official wheel or an earlier release.",
    "reference-other-model": "What was recorded is of other weights, another tokenizer or other "
    "texts. Record it with the same ones, and name the files of a server that runs already with "
    "--model-folder.",
    "reference-other-policy": "The stock wheel was asked other questions, or in another way, than "
    "this policy and recipe ask. Record it again.",
}

REASONS: Mapping[str, str] = {
    **ENDED,
    "wheel-not-served": (
        "The environment that serves holds other files than the wheel, or imports something "
        "else for them at its start (a .pth file, sitecustomize, a compiled file), so no "
        "answer is evidence about the wheel. Install the wheel into a fresh environment."
    ),
}


def machine_facts(host: Mapping[str, str]) -> dict[str, str]:
    """Return the facts of *host* that bear on the numbers a server answers with."""
    return {name: host.get(name, "") for name in ("gpu", "driver", "processor")}


class GateOptions(msgspec.Struct, frozen=True):
    """
    What the command line of ``gate`` or ``bench`` names.

    Attributes:
        wheel: The wheel to judge or to measure.
        python: The Python of an environment that the wheel is installed in.
        serve: Folder of the model to serve from that environment.
        server_user: The user that it runs as; empty for that of the gate.
        flag, variable: Further arguments and environment variables of that server.
        server: URL of a running server, which a bench may look at.
        model: The name under which the model is served; empty for its own, or for the only one that
            *server* lists.
        recipe: How the model is served (``ci/recipes``).
        profile: Of G4: the kind of model.
        against: The folder of the reference, which ``--record`` wrote.
        original: The model of which *serve* is a slimmer copy; the reference and the baseline of G8
            are of it.
        task: Of G6.
        baseline, baseline_python: The wheel that G8 compares with, and the Python of the
            environment that it is installed in.
        workload: Names of ``workloads.yaml``, or of cells; empty for the recipe's or the policy's.
        texts: A file of real prompts.
        preheat: Seconds; None for the policy's.
        only: The gates to run; empty for all.
        caches: The folder of what servers of *python* compile; None for the usual one.
    """

    wheel: Path | None = None
    python: Path | None = None
    serve: Path | None = None
    server_user: str = ""
    flag: tuple[str, ...] = ()
    variable: tuple[tuple[str, str], ...] = ()
    server: str = ""
    model: str = ""
    recipe: str = ""
    profile: str = "default"
    against: Path | None = None
    original: Path | None = None
    task: str = "gsm8k"
    baseline: Path | None = None
    baseline_python: Path | None = None
    workload: tuple[str, ...] = ()
    texts: Path | None = None
    preheat: float | None = None
    only: tuple[str, ...] = ()
    caches: Path | None = None


def launch_plan(
    options: GateOptions,
    recipe: recipes.Recipe | None,
    python: Path,
    flags: Sequence[str],
    *,
    gated: bool,
) -> LaunchPlan:
    """
    Return how the vLLM in the environment of *python* serves the model of *options*.

    Args:
        flags: Arguments of ``vllm serve`` beside those of the recipe and the options.
        gated: Whether vLLM counts requests with logits that are not numbers.

    Raises:
        environment-unusable: There is no vLLM.
        recipe-unfit: The recipe does not support that release, or a known trap holds.
        model-missing, checkpoint-invalid: As `checkpoint.read`, if a trap may hold.
        flag-unknown: As `flags.parse`.
        variable-refused: vLLM does not read a variable.
        UsageError: There is no such user.
    """
    assert options.serve
    own = (*options.flag, *(flag for flag in flags if flag not in options.flag))
    plan = recipes.launch(
        recipe, wheel_identity.version(python), python, options.serve, words=own,
        variables=dict(options.variable), name=options.model, user=options.server_user,
    )  # fmt: skip
    plan = replace(
        plan,
        variables={**(GATED if gated else {}), **plan.variables},
        caches=options.caches if python == options.python else None,
    )
    plan.check()
    preflight.check_traps(plan.flags, wheel_identity.version(python), options.serve)
    return plan


class ServerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Facts about a server that it cannot tell itself.

    Attributes:
        wheel: The sha256 of the wheel that it was installed from; empty if unknown.
        model: A digest of the model's files, of a slimmer copy those of its original; empty if
            unknown, which is the digest of no reference.
        host: Facts of the machine that bear on the numbers (GPU, driver), by name.
        flags: Arguments of ``vllm serve``; None if unknown.
    """

    wheel: str = ""
    model: str = ""
    host: dict[str, str] = {}
    flags: tuple[str, ...] | None = None


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A record of a server, with which another one is compared.

    Attributes:
        served: Its wheel, model, machine and flags.
        shape: What both must have in common: the name of the recipe, or the sizes or a digest of
            the questions.
    """

    served: ServerIdentity
    shape: str


R = TypeVar("R", bound=Recorded)


def read_recorded(path: Path, kind: type[R], *, limit: int = LARGEST) -> R:
    """
    Return the record in the file at *path*, which is read as hostile.

    Raises:
        ServerInvalid: It is no such file (``reference-damaged``).
    """
    try:
        return read_json(path, kind, limit=limit)
    except FileError as error:
        # A verdict holds no path.
        message = f"{path.name} is no recorded {kind.__name__}"
        raise ServerInvalid("reference-damaged", message) from error


def read_stock(
    path: Path, kind: type[R], served: ServerIdentity, shape: str = "", *, limit: int = LARGEST
) -> R:
    """
    Return the record of the stock wheel in the file at *path*, checked for use with a candidate.

    Args:
        served: The identity of the candidate.
        shape: That it must have; empty if any will do.

    Raises:
        ServerInvalid: It is damaged, or of no use to the candidate (`REFERENCE`).
    """
    stock = read_recorded(path, kind, limit=limit)
    own = stock.served
    faults = {
        "reference-unnamed": not own.wheel,
        "reference-is-candidate": own.wheel == served.wheel,
        "reference-other-model": own.model != served.model,
        "reference-other-policy": shape not in ("", stock.shape),
    }
    for reason, applies in faults.items():
        if applies:
            raise ServerInvalid(reason, REFERENCE[reason].partition(".")[0])
    return stock


def find_stock(
    path: Path, kind: type[R], served: ServerIdentity, name: str, shape: str = ""
) -> R | Check:
    """Return what `read_stock` does, or the check *name* that says why it is of no use."""
    try:
        return read_stock(path, kind, served, shape)
    except ServerInvalid as error:
        return invalid(name, error.message, error.reason)


class ServerUnderTest:
    """
    The server of a run.

    Args:
        host: Facts of the machine, for references that are bound to it.
        folder: For the server's log, which stays.
        recipe: How it is started, beside the flags and variables of *options*.
        flags: Further arguments of ``vllm serve``, for the gates themselves.

    Attributes:
        start_s: Seconds that the server took to start.
    """

    def __init__(
        self,
        options: GateOptions,
        host: Mapping[str, str],
        folder: Path,
        recipe: recipes.Recipe | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        self._options, self._host, self._folder = options, dict(host), folder
        self._recipe, self._flags = recipe, flags
        self._stack = contextlib.ExitStack()
        self.start_s = 0.0

    @cached_property
    def started(self) -> Server:
        """The server, started once for all gates."""
        began = time.monotonic()
        server = Server(self.plan(), self._folder / "server.log")
        self._stack.enter_context(server)
        self.start_s = time.monotonic() - began
        return server

    def end(self) -> None:
        """End the server, if it was started."""
        self._stack.close()
        self.__dict__.pop("started", None)

    @contextlib.contextmanager
    def without_drafts(self) -> Iterator[Client]:
        """
        Serve without speculation for a block.

        The server under test ends first, as two rarely fit, and starts again when it is used. No
        pack is to hold what this one compiles.
        """
        self.end()
        plan = self.plan()
        words, log = flags.without_drafts(plan.flags), self._folder / "without-drafts.log"
        with Server(replace(plan, flags=words, caches=None), log) as server:
            yield server.client()

    def plan(self) -> LaunchPlan:
        """Return how the server is started; raise as `launch_plan` if it cannot be."""
        assert self._options.python
        return launch_plan(
            self._options, self._recipe, self._options.python, self._flags, gated=True
        )

    def client(self) -> Client:
        """Return a client of the server."""
        return self.started.client()

    @cached_property
    def identity(self) -> ServerIdentity:
        """What is known of the server from outside."""
        options = self._options
        folder = options.original or options.serve
        assert folder
        wheel = sha256_file(options.wheel) if options.wheel else ""
        # Those of the gates themselves name a folder of this machine.
        flags = tuple(flag for flag in self.plan().flags if flag not in self._flags)
        return ServerIdentity(wheel, model_digest(folder), self._host, flags)


#: vLLM's counters of tokens that were looked up in its prefix cache, and found there.
CACHE_QUERIES, CACHE_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
#: Its counter of drafts, which is there if tokens are drafted.
DRAFTS = "vllm:spec_decode_num_drafts_total"
#: Its configuration, in the labels of a metric (`CacheConfig.metrics_info`, 0.20.1 to 0.33.0).
_CACHE = "vllm:cache_config_info{"
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Count = Annotated[int, msgspec.Meta(ge=0)]
#: Tokens of a large block of a prefix cache, as Qwen3-Next has them on 0.33.0, for estimates.
LARGE_BLOCK = 560
#: A number from 0 to 1, such as a share of time.
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


#: Tokens of the prompt and of the answer by which the pace is measured.
PACE_PROMPT, PACE_ANSWER = 512, 33


class Pace(msgspec.Struct, frozen=True):
    """
    How fast a model is served here, one request at a time; gates estimate their length by it.

    Attributes:
        start_s: Seconds from the start of the server to its first answer.
        prefill_tokens_s: Tokens of prompts that are read in a second.
        decode_tokens_s: Tokens of answers in a second.
        requests_s: Requests in a second, each of a short prompt and one token of answer.
    """

    start_s: float
    prefill_tokens_s: float
    decode_tokens_s: float
    requests_s: float

    def round(self, prompt: int, answer: int, concurrency: int = 1) -> float:
        """
        Return the seconds of *concurrency* requests at once.

        A step of n answers takes n**0.4 times as long as a step of one: 32 of them had 8 times the
        throughput of one on a Spark (seed report 000, 60 and 487 tok/s).
        """
        return (
            concurrency * prompt / self.prefill_tokens_s
            + answer * math.pow(concurrency, 0.4) / self.decode_tokens_s
        )


def measure_pace(client: Client, start_s: float) -> Pace:
    """Measure the pace of the server that *client* asks, which started in *start_s* seconds."""

    def seconds(prompt: list[int], max_tokens: int, salt: str) -> float:
        began = time.monotonic()
        client.complete(prompt, max_tokens=max_tokens, ignore_eos=True, cache_salt=salt)
        return max(time.monotonic() - began, 1e-4)

    tokens = list(client.tokenize("One night on a Spark ends with a verdict. " * PACE_PROMPT))
    long = tokens[: min(PACE_PROMPT, client.max_model_len() // 2)]
    short, answer = long[:8], min(PACE_ANSWER, client.max_model_len() // 4)
    # The first request of each shape is not timed, as it may compile kernels.
    for prompt, count in ((long, 1), (short, answer)):
        seconds(prompt, count, "pace-first")
    first, prefill = seconds(short, 1, "pace-short"), seconds(long, 1, "pace-long")
    decode = seconds(short, answer, "pace-decode")
    return Pace(
        start_s,
        (len(long) - len(short)) / max(prefill - first, 1e-4),
        (answer - 1) / max(decode - first, 1e-4),
        1 / first,
    )


class PrefixCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The prefix cache of a server.

    Attributes:
        block: Tokens of a block, by ``/metrics``; 0 without a prefix cache.
        prompt: Tokens of the prompt that was sent twice; 0 if none was.
        queries, hits: Tokens of the second that were looked up, and found.
    """

    block: Count = 0
    prompt: Count = 0
    queries: Count = 0
    hits: Count = 0


class ObservedServer(Recorded, frozen=True, forbid_unknown_fields=True):
    """
    The facts about one launch of a server, whose `shape` is the name of its recipe.

    Attributes:
        name: Under which the model is served, by ``/v1/models``.
        version: Of vLLM, by ``/version``.
        max_model_len: Tokens of the longest request, by ``/v1/models``.
        prefix_cache: As observed.
        drafts: Whether tokens are drafted.
        lines: Name of a line of ``ci/gates/contract.yaml`` → its values in the log.
        kernels: ``decode moe`` and the like → name of a kernel → its share of that time.
        classes: ``decode moe`` and the like → class of the kernels → its share of that time.
        times: Phase of one request → microseconds of its kernels, each in the step in which it took
            least, and of those of them that only help.
    """

    name: str
    version: str
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    prefix_cache: PrefixCache
    drafts: bool
    lines: dict[str, tuple[str, ...]]
    kernels: dict[str, dict[str, Fraction]]
    classes: dict[str, dict[str, Fraction]]
    times: dict[str, tuple[Count, Count]]
    format: Literal[1] = 1


def cache_block(metrics: Mapping[str, float]) -> int:
    """
    Return the tokens of a block of the prefix cache by a server's *metrics*; 0 without one.

    Raises:
        ServerInvalid: The server does not state it (``answer-unreadable``).
    """
    lines = [name for name in metrics if name.startswith(_CACHE)]
    labels = dict(_LABEL.findall(lines[0])) if lines else {}
    enabled, block = labels.get("enable_prefix_caching"), labels.get("block_size", "")
    if enabled == "False":
        return 0
    # Kinds of layers may have blocks of different sizes; vLLM 0.33.0 states that of full attention,
    # too.
    sizes = [block, labels.get("effective_attention_block_size", "None").replace("None", block)]
    if enabled != "True" or not all(re.fullmatch(r"[1-9]\d{0,6}", size) for size in sizes):
        raise ServerInvalid("answer-unreadable", f"{_CACHE}…}} states no block: {labels}")
    return max(map(int, sizes))


def prompt_length(block: int, blocks: int, room: int) -> int:
    """
    Return the tokens of a prompt of *blocks* and a half, or of fewer that fit into *room*.

    Raises:
        ServerInvalid: Not even one block and a half fit (``prompt-too-long``).
    """
    count = min(blocks, (room - block // 2) // block)
    if count < 1:
        message = f"a block of the prefix cache has {block} tokens, and a request {room} at most"
        raise ServerInvalid("prompt-too-long", message)
    return count * block + block // 2


def repeat_prompt(client: Client, tokens: list[int], salt: str) -> PrefixCache:
    """Send the prompt *tokens* twice under *salt*, and return what the second one found."""
    block = cache_block(client.metrics())
    client.complete(tokens, max_tokens=1, cache_salt=salt)
    before = client.metrics()
    client.complete(tokens, max_tokens=1, cache_salt=salt)
    after = client.metrics()
    growth = [round(after.get(key, 0) - before.get(key, 0)) for key in (CACHE_QUERIES, CACHE_HITS)]
    return PrefixCache(block, len(tokens), *growth)
