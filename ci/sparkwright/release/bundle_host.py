"""
Set up a bundle on a host without a network, and run its commands: the standard library alone.

    python3 bundle_host.py setup BUNDLE ROOT     check host and files, and unpack them into ROOT
    python3 bundle_host.py run ROOT [NAME ...]   run the commands that have no result yet, or of
                                                 these only the named and what they come after
    python3 bundle_host.py wait ROOT SECONDS [NAME ...]
                                                 wait for them or the named, and show all states
    python3 bundle_host.py collect ROOT FILE     pack the results

BUNDLE holds ``bundle.json`` and the parts. A command starts when all commands in ``after`` have
ended; one with ``alone`` runs by itself on its GPU. Its result is ``results/NAME.json``; a command
without a result, for example after a kill, is run again. A refusal ends the script with status 1.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

#: What a reference means, and what to do; `release.errors` holds them with those of the program.
REFUSALS = {
    "bundle-busy": (
        "The commands of this bundle run already, and two servers would share the GPU.",
        "Wait for them with `bundle_host.py wait`, or end that `bundle_host.py run` first.",
    ),
    "bundle-incomplete": (
        "A part or a file of the bundle is missing, or has other bytes than were packed.",
        "Copy the named part again; if that does not help, pack the bundle again.",
    ),
    "bundle-root-taken": (
        "The folder holds other files than those of this bundle.",
        "Name a new folder.",
    ),
    "bundle-unsafe": (
        "The bundle names a file outside its folder, so it was not packed by sparkwright.",
        "Do not unpack it by other means; ask who gave it to you.",
    ),
    "bundle-torch-differs": (
        "A library of vLLM is compiled for one version of torch and crashes with another.",
        "Name the wheel's version of torch in the file, add a folder with that one, and list it "
        "in the folders of each environment that has the wheel.",
    ),
    "command-unknown": (
        "The bundle has no command of that name.",
        "Take a name from the list in this message.",
    ),
    "gpu-foreign": (
        "The wheels of the bundle are for another GPU than that of this host.",
        "Take the bundle to a host with the GPU that it names, or build its wheels for this GPU.",
    ),
    "host-other-python": (
        "The packages of the bundle are compiled for one Python and one kind of machine.",
        "Run the script with the Python that the bundle names, or make the bundle for this one.",
    ),
    "host-other-torch": (
        "vLLM is compiled for one version of torch, and neither the host nor the bundle has it.",
        "Run the script with the Python whose packages hold the torch that the bundle names, or "
        "pack the bundle with a torch of its own.",
    ),
}

#: Results that come back, as globs in ROOT: verdicts and states whole, logs and records if small.
EVIDENCE = ("results/*.json", "dist/*.json*", "dist/*.html", "mutants/*/*.json*")
RECORDS = ("results/*.log", "stores/*/logs/**/*")
#: Bytes of a record, and of all of them.
LARGEST_RECORD, LARGEST_TOTAL = 400_000, 8_000_000

#: The variable that marks the processes of a command.
MARK = "SPARKWRIGHT_BUNDLE_COMMAND"
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


def refuse(reference: str, what: str) -> NoReturn:
    """End the program because of *what*."""
    means, todo = REFUSALS[reference]
    raise SystemExit(f"error: {reference}: {what}\n  {means}\n  {todo}")


def read_plan(path: Path) -> dict[str, Any]:
    """Return the plan in the file ``bundle.json`` at *path*, whose names stay in their folder."""
    try:
        plan: dict[str, Any] = json.loads(path.read_bytes())
        names = [name for name, _, _ in plan["parts"]]
        names += [command["name"] for command in plan["commands"]]
        for name, environment in plan["environments"].items():
            wheel = environment["wheel"] or name
            names += [name, wheel, *environment["folders"], *environment["host"]]
        names += [plan["own_torch"]] if plan["own_torch"] else []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        refuse("bundle-incomplete", f"{path} is not what `release bundle` writes ({error!r})")
    require_inside(names)
    return plan


def require_inside(names: Iterable[str]) -> None:
    """Refuse a bundle with a name that leaves its folder."""
    for name in names:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            refuse("bundle-unsafe", f"it names {name!r}")


def check_python(plan: Mapping[str, Any]) -> None:
    """Refuse a host with another Python or machine than the bundle was made for."""
    python = f"{sysconfig.get_python_version()} {os.uname().machine}"
    if python != plan["python"]:
        refuse("host-other-python", f"the bundle is for Python {plan['python']}, here is {python}")


def check_gpu(plan: Mapping[str, Any], root: Path) -> tuple[int, list[str]]:
    """
    Refuse a host with another torch or GPU than the bundle was made for.

    The torch is the bundle's own, unpacked in *root*, if it brings one. Return how many GPUs the
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
        what = f"the bundle is for torch {plan['torch']}, here is {torch}"
        refuse("host-other-torch", f"{what} ({why})" if why else what)
    if capability != plan["capability"]:
        gpu = f"SM {capability}" if capability != "0.0" else "no GPU"
        refuse("gpu-foreign", f"the bundle is for SM {plan['capability']}, here is {gpu}")
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    host = [*(folder if not own else []), sysconfig.get_path("purelib"), *packages]
    return int(count), list(dict.fromkeys(host))


