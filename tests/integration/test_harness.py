"""lm-evaluation-harness, installed from the index, against servers that answer nonsense: the tasks gate says so, within its limits."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sparkwright.cli.options import default_cache
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.accuracy import gate as tasks
from sparkwright.gates.accuracy import runner
from sparkwright.gates.accuracy.gate import AccuracyPolicy
from sparkwright.gates.accuracy.result import TaskResult
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check

# It installs lm-evaluation-harness (66 wheels) and asks it thousands of questions.
pytestmark = [pytest.mark.network, pytest.mark.server]

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "accuracy.yaml", AccuracyPolicy)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    """Return a run with the user's store, which has the harness afterwards."""
    return RunContext(Project(ROOT, "2026.11"), Store(default_cache()), (), tmp_path)


@pytest.fixture
def before(context: RunContext) -> TaskResult:
    """Return a baseline that was right everywhere."""
    settings, count = tasks.settings_digest(context, POLICY.tasks["largest"], runner.version(context)), POLICY.tasks["largest"].questions
    questions = tuple(f"{number:016x}" for number in range(count))
    return TaskResult(ServerIdentity(), "toy", "0", runner.version(context), "largest", settings, questions, "1" * count)


@contextlib.contextmanager
def serving(bad: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), bad) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def judged(context: RunContext, url: str, before: TaskResult | str, task: str = "largest", policy: AccuracyPolicy = POLICY) -> dict[str, Check]:
    checks = tasks.run(policy, task, context, url, before, served=ServerIdentity())
    assert all(check.reason in tasks.REASONS for check in checks if check.state != "pass")
    return {check.name.removeprefix(f"{task}-"): check for check in checks}


class Bad(http.server.BaseHTTPRequestHandler):
    """A server that lists the model ``toy`` and answers its questions with whatever *body* is."""

    status, body, times = 200, b"", 1

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._say(b'{"data": [{"id": "toy", "max_model_len": 1024}], "version": "0.0.0"}', 200, 1)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with contextlib.suppress(OSError):
            self._say(self.body, self.status, self.times)

    def _say(self, body: bytes, status: int, times: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) * times))
        self.end_headers()
        for _ in range(times):
            self.wfile.write(body)


@pytest.mark.parametrize(
    ("status", "body", "times", "reason"),
    [
        (200, b"<html>welcome</html>", 1, "harness-failed"),
        (200, b'{"choices": []}', 1, "harness-failed"),
        (200, b'{"choices": [{"index": 0, "text": null}]}', 1, "answers-missing"),
        (200, b" " * (1 << 20), 8_000, "harness-failed"),
        (500, b"no " * (1 << 20), 300, "harness-failed"),
    ],
    ids=["page", "empty", "null", "8 GB", "long error"],
)
def test_an_answer_that_is_none_ends_the_task(
    context: RunContext, before: TaskResult, status: int, body: bytes, times: int, reason: str
) -> None:
    """A page, no answer, an answer without text, one of 8 GB, an error of 900 MB: invalid, within the limits of memory and files."""
    bad = type("Handler", (Bad,), {"status": status, "body": body, "times": times})
    with serving(bad) as url:
        checks = judged(context, url, before)

    assert (checks["answers"].state, checks["answers"].reason) == ("invalid", reason)
    assert sum(len(sample.actual) for sample in checks["answers"].samples) < 10_000


def test_a_server_that_never_answers_is_ended_in_time(context: RunContext, before: TaskResult) -> None:
    """The policy's seconds bound the harness, whatever the server does."""
    ended = threading.Event()

    class Silent(Bad):
        def do_POST(self) -> None:
            ended.wait(120)

    one = msgspec.structs.replace(POLICY.tasks["largest"], seconds=20)
    with serving(Silent) as url:
        checks = judged(context, url, before, policy=msgspec.structs.replace(POLICY, tasks={"largest": one}))
        ended.set()

    assert (checks["answers"].state, checks["answers"].reason) == ("invalid", "harness-slow")


def test_gsm8k_without_its_data_did_not_run(context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The data set is not fetched by the gate: a machine without it gets `not-run` with the reason, before any server is asked."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    checks = judged(context, "http://127.0.0.1:9", "http://127.0.0.1:9", "gsm8k")

    assert {check.state for check in checks.values()} == {"not-run"}
    assert checks["baseline"].reason == "task-data-missing"
