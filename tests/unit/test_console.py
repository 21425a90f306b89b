"""Text from outside on its way to a terminal, and the document that programs read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.core.console import Console, markdown_block, markdown_escape, printable
from sparkwright.core.pages import clean

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


@given(st.text(max_size=60))
def test_plain_text_has_no_markup(text: str) -> None:
    """Whatever a stranger wrote is one line without a live mark of Markdown or a mention."""
    found = markdown_escape(clean(text))
    bare = found.replace("\\", "")
    assert "\n" not in found
    assert "@" not in bare or "@\u200b" in bare
    for mark in "`*_{}[]<>|~#!&$":
        assert found.count(mark) == found.count(f"\\{mark}")


@given(st.lists(st.text(alphabet=st.sampled_from("`a \t")), max_size=5))
def test_no_line_ends_its_block(lines: list[str]) -> None:
    """The fence of a block is longer than every run of its own marks inside."""
    first, *_, last, end = markdown_block(lines).split("\n")
    fence = first.removesuffix("text")
    assert (last, end) == (fence, "")
    assert all(fence not in line for line in lines)
