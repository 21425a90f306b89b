"""
The demo's upstreams: three small git repositories, and the official wheel of mini vLLM.

The repositories are made from the files beside this module. Names, dates and content are fixed, so
the commit ids are the same on every machine. After its tag, ``vllm`` has a commit that touches a
file that the series patches. Its tree holds a file with CRLF line ends and a binary one.

The libraries of the official wheel are compiled from the unpatched tree for 12.0f, as upstream's
release does for every card of the family. A loopback server stands for the package index.
"""

import contextlib
import http.server
import platform
import shutil
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from sparkwright.builder import BuildError
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import process
from sparkwright.core.files import sha256_file
from sparkwright.core.git import COMMITTER, REGULAR, Objects

#: One folder for each fork, holding the tree of its tag.
SOURCES = Path(__file__).parent / "upstreams"

#: Below this address the stack of the demo looks for its git sources; nothing answers there.
HOST = "https://upstream.example/mini/"

TAGS = {"cutlass": "v4.7.1", "flashinfer": "v0.7.2", "vllm": "v0.33.0"}

#: Files that do not survive in a source tree whose line ends people and tools normalise.
EXTRA: dict[str, dict[str, bytes]] = {
    "vllm": {
        "docs/windows.txt": b"Not supported.\r\nUse Linux.\r\n",
        "docs/logo.bin": bytes(range(256)) * 4,
    },
}

_MAINTAINER = "Upstream Maintainer <maintainer@upstream.example>"
#: 2026-11-01 12:00 UTC; each commit is an hour younger than the one before.
_EPOCH = 1793534400

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

#: What the program of mini vLLM prints if its scales and its library are right.
ANSWER = " ".join(["6", "-0.5"] * 8)


def write_repositories(folder: Path) -> dict[str, str]:
    """
    Write the repositories ``<fork>.git`` to *folder*, in place of those that are there, and return
    the mirror map that leads to them.
    """
    tagger = {**COMMITTER, "GIT_COMMITTER_DATE": f"{_EPOCH} +0000"}
    for fork, tag in TAGS.items():
        path, tree = folder / f"{fork}.git", files(fork)
        shutil.rmtree(path, ignore_errors=True)
        objects = Objects(path)
        tip = _commit(objects, f"Release {tag.removeprefix('v')}\n", _EPOCH, tree)
        objects.run(["tag", "-a", "-m", tag, tag, tip], env=tagger)
        if fork == "vllm":
            name, old = "mini_vllm/quantization/nvfp4_scales.py", b"return max(self.values)"
            changed = tree[name].replace(old, b"return max(*self.values, 2.0**-126)")
            message = "Keep the largest scale above zero\n\nA layer of zeros would divide by it.\n"
            tip = _commit(objects, message, _EPOCH + 3600, {**tree, name: changed}, tip)
        objects.run(["branch", "main", tip])
    return {f"{HOST}{fork}.git": str(folder / f"{fork}.git") for fork in TAGS}


def files(fork: str) -> dict[str, bytes]:
    """Return the tree of the tag of *fork*: path → bytes, in order."""
    root = SOURCES / fork
    shipped = {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        # Whatever imports the shipped Python files leaves its byte code beside them.
        if path.is_file() and path.parent.name != "__pycache__"
    }
    return dict(sorted({**shipped, **EXTRA.get(fork, {})}.items()))


def _commit(
    objects: Objects, message: str, when: int, tree: Mapping[str, bytes], parent: str = ""
) -> str:
    """Return a commit of *tree* on top of *parent*."""
    stored = objects.store_files((path, REGULAR, content) for path, content in tree.items())
    return objects.commit(stored, message, parent, author=_MAINTAINER, date=f"{when} +0000")


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
    sources = {EXTERNAL: [SOURCES / "big" / "big.cu"]}
    for library, patterns in LIBRARIES.items():
        for pattern in patterns:
            sources.setdefault(library, []).extend(sorted(tree.glob(pattern)))
    includes = (tree / "csrc", headers / "include", headers / "tools" / "util" / "include")
    host_compiler = [f"-ccbin={compiler}"] if compiler else []
    options = [*FLAGS, *host_compiler, *(f"-I{path}" for path in includes)]
    libraries = {library: scratch / f"{library}.abi3.so" for library in sources}
    scratch.mkdir(parents=True, exist_ok=True)

    for library, paths in sources.items():
        process.run(
            [nvcc, *options, "-o", libraries[library], *paths],
            log=scratch / f"{library}.log",
            env=env,
            failure=partial(BuildError, "compile-failed"),
        )
    name = WheelName(PACKAGE, VERSION, tag(machine))
    members = {
        **{f"{path.relative_to(tree)}": path for path in (tree / PACKAGE).rglob("*.py")},
        **{f"{PACKAGE}/{path.name}": path for path in libraries.values()},
        f"{name.info}/licenses/LICENSE": tree / "LICENSE",
    }
    contents = {member: path.read_bytes() for member, path in members.items()}
    contents[f"{name.info}/entry_points.txt"] = (
        f"[console_scripts]\n{NAME} = {PACKAGE}.model:main\n".encode()
    )
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
    address = f"../../{wheel.relative_to(root)}#sha256={sha256_file(wheel)}"
    page.write_text(f'<!DOCTYPE html>\n<a href="{address}">{wheel.name}</a>\n', "utf-8")


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as the base class
        """Say nothing; the base class writes to standard error."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """
    Serve the files of *folder* on a free loopback port while the block runs, and yield the address.
    """
    handler = partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
