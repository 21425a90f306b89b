"""
``sparkwright demo``: every stage on three miniature upstreams, with the real git, CMake and nvcc.

Only the downloaded tools are reused. Four stages must fail, or the demo fails: the plan without the
rule for 12.1, the audit of the official wheel, publishing as verified without a GB10, and
installing the yanked release. The release is served on loopback; the client knows nothing of its
publisher but the fingerprint.
"""

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkwright import demo as package
from sparkwright.audit import report
from sparkwright.audit.wheel import cached_audit
from sparkwright.builder import pipeline, plan, pylock, toolchain
from sparkwright.builder.workspace import source_tree
from sparkwright.cli import climb, options
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.core.store import Store, translate_disk_full
from sparkwright.demo import upstreams
from sparkwright.forks import fetch, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Lock, Project, SourceError, render_lock
from sparkwright.gates.core.server_under_test import GateOptions

#: Folders of the store that the demo shares: they hold only files of the package index.
SHARED = ("downloads", "environments", "cache")
#: Address that the demo's index states; no server answers there.
URL = "https://releases.example/"


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Set the function of ``demo``, which has no arguments of its own."""
    parsers["demo"].set_defaults(run=demo)


def demo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every stage and print a line for each."""
    context = options.checkout(arguments)
    stages: list[dict[str, Any]] = []
    with context.store.lock("demo"), translate_disk_full(context.store.root):
        began = time.monotonic()
        for name, says in _stages(prepare(context)):
            stages.append({"name": name, "says": says, "seconds": time.monotonic() - began})
            began = time.monotonic()
    rows = [(stage["name"], stage["says"], f"{stage['seconds']:.1f}") for stage in stages]
    console.table("demo", ["stage", "result", ">seconds"], rows, result=True)
    return {"stages": stages}


def prepare(context: RunContext) -> RunContext:
    """
    Return a context with a fresh demo project, and a store that shares the downloaded tools.

    Raises:
        not-provided: The checkout has no gate policies; the demo has none of its own.
    """
    folder, gates = context.store.root / "demo", context.project.root / "ci" / "gates"
    if not gates.is_dir():
        raise SourceError("not-provided", f"There are no gate policies in {gates}.")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(package.__file__).parent / "project", folder / "project")
    shutil.copytree(gates, folder / "project" / "ci" / "gates")
    # A release is a locked set of packages for one version of Python: that of this machine.
    rules, python = folder / "project" / "ci" / "release.yaml", "{}.{}".format(*sys.version_info)
    rules.write_text(rules.read_text("utf-8").replace("PYTHON", python), "utf-8")
    store = folder / "store"
    store.mkdir()
    for name in SHARED:
        (store / name).symlink_to(context.store.folder(name), target_is_directory=True)
    project = Project(folder / "project", "demo")
    return dataclasses.replace(
        context,
        project=project,
        store=Store(store),
        forks=tuple(project.spec.forks),
        mirrors=upstreams.write_repositories(folder / "upstreams"),
        source="git",
        output=folder / "dist",
    )


@contextlib.contextmanager
def official(context: RunContext, tools: toolchain.Toolchain) -> Iterator[Path]:
    """
    Make the official wheel of mini vLLM, and serve it in the block on a loopback index, which is
    then the package index of this process.
    """
    folder = context.project.root.parent
    with console.step("the mini upstream releases its official wheel"):
        target = toolchain.target(context, tools)
        wheel_path = upstreams.write_base_wheel(
            folder / "index" / "files",
            nvcc=target.cuda / "bin" / "nvcc",
            env=target.environment(),
            scratch=folder / "scratch",
            machine=context.machine,
            compiler=toolchain.compiler_command(context)[0] if context.cross else "",
        )
        upstreams.write_index(folder / "index", wheel_path)
    with upstreams.serve(folder / "index") as address:
        os.environ["SPARKWRIGHT_INDEX_URL"] = f"{address}/simple/"
        yield wheel_path


def lock_stack(context: RunContext) -> Lock:
    """Lock the demo's stack against its repositories and its index."""
    locked = resolve.resolve(context)
    context.project.lock_file.write_text(render_lock(locked), "utf-8")
    return locked


def _stages(context: RunContext) -> Iterator[tuple[str, str]]:
    """Run the stages, and yield the name of each and its result in one line."""
    tools = toolchain.obtain(context)
    yield "tools", f"{len(pylock.wheels(context.project))} wheels by hash, nvcc among them"
    with official(context, tools) as official_wheel:
        yield from _build_stages(context, tools, official_wheel)
        wheels = [pipeline.last_wheel(context, fork) for fork in context.forks]
        yield from _release_stages(context, tuple(filter(None, wheels)))


