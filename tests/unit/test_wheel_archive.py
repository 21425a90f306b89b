"""Wheels that are rewritten: true to their RECORD, the same bytes every time, and otherwise unchanged."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.builder.toolchain import EnvironmentSpec
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import strict_yaml

NAME = "mini-1.0-py3-none-any.whl"
INFO, NEW = "mini-1.0.dist-info", "mini-1.0+a.dist-info"
FILES = {
    "mini/__init__.py": b'"""Mini."""\n\n__version__ = "1.0"\n',
    "mini/core.so": b"\x7fELF" + bytes(range(256)) * 20,
    "mini/data/a.bin": os.urandom(3000),
    "mini/empty.py": b"",
    "mini/ünïcode.txt": "é".encode(),
    "mini-1.0.data/scripts/tool": b"#!python\n",
}
META = {
    f"{INFO}/METADATA": b"Metadata-Version: 2.4\nName: mini\nVersion: 1.0\nKeywords: Version: 1.0\n\nVersion: 1.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/licenses/LICENSE": b"free\n",
}


def hashed(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def packed(path: Path, files: Mapping[str, bytes], *, record: bytes | None = None) -> Path:
    """Write a wheel by Python's own zipfile, its members deflated and stored in turn, the first with the sizes of zip64."""
    rows = [f"{name},{hashed(data)},{len(data)}\n" for name, data in files.items()]
    text = "".join([*rows, f"{INFO}/RECORD,,\n"]).encode() if record is None else record
    with zipfile.ZipFile(path, "w") as wheel:
        for number, (name, data) in enumerate({**files, f"{INFO}/RECORD": text}.items()):
            member = zipfile.ZipInfo(name, (2020, 2, 2, 2, 2, 2))
            member.compress_type = (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED)[number % 2]
            member.external_attr = 0o100755 << 16 if name.endswith(".so") else 0o100644 << 16
            with wheel.open(member, "w", force_zip64=number == 0) as stream:
                stream.write(data)
    return path


@pytest.fixture(name="base")
def _base(tmp_path: Path) -> Path:
    return packed(tmp_path / NAME, {**FILES, **META})


@pytest.fixture(name="out")
def _out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def verify(wheel: Path) -> dict[str, bytes]:
    """Check RECORD against the members by Python's own zipfile, and return the members without it."""
    with zipfile.ZipFile(wheel) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    record = "-".join(wheel.name.split("-")[:2]) + ".dist-info/RECORD"
    rows = list(csv.reader(io.StringIO(members.pop(record).decode())))

    assert rows.pop() == [record, "", ""]
    assert sorted(rows) == sorted([name, hashed(data), str(len(data))] for name, data in members.items())
    return members


# Rewriting.


def test_a_label_changes_names_and_metadata_and_nothing_else(base: Path, out: Path) -> None:
    wheel = archive.rewrite(base, out, version="1.0+a")
    members = verify(wheel)
    metadata, about = members.pop(f"{NEW}/METADATA"), members.pop(f"{NEW}/WHEEL")
    expected = {name.replace("mini-1.0.data", "mini-1.0+a.data"): data for name, data in FILES.items()}

    assert wheel.name == "mini-1.0+a-py3-none-any.whl"
    assert metadata == META[f"{INFO}/METADATA"].replace(b"\nVersion: 1.0\nKey", b"\nVersion: 1.0+a\nKey")
    assert about == b"Wheel-Version: 1.0\nGenerator: sparkwright\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    assert members == {**expected, f"{NEW}/licenses/LICENSE": b"free\n"}


