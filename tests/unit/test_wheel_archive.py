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
from typing import TYPE_CHECKING, Any

import pytest
from tests.refusals import refusal

from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import EnvironmentSpec
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import strict_yaml

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

ROOT = Path(__file__).parents[2]

NAME = "mini-1.0-py3-none-any.whl"
INFO, NEW = "mini-1.0.dist-info", "mini-1.0+spark.1.dist-info"
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


def packed(path: Path, files: Mapping[str, bytes], methods: tuple[int, ...] = (zipfile.ZIP_DEFLATED,)) -> Path:
    """Write a wheel by Python's own zipfile, its members packed by each of *methods* in turn."""
    info = path.name.split("-py3")[0] + ".dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for number, (name, data) in enumerate(files.items()):
            member = zipfile.ZipInfo(name, (2020, 2, 2, 2, 2, 2))
            member.compress_type = methods[number % len(methods)]
            member.external_attr = 0o100755 << 16 if name.endswith(".so") else 0o100644 << 16
            wheel.writestr(member, data)
        text = io.StringIO()
        csv.writer(text).writerows([*((name, hashed(data), len(data)) for name, data in files.items()), (f"{info}/RECORD", "", "")])
        wheel.writestr(f"{info}/RECORD", text.getvalue())
    return path


@pytest.fixture(name="base")
def _base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    return packed(folder / NAME, {**FILES, **META}, (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))


@pytest.fixture(name="out")
def _out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def content(wheel: Path) -> dict[str, bytes]:
    """Return every member, read and checked by Python's own zipfile."""
    with zipfile.ZipFile(wheel) as opened:
        assert opened.testzip() is None
        return {name: opened.read(name) for name in opened.namelist()}


def verify(wheel: Path) -> dict[str, bytes]:
    """Check RECORD against the members, independently of the code that wrote it, and return the members without it."""
    members = content(wheel)
    name, version = wheel.name.split("-")[:2]
    rows = list(csv.reader(io.StringIO(members.pop(record := f"{name}-{version}.dist-info/RECORD").decode())))

    assert rows[-1] == [record, "", ""]
    assert {row[0]: row[1:] for row in rows[:-1]} == {name: [hashed(data), str(len(data))] for name, data in members.items()}
    assert len(rows) == len(members) + 1
    return members


# Rewriting.


def test_a_label_changes_names_and_metadata_and_nothing_else(base: Path, out: Path) -> None:
    wheel = archive.rewrite(base, out, version="1.0+spark.1")
    members = verify(wheel)
    metadata, about = members.pop(f"{NEW}/METADATA"), members.pop(f"{NEW}/WHEEL")
    expected = {name.replace("mini-1.0.data", "mini-1.0+spark.1.data"): data for name, data in FILES.items()}

    assert wheel.name == "mini-1.0+spark.1-py3-none-any.whl"
    assert metadata == META[f"{INFO}/METADATA"].replace(b"\nVersion: 1.0\nKey", b"\nVersion: 1.0+spark.1\nKey")
    assert about == b"Wheel-Version: 1.0\nGenerator: sparkwright\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    assert members == {**expected, f"{NEW}/licenses/LICENSE": b"free\n"}


def test_members_that_stay_keep_their_compressed_bytes_and_mode(base: Path, out: Path) -> None:
    def raw(path: Path, name: str) -> tuple[int, int, int, bytes]:
        with zipfile.ZipFile(path) as wheel:
            info = wheel.getinfo(name)
            begin = info.header_offset + 30 + len(name.encode())
            return info.compress_type, info.external_attr, info.CRC, path.read_bytes()[begin : begin + info.compress_size]

    wheel = archive.rewrite(base, out, version="1.0+spark.1")
    for name in ("mini/core.so", "mini/data/a.bin", "mini/empty.py", "mini/ünïcode.txt"):
        assert raw(base, name) == raw(wheel, name)


