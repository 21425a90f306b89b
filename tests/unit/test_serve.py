"""
Servers are started clean, watched, and never left behind.

The programs that are started here stand in for vLLM in one thing alone: how they run, listen, print and die. What they stand for is tested
with the real server in ``tests/server``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.refusals import refusal
from tests.support import endings

from sparkwright.bench.server.installed import Mismatch, is_installed
from sparkwright.bench.server.serve import ALWAYS, Launch, Server

#: Answers as vLLM does, with a child in a session of its own, which ignores TERM; *say* is printed first, *before* runs before it listens.
PROGRAM = """
import http.server, json, os, subprocess, sys, time
print({say!r}, flush=True)
{before}
stray = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stray])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        models = {{"data": [{{"id": {model!r}, "max_model_len": 64}}]}}
        body = json.dumps(dict(os.environ) if self.path == "/environment" else models).encode()
        self.send_response({health})
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

Make = Callable[..., Launch]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return what writes a program and says how it is started."""

    def launch(
        *, say: str = "ready", before: str = "", model: str = "toy", health: int = 200, patience: float = 100, reserve: int = 0
    ) -> Launch:
        folder = tmp_path / "modules" / "vllm" / "entrypoints" / "cli"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main.py").write_text(PROGRAM.format(say=say, before=before, model=model, health=health))
        variables = {"PYTHONPATH": str(tmp_path / "modules"), "LANG": ""}
        return Launch(Path(sys.executable), tmp_path / "model", (), variables, "toy", patience, reserve, grace=0.5)

    return launch


def gone(processes: list[psutil.Process]) -> bool:
    """Wait until none of *processes* runs."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        alive = []
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    alive.append(one)
        if not alive:
            return True
        time.sleep(0.05)
    return False


def test_a_server_serves_inside_its_block_and_is_gone_behind_it(make: Make, tmp_path: Path) -> None:
    """It answers inside; behind the block not even a child that left its session and ignores TERM is there."""
    with Server(make(), tmp_path / "log") as server:
        assert (server.ready, server.client().model(), server.client().max_model_len()) == (True, "toy", 64)
        left = server.processes()
        assert len(left) == 2
        assert server.memory() > 0
        assert server.guard()
    assert gone(left)
    assert (tmp_path / "log").read_text().startswith("ready")


