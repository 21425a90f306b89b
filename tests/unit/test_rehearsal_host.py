"""The script that runs a rehearsal on a host without a network: what it sees, what it repeats, and what it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tests.support import processes, wheels
from tests.support.standin import alive

SCRIPT = wheels.ROOT / "ci" / "rehearsal" / "host.py"
#: The host's torch, which no machine of the tests has.
TORCH = """
from types import SimpleNamespace
__version__ = "2.11.0+cu130"
cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0), device_count=lambda: 2)
"""
SAY = "from package import WORD; import tiny; print(tiny.__version__, WORD)"
HANG = "trap '' TERM; setsid sleep 600 & echo $! > {root}/child; sleep 600"
PLAN: dict[str, Any] = {
    "python": f"{sysconfig.get_python_version()} {os.uname().machine}",
    "torch": "2.11.0",
    "capability": "9.0",
    "environments": {"candidate": {"wheel": "dist/*.whl", "folders": ["sites/extra"]}},
    "commands": [
        {"name": "say", "seconds": 60, "words": ["{root}/environments/candidate/bin/python", "-c", SAY]},
        {"name": "fail", "seconds": 60, "words": ["sh", "-c", "exit 3"], "after": ["say"], "gpu": 1},
        # It asks to be spared, and its child leaves its session.
        {"name": "hang", "seconds": 1, "words": ["sh", "-c", HANG], "alone": True},
    ],
}


def start(root: Path, *words: object) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(root / "host")}
    command = list(map(str, [sys.executable, root / "host.py", *words]))
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def script(root: Path, *words: object) -> tuple[int, str, str]:
    process = start(root, *words)
    output, errors = process.communicate()
    return process.returncode, output, errors


def results(root: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (root / "results").glob("*.json")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder that was unpacked, whose host has a torch."""
    (tmp_path / "host.py").write_text(SCRIPT.read_text().replace("GRACE = 30", "GRACE = 1"))
    wheels.plain(tmp_path / "dist", "tiny", "1")
    for name, text in (("sites/extra/package/__init__.py", "WORD = 'extra'\n"), ("host/torch.py", TORCH), ("plan.json", json.dumps(PLAN))):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_commands_run_once_and_end_with_all_that_they_started(root: Path) -> None:
    assert "not set up" in script(root, "run", root)[2]
    assert script(root, "setup", root) == (0, "", "")
    assert script(root, "run", root) == (0, "", "")
    first = results(root)
    ended = {name: (each["status"], each["late"]) for name, each in first.items()}
    assert ended == {"say": (0, False), "fail": (3, False), "hang": (-9, True)}
    assert (root / "results" / "say.log").read_text() == "1 extra\n"
    assert not alive(int((root / "child").read_text()))
    (root / "results" / "fail.json").unlink()
    assert script(root, "run", root)[0] == 0
    assert results(root)["say"] == first["say"]
    assert script(root, "wait", root, 1)[1].count('"status"') == 3
    assert script(root, "collect", root, root / "back.tar.gz")[0] == 0
    shutil.unpack_archive(root / "back.tar.gz", root / "back")
    assert {path.name for path in root.glob("back/results/*.json")} == {"say.json", "fail.json", "hang.json"}


def test_run_that_was_killed_continues(root: Path) -> None:
    """What has a result is not run again; what ran beside it is ended before it runs again."""
    marker = root / "second"
    wait = f"echo $$ >> {marker}; test $(wc -l < {marker}) = 2 || sleep 600"
    commands = [{"name": "first", "seconds": 60, "words": ["date"]}, {"name": "second", "seconds": 60, "words": ["sh", "-c", wait], "after": ["first"]}]
    (root / "plan.json").write_text(json.dumps({**PLAN, "commands": commands}))
    assert script(root, "setup", root)[0] == 0
    process = start(root, "run", root)
    processes.until(lambda: marker.exists() and marker.read_text().strip())
    busy = script(root, "run", root)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    orphan = int(marker.read_text())
    assert alive(orphan)
    assert (busy[0], "run already" in busy[2]) == (1, True)
    assert script(root, "run", root, "second")[0] == 0
    assert not alive(orphan)
    assert {name: each["status"] for name, each in results(root).items()} == {"first": 0, "second": 0}


@pytest.mark.parametrize("change", [{"torch": "2.12.0"}, {"capability": "12.1"}, {"python": "3.10 x86_64"}])
def test_another_host_is_refused(root: Path, change: dict[str, str]) -> None:
    (root / "plan.json").write_text(json.dumps({**PLAN, **change}))
    status, _, errors = script(root, "setup", root)
    assert (status, errors.split()[0], (root / "environments").exists()) == (1, "error:", False)
