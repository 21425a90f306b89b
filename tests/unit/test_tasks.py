"""The tasks gate without its harness: what it makes of answers that are there, and of files and policies that are wrong."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.refusals import refusal

from sparkwright.cli.stages import HARNESS_EXCLUDED
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.accuracy import gate as tasks
from sparkwright.gates.accuracy import result as results
from sparkwright.gates.accuracy import runner
from sparkwright.gates.accuracy.gate import AccuracyPolicy
from sparkwright.gates.accuracy.result import ResultInvalid, TaskResult
from sparkwright.gates.accuracy.runner import HarnessFailed
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check

ROOT = Path(__file__).parents[2]
GATES = ROOT / "ci" / "gates"
COUNT = 1000


@pytest.fixture
def policy() -> AccuracyPolicy:
    return strict_yaml.load(GATES / "accuracy.yaml", AccuracyPolicy)


@pytest.fixture
def context(store: Store, tmp_path: Path) -> RunContext:
    """Return an offline run with an empty store."""
    return RunContext(Project(ROOT, "2026.11"), store, (), tmp_path / "dist", offline=True)


def answered(right: str, **changes: Any) -> TaskResult:
    """Return the outcome of as many questions as *right* has marks."""
    questions = tuple(f"{number:016x}" for number in range(len(right)))
    made = TaskResult(ServerIdentity(), "toy", "0.33.0", "0.4.13", "largest", "settings", questions, right)
    return msgspec.structs.replace(made, **changes)


def paired(policy: AccuracyPolicy, before: str, now: str) -> Check:
    return tasks._paired(policy, "largest", answered(before), answered(now))


@pytest.mark.parametrize(
    ("lost", "gained", "expected"),
    [(0, 0, "pass"), (8, 8, "pass"), (3, 0, "pass"), (50, 0, "fail"), (50, 5, "fail"), (20, 0, "inconclusive"), (60, 40, "inconclusive")],
)
def test_the_difference_decides(policy: AccuracyPolicy, lost: int, gained: int, expected: str) -> None:
    """Of 1000 questions, few losses pass, fifty fail, and twenty or a hundred changes either way decide nothing."""
    before = "0" * gained + "1" * (COUNT - gained)
    now = "1" * gained + "0" * lost + "1" * (COUNT - gained - lost)
    check = paired(policy, before, now)

    assert check.state == expected
    assert {figure.name: figure.value for figure in check.figures}["lost"] == lost
    assert len(check.samples) == min(lost, 5)


@pytest.mark.parametrize(
    ("name", "right", "expected", "why"),
    [
        ("toy", 950, "pass", ""), ("toy", 700, "fail", "below-floor"), ("toy", 805, "inconclusive", "questions-do-not-decide"),
        ("another", 1000, "not-run", "floor-unknown"),
    ],
)  # fmt: skip
def test_the_floor_is_the_models_own(policy: AccuracyPolicy, name: str, right: int, expected: str, why: str) -> None:
    """A candidate as bad as its baseline is still held against the floor of its model; without one, that row did not run."""
    check = tasks._floor(policy, "largest", answered("1" * right + "0" * (COUNT - right), name=name))

    assert (check.state, check.reason) == (expected, why)


def test_a_baseline_that_knows_nothing_judges_nobody(policy: AccuracyPolicy, context: RunContext) -> None:
    """Where the baseline is wrong nearly everywhere, a candidate cannot lose, so an equal score is no pass."""
    digest = tasks.settings_digest(context, policy.tasks["largest"], runner.version(context))
    check = tasks._fits(policy, "largest", context, answered("1" * 100 + "0" * 900, settings=digest))

    assert (check.state, check.reason) == ("invalid", "task-uninformative")


@pytest.mark.parametrize(
    "change",
    [{"task": "gsm8k"}, {"settings": "other"}, {"right": "1" * 999, "questions": tuple(f"{number:016x}" for number in range(999))}],
)
def test_a_baseline_of_other_questions_is_invalid(policy: AccuracyPolicy, context: RunContext, change: dict[str, Any]) -> None:
    """Another task, other settings or fewer questions are not paired."""
    digest = tasks.settings_digest(context, policy.tasks["largest"], runner.version(context))
    check = tasks._fits(policy, "largest", context, msgspec.structs.replace(answered("1" * COUNT, settings=digest), **change))

    assert (check.state, check.reason) == ("invalid", "baseline-other")


def test_what_decides_the_questions_changes_the_settings(policy: AccuracyPolicy, context: RunContext) -> None:
    """Longer answers or another harness make another baseline; a new floor or more time do not."""
    one = policy.tasks["largest"]
    same = msgspec.structs.replace(one, floors={}, seconds=5)
    other = msgspec.structs.replace(one, tokens=5)

    assert tasks.settings_digest(context, one, "1") == tasks.settings_digest(context, same, "1")
    assert len({tasks.settings_digest(context, *pair) for pair in [(one, "1"), (other, "1"), (one, "2")]}) == 3


def test_without_the_harness_nothing_ran(policy: AccuracyPolicy, context: RunContext) -> None:
    """Offline with an empty store, every row of the gate is there, and none is a pass."""
    found = tasks.run(policy, "gsm8k", context, "http://127.0.0.1:9", "http://127.0.0.1:9", served=ServerIdentity())

    assert [check.name for check in found] == ["gsm8k-baseline", "gsm8k-answers", "gsm8k-paired", "gsm8k-floor"]
    assert {check.state for check in found} == {"not-run"}
    assert found[0].reason == "harness-missing"


def test_a_task_that_is_not_named_is_a_fault_of_set_up(policy: AccuracyPolicy, context: RunContext) -> None:
    """The policy lists the tasks; no other one is asked for by name."""
    with refusal("file-invalid"):
        tasks.run(policy, "hellaswag", context, "http://127.0.0.1:9", "http://127.0.0.1:9", served=ServerIdentity())


def line(number: int, right: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Return an answer as lm-eval 0.4.13 logs it."""
    made = {
        "doc_id": number, "doc": {"digits": "314"}, "target": "4", "arguments": {}, "resps": [["4"]], "filtered_resps": ["4"],
        "filter": "digit", "metrics": ["exact_match"], "doc_hash": f"{number:064x}", "prompt_hash": "1" * 64, "target_hash": "2" * 64,
        "exact_match": right,
    }  # fmt: skip
    return {**made, **changes}