def test_the_environment_is_what_the_recipe_says_and_what_may_pass(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's variable that changes how vLLM computes does not reach the server."""
    from urllib.request import urlopen

    for name in ("VLLM_NVFP4_GEMM_BACKEND", "LD_LIBRARY_PATH", "VLLM_ATTENTION_BACKEND", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(name, "stray")
    monkeypatch.setenv("LANG", "C")
    launch = make()
    with Server(launch, tmp_path / "log") as server:
        environment = json.load(urlopen(f"{server.url}/environment"))
    expected = launch.environment()
    assert {name: environment.get(name) for name in expected} == expected
    assert set(environment) - set(expected) <= {"LC_CTYPE", "PWD", "SHLVL", "_"}
    assert ALWAYS.items() <= expected.items()
    assert "LANG" not in expected


@pytest.mark.parametrize(
    ("case", "reference"),
    [
        ({"before": "sys.exit(3)"}, "server-died"),
        ({"before": "time.sleep(600)", "patience": 1}, "server-late"),
        ({"model": "other", "patience": 3}, "server-late"),
        ({"health": 503, "patience": 3}, "server-late"),
        ({"say": "INFO Estimated CUDA graph memory: -35.17 GiB total"}, "graph-memory-negative"),
        ({"say": "\0\0"}, "log-unreadable"),
        ({"reserve": 1_000_000_000}, "memory-low"),
    ],
)
def test_a_server_that_may_not_serve_is_ended_before_traffic(case: dict[str, object], reference: str, make: Make, tmp_path: Path) -> None:
    """It says why, and nothing of it is left."""
    with Server(make(**case), tmp_path / "log") as server:
        assert (server.ready, server.reference) == (False, reference), server.ended
        assert server.ended
        assert not server.running
    assert server.reference == reference


def test_a_server_is_ended_when_its_log_turns_bad(make: Make, tmp_path: Path) -> None:
    """What is watched while it starts is watched while it serves, where somebody asks."""
    with Server(make(), tmp_path / "log") as server:
        assert server.guard()
        with (tmp_path / "log").open("a") as log:
            log.write("Estimated CUDA graph memory: 1.00 GiB total\n")
        assert server.guard()
        left = server.processes()
        with (tmp_path / "log").open("a") as log:
            log.write("Estimated CUDA graph memory: -0.50 GiB total\n")
        assert not server.guard()
        assert server.reference == "graph-memory-negative"
    assert gone(left)


def test_a_server_that_dies_is_noticed(make: Make, tmp_path: Path) -> None:
    """The next look says so, and its children are gone, too."""
    with Server(make(), tmp_path / "log") as server:
        left = server.processes()
        left[0].kill()
        assert gone(left)
        until = time.monotonic() + 60
        while server.guard() and time.monotonic() < until:
            time.sleep(0.05)
        assert server.reference == "server-died"


GATE = """
import sys, time
from pathlib import Path
import msgspec
from sparkwright.bench.server.serve import Launch, Server
launch = msgspec.json.decode(sys.stdin.read(), type=Launch, dec_hook=lambda kind, value: kind(value))
with Server(launch, Path(sys.argv[1])) as server:
    print(*(one.pid for one in server.processes()), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_a_gate_that_is_killed(by: signal.Signals, make: Make, tmp_path: Path) -> None:
    """However the gate dies, every process of its server does, too."""
    import msgspec

    launch = msgspec.json.encode(make(), enc_hook=str)
    gate = subprocess.Popen(
        [sys.executable, "-c", GATE, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=endings.heard,  # noqa: PLW1509  system calls, no lock
    )  # fmt: skip
    assert gate.stdin is not None
    assert gate.stdout is not None
    gate.stdin.write(launch)
    gate.stdin.close()
    left = [psutil.Process(int(pid)) for pid in gate.stdout.readline().split()]
    assert len(left) == 2
    gate.send_signal(by)
    gate.wait()
    gate.stdout.close()
    assert gone(left)


def test_no_server_outlives_its_keeper(make: Make, tmp_path: Path) -> None:
    """Where somebody kills what stands between, the server is told to end, and the block ends the rest."""
    with Server(make(), tmp_path / "log") as server:
        left = server.processes()
        os.kill(left[0].ppid(), signal.SIGKILL)
        assert gone(left[:1])
        server.stop()
        for one in left[1:]:  # nobody is left who knows it, as its parents are both dead
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def test_a_python_that_is_not_there_is_a_missing_tool(make: Make, tmp_path: Path) -> None:
    """A wrong path is a fault of set-up, told before anything runs."""
    import msgspec

    launch = msgspec.structs.replace(make(), python=tmp_path / "python")
    with refusal("tool-missing"):
        Server(launch, tmp_path / "log")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an empty environment."""
    import venv

    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def wheel(folder: Path, **changes: bytes) -> Path:
    """Write a small wheel, with *changes* to its module or its script."""
    files = {
        "widget/__init__.py": changes.get("module", b"VALUE = 1\n"),
        "widget/_C.abi3.so": os.urandom(8) if "library" in changes else b"\x7fELF library",
        "widget-1.data/scripts/widget": changes.get("script", b"#!python\nprint(1)\n"),
        "widget-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: widget\nVersion: 1\n",
        "widget-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    path = folder / "widget-1-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("widget-1.dist-info/RECORD", "".join(f"{name},,\n" for name in [*files, "widget-1.dist-info/RECORD"]))
    return path


def test_an_environment_holds_a_wheel_or_does_not(environment: Path, tmp_path: Path) -> None:
    """What an installer wrote is the wheel; another wheel, a changed file, a missing and a further one are not."""
    from uv import find_uv_bin

    sound = wheel(tmp_path / "sound")
    subprocess.run([find_uv_bin(), "pip", "install", "--quiet", "--offline", "--python", environment, sound], check=True)
    site = next(environment.parents[1].glob("lib/python3.*/site-packages"))
    (site / "widget" / "__pycache__").mkdir(exist_ok=True)
    (site / "widget" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"compiled")
    assert is_installed(environment, sound) == ()
    assert is_installed(environment, wheel(tmp_path / "a", module=b"VALUE = 2\n")) == (Mismatch("widget/__init__.py", "differs"),)
    assert is_installed(environment, wheel(tmp_path / "b", script=b"#!python\nprint(2)\n")) == (
        Mismatch("widget-1.data/scripts/widget", "differs"),
    )
    assert is_installed(environment, wheel(tmp_path / "c", library=b"")) == (Mismatch("widget/_C.abi3.so", "differs"),)
    (site / "widget" / "extra.py").write_text("import os\n")
    (site / "widget" / "_C.abi3.so").unlink()
    assert set(is_installed(environment, sound)) == {Mismatch("widget/_C.abi3.so", "missing"), Mismatch("widget/extra.py", "foreign")}


def test_what_is_no_wheel_and_no_environment_is_refused(environment: Path, tmp_path: Path) -> None:
    """Neither a text nor a folder is compared."""
    text = tmp_path / "widget-1-py3-none-any.whl"
    text.write_text("hello")
    for bad in (text, tmp_path / "missing.whl"):
        with refusal("wheel-invalid"):
            is_installed(environment, bad)
    with refusal("environment-unusable"):
        is_installed(Path("/bin/false"), text)
