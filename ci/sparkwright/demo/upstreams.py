"""
The demo's upstreams: three small git repositories, made from the files beside this module.

Names, dates and content are fixed, so the commit ids are the same on every machine. After its tag,
``vllm`` has a commit that touches a file that the series patches. Its tree holds a file with CRLF
line ends and a binary one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from sparkwright.core import git

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


def write(folder: Path) -> dict[str, str]:
    """
    Write the repositories ``<fork>.git`` to *folder*, in place of those that are there, and return
    the mirror map that leads to them.
    """
    for fork in TAGS:
        path = folder / f"{fork}.git"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        git.run(
            ["init", "-q", "--bare", "--template=", "-b", "main", "--object-format=sha1", "."],
            cwd=path,
        )
        git.run(["fast-import", "--quiet", "--done"], cwd=path, stdin=b"".join(_stream(fork)))
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


def _stream(fork: str) -> Iterator[bytes]:
    """Yield the input of git fast-import."""
    tree, tag = files(fork), TAGS[fork]
    yield from _commit(f"Release {tag.removeprefix('v')}\n", _EPOCH, tree)
    yield f"tag {tag}\nfrom refs/heads/main\ntagger {_MAINTAINER} {_EPOCH} +0000\n".encode()
    yield _data(f"{tag}\n".encode())
    if fork == "vllm":
        path, old = "mini_vllm/quantization/nvfp4_scales.py", b"return max(self.values)"
        changed = tree[path].replace(old, b"return max(*self.values, 2.0**-126)")
        message = "Keep the largest scale above zero\n\nA layer of zeros would divide by it.\n"
        yield from _commit(message, _EPOCH + 3600, {**tree, path: changed})
    yield b"done\n"


def _commit(message: str, when: int, tree: dict[str, bytes]) -> Iterator[bytes]:
    """Yield a commit of *tree* on top of main."""
    yield f"commit refs/heads/main\ncommitter {_MAINTAINER} {when} +0000\n".encode()
    yield _data(message.encode()) + b"deleteall\n"
    for path, content in tree.items():
        yield f"M {git.REGULAR} inline {path}\n".encode() + _data(content)


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)
