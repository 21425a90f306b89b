"""The audit on real wheels, with libraries compiled for the test; no tool is replaced."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import platform
import re
import struct
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import publishing, wheels

from sparkwright.audit import device_code, host
from sparkwright.audit import policy as audit_policy
from sparkwright.audit import report as reports_of
from sparkwright.audit import wheel as auditing
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import RULES, AuditReport, raise_for_findings, show
from sparkwright.audit.sass import CudaTools
from sparkwright.builder.arch.plan import PlannedUnit
from sparkwright.builder.compile import unit_manifest
from sparkwright.builder.compile.unit_manifest import CompiledUnit
from sparkwright.builder.environment import toolchain
from sparkwright.core import process, strict_yaml
from sparkwright.forks.stack import Project
from sparkwright.release.signing import keys

if TYPE_CHECKING:
    from tests.unit.conftest import Cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ci" / "audit"
NOWHERE = CudaTools(Path("/nonexistent"))
HOST = f"linux_{platform.machine()}"
LIBRARY = "probe/_C.abi3.so"

POLICY: dict[str, Any] = {
    "arch": "12.1f",
    "needed": ["lib[cm].so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-*"],
    "distributions": {"probe": {"reason": "A test.", "libraries": [{"glob": LIBRARY, "role": "target"}]}},
}
#: The audit without others' tools, which tests/unit/test_audit_checkers.py has.
audit = functools.partial(auditing.audit, which=())
HOST_ONLY = {"glob": LIBRARY, "role": "base", "reason": "Host code."}
COMMON = {name: value for name, value in POLICY.items() if name != "arch"}
LISTED = POLICY["distributions"]["probe"]["libraries"]

#: Members of official wheels, with what they are in 0.33.0 and in 0.20.1.
MEMBERS = {
    "vllm/_C_stable_libtorch.abi3.so": ["target", "target"],
    "vllm/_C.abi3.so": [None, "target"],
    "vllm/_moe_C.abi3.so": [None, "target"],
    "vllm/_moe_C_stable_libtorch.abi3.so": ["target", None],
    "vllm/_flashmla_C.abi3.so": ["base", "base"],
    "vllm/cumem_allocator.abi3.so": ["base", "base"],
    "vllm/third_party/deep_gemm/_C.cpython-312-aarch64-linux-gnu.so": [None, "base"],
    "vllm/vllm-rs": ["base", None],
    "vllm/new.so": [None, None],
}

SOURCE = """
#include <cstdint>
__global__ void plain(float* data) { data[threadIdx.x] *= 2.f; }
#ifdef FP4
__global__ void quantise(uint8_t* out, const float* in) {
  uint16_t packed;
  asm("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %1, %2; cvt.u16.u8 %0, t; }" : "=h"(packed) : "f"(in[0]), "f"(in[1]));
  out[0] = packed;
}
#else
__global__ void quantise(uint8_t*, const float*) { asm("trap;"); }
#endif
"""


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def write_wheel(
    folder: Path,
    files: Mapping[str, bytes],
    *,
    tag: str = HOST,
    edit: Callable[[str], str] = str,
    late: Mapping[str, bytes] = {},
    said: str = "probe",
) -> Path:
    """
    Write a wheel of the distribution ``probe``.

    Args:
        edit: Changes RECORD's text.
        late: Members that RECORD does not learn of, which replace those of the same name.
        said: The name in METADATA.
    """
    whole = {**files, "probe-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {said}\nVersion: 1\n".encode()}
    record = "".join(_record_line(name, data) for name, data in whole.items()) + "probe-1.dist-info/RECORD,,\n"
    path = folder / f"probe-1-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**whole, **late, "probe-1.dist-info/RECORD": edit(record).encode()}.items():
            archive.writestr(name, data)
    return path


def policy(library: Mapping[str, Any] | None = None, **top: Any) -> AuditPolicy:
    """Return `POLICY` with fields of its one library (or of the whole file) replaced."""
    data = msgspec.convert({**POLICY, **top}, dict[str, Any])
    if library is not None:
        base = {} if library.get("role") == "base" else POLICY["distributions"]["probe"]["libraries"][0]
        data["distributions"] = {"probe": {"reason": "A test.", "libraries": [{**base, **library}]}}
    return msgspec.convert(data, AuditPolicy)


def rules(report: AuditReport) -> list[str]:
    assert all(finding.rule in RULES for finding in report.findings)
    return [finding.rule for finding in report.findings]


# The policy file.


def test_the_reviewed_policies_are_valid_and_name_the_libraries_of_the_official_wheels() -> None:
    """Each stack's policy holds what its vLLM has, the other's does not, and what both have stands in the common file alone."""
    new, old = (audit_policy.load(FOLDER / f"{stack}.yaml", "12.1f") for stack in ("2026.11", "2026.05"))
    roles = {name: [one.role if one else None for one in (new.library("vllm", name), old.library("vllm", name))] for name in MEMBERS}

    assert roles == MEMBERS
    assert (old.target, old.generation) == ("sm_121f", "sm_12")
    assert new.library("flashinfer-python", "flashinfer/any.so") is None
    assert audit_policy.load(FOLDER / "2026.11.yaml", "12.0f").target == "sm_120f"


@pytest.mark.parametrize("stack", sorted(path.parent.name for path in (ROOT / "forks").glob("*/stack.yaml")))
def test_every_stack_asks_for_what_its_build_compiles(stack: str) -> None:
    """The libraries of role target are those of the build's targets."""
    project = Project(ROOT, stack)
    vllm = audit_policy.load(project.audit_file, project.spec.arch).distributions["vllm"]
    asked = {library.glob for library in vllm.libraries if library.role == "target"}

    assert {Path(glob).name.partition(".")[0] for glob in asked} == set(toolchain.spec(project).forks["vllm"].core_targets)


