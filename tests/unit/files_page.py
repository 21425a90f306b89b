"""
The text of docs/reference/files.md, made from the records that read and write the files.

``python tests/unit/files_page.py`` writes it; `test_repository` fails while it is out of date.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from sparkwright.audit.policy import CommonPolicy, StackPolicy
from sparkwright.bench.model.slim import SlimRecord
from sparkwright.bench.recipes import recipe, traps
from sparkwright.bench.results import Result
from sparkwright.builder import ninja, toolchain, workspace
from sparkwright.cherry_picks import effects, ledger
from sparkwright.client.environment import Marker
from sparkwright.client.records import Release, ReleaseState
from sparkwright.core.config import Config
from sparkwright.forks.stack import Lock, StackSpec
from sparkwright.release import canary, policy, repository

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "files.md"

HEAD = """\
# Files

<!-- Made by tests/unit/files_page.py; change the records, then run it again. -->

Every file that people review or that is published, as the record that reads it. An unknown field is an error; a field with a default may be left out. YAML is read
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
    "cherry_picks/FORK.yaml": (ledger.Ledger, "`patch pick`, reviewed"),
    "below cherry_picks/effects.yaml: STACK: FORK: CHANGE": (effects.Effect, "people, with lines of `ci/bench/effects.py`"),
    "build/STACK/environment.yaml": (toolchain.EnvironmentSpec, "people"),
    "build/STACK/archs.yaml": (workspace.ArchRules, "people"),
    "build/STACK/costs.yaml": (ninja.ShippedFile, "`ci/bench/costs.py`"),
    "ci/audit.yaml": (CommonPolicy, "people"),
    "ci/audit/STACK.yaml": (StackPolicy, "people"),
    "ci/recipes/NAME.yaml": (recipe.Recipe, "people"),
    "each of ci/traps.yaml": (traps.Trap, "people"),
    "ci/release.yaml": (policy.PolicyFile, "people"),
    "config.yaml of the user": (Config, "people"),
    "*.throughput.json": (Result, "`gate`"),
    "each of *.canary.json": (canary.Canary, "`gate`"),
    "sparkwright-slim.json": (SlimRecord, "`model slim`"),
    "targets/releases/SHA256.NAME.json of an index": (
        Release,
        "`publish`, `release promote`; named by hash in the signed targets",
    ),
    "custom of a release in N.targets.json": (
        ReleaseState,
        "`publish`, `release promote`, `release yank`; signed",
    ),
    "sparkwright in N.targets.json": (repository.IndexFacts, "`publish`, `release prune`; signed"),
    "releases/NAME/sparkwright.json of a prefix": (Marker, "`install`"),
}


def _records(one: types.Type) -> Iterator[Any]:
    """Yield the records in the type, those that they extend, and those in their fields."""
    if isinstance(one, types.StructType):
        yield from (cls for cls in reversed(one.cls.__mro__) if issubclass(cls, msgspec.Struct) and cls.__struct_fields__)
        for field in one.fields:
            yield from _records(field.type)
    inner = [getattr(one, name) for name in ("item_type", "value_type") if hasattr(one, name)]
    for part in (*inner, *getattr(one, "item_types", ()), *getattr(one, "types", ())):
        yield from _records(part)


def _source(cls: Any) -> str:
    """Return the record as it is written, without its methods."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    tree.body = [node for node in tree.body if isinstance(node, ast.Expr | ast.AnnAssign)]
    return f"#### {cls.__name__}\n\n```python\n{ast.unparse(tree)}\n```\n"


def render() -> str:
    """Return the page."""
    parts = [HEAD, "|file|written by|", "|---|---|"]
    parts += [f"|`{name}`|{by}|" for name, (_, by) in FILES.items()]
    parts.append("")
    listed = set[Any]()
    for name, (cls, _) in FILES.items():
        records = [record for record in dict.fromkeys(_records(types.type_info(cls))) if record not in listed]
        listed.update(records)
        parts += [f"## `{name}`", "", *map(_source, records)]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
