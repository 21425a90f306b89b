"""The distributions gate against real servers of a small model of bytes, sound and wrong in one way each, and its saved references."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.refusals import refusal

from sparkwright.bench.server.client import Client
from sparkwright.core import strict_yaml
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check, worst
from sparkwright.gates.logprobs import gate as distributions
from sparkwright.gates.logprobs import reference
from sparkwright.gates.logprobs.divergence import Floats
from sparkwright.gates.logprobs.gate import LogprobsPolicy
from sparkwright.gates.logprobs.reference import Reference, ReferenceInvalid

GATES = Path(__file__).parents[2] / "ci" / "gates"
TEXTS, TOKENS, TOP = 12, 80, 5
#: A genre for each text to begin with, so that no two begin alike.
PARAGRAPHS = {f"genre {number:02d}": (f"{number * 7919} cats sat on {number * 104729} mats in the rain.",) for number in range(TEXTS)}

Fault = Callable[[Floats, list[int]], Floats]


def policy(**changes: Any) -> LogprobsPolicy:
    """Return the real policy on fewer and shorter texts."""
    real = strict_yaml.load(GATES / "logprobs.yaml", LogprobsPolicy)
    texts = changes.get("texts", TEXTS)
    few = {"texts": texts, "tokens": TOKENS, "top": TOP, "corpus": reference.digest_of(reference.corpus_texts(PARAGRAPHS, texts))}
    return msgspec.structs.replace(real, **{**few, **changes})


class Bytes(http.server.ThreadingHTTPServer):
    """
    A server that speaks as vLLM does, of a model that guesses the next byte from the last one.

    Attributes:
        fault: Changes the logits of all positions of a prompt.
        answer: Changes the whole answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        draw = np.random.default_rng(1)
        self.logits: Floats = draw.standard_normal((256, 256)) * 3
        self.name, self.limit, self.shift = "bytes", 4096, 0
        self.fault: Fault = lambda logits, prompt: logits
        self.answer: Callable[[dict[str, Any]], object] = lambda answer: answer
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.server_address[1]}", deadline=30)

    def scored(self, prompt: list[int], top: int) -> list[dict[str, Any] | None]:
        logits = self.fault(self.logits[prompt[:-1]], prompt)
        logs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32).astype(np.float64)
        found: list[dict[str, Any] | None] = [None]
        for row, token in zip(logs, prompt[1:], strict=True):
            told = [token, *np.argsort(-row, kind="stable")[:top].tolist()]
            found.append({str(one): {"logprob": float(row[one])} for one in told})
        return found


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Bytes

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _say(self, answer: object, status: int = 200) -> None:
        page = isinstance(answer, str)
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if page else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": self.server.name, "max_model_len": self.server.limit}]}
        self._say(models if self.path == "/v1/models" else {"version": "0.0.0"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokens = [(byte + self.server.shift) % 256 for byte in asked["prompt"].encode()]
            return self._say({"tokens": tokens, "count": len(tokens), "max_model_len": self.server.limit})
        scored = self.server.scored(asked["prompt"], asked["prompt_logprobs"])
        if any(np.isnan(one["logprob"]) for place in scored[1:] if place for one in place.values()):
            # In vLLM's own words, of 0.32.0.
            return self._say({"error": {"message": "Out of range float values are not JSON compliant", "code": 400}}, 400)
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [0], "prompt_logprobs": scored}
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 1}
        return self._say(self.server.answer({"model": self.server.name, "choices": [choice], "usage": usage}))


@pytest.fixture
def start() -> Iterator[Callable[[], Bytes]]:
    """Return what starts another server of the sound model."""
    running: list[Bytes] = []

    def one() -> Bytes:
        running.append(Bytes())
        return running[-1]

    yield one
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(start: Callable[[], Bytes]) -> Bytes:
    return start()


@pytest.fixture
def known(server: Bytes) -> Reference:
    """Return what the sound server says."""
    return distributions.record(policy(), PARAGRAPHS, server.client, ServerIdentity(wheel="a" * 64))


def judged(server: Bytes, against: Reference | Path | Client, **changes: Any) -> dict[str, Check]:
    found = distributions.run(policy(**changes), server.client, against, paragraphs=PARAGRAPHS, served=ServerIdentity())
    assert [check.name for check in found] == ["reference", "candidate", *distributions.COMPARED]
    assert all(check.reason in distributions.REASONS for check in found if check.state != "pass")
    return {check.name: check for check in found}


def state(found: Mapping[str, Check]) -> str:
    return worst(check.state for check in found.values() if check.required)


