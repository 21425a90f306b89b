"""
FP4 matrix products whose result is known, and the judge of what a kernel left in its output.

Operands lie on the E2M1 grid from the start (so that nothing is lost by quantising them), three of four are zero, and shapes are those
at which kernels go wrong: odd rows, K that is no multiple of 32, edges of tiles, experts without a row (after FlashInfer's
test_unified_gemm_fuzz.py and vllm #48898). Most cases are *exact*: no partial sum has more than 24 bits, so that every order of summing
gives the same bits and the judge asks for these. Outputs begin as a NaN that no arithmetic makes, between guard zones of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates.core.verdict import Sample
from sparkwright.gates.numerics import e2m1, nvfp4
from sparkwright.gates.numerics.e2m1 import Bytes

#: As in `cuda/cases.h`.
MAGIC, POISON, GUARD = 0x66757A7A, 0x7FEDBEEF, 1024

Words = NDArray[np.uint32]
Wrong = Literal["guard-written", "output-unwritten", "output-nan", "output-wrong", "output-varies"]

#: From what explains most to what may follow from it.
WRONGS: tuple[Wrong, ...] = ("guard-written", "output-unwritten", "output-nan", "output-wrong", "output-varies")

_ROWS = (1, 2, 3, 5, 7, 16, 17, 31, 33, 64, 65, 129)
_COLUMNS = (1, 8, 9, 16, 24, 40, 64, 100, 129)
_DEPTHS = (16, 32, 48, 80, 112, 176, 208, 256, 336)
_OP_COLUMNS, _OP_DEPTHS = (64, 128, 192, 256), (128, 256, 384)
_SCALES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
_LARGEST_EXACT = 2.0**24


class Case(msgspec.Struct, frozen=True, eq=False):
    """
    One product ``alpha × A × Bᵀ`` by group: rows of A belong to groups (experts), each of which has a B of its own.

    Attributes:
        seed: Makes it again, with `case` and the same *kind*.
        offsets: groups + 1 of them; group g has the rows from offsets[g] on.
        alpha: One factor for each group: the inverse of both tensor scales.
        a, b: Codes, one to a byte; rows × K, groups × columns × K.
        a_scales, b_scales: UE4M3 codes, one for 16 along K, in plain rows.
    """

    kind: str
    seed: int
    offsets: NDArray[np.int32]
    alpha: NDArray[np.float32]
    a: Bytes
    a_scales: Bytes
    b: Bytes
    b_scales: Bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows, columns, K, groups."""
        return self.a.shape[0], self.b.shape[1], self.a.shape[1], self.b.shape[0]

    def __str__(self) -> str:
        rows, columns, depth, groups = self.shape
        return f"{self.kind} seed {self.seed}: {rows} × {columns} × {depth}" + (f", {groups} experts" if groups > 1 else "")


class Found(msgspec.Struct, frozen=True):
    """What one kernel did wrong in one case, and a place that shows it."""

    wrong: Wrong
    sample: Sample
    count: int


