"""
The text of docs/reference/commands.md, made from the command line itself.

``python tests/unit/verbs_page.py`` writes it; `test_repository` fails while it is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
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
With `--environment`, as in the serving images, these variables stand for options; one that looks like them and is none of them is refused:

"""


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of ``--help``."""
    return {name: main.parsers(command.module)[name] for name, command in main.COMMANDS.items()}


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
    text = (one.help or "").replace("%(default)s", default)
    text = text.replace("%%", "%").replace("|", "\\|")
    return f"{text}{' (required)' if one.required and one.option_strings else ''}"


def shared(found: Mapping[str, Mapping[str, argparse.Action]]) -> dict[tuple[str, str], list[str]]:
    """Return the options that several commands take with one meaning, and those commands, in the order of ``--help``."""
    owners: dict[tuple[str, str], list[str]] = {}
    for verb, options_of_verb in found.items():
        for written, one in options_of_verb.items():
            owners.setdefault((written, _meaning(one)), []).append(verb)
    return {option: commands for option, commands in owners.items() if len(commands) > 1}


def sections() -> Iterator[str]:
    """Yield the page, piece by piece."""
    found = {verb: options(parser) for verb, parser in verbs().items()}
    common = shared(found)
    yield HEAD
    yield "\n## Options of several commands\n\n|option|commands|meaning|\n|---|---|---|\n"
    for (written, meaning), commands in sorted(common.items(), key=lambda entry: -len(entry[1])):
        yield f"|`{written.replace('|', chr(92) + '|')}`|{_names(commands)}|{meaning}|\n"
    for verb, command in main.COMMANDS.items():
        own = {
            name: one for name, one in found[verb].items() if (name, _meaning(one)) not in common
        }
        texts = [f"\n## `{verb}`\n", f"{command.summary[0].upper()}{command.summary[1:]}.\n"]
        texts += [_table(own) + "\n"] if own else []
        texts += [VARIABLES + variables()] if verb == "serve" else []
        yield "\n".join(texts)


def variables() -> str:
    """Return the variables of a serving image as a table; a meaning that an option of ``serve`` has is not said again."""
    rows = ["|variable|stands for|", "|---|---|"]
    for name, (option, _, meaning) in serving.VARIABLES.items():
        flag = option if option.startswith("--") else "--" + option.replace("_", "-")
        known = {"--recipe": "`RECIPE`", "--flag": "`--flag`, for each word"}.get(flag, f"`{flag}`")
        rows.append(f"|`{name}`|{known}{f': {meaning}' if option.startswith('--') else ''}|")
    return "\n".join(rows) + "\n"


def _names(commands: Sequence[str]) -> str:
    """Return *commands* in words; those that nearly all have are named by what is missing."""
    checkout = [verb for verb, command in main.COMMANDS.items() if command.checkout]
    if len(commands) == len(main.COMMANDS):
        return "all"
    if set(checkout) <= set(commands):
        more = [f"`{verb}`" for verb in commands if verb not in checkout]
        return f"all that need a checkout{', ' if more else ''}{', '.join(more)}"
    return ", ".join(f"`{verb}`" for verb in commands)


def render() -> str:
    """Return the page."""
    return "".join(sections())


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
