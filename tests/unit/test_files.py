"""Files and text from outside are hostile: reading ends, with the content or a refusal that names the place; nothing leaves its folder."""

import gzip
import json
import os
import random
import string
import struct
import subprocess
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import tars
from tests.unit.conftest import Repository

from sparkwright.core import errors, files, git, strict_yaml
from sparkwright.core.console import Console, printable
from sparkwright.forks import package_index


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record with what the reviewed files hold: text that may look like a number."""

    commit: str
    arch: str = ""
    names: tuple[str, ...] = ()


def refused(text: str, kind: Any = Pin) -> str:
    """Return everything that is said when *text* is refused."""
    with refusal("file-invalid") as caught:
        strict_yaml.parse(text, kind, "pins.yaml")
    assert "pins.yaml" in caught.value.what
    return "\n".join([caught.value.what, *caught.value.details])


#: Doubles with each line; no alias is expanded, so that a file of some lines cannot fill the memory.
BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('commit: "1234567"\nxcommit: x\n', "`xcommit`"),
        ("arch: '12.1f'\n", "`commit`"),
        ("", "null"),
        ("commit: a\narch: b\ncommit: c\n", "'commit' appears twice"),
        ("commit: a\narch: b\ncommit: c\n", "line 3"),
        (f"commit: {'1234567890' * 4}\n", "$.commit"),
        ("commit: 0123456\n", "$.commit"),
        ("commit: 1_234_567\n", "$.commit"),
        (BOMB, "alias *a is not allowed"),
        ("a: {<<: {commit: x}}\n", "merge keys are not allowed"),
    ],
    ids=["unknown", "missing", "emptied", "duplicate", "line of the duplicate", "digits", "octal", "underscores", "alias", "merge"],
)
def test_a_change_of_meaning_is_refused_where_it_stands(text: str, words: str) -> None:
    """
    Typos in field names, missing and repeated fields, commits that YAML reads as numbers, and aliases and merge keys, which bring in what a
    review does not see in its place, are errors that name them.
    """
    assert words in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "- " * 100_000,
        "{a: " * 100_000,
        "commit: [a\n",
        "commit: 2026-13-45\n",
        "? [a]\n: b\n",
        "commit: 0x_\n",
        "commit: " + "9" * 6000,
        "commit: !!bool maybe\n",
        "commit: !!timestamp soon\n",
        "commit: !!python/object/apply:os.getcwd []\n",
        "\tcommit: a\n",
        "commit: a\n---\ncommit: b\n",
        "commit: \x00\n",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_plain_yaml_is_refused(text: str) -> None:
    """Broken text, endless nesting, impossible values and foreign tags end in the same kind of error, never in a crash."""
    assert refused(text, Any if text.startswith(("[", "-", "{")) else Pin)


PLAIN = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=40)


@given(PLAIN, st.one_of(PLAIN, st.text(string.digits + "._:+-eExXoO~ ", max_size=45)), st.lists(PLAIN, max_size=3))
def test_what_is_written_is_read_back(commit: str, arch: str, names: list[str]) -> None:
    """Reading what was written gives the same record, for every text."""
    record = Pin(commit, arch, tuple(names))

    assert strict_yaml.parse(strict_yaml.dump(record), Pin, "x") == record


# Files.


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path), lambda _: None,
        lambda path: path.write_bytes(b"x" * (strict_yaml.LARGEST + 1)), lambda path: path.write_bytes(b"gr\xf6\xdfe"),
    ],
    ids=["pipe", "folder", "device", "loop", "missing", "large", "latin"],
)  # fmt: skip
def test_read_refuses_what_is_no_bounded_text_file(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A pipe without a writer, an endless device, a loop of links and the like are refused at once."""
    make(tmp_path / "file")
    with refusal("file-invalid"):
        strict_yaml.load(tmp_path / "file", Any)


