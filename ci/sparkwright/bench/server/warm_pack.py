"""
Warm packs: what one start of a server compiled and tuned, for the first start on another machine.

A pack is an archive of the files below the cache roots of a start (`process.cache_variables`). vLLM
decides by its own keys which of them it loads; a `PackKey` says for what the pack was shown to
work. A server gets a copy of its own, the overlay, into which it also writes. All that was unpacked
has the time `EPOCH`, so what the server compiled or tuned nevertheless is what has another.

A pack holds code and pickles. It is unpacked only if it has the sha256 that a signed release names.
"""

import contextlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import platformdirs
import zstandard

from sparkwright.bench.server import flags
from sparkwright.bench.server.launch import RESERVE, SLEEP, LaunchPlan
from sparkwright.builder import host_info
from sparkwright.client.environment import PACKS, Marker
from sparkwright.client.folders import check_room, locked_folder, own_folder
from sparkwright.client.records import PackKey, WarmPack, line
from sparkwright.core.arguments import SECRET, redact
from sparkwright.core.errors import FileError
from sparkwright.core.files import list_folder, read_json, sha256_file
from sparkwright.core.process import CACHES, cache_variables
from sparkwright.core.store import UNFINISHED, replacing, translate_disk_full
from sparkwright.core.zips import ArchiveHeader, damage_guard, safe_path

#: The time of every file that comes from a pack: 2000-01-01.
EPOCH = 946_684_800
#: Projects whose wheels compile for a server, or whose code is compiled.
COMPILERS = (
    "vllm", "torch", "triton", "transformers", "flashinfer-python", "flashinfer-cubin",
    "flashinfer-jit-cache", "nvidia-cutlass-dsl", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvcc", "apache-tvm-ffi", "tilelang", "quack-kernels",
)  # fmt: skip
#: Flags that change no graph: memory, which every machine plans for itself, and the API.
UNCOMPILED_FLAGS = (
    "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--revision", "--profiler-config",
    "--enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser",
    "--reasoning-parser", "--chat-template",
)  # fmt: skip
#: Beginnings of variables that may change one, and those that do not.
COMPILED_VARIABLES = ("VLLM_", "FLASHINFER_", "TORCH", "TRITON_")
UNCOMPILED_VARIABLES = (
    RESERVE, SLEEP, "VLLM_HOST_IP", "VLLM_LOGGING_LEVEL", "VLLM_COMPUTE_NANS_IN_LOGITS",
)  # fmt: skip
#: Names that no other machine needs: locks, what describes this machine, and libraries of
#: FlashInfer's JIT, which ninja makes again where headers have other times.
LEFT_OUT = (
    "locks", "__pycache__", "startup_plan", "cached_ops", "generated", "assets",
    "cache_key_factors.json",
)  # fmt: skip
#: Ends of files that hold compiled kernels; a graph of vLLM is a file `GRAPH`.
KERNELS, GRAPH = (".so", ".cubin", ".o"), "model"
#: Parts of the paths of tuned configurations.
TABLES = ("autotune", "flashinfer_autotune_cache")
#: zstd looks back so far: one model's graphs are similar to each other.
WINDOW = 27
MOST_FILES = 100_000


class PackInvalid(Exception):
    """A pack cannot be used; the text says why."""


def pack_key(plan: LaunchPlan, recipe: str, model: str, marker: Marker) -> PackKey:
    """
    Return the key of a pack for the server of *plan*: what a pack is made for, and looked up by.

    Args:
        model: The digest of the model's files. *marker*: of the environment.
    """
    gpus = host_info.gpus()
    settings = list[str]()
    for argument in flags.parse(redact(plan.flags)):
        if argument.name not in UNCOMPILED_FLAGS:
            settings.append("=".join(argument.words))
    caches = cache_variables(Path())
    for name, value in plan.variables.items():
        outside = name in (*UNCOMPILED_VARIABLES, *caches) or SECRET.search(name)
        if name.startswith(COMPILED_VARIABLES) and not outside:
            settings.append(f"{name}={value}")
    return PackKey(
        recipe=line(recipe),
        model=model,
        settings=tuple(sorted(set(map(line, settings)))),
        wheels={name: marker.wheels[name] for name in COMPILERS if name in marker.wheels},
        python=".".join(marker.python.split(".")[:2]),
        gpu=line(f"{gpus[0].name} (SM {gpus[0].capability})" if gpus else host_info.processor()),
        driver=line(gpus[0].driver if gpus else ""),
    )


def installed(environment: Path, recipe: str) -> list[WarmPack]:
    """Return the packs for *recipe* that `install --warm` brought to *environment*."""
    packs = list[WarmPack]()
    for path in list_folder(environment / CACHES / PACKS, "*.json"):
        with contextlib.suppress(FileError):
            packs.append(read_json(path, WarmPack))
    return [pack for pack in packs if pack.key.recipe == recipe]


def overlay(environment: Path, pack: WarmPack) -> Path:
    """
    Return the folder of *pack*'s overlay, to be given to `cache_variables`: below *environment*, or
    in the cache of a user who may not write there.
    """
    folder = environment / CACHES
    if not os.access(environment, os.W_OK):
        folder = platformdirs.user_cache_path("sparkwright")
    return folder / "warm" / pack.sha256[:16]


