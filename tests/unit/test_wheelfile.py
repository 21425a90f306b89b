"""Wheels that are remade: true to their RECORD, the same bytes every time, and unchanged wherever nothing was changed."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from tests.refusals import refusal
from uv import find_uv_bin

from sparkwright.builder import pipeline as building
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import EnvironmentSpec
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel import version as versions
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import strict_yaml
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks.stack import Project

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


# Remaking.


def test_a_label_changes_names_and_metadata_and_nothing_else(base: Path, out: Path) -> None:
    """File name, .dist-info, .data, METADATA and RECORD follow the version; every other byte stays."""
    made = archive.remake(base, out, version="1.0+spark.1")
    members = verify(made)
    metadata = members.pop(f"{NEW}/METADATA")
    wheel = members.pop(f"{NEW}/WHEEL")
    expected = {name.replace("mini-1.0.data", "mini-1.0+spark.1.data"): data for name, data in FILES.items()}

    assert made.name == "mini-1.0+spark.1-py3-none-any.whl"
    assert metadata == META[f"{INFO}/METADATA"].replace(b"\nVersion: 1.0\nKey", b"\nVersion: 1.0+spark.1\nKey")
    assert wheel == b"Wheel-Version: 1.0\nGenerator: sparkwright\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    assert members == {**expected, f"{NEW}/licenses/LICENSE": b"free\n"}


def test_members_that_stay_are_not_packed_again(base: Path, out: Path) -> None:
    """A member's packed bytes, its method and its mode are those of the base."""
    made = archive.remake(base, out, version="1.0+spark.1")

    def raw(path: Path, name: str) -> tuple[int, int, int, bytes]:
        with zipfile.ZipFile(path) as wheel, path.open("rb") as stream:
            info = wheel.getinfo(name)
            stream.seek(info.header_offset + 26)
            skipped = sum(struct.unpack("<2H", stream.read(4)))
            stream.seek(skipped, 1)
            return info.compress_type, info.external_attr, info.CRC, stream.read(info.compress_size)

    for name in ("mini/core.so", "mini/data/a.bin", "mini/empty.py", "mini/ünïcode.txt"):
        assert raw(base, name) == raw(made, name)


