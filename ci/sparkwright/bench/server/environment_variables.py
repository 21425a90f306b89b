"""
The environment variables that an installed vLLM reads, found in its source without running it.

A variable that a server does not read changes nothing: vLLM 0.24 dropped
``VLLM_NVFP4_GEMM_BACKEND``, and a recipe that still sets it gets whatever kernel vLLM selects.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

#: Bytes of the table, which has about 100,000; and of sources that are searched for a variable that
#: is not in it (vLLM 0.33.0 has 45 MB of Python).
LARGEST_TABLE, LARGEST_SOURCES = 4 << 20, 512 << 20


class SourceInvalid(Exception):
    """The file is not vLLM's table of variables; the text says why."""


def unread(names: Iterable[str], package: Path) -> dict[str, str]:
    """
    Return those of *names* that begin with ``VLLM_`` and that vLLM does not read.

    Args:
        package: The folder ``vllm``.

    Returns:
        Each with the most similar name that vLLM reads, or an empty text.

    Raises:
        SourceInvalid: ``envs.py`` cannot be read.
    """
    known = _table(package / "envs.py")
    missing = {name for name in names if name.startswith("VLLM_")} - known
    total = 0
    for source in sorted(package.rglob("*.py")) if missing else ():
        if source.is_symlink() or (total := total + source.stat().st_size) > LARGEST_SOURCES:
            break
        text = source.read_text("utf-8", "replace")
        pattern = r"""env(iron)?(\.get|\.pop)?\s*[\[(]\s*["']%s["']"""
        missing -= {name for name in missing if re.search(pattern % re.escape(name), text)}
    near = {name: difflib.get_close_matches(name, known, 1, 0.75) for name in sorted(missing)}
    return {name: similar[0] if similar else "" for name, similar in near.items()}


def _table(path: Path) -> frozenset[str]:
    """Return the keys of the dictionary ``environment_variables`` in the file at *path*."""
    try:
        if path.stat().st_size > LARGEST_TABLE:
            raise SourceInvalid(f"{path.name} has more than {LARGEST_TABLE} bytes")
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise SourceInvalid(f"{path.name} cannot be read: {error.strerror}") from None
    # Deep nesting and bytes 0 are reported as these.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SourceInvalid(f"{path.name} is no Python: {error}") from None
    for node in tree.body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name("environment_variables"), value=ast.Dict(keys=keys))
                | ast.Assign(targets=[ast.Name("environment_variables")], value=ast.Dict(keys=keys))
            ):
                names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
                plain = frozenset(name for name in names if isinstance(name, str))
                if len(plain) == len(keys):
                    return plain
    raise SourceInvalid(f"{path.name} has no dictionary environment_variables of plain names")
