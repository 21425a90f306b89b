"""Text from outside on its way to a terminal, and the document that programs read."""

from __future__ import annotations

import time

import pytest

from sparkwright.core.console import Console, printable

#: Colour by an escape, a C1 control, a change of direction, a line that is overwritten.
HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\re"


def test_printable_escapes_what_a_terminal_obeys() -> None:
    """Controls are shown as escapes; text of any alphabet, line ends and tabs stay."""
    assert printable(HOSTILE) == "a\\x1b[31mb\\x9b2Jc\\u202ed\\re"
    assert printable("Größe\t日本語 🚀\n1\u202f000") == "Größe\t日本語 🚀\n1\u202f000"


def test_output_has_no_raw_controls(capsys: pytest.CaptureFixture[str]) -> None:
    """Notes, warnings, results and tables escape text from outside."""
    console = Console()
    console.note(HOSTILE)
    console.warn(HOSTILE)
    console.result(HOSTILE)
    console.table(HOSTILE, ["a"], [[HOSTILE]], result=True)
    out, err = capsys.readouterr()

    assert not set("\x1b\x9b\u202e\r") & set(out + err)
    assert (out + err).count("\\x9b2J") == 5


def test_resumed_download_is_estimated_by_what_came_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gigabytes of an earlier run say nothing about the pace of this one."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Console().progress("a wheel", 0, "bytes") as progress:
        progress.update(3e9, total=4e9)
        now += 20
        progress.update(3.1e9, total=4e9)

    assert capsys.readouterr().err == "  a wheel: 3.1 GB of 4.0 GB, about 3 min 00 s left\n"
