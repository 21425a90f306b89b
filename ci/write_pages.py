"""
Pages and tables that state facts, made from the program: docs/reference, cherry_picks/README.md, and the tables in README.md and docs/explanation/scaling.md.

``python ci/write_pages.py`` writes them all; `test_repository` fails while one is out of date.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

import sparkwright
from sparkwright.audit.policy import CommonPolicy, StackPolicy
from sparkwright.bench.model.slim import SlimRecord
from sparkwright.bench.recipes.preflight import Trap
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.results import Result
from sparkwright.builder import ninja, toolchain, workspace
from sparkwright.cherry_picks import ledger, series
from sparkwright.cherry_picks.effects import Effect, MeasuredEffect, load_effects
from sparkwright.cherry_picks.patch import Patch, load_folder
from sparkwright.cli import main
from sparkwright.cli.options import add_common
from sparkwright.client.environment import Marker
from sparkwright.client.records import Release, ReleaseState
from sparkwright.core import config, errors, states
from sparkwright.forks.stack import Lock, Project, StackSpec, stack_names
from sparkwright.gates.core import ladder, policy, server_under_test, verdict
from sparkwright.release import canary, repository
from sparkwright.release.policy import PolicyFile

ROOT = Path(__file__).parents[1]
README, REFERENCE = ROOT / "README.md", ROOT / "docs" / "reference"
SCALING = ROOT / "docs" / "explanation" / "scaling.md"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown; a bar in a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("|" + "|".join(cell.replace("|", "\\|") for cell in line) + "|\n" for line in lines)


# Errors.

ERRORS_HEAD = """\
# Errors

<!-- Made by ci/write_pages.py; change the classes, then run it again. -->

Every expected failure has a reference that stays the same from release to release: the first word after `error:`, and the field
`reference` under `--json`. The exit code is 1 unless the row has another: 2 for wrong usage, 4 where nothing is decided, 5 where the
network or an upstream is out of reach. Rows are grouped by the package that raises the error. Reasons of checks are in [gates.md](gates.md).
"""


def entries() -> list[tuple[str, str, errors.Advice]]:
    """Return the package, the reference and the advice of each entry, sorted."""
    for module in pkgutil.walk_packages(sparkwright.__path__, "sparkwright."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # Tests define classes of their own, which are none of the program's; a class that inherits its table declares nothing.
    own = [kind for kind in errors.classes() if kind.__module__.startswith("sparkwright.") and "references" in vars(kind)]
    return sorted((kind.__module__.split(".")[1], *entry) for kind in own for entry in kind.references.items())


def errors_page() -> str:
    """Return the page of errors."""
    parts = [ERRORS_HEAD]
    for package, group in itertools.groupby(entries(), lambda entry: entry[0]):
        rows = []
        for _, reference, advice in group:
            code = f" (exit {advice.exit_code})" if advice.exit_code != 1 else ""
            rows.append((f"`{reference}`{code}", advice.means, advice.todo))
        parts.append(f"\n## {package}\n\n{table(('reference', 'meaning', 'what to do'), rows)}")
    return "".join(parts)


# Files.

FILES_HEAD = """\
# Files

<!-- Made by ci/write_pages.py; change the records, then run it again. -->

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
    "below cherry_picks/effects.yaml: STACK: FORK: CHANGE": (Effect, "people, with lines of `ci/bench/effects.py`"),
    "build/STACK/environment.yaml": (toolchain.EnvironmentSpec, "people"),
    "build/STACK/archs.yaml": (workspace.ArchRules, "people"),
    "build/STACK/costs.yaml": (ninja.ShippedFile, "`ci/bench/costs.py`"),
    "ci/audit.yaml": (CommonPolicy, "people"),
    "ci/audit/STACK.yaml": (StackPolicy, "people"),
    "ci/recipes/NAME.yaml": (Recipe, "people"),
    "each of ci/traps.yaml": (Trap, "people"),
    "ci/release.yaml": (PolicyFile, "people"),
    "config.yaml of the user": (config.Config, "people"),
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


def files_page() -> str:
    """Return the page of files."""
    parts = [FILES_HEAD, table(("file", "written by"), [(f"`{name}`", by) for name, (_, by) in FILES.items()])]
    listed = set[Any]()
    for name, (cls, _) in FILES.items():
        records = [record for record in dict.fromkeys(_records(types.type_info(cls))) if record not in listed]
        listed.update(records)
        parts += [f"## `{name}`", "", *map(_source, records)]
    return "\n".join(parts).rstrip() + "\n"


