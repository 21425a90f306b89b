"""The audit on real wheels: archives, host code, device code in the form that nvcc writes; its readers of ELF files and fatbins."""

import contextlib
import io
import os
import platform
import struct
import subprocess
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import zstandard
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import given, strategies as st
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import fatbins, processes
from tests.support.fatbins import container, cubin, entry, ptx
from uv import find_uv_bin

from sparkwright.audit import device_code, policy as audit_policy
from sparkwright.audit.report import (
    RULES,
    AuditedLibrary,
    AuditedWheel,
    AuditFinding,
    AuditReport,
    raise_for_findings,
    show,
)
from sparkwright.audit.wheel import Contents, LibraryAudit, audit
from sparkwright.builder import toolchain
from sparkwright.builder.wheel import archive, elf, gpu_target, symbols
from sparkwright.client.locked_wheels import LockedWheel, check_wheel
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.forks.stack import Project
from sparkwright.gates import wheel_audit as audited

ROOT = Path(__file__).parents[2]
NOWHERE = partial(Path, "/nonexistent")
HOST = f"linux_{platform.machine()}"
LIBRARY = "probe/_C.abi3.so"

COMMON: dict[str, Any] = {
    "needed": ["lib[cm].so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-*"],
    "distributions": {
        "probe": {"reason": "A test.", "libraries": [{"glob": LIBRARY, "role": "target"}]}
    },
}
HOST_ONLY = {"glob": LIBRARY, "role": "base", "reason": "Host code."}


def write_wheel(
    folder: Path,
    files: Mapping[str, bytes],
    *,
    tag: str = HOST,
    python: str = "py3-none",
    name: str = "probe",
    more: str = "",
) -> Path:
    """Write a wheel of the distribution ``probe``, with *name* and *more* in its METADATA."""
    path = folder / f"probe-1-{python}-{tag}.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{more}"
    archive.write(path.parent, archive.WheelName.parse(path.name), files, metadata, pure=False)
    return path


def policy(library: Mapping[str, Any] | None = None, **top: Any) -> audit_policy.AuditPolicy:
    """Return `COMMON` for 12.1f, with fields of its one library (or of the whole file) replaced."""
    if library is not None:
        libraries = [{"glob": LIBRARY, "role": "target", **library}]
        top["distributions"] = {"probe": {"reason": "A test.", "libraries": libraries}}
    return msgspec.convert({"arch": "12.1f", **COMMON, **top}, audit_policy.AuditPolicy)


def rules(report: AuditReport) -> list[str]:
    """Return the rules of the report's findings."""
    assert all(finding.rule in RULES for finding in report.findings)
    return [finding.rule for finding in report.findings]


# The policy file.


@pytest.mark.parametrize(
    "stack", sorted(path.parent.name for path in (ROOT / "forks").glob("*/stack.yaml"))
)
def test_every_stack_asks_for_what_its_build_compiles(stack: str) -> None:
    """The libraries of role target are those of the build's targets, and say which external project compiles them."""
    project = Project(ROOT, stack)
    vllm = audit_policy.load(project.audit_file, project.spec.arch).distributions["vllm"]
    listed = {Path(library.glob).name.partition(".")[0]: library for library in vllm.libraries if library.role == "target"}

    settings = toolchain.spec(project).forks["vllm"]
    external = {target: name for name, entry in settings.external.items() for target in entry.targets}
    assert {target: library.external for target, library in listed.items()} == {
        target: "" if target in settings.core_targets else external[target] for target in {*settings.core_targets, *external}
    }
    shared = {name: target for target, name in external.items() if target in settings.core_targets}
    assert {name: target for target, library in listed.items() for name in library.external_operators} == shared


TARGET = {"role": "target", "glob": "*"}


