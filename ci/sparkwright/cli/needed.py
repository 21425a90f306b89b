"""
What the program in a container says of itself before its build: the files of the package index that
it will read.
"""

from __future__ import annotations

import sys

from sparkwright.builder import container_run
from sparkwright.cli import main
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError


def answer(words: list[str]) -> int:
    """
    Print what the ``build`` with the command line *words* reads, or why that cannot be said, as one
    JSON document.
    """
    console.json = True
    try:
        console.document(
            {"files": container_run.needed(main.session_of(main.parser().parse_args(words)))}
        )
    except SparkwrightError as error:
        console.finish(error.document())
        return error.exit_code
    console.finish()
    return 0


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1:]))
