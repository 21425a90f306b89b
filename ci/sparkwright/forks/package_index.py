"""
The package index: which files it offers, downloads of them that resume and are verified, and the
source archives among them, read without unpacking.

The index is the one that pip of this user would ask, by a variable, or else by pip.conf, so that a
lab's own mirror needs no setting of ours. Locks hold names and hashes, never
addresses.

An archive is hostile: a member may climb out of its folder, be a link that leaves it, a device, or
promise less than it holds. Everything is checked before a byte reaches the object store; nothing is
written to a path that a member names.
"""

import configparser
import os
import posixpath
import re
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import platformdirs

from sparkwright.core import http
from sparkwright.core.console import console, one_line
from sparkwright.core.errors import FileError
from sparkwright.core.files import content_key, sha256_file
from sparkwright.core.git import EXECUTABLE, LINK, REGULAR
from sparkwright.core.http import HttpFailure
from sparkwright.core.store import Store
from sparkwright.core.zips import (
    ArchiveHeader,
    damage_guard,
    folders_above,
    odd_name,
    safe_path,
    zip_file,
    zip_members,
)
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import FileLock, SourceError, SourceUnreachable

#: In the order in which they are asked.
VARIABLES = ("SPARKWRIGHT_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
#: Bytes of the largest page; those of projects with thousands of files have some ten million.
LARGEST_PAGE = 64 << 20
#: A whole CUTLASS or vLLM source is below 1 GB in 20,000 files; what exceeds these is not a source.
MOST_FILES = 200_000
MOST_BYTES = 4 * 1024**3


class IndexFile(msgspec.Struct, frozen=True):
    """
    A file that the index offers; *sha256* is empty where the index states none, and *yanked* is set
    where its publisher took it back (PEP 592).
    """

    name: str
    url: str
    sha256: str
    yanked: bool = False


def index_url() -> str:
    """
    Return the address of the simple index (PEP 503, PEP 691): from the environment, else from the
    configuration of pip, else PyPI's.

    Raises:
        file-invalid: A configuration file is not readable.
    """
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    own = next(filter(None, map(os.environ.get, VARIABLES)), "")
    # uv's variable may have the form NAME=ADDRESS.
    return re.sub(r"\A[\w.-]+=", "", own) or _configured() or PYPI_SIMPLE_ENDPOINT


class _PipConfiguration(configparser.RawConfigParser):
    """A configuration of pip, to which ``index_url`` is ``index-url``."""

    def optionxform(self, optionstr: str) -> str:
        """Return the name of an option as pip takes it."""
        return super().optionxform(optionstr).replace("_", "-")


def _configured() -> str:
    """Return the index that the user's pip.conf names; empty if none does."""
    # The later ones win, as with pip.
    paths = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), Path.home() / ".pip/pip.conf"]
    paths += [platformdirs.user_config_path("pip") / "pip.conf", Path(sys.prefix) / "pip.conf"]
    named = os.environ.get("PIP_CONFIG_FILE", "")
    pip = _PipConfiguration()
    try:
        pip.read([*paths, named] if named != os.devnull else [], "utf-8")
    except (OSError, ValueError, configparser.Error) as error:
        raise FileError(
            "file-invalid",
            "A configuration file of pip is not readable.",
            details=str(error).splitlines(),
            todo=f"Correct it, or name the index with {VARIABLES[0]}.",
        ) from error
    own = pip.get("install", "index-url", fallback="")
    return own or pip.get("global", "index-url", fallback="")


