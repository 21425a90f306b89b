"""The version that a wheel of ours carries, in its name and in the Python files that state it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sparkwright.core.errors import WheelError


def labelled(version: str, label: str) -> str:
    """
    Return *version* with the local version *label* (PEP 440), which replaces one that is there.
    """
    from packaging.version import Version

    return str(Version(f"{Version(version).public}+{label}"))


def restate(text: str, old: str, new: str, name: str) -> str:
    """
    Return the Python file *text* with *new* wherever ``__version__`` or ``version`` is set to the
    string *old*.

    Raises:
        wheel-invalid: No such assignment; a wheel whose program and metadata disagree on the
            version misleads both.
    """
    # Lines as Python's own parser counts them; str.splitlines would also split at a form feed.
    lines = [line.encode() for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)]
    try:
        sites = list(_sites(ast.parse(text), old))
    except SyntaxError as error:
        raise WheelError(
            "wheel-invalid", f"{name} is not a Python file.", details=[str(error)]
        ) from error
    if not sites:
        raise WheelError("wheel-invalid", f"{name} does not set __version__ to {old!r}.")
    for node in reversed(sites):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + repr(new).encode() + after]
    return b"".join(lines).decode()


def _sites(module: ast.Module, old: str) -> Iterator[ast.Constant]:
    for node in module.body:
        names = (
            {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.Assign)
            else set()
        )
        if (
            names & {"__version__", "version"}
            and isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and node.value.value == old
        ):
            yield node.value
