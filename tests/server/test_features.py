"""What vLLM's own parsers, structured output, prefix cache and drafts do on a real server, and how G4 judges them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.server.broken import HERE, WORDS
from tests.support.serving import (
    CACHED,
    DRAFTED,
    FLAGS,
    VARIABLES,
    _server,
    _toy,
    _vllm_python,
    launch,
)

from sparkwright.bench.server.client import ChatAnswer, Client
from sparkwright.bench.server.launch import Server
from sparkwright.core import strict_yaml
from sparkwright.gates.core.server_under_test import GateOptions, ServerUnderTest
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.generation import checks as generated
from sparkwright.gates.generation import gate as generation
from sparkwright.gates.generation.checks import GenerationPolicy

__all__ = ["_server", "_toy", "_vllm_python"]

pytestmark = pytest.mark.server

POLICY = strict_yaml.load(WORDS, GenerationPolicy)
#: A few prompts, and a long generation of as many tokens as the small server has room for.
SHORT = replace(
    POLICY, prompts=POLICY.prompts[:3], profiles={name: replace(kind, answers=0, deep=480) for name, kind in POLICY.profiles.items()}
)
#: A schema that a model of random numbers ends, too: its values are of a list.
CHOICES = {
    "type": "object",
    "properties": {"town": {"enum": ["Lisbon", "Oslo"]}, "urgent": {"type": "boolean"}},
    "required": ["town", "urgent"],
    "additionalProperties": False,
}


def asked(client: Client, text: str, **options: object) -> ChatAnswer:
    return client.chat([{"role": "user", "content": text}], max_tokens=600, **options)  # type: ignore[arg-type]  # as of `Client.chat`


def schema(value: Mapping[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "value", "schema": value, "strict": True}}


def test_structured_output_and_a_required_call_are_of_their_schema(server: Server) -> None:
    """vLLM holds random numbers to the schema; it does so for a call only if the tool is strict."""
    definition = generated.tool(strict=True)
    definition["function"] = {**msgspec.convert(definition["function"], dict), "parameters": CHOICES}

    answer = asked(server.client(), "Give the delivery as JSON.", response_format=schema(CHOICES))
    called = asked(server.client(), "Record the delivery.", tools=[definition], tool_choice="required")
    free = asked(server.client(), "Record the delivery.", tools=[generated.tool(strict=False)], tool_choice="auto")

    assert set(json.loads(answer.content)) == {"town", "urgent"}
    assert called.tool_calls
    assert {call.name for call in called.tool_calls} == {"record_delivery"}
    assert set(json.loads(called.tool_calls[0].arguments)) == {"town", "urgent"}
    assert free.tool_calls == (), "random text is no call"


def test_reasoning_is_separated_from_the_answer(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """The text is forced by a schema whose only value holds the end of reasoning."""
    flags = ("--reasoning-parser=qwen3", '--structured-outputs-config={"enable_in_reasoning":true}')
    with Server(launch(vllm_python, toy, *flags), tmp_path / "server.log") as server:
        answer = asked(server.client(), "When does it arrive?", response_format=schema({"enum": ["first</think>then"]}))

    assert (answer.reasoning.strip(), answer.content.strip()) == ('"first', 'then"')


def gate(vllm_python: Path, toy: Path, folder: Path, fault: Mapping[str, object], flags: Sequence[str]) -> dict[str, Check]:
    """Return the checks of G4 for a server of random numbers that the gate itself starts, and starts again, with *fault* in it."""
    plan = launch(vllm_python, toy)
    variables = {**VARIABLES, "PYTHONPATH": str(HERE / "faulty"), "SPARKWRIGHT_TEST_FAULT": json.dumps(fault)}
    options = GateOptions(python=plan.python, serve=toy, flag=(*FLAGS, *CACHED, *flags), variable=tuple(variables.items()))
    server = ServerUnderTest(options, {}, folder)
    try:
        result = generation.run(SHORT, server.client(), "random", relaunch=server.relaunched)
    finally:
        server.end()
    return {check.name: check for check in result}


def test_a_failed_long_generation_names_the_switch_that_decides(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """Drafts break the text after 210 tokens: the gate serves without graphs, then without drafts, and compares greedy text."""
    fault = {"fault": "repetition", "depth": 210, "drafts": 0}
    checks = gate(vllm_python, toy, tmp_path, fault, DRAFTED)

    deep = checks["deep-decode"]
    assert (deep.state, deep.reason) == ("fail", "deep-damage")
    assert "speculation decides: without it the tokens are sound" in deep.message
    assert {figure.value for figure in deep.figures} < {240.0, 300.0, 360.0}
    assert checks["speculation"].state == "pass", "answers of 200 tokens are sound, and the same without drafts"
    assert {path.name for path in tmp_path.iterdir()} >= {"without-graphs.log", "without-graphs-speculation.log", "without-speculation.log"}


def test_a_poisoned_prefix_cache_fails_the_long_generation(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """Blocks of another prompt are no ground for the text; short answers, which share no prefix, do not show it."""
    checks = gate(vllm_python, toy, tmp_path, {"fault": "poisoned-cache"}, ())

    assert checks["deep-decode"].reason == "deep-damage"
    assert checks["identical-reruns"].state == "pass"
