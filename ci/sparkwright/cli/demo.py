"""
``sparkwright demo``: three miniature upstreams through every stage, with the real git, CMake and
nvcc.

Nothing is taken from an earlier demo but the downloaded tools. Three stages are meant to fail, and
the demo fails if they do not: the plan without the rule for 12.1, the audit of the official wheel,
and publishing as verified what no GB10 has gated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sparkwright import demo
from sparkwright.audit import report
from sparkwright.builder import pipeline, source_tree
from sparkwright.builder.arch import plan
from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.cli import audit
from sparkwright.cli.main import find_root
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.core.store import Store
from sparkwright.demo import base, release, upstreams
from sparkwright.forks import fetch, lock, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Parts of the store that hold only what the package index gave; a demo shares them, so that it
#: needs no second download.
SHARED = ("downloads", "environments", "cache")


class Stage(msgspec.Struct, frozen=True):
    """A stage that went as it should, in one line, and its seconds."""

    name: str
    says: str
    seconds: float


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Run every stage and print a line for each."""
    with session.store.lock("demo"):
        stages = list(_stages(prepare(session, arguments.output)))
    rows = [[stage.name, stage.says, f"{stage.seconds:.1f}"] for stage in stages]
    console.table("demo", ["stage", "what it showed", ">seconds"], rows, result=True)
    console.document({"stages": stages})
    return 0


def prepare(session: RunContext, output: Path | None) -> RunContext:
    """Return a run on a fresh demo project, in a fresh store that shares the downloaded tools."""
    folder = session.store.root / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(demo.__file__).parent / "project", folder / "project")
    # Release policy and verdicts are judged by the gates' own policies; the demo has none of its
    # own.
    gates = next(
        place
        for root in (session.project.root, find_root())
        if (place := root / "ci" / "gates").is_dir()
    )
    shutil.copytree(gates, folder / "project" / "ci" / "gates")
    store = folder / "store"
    store.mkdir()
    for name in SHARED:
        (store / name).symlink_to(session.store.folder(name), target_is_directory=True)
    project = Project(folder / "project", "demo")
    made_for = dataclasses.replace(
        session,
        project=project,
        store=Store(store),
        forks=tuple(project.spec.forks),
        mirrors=upstreams.write(folder / "upstreams"),
        source="git",
        output=output.absolute() if output else folder / "dist",
        without=(),
    )
    release.write_policy(made_for)
    return made_for


def _stages(session: RunContext) -> Iterator[Stage]:
    began = time.monotonic()
    tools = toolchain.obtain(session)
    yield Stage(
        "tools",
        f"{len(pylock.wheels(session.project))} wheels by hash, nvcc among them",
        time.monotonic() - began,
    )
    with official(session, tools) as wheel_path:
        stages: dict[str, Callable[[], str]] = {
            "lock": lambda: _lock(session),
            "fetch": lambda: _fetch(session),
            "apply": lambda: _apply(session),
            "plan, rule left out": lambda: _plan_without(session),
            "plan": lambda: _plan(session),
            "build": lambda: _build(session),
            "audit of the official wheel": lambda: _audit_official(session, wheel_path),
            "audit": lambda: _audit(session),
            "build again": lambda: _build(session),
            "libraries load": lambda: _install(session, tools),
            "gate": lambda: release.run_gates(session),
            "publish as verified": lambda: _publish_verified(session),
            "publish": lambda: release.publish_candidate(session),
            "install": lambda: release.install_release(session, tools),
            "serve": lambda: release.serve_model(session),
            "uninstall": lambda: release.uninstall_release(session),
        }
        for name, work in stages.items():
            began = time.monotonic()
            says = work()
            yield Stage(name, says, time.monotonic() - began)


@contextlib.contextmanager
def official(session: RunContext, tools: Toolchain) -> Iterator[Path]:
    """
    Make the official wheel of the mini vLLM and offer it on a loopback index while the block runs.
    """
    folder = session.project.root.parent / "index"
    with console.step("the mini upstream releases its official wheel"):
        trees = {fork: folder.parent / "released" / fork for fork in ("vllm", "cutlass")}
        for fork, tree in trees.items():
            mirror = session.mirror(f"{upstreams.HOST}{fork}.git")
            released = mirror.history(upstreams.TAGS[fork])
            session.objects.archive(
                mirror.tree(session.objects.resolve(f"{released}^{{tree}}")), tree
            )
        against = cross.of(session, tools)
        made = base.write_base_wheel(
            folder / "files",
            trees["vllm"],
            trees["cutlass"],
            nvcc=against.cuda / "bin" / "nvcc",
            env=tools.environment(**against.environment(tools)),
            scratch=folder.parent / "scratch",
            machine=session.machine,
            compiler=f"{against.triple}-g++" if against.cross else "",
        )
        base.write_index(folder, made)
    before = os.environ.get("SPARKWRIGHT_INDEX_URL")
    with base.serve(folder) as address:
        os.environ["SPARKWRIGHT_INDEX_URL"] = f"{address}/simple/"
        try:
            yield made
        finally:
            os.environ.pop("SPARKWRIGHT_INDEX_URL")
            if before is not None:
                os.environ["SPARKWRIGHT_INDEX_URL"] = before