def test_a_server_is_not_apart_from_itself(server: Bytes) -> None:
    """A sound deterministic server against itself passes everything, at a distance of 0 and with a floor of 0."""
    found = judged(server, server.client)

    assert state(found) == "pass"
    assert found["divergence"].figures[0].value == 0
    assert found["best-token"].figures[0].value == 100
    assert found["reference"].figures[0].value == 0


def test_a_saved_reference_says_the_same(server: Bytes, known: Reference, tmp_path: Path) -> None:
    """What is written and read again is the same to the bit, and so are the checks made with it."""
    path = tmp_path / "reference.json"
    reference.save(known, path)
    again = reference.load(path)
    server.fault = lambda logits, prompt: logits * 0.97

    assert again.texts == known.texts
    assert (again.scores.ids == known.scores.ids).all()
    assert (again.scores.tops == known.scores.tops).all()
    assert (again.scores.logprobs == known.scores.logprobs).all()
    assert again.served == known.served
    assert judged(server, path) == judged(server, known)


def warmer(logits: Floats, prompt: list[int]) -> Floats:
    return logits / 1.2


def noisy(logits: Floats, prompt: list[int]) -> Floats:
    draw = np.random.default_rng(sum(prompt))
    return logits + draw.standard_normal(logits.shape) * 0.3


def one_of_a_hundred(logits: Floats, prompt: list[int]) -> Floats:
    draw = np.random.default_rng(sum(prompt))
    changed = logits.copy()
    for row in np.flatnonzero(draw.random(len(changed)) < 0.02):
        changed[row, draw.integers(256)] = 40
    return changed


def garbage_for_one(logits: Floats, prompt: list[int]) -> Floats:
    return logits[:, ::-1] if prompt == list(reference.corpus_texts(PARAGRAPHS, TEXTS)[5].encode()[:TOKENS]) else logits


def favourite_lost(logits: Floats, prompt: list[int]) -> Floats:
    changed = logits.copy()
    changed[np.arange(0, len(changed), 8), changed[::8].argmax(axis=1)] -= 2.0
    return changed


@pytest.mark.parametrize(
    ("fault", "killer"),
    [
        (warmer, "divergence"),
        (noisy, "best-token"),
        (one_of_a_hundred, "divergence"),
        (garbage_for_one, "worst-text"),
        (favourite_lost, "divergence"),
    ],
)
def test_a_fault_of_the_model_fails(server: Bytes, known: Reference, fault: Fault, killer: str) -> None:
    """A temperature, noise, some tokens at random, garbage for a prompt, favourites that are lost: each fails where it should."""
    server.fault = fault
    found = judged(server, known)

    assert found[killer].state == "fail"
    assert found["candidate"].state == "pass"


def test_garbage_for_one_prompt_does_not_hide_in_the_average(server: Bytes, known: Reference) -> None:
    """One text of twelve that is wholly wrong cannot be decided by drawing texts again, and is a failure all the same."""
    server.fault = garbage_for_one
    found = judged(server, known)

    assert found["divergence"].state == "inconclusive"
    assert found["worst-text"].state == "fail"
    assert len(found["worst-text"].samples) == found["worst-text"].figures[1].value


def test_little_noise_passes(server: Bytes, known: Reference) -> None:
    """Another order of sums, as every backend has, is no fault."""
    server.fault = lambda logits, prompt: logits + np.random.default_rng(len(prompt)).standard_normal(logits.shape) * 0.003

    assert state(judged(server, known)) == "pass"


def test_what_the_texts_do_not_decide_is_inconclusive(server: Bytes, known: Reference) -> None:
    """A limit within the interval gives neither a pass nor a failure."""
    server.fault = noisy
    mean = judged(server, known)["divergence"].figures[0].value
    found = judged(server, known, kl_most=mean)

    assert found["divergence"].state == "inconclusive"
    assert found["divergence"].reason == "texts-do-not-decide"


@pytest.mark.parametrize("value", [float("nan"), -np.inf])
def test_logits_that_are_no_numbers_fail(server: Bytes, known: Reference, value: float) -> None:
    """NaN makes vLLM refuse to answer, and minus infinity comes as -9999 or not at all: either is the candidate's failure."""

    def broken(logits: Floats, prompt: list[int]) -> Floats:
        changed = logits.copy()
        changed[3, prompt[4]] = value
        return changed

    def written(answer: dict[str, Any]) -> object:
        for place in answer["choices"][0]["prompt_logprobs"][1:]:
            for one in place.values():
                one["logprob"] = max(one["logprob"], -9999.0)
        return answer

    server.fault, server.answer = broken, written
    found = judged(server, known)

    assert (found["candidate"].state, found["candidate"].reason) == ("fail", "not-a-number")
    assert {found[name].state for name in distributions.COMPARED} == {"not-run"}