def write_policy(folder: Path, common: Mapping[str, Any], own: Mapping[str, Any]) -> Path:
    """Write the common policy and that of the stack ``test``, and return the path of the latter."""
    (folder / "audit").mkdir()
    (folder / "audit.yaml").write_text(strict_yaml.dump(common))
    (folder / "audit" / "test.yaml").write_text(strict_yaml.dump(own))
    return folder / "audit" / "test.yaml"


@pytest.mark.parametrize(
    ("common", "own", "arch", "place"),
    [
        ({}, {"libraries": {"probe": [HOST_ONLY]}}, "12.1f", f"{LIBRARY} is listed 2 times"),
        ({}, {"libraries": {"prob": [HOST_ONLY]}}, "12.1f", "no distribution prob"),
        ({}, {"libraries": {"probe": [{**HOST_ONLY, "glob": "*"}] * 2}}, "12.1f", "* is listed 2 times"),
        ({}, {}, "121f", "is not an architecture"),
        ({"arch": "12.1f"}, {}, "12.1f", "unknown field `arch`"),
        ({}, {"arch": "12.1f"}, "12.1f", "unknown field `arch`"),
        ({}, {"needed": []}, "12.1f", "unknown field `needed`"),
        ({"distributions": {"probe": {"reason": "x", "libraries": LISTED * 2}}}, {}, "12.1f", "is listed 2 times"),
    ],
)
def test_two_files_do_not_state_the_same_fact(tmp_path: Path, common: dict[str, Any], own: dict[str, Any], arch: str, place: str) -> None:
    """A library that both list, one of a distribution that nobody described, or an arch beside that of stack.yaml is an error."""
    path = write_policy(tmp_path, {**COMMON, **common}, own)
    with refusal("file-invalid") as caught:
        audit_policy.load(path, arch)
    assert place in caught.value.details[0]


@pytest.mark.parametrize(
    ("library", "place"),
    [
        ({"role": "base", "glob": "*"}, "without a reason"),
        ({"role": "target", "glob": "*", "opcodes": [{"pattern": "(", "least": 1}]}, "regular expression"),
        ({"role": "target", "glob": "*", "ptx": [{"arch": "sm_80", "most": 1, "reason": " "}]}, "without a reason"),
        ({"role": "target", "glob": "*", "opcode": []}, "unknown field"),
        ({"role": "base", "glob": "*", "reason": "x", "opcodes": [{"pattern": "x", "least": 1}]}, "only reported"),
        ({"role": "kept", "glob": "*"}, "Invalid enum value"),
    ],
)
def test_a_policy_with_a_gap_is_refused(tmp_path: Path, library: dict[str, Any], place: str) -> None:
    own = write_policy(tmp_path, {**COMMON, "distributions": {"probe": {"reason": "x"}}}, {"libraries": {"probe": [library]}})
    with refusal("file-invalid") as caught:
        audit_policy.load(own, "12.1f")
    assert place in caught.value.details[0]


