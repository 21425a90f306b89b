"""
The environment of a container as a wish: which variables there are, what each may hold, and which flag of vLLM it becomes.

A variable that nobody reads is refused, not ignored: ``MAX_MODEL_LENGTH`` looks as if it were set, and the server runs without it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from sparkwright.bench.recipes import preflight
from sparkwright.serving.errors import ServeError
from sparkwright.serving.wish import HOST, PORT, RAY_PORT, SHARE, Wish

Kind = Literal["text", "address", "name", "integer", "share", "seconds", "words", "switch"]


class SourceInvalid(Exception):
    """The file is not vLLM's table of variables; the text says why."""


class Setting(msgspec.Struct, frozen=True):
    """
    A variable.

    Attributes:
        field: Of `Wish`. *kind*: what it may hold. *least*, *most*: of a number, inclusive; a share is above *least*.
        means: For people. *flag*: of ``vllm serve`` that it becomes; empty where it is `sparkwright`'s own.
        default: For people; empty for none.
    """

    variable: str
    field: str
    kind: Kind
    means: str
    flag: str = ""
    default: str = ""
    least: float = 0
    most: float = 0


TABLE = (
    Setting("RECIPE", "recipe", "name", "a recipe by its name: model, flags, variables and memory plan in one"),
    Setting("MODEL", "model", "text", "the model: a folder, or its name on the hub; with RECIPE, where its checkpoint lies", "(argument)"),
    Setting("REVISION", "revision", "text", "commit or branch of a model that is named", default="the one fetched last"),
    Setting("HOST", "host", "address", "the address to listen on", "--host", HOST),
    Setting("PORT", "port", "integer", "the port", "--port", str(PORT), 1, 65535),
    Setting("SERVED_MODEL_NAME", "name", "text", "the name that clients ask for", "--served-model-name", "the recipe's, or the folder's"),
    Setting("GPU_MEMORY_UTIL", "share", "share", "share of the memory that vLLM may take", "--gpu-memory-utilization",
            f"the recipe's plan, else {SHARE:g}", 0, 1),
    Setting("MAX_MODEL_LEN", "length", "integer", "tokens of the longest request", "--max-model-len", "the recipe's plan, else the model's",
            16, 1 << 24),
    Setting("MAX_NUM_SEQS", "requests", "integer", "requests at a time", "--max-num-seqs", "the recipe's plan, else vLLM's", 1, 1024),
    Setting("TENSOR_PARALLEL_SIZE", "parallel", "integer", "GPUs that share the work", "--tensor-parallel-size", "one a node", 1, 64),
    Setting("VLLM_EXTRA_ARGS", "flags", "words", "further arguments, split at blanks as a shell would, quotes included, and run by none",
            "(each)"),
    Setting("DOWNLOAD", "download", "switch", "1: vLLM may fetch a model that is not here", default="0"),
    Setting("PATIENCE", "patience", "seconds", "seconds until the server must be ready", default="the recipe's, else 1800", least=1,
            most=86400),
    Setting("NODES", "nodes", "integer", "machines that serve together", default="the recipe's", least=1, most=64),
    Setting("RAY_ADDRESS", "head", "address", "HOST:PORT of the head, for a worker"),
    Setting("RAY_PORT", "ray_port", "integer", "port of Ray on the head", default=str(RAY_PORT), least=1, most=65535),
    Setting("NODE_ADDRESS", "address", "address", "this machine's address on the network that the nodes share", default="as Ray finds it"),
)  # fmt: skip

