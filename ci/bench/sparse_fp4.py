"""
Skipping zero tiles of NVFP4 weights in a matrix-vector product: exact, and at which share faster?

    sparse_fp4.py measure --output FILE    sparse_fp4.cu on this machine's GPU; needs torch and nvcc
    sparse_fp4.py count FOLDER...          zero weights, groups of 4, blocks and tiles of NVFP4
                                           checkpoints; needs torch and safetensors
    sparse_fp4.py count --gaussian         the same for 4096 x 4096 normal weights (seed 1)
                        --output FILE      also as JSON, with the digest of what was counted

A tile is what the mask has a bit for: four rows of 16, 32 or 64 values, whose codes are 32, 64 or
128 contiguous bytes. Nothing of sparkwright is imported, so that the GPU's machine needs none of
it. Exits with 1 if a check fails; then nothing is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import hashlib
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

SOURCE = Path(__file__).with_suffix(".cu")
#: Values of a block with one scale, rows of a tile, values of a step of a warp.
BLOCK, ROWS, STEP = 16, 4, 256
#: Lanes that read a tile; each reads 16 bytes of codes.
LANES = (2, 4, 8)
#: Values in a row of the widest tile.
WIDEST = 8 * LANES[-1]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
#: The value whose sign is the highest bit of a nibble, in the kernel's words of eight codes.
SIGNS = (4, 0, 5, 1, 6, 2, 7, 3)

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096))
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
#: Values in a row of a cluster of zeros.
CLUSTER = 1024
#: Bytes of different weights in a measurement, against caches.
ROTATED = 2**30
REPEATS = 25


def e4m3() -> Floats:
    """Return the values of the 256 codes of E4M3; 0x7F and 0xFF are NaN."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(
        exponents == 0,
        mantissas * 2.0**-9,
        (1 + mantissas / 8) * 2.0 ** (exponents.astype(float) - 7),
    )
    values[127] = np.nan
    return np.concatenate([values, -values])


