"""The command line as people and programs meet it: exit codes, one JSON document, and nothing loaded in vain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import endings

from sparkwright import __version__
from sparkwright.cli import main
from sparkwright.core.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.conftest import Cli, Mini

ROOT = Path(__file__).parents[2]

#: What the command line must not load before it is needed: each costs more than the rest together.
HEAVY = ("git", "torch", "docker", "requests", "pypi_simple", "rich", "elftools", "tree_sitter", "filelock")


def test_a_verb_that_is_done_gives_0(cli: Cli, mini: Mini) -> None:
    """The result is on standard output, what happens meanwhile on standard error."""
    done = cli("apply", *mini.words)

    assert done.returncode == 0
    assert "Take the largest scale from loaded experts only" in done.stdout
    assert "apply 2 patches to vllm" in done.stderr
    assert "apply 2 patches" not in done.stdout


def test_json_is_one_document_and_nothing_else(cli: Cli, mini: Mini) -> None:
    """Under --json standard output parses as one document; people's text, tables included, is on standard error."""
    done = cli("apply", "--json", *mini.words)
    trees = {tree["fork"]: tree for tree in json.loads(done.stdout)["trees"]}

    assert done.returncode == 0
    assert set(trees) == {"cutlass", "flashinfer", "vllm"}
    assert re.fullmatch(r"[0-9a-f]{40}", trees["vllm"]["tree"])
    assert trees["vllm"]["steps"][0]["subject"].startswith("Take the largest")
    assert "supported-12.1" in done.stderr


def test_an_expected_failure_gives_1(cli: Cli, mini: Mini) -> None:
    """Reference, what failed and what to do are said, without a traceback; what it usually means is a guess, and left to docs/errors.md."""
    mini.edit("forks/demo/lock.yaml", "ref: v0.33.0", "ref: v0.33.0\n      reff: x")
    done = cli("apply", *mini.words)

    assert (done.returncode, done.stdout) == (1, "")
    assert "error: file-invalid: " in done.stderr
    assert "means" not in done.stderr
    assert "what to do: " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_expected_failure_is_one_json_document(cli: Cli, mini: Mini) -> None:
    """Under --json the failure is the document."""
    done = cli("apply", "--json", "--fork", "none", *mini.words)
    error = json.loads(done.stdout)["error"]

    assert done.returncode == 1
    assert error["reference"] == "not-provided"
    assert error.keys() == {"reference", "what", "means", "todo", "details"}
    assert error["details"] == ["forks: cutlass, flashinfer, vllm"]


def test_an_unknown_stack_shows_those_that_there_are(cli: Cli, mini: Mini) -> None:
    """A misspelt stack is not-provided, with the stacks of the checkout."""
    done = cli("fetch", "--root", mini.root, "--stack", "2025.01")

    assert done.returncode == 1
    assert "error: not-provided: There is no stack '2025.01'" in done.stderr
    assert "stacks: demo" in done.stderr


