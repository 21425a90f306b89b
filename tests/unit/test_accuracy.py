"""G6 without lm-eval: its verdicts on answers, how often they are wrong, and refused baselines, files and policies."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from scipy.stats import binom
from tests.refusals import refusal

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates import accuracy
from sparkwright.gates.core import server_under_test, verdict

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "accuracy.yaml", accuracy.AccuracyPolicy)
CANDIDATE, BASELINE = server_under_test.ServerIdentity("a" * 64, "m" * 64), server_under_test.ServerIdentity("b" * 64, "m" * 64)
COUNT, FLOOR = 1000, 0.8
SERVER = Client("http://127.0.0.1:9")


@pytest.fixture
def context(store: Store, tmp_path: Path) -> RunContext:
    """Return an offline run with an empty store."""
    return RunContext(Project(ROOT, "2026.11"), store, (), tmp_path / "dist", offline=True)


def answers(correct: str, context: RunContext, identity: server_under_test.ServerIdentity = CANDIDATE) -> accuracy.TaskResult:
    """Return the answers of a server to the task ``largest``."""
    return accuracy.TaskResult(identity, accuracy.settings_digest(context, "largest", POLICY.tasks["largest"]), "largest", tuple(f"{number:016x}" for number in range(len(correct))), correct)


Judge = Callable[..., dict[str, verdict.Check]]


@pytest.fixture
def judge(context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Judge:
    """Return the gate's checks of two series of answers; *changed* are fields of the saved baseline, whose bytes *damage* changes."""

    def run(before: str, now: str, damage: Callable[[bytes], bytes] = bytes, **changed: Any) -> dict[str, verdict.Check]:
        monkeypatch.setattr(accuracy, "obtain_harness", lambda context: Path("python"))
        monkeypatch.setattr(accuracy, "ask", lambda *_: answers(now, context))
        monkeypatch.setattr(Client, "model", lambda client: "toy")
        path = tmp_path / "baseline.json"
        path.write_bytes(damage(msgspec.json.encode(replace(answers(before, context, BASELINE), **changed))))
        checks = accuracy.run(POLICY, "largest", context, SERVER, path, identity=CANDIDATE, floor=FLOOR)
        assert [check.name for check in checks] == [f"largest-{part}" for part in accuracy.PARTS]
        assert {check.reason for check in checks} - {""} <= set(accuracy.REASONS)
        return {check.name.removeprefix("largest-"): check for check in checks}

    return run


@pytest.mark.parametrize(
    ("lost", "gained", "expected"),
    [(0, 0, "pass"), (8, 8, "pass"), (8, 0, "pass"), (60, 0, "fail"), (60, 5, "fail"), (25, 0, "inconclusive"), (60, 40, "inconclusive")],
)
def test_the_questions_that_differ_decide(judge: Judge, lost: int, gained: int, expected: str) -> None:
    """Of 1000 questions, few losses pass, sixty fail, and twenty-five or a hundred changes decide nothing."""
    checks = judge("0" * gained + "1" * (COUNT - gained), "1" * gained + "0" * lost + "1" * (COUNT - gained - lost))

    assert checks["paired"].state == expected
    assert {figure.name: figure.value for figure in checks["paired"].figures}["lost"] == lost
    assert len(checks["paired"].samples) == min(lost, 5)


@pytest.mark.parametrize(
    ("correct", "state", "reason"), [(950, "pass", ""), (700, "fail", "below-floor"), (805, "inconclusive", "questions-do-not-decide")]
)
def test_a_candidate_as_bad_as_its_baseline_meets_the_floor(judge: Judge, correct: int, state: str, reason: str) -> None:
    both = "1" * correct + "0" * (COUNT - correct)
    checks = judge(both, both)

    assert checks["paired"].state == "pass"
    assert (checks["floor"].state, checks["floor"].reason) == (state, reason)


@pytest.mark.parametrize(
    ("changed", "check", "reason"),
    [
        ({"served": CANDIDATE}, "baseline", "reference-is-candidate"),
        ({"served": replace(BASELINE, wheel="")}, "baseline", "reference-unnamed"),
        ({"served": replace(BASELINE, model="n" * 64)}, "baseline", "reference-other-model"),
        ({"served": replace(BASELINE, model="")}, "baseline", "reference-other-model"),
        ({"shape": "other"}, "baseline", "reference-other-policy"),
        ({"questions": tuple(f"{number:016x}" for number in range(1, COUNT + 1))}, "answers", "reference-other-policy"),
        ({"correct": "1" * 100 + "0" * 900}, "baseline", "task-uninformative"),
    ],
)
def test_a_baseline_that_cannot_judge_is_refused(judge: Judge, changed: dict[str, Any], check: str, reason: str) -> None:
    """The candidate itself, other weights, other questions, and a baseline that has nothing to lose; nothing after it passes."""
    checks = judge("1" * COUNT, "1" * COUNT, **changed)

    assert (checks[check].state, checks[check].reason) == ("invalid", reason)
    assert {checks[part].state for part in ("paired", "floor")} == {"not-run"}


