"""
Small real wheels of ours, and the verdicts of gates about them.

    made = wheels.release(tmp_path)            # cutlass, flashinfer and vllm, with passing verdicts beside each
    wheels.vllm(tmp_path, label="spark.2026.11.2", requires=["torch==2.14.0"], size=300_000_000)
    wheels.judge(path, worse={"G4": "fail"})   # other verdicts beside a wheel

They have METADATA, WHEEL, RECORD, a build record and an SBOM as a build writes them, but no machine code. Figures in verdicts are made up.
"""

import base64
import hashlib
import platform
import random
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.builder import pipeline, workspace
from sparkwright.builder.wheel import archive as wheelfile, graft
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.core.files import sha256_bytes
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.stack import SourceKind

ROOT = Path(__file__).parents[2]
STACK, ARCH = "2026.11", "12.1f"
LABEL = "spark.2026.11"
#: What follows the stack's label in a version: the inputs and the CUDA release.
BUILT = "p1a2b3c4d.cu130"
VERSIONS = {"vllm": "0.33.0", "flashinfer-python": "0.7.2.post1", "sparkwright-cutlass": "4.7.1"}
TAGS = {"vllm": "cp38-abi3-manylinux_2_34_{machine}", "flashinfer-jit-cache": "py3-none-manylinux_2_28_{machine}"}
PATCHES = (
    ("clamp-the-samples.patch", "Clamp the samples", "a negative estimate exhausts the unified memory of a GB10", 0),
    ("35568.patch", "Use native FP4 conversion", "the software conversion is slow on SM 12.1", 35568),
)
MACHINE = platform.machine()


def hexed(*parts: object) -> str:
    """Return a sha256 that stands for *parts*; the same for the same."""
    return sha256_bytes(repr(parts).encode())


def plain(
    folder: Path, project: str, version: str, *, requires: Iterable[str] = (), tag: str = "py3-none-any",
    files: Mapping[str, bytes] | None = None, size: int = 0, python: str = ">=3.9",
) -> Path:  # fmt: skip
    """
    Write a wheel of *project* as others make them, without anything of ours.

    Args:
        files: Members beside its package, which states the version.
        size: Bytes of a further member that cannot be compressed; the same bytes for the same project and version.
    """
    package = project.replace("-", "_")
    name = wheelfile.WheelName(package, version, tag.format(machine=MACHINE))
    made = {f"{package}/__init__.py": f'"""{project}."""\n\n__version__ = "{version}"\n'.encode(), **(files or {})}
    if size:
        made[f"{package}/data.bin"] = random.Random(f"{project}{version}").randbytes(size)
    wanted = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    metadata = f"Metadata-Version: 2.4\nName: {project}\nVersion: {version}\nRequires-Python: {python}\n{wanted}"
    folder.mkdir(parents=True, exist_ok=True)
    return wheelfile.write(folder, name, made, metadata, pure=tag.endswith("any"))


def _source(fork: str, version: str, resolved: bool, patches: Sequence[tuple[str, str, str, int]]) -> workspace.SourceTree:
    def tree(*parts: object) -> str:
        return hexed(fork, version, *parts)[:40]

    kind: SourceKind = "git" if fork == "vllm" else "sdist"
    steps = tuple(AppliedPatch(name, hexed(name), subject, reason, tree(name), pick) for name, subject, reason, pick in patches)
    sites = (workspace.Site("marlin-other-12.0f", "CMakeLists.txt", 680, 'MARLIN_OTHER_ARCHS "8.0+PTX"', 'MARLIN_OTHER_ARCHS "8.0+PTX;12.0f"'),) if fork == "vllm" else ()
    pin = tree("commit") if kind == "git" else hexed(fork, version)
    return workspace.SourceTree(
        fork, FetchedSource(fork, kind, f"{fork} {version}", pin, tree(), resolved), tree("patched"), tree("built"), steps, sites
    )


