"""
`serve` starts what it says, tells what it is doing, and leaves nothing behind, however it ends.

The server is a stand-in (`tests.support.standin`); the real one is served in ``tests/server``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import endings
from tests.support.standin import Machine, _machine, _standin, alive, free_port

from sparkwright.core import config
from sparkwright.core.store import Store
from sparkwright.serving import held, run
from sparkwright.serving.asked import Asked
from sparkwright.serving.resolve import resolved
from sparkwright.serving.wish import Where, Wish

__all__ = ["_machine", "_standin"]


def test_it_serves_with_exactly_the_recipe_and_what_was_said_on_top(machine: Machine) -> None:
    """Flags of the recipe, replaced by those that were said; variables of both; nothing of the caller's that nobody named."""
    machine.environment |= {"VLLM_LOGGING_LEVEL": "DEBUG", "LD_LIBRARY_PATH": "x", "PYTHONPATH": ""}
    one = machine.start("toy-cpu", "--flag=--max-num-batched-tokens=4096", "--flag=--dtype", "--flag=float32", "--variable", "FOO=a b\n'c'")
    machine.until("serving")
    told = machine.told()
    assert told["argv"][1:] == [
        "serve", str(machine.model), "--served-model-name", "toy-cpu", "--host", "127.0.0.1", "--port", str(machine.port),
        "--max-model-len=1024", "--max-num-seqs=16", "--enforce-eager", "--max-num-batched-tokens=4096", "--dtype", "float32",
    ]  # fmt: skip
    assert told["environment"]["FOO"] == "a b\n'c'"
    assert told["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert told["environment"]["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_LOGGING_LEVEL" not in told["environment"]
    assert "LD_LIBRARY_PATH" not in told["environment"]
    one.send_signal(signal.SIGTERM)
    out, err = one.communicate(timeout=60)
    assert one.returncode == 0, err
    assert "VLLM_LOGGING_LEVEL of this shell does not reach the server" in err
    assert "nothing about it is proved" in err
    assert f"curl http://127.0.0.1:{machine.port}/v1/completions" in err
    assert "toy-cpu: Any small model" in out
    assert machine.gone()
    assert machine.state() == {}


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGHUP])
def test_a_request_to_stop_after_it_was_ready_is_a_success(by: signal.Signals, machine: Machine) -> None:
    """Nothing is left, and no record."""
    one = machine.start()
    machine.until("serving")
    one.send_signal(by)
    _, err = one.communicate(timeout=60)
    assert one.returncode == 0, err
    assert machine.gone()
    assert machine.state() == {}


@pytest.mark.parametrize("phase", ["loading", "serving"])
def test_what_was_started_to_ignore_interruptions_ends_by_sigterm(phase: str, machine: Machine) -> None:
    """With ``nohup … &`` neither Ctrl-C nor the end of the terminal is a request; SIGTERM is, in every phase."""
    one = machine.start(preexec=endings.ignored, **({"load": 600} if phase == "loading" else {}))
    machine.told()
    machine.until(phase)
    for number in (signal.SIGINT, signal.SIGHUP):
        one.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(1)
    assert machine.state()["phase"] == phase
    one.send_signal(signal.SIGTERM)
    _, err = one.communicate(timeout=20)
    assert one.returncode == (0 if phase == "serving" else 130), err
    assert machine.gone()
    assert machine.state() == {}


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_while_it_loads_is_an_interruption(by: signal.Signals, machine: Machine) -> None:
    """Exit 130, and nothing is left."""
    one = machine.start(load=600)
    machine.told()
    machine.until("loading")
    one.send_signal(by)
    _, err = one.communicate(timeout=60)
    assert one.returncode == 130, err
    assert machine.gone()
    assert machine.state() == {}


