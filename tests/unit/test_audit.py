"""The audit on real wheels: archives, host code, and device code in the form that nvcc writes."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import zstandard
from tests.refusals import refusal
from tests.support import fatbins
from tests.support.fatbins import cubin, ptx

from sparkwright.audit import policy as audit_policy
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import RULES, AuditReport, raise_for_findings, show
from sparkwright.audit.wheel import audit
from sparkwright.builder import toolchain
from sparkwright.builder.arch.plan import PlannedUnit
from sparkwright.builder.wheel import archive, elf, graft
from sparkwright.builder.wheel.archive import CompiledUnit, WheelName
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_bytes
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[2]
NOWHERE = Path("/nonexistent")
HOST = f"linux_{platform.machine()}"
LIBRARY = "probe/_C.abi3.so"

POLICY: dict[str, Any] = {
    "arch": "12.1f",
    "needed": ["lib[cm].so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-*"],
    "distributions": {
        "probe": {"reason": "A test.", "libraries": [{"glob": LIBRARY, "role": "target"}]}
    },
}
HOST_ONLY = {"glob": LIBRARY, "role": "base", "reason": "Host code."}
COMMON = {name: value for name, value in POLICY.items() if name != "arch"}


def write_wheel(
    folder: Path,
    files: Mapping[str, bytes],
    *,
    tag: str = HOST,
    name: str = "probe",
    more: str = "",
) -> Path:
    """Write a wheel of the distribution ``probe``, with *name* and *more* in its METADATA."""
    path = folder / f"probe-1-py3-none-{tag}.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{more}"
    archive.write(path.parent, WheelName.of(path.name), files, metadata, pure=False)
    return path


def policy(library: Mapping[str, Any] | None = None, **top: Any) -> AuditPolicy:
    """Return `POLICY` with fields of its one library (or of the whole file) replaced."""
    data = msgspec.convert({**POLICY, **top}, dict[str, Any])
    if library is not None:
        base = {} if library.get("role") == "base" else {"glob": LIBRARY, "role": "target"}
        libraries = [{**base, **library}]
        data["distributions"] = {"probe": {"reason": "A test.", "libraries": libraries}}
    return msgspec.convert(data, AuditPolicy)


def rules(report: AuditReport) -> list[str]:
    """Return the rules of the report's findings."""
    assert all(finding.rule in RULES for finding in report.findings)
    return [finding.rule for finding in report.findings]


# The policy file.


@pytest.mark.parametrize(
    "stack", sorted(path.parent.name for path in (ROOT / "forks").glob("*/stack.yaml"))
)
def test_every_stack_asks_for_what_its_build_compiles(stack: str) -> None:
    """The libraries of role target are those of the build's targets."""
    project = Project(ROOT, stack)
    vllm = audit_policy.load(project.audit_file, project.spec.arch).distributions["vllm"]
    globs = {library.glob for library in vllm.libraries if library.role == "target"}
    targets = toolchain.spec(project).forks["vllm"].core_targets

    assert {Path(glob).name.partition(".")[0] for glob in globs} == set(targets)


TARGET = {"role": "target", "glob": "*"}


