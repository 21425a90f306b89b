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

import msgspec

from sparkwright.core import git
from sparkwright.core.errors import FileError

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


class Upstream(msgspec.Struct, frozen=True):
    """
    One repository.

    Attributes:
        url: The address by which the demo's stack knows it.
        path: The bare repository.
        commit, tree: What *tag* names.
        refs: Every ref and the commit or tag object that it names.
    """

    url: str
    path: Path
    tag: str
    commit: str
    tree: str
    refs: dict[str, str]


class Upstreams(msgspec.Struct, frozen=True):
    """The repositories by the name of their fork."""

    forks: dict[str, Upstream]

    def mirror_map(self) -> dict[str, str]:
        """Return what ``--mirror`` would say: each url and the repository in its place."""
        return {upstream.url: str(upstream.path) for upstream in self.forks.values()}


class _Edit(NamedTuple):
    """Replace *old*, which occurs once in the file, by *new*; an empty *old* makes a new file."""

    path: str
    old: str
    new: str


class _Commit(NamedTuple):
    """A commit on *ref*, on top of the commit number *parent*."""

    ref: str
    parent: int | None
    message: str
    files: Mapping[str, bytes]
    renames: tuple[tuple[str, str], ...] = ()
    author: str = _MAINTAINER


def write(folder: Path) -> Upstreams:
    """Write the repositories to *folder*, in place of those that are there."""
    return Upstreams({fork: _write_one(fork, folder / f"{fork}.git") for fork in TAGS})


def files(fork: str) -> dict[str, bytes]:
    """Return the tree of the tag of *fork*: path → bytes, in order."""
    root = SOURCES / fork
    # Whatever imports the shipped Python files leaves its byte code beside them.
    paths = [
        path for path in root.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    ]
    found = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    return dict(sorted({**found, **EXTRA.get(fork, {})}.items()))


def _write_one(fork: str, path: Path) -> Upstream:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    git.run(
        [
            "init",
            "--quiet",
            "--bare",
            "--template=",
            "--initial-branch=main",
            "--object-format=sha1",
            ".",
        ],
        cwd=path,
    )
    tag = TAGS[fork]
    commits = [_Commit("refs/heads/main", None, f"Release {tag.removeprefix('v')}\n", files(fork))]
    if fork == "vllm":
        commits += _later_commits(commits[0].files)
    git.run(["fast-import", "--quiet", "--done"], cwd=path, stdin=b"".join(_stream(commits, tag)))
    listed = (
        git.run(["for-each-ref", "--format=%(refname) %(objectname)"], cwd=path)[1]
        .decode()
        .splitlines()
    )
    named = (
        git.run(["rev-parse", f"{tag}^{{commit}}", f"{tag}^{{tree}}"], cwd=path)[1].decode().split()
    )
    refs = dict(line.split(" ", 1) for line in listed)
    return Upstream(f"{HOST}{fork}.git", path, tag, named[0], named[1], refs)


def _later_commits(tagged: Mapping[str, bytes]) -> list[_Commit]:
    """Return what happened to vllm after its tag; commit 0 is the tagged one."""
    envs, scales = "mini_vllm/envs.py", "mini_vllm/quantization/nvfp4_scales.py"
    last = 'return int(os.environ.get("MINI_VLLM_MAX_EXPERTS", "512"))\n'
    first = _edited(tagged, _Edit(envs, last, last + _MAX_TOKENS))
    limits = _Edit("docs/limits.md", "", "# Limits\n\n2048 tokens in a batch.\n")
    second = _edited({**tagged, **first}, _Edit(envs, '"1024"', '"2048"'), limits)
    return [
        _Commit(
            "refs/heads/main", 0, "Keep the largest scale above zero\n\nA layer of zeros would "
                "divide by it.\n",
            _edited(tagged, _Edit(scales, "return max(self.values)", "return max(*self.values, "
                "2.0**-126)")),
        ),
        _Commit(
            "refs/heads/main", 1, "Name the top-k unit for what it computes\n",
            _edited(tagged, _Edit("CMakeLists.txt", '  "csrc/moe/topk.cu")\nset', '  "csrc/moe/topk_one.cu")\nset'),
                    _Edit("CMakeLists.txt", 'SRCS "csrc/moe/topk.cu"', 'SRCS "csrc/moe/topk_one.cu"')),
            renames=(("csrc/moe/topk.cu", "csrc/moe/topk_one.cu"),),
        ),
        _Commit(PULL_REQUEST, 0, "Limit the tokens of a batch\n", first, author=_CONTRIBUTOR),
        _Commit(PULL_REQUEST, 3, "Double the limit, and write it "
            "down\n", second, author=_CONTRIBUTOR),
        _Commit("refs/heads/main", 2, "Limit the tokens of a batch "
            "(#7)\n", {**first, **second}, author=_CONTRIBUTOR),
    ]  # fmt: skip


def _edited(before: Mapping[str, bytes], *edits: _Edit) -> dict[str, bytes]:
    """
    Return the files that *edits* change, whole.

    Raises:
        file-invalid: A text to replace does not occur exactly once: the shipped file was changed
            without its history.
    """
    after: dict[str, bytes] = {}
    for edit in edits:
        text = after.get(edit.path, before.get(edit.path, b"")).decode()
        if edit.old and text.count(edit.old) != 1:
            raise FileError(
                "file-invalid",
                f"The demo's {edit.path} holds {edit.old!r} {text.count(edit.old)} times instead "
                f"of once.",
            )
        after[edit.path] = (text.replace(edit.old, edit.new) if edit.old else edit.new).encode()
    return after


def _stream(commits: Iterable[_Commit], tag: str) -> Iterable[bytes]:
    """Yield the input of git fast-import."""
    for number, commit in enumerate(commits):
        when = f"{_EPOCH + number * 3600} +0000"
        yield (
            f"commit {commit.ref}\nmark :{number + 1}\nauthor {commit.author} "
            f"{when}\ncommitter {_MAINTAINER} {when}\n"
        ).encode()
        yield _data(commit.message.encode())
        if commit.parent is not None:
            yield f"from :{commit.parent + 1}\n".encode()
        for old, new in commit.renames:
            yield f"R {old} {new}\n".encode()
        for path, content in commit.files.items():
            yield f"M {git.REGULAR} inline {path}\n".encode() + _data(content)
        yield b"\n"
    yield (
        f"tag {tag}\nfrom :1\ntagger {_MAINTAINER} {_EPOCH} +0000\n".encode()
        + _data(f"{tag}\n".encode())
        + b"done\n"
    )


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)
