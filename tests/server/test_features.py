"""What vLLM's own parsers, structured output, prefix cache and drafts do on a real server, and how G4 judges them."""

import json
from collections.abc import Mapping
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
    launch,
)

from sparkwright.bench.server.client import ChatAnswer, Client
from sparkwright.bench.server.server_process import Server
from sparkwright.core import strict_yaml
from sparkwright.gates import generation, text_checks as generated
from sparkwright.gates.core.server_under_test import GateOptions, ServerUnderTest

pytestmark = pytest.mark.server

POLICY = strict_yaml.load(WORDS, generated.GenerationPolicy)
#: Few and short answers before a generation of 256 tokens. Its recomputation is the same to 0.001 nat;
#: what two layers of random numbers make of a wrong context is as near as 0.06 nat.
SHORT = replace(
    POLICY,
    tokens=96,
    prompts=dict([*POLICY.prompts.items()][:2]),
    profiles={name: replace(kind, answers=0) for name, kind in POLICY.profiles.items()},
    deep=replace(POLICY.deep, kl_max=0.04),
)
#: Answers of a model of random numbers, which may write white space to the last token.
SEEDS = 6
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

    answers = [asked(server.client(), "Give the delivery as JSON.", response_format=schema(CHOICES), temperature=1.0, seed=seed) for seed in range(SEEDS)]
    calls = [asked(server.client(), "Record the delivery.", tools=[definition], tool_choice="required", temperature=1.0, seed=seed) for seed in range(SEEDS)]
    free = asked(server.client(), "Record the delivery.", tools=[generated.tool(strict=False)], tool_choice="auto")

    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    called = [call for answer in calls if answer.finish_reason != "length" for call in answer.tool_calls]
    assert ended
    assert called
    assert all(set(json.loads(answer.content)) == {"town", "urgent"} for answer in ended)
    assert {(call.name, *sorted(json.loads(call.arguments))) for call in called} == {("record_delivery", "town", "urgent")}
    assert free.tool_calls == (), "random text is no call"


def test_reasoning_is_separated_from_the_answer(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """The text is forced by a schema whose only value holds the end of reasoning."""
    flags = ("--reasoning-parser=qwen3", '--structured-outputs-config={"enable_in_reasoning":true}')
    with Server(launch(vllm_python, toy, *flags), tmp_path / "server.log") as server:
        answer = asked(server.client(), "When does it arrive?", response_format=schema({"enum": ["first</think>then"]}))

    assert (answer.reasoning.strip(), answer.content.strip()) == ('"first', 'then"')


@pytest.mark.timeout(900)
def test_drafts_that_damage_a_long_generation_are_found(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """They break the text after 110 tokens; a launch without them is sound."""
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"fault": "repetition", "depth": 110, "drafts": 0}))
    variables = {**VARIABLES, "PYTHONPATH": str(HERE / "faulty"), "SPARKWRIGHT_TEST_FAULT_FILE": str(fault)}
    options = GateOptions(python=vllm_python, serve=toy, flag=(*FLAGS, *CACHED, *DRAFTED), variable=tuple(variables.items()))
    server = ServerUnderTest(options, {}, tmp_path)
    try:
        drafted = {check.name: check for check in generation.run(SHORT, server.client(), "random")}["deep-decode"]
        with server.without_drafts() as plain:
            sound = {check.name: check for check in generation.run(SHORT, plain, "random")}["deep-decode"]
    finally:
        server.end()

    assert (drafted.state, drafted.reason, sound.state) == ("fail", "deep-damage", "pass")
    assert drafted.figures[0].value in {128, 160, 192}
    assert (tmp_path / "without-drafts.log").exists()