@pytest.mark.parametrize(
    ("common", "own", "arch", "message"),
    [
        ({}, {"libraries": {"probe": [HOST_ONLY]}}, "12.1f", f"{LIBRARY} is listed several times"),
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
                ({**TARGET, "arch": "12.0f"}, "an arch of its own"),
            )
        ),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(
    tmp_path: Path, common: dict[str, Any], own: dict[str, Any], arch: str, message: str
) -> None:
    """No fact stands in two files, and nothing is allowed without a reason."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit.yaml").write_text(strict_yaml.dump({**COMMON, **common}))
    (tmp_path / "audit" / "test.yaml").write_text(strict_yaml.dump(own))
    with refusal("file-invalid") as caught:
        audit_policy.load(tmp_path / "audit" / "test.yaml", arch)

    assert message in caught.value.details[0]


# The archive.


def _share(data: bytearray) -> None:
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]


@pytest.mark.parametrize(
    ("change", "message"),
    [(_share, "overlap"), (lambda data: data.extend(b"PK\x01\x02" * 200_001), "more than 100000 members")],
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
    """Links, names that leave the folder, bombs, and a build record that is none."""
    wheel = write_wheel(tmp_path, {})
    info = zipfile.ZipInfo("probe/new")
    info.filename = name
    for field, value in fields.items():
        setattr(info, field, value)
    with zipfile.ZipFile(wheel, "a") as opened:
        opened.writestr(info, data)
    with refusal(reference):
        audit(wheel, policy(), NOWHERE)


def _renamed(path: Path, name: str) -> Path:
    return path.rename(path.with_name(name))


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: _renamed(write_wheel(folder, {}), "probe.zip"),
        lambda folder: _renamed(write_wheel(folder, {}), "probe-2-py3-none-any.whl"),
        lambda folder: write_wheel(folder, {}, name="other"),
        lambda folder: folder / "probe-1-py3-none-any.whl",
        lambda folder: folder.joinpath("probe-1-py3-none-any.whl").mkdir(),
        lambda folder: os.mkfifo(folder / "probe-1-py3-none-any.whl"),
    ],
    ids=["no-wheel-name", "other-version", "other-name", "missing", "folder", "pipe"],
)
def test_what_is_no_wheel_of_its_name_is_refused(
    tmp_path: Path, make: Callable[[Path], Path | None]
) -> None:
    """It is neither read nor waited for."""
    path = make(tmp_path) or tmp_path / "probe-1-py3-none-any.whl"
    with refusal("wheel-invalid"):
        audit(path, policy(), NOWHERE)


def test_record_is_checked_against_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each difference between RECORD and the members is a finding, in the error and the table."""
    good = write_wheel(tmp_path, {f"probe/{name}.py": name.encode() for name in "abc"}, tag="any")
    assert audit(good, policy(distributions={}), NOWHERE).passed
    wheel = tmp_path / "changed" / good.name
    wheel.parent.mkdir()
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(wheel, "w") as target:
        for name in source.namelist():
            data = b"9" if name == "probe/a.py" else source.read(name)
            target.writestr(name, data.replace(b"probe/c.py", b"probe/gone.py"))
    report = audit(wheel, policy(distributions={}), NOWHERE)

    assert rules(report) == ["record-mismatch", "record-missing", "record-surplus"]
    with refusal("audit-failed"):
        raise_for_findings(report)
    show(report, result=True)
    assert "record-surplus" in capsys.readouterr().out


# Host code.

#: Registers scaled_mm and, with -DFP4, fp4_mm; calls the driver as -DDRIVER states.
HOST_CODE = """
#include <math.h>
#ifndef DRIVER
#define DRIVER
#endif
const char *volatile sink;
void def(const char *schema) { sink = schema; }
void impl(const char *name) { sink = name; }
int cuInit(unsigned);
int cuWeak(unsigned) __attribute__((weak));
int cuFileDriverOpen(void);
double PyInit__C(double x) {
  def("scaled_mm(Tensor a, Tensor b) -> Tensor");
  def("fp4_mm(Tensor! out, Tensor a) -> ()");
  impl("scaled_mm");
  impl("marlin");
#ifdef FP4
  impl("fp4_mm");
#endif
  DRIVER;
  return pow(x, 0.5);
}
"""
CALL = "-DDRIVER=cuInit(0)"


