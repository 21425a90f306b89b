"""``sparkwright doctor``: what this machine has, what that means, and the commands that mend it."""

import argparse
import contextlib
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from sparkwright.bench.machine import monitor
from sparkwright.builder import host_info
from sparkwright.cli import options
from sparkwright.client import main as client
from sparkwright.client.environment import Prefix
from sparkwright.core import config, memory, process
from sparkwright.core.console import console, size
from sparkwright.core.errors import FileError
from sparkwright.core.files import list_folder, read_json
from sparkwright.core.memory import FLOOR, MachineMemory
from sparkwright.forks import resolve
from sparkwright.forks.stack import Project, read_lock
from sparkwright.serving import guard, launch, models

#: ``ready``: works. ``look``: works, with a consequence to know about. ``missing``: commands end
#: with an error. ``not-run``: cannot run on this machine.
CheckState = Literal["ready", "look", "missing", "not-run"]

#: Seconds for which the end of a server by its guard is shown.
REMEMBERED = 86_400
LEAST_MEMORY, LEAST_DISK = 16 * 1024**3, 25_000_000_000
#: Bytes of a large model of one Spark, and of swap in use from which memory was short. Proposed.
LEAST_MODEL, LEAST_SWAPPED = 100_000_000_000, 1 << 30
#: The first driver branch for CUDA 13.
CUDA13_DRIVER = 580
#: Kernels that keep memory for a successor (KHO), so that none is left to register for RDMA:
#: DeepSeek-v4.1-Flash-DGX-Sparks#14, DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#259.
BROKEN_KERNELS = re.compile(r"7\.0\.0-(1019|31)\b")
#: The most models of the cache that are named.
SHOWN = 5
#: Programs whose version is a fact.
TOOLS = ("git", "g++", "aarch64-linux-gnu-g++", "ccache")
#: Fact → Debian's package, what needs it, and the state without it.
PROGRAMS: Mapping[str, tuple[str, str, CheckState]] = {
    "git": ("git", "every command", "missing"),
    "g++": ("g++", "plan, build and demo", "missing"),
    "Python headers": ("python3-dev", "plan and build", "missing"),
    "ccache": ("ccache", "the reuse of units in other checkouts", "look"),
    "aarch64-linux-gnu-g++": ("g++-aarch64-linux-gnu", "build --target aarch64", "look"),
}


class MachineCheck(msgspec.Struct, frozen=True):
    """What was observed of a *subject*, what that means, and the command that corrects it."""

    subject: str
    state: CheckState
    observed: str
    meaning: str = ""
    remedy: str = ""


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``doctor``."""
    client.add_arguments({"doctor": parsers["doctor"]})
    parsers["doctor"].set_defaults(run=doctor)


def doctor(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Print the checks of this machine for the stack of a checkout, and the installed releases.

    Raises:
        environment-broken: An installed release was changed.
    """
    prefix = Prefix(Path(arguments.prefix))
    here = MachineMemory.here()
    facts = serving_facts(prefix, here)
    results: dict[str, Any] = {"serving": [*serving(here, facts), *servers()]}
    _show("Serving on this machine", results["serving"])
    root = arguments.root or config.checkout()
    if root:
        context = options.checkout(arguments)
        facts, stack = inventory(context.store.root), context.project.stack
        results |= {"machine": facts, "stack": stack, "checks": [*checks(facts, context.project)]}
        _show(f"Building stack {stack}", results["checks"])
    if prefix.installed() or not root:
        results |= client.doctor(arguments)
    return results


def _show(title: str, results: Sequence[MachineCheck]) -> None:
    rows = []
    for check in results:
        lines = (check.observed, check.meaning, check.remedy and f"→ {check.remedy}")
        rows.append((check.subject, check.state, "\n".join(filter(None, lines))))
    console.table(title, ("check", "state", ""), rows, result=True)


def inventory(cache: Path) -> dict[str, Any]:
    """
    Return facts about this machine by name: its processor, memory and disk (with the *cache*
    directory), in bytes, and the versions of programs; empty if one is not installed.
    """
    libc, version = platform.libc_ver()
    header = Path(sysconfig.get_path("include"), "Python.h")
    return {
        **{name: _tool_version(name) for name in TOOLS},
        "machine": platform.machine(),
        "glibc": version if libc == "glibc" else "",
        "cores": len(os.sched_getaffinity(0)),
        "memory": process.memory_limit(),
        "disk": shutil.disk_usage(cache).free,
        # pypi-simple stands for all packages of the extra `full`.
        "part full": importlib.util.find_spec("pypi_simple") is not None,
        "Python headers": platform.python_version() if header.exists() else "",
    }


