"""Times converters bf16 → NVFP4 against a copy on the GPU at hand, in turns in one run: ours, and what a user would take instead."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.gates.core.errors import GateError
from sparkwright.gates.device import gpu
from sparkwright.gates.device.gpu import Absent, Gpu
from sparkwright.gates.device.probe import SOURCES

#: What the project has promised: the share of the copy's bandwidth, and the milliseconds of a sweep over 2^32 inputs.
SHARE, SWEEP = 0.95, 50.0


class Line(msgspec.Struct, frozen=True):
    """
    A contestant: milliseconds (median, fastest and slowest round), GB/s of all that it reads and writes.

    Attributes:
        words_wrong: Of its output, in words of eight codes or four scales, against the definition.
        wrong, wrong_nan: Of all 2^32 FP32 inputs, against CUDA's header in software: numbers, NaNs.
    """

    name: str
    ms: float
    fastest_ms: float
    slowest_ms: float
    gb_s: float
    words_wrong: int = 0
    wrong: int = 0
    wrong_nan: int = 0
    sweep_ms: float = 0.0


def _compiled(cuda: Path, found: Gpu, folder: Path) -> Path:
    libraries = [f"-L{cuda / name}" for name in ("lib64", "lib") if (cuda / name).is_dir()]
    arch = f"arch=compute_{found.target},code=sm_{found.target}"
    command = [str(cuda / "bin" / "nvcc"), "-O3", "-std=c++17", f"-I{cuda / 'include'}", "-gencode", arch, *libraries, "-cudart", "static"]
    subprocess.run([*command, "-o", str(folder / "bench"), str(SOURCES / "bench.cu")], check=True)
    return folder / "bench"


def _measured(options: argparse.Namespace) -> tuple[Gpu, int, list[Line]]:
    nvcc = shutil.which("nvcc")
    cuda = options.cuda or (Path(nvcc).resolve().parents[1] if nvcc else None)
    if cuda is None:
        raise CommandError("tool-missing", "nvcc is not on the PATH; name the toolkit with --cuda.")
    with tempfile.TemporaryDirectory() as name:
        found = gpu.ask(Path(name))
        if isinstance(found, Absent):
            raise GateError("gate-not-run", f"There is no GPU to measure: {found.absent}.")
        # A value takes 7.7 bytes: the input, its copy, what a contestant writes and what it should.
        values = min(31, int(found.memory * 0.8 / 7.7).bit_length() - 1)
        program = _compiled(cuda, found, Path(name))
        out = subprocess.run([str(program), str(values), str(options.runs)], check=True, stdout=subprocess.PIPE, text=True).stdout
    return found, values, [msgspec.json.decode(line, type=Line) for line in out.splitlines() if '"name"' in line]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cuda", type=Path, help="the toolkit; by default that of the nvcc on the PATH")
    options = parser.parse_args()
    console.json = options.json
    try:
        found, values, lines = _measured(options)
    except SparkwrightError as error:
        console.failure(error)
        raise SystemExit(error.exit_code) from error
    copy = next(line.gb_s for line in lines if line.name == "copy")
    rows = []
    for line in lines:
        times = [f"{ms:.3f}" for ms in (line.fastest_ms, line.ms, line.slowest_ms)]
        swept = [""] * 3 if line.name == "copy" else [str(line.wrong), str(line.wrong_nan), f"{line.sweep_ms:.2f}"]
        rows.append([line.name, *times, f"{line.gb_s:.0f}", f"{100 * line.gb_s / copy:.1f} %", *swept])
    columns = ["", ">min ms", ">median ms", ">max ms", ">GB/s", ">of the copy", ">wrong of 2^32", ">wrong NaNs", ">sweep ms"]
    console.table(f"bf16 → NVFP4, 2^{values} values, {options.runs} rounds in turns ({found})", columns, rows, result=True)
    ours = next(line for line in lines if line.name == "ours")
    kept = ours.gb_s >= SHARE * copy and ours.sweep_ms <= SWEEP and not (ours.wrong or ours.wrong_nan or ours.words_wrong)
    promised = f"{100 * SHARE:.0f} % of the copy, 2^32 inputs in {SWEEP:g} ms, none wrong"
    console.result(f"promised: {promised}; ours: {100 * ours.gb_s / copy:.1f} %, {ours.sweep_ms:.1f} ms, {'kept' if kept else 'MISSED'}")
    console.document({"gpu": msgspec.to_builtins(found), "log2_values": values, "contestants": msgspec.to_builtins(lines)})
    console.finish()


if __name__ == "__main__":
    main()
