"""G5 against servers of a small model of bytes, sound and wrong in one way each, and its recorded references."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from scipy.special import rel_entr, softmax
from tests.support import byte_model_server

from sparkwright.bench.server.client import ServerInvalid
from sparkwright.core import strict_yaml
from sparkwright.gates import core, logprobs
from sparkwright.gates.core import server_under_test

#: The real limits on fewer and shorter texts.
POLICY = replace(
    strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "logprobs.yaml", logprobs.LogprobsPolicy), texts=12, tokens=64, top=5, decode_texts=8, decode_prompt=24, decode_tokens=40, decode_batch=4,
    corpus={f"genre {number}": (f"{number * 7919} cats sat on {number * 104729} mats in the rain.",) for number in range(12)},
)  # fmt: skip
OFFICIAL = core.server_under_test.ServerIdentity("a" * 64, "m" * 64, {"gpu": "one"}, ("--max-model-len=4096",))
CANDIDATE = replace(OFFICIAL, wheel="c" * 64)


def save(reference: logprobs.Reference, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(reference))


@pytest.fixture(name="server")
def _server() -> Iterator[byte_model_server.ByteModelServer]:
    with byte_model_server.ByteModelServer() as server:
        yield server


@pytest.fixture(scope="module", name="known")
def _known(tmp_path_factory: pytest.TempPathFactory) -> logprobs.Reference:
    """Return the reference of a sound server that drafts tokens, as it is read from its file."""
    path = tmp_path_factory.mktemp("reference") / "logprobs.json"
    with byte_model_server.ByteModelServer() as server:
        server.drafts = True
        save(logprobs.record(POLICY, server.client, OFFICIAL), path)
    return server_under_test.read_recorded(path, logprobs.Reference, limit=logprobs.LARGEST)


def compared(
    server: byte_model_server.ByteModelServer,
    against: logprobs.Reference,
    tmp_path: Path,
    policy: logprobs.LogprobsPolicy = POLICY,
    served: core.server_under_test.ServerIdentity = CANDIDATE,
    **options: Any,
) -> dict[str, core.verdict.Check]:
    """Return the checks of *server*; each name and reason is declared."""
    save(against, tmp_path / "logprobs.json")
    found = logprobs.run(policy, server.client, tmp_path / "logprobs.json", served=served, **{"announces_cache": True, **options})
    assert {check.name for check in found} == {"reference", "candidate", *logprobs.COMPARED, *logprobs.DECODED}
    assert all(check.reason in logprobs.REASONS for check in found if check.state != "pass")
    return {check.name: check for check in found}


@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_a_sound_server_passes_against_a_recorded_reference(server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, noise: float) -> None:
    """Prefill, decode, a cached prefix and sampling: nothing is left out; another order of sums, as every backend has, is no fault."""
    server.drafts = True
    server.damage = lambda logits, step: logits + np.random.default_rng(len(step.tokens)).standard_normal(256) * noise
    found = compared(server, known, tmp_path)

    assert {check.state for check in found.values()} == {"pass"}
    assert noise or found["divergence"].figures[0].value == 0


def noisy(logits: byte_model_server.Floats, step: byte_model_server.Step) -> byte_model_server.Floats:
    return np.asarray(logits + np.random.default_rng(sum(step.tokens)).standard_normal(256) * 0.5)


def finds(server: byte_model_server.ByteModelServer, change: Callable[[int, int], int]) -> None:
    """Let *server* find in its cache what *change* makes of the tokens that a sound one finds, and of those of the prompt."""
    sound = server.reuse

    def reuse(salt: str, prompt: list[int]) -> int:
        before = server.counts["vllm:prefix_cache_hits_total"]
        found = change(sound(salt, prompt), len(prompt))
        server.counts["vllm:prefix_cache_hits_total"] = before + found
        return found

    server.reuse = reuse  # type: ignore[method-assign]


def foreign(server: byte_model_server.ByteModelServer, step: byte_model_server.Step) -> bool:
    """Return whether the blocks of *step* are those of another prompt."""
    groups = (group for group in server.stored.values() if step.tokens[: len(group[-1])] in group)
    return step.cached > 0 and any(step.tokens[: len(group[0])] != group[0] for group in groups)


BLOCK = byte_model_server.BLOCK
DECODE = byte_model_server.only(lambda step: step.decoded > 0)
#: What is wrong → the attribute of the server and its value, or a change of it, the check that must fail and why, and checks that must pass.
FAULTS: Mapping[str, tuple[Mapping[str, object] | Callable[[byte_model_server.ByteModelServer], object], str, str, Sequence[str]]] = {
    "a temperature left in the logits": ({"damage": lambda logits, _: logits / 1.2}, "divergence", "distribution-differs", ()),
    "noise": ({"damage": noisy}, "best-token", "best-token-differs", ()),
    "garbage for one prompt": (
        {"damage": byte_model_server.only(lambda step: step.tokens[:24] == list(POLICY.corpus_texts()[11].encode()[:24]))}, "divergence", "text-differs", (),
    ),
    "damage in decode alone": ({"damage": DECODE}, "decode-greedy", "decode-differs", logprobs.COMPARED),
    "wrong global scale with a right-looking prefill": (
        {"damage": byte_model_server.only(lambda step: step.decoded > 0, lambda logits, _: logits * 0.8)}, "decode-greedy", "decode-differs", logprobs.COMPARED,
    ),
    "damage in a batch alone": (
        {"damage": byte_model_server.only(lambda step: step.running > 1, DECODE)}, "decode-sampled-batch", "decode-differs", (*logprobs.COMPARED, "decode-greedy"),
    ),
    "damage after a block of the KV cache": ({"damage": byte_model_server.only(lambda step: step.decoded > 16)}, "decode-greedy", "decode-differs", logprobs.COMPARED),
    "poisoned prefix cache": ({"damage": byte_model_server.only(lambda step: step.cached > 0)}, "cached-prefix", "cache-differs", (*logprobs.COMPARED, "decode-greedy")),
    # All cached prompts have one salt; under salts of their own, none could get another's.
    "blocks of another prompt": (
        lambda server: setattr(server, "damage", byte_model_server.only(lambda step: foreign(server, step))), "cached-prefix", "cache-differs", ("decode-greedy",),
    ),
    # Each distribution is right, and one greedy token of ten is the second best.
    "drafts that are accepted too easily": (
        {"drafts": True, "careless": 10}, "decode-greedy", "greedy-differs", (*logprobs.COMPARED, "decode-sampled-batch", *logprobs.CACHED, "sampling"),
    ),
    "a colder sampler": ({"sharpen": 2.0}, "sampling", "sampling-differs", (*logprobs.COMPARED, *logprobs.MODES, *logprobs.CACHED)),
    "a warmer sampler": ({"sharpen": 0.5}, "sampling", "sampling-differs", (*logprobs.COMPARED, *logprobs.MODES, *logprobs.CACHED)),
    # A repeated prompt finds two of three blocks at least, and shared ones half of what the stock wheel finds.
    "one block of a repeated prompt": (lambda server: finds(server, lambda found, _: min(found, BLOCK)), "cached-prefix", "prefix-cache-unused", ()),
    "no block of a shared beginning": (lambda server: finds(server, lambda _, __: 0), "shared-prefix", "prefix-cache-unused", ()),
    # A prompt that leaves another one token before the edge of a block shares no block that ends there.
    "a block beyond the shared ones": (
        lambda server: finds(server, lambda found, length: found + BLOCK * (0 < found < length - BLOCK)), "shared-prefix", "cache-differs", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "name", "reason", "sound"), FAULTS.values(), ids=FAULTS)
def test_a_fault_fails_its_check(server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, change: Mapping[str, object] | Callable[[byte_model_server.ByteModelServer], object], name: str, reason: str, sound: Sequence[str]) -> None:
    """Prefill is compared with the reference's for the same tokens, generated tokens with their recomputation."""
    if callable(change):
        change(server)
    else:
        vars(server).update(change)
    found = compared(server, known, tmp_path)

    assert (found[name].state, found[name].reason) == ("fail", reason)
    assert {found[check].state for check in sound} <= {"pass"}


