"""The model to serve: a folder, or a name in this machine's model cache, and complete."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.bench.model import checkpoint
from sparkwright.bench.model.checkpoint import Checkpoint, ModelError
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.serving import ServeError

#: As ssh takes it; a hyphen in front would be an option.
_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
#: What vLLM fetches of the weights: nothing in the format of the model's makers.
_WEIGHTS = re.compile(r"(?!original/).*\.safetensors")
#: Ends of files of an interrupted download.
PARTIAL = (".incomplete", ".part", ".aria2")
#: Ends of files of weights in formats whose sizes are not read.
UNREAD = (".bin", ".pt", ".pth")
#: Seconds until the hub must state the size of a model.
PATIENCE = 10.0
#: Seconds that a copy to another machine may take.
COPYING = 86400.0


class LocalModel(msgspec.Struct, frozen=True):
    """
    A model that vLLM can load.

    Attributes:
        path: A folder; its name on the hub if vLLM downloads it.
        commit: Where it was downloaded from; empty if unknown.
        weights: Bytes of all tensors, or of their files if those are not read; 0 if unknown.
        checkpoint: Its configuration and tensors; None if they were not read.
    """

    path: Path
    commit: str = ""
    weights: int = 0
    checkpoint: Checkpoint | None = None


def find(
    text: str, revision: str, variables: Mapping[str, str], *, download: bool = False
) -> LocalModel:
    """
    Return the model that *text* names.

    Args:
        revision: Commit or branch of a name; empty for ``main``.
        variables: The server's environment, which locates the model cache.
        download: Whether vLLM may download what is missing.

    Raises:
        model-missing: It is not on this machine, not complete, or not to be read by this user.
        checkpoint-invalid: A file of it is damaged.
    """
    try:
        return _find(text, revision, variables, download=download)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise ModelError(
            "model-missing", f"{text:.200} cannot be read.", details=[str(error)[:1000]]
        ) from error


def _find(text: str, revision: str, variables: Mapping[str, str], *, download: bool) -> LocalModel:
    path = Path(text).expanduser()
    named = checkpoint.NAME.fullmatch(text) and not text.startswith(("/", "./", "../", "~"))
    if path.exists() or not named:
        return _read(path.absolute())
    folder = cache_folder(variables) / f"models--{text.replace('/', '--')}"
    commit = _commit(folder, revision or "main")
    snapshot = folder / "snapshots" / commit
    partial = sorted(folder.glob("blobs/*.incomplete"))[:3]
    absent = not commit or not snapshot.is_dir()
    if download and (absent or partial):
        return LocalModel(Path(text), commit, _bytes_to_fetch(text, revision or "main", variables))
    if absent:
        raise ModelError(
            "model-missing",
            f"{text} is not in the model cache of this machine.",
            details=[f"folder: {folder}", f"revision: {revision or 'main'}"],
            todo="Add --download, and vLLM fetches it; --dry-run shows before what that takes.",
        )
    return _read(snapshot, commit)


def _bytes_to_fetch(name: str, revision: str, variables: Mapping[str, str]) -> int:
    """Return the bytes of the weights that vLLM fetches, by what the hub states; 0 without that."""
    from sparkwright.bench.model import hub

    with contextlib.suppress(hub.HubError):
        files = hub.Hub(variables, seconds=PATIENCE).listing(name, revision, sizes=True).siblings
        return sum(file.size for file in files if _WEIGHTS.fullmatch(file.rfilename))
    return 0


def copy(model: Path, host: str) -> str:
    """
    Copy the folder *model* to the same place on *host* by rsync, and compare all bytes there.

    Returns:
        The folder: that of its repository, if it lies in a model cache.

    Raises:
        UsageError: *host* is no name of a host.
        tool-missing, command-failed: There is no rsync, or it failed.
        model-differs: The copy is not what it should be.
    """
    if not _HOST.fullmatch(host):
        raise UsageError(
            "usage",
            f"{host!r:.80} is no name of a host.",
            todo="Name it as ssh does: HOST or USER@HOST.",
        )
    cached = model.parent.name == "snapshots"
    folder = model.parents[1] if cached else model
    # The links of a cache lead to its own blobs.
    options = ["-a" if cached else "-aL", "--mkpath", "-s", "--exclude=*.incomplete"]
    command = ["rsync", *options, "--", f"{folder}/", f"{host}:{folder}/"]
    variables = process.clean_environment(RSYNC_RSH="ssh -oBatchMode=yes")
    with console.step(f"copy {folder} to {host}"):
        process.output(command, env=variables, timeout=COPYING)
    with console.step("compare all bytes"):
        compare = ["rsync", "-c", "-n", "-i", *command[1:]]
        text = process.output(compare, env=variables, timeout=COPYING)
    # Times of folders may differ.
    if changed := re.findall(r"^(?!\.d).+", text, re.MULTILINE):
        raise ServeError(
            "model-differs", f"The copy of {folder} on {host} differs.", details=changed[:5]
        )
    return str(folder)


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Return the hub's cache: ``HF_HUB_CACHE``, ``HF_HOME/hub``, or below the user's cache."""
    caches = Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(variables.get("HF_HOME") or caches / "huggingface")
    return Path(variables.get("HF_HUB_CACHE") or home / "hub")


def _commit(folder: Path, revision: str) -> str:
    """Return the commit of *revision* that was downloaded last; empty if there is none."""
    if re.fullmatch(r"[\w./-]{1,200}", revision) and ".." not in revision:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            revision = (folder / "refs" / revision).read_text("ascii").strip()
    return revision if _COMMIT.fullmatch(revision) else ""


def _read(path: Path, commit: str = "") -> LocalModel:
    """
    Return the model at *path*; of weights in formats that are not read, the files are counted.

    Raises:
        model-missing: It holds no complete model.
        checkpoint-invalid: A file of it is damaged.
    """
    names = sorted(file.name for file in path.iterdir())
    partial = [name for name in names if name.endswith(PARTIAL)]
    partial += [file.name for file in path.glob(".cache/huggingface/download/**/*.incomplete")]
    # With an index each shard is checked by its own length, so partial files beside them are old.
    if partial and "model.safetensors.index.json" not in names:
        raise ModelError("model-missing", f"{path} is half downloaded.", details=partial[:5])
    if not {"config.json", "params.json"} & set(names):
        raise ModelError(
            "model-missing",
            f"{path} holds no model: there is no config.json.",
            details=[f"it holds: {', '.join(names[:8])}"],
        )
    tensors = sorted(path.glob("*.safetensors"))
    if "config.json" not in names:
        return LocalModel(path, commit, sum(map(os.path.getsize, tensors)))
    if not tensors and (unread := [path / name for name in names if name.endswith(UNREAD)]):
        return LocalModel(path, commit, sum(map(os.path.getsize, unread)))
    model = checkpoint.read(path)
    return LocalModel(path, commit, sum(t.bytes for t in model.tensors.values()), model)