def _build_stages(
    context: RunContext, tools: toolchain.Toolchain, official_wheel: Path
) -> Iterator[tuple[str, str]]:
    """Run the stages from the lock to the audit."""
    yield "lock", f"{len(lock_stack(context).forks)} commits and a base wheel, by hash"
    sources = [fetch.fetch(context, fork) for fork in context.forks]
    yield "fetch", ", ".join(f"{source.fork} {source.tree[:10]}" for source in sources)
    trees = {fork: source_tree(context, fork) for fork in context.forks}
    patches = sum(len(tree.steps) for tree in trees.values())
    sites = sum(len(tree.sites) for tree in trees.values())
    yield "apply", f"{patches} patches, {sites} rule sites"
    planned = plan.obtain(context, tools, trees["vllm"])
    bare = plan.PlanComparison(planned.key, planned.before, planned.before)
    yield "plan without the rules", _must_fail("arch-mismatch", lambda: plan.check(bare))
    plan.show(planned)
    plan.check(planned)
    counts = planned.after.counts.items()
    yield "plan", ", ".join(f"{count} {state}" for state, count in counts if count)
    wheels = [pipeline.build(context, fork) for fork in context.forks]
    yield "build", ", ".join(wheel.filename.split("-")[0] for wheel in wheels)
    stock = cached_audit(context, official_wheel, "stack")
    yield (
        "audit of the official wheel",
        _must_fail("audit-failed", lambda: report.raise_for_findings(stock)),
    )
    audits = [cached_audit(context, pipeline.wheel_path(context, wheel)) for wheel in wheels]
    report.show(*audits)
    report.raise_for_findings(*audits)
    yield "audit", f"{len(audits)} wheels pass the audit"


def _release_stages(context: RunContext, wheels: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Run the stages from the gates to the installed program, and remove the release again."""
    from sparkwright.client import install as client
    from sparkwright.client.environment import Prefix
    from sparkwright.client.index import open_index
    from sparkwright.release import keys, policy
    from sparkwright.release.publisher import Publisher

    folder = context.project.root.parent
    for path in wheels:
        verdicts = climb.climb(context, GateOptions(wheel=path, only=("G0", "G2"))).verdicts
        _require(verdicts[0].state == "pass", "G0 does not pass for a wheel of the demo.", path)
    yield "gate", f"G0 passes for {len(wheels)} wheels; G2 is {verdicts[1].state} without a GB10"

    keys.make(folder / "keys")
    rules, releases = (
        policy.load(context.project.root, context.project.spec.arch),
        folder / "releases",
    )
    publisher = Publisher(context, releases, keys.load([folder / "keys"]), rules)
    yield (
        "publish as verified",
        _must_fail("verified-refused", lambda: publisher.publish(wheels, url=URL)),
    )
    release = publisher.publish(wheels, "candidate", url=URL)
    missing = {f"{lack.gate} {lack.state}" for lacks in release.missing.values() for lack in lacks}
    yield "publish", f"{release.release}, labelled: {', '.join(sorted(missing))}"

    prefix = Prefix(folder / "user")
    with upstreams.serve(releases) as address:

        def install() -> dict[str, Any]:
            index = open_index(prefix.root / "trust", f"{address}/", release.fingerprint)
            return client.install(prefix, folder / "downloads", index, channel="candidate")

        first, again = install(), install()
        states = (first["state"], again["state"])
        _require(states == ("installed", "there already"), "The installation is wrong.", states)
        yield "install", f"{len(first['added'])} packages, verified; again: {again['state']}"

        answer = process.output([prefix.root / "current" / "bin" / "mini-vllm"]).strip()
        _require(answer == upstreams.ANSWER, "The weights are others.", answer)
        yield "run", f"weights by the patched scale: {answer[:12]} …"

        publisher.yank(release.release, "the demo ends")
        yield "yank", _must_fail("release-yanked", install)
    yield "uninstall", f"{client.uninstall(prefix, release.release)} is removed"


def _must_fail(reference: str, work: Callable[[], object]) -> str:
    """Return the failure of *work* in one line; raise if it does not fail with *reference*."""
    try:
        work()
    except SparkwrightError as error:
        if error.reference != reference:
            raise
        return f"fails as expected: {error.reference}: {error.what}"
    raise CommandError(
        "command-failed",
        f"A stage of the demo that must fail with {reference} did not fail.",
        todo="Please report this; a check does not work.",
    )


def _require(good: bool, what: str, details: object) -> None:
    """
    Raise if a stage has another result than it should.

    Raises:
        command-failed: *good* is False.
    """
    if not good:
        raise CommandError("command-failed", what, details=[str(details)], todo="Please report it.")