@pytest.mark.parametrize(
    ("common", "own", "arch", "message"),
    [
        ({}, {"libraries": {"prob": [HOST_ONLY]}}, "12.1f", "no distribution prob"),
        ({"arch": "12.1f"}, {}, "12.1f", "unknown field `arch`"),
        ({}, {"needed": []}, "12.1f", "unknown field `needed`"),
        *(
            ({}, {"libraries": {"probe": [library]}}, "12.1f", message)
            for library, message in (
                ({"role": "base", "glob": "*"}, "wants a reason"),
                ({**TARGET, "opcodes": [{"pattern": "(", "least": 1}]}, "regular expression"),
                ({**TARGET, "ptx": [{"arch": "sm_80", "most": 1, "reason": ""}]}, "Expected `str`"),
                ({**HOST_ONLY, "opcodes": [{"pattern": "x", "least": 1}]}, "only reported"),
            )
        ),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(
    tmp_path: Path, common: dict[str, Any], own: dict[str, Any], arch: str, message: str
) -> None:
    """The architecture stands in stack.yaml alone, a stack adds to listed distributions, and nothing is allowed without a reason."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit.yaml").write_text(strict_yaml.dump({**COMMON, **common}))
    (tmp_path / "audit" / "test.yaml").write_text(strict_yaml.dump(own))
    with refusal("file-invalid", says=message):
        audit_policy.load(tmp_path / "audit" / "test.yaml", arch)


# The archive.


def share(data: bytearray) -> None:
    """Let the second member have the bytes of the first."""
    first = data.index(b"PK\x01\x02") + 42
    second = data.index(b"PK\x01\x02", first) + 42
    data[second : second + 4] = data[first : first + 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [(share, "overlap"), (lambda data: data.extend(b"PK\x01\x02" * 200_001), "more than 100000 members")],
)
def test_an_archive_that_is_larger_than_it_seems_is_refused(
    tmp_path: Path, change: Callable[[bytearray], None], message: str
) -> None:
    wheel = write_wheel(tmp_path, {"probe/a": bytes(range(256)), "probe/b": b"1" * 500})
    change(data := bytearray(wheel.read_bytes()))
    wheel.write_bytes(data)
    with refusal("wheel-invalid", match=message):
        audit(wheel, policy(), NOWHERE)


@pytest.mark.parametrize(
    ("name", "fields", "data", "reference"),
    [
        ("probe/new", {"external_attr": 0o120777 << 16}, b"/etc/passwd", "archive-unsafe"),
        ("../out", {}, b"x", "archive-unsafe"),
        ("p/../../out", {}, b"x", "archive-unsafe"),
        ("/abs", {}, b"x", "archive-unsafe"),
        ("p/\x1b[2J", {}, b"x", "archive-unsafe"),
        ("p/\x9b2J", {}, b"x", "archive-unsafe"),
        ("p/\u202egnp.so", {}, b"x", "archive-unsafe"),
        ("p/" + "é" * 128, {}, b"x", "archive-unsafe"),
        ("probe/new", {"compress_type": zipfile.ZIP_LZMA}, b"x" * 100, "wheel-invalid"),
        ("probe-1.dist-info/METADATA", {}, b"x", "wheel-invalid"),
        ("probe-1.dist-info/METADATA/x", {}, b"x", "wheel-invalid"),
        # 100 MB in 0.1 MB is no library and no text.
        ("probe/new", {"compress_type": zipfile.ZIP_DEFLATED}, bytes(100_000_000), "wheel-invalid"),
        ("probe-1.dist-info/sparkwright.json", {}, b'{"units": 3}', "wheel-invalid"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_member_is_refused(
    tmp_path: Path, name: str, fields: dict[str, int], data: bytes, reference: str
) -> None:
    """Links, names that leave the folder, lie to a reader or have no room, bombs, and a build record that is none."""
    wheel = write_wheel(tmp_path, {})
    info = zipfile.ZipInfo("probe/new")
    for field, value in {"filename": name, **fields}.items():
        setattr(info, field, value)
    with zipfile.ZipFile(wheel, "a") as opened:
        opened.writestr(info, data)
    with refusal(reference):
        audit(wheel, policy(), NOWHERE)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: write_wheel(folder, {}).rename(folder / "probe.zip"),
        lambda folder: write_wheel(folder, {}).rename(folder / "probe-2-py3-none-any.whl"),
        lambda folder: write_wheel(folder, {}, name="other"),
        lambda folder: folder / "probe-1-py3-none-any.whl",
        lambda folder: folder / f"{'p' * 300}-1-py3-none-any.whl",
        lambda folder: folder.joinpath("probe-1-py3-none-any.whl").mkdir(),
        lambda folder: os.mkfifo(folder / "probe-1-py3-none-any.whl"),
    ],
    ids=["no-wheel-name", "other-version", "other-name", "missing", "too-long", "folder", "pipe"],
)
def test_what_is_no_wheel_of_its_name_is_refused(
    tmp_path: Path, make: Callable[[Path], Path | None]
) -> None:
    """It is neither read nor waited for."""
    path = make(tmp_path) or tmp_path / "probe-1-py3-none-any.whl"
    with refusal("wheel-invalid"):
        audit(path, policy(), NOWHERE)


@pytest.mark.parametrize(("name", "version"), [("Pro.BE", "1.0.0"), ("pro-be", "01")])
def test_a_name_and_a_version_may_be_spelled_as_pip_takes_them(tmp_path: Path, name: str, version: str) -> None:
    """In METADATA, and as the name of its folder; a wheel made from it is spelled as its file."""
    spelled, file = archive.WheelName(name.replace("-", "_"), version, "py3-none-any"), "pro_be-1-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = archive.write(tmp_path, spelled, {"a.py": b"1"}, metadata, pure=True).rename(tmp_path / file)
    again = archive.rewrite(wheel, tmp_path, archive.WheelName("pro_be", "2", "py3-none-any"))
    folder, site = tmp_path / "site", "lib/python3/site-packages"
    subprocess.run([find_uv_bin(), "pip", "install", "--offline", "--quiet", "--no-deps", "--target", folder, wheel], check=True)

    for path, own in ((wheel, "1"), (again, "2")):
        assert audit(path, policy(distributions={}), NOWHERE).passed
        assert check_wheel(LockedWheel("pro-be", own, path.name, url="", sha256=""), path, site).size
    assert {*zipfile.ZipFile(again).namelist()} == {"a.py", *(f"pro_be-2.dist-info/{text}" for text in ("METADATA", "RECORD", "WHEEL"))}


def test_record_is_checked_against_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each difference between RECORD and the members is a finding, in the error and the table."""
    wheel = write_wheel(tmp_path, {f"probe/{name}.py": name.encode() for name in "abc"}, tag="any")
    assert audit(wheel, policy(distributions={}), NOWHERE).passed
    with zipfile.ZipFile(wheel) as source:
        members = {name: source.read(name) for name in source.namelist()} | {"probe/a.py": b"9"}
    with zipfile.ZipFile(wheel, "w") as target:
        for name, data in members.items():
            target.writestr(name, data.replace(b"probe/c.py", b"probe/gone.py"))
    report = audit(wheel, policy(distributions={}), NOWHERE)

    assert rules(report) == ["record-mismatch", "record-missing", "record-surplus"]
    show(report, result=True)
    assert "fail for sm_121f" in capsys.readouterr().out
    with refusal("audit-failed", says="record-surplus: probe/gone.py"):
        raise_for_findings(report)


# Host code.

#: Registers scaled_mm and, with -DFP4, fp4_mm; calls another library as -DCALL states.
HOST_CODE = """
#include <math.h>
#ifndef CALL
#define CALL
#endif
const char *volatile sink;
void def(const char *schema) { sink = schema; }
void impl(const char *name) { sink = name; }
int cuInit(unsigned);
int cuWeak(unsigned) __attribute__((weak));
int cuFileDriverOpen(void);
void *PyUnicode_AsUTF8AndSize(void *, long *);
void *_PyLong_New(long);
int torch_get_const_data_ptr(void *, void **);
int _ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(void *, void *, void *);
int _ZN5torch6stable5probeEv(void);
double PyInit__C(double x) {
  def("scaled_mm(Tensor a, Tensor b) -> Tensor");
  def("fp4_mm(Tensor! out, Tensor a) -> ()");
  impl("scaled_mm");
  impl("marlin");
#ifdef FP4
  impl("fp4_mm");
#endif
  CALL;
  return pow(x, 0.5);
}
"""
DRIVER = "-DCALL=cuInit(0)"
UNSTABLE = "-DCALL=_ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(0, 0, 0)"
STABLE = "-DCALL=torch_get_const_data_ptr(0, 0); _ZN5torch6stable5probeEv()"
STABLE_ABI = {"torch": "stable"}
PYTHON_3_10 = "-DCALL=PyUnicode_AsUTF8AndSize(0, 0)"
#: Python has no number of so many digits.
ENDLESS = f">={'9' * 5000}.{'9' * 5000}"
OLD_TAG, NEW_TAG = (f"manylinux_2_{minor}_{platform.machine()}" for minor in (5, 41))


@pytest.mark.parametrize(
    ("options", "metadata", "wants", "tag", "expected"),
    [
        ([], "", {}, HOST, {}),
        (["-Wl,-rpath,/opt/lib"], "", {}, HOST, {"rpath-present": "/opt/lib"}),
        ([], "", {"glob": "probe/x.so"}, HOST, {"library-unknown": "no policy for probe"}),
        ([], "", {}, "linux_riscv64", {"machine-foreign": "the wheel for linux_riscv64"}),
        (["-Wl,--no-as-needed", "libcuda.so"], "", {}, HOST, {"needed-foreign": "it wants libcuda"}),
        ([DRIVER], "", {}, HOST, {"driver-unnamed": "cuInit (1 functions)"}),
        ([DRIVER, "libcuda.so"], "", {"needed": ["libcuda.so.1"]}, HOST, {}),
        (["-DCALL=cuWeak(0)"], "", {}, HOST, {}),
        (["-DCALL=cuFileDriverOpen()"], "", {}, HOST, {}),
        ([], "", {"operators": ["scaled_mm"], "symbols": ["PyInit__C"]}, HOST, {}),
        (["-DFP4"], "", {"operators": ["scaled_mm", "fp4_mm"]}, HOST, {}),
        ([], "", {"operators": ["fp4_mm"]}, HOST, {"operator-missing": "declared, not implemented"}),
        ([], "", {"operators": ["marlin"]}, HOST, {"operator-missing": "not declared"}),
        (["-fvisibility=hidden"], "", {"symbols": ["PyInit__C"]}, HOST, {"symbol-missing": "does not define PyInit__C"}),
        # What the platform tag, the oldest Python and the required torch promise.
        ([], "", STABLE_ABI, NEW_TAG, {}),
        ([], "", {}, OLD_TAG, {"tag-newer": ""}),
        (["-DCALL=_PyLong_New(1)"], "", {}, HOST, {"abi3-violated": ""}),
        ([PYTHON_3_10], "Requires-Python: >=3.8\n", {}, HOST, {"abi3-newer": ""}),
        ([PYTHON_3_10], "Requires-Python: >=3.8\n", {"python": "3.10"}, HOST, {}),
        ([PYTHON_3_10], "Requires-Python: <3.15,>=3.11\n", {}, HOST, {}),
        ([STABLE], "Requires-Dist: torch==2.14.0\n", STABLE_ABI, HOST, {}),
        ([STABLE], "Requires-Dist: torch (==2.8.1)\n", STABLE_ABI, HOST, {"torch-newer": ""}),
        ([STABLE], f"Requires-Dist: tórch{ENDLESS}\n", STABLE_ABI, HOST, {}),
        ([STABLE], f"Requires-Dist: torch{ENDLESS}\n", STABLE_ABI, HOST, {}),
        ([PYTHON_3_10], f"Requires-Python: {ENDLESS}\n", {}, HOST, {"abi3-newer": ""}),
        ([UNSTABLE], "", STABLE_ABI, HOST, {"torch-unstable": ""}),
        ([UNSTABLE], "", {}, HOST, {}),
    ],
)
def test_host_code_outside_its_policy_or_its_promises_is_found(
    tmp_path: Path, options: list[str], metadata: str, wants: dict[str, Any], tag: str, expected: dict[str, str]
) -> None:
    """Search paths, machines, needs, the driver, symbols and operators; and what it takes from others, against what the wheel promises."""
    fatbins.compiled(tmp_path, "int cuInit(unsigned flags) { return 0; }\n", "-Wl,-soname,libcuda.so.1", name="libcuda.so")
    library = fatbins.compiled(tmp_path, HOST_CODE, "-O2", "-lm", *options)
    report = audit(write_wheel(tmp_path, {LIBRARY: library}, tag=tag, more=metadata), policy({**HOST_ONLY, **wants}), NOWHERE)

    assert rules(report) == list(expected)
    assert all(expected[finding.rule] in finding.message for finding in report.findings)


def test_read_only_data_that_is_listed_many_times_is_not_read(tmp_path: Path) -> None:
    """A small library whose sections are all the same bytes would take hours and all memory."""
    names = b"\0.rodata\0"
    table = struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 64, 1000, 0, 0, 0, 0) * 40
    table += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 1064, len(names), 0, 0, 0, 0)
    machine = next(number for number, name in elf.MACHINES.items() if HOST.endswith(name))
    begin, numbers = 1064 + len(names), (0, 64, 56, 0, 64, 41, 40)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQI6H", 3, machine, 1, 0, 0, begin, *numbers)
    files = {LIBRARY: head + bytes(1064 - len(head)) + names + table}
    report = audit(write_wheel(tmp_path, files), policy({**HOST_ONLY, "operators": ["f"]}), NOWHERE)

    assert rules(report) == ["elf-unreadable"]


