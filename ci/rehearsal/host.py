"""
Set up a rehearsal on a host without a network, and run its commands: the standard library alone.

    python3 host.py setup ROOT                check the host, and make the environments of ROOT
    python3 host.py run ROOT [NAME ...]       run the commands that have no result yet, or of these
                                              only the named and what they come after
    python3 host.py wait ROOT SECONDS [NAME ...]
                                              wait for them or the named, and show all states
    python3 host.py collect ROOT FILE         pack the results

ROOT holds what `pack.sh` packed, with ``plan.json``. A command starts when all commands in
``after`` have ended; one with ``alone`` runs by itself on its GPU. Its result is
``results/NAME.json``; a command without a result, for example after a kill, is run again.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Results that come back, as globs in ROOT: verdicts and states whole, logs and records if small.
EVIDENCE = ("results/*.json", "dist/*.json*", "dist/*.html", "mutants/*/*.json*")
RECORDS = ("results/*.log", "stores/*/logs/**/*")
#: Bytes of a record, and of all of them.
LARGEST_RECORD, LARGEST_TOTAL = 400_000, 8_000_000

#: The variable that marks the processes of a command.
MARK = "SPARKWRIGHT_COMMAND"
#: Seconds in which a command that is late may end its servers.
GRACE = 30
#: Seconds to wait for processes that were killed.
PATIENCE = 60

#: Prints torch's version and the first GPU's capability, without local labels, the number of GPUs,
#: and torch's folder.
PROBE = """
import pathlib, torch
major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
version, folder = torch.__version__.partition("+")[0], pathlib.Path(torch.__file__).parents[1]
print(version, f"{major}.{minor}", torch.cuda.device_count(), folder)
"""


def read_plan(root: Path) -> dict[str, Any]:
    """Return the plan of the folder *root*; what a line of YAML leaves out has its default."""
    plan: dict[str, Any] = json.loads((root / "plan.json").read_bytes())
    plan.setdefault("own_torch", "")
    for environment in plan["environments"].values():
        for key in ("wheel", "folders", "host"):
            environment.setdefault(key, ())
    for command in plan["commands"]:
        command.update({"after": (), "gpu": 0, "alone": False, **command})
    return plan


def check_python(plan: Mapping[str, Any]) -> None:
    """Refuse a host with another Python or machine than the packages are for."""
    python = f"{sysconfig.get_python_version()} {os.uname().machine}"
    if python != plan["python"]:
        raise SystemExit(f"error: the packages are for Python {plan['python']}, here is {python}")


def check_gpu(plan: Mapping[str, Any], root: Path) -> tuple[int, list[str]]:
    """
    Refuse a host with another torch or GPU than the wheels are for.

    The torch is that of *root* if it brings one. Return how many GPUs the
    host has, and the folders of its packages, that of its torch first.
    """
    own = plan["own_torch"]
    folders = [str(root / own)] if own else []
    paths = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    words = ended.stdout.strip().split(maxsplit=3)
    torch, capability, count, *folder = words if len(words) == 4 else ("none", "0.0", "0")
    if torch != plan["torch"]:
        why = "".join(ended.stderr.strip().splitlines()[-1:])
        here = f"here is {torch} ({why})"
        raise SystemExit(f"error: the wheels are for torch {plan['torch']}, {here}")
    if capability != plan["capability"]:
        gpu = f"SM {capability}" if capability != "0.0" else "no GPU"
        raise SystemExit(f"error: the wheels are for SM {plan['capability']}, here is {gpu}")
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    host = [*(folder if not own else []), sysconfig.get_path("purelib"), *packages]
    return int(count), list(dict.fromkeys(host))


def make_environment(
    root: Path, name: str, environment: Mapping[str, Any], host: list[str]
) -> None:
    """
    Make the environment *name*: the files of its wheel, then folders of *root*, then the
    packages that it names of the folders *host*, or all of them.
    """
    folder = root / "environments" / name
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    paths = [str(root / folder) for folder in environment["folders"]]
    globs = environment["host"]
    packages = (path for each in reversed(host) for glob in globs for path in Path(each).glob(glob))
    for path in {path.name: path for path in packages}.values():
        (site / path.name).symlink_to(path)
    # A first start would compile thousands of files one by one.
    compileall = [sys.executable, "-m", "compileall", "-q", "-j0", str(site), *paths]
    paths += [] if globs else host
    (site / "rehearsal.pth").write_text("\n".join(paths) + "\n", "utf-8")
    if environment["wheel"]:
        (wheel,) = root.glob(environment["wheel"])
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    subprocess.run(compileall, check=False, stdout=subprocess.DEVNULL)


def setup(root: Path) -> None:
    """Check the host, and make the environments of *root*; what was cut off is made again."""
    plan = read_plan(root)
    check_python(plan)
    _, host = check_gpu(plan, root)
    for name, environment in plan["environments"].items():
        make_environment(root, name, environment, host)
    # Created last: it marks the setup as complete.
    (root / "results").mkdir(exist_ok=True)


def end_processes(mark: str) -> bool:
    """
    Kill every process that was started with *mark*, in sessions of their own, too.

    Return whether all are gone; one that waits for a hung driver cannot be ended.
    """
    entry, until = f"{MARK}={mark}".encode(), time.time() + PATIENCE
    while time.time() < until:
        running = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if entry in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    running.append(path)
        if not running:
            return True
        time.sleep(0.05)
    return False


class Command:
    """
    A command that runs, with all that it starts in a session of its own.

    It sees the GPU *gpu* alone, and runs on the processors *cpus*.
    """

    def __init__(self, root: Path, plan: Mapping[str, Any], gpu: int, cpus: Sequence[int]) -> None:
        self.name, self.alone, self.gpu = plan["name"], plan["alone"], gpu
        self._mark, self._result = f"{root}:{self.name}", root / "results" / f"{self.name}.json"
        end_processes(self._mark)
        self._began, self._seconds = time.time(), plan["seconds"]
        # Numbers of torch are those among the GPUs that this script may use.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        limits = ["taskset", "--cpu-list", ",".join(map(str, cpus))]
        limits += ["timeout", f"--kill-after={GRACE}", str(self._seconds)]
        with self._result.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [*limits, *(word.replace("{root}", str(root)) for word in plan["words"])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=root,
                # Else setproctitle, which vLLM uses, would write over the mark.
                env={
                    **os.environ,
                    MARK: self._mark,
                    "SPT_NOENV": "1",
                    "CUDA_VISIBLE_DEVICES": visible[gpu] if visible[0] else str(gpu),
                },
                start_new_session=True,
            )

    def ended(self) -> bool:
        """Return whether it has ended, with its result written and its servers ended."""
        status, seconds = self._process.poll(), time.time() - self._began
        if status is None:
            return False
        record = {
            "name": self.name,
            "status": status,
            "late": seconds >= self._seconds,
            "gone": end_processes(self._mark),
        }
        temporary = self._result.with_suffix(".part")
        temporary.write_text(json.dumps({**record, "seconds": round(seconds, 1)}), "utf-8")
        temporary.replace(self._result)
        return True


def run(root: Path, names: Sequence[str] = ()) -> None:
    """
    Run every command that has no result, or those of *names* and all that they come after.

    Commands for another GPU than the host has run on one that it has. Each GPU in use has its share
    of the processors, so that a measurement on one is not disturbed by the other's.
    """
    plan = read_plan(root)
    if not (root / "results").is_dir():
        raise SystemExit(f"error: {root} was not set up to its end; run `setup` again")
    with (root / "results" / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"error: commands of {root} run already") from None
        check_python(plan)
        count, _ = check_gpu(plan, root)
        gpus = {command["name"]: command["gpu"] % count for command in plan["commands"]}
        processors = sorted(os.sched_getaffinity(0))
        share = max(1, len(processors) // (1 + max(gpus.values(), default=0)))
        done = {path.stem for path in (root / "results").glob("*.json")}
        chosen = set(names or gpus)
        if unknown := sorted(chosen - set(gpus)):
            raise SystemExit(f"error: no command {', '.join(unknown)}; it has {', '.join(gpus)}")
        for command in reversed(plan["commands"]):
            chosen |= set(command["after"] if command["name"] in chosen else ())
        waiting = [command for command in plan["commands"] if command["name"] in chosen - done]
        running = list[Command]()
        while waiting or running:
            for command in waiting[:]:
                gpu = gpus[command["name"]]
                beside = [other for other in running if other.gpu == gpu]
                free = not any(other.alone for other in beside)
                if command["alone"]:
                    first = next(other for other in waiting if gpus[other["name"]] == gpu)
                    free = not beside and command is first
                if free and done.issuperset(command["after"]):
                    waiting.remove(command)
                    cpus = processors[gpu * share :][:share] or processors
                    running.append(Command(root, command, gpu, cpus))
            ended = [command for command in running if command.ended()]
            done |= {command.name for command in ended}
            running = [command for command in running if command not in ended]
            time.sleep(0.2)


def wait(root: Path, seconds: float, names: Sequence[str] = ()) -> None:
    """Wait until each of *names*, or every command, has a result; print the states of all."""
    commands = [command["name"] for command in read_plan(root)["commands"]]
    results, until = root / "results", time.time() + seconds
    awaited = [results / f"{name}.json" for name in names or commands]
    while time.time() < until and not all(path.exists() for path in awaited):
        time.sleep(1)
    for name in commands:
        result, log = results / f"{name}.json", results / f"{name}.log"
        text = "began" if log.exists() else "waits"
        text = result.read_text() if result.exists() else text
        os.write(1, f"{name}: {text}\n".encode())


def shorten(path: Path, limit: int) -> bytes:
    """Return the file at *path*; beginning and end of a larger log, nothing of another file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if size <= limit:
            return stream.read(limit)
        if path.suffix != ".log":
            return b""
        head = stream.read(limit // 2)
        stream.seek(size - limit // 2)
        return head + f"\n... {size - limit} bytes are cut here ...\n".encode() + stream.read()


def collect(root: Path, file: Path) -> None:
    """
    Pack the results into *file*.

    Evidence is whole. Records are cut to `LARGEST_RECORD`, or to their equal share of
    `LARGEST_TOTAL` if that is less; ``cut.json`` states name, bytes and packed bytes.
    """
    evidence, records = (
        {path for glob in globs for path in root.glob(glob) if path.is_file()}
        for globs in (EVIDENCE, RECORDS)
    )
    limit = min(LARGEST_RECORD, LARGEST_TOTAL // max(1, len(records)))
    contents = {path: path.read_bytes() for path in sorted(evidence)}
    contents |= {path: shorten(path, limit) for path in sorted(records)}
    cut = [
        [str(path.relative_to(root)), path.stat().st_size, len(contents[path])]
        for path in sorted(records)
        if path.stat().st_size > limit
    ]
    contents[root / "cut.json"] = json.dumps(cut, indent=1).encode()
    with tarfile.open(file, "w:gz") as archive:
        for path, data in contents.items():
            info = tarfile.TarInfo(str(path.relative_to(root)))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def main() -> None:
    """Run the command."""
    match sys.argv[1:]:
        case ["setup", root]:
            setup(Path(root).absolute())
        case ["run", root, *names]:
            run(Path(root).absolute(), names)
        case ["wait", root, seconds, *names]:
            wait(Path(root), float(seconds), names)
        case ["collect", root, file]:
            collect(Path(root), Path(file))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