def files(project: str) -> tuple[IndexFile, ...]:
    """
    Return every file that the index offers for *project*.

    Raises:
        source-unreachable: The index does not answer, or has no such project, or answers with
            another page, such as that of a login.
    """
    from packaging.utils import canonicalize_name
    from pypi_simple import ACCEPT_ANY, ProjectPage, UnsupportedRepoVersionError

    index, name = http.redact_credentials(index_url()), canonicalize_name(project)
    url = f"{index_url().rstrip('/')}/{name}/"
    try:
        reply = http.request(
            "GET",
            url,
            headers={"Accept": ACCEPT_ANY},
            redirects=True,
            limit=LARGEST_PAGE,
        )
        if reply.status in (404, 410):
            raise SourceUnreachable(
                "source-unreachable", f"The index at {index} has no project {project!r}."
            )
        if reply.status != 200:
            raise HttpFailure("status", f"answered {reply.status}", reply.status)
        if "json" in reply.headers.get("content-type", ""):
            page = ProjectPage.from_json_data(msgspec.json.decode(reply.body), reply.url)
        else:
            page = ProjectPage.from_html(project, reply.body, reply.url)
    # A page of another form raises whatever the parser meets.
    except (
        HttpFailure,
        UnsupportedRepoVersionError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ) as error:
        raise SourceUnreachable(
            "source-unreachable",
            f"The index at {index} does not answer for {project!r}.",
            details=[one_line(http.redact_credentials(str(error)), 300)],
        ) from None
    own = [file for file in page.packages if canonicalize_name(file.filename).startswith(name)]
    if not own:
        raise SourceUnreachable(
            "source-unreachable",
            f"The index at {index} answers with a page that lists no file of {project!r}.",
            details=["is this a package index?"],
        )
    return tuple(
        IndexFile(
            file.filename, file.url, (file.digests or {}).get("sha256", ""), bool(file.is_yanked)
        )
        for file in own
    )


def comparable(filename: str) -> str:
    """Return *filename* in the one spelling in which names of an index are compared."""
    return filename.replace("-", "_").lower()


def offers(project: str, version: str, suffix: str) -> list[IndexFile]:
    """
    Return the files of *version* of *project* that end with *suffix*: ``.tar.gz``, ``.whl`` or
    ``-TAG.whl``.

    Raises:
        source-unreachable: As `files`, or the index offers none.
    """
    # A wheel with a build number may be of another commit; tags begin with a letter.
    begin, end = re.escape(comparable(f"{project}-{version}")), re.escape(comparable(suffix))
    name = re.compile(rf"{begin}{'(_[a-z].*)?' if suffix == '.whl' else ''}{end}")
    offered = [file for file in files(project) if name.fullmatch(comparable(file.name))]
    if not offered:
        raise SourceUnreachable(
            "source-unreachable", f"The index offers no {project} {version} as *{suffix}."
        )
    return offered


def path_of(store: Store, sha256: str, filename: str) -> Path:
    """Return the path of the file with that hash in the store."""
    return store.root / "downloads" / sha256 / filename


def _intact(path: Path, sha256: str) -> bool:
    return path.exists() and sha256_file(path) == sha256


def obtain_locked(context: RunContext, file: FileLock) -> Path:
    """Return the path of the locked *file*; raises as `obtain`."""
    return obtain(
        context.store,
        file.name,
        file.filename,
        file.sha256,
        size=file.size,
        offline=context.offline,
    )


def obtain(
    store: Store,
    project: str,
    filename: str,
    sha256: str,
    *,
    size: int = 0,
    offline: bool = False,
) -> Path:
    """
    Return the path of *filename* of *project* with the given *sha256*, downloading it when the
    store has none, or a damaged one.

    Args:
        size: Its bytes, 0 if not known.

    Raises:
        offline: It is not in the store, or damaged there, and *offline* is set.
        source-unreachable: The index does not offer it, or the connection broke too often.
        source-mismatch: The index states another hash, or serves another size or other bytes,
            which are removed.
        disk-full: There is no room; what arrived is kept.
    """
    path = path_of(store, sha256, filename)
    if _intact(path, sha256):
        return path
    if offline:
        state = f"is damaged: {path}" if path.exists() else "is not in the store"
        raise SourceUnreachable("offline", f"{filename} {state}.")
    with store.lock(f"download-{sha256[:16]}"):
        if _intact(path, sha256):
            return path
        if path.exists():
            console.warn(f"{path} is damaged, and fetched again")
        offer = next((file for file in files(project) if file.name == filename), None)
        if not offer:
            raise SourceUnreachable(
                "source-unreachable",
                f"The index at {http.redact_credentials(index_url())} does not offer {filename}.",
            )
        if offer.sha256 and offer.sha256 != sha256:
            raise SourceError(
                "source-mismatch",
                f"{filename} is not the file that the lock names.",
                details=[f"lock:  {sha256}", f"index: {offer.sha256}"],
            )
        part = store.folder("downloads", sha256) / f"{filename}.part"
        try:
            with console.progress(filename, 0, "bytes") as progress:
                actual = http.download(
                    offer.url,
                    part,
                    sha256,
                    size=size,
                    on_progress=lambda done, total: progress.update(done, total=total),
                )
        except HttpFailure as failure:
            if failure.kind == "size":
                raise SourceError(
                    "source-mismatch",
                    f"{filename} is not the file that the lock names.",
                    details=[str(failure)],
                ) from failure
            raise SourceUnreachable(
                "source-unreachable",
                f"{http.redact_credentials(offer.url)} cannot be downloaded.",
                details=[str(failure)],
            ) from failure
        if actual != sha256:
            raise SourceError(
                "source-mismatch",
                f"{filename} arrived with other bytes than the lock names.",
                details=[f"lock:    {sha256}", f"arrived: {actual}"],
            )
        os.replace(part, path)
    return path