#: File name → source and linker options: two of torch, one of CUDA with its version, one of the driver, one of nobody, one of the wheel.
SET = {
    "libc10.so": ("namespace c10 { void check(int) {} }", []),
    "libtorch.so": ("", ["-Wl,--no-as-needed", "libc10.so", "-lstdc++"]),
    "libcudart.so.13": ('extern "C" int cudaFree(void *memory) { return memory == __builtin_malloc(1); }', ["-Wl,--version-script,version"]),
    "libcuda.so.1": ('extern "C" int cuInit(unsigned) { return 0; }', []),
    "libforeign.so": ("void foreign(int) {}", []),
    "libbeside.so": ("void beside(int) {}", []),
}


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the libraries of `SET`."""
    folder = tmp_path_factory.mktemp("set")
    (folder / "version").write_text("libcudart.so.13 { global: cudaFree; local: *; };")
    for name, (source, options) in SET.items():
        fatbins.compiled(folder, source, f"-Wl,-soname,{name}", *options, name=name, compiler="g++")
    return folder


def read_set(linked: Path) -> dict[str, elf.SharedObject]:
    """Return those libraries of the folder that the locked wheels stand for."""
    return {name: elf.shared_object((linked / name).read_bytes()) for name in ("libtorch.so", "libc10.so", "libcudart.so.13")}


@pytest.mark.parametrize(
    ("declared", "call", "options", "expected"),
    [
        ("namespace c10 { void check(int); }", "c10::check(1)", ["libtorch.so"], ""),
        ("namespace c10 { void check(long); }", "c10::check(1l)", ["libtorch.so"], "c10::check(long)"),
        # Not in the libraries that it names.
        ("namespace c10 { void check(int); }", "c10::check(1)", [], "c10::check(int)"),
        ("void beside(int);", "beside(1)", ["libbeside.so"], ""),
        ("void beside(int);", "beside(1)", [], "beside(int)"),
        # The loader says that the library is missing; its symbols may all be there, but not those of torch.
        ("void foreign(int);", "foreign(1)", ["libforeign.so"], ""),
        ("namespace c10 { void check(int); } void foreign(int);", "foreign(1); c10::check(1)", ["libforeign.so"], "c10::check(int)"),
        ('extern "C" int cudaFree(void *);', "cudaFree(0)", ["libcudart.so.13"], ""),
        ('extern "C" int cuInit(unsigned);', "cuInit(0)", ["libcuda.so.1"], ""),
        ('extern "C" int cuInit(unsigned);', "cuInit(0)", [], "cuInit"),
        ('extern "C" void *PyList_New(long);', "PyList_New(0)", [], ""),
        ("void gone(int) __attribute__((weak));", "gone(1)", [], ""),
        # Without versions, as of a library that was linked without the system's.
        ('extern "C" { void *malloc(unsigned long); int gone(); }', "malloc(1); gone()", ["-nodefaultlibs", "libcudart.so.13"], "gone"),
        ("namespace std { void __throw_bad_alloc(); }", "std::__throw_bad_alloc()", ["-nodefaultlibs", "libtorch.so"], ""),
        ("namespace std { void __throw_bad_alloc(); }", "std::__throw_bad_alloc()", ["-nodefaultlibs"], "std::__throw_bad_alloc()"),
    ],
)
def test_a_symbol_that_nothing_defines_is_found(
    tmp_path: Path, linked: Path, declared: str, call: str, options: list[str], expected: str
) -> None:
    """In the wheel, in the locked libraries, in the system or in the driver, each if the library names it, with its version."""
    source = f"{declared}\nvoid probe() {{ {call}; }}"
    library = fatbins.compiled(linked, source, "-Wl,--no-as-needed", *options, compiler="g++")
    files = {LIBRARY: library, "probe/libbeside.so": (linked / "libbeside.so").read_bytes()}
    wheel = write_wheel(tmp_path, files)
    report = audit(wheel, policy(HOST_ONLY), NOWHERE, judged="any", linked=lambda: read_set(linked))

    assert [finding.message for finding in report.findings] == list(filter(None, [expected]))
    checks = audited.run(report) + audited.run(audit(wheel, policy(HOST_ONLY), NOWHERE, judged="any"))
    states = [(check.state, check.reason) for check in checks if check.name == "symbols"]
    wheel = write_wheel(tmp_path, {name: without_sections(data) for name, data in files.items()})
    hidden = audit(wheel, policy(HOST_ONLY), NOWHERE, judged="any", linked=lambda: read_set(linked))
    assert hidden.findings == report.findings
    assert states == [("fail", "undefined-symbol") if expected else ("pass", ""), ("not-run", "symbols-unchecked")]


ENTRY = """
namespace c10 { void check(TYPE); }
void unbound();
void entry() { c10::check(1); unbound(); }
"""


def test_what_the_official_library_needs_undefined_as_well_may_pass(tmp_path: Path, linked: Path) -> None:
    """But no symbol of torch, and not on the wheel's own word."""
    links = ("-Wl,--no-as-needed", "libtorch.so")
    sound, other = (fatbins.compiled(linked, ENTRY, f"-DTYPE={kind}", *links, compiler="g++") for kind in ("int", "long"))
    official = symbols._read(write_wheel(tmp_path, {LIBRARY: other}))
    inherited = [(LIBRARY, name) for name in ("_Z7unboundv", "_ZN3c105checkEl")]
    record = {"probe-1.dist-info/sparkwright.json": msgspec.json.encode({"inherited": inherited})}
    judged = partial(audit, policy=policy({**HOST_ONLY, "needed": ["libtorch.so"]}), programs=NOWHERE, linked=lambda: read_set(linked))
    wheel = write_wheel(tmp_path, {LIBRARY: sound, **record})
    assert judged(wheel, official=lambda: official).passed
    assert [finding.message for finding in judged(wheel).findings] == ["unbound()"]
    foreign = write_wheel(tmp_path, {LIBRARY: other, **record})
    assert [finding.message for finding in judged(foreign, official=lambda: official).findings] == ["c10::check(long)"]


