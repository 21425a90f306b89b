"""The entrypoint of the serving image: what each command makes of arguments and variables, and who gets the signals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
#: Where the program lies in the image.
PROGRAM = "/opt/sparkwright/program/bin/python"
#: Stands for the program's Python: says who it is, what it was given and what it sees.
SEEN = """\
import json, os, sys
print(json.dumps({"pid": os.getpid(), "words": sys.argv[1:], "given": os.environ.get("GIVEN")}))
"""
#: Of the stand-in.
NAME = "a python"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(name="entry", scope="module")
def _entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the entrypoint as it would be if the program lay in a folder of the test."""
    folder = tmp_path_factory.mktemp("entry")
    text = (ROOT / "build" / "entrypoint.sh").read_text()
    assert text.count(PROGRAM) == 1
    for name, body in ((NAME, f"#!{sys.executable} -ES\n{SEEN}"), ("entrypoint.sh", text.replace(PROGRAM, f"'{folder / NAME}'"))):
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    return folder / "entrypoint.sh"


def ran(entry: Path, *words: str, **variables: str) -> tuple[int, dict[str, object], str]:
    """Return status, what the program saw, and what was said."""
    with subprocess.Popen([entry, *words], env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        out, said = child.communicate()
    seen = json.loads(out or "{}")
    assert seen.pop("pid", child.pid) == child.pid, "a signal reaches the program, and nothing between"
    return child.returncode, seen, said


RUN = ["-P", "-m", "sparkwright.client.main", "run", "--"]


def serve(entry: Path, *words: str) -> list[str]:
    """Return the words of the program that runs `serve` in the environment of the release."""
    return [*RUN, str(entry.parent / NAME), "-P", "-m", "sparkwright", "serve", "--host", "0.0.0.0", "--port", "8888", *words]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], []),
        (["serve", "a-recipe", "--port", "80"], ["a-recipe", "--port", "80"]),
        (["health", "--json"], ["--health", "--json"]),
        (["bash", "-c", "x y"], None),
    ],
    ids=lambda words: " ".join(words[:3]) if words is not None else "",
)
def test_command_is_an_option_of_serve_or_a_shell_of_the_release(entry: Path, words: list[str], wanted: list[str] | None) -> None:
    status, seen, _ = ran(entry, *words)

    assert (status, seen["words"]) == (0, [*RUN, "/bin/bash", *words[1:]] if wanted is None else serve(entry, *wanted))


@pytest.mark.parametrize("word", ["server", "vllm", "", "--model", "serve;id", "$(id)", "ray-head"])
def test_an_unknown_command_is_refused_with_the_list(entry: Path, word: str) -> None:
    """Nothing is run for a word that is no command, and those that there are, are named."""
    status, seen, said = ran(entry, word)

    assert (status, seen) == (2, {})
    assert all(command in said for command in ("serve", "health", "bash"))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=st.lists(TEXT, max_size=4), value=TEXT)
def test_arguments_and_variables_arrive_as_they_are(
    entry: Path, words: list[str], value: str
) -> None:
    """Whatever blanks, quotes, newlines and dollars they hold, nothing is split, expanded or run."""
    _, seen, _ = ran(entry, "serve", *words, GIVEN=value)

    assert seen["words"] == serve(entry, *words)
    assert seen["given"] == value
