"""The model that is served: a folder, or a name that the cache of models on this machine resolves; whole, or refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sparkwright.bench.model import checkpoint
from sparkwright.bench.model.checkpoint import ModelError
from sparkwright.forks.stack import SourceError

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_COMMIT = re.compile("[0-9a-f]{40}")
#: Forms of weights that are served and whose sizes nobody reads here.
OTHER = (".bin", ".pt", ".pth", ".gguf")


class Found(msgspec.Struct, frozen=True):
    """
    A model on this machine.

    Attributes:
        path: What vLLM gets: a folder, a GGUF file, or, where vLLM may fetch it, its name.
        says: For people. *commit*: the one that it was fetched from; empty where nobody knows.
        weights: Bytes of all tensors; 0 where nobody read them.
    """

    path: Path
    says: str
    commit: str = ""
    weights: int = 0

    @property
    def local(self) -> Path | None:
        """Its folder; None where it is fetched yet, or no folder."""
        return self.path if self.path.is_dir() else None


@contextlib.contextmanager
def missing_guard() -> Iterator[None]:
    """Turn what a checkpoint lacks into `model-missing`."""
    try:
        yield
    except SourceError as error:
        if error.reference != "not-provided":
            raise
        raise ModelError(
            "model-missing", error.what, details=error.details, todo=error.todo
        ) from error


def find(
    text: str, revision: str, variables: Mapping[str, str], *, download: bool = False
) -> Found:
    """
    Return the model that *text* names.

    Args:
        revision: Commit or branch, where *text* is a name; ``unresolved`` or empty for the one that was fetched last.
        variables: Of the server's environment, which say where the cache is.
        download: Whether vLLM may fetch what is not there.

    Raises:
        model-missing: It is not here, or not whole. checkpoint-invalid: A file of it is damaged.
    """
    path = Path(text).expanduser()
    if path.exists() or text.startswith(("/", "./", "../", "~")) or not _NAME.fullmatch(text):
        found = path.absolute()
        return Found(found, str(found), weights=_whole(found))
    return _cached(
        text,
        "main" if revision in ("", "unresolved") else revision,
        cache(variables),
        download=download,
    )


def cache(variables: Mapping[str, str]) -> Path:
    """Return where the hub's client keeps models: ``HF_HUB_CACHE``, ``HF_HOME/hub``, or below the user's cache."""
    if place := variables.get("HF_HUB_CACHE"):
        return Path(place)
    home = variables.get("HF_HOME") or str(
        Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    return Path(home) / "hub"


def _cached(name: str, revision: str, hub: Path, *, download: bool) -> Found:
    place = hub / f"models--{name.replace('/', '--')}"
    commit = revision if _COMMIT.fullmatch(revision) else _commit(place, revision)
    snapshot = place / "snapshots" / commit
    half = sorted(place.glob("blobs/*.incomplete"))[:3]
    if download and (not commit or not snapshot.is_dir() or half):
        return Found(Path(name), f"{name}, which vLLM fetches", commit)
    if not commit or not snapshot.is_dir():
        details = [f"looked in {place}", f"revision: {revision}"]
        raise ModelError(
            "model-missing",
            f"{name} is not in the cache of models on this machine.",
            details=details,
        )
    try:
        return Found(snapshot, f"{name} at {commit[:12]}", commit, _whole(snapshot))
    except ModelError as error:
        if error.reference != "model-missing":
            raise
        details = [*error.details, *(f"half downloaded: {one.name}" for one in half)]
        raise ModelError(
            "model-missing",
            f"{name} is not whole in the cache of models: {error.what}",
            details=details,
        ) from error


def _commit(place: Path, branch: str) -> str:
    """Return the commit of *branch* that was fetched last; without a note of it, the only one that is there."""
    with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
        if not re.fullmatch(r"[\w./-]{1,200}", branch) or ".." in branch:
            return ""
        said = (place / "refs" / branch).read_text("ascii")[:64].strip()
        return said if _COMMIT.fullmatch(said) else ""
    there = [one.name for one in sorted(place.glob("snapshots/*"))]
    return there[0] if len(there) == 1 and branch == "main" and _COMMIT.fullmatch(there[0]) else ""


def _whole(path: Path) -> int:
    """Return the bytes of all tensors of the model at *path*; 0 where its weights are in a form that nobody reads here."""
    if path.is_file() and path.suffix == ".gguf":
        return path.stat().st_size
    if not path.is_dir():
        raise ModelError("model-missing", f"There is no folder {path}.")
    try:
        names = sorted(one.name for one in path.iterdir())
    except OSError as error:
        raise ModelError(
            "model-missing", f"{path} cannot be read.", details=[str(error)]
        ) from error
    half = [one for one in names if one.endswith((".incomplete", ".part", ".aria2"))]
    half += [one.name for one in path.glob(".cache/huggingface/download/**/*.incomplete")]
    if half:
        raise ModelError("model-missing", f"{path} is half downloaded.", details=sorted(half)[:5])
    if not {"config.json", "params.json"} & set(names):
        raise ModelError(
            "model-missing",
            f"{path} holds no model: there is no config.json.",
            details=[f"it holds: {', '.join(names[:8]) or 'nothing'}"],
        )
    if any(one.endswith(OTHER) for one in names) and not any(
        one.endswith(".safetensors") for one in names
    ):
        return 0
    if "config.json" not in names:
        return sum((path / one).stat().st_size for one in names if one.endswith(".safetensors"))
    with missing_guard():
        return sum(tensor.bytes for tensor in checkpoint.read(path).tensors.values())