@pytest.mark.parametrize(
    ("options", "wants", "tag", "expected"),
    [
        ([], {}, HOST, {}),
        (["-Wl,-rpath,/opt/lib"], {}, HOST, {"rpath-present": "/opt/lib"}),
        ([], {"glob": "probe/x.so"}, HOST, {"library-unknown": "no policy for probe"}),
        ([], {}, "linux_riscv64", {"machine-foreign": "the wheel for linux_riscv64"}),
        (["-Wl,--no-as-needed", "libcuda.so"], {}, HOST, {"needed-foreign": "it wants libcuda"}),
        ([CALL], {}, HOST, {"driver-unnamed": "cuInit (1 functions)"}),
        ([CALL, "libcuda.so"], {"needed": ["libcuda.so.1"]}, HOST, {}),
        (["-DDRIVER=cuWeak(0)"], {}, HOST, {}),
        (["-DDRIVER=cuFileDriverOpen()"], {}, HOST, {}),
        (["-Wl,-soname,libcuda.so.1"], {}, HOST, {"vendored-driver": "libcuda.so.1"}),
        ([], {"operators": ["scaled_mm"], "symbols": ["PyInit__C"]}, HOST, {}),
        (["-DFP4"], {"operators": ["scaled_mm", "fp4_mm"]}, HOST, {}),
        ([], {"operators": ["fp4_mm"]}, HOST, {"operator-missing": "declared, not implemented"}),
        ([], {"operators": ["marlin"]}, HOST, {"operator-missing": "not declared"}),
        (
            ["-fvisibility=hidden"],
            {"symbols": ["PyInit__C"]},
            HOST,
            {"symbol-missing": "does not define PyInit__C"},
        ),
    ],
)
def test_host_code_outside_its_policy_is_found(
    tmp_path: Path, options: list[str], wants: dict[str, Any], tag: str, expected: dict[str, str]
) -> None:
    """Search paths, sizes, machines, needs, the driver, symbols and operators."""
    (tmp_path / "driver.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    (tmp_path / "a.c").write_text(HOST_CODE)
    for words in (
        ["-Wl,-soname,libcuda.so.1", "driver.c", "-o", "libcuda.so"],
        ["-O2", "a.c", "-lm", *options, "-o", "a.so"],
    ):
        subprocess.run(["cc", "-shared", "-fPIC", *words], cwd=tmp_path, check=True)
    wheel = write_wheel(tmp_path, {LIBRARY: (tmp_path / "a.so").read_bytes()}, tag=tag)
    report = audit(wheel, policy({**HOST_ONLY, **wants}), NOWHERE)

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


PROMISING = """
#include <math.h>
void *PyUnicode_AsUTF8AndSize(void *, long *);
void *_PyLong_New(long);
int torch_get_const_data_ptr(void *, void **);
int _ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(void *, void *, void *);
int _ZN5torch6stable5probeEv(void);
double PyInit__C(double x) { CALL; return exp(x); }
"""
UNSTABLE = "_ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE(0, 0, 0)"
STABLE = "torch_get_const_data_ptr(0, 0); _ZN5torch6stable5probeEv()"
STABLE_ABI = {"torch": "stable"}
PYTHON_3_10 = "PyUnicode_AsUTF8AndSize(0, 0)"
#: Python has no number of so many digits.
ENDLESS = f">={'9' * 5000}.{'9' * 5000}"
OLD_TAG, NEW_TAG = (f"manylinux_2_{minor}_{platform.machine()}" for minor in (5, 41))


@pytest.mark.parametrize(
    ("call", "metadata", "tag", "wants", "expected"),
    [
        ("", "", NEW_TAG, STABLE_ABI, []),
        ("", "", OLD_TAG, {}, ["tag-newer"]),
        ("_PyLong_New(1)", "", HOST, {}, ["abi3-violated"]),
        (PYTHON_3_10, "Requires-Python: >=3.8\n", HOST, {}, ["abi3-newer"]),
        (PYTHON_3_10, "Requires-Python: >=3.8\n", HOST, {"python": "3.10"}, []),
        (PYTHON_3_10, "Requires-Python: <3.15,>=3.11\n", HOST, {}, []),
        (STABLE, "Requires-Dist: torch==2.14.0\n", HOST, STABLE_ABI, []),
        (STABLE, "Requires-Dist: torch (==2.8.1)\n", HOST, STABLE_ABI, ["torch-newer"]),
        (STABLE, f"Requires-Dist: tórch{ENDLESS}\n", HOST, STABLE_ABI, []),
        (STABLE, f"Requires-Dist: torch{ENDLESS}\n", HOST, STABLE_ABI, []),
        (PYTHON_3_10, f"Requires-Python: {ENDLESS}\n", HOST, {}, ["abi3-newer"]),
        (UNSTABLE, "", HOST, STABLE_ABI, ["torch-unstable"]),
        (UNSTABLE, "", HOST, {}, []),
    ],
)
def test_promises_of_compatibility_are_compared_with_the_symbols(
    tmp_path: Path, call: str, metadata: str, tag: str, wants: dict[str, str], expected: list[str]
) -> None:
    """The platform tag, the oldest Python and the required torch, against what the library takes from others."""
    (tmp_path / "a.c").write_text(PROMISING.replace("CALL", call))
    words = ["cc", "-shared", "-fPIC", "-fno-builtin", "a.c", "-lm", "-o", "a.so"]
    subprocess.run(words, cwd=tmp_path, check=True)
    files = {LIBRARY: (tmp_path / "a.so").read_bytes()}
    wheel = write_wheel(tmp_path, files, tag=tag, more=metadata)

    assert rules(audit(wheel, policy({**HOST_ONLY, **wants}), NOWHERE)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p/libcuda.so.1", ["vendored-driver"]),
        ("p.libs/libcuda-1a2b3c4d.so.1", ["vendored-driver"]),
        ("p/libtorch_cpu.so", ["vendored-library"]),
        ("p.libs/libnuma-5f1d7e2a.so.1", ["vendored-library"]),
        ("p/libcommon.so", []),
        ("p/libcudata.so", []),
    ],
)
def test_copies_are_found_by_their_names(tmp_path: Path, name: str, expected: list[str]) -> None:
    """Of the driver, and of the libraries of torch, CUDA and the system."""
    wheel = write_wheel(tmp_path, {name: b"x"})

    assert rules(audit(wheel, policy(distributions={}), NOWHERE)) == expected


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
        (["sm_121f", " as sm_121f"], {"arch-unknown": "sm_121f?: 1"}),
    ],
)
def test_code_for_another_target_is_found(
    tmp_path: Path, targets: list[str], expected: dict[str, str]
) -> None:
    """By the note in the cubin, since its name and flags are the same for several targets."""
    units = []
    for text in targets:
        target, _, listed = text.partition(" as ")
        name = target.removeprefix("ptx ")
        units.append([ptx(name) if name != target else cubin(tmp_path, name, listed=listed)])
    wheel = write_wheel(tmp_path, {LIBRARY: fatbins.library(tmp_path, *units)})
    report = audit(wheel, policy({}), NOWHERE)

    assert {finding.rule: finding.message for finding in report.findings}.keys() == expected.keys()
    for finding in report.findings:
        assert expected[finding.rule] in finding.message


