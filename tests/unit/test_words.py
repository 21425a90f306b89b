"""Real programs still say the words by which outcomes are decided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkwright.core import words

#: Scripts for ``sh``. A line above moves a hunk; no repository has the file of digits.
SAID = {
    "HUNK_MOVED": "git init -q; seq 9 >a; git add a; seq 8 >a; git diff >p; (echo new; seq 9) >a; git apply -v p",
    "NAME_UNKNOWN": "echo 'namespace a {} int b = a::c(d);' >driver.cpp; g++ -c driver.cpp",
    "JSON_CUT_OFF": "\"$PYTHON\" -c 'import msgspec; msgspec.json.decode(b\"{\\\"a\\\": [1, \")'",
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_real_program_says_the_words(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("PYTHON", sys.executable)
    done = subprocess.run(["sh", "-c", SAID[name]], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert getattr(words, name).search(done.stdout + done.stderr), done
