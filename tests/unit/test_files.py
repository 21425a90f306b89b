"""Files, archives and text from outside are hostile, and end in a refusal that names the place; what the program keeps is whole or not there."""

import gzip
import json
import os
import random
import re
import string
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from tests.refusals import refusal
from tests.support import processes, tars
from tests.unit.conftest import Repository

from sparkwright.core import errors, files, git, strict_yaml
from sparkwright.core.console import Console, printable
from sparkwright.core.store import Store, replacing
from sparkwright.forks import package_index


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record with what the reviewed files hold: text that may look like a number."""

    commit: str
    arch: str = ""
    names: tuple[str, ...] = ()


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
    with refusal("file-invalid", match=r"pins\.yaml", says=words):
        strict_yaml.parse(text, Pin, "pins.yaml")


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
    kind: Any = Any if text.startswith(("[", "-", "{")) else Pin
    with refusal("file-invalid", match=r"pins\.yaml"):
        strict_yaml.parse(text, kind, "pins.yaml")


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

    with refusal("archive-unsafe", match=r"mini-1\.tar\.gz", says="member: "):
        members(tmp_path, tars.packed((info, b"")))


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
    with refusal("archive-unsafe", match=r"mini-1\.tar\.gz", says=said):
        members(tmp_path, tars.packed(*entries))


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_BYTES"])
def test_what_is_larger_than_any_source_is_unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(package_index, limit, 1)

    with refusal("archive-unsafe", match=r"mini-1\.tar\.gz", says="larger than any source"):
        members(tmp_path, tars.packed(tars.member("m/a", b"1"), tars.member("m/b", b"2")))


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
    """Notes, warnings, results, tables, documents and details of errors; an error is one command with the whole text."""
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
    assert obeyed == [f"::error title=file-invalid::{escaped}"]
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


# The cache directory: results and git trees, whole or not there whatever kills the writer, and nobody's configuration.


#: A record that a stage might keep.
Record = msgspec.defstruct("Record", [("name", str), ("count", int)], frozen=True)


def test_a_writer_killed_while_replacing_leaves_the_old_file(store: Store) -> None:
    """Until a file is whole, its name keeps the bytes that it had."""
    path = store.write("records/a", b"old")

    def write() -> None:
        with replacing(path) as fresh:
            fresh.write_bytes(b"half")
            time.sleep(60)

    assert processes.killed(write, lambda: len(list(path.parent.iterdir())) == 2)
    assert path.read_bytes() == b"old"


def test_a_builder_killed_leaves_no_folder(store: Store) -> None:
    """A folder that was being filled is not there under its name, and the next builder begins with an empty one."""
    final = store.folder("wheels") / "x"

    def build() -> None:
        with store.building(final) as folder:
            (folder / "half").touch()
            time.sleep(60)

    assert processes.killed(build, lambda: any(final.parent.rglob("half")))
    assert not final.exists()
    with store.building(final) as folder:
        assert not list(folder.iterdir())
        (folder / "whole").touch()
    assert [path.name for path in final.parent.rglob("*")] == ["x", "whole"]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"name": "a"}', b'{"name": "a", "count": "1"}', b"\xff\xfe", b"\0" * 40, b"[" * 100_000])
def test_a_damaged_record_counts_as_absent(store: Store, damage: bytes) -> None:
    """A record that was cut off, overwritten or written by another version is made anew instead of believed."""
    store.put("stage", "key", Record("a", 1))
    (store.root / "records" / "stage" / "key.json").write_bytes(damage)

    assert store.get("stage", "key", Record) is None
    assert store.get("stage", "other", Record) is None


def test_a_second_holder_waits_or_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs at once take turns; the second says that it waits, unless its caller does not want to."""
    with store.lock("objects"):
        with refusal("store-busy"), store.lock("objects", wait=False):
            pass
        second = threading.Thread(target=lambda: store.lock("objects").__enter__())
        second.start()
        second.join(0.3)
        assert second.is_alive()
    second.join(30)

    assert not second.is_alive()
    assert "another sparkwright works on objects; waiting" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file", "file/cache", "a:b", "a\nb"])
def test_a_cache_directory_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing is made of a file in its place, or of a path that programs would take for two."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("kept")
    with refusal("cache-unusable", match=f"{name} cannot be used"):
        Store(folder / name)
    assert [path.read_text() for path in folder.iterdir()] == ["kept"]


# Trees.

FILES = {"a.txt": b"one\n", "src/b.c": b"int b;\r\n", "src/deep/c.h": b"\x00\x01", "run.sh": b"#!/bin/sh\n"}


