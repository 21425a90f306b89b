"""What a server made of a model, held against the folder; with a real vLLM in tests/server."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.gates.model import loaded
from sparkwright.gates.model.loaded import Loaded, LoadedModule, LoadedTensor
from sparkwright.gates.model.modules import Audit, Reading, Row

if TYPE_CHECKING:
    from tests.unit.conftest import Mini


def audit_of(*rows: tuple[str, str, int]) -> Audit:
    """Return an audit of two layers whose rows are of that group, with those modules and bytes."""
    told = tuple(Row(group, modules, "NVFP4 (modelopt)", True, ("U8",), 2, size, size, size) for group, modules, size in rows)
    return Audit("llama", "modelopt", 2, (0, 0, 0.0), 8, 1, 0, 512.0, 0.0, told, (), Reading(1, 0, 1, 0), Reading(1, 0, 1, 0), ())


def module(name: str, method: str, size: int, dtype: str = "bfloat16") -> LoadedModule:
    return LoadedModule(name, "QKVParallelLinear", method, (LoadedTensor("weight", dtype, (size,), size),))


def test_loaded_modules_that_are_alike_are_one_row() -> None:
    """The quantisation method tells them apart, as the diagnosis of a slow model needs it."""
    found = Loaded("0.33.0", (
        module("model.layers.0.self_attn.qkv_proj", "ModelOptNvFp4LinearMethod", 10, "uint8"),
        module("model.layers.1.self_attn.qkv_proj", "UnquantizedLinearMethod", 40),
        module("model.layers.0.mlp.experts", "ModelOptNvFp4FusedMoE", 7, "uint8"),
        module("lm_head", "UnquantizedEmbeddingMethod", 9),
    ))  # fmt: skip

    assert [(row.group, row.modules, row.method, row.count, row.bytes) for row in loaded.rows(found, 2)] == [
        ("attention qkv", "self_attn.qkv_proj", "ModelOptNvFp4LinearMethod", 1, 10),
        ("attention qkv", "self_attn.qkv_proj", "UnquantizedLinearMethod", 1, 40),
        ("experts", "mlp.experts", "ModelOptNvFp4FusedMoE", 1, 7),
        ("lm_head", "lm_head", "UnquantizedEmbeddingMethod", 1, 9),
    ]


def test_what_was_unpacked_by_loading_is_named() -> None:
    """Projections that a checkpoint keeps apart are one module in a server; tables made by loading have no method and do not count."""
    found = Loaded("0.33.0", (
        module("model.layers.0.self_attn.qkv_proj", "UnquantizedLinearMethod", 4_000_000),
        module("model.layers.0.self_attn.rotary_emb", "", 90_000_000),
        module("model.layers.0.mlp.down_proj", "ModelOptNvFp4LinearMethod", 1_000_000),
    ))  # fmt: skip
    attention = [(f"attention {part}", f"self_attn.{part}_proj", 500_000) for part in "qk"]
    stored = (*attention, ("mlp", "mlp.down_proj", 1_000_000))

    assert loaded.grown(found, audit_of(*stored)) == ["attention: 1.0 MB stored, 4.0 MB loaded"]


def test_a_python_without_vllm_is_a_stated_failure(mini: Mini, tmp_path: Path) -> None:
    """So is one that is not there; the first failure shows what Python said."""
    with refusal("tool-missing"):
        loaded.listed(mini.context(), tmp_path / "none", tmp_path)
    with refusal("command-failed") as caught:
        loaded.listed(mini.context(), Path(sys.executable), tmp_path)
    assert any("vllm" in line for line in caught.value.details)


@pytest.mark.parametrize("answer", ["{}", '{"version": "1", "modules": 3}', "[", '{"version": "1", "modules": [], "more": 1}'])
def test_an_answer_that_is_no_list_of_modules_is_refused(mini: Mini, tmp_path: Path, answer: str) -> None:
    """The model's code ran there, so what it leaves behind is not believed."""
    site = tmp_path / "vllm.py"
    site.write_text(f"import os, sys\nopen(sys.argv[2], 'w').write({answer!r})\nos._exit(0)\n")
    python = tmp_path / "python"
    # An interpreter whose vllm is another program.
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} "{site}" "$2" "$3"\n')
    python.chmod(0o755)

    with refusal("checkpoint-invalid"):
        loaded.listed(mini.context(), python, tmp_path)


Serve = Callable[[dict[str, tuple[str, str]]], str]


@pytest.fixture(name="serve")
def _serve() -> Iterator[Serve]:
    servers = []

    def start(answers: dict[str, tuple[str, str]]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, text = answers.get(self.path, ("text/html", "<p>nothing</p>"))
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answers(limit: int) -> dict[str, tuple[str, str]]:
    models = {"object": "list", "data": [{"id": "toy", "object": "model", "max_model_len": limit}]}
    return {
        "/v1/models": ("application/json", json.dumps(models)), "/version": ("application/json", '{"version": "0.33.0"}'),
        "/metrics": ("text/plain", 'vllm:cache_config_info{block_size="16",cache_dtype="fp8_e4m3",engine="0"} 1.0\n'),
    }  # fmt: skip


def test_what_a_server_says_is_held_against_the_folder(serve: Serve, tmp_path: Path) -> None:
    """More tokens than the model was made for are wrong; the type of its cache is told."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 2048}')

    fits = loaded.served(serve(answers(2048)), folder, audit_of())
    assert (fits.model, fits.version, fits.limit, fits.cache, fits.wrong) == ("toy", "0.33.0", 2048, "fp8_e4m3", ())
    assert loaded.served(serve(answers(4096)), folder, audit_of()).wrong == ("the server takes 4,096 tokens; the model was made for 2,048",)


def test_a_server_that_answers_badly_is_wrong_by_reference(serve: Serve, tmp_path: Path) -> None:
    """A web page, and nobody there."""
    assert loaded.served(serve({}), tmp_path, audit_of()).wrong[0].startswith("server-html")
    assert loaded.served("http://127.0.0.1:9", tmp_path, audit_of()).wrong[0].startswith("server-unreachable")