def nibbles(packed: Bytes) -> Bytes:
    """Return the codes of *packed* (rows x columns / 2, the first code in the low bits)."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)


def dequantised(packed: Bytes, scales: Bytes) -> Floats:
    """Return the weights without their global scale, in float64."""
    blocks = np.repeat(e4m3()[scales], BLOCK, axis=1)
    values: Floats = E2M1[nibbles(packed)] * blocks
    return values


def pack_codes(packed: Bytes) -> Bytes:
    """Return the codes of a checkpoint in the layout of sparse_fp4.cu."""
    codes = nibbles(packed)
    rows, columns = codes.shape
    if rows % ROWS or columns % STEP:
        raise ValueError(f"{rows} x {columns}: not a multiple of {ROWS} x {STEP}")
    codes = codes.reshape(rows // ROWS, ROWS, columns // STEP, 32, 8).transpose(0, 2, 3, 1, 4)
    codes = (codes & 7 | codes[..., SIGNS] & 8).astype(np.uint8)
    return np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)


def pack_scales(scales: Bytes) -> Bytes:
    """Return the scales of a checkpoint (rows x blocks, E4M3) in the layout of sparse_fp4.cu."""
    rows, blocks = scales.shape
    return np.ascontiguousarray(scales.reshape(rows // ROWS, ROWS, blocks).transpose(0, 2, 1))


def pack_mask(needed: Flags, lanes: int) -> npt.NDArray[np.uint32]:
    """Return the mask of the tiles (groups of rows x tiles) of *lanes* that are *needed*."""
    tiles = 32 // lanes
    groups, steps = needed.shape[0], needed.shape[1] // tiles
    bits = np.zeros((groups, tiles, -(-steps // 32) * 32), np.bool_)
    bits[..., :steps] = needed.reshape(groups, steps, tiles).transpose(0, 2, 1)
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4")


def zero_blocks(packed: Bytes, scales: Bytes) -> Flags:
    """
    Return which blocks of 16 weights are zero, of either sign.

    A block of zeros whose scale is NaN is NaN, and not zero.
    """
    codes = nibbles(packed).reshape(packed.shape[0], -1, BLOCK)
    magnitudes = scales & 0x7F
    zeros: Flags = ((codes & 7 == 0).all(-1) & (magnitudes != 0x7F)) | (magnitudes == 0)
    return zeros


def needed_tiles(zeros: Flags, lanes: int) -> Flags:
    """Return which tiles of *lanes* have a block that is not among the *zeros*."""
    groups, wide = zeros.shape[0] // ROWS, lanes // 2
    needed: Flags = np.logical_not(np.all(zeros.reshape(groups, ROWS, -1, wide), axis=(1, 3)))
    return needed


def bound(columns: int) -> float:
    """
    Return the largest relative error, against the sum of the magnitudes of a row's products.

    A product is rounded in seven additions of its lane, once in each later step, in five additions
    of the butterfly, and by the global scale.
    """
    roundings = (7 + columns // STEP + 5 + 1) * 2.0**-24
    return roundings / (1 - roundings)


def compiled(folder: Path, arch: str) -> Callable[..., int]:
    """Return the function of sparse_fp4.cu, compiled for *arch*."""
    library = folder / "sparse_fp4.so"
    options = [f"-arch={arch}", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *options, "-o", str(library), str(SOURCE)], check=True)
    function = ctypes.CDLL(str(library)).sparse_fp4_gemv
    pointers, integers = [ctypes.c_void_p] * 5, [ctypes.c_int] * 6
    function.argtypes = [*pointers, ctypes.c_float, *integers, ctypes.c_void_p]
    return function


class Kernel:
    """The compiled product; arrays are NumPy's for the CPU, or tensors of the GPU."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function

    def __call__(
        self, weights: Sequence[Any], x: Any, y: Any,
        global_scale: float = 1.0, lanes: int = 0, stream: int | None = None,
    ) -> None:  # fmt: skip
        """
        Write the products to *y* (count x batch x rows); raise RuntimeError if CUDA refuses.

        *weights* are codes, scales and mask. *x* is batch x columns, 16-bit words of bfloat16. Without *lanes*, *mask* is not read.
        """
        cpu = isinstance(y, np.ndarray)
        arrays = (*weights, x, y)
        pointers = [
            (array.ctypes.data if cpu else array.data_ptr()) if array is not None else None
            for array in arrays
        ]
        (count, batch, rows), columns = y.shape, x.shape[1]
        if code := self._function(
            *pointers, global_scale, rows, columns, batch, lanes, count, cpu, stream
        ):
            raise RuntimeError(f"CUDA error {code}")


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return *values* in bfloat16, cut and not rounded, as words of 16 bits."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def example(
    generator: np.random.Generator, rows: int, columns: int, share: float, lanes: int
) -> tuple[Bytes, Bytes]:
    """
    Return random codes and scales, a *share* of whose tiles is zero in one of three ways.

    Zeros of code, of both signs; scales of zero; and the last group of rows all zero. Scales have
    both signs and include subnormal ones.
    """
    packed = generator.integers(0, 256, (rows, columns // 2), np.uint8)
    scales = generator.integers(0, 256, (rows, columns // BLOCK), np.uint8)
    scales[scales & 0x7F == 0x7F] = 1
    zero = generator.random((rows // ROWS, columns // (8 * lanes))) < share
    zero[-1] |= share > 0
    values = np.repeat(np.repeat(zero, ROWS, 0), 8 * lanes, 1)
    of_bytes, of_blocks = values[:, ::2], values[:, ::BLOCK]
    by_scale = of_blocks & (generator.random(scales.shape) < 0.3)
    scales[by_scale] &= 0x80
    packed[of_bytes & ~np.repeat(by_scale, BLOCK // 2, 1)] &= 0x88
    return packed, scales


def check_product(kernel: Kernel, device: Any, case: str, **of: Any) -> Iterator[str]:
    """Yield what is wrong with the products of an example: on the CPU, and on a GPU if *device*."""
    generator = np.random.default_rng(of.get("seed", 1))
    rows, columns, batch, lanes = of["rows"], of["columns"], of["batch"], of["lanes"]
    packed, scales = example(generator, rows, columns, of["share"], lanes)
    if of.get("nan"):
        # In a tile whose codes are zero, so that only its scale keeps it from being skipped.
        packed[:ROWS, :STEP], scales[1, 3] = 0, 0x7F
    x = bfloat16(generator.standard_normal((batch, columns)).astype(np.float32))
    needed = needed_tiles(zero_blocks(packed, scales), lanes)
    mask, global_scale = pack_mask(needed, lanes), 0.0123
    host = [pack_codes(packed), pack_scales(scales), mask, x]
    weights = dequantised(packed, scales)
    wide = (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    factor = float(np.float32(global_scale))
    exact = wide @ weights.T * factor
    magnitudes = np.abs(wide) @ np.abs(weights).T * factor

    def product(own_lanes: int, own_mask: Any, on_gpu: bool) -> npt.NDArray[np.uint32]:
        if not on_gpu:
            y: Any = np.full((1, batch, rows), 7, np.float32)
            kernel((host[0], host[1], own_mask), x, y, global_scale, own_lanes)
            result: npt.NDArray[np.float32] = y[0]
        else:
            arrays = [device(array) for array in (host[0], host[1], own_mask)]
            y = device(np.full((1, batch, rows), 7, np.float32))
            kernel(arrays, device(x), y, global_scale, own_lanes)
            result = y.cpu().numpy()[0]
        # A processor's NaN and the GPU's differ in their payload.
        return np.where(np.isnan(result), np.float32(np.nan), result).view(np.uint32)

    dense = product(0, mask, False)
    values = dense.view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        far = ~(np.abs(values - exact) <= bound(columns) * magnitudes + 2.0**-149)
    if (far & ~np.isnan(exact)).any() or (np.isnan(values) != np.isnan(exact)).any():
        yield f"{case}: dense on the CPU is not within the bound"
    if bool(of.get("nan")) != bool(np.isnan(values).any()):
        yield f"{case}: NaN is not where it has to be"
    for on_gpu in (False, True) if device else (False,):
        host_name = "GPU" if on_gpu else "CPU"
        if not np.array_equal(product(0, mask, on_gpu), dense):
            yield f"{case}: dense on the {host_name} differs from dense on the CPU"
        if not np.array_equal(product(lanes, mask, on_gpu), dense):
            yield f"{case}: masked on the {host_name} differs from dense"
        if needed.any():
            wrong = needed.copy()
            wrong[tuple(np.argwhere(needed)[0])] = False
            if np.array_equal(product(lanes, pack_mask(wrong, lanes), on_gpu), dense):
                yield f"{case}: a tile that is needed can be skipped on the {host_name} unseen"


def check(kernel: Kernel, device: Any = None) -> list[str]:
    """Return what is wrong with *kernel*, if anything."""
    wrong: list[str] = []
    for columns in (STEP, 33 * STEP):
        for lanes in LANES:
            for batch in (1, 2, 3, 4):
                for share in (0.0, 0.3, 0.9, 1.0):
                    case = f"36 x {columns}, batch {batch}, {16 * lanes} bytes, zeros {share}"
                    of = {"columns": columns, "batch": batch, "lanes": lanes, "share": share}
                    wrong += check_product(kernel, device, case, rows=36, **of)
            of = {"rows": 8, "columns": columns, "batch": 2, "lanes": lanes, "share": 0.5}
            wrong += check_product(kernel, device, f"NaN, {16 * lanes} bytes", nan=True, **of)
    return wrong


def summary(values: list[float]) -> dict[str, float]:
    """Return the median and the 5th and 95th percentiles."""
    low, middle, high = np.percentile(values, [5, 50, 95])
    return {"median": float(middle), "p5": float(low), "p95": float(high)}


def gpu_mask(torch: Any, needed: Any, lanes: int) -> Any:
    """Return `pack_mask` of *needed*, on the GPU."""
    tiles = 32 // lanes
    bits = needed.view(needed.shape[0], -1, tiles).transpose(1, 2)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[2] % 32))
    bits = bits.reshape(*bits.shape[:2], -1, 32).to(torch.int32)
    words = bits << torch.arange(32, dtype=torch.int32, device="cuda")
    return words.sum(-1, dtype=torch.int32)


class Measurement:
    """The timing of one shape of weights on the GPU."""

    def __init__(self, torch: Any, kernel: Kernel, rows: int, columns: int) -> None:
        self.torch, self._kernel, self._rows, self._columns = torch, kernel, rows, columns
        self._bytes = rows * columns // 2 + rows * columns // BLOCK
        self._count = math.ceil(ROTATED / self._bytes)
        self._groups = self._count * rows // ROWS
        shape = (self._groups, columns // BLOCK, ROWS)
        # From 0.25 to 3.75.
        self._scales = torch.randint(0x28, 0x48, shape, dtype=torch.uint8, device="cuda")
        self._codes = torch.empty(
            (self._groups, columns // STEP, 32, 16), dtype=torch.uint8, device="cuda"
        )

    def _timed(self, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Return the microseconds of each call, measured in turns."""
        cuda = self.torch.cuda
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for repeat in range(REPEATS + 3):
            for name, call in calls.items():
                pair = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                pair[0].record()
                call()
                pair[1].record()
                if repeat >= 3:
                    events[name].append(pair)
        cuda.synchronize()
        return {
            name: [begin.elapsed_time(end) * 1000 for begin, end in pairs]
            for name, pairs in events.items()
        }

    def copy(self) -> dict[str, float]:
        """Return GB/s, read and written, of a device copy of the codes."""
        target = self.torch.empty_like(self._codes)
        times = self._timed({"copy": lambda: target.copy_(self._codes)})["copy"]
        return summary([2 * self._codes.numel() / us / 1000 for us in times])

    def figures(self, lanes: int, cluster: int, batches: tuple[int, ...]) -> Iterator[Any]:
        """
        Yield a figure for each share of zeros, with tiles of *lanes* in runs of *cluster* tiles.

        Zeros are added to one set of random weights, so that a share contains the smaller ones.
        """
        torch = self.torch
        self._codes.random_(0, 256)
        tiles = self._columns // (8 * lanes)
        field = torch.rand((self._groups, -(-tiles // cluster)), device="cuda")
        field = field.repeat_interleave(cluster, 1)[:, :tiles].contiguous()
        for share in SHARES:
            needed = field >= share
            zeros = ~needed.view(-1, 1)
            self._codes.view(torch.int64).view(-1, 2 * lanes).masked_fill_(zeros, 0)
            mask, read = gpu_mask(torch, needed, lanes), float(needed.float().mean())
            for batch in batches:
                for graph in (False, True) if batch == 1 and lanes == 8 else (False,):
                    yield {
                        "rows": self._rows, "columns": self._columns, "matrices": self._count,
                        "batch": batch, "tile_bytes": 16 * lanes,
                        "zeros": "clustered" if cluster > 1 else "random",
                        "launch": "one for each matrix" if graph else "one for all matrices",
                        "share": 1 - read, **self._figure(mask, read, lanes, batch, graph),
                    }  # fmt: skip

    def _figure(self, mask: Any, read: float, lanes: int, batch: int, graph: bool) -> Any:
        torch, shape = self.torch, (self._count, batch, self._rows)
        x = torch.randn((batch, self._columns), device="cuda").to(torch.bfloat16)
        outputs = {name: torch.empty(shape, device="cuda") for name in ("dense", "masked")}
        lanes_of = {"dense": 0, "masked": lanes}

        def product(name: str) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            parts = [self._codes, self._scales, mask]
            if not graph:
                self._kernel(parts, x, outputs[name], 0.5, lanes_of[name], stream)
                return
            split = [part.view(self._count, -1) for part in parts]
            for number in range(self._count):
                own = [part[number] for part in split]
                y = outputs[name][number : number + 1]
                self._kernel(own, x, y, 0.5, lanes_of[name], stream)

        calls: dict[str, Callable[[], object]] = {}
        for name in outputs:
            if graph:
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    product(name)
                calls[name] = captured.replay
            else:
                calls[name] = lambda name=name: product(name)  # type: ignore[misc]
        times = self._timed(calls)
        words = [output.view(torch.int32) for output in outputs.values()]
        ratios = [own / dense for dense, own in zip(times["dense"], times["masked"], strict=True)]
        # The bytes of needed tiles, the mask and y; x comes from a cache.
        written = batch * self._rows * 4
        needs = {
            "dense": self._bytes + written,
            "masked": self._bytes * read + written + mask.numel() * 4 / self._count,
        }
        rates = {
            f"{name}_gbs": needs[name] * self._count / summary(times[name])["median"] / 1000
            for name in needs
        }
        each = {f"{name}_us": [us / self._count for us in times[name]] for name in times}
        return {
            "equal": bool(torch.equal(*words)),
            "repeats": REPEATS,
            **{name: summary(values) for name, values in each.items()},
            **rates,
            "ratio": summary(ratios),
        }


def decisions(figures: list[Any]) -> list[Any]:
    """
    Return for each series of shares where the masked kernel begins to be faster.

    `break_even` is interpolated between medians. From `pays_from` on, 95 % of the repetitions are
    faster at every measured share. None: at no measured share.
    """
    names = ("rows", "columns", "batch", "tile_bytes", "zeros", "launch")
    series: dict[tuple[Any, ...], list[Any]] = {}
    for figure in figures:
        series.setdefault(tuple(figure[name] for name in names), []).append(figure)
    result = []
    for key, points in series.items():
        points.sort(key=lambda figure: figure["share"])
        pays = None
        for figure in reversed(points):
            if figure["ratio"]["p95"] >= 1:
                break
            pays = figure["share"]
        shares = [figure["share"] for figure in points]
        ratios = [figure["ratio"]["median"] for figure in points]
        crossing = None
        slower = [number for number, ratio in enumerate(ratios) if ratio >= 1]
        if not slower:
            crossing = shares[0]
        elif slower[-1] + 1 < len(points):
            at = slower[-1]
            part = (ratios[at] - 1) / (ratios[at] - ratios[at + 1])
            crossing = shares[at] + part * (shares[at + 1] - shares[at])
        result.append(
            {**dict(zip(names, key, strict=True)), "break_even": crossing, "pays_from": pays}
        )
    return result


def host(torch: Any) -> dict[str, Any]:
    """Return what the figures depend on, beside the kernel."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "nvidia_smi": dict(zip(fields.split(","), asked.stdout.strip().split(", "), strict=False)),
        "nvcc": version.stdout.strip().splitlines()[-1],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def write(path: Path, document: Any) -> None:
    """Write *document* as a whole, or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    scratch.replace(path)


def table(document: Any) -> str:
    """Return the figures and decisions as text."""
    lines = [
        f"{'rows x columns':>14} {'batch':>5} {'bytes':>5} {'zeros':>9} {'launches':>8} {'share':>6}"
        f" {'dense us':>9} {'GB/s':>5} {'masked us':>9} {'p5':>8} {'p95':>8} {'GB/s':>5} {'ratio':>6}"
    ]
    for figure in document["figures"]:
        launches = "each" if "each" in figure["launch"] else "all"
        masked = figure["masked_us"]
        lines.append(
            f"{figure['rows']:>6} x{figure['columns']:>6} {figure['batch']:>5}"
            f" {figure['tile_bytes']:>5} {figure['zeros']:>9} {launches:>8} {figure['share']:>6.1%}"
            f" {figure['dense_us']['median']:>9.3f} {figure['dense_gbs']:>5.0f}"
            f" {masked['median']:>9.3f} {masked['p5']:>8.3f} {masked['p95']:>8.3f}"
            f" {figure['masked_gbs']:>5.0f} {figure['ratio']['median']:>6.3f}"
            + ("" if figure["equal"] else "  DIFFERS")
        )
    for series in document["decisions"]:
        lines.append(" ".join(f"{name}={value}" for name, value in series.items()))
    lines += [f"copy {key}: {rate['median']:.0f} GB/s" for key, rate in document["copies"].items()]
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> int:
    """Check the kernel, measure it, and write the figures after each shape."""
    began = time.monotonic()
    import torch

    document: dict[str, Any] = {
        "schema": 1,
        "benchmark": "sparse_fp4",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": host(torch),
        "figures": [], "copies": {}, "decisions": [], "complete": False,
    }  # fmt: skip

    def device(array: npt.NDArray[Any]) -> Any:
        # torch has few operations for unsigned words, and the kernel reads bytes.
        signed = {np.dtype("u4"): np.int32, np.dtype("u2"): np.int16}.get(array.dtype, array.dtype)
        return torch.from_numpy(np.ascontiguousarray(array).view(signed)).cuda()

    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(compiled(Path(folder), options.arch))
        wrong = check(kernel, device)
        needed = np.random.default_rng(2).random((3, 33 * 16)) < 0.5
        on_gpu = gpu_mask(torch, device(needed), 2).cpu().numpy()
        if not np.array_equal(on_gpu.view(np.uint32), pack_mask(needed, 2)):
            wrong.append("the mask of the GPU differs from NumPy's")
        document["checks"] = wrong or "passed"
        print(f"checks: {document['checks']}; {time.monotonic() - began:.1f} s", flush=True)
        write(options.output, document)
        if wrong:
            return 1
        plans = [(8, 1, (1, 4)), (8, CLUSTER // 64, (1,)), (4, 1, (1,)), (2, 1, (1, 2, 3))]
        for rows, columns in SHAPES:
            torch.cuda.empty_cache()
            shape = Measurement(torch, kernel, rows, columns)
            document["copies"][f"{rows}x{columns}"] = shape.copy()
            for plan in plans:
                for figure in shape.figures(*plan):
                    document["figures"].append(figure)
                    if time.monotonic() - began > options.seconds:
                        break
            document["decisions"] = decisions(document["figures"])
            document["seconds"] = time.monotonic() - began
            late = document["seconds"] > options.seconds
            last = (rows, columns) == SHAPES[-1]
            document["complete"] = last and not late
            write(options.output, document)
            print(f"{rows} x {columns}: {document['seconds']:.1f} s", flush=True)
            if late:
                break
    print(table(document))
    return 0 if all(figure["equal"] for figure in document["figures"]) else 1


def shares(packed: Bytes, scales: Bytes) -> dict[str, float]:
    """
    Return the shares of zero weights, of groups of four of a row that keep all in two places (2:4),
    of zero blocks, and of tiles that a mask can skip.
    """
    rows, columns = packed.shape[0] // ROWS * ROWS, packed.shape[1] * 2 // WIDEST * WIDEST
    zeros = zero_blocks(packed[:rows, : columns // 2], scales[:rows, : columns // BLOCK])
    tiles = {
        f"tiles of {16 * lanes} bytes": 1 - needed_tiles(zeros, lanes).mean() for lanes in LANES
    }
    values = nibbles(packed) & 7 == 0
    pairs = float((values.reshape(-1, 4).sum(1) >= 2).mean())
    return {
        "weights": float(values.mean()), "groups of 4 with 2 zeros or more": pairs,
        "blocks": float(zeros.mean()), **tiles,
    }  # fmt: skip


def gaussian() -> tuple[Bytes, Bytes]:
    """Return 4096 x 4096 normal weights in NVFP4, quantised as checkpoints are: amax / 6."""
    size = 4096
    weights = np.random.default_rng(1).standard_normal((size, size)).reshape(size, -1, BLOCK)
    divisor = 6 * 448 / np.abs(weights).max()
    positive = e4m3()[:127]
    wanted = np.abs(weights).max(-1) / 6 * divisor
    scales = np.abs(positive - wanted[..., None]).argmin(-1).astype(np.uint8)
    levels = weights / np.maximum(positive[scales] / divisor, 1e-30)[..., None]
    codes = np.searchsorted((E2M1[:7] + E2M1[1:8]) / 2, np.abs(levels)).astype(np.uint8)
    codes = (codes | (levels < 0).astype(np.uint8) << 3).reshape(size, size)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def count(options: argparse.Namespace) -> int:
    """Print the shares of zeros of each quantised weight in the checkpoints."""
    counted = []

    def show(name: str, packed: Bytes, scales: Bytes) -> None:
        digest = hashlib.sha256(packed.tobytes() + scales.tobytes()).hexdigest()
        shown = {"weights": name, "shape": [packed.shape[0], 2 * packed.shape[1]]}
        counted.append({**shown, "sha256": digest, "zeros": shares(packed, scales)})
        print(f"{name}:", json.dumps(counted[-1]["zeros"]))

    if options.gaussian:
        show("normal weights, seed 1", *gaussian())
    for folder in options.folders:
        import torch
        from safetensors.torch import load_file

        for file in sorted(folder.glob("*.safetensors")):
            tensors = load_file(file)
            for name in sorted(tensors):
                prefix, dot, kind = name.rpartition(".")
                if kind == "weight_packed":
                    scales = tensors[f"{prefix}{dot}weight_scale"].view(torch.uint8).numpy()
                    show(name, tensors[name].numpy(), scales)
    if options.output:
        folders = [f"FOLDER{number}" for number, _ in enumerate(options.folders, 1)]
        words = ["sparse_fp4.py", "count", *["--gaussian"] * options.gaussian, *folders]
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        write(
            options.output,
            {"schema": 1, "command": " ".join(words), **versions, "counted": counted},
        )
    return 0


def main() -> int:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("measure", help="check and measure the kernel on this GPU")
    timed.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON of figures")
    timed.add_argument(
        "--arch", default="native", help="architecture for nvcc (default: this GPU's)"
    )
    timed.add_argument("--seconds", type=float, default=100, help="time limit (default: 100)")
    counted = commands.add_parser("count", help="count zeros in checkpoints")
    counted.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    counted.add_argument("--gaussian", action="store_true", help="also of normal weights")
    counted.add_argument("--output", type=Path, metavar="FILE", help="also write them as JSON")
    options = parser.parse_args()
    return measure(options) if options.command == "measure" else count(options)


if __name__ == "__main__":
    sys.exit(main())