# Gates.

GATES_HEAD = """\
# Gates: checks and reasons

<!-- Made by ci/write_pages.py; change the gates, then run it again. -->

The checks of each gate, and the reasons that a check which is not a pass can name; a reason stays the same from release to release. `*` in
a name stands for a part that a policy, a recipe or the wheel gives. What the gates prove: [gates](../explanation/gates.md). The form of
verdicts, which `sparkwright gate --json` prints: [verdict.schema.json](verdict.schema.json). Errors of commands: [errors.md](errors.md).
"""

ROLES = {"decides": "", "reports": " (never passes)"}


def reasons(gate: str) -> dict[str, str]:
    """Return every reason that the module of *gate* defines."""
    module = "wheel_audit" if gate == "G0" else policy.PACKAGES[gate]
    found: dict[str, str] = importlib.import_module(f"sparkwright.gates.{module}").REASONS
    return found


def _reasons_table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n" + table(("reason", "meaning, and what to do"), [(f"`{name}`", text) for name, text in sorted(rows)])


def gates_page() -> str:
    """Return the page; a reason with one meaning in several gates comes once."""
    gates: dict[tuple[str, str], list[str]] = {}
    for gate in ladder.GATES:
        for reason in reasons(gate).items():
            gates.setdefault(reason, []).append(gate)
    common = {**server_under_test.REASONS, **ladder.REASONS}.items()
    shared = [reason for reason, owners in gates.items() if len(owners) > 1]
    parts = [GATES_HEAD, "\n## Several gates\n", _reasons_table({*common, *shared})]
    for gate, title in ladder.GATES.items():
        entries = [one for one in policy.declared(gate) if one not in ladder.STOPPED]
        names = ", ".join(f"`{one.name}`{ROLES[one.role]}" for one in entries)
        own = [reason for reason, owners in gates.items() if owners == [gate] and reason not in common]
        parts += [f"\n## {gate}: {title}\n\nChecks: {names}.\n", _reasons_table(own) if own else ""]
    return "".join(parts)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a document of verdicts."""
    made = msgspec.json.schema(verdict.Ladder)
    state = {"state": {"enum": list(get_args(states.State))}}
    for name, further in (("Verdict", state), ("Ladder", {**state, "digest": {"type": "string"}})):
        record = made["$defs"][name]
        record["properties"].update(further)
        record["required"] = [*record["required"], *further]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sparkwright verdicts",
        **made,
    }


def schema_page() -> str:
    """Return the text of the schema."""
    return json.dumps(schema(), indent=1) + "\n"


# What the stacks carry.

DEFAULT = "2026.11"
COLUMNS = ("change", "why", "upstream", "tested by", "measured effect", "use", "what a Spark should see", "dropped when")
BEGIN, END = "<!-- made by ci/write_pages.py -->", "<!-- end -->"

PATCHES_HEAD = """\
# cherry_picks/: the pull requests that we carry

`FORK.yaml` is the ledger: a record for each upstream pull request that we carry or watch, candidates of peers among them (`unresolved`: not looked up). `ideas.yaml` has the
patch ideas of the seed reports, each with the releases that need it. `effects.yaml` says of each carried change what it is for, and what was measured of it.

A record has pointers and hashes, never the diff ([its fields](../docs/reference/files.md)). The diff is fetched as git objects, rendered in one fixed way, and has
to match the hashes. Stacks apply their picks in the order of the file, before our own patches. A hunk may be at another line than it says, but only if its lines
occur in exactly one place.

See [carry a pull request](../docs/howto/carry-a-pull-request.md).

<!-- What follows is made by ci/write_pages.py; change patches, ledgers or effects.yaml, then run it again. -->

