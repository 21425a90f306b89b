"""G0: wheels that are wrong in one way each, compiled for the test, and the audit that must not pass them."""

from __future__ import annotations

import platform
import random
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import RULES
from sparkwright.audit.wheel import audit
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import process
from sparkwright.gates import wheel_audit as audited
from sparkwright.gates.core.verdict import Check

pytestmark = [pytest.mark.mutants, pytest.mark.toolchain]

MACHINE = platform.machine()
LIBRARY, OPTIONAL = "probe/_C.abi3.so", "probe/_moe_C.abi3.so"

#: In the manner of CUTLASS: without the instructions of the family, a kernel is compiled to a trap.
SOURCE = r"""
#include <cstdint>
extern "C" void* PyFloat_FromDouble(double);
extern "C" void* PyObject_CallNoArgs(void*);
extern "C" void* _PyLong_New(long);
__global__ void fp4_quantise(uint8_t* out, const float* in) {
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
  uint16_t packed;
  asm("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %1, %2; cvt.u16.u8 %0, t; }" : "=h"(packed) : "f"(in[0]), "f"(in[1]));
#ifdef UNUSED
  packed = 0;
#endif
  out[0] = packed;
#else
  asm("trap;");
#endif
}
const char* volatile seen;
extern "C" __attribute__((visibility("default"))) void* PyInit__C() {
  seen = "fp4_quant(Tensor input) -> Tensor";
#ifndef NO_UNIT
  seen = "fp4_quant";
#endif
#ifdef NEW_PYTHON
  PyObject_CallNoArgs(nullptr);
#endif
#ifdef PRIVATE_PYTHON
  _PyLong_New(1);
#endif
  return PyFloat_FromDouble(1);
}
"""

POLICY: dict[str, Any] = {
    "arch": "12.1f",
    "needed": ["lib[cm].so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-*"],
    "distributions": {
        "probe": {
            "reason": "A test.",
            "size_max": 2_000_000,
            "libraries": [
                {
                    "glob": LIBRARY,
                    "role": "target",
                    "opcodes": [{"pattern": r"F2FP\..*E2M1", "least": 1, "kernels": "fp4_quantise"}],
                    "trap_free": [{"kernels": "fp4_quantise", "reason": "The quantiser must work."}],
                    "symbols": ["PyInit__C"],
                    "operators": ["fp4_quant"],
                },
                {"glob": OPTIONAL, "role": "target"},
            ],
        }
    },
}


class Kills(Protocol):
    """The fixture of conftest.py."""

    def __call__(self, *, mutant: str, gate: str, sound: Sequence[Check], mutant_checks: Sequence[Check]) -> None: ...


class Workshop:
    """Compiles `SOURCE` in its forms, packs wheels of them, and asks the gate."""

    def __init__(self, cuda_bin: Path, folder: Path) -> None:
        self.cuda_bin, self.folder, self.made = cuda_bin, folder, 0

    def library(self, compute: str = "121f", code: str = "sm_121f", *, defines: Sequence[str] = (), link: Sequence[str] = ()) -> bytes:
        """Return the library with code for ``compute_<compute>`` as *code*."""
        self.made += 1
        source, target, made = (self.folder / f"{self.made}{suffix}" for suffix in (".cu", ".o", ".so"))
        source.write_text(SOURCE)
        arch = f"-gencode=arch=compute_{compute},code={code}"
        flags = [f"-D{name}" for name in defines]
        process.output([self.cuda_bin / "nvcc", "-c", "-Xcompiler", "-fPIC,-fvisibility=hidden", arch, *flags, source, "-o", target])
        process.output(["c++", "-shared", target, "-o", made, *link])
        return made.read_bytes()

    def wheel(self, files: Mapping[str, bytes], tag: str = "manylinux_2_41") -> Path:
        self.made += 1
        folder = self.folder / f"wheel{self.made}"
        folder.mkdir()
        path = folder / f"probe-1-cp38-abi3-{tag}_{MACHINE}.whl"
        metadata = "Metadata-Version: 2.4\nName: probe\nVersion: 1\nRequires-Python: >=3.8\n"
        wheelfile.write(path.parent, WheelName.of(path.name), files, metadata, pure=False)
        return path

    def ask(self, wheel: Path) -> tuple[Check, ...]:
        """Return the checks that `sparkwright gate` would make."""
        rules = msgspec.convert(POLICY, AuditPolicy)
        return audited.run(audit(wheel, rules, self.cuda_bin, scratch=self.folder))


