"""
A build of everything from source, end to end: a small project in vLLM's shape, its vendored sources in real repositories, real compilers.

    widget/             the fork: setup.py drives CMake, as vLLM's does; one extension is optional
    alpha.git           vendored, handed over by WIDGET_ALPHA_SRC_DIR; has a submodule, gamma, and one that is nowhere to be had
    beta.git            vendored, with no variable but FetchContent's own
    delta.git           vendored, handed over by an environment variable, which asks for a folder of it
    headers.git         vendored by widget and a fork of the stack as well, which patches it
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from sparkwright.builder import pipeline
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.pipeline import BuiltWheel
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.store import Store
from sparkwright.forks import lock, resolve
from sparkwright.forks.context import Session
from sparkwright.forks.stack import Project

pytestmark = pytest.mark.toolchain

ROOT = Path(__file__).parents[2]
HOST = "https://upstream.example/parts/"

SETUP = """\
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class CMakeExtension(Extension):
    def __init__(self, name, optional=False):
        super().__init__(name, sources=[], py_limited_api=True, optional=optional)


class CMakeBuild(build_ext):
    def build_extensions(self):
        os.makedirs(self.build_temp, exist_ok=True)
        # What vLLM's setup.py says of its own accord: launchers that it finds, a number of jobs, a build type.
        arguments = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DWIDGET_JOBS=1"]
        if shutil.which("ccache"):
            arguments += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX", "CUDA")]
        arguments += os.environ.get("CMAKE_ARGS", "").split()
        subprocess.check_call(["cmake", str(Path.cwd()), "-G", "Ninja", *arguments], cwd=self.build_temp)
        for extension in self.extensions:
            target = extension.name.rpartition(".")[2]
            try:
                build = ["cmake", "--build", ".", f"-j{os.environ['MAX_JOBS']}", f"--target={target}"]
                subprocess.check_call(build, cwd=self.build_temp)
            except subprocess.CalledProcessError:
                if not extension.optional:
                    raise
                print(f"building extension {extension.name} failed; it is optional", file=sys.stderr)
                continue
            place = Path(self.get_ext_fullpath(extension.name)).parent
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(self.build_temp, f"{target}.abi3.so"), place)


