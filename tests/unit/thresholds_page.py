"""
The text of docs/reference/thresholds.md, made from the policies of the gates and from the recipes.

``python tests/unit/thresholds_page.py`` writes it; a test fails while it is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "thresholds.md"

HEAD = """\
# Thresholds

<!-- Made by tests/unit/thresholds_page.py from ci/gates/*.yaml and ci/recipes/**/*.yaml; change those, then run it again. -->

Every number by which a gate judges or limits itself. Its reason is the comment beside it in the file. *Measured* means that the number, or
the threshold that it follows, was measured by this project or by the one that is named there. *Proposed* is everything else: a choice that was
not calibrated on a GB10.
"""

#: Texts and workloads, which set no threshold.
OTHER = ("corpus.yaml", "workloads.yaml")
#: Of a recipe, the parts that a gate judges by.
RECIPE = ("floors", "expected", "thresholds", "acceptance")
MEASURED = re.compile(r"\[(measured|M|S)\b[^\]]*\]")


def numbers(node: yaml.Node | None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, int]]:
    """Yield the place, the value and the line of every number below *node* that is not an item of a list."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from numbers(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                names = {key.value: value.value for key, value in item.value}
                yield from numbers(item, (*path, str(names.get("name", ""))))
    elif node and node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        yield ".".join(filter(None, path)), node.value, node.start_mark.line


def comment(lines: list[str], at: int) -> str:
    """Return the comment on line *at*, or the block of comments above it and the lines that it introduces."""
    own = re.search(r"\s# (.*)", lines[at])
    above = re.search(r"((?:[ \t]*#.*\n)+)(?:[ \t]*[^#\s].*\n)*\Z", "".join(f"{line}\n" for line in lines[:at]))
    return own[1] if own else " ".join(line.strip("# ") for line in above[1].splitlines()) if above else ""


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield file, name, value and kind of every threshold."""
    for path in (*sorted((ROOT / "ci" / "gates").glob("*.yaml")), *sorted((ROOT / "ci" / "recipes").rglob("*.yaml"))):
        text = path.read_text("utf-8")
        for name, value, line in numbers(yaml.compose(text, yaml.SafeLoader)) if path.name not in OTHER else ():
            if path.parent.name == "gates" or name.partition(".")[0] in RECIPE:
                reason = comment(text.splitlines(), line)
                kind = "measured" if MEASURED.search(reason) else "proposed"
                yield path.relative_to(ROOT / "ci").as_posix(), name, value, kind


def render() -> str:
    """Return the page."""
    parts, last = [HEAD], ""
    for file, name, value, kind in rows():
        if file != last:
            parts.append(f"\n## [ci/{file}](../../ci/{file})\n\n|threshold|value|source|\n|---|---|---|\n")
        last = file
        parts.append(f"|`{name}`|{value}|{kind}|\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