# What cubins and disassembly say.


# The archive.


@pytest.mark.parametrize(("name", "said"), [("probe.zip", "probe"), ("probe-2-py3-none-any.whl", "probe"), ("", "other")])
def test_a_wheel_of_another_name_is_refused(tmp_path: Path, name: str, said: str) -> None:
    wheel = write_wheel(tmp_path, {}, said=said)
    with refusal("wheel-invalid"):
        audit(wheel.rename(wheel.with_name(name or wheel.name)), policy(), NOWHERE)


def test_record_is_checked_against_the_bytes(tmp_path: Path) -> None:
    wheel = write_wheel(
        tmp_path, {"probe/a.py": b"1", "probe/b.py": b"2", "probe/c.py": b"3"},
        late={"probe/a.py": b"9", "probe/new.py": b""},
        edit=lambda text: text.replace("probe/c.py", "probe/gone.py") + "probe/b.py,md5=x,1\n",
    )  # fmt: skip
    report = audit(wheel, policy(distributions={}), NOWHERE)
    assert [(finding.library, finding.rule) for finding in report.findings] == [
        ("probe/a.py", "record-mismatch"),
        ("probe/b.py", "record-mismatch"),
        ("probe/c.py", "record-missing"),
        ("probe/gone.py", "record-surplus"),
        ("probe/new.py", "record-missing"),
    ]
    with refusal("audit-failed") as caught:
        raise_for_findings(report)
    assert len(caught.value.details) == 5


# Host code.


@pytest.fixture(scope="module")
def plain_library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A host library that wants libm and looks in /opt/lib."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "a.c").write_text("#include <math.h>\ndouble half(double x) { return pow(x, 0.5); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,--no-as-needed,-rpath,/opt/lib", "a.c", "-lm", "-o", "a.so"], cwd=folder, check=True)
    return (folder / "a.so").read_bytes()


@pytest.mark.parametrize(
    ("changes", "tag", "expected"),
    [
        ({}, HOST, ["rpath-present"]),
        ({"rpath": ["/opt/lib"], "size_max": 100}, HOST, ["size-over"]),
        ({"rpath": ["/opt/lib"]}, "linux_riscv64", ["machine-foreign"]),
        ({"rpath": ["/opt/lib"]}, "any", ["machine-foreign"]),
        ({"rpath": ["/opt/lib"]}, f"manylinux_2_1_{platform.machine()}", ["glibc-newer"]),
    ],
)
def test_host_code_outside_its_policy_is_found(
    tmp_path: Path, plain_library: bytes, changes: dict[str, Any], tag: str, expected: list[str]
) -> None:
    assert rules(audit(write_wheel(tmp_path, {LIBRARY: plain_library}, tag=tag), policy({**HOST_ONLY, **changes}), NOWHERE)) == expected


@pytest.mark.parametrize(
    ("calls", "link", "expected"),
    [
        ("int cuInit(unsigned); int f(void) { return cuInit(0); }", [], ["driver-unnamed"]),
        ("int cuInit(unsigned); int f(void) { return cuInit(0); }", ["libcuda.so"], []),
        ("int cuInit(unsigned) __attribute__((weak)); int f(void) { return cuInit ? cuInit(0) : 0; }", [], []),
        ("int cuFileDriverOpen(void); int custom(void); int f(void) { return cuFileDriverOpen() + custom(); }", [], []),
    ],
    ids=["called", "named", "weak", "other-names"],
)
def test_who_calls_the_driver_has_to_name_it(tmp_path: Path, calls: str, link: list[str], expected: list[str]) -> None:
    """Without its name among the needs nobody loads the driver first, and the library cannot be loaded at all."""
    (tmp_path / "driver.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    (tmp_path / "a.c").write_text(calls)
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "driver.c", "-o", "libcuda.so"], cwd=tmp_path, check=True)
    subprocess.run(["cc", "-shared", "-fPIC", "a.c", *link, "-o", "a.so"], cwd=tmp_path, check=True)
    wheel = write_wheel(tmp_path, {LIBRARY: (tmp_path / "a.so").read_bytes()})

    assert rules(audit(wheel, policy(HOST_ONLY, needed=["libc.so.6", "libcuda.so.1"]), NOWHERE)) == expected