def test_unreadable_device_code_is_a_finding_and_the_rest_is_still_reported(tmp_path: Path) -> None:
    """One library that cannot be read does not hide another."""
    good = fatbins.library(tmp_path, [cubin(tmp_path, "sm_121f")])
    bad = good.replace(bytes.fromhex("50ed55ba"), bytes(4))
    wheel = write_wheel(tmp_path, {LIBRARY: bad, "probe/unknown.so": good})
    report = audit(wheel, policy({}), NOWHERE)

    assert rules(report) == ["device-unreadable", "library-unknown"]
    assert report.libraries[1].cubins == {"sm_121f": 1}
    assert msgspec.json.decode(msgspec.json.encode(report), type=AuditReport) == report
    wants = policy({"opcodes": [{"pattern": "x", "least": 1, "kernels": "kernel"}]})
    with refusal("tool-missing", match="nvdisasm"):
        audit(write_wheel(tmp_path, {LIBRARY: good}), wants, NOWHERE)


def test_device_code_that_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    """A small wheel may not keep the audit busy for hours: the bytes that its entries state count together, in all libraries."""
    packed = zstandard.compress(bytes(1000))
    entry = fatbins.entry(packed, flags=0x8000, packed=len(packed), whole=elf.MOST_IMAGE_BYTES)
    (tmp_path / "bomb").write_bytes(fatbins.container(*[entry] * 70))
    (tmp_path / "bomb.s").write_text(
        f'.section .nv_fatbin,"a"\n.align 8\n.incbin "{tmp_path}/bomb"\n'
    )
    words: list[str | Path] = ["cc", "-shared", tmp_path / "bomb.s", "-o", tmp_path / "bomb.so"]
    subprocess.run(words, check=True)
    bomb = (tmp_path / "bomb.so").read_bytes()
    assert rules(audit(write_wheel(tmp_path, {LIBRARY: bomb}), policy({}), NOWHERE)) == [
        "device-unreadable"
    ]
    with refusal("wheel-invalid", match="more device code than any wheel"):
        audit(write_wheel(tmp_path, {LIBRARY: bomb, "probe/two.so": bomb}), policy({}), NOWHERE)


def test_the_device_code_digest_follows_the_code_alone(tmp_path: Path) -> None:
    """Neither Python, host code nor the order of units changes it."""
    one, two = [cubin(tmp_path, "sm_121f")], [cubin(tmp_path, "sm_121f", kernels=("two",))]
    digests = []
    for units, source, python in (
        ([one, two], "", b"1"),
        ([two, one], "int a;", b"2"),
        ([one], "", b"1"),
    ):
        library = fatbins.library(tmp_path, *units, source=source)
        wheel = write_wheel(tmp_path, {LIBRARY: library, "probe/a.py": python})
        digests.append(audit(wheel, policy({}), NOWHERE).device_code)

    assert digests[0] == digests[1] != digests[2]


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
    program = tmp_path / "nvdisasm"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    library = fatbins.library(tmp_path, [cubin(tmp_path, target, kernels=("quantise",))])
    wants = policy({"opcodes": [FP4], "trap_free": [NO_TRAP]})
    report = audit(write_wheel(tmp_path, {LIBRARY: library}), wants, tmp_path, judged=judged)

    assert rules(report) == expected
    assert report.libraries[0].spark == {gain: 1}


# The unit manifest.


