"""
The text of docs/reference/files.md, made from the records that read and write the files.

``python tests/unit/files_page.py`` writes it; `test_repository` fails while it is out of date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from sparkwright.audit.policy import CommonPolicy, StackPolicy
from sparkwright.bench.model.slim import SlimRecord
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.recipes.traps import Trap
from sparkwright.bench.results import Result
from sparkwright.builder.ninja import ShippedFile
from sparkwright.builder.toolchain import EnvironmentSpec
from sparkwright.builder.workspace import ArchRules
from sparkwright.cherry_picks.effects import Effect
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.client.environment import Marker
from sparkwright.client.records import Release, ReleaseState
from sparkwright.core.config import Config
from sparkwright.forks.stack import Lock, StackSpec
from sparkwright.release.canary import Canary
from sparkwright.release.policy import PolicyFile
from sparkwright.release.repository import IndexFacts

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "files.md"

HEAD = """\
# Files

<!-- Made by tests/unit/files_page.py; change the records, then run it again. -->

Every file that people review or that is published, field by field. An unknown field is an error; a field with a default may be left out. `?` marks a type that may be `null`, and
`0..10` the bounds of a number. YAML is read
without tags, aliases or duplicate keys. Verdicts have a [JSON schema](verdict.schema.json); `ci/gates/*.yaml` explain their fields in comments.

