"""The demo's project driven as people drive it: by the command line, as a process that can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.conftest import NOWHERE, lock_demo, running

from sparkwright.builder import ninja, toolchain
from sparkwright.builder.ninja import CompilerCall
from sparkwright.builder.toolchain import Toolchain
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import MACHINES


class Demo:
    """
    A locked copy of the demo.

    Attributes:
        folder: Holds project, upstreams and store; the output goes to its ``dist``.
        work: Where vllm is configured and compiled.
        target: The machine that its wheels are made for; empty for this one.
        patience: Seconds after which a program hangs.
    """

    patience = 240

    def __init__(self, folder: Path, target: str = "") -> None:
        self.folder, self.target = folder, target
        self.series = folder / "project" / "forks" / "demo" / "vllm" / "series"
        self.output = ["--fork", "vllm", "--output", str(folder / "dist"), *(["--target", target] if target else [])]
        self.work = folder / "store" / "work" / "demo" / "vllm" / (f"build-{target}" if target else "build")

    def command(self, verb: str, *words: str) -> list[str]:
        """Return the command line of *verb*."""
        mirror = f"{upstreams.HOST}={self.folder / 'upstreams'}{os.sep}"
        return [
            sys.executable, "-m", "sparkwright", verb, "--root", str(self.folder / "project"), "--stack", "demo",
            "--cache-dir", str(self.folder / "store"), "--source", "git", "--mirror", mirror, *words,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return variables with which the package index cannot be asked; all that a locked demo needs is in its store."""
        return {**os.environ, "SPARKWRIGHT_INDEX_URL": NOWHERE, "HOME": str(self.folder)}

    def run(self, verb: str, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run *verb* to its end and return what it said; it must end with *status*."""
        done = subprocess.run(
            self.command(verb, *words), env=self.environment(), cwd=self.folder, capture_output=True, text=True,
            timeout=self.patience, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done

    def build(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Build vllm, the fork that compiles, into ``dist``."""
        return self.run("build", *self.output, *words, status=status)

    def building(self, *words: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """Return a build of vllm that runs in a group of its own (`running`)."""
        return running(self.command("build", *self.output, *words), self.environment(), self.folder)

    def calls(self) -> list[CompilerCall]:
        """Return the compiler calls of the last run that compiled and came to its end."""
        lines = (self.work / "launch" / ninja.FINISHED).read_bytes().splitlines()
        calls = [msgspec.json.decode(line, type=CompilerCall) for line in lines]
        return [msgspec.structs.replace(call, unit=call.unit.rpartition("/src/")[2]) for call in calls]

    def compiled(self) -> list[str]:
        """Return the units that the last run compiled, sorted."""
        return sorted(call.unit for call in self.calls() if not call.hit)

    def taken(self) -> list[str]:
        """Return the units that the last run took from the compiler cache, sorted."""
        return sorted(call.unit for call in self.calls() if call.hit)

    def units(self) -> list[str]:
        """Return all units of the two libraries, as CMake wrote them down, sorted."""
        commands = json.loads((self.work / "build" / "compile_commands.json").read_bytes())
        return sorted(command["file"].rpartition("/src/")[2] for command in commands)

    def wheel(self) -> Path:
        """Return the one wheel of vllm in ``dist``."""
        (path,) = (self.folder / "dist").glob("mini_vllm-*.whl")
        return path

    @property
    def version(self) -> str:
        """The version of that wheel, its label included."""
        return self.wheel().name.split("-")[1]

    @property
    def info(self) -> str:
        """Name of that wheel's ``.dist-info`` folder."""
        return f"mini_vllm-{self.version}.dist-info"

    def sha256(self) -> str:
        """Return the hash of that wheel."""
        return sha256_file(self.wheel())

    def members(self) -> dict[str, bytes]:
        """Return the files of that wheel by name."""
        with zipfile.ZipFile(self.wheel()) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    def processes(self) -> list[str]:
        """Return the command lines of processes that work on this demo: those that name its folder or stand in it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if process.pid != os.getpid() and (str(self.folder) in " ".join(words) or Path(process.cwd()).is_relative_to(self.folder)):
                    found.append(" ".join(words)[:200])
        return found

    def add_patch(self, name: str, path: str, old: str, new: str) -> None:
        """Append to the series of vllm a patch that replaces *old*, which the file at *path* of the patched tree holds once, by *new*."""
        tree = json.loads(self.run("apply", "--fork", "vllm", "--json").stdout)["trees"][0]["patched"]
        objects = str(self.folder / "store" / "objects.git")
        text = subprocess.check_output(["git", "--git-dir", objects, "show", f"{tree}:{path}"], text=True)
        assert text.count(old) == 1
        for side, content in (("a", text), ("b", text.replace(old, new))):
            file = self.folder / name / side / path
            file.parent.mkdir(parents=True)
            file.write_text(content, "utf-8")
        command = ["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--no-prefix", "-U1", "--full-index", "a", "b"]
        diff = subprocess.run(command, cwd=self.folder / name, stdout=subprocess.PIPE, text=True, check=False).stdout
        head = (
            f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: Test <test@sparkwright.example>\nDate: Fri, 20 Nov 2026 12:00:00 +0000\n"
            f"Subject: [PATCH] {name.capitalize()}\n\nAs the test wants it.\n\n"
            "Upstream-Status: Pending\nReason: the test needs a change\nDrop-When: the test ends\n---\n\n"
        )
        (self.series.parent / f"{name}.patch").write_text(head + diff, "utf-8")
        with self.series.open("a") as listing:
            listing.write(f"{name}.patch\n")


@pytest.fixture
def demo(demo_session: RunContext) -> Demo:
    """Return a locked demo of which nothing is built yet."""
    return Demo(demo_session.project.root.parent)


@pytest.fixture(scope="session")
def both(locked_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, Demo]:
    """Return a demo whose forks were all built in one go, in a store of its own, and a copy of it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(locked_demo, folder / "demo", symlinks=True)
    made = Demo(folder / "demo")
    made.run("build", "--output", str(made.folder / "dist"))
    shutil.copytree(made.folder, folder / "copy", symlinks=True)
    return made, Demo(folder / "copy")


@pytest.fixture(scope="session")
def undisturbed(both: tuple[Demo, Demo]) -> Demo:
    """Return what a build that nobody disturbed left: to be read, never to be worked on."""
    return both[1]


@pytest.fixture(scope="session")
def crossed(tmp_path_factory: pytest.TempPathFactory, user_store: Store, tools: Toolchain) -> Demo:
    """Return a demo that is locked against an official wheel of the other kind of machine, and was built for that machine."""
    other = next(machine for machine in MACHINES if machine != platform.machine())
    program = f"{toolchain.triple(other)}-g++"
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}: sudo apt-get install g++-{toolchain.triple(other)}")
    made = Demo(lock_demo(tmp_path_factory.mktemp("crossed"), user_store, tools, other), other)
    made.build()
    return made


@pytest.fixture
def built_demo(both: tuple[Demo, Demo]) -> Demo:
    """Return a demo of which everything is built, as it was right after that; CMake's folders cannot move, so it is put back in place."""
    made, copy = both
    shutil.rmtree(made.folder)
    # Times come along, which ninja compares.
    shutil.copytree(copy.folder, made.folder, symlinks=True)
    return made
