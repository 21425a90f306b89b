"""
Set up a bundle on a host without a network, and run its commands: the standard library alone.

    bundle_host.py setup BUNDLE ROOT     check the host and every file, and unpack them into ROOT
    bundle_host.py run ROOT              run the commands that have no result yet
    bundle_host.py wait ROOT SECONDS     wait for them, and show their states
    bundle_host.py collect ROOT FILE     pack the results

BUNDLE holds ``bundle.json`` and the parts. `setup` ends with status 1 and a reference if a part is
missing or changed (``bundle-incomplete``), if torch is another (``host-other-torch``) or the GPU
(``gpu-foreign``). A command runs when those that it comes after have ended, and one that is
``alone`` while nothing else runs. Its result is ``results/NAME.json``; without one, as after a
kill, it runs again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Bytes that are read at a time.
CHUNK = 1 << 24
#: Results that come back, as globs in ROOT; of a log, only so many bytes of its end.
RESULTS = (
    "results/*",
    "dist/*.json*",
    "mutants/*/*.json*",
    "reference/*/*",
    "store/logs/**/*",
    "mutants/*/store/logs/**/*",
)
LOG_BYTES = 400_000

#: Prints torch's version and the first GPU's capability, without local labels.
PROBE = """
import torch
major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
print(torch.__version__.partition("+")[0], f"{major}.{minor}")
"""


def refuse(reference: str, what: str) -> None:
    """End the program because of *what*."""
    raise SystemExit(f"error: {reference}: {what}")


def check_host(about: Mapping[str, str]) -> None:
    """Refuse a host with another torch or another GPU than the bundle was made for."""
    command = [sys.executable, "-c", PROBE]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    torch, capability = (*ended.stdout.split(), "none", "0.0")[:2]
    if torch != about["torch"]:
        refuse("host-other-torch", f"the bundle is for torch {about['torch']}, here is {torch}")
    if capability != about["capability"]:
        gpu = f"SM {capability}" if capability != "0.0" else "no GPU"
        refuse("gpu-foreign", f"the bundle is for SM {about['capability']}, here is {gpu}")


def pieces(
    entry: Mapping[str, Any], parts: list[tuple[int, Path]], files: Mapping[str, Path]
) -> Iterator[bytes]:
    """Yield the bytes of *entry*: ranges of the *parts*, one after another, and of earlier files."""
    for source, first, length in entry["pieces"]:
        where = [(0, files[source])] if source else parts
        offset, end = first, first + length
        while offset < end:
            start, path = next(part for part in reversed(where) if part[0] <= offset)
            with path.open("rb") as stream:
                stream.seek(offset - start)
                data = stream.read(min(CHUNK, end - offset))
            if not data:
                refuse("bundle-incomplete", f"{path.name} is too short")
            yield data
            offset += len(data)


def unpack(bundle: Path, about: Mapping[str, Any], root: Path) -> None:
    """Check the parts in *bundle* and write its files into *root*, each with its sha256."""
    parts, start = [], 0
    for name, sha256, size in about["parts"]:
        path = bundle / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            refuse("bundle-incomplete", f"{name} is missing or changed; copy it again")
        parts.append((start, path))
        start += size
    files = {entry["name"]: root / entry["name"] for entry in about["files"]}
    for entry in about["files"]:
        path, digest = files[entry["name"]], hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as sink:
            for data in pieces(entry, parts, files):
                sink.write(data)
                digest.update(data)
        if digest.hexdigest() != entry["sha256"]:
            refuse("bundle-incomplete", f"{entry['name']} has other bytes than were packed")
        if entry["unpack"]:
            with tarfile.open(path) as archive:
                archive.extractall(root / entry["unpack"], filter="data")
            path.unlink()


def make_environment(root: Path, name: str, about: Mapping[str, Any]) -> None:
    """
    Make the environment *name*: the files of its wheel, then folders of the bundle, then the
    packages of the host that it names, or all of them.
    """
    folder = root / "environments" / name
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    lines, host = [str(root / each) for each in about["folders"]], sysconfig.get_path("purelib")
    for path in (path for glob in about["host"] for path in Path(host).glob(glob)):
        (site / path.name).symlink_to(path)
    paths = lines if about["host"] else [*lines, host]
    (site / "bundle.pth").write_text("\n".join(paths) + "\n", "utf-8")
    if about["wheel"]:
        (wheel,) = root.glob(about["wheel"])
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    # A first start would compile thousands of files one by one.
    command = [sys.executable, "-m", "compileall", "-q", "-j0", str(site), *lines]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def setup(bundle: Path, root: Path) -> None:
    """Set the bundle up in *root*."""
    about = json.loads((bundle / "bundle.json").read_text("utf-8"))
    check_host(about)
    unpack(bundle, about, root)
    (root / "results").mkdir(exist_ok=True)
    for name, environment in about["environments"].items():
        make_environment(root, name, environment)
    (root / "bundle.json").write_text(json.dumps(about), "utf-8")


class Command:
    """A command of the bundle that runs, with all that it starts in a session of its own."""

    def __init__(self, root: Path, about: Mapping[str, Any]) -> None:
        self.name, self.alone = about["name"], about["alone"]
        self._result = root / "results" / f"{self.name}.json"
        self._began, self._until = time.time(), time.time() + about["seconds"]
        words = [word.replace("{root}", str(root)) for word in about["words"]]
        with (root / "results" / f"{self.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, cwd=root, start_new_session=True
            )

    def ended(self) -> bool:
        """Return whether it has ended, with its result written; one that is late is ended."""
        late = time.time() > self._until
        if self._process.poll() is None and not late:
            return False
        if late and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        record = {
            "name": self.name,
            "status": self._process.wait(),
            "late": late,
            "seconds": round(time.time() - self._began, 1),
        }
        self._result.write_text(json.dumps(record), "utf-8")
        return True


def run(root: Path) -> None:
    """Run every command that has no result."""
    about = json.loads((root / "bundle.json").read_text("utf-8"))
    names = [each["name"] for each in about["commands"]]
    done = {name for name in names if (root / "results" / f"{name}.json").exists()}
    waiting = [each for each in about["commands"] if each["name"] not in done]
    running: list[Command] = []
    while waiting or running:
        for each in waiting[:]:
            first = each is waiting[0]
            blocked = any(one.alone for one in running) or (
                each["alone"] and (running or not first)
            )
            if done.issuperset(each["after"]) and not blocked:
                waiting.remove(each)
                running.append(Command(root, each))
        over = [one for one in running if one.ended()]
        done |= {one.name for one in over}
        running = [one for one in running if one not in over]
        time.sleep(0.2)


def wait(root: Path, seconds: float) -> None:
    """Wait until every command has a result, at most *seconds*, and print all states."""
    names = [each["name"] for each in json.loads((root / "bundle.json").read_text())["commands"]]
    until = time.time() + seconds
    while time.time() < until:
        if all((root / "results" / f"{name}.json").exists() for name in names):
            break
        time.sleep(1)
    for name in names:
        result, log = (root / "results" / f"{name}{suffix}" for suffix in (".json", ".log"))
        text = result.read_text() if result.exists() else "runs" if log.exists() else "waits"
        os.write(1, f"{name}: {text}\n".encode())


def collect(root: Path, file: Path) -> None:
    """Pack the results into *file*."""
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted({path for glob in RESULTS for path in root.glob(glob)}):
            if path.is_file():
                data = path.read_bytes()
                if path.suffix == ".log" and len(data) > LOG_BYTES:
                    data = data[: LOG_BYTES // 2] + b"\n...\n" + data[-LOG_BYTES // 2 :]
                info = tarfile.TarInfo(str(path.relative_to(root)))
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def main() -> None:
    """Run the command."""
    paths = list(map(Path, sys.argv[2:]))
    if sys.argv[1] == "setup":
        setup(*paths)
    elif sys.argv[1] == "run":
        run(paths[0])
    elif sys.argv[1] == "wait":
        wait(paths[0], float(sys.argv[3]))
    else:
        collect(*paths)


if __name__ == "__main__":
    main()
