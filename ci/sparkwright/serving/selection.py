"""
The kernels that a release of vLLM chooses for a model on a Spark, by its own code and on a CPU.

A child process runs it (`selection_probe`) with ``config.json`` alone, without the network and
without code of the model. Compiled libraries are not loaded; where their answers would matter, both
are tried, and a kind of layer for which the two choices differ is unresolved.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench.server import flags
from sparkwright.core import process
from sparkwright.serving.environment import ServingEnvironment

PROBE = Path(__file__).with_name("selection_probe.py")
#: Seconds, and megabytes of addresses, that vLLM may take for one answer; 20 and 8,000 were seen.
SECONDS, MEMORY = 600, 64 << 10
#: Left out: code of the model, its tokenizer, and settings of several machines; one is judged.
LEFT_OUT = (
    *("--trust-remote-code", "--tensor-parallel-size", "--distributed-executor-backend"),
    *("--tokenizer-mode", "--reasoning-parser", "--reasoning-config"),
)
DRAFTING = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")


class Selection(msgspec.Struct, frozen=True):
    """
    What vLLM chooses.

    Attributes:
        versions: Distribution → version, of what chose.
        rows: Kind of layer → kernel or backend → how many layers.
        otherwise: The same of the kinds that are unresolved, where a compiled library says no.
        refused: Why vLLM does not start; empty if it makes the model.
        unresolved: Why this machine could not decide; empty if it makes the model.
        line: Where in vLLM it ended.
        questions: The operators of compiled libraries that vLLM asked.
    """

    versions: dict[str, str]
    rows: dict[str, dict[str, int]] = {}
    otherwise: dict[str, dict[str, int]] = {}
    refused: str = ""
    unresolved: str = ""
    line: str = ""
    questions: tuple[str, ...] = ()


def select(
    environment: ServingEnvironment,
    config: Mapping[str, Any],
    words: Sequence[str],
    variables: Mapping[str, str],
) -> Selection:
    """
    Return what vLLM chooses for a model.

    Args:
        config: Its ``config.json``.
        words: Arguments of ``vllm serve``. Another model that drafts is left out.
        variables: Of the server.

    Raises:
        environment-unusable: vLLM does not answer.
        flag-unknown: vLLM does not know a flag.
    """
    environment.check(words)
    left_out = (*LEFT_OUT, *(DRAFTING if flags.speculation(words).get("model") else ()))
    kept_words = [
        word for each in flags.parse(words) if each.name not in left_out for word in each.words
    ]
    with tempfile.TemporaryDirectory(prefix="selection-") as folder:
        # Numbers of a config may be infinite, which msgspec writes as null.
        Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
        caches = dict.fromkeys(("HF_HOME", "HOME", "VLLM_CACHE_ROOT"), folder)
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"), "1")
        child_variables = process.clean_environment(**{**variables, **caches, **offline})
        answers = []
        for answer in ("yes", "no"):
            command = [str(environment.python), "-I", str(PROBE), answer, f"--model={folder}"]
            command.append("--skip-tokenizer-init")
            text = process.ask_python(
                f"vLLM {environment.vllm} does not say what it chooses.",
                [*command, *kept_words], memory=MEMORY, seconds=SECONDS, env=child_variables,
            )  # fmt: skip
            answers.append(msgspec.json.decode(text, type=Selection))
            if not answers[-1].questions:
                break
    first, last = answers[0], answers[-1]
    if first.refused or first.unresolved:
        return first
    otherwise = {}
    for kind, kernels in first.rows.items():
        if kernels != last.rows.get(kind):
            otherwise[kind] = last.rows.get(kind, {})
    return msgspec.structs.replace(first, otherwise=otherwise)