def test_members_are_replaced_added_and_removed(tmp_path: Path, out: Path) -> None:
    """Ours in .dist-info replace those of an earlier build; a bill of upstream's stays (PEP 770)."""
    before = {f"{INFO}/sparkwright.json": b"old", f"{INFO}/sboms/upstream.cdx.json": b"{}"}
    base = packed(tmp_path / NAME, {**FILES, **META, **before})
    replace = {"mini/core.so": b"\x7fELF new", "mini/new.py": b"new = 1\n", "mini/__init__.py": b"__version__ = '1.0'\nPATCHED = True\n"}
    wheel = archive.rewrite(
        base,
        out,
        version="1.0+a",
        replace=replace,
        remove=["mini/empty.py"],
        version_files=["mini/__init__.py"],
        dist_info={"sparkwright.json": b"{}"},
    )
    members = verify(wheel)

    assert (members["mini/core.so"], members["mini/new.py"]) == (replace["mini/core.so"], replace["mini/new.py"])
    assert members["mini/__init__.py"] == b"__version__ = '1.0+a'\nPATCHED = True\n"
    assert "mini/empty.py" not in members
    assert (members[f"{NEW}/sparkwright.json"], members[f"{NEW}/sboms/upstream.cdx.json"]) == (b"{}", b"{}")
    with zipfile.ZipFile(wheel) as opened:
        assert opened.getinfo("mini/core.so").external_attr >> 16 == 0o100755
        assert {info.date_time for info in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_wheel_has_the_same_bytes_in_any_order_of_its_files(base: Path, out: Path) -> None:
    made = set[bytes]()
    for replace in ({"a": b"a", "b": b"b"}, {"b": b"b", "a": b"a"}):
        made.add(archive.rewrite(base, out, version="1.0+a", replace=replace).read_bytes())

    assert len(made) == 1


# Requirements.

#: As build backends write them: markers, extras, parentheses, a name in capitals, a continued line.
REQUIRING = (
    b"Metadata-Version: 2.4\nName: mini\nVersion: 1.0\n"
    b"Requires-Dist: numpy\n"
    b"Requires-Dist: Flash_Infer[cu13]==0.6.8.post1\n"
    b"Requires-Dist: flash.infer==0.6.8.post1; extra == 'fast'\n"
    b'requires-dist: cubin (>=1,<2); python_version > "3.11"\n'
    b'  and os_name == "posix"\n'
    b"Provides-Extra: fast\n"
    b"\nRequires-Dist: cubin\n"
)


def test_requirements_are_replaced_and_removed(tmp_path: Path, out: Path) -> None:
    """A line keeps its extras and its marker."""
    base = packed(tmp_path / NAME, {**FILES, **META, f"{INFO}/METADATA": REQUIRING})
    requires = {"flash-infer": "flash-infer==0.6.9", "cubin": ""}
    metadata = verify(archive.rewrite(base, out, version="1.0+a", requires=requires))[f"{NEW}/METADATA"].decode()
    head, _, body = metadata.partition("\n\n")

    assert head.splitlines()[3:] == [
        "Requires-Dist: numpy",
        "Requires-Dist: Flash_Infer[cu13]==0.6.9",
        'Requires-Dist: flash.infer==0.6.9; extra == "fast"',
        "Provides-Extra: fast",
    ]
    assert body == "Requires-Dist: cubin\n", "the description is no header"


@pytest.mark.parametrize(
    ("metadata", "requires", "reference"),
    [
        (REQUIRING, {"absent": ""}, "requirement-mismatch"),
        (REQUIRING, {"numpy": "numpy"}, "requirement-mismatch"),
        *((b"Requires-Dist: " + text, {"a": ""}, "wheel-invalid") for text in (b"numpy (", b"\xff", b"")),
    ],
)
def test_a_change_of_requirements_without_effect_or_sense_is_refused(
    metadata: bytes, requires: dict[str, str], reference: str
) -> None:
    with refusal(reference):
        archive.change_requirements(metadata, requires)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("numpy: 'numpy=='", "Expected"),
        ("numpy: ' '", "Expected"),
        ("numpy: 'numpi==1'", "is not a version of numpy"),
        ("numpy: 'numpy==1; os_name == \"nt\"'", "is not a version of numpy"),
        ("numpy: 'numpy @ https://a.example/numpy.whl'", "is not a version of numpy"),
        ("a_b: 'a-b==1'", "is not the normalised name"),
        ("numpy: null", "Expected `str`"),
    ],
)
def test_a_requirement_that_cannot_be_meant_is_found_when_the_file_is_read(entry: str, words: str) -> None:
    """A slip in environment.yaml costs no compiling."""
    text = f"forks: {{vllm: {{distribution: mini, requires: {{{entry}}}}}}}\n"
    with refusal("file-invalid") as caught:
        strict_yaml.parse(text, EnvironmentSpec, "environment.yaml")
    assert words in caught.value.details[0]


# Refusals.


@pytest.mark.parametrize("name", ["mini.whl", "mini-1.0.tar.gz", "mini-1.0-py3-none-any.zip", "mini-one-py3-none-any.whl"])
def test_a_name_that_no_wheel_has_is_refused(name: str) -> None:
    with refusal("wheel-invalid", match="is not the name of a wheel"):
        WheelName.of(name)


@pytest.mark.parametrize(
    ("change", "reference", "words"),
    [
        ({f"{INFO}/METADATA": b"Name: mini\nVersion: 1.1\n\n"}, "wheel-invalid", "does not state version 1.0 once"),
        ({f"{INFO}/METADATA": b"Version: 1.0\nVersion: 1.0\n\n"}, "wheel-invalid", "does not state version 1.0 once"),
        ({"mini/__init__.py": b'__version__ = "1.1"\n'}, "wheel-invalid", "does not set __version__ to '1.0'"),
        ({"mini/__init__.py": b'"""__version__ = "1.0" is elsewhere."""\n'}, "wheel-invalid", "does not set __version__"),
        ({"mini/__init__.py": b"\xff\xfe"}, "wheel-invalid", "damaged"),
        ({f"{INFO}/RECORD": b"one,two\n"}, "wheel-invalid", "damaged"),
        ({f"{INFO}/RECORD": b""}, "wheel-invalid", "not in its RECORD"),
        ({"../evil.py": b""}, "archive-unsafe", "would leave its folder"),
        ({"/evil.py": b""}, "archive-unsafe", "would leave its folder"),
        ({"mini\\evil.py": b""}, "archive-unsafe", "would leave its folder"),
    ],
)
def test_a_wheel_that_contradicts_itself_is_refused(
    tmp_path: Path, out: Path, change: dict[str, bytes], reference: str, words: str
) -> None:
    record = change.get(f"{INFO}/RECORD")
    files = {name: data for name, data in {**FILES, **META, **change}.items() if name != f"{INFO}/RECORD"}
    base = packed(tmp_path / NAME, files, record=record)

    with refusal(reference, match=words):
        archive.rewrite(base, out, version="1.0+a", version_files=("mini/__init__.py",))


# Versions in files.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('__version__ = "1.0"\n', "__version__ = '1.0+a'\n"),
        ("__version__ = version = '1.0'  # by scm\n", "__version__ = version = '1.0+a'  # by scm\n"),
        ("é = 'é'\r\n__version__ = '1.0'\r\nx = 1\r\n", "é = 'é'\r\n__version__ = '1.0+a'\r\nx = 1\r\n"),
        ("'1.0'\nother = '1.0'\n__version__='1.0'", "'1.0'\nother = '1.0'\n__version__='1.0+a'"),
        ("if True:\n    version = '1.0'\n__version__ = '1.0'", "if True:\n    version = '1.0'\n__version__ = '1.0+a'"),
    ],
)
def test_a_version_is_restated_where_a_module_sets_it(text: str, expected: str) -> None:
    assert archive.restate(text, "1.0", "1.0+a", "x.py") == expected
