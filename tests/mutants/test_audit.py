"""
G0: wheels that are wrong in one way each, compiled for the test, and the audit that must not pass them.

What needs no CUDA compiler is wrong in tests/unit/test_audit.py.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.mutants.conftest import Kill
from tests.support import wheels

from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.wheel import audit
from sparkwright.core import process
from sparkwright.gates import wheel_audit as audited
from sparkwright.gates.core.verdict import Check

pytestmark = [pytest.mark.mutants, pytest.mark.toolchain]

LIBRARY, OPTIONAL = "probe/_C.abi3.so", "probe/_moe_C.abi3.so"
#: The target of the sound library, and the name of its code.
SOUND = ("121f", "sm_121f")

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


class Workshop:
    """Compiles `SOURCE` in its forms, packs wheels of them, and asks the gate."""

    def __init__(self, cuda_bin: Path, folder: Path) -> None:
        self.cuda_bin, self.folder, self.made = cuda_bin, folder, 0

    def library(self, compute: str, code: str, *defines: str) -> bytes:
        """Return the library with code for ``compute_<compute>`` as *code*."""
        self.made += 1
        source, target, made = (self.folder / f"{self.made}{suffix}" for suffix in (".cu", ".o", ".so"))
        source.write_text(SOURCE)
        arch = f"-gencode=arch=compute_{compute},code={code}"
        flags = [f"-D{name}" for name in defines]
        process.output([self.cuda_bin / "nvcc", "-c", "-Xcompiler", "-fPIC,-fvisibility=hidden", arch, *flags, source, "-o", target])
        process.output(["c++", "-shared", target, "-o", made])
        return made.read_bytes()

    def wheel(self, files: Mapping[str, bytes]) -> Path:
        self.made += 1
        tag = "cp38-abi3-manylinux_2_41_{machine}"
        return wheels.plain(self.folder / f"wheel{self.made}", "probe", "1", tag=tag, files=files, python=">=3.8")

    def ask(self, wheel: Path) -> tuple[Check, ...]:
        """Return the checks that `sparkwright gate` would make."""
        return audited.run(audit(wheel, msgspec.convert(POLICY, AuditPolicy), lambda: self.cuda_bin, scratch=self.folder))


@pytest.fixture(scope="module")
def workshop(cuda_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(cuda_bin, tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def library(workshop: Workshop) -> bytes:
    """The sound library; it stands for both of the policy."""
    return workshop.library(*SOUND)


@pytest.fixture(scope="module")
def sound(workshop: Workshop, library: bytes) -> tuple[Check, ...]:
    return workshop.ask(workshop.wheel({LIBRARY: library, OPTIONAL: library}))


@pytest.mark.parametrize(
    ("mutant", "compiled", "more", "reference"),
    [
        ("plain-121 build (trap path)", ("121", "sm_121"), {}, "arch-folded"),
        ("sm_120a name with trap code", ("120", "sm_120a"), {}, "arch-folded"),
        ("sm_121f name with trap code", ("121", "sm_121f"), {}, "opcode-missing"),
        ("arch folded to 120f", ("120f", "sm_120f"), {}, "arch-folded"),
        ("PTX-only library", ("121f", "compute_121f"), {}, "arch-missing"),
        ("opcode removed by optimisation", (*SOUND, "UNUSED"), {}, "opcode-missing"),
        ("operator declared, its unit left out", (*SOUND, "NO_UNIT"), {}, "operator-missing"),
        ("abi3 library that needs a newer Python", (*SOUND, "NEW_PYTHON"), {}, "abi3-newer"),
        ("abi3 library with private symbols of Python", (*SOUND, "PRIVATE_PYTHON"), {}, "abi3-violated"),
        # setup.py calls an extension optional, it does not compile, and the wheel is made without it.
        ("missing optional extension", SOUND, {OPTIONAL: b""}, "library-missing"),
        ("wheel over its size ceiling", SOUND, {"probe/data.bin": random.Random(1).randbytes(2_000_000)}, "size-over"),
    ],
)
def test_a_wheel_that_is_wrong_in_one_way_dies(
    workshop: Workshop, library: bytes, sound: Sequence[Check], kill: Kill, mutant: str, compiled: tuple[str, ...], more: dict[str, bytes], reference: str
) -> None:
    """Its library is one option of the compiler away from the sound one; or a file is missing or too large."""
    files = {LIBRARY: workshop.library(*compiled), OPTIONAL: library, **more}
    checks = workshop.ask(workshop.wheel({name: data for name, data in files.items() if data}))
    kill(mutant=mutant, gate="G0", sound=sound, mutant_checks=checks)
    assert reference in {check.reason for check in checks}
