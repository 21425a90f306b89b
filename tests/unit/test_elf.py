"""ELF files, fatbins and what a GPU gets from device code: other readers as the oracle, bytes that lie, and NVIDIA's rules of loading."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import time
from collections import Counter
from email.message import Message
from pathlib import Path

import lz4.block
import pytest
import zstandard
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import fatbins
from tests.support.fatbins import container, entry

from sparkwright.audit import device_code
from sparkwright.audit.policy import AuditPolicy, DistributionPolicy, LibraryPolicy
from sparkwright.audit.report import AuditedWheel
from sparkwright.audit.wheel import Contents, LibraryAudit
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import ElfUnreadable, FatbinEntry
from sparkwright.core import process
from sparkwright.core.files import sha256_bytes, sha256_file

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


def test_what_the_loader_would_bring_is_read_without_a_section_table(library: bytes) -> None:
    """Sections can be stripped or lie; the loader looks at segments, and so does the audit."""
    bare = library[:0x28] + bytes(8) + library[0x30:0x3A] + bytes(6)
    found = elf.shared_object(bare + library[64:])
    whole = elf.shared_object(library)

    assert not found.symbols
    assert (found.needed, found.rpath, found.versions) == (whole.needed, whole.rpath, whole.versions)


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


@given(place=st.integers(0, 559), change=st.binary(min_size=1, max_size=8), table=st.sampled_from(("header", ".dynamic", ".gnu.version_r", "sections")))
def test_any_change_of_the_tables_is_refused_or_read(library: bytes, table: str, place: int, change: bytes) -> None:
    """Whatever bytes of headers, dynamic entries or sections are changed, reading ends with a result or says why not."""
    offsets = {section.name: section.offset for section in elf.sections(library)}
    offsets |= {"header": 0, "sections": struct.unpack_from("<Q", library, 0x28)[0]}
    begin = offsets[table] + place
    bad = library[:begin] + change + library[begin + len(change) :]
    with contextlib.suppress(ElfUnreadable):
        found = elf.shared_object(bad)
        assert sum(map(len, found.symbols)) <= elf.MOST_NAME_BYTES
        AUDIT.check_host(bad, found)


# Fatbins.

KERNEL = "__global__ void twice(float* data) { data[threadIdx.x] *= 2.f; }\n"


#: How nvcc 13.0 packs by its option.
PACKINGS = {"none": "", "speed": "lz4", "balance": "zstd", "size": "zstd"}


def read(data: bytes) -> list[FatbinEntry]:
    return list(elf.fatbin_entries(data, [(0, len(data))]))


def test_entries_are_read_in_their_order_with_the_unit_that_they_belong_to() -> None:
    first = container(entry(b"one", flags=1 << 21), entry(b"two", kind=1, number=80))
    data = first + bytes(24) + container(entry(b"three", number=90, flags=1 << 20))

    found = read(data)
    assert [(one.kind, one.arch, one.container) for one in found] == [
        ("cubin", "sm_121f", 0),
        ("ptx", "sm_80", 0),
        ("cubin", "sm_90a", 1),
    ]
    assert [elf.unpack(data, one).rstrip(b"\0") for one in found] == [b"one", b"two", b"three"]


@pytest.mark.parametrize("flag", [0x8000, 0x2000])
def test_packed_entries_unpack_to_what_was_packed(flag: int) -> None:
    text = b"machine code " * 300
    packed = (
        zstandard.ZstdCompressor().compress(text)
        if flag == 0x8000
        else lz4.block.compress(text, store_size=False)
    )
    data = container(entry(packed, flags=flag, packed=len(packed), whole=len(text)))

    assert elf.unpack(data, read(data)[0]) == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (container(entry(b"x"), version=2), "0xba55ed50 of version 2"),
        (container(entry(b"x"), magic=0x12345678), "no fatbin begins with 0x12345678"),
        (container(entry(b"x", version=0x0102)), "version 0x0102 and kind 2"),
        (container(entry(b"x", kind=16)), "kind 16"),
        (container(entry(b"x"))[:-8], "ends beyond its section"),
        (container(entry(b"x")[:-8]), "ends beyond its fatbin"),
        (container(entry(b"x")[:40]), "no room for its header"),
        (container(entry(b"x", flags=0x2000, packed=99)), "ends beyond its fatbin"),
        (
            container(entry(b"x", flags=0x8000, packed=1, whole=1 << 40)),
            "states that it unpacks to 1099511627776 bytes",
        ),
        (
            container(entry(b"x", flags=0x2000, packed=1, whole=5000)),
            "states that it unpacks to 5000 bytes",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_its_number(data: bytes, says: str) -> None:
    """A version, a kind or a size that this reader does not know is an error that names it, and never passed over."""
    with pytest.raises(ElfUnreadable, match=says):
        read(data)


PACKED = zstandard.ZstdCompressor().compress(bytes(1000))


@pytest.mark.parametrize(
    ("packed", "flags", "whole", "says"),
    [
        (PACKED, 0x8000, 10, "the table says"),
        (PACKED, 0x8000, 5000, "the table says"),
        (b"\xff" * 60, 0x8000, 5120, "zstd"),
        (b"\xff" * 60, 0x2000, 5120, "lz4"),
    ],
)
def test_damaged_packing_is_refused(packed: bytes, flags: int, whole: int, says: str) -> None:
    """Neither more nor less may come out than the table states; no more is held in memory."""
    data = container(entry(packed, flags=flags, packed=len(packed), whole=whole))
    with pytest.raises(ElfUnreadable, match=says):
        elf.unpack(data, read(data)[0])


@given(st.integers(0, 300), st.binary(min_size=1, max_size=8))
def test_any_change_gives_an_error_or_entries_inside_the_file(place: int, change: bytes) -> None:
    """Whatever is written over the tables, the reader ends, and what it yields lies in the file."""
    data = (
        container(entry(b"one" * 9, flags=1 << 21), entry(b"two", kind=1))
        + bytes(16)
        + container(entry(b"three"))
    )
    data = data[:place] + change + data[place + len(change) :]
    with contextlib.suppress(ElfUnreadable):
        for one in read(data):
            assert one.offset + one.stored <= len(data)
            elf.unpack(data, one)


# Against NVIDIA's tools.


def _compiled(cuda_bin: Path, folder: Path, *options: str) -> Path:
    (folder / "a.cu").write_text(KERNEL)
    codes = ["sm_80", "compute_80", "sm_90a", "sm_120f", "sm_121a", "compute_121f"]
    arches = [f"-gencode=arch=compute_{code.partition('_')[2]},code={code}" for code in codes]
    process.output(
        [
            cuda_bin / "nvcc",
            "-c",
            "-Xcompiler",
            "-fPIC",
            *arches,
            *options,
            folder / "a.cu",
            "-o",
            folder / "a.o",
        ]
    )
    process.output(["c++", "-shared", folder / "a.o", "-o", folder / "a.so"])
    return folder / "a.so"


@pytest.mark.toolchain
@pytest.mark.parametrize("mode", sorted(PACKINGS))
def test_cuobjdump_finds_the_same_bytes(cuda_bin: Path, tmp_path: Path, mode: str) -> None:
    """Whichever way nvcc packs it, each cubin and each PTX text is the one that NVIDIA's own tool extracts."""
    library = _compiled(cuda_bin, tmp_path, f"-compress-mode={mode}")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for what in ("--extract-elf", "--extract-ptx"):
        process.run(
            [cuda_bin / "cuobjdump", what, "all", library], log=tmp_path / "log", cwd=theirs
        )

    with elf.mapped(library) as data:
        host = elf.shared_object(data)
        found = list(elf.fatbin_entries(data, host.fatbins))
        ours = Counter(
            sha256_bytes(elf.unpack(data, one).rstrip(b"\0" if one.kind == "ptx" else b""))
            for one in found
        )
        images = device_code.read(data, host, "sm_12", compiled=True).images
    assert ours == Counter(map(sha256_file, theirs.iterdir()))
    targets = ["sm_80", "sm_90a", "sm_120f", "sm_121a", "sm_80", "sm_121f"]
    assert Counter(image.target for image in images) == Counter(targets)
    # What does not become smaller stays as it is.
    assert {one.compression for one in found} | {""} == {PACKINGS[mode], ""}