An effect is the ratio of a figure with the change to that without it, with its 95 % interval and the number of pairs; a ratio below 1 is an improvement of a time. Whoever
carries a change with a promise has it looked at by [G8](../docs/reference/gates.md), which says `no-effect` if the gain is gone.
"""

Change = tuple[Patch, str]


def carried(stack: str) -> dict[str, list[Change]]:
    """Return what *stack* carries by fork, in the order of application, each with what upstream has of it."""
    project = Project(ROOT, stack)
    return {fork: [*_picks(fork, stack), *_patches(project, fork)] for fork in project.spec.forks}


def _picks(fork: str, stack: str) -> Iterator[Change]:
    records = ledger.load_ledger(ROOT, fork)
    for record in records.carried(stack):
        seen = f", seen {record.seen}" if record.seen[:1].isdigit() else ""
        yield series.as_patch(record, b""), f"{record.state}{seen}"


def _patches(project: Project, fork: str) -> Iterator[Change]:
    for patch in load_folder(project.series_folder(fork)):
        status = re.search(r"^Upstream-Status: (.*)$", patch.text, re.MULTILINE)
        assert status
        yield patch, status[1]


def _linked(text: str, records: ledger.Ledger) -> str:
    """Return *text* of a trailer in a cell of a table, with a link at each pull request or issue of vLLM."""
    return re.sub(r"\bvllm#(\d+)", rf"[vllm#\1]({records.url.removesuffix('.git')}/issues/\1)", text.replace("<", "&lt;"))


def _name(patch: Patch, stack: str, fork: str, records: ledger.Ledger, up: str) -> str:
    """Return the change as a link, from a page that is *up* from the root."""
    if patch.pick:
        return f"[#{patch.pick}]({records.page(patch.pick)})"
    return f"[{patch.subject}]({up}forks/{stack}/{fork}/{patch.name})"


def _interval(effect: MeasuredEffect) -> str:
    return f"×{effect.ratio:.3g} ({effect.low:.3g} to {effect.high:.3g})"


def _full(effect: Effect | None) -> tuple[str, str]:
    """Return the test, and all that was measured, for two cells."""
    path, _, test = effect.test.partition("::") if effect else ("", "", "")
    lines = [
        f"{each.figure}: {_interval(each)}, {each.count} pairs, {each.machine}, {each.date}, wheel `{each.wheel[:12]}` beside `{each.baseline[:12]}`"
        for each in (effect.measured if effect else ())
    ]
    tested = f"[{test}](../{path})" if test else "*none of its own*"
    return tested if effect else "", "<br>".join(lines) or "*not measured*"


def _short(effect: Effect) -> str:
    """Return the first figure that was measured, for a cell."""
    if not effect.measured:
        return "*not measured*"
    first = effect.measured[0]
    return f"{first.figure}: {_interval(first)}, {first.machine}"


def _sections(stack: str) -> Iterator[str]:
    """Yield the tables of *stack*: one for each fork, and one of what recipes switch on."""
    recorded = load_effects(ROOT).get(stack, {})
    for fork, changes in carried(stack).items():
        records = ledger.load_ledger(ROOT, fork)
        rows = []
        for patch, upstream in changes:
            effect = recorded.get(fork, {}).get(patch.name)
            name = _name(patch, stack, fork, records, "../")
            use, spark = (effect.use, effect.spark) if effect else ("default", "")
            texts = (f"{name}: {patch.subject}" if patch.pick else name, patch.reason, upstream, patch.drop_when)
            about, why, state, end = (_linked(text, records) for text in texts)
            rows.append((about, why, state, *_full(effect), use, spark, end))
        yield f"\n### {stack}, {fork}\n\n{table(COLUMNS, rows) if rows else 'Nothing.' + chr(10)}"
    options = recorded.get("recipes", {})
    rows = [(f"`{name}`", one.problem, one.upstream, *_full(one), one.use, one.spark, one.drop_when) for name, one in options.items()]
    yield f"\n### {stack}, options of recipes\n\n{table(COLUMNS, rows)}" if rows else ""


def patches_page() -> str:
    """Return cherry_picks/README.md."""
    stacks = sorted(stack_names(ROOT), reverse=True)
    return PATCHES_HEAD + "".join(part for stack in stacks for part in _sections(stack))


def effects_table() -> str:
    """Return the table of README.md."""
    recorded, rows = load_effects(ROOT)[DEFAULT], []
    for fork, changes in carried(DEFAULT).items():
        records = ledger.load_ledger(ROOT, fork)
        for patch, _ in changes:
            effect = recorded[fork][patch.name]
            name = _name(patch, DEFAULT, fork, records, "").replace(f"[{patch.subject}]", f"[{effect.change}]")
            rows.append((effect.problem, name, _short(effect), effect.use))
    for name, effect in recorded.get("recipes", {}).items():
        rows.append((effect.problem, f"`{name}`: {effect.change}", _short(effect), effect.use))
    return table(("problem", "change", "effect", "use"), rows)


#: In README.md, as long as it is true.
UNMEASURED = " No change has a measured effect on speed yet."


def readme() -> str:
    """Return README.md with the table as it should be."""
    text = README.read_text("utf-8")
    if any(effect.measured for effect in load_effects(ROOT)[DEFAULT]["vllm"].values()):
        text = text.replace(UNMEASURED, "")
    return filled(text, effects_table())


def filled(text: str, *tables: str) -> str:
    """Return *text* with *tables* between its marks, in their order."""
    parts = re.split(f"(?<={BEGIN}\n).*?(?={END}\n)", text, flags=re.DOTALL)
    return "".join(itertools.chain(*zip(parts, (*tables, ""), strict=True)))


def scaling() -> str:
    """Return docs/explanation/scaling.md with what `ci/bench/lab.py` computes."""
    run = subprocess.run([sys.executable, ROOT / "ci" / "bench" / "lab.py", "--json"], capture_output=True, check=True)
    made = json.loads(run.stdout)
    recipe, release = f"**{60 * made['hours']:.0f} ({made['hours']:.1f} h)**", f"**{2 * made['hours']:.1f} h**"
    steps = [(name, f"{60 * value:.0f}") for name, value in made["night"].items()]
    rows = [
        (str(each["sparks"]), f"{each['share']:.0%}", str(each["mean"]), str(each["late"]), str(most))
        for each, most in zip(made["waiting"], made["carried"], strict=True)
    ]
    columns = ("Sparks", "busy", "mean wait, h", "95 of 100 wait at most, h", "gates a day")
    return filled(SCALING.read_text("utf-8"), table(("step", "minutes"), [*steps, ("**a recipe**", recipe), ("**a release of two groups**", release)]), table(columns, rows))


# Commands.

COMMANDS_HEAD = """\
# Commands

