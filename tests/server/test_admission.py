"""What `serve` admits, vLLM's own checks admit, also after each remedy that is printed; and what it refuses by vLLM's rules, vLLM refuses."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.serving import HERE, VARIABLES
from tests.unit.test_memory import MACHINES, SERVERS, applied

from sparkwright.core import memory

pytestmark = [pytest.mark.server]


def described(server: memory.ServerMemory, machine: memory.MachineMemory) -> dict[str, float]:
    """Return what vLLM is told of *server* by its flags, and of *machine* by its readings."""
    settled = server.settled(machine)
    return {
        "total": machine.total * memory.GIB, "free": machine.free * memory.GIB, "share": settled.share or 0.0, "cache": (settled.cache or 0.0) * memory.GIB,
        "length": max(1, settled.length), "token": settled.shape.token,
    }  # fmt: skip


def asked(python: Path, servers: list[dict[str, float]]) -> list[str]:
    """Return what vLLM says against each of *servers*."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("VLLM_SOURCES", ""), **VARIABLES}
    command: list[Any] = [python, "-W", "ignore", HERE / "admission.py", json.dumps(servers)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_every_remedy_starts_in_vllm_and_its_own_refusals_are_known(vllm_python: Path) -> None:
    """From each refusal of each machine; states of recurrent layers are left out, as the model that vLLM is asked about has none."""
    admitted: dict[str, dict[str, float]] = {}
    refused: dict[str, dict[str, float]] = {}
    for name, machine in MACHINES.items():
        for case, plain in SERVERS.items():
            server = replace(plain, floor=machine.floor(), shape=memory.CacheShape(plain.shape.token))
            references = {reference for reference, _ in memory.refusals(server, machine)}
            if not references:
                admitted[f"{case}, {name}"] = described(server, machine)
            elif references & {"memory-utilization", "cache-short"}:
                refused[f"{case}, {name}: {sorted(references)}"] = described(server, machine)
            for remedy in memory.remedies(server, machine):
                changed, there = applied(server, machine, remedy.text)
                admitted[f"{case}, {name}: {remedy.text}"] = described(changed, there)
    answers = dict(zip([*admitted, *refused], asked(vllm_python, [*admitted.values(), *refused.values()]), strict=True))
    assert len(admitted) > 40
    assert {name: answers[name] for name in admitted if answers[name]} == {}
    # A share that leaves no floor is our rule alone, where so much is free.
    ours = {name for name in refused if not answers[name]}
    assert all(refused[name]["share"] * refused[name]["total"] <= refused[name]["free"] and "cache-short" not in name for name in ours), ours
    assert any("on startup is less than desired GPU memory utilization" in answers[name] for name in refused)
    assert any("To serve at least one request with the model's max seq len" in answers[name] for name in refused)


def test_a_pinned_cache_without_a_share_was_refused_by_vllm(vllm_python: Path) -> None:
    """The flag that the program proposed on a Spark: vLLM asks for 0.92 of 121.7 GiB, 112.0, and 110.4 are free."""
    spark = memory.SPARKS["128 GB"]
    server = memory.ServerMemory(20, cache=20, share=0.92, length=4096, shape=memory.CacheShape(10240))
    (message,) = asked(vllm_python, [described(server, spark)])
    assert "(110.4/121.7 GiB) on startup is less than desired GPU memory utilization (0.92, 111.96 GiB)" in message
