"""
A stand-in for a server that takes memory: of a file that stands for ``/proc/meminfo``, or real memory.

``python eater.py FOLDER RATE FLOOR`` takes RATE bytes a second of the ``meminfo`` in FOLDER until it is killed; with ``real`` in place of a folder
it takes pages of this machine. It starts the guard as `serve` does, and then a child takes the memory, as vLLM's engine does.
"""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

GIB = 2**30
#: Of the machine that a file stands for: a Spark's memory, and what is available at the start.
TOTAL, AVAILABLE = 121.7 * GIB, 40.0 * GIB


def write(folder: Path, available: float, free: float | None = None) -> None:
    """Write the ``meminfo`` of a machine; a reader sees one state or the other."""
    rows = {"MemTotal": TOTAL, "MemFree": available if free is None else free, "MemAvailable": available}
    text = "".join(f"{name}:{round(max(0.0, size) / 1024):>16} kB\n" for name, size in rows.items())
    file = os.open(folder / "meminfo", os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, text.encode(), 0)
    os.close(file)


def take(folder: Path, rate: float) -> None:
    """Take *rate* bytes a second of the file, and write how much was left; nothing for the time in which this process had no turn."""
    words = (folder / "meminfo").read_text().split()
    least = 1024.0 * int(words[words.index("MemAvailable:") + 1])
    file, last = os.open(folder / "meminfo", os.O_WRONLY), time.monotonic()
    log = os.open(folder / "least", os.O_WRONLY | os.O_CREAT)
    while least > 0:
        now = time.monotonic()
        least, last = least - rate * min(now - last, 0.005), now
        sizes = (TOTAL, max(0.0, least), max(0.0, least))
        names = ("MemTotal", "MemFree", "MemAvailable")
        rows = (f"{name}:{round(size / 1024):>16} kB\n" for name, size in zip(names, sizes, strict=True))
        os.pwrite(file, "".join(rows).encode(), 0)
        os.pwrite(log, f"{least / GIB:9.4f}\n".encode(), 0)
        time.sleep(1e-4)


def take_real(rate: float) -> None:
    """Take *rate* bytes of this machine's memory a second, page by page."""
    step, begin, held = 16 << 20, time.monotonic(), []
    while True:
        block = mmap.mmap(-1, step)
        for offset in range(0, step, mmap.PAGESIZE):
            block[offset] = 1
        held.append(block)
        time.sleep(max(0.0, begin + len(held) * step / rate - time.monotonic()))


def main() -> None:
    place, rate, floor, *role = sys.argv[1:]
    if role:
        take_real(float(rate)) if place == "real" else take(Path(place), float(rate))
        return
    from sparkwright.serving import guard

    words = [str(os.getpid()), str(2 * int(floor)), str(int(floor) + guard.SLACK), os.environ["RECORD"], "/nonexistent"]
    words.append("/proc" if place == "real" else place)
    subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, *words], start_new_session=True, stdin=subprocess.DEVNULL)
    time.sleep(0.5)
    subprocess.run([sys.executable, __file__, place, rate, floor, "engine"], check=False)
    time.sleep(10)  # a guard kills this process, too


if __name__ == "__main__":
    main()