def unit(name: str, *images: fatbins.Image) -> CompiledUnit:
    """Return the unit ``csrc/<name>.cu`` of the target ``_C``."""
    code = tuple((listed, sha256_bytes(payload)) for _, listed, payload in images)
    gencode = ("compute_121f:sm_121f",)
    return CompiledUnit(f"csrc/{name}.cu", "_C", f"{name}.o", LIBRARY, gencode, code)


def test_findings_name_the_units_that_they_concern(tmp_path: Path) -> None:
    """By the hashes of their code: units folded, left out or unrecorded."""
    one, two, three = (
        cubin(tmp_path, target, kernels=(target,)) for target in ("sm_121f", "sm_120f", "sm_120a")
    )

    def findings(images: Sequence[fatbins.Image], *units: CompiledUnit) -> list[tuple[str, str]]:
        files = {
            LIBRARY: fatbins.library(tmp_path, *([image] for image in images)),
            "probe-1.dist-info/sparkwright.json": msgspec.json.encode({"units": units}),
        }
        report = audit(write_wheel(tmp_path, files), policy({}), NOWHERE)
        return [(finding.rule, finding.text) for finding in report.findings]

    assert findings([one], unit("a", one)) == []
    assert findings([one, two], unit("a", one), unit("b", two)) == [
        ("arch-folded", "csrc/b.cu (target _C): cubins for sm_120f: 1, allowed: 0"),
        ("arch-missing", "csrc/b.cu (target _C): its object holds no cubin for sm_121f"),
    ]
    assert findings([one], unit("a", one), unit("b", three)) == [
        (
            "arch-missing",
            "csrc/b.cu (target _C): 1 of the 1 pieces of code in its object are not in it",
        )
    ]
    other = cubin(tmp_path, "sm_121f", kernels=("other",))
    assert findings([one, other], unit("a", one)) == [("code-foreign", "1 of 2, for sm_121f")]


@pytest.mark.parametrize(
    ("target", "allowed"),
    [("sm_120f", "also"), ("sm_90", "also"), ("ptx sm_121f", "ptx")],
)
def test_a_unit_without_code_for_its_planned_target_is_found(
    tmp_path: Path, target: str, allowed: str
) -> None:
    """Even if the policy allows the code that it has instead."""
    arch = target.removeprefix("ptx ")
    other = ptx(arch) if arch != target else cubin(tmp_path, arch, kernels=("other",))
    good = cubin(tmp_path, "sm_121f")
    files = {
        LIBRARY: fatbins.library(tmp_path, [good], [other]),
        "probe-1.dist-info/sparkwright.json": msgspec.json.encode(
            {"units": [unit("a", good), unit("b", other)]}
        ),
    }
    rule = policy({allowed: [{"arch": arch, "most": 1, "reason": "A test."}]})
    (finding,) = audit(write_wheel(tmp_path, files), rule, NOWHERE).findings

    assert finding.rule == "arch-missing"
    assert finding.text == "csrc/b.cu (target _C): its object holds no cubin for sm_121f"


def test_the_manifest_holds_the_code_of_each_object(tmp_path: Path) -> None:
    """An object that is missing, or is none, is refused."""
    image = cubin(tmp_path, "sm_121f")
    (tmp_path / "a.o").write_bytes(fatbins.library(tmp_path, [image]))
    (tmp_path / "b.o").write_bytes(b"no object")
    gencode = ("compute_121f:sm_121f",)
    good, *bad = (
        PlannedUnit("_C", f"csrc/{name}.cu", gencode, f"{name}.o", verdict="native")
        for name in "abc"
    )

    assert graft.unit_manifest(tmp_path, [good], {"_C": LIBRARY}) == (unit("a", image),)
    for planned in bad:
        with refusal("compile-failed", match=planned.object):
            graft.unit_manifest(tmp_path, [planned], {"_C": LIBRARY})


def test_the_table_has_the_verdict_of_each_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The column of the gains is named after the stack's target."""
    good, bad = (fatbins.library(tmp_path, [cubin(tmp_path, arch)]) for arch in ("sm_90a", "sm_90"))
    files = {LIBRARY: good, "probe/other.so": bad}
    show(audit(write_wheel(tmp_path, files), policy({}, arch="9.0a"), NOWHERE), result=True)
    _, head, _, *rows = filter(str.strip, capsys.readouterr().out.splitlines())

    assert head.split()[-3:] == ["on", "sm_90a", "verdict"]
    assert [" ".join(row.split()[-3:]) for row in rows[:2]] == ["1 native pass", "plain 1 finding"]
