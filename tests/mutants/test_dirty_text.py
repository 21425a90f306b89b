"""Mutants of servers: one of a hundred answers is dirty under one switch alone, by the real policy."""

import pytest
from tests.mutants.conftest import Kill
from tests.support.dirty_server import BATCH, DRAFTS, ROOT, SWITCHES, rates, record

from sparkwright.core import strict_yaml
from sparkwright.gates import dirty_text, text_checks
from sparkwright.gates.core.verdict import Check

pytestmark = [pytest.mark.mutants, pytest.mark.timeout(900)]

POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "generation.yaml", text_checks.GenerationPolicy)


@pytest.fixture(scope="module", name="stock")
def _stock() -> dirty_text.StockText:
    return record(POLICY)


@pytest.fixture(scope="module", name="sound")
def _sound() -> dict[str, Check]:
    """Return the checks of a server that differs from the stock wheel in its wording, and is dirty as seldom."""
    return rates(POLICY, 200, lambda *_: True, record(POLICY, 200))


@pytest.mark.parametrize("percent", [1, 5])
@pytest.mark.parametrize("switch", SWITCHES)
def test_dirty_answers_under_one_switch_die(kill: Kill, sound: dict[str, Check], stock: dirty_text.StockText, switch: str, percent: int) -> None:
    """The check of that switch fails, and no other one; without drafts a server is asked for theirs alone."""
    pause_s = 0.01 if switch == BATCH else 0.0
    found = rates(POLICY, 100 // percent, SWITCHES[switch], stock, pause_s=pause_s, drafts=switch == DRAFTS)

    kill(mutant=f"{percent} % of answers dirty, {switch}", gate="G4", sound=[*sound.values()], mutant_checks=[*found.values()])
    assert found[switch].state == "fail"
    assert {name for name, check in found.items() if check.state == "fail"} <= {switch, "dirty-text-stock", "dirty-text"}