@pytest.mark.parametrize(
    "data",
    [
        b'{"commit": "1", "commit": "2"}', b'{"commit": 1}', b'{"commit": "1", "y": 2}', b"", b"\xff", b'{"commit": NaN}',
        b"[" * 100_000, b'{"commit":' * 100_000, b'{"commit": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_json_is_read_strictly(tmp_path: Path, data: bytes) -> None:
    """Repeated keys, other types, deep nesting and numbers of thousands of digits are refused."""
    (tmp_path / "a.json").write_bytes(data)
    with refusal("file-invalid", match=r"a\.json is not the expected JSON"):
        files.read_json(tmp_path / "a.json", Pin)


# Archives.


def link(path: str, target: str) -> tars.Member:
    headers = {"linkpath": target} if "\udcff" not in target else {}
    return tars.member(path, type=tarfile.SYMTYPE, linkname=target, pax_headers=headers)


def members(folder: Path, tar: bytes) -> list[tuple[str, str, bytes]]:
    path = folder / "mini-1.tar.gz"
    path.write_bytes(gzip.compress(tar, 1))
    return list(package_index.sdist_members(path))


def unsafe(folder: Path, *entries: tars.Member) -> str:
    """Return everything that is said when a tar of *entries* is refused."""
    with refusal("archive-unsafe") as caught:
        members(folder, tars.packed(*entries))
    assert "mini-1.tar.gz" in caught.value.what
    return "\n".join([caught.value.what, *caught.value.details])


@pytest.mark.parametrize(
    "name",
    [
        "m/../../evil",
        "../evil",
        "m/a/..",
        "/etc/evil",
        "m\\evil",
        "m/.git/config",
        "m/sub/.GIT/hooks/post-checkout",
        "m/a\0b",
        "m/a\nb",
        "m/a\x1b[2Jb",
        "m/./a",
        "m//a",
        "m/" + "a" * 1100,
        "m/\udcff",
    ],
    ids=repr,
)
def test_a_name_that_could_leave_the_folder_is_unsafe(tmp_path: Path, name: str) -> None:
    """Climbing, absolute, Windows, repository, control-character and undecodable names are errors that show the name."""
    info = tarfile.TarInfo("m/placeholder")
    info.pax_headers = {"path": name}
    if "\udcff" in name:
        info.pax_headers, info.name = {}, name

    assert "member: " in unsafe(tmp_path, (info, b""))


LINKS = [
    ("m/link", "/etc/passwd"),
    ("m/link", "../outside"),
    ("m/link", ".."),
    ("m/a/link", "../../outside"),
    ("m/a/link", "./../../outside"),
    ("m/a/link", "b/../../../outside"),
    ("m/link", "..\\outside"),
    ("m/a/b", "../..\0/x/y"),
    ("m/a/z", "up/../x"),
    ("m/link", "\udcff"),
]


@pytest.mark.parametrize(
    ("said", "entries"),
    [
        *(("a link that leaves its folder", [link(*paths)]) for paths in LINKS),
        *(
            ("no file, folder or symbolic link", [tars.member("m/x", type=kind, linkname="m/y")])
            for kind in (tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
        ),
        ("the same path twice", [tars.member("m/a", b"1"), tars.member("m/a", b"2")]),
        ("the same path twice", [link("m/a", "b"), tars.member("m/a/x", b"2")]),
        ("the same path twice", [tars.member("m/a/x", b"1"), link("m/a", "b")]),
        ("the same path twice", [tars.member("m/a", b"1"), tars.member("m/a/b/c", b"2")]),
        ("more than one top folder", [tars.member("m/a"), tars.member("n/a")]),
    ],
)
def test_members_that_could_leave_or_replace_something_are_refused(
    tmp_path: Path, said: str, entries: list[tars.Member]
) -> None:
    """Links out of the folder, what is no file (hard links, devices, pipes), members on or below another one, a second top folder."""
    assert said in unsafe(tmp_path, *entries)


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_BYTES"])
def test_what_is_larger_than_any_source_is_unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(package_index, limit, 1)

    assert "larger than any source" in unsafe(tmp_path, tars.member("m/a", b"1"), tars.member("m/b", b"2"))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE, tarfile.REGTYPE])
def test_an_archive_that_would_fill_the_memory_while_it_is_listed_is_unsafe(tmp_path: Path, kind: bytes) -> None:
    """A header that states a gigabyte for its own text is not read; nor is the map of a sparse file, in the form of GNU or of pax."""
    info = tarfile.TarInfo("m/a")
    info.type, info.size = kind, 1 << 30
    if kind == tarfile.REGTYPE:
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "m/a"}

    with refusal("archive-unsafe", says="sparse file"):
        members(tmp_path, info.tobuf(tarfile.PAX_FORMAT))


