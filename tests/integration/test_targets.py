"""
Builds of chosen CMake targets, end to end: a small project in vLLM's shape, its vendored sources in real repositories.

    widget/        the fork: three libraries, of which _core and _late need vendored sources
    alpha.git      vendored; has a submodule, gamma, and one that no host offers
    beta.git       vendored; asks for delta in turn, and holds a list of archs
    zeta.git       vendored for _late; CMake looks for its folder before it downloads
    headers.git    vendored by widget, and a fork of the stack, which stands in for it
"""

import json
import platform
import re
import shutil
import zipfile
from pathlib import Path

import msgspec
import pytest
from tests.conftest import NOWHERE, ROOT
from tests.refusals import refusal
from tests.support import fatbins, wheels
from tests.unit.conftest import Repository, append_patch

from sparkwright.builder import pipeline, toolchain
from sparkwright.cli.stages import lock_vendored
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.forks import resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import FileLock, Lock, Project, VendoredLock, render_lock

pytestmark = pytest.mark.toolchain

HOST = "https://upstream.example/parts/"

CMAKE = """\
cmake_minimum_required(VERSION 3.26)
project(widget LANGUAGES CXX)
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
add_library(_extra MODULE csrc/extra.cpp)
set_target_properties(_extra PROPERTIES PREFIX "" SUFFIX ".abi3.so")
if(DEFINED WIDGET_PROJECTS AND NOT WIDGET_PROJECTS)
  return()
endif()
include(FetchContent)
if(NOT DEFINED WIDGET_PROJECTS OR "late" IN_LIST WIDGET_PROJECTS)
  set(zeta_SOURCE_DIR "${FETCHCONTENT_BASE_DIR}/zeta-src")
  set(ZETA_COMMIT "@ZETA@")
  if(NOT EXISTS "${zeta_SOURCE_DIR}/zeta.h")
    FetchContent_Populate(zeta SUBBUILD_DIR ${CMAKE_BINARY_DIR}/zeta-sub SOURCE_DIR ${zeta_SOURCE_DIR}
      GIT_REPOSITORY https://upstream.example/parts/zeta.git GIT_TAG ${ZETA_COMMIT})
  endif()
  add_library(_late MODULE csrc/late.cpp)
  target_include_directories(_late PRIVATE ${zeta_SOURCE_DIR})
  set_target_properties(_late PROPERTIES PREFIX "" SUFFIX ".abi3.so")
endif()
if(DEFINED WIDGET_PROJECTS AND NOT "parts" IN_LIST WIDGET_PROJECTS)
  return()
endif()
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
list(GET BETA_ARCHS -1 ARCH)
set(NATIVE "$<$<COMPILE_LANGUAGE:CUDA>:-gencode;arch=compute_${ARCH},code=sm_${ARCH}>")
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
    "csrc/late.cpp": '#include "zeta.h"\nextern "C" char const* widget_late() { return "late: " ZETA; }\n',
}
DELTA = (
    "FetchContent_Declare(delta GIT_REPOSITORY https://upstream.example/parts/delta.git GIT_TAG v1)\n"
    "FetchContent_MakeAvailable(delta)\n"
)
ARCHS = "set(BETA_ARCHS 80 PARENT_SCOPE)\n"
PARTS = {
    "alpha": {"alpha.h": '#define ALPHA "alpha-v1"\n', "alpha.cu": "__global__ void alpha_kernel(int* x) { *x += 2; }\n"},
    "beta": {"beta.h": '#define BETA "beta-v1"\n', "CMakeLists.txt": f"{DELTA}set(delta_SOURCE_DIR ${{delta_SOURCE_DIR}} PARENT_SCOPE)\n{ARCHS}"},
    "delta": {"delta.h": '#define DELTA "delta-v1"\n'},
    "gamma": {"gamma.h": '#define GAMMA "gamma-v1"\n'},
    "zeta": {"zeta.h": '#define ZETA "zeta-v1"\n'},
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
    external:
      late: {sources: [zeta], targets: [_late]}
      parts: {sources: [alpha, beta, delta], targets: [_core]}
    core_defines: {WIDGET_PROJECTS: "{external}"}
"""
RULES = """\
rules:
  - name: beta-archs
    fork: widget
    source: beta
    file: CMakeLists.txt
    before: BETA_ARCHS 80
    after: BETA_ARCHS 80;121f
    reason: Beta stops at Ampere.
    drop_when: Beta goes further.
"""
#: Our patch on the headers: the fork of the stack wins over the source that upstream's CMake would fetch.
OURS = ("include/parts/headers.h", '"headers-v1"', '"headers-ours"')


