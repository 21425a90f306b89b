"""
The flags that the installed release of vLLM knows, read in its own sources without running them.

vLLM ends over a flag that it does not know, after half a minute of imports; here it is refused at once, with the nearest one it has.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sparkwright.bench.recipes import preflight
from sparkwright.serving.errors import ServeError

#: ``engine/arg_utils.py`` of vLLM 0.33.0 has 120,000 bytes.
LARGEST = 4 * 1024 * 1024

_FLAG = re.compile(r"--?[a-z][a-z0-9-]*", re.IGNORECASE)
_NUMBER = re.compile(r"-[0-9.]+(e-?[0-9]+)?")

#: What `serve` sets itself, or what would take the server out of its sight: how to say it instead.
OURS = {
    "--model": "--model (MODEL)", "--host": "--host (HOST)", "--port": "--port (PORT)", "--served-model-name": "--name (SERVED_MODEL_NAME)",
    "--api-key": "the variable VLLM_API_KEY, which no list of processes shows", "--config": "--flag, or a recipe",
    "--uds": "--host and --port", "--fd": "--host and --port", "--headless": "--ray-worker", "--grpc": "",
    "--ssl-keyfile": "a proxy in front of it", "--ssl-certfile": "a proxy in front of it", "--revision": "--revision (REVISION)",
}  # fmt: skip


def flags(package: Path) -> frozenset[str]:
    """
    Return what ``vllm serve`` of *package* (the folder ``vllm``) knows; nothing where its sources say it otherwise than those we read.

    Flags stand as words in ``engine/arg_utils.py`` and ``cli_args.py``, or are the fields of a class ``…FrontendArgs`` there.
    """
    found: set[str] = set()
    # openai/ up to 0.31, launchers/ in 0.32, common/ in 0.33.
    files = [
        package / "engine" / "arg_utils.py",
        *sorted((package / "entrypoints").glob("*/cli_args.py")),
    ]
    for file in files:
        try:
            if file.stat().st_size > LARGEST:
                return frozenset()
            found |= set(_said(ast.parse(file.read_bytes())))
        except (OSError, SyntaxError, ValueError, RecursionError):
            return frozenset()
    return frozenset(found) if {"--max-model-len", "--host"} <= found else frozenset()


def _said(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _FLAG.fullmatch(node.value)
        ):
            yield node.value
        elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
            yield from (
                "--" + one.id.replace("_", "-") for one in fields if isinstance(one, ast.Name)
            )


def name(word: str) -> str:
    """Return the name of the flag that *word* begins with: no value, no key behind a dot, no ``no-``."""
    if not word.startswith("--"):
        return word.partition("=")[0].partition(".")[0]
    said = word.partition("=")[0].partition(".")[0]
    return preflight.setting(said.replace("_", "-"))


def is_flag(word: str) -> bool:
    """Is *word* a flag, and no value of one?"""
    return word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word)


def check(words: Sequence[str], known: frozenset[str], version: str) -> None:
    """
    Refuse *words* that vLLM would not take, or that `serve` says itself.

    Args:
        known: What `flags` found; nothing is held against an empty set.

    Raises:
        flag-unknown: One of them is unknown, another's value, or ours.
    """
    wrong = list(_wrong(words, known))
    if wrong:
        raise ServeError(
            "flag-unknown",
            f"vLLM {version} cannot be given {len(wrong)} of these arguments.",
            details=wrong,
        )


def _wrong(words: Sequence[str], known: frozenset[str]) -> Iterator[str]:
    if words and not is_flag(words[0]):
        yield f"{words[0]!r:.80} belongs to no flag"
    for word in words:
        if "\0" in word:
            yield f"{word!r:.80} holds a byte 0"
        elif is_flag(word):
            yield from _about(word, known)


def _about(word: str, known: frozenset[str]) -> Iterator[str]:
    flag = name(word)
    said = word.partition("=")[0]
    if flag in OURS:
        yield f"{said}: " + (f"say {OURS[flag]}" if OURS[flag] else "not served here")
    elif (
        known
        and flag not in known
        and not (word.startswith(("-O", "-cc")) and not word.startswith("--"))
    ):
        near = difflib.get_close_matches(flag, known, 1, 0.7)
        yield f"{said:.80}: unknown" + (f"; perhaps {near[0]}" if near else "")


def merged(below: Sequence[str], above: Sequence[str]) -> tuple[str, ...]:
    """Return the flags *below* that *above* does not say, too, and then those of *above*: of two equal ones vLLM takes the last."""
    said = {name(word) for word in above if is_flag(word)}
    kept: list[str] = []
    dropping = False
    for word in below:
        dropping = name(word) in said if is_flag(word) else dropping
        if not dropping:
            kept.append(word)
    return (*kept, *above)


def value(words: Iterable[str], flag: str) -> str:
    """Return what *words* set *flag* to, the last of them if it is there more often; empty where they do not."""
    found, waiting = "", False
    for word in words:
        if is_flag(word):
            waiting = name(word) == flag and "=" not in word
            found = word.partition("=")[2] if name(word) == flag else found
        elif waiting:
            found, waiting = word, False
    return found