def _tool_version(name: str) -> str:
    match = re.search(r"\d+(?:\.\d+)+", host_info.command_output(name, "--version"))
    return match[0] if match else ""


def checks(facts: Mapping[str, Any], project: Project) -> Iterator[MachineCheck]:
    """Yield what the facts of a machine (`inventory`) mean for the stack of *project*."""
    machine, memory, disk = facts["machine"], facts["memory"], facts["disk"]
    grafts = [fork for fork in project.spec.forks.values() if fork.build == "graft"]
    yield _check(
        "system",
        facts["glibc"] and all(machine in fork.bases for fork in grafts),
        f"{machine}, {facts['cores']} cores, glibc {facts['glibc'] or 'missing'}",
        "plan and build need an official wheel of each graft, for glibc and this machine",
        otherwise="missing",
    )
    yield _check(
        "memory",
        memory >= LEAST_MEMORY,
        size(memory),
        f"less than {size(LEAST_MEMORY)}: the compilers of the largest units may be killed",
    )
    yield _check(
        "disk",
        disk >= LEAST_DISK,
        f"{size(disk)} free",
        f"less than {size(LEAST_DISK)}: choose another disk with --cache-dir",
    )
    for program, (package, needs, state) in PROGRAMS.items():
        if program != f"{machine}-linux-gnu-g++":
            yield _check(
                program,
                facts[program],
                facts[program] or "missing",
                f"needed by {needs}",
                # Containers run as root and have no sudo.
                f"{'sudo ' if os.geteuid() else ''}apt-get install -y {package}",
                otherwise=state,
            )
    yield _check(
        "part full",
        facts["part full"],
        "installed" if facts["part full"] else "the part full is not installed",
        "needed by all commands but those that install and serve releases",
        config.install_full(),
        otherwise="missing",
    )
    if project.lock_file.is_file():
        lines = resolve.unresolved(project, read_lock(project))
        yield _check(
            "lock",
            not lines,
            f"{len(lines)} sources are unresolved" if lines else "every source is resolved",
            "builds take another kind of source, or the commit that the source distribution proves",
            f"sparkwright lock --stack {project.stack}",
        )


def serving_facts(prefix: Prefix, here: MachineMemory) -> dict[str, Any]:
    """
    Return facts about this machine, whose memory is *here*, that a server meets, by name. Sizes are
    in bytes. The GPU is put under load if nothing computes on it, and memory for that is free.
    """
    marker, cache = prefix.marker(prefix.current), models.cache_folder(os.environ)
    gpus, computing = host_info.gpus(), memory.query("compute-apps=pid")[0]
    load = ("", "it needs a GPU and an installed release")
    if computing:
        load = ("", "another program computes on the GPU")
    elif here.free < here.floor() + monitor.TAKEN:
        load = ("", "too little memory is free for it")
    elif gpus and marker:
        with console.step("the GPU under load, for ten seconds"):
            load = monitor.under_load(prefix.root / "current" / "bin" / "python")
    statuses = Path("/sys/class/drm").glob("*/status")
    return {
        "release": f"{marker.name}, {marker.channel}" if marker else "",
        "models": [path.name[8:].replace("--", "/", 1) for path in list_folder(cache, "models--*")],
        "cache": str(cache),
        "disk": shutil.disk_usage(next(filter(Path.exists, (cache, *cache.parents)))).free,
        "gpus": gpus,
        "load": load,
        "kernel": platform.release(),
        "boot": Path("/proc/cmdline").read_text("utf-8", "replace"),
        "swapped": psutil.swap_memory().used,
        "displays": [path.parent.name for path in statuses if path.read_text() == "connected\n"],
    }