def lock_all(session: RunContext) -> lock.Lock:
    """
    Lock the demo's stack against its repositories and the index that offers its official wheel.
    """
    made = resolve.resolve(session)
    session.project.lock_file.write_text(lock.render(made), "utf-8")
    return made


def _lock(session: RunContext) -> str:
    made = lock_all(session)
    return f"{len(made.forks)} commits and a base wheel, by hash"


def _fetch(session: RunContext) -> str:
    return ", ".join(f"{fork} {fetch.fetch(session, fork).tree[:10]}" for fork in session.forks)


def _apply(session: RunContext) -> str:
    trees = [source_tree.make(session, fork) for fork in session.forks]
    return (
        f"{sum(len(tree.steps) for tree in trees)} patches, "
        f"{sum(len(tree.sites) for tree in trees)} rule sites"
    )


def _plan_without(session: RunContext) -> str:
    bare = dataclasses.replace(session, without=("supported-12.1",))
    return _must_fail(
        "arch-mismatch",
        lambda: plan.check(
            plan.obtain(bare, toolchain.obtain(bare), source_tree.make(bare, "vllm")).after
        ),
    )


def _plan(session: RunContext) -> str:
    made = plan.obtain(session, toolchain.obtain(session), source_tree.make(session, "vllm"))
    plan.show(made.after, made.before)
    plan.check(made.after, made.before)
    return ", ".join(f"{count} {verdict}" for verdict, count in made.after.counts.items() if count)


def _build(session: RunContext) -> str:
    return ", ".join(pipeline.build(session, fork).filename.split("-")[0] for fork in session.forks)


def _audit_official(session: RunContext, path: Path) -> str:
    return _must_fail(
        "audit-failed", lambda: report.raise_for_findings(audit.audited(session, path))
    )


def _audit(session: RunContext) -> str:
    for fork in session.forks:
        made = audit.audited(session, pipeline.wheel_path(session, pipeline.build(session, fork)))
        report.show(made)
        report.raise_for_findings(made)
    return f"{len(session.forks)} wheels hold what was asked for"


def _publish_verified(session: RunContext) -> str:
    return _must_fail("verified-refused", lambda: release.publish(session, None))


def _must_fail(reference: str, work: Callable[[], object]) -> str:
    try:
        work()
    except SparkwrightError as error:
        if error.reference != reference:
            raise
        return f"fails as it must: {error.reference}: {error.what}"
    raise CommandError(
        "command-failed",
        f"The demo's stage that must end with {reference} did not fail.",
        todo="Please report this; a check has stopped checking.",
    )


_LOAD = """\
import ctypes, importlib, importlib.metadata, pathlib, sys
package = importlib.import_module("mini_vllm")
for library in sorted(pathlib.Path(package.__file__).parent.glob("*.so")):
    ctypes.CDLL(str(library))
    print("loaded", library.name)
import mini_flashinfer, mini_cutlass
print(importlib.metadata.version("mini-vllm"), package.__version__)
assert importlib.metadata.version("mini-vllm") == package.__version__
"""


def _install(session: RunContext, tools: Toolchain) -> str:
    """Install the wheels into an empty environment and load what is in them."""
    from uv import find_uv_bin

    folder, log = (
        session.project.root.parent / "environment",
        session.store.folder("logs") / "install.log",
    )
    env = process.clean_environment(
        UV_NO_CONFIG="1", UV_OFFLINE="1", UV_CACHE_DIR=str(session.project.root.parent / "uv")
    )
    wheels = [
        str(pipeline.wheel_path(session, pipeline.build(session, fork))) for fork in session.forks
    ]
    process.run(
        [find_uv_bin(), "venv", "--quiet", "--clear", "--python", tools.python, folder],
        log=log,
        env=env,
    )
    process.run(
        [
            find_uv_bin(),
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--python",
            folder / "bin" / "python",
            *wheels,
        ],
        log=log,
        env=env,
    )
    loaded = process.output([folder / "bin" / "python", "-c", _LOAD], env=env).split("\n")
    return (
        f"{sum(line.startswith('loaded') for line in loaded)} libraries load; version "
        f"{loaded[-2].split()[0]}"
    )
