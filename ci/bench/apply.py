"""Apply and rewrite of vLLM in the object database, against a checkout with `git am`. Needs fetched sources."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import measure
from sparkwright.build import archs, sourcetree
from sparkwright.cherry_picks import series
from sparkwright.forks import sources

options = measure.arguments(__doc__ or "")
session = measure.session(options)
source = sources.fetch(session, "vllm")
patches = series.load(session.project.series_folder("vllm"))
rules = sourcetree.rules_of(session)


def ours() -> None:
    """Do the work itself, past the store's records of it."""
    patched = series.apply_to(session.objects, "vllm", source.tree, patches)
    text = session.objects.blob(patched.tree, "CMakeLists.txt") or b""
    rewritten = archs.rewrite({"CMakeLists.txt": text}.__getitem__, rules, "vllm")
    session.objects.with_files(patched.tree, rewritten.files)


def theirs() -> None:
    """Write out the tree, commit it, and let git am work in it; without the rules, which git has nothing for."""
    with tempfile.TemporaryDirectory() as folder:
        session.objects.archive(source.tree, Path(folder) / "vllm")
        who = {f"GIT_{role}_{field}": "bench" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
        env = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}
        names = [str(session.project.series_folder("vllm") / one.name) for one in patches]
        for words in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-qm", "base"], ["am", "-q", *names]):
            subprocess.run(["git", *words], cwd=f"{folder}/vllm", env=env, check=True, capture_output=True)


measure.compare("apply and rewrite vLLM", {"object database": ours, "checkout and git am": theirs}, options, budget=5.0)
