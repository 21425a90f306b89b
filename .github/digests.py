#!/usr/bin/env python3
"""
Bind the files that jobs hand on to their sha256, which travels as an output of the job.

    digests.py write FOLDER PATTERN…    print the digests, and set the step's output `digests`
    digests.py check FOLDER             refuse a folder that differs from $DIGESTS in any file

Every job of a run can upload artifacts, but only a job itself sets its outputs. Runs before
anything is installed.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,254}")


def sha256(path: Path) -> str:
    """Return the sha256 of a file, which is read in pieces: wheels have hundreds of megabytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digests(folder: Path, patterns: list[str]) -> dict[str, str]:
    """Return file name → sha256 of the files of *folder* that fit a pattern; raise ValueError."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    for path in paths:
        if path.is_symlink() or not path.is_file() or not NAME.fullmatch(path.name):
            raise ValueError(f"{path.name!r} is not a plain file with a plain name")
    if not paths:
        raise ValueError(f"no file of {folder} fits {' '.join(patterns)}")
    return {path.name: sha256(path) for path in paths}


def main(action: str, folder: Path, *patterns: str) -> str:
    """Do *action*, and return what to print; raise ValueError if the folder is to be refused."""
    if action == "write":
        text = json.dumps(digests(folder, list(patterns)))
        with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as output:
            output.write(f"digests={text}\n")
        return text
    stated, actual = json.loads(os.environ["DIGESTS"]), digests(folder, ["*", ".*"])
    if wrong := sorted(stated.items() ^ actual.items()):
        names = ", ".join(dict.fromkeys(name for name, _ in wrong))
        raise ValueError(f"{folder} is not what the job that made it states: {names}")
    return f"{folder}: {len(actual)} files are what the job that made them states"


if __name__ == "__main__":
    try:
        sys.stdout.write(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]) + "\n")
    except ValueError as error:
        sys.exit(f"::error::{error}")
