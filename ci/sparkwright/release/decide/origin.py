"""Where a wheel comes from, by the build record in it; what it says of libraries is held against them elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparkwright import __version__
from sparkwright.builder.pipeline import BuildRecord
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel.archive import BUILD_RECORD, WheelName
from sparkwright.builder.wheel.flashinfer_aot import JitCacheRecord
from sparkwright.core.errors import WheelError
from sparkwright.core.files import sha256_file
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.release.manifest.records import Fork, Patch, line

if TYPE_CHECKING:
    from packaging.version import Version

#: The project of the installer, which is built from this repository and from no upstream.
INSTALLER = "sparkwright"

_CUDA = re.compile(r"(?:^|\.)(cu\d+)$")


class Origin(msgspec.Struct, frozen=True):
    """
    What a build record says.

    Attributes:
        compiled: Library → sha256 in hex, of what was compiled here.
        base: Library → RECORD's hash, of what came with the official wheel.
        isolated: See `sparkwright.release.decide.facts.Inspected`.
    """

    fork: Fork
    record: BuildRecord | None = None
    stack: str = ""
    compiled: dict[str, str] = {}
    base: dict[str, str] = {}
    isolated: bool | None = None


def of(path: Path, name: WheelName, text: bytes | None) -> Origin:
    """
    Return where the wheel at *path* comes from.

    Args:
        text: Its build record; None where it has none.

    Raises:
        wheel-mismatch: It is no wheel of ours, its version does not say so, or the wheel of its sources is not beside it.
    """
    from packaging.version import Version

    version = Version(name.version)
    if name.distribution == INSTALLER:
        return Origin(Fork(INSTALLER, version.public, "program", INSTALLER, __version__, "", True, "program", ""))
    if text is None:
        raise WheelError("wheel-mismatch", f"{path.name} has no build record, so it was not built by sparkwright.")
    if not (version.local or "").startswith("spark."):
        raise WheelError(
            "wheel-mismatch", f"The version of {path.name} does not tell it from upstream's.", details=["no local label spark.…"]
        )
    record = _decoded(path.name, text)
    if isinstance(record, JitCacheRecord):
        return _modules(path, name, record)
    return Origin(
        _fork(path, record, version), record, record.stack, record.transplant.libraries if record.transplant else {},
        record.transplant.base if record.transplant else {}, record.isolation not in ("", "none") if record.plan else None,
    )  # fmt: skip


def _decoded(origin: str, text: bytes) -> BuildRecord | JitCacheRecord:
    kinds: tuple[type[BuildRecord] | type[JitCacheRecord], ...] = (BuildRecord, JitCacheRecord)
    faults = []
    for kind in kinds:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            faults.append(str(error))
    raise WheelError("wheel-mismatch", f"The build record of {origin} cannot be read.", details=faults)


def _fork(path: Path, record: BuildRecord, version: Version) -> Fork:
    source = record.source.source
    if record.source.fork != source.fork:
        raise WheelError(
            "wheel-mismatch", f"The build record of {path.name} is about two forks.", details=[record.source.fork, source.fork]
        )
    label = _CUDA.search(version.local or "")
    steps = record.source.steps
    return Fork(
        name=record.source.fork, version=version.public, kind=source.kind, origin=line(source.origin), pin=source.pin, tree=source.tree,
        resolved=source.resolved, built=_built(path, record), source_tree=record.source.tree, base=record.base,
        patches=tuple(Patch(line(one.name), one.sha256, line(one.subject), line(one.reason), one.pick) for one in steps),
        sites=len(record.source.sites), cuda=label[1] if label else "", isolation=record.isolation,
    )  # fmt: skip


def _built(path: Path, record: BuildRecord) -> str:
    if record.plan:
        return "graft" if record.base else "full"
    # `build.headers` puts the folder there, at the top of the package; no upstream backend does.
    with zip_file(path) as archive:
        package = f"{WheelName.of(path.name).distribution}/include/"
        return "headers" if any(one.startswith(package) for one in archive.namelist()) else "backend"


def _modules(path: Path, name: WheelName, record: JitCacheRecord) -> Origin:
    """Return the origin of precompiled modules: that of the wheel of their sources, which lies beside them."""
    version = name.version
    near = (one for one in sorted(path.parent.glob(f"*-{version}-*.whl")) if one.name != path.name)
    sources = next((one for one in near if sha256_file(one) == record.sources), None)
    if sources is None:
        todo = "Put the wheel of FlashInfer that they were compiled from beside them."
        raise WheelError(
            "wheel-mismatch", f"{path.name} was made from a wheel that is not beside it.", details=[f"sha256 {record.sources}"], todo=todo
        )
    own = WheelName.of(sources.name)
    with zip_file(sources) as archive:
        members = zip_members(archive, sources.name)
        whole = of(sources, own, wheelfile.member_text(archive, members, f"{own.info}/{BUILD_RECORD}", sources.name))
    folder = f"{name.distribution}/jit_cache"
    compiled = {f"{folder}/{module}/{module}.so": sha256 for module, sha256 in record.modules.items()}
    return Origin(whole.fork, None, record.stack, compiled)