OPERATORS = """
#include <string.h>
const char *volatile sink;
void def(const char *schema) { sink = schema; }
void impl(const char *name, void (*function)(void)) { sink = name; }
void kernel(void) {}
void PyInit__C(void) {
  def("scaled_mm(Tensor a, Tensor b) -> Tensor");
  def("fp4_mm(Tensor! out, Tensor a) -> ()");
  def("scaled_mm.out(Tensor a, Tensor b, *, Tensor! out) -> ()");
  impl("scaled_mm", kernel);
#ifdef FP4
  impl("fp4_mm", kernel);
#endif
}
"""


@pytest.mark.parametrize(
    ("asked", "flags", "expected"),
    [
        ({"operators": ["scaled_mm"], "symbols": ["PyInit__C"]}, [], []),
        ({"operators": ["scaled_mm", "fp4_mm"]}, ["-DFP4"], []),
        ({"operators": ["fp4_mm"]}, [], ["fp4_mm: declared, not implemented"]),
        ({"operators": ["marlin_gemm"]}, [], ["marlin_gemm: neither declared nor implemented"]),
        ({"symbols": ["PyInit__C", "PyInit__D"]}, [], ["it does not define PyInit__D"]),
        ({"symbols": ["PyInit__C"]}, ["-fvisibility=hidden"], ["it does not define PyInit__C"]),
    ],
)
def test_required_symbols_and_operators_are_looked_for_in_the_bytes(
    tmp_path: Path, asked: dict[str, Any], flags: list[str], expected: list[str]
) -> None:
    """An operator counts when its schema and its implementation's name are there: one that is only declared does not work."""
    (tmp_path / "a.c").write_text(OPERATORS)
    process.output(["cc", "-O2", "-shared", "-fPIC", *flags, tmp_path / "a.c", "-o", tmp_path / "a.so"])
    report = audit(write_wheel(tmp_path, {LIBRARY: (tmp_path / "a.so").read_bytes()}), policy({**HOST_ONLY, **asked}), NOWHERE)
    assert [finding.message for finding in report.findings] == expected
    assert {"operator-missing", "symbol-missing"} >= set(rules(report))
    assert report.libraries[0].declared == (("scaled_mm.out",) if "-DFP4" in flags else ("fp4_mm", "scaled_mm.out"))


# Device code.


class Compiler:
    """Compiles `SOURCE` for any arch, each form once."""

    def __init__(self, cuda_bin: Path, folder: Path) -> None:
        self.nvcc, self.folder = cuda_bin / "nvcc", folder
        self.tools = CudaTools(cuda_bin)

    def library(self, *codes: str, fp4: bool = True, options: tuple[str, ...] = ()) -> bytes:
        """Return a shared library with code for each of *codes*: ``sm_121f``, or ``compute_121f`` for PTX."""
        path = self.folder / f"{'-'.join([*codes, *options])}-{fp4}.so"
        if not path.exists():
            source, target = self.folder / "probe.cu", path.with_suffix(".o")
            source.write_text(SOURCE)
            arches = [f"-gencode=arch=compute_{code.partition('_')[2]},code={code}" for code in codes]
            process.output([self.nvcc, "-c", "-Xcompiler", "-fPIC", *arches, *options, *(["-DFP4"] if fp4 else []), source, "-o", target])
            process.output(["c++", "-shared", target, "-o", path])
        return path.read_bytes()


