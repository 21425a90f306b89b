"""ELF files: another reader as the oracle, and headers that lie."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.audit import cubin, elf, elf_sections, operators
from sparkwright.audit.elf_sections import ElfUnreadable
from sparkwright.builder.wheel import elf as reading

SOURCE = """
#include <math.h>
#include <stdio.h>
int shown = 3;
static int hidden(int x) { return x + 1; }
double half(double x) { puts("half(Tensor x) -> Tensor"); return pow(x, 0.5) + hidden(shown); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared library with needs, a search path, a soname and symbols."""
    folder = tmp_path_factory.mktemp("elf")
    (folder / "a.c").write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed,-rpath,/opt/lib:$ORIGIN,-soname,liba.so.1", "a.c", "-lm", "-o", "a.so"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "a.so").read_bytes()


def test_it_reads_what_another_reader_reads(library: bytes, tmp_path: Path) -> None:
    """Needs, paths, versions and symbols are those that pyelftools finds by the section table."""
    path = tmp_path / "a.so"
    path.write_bytes(library)
    with path.open("rb") as stream:
        other = ELFFile(stream)
        needed, rpath = reading.dynamic(other)
        wanted = reading.wanted_versions(stream)
        listed = [section.name for section in other.iter_sections()]
        dynamic = other.get_section_by_name(".dynsym")
        assert isinstance(dynamic, SymbolTableSection)
        entries = dynamic.iter_symbols()
        symbols = {one.name for one in entries if one["st_shndx"] != "SHN_UNDEF" and one["st_info"]["bind"] != "STB_LOCAL"}

    found = elf.host(library)
    assert (found.needed, found.rpath, found.soname) == (needed, rpath, "liba.so.1")
    assert (found.glibc, found.glibcxx) == (reading.version_text(wanted["GLIBC"]), "")
    assert found.symbols == symbols >= {"shown", "half"}
    assert [section.name for section in elf_sections.sections(library)] == listed
    assert not found.device


def test_what_the_loader_would_bring_is_read_without_a_section_table(library: bytes) -> None:
    """Sections can be stripped or lie; the loader looks at segments, and so does the audit."""
    bare = bytearray(library)
    struct.pack_into("<Q", bare, 0x28, 0)
    struct.pack_into("<HHH", bare, 0x3A, 0, 0, 0)
    found, whole = elf.host(bytes(bare)), elf.host(library)

    assert elf_sections.sections(bytes(bare)) == ()
    assert (found.needed, found.rpath, found.glibc, found.soname) == (whole.needed, whole.rpath, whole.glibc, whole.soname)


@pytest.mark.parametrize(
    ("place", "form", "value", "says"),
    [
        (0x28, "<Q", 1 << 60, "section table lies beyond"),
        (0x20, "<Q", 1 << 60, "segment table lies beyond"),
        (0x3A, "<H", 7, "has 7 bytes"),
        (0x3C, "<H", 0xFFF0, "section table lies beyond"),
        (0x38, "<H", 0xFFFF, "more than any library"),
        (0x3E, "<H", 999, "are said to be in section 999"),
        (4, "<B", 1, "not 64-bit"),
    ],
)
def test_a_header_that_lies_is_refused_with_what_it_says(library: bytes, place: int, form: str, value: int, says: str) -> None:
    bad = bytearray(library)
    struct.pack_into(form, bad, place, value)
    with pytest.raises(ElfUnreadable, match=says):
        elf.host(bytes(bad))


def test_a_number_of_sections_that_fits_nowhere_is_refused(library: bytes) -> None:
    """No count in the header and 2^60 in the first section: nothing is allocated for it."""
    bad = bytearray(library)
    (table,) = struct.unpack_from("<Q", bad, 0x28)
    struct.pack_into("<H", bad, 0x3C, 0)
    struct.pack_into("<Q", bad, table + 32, 1 << 60)
    with pytest.raises(ElfUnreadable, match="more than any library"):
        elf.host(bytes(bad))


@pytest.mark.parametrize("data", [b"", elf_sections.MAGIC, elf_sections.MAGIC + bytes(60), b"<html>" * 20])
def test_what_is_no_elf_file_is_refused(data: bytes) -> None:
    with pytest.raises(ElfUnreadable):
        elf.host(data)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(ElfUnreadable, match="empty"):
        elf_sections.mapped(tmp_path / "a")


@given(data=st.data())
def test_any_change_of_the_tables_is_refused_or_read(library: bytes, data: st.DataObject) -> None:
    """Whatever bytes of headers, segments, dynamic entries or sections are changed, reading ends with a result or says why not."""
    bad = bytearray(library)
    (segments, table) = struct.unpack_from("<QQ", bad, 0x20)
    dynamic = next(one for one in elf_sections.sections(library) if one.name == ".dynamic")
    needs = next(one for one in elf_sections.sections(library) if one.name == ".gnu.version_r")
    for _ in range(data.draw(st.integers(1, 4))):
        begin, size = data.draw(
            st.sampled_from(
                [(0, 64), (segments, 560), (table, len(bad) - table), (dynamic.offset, dynamic.size), (needs.offset, needs.size)]
            )
        )
        place = begin + data.draw(st.integers(0, size - 9))
        change = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8))))
        bad[place : place + len(change)] = change
    with contextlib.suppress(ElfUnreadable):
        found = elf.host(bytes(bad))
        assert sum(map(len, found.symbols)) <= elf_sections.MOST_NAME_BYTES
        operators.registered(bytes(bad), elf_sections.sections(bytes(bad)))
    with contextlib.suppress(ElfUnreadable):
        cubin.read(bytes(bad))
        cubin.functions(bytes(bad))


def test_operators_are_found_in_the_strings(library: bytes) -> None:
    assert operators.registered(library, elf_sections.sections(library)).declared == ("half",)
