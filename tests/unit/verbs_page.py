"""
The text of docs/reference/commands.md, made from the command line itself.

``python tests/unit/verbs_page.py`` writes it; `test_repository` fails while it is out of date.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkwright.cli import main
from sparkwright.cli.options import add_common

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"

HEAD = """\
# Commands

<!-- Made by tests/unit/verbs_page.py; change the parser, then run it again. -->

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


def _table(found: Mapping[str, argparse.Action]) -> str:
    rows = [f"|`{written.replace('|', chr(92) + '|')}`|{_meaning(one)}|" for written, one in found.items()]
    return "\n".join(["|option|meaning|", "|---|---|", *rows])


def _meaning(one: argparse.Action) -> str:
    # The page is the same on every machine.
    default = str(one.default)
    default = "the user's data folder" if default.startswith("/") else default
    assert one.help, f"{_written(one)} has no meaning"
    text = one.help.replace("%(default)s", default)
    text = text.replace("%%", "%").replace("|", "\\|")
    return f"{text}{' (required)' if one.required and one.option_strings else ''}"


def sections() -> Iterator[str]:
    """Yield the page, piece by piece."""
    yield HEAD
    every = argparse.ArgumentParser(add_help=False)
    add_common(every, checkout=True)
    common = options(every)
    yield f"\n## Options of every command\n\nAll but `--json` are for the commands that work on a checkout.\n\n{_table(common)}\n"
    for verb, command in main.COMMANDS.items():
        parser = main.parsers(command.module)[verb]
        own = {name: one for name, one in options(parser).items() if name not in common or _meaning(one) != _meaning(common[name])}
        yield f"\n## `{verb}`\n\n{command.summary[0].upper()}{command.summary[1:]}.\n"
        yield f"\n{_table(own)}\n" if own else ""


def render() -> str:
    """Return the page."""
    return "".join(sections())


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
