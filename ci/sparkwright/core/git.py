"""
Run git, by GitPython's command layer, and address trees by their ids in an object database.

The user's git configuration never leaks in: its files are switched off and its variables removed,
except those that say how to reach a host.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sparkwright.core.errors import GitError
from sparkwright.core.process import refuse_full_disk, wrap_with_limits
from sparkwright.core.store import locked, translate_disk_full, write_file

#: Variables about reaching hosts, which must stay; GIT_DIR, GIT_INDEX_FILE and their like would
#: redirect our commands.
_NETWORK = frozenset(
    {
        "GIT_PROXY_COMMAND",
        "GIT_SSH",
        "GIT_SSH_COMMAND",
        "GIT_SSH_VARIANT",
        "GIT_SSL_CAINFO",
        "GIT_SSL_CAPATH",
        "GIT_SSL_CERT",
        "GIT_SSL_KEY",
        "GIT_SSL_NO_VERIFY",
        "GIT_ASKPASS",
        "GIT_HTTP_PROXY_AUTHMETHOD",
    }
)

_ENVIRONMENT = {
    # In place of the user's own file.
    "GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("gitconfig")),
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "LANGUAGE": "C",
    "LC_ALL": "C",
    "TZ": "UTC",
}

#: Otherwise git takes a damaged bare repository for no repository, and works in the one that the
#: cache directory happens to lie in.
HERE = {"GIT_DIR": "."}

#: The committer of every commit that is made here.
COMMITTER = {
    "GIT_COMMITTER_NAME": "sparkwright",
    "GIT_COMMITTER_EMAIL": "export@sparkwright.invalid",
}

REGULAR, EXECUTABLE, LINK, SUBMODULE = "100644", "100755", "120000", "160000"

#: What ``timeout`` ends with if it ended the program (timeout(1)). After a kill it is 137, whoever
#: killed it.
_OUT_OF_TIME = 124

#: Phase, how many are done, and of how many.
OnProgress = Callable[[str, int, int], None]

#: What git prints while it works here. Lines of finished work end in ", done."; those that begin
#: with "remote:" tell of the server's work, which takes seconds.
_PROGRESS = re.compile(
    r"(Receiving objects|Resolving deltas|Updating files):\s+\d+% \((\d+)/(\d+)\)"
)


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: bytes | IO[bytes] | None = None,
    check: bool = True,
    timeout: float | None = None,
    durable: bool = True,
    on_progress: OnProgress | None = None,
) -> tuple[int, bytes, str]:
    """
    Run ``git`` with *arguments* and return its status, standard output and standard error.

    Args:
        durable: Flush files to the disk; False for files that do not outlive the run.
        on_progress: Called with the progress that git's ``--progress`` prints; standard output is
            not returned then.

    Raises:
        tool-missing: git is not installed.
        git-failed: It ended with another status than 0 and *check* is set, or ran out of time.
        disk-full: It failed, and there is no room where it writes.
    """
    options = [] if durable else ["-c", "core.fsync=none"]
    environment = {**_ENVIRONMENT, **(env or {})}
    # A git that outlived a killed run would write under the lock of the next one.
    command = wrap_with_limits(["git", *options, *arguments])
    if timeout:
        # `timeout` ends git's helpers as well, which would hold the output open.
        command = wrap_with_limits(["timeout", "--kill-after=5", f"{timeout:g}", *command])
    with tempfile.TemporaryFile() as spool:
        if isinstance(stdin, bytes):
            spool.write(stdin)
            spool.seek(0)
        source = spool if stdin is None or isinstance(stdin, bytes) else stdin
        layer = _git()(str(cwd))
        if on_progress:
            # GitPython's handle ends the process when it is garbage-collected.
            child = layer.execute(command, istream=source, env=environment, as_process=True)
            messages, output = _pass_progress(child.proc.stderr, on_progress), b""
            status = child.proc.wait()
        else:
            status, output, messages = layer.execute(
                command,
                istream=source,
                env=environment,
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
            )
    text = str(messages)
    # A smaller status is an answer: there is no such object, or a patch does not fit.
    if status >= 128 or (check and status):
        details = text.strip().splitlines()[-20:]
        refuse_full_disk("git", details, cwd, environment.get("GIT_WORK_TREE", cwd))
    if check and status:
        end = f"ended with status {status}"
        if timeout and status == _OUT_OF_TIME:
            end = f"did not end within {timeout:g} s"
        raise GitError("git-failed", f"git {arguments[0]} {end}.", details=details)
    return status, output, text


def _git() -> Any:
    """
    Return GitPython's class for commands, and remove the variables that would redirect them. It is
    imported late, because that takes as long as the rest of the command line.
    """
    for name in [name for name in os.environ if name.startswith("GIT_") and name not in _NETWORK]:
        del os.environ[name]
    os.environ["GIT_PYTHON_REFRESH"] = "quiet"
    from git.cmd import Git

    return Git


def _pass_progress(stream: io.BufferedReader, on_progress: OnProgress) -> str:
    """Pass the progress that git prints to *on_progress*, and return its other messages."""
    messages = list[str]()
    # Its lines also end with a carriage return, as git ends the states of a live line.
    for line in io.TextIOWrapper(stream, "utf-8", "replace"):
        if match := _PROGRESS.match(line):
            on_progress(match[1], int(match[2]), int(match[3]))
        else:
            messages.append(line)
    return "".join(messages)


class Objects:
    """
    The object database at *path*, a bare repository; made when missing.

    Attributes:
        path: The repository.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / "HEAD").exists():
            return
        with translate_disk_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                run(["init", "-q", "--bare", "--template=", "new"], cwd=Path(scratch))
                info = Path(scratch) / "new" / "info"
                info.mkdir()
                # A tree's own .gitattributes must not change bytes on checkout; this file outranks
                # it (gitattributes(5)).
                (info / "attributes").write_text(
                    "* -text -eol -filter -ident -working-tree-encoding -export-subst\n"
                )
                # Another process may have made the repository meanwhile.
                with contextlib.suppress(OSError):
                    info.parent.rename(path)

    def run(self, arguments: Sequence[str], **options: Any) -> tuple[int, bytes, str]:
        """Run git in the repository; see `sparkwright.core.git.run`."""
        env = {**HERE, **(options.pop("env", None) or {})}
        return run(arguments, cwd=self.path, env=env, **options)

    def text(self, *arguments: str, **options: Any) -> str:
        """Return the output of git, as `run`, in which the bytes of paths may be surrogates."""
        return self.run(arguments, **options)[1].decode("utf-8", "surrogateescape")

    def borrow(self, folder: Path) -> None:
        """
        Make the objects of every repository in *folder* available here, as alternates
        (gitrepository-layout(5)).
        """
        objects = self.path / "objects"
        alternates = objects / "info" / "alternates"
        alternates.parent.mkdir(exist_ok=True)
        # The list is read under the lock: another process may just have made a repository.
        with locked(alternates.with_name("alternates.lock"), "the list of mirrors"):
            text = ""
            for mirror in sorted(folder.glob("*.git")):
                text += f"{os.path.relpath(mirror / 'objects', objects)}\n"
            if not alternates.exists() or alternates.read_text() != text:
                write_file(alternates, text.encode())

    def missing(self, ids: Collection[str]) -> list[str]:
        """Return those of *ids* that the repository does not have, sorted."""
        names = "\n".join([*sorted(ids), ""]).encode()
        text = self.text("cat-file", "--batch-check", stdin=names)
        return re.findall(r"^(\S+) missing$", text, re.MULTILINE)

    def has(self, name: str) -> bool:
        """Return True if the object *name* (``<id>^{tree}`` and such) exists with that type."""
        return self.run(["cat-file", "-e", name], check=False)[0] == 0

    def is_complete(self, tree: str) -> bool:
        """Return True if *tree* exists with everything below it, down to the last file."""
        return self.run(["rev-list", "--objects", "--quiet", tree], check=False)[0] == 0

    def resolve(self, name: str) -> str:
        """Return the id of the object that *name* means."""
        return self.text("rev-parse", "--verify", "--quiet", "--end-of-options", name).strip()

    def blob(self, tree: str, path: str) -> bytes | None:
        """Return the file at *path* of *tree*, or None when there is none."""
        status, data, _ = self.run(["cat-file", "blob", f"{tree}:{path}"], check=False)
        return data if status == 0 else None

    def paths(self, tree: str, folder: str = "") -> dict[str, tuple[str, str]]:
        """Return every file below *folder* of *tree*: path → (mode, blob id)."""
        below = [f"{folder}/"] if folder else []
        out = self.text("ls-tree", "-r", "-z", "--full-tree", tree, *below)
        files = dict[str, tuple[str, str]]()
        for mode, blob, path in re.findall(r"([0-9]+) [a-z]+ ([0-9a-f]+)\t([^\0]*)\0", out):
            files[path] = (mode, blob)
        return files

    def files(self, tree: str, folder: str = "") -> Iterator[tuple[str, bytes]]:
        """
        Yield every regular file below *folder* of *tree* with its bytes, by one call of git for all
        of them.
        """
        entries = self.paths(tree, folder).items()
        ids = {path: blob for path, (mode, blob) in entries if mode in (REGULAR, EXECUTABLE)}
        names = "\n".join([*ids.values(), ""]).encode()
        out, start = self.run(["cat-file", "--batch"], stdin=names)[1], 0
        for path, blob in ids.items():
            head = out.index(b"\n", start)
            words = out[start:head].split()
            if words[1:] == [b"missing"]:
                raise GitError("git-failed", f"git does not have {path}.", details=[blob])
            end = head + 1 + int(words[2])
            yield path, out[head + 1 : end]
            start = end + 1

    def changes(self, before: str, after: str) -> dict[str, str]:
        """
        Return the paths that differ between two trees, in order: ``A``dded, ``D``eleted,
        ``M``odified or ``T``ype changed; a rename is a deletion and an addition.
        """
        parts = self.text(
            "diff-tree", "-r", "-z", "--no-renames", "--name-status", before, after
        ).split("\0")
        return dict(zip(parts[1::2], parts[::2], strict=False))

    def store_files(self, files: Iterable[tuple[str, str, bytes]], tree: str = "") -> str:
        """Store *files* (path, mode, bytes) byte for byte, added to *tree*; return the new tree."""
        rows = (
            f"M {mode} inline ".encode() + _quoted(path) + b"data %d\n%s\n" % (len(data), data)
            for path, mode, data in files
        )
        return self._import(tree, rows)

    def with_files(self, tree: str, files: Mapping[str, bytes]) -> str:
        """Return *tree* with the bytes of *files* at their paths; modes stay."""
        modes = {path: mode for path, (mode, _) in self.paths(tree).items()}
        rows = ((path, modes.get(path, REGULAR), data) for path, data in files.items())
        return self.store_files(rows, tree)

    def without_paths(self, tree: str, paths: Iterable[str]) -> str:
        """Return *tree* less the files and folders *paths*."""
        return self._import(tree, (b"D " + _quoted(path) for path in paths))

    def with_folders(self, tree: str, folders: Mapping[str, str]) -> str:
        """Return *tree* with the trees of *folders* in place of the submodules at their paths."""
        rows = (f"M 040000 {inner} ".encode() + _quoted(path) for path, inner in folders.items())
        return self._import(tree, rows)

    def _import(self, tree: str, commands: Iterable[bytes]) -> str:
        """Return the id of *tree* after *commands* of git-fast-import(1)."""
        ref = f"refs/import/{os.getpid()}"
        begin = f"commit {ref}\ncommitter sparkwright <> 0 +0000\ndata 0\n"
        begin += f'M 040000 {tree} ""\n' if tree else ""
        with translate_disk_full(self.path), tempfile.TemporaryFile(dir=self.path) as stream:
            stream.write(begin.encode())
            stream.writelines(commands)
            stream.write(b'ls ""\n' + f"reset {ref}\nfrom {'0' * 40}\n\ndone\n".encode())
            stream.seek(0)
            words = ["fast-import", "--quiet", "--done", "--force", "--depth=0"]
            return self.text("-c", "core.compression=1", *words, stdin=stream).split()[2]

    def commit(self, tree: str, message: str, parent: str = "", *, author: str, date: str) -> str:
        """
        Return a commit of *tree* on top of *parent*, if there is one.

        Args:
            author: ``NAME <ADDRESS>``, or a name alone.
            date: Of the author and the committer, in a form that git reads.

        Raises:
            git-failed: git refuses the author or the date.
        """
        name, _, address = author.partition(" <")
        env = {
            **COMMITTER,
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": address.rstrip(">"),
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_DATE": date,
        }
        words = ["commit-tree", tree, *(["-p", parent] if parent else [])]
        return self.text(*words, env=env, stdin=message.encode()).strip()

    def checkout(self, tree: str, folder: Path, index: Path) -> None:
        """
        Make *folder* hold exactly the tracked files of *tree*, touching only those that differ.

        Files that git does not track (a build's generated sources) stay, unless the last checkout
        was interrupted: then this one begins anew.

        Args:
            index: The index that goes with the folder; it remembers what is there.
        """
        unfinished = Path(f"{index}.unfinished")
        with translate_disk_full(self.path):
            if unfinished.exists():
                # Files of the killed checkout may lie there that its index never came to know.
                shutil.rmtree(folder, ignore_errors=True)
                for left in (index, Path(f"{index}.lock")):
                    left.unlink(missing_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.touch()
        env = {
            "GIT_INDEX_FILE": str(index),
            "GIT_WORK_TREE": str(folder),
            "GIT_DIR": str(self.path),
        }
        self.run(["update-index", "-q", "--refresh"], env=env, check=False)
        self.run(["read-tree", "--reset", "-u", tree], env=env)
        unfinished.unlink()

    def archive(self, tree: str, folder: Path) -> None:
        """Write the files of *tree* to the empty *folder*, without an index of its own."""
        with tempfile.TemporaryDirectory(dir=self.path) as scratch:
            self.checkout(tree, folder, Path(scratch) / "index")

    def submodules(self, tree: str) -> dict[str, str]:
        """Return the submodules of *tree*: path → commit."""
        return {path: pin for path, (mode, pin) in self.paths(tree).items() if mode == SUBMODULE}


def _quoted(path: str) -> bytes:
    """Return *path* as the end of a command of fast-import."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"\n'.encode("utf-8", "surrogateescape")


def blob_id(data: bytes) -> str:
    """Return the id that git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
