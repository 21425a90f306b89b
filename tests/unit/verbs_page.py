"""
The text of docs/reference/commands.md, made from the command line itself.

``python tests/unit/verbs_page.py`` writes it; `test_repository` fails while it is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from sparkwright.cli import main
from sparkwright.cli import serve as serving

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"

HEAD = """\
# Commands

<!-- Made by tests/unit/verbs_page.py; change the parser, then run it again. -->

`sparkwright COMMAND`; some are Nox sessions of a checkout, too (`nox -s build -- …`). Exit codes: 0 done, 1 failed ([errors.md](errors.md)), 2 wrong usage,
3 a fault of ours, with a log, 4 inconclusive or not-run, 5 network or upstream unreachable, 130 interrupted.
Results go to standard output, progress and messages to standard error.
"""

VARIABLES = """\
With `--environment`, as in the serving images, these variables say the same; another one that looks like them is refused:

"""


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of ``--help``."""
    made = [
        main.parsers(module)
        for module in sorted({command.module for command in main.COMMANDS.values()})
    ]
    return {
        name: parser
        for name in main.COMMANDS
        for group in made
        for known, parser in group.items()
        if known == name
    }


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


def _table(found: dict[str, argparse.Action]) -> str:
    rows = [
        f"| `{written.replace('|', chr(92) + '|')}` | {_said(one)} |"
        for written, one in found.items()
    ]
    return "\n".join(["| option | meaning |", "|---|---|", *rows])


def _said(one: argparse.Action) -> str:
    # The page is the same on every machine.
    default = str(one.default)
    default = "the user's data folder" if default.startswith("/") else default
    text = (one.help or "").replace("%(default)s", default)
    text = text.replace("%%", "%").replace("|", "\\|")
    return f"{text}{' (required)' if one.required and one.option_strings else ''}"


def sections() -> Iterator[str]:
    """Yield the page, piece by piece."""
    found = {verb: options(parser) for verb, parser in verbs().items()}
    every = set.intersection(*(set(one) for one in found.values()))
    checkout = set.intersection(
        *(set(found[verb]) for verb, command in main.COMMANDS.items() if command.checkout)
    )
    client = [verb for verb, command in main.COMMANDS.items() if not command.checkout]
    parts = {
        "Every command": every,
        f"Every command but {', '.join(f'`{verb}`' for verb in client)}": checkout - every,
    }
    yield HEAD
    for title, names in parts.items():
        yield f"\n## {title}\n\n{_table({name: one for name, one in found['doctor'].items() if name in names})}\n"
    for verb, command in main.COMMANDS.items():
        shared = checkout if command.checkout else every
        own = {name: one for name, one in found[verb].items() if name not in shared}
        texts = [f"\n## `{verb}`\n", f"{command.summary[0].upper()}{command.summary[1:]}.\n"]
        texts += [_table(own) + "\n"] if own else []
        texts += [VARIABLES + serving.variables_table()] if verb == "serve" else []
        yield "\n".join(texts)


def render() -> str:
    """Return the page."""
    return "".join(sections())


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