def ours(
    folder: Path, fork: str, project: str, *, label: str = LABEL, version: str = "", requires: Iterable[str] = (), machine: str = MACHINE,
    size: int = 0, resolved: bool = True, patches: Sequence[tuple[str, str, str, int]] = (), record: bytes = b"",
    files: Mapping[str, bytes] | None = None, stack: str = STACK, isolation: str = "namespace",
) -> Path:  # fmt: skip
    """
    Write a wheel of *project* as a build of *fork* does.

    Args:
        label: The stack's part of the local version label. *version*: upstream's.
        record: Its build record; made up where none is given.
    """
    upstream = version or VERSIONS[project]
    whole = f"{upstream}+{label}.{BUILT}"
    package = project.replace("-", "_")
    name = wheelfile.WheelName(package, whole, TAGS.get(project, "py3-none-any").format(machine=machine))
    made = dict(files or {})
    compiled: dict[str, Any] = {}
    if fork == "vllm":
        # No ELF: what reads machine code passes it over, and every installer takes it.
        here = {f"{package}/_C_stable_libtorch.abi3.so": b"compiled here " + whole.encode()}
        base = {f"{package}/_big_C.abi3.so": b"of the official wheel " + upstream.encode()}
        made |= here | base
        stated = {name: "sha256=" + unpadded(data) for name, data in base.items()}
        done = graft.GraftManifest({name: sha256_bytes(data) for name, data in here.items()}, (), (), stated)
        compiled = {
            "plan": hexed("plan"), "base": hexed("base", upstream), "tools": hexed("tools"), "compiler": "13.3.0 aarch64-linux-gnu",
            "isolation": isolation, "counts": {"native": 108}, "transplant": done,
        }  # fmt: skip
    built = pipeline.BuildRecord(__version__, stack, ARCH, _source(fork, upstream, resolved, patches), {"sparkwright": hexed("inputs")}, **compiled)
    made[f"{name.info}/sparkwright.json"] = record or msgspec.json.format(msgspec.json.encode(built))
    component = {"type": "library", "bom-ref": project, "name": project, "version": whole}
    sbom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": component}, "components": []}
    made[f"{name.info}/sboms/sparkwright.cdx.json"] = msgspec.json.encode(sbom)
    return plain(folder, project, whole, requires=requires, tag=name.tag, files=made, size=size)


def unpadded(data: bytes) -> str:
    """Return the sha256 of *data* as RECORD states it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def vllm(folder: Path, **changed: Any) -> Path:
    """Write a wheel of vLLM, a graft with two patches."""
    return ours(folder, "vllm", "vllm", **{"patches": PATCHES, **changed})


def flashinfer(folder: Path, **changed: Any) -> Path:
    """Write a wheel of FlashInfer."""
    return ours(folder, "flashinfer", "flashinfer-python", **changed)


def cutlass(folder: Path, **changed: Any) -> Path:
    """Write a wheel of CUTLASS's headers."""
    return ours(
        folder, "cutlass", "sparkwright-cutlass", **{"files": {"sparkwright_cutlass/include/cutlass/version.h": b"//\n"}, **changed}
    )


def release(
    folder: Path, *, judged: bool = True, label: str = LABEL, requires: Iterable[str] = (), size: int = 0, **changed: Any
) -> list[Path]:
    """
    Write the wheels of one release: cutlass, flashinfer and vllm, which requires FlashInfer.

    Args:
        judged: Put verdicts beside them, by which all of them may go to ``verified``.
        requires: What vllm requires besides. *size*: of vllm's further member. *changed*: for all of them.
    """
    headers, kernels = cutlass(folder, label=label, **changed), flashinfer(folder, label=label, **changed)
    wanted = [f"flashinfer-python=={wheelfile.WheelName.parse(kernels.name).version}", *requires]
    served = vllm(folder, label=label, requires=wanted, size=size, **changed)
    made = [headers, kernels, served]
    for path in made if judged else ():
        judge(path, companions=[one for one in made if one != path] if path == served else ())
    return made


def judge(path: Path, *, companions: Sequence[Path] = (), **changed: Any) -> None:
    """Write verdicts beside the wheel at *path*, and the measurement behind G8 where they have it; see `tests.support.verdicts.ladder`."""
    from tests.support import verdicts  # the two import each other

    changed = {"recipes": verdicts.RECIPES, **changed}
    ladder = verdicts.ladder(path, companions=companions, **changed)
    verdicts.write(path, ladder)
    if any(verdict.gate == "G8" for verdict in ladder.verdicts):
        verdicts.write_result(path, verdicts.result(path))


def changed(path: Path, folder: Path, edit: Callable[[dict[str, bytes]], object]) -> Path:
    """Write the wheel at *path* to *folder* with its members as *edit* leaves them, and a new RECORD; return it."""
    with zipfile.ZipFile(path) as archive:
        found = {one: archive.read(one) for one in archive.namelist()}
    record = next(one for one in found if one.endswith(".dist-info/RECORD"))
    edit(found)
    rows = [f"{one},sha256={unpadded(data)},{len(data)}\n" for one, data in found.items() if one != record]
    found[record] = "".join([*rows, f"{record},,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / path.name, "w") as archive:
        for one, data in found.items():
            archive.writestr(one, data)
    return folder / path.name


def build_record(path: Path) -> pipeline.BuildRecord:
    """Return the build record in the wheel at *path*."""
    with zipfile.ZipFile(path) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(f".dist-info/{wheelfile.BUILD_RECORD}"))
        return msgspec.json.decode(wheel.read(name), type=pipeline.BuildRecord)
