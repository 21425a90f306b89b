"""
The ``VLLM_`` variables that a release reads. vLLM ignores any other, so a server with one runs
otherwise than intended.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from sparkwright.core import config, strict_yaml
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import read_text


class VariableError(SparkwrightError):
    """A server is started with a variable that it does not read as intended."""

    references: ClassVar[Mapping[str, Advice]] = {
        "variable-refused": Advice(
            "A variable has a wrong value, or a name that nothing reads, so the server would run "
            "otherwise than intended.",
            "Correct or remove it as the lines above say; docs/reference/commands.md lists "
            "the variables.",
        ),
    }


class RemovedVariable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A variable of earlier releases.

    Attributes:
        gone: The first release, of those that were read, that does not read it.
        now: What replaced it; empty if nothing did.
    """

    gone: str
    now: str = ""


@functools.cache
def _removed() -> dict[str, RemovedVariable]:
    path = config.root() / "ci" / "variables.yaml"
    return strict_yaml.load(path, dict[str, RemovedVariable])


def advice(variable: str) -> str:
    """Return what became of a *variable* that earlier releases read; empty if nothing is known."""
    removed = _removed().get(variable)
    now = f"; now {removed.now}" if removed and removed.now else ""
    return f"gone since {removed.gone}{now}" if removed else ""


def check(variables: Mapping[str, str], package: Path) -> None:
    """
    Check the ``VLLM_`` *variables* against the table in ``envs.py`` of the installed *package*.

    Raises:
        variable-refused: vLLM does not read one, so it would change nothing.
    """
    table = package / "envs.py"
    text = read_text(table) if table.exists() else ""
    read = re.findall(r"""["'](VLLM_\w+)["']\s*:""", text)
    unread = sorted(name for name in variables if name.startswith("VLLM_") and name not in read)
    if not read or not unread:
        return
    details = []
    for name in unread:
        similar = "".join(difflib.get_close_matches(name, read, 1, 0.75))
        hint = advice(name) or (f"perhaps {similar}" if similar else "unknown")
        details.append(f"{name}: {hint}")
    what = f"The installed vLLM does not read {', '.join(unread)}."
    raise VariableError("variable-refused", what, details=details)
