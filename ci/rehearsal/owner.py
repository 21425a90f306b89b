"""
Do on this host what a Spark's owner does with a release, and say what it takes:
owner.py ROOT PYTHON-ENVIRONMENT MUTANT CANARY RECIPE MODEL [WORDS…].

ROOT is that of host.py. The environments, one sound and one with a fault, become releases such as
`install` leaves them, with the gate's CANARY. Then: doctor, with the GPU under load; serve, list
and doctor beside it; the canary alone, and what it costs others' throughput; the canary of the
server with the fault. WORDS are further arguments of ``serve``. Exits with 1 if the canary is not
green for the sound server, or is for the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec

from sparkwright.client.environment import CANARY, LISTING, MARKER, Marker, describe

URL, PATIENCE = "http://127.0.0.1:8143", 400
#: Clients that ask at once, the tokens of an answer, and the seconds of a measurement.
CLIENTS, TOKENS, SECONDS = 8, 64, 20.0


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201


def release(root: Path, environment: Path, canary: Path) -> Path:
    """Return a folder of installations that has *environment* as its only release."""
    prefix = root / "prefix" / environment.name
    shutil.rmtree(prefix, ignore_errors=True)
    folder = prefix / "releases" / "2026.11.1"
    shutil.copytree(environment, folder, symlinks=True, copy_function=os.link)
    shutil.copy(canary, folder / CANARY)
    (wheel,) = (root / "dist").glob("*.whl")
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    listing = msgspec.json.encode(describe(folder, contents=False))
    (folder / LISTING).write_bytes(listing)
    marker = Marker(
        name=folder.name, folder=str(folder), index="rehearsal", python=sys.version.split()[0],
        key=digest, packages={"vllm": "0.33.0"}, channel="candidate", wheels={"vllm": digest},
        listing=hashlib.sha256(listing).hexdigest(),
    )  # fmt: skip
    (folder / MARKER).write_bytes(msgspec.json.encode(marker))
    (prefix / "current").symlink_to("releases/2026.11.1")
    return prefix


def sparkwright(prefix: Path, *words: str) -> list[str]:
    """Return the command of *words* with the installations in *prefix*."""
    own = ["env", f"SPARKWRIGHT_PREFIX={prefix}", "COLUMNS=100", sys.executable, "-P"]
    return [*own, "-m", "sparkwright", *words]


def run(prefix: Path, *words: str) -> int:
    """Run and show a command of sparkwright; return its exit status."""
    say(f"\n$ sparkwright {' '.join(words)}")
    began = time.monotonic()
    status = subprocess.run(sparkwright(prefix, *words), check=False, stdin=subprocess.DEVNULL)
    say(f"[status {status.returncode}, {time.monotonic() - began:.1f} s]")
    return status.returncode


def serve(root: Path, prefix: Path) -> subprocess.Popen[bytes]:
    """Start a server, and return when it answers, or has ended; one that is late is ended."""
    recipe, model, *words = sys.argv[5:]
    port = URL.rpartition(":")[2]
    plain = ["--root", str(root / "program"), "--model", model, "--port", port]
    command = sparkwright(prefix, "serve", recipe, *plain, *words)
    began, log = time.monotonic(), prefix / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    health = sparkwright(prefix, "serve", "--health", URL)
    while server.poll() is None and time.monotonic() < began + PATIENCE:
        if not subprocess.run(health, check=False, capture_output=True).returncode:
            say(f"serves after {time.monotonic() - began:.0f} s")
            return server
        time.sleep(1)
    say(log.read_text("utf-8", "replace")[-4000:])
    server.kill()
    server.wait()
    return server


def load(name: str) -> float:
    """Return the tokens a second of `CLIENTS`."""
    end, counts = time.monotonic() + SECONDS, [0] * CLIENTS
    question: dict[str, Any] = {"model": name, "max_tokens": TOKENS, "ignore_eos": True}

    def client(number: int) -> None:
        while time.monotonic() < end:
            body = json.dumps({**question, "prompt": f"{number}+{counts[number]}="}).encode()
            ask = Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})  # noqa: S310
            with urlopen(ask, timeout=300) as answer:  # noqa: S310
                counts[number] += json.load(answer)["usage"]["completion_tokens"]

    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    return sum(counts) / (time.monotonic() - began)


def ask_canary(prefix: Path, deep: tuple[str, ...], over: threading.Event) -> int:
    """Ask for the canary again and again until *over* is set; return how often."""
    rounds = 0
    while not over.is_set():
        subprocess.run(sparkwright(prefix, *deep), check=False, capture_output=True)
        rounds += 1
    return rounds


def cost(prefix: Path, name: str, deep: tuple[str, ...]) -> None:
    """Print the throughput of others without the canary, and with one after the other."""
    load(name)
    for _ in range(2):
        alone, over = load(name), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            rounds = pool.submit(ask_canary, prefix, deep, over)
            beside = load(name)
            over.set()
        share = beside / alone - 1
        asked = f"{rounds.result()} canaries"
        say(f"{alone:,.0f} tok/s; {beside:,.0f} beside {asked}: {share:+.1%}")


def main() -> int:
    """Do it in order; return 1 if the canary is wrong."""
    root, mutant, canary = Path(sys.argv[1]), Path(sys.argv[3]), Path(sys.argv[4])
    sound = release(root, Path(sys.argv[2]), canary)
    program = ("--root", str(root / "program"))
    deep = ("serve", "--health", URL, "--deep", "--patience", "60", *program)
    statuses = []
    run(sound, "doctor", "--prefix", str(sound))
    for prefix in (sound, release(root, mutant, canary)):
        server = serve(root, prefix)
        if server.poll() is None:
            run(prefix, "serve", "--list")
            run(prefix, "doctor", "--prefix", str(prefix))
            statuses.append(run(prefix, *deep))
            if prefix == sound:
                cost(prefix, sys.argv[5], deep)
        server.terminate()
        server.wait()
    say(f"canary: status {statuses}, of the sound server and of the one with a fault")
    return int(len(statuses) < 2 or statuses[0] != 0 or statuses[1] != 1)


if __name__ == "__main__":
    sys.exit(main())
