"""
CUTLASS as a wheel: its include folders, and ``cutlass_library`` where the source has it.

Header-only code needs no compiling; what the wheel adds is that builds can name it by hash.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.builder.wheel.sbom import Papers
from sparkwright.builder.wheel.version import labelled
from sparkwright.core.errors import WheelError
from sparkwright.forks.context import RunContext

VERSION_HEADER = "include/cutlass/version.h"
FOLDERS = ("include", "tools/util/include")
LIBRARY = "python/cutlass_library"

_MACRO = re.compile(rb"#define CUTLASS_(MAJOR|MINOR|PATCH) +(\d+)")

_MODULE = '''"""CUTLASS {version}: where its headers lie."""

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


def version(session: RunContext, tree: str) -> str:
    """
    Return the CUTLASS version that the headers of *tree* state.

    Raises:
        wheel-invalid: The tree is no CUTLASS.
    """
    text = session.objects.blob(tree, VERSION_HEADER) or b""
    found = {name.decode(): int(number) for name, number in _MACRO.findall(text)}
    if set(found) != {"MAJOR", "MINOR", "PATCH"}:
        raise WheelError(
            "wheel-invalid",
            f"{VERSION_HEADER} does not state a version.",
            details=[f"tree: {tree}"],
        )
    return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}"


def build(
    session: RunContext, tree: str, distribution: str, label: str, papers: Papers, folder: Path
) -> Path:
    """
    Write the wheel of *tree*, its version with the local *label*, with its *papers*, to *folder*
    and return its path.
    """
    name = WheelName(
        distribution.replace("-", "_"), labelled(version(session, tree), label), "py3-none-any"
    )
    package = name.distribution
    files: dict[str, bytes] = {
        f"{package}/__init__.py": _MODULE.format(version=name.version).encode()
    }
    for source in (*FOLDERS, LIBRARY):
        root = "cutlass_library" if source == LIBRARY else f"{package}/{source}"
        for path, data in session.objects.files(tree, source):
            files[f"{root}/{path.removeprefix(source + '/')}"] = data
    files |= {
        f"{name.info}/{BUILD_RECORD}": papers.record,
        f"{name.info}/{SBOM}": papers.sbom(name),
    }
    made = folder / name.filename
    archive.write(
        made, name, files, _METADATA.format(name=distribution, version=name.version), pure=True
    )
    return made