def test_the_same_input_gives_the_same_bytes(base: Path, out: Path, tmp_path: Path) -> None:
    """Times, order and names of the base's zip leave no trace, so that two builds can be compared by their hash."""
    again = tmp_path / "again"
    again.mkdir()
    turned = dict(reversed({**FILES, **META}.items()))
    other = packed(again / NAME, turned, (zipfile.ZIP_DEFLATED,))
    plain = packed(tmp_path / NAME, {**FILES, **META}, (zipfile.ZIP_DEFLATED,))
    first = archive.remake(plain, out, version="1.0+spark.1", replace={"mini/x.py": b"x"}).read_bytes()

    assert archive.remake(plain, out, version="1.0+spark.1", replace={"mini/x.py": b"x"}).read_bytes() == first
    assert archive.remake(other, out, version="1.0+spark.1", replace={"mini/x.py": b"x"}).read_bytes() == first
    with zipfile.ZipFile(out / "mini-1.0+spark.1-py3-none-any.whl") as wheel:
        assert {info.date_time for info in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_members_are_replaced_added_and_removed(base: Path, out: Path) -> None:
    """What changes is packed anew and accounted for; libraries stay executable; the build's record lies in .dist-info."""
    changes = {"mini/core.so": b"\x7fELF new", "mini/new.py": b"new = 1\n"}
    made = archive.remake(base, out, version="1.0+a", replace=changes, remove=frozenset({"mini/empty.py"}), build_record=b"{}")
    members = verify(made)

    assert {name: members[name] for name in changes} == changes
    assert "mini/empty.py" not in members
    assert members["mini-1.0+a.dist-info/sparkwright.json"] == b"{}"
    with zipfile.ZipFile(made) as wheel:
        assert wheel.getinfo("mini/core.so").external_attr >> 16 == 0o100755


def test_files_that_state_the_version_follow_it(base: Path, out: Path) -> None:
    """What the program says of itself is what its metadata says."""
    made = archive.remake(base, out, version="1.0+spark.1", version_files=("mini/__init__.py",))
    module: dict[str, str] = {}
    exec(verify(made)["mini/__init__.py"], module)

    assert module["__version__"] == "1.0+spark.1"


def test_a_replaced_file_states_the_version_too(base: Path, out: Path) -> None:
    """A file that a patch replaces and that states the version gets both changes."""
    changes = {"mini/__init__.py": b"__version__ = '1.0'\nPATCHED = True\n"}
    made = archive.remake(base, out, version="1.0+spark.1", replace=changes, version_files=("mini/__init__.py",))

    assert verify(made)["mini/__init__.py"] == b"__version__ = '1.0+spark.1'\nPATCHED = True\n"


def test_a_platform_is_raised(tmp_path: Path, out: Path) -> None:
    """A new platform tag stands in the file name and, each tag of a compressed set on a line of its own, in WHEEL."""
    name = "mini-1.0-py2.py3-none-linux_x86_64.whl"
    files = {**FILES, **META, f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"}
    made = archive.remake(packed_as(tmp_path / name, files), out, version="1.0+a", platform="manylinux_2_39_x86_64")

    assert made.name == "mini-1.0+a-py2.py3-none-manylinux_2_39_x86_64.whl"
    assert verify(made)["mini-1.0+a.dist-info/WHEEL"].decode().splitlines()[2:] == [
        "Root-Is-Purelib: false",
        "Tag: py2-none-manylinux_2_39_x86_64",
        "Tag: py3-none-manylinux_2_39_x86_64",
    ]


def packed_as(path: Path, files: Mapping[str, bytes]) -> Path:
    """As `packed`, for a file name with another tag."""
    return packed(path.with_name(NAME), files).rename(path)


def test_a_wheel_with_descriptors_is_read(tmp_path: Path, out: Path) -> None:
    """Members written as a stream, whose sizes follow them, come out as ordinary ones."""

    class Pipe(io.RawIOBase):
        """A file that cannot seek."""

        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]  # the base takes any buffer
            self.data += data
            return len(data)

    pipe = Pipe()
    record = "".join(f"{name},{hashed(data)},{len(data)}\n" for name, data in {**FILES, **META}.items())
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in {**FILES, **META, f"{INFO}/RECORD": record.encode()}.items():
            wheel.writestr(name, data)
    (tmp_path / NAME).write_bytes(pipe.data)

    assert verify(archive.remake(tmp_path / NAME, out, version="1.0+a"))["mini/core.so"] == FILES["mini/core.so"]


def test_a_member_with_zip64_fields_is_read(tmp_path: Path, out: Path) -> None:
    """Members whose sizes stand in zip64 fields, as tools write them for streams, come out the same."""
    record = "".join(f"{name},{hashed(data)},{len(data)}\n" for name, data in {**FILES, **META}.items())
    with zipfile.ZipFile(tmp_path / NAME, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in {**FILES, **META, f"{INFO}/RECORD": record.encode()}.items():
            with wheel.open(zipfile.ZipInfo(name), "w", force_zip64=True) as member:
                member.write(data)

    assert verify(archive.remake(tmp_path / NAME, out, version="1.0+a"))["mini/core.so"] == FILES["mini/core.so"]


NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs"), exclude_characters="\\/"), min_size=1, max_size=12)
PATHS = st.lists(NAMES.filter(lambda part: part not in (".", "..")), min_size=1, max_size=3).map(lambda parts: "/".join(["mini", *parts]))


@settings(max_examples=40)
@given(
    st.dictionaries(PATHS, st.binary(max_size=400), max_size=6),
    st.dictionaries(PATHS, st.binary(max_size=100), max_size=2),
    st.lists(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]), min_size=1, max_size=3),
)
def test_any_content_survives(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], changes: dict[str, bytes], methods: list[int]
) -> None:
    """For any names, bytes and packing methods, the members are those of the base with the changes, and RECORD is true."""
    folder = tmp_path_factory.mktemp("any")
    files = {name: data for name, data in files.items() if "/.git" not in name.lower()}
    changes = {name: data for name, data in changes.items() if "/.git" not in name.lower()}
    base = packed(folder / NAME, {**files, **META}, tuple(methods))
    members = verify(archive.remake(base, folder, version="1.0+a", replace=changes))

    assert {name: data for name, data in members.items() if "dist-info" not in name} == {**files, **changes}


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
    metadata = verify(archive.remake(base, out, version="1.0+a", requires=requires))["mini-1.0+a.dist-info/METADATA"].decode()

    assert metadata.endswith("\n\nRequires-Dist: cubin\n"), "the description is no header"
    return metadata.partition("\n\n")[0].splitlines()[3:]


