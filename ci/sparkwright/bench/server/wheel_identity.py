"""Recognise an installed wheel by its files."""

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from zipfile import ZipInfo

import msgspec
from packaging.utils import canonicalize_name

from sparkwright.core import process
from sparkwright.core.errors import FileError, PythonError, WheelError
from sparkwright.core.files import read_text, sha256_bytes, sha256_file
from sparkwright.core.zips import (
    INSTALLER_FILES,
    Archive,
    info_folder,
    record_rows,
    zip_file,
    zip_members,
)
from sparkwright.forks.stack import is_ours

#: Mismatches that are listed; one is enough to refuse.
MOST = 50
#: Ends of files that Python would run or load if they lay among the wheel's files.
LOADED = (".py", ".so", ".pth", ".pyd")
#: The script that asks what an environment imports, and how long it may take: it compiles each
#: module that has a compiled file; 2,600 files of vLLM take 13 s of CPU time.
PROBE, PROBE_SECONDS = Path(__file__).with_name("import_probe.py"), 900
#: Files of ``.dist-info`` that differ with the installer, and signatures of RECORD.
VARYING = INSTALLER_FILES | {"RECORD.jws", "RECORD.p7s"}


def site_packages(python: Path) -> Path:
    """
    Return the folder site-packages of the environment of *python*.

    Raises:
        environment-unusable: It is no Python.
    """
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    failure = f"{python} is no Python of an environment."
    folder = Path(process.ask_python(failure, [str(python.absolute()), "-I", "-c", script]))
    if not folder.is_absolute():
        raise PythonError("environment-unusable", failure, details=[f"it prints: {folder}"])
    return folder


def version(python: Path, name: str = "vllm") -> str:
    """
    Return the version of the distribution *name* in the environment of *python*.

    Raises:
        environment-unusable: It is no Python, or the distribution is not installed there.
    """
    for distribution in metadata.distributions(name=name, path=[str(site_packages(python))]):
        return distribution.version
    raise PythonError("environment-unusable", f"{python} has no {name} installed.")


def mismatches(
    python: Path, wheel: Path, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """
    Return how the environment of *python* differs from *wheel*: file → ``missing`` (or not to
    be read), ``differs`` or ``foreign``, or how an import of it differs; empty if it does not.

    Every byte is compared, but for scripts and files of ``.dist-info`` that an installer writes.
    Compiled Python differs if an import of it gives other code than its source.

    Args:
        variables: Of the server; None for the caller's usual ones.

    Raises:
        environment-unusable: *python* is none.
        wheel-invalid: *wheel* is none.
    """
    site = site_packages(python)
    with zip_file(wheel) as archive:
        members = zip_members(archive, wheel.name)
        info = info_folder(members, wheel.name)
        installed = {_installed_name(name, info): member for name, member in members.items()}
        installed.pop("", None)
        differing = dict(itertools.islice(_compare(archive, installed, site), MOST))
    if differing:
        return differing
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="names-") as file:
        file.write("\n".join(installed))
        file.flush()
        # A server of another user is asked as this one; the startup files are the same.
        words = [str(python.absolute()), "-P", str(PROBE), str(site), file.name]
        answer = process.ask_python(
            f"{python} cannot say what it imports.", words, seconds=PROBE_SECONDS, env=variables
        )
    return msgspec.json.decode(answer, type=dict[str, str])


def _compare(
    archive: Archive, installed: Mapping[str, ZipInfo], site: Path
) -> Iterator[tuple[str, str]]:
    """Yield how the files below *site* differ from the members *installed* there."""
    for name, member in installed.items():
        path = site / name
        if not (path.is_file() and os.access(path, os.R_OK)):
            yield member.filename, "missing"
            continue
        with archive.guard(), archive.open(member) as packed, path.open("rb") as file:
            blocks = iter(lambda: (packed.read(1 << 20), file.read(1 << 20)), (b"", b""))
            if any(block != other for block, other in blocks):
                yield member.filename, "differs"
    for top in sorted({name.partition("/")[0] for name in installed}):
        for path in sorted((site / top).rglob("*")) if not top.endswith(".dist-info") else ():
            name = str(path.relative_to(site))
            if path.suffix in LOADED and name not in installed and path.is_file():
                yield name, "foreign"


def environment_contents(site: Path) -> dict[str, str]:
    """
    Return the digests of the wheels of ours in the site-packages *site*: ``content <project>`` →
    digest, from the files themselves. A wheel of which a file is missing is left out.
    """
    digests = {}
    for info in sorted(site.glob("*.dist-info")):
        if not is_ours(info.name):
            continue
        project = canonicalize_name(info.name.partition("-")[0])
        # A device in the place of a file may never end.
        with contextlib.suppress(OSError, FileError, WheelError):
            rows = record_rows(read_text(info / "RECORD"), info.name)
            names = [row.name for row in rows if _installed_name(row.name, info.name)]
            if all((site / name).is_file() for name in names):
                files = {name: sha256_file(site / name) for name in names}
                digests[f"content {project}"] = content_digest(files, info.name)
    return digests


def content_digest(files: Mapping[str, str], info: str) -> str:
    """
    Return the digest by which a wheel is recognised once installed.

    It is the sha256 over the sorted lines ``<name>,<sha256 in hex>`` of the files that installers
    leave as they are: without RECORD, what they note in the ``.dist-info`` folder, compiled
    Python, scripts and data. So a wheel, pip's environment and uv's have the same digest.

    Args:
        files: Member → sha256.
        info: The name of the ``.dist-info`` folder.
    """
    lines = []
    for name, digest in files.items():
        if installed_name := _installed_name(name, info):
            lines.append(f"{installed_name},{digest}\n")
    return sha256_bytes("".join(sorted(lines)).encode())


def _installed_name(member: str, info: str) -> str:
    """Return the installed name of *member*; empty if installers change it or put it elsewhere."""
    top, _, rest = member.partition("/")
    varies = member.endswith(".pyc") or (top == info and rest in VARYING)
    if varies or member.startswith(("../", "/")):
        return ""
    if top != f"{info.removesuffix('.dist-info')}.data":
        return member
    # These two folders of a wheel go into the site-packages, its scripts, data and headers
    # elsewhere.
    return rest.partition("/")[2] if rest.startswith(("purelib/", "platlib/")) else ""