<!-- Made by ci/write_pages.py; change the parser, then run it again. -->

`sparkwright COMMAND`; some are Nox sessions of a checkout, too (`nox -s build -- …`). Exit codes: 0 done, 1 failed ([errors.md](errors.md)), 2 wrong usage,
3 a fault of ours, with a log, 4 inconclusive or not-run, 5 network or upstream unreachable, 130 interrupted.
Results go to standard output, progress and messages to standard error.
"""


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return what a verb takes and shows, by how it is written: ``--into VENV``, ``WHEEL …``."""
    return {
        _written(one): one
        for one in parser._actions
        if not isinstance(one, argparse._HelpAction) and one.help != argparse.SUPPRESS
    }


def _written(one: argparse.Action) -> str:
    value = one.metavar or (
        "{" + ",".join(map(str, one.choices)) + "}" if one.choices else one.dest.upper()
    )
    value = value if isinstance(value, str) else " ".join(value)
    many = {"*": f"[{value} …]", "+": f"{value} …", "?": f"[{value}]"}.get(str(one.nargs), value)
    if not one.option_strings:
        return many
    return ", ".join(one.option_strings) + ("" if one.nargs == 0 else f" {many}")


def _options_table(found: Mapping[str, argparse.Action]) -> str:
    return table(("option", "meaning"), [(f"`{written}`", _meaning(one)) for written, one in found.items()])


def _meaning(one: argparse.Action) -> str:
    # The page is the same on every machine.
    default = str(one.default)
    default = "the user's data folder" if default.startswith("/") else default
    assert one.help, f"{_written(one)} has no meaning"
    text = one.help.replace("%(default)s", default).replace("%%", "%")
    return f"{text}{' (required)' if one.required and one.option_strings else ''}"


def _sections_of_commands() -> Iterator[str]:
    """Yield the page of commands, piece by piece."""
    yield COMMANDS_HEAD
    every = argparse.ArgumentParser(add_help=False)
    add_common(every, checkout=True)
    common = options(every)
    yield f"\n## Options of every command\n\nAll but `--json` are for the commands that work on a checkout.\n\n{_options_table(common)}"
    for verb, command in main.COMMANDS.items():
        parser = main.parsers(command.module)[verb]
        own = {name: one for name, one in options(parser).items() if name not in common or _meaning(one) != _meaning(common[name])}
        yield f"\n## `{verb}`\n\n{command.summary[0].upper()}{command.summary[1:]}.\n"
        yield f"\n{_options_table(own)}" if own else ""


def commands_page() -> str:
    """Return the page of commands."""
    return "".join(_sections_of_commands())


#: Every page → its text.
PAGES = {
    README: readme,
    ROOT / "cherry_picks" / "README.md": patches_page,
    REFERENCE / "commands.md": commands_page,
    REFERENCE / "errors.md": errors_page,
    REFERENCE / "files.md": files_page,
    REFERENCE / "gates.md": gates_page,
    REFERENCE / "verdict.schema.json": schema_page,
    SCALING: scaling,
}

if __name__ == "__main__":
    for page, render in PAGES.items():
        page.write_text(render(), "utf-8")