def test_requirements_are_replaced_and_removed(tmp_path: Path, out: Path) -> None:
    """Every line of a project changes, however it spells the name; what a line asks for changes, when it does so does not."""
    assert required(tmp_path, out, {"flash-infer": "flash-infer==0.6.9", "cubin": ""}) == [
        "Requires-Dist: numpy",
        "Requires-Dist: flash-infer[cu13]==0.6.9",
        'Requires-Dist: flash-infer==0.6.9; extra == "fast"',
        "Provides-Extra: fast",
    ]


def test_a_requirement_may_bring_extras_and_a_condition(tmp_path: Path, out: Path) -> None:
    """Extras that it names take the place of those that were there; its marker is one more condition."""
    wanted = "flash-infer[cu12]==0.6.9; os_name == 'posix' or os_name == 'nt'"
    assert [
        line for line in required(tmp_path, out, {"flash-infer": wanted, "cubin": "cubin<3"}) if "infer" in line or "cubin" in line
    ] == [
        'Requires-Dist: flash-infer[cu12]==0.6.9; os_name == "posix" or os_name == "nt"',
        'Requires-Dist: flash-infer[cu12]==0.6.9; extra == "fast" and (os_name == "posix" or os_name == "nt")',
        'requires-dist: cubin<3; python_version > "3.11" and os_name == "posix"',
    ]


def test_without_changed_requirements_every_line_stays(tmp_path: Path, out: Path) -> None:
    """Nothing is spelt anew that nobody asked for."""
    assert required(tmp_path, out, {}) == REQUIRING.decode().partition("\n\n")[0].splitlines()[3:]


@pytest.mark.parametrize(
    ("requires", "detail"),
    [
        ({"absent": ""}, "absent: not required at all"),
        ({"absent": "absent==1", "numpy": ""}, "absent: not required at all"),
        ({"numpy": "numpy"}, "numpy: Requires-Dist: numpy"),
        ({"mini": ""}, "mini: not required at all"),
    ],
)
def test_a_changed_requirement_without_effect_is_refused(base: Path, out: Path, requires: dict[str, str], detail: str) -> None:
    """A project that the wheel does not require, or requires just so, is named, with what the wheel says of it."""
    text = META[f"{INFO}/METADATA"].replace(b"Keywords:", b"Requires-Dist: numpy\nKeywords:")
    path = packed(base, {**FILES, **META, f"{INFO}/METADATA": text})

    with refusal("requirement-mismatch") as caught:
        archive.remake(path, out, version="1.0+a", requires=requires)
    assert caught.value.details == (detail,)


@pytest.mark.parametrize("text", [b"numpy (", b"\xff", b"", b"numpy ; extra = fast"])
def test_a_requirement_that_nobody_can_read_is_refused(base: Path, out: Path, text: bytes) -> None:
    """Where it is not known which project a line asks for, it is not guessed."""
    metadata = META[f"{INFO}/METADATA"].replace(b"Keywords:", b"Requires-Dist: " + text + b"\nRequires-Dist: a\nKeywords:")
    path = packed(base, {**FILES, **META, f"{INFO}/METADATA": metadata})

    with refusal("wheel-invalid", match="cannot be read"):
        archive.remake(path, out, version="1.0+a", requires={"a": ""})