LIBC = elf.SharedObject("x86_64", (), (), {}, (), frozenset(), {"malloc": ("GLIBC_2.2.5",)})


def importing(*names: str, needed: Sequence[str] = (), defined: Sequence[str] = (), version: str = "") -> elf.SharedObject:
    """Return a library that needs the symbols *names* and the libraries *needed*."""
    return replace(LIBC, needed=tuple(needed), symbols=frozenset(defined), imports=dict.fromkeys(names, (version,)))


def test_libraries_of_one_file_name_are_all_asked_and_the_system_is_that_of_the_locked_libraries() -> None:
    """The interpreter that audits, which has other functions and Python's own names, does not count."""
    wheel = {
        "p/a.so": importing("first", "second", "malloc", "_handle", "Tcl_Init", needed=["libh.so"]),
        "p/x/libh.so": importing("second", defined=["first"]),
        "p/y/libh.so": importing("third", defined=["second"]),
        "p/b.so": replace(LIBC, imports={"both": ("", "GLIBC_2.2.5")}),
    }
    expected = {"p/a.so": ["Tcl_Init", "_handle"], "p/x/libh.so": ["second"], "p/y/libh.so": ["third"], "p/b.so": ["both"]}
    assert symbols.undefined(wheel, {"libtorch.so": LIBC}) == expected


def test_a_symbol_that_is_needed_in_two_versions_keeps_both(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("ONE { }; TWO { } ONE;")
    names = '__asm__(".symver one, f@ONE"); __asm__(".symver two, f@TWO"); void one(); void two();'
    defined = names.replace("f@TWO", "f@@TWO") + "void one() {} void two() {}"
    fatbins.compiled(tmp_path, defined, "-Wl,--version-script,version", name="libb.so")
    library = fatbins.compiled(tmp_path, f"{names} void g() {{ one(); two(); }}", "./libb.so")

    assert elf.shared_object(library).imports["f"] == ("ONE", "TWO")


def test_a_platform_tag_is_held_against_all_runtimes_of_c_and_says_which(tmp_path: Path) -> None:
    """Also a tag with a name: glibc 2.17's systems have no C++ runtime with a sized delete."""
    files = {LIBRARY: fatbins.compiled(tmp_path, "void f(int *number) { delete number; }\n", "-std=c++17", compiler="c++")}
    (finding,) = audit(write_wheel(tmp_path, files, tag=f"manylinux2014_{platform.machine()}"), policy(HOST_ONLY), NOWHERE).findings

    assert finding.rule == "tag-newer"
    assert finding.message == "it needs CXXABI_1.3.9, so a system of glibc 2.24; the tag promises glibc 2.17"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p/libcuda.so.1", ["vendored-driver"]),
        ("p.libs/libcuda-1a2b3c4d.so.1", ["vendored-driver"]),
        ("p/libcommon.so", []),
        ("p/libcudata.so", []),
    ],
)
def test_copies_are_found_by_their_names(tmp_path: Path, name: str, expected: list[str]) -> None:
    """Of the driver, also those that `auditwheel repair` makes."""
    assert rules(audit(write_wheel(tmp_path, {name: b"x"}), policy(distributions={}), NOWHERE)) == expected


