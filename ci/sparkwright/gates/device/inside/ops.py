"""
Runs the FP4 ops of an installed wheel, with torch and the standard library alone, in the environment that the wheel is installed in.

    python ops.py JOBS.json

JOBS.json holds ``libraries`` (paths of libraries to load; none: those of the installed vllm) and ``jobs``. A job that runs writes its
file ``out`` and says ``{"name": …}``; one that does not says ``"absent"`` (there is no such op here), ``"refused"`` (the op says that it
was not made for this GPU) or ``"broken"`` (any other error, after which nothing else is tried). Outputs lie between guard zones and begin
as a NaN that no arithmetic makes, wherever an op lets its caller provide them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]

#: bfloat16; as `gates/device/ops.py` has it.
POISON, GUARD = 0x7FED, 1024
BLOCK = 16

#: The id of vLLM's scalar type float4_e2m1f: exponent, mantissa, sign, bias, finite only, no NaN, packed from the lowest bit.
FLOAT4_E2M1F = 2 | 1 << 8 | 1 << 16 | 1 << 49


#: What vLLM's entry points say of a GPU that they were not compiled for; anything else that an op throws is a fault.
REFUSALS = re.compile(r"[Nn]o compiled|NotImplemented|not implemented|[Rr]ecompile|not supported|[Uu]nsupported|requires? (SM|sm|CC)")


class Absent(Exception):
    """The environment has no such op."""


def say(**record: object) -> None:
    """Print a record as a line of JSON, at once: the next op may end the process."""
    print(json.dumps(record), flush=True)  # noqa: T201  this is the program's output


def libraries(named: list[str]) -> list[str]:
    """Return the libraries to load: *named* ones, or the installed vllm's."""
    if named:
        return named
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise Absent("vllm is not installed in this environment")
    folder = Path(list(spec.submodule_search_locations)[0])  # noqa: RUF015  the type is not a sequence
    return [str(path) for pattern in ("_C*.so", "_moe_C*.so") for path in sorted(folder.glob(pattern))]


def op(torch: Any, name: str) -> Any:
    """Return ``torch.ops._C.<name>``, or raise `Absent`."""
    try:
        return getattr(torch.ops._C, name)
    except AttributeError as error:
        raise Absent(f"torch.ops._C has no {name}") from error


def read(torch: Any, path: str, kind: str, *shape: int) -> Any:
    """Return the file *path* as a tensor of *kind* on the GPU; no shape leaves it flat."""
    flat = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=getattr(torch, kind)).cuda()
    return flat.reshape(shape) if shape else flat


