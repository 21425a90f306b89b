"""
The environment variables that a release of vLLM knows, read from its own source as it is installed, without running it.

A variable that a server does not know changes nothing, so whoever set it believes something of the server that is not true: vLLM 0.24
dropped ``VLLM_NVFP4_GEMM_BACKEND``, and a recipe that still sets it runs whatever kernel is chosen by itself.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from sparkwright.bench.recipes.vllm_flags import ReplacedVariable
from sparkwright.gates.core.verdict import Check, Sample, failed, invalid, not_run, passed

#: vLLM's table has about 100,000 bytes.
LARGEST = 4 * 1024 * 1024
#: Bytes of sources that are searched for a variable that the table lacks; vLLM 0.33.0 has 45 MB of Python.
SEARCHED = 512 * 1024 * 1024


class SourceInvalid(Exception):
    """The file is not vLLM's table of variables; *says* tells why."""

    def __init__(self, says: str) -> None:
        self.says = says
        super().__init__(says)


def known(table: Path) -> frozenset[str]:
    """
    Return the variables that *table* (``vllm/envs.py``) knows: the keys of its dictionary ``environment_variables``.

    Raises:
        SourceInvalid: It cannot be read, is no Python, or has no such dictionary.
    """
    try:
        if table.stat().st_size > LARGEST:
            raise SourceInvalid(f"{table.name} has more than {LARGEST} bytes")
        tree = ast.parse(table.read_bytes())
    except OSError as error:
        raise SourceInvalid(f"{table.name} cannot be read: {error.strerror}") from None
    # Deep nesting and bytes 0 are reported as these.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SourceInvalid(f"{table.name} is no Python: {error}") from None
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == "environment_variables" for target in targets)
        value = getattr(statement, "value", None)
        if named and isinstance(value, ast.Dict):
            names = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(names) == len(value.keys):
                return frozenset(names)
    raise SourceInvalid(f"{table.name} has no dictionary environment_variables of plain names")


def read_elsewhere(package: Path, names: Iterable[str]) -> frozenset[str]:
    """Return those of *names* that a source in *package* reads past the table: as an argument or index of the environment, in quotes."""
    left, read = set(names), set()
    total = 0
    for source in sorted(package.rglob("*.py")) if left else ():
        if source.is_symlink() or (total := total + source.stat().st_size) > SEARCHED:
            break
        text = source.read_bytes()
        found = {name for name in left if re.search(rb"""env(iron)?(\.get|\.pop)?\s*[\[(]\s*["']%s["']""" % re.escape(name).encode(), text)}
        read |= found
        left -= found
    return frozenset(read)


def check(variables: Mapping[str, str] | None, package: Path | None, version: str, replaced: Mapping[str, ReplacedVariable]) -> Check:
    """
    Return whether the server knows every ``VLLM_`` variable that is set for it.

    Args:
        variables: The server's environment; None where nobody knows it.
        package: The folder ``vllm`` that it runs; None where nobody knows it.
        replaced: What became of variables that older releases knew.
    """
    if variables is None or package is None:
        missing = "its environment" if variables is None else "where vLLM is installed"
        return not_run("variables", f"nobody said {missing}, as the server was not started here", "variables-unseen")
    try:
        names = known(package / "envs.py")
    except SourceInvalid as error:
        return invalid("variables", f"the variables that vLLM knows cannot be read: {error.says}", "envs-unreadable")
    asked = sorted(name for name in variables if name.startswith("VLLM_"))
    unknown = [name for name in asked if name not in names]
    unknown = sorted(set(unknown) - read_elsewhere(package, unknown))
    if not unknown:
        return passed("variables", f"vLLM {version} knows all of the {len(asked)} VLLM_ variables that are set")
    samples = [Sample(name, _advice(name, names, replaced), f"set to {variables[name]!r:.60}") for name in unknown]
    says = f"vLLM {version} does not know {', '.join(unknown)}; it changes nothing"
    return failed("variables", says, "variable-unknown", samples=samples)


def _advice(name: str, names: frozenset[str], replaced: Mapping[str, ReplacedVariable]) -> str:
    if one := replaced.get(name):
        return f"gone since {one.since}" + (f"; now {one.use}" if one.use else "")
    near = difflib.get_close_matches(name, names, 1, 0.75)
    return f"perhaps {near[0]}" if near else ""
