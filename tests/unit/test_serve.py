"""
Servers are started clean, watched, and never left behind, their logs are read, an environment is compared with its wheel, and machines that
serve together find each other, compare themselves and end together.

The programs that are started here stand in for vLLM in one thing alone: how they run, listen, print and die. The real server is tested
in ``tests/server``.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from tests.client.world import wheel
from tests.refusals import refusal
from tests.support import installers, processes, standin
from tests.support.standin import Machine, free_port, model as make_model

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import launch, peers, server_log, server_process
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.wheel_identity import mismatches, version
from sparkwright.core import process

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

Make = Callable[..., launch.LaunchPlan]


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Make:
    """Return what writes a program and how it is started."""

    def plan(*, say: str = "ready", before: str = "", model: str = "toy", health: int = 200, **changes: object) -> launch.LaunchPlan:
        folder = tmp_path / "modules" / "vllm" / "entrypoints" / "cli"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main.py").write_text(PROGRAM.format(say=say, before=before, model=model, health=health))
        variables = {"PYTHONPATH": str(tmp_path / "modules"), "LANG": ""}
        plain = launch.LaunchPlan(Path(sys.executable), tmp_path / "model", (), variables, "toy", 100, grace=0.5)
        return msgspec.structs.replace(plain, **changes)

    return plan


def gone(processes: list[psutil.Process]) -> bool:
    """Wait until none of *processes* runs."""
    _, left = psutil.wait_procs(processes, timeout=60)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def test_server_runs_inside_its_block_with_the_variables_of_its_plan(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_NVFP4_GEMM_BACKEND", "LD_LIBRARY_PATH", "VLLM_ATTENTION_BACKEND", "PYTHONDONTWRITEBYTECODE", "LANG"):
        monkeypatch.setenv(name, "stray")
    plan = make()
    expected = plan.environment()
    with server_process.Server(plan, tmp_path / "log") as server:
        assert (server.failure, server.guard(), server.client().max_model_len()) == ("", True, 64)
        environment = json.load(urlopen(f"{server.url}/environment"))
        left = server.processes()
    assert (len(left), gone(left), (tmp_path / "log").read_text()[:5]) == (2, True, "ready")
    assert {name: environment.get(name) for name in expected} == {**expected, **launch.ALWAYS}
    assert set(environment) - set(expected) <= {"LC_CTYPE", "PWD", "SHLVL", "_"}
    assert "LANG" not in expected


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"before": "sys.exit(3)"}, "server-died"),
        ({"before": "time.sleep(600)", "timeout": 1}, "server-late"),
        ({"model": "other", "timeout": 3}, "server-late"),
        ({"health": 503, "timeout": 3}, "server-late"),
        ({"before": "print('x' * 5000)"}, "log-unreadable"),
        ({"kept_free": 1_000_000_000}, "memory-low"),
    ],
)
def test_server_that_may_not_serve_is_ended(
    case: dict[str, object], reason: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "LARGEST", 4000)
    with server_process.Server(make(**case), tmp_path / "log") as server:
        assert (bool(server.failure), server.reason) == (True, reason), server.failure
        processes.until(lambda: not server.running)


def test_memory_is_watched_while_a_gate_waits_for_an_answer(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate asks for hours and looks at nothing else meanwhile."""
    with server_process.Server(make(kept_free=1), tmp_path / "log") as server:
        monkeypatch.setattr(process, "available_megabytes", lambda: 0)
        processes.until(lambda: not server.running)
        assert (bool(server.failure), server.reason) == (True, "memory-low")


@pytest.mark.parametrize(("victim", "reason"), [("server", "server-died"), ("supervisor", ""), ("all", "memory-low")])
def test_no_process_outlives_the_server_or_its_supervisor(victim: str, reason: str, make: Make, tmp_path: Path) -> None:
    with server_process.Server(make(grace=90 if victim == "all" else 0.5), tmp_path / "log") as server:
        left, begin = server.processes(), time.monotonic()
        if victim == "all":
            server.end("memory-low", "1 MB is available", b"k")
            assert time.monotonic() < begin + 60
        elif victim == "server":
            left[0].kill()
        else:
            os.kill(left[0].ppid(), signal.SIGKILL)
            server.stop()
            with contextlib.suppress(psutil.NoSuchProcess):  # it is nobody's child any more, and may have ended by itself
                left.pop().kill()
        assert gone(left)
        processes.until(lambda: not server.guard())
        assert server.reason == reason