@pytest.fixture(scope="module")
def compiler(cuda_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(cuda_bin, tmp_path_factory.mktemp("cuda"))


FP4 = {"pattern": r"F2FP\..*E2M1", "least": 1, "kernels": "quantise"}
NO_TRAP = {"kernels": "quantise", "reason": "The quantiser must work."}


@pytest.mark.toolchain
def test_the_right_target_passes(tmp_path: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = write_wheel(tmp_path, {LIBRARY: compiler.library("sm_121f")})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    report = audit(wheel, policy({"opcodes": [FP4], "trap_free": [NO_TRAP]}), compiler.tools, scratch=scratch)
    assert rules(report) == []
    library = report.libraries[0]
    assert (library.cubins, library.ptx, library.traps) == ({"sm_121f": 1}, {}, 0)
    assert [(count.found, count.kernels, count.arch) for count in library.opcodes] == [(1, 1, "sm_121f")]
    assert list(scratch.iterdir()) == []
    show(report, result=True)
    assert "121f×1" in capsys.readouterr().out
    assert msgspec.json.decode(msgspec.json.encode(report), type=AuditReport) == report


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("codes", "fp4", "expected"),
    [
        # cuobjdump lists sm_121 here as it does for 121f: only the note tells.
        (["sm_121"], False, {"arch-folded": "cubins for sm_121: 1,", "arch-missing": "sm_121f: 0"}),
        (["sm_121a"], True, {"arch-folded": "cubins for sm_121a: 1,", "arch-missing": "sm_121f: 0"}),
        (["sm_120f"], True, {"arch-folded": "cubins for sm_120f: 1,", "arch-missing": "sm_121f: 0"}),
        (["sm_90"], False, {"arch-foreign": "cubins for sm_90: 1,", "arch-missing": "sm_121f: 0"}),
        (["compute_121f"], True, {"ptx-foreign": "PTX files for sm_121f: 1,", "arch-missing": "sm_121f: 0"}),
        (["sm_121f", "sm_80"], False, {"arch-foreign": "cubins for sm_80: 1,"}),
        (["sm_121f", "compute_80"], False, {"ptx-foreign": "PTX files for sm_80: 1,"}),
    ],
)
def test_another_target_is_found(tmp_path: Path, compiler: Compiler, codes: list[str], fp4: bool, expected: dict[str, str]) -> None:
    report = audit(write_wheel(tmp_path, {LIBRARY: compiler.library(*codes, fp4=fp4)}), policy({}), compiler.tools)
    assert rules(report) == sorted(expected)
    for finding in report.findings:
        assert expected[finding.rule] in finding.message


# The unit manifest.


class Units:
    """Compiles two translation units and links them; each source may be compiled for an arch of its own."""

    SOURCES = ("__global__ void one(float* x) { x[0] += 1.f; }\n", "__global__ void two(float* x) { asm(\"trap;\"); }\n")

    def __init__(self, compiler: Compiler, folder: Path, codes: tuple[str, str]) -> None:
        self.folder = folder
        for name, text, code in zip("ab", self.SOURCES, codes, strict=True):
            (folder / f"{name}.cu").write_text(text)
            arch = f"-gencode=arch=compute_{code.partition('_')[2]},code={code}"
            process.output(
                [compiler.nvcc, "-c", "-Xcompiler", "-fPIC", arch, folder / f"{name}.cu", "-o", folder / f"{name}.o"]
            )
        process.output(["c++", "-shared", folder / "b.o", folder / "a.o", "-o", folder / "c.so"])
        gencode = ("compute_121f:sm_121f",)
        planned = [PlannedUnit("_C", f"csrc/{name}.cu", gencode, "native", object=f"{name}.o") for name in "ab"]
        self.manifest = unit_manifest.record(folder, planned, {"_C": LIBRARY})

    def audit(self, tools: CudaTools, units: tuple[CompiledUnit, ...], library: Path | None = None, **fields: Any) -> AuditReport:
        record = msgspec.json.encode({"units": units})
        files = {LIBRARY: (library or self.folder / "c.so").read_bytes(), "probe-1.dist-info/sparkwright.json": record}
        return audit(write_wheel(self.folder, files), policy(fields), tools)


@pytest.mark.toolchain
def test_units_are_found_in_their_library(tmp_path: Path, compiler: Compiler) -> None:
    """The cubins of the objects are those of the library, so that a trap leads to its source file."""
    built = Units(compiler, tmp_path, ("sm_121f", "sm_121f"))
    assert [(unit.name, [arch for arch, _ in unit.code]) for unit in built.manifest] == [
        ("csrc/a.cu (target _C)", ["sm_121f"]),
        ("csrc/b.cu (target _C)", ["sm_121f"]),
    ]
    assert built.audit(compiler.tools, built.manifest).passed
    report = built.audit(compiler.tools, built.manifest, trap_free=[{"kernels": "two", "reason": "It must work."}])
    assert [(finding.rule, finding.units) for finding in report.findings] == [("trap-present", ("csrc/b.cu (target _C)",))]
    assert "csrc/b.cu (target _C)" in report.findings[0].subject


@pytest.mark.toolchain
def test_a_unit_for_another_target_is_named(tmp_path: Path, compiler: Compiler) -> None:
    """Compiled for another arch than the plan has, it is folded and its own target is missing; both findings name it."""
    built = Units(compiler, tmp_path, ("sm_121f", "sm_120f"))
    report = built.audit(compiler.tools, built.manifest)
    assert [(finding.rule, finding.units) for finding in report.findings] == [
        ("arch-folded", ("csrc/b.cu (target _C)",)),
        ("arch-missing", ("csrc/b.cu (target _C)",)),
    ]


@pytest.mark.toolchain
def test_a_library_of_other_objects_is_found(tmp_path: Path, compiler: Compiler) -> None:
    """A unit that was not linked, and code that no unit made."""
    built = Units(compiler, tmp_path, ("sm_121f", "sm_121f"))
    report = built.audit(compiler.tools, built.manifest[:1])
    assert [(finding.rule, finding.message) for finding in report.findings] == [("code-foreign", "1 of 2, for sm_121f")]
    process.output(["c++", "-shared", tmp_path / "a.o", "-o", tmp_path / "less.so"])
    report = built.audit(compiler.tools, built.manifest, tmp_path / "less.so")
    assert [(finding.rule, finding.units) for finding in report.findings] == [("arch-missing", ("csrc/b.cu (target _C)",))]


@pytest.mark.parametrize("data", [None, b"", b"no object"])
def test_a_unit_without_an_object_is_refused(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "a.o").write_bytes(data)
    with refusal("compile-failed", match=r"a\.o"):
        unit_manifest.record(tmp_path, [PlannedUnit("_C", "a.cu", (), "native", object="a.o")], {"_C": LIBRARY})


def test_a_build_record_that_is_none_is_refused(tmp_path: Path) -> None:
    with refusal("wheel-invalid"):
        audit(write_wheel(tmp_path, {"probe-1.dist-info/sparkwright.json": b'{"units": 3}'}), policy(), NOWHERE)


# Wheels that were not built here.


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("codes", "fp4", "expected", "says"),
    [
        (["sm_120f"], True, [], "1 family"),
        (["sm_121a"], True, [], "1 native"),
        (["sm_120"], False, ["opcode-missing", "trap-present"], "1 plain"),
        (["sm_120a"], True, ["code-missing", "kernel-missing", "opcode-missing"], "nothing for this GPU"),
        (["compute_120f"], True, ["code-missing", "kernel-missing", "opcode-missing"], "1 jit"),
    ],
)
def test_a_wheel_of_others_is_judged_by_what_a_spark_gets(
    tmp_path: Path, compiler: Compiler, codes: list[str], fp4: bool, expected: list[str], says: str
) -> None:
    """Not for the target that it was not made for, but for kernels that a Spark needs and that would not work there."""
    wheel = write_wheel(tmp_path, {LIBRARY: compiler.library(*codes, fp4=fp4), "probe/other.so": compiler.library("sm_90", fp4=False)})
    report = audit(wheel, policy({"opcodes": [FP4], "trap_free": [NO_TRAP]}), compiler.tools, judged="any")
    assert rules(report) == expected
    assert [library.spark.says for library in report.libraries] == [says, "nothing for this GPU"]
    assert report.judged == "any"


# What was damaged or is no file, by the verbs that read wheels.