# Device code.


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["sm_121f"], {}),
        (["sm_121"], {"arch-folded": "cubins for sm_121: 1,", "arch-missing": "sm_121f: 0"}),
        (["sm_120f"], {"arch-folded": "cubins for sm_120f: 1,", "arch-missing": "sm_121f: 0"}),
        (["sm_90"], {"arch-foreign": "cubins for sm_90: 1,", "arch-missing": "sm_121f: 0"}),
        (["ptx sm_121f"], {"ptx-foreign": "files for sm_121f: 1,", "arch-missing": "sm_121f: 0"}),
        (["sm_121f", "sm_80"], {"arch-foreign": "cubins for sm_80: 1,"}),
        (["sm_121f", "ptx sm_80"], {"ptx-foreign": "PTX files for sm_80: 1,"}),
        (["sm_121f", "sm_121f as sm_121a"], {"arch-contradicted": "the table says sm_121a"}),
        (["sm_121f", " as sm_121f"], {"arch-foreign": "sm_121f?: 1"}),
    ],
)
def test_code_for_another_target_is_found(
    tmp_path: Path, targets: list[str], expected: dict[str, str]
) -> None:
    """By the note in the cubin, since its name and flags are the same for several targets."""
    pairs = [text.partition(" as ")[::2] for text in targets]
    images = [ptx(name[4:]) if name.startswith("ptx ") else cubin(tmp_path, name, listed=listed) for name, listed in pairs]
    report = audit(write_wheel(tmp_path, {LIBRARY: fatbins.library(tmp_path, *([image] for image in images))}), policy({}), NOWHERE)

    assert set(rules(report)) == expected.keys()
    assert all(expected[finding.rule] in finding.message for finding in report.findings)


@pytest.mark.parametrize(
    ("version", "memory", "stated"),
    [(2, 8, "sm_120"), (0x80, 8, "sm_120"), (0x81, 0x7000000A, "sm_120"), (7, 0x70000007, "sm_120?")],
)
def test_code_is_judged_by_the_table_where_it_states_no_target_that_can_be_read(
    tmp_path: Path, version: int, memory: int, stated: str
) -> None:
    """Of every CUDA release; memory of a GPU has no bytes in the file."""
    image = cubin(tmp_path, "sm_120", version=version, memory=memory)
    report = audit(write_wheel(tmp_path, {LIBRARY: fatbins.library(tmp_path, [image])}), policy({}), NOWHERE, judged="any")

    assert rules(report) == []
    assert (report.libraries[0].cubins, report.libraries[0].spark) == ({stated: 1}, {"plain": 1})


def test_unreadable_device_code_is_a_finding_and_the_rest_is_still_reported(tmp_path: Path) -> None:
    """One library that cannot be read does not hide another."""
    good = fatbins.library(tmp_path, [cubin(tmp_path, "sm_121f")])
    bad = good.replace(bytes.fromhex("50ed55ba"), bytes(4))
    report = audit(write_wheel(tmp_path, {LIBRARY: bad, "probe/unknown.so": good}), policy({}), NOWHERE)

    assert rules(report) == ["device-unreadable", "library-unknown"]
    assert report.libraries[1].cubins == {"sm_121f": 1}


def test_device_code_that_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    """A small wheel may not keep the audit busy for hours: the bytes that its entries state count together, in all libraries."""
    packed = zstandard.compress(bytes(1000))
    entry = fatbins.entry(packed, flags=0x8000, packed=len(packed), whole=elf.MOST_IMAGE_BYTES)
    bomb = fatbins.library(tmp_path, fatbin=fatbins.container(*[entry] * 70))
    assert rules(audit(write_wheel(tmp_path, {LIBRARY: bomb}), policy({}), NOWHERE)) == [
        "device-unreadable"
    ]
    with refusal("wheel-invalid", match="more device code than any wheel"):
        audit(write_wheel(tmp_path, {LIBRARY: bomb, "probe/two.so": bomb}), policy({}), NOWHERE)


def test_the_device_code_digest_follows_the_code_alone(tmp_path: Path) -> None:
    """Neither Python, host code nor the order of units changes it."""
    one, two = [cubin(tmp_path, "sm_121f")], [cubin(tmp_path, "sm_121f", kernels=("two",))]
    digests = []
    for units, source, python in (([one, two], "", b"1"), ([two, one], "int a;", b"2"), ([one], "", b"1")):
        library = fatbins.library(tmp_path, *units, source=source)
        report = audit(write_wheel(tmp_path, {LIBRARY: library, "probe/a.py": python}), policy({}), NOWHERE)
        assert report.libraries[0].spark == {"native": len(units)}, "a fatbin is a unit"
        digests.append(report.device_code)

    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("libraries", "metadata", "expected"),
    [
        ({"a": ("sm_90", "13")}, "", ["code-missing"]),
        ({"a": ("sm_120a", "13"), "b": ("ptx sm_90", "13")}, "", ["code-missing"]),
        ({"a": ("sm_90", "13"), "b": ("sm_120", "13")}, "", []),
        ({"a": ("sm_120", "12"), "b": ("sm_120", "12")}, "", ["needed-foreign"] * 2),
        ({"a": ("sm_120", "12"), "b": ("sm_120", "13")}, "", []),
        ({"a": ("sm_120", "12")}, "Requires-Dist: nvidia-cuda-runtime-cu12\n", []),
        ({"a": ("sm_120", "12"), "libcudart.so.12": ("sm_120", "12")}, "", []),
    ],
)
def test_a_wheel_of_others_that_is_of_no_use_here_does_not_pass(
    tmp_path: Path, libraries: dict[str, tuple[str, str]], metadata: str, expected: list[str]
) -> None:
    """None of its libraries has machine code for the GPU, or fits the stack's CUDA; one that does is enough, since a program takes it."""
    files = {}
    for name, (target, release) in libraries.items():
        image = ptx(target[4:]) if target.startswith("ptx ") else cubin(tmp_path, target)
        runtime = f"libcudart.so.{release}"
        fatbins.compiled(tmp_path, "", f"-Wl,-soname,{runtime}", name=runtime)
        files[f"probe/{name}"] = fatbins.library(tmp_path, [image], needs=runtime)
    wheel = write_wheel(tmp_path, files, more=metadata)
    needed = [*COMMON["needed"], "libcudart.so.13"]

    assert rules(audit(wheel, policy(distributions={}, needed=needed), NOWHERE, judged="any")) == expected


