"""The condition of what is installed here, and where a wheel file is from."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparkwright.client.environment import Prefix
from sparkwright.client.errors import ClientError
from sparkwright.client.index import Index
from sparkwright.client.install import check_unchanged, newest_first
from sparkwright.client.records import Channel, Missing, ReleaseFile, ReleaseState
from sparkwright.core import files


class InstalledRelease(msgspec.Struct, frozen=True, kw_only=True):
    """
    The condition of an environment.

    Attributes:
        faults: What differs from how it was made.
        yanked: Why the index no longer offers it.
    """

    name: str
    current: bool
    python: str = ""
    packages: int = 0
    faults: tuple[str, ...] = ()
    yanked: str = ""


def examine(
    prefix: Prefix, states: dict[str, ReleaseState], *, deep: bool
) -> tuple[InstalledRelease, ...]:
    """
    Return the condition of every environment; nothing in them is run, and no RECORD is believed.

    Args:
        states: The states of the releases in the index, as far as they are known.
        deep: Read every file.
    """
    return tuple(
        _examine(prefix, path.name, states, deep=deep)
        for path in sorted(prefix.root.glob("releases/*"))
    )


def _examine(
    prefix: Prefix, name: str, states: dict[str, ReleaseState], *, deep: bool
) -> InstalledRelease:
    marker, faults = prefix.marker(name), list[str]()
    yanked = states[name].yanked if name in states else ""
    if marker is None:
        faults = ["an interrupted run left it; the next `install` removes it"]
        return InstalledRelease(name=name, current=False, faults=tuple(faults))
    try:
        check_unchanged(prefix, name, deep=deep)
    except ClientError as error:
        faults = [*error.details] or [error.what]
    if not (prefix.release(name) / "bin/python").exists():
        faults.append(f"its Python {marker.python} is gone")
    return InstalledRelease(
        name=name,
        current=prefix.current == name,
        python=marker.python,
        packages=len(marker.packages),
        faults=tuple(faults),
        yanked=yanked,
    )


class WheelOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """
    The release that holds a wheel file, and what is shown of the wheel.

    Attributes:
        missing: What it lacks for ``verified``.
        evidence: The addresses of its verdicts, measurements, provenance and SBOM.
    """

    name: str
    sha256: str
    release: str
    channel: Channel
    yanked: str
    missing: tuple[Missing, ...]
    evidence: tuple[str, ...]


def find_wheel(index: Index, path: Path) -> WheelOrigin:
    """
    Return the newest release that holds exactly the bytes of *path*.

    Raises:
        release-unknown: None does. file-invalid: *path* is no file.
    """
    sha256 = files.sha256_bytes(files.read_bytes(path, limit=1 << 33))
    for name in newest_first(index.states):
        for wheel in index.release(name).wheels:
            if wheel.sha256 == sha256:
                proof, state = wheel.proof, index.states[name]
                named: list[ReleaseFile | None] = [
                    proof.verdicts,
                    proof.throughput,
                    wheel.provenance,
                    wheel.sbom,
                ]
                return WheelOrigin(
                    name=wheel.name,
                    sha256=sha256,
                    release=name,
                    channel=state.channel,
                    yanked=state.yanked,
                    missing=proof.missing,
                    evidence=tuple(
                        index.location.join(file.url or file.path) for file in named if file
                    ),
                )
    raise ClientError("release-unknown", f"No release holds {path.name}.", details=[sha256])