def unpack(bundle: Path, plan: Mapping[str, Any], root: Path) -> None:
    """Check every part of *bundle*, and write its files into *root*."""
    for name, sha256, _ in plan["parts"]:
        digest = "missing"
        if (bundle / name).is_file():
            with (bundle / name).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != sha256:
            refuse("bundle-incomplete", f"the sha256 of {name} is not {sha256}: {digest}")
    root.mkdir(parents=True, exist_ok=True)
    # In one step: a half of it would be taken for a folder with other files.
    shutil.copy(bundle / "bundle.json", root / "bundle.json.part")
    (root / "bundle.json.part").replace(root / "bundle.json")
    # To cat, a hyphen alone is its standard input.
    names = [f"./{name}" for name, _, _ in plan["parts"]]
    with (
        subprocess.Popen(["cat", *names], cwd=bundle, stdout=subprocess.PIPE) as parts,
        tarfile.open(fileobj=parts.stdout, mode="r|xz") as archive,
    ):
        # Python's own filter is not in 3.11.2, which Debian 12 has.
        archive.extraction_filter = lambda member, _: member
        for member in archive:
            require_inside([member.name])
            if not (member.isfile() or member.isdir()):
                refuse("bundle-unsafe", f"{member.name} is no file")
            archive.extract(member, root)


def make_environment(
    root: Path, name: str, environment: Mapping[str, Any], host: list[str]
) -> None:
    """
    Make the environment *name*: the files of its wheel, then folders of the bundle, then the
    packages that it names of the folders *host*, or all of them.
    """
    folder = root / "environments" / name
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    paths = [str(root / folder) for folder in environment["folders"]]
    globs = environment["host"]
    packages = (path for each in reversed(host) for glob in globs for path in Path(each).glob(glob))
    for path in {path.name: path for path in packages}.values():
        (site / path.name).symlink_to(path)
    # A first start would compile thousands of files one by one.
    compileall = [sys.executable, "-m", "compileall", "-q", "-j0", str(site), *paths]
    paths += [] if globs else host
    (site / "bundle.pth").write_text("\n".join(paths) + "\n", "utf-8")
    if environment["wheel"]:
        (wheel,) = root.glob(environment["wheel"])
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    subprocess.run(compileall, check=False, stdout=subprocess.DEVNULL)


def setup(bundle: Path, root: Path) -> None:
    """Set the bundle up in *root*; one that was cut off is begun again."""
    plan, own = read_plan(bundle / "bundle.json"), root / "bundle.json"
    if own.exists() and own.read_bytes() == (bundle / "bundle.json").read_bytes():
        if (root / "results").exists():
            return
        shutil.rmtree(root)
    elif root.exists() and {path.name for path in root.iterdir()} - {"bundle.json.part"}:
        refuse("bundle-root-taken", f"{root} is not empty")
    check_python(plan)
    if not plan["own_torch"]:
        check_gpu(plan, root)
    unpack(bundle, plan, root)
    _, host = check_gpu(plan, root)
    for name, environment in plan["environments"].items():
        make_environment(root, name, environment, host)
    # Created last: it marks the setup as complete.
    (root / "results").mkdir()


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
    A command of the bundle that runs, with all that it starts in a session of its own.

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
    plan = read_plan(root / "bundle.json")
    if not (root / "results").is_dir():
        refuse("bundle-incomplete", f"{root} was not set up to its end; run `setup` again")
    with (root / "results" / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse("bundle-busy", f"{root} is in use")
        check_python(plan)
        count, _ = check_gpu(plan, root)
        gpus = {command["name"]: command["gpu"] % count for command in plan["commands"]}
        processors = sorted(os.sched_getaffinity(0))
        share = max(1, len(processors) // (1 + max(gpus.values(), default=0)))
        done = {path.stem for path in (root / "results").glob("*.json")}
        chosen = set(names or gpus)
        if unknown := sorted(chosen - set(gpus)):
            refuse("command-unknown", f"{', '.join(unknown)}; it has {', '.join(gpus)}")
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
    commands = [command["name"] for command in read_plan(root / "bundle.json")["commands"]]
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
        case ["setup", bundle, root]:
            setup(Path(bundle).absolute(), Path(root).absolute())
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