def written(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(b"".join((one if isinstance(one, bytes) else msgspec.json.encode(one)) + b"\n" for one in lines))
    return path


def test_every_question_is_judged_in_its_order(policy: AccuracyPolicy, tmp_path: Path) -> None:
    """The harness writes answers in any order, once for each way of reading them; one way counts."""
    settings = msgspec.structs.replace(policy.tasks["largest"], questions=400)
    lines = [line(number, number % 2) for number in reversed(range(400))] + [line(number, filter="other") for number in range(400)]
    found = runner.judged(settings, written(tmp_path / "a.jsonl", lines))

    assert [question.doc_id for question in found] == list(range(400))
    assert [question.exact_match for question in found] == [number % 2 for number in range(400)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines[:-1], "answers-missing"),
        (lambda lines: [*lines[:-1], lines[0]], "answers-missing"),
        (lambda lines: [*lines, line(400)], "answers-missing"),
        (lambda lines: [*lines[:-1], line(399, resps=[[runner.NO_ANSWER]])], "answers-missing"),
        (lambda lines: [*lines[:-1], line(399, right=7.0)], "answers-unreadable"),
        (lambda lines: [*lines[:-1], b"<html>"], "answers-unreadable"),
        (lambda lines: [*lines[:-1], b"[" * 100_000], "answers-unreadable"),
        (lambda lines: [*lines[:-1], b'"' + b"x" * (runner.LINE + 5)], "answers-unreadable"),
        (lambda lines: [*lines[:-1], b"\xff\xfe"], "answers-unreadable"),
        (lambda lines: [], "answers-missing"),
    ],
)
def test_answers_that_do_not_count_are_refused(policy: AccuracyPolicy, tmp_path: Path, change: Any, expected: str) -> None:
    """A question without an answer, one answered twice, or a line that is none: the whole series does not count."""
    settings = msgspec.structs.replace(policy.tasks["largest"], questions=400)
    path = written(tmp_path / "a.jsonl", change([line(number) for number in range(400)]))
    with pytest.raises(HarnessFailed) as caught:
        runner.judged(settings, path)
    assert caught.value.reference == expected
    assert expected in tasks.REASONS


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A saved baseline comes back the same; what was changed, cut or lies about its size does not."""
    path, made = tmp_path / "baseline.json", answered("10" * 200)
    results.save(made, path)
    good = path.read_bytes()

    assert results.load(path) == made
    for bad in (good[:-9], good.replace(b'"1010', b'"1110'), b"", b"[" * 100_000, good.replace(b"right", b"wrong"), b"\xff"):
        path.write_bytes(bad)
        with pytest.raises(ResultInvalid):
            results.load(path)
    for lie in ({"right": "101"}, {"questions": made.questions[:-1] + made.questions[:1]}):
        results.save(msgspec.structs.replace(made, **lie), path)
        with pytest.raises(ResultInvalid, match="one answer"):
            results.load(path)
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ResultInvalid, match="larger"):
        results.load(path)


def test_a_damaged_baseline_ends_the_gate(policy: AccuracyPolicy, context: RunContext, tmp_path: Path) -> None:
    """A baseline that cannot be read is a check, not a traceback."""
    found = tasks._baseline(policy, "largest", context, Path("python"), tmp_path / "none.json", ServerIdentity(), "")

    assert isinstance(found, Check)
    assert (found.state, found.reason) == ("invalid", "baseline-damaged")


class _Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html></html>")


@pytest.fixture
def page() -> Iterator[str]:
    """Return the address of a server that shows a page whatever is asked."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_server_that_is_none_is_seen_before_the_harness_starts(policy: AccuracyPolicy, context: RunContext, page: str) -> None:
    """A page in place of a model list is invalid at once; no questions are put to it."""
    found = tasks._baseline(policy, "largest", context, Path("python"), page, ServerIdentity(), "")

    assert isinstance(found, Check)
    assert (found.state, found.reason) == ("invalid", "server-html")