class Parts:
    """
    The project with its repositories.

    Attributes:
        upstreams: Holds a repository for every part; the mirror map leads there.
    """

    def __init__(self, folder: Path, tools: toolchain.Toolchain) -> None:
        self.folder, self.root, self.upstreams = folder, folder / "project", folder / "upstreams"
        sources = {**PARTS, "widget": WIDGET}
        self.repositories = {name: Repository(self.upstreams / name) for name in sources}
        for name, files in sources.items():
            zeta = self.repositories["zeta"].git("rev-parse", "HEAD") if name == "widget" else ""
            self.repositories[name].commit({path: text.replace("@ZETA@", zeta).encode() for path, text in files.items()})
        modules = "".join(f'[submodule "{name}"]\n\tpath = {name}\n\turl = ../{name}.git\n' for name in ("gamma", "unused"))
        alpha = self.repositories["alpha"]
        alpha.commit({".gitmodules": modules.encode()})
        alpha.link("gamma", self.repositories["gamma"].git("rev-parse", "HEAD"))
        alpha.link("unused", "1" * 40)
        alpha.git("commit", "--quiet", "--amend", "-m", "With gamma")
        for name, repository in self.repositories.items():
            repository.git("tag", "v1.5" if name == "widget" else "v1")
        self.store = Store(folder / "store")
        # The tools are those of the demo, which are installed already.
        (folder / "store" / "environments").symlink_to(tools.root.parent)
        demo = ROOT / "ci" / "sparkwright" / "demo" / "project"
        for path in ("forks/parts/widget", "forks/parts/headers", "build/parts", "cherry_picks"):
            (self.root / path).mkdir(parents=True)
        for fork in ("widget", "headers"):
            (self.root / "forks/parts" / fork / "series").write_text("")
        (self.root / "forks/parts/stack.yaml").write_text(STACK)
        (self.root / "build/parts/environment.yaml").write_text(ENVIRONMENT)
        (self.root / "build/parts/archs.yaml").write_text(RULES)
        shutil.copy(demo / "build/demo/pylock.toml", self.root / "build/parts/pylock.toml")
        context, base = self.context(), self._base()
        forks = {
            name: resolve.resolve_fork(context, name, msgspec.structs.replace(spec, bases={}))
            for name, spec in context.project.spec.forks.items()
        }
        forks["widget"] = msgspec.structs.replace(forks["widget"], bases={platform.machine(): base})
        (self.root / "forks/parts/lock.yaml").write_text(render_lock(Lock(1, "parts", forks)))
        self.patch("headers", *OURS)

    def _base(self) -> FileLock:
        """Put an official wheel with four libraries into the store, and return its lock."""
        library = fatbins.library(self.folder)
        files = {f"widget/{target}.abi3.so": library for target in ("_core", "_extra", "_late", "_other")}
        files |= {path: text.encode() for path, text in WIDGET.items() if path.startswith("widget/")}
        path = wheels.plain(self.folder, "widget", "1.5", tag="cp39-abi3-linux_{machine}", files=files)
        sha256 = sha256_file(path)
        path = path.rename(self.store.folder("downloads", sha256) / path.name)
        return FileLock("widget", "1.5", path.name, sha256, path.stat().st_size)

    def lock(self) -> dict[str, VendoredLock]:
        """Read the vendored sources from CMake into the lock, and return them."""
        lock_vendored(self.context(), "widget")
        return self.context().lock.forks["widget"].vendored

    def relock(self) -> None:
        """Look at the sources of the lock again, as `lock` does before it asks CMake."""
        context = self.context()
        locked = context.lock.forks["widget"]
        spec = msgspec.structs.replace(context.project.fork("widget"), bases={})
        widget = msgspec.structs.replace(resolve.resolve_fork(context, "widget", spec, locked), bases=locked.bases)
        forks = {**context.lock.forks, "widget": widget}
        context.project.lock_file.write_text(render_lock(Lock(1, "parts", forks)))

    def context(self, *targets: str, mirrors: bool = True) -> RunContext:
        """Return a run for *targets*, as the command line would make it."""
        places = {f"{HOST}{name}.git": str(self.upstreams / name) for name in (*PARTS, "widget")} if mirrors else {}
        return RunContext(
            Project(self.root, "parts"), self.store, ("widget",), self.folder / "dist", source="git", mirrors=places, targets=targets, jobs=2,
            offline=not mirrors,
        )  # fmt: skip

    def record(self, built: pipeline.BuiltWheel) -> pipeline.BuildRecord:
        """Return the build record of the wheel."""
        return wheels.build_record(self.folder / "dist" / built.filename)

    def build(self, *targets: str, mirrors: bool = True) -> pipeline.BuiltWheel:
        return pipeline.build(self.context(*targets, mirrors=mirrors), "widget")

    def patch(self, fork: str, path: str, old: str, new: str) -> None:
        """Append to the series of *fork* a patch that replaces *old* by *new*."""
        repository, series = self.repositories[fork], self.root / "forks/parts" / fork
        name = f"{len(list(series.glob('*.patch')))}.patch"
        repository.git("checkout", "--quiet", "-B", "ours", "main" if name == "0.patch" else "ours")
        text = (repository.path / path).read_text()
        append_patch(series, name, repository.patch({path: text.replace(old, new).encode()}))
        repository.git("checkout", "--quiet", "main")

    def declare(self, text: str) -> None:
        """Let the fork's CMake run *text* before the vendored sources are made available."""
        self.patch("widget", "CMakeLists.txt", "set(TAG v1)\n", f"{text}set(TAG v1)\n")


