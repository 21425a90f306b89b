"""
Version labels, and compiler flags for reproducible output.

A label is ``STACK.pPATCHES.cuCUDA``, such as ``spark.2026.11.p1a2b3c4d.cu130``. Equal inputs have
equal labels on every machine, and a changed patch has another, so that no installer and no cache
that is named after a version takes one build for another. Digests have no order: to release twice
from one stack, raise the label in stack.yaml (``spark.2026.11.1``), because installers take the
highest.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from sparkwright.builder import source_tree
from sparkwright.core import digest
from sparkwright.core.errors import FileError
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Part of a wheel's key: raise it when labels of the same inputs change.
LABELS = 1

NVCC = "nvidia-cuda-nvcc"

#: Variables of every build program, so that neither the day nor the machine shows in its output.
VARIABLES: Mapping[str, str] = {
    # 1980-01-01, the earliest day that a zip archive can state. With a source's own date, a commit
    # without effect would give another wheel.
    "SOURCE_DATE_EPOCH": "315532800",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
}

#: nvcc's options for names that are the same in every run.
NAMES = ("--objdir-as-tempdir", "--frandom-seed=sparkwright")

#: A wheel of ours: distribution, version and stack before the patch set, and the machine. The glibc
#: in the platform tag is a result of the build.
_BUILD = re.compile(
    r"([^-]+-[^-]+\+[^-]+)\.p(?:0|[0-9a-f]{8})(?:\.cu\d+)?(?:-\w+)?-[\w.]+-[\w.]+-"
    r"(?:(?:many)?linux_(?:\d+_\d+_)?)?([\w.]+)\.whl"
)


def labelled(version: str, label: str) -> str:
    """Return *version* with the local version *label* (PEP 440) in place of its own."""
    from packaging.version import Version

    return str(Version(f"{Version(version).public}+{label}"))


def label(context: RunContext, source: source_tree.SourceTree) -> str:
    """
    Return the local version label of builds of *source*: stack, patch set and CUDA release.

    Raises:
        file-invalid: pylock.toml does not lock one CUDA release.
    """
    needs = (source_tree.make(context, need) for need in context.project.fork(source.fork).needs)
    spec = context.project.spec
    parts = (spec.label, patch_set(context.objects, (source, *needs)), cuda(context.project))
    return ".".join(filter(None, parts))


def patch_set(objects: Objects, trees: Iterable[source_tree.SourceTree]) -> str:
    """
    Return the name of the changes by patches and rules in *trees*: ``p`` and eight hex digits, or
    ``p0`` without changes.

    It follows from the effect, path by path with the blob before and after, not from the patch
    files: a git source and an sdist of the same release have the same name, and so has a series
    whose comments were reworded.
    """
    options = ["-r", "-z", "--no-renames", "--raw", "--no-abbrev"]
    changes = {}
    for tree in trees:
        if raw := objects.run(["diff-tree", *options, tree.source.tree, tree.tree])[1]:
            changes[tree.fork] = digest.sha256_bytes(raw)
    # A letter first: PEP 440 would take a segment of digits alone for a number, and drop its zeros.
    return f"p{digest.key('patch-set', changes)[:8]}" if changes else "p0"


def cuda(project: Project) -> str:
    """
    Return the CUDA release that pylock.toml locks, as PyTorch writes it (``cu130``); empty if it
    locks no compiler.

    Raises:
        file-invalid: The file cannot be read, or locks compilers of several releases.
    """
    path = project.build_folder / "pylock.toml"
    try:
        packages = tomllib.loads(path.read_text("utf-8")).get("packages", [])
        versions = [str(package["version"]) for package in packages if package["name"] == NVCC]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path} does not say which CUDA compiles."
        raise FileError("file-invalid", what, details=[str(error)]) from error
    releases = sorted({"".join(version.split(".")[:2]) for version in versions})
    if len(releases) > 1:
        what = f"{path} locks compilers of several CUDA releases."
        raise FileError("file-invalid", what, details=releases)
    return "".join(f"cu{release}" for release in releases)


def flags(defines: Mapping[str, str], paths: Mapping[Path, Path]) -> dict[str, str]:
    """
    Return the CMake entries *defines* with the compiler flags that keep folders and process ids out
    of objects.

    With nvcc 13.0.88 and GCC 12 (measured): without a flag, two objects of one unit differ in the
    process id that nvcc gives its intermediate files; with ``--objdir-as-tempdir`` these lie beside
    the object, named after it. A unit that defines nothing for others (it registers its operators
    by itself; three units of vLLM 0.33.0) also has the process id in the names of its kernels,
    unless there is a seed; one seed does for all, as these names hold a hash of the source's path
    besides. ``__FILE__`` follows ``-ffile-prefix-map``, in device code, too. No flag changes the
    names of device functions and variables with internal linkage, which hold a hash of their
    source's real path, so cubins of such units are equal only in folders of equal name, as
    `Sandbox.create` gives them.

    Args:
        paths: Folder → its name in objects, if programs see it by another one; empty in a sandbox
            with fixed names.
    """
    # GCC takes the last mapping that fits, so inner folders come after outer ones. A blank, a comma
    # or such would end the option.
    host = [
        f"-ffile-prefix-map={source}={name}"
        for source, name in sorted(paths.items())
        if not re.search(r"[\s,;=$\"'\\]", str(source))
    ]
    added = {
        "CMAKE_C_FLAGS": host,
        "CMAKE_CXX_FLAGS": host,
        "CMAKE_CUDA_FLAGS": [*NAMES, *(f"-Xcompiler={flag}" for flag in host)],
    }
    joined = {
        name: " ".join([defines.get(name, ""), *more]) for name, more in added.items() if more
    }
    return {**defines, **{name: text.strip() for name, text in joined.items()}}


def superseded(built: str, names: Iterable[str]) -> list[str]:
    """Return those of *names* that are builds of the wheel *built* with another patch set."""
    match = _BUILD.fullmatch(built)
    others = ((name, _BUILD.fullmatch(name)) for name in names if name != built)
    return [name for name, other in others if match and other and match.groups() == other.groups()]
