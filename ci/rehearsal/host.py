"""
Run a rehearsal on a GPU host without a network, while the parts that `pack.py` made still arrive.

    host.py take FOLDER         check the parts in FOLDER, keep them, and begin what they complete
    host.py go STEP[@GPU]…      queue steps with what they come after
    host.py then STEP[@GPU]…    the same, after everything that was queued before
    host.py drop STEP…          take steps out of the queue, and end those that run
    host.py again STEP[@GPU]…   forget results, and queue the steps again
    host.py wait SECONDS [STEP…]
                                show all states after SECONDS, or when all steps or the named have
                                ended, or one failed, with the end of its log
    host.py show NAME [LINES]   show the end of a log: of a step, or of a job of the setup
    host.py fill GIB            use so much memory once: that of some machines grows only with use
    host.py collect FOLDER [GLOB…]
                                write the results, or files below the root, into at most seven
                                files of 15 MiB, and a table

A step is a command of 2026.11.yaml; with ``!`` behind its name it ignores that it is to be alone.
Everything lies below REHEARSAL (default: ~/rehearsal): ``root`` is what the steps see. Each GPU in
use has its share of the processors. The standard library, PyYAML and the packed zstandard suffice.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BASE = Path(os.environ.get("REHEARSAL", Path.home() / "rehearsal")).absolute()
KIT, PARTS, STATE, ROOT = (BASE / name for name in ("kit", "parts", "state", "root"))
RESULTS = ROOT / "results"
#: What the steps leave: evidence is collected whole, logs are cut.
EVIDENCE = (
    "results/*",
    "dist/*",
    "fluent/*",
    "mutants/*/*",
    "stores/*/logs/**/*",
    "stores/*/records/**/*",
    "effects/**/*",
    "starts/*/*",
    "nodes/*",
    "owner/*",
    "prefix/*/server.log",
    "predict.json",
    "slim*/*",
    "warm/*/*.json",
    "warm/*/*.log",
    "models/*/config.json",
    "environments/*/fault.json",
)
#: The variable that marks the processes of a step.
MARK = "SPARKWRIGHT_REHEARSAL_STEP"
#: Seconds in which a step that is late may end its servers, and in which killed ones must be gone.
GRACE, PATIENCE = 30, 60
#: Kinds of steps that take minutes and begin with the host's torch, before the packed one is here;
#: other steps need all.
EARLY = ("learned", "heavy", "large", "head")
FOR_EARLY = {"environment.candidate", "unpack.model"}
FOR_STEPS = {"environment.tool", "environment.harness", "unpack.model", "stock", "candidate"}


def note(text: str) -> None:
    """Add a line to the supervisor's log."""
    with (STATE / "supervisor.log").open("a") as log:
        log.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def write(path: Path, text: str) -> None:
    """Write a small file in one step."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


# Parts and archives


def archives() -> list[dict[str, Any]]:
    """Return the packed archives: name, target, offset in the stream of all parts, and size."""
    listed: list[dict[str, Any]] = json.loads((KIT / "parts.json").read_text())["archives"]
    return listed


def parts() -> dict[str, dict[str, Any]]:
    """Return size and sha256 of every part, by its name, in order."""
    return {part["name"]: part for part in json.loads((KIT / "parts.json").read_text())["parts"]}


def take(folder: Path) -> int:
    """Keep the parts in *folder* and the program; return how many parts are damaged."""
    if not shutil.which("nvidia-smi"):
        print("nvidia-smi is not here: the steps need a GPU")
        return 1
    PARTS.mkdir(parents=True, exist_ok=True)
    STATE.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    install_kit()
    damaged = 0
    stated = parts()
    for path in sorted(folder.glob("part-*")):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if path.name not in stated or digest != stated[path.name]["sha256"]:
            print(f"{path.name}: sha256 {digest} is not the packed one; copy it again")
            damaged += 1
            continue
        shutil.move(path, PARTS / f"{path.name}.new")
        (PARTS / f"{path.name}.new").replace(PARTS / path.name)
    if not (STATE / "queue.jsonl").exists():
        training = [name for name, step in steps().items() if kind(step) == "learned"]
        enqueue([f"{name}@{number}" for number, name in enumerate(training)], barrier=False)
    supervise()
    lacking = [name for name in stated if not (PARTS / name).exists()]
    print("lacking:", " ".join(lacking) or "nothing")
    return damaged


def install_kit() -> None:
    """Copy this script's folder, and the program beside it, file by file: jobs have them mapped."""
    here = Path(__file__).resolve().parent
    if here == KIT:
        return
    for source in sorted(here.rglob("*")):
        if source.is_dir() or source.name.startswith("part-") or "__pycache__" in source.parts:
            continue
        inside = source.relative_to(here)
        top = ROOT if inside.parts[0] == "program" else KIT
        target = top / inside
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target.with_name(f"{target.name}.new"))
            target.with_name(f"{target.name}.new").replace(target)


