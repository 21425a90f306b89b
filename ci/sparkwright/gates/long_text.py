"""Long texts that hold facts; imports nothing that the environment of a server lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkwright.gates.text_checks import Fact, GenerationPolicy


def long_text(line: str, lines: int, facts: Iterable[Fact] = ()) -> str:
    """Return *lines* lines and those of *facts*, the same for the same arguments."""
    # A multiplicative walk looks random and does not change between releases of Python.
    text = [
        line.replace("{number}", str(number + 1)).replace(
            "{other}", str((number * 7919 + 17) % 9973)
        )
        for number in range(lines)
    ]
    for fact in sorted(facts, key=lambda fact: -fact.depth):
        text.insert(round(fact.depth * lines), fact.line)
    return "\n".join(text) + "\n"


def filled_text(
    policy: GenerationPolicy, wrap: str, tokens: int, count: Callable[[str], int]
) -> str:
    """
    Return a text with all facts that has, with a question, at most *tokens* tokens.

    Args:
        wrap: As in `Profile`.
        count: From a text to its tokens; called a few times.
    """
    question = max((fact.text for fact in policy.facts.values()), key=len)

    def length(lines: int) -> int:
        text = long_text(policy.line, lines, policy.facts.values()) + question
        return count(wrap.replace("{prompt}", text))

    # Numbers grow longer, so the first estimate is a little too large.
    lines = int(tokens * 50 / max(50, length(100) - length(50)))
    while lines and (actual := length(lines)) > tokens:
        lines = min(lines - 1, int(lines * tokens / actual))
    return long_text(policy.line, lines, policy.facts.values())
