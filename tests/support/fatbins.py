"""
Shared libraries with device code, written as nvcc 13.0 writes them but without it.

    data = fatbins.library(tmp_path, [cubin("sm_121f"), ptx("sm_80")], [cubin("sm_120f", kernels=("k",))])

Each list is a fatbin, as of one translation unit. The kernels hold no instructions.
"""

import re
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sparkwright.builder.wheel import elf

#: Kind, listed target and stored bytes of an image.
Image = tuple[int, str, bytes]


def entry(
    payload: bytes,
    *,
    kind: int = 2,
    version: int = 0x0101,
    number: int = 121,
    flags: int = 0,
    packed: int = 0,
    whole: int = 0,
) -> bytes:
    """Return the entry of a fatbin."""
    padded = payload + bytes(-len(payload) % 8)
    fields = (kind, version, 64, len(padded), packed, 0, 8, 1, number, 0, 0, flags, 0, whole)
    return struct.pack("<HHIQIIHHIIIQQQ", *fields) + padded


def container(*entries: bytes, version: int = 1, magic: int = elf.FATBIN_MAGIC) -> bytes:
    """Return a fatbin of *entries*."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", magic, version, 16, len(body)) + body


def note(options: bytes, version: int = 2) -> bytes:
    """Return the note in which ptxas states its *options*."""
    strings = b"\0ptxas\0Cuda compilation tools\0Build cuda_13.0\0"
    words = struct.pack("<6I", version, 0, 1, 7, 30, len(strings))
    description = words + strings + options + b"\0"
    return struct.pack("<3I", 12, len(description), 2000) + b"NVIDIA Corp\0" + description


def cubin(
    folder: Path, target: str, *, listed: str = "", kernels: Sequence[str] = ("kernel",), version: int = 2, memory: int = 8
) -> Image:
    """
    Return a cubin for *target* (empty for one that does not state it).

    Args:
        version: Of its note. *memory*: The section type of its shared memory, which is larger than the file and has no bytes.
    """
    (folder / "note").write_bytes(note(f"-arch {target}".encode(), version) if target else b"")
    source = ".section .note.nv.tkinfo\n" + f'.incbin "{folder}/note"\n'
    source += "".join(f".section .text.{kernel}\n.byte 0\n" for kernel in kernels)
    source += '.section .nv_debug.shared,"aw",@nobits\n.skip 1000000\n'
    (folder / "cubin.s").write_text(source)
    words: list[str | Path] = ["cc", "-c", folder / "cubin.s", "-o", folder / "cubin.o"]
    subprocess.run(words, check=True)
    data = bytearray((folder / "cubin.o").read_bytes())
    for place in range(struct.unpack_from("<Q", data, 0x28)[0] + 4, len(data), 64):
        if data[place] == 8:
            struct.pack_into("<I", data, place, memory)
    return 2, listed or target, bytes(data)


def ptx(target: str) -> Image:
    """Return a PTX text for *target*."""
    return 1, target, f".version 9.0\n.target {target}\n.address_size 64\n".encode()


def library(folder: Path, *units: Sequence[Image], source: str = "", fatbin: bytes = b"", needs: str = "") -> bytes:
    """Return a shared library of the C text *source* with *fatbin* and one for each unit, which *needs* another of the folder."""
    (folder / "fatbin").write_bytes(
        fatbin + b"".join(container(*map(_entry, unit)) for unit in units)
    )
    (folder / "fatbin.s").write_text(f'.section .nv_fatbin,"a"\n.align 8\n.incbin "{folder}/fatbin"\n')
    return compiled(folder, source, "fatbin.s", *(["-Wl,--no-as-needed", needs] if needs else []), name="fatbin.so")


def compiled(folder: Path, source: str, *options: str | Path, name: str = "a.so", compiler: str = "cc") -> bytes:
    """Return the shared library *name*, which is compiled from *source* in *folder* and stays there."""
    text = folder / ("source.cpp" if "++" in compiler else "source.c")
    text.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", text, *options, "-o", name], cwd=folder, check=True)
    return (folder / name).read_bytes()


def _entry(image: Image) -> bytes:
    kind, listed, payload = image
    match = re.fullmatch(r"sm_(\d+)([af]?)", listed)
    assert match
    return entry(payload, kind=kind, number=int(match[1]), flags={"": 0, "a": 1 << 20, "f": 1 << 21}[match[2]])