PROJECTS = ("torch", "flash-infer", "cubin", "numpy")


@given(
    st.lists(
        st.tuples(st.sampled_from(PROJECTS), st.sampled_from(["", "==1", ">=1"]), st.sampled_from(["", '; extra == "x"'])), max_size=6
    ),
    st.dictionaries(st.sampled_from(PROJECTS), st.sampled_from(["==2", "<3", None]), max_size=3),
)
def test_any_requirements_change_as_told(lines: list[tuple[str, str, str]], changes: dict[str, str | None]) -> None:
    """For any wheel and any changes: other projects' lines stay, those of changed ones ask for what was given, on the old condition."""
    requires = {project: f"{project}{wanted}" if wanted else "" for project, wanted in changes.items()}
    head = "".join(f"Requires-Dist: {project}{version}{marker}\n" for project, version, marker in lines)
    if not requires.keys() <= {project for project, _, _ in lines}:
        with refusal("requirement-mismatch"):
            archive.requiring(head.encode(), requires)
        return

    expected = [(project, changes.get(project, version), marker) for project, version, marker in lines]
    assert archive.requiring(head.encode(), requires).decode() == "".join(
        f"Requires-Dist: {project}{version}{marker}\n" for project, version, marker in expected if version is not None
    )


ENVIRONMENT = "forks: {{vllm: {{distribution: mini, requires: {{{}}}}}}}\n"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("numpy: 'numpy=='", "is not a requirement"),
        ("numpy: '=='", "is not a requirement"),
        ("numpy: ' '", "is not a requirement"),
        ("numpy: 'numpi==1'", "is not a version of numpy"),
        ("numpy: 'numpy @ https://a.example/numpy.whl'", "is not a version of numpy"),
        ("NumPy: 'NumPy==1'", "is not the normalised name"),
        ("a_b: 'a-b==1'", "is not the normalised name"),
        ("'': ''", "is not the normalised name"),
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


def test_a_changed_requirement_makes_the_wheel_anew_and_no_other(mini: Mini) -> None:
    """The key of the fork's wheel changes, by the file that people edited, and that of no other fork."""
    before = {fork: building.inputs(mini.session(), fork) for fork in ("cutlass", "flashinfer", "vllm")}
    mini.edit("build/demo/environment.yaml", "distribution: mini-vllm\n", "distribution: mini-vllm\n    requires: {numpy: ''}\n")
    after = {fork: building.inputs(mini.session(), fork) for fork in before}

    assert {fork: [name for name in parts if parts[name] != after[fork][name]] for fork, parts in before.items()} == {
        "cutlass": [],
        "flashinfer": [],
        "vllm": ["build/demo/environment.yaml"],
    }


@pytest.mark.parametrize("stack", ["2026.05", "2026.11"])
def test_the_reviewed_environments_are_valid(stack: str) -> None:
    """What stands under requires can be put into a wheel."""
    assert set(toolchain.spec(Project(ROOT, stack)).forks) == {"cutlass", "flashinfer", "vllm"}


def test_a_version_of_ours_meets_the_requirement_on_its_release() -> None:
    """The label that our wheels carry is admitted by == of the release (PEP 440), so that two of them install together."""
    for stack in ("2026.05", "2026.11"):
        project = Project(ROOT, stack)
        release = project.spec.forks["flashinfer"].sources.sdist
        assert release is not None
        ours = versions.labelled(release.version, project.spec.label)
        text = toolchain.spec(project).forks["vllm"].requires.get("flashinfer-python", f"flashinfer-python=={release.version}")

        assert Requirement(text).specifier.contains(ours)


# Damage.