def test_times_and_order_of_the_base_leave_no_trace(out: Path, tmp_path: Path) -> None:
    results = []
    for files in ({**FILES, **META}, dict(reversed({**FILES, **META}.items()))):
        base = packed(tmp_path / NAME, files)
        results.append(archive.rewrite(base, out, version="1.0+spark.1", replace={"mini/x.py": b"x"}).read_bytes())

    assert results[0] == results[1]
    with zipfile.ZipFile(out / "mini-1.0+spark.1-py3-none-any.whl") as wheel:
        assert {info.date_time for info in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_members_are_replaced_added_and_removed(tmp_path: Path, out: Path) -> None:
    """Ours in .dist-info replace those of an earlier build; a bill of upstream's stays (PEP 770)."""
    before = {f"{INFO}/sparkwright.json": b"old", f"{INFO}/sboms/upstream.cdx.json": b"{}"}
    base = packed(tmp_path / NAME, {**FILES, **META, **before})
    replace = {"mini/core.so": b"\x7fELF new", "mini/new.py": b"new = 1\n"}
    wheel = archive.rewrite(base, out, version="1.0+a", replace=replace, remove=["mini/empty.py"], dist_info={"sparkwright.json": b"{}"})
    members = verify(wheel)

    assert {name: members[name] for name in replace} == replace
    assert "mini/empty.py" not in members
    assert members["mini-1.0+a.dist-info/sparkwright.json"] == b"{}"
    assert members["mini-1.0+a.dist-info/sboms/upstream.cdx.json"] == b"{}"
    with zipfile.ZipFile(wheel) as opened:
        assert opened.getinfo("mini/core.so").external_attr >> 16 == 0o100755


def test_a_platform_stands_in_the_name_and_each_tag_on_a_line_of_wheel(tmp_path: Path, out: Path) -> None:
    files = {**FILES, **META, f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"}
    base = packed(tmp_path / NAME, files).rename(tmp_path / "mini-1.0-py2.py3-none-linux_x86_64.whl")
    wheel = archive.rewrite(base, out, version="1.0+a", platform="manylinux_2_39_x86_64")

    assert wheel.name == "mini-1.0+a-py2.py3-none-manylinux_2_39_x86_64.whl"
    tags = ["Tag: py2-none-manylinux_2_39_x86_64", "Tag: py3-none-manylinux_2_39_x86_64"]
    assert verify(wheel)["mini-1.0+a.dist-info/WHEEL"].decode().splitlines()[2:] == ["Root-Is-Purelib: false", *tags]


class Stream(io.BytesIO):
    """A file that cannot seek: zipfile writes the sizes of a member after it."""

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize("options", [{}, {"force_zip64": True}])
def test_members_written_as_a_stream_come_out_as_ordinary_ones(tmp_path: Path, out: Path, options: dict[str, Any]) -> None:
    record = "".join(f"{name},{hashed(data)},{len(data)}\n" for name, data in {**FILES, **META}.items())
    stream = io.BytesIO() if options else Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in {**FILES, **META, f"{INFO}/RECORD": record.encode()}.items():
            with wheel.open(zipfile.ZipInfo(name), "w", **options) as member:
                member.write(data)
    (tmp_path / NAME).write_bytes(stream.getvalue())

    assert verify(archive.rewrite(tmp_path / NAME, out, version="1.0+a"))["mini/core.so"] == FILES["mini/core.so"]


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


def required(tmp_path: Path, out: Path, requires: Mapping[str, str]) -> list[str]:
    """Remake a wheel with `REQUIRING`, and return its header lines after the version, its RECORD checked."""
    base = packed(tmp_path / NAME, {**FILES, **META, f"{INFO}/METADATA": REQUIRING})
    metadata = verify(archive.rewrite(base, out, version="1.0+a", requires=requires))["mini-1.0+a.dist-info/METADATA"].decode()

    assert metadata.endswith("\n\nRequires-Dist: cubin\n"), "the description is no header"
    return metadata.partition("\n\n")[0].splitlines()[3:]


def test_requirements_are_replaced_and_removed(tmp_path: Path, out: Path) -> None:
    assert required(tmp_path, out, {"flash-infer": "flash-infer==0.6.9", "cubin": ""}) == [
        "Requires-Dist: numpy",
        "Requires-Dist: flash-infer[cu13]==0.6.9",
        'Requires-Dist: flash-infer==0.6.9; extra == "fast"',
        "Provides-Extra: fast",
    ]


def test_a_requirement_may_bring_extras_and_a_condition(tmp_path: Path, out: Path) -> None:
    wanted = "flash-infer[cu12]==0.6.9; os_name == 'posix' or os_name == 'nt'"
    assert [
        line for line in required(tmp_path, out, {"flash-infer": wanted, "cubin": "cubin<3"}) if "infer" in line or "cubin" in line
    ] == [
        'Requires-Dist: flash-infer[cu12]==0.6.9; os_name == "posix" or os_name == "nt"',
        'Requires-Dist: flash-infer[cu12]==0.6.9; extra == "fast" and (os_name == "posix" or os_name == "nt")',
        'requires-dist: cubin<3; python_version > "3.11" and os_name == "posix"',
    ]


@pytest.mark.parametrize("requires", [{"absent": ""}, {"absent": "absent==1", "cubin": ""}, {"numpy": "numpy"}])
def test_a_changed_requirement_without_effect_is_refused(requires: dict[str, str]) -> None:
    with refusal("requirement-mismatch", match=next(iter(requires))) as caught:
        archive.change_requirements(REQUIRING, requires)
    assert "Requires-Dist: numpy" in caught.value.details


@pytest.mark.parametrize("text", [b"numpy (", b"\xff", b"", b"numpy ; extra = fast"])
def test_a_requirement_that_cannot_be_read_is_refused(text: bytes) -> None:
    with refusal("wheel-invalid", match="cannot be read"):
        archive.change_requirements(b"Requires-Dist: " + text + b"\nRequires-Dist: a\n", {"a": ""})


ENVIRONMENT = "forks: {{vllm: {{distribution: mini, requires: {{{}}}}}}}\n"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("numpy: 'numpy=='", "Expected"),
        ("numpy: ' '", "Expected"),
        ("numpy: 'numpi==1'", "is not a version of numpy"),
        ("numpy: 'numpy @ https://a.example/numpy.whl'", "is not a version of numpy"),
        ("NumPy: 'NumPy==1'", "is not the normalised name"),
        ("a_b: 'a-b==1'", "is not the normalised name"),
        ("numpy: 1", "Expected `str`"),
        ("numpy: null", "Expected `str`"),
    ],
)
def test_a_requirement_that_cannot_be_meant_is_found_when_the_file_is_read(entry: str, words: str) -> None:
    """A slip in environment.yaml costs no compiling."""
    with refusal("file-invalid") as caught:
        strict_yaml.parse(ENVIRONMENT.format(entry), EnvironmentSpec, "environment.yaml")
    assert words in caught.value.details[0]


