"""What a tree's Python files state of E2M1, read without running them: tables of values, and PTX as text in a kernel language."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates.numerics.converter import ConverterInvalid
from sparkwright.gates.numerics.units import Converter, Unit

#: Source files are smaller; a larger one is not parsed.
LARGEST = 4 * 1024 * 1024

#: What marks the one template of a function that is looked for.
INSTRUCTION = "cvt.rn.satfinite.e2m1x2.f32"


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A table of code values in a Python file.

    Attributes:
        name: Kebab-case, unique in the policy; the check's name begins with it.
        files: Where it lies, as `Unit.files`.
        variable: The variable whose assignment holds one list of 8 or 16 numbers, however deep in calls.
    """

    name: str
    fork: str
    files: tuple[str, ...]
    variable: str


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    PTX for E2M1 in a Python file, as text with ``$0``, ``$1`` ….

    Attributes:
        name: Of the converter that it makes.
        files: Where it lies, as `Unit.files`.
        function: The function that holds exactly one such text. Its operands are taken to be the values in order, after the result.
        lanes: How many values it converts.
    """

    name: str
    fork: str
    files: tuple[str, ...]
    function: str
    lanes: int = 8


def parsed(tree: Path, fork: str, files: tuple[str, ...]) -> ast.Module:
    """
    Return the syntax of the first of *files* that *tree* has.

    Raises:
        ConverterInvalid: ``converter-missing``, ``converter-outside``, or ``converter-unreadable`` where it is no Python.
    """
    for name in files:
        if (path := tree / name).exists():
            if not path.resolve().is_relative_to(tree.resolve()):
                raise ConverterInvalid("converter-outside", f"{name} is a link that leaves the tree")
            if not path.is_file() or path.stat().st_size > LARGEST:
                raise ConverterInvalid("converter-unreadable", f"{name} is no file of at most {LARGEST} bytes")
            try:
                return ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ConverterInvalid("converter-unreadable", f"{name} is no Python: {error}") from error
    raise ConverterInvalid("converter-missing", f"the tree of {fork} has no {' and no '.join(files)}")


def values(module: ast.Module, table: Table) -> NDArray[np.float64]:
    """
    Return the numbers of *table*.

    Raises:
        ConverterInvalid: ``converter-missing`` where nothing is assigned to the variable, ``converter-unreadable`` where no list is.
    """
    for node in ast.walk(module):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if not any(isinstance(target, ast.Name) and target.id == table.variable for target in targets):
            continue
        lists = [part for part in ast.walk(node) if isinstance(part, ast.List | ast.Tuple) and len(part.elts) in (8, 16)]
        try:
            if len(lists) == 1:
                return np.array([float(ast.literal_eval(value)) for value in lists[0].elts])
        except (ValueError, TypeError) as error:
            raise ConverterInvalid("converter-unreadable", f"{table.variable} holds more than numbers") from error
        raise ConverterInvalid("converter-unreadable", f"{table.variable} is assigned {len(lists)} lists of 8 or 16 values, not one")
    raise ConverterInvalid("converter-missing", f"nothing is assigned to {table.variable} in {table.files[0]}")


def text(module: ast.Module, template: Template) -> str:
    """
    Return the PTX of *template*, its operands written as C++ writes them (``%0``).

    Raises:
        ConverterInvalid: ``converter-missing`` without the function, ``converter-unreadable`` where it does not hold one text.
    """
    wanted = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(module) if isinstance(node, wanted) and node.name == template.function]
    if not functions:
        raise ConverterInvalid("converter-missing", f"{template.files[0]} has no function {template.function}")
    found = [
        node.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and INSTRUCTION in node.value and "$0" in node.value
    ]
    if len(found) != 1:
        raise ConverterInvalid("converter-unreadable", f"{template.function} holds {len(found)} texts with {INSTRUCTION}, not one")
    return found[0].replace("$", "%")


def unit(template: Template, ptx: str, tree: Path) -> Unit:
    """Return a unit whose header, written into the folder *tree*, does nothing but execute *ptx*."""
    kind = "std::uint64_t" if template.lanes == 16 else "std::uint32_t"
    inputs = ", ".join(f'"f"(x[{lane}])' for lane in range(template.lanes))
    literal = "\n".join(f'"{line}\\n"' for line in ptx.replace("\\", "\\\\").replace('"', '\\"').splitlines())
    output = '"=l"(made)' if template.lanes == 16 else '"=r"(made)'
    statement = f"asm volatile(\n{literal}\n: {output} : {inputs});"
    body = f"inline {kind} convert(float (&x)[{template.lanes}]) {{\n{kind} made;\n{statement}\nreturn made;\n}}"
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "template.hpp").write_text(f"#include <cstdint>\n{body}\n", "utf-8")
    one = Converter(template.name, "encode", "return convert(x);", lanes=template.lanes)
    return Unit(template.fork, ("template.hpp",), (one,))
