"""What an owner sees first fits into a terminal of 80 columns, and no word is broken."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import standin
from tests.support.standin import Machine

SPECULATION = '--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Return a machine with short paths, as an owner's are."""
    folder = Path("/tmp") / f"sw{tmp_path_factory.mktemp('width').stat().st_ino}"
    folder.mkdir()
    machine = Machine(folder, standin.environment(folder / "venv"))
    machine.environment |= {"HF_HUB_CACHE": str(folder / "hub"), "SPARKWRIGHT_PREFIX": str(folder / "none"), "VLLM_USE_V1": "1"}
    yield machine
    machine.close()
    subprocess.run(["rm", "-r", str(folder)], check=True)


def screen(command: list[str], columns: int, place: Machine) -> list[str]:
    """Return the lines that *command* writes to a terminal of so many *columns*, without colours."""
    typed = f"stty cols {columns}; {shlex.join(command)}"
    variables = {name: value for name, value in place.environment.items() if name not in ("COLUMNS", "LINES")}
    done = subprocess.run(
        ["script", "--quiet", "--command", typed, "/dev/null"], env={**variables, "TERM": "xterm"}, cwd=place.folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout.decode("utf-8", "replace"))
    return [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]


#: Where a word that is longer than a line is divided.
ENDS = (",", "/", "=", ":")
SHOWN = {
    "doctor": ["doctor", "--offline"],
    "dry-run": ["serve", "toy-cpu", "--model", "{model}", "--floor", "0", "--dry-run", "--max-model-len=64", SPECULATION, "--python", "{python}"],
    "not downloaded": ["serve", "toy-cpu", "--model", "org/toy", "--python", "{python}", "--variable", "HF_HUB_OFFLINE=1"],
    "no room": ["serve", "--model", "{model}", "--python", "{python}", "--kv-cache-memory-bytes=4000G"],
    "unknown flag": ["serve", "--model", "{model}", "--python", "{python}", "--max-model-length=5", "--hf-token=geheim"],
    "many recipes": ["serve", "qwen3.6"],
    "no recipe": ["serve", "org/zzz"],
    "no release": ["serve", "gpt-oss-120b"],
    "bench": ["bench", "--max-model-len", "5"],
    "help": ["serve", "--help"],
}


@pytest.mark.parametrize("words", SHOWN.values(), ids=SHOWN)
def test_no_word_is_broken_in_80_columns(words: list[str], place: Machine) -> None:
    """A word that is longer than a line goes on behind a comma or the like; in a table, one that is longer than its column goes on anywhere."""
    values = {"model": str(place.model), "python": str(place.python)}
    own = [re.sub(r"\{(model|python)\}", lambda match: values[match[1]], word) for word in words]
    command = [sys.executable, "-m", "sparkwright", *own]
    narrow, wide = (screen(command, columns, place) for columns in (80, 400))
    assert [line for line in narrow if len(line) > 80] == []
    # Figures of the machine's memory differ between two runs.
    whole = {re.sub(r"\d+", "0", word) for line in wide for word in line.split()}
    long = [word for word in whole if len(word) > 40]
    for line in narrow:
        words = re.sub("─+", "", line).split()
        for word in words:
            part = re.sub(r"\d+", "0", word.strip("'\\"))
            divided = word.rstrip("'\\")[-1:] in ENDS or word == words[0] or len(word) > 60
            assert re.sub(r"\d+", "0", word) in whole or (divided and any(part in each for each in long)), (word, line)