@pytest.mark.parametrize(("judged", "named", "expected"), [("any", False, []), ("stack", False, ["library-unknown"]), ("stack", True, [])])
def test_cubins_that_are_files_are_a_row_for_each_folder(
    tmp_path: Path, judged: Literal["stack", "any"], named: bool, expected: list[str]
) -> None:
    """With what a GPU of the stack gets from them, by their note or by their flags, whose byte changed with version 8."""
    files = {}
    for name, target, version, flags in (("a", "sm_121f", 8, 121 << 8), ("b", "", 8, 120 << 8), ("c", "", 7, 120), ("d", "sm_90a", 8, 90 << 8)):
        data = bytearray(cubin(tmp_path, target)[2])
        data[8] = version
        struct.pack_into("<H", data, 18, 190)
        struct.pack_into("<I", data, 48, flags)
        files[f"probe/{name}/{name}.cubin"] = bytes(data)
    size, short = sum(map(len, files.values())), {"probe/short.cubin": bytes(data[:20])}
    wants = policy({**HOST_ONLY, "glob": "probe/*"} if named else None)
    report = audit(write_wheel(tmp_path, files | short), wants, NOWHERE, judged=judged)

    assert {*rules(report)} - {"library-missing"} == {"elf-unreadable", *expected}
    (row,) = report.libraries
    assert (row.name, row.size) == ("probe/**", size)
    assert row.cubins == {"sm_90a": 1, "sm_120?": 2, "sm_121f": 1}
    assert row.spark == {"native": 1, "plain": 2, "nothing": 1}
    assert report.device_code


FP4 = {"pattern": r"F2FP\..*E2M1", "least": 2, "kernels": "quantise"}
NO_TRAP = {"kernels": "quantise", "reason": "The quantiser must work."}
GOOD, TRAP = "F2FP.SATFINITE.E2M1.F32.PACK_AB R0 ;", "BPT.TRAP 0x1 ;"


@pytest.mark.parametrize(
    ("target", "instructions", "judged", "expected", "gain"),
    [
        ("sm_121f", [GOOD, GOOD], "stack", [], "native"),
        ("sm_121f", [GOOD, TRAP], "stack", ["opcode-missing", "trap-present"], "native"),
        ("sm_120f", [TRAP], "any", [], "family"),
        ("sm_120a", [GOOD, GOOD], "any", ["code-missing"], "nothing"),
    ],
)
def test_instructions_are_counted_in_the_code_that_a_spark_loads(
    tmp_path: Path,
    target: str,
    instructions: list[str],
    judged: Literal["stack", "any"],
    expected: list[str],
    gain: str,
) -> None:
    """A wheel that was not built here is judged by what a Spark gets from it."""
    lines = [".text.quantise:", *(f"  /*0000*/ {text}" for text in instructions)]
    processes.script(tmp_path / "nvdisasm", "".join(f"echo '{line}'\n" for line in lines))
    library = fatbins.library(tmp_path, [cubin(tmp_path, target, kernels=("quantise",))])
    report = audit(write_wheel(tmp_path, {LIBRARY: library}), policy({"opcodes": [FP4], "trap_free": [NO_TRAP]}), lambda: tmp_path, judged=judged)

    assert rules(report) == expected
    assert report.libraries[0].spark == {gain: 1}


# The unit manifest.


def unit(name: str, *images: fatbins.Image) -> archive.CompiledUnit:
    """Return the unit ``csrc/<name>.cu`` of the target ``_C``."""
    return archive.CompiledUnit(f"csrc/{name}.cu", "_C", f"{name}.o", LIBRARY, ("compute_121f:sm_121f",), tuple((listed, sha256_bytes(payload)) for _, listed, payload in images))


def findings(
    folder: Path, images: Sequence[fatbins.Image], *units: archive.CompiledUnit, **allowed: Any
) -> list[tuple[str, str]]:
    """Return the findings of a wheel whose library has a fatbin for each image, and whose record names *units*."""
    files = {
        LIBRARY: fatbins.library(folder, *([image] for image in images)),
        "probe-1.dist-info/sparkwright.json": msgspec.json.encode({"units": units}),
    }
    report = audit(write_wheel(folder, files), policy(allowed), NOWHERE)
    return [(finding.rule, finding.text) for finding in report.findings]


MISSING = ("arch-missing", "csrc/b.cu (target _C): its object holds no cubin for sm_121f")


def test_findings_name_the_units_that_they_concern(tmp_path: Path) -> None:
    """By the hashes of their code: units folded, left out or unrecorded."""
    good, folded, absent, other = (
        cubin(tmp_path, target, kernels=(target, kernel))
        for target, kernel in (("sm_121f", "a"), ("sm_120f", "a"), ("sm_120a", "a"), ("sm_121f", "b"))
    )

    assert findings(tmp_path, [good], unit("a", good)) == []
    assert findings(tmp_path, [good, folded], unit("a", good), unit("b", folded)) == [
        ("arch-folded", "csrc/b.cu (target _C): cubins for sm_120f: 1, allowed: 0"),
        MISSING,
    ]
    ((rule, text),) = findings(tmp_path, [good], unit("a", good), unit("b", absent))
    assert (rule, "csrc/b.cu (target _C): 1 of the 1 pieces" in text) == ("arch-missing", True)
    assert findings(tmp_path, [good, other], unit("a", good)) == [("code-foreign", "1 of 2, for sm_121f")]


UNLOCKED = {"parts": "the lock does not resolve parts"}


