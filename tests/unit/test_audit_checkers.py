"""Others' tools on real libraries: abi3audit, torch-abi-audit and auditwheel as processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sparkwright.audit import checkers
from sparkwright.audit.checkers import Checker, HostLibrary
from sparkwright.audit.wheel_reader import Contents, Subject
from sparkwright.builder.wheel import archive, elf
from sparkwright.builder.wheel.archive import WheelName

MACHINE = platform.machine()

EXTENSION = """
extern void *PyModule_Create2(void *definition, int version);
extern int PyUnicode_AsUTF8AndSize(void *text, long *size);
extern void *PyFloat_FromDouble(double);
extern void *_PyLong_New(long);
void *PyInit__C(void) { CALLS; return PyModule_Create2(0, 3); }
"""


def about(file: str = f"probe-1-cp38-abi3-manylinux_2_34_{MACHINE}.whl") -> Subject:
    platforms = (file.removesuffix(".whl").rpartition("-")[2],)
    return Subject(file, "0" * 64, 1, "probe", "1", platforms)


def contents(python: str = "", requires: tuple[str, ...] = ()) -> Contents:
    return Contents((), python, requires, ours=False)


def extension(folder: Path, calls: str, *options: str, name: str = "probe/_C.abi3.so") -> HostLibrary:
    """Return an extension that makes *calls*, which the linker leaves to be found when it is loaded."""
    (folder / "a.c").write_text(EXTENSION.replace("CALLS", calls))
    path = folder / name.rpartition("/")[2]
    subprocess.run(["cc", "-shared", "-fPIC", folder / "a.c", "-o", path, *options], check=True)
    return HostLibrary(name, path, elf.shared_object(path.read_bytes()).needed)


@pytest.mark.parametrize(
    ("calls", "python", "expected"),
    [
        ("PyFloat_FromDouble(1)", "", []),
        ("_PyLong_New(1)", "", ["abi3-violated"]),
        ("PyUnicode_AsUTF8AndSize(0, 0)", ">=3.8", ["abi3-newer"]),
        ("PyUnicode_AsUTF8AndSize(0, 0)", "<3.15,>=3.11", []),
    ],
)
def test_abi3audit_holds_the_libraries_against_what_the_wheel_promises(
    tmp_path: Path, calls: str, python: str, expected: list[str]
) -> None:
    """A symbol that came with Python 3.10 is right where no older Python may install the wheel, by its tag or by its metadata."""
    one = extension(tmp_path, calls)
    found = checkers.abi3(about(), contents(python), [one], tmp_path)

    assert [finding[:2] for finding in found.findings] == [(one.name, rule) for rule in expected]
    assert (found.checker.state, found.checker.name) == ("ran", "abi3audit")
    assert found.checker.version


TORCH = """
extern int torch_get_const_data_ptr(void *, void **);
extern int _ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(void *, void *, void *);
int use(void *p) { return CALLS; }
"""


@pytest.mark.parametrize(
    ("calls", "stable", "requires", "expected"),
    [
        ("torch_get_const_data_ptr(p, p)", True, ("torch==2.14.0",), []),
        ("torch_get_const_data_ptr(p, p)", True, ("torch==2.9.1",), ["torch-newer"]),
        ("_ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(p, p, p)", True, (), ["torch-unstable"]),
        ("_ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(p, p, p)", False, (), []),
    ],
)
def test_torch_abi_audit_holds_the_libraries_against_the_policy(
    tmp_path: Path, calls: str, stable: bool, requires: tuple[str, ...], expected: list[str]
) -> None:
    """Only what uses torch is asked about, and the stable ABI is a duty only where the policy says so."""
    (tmp_path / "empty.c").write_text("")
    subprocess.run(["cc", "-shared", "-Wl,-soname,libtorch_cpu.so", tmp_path / "empty.c", "-o", tmp_path / "libtorch_cpu.so"], check=True)
    (tmp_path / "a.c").write_text(TORCH.replace("CALLS", calls))
    path = tmp_path / "_C.abi3.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", tmp_path / "a.c", tmp_path / "libtorch_cpu.so", "-o", path], check=True)
    one = HostLibrary("probe/_C.abi3.so", path, elf.shared_object(path.read_bytes()).needed)
    other = extension(tmp_path, "PyFloat_FromDouble(1)", name="probe/_D.abi3.so")
    found = checkers.torch(contents(requires=requires), [one, other], lambda name: stable, tmp_path)

    assert [finding[:2] for finding in found.findings] == [(one.name, rule) for rule in expected]
    assert found.checker.state == "ran"


def write(folder: Path, tag: str, library: bytes) -> Path:
    path = folder / f"probe-1-py3-none-{tag}.whl"
    metadata = "Metadata-Version: 2.4\nName: probe\nVersion: 1\n"
    archive.write(path, WheelName.of(path.name), {"probe/_C.abi3.so": library}, metadata, pure=False)
    return path


@pytest.mark.parametrize(("tag", "rules"), [(f"manylinux_2_40_{MACHINE}", []), (f"manylinux_2_5_{MACHINE}", ["tag-newer"])])
def test_auditwheel_holds_the_tag_against_the_symbols(tmp_path: Path, tag: str, rules: list[str]) -> None:
    """A tag that promises an older system than the symbols want is a finding; one that promises a newer one is modest."""
    (tmp_path / "a.c").write_text("#include <math.h>\ndouble a(double x) { return exp(x); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "a.c", "-lm", "-o", tmp_path / "a.so"], check=True)
    path = write(tmp_path, tag, (tmp_path / "a.so").read_bytes())
    found = checkers.platform_tag(path, about(path.name), tmp_path)

    assert [finding[1] for finding in found.findings] == rules
    assert found.checker.state == "ran", found.checker.says


def test_what_a_wheel_does_not_promise_is_not_asked(tmp_path: Path) -> None:
    one = extension(tmp_path, "PyFloat_FromDouble(1)", name="probe/_C.cpython-311.so")
    found = [
        checkers.abi3(about(), contents(), [one], tmp_path),
        checkers.torch(contents(), [one], lambda name: True, tmp_path),
        checkers.platform_tag(tmp_path / "no.whl", about(f"probe-1-py3-none-linux_{MACHINE}.whl"), tmp_path),
    ]
    assert {outcome.checker.state for outcome in found} == {"not-needed"}


def test_a_tool_that_does_not_end_is_not_run(tmp_path: Path) -> None:
    found = checkers.abi3(about(), contents(), [extension(tmp_path, "PyFloat_FromDouble(1)")], tmp_path, timeout=0.01)
    assert found.checker == Checker("abi3audit", "not-run", "abi3audit did not end within 0.01 s")


def test_a_tool_that_is_not_installed_is_not_run(tmp_path: Path) -> None:
    """In a Python without the tools, each is named; the library is not passed."""
    one = extension(tmp_path, "PyFloat_FromDouble(1)")
    script = f"""
