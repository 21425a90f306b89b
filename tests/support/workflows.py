"""
Expressions of workflows, evaluated as GitHub does.

The language is that of https://docs.github.com/actions/reference/evaluate-expressions-in-workflows-and-actions.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: A text, a path of names that calls nothing, or a mark that Python has in other words.
_TOKEN = re.compile(r"'(?P<text>(?:[^']|'')*)'|(?P<name>[A-Za-z_][\w-]*(?:\.[\w-]+)*)(?![\w.-]*\()|&&|\|\||!(?!=)|[A-Za-z_]\w*\(")
_INSIDE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)


class Expression:
    """One expression, evaluated in *contexts*; a name that is not there is null, as GitHub has it."""

    def __init__(self, text: str, contexts: Mapping[str, Any], failed: bool = False) -> None:
        self._contexts, self._code = contexts, _TOKEN.sub(self._python, text.strip())
        self._names: dict[str, Callable[..., Any]] = {
            "always": lambda: True, "cancelled": lambda: False, "success": lambda: not failed, "failure": lambda: failed,
            "fromJSON": json.loads, "toJSON": json.dumps, "format": _format, "get": self._get,
            "contains": lambda whole, part: part in whole, "startsWith": lambda whole, part: whole.startswith(part),
        }  # fmt: skip

    def value(self) -> Any:
        return eval(self._code, {"__builtins__": {}}, self._names)

    def _python(self, match: re.Match[str]) -> str:
        if match["text"] is not None:
            return repr(match["text"].replace("''", "'"))
        if match["name"]:
            return f"get({match['name']!r})"
        return {"&&": " and ", "||": " or ", "!": " not "}.get(match[0], match[0])

    def _get(self, path: str) -> Any:
        found: Any = {"true": True, "false": False, **self._contexts}
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return "" if found is None else found


def _format(form: str, *words: Any) -> str:
    """Fill *words* in; a doubled brace stands for one."""
    return re.sub(
        r"\{\{|\}\}|\{(\d+)\}",
        lambda match: _said(words[int(match[1])]) if match[1] else match[0][0],
        form,
    )


def text(value: Any, contexts: Mapping[str, Any]) -> str:
    """Return *value* with its expressions filled in."""
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return _INSIDE.sub(lambda match: _said(Expression(match[1], contexts).value()), said)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def holds(condition: Any, contexts: Mapping[str, Any], *, failed: bool) -> bool:
    """Whether a job or step runs: without a word about the state, only where nothing failed before."""
    said = str(condition if condition is not None else "success()").strip()
    inner = _INSIDE.fullmatch(said)
    said = inner[1] if inner else said
    if not re.search(r"\b(always|cancelled|success|failure)\(", said):
        said = f"success() && ({said})"
    return bool(Expression(said, contexts, failed).value())


def pairs(path: Path) -> dict[str, str]:
    """Return what a step wrote to the file of its outputs or variables."""
    return dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines() if "=" in line)
