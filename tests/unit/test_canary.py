"""The canary: recorded by the gate, kept with the release, and asked of servers that are sound or wrong behind a green /health."""

import contextlib
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import processes, standin, verdicts, wheels
from tests.support.byte_model_server import ByteModelServer, Message, called, only, sound_talk

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.cli import main
from sparkwright.client.environment import CANARY
from sparkwright.core import store, strict_yaml
from sparkwright.gates import dirty_text, logprobs
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Ladder
from sparkwright.release import canary, decision
from sparkwright.serving import launch

ROOT = Path(__file__).parents[2]
RECIPE, MODEL = "toy-cpu", "d" * 64
#: The real limits on fewer and shorter texts.
POLICY = replace(
    strict_yaml.load(ROOT / "ci" / "gates" / "logprobs.yaml", logprobs.LogprobsPolicy), texts=12, tokens=80, decode_texts=8, decode_prompt=24, decode_tokens=40, decode_batch=4
)


@pytest.fixture(name="reference", scope="module")
def _reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a gate records of a stock wheel."""
    folder, stock = tmp_path_factory.mktemp("reference"), ServerIdentity("a" * 64, MODEL, {}, ())
    with ByteModelServer() as server:
        recorded = logprobs.record(POLICY, server.client, stock)
    texts = [sound_talk({"messages": [{"content": "x"}], "seed": number}, 0, 1)[0]["content"] for number in range(60)]
    answers = tuple(dirty_text.SampledAnswer(number, text, (), "stop") for number, text in enumerate(texts))
    (folder / "logprobs.json").write_bytes(msgspec.json.encode(recorded))
    (folder / "text.json").write_bytes(msgspec.json.encode(dirty_text.StockText(stock, "s" * 64, answers)))
    return folder


def gated(path: Path, **worse: Any) -> Ladder:
    """Return verdicts about the wheel at *path*, of a served model of the digest `MODEL`."""
    ladder = verdicts.ladder(path, recipes=[RECIPE], worse=worse)
    return replace(ladder, verdicts=tuple(replace(verdict, model=MODEL if verdict.recipe else "") for verdict in ladder.verdicts))


@pytest.fixture(name="wheel", scope="module")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next(path for path in wheels.release(tmp_path_factory.mktemp("dist")) if path.name.startswith("vllm"))


@pytest.fixture(name="own", scope="module")
def _own(wheel: Path, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> canary.Canary:
    """Return the canary of the wheel, as it is read from its file."""
    folder, ladder = tmp_path_factory.mktemp("canary"), gated(wheel)
    canary.write(store.Store(folder / "store"), folder, ladder, reference, "default")
    (path,) = folder.glob("*.canary.json")
    assert path.stat().st_size < 1 << 20
    assert ladder.wheel
    return canary.read(path)[canary.subject(ladder.wheel.sha256, RECIPE, MODEL)]


@pytest.fixture(name="server")
def _server() -> Iterator[ByteModelServer]:
    with ByteModelServer() as server:
        yield server


def saying(text: str) -> Callable[[Message, int, int], tuple[Message, str]]:
    """Return a talk in which every answer is *text*, and tools are called as they should be."""
    return lambda request, cached, running: sound_talk(request, cached, running) if request.get("tools") else ({"content": text}, "stop")


def having(**changes: Any) -> Callable[[ByteModelServer], None]:
    """Return what gives a server other attributes."""
    return lambda server: vars(server).update(changes)


#: What is wrong → how a server becomes so, and words of each difference that must be named.
MUTANTS: dict[str, tuple[Callable[[ByteModelServer], None], tuple[str, ...]]] = {
    "shuffled logits": (having(damage=lambda logits, _: logits[::-1]), ("nat from the distributions",)),
    "another model": (having(logits=np.random.default_rng(2).standard_normal((256, 256)) * 2), ("nat from the distributions",)),
    "a scale that is wrong in decode alone": (having(damage=only(lambda step: step.decoded > 0, lambda logits, _: logits * 0.5)), ("from prefill",)),
    "damage far into an answer": (having(damage=only(lambda step: step.decoded > 40)), ("from prefill",)),
    "drafts that are accepted too easily": (having(careless=3), ("greedy tokens",)),
    "half a character": (having(talk=saying("One sees a her\ufffdn and two boats.")), ("U+FFFD",)),
    "a repeated token": (having(talk=saying("One sees" + " heron" * 40)), ("answers are dirty",)),
    "a foreign language": (having(talk=saying("Man sieht einen Reiher und zwei Boote, und das Wasser ist nicht tief.")), ("answers are dirty",)),
    "a foreign script": (having(talk=saying("One sees a heron 的 and two boats.")), ("answers are dirty",)),
    "calls that are cut": (having(talk=lambda *_: (called('{"town": "Lis'), "stop")), ("answers are dirty",)),
}  # fmt: skip


def differences(server: ByteModelServer, own: canary.Canary) -> list[str]:
    return [*canary.differences(own, server.client, ROOT, RECIPE)]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_sound_server_answers_as_recorded(server: ByteModelServer, own: canary.Canary, noise: float) -> None:
    """Also one with drafts, and with another order of sums; the cost that the guide states is that of these requests."""
    server.drafts = True
    server.damage = lambda logits, step: logits + np.random.default_rng(len(step.tokens)).standard_normal(256) * noise
    cost, answer = Counter[str](), server.answer

    def count(reply: Message) -> object:
        cost.update(requests=1, **{name: value for name, value in reply["usage"].items() if value > 1})
        return answer(reply)

    server.answer = count
    assert differences(server, own) == []
    # 8 texts are scored, continued and scored again; a chat is tried, and 8 are asked.
    assert (cost["requests"], cost["completion_tokens"]) == (3 * 8 + 1 + 8, 8 * 64)


@pytest.mark.parametrize(("damage", "words"), MUTANTS.values(), ids=MUTANTS)
def test_garbage_behind_a_green_health_is_named(own: canary.Canary, server: ByteModelServer, damage: Callable[[ByteModelServer], None], words: tuple[str, ...], tmp_path: Path) -> None:
    """By the command itself; a plain ``--health`` is content with each of them."""
    damage(server)
    with bearer(server.url, own, tmp_path):
        assert main.run(["serve", "--health", server.url]) == 0
        with refusal("answers-differ") as caught:
            main.run(["serve", "--health", server.url, "--deep"])
    assert all(any(word in line for line in caught.value.details) for word in words), caught.value.details


@contextlib.contextmanager
def bearer(url: str, own: canary.Canary, folder: Path, **changed: Any) -> Iterator[None]:
    """Have a process in the block that says that it serves at *url*; its environment has *own*."""
    model = standin.model(folder / "model")
    (folder / CANARY).write_bytes(msgspec.json.encode({canary.subject("c" * 64, RECIPE, model_digest(model)): own}))
    record = {
        "release": "spark.1", "wheel": "c" * 64, "prefix": str(folder), "recipe": RECIPE, "model": str(model), "url": url, "flags": [], "needed_gib": 1.0,
        **changed,
    }  # fmt: skip
    code = f"import json, os, sys; record = json.loads(sys.argv[1]) | {{'pid': os.getpid()}}; os.execve('/bin/sleep', ['sleep', '600'], {{'{launch.RECORD}': json.dumps(record)}})"
    with subprocess.Popen([sys.executable, "-c", code, json.dumps(record)]) as process:
        processes.until(lambda: process.pid in {each.pid for each in launch.running()})
        yield
        process.kill()


def test_deep_health_is_never_green_without_a_comparison(server: ByteModelServer, own: canary.Canary, tmp_path: Path) -> None:
    """Not started here, no canary, another wheel, recipe or model, files that changed since, or questions that are refused."""

    def deep() -> None:
        assert main.run(["serve", "--health", server.url, "--deep"]) == 0

    with refusal("canary-not-run", match="started no server"):
        deep()
    with bearer(server.url, own, tmp_path):
        deep()
        with (tmp_path / "model" / "config.json").open("a") as config:
            config.write(" ")
        with refusal("canary-not-run", match="No gate recorded") as caught:
            deep()
    assert caught.value.exit_code == 4
    for changed in ({"wheel": "e" * 64}, {"recipe": "gpt-oss-120b"}, {"model": str(tmp_path / "gone")}, {"prefix": str(tmp_path / "gone")}):
        with bearer(server.url, own, tmp_path, **changed), refusal("canary-not-run", match="No gate recorded"):
            deep()
    server.limit = 100
    with bearer(server.url, own, tmp_path), refusal("canary-not-run", match="did not answer"):
        deep()


def test_a_release_has_only_canaries_that_a_pass_is_behind(wheel: Path, reference: Path, tmp_path: Path) -> None:
    ladder = gated(wheel)
    (tmp_path / wheel.name).write_bytes(wheel.read_bytes())
    canary.write(store.Store(tmp_path / "store"), tmp_path, ladder, reference, "default")
    verdicts.write(tmp_path / wheel.name, ladder)
    kept = json.loads(decision.read_results(tmp_path / wheel.name).files["canary"])
    assert [name.split()[1:] for name in kept] == [[MODEL, RECIPE]]
    verdicts.write(tmp_path / wheel.name, gated(wheel, G5="fail"))
    assert json.loads(decision.read_results(tmp_path / wheel.name).files["canary"]) == {}
    (path,) = tmp_path.glob("*.canary.json")
    path.write_text("{")
    with refusal("file-invalid"):
        decision.read_results(tmp_path / wheel.name)


# What runs here.


def test_servers_that_run_are_listed_and_those_that_ended_are_not(machine: standin.Machine) -> None:
    """By the process that `serve` became, and not by its children, which have its variables too."""
    child = machine.start("--flag=--dtype", "--flag=float32", "--variable", "VLLM_API_KEY=geheim")
    machine.until_healthy()
    shown = machine.verb("serve", "--list")
    rows = [row for row in shown.stdout.splitlines() if str(child.pid) in row]
    assert len(rows) == 1, shown
    assert f"http://127.0.0.1:{machine.port}" in rows[0]
    (server,) = [each for each in json.loads(machine.verb("serve", "--list", "--json").stdout)["servers"] if each["pid"] == child.pid]
    assert (server["model"], server["flags"]) == (str(machine.model), ["--dtype", "float32"])
    assert "geheim" not in json.dumps(server)
    child.send_signal(signal.SIGTERM)
    child.wait(60)
    assert str(child.pid) not in machine.verb("serve", "--list").stdout.split()