@pytest.fixture(scope="module")
def workshop(cuda_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(cuda_bin, tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def library(workshop: Workshop) -> bytes:
    """The sound library; it stands for both of the policy."""
    return workshop.library()


@pytest.fixture(scope="module")
def sound(workshop: Workshop, library: bytes) -> tuple[Check, ...]:
    return workshop.ask(workshop.wheel({LIBRARY: library, OPTIONAL: library}))


def killers(checks: Sequence[Check]) -> set[str]:
    return {check.reason for check in checks if check.state != "pass"}


@pytest.mark.parametrize(
    ("mutant", "compute", "code", "defines", "reference"),
    [
        ("plain-121 build (trap path)", "121", "sm_121", [], "arch-folded"),
        ("sm_120a name with trap code", "120", "sm_120a", [], "arch-folded"),
        ("sm_121f name with trap code", "121", "sm_121f", [], "opcode-missing"),
        ("arch folded to 120f", "120f", "sm_120f", [], "arch-folded"),
        ("PTX-only library", "121f", "compute_121f", [], "arch-missing"),
        ("opcode removed by optimisation", "121f", "sm_121f", ["UNUSED"], "opcode-missing"),
        ("operator declared, its unit left out", "121f", "sm_121f", ["NO_UNIT"], "operator-missing"),
        ("abi3 library that needs a newer Python", "121f", "sm_121f", ["NEW_PYTHON"], "abi3-newer"),
        ("abi3 library with private symbols of Python", "121f", "sm_121f", ["PRIVATE_PYTHON"], "abi3-violated"),
    ],
)
def test_a_library_compiled_otherwise(
    workshop: Workshop,
    library: bytes,
    sound: Sequence[Check],
    kill: Kills,
    mutant: str,
    compute: str,
    code: str,
    defines: list[str],
    reference: str,
) -> None:
    """Each is one option of the compiler away from the sound library."""
    checks = workshop.ask(workshop.wheel({LIBRARY: workshop.library(compute, code, defines=defines), OPTIONAL: library}))
    kill(mutant=mutant, gate="G0", sound=sound, mutant_checks=checks)
    assert reference in killers(checks)


def test_a_missing_optional_extension(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills) -> None:
    """setup.py calls an extension optional, it does not compile, and the wheel is made without it."""
    checks = workshop.ask(workshop.wheel({LIBRARY: library}))
    kill(mutant="missing optional extension", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"library-missing"}


def test_an_extension_without_its_entry(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills, tmp_path: Path) -> None:
    """A linker script that keeps PyInit__C to the library itself."""
    (tmp_path / "map").write_text("{ local: *; };")
    bad = workshop.library(link=[f"-Wl,--version-script={tmp_path / 'map'}"])
    checks = workshop.ask(workshop.wheel({LIBRARY: bad, OPTIONAL: library}))
    kill(mutant="extension without PyInit", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"symbol-missing"}


def test_a_driver_in_the_wheel(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills, tmp_path: Path) -> None:
    """As ``auditwheel repair`` without --exclude leaves it."""
    (tmp_path / "a.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    process.output(["cc", "-shared", "-fPIC", tmp_path / "a.c", "-o", tmp_path / "a.so"])
    files = {LIBRARY: library, OPTIONAL: library, "probe.libs/libcuda-1a2b3c4d.so.1": (tmp_path / "a.so").read_bytes()}
    checks = workshop.ask(workshop.wheel(files))
    kill(mutant="driver vendored", gate="G0", sound=sound, mutant_checks=checks)
    assert "vendored-driver" in killers(checks)


def test_a_foreign_need(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills, tmp_path: Path) -> None:
    """The build machine had a library that a Spark need not have."""
    (tmp_path / "a.c").write_text("int other(void) { return 1; }\n")
    process.output(["cc", "-shared", "-fPIC", "-Wl,-soname,libopenblas.so.0", tmp_path / "a.c", "-o", tmp_path / "libother.so"])
    bad = workshop.library(link=["-Wl,--no-as-needed", str(tmp_path / "libother.so")])
    checks = workshop.ask(workshop.wheel({LIBRARY: bad, OPTIONAL: library}))
    kill(mutant="NEEDED foreign", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"needed-foreign"}


def test_a_driver_that_is_not_named(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills, tmp_path: Path) -> None:
    """The build machine's stub of the driver was empty, so the linker left it out."""
    (tmp_path / "a.c").write_text("int cuInit(unsigned); int starts(void) { return cuInit(0); }\n")
    process.output(["cc", "-c", "-fPIC", tmp_path / "a.c", "-o", tmp_path / "a.o"])
    bad = workshop.library(link=[str(tmp_path / "a.o")])
    checks = workshop.ask(workshop.wheel({LIBRARY: bad, OPTIONAL: library}))
    kill(mutant="driver not NEEDED", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"driver-unnamed"}


def test_a_search_path_of_the_build_machine(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills) -> None:
    bad = workshop.library(link=["-Wl,-rpath,/build/lib"])
    checks = workshop.ask(workshop.wheel({LIBRARY: bad, OPTIONAL: library}))
    kill(mutant="RPATH of the build machine", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"rpath-present"}


def test_a_tag_that_promises_an_older_system(workshop: Workshop, sound: Sequence[Check], kill: Kills, tmp_path: Path) -> None:
    """The wheel is renamed after the build, as some projects do."""
    (tmp_path / "new.c").write_text("#include <unistd.h>\nint random_bytes(void *to) { return getentropy(to, 8); }\n")
    process.output(["cc", "-c", "-fPIC", tmp_path / "new.c", "-o", tmp_path / "new.o"])
    new = workshop.library(link=[str(tmp_path / "new.o")])
    honest = workshop.ask(workshop.wheel({LIBRARY: new, OPTIONAL: new}))
    assert killers(honest) == set()
    checks = workshop.ask(workshop.wheel({LIBRARY: new, OPTIONAL: new}, "manylinux_2_17"))
    kill(mutant="glibc newer than the tag", gate="G0", sound=sound, mutant_checks=checks)
    (bad,) = [check for check in checks if check.state != "pass"]
    assert {sample.expected for sample in bad.samples} == {RULES["tag-newer"]}


def test_a_library_that_was_changed_after_it_was_recorded(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills) -> None:
    """One byte of a message; nothing else of the wheel is touched."""
    wheel = workshop.wheel({LIBRARY: library, OPTIONAL: library})
    with zipfile.ZipFile(wheel) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for info, data in members.items():
            archive.writestr(info, data.replace(b"input)", b"inpvt)") if info.filename == OPTIONAL else data)
    checks = workshop.ask(wheel)
    kill(mutant="library changed after RECORD was written", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"record-mismatch"}


def test_a_table_that_hides_the_code_from_the_driver(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills) -> None:
    """The fatbin's table says sm_121a where the code is for sm_121f: the driver chooses by the table, cuobjdump shows neither."""
    bad = bytearray(library)
    (found,) = elf.fatbin_entries(library, elf.shared_object(library).fatbins)
    head = library.rindex(struct.pack("<HH", 2, 0x0101), 0, found.offset)
    (flags,) = struct.unpack_from("<Q", library, head + 40)
    struct.pack_into("<Q", bad, head + 40, flags & ~(1 << 21) | 1 << 20)
    checks = workshop.ask(workshop.wheel({LIBRARY: bytes(bad), OPTIONAL: library}))
    kill(mutant="table and code name different targets", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"arch-contradicted"}


def test_code_of_a_later_format(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills) -> None:
    bad = library.replace(struct.pack("<IH", elf.FATBIN_MAGIC, 1), struct.pack("<IH", elf.FATBIN_MAGIC, 2))
    checks = workshop.ask(workshop.wheel({LIBRARY: bad, OPTIONAL: library}))
    kill(mutant="fatbin of an unknown version", gate="G0", sound=sound, mutant_checks=checks)
    assert "device-unreadable" in killers(checks)


def test_a_library_for_another_machine(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills) -> None:
    """The x86-64 library in the ARM64 wheel, or the other way round: here by the number in its header alone."""
    bad = bytearray(library)
    other = next(number for number, name in elf.MACHINES.items() if name in ("x86_64", "aarch64") and name != MACHINE)
    struct.pack_into("<H", bad, 18, other)
    assert elf.shared_object(bytes(bad)).machine == elf.MACHINES[other]
    checks = workshop.ask(workshop.wheel({LIBRARY: bytes(bad), OPTIONAL: library}))
    kill(mutant="library for another machine", gate="G0", sound=sound, mutant_checks=checks)
    assert "machine-foreign" in killers(checks)


def test_a_wheel_over_its_ceiling(workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kills) -> None:
    noise = random.Random(1).randbytes(2_000_000)
    checks = workshop.ask(workshop.wheel({LIBRARY: library, OPTIONAL: library, "probe/data.bin": noise}))
    kill(mutant="wheel over its size ceiling", gate="G0", sound=sound, mutant_checks=checks)
    assert killers(checks) == {"size-over"}