SPARK = (12, 1)
NUMBERS = (75, 80, 89, 90, 100, 103, 110, 120, 121, 122)
TARGETS = [f"sm_{number}{suffix}" for number in NUMBERS for suffix in ("", "a", "f")]

#: The table of gates.md §4.1, and what follows from the same rules for the rest.
LOADS = {"sm_120", "sm_120f", "sm_121", "sm_121a", "sm_121f"}
COMPILES = {"sm_120f", "sm_121f", "sm_121a"} | {f"sm_{number}" for number in NUMBERS[:-1]}


def test_a_spark_loads_and_compiles_by_nvidias_rules() -> None:
    """Code of its generation and not newer, ``a`` for 12.1 alone; PTX that is not newer."""
    targets = [*TARGETS, "garbage", "sm_", ""]

    assert {target for target in targets if device_code.loads(target, SPARK)} == LOADS
    assert {target for target in targets if device_code.compiles(target, SPARK)} == COMPILES


@pytest.mark.parametrize(
    ("cubins", "ptx", "expected"),
    [
        (["sm_121f"], [], "native"),
        (["sm_120f"], [], "family"),
        (["sm_121"], [], "plain"),
        (["sm_120", "sm_120f", "sm_121f"], ["sm_80"], "native"),
        (["sm_120f", "sm_121"], [], "plain"),
        (["sm_120a"], ["sm_120"], "jit"),
        (["sm_80", "sm_90a"], ["sm_80", "sm_90"], "jit"),
        (["sm_80"], ["sm_90a", "sm_120a", "sm_100f"], "nothing"),
        (["garbage", "sm_"], ["sm_x"], "nothing"),
    ],
)
def test_the_nearest_machine_code_comes_before_ptx(
    cubins: list[str], ptx: list[str], expected: str
) -> None:
    """The driver takes machine code if there is any that it can load."""
    assert device_code.support_level(cubins, ptx, SPARK) == expected


