"""
Wheels made of a source tree alone: by the project's own build backend (PEP 517), in the locked
environment and without a network; or of CUTLASS's headers.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from sparkwright.builder import BuildError, toolchain
from sparkwright.builder.sandbox import Sandbox
from sparkwright.builder.wheel import archive
from sparkwright.builder.workspace import SourceTree
from sparkwright.core.console import console
from sparkwright.core.errors import WheelError
from sparkwright.forks.context import RunContext

#: The hook is called as PEP 517 says; its working directory is the source tree, which is first on
#: its path where it asks for that.
_HOOK = """\
import importlib, os, sys, tomllib
os.chdir(sys.argv[2])
with open("pyproject.toml", "rb") as stream:
    system = tomllib.load(stream)["build-system"]
for entry in reversed(system.get("backend-path", [])):
    sys.path.insert(0, os.path.join(os.getcwd(), entry))
name = system.get("build-backend", "setuptools.build_meta:__legacy__")
module, _, attribute = name.partition(":")
backend = importlib.import_module(module)
for part in filter(None, attribute.split(".")):
    backend = getattr(backend, part)
print("wheel:", backend.build_wheel(sys.argv[1]))
"""

_VERSION_HEADER = "include/cutlass/version.h"
#: Folder of the tree → its folder in the wheel.
_FOLDERS = {
    "include": "{package}/include",
    "tools/util/include": "{package}/tools/util/include",
    "python/cutlass_library": "cutlass_library",
}

_MACRO = re.compile(rb"#define CUTLASS_(MAJOR|MINOR|PATCH) +(\d+)")

_MODULE = '''"""CUTLASS {version}: the folders of its headers."""

from pathlib import Path

__version__ = "{version}"

#: Give both to the compiler with -I.
INCLUDE = Path(__file__).parent / "include"
TOOLS_INCLUDE = Path(__file__).parent / "tools" / "util" / "include"
'''

_METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: CUTLASS headers as sparkwright builds with them, patched and pinned
License-Expression: BSD-3-Clause
Requires-Python: >=3.8
"""


def build_by_backend(
    context: RunContext, source: SourceTree, label: str, dist_info: archive.DistInfo, output: Path
) -> Path:
    """
    Build the wheel of *source* into *output*, its version with the local *label*.

    Raises:
        build-failed: The backend failed, or made no wheel.
        build-downloads: It tried to download something, even if it went on without it.
    """
    fork, settings = source.fork, toolchain.settings(context, source.fork)
    tools = toolchain.obtain(context)
    work = context.store.folder("work", context.project.stack, fork)
    log = context.store.folder("logs") / f"{context.project.stack}-{fork}-build.log"
    with (
        context.store.building(work / "tree") as tree,
        context.store.building(work / "wheel") as scratch,
        console.step(f"build {fork} with its own backend"),
    ):
        context.objects.archive(source.tree, tree)
        Sandbox.create({tree: f"{fork}/src", scratch: f"{fork}/wheel", tools.root: "tools"}).run(
            [tools.tool("python"), "-c", _HOOK, scratch, tree],
            cwd=tree,
            env=tools.environment(PIP_NO_INDEX="1", **settings.variables),
            log=log,
            failure=partial(BuildError, "build-failed"),
            what=f"{fork}'s build backend failed.",
        )
        wheels = list(scratch.glob("*.whl"))
        if len(wheels) != 1:
            raise BuildError(
                "build-failed",
                f"{fork}'s build backend made {len(wheels)} wheels instead of one.",
                details=[f"full log: {log}"],
            )
        return archive.rewrite(
            wheels[0],
            output,
            version=archive.labelled(archive.WheelName.parse(wheels[0].name).version, label),
            version_files=settings.version_files,
            dist_info=dist_info,
        )


def build_headers(
    context: RunContext, source: SourceTree, label: str, dist_info: archive.DistInfo, output: Path
) -> Path:
    """
    Write the CUTLASS wheel of *source*, its version with the local *label*, to *output* and return
    its path: the include folders, and ``cutlass_library`` if the tree has it.

    Header-only code needs no compiling; by the wheel, builds can name it by hash.

    Raises:
        wheel-invalid: The tree is no CUTLASS.
    """
    macros = dict(_MACRO.findall(context.objects.blob(source.tree, _VERSION_HEADER) or b""))
    if len(macros) != 3:
        raise WheelError(
            "wheel-invalid",
            f"{_VERSION_HEADER} does not state a version.",
            details=[f"tree: {source.tree}"],
        )
    version = "{}.{}.{}".format(*(int(macros[part]) for part in (b"MAJOR", b"MINOR", b"PATCH")))
    distribution = toolchain.settings(context, source.fork).distribution
    package = distribution.replace("-", "_")
    name = archive.WheelName(package, archive.labelled(version, label), "py3-none-any")
    files = {f"{package}/__init__.py": _MODULE.format(version=name.version).encode()}
    for folder, root in _FOLDERS.items():
        for path, data in context.objects.files(source.tree, folder):
            files[root.format(package=package) + path.removeprefix(folder)] = data
    return archive.write(
        output,
        name,
        files,
        _METADATA.format(name=distribution, version=name.version),
        pure=True,
        dist_info=dist_info(name),
    )