GATE = """
import sys, time
from pathlib import Path
import msgspec
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.server_process import Server
plan = msgspec.json.decode(sys.stdin.read(), type=LaunchPlan, dec_hook=lambda kind, value: kind(value))
with Server(plan, Path(sys.argv[1])) as server:
    print(*(process.pid for process in server.processes()), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_a_gate_that_is_killed(by: signal.Signals, make: Make, tmp_path: Path) -> None:
    gate = subprocess.Popen(
        [sys.executable, "-c", GATE, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=processes.heard,  # noqa: PLW1509  system calls, no lock
    )  # fmt: skip
    assert gate.stdin
    assert gate.stdout
    gate.stdin.write(msgspec.json.encode(make(), enc_hook=str))
    gate.stdin.close()
    left = [psutil.Process(int(pid)) for pid in gate.stdout.readline().split()]
    assert len(left) == 2
    gate.send_signal(by)
    gate.wait()
    gate.stdout.close()
    assert gone(left)


def widget(folder: Path, module: bytes = b"VALUE = 1\n", library: bytes = b"\x7fELF library") -> Path:
    """Write a wheel with a module and a library."""
    made = wheel("widget", files={"widget/part.py": module, "{data}/platlib/widget/_C.abi3.so": library})
    folder.mkdir()
    (folder / made.name).write_bytes(made.data)
    return folder / made.name


@pytest.fixture(name="installed")
def _installed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a wheel, the Python of an environment that it is installed in, and the folder of its packages."""
    python, sound = installers.environment(tmp_path / "environment"), widget(tmp_path / "sound")
    subprocess.run([*installers.install("uv", python), "--offline", sound], check=True)
    return sound, python, next(python.parents[1].glob("lib/python3.*/site-packages"))