def test_without_lm_eval_the_gate_cannot_be_set_up(context: RunContext, tmp_path: Path) -> None:
    with refusal("offline"):
        accuracy.run(POLICY, "gsm8k", context, SERVER, tmp_path / "none.json", identity=CANDIDATE, floor=FLOOR)


def verdict_chance(state: str, disagreement: float, loss: float, count: int = 1319) -> float:
    """Return the exact probability of *state* if answers differ with *disagreement*, and *loss* more of them are lost than gained."""
    total = 0.0
    for discordant in range(count + 1):
        if (weight := binom.pmf(discordant, count, disagreement)) < 1e-9:
            continue
        lost = np.arange(discordant + 1)
        limits = [accuracy.paired_limits(discordant - each, each, count, POLICY.confidence) for each in lost.tolist()]
        states = [(low > -POLICY.margin) if state == "pass" else (high < -POLICY.margin) for low, high in limits]
        total += weight * binom.pmf(lost, discordant, (disagreement + loss) / (2 * disagreement))[states].sum()
    return total


@pytest.mark.parametrize("count", [accuracy.FEWEST_QUESTIONS, POLICY.task("gsm8k").questions])
@pytest.mark.parametrize("disagreement", [0.03, 0.06, 0.12])
def test_a_loss_of_the_margin_hardly_ever_decides(count: int, disagreement: float) -> None:
    """It passes, and fails, in at most 3 % of runs, whatever share of the answers changes."""
    assert verdict_chance("pass", disagreement, POLICY.margin, count) < 0.03
    assert verdict_chance("fail", disagreement, POLICY.margin, count) < 0.03


def test_the_number_of_questions_follows_from_the_stated_rates() -> None:
    """Fewer than there are, where the margin allows it, and never more; at that number an equal wheel passes as often as stated."""
    count = POLICY.task("gsm8k").questions
    assert accuracy.FEWEST_QUESTIONS < count < POLICY.tasks["gsm8k"].questions
    assert verdict_chance("pass", POLICY.differing, 0.0, count) == pytest.approx(POLICY.power, abs=0.005)
    assert replace(POLICY, margin=0.05).task("gsm8k").questions == accuracy.FEWEST_QUESTIONS
    assert replace(POLICY, margin=0.01).task("gsm8k").questions == POLICY.tasks["gsm8k"].questions


def line(number: int, **changed: Any) -> bytes:
    """Return an answer as lm-eval 0.4.13 logs it."""
    fields = {
        "doc_id": number, "doc": {"digits": "314"}, "target": "4", "arguments": {}, "resps": [["4"]], "filtered_resps": ["4"],
        "filter": "digit", "metrics": ["exact_match"], "doc_hash": f"{number:064x}", "prompt_hash": "1" * 64, "exact_match": number % 2,
    }  # fmt: skip
    return msgspec.json.encode({**fields, **changed})


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([line(399)], ""),
        ([], "answers-missing"),
        ([line(0)], "answers-missing"),
        ([line(399), line(400)], "answers-missing"),
        ([line(399, resps=[[accuracy.NO_ANSWER]])], "answers-missing"),
        ([line(399, exact_match=7)], "answers-unreadable"),
        ([b"<html>"], "answers-unreadable"),
        ([b"[" * 100_000], "answers-unreadable"),
        ([b"\xff\xfe"], "answers-unreadable"),
    ],
)
def test_every_question_has_one_answer(tmp_path: Path, last: list[bytes], reason: str) -> None:
    """lm-eval logs in any order and once for each filter; one filter counts, and anything else is refused."""
    task, path = replace(POLICY.tasks["largest"], questions=400), tmp_path / "samples.jsonl"
    lines = [*(line(number) for number in reversed(range(399))), *(line(number, filter="other") for number in range(400)), *last]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ServerInvalid, check=lambda error: error.reason == reason) if reason else contextlib.nullcontext():
        assert [answer.exact_match for answer in accuracy.read_answers(task, path)] == [number % 2 for number in range(400)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good[:-9], lambda good: good.replace(b'"correct":"1', b'"correct":"'), lambda _: b"", lambda _: b"[" * 100_000,
        lambda _: b"\xff", lambda good: b" " * accuracy.LARGEST + good, lambda good: good.replace(b'"format":4', b'"format":3'),
    ],
)  # fmt: skip
def test_a_saved_result_that_is_damaged_ends_the_gate(judge: Judge, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """What was cut, is too large or lies about its size is refused, and no verdict holds a path."""
    check = judge("1" * COUNT, "1" * COUNT, damage)["baseline"]
    assert (check.state, check.reason, check.message) == ("invalid", "reference-damaged", "baseline.json is no recorded TaskResult.")
