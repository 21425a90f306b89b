"""
What tells one build from another, and what makes two builds of the same inputs the same to the
byte.

A label is ``STACK.pPATCHES.cuCUDA``, such as ``spark.2026.11.p1a2b3c4d.cu130``. Equal inputs have
equal labels on every machine, and a changed patch has another, so that no installer and no cache
that is named after a version takes one build for another. Digests have no order: whoever releases
twice from one stack raises the label in stack.yaml (``spark.2026.11.1``), for installers take the
highest.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from sparkwright.builder import source_tree
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import digest
from sparkwright.core.errors import FileError, WheelError
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Part of a wheel's key: raise it when labels of the same inputs change.
LABELS = 1

NVCC = "nvidia-cuda-nvcc"

#: What every build program is told beside its own variables, so that day, place and chance leave no
#: trace.
VARIABLES: Mapping[str, str] = {
    # 1980-01-01, the first day that a zip archive can state, and the day of all members of our
    # wheels. A source's own date would make two wheels of what a commit that changes nothing left
    # equal.
    "SOURCE_DATE_EPOCH": "315532800",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
}

_LOCAL = re.compile(r"(.+)\.p(?:0|[0-9a-f]{8})(?:\.cu\d+)?")


def label(session: RunContext, source: SourceTree) -> str:
    """
    Return the local version label of what is built from *source*: the stack, the patch set and the
    CUDA release.

    Raises:
        file-invalid: pylock.toml does not say which CUDA compiles.
        What `sourcetree.make` raises, for the forks that the build reads.
    """
    needs = (source_tree.make(session, need) for need in session.project.fork(source.fork).needs)
    parts = (
        session.project.spec.label,
        patch_set(session.objects, (source, *needs)),
        cuda(session.project),
    )
    return ".".join(filter(None, parts))


def patch_set(objects: Objects, trees: Iterable[SourceTree]) -> str:
    """
    Return the name of what patches and rules do to *trees*: ``p`` and eight hex digits, or ``p0``
    where they do nothing.

    It is made of the effect, path by path with the file before and after, not of the patch files: a
    git source and an sdist of the same release have the same, and so has a series whose comments
    were reworded.
    """
    changes = {}
    for one in trees:
        raw = objects.run(
            [
                "diff-tree",
                "-r",
                "-z",
                "--no-renames",
                "--raw",
                "--no-abbrev",
                one.source.tree,
                one.tree,
            ]
        )[1]
        if raw:
            changes[one.fork] = digest.sha256_bytes(raw)
    # A letter first: PEP 440 would take a segment of digits alone for a number, and drop its zeros.
    return f"p{digest.key('patch-set', changes)[:8]}" if changes else "p0"


def cuda(project: Project) -> str:
    """
    Return the CUDA release that pylock.toml locks, as PyTorch writes it (``cu130``); empty where it
    locks no compiler.

    Raises:
        file-invalid: The file cannot be read, or locks compilers of several releases.
    """
    path = project.build_folder / "pylock.toml"
    try:
        packages = tomllib.loads(path.read_text("utf-8")).get("packages", [])
        found = {
            "".join(str(one["version"]).split(".")[:2]) for one in packages if one["name"] == NVCC
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            "file-invalid", f"{path} does not say which CUDA compiles.", details=[str(error)]
        ) from error
    if len(found) > 1:
        raise FileError(
            "file-invalid",
            f"{path} locks compilers of several CUDA releases.",
            details=sorted(found),
        )
    return "".join(f"cu{release}" for release in found)


#: nvcc's options for names that are the same in every run.
NAMES = ("--objdir-as-tempdir", "--frandom-seed=sparkwright")


def flags(defines: Mapping[str, str], places: Mapping[Path, Path]) -> dict[str, str]:
    """
    Return the CMake entries *defines* with the compiler flags that keep folders and process ids out
    of objects.

    With nvcc 13.0.88 and GCC 12 (measured): without a flag, two objects of one unit differ in the
    process id that nvcc gives its intermediate files; with ``--objdir-as-tempdir`` these lie beside
    the object, named after it. A unit that defines nothing for others (it registers its operators
    by itself; three units of vLLM 0.33.0) also has the process id in the names of its kernels,
    unless there is a seed; one seed does for all, as these names hold a hash of the source's path
    besides. ``__FILE__`` follows ``-ffile-prefix-map``, in device code, too. What no flag changes:
    the names of device functions and variables with internal linkage hold a hash of their source's
    real path, so cubins of such units are equal only in folders of equal name, which is what
    `Sandbox.create` gives.

    Args:
        places: Folder → the name that it is to have in objects, where programs see it by another
            one; empty in a sandbox with fixed names.
    """
    # GCC takes the last mapping that fits, so inner folders come after outer ones. A blank, a comma
    # or such would end the option.
    safe = [
        (source, name)
        for source, name in places.items()
        if not re.search(r"[\s,;=$\"'\\]", str(source))
    ]
    host = [f"-ffile-prefix-map={source}={name}" for source, name in sorted(safe)]
    added = {
        "CMAKE_C_FLAGS": host,
        "CMAKE_CXX_FLAGS": host,
        "CMAKE_CUDA_FLAGS": [*NAMES, *(f"-Xcompiler={flag}" for flag in host)],
    }
    return {
        **defines,
        **{
            name: " ".join([defines.get(name, ""), *more]).strip()
            for name, more in added.items()
            if more
        },
    }


def superseded(built: str, names: Iterable[str]) -> list[str]:
    """
    Return those of the wheels *names* that are an earlier build of what the wheel *built* is:
    another patch set, all else the same.
    """
    return [
        name for name in names if name != built and _of_stack(name) == _of_stack(built) is not None
    ]


def _of_stack(filename: str) -> tuple[str, ...] | None:
    """
    Return project, upstream's version, stack and machine of a wheel of ours; None for any other
    file.
    """
    from packaging.version import Version

    try:
        wheel = WheelName.of(filename)
    except WheelError as error:
        if error.reference != "wheel-invalid":
            raise
        return None
    version = Version(wheel.version)
    found = _LOCAL.fullmatch(version.local or "")
    # Of ``manylinux_2_28_x86_64``; the glibc in it is a result of the build.
    machine = re.sub(r"^(?:many)?linux_(?:\d+_\d+_)?", "", wheel.tag.rpartition("-")[2])
    return (wheel.distribution, version.public, found[1], machine) if found else None
