"""
Builds of chosen CMake targets, end to end: a small project in vLLM's shape, its vendored sources in real repositories.

    widget/        the fork: two libraries, of which _core needs the vendored sources
    alpha.git      vendored; has a submodule, gamma, and one that no host offers
    beta.git       vendored; asks for delta in turn
    headers.git    vendored by widget, and a fork of the stack, which stands in for it
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from sparkwright.builder import pipeline
from sparkwright.builder.pipeline import BuiltWheel
from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.cli.stages import lock_vendored
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.forks import lock, package_index, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import FileLock
from sparkwright.forks.stack import Project

pytestmark = pytest.mark.toolchain

ROOT = Path(__file__).parents[2]
HOST = "https://upstream.example/parts/"

CMAKE = """\
cmake_minimum_required(VERSION 3.26)
project(widget LANGUAGES CXX)
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
add_library(_extra MODULE csrc/extra.cpp)
set_target_properties(_extra PROPERTIES PREFIX "" SUFFIX ".abi3.so")
if(WIDGET_EXTRA_ONLY)
  return()
endif()
include(FetchContent)
FetchContent_Declare(alpha GIT_REPOSITORY https://upstream.example/parts/alpha.git GIT_TAG v1 GIT_SUBMODULES gamma)
set(TAG v1)
FetchContent_Declare(beta GIT_REPOSITORY https://upstream.example/parts/beta.git GIT_TAG ${TAG})
if(WIDGET_HEADERS_SRC_DIR)
  FetchContent_Declare(headers SOURCE_DIR ${WIDGET_HEADERS_SRC_DIR})
else()
  FetchContent_Declare(headers GIT_REPOSITORY https://upstream.example/parts/headers.git GIT_TAG v1)
endif()
FetchContent_MakeAvailable(alpha beta headers)
add_library(_core MODULE csrc/core.cpp csrc/kernel.cu ${alpha_SOURCE_DIR}/alpha.cu)
set(NATIVE "$<$<COMPILE_LANGUAGE:CUDA>:-gencode;arch=compute_121f,code=sm_121f>")
target_compile_options(_core PRIVATE ${NATIVE})
target_include_directories(_core PRIVATE ${alpha_SOURCE_DIR} ${beta_SOURCE_DIR} ${delta_SOURCE_DIR} ${headers_SOURCE_DIR}/include)
set_target_properties(_core PROPERTIES PREFIX "" SUFFIX ".abi3.so")
"""

WIDGET = {
    "CMakeLists.txt": CMAKE,
    "pyproject.toml": '[project]\nname = "widget"\nrequires-python = ">=3.9"\nversion = "1.5"\n',
    "widget/__init__.py": "",
    "widget/_version.py": 'version = "1.5"\n',
    "csrc/core.cpp": (
        '#include "alpha.h"\n#include "gamma/gamma.h"\n#include "beta.h"\n#include "delta.h"\n#include "parts/headers.h"\n'
        'extern "C" char const* widget_parts() { return "parts: " ALPHA " " GAMMA " " BETA " " DELTA " " HEADERS; }\n'
    ),
    "csrc/kernel.cu": "__global__ void widget_kernel(int* x) { *x += 1; }\n",
    "csrc/extra.cpp": 'extern "C" int widget_extra() { return 1; }\n',
}
DELTA = (
    "FetchContent_Declare(delta GIT_REPOSITORY https://upstream.example/parts/delta.git GIT_TAG v1)\n"
    "FetchContent_MakeAvailable(delta)\n"
)
PARTS = {
    "alpha": {"alpha.h": '#define ALPHA "alpha-v1"\n', "alpha.cu": "__global__ void alpha_kernel(int* x) { *x += 2; }\n"},
    "beta": {"beta.h": '#define BETA "beta-v1"\n', "CMakeLists.txt": f"{DELTA}set(delta_SOURCE_DIR ${{delta_SOURCE_DIR}} PARENT_SCOPE)\n"},
    "delta": {"delta.h": '#define DELTA "delta-v1"\n'},
    "gamma": {"gamma.h": '#define GAMMA "gamma-v1"\n'},
    "headers": {
        "include/parts/headers.h": '#define HEADERS "headers-v1"\n// ours follows\n',
        "include/cutlass/version.h": "#define CUTLASS_MAJOR 1\n#define CUTLASS_MINOR 0\n#define CUTLASS_PATCH 0\n",
    },
}

STACK = f"""\
stack: "parts"
arch: "12.1f"
label: "spark.parts"
forks:
  headers:
    build: headers
    sources:
      git: {{url: "https://upstream.example/parts/headers.git", ref: "v1"}}
  widget:
    build: graft
    needs: [headers]
    sources:
      git: {{url: "https://upstream.example/parts/widget.git", ref: "v1.5"}}
    bases:
      {platform.machine()}: {{name: "widget", version: "1.5", tag: "cp39-abi3-linux_{platform.machine()}"}}
"""
ENVIRONMENT = """\
forks:
  headers:
    distribution: parts-headers
  widget:
    distribution: widget
    package: widget
    variables: {TORCH_CUDA_ARCH_LIST: "12.1f"}
    version_files: [widget/_version.py]
    defines: {CMAKE_BUILD_TYPE: Release, WIDGET_HEADERS_SRC_DIR: "{source:headers}"}
    core_targets: [_extra]
    core_defines: {WIDGET_EXTRA_ONLY: "ON"}
"""
#: Our patch on the headers: the fork of the stack wins over the source that upstream's CMake would fetch.
OURS = ("include/parts/headers.h", '"headers-v1"', '"headers-ours"')


def git(folder: Path, *words: str) -> str:
    """Return the output of git, run without any configuration."""
    who = {f"GIT_{role}_{what}": "t@t.example" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    when = {f"GIT_{role}_DATE": "2026-11-01T12:00:00Z" for role in ("AUTHOR", "COMMITTER")}
    plain = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **who, **when}
    command = ["git", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main", *words]
    return subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=True).stdout.strip()


class Parts:
    """
    The project with its repositories.

    Attributes:
        upstreams: Holds a repository for every part; the mirror map leads there.
    """

    def __init__(self, folder: Path, tools: Toolchain) -> None:
        self.folder, self.root, self.upstreams = folder, folder / "project", folder / "upstreams"
        for name, files in {**PARTS, "widget": WIDGET}.items():
            self.commit(name, files)
        modules = "".join(f'[submodule "{name}"]\n\tpath = {name}\n\turl = ../{name}.git\n' for name in ("gamma", "unused"))
        (self.upstreams / "alpha" / ".gitmodules").write_text(modules)
        git(self.upstreams / "alpha", "clone", "--quiet", str(self.upstreams / "gamma"), "gamma")
        git(self.upstreams / "alpha", "add", "--all")
        git(self.upstreams / "alpha", "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},unused")
        git(self.upstreams / "alpha", "commit", "--quiet", "--amend", "-m", "With gamma")
        for name in (*PARTS, "widget"):
            git(self.upstreams / name, "tag", "v1.5" if name == "widget" else "v1")
            for allowed in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
                git(self.upstreams / name, "config", allowed, "true")
        self.store = Store(folder / "store")
        # The tools are those of the demo, which are installed already.
        (folder / "store" / "environments").symlink_to(tools.root.parent)
        self._write()

    def commit(self, name: str, files: Mapping[str, str]) -> None:
        folder = self.upstreams / name
        if not folder.exists():
            folder.mkdir(parents=True)
            git(folder, "init", "--quiet")
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "-m", "Change")

    def _write(self) -> None:
        demo = ROOT / "ci" / "sparkwright" / "demo" / "project"
        for folder in ("forks/parts/widget", "forks/parts/headers", "build/parts", "cherry_picks"):
            (self.root / folder).mkdir(parents=True)
        for fork in ("widget", "headers"):
            (self.root / "forks/parts" / fork / "series").write_text("")
        (self.root / "forks/parts/stack.yaml").write_text(STACK)
        (self.root / "build/parts/environment.yaml").write_text(ENVIRONMENT)
        (self.root / "build/parts/archs.yaml").write_text("rules: []\n")
        shutil.copy(demo / "build/demo/pylock.toml", self.root / "build/parts/pylock.toml")
        context, base = self.context(), self._base()
        forks = {
            name: resolve.resolve_fork(context, name, msgspec.structs.replace(spec, bases={}))
            for name, spec in context.project.spec.forks.items()
        }
        forks["widget"] = msgspec.structs.replace(forks["widget"], bases={platform.machine(): base})
        (self.root / "forks/parts/lock.yaml").write_text(lock.render(lock.Lock(1, "parts", forks)))
        self.patch("headers", *OURS)

    def _base(self) -> FileLock:
        """Put an official wheel with three libraries into the store, and return its lock."""
        library = self.folder / "library.so"
        words = ["-shared", "-Wl,--no-as-needed", "-x", "c++", "-o", str(library), "/dev/null"]
        subprocess.run(["c++", *words], check=True)
        name = WheelName("widget", "1.5", f"cp39-abi3-linux_{platform.machine()}")
        files = {f"widget/{target}.abi3.so": library.read_bytes() for target in ("_core", "_extra", "_other")}
        files |= {path: text.encode() for path, text in WIDGET.items() if path.startswith("widget/")}
        wheelfile.write(self.folder, name, files, "Metadata-Version: 2.4\nName: widget\nVersion: 1.5\n", pure=False)
        sha256 = sha256_file(self.folder / name.filename)
        place = package_index.path_of(self.store, sha256, name.filename)
        place.parent.mkdir(parents=True)
        shutil.copy(self.folder / name.filename, place)
        return FileLock("widget", "1.5", name.filename, sha256, place.stat().st_size)

    def lock(self) -> dict[str, lock.VendoredLock]:
        """Read the vendored sources from CMake into the lock, and return them."""
        lock_vendored(self.context("all"), "widget")
        return self.context().lock.forks["widget"].vendored

    def context(self, *targets: str, mirrors: bool = True) -> RunContext:
        """Return a run for *targets*, as the command line would make it."""
        places = {f"{HOST}{name}.git": str(self.upstreams / name) for name in (*PARTS, "widget")} if mirrors else {}
        project = Project(self.root, "parts")
        return RunContext(
            project, self.store, ("widget",), self.folder / "dist", source="git", mirrors=places, targets=targets, jobs=2,
            offline=not mirrors,
        )  # fmt: skip

    def build(self, *targets: str, mirrors: bool = True) -> BuiltWheel:
        return pipeline.build(self.context(*targets, mirrors=mirrors), "widget")

    def failure(self, *targets: str) -> SparkwrightError:
        with pytest.raises(SparkwrightError) as caught:
            self.build(*targets)
        return caught.value

    def patch(self, fork: str, path: str, old: str, new: str) -> None:
        """Append to the series of *fork* a patch that replaces *old* by *new*."""
        work, tag = self.upstreams / fork, "v1.5" if fork == "widget" else "v1"
        series = self.root / "forks/parts" / fork
        count = len(list(series.glob("*.patch")))
        git(work, "checkout", "--quiet", "-B", "ours", tag if not count else "ours")
        (work / path).write_text((work / path).read_text().replace(old, new))
        git(work, "add", "--all")
        git(work, "commit", "--quiet", "-m", f"Change {count}")
        diff = git(work, "diff", "-U1", "--full-index", "HEAD~1", "HEAD")
        git(work, "checkout", "--quiet", "main")
        head = f"From: T <t@t.example>\nDate: Sun, 1 Nov 2026 12:00:00 +0000\nSubject: [PATCH] Change {count}\n\nAs told.\n\n"
        trailers = "Upstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends\n---\n"
        (series / f"{count}.patch").write_text(head + trailers + diff + "\n")
        with (series / "series").open("a") as listing:
            listing.write(f"{count}.patch\n")

    def declare(self, text: str) -> None:
        """Let the fork's CMake run *text* before the vendored sources are made available."""
        self.patch("widget", "CMakeLists.txt", "set(TAG v1)\n", f"{text}set(TAG v1)\n")


@pytest.fixture
def parts(tmp_path: Path, tools: Toolchain, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Return a project whose lock names no vendored source yet; the package index cannot be asked."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", "http://127.0.0.1:9/simple/")
    for name in ("CXX", "CC", "CUDAHOSTCXX"):
        monkeypatch.delenv(name, raising=False)
    return Parts(tmp_path / "parts", tools)


def members(parts: Parts, built: BuiltWheel) -> dict[str, bytes]:
    with zipfile.ZipFile(parts.folder / "dist" / built.filename) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_default_targets_need_no_vendored_source(parts: Parts) -> None:
    """Only the core target is compiled, with nothing of FetchContent in the lock; all others stay those of the wheel."""
    built = parts.build()

    assert built.transplant is not None
    assert list(built.transplant.libraries) == ["widget/_extra.abi3.so"]
    assert sorted(built.transplant.base) == ["widget/_core.abi3.so", "widget/_other.abi3.so"]


def test_all_targets_are_compiled_with_the_locked_sources(parts: Parts) -> None:
    """The lock is read from CMake; the build needs no host afterwards, and compiles only changed units the next time."""
    locked = parts.lock()
    assert sorted(locked) == ["alpha", "alpha/gamma", "beta", "delta"]
    assert all(entry.resolved for entry in locked.values())
    shutil.move(parts.upstreams, parts.folder / "moved")

    built = parts.build("all", mirrors=False)

    files = members(parts, built)
    # The text alone: pytest would take minutes to show the difference of two libraries.
    words = re.findall(rb"parts: [a-z0-9 -]+", files["widget/_core.abi3.so"])
    assert words == [b"parts: alpha-v1 gamma-v1 beta-v1 delta-v1 headers-ours"]
    assert built.counts["native"] == 2
    assert built.transplant is not None
    assert sorted(built.transplant.libraries) == ["widget/_core.abi3.so", "widget/_extra.abi3.so"]
    assert sorted(built.transplant.base) == ["widget/_other.abi3.so"]
    record = json.loads(next(data for name, data in files.items() if name.endswith("/sparkwright.json")))
    assert record["targets"] == ["all"]
    bill = json.loads(next(data for name, data in files.items() if name.endswith(".cdx.json")))
    assert {f"{HOST}{name}.git" in json.dumps(bill) for name in ("alpha", "beta", "gamma", "delta")} == {True}
    assert pipeline.current(parts.context(mirrors=False), "widget") is None
    assert pipeline.current(parts.context("all", mirrors=False), "widget")

    shutil.move(parts.folder / "moved", parts.upstreams)
    parts.patch("widget", "csrc/extra.cpp", "return 1;", "return 2;")
    core = next(parts.store.root.glob("work/parts/widget/*/build/CMakeFiles/_core.dir/csrc/core.cpp.o"))
    before = core.stat().st_mtime_ns
    parts.build("all")
    assert core.stat().st_mtime_ns == before


def test_a_missing_source_is_named_before_anything_is_configured(parts: Parts) -> None:
    parts.lock()
    shutil.rmtree(parts.upstreams / "beta")
    for folder in ("mirrors", "work", "objects.git", "records"):
        shutil.rmtree(parts.folder / "store" / folder, ignore_errors=True)

    error = parts.failure("all")

    assert error.reference == "source-unreachable"
    assert "beta" in error.what
    assert not list(parts.store.root.glob("work/parts/widget/*/build"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("FetchContent_Declare(epsilon GIT_REPOSITORY https://upstream.example/epsilon.git GIT_TAG v1)\n", "epsilon"),
        ("file(DOWNLOAD https://upstream.example/epsilon.h ${CMAKE_BINARY_DIR}/epsilon.h STATUS ignored)\n", "https://upstream.example/epsilon.h"),
    ],
)  # fmt: skip
def test_source_that_the_lock_does_not_pin_is_refused(parts: Parts, text: str, name: str) -> None:
    parts.lock()
    parts.declare(f"include(FetchContent)\n{text.replace('alpha', 'beta')}")

    error = parts.failure("all")

    assert error.reference == "source-unlocked"
    assert any(name.replace("alpha", "beta") in line for line in error.details)


def test_declaration_that_is_not_reached_is_no_finding(parts: Parts) -> None:
    parts.declare("if(NEVER)\n  FetchContent_Declare(epsilon GIT_REPOSITORY https://upstream.example/epsilon.git)\nendif()\n")

    assert "epsilon" not in parts.lock()


def test_target_without_a_library_in_the_wheel_is_refused(parts: Parts) -> None:
    """A name that CMake does not know, and a library that the official wheel does not have, fail before the compiler runs."""
    parts.patch("widget", "CMakeLists.txt", "if(WIDGET_EXTRA_ONLY)", "add_library(_more MODULE csrc/extra.cpp)\nif(WIDGET_EXTRA_ONLY)")
    parts.lock()

    assert parts.failure("_more").reference == "base-mismatch"
    assert parts.failure("absent").reference == "configure-failed"