def test_environment_holds_exactly_its_wheel(installed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Of a wheel or an environment that is none, nothing is said."""
    sound, environment, site = installed
    (site / "widget" / "__pycache__").mkdir(exist_ok=True)
    (site / "widget" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"compiled")
    assert (version(environment, "widget"), mismatches(environment, sound)) == ("1.0", {})
    assert mismatches(environment, widget(tmp_path / "a", module=b"VALUE = 2\n")) == {"widget/part.py": "differs"}
    longer = widget(tmp_path / "b", library=b"\x7fELF library" + bytes(1 << 21))
    assert list(mismatches(environment, longer).values()) == ["differs"]
    (site / "widget" / "_C.abi3.so").rename(site / "widget" / "extra.so")
    assert set(mismatches(environment, sound).values()) == {"missing", "foreign"}
    for path in (Path(__file__), tmp_path / "missing.whl"):
        with refusal("wheel-invalid"):
            mismatches(environment, path)
    programs = [Path("/usr/bin", name) for name in ("false", "true", "echo", "yes")]
    for python in (*programs, tmp_path / "missing", environment):
        with refusal("environment-unusable"):
            version(python, "absent")


#: What may happen to an environment at the start of its Python → what is said of it, and of which file.
STARTUPS: dict[str, tuple[dict[str, str], str, str]] = {
    "a folder and a harmless line": ({"more.pth": "/usr/share\nimport sys; sys.flags\n"}, "", ""),
    "a .pth that rewrites the package": ({"evil.pth": "import widget.part; widget.part.VALUE = 2\n"}, "widget/part.py", "before anything imports it"),
    "sitecustomize": ({"sitecustomize.py": "import widget.part; widget.part.VALUE = 2\n"}, "widget/part.py", "before anything imports it"),
    "a hook": (
        {"evil.pth": "import evil\n", "evil.py": """
import importlib.machinery, sys
class Loader(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        return super().get_data(path).replace(b"1", b"2")
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if name == "widget.part":
            spec.loader = Loader(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder)
"""}, "widget/part.py", "Loader imports it",
    ),
    "another folder": ({"evil.pth": "import sys; sys.path.insert(0, '{site}/other')\n", "other/widget/__init__.py": ""}, "widget/__init__.py", "is imported for it"),
    "a changed import": (
        {"evil.pth": "import builtins; builtins.__import__ = lambda *words, old=builtins.__import__, **more: old(*words, **more)\n"}, "import", "is replaced",
    ),
    "a thread": ({"evil.pth": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"}, "import", "thread"),
}  # fmt: skip


@pytest.mark.parametrize("startup", STARTUPS)
def test_environment_that_rewrites_its_wheel_at_the_start_is_noticed(startup: str, installed: tuple[Path, Path, Path]) -> None:
    """Every file of the wheel is there, and something else is imported."""
    sound, environment, site = installed
    files, name, says = STARTUPS[startup]
    for file, text in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text.replace("{site}", str(site)))
    if startup == "sitecustomize":
        # Debian's own one comes before that of an environment, which is not run then.
        origin = [str(environment), "-c", "import sitecustomize; print(sitecustomize.__file__)"]
        if str(site) not in subprocess.run(origin, capture_output=True, text=True, check=True).stdout:
            pytest.skip("this Python has a sitecustomize of its own")
    seen = mismatches(environment, sound)
    assert says in seen.get(name, ""), seen
    assert bool(name) == bool(seen)


def test_compiled_file_with_other_code_than_its_source_is_noticed(installed: tuple[Path, Path, Path]) -> None:
    """Python trusts the time and the size that a compiled file states of its source; one that an installer made is sound."""
    sound, environment, site = installed
    module = site / "widget" / "part.py"
    compiling = [str(environment), "-c", f"import py_compile; print(py_compile.compile({str(module)!r}))"]
    state = module.stat()
    for text, seen in (("VALUE = 1\n", {}), ("VALUE = 2\n", {"widget/part.py": "other code is imported"})):
        for content in (text, "VALUE = 1\n"):
            module.write_text(content)
            os.utime(module, ns=(state.st_atime_ns, state.st_mtime_ns))
            if content == text:
                subprocess.run(compiling, check=True, stdout=subprocess.DEVNULL)
        assert mismatches(environment, sound) == seen


# Logs of any size and shape.


CHOSEN = server_log.LogPattern("for NVFP4 GEMM", r"Using (?P<value>\w+) for NVFP4 GEMM")
BOTH = {"chosen": CHOSEN, "size": server_log.LogPattern("KV cache size", r"KV cache size: (?P<value>[\d,]+) tokens")}
LINE = "(Worker pid=7) INFO 11-21 22:31:50 [__init__.py:1303] Using MarlinNvFp4LinearKernel for NVFP4 GEMM\n"


def test_line_without_end_takes_little_memory_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(LINE.rstrip().encode() + b" " + b"x" * 40_000_000 + b"\n" + LINE.encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = server_log.scan(tmp_path / "log", BOTH)["chosen"]
    assert (lines.count, lines.values) == (2, {"MarlinNvFp4LinearKernel": 2})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000, "kilobytes"


@pytest.mark.parametrize(
    "make",
    [
        lambda log: log.write_bytes(LINE.encode() + b"\0" * 100), lambda log: log.write_bytes(b" " * 1001), os.mkfifo, Path.mkdir, Path.exists,
        lambda log: log.symlink_to("/dev/zero"),
    ],
    ids=["hole", "large", "pipe", "folder", "missing", "device"],
)  # fmt: skip
def test_file_that_is_no_log_is_refused(make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "LARGEST", 1000)
    make(tmp_path / "log")
    with pytest.raises(ServerInvalid, match="log-unreadable"):
        server_log.scan(tmp_path / "log", BOTH)


# Machines that serve together.

FIRST = peers.Statement("10.0.0.1", 0, "2026.11.1, aa", "bb", ("--max-model-len=64",), 9000, rdma=True, speed=200.0)
SECOND = replace(FIRST, address="10.0.0.2", rank=1)
HERE = "127.0.0.1"
ROOT = Path(__file__).parents[2]


def test_machine_that_does_not_come_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE", 0.3)
    port = free_port()
    with refusal("peer-missing", match="1 of 2 machines are there"):
        peers.meet(replace(FIRST, address=HERE), 2, HERE, port)
    with refusal("peer-missing", match="1 of 2 machines are there"):
        peers.meet(SECOND, 2, HERE, port)
    with socket.create_server((HERE, port)), refusal("peer-missing", match="1 of 2 machines are there"):
        peers.meet(replace(FIRST, address=HERE), 2, HERE, port)


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"release": "2026.11.2, ab"}, "release at 10.0.0.2: 2026.11.2, ab"),
        ({"model": "cc"}, "model at 10.0.0.2: cc"),
        ({"mtu": 1500}, "mtu at 10.0.0.2: 1500"),
        ({"rdma": False}, "rdma at 10.0.0.2: False"),
        ({"rank": 2}, "--node-rank of 10.0.0.2: 2"),
        ({"rank": 0}, "--node-rank of 10.0.0.2: 0"),
    ],
)
def test_machines_that_differ_do_not_serve_together(change: dict[str, object], detail: str) -> None:
    peers.compare([FIRST, SECOND], 2)
    with refusal("peers-differ", says=detail):
        peers.compare([FIRST, replace(SECOND, **change)], 2)


def test_link_far_below_what_its_interfaces_state_is_refused() -> None:
    """200 Gb/s are 25 GB/s. An interface that states no speed is not judged."""
    peers.judge(1.3, [FIRST, SECOND])
    with refusal("link-slow", match=r"1\.100 GB/s, and its interfaces state 25\.0"):
        peers.judge(1.1, [FIRST, SECOND])
    peers.judge(0.001, [FIRST, replace(SECOND, speed=0.0)])


def test_torch_that_is_not_there_measures_nothing(tmp_path: Path) -> None:
    with refusal("link-failed", match="over 2 machines", says="No module named 'torch'"):
        peers.measure(standin.environment(tmp_path / "venv"), FIRST, 2, HERE, free_port(), {})


def test_model_that_differs_is_said_on_both_machines(tmp_path: Path, standin: Path) -> None:
    """Before torch or the model is loaded."""
    machines = [Machine(tmp_path / name, standin) for name in ("first", "second")]
    config = machines[1].model / "config.json"
    config.write_text(config.read_text() + " ")
    words = ("--nodes=2", f"--node-address={HERE}", f"--node-port={free_port()}", "--flag=--gpu-memory-utilization=0.5")
    try:
        first = machines[0].start(*words)
        machines[1].start(*words, f"--join={HERE}")
        for machine in machines:
            _, said = machine.started[0].communicate(timeout=120)
            assert machine.started[0].returncode == 1
            assert "peers-differ" in said
            assert f"model at {HERE}: {model_digest(machines[1].model)}" in "".join(said.split("\n")).replace("    ", "")
        assert first.returncode == 1
    finally:
        for machine in machines:
            machine.close()


@pytest.mark.parametrize("lost", [True, False])
def test_server_of_a_gate_meets_the_other_machine_and_ends_with_it(lost: bool, tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `serve` does; and the other machine's part ends with it. Only the link is not measured, as no torch is here."""
    monkeypatch.setattr(peers, "measure", lambda *_: 1.0)
    model, port = make_model(tmp_path / "toy"), free_port()
    machines = peers.Machines(2, HERE, port=port)
    recipe = replace(recipes.load(ROOT, "toy-cpu"), nodes=2)
    plan = recipes.launch(recipe, "0.33.0", standin, model, variables={"VLLM_HOST_IP": HERE})
    assert recipes.launch(recipe, "0.33.0", standin, model, words=("--distributed-executor-backend=ray",)).machines is None
    with refusal("usage", match="the address of this one is missing"):
        recipes.launch(recipe, "0.33.0", standin, model)
    second = replace(machines, join=HERE, rank=1)
    joined: list[tuple[list[socket.socket], tuple[str, ...]]] = []
    words = ("--node-rank=1", "--headless", "--gpu-memory-utilization=0.3", "--max-model-len=64")

    def join() -> None:
        # A stranger who speaks HTTP to the port is told nothing.
        processes.until(lambda: socket.socket().connect_ex((HERE, port)) == 0)
        with socket.create_connection((HERE, port), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            joined.append(peers.gather(second, standin, model, words, {}))
            assert stranger.recv(100) == b""

    other = threading.Thread(target=join)
    other.start()
    with server_process.Server(replace(plan, machines=machines, variables={}, name="toy"), tmp_path / "log") as server:
        other.join(20)
        ((link,), adopted) = joined[0]
        assert server.guard()
        # The arguments are the first one's, but for the memory and the place.
        assert set(words[:3]) <= set(adopted)
        assert "--max-model-len=1024" in adopted
        if lost:
            link.close()
            processes.until(lambda: not server.guard())
            assert (server.reason, "another machine" in server.failure) == ("server-died", True)
    if not lost:
        assert link.recv(1) == b""
        link.close()
