"""Remaking the official vLLM wheel by copying its compressed members, against recompressing them. Needs the fetched base wheel."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import measure
from sparkwright.builder.wheel import archive
from sparkwright.forks import package_index

options = measure.arguments(__doc__ or "")
context = measure.context(options)
locked = context.lock.forks["vllm"].bases[context.machine]
base = package_index.obtain(
    context.store, locked.name, locked.filename, locked.sha256, offline=True
)


def ours() -> None:
    """Copy what stays, as it lies in the base."""
    with tempfile.TemporaryDirectory(dir=context.store.folder("work")) as folder:
        archive.rewrite(base, Path(folder), version="0.33.0+bench")


def theirs() -> None:
    """Unpack and pack again with zipfile, as `wheel unpack` and `wheel pack` do."""
    folder = context.store.folder("work", "bench")
    with (
        zipfile.ZipFile(base) as source,
        zipfile.ZipFile(folder / base.name, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    (folder / base.name).unlink()


options.runs = min(options.runs, 3)
measure.compare(
    "repack the vLLM wheel", {"copy compressed members": ours, "recompress": theirs}, options
)
