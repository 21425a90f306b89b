"""
The package index of the demo's stack, on a loopback address.

The index offers the official wheel of mini vLLM as its release would have it: the libraries inside
are compiled from the unpatched tree for 12.0f, which is what a release makes for every card of the
family.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.server
import platform
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from sparkwright.builder.errors import BuildError
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import digest, process
from sparkwright.demo.upstreams import SOURCES

NAME, VERSION = "mini-vllm", "0.33.0"
PACKAGE = "mini_vllm"

#: Library → its sources, relative to the tree.
LIBRARIES = {
    "_C_stable_libtorch": ("csrc/*.cpp", "csrc/*.cu", "csrc/quantization/**/*.cu"),
    "_moe_C_stable_libtorch": ("csrc/moe/*.cpp", "csrc/moe/*.cu"),
}
#: The library that an external project would have made; a graft leaves it as it is.
EXTERNAL = "_big_C"

#: Stripped, because nvcc leaves names with its process id in the symbol table; without them the
#: wheel is the same each time.
FLAGS = (
    "-shared",
    "-O3",
    "-std=c++17",
    "-Xcompiler=-fPIC",
    "-Xlinker=-s",
    "-gencode",
    "arch=compute_120f,code=sm_120f",
    "--compress-mode=size",
)


def tag(machine: str = "") -> str:
    """Return the tag of the wheel for *machine*, or for this one."""
    return f"cp38-abi3-linux_{machine or platform.machine()}"


def write_base_wheel(
    folder: Path,
    *,
    nvcc: Path,
    env: Mapping[str, str],
    scratch: Path,
    machine: str = "",
    compiler: str = "",
) -> Path:
    """
    Compile the libraries of mini vLLM and write its official wheel to *folder*.

    Args:
        env: The variables under which nvcc runs.
        scratch: Where libraries and logs go.
        machine: For which machine; empty for this one.
        compiler: The C++ compiler that nvcc drives; empty for its own choice.

    Raises:
        compile-failed: nvcc refused a source.
    """
    tree, headers = SOURCES / "vllm", SOURCES / "cutlass"
    sources = {
        library: sorted(path for pattern in patterns for path in tree.glob(pattern))
        for library, patterns in LIBRARIES.items()
    }
    sources[EXTERNAL] = [SOURCES / "big" / "big.cu"]
    includes = (tree / "csrc", headers / "include", headers / "tools" / "util" / "include")
    host_compiler = [f"-ccbin={compiler}"] if compiler else []
    options = [*FLAGS, *host_compiler, *(f"-I{path}" for path in includes)]
    libraries = {library: scratch / f"{library}.abi3.so" for library in sources}
    scratch.mkdir(parents=True, exist_ok=True)

    def build(library: str) -> None:
        process.run(
            [nvcc, *options, "-o", libraries[library], *sources[library]],
            log=scratch / f"{library}.log",
            env=env,
            failure=partial(BuildError, "compile-failed"),
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(build, sources))
    name = WheelName(PACKAGE, VERSION, tag(machine))
    members = {
        **{f"{path.relative_to(tree)}": path for path in (tree / PACKAGE).rglob("*.py")},
        **{f"{PACKAGE}/{path.name}": path for path in libraries.values()},
        f"{name.info}/licenses/LICENSE": tree / "LICENSE",
    }
    contents = {member: path.read_bytes() for member, path in members.items()}
    program = f"[console_scripts]\n{NAME} = {PACKAGE}.__main__:main\n"
    contents[f"{name.info}/entry_points.txt"] = program.encode()
    metadata = (
        f"Metadata-Version: 2.4\nName: {NAME}\nVersion: {VERSION}\n"
        "Requires-Python: >=3.9\nLicense-File: LICENSE\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    archive.write(folder, name, contents, metadata, pure=False)
    return folder / name.filename


def write_index(root: Path, wheel: Path) -> None:
    """
    Write a simple index (PEP 503) that offers *wheel*, which lies below *root*, and nothing else.
    """
    page = root / "simple" / NAME / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    address = f"../../{wheel.relative_to(root)}#sha256={digest.sha256_file(wheel)}"
    page.write_text(f'<!DOCTYPE html>\n<a href="{address}">{wheel.name}</a>\n', "utf-8")


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it so
        """Say nothing; the base class writes to standard error."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """
    Serve the files of *folder* on a free loopback port while the block runs, and yield the address.
    """
    handler = partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
