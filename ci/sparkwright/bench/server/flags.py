"""Arguments of ``vllm serve``: parsed, compared and merged as vLLM reads them."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from sparkwright.core.arguments import is_flag
from sparkwright.core.console import one_line
from sparkwright.core.errors import Advice, SparkwrightError

#: Short name → long name (``engine/arg_utils.py`` of vLLM 0.33).
SHORT = {
    "-ac": "--attention-config", "-cc": "--compilation-config", "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size", "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel", "-n": "--nnodes", "-O": "--optimization-level",
    "-pcp": "--prefill-context-parallel-size", "-pp": "--pipeline-parallel-size",
    "-q": "--quantization", "-r": "--node-rank", "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size", "--device-memory-utilization": "--gpu-memory-utilization",
}  # fmt: skip
#: Suffixes of vLLM's numbers.
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class FlagError(SparkwrightError):
    """vLLM would not start with an argument."""

    references: ClassVar[Mapping[str, Advice]] = {
        "flag-unknown": Advice(
            "The installed release of vLLM does not know the flag, or `serve` sets it itself.",
            "Correct or remove it; `vllm serve --help=all` of that environment lists its flags.",
        ),
    }


class VllmArgument(NamedTuple):
    """
    A flag with its values.

    Attributes:
        name: The long one, with hyphens, and without ``no-`` or a key behind a dot.
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
    arguments: list[tuple[str, ...]] = []
    for word in words:
        if is_flag(word):
            arguments.append(())
        if not arguments or "\0" in word:
            raise FlagError("flag-unknown", f"{word!r:.80} is no argument of vLLM.")
        arguments[-1] += (word,)
    return [*map(_argument, arguments)]


def _argument(words: tuple[str, ...]) -> VllmArgument:
    if joined := re.fullmatch(r"(-[nqrO])=?(.+)", words[0]):
        return VllmArgument(setting(joined[1]), "", joined[2], words)
    flag, equals, value = words[0].partition("=")
    name, _, key = flag.partition(".")
    return VllmArgument(setting(name), key, value if equals else "".join(words[1:2]), words)


def setting(flag: str) -> str:
    """Return what *flag* sets: ``--no-x`` sets ``--x``, ``-tp`` what its long name does."""
    name = flag.partition("=")[0]
    if name.startswith("--"):
        head, dot, key = name.partition(".")
        name = "--" + head[2:].replace("_", "-").removeprefix("no-") + dot + key
    return SHORT.get(name, name)


def merge(below: Sequence[str], above: Sequence[str]) -> tuple[str, ...]:
    """
    Return *below* without the arguments that *above* also gives, and then *above*.

    Raises:
        flag-unknown: *above* has a single key of what *below* gives as a whole; vLLM would drop all
            other keys.
    """
    overridden = {argument.name: argument for argument in parse(above)}
    rest: list[str] = []
    for argument in parse(below):
        replacing = overridden.get(argument.name)
        if replacing and replacing.key and not argument.key:
            raise FlagError(
                "flag-unknown",
                f"{one_line(replacing.words[0], 80)} sets one key of {argument.name}.",
                todo=f"Give it whole: {argument.name}={one_line(argument.value, 200)}",
            )
        if not replacing:
            rest += argument.words
    return (*rest, *above)


def without_drafts(words: Sequence[str]) -> tuple[str, ...]:
    """Return *words* without those of speculative decoding."""
    others: list[str] = []
    for argument in parse(words):
        if not argument.name.startswith(("--speculative-", "--spec-")):
            others += argument.words
    return tuple(others)


def value(words: Sequence[str], name: str) -> str:
    """Return the value of the flag *name*, the last one; empty if it is not given."""
    arguments = reversed(parse(words))
    return next((argument.value for argument in arguments if argument.name == name), "")


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
        if argument.name == "--speculative-config":
            with contextlib.suppress(msgspec.DecodeError):
                settings |= (
                    {argument.key: argument.value}
                    if argument.key
                    else msgspec.json.decode(argument.value, type=dict[str, Any])
                )
        elif argument.name in ("--spec-method", "--spec-model"):
            settings[argument.name.removeprefix("--spec-")] = argument.value
    # Prompt lookup, which needs no model.
    if settings.get("model") in ("ngram", "[ngram]"):
        settings |= {"method": "ngram", "model": ""}
    return settings