def test_our_task_names_no_code_and_its_questions_are_all_there(policy: AccuracyPolicy, context: RunContext, tmp_path: Path) -> None:
    """The file that the harness loads is the reviewed one with the path of our questions in it; a file that names code is refused."""
    settings = policy.tasks["largest"]
    task = Path(runner.own_task(context, settings, tmp_path))
    read = yaml.safe_load(task.read_text("utf-8"))
    questions = Path(read["dataset_kwargs"]["data_files"]["test"]).read_bytes().splitlines()

    assert len(questions) == settings.questions
    assert all(max(one["digits"]) == one["answer"] for one in map(msgspec.json.decode, questions))
    root = tmp_path / "root"
    (root / "ci" / "gates" / "tasks").mkdir(parents=True)
    (root / "forks" / "2026.11").mkdir(parents=True)
    (root / "forks" / "2026.11" / "stack.yaml").write_text((ROOT / "forks" / "2026.11" / "stack.yaml").read_text())
    (root / "ci" / "gates" / "tasks" / settings.file).write_text("doc_to_text: !function here.there\n")
    with refusal("file-invalid", match="code"):
        runner.own_task(RunContext(Project(root, "2026.11"), context.store, (), tmp_path), settings, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"margin": 0}, {"z": 0}, {"informative": 1.5}, {"tasks": {}},
        *({"tasks": {"one": {"questions": 400, "tokens": 4, "filter": "f", "seconds": 9, **bad}}} for bad in (
            {}, {"file": "a.yaml", "dataset": "b"}, {"file": "../a.yaml"}, {"file": "a.yaml", "questions": 399},
            {"file": "a.yaml", "tokens": 0}, {"file": "a.yaml", "floors": {"x": 80}}, {"file": "a.yaml", "other": 1},
        )),
    ],
)  # fmt: skip
def test_a_policy_that_makes_no_sense_is_refused(policy: AccuracyPolicy, change: dict[str, Any]) -> None:
    """Limits that nobody can mean, too few questions, and paths outside the folder are refused when the file is read."""
    text = yaml.safe_dump({**msgspec.to_builtins(policy), **change})
    with refusal("file-invalid"):
        strict_yaml.parse(text, AccuracyPolicy, "accuracy.yaml")


def test_the_lock_of_the_harness_has_its_wheels_alone(context: RunContext) -> None:
    """The lock names lm-eval, a hash for every wheel, no torch and none of what only other tasks want."""
    text = (runner.folder(context) / "pylock.toml").read_text("utf-8")

    assert runner.version(context) in (runner.folder(context) / "requirements.in").read_text("utf-8")
    assert not any(f'name = "{name}"' in text for name in (*HARNESS_EXCLUDED, "torch", "transformers"))