#: Names that other images and people use → ours; too far from it to be found by likeness.
ALIASES = {
    "MODEL_NAME": "MODEL", "MODEL_ID": "MODEL", "MODEL_PATH": "MODEL", "MODEL_DIR": "MODEL", "HF_MODEL": "MODEL", "VLLM_MODEL": "MODEL",
    "VLLM_RECIPE": "RECIPE", "MODEL_ALIAS": "SERVED_MODEL_NAME", "TP": "TENSOR_PARALLEL_SIZE", "TP_SIZE": "TENSOR_PARALLEL_SIZE",
    "EXTRA_ARGS": "VLLM_EXTRA_ARGS", "VLLM_ARGS": "VLLM_EXTRA_ARGS", "MAX_CONTEXT_LEN": "MAX_MODEL_LEN", "CONTEXT_LENGTH": "MAX_MODEL_LEN",
    "MAX_SEQS": "MAX_NUM_SEQS", "MAX_CONCURRENCY": "MAX_NUM_SEQS", "GPU_UTIL": "GPU_MEMORY_UTIL", "RAY_HEAD": "RAY_ADDRESS",
    "HEAD_ADDRESS": "RAY_ADDRESS",
}  # fmt: skip

#: What goes on to the server beside vLLM's own: networks, allocators, caches, tokens. Never what puts other code in the wheel's place.
PREFIXES = ("NCCL_", "GLOO_", "UCX_", "RAY_", "TORCH", "PYTORCH_", "CUDA_", "OMP_", "FLASHINFER_", "TRITON_", "CUTE_DSL_", "B12X_", "HF_",
            "TRANSFORMERS_", "NVIDIA_")  # fmt: skip
SINGLE = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
                    "VLLM_API_KEY"})  # fmt: skip

#: Bytes of vLLM's table of variables, which has about 100,000.
LARGEST_TABLE = 4 << 20

_TEXT = re.compile(r"(?!-)[^\x00-\x1f\x7f]{1,4096}")
_ADDRESS = re.compile(r"(?!-)[A-Za-z0-9_.:\[\]-]{1,255}")
_RECIPE = re.compile(r"[a-z0-9][a-z0-9.-]{0,80}")


def told(environment: Mapping[str, str]) -> Wish:
    """
    Return what *environment* asks for; an empty variable is one that is not set.

    Raises:
        variable-refused: A value cannot be, or a name looks like one of ours and is none.
    """
    given = {name: value for name, value in environment.items() if value.strip()}
    ours = {one.variable for one in TABLE}
    wrong = [
        f"{name}: no such variable; perhaps {near}"
        for name in sorted(given)
        if (near := _near(name, ours))
    ]
    fields: dict[str, Any] = {}
    for one in TABLE:
        if one.variable in given:
            try:
                fields[one.field] = _value(one, given[one.variable])
            except ValueError as error:
                wrong.append(f"{one.variable}={_shown(given[one.variable])}: {error}")
    if wrong:
        raise ServeError(
            "variable-refused",
            f"{len(wrong)} variable(s) of the environment cannot be taken as they are.",
            details=wrong,
        )
    passed = {name: value for name, value in given.items() if name not in ours and goes_on(name)}
    return Wish(**fields, passed=passed)


def goes_on(name: str) -> bool:
    """Does the variable *name* go on to the server? Those that begin with ``VLLM_`` are held against what it knows first."""
    return name.startswith((*PREFIXES, "VLLM_")) or name in SINGLE


def _shown(value: str) -> str:
    return repr(value[:60]) + ("…" if len(value) > 60 else "")


def _near(name: str, ours: set[str]) -> str:
    if name in ours:
        return ""
    if name in ALIASES:
        return ALIASES[name]
    # Short names are like too many others.
    found = (
        difflib.get_close_matches(name, (one for one in ours if len(one) > 8), 1, 0.8)
        if len(name) > 7
        else []
    )
    return found[0] if found else ""


def _value(one: Setting, text: str) -> Any:
    """Return *text* as *one* takes it; raise `ValueError`, which says what it takes, where it is something else."""
    if one.kind == "words":
        return words(text)
    text = text.strip()
    if one.kind == "switch":
        if text not in ("0", "1"):
            raise ValueError("must be 0 or 1")
        return text == "1"
    if one.kind in ("text", "address", "name"):
        pattern, says = {
            "text": (_TEXT, "must be one line of text that does not begin with -"),
            "address": (_ADDRESS, "must be an address without blanks"),
            "name": (_RECIPE, "must be the name of a recipe"),
        }[one.kind]  # fmt: skip
        if not pattern.fullmatch(text):
            raise ValueError(says)
        return text
    return _number(one, text)


