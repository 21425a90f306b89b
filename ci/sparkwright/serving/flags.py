"""Arguments of ``vllm serve``: parsed, merged, and checked against the installed release."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from sparkwright.bench.recipes.recipe import setting
from sparkwright.core.arguments import is_flag
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.errors import ServeError

#: Flag that `serve` sets, or that would hide the server from it → the option to use instead.
RESERVED = {
    "--model": "use --model (MODEL)",
    "--host": "use --host (HOST)",
    "--port": "use --port (PORT)",
    "--served-model-name": "use --name (SERVED_MODEL_NAME)",
    "--revision": "use --revision (REVISION)",
    "--api-key": "set the variable VLLM_API_KEY, which process lists do not show",
    "--hf-token": "set the variable HF_TOKEN, which process lists do not show",
    "--config": "use --flag, or a recipe",
    "--num-gpu-blocks-override": "use --kv-cache-memory-bytes, which is counted",
    "--uds": "use --host and --port",
    "--fd": "use --host and --port",
    "--headless": "use --join",
    "--ssl-keyfile": "use a proxy in front of the server",
    "--ssl-certfile": "use a proxy in front of the server",
    "--grpc": "not supported",
}
#: Value of ``--load-format`` → the package that loads so; without it vLLM ends while it loads.
LOADERS = {
    "fastsafetensors": "fastsafetensors", "instanttensor": "instanttensor",
    "runai_streamer": "runai_model_streamer", "runai_streamer_sharded": "runai_model_streamer",
    "tensorizer": "tensorizer",
}  # fmt: skip
#: Attention backend, or version of FlashAttention → the library of vLLM that it calls.
LIBRARIES = {
    "FLASHMLA": "_flashmla_C", "FLASHMLA_SPARSE": "_flashmla_C", "3": "_vllm_fa3_C",
}  # fmt: skip
#: Options of `serve` that a flag may be a misspelling of.
OPTIONS = (
    "--download", "--dry-run", "--environment", "--floor", "--health", "--join", "--name",
    "--node-address", "--node-port", "--nodes", "--patience", "--python", "--recipe", "--unit",
    "--variable",
)  # fmt: skip
#: Suffixes of vLLM's numbers.
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class VllmArgument(NamedTuple):
    """
    A flag with its values.

    Attributes:
        name: With hyphens, and without ``no-`` or a key behind a dot.
        key: Behind a dot (``method`` of ``--speculative-config.method``).
        value: Behind ``=``, or the first word after the flag; empty for a switch.
        words: As given.
    """

    name: str
    key: str
    value: str
    words: tuple[str, ...]


def parse(words: Sequence[str]) -> list[VllmArgument]:
    """
    Return the arguments in *words*.

    Raises:
        flag-unknown: The first word is no flag, or a word holds a zero byte.
    """
    wrong = [word for word in words if "\0" in word]
    if words and not is_flag(words[0]):
        wrong.append(words[0])
    if wrong:
        raise ServeError("flag-unknown", f"{wrong[0]!r:.80} is no argument of vLLM.")
    starts = [index for index, word in enumerate(words) if is_flag(word)]
    bounds = itertools.pairwise([*starts, len(words)])
    return [_argument(tuple(words[start:end])) for start, end in bounds]


def _argument(words: tuple[str, ...]) -> VllmArgument:
    flag, equals, value = words[0].partition("=")
    name, _, key = flag.partition(".")
    if name.startswith("--"):
        name = setting(name.replace("_", "-"))
    return VllmArgument(name, key, value if equals else "".join(words[1:2]), words)


def merge(below: Sequence[str], above: Sequence[str]) -> tuple[str, ...]:
    """Return *below* without the arguments that *above* also gives, and then *above*."""
    overridden = {argument.name for argument in parse(above)}
    rest = [argument for argument in parse(below) if argument.name not in overridden]
    return (*(word for argument in rest for word in argument.words), *above)


def value(words: Sequence[str], name: str) -> str:
    """Return the value of the flag *name*, the last one; empty if it is not given."""
    values = [argument.value for argument in parse(words) if argument.name == name]
    return values[-1] if values else ""


def number(words: Sequence[str], name: str) -> float | None:
    """
    Return the number that the flag *name* sets, such as 0.8, 64k or 20G; None without one. As vLLM
    does, it takes no point before a capital suffix.
    """
    numbers = r"([0-9]+)([KMG])|([0-9]+\.?[0-9]*|\.[0-9]+)([kmg]?)"
    match = re.fullmatch(numbers, value(words, name))
    if match is None:
        return None
    whole, capital, decimal, small = match.groups()
    return float(whole or decimal) * SUFFIXES.get(capital or small, 1)


def speculation(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of speculative decoding, such as ``method``; empty without any."""
    settings: dict[str, Any] = {}
    for argument in parse(words):
        if argument.name in ("--speculative-config", "-sc"):
            with contextlib.suppress(msgspec.DecodeError):
                settings |= (
                    {argument.key: argument.value}
                    if argument.key
                    else msgspec.json.decode(argument.value, type=dict[str, Any])
                )
        elif argument.name in ("--spec-method", "--spec-model"):
            settings[argument.name.removeprefix("--spec-")] = argument.value
    return settings


def check(words: Sequence[str], environment: ServingEnvironment) -> None:
    """
    Check *words* against the flags of the installed vLLM.

    Raises:
        flag-unknown: vLLM does not know a flag, or `serve` sets it itself.
        loader-missing: The package that ``--load-format`` needs is not installed.
        library-left-out: The wheel does not hold the library of a backend that is asked for.
    """
    if wrong := list(_unknown(parse(words), environment.flags())):
        what = f"vLLM {environment.vllm} does not take {len(wrong)} of these arguments."
        raise ServeError("flag-unknown", what, details=wrong)
    loader = LOADERS.get(value(words, "--load-format"), "")
    if loader and loader not in environment.loaders:
        what = f"The environment of vLLM {environment.vllm} has no {loader}."
        raise ServeError("loader-missing", what, details=[str(environment.python)])
    for backend in attention(words):
        library = LIBRARIES.get(backend.upper(), "")
        if library and any(f"/{library}." in name for name in environment.left_out):
            what = f"This wheel of vLLM {environment.vllm} holds no {library}, library left out."
            raise ServeError("library-left-out", what, details=[f"asked for: {backend}"])


def attention(words: Sequence[str]) -> Iterator[str]:
    """Yield the attention backend and the version of FlashAttention that *words* ask for."""
    for argument in parse(words):
        if argument.name == "--attention-backend":
            yield argument.value
        elif argument.name in ("--attention-config", "-ac"):
            settings = {argument.key: argument.value}
            with contextlib.suppress(msgspec.DecodeError):
                settings |= msgspec.json.decode(argument.value, type=dict[str, Any])
            yield from (str(settings.get(key, "")) for key in ("backend", "flash_attn_version"))


def _unknown(arguments: Iterable[VllmArgument], flags: frozenset[str]) -> Iterator[str]:
    """Yield what is wrong with *arguments* of a vLLM that has *flags*, which may be empty."""
    for name, _, _, words in arguments:
        flag = words[0].partition("=")[0]
        if name in RESERVED:
            yield f"{flag}: {RESERVED[name]}"
        elif flags and name not in flags and not re.match("-(O|cc)", name):
            similar = difflib.get_close_matches(name, [*flags, *OPTIONS], 1, 0.7)
            yield f"{flag:.80}: unknown" + "".join(f"; perhaps {match}" for match in similar)