def case(kind: str, seed: int) -> Case:
    """
    Return a case: ``gemm`` and ``moe`` are exact, ``rounded`` has sums that round, for which the order of summing matters; ``op`` has
    shapes that every op of vLLM takes, and a 6 in each block of A, so that quantising it again finds the same scales.

    The same *kind* and *seed* give the same case on every machine.
    """
    random = np.random.default_rng([seed, len(kind), ord(kind[0])])
    groups = int(random.integers(2, 9)) if kind == "moe" else 1
    sizes = (_ROWS, _OP_COLUMNS, _OP_DEPTHS) if kind == "op" else (_ROWS, _COLUMNS, _DEPTHS)
    rows, columns, depth = (int(random.choice(ones)) for ones in sizes)
    if kind == "rounded":
        rows, columns, depth = max(rows, 16), max(columns, 16), max(depth, 256)
    scales = nvfp4.SCALES[24:104] if kind == "rounded" else np.array(_SCALES, np.float32)
    cuts = np.sort(random.integers(0, rows + 1, groups - 1))
    alpha = 2.0 ** random.integers(-6, -1, groups) if kind != "rounded" else random.uniform(0.01, 0.1, groups)
    a = _codes(random, (rows, depth))
    if kind == "op":
        a[:, :: nvfp4.BLOCK] = 7
    return Case(
        kind, seed, np.array([0, *cuts, rows], np.int32), alpha.astype(np.float32),
        a, nvfp4.scale_encode(random.choice(scales, (rows, depth // 16))),
        _codes(random, (groups, columns, depth)), nvfp4.scale_encode(random.choice(scales, (groups, columns, depth // 16))),
    )  # fmt: skip


def _codes(random: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    codes = random.integers(0, 16, shape, np.uint8)
    return np.where(random.random(shape) < 0.75, np.uint8(0), codes)


def _values(codes: Bytes, scales: Bytes) -> NDArray[np.float64]:
    return e2m1.decode(codes).astype(np.float64) * np.repeat(nvfp4.scale_decode(scales).astype(np.float64), nvfp4.BLOCK, axis=-1)


def activations(one: Case) -> NDArray[np.float64]:
    """Return A with its scales; every value has so few bits that bfloat16 holds it."""
    return _values(one.a, one.a_scales)


def expected(one: Case) -> NDArray[np.float64]:
    """Return the product, exact in float64 (codes and scales have so few bits that no sum of them rounds)."""
    return _product(one, _values(one.a, one.a_scales), _values(one.b, one.b_scales))


def _product(one: Case, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.zeros(one.shape[:2])
    for group, (begin, end) in enumerate(zip(one.offsets, one.offsets[1:], strict=False)):
        out[begin:end] = np.float64(one.alpha[group]) * (a[begin:end] @ b[group].T)
    return out


def exact(one: Case) -> bool:
    """Does every order of summing in FP32 give the same bits? True where no partial sum can have more than 24 of them."""
    if one.kind == "rounded":
        return False
    # In units of 1/16: codes are multiples of 1/2, and so are the scales.
    most = np.abs(_values(one.a, one.a_scales)) @ np.abs(_values(one.b, one.b_scales)).max(axis=(0, 1))
    return bool(most.max(initial=0) * 16 < _LARGEST_EXACT)


def data(one: Case) -> bytes:
    """Return *one* as `cuda/cases.h` reads it: scales swizzled, codes packed."""
    rows, columns, depth, groups = one.shape
    head = np.array([MAGIC, rows, columns, depth, groups, 0], np.int32)
    b_scales = np.concatenate([nvfp4.swizzle(one.b_scales[group]) for group in range(groups)])
    parts = (head, one.offsets, one.alpha, e2m1.pack(one.a), nvfp4.swizzle(one.a_scales), e2m1.pack(one.b), b_scales)
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def output_bytes(cases: Sequence[Case], repeats: int) -> int:
    """Return how many bytes a program writes about *cases*."""
    return 4 * repeats * sum(one.shape[0] * one.shape[1] + 2 * GUARD for one in cases)


def read(path: Path, size: int) -> bytes:
    """Return the *size* bytes at *path*, or one more where there are more; raise `OSError` where it is no file that can be read."""
    with path.open("rb") as stream:
        return stream.read(size + 1)


def outputs(cases: Sequence[Case], repeats: int, written: bytes) -> Iterator[tuple[Case, list[Words]]]:
    """
    Yield each case with the words of its runs, from the bytes that a program has *written*.

    Raises:
        ValueError: There are more or fewer bytes than the cases take.
    """
    words, at = np.frombuffer(written[: len(written) // 4 * 4], np.uint32), 0
    if len(written) != output_bytes(cases, repeats):
        raise ValueError(f"{len(written)} bytes of output in place of {output_bytes(cases, repeats)}")
    for one in cases:
        size = one.shape[0] * one.shape[1] + 2 * GUARD
        yield one, [words[at + run * size : at + (run + 1) * size] for run in range(repeats)]
        at += repeats * size


def judge(one: Case, runs: Sequence[Words], tolerance: float, *, exactly: bool = True) -> tuple[Found, ...]:
    """
    Return what is wrong in the outputs of *runs*, which hold the same case, guard zones included.

    Args:
        tolerance: Of a case that is not exact, times the largest magnitude of the result.
        exactly: Whether exact cases must be so in the output, too; not where it is rounded to fewer bits.
    """
    first = runs[0]
    inside = first[GUARD:-GUARD]
    reference = expected(one)
    got = inside.view(np.float32).reshape(reference.shape)
    unwritten = (inside == POISON).reshape(reference.shape)
    nan = np.isnan(got) & ~unwritten
    bound = 0.0 if exactly and exact(one) else tolerance * float(np.abs(reference).max(initial=0))
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(got - reference) <= bound) & ~unwritten & ~nan
    varies = np.zeros(len(inside), bool)
    for other in runs[1:]:
        varies |= other[GUARD:-GUARD] != inside
    guards = np.concatenate([np.concatenate([run[:GUARD], run[-GUARD:]]) for run in runs])
    masks = (guards != POISON, unwritten, nan, wrong, varies.reshape(reference.shape))
    return tuple(_found(name, one, mask, reference, got) for name, mask in zip(WRONGS, masks, strict=True) if mask.any())


def _found(wrong: Wrong, one: Case, mask: NDArray[np.bool_], reference: NDArray[np.float64], got: NDArray[np.float32]) -> Found:
    count = int(mask.sum())
    if wrong == "guard-written":
        return Found(wrong, Sample(str(one), "the guard zones are left alone", f"{count} words of them written"), count)
    row, column = (int(index) for index in np.argwhere(mask)[0])
    where = f"{one}, row {row}, column {column} (first of {count})"
    said = {"output-unwritten": "nothing written", "output-varies": "other bits in another run"}.get(wrong, f"{got[row, column]:g}")
    return Found(wrong, Sample(where, f"{reference[row, column]:g}", said), count)