def test_requirements_of_what_is_not_grafted_are_refused(mini: Mini) -> None:
    """A wheel that its own backend makes states its requirements in its tree, where a patch can change them."""
    mini.edit(
        "build/demo/environment.yaml", "distribution: mini-flashinfer\n", "distribution: mini-flashinfer\n    requires: {numpy: ''}\n"
    )

    with refusal("file-invalid", match="flashinfer, which is not grafted"):
        toolchain.spec(mini.session().project)


# Refusals.


def test_a_cut_off_wheel_is_refused(tmp_path: Path, out: Path) -> None:
    whole = packed(tmp_path / NAME, {**FILES, **META}).read_bytes()
    for data in (b"", whole[: len(whole) // 2], whole[:-30]):
        (tmp_path / NAME).write_bytes(data)
        with refusal("wheel-invalid", match="mini-1"):
            archive.rewrite(tmp_path / NAME, out, version="1.0+a")
    with refusal("wheel-invalid", match="not the name of a wheel"):
        WheelName.of("mini-1.0.tar.gz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{INFO}/METADATA": b"Name: mini\nVersion: 1.1\n\n"}, "does not state version 1.0 once"),
        ({f"{INFO}/METADATA": b"Name: mini\nVersion: 1.0\nVersion: 1.0\n\n"}, "does not state version 1.0 once"),
        ({"mini/__init__.py": b'__version__ = "1.1"\n'}, "does not set __version__ to '1.0'"),
        ({"mini/__init__.py": b'"""__version__ = "1.0" is elsewhere."""\n'}, "does not set __version__"),
        ({"mini/__init__.py": b"\xff\xfe"}, "damaged"),
        ({f"{INFO}/RECORD": b"one,two\n"}, "damaged"),
        ({f"{INFO}/RECORD": b""}, "RECORD"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_wheel_that_contradicts_itself_is_refused(tmp_path: Path, out: Path, change: dict[str, bytes], words: str) -> None:
    base = packed(tmp_path / NAME, {**FILES, **META, **change})
    if f"{INFO}/RECORD" in change:
        with zipfile.ZipFile(base, "w") as wheel:
            for name, data in {**FILES, **META, **change}.items():
                wheel.writestr(name, data)

    with refusal("wheel-invalid", match=words):
        archive.rewrite(base, out, version="1.0+a", version_files=("mini/__init__.py",))


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "mini\\evil.py"])
def test_a_wheel_that_would_leave_its_folder_is_refused(tmp_path: Path, out: Path, name: str) -> None:
    with refusal("archive-unsafe", match="would leave its folder"):
        archive.rewrite(packed(tmp_path / NAME, {**FILES, **META, name: b""}), out, version="1.0+a")