def test_a_request_to_stop_before_anything_was_started_starts_nothing(machine: Machine) -> None:
    """The environment is being asked, and does not answer: 130, and the question is withdrawn."""
    slow = machine.folder / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {machine.folder}/asked\nexec sleep 600\n")
    slow.chmod(0o755)
    one = machine.start("--python", slow)
    asked = machine.folder / "asked"
    until = time.monotonic() + 60
    while not (asked.exists() and asked.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.02)
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 130
    until = time.monotonic() + 10
    while alive(int(asked.read_text())):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert machine.state() == {}
    assert not machine.record.exists()


def test_who_asks_twice_does_not_wait(machine: Machine) -> None:
    """A server that ignores TERM has its grace; a second request ends it at once, with a child that left its session."""
    one = machine.start(deaf=True, stray=True)
    machine.until("serving")
    one.send_signal(signal.SIGTERM)
    machine.until("stopping")
    one.send_signal(signal.SIGTERM)
    _, err = one.communicate(timeout=15)
    assert one.returncode == 0, err
    assert machine.gone()


def test_kill_9_leaves_no_server_and_refuses_nobody(machine: Machine) -> None:
    """The keeper ends vLLM, and the next `serve` waits for that and starts."""
    one = machine.start()
    machine.until("serving")
    one.kill()
    one.wait()
    again = machine.start("--name", "again")
    machine.until("serving")
    assert machine.state()["name"] == "again"
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == 0
    assert machine.gone()


def test_a_second_serve_is_refused_and_told_of_the_first(machine: Machine) -> None:
    """It says pid, recipe, address and since when, and the first goes on."""
    one = machine.start("toy-cpu")
    machine.until("serving")
    second = machine.run("toy-cpu", "--port", str(free_port()), "--json")
    assert second.returncode == 1
    error = json.loads(second.stdout)["error"]
    assert error["reference"] == "serve-running"
    assert (error["pid"], error["recipe"], error["url"]) == (one.pid, "toy-cpu", f"http://127.0.0.1:{machine.port}")
    assert one.poll() is None
    assert machine.state()["phase"] == "serving"


def test_a_port_that_is_taken_names_its_holder(machine: Machine) -> None:
    """Nothing is started, and the holder's process is named."""
    with socket.create_server(("127.0.0.1", machine.port)):
        done = machine.run("--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["reference"]) == (1, "port-taken")
    assert any(f"process {os.getpid()}," in line for line in error["details"])
    assert not machine.record.exists()
    assert machine.state() == {}


@pytest.mark.parametrize(
    ("order", "words", "reference"),
    [
        ({"die": "loading"}, (), "server-died"),
        ({"say": "INFO Estimated CUDA graph memory: -35.17 GiB total", "load": 600}, (), "graph-memory-negative"),
        ({"health": 503}, ("--patience", "1"), "server-late"),
    ],
)
def test_a_server_that_does_not_come_up_says_why(
    order: dict[str, object], words: tuple[str, ...], reference: str, machine: Machine
) -> None:
    """Exit 1, the last lines, where the whole log is, and nothing is left."""
    done = machine.run(*words, "--json", **order)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["reference"]) == (1, reference), done.stderr
    log = Path(error["details"][-1].removeprefix("full log: "))
    assert "Initializing a V1 LLM engine" in log.read_text()
    if reference == "server-died":
        assert any("no such kernel" in line for line in error["details"])
    assert machine.gone()
    assert machine.state() == {}


def test_a_server_that_dies_while_it_serves_is_a_failure(machine: Machine) -> None:
    """Exit 1 with the last lines of its log."""
    one = machine.start()
    machine.until("serving")
    question = json.dumps({"model": "toy", "prompt": "die"}).encode()
    with pytest.raises(OSError, match=r".*"):
        urlopen(Request(f"http://127.0.0.1:{machine.port}/v1/completions", question, {"content-type": "application/json"}))
    _, err = one.communicate(timeout=60)
    assert one.returncode == 1
    assert "error: server-died: " in err
    assert "EngineDeadError: it was asked to" in err
    assert machine.gone()