@pytest.mark.parametrize(
    ("options", "version", "target"),
    [
        ("-arch sm_121f -m 64 ", 2, "sm_121f"),
        ("-O3 -arch=sm_121", 2, "sm_121"),
        ("--gpu-name sm_120a -v", 2, "sm_120a"),
        ("-arch sm_121fx", 2, ""),
        ("-arch sm_121f", 3, ""),
    ],
)
def test_the_note_in_a_cubin_states_its_target(options: str, version: int, target: str) -> None:
    """By any spelling of the option; a note of another version, or cut short, states none."""
    note = fatbins.note(options.encode(), version)

    assert device_code.note_target(note) == target
    assert device_code.note_target(note[:30]) == ""


# Disassembly.


def _program(folder: Path, text: str) -> Path:
    """Write the shell script *text* as ``nvdisasm`` to *folder* and return that."""
    path = folder / "nvdisasm"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        ("exec sleep 60", "command-failed", "takes longer than for any wheel"),
        ("echo no cubin >&2; exit 3", "command-failed", "cannot read a cubin"),
        ("", "tool-missing", "nvdisasm is not in"),
    ],
)
def test_a_disassembly_that_fails_or_does_not_end_is_refused(
    tmp_path: Path, text: str, reference: str, message: str
) -> None:
    folder = _program(tmp_path, text) if text else tmp_path
    with refusal(reference, match=message):
        device_code.opcodes(tmp_path / "a.cubin", folder, time.monotonic() + 0.5)
