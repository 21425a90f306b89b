"""
The wheel of the client, `sparkwright-install`, which carries the address and the root of an index,
and the fingerprint of its first root.

It is written directly: an installed program has no build backend, and equal inputs give equal
bytes.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import sparkwright
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.client.index import CARRIED_ADDRESS, CARRIED_ROOT
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.release.repository import ClientWheel

PACKAGE = Path(sparkwright.__file__).parent
#: Names the requirements and the modules of the distribution.
PROJECT = PACKAGE / "client" / "pyproject.toml"


def write(
    folder: Path, url: str, fingerprint: str, root: bytes, *, label: str
) -> tuple[ClientWheel, Path, bytes]:
    """
    Write the wheel to *folder*, and return its record, its path and its METADATA.

    Args:
        url: The address of the index.
        fingerprint: The sha256 of its first root: clients keep what they have seen of it by that.
        root: Its root metadata, which the client trusts at first.
        label: Local version label (PEP 440).
    """
    document = tomllib.loads(PROJECT.read_text("utf-8"))
    project = document["project"]
    modules = document["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    files = {name: (PROJECT.parent / source).read_bytes() for source, name in modules.items()}
    lines = f"{url}\n{fingerprint}\n".encode()
    for path, data in ((CARRIED_ADDRESS, lines), (CARRIED_ROOT, root)):
        files[f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}"] = data
    version = archive.labelled(sparkwright.__version__, label)
    name = WheelName(project["name"].replace("-", "_"), version, "py3-none-any")
    extras = project["optional-dependencies"].items()
    optional = [f'{line}; extra == "{extra}"' for extra, lines in extras for line in lines]
    metadata = [
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Provides-Extra: {extra}" for extra, _ in extras),
        *(f"Requires-Dist: {line}" for line in [*project["dependencies"], *optional]),
    ]
    scripts = "".join(f"{script} = {target}\n" for script, target in project["scripts"].items())
    dist_info = {"entry_points.txt": f"[console_scripts]\n{scripts}".encode()}
    text = "\n".join(metadata) + "\n"
    path = archive.write(folder, name, files, text, pure=True, dist_info=dist_info)
    record = ClientWheel(
        name=path.name,
        size=path.stat().st_size,
        sha256=sha256_file(path),
        version=version,
        metadata=sha256_bytes(text.encode()),
        requires_python=project["requires-python"],
    )
    return record, path, text.encode()