def test_a_floor_that_cannot_be_kept_refuses_the_start(machine: Machine) -> None:
    """Whether the machine is too small for it, or other programs hold too much of it now."""
    done = machine.run("--floor", "4000", "--json")
    assert json.loads(done.stdout)["error"]["reference"] == "recipe-unfit"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    done = machine.run("--floor", f"{total * 0.9999:.4f}", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["reference"] == "memory-held"
    assert not machine.record.exists()


def test_a_machine_that_falls_below_its_floor_is_spared(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is ended before it is ready; a floor that no machine has, and a server that is said to need as much less, show it."""
    for name in ("SPARKWRIGHT_STATE_DIR", "SPARKWRIGHT_CACHE_DIR"):
        monkeypatch.setenv(name, machine.environment[name])
    told = {"STANDIN": json.dumps({"record": str(machine.record), "load": 600})}
    ready = resolved(Wish(model=str(machine.model), port=machine.port, floor=0, variables=told), Where(machine.python, config.root()))
    starved = replace(ready, floor=10**9, needs=-(10**9))
    with refusal("memory-low"), held.held() as lock:
        run.serve(starved, lock, Asked(), Store(machine.folder / "cache"), machine.folder / "log")
    assert held.read() is None
    assert not machine.record.exists() or machine.gone()


def test_a_dry_run_checks_everything_and_starts_nothing(machine: Machine) -> None:
    """It says the whole command line, and secrets are not in it."""
    done = machine.run("toy-cpu", "--dry-run", "--json", "--variable", "VLLM_API_KEY=geheim", "--variable", "HF_TOKEN=geheim")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert found["command"][1:6] == ["-P", "-m", "vllm.entrypoints.cli.main", "serve", str(machine.model)]
    assert found["variables"]["VLLM_API_KEY"] == "(set)"
    assert "geheim" not in done.stdout + done.stderr
    assert not machine.record.exists()


def test_the_environment_of_a_container_is_enough(machine: Machine) -> None:
    """MODEL, PORT and the rest become flags; quotes, blanks and line ends arrive as they are; options of the command line win."""
    machine.environment |= {
        "MODEL": str(machine.model), "PORT": "1", "GPU_MEMORY_UTIL": "0.5", "MAX_MODEL_LEN": "2048", "MAX_NUM_SEQS": "4",
        "TENSOR_PARALLEL_SIZE": "1", "SERVED_MODEL_NAME": "my model",
        "VLLM_EXTRA_ARGS": "--dtype 'bfloat 16'\n--chat-template \"a\nb $HOME\"", "VLLM_LOGGING_LEVEL": "INFO", "NCCL_DEBUG": "a\n\"b\"",
    }  # fmt: skip
    one = machine.start("--environment")
    machine.until("serving")
    told = machine.told()
    assert told["argv"][3:] == [
        "--served-model-name", "my model", "--host", "127.0.0.1", "--port", str(machine.port), "--gpu-memory-utilization=0.5",
        "--max-model-len=2048", "--max-num-seqs=4", "--dtype", "bfloat 16", "--chat-template", "a\nb $HOME",
    ]  # fmt: skip
    assert told["environment"]["VLLM_LOGGING_LEVEL"] == "INFO"
    assert told["environment"]["NCCL_DEBUG"] == 'a\n"b"'
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 0


def test_while_it_loads_it_says_what_it_does_and_how_long_that_took_before(machine: Machine) -> None:
    """With -v vLLM's own lines pass; the phases of a start are remembered and estimate the next one."""
    for number in range(2):
        one = machine.start("toy-cpu", "-v")
        machine.until("serving")
        if not number:
            assert machine.verb("serve", "--health").stdout.startswith("serving: ")
        one.send_signal(signal.SIGINT)
        _, err = one.communicate(timeout=60)
        assert one.returncode == 0, err
        assert "| INFO GPU KV cache size: 1,024 tokens" in err
        assert "ready after " in err
    kept = list((machine.folder / "cache" / "records" / "starts").glob("*.json"))
    assert len(kept) == 1
    starts = json.loads(kept[0].read_text())["starts"]
    assert len(starts) == 2
    assert {"start", "engine"} <= set(starts[0])
