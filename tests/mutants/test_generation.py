"""Mutants of servers: one real server is made wrong in one way after the other (tests/server/faulty), and each dies at G4 or G7."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.mutants.conftest import Kill
from tests.server.broken import ROOT, WORDS, Broken

from sparkwright.core import strict_yaml
from sparkwright.gates import generation, soak
from sparkwright.gates.core.verdict import Check, passed
from sparkwright.gates.soak import SoakPolicy
from sparkwright.gates.text_checks import GenerationPolicy

# Training the model is set up for the first test.
pytestmark = [pytest.mark.mutants, pytest.mark.server, pytest.mark.timeout(900)]

POLICY = strict_yaml.load(WORDS, GenerationPolicy)
SOAK = strict_yaml.load(ROOT / "ci" / "gates" / "soak.yaml", SoakPolicy)

#: What is wrong → the fault, its options, and a check that must be among those that notice.
MUTANTS: Mapping[str, tuple[str, dict[str, object], str]] = {
    "one token again and again": ("repetition", {}, "answers"),
    "three tokens in turn": ("loop", {"period": 3}, "answers"),
    "forty tokens in turn": ("loop", {"period": 40, "token": 300}, "answers"),
    "output of a layer scaled by 8": ("wrong-scale", {"factor": 8}, "answers"),
    # vLLM's counter of requests with NaN logits never goes back, so these come after all others of G4.
    "NaN in 2 % of the rows of logits": ("nan-logits", {"rate": 0.02}, "corrupted-requests"),
    "NaN logits": ("nan-logits", {}, "corrupted-requests"),
}
#: What the answers to short prompts do not show.
HIDDEN: Mapping[str, tuple[str, dict[str, object], str]] = {
    "deep-decode garbage, after 210 tokens": ("random-tokens", {"rate": 1, "depth": 210}, "deep-decode"),
    "damage from 520 tokens of context on": ("repetition", {"longer": 520}, "context-600"),
}
SHORT = replace(
    SOAK, seconds=30, interval=3, sample=0.25, growth=20_000, least=3, drain=60,
    load=replace(
        SOAK.load, concurrencies=(1, 4, 8), prompts=(16, 100, 400), answers=(8, 32, 96), prefix=64, patience=1, aborted=0.3, bad=0.1
    ),
)  # fmt: skip


@pytest.fixture(scope="module", name="sound")
def _sound(broken: Broken) -> tuple[Check, ...]:
    """Return what the gate says of the server before it is broken."""
    return generation.run(POLICY, broken.client(), "learnt", quick=True)


def named(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize("mutant", HIDDEN)
def test_damage_that_short_answers_do_not_show_dies(kill: Kill, broken: Broken, mutant: str) -> None:
    """The answers to the prompts all pass."""
    fault, options, name = HIDDEN[mutant]
    # Without a recipe no chats are asked, and nothing is drafted.
    sound = generation.run(POLICY, broken.client(), "learnt")
    with broken.fault(fault, **options):
        checks = generation.run(POLICY, broken.client(), "learnt")

    kill(mutant=mutant, gate="G4", sound=sound, mutant_checks=checks)
    assert named(checks)[name].state == "fail"
    assert named(checks)["answers"].state == "pass"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_server_that_is_wrong_in_one_way_dies(kill: Kill, broken: Broken, sound: tuple[Check, ...], mutant: str) -> None:
    """The check that is made for the fault fails."""
    fault, options, name = MUTANTS[mutant]
    with broken.fault(fault, **options):
        checks = generation.run(POLICY, broken.client(), "learnt", quick=True)

    kill(mutant=mutant, gate="G4", sound=sound, mutant_checks=checks)
    assert named(checks)[name].state == "fail"


def again(broken: Broken, rerun: bool = True) -> dict[str, Any]:
    """Return the gates after the load: G4, less the counter that the mutants with NaN have raised for good, and a stand-in for G5."""

    def words() -> tuple[Check, ...]:
        return tuple(check for check in generation.run(POLICY, broken.client(), "learnt", quick=True) if check.name != "corrupted-requests")

    stand_in = (passed("reference", "as before"),)
    return {"words": words if rerun else lambda: stand_in, "distributions": lambda: stand_in}


@pytest.fixture(scope="module", name="soaked")
def _soaked(broken: Broken, sound: tuple[Check, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, ...]:
    """Return what the soak gate says of the sound server; the kernel's log is an empty file, as this machine's may not be read."""
    folder = tmp_path_factory.mktemp("soak")
    (folder / "kmsg").touch()
    checks = soak.run(SHORT, broken.client(), processes=broken.processes, **again(broken), kernel=folder / "kmsg")
    figures = {figure.name: figure.value for figure in named(checks)["requests"].figures}
    assert min(figures["aborted"], figures["refused"]) > 0
    return checks


#: What is wrong under load → the fault, its options, whether the words are asked for again, and the check that must notice.
LOADED: Mapping[str, tuple[str, dict[str, object], bool, str]] = {
    "memory that grows": ("leak", {"kilobytes": 256}, False, "memory-growth"),
    "one token again and again, after 400 steps": ("repetition", {"after": 400}, True, "words-after"),
    "three tokens in turn, after 400 steps": ("loop", {"after": 400}, True, "words-after"),
    # Comes last, as nothing is left of the server.
    "the engine crashes": ("crash", {"after": 400}, True, "restarts"),
}


@pytest.mark.parametrize("mutant", LOADED)
def test_what_goes_wrong_under_load_dies(kill: Kill, broken: Broken, soaked: tuple[Check, ...], tmp_path: Path, mutant: str) -> None:
    """A fault that a fresh server does not show is found during or after the load."""
    fault, options, rerun, name = LOADED[mutant]
    (tmp_path / "kmsg").touch()
    with broken.fault(fault, **options):
        checks = soak.run(SHORT, broken.client(), processes=broken.processes, **again(broken, rerun), kernel=tmp_path / "kmsg")

    kill(mutant=mutant, gate="G7", sound=soaked, mutant_checks=checks)
    assert named(checks)[name].state == "fail"
