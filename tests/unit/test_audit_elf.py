"""ELF files: another reader as the oracle, and headers that lie."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
from email.message import Message
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.audit import device_code
from sparkwright.audit.policy import AuditPolicy, DistributionPolicy, LibraryPolicy
from sparkwright.audit.report import AuditedWheel
from sparkwright.audit.wheel import Contents, LibraryAudit
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import ElfUnreadable

WANTS = LibraryPolicy("*", "base", "A test.", operators=("half",))
RULES = AuditPolicy("12.1f", (), {"probe": DistributionPolicy("A test.", (WANTS,))})
ABOUT = AuditedWheel("probe-1-py3-none-any.whl", "0" * 64, 1, "probe", "1", ())
AUDIT = LibraryAudit(RULES, ABOUT, Contents((), Message()), "a.abi3.so")

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
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed,-rpath,/opt/lib:$ORIGIN,-soname,liba.so.1",
        "a.c",
        "-lm",
        "-o",
        "a.so",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "a.so").read_bytes()


def test_it_reads_what_another_reader_reads(library: bytes) -> None:
    """Needs, paths and symbols are those that pyelftools finds by the section table."""
    other = ELFFile(io.BytesIO(library))
    dynamic, table = (other.get_section_by_name(name) for name in (".dynamic", ".dynsym"))
    assert isinstance(dynamic, DynamicSection)
    assert isinstance(table, SymbolTableSection)
    tags = {tag.entry.d_tag: vars(tag) for tag in dynamic.iter_tags()}
    symbols = table.iter_symbols()
    found = elf.shared_object(library)

    assert {"libm.so.6"} <= set(found.needed)
    assert (found.rpath, found.soname) == ((tags["DT_RUNPATH"]["runpath"],), tags["DT_SONAME"]["soname"])
    assert found.symbols == {
        symbol.name
        for symbol in symbols
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    }
    assert found.versions.keys() == {"GLIBC"}
    assert [section.name for section in elf.sections(library)] == [
        section.name for section in other.iter_sections()
    ]


def test_a_version_of_thousands_of_digits_is_no_version(library: bytes, tmp_path: Path) -> None:
    """Python refuses to read such a number."""
    (tmp_path / "a.c").write_text(SOURCE)
    name = f"-Wl,-soname,GLIBC_2.{'9' * 5000}"
    subprocess.run(["cc", "-shared", "-fPIC", name, "a.c", "-o", "a.so"], cwd=tmp_path, check=True)
    found = elf.shared_object((tmp_path / "a.so").read_bytes())

    assert found.versions["GLIBC"] <= elf.shared_object(library).versions["GLIBC"]


def test_what_the_loader_would_bring_is_read_without_a_section_table(library: bytes) -> None:
    """Sections can be stripped or lie; the loader looks at segments, and so does the audit."""
    bare = bytearray(library)
    struct.pack_into("<Q", bare, 0x28, 0)
    struct.pack_into("<HHH", bare, 0x3A, 0, 0, 0)
    found, whole = elf.shared_object(bytes(bare)), elf.shared_object(library)

    assert elf.sections(bytes(bare)) == ()
    fields = ("needed", "rpath", "versions", "soname")
    assert all(getattr(found, name) == getattr(whole, name) for name in fields)


@pytest.mark.parametrize(
    ("place", "form", "value", "says"),
    [
        (0x28, "<Q", 1 << 60, "section table lies beyond"),
        (0x20, "<Q", 1 << 60, "segment table lies beyond"),
        (0x3A, "<H", 7, "has 7 bytes"),
        (0x3C, "<H", 0xFFF0, "section table lies beyond"),
        (0x38, "<H", 0xFFFF, "more than any library"),
        (0x3E, "<H", 999, "should be in section 999"),
        (4, "<B", 1, "not 64-bit"),
        (0, "<I", 0, "does not begin like ELF"),
    ],
)
def test_a_header_that_lies_is_refused_with_what_it_says(
    library: bytes, place: int, form: str, value: int, says: str
) -> None:
    bad = bytearray(library)
    struct.pack_into(form, bad, place, value)
    with pytest.raises(ElfUnreadable, match=says):
        elf.shared_object(bytes(bad))


@given(data=st.data())
def test_any_change_of_the_tables_is_refused_or_read(library: bytes, data: st.DataObject) -> None:
    """Whatever bytes of headers, segments, dynamic entries or sections are changed, reading ends with a result or says why not."""
    bad = bytearray(library)
    (segments, table) = struct.unpack_from("<QQ", bad, 0x20)
    dynamic = next(one for one in elf.sections(library) if one.name == ".dynamic")
    needs = next(one for one in elf.sections(library) if one.name == ".gnu.version_r")
    for _ in range(data.draw(st.integers(1, 4))):
        begin, size = data.draw(
            st.sampled_from(
                [
                    (0, 64),
                    (segments, 560),
                    (table, len(bad) - table),
                    (dynamic.offset, dynamic.size),
                    (needs.offset, needs.size),
                ]
            )
        )
        place = begin + data.draw(st.integers(0, size - 9))
        change = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8)))
        )
        bad[place : place + len(change)] = change
    with contextlib.suppress(ElfUnreadable):
        found = elf.shared_object(bytes(bad))
        assert sum(map(len, found.symbols)) <= elf.MOST_NAME_BYTES
        AUDIT.check_host(bytes(bad), found)
    with contextlib.suppress(ElfUnreadable):
        device_code.read_cubin(bytes(bad))