def prepare(environment: Path, pack: WarmPack) -> None:
    """
    Make the overlay of *pack*, unless it is there. Two servers that start at once get the same one,
    and a run that is killed leaves none.

    Raises:
        PackInvalid: The archive is not the signed one, or cannot be unpacked.
        disk-full, cache-unusable: There is no room, or no folder of this user.
    """
    folder, archive = overlay(environment, pack), environment / CACHES / PACKS / pack.sha256
    base = own_folder(folder.parent.parent, folder.parent.name)
    with locked_folder(base), translate_disk_full(base):
        for path in list_folder(base, f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        if folder.exists():
            return
        check_room(base, pack.unpacked)
        if not archive.is_file() or sha256_file(archive) != pack.sha256:
            raise PackInvalid("its file is missing, or is not the one that was signed")
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=base) as temporary:
            unpack(archive, pack.unpacked, Path(temporary, "pack", CACHES))
            Path(temporary, "pack").rename(folder)


def unpack(archive: Path, size: int, folder: Path) -> None:
    """
    Unpack *archive* into *folder*, which does not exist: regular files of *size* bytes together.

    Raises:
        PackInvalid: It has anything else, more, or less; or it is damaged.
        disk-full: There is no room.
    """
    left, count = size, 0
    try:
        with (
            translate_disk_full(folder),
            damage_guard(archive.name),
            archive.open("rb") as stream,
            zstandard.ZstdDecompressor(max_window_size=1 << WINDOW).stream_reader(stream) as data,
            tarfile.open(fileobj=data, mode="r|", tarinfo=ArchiveHeader) as tar,
        ):
            for info in tar:
                # tarfile would keep every member that it has read in memory.
                tar.members.clear()  # type: ignore[attr-defined]
                path = folder / safe_path(info.name, archive.name)
                left, count = left - info.size, count + 1
                content = tar.extractfile(info) if info.isreg() else None
                if content is None or left < 0 or count > MOST_FILES:
                    raise PackInvalid(f"{info.name!r:.200} is no file, or one too many")
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as sink:
                    shutil.copyfileobj(content, sink)
                os.utime(path, (EPOCH, EPOCH))
    except (zstandard.ZstdError, FileError, FileExistsError, NotADirectoryError) as error:
        raise PackInvalid(f"it is damaged: {error}") from error
    if left:
        raise PackInvalid(f"it lacks {left} bytes")


def collect(root: Path, archive: Path) -> tuple[int, int]:
    """
    Write what servers with the caches of *root* compiled and tuned into *archive*; equal files give
    equal bytes.

    Returns:
        The bytes of the files, and the number of tuned tables.

    Raises:
        disk-full: There is no room; what was at *archive* stays.
    """
    size = tables = 0
    settings = zstandard.ZstdCompressionParameters.from_level(19, window_log=WINDOW)
    with (
        translate_disk_full(archive),
        replacing(archive) as temporary,
        temporary.open("wb") as sink,
        zstandard.ZstdCompressor(compression_params=settings).stream_writer(
            sink, closefd=False
        ) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in pack_files(root):
            relative = path.relative_to(root / CACHES)
            info = tarfile.TarInfo(relative.as_posix())
            with path.open("rb") as content:
                info.size, info.mtime = os.fstat(content.fileno()).st_size, EPOCH
                tar.addfile(info, content)
            size, tables = size + info.size, tables + _is_table(relative)
    return size, tables


def pack_files(root: Path) -> list[Path]:
    """Return the files below the caches of *root* that a pack holds, sorted."""
    paths = list[Path]()
    for path in (root / CACHES).rglob("*"):
        parts = path.relative_to(root).parts
        passing = path.name.endswith((".lock", ".tmp")) or path.name.startswith("gpu_p2p_access")
        regular = path.is_file() and not path.is_symlink()
        if regular and not passing and set(LEFT_OUT).isdisjoint(parts):
            paths.append(path)
    return sorted(paths)


def _is_table(relative: Path) -> bool:
    return not set(TABLES).isdisjoint(relative.parts) or relative.name.endswith(".best_config")


def additions(root: Path) -> tuple[list[str], list[str]]:
    """
    Return the files of the graphs and kernels that servers compiled, and of the tables that they
    tuned, in the overlay *root* that its pack did not hold.
    """
    compiled, tuned = list[str](), list[str]()
    for path in pack_files(root):
        relative = path.relative_to(root / CACHES)
        if path.stat().st_mtime != EPOCH and _is_table(relative):
            tuned.append(str(relative))
        elif path.stat().st_mtime != EPOCH and (path.suffix in KERNELS or path.name == GRAPH):
            compiled.append(str(relative))
    return compiled, tuned


def give(root: Path, user: str) -> None:
    """Make the caches of *root*, and give it to *user*, unless that is empty, for its servers."""
    (root / CACHES).mkdir(parents=True, exist_ok=True)
    if user:
        root.parent.chmod(0o711)
        for path in (root, *root.rglob("*")):
            shutil.chown(path, user)
