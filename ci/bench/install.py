"""
Installing a set: the first time, and when there is nothing to do, against uv and pip with the same hashed addresses from the same host.

The set is made up in the size of a real one: files in many packages, and one wheel that cannot be compressed. Ours also checks signature,
serial, expiry and all evidence. Exits with 1 when a run with nothing to do takes longer than promised.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.tags import sys_tags
from uv import find_uv_bin

import measure
from sparkwright.core.console import console
from sparkwright.release import sets
from sparkwright.release.environment import Environment
from sparkwright.release.manifest import places

sys.path.insert(0, str(measure.ROOT))

from tests.release import world
from tests.support import wheels

#: Promised: seconds of an installation of a set that is there already.
NOTHING = 2.0


def made(folder: Path, host: world.Host, files: int, packages: int, megabytes: int) -> world.Index:
    """Return an index with one release of *files* files in *packages* packages, and one wheel of *megabytes*."""
    ours = wheels.release(folder / "ours", requires=["torch==2.14.0"])
    others = [wheels.plain(folder, "torch", "2.14.0", size=megabytes * 1_000_000)]
    for number in range(packages):
        inner = {f"package_{number}/part{place // 100}/module{place}.py": b"value = 1\n" * 40 for place in range(files // packages)}
        others.append(wheels.plain(folder, f"package-{number}", "1.0", files=inner))
    index = host.bare()
    index.add(ours, others)
    shutil.rmtree(folder / "ours")
    return index


def sides(user: world.User, index: world.Index, asked: Path) -> Mapping[str, list[str]]:
    """Return the command line of each side."""
    python, words = (
        str(user.venv / "bin" / "python"),
        [str(one) for one in user.words("install", "--index", index.url, "--key", index.public)],
    )
    uv = [find_uv_bin(), "pip", "install", "--quiet", "--no-config", "--python", python, "--no-deps", "--require-hashes"]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--disable-pip-version-check",
    ]
    return {
        "sparkwright install": [sys.executable, "-m", "sparkwright", *words],
        "uv pip install": [*uv, "--cache-dir", str(user.folder / "uv"), "-r", str(asked)],
        "pip install": [*pip, "--cache-dir", str(user.folder / "pip"), "-r", str(asked)],
    }


def requirements(index: world.Index) -> str:
    """Return the set as hashed addresses."""
    [entry] = index.manifest.entries
    lock = sets.read(index.path(places.lock(entry.release, wheels.MACHINE)).read_bytes(), "the lock")
    here = Environment(Path(sys.prefix), Path(sys.prefix), sys.version_info[:2], "", platform.python_version())
    chosen = sets.select(lock, list(sys_tags()), here.markers)
    return "".join(f"{one.name} @ {one.url} --hash=sha256:{one.sha256}\n" for one in chosen)


def timed(command: list[str], env: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env={**os.environ, **env}, check=True, capture_output=True)
    return time.perf_counter() - began


def compared(folder: Path, index: world.Index, runs: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of each side, in turns: into a new environment with nothing kept, and once more."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    asked = folder / "requirements.txt"
    asked.write_text(requirements(index))
    for run in range(runs):
        for name in ("sparkwright install", "uv pip install", "pip install"):
            user = world.User(folder / f"{name.split()[0]}{run}")
            first, again = found.setdefault(name, ([], []))
            first.append(timed(sides(user, index, asked)[name], user.env))
            again.append(timed(sides(user, index, asked)[name], user.env))
            shutil.rmtree(user.folder)
    return found


def _cells(both: tuple[list[float], list[float]], ours: tuple[float, ...]) -> Iterator[str]:
    for side, own in zip(both, ours, strict=True):
        yield from (f"{statistics.median(side):.2f}", f"{min(side):.2f}–{max(side):.2f}", f"{statistics.median(side) / own:.2f}")


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--packages", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=300, help="of the one large wheel; about five times that is written to disk")
    parser.add_argument("--scratch", type=Path, help="where everything is made")


def main() -> int:
    options = measure.arguments(__doc__ or "", more)
    console.json = options.json
    with tempfile.TemporaryDirectory(dir=options.scratch) as name, world.hosted(Path(name, "host")) as host:
        index = made(Path(name, "wheels"), host, options.files, options.packages, options.megabytes)
        found = compared(Path(name), index, options.runs)
    ours = tuple(statistics.median(side) for side in found["sparkwright install"])
    rows = [[who, *_cells(both, ours)] for who, both in found.items()]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    title = f"{options.files} files in {options.packages} packages, {options.megabytes} MB in one ({options.runs} runs; {machine})"
    console.table(title, ["", ">first s", ">range", ">times ours", ">again s", ">range", ">times ours"], rows, result=True)
    console.result(f"nothing to do: {ours[1]:.2f} s, promised {NOTHING:g}: {'kept' if ours[1] <= NOTHING else 'BROKEN'}")
    console.document(json.loads(json.dumps({"machine": machine, "seconds": found, "promised": NOTHING})))
    console.finish()
    return int(ours[1] > NOTHING)


if __name__ == "__main__":
    sys.exit(main())
