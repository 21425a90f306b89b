"""
CUTLASS as a wheel: its include folders, and ``cutlass_library`` where the source has it.

Header-only code needs no compiling; what the wheel adds is that builds can name it by hash.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.sbom import DistInfoFiles
from sparkwright.builder.wheel.version import labelled
from sparkwright.core.errors import WheelError
from sparkwright.forks.context import RunContext

VERSION_HEADER = "include/cutlass/version.h"
FOLDERS = ("include", "tools/util/include")
LIBRARY = "python/cutlass_library"

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


def version(context: RunContext, tree: str) -> str:
    """
    Return the CUTLASS version that the headers of *tree* state.

    Raises:
        wheel-invalid: The tree is no CUTLASS.
    """
    text = context.objects.blob(tree, VERSION_HEADER) or b""
    numbers = {name: int(number) for name, number in _MACRO.findall(text)}
    try:
        return f"{numbers[b'MAJOR']}.{numbers[b'MINOR']}.{numbers[b'PATCH']}"
    except KeyError as error:
        what = f"{VERSION_HEADER} does not state a version."
        raise WheelError("wheel-invalid", what, details=[f"tree: {tree}"]) from error


def build(
    context: RunContext,
    tree: str,
    distribution: str,
    label: str,
    dist_info: DistInfoFiles,
    folder: Path,
) -> Path:
    """
    Write the wheel of *tree*, its version with the local *label*, to *folder* and return its path.
    """
    package = distribution.replace("-", "_")
    name = WheelName(package, labelled(version(context, tree), label), "py3-none-any")
    files = {f"{package}/__init__.py": _MODULE.format(version=name.version).encode()}
    for source in (*FOLDERS, LIBRARY):
        root = "cutlass_library" if source == LIBRARY else f"{package}/{source}"
        for path, data in context.objects.files(tree, source):
            files[f"{root}/{path.removeprefix(source + '/')}"] = data
    metadata = _METADATA.format(name=distribution, version=name.version)
    return archive.write(
        folder, name, files, metadata, pure=True, dist_info=dist_info.contents(name)
    )