import importlib.metadata, pathlib
importlib.metadata.entry_points = lambda **words: ()
from sparkwright.audit import checkers
from sparkwright.audit.wheel_reader import Contents, Subject
half = checkers.HostLibrary("probe/_C.abi3.so", pathlib.Path({str(one.path)!r}), ("libtorch.so",))
nothing = Contents((), "", (), False)
about, folder = Subject("probe-1-cp38-abi3-any.whl", "", 1, "probe", "1", ()), pathlib.Path({str(tmp_path)!r})
print(checkers.abi3(about, nothing, [half], folder).checker.says)
print(checkers.torch(nothing, [half], lambda name: True, folder).checker.says)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["abi3audit is not installed", "torch-abi-audit is not installed"]


@pytest.mark.parametrize(
    ("file", "python", "floor"),
    [
        ("a-1-cp38-abi3-any.whl", "", (3, 8)),
        ("a-1-cp38-abi3-any.whl", "<3.15,>=3.11", (3, 11)),
        ("a-1-cp312-abi3-any.whl", ">=3.9", (3, 12)),
        ("a-1-py3-none-any.whl", "", (3, 2)),
    ],
)
def test_the_oldest_python(file: str, python: str, floor: tuple[int, ...]) -> None:
    assert checkers.python_floor(about(file), contents(python)) == floor


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        (("torch==2.14.0", "numpy"), (2, 14, 0)),
        (("torch>=2.9,<3",), (2, 9)),
        (("torch==2.14.0+cu130",), (2, 14, 0)),
        (('torch==2.1; extra == "x"',), ()),
        (("torch", "not a requirement !"), ()),
        ((), ()),
    ],
)
def test_the_torch_that_is_required(requires: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert checkers.torch_required(contents(requires=requires)) == expected


def test_a_half_is_the_library_with_holes_for_its_device_code(tmp_path: Path) -> None:
    """Everything but the given parts is as it was, and the length too."""
    data = bytes(range(256)) * 40
    path = checkers.strip_fatbins(data, [(9000, 100), (512, 4096)], tmp_path / "new" / "a.so")
    assert path.read_bytes() == data[:512] + bytes(4096) + data[4608:9000] + bytes(100) + data[9100:]
