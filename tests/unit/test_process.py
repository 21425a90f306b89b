"""Programs that are run: a whole log, the last lines in the error, nothing left running, and the words by which outcomes are decided."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support.processes import until

from sparkwright.builder import BuildError
from sparkwright.core import process, words


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_a_failure_shows_the_last_lines_and_the_log(tmp_path: Path) -> None:
    """
    The error is of the kind that was asked for, with the last lines and the status. The log begins with the command and holds both streams;
    each line is also passed on.
    """
    script, lines = "import sys; [print('line', number, flush=True) for number in range(100)]; sys.exit('failed')", list[str]()
    with refusal("compile-failed", match="It failed.") as caught:
        process.run(python(script), log=tmp_path / "x.log", on_line=lines.append, failure=partial(BuildError, "compile-failed"), what="It failed.")

    assert caught.value.details[-4:] == ("line 99", "failed", "status: 1", f"full log: {tmp_path / 'x.log'}")
    assert (tmp_path / "x.log").read_text().splitlines() == [f"$ {' '.join(python(script))}", *lines]


@pytest.mark.parametrize(
    ("command", "reference", "what"),
    [
        (["no-such-program"], "tool-missing", "no-such-program is not installed"),
        (python("import time; time.sleep(60)"), "command-failed", r"did not end within 0\.2 s"),
    ],
    ids=["missing", "hanging"],
)
def test_a_program_that_is_missing_or_hangs_is_refused(command: list[str], reference: str, what: str) -> None:
    with refusal(reference, match=what):
        process.output(command, timeout=0.2)


def test_variables_that_change_builds_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of the user's shell do not reach a compiler, the rest does; an empty value removes a variable."""
    for name in ("CFLAGS", "PYTHONPATH", "KEPT", "GONE"):
        monkeypatch.setenv(name, "x")
    made = process.clean_environment(GONE="", ADDED="1")

    assert {"CFLAGS", "PYTHONPATH", "GONE"}.isdisjoint(made)
    assert (made["KEPT"], made["ADDED"], made["LC_ALL"]) == ("x", "1", "C.UTF-8")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_program_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """`kill -9` of sparkwright ends the program that it runs."""
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    script = (
        "import sys\nfrom pathlib import Path\nfrom sparkwright.core import process\n"
        f"process.run([sys.executable, '-c', {child!r}], log=Path(sys.argv[1]), on_line=lambda line: print(line, flush=True))"
    )
    with subprocess.Popen([*python(script), str(tmp_path / "x.log")], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        status = Path(f"/proc/{parent.stdout.readline().strip()}/status")
        parent.send_signal(signal.SIGKILL)
    until(lambda: ended(status))


def ended(status: Path) -> bool:
    """Return whether the process of the file *status* is gone, or a zombie."""
    try:
        return "State:\tZ" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_interruption_ends_the_program(tmp_path: Path) -> None:
    """Whatever interrupts the reading of its lines also ends the program, before the interruption goes on."""
    seen: list[int] = []

    def interrupt(line: str) -> None:
        seen.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run(python("import os, time; print(os.getpid(), flush=True); time.sleep(60)"), log=tmp_path / "x.log", on_line=interrupt)

    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_a_limit_of_memory_holds() -> None:
    """A program that asks for more memory than it may have does not get it, and one of that size that asks for less ends well."""
    for wanted, status in ((400, 1), (10, 0)):
        command = process.wrap_with_limits(python(f"bytearray({wanted} << 20)"), memory=300 << 20)
        assert subprocess.run(command, check=False, capture_output=True).returncode == status


def test_words_of_a_full_disk_decide_nothing(tmp_path: Path) -> None:
    """A compiler quotes lines of the sources; where there is room, the failure is the one that its caller expects."""
    command = python("import sys; sys.exit('a.cu:7: error: \\'No space left on device\\'')")
    with refusal("compile-failed"):
        process.run(command, log=tmp_path / "x.log", failure=partial(BuildError, "compile-failed"))
    with refusal("command-failed"):
        process.output(command)


# The words by which outcomes are decided.

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
