"""
The demo's upstreams: three small git repositories, made from the files beside this module.

Names, dates and content are fixed, so the commit ids are the same on every machine. The history of
``vllm`` goes on after its tag, with the shapes that upkeep meets: a commit that touches a file that
the series patches, a renamed file, and a pull request of two commits that reaches ``main`` as one.
Its tree holds a file with CRLF line ends and a binary one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from sparkwright.core import git

#: One folder for each fork, holding the tree of its tag.
SOURCES = Path(__file__).parent / "upstreams"

#: Below this address the stack of the demo looks for its git sources; nothing answers there.
HOST = "https://upstream.example/mini/"

TAGS = {"cutlass": "v4.7.1", "flashinfer": "v0.7.2", "vllm": "v0.33.0"}
PULL_REQUEST = "refs/pull/7/head"

#: Files that do not survive in a source tree whose line ends people and tools normalise.
EXTRA: dict[str, dict[str, bytes]] = {
    "vllm": {
        "docs/windows.txt": b"Not supported.\r\nUse Linux.\r\n",
        "docs/logo.bin": bytes(range(256)) * 4,
    },
}

_MAINTAINER = "Upstream Maintainer <maintainer@upstream.example>"
_CONTRIBUTOR = "Contributor <contributor@upstream.example>"

#: 2026-11-01 12:00 UTC; each commit is an hour younger than the one before.
_EPOCH = 1793534400

_MAX_TOKENS = '''

def max_tokens() -> int:
    """Return how many tokens a batch may have."""
    return int(os.environ.get("MINI_VLLM_MAX_TOKENS", "1024"))
'''


class _Commit(NamedTuple):
    """A commit of the tree *files* on *ref*, on top of the commit number *parent*."""

    ref: str
    parent: int | None
    message: str
    files: Mapping[str, bytes]
    author: str = _MAINTAINER


def write(folder: Path) -> dict[str, str]:
    """
    Write the repositories ``<fork>.git`` to *folder*, in place of those that are there, and return
    the mirror map that leads to them.
    """
    for fork, tag in TAGS.items():
        path = folder / f"{fork}.git"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        git.run(
            ["init", "-q", "--bare", "--template=", "-b", "main", "--object-format=sha1", "."],
            cwd=path,
        )
        stream = b"".join(_stream(_history(fork), tag))
        git.run(["fast-import", "--quiet", "--done"], cwd=path, stdin=stream)
    return {f"{HOST}{fork}.git": str(folder / f"{fork}.git") for fork in TAGS}


def files(fork: str) -> dict[str, bytes]:
    """Return the tree of the tag of *fork*: path → bytes, in order."""
    root = SOURCES / fork
    # Whatever imports the shipped Python files leaves its byte code beside them.
    paths = (
        path for path in root.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
    shipped = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    return dict(sorted({**shipped, **EXTRA.get(fork, {})}.items()))


def _history(fork: str) -> list[_Commit]:
    """Return the commits of *fork*; number 0 is the tagged one."""
    main, tagged = "refs/heads/main", files(fork)
    release = _Commit(main, None, f"Release {TAGS[fork].removeprefix('v')}\n", tagged)
    if fork != "vllm":
        return [release]
    envs, scales = "mini_vllm/envs.py", "mini_vllm/quantization/nvfp4_scales.py"
    limits = {"docs/limits.md": b"# Limits\n\n2048 tokens in a batch.\n"}
    last = 'return int(os.environ.get("MINI_VLLM_MAX_EXPERTS", "512"))\n'
    scaled = _edited(
        tagged, scales, "return max(self.values)", "return max(*self.values, 2.0**-126)"
    )
    renamed = _edited(scaled, "CMakeLists.txt", "csrc/moe/topk.cu", "csrc/moe/topk_one.cu")
    renamed["csrc/moe/topk_one.cu"] = renamed.pop("csrc/moe/topk.cu")
    limited = _edited(tagged, envs, last, last + _MAX_TOKENS)
    doubled = {**_edited(limited, envs, '"1024"', '"2048"'), **limits}
    merged = {**renamed, envs: doubled[envs], **limits}
    message = "Keep the largest scale above zero\n\nA layer of zeros would divide by it.\n"
    return [
        release,
        _Commit(main, 0, message, scaled),
        _Commit(main, 1, "Name the top-k unit for what it computes\n", renamed),
        _Commit(PULL_REQUEST, 0, "Limit the tokens of a batch\n", limited, _CONTRIBUTOR),
        _Commit(PULL_REQUEST, 3, "Double the limit, and write it down\n", doubled, _CONTRIBUTOR),
        _Commit(main, 2, "Limit the tokens of a batch (#7)\n", merged, _CONTRIBUTOR),
    ]


def _edited(tree: Mapping[str, bytes], path: str, old: str, new: str) -> dict[str, bytes]:
    """Return *tree* with *new* in place of *old*, which its file *path* holds."""
    assert old.encode() in tree[path], f"{path} was changed without its history"
    return {**tree, path: tree[path].replace(old.encode(), new.encode())}


def _stream(commits: Iterable[_Commit], tag: str) -> Iterable[bytes]:
    """Yield the input of git fast-import."""
    for number, commit in enumerate(commits):
        when = f"{_EPOCH + number * 3600} +0000"
        yield (
            f"commit {commit.ref}\nmark :{number + 1}\nauthor {commit.author} "
            f"{when}\ncommitter {_MAINTAINER} {when}\n"
        ).encode()
        yield _data(commit.message.encode())
        yield b"" if commit.parent is None else f"from :{commit.parent + 1}\n".encode()
        yield b"deleteall\n"
        for path, content in commit.files.items():
            yield f"M {git.REGULAR} inline {path}\n".encode() + _data(content)
        yield b"\n"
    yield f"tag {tag}\nfrom :1\ntagger {_MAINTAINER} {_EPOCH} +0000\n".encode()
    yield _data(f"{tag}\n".encode()) + b"done\n"


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)
