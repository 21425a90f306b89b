"""Fatbins: NVIDIA's own reader as the oracle, and bytes that lie."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fatbins import container, entry

from sparkwright.audit import device_code
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import ElfUnreadable, FatbinEntry
from sparkwright.core import process
from sparkwright.core.files import sha256_bytes, sha256_file

SOURCE = "__global__ void twice(float* data) { data[threadIdx.x] *= 2.f; }\n"


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
    try:
        for one in read(data):
            assert one.offset + one.stored <= len(data)
            assert one.size <= elf.MOST_IMAGE_BYTES
            elf.unpack(data, one)
    except ElfUnreadable:
        pass


# Against NVIDIA's tools.


def _library(cuda_bin: Path, folder: Path, *options: str) -> Path:
    (folder / "a.cu").write_text(SOURCE)
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
    library = _library(cuda_bin, tmp_path, f"-compress-mode={mode}")
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
        forms = device_code.read(data, host, "sm_12", compiled=True).images
    assert ours == Counter(map(sha256_file, theirs.iterdir()))
    assert Counter(one.kind for one in found) == {"cubin": 4, "ptx": 2}
    assert {form.target for form in forms if form.kind == "cubin"} == {
        "sm_80",
        "sm_90a",
        "sm_120f",
        "sm_121a",
    }
    assert {form.target for form in forms if form.kind == "ptx"} == {"sm_80", "sm_121f"}
    assert not any(form.contradicted for form in forms)
    assert {form.container for form in forms} == {0}
    # What does not become smaller stays as it is.
    assert {one.compression for one in found} | {""} == {PACKINGS[mode], ""}
