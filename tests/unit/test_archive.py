"""Archives are hostile until read: nothing leaves its folder, and what is stored is, byte for byte, what was packed."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.core import zips
from sparkwright.core.git import Objects
from sparkwright.forks import archive

if TYPE_CHECKING:
    from tests.unit.conftest import Repository


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    return info, data


def link(path: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    info, data = entry(path, kind=tarfile.SYMTYPE, link=target)
    info.pax_headers = {"linkpath": target} if "\udcff" not in target else {}
    return info, data


def packed(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an uncompressed tar of *entries*, written without any check of ours or of tarfile's."""
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return spool.getvalue()


def members(folder: Path, tar: bytes) -> list[tuple[str, str, bytes]]:
    path = folder / "mini-1.tar.gz"
    path.write_bytes(gzip.compress(tar, 1))
    return list(archive.sdist_members(path))


def refused(folder: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> str:
    """Return everything that is said when a tar of *entries* is refused."""
    with refusal("archive-unsafe") as caught:
        members(folder, packed(*entries))
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
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Climbing, absolute, Windows, repository, control-character and undecodable names are errors that show the name."""
    info = tarfile.TarInfo("m/placeholder")
    info.pax_headers = {"path": name}
    if "\udcff" in name:
        info.pax_headers, info.name = {}, name

    assert "member: " in refused(tmp_path, (info, b""))


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
            ("no file, folder or symbolic link", [entry("m/x", kind=kind, link="m/y")])
            for kind in (tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
        ),
        ("the same path twice", [entry("m/a", b"1"), entry("m/a", b"2")]),
        ("the same path twice", [link("m/a", "b"), entry("m/a/x", b"2")]),
        ("the same path twice", [entry("m/a/x", b"1"), link("m/a", "b")]),
        ("the same path twice", [entry("m/a", b"1"), entry("m/a/b/c", b"2")]),
        ("more than one top folder", [entry("m/a"), entry("n/a")]),
    ],
)
def test_members_that_could_leave_or_replace_something_are_refused(
    tmp_path: Path, said: str, entries: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    """Links out of the folder, what is no file (hard links, devices, pipes), members on or below another one, a second top folder."""
    assert said in refused(tmp_path, *entries)


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_BYTES"])
def test_what_is_larger_than_any_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(archive, limit, 1)

    assert "larger than any source" in refused(tmp_path, entry("m/a", b"1"), entry("m/b", b"2"))


@pytest.mark.parametrize("data", [b"", b"not an archive", b"\x1f\x8b\x08\x00", b"\x1f\x8b\x08\x04", b"PK\x05\x06" + bytes(18), bytes(4096)], ids=str)
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    """A page of HTML, a zip or an empty file under the name of an archive is an error."""
    (tmp_path / "mini-1.tar.gz").write_bytes(data)
    with refusal("archive-unsafe", match=r"mini-1\.tar\.gz is damaged"):
        list(archive.sdist_members(tmp_path / "mini-1.tar.gz"))


# Zips.


@pytest.mark.parametrize("claim", [0, 10, 2**31])
def test_a_member_that_lies_about_its_size_is_refused(tmp_path: Path, claim: int) -> None:
    """A member that holds more, or less, than the directory says is an error, and no more than that is unpacked; so is a lack of the folder."""
    path = tmp_path / "mini-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("mini/a", b"x" * 5000)
    with refusal("archive-unsafe", match="has no folder 'mini/third'"):
        list(archive.wheel_members(path, "mini/third"))
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        struct.pack_into("<L", data, data.index(mark) + offset, claim)
    path.write_bytes(data)

    with refusal("archive-unsafe"):
        list(archive.wheel_members(path, "mini"))


@pytest.mark.parametrize("name", ["", "gone.whl", "x" * 300])
def test_a_folder_or_nothing_in_place_of_a_wheel_is_refused(tmp_path: Path, name: str) -> None:
    with refusal("wheel-invalid", match="is no file|cannot be read"), zips.zip_file(tmp_path / name):
        pass


# Into git.

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
    entries = [entry(f"m/{name}", data, mode=0o755 if name == "empty" else 0o644) for name, data in AWKWARD.items()]
    entries.append(link("m/sub/link", "../crlf.txt"))
    stored = Objects(tmp_path / "objects.git").store_files(members(tmp_path, packed(*entries)))

    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-x", "-C", str(tmp_path / "unpacked")], input=packed(*entries), check=True)
    for path in sorted((tmp_path / "unpacked" / "m").iterdir()):
        path.rename(repository.path / path.name)
    # git must be told to take bytes as they are; .gitattributes asks for the contrary.
    (repository.path / ".git" / "info" / "attributes").write_text("* -text -filter -ident -working-tree-encoding\n")
    repository.git("add", "--all", "--force")

    assert stored == repository.git("write-tree")
