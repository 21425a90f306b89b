"""
How far a reader has to go from a question to its answer: the own files, functions and hops of five ways through the
program, and the modules that a command imports.

Each way is run once on the demo's upstreams or on the tests' stand-in of vLLM, without a network and without a compiler,
and traced with `sys.setprofile` in every thread. A function counts if it is defined in ``ci/sparkwright`` and was called;
importing a module calls none. Hops are the own functions on the deepest stack, less the first.

Exits with 1 if a limit of issue 53 is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import measure
from sparkwright.cherry_picks import series
from sparkwright.cli import main as command_line, options as command_options
from sparkwright.core.console import console
from sparkwright.demo import upstreams
from sparkwright.forks import fetch, resolve
from sparkwright.forks.stack import render_lock
from sparkwright.gates.core.verdict import GateError

sys.path.append(str(measure.ROOT))

PACKAGE = str(measure.ROOT / "ci" / "sparkwright") + os.sep
#: Bodies of modules, classes and comprehensions are no functions.
BODIES = ("<module>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
#: Modules that may be imported by a command.
IMPORTS = {"gate": 80, "install": 23, "serve": 45}
#: The smallest recipe, and a gate of a served model.
RECIPE = "toy-cpu"


class Way(msgspec.Struct, frozen=True):
    """
    A way through the program.

    Attributes:
        files, functions, hops: As counted.
        most_files, most_hops: The limits; 0 for none.
        names: The files, by their paths in the package.
    """

    name: str
    files: int
    functions: int
    hops: int
    most_files: int
    most_hops: int
    names: tuple[str, ...]


class Trace:
    """The own functions that are called within the ``with`` block, in every thread."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.hops = 0

    def __enter__(self) -> Trace:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # A class body is called like a function, and defines its own qualified name.
        if code.co_name in BODIES or "__qualname__" in code.co_names:
            return
        self.functions.add((code.co_filename, code.co_qualname))
        hops = 0
        caller = frame.f_back
        while caller is not None:
            own = caller.f_code.co_filename.startswith(PACKAGE)
            hops += own and caller.f_code.co_name not in BODIES
            caller = caller.f_back
        self.hops = max(self.hops, hops)


def run(*words: str | Path) -> None:
    """Run a command line in this process; a benchmark of something that fails is none."""
    code = command_line.run([str(word) for word in words])
    if code:
        sys.exit(f"{' '.join(map(str, words))}: ended with {code}")


def project(folder: Path) -> list[str]:
    """
    Write the demo's project, locked and fetched, without its official wheel; return the options that name it.
    """
    root = folder / "project"
    shutil.copytree(Path(upstreams.__file__).parent / "project", root)
    stack = root / "forks" / "demo" / "stack.yaml"
    lines = stack.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if "bases:" not in line and "mini-vllm" not in line]
    stack.write_text("".join(kept), "utf-8")
    upstreams.write_repositories(folder / "upstreams")
    mirror = f"{upstreams.HOST}={folder / 'upstreams'}/"
    words = ["--stack", "demo", "--root", str(root), "--cache-dir", str(folder / "cache")]
    words += ["--mirror", mirror]
    context = command_options.checkout(command_line.parse(["apply", *words]))
    context.project.lock_file.write_text(render_lock(resolve.resolve(context)), "utf-8")
    return words


def apply_patches(folder: Path) -> Callable[[], object]:
    """Return the work from the patches of a fetched fork to the id of its tree."""
    context = command_options.checkout(command_line.parse(["apply", *project(folder)]))
    source = fetch.recorded_source(context, fetch.fetch(context, "vllm"))
    return lambda: series.apply_series(context, source)


def apply_verb(folder: Path) -> Callable[[], object]:
    words = project(folder)
    return lambda: run("apply", "--fork", "vllm", *words)


def build_headers(folder: Path) -> Callable[[], object]:
    words = project(folder)
    return lambda: run("build", "--fork", "cutlass", *words, "--output", folder / "dist")