@pytest.mark.parametrize(
    ("compiled", "official", "unlocked", "expected"),
    [
        (True, False, {}, []),
        (False, True, UNLOCKED, []),
        (False, False, UNLOCKED, []),
        (False, True, {}, ["arch-missing", "operator-missing", "ptx-foreign"]),
        (False, True, {"others": "another reason"}, ["arch-missing", "operator-missing", "ptx-foreign"]),
        (False, False, {}, ["library-missing"]),
        (True, True, UNLOCKED, ["arch-missing", "ptx-foreign"]),
        (False, True, None, []),
    ],
    ids=["native", "official", "left out", "no reason", "other reason", "missing", "compiled otherwise", "not built here"],
)
def test_a_library_of_an_external_project_is_native_unless_the_build_says_why_not(
    tmp_path: Path, compiled: bool, official: bool, unlocked: dict[str, str] | None, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The official library, or none, passes with the recorded reason alone, which the audit repeats; what was compiled is judged as such."""
    library = fatbins.library(tmp_path, [ptx("sm_80") if official else cubin(tmp_path, "sm_121f")])
    record = {"unlocked": unlocked or {}, "transplant": {"libraries": {LIBRARY: ""} if compiled else {}}}
    files = {LIBRARY: library} if compiled or official else {"probe/a.py": b""}
    files |= {"probe-1.dist-info/sparkwright.json": msgspec.json.encode(record)} if unlocked is not None else {}
    wants = policy({"external": "parts", "external_operators": {"parts": ["quantise"]} if official else {}})
    report = audit(write_wheel(tmp_path, files), wants, NOWHERE, judged=None)
    show(report)

    assert sorted(rules(report)) == expected
    assert ("not compiled: parts: the lock does not resolve parts\n" in capsys.readouterr().err) == ("parts" in (unlocked or {}))


@pytest.mark.parametrize(("target", "field"), [("sm_120f", "also"), ("sm_90", "also"), ("ptx sm_121f", "ptx")])
def test_a_unit_without_code_for_its_planned_target_is_found(
    tmp_path: Path, target: str, field: str
) -> None:
    """Even if the policy allows the code that it has instead."""
    arch = target.removeprefix("ptx ")
    good, other = cubin(tmp_path, "sm_121f"), ptx(arch) if arch != target else cubin(tmp_path, arch, kernels=("other",))
    allowed = {field: [{"arch": arch, "most": 1, "reason": "A test."}]}

    assert findings(tmp_path, [good, other], unit("a", good), unit("b", other), **allowed) == [MISSING]


# ELF files.

OPERATOR = policy({**HOST_ONLY, "operators": ["half"]})

SOURCE = """
#include <math.h>
#include <stdio.h>
int shown = 3;
static int hidden(int x) { return x + 1; }
double half(double x) { puts("half(Tensor x) -> Tensor"); return pow(x, 0.5) + hidden(shown); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared library with needs, a search path and symbols."""
    return fatbins.compiled(tmp_path_factory.mktemp("elf"), SOURCE, "-Wl,--no-as-needed,-rpath,/opt/lib:$ORIGIN", "-lm")


def without_sections(library: bytes) -> bytes:
    """Return *library* without its section table, which no loader reads."""
    return library[:0x28] + bytes(8) + library[0x30:0x3A] + bytes(6) + library[64:]


def test_it_reads_what_another_reader_and_the_loader_read(library: bytes) -> None:
    """
    Needs, paths and symbols are those that pyelftools finds by the section table. Sections can be stripped or lie; what the loader would bring
    is read from the segments, as the loader does.
    """
    other = ELFFile(io.BytesIO(library))
    dynamic, table = (other.get_section_by_name(name) for name in (".dynamic", ".dynsym"))
    assert isinstance(dynamic, DynamicSection)
    assert isinstance(table, SymbolTableSection)
    tags = {tag.entry.d_tag: vars(tag) for tag in dynamic.iter_tags()}
    found = elf.shared_object(library)

    assert {"libm.so.6"} <= set(found.needed)
    assert found.rpath == (tags["DT_RUNPATH"]["runpath"],)
    assert found.symbols == {
        symbol.name
        for symbol in table.iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    }
    assert found.imports.keys() == {"pow", "puts"}
    needed = [text.removeprefix("GLIBC_") for texts in found.imports.values() for text in texts]
    assert max(map(elf.version_key, needed)) == found.versions["GLIBC"]
    assert found.versions.keys() == {"GLIBC"}
    assert [section.name for section in elf.sections(library)] == [
        section.name for section in other.iter_sections()
    ]

    assert elf.shared_object(without_sections(library)) == found


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
    with pytest.raises(elf.ElfUnreadable, match=says):
        elf.shared_object(bytes(bad))


@given(place=st.integers(0, 559), change=st.binary(min_size=1, max_size=8), table=st.sampled_from(("header", ".dynamic", ".gnu.version_r", "sections")))
def test_any_change_of_the_tables_is_refused_or_read(library: bytes, table: str, place: int, change: bytes) -> None:
    """Whatever bytes of headers, dynamic entries or sections are changed, reading ends with a result or says why not."""
    offsets = {section.name: section.offset for section in elf.sections(library)}
    offsets |= {"header": 0, "sections": struct.unpack_from("<Q", library, 0x28)[0]}
    begin = offsets[table] + place
    bad = library[:begin] + change + library[begin + len(change) :]
    with contextlib.suppress(elf.ElfUnreadable):
        found = elf.shared_object(bad)
        assert sum(map(len, found.symbols)) <= elf.MOST_NAME_BYTES
        LibraryAudit(OPERATOR, SOUND.subject, Contents({}, {}, None), LIBRARY).check_host(bad, found)


# Fatbins.


def unpacked(data: bytes) -> list[bytes]:
    return [elf.unpack(data, item) for item in elf.fatbin_entries(data, [(0, len(data))])]


def packed_entry(packed: bytes, flags: int, whole: int) -> bytes:
    return container(entry(packed, flags=flags, packed=len(packed), whole=whole))


PACKED = zstandard.compress(bytes(1000))


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
        (packed_entry(PACKED, 0x8000, 10), "the table says"),
        (packed_entry(PACKED, 0x8000, 5000), "the table says"),
        (packed_entry(b"\xff" * 60, 0x8000, 5120), "zstd"),
        (packed_entry(b"\xff" * 60, 0x2000, 5120), "lz4"),
    ],
)
def test_what_is_not_known_is_refused_with_its_number(data: bytes, says: str) -> None:
    """A version, a kind or a size that this reader does not know, and damaged packing, of which no more is held than the table states."""
    with pytest.raises(elf.ElfUnreadable, match=says):
        unpacked(data)


@given(st.integers(0, 300), st.binary(min_size=1, max_size=8))
def test_any_change_gives_an_error_or_entries_inside_the_file(place: int, change: bytes) -> None:
    """Whatever is written over the tables, the reader ends, and what it yields lies in the file."""
    data = (
        container(entry(b"one" * 9, flags=1 << 21), entry(b"two", kind=1))
        + bytes(16)
        + container(entry(b"three"))
    )
    data = data[:place] + change + data[place + len(change) :]
    with contextlib.suppress(elf.ElfUnreadable):
        entries = list(elf.fatbin_entries(data, [(0, len(data))]))
        assert all(item.offset + item.stored <= len(data) for item in entries)
        unpacked(data)


# Against NVIDIA's tools.


@pytest.mark.toolchain
@pytest.mark.parametrize(("mode", "packing"), [("none", ""), ("speed", "lz4"), ("balance", "zstd"), ("size", "zstd")])
def test_cuobjdump_finds_the_same_bytes(cuda_bin: Path, tmp_path: Path, mode: str, packing: str) -> None:
    """Whichever way nvcc packs it, each cubin and each PTX text is the one that NVIDIA's own tool extracts."""
    (tmp_path / "a.cu").write_text("__global__ void twice(float* data) { data[threadIdx.x] *= 2.f; }\n")
    codes = ["sm_80", "compute_80", "sm_90a", "sm_120f", "sm_121a", "compute_121f"]
    arches = [f"-gencode=arch=compute_{code.partition('_')[2]},code={code}" for code in codes]
    (theirs := tmp_path / "theirs").mkdir()
    for command in (
        ["nvcc", "-c", "-Xcompiler", "-fPIC", *arches, f"-compress-mode={mode}", "../a.cu", "-o", "../a.o"],
        ["cuobjdump", "--extract-elf", "all", "../a.o"],
        ["cuobjdump", "--extract-ptx", "all", "../a.o"],
    ):
        subprocess.run([cuda_bin / command[0], *command[1:]], cwd=theirs, check=True)

    with elf.mapped(tmp_path / "a.o") as data:
        host = elf.shared_object(data)
        found = list(elf.fatbin_entries(data, host.fatbins))
        ours = Counter(sha256_bytes(elf.unpack(data, item)) for item in found)
        images = device_code.read(data, host, 12, compiled=True).images
    assert ours == Counter(map(sha256_file, theirs.iterdir()))
    targets = ["sm_80", "sm_90a", "sm_120f", "sm_121a", "sm_80", "sm_121f"]
    assert Counter(image.target for image in images) == Counter(targets)
    # What does not become smaller stays as it is.
    assert {item.compression for item in found} | {""} == {packing, ""}

    # Of an object that is trimmed, that tool extracts what the GPU takes.
    for device, taken in (((12, 1), {"sm_120f", "sm_121a"}), ((10, 0), {"compute_80"})):
        (folder := tmp_path / str(device)).mkdir()
        (folder / "a.o").write_bytes(gpu_target.trimmed((tmp_path / "a.o").read_bytes(), device))
        for kind in ("elf", "ptx"):
            subprocess.run([cuda_bin / "cuobjdump", f"--extract-{kind}", "all", "a.o"], cwd=folder, check=True)
        (folder / "a.o").unlink()
        expected = {image.sha256 for image in images if taken >= {("compute" if image.kind == "ptx" else "sm") + image.target[2:]}}
        assert {*map(sha256_file, folder.iterdir())} == expected


@pytest.mark.parametrize(
    ("cubins", "ptx", "expected"),
    [
        (["sm_121f"], [], "native"),
        (["sm_120f"], [], "family"),
        (["sm_121"], [], "plain"),
        (["sm_120"], [], "plain"),
        (["sm_121a"], [], "native"),
        (["sm_120", "sm_120f", "sm_121f"], ["sm_80"], "native"),
        (["sm_120f", "sm_121"], [], "plain"),
        (["sm_120a"], ["sm_120"], "jit"),
        (["sm_80", "sm_90a"], ["sm_80", "sm_90"], "jit"),
        (["sm_80"], ["sm_90a", "sm_120a", "sm_100f"], "nothing"),
        (["garbage", "sm_"], ["sm_x"], "nothing"),
        *(([target], [], "nothing") for target in ("sm_120a", "sm_122", "sm_122f", "sm_110f", "sm_80")),
        *(([], [target], "jit") for target in ("sm_75", "sm_110", "sm_120", "sm_120f", "sm_121", "sm_121a", "sm_121f")),
        *(([], [target], "nothing") for target in ("sm_90f", "sm_100a", "sm_122", "sm_122f")),
    ],
)
def test_a_spark_gets_the_nearest_code_by_nvidias_rules(
    cubins: list[str], ptx: list[str], expected: str
) -> None:
    """Machine code of its generation and not newer, ``a`` for 12.1 alone, before PTX that is not newer (docs/explanation/gates.md)."""
    assert gpu_target.support_level(cubins, ptx, (12, 1)) == expected


# Disassembly.


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
    if text:
        processes.script(tmp_path / "nvdisasm", text)
    with refusal(reference, match=message):
        device_code.opcodes(b"", scratch=tmp_path, programs=tmp_path, deadline=time.monotonic() + 0.5)


# G0: every rule stands in a check, findings fail it, and what was not asked is never a pass.

SOUND = AuditReport(
    AuditedWheel("probe-1-py3-none-any.whl", "0" * 64, 10, "probe", "1", ()),
    "sm_121f",
    "0" * 64,
    (
        AuditedLibrary(
            "probe/_C.so", "0" * 64, 10, "target", cubins={"sm_80": 1, "sm_121f": 3}, ptx={"sm_80": 1}, opcodes={"OMMA": 4}
        ),
    ),
    (),
    "",
)


def test_a_sound_report_passes_with_its_figures_unless_it_was_judged_as_any_wheel() -> None:
    found = {check.name: check for check in audited.run(SOUND)}
    assert {(check.state, check.figures[0].value) for check in found.values()} == {("pass", 0)}
    (bad,) = [check for check in audited.run(replace(SOUND, judged="any")) if check.state != "pass"]
    assert (bad.name, bad.state, bad.reason, bad.required) == ("policy", "not-run", "not-ours", True)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_finding_of_any_rule_fails_the_gate(rule: str) -> None:
    """In exactly one check, with the rule as its reference, and the place as a sample."""
    report = replace(SOUND, findings=(AuditFinding("probe/_C.so", rule, "it is so"),))
    (bad,) = [check for check in audited.run(report) if check.state != "pass"]
    assert (bad.state, bad.reason, bad.required, rule in audited.REASONS) == ("fail", rule, True, True)
    assert (bad.samples[0].case, bad.samples[0].actual) == ("probe/_C.so", "it is so")
