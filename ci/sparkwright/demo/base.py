"""
What the demo's stack needs beside the upstreams: a package index, on a loopback address.

The index offers the official wheel of mini vLLM as its release would have it: the libraries inside
are compiled from the unpatched tree for 12.0f, which is what a release makes for every card of the
family.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import functools
import hashlib
import http.server
import platform
import threading
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from sparkwright.builder.errors import BuildError
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

#: The earliest time that a zip archive can state.
_DATE = (1980, 1, 1, 0, 0, 0)


def tag(machine: str = "") -> str:
    """Return the tag of the wheel for *machine*, or for this one."""
    return f"cp38-abi3-linux_{machine or platform.machine()}"


def write_base_wheel(
    folder: Path,
    tree: Path,
    headers: Path,
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
        tree: A checkout of its tag.
        headers: A checkout of the CUTLASS that it is compiled with.
        env: The variables under which nvcc runs.
        scratch: Where libraries and logs go.
        machine: For which machine; empty for this one.
        compiler: The C++ compiler that nvcc drives; empty for its own choice.

    Raises:
        compile-failed: nvcc refused a source.
    """
    sources = {
        library: sorted(path for pattern in patterns for path in tree.glob(pattern))
        for library, patterns in LIBRARIES.items()
    }
    sources[EXTERNAL] = [SOURCES / "big" / "big.cu"]
    includes = [
        f"-I{path}"
        for path in (tree / "csrc", headers / "include", headers / "tools" / "util" / "include")
    ]
    scratch.mkdir(parents=True, exist_ok=True)

    def build(library: str) -> Path:
        made = scratch / f"{library}.abi3.so"
        command: list[str | Path] = [
            nvcc,
            *FLAGS,
            *([f"-ccbin={compiler}"] if compiler else ()),
            *includes,
            "-o",
            made,
            *sources[library],
        ]
        process.run(
            command,
            log=scratch / f"{library}.log",
            env=env,
            failure=partial(BuildError, "compile-failed"),
        )
        return made

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(build, sources))
    members = {
        f"{PACKAGE}/{path.relative_to(tree / PACKAGE)}": path.read_bytes()
        for path in sorted((tree / PACKAGE).rglob("*.py"))
    }
    members |= {f"{PACKAGE}/{library.name}": library.read_bytes() for library in libraries}
    info = f"{PACKAGE}-{VERSION}.dist-info"
    described = {
        "Metadata-Version": "2.4",
        "Name": NAME,
        "Version": VERSION,
        "Requires-Python": ">=3.9",
        "License-File": "LICENSE",
    }
    members |= {
        f"{info}/METADATA": "".join(
            f"{field}: {value}\n" for field, value in described.items()
        ).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: sparkwright demo\nRoot-Is-Purelib: "
        f"false\nTag: {tag(machine)}\n".encode(),
        f"{info}/entry_points.txt": f"[console_scripts]\n{NAME} = "
        f"{PACKAGE}.__main__:main\n".encode(),
        f"{info}/licenses/LICENSE": (tree / "LICENSE").read_bytes(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{PACKAGE}-{VERSION}-{tag(machine)}.whl"
    _pack(wheel, members, f"{info}/RECORD")
    return wheel


def _pack(wheel: Path, members: Mapping[str, bytes], record: str) -> None:
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        lines = [f"{name},sha256={_unpadded(data)},{len(data)}\n" for name, data in members.items()]
        for name, data in {**members, record: "".join([*lines, f"{record},,\n"]).encode()}.items():
            member = zipfile.ZipInfo(name, _DATE)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(member, data)


def _unpadded(data: bytes) -> str:
    """Return the sha256 of *data* as RECORD holds it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write_index(root: Path, wheel: Path) -> None:
    """
    Write a simple index (PEP 503) that offers *wheel*, which lies below *root*, and nothing else.
    """
    page = root / "simple" / NAME / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    place = f"../../{wheel.relative_to(root)}#sha256={digest.sha256_file(wheel)}"
    page.write_text(
        f'<!DOCTYPE html>\n<html><body><a href="{place}">{wheel.name}</a></body></html>\n', "utf-8"
    )
    (root / "simple" / "index.html").write_text(
        f'<!DOCTYPE html>\n<html><body><a href="{NAME}/">{NAME}</a></body></html>\n', "utf-8"
    )


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it so
        """Say nothing; the base class writes to standard error."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """
    Serve the files of *folder* on a free loopback port while the block runs, and yield the address.
    """
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