def stored(objects: git.Objects, **changes: bytes) -> str:
    """Return a tree of `FILES`, where ``run.sh`` is executable, with *changes* (``__`` stands for a slash, ``_`` for a dot)."""
    files = FILES | {name.replace("__", "/").replace("_", "."): data for name, data in changes.items()}
    return objects.store_files((name, git.EXECUTABLE if name == "run.sh" else git.REGULAR, data) for name, data in files.items())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_variables_and_configuration_of_the_user_have_no_effect(objects: git.Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    GIT_DIR and its like, which hooks and rebases leave in a shell, redirect nothing; autocrlf, attributes, hooks and filters of the home folder
    change no byte of what is stored and checked out.
    """
    attributes, other = b"* text eol=crlf filter=x\n", tmp_path / "other"
    expected = stored(objects, _gitattributes=attributes)
    for name, value in {
        "GIT_DIR": str(other),
        "GIT_INDEX_FILE": str(other / "index"),
        "GIT_OBJECT_DIRECTORY": str(other / "objects"),
        "GIT_WORK_TREE": str(other),
        "GIT_NAMESPACE": "x",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_TRACE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    processes.script(tmp_path / "post-checkout", f"touch '{tmp_path}/ran'")
    with (Path.home() / ".gitconfig").open("a") as stream:
        stream.write(f'[core]\n\thooksPath = {tmp_path}\n\teol = crlf\n[filter "x"]\n\tsmudge = tr a-z A-Z\n\trequired = true\n')
    (Path.home() / ".config" / "git").mkdir(parents=True)
    (Path.home() / ".config" / "git" / "attributes").write_text("* text filter=x\n")
    fresh = git.Objects(tmp_path / "fresh.git")
    tree = stored(fresh, _gitattributes=attributes)
    fresh.archive(tree, tmp_path / "out")

    assert tree == expected
    assert content(tmp_path / "out") == FILES | {".gitattributes": attributes}
    assert not other.exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("again", [False, True], ids=["back", "on"])
def test_a_killed_checkout_is_finished(objects: git.Objects, tmp_path: Path, again: bool) -> None:
    """`kill -9` on the way to another tree leaves a folder that the next checkout makes whole, of that tree or of the one before."""
    many = {f"d{number % 40}/f{number}.c": b"%d\n" % number * 400 for number in range(3000)}
    before, tree = stored(objects), objects.store_files((name, git.REGULAR, data) for name, data in many.items())
    folder, index = tmp_path / "src", tmp_path / "index"
    objects.checkout(before, folder, index)
    assert processes.killed(lambda: objects.checkout(tree, folder, index), (folder / "d20").exists)
    objects.checkout(tree if again else before, folder, index)
    # Nor is anything left that git does not track.
    assert content(folder) == (many if again else FILES)


def test_a_damaged_store_is_not_the_repository_around_it(tmp_path: Path) -> None:
    """Where the cache directory lies in somebody's repository, a store that lost its HEAD is an error, and that repository stays."""
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    objects = git.Objects(tmp_path / "objects.git")
    tree, before = stored(objects), sorted((tmp_path / ".git").rglob("*"))
    (objects.path / "HEAD").write_bytes(b"garbage")
    for use in (lambda: objects.paths(tree), lambda: stored(objects), lambda: objects.checkout(tree, tmp_path / "src", tmp_path / "index")):
        with refusal("git-failed"):
            use()

    assert sorted((tmp_path / ".git").rglob("*")) == before


# Full disks.

#: Runs the rest with ever more room, SIZES, below the folder $0.
GROWING_DISK = """\
mount -t tmpfs -o size=64k none "$0"
for size in $SIZES; do
    mount --options-mode ignore -o remount,size=$size "$0"
    "$@"
done
umount "$0"
"""

WRITES = """\
import sys
from pathlib import Path
import msgspec
from sparkwright.core import process
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import REGULAR, Objects
from sparkwright.core.store import Store, append_line

root, upstream, data = Path(sys.argv[1]), sys.argv[2], bytes(range(256)) * 120

def build(store):
    with store.building(store.root / "built") as folder:
        (folder / "a").write_bytes(data)

try:
    store = Store(root)
    store.put("stage", "key", data.hex())
    build(store)
    with store.lock("a"):
        append_line(store.root / "lines", msgspec.defstruct("Line", [("text", str)])(data.hex()))
    objects = Objects(store.root / "objects.git")
    tree = objects.store_files((f"{number}.bin", REGULAR, bytes([number]) + data) for number in range(9))
    objects.checkout(tree, store.root / "src", store.root / "index")
    objects.archive(tree, store.root / "other")
    objects.run(["fetch", "-q", upstream, "main:main"])
    process.run(["dd", "if=/dev/zero", f"of={root}/zeros", "bs=100k", "count=4"], log=root / "logs" / "dd.log")
except SparkwrightError as error:
    sys.exit(f"error: {error.reference}: {error.what}")
assert store.get("stage", "key", str) == data.hex() and objects.is_complete(tree)
sys.exit("error: none")
"""

DEMO = f"""\
import sys
from sparkwright.cli import main
# With room, the package index is what it lacks.
main.main(["demo", "--root", {str(Path(__file__).parents[2])!r}, "--cache-dir", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("program", "sizes", "end"), [(WRITES, "64k 192k 256k 384k 768k 64m", "none"), (DEMO, "64k 384k 64m", "source-unreachable")], ids=["store", "demo"]
)
def test_a_full_disk_is_disk_full_at_each_write(tmp_path: Path, repository: Repository, program: str, sizes: str, end: str) -> None:
    """Records, folders, locks, lines, trees, checkouts and fetches, and whole copies; the next run, with room, finishes them."""
    repository.commit({"big.bin": random.Random(1).randbytes(300_000)})
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [str(disk), sys.executable, "-c", program, str(disk), repository.url]
    command = [*processes.mounting_shell(), GROWING_DISK, *words]
    done = subprocess.run(command, env={**os.environ, "SIZES": sizes}, capture_output=True, text=True, check=False, timeout=300)
    references = re.findall(r"^error: ([a-z-]+)", done.stderr, re.MULTILINE)

    assert "Traceback" not in done.stderr
    assert (references[0], references[-1], set(references)) == ("disk-full", end, {"disk-full", end})