def test_headers_of_earlier_members_are_not_kept(tmp_path: Path) -> None:
    """Neither those of each member, nor global ones: a small archive may hold many large ones."""
    infos = [tarfile.TarInfo(f"m/{number}") for number in range(100)]
    for info in infos:
        info.pax_headers = {"comment": random.Random(info.name).randbytes(50_000).hex()}
    assert len(members(tmp_path, b"".join(info.tobuf(tarfile.PAX_FORMAT) for info in infos))) == len(infos)
    tracemalloc.start()
    try:
        assert all(path for path, _, _ in package_index.sdist_members(tmp_path / "mini-1.tar.gz"))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    commit = tarfile.TarInfo.create_pax_global_header({"comment": "0" * 40})
    member = tarfile.TarInfo("m/a").tobuf()
    assert members(tmp_path, commit + member) == [("a", "100644", b"")]
    with refusal("archive-unsafe", says="second global header"):
        members(tmp_path, commit + commit + member)


@pytest.mark.parametrize("data", [b"", b"not an archive", b"\x1f\x8b\x08\x00", b"\x1f\x8b\x08\x04", b"PK\x05\x06" + bytes(18), bytes(4096)], ids=str)
def test_what_is_no_archive_is_unsafe(tmp_path: Path, data: bytes) -> None:
    """A page of HTML, a zip or an empty file under the name of an archive is an error."""
    (tmp_path / "mini-1.tar.gz").write_bytes(data)
    with refusal("archive-unsafe", match=r"mini-1\.tar\.gz is damaged"):
        list(package_index.sdist_members(tmp_path / "mini-1.tar.gz"))


@pytest.mark.parametrize("claim", [0, 10, 2**31])
def test_a_member_that_lies_about_its_size_is_unsafe(tmp_path: Path, claim: int) -> None:
    """A member that holds more, or less, than the directory says is an error, and no more than that is unpacked; so is a lack of the folder."""
    path = tmp_path / "mini-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("mini/a", b"x" * 5000)
    with refusal("archive-unsafe", match="has no folder 'mini/third'"):
        list(package_index.wheel_members(path, "mini/third"))
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        struct.pack_into("<L", data, data.index(mark) + offset, claim)
    path.write_bytes(data)

    with refusal("archive-unsafe"):
        list(package_index.wheel_members(path, "mini"))


AWKWARD = {
    "crlf.txt": b"one\r\ntwo\r\n",
    "sub/mixed.c": b"a\r\nb\nc\r",
    ".gitattributes": b"* text=auto eol=crlf ident\n*.txt filter=lfs working-tree-encoding=UTF-16\n",
    ".gitignore": b"*\n",
    "ident.h": b"$Id$\n",
    "binary": bytes(range(256)),
    "empty": b"",
    'quote"and space': b"q",
    "ünïcode/ﬁle": b"u",
    "sub.c": b"sorts between sub and sub/",
    "sub-x/y": b"and so does this",
}


