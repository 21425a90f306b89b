"""
Measures what a warm pack saves: starts of one server, without caches and with those of a pack, and how much each still compiled and tuned.

    warm_pack.py --python ENV/bin/python --model DIR --output DIR [--flag=FLAG…] [--variable NAME=VALUE…] [--user NAME]

The starts: cold; second, with the same caches; packed, from the pack in other folders for caches and home; user, as another user; model,
with the model in another folder; package, with the environment in another folder (of hard links). Each answers one greedy question, whose
tokens have to be equal. Logs, the pack and ``warm_pack.json`` stay in the output folder. A start is one measurement. On a CPU, for which
vLLM compiles C++ with Inductor and no Triton kernels, it shows that a pack moves, and not what it saves on a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sparkwright.bench.server import start_parts, warm_pack
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.core.console import console
from sparkwright.core.process import CACHES, cache_variables

#: Parts of a start that are columns.
PARTS = ("imports", "weights", "torch.compile", "CPU's warm-up", "tuning", "graph capture", "engine")


class Bench:
    """The starts of one server; *folder* is for what they leave."""

    def __init__(self, plan: LaunchPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.rows: list[dict[str, Any]] = []

    def start(self, name: str, root: Path, **changes: Any) -> None:
        """Start the server with the caches below *root*, and add a row."""
        home = root / "home"
        home.mkdir(parents=True, exist_ok=True)
        plan = replace(self.plan, **changes)
        plan = replace(plan, variables={**plan.variables, **cache_variables(root), "HOME": str(home)})
        if plan.user:
            for path in (root, *root.rglob("*")):
                shutil.chown(path, plan.user)
        log, began = self.folder / f"{name}.log", time.monotonic()
        with Server(plan, log) as server:
            seconds = time.monotonic() - began
            if server.failure:
                sys.exit(f"{name}: {server.failure}; see {log}")
            answer = server.client().complete(warm_pack.PROMPT, max_tokens=warm_pack.TOKENS).tokens
        parts = start_parts.read(log).parts()
        compiled, tuned = warm_pack.additions(root)
        row = {"start": name, "seconds": round(seconds, 1), "compiled": compiled, "tuned": tuned, "answer": answer, "parts": parts}
        self.rows.append(row)
        console.note(f"{name}: {seconds:.1f} s, {compiled} compiled, {tuned} tuned")

    def unpacked(self, name: str, size: int) -> Path:
        """Return a folder with the pack as the caches of a start."""
        root = self.folder / name
        warm_pack.unpack(self.archive, size, root / CACHES)
        return root

    @property
    def archive(self) -> Path:
        return self.folder / "pack.tar.zst"

    def run(self, user: str) -> dict[str, Any]:
        """Make all starts, and return what was measured."""
        python, cold = self.plan.python, self.folder / "cold"
        self.start("cold", cold)
        began = time.monotonic()
        size, tables = warm_pack.collect(cold, self.archive)
        packing = time.monotonic() - began
        for path in warm_pack.pack_files(cold):
            os.utime(path, (warm_pack.EPOCH, warm_pack.EPOCH))
        self.start("second", cold)
        self.start("packed", self.unpacked("packed", size))
        if user:
            self.start("user", self.unpacked("user", size), user=user)
        elsewhere = self.folder / "elsewhere"
        shutil.copytree(self.plan.model, elsewhere / "model")
        self.start("model", self.unpacked("model", size), model=elsewhere / "model")
        environment = python.absolute().parent.parent
        try:
            shutil.copytree(environment, elsewhere / "environment", symlinks=True, copy_function=os.link)
            self.start("package", self.unpacked("package", size), python=elsewhere / "environment" / "bin" / "python")
        except shutil.Error:
            console.note("package: not run, as the environment is on another disk")
        answers = {tuple(row["answer"]) for row in self.rows}
        return {
            "pack": {"bytes": self.archive.stat().st_size, "unpacked": size, "tables": tables, "packing_s": round(packing, 1)},
            "equal": len(answers) == 1,
            "starts": self.rows,
        }


def main() -> None:
    """Run the bench, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--flag", action="append", default=[])
    parser.add_argument("--variable", action="append", default=[])
    parser.add_argument("--user", default="")
    arguments = parser.parse_args()
    variables = dict(each.split("=", 1) for each in arguments.variable)
    folder = arguments.output.absolute()
    folder.mkdir(parents=True)
    plan = LaunchPlan(arguments.python.absolute(), arguments.model.absolute(), tuple(arguments.flag), variables, "bench")
    result = Bench(plan, folder).run(arguments.user)
    (folder / "warm_pack.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    rows = []
    for row in result["starts"]:
        seconds = {part.name: part.seconds for part in row["parts"]}
        shown = (f"{seconds[name]:.1f}" if seconds.get(name) is not None else "" for name in PARTS)
        rows.append((row["start"], f"{row['seconds']:.1f}", *shown, str(row["compiled"]), str(row["tuned"])))
    columns = ("start", ">seconds", *(f">{name}" for name in PARTS), ">compiled", ">tuned")
    console.table("Starts", columns, rows, result=True)
    pack = result["pack"]
    console.result(f"pack: {pack['bytes'] / 1e6:.1f} MB of {pack['unpacked'] / 1e6:.1f}; equal answers: {result['equal']}")


if __name__ == "__main__":
    main()