def serve(folder: Path) -> Callable[[], object]:
    from tests.support import standin

    python, model = standin.environment(folder / "environment"), standin.model(folder / "model")
    os.environ["SPARKWRIGHT_CACHE_DIR"] = str(folder / "cache")
    words = ("--dry-run", "--python", python, "--model", model, "--floor", "0")
    return lambda: run("serve", RECIPE, *words)


def gate(folder: Path) -> Callable[[], object]:
    """Return the work of the gate of the kernels; a server that is no vLLM does not pass."""
    from tests.support import refserved
    from tests.support.fake_openai_server import Behaviour

    python, model = refserved.environment(folder / "environment", Behaviour()), folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    words = ("gate", "--only", "G3", "--recipe", RECIPE, "--serve", model, "--python", python)
    places = ("--cache-dir", folder / "cache", "--output", folder / "out")

    def work() -> None:
        # Any other error is no verdict.
        with contextlib.suppress(GateError):
            run(*words, *places)

    return work


#: Name → its preparation, and the most files and hops; 0 for no limit.
WAYS: Mapping[str, tuple[Callable[[Path], Callable[[], object]], int, int]] = {
    "patch → tree id": (apply_patches, 15, 8),
    "sparkwright apply of a fork": (apply_verb, 0, 0),
    "nox -s build of a header wheel": (build_headers, 20, 0),
    "serve RECIPE --dry-run": (serve, 30, 0),
    "gate → verdict of G3": (gate, 16, 0),
}


def trace(name: str) -> Way:
    """Return the way *name*, taken in this process."""
    prepare, most_files, most_hops = WAYS[name]
    with tempfile.TemporaryDirectory() as folder:
        work = prepare(Path(folder).resolve())
        with Trace() as traced:
            work()
    names = {file.removeprefix(PACKAGE) for file, _ in traced.functions}
    functions, hops = len(traced.functions), traced.hops
    return Way(name, len(names), functions, hops, most_files, most_hops, tuple(sorted(names)))


def child(name: str) -> Way:
    """Return the way *name*, taken in a process that has cached nothing."""
    command = [sys.executable, __file__, "--way", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Way)


def imports(command: str) -> int:
    """Return how many own modules the module of *command* imports."""
    code = (
        f"import sys, sparkwright.cli.{command}; "
        "print(sum(name.startswith('sparkwright') for name in sys.modules))"
    )
    path = {**os.environ, "PYTHONPATH": str(measure.ROOT / "ci")}
    return int(subprocess.check_output([sys.executable, "-c", code], env=path, text=True))


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", action="store_true", help="name the files of each way")
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)


def main() -> int:
    """Print the tables, and return 1 if a limit is broken."""
    options = measure.arguments((__doc__ or "").split("\n\n", maxsplit=1)[0], more)
    if options.way:
        print(msgspec.json.encode(trace(options.way)).decode())  # noqa: T201  to the parent
        return 0
    console.json = options.json
    traced = [child(name) for name in WAYS]
    loaded = {command: imports(command) for command in IMPORTS}
    rows = [
        [
            way.name,
            str(way.files),
            str(way.most_files or "–"),
            str(way.functions),
            str(way.hops),
            str(way.most_hops or "–"),
        ]
        for way in traced
    ]
    columns = ["way", ">files", ">limit", ">functions", ">hops", ">limit"]
    console.table("ways", columns, rows, result=True)
    counts = [[name, str(loaded[name]), str(IMPORTS[name])] for name in IMPORTS]
    console.table("own modules imported", ["command", ">modules", ">limit"], counts, result=True)
    if options.files:
        for way in traced:
            console.result("\n  ".join([f"{way.name}:", *way.names]))
    broken = [
        way.name
        for way in traced
        if (way.most_files and way.files > way.most_files)
        or (way.most_hops and way.hops > way.most_hops)
    ]
    broken += [f"imports of {name}" for name, most in IMPORTS.items() if loaded[name] > most]
    console.result(f"limits: {'BROKEN: ' + '; '.join(broken) if broken else 'kept'}")
    console.document({"ways": traced, "imports": loaded, "broken": broken})
    console.finish()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
