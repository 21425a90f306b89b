"""The command line as people and programs meet it: exit codes, one JSON document, and lazy imports."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support import processes
from tests.unit.conftest import ROOT, Cli, Mini

from sparkwright import __version__
from sparkwright.cli import main
from sparkwright.core.store import Store

#: What the command line must not load before it is needed: each costs more than the rest together.
HEAVY = ("torch", "requests", "pypi_simple", "rich", "elftools", "filelock")


def test_json_is_one_document_and_messages_are_apart(cli: Cli, mini: Mini) -> None:
    """Standard output has the result alone: for people their table, for programs one document."""
    done = cli("apply", "--fork", "vllm", *mini.words)
    assert "patch    Take the" in done.stdout
    assert "apply 2 patches to vllm" in done.stderr.replace(done.stdout, "")
    done = cli("apply", "--json", "--fork", "vllm", "--fork", "cutlass", *mini.words)
    trees = json.loads(done.stdout)["trees"]
    assert [tree["fork"] for tree in trees] == ["cutlass", "vllm"]
    assert re.fullmatch(r"[0-9a-f]{40}", trees[1]["tree"])


def test_an_expected_failure_gives_1_and_a_document(cli: Cli, mini: Mini) -> None:
    """Reference, what failed and what to do, without a traceback; in JSON, and as an annotation on GitHub."""
    done = cli("apply", "--json", "--fork", "none", *mini.words, env={"GITHUB_ACTIONS": "true"})
    error = json.loads(done.stdout)["error"]

    assert (done.returncode, error["reference"], error["details"]) == (1, "not-provided", ["forks: cutlass, flashinfer, vllm"])
    assert error.keys() == {"reference", "what", "means", "todo", "details"}
    assert "::error title=not-provided::Stack demo has no fork 'none'." in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: COMMAND"),
        (["drift"], "invalid choice: 'drift'"),
        (["patch"], "required: COMMAND"),
        (["patch", "pikc"], "invalid choice: 'pikc'"),
        (["apply", "--frobnicate"], "--frobnicate"),
        (["apply", "--source", "svn"], "invalid choice: 'svn'"),
        *((["apply", "--mirror", value], f"--mirror {value!r}") for value in ("", "=x", "https://a.example", "https://a.example=")),
        (["build", "--memory", "much"], "'much' is not a number of gigabytes"),
        (["build", "--memory", "nan"], "'nan' is not a number of gigabytes"),
        (["build", "--jobs", "0"], "'0' is not a whole number from 1"),
        (["gate", "--variable", "A-B=1"], "NAME=VALUE"),
        (["gate", "--hours", "4"], "--hours belongs to a night"),
        (["gate", "--hours", "4", "--recipe", "toy-cpu", "--only", "G0"], "--hours belongs to a night"),
        (["release", "yank", "s.1", "--at", "x"], "--keys names no key"),
        (["serve", "--model", "m", "--node-rank=2"], "0 on the first machine"),
        (["gate", "--only", "G0", "--channel", "verified"], "--gpu and --channel belong to --dry-run"),
        (["gate", "--only", "G0", "--gpu", "none"], "--gpu and --channel belong to --dry-run"),
        (["serve", "--deep"], "--deep belongs to --health"),
    ],
)
def test_wrong_usage_gives_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command or argument is quoted with the nearest names; a program gets a document."""
    assert main.main(words) == 2
    shown = capsys.readouterr()
    assert (shown.out, said in shown.err) == ("", True)
    assert main.main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["reference"] == "usage"


def test_a_fault_gives_3_and_leaves_a_log(cli: Cli, mini: Mini) -> None:
    """An unforeseen error ends with a log that holds versions and the traceback, named in the document."""
    mini.cache.mkdir()
    (mini.cache / "objects.git").write_text("a file, where the object store should be")
    done = cli("apply", "--json", *mini.words)
    error = json.loads(done.stdout)["error"]

    assert (done.returncode, error["reference"], error["log"] in done.stderr) == (3, "fault", True)
    assert re.search(rf"sparkwright {__version__}\nPython .*Traceback \(most recent call last\)", Path(error["log"]).read_text(), re.DOTALL)


def test_an_interruption_gives_130(mini: Mini) -> None:
    """Ctrl-C while another run is waited for ends at once, without a traceback."""
    command = [sys.executable, "-m", "sparkwright", "apply", *mini.words]
    with Store(mini.cache).lock("objects"):
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=processes.heard)  # noqa: PLW1509  system calls, no lock
        assert run.stderr is not None
        while "waiting for it to end" not in (line := run.stderr.readline()):
            assert line
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert run.stderr.read() == "interrupted; what is finished is kept, and the next run continues from here\n"