def covering(archive: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return the parts that hold *archive*: name, first byte, and the byte behind the last."""
    pieces = []
    begin, end, at = archive["offset"], archive["offset"] + archive["size"], 0
    for name, part in parts().items():
        low, high = max(begin, at), min(end, at + part["size"])
        if low < high:
            pieces.append((name, low - at, high - at))
        at += part["size"]
    return pieces


def complete(archive: dict[str, Any]) -> bool:
    """Return whether all parts of *archive* are here."""
    return all((PARTS / name).exists() for name, _, _ in covering(archive))


def blocks(archive: dict[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of *archive*."""
    for name, low, high in covering(archive):
        with (PARTS / name).open("rb") as stream:
            stream.seek(low)
            left = high - low
            while left:
                block = stream.read(min(left, 1 << 20))
                left -= len(block)
                yield block


# Jobs of the setup: each is a process of its own, `host.py job NAME`


def unpack(name: str) -> None:
    """Unpack the archive *name* below the root."""
    sys.path.insert(0, str(KIT))
    import zstandard

    (archive,) = (each for each in archives() if each["name"] == name)
    target = ROOT / archive["target"]
    target.mkdir(parents=True, exist_ok=True)
    expand = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    with subprocess.Popen(["tar", "x", "-C", str(target)], stdin=subprocess.PIPE) as tar:
        assert tar.stdin
        for block in blocks(archive):
            tar.stdin.write(expand.decompress(block))
        tar.stdin.close()
    if tar.returncode or not expand.eof:
        raise SystemExit(f"{name} is cut off, or tar ended with {tar.returncode}")


def record() -> dict[str, Any]:
    """Return the rehearsal's file."""
    import yaml

    path = ROOT / "program" / "ci" / "rehearsal" / "2026.11.yaml"
    stated: dict[str, Any] = yaml.safe_load(path.read_text())
    return stated


def host_packages() -> list[str]:
    """Return the folders of the host's packages."""
    found = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return list(dict.fromkeys([sysconfig.get_path("purelib"), *found]))


def site(name: str) -> Path:
    """Return the folder of the packages of the environment *name*."""
    library = ROOT / "environments" / name / "lib"
    return library / f"python{sysconfig.get_python_version()}" / "site-packages"


def make_environment(name: str) -> None:
    """Make an environment: its folders first, then the host's packages, or those that it names."""
    stated = record()["environments"][name]
    venv.create(ROOT / "environments" / name, with_pip=False, symlinks=True)
    for folder in reversed(host_packages()):
        for glob in stated.get("host", ()):
            for package in Path(folder).glob(glob):
                (site(name) / package.name).unlink(missing_ok=True)
                (site(name) / package.name).symlink_to(package)
    paths = [str(ROOT / folder) for folder in stated.get("folders", ())]
    paths += [] if "host" in stated else host_packages()
    (site(name) / "rehearsal.pth").write_text("\n".join(paths) + "\n", "utf-8")
    if "wheel" in stated:
        # One Triton cache for all, behind links: mutants.py copies an environment while it serves.
        own = BASE / "caches" / name
        own.mkdir(parents=True, exist_ok=True)
        (BASE / "caches" / "triton").mkdir(exist_ok=True)
        for link, target in (
            (own / "triton", BASE / "caches" / "triton"),
            (ROOT / "environments" / name / "caches", own),
        ):
            if not link.is_symlink():
                link.symlink_to(target)


def compile_folders(*folders: Path) -> None:
    """Compile Python files: a first start would compile thousands one by one."""
    words = [sys.executable, "-m", "compileall", "-q", "-j0", *map(str, folders)]
    subprocess.run(words, check=False, stdout=subprocess.DEVNULL)


def show_sites() -> None:
    """Compile the packed packages, and show them to the environments: all at once, or none."""
    arriving = ROOT / "sites.new"
    compile_folders(*arriving.iterdir(), ROOT / "program" / "ci")
    arriving.rename(ROOT / "sites")


def install_stock() -> None:
    """Make the trimmed official wheel of its tree, its environment, and the load generator."""
    tree, names = ROOT / "stocktree", json.loads((KIT / "parts.json").read_text())
    (ROOT / "stock").mkdir(exist_ok=True)
    wheel = ROOT / "stock" / names["stock"]
    with zipfile.ZipFile(wheel.with_suffix(".new"), "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(tree.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                # The same bytes each time
                member = zipfile.ZipInfo(str(path.relative_to(tree)), (2026, 11, 1, 0, 0, 0))
                member.external_attr = (0o100000 | path.stat().st_mode & 0o755) << 16
                archive.writestr(member, path.read_bytes())
    wheel.with_suffix(".new").rename(wheel)
    generator = ROOT / "store" / "environments" / names["generator"]
    generator.mkdir(parents=True, exist_ok=True)
    shutil.copy(tree / "vllm" / "vllm-rs", generator / "vllm-rs")
    (generator / "vllm-rs").chmod(0o755)
    shutil.copytree(tree, site("stock"), dirs_exist_ok=True, copy_function=os.link)
    compile_folders(site("stock"))


def install_candidate() -> None:
    """Unpack our wheel into its environment, on all processors."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
    members.sort(key=_size, reverse=True)
    for member in members:
        (site("candidate") / member.filename).parent.mkdir(parents=True, exist_ok=True)
    workers = min(16, os.cpu_count() or 1)

    def extract(first: int) -> None:
        with zipfile.ZipFile(wheel) as archive:
            for member in members[first::workers]:
                with (
                    archive.open(member) as packed,
                    (site("candidate") / member.filename).open("wb") as file,
                ):
                    shutil.copyfileobj(packed, file, 1 << 20)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(extract, range(workers)))
    compile_folders(site("candidate"))


def _size(member: zipfile.ZipInfo) -> int:
    return member.file_size


#: Prints what an environment serves with; it fails where a library does not load.
PROBE = """
import torch, triton, vllm, vllm._C_stable_libtorch
from vllm.vllm_flash_attn import flash_attn_interface
print("torch", torch.__version__, "Triton", triton.__version__, "vLLM", vllm.__version__)
print(torch.cuda.device_count(), "GPUs", torch.cuda.get_device_name(), vllm.__file__)
print("FA3:", getattr(flash_attn_interface, "FA3_UNAVAILABLE_REASON", "unknown"))
"""


def probe(name: str) -> None:
    """Load torch and the wheel's own libraries in the environment *name*."""
    python = ROOT / "environments" / name / "bin" / "python"
    subprocess.run([str(python), "-P", "-c", PROBE], check=True)


def run_job(name: str) -> None:
    """Do the job *name* of the setup."""
    what, _, argument = name.partition(".")
    match what:
        case "unpack":
            unpack(argument)
        case "environment":
            make_environment(argument)
        case "sites":
            show_sites()
        case "stock":
            install_stock()
        case "candidate":
            install_candidate()
        case "probe":
            probe(argument)


def jobs() -> dict[str, tuple[list[str], bool]]:
    """Return the jobs: what each needs to be done before, and whether its parts are here."""
    table: dict[str, tuple[list[str], bool]] = {"environment.candidate": ([], True)}
    packages = []
    for archive in archives():
        table[f"unpack.{archive['name']}"] = ([], complete(archive))
        if archive["target"].startswith("sites"):
            packages.append(f"unpack.{archive['name']}")
    table["sites"] = (packages, True)
    for name in ("tool", "harness", "stock"):
        table[f"environment.{name}"] = (["sites"], True)
    table["stock"] = (["environment.stock", "unpack.stock"], True)
    table["candidate"] = (["environment.candidate", "sites", "unpack.candidate"], True)
    table["probe.candidate"] = (["candidate"], True)
    table["probe.stock"] = (["stock"], True)
    return table


def done_jobs() -> set[str]:
    """Return the names of jobs that are done."""
    return {path.name.removesuffix(".done") for path in STATE.glob("*.done")}


# Steps


def steps() -> dict[str, dict[str, Any]]:
    """Return the commands of the rehearsal by their names."""
    defaults = {"after": [], "gpu": 0, "alone": False, "every": False}
    return {command["name"]: {**defaults, **command} for command in record()["commands"]}


def kind(step: dict[str, Any]) -> str:
    """Return the step of rehearse.sh that a command runs."""
    words = step["words"]
    return str(words[words.index("{root}") + 1])


def read_queue() -> list[dict[str, Any]]:
    """Return what was queued, in order."""
    path = STATE / "queue.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def enqueue(words: Sequence[str], *, barrier: bool) -> int:
    """Queue steps and what they come after; none of them if one is unknown."""
    stated, queue = steps(), read_queue()
    group = 1 + max((entry["group"] for entry in queue), default=0)
    names, added = {entry["name"] for entry in queue}, list[dict[str, Any]]()

    def add(name: str, gpu: int | None, shared: bool) -> None:
        if name not in names:
            names.add(name)
            for earlier in stated[name]["after"]:
                add(earlier, None, False)
            entry = {"name": name, "gpu": gpu, "shared": shared}
            added.append({**entry, "barrier": barrier, "group": group})

    for word in words:
        match = re.fullmatch(r"([a-z0-9.-]+)(?:@(\d))?(!?)", word)
        if not match or match[1] not in stated:
            print(f"no step {word}; there are {' '.join(stated)}")
            return 2
        add(match[1], int(match[2]) if match[2] else None, bool(match[3]))
    with (STATE / "queue.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in added)
    print("queued:", " ".join(entry["name"] for entry in added) or "nothing")
    return 0


def drop(names: Sequence[str]) -> None:
    """Take steps out of the queue; the supervisor ends those that run."""
    left = [json.dumps(entry) + "\n" for entry in read_queue() if entry["name"] not in names]
    write(STATE / "queue.jsonl", "".join(left))
    for name in names:
        if (STATE / f"step.{name}").exists() and not (RESULTS / f"{name}.json").exists():
            (STATE / f"drop.{name}").touch()


def again(words: Sequence[str]) -> int:
    """Forget the results of steps, and queue them again; nothing of it if one is unknown."""
    names = [re.split("[@!]", word)[0] for word in words]
    if unknown := set(names).difference(steps()):
        print(f"no step {' '.join(sorted(unknown))}; there are {' '.join(steps())}")
        return 2
    for name in names:
        drop([name])
        until = time.monotonic() + 10
        while (STATE / f"drop.{name}").exists() and time.monotonic() < until:
            time.sleep(0.1)
        # The supervisor writes the result of what it ended.
        time.sleep(1)
        for path in (RESULTS / f"{name}.json", STATE / f"step.{name}", STATE / f"shown.{name}"):
            path.unlink(missing_ok=True)
    return enqueue(words, barrier=False)


def end_processes(mark: str) -> bool:
    """
    Kill every process that was started with *mark*, in sessions of their own, too.

    Return whether all are gone; one that waits for a hung driver cannot be ended.
    """
    entry, until = f"{MARK}={mark}".encode(), time.time() + PATIENCE
    while time.time() < until:
        left = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if entry in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    left = True
        if not left:
            return True
        time.sleep(0.05)
    return False


class Step:
    """A step that runs, with all that it starts in a session of its own, on one GPU or on every."""

    def __init__(self, step: dict[str, Any], gpu: int, processors: Sequence[int]) -> None:
        self.name, self.gpu, self.alone = step["name"], gpu, step["alone"]
        self.every = step["every"]
        self._mark, self._seconds = f"{ROOT}:{self.name}", step["seconds"]
        end_processes(self._mark)
        self._began = time.time()
        limits = ["taskset", "--cpu-list", ",".join(map(str, processors))]
        limits += ["timeout", f"--kill-after={GRACE}", str(self._seconds)]
        words = [word.replace("{root}", str(ROOT)) for word in step["words"]]
        # Else setproctitle, which vLLM uses, would write over the mark.
        marks = {MARK: self._mark, "SPT_NOENV": "1", "CUDA_VISIBLE_DEVICES": str(gpu)}
        with (RESULTS / f"{self.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*limits, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **marks},
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it with its servers."""
        end_processes(self._mark)
        self._process.kill()
        self._process.wait()

    def ended(self) -> bool:
        """Return whether it has ended, with its result written and its servers ended."""
        status, seconds = self._process.poll(), time.time() - self._began
        if status is None:
            return False
        state = {"name": self.name, "status": status, "late": seconds >= self._seconds}
        state |= {"gone": end_processes(self._mark), "seconds": round(seconds, 1)}
        write(RESULTS / f"{self.name}.json", json.dumps(state))
        note(f"step {self.name} ended: {state}")
        return True


# The supervisor


def supervise() -> None:
    """Start the supervisor, which outlives this process, unless it runs."""
    with (STATE / "supervisor.out").open("ab") as out:
        command = [sys.executable, str(KIT / "host.py"), "supervisor"]
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=BASE,
            start_new_session=True,
        )


def supervisor() -> None:
    """Begin jobs and steps when what they need is here, until the machine ends."""
    with (STATE / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        gpus = max(1, listed.stdout.count("GPU "))
        note(f"supervisor of {gpus} GPUs began")
        running_jobs = dict[str, tuple[subprocess.Popen[bytes], float]]()
        running_steps = list[Step]()
        while True:
            try:
                begin_jobs(running_jobs)
                begin_steps(running_steps, gpus)
            # A half-written file must not end it.
            except Exception as error:
                note(f"error: {error!r}")
            time.sleep(0.5)


def begin_jobs(running: dict[str, tuple[subprocess.Popen[bytes], float]]) -> None:
    """Record the jobs that ended, and begin those whose needs are here."""
    for name, (process, began) in list(running.items()):
        if process.poll() is not None:
            del running[name]
            ending = "failed" if process.returncode else "done"
            (STATE / f"{name}.{ending}").write_text(f"{time.time() - began:.1f}")
            note(f"job {name} {ending} after {time.time() - began:.1f} s")
    done = done_jobs()
    for name, (needs, here) in jobs().items():
        failed = (STATE / f"{name}.failed").exists()
        if name in running or name in done or failed or not here or not done.issuperset(needs):
            continue
        with (STATE / f"{name}.log").open("wb") as log:
            command = [sys.executable, str(KIT / "host.py"), "job", name]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=BASE
            )
        running[name] = process, time.time()


def begin_steps(running: list[Step], gpus: int) -> None:
    """Record the steps that ended, end dropped ones, and begin those that may run now."""
    for active in running[:]:
        dropped = STATE / f"drop.{active.name}"
        if dropped.exists():
            active.kill()
            dropped.unlink()
        if active.ended():
            running.remove(active)
    queue = read_queue()
    if not queue:
        return
    stated, done = steps(), done_jobs()
    ended = {path.stem for path in RESULTS.glob("*.json")}
    begun = {active.name for active in running}
    for entry in queue:
        step = stated[entry["name"]]
        if entry["name"] in ended | begun or not ended.issuperset(step["after"]):
            continue
        if not done.issuperset(FOR_EARLY if kind(step) in EARLY else FOR_STEPS):
            continue
        before = {other["name"] for other in queue if other["group"] < entry["group"]}
        if entry["barrier"] and not ended.issuperset(before):
            continue
        gpu = (step["gpu"] if entry["gpu"] is None else entry["gpu"]) % gpus
        every = step["every"]
        beside = [each for each in running if every or each.every or each.gpu == gpu]
        alone = every or (step["alone"] and not entry["shared"])
        if any(other.alone for other in beside) or (alone and beside):
            continue
        processors = sorted(os.sched_getaffinity(0))
        share = max(1, len(processors) // gpus)
        own = processors if every else processors[gpu * share :][:share] or processors
        running.append(Step({**step, "alone": alone}, gpu, own))
        note(f"step {entry['name']} begins on GPU {gpu}{' alone' if alone else ''}")
        write(STATE / f"step.{entry['name']}", json.dumps([time.time(), gpu]))


# What a person sees


def last_lines(path: Path, count: int, width: int) -> list[str]:
    """Return the last lines of a log that are not empty."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 60_000))
        text = stream.read().decode("utf-8", "replace").replace("\r", "\n")
    return [line.rstrip()[:width] for line in text.splitlines() if line.strip()][-count:]


def memory(field: str) -> int:
    """Return a field of /proc/meminfo in GiB."""
    match = re.search(rf"{field}:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert match
    return int(match[1]) >> 20


def failed_steps() -> list[str]:
    """Return the steps that ended with another status than 0, and whose log was not shown yet."""
    names = []
    for entry in read_queue():
        result = RESULTS / f"{entry['name']}.json"
        shown = (STATE / f"shown.{entry['name']}").exists()
        if result.exists() and not shown and json.loads(result.read_text())["status"]:
            names.append(entry["name"])
    return names


def table() -> tuple[list[str], int]:
    """Return the states in lines, and how many steps are still to end."""
    done, listed = done_jobs(), jobs()
    failed = sorted(path.name.removesuffix(".failed") for path in STATE.glob("*.failed"))
    begun = [name for name in listed if (STATE / f"{name}.log").exists()]
    active = [name for name in begun if name not in done and name not in failed]
    free = f"memory {memory('MemAvailable')} of {memory('MemTotal')} GiB"
    lines = [
        f"{time.strftime('%H:%M:%S')} {free}, load {os.getloadavg()[0]:.1f}",
        f"setup: {len(done)} of {len(listed)} done, run: {' '.join(active) or '-'}, "
        f"failed: {' '.join(failed) or '-'}",
    ]
    for name in failed:
        lines += [f"   {name}: {line}" for line in last_lines(STATE / f"{name}.log", 6, 150)]
    left = 0
    for entry in read_queue():
        name = entry["name"]
        result, log = RESULTS / f"{name}.json", RESULTS / f"{name}.log"
        start = STATE / f"step.{name}"
        end = " ".join(last_lines(log, 1, 110)) if log.exists() else ""
        if result.exists():
            state = json.loads(result.read_text())
            text = f"status {state['status']}{' late' if state['late'] else ''}"
            lines.append(f"  {name:24} {text:12} {state['seconds']:6.0f} s  {end}")
            continue
        left += 1
        if start.exists():
            began, gpu = json.loads(start.read_text())
            lines.append(f"  {name:24} on GPU {gpu}     {time.time() - began:6.0f} s  {end}")
        else:
            lines.append(f"  {name:24} waits")
    return lines, left


def wait(seconds: float, names: Sequence[str]) -> None:
    """Wait, and print the states and the ends of logs of steps that failed."""
    supervise()
    until = time.monotonic() + seconds
    while time.monotonic() < until and table()[1] and not failed_steps():
        if names and all((RESULTS / f"{name}.json").exists() for name in names):
            break
        time.sleep(1)
    print("\n".join(table()[0]))
    for name in failed_steps():
        (STATE / f"shown.{name}").touch()
        print(f"--- {name}")
        print("\n".join(last_lines(RESULTS / f"{name}.log", 25, 200)))


def show(name: str, lines: int) -> None:
    """Print the end of a log."""
    for path in (RESULTS / f"{name}.log", STATE / f"{name}.log"):
        if path.is_file():
            print("\n".join(last_lines(path, lines, 240)))
            return
    logs = sorted(path.stem for path in STATE.glob("*.log"))
    print(f"no log of {name}; there are {' '.join(logs)}")


def fill(gibibytes: int) -> None:
    """Use memory once and give it back; the kernel ends this process first if it lacks some."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    for _ in range(gibibytes // 8):
        block = mmap.mmap(-1, 8 << 30)
        view = (ctypes.c_char * (8 << 30)).from_buffer(block)
        ctypes.memset(view, 1, 8 << 30)
        held.append((block, view))


def collect(out: Path, globs: Sequence[str], most: int = 7, size: int = 15 << 20) -> None:
    """Write the results: evidence, or what *globs* name, whole, logs cut so far that all fits."""
    paths = {path for glob in globs or EVIDENCE for path in ROOT.glob(glob)} | {*STATE.glob("*")}
    packed = {path.relative_to(ROOT / "store") for path in (ROOT / "store").rglob("*")}
    data, limit = b"", 0
    for limit in (1_500_000, 400_000, 100_000, 30_000):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=4) as archive:
            for path in sorted(paths):
                if not path.is_file() or path.is_symlink() or path.suffix == ".whl":
                    continue
                # Records that came with the parts do not go back.
                inside = path.relative_to(BASE).parts
                if inside[1] == "stores" and Path(*inside[3:]) in packed:
                    continue
                log = path.suffix in (".log", ".txt", "")
                content = shortened(path, limit if log else (64 if globs else 12) << 20)
                info = tarfile.TarInfo(str(path.relative_to(BASE)))
                info.size, info.mtime = len(content), int(path.stat().st_mtime)
                archive.addfile(info, io.BytesIO(content))
        data = buffer.getvalue()
        if len(data) <= most * size:
            break
    for number, begin in enumerate(range(0, min(len(data), most * size), size)):
        (out / f"results.tar.gz.{number:02d}").write_bytes(data[begin : begin + size])
    (out / "table.txt").write_text("\n".join(table()[0]) + "\n")
    print(f"{len(data)} bytes, logs cut at {limit}; join with cat results.tar.gz.* | tar xz")


def shortened(path: Path, limit: int) -> bytes:
    """Return the file at *path*, or beginning and end of a larger one."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if size <= limit:
            return stream.read()
        head = stream.read(limit // 3)
        stream.seek(size - limit * 2 // 3)
        return head + f"\n... {size - limit} bytes are cut here ...\n".encode() + stream.read()


def main() -> int:
    """Do what the command line says."""
    match sys.argv[1:]:
        case ["take", folder]:
            return take(Path(folder))
        case ["go" | "then" as verb, *words] if words:
            supervise()
            return enqueue(words, barrier=verb == "then")
        case ["drop", *names] if names:
            drop(names)
        case ["again", *words] if words:
            return again(words)
        case ["wait", seconds, *names]:
            wait(float(seconds), names)
        case ["show", name, *lines]:
            show(name, int(lines[0]) if lines else 60)
        case ["fill", gibibytes]:
            fill(int(gibibytes))
        case ["collect", folder, *globs]:
            collect(Path(folder), globs)
        case ["supervisor"]:
            supervisor()
        case ["job", name]:
            run_job(name)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