@pytest.fixture
def parts(tmp_path: Path, tools: toolchain.Toolchain, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Return a project whose lock names no vendored source yet; the package index cannot be asked."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", NOWHERE)
    for name in ("CXX", "CC", "CUDAHOSTCXX"):
        monkeypatch.delenv(name, raising=False)
    return Parts(tmp_path / "parts", tools)


def test_all_targets_are_compiled_with_the_locked_sources(parts: Parts) -> None:
    """
    The default without a lock of them needs none: all other libraries stay those of the wheel, with the reason. The lock is read from
    CMake; the build needs no host afterwards, and compiles only changed units the next time.
    """
    record = parts.record(parts.build())
    assert record.transplant
    assert [*record.transplant.libraries] == ["widget/_extra.abi3.so"]
    assert sorted(record.transplant.base) == [f"widget/{name}.abi3.so" for name in ("_core", "_late", "_other")]
    assert record.unlocked == {
        "late": "the lock does not resolve zeta",
        "parts": "the lock does not resolve alpha, beta, delta",
    }
    locked = parts.lock()
    assert sorted(locked) == ["alpha", "alpha/gamma", "beta", "delta", "zeta"]
    assert all(entry.resolved for entry in locked.values())
    shutil.move(parts.upstreams, parts.folder / "moved")

    built = parts.build(mirrors=False)

    with zipfile.ZipFile(parts.folder / "dist" / built.filename) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    # The text alone: pytest would take minutes to show the difference of two libraries.
    words = re.findall(rb"parts: [a-z0-9 -]+", files["widget/_core.abi3.so"])
    assert words == [b"parts: alpha-v1 gamma-v1 beta-v1 delta-v1 headers-ours"]
    assert built.counts["native"] == 2
    record = json.loads(next(data for name, data in files.items() if name.endswith("/sparkwright.json")))
    assert ([*record["transplant"]["base"]], record["targets"]) == (["widget/_other.abi3.so"], ["_core", "_extra", "_late"])
    bill = json.loads(next(data for name, data in files.items() if name.endswith(".cdx.json")))
    assert {f"{HOST}{name}.git" in json.dumps(bill) for name in ("alpha", "beta", "gamma", "delta")} == {True}
    assert pipeline.current(parts.context("all", mirrors=False), "widget") is None
    assert pipeline.current(parts.context("_core", "_extra", "_late", mirrors=False), "widget") == built

    shutil.move(parts.folder / "moved", parts.upstreams)
    parts.patch("widget", "csrc/extra.cpp", "return 1;", "return 2;")
    core = next(parts.store.root.glob("work/parts/widget/*/build/CMakeFiles/_core.dir/csrc/core.cpp.o"))
    before = core.stat().st_mtime_ns
    parts.build()
    assert core.stat().st_mtime_ns == before


def test_a_source_that_cannot_be_had_stops_the_build_before_anything_is_configured(parts: Parts) -> None:
    """The host of a locked source is silent, or a rule for it does not match; targets that need no such source are compiled. `fetch` brings it."""
    parts.lock()
    shutil.move(parts.upstreams / "beta", parts.folder / "beta")
    for folder in ("mirrors", "work", "objects.git", "records"):
        shutil.rmtree(parts.folder / "store" / folder, ignore_errors=True)
    for targets in ((), ("all",), ("_core",)):
        with refusal("source-unreachable", match="beta", says="leave out what needs a"):
            parts.build(*targets)
    assert not list(parts.store.root.glob("work/parts/widget/*/build"))
    assert parts.record(parts.build("_extra")).targets == ("_extra",)

    shutil.move(parts.folder / "beta", parts.upstreams / "beta")
    pipeline.check_vendored(parts.context(), "widget")
    assert parts.record(parts.build(mirrors=False)).targets == ("_core", "_extra", "_late")
    rules = parts.root / "build/parts/archs.yaml"
    rules.write_text(RULES.replace("before: BETA_ARCHS 80", "before: BETA_ARCHS 86"))
    with refusal("rule-mismatch", match="beta-archs"):
        parts.build(mirrors=False)
    rules.write_text(RULES.replace("source: beta", "source: bata"))
    with refusal("rule-mismatch", match="beta-archs is for a vendored source that widget does not have"):
        parts.build(mirrors=False)