def serving(machine: MachineMemory, facts: Mapping[str, Any]) -> Iterator[MachineCheck]:
    """Yield what *machine* and its *facts* (`serving_facts`) mean for a server."""
    names, disk, displays = facts["models"], facts["disk"], ", ".join(facts["displays"])
    yield _check(
        "release",
        facts["release"],
        facts["release"] or "none is installed",
        "there is nothing to serve with",
        "sparkwright install",
        otherwise="missing",
    )
    yield _check(
        "models",
        names,
        f"{len(names)} in {facts['cache']}{': ' if names else ''}{', '.join(names[:SHOWN])}",
        "a model is fetched first",
        "sparkwright serve RECIPE --download --dry-run",
    )
    held = ", ".join(f"{each.name} ({each.pid}): {each.gib:.1f}" for each in machine.tenants[:3])
    yield _check(
        "free memory",
        machine.free >= machine.total * (1 - 2 * FLOOR),
        f"{machine.free:.1f} of {machine.total:.1f} GiB are free; {machine.floor():.1f} stay free"
        + (f"\nheld: {held} GiB" if held else ""),
        "a server gets what is free",
        "end what you do not need",
    )
    if machine.failure:
        yield MachineCheck(
            "nvidia-smi",
            "look",
            machine.failure,
            "nvidia-smi fails; a server is judged by the rules of unified memory all the same",
            "sudo reboot",
        )
    for gpu in facts["gpus"]:
        current = int(gpu.driver.partition(".")[0] or 0) >= CUDA13_DRIVER
        yield _check(
            "GPU",
            current,
            f"{gpu.name}, SM {gpu.capability}, driver {gpu.driver}",
            f"CUDA 13 needs driver {CUDA13_DRIVER} or newer",
            "sudo ubuntu-drivers install",
            otherwise="missing",
        )
    if not machine.gpus:
        yield MachineCheck(
            "GPU",
            "not-run",
            "none",
            "a release serves nothing without one; of the gates, only G0 and G1 can run",
        )
    observed, fault = facts["load"]
    state: CheckState = "look" if observed else "not-run"
    yield _check("GPU under load", not fault, observed or "not tried", fault, otherwise=state)
    broken = BROKEN_KERNELS.match(facts["kernel"]) and "kho=off" not in facts["boot"].split()
    yield _check(
        "kernel",
        not broken,
        facts["kernel"],
        "NCCL cannot register memory with it (ENOMEM), so two Sparks do not serve together",
        "add kho=off to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub, reboot",
    )
    yield _check(
        "swap",
        facts["swapped"] < LEAST_SWAPPED,
        f"{size(facts['swapped'])} are in use",
        "memory was short; what comes back from swap stalls a server",
        "end programs, then sudo swapoff -a",
    )
    if machine.unified:
        yield _check(
            "display",
            not displays,
            f"connected: {displays}" if displays else "none is connected",
            "a desktop takes memory of the GPU, beside the 2 GB that firmware keeps for a display",
            "sudo systemctl isolate multi-user.target",
        )
    yield _check(
        "disk for models",
        disk >= LEAST_MODEL,
        f"{size(disk)} free for {facts['cache']}",
        f"less than {size(LEAST_MODEL)}: choose another disk with HF_HUB_CACHE",
    )


def servers() -> Iterator[MachineCheck]:
    """Yield the running servers, those without a guard, and those that a guard ended lately."""
    for server in launch.running():
        yield _check(
            f"server {server.pid}",
            _guarded(server.pid),
            "serves",
            "its guard was killed: nothing ends it before the machine stops",
            "restart it",
        )
    for record in guard.records().glob("*.json"):
        with contextlib.suppress(FileError, OSError):
            if time.time() - record.stat().st_mtime < REMEMBERED:
                yield MachineCheck(
                    f"server {record.stem}",
                    "look",
                    str(read_json(record, dict[str, Any])["message"]),
                )


def _guarded(server: int) -> bool:
    """Return whether a guard watches the process *server*."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(server).children():
            with contextlib.suppress(psutil.Error):
                if Path(guard.__file__).name in map(os.path.basename, child.cmdline()):
                    return True
    return False


def _check(
    subject: str,
    good: object,
    observed: str,
    meaning: str,
    remedy: str = "",
    otherwise: CheckState = "look",
) -> MachineCheck:
    if good:
        return MachineCheck(subject, "ready", observed)
    return MachineCheck(subject, otherwise, observed, meaning, remedy)