@pytest.mark.parametrize("config", [{"top_p": 0.8, "top_k": 20}, {"repetition_penalty": 1.3}])
def test_a_sound_server_passes_whatever_its_generation_config_says(
    server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, config: dict[str, float]
) -> None:
    """Logprobs are those before top_k, top_p and penalties, so the gate asks for none of them."""
    server.config = config
    assert {check.state for check in compared(server, known, tmp_path).values()} == {"pass"}


def test_texts_that_do_not_decide_are_inconclusive(server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path) -> None:
    """A limit within the interval gives neither a pass nor a failure."""
    server.damage = noisy
    mean = compared(server, known, tmp_path, replace(POLICY, text_max=50.0))["divergence"].figures[0].value
    found = compared(server, known, tmp_path, replace(POLICY, text_max=50.0, kl_max=mean))["divergence"]

    assert (found.state, found.reason) == ("inconclusive", "texts-do-not-decide")


def test_a_noisy_machine_widens_the_limit_on_itself_alone(known: logprobs.Reference, server: byte_model_server.ByteModelServer, tmp_path: Path) -> None:
    """Three times the reference's own distance is allowed, but not on another machine."""
    shaky = replace(known, floors={**known.floors, "divergence": [0.01]})
    server.damage = lambda logits, _: logits / 1.05
    here, there = (
        compared(server, shaky, tmp_path, replace(POLICY, kl_max=1e-6), replace(CANDIDATE, host={"gpu": name}))["divergence"]
        for name in ("one", "two")
    )

    assert (here.state, there.state) == ("pass", "fail")