def test_source_that_the_lock_does_not_pin_is_refused(parts: Parts) -> None:
    """A declaration or a download that CMake reaches; one that it does not reach is no finding."""
    parts.declare("if(NEVER)\n  FetchContent_Declare(iota GIT_REPOSITORY https://upstream.example/iota.git)\nendif()\n")
    assert "iota" not in parts.lock()
    parts.declare("FetchContent_Declare(epsilon GIT_REPOSITORY https://upstream.example/epsilon.git GIT_TAG v1)\n")
    parts.declare("file(DOWNLOAD https://upstream.example/eta.h ${CMAKE_BINARY_DIR}/eta.h STATUS ignored)\n")

    with refusal("source-unlocked") as caught:
        parts.build("all")
    assert [name for name in ("epsilon", "eta.h", "iota") if name in str(caught.value.details)] == ["epsilon", "eta.h"]


def test_target_without_a_library_in_the_wheel_is_refused(parts: Parts) -> None:
    """A name that CMake does not know, and a library that the official wheel does not have, fail before the compiler runs."""
    parts.patch("widget", "CMakeLists.txt", "include(FetchContent)", "add_library(_more MODULE csrc/extra.cpp)\ninclude(FetchContent)")
    parts.lock()

    with refusal("base-mismatch"):
        parts.build("_more")
    with refusal("target-unknown", match="CMake made no target alpha", details=["targets: _core, _extra, _late, _more"]):
        parts.build("alpha")


def test_target_that_cmake_makes_empty_is_refused_by_name_and_else_stays_official(parts: Parts) -> None:
    """So does vLLM with QuTLASS for SM 9.0. Record and bill of materials list what was compiled."""
    library = "add_library(_late MODULE csrc/late.cpp)\n  target_include_directories(_late PRIVATE ${zeta_SOURCE_DIR})"
    parts.patch("widget", "CMakeLists.txt", library, "add_custom_target(_late)")
    parts.lock()
    context, built = parts.context(), parts.build()
    record = parts.record(built)

    assert (record.targets, record.unlocked) == (("_core", "_extra"), {"late": "CMake makes no library of _late for 12.1f"})
    with zipfile.ZipFile(pipeline.wheel_path(context, built)) as wheel:
        bill = next(wheel.read(name) for name in wheel.namelist() if name.endswith(".cdx.json"))
    assert (b"vendored/zeta" in bill, b"vendored/alpha" in bill) == (False, True)
    with refusal("target-empty", match="_late for 12.1f"):
        parts.build("_extra", "_late")


def test_only_the_targets_whose_sources_are_locked_are_compiled(parts: Parts) -> None:
    """
    A host that does not answer leaves its source unresolved, and its library to the official wheel: named, it is refused. The lock
    loses nothing, and is completed when the host answers.
    """
    shutil.move(parts.upstreams / "alpha", parts.folder / "alpha")
    parts.lock()
    locked = parts.lock()
    assert {name: entry.resolved for name, entry in locked.items()} == {"alpha": False, "beta": True, "zeta": True}

    record = parts.record(parts.build())
    assert record.transplant
    assert sorted(record.transplant.libraries) == ["widget/_extra.abi3.so", "widget/_late.abi3.so"]
    assert record.unlocked == {"parts": "the lock does not resolve alpha, delta"}
    for targets in (("_core",), ("all",)):
        with refusal("source-unresolved", match="alpha"):
            parts.build(*targets)

    shutil.move(parts.folder / "alpha", parts.upstreams / "alpha")
    parts.relock()
    assert all(entry.resolved for entry in parts.lock().values())
    assert parts.record(parts.build()).unlocked == {}


def test_a_commit_that_moved_is_refused_until_it_is_locked(parts: Parts) -> None:
    """Whether CMake declares the source, or looks for its folder before."""
    parts.lock()
    moved = parts.repositories["zeta"].commit({"zeta.h": b'#define ZETA "zeta-v2"\n'})
    first = parts.repositories["zeta"].git("rev-parse", "v1")
    parts.patch("widget", "CMakeLists.txt", first, moved)

    with refusal("source-unlocked", details=(f"zeta: CMake does not ask for {first}, which the lock names",)):
        parts.build("_late")

    assert parts.lock()["zeta"].commit == moved
    parts.build("_late")
    parts.patch("widget", "CMakeLists.txt", "set(TAG v1)", "set(TAG v2)")
    with refusal("source-unlocked", says="CMake asks for https://upstream.example/parts/beta.git at v2"):
        parts.build()