def test_what_is_no_wheel_is_refused(tmp_path: Path, out: Path) -> None:
    """A cut-off or empty file, and a name that is no wheel's, are errors that name the file."""
    whole = packed(tmp_path / NAME, {**FILES, **META}).read_bytes()
    for data in (b"", whole[: len(whole) // 2], whole[:-30]):
        (tmp_path / NAME).write_bytes(data)
        with refusal("wheel-invalid", match="mini-1"):
            archive.remake(tmp_path / NAME, out, version="1.0+a")
    with refusal("wheel-invalid", match="not the name of a wheel"):
        WheelName.of("mini-1.0.tar.gz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{INFO}/METADATA": b"Name: mini\nVersion: 1.1\n\n"}, "does not state version 1.0 once"),
        ({f"{INFO}/METADATA": b"Name: mini\nVersion: 1.0\nVersion: 1.0\n\n"}, "does not state version 1.0 once"),
        ({"mini/__init__.py": b'__version__ = "1.1"\n'}, "does not set __version__ to '1.0'"),
        ({"mini/__init__.py": b'"""__version__ = "1.0" is elsewhere."""\n'}, "does not set __version__"),
        ({"mini/__init__.py": b"def broken(:\n"}, "not a Python file"),
        ({"mini/__init__.py": b"\xff\xfe"}, "damaged"),
    ],
)
def test_a_wheel_that_contradicts_its_version_is_refused(tmp_path: Path, out: Path, change: dict[str, bytes], words: str) -> None:
    """Where metadata or program do not state the version that the name has, no label is put beside it."""
    base = packed(tmp_path / NAME, {**FILES, **META, **change})

    with refusal("wheel-invalid", match=words):
        archive.remake(base, out, version="1.0+a", version_files=("mini/__init__.py",))


def test_a_version_file_that_is_not_there_is_refused(base: Path, out: Path) -> None:
    """A stack that names a file which the wheel lacks is told so."""
    with refusal("wheel-invalid") as caught:
        archive.remake(base, out, version="1.0+a", version_files=("mini/gone.py",))

    assert "mini/gone.py" in " ".join(caught.value.details)


@pytest.mark.parametrize("record", [None, b"", b"one,two\n", b"\xff\n", b'"\n'])
def test_a_wheel_without_a_true_record_is_refused(tmp_path: Path, out: Path, record: bytes | None) -> None:
    """A wheel without RECORD, or with one that leaves out a member, is an error."""
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in {**FILES, **META, **({f"{INFO}/RECORD": record} if record is not None else {})}.items():
            wheel.writestr(name, data)

    with refusal("wheel-invalid", match="RECORD"):
        archive.remake(path, out, version="1.0+a")


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "mini\\evil.py"])
def test_a_wheel_that_would_leave_its_folder_is_refused(tmp_path: Path, out: Path, name: str) -> None:
    """Installers of others may follow such a name; it does not get that far."""
    with pytest.raises(SparkwrightError, match="would leave its folder"):
        archive.remake(packed(tmp_path / NAME, {**FILES, **META, name: b""}), out, version="1.0+a")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_comes_twice_is_refused(tmp_path: Path, out: Path) -> None:
    """Two members of one name mean one thing to one tool, another to another."""
    path = packed(tmp_path / NAME, {**FILES, **META})
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("mini/__init__.py", b"other")

    with refusal("wheel-invalid", match="twice"):
        archive.remake(path, out, version="1.0+a")