@pytest.mark.parametrize(
    ("words", "reference"),
    [(["build", "--output"], "usage"), (["apply", "--cache-dir"], "cache-unusable"), (["list", "--prefix"], "environment-unusable")],
)
def test_a_folder_that_is_not_utf8_is_refused(
    mini: Mini, tmp_path: Path, words: list[str], reference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No record can hold its path, and nothing is made there."""
    folder = tmp_path / os.fsdecode(b"a-\xff")
    paths = [] if words[0] == "list" else mini.words
    assert main.main([words[0], *paths, words[1], str(folder)]) == (2 if reference == "usage" else 1)
    assert f"error: {reference}: " in capsys.readouterr().err
    assert not folder.exists()


# A help text, a table, and the documents of a failure and of wrong usage, each with its exit code.
def test_help_names_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """--help fits 80 columns and 34 lines."""
    assert main.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines) <= 34, max(map(len, lines)) <= 80) == (True, True)
    assert {word for command in main.COMMANDS for word in command.split()} <= set(" ".join(lines).split())


# What is loaded.

#: An interpreter without the packages of the part `full`.
BARE = """
import sys
sys.modules |= dict.fromkeys(%r)  # import takes None for a module that is not installed
from sparkwright.cli.main import main
sys.exit(main())
"""
#: Their modules, by pyproject.toml's names where they differ.
MODULES = {"cyclonedx-python-lib": "cyclonedx", "pyelftools": "elftools"}


@pytest.fixture(name="bare")
def _bare() -> Sequence[str]:
    full = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["full"]
    names = [re.split(r"[>=]", requirement)[0] for requirement in full]
    return "-c", BARE % ({MODULES.get(name, name.replace("-", "_").lower()) for name in names},)


def test_the_part_full_is_named_where_it_is_not_installed(cli: Cli, mini: Mini, bare: Sequence[str]) -> None:
    """A command that needs it names the command that installs it. So does `doctor`, which makes its other checks."""
    error = json.loads(cli("plan", *mini.words, "--json", program=bare).stdout)["error"]
    assert (error["reference"], "[full]" in error["install"]) == ("part-missing", True)
    done = cli("doctor", *mini.words, "--json", program=bare)
    checks = {check["subject"]: check for check in json.loads(done.stdout)["checks"]}
    assert (checks["part full"]["state"], "[full]" in checks["part full"]["remedy"]) == ("missing", True)
    assert checks["git"]["state"] == "ready"


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["install", "--index", "none"], "index-missing"),
        (["run", "true"], "nothing-installed"),
        (["serve", "--health", "--patience", "1"], "server-dead"),
    ],
    ids=str,
)
def test_what_a_user_of_wheels_needs_is_in_the_plain_installation(
    cli: Cli, tmp_path: Path, bare: Sequence[str], words: list[str], reference: str
) -> None:
    """The commands for those who install and serve come as far without the part `full` as with it."""
    done = cli(words[0], "--json", *words[1:], program=bare, env={"SPARKWRIGHT_PREFIX": str(tmp_path)})
    assert json.loads(done.stdout)["error"]["reference"] == reference


def loaded(cli: Cli, script: str, *words: str) -> set[str]:
    """Return which of `HEAVY` are loaded after *script*."""
    shown = f"{script}\nimport sys\nprint('loaded', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = cli(*words, program=("-c", shown))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_command_line_loads_nothing_in_vain(cli: Cli, mini: Mini) -> None:
    """Neither help nor any parser loads a heavy library, nor a second apply a network library, nor a build that is done more than locks."""
    every = "from sparkwright.cli import main\nfor command in main.COMMANDS.values(): main.parsers(command.module)"
    build = (
        "import sys\nfrom sparkwright.builder import pipeline\nfrom sparkwright.cli import main, options\n"
        "run = options.checkout(main.parse(sys.argv[1:]))\nprint(pipeline.build(run, 'cutlass').filename)"
    )
    first = loaded(cli, build, "build", *mini.words)
    assert loaded(cli, every) == set()
    assert "sparkwright.forks" not in cli("-X", "importtime", "-m", "sparkwright", "--help", program=()).stderr
    assert loaded(cli, build, "build", *mini.words) <= {"filelock"} < first


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("ci/*/README.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_the_documentation_exist(page: Path) -> None:
    """Every line that calls the program, or a Nox session of a command, is one that the parser takes."""
    text = page.read_text("utf-8")
    # Blocks that no test runs have no prompt.
    prompted = re.findall(r"^\$ (.*)", text, re.M)
    scripts = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    for line in (*prompted, *scripts.replace("\\\n", "").splitlines()):
        if command := re.match(r"(?:sudo )?(?:\S*/)?(?:sparkwright|nox -s(?= \w+ --)) (.*)", line):
            words = shlex.split(re.split(r"\s#|\||\s>", command[1].replace(" -- ", " ", 1))[0])
            main.parse(words)


def test_a_demo_without_policies_of_gates_is_refused(mini: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", *mini.words]) == 1
    assert "error: not-provided: There are no gate policies" in capsys.readouterr().err
