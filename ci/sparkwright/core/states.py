"""The states of a verdict."""

from typing import Literal

#: The states of checks, gates and experiments. Only ``pass`` publishes to ``verified``; ``not-run``
#: is never a pass.
State = Literal["pass", "fail", "inconclusive", "invalid", "not-run"]

#: State → its sign; colour never stands alone.
SIGNS: dict[State, str] = {
    "pass": "✓",
    "fail": "✗",
    "inconclusive": "?",
    "invalid": "!",
    "not-run": "–",
}
