"""
Start each architecture of the recipes once, without its weights:
starts.py AT_ONCE TOKENIZER OUT [WORDS…].

Run it with the Python that has vLLM. Each model has the dimensions of transformers' own config,
with fewer layers and experts, and the tokenizer of the folder TOKENIZER; vLLM makes its weights
(``--load-format dummy``), of AT_ONCE models at a time. WORDS are further arguments of ``vllm
serve``. A row of a table says whether it started and answered, which backends its log names, and
else what ended it. Configs and logs are left in OUT. A row says nothing of the formats of weights,
of words, or of another GPU.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from transformers import AutoConfig

PORT, PATIENCE = 8199, 900
#: Class of recipes → model type of transformers, vLLM's architecture, and what differs.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", "Qwen3NextForCausalLM", {"num_experts": 16}),
    "qwen3-next (Qwen3.5)": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {"num_experts": 16}),
    "qwen3.5-dense": ("qwen3_5_text", "Qwen3_5ForCausalLM", {}),
    "nemotron-h": (
        "nemotron_h",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 16,
        },
    ),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM", {"num_local_experts": 16}),
    "gemma-4": ("gemma4_text", "Gemma4ForCausalLM", {"num_hidden_layers": 6}),
    "moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_experts": 16}),
    "moe (MiniMax-M2)": (
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 16, "rotary_dim": 64, "scoring_func": "sigmoid"},
    ),
    "mla (GLM-4.7-Flash)": (
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        {"n_routed_experts": 16, "first_k_dense_replace": 1, "pad_token_id": 0},
    ),
    "mla (Mistral 4)": ("mistral4", "MistralLarge3ForCausalLM", {"n_routed_experts": 16}),
    "kda (GLM-5.3)": (
        "glm5_next_text",
        "Glm5NextForCausalLM",
        {"n_routed_experts": 16, "pad_token_id": 0, "mhc": True, "mla_use_nope": True},
    ),
    "deepseek-v4": ("deepseek_v4", "DeepseekV4ForCausalLM", {"n_routed_experts": 16}),
}
BACKEND = re.compile(r"Using '?(\w+)'?([\w ]{0,24}) backend\b")
#: What a process of vLLM, or its reader of arguments, says last; the others follow from it.
ERROR = re.compile(r"(?m)(?:\] |^|  )((?:\w+Error|Value error|Assertion failed)(?:[:,] .+)?)$")
FOLLOWS = re.compile("(?i:engine ?core)|EngineDead|raised in|to be inspected|Worker failed|Called")
QUESTION = {"model": "m", "prompt": "12+30=", "max_tokens": 4, "temperature": 0}


def write_model(name: str, tokenizer: Path, folder: Path) -> None:
    """Write the config of the architecture *name*, and the files of *tokenizer*, into *folder*."""
    kind, architecture, changes = ARCHITECTURES[name]
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    words = json.loads((tokenizer / "config.json").read_text("utf-8"))
    fields = {key: words[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    layers = {} if "layers_block_type" in changes else {"num_hidden_layers": 4}
    fields["vocab_size_per_layer_input"] = words["vocab_size"]
    config = AutoConfig.for_model(kind, **{**layers, **changes, **fields}).to_dict()
    if "first_k_dense_replace" in changes:  # as published, in the place of transformers' own field
        config.pop("mlp_layer_types", None)
    text = json.dumps({**config, "architectures": [architecture], "dtype": "bfloat16"}, indent=1)
    (folder / "config.json").write_text(text, "utf-8")


def answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether *server* serves at *port* within `PATIENCE`, and answers a question."""
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    body = json.dumps(QUESTION).encode()
    ask = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})  # noqa: S310
    while server.poll() is None and time.monotonic() < end:
        try:
            with urlopen(f"{url}/health", timeout=5), urlopen(ask, timeout=300) as answer:  # noqa: S310
                return bool(json.load(answer)["choices"])
        except (URLError, OSError):
            time.sleep(1)
    return False


def start(number: int, name: str, folder: Path, words: list[str]) -> str:
    """Return the row of the architecture *name*, the *number*-th, whose model is in *folder*."""
    log, port = folder / "log.txt", PORT + number
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    flags = ["--served-model-name=m", f"--port={port}", "--load-format=dummy", *words]
    began = time.monotonic()
    out = log.open("wb")
    with out, subprocess.Popen([*command, *flags], stdout=out, stderr=out) as server:
        started = answers(server, port)
        seconds = time.monotonic() - began
        server.send_signal(signal.SIGTERM)
    text = log.read_text("utf-8", "replace")
    backends = {kernel + kind for kernel, kind in BACKEND.findall(text)}
    errors = [error for error in ERROR.findall(text) if not FOLLOWS.search(error)]
    outcome = ", ".join(sorted(backends)) if started else (errors or ["it did not answer"])[-1]
    return f"| {name} | {'yes' if started else 'no'}, {seconds:.0f} s | {outcome:.160} |"


def row(number: int, name: str, tokenizer: Path, output: Path, words: list[str]) -> str:
    """Return the row of the architecture *name*, the *number*-th; what fails is a row, too."""
    folder = output / str(number)
    try:
        write_model(name, tokenizer, folder)
        return start(number, name, folder, words)
    except (ValueError, KeyError, TypeError) as error:  # transformers does not know it
        return f"| {name} | no config | {error!s:.160} |"


def main() -> None:
    """Print the table."""
    tokenizer, output, words = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    print("| class | started | backends, or what ended it |\n|---|---|---|", flush=True)  # noqa: T201
    with ThreadPoolExecutor(int(sys.argv[1])) as pool:
        rows = [
            pool.submit(row, number, name, tokenizer, output, words)
            for number, name in enumerate(ARCHITECTURES)
        ]
        for each in as_completed(rows):
            print(each.result(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
