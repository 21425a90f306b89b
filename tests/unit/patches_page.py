"""
The tables of what the stacks carry: cherry_picks/README.md, and that of the default stack in README.md.

``python tests/unit/patches_page.py`` writes both, from the patches, the ledgers and cherry_picks/effects.yaml; a test fails while one is
out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sparkwright.cherry_picks import ledger, series
from sparkwright.cherry_picks.effects import Effect, MeasuredEffect, load_effects
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.patch import Patch, load_folder
from sparkwright.forks.stack import Project, stack_names

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "cherry_picks" / "README.md"
DEFAULT = "2026.11"
COLUMNS = "|change|why|upstream|tested by|measured effect|use|what a Spark should see|dropped when|\n|---|---|---|---|---|---|---|---|\n"
BEGIN, END = "<!-- made by tests/unit/patches_page.py -->", "<!-- end -->"

HEAD = """\
# cherry_picks/: the pull requests that we carry

`FORK.yaml` is the ledger: a record for each upstream pull request that we carry or watch, candidates of peers among them (`unresolved`: not looked up). `ideas.yaml` has the
patch ideas of the seed reports, each with the releases that need it. `effects.yaml` says of each carried change what it is for, and what was measured of it.

A record has pointers and hashes, never the diff ([its fields](../docs/reference/files.md)). The diff is fetched as git objects, rendered in one fixed way, and has
to match the hashes. Stacks apply their picks in the order of the file, before our own patches. A hunk may be at another line than it says, but only if its lines
occur in exactly one place.

See [carry a pull request](../docs/howto/carry-a-pull-request.md).

<!-- What follows is made by tests/unit/patches_page.py; change patches, ledgers or effects.yaml, then run it again. -->

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


def _linked(text: str, records: Ledger) -> str:
    """Return *text* of a trailer in a cell of a table, with a link at each pull request or issue of vLLM."""
    shown = text.replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"\bvllm#(\d+)", rf"[vllm#\1]({records.url.removesuffix('.git')}/issues/\1)", shown)


def _name(patch: Patch, stack: str, fork: str, records: Ledger, up: str) -> str:
    """Return the change as a link, from a page that is *up* from the root."""
    if patch.pick:
        return f"[#{patch.pick}]({records.page(patch.pick)})"
    return f"[{patch.subject}]({up}forks/{stack}/{fork}/{patch.name})"


def _interval(effect: MeasuredEffect) -> str:
    return f"×{effect.ratio:.3g} ({effect.low:.3g} to {effect.high:.3g})"


def _full(effect: Effect | None) -> str:
    """Return the test, and all that was measured, for two cells."""
    path, _, test = effect.test.partition("::") if effect else ("", "", "")
    lines = [
        f"{each.figure}: {_interval(each)}, {each.count} pairs, {each.machine}, {each.date}, wheel `{each.wheel[:12]}` beside `{each.baseline[:12]}`"
        for each in (effect.measured if effect else ())
    ]
    tested = f"[{test}](../{path})" if test else "*none of its own*"
    return f"{tested if effect else ''}|{'<br>'.join(lines) or '*not measured*'}"


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
        yield f"\n### {stack}, {fork}\n\n{COLUMNS if changes else 'Nothing.' + chr(10)}"
        for patch, upstream in changes:
            effect = recorded.get(fork, {}).get(patch.name)
            name = _name(patch, stack, fork, records, "../")
            about = f"{name}: {patch.subject}" if patch.pick else name
            use, spark = (effect.use, effect.spark) if effect else ("default", "")
            cells = [_linked(cell, records) for cell in (about, patch.reason, upstream, patch.drop_when)]
            yield f"|{cells[0]}|{cells[1]}|{cells[2]}|{_full(effect)}|{use}|{spark}|{cells[3]}|\n"
    options = recorded.get("recipes", {})
    yield f"\n### {stack}, options of recipes\n\n{COLUMNS}" if options else ""
    for name, option in options.items():
        yield f"|`{name}`|{option.problem}|{option.upstream}|{_full(option)}|{option.use}|{option.spark}|{option.drop_when}|\n"


def render() -> str:
    """Return cherry_picks/README.md."""
    stacks = sorted(stack_names(ROOT), reverse=True)
    return HEAD + "".join(part for stack in stacks for part in _sections(stack))


def table() -> str:
    """Return the table of README.md."""
    recorded = load_effects(ROOT)[DEFAULT]
    parts = ["|problem|change|effect|use|\n|---|---|---|---|\n"]
    for fork, changes in carried(DEFAULT).items():
        records = ledger.load_ledger(ROOT, fork)
        for patch, _ in changes:
            effect = recorded[fork][patch.name]
            name = _name(patch, DEFAULT, fork, records, "").replace(f"[{patch.subject}]", f"[{effect.change}]")
            parts.append(f"|{effect.problem}|{name}|{_short(effect)}|{effect.use}|\n")
    for name, effect in recorded.get("recipes", {}).items():
        parts.append(f"|{effect.problem}|`{name}`: {effect.change}|{_short(effect)}|{effect.use}|\n")
    return "".join(parts)


#: In README.md, as long as it is true.
UNMEASURED = " No change has a measured effect on speed yet."


def with_table(text: str) -> str:
    """Return *text* of README.md with the table as it should be."""
    if any(effect.measured for effect in load_effects(ROOT)[DEFAULT]["vllm"].values()):
        text = text.replace(UNMEASURED, "")
    head, _, rest = text.partition(f"{BEGIN}\n")
    _, _, tail = rest.partition(f"{END}\n")
    assert head != text
    assert tail
    return f"{head}{BEGIN}\n{table()}{END}\n{tail}"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")