def _number(one: Setting, text: str) -> float | int:
    whole = one.kind == "integer"
    span = (
        f"above {one.least:g} and at most {one.most:g}"
        if one.kind == "share"
        else f"from {one.least:g} to {one.most:g}"
    )
    says = f"must be a {'whole ' if whole else ''}number {span}"
    if not re.fullmatch(r"[0-9]{1,12}" if whole else r"[0-9]{0,12}\.?[0-9]{1,12}", text):
        raise ValueError(says)
    value = int(text) if whole else float(text)
    if not one.least <= value <= one.most or (one.kind == "share" and value == one.least):
        raise ValueError(says)
    return value


def words(text: str) -> tuple[str, ...]:
    """
    Return *text* as words, split as a shell splits them: quotes hold blanks together, line ends are blanks; nothing is expanded or run.

    Raises:
        ValueError: A quote is not closed, or there is a byte 0.
    """
    if "\0" in text:
        raise ValueError("holds a byte 0")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def check(
    variables: Mapping[str, str],
    package: Path,
    version: str,
) -> tuple[str, ...]:
    """
    Refuse ``VLLM_`` variables that the installed release does not read, and return what could not be looked up, in sentences.

    Args:
        package: The folder ``vllm``.

    Raises:
        variable-refused: One of them would change nothing.
    """
    asked = sorted(name for name in variables if name.startswith("VLLM_"))
    if not asked:
        return ()
    try:
        unread = _unread(asked, package)
    except SourceInvalid as error:
        return (f"which variables vLLM {version} knows cannot be read: {error}",)
    if unread:
        details = [f"{name}: {_advice(name, similar)}" for name, similar in unread.items()]
        raise ServeError(
            "variable-refused",
            f"vLLM {version} does not read {', '.join(unread)}; it would change nothing.",
            details=details,
        )
    return ()


def _unread(names: Iterable[str], package: Path) -> dict[str, str]:
    """
    Return those of *names* that begin with ``VLLM_`` and that vLLM calls unknown in its log.

    Such a variable changes nothing: vLLM 0.24 dropped ``VLLM_NVFP4_GEMM_BACKEND``, and a recipe
    that still sets it gets whatever kernel vLLM selects.

    Args:
        package: The folder ``vllm``, whose table in ``envs.py`` is read and not run.

    Returns:
        Each with the most similar name that vLLM reads, or an empty text.

    Raises:
        SourceInvalid: ``envs.py`` holds no table of variables.
    """
    try:
        with (package / "envs.py").open("rb") as stream:
            text = stream.read(LARGEST_TABLE).decode("utf-8", "replace")
    except OSError as error:
        raise SourceInvalid(f"envs.py cannot be read: {error.strerror}") from None
    table = set(re.findall(r"""["'](VLLM_\w+)["']\s*:""", text))
    if not table:
        raise SourceInvalid("envs.py has no table of variables")
    missing = {name for name in names if name.startswith("VLLM_")} - table
    near = {name: difflib.get_close_matches(name, table, 1, 0.75) for name in sorted(missing)}
    return {name: similar[0] if similar else "" for name, similar in near.items()}


def _advice(name: str, similar: str) -> str:
    if replaced := preflight.advice(name):
        return replaced
    near = _near(name, {one.variable for one in TABLE}) or similar
    return f"perhaps {near}" if near else "nothing of that name is known"


def table() -> str:
    """Return the variables as a table in Markdown, for the docs."""
    rows = ["| variable | becomes | default | what it says |", "|---|---|---|---|"]
    for one in TABLE:
        flag = (
            f"`{one.flag}`"
            if one.flag.startswith("-")
            else {"": "", "(argument)": "the model", "(each)": "each a word"}[one.flag]
        )
        rows.append(f"| `{one.variable}` | {flag} | {one.default} | {one.means} |")
    return "\n".join(rows) + "\n"