setup(
    version=os.environ.get("WIDGET_VERSION_OVERRIDE", "0"),
    ext_modules=[CMakeExtension("widget._core"), CMakeExtension("widget._extra", optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.26)
project(widget LANGUAGES CXX)
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
include(FetchContent)
if(WIDGET_ALPHA_SRC_DIR)
  FetchContent_Declare(alpha SOURCE_DIR ${WIDGET_ALPHA_SRC_DIR})
else()
  FetchContent_Declare(alpha GIT_REPOSITORY https://upstream.example/parts/alpha.git GIT_TAG v1)
endif()
FetchContent_Declare(beta GIT_REPOSITORY https://upstream.example/parts/beta.git GIT_TAG v1)
if(DEFINED ENV{WIDGET_DELTA_SRC_DIR})
  set(delta_SOURCE_DIR $ENV{WIDGET_DELTA_SRC_DIR})
  FetchContent_Declare(delta SOURCE_DIR $ENV{WIDGET_DELTA_SRC_DIR})
else()
  FetchContent_Declare(delta GIT_REPOSITORY https://upstream.example/parts/delta.git GIT_TAG v1)
endif()
if(WIDGET_HEADERS_SRC_DIR)
  FetchContent_Declare(headers SOURCE_DIR ${WIDGET_HEADERS_SRC_DIR})
else()
  FetchContent_Declare(headers GIT_REPOSITORY https://upstream.example/parts/headers.git GIT_TAG v1)
endif()
FetchContent_MakeAvailable(alpha beta delta headers)

add_library(_core MODULE csrc/core.cpp csrc/kernel.cu ${alpha_SOURCE_DIR}/alpha.cu)
set(NATIVE "$<$<COMPILE_LANGUAGE:CUDA>:-gencode;arch=compute_121f,code=sm_121f>")
target_compile_options(_core PRIVATE ${NATIVE})
target_include_directories(_core PRIVATE csrc ${alpha_SOURCE_DIR} ${beta_SOURCE_DIR} ${delta_SOURCE_DIR} ${headers_SOURCE_DIR}/include)
add_library(_extra MODULE csrc/extra.cpp)
set_target_properties(_core _extra PROPERTIES PREFIX "" SUFFIX ".abi3.so")
"""

WIDGET: dict[str, str] = {
    "setup.py": SETUP,
    "CMakeLists.txt": CMAKE,
    "pyproject.toml": (
        '[build-system]\nrequires = ["setuptools>=77", "cmake>=3.26", "ninja"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "widget"\nrequires-python = ">=3.9"\ndynamic = ["version"]\n[tool.setuptools]\npackages = ["widget"]\n'
    ),
    "widget/__init__.py": "",
    "widget/_version.py": 'version = "1.5"\n',
    "csrc/core.cpp": (
        '#include "alpha.h"\n#include "gamma/gamma.h"\n#include "beta.h"\n#include "delta.h"\n#include "parts/headers.h"\n'
        'extern "C" char const* widget_parts() { return "parts: " ALPHA " " GAMMA " " BETA " " DELTA " " HEADERS; }\n'
    ),
    "csrc/kernel.cu": "__global__ void widget_kernel(int* x) { *x += 1; }\n",
    "csrc/extra.cpp": 'extern "C" int widget_extra() { return 1; }\n',
}
PARTS: dict[str, dict[str, str]] = {
    "alpha": {"alpha.h": '#define ALPHA "alpha-v1"\n', "alpha.cu": "__global__ void alpha_kernel(int* x) { *x += 2; }\n"},
    "beta": {"beta.h": '#define BETA "beta-v1"\n'},
    "delta": {"package/delta.h": '#define DELTA "delta-v1"\n', "delta.h": '#define DELTA "not the package"\n'},
    "gamma": {"gamma.h": '#define GAMMA "gamma-v1"\n'},
    "headers": {
        "include/parts/headers.h": '#define HEADERS "headers-v1"\n',
        "include/cutlass/version.h": "#define CUTLASS_MAJOR 1\n#define CUTLASS_MINOR 0\n#define CUTLASS_PATCH 0\n",
    },
}
PARTS["headers"]["include/parts/headers.h"] += "// ours follows\n"

STACK = """\
stack: "whole"
arch: "12.1f"
label: "spark.whole"
forks:
  headers:
    build: headers
    sources:
      git: {url: "https://upstream.example/parts/headers.git", ref: "v1"}
  widget:
    build: graft
    needs: [headers]
    sources:
      git: {url: "https://upstream.example/parts/widget.git", ref: "v1.5"}
    vendored:
      alpha/unused: {ignored: "only other machines use it"}
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
    defines:
      CMAKE_BUILD_TYPE: Release
      WIDGET_HEADERS_SRC_DIR: "{source:headers}"
      WIDGET_WORDS: "two words; and more"
    full:
      variables: {WIDGET_VERSION_OVERRIDE: "{version}", MAX_JOBS: "{jobs}"}
      config:
        bdist_wheel: {py_limited_api: cp39}
      folders: {delta: package}
      extensions: [widget/_core.abi3.so, widget/_extra.abi3.so]
"""
#: Our patch on the headers: the fork of the stack wins over what upstream's CMake would fetch.
OURS = ("include/parts/headers.h", '"headers-v1"', '"headers-ours"')


def git(folder: Path, *words: str) -> str:
    """Return what git prints, without any configuration."""
    who = {f"GIT_{one}_{what}": "t@t.example" for one in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    when = {f"GIT_{one}_DATE": "2026-11-01T12:00:00Z" for one in ("AUTHOR", "COMMITTER")}
    plain = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **who, **when}
    command = ["git", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main", *words]
    return subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=True).stdout.strip()


class Whole:
    """
    The project with its repositories, locked.

    Attributes:
        upstreams: Holds a repository for every part; the mirror map says that they are there.
        work: Where widget is configured and compiled.
    """

    def __init__(self, folder: Path, tools: Toolchain) -> None:
        self.folder, self.root, self.upstreams = folder, folder / "project", folder / "upstreams"
        self.work = folder.joinpath("store", "work", "whole", "widget", "full")
        for name, files in {**PARTS, "widget": WIDGET}.items():
            self.commit(name, files)
        modules = "".join(f'[submodule "{name}"]\n\tpath = {name}\n\turl = {HOST}{name}.git\n' for name in ("gamma", "unused"))
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
        for folder in ("forks/whole/widget", "forks/whole/headers", "build/whole", "cherry_picks", "ci/audit"):
            (self.root / folder).mkdir(parents=True)
        for fork in ("widget", "headers"):
            (self.root / "forks/whole" / fork / "series").write_text("")
        (self.root / "forks/whole/stack.yaml").write_text(STACK)
        (self.root / "build/whole/environment.yaml").write_text(ENVIRONMENT)
        (self.root / "build/whole/archs.yaml").write_text("expect_units: {widget: 2}\n")
        shutil.copy(demo / "build/demo/pylock.toml", self.root / "build/whole/pylock.toml")
        (self.root / "ci/audit.yaml").write_text(
            (demo / "ci/audit.yaml").read_text() + "  widget:\n    reason: the libraries of the test\n    libraries:\n"
            "      - {glob: widget/_core.abi3.so, role: target, cubins_min: 2}\n"
            "      - {glob: widget/_extra.abi3.so, role: base, reason: host code alone}\n"
        )
        (self.root / "ci/audit/whole.yaml").write_text("libraries: {}\n")
        self.lock()
        self.patch("headers", *OURS)

    def lock(self) -> None:
        """Lock the stack against its repositories."""
        (self.root / "forks/whole/lock.yaml").write_text(lock.render(resolve.resolve(self.session())))

    def session(self, *, mirrors: bool = True) -> Session:
        """Return a full build's run on it, as the command line would make it."""
        places = {f"{HOST}{name}.git": str(self.upstreams / name) for name in (*PARTS, "widget")} if mirrors else {}
        project = Project(self.root, "whole")
        return Session(
            project, self.store, ("widget",), self.folder / "dist", source="git", mirrors=places, full=True, jobs=2, offline=not mirrors
        )

    def build(self, **options: bool) -> BuiltWheel:
        return pipeline.build(self.session(**options), "widget")

    def failure(self) -> SparkwrightError:
        with pytest.raises(SparkwrightError) as caught:
            self.build()
        return caught.value

    def patch(self, fork: str, path: str, old: str, new: str) -> None:
        """Append to the series of *fork* a patch that replaces *old* by *new*."""
        work, tag = self.upstreams / fork, "v1.5" if fork == "widget" else "v1"
        series = self.root / "forks/whole" / fork
        count = len(list(series.glob("*.patch")))
        git(work, "checkout", "--quiet", "-B", "ours", tag if not count else "ours")
        text = (work / path).read_text() if (work / path).exists() else ""
        (work / path).write_text(text.replace(old, new) if old else new)
        git(work, "add", "--all")
        git(work, "commit", "--quiet", "-m", f"Change {count}")
        diff = git(work, "diff", "-U1", "--full-index", "HEAD~1", "HEAD")
        git(work, "checkout", "--quiet", "main")
        head = f"From: T <t@t.example>\nDate: Sun, 1 Nov 2026 12:00:00 +0000\nSubject: [PATCH] Change {count}\n\nAs told.\n\n"
        trailers = "Upstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends\n---\n"
        (series / f"{count}.patch").write_text(head + trailers + diff + "\n")
        with (series / "series").open("a") as listing:
            listing.write(f"{count}.patch\n")

    def edit(self, old: str, new: str) -> None:
        """Replace *old*, which must be there once, in environment.yaml."""
        path = self.root / "build/whole/environment.yaml"
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))

    def compiled(self) -> list[str]:
        """Return the units that the last run compiled, sorted."""
        calls = self.work / "launch" / "finished.jsonl"
        rows = [json.loads(line) for line in calls.read_text().splitlines()]
        return sorted(row["unit"].partition("/src/")[2] for row in rows if row["status"] == 0)


@pytest.fixture
def whole(tmp_path: Path, tools: Toolchain, monkeypatch: pytest.MonkeyPatch) -> Whole:
    """Return a locked project of which nothing is built yet; the package index cannot be asked."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", "http://127.0.0.1:9/simple/")
    for name in ("CXX", "CC", "CUDAHOSTCXX"):
        monkeypatch.delenv(name, raising=False)
    return Whole(tmp_path / "whole", tools)


def members(whole: Whole, built: BuiltWheel) -> dict[str, bytes]:
    with zipfile.ZipFile(whole.folder / "dist" / built.filename) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_full_build_compiles_everything_from_locked_sources_and_says_so(whole: Whole) -> None:
    """Each vendored source is in the library by its own variable, the stack's fork in place of one; the record knows no other origin."""
    built = whole.build()

    files = members(whole, built)
    # The text alone: pytest would take minutes to show the difference of two libraries.
    parts = re.findall(rb"parts: [a-z0-9 -]+", files["widget/_core.abi3.so"])
    assert parts == [b"parts: alpha-v1 gamma-v1 beta-v1 delta-v1 headers-ours"]
    assert built.filename.startswith("widget-1.5+spark.whole.p")
    assert "-cp39-abi3-linux_" in built.filename
    assert built.counts["native"] == 2
    assert built.transplant is not None
    assert sorted(built.transplant.libraries) == ["widget/_core.abi3.so", "widget/_extra.abi3.so"]
    assert built.transplant.base == {}
    record = json.loads(next(data for name, data in files.items() if name.endswith("/sparkwright.json")))
    assert record.get("base", "") == ""
    assert record["transplant"]["libraries"].keys() == built.transplant.libraries.keys()
    assert b'version = "1.5"' not in files["widget/_version.py"]
    units = ["_deps/alpha-src/alpha.cu", "csrc/core.cpp", "csrc/extra.cpp", "csrc/kernel.cu"]
    assert [unit.rpartition("/build/")[2] for unit in whole.compiled()] == units


def test_the_next_full_build_compiles_what_changed_and_works_without_the_hosts(whole: Whole) -> None:
    """A patch to one source gives one compile; the repositories are gone by then, and so is what an earlier build left in the package."""
    whole.build()
    stray = whole.work / "src" / "widget" / "stray.py"
    stray.write_text("")
    whole.patch("widget", "csrc/extra.cpp", "return 1;", "return 2;")
    shutil.rmtree(whole.upstreams)

    built = whole.build(mirrors=False)

    assert whole.compiled() == ["csrc/extra.cpp"]
    assert "widget/stray.py" not in members(whole, built)


def test_sources_that_cannot_be_had_are_all_named_before_anything_is_compiled(whole: Whole) -> None:
    """Two repositories are gone and the third is there: one error, two names, and no build folder."""
    for name in ("beta", "gamma"):
        shutil.rmtree(whole.upstreams / name)
    # What `lock` brought would do otherwise.
    shutil.rmtree(whole.folder / "store" / "mirrors")

    error = whole.failure()

    assert error.reference == "source-unresolved"
    assert error.data == {"missing": ["alpha", "beta"], "present": ["delta"]}
    assert "--mirror" in error.todo
    assert not (whole.work / "build").exists()


def test_a_folder_that_a_source_does_not_have_is_refused(whole: Whole) -> None:
    """CMake would install nothing of it, or everything, and say no word."""
    whole.edit("folders: {delta: package}", "folders: {delta: no-package}")

    assert whole.failure().reference == "file-invalid"


def test_an_optional_extension_that_does_not_compile_fails_the_build_with_its_compilers_words(whole: Whole) -> None:
    """Upstream goes on without it; here the member is named, and the line that the compiler refused."""
    whole.patch("widget", "csrc/extra.cpp", "return 1;", "return not_declared;")

    error = whole.failure()

    assert error.reference == "extension-missing"
    assert error.data == {"missing": ["widget/_extra.abi3.so"]}
    assert any("not_declared" in line and "error" in line for line in error.details)
    assert not list((whole.folder).glob("dist/*.whl"))


def test_a_download_that_upstream_swallows_fails_the_build(whole: Whole) -> None:
    """setup.py asks a host and minds no refusal; the error says which host it asked for."""
    line = "import urllib.request\n\ntry:\n    urllib.request.urlopen('http://downloads.example/kernels.tar')\nexcept OSError:\n    pass\n"
    whole.patch("widget", "setup.py", "import os\nimport shutil", f"{line}import os\nimport shutil")

    error = whole.failure()

    assert error.reference == "build-downloads"
    assert "downloads.example" in error.what


def test_a_unit_of_a_vendored_source_at_another_arch_fails_the_plan(whole: Whole) -> None:
    """The plan looks at every target, and names the unit by its place among the vendored sources."""
    flags = 'set_source_files_properties(${alpha_SOURCE_DIR}/alpha.cu PROPERTIES COMPILE_OPTIONS "-gencode;arch=compute_80,code=sm_80")\n'
    whole.patch("widget", "CMakeLists.txt", "add_library(_extra", f"{flags}add_library(_extra")

    error = whole.failure()

    assert error.reference == "arch-mismatch"
    assert any("<build>/_deps/alpha-src/alpha.cu" in line for line in error.details)


def test_a_backend_that_configures_otherwise_than_the_plan_is_found_out(whole: Whole) -> None:
    """An option that setup.py alone gives changes what is compiled: the wheel is refused."""
    whole.patch(
        "widget",
        "CMakeLists.txt",
        "add_library(_extra MODULE",
        "if(WIDGET_JOBS)\n  set(MORE csrc/kernel.cu)\nendif()\nadd_library(_extra MODULE ${MORE}",
    )

    error = whole.failure()

    assert error.reference == "arch-mismatch"
    assert "otherwise than the plan" in error.what
    assert any(line.startswith("compiled: ") and line.endswith("csrc/kernel.cu ") for line in error.details)


def test_a_source_that_wants_a_newer_compiler_is_refused_with_what_to_do(whole: Whole) -> None:
    """By the stack's data before CMake runs, and by CMake's own words where the data does not know."""
    refusal = (
        'if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS "99")\n'
        '  message(FATAL_ERROR "GCC >= 99 is required to build widget (found ${CMAKE_CXX_COMPILER_VERSION}). "\n'
        '    "The alpha dependency uses a header that libstdc++ does not provide before GCC 99.")\nendif()\n'
    )
    whole.patch("widget", "CMakeLists.txt", "include(FetchContent)\n", f"include(FetchContent)\n{refusal}")

    by_words = whole.failure()
    whole.edit("      config:\n", '      compiler: {version: "99", sources: [alpha], reason: a header of tomorrow}\n      config:\n')
    by_data = whole.failure()

    for error in (by_words, by_data):
        assert error.reference == "compiler-too-old"
        assert "g++-99" in error.todo
        assert error.data["needed"] == "99"
    assert any("The alpha dependency uses a header" in line for line in by_words.details)
    assert by_data.details == ("alpha: a header of tomorrow",)


def test_a_required_extension_that_does_not_compile_ends_the_build_with_its_unit(whole: Whole) -> None:
    """The gate knows which unit it was, and its compiler's words; the backend only knows that something failed."""
    whole.patch("widget", "csrc/core.cpp", 'extern "C"', 'not_a_type x;\nextern "C"')

    error = whole.failure()

    assert error.reference == "compile-failed"
    assert "csrc/core.cpp" in error.what
    assert any("not_a_type" in line for line in error.details)


def test_what_can_be_known_early_is_said_together(whole: Whole) -> None:
    """A syntax error in our Python and a tool that the lock lacks are two findings of one answer, before CMake runs."""
    whole.patch("widget", "widget/__init__.py", "", "def broken(:\n")
    whole.patch("widget", "pyproject.toml", '"ninja"]', '"ninja", "setuptools-rust>=1.9"]')

    error = whole.failure()

    assert error.reference == "early-check-failed"
    assert [line.partition(":")[0] for line in error.details] == ["widget/__init__.py", "pyproject.toml"]


def test_the_command_line_builds_and_audits_it(whole: Whole) -> None:
    """``build --full --json`` exits with 0; a second one reuses the wheel, and a graft of the same fork is another build."""
    mirror = f"{HOST}={whole.upstreams}{os.sep}"
    for name in (*PARTS, "widget"):
        (whole.upstreams / f"{name}.git").symlink_to(whole.upstreams / name)
    command = [
        sys.executable, "-m", "sparkwright", "build", "--full", "--fork", "widget", "--root", str(whole.root),
        "--stack", "whole", "--cache-dir", str(whole.store.root), "--source", "git", "--mirror", mirror,
        "--output", str(whole.folder / "dist"), "--json",
    ]  # fmt: skip
    done = [subprocess.run(command, cwd=whole.folder, capture_output=True, text=True, check=False) for _ in range(2)]

    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert "reused: nothing changed" in done[1].stderr
    document = json.loads(done[0].stdout)
    assert document["wheels"][0]["audit"]["findings"] == []
    graft = dataclasses.replace(whole.session(), full=False)
    assert not pipeline.is_built(graft, "widget")
    assert pipeline.is_built(whole.session(), "widget")
