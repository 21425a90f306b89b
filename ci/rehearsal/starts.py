"""
Start each architecture of the recipes once, without its weights:
starts.py AT_ONCE TOKENIZER OUT [WORDS…].

Run it with the Python that has vLLM. Each model has the dimensions of transformers' own config,
with fewer layers and experts, and the tokenizer of the folder TOKENIZER; vLLM makes its weights
(``--load-format dummy``), of AT_ONCE models at a time. WORDS are further arguments of ``vllm
serve``. A row of a table says whether it started and answered, which backends its log names, and
else what ended it; and what `model check` says of the same model and words if it takes this
GPU in the place of a GB10. Configs and logs are left in OUT. A row says nothing of the formats of
weights, of words, or of another GPU.
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

import torch
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
        # Letters, as releases of transformers have different words. The dimensions of Nano.
        {
            "hybrid_override_pattern": "ME*E", "n_routed_experts": 16, "hidden_size": 2688,
            "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
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
    # As vLLM reads Mistral's own params.json.
    "mla (Mistral 4)": (
        "deepseek_v3",
        "MistralLarge3ForCausalLM",
        {
            "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
            "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256,
            "qk_nope_head_dim": 64, "first_k_dense_replace": 0,
        },
    ),
    "kda (GLM-5.3)": (
        "glm5_next_text",
        "Glm5NextForCausalLM",
        {"n_routed_experts": 16, "pad_token_id": 0, "mhc": True, "mla_use_nope": True},
    ),
    "deepseek-v4": ("deepseek_v4", "DeepseekV4ForCausalLM", {"n_routed_experts": 16}),
}  # fmt: skip
BACKEND = re.compile(r"Using '?(\w+)'?([\w ]{0,24}) backend\b")
#: What a process of vLLM, or its reader of arguments, says last; the others follow from it.
ERROR = re.compile(r"(?m)(?:\] |^|  )((?:\w+Error|Value error|Assertion failed)(?:[:,] .+)?)$")
FOLLOWS = re.compile("(?i:engine ?core)|EngineDead|raised in|to be inspected|Worker failed|Called")
#: Runs the probe of `model check` with the properties of this GPU.
ORACLE = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("selection_probe", sys.argv.pop(1))
probe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(probe)
vars(probe.DEVICE).update(json.loads(sys.argv.pop(1)))
probe.main()
"""
PROBE = Path(__file__).parents[1] / "sparkwright" / "serving" / "selection_probe.py"
PROPERTIES = (
    "name", "major", "minor", "multi_processor_count", "is_integrated", "total_memory", "warp_size",
    "shared_memory_per_block_optin", "shared_memory_per_multiprocessor",
    "max_threads_per_multi_processor",
)  # fmt: skip
QUESTION = {"model": "m", "prompt": "12+30=", "max_tokens": 4, "temperature": 0}


def write_model(name: str, tokenizer: Path, folder: Path) -> None:
    """Write the config of the architecture *name*, and the files of *tokenizer*, into *folder*."""
    kind, architecture, changes = ARCHITECTURES[name]
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    words = json.loads((tokenizer / "config.json").read_text("utf-8"))
    fields = {key: words[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    layers = {} if "hybrid_override_pattern" in changes else {"num_hidden_layers": 4}
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


def oracle(folder: Path, words: list[str]) -> tuple[set[str], str]:
    """Return the kernels that `model check` names on this GPU, and all that it says."""
    device = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = {name: getattr(properties, name, 0) for name in PROPERTIES}
    command = [sys.executable, "-c", ORACLE, str(PROBE), json.dumps(device), "yes"]
    command += [f"--model={folder}", "--skip-tokenizer-init", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        return set(), f"ended with {done.returncode}: {done.stderr.strip()[-100:]}"
    answer = json.loads(done.stdout.splitlines()[-1])
    rows = answer["rows"]
    text = "; ".join(f"{kind}: {', '.join(kernels)}" for kind, kernels in rows.items())
    failure = answer.get("refused") or answer.get("unresolved") or ""
    return {kernel for kernels in rows.values() for kernel in kernels}, text or failure


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
    named = BACKEND.findall(text)
    backends = {kernel + kind for kernel, kind in named}
    kernels, says = oracle(folder, words)
    missing = {kernel for kernel, _ in named} - kernels
    verdict = f"without {', '.join(sorted(missing))}" if missing else "agrees"
    errors = [error for error in ERROR.findall(text) if not FOLLOWS.search(error)]
    outcome = ", ".join(sorted(backends)) if started else (errors or ["it did not answer"])[-1]
    state = f"{'yes' if started else 'no'}, {seconds:.0f} s"
    return f"| {name} | {state} | {outcome:.160} | {says:.200} | {verdict} |"


def row(number: int, name: str, tokenizer: Path, output: Path, words: list[str]) -> str:
    """Return the row of the architecture *name*, the *number*-th; what fails is a row, too."""
    folder = output / str(number)
    try:
        write_model(name, tokenizer, folder)
        return start(number, name, folder, words)
    # Such as a class that transformers does not know.
    except (ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        return f"| {name} | no config | {error!s:.160} | | |"


def main() -> None:
    """Print the table."""
    tokenizer, output, words = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    print("| class | started | backends, or what ended it | model check | it |")  # noqa: T201
    print("|---|---|---|---|---|", flush=True)  # noqa: T201
    with ThreadPoolExecutor(int(sys.argv[1])) as pool:
        rows = [
            pool.submit(row, number, name, tokenizer, output, words)
            for number, name in enumerate(ARCHITECTURES)
        ]
        for each in as_completed(rows):
            print(each.result(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