def scales(torch: Any, path: str, rows: int, columns: int) -> Any:
    """Return swizzled scales as the two axes that the ops ask for."""
    return read(torch, path, "uint8", (rows + 127) // 128 * 128, (columns + 3) // 4 * 4).view(torch.float8_e4m3fn)


def quantise(torch: Any, job: Job) -> None:
    """Quantise the job's bfloat16 values; write the packed codes, then the swizzled scales."""
    values = read(torch, job["values"], "bfloat16", job["rows"], job["columns"])
    factor = torch.tensor([job["tensor_scale"]], dtype=torch.float32, device="cuda")
    codes, found = op(torch, "scaled_fp4_quant")(values, factor, True)
    torch.cuda.synchronize()
    Path(job["out"]).write_bytes(b"".join(bytes(one.contiguous().view(torch.uint8).flatten().cpu().tolist()) for one in (codes, found)))


def cutlass(torch: Any, job: Job, out: Any) -> Any:
    """Both operands in FP4."""
    rows, columns, depth = job["rows"], job["columns"], job["depth"]
    op(torch, "cutlass_scaled_fp4_mm")(
        out, read(torch, job["a"], "uint8", rows, depth // 2), read(torch, job["b"], "uint8", columns, depth // 2),
        scales(torch, job["a_scales"], rows, depth // BLOCK), scales(torch, job["b_scales"], columns, depth // BLOCK),
        torch.tensor([job["alpha"]], dtype=torch.float32, device="cuda"),
    )  # fmt: skip
    return out


def marlin(torch: Any, job: Job, out: Any) -> Any:
    """Activations in bfloat16, weights in FP4, brought into the order that the kernel reads them in."""
    rows, columns, depth = job["rows"], job["columns"], job["depth"]
    values = read(torch, job["activations"], "bfloat16", rows, depth)
    packed = read(torch, job["b"], "uint8", columns, depth // 2).view(torch.int32).T.contiguous()
    weight = op(torch, "gptq_marlin_repack")(packed, depth, columns, 4, False)
    plain = read(torch, job["b_plain_scales"], "uint8", columns, depth // BLOCK).view(torch.float8_e4m3fn).to(torch.bfloat16)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    ordered = plain.T.contiguous().reshape(-1, 64)[:, order].reshape(-1, columns).to(torch.half)
    ordered = ordered.view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, columns)
    # The kernel reads scales as five bits of exponent and three of mantissa, without a sign; what is too small for that is scaled up.
    by = (448.0 / ordered.float().max()).log2().floor().exp2().item() if ordered.any() else 1.0
    wide = (ordered.float() * by).to(torch.half) * 128
    wide[wide < 2] = 0
    made = (wide.contiguous().view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()
    factor = torch.tensor([job["alpha"] * 2.0**119 / by], dtype=torch.float32, device="cuda")
    locks = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int32, device="cuda")
    return op(torch, "marlin_gemm")(
        values, out, weight, None, made, None, factor, None, locks, FLOAT4_E2M1F, rows, columns, depth, False, True, False
    )


def b12x(torch: Any, job: Job, out: Any) -> Any:
    """Both operands in FP4, by the kernels of the package b12x; it makes its output itself, so *out* is only filled from it."""
    rows, columns, depth = job["rows"], job["columns"], job["depth"]
    try:
        module = importlib.import_module("b12x.gemm.blockscaled")
    except ImportError as error:
        raise Absent(f"b12x is not installed in this environment ({error})") from error
    return out.copy_(module.mm_nvfp4(
        read(torch, job["a"], "uint8", rows, depth // 2), scales(torch, job["a_scales"], rows, depth // BLOCK),
        read(torch, job["b"], "uint8", columns, depth // 2), scales(torch, job["b_scales"], columns, depth // BLOCK),
        torch.tensor([job["alpha"]], dtype=torch.float32, device="cuda"), out_dtype=torch.bfloat16,
    ))  # fmt: skip


def emulation(torch: Any, job: Job, out: Any) -> Any:
    """vLLM's own emulation: quantised and dequantised by torch, multiplied in bfloat16."""
    rows, columns, depth = job["rows"], job["columns"], job["depth"]
    try:
        module = importlib.import_module("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    except ImportError as error:
        raise Absent(f"vllm's emulation cannot be imported here ({error})") from error
    one = torch.ones(1, dtype=torch.float32, device="cuda")
    product = module.run_nvfp4_emulations(
        read(torch, job["activations"], "bfloat16", rows, depth), one, read(torch, job["b"], "uint8", columns, depth // 2),
        scales(torch, job["b_scales"], columns, depth // BLOCK), one,
    )  # fmt: skip
    return out.copy_(product * job["alpha"])


BACKENDS: dict[str, Callable[[Any, Job, Any], Any]] = {"cutlass": cutlass, "marlin": marlin, "b12x": b12x, "emulation": emulation}


def product(torch: Any, job: Job) -> None:
    """Run a product as often as the job says, each time into poisoned memory; write all of that memory each time."""
    rows, columns = job["rows"], job["columns"]
    with open(job["out"], "wb") as sink:  # noqa: PTH123
        for _ in range(job["repeats"]):
            room = torch.full((rows * columns + 2 * GUARD,), POISON, dtype=torch.int16, device="cuda")
            out = room[GUARD:-GUARD].view(torch.bfloat16).view(rows, columns)
            got = BACKENDS[job["op"]](torch, job, out)
            torch.cuda.synchronize()
            if got.data_ptr() != out.data_ptr():
                out.copy_(got)
            sink.write(room.cpu().numpy().tobytes())


def main() -> int:
    """Run the jobs of the file that the command line names."""
    asked = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise Absent("torch sees no GPU")
        for path in libraries(asked["libraries"]):
            torch.ops.load_library(path)
    except (Absent, ImportError, OSError) as error:
        say(absent=str(error)[:400])
        return 0
    say(torch=torch.__version__)
    for job in asked["jobs"]:
        say(begins=job["name"])
        try:
            (quantise if job["op"] == "quantise" else product)(torch, job)
        except Absent as error:
            say(name=job["name"], absent=str(error)[:400])
        except Exception as error:  # whatever an op throws is its answer
            words = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            if not REFUSALS.search(words):
                say(name=job["name"], broken=words)
                return 0  # a CUDA error stays with the process
            say(name=job["name"], refused=words)
        else:
            say(name=job["name"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