@pytest.mark.parametrize(
    ("caches", "finds", "announced", "state"),
    [(True, False, True, "fail"), (False, False, True, "fail"), (False, False, False, "pass"), (True, True, False, "pass")],
)
def test_prefix_cache_is_used_or_its_absence_announced(
    server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, caches: bool, finds: bool, announced: bool, state: str
) -> None:
    """A cache that finds nothing fails; that there is none, the recipe has to say."""
    server.caches = caches
    if not finds:
        server.reuse = lambda salt, prompt: 0  # type: ignore[method-assign]  # nothing is found
    found = compared(server, known, tmp_path, announces_cache=announced)["cached-prefix"]

    assert (found.state, found.reason) == (state, "" if state == "pass" else "prefix-cache-unused")


def test_prompts_for_the_cache_have_blocks_of_the_size_that_the_server_states(
    known: logprobs.Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 272 tokens (Qwen3-Next has 544 on 0.33.0): 256 tokens never hit them, three blocks and a half do, in whole blocks."""
    monkeypatch.setattr(byte_model_server, "BLOCK", 272)
    with byte_model_server.ByteModelServer() as server:
        few = replace(POLICY, texts=8, decode_texts=8)
        server.drafts = True
        reference = logprobs.record(few, server.client, OFFICIAL)
        found = compared(server, reference, tmp_path, few)

    figures = {figure.name: figure.value for figure in found["cached-prefix"].figures}
    assert {found[name].state for name in logprobs.CACHED} == {"pass"}
    assert (figures["tokens of each prompt"], figures["tokens found in the cache"]) == (3 * 272 + 136, 8 * 3 * 272)


def test_cache_of_a_hybrid_model_is_used_where_it_has_a_state(server: byte_model_server.ByteModelServer, tmp_path: Path) -> None:
    """vLLM keeps the state at the last whole block of a prompt, with drafts one block before; the stock wheel says so."""
    finds(server, lambda found, _: 2 * BLOCK * (found == 3 * BLOCK))
    reference = logprobs.record(POLICY, server.client, OFFICIAL)
    found = compared(server, reference, tmp_path)

    assert {found[name].state for name in logprobs.CACHED} == {"pass"}


#: The stock wheel reads a scale wrongly; what ours computes, and what the checks of the distributions say of it.
REPAIRS: Mapping[str, tuple[float, str, str]] = {
    "repaired": (1.0, "pass", ""),
    "half repaired": (1.1, "pass", ""),
    "as wrong as the stock wheel": (1.3, "fail", "repair-unseen"),
    "as wrong, the other way": (0.72, "fail", "repair-unseen"),
    "worse": (1.8, "fail", "text-differs"),
}


@pytest.fixture(scope="module", name="wrong")
def _wrong() -> logprobs.Reference:
    """Return the reference of that stock wheel."""
    with byte_model_server.ByteModelServer() as server:
        server.damage = lambda logits, _: logits * 1.3
        return logprobs.record(POLICY, server.client, OFFICIAL)


#: How the model of the precise reference was served, whose arithmetic is another.
PRECISE = replace(OFFICIAL, model="b" * 64)


@pytest.mark.parametrize(("factor", "state", "reason"), REPAIRS.values(), ids=REPAIRS)
def test_repair_is_judged_by_a_precise_reference(
    server: byte_model_server.ByteModelServer, known: logprobs.Reference, wrong: logprobs.Reference, tmp_path: Path, factor: float, state: str, reason: str
) -> None:
    """Ours may differ from a stock wheel that computes wrongly, and has to be nearer to the truth; undeclared, it fails."""
    (tmp_path / "precise").mkdir()
    save(replace(known, served=PRECISE), tmp_path / "precise" / "logprobs.json")
    server.damage = lambda logits, _: logits * factor
    declared, plain = compared(server, wrong, tmp_path, repairs=["scales"]), compared(server, wrong, tmp_path)

    assert (declared["divergence"].state, declared["divergence"].reason) == (state, reason)
    assert (plain["divergence"].state == "pass") == (factor == 1.3)


@pytest.mark.parametrize(
    "change",
    [
        None, {"served": OFFICIAL}, {"served": replace(PRECISE, host={"gpu": "two"})}, {"texts": [[1] * 64] * 12},
        *({"served": replace(PRECISE, wheel=wheel)} for wheel in (CANDIDATE.wheel, "")),
    ],
)  # fmt: skip
def test_precise_reference_that_is_missing_or_says_nothing_is_refused(
    server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, change: dict[str, Any] | None
) -> None:
    """Served as the candidate is or by its own wheel, on another machine, or of other texts."""
    if change is not None:
        (tmp_path / "precise").mkdir()
        save(replace(known, **{"served": PRECISE, **change}), tmp_path / "precise" / "logprobs.json")
    found = compared(server, known, tmp_path, repairs=["scales"])

    assert (found["candidate"].state, found["candidate"].reason) == ("invalid", "precise-missing" if change is None else "precise-unfit")


def scored(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], object]:
    """Return what applies *change* to the logarithms at each position of a prompt."""

    def answer(reply: dict[str, Any]) -> object:
        choice = reply["choices"][0]
        choice["prompt_logprobs"] = [place and change(place) for place in choice["prompt_logprobs"]]
        return reply

    return answer


@pytest.mark.parametrize(("change", "expected", "state"), [
    ({"answer": byte_model_server.ended(5, POLICY.decode_tokens)}, "token-count-wrong", "invalid"),
    ({"damage": byte_model_server.only(lambda step: len(step.tokens) == 9, lambda logits, _: logits * np.nan)}, "not-a-number", "fail"),
    ({"damage": byte_model_server.only(lambda step: step.decoded == 7, lambda logits, _: logits * np.nan)}, "not-a-number", "fail"),
    ({"answer": scored(lambda place: {key: {"logprob": -9999.0} for key in place})}, "not-a-number", "fail"),
    ({"answer": scored(lambda place: {key: {"logprob": min(score["logprob"] + 1.0, 0.0)} for key, score in place.items()})}, "not-a-number", "fail"),
    ({"answer": scored(lambda place: dict([*place.items()][:2]))}, "too-few-logprobs", "invalid"),
    ({"answer": lambda _: "<html>welcome</html>"}, "answer-unreadable", "invalid"),
    ({"answer": lambda _: [[]]}, "answer-unreadable", "invalid"),
    ({"shift": 1}, "reference-other-model", "invalid"),
    ({"limit": 64}, "prompt-too-long", "invalid"),
])  # fmt: skip
def test_an_answer_that_does_not_count_is_no_pass(
    server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, change: dict[str, Any], expected: str, state: str
) -> None:
    """NaN (also in decode alone), minus infinity, a sum above 1, too few logarithms or tokens, a web page, another tokenizer, a short context."""
    for name, value in change.items():
        setattr(server, name, value)
    found = compared(server, known, tmp_path)

    assert (found["candidate"].state, found["candidate"].reason) == (state, expected)
    assert {found[name].reason for name in logprobs.DECODED} == {"not-measured"}


@pytest.mark.parametrize(("change", "expected"), [
    ({"served": replace(OFFICIAL, wheel=CANDIDATE.wheel)}, "reference-is-candidate"),
    *(({"served": replace(OFFICIAL, **{field: value})}, "reference-unnamed") for field, value in (("wheel", ""), ("flags", None))),
    ({"served": replace(OFFICIAL, model="")}, "reference-other-model"),
    ({"shape": "12 texts"}, "reference-other-policy"),
    ({"floors": {"divergence": [0.0], "best-token": [0.0]}}, "reference-other-policy"),
    ({"floors": {"divergence": []}}, "reference-damaged"),
    ({"rows": [(0, {1: -1.0})] * 12 * 63}, "reference-unsound"),
    ({"rows": [(0, {})] * 12 * 63}, "reference-damaged"),
    ({"rows": [(0, {2**70: -1.0})] * 12 * 63}, "reference-damaged"),
    ({"floors": {name: [0.05] if name in logprobs.MODES else [0.0] for name in ("divergence", "best-token", *logprobs.MODES)}}, "reference-unstable"),
])  # fmt: skip
def test_a_reference_that_could_flatter_or_is_damaged_is_refused(
    server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    """It names its wheel, model and flags, is not the candidate's own, and its sizes agree."""
    found = compared(server, replace(known, **change), tmp_path)

    assert (found["reference"].state, found["reference"].reason) == ("invalid", expected)
    assert {found[name].state for name in ("candidate", *logprobs.COMPARED, *logprobs.DECODED)} == {"not-run"}


def test_a_text_with_too_few_tokens_is_refused(server: byte_model_server.ByteModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer with very long tokens leaves too few of them."""
    monkeypatch.setattr(logprobs, "LENGTH", 40)

    with pytest.raises(ServerInvalid, match="corpus-too-short"):
        logprobs.record(POLICY, server.client, OFFICIAL)


def test_a_damaged_file_is_refused(known: logprobs.Reference, tmp_path: Path) -> None:
    """Cut short, of other sizes or another kind, nested without end, endless or not there."""
    path = tmp_path / "reference.json"
    save(known, path)
    good = path.read_bytes()
    for number, bad in enumerate((good[:-100], good.replace(b'"texts":[[', b'"texts":[[1,'), b"", b"[]", b"[" * 100_000, b"\xff\xfe")):
        (tmp_path / str(number)).write_bytes(bad)
    os.truncate(path, 1 << 40)
    for damaged in (*tmp_path.iterdir(), tmp_path / "none.json", tmp_path):
        with pytest.raises(ServerInvalid, match="reference-damaged"):
            server_under_test.read_recorded(damaged, logprobs.Reference, limit=logprobs.LARGEST)


#: From nearly flat to nearly certain.
sharpness = st.sampled_from([0.1, 1.0, 3.0, 10.0, 30.0])


def listed(chances: byte_model_server.Floats, token: int, top: int) -> logprobs.Scores:
    """Return what a server says of one position with those chances: the *top* most likely, and the token that is there."""
    with np.errstate(divide="ignore"):
        logs = np.log(chances)
    ranked = np.argsort(-chances, kind="stable")[:top]
    told = {int(one): float(logs[one]) for one in [*ranked, token]}
    return logprobs.arrays([(token, told)], top + 1)


def bound(p: byte_model_server.Floats, q: byte_model_server.Floats, token: int, top: int) -> float:
    return float(logprobs.lower_bound(listed(p, token, top), listed(q, token, top), top)[0])


@settings(max_examples=300)
@given(st.integers(3, 40), st.integers(0, 2**32 - 1), sharpness, sharpness, st.integers(1, 40), st.integers(0, 39))
def test_the_bound_is_never_above_the_divergence(size: int, seed: int, sharp: float, near: float, top: int, token: int) -> None:
    """However the lists overlap, wherever the token lies and however many are told, KL is at least the bound, and that at least 0."""
    draw = np.random.default_rng(seed)
    logits = draw.standard_normal(size) * sharp
    # Alike for a *near* of 0, and the larger that is the further apart.
    p, q = softmax(logits), softmax(logits + draw.standard_normal(size) * near)
    # So much `ROUNDING` may take from the bound of one position.
    assert 0 <= bound(p, q, token % size, min(top, size)) <= rel_entr(p, q).sum() + 1e-9
    assert bound(p, p, token % size, min(top, size)) == 0


@pytest.mark.parametrize("digest", ["n" * 64, ""])
def test_a_reference_of_other_weights_is_refused(server: byte_model_server.ByteModelServer, known: logprobs.Reference, tmp_path: Path, digest: str) -> None:
    """The digest decides, although both serve the same name; unknown files are not those of the reference."""
    found = compared(server, known, tmp_path, served=replace(CANDIDATE, model=digest))

    assert (found["reference"].state, found["reference"].reason) == ("invalid", "reference-other-model")