# Versions in files.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('__version__ = "1.0"\n', "__version__ = '1.0+a'\n"),
        ("__version__ = version = '1.0'  # by scm\n", "__version__ = version = '1.0+a'  # by scm\n"),
        ('version = "1.0"; __version__ = "1.0"\n', "version = '1.0+a'; __version__ = '1.0+a'\n"),
        ('x = "\x0c"\n\x0c\n__version__ = "1.0"\n', "x = \"\x0c\"\n\x0c\n__version__ = '1.0+a'\n"),
        ("# \u2028 \x85 \x1c\n__version__ = '1.0'", "# \u2028 \x85 \x1c\n__version__ = '1.0+a'"),
        ("é = 'é'; __version__ = '1.0'\r\nx = 1\r\n", "é = 'é'; __version__ = '1.0+a'\r\nx = 1\r\n"),
        ("x = 1\r__version__ = '1.0'\r", "x = 1\r__version__ = '1.0+a'\r"),
        ("__version__ = (\n    '1.'\n    '0'\n)\n", "__version__ = (\n    '1.0+a'\n)\n"),
        ("'''1.0'''\nother = '1.0'\n__version__ = '1.0'\n", "'''1.0'''\nother = '1.0'\n__version__ = '1.0+a'\n"),
    ],
)
def test_a_version_is_restated_where_python_sets_it(text: str, expected: str) -> None:
    """Only the value of the assignment changes, wherever Python's parser says that it stands."""
    assert versions.restate(text, "1.0", "1.0+a", "x.py") == expected


LINES = st.sampled_from(
    ["x = '1.0'", "# \x0c\x1d\u2029", "é = 1", "", "'''\n1.0\r\n'''", "version_info = (1, 0)", "if True:\n    version = '1.0'"]
)


@given(st.lists(LINES, max_size=5), st.lists(LINES, max_size=5), st.sampled_from(["\n", "\r\n", "\r"]))
def test_restating_changes_one_value_anywhere(before: list[str], after: list[str], end: str) -> None:
    """Whatever stands around it, the parsed module differs in that one value."""
    text = end.join([*before, "__version__ = '1.0'", *after]) + end
    made = versions.restate(text, "1.0", "2.0", "x.py")

    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(text)).replace(
        "targets=[Name(id='__version__', ctx=Store())], value=Constant(value='1.0')",
        "targets=[Name(id='__version__', ctx=Store())], value=Constant(value='2.0')",
    )


@pytest.mark.parametrize(
    ("version", "expected"), [("0.33.0", "0.33.0+spark.1"), ("0.7.2.post1", "0.7.2.post1+spark.1"), ("1.0+cu130", "1.0+spark.1")]
)
def test_a_label_replaces_the_one_that_is_there(version: str, expected: str) -> None:
    """A version has one local label: ours."""
    assert versions.labelled(version, "spark.1") == expected


# Real installers.


def test_a_remade_wheel_installs(base: Path, out: Path, tmp_path: Path) -> None:
    """uv installs the wheel offline; the installed metadata and the imported module state the label."""
    made = archive.remake(base, out, version="1.0+spark.1", version_files=("mini/__init__.py",))
    python = tmp_path / "venv" / "bin" / "python"
    uv = [find_uv_bin(), "--offline", "--quiet", "--cache-dir", str(tmp_path / "uv")]
    subprocess.run([*uv, "venv", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    subprocess.run([*uv, "pip", "install", "--python", str(python), "--no-index", "--no-deps", str(made)], check=True)
    script = "import importlib.metadata as m, mini; print(m.version('mini'), mini.__version__, len(m.files('mini')) > 5)"

    assert subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.split() == ["1.0+spark.1"] * 2 + [
        "True"
    ]


def test_a_written_wheel_is_whole(out: Path) -> None:
    """A wheel made from files alone has a true RECORD and the same bytes every time."""
    name = WheelName.of("mini_headers-1.0+a-py3-none-any.whl")
    metadata = "Metadata-Version: 2.4\nName: mini-headers\nVersion: 1.0+a\n"
    archive.write(out / name.filename, name, {"b.h": b"b", "a.h": b"a"}, metadata, pure=True)
    first = (out / name.filename).read_bytes()
    archive.write(out / name.filename, name, {"a.h": b"a", "b.h": b"b"}, metadata, pure=True)

    assert verify(out / name.filename).keys() == {"a.h", "b.h", f"{name.info}/METADATA", f"{name.info}/WHEEL"}
    assert (out / name.filename).read_bytes() == first