An index's `metadata/*.json` is [TUF](https://theupdateframework.github.io/specification/latest/) with consistent snapshots; a lock of a
release is a [pylock.toml](https://packaging.python.org/en/latest/specifications/pylock-toml/). In a prefix, `history.json` lists earlier releases, the latest last;
`trust/indexes.json` maps an address to its confirmed fingerprint; `releases/NAME/sparkwright-files.json` maps a file to its size, time in s and sha256.
The guard of `serve` writes `~/.local/state/sparkwright/serving/PID.json`: what it watches, the least memory that it saw, in bytes, and why it ended a server.
"""

#: File → its record, and whether people write it.
FILES: dict[str, tuple[Any, str]] = {
    "forks/STACK/stack.yaml": (StackSpec, "people"),
    "forks/STACK/lock.yaml": (Lock, "`lock`, reviewed"),
    "cherry_picks/FORK.yaml": (Ledger, "`patch pick`, reviewed"),
    "below cherry_picks/effects.yaml: STACK: FORK: CHANGE": (Effect, "people, with lines of `ci/bench/effects.py`"),
    "build/STACK/environment.yaml": (EnvironmentSpec, "people"),
    "build/STACK/archs.yaml": (ArchRules, "people"),
    "build/STACK/costs.yaml": (ShippedFile, "`ci/bench/costs.py`"),
    "ci/audit.yaml": (CommonPolicy, "people"),
    "ci/audit/STACK.yaml": (StackPolicy, "people"),
    "ci/recipes/NAME.yaml": (Recipe, "people"),
    "each of ci/traps.yaml": (Trap, "people"),
    "ci/release.yaml": (PolicyFile, "people"),
    "config.yaml of the user": (Config, "people"),
    "*.throughput.json": (Result, "`gate`"),
    "each of *.canary.json": (Canary, "`gate`"),
    "sparkwright-slim.json": (SlimRecord, "`model slim`"),
    "targets/releases/SHA256.NAME.json of an index": (
        Release,
        "`publish`, `release promote`; named by hash in the signed targets",
    ),
    "custom of a release in N.targets.json": (
        ReleaseState,
        "`publish`, `release promote`, `release yank`; signed",
    ),
    "sparkwright in N.targets.json": (IndexFacts, "`publish`, `release prune`; signed"),
    "releases/NAME/sparkwright.json of a prefix": (Marker, "`install`"),
}


def _type(one: types.Type) -> str:
    """Return how people would say the type."""
    match one:
        case types.StructType():
            return f"[{one.cls.__name__}](#{one.cls.__name__.lower()})"
        case types.ListType() | types.SetType() | types.FrozenSetType() | types.VarTupleType():
            return f"list[{_type(one.item_type)}]"
        case types.TupleType():
            return f"[{', '.join(map(_type, one.item_types))}]"
        case types.DictType():
            return f"map[{_type(one.key_type)},{_type(one.value_type)}]"
        case types.UnionType():
            kinds = [kind for kind in one.types if not isinstance(kind, types.NoneType)]
            return f"{' or '.join(map(_type, kinds))}{'?' * (len(kinds) < len(one.types))}"
        case types.LiteralType():
            return "\\|".join(f"`{value}`" for value in one.values)
        case types.StrType():
            return "text" + (f" `{one.pattern}`".replace("|", "\\|") if one.pattern else "")
        case types.IntType() | types.FloatType():
            ends = [one.ge if one.ge is not None else one.gt, one.le if one.le is not None else one.lt]
            kind = "integer" if isinstance(one, types.IntType) else "number"
            return kind if ends == [None, None] else f"{kind} {'..'.join('' if end is None else f'{end:g}' for end in ends)}"
        case types.BoolType():
            return "boolean"
    return "anything"


def _below(one: types.Type) -> Iterator[types.StructType]:
    """Yield the records in the type, as far as the nearest."""
    if isinstance(one, types.StructType):
        yield one
        return
    inner = [getattr(one, name) for name in ("item_type", "value_type") if hasattr(one, name)]
    for part in (*inner, *getattr(one, "item_types", ()), *getattr(one, "types", ())):
        yield from _below(part)


def _default(field: types.Field) -> str:
    if field.required:
        return ""
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    value = field.default
    if isinstance(value, msgspec.Struct):
        return "its own defaults"
    return "empty" if value in ("", (), {}) else f"`{msgspec.json.encode(value).decode()}`".replace("|", "\\|")


def _about(cls: Any) -> tuple[str, dict[str, str]]:
    """Return the summary of a record's docstring, and the meaning of each attribute that it explains."""
    summary, _, rest = (inspect.getdoc(cls) or "").partition("\n\n")
    text = " ".join(rest.partition("Attributes:\n")[2].split("\n\n")[0].split())
    fields = set(cls.__struct_fields__)
    # Attributes that share a text stand before it, separated by commas.
    starts = [
        match
        for match in re.finditer(r"(?:^|(?<=[.;] ))((?:\*?\w+\*?, )*\*?\w+\*?): ", text)
        if set(re.findall(r"\w+", match[1])) <= fields
    ]
    meanings: dict[str, str] = {}
    for match, after in zip(starts, [*starts[1:], None], strict=False):
        first, *others = re.findall(r"\w+", match[1])
        meanings[first] = _marked(text[match.end() : after.start() if after else None].strip())
        meanings |= dict.fromkeys(others, f"see `{first}`")
    return _marked(" ".join(summary.split())), meanings


def _marked(text: str) -> str:
    """Return *text* of a docstring as Markdown: literals keep their mark, names of other records lose theirs."""
    parts = re.sub(r"``(.+?)``", r"`\1`", text).split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def _record(cls: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the lines about the record *cls*, and about those in it that are not *seen* yet."""
    summary, meanings = _about(cls)
    yield f"#### {cls.__name__}\n\n{summary}\n\n|field|type|default|meaning|\n|---|---|---|---|"
    info = types.type_info(cls)
    assert isinstance(info, types.StructType)
    seen.add(cls)
    for field in info.fields:
        yield f"|`{field.encode_name}`|{_type(field.type)}|{_default(field)}|{meanings.get(field.name, '')}|"
    yield ""
    for inner in (inner.cls for field in info.fields for inner in _below(field.type)):
        if inner not in seen:
            yield from _record(inner, seen)


def render() -> str:
    """Return the page."""
    parts = [HEAD, "|file|written by|", "|---|---|"]
    parts += [f"|`{name}`|{by}|" for name, (_, by) in FILES.items()]
    parts.append("")
    seen: set[Any] = set()
    for name, (cls, _) in FILES.items():
        parts += [f"## `{name}`", "", *_record(cls, seen)]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
