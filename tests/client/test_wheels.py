"""Hostile wheels: each is refused before anything is created, where everything but the user's own folders cannot be written."""

from __future__ import annotations

import json
import shlex
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable

import pytest
from tests.client.world import CLIENT, SITE, User, Wheel, wheel
from tests.support import mounts


def with_file(name: str, data: bytes = b"x") -> Callable[[], Wheel]:
    """Return what makes a wheel with a further file."""
    return lambda: wheel("evil", files={name: data})


def with_entry(line: str) -> Callable[[], Wheel]:
    return with_file("{info}/entry_points.txt", f"[console_scripts]\n{line}\n".encode())


def raw(add: Callable[[zipfile.ZipFile], object]) -> Callable[[], Wheel]:
    """Return what makes a wheel by other means than a builder's."""
    return lambda: wheel("evil", damage=add)


def _link(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("evil/link")
    info.external_attr = 0o120777 << 16
    archive.writestr(info, "/etc/passwd")


def _twice(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("evil/__init__.py")
    archive.filelist.append(archive.getinfo("evil/__init__.py"))
    archive.NameToInfo["again"] = info


def _local_name() -> Wheel:
    """Return a wheel, one member of which has another name in its own header than in the directory."""
    good = wheel("evil", files={"evil/data.bin": b"x"})
    return Wheel(good.name, good.data.replace(b"evil/data.bin", b"evil/date.bin", 1))


def _bomb() -> Wheel:
    """Return a wheel with a member of 3 GB in 3 MB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece, size = bytes(1 << 24), 3 << 30
    data = b"".join([*(packer.compress(piece) for _ in range(4)), packer.flush()])
    good = wheel("evil", files={"evil/zeros.bin": data})
    with_size = bytearray(good.data)
    # The directory and the member state what they would unpack to.
    for signature, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = 0
        while (start := with_size.find(signature, start)) >= 0:
            name_at = start + (30 if signature == b"PK\x03\x04" else 46)
            if with_size[name_at:].startswith(b"evil/zeros.bin"):
                struct.pack_into("<L", with_size, start + at, size)
            start += 4
    return Wheel(good.name, bytes(with_size))


def _bad_checksum() -> Wheel:
    good = wheel("evil")
    crc = struct.pack("<L", zlib.crc32(b'"""evil."""\n\n__version__ = "1.0"\n'))
    assert good.data.count(crc) == 2
    return Wheel(good.name, good.data.replace(crc, b"\0\0\0\0"))


def recorded(change: Callable[[list[list[str]]], object]) -> Callable[[], Wheel]:
    return lambda: wheel("evil", record=change)


def _metadata(text: str) -> Callable[[], Wheel]:
    return lambda: wheel("evil", metadata=f"Metadata-Version: 2.1\n{text}\n")


CASES: dict[str, tuple[str, Callable[[], Wheel]]] = {
    # What an environment is made of.
    "pyvenv.cfg": ("wheel-unsafe", with_file("{data}/data/pyvenv.cfg", b"home = /usr/bin\n")),
    "interpreter": ("wheel-unsafe", with_file("{data}/data/bin/python")),
    "packages by data": ("wheel-unsafe", with_file(f"{{data}}/data/{SITE}/torch/__init__.py")),
    "lib64": ("wheel-unsafe", with_file("{data}/data/lib64/x")),
    "folder for a file": ("wheel-unsafe", with_file("{data}/data/caches.env/x")),
    "marker": ("wheel-unsafe", with_file("{data}/data/sparkwright.json")),
    "unknown scheme": ("wheel-unsafe", with_file("{data}/elsewhere/x")),
    "data of another": ("wheel-unsafe", with_file("torch-1.data/data/share/x")),
    "sitecustomize": ("wheel-unsafe", with_file("sitecustomize.py", b"import os; os._exit(0)\n")),
    "usercustomize": ("wheel-unsafe", with_file("usercustomize/__init__.py")),
    "hidden sitecustomize": ("wheel-unsafe", with_file("{data}/purelib/sitecustomize.py")),
    "hidden dist-info": ("wheel-unsafe", with_file("{data}/purelib/torch-1.dist-info/METADATA")),
    "script pip": ("wheel-unsafe", with_file("{data}/scripts/pip")),
    "script python": ("wheel-unsafe", with_file("{data}/scripts/python3.12")),
    "script activate": ("wheel-unsafe", with_file("{data}/scripts/activate")),
    "script -rf": ("wheel-unsafe", with_file("{data}/scripts/-rf")),
    "script in a folder": ("wheel-unsafe", with_file("{data}/scripts/a/b")),
    "entry point ../evil": ("wheel-unsafe", with_entry("../evil = evil:main")),
    "entry point python": ("wheel-unsafe", with_entry("python = evil:main")),
    "entry point Activate": ("wheel-unsafe", with_entry("Activate.ps1 = evil:main")),
    "entry point with code": ("wheel-unsafe", with_entry("evil = evil:main()); import os #")),
    "entry points twice": ("wheel-invalid", with_entry("evil = evil:main\nevil = evil:other")),
    "entry points unreadable": ("wheel-invalid", with_file("{info}/entry_points.txt", b"\xff\xfe")),
    # Names.
    "climbs": ("archive-unsafe", with_file("../../../../escaped")),
    "absolute": ("archive-unsafe", with_file("/tmp/escaped")),
    "climbs by scheme": ("archive-unsafe", with_file("{data}/data/share/../../escaped")),
    "newline": ("archive-unsafe", with_file("evil/a\nb")),
    "link": ("archive-unsafe", raw(_link)),
    "a file for a folder": ("wheel-invalid", with_file("evil", b"x")),
    "twice by scheme": ("wheel-unsafe", with_file("{data}/purelib/evil/__init__.py")),
    "twice": ("wheel-invalid", raw(lambda archive: archive.writestr("evil/__init__.py", b"other"))),
    "same member twice": ("wheel-invalid", raw(_twice)),
    # The archive.
    "no zip": ("wheel-invalid", lambda: Wheel("evil-1.0-py3-none-any.whl", b"<!DOCTYPE html>")),
    "cut off": (
        "wheel-invalid",
        lambda: Wheel("evil-1.0-py3-none-any.whl", wheel("evil").data[:-80]),
    ),
    "bad checksum": ("wheel-invalid", _bad_checksum),
    "bomb": ("wheel-invalid", _bomb),
    "another local name": ("wheel-invalid", _local_name),
    "lzma": (
        "wheel-invalid",
        raw(lambda archive: archive.writestr("evil/x", b"x", zipfile.ZIP_LZMA)),
    ),
    # RECORD and metadata.
    "no RECORD": ("wheel-invalid", lambda: wheel("evil", without=["RECORD"])),
    "no WHEEL": ("wheel-invalid", lambda: wheel("evil", without=["WHEEL"])),
    "no METADATA": ("wheel-invalid", lambda: wheel("evil", without=["METADATA"])),
    "wrong hash": (
        "wheel-invalid",
        recorded(lambda rows: rows[0].__setitem__(1, f"sha256={'A' * 43}")),
    ),
    "no hash": ("wheel-invalid", recorded(lambda rows: rows[0].__setitem__(1, ""))),
    "weak hash": (
        "wheel-invalid",
        recorded(lambda rows: rows[0].__setitem__(1, "md5=1B2M2Y8AsgTpgAmY7PhCfg")),
    ),
    "wrong size": ("wheel-invalid", recorded(lambda rows: rows[0].__setitem__(2, "1"))),
    "not in RECORD": ("wheel-invalid", recorded(lambda rows: rows.pop(0))),
    "only in RECORD": (
        "wheel-invalid",
        recorded(lambda rows: rows.append(["../../../bin/python", "", ""])),
    ),
    "twice in RECORD": ("wheel-invalid", recorded(lambda rows: rows.append(rows[0]))),
    "short RECORD": ("wheel-invalid", recorded(lambda rows: rows[0].pop())),
    "another project": ("wheel-mismatch", _metadata("Name: torch\nVersion: 1.0")),
    "another version": ("wheel-mismatch", _metadata("Name: evil\nVersion: 2.0")),
    "two names": ("wheel-invalid", _metadata("Name: evil\nName: torch\nVersion: 1.0")),
    "dist-info of another": ("wheel-invalid", with_file("torch-2.0.dist-info/RECORD")),
    "renamed": ("wheel-mismatch", lambda: wheel("torch", name="evil-1.0-py3-none-any.whl")),
    "future format": ("wheel-invalid", lambda: wheel("evil", format_version="2.0")),
    # Other packages.
    "overlaps": ("wheel-unsafe", with_file("torch/__init__.py", b"evil")),
    "in another package": ("wheel-unsafe", with_file("torch/nn/evil.py")),
    "in the place of a folder": ("wheel-unsafe", with_file("torch", b"x")),
    "program of another": ("wheel-unsafe", with_entry("torchrun = evil:main")),
    "cannot start": ("environment-broken", with_file("evil.pth", b"import os; os._exit(0)\n")),
}


TORCH = wheel(
    "torch",
    "2.0",
    {
        "torch/nn/__init__.py": b"# ours\n",
        "{info}/entry_points.txt": b"[console_scripts]\ntorchrun = torch:main\n",
    },
)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", CASES)
def test_hostile_wheel_is_refused_and_nothing_is_created(settled: User, case: str) -> None:
    """
    Signed by the publisher and known by hash, it is refused all the same, where only the user's own
    folders can be written; the release before stays as it was.
    """
    expected, make = CASES[case]
    before, folder = settled.listing(), shlex.quote(str(settled.folder))
    settled.world.publish(settled.world.next_name(), [TORCH], [make()])
    (settled.folder / "tmp").mkdir(exist_ok=True)
    confined = f"mount --bind {folder} {folder} && mount -o remount,bind,ro / && ! touch /escaped 2>/dev/null"
    script = f"{confined} && exec {shlex.join([*CLIENT, 'install', '--json'])}"
    done = subprocess.run(
        [*mounts.mounting_shell(), script],
        env={**settled.environment, "TMPDIR": str(settled.folder / "tmp")},
        capture_output=True,
        check=False,
        timeout=120,
    )

    reference = json.loads(done.stdout)["error"]["reference"]
    assert (reference, settled.listing()) == (expected, before), done.stderr
    assert not list(settled.prefix.glob("releases/.*")) + list(
        settled.world.folder.rglob("escaped")
    )