@pytest.mark.parametrize("stack", ["../demo", "demo/../demo/.", "/"])
def test_a_stack_is_a_name(cli: Cli, mini: Mini, stack: str) -> None:
    """A path in place of a name leads nowhere that would be taken for a stack of that name."""
    assert cli("apply", *mini.words, "--stack", stack).returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No command is given"),
        (["buidl"], "nearest: build"),
        (["drift"], "nearest: patch drift"),
        (["patch"], "nearest: patch status, patch pick"),
        (["patch", "pikc"], "nearest: patch pick"),
        (["apply", "--frobnicate"], "--frobnicate"),
        (["apply", "--source", "svn"], "invalid choice: 'svn'"),
        (["apply", "--mirror", "=x"], "--mirror"),
        (["build", "--memory", "much"], "'much' is not a number of gigabytes"),
        (["build", "--memory", "nan"], "'nan' is not a number of gigabytes"),
        (["build", "--jobs", "0"], "'0' is not a whole number from 1"),
        (["lab", "status", "--output", "x", "--day", "22/11"], "no day like"),
        (["gate", "--variable", "A-B=1"], "NAME=VALUE"),
    ],
)
def test_wrong_usage_gives_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command or argument is quoted with the nearest names, and nothing is begun."""
    assert main.main(words) == 2
    shown = capsys.readouterr()
    assert (shown.out, said in shown.err) == ("", True)


def test_wrong_usage_is_a_document_too(cli: Cli) -> None:
    """A program that asked for JSON gets one document, also when its words cannot be read."""
    done = cli("build", "--json", "--jobs", "none")

    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["reference"] == "usage"


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_an_unusable_cache_directory_is_an_expected_failure(cli: Cli, mini: Mini, tmp_path: Path, kind: str) -> None:
    """A cache directory that cannot be one is named, with what to do; nothing is written elsewhere."""
    file = tmp_path / "in-the-way"
    file.write_text("kept")
    done = cli("apply", "--json", *mini.words, "--cache-dir", str(file if kind == "file" else file / "cache"))
    error = json.loads(done.stdout)["error"]

    assert (done.returncode, error["reference"]) == (1, "cache-unusable")
    assert str(file) in error["what"]
    assert file.read_text() == "kept"


def test_a_fault_gives_3_and_leaves_a_log(cli: Cli, mini: Mini) -> None:
    """What nobody foresaw ends with a log that holds versions and the traceback; under --json, with a document that names it."""
    mini.cache.mkdir()
    (mini.cache / "objects.git").write_text("a file, where the object store should be")
    done = cli("apply", "--json", *mini.words, env={"SPARKWRIGHT_CACHE_DIR": str(mini.cache)})
    error = json.loads(done.stdout)["error"]
    log = Path(error["log"])

    assert (done.returncode, error["reference"]) == (3, "fault")
    assert str(log) in done.stderr
    assert "Traceback" not in done.stderr
    assert f"sparkwright {__version__}\nPython " in log.read_text()
    assert "Traceback (most recent call last)" in log.read_text()


def test_an_interruption_gives_130(mini: Mini) -> None:
    """Ctrl-C while another run is waited for ends at once, says that nothing is lost, and leaves the store usable."""
    with waiting(mini, endings.heard) as run:
        run.send_signal(signal.SIGINT)
        out, rest = run.communicate(timeout=60)

    assert (run.returncode, out) == (130, "")
    assert "interrupted; what is finished is kept" in rest
    assert "Traceback" not in rest


def test_what_was_started_to_ignore_interruptions_ends_by_sigterm(mini: Mini) -> None:
    """With ``nohup … &`` neither Ctrl-C nor the end of the terminal ends it; SIGTERM does, within seconds."""
    with waiting(mini, endings.ignored) as run:
        for number in (signal.SIGINT, signal.SIGHUP):
            run.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(0.5)
        run.terminate()

        assert run.wait(10) == -signal.SIGTERM


@contextlib.contextmanager
def waiting(mini: Mini, preexec: Callable[[], None]) -> Iterator[subprocess.Popen[str]]:
    """Yield a run of `apply` that waits for another; if it is left at the end, it is killed."""
    command = [sys.executable, "-m", "sparkwright", "apply", *mini.words]
    with Store(mini.cache).lock("objects"):
        run = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=preexec,  # noqa: PLW1509  system calls, no lock
        )  # fmt: skip
        try:
            assert run.stderr is not None
            while "waiting for it to end" not in (line := run.stderr.readline()):
                assert line
            yield run
        finally:
            run.kill()
            run.communicate()


def test_a_reader_that_goes_away_is_no_fault(mini: Mini) -> None:
    """`sparkwright … | head -1` leaves no traceback and no log of a fault."""
    command = [sys.executable, "-m", "sparkwright", "apply", "--json", *mini.words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        said = run.stderr.read()

    assert run.returncode in (0, 1)
    assert "fault" not in said


#: What Python itself says when it cannot write what is left, and what says that we did not foresee it.
UNFORESEEN = re.compile("Traceback|Exception ignored|error: fault")


def directed(words: Sequence[str | Path], where: str, *, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program with its streams directed as a shell would by the words *where*; it may write files of *limit* bytes."""
    command = f"exec {shlex.join([sys.executable, '-m', 'sparkwright', *map(str, words)])} {where}"
    # With this variable every word is written at once, and what is left in a buffer at the end is never seen.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False, timeout=120, preexec_fn=limited
    )