def test_probabilities_above_one_fail(server: Bytes, known: Reference) -> None:
    """Logarithms that add up to more than 1 come from no softmax."""

    def written(answer: dict[str, Any]) -> object:
        for place in answer["choices"][0]["prompt_logprobs"][1:]:
            for one in place.values():
                one["logprob"] = min(one["logprob"] + 1.0, 0.0)
        return answer

    server.answer = written
    found = judged(server, known)

    assert (found["candidate"].state, found["candidate"].reason) == ("fail", "not-a-distribution")
    assert found["candidate"].samples


def fewer(answer: dict[str, Any]) -> object:
    places = answer["choices"][0]["prompt_logprobs"]
    answer["choices"][0]["prompt_logprobs"] = [place and dict(list(place.items())[:2]) for place in places]
    return answer


def more(answer: dict[str, Any]) -> object:
    for place in answer["choices"][0]["prompt_logprobs"][1:]:
        place.update({str(one): {"logprob": -30.0} for one in range(300, 310)})
    return answer


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"answer": fewer}, "too-few-logprobs"),
        ({"answer": more}, "answer-unreadable"),
        ({"answer": lambda answer: "<html>welcome</html>"}, "server-html"),
        ({"answer": lambda answer: [[]]}, "answer-unreadable"),
        ({"name": "another"}, "reference-other-model"),
        ({"shift": 1}, "reference-other-model"),
        ({"limit": TOKENS}, "prompt-too-long"),
    ],
)
def test_an_answer_that_does_not_count_is_invalid(server: Bytes, known: Reference, change: dict[str, Any], expected: str) -> None:
    """A server that answers something else, or serves another model, is no failure of the wheel and never a pass."""
    for name, value in change.items():
        setattr(server, name, value)
    found = judged(server, known)

    assert (found["candidate"].state, found["candidate"].reason) == ("invalid", expected)
    assert state(found) == "invalid"


def test_no_server_is_invalid(server: Bytes, known: Reference) -> None:
    """Nothing listens: the gate says so, and raises nothing."""
    server.shutdown()
    server.server_close()
    found = judged(server, known)

    assert found["candidate"].reason == "server-unreachable"


def test_models_are_told_apart_by_digest(server: Bytes, known: Reference) -> None:
    """Where digests of both models are known, the same name does not make them the same model."""
    known = msgspec.structs.replace(known, served=ServerIdentity(model="1" * 64))
    found = distributions.run(policy(), server.client, known, paragraphs=PARAGRAPHS, served=ServerIdentity(model="2" * 64))

    assert found[1].reason == "reference-other-model"


def shaky(strength: float) -> Fault:
    draw = np.random.default_rng(7)
    return lambda logits, prompt: logits + draw.standard_normal(logits.shape) * strength


def test_an_unsteady_reference_judges_nobody(server: Bytes) -> None:
    """A reference that differs from itself too much is invalid, with the figures that say so."""
    server.fault = shaky(1.0)
    found = judged(server, server.client)

    assert (found["reference"].state, found["reference"].reason) == ("invalid", "reference-unstable")
    assert found["reference"].figures[0].value > 0.02
    assert found["divergence"].state == "not-run"


def test_a_noisy_host_widens_the_limit(server: Bytes) -> None:
    """The floor of a reference that is a little noisy raises the limit to three times the floor, on its own machine only."""
    server.fault = shaky(0.03)
    known = distributions.record(policy(), PARAGRAPHS, server.client, ServerIdentity(host={"gpu": "one"}))
    here, there = (
        distributions.run(policy(kl_most=0.0001), server.client, known, paragraphs=PARAGRAPHS, served=ServerIdentity(host={"gpu": name}))
        for name in ("one", "two")
    )

    assert here[2].figures[0].bound == pytest.approx(3 * float(known.floor[:, 0].mean()))
    assert here[2].state == "pass"
    assert there[2].figures[0].bound == 0.0001
    assert there[2].state == "fail"


def test_a_reference_of_another_policy_does_not_count(server: Bytes, known: Reference) -> None:
    """Fewer texts than the policy asks, or other ones, are not compared."""
    assert judged(server, known, texts=TEXTS + 1)["reference"].reason == "reference-other-model"
    assert judged(server, msgspec.structs.replace(known, top=TOP + 1))["reference"].reason == "reference-other-policy"


def test_a_reference_with_nan_is_unsound(server: Bytes, known: Reference) -> None:
    """A saved reference whose numbers are none is invalid, not a measure."""
    tops = known.scores.tops.copy()
    tops[4, 2] = np.nan
    found = judged(server, msgspec.structs.replace(known, scores=msgspec.structs.replace(known.scores, tops=tops)))

    assert found["reference"].reason == "reference-unsound"