def _leaves(path: str, target: str) -> bool:
    """Return True if a link at *path* to *target* could lead out of the folder."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    # A name before ".." may be a link itself, so that the text alone does not say where the two
    # lead.
    climbs = ".." in [end.split("/")[0], *target.lstrip("./").split("/")]
    return not target or target.startswith("/") or odd_name(target) or climbs


def sdist_members(archive: Path) -> Iterator[tuple[str, str, bytes]]:
    """
    Yield the files of the source distribution *archive* (``.tar.gz``), its single top folder taken
    away: path, git mode, and bytes, which of a link are its target.

    Raises:
        archive-unsafe: A member is unsafe (module docstring), or the archive is damaged.
    """
    origin, top, total = archive.name, "", 0
    files, folders = set[str](), set[str]()
    with damage_guard(origin), tarfile.open(archive, "r|gz", tarinfo=ArchiveHeader) as tar:
        for info in tar:
            # tarfile would keep every member that it has read in memory.
            tar.members.clear()  # type: ignore[attr-defined]
            name = safe_path(info.name.rstrip("/").removeprefix("./"), origin)
            head, _, path = name.partition("/")
            top, fault = top or head, ""
            if head == top and (info.isdir() or not path):
                continue
            above = folders_above(path)
            if head != top:
                fault = "has more than one top folder"
            elif not (info.issym() or info.isreg()):
                fault = "has a member that is no file, folder or symbolic link"
            elif info.issym() and _leaves(path, info.linkname):
                fault = f"has a link that leaves its folder, to {info.linkname!r}"
            elif path in files or path in folders or not files.isdisjoint(above):
                fault = "holds the same path twice"
            total += info.size if info.isreg() else 0  # the size of a link may be negative
            files.add(path)
            folders |= above
            if len(files) + len(folders) > MOST_FILES or total > MOST_BYTES:
                fault = f"is larger than any source: over {MOST_FILES} files or {MOST_BYTES} bytes"
            if fault:
                raise FileError(
                    "archive-unsafe", f"{origin} {fault}.", details=[f"member: {name!r}"]
                )
            if info.issym():
                yield path, LINK, info.linkname.encode()
            elif content := tar.extractfile(info):
                yield path, EXECUTABLE if info.mode & 0o100 else REGULAR, content.read()


def wheel_members(archive: Path, folder: str) -> Iterator[tuple[str, str, bytes]]:
    """
    Yield the files below *folder* of the wheel *archive* as `sdist_members`; modes inside wheels
    carry no meaning for headers.

    Raises:
        archive-unsafe: A member is unsafe, the archive is damaged, or the folder is not in it.
    """
    failure = partial(FileError, "archive-unsafe")
    with zip_file(archive, failure) as zipped:
        below = [
            name
            for name in zip_members(zipped, archive.name, failure)
            if name.startswith(f"{folder}/")
        ]
        for name in below:
            yield name.removeprefix(f"{folder}/"), REGULAR, zipped.read(name)
    if not below:
        raise failure(f"{archive.name} has no folder {folder!r}.")


def import_file(context: RunContext, file: FileLock) -> str:
    """
    Return the tree id of the content of an archive of the index, in the object database.

    Raises:
        archive-unsafe: It would write outside its folder, or is larger than any release.
        And what `obtain` raises.
    """
    folder, key = file.folder, content_key("archive", [file.sha256, file.folder])
    tree = context.store.get("archive", key, str)
    if not tree or not context.objects.is_complete(tree):
        path = obtain_locked(context, file)
        members = wheel_members(path, folder) if folder else sdist_members(path)
        tree = context.objects.store_files(members)
        context.store.put("archive", key, tree)
    return tree
