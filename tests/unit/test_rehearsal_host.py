"""The script that runs a rehearsal on a GPU host: what it unpacks, begins, repeats and ends, while its parts arrive."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard
from tests.support import processes, standin, wheels

from sparkwright.bench.server.launch import LaunchPlan

SCRIPT = wheels.ROOT / "ci" / "rehearsal" / "host.py"
SAY = "from package import WORD; import tiny; print(tiny.__version__, WORD)"
STEP = "{root}/program/step.sh"
#: Which step of rehearse.sh a command is follows from its word behind {root}.
COMMANDS: list[dict[str, Any]] = [
    {"name": "train", "seconds": 60, "words": ["sh", STEP, "{root}", "learned", "date"]},
    {"name": "say", "seconds": 60, "words": ["sh", STEP, "{root}", "night", f'"$1"/environments/candidate/bin/python -c "{SAY}"'], "after": ["train"]},
    {"name": "fail", "seconds": 60, "words": ["sh", STEP, "{root}", "harness", "exit 3"], "after": ["train"], "gpu": 1, "every": True},
    # It asks to be spared, and its child leaves its session.
    {"name": "hang", "seconds": 1, "words": ["sh", STEP, "{root}", "lookup", "trap '' TERM; setsid sleep 600 & echo $! > child; sleep 600"], "alone": True},
    {"name": "twice", "seconds": 60, "words": ["sh", STEP, "{root}", "wide", "echo $$ >> second; test $(wc -l < second) = 2 || sleep 600"], "gpu": 1},
]


class Host:
    """A host with two GPUs, by its nvidia-smi, and a kit whose archives lie in several parts."""

    def __init__(self, folder: Path) -> None:
        self.base, self.kit = folder / "base", folder / "kit"
        self.variables = {**os.environ, "REHEARSAL": str(self.base), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        write(folder / "bin" / "nvidia-smi", "#!/bin/sh\necho GPU 0: a\necho GPU 1: b\n").chmod(0o755)
        write(self.kit / "host.py", SCRIPT.read_text().replace("GRACE, PATIENCE = 30, 60", "GRACE, PATIENCE = 1, 60"))
        shutil.copytree(Path(zstandard.__file__).parent, self.kit / "zstandard")
        environments = {"candidate": {"wheel": "dist/*.whl", "folders": ["sites/serve"]}, "stock": {"wheel": "stock/*.whl"}, "tool": {}, "harness": {"host": ["yaml*"]}}
        write(self.kit / "program/ci/rehearsal/2026.11.yaml", yaml.safe_dump({"environments": environments, "commands": COMMANDS}))
        write(self.kit / "program/step.sh", 'cd "$1" && eval "$3"\n')
        trees = {"model": ".", "sites": "sites.new", "stock": "stocktree", "candidate": "."}
        write(folder / "model/models/trained/config.json", "{}")
        write(folder / "sites/serve/package/__init__.py", "WORD = 'packed'\n")
        write(folder / "stock/vllm/vllm-rs", "")
        wheels.plain(folder / "candidate" / "dist", "tiny", "1")
        listed, data = [], b""
        for name, target in trees.items():
            packed = subprocess.run(["tar", "c", "-C", str(folder / name), "."], capture_output=True, check=True).stdout
            archive = zstandard.compress(packed)
            listed.append({"name": name, "target": target, "offset": len(data), "size": len(archive)})
            data += archive
        self.parts = {f"part-{number:02d}": data[begin : begin + 300] for number, begin in enumerate(range(0, len(data), 300))}
        stated = [{"name": name, "size": len(part), "sha256": hashlib.sha256(part).hexdigest()} for name, part in self.parts.items()]
        write(self.kit / "parts.json", json.dumps({"stock": "vllm-1-py3-none-any.whl", "generator": "vllm-rs-1", "archives": listed, "parts": stated}))

    def run(self, *words: object) -> str:
        script = self.base / "kit" / "host.py"
        command = [sys.executable, str(script if script.exists() else self.kit / "host.py"), *map(str, words)]
        return subprocess.run(command, env=self.variables, capture_output=True, text=True, check=False, timeout=120).stdout

    def take(self, names: list[str]) -> str:
        for name in names:
            (self.kit / name).write_bytes(self.parts[name])
        return subprocess.run([sys.executable, str(self.kit / "host.py"), "take", str(self.kit)], env=self.variables, capture_output=True, text=True, check=False).stdout

    def supervisors(self) -> list[int]:
        entry = f"REHEARSAL={self.base}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if b"supervisor" in path.read_bytes().split(b"\0") and entry in (path.parent / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def results(self) -> dict[str, Any]:
        return {path.stem: json.loads(path.read_text()) for path in (self.base / "root" / "results").glob("*.json")}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for name in COMMANDS:
        made.run("drop", name["name"])
    processes.until(lambda: not list((made.base / "state").glob("drop.*")))
    for pid in made.supervisors():
        os.kill(pid, signal.SIGKILL)


def test_models_are_trained_while_parts_arrive_and_the_rest_runs_when_all_are_there(host: Host) -> None:
    """A damaged part is asked for again; a step that is late ends with all that it started; a failed one is shown once; none runs beside one on every GPU."""
    first, *others = host.parts
    host.parts[first], right = b"damaged", host.parts[first]
    assert "copy it again" in host.take([first])
    host.parts[first] = right
    assert f"lacking: {others[0]}" in host.take([first])
    processes.until(lambda: "train" in host.results())
    assert "no step nonsense" in host.run("go", "say", "nonsense")
    host.run("go", "say", "fail", "hang")
    assert "say                      waits" in host.run("wait", 1)
    assert host.take(others) == "lacking: nothing\n"
    assert "--- fail" in host.run("wait", 100, "fail")
    processes.until(lambda: len(host.results()) == 4)
    ended = {name: (each["status"], each["late"]) for name, each in host.results().items()}
    assert ended == {"train": (0, False), "say": (0, False), "fail": (3, False), "hang": (-9, True)}
    assert (host.base / "root/results/say.log").read_text() == "1 packed\n"
    assert not standin.alive(int((host.base / "root/child").read_text()))
    log = (host.base / "state" / "supervisor.log").read_text()
    order = [log.index(f"step {event}") for event in ("say ended", "fail begins", "fail ended", "hang begins")]
    assert order == sorted(order)
    out = host.base / "back"
    out.mkdir()
    host.run("collect", out)
    shutil.unpack_archive(out / "results.tar.gz.00", out, "gztar")
    assert {path.stem for path in out.glob("root/results/*.json")} == set(ended)


def test_supervisor_that_was_killed_runs_again_what_has_no_result(host: Host) -> None:
    """What it had started is ended first; `again` forgets a result."""
    host.take(list(host.parts))
    host.run("go", "twice")
    marker = host.base / "root" / "second"
    processes.until(lambda: marker.exists() and marker.read_text().strip())
    (supervisor,) = host.supervisors()
    os.kill(supervisor, signal.SIGKILL)
    orphan = int(marker.read_text())
    assert standin.alive(orphan)
    host.run("wait", 100, "twice")
    processes.until(lambda: "twice" in host.results())
    assert (standin.alive(orphan), host.results()["twice"]["status"]) == (False, 0)
    marker.unlink()
    assert "no step tiwce" in host.run("again", "twice", "tiwce")
    assert host.results()["twice"]["status"] == 0, "nothing is forgotten"
    host.run("again", "twice@0")
    processes.until(lambda: marker.exists() and marker.read_text().strip())
    assert "twice" not in host.results()
    host.run("drop", "twice")
    processes.until(lambda: not standin.alive(int(marker.read_text())))


def test_a_server_carries_the_mark_by_which_its_step_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It keeps no other variable of its caller."""
    [name] = re.findall(r'^MARK = "(\w+)"$', SCRIPT.read_text(), re.MULTILINE)
    monkeypatch.setenv(name, "a step")
    assert LaunchPlan(Path(sys.executable), tmp_path).environment()[name] == "a step"