def test_a_text_that_is_too_short_is_invalid(server: Bytes) -> None:
    """A tokenizer with very long tokens leaves a text with too few of them."""
    server.limit = 20000
    found = judged(server, server.client, tokens=7000)

    assert found["reference"].reason == "corpus-too-short"


def saved(known: Reference, path: Path, **changes: Any) -> Path:
    """Write *known* with *changes* to its file's fields, and a digest that fits."""
    reference.save(known, path)
    file = msgspec.structs.replace(msgspec.json.decode(path.read_bytes(), type=reference._File), **changes)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, digest=file.own_digest())))
    return path


def test_a_damaged_file_is_refused(known: Reference, tmp_path: Path) -> None:
    """Cut short, changed, of another kind, nested without end, or not there: each is `reference-damaged`."""
    path = tmp_path / "reference.json"
    reference.save(known, path)
    good = path.read_bytes()
    changed = [good.replace(b'"bytes"', b'"bites"'), good.replace(b'"top"', b'"tap"')]
    for bad in (good[:-100], *changed, b"", b"[]", b"[" * 100_000, b"\xff\xfe"):
        path.write_bytes(bad)
        with pytest.raises(ReferenceInvalid, match=r"saved reference|changed"):
            reference.load(path)
    with pytest.raises(ReferenceInvalid):
        reference.load(tmp_path / "none.json")
    with pytest.raises(ReferenceInvalid):
        reference.load(tmp_path)


def test_a_file_that_lies_is_refused(known: Reference, tmp_path: Path) -> None:
    """Sizes that do not fit, arrays that unfold without end, tokens other than stated: refused although the digest is right."""
    path = tmp_path / "reference.json"
    bomb = base64.b64encode(zlib.compress(bytes(300_000_000), 9)).decode()
    lies: list[dict[str, Any]] = [
        {"tops": bomb},
        {"ids": "not base64!"},
        {"ids": base64.b64encode(b"not deflated").decode()},
        {"count": 1 << 20, "length": 1 << 20},
        {"count": TEXTS - 1},
        {"length": TOKENS + 1},
        {"top": TOP - 1},
        {"tokens": "0" * 64},
        {"floor": ()},
    ]
    for lie in lies:
        with pytest.raises(ReferenceInvalid):
            reference.load(saved(known, path, **lie))
    assert reference.load(saved(known, path)).name == "bytes"


def test_a_file_without_end_is_not_read_whole(tmp_path: Path) -> None:
    """A file beyond the limit is refused after the limit; this one has a terabyte of holes."""
    path = tmp_path / "reference.json"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ReferenceInvalid, match="larger"):
        reference.load(path)


def test_the_policy_names_the_corpus() -> None:
    """The reviewed policy is valid and its digest is that of the reviewed corpus; the texts differ, from their beginning on."""
    real = strict_yaml.load(GATES / "logprobs.yaml", LogprobsPolicy)
    texts = reference.corpus_texts(reference.load_corpus(GATES / "corpus.yaml"), real.texts)

    assert reference.digest_of(texts) == real.corpus
    assert len({text[:1500] for text in texts}) == real.texts
    assert all(len(text) >= reference.LENGTH for text in texts)


def test_another_corpus_is_refused(server: Bytes) -> None:
    """A corpus that changed without its policy is a fault of set-up."""
    with refusal("file-invalid", match="corpus"):
        distributions.run(policy(), server.client, server.client, paragraphs={"one": ("another",)}, served=ServerIdentity())


@pytest.mark.parametrize(
    "change",
    ["texts: 7", "texts: 100000", "top: 0", "kl_most: 0", "kl_floors: 0.5", "agreement_least: 2", "confidence: 0.5", "spare: 1"],
)
def test_a_policy_that_makes_no_sense_is_refused(change: str) -> None:
    """Limits that nobody can mean are refused when the file is read."""
    name = change.partition(":")[0]
    lines = [line for line in (GATES / "logprobs.yaml").read_text("utf-8").splitlines() if not line.startswith(f"{name}:")]
    with refusal("file-invalid"):
        strict_yaml.parse("\n".join([*lines, change]), LogprobsPolicy, "logprobs.yaml")


@pytest.mark.parametrize("text", ["{}", "one: []", "one: ['']", "one: two"])
def test_a_corpus_without_text_is_refused(tmp_path: Path, text: str) -> None:
    """A genre without a paragraph would be a text without an end."""
    path = tmp_path / "corpus.yaml"
    path.write_text(text)
    with refusal("file-invalid"):
        reference.load_corpus(path)