# Versions in files.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('__version__ = "1.0"\n', "__version__ = '1.0+a'\n"),
        ("__version__ = version = '1.0'  # by scm\n", "__version__ = version = '1.0+a'  # by scm\n"),
        ("version = __version__ = x = '1.0'\n", "version = __version__ = x = '1.0+a'\n"),
        ("é = 'é'\r\n__version__ = '1.0'\r\nx = 1\r\n", "é = 'é'\r\n__version__ = '1.0+a'\r\nx = 1\r\n"),
        ("'1.0'\nother = '1.0'\n__version__='1.0'", "'1.0'\nother = '1.0'\n__version__='1.0+a'"),
        ("if True:\n    version = '1.0'\n__version__ = '1.0'", "if True:\n    version = '1.0'\n__version__ = '1.0+a'"),
    ],
)
def test_a_version_is_restated_where_a_module_sets_it(text: str, expected: str) -> None:
    assert archive.restate(text, "1.0", "1.0+a", "x.py") == expected


def test_a_replaced_version_file_states_the_new_version(base: Path, out: Path) -> None:
    replace = {"mini/__init__.py": b"__version__ = '1.0'\nPATCHED = True\n"}
    wheel = archive.rewrite(base, out, version="1.0+spark.1", replace=replace, version_files=("mini/__init__.py",))

    assert verify(wheel)["mini/__init__.py"] == b"__version__ = '1.0+spark.1'\nPATCHED = True\n"


def test_a_written_wheel_has_a_true_record_and_the_same_bytes_in_any_order(out: Path) -> None:
    name = WheelName.of("mini_headers-1.0+a-py3-none-any.whl")
    results = []
    for files in ({"b.h": b"b", "a.h": b"a"}, {"a.h": b"a", "b.h": b"b"}):
        archive.write(out, name, files, "Metadata-Version: 2.4\nName: mini-headers\nVersion: 1.0+a\n", pure=True)
        results.append((out / name.filename).read_bytes())

    assert verify(out / name.filename).keys() == {"a.h", "b.h", f"{name.info}/METADATA", f"{name.info}/WHEEL"}
    assert results[0] == results[1]
