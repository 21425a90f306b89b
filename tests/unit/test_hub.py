"""Headers of a model from a hub, over real connections: what is asked for, what is kept, to whom a token goes, and how hubs fail."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support.badserver import Listener, Say, endless, head, silent, whole
from tests.support.checkpoints import write
from tests.support.model_hub import COMMIT, ModelHub, statement
from tests.unit.conftest import Cli, Mini
from tests.unit.test_modules import plain, qwen, small

from sparkwright.bench.model import checkpoint, hub
from sparkwright.core.store import Store

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def models(tmp_path: Path) -> Iterator[ModelHub]:
    with ModelHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def folder(models: ModelHub, shards: int = 2) -> Path:
    """Write a model of 200 layers, whose headers are longer than the first range."""
    tensors = [tensor for layer in range(700) for part in "qkvo" for tensor in plain(f"model.layers.{layer}.self_attn.{part}_proj", 64, 256)]
    return write(models.root / "org/toy", {**small(), "num_hidden_layers": 700}, tensors, shards)


def fetched(server: ModelHub | Listener, store: Store, *, offline: bool = False, seconds: float = 20, **variables: str) -> checkpoint.Checkpoint:
    source = hub.Hub({"HF_ENDPOINT": server.url, **variables}, offline=offline, seconds=seconds)
    found = source.headers(store, "org/toy", "main")
    return checkpoint.join("org/toy", found.config, found.index, found.shards.items())


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_headers_come_without_weights_and_once(models: ModelHub, store: Store, ranges: bool) -> None:
    """The model is the one in the folder; a second time, and without the hub, the store has it."""
    local = checkpoint.read(folder(models))
    models.ranges = ranges
    assert fetched(models, store) == local
    asked = models.headers_asked
    assert sorted(set(asked)) == [ONE, TWO]
    assert len(asked) == 4
    if ranges:
        assert models.sent < 700_000 < sum(tensor.bytes for tensor in local.tensors.values())
    assert fetched(models, store) == local
    assert models.headers_asked == asked
    assert fetched(models, store, offline=True) == local
    assert fetched(models, store, HF_ENDPOINT="http://127.0.0.1:1", seconds=2) == local


def test_an_interrupted_run_goes_on_with_the_shard_that_is_missing(models: ModelHub, store: Store) -> None:
    path = folder(models)
    local, aside = checkpoint.read(path), path / "aside"
    (path / TWO).rename(aside)
    (path / TWO).write_bytes(struct.pack("<Q", 1 << 63))
    with refusal("checkpoint-invalid", match=TWO):
        fetched(models, store)
    aside.replace(path / TWO)
    models.asked.clear()
    assert fetched(models, store) == local
    assert set(models.headers_asked) == {TWO}


def test_a_token_goes_to_the_hub_alone(models: ModelHub, store: Store, tmp_path: Path) -> None:
    """Files are redirected to another host, which gets none, and no message shows it."""
    folder(models)
    models.token = "hf_geheim"
    with refusal("hub-refused", match="without HF_TOKEN"):
        fetched(models, store)
    with refusal("hub-refused", match="with this HF_TOKEN") as caught:
        fetched(models, store, HF_TOKEN="hf_wrong")
    assert "hf_wrong" not in str(caught.value.document())
    with ModelHub(models.root) as storage:
        models.storage = storage.url.replace("127.0.0.1", "localhost")
        assert fetched(models, store, HF_TOKEN="hf_geheim").tensors
        assert {authorization for _, authorization, _ in storage.asked} == {""}
    assert {authorization for _, authorization, _ in models.asked[2:]} == {"Bearer hf_geheim"}


STATED = json.dumps(statement([ONE])).encode()


def answering(shard: bytes | Say) -> Say:
    """Return a hub whose only shard is answered by *shard*."""

    def say(connection: object, path: str) -> None:
        if path.endswith(".safetensors") and callable(shard):
            return shard(connection, path)  # type: ignore[arg-type]  # a socket
        index = {"weight_map": {"a": ONE}}
        reply = {"api": whole(STATED), "config.json": whole(small()), "index.json": whole(index), "safetensors": shard}
        data = next(body for name, body in reply.items() if name in path)
        connection.sendall(data)  # type: ignore[attr-defined]
        return None

    return say


def part(data: bytes, of: int | str) -> bytes:
    return head("x/y", len(data), "206 Partial Content", f"content-range: bytes 0-{len(data) - 1}/{of}") + data


FAILURES: dict[str, tuple[Say, str]] = {
    "a header of 2^63 bytes": (answering(part(struct.pack("<Q", 1 << 63), 1 << 40)), "checkpoint-invalid"),
    "a header that never comes": (answering(part(struct.pack("<Q", 90_000_000), 1 << 40)), "hub-unreachable"),
    "no length of the file": (answering(part(b"12345678", "*")), "hub-unreachable"),
    "another range": (answering(part(b"12345678", 8).replace(b"bytes 0-7", b"bytes 8-15")), "hub-unreachable"),
    "a file without end": (answering(endless(b"x" * 4096, head("x/y"))), "hub-unreachable"),
    "silence": (silent, "hub-unreachable"),
    "a redirect to itself": (lambda connection, path: connection.sendall(head(length=0, status="302 Found") [:-2] + f"location: {path}\r\n\r\n".encode()), "hub-unreachable"),
    "a page": (lambda connection, _: connection.sendall(whole(b"<html>")), "hub-unreachable"),
    "an odd commit": (lambda connection, _: connection.sendall(whole({"sha": "../../etc"})), "hub-unreachable"),
    "no model": (lambda connection, _: connection.sendall(whole({}, "404 Not Found")), "hub-missing"),
    "no safetensors": (lambda connection, _: connection.sendall(whole({"sha": COMMIT, "siblings": [{"rfilename": "x.gguf"}]})), "model-missing"),
    "a shard that is not there": (answering(whole({}, "404 Not Found")), "hub-missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_hub_that_fails_or_lies_is_refused_in_time(name: str, store: Store, listen: Callable[[Say], Listener]) -> None:
    say, reference = FAILURES[name]
    with refusal(reference):
        fetched(listen(say), store, seconds=2)


# The verb.


def test_the_verb_predicts_a_model_that_is_not_here(models: ModelHub, mini: Mini, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, by the file that it saved, and by the folder: one document."""
    path = write(models.root / "org/toy", *qwen(4, 16, 2, 1000), 3)
    monkeypatch.setenv("HF_ENDPOINT", models.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    saved = tmp_path / "toy.headers"
    shown = cli("model", "inspect", *mini.words, "--json", "--save", saved, "org/toy")
    documents = [json.loads(cli("model", "inspect", *mini.words, "--json", where).stdout) for where in ("org/toy", saved, path)]
    assert documents == [json.loads(shown.stdout)] * 3
    lines = cli("model", "inspect", *mini.words, saved).stdout.splitlines()
    assert max(map(len, lines)) <= 100
