"""Other projects' tools on real libraries: abi3audit, torch-abi-audit and auditwheel."""

from __future__ import annotations

import platform
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkwright.audit import tools
from sparkwright.audit.report import AuditedWheel, Checker
from sparkwright.audit.tools import HostLibrary
from sparkwright.audit.wheel_reader import Contents
from sparkwright.builder.wheel import archive, elf
from sparkwright.builder.wheel.archive import WheelName

MACHINE = platform.machine()
NAME = "probe/_C.abi3.so"
EXTENSION = """
extern void *PyModule_Create2(void *definition, int version);
extern int PyUnicode_AsUTF8AndSize(void *text, long *size);
extern void *PyFloat_FromDouble(double);
extern void *_PyLong_New(long);
extern int torch_get_const_data_ptr(void *, void **);
extern int _ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(void *, void *, void *);
void *PyInit__C(void *p) { CALLS; return PyModule_Create2(0, 3); }
"""
PLAIN = "PyFloat_FromDouble(1)"
STABLE = "torch_get_const_data_ptr(p, p)"
UNSTABLE = "_ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(p, p, p)"


def about(file: str = f"probe-1-cp38-abi3-manylinux_2_34_{MACHINE}.whl") -> AuditedWheel:
    """Return a wheel's facts as its file name states them."""
    platforms = (file.removesuffix(".whl").rpartition("-")[2],)
    return AuditedWheel(file, "0" * 64, 1, "probe", "1", platforms)


def contents(python: str = "", requires: tuple[str, ...] = ()) -> Contents:
    """Return what a wheel's metadata states."""
    return Contents((), python, requires, ours=False)


def extension(folder: Path, calls: str, *options: str, name: str = NAME) -> HostLibrary:
    """Return an extension that makes *calls*, which the linker leaves unresolved."""
    (folder / "a.c").write_text(EXTENSION.replace("CALLS", calls))
    path = folder / name.rpartition("/")[2]
    subprocess.run(["cc", "-shared", "-fPIC", folder / "a.c", "-o", path, *options], check=True)
    return HostLibrary(name, path, elf.shared_object(path.read_bytes()).needed)


@pytest.mark.parametrize(
    ("calls", "python", "expected"),
    [
        (PLAIN, "", []),
        ("_PyLong_New(1)", "", ["abi3-violated"]),
        ("PyUnicode_AsUTF8AndSize(0, 0)", ">=3.8", ["abi3-newer"]),
        ("PyUnicode_AsUTF8AndSize(0, 0)", "<3.15,>=3.11", []),
    ],
)
def test_abi3audit_compares_libraries_with_the_promise_of_the_wheel(
    tmp_path: Path, calls: str, python: str, expected: list[str]
) -> None:
    """A symbol of Python 3.10 is right if no older Python may install the wheel."""
    library = extension(tmp_path, calls)
    outcome = tools.abi3(about(), contents(python), [library], tmp_path)

    assert [(finding.library, finding.rule) for finding in outcome.findings] == [
        (NAME, rule) for rule in expected
    ]
    assert (outcome.checker.state, outcome.checker.name) == ("ran", "abi3audit")
    assert outcome.checker.version


@pytest.mark.parametrize(
    ("calls", "stable", "requires", "expected"),
    [
        (STABLE, True, ("torch==2.14.0",), []),
        (STABLE, True, ("torch==2.9.1",), ["torch-newer"]),
        (UNSTABLE, True, (), ["torch-unstable"]),
        (UNSTABLE, False, (), []),
    ],
)
def test_torch_abi_audit_compares_libraries_with_the_policy(
    tmp_path: Path, calls: str, stable: bool, requires: tuple[str, ...], expected: list[str]
) -> None:
    """Only libraries that use torch are checked, and the stable ABI only if the policy asks."""
    (tmp_path / "empty.c").write_text("")
    torch = tmp_path / "libtorch_cpu.so"
    soname = "-Wl,-soname,libtorch_cpu.so"
    subprocess.run(["cc", "-shared", soname, tmp_path / "empty.c", "-o", torch], check=True)
    library = extension(tmp_path, calls, "-Wl,--no-as-needed", str(torch))
    other = extension(tmp_path, PLAIN, name="probe/_D.abi3.so")
    wheel = contents(requires=requires)
    outcome = tools.torch(wheel, [library, other], lambda name: stable, tmp_path)

    assert [(finding.library, finding.rule) for finding in outcome.findings] == [
        (NAME, rule) for rule in expected
    ]
    assert outcome.checker.state == "ran"


@pytest.mark.parametrize(
    ("tag", "rules"),
    [(f"manylinux_2_40_{MACHINE}", []), (f"manylinux_2_5_{MACHINE}", ["tag-newer"])],
)
def test_auditwheel_compares_the_tag_with_the_symbols(
    tmp_path: Path, tag: str, rules: list[str]
) -> None:
    """A tag that promises an older system than the symbols want is a finding."""
    (tmp_path / "a.c").write_text("#include <math.h>\ndouble a(double x) { return exp(x); }\n")
    words = ["cc", "-shared", "-fPIC", "a.c", "-lm", "-o", "a.so"]
    subprocess.run(words, cwd=tmp_path, check=True)
    path = tmp_path / f"probe-1-py3-none-{tag}.whl"
    metadata = "Metadata-Version: 2.4\nName: probe\nVersion: 1\n"
    files = {NAME: (tmp_path / "a.so").read_bytes()}
    archive.write(path.parent, WheelName.of(path.name), files, metadata, pure=False)
    outcome = tools.platform_tag(path, about(path.name), tmp_path)

    assert [finding.rule for finding in outcome.findings] == rules
    assert outcome.checker.state == "ran", outcome.checker.says


def test_a_tool_is_not_needed_without_a_promise(tmp_path: Path) -> None:
    """No abi3 name, no torch, no manylinux tag."""
    library = extension(tmp_path, PLAIN, name="probe/_C.cpython-311.so")
    plain = about(f"probe-1-py3-none-linux_{MACHINE}.whl")
    outcomes = [
        tools.abi3(about(), contents(), [library], tmp_path),
        tools.torch(contents(), [library], lambda name: True, tmp_path),
        tools.platform_tag(tmp_path / "no.whl", plain, tmp_path),
    ]

    assert {outcome.checker.state for outcome in outcomes} == {"not-needed"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda patch: None, "abi3audit did not end within 0.01 s"),
        (
            lambda patch: patch.setattr(sysconfig, "get_path", lambda name: "/nonexistent"),
            "abi3audit is not installed",
        ),
    ],
)
def test_a_tool_without_an_answer_is_not_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    says: str,
) -> None:
    """One that does not end in time, and one that is not installed; that is never a pass."""
    change(monkeypatch)
    library = HostLibrary(NAME, tmp_path / "a.so", ())
    outcome = tools.abi3(about(), contents(), [library], tmp_path, timeout=0.01)

    assert outcome.checker == Checker("abi3audit", "not-run", says)


def test_device_code_is_replaced_by_holes(tmp_path: Path) -> None:
    """Everything but the given parts is as it was, and the length too."""
    data = bytes(range(256)) * 40
    path = tmp_path / "new" / "a.so"
    tools.strip_fatbins(data, [(9000, 100), (512, 4096)], path)

    assert (
        path.read_bytes() == data[:512] + bytes(4096) + data[4608:9000] + bytes(100) + data[9100:]
    )