#: A help text, a table, a document, and the documents of a failure and of wrong usage.
PRINTING = [["--version"], ["doctor"], ["doctor", "--json"], ["fetch", "--fork", "none", "--json"], ["fetch", "--none", "--json"]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_an_output_without_room_is_disk_full(mini: Mini, words: list[str]) -> None:
    """Whatever is printed, a full disk under it is said by name, once, and the exit code tells of it, also where nobody can be told."""
    shared = mini.words if words[0] in ("doctor", "fetch") else []
    done = directed([*words, *shared], "> /dev/full")

    assert done.returncode == 1
    assert done.stderr.count("error: disk-full: There is no room for standard output.") == 1
    assert not UNFORESEEN.search(done.stderr)
    assert directed([*words, *shared], "> /dev/full 2>&1").returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_messages_without_room_are_disk_full(mini: Mini) -> None:
    """Where only standard error is full, the document says so."""
    done = directed(["doctor", "--json", *mini.words], "2> /dev/full")

    assert (done.returncode, json.loads(done.stdout)["error"]["reference"]) == (1, "disk-full")


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
@pytest.mark.parametrize("where", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_output_is_wanted_by_nobody(mini: Mini, words: list[str], where: str) -> None:
    """The verb does its work and ends as it would have."""
    shared = mini.words if words[0] in ("doctor", "fetch") else []
    done = directed([*words, *shared], where)

    assert done.returncode == (2 if "--none" in words else 1 if "none" in words else 0)
    assert done.stdout == ""
    assert not UNFORESEEN.search(done.stderr)


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_reader_that_went_away_is_told_nothing(mini: Mini, words: list[str]) -> None:
    """The pipe has no reader when the first word is written; the run fails, and adds nothing to what it said before."""
    shared = mini.words if words[0] in ("doctor", "fetch") else []
    reader, writer = os.pipe()
    os.close(reader)
    try:
        # With this variable every word is written at once, and what is left in a buffer at the end is never seen.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        command = [sys.executable, "-m", "sparkwright", *words, *shared]
        done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)

    assert done.returncode in (1, 2)
    assert not UNFORESEEN.search(done.stderr)


def test_an_output_that_may_not_grow_is_named(mini: Mini, tmp_path: Path) -> None:
    """What is neither a full disk nor a reader that left has a reference of its own."""
    done = directed(["doctor", "--offline", "--json", *mini.words], f"> {tmp_path / 'out'}", limit=200)

    assert done.returncode == 1
    assert "error: output-unwritable: Standard output cannot be written." in done.stderr
    assert not UNFORESEEN.search(done.stderr)


@pytest.mark.parametrize("shown", [[], ["--json"]], ids=["text", "json"])
def test_a_name_that_is_no_text_is_escaped(shown: list[str]) -> None:
    """A file name of any bytes may stand on the command line; the document has it escaped."""
    done = directed(["lab", "report", os.fsdecode(b"gone-\xff.json"), *shown], "")

    assert done.returncode == 1
    assert "error: file-invalid: " in done.stderr
    assert not shown or "gone-\\udcff.json" in json.loads(done.stdout)["error"]["what"]


@pytest.mark.parametrize("words", [["lab", "report", "PIPE"], ["release", "key", "--show", "PIPE"]], ids=lambda words: words[1])
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(cli: Cli, mini: Mini, tmp_path: Path, words: list[str]) -> None:
    """It holds nothing, which is not what was asked for."""
    os.mkfifo(tmp_path / "pipe")
    shared = mini.words if words[0] == "lab" else []
    done = cli(*(str(tmp_path / "pipe") if word == "PIPE" else word for word in words), *shared, "--json")

    expected = {"lab": "file-invalid", "release": "key-invalid"}[words[0]]

    assert (done.returncode, json.loads(done.stdout)["error"]["reference"]) == (1, expected)


def test_one_fork_can_be_chosen(cli: Cli, mini: Mini) -> None:
    """--fork limits the verb to the named forks, in the order of the stack."""
    done = cli("apply", "--json", "--fork", "vllm", "--fork", "cutlass", *mini.words)

    assert [tree["fork"] for tree in json.loads(done.stdout)["trees"]] == ["cutlass", "vllm"]


def test_offline_needs_what_is_in_the_store(cli: Cli, mini: Mini) -> None:
    """Offline fails before the first fetch and works after it."""
    before = cli("apply", "--offline", *mini.words)
    cli("apply", *mini.words)
    after = cli("apply", "--offline", *mini.words)

    assert (before.returncode, after.returncode) == (5, 0)
    assert "error: offline: " in before.stderr


def test_lock_is_refused_offline(cli: Cli, mini: Mini) -> None:
    """The lock is not written from memory."""
    text = (mini.root / "forks" / "demo" / "lock.yaml").read_text()
    done = cli("lock", "--offline", *mini.words)

    assert done.returncode == 5
    assert (mini.root / "forks" / "demo" / "lock.yaml").read_text() == text


def test_the_checkout_is_found_from_below(mini: Mini) -> None:
    """Without --root, the checkout is the nearest folder upwards that holds stacks."""
    command = [sys.executable, "-m", "sparkwright", "apply", "--json", "--fork", "cutlass", *mini.words]
    place = command.index("--root")
    del command[place : place + 2]
    done = subprocess.run(command, cwd=mini.root / "build" / "demo", capture_output=True, text=True, check=True)

    assert json.loads(done.stdout)["trees"][0]["fork"] == "cutlass"


def test_help_names_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """--help fits 80 columns and 32 lines; a group shows its commands, and each command its options."""
    assert main.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80
    words = set(" ".join(lines).split())
    assert all(words.issuperset(command.split()) for command in main.COMMANDS)
    assert main.main(["patch", "--help"]) == 0
    assert "  bisect     find the change" in capsys.readouterr().out
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparkwright {__version__}\n"


#: An interpreter without the packages of the part `full`.
BARE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from sparkwright.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
#: Their modules, by pyproject.toml's names where they differ.
MODULES = {"cyclonedx-python-lib": "cyclonedx", "GitPython": "git", "nvidia-ml-py": "pynvml", "pyelftools": "elftools"}


@pytest.fixture(name="bare")
def _bare() -> Sequence[str]:
    full = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["full"]
    names = [re.split(r"[>=]", requirement)[0] for requirement in full]
    return "-c", BARE % ({MODULES.get(name, name.replace("-", "_").lower()) for name in names},)


@pytest.mark.parametrize("words", [["apply"], ["build", "--fork", "vllm"], ["patch", "status"], ["patch", "export", "--check"]], ids=" ".join)
def test_a_part_that_is_not_installed_is_named(cli: Cli, mini: Mini, bare: Sequence[str], words: list[str]) -> None:
    """Without the part `full`, a command that needs it names the package and the command that installs it."""
    done = cli(*words, *mini.words, "--json", program=bare)
    error = json.loads(done.stdout)["error"]

    assert (done.returncode, error["reference"]) == (1, "part-missing")
    assert "[full]" in error["install"]


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["list", "--index", "none"], "index-missing"),
        (["install", "--into", "none", "--index", "none"], "environment-unusable"),
        (["uninstall", "--into", "none"], "environment-unusable"),
        (["serve", "--health", "--patience", "1"], "server-dead"),
        (["release", "key", "--show", "none"], "key-invalid"),
        (["release", "verify", "none.whl", "--from", "none"], "trust-missing"),
        (["doctor", "--into", "none"], "environment-unusable"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_user_of_wheels_needs_is_in_the_plain_installation(
    cli: Cli, tmp_path: Path, bare: Sequence[str], words: list[str], reference: str
) -> None:
    """The commands for those who install and serve come as far without the part `full` as with it."""
    done = cli(*words, "--json", "--cache-dir", tmp_path / "cache", program=bare)

    assert json.loads(done.stdout)["error"]["reference"] == reference


def test_github_gets_groups_and_annotations(cli: Cli, mini: Mini) -> None:
    """Under GitHub Actions steps fold into groups that are closed again, and a failure is an annotation."""
    good = cli("apply", *mini.words, env={"GITHUB_ACTIONS": "true"})
    bad = cli("apply", "--fork", "none", *mini.words, env={"GITHUB_ACTIONS": "true"})

    assert good.stderr.count("::group::") == good.stderr.count("::endgroup::") > 0
    assert "::error title=not-provided::Stack demo has no fork 'none'." in bad.stderr


# What is loaded.


def loaded(cli: Cli, script: str, *words: str) -> set[str]:
    """Return which of `HEAVY` are loaded after *script*."""
    shown = f"{script}\nimport sys\nprint('loaded', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = cli(*words, program=("-c", shown))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_command_line_itself_loads_nothing_heavy(cli: Cli) -> None:
    """Parsing a command line, and importing every verb, costs no library that the verb does not use."""
    every = "from sparkwright.cli import main\nfor command in main.COMMANDS.values(): main.parsers(command.module)"

    assert loaded(cli, every) == set()
    done = cli("-X", "importtime", "-m", "sparkwright", "--help", program=())
    assert "sparkwright.forks" not in done.stderr


def test_a_build_of_which_nothing_changed_loads_nothing_heavy(cli: Cli, mini: Mini) -> None:
    """That a wheel is there already is known without git, a network library or torch."""
    script = (
        "import sys\nfrom sparkwright.builder import pipeline\nfrom sparkwright.cli import context, main\n"
        "run = context.checkout(main.parse(sys.argv[1:]))\nprint(pipeline.build(run, 'cutlass').filename)"
    )
    first = loaded(cli, script, "build", *mini.words)

    assert "git" in first
    assert loaded(cli, script, "build", *mini.words) <= {"filelock"}


def test_a_second_apply_asks_no_network(cli: Cli, mini: Mini) -> None:
    """With everything in the store, neither the index nor a host is asked, and no network library is loaded."""
    words = ("apply", "--json", *mini.words)
    cli(*words)

    script = "import sys\nfrom sparkwright.cli.main import main\nassert main(sys.argv[1:]) == 0"
    assert loaded(cli, script, *words).isdisjoint({"requests", "pypi_simple", "torch", "docker", "tree_sitter"})


def test_the_environment_of_the_caller_is_not_needed(mini: Mini) -> None:
    """With hardly any variables, as cron and systemd start programs, the same work is done."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    command = [sys.executable, "-m", "sparkwright", "apply", "--json", *mini.words]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