def test_a_stored_archive_is_the_tree_of_its_files(tmp_path: Path, repository: Repository) -> None:
    """Members give the same tree id as `git add` of the unpacked folder, links and executable files included."""
    entries = [tars.member(f"m/{name}", data, mode=0o755 if name == "empty" else 0o644) for name, data in AWKWARD.items()]
    entries.append(link("m/sub/link", "../crlf.txt"))
    stored = git.Objects(tmp_path / "objects.git").store_files(members(tmp_path, tars.packed(*entries)))

    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-x", "-C", str(tmp_path / "unpacked")], input=tars.packed(*entries), check=True)
    for path in sorted((tmp_path / "unpacked" / "m").iterdir()):
        path.rename(repository.path / path.name)
    # git must be told to take bytes as they are; .gitattributes asks for the contrary.
    (repository.path / ".git" / "info" / "attributes").write_text("* -text -filter -ident -working-tree-encoding\n")
    repository.git("add", "--all", "--force")

    assert stored == repository.git("write-tree")


# Text, on its way to a terminal or a page.

#: Colour by an escape, a C1 control, a change of direction, a line that is overwritten.
HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\re"


def test_output_has_no_raw_controls(capsys: pytest.CaptureFixture[str]) -> None:
    """Notes, warnings, results and tables escape text from outside; text of any alphabet, line ends and tabs stay."""
    assert printable("Größe\t日本語 🚀\n1\u202f000") == "Größe\t日本語 🚀\n1\u202f000"
    console = Console()
    console.note(HOSTILE)
    console.warn(HOSTILE)
    console.result(HOSTILE)
    console.table(HOSTILE, ["a"], [[HOSTILE]], result=True)
    out, err = capsys.readouterr()

    assert not set("\x1b\x9b\u202e\r") & set(out + err)
    assert (out + err).count("\\x9b2J") == 5


#: What GitHub Actions would obey: commands of either form, and a character that it would decode.
COMMANDS = "a%0A\n::stop-commands::x\n  ::add-mask::y\nb ##[error]z"


def test_a_message_gives_github_no_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes, results, tables, documents and details of errors; a warning, a group and an error are one command with the whole text."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    console = Console()
    console.warn(COMMANDS)
    console.failure(errors.FileError("file-invalid", COMMANDS, details=[COMMANDS]))
    with console.step(COMMANDS):
        console.note(COMMANDS)
    console.result(COMMANDS)
    console.table("", ["a"], [["::stop-commands::x"], ["##[error]z"]], result=True)
    console.json = True
    console.document({"text": COMMANDS})
    console.finish()
    out, err = capsys.readouterr()

    escaped = "a%250A%0A::stop-commands::x%0A  ::add-mask::y%0Ab ##[error]z"
    obeyed = [line for line in (out + err).splitlines() if line.lstrip().startswith("::") or "##[" in line]
    assert obeyed == [f"::{name}::{escaped}" for name in ("warning", "error title=file-invalid", "group")] + ["::endgroup::"]
    assert json.loads(out[out.index("{") :])["text"] == COMMANDS


@pytest.mark.parametrize(("columns", "widest"), [("", 100), ("60", 60), ("300", 100), ("many", 100)])
def test_a_table_in_a_pipe_is_as_wide_as_stated_and_breaks_no_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str, widest: int
) -> None:
    """It honours COLUMNS, and never exceeds 100."""
    monkeypatch.setenv("COLUMNS", columns)
    words = [f"{word}-word" for word in ("long", "longer", "the-longest") for _ in range(9)]
    Console().table("", ["name", ">age", "text"], [["-".join(words[:8]), "10000 d", " ".join(words)], ["a/" * 90, "3 d", "short"]], result=True)
    lines = capsys.readouterr().out.splitlines()

    assert widest - 3 <= max(map(len, lines)) <= widest
    assert all(line.rstrip() == line for line in lines)
    assert {*words, "d"} <= set(" ".join(lines).split())
