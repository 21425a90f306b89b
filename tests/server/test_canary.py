"""The canary with the real vLLM, on the CPU: a server answers as it was recorded, and not as another model would."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from sparkwright.audit.report import AuditedWheel
from sparkwright.bench.server.server_process import Server
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.gates import logprobs
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Ladder, Verdict, passed
from sparkwright.gates.logprobs import LogprobsPolicy
from sparkwright.release import canary

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


def test_real_server_answers_as_recorded_and_not_as_another(server: Server, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The figures that are printed are those of the guide."""
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "logprobs.yaml", LogprobsPolicy)
    policy = replace(policy, texts=8, tokens=64, decode_texts=8, decode_prompt=24, decode_tokens=16)
    client = server.client()
    reference = logprobs.record(policy, client, ServerIdentity("a" * 64, "d" * 64, {}, ()))
    (tmp_path / "logprobs.json").write_bytes(msgspec.json.encode(reference))
    wheel = AuditedWheel("vllm-1-py3-none-any.whl", "c" * 64, 1, "vllm", "1", ("any",))
    verdict = Verdict("G5", "", wheel.sha256, "", (passed("candidate", "made up"),), "toy-cpu", model="d" * 64)
    canary.write(Store(tmp_path / "store"), tmp_path, Ladder("s", wheel, (verdict,)), tmp_path, "random")
    (path,) = tmp_path.glob("*.canary.json")
    (own,) = canary.read(path).values()

    began, before = time.monotonic(), client.metrics()
    assert [*canary.differences(own, client, ROOT, "toy-cpu")] == []
    after = client.metrics()
    names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    requests, read, written = (after[name] - before[name] for name in names)
    figures = {"seconds": time.monotonic() - began, "requests": requests, "read": read, "written": written, "bytes": path.stat().st_size}
    record_property("canary", figures)
    sys.stderr.write(f"{figures}\n")
    assert (requests, written) == (24, 8 * 64 + 16)
    # One that is sure of every token of the texts.
    rows = [(token, {**dict.fromkeys(logits, -12.0), token: -1e-3}) for token, logits in own.reference.rows]
    other = replace(own, reference=replace(own.reference, rows=rows))
    assert any("from the distributions" in line for line in canary.differences(other, client, ROOT, "toy-cpu"))
